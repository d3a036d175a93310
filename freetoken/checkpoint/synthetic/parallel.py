"""Work on several threads with bounded memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def for_each(function: Callable[[T], object], items: Iterable[T], num_threads: int) -> None:
    """Call ``function`` with every item, on ``num_threads`` threads. After an exception (also of the calling thread) no
    further item is begun; the first one is raised when the running calls have ended."""
    iterator: Iterator[T | object] = iter(items)
    end = object()
    lock = threading.Lock()
    stop = threading.Event()

    def work() -> None:
        try:
            while not stop.is_set():
                with lock:
                    item = next(iterator, end)
                if item is end:
                    return
                function(item)  # type: ignore[arg-type]
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(num_threads, "synth") as pool:
        try:
            for future in [pool.submit(work) for _ in range(num_threads)]:
                future.result()
        finally:
            stop.set()


def ordered_map(pool: Executor, function: Callable[[T], R], items: Iterable[T], ahead: int) -> Iterator[R]:
    """Results in the order of ``items``; at most ``ahead`` of them exist at a time."""
    pending: deque[Future[R]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) >= ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()
