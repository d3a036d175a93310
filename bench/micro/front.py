"""What the HTTP front costs for each token: streaming chat completions against a Scheduler that answers at once.

``python bench/micro/front.py [--streams 1,16,32] [--tokens 512] [--out FILE]``

The front runs in this process, its clients in another one. Each step brings one token to every stream; the next one is
sent when the front has taken all of them.

- ``cpu_us_per_token``: processor time of this process (event loop, socket writes) without what making the batches took
- ``wall_us_per_token``: elapsed time
- ``idle_cpu_share``: share of a core that the front uses while its streams wait
"""

from __future__ import annotations

import argparse
import asyncio
import json
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
from freetoken.testing.front_fakes import ScriptedScheduler, make_front_spec, wire_pair, write_text_checkpoint
from freetoken.testing.waiting import until
from freetoken.transport.inprocess import InProcessHub

TEXT = "the quick brown fox jumps over the lazy dog, größe 你好 😀 0123456789. "
IDLE_S = 2.0


async def read_streams(port: int, count: int, tokens: int) -> None:
    """The clients: ``count`` connections, each reading one stream to its end."""
    body = json.dumps(
        {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": tokens}
    ).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head % len(body) + body)
        data = await reader.read()
        writer.close()
        await writer.wait_closed()
        if b"data: [DONE]" not in data:
            raise RuntimeError(f"a stream ended early: {data[-300:]!r}")

    await asyncio.gather(*(one() for _ in range(count)))


async def measure(front: ApiFrontService, scheduler: ScriptedScheduler, count: int, ids: list[int]) -> dict[str, Any]:
    """One run with ``count`` streams of ``len(ids)`` tokens."""
    scheduler.submitted.clear()
    clients = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--clients", f"{front.port},{count},{len(ids)}"
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
        last = FinishReason.LENGTH if position == len(ids) - 1 else None
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
        "streams": count,
        "tokens": total,
        "cpu_us_per_token": round(used / total * 1e6, 1),
        "wall_us_per_token": round(elapsed / total * 1e6, 1),
        "wall_ms_per_step": round(elapsed / len(ids) * 1e3, 3),
        "tokens_per_s": round(total / elapsed),
        "idle_cpu_share": round(idle, 4),
    }


async def run(streams: list[int], tokens: int) -> list[dict[str, Any]]:
    """All runs, on one front."""
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = write_text_checkpoint(Path(directory))
        spec = make_front_spec(checkpoint, context_tokens=tokens + 64)
        hub = InProcessHub()
        front = ApiFrontService(spec, hub.endpoint(ActorName.API_FRONT))
        scheduler = ScriptedScheduler(hub.endpoint(ActorName.SCHEDULER))
        try:
            await front.load()
            await front.wire(await wire_pair(front.endpoint, scheduler.endpoint))
            await front.resume()
            once = load_text_model(checkpoint).tokenizer.encode(TEXT, add_special_tokens=False)
            ids = (once * (tokens // len(once) + 1))[:tokens]
            await measure(front, scheduler, 1, ids[:64])
            return [await measure(front, scheduler, count, ids) for count in streams]
        finally:
            await front.close()
            await scheduler.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", default="1,16,32")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each stream")
    parser.add_argument("--out")
    parser.add_argument("--clients", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.clients:
        asyncio.run(read_streams(*map(int, arguments.clients.split(","))))
        return
    figures = asyncio.run(run([int(count) for count in arguments.streams.split(",")], arguments.tokens))
    write_result(arguments.out, "front", figures)


if __name__ == "__main__":
    main()
