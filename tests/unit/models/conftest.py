"""PyTorch on one thread: models this small only lose by more, and test runs share few cores."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    torch.set_num_threads(1)
