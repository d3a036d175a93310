"""The copy engine beside the steps' stream."""

from __future__ import annotations

import torch

from freetoken.execution.cuda.bounce import NUM_BUFFERS
from freetoken.execution.cuda.driver import CudaDriver
from freetoken.execution.cuda.trace import Trace


class CudaCopier:
    """``RecordCopier`` on a stream of its own. Used on the thread that enqueues steps, with their stream current, and
    as a ``BounceCopier`` (and for ``end``) on another, not at the same time."""

    def __init__(self, driver: CudaDriver, device: torch.device) -> None:
        self._driver = driver
        self._stream = torch.cuda.Stream(device)
        self._handle = int(self._stream.cuda_stream)
        self._free = [torch.cuda.Event() for _ in range(2)]
        self._ready = [torch.cuda.Event() for _ in range(2)]
        self._buffers = [torch.cuda.Event(blocking=True) for _ in range(NUM_BUFFERS)]
        self.trace: Trace | None = None

    def copy(self, destination: int, source: int, size_bytes: int) -> None:
        self._driver.copy_to_device(destination, source, size_bytes, self._handle)

    def move(self, destination: int, source: int, size_bytes: int) -> None:
        stream = int(torch.cuda.current_stream().cuda_stream)
        self._driver.copy_on_device(destination, source, size_bytes, stream)

    def enter(self) -> None:
        self._driver.ensure_context()

    def mark_buffer(self, number: int) -> None:
        self._buffers[number].record(self._stream)

    def await_buffer(self, number: int) -> None:
        self._buffers[number].synchronize()

    def begin(self, half: int) -> None:
        # An event that was never recorded is over.
        self._stream.wait_event(self._free[half])
        if self.trace is not None:
            self.trace.mark("idle", self._stream)

    def end(self, half: int) -> None:
        self._ready[half].record(self._stream)
        if self.trace is not None:
            self.trace.mark("copy engine", self._stream)

    def wait(self, half: int) -> None:
        torch.cuda.current_stream().wait_event(self._ready[half])

    def release(self, half: int) -> None:
        self._free[half].record(torch.cuda.current_stream())
