"""What this server has generated lately, so that it is recognised when a client sends it back.

A model's own tokens are not what the tokeniser makes of their text, and templates write an earlier turn differently
from how the model wrote it. Both would cost the KV of everything behind it. A turn that is recognised goes into the
next prompt as the very ids that were generated.
"""

from __future__ import annotations

import hashlib
import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TAIL_CHARACTERS = 512
ANSWER_TOKENS = 128
"""What an answer takes beside its ids and their text, in tokens: 1.3 KiB of digests, the prompt's end and tables."""
MAX_OPENING_CHARACTERS = 160
"""Most that a template writes to open an answer: ``<think>``, ``</think>``, a channel, a call with its name."""


def digest(*parts: bytes) -> bytes:
    """Of a sequence of byte strings; the boundaries count."""
    whole = hashlib.blake2b(digest_size=16)
    for part in parts:
        whole.update(len(part).to_bytes(8, "little"))
        whole.update(part)
    return whole.digest()


def _plain_number(value: Any) -> Any:
    """JavaScript writes 1.0 as 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _plain_number(item) for key, item in value.items()}
    return [_plain_number(item) for item in value] if isinstance(value, list) else value


def answer_key(text: str, calls: Iterable[tuple[str, Mapping[str, Any] | str]]) -> bytes:
    """What a client sends back of an answer: its text (spaces around it do not count) and its calls (flat name and
    arguments), whose key order and ids do not count."""
    said = [
        [name, arguments.strip() if isinstance(arguments, str) else _plain_number(arguments)]
        for name, arguments in calls
    ]
    return digest(json.dumps([text.strip(), said], sort_keys=True).encode("utf-8", "surrogatepass"))


@dataclass(frozen=True, slots=True)
class PromptEnd:
    """The text of a prompt after its last recognised turn: enough to see whether a later prompt says the same there.

    ``head`` is a digest of the text before it, ``body`` of it without its last ``TAIL_CHARACTERS``, which are ``tail``.
    """

    head: bytes
    length: int
    body: bytes
    tail: str

    @classmethod
    def of(cls, head: bytes, text: str) -> PromptEnd:
        """The end ``text`` of a prompt whose earlier text has the digest ``head``."""
        cut = max(0, len(text) - TAIL_CHARACTERS)
        return cls(head, len(text), digest(text[:cut].encode("utf-8", "surrogatepass")), text[cut:])

    def match(self, head: bytes, text: str) -> str | None:
        """The text of this end when ``text`` (what a template writes up to an answer's first word) says the same but
        for how the answer is opened; None otherwise. Templates open a turn to be written and one that was written
        differently (``<think>``)."""
        cut = self.length - len(self.tail)
        if head != self.head or len(text) < cut or len(text) - cut > 2 * TAIL_CHARACTERS:
            return None
        if digest(text[:cut].encode("utf-8", "surrogatepass")) != self.body:
            return None
        written, common = text[cut:], 0
        for mine, theirs in zip(self.tail, written, strict=False):
            if mine != theirs:
                break
            common += 1
        opening = max(len(self.tail), len(written)) - common
        if opening > MAX_OPENING_CHARACTERS:
            return None
        return text[:cut] + self.tail


@dataclass(frozen=True, slots=True)
class OutputRecord:
    """One answer: the ids without the token that ended it, their text with special tokens, and what came before it."""

    identity: bytes
    token_ids: array[int]
    text: str
    reasoning: str
    prompt_end: PromptEnd


class OutputMemory:
    """Answers by the conversation before them and what they said; the oldest make way. Thread-safe.

    ``capacity_tokens`` bounds the ids kept, with ``ANSWER_TOKENS`` more for each answer, so that many short ones do not
    take more than few long ones; a token takes some ten bytes.
    """

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity_tokens = capacity_tokens
        self._records: OrderedDict[tuple[bytes, bytes], OutputRecord] = OrderedDict()
        self._calls: dict[str, tuple[bytes, bytes]] = {}
        self._calls_of: dict[tuple[bytes, bytes], list[str]] = {}
        self._lock = threading.Lock()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._records)

    def remember(
        self,
        history: bytes,
        answer: bytes,
        token_ids: Sequence[int],
        text: str,
        reasoning: str,
        prompt_end: PromptEnd,
        call_ids: Iterable[str] = (),
    ) -> None:
        """Keep an answer to the conversation with the digest ``history``."""
        ids = array("I", token_ids)
        record = OutputRecord(digest(history, answer, ids.tobytes()), ids, text, reasoning, prompt_end)
        key = (history, answer)
        with self._lock:
            self._drop(key)
            self._records[key] = record
            self.num_tokens += len(ids) + ANSWER_TOKENS
            self._calls_of[key] = [_plain_id(call_id) for call_id in call_ids]
            for call_id in self._calls_of[key]:
                self._calls[call_id] = key
            while self.num_tokens > self._capacity_tokens and self._records:
                self._drop(next(iter(self._records)))

    def find(self, history: bytes, answer: bytes) -> OutputRecord | None:
        """The answer that was given to exactly this conversation."""
        with self._lock:
            record = self._records.get((history, answer))
            if record is not None:
                self._records.move_to_end((history, answer))
            return record

    def reasoning_of(self, call_ids: Iterable[str], answer: bytes) -> str:
        """The reasoning of the answer that made these calls, wherever it stands now; empty when it is not known."""
        with self._lock:
            for call_id in call_ids:
                key = self._calls.get(_plain_id(call_id))
                if key is not None and key[1] == answer and key in self._records:
                    return self._records[key].reasoning
        return ""

    def _drop(self, key: tuple[bytes, bytes]) -> None:
        record = self._records.pop(key, None)
        if record is None:
            return
        self.num_tokens -= len(record.token_ids) + ANSWER_TOKENS
        for call_id in self._calls_of.pop(key):
            if self._calls.get(call_id) == key:
                del self._calls[call_id]


def _plain_id(call_id: str) -> str:
    """Some clients drop the punctuation of ids."""
    return "".join(character for character in call_id if character.isalnum())
