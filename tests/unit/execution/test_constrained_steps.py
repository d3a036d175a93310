"""Constrained requests through StepExecutor on a tiny random model: whatever it would like to say, it says what the
grammar allows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from freetoken.execution.constraints import Grammars
from freetoken.execution.experts import NoExperts
from freetoken.execution.kv_geometry import KVGeometry
from freetoken.execution.reference_ops import ReferenceOps
from freetoken.execution.step_executor import StepExecutor, StepLimits
from freetoken.messages import (
    Constraint,
    ConstraintKind,
    RequestInit,
    RowResult,
    SamplingParams,
    StepPlan,
    StepResult,
    StepRow,
)
from freetoken.models.decoder import Decoder
from freetoken.testing.tiny_checkpoints import load_tiny_checkpoint
from freetoken.testing.tiny_models import IM_END_ID, write_tiny_tokenizer

BLOCK, NUM_BLOCKS, CONTEXT = 16, 64, 240
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["city", "days", "tags"],
    "additionalProperties": False,
}
SCHEMA_CONSTRAINT = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA))


@pytest.fixture(scope="module")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def grammars(tokenizer_directory: Path) -> Any:
    found = Grammars(tokenizer_directory, load_tiny_checkpoint("qwen3_moe").spec.vocab_size, (IM_END_ID,))
    yield found
    found.close()


class Setup:
    """An executor, and requests that go on until their grammar lets them end."""

    def __init__(self, grammars: Grammars | None) -> None:
        tiny = load_tiny_checkpoint("qwen3_moe")
        spec = tiny.spec
        ops = ReferenceOps(
            KVGeometry(NUM_BLOCKS, spec.num_layers, BLOCK, spec.num_kv_heads, spec.head_dim, "f32"), tiny.experts
        )
        limits = StepLimits(BLOCK, NUM_BLOCKS, CONTEXT, 256, 2)
        decoder = Decoder(spec, tiny.dense, CONTEXT, ops.prepare)
        self.executor = StepExecutor(decoder, ops, NoExperts(), limits, grammars=grammars)
        self.step = 0
        self.tokens: dict[str, list[int]] = {}
        self.num_prompt: dict[str, int] = {}
        self.sampling: dict[str, SamplingParams] = {}
        self.ended: dict[str, RowResult] = {}

    def begin(self, name: str, sampling: SamplingParams, prompt: tuple[int, ...] = (5, 80, 131, 9)) -> None:
        self.tokens[name], self.num_prompt[name], self.sampling[name] = list(prompt), len(prompt), sampling

    def run(self, *names: str, again: bool = False, retired: tuple[str, ...] = ()) -> dict[str, RowResult]:
        """One step. ``again``: the requests come (back) with all their tokens."""
        rows = []
        for name in names:
            known = len(self.tokens[name])
            first = again or known == self.num_prompt[name]
            begin = 0 if first else known - 1
            new = range(-(-begin // BLOCK) if not first else 0, -(-known // BLOCK))
            at = list(self.tokens).index(name) * (CONTEXT // BLOCK)
            init = RequestInit(self.sampling[name], tuple(self.tokens[name]), self.num_prompt[name], (IM_END_ID,))
            rows.append(
                StepRow(name, begin, known - begin, True, False, tuple(at + i for i in new), init if first else None)
            )
        self.step += 1
        result = self.executor.execute(StepPlan(self.step, 1, tuple(rows), retired))
        assert isinstance(result, StepResult), result
        for row in result.rows:
            if row.token_id is not None:
                self.tokens[row.request_id].append(row.token_id)
            if row.failure is not None or row.token_id == IM_END_ID:
                self.ended[row.request_id] = row
        return {row.request_id: row for row in result.rows}

    def finish(self, *names: str, limit: int = 200) -> None:
        for _ in range(limit):
            going = [name for name in names if name not in self.ended]
            if not going:
                return
            self.run(*going)
        raise AssertionError(f"still going: {going}")

    def text(self, name: str, directory: Path) -> str:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        return str(tokenizer.decode(self.tokens[name][self.num_prompt[name] :]))


def constrained(seed: int, constraint: Constraint = SCHEMA_CONSTRAINT, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": seed, "max_tokens": 200, "constraint": constraint, **more})


def check_trip(text: str) -> None:
    trip = json.loads(text)
    assert list(trip) == ["city", "days", "tags"]
    assert trip["city"] in ("Paris", "Rome") and 1 <= trip["days"] <= 99
    assert len(trip["tags"]) <= 2 and all(len(tag) <= 4 for tag in trip["tags"])


def test_every_seed_gives_what_the_schema_asks_for(grammars: Grammars, tokenizer_directory: Path) -> None:
    setup = Setup(grammars)
    names = [f"r{seed}" for seed in range(4)]
    for seed, name in enumerate(names):
        setup.begin(name, constrained(seed))
    setup.finish(*names)
    texts = [setup.text(name, tokenizer_directory) for name in names]
    for text in texts:
        check_trip(text)
    assert len(set(texts)) > 1


@pytest.mark.parametrize("more", [{"top_k": 3}, {"top_p": 0.3, "min_p": 0.1}, {"temperature": 0.0}])
@pytest.mark.parametrize("penalty", [1.0, 1.2])
def test_all_ways_of_sampling_obey(
    grammars: Grammars, tokenizer_directory: Path, more: dict[str, Any], penalty: float
) -> None:
    from tokenizers import Tokenizer

    setup = Setup(grammars)
    # Nothing but the limits of a context keeps a greedy model from indenting every line as far as it may.
    tokenizer = Tokenizer.from_file(str(tokenizer_directory / "tokenizer.json"))
    blank = [i for i in range(tokenizer.get_vocab_size()) if tokenizer.decode([i]).isspace()]
    bias = ((IM_END_ID, 50.0), (200, 90.0), *((i, -100.0) for i in blank))
    setup.begin("r", constrained(3, repetition_penalty=penalty, logit_bias=bias, top_logprobs=2, **more))
    setup.finish("r")
    check_trip(setup.text("r", tokenizer_directory))


def test_a_preempted_request_goes_on_where_it_was(grammars: Grammars, tokenizer_directory: Path) -> None:
    whole, parts = Setup(grammars), Setup(grammars)
    for setup in (whole, parts):
        setup.begin("r", constrained(1))
    whole.finish("r")
    for number in range(60):
        if "r" in parts.ended:
            break
        parts.run("r", again=number % 5 == 0, retired=("r",) if number % 5 == 0 else ())
    parts.finish("r")
    assert parts.tokens["r"] == whole.tokens["r"]
    check_trip(parts.text("r", tokenizer_directory))


def test_neighbours_without_a_grammar_are_what_they_are_alone(grammars: Grammars) -> None:
    alone, mixed = Setup(grammars), Setup(grammars)
    free = SamplingParams(temperature=1.0, seed=9, max_tokens=40, ignore_eos=True)
    for setup in (alone, mixed):
        setup.begin("free", free)
        setup.begin("bound", constrained(2))
    for _ in range(20):
        alone.run("free")
        mixed.run(*(name for name in ("free", "bound") if name not in mixed.ended))
    assert alone.tokens["free"] == mixed.tokens["free"]


def test_the_end_and_nothing_else_follows_a_complete_text(grammars: Grammars) -> None:
    setup = Setup(grammars)
    setup.begin("r", constrained(0, Constraint(ConstraintKind.REGEX, "ab"), min_tokens=6, ignore_eos=True))
    for _ in range(6):
        setup.run("r")
    assert setup.tokens["r"][-3:] == [IM_END_ID] * 3  # "ab" is one or two tokens, and min_tokens changes nothing
    setup.begin(
        "s", constrained(0, Constraint(ConstraintKind.REGEX, "ab"), stop_token_ids=(77,), logit_bias=((77, 80),))
    )
    setup.ended.clear()
    for _ in range(3):
        setup.run("s")
    assert setup.tokens["s"][-1] in (77, IM_END_ID)


def test_min_tokens_is_kept_where_the_grammar_can_go_on(grammars: Grammars) -> None:
    setup = Setup(grammars)
    setup.begin("r", constrained(0, Constraint(ConstraintKind.REGEX, "[a-z]{1,60}"), min_tokens=12,
                                 logit_bias=((IM_END_ID, 90.0),)))  # fmt: skip
    setup.finish("r")
    assert len(setup.tokens["r"]) - setup.num_prompt["r"] == 13


def test_a_grammar_at_fault_ends_its_request_only(grammars: Grammars, tokenizer_directory: Path) -> None:
    setup = Setup(grammars)
    setup.begin("bad", constrained(0, Constraint(ConstraintKind.LARK, "start: (")))
    setup.begin("good", constrained(0))
    rows = setup.run("bad", "good")
    assert rows["bad"].failure and rows["bad"].failure_kind == "constraint" and rows["good"].token_id is not None
    setup.finish("good")
    check_trip(setup.text("good", tokenizer_directory))


def test_without_a_tokenizer_constrained_requests_fail(tmp_path: Path) -> None:
    vocab = load_tiny_checkpoint("qwen3_moe").spec.vocab_size
    grammars = Grammars(tmp_path, vocab, (IM_END_ID,))
    for setup, words in ((Setup(grammars), "tokenizer.json"), (Setup(None), "no grammars")):
        setup.begin("r", constrained(0))
        setup.begin("free", replace(constrained(0), constraint=None))
        rows = setup.run("r", "free")
        assert words in (rows["r"].failure or "") and rows["r"].failure_kind == "constraint"
        assert rows["free"].token_id is not None
    grammars.close()
    late = Setup(grammars)
    late.begin("r", constrained(0))
    assert "stopping" in (late.run("r")["r"].failure or "")
