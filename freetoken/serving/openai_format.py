"""Parts of OpenAI responses that chat and text completions share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from freetoken.serving.choice import TokenLogprob
from freetoken.serving.detokenizer import TokenTexts
from freetoken.serving.usage import Usage

LOWEST_LOGPROB = -9999.0
"""JSON has no minus infinity; this is what other servers write for a probability of zero."""


def usage_object(usage: Usage) -> dict[str, Any]:
    """``usage``, with the engine's own figures in ``freetoken``."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "freetoken": {
            "queue_s": usage.queue_s,
            "prefill_s": usage.prefill_s,
            "decode_s": usage.decode_s,
            "decode_tokens_per_s": usage.decode_tokens_per_s,
            "cached_tokens": usage.cached_tokens,
        },
    }


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def _chat_token(texts: TokenTexts, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": texts.token_text(token_id),
        "logprob": _finite(logprob),
        "bytes": list(texts.token_bytes(token_id)),
    }


def chat_logprobs(texts: TokenTexts, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """``choices[].logprobs`` of chat completions."""
    content = []
    for item in logprobs:
        entry = _chat_token(texts, item.entry.token_id, item.entry.logprob)
        entry["top_logprobs"] = [_chat_token(texts, *alternative) for alternative in item.entry.top]
        content.append(entry)
    return {"content": content, "refusal": None}


def _alternatives(texts: TokenTexts, top: Sequence[tuple[int, float]]) -> dict[str, float]:
    """By text; where two tokens look alike, the likelier one."""
    found: dict[str, float] = {}
    for token_id, logprob in top:
        found.setdefault(texts.token_text(token_id), _finite(logprob))
    return found


def completion_logprobs(texts: TokenTexts, logprobs: Sequence[TokenLogprob], text_start: int) -> dict[str, Any]:
    """``choices[].logprobs`` of text completions. ``text_start`` is the length of an echoed prompt, in characters."""
    return {
        "tokens": [texts.token_text(item.entry.token_id) for item in logprobs],
        "token_logprobs": [_finite(item.entry.logprob) for item in logprobs],
        "top_logprobs": [_alternatives(texts, item.entry.top) for item in logprobs],
        "text_offset": [text_start + item.offset for item in logprobs],
    }
