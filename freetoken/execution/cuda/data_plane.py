"""The device's side of the mailbox: addresses, the sequence counter, and what every expert layer needs to ask and read.

Sequence numbers count on the device. All that kernels get are addresses in the mailbox window, which outlive epochs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freetoken._native import Mailbox
from freetoken.errors import FreeTokenError
from freetoken.execution.cuda.arena import CudaArena
from freetoken.execution.cuda.host_memory import MailboxWindow
from freetoken.kernels.triton import lookahead as lookahead_kernels
from freetoken.kernels.triton import mailbox as mailbox_kernels
from freetoken.kernels.triton import placed_plan
from freetoken.kernels.triton.combine import PartWait
from freetoken.kernels.triton.mailbox import MailboxAddresses
from freetoken.kernels.triton.plan import DevicePlan
from freetoken.messages import ExpertCounters
from freetoken.models.spec import RouterSpec
from freetoken.quant.record import RecordLayout

# Columns of a layer's counts, see ``DevicePlan.counts``.
COUNT_COLUMNS = 8
_HITS, _FETCHES, _CPU, _CHANGES, _STATUS = 1, 2, 3, 5, 6
_POLL_S = 20e-6
_POLLS_PER_QUERY = 50
# Of the copy ahead of time: as much under way as fills the bus, and no more, because what the layer's own kernels read
# from the host meanwhile queues up behind it (24 programs on an H200: a look at the CPU's answer takes 28 us).
AHEAD_PROGRAMS = 8


def mailbox_addresses(layout: Mapping[str, int], base: int) -> MailboxAddresses:
    """Device addresses of a mailbox whose segment lies at ``base``."""
    names = (
        "req",
        "plan",
        "part",
        "abort",
        "request",
        "hidden",
        "ids",
        "weights",
        "admit",
        "plan_header",
        "entries",
        "routes",
        "partial",
    )
    return MailboxAddresses(
        **{name: base + layout[f"{name}_offset"] for name in names},
        stamps=base + layout["stamps_offset"] + layout["stamps_client_field"],
        stamps_stride_bytes=layout["stamps_bytes"],
        brief=base + layout["brief_offset"],
        hint=base + layout["hint_offset"],
        hint_request=base + layout["hint_request_offset"],
        ahead=base + layout["ahead_offset"],
    )


@dataclass(frozen=True)
class ExpertRecords:
    """Where the device finds records: ``addresses`` int64 [L, E] on the device (0: not readable), their layouts by
    layer. ``complete``: whether it can read every one; else there must be no publish for the device alone unless they
    are staged."""

    addresses: Tensor
    layouts: tuple[RecordLayout, ...]
    complete: bool = True

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes of one record, by layer."""
        return tuple(layout.stride_bytes for layout in self.layouts)

    @property
    def tiles(self) -> tuple[int, ...]:
        """Tiles of one record, by layer."""
        return tuple(layout.num_tiles for layout in self.layouts)


@dataclass(frozen=True)
class LookaheadBuffers:
    """Of hints, see ``kernels.triton.lookahead``. ``place`` uint8, room for one record. ``logits`` float32 [2, 1, E]:
    of layers in turn, because a hint may still be read when the next one's logits are written."""

    place: Tensor
    logits: Tensor
    seq: Tensor
    count: Tensor
    copies: Tensor

    @classmethod
    def allocate(cls, record_bytes: int, num_experts: int, device: torch.device) -> LookaheadBuffers:
        """For records of up to so many bytes."""
        return cls(
            place=torch.zeros(record_bytes, dtype=torch.uint8, device=device),
            logits=torch.zeros((2, 1, num_experts), dtype=torch.float32, device=device),
            seq=torch.zeros(1, dtype=torch.int32, device=device),
            count=torch.zeros(1, dtype=torch.int32, device=device),
            copies=torch.zeros((1, 2), dtype=torch.int64, device=device),
        )

    @property
    def place_address(self) -> int:
        """Device address of ``place``."""
        return self.place.data_ptr()


class DataPlane:
    """One model's mailbox as its kernels see it. Used on the stream that runs the steps.

    ``counts`` int32 [L, 8] receives each layer's plan counts of the running step.
    """

    def __init__(
        self,
        window: MailboxWindow,
        records: ExpertRecords,
        arena: CudaArena,
        router: RouterSpec,
        limit_s: float,
        counts: Tensor,
        looks_ahead: bool = False,
    ) -> None:
        """``limit_s``: longest wait for one layer's answer. ``looks_ahead``: steps of one token give hints."""
        self.window = window
        self.records = records
        self.router = router
        self.counts = counts
        self.limit_ns = int(limit_s * 1e9)
        self._arena = arena
        self._layout: dict[str, int] | None = None
        self.in_layer = False
        """Whether the launches of an expert layer have come as far as its publish and not to their end. If they go no
        further, ExpertCache takes slots for filled, at the next publish, that are not."""
        self.box: MailboxAddresses | None = None
        self.flags = 0
        self.slot_of: NDArray[np.int32] = np.zeros((0, 0), np.int32)
        """[L, E] of the attached mailbox: the slot of each record, or -1. ExpertCache changes it between a publish and
        its plan, and at any time where records leave their slots for good or for others."""
        self._words: NDArray[np.uint32] = np.zeros(0, np.uint32)
        device = counts.device
        self.nothing_staged = torch.zeros(router.num_experts, dtype=torch.int64, device=device)
        self.seq = torch.zeros(1, dtype=torch.int32, device=device)
        self._gate = torch.zeros_like(self.seq)
        self.lookahead: LookaheadBuffers | None = None
        if looks_ahead and router.num_experts_per_tok <= lookahead_kernels.MAX_HINTED:
            self.lookahead = LookaheadBuffers.allocate(max(records.strides), router.num_experts, device)

    def attach(self, mailbox: Mailbox) -> None:
        """Serve this mailbox from now on. The device must be idle.

        Raises ``FreeTokenError`` when its layout differs from the one before: kernels are captured with addresses.
        """
        layout = mailbox.layout()
        if self._layout is not None and layout != self._layout:
            raise FreeTokenError("the layout of the mailbox changed between epochs")
        self.window.attach(mailbox.segment)
        self.in_layer = False
        self._layout = layout
        self.box = mailbox_addresses(layout, self.window.device_address)
        self.flags = layout["flag_device_client"]
        words = np.frombuffer(memoryview(mailbox.segment), np.uint32)
        start, count = layout["slot_of_offset"] // 4, layout["num_layers"] * layout["num_experts"]
        self._words = words
        self.slot_of = words[start : start + count].view(np.int32).reshape(layout["num_layers"], -1)
        self.seq.fill_(int(words[layout["req_offset"] // 4].view(np.int32)))
        self._gate.copy_(self.seq)
        if self.lookahead is not None:
            self.lookahead.seq.fill_(int(words[layout["hint_offset"] // 4].view(np.int32)))

    @property
    def max_shared_tokens(self) -> int:
        """Tokens of a publish in which the CPU may take part."""
        assert self._layout is not None
        return self._layout["max_shared_tokens"]

    def new_plan(self, tokens: int, top_k: int) -> DevicePlan:
        """Room for the plans of publishes of ``tokens`` tokens; its counts are replaced layer by layer."""
        max_entries = min(self.router.num_experts, tokens * top_k)
        return DevicePlan.empty(max_entries, tokens * top_k, self.counts.device)

    def layer_plan(self, plan: DevicePlan, ordinal: int, counts: Tensor | None = None) -> DevicePlan:
        """``plan`` with the counts of expert layer ``ordinal``; of the running step, or in ``counts`` [L, 8]."""
        return DevicePlan(
            (self.counts if counts is None else counts)[ordinal], plan.entries, plan.addresses, plan.routes, plan.on_gpu
        )

    def publish(
        self,
        ordinal: int,
        step_id: Tensor,
        num_real: Tensor,
        hidden: Tensor,
        ids: Tensor,
        weights: Tensor,
        admit: Tensor,
        logits: Tensor | None,
    ) -> None:
        """Publish T rows of an expert layer, choosing experts from ``logits`` where given."""
        assert self.box is not None and self._layout is not None
        router = self.router
        self.in_layer = True
        mailbox_kernels.publish(
            self.box, self.seq, step_id, num_real, hidden, ids, weights, admit, ordinal,
            logits=logits,
            flags=self.flags | self._layout["flag_splittable"],
            scoring=router.scoring, renormalize=router.renormalize, scaling=router.scaling,
        )  # fmt: skip

    def await_plan(self, ordinal: int, plan: DevicePlan, one_token: bool = False) -> None:
        """Wait for the answer to the last publish (of one token) and fill ``plan`` (of this layer)."""
        assert self.box is not None
        mailbox_kernels.await_plan(
            self.box, self.seq, self.records.addresses[ordinal], self._arena.slots_address,
            self._arena.slot_stride_bytes, plan, self.limit_ns, stamps=self.box.layer_stamps(ordinal),
            one_token=one_token, ahead_place=self.lookahead.place_address if self.lookahead is not None else 0,
        )  # fmt: skip

    def hint(self, ordinal: int, step_id: Tensor, logits: Tensor) -> None:
        """Say that expert layer ``ordinal`` of this step will probably choose by ``logits`` float32 [1, E], and learn
        which record to copy for it."""
        assert self.box is not None and self.lookahead is not None
        router, ahead = self.router, self.lookahead
        lookahead_kernels.publish_hint(
            self.box, ahead.seq, step_id, logits, router.num_experts_per_tok, ordinal,
            scoring=router.scoring, renormalize=router.renormalize, scaling=router.scaling,
        )  # fmt: skip
        self._take_answer(ordinal, ahead)

    def _take_answer(self, ordinal: int, ahead: LookaheadBuffers) -> None:
        assert self.box is not None
        lookahead_kernels.take_answer(
            self.box, ahead.seq, self.records.addresses[ordinal], ahead.place_address, ahead.count, ahead.copies,
            self.limit_ns,
        )  # fmt: skip

    def copy_ahead(self, ordinal: int) -> None:
        """Copy what the last ``hint``, of this layer, was answered with. Nothing may read the place any more."""
        assert self.lookahead is not None
        size_bytes = self.records.layouts[ordinal].payload_bytes
        lookahead_kernels.copy_ahead(self.lookahead.count, self.lookahead.copies, size_bytes, AHEAD_PROGRAMS)

    def publish_routes(
        self,
        ordinal: int,
        step_id: Tensor,
        num_real: Tensor,
        ids: Tensor,
        weights: Tensor,
        admit: Tensor,
        hidden: Tensor | None,
        staged: bool = False,
    ) -> int:
        """Publish any number of tokens that the mailbox holds, padding beyond is left out; without ``hidden`` for the
        device alone. ``staged``: it has at hand what it cannot read in host memory. Returns the number of routes
        published."""
        assert self.box is not None and self._layout is not None
        rows = min(len(ids), self._layout["max_tokens"])
        self.in_layer = True
        placed_plan.publish_routes(
            self.box, self.seq, step_id, num_real, ids[:rows], weights[:rows], admit[:rows], ordinal,
            flags=self.flags
            | (self._layout["flag_device_only"] if hidden is None else 0)
            | (self._layout["flag_staged"] if staged and not self.records.complete else 0),
            hidden=hidden,
        )  # fmt: skip
        return rows * ids.shape[1]

    def await_placed_plan(
        self,
        ordinal: int,
        plan: DevicePlan,
        copies: Tensor,
        num_routes: int,
        staged: Tensor,
        spares: tuple[int, int, int],
    ) -> None:
        """Wait for the answer to the last publish; fill ``plan`` (of this layer) and ``copies`` (see
        ``kernels.triton.placed_plan``)."""
        assert self.box is not None
        placed_plan.await_placed_plan(
            self.box, self.seq, self.records.addresses[ordinal], staged, self._arena.slots_address,
            self._arena.slot_stride_bytes, spares, plan, copies, num_routes, self.limit_ns,
        )  # fmt: skip

    def slot_address(self, slot: int) -> int:
        """Where the device has a slot."""
        return self._arena.slots_address + slot * self._arena.slot_stride_bytes

    def exchange(self, limit_s: float, before_wait: Callable[[], None]) -> int:
        """For ``handshake``: publish nothing, and wait for ``part``; the wait's status (0: seen). Without a GPU a
        kernel cannot wait, so ``before_wait`` does."""
        router, device = self.router, self.counts.device
        plan = self.layer_plan(self.new_plan(1, router.num_experts_per_tok), 0)

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        assert self.box is not None and self._layout is not None
        ids = zeros(1, router.num_experts_per_tok, dtype=torch.int32)
        self.publish(
            0, zeros(1, dtype=torch.int64), zeros(1, dtype=torch.int32),
            zeros(1, self._layout["hidden"], dtype=torch.float32), ids, ids.to(torch.float32),
            zeros(1, dtype=torch.uint8), None,
        )  # fmt: skip
        if device.type != "cuda":
            before_wait()
        mailbox_kernels.await_part(self.box, self.seq, plan, int(limit_s * 1e9), always=True)
        return int(plan.counts[6])

    def follow(self, step_id: int, ordinal: int) -> bool:
        """Wait, on the host, until the device has the plan of this expert layer of this step. Nothing later may be
        enqueued yet: other publishes would hide it. False when the mailbox is dead or the device is later than it may
        be: what slots hold at this point of the stream is not known then. Raises ``RuntimeError`` when the device has
        failed."""
        layout, words = self._layout, self._words
        assert layout is not None
        request, plan = layout["request_offset"] // 4, layout["plan_offset"] // 4
        at_seq = request + layout["request_seq_field"] // 4
        at_layer = request + layout["request_layer_field"] // 4
        at_step = (layout["request_offset"] + layout["request_step_id_field"]) // 4
        low, high = step_id & 0xFFFFFFFF, (step_id >> 32) & 0xFFFFFFFF
        stream = torch.cuda.current_stream(self.counts.device) if self.counts.device.type == "cuda" else None
        polls = 0
        end = time.monotonic() + self.limit_ns / 1e9
        while not words[layout["abort_offset"] // 4]:
            if words[at_step] == low and words[at_step + 1] == high:
                layer = words[at_layer]
                if layer > ordinal or (layer == ordinal and words[plan] == words[at_seq]):
                    return True
            if time.monotonic() > end:
                break
            polls += 1
            if stream is not None and polls % _POLLS_PER_QUERY == 0:
                stream.query()  # submits what a driver may have held back, and raises what the device has met
            time.sleep(_POLL_S)
        return False

    def await_part(self, ordinal: int, plan: DevicePlan) -> None:
        """Wait for the CPU share of ``plan`` (of this layer), if it has one."""
        assert self.box is not None
        mailbox_kernels.await_part(self.box, self.seq, plan, self.limit_ns, stamps=self.box.layer_stamps(ordinal))

    def end_layer(self) -> None:
        """Everything is launched that follows from the last publish."""
        self.in_layer = False

    def part_wait(self, ordinal: int) -> PartWait:
        """How the combine kernel of this layer waits for the CPU share."""
        assert self.box is not None
        return PartWait(self.box, self.seq, self._gate, self.limit_ns, self.box.layer_stamps(ordinal))


def read_counts(
    counts: np.ndarray, strides: tuple[int, ...], tiles: tuple[int, ...], passes: int = 1
) -> tuple[ExpertCounters, bool]:
    """(figures of one step, whether every wait was answered) from the layers' counts [L, 8] on the host, which are sums
    over ``passes`` of the layers. ``strides`` and ``tiles`` of a record by layer. A split record counts as a fetch, and
    in bytes by its shares. Sums of the low halves stay below 2^16: a pass has no more than there are experts, and a
    step has some dozens at most."""
    hits, fetches, cpu = (counts[:, column].astype(np.int64) & 0xFFFF for column in (_HITS, _FETCHES, _CPU))
    split = counts[:, _CPU].astype(np.int64) >> 16
    split_fetched = (counts[:, _FETCHES].astype(np.int64) >> 16) / np.asarray(tiles, np.int64)
    bytes_of = np.asarray(strides, np.int64)
    counters = ExpertCounters(
        hits=int(hits.sum()),
        fetches=int(fetches.sum()),
        cpu=int((cpu - split).sum()),
        fetched_bytes=round(float(((fetches - split + split_fetched) * bytes_of).sum())),
        cpu_bytes=round(float(((cpu - split_fetched) * bytes_of).sum())),
        admitted=int((counts[:, _CHANGES] & 0xFFFF).sum()),
        evicted=int((counts[:, _CHANGES] >> 16).sum()),
        layer_steps=len(counts) * passes,
    )
    return counters, not counts[:, _STATUS].any()
