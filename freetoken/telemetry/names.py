"""What a figure of an actor is called in Prometheus."""

from __future__ import annotations

import re

_NOT_A_NAME = re.compile(r"[^a-zA-Z0-9_]")
_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def actor_label(name: str) -> str:
    """``GpuExecutor`` as ``gpu_executor``, ``KVAllocator`` as ``kv_allocator``."""
    return _WORD_START.sub("_", name).lower()


def metric_name(actor: str, key: str) -> str:
    """Of the figure ``key`` of ``ActorStatus.metrics``."""
    return f"freetoken_{actor_label(actor)}_{_NOT_A_NAME.sub('_', key)}"
