"""What the HTTP front costs: for each token of streams, in every dialect, and for a long prompt.

``python bench/micro/front.py [--streams 1,16,32] [--tokens 512] [--dialects chat,messages,responses] [--out FILE]``

The front runs in this process, its clients in another one. A Scheduler that answers at once brings one token to every
stream in each step; the next step is sent when the front has taken all of them. Requests declare tools, and the output
begins with reasoning, goes on with text and ends with a call: reasoning parser and tool parser are at work.

- ``cpu_us_per_token``: processor time of this process (event loop, socket writes) without what making the batches took
- ``wall_us_per_token``: elapsed time
- ``idle_cpu_share``: share of a core that the front uses while its streams wait

``long_prompt``: requests with a prompt of ``--prompt-kib`` (system prompt and tools), one after the other, while a task
on the event loop asks for the time as often as it can: its longest wait during each request (median over 21 requests,
and the longest of all), and, as ``..._idle``, in as much time without a request, which is what the machine adds.
``same_prompt`` is the case of a prompt that was there before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.common import write_result
from freetoken.messages import ActorName, FinishReason, TokenDelta
from freetoken.serving.front import ApiFrontService
from freetoken.serving.tokenizer import load_text_model
from freetoken.testing.chat_templates import THINKING
from freetoken.testing.front_fakes import ScriptedScheduler, make_front_spec, wire_pair, write_text_checkpoint
from freetoken.testing.waiting import until
from freetoken.transport.inprocess import InProcessHub

TEXT = "the quick brown fox jumps over the lazy dog, größe 你好 😀 0123456789. "
CALL = '\n<tool_call>\n{"name": "write", "arguments": {"path": "/a", "text": "%s"}}\n</tool_call>'
IDLE_S = 2.0
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}}
FUNCTION = {"name": "write", "description": "Writes.", "parameters": SCHEMA}
MESSAGES = [{"role": "user", "content": "hi"}]
REQUESTS: dict[str, tuple[str, dict[str, Any], bytes]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "tools": [{"type": "function", "function": FUNCTION}]},
        b"data: [DONE]",
    ),
    "messages": (
        "/v1/messages",
        {"messages": MESSAGES, "tools": [{"name": "write", "input_schema": SCHEMA}]},
        b"event: message_stop",
    ),
    "responses": ("/v1/responses", {"input": "hi", "tools": [{"type": "function", **FUNCTION}]}, b"response.completed"),
}
"""Dialect -> path, body, and what the last event of a stream holds."""


async def read_streams(port: int, count: int, tokens: int, dialect: str) -> None:
    """The clients: ``count`` connections, each reading one stream to its end."""
    path, fields, end = REQUESTS[dialect]
    budget = {"max_output_tokens" if dialect == "responses" else "max_tokens": tokens}
    body = json.dumps({"model": "tiny", "stream": True, **budget, **fields}).encode()
    head = b"POST %s HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head % (path.encode(), len(body)) + body)
        data = await reader.read()
        writer.close()
        await writer.wait_closed()
        if end not in data:
            raise RuntimeError(f"a stream ended early: {data[-300:]!r}")

    await asyncio.gather(*(one() for _ in range(count)))


async def measure(
    front: ApiFrontService, scheduler: ScriptedScheduler, count: int, ids: list[int], dialect: str
) -> dict[str, Any]:
    """One run with ``count`` streams of ``len(ids)`` tokens."""
    scheduler.submitted.clear()
    clients = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--clients", f"{front.port},{count},{len(ids)},{dialect}"
    )
    await until(lambda: len(scheduler.submitted) == count, 60)
    requests = [request.request_id for request in scheduler.submitted]
    await asyncio.sleep(0.2)  # every stream has begun
    idle_cpu, idle_wall = time.process_time(), time.perf_counter()
    await asyncio.sleep(IDLE_S)
    idle = (time.process_time() - idle_cpu) / (time.perf_counter() - idle_wall)
    making_s = 0.0
    cpu, wall = time.process_time(), time.perf_counter()
    for position, token_id in enumerate(ids):
        before = time.process_time()
        last = FinishReason.STOP if position == len(ids) - 1 else None
        scheduler.send(*(TokenDelta(request, (token_id,), finish_reason=last) for request in requests))
        making_s += time.process_time() - before
        await asyncio.sleep(0)
        while front.pending_tokens:  # noqa: ASYNC110 (nothing to wait on: this is the busy case)
            await asyncio.sleep(0)
    elapsed, used = time.perf_counter() - wall, time.process_time() - cpu - making_s
    if await clients.wait() != 0:
        raise RuntimeError("the clients failed")
    total = count * len(ids)
    return {
        "dialect": dialect,
        "streams": count,
        "tokens": total,
        "cpu_us_per_token": round(used / total * 1e6, 1),
        "wall_us_per_token": round(elapsed / total * 1e6, 1),
        "wall_ms_per_step": round(elapsed / len(ids) * 1e3, 3),
        "tokens_per_s": round(total / elapsed),
        "idle_cpu_share": round(idle, 4),
    }


async def stalls(seconds: float | None, work: asyncio.Future[Any] | None = None) -> float:
    """The longest time (ms) that the event loop was not free for others, over ``seconds`` or until ``work`` is done."""
    longest, last = 0.0, time.perf_counter()
    end = last + (seconds or 600.0)
    while last < end and not (work is not None and work.done()):
        await asyncio.sleep(0)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest * 1e3


async def long_prompts(front: ApiFrontService, scheduler: ScriptedScheduler, kib: int, dialect: str) -> dict[str, Any]:
    """Requests with long prompts, answered with one token."""
    path, fields, _ = REQUESTS[dialect]
    scheduler.script = lambda request: [TokenDelta(request.request_id, (2,), finish_reason=FinishReason.STOP)]

    async def post(number: int) -> float:
        words = (f"{word}{number} " for word in TEXT.split() * kib)
        system = f"{dialect} {''.join(words)}" + TEXT * (kib * 1024 // len(TEXT.encode()))
        system = system[: kib * 1000]
        body = {"model": "tiny", **fields}
        if dialect == "messages":
            body |= {"system": system, "max_tokens": 1}
        elif dialect == "responses":
            body |= {"instructions": system}
        else:
            body |= {"messages": [{"role": "system", "content": system}, *MESSAGES]}
        data = json.dumps(body, ensure_ascii=False).encode()
        begun = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        head = b"POST %s HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % (path.encode(), len(data)) + data)
        answer = await reader.read()
        writer.close()
        if b" 200 " not in answer[:20]:
            raise RuntimeError(answer[:500].decode())
        return time.perf_counter() - begun

    await post(0)
    result: dict[str, Any] = {"dialect": dialect, "prompt_kib": kib}
    for name, numbers in (("new_prompt", list(range(1, 22))), ("same_prompt", [1] * 21)):
        seconds, longest, idle = [], [], []
        for number in numbers:
            work = asyncio.ensure_future(post(number))
            longest.append(await stalls(None, work))
            seconds.append(await work)
            idle.append(await stalls(seconds[-1]))
        result[name] = {
            "median_stall_ms": round(statistics.median(longest), 2),
            "median_stall_ms_idle": round(statistics.median(idle), 2),
            "longest_stall_ms": round(max(longest), 2),
            "longest_stall_ms_idle": round(max(idle), 2),
            "median_answer_ms": round(statistics.median(seconds) * 1e3, 2),
        }
    result["prompt_tokens"] = len(scheduler.submitted[-1].prompt_token_ids)
    scheduler.script = None
    return result


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All runs, on one front."""
    tokens: int = arguments.tokens
    dialects: list[str] = arguments.dialects.split(",")
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = write_text_checkpoint(Path(directory), THINKING)
        spec = make_front_spec(checkpoint, context_tokens=tokens + 512 + arguments.prompt_kib * 1024)
        hub = InProcessHub()
        front = ApiFrontService(spec, hub.endpoint(ActorName.API_FRONT))
        scheduler = ScriptedScheduler(hub.endpoint(ActorName.SCHEDULER))
        try:
            await front.load()
            await front.wire(await wire_pair(front.endpoint, scheduler.endpoint))
            await front.resume()
            encode = load_text_model(checkpoint).tokenizer.encode

            def ids_of(text: str, count: int) -> list[int]:
                once = encode(text, add_special_tokens=False)
                return (once * (count // len(once) + 1))[:count]

            thought = [*encode("<think>\n", add_special_tokens=False), *ids_of(TEXT, tokens // 4)]
            said = [*encode("\n</think>\n\n", add_special_tokens=False), *ids_of(TEXT, tokens // 2)]
            call = encode(CALL % TEXT, add_special_tokens=False)
            ids = [*thought, *said, *call, 2]
            await measure(front, scheduler, 1, ids, dialects[0])
            return {
                "tokens": [
                    await measure(front, scheduler, int(count), ids, dialect)
                    for dialect in dialects
                    for count in arguments.streams.split(",")
                ],
                "long_prompt": [await long_prompts(front, scheduler, arguments.prompt_kib, name) for name in dialects],
            }
        finally:
            await front.close()
            await scheduler.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", default="1,16,32")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each stream")
    parser.add_argument("--dialects", default="chat,messages,responses")
    parser.add_argument("--prompt-kib", type=int, default=60)
    parser.add_argument("--out")
    parser.add_argument("--clients", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.clients:
        port, count, tokens, dialect = arguments.clients.split(",")
        asyncio.run(read_streams(int(port), int(count), int(tokens), dialect))
        return
    write_result(arguments.out, "front", asyncio.run(run(arguments)))


if __name__ == "__main__":
    main()
