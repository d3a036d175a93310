"""The HTTP server of a running engine, for commands that talk to it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import importlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from freetoken.cli.agents.client import KEY_VARIABLE
from freetoken.cli.status import add_engine_arguments, ray_config
from freetoken.config.schema import ServerConfig
from freetoken.errors import ConfigError, FreeTokenError

DEFAULT_URL = f"http://127.0.0.1:{ServerConfig.model_fields['port'].default}"
_TIMEOUT_S = 300.0
_CONNECTIONS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """How to say which engine is meant, and how to reach it."""
    add_engine_arguments(parser)
    parser.add_argument("--url", help="the engine's HTTP address; unset: asked of its actors on Ray")
    parser.add_argument("--api-key", help=f"unset: the environment variable {KEY_VARIABLE}")


def find_server(args: argparse.Namespace) -> EngineServer:
    """The server that ``add_server_arguments`` names. Raises ``FreeTokenError``."""
    return EngineServer(args.url or _find_url(args), args.api_key or os.environ.get(KEY_VARIABLE, ""))


def _find_url(args: argparse.Namespace) -> str:
    engine = importlib.import_module("actors.runtime").AttachedEngine(ray_config(args))
    try:
        overview = asyncio.run(engine.overview())
    finally:
        engine.close()
    if not overview.url:
        raise FreeTokenError("the engine does not listen yet")
    url: str = overview.url
    return url


class EngineServer:
    """Blocking requests to the server at ``url``, with or without a trailing ``/v1``; a proxy of the environment is not
    asked. Every failure is a ``FreeTokenError``, a refusal with the server's own words."""

    def __init__(self, url: str, key: str, timeout_s: float = _TIMEOUT_S) -> None:
        """Raises ``ConfigError`` for what is no address."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self._key = key
        self._timeout_s = timeout_s
        parts = urlsplit(self.url)
        try:
            self._connection = _CONNECTIONS[parts.scheme]
            self._host, self._port, self._base = parts.hostname or "", parts.port, parts.path
        except (KeyError, ValueError):
            raise ConfigError(f"--url {url!r} is not the address of a server, like {DEFAULT_URL}") from None

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The JSON answer."""
        with self._request(method, path, body) as response:
            self._check(response)
            try:
                answer: dict[str, Any] = json.loads(response.read())
            except (OSError, ValueError, http.client.HTTPException) as error:
                raise self._silent(error) from error
            return answer

    def look(self, path: str) -> tuple[int, dict[str, Any]]:
        """Status and JSON of a path, whatever the status; what is no JSON object is an empty one."""
        with self._request("GET", path) as response:
            try:
                body = json.loads(response.read())
            except ValueError:
                body = None
            except (OSError, http.client.HTTPException) as error:
                raise self._silent(error) from error
            return response.status, body if isinstance(body, dict) else {}

    def fetch(self, path: str, target: Path) -> None:
        """Write what is at ``path`` to ``target``, which must not exist; nothing is left there when that fails."""
        with self._request("GET", path) as response:
            self._check(response)
            try:
                with target.open("xb") as file:
                    try:
                        shutil.copyfileobj(response, file)
                        if response.length:  # of what was announced, this much has not come
                            raise OSError("the connection was lost")
                    except BaseException:
                        with contextlib.suppress(OSError):
                            target.unlink()
                        raise
            except OSError as error:
                raise FreeTokenError(f"{target}: {error.strerror or error}") from error

    @contextlib.contextmanager
    def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        data = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            data = json.dumps(body).encode()
        connection = self._connection(self._host, self._port, timeout=self._timeout_s)
        try:
            try:
                connection.request(method, self._base + path, data, headers)
                response = connection.getresponse()
            except (OSError, ValueError, http.client.HTTPException) as error:
                raise self._silent(error) from error
            yield response
        finally:
            connection.close()

    @staticmethod
    def _check(response: http.client.HTTPResponse) -> None:
        if response.status < 300:
            return
        try:
            message = json.loads(response.read())["error"]["message"]
        except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
            message = response.reason
        raise FreeTokenError(f"{message} (HTTP status {response.status})")

    def _silent(self, error: Exception) -> FreeTokenError:
        return FreeTokenError(
            f"no server answers at {self.url} ({error}); start one with `freetoken launch MODEL`, or say where it is: "
            "--url"
        )
