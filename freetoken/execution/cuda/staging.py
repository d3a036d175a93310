"""Staging for long prefill: while layer l computes, the records of layer l + 1 that no slot holds come into device
memory by the copy engine, into the half of the staging buffer that layer l - 1 is done with.

Of records that kernels can read in host memory, staging only makes reading faster. What a half holds is a table of
addresses beside it; what it lacks, because residency changed or the half is small, is fetched by kernels
(``kernels.triton.placed_plan``). Those that are not pinned must be there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freetoken.errors import FreeTokenError
from freetoken.execution.cuda.bounce import Bounce, BounceCopier, BounceCopy

logger = logging.getLogger(__name__)

SPARE_RECORDS = 16
"""Places for records that were to be resident or staged and are not."""


class RecordCopier(BounceCopier, Protocol):
    """Copies from registered host memory on a stream of its own, and the order between it and the steps' stream."""

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

    def move(self, destination: int, source: int, size_bytes: int) -> None:
        """Enqueue one copy within the device, on the steps' stream. Raises ``FreeTokenError`` when refused."""
        ...


@dataclass(frozen=True)
class RecordSources:
    """``addresses`` int64 [L, E]: host addresses of records. ``ranges`` int32 [L, E] numbers the registered ranges: no
    copy may cross them. Those that lie in none (-1) are copied by way of pinned buffers."""

    addresses: NDArray[np.int64]
    ranges: NDArray[np.int32]

    @property
    def most_unpinned(self) -> int:
        """Of a layer's records."""
        return int((self.ranges < 0).sum(axis=1).max())


@dataclass(frozen=True, slots=True)
class CopyRun:
    """Neighbouring records of a layer: one copy of ``size_bytes`` to ``offset`` within the half."""

    source: int
    offset: int
    size_bytes: int
    pinned: bool = True


@dataclass(frozen=True, slots=True)
class LayerCopies:
    """``offsets`` int64 [E] within the half, -1: not staged. ``moved``: experts that are copied from their slots."""

    runs: tuple[CopyRun, ...]
    moved: NDArray[np.int64]
    offsets: NDArray[np.int64]


def plan_copies(
    addresses: NDArray[np.int64],
    ranges: NDArray[np.int32],
    slot_of: NDArray[np.int32],
    stride_bytes: int,
    capacity: int,
    moves: bool = False,
) -> LayerCopies:
    """What is staged for one layer, and how. All arrays are [E].

    Every record that is not pinned is staged, from its slot where it has one and ``moves`` allows it. Every other
    record without a slot is, in the order of addresses, up to ``capacity`` of all.
    """
    unpinned = ranges < 0
    missing = np.flatnonzero(~unpinned & (slot_of < 0))
    missing = missing[np.argsort(addresses[missing], kind="stable")][: max(0, capacity - int(unpinned.sum()))]
    staged = np.concatenate((np.flatnonzero(unpinned), missing))
    staged = staged[np.argsort(addresses[staged], kind="stable")]
    offsets = np.full(len(addresses), -1, np.int64)
    offsets[staged] = np.arange(len(staged), dtype=np.int64) * stride_bytes
    resident = (slot_of[staged] >= 0) & moves
    copied = staged[~resident]
    if not len(copied):
        return LayerCopies((), staged[resident], offsets)
    found, places = addresses[copied], offsets[copied]
    apart = (np.diff(found) != stride_bytes) | (np.diff(places) != stride_bytes) | (np.diff(ranges[copied]) != 0)
    starts = np.concatenate(([0], np.flatnonzero(apart) + 1))
    ends = np.concatenate((starts[1:], [len(copied)]))
    runs = tuple(
        CopyRun(
            int(found[start]), int(places[start]), int(end - start) * stride_bytes, bool(ranges[copied[start]] >= 0)
        )
        for start, end in zip(starts, ends, strict=True)
    )
    return LayerCopies(runs, staged[resident], offsets)


class Stager:
    """The staging buffer's two halves and spare places, of one model. Layers are staged in ascending order; layer l
    uses half l % 2. Where a layer has more records that are not pinned than a half has places, both are one, and a
    layer's copies begin when the layer before has been computed."""

    def __init__(
        self,
        copier: RecordCopier,
        strides: tuple[int, ...],
        num_experts: int,
        address: int,
        size_bytes: int,
        device: torch.device,
    ) -> None:
        """``strides`` [L]: bytes per record by layer. The buffer lies at device address ``address``. For ``stage`` it
        has to be told what it ``reads``."""
        self.copier = copier
        self._strides = strides
        self.place_bytes = max(strides)
        self.address = address
        self.num_places = size_bytes // self.place_bytes
        self.num_spares = min(SPARE_RECORDS, self.num_places // 3)
        self.num_halves = 2
        self.capacity = self._half = min(num_experts, (self.num_places - self.num_spares) // 2)
        """Records per half; 0 after the copy engine has refused."""
        self._tables = torch.zeros((2, num_experts), dtype=torch.int64, device=device)
        self._host = torch.zeros((len(strides), num_experts), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._rows: NDArray[np.int64] = self._host.numpy()
        self._sources: RecordSources | None = None
        self._bounce: Bounce | None = None
        self._most_unpinned = 0
        self.copied_bytes = 0
        self.copied_runs = 0
        self.moved_bytes = 0

    def reads(self, sources: RecordSources, bounce: Bounce | None = None) -> None:
        """Where records are, and the way to those that are not pinned."""
        self._sources, self._bounce = sources, bounce
        self._most_unpinned = sources.most_unpinned
        whole = min(sources.addresses.shape[1], self.num_places - self.num_spares)
        if self.capacity < self._most_unpinned <= whole:
            self.num_halves, self.capacity = 1, whole
            self._half = whole

    @property
    def unpinned(self) -> NDArray[np.bool_]:
        """[L, E]: records that kernels cannot read in host memory."""
        assert self._sources is not None
        return self._sources.ranges < 0

    @property
    def reaches_all(self) -> bool:
        """Whether ``stage`` gets at every record that kernels cannot read where it is."""
        if self._most_unpinned and self._bounce is None:
            return False
        return self.capacity >= max(1, self._most_unpinned)

    @property
    def spares(self) -> tuple[int, int, int]:
        """(address, stride, number) of the spare places beside the halves."""
        return self.address + self.num_halves * self._half * self.place_bytes, self.place_bytes, self.num_spares

    @property
    def all_places(self) -> tuple[int, int, int]:
        """(address, stride, number) of the whole buffer, for batches that are not staged."""
        return self.address, self.place_bytes, self.num_places

    def table(self, layer: int) -> Tensor:
        """Where the layer's records are staged, int64 [E] on the device; 0 for those that are not."""
        return self._tables[layer % self.num_halves]

    def stage(self, layer: int, slot_of: NDArray[np.int32], slot_address: Callable[[int], int] | None = None) -> None:
        """Start copying what ``slot_of`` [E] does not list of expert layer ``layer``, and whatever is not pinned. To be
        called with the steps' stream current, when the step that staged before is over.

        What is not pinned is staged even though it has a slot, because nothing could be done if it lost that before it
        is used. With ``slot_address`` it comes from there: ``slot_of`` must be true at this point of the steps' stream.
        Raises ``FreeTokenError`` when such a record cannot be copied; nothing can be staged any more then.
        """
        assert self._sources is not None
        self.settle()
        half, stride = layer % self.num_halves, self._strides[layer]
        base = self.address + half * self._half * self.place_bytes
        slot_of = slot_of.copy()  # others change it
        ranges = self._sources.ranges[layer]
        copies = plan_copies(
            self._sources.addresses[layer], ranges, slot_of, stride, self.capacity, slot_address is not None
        )
        # The row was last used by an earlier step, which is over. The table goes by the steps' stream: it is read, and
        # replaced, in that stream's order; only the records behind it need the half's events.
        self._rows[layer] = np.where(copies.offsets >= 0, copies.offsets + base, 0)
        self._tables[half].copy_(self._host[layer], non_blocking=True)
        self.copier.begin(half)
        bounced = []
        try:
            for run in copies.runs:
                if run.pinned:
                    self.copier.copy(base + run.offset, run.source, run.size_bytes)
                else:
                    bounced.append(BounceCopy(base + run.offset, run.source, run.size_bytes))
                self.copied_bytes += run.size_bytes
            for expert in copies.moved:
                assert slot_address is not None
                source = slot_address(int(slot_of[expert]))
                if source:
                    self.copier.move(base + int(copies.offsets[expert]), source, stride)
                    self.moved_bytes += stride
        except FreeTokenError as error:
            self._give_up(layer, error)
            if (ranges < 0).any():
                raise
            self._rows[layer] = 0
            self._tables[half].copy_(self._host[layer], non_blocking=True)
        self.copied_runs += len(copies.runs)
        if self._bounce is not None:
            self._bounce.start(bounced, partial(self.copier.end, half))
        else:
            self.copier.end(half)

    def join(self, layer: int) -> None:
        """Wait, on the host, until all copies for the layer are enqueued. Raises ``FreeTokenError`` when they could not
        be: the layer must not be launched."""
        if self._bounce is not None:
            try:
                self._bounce.join()
            except FreeTokenError as error:
                self._give_up(layer, error)
                raise

    def wait(self, layer: int) -> None:
        """The steps' stream waits for the layer's copies, which were joined."""
        self.copier.wait(layer % self.num_halves)

    def release(self, layer: int) -> None:
        """The steps' stream is done with the layer's half."""
        self.copier.release(layer % self.num_halves)

    def settle(self) -> None:
        """Wait until nothing is enqueued any more for a step that goes no further."""
        if self._bounce is not None:
            self._bounce.settle()

    def close(self) -> None:
        """End the thread, if there is one; idempotent."""
        if self._bounce is not None:
            self._bounce.close()

    def _give_up(self, layer: int, error: FreeTokenError) -> None:
        logger.error("event=staging_off layer=%d detail=%r", layer, str(error))
        self.capacity = 0


class Follower(Protocol):
    """What staging must know of the data plane."""

    slot_of: NDArray[np.int32]

    def follow(self, step_id: int, ordinal: int) -> bool:
        """Wait until the device has the plan of this expert layer of this step; False when it did not come."""
        ...

    def slot_address(self, slot: int) -> int:
        """Where the device has a slot; 0 where there is nothing in it to be copied."""
        ...


class NothingMissing:
    """A ``Follower`` for warming up: everything is resident."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.slot_of: NDArray[np.int32] = np.zeros((num_layers, num_experts), np.int32)

    def follow(self, step_id: int, ordinal: int) -> bool:
        """No need to wait."""
        return True

    def slot_address(self, slot: int) -> int:
        """Of no slot."""
        return 0


class StagedStep:
    """One step's walk through the expert layers, one layer ahead of the device."""

    def __init__(self, stager: Stager, plane: Follower, step_id: int) -> None:
        self.stager = stager
        self._plane = plane
        self._step_id = step_id

    def begin(self) -> None:
        """Before the step's first launch: the first layer's records are on their way. Whatever was launched before may
        still use the buffer, and change what slots hold."""
        for half in range(self.stager.num_halves):
            self.stager.release(half)
        self.stager.stage(0, self._plane.slot_of[0])

    def after(self, ordinal: int) -> None:
        """After all launches of expert layer ``ordinal``: stage the next. Waits until the device has this layer's plan,
        so that what the plans so far have changed is known; its GEMM still lies ahead then."""
        self.stager.release(ordinal)
        if ordinal + 1 < len(self._plane.slot_of):
            plane = self._plane
            known = plane.follow(self._step_id, ordinal)
            self.stager.stage(ordinal + 1, plane.slot_of[ordinal + 1], plane.slot_address if known else None)
