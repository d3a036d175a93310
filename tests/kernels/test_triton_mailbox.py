"""The mailbox kernels against the layout of csrc/core/mailbox.h (see ``triton_device``).

In the interpreter nothing waits: words are set beforehand, and what is tested is what gets written and read.
"""

import dataclasses

import numpy as np
import pytest
import torch

from freetoken.kernels.triton import reference
from freetoken.kernels.triton.mailbox import MailboxAddresses, await_part, await_plan, clear_status, publish
from freetoken.kernels.triton.plan import CHANGES, CPU, ENTRIES, FETCHES, HITS, ROUTES, STATUS, DevicePlan
from tests.kernels.triton_device import DEVICE

REGIONS = (
    "req", "plan", "part", "abort", "request", "hidden", "ids", "weights", "admit", "plan_header", "entries", "routes",
    "partial",
)  # fmt: skip
REGION_BYTES = 8192


class Box:
    """A mailbox's regions in memory that both sides can reach."""

    def __init__(self):
        self.memory = torch.zeros(len(REGIONS) * REGION_BYTES, dtype=torch.uint8, pin_memory=DEVICE == "cuda")
        base = self.memory.data_ptr()
        self.addresses = MailboxAddresses(**{name: base + i * REGION_BYTES for i, name in enumerate(REGIONS)})

    def view(self, name, dtype):
        start = REGIONS.index(name) * REGION_BYTES
        return self.memory.numpy()[start : start + REGION_BYTES].view(dtype)


def device(values, dtype):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def synchronize():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("scoring", ["softmax", "softmax_of_chosen", "sigmoid"])
def test_publish_chooses_and_writes_the_request(tokens, scoring):
    box = Box()
    generator = torch.Generator().manual_seed(tokens)
    logits = torch.randn(tokens, 12, generator=generator).to(DEVICE)
    logits[0, 3] = logits[0, 7] = 9.0
    bias = torch.randn(12, generator=generator).to(DEVICE) if scoring == "sigmoid" else None
    hidden = torch.randn(tokens, 40, generator=generator).to(torch.float16).to(DEVICE)
    ids = torch.zeros(tokens, 3, dtype=torch.int32, device=DEVICE)
    weights = torch.zeros(tokens, 3, device=DEVICE)
    seq, real = device([41], torch.int32), device([max(1, tokens - 1)], torch.int32)
    admit = device([1, 0, 1][:tokens], torch.uint8)
    publish(
        box.addresses, seq, device([2**40 + 5], torch.int64), real, hidden, ids, weights, admit, 7, flags=4,
        logits=logits, scoring=scoring, renormalize=True, scaling=1.5, bias=bias,
    )  # fmt: skip
    synchronize()
    expected_ids, expected = reference.choose_experts(logits, 3, scoring, True, 1.5, bias)
    expected_ids[int(real) :], expected[int(real) :] = -1, 0
    assert torch.equal(ids, expected_ids) and torch.allclose(weights, expected, rtol=1e-5)
    assert seq.item() == 42 and box.view("req", np.uint32)[0] == 42
    request = box.view("request", np.uint32)
    assert request[:2].tolist() == [42, 7] and request[4:7].tolist() == [tokens, 3, 4]
    assert box.view("request", np.uint64)[1] == 2**40 + 5
    np.testing.assert_array_equal(box.view("ids", np.int32)[: tokens * 3], ids.cpu().numpy().ravel())
    np.testing.assert_array_equal(box.view("weights", np.float32)[: tokens * 3], weights.cpu().numpy().ravel())
    np.testing.assert_array_equal(box.view("hidden", np.float32)[: tokens * 40], hidden.float().cpu().numpy().ravel())
    np.testing.assert_array_equal(box.view("admit", np.uint8)[:tokens], admit.cpu().numpy())


def test_publish_of_given_experts_without_hidden_rows():
    box = Box()
    hidden = torch.ones(2, 8, device=DEVICE)
    ids, weights = device([[4, 1], [2, 0]], torch.int32), device([[0.5, 0.25], [1.0, 2.0]], torch.float32)
    seq, zero = device([-1], torch.int32), device([0], torch.int64)
    real, admit = device([2], torch.int32), device([1, 1], torch.uint8)
    publish(box.addresses, seq, zero, real, hidden, ids, weights, admit, 0, flags=2)
    synchronize()
    assert box.view("ids", np.int32)[:4].tolist() == [4, 1, 2, 0]
    assert box.view("weights", np.float32)[:4].tolist() == [0.5, 0.25, 1.0, 2.0]
    assert not box.view("hidden", np.float32).any()
    with pytest.raises(ValueError, match="at most 32 tokens, not 33"):
        rows = torch.zeros(33, 8, device=DEVICE)
        publish(box.addresses, seq, zero, zero, rows, ids, weights, zero, 0, logits=rows)


@pytest.mark.parametrize("max_routes", [10, 600])
def test_a_plan_becomes_addresses(max_routes):
    box = Box()
    box.view("plan", np.uint32)[0] = 9
    box.view("plan_header", np.uint32)[:7] = [9, 1, 2, 1, 7, 1, 2]
    rows = [  # expert, kind, source slot, destination slot, first route, routes, reserved
        [5, 0, 3, -1, 0, 2, 0, 0],
        [2, 1, -1, 6, 2, 3, 0, 0],
        [0, 1, -1, -1, 5, 1, 1, 2],
        [7, 2, -1, -1, 6, 1, 0, 0],
    ]
    box.view("entries", np.int32)[:32] = np.ravel(rows)
    routes = [0, 4, 1, 6, 8, 2, 9]
    box.view("routes", np.int32)[:7] = routes
    plan = DevicePlan.empty(5, max_routes, DEVICE)
    plan.on_gpu.fill_(1)
    store = torch.arange(8, dtype=torch.int64, device=DEVICE) * 4096 + (1 << 40)
    await_plan(box.addresses, device([9], torch.int32), store, 1 << 30, 8192, plan, 10**9)
    synchronize()
    counts = plan.counts.tolist()
    assert [counts[i] for i in (ENTRIES, HITS, FETCHES, CPU, ROUTES, CHANGES, STATUS)] == [
        3,
        1,
        2 | 2 << 16,
        1 | 1 << 16,
        6,
        1 | 2 << 16,
        0,
    ]
    assert plan.entries[:4].tolist() == rows
    base, stored = 1 << 30, 1 << 40
    assert plan.addresses[:3].tolist() == [[base + 3 * 8192, 0], [stored + 2 * 4096, base + 6 * 8192], [stored, 0]]
    assert plan.routes[:7].tolist() == routes
    on_gpu = [int(r in routes[:6]) for r in range(max_routes)]
    assert plan.on_gpu.tolist() == on_gpu


def test_an_abort_leaves_no_entries_and_a_status():
    box = Box()
    box.view("plan_header", np.uint32)[:7] = [1, 3, 0, 1, 4, 0, 0]
    box.view("abort", np.uint32)[0] = 5
    plan = DevicePlan.empty(4, 8, DEVICE)
    seq = device([2], torch.int32)
    await_plan(box.addresses, seq, device([0] * 4, torch.int64), 0, 4096, plan, 10**9)
    synchronize()
    assert plan.counts[ENTRIES] == 0 and plan.counts[CPU] == 0 and plan.counts[STATUS] == 1
    assert not plan.on_gpu.any()
    clear_status(plan)
    assert plan.counts[STATUS] == 0
    await_part(box.addresses, seq, plan, 10**9)  # no CPU share: not even looked at
    synchronize()
    assert plan.counts[STATUS] == 0
    await_part(box.addresses, seq, plan, 10**9, always=True)
    synchronize()
    assert plan.counts[STATUS] == 1


def test_the_plan_of_one_token_is_read_in_pieces():
    box = Box()
    pieces = torch.zeros(32, 4, dtype=torch.int32, pin_memory=DEVICE == "cuda")
    addresses = dataclasses.replace(box.addresses, brief=pieces.data_ptr())
    pieces[0] = torch.tensor([9, 1 | 2 << 8 | 1 << 16, 1 | 1 << 16, 0])
    for i, (expert, route, kind, slot) in enumerate([(5, 2, 0, 3), (2, 0, 1, 6), (0, 3, 1, -1), (7, 1, 2, -1)]):
        pieces[1 + i] = torch.tensor([9, expert | route << 16 | kind << 24, slot, 0])
    plan = DevicePlan.empty(4, 4, DEVICE)
    plan.on_gpu.fill_(1)
    store = torch.arange(8, dtype=torch.int64, device=DEVICE) * 4096 + (1 << 40)
    seq = device([9], torch.int32)
    await_plan(addresses, seq, store, 1 << 30, 8192, plan, 10**9, one_token=True)
    synchronize()
    assert plan.counts.tolist() == [3, 1, 2, 1, 3, 1 | 1 << 16, 0, 3]
    assert plan.entries[:3].tolist() == [
        [5, 0, 3, -1, 0, 1, 0, 0],
        [2, 1, -1, 6, 1, 1, 0, 0],
        [0, 1, -1, -1, 2, 1, 0, 0],
    ]
    base, stored = 1 << 30, 1 << 40
    assert plan.addresses[:3].tolist() == [[base + 3 * 8192, 0], [stored + 2 * 4096, base + 6 * 8192], [stored, 0]]
    assert plan.routes[:3].tolist() == [2, 0, 3]
    assert plan.on_gpu.tolist() == [1, 0, 1, 1]

    pieces[3, 0] = 8  # not all of it is there
    box.view("abort", np.uint32)[0] = 5
    await_plan(addresses, seq, store, 1 << 30, 8192, plan, 10**9, one_token=True)
    synchronize()
    assert plan.counts[:5].tolist() == [0, 0, 0, 0, 0] and plan.counts[STATUS] == 1
    assert not plan.on_gpu.any()


def test_a_split_record_in_a_plan_of_one_token():
    """One hit, and a miss of which the device runs two tiles of five: the CPU's entry of it is no entry here."""
    box = Box()
    pieces = torch.zeros(32, 4, dtype=torch.int32, pin_memory=DEVICE == "cuda")
    addresses = dataclasses.replace(box.addresses, brief=pieces.data_ptr())
    pieces[0] = torch.tensor([9, 1 | 1 << 8 | 1 << 16, 0, 0])
    pieces[1] = torch.tensor([9, 5 | 1 << 16, 3, 0])
    pieces[2] = torch.tensor([9, 2 | 0 << 16 | 1 << 24, -1, 2 << 16])
    plan = DevicePlan.empty(2, 2, DEVICE)
    store = torch.arange(8, dtype=torch.int64, device=DEVICE) * 4096 + (1 << 40)
    await_plan(addresses, device([9], torch.int32), store, 1 << 30, 8192, plan, 10**9, one_token=True)
    synchronize()
    assert plan.counts.tolist() == [2, 1, 1 | 2 << 16, 1 | 1 << 16, 2, 0, 0, 2]
    assert plan.entries.tolist() == [[5, 0, 3, -1, 0, 1, 0, 0], [2, 1, -1, -1, 1, 1, 0, 2]]
    assert plan.on_gpu.tolist() == [1, 1]
