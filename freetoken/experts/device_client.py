"""What the data plane's services must know of the device: how its publishes arrive and which records it can read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from freetoken.checkpoint.ftw import FtwIndex
from freetoken.errors import FreeTokenError
from freetoken.launch_spec import LaunchSpec

DEVICE_SPIN_US = 5000
"""Busy wait of the servers beside a device that cannot wake them: longer than the pause between two decode steps."""

DEVICE_SHARED_TOKENS = 128
"""Tokens of a GPU's publish in which CpuExecutor takes part. Longer prefill chunks are bound by computation, and their
rows would be megabytes per layer over PCIe."""


def is_device_client(spec: LaunchSpec) -> bool:
    """Whether the publishes come from a GPU, which rings no bells."""
    return spec.config.device != "cpu"


def server_spin_us(spec: LaunchSpec) -> int:
    """Busy wait of ExpertCache's and CpuExecutor's server threads."""
    if is_device_client(spec) and spec.config.executor.spin_us is None:
        return DEVICE_SPIN_US
    return spec.plan.spin_us


class MailboxGeometry(NamedTuple):
    """The arguments of ``Mailbox.create`` and ``Mailbox.required_bytes``, in their order."""

    max_tokens: int
    top_k: int
    hidden: int
    num_layers: int
    num_experts: int
    max_shared_tokens: int
    route_rows: bool


def plan_mailbox(spec: LaunchSpec) -> MailboxGeometry:
    """The mailbox of a launch, the same in every epoch. Room for a GPU's batches, which are padded."""
    model, max_tokens, shared_tokens = spec.model, spec.plan.max_batch_tokens, 0
    if is_device_client(spec):
        max_tokens, shared_tokens = max(max_tokens, DEVICE_SHARED_TOKENS), DEVICE_SHARED_TOKENS
    return MailboxGeometry(
        max_tokens,
        model.num_experts_per_tok,
        model.hidden_size,
        len(model.moe_layers),
        model.num_experts,
        shared_tokens,
        spec.config.deterministic,
    )


def fetchable_records(index: FtwIndex, fetchable: Sequence[int]) -> NDArray[np.bool_]:
    """[L, E]: whether the whole record lies within the leading ``fetchable`` bytes of its data file's segment.

    Raises ``FreeTokenError`` when ``fetchable`` is not about the index's files.
    """
    if len(fetchable) != len(index.files):
        raise FreeTokenError(
            f"the device named the fetchable bytes of {len(fetchable)} store segments; the checkpoint {index.path} has "
            f"{len(index.files)} data files"
        )
    strides = np.array([index.layout_of(layer).stride_bytes for layer in range(len(index.layer_layout))], np.int64)
    limits = np.asarray(fetchable, np.int64)[index.record_file]
    return np.ascontiguousarray(index.record_offset + strides[:, None] <= limits)
