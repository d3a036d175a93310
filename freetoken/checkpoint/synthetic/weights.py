"""The weights of a made-up model: any rows of any tensor, from seed and name alone.

The embedding dominates the residual stream. Its rows have variance 1, while the outputs of all attention and MLP
blocks together have ``BRANCH_RMS``: every block's output projection is scaled so that it adds its share of that and
no more. A router therefore sees mostly the token, and as embeddings and routers are random, different tokens choose
different experts, in every layer anew. Random weights without this care do the opposite: what the blocks add is much
alike for all tokens, grows from layer to layer, and in the end all tokens choose the same few experts.

Output embeddings make the model *walk* (see ``locality``): the row of a token points along the embedding of its
predecessor, so that under greedy sampling a known token follows each token. A generation has the locality of the walk
and does not get caught in a loop, however long it runs.

Q4_0 weights are random bits: codes uniform in 0 to 15, scales of both signs (or the codes' mean of -0.5 would be a
common direction of all outputs) within a quarter of their mean size. BF16 and F32 weights are normal.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freetoken.checkpoint.synthetic.locality import GROUP_TOKENS, cosine_for_locality, plan_walk
from freetoken.checkpoint.synthetic.streams import normal_table, normals, random_bytes, random_levels, stream
from freetoken.errors import CheckpointError
from freetoken.models.registry import dense_tensor_names, parse_model_config
from freetoken.models.spec import ModelSpec, RouterSpec
from freetoken.quant import bf16
from freetoken.quant.q4_0 import BLOCK_BYTES, BLOCK_ELEMENTS
from freetoken.quant.q4_0_record import dequantize_blocks, quantize_blocks

DTYPES = ("bf16", "f32", "q4_0")
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"

BRANCH_RMS = 0.4
"""What all blocks together add to a residual of 1."""
ROUTER_STD = 2.0
"""Of router logits."""
_NORM_SPREAD = 0.1
_WALK_LOGIT = 20.0  # of the next token of the walk; e^20 outweighs any vocabulary
_WALK_SHARE = 0.8  # of an output row along its predecessor; the rest is its own
_GROUP_SHARE = 0.15  # of that, squared, along the predecessor's group
_CHUNK_ELEMENTS = 1 << 19  # of one stream; with the table they stay in a core's cache
_SCALE_SPREAD = 0.25
_CODE_RMS = math.sqrt(np.mean((np.arange(16) - 8.0) ** 2))

F32 = NDArray[np.float32]
Stored = NDArray[Any]
"""Rows as files have them: float32, uint16 holding BF16, or uint8 blocks of Q4_0 ``[rows, columns / 32, 18]``."""


def to_f32(rows: Stored) -> F32:
    """The values of stored rows."""
    if rows.dtype == np.uint8:
        return dequantize_blocks(rows)
    return bf16.to_f32(rows) if rows.dtype == np.uint16 else rows


class SyntheticWeights:
    """One model's weights. Immutable; any method may be called from any thread.

    Raises ``CheckpointError`` for an unknown dtype, a locality out of range, or dimensions that Q4_0's blocks do not
    divide.
    """

    def __init__(self, config: Mapping[str, Any], dtype: str, locality: float = 0.0, seed: int = 0) -> None:
        if dtype not in DTYPES:
            raise CheckpointError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
        self.config = {**config, "dtype": "bfloat16" if dtype == "bf16" else "float32"}
        self.dtype = dtype
        self.locality = locality
        self.seed = seed
        self.spec: ModelSpec = parse_model_config(self.config)
        self.shapes: dict[str, tuple[int, ...]] = dense_tensor_names(self.spec)
        self.cosine = cosine_for_locality(locality, self.spec.num_experts, self.spec.num_experts_per_tok)
        self.walk = plan_walk(self.spec.vocab_size, seed)
        if dtype == "q4_0":
            self._check_blocks()
        layers = max(1, self.spec.num_layers)
        self._branch_rms = BRANCH_RMS / math.sqrt(2 * layers)
        mixed = 1.0 if self.spec.router is None else _mixing_rms(self.spec.router)
        self._gated_rms = _gated_rms()
        self._expert_down_std = self._branch_rms / (
            self._gated_rms * mixed * math.sqrt(self.spec.moe_intermediate_size or 1)
        )

    def _check_blocks(self) -> None:
        widths = {f"tensor {n!r}": s[-1] for n, s in self.shapes.items() if self.dtype_of(n) == "q4_0"}
        if self.spec.is_moe:
            widths["an expert's down projection"] = self.spec.moe_intermediate_size
        for what, width in widths.items():
            if width % BLOCK_ELEMENTS:
                raise CheckpointError(f"q4_0: {what} has rows of {width}, which blocks of {BLOCK_ELEMENTS} do not fill")

    # ------------------------------------------------------------------------------------------------ dense tensors

    def dtype_of(self, name: str) -> str:
        """How a dense tensor is stored. Beside Q4_0, norms, biases and routers are F32."""
        if self.dtype != "q4_0":
            return self.dtype
        return "f32" if len(self.shapes[name]) == 1 or name.endswith(".mlp.gate.weight") else "q4_0"

    def chunks(self, name: str) -> list[tuple[int, int]]:
        """Row ranges that cover a dense tensor and can be made one by one without waste."""
        num_rows = self.shapes[name][0]
        if len(self.shapes[name]) == 1 or name.endswith(".mlp.gate.weight"):
            return [(0, num_rows)]
        step = _rows_per_chunk(self.shapes[name][1])
        if name in (EMBEDDING, OUTPUT):
            step = max(1, step // GROUP_TOKENS) * GROUP_TOKENS
        return [(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Stored:
        """Rows ``start:stop`` (elements, for a vector) of a dense tensor, as stored."""
        shape = self.shapes[name]
        stop = shape[0] if stop is None else stop
        dtype = self.dtype_of(name)
        if len(shape) == 1:
            values = self._vector(name, shape[0])[start:stop]
        elif name == EMBEDDING:
            values = self._by_group(self._embedding_group, start, stop)
        elif name == OUTPUT:
            values = self._by_group(self._output_group, start, stop)
        elif name.endswith(".mlp.gate.weight"):
            values = self._router(name, shape)[start:stop]
        else:
            return self._matrix(name, start, stop, shape[1], self._projection_std(name), dtype)
        return _store(values, dtype)

    def _vector(self, name: str, size: int) -> F32:
        noise = normals(stream(self.seed, name), (size,))
        return np.float32(0.1) * noise if name.endswith("bias") else 1 + np.float32(_NORM_SPREAD) * noise

    def _router(self, name: str, shape: tuple[int, ...]) -> F32:
        """Rows of equal length, so that no expert is favoured."""
        noise = normals(stream(self.seed, name), shape)
        return noise * (np.float32(ROUTER_STD) / np.linalg.norm(noise, axis=1, keepdims=True))

    def _projection_std(self, name: str) -> float:
        columns = self.shapes[name][1]
        if name.endswith("o_proj.weight"):
            return self._branch_rms / math.sqrt(columns)
        if name.endswith("down_proj.weight"):
            return self._branch_rms / (self._gated_rms * math.sqrt(columns))
        return 1 / math.sqrt(columns)

    # --------------------------------------------------------------------------------------------------- embeddings

    def _by_group(self, make: Any, start: int, stop: int) -> F32:
        """Rows ``start:stop`` out of groups."""
        first, last = start // GROUP_TOKENS, -(-stop // GROUP_TOKENS)
        rows = np.concatenate([make(group) for group in range(first, last)])
        return rows[start - first * GROUP_TOKENS :][: stop - start]

    def _noise(self, group: int) -> F32:
        return normals(stream(self.seed, f"embedding/{group}"), (GROUP_TOKENS, self.spec.hidden_size))

    def _centroid(self, group: int) -> F32:
        return normals(stream(self.seed, f"centroid/{group}"), (self.spec.hidden_size,))

    def _blend(self, group: int, noise: F32, share: float) -> F32:
        """``share`` of the variance from the group's centroid."""
        if share == 0:
            return noise
        return np.float32(math.sqrt(share)) * self._centroid(group) + np.float32(math.sqrt(1 - share)) * noise

    def _embedding_group(self, group: int) -> F32:
        return self._blend(group, self._noise(group), self.cosine)

    def _output_group(self, group: int) -> F32:
        """Output rows of a group. Against embeddings, the group's direction counts less here and the token's own more:
        what tells the tokens of a group apart must stand out."""
        hidden = self.spec.hidden_size
        share = _GROUP_SHARE if self.cosine else 0.0
        match = math.sqrt(share * self.cosine) + math.sqrt((1 - share) * (1 - self.cosine))
        scale = _WALK_LOGIT / (_WALK_SHARE * match * hidden)
        rows = normals(stream(self.seed, f"output/{group}"), (GROUP_TOKENS, hidden))
        rows *= np.float32(scale * math.sqrt(1 - _WALK_SHARE**2))
        tokens = group * GROUP_TOKENS + np.arange(GROUP_TOKENS)
        ordinary = np.flatnonzero(tokens < len(self.walk.order))
        before = self.walk.before(tokens[ordinary])
        for origin in np.unique(before // GROUP_TOKENS).tolist():
            mine = before // GROUP_TOKENS == origin
            directions = self._blend(origin, self._noise(origin)[before[mine] % GROUP_TOKENS], share)
            rows[ordinary[mine]] += np.float32(scale * _WALK_SHARE) * directions
        return rows

    # ------------------------------------------------------------------------------------------------------ experts

    def expert(self, layer: int, expert: int, part: str) -> Stored:
        """``gate`` or ``up`` ``[I, H]`` or ``down`` ``[H, I]`` of an expert of expert layer ordinal ``layer``."""
        hidden, inner = self.spec.hidden_size, self.spec.moe_intermediate_size
        name = f"layer {self.spec.moe_layers[layer]} expert {expert} {part}"
        if part == "down":
            return self._matrix(name, 0, hidden, inner, self._expert_down_std, self.dtype)
        return self._matrix(name, 0, inner, hidden, 1 / math.sqrt(hidden), self.dtype)

    def _matrix(self, name: str, start: int, stop: int, columns: int, std: float, dtype: str) -> Stored:
        """Rows of independent weights. A chunk's stream is read from its first row on."""
        step = _rows_per_chunk(columns)
        parts = []
        for chunk in range(start // step, -(-stop // step)):
            begin, end = chunk * step, min((chunk + 1) * step, stop)
            part = _draw(stream(self.seed, f"{name}/{chunk}"), end - begin, columns, std, dtype)
            parts.append(part[max(0, start - begin) :])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _rows_per_chunk(columns: int) -> int:
    return max(1, _CHUNK_ELEMENTS // columns)


def _store(values: F32, dtype: str) -> Stored:
    if dtype == "q4_0":
        return quantize_blocks(values)
    return bf16.from_f32(values) if dtype == "bf16" else values


def _draw(source: Any, num_rows: int, columns: int, std: float, dtype: str) -> Stored:
    if dtype == "q4_0":
        blocks_per_row = columns // BLOCK_ELEMENTS
        raw = random_bytes(source, num_rows * blocks_per_row * BLOCK_BYTES)
        blocks = raw.reshape(num_rows * blocks_per_row, BLOCK_BYTES)
        levels = np.ascontiguousarray(blocks[:, :2]).view(np.uint16)
        blocks[:, :2] = _scale_table(std)[levels].view(np.uint8)
        return raw.reshape(num_rows, blocks_per_row, BLOCK_BYTES)
    values: Stored = _value_table(std, dtype)[random_levels(source, (num_rows, columns))]
    return values


@functools.lru_cache(maxsize=64)
def _value_table(std: float, dtype: str) -> Stored:
    return _store(normal_table() * np.float32(std), dtype)


@functools.lru_cache(maxsize=64)
def _scale_table(std: float) -> NDArray[np.float16]:
    """Scales that give random codes a variance of ``std ** 2``, by 16 random bits: a sign and 15 bits of size."""
    mean_square = 1 + _SCALE_SPREAD**2 / 3
    mean = std / (_CODE_RMS * math.sqrt(mean_square))
    sizes = mean * (1 + _SCALE_SPREAD * np.linspace(-1, 1, 1 << 15))
    return np.concatenate([sizes, -sizes]).astype("<f2")


def _gated_rms() -> float:
    """Of silu(g) * u for normal g and u."""
    g = normal_table().astype(np.float64)
    return math.sqrt(np.mean((g / (1 + np.exp(-g))) ** 2))


def _mixing_rms(router: RouterSpec) -> float:
    """The expected length of a token's routing weights: what mixing leaves of independent outputs of size 1."""
    random = np.random.default_rng(0)
    logits = ROUTER_STD * random.standard_normal((1000, router.num_experts))
    top = np.sort(np.exp(logits), axis=1)[:, -router.num_experts_per_tok :]
    weights = top / (top if router.renormalize else np.exp(logits)).sum(1, keepdims=True)
    return router.scaling * math.sqrt(np.mean((weights**2).sum(1)))
