"""How deep the JSON of clients may be nested."""

from __future__ import annotations

from typing import Any

import orjson

MAX_DEPTH = 200
"""What is deeper could be read, and then neither rendered, hashed nor returned: each has a limit of its own."""
_WRITABLE_DEPTH = 254
"""Of orjson, when it writes."""


def is_too_deep(value: Any) -> bool:
    """Whether ``value``, read from JSON, has more than ``MAX_DEPTH`` levels. Takes some microseconds per 10 KB."""
    for _ in range(_WRITABLE_DEPTH - MAX_DEPTH):
        value = [value]
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError:
        return True
    return False
