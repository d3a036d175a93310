"""Tokenizers from GGUF metadata, against tokenizers that were not built from it."""

import itertools
import json

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from freetoken.checkpoint.gguf_tokenizer import merges_from_scores, write_tokenizer
from freetoken.errors import CheckpointError, UnsupportedModelError

TEXTS = (
    "Hello world, it's 12345  67 tests!",
    "naïve café, Straße, ÀÉÎ, e\u0301 (combining), ﬁ",
    "日本語のテキスト 한국어 русский العربية",
    "😀👍🏽 \u200d zero\u200bwidth",
    "def f(x):\n\treturn x ** 2  # comment\r\n\n\n",
    "   leading and trailing   ",
    "",
    " ",
    "<|im_start|>user\nhi<|im_end|> <think>x</think>",
    "DON'T we'LL I'm THEY'VE",
)
CORPUS = [*TEXTS, "the quick brown fox jumps over the lazy dog " * 3, "1234567890 " * 4, "\n\n\t\t    " * 3] * 4
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def trained(pre_tokenizer, ignore_merges=False, nfc=False):
    """A byte-level BPE tokenizer as a model's ``tokenizer.json`` would have it."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


def metadata_of(tokenizer, pre, **more):
    """What a GGUF writer would record of it."""
    data = json.loads(tokenizer.to_str())
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    types = [3 if t in SPECIAL else 4 if t in ("<think>", "</think>") else 1 for t in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in data["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def split(pattern):
    from tokenizers import Regex

    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def digits():
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


CASES = {
    "gpt-2": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "smollm": lambda: trained(digits()),
    "llama-bpe": lambda: trained(split(LLAMA3), ignore_merges=True),
    "qwen2": lambda: trained(split(LLAMA3.replace("{1,3}", "")), nfc=True),
}


@pytest.mark.parametrize("pre", CASES)
def test_byte_level_tokenizers_give_the_same_ids(tmp_path, pre):
    original = CASES[pre]()
    write_tokenizer(metadata_of(original, pre), tmp_path, "m.gguf", 2048)
    rebuilt = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert rebuilt.get_vocab_size() == original.get_vocab_size()
    for text in TEXTS:
        expected = original.encode(text, add_special_tokens=False)
        actual = rebuilt.encode(text, add_special_tokens=False)
        assert actual.ids == expected.ids, text
        for skip in (True, False):
            decoded = rebuilt.decode(actual.ids, skip_special_tokens=skip)
            assert decoded == original.decode(expected.ids, skip_special_tokens=skip)


def test_beginning_and_end_tokens(tmp_path):
    original = CASES["gpt-2"]()
    cases = [
        ("gpt-2", {}, [], []),
        ("gpt-2", {"add_bos_token": True}, [1], []),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, [1], [2]),
        ("llama-bpe", {}, [1], []),
        ("llama-bpe", {"add_bos_token": False}, [], []),
    ]
    for pre, flags, head, tail in cases:
        write_tokenizer(metadata_of(original, pre, **flags), tmp_path, "m.gguf", 2048)
        rebuilt = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        plain = rebuilt.encode("Hello", add_special_tokens=False).ids
        assert rebuilt.encode("Hello").ids == [*head, *plain, *tail]
        settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
        assert (settings["add_bos_token"], settings["add_eos_token"]) == (bool(head), bool(tail))
        assert settings["bos_token"] == "<|im_start|>" and settings["pad_token"] == "<|endoftext|>"
        assert settings["model_max_length"] == 2048 and "unk_token" not in settings


def test_chat_template(tmp_path):
    metadata = metadata_of(CASES["gpt-2"](), "gpt-2")
    write_tokenizer(metadata, tmp_path, "m.gguf", 2048)
    assert not (tmp_path / "chat_template.jinja").exists()
    write_tokenizer({**metadata, "tokenizer.chat_template": "{{ ü }}"}, tmp_path, "m.gguf", 2048)
    assert (tmp_path / "chat_template.jinja").read_text(encoding="utf-8") == "{{ ü }}"


def test_a_gguf_without_vocabulary(tmp_path):
    write_tokenizer({}, tmp_path, "m.gguf", 2048)
    write_tokenizer({"tokenizer.ggml.model": "none"}, tmp_path, "m.gguf", 2048)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "key,value,error,match",
    [
        ("model", "bert", UnsupportedModelError, r"m\.gguf: tokenizer kind 'bert'"),
        ("pre", "superbpe", UnsupportedModelError, "pre-tokenizer 'superbpe'"),
        ("tokens", None, CheckpointError, "tokens is missing"),
        ("tokens", [1, 2], CheckpointError, "no list of strings"),
        ("tokens", ["a", "\udcff"], CheckpointError, "invalid UTF-8"),
        ("tokens", ["a", "a"], CheckpointError, "'a' more than once"),
        ("token_type", [1, 2], CheckpointError, "token_type has 2 entries for"),
        ("merges", ["a qqq"], CheckpointError, "merges has 'a qqq'"),
        ("merges", [5], CheckpointError, "merges has 5"),
        ("bos_token_id", 9999, CheckpointError, "bos_token_id 9999 is not below"),
    ],
)
def test_contradictions_are_named(tmp_path, key, value, error, match):
    metadata = {**metadata_of(CASES["gpt-2"](), "gpt-2"), f"tokenizer.ggml.{key}": value}
    with pytest.raises(error, match=match):
        write_tokenizer(metadata, tmp_path, "m.gguf", 2048)


# ------------------------------------------------------------------------------------------ SentencePiece


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
LETTERS = list("abcdefghijklmnopqrstuvwxyz.,!'\u2581")
WORDS = (
    "he el ll lo hell ello hello \u2581h \u2581he \u2581hello \u2581wo or rl ld worl world \u2581world \u2581the th er "
)
WORDS += "\u2581\u2581 \u2581\u2581\u2581 es est \u2581t test \u2581test ing in ng ab abc bc"
MERGED = WORDS.split()


def sentencepiece_metadata():
    tokens = [*PIECES, *MERGED, *LETTERS, "<|tool|>"]
    scores = [0.0] * len(PIECES) + [-float(i) for i in range(len(MERGED))] + [-100.0 - i for i in range(len(LETTERS))]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(MERGED) + len(LETTERS)), 4]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [*scores, 0.0],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def best_pair_first(text, metadata):
    """SentencePiece BPE by its definition: join the adjacent pair whose union scores best, leftmost first."""
    ids = {t: i for i, t in enumerate(metadata["tokenizer.ggml.tokens"])}
    scores, types = metadata["tokenizer.ggml.scores"], metadata["tokenizer.ggml.token_type"]
    pieces = list(text.replace(" ", "\u2581"))
    while True:
        candidates = [
            (-scores[ids[a + b]], i)
            for i, (a, b) in enumerate(itertools.pairwise(pieces))
            if a + b in ids and types[ids[a + b]] == 1
        ]
        if not candidates:
            break
        _, i = min(candidates)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    result = []
    for piece in pieces:
        if piece in ids:
            result.append(ids[piece])
        else:
            result.extend(ids[f"<0x{byte:02X}>"] for byte in piece.encode())
    return result


def test_sentencepiece_joins_the_best_pair_first(tmp_path):
    metadata = sentencepiece_metadata()
    write_tokenizer(metadata, tmp_path, "m.gguf", 2048)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("hello world", "hello", "the testing, abc!", "a  b   c", "grüße 日本 \n\t", "helloworld", "x y z"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == best_pair_first(" " + text, metadata), text
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode(text).ids == [1, *ids]
    tool = metadata["tokenizer.ggml.tokens"].index("<|tool|>")
    ids = tokenizer.encode("hello<|tool|>world", add_special_tokens=False).ids
    assert ids == [*best_pair_first(" hello", metadata), tool, *best_pair_first("world", metadata)]


def test_sentencepiece_without_prefix_space(tmp_path):
    metadata = {**sentencepiece_metadata(), "tokenizer.ggml.add_space_prefix": False}
    write_tokenizer(metadata, tmp_path, "m.gguf", 2048)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("hello world", " hello", "abc"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == best_pair_first(text, metadata), text
        assert tokenizer.decode(ids) == text


def test_merges_follow_the_scores():
    ids = {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4, "abc": 5, "<x>": 6}
    merges = merges_from_scores(ids, [0, 0, 0, -2.0, -1.0, -3.0, 0], [1, 1, 1, 1, 1, 1, 3])
    assert merges == [("b", "c"), ("a", "b"), ("a", "bc"), ("ab", "c")]
