"""An arena of ordinary device memory that is allocated anew under the CUDA runtime: on a GPU, else the interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from freetoken.elastic import arena_shape
from freetoken.errors import CapacityError
from freetoken.execution.division import Division, divide_anew
from freetoken.execution.kv_geometry import KVGeometry
from freetoken.launch_spec import LaunchSpec
from freetoken.messages import RequestInit, StepPlan, StepRow
from freetoken.testing.tiny_checkpoints import load_tiny_checkpoint
from tests.gpu.test_cuda_executor import GREEDY, ON_GPU, PROMPT, first_row, launch_of, ok

from freetoken.testing.cuda_rig import CudaRig  # isort: skip
from freetoken.execution.cuda import arena as cuda_arena  # isort: skip
from freetoken.execution.cuda.arena import CudaArena  # isort: skip

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reallocation")


def launch(directory: Path, monkeypatch: pytest.MonkeyPatch, mode: str = "reallocate") -> LaunchSpec:
    monkeypatch.setattr(arena_shape, "CUDA_ALIGNMENT_BYTES", 4096)  # granules are only counted here
    return launch_of("mixtral", directory, num_slots=6, elastic={"mode": mode})


def test_a_preempted_request_goes_on_after_the_arena_was_allocated_anew(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = load_tiny_checkpoint("mixtral")
    with CudaRig(launch(directory, monkeypatch), fetch_fraction=0.5) as rig:
        arena, shape = rig.arena, rig.arena.shape
        assert arena.pools is None and shape is not None
        assert (arena.num_slots, arena.num_blocks) == (6, rig.launch.plan.num_kv_blocks)
        weights, model, graphs = rig.runtime.model.weights, rig.runtime.model, rig.runtime.graphs_captured
        identities, known = {arena.arena_id}, list(PROMPT)
        allocate, kv = cuda_arena._allocate, arena.division.split.kv_granules

        def short(what: str, *arguments: Any) -> torch.Tensor:
            if what == "expert slots":
                monkeypatch.setattr(cuda_arena, "_allocate", allocate)
                raise CapacityError("no memory for slots today")
            return allocate(what, *arguments)

        for number, kv_granules in enumerate((None, kv // 2, kv + 2)):
            if kv_granules is not None:
                division, before = Division.of(shape, shape.split(kv_granules)), arena.division
                if number == 2:
                    monkeypatch.setattr(cuda_arena, "_allocate", short)
                failure = divide_anew(arena, rig.runtime, division)
                assert ("no memory for slots today" in failure) == (number == 2)
                assert arena.division == (before if failure else division)
                rig.cache_server.empty(arena.num_slots)
                rig.executor = rig.runtime.build_executor(rig.mailbox)
                assert arena.slots.numel() == arena.num_slots * shape.slot_stride_bytes
                assert arena.kv_data.numel() * arena.kv_data.element_size() == arena.num_blocks * shape.block_bytes
                assert arena.size_bytes <= shape.budget_bytes + arena.staging.numel()
                identities.add(arena.arena_id)
            # The last block too, which the division before may not have had. After a change all is computed again.
            row = first_row(known)
            init = RequestInit(GREEDY, tuple(known), len(PROMPT))
            row = StepRow(row.request_id, 0, len(known), True, False, (arena.num_blocks - 1, 2, 1, 5), init)
            known.append(ok(rig.executor.execute(StepPlan(10 * number + 1, 1, (row,)))).rows[0].token_id)
            row = StepRow("a", len(known) - 1, 1, True, True)
            known.append(ok(rig.executor.execute(StepPlan(10 * number + 2, 1, (row,)))).rows[0].token_id)
        assert known[len(PROMPT) :] == tiny.oracle_greedy(PROMPT, 6)
        assert len(identities) == 3
        assert rig.runtime.model is model and model.weights is weights
        sizes = sum(batch.graph is not None for batch in model.decode_batches.values())
        assert rig.runtime.graphs_captured == graphs + 2 * sizes


def test_without_virtual_memory_the_mode_decides(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaArena, "_driver", staticmethod(lambda elastic, device: None))
    device = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
    for mode, can_change in (("auto", True), ("reallocate", True), ("virtual", False)):
        arena = CudaArena.of(launch(directory, monkeypatch, mode), device)
        assert arena.pools is None and (arena.shape is not None) == can_change
        arena.close()


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_device_memory_is_given_back_before_more_is_taken() -> None:
    """Divisions that do not fit beside each other: three quarters of the free memory, in two other halves."""
    torch.cuda.empty_cache()
    stride, block = 1 << 20, 96 * 1024
    budget = torch.cuda.mem_get_info()[0] // 4 * 3
    shape = arena_shape.ArenaShape(
        2 << 20, budget // (2 << 20), stride, block, 16, max_slots=1 << 20, min_slots=1, min_blocks=1
    )
    split = shape.split(shape.num_granules // 4)
    kv = KVGeometry(shape.blocks_in(split.kv_granules), 1, 16, 6, 128, "f32")
    arena = CudaArena(kv, shape.slots_in(split.slot_granules), stride, 0, torch.device("cuda", 0), (shape, split))
    for quarters in (3, 1):
        arena.reallocate(Division.of(shape, shape.split(quarters * shape.num_granules // 4)))
        assert not arena.kv_data[-1000:].any()
    arena.close()
