"""What the routers of a made-up model choose, measured: a model whose routing collapses flatters every cache."""

from __future__ import annotations

import dataclasses
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freetoken import _native
from freetoken.checkpoint.synthetic.forward import EXACT_WEIGHTS, SyntheticModel
from freetoken.checkpoint.synthetic.locality import benchmark_prompt
from freetoken.checkpoint.synthetic.weights import SyntheticWeights
from freetoken.errors import CheckpointError

WINDOW_TOKENS = 64
_LOGIT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class LayerRouting:
    """Of one layer, or the mean of all.

    ``distinct_experts``: different experts that ``WINDOW_TOKENS`` consecutive tokens choose together.
    ``overlap``: share of a token's experts that the token before it had chosen too (chance: K / E).
    ``entropy_bits``: of the use of experts over all measured tokens.
    """

    distinct_experts: float
    overlap: float
    entropy_bits: float


@dataclass(frozen=True, slots=True)
class SequenceRouting:
    """Routing along one kind of sequence; layers are model layers."""

    mean: LayerRouting
    layers: dict[int, LayerRouting]


@dataclass(frozen=True, slots=True)
class RoutingReport:
    """``walk`` is a greedy generation, ``prompt`` independent tokens, ``uniform`` what perfectly random choices of as
    many tokens would show; None for all three when the model has no experts.

    ``walk_followed``: share of positions where the largest logit is the walk's next token. ``residual_cosine``: mean
    cosine between a token's embedding and its residual after the last layer. ``experts`` is ``computed`` or ``sampled``
    (see ``forward``).
    """

    num_tokens: int
    experts: str
    walk: SequenceRouting | None
    prompt: SequenceRouting | None
    uniform: LayerRouting | None
    walk_followed: float
    residual_cosine: float
    largest_activation: float
    largest_logit: float

    def to_json(self) -> dict[str, Any]:
        """For the checkpoint's source description; numbers have four significant digits."""
        data: dict[str, Any] = _rounded(dataclasses.asdict(self))
        return data


def measure_routing(
    weights: SyntheticWeights, num_tokens: int = 128, num_threads: int = 1, exact_weights: int = EXACT_WEIGHTS
) -> RoutingReport:
    """Run two sequences of ``num_tokens`` (at least ``WINDOW_TOKENS``) through the model as ``forward`` describes.

    Raises ``CheckpointError`` when activations or logits are not finite: such a model would be of no use.
    """
    spec = weights.spec
    if not WINDOW_TOKENS <= num_tokens <= spec.max_position_embeddings:
        raise CheckpointError(
            f"routing cannot be measured over {num_tokens} tokens; it takes {WINDOW_TOKENS} to "
            f"{spec.max_position_embeddings}"
        )
    walk = weights.walk.after(int(weights.walk.order[0]), num_tokens + 1)
    sequences = np.stack([walk[:-1], benchmark_prompt(spec, num_tokens, 0.0, weights.seed)])
    last = slice(num_tokens - _LOGIT_TOKENS, num_tokens)
    workers = _native.WorkerPool(num_threads)
    try:
        with ThreadPoolExecutor(num_threads, "measure") as pool:
            model = SyntheticModel(weights, pool, workers, exact_weights)
            embeddings = model.embed(sequences)
            run = model.forward(sequences)
            logits = model.logits(run.residual[0, last])
    finally:
        workers.close()
    if not (np.isfinite(run.residual).all() and np.isfinite(logits).all()):
        raise CheckpointError("the generated model is not numerically sane: activations or logits are not finite")
    lengths = np.linalg.norm(embeddings, axis=-1) * np.linalg.norm(run.residual, axis=-1)
    by_sequence = [
        _along([chosen[i] for chosen in run.chosen], spec.moe_layers, spec.num_experts) if spec.is_moe else None
        for i in range(2)
    ]
    return RoutingReport(
        num_tokens=num_tokens,
        experts="computed" if run.exact_experts else "sampled",
        walk=by_sequence[0],
        prompt=by_sequence[1],
        uniform=uniform_routing(spec.num_experts, spec.num_experts_per_tok, num_tokens) if spec.is_moe else None,
        walk_followed=float(np.mean(logits.argmax(-1) == walk[1:][last])),
        residual_cosine=float(np.mean((embeddings * run.residual).sum(-1) / lengths)),
        largest_activation=run.largest_activation,
        largest_logit=float(np.abs(logits).max()),
    )


def uniform_routing(num_experts: int, num_experts_per_tok: int, num_tokens: int) -> LayerRouting:
    """Expected figures when every token chooses uniformly; entropy with the bias of a finite count (first order)."""
    share = num_experts_per_tok / num_experts
    uses = num_tokens * num_experts_per_tok
    return LayerRouting(
        distinct_experts=num_experts * (1 - (1 - share) ** WINDOW_TOKENS),
        overlap=share,
        entropy_bits=math.log2(num_experts) - (num_experts - num_experts_per_tok) / (2 * uses * math.log(2)),
    )


def layer_routing(chosen: NDArray[np.int64], num_experts: int) -> LayerRouting:
    """The figures of choices ``[T, K]``."""
    used = np.zeros((len(chosen), num_experts), bool)
    np.put_along_axis(used, chosen, True, axis=1)
    windows = [used[i : i + WINDOW_TOKENS] for i in range(0, len(used) - WINDOW_TOKENS + 1, WINDOW_TOKENS)]
    shares = used.sum(0) / used.sum()
    positive = shares[shares > 0]
    return LayerRouting(
        distinct_experts=float(np.mean([window.any(0).sum() for window in windows])),
        overlap=float((used[1:] & used[:-1]).sum() / (chosen.shape[1] * (len(used) - 1))),
        entropy_bits=float(-(positive * np.log2(positive)).sum()),
    )


def _along(chosen: list[NDArray[np.int64]], layers: tuple[int, ...], num_experts: int) -> SequenceRouting:
    each = [layer_routing(ids, num_experts) for ids in chosen]
    mean = LayerRouting(*(float(np.mean(column)) for column in zip(*map(dataclasses.astuple, each), strict=True)))
    return SequenceRouting(mean, {layer: each[i] for i, layer in enumerate(layers)})


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _rounded(item) for key, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value
