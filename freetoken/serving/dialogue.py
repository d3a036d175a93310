"""From a conversation to a reply: what all dialects that speak in messages do alike."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from freetoken.launch_spec import LaunchSpec
from freetoken.messages import SamplingParams
from freetoken.serving.choice import TextOptions
from freetoken.serving.conversation import Conversation
from freetoken.serving.generation import SequencePlan
from freetoken.serving.output_memory import OutputMemory
from freetoken.serving.parsers.format import OutputFormat
from freetoken.serving.parsers.select import format_for, format_named
from freetoken.serving.prompt import PromptRenderer, RenderedPrompt
from freetoken.serving.reply import Reply, ReplyMessage, ReplyOptions
from freetoken.serving.sampling import for_choice, output_budget
from freetoken.serving.tokenizer import TextModel

if TYPE_CHECKING:
    from freetoken.serving.context import FrontContext

logger = logging.getLogger(__name__)

FALLBACK_FORMAT = "qwen-json"
"""How a model writes calls whose template knows no tools: as ``canonical`` asks it to."""

INLINE_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Dialogue:
    """How one model's prompts are written and its output is read. ``kept_ids`` are tokens that the parser must see,
    ``stop_ids`` those that end the model's turn, whether or not the checkpoint's configuration says so."""

    renderer: PromptRenderer
    output: OutputFormat
    kept_ids: frozenset[int]
    stop_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, spec: LaunchSpec, text: TextModel) -> Dialogue:
        """Blocks for some milliseconds."""
        server, tokenizer = spec.config.server, text.tokenizer
        source = None if text.template is None else text.template.source
        output = format_for(spec.model.family, source, lambda token: tokenizer.token_id(token) is not None)
        stops = [tokenizer.token_id(token) for token in output.stop_tokens]
        if not output.calls and output.channels is None:
            output = format_named(FALLBACK_FORMAT)
        renderer = PromptRenderer(
            text,
            OutputMemory(server.output_memory_tokens),
            spec.model.eos_token_ids,
            output.stop_tokens,
            server.canonical_tools,
            server.keep_reasoning,
        )
        kept = {tokenizer.token_id(token) for token in output.special_tokens}
        logger.info(
            "event=dialogue_ready format=%s template_tools=%s reasoning_field=%s",
            output.name,
            renderer.traits.tools and renderer.traits.shows_calls,
            renderer.traits.reasoning_field,
        )
        return cls(
            renderer, output, frozenset(i for i in kept if i is not None), tuple(i for i in stops if i is not None)
        )

    def ending(self, text: TextModel) -> TextModel:
        """``text`` with generation defaults that also end a sequence at ``stop_ids``."""
        ids = dict.fromkeys((*text.defaults.eos_token_ids, *self.stop_ids))
        return replace(text, defaults=replace(text.defaults, eos_token_ids=tuple(ids)))


@dataclass(frozen=True, slots=True)
class ReplyPlan:
    """What a dialect has read from a request. ``sampling`` is without seed and ``max_tokens``; ``param`` is the field
    that holds the conversation, ``format_param`` the schema or grammar of the answer, ``tool_param`` the choice of
    tools, for errors; ``size`` bounds the characters of the conversation."""

    conversation: Conversation
    sampling: SamplingParams
    options: TextOptions
    max_tokens: int | None
    seed: int | None
    count: int
    param: str
    size: int
    call_id_prefix: str = "call_"
    format_param: str = "response_format"
    tool_param: str = "tool_choice"


async def render(context: FrontContext, conversation: Conversation, size: int) -> RenderedPrompt:
    """The prompt of a conversation, made in a thread when it is long. Raises ``ApiError``."""
    renderer = context.ready_dialogue().renderer
    default = context.spec.config.server.reasoning
    if conversation.reasoning.mode == "default" and default != "default" and not conversation.reasoning.effort:
        conversation = replace(conversation, reasoning=replace(conversation.reasoning, mode=default))
    return await context.run(size, functools.partial(renderer.render, conversation))


async def start_reply(context: FrontContext, plan: ReplyPlan, arrived_s: float) -> tuple[Reply, SamplingParams]:
    """The reply, to be entered with ``async with``, and the sampling of its first choice. Raises ``ApiError``."""
    text, dialogue = context.ready_text(), context.ready_dialogue()
    conversation = plan.conversation
    prompt = await render(context, conversation, plan.size)
    ids = context.checked_prompt(prompt.token_ids, plan.param)
    max_tokens = output_budget(context.limits, len(ids), plan.max_tokens, plan.param)
    constraint = await context.constraints.for_request(
        dialogue.output,
        prompt.tail,
        response_format=conversation.response_format,
        tools=prompt.toolset.callable,
        choice=conversation.tool_choice,
        parallel=conversation.parallel_tool_calls,
        format_param=plan.format_param,
        tool_param=plan.tool_param,
    )
    sampling = replace(plan.sampling, constraint=constraint)
    sequences = [SequencePlan(ids, for_choice(sampling, max_tokens, plan.seed, index)) for index in range(plan.count)]
    options = replace(plan.options, keep_special_ids=dialogue.kept_ids)
    generation = context.generator.start(
        sequences, text, options, arrived_s, conversation.session, bool(conversation.tools)
    )
    tools = () if conversation.tool_choice.mode == "none" else prompt.toolset.flat
    reply = Reply(
        generation,
        [dialogue.output.open(tools, prompt.tail) for _ in sequences],
        prompt.toolset,
        ReplyOptions(plan.call_id_prefix, conversation.parallel_tool_calls),
        functools.partial(_remember, context, dialogue.renderer, prompt),
    )
    return reply, sequences[0].sampling


def _remember(
    context: FrontContext, renderer: PromptRenderer, prompt: RenderedPrompt, message: ReplyMessage, ids: Sequence[int]
) -> None:
    """Long answers in a thread, as decoding takes a while; the next turn takes longer to come."""
    if len(ids) <= INLINE_TOKENS:
        renderer.remember(prompt, message, ids)
        return
    future: Any = context.pool.submit(renderer.remember, prompt, message, ids)
    future.add_done_callback(_log_failure)


def _log_failure(future: Any) -> None:
    if not future.cancelled() and future.exception() is not None:
        logger.error("event=remember_failed error=%r", str(future.exception()))
