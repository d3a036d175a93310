"""Streamed text equals the text of all ids, for every kind of decoder."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from freetoken.serving.detokenizer import REPLACEMENT, TokenTexts

TEXTS = ["hello world héllo", "你好 😀 größe", "  spaces\tand\nlines"] * 4


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens(["<|end|>", "<|start|>"])
    tokenizer.add_tokens([AddedToken("é", normalized=False), AddedToken(" \n", normalized=False), AddedToken("<tool>")])
    return tokenizer


def sentence_piece(strip: bool = True) -> Tokenizer:
    """As Llama 2 and Mixtral have it: prefix space, byte fallback, no pre-tokenizer."""
    vocab = {piece: i for i, piece in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))])}
    for piece in ["▁", "h", "e", "l", "o", "w", "r", "d", "é", "s", "▁h", "he", "lo", "▁w", "▁▁", "你"]:
        vocab[piece] = len(vocab)
    merges = [("▁", "h"), ("h", "e"), ("l", "o"), ("▁", "w"), ("▁", "▁")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def gemma_like() -> Tokenizer:
    return sentence_piece(strip=False)


def metaspace(scheme: str = "always") -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(vocab_size=90, show_progress=False, special_tokens=["<unk>", "</s>"])
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def metaspace_never() -> Tokenizer:
    return metaspace("never")


def word_piece() -> Tokenizer:
    """A decoder without a class of its own here."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=90, show_progress=False, special_tokens=["[UNK]"])
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


KINDS = [byte_level, sentence_piece, gemma_like, metaspace, metaspace_never, word_piece]
BUILT = {kind.__name__: kind() for kind in KINDS}


def texts_of(tokenizer: Tokenizer) -> TokenTexts:
    special = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    return TokenTexts(tokenizer, json.loads(tokenizer.to_str())["decoder"], special)


def streamed(tokenizer: Tokenizer, ids: list[int], skip: bool) -> list[str]:
    detokenizer = texts_of(tokenizer).open(skip)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@pytest.mark.parametrize("kind", BUILT)
@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_random_ids(kind: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = BUILT[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 1), max_size=16))
    assert "".join(streamed(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", BUILT)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_special_tokens_can_be_kept_one_by_one(kind: str, data: st.DataObject) -> None:
    tokenizer = BUILT[kind]
    special = sorted(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    kept = frozenset(data.draw(st.sets(st.sampled_from(special))))
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1) | st.sampled_from(special), max_size=16))
    detokenizer = texts_of(tokenizer).open(True, kept)
    streamed = "".join([*(detokenizer.push(i) for i in ids), detokenizer.flush()])
    shown = [i for i in ids if i not in special or i in kept]
    assert streamed == tokenizer.decode(shown, skip_special_tokens=False)


@pytest.mark.parametrize("kind", BUILT)
@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=24))
def test_random_text(kind: str, text: str) -> None:
    tokenizer = BUILT[kind]
    ids = tokenizer.encode(text).ids
    assert "".join(streamed(tokenizer, ids, True)) == tokenizer.decode(ids)


@pytest.mark.parametrize("build", [byte_level, sentence_piece])
def test_no_broken_characters_on_the_way(build: Callable[[], Tokenizer]) -> None:
    tokenizer = build()
    text = "日本語 😀 größe 你好"
    pieces = streamed(tokenizer, tokenizer.encode(text).ids, True)
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_byte_level_shows_a_character_with_its_last_byte() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("日").ids
    assert len(ids) == 3
    assert streamed(tokenizer, ids, True) == ["", "", "日", ""]


def test_a_cut_character_is_a_replacement_only_at_the_end() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("日").ids[:2]
    assert streamed(tokenizer, ids, True) == ["", "", REPLACEMENT]


@pytest.mark.parametrize("kind", BUILT)
def test_token_bytes_and_text(kind: str) -> None:
    tokenizer = BUILT[kind]
    texts = texts_of(tokenizer)
    for token_id in range(tokenizer.get_vocab_size()):
        shown, data = texts.token_text(token_id), texts.token_bytes(token_id)
        if shown.startswith("bytes:"):
            assert bytes.fromhex(shown.removeprefix("bytes:").replace("\\x", "")) == data
        else:
            assert shown.encode() == data


def test_sentence_piece_bytes() -> None:
    texts = texts_of(sentence_piece())
    assert texts.token_bytes(3 + 0xE4) == b"\xe4"
    assert texts.token_text(3 + 0xE4) == "bytes:\\xe4"
    assert texts.token_text(sentence_piece().token_to_id("▁h")) == " h"
    assert texts.token_bytes(99999) == b""
