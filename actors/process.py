"""Processes as the operating system sees them: identity, death, priority."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path

from actors.settings import ProcessId

log = logging.getLogger(__name__)

_SWITCH_INTERVAL_S = 0.0005


def identify(pid: int) -> ProcessId | None:
    """The process with this number; None when there is none."""
    try:
        # The command name, in parentheses, may contain anything; the fields after it do not.
        fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    state, start_ticks = fields[0], int(fields[19])
    return None if state in "ZX" else ProcessId(pid, start_ticks)


class ProcessWatch:
    """A hold on one process through a pidfd: its death can be awaited, and a signal cannot hit a successor."""

    def __init__(self, process: ProcessId) -> None:
        self.process = process
        self._fd: int | None = None
        try:
            self._fd = os.pidfd_open(process.pid)
        except (OSError, AttributeError) as error:
            log.debug("event=no_pidfd pid=%d error=%r", process.pid, str(error))
        if self._fd is not None and identify(process.pid) != process:
            self.close()

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return identify(self.process.pid) == self.process

    async def wait(self, poll_s: float = 0.5) -> None:
        """Returns when the process is gone; polls where there are no pidfds."""
        if self._fd is None:
            while self.alive:  # noqa: ASYNC110 - nothing to wait on
                await asyncio.sleep(poll_s)
            return
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        fd = os.dup(self._fd)  # so that ``close`` does not matter to those who wait
        loop.add_reader(fd, gone.set)
        try:
            await gone.wait()
        finally:
            loop.remove_reader(fd)
            os.close(fd)

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        try:
            if self._fd is not None:
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)
            elif self.alive:
                os.kill(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def close(self) -> None:
        """Let go of it."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def prepare_process() -> str:
    """Fit a Ray worker to be an actor of the engine; returns what could not be done, or nothing.

    Ray starts workers at nice 15 unless told otherwise, which would let any ordinary process starve the executors.
    """
    import sys

    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    if nice <= 0:
        return ""
    try:
        for task in Path("/proc/self/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(task.name), 0)
    except (PermissionError, ProcessLookupError) as error:
        return (
            f"runs at nice {nice} and may not change that ({error.strerror}); start the cluster with "
            "RAY_worker_niceness=0 in its environment"
        )
    return ""
