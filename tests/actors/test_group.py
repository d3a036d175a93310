"""Life and end of a group of real actors."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

from actors.cluster import Cluster
from actors.launch import find_actor, find_group
from actors.process import ProcessWatch, identify
from actors.runtime import RayRuntime
from freetoken.engine.phases import Phase
from freetoken.errors import CheckpointError, FreeTokenError
from freetoken.messages import ACTOR_NAMES, ActorName, ActorState

from .engines import Engine

pytestmark = pytest.mark.actors

MakeEngine = Callable[..., Engine]


def memfd_holders() -> set[int]:
    """Processes that have a fake store open."""
    holders = set()
    for fd in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if "freetoken-fake-store" in str(fd.readlink()):
                holders.add(int(fd.parts[2]))
        except OSError:
            continue
    return holders


def test_life_leaves_nothing(make_engine: MakeEngine, ray_cluster: Cluster) -> None:
    others = memfd_holders()  # of engines that are no part of this test
    engine = make_engine()
    engine.start()
    overview = engine.until_answering(epoch=1)
    assert [status.name for status in overview.actors] == list(ACTOR_NAMES)
    assert all(status.state is ActorState.SERVING for status in overview.actors)
    pids = {status.pid for status in overview.actors}
    assert len(pids) == 8
    assert os.getpid() not in pids
    assert overview.url.startswith("http://127.0.0.1:")
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in pids} == {0}
    assert memfd_holders() >= {s.pid for s in overview.actors if "store_inode" in s.metrics}
    names = {
        entry["name"]
        for entry in ray.util.list_named_actors(all_namespaces=True)
        if entry["namespace"] == engine.namespace
    }
    assert names == {str(name) for name in ACTOR_NAMES}
    assert "GpuExecutor" in repr(find_actor(ActorName.GPU_EXECUTOR, engine.namespace))
    second = RayRuntime(engine.spec, ray_cluster, None)
    with pytest.raises(FreeTokenError, match="freetoken stop"):
        asyncio.run(second.start())
    engine.stop()
    assert not find_group(engine.namespace)
    assert not any(identify(pid) for pid in pids)
    assert memfd_holders() <= others


def test_error_of_the_user_reaches_the_launcher(make_engine: MakeEngine) -> None:
    engine = make_engine()
    (engine.directory / "corrupt").touch()
    engine.start()
    overview = engine.until(lambda overview: overview.phase is Phase.FAILED)
    assert isinstance(overview.failure, CheckpointError)
    assert str(overview.failure) == "data-0: record 3 is corrupt"


def test_the_engine_ends_with_its_launcher(make_engine: MakeEngine) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as launcher:
        engine = make_engine(launcher=identify(launcher.pid))
        engine.start()
        pids = {status.pid for status in engine.until_answering(epoch=1).actors}
        launcher.kill()
        launcher.wait()
        engine.until_ended(pids)


def test_launcher_and_controller_die_together(make_engine: MakeEngine) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as launcher:
        engine = make_engine(launcher=identify(launcher.pid))
        engine.start()
        overview = engine.until_answering(epoch=1)
        launcher.kill()
        os.kill(overview.of(ActorName.CONTROLLER).pid, signal.SIGKILL)  # type: ignore[union-attr]
        launcher.wait()
        engine.until_gone()


def test_messages_by_ray_calls(make_engine: MakeEngine) -> None:
    engine = make_engine(ray={"transport": "ray"})
    engine.start()
    overview = engine.until_answering(epoch=1)
    store = engine.store_inodes(overview)
    assert len(store) == 1
    os.kill(overview.of(ActorName.WEIGHT_STREAMER).pid, signal.SIGKILL)  # type: ignore[union-attr]
    overview = engine.until_answering(epoch=2)
    assert (engine.reads, engine.store_inodes(overview)) == (1, store)
    os.kill(overview.of(ActorName.CONTROLLER).pid, signal.SIGKILL)  # type: ignore[union-attr]
    engine.until(lambda overview: overview.of(ActorName.CONTROLLER).metrics["store_held"] == 1.0)  # type: ignore[union-attr]


def test_process_identity() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = identify(child.pid)
        assert process is not None
        watch = ProcessWatch(process)
        assert watch.alive
        watch.kill()
        asyncio.run(asyncio.wait_for(watch.wait(), 10))
        child.wait()
        assert not watch.alive
        watch.kill()  # nobody is hit
        watch.close()
        again = ProcessWatch(process)
        asyncio.run(asyncio.wait_for(again.wait(), 10))
        again.close()
