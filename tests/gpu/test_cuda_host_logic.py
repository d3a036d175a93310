"""What the CUDA device decides on the host: pieces, packed inputs, registered host memory, pipelining, watchdog."""

from __future__ import annotations

import ctypes
import itertools
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken._native import SharedSegment
from freetoken.errors import FreeTokenError
from freetoken.execution.pipelined_thread import PipelinedStepThread
from freetoken.messages import RowResult, StepFailed, StepPlan, StepResult, StepRow

pytest.importorskip("triton", reason="needs triton")

from freetoken.execution.cuda import host_memory
from freetoken.execution.cuda.bounce import Bounce, BounceCopy
from freetoken.execution.cuda.enqueued import Pending
from freetoken.execution.cuda.executor import CudaStepExecutor
from freetoken.execution.cuda.host_memory import (
    MailboxWindow,
    PinnedRing,
    RegisteredStore,
    empty_pinned,
    piece_end,
    segment_address,
)
from freetoken.execution.cuda.inputs import RequestTable, StepInputs, StepShape, pack_fields
from freetoken.execution.cuda.pieces import PIECE_BUCKETS, cut_pieces, query_blocks
from freetoken.execution.cuda.watchdog import Watchdog
from freetoken.execution.step_executor import StepLimits
from freetoken.testing.cuda_rig import HostDriver

LIMIT_S = 20.0


# ------------------------------------------------------------------------------------------------ pieces


@pytest.mark.parametrize("lengths", [[1], [8], [9], [128], [129], [1, 300, 1, 5], [64] * 5, [1] * 200])
def test_pieces_cover_every_token_once_in_order(lengths: list[int]) -> None:
    pieces = cut_pieces(lengths)
    seen = [(part.row, part.start + i) for piece in pieces for part in piece.parts for i in range(part.count)]
    assert seen == [(row, i) for row, length in enumerate(lengths) for i in range(length)]
    offset = 0
    for piece in pieces:
        assert piece.offset == offset and piece.bucket in PIECE_BUCKETS
        assert piece.num_real == sum(part.count for part in piece.parts) <= piece.bucket
        assert piece.num_real > piece.bucket // 2 or piece.bucket == PIECE_BUCKETS[0]
        assert [part.first for part in piece.parts] == list(np.cumsum([0, *(p.count for p in piece.parts)])[:-1])
        offset += piece.bucket


@pytest.mark.parametrize("per_block", [1, 16])
def test_query_blocks_cover_a_piece(per_block: int) -> None:
    (piece,) = cut_pieces([3, 40, 1])
    blocks = query_blocks(piece, per_block)
    cells = sorted(first + i for _, first, count in blocks for i in range(count))
    assert cells == list(range(44))
    for row, first, count in blocks:
        (part,) = [part for part in piece.parts if part.row == row]
        assert 0 < count <= per_block and part.first <= first and first + count <= part.first + part.count


# ------------------------------------------------------------------------------------------------ inputs


def test_packed_fields_do_not_overlap_and_survive_the_copy() -> None:
    inputs = StepInputs(StepShape(64, 8, 64, 2), torch.device("cpu"))
    for shape in (StepShape(1, 1), StepShape(5, 2, 7, 2), StepShape(64, 8, 64, 2)):
        fields, size = pack_fields(shape)
        spans = sorted((field.offset, field.end) for field in fields.values())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans)) and spans[-1][1] <= size
        views = inputs.host_views(shape)
        for number, view in enumerate(views.values()):
            view[...] = number + 1
        inputs.upload(shape)
        for number, tensor in enumerate(inputs.device_views(shape).values()):
            assert tensor.tolist() == [number + 1] * len(tensor)
            assert len(tensor) == 0 or tensor.data_ptr() % 16 == 0


def test_a_filled_buffer_stays_until_the_step_after_the_next() -> None:
    inputs = StepInputs(StepShape(4, 4), torch.device("cpu"))
    first = inputs.host_views(StepShape(4, 4))["token"]
    first[...] = 7
    inputs.upload(StepShape(4, 4))
    inputs.host_views(StepShape(4, 4))["token"][...] = 8
    assert first.tolist() == [7] * 4


def test_request_slots_and_block_tables() -> None:
    table = RequestTable(2, 4, torch.device("cpu"))
    a, b = table.slot("a"), table.slot("b")
    assert {a, b} == {1, 2} and table.slot("a") == a and table.num_free == 0
    with pytest.raises(IndexError):
        table.slot("c")
    table.note_blocks(a, 0, (5, 6))
    table.note_blocks(a, 2, (9,))
    table.note_blocks(b, 0, (7,))
    table.flush()
    table.flush()
    assert table.block_tables[a].tolist() == [5, 6, 9, 0] and table.block_tables[b].tolist() == [7, 0, 0, 0]
    assert table.block_tables[0].tolist() == [0] * 4
    table.release("a")
    table.release("unknown")
    assert table.slot("c") == a
    table.clear()
    assert table.num_free == 2


def test_notes_of_a_step_that_does_not_run_are_forgotten() -> None:
    table = RequestTable(1, 4, torch.device("cpu"))
    table.note_blocks(table.slot("a"), 0, (5, 6))
    table.forget_notes()
    table.release("a")
    table.note_blocks(table.slot("b"), 0, (7,))
    table.flush()
    assert table.block_tables[1].tolist() == [7, 0, 0, 0]
    table.note_blocks(table.slot("b"), 1, (8,))
    table.clear()
    table.flush()
    assert table.block_tables[1].tolist() == [7, 0, 0, 0]


# ------------------------------------------------------------------------------------------------ host memory


PAGE = 4096


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "PIECE_BYTES", 8 * PAGE)
    monkeypatch.setattr(host_memory, "SMALLEST_PIECE_BYTES", PAGE)
    monkeypatch.setattr(host_memory, "HEADROOM_BYTES", 2 * PAGE)


def test_pieces_end_at_records_where_they_can() -> None:
    def pages(size: int, cuts: list[int], piece: int) -> list[int]:
        ends = [0]
        while ends[-1] < size * PAGE:
            ends.append(piece_end(ends[-1], size * PAGE, [cut * PAGE for cut in cuts], piece * PAGE + 100))
        return [end // PAGE for end in ends[1:]]

    assert pages(10, [], 4) == [4, 8, 10]
    assert pages(10, [0, 3, 6, 9], 4) == [3, 6, 10]
    assert pages(10, [0, 9], 4) == [4, 8, 10]
    assert pages(4, [0, 2], 8) == [4]


def whole_records(store: RegisteredStore, segments: list[SharedSegment], stride: int) -> list[list[bool]]:
    """By segment: which records of ``stride`` bytes, one after the other, the device can read, in agreement of all
    that tell."""
    found = []
    for number, segment in enumerate(segments):
        offset = np.arange(0, segment.size_bytes - stride + 1, stride, dtype=np.int64)[None]
        at = np.full(offset.shape, number, np.int32)
        table = store.record_addresses(at, offset, [stride])
        addresses, ranges = store.record_sources(at, offset, [stride])
        base = segment_address(segment)
        leading = offset + stride <= store.fetchable[number]
        assert (table == np.where(leading, offset + base, 0)).all() and ((ranges >= 0) <= leading).all()
        assert (addresses == offset + base).all()
        found.append(leading[0].tolist())
    return found


@pytest.mark.usefixtures("small_pieces")
@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 24), min_size=1, max_size=3),
    record=st.integers(1, 5),
    limit=st.integers(0, 80),
    most=st.integers(0, 80),
    largest=st.sampled_from([1, 3, 1000]),
)
def test_all_but_the_smallest_piece_of_what_can_be_pinned_is(
    sizes: list[int], record: int, limit: int, most: int, largest: int
) -> None:
    """Under a limit of the driver's, one for each registration, and one of our own."""
    segments = [SharedSegment.create(f"s{i}", size * record * PAGE) for i, size in enumerate(sizes)]
    cuts = [list(range(0, segment.size_bytes, record * PAGE)) for segment in segments]
    driver = HostDriver(limit_bytes=limit * PAGE, largest_bytes=max(largest, record, 2) * PAGE)
    store = RegisteredStore(driver, segments, cuts, limit_bytes=most * PAGE)
    total = sum(segment.size_bytes for segment in segments)
    pinned = sum(driver.ranges.values())
    assert pinned == store.registered_bytes == sum(store.fetchable) <= min(limit, most) * PAGE
    assert pinned == total or pinned > min((limit - 2) * PAGE, most * PAGE) - record * PAGE
    assert all(address % PAGE == 0 for address in driver.ranges)
    whole = whole_records(store, segments, record * PAGE)
    assert sum(map(sum, whole)) * record * PAGE == pinned
    store.close()
    store.close()
    assert driver.ranges == {} and driver.most_bytes <= limit * PAGE


@pytest.mark.usefixtures("small_pieces")
def test_segments_that_are_not_wanted_are_left_alone() -> None:
    segments = [SharedSegment.create(f"s{i}", 4 * PAGE) for i in range(3)]
    cuts = [list(range(0, 4 * PAGE, PAGE))] * 3
    store = RegisteredStore(HostDriver(limit_bytes=8 * PAGE), segments, cuts, wanted=[False, True, True])
    assert store.fetchable == [0, 4 * PAGE, 4 * PAGE] or store.fetchable == [0, 4 * PAGE, 2 * PAGE]
    assert store.device_address(0, 0, PAGE) == 0
    store.close()


@pytest.mark.usefixtures("small_pieces")
def test_records_at_the_edges_of_pieces() -> None:
    """One that crosses into what is not pinned cannot be read; one that crosses pieces can, but not be copied whole."""
    segments = [SharedSegment.create("s", 24 * PAGE)]
    driver = HostDriver(limit_bytes=12 * PAGE)
    store = RegisteredStore(driver, segments, [[]])  # cut anywhere: 8 pages, then 2, 1 and 1
    assert store.fetchable == [10 * PAGE]
    at, offset = np.zeros((1, 3), np.int32), np.array([[0, 7 * PAGE, 9 * PAGE]], np.int64)
    base = segment_address(segments[0])
    assert store.record_addresses(at, offset, [2 * PAGE]).tolist() == [[base, base + 7 * PAGE, 0]]
    _, ranges = store.record_sources(at, offset, [2 * PAGE])
    assert ranges.tolist() == [[0, -1, -1]]
    store.close()


@pytest.mark.usefixtures("small_pieces")
def test_a_store_whose_registration_breaks_off_keeps_nothing() -> None:
    class Broken(HostDriver):
        def device_address(self, address: int) -> int:
            if len(self.ranges) > 3:
                raise FreeTokenError("no device address")
            return address

    driver = Broken()
    with pytest.raises(FreeTokenError, match="no device address"):
        RegisteredStore(driver, [SharedSegment.create("s", 40 * PAGE)], [[]])
    assert driver.ranges == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="pinning fails where there is no driver")
def test_where_nothing_can_be_pinned_copies_have_pageable_memory(caplog: pytest.LogCaptureFixture) -> None:
    host = empty_pinned((2, 3), torch.float32, torch.device("cuda"))
    assert host.shape == (2, 3) and not host.is_pinned() and "event=not_pinned" in caplog.text


def test_the_mailbox_window_shows_one_segment_after_the_other_at_the_same_address() -> None:
    driver = HostDriver()
    window = MailboxWindow(driver, 3 * 4096)
    addresses = []
    for value in (1, 2):
        segment = SharedSegment.create("box", 2 * 4096)
        np.frombuffer(memoryview(segment), np.uint8)[...] = value
        window.attach(segment)
        addresses.append(window.device_address)
        seen = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * 8192).from_address(window.address))
        assert seen.min() == seen.max() == value
        assert list(driver.ranges) == [window.address]
    assert addresses[0] == addresses[1] != 0
    with pytest.raises(FreeTokenError, match="does not fit"):
        window.attach(SharedSegment.create("large", 4 * 4096))
    window.close()
    window.close()
    assert driver.ranges == {}


# ------------------------------------------------------------------------------------------------ bounce buffers


class LateCopier:
    """A copy engine that makes its copies when somebody waits for them."""

    def __init__(self, refuse_at: int = 1 << 30) -> None:
        self.thread: int | None = None
        self.pending: list[tuple[int, int, int]] = []
        self.marks: dict[int, int] = {}
        self.done = 0
        self.refuse_at = refuse_at

    def enter(self) -> None:
        self.thread = threading.get_ident()

    def copy(self, destination: int, source: int, size_bytes: int) -> None:
        if len(self.pending) == self.refuse_at:
            raise FreeTokenError("copying failed: CUDA_ERROR_INVALID_VALUE")
        self.pending.append((destination, source, size_bytes))

    def mark_buffer(self, number: int) -> None:
        self.marks[number] = len(self.pending)

    def await_buffer(self, number: int) -> None:
        self.run(self.marks.get(number, 0))

    def run(self, until: int) -> None:
        for copy in self.pending[self.done : until]:
            ctypes.memmove(*copy)
        self.done = max(self.done, until)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 20_000), max_size=6), st.integers(1, 3))
def test_bounced_copies_arrive_whatever_the_engine_s_pace(sizes: list[int], buffers: int) -> None:
    random = np.random.default_rng(len(sizes))
    sources = [random.integers(0, 256, size, np.uint8) for size in sizes]
    targets = [np.zeros(size, np.uint8) for size in sizes]
    copier, driver = LateCopier(), HostDriver()
    ring = PinnedRing(driver, 4096, buffers)
    bounce = Bounce(copier, ring)
    ended: list[int] = []
    for _ in range(2):  # the second job goes on in the ring where the first has left it
        for target in targets:
            target[...] = 0
        copies = [
            BounceCopy(target.ctypes.data, source.ctypes.data, source.size)
            for source, target in zip(sources, targets, strict=True)
        ]
        bounce.start(copies, lambda: ended.append(len(copier.pending)))
        bounce.join()
        assert copier.thread != threading.get_ident() and ended[-1] == len(copier.pending)
        assert len(copier.pending) - copier.done <= buffers  # copies in flight have a buffer each
        copier.run(len(copier.pending))
        assert all((source == target).all() for source, target in zip(sources, targets, strict=True))
    bounce.join()
    bounce.close()
    bounce.close()
    ring.close()
    ring.close()
    assert driver.ranges == {}


def test_a_refused_copy_is_told_by_join_and_no_end_comes() -> None:
    source = np.zeros(9000, np.uint8)
    bounce = Bounce(LateCopier(refuse_at=1), PinnedRing(HostDriver(), 4096, 2))
    ended: list[bool] = []
    bounce.start([BounceCopy(source.ctypes.data, source.ctypes.data, 9000)], lambda: ended.append(True))
    with pytest.raises(FreeTokenError, match="CUDA_ERROR_INVALID_VALUE"):
        bounce.join()
    with pytest.raises(FreeTokenError):  # until there is another job
        bounce.join()
    assert ended == []
    bounce.start([], lambda: ended.append(True))
    bounce.join()
    assert ended == [True]
    bounce.close()
    driver = HostDriver(limit_bytes=4095)
    with pytest.raises(FreeTokenError, match=r"8\.00 KiB of bounce buffers"):
        PinnedRing(driver, 4000, 2)
    assert driver.ranges == {}


# ------------------------------------------------------------------------------------------------ order of steps


def test_only_long_prefill_waits_for_the_step_before() -> None:
    # As with 8 experts a layer, where staging is soon the cheaper way for prefill.
    model: Any = SimpleNamespace(
        weights=SimpleNamespace(spec=SimpleNamespace(vocab_size=10)),
        long_tokens=lambda tokens: 128 if tokens > 3 else 0,
        background_tokens=lambda tokens: 128,
        decode_batch=lambda rows: rows if rows <= 8 else None,
    )
    executor = CudaStepExecutor(model, None, StepLimits(16, 64, 1024, 256, 0), None)

    steps = itertools.count(2)

    def plan(*lengths: int) -> StepPlan:
        return StepPlan(next(steps), 1, tuple(StepRow(f"r{i}", 0, length, True) for i, length in enumerate(lengths)))

    assert not executor.must_finish_first(plan(100))
    executor._pending.append(Pending(plan(1), 0))
    assert executor.must_finish_first(plan(100)) and executor.must_finish_first(plan(1, 1, 2))
    assert executor.must_finish_first(plan(*[1] * 9))
    assert not executor.must_finish_first(plan(*[1] * 8))
    assert not executor.must_finish_first(plan(2)) and not executor.must_finish_first(plan())
    # What was chosen for a step stays: residency changes, and a long piece behind another would take its buffers.
    for tokens in (2, 100):
        step = plan(tokens)
        before = executor.must_finish_first(step)
        model.long_tokens = lambda tokens, before=before: 0 if before else 128
        assert executor.must_finish_first(step) == before
        assert executor._long_tokens(step.step_id, tokens) == (128 if before else 0)
        model.long_tokens = lambda tokens: 128 if tokens > 3 else 0
    model.long_tokens = lambda tokens: 0  # shared passes, but two of them
    assert executor.must_finish_first(plan(129)) and not executor.must_finish_first(plan(128))


# ------------------------------------------------------------------------------------------------ pipelining


class TwoHalves:
    """Records the order of halves; ``finish`` waits for the gate."""

    depth = 2

    def __init__(self, host_sampled: frozenset[str] = frozenset()) -> None:
        self.gate = threading.Semaphore(0)
        self.log: list[str] = []
        self.changed = threading.Condition()
        self.host_sampled = host_sampled
        self.under_way: set[str] = set()

    def must_finish_first(self, plan: StepPlan) -> bool:
        return bool(self.under_way & {row.request_id for row in plan.rows} & self.host_sampled)

    def enqueue(self, plan: StepPlan) -> Any:
        self.under_way = {row.request_id for row in plan.rows}
        self._note(f"enqueue {plan.step_id}")
        return plan

    def finish(self, pending: Any) -> StepResult | StepFailed:
        assert self.gate.acquire(timeout=LIMIT_S)
        self.under_way = set()
        self._note(f"finish {pending.step_id}")
        return StepResult(pending.step_id, 1, tuple(RowResult(row.request_id, 1) for row in pending.rows), 0, 0)

    def _note(self, entry: str) -> None:
        with self.changed:
            self.log.append(entry)
            self.changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.log) >= count, LIMIT_S), self.log


def plan_of(step: int, name: str = "a") -> StepPlan:
    return StepPlan(step, 1, (StepRow(name, step, 1, True, True),))


def test_the_next_step_is_enqueued_before_the_last_is_finished() -> None:
    executor, outcomes = TwoHalves(), []
    thread = PipelinedStepThread(lambda plan, outcome: outcomes.append(outcome.step_id))
    for step in (1, 2, 3):
        thread.submit(executor, plan_of(step))  # type: ignore[arg-type]
    executor.wait_for(2)
    assert executor.log == ["enqueue 1", "enqueue 2"]
    with pytest.raises(FreeTokenError, match="did not end"):
        thread.drain(0.01)
    for _ in range(3):
        executor.gate.release()
    thread.drain(LIMIT_S)
    assert executor.log[2] == "finish 1" and outcomes == [1, 2, 3][: len(outcomes)]
    thread.close(LIMIT_S)
    thread.close(LIMIT_S)
    assert thread.stats.steps == len(outcomes)


def test_a_request_sampled_on_the_host_is_finished_first() -> None:
    executor = TwoHalves(frozenset("a"))
    thread = PipelinedStepThread(lambda plan, outcome: None)
    for step, name in ((1, "a"), (2, "b"), (3, "b"), (4, "a"), (5, "a")):
        thread.submit(executor, plan_of(step, name))  # type: ignore[arg-type]
    for _ in range(5):
        executor.gate.release()
    executor.wait_for(10)
    assert executor.log.index("finish 4") < executor.log.index("enqueue 5")
    thread.close(LIMIT_S)


# ------------------------------------------------------------------------------------------------ watchdog


def test_the_watchdog_reports_a_standstill_but_not_progress() -> None:
    late = threading.Event()
    words = [0]
    moving = threading.Event()

    def progress() -> int:
        if not moving.is_set():
            words[0] += 1
        return words[0]

    watchdog = Watchdog(0.08, progress, late.set)
    watchdog.begin()
    assert not late.wait(0.3)
    moving.set()  # from now on nothing moves
    assert late.wait(LIMIT_S)
    watchdog.end()
    watchdog.close()
