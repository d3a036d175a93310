"""What every carrier promises (``freetoken.transport.Endpoint``), one body for all of them."""

from __future__ import annotations

import asyncio
import logging
import os
import threading

import pytest

from freetoken.errors import PeerLostError
from freetoken.messages import (
    ActorName,
    MailboxShared,
    SamplingParams,
    StepNotice,
    SubmitRequest,
    Wiring,
)
from freetoken.testing.carriers import Network
from freetoken.testing.waiting import until
from freetoken.transport.base import BaseEndpoint
from freetoken.transport.codec import PacketError

A, B, C = ActorName.SCHEDULER, ActorName.API_FRONT, ActorName.GPU_EXECUTOR


def notice(step_id: int, epoch: int = 1) -> StepNotice:
    return StepNotice(step_id, epoch, 1, 1)


def collect(endpoint: BaseEndpoint) -> list[int]:
    steps: list[int] = []
    endpoint.on(StepNotice, lambda message, fds: steps.append(message.step_id))
    return steps


async def pair(network: Network) -> tuple[BaseEndpoint, BaseEndpoint]:
    a, b = network.endpoint(A), network.endpoint(B)
    await network.wire(1, a, b)
    return a, b


async def test_messages_arrive_in_order_both_ways(network: Network) -> None:
    a, b = await pair(network)
    at_a, at_b = collect(a), collect(b)
    for step in range(300):
        a.send(B, notice(step))
        b.send(A, notice(1000 + step))
    await until(lambda: len(at_a) == 300 and len(at_b) == 300)
    assert at_b == list(range(300))
    assert at_a == list(range(1000, 1300))
    assert a.counters()["messages_sent_total"] == 300
    assert a.counters()["messages_received_total"] == 300
    assert a.counters()["bytes_sent_total"] > 0


async def test_send_never_delivers_within_the_call(network: Network) -> None:
    a, b = await pair(network)
    at_b = collect(b)
    a.send(B, notice(1))
    assert at_b == []
    await until(lambda: at_b == [1])


async def test_large_messages_keep_their_place(network: Network) -> None:
    a, b = await pair(network)
    arrived: list[str] = []
    prompt = tuple(range(300_000))
    b.on(SubmitRequest, lambda message, fds: arrived.append(f"prompt {message.prompt_token_ids == prompt}"))
    b.on(StepNotice, lambda message, fds: arrived.append(f"step {message.step_id}"))
    for step in range(3):
        a.send(B, notice(step))
        a.send(B, SubmitRequest("r", prompt, SamplingParams()))
    await until(lambda: len(arrived) == 6)
    assert arrived == ["step 0", "prompt True", "step 1", "prompt True", "step 2", "prompt True"]


async def test_send_from_many_threads(network: Network) -> None:
    a, b = await pair(network)
    arrived: list[tuple[int, int]] = []
    b.on(StepNotice, lambda message, fds: arrived.append((message.num_tokens, message.step_id)))
    threads = [
        threading.Thread(target=lambda n=n: [a.send(B, StepNotice(step, 1, n, 1)) for step in range(200)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    await until(lambda: len(arrived) == 800)
    for thread in threads:
        thread.join()
    for n in range(4):
        assert [step for sender, step in arrived if sender == n] == list(range(200))


async def test_descriptors_are_duplicated(network: Network) -> None:
    a, b = await pair(network)
    received: list[int] = []
    b.on(MailboxShared, lambda message, fds: received.extend(fds))
    memory = [os.memfd_create(f"m{i}") for i in range(3)]
    for i, fd in enumerate(memory):
        os.pwrite(fd, b"%d" % i, 0)
    a.send(B, MailboxShared(1, 1), memory)
    for fd in memory:
        os.close(fd)
    await until(lambda: len(received) == 3)
    assert [os.pread(fd, 1, 0) for fd in received] == [b"0", b"1", b"2"]
    os.pwrite(received[0], b"x", 0)
    for fd in received:
        os.close(fd)


async def test_coroutine_handlers_run_and_errors_do_not_stop_the_endpoint(
    network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = await pair(network)
    done: list[int] = []

    async def handler(message: StepNotice, fds: tuple[int, ...]) -> None:
        await asyncio.sleep(0)
        if message.step_id == 0:
            raise ValueError("a coroutine failed")
        done.append(message.step_id)

    def failing(message: MailboxShared, fds: tuple[int, ...]) -> None:
        raise ValueError("a function failed")

    b.on(StepNotice, handler)
    b.on(MailboxShared, failing)
    a.send(B, notice(0))
    a.send(B, MailboxShared(1, 1))
    a.send(B, notice(1))
    with caplog.at_level(logging.ERROR):
        await until(lambda: done == [1] and len(caplog.records) == 2)
    assert {str(record.exc_info[1]) for record in caplog.records if record.exc_info} == {
        "a coroutine failed",
        "a function failed",
    }


async def test_message_without_handler_is_dropped_with_its_descriptors(network: Network) -> None:
    a, b = await pair(network)
    a.send(B, MailboxShared(1, 1), [0])
    await until(lambda: b.counters()["messages_dropped_total"] == 1)


async def test_messages_before_own_connect_are_held(network: Network) -> None:
    a, b = network.endpoint(A), network.endpoint(B)
    wiring = Wiring(1, {A: a.address, B: b.address})
    at_b = collect(b)
    received: list[int] = []
    b.on(MailboxShared, lambda message, fds: received.extend(fds))
    await a.connect(wiring)
    a.send(B, notice(1))
    a.send(B, MailboxShared(1, 1), [0])
    a.send(B, notice(2))
    await asyncio.sleep(0)
    assert at_b == []
    await b.connect(wiring)
    assert at_b == []  # nothing is handled before the caller of connect goes on
    await until(lambda: at_b == [1, 2] and len(received) == 1)
    os.close(received[0])


async def test_newer_epoch_is_held_and_older_dropped(network: Network) -> None:
    a, b = await pair(network)
    at_a, at_b = collect(a), collect(b)
    second = Wiring(2, {A: a.address, B: b.address})
    await a.connect(second)
    b.send(A, MailboxShared(1, 1), [0])  # still epoch 1: dropped by a
    b.send(A, notice(1))
    a.send(B, notice(10, 2))  # epoch 2: held by b
    a.send(B, notice(11, 2))
    await until(lambda: a.counters()["messages_dropped_total"] == 2)
    assert (at_a, at_b) == ([], [])
    await b.connect(second)
    b.send(A, notice(2, 2))
    a.send(B, notice(12, 2))
    await until(lambda: at_b == [10, 11, 12] and at_a == [2])


async def test_held_messages_of_a_skipped_epoch_are_dropped(network: Network) -> None:
    a, b = await pair(network)
    at_b = collect(b)
    addresses = {A: a.address, B: b.address}
    await a.connect(Wiring(2, addresses))
    a.send(B, MailboxShared(2, 1), [0])
    a.send(B, notice(1, 2))
    await a.connect(Wiring(3, addresses))
    a.send(B, notice(2, 3))
    await b.connect(Wiring(3, addresses))
    await until(lambda: at_b == [2])
    assert b.counters()["messages_dropped_total"] == 2


async def test_old_epoch_cannot_be_entered_again(network: Network) -> None:
    a, b = await pair(network)
    await network.wire(3, a, b)
    with pytest.raises(PacketError, match="older"):
        await a.connect(Wiring(2, {A: a.address}))


async def test_waiting_for_an_epoch(network: Network) -> None:
    a, b = network.endpoint(A), network.endpoint(B)
    second, third = (asyncio.ensure_future(a.wait_for_epoch(epoch)) for epoch in (2, 3))
    await network.wire(1, a, b)
    assert not second.done()
    await network.wire(3, a, b)
    with pytest.raises(PacketError, match="past epoch 2"):
        await second
    await third
    await a.wait_for_epoch(3)


async def test_unknown_peer(network: Network) -> None:
    a, _ = await pair(network)
    with pytest.raises(PeerLostError, match="not in the wiring"):
        a.send(C, notice(1))


async def test_send_before_connect(network: Network) -> None:
    a = network.endpoint(A)
    with pytest.raises(PeerLostError):
        a.send(B, notice(1))


async def test_lost_peer_is_reported_once_and_sends_fail(network: Network) -> None:
    a, b, c = network.endpoint(A), network.endpoint(B), network.endpoint(C)
    await network.wire(1, a, b, c)
    lost: list[ActorName] = []
    a.on_peer_lost(lost.append)
    at_c = collect(c)
    a.send(B, notice(1))
    b.send(A, notice(1))
    await network.end(b)
    await until(lambda: lost == [B])
    with pytest.raises(PeerLostError):
        a.send(B, notice(2))
    a.send(C, notice(3))
    await until(lambda: at_c == [3])
    assert lost == [B]


async def test_replaced_peer_in_a_new_epoch(network: Network) -> None:
    a, b = await pair(network)
    lost: list[ActorName] = []
    a.on_peer_lost(lost.append)
    await network.end(b)
    await until(lambda: lost == [B])
    successor = network.endpoint(B)
    at_successor, at_a = collect(successor), collect(a)
    await network.wire(2, a, successor)
    a.send(B, notice(1, 2))
    successor.send(A, notice(2, 2))
    await until(lambda: at_successor == [1] and at_a == [2])
    assert lost == [B]
    await network.end(successor)
    await until(lambda: lost == [B, B])


async def test_replaced_peer_within_an_epoch(network: Network) -> None:
    a, b, c = network.endpoint(A), network.endpoint(B), network.endpoint(C)
    await network.wire(5, a, b, c)
    lost: list[ActorName] = []
    a.on_peer_lost(lost.append)
    at_c = collect(c)
    await network.end(b)
    await until(lambda: lost == [B])
    successor = network.endpoint(B)
    at_successor = collect(successor)
    a.send(C, notice(1, 5))
    await network.wire(5, a, successor, c)
    a.send(C, notice(2, 5))
    a.send(B, notice(3, 5))
    await until(lambda: at_c == [1, 2] and at_successor == [3])
    await network.end(successor)
    await until(lambda: lost == [B, B])


async def test_peer_that_cannot_be_reached_counts_as_lost(network: Network) -> None:
    a, b = network.endpoint(A), network.endpoint(B)
    wiring = Wiring(1, {A: a.address, B: b.address})
    await network.end(b)
    lost: list[ActorName] = []
    a.on_peer_lost(lost.append)
    await a.connect(wiring)
    await until(lambda: lost == [B])
    with pytest.raises(PeerLostError):
        a.send(B, notice(1))


async def test_close_is_idempotent_and_final(network: Network) -> None:
    a, _ = await pair(network)
    await a.close()
    await a.close()
    with pytest.raises(PacketError, match="closed"):
        await a.connect(Wiring(2, {}))
    with pytest.raises(PeerLostError):
        a.send(B, notice(1))


async def test_close_without_connect(network: Network) -> None:
    await network.endpoint(A).close()
