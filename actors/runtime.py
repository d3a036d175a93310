"""An engine on Ray, as its launcher (or a later ``freetoken status``) sees it."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

from actors import cluster
from actors.cluster import Cluster, ClusterError
from actors.handles import ControllerClient, answer
from actors.launch import create_actor, end_actor, find_actor, find_group
from actors.process import ProcessWatch, identify
from actors.settings import GroupSettings, ProcessId
from actors.shell import ActorInfo
from freetoken.config.schema import RayConfig
from freetoken.engine.build import SERVICES, ServiceTable
from freetoken.engine.members import SupervisionPolicy
from freetoken.engine.runtime import Overview
from freetoken.errors import FreeTokenError, PeerLostError
from freetoken.launch_spec import LaunchSpec
from freetoken.messages import ActorName
from freetoken.telemetry.logs import ENVIRONMENT_VARIABLE as LOG_LEVEL

log = logging.getLogger(__name__)

_CREATE_S = 120.0
_OVERVIEW_S = 10.0
_STOP_S = 90.0
_GONE_S = 10.0


def engine_running(namespace: str) -> FreeTokenError:
    """What to tell someone who launches twice."""
    return FreeTokenError(
        f"an engine is already running in the Ray namespace {namespace!r}: end it with 'freetoken stop', or choose "
        "another namespace with --set ray.namespace=NAME"
    )


class RayRuntime:
    """See ``freetoken.engine.runtime.Runtime``. Made where Ray is connected already (``connect``)."""

    def __init__(
        self,
        spec: LaunchSpec,
        connected: Cluster,
        launcher: ProcessId | None,
        services: ServiceTable = SERVICES,
        policy: SupervisionPolicy | None = None,
    ) -> None:
        """``launcher``: whose death ends the engine. ``services`` and ``policy`` are for tests."""
        self._spec = spec
        self._cluster = connected
        self._launcher = launcher
        self._services = services
        self._policy = policy
        self._silence_s = (policy or SupervisionPolicy.from_config(spec.config.health)).ping_timeout_s
        self._controller: ProcessId | None = None
        self._warning = ""
        self._client: ControllerClient | None = None

    @classmethod
    def connect(cls, spec: LaunchSpec, detach: bool = False, services: ServiceTable = SERVICES) -> RayRuntime:
        """Attach to a cluster or start one; blocks for some seconds. Raises ``FreeTokenError``."""
        if detach and not cluster.find_address(spec.config.ray):
            raise ClusterError(
                "--detach needs a Ray cluster that outlives this command; start one first: ray start --head"
            )
        return cls(spec, cluster.connect(spec.config.ray), None if detach else identify(os.getpid()), services)

    @property
    def _namespace(self) -> str:
        return self._spec.config.ray.namespace

    async def start(self) -> None:
        """See ``Runtime.start``."""
        self._check_resources()
        if find_group(self._namespace):
            raise engine_running(self._namespace)
        settings = GroupSettings(
            namespace=self._namespace,
            node_id=self._cluster.node_id,
            transport=self._spec.config.ray.transport,
            launcher=self._launcher,
            python=self._cluster.python,
            services=dict(self._services),
            policy=self._policy,
            log_level=os.environ.get(LOG_LEVEL, ""),
        )
        try:
            actor = create_actor(ActorName.CONTROLLER, self._spec, settings)
        except ValueError:  # someone was faster
            raise engine_running(self._namespace) from None
        self._client = ControllerClient(actor)
        try:
            info: ActorInfo = await asyncio.wait_for(answer(ActorName.CONTROLLER, actor.describe.remote()), _CREATE_S)
        except (PeerLostError, asyncio.TimeoutError) as error:
            end_actor(actor)
            raise ClusterError(
                f"the Controller could not be started: {error or f'no answer within {_CREATE_S:g} s'}"
            ) from error
        self._warning = info.warning
        self._controller = info.process

    def _check_resources(self) -> None:
        if self._spec.config.device != "cuda":
            return
        import ray

        if ray.cluster_resources().get("GPU", 0.0) < 1.0:
            raise ClusterError("device=cuda, but the Ray cluster has no GPU (ray start --head --num-gpus=1)")

    def notes(self) -> list[str]:
        """See ``Runtime.notes``."""
        where = (
            "a Ray cluster of its own" if self._cluster.started_here else f"the Ray cluster at {self._cluster.address}"
        )
        lines = [f"actors run on {where}, namespace {self._namespace!r}"]
        if self._cluster.dashboard_url:
            token = " (token: ray get-auth-token)" if self._cluster.token_auth else ""
            lines.append(f"dashboard: http://{self._cluster.dashboard_url}{token}")
        if self._warning:
            lines.append(f"warning: {self._warning}")
        return lines

    async def overview(self, max_age_s: float = 0.0) -> Overview:
        """See ``Runtime.overview``."""
        if self._client is None:
            raise FreeTokenError("the engine was not started")
        try:
            overview = await read_overview(self._client, max_age_s, self._silence_s)
        except ControllerSilentError:
            self._end_silent_controller()
            raise
        status = overview.of(ActorName.CONTROLLER)
        self._controller = identify(status.pid) if status is not None else None
        return overview

    def _end_silent_controller(self) -> None:
        """The Controller watches the others, its launcher watches it. Ray restarts it, and nothing else notices."""
        if self._controller is not None:
            log.warning("event=controller_silent pid=%d limit_s=%g", self._controller.pid, self._silence_s)
            watch = ProcessWatch(self._controller)
            watch.kill()
            watch.close()
            self._controller = None

    async def stop(self) -> None:
        """See ``Runtime.stop``. Also leaves the cluster, unless cancelled; ``kill`` may follow then."""
        try:
            if self._client is not None:
                await stop_engine(self._namespace)
        except Exception:
            cluster.disconnect()
            raise
        cluster.disconnect()

    def kill(self) -> None:
        """See ``Runtime.kill``."""
        if self._client is not None and cluster.is_connected():
            kill_engine(self._namespace)
        cluster.disconnect()


class ControllerSilentError(FreeTokenError):
    """The Controller's process may be there, but it does not answer."""


async def read_overview(client: ControllerClient, max_age_s: float = 0.0, limit_s: float = _OVERVIEW_S) -> Overview:
    """The Controller's overview. Raises ``ControllerSilentError``, or ``PeerLostError`` while it is being restarted."""
    try:
        return await asyncio.wait_for(client.overview(max_age_s), limit_s)
    except asyncio.TimeoutError:
        raise ControllerSilentError(f"the Controller did not answer within {limit_s:g} s") from None


async def stop_engine(namespace: str) -> bool:
    """End the engine in ``namespace`` in order, and whatever is left of it by force. False when there was none."""
    group = find_group(namespace)
    controller = group.get(ActorName.CONTROLLER)
    watch: ProcessWatch | None = None
    if controller is not None:
        try:
            info: ActorInfo = await asyncio.wait_for(
                answer(ActorName.CONTROLLER, controller.describe.remote()), _OVERVIEW_S
            )
            watch = ProcessWatch(info.process)
            await asyncio.wait_for(ControllerClient(controller).stop(), _STOP_S)
        except (FreeTokenError, asyncio.TimeoutError) as error:
            log.warning("event=disorderly_stop error=%r", error)
    kill_engine(namespace)
    await _until_gone(namespace)
    if watch is not None:
        await _until_ended(watch)
    return bool(group)


async def _until_ended(watch: ProcessWatch) -> None:
    """The Controller's process; it ended the others'."""
    try:
        await asyncio.wait_for(watch.wait(), _GONE_S)
    except asyncio.TimeoutError:
        watch.kill()
    finally:
        watch.close()


def kill_engine(namespace: str) -> None:
    """End every actor of the engine at once; the Controller first, lest it repairs what is being torn down."""
    for actor in find_group(namespace).values():
        end_actor(actor)


async def _until_gone(namespace: str) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _GONE_S
    while find_group(namespace):
        if loop.time() > deadline:
            log.error("event=actors_left names=%s", ",".join(find_group(namespace)))
            return
        await asyncio.sleep(0.02)


class AttachedEngine:
    """A running engine that somebody else launched: for ``freetoken status`` and ``freetoken stop``."""

    def __init__(self, config: RayConfig) -> None:
        """Connect. Raises ``FreeTokenError`` when there is no cluster or no engine."""
        address = cluster.find_address(config, any_local=True)
        if not address:
            raise ClusterError("no running Ray cluster of this user was found, so there is no engine either")
        cluster.attach(address, config.namespace)
        self.namespace = config.namespace
        self._controller: Any | None = find_actor(ActorName.CONTROLLER, config.namespace)

    async def overview(self) -> Overview:
        """Raises ``FreeTokenError`` when no engine runs in the namespace, or it does not answer."""
        if self._controller is None:
            raise FreeTokenError(f"no engine is running in the Ray namespace {self.namespace!r}")
        return await read_overview(ControllerClient(self._controller))

    async def stop(self) -> bool:
        """End it. False when there was none."""
        return await stop_engine(self.namespace)

    def close(self) -> None:
        """Leave the cluster."""
        cluster.disconnect()
