"""Requests of the OpenAI dialect, as the server reads them. Unknown fields are ignored; null means absent.

Types are strict: a number is not taken from a string, nor an integer from a float. Field descriptions end up in
docs/http.md.
"""

from __future__ import annotations

import reprlib
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

MAX_CHOICES = 128
MAX_STOPS = 32
MAX_STOP_CHARACTERS = 1024
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_INT32 = 2**31 - 1

T = TypeVar("T")

_SHORT = reprlib.Repr()
_SHORT.maxlevel = 8
_SHORT.maxdict = _SHORT.maxlist = 32
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 200

_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
STOPS_SCHEMA = WithJsonSchema(
    {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}, {"type": "null"}]}
)
"""What ``read_stops`` takes."""
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT = {"anyOf": [{"type": "string"}, _IDS]}
PROMPT_SCHEMA = WithJsonSchema({"anyOf": [*_PROMPT["anyOf"], {"type": "array", "items": _PROMPT, "minItems": 1}]})


def shown(value: Any) -> str:
    """A value for an error message: short, on one line, whatever its size and depth."""
    text = _SHORT.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def read_stops(value: Any) -> Any:
    """Every accepted form of stop strings as a list. Raises ``ValueError``."""
    if value is None:
        return []
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"has {len(stops)} entries; at most {MAX_STOPS} are possible")
    for stop in stops:
        if not stop:
            raise ValueError("contains an empty string")
        if len(stop) > MAX_STOP_CHARACTERS:
            raise ValueError(f"contains a string of {len(stop)} characters; at most {MAX_STOP_CHARACTERS} are possible")
    return stops


def _top_k(value: int | None) -> int | None:
    if value is not None and value != -1 and value < 1:
        raise ValueError("must be at least 1, or -1 for no limit")
    return value


def _logit_bias(value: dict[str, float] | None) -> dict[str, float] | None:
    if value is None:
        return None
    if len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"has {len(value)} entries; at most {MAX_LOGIT_BIAS} are possible")
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit()):
            raise ValueError(f"key {shown(key)} is not a token id")
        if not -100.0 <= bias <= 100.0:
            raise ValueError(f"bias {bias} of token {key} is not between -100 and 100")
    return value


def is_token_ids(value: Any) -> bool:
    """Whether ``value`` is a list of integers that is not empty."""
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _prompts(value: Any) -> Any:
    """Every accepted form of ``prompt`` as a list of strings and lists of ids."""
    if isinstance(value, str):
        return [value]
    if is_token_ids(value):
        return [value]
    if isinstance(value, list) and value and all(isinstance(item, str) or is_token_ids(item) for item in value):
        return value
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists; none empty")


class Message(BaseModel):
    """One message; fields beside these (``tool_call_id``, ``name``, ...) go to the template as they are."""

    model_config = ConfigDict(strict=True, extra="ignore")

    role: str = Field(
        min_length=1, description="`system`, `developer`, `user`, `assistant` or `tool`; others count as `user`."
    )
    content: Any = Field(
        None, description="A string, or a list of parts; those that are not text are replaced by a placeholder."
    )
    tool_calls: list[dict[str, Any]] | None = Field(None, description="Earlier calls of an assistant.")
    tool_call_id: Any = Field(None, description="Which call a `tool` message answers.")
    reasoning_content: Any = Field(None, description="Earlier reasoning of an assistant (also as `reasoning`).")


class StreamOptions(BaseModel):
    """How to stream."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = Field(None, description="Send a last chunk with `usage` and no choices.")


class GenerationFields(BaseModel):
    """What both endpoints share."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    model: str = Field(description="The served model's name.")
    stream: bool | None = Field(None, description="Answer as server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="`include_usage`; only with `stream`.")
    n: int | None = Field(None, ge=1, le=MAX_CHOICES, description="Choices for each prompt.")
    max_tokens: int | None = Field(None, ge=1, le=MAX_INT32, description="Most tokens to generate.")
    temperature: float | None = Field(None, ge=0, le=100, description="0 is greedy.")
    top_p: float | None = Field(None, gt=0, le=1, description="Nucleus sampling.")
    top_k: Annotated[int | None, AfterValidator(_top_k)] = Field(
        None, le=MAX_INT32, description="Sample from the k most likely tokens; -1 is no limit."
    )
    min_p: float | None = Field(None, ge=0, le=1, description="Least probability relative to the most likely token.")
    seed: int | None = Field(
        None, ge=-(2**63), lt=2**63, description="Makes sampling reproducible; choice i uses seed + i."
    )
    presence_penalty: float | None = Field(
        None, ge=-2, le=2, description="Subtracted once from tokens already generated."
    )
    frequency_penalty: float | None = Field(
        None, ge=-2, le=2, description="Subtracted for each time a token was generated."
    )
    repetition_penalty: float | None = Field(
        None, gt=0, le=100, description="Divides the logits of tokens in prompt and output."
    )
    logit_bias: Annotated[dict[str, float] | None, AfterValidator(_logit_bias)] = Field(
        None, description="Token id to a bias from -100 to 100."
    )
    stop: Annotated[list[str], BeforeValidator(read_stops), STOPS_SCHEMA] = Field(
        [], validate_default=False, description=f"A string or up to {MAX_STOPS} strings that end the output."
    )
    stop_token_ids: list[int] | None = Field(None, max_length=1024, description="Further tokens that end the output.")
    include_stop_str_in_output: bool | None = Field(None, description="Keep the stop string in the text.")
    min_tokens: int | None = Field(None, ge=0, le=MAX_INT32, description="No end before this many tokens.")
    ignore_eos: bool | None = Field(None, description="Go on after the end-of-sequence token.")
    skip_special_tokens: bool | None = Field(None, description="Leave special tokens out of the text (default true).")
    prompt_cache_key: str | None = Field(
        None, max_length=512, description="A name of the conversation: with tools, its KV is kept for the next turn."
    )


class ChatRequest(GenerationFields):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, description="The conversation.")
    max_completion_tokens: int | None = Field(
        None, ge=1, le=MAX_INT32, description="As `max_tokens`, and takes precedence."
    )
    logprobs: bool | None = Field(None, description="Return the log probability of each token.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Alternatives for each token; needs `logprobs`."
    )
    tools: list[dict[str, Any]] | None = Field(None, description="Of type `function` or `custom`; others are ignored.")
    tool_choice: Any = Field(
        None,
        description="`auto`, `none` (tools are not shown to the model), `required`, `allowed_tools`, or a named tool.",
    )
    parallel_tool_calls: bool | None = Field(
        None, description="False ends the answer where it goes on after its first call."
    )
    response_format: dict[str, Any] | None = Field(
        None, description="Type `text`, `json_object`, `json_schema`, `regex` (`pattern`) or `grammar` (`grammar`)."
    )
    reasoning_effort: str | None = Field(None, description="How much to think; `none` for not at all.")
    thinking: dict[str, Any] | None = Field(None, description="`type`: `enabled` or `disabled`.")
    reasoning: dict[str, Any] | None = Field(None, description="`effort`, `max_tokens` and `enabled`, as routers send.")
    continue_final_message: bool | None = Field(
        None, description="Go on with the last message, an assistant's, instead of a new one."
    )
    add_generation_prompt: bool | None = Field(None, description="Open the assistant's turn (default true).")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables of the chat template.")


class CompletionRequest(GenerationFields):
    """POST /v1/completions."""

    prompt: Annotated[list[Any], BeforeValidator(_prompts), PROMPT_SCHEMA] = Field(
        description="A string, a list of strings, token ids, or a list of lists of token ids."
    )
    echo: bool | None = Field(None, description="Put the prompt before the text.")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Return log probabilities and this many alternatives."
    )
    suffix: str | None = Field(None, description="Not supported; must be empty.")
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES, description="Not supported beyond `n`.")
