"""ExpertCache and CpuExecutor as services: wiring, serving, recovery."""

import asyncio
import dataclasses

import numpy as np
import pytest

from freetoken.checkpoint.held_store import close_fds
from freetoken.errors import CapacityError, CheckpointError, ConfigError, FreeTokenError, PeerLostError
from freetoken.experts import cache_service, cpu_service
from freetoken.messages import ActorName, ActorState, StepNotice, StoreShared
from freetoken.testing.raw_mailbox import RawMailbox
from freetoken.testing.waiting import open_fds, until


def random_batch(index, seed, num_tokens=4):
    rng = np.random.default_rng(seed)
    experts, top_k = index.spec.num_experts, index.spec.num_experts_per_tok
    ids = np.argsort(rng.random((num_tokens, experts)), axis=1)[:, :top_k].astype(np.int32)
    hidden = rng.standard_normal((num_tokens, index.spec.hidden_size), np.float32)
    return hidden, ids, rng.random((num_tokens, top_k), np.float32), np.ones(num_tokens, np.uint8)


def reference(index, layer, hidden, ids, weights):
    out = np.zeros(hidden.shape, np.float64)
    for token, k in np.ndindex(ids.shape):
        gate, up, down = (m.astype(np.float64) for m in index.read_expert(layer, int(ids[token, k])))
        g = gate @ hidden[token]
        out[token] += weights[token, k] * (down @ (g / (1 + np.exp(-g)) * (up @ hidden[token])))
    return out


async def check_layers(peers, seeds=range(6)):
    for seed in seeds:
        batch = random_batch(peers.index, seed)
        layer = seed % len(peers.index.spec.moe_layers)
        expected = reference(peers.index, layer, *batch[:3])
        np.testing.assert_allclose(await peers.forward(layer, batch), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_slots": 0, "in_place": True},
        {"num_slots": 0},
        {"num_slots": 0, "experts": {"split": "fetch"}},
        {"deterministic": True},
        {"device": "cuda"},
    ],
    ids=str,
)
async def test_they_serve_layers(make_peers, settings):
    peers = make_peers(**settings)
    await peers.load()
    await peers.wire(1)
    assert [s.state for s in peers.services] == [ActorState.SERVING] * 2
    assert peers.mailbox.epoch == 1
    peers.client.begin_step(1)
    await check_layers(peers)
    step, cache, cpu = peers.client.step_counters(), peers.cache.metrics(), peers.cpu.metrics()
    for name in ("hits", "fetches", "cpu", "admitted", "evicted", "fetched_bytes", "cpu_bytes"):
        assert cache[f"{name}_total"] == step[name]
    assert cache["publishes_total"] == 6
    assert cache["hit_ratio"] == step["hits"] / (step["hits"] + step["fetches"] + step["cpu"])
    assert cpu["experts_total"] == step["cpu"] and cpu["read_bytes_total"] == step["cpu_bytes"]
    assert cache["plan_seconds_total"] > 0
    assert cache["plan_us"] == pytest.approx(cache["plan_seconds_total"] * 1e6 / 6)
    if settings.get("in_place"):
        assert cache["hit_ratio"] == 1.0 and cache["slots"] == 0
    elif settings.get("num_slots") == 0:  # a device too small for slots: everything is fetched, or stays on the CPU
        assert step["hits"] == step["admitted"] == 0 and step["fetches"] > 0
        assert (step["cpu"] == 0) == ("experts" in settings)
    else:
        assert min(step["hits"], step["fetches"], step["cpu"]) > 0
        assert cache["slots"] == 3 == cache["resident_slots"] + cache["in_flight_slots"]
        assert cpu["busy_seconds_total"] > 0 and cpu["threads"] == 1
    assert peers.cpu.status().detail.startswith("isa=")


async def test_the_split_can_be_set_and_stays(make_peers):
    peers = make_peers(num_slots=0, experts={"split": "cpu"})
    with pytest.raises(ConfigError, match=r"q=1\.5 is not from 0 to 1"):
        await peers.cache.set_split(1.5)
    with pytest.raises(ConfigError, match="nan"):
        await peers.cache.set_split(float("nan"))
    await peers.load()
    await peers.wire(1)
    assert peers.cache.metrics()["fetch_fraction"] == 0.0
    await check_layers(peers)
    assert peers.cache.metrics()["fetches_total"] == 0
    await peers.cache.set_split(1.0)
    on_cpu = peers.cache.metrics()["cpu_total"]
    await check_layers(peers)
    await peers.pause()
    await peers.wire(2)
    await check_layers(peers)
    metrics = peers.cache.metrics()
    assert metrics["cpu_total"] == on_cpu > 0 and metrics["fetches_total"] > 0 and metrics["fetch_fraction"] == 1.0
    assert metrics["split_auto"] == 0.0 and metrics["split_fetch_only"] == 1.0
    assert metrics["split_timings_total"] > 0 and metrics["split_fetch_gbps"] > 0 and metrics["split_cpu_gbps"] > 0
    assert peers.cache.status().detail == "split=q=1 mode=fetch"


async def test_what_the_device_cannot_fetch_stays_on_the_cpu(make_peers, caplog):
    peers = make_peers(num_slots=0, experts={"split": "fetch"})
    index = peers.index
    await peers.load()
    files = [file.size_bytes for file in index.files]
    peers.fetchable = tuple(files)
    await peers.wire(1)
    await check_layers(peers)
    assert peers.cache.metrics()["cpu_total"] == 0
    assert "not_fetchable" not in caplog.text
    await peers.pause()

    # All but the last page of the last file with records: the record that ends there cannot be read whole.
    last = int(index.record_file.max())
    end = (
        index.record_offset
        + np.array([index.layout_of(i).stride_bytes for i in range(len(index.layer_layout))])[:, None]
    )
    peers.fetchable = tuple(size - 4096 * (i == last) for i, size in enumerate(files))
    lost = (index.record_file == last) & (end > files[last] - 4096)
    assert 0 < lost.sum() < lost.size
    await peers.wire(2)
    warnings = [r for r in caplog.records if "not_fetchable" in r.getMessage()]
    assert len(warnings) == 1 and f"records={lost.sum()} of={lost.size}" in warnings[0].getMessage()
    layer, expert = (int(i) for i in np.argwhere(lost)[0])
    assert f"bytes={index.layout_of(layer).stride_bytes * int(lost.sum())} " in warnings[0].getMessage()
    hidden, ids, weights, admit = random_batch(index, 0, 1)
    ids[0] = [expert, (expert + 1) % index.spec.num_experts]
    expected = reference(index, layer, hidden, ids, weights)
    out = await peers.forward(layer, (hidden, ids, weights, admit))
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-3)
    assert peers.cache.metrics()["cpu_total"] == 1
    await check_layers(peers)
    await peers.pause()

    peers.fetchable = (1, 2, 3, 4, 5)
    await peers.enter(3)
    peers.announce_arena()
    with pytest.raises(FreeTokenError, match=rf"5 store segments.*{len(files)} data files"):
        await peers.cache.wire(peers.wiring)


async def test_a_device_that_cannot_ring_is_served(make_peers):
    peers = make_peers(device="cuda", experts={"split": "cpu"})
    await peers.load()
    await peers.wire(1)
    layout = peers.mailbox.layout()
    # Room for padded batches, and for the CPU's share of short ones only.
    assert layout["max_tokens"] == layout["max_shared_tokens"] == 128 > peers.spec.plan.max_batch_tokens
    assert layout["route_rows"] == 0
    raw = RawMailbox(peers.mailbox.segment, layout)
    for seed, announced in enumerate((True, False, True)):
        if announced:
            for actor in (ActorName.EXPERT_CACHE, ActorName.CPU_EXECUTOR):
                peers.scheduler.send(actor, StepNotice(seed, 1, 4 * (seed != 2), 4))
        hidden, ids, weights, admit = random_batch(peers.index, seed)

        def layer(batch=(ids, hidden, weights, admit)):
            seq = raw.publish(0, *batch, flags=layout["flag_device_client"])
            plan = raw.await_plan(seq)
            assert plan.header["num_cpu"] == len(plan.entries)
            raw.await_part(seq)
            return raw.partial(len(batch[0]))

        expected = reference(peers.index, 0, hidden, ids, weights)
        np.testing.assert_allclose(await asyncio.to_thread(layer), expected, rtol=1e-4, atol=1e-3)
    assert peers.cache.metrics()["publishes_total"] == 3


async def test_a_mailbox_that_does_not_fit_is_refused(make_peers, monkeypatch):
    peers = make_peers()
    await peers.load()
    await peers.enter(1)
    monkeypatch.setattr(cache_service.Mailbox, "required_bytes", lambda *geometry: 1 << 60, raising=True)
    with pytest.raises(CapacityError, match=r"for the mailbox.*max_num_batched_tokens=8"):
        await peers.cache.wire(peers.wiring)


async def test_slots_survive_an_epoch_with_the_arena_and_go_with_it(make_peers):
    peers = make_peers(experts={"split": "fetch"})
    await peers.load()
    await peers.wire(1)
    await check_layers(peers)
    old_client, old_mailbox = peers.client, peers.mailbox
    await peers.pause()
    assert old_mailbox.aborted
    kept = peers.cache.slots.resident()
    assert kept
    hits = peers.cache.metrics()["hits_total"]

    await peers.wire(2)
    assert peers.mailbox.epoch == 2 and not peers.mailbox.aborted
    with pytest.raises(RuntimeError, match="aborted"):
        old_client.forward(0, *random_batch(peers.index, 0), np.empty((4, 32), np.float32))
    _, layer, expert = kept[0]
    hidden, ids, weights, admit = random_batch(peers.index, 1, 1)
    ids[0] = [expert, (expert + 1) % 4]
    expected = reference(peers.index, layer, hidden, ids, weights)
    out = await peers.forward(layer, (hidden, ids, weights, admit))
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-3)
    assert peers.cache.metrics()["hits_total"] > hits  # and the figures go on from the epoch before
    await peers.pause()

    peers.new_arena("arena-1")
    await peers.wire(3)
    assert peers.cache.metrics()["resident_slots"] == 0
    await check_layers(peers)
    await peers.pause()
    peers.cache.slots.check_integrity()


async def test_pause_ends_a_layer_that_nobody_answers(make_peers):
    peers = make_peers(num_slots=1, experts={"split": "cpu"})
    await peers.load()
    await peers.wire(1)
    await peers.cpu.pause("only this one")
    with pytest.raises(RuntimeError, match="aborted"):
        await peers.forward(0, random_batch(peers.index, 0))
    await peers.cache.pause("test")
    assert peers.cache.state == ActorState.PAUSED
    peers.cache.slots.check_integrity()
    await peers.wire(2)
    await check_layers(peers)


async def test_reports_follow_the_steps_and_stop_with_them(make_peers):
    peers = make_peers()
    await peers.load()
    await peers.wire(1)
    await check_layers(peers)
    for step_id in (7, 8):
        for actor in (ActorName.EXPERT_CACHE, ActorName.CPU_EXECUTOR):
            peers.scheduler.send(actor, StepNotice(step_id, 1, 4, 1))
    await until(lambda: len(peers.reports) >= 2)
    by_sender = {report.sender: report for report in peers.reports}
    assert set(by_sender) == {"ExpertCache", "CpuExecutor"}
    assert all(report.step_id == 8 and report.epoch == 1 for report in peers.reports)
    assert by_sender["ExpertCache"].metrics == peers.cache.metrics()
    assert by_sender["CpuExecutor"].metrics == peers.cpu.metrics()
    # Nothing changes any more: the timers end by themselves.
    await until(lambda: peers.cache._reporter._timer is None and peers.cpu._reporter._timer is None)
    assert len(peers.reports) == 2


async def test_store_is_mapped_once_and_handed_on(make_peers, load_store):
    peers = make_peers()
    await peers.load()
    with pytest.raises(FreeTokenError, match="holds no store"):
        await peers.cpu.share_store(ActorName.CONTROLLER)
    await peers.wire(1)
    held, before = peers.cpu.store, open_fds()
    received = []
    peers.controller.on(StoreShared, lambda message, fds: received.append((message, fds)))
    peers.share_store()
    await peers.cpu.share_store(ActorName.CONTROLLER)
    await until(lambda: bool(received))
    assert peers.cpu.store is held
    message, fds = received[0]
    assert message.epoch == 1 and message.fingerprint == peers.index.fingerprint
    assert held.is_same(message, fds)
    close_fds(fds)
    assert open_fds() == before

    another = load_store(peers.index)  # the same weights, read once more by somebody who had to
    peers.share_store(another)
    await until(lambda: peers.cpu.store is not held)
    assert not held.is_complete and peers.cpu.store.is_complete
    await check_layers(peers)  # this epoch still runs on the old memory
    await peers.pause()
    peers.store = another
    await peers.wire(2)
    await check_layers(peers)


async def test_store_of_another_checkpoint_is_refused(make_peers, indexes):
    peers = make_peers()
    await peers.load()
    peers.cpu.spec = dataclasses.replace(peers.spec, checkpoint=str(indexes["llama"].path))
    with pytest.raises(CheckpointError, match="does not belong to the store"):
        await peers.wire(1)


async def test_wiring_fails_with_the_name_of_who_is_missing(make_peers, monkeypatch):
    monkeypatch.setattr(cache_service, "WIRE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(cpu_service, "WIRE_TIMEOUT_S", 0.05)
    peers = make_peers()
    await peers.load()
    await peers.enter(1)
    with pytest.raises(PeerLostError, match=r"GpuExecutor is gone: the arena did not come within 0\.05 s"):
        await peers.cache.wire(peers.wiring)
    with pytest.raises(PeerLostError, match="WeightStreamer"):
        await peers.cpu.wire(peers.wiring)  # the mailbox came from the attempt above, the store from nobody
    monkeypatch.undo()
    await peers.wire(2)
    await check_layers(peers)


async def test_wiring_ends_when_a_peer_dies(make_peers):
    peers = make_peers()
    await peers.load()
    await peers.enter(1)
    peers.share_store()
    wiring = [asyncio.ensure_future(service.wire(peers.wiring)) for service in peers.services]
    await until(lambda: peers.cpu.store is not None)
    await peers.network.end(peers.gpu)
    with pytest.raises(PeerLostError, match="GpuExecutor"):
        await wiring[0]
    await wiring[1]


async def test_a_wiring_can_be_cancelled_and_tried_again(make_peers):
    peers = make_peers()
    await peers.load()
    await peers.enter(1)
    tasks = [asyncio.ensure_future(service.wire(peers.wiring)) for service in peers.services]
    await until(lambda: peers.client is not None)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await peers.wire(2)
    await check_layers(peers)


async def test_dense_models_need_neither_and_hold_the_store_all_the_same(make_peers, indexes, load_store):
    index = indexes["llama"]
    peers = make_peers(num_slots=0, of=index, store=load_store(index))
    await peers.load()
    for epoch in (1, 2):
        await peers.wire(epoch)
        await until(lambda: peers.cpu.store is not None)
        for actor in (ActorName.EXPERT_CACHE, ActorName.CPU_EXECUTOR):
            peers.scheduler.send(actor, StepNotice(epoch, epoch, 1, 1, True))
        await until(lambda: all(s.metrics()["steps_total"] == epoch for s in peers.services))  # noqa: B023
        await peers.pause()
    assert peers.client is None and not peers.reports
    assert peers.cpu.metrics()["store_bytes"] == index.store_bytes
    assert peers.cache.metrics()["hit_ratio"] == 0.0


async def test_nothing_is_left_open(carrier, make_peers):
    before = open_fds()
    peers = make_peers()
    await peers.load()
    for epoch in (1, 2, 3):
        await peers.wire(epoch)
        await check_layers(peers, range(2))
        await peers.pause()
    await peers.close()
    peers.arena = peers.client = peers.mailbox = peers.expert_store = None
    assert open_fds() <= before
