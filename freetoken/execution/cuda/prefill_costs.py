"""How a prefill chunk should get at its experts: only those it touches, shared with the CPU, or all of them, staged."""

from __future__ import annotations

from dataclasses import dataclass

from freetoken.costs import CostModel

# Of records that are not pinned: one thread copies them into pinned buffers. Assumed.
_BOUNCE_BYTE_NS = 1 / 8.0


@dataclass(frozen=True, slots=True)
class PrefillCosts:
    """``record_bytes`` is of one expert. ``resident``: share of a layer's records in slots. ``fetch_fraction``: share
    of misses that the device runs itself when the CPU takes part; None: as many as make both finish together. ``costs``
    are those of this machine as far as they were measured. ``unpinned``: share of records that only staging brings to
    the device."""

    num_experts: int
    top_k: int
    record_bytes: int
    resident: float
    fetch_fraction: float | None
    costs: CostModel
    unpinned: float = 0.0

    def touched(self, tokens: int) -> float:
        """Experts that ``tokens`` evenly routed tokens use."""
        return self.num_experts * (1.0 - (1.0 - self.top_k / self.num_experts) ** tokens)

    def touched_seconds(self, tokens: int) -> float:
        """Of a layer whose missing records are shared between bus and CPU."""
        missing = self.touched(tokens) * (1.0 - self.resident)
        if missing == 0.0:
            return 0.0
        extra_routes = max(0.0, tokens * self.top_k * (1.0 - self.resident) / missing - 1.0)
        fetchable = missing * (1.0 - self.unpinned)
        if self.fetch_fraction is None:
            shared = self.costs.shared_ns(missing, self.record_bytes, 0.0, extra_routes)
            least = self.costs.cpu_ns(0.0, fetchable, missing - fetchable, self.record_bytes, extra_routes)
            return 1e-9 * max(shared, least)
        fetches = min(self.fetch_fraction * missing, fetchable)
        return 1e-9 * self.costs.layer_ns(0.0, fetches, missing - fetches, self.record_bytes, extra_routes)

    def staged_seconds(self) -> float:
        """Of a layer whose missing records are all copied."""
        missing = self.num_experts * (1.0 - self.resident)
        bounce_ns = missing * self.unpinned * self.record_bytes * _BOUNCE_BYTE_NS
        return 1e-9 * max(self.costs.fetch.ns(missing, self.record_bytes), bounce_ns)

    def prefers_staging(self, tokens: int) -> bool:
        """Whether a chunk that the CPU may share should be staged all the same."""
        return self.resident < 1.0 and self.touched_seconds(tokens) > self.staged_seconds()
