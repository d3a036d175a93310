"""From token ids to text, one token at a time.

What all ``push`` calls and the final ``flush`` of a detokeniser return, joined, is exactly what the ``tokenizers``
library decodes from all the ids at once. Text is held back while a character is incomplete, so a replacement character
only appears where the whole sequence has it too.

Which class applies follows from the ``decoder`` section of ``tokenizer.json``.
"""

from __future__ import annotations

import abc
import codecs
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

REPLACEMENT = "\ufffd"


def _byte_level_alphabet() -> dict[str, int]:
    """The printable stand-ins that byte-level BPE vocabularies use for the 256 bytes (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    spare = 0x100
    for byte in range(256):
        if byte not in printable:
            table[chr(spare)] = byte
            spare += 1
    return table


_BYTE_OF_CHARACTER = _byte_level_alphabet()


def _byte_level_bytes(piece: str) -> bytes:
    """A piece that has a character outside the alphabet (an added token) stands for its own UTF-8."""
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in piece])
    except KeyError:
        return piece.encode()


def _fallback_byte(piece: str) -> int | None:
    """The byte that a SentencePiece token like ``<0xE2>`` stands for."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return int(piece[3:5], 16)
        except ValueError:
            return None
    return None


class Detokenizer(abc.ABC):
    """The state of one stream of tokens."""

    @abc.abstractmethod
    def push(self, token_id: int) -> str:
        """The text that is certain after this token; often empty."""

    @abc.abstractmethod
    def flush(self) -> str:
        """What is still held back. The stream is over."""


@dataclass(frozen=True, slots=True)
class PieceSteps:
    """A SentencePiece-like decoder: replace in each piece, turn runs of byte pieces into text, join, strip once."""

    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip_character: str = ""
    strip_count: int = 0


class ByteLevelDetokenizer(Detokenizer):
    """Byte-level BPE: pieces are bytes; their concatenation is decoded as UTF-8."""

    def __init__(self, piece_of: Callable[[int], str | None], bytes_of: Callable[[int], bytes]) -> None:
        self._piece_of = piece_of
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if self._piece_of(token_id) is None:
            return ""
        return self._decoder.decode(self._bytes_of(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class PieceDetokenizer(Detokenizer):
    """SentencePiece with byte fallback. A run of byte pieces that is not valid UTF-8 becomes one replacement character
    for each byte, so a run can only be shown once it has ended."""

    def __init__(self, piece_of: Callable[[int], str | None], steps: PieceSteps) -> None:
        self._piece_of = piece_of
        self._steps = steps
        self._run = bytearray()
        self._to_strip = steps.strip_count

    def push(self, token_id: int) -> str:
        piece = self._piece_of(token_id)
        if piece is None:
            return ""
        for old, new in self._steps.replacements:
            piece = piece.replace(old, new)
        if self._steps.byte_fallback:
            byte = _fallback_byte(piece)
            if byte is not None:
                self._run.append(byte)
                return ""
        return self._strip(self._end_run() + piece)

    def flush(self) -> str:
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        if not self._run:
            return ""
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            text = REPLACEMENT * len(self._run)
        self._run.clear()
        return text

    def _strip(self, text: str) -> str:
        if not self._to_strip or not text:
            return text
        stripped = 0
        while stripped < min(self._to_strip, len(text)) and text[stripped] == self._steps.strip_character:
            stripped += 1
        self._to_strip = self._to_strip - stripped if stripped == len(text) else 0
        return text[stripped:]


class MetaspaceDetokenizer(Detokenizer):
    """Pieces whose spaces are written as ``replacement``; the first piece loses them unless ``keep_first``."""

    def __init__(self, piece_of: Callable[[int], str | None], replacement: str, keep_first: bool) -> None:
        self._piece_of = piece_of
        self._replacement = replacement
        self._keep = keep_first

    def push(self, token_id: int) -> str:
        piece = self._piece_of(token_id)
        if piece is None:
            return ""
        text = piece.replace(self._replacement, " " if self._keep else "")
        self._keep = True
        return text

    def flush(self) -> str:
        return ""


class WindowDetokenizer(Detokenizer):
    """Any other decoder: decodes a short window again for each token and shows what it adds to the window's text.

    Exact where a token's text depends only on the few tokens before it.
    """

    def __init__(self, raw: RawTokenizer, skipped_ids: frozenset[int]) -> None:
        self._raw = raw
        self._skipped_ids = skipped_ids
        self._ids: list[int] = []
        self._shown = 0

    def push(self, token_id: int) -> str:
        if token_id in self._skipped_ids:
            return ""
        before = self._decode(self._ids[: self._shown])
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if len(text) <= len(before) or text.endswith(REPLACEMENT):
            return ""
        self._ids = self._ids[self._shown :]
        self._shown = len(self._ids)
        return text[len(before) :]

    def flush(self) -> str:
        before = self._decode(self._ids[: self._shown])
        return self._decode(self._ids)[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._raw.decode(ids, skip_special_tokens=False)
        return text


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for part in decoder.get("decoders", []) for step in _flatten(part)]
    return [decoder]


def _piece_steps(steps: list[dict[str, Any]]) -> PieceSteps | None:
    """The steps as ``PieceSteps`` (Replace*, ByteFallback?, Fuse, Strip?), or None when they are something else."""
    replacements: list[tuple[str, str]] = []
    rest = list(steps)
    while rest and rest[0].get("type") == "Replace":
        pattern = rest.pop(0)
        if not isinstance(pattern.get("pattern"), dict) or "String" not in pattern["pattern"]:
            return None
        replacements.append((pattern["pattern"]["String"], pattern["content"]))
    kinds = [step.get("type") for step in rest]
    byte_fallback = bool(kinds) and kinds[0] == "ByteFallback"
    if byte_fallback:
        rest, kinds = rest[1:], kinds[1:]
    if kinds == ["Fuse"]:
        return PieceSteps(tuple(replacements), byte_fallback)
    if kinds == ["Fuse", "Strip"] and rest[1].get("stop", 0) == 0:
        return PieceSteps(tuple(replacements), byte_fallback, rest[1]["content"], rest[1]["start"])
    return None


class TokenTexts:
    """The pieces of one vocabulary, and detokenisers over them. Shared by all streams of an event loop."""

    def __init__(self, raw: RawTokenizer, decoder: dict[str, Any] | None, special_ids: frozenset[int]) -> None:
        self._raw = raw
        self._special_ids = special_ids
        self._pieces: dict[int, str | None] = {}
        self._bytes: dict[int, bytes] = {}
        steps = _flatten(decoder)
        kinds = [step.get("type") for step in steps]
        self._byte_level = kinds == ["ByteLevel"]
        self._metaspace = steps[0] if kinds == ["Metaspace"] else None
        self._steps = _piece_steps(steps)

    def open(self, skip_special_tokens: bool = True, keep: frozenset[int] = frozenset()) -> Detokenizer:
        """A detokeniser for a new stream. ``keep`` are special tokens that are shown all the same."""
        piece_of = self.piece
        if skip_special_tokens:
            piece_of = functools.partial(self._kept_piece, keep) if keep else self._shown_piece
        if self._byte_level:
            return ByteLevelDetokenizer(piece_of, self.token_bytes)
        if self._steps is not None:
            return PieceDetokenizer(piece_of, self._steps)
        if self._metaspace is not None:
            keep_first = self._metaspace.get("prepend_scheme", "always") == "never"
            return MetaspaceDetokenizer(piece_of, self._metaspace.get("replacement", "▁"), keep_first)
        return WindowDetokenizer(self._raw, self._special_ids - keep if skip_special_tokens else frozenset())

    def piece(self, token_id: int) -> str | None:
        """The vocabulary's spelling of a token; None for an id that it does not have."""
        try:
            return self._pieces[token_id]
        except KeyError:
            piece: str | None = self._raw.id_to_token(token_id)
            self._pieces[token_id] = piece
            return piece

    def _shown_piece(self, token_id: int) -> str | None:
        return None if token_id in self._special_ids else self.piece(token_id)

    def _kept_piece(self, keep: frozenset[int], token_id: int) -> str | None:
        return None if token_id in self._special_ids and token_id not in keep else self.piece(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token stands for in the middle of a text (a fragment of UTF-8, possibly)."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._find_bytes(token_id)
        return found

    def _find_bytes(self, token_id: int) -> bytes:
        piece = self.piece(token_id)
        if piece is None:
            return b""
        if self._byte_level:
            return _byte_level_bytes(piece)
        if self._steps is not None:
            byte = _fallback_byte(piece) if self._steps.byte_fallback else None
            if byte is not None:
                return bytes([byte])
            for old, new in self._steps.replacements:
                piece = piece.replace(old, new)
            return piece.encode()
        if self._metaspace is not None:
            return piece.replace(self._metaspace.get("replacement", "▁"), " ").encode()
        text: str = self._raw.decode([token_id], skip_special_tokens=False)
        return text.encode()

    def token_text(self, token_id: int) -> str:
        """The token for people: its text, or ``bytes:\\xe2\\x98`` when it is no whole characters."""
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
