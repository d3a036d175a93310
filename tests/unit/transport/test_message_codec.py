"""Encoding, the restricted decoder, and packets."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest

from freetoken.messages import (
    ActorName,
    ActorState,
    ActorStatus,
    FinishReason,
    SamplingParams,
    StepNotice,
    SubmitRequest,
    TokenBatch,
    TokenDelta,
    Wiring,
)
from freetoken.transport import codec
from freetoken.transport.codec import HEADER, Assembler, Header, Kind, PacketError

MESSAGES = [
    StepNotice(1, 2, 3, 4, last=True),
    SubmitRequest("a", tuple(range(1000)), SamplingParams(logit_bias=((1, 2.5),)), comes_back=True),
    TokenBatch(1, 1, (TokenDelta("r", (1,), finish_reason=FinishReason.STOP),)),
    ActorStatus(ActorName.CONTROLLER, ActorState.SERVING, 1, 2, 3.0, metrics={"a_total": 1.0}),
    Wiring(3, {ActorName.SCHEDULER: "x"}),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message: object) -> None:
    assert codec.decode(codec.encode(message)) == message


def test_enum_members_stay_singletons() -> None:
    status = codec.decode(codec.encode(MESSAGES[3]))
    assert status.name is ActorName.CONTROLLER
    assert status.state is ActorState.SERVING


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("true",)


@pytest.mark.parametrize(
    "payload",
    [
        pickle.dumps(Evil()),
        pickle.dumps(getattr),
        pickle.dumps(os.path.join),
        pickle.dumps(3),
        pickle.dumps(int),
        b"",
        b"junk",
        codec.encode(MESSAGES[1])[:-5],
    ],
)
def test_decoder_admits_only_messages(payload: bytes) -> None:
    with pytest.raises(PacketError):
        codec.decode(payload)


@pytest.mark.parametrize("field", [np.int64(1), int, print, object()])
def test_foreign_values_fail_at_the_sender(field: object) -> None:
    with pytest.raises(PacketError, match="StepNotice cannot be sent"):
        codec.encode(StepNotice(field, 1, 1, 1))  # type: ignore[arg-type]


def test_what_is_no_message_fails_at_the_sender() -> None:
    with pytest.raises(PacketError, match="not a message class"):
        codec.encode({"a": 1})


@pytest.mark.parametrize("size", [0, 1, 83, 84, 85, 168, 169, 1000])
def test_packets_join_again(size: int) -> None:
    payload = os.urandom(size)
    packets = codec.split(payload, Kind.MESSAGE, 7, 2, 84 + HEADER.size)
    assert all(len(packet) <= 84 + HEADER.size for packet in packets)
    assembler = Assembler()
    outcomes = []
    for index, packet in enumerate(packets):
        header = codec.parse_header(packet)
        assert (header.epoch, header.num_fds) == (7, 2 if index == 0 else 0)
        outcomes.append(assembler.add(header, memoryview(packet)[HEADER.size :]))
    assert outcomes[:-1] == [None] * (len(packets) - 1)
    assert outcomes[-1] == payload


def test_pieces_out_of_place_are_refused() -> None:
    def header(offset: int, total: int = 10) -> Header:
        return Header(Kind.MESSAGE, 1, total, offset, 0)

    with pytest.raises(PacketError):
        Assembler().add(header(4), memoryview(b"1234"))
    for second in (header(0), header(5), header(4, total=11)):
        assembler = Assembler()
        assert assembler.add(header(0), memoryview(b"1234")) is None
        with pytest.raises(PacketError):
            assembler.add(second, memoryview(b"1234"))
    assembler = Assembler()
    assembler.add(header(0), memoryview(b"1234"))
    with pytest.raises(PacketError):
        assembler.add(header(4), memoryview(b"1234567"))


@pytest.mark.parametrize("packet", [b"", b"x" * 3, b"\0" * HEADER.size, HEADER.pack(codec.MAGIC, 1, 9, 0, 0, 0, 0, 0)])
def test_foreign_packets_are_refused(packet: bytes) -> None:
    with pytest.raises(PacketError):
        codec.parse_header(packet)


def test_message_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", 100)
    with pytest.raises(PacketError, match="exceeds the limit of 100"):
        codec.encode(MESSAGES[1])
    with pytest.raises(PacketError, match="exceeds the limit of 100"):
        codec.parse_header(HEADER.pack(codec.MAGIC, 1, 2, 0, 101, 0, 0, 0))
