"""How a prefill chunk should get at its experts: only those it touches, shared with the CPU, or all of them, staged."""

from __future__ import annotations

from dataclasses import dataclass

# Of an H200 machine with 16 cores and PCIe 5.0 x16; to be measured where the engine runs once the policy is automatic.
PCIE_BYTES_PER_S = 50e9
CPU_BYTES_PER_S = 70e9
CPU_OPERATIONS_PER_S = 1.5e12


@dataclass(frozen=True, slots=True)
class PrefillCosts:
    """``resident``: share of a layer's records in slots. ``fetch_fraction``: share of misses that the device runs
    itself when the CPU takes part. ``record_bytes`` and ``record_operations`` (per token) are of one expert."""

    num_experts: int
    top_k: int
    record_bytes: int
    record_operations: int
    resident: float
    fetch_fraction: float

    def touched(self, tokens: int) -> float:
        """Experts that ``tokens`` evenly routed tokens use."""
        return self.num_experts * (1.0 - (1.0 - self.top_k / self.num_experts) ** tokens)

    def touched_seconds(self, tokens: int) -> float:
        """Of a layer whose missing records are shared between bus and CPU."""
        missing = self.touched(tokens) * (1.0 - self.resident) * self.record_bytes
        bus = missing * self.fetch_fraction / PCIE_BYTES_PER_S
        cpu_share = 1.0 - self.fetch_fraction
        operations = tokens * self.top_k * (1.0 - self.resident) * self.record_operations * cpu_share
        return max(bus, missing * cpu_share / CPU_BYTES_PER_S, operations / CPU_OPERATIONS_PER_S)

    def staged_seconds(self) -> float:
        """Of a layer whose missing records are all copied."""
        return self.num_experts * (1.0 - self.resident) * self.record_bytes / PCIE_BYTES_PER_S

    def prefers_staging(self, tokens: int) -> bool:
        """Whether a chunk that the CPU may share should be staged all the same."""
        return self.resident < 1.0 and self.touched_seconds(tokens) > self.staged_seconds()
