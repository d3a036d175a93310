"""POST /v1/completions."""

from __future__ import annotations

import functools
import time
from typing import Any

import orjson
from aiohttp import web

from freetoken.serving.body import read_request
from freetoken.serving.choice import ChoiceDelta, TextOptions
from freetoken.serving.context import CONTEXT, FrontContext, session_of
from freetoken.serving.errors import ApiError, openai_error_body, unsupported
from freetoken.serving.generation import Generation, SequencePlan
from freetoken.serving.openai_format import completion_logprobs, usage_object
from freetoken.serving.openai_schema import CompletionRequest
from freetoken.serving.sampling import check_choices, for_choice, output_budget, resolve_sampling
from freetoken.serving.sse import KEEPALIVE_COMMENT, event, stream
from freetoken.serving.tokenizer import TextModel
from freetoken.serving.usage import Usage


async def completions(request: web.Request) -> web.StreamResponse:
    """Continue one or several prompts, as one JSON object or as a stream of chunks."""
    arrived_s = time.monotonic()
    context = request.app[CONTEXT]
    text = context.ready_text()
    fields, _ = await read_request(request, CompletionRequest, context.pool)
    context.check_model(fields.model)
    _check(fields)
    sequences = await _plan(context, text, fields)
    options = TextOptions(
        stop=tuple(fields.stop),
        include_stop=bool(fields.include_stop_str_in_output),
        skip_special_tokens=fields.skip_special_tokens is not False,
    )
    generation = context.generator.start(
        sequences, text, options, arrived_s, session_of(request, fields.prompt_cache_key)
    )
    echoes = [_echo(text, prompt) for prompt in fields.prompt] if fields.echo else [""] * len(fields.prompt)
    dialect = CompletionDialect(context, text, fields, generation, echoes)
    if fields.stream:
        return await stream(request, generation, dialect, context.spec.config.server.keepalive_s)
    async with generation:
        choices = await generation.collect()
        body = dialect.whole(choices, generation.usage())
    return web.Response(body=orjson.dumps(body), content_type="application/json")


def _check(fields: CompletionRequest) -> None:
    """What is well formed but not possible."""
    if fields.suffix:
        raise unsupported("suffix is not supported", "suffix")
    if fields.best_of is not None and fields.best_of > (fields.n or 1):
        raise unsupported(f"best_of is {fields.best_of}; more than n ({fields.n or 1}) is not supported", "best_of")
    if fields.echo and fields.logprobs is not None:
        raise unsupported("log probabilities of the prompt are not supported; use echo without logprobs", "logprobs")


async def _plan(context: FrontContext, text: TextModel, fields: CompletionRequest) -> list[SequencePlan]:
    """One sequence a choice, those of the first prompt first."""
    top_logprobs = -1 if fields.logprobs is None else fields.logprobs
    sampling = resolve_sampling(fields, text.defaults, context.spec, top_logprobs)
    count = fields.n or 1
    check_choices(count * len(fields.prompt), context.limits, "prompt")
    size = sum(len(prompt) for prompt in fields.prompt if isinstance(prompt, str))
    encode = functools.partial(_encode, text, fields.prompt)
    sequences: list[SequencePlan] = []
    for index, ids in enumerate(await context.run(size, encode)):
        prompt = context.checked_prompt(ids, "prompt")
        max_tokens = output_budget(context.limits, len(prompt), fields.max_tokens, "prompt")
        sequences += [
            SequencePlan(prompt, for_choice(sampling, max_tokens, fields.seed, choice), index)
            for choice in range(count)
        ]
    return sequences


def _encode(text: TextModel, prompts: list[str | list[int]]) -> list[list[int]]:
    return [
        text.tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
        for prompt in prompts
    ]


def _echo(text: TextModel, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else text.tokenizer.decode(prompt, skip_special_tokens=False)


class CompletionDialect:
    """Writes text completions, whole or as chunks. ``echoes``: what stands before the text of each prompt's choices."""

    def __init__(
        self,
        context: FrontContext,
        text: TextModel,
        fields: CompletionRequest,
        generation: Generation,
        echoes: list[str],
    ) -> None:
        self._texts = text.tokenizer.texts
        self._logprobs = fields.logprobs is not None
        per_prompt = fields.n or 1
        self._echoes = [echo for echo in echoes for _ in range(per_prompt)]
        self._include_usage = bool(fields.stream_options and fields.stream_options.include_usage)
        self._head = {
            "id": f"cmpl-{generation.request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": context.spec.served_model_name,
            "system_fingerprint": context.fingerprint,
        }

    def _choice(self, delta: ChoiceDelta, text: str) -> dict[str, Any]:
        logprobs = None
        if self._logprobs:
            logprobs = completion_logprobs(self._texts, delta.logprobs, len(self._echoes[delta.index]))
        finish = delta.finish.reason if delta.finish else None
        return {"index": delta.index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> bytes:
        chunk: dict[str, Any] = {**self._head, "choices": choices}
        if self._include_usage:
            chunk["usage"] = usage
        return event(chunk)

    def keepalive(self) -> bytes:
        return KEEPALIVE_COMMENT

    def begin(self) -> bytes:
        return b"".join(
            self._event([self._choice(ChoiceDelta(index), echo)], None)
            for index, echo in enumerate(self._echoes)
            if echo
        )

    def deltas(self, deltas: list[ChoiceDelta]) -> bytes:
        return b"".join(self._event([self._choice(delta, delta.text)], None) for delta in deltas)

    def end(self, usage: Usage) -> bytes:
        last = self._event([], usage_object(usage)) if self._include_usage else b""
        return last + b"data: [DONE]\n\n"

    def error(self, error: ApiError) -> bytes:
        return event(openai_error_body(error))

    def whole(self, choices: list[ChoiceDelta], usage: Usage) -> dict[str, Any]:
        """The response body without streaming."""
        return {
            **self._head,
            "choices": [self._choice(choice, self._echoes[choice.index] + choice.text) for choice in choices],
            "usage": usage_object(usage),
        }
