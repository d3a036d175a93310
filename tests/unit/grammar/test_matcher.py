"""Masks against brute force, and the parts of an output that are free."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from freetoken.grammar import ConstraintError, GrammarCompiler, GrammarError, Matcher, load_vocabulary
from freetoken.grammar.explain import explain_schema
from freetoken.grammar.matcher import num_words
from freetoken.messages import Constraint, ConstraintKind
from freetoken.testing.tiny_models import IM_END_ID, VOCAB_SIZE, write_tiny_tokenizer

NUMBERS = Constraint(ConstraintKind.REGEX, "[0-9]{2}")


def mask_of(matcher: Matcher, may_end: bool = True) -> set[int]:
    mask = np.zeros(num_words(VOCAB_SIZE), dtype=np.uint32)
    matcher.fill(mask, may_end=may_end)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def feed(compiler: GrammarCompiler, matcher: Matcher, text: str) -> Matcher:
    """Take the text token by token, each of which must be allowed."""
    for token in compiler.vocabulary.tokenizer.tokenize_str(text, parse_special=True):
        assert token in mask_of(matcher), (text, compiler.vocabulary.text_of(token))
        matcher.advance([token])
    return matcher


LANGUAGES = [
    (Constraint(ConstraintKind.REGEX, "(ab|ac|b){1,3}x?"), [
        "".join(parts) + end
        for n in (1, 2, 3)
        for parts in itertools.product(("ab", "ac", "b"), repeat=n)
        for end in ("", "x")
    ]),
    (Constraint(ConstraintKind.REGEX, "é{1,2}€|/tmp/[ab]"), ["é€", "éé€", "/tmp/a", "/tmp/b"]),
    (Constraint(ConstraintKind.JSON_SCHEMA, '{"enum": ["the", "then", 12, 123, true, null, "a\\"b"]}'),
     ['"the"', '"then"', "12", "123", "true", "null", '"a\\"b"']),
    (Constraint(ConstraintKind.LARK, 'start: "for" (" i" | " in")+ | "return"'),
     ["return", *("for" + "".join(p) for n in range(1, 8) for p in itertools.product((" i", " in"), repeat=n))]),
]  # fmt: skip


@pytest.mark.parametrize(("constraint", "texts"), LANGUAGES)
@pytest.mark.parametrize("seed", range(3))
def test_a_mask_allows_exactly_the_tokens_that_lead_somewhere(
    compiler: GrammarCompiler, constraint: Constraint, texts: list[str], seed: int
) -> None:
    words = [compiler.vocabulary.text_of(i) for i in range(VOCAB_SIZE)]
    special = {i for i in range(VOCAB_SIZE) if compiler.vocabulary.tokenizer.is_special_token(i)}
    language = [text.encode() for text in texts]
    choose = random.Random(seed)
    matcher, so_far = Matcher(compiler, constraint, (IM_END_ID,)), b""
    for _ in range(12):
        expected = {
            i
            for i, word in enumerate(words)
            if word and i not in special and any(text.startswith(so_far + word) for text in language)
        }
        if so_far in language:
            expected.add(IM_END_ID)
        found = mask_of(matcher)
        if found != expected:  # of the tokens that begin a text without alternative, only the usual one is offered
            (token,) = found & expected
            rest = {text[len(so_far) :] for text in language if text.startswith(so_far)}
            assert found == {token} and all(text.startswith(words[token]) for text in rest), so_far
            expected = found
        assert matcher.is_complete == (so_far in language)
        token = choose.choice(sorted(expected))
        matcher.advance([token])
        if token == IM_END_ID:
            return
        so_far += words[token]
        if len(so_far) > 20:
            return  # the last language has longer texts than are listed


def test_after_the_end_only_the_end_follows(compiler: GrammarCompiler) -> None:
    matcher = feed(compiler, Matcher(compiler, NUMBERS, (IM_END_ID, 77)), "12")
    assert mask_of(matcher) == {IM_END_ID, 77}
    matcher.advance([77, 5, IM_END_ID])
    assert mask_of(matcher) == {IM_END_ID, 77} and matcher.is_complete


def test_min_tokens_gives_way_to_the_grammar(compiler: GrammarCompiler) -> None:
    matcher = feed(compiler, Matcher(compiler, Constraint(ConstraintKind.REGEX, "a{1,3}"), (IM_END_ID,)), "a")
    assert IM_END_ID in mask_of(matcher) and IM_END_ID not in mask_of(matcher, may_end=False)
    feed(compiler, matcher, "aa")
    assert mask_of(matcher, may_end=False) == {IM_END_ID}


def test_reasoning_is_free_and_cannot_be_the_end(compiler: GrammarCompiler) -> None:
    matcher = Matcher(compiler, replace(NUMBERS, free_until="</think>"), (IM_END_ID,))
    assert mask_of(matcher) == set(range(VOCAB_SIZE)) - {IM_END_ID}
    feed(compiler, matcher, "let me see </thin 12 </")
    assert mask_of(matcher) == set(range(VOCAB_SIZE)) - {IM_END_ID}
    feed(compiler, matcher, "think>\n\n12")
    assert mask_of(matcher) == {IM_END_ID}


def test_reasoning_that_need_not_come(compiler: GrammarCompiler) -> None:
    constraint = replace(NUMBERS, free_until="</think>", free_opener="<think>")
    assert mask_of(feed(compiler, Matcher(compiler, constraint, (IM_END_ID,)), "12")) == {IM_END_ID}
    matcher = feed(compiler, Matcher(compiler, constraint, (IM_END_ID,)), "<think>so 99")
    assert mask_of(matcher) == set(range(VOCAB_SIZE)) - {IM_END_ID}
    assert mask_of(feed(compiler, matcher, "</think>12")) == {IM_END_ID}
    matcher = feed(compiler, Matcher(compiler, constraint, (IM_END_ID,)), "<")
    for token in mask_of(matcher):
        assert "<think>".startswith("<" + compiler.vocabulary.text_of(token).decode())
    with pytest.raises(ConstraintError, match="neither opens"):
        matcher.advance(compiler.vocabulary.tokenize(b"b"))


def test_an_opener_and_a_grammar_that_begin_alike(compiler: GrammarCompiler) -> None:
    constraint = Constraint(ConstraintKind.REGEX, "<answer>[0-9]", "</analysis>", "<analysis>")
    assert mask_of(feed(compiler, Matcher(compiler, constraint, (IM_END_ID,)), "<answer>7")) == {IM_END_ID}
    text = "<analysis>hm</analysis><answer>7"
    assert mask_of(feed(compiler, Matcher(compiler, constraint, (IM_END_ID,)), text)) == {IM_END_ID}


def test_a_lazy_grammar_applies_after_each_trigger_only(compiler: GrammarCompiler) -> None:
    grammar = 'start: %json {"type": "object"} "</call>"'
    constraint = Constraint(ConstraintKind.LARK, grammar, free_until="<call>", lazy=True)
    everything = set(range(VOCAB_SIZE))
    matcher = Matcher(compiler, constraint, (IM_END_ID,))
    assert mask_of(matcher) == everything
    feed(compiler, matcher, 'hello <call>{"a": 1')
    assert IM_END_ID not in mask_of(matcher)
    feed(compiler, matcher, "}</call>")
    assert mask_of(matcher) == everything
    feed(compiler, matcher, "and\n<call>{}</call>")
    matcher.advance([IM_END_ID])
    assert mask_of(matcher) == {IM_END_ID}


def test_special_tokens_of_a_grammar(compiler: GrammarCompiler) -> None:
    vocabulary = compiler.vocabulary
    name = vocabulary.text_of(IM_END_ID).decode()
    literal = vocabulary.literal(f'a"\n{name}é')
    assert literal == f'"a\\"\\n" <[{IM_END_ID}]> "é"' and vocabulary.literal("") == ""
    constraint = Constraint(ConstraintKind.LARK, f"start: {literal}")
    matcher = feed(compiler, Matcher(compiler, constraint, (77,)), f'a"\n{name}é')
    assert mask_of(matcher) == {77}


def test_wrong_tokens_and_models_without_an_end(compiler: GrammarCompiler) -> None:
    with pytest.raises(ConstraintError, match="does not fit"):
        Matcher(compiler, NUMBERS, (IM_END_ID,)).advance(compiler.vocabulary.tokenize(b"x"))
    with pytest.raises(ConstraintError, match="end-of-sequence"):
        Matcher(compiler, NUMBERS, (VOCAB_SIZE + 3,))


HOSTILE = [
    (Constraint(ConstraintKind.JSON_SCHEMA, '{"not": {}}'), "not"),
    (Constraint(ConstraintKind.JSON_SCHEMA, "{"), "not JSON"),
    (Constraint(ConstraintKind.JSON_SCHEMA, "[1]"), "object"),
    (Constraint(ConstraintKind.JSON_SCHEMA, "[" * 100_000), "not JSON"),
    (Constraint(ConstraintKind.JSON_SCHEMA, '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}'), "no text"),
    (Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "string", "pattern": "(?=a)b"}'), "look-around"),
    (Constraint(ConstraintKind.JSON_SCHEMA, json.dumps({"enum": [f"v{i}" for i in range(100_000)]})), "characters"),
    (Constraint(ConstraintKind.REGEX, "a" * 600_000), "524288"),
    (Constraint(ConstraintKind.REGEX, "(a"), "unclosed"),
    (Constraint(ConstraintKind.LARK, "start: nothing"), "unknown name"),
    (Constraint(ConstraintKind.LARK, ""), ""),
    (Constraint(ConstraintKind.LARK, "start: /x/ <|nope|>"), "unknown special token"),
]


@pytest.mark.parametrize(("constraint", "words"), HOSTILE)
def test_what_cannot_be_compiled_says_why(compiler: GrammarCompiler, constraint: Constraint, words: str) -> None:
    with pytest.raises(GrammarError) as caught:
        Matcher(compiler, constraint, (IM_END_ID,))
    assert words in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)+b", "((a{1,90}){1,90}){1,90}", "(.*a){20}", r"(\w{1,50}){1,50}"])
def test_costly_patterns_either_work_or_fail_as_one_request(compiler: GrammarCompiler, pattern: str) -> None:
    matcher = Matcher(compiler, Constraint(ConstraintKind.REGEX, pattern), (IM_END_ID,))
    (token,) = compiler.vocabulary.tokenize(b"a")
    try:
        for _ in range(60):
            assert mask_of(matcher)
            matcher.advance([token])
    except ConstraintError as error:
        assert "too complex" in str(error)


def test_a_grammar_is_compiled_once(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = GrammarCompiler(compiler.vocabulary)
    built = []
    build = fresh._build
    monkeypatch.setattr(fresh, "_build", lambda source: built.append(source) or build(source))
    first, second = (Matcher(fresh, NUMBERS, (IM_END_ID,)) for _ in range(2))
    feed(compiler, first, "12")
    assert len(built) == 1 and IM_END_ID not in mask_of(second)


def test_tokens_that_only_the_configuration_declares(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    size = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    new = len(size)
    config["added_tokens_decoder"] = {str(new): {"content": "<tool>", "special": True}, "3": {"content": "x"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    vocabulary = load_vocabulary(tmp_path, new + 50, (IM_END_ID,))
    assert vocabulary.literal("<tool>") == f"<[{new}]>" and vocabulary.text_of(new) == b"<tool>"
    assert vocabulary.text_of(new + 49) == b"" and vocabulary.text_of(new + 5000) == b""


def test_a_panic_of_the_library_is_an_error_that_names_the_place(compiler: GrammarCompiler) -> None:
    """It cuts a text for its own message in the middle of a character."""
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": "😀" * 300}}}
    with pytest.raises(GrammarError):
        compiler.compile(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema)))
    error = explain_schema(compiler, schema, "unknown")
    assert error.path == "/properties/n"
    assert error.reason.startswith("the grammar library cannot read it") and len(error.reason) < 300
