"""A Controller and seven fake actors in this process, which a test can watch and disturb."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from freetoken.engine.controller import ControllerService
from freetoken.engine.members import SupervisionPolicy
from freetoken.engine.phases import Phase
from freetoken.messages import ActorName
from freetoken.testing.fake_host import FakeHost
from freetoken.testing.fake_services import FakeApiFront, StoreHolder, count_reads, fake_spec
from freetoken.testing.waiting import until
from freetoken.transport.inprocess import InProcessHub

POLICY = SupervisionPolicy(ping_interval_s=None)


class FakeGroup:
    """``start`` begins it; ``replace_controller`` is a Controller's death and return."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.spec = fake_spec(directory)
        self.hub = InProcessHub(encode=True)
        self.host = FakeHost(self.hub)
        self.policy = POLICY
        self.controller = self._new_controller()

    def _new_controller(self) -> ControllerService:
        endpoint = self.hub.endpoint(ActorName.CONTROLLER)
        self.controller = ControllerService(self.spec, endpoint, self.host, self.policy)
        self.host.control = self.controller
        return self.controller

    def limit(self, **limits: Any) -> None:
        """Change the policy, before ``start``."""
        self.policy = dataclasses.replace(self.policy, **limits)
        old = self.controller
        self.hub.remove(old.endpoint)  # type: ignore[arg-type]
        self._new_controller()

    def start(self) -> None:
        """Begin."""
        self.controller.start()

    async def until_phase(self, phase: Phase) -> None:
        """Wait for the supervisor's phase."""
        await until(lambda: self.controller.supervisor.phase is phase)

    async def until_answering(self, epoch: int) -> None:
        """Wait until a request went through all actors in ``epoch``."""

        def answering() -> bool:
            front = self.service(ActorName.API_FRONT)
            return isinstance(front, FakeApiFront) and front.epoch == epoch and front.metrics()["answered_in_epoch"] > 0

        await until(answering)
        await self.until_phase(Phase.READY)

    async def until_answering_again(self) -> None:
        """Wait until a request went through all actors in whatever epoch is the newest."""

        def answering() -> bool:
            supervisor, front = self.controller.supervisor, self.service(ActorName.API_FRONT)
            return (
                supervisor.phase is Phase.READY
                and isinstance(front, FakeApiFront)
                and front.epoch == supervisor.epoch
                and front.metrics()["answered_in_epoch"] > 0
            )

        await until(answering)

    def service(self, name: ActorName) -> Any:
        """The living service of that name, or None."""
        handle = self.host.living.get(name)
        return None if handle is None else handle.runner.service

    def store_inodes(self) -> set[int]:
        """Of the store as every holder sees it."""
        names = (ActorName.WEIGHT_STREAMER, ActorName.CPU_EXECUTOR, ActorName.GPU_EXECUTOR)
        services = [self.service(name) for name in names]
        return {int(service.metrics()["store_inode"]) for service in services if isinstance(service, StoreHolder)}

    @property
    def reads(self) -> int:
        """How often the store was read."""
        return count_reads(self.directory)

    async def replace_controller(self) -> None:
        """The Controller dies without a word, and a new one takes over."""
        supervisor = self.controller.supervisor
        await supervisor.abandon()
        await self.controller.close()
        self._new_controller().start(adopt=True)

    async def stop(self) -> None:
        """Orderly, whatever state it is in."""
        self.host.hanging.clear()
        self.host.failing.clear()
        await self.controller.stop()
