"""Hostile requests against the front: no fault of the server, nothing left behind, and it answers afterwards.

``bench/system/fuzz.py`` does the same to a whole engine, with many more of them.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from freetoken.serving.app import ROUTES
from freetoken.serving.openapi import openapi_document
from freetoken.testing.chat_templates import ALL
from freetoken.testing.front_fakes import write_text_checkpoint
from freetoken.testing.fuzz_run import judge, run_fuzz, status_of
from freetoken.testing.http_fuzz import FuzzRequest, RequestFuzzer
from freetoken.testing.waiting import until

from .conftest import open_site

COUNT = 500


@pytest.mark.parametrize("template", ["thinking", "channels"])
async def test_hostile_requests(tmp_path: Path, template: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    checkpoint = write_text_checkpoint(tmp_path, ALL[template])
    async with open_site(checkpoint, context_tokens=256, server={"max_tokens_default": 8}) as site:
        report = await run_fuzz("127.0.0.1", site.front.port, range(COUNT), 1, 4, "tiny")
        assert report.faults == []
        assert report.requests == COUNT
        assert report.statuses["200"] > COUNT // 10
        assert report.statuses["400"] > COUNT // 10
        await until(lambda: site.front.metrics()["requests"] == 0 and site.scheduler.num_running == 0)
        assert (await site.chat())[0] == 200


def test_a_request_is_always_the_same() -> None:
    document = openapi_document(ROUTES, "0")
    first, second = RequestFuzzer(document, "m", 3), RequestFuzzer(document, "m", 3)
    assert [first.request(i) for i in range(200)] == [second.request(i) for i in range(200)]
    assert len({first.request(i).data for i in range(200)}) > 150


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"", "no answer"),
        (b"HTTP/1.1 500 X\r\n\r\n{}", "status 500"),
        (b"HTTP/1.1 503 X\r\n\r\n" + b'{"error":{"message":"x"}}', None),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 504 X\r\n\r\n{}", "status 504"),
        (b"HTTP/1.1 400 X\r\n\r\nplain", "an error without a message"),
        (b"HTTP/1.1 200 X\r\nContent-Type: text/event-stream\r\n\r\ndata: {}\n\n", "a stream without an end"),
        (b"HTTP/1.1 200 X\r\nContent-Type: text/event-stream\r\n\r\ndata: [DONE]\n\n", None),
        (
            b'HTTP/1.1 200 X\r\nContent-Type: text/event-stream\r\n\r\ndata: {"error":{"type":"server_error"}}\n\n',
            "a stream ends with a fault of the server",
        ),
    ],
)
def test_what_is_a_fault(answer: bytes, problem: str | None) -> None:
    assert judge(FuzzRequest("valid", "POST", "/", b""), answer) == problem
    assert (status_of(answer) is None) == (answer == b"")
