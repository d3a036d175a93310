"""Work beside the steps' stream that belongs to a step, in eager launches and in graphs alike."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


class Branch:
    """A side stream: ``fork``, launch, ``end``, and ``join`` where the result is needed. Without a GPU everything runs
    in the order of the calls. Every fork must be followed by an ``end`` that is joined within the same step."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ended: dict[int, torch.cuda.Event] = {}

    def fork(self) -> AbstractContextManager[object]:
        """Launches within the context run beside what the current stream gets from here on."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return torch.cuda.stream(self._stream)

    def end(self, name: int) -> None:
        """What was launched so far is ``name``."""
        if self._stream is not None:
            event = self._ended[name] = torch.cuda.Event()
            event.record(self._stream)

    def join(self, name: int) -> None:
        """The current stream waits for ``name``, if it ended since the last join."""
        event = self._ended.pop(name, None)
        if event is not None:
            event.wait(torch.cuda.current_stream())

    def forget(self) -> None:
        """A step begins: nothing of the one before, which may have failed half way, is awaited."""
        self._ended.clear()
