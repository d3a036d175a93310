"""What only the socket carrier has: kernel limits, foreign processes, packets from strangers."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable

import pytest

from freetoken.errors import PeerLostError
from freetoken.messages import ActorName, MailboxShared, SamplingParams, StepNotice, SubmitRequest, Wiring
from freetoken.testing.waiting import open_fds, until
from freetoken.transport import seqpacket
from freetoken.transport.codec import Header, Kind, PacketError
from freetoken.transport.seqpacket import SeqpacketEndpoint

A, B = ActorName.SCHEDULER, ActorName.API_FRONT
MakePair = Callable[..., "tuple[SeqpacketEndpoint, SeqpacketEndpoint]"]


@pytest.fixture(autouse=True)
async def no_leaks() -> AsyncIterator[None]:
    before = open_fds()
    yield
    await until(lambda: open_fds() <= before)


@pytest.fixture
async def pair() -> AsyncIterator[tuple[SeqpacketEndpoint, SeqpacketEndpoint]]:
    a, b = SeqpacketEndpoint(A, max_queued_bytes=8 * 1024**2), SeqpacketEndpoint(B)
    wiring = Wiring(1, {A: a.address, B: b.address})
    await a.connect(wiring)
    await b.connect(wiring)
    yield a, b
    await a.close()
    await b.close()


async def test_a_flood_is_queued_and_keeps_order(pair: tuple[SeqpacketEndpoint, SeqpacketEndpoint]) -> None:
    a, b = pair
    steps: list[int] = []
    received: list[int] = []
    b.on(StepNotice, lambda message, fds: steps.append(message.step_id))
    b.on(MailboxShared, lambda message, fds: received.extend(fds))
    memory = os.memfd_create("m")
    for step in range(20_000):  # far beyond what the socket buffer holds; b cannot run meanwhile
        a.send(B, StepNotice(step, 1, 1, 1))
        if step % 1000 == 0:
            a.send(B, MailboxShared(1, 1), [memory])
    os.close(memory)
    await until(lambda: len(steps) == 20_000)
    assert steps == list(range(20_000))
    assert len(received) == 20
    for fd in received:
        os.close(fd)


async def test_a_peer_that_does_not_read_is_given_up(pair: tuple[SeqpacketEndpoint, SeqpacketEndpoint]) -> None:
    a, _ = pair
    lost: list[ActorName] = []
    a.on_peer_lost(lost.append)
    prompt = SubmitRequest("r", tuple(range(200_000)), SamplingParams())
    with pytest.raises(PeerLostError, match=r"does not read its messages.*limit 8388608"):
        for _ in range(100):
            a.send(B, prompt, [0])
    await until(lambda: lost == [B])


async def test_large_messages_survive_small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seqpacket, "_SEND_BUFFER_BYTES", 20_000)
    a, b = SeqpacketEndpoint(A), SeqpacketEndpoint(B)
    wiring = Wiring(1, {A: a.address, B: b.address})
    await a.connect(wiring)
    await b.connect(wiring)
    arrived: list[SubmitRequest] = []
    b.on(SubmitRequest, lambda message, fds: arrived.append(message))
    prompt = SubmitRequest("r", tuple(range(100_000)), SamplingParams())
    a.send(B, prompt)
    await until(lambda: arrived == [prompt])
    await a.close()
    await b.close()


def raw_connection(endpoint: SeqpacketEndpoint) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect("\0" + endpoint.address.removeprefix("seqpacket:"))
    sock.setblocking(False)
    return sock


def hello(name: str) -> bytes:
    payload = f"{name}\nseqpacket:nowhere".encode()
    return Header(Kind.HELLO, 0, len(payload), 0, 0).pack() + payload


@pytest.mark.parametrize(
    "packets",
    [
        [b"GET / HTTP/1.1"],
        [Header(Kind.MESSAGE, 1, 0, 0, 0).pack()],
        [hello("Nobody")],
        [hello("Scheduler"), hello("Scheduler")],
        [hello("Scheduler"), Header(Kind.MESSAGE, 1, 10, 5, 0).pack() + b"12345"],
        [hello("Scheduler"), Header(Kind.MESSAGE, 1, 4, 0, 1).pack() + b"1234"],
    ],
    ids=["foreign", "no-hello", "unknown-name", "two-hellos", "gap", "missing-descriptor"],
)
async def test_strangers_are_hung_up_on(
    pair: tuple[SeqpacketEndpoint, SeqpacketEndpoint], packets: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    a, b = pair
    steps: list[int] = []
    lost: list[ActorName] = []
    b.on(StepNotice, lambda message, fds: steps.append(message.step_id))
    b.on_peer_lost(lost.append)
    with raw_connection(b) as stranger, caplog.at_level(logging.ERROR):
        for packet in packets:
            stranger.send(packet)
        await until(lambda: any("bad_packet" in record.message for record in caplog.records))
        assert stranger.recv(1) == b""
    a.send(B, StepNotice(1, 1, 1, 1))
    await until(lambda: steps == [1])
    assert lost == []


async def test_undecodable_payload_is_dropped_and_the_connection_lives(
    pair: tuple[SeqpacketEndpoint, SeqpacketEndpoint], caplog: pytest.LogCaptureFixture
) -> None:
    _, b = pair
    with raw_connection(b) as stranger, caplog.at_level(logging.ERROR):
        stranger.send(hello("Scheduler"))
        socket.send_fds(stranger, [Header(Kind.MESSAGE, 1, 4, 0, 1).pack() + b"junk"], [0])
        await until(lambda: b.counters()["messages_dropped_total"] == 1)
        with pytest.raises(BlockingIOError):
            stranger.recv(1)


async def test_too_many_descriptors(pair: tuple[SeqpacketEndpoint, SeqpacketEndpoint]) -> None:
    a, _ = pair
    with pytest.raises(PacketError, match=r"254 descriptors.*limit of 253"):
        a.send(B, MailboxShared(1, 1), [0] * 254)


async def test_many_descriptors(pair: tuple[SeqpacketEndpoint, SeqpacketEndpoint]) -> None:
    a, b = pair
    received: list[int] = []
    b.on(MailboxShared, lambda message, fds: received.extend(fds))
    a.send(B, MailboxShared(1, 1), [0] * 253)
    await until(lambda: len(received) == 253)
    for fd in received:
        os.close(fd)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
async def test_other_users_are_refused(
    pair: tuple[SeqpacketEndpoint, SeqpacketEndpoint], caplog: pytest.LogCaptureFixture
) -> None:
    _, b = pair
    name = b.address.removeprefix("seqpacket:")
    code = f"""
import os, socket
os.setuid(65534)
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect("\\0{name}")
assert sock.recv(1) == b""
"""
    with caplog.at_level(logging.WARNING):
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
        assert await asyncio.wait_for(child.wait(), 20) == 0
    assert any("user 65534" in record.message for record in caplog.records)


PEER = """
import asyncio, sys
from freetoken.messages import ActorName, StepNotice, Wiring
from freetoken.transport.seqpacket import SeqpacketEndpoint

async def main():
    endpoint = SeqpacketEndpoint(ActorName.API_FRONT)
    endpoint.on(StepNotice, lambda message, fds: endpoint.send(ActorName.SCHEDULER, message))
    print(endpoint.address, flush=True)
    await endpoint.connect(Wiring(1, {ActorName.SCHEDULER: sys.argv[1], ActorName.API_FRONT: endpoint.address}))
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("stopped_before", [False, True])
async def test_kill_of_a_peer_process(stopped_before: bool) -> None:
    a = SeqpacketEndpoint(A)
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", PEER, a.address, stdout=asyncio.subprocess.PIPE)
    assert child.stdout is not None
    address = (await child.stdout.readline()).decode().strip()
    steps: list[int] = []
    lost: list[ActorName] = []
    a.on(StepNotice, lambda message, fds: steps.append(message.step_id))
    a.on_peer_lost(lost.append)
    await a.connect(Wiring(1, {A: a.address, B: address}))
    a.send(B, StepNotice(1, 1, 1, 1))
    await until(lambda: steps == [1])
    if stopped_before:
        child.send_signal(signal.SIGSTOP)
        for step in range(10_000):
            a.send(B, StepNotice(step, 1, 1, 1))
    child.kill()
    await until(lambda: lost == [B])
    with pytest.raises(PeerLostError):
        a.send(B, StepNotice(2, 1, 1, 1))
    await child.wait()
    await a.close()
