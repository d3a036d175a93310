"""Holding and handing on the store's segments."""

import dataclasses
import os

import numpy as np
import pytest

from freetoken.checkpoint.held_store import HeldStore, close_fds, receive_store
from freetoken.errors import CheckpointError, FreeTokenError
from freetoken.testing.waiting import open_fds


def test_adopt_maps_the_same_memory_and_takes_the_descriptors(store, store_message, index):
    before = open_fds()
    message, fds = store_message()
    assert [segment.file_name for segment in message.segments] == [file.name for file in index.files]
    held = HeldStore.adopt(message, fds)
    assert held.is_complete and held.size_bytes == index.store_bytes
    held_bytes = [bytes(memoryview(segment)) for segment in held.segments]
    assert held_bytes == [(index.path / file.name).read_bytes() for file in index.files]
    held.close()
    held.close()
    assert not held.is_complete and held.size_bytes == 0
    assert open_fds() == before


def test_the_same_memory_is_recognised(store, store_message, load_store, index):
    message, fds = store_message()
    held = receive_store(None, message, fds)
    before = open_fds()
    message, fds = store_message(epoch=2)
    assert receive_store(held, message, fds) is held
    assert open_fds() == before
    other = load_store(index)
    message, fds = store_message(other)
    assert not held.is_same(message, fds)
    assert receive_store(held, message, fds) is not held


def test_what_does_not_fit_is_refused_and_closed(store_message):
    message, fds = store_message()
    before = open_fds()
    copies = tuple(os.dup(fd) for fd in fds)
    with pytest.raises(FreeTokenError, match="descriptors"):
        HeldStore.adopt(message, copies[1:])
    os.close(copies[0])
    copies = tuple(os.dup(fd) for fd in fds)
    grown = [dataclasses.replace(segment, size_bytes=1 << 40) for segment in message.segments]
    with pytest.raises(OSError):
        HeldStore.adopt(dataclasses.replace(message, segments=tuple(grown)), copies)
    assert open_fds() == before
    close_fds(fds)


def test_expert_store_has_every_record(store, index):
    native = store.build_expert_store(index)
    assert (native.num_layers, native.num_experts) == index.record_file.shape
    other = dataclasses.replace(index, fingerprint="0123")
    with pytest.raises(CheckpointError, match="0123"):
        store.build_expert_store(other)
    fewer = dataclasses.replace(index, files=index.files[:-1])
    with pytest.raises(CheckpointError, match="does not belong"):
        store.build_expert_store(fewer)


def test_a_closed_store_cannot_be_shared(store_message):
    held = HeldStore.adopt(*store_message())
    view = np.frombuffer(memoryview(held.segments[0]), np.uint8)
    held.close()
    assert view.size and view[:16].sum() >= 0  # users keep their memory
    with pytest.raises(FreeTokenError, match="no store"):
        store_message(held)
