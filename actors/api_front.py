"""The ApiFront actor."""

from __future__ import annotations

from typing import Any, ClassVar

from actors.handles import ControllerClient
from actors.settings import GroupSettings
from actors.shell import ActorShell
from freetoken.launch_spec import LaunchSpec
from freetoken.messages import ActorName


class ApiFront(ActorShell):
    """The HTTP server. ``controller`` is the Controller's Ray handle, valid across its restarts."""

    name: ClassVar[ActorName] = ActorName.API_FRONT

    def __init__(self, spec: LaunchSpec, settings: GroupSettings, controller: Any) -> None:
        super().__init__(spec, settings, control=ControllerClient(controller))
