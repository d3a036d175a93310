"""Messages as bytes: pickle protocol 5, read back by an unpickler that knows the message classes and nothing else.

A packet is ``HEADER`` followed by a piece of the pickled message. Messages that do not fit one packet are cut into
consecutive packets of the same connection, so a packet needs to say only how long the message is and where its piece
belongs.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import io
import pickle
import pkgutil
import struct
from functools import lru_cache
from typing import Any, NamedTuple

import freetoken.messages
from freetoken.errors import FreeTokenError

MAGIC = 0xF7E1
HEADER = struct.Struct("<HBBIIIHH")  # magic, version, kind, epoch, total bytes, offset, descriptors, spare
VERSION = 1
MAX_MESSAGE_BYTES = 64 * 1024**2
MAX_FDS = 253  # SCM_MAX_FD of Linux


class Kind(enum.IntEnum):
    """What a packet is."""

    HELLO = 1
    MESSAGE = 2


class PacketError(FreeTokenError):
    """Bytes that are not a packet of this protocol, or a message that may not cross actors."""


class Header(NamedTuple):
    """One packet's header. ``offset`` is 0 for the first packet of a message; only that one carries descriptors."""

    kind: Kind
    epoch: int
    total_bytes: int
    offset: int
    num_fds: int

    def pack(self) -> bytes:
        """The header's ``HEADER.size`` bytes."""
        return HEADER.pack(MAGIC, VERSION, self.kind, self.epoch, self.total_bytes, self.offset, self.num_fds, 0)


def parse_header(packet: memoryview | bytes) -> Header:
    """The header at the start of ``packet``. Raises ``PacketError``."""
    if len(packet) < HEADER.size:
        raise PacketError(f"a packet of {len(packet)} bytes is shorter than its header ({HEADER.size})")
    magic, version, kind, epoch, total, offset, num_fds, _ = HEADER.unpack_from(packet)
    if magic != MAGIC or version != VERSION:
        raise PacketError(f"magic {magic:#x} version {version} is not {MAGIC:#x} version {VERSION}")
    if total > MAX_MESSAGE_BYTES:
        raise PacketError(f"a message of {total} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
    try:
        return Header(Kind(kind), epoch, total, offset, num_fds)
    except ValueError as error:
        raise PacketError(str(error)) from None


@lru_cache(maxsize=1)
def _message_classes() -> dict[tuple[str, str], type]:
    """Every dataclass and enum defined under ``freetoken.messages``, by the name pickle uses."""
    classes: dict[tuple[str, str], type] = {}
    package = freetoken.messages
    for info in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        for value in vars(importlib.import_module(info.name)).values():
            if isinstance(value, type) and value.__module__ == info.name and _is_message_class(value):
                classes[(info.name, value.__qualname__)] = value
    return classes


def _is_message_class(value: type) -> bool:
    return dataclasses.is_dataclass(value) or issubclass(value, enum.Enum)


def _check_message_class(cls: type) -> None:
    if (cls.__module__, cls.__qualname__) not in _message_classes():
        raise PacketError(f"{cls.__module__}.{cls.__qualname__} is not a message class")


class _MessagePickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Refuse at the sender what the receiver would refuse; a numpy scalar among the ids is the usual case."""
        cls = value if isinstance(value, type) else type(value)
        _check_message_class(cls)
        if isinstance(value, enum.Enum):
            # Some Python versions pickle members through builtins.getattr, which the unpickler must never admit.
            return cls, (value.value,)
        return NotImplemented


class _MessageUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        try:
            return _message_classes()[(module, name)]
        except KeyError:
            raise PacketError(f"{module}.{name} is not a message class") from None


def encode(message: Any) -> bytes:
    """``message`` as bytes. Raises ``PacketError`` for what is no message, cannot be pickled or is too long."""
    cls = type(message)
    _check_message_class(cls)
    buffer = io.BytesIO()
    try:
        _MessagePickler(buffer, protocol=5).dump(message)
    except PacketError as error:
        raise PacketError(f"{cls.__name__} cannot be sent: {error}") from None
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise PacketError(f"{cls.__name__} cannot be sent: {error}") from error
    payload = buffer.getvalue()
    if len(payload) > MAX_MESSAGE_BYTES:
        raise PacketError(f"{cls.__name__} of {len(payload)} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
    return payload


def decode(payload: bytes | bytearray | memoryview) -> Any:
    """The message in ``payload``. Raises ``PacketError`` for anything that is not made of message classes."""
    try:
        message = _MessageUnpickler(io.BytesIO(payload)).load()
    except PacketError:
        raise
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise PacketError(f"undecodable message: {type(error).__name__}: {error}") from error
    _check_message_class(type(message))
    return message


def split(payload: bytes, kind: Kind, epoch: int, num_fds: int, packet_bytes: int) -> list[bytes]:
    """``payload`` as packets of at most ``packet_bytes`` each, header included; at least one."""
    room = packet_bytes - HEADER.size
    if len(payload) <= room:
        return [Header(kind, epoch, len(payload), 0, num_fds).pack() + payload]
    return [
        Header(kind, epoch, len(payload), offset, num_fds if offset == 0 else 0).pack()
        + payload[offset : offset + room]
        for offset in range(0, len(payload), room)
    ]


class Assembler:
    """Puts the packets of one connection together again. Descriptors of unfinished messages are the caller's matter:
    they belong to the message whose first packet brought them."""

    def __init__(self) -> None:
        self._buffer: bytearray | None = None
        self._filled = 0

    def add(self, header: Header, piece: memoryview) -> bytes | bytearray | None:
        """The whole payload once its last packet is in, else None. Raises ``PacketError`` when pieces do not fit."""
        if header.offset == 0:
            if self._buffer is not None:
                raise PacketError("a message began before the last one was complete")
            if len(piece) == header.total_bytes:
                return bytes(piece)
            self._buffer, self._filled = bytearray(header.total_bytes), 0
        buffer = self._buffer
        if (
            buffer is None
            or header.offset != self._filled
            or header.total_bytes != len(buffer)
            or self._filled + len(piece) > len(buffer)
        ):
            raise PacketError(f"piece at {header.offset} of {header.total_bytes} does not follow the last one")
        buffer[self._filled : self._filled + len(piece)] = piece
        self._filled += len(piece)
        if self._filled < len(buffer):
            return None
        self._buffer = None
        return buffer
