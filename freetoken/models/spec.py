"""ModelSpec: everything the engine needs to know of a model, parsed once from its ``config.json``. No torch here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of the first ``rotary_dim`` dimensions. ``kind`` is ``default``, ``linear``, ``llama3``
    or ``yarn``; ``parameters`` are the numbers that kind needs, by their names in ``rope_parameters``."""

    theta: float
    kind: str = "default"
    rotary_dim: int = 0
    parameters: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """How experts are chosen. ``scoring`` is ``softmax`` (over all experts before top-k). ``renormalize`` divides the
    chosen weights by their sum; ``scaling`` multiplies them."""

    num_experts: int
    num_experts_per_tok: int
    scoring: str = "softmax"
    renormalize: bool = True
    scaling: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only model. Layers whose index is in ``moe_layers`` have routed experts, the others a dense MLP.

    ``moe_layers`` also fixes the *expert layer ordinal* used by records, slots and the mailbox: ordinal i is layer
    ``moe_layers[i]``. ``dtype`` is the dtype of the dense weights on disk (``f32`` or ``bf16``).
    """

    family: str
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeSpec
    dtype: str
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    moe_layers: tuple[int, ...] = ()
    moe_intermediate_size: int = 0
    router: RouterSpec | None = None
    activation: str = "silu"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def is_moe(self) -> bool:
        """Whether any layer has routed experts."""
        return bool(self.moe_layers)

    @property
    def num_experts(self) -> int:
        """E, or 0 for a dense model."""
        return self.router.num_experts if self.router else 0

    @property
    def num_experts_per_tok(self) -> int:
        """K, or 0 for a dense model."""
        return self.router.num_experts_per_tok if self.router else 0

    def kv_bytes_per_token(self, kv_dtype_bytes: int) -> int:
        """Bytes of keys and values that one token occupies over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * kv_dtype_bytes
