"""From a conversation to the token ids of its prompt. Runs in the tokenizer's threads."""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from freetoken.serving.canonical import CanonicalPrompt, canonicalise, dump, parsed_arguments, template_variables
from freetoken.serving.conversation import Conversation, ReasoningPart, TextPart, ToolCallPart, Turn
from freetoken.serving.errors import ApiError, bad_value
from freetoken.serving.output_memory import TAIL_CHARACTERS, OutputMemory, OutputRecord, PromptEnd, answer_key, digest
from freetoken.serving.reply import ReplyMessage
from freetoken.serving.template import TemplateRefusedError
from freetoken.serving.template_traits import TemplateTraits, call_message, probe
from freetoken.serving.tokenizer import TextModel
from freetoken.serving.toolset import Toolset

PROMPT_TAIL_CHARACTERS = 512
CACHED_SEGMENT_CHARACTERS = 1024
CACHED_SEGMENTS_CHARACTERS = 16 * 1024**2


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """``tail`` is the end of the prompt's text, from which an output parser sees whether the model is already thinking.
    ``num_recognised`` counts the turns that went in as the ids this server generated.

    ``history`` and ``end`` are for ``PromptRenderer.remember``; ``end`` is None when the answer cannot be recognised.
    """

    token_ids: tuple[int, ...]
    tail: str
    toolset: Toolset
    num_characters: int
    num_recognised: int = 0
    history: bytes = b""
    end: PromptEnd | None = None


@dataclass(slots=True)
class _Plan:
    """Messages for one rendering, and which of them are recognised: mark, record, whether the mark is in a call."""

    messages: list[dict[str, Any]]
    marks: list[tuple[str, OutputRecord, bool]] = field(default_factory=list)
    history: bytes = b""


class _MismatchError(Exception):
    """The text before recognised turn ``index`` is not what was there when it was generated."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


class PromptRenderer:
    """Renders conversations of one model. ``render`` and ``remember`` may run in any thread.

    ``end_token_ids`` and ``end_tokens`` are what ends a turn. ``ordered_tools``: see ``canonicalise``. With
    ``keep_reasoning`` every recognised turn keeps its reasoning, as it was generated; without it those before the last
    message of a user are left to the template, most of which drop it.
    """

    def __init__(
        self,
        text: TextModel,
        memory: OutputMemory,
        end_token_ids: Iterable[int] = (),
        end_tokens: Iterable[str] = (),
        ordered_tools: bool = False,
        keep_reasoning: bool = True,
    ) -> None:
        self._text = text
        ids = {*end_token_ids, *text.defaults.eos_token_ids}
        self._end_tokens = sorted({*filter(None, map(text.tokenizer.texts.piece, ids)), *end_tokens})
        self._memory = memory
        self._ordered_tools = ordered_tools
        self._keep_reasoning = keep_reasoning
        self._mark = f"zq{secrets.token_hex(6)}"
        self._segments = _SegmentCache()
        self._joinable = _joinable(text)
        self.traits = TemplateTraits() if text.template is None else probe(text.template)

    # -------------------------------------------------------------------------------------------- rendering

    def render(self, conversation: Conversation) -> RenderedPrompt:
        """The prompt. Raises ``ApiError`` (400) without a chat template, or when it refuses the conversation."""
        if self._text.template is None:
            raise bad_value(
                "this model has no chat template; use /v1/completions with a prompt", "messages", "no_chat_template"
            )
        prompt = canonicalise(self._with_reasoning(conversation), self.traits, self._ordered_tools)
        variables = {
            **template_variables(conversation.reasoning, self._text.template.variables),
            **conversation.template_variables,
        }
        allowed = len(prompt.messages) if self._recognises(conversation) else 0
        while True:
            plan = self._plan(prompt, allowed)
            rendered = self._render_text(plan, prompt, conversation, variables)
            try:
                return self._assemble(rendered, plan, prompt.toolset, conversation)
            except _MismatchError as error:
                allowed = error.index

    def _recognises(self, conversation: Conversation) -> bool:
        return self._joinable and conversation.add_generation_prompt and not conversation.continue_final

    def _plan(self, prompt: CanonicalPrompt, allowed: int) -> _Plan:
        """Recognise turns among the first ``allowed`` messages; the digest of the history grows message by message."""
        history = digest(dump(prompt.tools).encode("utf-8", "surrogatepass"))
        plan = _Plan([])
        last_user = max((i for i, m in enumerate(prompt.messages) if m["role"] == "user"), default=-1)
        for i, (message, turn) in enumerate(zip(prompt.messages, prompt.sources, strict=True)):
            record = None
            if turn is not None and i < allowed and (self._keep_reasoning or i > last_user):
                record = self._memory.find(history, _answer_of(turn, prompt.toolset))
            if record is None:
                plan.messages.append(message)
                history = digest(history, dump(message).encode("utf-8", "surrogatepass"))
            else:
                mark = f"{self._mark}n{i}x"
                marked = self._marked(message, mark)
                plan.marks.append((mark, record, "tool_calls" in marked))
                plan.messages.append(marked)
                history = digest(history, record.identity)
        plan.history = history
        return plan

    def _marked(self, message: Mapping[str, Any], mark: str) -> dict[str, Any]:
        """The message with a mark in place of what was said. Where results need a call before them, one call stays,
        with the mark as its argument."""
        calls = message.get("tool_calls")
        if not calls or self.traits.results_alone or not self.traits.call_closing:
            return {"role": "assistant", "content": mark}
        arguments: Any = {"zqkey": mark}
        if self.traits.arguments_as_text:
            arguments = dump(arguments)
        return call_message("", arguments, calls[-1]["function"]["name"], calls[-1]["id"])

    def _render_text(
        self, plan: _Plan, prompt: CanonicalPrompt, conversation: Conversation, variables: Mapping[str, Any]
    ) -> str:
        template = self._text.template
        assert template is not None
        try:
            if conversation.continue_final and plan.messages and plan.messages[-1]["role"] == "assistant":
                return self._open_ended(plan.messages, prompt, variables)
            return template.render(plan.messages, prompt.tools or None, conversation.add_generation_prompt, variables)
        except TemplateRefusedError as error:
            raise bad_value(str(error), "messages", "template_refused") from None

    def _open_ended(self, messages: list[dict[str, Any]], prompt: CanonicalPrompt, variables: Mapping[str, Any]) -> str:
        """The prompt up to the last word of the last message, for the model to go on."""
        template, last = self._text.template, messages[-1]
        assert template is not None
        mark = f"{self._mark}end"
        text = template.render(
            [*messages[:-1], {**last, "content": last["content"] + mark}], prompt.tools or None, False, variables
        )
        before, found, _ = text.rpartition(mark)
        if not found:
            raise ApiError(400, "the chat template cannot leave the last message open", "template_refused", "messages")
        return before

    # ------------------------------------------------------------------------------------------- assembling

    def _assemble(self, rendered: str, plan: _Plan, toolset: Toolset, conversation: Conversation) -> RenderedPrompt:
        ids: list[int] = []
        head = hashlib.blake2b(digest_size=16)
        num_characters, rest = 0, rendered
        for mark, record, in_call in plan.marks:
            index = int(mark.rpartition("n")[2][:-1])
            before, found, after = rest.partition(mark)
            text = record.prompt_end.match(head.digest(), before) if found else None
            if text is None:
                raise _MismatchError(index)
            if in_call:
                after = self._after_call(after, index)
            ids += self._encode(text)
            ids += record.token_ids
            head.update((text + record.text).encode("utf-8", "surrogatepass"))
            num_characters += len(text) + len(record.text)
            rest = after
        if plan.marks and self._mark in rest:
            raise _MismatchError(0)
        end = PromptEnd.of(head.digest(), rest) if self._recognises(conversation) else None
        return RenderedPrompt(
            tuple(ids + self._encode(rest)),
            rest[-PROMPT_TAIL_CHARACTERS:],
            toolset,
            num_characters + len(rest),
            len(plan.marks),
            plan.history,
            end,
        )

    def _after_call(self, after: str, index: int) -> str:
        """What follows a call's markup: from the token on that ended the turn, if the template writes one."""
        closing = self.traits.call_closing
        if not after.startswith(closing):
            raise _MismatchError(index)
        ends = [closing.find(token) for token in self._end_tokens if token in closing]
        return after[min(ends, default=len(closing)) :]

    def _encode(self, text: str) -> list[int]:
        """Long segments repeat from turn to turn: the system prompt with the tools, and what was said since."""
        if len(text) < CACHED_SEGMENT_CHARACTERS:
            return self._text.tokenizer.encode(text, add_special_tokens=False) if text else []
        found = self._segments.get(text)
        if found is None:
            found = self._text.tokenizer.encode(text, add_special_tokens=False)
            self._segments.put(text, found)
        return found

    # --------------------------------------------------------------------------------------------- remembering

    def remember(self, prompt: RenderedPrompt, message: ReplyMessage, token_ids: Sequence[int]) -> None:
        """Keep an answer to ``prompt``, to recognise it in the next one."""
        if prompt.end is None or not token_ids:
            return
        text = self._text.tokenizer.decode(token_ids, skip_special_tokens=False)
        if message.ended is not None and message.ended.reason == "length":
            said = message.text.rstrip()
            shown = self._text.tokenizer.decode(token_ids, skip_special_tokens=True)
            if not said or not shown.rstrip().endswith(said[-TAIL_CHARACTERS:]):
                return  # what was cut off is in the ids, and not in what the client has
        calls = [
            (prompt.toolset.flat_name(call.name, call.namespace), parsed_arguments(call.arguments, call.kind))
            for call in message.calls
        ]
        self._memory.remember(
            prompt.history,
            answer_key(message.text, calls),
            token_ids,
            text,
            message.reasoning,
            prompt.end,
            [call.call_id for call in message.calls],
        )

    def _with_reasoning(self, conversation: Conversation) -> Conversation:
        """Give back reasoning that a client dropped from a turn it otherwise left as it was."""
        if not len(self._memory) or not self._keep_reasoning:
            return conversation
        toolset = Toolset(conversation.tools)
        turns: list[Turn] = []
        for turn in conversation.turns:
            calls = [part.call_id for part in turn.parts if isinstance(part, ToolCallPart)]
            if calls and not any(isinstance(part, ReasoningPart) for part in turn.parts):
                reasoning = self._memory.reasoning_of(calls, _answer_of(turn, toolset))
                if reasoning:
                    turn = replace(turn, parts=(ReasoningPart(reasoning), *turn.parts))
            turns.append(turn)
        return replace(conversation, turns=tuple(turns))


def _answer_of(turn: Turn, toolset: Toolset) -> bytes:
    text = "".join(part.text for part in turn.parts if isinstance(part, TextPart))
    calls = [
        (toolset.flat_name(part.name, part.namespace), part.arguments)
        for part in turn.parts
        if isinstance(part, ToolCallPart)
    ]
    return answer_key(text, calls)


def _joinable(text: TextModel) -> bool:
    """Whether ids of two texts, joined, are ids of the joined text: not for tokenisers that put a space in front."""
    tokenizer = text.tokenizer
    ids = tokenizer.encode("a b", add_special_tokens=False)
    return b"".join(map(tokenizer.texts.token_bytes, ids)) == b"a b"


class _SegmentCache:
    """Ids of long texts, the least recently used making way. Thread-safe."""

    def __init__(self) -> None:
        self._entries: OrderedDict[bytes, tuple[list[int], int]] = OrderedDict()
        self._num_characters = 0
        self._lock = threading.Lock()

    def get(self, text: str) -> list[int] | None:
        key = digest(text.encode("utf-8", "surrogatepass"))
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, text: str, ids: list[int]) -> None:
        key = digest(text.encode("utf-8", "surrogatepass"))
        with self._lock:
            if key in self._entries:
                return
            self._entries[key] = (ids, len(text))
            self._num_characters += len(text)
            while self._num_characters > CACHED_SEGMENTS_CHARACTERS and len(self._entries) > 1:
                _, (_, length) = self._entries.popitem(last=False)
                self._num_characters -= length
