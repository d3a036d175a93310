"""One Ray cluster for all tests of the actor shell."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from actors import cluster
from actors.cluster import Cluster
from actors.process import identify
from actors.settings import ProcessId
from freetoken.config.schema import RayConfig

from .engines import Engine


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Cluster]:
    config = RayConfig(dashboard=False, object_store_bytes=80 * 1024**2)
    connected = cluster.start_local(config)
    yield connected
    cluster.disconnect()


@pytest.fixture
def make_engine(ray_cluster: Cluster, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(launcher: ProcessId | None = None, **settings: Any) -> Engine:
        engine = Engine(ray_cluster, tmp_path, launcher or identify(os.getpid()), **settings)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.stop()


@pytest.fixture(scope="module")
def engine(ray_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One engine that the tests of a module share and leave answering."""
    engine = Engine(ray_cluster, tmp_path_factory.mktemp("engine"), identify(os.getpid()))
    engine.start()
    yield engine
    engine.stop()
