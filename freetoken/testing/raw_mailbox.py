"""A mailbox client that knows nothing but bytes and ``Mailbox.layout``: what a GPU kernel does, in numpy."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freetoken._native import SharedSegment

WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class RawPlan:
    """A plan, copied. ``entries`` have expert, kind, source_slot, destination_slot, first_route and num_routes."""

    header: dict[str, int]
    entries: list[dict[str, int]]
    routes: NDArray[np.int32]


class RawMailbox:
    """Reads and writes a mailbox's segment through views at the layout's offsets. One thread."""

    def __init__(self, segment: SharedSegment, layout: Mapping[str, int]) -> None:
        self.layout = dict(layout)
        self._bytes = np.frombuffer(memoryview(segment), np.uint8)
        self._words = {name: self._view(name, np.uint32, (1,)) for name in ("req", "plan", "part", "hint", "abort")}
        self.slot_of = self._view("slot_of", np.int32, (layout["num_layers"], layout["num_experts"]))
        """[L, E], live."""

    def _view(self, region: str, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
        start = self.layout[f"{region}_offset"]
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self._bytes[start : start + size].view(dtype).reshape(shape)

    def _struct(self, region: str, prefix: str, fields: Mapping[str, Any], size: str, count: int) -> NDArray[Any]:
        dtype = np.dtype(
            {
                "names": list(fields),
                "formats": list(fields.values()),
                "offsets": [self.layout[f"{prefix}_{name}_field"] for name in fields],
                "itemsize": self.layout[size],
            }
        )
        return self._view(region, dtype, (count,))

    @property
    def part(self) -> int:
        """The latest publish whose CPU share is done."""
        return int(self._words["part"][0])

    @property
    def abort(self) -> int:
        """0, or an ``abort_NAME`` of the layout."""
        return int(self._words["abort"][0])

    @property
    def request(self) -> NDArray[Any]:
        """The request header, live."""
        fields = {"seq": "u4", "layer": "u4", "step_id": "u8", "num_tokens": "u4", "top_k": "u4", "flags": "u4"}
        row: NDArray[Any] = self._struct("request", "request", fields, "request_bytes", 1)[0]
        return row

    def publish(
        self,
        layer: int,
        ids: NDArray[np.int32],
        hidden: NDArray[np.float32] | None = None,
        weights: NDArray[np.float32] | None = None,
        admit: NDArray[np.uint8] | None = None,
        *,
        step_id: int = 0,
        flags: int = 0,
    ) -> int:
        """Write payload and header, then the sequence number, which is returned. Rings no bell."""
        num_tokens, top_k = ids.shape
        seq = (int(self._words["req"][0]) + 1) % 2**32
        self._view("ids", np.int32, ids.shape)[:] = ids
        if hidden is not None:
            self._view("hidden", np.float32, hidden.shape)[:] = hidden
        self._view("weights", np.float32, ids.shape)[:] = 1.0 if weights is None else weights
        self._view("admit", np.uint8, (num_tokens,))[:] = 1 if admit is None else admit
        self.request["seq"], self.request["layer"], self.request["step_id"] = seq, layer, step_id
        self.request["num_tokens"], self.request["top_k"], self.request["flags"] = num_tokens, top_k, flags
        self._words["req"][0] = seq
        return seq

    def hint(self, layer: int, ids: Sequence[int], *, step_id: int = 0) -> int:
        """Say that a publish of ``layer`` will probably name ``ids``; the hint's number."""
        seq = (int(self._words["hint"][0]) + 1) % 2**32
        start = self.layout["hint_request_offset"]
        for name, dtype, value in (
            ("step_id", np.uint64, [step_id]),
            ("layer", np.uint32, [layer]),
            ("num_ids", np.uint32, [len(ids)]),
            ("ids", np.int32, list(ids)),
        ):
            at = start + self.layout[f"hint_{name}_field"]
            self._bytes[at : at + len(value) * np.dtype(dtype).itemsize].view(dtype)[:] = value
        self._words["hint"][0] = seq
        return seq

    def await_ahead(self, seq: int) -> int:
        """The expert whose record is to be copied for this hint, or -1."""
        start = self.layout["ahead_offset"]
        piece = self._bytes[start : start + 16].view(np.int32)
        deadline = time.monotonic() + WAIT_S
        while int(np.uint32(piece[0])) != seq:
            if time.monotonic() > deadline:
                raise TimeoutError(f"hint {seq} was not answered within {WAIT_S:g} s")
            time.sleep(0)
        return int(piece[2]) if piece[1] else -1

    def await_plan(self, seq: int) -> RawPlan:
        """Raises ``RuntimeError`` when the mailbox is aborted, ``TimeoutError`` after ``WAIT_S``."""
        self._await("plan", seq)
        counts = ("seq", "num_hits", "num_fetches", "num_cpu", "num_routes", "num_admitted", "num_evicted", "num_split")
        row = self._struct("plan_header", "plan", dict.fromkeys(counts, "u4"), "plan_header_bytes", 1)[0]
        header = {name: int(row[name]) for name in counts}
        count = header["num_hits"] + header["num_fetches"] + header["num_cpu"]
        names = (
            "expert",
            "kind",
            "source_slot",
            "destination_slot",
            "first_route",
            "num_routes",
            "first_tile",
            "num_tiles",
        )
        entries = self._struct("entries", "entry", dict.fromkeys(names, "i4"), "entry_bytes", count)
        routes = self._view("routes", np.int32, (header["num_routes"],)).copy()
        return RawPlan(header, [{name: int(entry[name]) for name in names} for entry in entries], routes)

    def await_part(self, seq: int) -> None:
        """Like ``await_plan``, for the CPU share."""
        self._await("part", seq)

    def partial(self, num_rows: int) -> NDArray[np.float32]:
        """[num_rows, H], copied."""
        return self._view("partial", np.float32, (num_rows, self.layout["hidden"])).copy()

    def _await(self, word: str, seq: int) -> None:
        deadline = time.monotonic() + WAIT_S
        reasons = {value: name[len("abort_") :] for name, value in self.layout.items() if name.startswith("abort_")}
        reasons.pop(self.layout["abort_offset"], None)
        while int(self._words[word][0]) != seq:
            if self.abort:
                raise RuntimeError(f"the mailbox was aborted: {reasons[self.abort]}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{word} did not reach {seq} within {WAIT_S:g} s")
            time.sleep(0)
        if self.abort:
            raise RuntimeError(f"the mailbox was aborted: {reasons[self.abort]}")
