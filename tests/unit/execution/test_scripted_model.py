"""The scripted model: what it says, and that it notices foreign KV."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from freetoken import _native
from freetoken.execution.arena import Arena
from freetoken.execution.cpu_ops import CpuOps
from freetoken.execution.experts import NoExperts
from freetoken.execution.kv_geometry import KVGeometry
from freetoken.execution.step_executor import StepLimits
from freetoken.messages import RequestInit, SamplingParams, StepFailed, StepPlan, StepResult, StepRow
from freetoken.testing.scripted_model import Line, Script, ScriptedStepExecutor

RESULT = "<tool_response>"


def test_the_last_words_and_the_results_after_them_decide(tmp_path: Path) -> None:
    call = (("ls", {"path": "/"}),)
    script = Script(
        (Line("one", 0, "1", calls=call), Line("one", 2, "1b"), Line("one more", 0, "more"), Line("two", 1, "2"))
    )
    script.write(tmp_path)
    script = Script.read(tmp_path)
    assert script.lines[0].calls == call
    for prompt, said in (
        ("one", "1"),
        (f"one {RESULT}", "1"),
        (f"one {RESULT}{RESULT}", "1b"),
        (f"one {RESULT}{RESULT}{RESULT}", "1b"),
        (f"{RESULT} one", "1"),
        ("two one more", "more"),
        ("one two", "Done."),
        (f"one two {RESULT}", "2"),
        ("three", "Done."),
    ):
        assert script.choose(prompt).text == said, prompt


def executor_over(dtype: str) -> ScriptedStepExecutor:
    """Eight blocks of four tokens; it says 7, 8 and the end."""
    arena = Arena(KVGeometry(8, 2, 4, 1, 8, dtype), 0, 4096)
    pool = _native.WorkerPool(1, (0,), 0, "auto")
    decoder: Any = SimpleNamespace(spec=SimpleNamespace(vocab_size=70_000), layers=lambda *_: iter(()))
    ops = CpuOps(pool, arena, NoExperts(), False, threading.Event())
    executor = ScriptedStepExecutor(decoder, ops, NoExperts(), StepLimits(4, 8, 64, 64, 0))
    voice = SimpleNamespace(script=Script, way_out=[2], answer=lambda ids: [7, 8, 2])
    executor.use_script(cast(Any, voice), arena)
    return executor


def row(name: str, start: int, tokens: tuple[int, ...], blocks: tuple[int, ...]) -> StepRow:
    init = RequestInit(SamplingParams(temperature=1.0, seed=1), tokens, len(tokens))
    return StepRow(name, start, len(tokens) - start, True, new_block_ids=blocks, init=init)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_foreign_kv_fails_the_step(dtype: str) -> None:
    executor = executor_over(dtype)
    tokens = (10, 11, 12, 65_537, 14, 15)
    first = executor.execute(StepPlan(1, 1, (row("a", 0, tokens, (3, 1)),)))
    assert isinstance(first, StepResult) and first.rows[0].token_id == 7
    decoded = executor.execute(StepPlan(2, 1, (StepRow("a", 6, 1, True, use_last_sampled=True),)))
    assert isinstance(decoded, StepResult) and decoded.rows[0].token_id == 8
    shared = executor.execute(StepPlan(3, 1, (row("b", 4, (*tokens[:4], 20), (3, 5)),)))
    assert isinstance(shared, StepResult) and shared.rows[0].token_id == 7
    foreign = executor.execute(StepPlan(4, 1, (row("c", 4, (10, 11, 12, 13, 20), (3, 6)),)))
    assert isinstance(foreign, StepFailed)
    assert "c: the KV at 3 is that of token 65537, not 13" in foreign.message
