"""The data plane between three processes, as the Ray runtime uses it."""

import numpy as np
import pytest

from freetoken import _native
from freetoken.testing.data_plane import ServerProcess
from freetoken.testing.expert_bank import ExpertBank

L, E, K, H, MAX_TOKENS, SLOTS = 2, 8, 2, 48, 6, 5


@pytest.fixture(scope="module")
def bank():
    return ExpertBank(L, E, H, 32)


@pytest.fixture
def mailbox_segment():
    segment = _native.SharedSegment.create("mailbox", _native.Mailbox.required_bytes(MAX_TOKENS, K, H, L, E))
    _native.Mailbox.create(segment, 3, MAX_TOKENS, K, H, L, E)
    return segment


@pytest.fixture
def servers(bank, mailbox_segment):
    processes = {
        "cache": ServerProcess("cache", mailbox_segment, bank, num_slots=SLOTS, fetch_fraction=0.5),
        "cpu": ServerProcess("cpu", mailbox_segment, bank, threads=1),
    }
    yield processes
    for process in processes.values():
        process.kill()


def make_client(bank, mailbox_segment, deterministic=False, timeout_s=60.0):
    stride = bank.layout.stride_bytes
    arena = _native.SharedSegment.create("arena", SLOTS * stride)
    mailbox = _native.Mailbox.attach(mailbox_segment)
    return _native.DeviceClient(mailbox, bank.store, arena, stride, _native.WorkerPool(1), 0, timeout_s, deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
def test_layers_over_processes(bank, mailbox_segment, servers, deterministic):
    client = make_client(bank, mailbox_segment, deterministic)
    client.begin_step(1)
    rng = np.random.default_rng(1)
    for step in range(100):
        batch = bank.random_batch(rng, 1 + step % MAX_TOKENS, K, padding=0.1)
        out = np.empty_like(batch[0])
        client.forward(step % L, *batch, out)
        np.testing.assert_allclose(out, bank.reference(step % L, *batch[:3]), atol=2e-4)
    step = client.step_counters()
    assert min(step["hits"], step["fetches"], step["cpu"]) > 0
    cache, cpu = servers["cache"].stop(), servers["cpu"].stop()
    assert {name: cache[name] for name in ("hits", "fetches", "cpu")} == {
        name: step[name] for name in ("hits", "fetches", "cpu")
    }
    assert cpu["experts"] == step["cpu"]
    assert not _native.Mailbox.attach(mailbox_segment).aborted


@pytest.mark.parametrize("victim,name", [("cache", "ExpertCache"), ("cpu", "CpuExecutor")])
def test_a_killed_party_is_named_and_the_other_stops(bank, mailbox_segment, servers, victim, name):
    client = make_client(bank, mailbox_segment, timeout_s=0.5)
    rng = np.random.default_rng(2)
    batch = bank.random_batch(rng, 4, K)
    out = np.empty_like(batch[0])
    client.forward(0, *batch, out)
    servers[victim].kill()
    with pytest.raises(TimeoutError, match=f"^{name} did not answer"):
        for layer in range(100):  # a publish whose plan has no CPU share does not need CpuExecutor
            client.forward(layer % L, *bank.random_batch(rng, 4, K), out)
    survivor = servers["cpu" if victim == "cache" else "cache"]
    assert survivor.stop()
    assert survivor.process.returncode == 0
