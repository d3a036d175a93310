"""Recording and shadows of a serving ExpertCache."""

import asyncio
import errno
import threading

import numpy as np
import pytest

from freetoken.errors import ConfigError, TraceBusyError
from freetoken.experts import route_watch
from freetoken.experts.replay import replay_policy
from freetoken.experts.route_recorder import RouteRecorder
from freetoken.experts.route_trace import TraceInfo, encode_header, encode_record, measure_trace, read_trace
from freetoken.experts.route_watch import RouteWatch
from freetoken.messages import TraceWish
from freetoken.testing.waiting import until

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
    with pytest.raises(TraceBusyError, match="already"):
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
    await peers.cache.stop_recording()
    recording = await peers.cache.trace(TraceWish("show"))
    trace = read_trace(path)
    assert path.stat().st_size == recording.num_bytes <= 300 and "limit of 300 bytes" in recording.ended
    assert trace.num_publishes == recording.publishes and not trace.truncated
    assert peers.cache.metrics()["recording"] == 0.0


async def test_the_file_of_a_wish_is_chosen_and_counted(make_peers, tmp_path):
    peers = make_peers(num_slots=3, experts={"trace_dir": str(tmp_path / "traces")})
    await peers.load()
    assert await peers.cache.trace(TraceWish("show")) is None
    assert await peers.cache.trace(TraceWish("stop")) is None
    begun = await peers.cache.trace(TraceWish("start"))  # before there is anything to record
    assert begun.name.startswith("tiny-") and begun.name.endswith(".routes") and not begun.ended
    await peers.wire(1)
    await check_layers(peers)
    with pytest.raises(TraceBusyError, match="already"):
        await peers.cache.trace(TraceWish("start", "../x"))
    await until(lambda: peers.cache._routes._recorder.publishes == 6)  # it need not be stopped for that
    ended = await peers.cache.trace(TraceWish("stop"))
    trace = read_trace(ended.path)
    assert (ended.path, ended.ended, ended.unrecorded) == (begun.path, "stopped", 0)
    assert (ended.publishes, ended.tokens) == (trace.num_publishes, trace.num_tokens) == (6, trace.num_tokens)
    assert await peers.cache.trace(TraceWish("show")) == ended == await peers.cache.trace(TraceWish("stop"))
    for name in ("../x.routes", "x", "/tmp/x.routes", ".x.routes", "a/b.routes", "x.routes\n"):
        with pytest.raises(ConfigError, match="no name of a trace"):
            await peers.cache.trace(TraceWish("start", name))
    with pytest.raises(ConfigError, match="exists"):
        await peers.cache.trace(TraceWish("start", ended.name))
    again = await peers.cache.trace(TraceWish("start", "again.routes", 1 << 20))
    assert (again.name, again.max_bytes) == ("again.routes", 1 << 20)


async def test_a_dense_model_has_nothing_to_record(make_peers, indexes, load_store):
    peers = make_peers(of=indexes["llama"], store=load_store(indexes["llama"]))
    with pytest.raises(ConfigError, match="no experts"):
        await peers.cache.trace(TraceWish("start"))
    assert await peers.cache.trace(TraceWish("show")) is None


async def test_traces_have_a_limited_space(make_peers, tmp_path):
    (tmp_path / "old.routes").write_bytes(bytes(100_000))
    peers = make_peers(experts={"trace_dir": str(tmp_path), "trace_dir_bytes": 200_000})
    recording = await peers.cache.trace(TraceWish("start", "a.routes"))
    assert recording.max_bytes == 100_000
    await peers.cache.trace(TraceWish("stop"))
    (tmp_path / "old.routes").write_bytes(bytes(180_000))
    with pytest.raises(TraceBusyError, match=r"experts\.trace_dir_bytes"):
        await peers.cache.trace(TraceWish("start", "b.routes"))
    assert not (tmp_path / "b.routes").exists()


class Server:
    """Of a cache, as a recorder sees it."""

    def __init__(self, *drained):
        self.drained = list(drained)

    def drain_routes(self):
        return self.drained.pop(0) if self.drained else b""


RECORD = encode_record(7, 1, np.ones((3, 2), np.int32), np.ones((3, 2), np.float32), np.ones(3, np.uint8))


async def test_what_a_disk_takes_no_more_ends_the_recording_at_a_whole_record(tmp_path):
    recorder = RouteRecorder(TraceInfo("m", 2, 4, 2), str(tmp_path / "t"), 1 << 20)
    await recorder.open()
    server = Server(RECORD * 2, RECORD * 3, RECORD)
    await recorder.record(server)
    whole = recorder._file

    class Full:
        def __getattr__(self, name):
            return getattr(whole, name)

        def write(self, data):
            if len(data) <= 20:
                raise OSError(errno.ENOSPC, "No space left on device")
            return whole.write(data[:20])

    recorder._file = Full()
    await recorder.record(server)
    assert "No space left" in recorder.ended
    await recorder.record(server)  # in vain
    await recorder.close("stopped")
    trace = read_trace(tmp_path / "t")
    assert trace.num_publishes == recorder.publishes == 2 and not trace.truncated
    assert (tmp_path / "t").stat().st_size == recorder.num_bytes
    assert recorder.describe(0).tokens == 3.0


async def test_a_limit_is_used_up_to_the_last_whole_record(tmp_path):
    info = TraceInfo("m", 2, 4, 2)
    limit = len(encode_header(info)) + 5 * len(RECORD) - 1
    recorder = RouteRecorder(info, str(tmp_path / "t"), limit)
    await recorder.open()
    await recorder.record(Server(RECORD * 3 + RECORD * 4))
    await recorder.close("")
    assert measure_trace(tmp_path / "t") == (info, 4, 12, limit + 1 - len(RECORD))
    assert f"limit of {limit} bytes" in recorder.ended


async def test_a_start_that_was_given_up_leaves_no_file(tmp_path):
    path, hold = tmp_path / "t", threading.Event()
    recorder = RouteRecorder(TraceInfo("m", 2, 4, 2), str(path), 1 << 20)
    recorder._thread.submit(hold.wait)
    opening = asyncio.ensure_future(recorder.open())
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    hold.set()
    recorder._thread.shutdown(wait=True)
    assert not path.exists()


async def test_shadows_stand_beside_the_real_cache(make_peers):
    peers = make_peers(num_slots=6)
    await peers.load()
    await peers.wire(1)
    await check_layers(peers)
    await check_layers(peers)
    watch = peers.cache._routes
    watch._sample(peers.cache._server.drain_routes())
    await watch.compare()
    figures = peers.cache.metrics()
    assert 0 < figures["shadow_lru_hit_ratio"] <= figures["shadow_belady_hit_ratio"] < 1
    assert 0 < figures["sampled_hit_ratio"] < 1


async def test_the_watch_outlives_a_failure_and_counts_it(make_peers, monkeypatch, caplog):
    monkeypatch.setattr(route_watch, "SHADOW_INTERVAL_S", 0.001)
    failures = [MemoryError("no room"), None]
    compare, compared = RouteWatch.compare, asyncio.Event()

    async def faulty(self):
        if failures and (error := failures.pop(0)) is not None:
            raise error
        await compare(self)
        compared.set()

    monkeypatch.setattr(RouteWatch, "compare", faulty)
    peers = make_peers(num_slots=6)
    await peers.load()
    await peers.wire(1)
    await compared.wait()
    assert peers.cache.metrics()["route_watch_failures_total"] == 1.0
    assert "event=round_failed task=route watch" in caplog.text and "no room" in caplog.text
