"""A tiny checkpoint, its store, and the peers of the expert services."""

import asyncio
import os

import numpy as np
import pytest

from freetoken import _native
from freetoken.checkpoint.convert import convert_source
from freetoken.checkpoint.held_store import HeldStore, close_fds
from freetoken.checkpoint.source import ArraySource
from freetoken.checkpoint.store_loader import StoreLoader
from freetoken.config import EngineConfig
from freetoken.experts.cache_service import ExpertCacheService
from freetoken.experts.cpu_service import CpuExecutorService
from freetoken.launch_spec import LaunchSpec, ResolvedPlan
from freetoken.messages import ActorName, ArenaReady, MailboxShared, StepReport, Wiring
from freetoken.testing.carriers import Network
from freetoken.testing.checkpoint_files import CONFIGS, tiny_arrays

MAX_TOKENS = 8


@pytest.fixture(scope="session")
def indexes(tmp_path_factory):
    """Index by kind of model."""
    directory = tmp_path_factory.mktemp("experts")
    return {
        kind: convert_source(ArraySource(CONFIGS[kind], tiny_arrays(CONFIGS[kind])), directory / kind)
        for kind in ("mixtral", "llama")
    }


@pytest.fixture(scope="session")
def index(indexes):
    return indexes["mixtral"]


@pytest.fixture(scope="session")
def load_store():
    """Each call reads the checkpoint into new memory."""
    return lambda index: HeldStore(str(index.path), index.fingerprint, StoreLoader(index, threads=1).run())


@pytest.fixture(scope="session")
def store(index, load_store):
    return load_store(index)


def make_spec(index, num_slots=3, in_place=False, **settings):
    stride = max((layout.stride_bytes for layout in index.layouts), default=0)
    plan = ResolvedPlan(
        kv_block_size=4,
        num_kv_blocks=8,
        kv_dtype="f32",
        max_context_tokens=32,
        num_slots=num_slots,
        slot_stride_bytes=stride,
        dense_bytes=0,
        workspace_bytes=0,
        store_bytes=index.store_bytes,
        cpu_threads=1,
        device_threads=1,
        cpu_core_ids=(),
        device_core_ids=(),
        spin_us=0,
        max_batch_tokens=MAX_TOKENS,
        in_place=in_place,
    )
    config = EngineConfig(model=str(index.path), **settings)
    return LaunchSpec(
        config, index.spec, plan, str(index.path), index.fingerprint, "tiny", index.layouts, index.layer_layout
    )


class Peers:
    """The two services, and endpoints that stand for their peers. GpuExecutor's answers with an arena of its own."""

    def __init__(self, carrier, spec, index, store):
        self.spec, self.index, self.store = spec, index, store
        self.network = Network(carrier)
        self.cache = ExpertCacheService(spec, self.network.endpoint(ActorName.EXPERT_CACHE))
        self.cpu = CpuExecutorService(spec, self.network.endpoint(ActorName.CPU_EXECUTOR))
        self.gpu = self.network.endpoint(ActorName.GPU_EXECUTOR)
        self.streamer = self.network.endpoint(ActorName.WEIGHT_STREAMER)
        self.controller = self.network.endpoint(ActorName.CONTROLLER)
        self.scheduler = self.network.endpoint(ActorName.SCHEDULER)
        self.reports = []
        self.mailbox = self.client = self.fetchable = None
        self.new_arena()
        self.gpu.on(MailboxShared, self._on_mailbox)
        self.controller.on(StepReport, lambda message, fds: self.reports.append(message))
        self.expert_store = store.build_expert_store(index) if index.spec.is_moe else None

    def new_arena(self, arena_id="arena-0"):
        self.arena_id = arena_id
        size = self.spec.plan.num_slots * self.spec.plan.slot_stride_bytes
        self.arena = _native.SharedSegment.create("slots", size) if size else None
        if self.arena:
            np.frombuffer(memoryview(self.arena), np.uint8)[:] = 0xFF

    def _on_mailbox(self, message, fds):
        self.mailbox = _native.Mailbox.attach(_native.SharedSegment.attach(fds[0], message.size_bytes))
        close_fds(fds)
        self.client = _native.DeviceClient(
            self.mailbox,
            self.expert_store,
            self.arena,
            self.spec.plan.slot_stride_bytes,
            _native.WorkerPool(1),
            0,
            60.0,
            self.spec.config.deterministic,
        )

    @property
    def services(self):
        return (self.cache, self.cpu)

    async def load(self):
        for service in self.services:
            await service.load()

    async def enter(self, epoch):
        """Connect everything that is not a service to ``epoch``; returns the wiring."""
        self.wiring = Wiring(epoch, {endpoint.name: endpoint.address for endpoint in self.network.endpoints})
        others = (self.gpu, self.streamer, self.controller, self.scheduler)
        await asyncio.gather(*(endpoint.connect(self.wiring) for endpoint in others))
        return self.wiring

    def announce_arena(self):
        plan = self.spec.plan
        arena = ArenaReady(self.wiring.epoch, self.arena_id, plan.num_slots, plan.num_kv_blocks, self.fetchable)
        self.gpu.send(ActorName.EXPERT_CACHE, arena)

    def share_store(self, store=None):
        (store or self.store).share(self.streamer, ActorName.CPU_EXECUTOR, self.wiring.epoch)

    async def wire(self, epoch):
        await self.enter(epoch)
        self.announce_arena()
        self.share_store()
        await asyncio.gather(*(service.wire(self.wiring) for service in self.services))
        for service in self.services:
            await service.resume()

    async def pause(self):
        for service in self.services:
            await service.pause("test")

    async def forward(self, layer, batch):
        out = np.full(batch[0].shape, np.nan, np.float32)
        await asyncio.to_thread(self.client.forward, layer, *batch, out)
        return out

    async def close(self):
        for service in self.services:
            await service.close()
            await service.close()
        for endpoint in self.network.endpoints:
            await endpoint.close()


@pytest.fixture(params=["inprocess", "seqpacket"])
def carrier(request):
    return request.param


@pytest.fixture
async def make_peers(carrier, index, store):
    made = []

    def make(num_slots=3, of=index, store=store, in_place=False, **settings):
        made.append(Peers(carrier, make_spec(of, num_slots, in_place, **settings), of, store))
        return made[-1]

    yield make
    for peers in made:
        await peers.close()


@pytest.fixture
def store_message(store):
    """What a holder sends, without sending it: (message, descriptors)."""
    sent = []

    class Recorder:
        def send(self, to, message, fds=()):
            sent.append((message, tuple(os.dup(fd) for fd in fds)))

    def record(held=None, epoch=1):
        (held or store).share(Recorder(), ActorName.CPU_EXECUTOR, epoch)
        return sent[-1]

    return record
