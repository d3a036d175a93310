"""``POST /v1/cache/rebalance``: an operator divides the arena between expert slots and KV anew."""

from __future__ import annotations

from typing import Annotated

from aiohttp import web
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from freetoken.errors import CapacityError, FreeTokenError, RebalanceBusyError
from freetoken.messages import RebalanceWish
from freetoken.serving.body import read_request
from freetoken.serving.context import CONTEXT
from freetoken.serving.errors import RETRY_AFTER_BUSY_S, ApiError, unavailable
from freetoken.serving.status import decision_json
from freetoken.units import parse_bytes

_BYTES_SCHEMA = WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}]})


class RebalanceRequest(BaseModel):
    """Exactly one of the three."""

    model_config = ConfigDict(extra="forbid", strict=True)

    expert_bytes: Annotated[int, BeforeValidator(parse_bytes), _BYTES_SCHEMA] | None = Field(
        None, ge=1, description="Memory of expert slots at most: bytes, or a text like 2GiB."
    )
    kv_tokens: int | None = Field(None, ge=1, description="Tokens that KV holds at least.")
    auto: bool = Field(False, description="Whatever is worth most now.")

    @model_validator(mode="after")
    def _check_one(self) -> RebalanceRequest:
        if (self.expert_bytes is not None) + (self.kv_tokens is not None) + self.auto != 1:
            raise ValueError("exactly one of expert_bytes, kv_tokens and auto=true is needed")
        return self


async def rebalance(request: web.Request) -> web.Response:
    """Move memory between expert slots and KV while serving; answers when it is done."""
    from freetoken.serving.app import json_response

    context = request.app[CONTEXT]
    wish, _ = await read_request(request, RebalanceRequest, context.pool)
    try:
        record = await context.engine.rebalance(RebalanceWish(wish.kv_tokens, wish.expert_bytes, wish.auto))
    except RebalanceBusyError as error:
        raise ApiError(409, str(error), "rebalance_under_way", retry_after_s=RETRY_AFTER_BUSY_S) from error
    except CapacityError as error:
        param = "kv_tokens" if wish.kv_tokens is not None else "expert_bytes" if wish.expert_bytes is not None else None
        raise ApiError(400, str(error), "invalid_value", param) from error
    except FreeTokenError as error:
        raise unavailable(f"the Controller does not answer: {error}") from error
    if record.outcome not in ("done", "unchanged"):
        raise ApiError(
            409, f"nothing was changed: {record.outcome}", "rebalance_failed", retry_after_s=RETRY_AFTER_BUSY_S
        )
    return json_response({"object": "cache.rebalance", **decision_json(record)})
