"""All carriers that run within one process, behind one way to make endpoints and to end one as a crash would."""

from __future__ import annotations

import asyncio
import itertools
import random
from concurrent.futures import Future

from freetoken.messages import ActorName, Wiring
from freetoken.transport.base import BaseEndpoint
from freetoken.transport.calls import CallEndpoint, Parcel
from freetoken.transport.inprocess import InProcessHub
from freetoken.transport.seqpacket import SeqpacketEndpoint

CARRIERS = ("inprocess", "inprocess_encoded", "seqpacket", "calls")


class ShufflingCaller:
    """A call layer in this process that runs calls in any order, after any delay within the loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.endpoints: dict[str, CallEndpoint] = {}
        self.lingering: list[tuple[str, Future[None]]] = []
        self.random = random.Random(1)
        self.numbers = itertools.count()

    def endpoint(self, name: ActorName) -> CallEndpoint:
        address = f"call:{next(self.numbers)}"
        endpoint = self.endpoints[address] = CallEndpoint(name, address, self)
        return endpoint

    def deliver(self, address: str, parcel: Parcel) -> Future[None]:
        future: Future[None] = Future()
        self.loop.call_soon_threadsafe(self._run, address, parcel, future, self.random.randrange(4))
        return future

    def _run(self, address: str, parcel: Parcel, future: Future[None], delay: int) -> None:
        if delay:
            self.loop.call_soon(self._run, address, parcel, future, delay - 1)
            return
        try:
            self.endpoints[address].receive(parcel)
            future.set_result(None)
        except Exception as error:
            future.set_exception(error)

    def linger(self, address: str) -> Future[None]:
        future: Future[None] = Future()
        self.lingering.append((address, future))
        if address not in self.endpoints:
            future.set_exception(ConnectionError("no such endpoint"))
        return future

    def end(self, address: str) -> None:
        self.endpoints.pop(address, None)
        for lingering, future in self.lingering:
            if lingering == address and not future.done():
                future.set_exception(ConnectionError("died"))


class Network:
    """Makes endpoints of one carrier, and ends them."""

    def __init__(self, carrier: str) -> None:
        self.carrier = carrier
        self.hub = InProcessHub(encode=carrier == "inprocess_encoded")
        self.caller = ShufflingCaller()
        self.endpoints: list[BaseEndpoint] = []

    def endpoint(self, name: ActorName) -> BaseEndpoint:
        endpoint: BaseEndpoint
        if self.carrier == "seqpacket":
            endpoint = SeqpacketEndpoint(name)
        elif self.carrier == "calls":
            endpoint = self.caller.endpoint(name)
        else:
            endpoint = self.hub.endpoint(name)
        self.endpoints.append(endpoint)
        return endpoint

    async def end(self, endpoint: BaseEndpoint) -> None:
        """What peers see when the endpoint's process ends."""
        await endpoint.close()
        self.caller.end(endpoint.address)

    async def wire(self, epoch: int, *endpoints: BaseEndpoint) -> None:
        wiring = Wiring(epoch, {endpoint.name: endpoint.address for endpoint in endpoints})
        await asyncio.gather(*(endpoint.connect(wiring) for endpoint in endpoints))
