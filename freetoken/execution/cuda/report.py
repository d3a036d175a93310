"""What comes back from a step, in one copy: expert counts, sampled ids and one sum of logits per sampled row.

A row's sum of logits is finite only if every logit is, which is all that the host must know of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freetoken.execution.cuda.data_plane import COUNT_COLUMNS

NUM_BUFFERS = 3


@dataclass(frozen=True)
class Report:
    """On the host. ``counts`` int32 [L, 8], ``ids`` int32 [S], ``sums`` float32 [S]."""

    counts: NDArray[np.int32]
    ids: NDArray[np.int32]
    sums: NDArray[np.float32]


class ReportBuffers:
    """One buffer on the device, which steps fill in the order of the stream, and pinned ones that take turns."""

    def __init__(self, num_expert_layers: int, max_samples: int, device: torch.device) -> None:
        self._num_layers = num_expert_layers
        self._max_samples = max_samples
        head = num_expert_layers * COUNT_COLUMNS
        self._device = torch.zeros(head + 2 * max_samples, dtype=torch.int32, device=device)
        self.counts = self._device[:head].view(num_expert_layers, COUNT_COLUMNS)
        self.ids = self._device[head : head + max_samples]
        self.sums = self._device[head + max_samples :].view(torch.float32)
        self._sum = torch.zeros_like(self.counts)
        pinned = device.type == "cuda"
        self._host = [torch.zeros_like(self._device, device="cpu", pin_memory=pinned) for _ in range(NUM_BUFFERS)]
        self._next = 0

    def begin_sum(self) -> None:
        """A step of several passes over the layers begins: each pass leaves its own ``counts``."""
        self._sum.zero_()

    def add_counts(self) -> None:
        """After each pass. The status column stays what it is from the first wait without an answer on; only whether it
        is zero is of interest."""
        self._sum.add_(self.counts)

    def end_sum(self) -> None:
        """After the last one: ``counts`` become those of all passes."""
        self.counts.copy_(self._sum)

    def download(self, num_samples: int) -> Report:
        """Start the copy on the current stream; the result is valid once the stream has passed this point, and until
        ``NUM_BUFFERS`` - 1 more steps have been enqueued."""
        host = self._host[self._next]
        self._next = (self._next + 1) % NUM_BUFFERS
        host.copy_(self._device, non_blocking=True)
        raw: NDArray[np.int32] = host.numpy()
        head = self._num_layers * COUNT_COLUMNS
        return Report(
            counts=raw[:head].reshape(self._num_layers, COUNT_COLUMNS),
            ids=raw[head : head + num_samples],
            sums=raw[head + self._max_samples : head + self._max_samples + num_samples].view(np.float32),
        )


def sum_rows(logits: Tensor, out: Tensor) -> None:
    """out [S] = sum over each row of logits [S, V]."""
    torch.sum(logits, dim=1, out=out)
