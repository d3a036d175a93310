"""Sampling of a step's rows on the device; tokens go to the report and to their requests' slots, without the host."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from freetoken.execution.batch_state import RequestState
from freetoken.execution.cuda.inputs import RequestTable
from freetoken.execution.cuda.report import ReportBuffers, sum_rows
from freetoken.kernels.triton import sampling


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
        sum_rows(logits, report.sums[:rows])
        table.last_token.index_copy_(0, inputs["sample_slot"], ids)


def samples_on_host(state: RequestState) -> bool:
    """Whether the next token of this request needs its history or its log-probabilities, which the device does not
    keep."""
    params = state.sampling
    return bool(
        params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or params.logit_bias
        or params.top_logprobs >= 0
        or state.num_output < params.min_tokens
    )
