"""Precedence and errors of the settings loader; every shipped profile loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from freetoken.config.loader import list_profiles, load_config, load_profile, settings_from_flags
from freetoken.errors import ConfigError
from freetoken.units import format_bytes, parse_bytes


@pytest.mark.parametrize("name", sorted(list_profiles()))
def test_every_profile_loads(name: str) -> None:
    assert load_config(profile=name, flags={"model": "m"}, environment={}).model == "m"


def test_precedence_default_profile_environment_flag(tmp_path: Path) -> None:
    profile = tmp_path / "p.yaml"
    profile.write_text("extends: default\nserver: {port: 1, host: 0.0.0.0}\nkv: {block_size: 8}\nvram: 1GiB\n")
    environment = {"FREETOKEN_SERVER__PORT": "2", "FREETOKEN_VRAM": "2GiB", "PATH": "/bin"}
    flags = settings_from_flags(["server.port=3", "server.api_keys=[a, b]"])
    config = load_config(profile=str(profile), flags={"model": "m", **flags}, environment=environment)
    assert (config.server.port, config.server.host, config.kv.block_size) == (3, "0.0.0.0", 8)
    assert config.server.api_keys == ("a", "b")
    assert config.vram == 2 << 30


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"model": "m", "server": {"prt": 1}}, r"server\.prt: unknown setting; known here: .*port"),
        ({"model": "m", "vram": "8 gallons"}, "8 gallons"),
        ({"model": "m", "vram": -1}, "-1"),
        ({"model": "m", "experts": {"split": "q=1.5"}}, "q=1.5"),
        ({"model": "m", "experts": {"split": "half"}}, "half"),
        ({"model": "m", "server": {"port": 70000}}, "70000"),
        ({}, "model: required"),
    ],
)
def test_errors_name_the_value(flags: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_config(flags=flags, environment={})


def test_unknown_profile_and_cycles(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nosuch.*laptop-8gb"):
        load_profile("nosuch")
    a, b = tmp_path / "a.yaml", tmp_path / "b.yaml"
    a.write_text(f"extends: {b}\n")
    b.write_text(f"extends: {a}\n")
    with pytest.raises(ConfigError, match="extends itself"):
        load_profile(str(a))
    a.write_text("- not a mapping\n")
    with pytest.raises(ConfigError, match="mapping"):
        load_profile(str(a))


def test_set_without_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        settings_from_flags(["server.port"])


@pytest.mark.parametrize(
    ("text", "count"), [("0", 0), ("1k", 1000), ("1KiB", 1024), ("1.5 GiB", 3 << 29), ("7B", 7), (12, 12)]
)
def test_parse_bytes(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


def test_format_bytes() -> None:
    assert [format_bytes(n) for n in (5, 2048, 3 << 29, 5 << 40)] == ["5 B", "2.00 KiB", "1.50 GiB", "5.00 TiB"]
