"""Every kernel at the shapes of Qwen3-30B-A3B: ``pytest -m gpu tests/gpu`` on a machine with an NVIDIA GPU."""

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
pytest.importorskip("triton", reason="needs triton")

from bench.gpu.cases import Bench  # noqa: E402
from bench.gpu.checks import CHECKS  # noqa: E402


@pytest.fixture(scope="module")
def bench():
    torch.manual_seed(0)
    return Bench("cuda")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_at_real_shapes(check, bench):
    findings = [(what, error, limit) for what, error, limit in check(bench) if not error <= limit]
    assert not findings
