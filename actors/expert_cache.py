"""The ExpertCache actor."""

from __future__ import annotations

from typing import ClassVar

from actors.shell import ActorShell
from freetoken.messages import ActorName


class ExpertCache(ActorShell):
    """Expert slots, and where each expert runs."""

    name: ClassVar[ActorName] = ActorName.EXPERT_CACHE
