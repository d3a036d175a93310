"""Host memory that the device reads and writes: the store's segments and the mailbox.

Pinned memory is a limited resource, which nobody tells the size of (on WSL2 about a gigabyte), so the driver is asked
for it piece by piece. Pieces are cut at record boundaries where they can be; a piece that is refused is tried at half
its size, down to ``SMALLEST_PIECE_BYTES``. What lies beyond the first that is refused even so is not fetchable.

The mailbox changes with every epoch, but captured graphs hold its address. ``MailboxWindow`` is a range of addresses
that stays: each epoch's segment is mapped into it.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import itertools
import logging
import mmap
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freetoken._native import SharedSegment
from freetoken.errors import FreeTokenError
from freetoken.execution.cuda.driver import HostMemoryDriver
from freetoken.units import align_up, format_bytes

logger = logging.getLogger(__name__)

PIECE_BYTES = 1 << 30
SMALLEST_PIECE_BYTES = 16 << 20
HEADROOM_BYTES = 64 << 20
"""What the store leaves to others (the driver itself, logits for the host) of all that can be pinned."""
PAGE_BYTES = 4096


def piece_end(start: int, size_bytes: int, cuts: Sequence[int], piece_bytes: int) -> int:
    """Where a piece of a segment that starts at ``start`` ends: at the last cut within ``piece_bytes``, or there.

    ``cuts`` are ascending offsets, multiples of a page, at which it is good to cut (starts of records).
    """
    end = min(start + piece_bytes // PAGE_BYTES * PAGE_BYTES, size_bytes)
    if end < size_bytes:
        at = bisect.bisect_right(cuts, end) - 1
        if at >= 0 and cuts[at] > start:
            end = cuts[at]
    return end


def segment_address(segment: SharedSegment) -> int:
    """Where this process has mapped the segment."""
    return int(np.frombuffer(memoryview(segment), np.uint8).ctypes.data)


def empty_pinned(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """For copies to and from ``device``. Pageable, so that they hold up the caller, where no more can be pinned."""
    if device.type == "cuda":
        try:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        except RuntimeError as error:
            logger.warning("event=not_pinned shape=%s detail=%r", tuple(shape), str(error))
    return torch.empty(shape, dtype=dtype)


class RegisteredStore:
    """The store's segments, registered as far as the driver lets us. Keeps them mapped; ``close`` before letting go."""

    def __init__(
        self,
        driver: HostMemoryDriver,
        segments: Sequence[SharedSegment],
        cuts: Sequence[Sequence[int]],
        *,
        wanted: Sequence[bool] | None = None,
        limit_bytes: int | None = None,
    ) -> None:
        """``cuts[i]`` are segment i's record starts. Segments that are not ``wanted`` are left alone (dense weights).
        No more than ``limit_bytes`` are registered."""
        self._driver = driver
        self._segments = tuple(segments)
        self._pieces: list[list[tuple[int, int, int]]] = [[] for _ in segments]  # offset, size, device address
        self.fetchable: list[int] = [0] * len(segments)
        chosen = [i for i in range(len(segments)) if wanted is None or wanted[i]]
        self.total_bytes = sum(segments[i].size_bytes for i in chosen)
        try:
            refusal = self._register(chosen, cuts, self.total_bytes if limit_bytes is None else limit_bytes)
        except BaseException:
            self.close()
            raise
        self.registered_bytes = sum(self.fetchable)
        if refusal is not None:
            logger.warning(
                "event=store_partly_registered pinned_bytes=%d unpinned_bytes=%d detail=%r",
                self.registered_bytes,
                self.total_bytes - self.registered_bytes,
                f"{refusal}; the device cannot read the experts in the other "
                f"{format_bytes(self.total_bytes - self.registered_bytes)} where they are",
            )
        else:
            logger.info("event=store_registered bytes=%d", self.registered_bytes)

    def _register(self, chosen: Sequence[int], cuts: Sequence[Sequence[int]], limit_bytes: int) -> str | None:
        """Why not everything is registered; None when it is."""
        piece, left = PIECE_BYTES, limit_bytes
        with _headroom(self._driver, HEADROOM_BYTES) as refusal:
            if refusal is not None:
                return refusal
            for number in chosen:
                base, size = segment_address(self._segments[number]), self._segments[number].size_bytes
                smallest = max([SMALLEST_PIECE_BYTES, *(b - a for a, b in itertools.pairwise([*cuts[number], size]))])
                offset = 0
                while offset < size:
                    if left < min(smallest, size - offset):
                        return f"no more than {format_bytes(limit_bytes)} are to be pinned on this machine"
                    end = piece_end(offset, size, cuts[number], min(piece, left))
                    refusal = self._driver.register(base + offset, end - offset)
                    if refusal is None:
                        self._pieces[number].append((offset, end - offset, 0))
                        address = self._driver.device_address(base + offset)
                        self._pieces[number][-1] = (offset, end - offset, address)
                        self.fetchable[number] = end
                        left -= end - offset
                        offset = end
                    elif end - offset > smallest:
                        piece = max((end - offset) // 2, smallest)
                    else:
                        return refusal
        return None

    def device_address(self, segment: int, offset: int, size_bytes: int) -> int:
        """Of a range that lies in registered memory; 0 when it does not. Raises nothing."""
        pieces = self._pieces[segment]
        at = bisect.bisect_right(pieces, (offset, 1 << 62, 0)) - 1
        if at < 0:
            return 0
        start, size, address = pieces[at]
        found = address + (offset - start)
        # A range may cross pieces where the device sees them side by side, as it does with unified addresses.
        while offset + size_bytes > start + size:
            at += 1
            if at >= len(pieces) or pieces[at][2] != address + size:
                return 0
            start, size, address = pieces[at]
        return found

    def record_addresses(
        self, record_segment: NDArray[np.int32], record_offset: NDArray[np.int64], strides: Sequence[int]
    ) -> NDArray[np.int64]:
        """[L, E]: device address of every record, 0 where the device cannot read it. ``strides`` [L] in bytes."""
        table = np.zeros(record_segment.shape, np.int64)
        for layer, expert in np.ndindex(*record_segment.shape):
            table[layer, expert] = self.device_address(
                int(record_segment[layer, expert]), int(record_offset[layer, expert]), strides[layer]
            )
        return table

    def record_sources(
        self, record_segment: NDArray[np.int32], record_offset: NDArray[np.int64], strides: Sequence[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """(host addresses, numbers of the registered ranges), both [L, E], for copies by the copy engine, which must
        not leave a range. Range -1 where a record does not lie in one. ``strides`` [L] in bytes."""
        bases = np.array([segment_address(segment) for segment in self._segments], np.int64)
        addresses = bases[record_segment] + record_offset
        ranges = np.full(record_segment.shape, -1, np.int32)
        first_range = 0
        for number, pieces in enumerate(self._pieces):
            if not pieces:
                continue
            starts = np.array([piece[0] for piece in pieces], np.int64)
            ends = starts + np.array([piece[1] for piece in pieces], np.int64)
            at = np.searchsorted(starts, record_offset, side="right") - 1
            stride = np.broadcast_to(np.asarray(strides, np.int64)[:, None], record_offset.shape)
            inside = (record_segment == number) & (at >= 0) & (record_offset + stride <= ends[np.maximum(at, 0)])
            ranges[inside] = at[inside] + first_range
            first_range += len(pieces)
        return addresses, ranges

    def close(self) -> None:
        """Unregister everything; idempotent. The device must not use it any more."""
        for segment, pieces in zip(self._segments, self._pieces, strict=True):
            base = segment_address(segment)
            while pieces:
                offset, _, _ = pieces.pop()
                self._driver.unregister(base + offset)
        self._segments = ()
        self._pieces = []
        self.fetchable = [0] * len(self.fetchable)


@contextlib.contextmanager
def _headroom(driver: HostMemoryDriver, size_bytes: int) -> Iterator[str | None]:
    """Memory that is registered meanwhile, so that so much can be afterwards. Yields why it cannot be, or None."""
    address = _mmap(None, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    try:
        refusal = driver.register(address, size_bytes)
        try:
            yield refusal
        finally:
            if refusal is None:
                driver.unregister(address)
    finally:
        _munmap(address, size_bytes)


class PinnedRing:
    """Buffers by way of which memory that is not registered is copied to the device."""

    def __init__(self, driver: HostMemoryDriver, buffer_bytes: int, num_buffers: int) -> None:
        """Raises ``FreeTokenError`` when they cannot be registered."""
        self._driver = driver
        self.buffer_bytes = align_up(buffer_bytes, PAGE_BYTES)
        self.num_buffers = num_buffers
        size = self.buffer_bytes * num_buffers
        self._address = _mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        refusal = driver.register(self._address, size)
        if refusal is not None:
            _munmap(self._address, size)
            raise FreeTokenError(f"{format_bytes(size)} of bounce buffers cannot be registered: {refusal}")

    def address(self, number: int) -> int:
        """Of a buffer."""
        return self._address + number * self.buffer_bytes

    def close(self) -> None:
        """Give them back; idempotent. The device must not use them any more."""
        if self._address:
            self._driver.unregister(self._address)
            _munmap(self._address, self.buffer_bytes * self.num_buffers)
            self._address = 0


class MailboxWindow:
    """A fixed range of addresses into which one mailbox after the other is mapped and registered."""

    def __init__(self, driver: HostMemoryDriver, size_bytes: int) -> None:
        """Reserves addresses for segments of up to ``size_bytes``."""
        self._driver = driver
        self.size_bytes = align_up(size_bytes, PAGE_BYTES)
        self.address = _mmap(None, self.size_bytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        self.device_address = 0
        self._mapped = False

    def attach(self, segment: SharedSegment) -> None:
        """Map and register ``segment`` in place of the one before; the device must be idle.

        Raises ``FreeTokenError`` when it is too large, cannot be registered, or the device sees it elsewhere than the
        one before (captured graphs would then be wrong).
        """
        if segment.size_bytes > self.size_bytes:
            raise FreeTokenError(
                f"a mailbox of {segment.size_bytes} bytes does not fit the window of {self.size_bytes}"
            )
        self.detach()
        _mmap(
            self.address,
            align_up(segment.size_bytes, PAGE_BYTES),
            mmap.PROT_READ | mmap.PROT_WRITE,
            mmap.MAP_SHARED | _MAP_FIXED,
            segment.fd,
        )
        self._mapped = True
        refusal = self._driver.register(self.address, align_up(segment.size_bytes, PAGE_BYTES))
        if refusal is not None:
            self._blank()
            raise FreeTokenError(f"the mailbox ({format_bytes(segment.size_bytes)}) cannot be registered: {refusal}")
        device_address = self._driver.device_address(self.address)
        if self.device_address not in (0, device_address):
            self.detach()
            raise FreeTokenError(
                f"the mailbox moved on the device, from {self.device_address:#x} to {device_address:#x}"
            )
        self.device_address = device_address

    def detach(self) -> None:
        """Unregister and unmap; the addresses stay reserved. Idempotent."""
        if self._mapped:
            self._driver.unregister(self.address)
            self._blank()

    def close(self) -> None:
        """Give the addresses back; idempotent."""
        self.detach()
        if self.address:
            _munmap(self.address, self.size_bytes)
            self.address = 0

    def _blank(self) -> None:
        _mmap(self.address, self.size_bytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED, -1)
        self._mapped = False


_MAP_FIXED = 0x10


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _munmap(address: int, size_bytes: int) -> None:
    _libc().munmap(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes))


def _mmap(address: int | None, size: int, protection: int, flags: int, fd: int) -> int:
    libc = _libc()
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    )
    found = libc.mmap(address, size, protection, flags, fd, 0)
    if found is None or found == ctypes.c_void_p(-1).value:
        raise FreeTokenError(f"mapping {size} bytes failed: errno {ctypes.get_errno()}")
    return int(found)
