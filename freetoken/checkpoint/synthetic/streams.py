"""Random numbers by name: every piece of a checkpoint has a stream of its own, whatever is generated before it."""

from __future__ import annotations

import functools
import hashlib
from statistics import NormalDist

import numpy as np
from numpy.random import SFC64, SeedSequence
from numpy.typing import NDArray

VERSION = 1
"""Of the generator: another number means other weights for the same seed."""

_LEVELS = 1 << 16


def stream(seed: int, name: str) -> SFC64:
    """The stream ``name`` of ``seed``."""
    digest = hashlib.blake2b(f"{VERSION}/{seed}/{name}".encode(), digest_size=16).digest()
    return SFC64(SeedSequence(int.from_bytes(digest, "little")))


def random_bytes(source: SFC64, count: int) -> NDArray[np.uint8]:
    """``count`` uniform bytes, writable. Releases the GIL."""
    words = np.random.Generator(source).integers(0, 2**64 - 1, -(-count // 8), np.uint64, endpoint=True)
    return words.view(np.uint8)[:count]


def random_levels(source: SFC64, shape: tuple[int, ...]) -> NDArray[np.uint16]:
    """Uniform indices into a table of 65,536 values."""
    count = int(np.prod(shape))
    return random_bytes(source, 2 * count).view(np.uint16).reshape(shape)


@functools.cache
def normal_table() -> NDArray[np.float32]:
    """65,536 equally likely values of a normal number with variance 1: picking one is quicker than drawing one."""
    normal = NormalDist()
    half = np.array([normal.inv_cdf((i + 0.5) / _LEVELS) for i in range(_LEVELS // 2, _LEVELS)])
    half /= np.sqrt(np.mean(half**2))
    table = np.concatenate([-half[::-1], half]).astype(np.float32)
    table.setflags(write=False)
    return table


def normals(source: SFC64, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Normal numbers of variance 1."""
    return normal_table()[random_levels(source, shape)]
