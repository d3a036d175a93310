"""The client of the commands that talk to a running engine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from freetoken.cli.server import EngineServer
from freetoken.errors import ConfigError, FreeTokenError

ANSWERS: dict[str, tuple[int, bytes, int]] = {  # status, body, announced length beyond it
    "/v1/list": (200, b"[1]", 0),
    "/v1/text": (200, b"no JSON", 0),
    "/v1/busy": (409, json.dumps({"error": {"message": "a trace is being recorded"}}).encode(), 0),
    "/v1/bare": (502, b"<html>", 0),
    "/v1/moved": (302, b"", 0),
    "/v1/file": (200, b"trace" * 1000, 0),
    "/v1/torn": (200, b"trace", 7),
}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        told = {
            "path": self.path,
            "authorization": self.headers.get("Authorization"),
            "body": json.loads(self.rfile.read(length) or b"null"),
        }
        status, data, missing = ANSWERS.get(self.path.removeprefix("/base"), (200, json.dumps(told).encode(), 0))
        self.send_response(status)
        self.send_header("Content-Length", str(len(data) + missing))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST

    def log_message(self, *args: Any) -> None:
        return


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


def test_a_question_carries_key_and_body(url: str) -> None:
    told = EngineServer(url + "/base/v1/", "sk-1").ask("POST", "/v1/cache/rebalance", {"auto": True})
    assert told == {"path": "/base/v1/cache/rebalance", "authorization": "Bearer sk-1", "body": {"auto": True}}
    assert EngineServer(url, "").ask("GET", "/health") == {"path": "/health", "authorization": None, "body": None}


def test_a_proxy_of_the_environment_is_not_asked(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert EngineServer(url, "").ask("GET", "/health")["path"] == "/health"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/busy", r"^a trace is being recorded \(HTTP status 409\)$"),
        ("/v1/bare", r"^Bad Gateway \(HTTP status 502\)$"),
        ("/v1/moved", r"HTTP status 302"),
        ("/v1/text", "no server answers"),
        ("/v1/torn", "no server answers"),
    ],
)
def test_a_failure_is_told_in_words(url: str, path: str, words: str) -> None:
    with pytest.raises(FreeTokenError, match=words):
        EngineServer(url, "").ask("GET", path)


def test_a_look_takes_any_status(url: str) -> None:
    server = EngineServer(url, "")
    assert server.look("/v1/busy") == (409, {"error": {"message": "a trace is being recorded"}})
    assert [server.look(path) for path in ("/v1/bare", "/v1/list")] == [(502, {}), (200, {})]


def test_a_file_is_whole_or_not_there(url: str, tmp_path: Path) -> None:
    server, target = EngineServer(url, ""), tmp_path / "file"
    server.fetch("/v1/file", target)
    assert target.read_bytes() == b"trace" * 1000
    with pytest.raises(FreeTokenError, match="exists"):
        server.fetch("/v1/file", target)
    for path, words in (("/v1/torn", "lost"), ("/v1/busy", "recorded")):
        with pytest.raises(FreeTokenError, match=words):
            server.fetch(path, tmp_path / "other")
    assert list(tmp_path.iterdir()) == [target]


def test_what_is_no_address_is_refused() -> None:
    for url in ("127.0.0.1:8321", "ftp://host", "http://host:port"):
        with pytest.raises(ConfigError, match="--url"):
            EngineServer(url, "")
