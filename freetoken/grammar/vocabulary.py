"""The tokens of a checkpoint as grammars see them: bytes, special tokens, ends."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetoken.errors import CheckpointError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

logger = logging.getLogger(__name__)


class Vocabulary:
    """Built once for a process; may be used by any thread. ``size`` is the model's vocabulary, which may be larger than
    the tokenizer's: such ids match nothing."""

    def __init__(
        self,
        tokenizer: LLTokenizer,
        size: int,
        eos_token_ids: Sequence[int],
        added: Mapping[int, str],
        num_tokens: int,
    ) -> None:
        """``added``: tokens with a text of their own, special or not. ``num_tokens``: ids from this one on are no
        tokens."""
        self._added = {token_id: text.encode() for token_id, text in added.items()}
        self._num_tokens = num_tokens
        special = {text: i for i, text in added.items() if tokenizer.is_special_token(i)}
        self.tokenizer = tokenizer
        self.size = size
        self.eos_token_ids = tuple(eos_token_ids)
        self._special = special
        names = sorted((name for name in special if name), key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None

    def text_of(self, token_id: int) -> bytes:
        """What the token contributes to the text; a special token its name, an id that is no token nothing."""
        added = self._added.get(token_id)
        if added is not None or token_id >= self._num_tokens:
            return added or b""
        return self.tokenizer.decode_bytes([token_id])

    def tokenize(self, text: bytes) -> list[int]:
        """Some tokens whose text is ``text``, none of them special."""
        return self.tokenizer.greedy_tokenize(text.decode("utf-8", "replace"))

    def literal(self, text: str) -> str:
        """``text`` as a Lark expression. Special tokens in it can be written by their token only, everything else by
        any tokens. An empty text gives an empty expression."""
        parts = self._split.split(text) if self._split is not None else [text]
        out = []
        for part in filter(None, parts):
            token_id = self._special.get(part)
            out.append(f"<[{token_id}]>" if token_id is not None else json.dumps(part, ensure_ascii=False))
        return " ".join(out)


def load_vocabulary(directory: str | Path, size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
    """Read ``tokenizer.json`` and what ``tokenizer_config.json`` adds to it; a second or so with a large vocabulary.

    Raises ``CheckpointError`` naming the file and what is wrong with it.
    """
    from llguidance import LLTokenizer

    root = Path(directory)
    path = root / "tokenizer.json"
    try:
        definition = json.loads(path.read_text(encoding="utf-8"))
        config_path = root / "tokenizer_config.json"
        config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.exists() else {}
        _add_tokens(definition, config)
        ends = [i for i in dict.fromkeys(eos_token_ids) if 0 <= i < size]
        # Its mask says that the text may end with the bits of these tokens; a model without one gets them nevertheless
        # from the matcher's own list of ends.
        tokenizer = LLTokenizer(json.dumps(definition), n_vocab=size, eos_token=ends or None)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); grammars need a tokenizer.json") from error
    except Exception as error:  # of the JSON reader, or whatever the library thinks of the tokenizer
        raise CheckpointError(f"{path}: grammars cannot be used with this tokenizer: {error}") from error
    added = {token["id"]: token["content"] for token in definition.get("added_tokens") or () if token["id"] < size}
    for token_id, text in list(added.items()):
        found = tokenizer.tokenize_str(text, parse_special=True)
        if found != [token_id]:  # the library has numbered it otherwise, or it is a variant of another token
            logger.warning("event=added_token_unusable token=%r id=%d got=%s", text, token_id, found[:4])
            del added[token_id]
    return Vocabulary(tokenizer, size, ends, added, min(size, max(_token_ids(definition), default=-1) + 1))


def _add_tokens(definition: dict[str, Any], config: Mapping[str, Any]) -> None:
    """Tokens that only ``tokenizer_config.json`` declares; ids that ``tokenizer.json`` knows stay what they are."""
    declared = config.get("added_tokens_decoder")
    if not isinstance(declared, dict):
        return
    added = definition.setdefault("added_tokens", [])
    taken = _token_ids(definition)
    for key, value in sorted(declared.items(), key=lambda item: int(item[0])):
        token_id, content = int(key), value.get("content") if isinstance(value, dict) else None
        if not isinstance(content, str) or token_id in taken:
            continue
        flags = {name: bool(value.get(name)) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        added.append({"id": token_id, "content": content, **flags})


def _token_ids(definition: Mapping[str, Any]) -> set[int]:
    ids: set[int] = {token["id"] for token in definition.get("added_tokens") or ()}
    vocabulary = definition.get("model", {}).get("vocab")
    if isinstance(vocabulary, dict):
        ids.update(vocabulary.values())
    elif isinstance(vocabulary, list):  # of Unigram models: [text, score] by id
        ids.update(range(len(vocabulary)))
    return ids
