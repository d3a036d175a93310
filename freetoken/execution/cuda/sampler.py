"""Sampling of a step's rows on the device; tokens go to the report and to their requests' slots, without the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freetoken.execution.batch_state import RequestState
from freetoken.execution.cuda.inputs import RequestTable
from freetoken.execution.cuda.report import ReportBuffers, sum_rows
from freetoken.grammar.matcher import num_words
from freetoken.kernels.triton import sampling
from freetoken.kernels.triton.token_mask import apply_token_masks

_MASK_BUFFERS = 2


class DeviceSampler:
    """Scratch for up to ``max_samples`` rows."""

    def __init__(self, max_samples: int, vocab_size: int, device: torch.device) -> None:
        self._state = sampling.SamplerState.empty(max_samples, vocab_size, device)
        self._logprobs = torch.zeros(max_samples, dtype=torch.float32, device=device)

    def run(
        self,
        logits: Tensor,
        inputs: Mapping[str, Tensor],
        greedy: bool,
        report: ReportBuffers,
        table: RequestTable,
    ) -> None:
        """``check``, then ``draw``."""
        self.check(logits, report)
        self.draw(logits, inputs, greedy, report, table)

    def check(self, logits: Tensor, report: ReportBuffers) -> None:
        """Report whether the logits are finite; before any token is ruled out."""
        sum_rows(logits, report.sums[: len(logits)])

    def draw(
        self,
        logits: Tensor,
        inputs: Mapping[str, Tensor],
        greedy: bool,
        report: ReportBuffers,
        table: RequestTable,
    ) -> None:
        """Draw one token per row of ``logits`` [S, V]; ``greedy`` promises that no row has a temperature."""
        rows = len(logits)
        ids = report.ids[:rows]
        if greedy:
            sampling.greedy(logits, self._state, ids, self._logprobs)
        else:
            parameters = sampling.SamplingParameters(
                temperature=inputs["temperature"],
                top_k=inputs["top_k"],
                top_p=inputs["top_p"],
                min_p=inputs["min_p"],
                seed=inputs["seed"],
                position=inputs["sample_position"],
            )
            sampling.sample(logits, parameters, self._state, ids, self._logprobs)
        table.last_token.index_copy_(0, inputs["sample_slot"], ids)


class TokenMasks:
    """Rules out tokens of constrained rows: masks in pinned memory, double-buffered, and their copy on the device."""

    def __init__(self, max_samples: int, vocab_size: int, device: torch.device) -> None:
        words = num_words(vocab_size)
        pinned = device.type == "cuda"
        self._host = [
            (
                torch.zeros(max_samples, dtype=torch.int32, pin_memory=pinned),
                torch.zeros((max_samples, words), dtype=torch.int32, pin_memory=pinned),
            )
            for _ in range(_MASK_BUFFERS)
        ]
        self._rows = torch.zeros(max_samples, dtype=torch.int32, device=device)
        self._masks = torch.zeros((max_samples, words), dtype=torch.int32, device=device)
        self._next = 0

    def apply(self, logits: Tensor, rows: Sequence[int], masks: Sequence[NDArray[np.uint32]]) -> None:
        """Upload ``masks`` and apply them to these rows of ``logits``, on the current stream.

        The caller makes sure that the step before the last one that had masks is over.
        """
        count = len(rows)
        host_rows, host_masks = self._host[self._next]
        self._next = (self._next + 1) % _MASK_BUFFERS
        host_rows.numpy()[:count] = rows
        for line, mask in zip(host_masks.numpy().view(np.uint32), masks, strict=False):
            line[:] = mask
        self._rows[:count].copy_(host_rows[:count], non_blocking=True)
        self._masks[:count].copy_(host_masks[:count], non_blocking=True)
        apply_token_masks(logits, self._rows[:count], self._masks[:count])

    def warm_up(self, logits: Tensor) -> None:
        """Compile the kernel."""
        self.apply(logits, [0], [np.full(self._masks.shape[1], 0xFFFFFFFF, dtype=np.uint32)])


def samples_on_host(state: RequestState) -> bool:
    """Whether the next token of this request needs its history or its log-probabilities, which the device does not
    keep. A grammar alone is no reason: its mask goes to the device, and keeps ``min_tokens`` too."""
    params = state.sampling
    return bool(
        params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or params.logit_bias
        or params.top_logprobs >= 0
        or (state.num_output < params.min_tokens and state.grammar is None)
    )
