"""Key/value blocks: who holds which, and which prefixes they hold. Only bookkeeping: GpuExecutor has the bytes."""

from freetoken.kv.allocator import BlockResize, IntegrityError, KVAllocator

__all__ = ["BlockResize", "IntegrityError", "KVAllocator"]
