"""Finding clusters; none is started here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from actors import cluster
from actors.cluster import ClusterError, LocalNode
from freetoken.config.schema import RayConfig


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[LocalNode]:
    """The raylets of this user, as the test wants them; no address is recorded or in the environment."""
    found: list[LocalNode] = []
    monkeypatch.setattr(cluster, "local_nodes", lambda: iter(found))
    monkeypatch.setattr(cluster, "recorded_address", lambda: recorded_in(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return found


def recorded_in(directory: Path) -> str:
    file = directory / "ray_current_cluster"
    return file.read_text() if file.exists() else ""


def node(address: str) -> LocalNode:
    return LocalNode(1, address, "python", "token")


def test_named_address_wins(nodes: list[LocalNode], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "a:1")
    assert cluster.find_address(RayConfig(address="b:2")) == "b:2"
    assert cluster.find_address(RayConfig()) == "a:1"
    assert cluster.find_address(RayConfig(address="local")) == ""


def test_recorded_cluster_must_be_running(nodes: list[LocalNode], tmp_path: Path) -> None:
    (tmp_path / "ray_current_cluster").write_text("a:1")
    assert cluster.find_address(RayConfig()) == ""
    nodes.append(node("a:1"))
    assert cluster.find_address(RayConfig()) == "a:1"
    assert cluster.find_address(RayConfig(address="auto")) == "a:1"


def test_private_clusters_of_others_are_left_alone(nodes: list[LocalNode]) -> None:
    nodes.append(node("a:1"))
    assert cluster.find_address(RayConfig()) == ""
    assert cluster.find_address(RayConfig(), any_local=True) == "a:1"
    nodes.append(node("b:1"))
    assert cluster.find_address(RayConfig(), any_local=True) == ""
    with pytest.raises(ClusterError, match="ray start --head"):
        cluster.find_address(RayConfig(address="auto"))


def test_recorded_address_is_read_from_rays_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    file = tmp_path / "ray" / "ray_current_cluster"
    file.write_text("a:1\n")
    assert cluster.recorded_address() == "a:1"
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    assert cluster.recorded_address() == ""


@pytest.mark.parametrize("address", ["nonsense", "ray://host:1", "host:port", "127.0.0.1:1"])
def test_unusable_addresses_fail_at_once(address: str) -> None:
    with pytest.raises(ClusterError):
        cluster.attach(address, "test")
