"""Which launches go by measured costs, and which measure them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from freetoken.checkpoint.convert import ConvertOptions, convert
from freetoken.config import EngineConfig
from freetoken.costs import assumed_costs
from freetoken.elastic.machine import MachineInfo
from freetoken.elastic.profile import BandwidthProfile, save_profile
from freetoken.engine import bandwidth
from freetoken.engine.bandwidth import identity_of, with_profile
from freetoken.engine.prepare import plan_launch
from freetoken.errors import ConfigError
from freetoken.launch_spec import LaunchSpec
from freetoken.testing.tiny_checkpoints import load_tiny_checkpoint

COSTS = dataclasses.replace(assumed_costs("cpu"), hit_byte_ns=0.5, measured=True, source="kept")
SPLITS = ("auto", "fetch", "cpu", "q=0.3")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bandwidth") / "mixtral"
    convert(load_tiny_checkpoint("mixtral").path, path, ConvertOptions())
    return path


def launch_of(checkpoint: Path, cache: Path, split: str, measure: bool = True) -> LaunchSpec:
    config = EngineConfig(
        model=str(checkpoint),
        device="cpu",
        loader={"cache_dir": str(cache)},
        experts={"split": split, "measure": measure},
    )
    spec = plan_launch(config, checkpoint, MachineInfo((0, 1), 8 << 30, 8 << 30))
    return dataclasses.replace(spec, plan=dataclasses.replace(spec.plan, in_place=False, num_slots=4))


def keep(spec: LaunchSpec) -> None:
    identity = identity_of(spec)
    assert identity is not None
    save_profile(BandwidthProfile(identity, "today", COSTS, 10.0, 1.0, {}), spec.config.loader.cache_dir)


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was said before each; none is made."""
    said: list[str] = []

    def refused(*args: object, **keywords: object) -> object:
        raise ConfigError("not measured here")

    monkeypatch.setattr(bandwidth, "ProcessPoolExecutor", refused)
    return said


@pytest.mark.parametrize("measure", [True, False])
@pytest.mark.parametrize("split", SPLITS)
def test_a_profile_that_is_kept_counts_for_every_split(
    checkpoint: Path, tmp_path: Path, split: str, measure: bool, measurements: list[str]
) -> None:
    spec = launch_of(checkpoint, tmp_path, split, measure)
    keep(spec)
    assert with_profile(spec, measurements.append).plan.costs == COSTS and measurements == []
    in_place = dataclasses.replace(spec, plan=dataclasses.replace(spec.plan, in_place=True))
    assert with_profile(in_place).plan.costs is None
    other = dataclasses.replace(spec, plan=dataclasses.replace(spec.plan, cpu_threads=spec.plan.cpu_threads + 1))
    assert with_profile(other, measurements.append).plan.costs is None  # of another machine


@pytest.mark.parametrize("measure", [True, False])
@pytest.mark.parametrize("split", SPLITS)
def test_only_an_automatic_split_measures(
    checkpoint: Path, tmp_path: Path, split: str, measure: bool, measurements: list[str]
) -> None:
    spec = launch_of(checkpoint, tmp_path, split, measure)
    assert with_profile(spec, measurements.append).plan.costs is None
    assert len(measurements) == (measure and split == "auto")
