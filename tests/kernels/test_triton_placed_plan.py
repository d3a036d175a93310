"""Long publishes and plans whose records are put in place, against the layout of csrc/core/mailbox.h."""

import numpy as np
import pytest
import torch

from freetoken.kernels.triton.placed_plan import await_placed_plan, copy_records, publish_routes
from freetoken.kernels.triton.plan import CHANGES, CPU, ENTRIES, FETCHES, HITS, ROUTES, STATUS, DevicePlan
from tests.kernels.test_triton_mailbox import Box, device, synchronize
from tests.kernels.triton_device import DEVICE


@pytest.mark.parametrize("tokens", [1, 700])
def test_a_long_publish_carries_routes_and_no_rows(tokens):
    box = Box()
    ids = torch.arange(tokens * 2, dtype=torch.int32, device=DEVICE).view(tokens, 2)
    weights = ids.float() / 7
    admit = torch.ones(tokens, dtype=torch.uint8, device=DEVICE)
    real = max(1, tokens - 3)
    seq = device([4], torch.int32)
    publish_routes(
        box.addresses, seq, device([77], torch.int64), device([real], torch.int32), ids, weights, admit, 3, flags=6
    )
    synchronize()
    assert seq.item() == 5 and box.view("req", np.uint32)[0] == 5
    request = box.view("request", np.uint32)
    assert request[:2].tolist() == [5, 3] and request[4:7].tolist() == [tokens, 2, 6]
    assert box.view("request", np.uint64)[1] == 77
    seen = box.view("ids", np.int32)[: tokens * 2].tolist()
    assert seen == list(range(real * 2)) + [-1] * ((tokens - real) * 2)
    assert box.view("weights", np.float32)[real * 2 : tokens * 2].sum() == 0
    assert box.view("admit", np.uint8)[:tokens].tolist() == [1] * real + [0] * (tokens - real)


@pytest.mark.parametrize("num_spares", [0, 1, 4])
def test_every_record_is_read_where_it_will_be(num_spares):
    box = Box()
    words = 256
    rng = np.random.default_rng(1)
    memory = torch.from_numpy(rng.integers(0, 1 << 30, (8, words), dtype=np.int32)).to(DEVICE)
    places = torch.zeros((8, words), dtype=torch.int32, device=DEVICE)
    spares = torch.zeros((4, words), dtype=torch.int32, device=DEVICE)
    slots = torch.zeros((8, words), dtype=torch.int32, device=DEVICE)
    store = memory.data_ptr() + torch.arange(8, dtype=torch.int64, device=DEVICE) * words * 4
    staged = torch.zeros(8, dtype=torch.int64, device=DEVICE)
    for expert in (1, 2, 5):  # 5 became resident after it was staged
        places[expert].copy_(memory[expert])
        staged[expert] = places[expert].data_ptr()
    slots[3].copy_(memory[5])
    box.view("plan", np.uint32)[0] = 9
    box.view("plan_header", np.uint32)[:7] = [9, 1, 6, 0, 9, 3, 2]
    rows = [  # expert, kind, source slot, destination slot, first route, routes, reserved
        [5, 0, 3, -1, 0, 2, 0, 0],
        [1, 1, -1, 6, 2, 2, 0, 0],  # staged and admitted
        [2, 1, -1, -1, 4, 1, 0, 0],  # staged
        [0, 1, -1, 7, 5, 1, 0, 0],  # admitted, not staged
        [3, 1, -1, -1, 6, 1, 0, 0],  # neither
        [4, 1, -1, -1, 7, 1, 0, 0],
        [6, 1, -1, 0, 8, 1, 0, 0],
    ]
    box.view("entries", np.int32)[:56] = np.ravel(rows)
    routes = [0, 4, 1, 6, 8, 2, 9, 3, 5]
    box.view("routes", np.int32)[:9] = routes
    plan = DevicePlan.empty(8, 12, DEVICE)
    plan.on_gpu.fill_(1)
    copies = torch.zeros((8, 2), dtype=torch.int64, device=DEVICE)
    await_placed_plan(
        box.addresses, device([9], torch.int32), store, staged, slots.data_ptr(), words * 4,
        (spares.data_ptr(), words * 4, num_spares), plan, copies, 12, 10**9,
    )  # fmt: skip
    copy_records(plan, copies, words * 4, 3)
    synchronize()
    counts = plan.counts.tolist()
    found = [counts[i] for i in (ENTRIES, HITS, FETCHES, CPU, ROUTES, CHANGES, STATUS)]
    assert found == [7, 1, 6, 0, 9, 3 | 2 << 16, 0]
    assert plan.routes[:9].tolist() == routes
    assert plan.on_gpu.tolist() == [int(r in routes) for r in range(12)]
    by_address = {}
    for tensor in (memory, places, spares, slots):
        for row in tensor:
            by_address[row.data_ptr()] = row
    for entry, row in enumerate(rows):
        read = int(plan.addresses[entry, 0])
        assert torch.equal(by_address[read], memory[row[0]]), row
        if row[3] >= 0:
            assert torch.equal(slots[row[3]], memory[row[0]]), row
    in_store = {int(a) for a in plan.addresses[:7, 0]} & {row.data_ptr() for row in memory}
    assert len(in_store) == max(0, 2 - num_spares)


def test_an_abort_leaves_nothing_to_do():
    box = Box()
    box.view("plan_header", np.uint32)[:7] = [1, 3, 0, 0, 4, 0, 0]
    box.view("abort", np.uint32)[0] = 5
    plan = DevicePlan.empty(4, 8, DEVICE)
    plan.on_gpu.fill_(1)
    copies = torch.ones((4, 2), dtype=torch.int64, device=DEVICE)
    zeros = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    await_placed_plan(
        box.addresses, device([2], torch.int32), zeros, zeros, 0, 4096, (0, 4096, 0), plan, copies, 8, 10**9
    )
    copy_records(plan, copies, 4096, 2)
    synchronize()
    counts = plan.counts.tolist()
    assert counts[ENTRIES] == counts[ROUTES] == 0 and counts[STATUS] == 1
    assert not plan.on_gpu.any()
