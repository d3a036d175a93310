"""Shape of the paged KV."""

from __future__ import annotations

from dataclasses import dataclass

from freetoken.quant.record import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Shape of the paged KV. ``dtype`` is ``f32`` or ``bf16``."""

    num_blocks: int
    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def layer_bytes(self) -> int:
        """Keys and values of one layer within a block record."""
        return 2 * self.block_size * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """One block record."""
        return self.num_layers * self.layer_bytes

    @property
    def size_bytes(self) -> int:
        """All block records."""
        return self.num_blocks * self.block_bytes
