"""Every ``ray.remote`` of the project: how each actor is created and found."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.settings import GroupSettings
from freetoken.launch_spec import LaunchSpec
from freetoken.messages import ACTOR_NAMES, ActorName

_CLASSES = {
    ActorName.CONTROLLER: "actors.controller:Controller",
    ActorName.SCHEDULER: "actors.scheduler:Scheduler",
    ActorName.KV_ALLOCATOR: "actors.kv_allocator:KVAllocator",
    ActorName.EXPERT_CACHE: "actors.expert_cache:ExpertCache",
    ActorName.WEIGHT_STREAMER: "actors.weight_streamer:WeightStreamer",
    ActorName.CPU_EXECUTOR: "actors.cpu_executor:CpuExecutor",
    ActorName.GPU_EXECUTOR: "actors.gpu_executor:GpuExecutor",
    ActorName.API_FRONT: "actors.api_front:ApiFront",
}


@cache
def _remote_class(name: ActorName) -> Any:
    module, _, attribute = _CLASSES[name].partition(":")
    # Threads of actors are planned by the engine, not by Ray: no CPUs are reserved.
    return ray.remote(num_cpus=0)(getattr(importlib.import_module(module), attribute))


def _num_gpus(name: ActorName, spec: LaunchSpec) -> float:
    return 1.0 if name is ActorName.GPU_EXECUTOR and spec.config.device == "cuda" else 0.0


def create_actor(name: ActorName, spec: LaunchSpec, settings: GroupSettings, **arguments: Any) -> Any:
    """Ask Ray for the actor; returns its handle before the process exists. ``ValueError`` when the name is taken.

    Detached: actors belong to the group, not to the process that created them. Ray restarts the Controller alone; the
    Controller restarts the others.
    """
    options: dict[str, Any] = {
        "name": str(name),
        "namespace": settings.namespace,
        "lifetime": "detached",
        "max_restarts": -1 if name is ActorName.CONTROLLER else 0,
        "max_task_retries": 0,
        "num_gpus": _num_gpus(name, spec),
        "scheduling_strategy": NodeAffinitySchedulingStrategy(settings.node_id, soft=False),
    }
    runtime_env = settings.runtime_env()
    if runtime_env is not None:
        options["runtime_env"] = runtime_env
    return _remote_class(name).options(**options).remote(spec, settings, **arguments)


def find_actor(name: ActorName, namespace: str) -> Any | None:
    """The living actor's handle."""
    try:
        return ray.get_actor(str(name), namespace)
    except ValueError:
        return None


def find_group(namespace: str) -> dict[ActorName, Any]:
    """All living actors of an engine."""
    found = {name: find_actor(name, namespace) for name in ACTOR_NAMES}
    return {name: actor for name, actor in found.items() if actor is not None}


def end_actor(actor: Any) -> None:
    """End the actor's process, for good."""
    ray.kill(actor, no_restart=True)
