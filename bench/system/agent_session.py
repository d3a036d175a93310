"""Time to first token of an agent's session, turn by turn, over /v1/messages.

    python bench/system/agent_session.py [--prefix-tokens 30000] [--turns 10] [--url URL] [--out FILE]

A session as Claude Code makes it: a long system prompt and many tools, then turn after turn a call of a tool and its
result, the whole conversation sent again each time, with a billing line that changes on every request and moving
``cache_control`` marks. Calls are the model's own (``tool_choice``: any). A request for a title of another, small
prompt comes between the turns. Without ``--url`` an engine on the CPU device is launched with a small random model.

Each turn tells the prompt's tokens, how many were cached and new, how many of the last turn's prompt and output could
have been cached (whole blocks), and the time to the first token as the front measures it (``/metrics``). A session with
a sixth of the prefix goes before, so that cached tokens differ enough for a fit. Turns 2 and later of both are fitted:
``ttft = a + b * new + d * new * context + c * cached``, where ``context`` is what a new token attends to on average.
``c`` is what a cached token costs by being there; ``c_share`` is that of all of the last turn's, against the first
turn's time, which computed as many.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from bench.common import write_result
from bench.system.client import get
from freetoken.checkpoint.synthetic.shapes import SHAPES
from freetoken.cli.main import main as freetoken
from freetoken.cli.process import EngineProcess
from freetoken.testing.chat_templates import THINKING

SETTINGS = (
    "--profile", "cpu",
    "--runtime", "local",
    "--set", "server.port=0",
    "--set", "elastic.auto=false",
    "--set", "experts.measure=false",
)  # fmt: skip
RESULT_WORDS = (40, 400, 120, 900, 60, 250, 600, 30, 150, 500)
"""Sizes of the results of tools, turn by turn, so that new tokens and cached ones do not grow together."""
WORDS = (
    *("the", "of", "file", "path", "line", "error", "return", "value", "test", "build", "read"),
    *("write", "list", "open", "run", "with", "from", "this", "that", "when"),
)


class Session:
    """The client's side of one conversation. ``words`` of system prompt and tools follow ``prefix_words``."""

    def __init__(self, url: str, prefix_words: int) -> None:
        self._url = url
        self._rng = random.Random(7)
        self._model = get(url, "/v1/models")["data"][0]["id"]
        self._system = self._text(prefix_words * 2 // 3)
        each = max(20, prefix_words // 3 // 24)
        self._tools = [self._tool(i, each) for i in range(24)]
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": self._text(30)}]
        self._requests = 0

    def _text(self, words: int) -> str:
        return " ".join(self._rng.choice(WORDS) for _ in range(words))

    def _tool(self, index: int, words: int) -> dict[str, Any]:
        paths = [f"src/{word}.py" for word in WORDS[:8]]
        schema = {
            "type": "object",
            "properties": {"path": {"enum": paths}},
            "required": ["path"],
            "additionalProperties": False,
        }
        return {"name": f"tool_{index}", "description": self._text(words), "input_schema": schema}

    def body(self) -> dict[str, Any]:
        """The next request of the session."""
        self._requests += 1
        billing = f"x-anthropic-billing-header: cc_version=2.1.{self._requests}; cch={self._rng.randrange(16**5):05x};"
        messages = json.loads(json.dumps(self.messages))
        last = messages[-1]["content"]
        if isinstance(last, str):
            messages[-1]["content"] = last = [{"type": "text", "text": last}]
        last[-1]["cache_control"] = {"type": "ephemeral"}
        return {
            "model": self._model,
            "system": [
                {"type": "text", "text": billing},
                {"type": "text", "text": self._system, "cache_control": {"type": "ephemeral"}},
            ],
            "tools": self._tools,
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "messages": messages,
            "max_tokens": 200,
            "temperature": 0,
        }

    def count(self) -> int:
        """Tokens of the next prompt."""
        body = {k: v for k, v in self.body().items() if k in ("model", "system", "tools", "messages", "tool_choice")}
        return int(post(self._url, "/v1/messages/count_tokens", body)["input_tokens"])

    def turn(self, result_words: int) -> dict[str, Any]:
        """One request; its answer and the result of its tool become part of the conversation."""
        seen, usage, first_event_s = stream_message(self._url, self.body())
        self.messages.append({"role": "assistant", "content": seen})
        calls = [block for block in seen if block["type"] == "tool_use"]
        text = self._text(result_words)
        content: list[dict[str, Any]] = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": text}]}
            for call in calls
        ] or [{"type": "text", "text": text}]
        self.messages.append({"role": "user", "content": content})
        return {"usage": usage, "calls": len(calls), "first_event_s": first_event_s}

    def title(self) -> None:
        """The small request between two turns."""
        messages = [{"role": "user", "content": "Write a title for: " + self._text(60)}]
        post(self._url, "/v1/messages", {"model": self._model, "messages": messages, "max_tokens": 12})


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    """POST; the JSON answer. Raises ``RuntimeError`` for an error."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=900)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        data = response.read()
    finally:
        connection.close()
    if response.status != 200:
        raise RuntimeError(f"{path}: {response.status} {data[:500]!r}")
    return json.loads(data)


def stream_message(url: str, body: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any], float]:
    """A streamed message: its content, its usage, and seconds until its first block."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=900)
    content: list[dict[str, Any]] = []
    usage: dict[str, Any] = {}
    pieces: list[str] = []
    first_s, begun_s = 0.0, time.perf_counter()
    try:
        headers = {"Content-Type": "application/json", "anthropic-version": "2023-06-01"}
        connection.request("POST", "/v1/messages?beta=true", json.dumps({**body, "stream": True}), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{response.status} {response.read()[:500]!r}")
        for line in response:
            if not line.startswith(b"data: "):
                continue
            event = json.loads(line[6:])
            kind = event["type"]
            if kind == "error":
                raise RuntimeError(str(event))
            if kind == "content_block_start":
                first_s = first_s or time.perf_counter() - begun_s
                content.append(event["content_block"])
                pieces = []
            elif kind == "content_block_delta":
                delta = event["delta"]
                if delta["type"] == "signature_delta":
                    content[-1]["signature"] = delta["signature"]
                else:
                    pieces.append(delta.get("text") or delta.get("thinking") or delta.get("partial_json") or "")
            elif kind == "content_block_stop":
                field = {"tool_use": "input"}.get(content[-1]["type"], content[-1]["type"])
                text = "".join(pieces)
                content[-1][field] = json.loads(text or "{}") if field == "input" else text
            elif kind == "message_delta":
                usage = event["usage"]
    finally:
        connection.close()
    return content, usage, first_s


def first_token_seconds(url: str) -> float:
    """Sum over all requests so far, as the front measured it."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=60)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    finally:
        connection.close()
    found = re.search(r"^freetoken_time_to_first_token_seconds_sum (\S+)", text, re.MULTILINE)
    return float(found.group(1)) if found else 0.0


def measure(url: str, prefix_tokens: int, turns: int) -> dict[str, Any]:
    """Both sessions; the figures."""
    low, high = (Session(url, words).count() for words in (2000, 4000))
    block = int(get(url, "/v1/cache/status")["plan"]["kv_block_size"])
    sessions = []
    for size in (prefix_tokens // 6, prefix_tokens):
        words = max(100, 2000 + round((size - low) * 2000 / (high - low)))
        sessions.append(play(url, Session(url, words), block, turns))
    short, rows = sessions
    return {"block_tokens": block, "turns": rows, "turns_of_short_prefix": short, "fit": fit(short, rows)}


def play(url: str, session: Session, block: int, turns: int) -> list[dict[str, Any]]:
    """One session; a row for each turn."""
    rows: list[dict[str, Any]] = []
    reusable = 0
    for turn in range(turns):
        before = first_token_seconds(url)
        said = session.turn(RESULT_WORDS[turn % len(RESULT_WORDS)])
        ttft_s = first_token_seconds(url) - before
        usage = said["usage"]
        cached, fresh = usage["cache_read_input_tokens"], usage["input_tokens"]
        rows.append(
            {
                "turn": turn + 1,
                "prompt_tokens": cached + fresh,
                "cached_tokens": cached,
                "reusable_tokens": reusable,
                "new_tokens": fresh,
                "output_tokens": usage["output_tokens"],
                "calls": said["calls"],
                "ttft_s": round(ttft_s, 4),
                "first_event_s": round(said["first_event_s"], 4),
            }
        )
        print(rows[-1], file=sys.stderr, flush=True)
        # The last token that was sampled has no KV: nothing was computed after it.
        reusable = (cached + fresh + usage["output_tokens"] - 1) // block * block
        if turn % 2 == 0:
            session.title()
    return rows


def fit(short: list[dict[str, Any]], rows: list[dict[str, Any]]) -> dict[str, float]:
    """By least squares of relative errors, as long turns would else decide alone. What comes out negative of a, b and d
    is 0: where attention is nearly all there is to compute, b cannot be told."""
    later = [*short[1:], *rows[1:]]
    if len(later) < 6:
        return {}
    fresh = np.array([row["new_tokens"] for row in later], float)
    cached = np.array([row["cached_tokens"] for row in later], float)
    measured = np.array([row["ttft_s"] for row in later])
    inputs = np.stack([np.ones_like(fresh), fresh, fresh * (cached + fresh / 2), cached], axis=1)
    used, found = [0, 1, 2, 3], np.zeros(4)
    while True:
        found[:] = 0
        found[used] = np.linalg.lstsq(inputs[:, used] / measured[:, None], np.ones_like(measured), rcond=None)[0]
        lowest = min(used, key=lambda i: (i == 3, found[i] * inputs[:, i].mean()))
        if lowest == 3 or found[lowest] >= 0:
            break
        used.remove(lowest)
    a, b, d, c = (float(value) for value in found)
    errors = np.abs(inputs @ found / measured - 1)
    return {
        "a_ms": round(a * 1e3, 2),
        "b_us_per_new_token": round(b * 1e6, 2),
        "d_us_per_new_token_and_1000_of_context": round(d * 1e9, 3),
        "c_us_per_cached_token": round(c * 1e6, 3),
        "c_share": round(c * rows[-1]["cached_tokens"] / rows[0]["ttft_s"], 4),
        "median_error": round(float(np.median(errors)), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix-tokens", type=int, default=30_000)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--shape", default="qwen3-moe-tiny", choices=sorted(SHAPES), help="of the launched model")
    parser.add_argument("--url")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        url = arguments.url
        if url is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            context = arguments.prefix_tokens + 16384
            model = directory / "model"
            freetoken(["synth", arguments.shape, str(model), "--context", str(context), "--measure-tokens", "0"])
            (model / "chat_template.jinja").write_text(THINKING)
            sizes = ("--set", f"max_context_tokens={context}", "--set", f"kv.num_tokens={2 * context}")
            cache = ("--set", f"loader.cache_dir={directory}/cache")
            url = stack.enter_context(EngineProcess(str(model), *SETTINGS, *sizes, *cache)).url
        figures = measure(url, arguments.prefix_tokens, arguments.turns)
    write_result(arguments.out, "agent_session", figures)
    all_turns = [*figures["turns_of_short_prefix"], *figures["turns"]]
    lost = [row["turn"] for row in all_turns if row["cached_tokens"] < row["reusable_tokens"]]
    if lost:
        print(f"turns {lost} found less in the cache than the turn before them left there", file=sys.stderr)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
