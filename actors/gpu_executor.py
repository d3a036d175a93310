"""The GpuExecutor actor."""

from __future__ import annotations

from typing import ClassVar

from actors.shell import ActorShell
from freetoken.messages import ActorName


class GpuExecutor(ActorShell):
    """Dense layers, resident experts, KV, sampling. The only actor that imports torch."""

    name: ClassVar[ActorName] = ActorName.GPU_EXECUTOR
