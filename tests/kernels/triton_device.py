"""Where the tests of Triton kernels run: on a CUDA device, else in the interpreter (tiny shapes, no bfloat16)."""

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and not triton.knobs.runtime.interpret:
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1 in the environment", allow_module_level=True)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the norms; NaN anywhere gives NaN, which no limit accepts."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())
