"""The seven supervised actors as Ray actors; see ``freetoken.engine.host.ActorHost``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from actors.handles import RayActorHandle, answer
from actors.launch import create_actor, end_actor, find_actor
from actors.settings import GroupSettings
from freetoken.engine.host import DeathCallback
from freetoken.engine.lifecycle import ActorHandle
from freetoken.errors import PeerLostError
from freetoken.launch_spec import LaunchSpec
from freetoken.messages import ACTOR_NAMES, ActorName
from freetoken.tasks import spawn

log = logging.getLogger(__name__)

_NAME_FREE_S = 10.0
_DESCRIBE_S = 5.0
_KILL_S = 5.0


class RayHost:
    """Lives in the Controller's process. ``controller`` is the Controller's own Ray handle, for ApiFront."""

    def __init__(self, settings: GroupSettings, controller: Any) -> None:
        self._settings = settings
        self._controller = controller
        self._callback: DeathCallback | None = None
        self._watches: dict[RayActorHandle, asyncio.Task[None]] = {}

    def on_death(self, callback: DeathCallback) -> None:
        """See ``ActorHost.on_death``. Ray ends the pending ``run`` call some 10 ms after the process."""
        self._callback = callback

    async def create(self, name: ActorName, spec: LaunchSpec, adopt_store: bool) -> RayActorHandle:
        """See ``ActorHost.create``."""
        arguments: dict[str, Any] = {}
        if name is ActorName.WEIGHT_STREAMER:
            arguments["adopt"] = adopt_store
        elif name is ActorName.API_FRONT:
            arguments["controller"] = self._controller
        actor = await self._create_under_free_name(name, spec, arguments)
        try:
            return self._watched(RayActorHandle(name, actor, await answer(name, actor.describe.remote())))
        except BaseException:
            end_actor(actor)
            raise

    async def _create_under_free_name(self, name: ActorName, spec: LaunchSpec, arguments: dict[str, Any]) -> Any:
        deadline = asyncio.get_running_loop().time() + _NAME_FREE_S
        while True:
            try:
                return create_actor(name, spec, self._settings, **arguments)
            except ValueError:  # the predecessor's name is not free yet, or it is still alive
                if asyncio.get_running_loop().time() > deadline:
                    raise
                predecessor = find_actor(name, self._settings.namespace)
                if predecessor is not None:
                    end_actor(predecessor)
                await asyncio.sleep(0.01)

    def _watched(self, handle: RayActorHandle) -> RayActorHandle:
        self._watches[handle] = spawn(self._watch(handle), f"watch of {handle.name}")
        return handle

    async def _watch(self, handle: RayActorHandle) -> None:
        try:
            await handle.run()
            reason = "it closed itself"
        except PeerLostError as error:
            reason = error.detail
        except Exception as error:
            reason = f"run failed: {error}"
        self._watches.pop(handle, None)
        handle.watch.close()
        if self._callback is not None:
            self._callback(handle, reason)

    async def adopt(self) -> Sequence[ActorHandle]:
        """See ``ActorHost.adopt``. Actors that do not answer are ended."""
        found = [(name, find_actor(name, self._settings.namespace)) for name in self._names()]

        async def describe(name: ActorName, actor: Any) -> RayActorHandle | None:
            try:
                info = await asyncio.wait_for(answer(name, actor.describe.remote()), _DESCRIBE_S)
            except Exception as error:
                log.warning("event=not_adopted actor=%s error=%r", name, error)
                end_actor(actor)
                return None
            return self._watched(RayActorHandle(name, actor, info))

        handles = await asyncio.gather(*(describe(name, actor) for name, actor in found if actor is not None))
        return [handle for handle in handles if handle is not None]

    async def kill(self, handle: ActorHandle) -> None:
        """See ``ActorHost.kill``. SIGKILL, since a stopped process obeys nothing else; then Ray is told."""
        assert isinstance(handle, RayActorHandle)
        handle.watch.kill()
        end_actor(handle.actor)
        try:
            await asyncio.wait_for(handle.watch.wait(), _KILL_S)
        except asyncio.TimeoutError:
            log.error("event=not_killed actor=%s pid=%d", handle.name, handle.pid)
        handle.watch.close()

    def sweep(self) -> None:
        """End whatever carries one of the seven names, known or not."""
        for name in self._names():
            actor = find_actor(name, self._settings.namespace)
            if actor is not None:
                log.warning("event=swept actor=%s", name)
                end_actor(actor)

    @staticmethod
    def _names() -> list[ActorName]:
        return [name for name in ACTOR_NAMES if name is not ActorName.CONTROLLER]
