"""The Scheduler actor."""

from __future__ import annotations

from typing import ClassVar

from actors.shell import ActorShell
from freetoken.messages import ActorName


class Scheduler(ActorShell):
    """Builds each step while the last one runs."""

    name: ClassVar[ActorName] = ActorName.SCHEDULER
