"""What the HTTP front needs around it, without an engine: a tiny text checkpoint, a spec, a scripted Scheduler."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from freetoken.config import EngineConfig
from freetoken.launch_spec import LaunchSpec, ResolvedPlan
from freetoken.messages import (
    AbortRequest,
    ActorName,
    FinishReason,
    LogprobEntry,
    RequestStats,
    SubmitRequest,
    TokenBatch,
    TokenDelta,
    Wiring,
)
from freetoken.models.spec import ModelSpec, RopeSpec
from freetoken.transport import Endpoint

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = ("the quick brown fox jumps over the lazy dog", "stop hello world", "größe 你好 😀 naïve", "0123456789 .,:;!?")


def write_text_checkpoint(
    directory: Path, chat_template: str | None = CHATML, generation_config: dict[str, Any] | None = None
) -> Path:
    """A byte-level BPE tokenizer with ChatML's special tokens, and no weights."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {"eos_token": "<|im_end|>", "bos_token": None, "pad_token": {"content": "<|endoftext|>"}}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if chat_template is not None:
        (directory / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    if generation_config is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation_config))
    return directory


def make_front_spec(checkpoint: Path, context_tokens: int = 512, **settings: Any) -> LaunchSpec:
    """A spec with just enough truth for the front. ``settings`` are sections of ``EngineConfig``."""
    settings.setdefault("server", {}).setdefault("port", 0)
    model = ModelSpec(
        family="llama",
        architecture="LlamaForCausalLM",
        vocab_size=400,
        hidden_size=32,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=32,
        intermediate_size=32,
        max_position_embeddings=context_tokens,
        rms_norm_eps=1e-5,
        rope=RopeSpec(10000.0),
        dtype="f32",
        eos_token_ids=(2,),
    )
    plan = ResolvedPlan(
        kv_block_size=16,
        num_kv_blocks=max(64, context_tokens // 16),
        kv_dtype="f32",
        max_context_tokens=context_tokens,
        num_slots=8,
        slot_stride_bytes=4096,
        dense_bytes=1 << 20,
        workspace_bytes=1 << 20,
        store_bytes=1 << 22,
        cpu_threads=1,
        device_threads=1,
        cpu_core_ids=(0,),
        device_core_ids=(0,),
        spin_us=0,
        max_batch_tokens=64,
    )
    config = EngineConfig(model=str(checkpoint), **settings)
    return LaunchSpec(config, model, plan, str(checkpoint), "0123456789abcdef0123", "tiny")


def stats_of(request: SubmitRequest, num_output_tokens: int, num_cached_tokens: int = 0) -> RequestStats:
    """Plausible figures: one second of decoding for everything after the first token."""
    return RequestStats(
        num_prompt_tokens=len(request.prompt_token_ids),
        num_cached_tokens=num_cached_tokens,
        num_output_tokens=num_output_tokens,
        queue_s=0.25,
        prefill_s=0.5,
        decode_s=1.0,
    )


class ScriptedScheduler:
    """Answers every ``SubmitRequest`` with the deltas that ``script`` makes for it, one batch each, and every
    ``AbortRequest`` of a running request with its last delta. Without a script it answers nothing by itself."""

    def __init__(
        self, endpoint: Endpoint, script: Callable[[SubmitRequest], Iterable[TokenDelta]] | None = None
    ) -> None:
        self.endpoint = endpoint
        self.script = script
        self.submitted: list[SubmitRequest] = []
        self.aborted: list[AbortRequest] = []
        self.answers_aborts = True
        self._running: dict[str, SubmitRequest] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._step = 0
        endpoint.on(SubmitRequest, self._on_submit)
        endpoint.on(AbortRequest, self._on_abort)

    def _on_submit(self, request: SubmitRequest, fds: tuple[int, ...]) -> None:
        self.submitted.append(request)
        self._running[request.request_id] = request
        if self.script is not None:
            task = asyncio.get_running_loop().create_task(self._play(request, self.script(request)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _play(self, request: SubmitRequest, deltas: Iterable[TokenDelta]) -> None:
        for delta in deltas:
            if request.request_id not in self._running:
                return
            self.send(delta)
            await asyncio.sleep(0)

    def _on_abort(self, message: AbortRequest, fds: tuple[int, ...]) -> None:
        self.aborted.append(message)
        request = self._running.pop(message.request_id, None)
        if request is not None and self.answers_aborts:
            stats = stats_of(request, 1)
            self.send(TokenDelta(message.request_id, finish_reason=FinishReason.ABORT, stats=stats))

    @property
    def num_running(self) -> int:
        """Requests that were submitted and have neither ended nor been aborted."""
        return len(self._running)

    def send(self, *deltas: TokenDelta) -> None:
        """One batch to the front."""
        for delta in deltas:
            if delta.finish_reason is not None:
                self._running.pop(delta.request_id, None)
        self._step += 1
        self.endpoint.send(ActorName.API_FRONT, TokenBatch(self._step, 1, deltas))

    async def close(self) -> None:
        """Stop answering."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.endpoint.close()


def scripted_reply(
    request: SubmitRequest, ids: Sequence[int], tokens_per_step: int = 1, num_cached_tokens: int = 0
) -> list[TokenDelta]:
    """Deltas of a request that generates ``ids``, then the end-of-sequence token 2, within ``max_tokens``."""
    sampling = request.sampling
    whole = [*ids, 2][: sampling.max_tokens]
    reason = FinishReason.STOP if len(whole) > len(ids) else FinishReason.LENGTH
    deltas = []
    for start in range(0, len(whole), tokens_per_step):
        part = tuple(whole[start : start + tokens_per_step])
        last = start + tokens_per_step >= len(whole)
        deltas.append(
            TokenDelta(
                request.request_id,
                token_ids=part,
                logprobs=tuple(_logprob(i, sampling.top_logprobs) for i in part) if sampling.top_logprobs >= 0 else (),
                num_cached_tokens=num_cached_tokens,
                finish_reason=reason if last else None,
                stats=stats_of(request, len(whole), num_cached_tokens) if last else None,
            )
        )
    return deltas


def _logprob(token_id: int, count: int) -> LogprobEntry:
    top = tuple(((token_id + i) % 380, -0.5 - i) for i in range(count))
    return LogprobEntry(token_id, -0.5, top)


async def wire_pair(front: Endpoint, scheduler: Endpoint, epoch: int = 1) -> Wiring:
    """Connect the Scheduler's endpoint; the front's service is wired with what this returns."""
    wiring = Wiring(epoch, {ActorName.API_FRONT: front.address, ActorName.SCHEDULER: scheduler.address})
    await scheduler.connect(wiring)
    return wiring
