"""From a validated request to the conversation it means and the response object it begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from freetoken.serving.conversation import Conversation, ReasoningRequest, ResponseFormat, Session
from freetoken.serving.errors import bad_value, unsupported
from freetoken.serving.openai_schema import shown
from freetoken.serving.responses.items import join_turns, read_items
from freetoken.serving.responses.schema import ReasoningOptions, ResponsesRequest, TextFormat
from freetoken.serving.responses.tools import ToolTable, read_choice
from freetoken.serving.responses.writer import WriterOptions
from freetoken.serving.template import RESERVED_NAMES

SEALED_REASONING = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"

_ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "additional_tools": "at",
}

Item = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """``shape`` is what the response repeats of the request. ``path`` names the request's part in messages."""

    conversation: Conversation
    shape: dict[str, Any]
    options: WriterOptions


def check(fields: ResponsesRequest) -> None:
    """Raises ``ApiError`` (400) for what is well formed but not possible."""
    if fields.background:
        raise unsupported("background is true: responses in the background are not supported; use stream", "background")
    if fields.conversation is not None:
        raise unsupported(
            "conversation is not supported; use previous_response_id, or send all items as input", "conversation"
        )
    if fields.prompt is not None:
        raise unsupported("prompt (a stored prompt template) is not supported; use instructions and input", "prompt")
    if (fields.n or 1) != 1:
        raise unsupported(f"n is {fields.n}; a response has one answer", "n")
    if fields.top_logprobs:
        raise unsupported(f"top_logprobs is {fields.top_logprobs}; responses have no log probabilities", "top_logprobs")
    if LOGPROBS in (fields.include or ()):
        raise unsupported(f"include has {LOGPROBS!r}; responses have no log probabilities", "include")
    if fields.input is None and fields.previous_response_id is None:
        raise bad_value("input is required", "input", "missing_required_parameter")
    for name in fields.chat_template_kwargs or {}:
        if name in RESERVED_NAMES:
            raise bad_value(
                f"chat_template_kwargs must not set {name!r}; it has a field of its own", "chat_template_kwargs"
            )


def resolve_references(items: Sequence[Any], find: Callable[[str], Item | None]) -> list[Any]:
    """``items`` with references to earlier output items replaced by these. Raises ``ApiError`` (400)."""
    out: list[Any] = []
    for i, item in enumerate(items):
        is_reference = isinstance(item, Mapping) and (
            item.get("type") == "item_reference" or (item.get("type") is None and set(item) - {"type"} == {"id"})
        )
        if not is_reference:
            out.append(item)
            continue
        path, identifier = f"input[{i}].id", item.get("id")
        found = find(identifier) if isinstance(identifier, str) else None
        if found is None:
            raise bad_value(
                f"{path} is {shown(identifier)}, which is no item of a stored response (any more); "
                "send the item itself",
                path,
                "item_not_found",
            )
        out.append(found)
    return out


def with_ids(items: Sequence[Any], suffix: str) -> list[Any]:
    """``items`` as they are kept: each with its ``type`` and an ``id``."""
    out: list[Any] = []
    for i, item in enumerate(items):
        if isinstance(item, Mapping):
            kind = item.get("type") or "message"
            prefix = _ID_PREFIXES.get(kind, "item") if isinstance(kind, str) else "item"
            item = {**item, "type": kind, "id": item.get("id") or f"{prefix}_{suffix}_in{i}"}
        out.append(item)
    return out


def read(fields: ResponsesRequest, history: Sequence[Item], items: Sequence[Any], session: Session) -> ReadRequest:
    """The meaning of a request: ``history`` is the conversation it continues, ``items`` its own input. Raises
    ``ApiError`` (400). Pure; takes time in proportion to the conversation."""
    table = ToolTable()
    table.add(fields.tools or (), "tools")
    turns = [*read_items(history, table, "the stored conversation"), *read_items(items, table)]
    choice, choice_shape = read_choice(fields.tool_choice, table)
    reasoning = fields.reasoning or ReasoningOptions()
    form = fields.text.format if fields.text is not None else None
    conversation = Conversation(
        turns=join_turns(fields.instructions, turns),
        tools=tuple(table.specs.values()),
        tool_choice=choice,
        parallel_tool_calls=fields.parallel_tool_calls is not False,
        reasoning=_reasoning(reasoning),
        response_format=_response_format(form),
        template_variables=fields.chat_template_kwargs or {},
        session=session,
    )
    stored = fields.store is not False
    sealed = SEALED_REASONING in (fields.include or ()) or not stored
    options = WriterOptions(summaries=reasoning.wants_summary, sealed=sealed, searches=table.searches)
    return ReadRequest(conversation, _shape(fields, table, choice_shape, reasoning, form), options)


def _reasoning(options: ReasoningOptions) -> ReasoningRequest:
    if options.effort is None:
        return ReasoningRequest()
    if options.effort == "none":
        return ReasoningRequest("off")
    return ReasoningRequest("default" if options.effort == "minimal" else "on", options.effort)


def _response_format(form: TextFormat | None) -> ResponseFormat:
    if form is None or form.type == "text":
        return ResponseFormat()
    if form.type == "json_object":
        return ResponseFormat("json_object")
    if form.schema_ is None:
        raise bad_value("text.format.schema is required", "text.format.schema", "missing_required_parameter")
    return ResponseFormat("json_schema", form.schema_, name=form.name or "", strict=form.strict)


def _format_shape(form: TextFormat | None) -> dict[str, Any]:
    if form is None or form.type != "json_schema":
        return {"type": "text" if form is None else form.type}
    shape = {"type": "json_schema", "name": form.name or "response", "schema": form.schema_, "strict": form.strict}
    return shape if form.description is None else {**shape, "description": form.description}


def _shape(
    fields: ResponsesRequest, table: ToolTable, choice: Any, reasoning: ReasoningOptions, form: TextFormat | None
) -> dict[str, Any]:
    summary = reasoning.summary or reasoning.generate_summary
    verbosity = fields.text.verbosity if fields.text is not None else None
    return {
        "instructions": fields.instructions or None,
        "max_output_tokens": fields.max_output_tokens or fields.max_tokens,
        "max_tool_calls": None,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id,
        "prompt_cache_key": fields.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": None if summary == "none" else summary},
        "text": {"format": _format_shape(form), "verbosity": verbosity or "medium"},
        "tool_choice": choice,
        "tools": table.declared,
        "top_logprobs": 0,
        "truncation": "disabled",
    }
