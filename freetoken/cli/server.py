"""The HTTP server of a running engine, for commands that talk to it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import json
import os
import shutil
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from freetoken.cli.status import add_engine_arguments, ray_config
from freetoken.errors import FreeTokenError

_TIMEOUT_S = 300.0


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """How to say which engine is meant, and how to reach it."""
    add_engine_arguments(parser)
    parser.add_argument("--url", help="the engine's HTTP address; unset: asked of its actors on Ray")
    parser.add_argument("--api-key", help="unset: the environment variable FREETOKEN_API_KEY")


def find_server(args: argparse.Namespace) -> EngineServer:
    """The server that ``add_server_arguments`` names. Raises ``FreeTokenError``."""
    url = (args.url or _find_url(args)).rstrip("/")
    return EngineServer(url, args.api_key or os.environ.get("FREETOKEN_API_KEY", ""))


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
    """Blocking requests. Every failure is a ``FreeTokenError`` with the server's own words."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self._key = key

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The JSON answer."""
        with self._open(method, path, body) as response:
            try:
                answer: dict[str, Any] = json.loads(response.read())
            except (OSError, ValueError) as error:
                raise self._silent(error) from error
            return answer

    def fetch(self, path: str, target: Path) -> None:
        """Write what is at ``path`` to ``target``, which must not exist; nothing is left there when that fails."""
        with self._open("GET", path, None) as response:
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

    def _open(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        authorization = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        headers = {"Content-Type": "application/json", **authorization}
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data, headers, method=method)
            return urllib.request.urlopen(request, timeout=_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            with error:
                try:
                    message = json.loads(error.read())["error"]["message"]
                except (ValueError, KeyError, TypeError):
                    message = error.reason
            raise FreeTokenError(f"{message} (HTTP status {error.code})") from error
        except (OSError, ValueError) as error:
            raise self._silent(error) from error

    def _silent(self, error: Exception) -> FreeTokenError:
        return FreeTokenError(f"no engine answers at {self.url}: {getattr(error, 'reason', error)}")
