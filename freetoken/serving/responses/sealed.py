"""``encrypted_content`` of reasoning items: the reasoning itself, in a form that clients carry without looking inside.

It keeps the conversation stateless: a client that drops the visible reasoning still returns this. Nothing about it is
secret (the client sees the same text), so it is packed and checked, not encrypted.
"""

from __future__ import annotations

import base64
import hashlib
import zlib

PREFIX = "ftr1."
CHECK_BYTES = 8
MAX_REASONING_BYTES = 16 * 1024**2


def seal(text: str) -> str:
    """``text`` packed."""
    data = text.encode("utf-8", "surrogatepass")
    packed = hashlib.sha256(data).digest()[:CHECK_BYTES] + zlib.compress(data, 6)
    return PREFIX + base64.urlsafe_b64encode(packed).decode("ascii")


def unseal(content: str, max_bytes: int = MAX_REASONING_BYTES) -> str | None:
    """The text of what ``seal`` made; None for anything else (another server's content, a damaged one, or one of more
    than ``max_bytes``: a few bytes may unpack to very many)."""
    if not content.startswith(PREFIX):
        return None
    try:
        packed = base64.urlsafe_b64decode(content[len(PREFIX) :].encode("ascii"))
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(packed[CHECK_BYTES:], max(1, max_bytes))
        if not unpacker.eof or hashlib.sha256(data).digest()[:CHECK_BYTES] != packed[:CHECK_BYTES]:
            return None
        return data.decode("utf-8")
    except (ValueError, zlib.error):
        return None
