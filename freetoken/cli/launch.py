"""``freetoken launch MODEL``: prepare, start, show, and stop in order."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from freetoken.cli.live import LiveView, PlainView, View
from freetoken.cli.main import INTERRUPTED
from freetoken.cli.messages import report
from freetoken.cli.tables import print_plan
from freetoken.config.loader import merge, settings_from_flags
from freetoken.engine.bandwidth import with_profile
from freetoken.engine.build import SERVICES, ServiceTable
from freetoken.engine.phases import Phase
from freetoken.engine.plan_model import report_launch
from freetoken.engine.prepare import prepare_launch
from freetoken.engine.runtime import Overview, Runtime
from freetoken.errors import ConfigError, FreeTokenError
from freetoken.launch_spec import LaunchSpec
from freetoken.telemetry import setup_logging
from freetoken.units import parse_bytes

T = TypeVar("T")

# By name: the Ray shell is above this package, and torch-free commands need not import ray.
_RUNTIMES = {"ray": "actors.runtime", "local": "freetoken.engine.local"}
_LOST_S = 60.0
_LOADING_INTERVAL_S = 0.25
_SERVING_INTERVAL_S = 1.0


def add_parser(subparsers: Any) -> None:
    """Register the sub-command."""
    parser = subparsers.add_parser("launch", help="load a model and serve it")
    parser.add_argument("model", metavar="MODEL", help="FTW or Hugging Face directory, GGUF file, hub name, or: demo")
    add_plan_arguments(parser)
    parser.add_argument("--runtime", choices=("ray", "local"), help="actors on Ray, or all in this process")
    parser.add_argument("--host", help="address to listen on (server.host)")
    parser.add_argument("--port", type=int, help="TCP port to listen on (server.port); 0: any")
    parser.add_argument("--detach", action="store_true", help="leave the engine running on its Ray cluster")
    parser.add_argument("--ready-file", type=Path, metavar="PATH", help="write JSON with url and pid once it serves")


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that decide how a model is laid out in memory."""
    parser.add_argument("--device", choices=("cpu", "cuda"), help="where dense layers and cached experts run")
    parser.add_argument("--vram", type=_bytes, metavar="BYTES", help="device memory budget, for example 8GiB")
    parser.add_argument(
        "--split", metavar="HOW", help="missing experts: auto (by live rates), fetch, cpu, q=0.3 (experts.split)"
    )
    parser.add_argument("--profile", metavar="NAME", help="settings profile: a shipped name, or a YAML file")
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="any setting; may be repeated"
    )


def run(args: argparse.Namespace, services: ServiceTable = SERVICES) -> int:
    """Returns the exit status: 0 after an orderly stop. ``services``: what the actors are made of."""
    console = Console()
    try:
        spec = _prepare(args, console)
        runtime = _make_runtime(spec, args.detach, console, services)
    except FreeTokenError as error:
        return report(error)
    except KeyboardInterrupt:
        console.print("interrupted")
        return INTERRUPTED
    view: View = LiveView(console, spec) if console.is_terminal else PlainView(console, spec)
    setup_logging("launch", stream=view.log_stream())
    try:
        return asyncio.run(Launch(runtime, view, args.detach, args.ready_file).run())
    except KeyboardInterrupt:  # in the moment before signals are handled
        runtime.kill()
        return INTERRUPTED


def overrides_of(args: argparse.Namespace) -> dict[str, Any]:
    """Nested settings from the flags; a flag of its own wins over ``--set``. Raises ``ConfigError``."""
    settings = settings_from_flags(args.settings)
    for name in ("device", "vram", "runtime"):
        if getattr(args, name, None) is not None:
            settings[name] = getattr(args, name)
    if getattr(args, "split", None) is not None:
        settings = merge(settings, {"experts": {"split": args.split}})
    server = {name: getattr(args, name) for name in ("host", "port") if getattr(args, name, None) is not None}
    return merge(settings, {"server": server}) if server else settings


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _prepare(args: argparse.Namespace, console: Console) -> LaunchSpec:
    from freetoken.cli.convert import progress_bar

    with progress_bar(console) as bar:
        task: list[Any] = []

        def show(done: int, total: int, what: str) -> None:
            if not task:
                task.append(bar.add_task("", total=None))
            bar.update(task[0], completed=done, total=total or None, description=what)

        spec = prepare_launch(args.model, profile=args.profile, overrides=overrides_of(args), progress=show)
    spec = with_profile(spec, lambda text: console.print(text, highlight=False))
    print_plan(report_launch(spec), console, f"{spec.served_model_name} on {spec.config.device}")
    return spec


def _make_runtime(spec: LaunchSpec, detach: bool, console: Console, services: ServiceTable) -> Runtime:
    module = importlib.import_module(_RUNTIMES[spec.config.runtime])
    if spec.config.runtime == "local":
        if detach:
            raise ConfigError("--detach needs runtime=ray: a local engine lives in this process")
        runtime: Runtime = module.LocalRuntime(spec, services)
    else:
        with console.status("connecting to Ray, or starting it"):
            runtime = module.RayRuntime.connect(spec, detach, services)
    return runtime


class Launch:
    """One engine from its start to its stop. The first SIGINT or SIGTERM stops it in order, the second at once."""

    def __init__(self, runtime: Runtime, view: View, detach: bool = False, ready_file: Path | None = None) -> None:
        self._runtime = runtime
        self._view = view
        self._detach = detach
        self._ready_file = ready_file
        self._started = False
        self._signals = 0
        self._first = asyncio.Event()
        self._second = asyncio.Event()

    async def run(self) -> int:
        """Returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        try:
            with self._view:
                status = await self._serve()
                if status is None:
                    return 0  # detached
                stopped = await self._stop()
                return status if stopped else INTERRUPTED
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
            if self._ready_file is not None and not self._detach:
                self._ready_file.unlink(missing_ok=True)

    def _on_signal(self) -> None:
        self._signals += 1
        (self._first if self._signals == 1 else self._second).set()

    async def _serve(self) -> int | None:
        """Until the engine is to be stopped, with the exit status; None when it is to be left running."""
        try:
            if not await self._unless(self._first, self._runtime.start()):
                return 0
        except FreeTokenError as error:
            self._view.close()
            return report(error)
        self._started = True
        self._view.notes(self._runtime.notes())
        was_ready = False
        lost_since: float | None = None
        while not self._first.is_set():
            overview: list[Overview] = []
            try:
                if not await self._unless(self._first, self._read(overview)):
                    return 0
                lost_since = None
            except FreeTokenError as error:
                now = asyncio.get_running_loop().time()
                lost_since = lost_since or now
                if now - lost_since > _LOST_S:
                    self._view.close()
                    return report(error)
            for newest in overview:
                if newest.phase is Phase.FAILED:
                    self._view.close()
                    return report(newest.failure or FreeTokenError(newest.health.detail))
                self._view.update(newest)
                if newest.phase is Phase.STOPPED:
                    return 0  # by `freetoken stop`
                if newest.phase is Phase.READY and not was_ready:
                    was_ready = True
                    self._tell_ready(newest)
                    if self._detach:
                        return None
            await self._pause(_SERVING_INTERVAL_S if was_ready else _LOADING_INTERVAL_S)
        return 0

    async def _read(self, into: list[Overview]) -> None:
        into.append(await self._runtime.overview(self._view.max_age_s))

    def _tell_ready(self, overview: Overview) -> None:
        self._view.ready(overview)
        if self._ready_file is not None:
            temporary = self._ready_file.with_suffix(".tmp")
            temporary.write_text(json.dumps({"url": overview.url, "pid": os.getpid()}))
            temporary.replace(self._ready_file)

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._first.wait(), seconds)
        except asyncio.TimeoutError:
            pass

    async def _stop(self) -> bool:
        """In order; false when a second signal cut it short."""
        if self._started:
            self._view.stopping()
        try:
            if await self._unless(self._second, self._runtime.stop()):
                return True
        except FreeTokenError as error:
            report(error)
        self._runtime.kill()
        return False

    async def _unless(self, event: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
        """Await ``work``; false when ``event`` came first and the work was cancelled."""
        task = asyncio.ensure_future(work)
        waiter = asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiter.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        if task.cancelled():
            return False
        task.result()
        return True
