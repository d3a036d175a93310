"""POST /v1/responses as the server reads it: the fields of the body. Items and tools have shapes of their own, which
``items`` and ``tools`` read, because clients leave out ``type`` and invent new kinds."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from freetoken.serving.openai_schema import MAX_INT32, MAX_LOGPROBS, GenerationFields, shown

MAX_METADATA = 16
MAX_METADATA_KEY_CHARACTERS = 64
MAX_METADATA_CHARACTERS = 512
MAX_ITEMS = 100_000

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Summary = Literal["auto", "concise", "detailed", "none"]


def _input(value: Any) -> Any:
    """A string, or a list of objects."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of items")
    if len(value) > MAX_ITEMS:
        raise ValueError(f"has {len(value)} items; at most {MAX_ITEMS} are possible")
    return value


def _metadata(value: dict[str, str] | None) -> dict[str, str] | None:
    if value is None:
        return None
    if len(value) > MAX_METADATA:
        raise ValueError(f"has {len(value)} entries; at most {MAX_METADATA} are possible")
    for key, text in value.items():
        if len(key) > MAX_METADATA_KEY_CHARACTERS:
            raise ValueError(
                f"key {shown(key)} has {len(key)} characters; at most {MAX_METADATA_KEY_CHARACTERS} are possible"
            )
        if len(text) > MAX_METADATA_CHARACTERS:
            raise ValueError(
                f"the value of {shown(key)} has {len(text)} characters; at most {MAX_METADATA_CHARACTERS} are possible"
            )
    return value


class ReasoningOptions(BaseModel):
    """How the model thinks, and how the client sees it."""

    model_config = ConfigDict(strict=True, extra="ignore")

    effort: Effort | None = Field(None, description="How much; `none` turns thinking off where the template can.")
    summary: Summary | None = Field(
        None, description="Return the reasoning as the item's summary; otherwise it is the item's content."
    )
    generate_summary: Summary | None = Field(None, description="The older name of `summary`.")

    @property
    def wants_summary(self) -> bool:
        """Whether reasoning goes out as summary text."""
        return (self.summary or self.generate_summary or "none") != "none"


class TextFormat(BaseModel):
    """What the answer's text must look like."""

    model_config = ConfigDict(strict=True, extra="ignore", populate_by_name=True)

    type: Literal["text", "json_object", "json_schema"] = Field(description="Which of the forms.")
    name: str | None = Field(None, max_length=256, description="The schema's name.")
    description: str | None = Field(None, description="Not used.")
    schema_: dict[str, Any] | bool | None = Field(
        None, alias="schema", description="The JSON schema that the text must match, for `json_schema`."
    )
    strict: bool | None = Field(None, description="Not used: a schema is always enforced.")


class TextConfig(BaseModel):
    """``text``."""

    model_config = ConfigDict(strict=True, extra="ignore")

    format: TextFormat | None = Field(None, description="Plain text unless given.")
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="Taken, and not used.")


class ResponsesRequest(GenerationFields):
    """POST /v1/responses."""

    input: Annotated[str | list[Any] | None, BeforeValidator(_input)] = Field(
        None, description="A string (it may be empty), or a list of items."
    )
    instructions: str | None = Field(None, description="A system message before everything else.")
    previous_response_id: str | None = Field(
        None,
        max_length=256,
        description="Continue this stored response; 400 when the store does not have it (any more).",
    )
    store: bool | None = Field(
        None,
        description="Keep the response for `previous_response_id` (default true), within `server.response_store_*`.",
    )
    max_output_tokens: int | None = Field(
        None, ge=1, le=MAX_INT32, description="Most tokens to generate, reasoning included."
    )
    tools: list[Any] | None = Field(
        None, description="Tools of type function, namespace, custom, tool_search; others are ignored."
    )
    tool_choice: Any = Field(
        None, description="`auto`, `none`, `required`, or an object that names tools; always enforced."
    )
    parallel_tool_calls: bool | None = Field(
        None, description="Whether one answer may hold several calls (default true)."
    )
    reasoning: ReasoningOptions | None = Field(None, description="Effort and visibility of reasoning.")
    text: TextConfig | None = Field(None, description="The form of the answer.")
    include: list[str] | None = Field(None, description="`reasoning.encrypted_content`; others are ignored.")
    metadata: Annotated[dict[str, str] | None, AfterValidator(_metadata)] = Field(
        None, description=f"Up to {MAX_METADATA} strings, returned as they came."
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="Taken; a prompt that is too long is always refused, never cut."
    )
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="Must be 0: not supported here.")
    background: bool | None = Field(None, description="Must be false: not supported.")
    conversation: Any = Field(None, description="Must be absent: not supported; use `previous_response_id`.")
    prompt: Any = Field(None, description="Must be absent: not supported.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables of the chat template.")
