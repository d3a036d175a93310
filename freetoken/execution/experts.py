"""Where the routed experts of a layer run: through the mailbox (serving), or straight from the store (tests, tools)."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from freetoken import _native
from freetoken.messages import ExpertCounters

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]


class ExpertRunner(Protocol):
    """Computes one expert layer for a step at a time. Called from the step thread only."""

    def begin_step(self, step_id: int) -> None:
        """A step starts; the counters restart from zero."""
        ...

    def run(self, ordinal: int, hidden: F32, ids: I32, weights: F32, admit: U8) -> F32:
        """hidden [T, H] float32, ids [T, K] int32, weights [T, K] float32, admit [T] uint8 -> [T, H] float32."""
        ...

    def step_counters(self) -> ExpertCounters:
        """Figures since ``begin_step``."""
        ...

    def resized(self, num_slots: int) -> None:
        """Between steps: the arena has so many slots from now on."""
        ...


class MailboxExperts:
    """The CPU device's side of the mailbox. Belongs to one epoch."""

    def __init__(self, client: _native.DeviceClient) -> None:
        self._client = client

    def begin_step(self, step_id: int) -> None:
        self._client.begin_step(step_id)

    def run(self, ordinal: int, hidden: F32, ids: I32, weights: F32, admit: U8) -> F32:
        """Raises ``TimeoutError`` naming the late party, ``RuntimeError`` when the mailbox was aborted."""
        out = np.empty_like(hidden)
        self._client.forward(ordinal, hidden, ids, weights, admit, out)
        return out

    def step_counters(self) -> ExpertCounters:
        return ExpertCounters(**self._client.step_counters())

    def resized(self, num_slots: int) -> None:
        self._client.set_num_slots(num_slots)


class StoreExperts:
    """Every expert in place, in this process; nothing is cached, so every use counts as a hit."""

    def __init__(self, pool: _native.WorkerPool, store: _native.ExpertStore, deterministic: bool = False) -> None:
        self._pool = pool
        self._store = store
        self._deterministic = deterministic
        self._hits = 0
        self._layers = 0

    def begin_step(self, step_id: int) -> None:
        self._hits = 0
        self._layers = 0

    def run(self, ordinal: int, hidden: F32, ids: I32, weights: F32, admit: U8) -> F32:
        out = np.empty_like(hidden)
        _native.expert_ffn(self._pool, self._store, ordinal, hidden, ids, weights, out, self._deterministic)
        self._hits += len(np.unique(ids))
        self._layers += 1
        return out

    def step_counters(self) -> ExpertCounters:
        return ExpertCounters(hits=self._hits, layer_steps=self._layers)

    def resized(self, num_slots: int) -> None:
        return


class NoExperts:
    """Answers zeros. For dense models, and for warming up before the mailbox is served."""

    def begin_step(self, step_id: int) -> None:
        return

    def run(self, ordinal: int, hidden: F32, ids: I32, weights: F32, admit: U8) -> F32:
        return np.zeros_like(hidden)

    def step_counters(self) -> ExpertCounters:
        return ExpertCounters()

    def resized(self, num_slots: int) -> None:
        return
