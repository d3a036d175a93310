"""Tokenizer files from GGUF metadata: ``tokenizer.json``, ``tokenizer_config.json``, ``chat_template.jinja``.

Two kinds of vocabulary: byte-level BPE (``gpt2``), where ``tokenizer.ggml.pre`` names how text is cut before merging,
and SentencePiece BPE (``llama``), whose merges follow from the scores of its pieces.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from freetoken.errors import CheckpointError, UnsupportedModelError

_CONTROL, _USER_DEFINED = 3, 4
_NO_VOCABULARY = (None, "none", "no_vocab")
_SPACE = "\u2581"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a byte-level vocabulary cuts text. ``pattern`` None is GPT-2's own; ``digits`` separates every digit first;
    ``whole_words`` takes a cut that is itself a token as it is, without merging; ``nfc`` normalises the text."""

    pattern: str | None = None
    digits: bool = False
    whole_words: bool = False
    nfc: bool = False
    add_bos: bool = False


_GPT2 = _Cut()
_DIGITS = _Cut(digits=True)
_LLAMA3_CUT = _Cut(_LLAMA3, whole_words=True, add_bos=True)
_CUTS = {
    "gpt-2": _GPT2, "gpt2": _GPT2, "olmo": _GPT2, "jais": _GPT2, "phi-2": _GPT2,
    "smollm": _DIGITS, "starcoder": _DIGITS, "refact": _DIGITS, "codeshell": _DIGITS,
    "llama-bpe": _LLAMA3_CUT, "llama3": _LLAMA3_CUT, "llama-v3": _LLAMA3_CUT,
    "smaug-bpe": _Cut(_LLAMA3), "dbrx": _Cut(_LLAMA3),
    "qwen2": _Cut(_QWEN2, nfc=True), "deepseek-r1-qwen": _Cut(_QWEN2, nfc=True),
    "tekken": _Cut(_TEKKEN, whole_words=True, add_bos=True),
}  # fmt: skip


def write_tokenizer(metadata: Mapping[str, Any], directory: Path, where: str, max_length: int) -> None:
    """Write the tokenizer's files to ``directory``; nothing when the GGUF has no vocabulary.

    Raises ``UnsupportedModelError`` for a kind of vocabulary or a way of cutting text that is not known, and
    ``CheckpointError`` when the metadata contradict themselves. ``where`` names the GGUF in messages.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind in _NO_VOCABULARY:
        return
    vocabulary = _Vocabulary(metadata, where)
    if kind == "gpt2":
        tokenizer, add_bos_default = _byte_level(metadata, vocabulary)
    elif kind == "llama":
        tokenizer, add_bos_default = _sentencepiece(metadata, vocabulary), True
    else:
        raise UnsupportedModelError(f"{where}: tokenizer kind {kind!r} is not supported; supported: gpt2, llama")
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos_default)) and vocabulary.special("bos")
    add_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False)) and vocabulary.special("eos")
    _add_tokens(tokenizer, vocabulary)
    _add_frame(tokenizer, vocabulary, bool(add_bos), bool(add_eos), kind)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(add_bos),
        "add_eos_token": bool(add_eos),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token := vocabulary.special(key)) is not None:
            settings[f"{name}_token"] = token
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


class _Vocabulary:
    """Tokens and their kinds, checked."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self.where = where
        self._metadata = metadata
        tokens = metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
            raise CheckpointError(f"{where}: tokenizer.ggml.tokens is missing, empty or no list of strings")
        try:
            "".join(tokens).encode()
        except UnicodeEncodeError as error:
            raise CheckpointError(f"{where}: tokenizer.ggml.tokens holds invalid UTF-8") from error
        self.tokens: list[str] = tokens
        self.ids = {token: i for i, token in enumerate(tokens)}
        if len(self.ids) != len(tokens):
            twice = next(t for i, t in enumerate(tokens) if self.ids[t] != i)
            raise CheckpointError(f"{where}: tokenizer.ggml.tokens has {twice!r} more than once")
        self.types: Sequence[int] = self.parallel("token_type", [1] * len(tokens))

    def parallel(self, key: str, default: list[Any] | None = None) -> list[Any]:
        """An array with one entry a token."""
        values = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(values, list) or len(values) != len(self.tokens):
            found = len(values) if isinstance(values, list) else "no"
            raise CheckpointError(
                f"{self.where}: tokenizer.ggml.{key} has {found} entries for {len(self.tokens)} tokens"
            )
        return values

    def special(self, key: str) -> str | None:
        """The text of the bos, eos, unknown or padding token."""
        token_id = self._metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is None:
            return None
        if not 0 <= token_id < len(self.tokens):
            raise CheckpointError(
                f"{self.where}: tokenizer.ggml.{key}_token_id {token_id} is not below {len(self.tokens)}"
            )
        return self.tokens[token_id]


def _byte_level(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if name not in _CUTS:
        raise UnsupportedModelError(
            f"{vocabulary.where}: pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; "
            f"supported: {sorted(_CUTS)}"
        )
    cut = _CUTS[name]
    merges = []
    for merge in metadata.get("tokenizer.ggml.merges", []):
        left, _, right = str(merge).partition(" ")
        if left not in vocabulary.ids or right not in vocabulary.ids or left + right not in vocabulary.ids:
            raise CheckpointError(f"{vocabulary.where}: tokenizer.ggml.merges has {merge!r}, which no token stands for")
        merges.append((left, right))
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=cut.whole_words, fuse_unk=False)
    )
    if cut.nfc:
        tokenizer.normalizer = normalizers.NFC()
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", False))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if cut.digits else []
    if cut.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(cut.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=cut.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, cut.add_bos


def _sentencepiece(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> Tokenizer:
    unknown = vocabulary.special("unknown")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=merges_from_scores(vocabulary.ids, vocabulary.parallel("scores"), vocabulary.types),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    scheme = "first" if prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=False)
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def merges_from_scores(ids: Mapping[str, int], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """SentencePiece joins the adjacent pair whose union has the best score, so every way to cut a piece in two known
    pieces is a merge, ranked by the score of the whole. Control and byte tokens take no part."""
    pieces = {token: i for token, i in ids.items() if types[i] in (1, _USER_DEFINED)}
    ranked = sorted((token for token in pieces if len(token) > 1), key=lambda t: (-scores[pieces[t]], pieces[t]))
    return [
        (token[:cut], token[cut:])
        for token in ranked
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    ]


def _add_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Control and user-defined tokens are found whole in a text before anything else happens to it."""
    kinds = list(zip(vocabulary.tokens, vocabulary.types, strict=True))
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t, k in kinds if k == _CONTROL])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t, k in kinds if k == _USER_DEFINED])


def _add_frame(tokenizer: Tokenizer, vocabulary: _Vocabulary, add_bos: bool, add_eos: bool, kind: str) -> None:
    """What surrounds a text that is encoded with special tokens."""
    bos, eos = vocabulary.special("bos"), vocabulary.special("eos")
    single, pair, used = ["$A"], ["$A:0", "$B:1"], []
    if add_bos and bos is not None:
        single, pair = [bos, *single], [f"{bos}:0", *pair]
        used.append((bos, vocabulary.ids[bos]))
    if add_eos and eos is not None:
        single, pair = [*single, eos], [*pair, f"{eos}:1"]
        used.append((eos, vocabulary.ids[eos]))
    if used:
        frame = processors.TemplateProcessing(single=single, pair=pair, special_tokens=sorted(set(used)))
        bytes_first = [processors.ByteLevel(trim_offsets=False)] if kind == "gpt2" else []
        tokenizer.post_processor = processors.Sequence([*bytes_first, frame]) if bytes_first else frame
    elif kind == "gpt2":
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
