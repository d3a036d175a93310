"""Requests of the Anthropic dialect, as the server reads them. Unknown fields and betas are ignored."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from freetoken.serving.openai_schema import MAX_INT32, STOPS_SCHEMA, GenerationFields, read_stops


class CountTokensRequest(BaseModel):
    """POST /v1/messages/count_tokens."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    model: str = Field(description="The served model's name.")
    messages: list[dict[str, Any]] = Field(
        min_length=1, description="Turns of `user`, `assistant` and, anywhere, `system`; content is a string or blocks."
    )
    system: str | list[dict[str, Any]] | None = Field(None, description="A string or text blocks.")
    tools: list[dict[str, Any]] | None = Field(
        None, description="`name`, `description`, `input_schema`, `defer_loading`; server tools are ignored."
    )
    tool_choice: dict[str, Any] | None = Field(
        None, description="`type`: `auto`, `any`, `tool` (with `name`) or `none`; `disable_parallel_tool_use`."
    )
    thinking: dict[str, Any] | None = Field(
        None, description="`type`: `enabled` (with `budget_tokens`), `adaptive` or `disabled`."
    )
    output_config: dict[str, Any] | None = Field(
        None, description="`effort`, and `format` of type `json_schema` with `schema`."
    )
    output_format: dict[str, Any] | None = Field(None, description="As `output_config.format`.")


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: int | None = Field(None, ge=1, le=MAX_INT32, description="Most tokens to generate.")
    stream: bool | None = Field(None, description="Answer as server-sent events.")
    stop_sequences: Annotated[list[str], BeforeValidator(read_stops), STOPS_SCHEMA] = Field(
        [], validate_default=False, description="Strings that end the output."
    )
    temperature: float | None = Field(None, ge=0, le=100, description="0 is greedy.")
    top_p: float | None = Field(None, gt=0, le=1, description="Nucleus sampling.")
    top_k: int | None = Field(None, ge=0, le=MAX_INT32, description="Sample from the k most likely tokens.")
    metadata: dict[str, Any] | None = Field(None, description="`user_id` may hold a session's id.")

    def generation_fields(self) -> GenerationFields:
        """What concerns sampling, in the form that all dialects share."""
        return GenerationFields(
            model=self.model,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k or None,
        )
