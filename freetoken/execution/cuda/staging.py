"""Staging for long prefill: while layer l computes, the records of layer l + 1 that no slot holds come into device
memory by the copy engine, into the half of the staging buffer that layer l - 1 is done with.

Staging only makes reading faster. What a half holds is a table of addresses beside it; what it lacks, because residency
changed or the half is small, is fetched by kernels (``kernels.triton.placed_plan``).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freetoken.errors import FreeTokenError

logger = logging.getLogger(__name__)

SPARE_RECORDS = 16
"""Places for records that were to be resident or staged and are not."""


class RecordCopier(Protocol):
    """Copies from registered host memory on a stream of its own, and the order between it and the steps' stream."""

    def copy(self, destination: int, source: int, size_bytes: int) -> None:
        """Enqueue one copy, host address to device address."""
        ...

    def begin(self, half: int) -> None:
        """Later copies wait until the half was released."""
        ...

    def end(self, half: int) -> None:
        """The half is complete once the copies so far are."""
        ...

    def wait(self, half: int) -> None:
        """The steps' stream waits for the half to be complete."""
        ...

    def release(self, half: int) -> None:
        """The steps' stream is done with the half."""
        ...


@dataclass(frozen=True)
class RecordSources:
    """``addresses`` int64 [L, E]: host addresses of records. ``ranges`` int32 [L, E] numbers the registered ranges: no
    copy may cross them, and none is made of a record that lies in none (-1)."""

    addresses: NDArray[np.int64]
    ranges: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class CopyRun:
    """Neighbouring records of a layer: one copy of ``size_bytes`` to ``offset`` within the half."""

    source: int
    offset: int
    size_bytes: int


def plan_copies(
    addresses: NDArray[np.int64],
    ranges: NDArray[np.int32],
    slot_of: NDArray[np.int32],
    stride_bytes: int,
    capacity: int,
) -> tuple[list[CopyRun], NDArray[np.int64]]:
    """(copies, offset within the half by expert or -1) for one layer. All arrays are [E].

    Every record without a slot is staged, in the order of addresses, up to ``capacity`` of them.
    """
    offsets = np.full(len(addresses), -1, np.int64)
    missing = np.flatnonzero((slot_of < 0) & (ranges >= 0))
    missing = missing[np.argsort(addresses[missing], kind="stable")][:capacity]
    if not len(missing):
        return [], offsets
    offsets[missing] = np.arange(len(missing), dtype=np.int64) * stride_bytes
    found = addresses[missing]
    apart = (np.diff(found) != stride_bytes) | (np.diff(ranges[missing]) != 0)
    starts = np.concatenate(([0], np.flatnonzero(apart) + 1))
    ends = np.concatenate((starts[1:], [len(missing)]))
    runs = [
        CopyRun(int(found[start]), int(start) * stride_bytes, int(end - start) * stride_bytes)
        for start, end in zip(starts, ends, strict=True)
    ]
    return runs, offsets


class Stager:
    """The staging buffer's two halves and spare places, of one model. Layers are staged in ascending order; layer l
    uses half l % 2."""

    def __init__(
        self,
        copier: RecordCopier,
        strides: tuple[int, ...],
        num_experts: int,
        address: int,
        size_bytes: int,
        device: torch.device,
    ) -> None:
        """``strides`` [L]: bytes per record by layer. The buffer lies at device address ``address``. It stages nothing
        before it has its ``sources``."""
        self._copier = copier
        nowhere = np.zeros((len(strides), num_experts), np.int64)
        self.sources = RecordSources(nowhere, nowhere.astype(np.int32) - 1)
        self._strides = strides
        self.place_bytes = max(strides)
        self.address = address
        places = size_bytes // self.place_bytes
        self.num_spares = min(SPARE_RECORDS, places // 3)
        self.capacity = self._half = min(num_experts, (places - self.num_spares) // 2)
        """Records per half; 0 after the copy engine has refused."""
        self.num_places = places
        self._tables = torch.zeros((2, num_experts), dtype=torch.int64, device=device)
        self._host = torch.zeros((len(strides), num_experts), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._rows: NDArray[np.int64] = self._host.numpy()
        self.copied_bytes = 0
        self.copied_runs = 0

    @property
    def spares(self) -> tuple[int, int, int]:
        """(address, stride, number) of the spare places beside both halves."""
        return self.address + 2 * self._half * self.place_bytes, self.place_bytes, self.num_spares

    @property
    def all_places(self) -> tuple[int, int, int]:
        """(address, stride, number) of the whole buffer, for batches that are not staged."""
        return self.address, self.place_bytes, self.num_places

    def table(self, layer: int) -> Tensor:
        """Where the layer's records are staged, int64 [E] on the device; 0 for those that are not."""
        return self._tables[layer % 2]

    def stage(self, layer: int, slot_of: NDArray[np.int32]) -> None:
        """Start copying what ``slot_of`` [E] does not list of expert layer ``layer``. To be called with the steps'
        stream current, when the step that staged before is over."""
        half = layer % 2
        base = self.address + half * self._half * self.place_bytes
        runs, offsets = plan_copies(
            self.sources.addresses[layer], self.sources.ranges[layer], slot_of, self._strides[layer], self.capacity
        )
        # The row was last used by an earlier step, which is over. The table goes by the steps' stream: it is read, and
        # replaced, in that stream's order; only the records behind it need the half's events.
        self._rows[layer] = np.where(offsets >= 0, offsets + base, 0)
        self._tables[half].copy_(self._host[layer], non_blocking=True)
        self._copier.begin(half)
        try:
            for run in runs:
                self._copier.copy(base + run.offset, run.source, run.size_bytes)
                self.copied_bytes += run.size_bytes
        except FreeTokenError as error:
            logger.error("event=staging_off layer=%d detail=%r", layer, str(error))
            self.capacity = 0
            self._rows[layer] = 0
            self._tables[half].copy_(self._host[layer], non_blocking=True)
        self.copied_runs += len(runs)
        self._copier.end(half)

    def wait(self, layer: int) -> None:
        """The steps' stream waits for the layer's copies."""
        self._copier.wait(layer % 2)

    def release(self, layer: int) -> None:
        """The steps' stream is done with the layer's half."""
        self._copier.release(layer % 2)


class Follower(Protocol):
    """What staging must know of the data plane."""

    slot_of: NDArray[np.int32]

    def follow(self, step_id: int, ordinal: int) -> None:
        """Wait until the device has the plan of this expert layer of this step."""
        ...


class NothingMissing:
    """A ``Follower`` for warming up: everything is resident."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.slot_of: NDArray[np.int32] = np.zeros((num_layers, num_experts), np.int32)

    def follow(self, step_id: int, ordinal: int) -> None:
        """No need to wait."""


class StagedStep:
    """One step's walk through the expert layers, one layer ahead of the device."""

    def __init__(self, stager: Stager, plane: Follower, step_id: int) -> None:
        self.stager = stager
        self._plane = plane
        self._step_id = step_id

    def begin(self) -> None:
        """Before the step's first launch: the first layer's records are on their way. Whatever was launched before may
        still use the buffer."""
        for half in (0, 1):
            self.stager.release(half)
        self.stager.stage(0, self._plane.slot_of[0])

    def after(self, ordinal: int) -> None:
        """After all launches of expert layer ``ordinal``: stage the next. Waits until the device has this layer's plan,
        so that what the plans so far have changed is known; its GEMM still lies ahead then."""
        self.stager.release(ordinal)
        if ordinal + 1 < len(self._plane.slot_of):
            self._plane.follow(self._step_id, ordinal)
            self.stager.stage(ordinal + 1, self._plane.slot_of[ordinal + 1])
