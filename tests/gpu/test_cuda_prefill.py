"""Prefill on the CUDA device in all its ways, against `transformers`: experts by address, put in place beside the CPU's
share, and in long pieces that are staged or not; with residency that changes under way.

On a GPU, else in Triton's interpreter. Float32, tolerance 1e-4.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from freetoken._native import Mailbox
from freetoken.checkpoint.ftw import FtwIndex
from freetoken.errors import CapacityError, FreeTokenError
from freetoken.launch_spec import LaunchSpec
from freetoken.messages import ExpertCounters, RequestInit, StepFailed, StepPlan, StepRow
from freetoken.testing.tiny_checkpoints import load_tiny_checkpoint
from freetoken.units import align_up

triton = pytest.importorskip("triton", reason="needs triton")
ON_GPU = torch.cuda.is_available()
if not ON_GPU and not triton.knobs.runtime.interpret:
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1 in the environment", allow_module_level=True)

from freetoken.costs import CostModel, SideCost  # noqa: E402
from freetoken.execution.cuda import bounce, device_model, expert_kernels, host_memory, prefill_costs  # noqa: E402
from freetoken.execution.cuda import enqueued as enqueued_module  # noqa: E402
from freetoken.execution.cuda.prefill_costs import PrefillCosts  # noqa: E402
from freetoken.execution.cuda.runtime import CudaRuntime  # noqa: E402
from freetoken.execution.cuda.staging import NothingMissing, RecordSources, StagedStep, Stager, plan_copies  # noqa: E402
from freetoken.experts.device_client import fetchable_records, plan_mailbox  # noqa: E402
from freetoken.testing.cuda_rig import CudaRig, HostCopier, HostDriver, limited_driver, load_store  # noqa: E402
from tests.gpu.test_cuda_executor import GREEDY, TOLERANCE, launch_of, ok  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prefill")


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything beyond 8 tokens is put in place, beyond 16 the CPU has no share."""
    monkeypatch.setattr(device_model, "GEMV_EXPERT_TOKENS", 8)
    monkeypatch.setattr(device_model, "LONG_TOKENS", 16)
    monkeypatch.setattr(device_model, "LONG_STEP", 8)


@pytest.fixture
def small_sizes(small_batches: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """And whatever it costs is long."""
    monkeypatch.setattr(PrefillCosts, "prefers_streaming", lambda costs, missing, tokens: tokens > 16)


def prompt_of(length: int) -> list[int]:
    return [(i * 37 + 5) % 500 for i in range(length)]


def row_of(prompt: list[int], start: int, count: int) -> StepRow:
    init = RequestInit(GREEDY, tuple(prompt), len(prompt)) if start == 0 else None
    blocks = tuple(range(8)) if start == 0 else ()
    return StepRow("a", start, count, start + count == len(prompt), False, blocks, init)


@pytest.mark.usefixtures("small_sizes")
@pytest.mark.parametrize(
    ("places", "num_slots", "chunks"),
    [
        (None, 6, (24,)),  # a whole layer fits each half
        (10, 6, (17, 17)),  # it does not; two chunks, the second with what the first has left in the slots
        (0, 4, (23,)),  # no staging at all
        (None, 16, (17, 17)),  # nearly everything becomes resident
    ],
)
def test_long_pieces_equal_the_oracle(
    directory: Path, places: int | None, num_slots: int, chunks: tuple[int, ...]
) -> None:
    tiny = load_tiny_checkpoint("qwen3_moe")
    launch = launch_of("qwen3_moe", directory, num_slots)
    stride = launch.plan.slot_stride_bytes
    if places is not None:
        launch = dataclasses.replace(launch, plan=dataclasses.replace(launch.plan, staging_bytes=places * stride))
    prompt = prompt_of(sum(chunks))
    with CudaRig(launch, fetch_fraction=0.5, capture=False) as rig:
        model = rig.runtime.model
        assert (model.stager is None) == (places == 0)
        total, start = None, 0
        for number, count in enumerate(chunks):
            assert model.long_tokens(count) == -(-count // 8) * 8
            result = ok(rig.executor.execute(StepPlan(number + 1, 1, (row_of(prompt, start, count),))))
            start += count
            total = result.experts if total is None else total + result.experts
        error = (model.logits[0].cpu() - tiny.oracle_logits(prompt)[-1]).abs().max()
        assert error < TOLERANCE
        # Pieces that are not staged leave a share to the CPU, if they are not too long for it.
        assert total is not None and (total.cpu > 0) == (places == 0) and total.fetches > 0
        counters = rig.cache_server.counters()
        assert (counters["admitted"], counters["evicted"]) == (total.admitted, total.evicted)
        if model.stager is not None:
            assert 0 < model.stager.copied_bytes <= total.layer_steps * model.stager.capacity * stride
        # What the slots hold by now is what decoding computes with.
        token = result.rows[0].token_id
        row = StepRow("a", len(prompt), 1, True, True)
        again = ok(rig.executor.execute(StepPlan(9, 1, (row,))))
        assert [token, again.rows[0].token_id] == tiny.oracle_greedy(prompt, 2)


@pytest.mark.usefixtures("small_sizes")
@pytest.mark.parametrize(("places", "fraction"), [(None, 0.5), (0, 0.5), (None, 1.0)])
def test_short_pieces_share_with_the_cpu(directory: Path, places: int | None, fraction: float) -> None:
    tiny = load_tiny_checkpoint("mixtral")
    launch = launch_of("mixtral", directory, num_slots=5)
    if places is not None:
        launch = dataclasses.replace(launch, plan=dataclasses.replace(launch.plan, staging_bytes=places))
    prompt = prompt_of(13)
    with CudaRig(launch, fetch_fraction=fraction, capture=False) as rig:
        model = rig.runtime.model
        model.costs = None
        assert model.long_tokens(13) == 0
        assert (model.piece(16).buffers.placed is None) == (places == 0)
        result = ok(rig.executor.execute(StepPlan(1, 1, (row_of(prompt, 0, 13),))))
        assert (model.logits[0].cpu() - tiny.oracle_logits(prompt)[-1]).abs().max() < TOLERANCE
        assert (result.experts.cpu > 0) == (fraction < 1) and (result.experts.fetches > 0) == (fraction > 0)


@pytest.mark.parametrize("places", [None, 0])
def test_expert_counts_of_several_pieces_are_sums(
    directory: Path, monkeypatch: pytest.MonkeyPatch, places: int | None
) -> None:
    monkeypatch.setattr(enqueued_module, "PIECE_BUCKETS", (8, 16))
    launch = launch_of("mixtral", directory, num_slots=5)
    if places is not None:
        launch = dataclasses.replace(launch, plan=dataclasses.replace(launch.plan, staging_bytes=places))
    prompt = prompt_of(27)
    with CudaRig(launch, fetch_fraction=0.5, capture=False) as rig:
        rig.runtime.model.costs = None
        assert rig.runtime.model.long_tokens(21) == 0
        sums: list[ExpertCounters] = []
        for number, (start, count) in enumerate(((0, 21), (21, 6))):  # pieces of 16 and 8, then of 8
            sums.append(ok(rig.executor.execute(StepPlan(number + 1, 1, (row_of(prompt, start, count),)))).experts)
        layers = len(rig.launch.model.moe_layers)
        assert [found.layer_steps for found in sums] == [2 * layers, layers]
        total, counters = sums[0] + sums[1], rig.cache_server.counters()
        for name in ("hits", "fetches", "cpu", "admitted", "evicted"):
            assert getattr(total, name) == counters[name], name
        stride = rig.index.layouts[0].stride_bytes
        assert total.fetched_bytes + total.cpu_bytes == (total.fetches + total.cpu) * stride


@pytest.mark.usefixtures("small_sizes")
def test_residency_that_changes_between_copy_and_use_is_only_slow(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = load_tiny_checkpoint("qwen3_moe")
    prompt = prompt_of(24)
    stage = Stager.stage

    def outdated(self: Stager, layer: int, slot_of: np.ndarray, slot_address: object = None) -> None:
        # As if half of the records had been resident when the copies were planned, and half of those that are, not.
        stage(self, layer, np.where(np.arange(len(slot_of)) % 2 == 0, 3, -1).astype(np.int32))

    monkeypatch.setattr(Stager, "stage", outdated)
    with CudaRig(launch_of("qwen3_moe", directory, num_slots=6), capture=False) as rig:
        for number, start in enumerate((0, 12)):
            plan = StepPlan(number + 1, 1, (row_of(prompt, start, 12),))
            monkeypatch.setattr(PrefillCosts, "prefers_streaming", lambda costs, missing, tokens: True)
            ok(rig.executor.execute(plan))
        error = (rig.runtime.model.logits[0].cpu() - tiny.oracle_logits(prompt)[-1]).abs().max()
        assert error < TOLERANCE


@pytest.mark.usefixtures("small_sizes")
def test_decode_rows_ride_along_with_a_long_chunk(directory: Path) -> None:
    tiny = load_tiny_checkpoint("qwen3_moe")
    first, second = prompt_of(5), [(i * 11 + 3) % 500 for i in range(18)]
    with CudaRig(launch_of("qwen3_moe", directory, num_slots=6), capture=False) as rig:
        executor, model = rig.executor, rig.runtime.model
        token = ok(executor.execute(StepPlan(1, 1, (row_of(first, 0, 5),)))).rows[0].token_id
        assert token is not None
        init = RequestInit(GREEDY, tuple(second), len(second))
        rows = (StepRow("a", 5, 1, True, True), StepRow("b", 0, 18, True, False, tuple(range(8, 16)), init))
        plan = StepPlan(2, 1, rows)
        pending = executor.enqueue(StepPlan(3, 1, (), ("nobody",)))
        assert executor.must_finish_first(plan)
        ok(executor.finish(pending))
        assert not executor.must_finish_first(plan)
        result = ok(executor.execute(plan))
        for row, tokens in enumerate(([*first, token], second)):
            assert (model.logits[row].cpu() - tiny.oracle_logits(tokens)[-1]).abs().max() < TOLERANCE
        assert [token, result.rows[0].token_id] == tiny.oracle_greedy(first, 2)


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("streams", [False, True])
def test_the_choice_goes_by_costs_and_by_what_is_in_slots(
    directory: Path, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    """20 tokens in shared passes of 16, though there is room to stage them; and 12 streamed."""
    monkeypatch.setattr(enqueued_module, "PIECE_BUCKETS", (8, 16))
    monkeypatch.setattr(prefill_costs, "PIECE_TOKENS", 16)
    monkeypatch.setattr(prefill_costs, "_PASS_NS", 0.0)
    monkeypatch.setattr(prefill_costs, "_FOLLOW_NS", 0.0)
    tiny = load_tiny_checkpoint("qwen3_moe")
    prompt = prompt_of(12 if streams else 20)
    with CudaRig(launch_of("qwen3_moe", directory, num_slots=6), fetch_fraction=0.0, capture=False) as rig:
        model = rig.runtime.model
        assert model.costs is not None and model.plane is not None and model.stager is not None
        spec = tiny.spec
        assert model.costs.record_bytes.tolist() == list(model.plane.records.strides)
        assert model.costs.capacity == model.stager.capacity and model.costs.overlaps
        slow, fast = SideCost(0.0, 1e3), SideCost(0.0, 1.0)
        fetch, cpu = (fast, slow) if streams else (slow, fast)
        model.costs = dataclasses.replace(model.costs, fetch_fraction=0.0, costs=CostModel(fetch, fetch, cpu, cpu))
        assert (model.long_tokens(len(prompt)) > 0) == (model.long_tokens(200) > 0) == streams
        result = ok(rig.executor.execute(StepPlan(1, 1, (row_of(prompt, 0, len(prompt)),))))
        assert (model.logits[0].cpu() - tiny.oracle_logits(prompt)[-1]).abs().max() < TOLERANCE
        assert result.experts.layer_steps == len(spec.moe_layers) * (1 if streams else 2)
        assert (result.experts.cpu > 0) == (not streams) and (model.stager.copied_bytes > 0) == streams
        # By now some are in slots, or none of them where nothing was fetched.
        missing = model.costs.missing(model.plane.slot_of)
        in_slots = (model.plane.slot_of >= 0).sum()
        assert missing.all.sum() == spec.num_experts * len(spec.moe_layers) - in_slots and (in_slots > 0) == streams
        model.plane.slot_of = np.zeros_like(model.plane.slot_of)
        assert model.long_tokens(8) == 0  # there is nothing to stream, and nothing to wait for


class Refusing(HostCopier):
    """Stops working after a few copies."""

    def copy(self, destination: int, source: int, size_bytes: int) -> None:
        if self.copied:
            raise FreeTokenError("copying failed: CUDA_ERROR_INVALID_VALUE")
        super().copy(destination, source, size_bytes)


@pytest.mark.skipif(ON_GPU, reason="copies by the host")
@pytest.mark.usefixtures("small_sizes")
def test_a_copy_engine_that_refuses_is_done_without(directory: Path) -> None:
    tiny = load_tiny_checkpoint("qwen3_moe")
    prompt = prompt_of(20)
    with CudaRig(launch_of("qwen3_moe", directory, num_slots=6), capture=False) as rig:
        stager = rig.runtime.model.stager
        assert stager is not None
        stager.copier = Refusing()
        ok(rig.executor.execute(StepPlan(1, 1, (row_of(prompt, 0, 20),))))
        assert stager.capacity == 0 and rig.runtime.model.staged_step(2) is None
        assert (rig.runtime.model.logits[0].cpu() - tiny.oracle_logits(prompt)[-1]).abs().max() < TOLERANCE


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "HEADROOM_BYTES", 4096)
    monkeypatch.setattr(host_memory, "SMALLEST_PIECE_BYTES", 4096)
    monkeypatch.setattr(bounce, "BUFFER_BYTES", 4096)


def pinned_limit(launch: LaunchSpec, share: float) -> int:
    """Beside mailbox, ring and headroom, so much of the experts."""
    fixed = align_up(Mailbox.required_bytes(*plan_mailbox(launch)), 4096) + 4096 * bounce.NUM_BUFFERS + 4096
    return fixed + int(share * FtwIndex.load(launch.checkpoint).expert_bytes)


@pytest.mark.usefixtures("small_sizes", "small_pieces")
@pytest.mark.parametrize(
    ("share", "places", "num_slots"),
    [
        (0.6, None, 6),  # one layer is pinned, the other in part
        (0.0, None, 6),  # nothing is
        (0.0, 26, 6),  # and a layer does not fit a half
    ],
)
def test_long_pieces_of_a_store_that_is_not_pinned(
    directory: Path, share: float, places: int | None, num_slots: int
) -> None:
    tiny = load_tiny_checkpoint("qwen3_moe")
    launch = launch_of("qwen3_moe", directory, num_slots)
    stride = launch.plan.slot_stride_bytes
    if places is not None:
        launch = dataclasses.replace(launch, plan=dataclasses.replace(launch.plan, staging_bytes=places * stride))
    prompt = prompt_of(34)
    driver = limited_driver(pinned_limit(launch, share))
    with CudaRig(launch, driver=driver, fetch_fraction=0.5, capture=False) as rig:
        model, stager = rig.runtime.model, rig.runtime.model.stager
        assert stager is not None and not model.plane.records.complete and model.streams
        assert stager.num_halves == (2 if places is None else 1)
        fetchable = fetchable_records(rig.index, rig.runtime.fetchable)
        assert (fetchable.sum() > 0) == (share > 0)
        for number, start in enumerate((0, 17)):
            assert model.long_tokens(17) == 24
            result = ok(rig.executor.execute(StepPlan(number + 1, 1, (row_of(prompt, start, 17),))))
            assert result.experts.cpu == 0 and result.experts.fetches > 0
        assert (model.logits[0].cpu() - tiny.oracle_logits(prompt)[-1]).abs().max() < TOLERANCE
        assert stager.moved_bytes > 0  # of the second chunk, what the first has left in slots
        # Slots hold what is not pinned, and decoding computes with it; what they do not hold runs on the CPU.
        slot_of = model.plane.slot_of
        assert ((slot_of >= 0) & ~fetchable).any()
        row = StepRow("a", len(prompt), 1, True, True)
        again = ok(rig.executor.execute(StepPlan(9, 1, (row,))))
        assert again.experts.hits > 0
        assert [result.rows[0].token_id, again.rows[0].token_id] == tiny.oracle_greedy(prompt, 2)
    assert driver.ranges == {}


@pytest.mark.usefixtures("small_sizes", "small_pieces")
@pytest.mark.parametrize("what", ["no ring", "no room"])
def test_short_pieces_where_what_is_not_pinned_cannot_be_staged(
    directory: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    tiny = load_tiny_checkpoint("qwen3_moe")
    launch = launch_of("qwen3_moe", directory, num_slots=6)
    if what == "no ring":
        monkeypatch.setattr(bounce, "BUFFER_BYTES", 1 << 30)
    else:
        size = 4 * launch.plan.slot_stride_bytes
        launch = dataclasses.replace(launch, plan=dataclasses.replace(launch.plan, staging_bytes=size))
    prompt = prompt_of(20)
    with CudaRig(launch, driver=limited_driver(pinned_limit(launch, 0.0)), fetch_fraction=0.5, capture=False) as rig:
        model = rig.runtime.model
        assert not model.streams and model.long_tokens(100) == 0 and model.background_tokens(100) == 0
        assert model.background_tokens(9) == 16  # those that the CPU shares in
        result = ok(rig.executor.execute(StepPlan(1, 1, (row_of(prompt, 0, 20),))))
        assert (model.logits[0].cpu() - tiny.oracle_logits(prompt)[-1]).abs().max() < TOLERANCE
        assert result.experts.cpu > 0 and result.experts.fetches == 0


@pytest.mark.skipif(ON_GPU, reason="registers with a driver of its own")
@pytest.mark.usefixtures("small_sizes", "small_pieces")
def test_a_chunk_that_cannot_be_copied_fails_and_the_next_runs_in_short_pieces(directory: Path) -> None:
    tiny = load_tiny_checkpoint("qwen3_moe")
    launch = launch_of("qwen3_moe", directory, num_slots=6)
    prompt = prompt_of(20)
    with CudaRig(launch, driver=limited_driver(pinned_limit(launch, 0.0)), capture=False) as rig:
        model, executor = rig.runtime.model, rig.executor
        assert model.stager is not None and model.stager._bounce is not None
        model.stager._bounce._copier = Refusing()
        outcome = executor.execute(StepPlan(1, 1, (row_of(prompt, 0, 20),)))
        assert isinstance(outcome, StepFailed) and "CUDA_ERROR_INVALID_VALUE" in outcome.message
        assert not model.streams and rig.mailbox is not None and not rig.mailbox.aborted
        ok(executor.execute(StepPlan(2, 1, (row_of(prompt, 0, 20),), ("a",))))
        assert (model.logits[0].cpu() - tiny.oracle_logits(prompt)[-1]).abs().max() < TOLERANCE


def test_whatever_can_be_pinned_beside_the_mailbox_is_the_store(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "HEADROOM_BYTES", 4096)
    monkeypatch.setattr(host_memory, "SMALLEST_PIECE_BYTES", 4096)
    launch = launch_of("qwen3_moe", directory, num_slots=6)
    index = FtwIndex.load(launch.checkpoint)
    store = load_store(index)
    files = zip(store.segments, index.files, strict=True)
    size = sum(segment.size_bytes for segment, file in files if file.kind == "experts")
    mailbox = align_up(Mailbox.required_bytes(*plan_mailbox(launch)), 4096)
    smallest = max(4096, *(layout.stride_bytes for layout in index.layouts))
    for limit in [mailbox - 1, *range(mailbox, mailbox + size + 9000, size // 7), mailbox + size + 4096]:
        driver = limited_driver(limit)
        if limit < mailbox:
            with pytest.raises(FreeTokenError, match="mailbox"):
                CudaRig(launch, store=store, driver=driver)
        else:
            for _ in range(2):  # a restarted one finds the same
                runtime = CudaRig(launch, store=store, driver=driver).runtime
                assert runtime.fetchable is not None
                assert size >= sum(runtime.fetchable) >= min(size, limit - mailbox - 4096 - smallest)
                runtime.close()
        assert driver.ranges == {}
    store.close()


@pytest.mark.skipif(ON_GPU, reason="registers with a driver of its own")
@pytest.mark.parametrize("early", [True, False])
def test_what_was_registered_is_given_back_when_preparing_fails(
    directory: Path, monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    def short(*args: object, **keywords: object) -> None:
        raise CapacityError("device memory is short")

    launch, driver = launch_of("qwen3_moe", directory, num_slots=6), HostDriver()
    store = load_store(FtwIndex.load(launch.checkpoint))
    if early:
        monkeypatch.setattr(CudaRuntime, "_build_stager", short)
        with pytest.raises(CapacityError):
            CudaRig(launch, store=store, driver=driver)
    else:
        monkeypatch.setattr(device_model.DeviceModel, "prepare", short)
        runtime = CudaRig(launch, store=store, driver=driver).runtime
        with pytest.raises(CapacityError):
            runtime.prepare()
        assert driver.ranges
        runtime.close()
    assert driver.ranges == {}
    store.close()


class Diary(HostCopier):
    """Writes down the order of calls; copies nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def copy(self, destination: int, source: int, size_bytes: int) -> None:
        self.copied.append((destination, source, size_bytes))

    def begin(self, half: int) -> None:
        self.log.append(f"copy {half}")

    def wait(self, half: int) -> None:
        self.log.append(f"use {half}")

    def release(self, half: int) -> None:
        self.log.append(f"free {half}")


def test_a_half_is_filled_after_it_was_released_and_used_after_it_was_filled() -> None:
    layers, experts, stride = 5, 4, 4096
    addresses = (np.arange(layers * experts, dtype=np.int64) * stride + (1 << 20)).reshape(layers, experts)
    sources = RecordSources(addresses, np.zeros((layers, experts), np.int32))
    copier = Diary()
    device = torch.device("cpu")
    stager = Stager(copier, (stride,) * layers, experts, 1 << 30, 14 * stride, device)
    stager.reads(sources)
    assert (stager.capacity, stager.num_spares, stager.spares[0]) == (4, 4, (1 << 30) + 8 * stride)
    missing = NothingMissing(layers, experts)
    missing.slot_of[...] = -1
    step = StagedStep(stager, missing, 1)
    step.begin()
    for layer in range(layers):
        base = (1 << 30) + layer % 2 * 4 * stride
        assert stager.table(layer).tolist() == [base + i * stride for i in range(experts)]
        assert copier.copied[-1] == (base, int(addresses[layer, 0]), 4 * stride)
        stager.wait(layer)
        step.after(layer)
    used = [f"{what} {layer % 2}" for layer in range(layers) for what in ("use", "free")]
    copies = [f"copy {layer % 2}" for layer in range(layers)]
    expected = ["free 0", "free 1", copies[0]]
    for layer in range(layers):
        expected += used[2 * layer : 2 * layer + 2] + copies[layer + 1 : layer + 2]
    assert copier.log == expected and len(copier.copied) == layers


def test_neighbouring_records_are_one_copy() -> None:
    addresses = np.array([1000, 1100, 1200, 1300, 1400, 1500, 1600, 900], np.int64)
    ranges = np.array([0, 0, 0, 0, 0, 1, 1, 0], np.int32)
    slot_of = np.array([-1, -1, -1, 5, -1, -1, -1, -1], np.int32)
    copies = plan_copies(addresses, ranges, slot_of, 100, 8)
    assert [(run.source, run.offset, run.size_bytes) for run in copies.runs] == [
        (900, 0, 400), (1400, 400, 100), (1500, 500, 200),
    ]  # fmt: skip
    assert copies.offsets.tolist() == [100, 200, 300, -1, 400, 500, 600, 0]
    slot_of[[1, 7]] = 4
    copies = plan_copies(addresses, ranges, slot_of, 100, 3)
    assert [(run.source, run.offset, run.size_bytes) for run in copies.runs] == [
        (1000, 0, 100),
        (1200, 100, 100),
        (1400, 200, 100),
    ]
    assert copies.offsets.tolist() == [0, -1, 100, -1, 200, -1, -1, -1]
    assert plan_copies(addresses, ranges, np.zeros(8, np.int32), 100, 8).runs == ()


def test_what_is_not_pinned_is_staged_whatever_slots_hold() -> None:
    addresses = np.arange(1000, 1800, 100, dtype=np.int64)
    ranges = np.array([0, 0, 0, -1, -1, -1, -1, 0], np.int32)
    slot_of = np.array([-1, -1, 7, -1, 3, -1, -1, -1], np.int32)
    copies = plan_copies(addresses, ranges, slot_of, 100, 6)
    assert [(run.source, run.offset, run.size_bytes, run.pinned) for run in copies.runs] == [
        (1000, 0, 200, True), (1300, 200, 400, False),
    ]  # fmt: skip
    assert copies.offsets.tolist() == [0, 100, -1, 200, 300, 400, 500, -1] and not len(copies.moved)
    copies = plan_copies(addresses, ranges, slot_of, 100, 6, moves=True)
    assert [(run.source, run.offset, run.size_bytes, run.pinned) for run in copies.runs] == [
        (1000, 0, 200, True), (1300, 200, 100, False), (1500, 400, 200, False),
    ]  # fmt: skip
    assert copies.offsets.tolist() == [0, 100, -1, 200, 300, 400, 500, -1] and copies.moved.tolist() == [4]


@pytest.mark.parametrize("record_format", ["q4_0", "bf16", "f32"])
def test_every_number_of_tokens_has_a_cut(record_format: str) -> None:
    sizes = [expert_kernels.gemm_cut(record_format, 8 * tokens, 128).block_routes for tokens in range(17, 8192, 63)]
    assert sizes == sorted(sizes) and set(sizes) <= {16, 32, 64}


def test_the_host_copier_counts() -> None:
    source, target = np.arange(8, dtype=np.int64), np.zeros(8, np.int64)
    copier = HostCopier()
    copier.copy(target.ctypes.data, source.ctypes.data, 32)
    assert target.tolist() == [0, 1, 2, 3, 0, 0, 0, 0] and len(copier.copied) == 1
