"""Route traces that no engine recorded: converted from CSV, or drawn at random."""

from __future__ import annotations

import csv
import gzip
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from freetoken.experts.route_trace import RouteTrace, TraceError, TraceInfo

_COLUMNS = ("turn", "phase", "step", "layer", "expert", "weight")


def import_csv(path: str | Path) -> RouteTrace:
    """A CSV file (gzip if it ends so) with the columns turn, phase, step, layer, slot, expert and weight after lines
    that begin with ``#``, one of which says ``n_layer=, n_expert=, n_expert_used=``. One publish of one token for each
    (turn, phase, step, layer). Raises ``TraceError``."""
    comments: list[str] = []
    lines: list[str] = []
    with gzip.open(path, "rt") if str(path).endswith(".gz") else open(path) as file:
        for line in file:
            (comments if line.startswith("#") else lines).append(line)
    facts = dict(re.findall(r"\b(\w+)=(\S+)", " ".join(line for line in comments if "n_expert=" in line)))
    sizes = re.findall(r"layer=(\d+) expert_bytes=(\d+)", "".join(comments))
    rows = csv.DictReader(lines)
    missing = [name for name in _COLUMNS if name not in (rows.fieldnames or ())]
    if missing or not {"n_layer", "n_expert", "n_expert_used"} <= facts.keys():
        raise TraceError(f"{path}: not a routing CSV; columns missing: {', '.join(missing) or 'none'}, header {facts}")
    try:
        table = [([int(row[name]) for name in _COLUMNS[:5]], float(row["weight"])) for row in rows]
    except (TypeError, ValueError) as error:
        raise TraceError(f"{path}: a line cannot be read: {error}") from None
    groups: dict[tuple[int, int, int, int], list[tuple[int, float]]] = {}
    for (turn, phase, step, layer, expert), weight in table:
        groups.setdefault((turn, phase, step, layer), []).append((expert, weight))
    layer_of = {layer: i for i, layer in enumerate(sorted({key[3] for key in groups}))}
    keys = sorted(groups)
    step_of = {key: i for i, key in enumerate(sorted({key[:3] for key in keys}))}
    top_k = int(facts["n_expert_used"])
    ids = np.full((len(keys), top_k), -1, np.int32)
    weights = np.zeros((len(keys), top_k), np.float32)
    for i, key in enumerate(keys):
        chosen = groups[key]
        if len(chosen) > top_k or len({expert for expert, _ in chosen}) != len(chosen):
            raise TraceError(
                f"{path}: turn, phase, step, layer {key}: {len(chosen)} experts, not {top_k} distinct ones"
            )
        ids[i, : len(chosen)] = [expert for expert, _ in chosen]
        weights[i, : len(chosen)] = [weight for _, weight in chosen]
    num_experts = int(facts["n_expert"])
    if ids.size and not 0 <= int(ids.max()) < num_experts:
        raise TraceError(f"{path}: it names expert {int(ids.max())} of {num_experts}")
    bytes_of = {int(layer): int(size) for layer, size in sizes}
    record_bytes = tuple(bytes_of[layer] for layer in layer_of) if layer_of.keys() <= bytes_of.keys() else ()
    info = TraceInfo(facts.get("model", "unknown"), len(layer_of), num_experts, top_k, record_bytes, "imported")
    return RouteTrace(
        info,
        np.array([layer_of[key[3]] for key in keys], np.int32),
        np.ones(len(keys), np.int32),
        np.array([step_of[key[:3]] for key in keys], np.int64),
        ids,
        weights,
        np.ones(len(keys), np.uint8),
    )


_MOST_ALPHA = 100.0
"""With more the first experts of a layer are the only ones."""


@dataclass(frozen=True, slots=True)
class SyntheticRoutes:
    """Random routing. Experts are drawn without replacement with probabilities 1 / rank^alpha, each layer having an
    order of its own. ``locality``: the chance that an expert of a stream's last token is kept for the next.
    ``drift_tokens``: after so many tokens the orders are drawn anew (0: never). ``streams`` tokens make a publish."""

    num_tokens: int = 1000
    num_layers: int = 4
    num_experts: int = 128
    top_k: int = 8
    alpha: float = 1.0
    locality: float = 0.0
    drift_tokens: int = 0
    streams: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("num_tokens", 1), ("streams", 1), ("drift_tokens", 0), ("seed", 0)):
            if getattr(self, name) < low:
                raise TraceError(f"synthetic trace: {name} {getattr(self, name)} is below {low}")
        if not 0.0 <= self.alpha <= _MOST_ALPHA:
            raise TraceError(f"synthetic trace: alpha {self.alpha} is not from 0 to {_MOST_ALPHA:g}")
        if not 0.0 <= self.locality < 1.0:
            raise TraceError(f"synthetic trace: locality {self.locality} is not from 0 to below 1")


def draw_trace(shape: SyntheticRoutes) -> RouteTrace:
    """``num_tokens`` steps of ``streams`` tokens each."""
    layers, experts, k = shape.num_layers, shape.num_experts, shape.top_k
    info = TraceInfo("synthetic", layers, experts, k, (), repr(shape))
    random = np.random.default_rng(shape.seed)
    log_weight = -shape.alpha * np.log(np.arange(1, experts + 1))
    orders = _orders(random, layers, experts)
    ids = np.empty((shape.num_tokens, layers, shape.streams, k), np.int32)
    last: NDArray[np.bool_] | None = None
    for step in range(shape.num_tokens):
        if shape.drift_tokens and step and step % shape.drift_tokens == 0:
            orders = _orders(random, layers, experts)
        # The k largest of log(weight) + Gumbel noise are k draws without replacement.
        keys = np.empty((layers, shape.streams, experts))
        noise = random.gumbel(size=keys.shape)
        np.put_along_axis(keys, np.broadcast_to(orders[:, None], keys.shape), log_weight + noise, axis=2)
        if last is not None and shape.locality:
            keys[last & (random.random(keys.shape) < shape.locality)] = np.inf
        chosen = np.argpartition(-keys, k - 1, axis=2)[:, :, :k]
        last = np.zeros(keys.shape, bool)
        np.put_along_axis(last, chosen, True, axis=2)
        ids[step] = chosen
    publishes = shape.num_tokens * layers
    return RouteTrace(
        info,
        np.tile(np.arange(layers, dtype=np.int32), shape.num_tokens),
        np.full(publishes, shape.streams, np.int32),
        np.repeat(np.arange(shape.num_tokens, dtype=np.int64), layers),
        ids.reshape(-1, k),
        np.full((publishes * shape.streams, k), 1.0 / k, np.float32),
        np.ones(publishes * shape.streams, np.uint8),
    )


def _orders(random: np.random.Generator, layers: int, experts: int) -> NDArray[np.int64]:
    return np.argsort(random.random((layers, experts)), axis=1)
