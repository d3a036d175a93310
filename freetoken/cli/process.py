"""A ``freetoken launch`` child process: start, wait until ready, stop in order. For the demo, tests and benchmarks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType


class LaunchFailedError(RuntimeError):
    """The child ended, or did not become ready in time. The message holds what it printed."""


class EngineProcess:
    """Context manager around one engine. ``url`` is valid inside the ``with`` block.

    The child gets a process group of its own, so a Ctrl-C in the terminal reaches only the parent, which then stops
    the child in order. A child that does not stop within ``stop_timeout_s`` is killed with its group.
    """

    def __init__(
        self,
        model: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        ready_timeout_s: float = 600.0,
        stop_timeout_s: float = 60.0,
        module: str = "freetoken.cli.main",
    ) -> None:
        """``module`` is the program: it takes the arguments of ``freetoken``."""
        self.model = model
        self.arguments: Sequence[str] = arguments
        self.environment = dict(os.environ, **(environment or {}))
        self.ready_timeout_s = ready_timeout_s
        self.stop_timeout_s = stop_timeout_s
        self.module = module
        self.url = ""
        self.stopped_cleanly: bool | None = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the launcher."""
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        """What the launcher printed so far."""
        assert self._directory is not None
        return (Path(self._directory.name) / "launch.log").read_text(errors="replace")

    def __enter__(self) -> EngineProcess:
        self._directory = tempfile.TemporaryDirectory(prefix="freetoken-")
        directory = Path(self._directory.name)
        ready = directory / "ready.json"
        command = [sys.executable, "-m", self.module, "launch", self.model, *self.arguments]
        with (directory / "launch.log").open("wb") as output:
            self._process = subprocess.Popen(
                [*command, "--ready-file", str(ready)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )
        try:
            self._wait_until_ready(ready)
        except BaseException:
            self._close()
            raise
        return self

    def _wait_until_ready(self, ready: Path) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self.ready_timeout_s
        while not ready.exists():
            if self._process.poll() is not None:
                raise LaunchFailedError(f"freetoken launch ended with {self._process.returncode}:\n{self.log}")
            if time.monotonic() > deadline:
                raise LaunchFailedError(f"not ready after {self.ready_timeout_s:.0f} s:\n{self.log}")
            time.sleep(0.05)
        self.url = str(json.loads(ready.read_text())["url"])

    def stop(self) -> int:
        """Ask the launcher to stop (as Ctrl-C does) and return its exit status; kills it after the time limit."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(self.stop_timeout_s)
        if self.stopped_cleanly is None:
            self.stopped_cleanly = self._process.poll() == 0
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def _close(self) -> None:
        self.stop()
        assert self._directory is not None
        self._directory.cleanup()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()
