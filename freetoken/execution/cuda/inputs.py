"""What a step needs from the host, in one copy: packed fields in pinned memory, double-buffered, and their device
views.

The device side is one buffer at a fixed address, so that captured graphs find their inputs; copies into it are ordered
by the stream. The host side has two buffers: the one of step n - 2 is free when step n is built.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freetoken.units import align_up

NUM_BUFFERS = 2
NUM_REAL_STRIDE = 4
"""So that every piece's count starts at a multiple of 16 bytes, like all else that kernels get."""
_ALIGNMENT = 16
_TORCH = {"i32": torch.int32, "i64": torch.int64, "f32": torch.float32, "u8": torch.uint8}
_NUMPY = {"i32": np.int32, "i64": np.int64, "f32": np.float32, "u8": np.uint8}


@dataclass(frozen=True, slots=True)
class StepShape:
    """T tokens, S rows to sample, Q query blocks (0 for decode, where row i has the one token i), P pieces."""

    tokens: int
    samples: int
    query_blocks: int = 0
    pieces: int = 1


@dataclass(frozen=True, slots=True)
class Field:
    """Where a field lies in the packed buffer."""

    dtype: str
    count: int
    offset: int

    @property
    def end(self) -> int:
        """One past its last byte."""
        return self.offset + self.count * np.dtype(_NUMPY[self.dtype]).itemsize


@functools.lru_cache(maxsize=256)
def pack_fields(shape: StepShape) -> tuple[dict[str, Field], int]:
    """(fields by name, bytes) of a step of this shape. See ``StepInputs`` for what they mean."""
    t, s, q = shape.tokens, shape.samples, shape.query_blocks
    wanted = [
        ("step_id", "i64", 1),
        ("seed", "i64", s),
        ("sample_position", "i64", s),
        ("sample_slot", "i64", s),
        ("logit_token", "i64", s),
        ("slot_mapping", "i64", t),
        ("token", "i32", t),
        ("position", "i32", t),
        ("request_slot", "i32", t),
        ("block_row", "i32", q),
        ("block_first", "i32", q),
        ("block_count", "i32", q),
        ("top_k", "i32", s),
        ("temperature", "f32", s),
        ("top_p", "f32", s),
        ("min_p", "f32", s),
        ("num_real", "i32", shape.pieces * NUM_REAL_STRIDE),
        ("admit", "u8", t),
    ]
    fields, end = {}, 0
    for name, dtype, count in wanted:
        fields[name] = Field(dtype, count, end)
        end = align_up(fields[name].end, _ALIGNMENT)
    return fields, end


class StepInputs:
    """Fields of one step, by name, as NumPy views (to be filled) or device tensors.

    Per token: ``token`` (-1: the last one sampled for its request), ``position`` (-1: padding), ``request_slot`` (row
    of the block tables and of the last tokens; 0 belongs to nobody), ``slot_mapping`` (KV; -1 writes nothing),
    ``admit``. Per sampled row: ``logit_token`` (token index), ``sample_slot`` (request slot that gets the token; 0:
    nobody), ``seed``, ``sample_position``, ``temperature``, ``top_k``, ``top_p``, ``min_p``. Query blocks as in the
    attention kernel, with request slots for rows. ``num_real[p * NUM_REAL_STRIDE]`` tokens of piece p are no padding.
    """

    def __init__(self, largest: StepShape, device: torch.device) -> None:
        self._capacity = pack_fields(largest)[1]
        pinned = device.type == "cuda"
        self._host = [torch.zeros(self._capacity, dtype=torch.uint8, pin_memory=pinned) for _ in range(NUM_BUFFERS)]
        self._device = torch.zeros(self._capacity, dtype=torch.uint8, device=device)
        self._next = 0

    def host_views(self, shape: StepShape) -> dict[str, NDArray[np.generic]]:
        """Views of the next host buffer, to be filled and sent with ``upload``; contents are undefined.

        The caller makes sure that the step before the last one is over.
        """
        fields, _ = pack_fields(shape)
        raw = self._host[self._next].numpy()
        return {name: raw[f.offset : f.end].view(_NUMPY[f.dtype]) for name, f in fields.items()}

    def upload(self, shape: StepShape) -> None:
        """Copy the filled buffer to the device, on the current stream; the other one is next."""
        size = pack_fields(shape)[1]
        self._device[:size].copy_(self._host[self._next][:size], non_blocking=True)
        self._next = (self._next + 1) % NUM_BUFFERS

    def device_views(self, shape: StepShape) -> dict[str, Tensor]:
        """Device tensors of a step of this shape; always at the same addresses."""
        fields, _ = pack_fields(shape)
        return {name: self._device[f.offset : f.end].view(_TORCH[f.dtype]) for name, f in fields.items()}


class RequestTable:
    """What the device remembers of each request: its last sampled token and its block table, by request slot.

    Slot 0 belongs to nobody: padding reads and writes it. Slots are given out and taken back in the order of the
    stream, so a slot may be given to a new request while a step of the old one is still queued.
    """

    def __init__(self, num_slots: int, max_blocks: int, device: torch.device) -> None:
        self.last_token = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros((num_slots + 1, max_blocks), dtype=torch.int32, device=device)
        self._free = list(range(num_slots, 0, -1))
        self._slots: dict[str, int] = {}
        self._cells: list[NDArray[np.int64]] = []
        self._values: list[NDArray[np.int32]] = []

    @property
    def num_free(self) -> int:
        """Slots that can be given out."""
        return len(self._free)

    def slot(self, request_id: str) -> int:
        """The request's slot, a new one if it has none. ``IndexError`` when all are taken."""
        slot = self._slots.get(request_id)
        if slot is None:
            slot = self._slots[request_id] = self._free.pop()
        return slot

    def known_slot(self, request_id: str) -> int | None:
        """The request's slot, if it has one."""
        return self._slots.get(request_id)

    def release(self, request_id: str) -> None:
        """Give the slot back; unknown ids are ignored."""
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._free.append(slot)

    def clear(self) -> None:
        """Give all slots back and forget what was noted."""
        for request_id in tuple(self._slots):
            self.release(request_id)
        self.forget_notes()

    def note_blocks(self, slot: int, first: int, block_ids: Sequence[int] | NDArray[np.int32]) -> None:
        """Entries ``first`` and following of the slot's block table become ``block_ids`` at the next ``flush``."""
        if len(block_ids):
            start = slot * self.block_tables.shape[1] + first
            self._cells.append(np.arange(start, start + len(block_ids), dtype=np.int64))
            self._values.append(np.array(block_ids, dtype=np.int32))

    def flush(self) -> None:
        """Write what was noted, on the current stream."""
        if not self._cells:
            return
        device = self.block_tables.device
        # From pageable memory: the driver takes its copy before the call returns.
        cells = torch.from_numpy(np.concatenate(self._cells)).to(device, non_blocking=True)
        values = torch.from_numpy(np.concatenate(self._values)).to(device, non_blocking=True)
        self.block_tables.view(-1).scatter_(0, cells, values)
        self.forget_notes()

    def forget_notes(self) -> None:
        """Drop what was noted since the last ``flush``, because the step does not run. Its slots may get other owners:
        of two values for one cell, ``flush`` would write any."""
        self._cells.clear()
        self._values.clear()
