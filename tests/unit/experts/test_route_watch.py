"""Recording and shadows of a serving ExpertCache."""

import pytest

from freetoken.errors import ConfigError
from freetoken.experts.replay import replay_policy
from freetoken.experts.route_trace import read_trace

from .test_expert_services import check_layers


async def test_a_trace_is_what_was_served(make_peers, tmp_path):
    """Recorded over two epochs, and replayed with the same slots and policy: the very same hits and admissions."""
    path = tmp_path / "routes"
    peers = make_peers(num_slots=3, experts={"split": "fetch", "trace_path": str(path)})
    await peers.load()
    await peers.wire(1)
    peers.client.begin_step(1)
    await check_layers(peers)
    await peers.pause()
    first = peers.cache.metrics()
    await peers.cache.stop_recording()
    trace = read_trace(path)
    assert trace.num_publishes == first["publishes_total"] == 6 and not trace.truncated
    assert set(trace.step_ids.tolist()) == {1} and first["recording"] == 1.0
    assert first["unrecorded_publishes_total"] == 0 and peers.cache.metrics()["recording"] == 0.0
    counts = replay_policy(trace, 3, "crf").sum(axis=0)
    assert counts.tolist() == [first["hits_total"], first["admitted_total"], first["evicted_total"]]


async def test_recording_begins_and_ends_while_serving(make_peers, tmp_path):
    path = tmp_path / "routes"
    peers = make_peers(num_slots=3)
    await peers.load()
    await peers.wire(1)
    await check_layers(peers)
    await peers.cache.record_routes(str(path))
    with pytest.raises(ConfigError, match="already"):
        await peers.cache.record_routes(str(tmp_path / "other"))
    await check_layers(peers)
    await peers.pause()
    await peers.wire(2)
    await check_layers(peers)
    await peers.cache.stop_recording()
    await check_layers(peers)
    assert read_trace(path).num_publishes == 12
    with pytest.raises(ConfigError, match="exists"):
        await peers.cache.record_routes(str(path))


async def test_a_file_stays_within_its_limit(make_peers, tmp_path):
    path = tmp_path / "routes"
    peers = make_peers(num_slots=3)
    await peers.load()
    await peers.wire(1)
    await peers.cache.record_routes(str(path), max_bytes=300)
    await check_layers(peers)
    await peers.pause()
    assert path.stat().st_size <= 300 and peers.cache.metrics()["recording"] == 0.0
    assert read_trace(path).num_publishes == 0


async def test_shadows_stand_beside_the_real_cache(make_peers):
    peers = make_peers(num_slots=6)
    await peers.load()
    await peers.wire(1)
    await check_layers(peers)
    await check_layers(peers)
    watch = peers.cache._routes
    watch._take(peers.cache._server.drain_routes())
    await watch.compare()
    figures = peers.cache.metrics()
    assert 0 < figures["shadow_lru_hit_ratio"] <= figures["shadow_belady_hit_ratio"] < 1
    assert 0 < figures["sampled_hit_ratio"] < 1
