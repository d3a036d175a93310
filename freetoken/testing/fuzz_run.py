"""Sends the requests of ``http_fuzz`` to a server and says which answers are a fault of the server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from freetoken.testing.http_fuzz import FuzzRequest, RequestFuzzer

ANSWER_LIMIT_S = 60.0
MAX_KEPT = 50
_FAULT_EVENT = re.compile(rb'"type":"(server_error|api_error)"|"code":"(server_error|internal_error)"')
_DELIBERATE = re.compile(rb'"code":"(engine_\w+|aborted|slow_client)"')
_ENDS = (b"data: [DONE]", b"event: message_stop", b"event: response.completed", b"event: response.incomplete")
_ERROR_ENDS = (b'data: {"error":', b"event: error", b"event: response.failed")


@dataclass(slots=True)
class FuzzReport:
    """What came back. ``faults`` has the first of them: index of the request, what is wrong, request and answer."""

    requests: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    num_faults: int = 0
    faults: list[dict[str, Any]] = field(default_factory=list)
    longest_s: float = 0.0
    longest_index: int = -1
    longest_kind: str = ""

    def add(self, index: int, request: FuzzRequest, answer: bytes, problem: str | None, elapsed_s: float) -> None:
        """Count one exchange."""
        self.requests += 1
        self.kinds[request.kind] += 1
        status = status_of(answer)
        self.statuses["left" if request.leaves else "none" if status is None else str(status)] += 1
        if elapsed_s > self.longest_s:
            self.longest_s, self.longest_index, self.longest_kind = elapsed_s, index, request.kind
        if problem is None:
            return
        self.num_faults += 1
        if len(self.faults) < MAX_KEPT:
            shown = {"request": repr(request.data[:1500]), "answer": repr(answer[-600:])}
            self.faults.append({"index": index, "kind": request.kind, "problem": problem, **shown})


def status_of(answer: bytes) -> int | None:
    """The HTTP status, of the last answer where interim ones (100) came first."""
    statuses = re.findall(rb"(?:^|\r\n\r\n)HTTP/1\.[01] (\d{3})", answer[:4096])
    return int(statuses[-1]) if statuses else None


def judge(request: FuzzRequest, answer: bytes) -> str | None:
    """What is wrong with an answer, or None."""
    if request.leaves:
        return None
    status = status_of(answer)
    if status is None:
        return None if request.lenient else "no answer"
    if status >= 500 and status != 503:
        return f"status {status}"
    head, _, body = answer.partition(b"\r\n\r\n")
    if status == 200 and b"text/event-stream" in head.lower() and request.method == "POST":
        if _FAULT_EVENT.search(body) and not _DELIBERATE.search(body):
            return "a stream ends with a fault of the server"
        if not any(end in body for end in (*_ENDS, *_ERROR_ENDS)):
            return "a stream without an end"
    elif status >= 400 and request.kind in ("valid", "mutated", "malformed") and b'"message":"' not in body:
        return "an error without a message"
    return None


async def exchange(host: str, port: int, request: FuzzRequest) -> bytes:
    """Everything the server answers until it closes the connection. Raises ``asyncio.TimeoutError``."""
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    answer = bytearray()
    try:
        with contextlib.suppress(ConnectionError):
            writer.write(request.data)
            await writer.drain()
            if request.cut and writer.can_write_eof():
                writer.write_eof()
            if request.leaves == "sent":
                return b""
            while data := await asyncio.wait_for(reader.read(1 << 16), ANSWER_LIMIT_S):
                answer += data
                if request.leaves:
                    break
        return bytes(answer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def get_json(host: str, port: int, path: str) -> Any:
    """GET of a JSON value. Raises ``ValueError`` for anything but 200."""
    data = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
    answer = await exchange(host, port, FuzzRequest("valid", "GET", path, data))
    if status_of(answer) != 200:
        raise ValueError(f"GET {path}: {answer[:300]!r}")
    return json.loads(answer.partition(b"\r\n\r\n")[2])


async def run_fuzz(
    host: str, port: int, indices: range | list[int], seed: int, concurrency: int, model: str
) -> FuzzReport:
    """Send these requests of ``seed``, ``concurrency`` at a time, drawn from the server's own OpenAPI document."""
    fuzzer = RequestFuzzer(await get_json(host, port, "/openapi.json"), model, seed)
    report = FuzzReport()
    waiting = iter(indices)

    async def work() -> None:
        for index in waiting:
            request = fuzzer.request(index)
            started, answer = time.monotonic(), b""
            problem: str | None
            try:
                answer = await exchange(host, port, request)
                problem = judge(request, answer)
            except asyncio.TimeoutError:
                problem = f"no end after {ANSWER_LIMIT_S:.0f} s"
            except OSError as error:
                problem = f"the server cannot be reached: {error}"
            report.add(index, request, answer, problem, time.monotonic() - started)

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return report
