"""Engines of fake services on a Ray cluster, driven from synchronous tests."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actors.cluster import Cluster
from actors.launch import find_group
from actors.process import identify
from actors.runtime import RayRuntime, stop_engine
from actors.settings import ProcessId
from freetoken.engine.members import SupervisionPolicy
from freetoken.engine.phases import Phase
from freetoken.engine.runtime import Overview
from freetoken.errors import FreeTokenError
from freetoken.messages import ActorName
from freetoken.testing.fake_services import FAKE_SERVICES, count_reads, fake_spec

LIMIT_S = 40.0
POLICY = SupervisionPolicy(ping_interval_s=0.2, ping_timeout_s=2.0, loading_silence_s=20.0, pause_timeout_s=5.0)

_numbers = itertools.count()


class Engine:
    """An engine of fake services, driven from synchronous tests."""

    def __init__(self, ray_cluster: Cluster, directory: Path, launcher: ProcessId | None, **settings: Any) -> None:
        self.directory = directory
        self.namespace = f"test-{os.getpid()}-{next(_numbers)}"
        ray_settings = {"namespace": self.namespace, **settings.pop("ray", {})}
        self.spec = fake_spec(directory, ray=ray_settings, **settings)
        self.runtime = RayRuntime(self.spec, ray_cluster, launcher, FAKE_SERVICES, POLICY)

    def start(self) -> None:
        asyncio.run(self.runtime.start())

    def overview(self) -> Overview | None:
        """None while the Controller is away."""
        try:
            return asyncio.run(self.runtime.overview())
        except FreeTokenError:
            return None

    def until(self, condition: Callable[[Overview], bool]) -> Overview:
        """Wait for a condition on the overview."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            overview = self.overview()
            if overview is not None and condition(overview):
                return overview
            assert time.monotonic() < deadline, f"not within {LIMIT_S} s: {overview}"
            time.sleep(0.02)

    def until_answering(self, epoch: int | None = None) -> Overview:
        """Wait until requests pass through all actors in the newest epoch (or the one given)."""

        def answering(overview: Overview) -> bool:
            front = overview.of(ActorName.API_FRONT)
            return (
                overview.phase is Phase.READY
                and front is not None
                and front.metrics.get("answered_in_epoch", 0) > 0
                and all(status.epoch == front.epoch for status in overview.actors)
                and (epoch is None or front.epoch == epoch)
            )

        return self.until(answering)

    def store_inodes(self, overview: Overview) -> set[int]:
        """Of the store as its holders see it."""
        return {int(s.metrics["store_inode"]) for s in overview.actors if "store_inode" in s.metrics}

    @property
    def reads(self) -> int:
        return count_reads(self.directory)

    def until_gone(self) -> None:
        """Wait until no actor is left."""
        deadline = time.monotonic() + LIMIT_S
        while find_group(self.namespace):
            assert time.monotonic() < deadline, find_group(self.namespace)
            time.sleep(0.02)

    def until_ended(self, pids: set[int]) -> None:
        """Wait until no actor and none of these processes is left."""
        self.until_gone()
        deadline = time.monotonic() + LIMIT_S
        while left := [pid for pid in pids if identify(pid)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.02)

    def stop(self) -> None:
        asyncio.run(stop_engine(self.namespace))
        self.until_gone()
