"""Parsing shared by families whose configuration follows the Llama keys. Accepts old and new spellings."""

from __future__ import annotations

import re
from typing import Any

from freetoken.errors import UnsupportedModelError
from freetoken.models.spec import ModelSpec, RopeSpec, RouterSpec

_ROPE_KINDS = ("default", "linear", "llama3", "yarn")
_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f32"}
_DENSE_NAME = re.compile(
    r"(?:model\.embed_tokens\.weight|model\.norm\.weight|lm_head\.weight"
    r"|model\.layers\.\d+\.(?:input_layernorm|post_attention_layernorm)\.weight"
    r"|model\.layers\.\d+\.self_attn\.(?:[qkvo]_proj\.(?:weight|bias)|[qk]_norm\.weight)"
    r"|model\.layers\.\d+\.mlp\.(?:(?:gate|up|down)_proj\.(?:weight|bias)|gate\.weight))"
)


def _required(config: dict[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise UnsupportedModelError(f"config.json has no {key!r}")
    return config[key]


def parse_rope(config: dict[str, Any], head_dim: int) -> RopeSpec:
    """``rope_parameters`` (new) or ``rope_theta`` with ``rope_scaling`` (old)."""
    raw = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = str(raw.pop("rope_type", raw.pop("type", "default")))
    raw.pop("type", None)
    theta = float(raw.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    if kind not in _ROPE_KINDS:
        raise UnsupportedModelError(f"rope type {kind!r} is not supported; supported: {list(_ROPE_KINDS)}")
    partial = float(raw.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0)
    numbers = tuple(sorted((k, float(v)) for k, v in raw.items() if isinstance(v, (int, float))))
    return RopeSpec(theta=theta, kind=kind, rotary_dim=int(head_dim * partial), parameters=numbers)


def parse_decoder(
    config: dict[str, Any],
    family: str,
    architecture: str,
    *,
    qk_norm: bool = False,
    attention_bias: bool = False,
    attention_out_bias: bool = False,
    mlp_bias: bool = False,
    moe_layers: tuple[int, ...] = (),
    moe_intermediate_size: int = 0,
    router: RouterSpec | None = None,
    sliding_window: int | None = None,
    sliding_layers: tuple[int, ...] = (),
) -> ModelSpec:
    """A pre-norm decoder with the Llama keys; the keyword arguments are what differs between families."""
    hidden = int(_required(config, "hidden_size"))
    heads = int(_required(config, "num_attention_heads"))
    head_dim = int(config.get("head_dim") or hidden // heads)
    activation = str(config.get("hidden_act", "silu"))
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"hidden_act {activation!r} is not supported; supported: silu")
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    if dtype not in _DTYPES:
        raise UnsupportedModelError(f"dtype {dtype!r} is not supported; supported: {sorted(_DTYPES)}")
    eos = config.get("eos_token_id")
    eos_ids = () if eos is None else tuple(int(e) for e in (eos if isinstance(eos, list) else [eos]))
    num_layers = int(_required(config, "num_hidden_layers"))
    return ModelSpec(
        family=family,
        architecture=architecture,
        vocab_size=int(_required(config, "vocab_size")),
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        intermediate_size=int(config.get("intermediate_size") or 0),
        max_position_embeddings=int(config.get("max_position_embeddings") or 2048),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=parse_rope(config, head_dim),
        dtype=_DTYPES[dtype],
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=attention_bias,
        attention_out_bias=attention_out_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        sliding_window=sliding_window,
        sliding_layers=sliding_layers,
        moe_layers=moe_layers,
        moe_intermediate_size=moe_intermediate_size,
        router=router,
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=eos_ids,
    )


def classify_llama_tensor(spec: ModelSpec, name: str) -> tuple[Any, ...] | None:
    """Roles of the names that Llama-shaped decoders share."""
    if name.endswith("rotary_emb.inv_freq"):
        return ("skipped", "derived from the configuration")
    if name == "lm_head.weight" and spec.tie_word_embeddings:
        return ("skipped", "tied to the embedding")
    return ("dense", name) if _DENSE_NAME.fullmatch(name) else None
