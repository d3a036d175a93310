"""The CpuExecutor actor."""

from __future__ import annotations

from typing import ClassVar

from actors.shell import ActorShell
from freetoken.messages import ActorName


class CpuExecutor(ActorShell):
    """Experts computed in place, on the CPU."""

    name: ClassVar[ActorName] = ActorName.CPU_EXECUTOR
