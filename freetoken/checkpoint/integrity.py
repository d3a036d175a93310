"""Checksums of checkpoint bytes: CRC-32C for data (native, hardware speed), SHA-256 for identities."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def crc32c(data: Any, crc: int = 0) -> int:
    """CRC-32C of a contiguous buffer, continuing from ``crc``."""
    from freetoken import _native  # here, so that an index can be inspected without the extension

    return _native.crc32c(data, crc)


def digest_json(value: Any) -> str:
    """SHA-256 (hex) of a JSON value, independent of key order and white space."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
