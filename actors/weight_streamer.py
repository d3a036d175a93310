"""The WeightStreamer actor."""

from __future__ import annotations

from typing import ClassVar

from actors.settings import GroupSettings
from actors.shell import ActorShell
from freetoken.launch_spec import LaunchSpec
from freetoken.messages import ActorName


class WeightStreamer(ActorShell):
    """The expert store: read from the checkpoint, or with ``adopt`` taken over from another holder."""

    name: ClassVar[ActorName] = ActorName.WEIGHT_STREAMER

    def __init__(self, spec: LaunchSpec, settings: GroupSettings, adopt: bool) -> None:
        super().__init__(spec, settings, adopt=adopt)
