"""Recording routes over HTTP: what reaches the engine, which files are handed out, and which never."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from freetoken.errors import ConfigError, PeerLostError, TraceBusyError
from freetoken.messages import ActorStatus, HealthState, HealthView, TraceRecording, TraceWish

from .conftest import Site, open_site

PATH = "/v1/cache/trace"
OUTSIDE = (
    "%2e%2e%2fsecret.routes",
    "..%2fsecret.routes",
    "secret",
    ".secret.routes",
    "secret.routes%00",
    "a%5cb.routes",
)


@dataclass
class Recorder:
    """A Controller that records into ``directory``."""

    directory: Path
    error: Exception | None = None
    wishes: list[TraceWish] = field(default_factory=list)
    last: TraceRecording | None = None

    async def actors(self) -> list[ActorStatus]:
        return []

    async def health(self) -> HealthView:
        return HealthView(HealthState.READY)

    async def trace(self, wish: TraceWish) -> TraceRecording | None:
        self.wishes.append(wish)
        if self.error is not None:
            raise self.error
        if wish.action == "start":
            path = self.directory / (wish.name or "chosen.routes")
            path.write_bytes(b"FTROUTES...")
            self.last = TraceRecording(str(path), "tiny", 1.0, 0.0, 11, wish.max_bytes or 99, 0, 0.0, 0)
        elif wish.action == "stop" and self.last is not None:
            self.last = replace(self.last, publishes=8, tokens=4.0, ended="stopped")
        return self.last


@pytest.fixture
def control(tmp_path: Path) -> Recorder:
    (tmp_path / "traces").mkdir()
    return Recorder(tmp_path / "traces")


@pytest.fixture
async def site(checkpoint: Path, control: Recorder) -> AsyncIterator[Site]:
    settings: dict[str, Any] = {"experts": {"trace_dir": str(control.directory)}}
    async with open_site(checkpoint, control, **settings) as opened:  # type: ignore[arg-type]
        yield opened


async def test_record_fetch_delete(site: Site, control: Recorder) -> None:
    assert await site.get(PATH) == (200, {"object": "cache.trace", "recording": False})
    status, body = await site.post(PATH, {"action": "stop"})
    assert (status, body["error"]["code"]) == (409, "no_recording")
    status, begun = await site.post(PATH, {"action": "start", "max_bytes": "1MiB"})
    assert (status, begun["recording"], begun["name"], begun["max_bytes"]) == (200, True, "chosen.routes", 1 << 20)
    assert control.wishes[-1] == TraceWish("start", "", 1 << 20)
    for method in ("get", "delete"):
        async with getattr(site.session, method)(f"{PATH}/chosen.routes") as response:
            assert (response.status, (await response.json())["error"]["code"]) == (409, "trace_under_way")
    status, ended = await site.post(PATH, {"action": "stop"})
    assert (status, ended["recording"], ended["ended"]) == (200, False, "stopped")
    assert (ended["publishes"], ended["tokens"], ended["bytes"]) == (8, 4.0, 11)
    assert (await site.get(PATH))[1] == ended
    async with site.session.get(f"{PATH}/chosen.routes") as response:
        assert (response.status, await response.read()) == (200, b"FTROUTES...")
    async with site.session.delete(f"{PATH}/chosen.routes") as response:
        assert (response.status, (await response.json())["deleted"]) == (200, True)
    assert not list(control.directory.iterdir())
    assert (await site.get(f"{PATH}/chosen.routes"))[0] == 404


@pytest.mark.parametrize("name", OUTSIDE)
async def test_only_traces_in_their_directory_are_reached(site: Site, control: Recorder, name: str) -> None:
    secret = control.directory.parent / "secret.routes"
    for path in (secret, control.directory / "secret", control.directory / ".secret.routes"):
        path.write_text("secret")
    (control.directory / "link.routes").symlink_to(secret)
    for wanted in (name, "link.routes"):
        for method in ("GET", "DELETE"):
            url = site.session._build_url("/").with_path(f"{PATH}/{wanted}", encoded=True)
            async with site.session.request(method, url) as response:
                assert response.status in (400, 404)
                assert secret.read_bytes() == b"secret"
    assert (control.directory / "secret").exists() and (control.directory / "link.routes").is_symlink()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "action is required"),
        ({"action": "pause"}, "'pause'"),
        ({"action": "start", "path": "/etc/passwd"}, "path"),
        ({"action": "start", "max_bytes": 5}, "65536"),
        ({"action": "start", "max_bytes": "lots"}, "not a quantity"),
        ({"action": "start", "name": ""}, "name is empty"),
        ({"action": "stop", "name": "x.routes"}, "action=start"),
    ],
)
async def test_mistakes(site: Site, control: Recorder, body: Any, words: str) -> None:
    status, answer = await site.post(PATH, body)
    assert status == 400 and words in answer["error"]["message"], answer
    assert not control.wishes


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (TraceBusyError("one is"), 409, "trace_under_way"),
        (ConfigError("no name"), 400, "invalid_value"),
        (PeerLostError("ExpertCache", "killed"), 503, "engine_unavailable"),
    ],
)
async def test_refusals(site: Site, control: Recorder, error: Exception, status: int, code: str) -> None:
    control.error = error
    answer = await site.post(PATH, {"action": "start", "name": "x.routes"})
    assert (answer[0], answer[1]["error"]["code"]) == (status, code)


async def test_without_a_key_nothing_is_recorded_or_read(checkpoint: Path, control: Recorder) -> None:
    (control.directory / "x.routes").write_text("secret")
    settings: dict[str, Any] = {"server": {"api_keys": ("k",)}, "experts": {"trace_dir": str(control.directory)}}
    async with open_site(checkpoint, control, **settings) as site:  # type: ignore[arg-type]
        assert (await site.post(PATH, {"action": "start"}))[0] == 401
        assert (await site.get(f"{PATH}/x.routes"))[0] == 401
        async with site.session.delete(f"{PATH}/x.routes") as response:
            assert response.status == 401
        assert not control.wishes
        assert (await site.post(PATH, {"action": "start"}, headers={"x-api-key": "k"}))[0] == 200
