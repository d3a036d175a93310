"""The one place where an implementation of the kernels is chosen."""

from __future__ import annotations

from freetoken import _native
from freetoken.kernels.interface import Kernels
from freetoken.kernels.native import NativeKernels
from freetoken.kernels.reference import ReferenceKernels

IMPLEMENTATIONS = ("native", "reference")


def load_kernels(implementation: str, pool: _native.WorkerPool | None = None) -> Kernels:
    """``"native"`` (needs ``pool``) or ``"reference"``; ``ValueError`` for anything else."""
    if implementation == "reference":
        return ReferenceKernels()
    if implementation == "native":
        if pool is None:
            raise ValueError("pool is needed by the native kernels")
        return NativeKernels(pool)
    raise ValueError(f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}")
