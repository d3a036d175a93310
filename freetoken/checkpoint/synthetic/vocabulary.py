"""A made-up vocabulary of any size, as GGUF metadata: 256 bytes, then words of consonant-vowel syllables.

Ids 0 to 255 are the bytes. After them come 100 syllables (``ba``), the same with a space before
them, and words of two and of three syllables with a space before them, as many as fit; the last three ids are the
special tokens. Every word has exactly one way to be merged, so a text of words encodes to the ids that decoded to it:
prompts can travel as text or as ids.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from freetoken.errors import CheckpointError

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_NUM_BYTES = 256
_SPACE = "\u0120"  # the byte-level alphabet's letter for byte 32
_SYLLABLES = [consonant + vowel for consonant in "bcdfghjklmnpqrstvwxz" for vowel in "aeiou"]
_NORMAL, _CONTROL = 1, 3
_LARGEST = _NUM_BYTES + 2 * len(_SYLLABLES) + len(_SYLLABLES) ** 2 + len(_SYLLABLES) ** 3 + len(SPECIAL_TOKENS)


def num_text_tokens(vocab_size: int) -> int:
    """Ids below this are ordinary tokens, from here on special ones. ``CheckpointError`` for an impossible size."""
    smallest = _NUM_BYTES + len(SPECIAL_TOKENS)
    if not smallest <= vocab_size <= _LARGEST:
        raise CheckpointError(f"vocabulary size {vocab_size} is not between {smallest} and {_LARGEST}")
    return vocab_size - len(SPECIAL_TOKENS)


def special_token_ids(vocab_size: int) -> tuple[int, int, int]:
    """Ids of ``SPECIAL_TOKENS``."""
    first = num_text_tokens(vocab_size)
    return first, first + 1, first + 2


def _byte_letters() -> list[str]:
    """The visible letter that byte-level vocabularies write for each byte (as GPT-2 defined it)."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = itertools.count(256)
    return [chr(byte) if byte in visible else chr(next(spare)) for byte in range(256)]


def _words() -> Iterator[tuple[str, str]]:
    """The two parts that make each token after the bytes, in the order of ids."""
    for syllable in _SYLLABLES:
        yield syllable[0], syllable[1]
    for syllable in _SYLLABLES:
        yield _SPACE, syllable
    for first, second in itertools.product(_SYLLABLES, repeat=2):
        yield _SPACE + first, second
    for first, second, third in itertools.product(_SYLLABLES, repeat=3):
        yield _SPACE + first + second, third


def tokenizer_metadata(vocab_size: int) -> dict[str, Any]:
    """The ``tokenizer.*`` metadata of a GGUF with this vocabulary."""
    num_text = num_text_tokens(vocab_size)
    parts = list(itertools.islice(_words(), num_text - _NUM_BYTES))
    start, _, end = special_token_ids(vocab_size)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*_byte_letters(), *(left + right for left, right in parts), *SPECIAL_TOKENS],
        "tokenizer.ggml.token_type": [_NORMAL] * num_text + [_CONTROL] * len(SPECIAL_TOKENS),
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in parts],
        "tokenizer.ggml.bos_token_id": start,
        "tokenizer.ggml.eos_token_id": end,
        "tokenizer.ggml.eot_token_id": start,
        "tokenizer.ggml.padding_token_id": start,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
