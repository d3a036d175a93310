"""What a layer's missing experts cost the two parties that can run them: affine in bytes, alone and side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from freetoken.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SideCost:
    """Nanoseconds of one party: ``fixed_ns`` for a layer, ``byte_ns`` for each byte of its records, and
    ``route_byte_ns`` again for each further token that uses a record."""

    fixed_ns: float
    byte_ns: float
    route_byte_ns: float = 0.0

    @property
    def gbps(self) -> float:
        """Of many large records: 10^9 bytes/s."""
        return 1.0 / self.byte_ns

    def ns(self, records: float, record_bytes: float, extra_routes: float = 0.0) -> float:
        """Of one layer; ``extra_routes``: tokens beyond the first of each record."""
        return self.fixed_ns + record_bytes * (records * self.byte_ns + extra_routes * self.route_byte_ns)

    def effective_gbps(self, records: int, record_bytes: float) -> float:
        """With the fixed part: what a layer of ``records`` sees."""
        return records * record_bytes / self.ns(records, record_bytes)


@dataclass(frozen=True, slots=True)
class CostModel:
    """``fetch``: the device runs missing records from host memory (PCIe on a GPU); ``cpu``: CpuExecutor runs them where
    they lie; ``_beside``: while the other works too. ``hit_byte_ns``: of the device, for a resident record.
    ``hits_load_memory``: hits are read from the memory that the CPU reads (the CPU device). ``source``: where the
    numbers come from, for people; ``measured``: on this machine, for this model's records."""

    fetch: SideCost
    fetch_beside: SideCost
    cpu: SideCost
    cpu_beside: SideCost
    hit_byte_ns: float = 0.0
    hits_load_memory: bool = False
    measured: bool = False
    source: str = "assumed"

    def device_ns(
        self, hits: float, fetches: float, cpu: float, record_bytes: float, extra_routes: float = 0.0
    ) -> float:
        """The device's part of a layer whose records are used by ``1 + extra_routes`` tokens each. A GPU reads its own
        memory while records cross the bus."""
        if hits + fetches == 0:
            return 0.0
        side = self.fetch_beside if cpu else self.fetch
        own = hits * record_bytes * (self.hit_byte_ns + extra_routes * side.route_byte_ns)
        fetched = side.ns(fetches, record_bytes, extra_routes * fetches)
        return own + fetched if self.hits_load_memory else max(own, fetched)

    def cpu_ns(self, hits: float, fetches: float, cpu: float, record_bytes: float, extra_routes: float = 0.0) -> float:
        """CpuExecutor's part of such a layer."""
        if cpu == 0:
            return 0.0
        beside = fetches > 0 or (self.hits_load_memory and hits > 0)
        return (self.cpu_beside if beside else self.cpu).ns(cpu, record_bytes, extra_routes * cpu)

    def layer_ns(
        self, hits: float, fetches: float, cpu: float, record_bytes: float, extra_routes: float = 0.0
    ) -> float:
        """The later of both."""
        return max(
            self.device_ns(hits, fetches, cpu, record_bytes, extra_routes),
            self.cpu_ns(hits, fetches, cpu, record_bytes, extra_routes),
        )

    def best_fetches(self, misses: int, record_bytes: float, hits: int = 0) -> int:
        """How many of ``misses`` to fetch: as csrc/core/split_planner.h decides it."""
        return min(range(misses, -1, -1), key=lambda q: self.layer_ns(hits, q, misses - q, record_bytes))

    def shared_ns(self, misses: float, record_bytes: float, hits: float = 0.0, extra_routes: float = 0.0) -> float:
        """The least of a layer over all shares of ``misses`` that the device may take, divided records included."""
        low, high = 0.0, misses
        for _ in range(24):  # more for the device makes it later and the CPU earlier
            middle = (low + high) / 2
            layer = (hits, middle, misses - middle, record_bytes, extra_routes)
            low, high = (middle, high) if self.device_ns(*layer) < self.cpu_ns(*layer) else (low, middle)
        return min(
            self.layer_ns(hits, fetches, misses - fetches, record_bytes, extra_routes)
            for fetches in (0.0, high, misses)
        )

    def to_json(self) -> dict[str, Any]:
        """For files and reports."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CostModel:
        """The inverse of ``to_json``; ``ConfigError`` when it is no such thing."""
        try:
            sides = {name: SideCost(**data[name]) for name in ("fetch", "fetch_beside", "cpu", "cpu_beside")}
            model = cls(**{**data, **sides})
            rates = [side.byte_ns for side in sides.values()]
            if not all(isinstance(rate, (int, float)) and 0 < rate < float("inf") for rate in rates):
                raise ValueError(f"costs per byte {rates} are not all positive")
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"not a cost model: {error!r}") from error
        return model


def assumed_costs(device: str) -> CostModel:
    """Before anything was measured: a desktop with PCIe 4.0 x16 and two channels of DDR5, or its memory alone. Live
    rates replace these within a few steps."""
    if device == "cpu":
        side = SideCost(10e3, 1 / 15, 1 / 150)
        return CostModel(side, SideCost(10e3, 1 / 8, 1 / 80), side, SideCost(10e3, 1 / 8, 1 / 80), 1 / 15, True)
    return CostModel(
        SideCost(15e3, 1 / 24),
        SideCost(15e3, 1 / 20),
        SideCost(25e3, 1 / 45, 1 / 450),
        SideCost(25e3, 1 / 40, 1 / 400),
        1 / 400,
    )
