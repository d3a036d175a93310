"""How a prefill chunk should get at its experts: in shared passes, which fetch what they touch and leave a part of it
to the CPU, or in one streaming pass, for which all is staged. Pure; no torch.

Layers without experts, and what tokens cost the device however they are cut, are left out: both are the same in either
way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from freetoken.costs import CostModel, SideCost
from freetoken.execution.cuda.pieces import PIECE_TOKENS

# Of records that are not pinned: one thread copies them into pinned buffers. Assumed.
_BOUNCE_BYTE_NS = 1 / 8.0
# Of a layer in every pass, however few its tokens: launches and dense weights. Assumed.
_PASS_NS = 100e3
# Of a layer more in a streaming pass: the host sees the plan and arranges the next layer's copies. Assumed.
_FOLLOW_NS = 50e3

Counts = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Missing:
    """Records without a slot by layer, [L]: ``all`` of them, and those that only staging brings to the device."""

    all: Counts
    unpinned: Counts


@dataclass(frozen=True, slots=True, eq=False)
class PrefillCosts:
    """``record_bytes`` [L] of one expert. ``fetch_fraction``: share of misses that the device runs itself when
    the CPU takes part; None: as many as make both finish together. ``costs`` are those of this machine as far as they
    were measured. ``unpinned`` [L, E]: records that only staging brings to the device. ``capacity``: records of a layer
    that staging has room for. ``overlaps``: a layer is staged while the one before is computed."""

    num_experts: int
    top_k: int
    record_bytes: Counts
    fetch_fraction: float | None
    costs: CostModel
    unpinned: NDArray[np.bool_]
    capacity: int
    overlaps: bool = True

    def missing(self, slot_of: NDArray[np.int32]) -> Missing:
        """By the slots of the records, [L, E], -1 for none. Others may change them meanwhile."""
        without = slot_of < 0
        return Missing(without.sum(axis=1).astype(np.float64), (without & self.unpinned).sum(axis=1).astype(np.float64))

    def touched(self, tokens: int) -> float:
        """Experts that ``tokens`` evenly routed tokens use."""
        return self.num_experts * (1.0 - (1.0 - self.top_k / self.num_experts) ** tokens)

    def shared_seconds(self, missing: Missing, tokens: int) -> float:
        """Of as few shared passes as hold ``tokens``, the last one of the remaining ones."""
        full, rest = divmod(tokens, PIECE_TOKENS)
        ns = full * self._shared_ns(missing, PIECE_TOKENS) if full else 0.0
        return 1e-9 * (ns + (self._shared_ns(missing, rest) if rest else 0.0))

    def streaming_seconds(self, missing: Missing, tokens: int) -> float:
        """Of one pass for which every missing record is copied as far as there is room, the first layer's before
        anything is computed, the others' beside the layer before. Kernels fetch the rest that they touch."""
        room = np.maximum(self.capacity - self.unpinned.sum(axis=1), 0.0)
        pinned = missing.all - missing.unpinned
        staged = missing.unpinned + np.minimum(pinned, room)
        bounced = missing.unpinned * self.record_bytes * _BOUNCE_BYTE_NS
        copies = np.maximum(self._fetch_ns(staged), bounced)
        fetched = self._fetch_ns((missing.all - staged) * (self.touched(tokens) / self.num_experts))
        computed = _FOLLOW_NS + self._own_ns(tokens) + fetched
        if not self.overlaps:
            return 1e-9 * float((copies + computed).sum())
        beside = np.maximum(computed[:-1], copies[1:]).sum()
        return 1e-9 * float(copies[0] + beside + computed[-1])

    def prefers_streaming(self, missing: Missing, tokens: int) -> bool:
        """Whether one streaming pass over ``tokens`` is estimated to be faster than shared passes."""
        return self.streaming_seconds(missing, tokens) < self.shared_seconds(missing, tokens)

    def _own_ns(self, tokens: int) -> Counts:
        """What the device does in each layer of a pass once records are there: it reads every touched one."""
        return _PASS_NS + self.touched(tokens) * self.record_bytes * self.costs.hit_byte_ns

    def _fetch_ns(self, records: Counts) -> Counts:
        """Of the device alone. What is needed less than once in a layer costs so much less."""
        return (
            self.costs.fetch.fixed_ns * np.minimum(records, 1.0)
            + records * self.record_bytes * self.costs.fetch.byte_ns
        )

    def _shared_ns(self, missing: Missing, tokens: int) -> float:
        """Of one shared pass, over all layers: the later of device and CPU in each."""
        costs, size, touched = self.costs, self.record_bytes, self.touched(tokens)
        own, share = self._own_ns(tokens), touched / self.num_experts
        misses = missing.all * share
        fetchable = misses - missing.unpinned * share
        often = np.minimum(misses, 1.0)
        extra_routes = max(0.0, tokens * self.top_k / touched - 1.0)

        def cpu_byte_ns(side: SideCost) -> float:
            return side.byte_ns + extra_routes * side.route_byte_ns

        def latest(fetches: Counts) -> Counts:
            cpu = misses - fetches
            alone = _PASS_NS + costs.cpu.fixed_ns * often + cpu * size * cpu_byte_ns(costs.cpu)
            beside = np.maximum(
                own + costs.fetch_beside.fixed_ns * often + fetches * size * costs.fetch_beside.byte_ns,
                _PASS_NS + costs.cpu_beside.fixed_ns * often + cpu * size * cpu_byte_ns(costs.cpu_beside),
            )
            only_cpu, only_device = np.maximum(own, alone), own + self._fetch_ns(fetches)
            return np.where(cpu <= 0, only_device, np.where(fetches <= 0, only_cpu, beside))

        if self.fetch_fraction is not None:
            return float(latest(np.minimum(self.fetch_fraction * misses, fetchable)).sum())
        # Where both are equally late.
        ahead = _PASS_NS - own + often * (costs.cpu_beside.fixed_ns - costs.fetch_beside.fixed_ns)
        rates = size * (costs.fetch_beside.byte_ns + cpu_byte_ns(costs.cpu_beside))
        even = np.clip((ahead + misses * size * cpu_byte_ns(costs.cpu_beside)) / rates, 0.0, fetchable)
        return float(np.minimum(np.minimum(latest(np.zeros_like(misses)), latest(fetchable)), latest(even)).sum())
