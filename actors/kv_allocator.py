"""The KVAllocator actor."""

from __future__ import annotations

from typing import ClassVar

from actors.shell import ActorShell
from freetoken.messages import ActorName


class KVAllocator(ActorShell):
    """KV blocks and the prefix tree."""

    name: ClassVar[ActorName] = ActorName.KV_ALLOCATOR
