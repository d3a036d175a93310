"""Makes an actor's service. Each class is imported only where it is built, so that torch is loaded by GpuExecutor alone
and aiohttp by ApiFront alone."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from freetoken.launch_spec import LaunchSpec
from freetoken.messages import ActorName
from freetoken.service import Service
from freetoken.transport import Endpoint

ServiceTable = Mapping[ActorName, str]
"""``module:class`` of every actor's service."""

SERVICES: ServiceTable = {
    ActorName.CONTROLLER: "freetoken.engine.controller:ControllerService",
    ActorName.SCHEDULER: "freetoken.scheduling.service:SchedulerService",
    ActorName.KV_ALLOCATOR: "freetoken.kv.service:KVAllocatorService",
    ActorName.EXPERT_CACHE: "freetoken.experts.cache_service:ExpertCacheService",
    ActorName.WEIGHT_STREAMER: "freetoken.checkpoint.streamer_service:WeightStreamerService",
    ActorName.CPU_EXECUTOR: "freetoken.experts.cpu_service:CpuExecutorService",
    ActorName.GPU_EXECUTOR: "freetoken.execution.service:GpuExecutorService",
    ActorName.API_FRONT: "freetoken.serving.front:ApiFrontService",
}


def create_service(
    name: ActorName, spec: LaunchSpec, endpoint: Endpoint, services: ServiceTable = SERVICES, **arguments: Any
) -> Service:
    """The service of actor ``name``. ``arguments`` are its class's own: ``adopt`` of WeightStreamer, ``control`` of
    ApiFront, ``host`` of Controller."""
    module, _, attribute = services[name].partition(":")
    service: Service = getattr(importlib.import_module(module), attribute)(spec, endpoint, **arguments)
    return service
