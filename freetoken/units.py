"""Byte quantities as people write them."""

from __future__ import annotations

import re
import reprlib

_SUFFIXES = {
    "": 1, "b": 1,
    "k": 1000, "kb": 1000, "kib": 1024, "ki": 1024,
    "m": 1000**2, "mb": 1000**2, "mib": 1024**2, "mi": 1024**2,
    "g": 1000**3, "gb": 1000**3, "gib": 1024**3, "gi": 1024**3,
    "t": 1000**4, "tb": 1000**4, "tib": 1024**4, "ti": 1024**4,
}  # fmt: skip
_MAX_CHARACTERS = 64
_QUANTITY = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*$")


def parse_bytes(text: str | int) -> int:
    """``"8GiB"``, ``"512 MB"`` or a plain number of bytes, as bytes. Raises ``ValueError`` naming the text, also for
    values of other types."""
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise ValueError(f"{text} is negative; bytes must be 0 or more")
        return text
    match = _QUANTITY.match(text) if isinstance(text, str) and len(text) <= _MAX_CHARACTERS else None
    if match is None or match.group(2).lower() not in _SUFFIXES:
        raise ValueError(
            f"{reprlib.repr(text)} is not a quantity of bytes; write for example 8GiB, 512MiB or 1073741824"
        )
    return int(float(match.group(1)) * _SUFFIXES[match.group(2).lower()])


def format_bytes(count: int) -> str:
    """``1610612736`` as ``"1.50 GiB"``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{int(value)} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


def align_up(value: int, alignment: int) -> int:
    """The smallest multiple of ``alignment`` that is at least ``value``."""
    return -(-value // alignment) * alignment
