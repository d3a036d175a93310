"""A checkpoint's tokenizer, chat template and generation defaults, read from its Hugging Face files."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

from freetoken.errors import CheckpointError
from freetoken.serving.detokenizer import Detokenizer, TokenTexts
from freetoken.serving.template import ChatTemplate

logger = logging.getLogger(__name__)

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What the checkpoint's ``generation_config.json`` recommends; None where it says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_ids: tuple[int, ...] = ()


RELEASING_CHARACTERS = 1024
"""Texts from this length on are encoded without the GIL, which takes a few microseconds more."""


class Tokenizer:
    """Text to ids and back. ``encode`` and ``decode`` may run in any thread, and ``encode`` of a long text releases the
    GIL while it works; ``texts`` belongs to the event loop."""

    def __init__(self, raw: RawTokenizer, definition: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """``definition`` is the parsed ``tokenizer.json``, ``config`` the parsed ``tokenizer_config.json``."""
        raw.no_truncation()
        raw.no_padding()
        self._raw = raw
        self.special_tokens = _named_tokens(config)
        _add_missing_tokens(raw, config, self.special_tokens)
        special_ids = {i for i, token in raw.get_added_tokens_decoder().items() if token.special}
        special_ids.update(i for i in map(raw.token_to_id, self.special_tokens.values()) if i is not None)
        self.special_ids = frozenset(special_ids)
        self.texts = TokenTexts(raw, definition.get("decoder"), self.special_ids)
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        # tokenizer.json decides which specials surround a prompt, as in transformers 5. Some older checkpoints (Llama
        # classes with a byte-level post-processor) state their first token only as a flag in tokenizer_config.json.
        self._always_bos = config.get("add_bos_token") is True

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        token_id: int | None = None if token is None else self._raw.token_to_id(token)
        return token_id

    @property
    def vocab_size(self) -> int:
        """Ids of this tokenizer are below it; the model's vocabulary may be larger."""
        size: int = self._raw.get_vocab_size(with_added_tokens=True)
        return size

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of ``text``; never truncated. Special tokens spelled out in the text become their ids, as with
        ``transformers``."""
        ids: list[int]
        if len(text) < RELEASING_CHARACTERS:
            ids = self._raw.encode(text, add_special_tokens=add_special_tokens).ids
        else:  # ``encode`` would keep the GIL for all of it: 60 ms of a 60 KiB prompt
            ids = self._raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        bos = self.bos_token_id
        if add_special_tokens and self._always_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of all ids at once."""
        text: str = self._raw.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_id(self, token: str) -> int | None:
        """The id of a whole token, None when the vocabulary has none that is spelled like this."""
        found: int | None = self._raw.token_to_id(token)
        return found

    def open_detokenizer(self, skip_special_tokens: bool = True, keep: frozenset[int] = frozenset()) -> Detokenizer:
        """A detokeniser for one stream. ``keep`` are special tokens that are shown all the same."""
        return self.texts.open(skip_special_tokens, keep)


@dataclass(frozen=True, slots=True)
class TextModel:
    """Everything about a checkpoint that concerns text. ``template`` is None when it has no chat template."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)


def load_text_model(directory: str | Path) -> TextModel:
    """Read a checkpoint's text files; blocks for a second or so with a large vocabulary.

    Raises ``CheckpointError`` naming the file that is missing or wrong. Only ``tokenizer.json`` is required.
    """
    root = Path(directory)
    path = root / "tokenizer.json"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); the API needs a tokenizer.json") from error
    try:
        definition = orjson.loads(data)
        raw = RawTokenizer.from_buffer(data)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise CheckpointError(f"{path}: not a tokenizer: {error}") from error
    config = _read_object(root / "tokenizer_config.json")
    if not config:
        config = _read_object(root / "special_tokens_map.json")
    tokenizer = Tokenizer(raw, definition, config)
    sources = _template_sources(root, config)
    template = ChatTemplate(sources, tokenizer.special_tokens) if sources else None
    return TextModel(tokenizer, template, _generation_defaults(root / "generation_config.json"))


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``, or an empty one when there is no such file."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value


def _token_content(value: Any) -> str | None:
    """A token as the configuration files write it: a string, or an object with ``content``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = ((name, _token_content(config.get(name))) for name in _NAMED_TOKENS)
    tokens = {name: content for name, content in found if content is not None}
    extra = config.get("model_specific_special_tokens")
    if isinstance(extra, dict):
        tokens.update({n: c for n, c in ((n, _token_content(v)) for n, v in extra.items()) if c is not None})
    return tokens


def _add_missing_tokens(raw: RawTokenizer, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Tokens that only ``tokenizer_config.json`` knows, and the special flag of those it names."""
    declared = config.get("added_tokens_decoder")
    for key, value in sorted(declared.items(), key=lambda item: int(item[0])) if isinstance(declared, dict) else ():
        content = _token_content(value)
        if content is None or raw.token_to_id(content) is not None:
            continue
        flags = {k: bool(value[k]) for k in ("single_word", "lstrip", "rstrip", "normalized") if k in value}
        raw.add_tokens([AddedToken(content, special=bool(value.get("special")), **flags)])
        if raw.token_to_id(content) != int(key):
            logger.warning(
                "event=added_token_id_differs token=%r declared=%s got=%s", content, key, raw.token_to_id(content)
            )
    known = {token.content for token in raw.get_added_tokens_decoder().values()}
    missing = [c for c in dict.fromkeys(named.values()) if c not in known and raw.token_to_id(c) is not None]
    raw.add_special_tokens([AddedToken(content, special=True, normalized=False) for content in missing])


def _template_sources(root: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name. A ``chat_template.jinja`` beside the tokenizer takes precedence over its configuration."""
    path = root / "chat_template.jinja"
    try:
        return {"default": path.read_text(encoding="utf-8")}
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    declared = config.get("chat_template") or _read_object(root / "chat_template.json").get("chat_template")
    if isinstance(declared, str):
        return {"default": declared}
    if isinstance(declared, list):
        return {str(entry["name"]): str(entry["template"]) for entry in declared}
    if isinstance(declared, dict):
        return {str(name): str(source) for name, source in declared.items()}
    return {}


def _generation_defaults(path: Path) -> GenerationDefaults:
    config = _read_object(path)

    def number(key: str, low: float, high: float) -> float | None:
        value = config.get(key)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high:
            return float(value)
        if value is not None:
            logger.warning("event=generation_default_ignored file=%s key=%s value=%r", path, key, value)
        return None

    eos = config.get("eos_token_id")
    eos_ids = eos if isinstance(eos, list) else [eos]
    top_k = number("top_k", 0, 2**31 - 1)
    top_p = number("top_p", 0.0, 1.0)
    penalty = number("repetition_penalty", 0.0, 100.0)
    return GenerationDefaults(
        temperature=number("temperature", 0.0, 100.0),
        top_p=top_p or None,
        top_k=None if top_k is None else int(top_k),
        min_p=number("min_p", 0.0, 1.0),
        repetition_penalty=penalty or None,
        eos_token_ids=tuple(i for i in eos_ids if isinstance(i, int) and not isinstance(i, bool)),
    )
