"""Parsing shared by families whose configuration follows the Llama keys. Accepts old and new spellings."""

from __future__ import annotations

import re
from typing import Any

from freetoken.errors import UnsupportedModelError
from freetoken.models.spec import ModelSpec, RopeSpec, RouterSpec

_ROPE_KINDS = ("default", "linear", "llama3", "yarn")
_ROPE_REQUIRED = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
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


def parse_rope(config: dict[str, Any], head_dim: int, default_theta: float) -> RopeSpec:
    """``rope_parameters`` (new) or ``rope_theta`` with ``rope_scaling`` (old).

    Numbers that a kind needs and a configuration may leave out (the pre-training length, YaRN's factor) are filled in
    here, so that the tables need nothing but the RopeSpec. Flags become 0.0 or 1.0.
    """
    raw = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if any(isinstance(value, dict) for value in raw.values()):
        raise UnsupportedModelError("rope_parameters that differ between layer types are not supported")
    kind = str(raw.pop("rope_type", None) or raw.get("type") or "default")
    raw.pop("type", None)
    theta = float(raw.pop("rope_theta", None) or config.get("rope_theta") or default_theta)
    if kind not in _ROPE_KINDS:
        raise UnsupportedModelError(f"rope type {kind!r} is not supported; supported: {list(_ROPE_KINDS)}")
    partial = float(raw.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0)
    rotary_dim = int(head_dim * partial)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise UnsupportedModelError(
            f"{rotary_dim} rotary dimensions of {head_dim} are not supported; the number must be even and positive"
        )
    numbers = {key: float(value) for key, value in raw.items() if isinstance(value, (int, float))}
    if kind in ("llama3", "yarn"):
        numbers.setdefault("original_max_position_embeddings", float(config.get("max_position_embeddings") or 2048))
    if kind == "yarn" and "factor" not in numbers:
        longest = float(config.get("max_position_embeddings") or 2048)
        numbers["factor"] = longest / numbers["original_max_position_embeddings"]
    for key in _ROPE_REQUIRED.get(kind, ()):
        if key not in numbers:
            raise UnsupportedModelError(f"rope type {kind!r} needs {key!r}, which the configuration does not give")
    return RopeSpec(theta=theta, kind=kind, rotary_dim=rotary_dim, parameters=tuple(sorted(numbers.items())))


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
    default_theta: float = 10000.0,
) -> ModelSpec:
    """A pre-norm decoder with the Llama keys; the keyword arguments are what differs between families.

    ``config`` already holds the family's defaults for keys that the file left out.
    """
    hidden = int(_required(config, "hidden_size"))
    heads = int(_required(config, "num_attention_heads"))
    kv_heads = int(config.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise UnsupportedModelError(f"{heads} attention heads cannot share {kv_heads} key/value heads evenly")
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
    if router is not None and not 1 <= router.num_experts_per_tok <= router.num_experts:
        raise UnsupportedModelError(
            f"num_experts_per_tok {router.num_experts_per_tok} is not between 1 and {router.num_experts} experts"
        )
    if moe_layers and moe_intermediate_size < 1:
        raise UnsupportedModelError("config.json gives the experts no intermediate size")
    if len(moe_layers) < num_layers and int(config.get("intermediate_size") or 0) < 1:
        raise UnsupportedModelError("config.json has no 'intermediate_size' for its dense layers")
    return ModelSpec(
        family=family,
        architecture=architecture,
        vocab_size=int(_required(config, "vocab_size")),
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=int(config.get("intermediate_size") or 0),
        max_position_embeddings=int(config.get("max_position_embeddings") or 2048),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=parse_rope(config, head_dim, default_theta),
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
