"""A forward pass of made-up weights made layer by layer and forgotten again, to see what routers choose.

Norms, attention and routers are computed in full, from the weights as stored. So are experts, as long as few enough
are needed; in a large model the outputs of experts are *sampled*: in the first, the middle and the last expert layer,
the experts of a few tokens are computed, and everywhere else random vectors of the same size take their place.
Outputs of random experts are random vectors, so what is lost is only how alike the outputs for like tokens are.
"""

from __future__ import annotations

import functools
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from freetoken import _native
from freetoken.checkpoint.synthetic.parallel import ordered_map
from freetoken.checkpoint.synthetic.streams import normals, stream
from freetoken.checkpoint.synthetic.weights import EMBEDDING, F32, SyntheticWeights, to_f32
from freetoken.models.rope import rope_tables

EXACT_WEIGHTS = 1 << 28
"""Experts are computed in full when no more weights than this are needed for that."""
_PROBED_TOKENS = 2
_AHEAD = 32
_AHEAD_BYTES = 512 * 1024**2


@dataclass(slots=True)
class Forward:
    """What a pass over sequences ``[B, T]`` saw; ``chosen`` has ``[B, T, K]`` for each expert layer."""

    residual: F32
    chosen: list[NDArray[np.int64]] = field(default_factory=list)
    exact_experts: bool = True
    largest_activation: float = 0.0
    """Of the residual and of what is added to it."""
    expert_rms: float = 0.0
    """Of the last outputs of experts that were computed for sampling."""


class SyntheticModel:
    """Runs ``weights``; ``pool`` makes them and ``workers`` multiply (BLAS threads would fight with the pool's)."""

    def __init__(
        self,
        weights: SyntheticWeights,
        pool: Executor,
        workers: _native.WorkerPool,
        exact_weights: int = EXACT_WEIGHTS,
    ) -> None:
        self._weights = weights
        self._spec = weights.spec
        self._pool = pool
        self._workers = workers
        self._exact_weights = exact_weights

    def embed(self, tokens: NDArray[np.int64]) -> F32:
        """``[...]`` to ``[..., H]``."""
        rows = ordered_map(self._pool, self._embedding_row, tokens.reshape(-1).tolist(), _AHEAD)
        return np.stack(list(rows)).reshape(*tokens.shape, self._spec.hidden_size)

    def _embedding_row(self, token: int) -> F32:
        return to_f32(self._weights.rows(EMBEDDING, token, token + 1))[0]

    def forward(self, sequences: NDArray[np.int64]) -> Forward:
        """All layers over ``[B, T]`` token ids, each sequence from position 0."""
        spec = self._spec
        length = sequences.shape[1]
        run = Forward(self.embed(sequences))
        needed = min(sequences.size * spec.num_experts_per_tok, spec.num_experts)
        needed *= 3 * spec.hidden_size * spec.moe_intermediate_size * len(spec.moe_layers)
        run.exact_experts = needed <= self._exact_weights
        cos, sin = rope_tables(spec.rope, length)
        for layer in range(spec.num_layers):
            prefix = f"model.layers.{layer}."
            window = spec.sliding_window if layer in spec.sliding_layers else None
            hidden = self._norm(run.residual, prefix + "input_layernorm")
            run.residual += self._attention(prefix, hidden, cos, sin, window)
            hidden = self._norm(run.residual, prefix + "post_attention_layernorm")
            if layer in spec.moe_layers:
                delta = self._routed(run, layer, hidden.reshape(-1, spec.hidden_size)).reshape(hidden.shape)
            else:
                gate, up = (self._linear(hidden, f"{prefix}mlp.{part}_proj") for part in ("gate", "up"))
                delta = self._linear(_silu(gate) * up, prefix + "mlp.down_proj")
            run.residual += delta
            run.largest_activation = max(run.largest_activation, _largest(delta), _largest(run.residual))
        return run

    def _routed(self, run: Forward, layer: int, hidden: F32) -> F32:
        """The routed experts of model layer ``layer``, computed or sampled, for ``[N, H]``; notes the choices."""
        ids, mixing = self._route(hidden, f"model.layers.{layer}.")
        run.chosen.append(ids.reshape(*run.residual.shape[:2], -1))
        ordinal = self._spec.moe_layers.index(layer)
        if run.exact_experts:
            return self._experts(ordinal, hidden, ids, mixing)
        delta = normals(stream(self._weights.seed, f"measure/{layer}"), hidden.shape)
        last = len(self._spec.moe_layers) - 1
        if ordinal not in (0, last // 2, last):
            return delta * np.float32(run.expert_rms)
        some = slice(_PROBED_TOKENS)
        probed = self._experts(ordinal, hidden[some], ids[some], mixing[some])
        run.expert_rms = float(np.sqrt(np.mean(probed**2)))
        delta *= np.float32(run.expert_rms)
        delta[some] = probed
        return delta

    def logits(self, residual: F32) -> F32:
        """``[N, H]`` after the last layer to ``[N, V]``."""
        return self._linear(self._norm(residual, "model.norm"), "lm_head")

    # -------------------------------------------------------------------------------------------------- operations

    def _norm(self, x: F32, name: str) -> F32:
        return _rms_norm(x, to_f32(self._weights.rows(name + ".weight")), self._spec.rms_norm_eps)

    def _linear(self, x: F32, name: str) -> F32:
        """Chunk by chunk of rows, so that no large matrix exists as a whole."""
        name += ".weight"
        make = functools.partial(self._chunk, name)
        chunks = ordered_map(self._pool, make, self._weights.chunks(name), _AHEAD)
        return np.concatenate([self._product(x, chunk) for chunk in chunks], axis=-1)

    def _product(self, x: F32, matrix: F32) -> F32:
        """``[..., I]`` by ``[O, I]`` to ``[..., O]``."""
        flat = np.ascontiguousarray(x).reshape(-1, x.shape[-1])
        out = np.empty((len(flat), len(matrix)), np.float32)
        _native.linear(self._workers, flat, np.ascontiguousarray(matrix), None, out)
        return out.reshape(*x.shape[:-1], len(matrix))

    def _chunk(self, name: str, rows: tuple[int, int]) -> F32:
        return to_f32(self._weights.rows(name, *rows))

    def _attention(self, prefix: str, x: F32, cos: F32, sin: F32, window: int | None) -> F32:
        spec = self._spec
        batch, length = x.shape[:2]
        heads = {"q": spec.num_heads, "k": spec.num_kv_heads, "v": spec.num_kv_heads}
        q, k, v = (
            self._linear(x, f"{prefix}self_attn.{p}_proj").reshape(batch, length, n, spec.head_dim)
            for p, n in heads.items()
        )
        if spec.qk_norm:
            q, k = self._norm(q, prefix + "self_attn.q_norm"), self._norm(k, prefix + "self_attn.k_norm")
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        shared = spec.num_heads // spec.num_kv_heads
        distance = np.arange(length)[:, None] - np.arange(length)[None, :]
        hidden = (distance < 0) | (distance >= (window or length))
        mixed = np.empty_like(q)
        for i, head in np.ndindex(batch, spec.num_heads):
            scores = self._product(q[i, :, head], k[i, :, head // shared]) * np.float32(spec.head_dim**-0.5)
            scores[hidden] = -np.inf
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            scores /= scores.sum(-1, keepdims=True)
            mixed[i, :, head] = self._product(scores, v[i, :, head // shared].T)
        return self._linear(mixed.reshape(batch, length, -1), prefix + "self_attn.o_proj")

    def _route(self, hidden: F32, prefix: str) -> tuple[NDArray[np.int64], F32]:
        """Ids by descending probability, and their weights."""
        router = self._spec.router
        assert router is not None
        logits = self._linear(hidden, prefix + "mlp.gate")
        ids = np.argsort(-logits, axis=-1, kind="stable")[..., : router.num_experts_per_tok]
        shares = np.exp(logits - logits.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        mixing = np.take_along_axis(shares, ids, -1)
        if router.renormalize:
            mixing = mixing / mixing.sum(-1, keepdims=True)
        return ids, mixing * np.float32(router.scaling)

    def _experts(self, ordinal: int, x: F32, ids: NDArray[np.int64], mixing: F32) -> F32:
        """``[N, H]`` with ids and mixing ``[N, K]``: the weighted sum of experts, each made once."""
        out = np.zeros_like(x)
        used = np.unique(ids).tolist()
        size = 12 * self._spec.hidden_size * self._spec.moe_intermediate_size
        ahead = max(1, min(_AHEAD, _AHEAD_BYTES // size))
        made = ordered_map(self._pool, functools.partial(self._expert, ordinal), used, ahead)
        for expert, (gate, up, down) in zip(used, made, strict=True):
            token, rank = np.nonzero(ids == expert)
            rows = x[token]
            inner = _silu(self._product(rows, gate)) * self._product(rows, up)
            out[token] += mixing[token, rank][:, None] * self._product(inner, down)
        return out

    def _expert(self, ordinal: int, expert: int) -> tuple[F32, F32, F32]:
        gate, up, down = (to_f32(self._weights.expert(ordinal, expert, part)) for part in ("gate", "up", "down"))
        return gate, up, down


def _rms_norm(x: F32, weight: F32, eps: float) -> F32:
    scale = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))
    return (x / scale * weight).astype(np.float32)


def _largest(x: F32) -> float:
    return float(np.abs(x).max())


def _silu(x: F32) -> F32:
    return x / (1 + np.exp(-x))


def _rotate(x: F32, cos: F32, sin: F32) -> F32:
    """``[B, T, heads, D]`` by position."""
    half = cos.shape[1]
    first, second = x[..., :half], x[..., half : 2 * half]
    c, s = cos[None, :, None, :], sin[None, :, None, :]
    return np.concatenate([first * c - second * s, second * c + first * s, x[..., 2 * half :]], axis=-1)
