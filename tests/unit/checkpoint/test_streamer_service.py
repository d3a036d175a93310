"""The store's loader and its actor: every byte arrives, damage is named, the store is handed on and taken over."""

import asyncio
import os
import subprocess
import sys

import numpy as np
import pytest

from freetoken.checkpoint import store_loader, streamer_service
from freetoken.checkpoint.convert import ConvertOptions, convert_source
from freetoken.checkpoint.ftw import FtwIndex, open_dense_tensors
from freetoken.checkpoint.held_store import HeldStore
from freetoken.checkpoint.source import ArraySource
from freetoken.checkpoint.store_loader import StoreLoader
from freetoken.checkpoint.streamer_service import WeightStreamerService
from freetoken.config import EngineConfig
from freetoken.elastic.machine import MachineInfo
from freetoken.errors import CapacityError, CheckpointError, FreeTokenError
from freetoken.launch_spec import LaunchSpec, ResolvedPlan
from freetoken.messages import ActorName, ActorState, StepNotice, StoreShared, Wiring
from freetoken.testing.carriers import Network
from freetoken.testing.checkpoint_files import CONFIGS, flip_byte, tiny_arrays
from freetoken.testing.waiting import open_fds, until

CONFIG = CONFIGS["qwen3_moe"]
HOLDERS = (ActorName.CONTROLLER, ActorName.CPU_EXECUTOR, ActorName.GPU_EXECUTOR)


@pytest.fixture
def index(tmp_path):
    options = ConvertOptions(max_file_bytes=65536)
    return convert_source(ArraySource(CONFIG, tiny_arrays(CONFIG)), tmp_path / "model", options)


def make_spec(index, **loader):
    numbers = dict.fromkeys(ResolvedPlan.__dataclass_fields__, 1)
    plan = ResolvedPlan(**{**numbers, "kv_dtype": "f32", "cpu_core_ids": (), "device_core_ids": ()})
    config = EngineConfig(model=str(index.path), loader={"threads": 2, **loader})
    return LaunchSpec(
        config, index.spec, plan, str(index.path), index.fingerprint, "m", index.layouts, index.layer_layout
    )


def check_store(index, segments):
    assert [(s.name, s.size_bytes) for s in segments] == [(f.name, f.size_bytes) for f in index.files]
    for segment, file in zip(segments, index.files, strict=True):
        assert bytes(memoryview(segment)) == (index.path / file.name).read_bytes()


# ------------------------------------------------------------------------------------------ loader


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("threads,chunk_bytes", [(1, 4096), (3, 10_000), (2, 2**20)])
def test_every_byte_arrives(index, direct, threads, chunk_bytes):
    loader = StoreLoader(index, threads=threads, chunk_bytes=chunk_bytes, direct=direct)
    segments = loader.run()
    check_store(index, segments)
    assert loader.progress() == index.store_bytes
    figures = loader.figures
    assert figures.num_bytes == index.store_bytes and figures.num_checked == index.num_records + len(index.tensors)
    assert figures.used_direct <= direct and figures.gbps > 0
    views = open_dense_tensors(index, segments)
    np.testing.assert_array_equal(views["model.norm.weight"], tiny_arrays(CONFIG)["model.norm.weight"])


def test_a_damaged_record_or_tensor_is_named(index):
    number, offset = int(index.record_file[1, 4]), int(index.record_offset[1, 4])
    name = index.files[number].name
    flip_byte(index.path / name, offset + 5)
    with pytest.raises(CheckpointError, match=rf"{name}: record of layer 2 expert 4: checksum is \w+, the index says"):
        StoreLoader(index).run()
    StoreLoader(index, verify=False).run()
    flip_byte(index.path / name, offset + 5)
    tensor = index.tensors["model.layers.1.mlp.up_proj.weight"]
    flip_byte(index.path / index.files[tensor.file_index].name, tensor.offset_bytes)
    with pytest.raises(CheckpointError, match=r"tensor 'model\.layers\.1\.mlp\.up_proj\.weight': checksum is"):
        StoreLoader(index).run()


def test_a_file_that_changed_since_the_index_was_read(index):
    os.truncate(index.path / index.files[-1].name, 4096)
    with pytest.raises(CheckpointError, match=rf"cannot be read completely: .*{index.files[-1].name}"):
        StoreLoader(index).run()
    (index.path / index.files[-1].name).unlink()
    with pytest.raises(CheckpointError, match=rf"{index.files[-1].name}.*"):
        StoreLoader(index).run()


def test_a_cancelled_load_ends_with_an_error(index):
    loader = StoreLoader(index)
    loader.cancel()
    with pytest.raises(FreeTokenError, match="loading was cancelled"):
        loader.run()


def test_descriptors_are_given_back(index):
    before = open_fds()
    segments = StoreLoader(index).run()
    assert len(open_fds() - before) == len(index.files)
    del segments
    assert open_fds() <= before


def test_memory_that_cannot_be_had(index, monkeypatch):
    class Segment:
        @staticmethod
        def create(name, size_bytes):
            raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(store_loader, "SharedSegment", Segment)
    with pytest.raises(CapacityError, match=r"cannot allocate .* for .*dense-0000\d\.ftw .*Cannot allocate memory"):
        StoreLoader(index).run()


@pytest.mark.parametrize("direct", [True, False])
def test_loading_takes_no_more_memory_than_the_store(tmp_path, direct):
    """Peak resident memory of a fresh process, beyond what it had before, against the size of the store."""
    config = {**CONFIGS["llama"], "vocab_size": 262144, "tie_word_embeddings": True}
    big = convert_source(ArraySource(config, tiny_arrays(config)), tmp_path / "big")
    script = """
import sys
from pathlib import Path
from freetoken.checkpoint.ftw import FtwIndex
from freetoken.checkpoint.store_loader import StoreLoader

def peak():
    return next(int(l.split()[1]) for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmHWM"))

index = FtwIndex.load(sys.argv[1])
before = peak()
segments = StoreLoader(index, chunk_bytes=2**20, direct=sys.argv[2] == "True").run()
print(1024 * (peak() - before), index.store_bytes)
"""
    command = [sys.executable, "-c", script, str(big.path), str(direct)]
    grown, store = map(int, subprocess.run(command, capture_output=True, check=True, text=True).stdout.split())
    assert store > 32 * 2**20
    assert grown <= 1.1 * store


# ------------------------------------------------------------------------------------------ actor


class Group:
    """A WeightStreamer and those who hold its store."""

    def __init__(self, spec, adopt=False):
        self.network = Network("seqpacket")
        self.spec = spec
        self.holders = {name: self.network.endpoint(name) for name in HOLDERS}
        self.held = {}
        for name, endpoint in self.holders.items():
            endpoint.on(StoreShared, lambda message, fds, name=name: self.receive(name, message, fds))
        self.scheduler = self.network.endpoint(ActorName.SCHEDULER)
        self.new_streamer(adopt)

    def receive(self, name, message, fds):
        self.held.setdefault(name, []).append(HeldStore.adopt(message, fds))

    def new_streamer(self, adopt):
        self.streamer_endpoint = self.network.endpoint(ActorName.WEIGHT_STREAMER)
        self.streamer = WeightStreamerService(self.spec, self.streamer_endpoint, adopt=adopt)

    def addresses(self):
        everyone = [*self.holders.values(), self.scheduler, self.streamer_endpoint]
        return {endpoint.name: endpoint.address for endpoint in everyone}

    async def enter(self, epoch):
        wiring = Wiring(epoch, self.addresses())
        await asyncio.gather(*(e.connect(wiring) for e in [*self.holders.values(), self.scheduler]))
        return wiring

    async def close(self):
        await self.streamer.close()
        await self.streamer.close()
        for endpoint in self.network.endpoints:
            await endpoint.close()


@pytest.fixture
async def make_group():
    groups = []

    def make(*args, **kwargs):
        groups.append(Group(*args, **kwargs))
        return groups[-1]

    yield make
    for group in groups:
        await group.close()


async def test_load_and_share(index, make_group):
    group = make_group(make_spec(index))
    streamer = group.streamer
    assert streamer.progress() == (0, 0, "") and streamer.status().state is ActorState.CREATED
    await streamer.load()
    assert streamer.progress() == (index.store_bytes, index.store_bytes, "weights")
    await streamer.wire(await group.enter(1))
    await until(lambda: len(group.held) == 3)
    for stores in group.held.values():
        assert (stores[0].checkpoint, stores[0].fingerprint) == (str(index.path), index.fingerprint)
        check_store(index, stores[0].segments)
    stores[0].build_expert_store(FtwIndex.load(index.path))
    await streamer.resume()
    status = streamer.status()
    assert status.state is ActorState.SERVING and status.epoch == 1
    metrics = status.metrics
    assert metrics["store_bytes"] == index.store_bytes and metrics["records"] == 10
    assert metrics["load_s"] > 0 and metrics["load_gbps"] > 0 and metrics["direct"] in (0, 1)
    group.scheduler.send(ActorName.WEIGHT_STREAMER, StepNotice(1, 1, 5, 1))
    await until(lambda: streamer.metrics()["steps_total"] == 1)


async def test_every_wiring_shares_the_same_memory(index, make_group):
    group = make_group(make_spec(index))
    await group.streamer.load()
    for epoch in (1, 2):
        await group.streamer.wire(await group.enter(epoch))
        await until(lambda count=epoch: all(len(group.held.get(n, ())) == count for n in HOLDERS))
        await group.streamer.pause("test")
    first, second = group.held[ActorName.CONTROLLER]
    inodes = [[os.fstat(s.fd).st_ino for s in store.segments] for store in (first, second)]
    assert inodes[0] == inodes[1]


@pytest.mark.parametrize("holder", HOLDERS)
async def test_a_new_streamer_takes_the_store_over(index, make_group, holder):
    group = make_group(make_spec(index))
    await group.streamer.load()
    await group.streamer.wire(await group.enter(1))
    await until(lambda: len(group.held) == 3)
    await group.streamer.close()
    store = group.held[holder][0]
    for path in index.path.glob("*.ftw"):
        path.unlink()  # nothing may be read again
    group.new_streamer(adopt=True)
    await group.streamer.load()
    wiring = await group.enter(2)
    wired = asyncio.ensure_future(group.streamer.wire(wiring))
    store.share(group.holders[holder], ActorName.WEIGHT_STREAMER, 2)
    await wired
    await until(lambda: all(len(group.held[name]) == 2 for name in HOLDERS))
    inodes = {tuple(os.fstat(s.fd).st_ino for s in stores[1].segments) for stores in group.held.values()}
    assert inodes == {tuple(os.fstat(s.fd).st_ino for s in store.segments)}
    metrics = group.streamer.metrics()
    assert metrics["store_bytes"] == index.store_bytes and metrics["adopted"] == 1 and metrics["load_s"] == 0


async def test_a_store_that_comes_early_is_kept_for_the_wiring(index, make_group):
    group = make_group(make_spec(index), adopt=True)
    await group.streamer.load()
    store = HeldStore(str(index.path), index.fingerprint, StoreLoader(index).run())
    wiring = await group.enter(1)
    store.share(group.holders[ActorName.CONTROLLER], ActorName.WEIGHT_STREAMER, 1)
    await group.streamer.wire(wiring)
    assert group.streamer.store.is_complete
    store.share(group.holders[ActorName.GPU_EXECUTOR], ActorName.WEIGHT_STREAMER, 1)  # a second offer changes nothing
    held = group.streamer.store
    await until(lambda: group.streamer_endpoint.counters()["messages_received_total"] == 2)
    assert group.streamer.store is held


async def test_a_store_of_another_checkpoint_is_refused(index, make_group):
    before = open_fds()
    group = make_group(make_spec(index), adopt=True)
    await group.streamer.load()
    wiring = await group.enter(1)
    HeldStore(str(index.path), "other", StoreLoader(index).run()).share(
        group.holders[ActorName.CONTROLLER], ActorName.WEIGHT_STREAMER, 1
    )
    with pytest.raises(CheckpointError, match="has fingerprint other"):
        await group.streamer.wire(wiring)
    await group.close()
    await until(lambda: open_fds() <= before)


async def test_a_store_that_never_comes(index, make_group, monkeypatch):
    monkeypatch.setattr(streamer_service, "ADOPT_TIMEOUT_S", 0.01)
    group = make_group(make_spec(index), adopt=True)
    await group.streamer.load()
    with pytest.raises(FreeTokenError, match=r"no holder sent the store within 0\.01 s"):
        await group.streamer.wire(await group.enter(1))
    other = make_group(make_spec(index))
    with pytest.raises(FreeTokenError, match="wired before its weights were loaded"):
        await other.streamer.wire(await other.enter(1))
    with pytest.raises(FreeTokenError, match="holds no store"):
        await other.streamer.share_store(ActorName.CONTROLLER)


async def test_lost_receivers_do_not_keep_the_store_from_the_others(index, make_group):
    group = make_group(make_spec(index))
    await group.streamer.load()
    wiring = await group.enter(1)
    addresses = {name: address for name, address in wiring.addresses.items() if name != ActorName.CPU_EXECUTOR}
    await group.streamer.wire(Wiring(1, addresses))
    await until(lambda: set(group.held) == {ActorName.CONTROLLER, ActorName.GPU_EXECUTOR})


async def test_too_little_memory_is_said_before_allocating(index, make_group, monkeypatch):
    monkeypatch.setattr(streamer_service, "read_machine", lambda: MachineInfo((0,), 10**9, 1000))
    group = make_group(make_spec(index))
    monkeypatch.setattr(streamer_service, "StoreLoader", None)  # must not be reached
    with pytest.raises(CapacityError, match=r"the weights need \d+\.\d+ KiB of memory, 1000 B are available"):
        await group.streamer.load()


async def test_a_replaced_checkpoint_is_noticed(index, make_group):
    spec = make_spec(index)
    other = ArraySource(CONFIG, tiny_arrays(CONFIG, seed=1))
    convert_source(other, index.path, ConvertOptions(overwrite=True))
    with pytest.raises(CheckpointError, match="the checkpoint was replaced after this launch was planned"):
        await make_group(spec).streamer.load()


async def test_damage_reaches_the_user(index, make_group):
    flip_byte(index.path / "experts-00000.ftw", 0)
    with pytest.raises(CheckpointError, match=r"experts-00000\.ftw: record of layer 0 expert 0: checksum"):
        await make_group(make_spec(index)).streamer.load()
    await make_group(make_spec(index, verify=False)).streamer.load()


async def test_closing_stops_a_load(index, make_group, monkeypatch):
    """The loop stays responsive while a load runs on threads, and ``close`` ends that load."""
    started = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Endless(StoreLoader):
        def run(self):
            loop.call_soon_threadsafe(started.set)
            while not self._cancelled:
                os.sched_yield()
            return super().run()

    monkeypatch.setattr(streamer_service, "StoreLoader", Endless)
    group = make_group(make_spec(index))
    loading = asyncio.ensure_future(group.streamer.load())
    await asyncio.wait_for(started.wait(), 20)
    assert group.streamer.progress() == (0, index.store_bytes, "weights")
    assert group.streamer.status().state is ActorState.LOADING
    await group.streamer.close()
    with pytest.raises(FreeTokenError, match="cancelled"):
        await loading


async def test_a_dense_model_has_a_store_too(tmp_path, make_group):
    config = CONFIGS["llama"]
    dense = convert_source(ArraySource(config, tiny_arrays(config)), tmp_path / "dense")
    group = make_group(make_spec(dense))
    await group.streamer.load()
    await group.streamer.wire(await group.enter(1))
    await until(lambda: len(group.held) == 3)
    assert group.streamer.metrics()["records"] == 0
