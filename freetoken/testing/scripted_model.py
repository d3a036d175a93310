"""A model that says what a script tells it to, inside a whole engine.

Only the arithmetic of GpuExecutor is replaced: instead of layers, a step writes its token ids into the KV of the arena
and reads the whole sequence back through the block table, as attention would. From that text the script decides what
the model says, and the logits of its next token are raised. Everything else is the engine's own: services, messages,
scheduling, KV blocks and their reuse, sampling, constraints, detokeniser, output parser and front. A block table that
leads to the tokens of somebody else, or a cached prefix that is none, fails the step.

The script lies beside the model as ``script.json`` and is read for every answer, so it may change while the engine
runs. ``SCRIPTED_SERVICES`` are the services of such an engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freetoken import _native
from freetoken.checkpoint.ftw import FtwIndex
from freetoken.checkpoint.held_store import HeldStore
from freetoken.engine.build import SERVICES, ServiceTable
from freetoken.execution.arena import Arena
from freetoken.execution.batch_state import RequestState
from freetoken.execution.model_runtime import ModelRuntime
from freetoken.execution.service import GpuExecutorService
from freetoken.execution.step_executor import StepExecutor, StepUnderWay
from freetoken.launch_spec import LaunchSpec
from freetoken.messages import ActorName, StepPlan, StepRow
from freetoken.models.decoder import DecoderBatch
from freetoken.serving.dialogue import Dialogue
from freetoken.serving.parsers import OutputFormat
from freetoken.serving.tokenizer import Tokenizer, load_text_model
from freetoken.testing.chat_templates import THINKING
from freetoken.testing.checkpoint_files import CONFIGS, tiny_arrays, write_safetensors
from freetoken.testing.front_fakes import write_text_checkpoint
from freetoken.testing.model_outputs import whole_output

SCRIPT_NAME = "script.json"
_WANTED, _WAY_OUT = 1e4, 10.0
F32 = NDArray[np.float32]
_TAIL_CHARACTERS = 2048


@dataclass(frozen=True)
class Line:
    """What the model says when ``after`` stands in its prompt, later than that of any other line, and ``results``
    results of tools follow it. ``calls`` are (tool, arguments)."""

    after: str
    results: int = 0
    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()


@dataclass(frozen=True)
class Script:
    """``result`` is how a template begins the result of a tool; ``otherwise`` is said where no line fits."""

    lines: tuple[Line, ...] = ()
    otherwise: str = "Done."
    result: str = "<tool_response>"
    step_s: float = field(default=0.0)
    """How long a step takes at least, for what happens during a long prefill."""

    def choose(self, prompt: str) -> Line:
        """The line to say. Of lines with the same ``after``, the one with the most results that are there."""
        found = max((prompt.rfind(line.after) for line in self.lines), default=-1)
        if found >= 0:
            fitting = [line for line in self.lines if prompt.startswith(line.after, found)]
            longest = max(len(line.after) for line in fitting)
            results = prompt.count(self.result, found)
            fitting = [line for line in fitting if len(line.after) == longest and line.results <= results]
            if fitting:
                return max(fitting, key=lambda line: line.results)
        return Line("", text=self.otherwise)

    def write(self, directory: Path) -> None:
        """Make it the script of the model in ``directory``, at once."""
        temporary = directory / f"{SCRIPT_NAME}.new"
        temporary.write_text(json.dumps(asdict(self)))
        temporary.replace(directory / SCRIPT_NAME)

    @classmethod
    def read(cls, directory: Path) -> Script:
        """The script of the model in ``directory``."""
        members: dict[str, Any] = json.loads((directory / SCRIPT_NAME).read_text())
        lines = tuple(
            Line(**{**line, "calls": tuple((name, arguments) for name, arguments in line["calls"])})
            for line in members.pop("lines")
        )
        return cls(lines, **members)


class ScriptedVoice:
    """Puts a script into token ids of one model, in its family's format."""

    def __init__(self, launch: LaunchSpec) -> None:
        self._directory = Path(launch.config.model)
        text = load_text_model(launch.checkpoint)
        self.tokenizer: Tokenizer = text.tokenizer
        self._format: OutputFormat = Dialogue.of(launch, text).output
        self._eos = launch.model.eos_token_ids[0]
        out = (self._id(piece) for piece in ('"', "}", "]", '"}', "{"))
        self.way_out = [self._eos, *(found for found in out if found is not None)]
        """Tokens that end something, the most final first: what is said where a constraint forbids what was wanted."""

    def _id(self, piece: str) -> int | None:
        return self.tokenizer.token_id(piece)

    def script(self) -> Script:
        """As it is now."""
        return Script.read(self._directory)

    def answer(self, prompt_ids: list[int]) -> list[int]:
        """The ids of the answer, with the token that ends the turn."""
        prompt = self.tokenizer.decode(prompt_ids, skip_special_tokens=False)
        line = self.script().choose(prompt)
        _, text = whole_output(self._format, line.reasoning, line.text, line.calls)
        begun = self._format.begun_turn(prompt[-_TAIL_CHARACTERS:])
        thought = next((marks for marks in self._format.reasoning if begun.rstrip() == marks.begin), None)
        if thought is not None and not text.startswith(begun):
            text = f"{begun}{thought.end}\n\n{text}"
        return [*self.tokenizer.encode(text.removeprefix(begun), add_special_tokens=False), self._end(line)]

    def _end(self, line: Line) -> int:
        syntax = self._format.call_syntax
        names = [syntax.ends_turn] if line.calls and syntax is not None and syntax.ends_turn else []
        ids = map(self._id, (*names, *self._format.stop_tokens))
        return next((found for found in ids if found is not None), self._eos)


class ScriptedStepExecutor(StepExecutor):
    """``StepExecutor`` without its decoder. ``use_script`` comes before the first plan."""

    def use_script(self, voice: ScriptedVoice, arena: Arena) -> None:
        """Where the words come from, and the memory in which the sequences lie."""
        self._voice = voice
        self._arena = arena
        self._answers: dict[str, tuple[int, list[int]]] = {}

    def _start(self, plan: StepPlan) -> StepUnderWay:
        step = super()._start(plan)
        for request_id in plan.retired:
            self._answers.pop(request_id, None)
        if step.running:
            step.layers = self._speak(step.running, self._build_batch(step.running))
        return step

    def _speak(self, running: list[tuple[StepRow, RequestState]], batch: DecoderBatch) -> Iterator[Any]:
        pause_s = self._voice.script().step_s
        if pause_s and self._abort.wait(pause_s):
            raise RuntimeError("aborted")
        self._write(batch)
        wanted: list[F32] = []
        for row, state in running:
            known = state.tokens[: row.start + row.num_tokens]
            found = self._read(state, len(known))
            if found != known:
                where = next(i for i, (a, b) in enumerate(zip(found, known, strict=True)) if a != b)
                raise AssertionError(
                    f"{state.request_id}: the KV at {where} is that of token {found[where]}, not {known[where]}"
                )
            if row.sample:
                wanted.append(self._logits(state))
        yield np.array(wanted, dtype=np.float32).reshape(len(wanted), self._decoder.spec.vocab_size)

    def _logits(self, state: RequestState) -> F32:
        logits = np.zeros(self._decoder.spec.vocab_size, dtype=np.float32)
        for rank, token_id in enumerate(self._voice.way_out):
            logits[token_id] = _WAY_OUT * (len(self._voice.way_out) - rank)
        num_prompt, answer = self._answers.get(state.request_id, (-1, []))
        if num_prompt != state.num_prompt:
            answer = self._voice.answer(state.tokens[: state.num_prompt])
            self._answers[state.request_id] = (state.num_prompt, answer)
        if state.num_output < len(answer):
            logits[answer[state.num_output]] = _WANTED
        return logits

    # An id as three digits to base 256, which every KV dtype holds exactly, in the keys of the first layer.
    def _write(self, batch: DecoderBatch) -> None:
        kv = self._arena.kv
        ids = np.asarray(batch.token_ids)
        keys = np.zeros((len(ids), kv.num_kv_heads, kv.head_dim), dtype=np.float32)
        for digit in range(3):
            keys[:, 0, digit] = ids >> 8 * digit & 0xFF
        self._ops.kv_store(0, keys, np.zeros_like(keys), batch.slot_mapping)

    def _read(self, state: RequestState, count: int) -> list[int]:
        kv = self._arena.kv
        kind = np.dtype(np.float32 if kv.dtype == "f32" else np.uint16)
        memory: NDArray[Any] = np.frombuffer(memoryview(self._arena.kv_segment), kind)
        records = memory[: memory.size // (kv.block_bytes // kind.itemsize) * (kv.block_bytes // kind.itemsize)]
        shape = (-1, kv.num_layers, 2, kv.block_size, kv.num_kv_heads, kv.head_dim)
        digits = records.reshape(shape)[state.blocks[: -(-count // kv.block_size)], 0, 0, :, 0, :3]
        if kv.dtype != "f32":
            digits = (digits.astype(np.uint32) << 16).view(np.float32)
        ids = digits.astype(np.int64) @ (1 << 8 * np.arange(3))
        found: list[int] = ids.reshape(-1)[:count].tolist()
        return found


class ScriptedModelRuntime(ModelRuntime):
    """Makes executors that follow the script."""

    executor_class = ScriptedStepExecutor

    def __init__(
        self, launch: LaunchSpec, index: FtwIndex, store: HeldStore, arena: Arena, pool: _native.WorkerPool
    ) -> None:
        super().__init__(launch, index, store, arena, pool)
        self._voice = ScriptedVoice(launch)

    def build_executor(self, mailbox: _native.Mailbox | None) -> StepExecutor:
        executor = super().build_executor(mailbox)
        assert isinstance(executor, ScriptedStepExecutor)
        executor.use_script(self._voice, self._arena)
        return executor


class ScriptedGpuExecutorService(GpuExecutorService):
    """GpuExecutor on the CPU device with such a runtime."""

    def _build_runtime(self, store: HeldStore) -> ModelRuntime:
        assert isinstance(self._arena, Arena) and self._pool is not None
        return ScriptedModelRuntime(self.spec, FtwIndex.load(self.spec.checkpoint), store, self._arena, self._pool)


SCRIPTED_SERVICES: ServiceTable = {
    **SERVICES,
    ActorName.GPU_EXECUTOR: f"{__name__}:{ScriptedGpuExecutorService.__name__}",
}


def write_scripted_model(
    directory: Path, script: Script, *, template: str = THINKING, context_tokens: int = 200_000, **config: Any
) -> Path:
    """A checkpoint to launch with ``SCRIPTED_SERVICES``: a Qwen3-MoE of a few kilobytes whose tokenizer knows bytes and
    few words more. ``config`` are further members of its ``config.json``. Returns the directory."""
    write_text_checkpoint(directory, template)
    members: Mapping[str, Any] = {
        **CONFIGS["qwen3_moe"],
        "vocab_size": 400,
        "num_hidden_layers": 1,
        "mlp_only_layers": [],
        "num_key_value_heads": 1,
        "max_position_embeddings": context_tokens,
        "eos_token_id": [2, 0],
        **config,
    }
    (directory / "config.json").write_text(json.dumps(members))
    tensors = {name: ("F32", array) for name, array in tiny_arrays(members).items()}
    write_safetensors(directory / "model.safetensors", tensors)
    script.write(directory)
    return directory
