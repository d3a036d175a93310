"""Timing of a GPU's fetches: the expert kernel over records in registered host memory, each also stored to a slot."""

from __future__ import annotations

import time

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freetoken.elastic.bandwidth import ProbeStore
from freetoken.errors import FreeTokenError
from freetoken.execution.cuda.driver import HostMemoryDriver
from freetoken.execution.cuda.host_memory import segment_address
from freetoken.kernels.triton.expert_gemv import GemvShape, expert_gemv, partials_shape, scratch_shape
from freetoken.kernels.triton.plan import KIND_FETCH, KIND_HIT, DevicePlan, PlanEntry
from freetoken.quant.record import RecordLayout

_AHEAD = 8
_PLANS = 12
_SLOTS = 64


class CudaFetchProbe:
    """``FetchProbe`` of a GPU. Plans are made beforehand, over records that follow one another, so that the timed
    launches need nothing of the host; events around each kernel give its time. Without a GPU the kernels run in
    Triton's interpreter, as in tests, and the host's clock is read.
    """

    def __init__(self, store: ProbeStore, driver: HostMemoryDriver, device: torch.device, top_k: int) -> None:
        """Registers the store's segment; ``close`` gives it back. ``top_k``: the model's, which is compiled into the
        kernel, and the most records of a layer. Raises ``FreeTokenError`` when registering is refused."""
        self._store = store
        self._top_k = top_k
        self._driver = driver
        self._device = device
        self._address = segment_address(store.segment)
        refusal = driver.register(self._address, store.segment.size_bytes)
        if refusal is not None:
            raise FreeTokenError(
                f"the bandwidth probe's {store.segment.size_bytes >> 20} MiB cannot be registered: {refusal}"
            )
        self._base = driver.device_address(self._address)
        stride = max(layout.stride_bytes for layout in store.layouts)
        self._slot_stride = stride
        self._slots = torch.zeros(_SLOTS * stride, dtype=torch.uint8, device=device)
        self._next = 0
        self._made: dict[tuple[int, int, int, int], _Launch] = {}

    def time(self, layout: int, records: int, tokens: int, window_s: float) -> NDArray[np.int64]:
        return self._time(layout, records, tokens, window_s, KIND_FETCH)

    def hit_byte_ns(self, layout: int) -> float:
        count = self._top_k
        times = self._time(layout, count, 1, 0.01, KIND_HIT)
        return float(np.median(times)) / (count * self._store.layouts[layout].stride_bytes)

    def close(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self._made.clear()
        self._driver.unregister(self._address)

    def _time(self, layout: int, records: int, tokens: int, window_s: float, kind: int) -> NDArray[np.int64]:
        key = (layout, records, tokens, kind)
        if key not in self._made:
            self._made[key] = self._make(*key)
            self._made[key].run()  # compiles
            if self._device.type == "cuda":
                torch.cuda.synchronize()
        launch = self._made[key]
        times: list[int] = []
        end = time.perf_counter() + window_s
        while time.perf_counter() < end or len(times) < 2:
            times += launch.time_some(self._device)
        return np.array(times, np.int64)

    def _make(self, layout: int, records: int, tokens: int, kind: int) -> _Launch:
        store, record_layout = self._store, self._store.layouts[layout]
        plans = []
        for number in range(_PLANS if self._device.type == "cuda" else 2):
            entries = []
            for i in range(records):
                record = (self._next + i) % store.num_records
                slot = self._slots.data_ptr() + (number * records + i) % _SLOTS * self._slot_stride
                routes = [token * self._top_k + i for token in range(tokens)]
                if kind == KIND_FETCH:
                    source = self._base + int(store.offsets[layout, record])
                    entries.append(PlanEntry(kind, i, source, routes, destination=slot))
                else:
                    entries.append(PlanEntry(kind, i, slot, routes))
            self._next += records
            plan = DevicePlan.empty(records, tokens * self._top_k, self._device)
            plan.fill(entries)
            plans.append(plan)
        return _Launch(record_layout, plans, self._top_k, tokens, self._device)


class _Launch:
    """The kernel over some plans of one size, in turn."""

    def __init__(
        self, layout: RecordLayout, plans: list[DevicePlan], top_k: int, tokens: int, device: torch.device
    ) -> None:
        self._layout, self._plans = layout, plans
        self._single = tokens == 1
        routes = tokens * top_k
        self._shape = GemvShape.of(layout, single_route=self._single)
        self._hidden = torch.full((tokens, layout.hidden), 0.01, device=device)
        self._weights = torch.ones(tokens, top_k, device=device)
        self._out = torch.zeros(partials_shape(layout, routes, self._shape), device=device)
        self._scratch: Tensor | None = None
        if not self._single:
            self._scratch = torch.zeros(scratch_shape(layout, routes), device=device)
        self._at = 0

    def run(self) -> None:
        plan = self._plans[self._at % len(self._plans)]
        self._at += 1
        expert_gemv(
            self._layout, plan, self._hidden, self._weights, self._out, scratch=self._scratch, partials=True,
            single_route=self._single, shape=self._shape,
        )  # fmt: skip

    def time_some(self, device: torch.device) -> list[int]:
        """Nanoseconds of a few launches that follow one another."""
        if device.type != "cuda":
            started = time.perf_counter_ns()
            self.run()
            return [time.perf_counter_ns() - started]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * _AHEAD)]
        for i in range(_AHEAD):
            events[2 * i].record()
            self.run()
            events[2 * i + 1].record()
        torch.cuda.synchronize()
        return [round(events[2 * i].elapsed_time(events[2 * i + 1]) * 1e6) for i in range(_AHEAD)]
