"""What the Controller knows of a recording whose maker has died."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freetoken.engine.tracing import RouteTracing
from freetoken.errors import ConfigError, FreeTokenError, PeerLostError
from freetoken.experts.route_trace import TraceInfo, encode_header, encode_record
from freetoken.messages import ActorName, TraceRecording, TraceWish
from freetoken.testing.fake_group import FakeGroup

RECORD = encode_record(7, 1, np.ones((3, 2), np.int32), np.ones((3, 2), np.float32), np.ones(3, np.uint8))
SHOW, START, STOP = TraceWish("show"), TraceWish("start"), TraceWish("stop")


class Cache:
    """An ExpertCache's handle; answers with ``answer``, or raises it."""

    answer: TraceRecording | Exception | None = None

    async def trace(self, wish: TraceWish) -> TraceRecording | None:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def test_a_recording_ends_with_its_maker(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(encode_header(TraceInfo("m", 2, 4, 2)) + RECORD * 4 + RECORD[:20])
    found: list[Any] = [Cache()]
    tracing = RouteTracing(lambda: found[0])
    assert await tracing.trace(SHOW) is None and await tracing.trace(STOP) is None
    running = TraceRecording(str(path), "m", 1.0, 2.0, 100, 1000, 1, 1.0, 0)
    found[0].answer = running
    assert await tracing.trace(START) == running
    found[0].answer = PeerLostError("ExpertCache", "killed")
    for wish in (SHOW, STOP):
        left = await tracing.trace(wish)
        assert left is not None and "ExpertCache ended" in left.ended
        assert (left.publishes, left.tokens) == (4, 6.0)
        assert left.num_bytes == path.stat().st_size - 20
    with pytest.raises(PeerLostError):
        await tracing.trace(START)
    for found[0] in (None, Cache()):  # being replaced; and the new one, which knows nothing
        assert await tracing.trace(SHOW) == left
    with pytest.raises(PeerLostError):
        found[0] = None
        await tracing.trace(START)
    again = dataclasses.replace(running, path="other")
    found[0] = Cache()
    found[0].answer = again
    assert await tracing.trace(START) == again
    found[0].answer = None
    left = await tracing.trace(SHOW)  # its file is gone too
    assert left is not None and left.publishes == 0 and "No such file" in left.ended
    found[0].answer = ConfigError("no")
    with pytest.raises(ConfigError):
        await tracing.trace(START)


async def test_a_wish_reaches_the_living_actor(group: FakeGroup) -> None:
    group.start()
    await group.until_answering_again()
    with pytest.raises(FreeTokenError, match="ExpertCache records no routes"):  # the fake one does not
        await group.controller.trace(START)
    recording = TraceRecording("/p", "m", 1.0, 2.0, 100, 1000, 1, 1.0, 0, "stopped")

    async def trace(wish: TraceWish) -> TraceRecording:
        return recording

    group.service(ActorName.EXPERT_CACHE).trace = trace
    assert await group.controller.trace(STOP) == recording
