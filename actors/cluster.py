"""Finding a Ray cluster to attach to, or starting one."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shlex
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from freetoken.config.schema import RayConfig
from freetoken.errors import FreeTokenError

log = logging.getLogger(__name__)

AUTH_MODE = "RAY_AUTH_MODE"
_CONNECT_S = 5.0
_LOCAL_ENVIRONMENT = {
    # Ray's default, 15, would let any other process starve the executors.
    "RAY_worker_niceness": "0",
    "RAY_worker_oom_score_adjustment": "0",
    # The store may be most of the machine's memory, on purpose.
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_DASHBOARD_ENABLE_PROFILING": "1",
}


class ClusterError(FreeTokenError):
    """The cluster cannot be reached, or cannot run the engine. The message says what to do."""


@dataclass(frozen=True, slots=True)
class LocalNode:
    """A Ray node process of this user on this machine, and how it was set up."""

    pid: int
    address: str
    python: str
    auth_mode: str


@dataclass(frozen=True, slots=True)
class Cluster:
    """A connected cluster. ``python`` is set when actors must be told to use this interpreter."""

    address: str
    node_id: str
    started_here: bool
    dashboard_url: str
    python: str | None
    token_auth: bool


def local_nodes() -> Iterator[LocalNode]:
    """Raylets of this user. Their command lines tell the cluster's address and interpreter, their environment the
    authentication mode, which a client has to share."""
    for process in psutil.process_iter(["name", "uids"]):
        try:
            if process.info["name"] != "raylet" or process.info["uids"].effective != os.geteuid():
                continue
            arguments = dict(argument.lstrip("-").partition("=")[::2] for argument in process.cmdline())
            command = shlex.split(arguments.get("python_worker_command", ""))
            mode = process.environ().get(AUTH_MODE, "disabled")
        except (psutil.Error, ValueError):
            continue
        if "gcs-address" in arguments:
            yield LocalNode(process.pid, arguments["gcs-address"], command[0] if command else "", mode)


def recorded_address() -> str:
    """The address that ``ray start`` left for others, if the file is this user's; empty if there is none."""
    path = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / "ray" / "ray_current_cluster"
    try:
        return path.read_text().strip() if path.stat().st_uid == os.geteuid() else ""
    except OSError:
        return ""


def find_address(config: RayConfig, any_local: bool = False) -> str:
    """The cluster to attach to; empty when there is none.

    Only what the user named, and clusters that this user made with ``ray start`` and that still run: a machine may be
    shared, and the private cluster of another program is no place for an engine. ``any_local`` accepts those too, if
    there is exactly one: to look at an engine, not to start one.
    """
    named = config.address or os.environ.get("RAY_ADDRESS", "")
    if named and named not in ("auto", "local"):
        return named
    if named == "local":
        return ""
    running = {node.address for node in local_nodes()}
    recorded = recorded_address()
    if recorded in running:
        return recorded
    if any_local and len(running) == 1:
        return running.pop()
    if named == "auto":
        raise ClusterError(
            "no running Ray cluster of this user was found (ray.address=auto); start one: ray start --head"
        )
    return ""


def attach(address: str, namespace: str) -> Cluster:
    """Connect to a running cluster. Raises ``ClusterError``."""
    _check_listening(address)
    node = next((node for node in local_nodes() if node.address == address), None)
    if node is not None and AUTH_MODE not in os.environ:
        _use_auth_mode(node.auth_mode)
    context = _init(address=address, namespace=namespace)
    same_python = node is None or not node.python or _same_environment(node.python)
    return _describe(context, address, started_here=False, python=None if same_python else sys.executable)


def _check_listening(address: str) -> None:
    """Ray itself would try for many minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "//" in host:
        raise ClusterError(f"Ray address {address!r} is not HOST:PORT (or auto, or local)")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except OSError as error:
        raise ClusterError(f"no Ray cluster answers at {address}: {error.strerror or error}") from error


def _use_auth_mode(mode: str) -> None:
    """Ray never changes its mode for a named address, and reads the variable when it is imported, which may be long
    ago; with the wrong mode it tries for 20 s to connect, or connects and cannot create actors."""
    import ray

    os.environ[AUTH_MODE] = mode
    settings = getattr(ray._raylet, "Config", None)
    if settings is not None:
        settings.initialize("")  # reads the environment again, as ray.init does for addresses that it found itself


def start_local(config: RayConfig, dashboard: bool | None = None) -> Cluster:
    """Start a cluster that ends with this process."""
    for name, value in _LOCAL_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    others = psutil.Process().children()
    try:
        context = _init(
            address="local",
            namespace=config.namespace,
            include_dashboard=config.dashboard if dashboard is None else dashboard,
            object_store_memory=max(config.object_store_bytes, 80 * 1024**2),
        )
    except BaseException:
        _end_children(others)
        raise
    return _describe(context, context.address_info["gcs_address"], started_here=True, python=None)


def _end_children(spared: Sequence[psutil.Process]) -> None:
    """End a cluster that is half started. Ray ends its daemons itself, but agents that a raylet has only just started
    outlive it."""
    daemons = [process for process in psutil.Process().children() if process not in spared]
    for process in daemons:  # from here on they start nothing
        with contextlib.suppress(psutil.Error):
            process.suspend()
    family = list(daemons)
    for process in daemons:
        with contextlib.suppress(psutil.Error):
            family += process.children(recursive=True)
    for process in family:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(daemons, timeout=_CONNECT_S)


def connect(config: RayConfig) -> Cluster:
    """Attach to a running cluster, else start one."""
    address = find_address(config)
    return attach(address, config.namespace) if address else start_local(config)


def is_connected() -> bool:
    """Whether this process is part of a cluster."""
    import ray

    return bool(ray.is_initialized())


def disconnect() -> None:
    """Leave the cluster; one that was started here ends."""
    import ray

    ray.shutdown()


def _init(**arguments: Any) -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # a call after the end must fail, not start a cluster of its own
    import ray

    try:
        context = ray.init(log_to_driver=False, logging_level=logging.ERROR, configure_logging=True, **arguments)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise ClusterError(
            f"the Ray cluster at {arguments['address']} cannot be used: {error}. If it was started with another "
            f"authentication mode, set {AUTH_MODE}=token or {AUTH_MODE}=disabled"
        ) from error
    _silence_worker_deaths()
    return context


def _silence_worker_deaths() -> None:
    """Ray prints a paragraph for every worker that dies; the engine tells it in a line, and recovers. There is no
    setting for this; where the function is not found, the paragraphs stay."""
    from ray._private import worker

    printer = getattr(worker, "print_to_stdstream", None)
    if printer is None or hasattr(printer, "__wrapped__"):
        return

    @functools.wraps(printer)
    def print_others(data: dict[str, Any], *arguments: Any, **keywords: Any) -> None:
        if not any(str(line).startswith("A worker died or was killed") for line in data.get("lines", ())):
            printer(data, *arguments, **keywords)

    worker.print_to_stdstream = print_others


def _same_environment(python: str) -> bool:
    return Path(python).parent.absolute() == Path(sys.executable).parent.absolute()


def _describe(context: Any, address: str, started_here: bool, python: str | None) -> Cluster:
    import ray

    return Cluster(
        address=address,
        node_id=ray.get_runtime_context().get_node_id(),
        started_here=started_here,
        dashboard_url=context.dashboard_url or "",
        python=python,
        token_auth=os.environ.get(AUTH_MODE, "").lower() == "token",
    )
