"""A process's hold on the store: the segments behind ``StoreShared``, mapped once and handed on when asked.

The store lives as long as anyone holds its descriptors. WeightStreamer fills it; CpuExecutor, GpuExecutor and
Controller hold it, so that a new WeightStreamer can take it over from any of them instead of reading the checkpoint
again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import numpy as np

from freetoken._native import ExpertStore, SharedSegment
from freetoken.checkpoint.ftw import FtwIndex
from freetoken.errors import CheckpointError, FreeTokenError
from freetoken.messages import ActorName, SegmentInfo, StoreShared
from freetoken.quant.native_layout import native_layout
from freetoken.transport import Endpoint


class HeldStore:
    """``segments[i]`` mirrors data file i of the checkpoint's index. Used on one event loop; ``segments`` may be read
    by other threads. Memory is given back when the last holder and the last native user of a segment let go of it."""

    def __init__(self, checkpoint: str, fingerprint: str, segments: Iterable[SharedSegment]) -> None:
        """For the one who fills the store. Each segment's ``name`` is its data file's name."""
        self.checkpoint = checkpoint
        self.fingerprint = fingerprint
        self.segments: tuple[SharedSegment, ...] = tuple(segments)
        self._closed = False

    @classmethod
    def adopt(cls, message: StoreShared, fds: Sequence[int]) -> HeldStore:
        """Map what another holder shared. Takes over ``fds`` and closes them, also when it raises.

        Raises ``FreeTokenError`` when descriptors and message differ in number, ``OSError`` when a segment is smaller
        than announced.
        """
        try:
            if len(fds) != len(message.segments):
                raise FreeTokenError(
                    f"the store has {len(message.segments)} segments, but {len(fds)} descriptors came with it"
                )
            segments = [
                SharedSegment.attach(fd, info.size_bytes, info.file_name)
                for fd, info in zip(fds, message.segments, strict=True)
            ]
        finally:
            close_fds(fds)
        return cls(message.checkpoint, message.fingerprint, segments)

    @property
    def is_complete(self) -> bool:
        """Whether there is something to use and to share."""
        return bool(self.segments) and not self._closed

    @property
    def size_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.size_bytes for segment in self.segments)

    def is_same(self, message: StoreShared, fds: Sequence[int]) -> bool:
        """Whether ``message`` shares this very memory, not merely the same weights read once more."""
        return (
            self.is_complete
            and message.fingerprint == self.fingerprint
            and message.segments == self._infos()
            and [_identity(fd) for fd in fds] == [_identity(segment.fd) for segment in self.segments]
        )

    def share(self, endpoint: Endpoint, to: ActorName, epoch: int) -> None:
        """Send the descriptors to ``to``. Raises ``PeerLostError`` when it is gone, ``FreeTokenError`` when nothing is
        held."""
        if not self.is_complete:
            raise FreeTokenError("no store is held any more")
        message = StoreShared(epoch, self.checkpoint, self.fingerprint, self._infos())
        endpoint.send(to, message, [segment.fd for segment in self.segments])

    def build_expert_store(self, index: FtwIndex) -> ExpertStore:
        """Addresses of all records. Raises ``CheckpointError`` when ``index`` describes other data files."""
        files = tuple(SegmentInfo(file.name, file.size_bytes) for file in index.files)
        if index.fingerprint != self.fingerprint or files != self._infos():
            raise CheckpointError(
                f"{index.path}: the index (fingerprint {index.fingerprint}) does not belong to the store that was "
                f"loaded from {self.checkpoint} (fingerprint {self.fingerprint}); was the checkpoint replaced?"
            )
        return ExpertStore(
            self.segments,
            [native_layout(layout) for layout in index.layouts],
            index.layer_layout,
            np.ascontiguousarray(index.record_file, np.int32),
            np.ascontiguousarray(index.record_offset, np.int64),
        )

    def close(self) -> None:
        """Let go; idempotent. Native users keep the segments that they use."""
        self._closed = True
        self.segments = ()

    def _infos(self) -> tuple[SegmentInfo, ...]:
        return tuple(SegmentInfo(segment.name, segment.size_bytes) for segment in self.segments)


def receive_store(held: HeldStore | None, message: StoreShared, fds: Sequence[int]) -> HeldStore:
    """The store to hold from now on: ``held`` itself when the same memory came again, else a new one (the caller closes
    the old one when nothing needs it). Takes over ``fds``; raises like ``HeldStore.adopt``."""
    if held is not None and held.is_same(message, fds):
        close_fds(fds)
        return held
    return HeldStore.adopt(message, fds)


def close_fds(fds: Iterable[int]) -> None:
    """Close descriptors that came with a message."""
    for fd in fds:
        os.close(fd)


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
