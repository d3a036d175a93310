"""Per-step messages as Ray calls: the fallback where local sockets do not work."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import ray

from freetoken.messages import ActorName
from freetoken.transport.calls import Parcel

_SCHEME = "ray:"


def call_address(name: ActorName, token: str) -> str:
    """The address of one life of an actor's endpoint."""
    return f"{_SCHEME}{name}:{token}"


class RayCaller:
    """See ``freetoken.transport.calls.Caller``."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._handles: dict[str, Any] = {}
        self._lock = threading.Lock()

    def _find(self, address: str) -> Any:
        with self._lock:
            handle = self._handles.get(address)
            if handle is None:
                name = address.removeprefix(_SCHEME).partition(":")[0]
                handle = self._handles[address] = ray.get_actor(name, self._namespace)
            return handle

    def _call(self, address: str, method: str, *arguments: Any) -> Future[None]:
        try:
            future: Future[None] = getattr(self._find(address), method).remote(address, *arguments).future()
        except ValueError as error:  # no actor of that name
            future = Future()
            future.set_exception(ConnectionError(str(error)))
        return future

    def deliver(self, address: str, parcel: Parcel) -> Future[None]:
        """One message."""
        return self._call(address, "deliver", parcel)

    def linger(self, address: str) -> Future[None]:
        """Done when the actor is."""
        return self._call(address, "linger")
