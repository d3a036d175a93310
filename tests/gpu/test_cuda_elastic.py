"""An arena whose pools trade memory, under the CUDA executor: on a GPU its virtual memory, else the interpreter."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from freetoken.elastic import arena_shape
from freetoken.elastic.arena_shape import ArenaShape
from freetoken.errors import FreeTokenError
from freetoken.execution.kv_geometry import KVGeometry
from freetoken.messages import StepPlan, StepRow
from freetoken.testing.tiny_checkpoints import load_tiny_checkpoint
from tests.gpu.test_cuda_executor import ON_GPU, PROMPT, first_row, launch_of, ok

from freetoken.testing.cuda_rig import CudaRig  # isort: skip
from freetoken.execution.arena_pools import KV, SLOTS  # isort: skip
from freetoken.execution.cuda.arena import CudaArena  # isort: skip

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")

MIB = 1 << 20


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elastic")


@pytest.mark.skipif(ON_GPU, reason="a model this small is less than two granules of a GPU")
def test_a_request_goes_on_while_its_blocks_and_experts_move(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_shape, "CUDA_ALIGNMENT_BYTES", 4096)
    tiny = load_tiny_checkpoint("mixtral")
    with CudaRig(launch_of("mixtral", directory, num_slots=6), fetch_fraction=0.5) as rig:
        arena, executor, pools = rig.arena, rig.executor, rig.arena.pools
        assert pools is not None and rig.slots is not None
        addresses = (arena.slots_address, arena.kv_data.data_ptr())
        last = arena.num_blocks - 1
        row = first_row(PROMPT)
        row = StepRow(row.request_id, 0, row.num_tokens, True, False, (last, 3, last - 1, 5), row.init)
        tokens = [ok(executor.execute(StepPlan(1, 1, (row,)))).rows[0].token_id]
        position = len(PROMPT)
        # Fewer blocks, more slots; fewer slots, more blocks; and in vain.
        kv = pools.split.kv_granules
        for number, kv_granules in enumerate((kv // 2, kv + 2, kv - 1), 2):
            split = pools.shape.split(kv_granules)
            num_slots, num_blocks = pools.prepare(number, split)
            if number == 4:
                pools.abort()
            else:
                shrinks = num_slots < arena.num_slots
                blocks = [] if shrinks else [(last, 0), (last - 1, 1)]
                assert num_blocks < last - 1 or shrinks
                if shrinks:
                    arena.move(SLOTS, rig.cache_server.vacate(num_slots).moves)
                    arena.mark()()
                    rig.cache_server.finish_vacate()
                arena.move(KV, blocks)
                arena.commit()
                executor.resized(arena.num_slots, arena.num_blocks, blocks)
                arena.mark()()
                if not shrinks:
                    rig.cache_server.grow(num_slots)
                pools.release()
                assert (arena.num_slots, arena.num_blocks) == (num_slots, num_blocks)
            step = StepPlan(number, 1, (StepRow("a", position, 1, True, True),))
            tokens.append(ok(executor.execute(step)).rows[0].token_id)
            position += 1
        assert tokens == tiny.oracle_greedy(PROMPT, 4)
        assert executor.requests["a"].blocks.tolist() == [0, 3, 1, 5]
        assert (arena.slots_address, arena.kv_data.data_ptr()) == addresses
        pools.granules.check_integrity()


SHAPE = ArenaShape(2 * MIB, 32, 3 * MIB // 2, 96 * 1024, 16, max_slots=40, min_slots=1, min_blocks=1)


def build(driver: Any) -> CudaArena:
    kv = KVGeometry(num_blocks=200, num_layers=1, block_size=16, num_kv_heads=6, head_dim=128, dtype="f32")
    assert kv.block_bytes == SHAPE.block_bytes
    return CudaArena(kv, 99, SHAPE.slot_stride_bytes, 0, torch.device("cuda", 0), (SHAPE, SHAPE.split(10)), driver)


class FailingDriver:
    """The device's, failing at its ``fail_at``-th call from now on. ``alive``: what was acquired and not given back."""

    GIVEN_BACK_BY: ClassVar = {"reserve": "free", "create": "destroy", "map": "unmap"}

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.alignment_bytes = inner.alignment_bytes
        self.fail_at = 0
        self.alive = dict.fromkeys(self.GIVEN_BACK_BY, 0)

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.inner, name)

        def counted(*arguments: Any) -> Any:
            self.fail_at -= 1
            if self.fail_at == 0:
                raise FreeTokenError(f"no {name} today")
            result = call(*arguments)
            for acquire, give_back in self.GIVEN_BACK_BY.items():
                self.alive[acquire] += (name == acquire) - (name == give_back)
            return result

        return counted


def free_bytes() -> int:
    """Device memory that nobody has, not even torch's cache."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_granules_of_a_gpu_move_while_graphs_and_addresses_stay() -> None:
    from freetoken.execution.cuda.vmm import open_vmm

    inner = open_vmm(torch.device("cuda", 0))
    assert inner is not None
    # The first round also loads modules and makes workspaces, which stay. A lost granule would be lost in every round.
    readings = []
    for _ in range(4):
        driver = FailingDriver(inner)
        move_granules(driver)
        assert driver.alive == {"reserve": 0, "create": 0, "map": 0}
        readings.append(free_bytes())
        if len(readings) > 1 and readings[-1] > readings[-2] - SHAPE.granule_bytes:
            break
    else:
        pytest.fail(f"every round takes a granule of {SHAPE.granule_bytes} bytes or more: free are {readings}")


def move_granules(driver: FailingDriver) -> None:
    arena = build(driver)
    pools = arena.pools
    assert pools is not None
    slots = arena.slots[: 40 * SHAPE.slot_stride_bytes].view(torch.int32).view(40, -1)
    kv = arena.kv_data.view(torch.int32)[: 600 * SHAPE.block_bytes // 4].view(600, -1)
    assert (arena.num_slots, arena.num_blocks) == (29, 200)
    arena.warm_up()
    for slot in range(arena.num_slots):
        slots[slot] = slot + 1
    for block in range(arena.num_blocks):
        kv[block] = 1000 + block
    # A graph over places that are mapped now, replayed after every change.
    out = torch.zeros(2, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out[0] = slots[2, 5]
        out[1] = kv[3, 7]

    def check(expected_slots: list[int], expected_blocks: list[int]) -> None:
        torch.cuda.synchronize()
        for slot, value in enumerate(expected_slots):
            assert (slots[slot] == value).all(), slot
        for block, value in enumerate(expected_blocks):
            assert (kv[block] == value).all(), block
        graph.replay()
        assert out.tolist() == [expected_slots[2], expected_blocks[3]]

    old_slots, old_blocks = list(range(1, 30)), list(range(1000, 1200))
    check(old_slots, old_blocks)
    for number in itertools.count(1):  # the k-th call fails, for every k
        driver.fail_at = number
        try:
            pools.prepare(number, SHAPE.split(20))
        except FreeTokenError:
            driver.fail_at = 0
            check(old_slots, old_blocks)
            assert (arena.num_slots, arena.num_blocks) == (29, 200)
        else:
            break
    driver.fail_at = 0
    check(old_slots, old_blocks)  # prepared: the granules are at two places
    assert number > 10
    arena.move(SLOTS, [(28, 0), (27, 1)])
    arena.commit()
    arena.mark()()
    pools.release()
    assert (arena.num_slots, arena.num_blocks) == (16, 426)
    check([29, 28, *old_slots[2:16]], [*old_blocks, *[0] * 226])
    pools.prepare(999, SHAPE.split(5))
    arena.move(KV, [(199, 0), (150, 1)])
    arena.commit()
    arena.mark()()
    pools.release()
    assert (arena.num_slots, arena.num_blocks) == (36, 106)
    check([29, 28, *old_slots[2:16]], [1199, 1150, *old_blocks[2:106]])
    graph.reset()
    arena.close()
