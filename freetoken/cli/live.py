"""What ``freetoken launch`` shows: a live picture on a terminal, lines elsewhere."""

from __future__ import annotations

import abc
import io
import sys
from types import TracebackType
from typing import ClassVar, TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from freetoken.cli.figures import TokenRate, actor_row, experts_line, kv_line, requests_line
from freetoken.engine.phases import Phase
from freetoken.engine.runtime import Overview
from freetoken.launch_spec import LaunchSpec
from freetoken.messages import ActorState
from freetoken.units import format_bytes

_STATE_STYLES = {
    ActorState.SERVING: "green",
    ActorState.DEAD: "bold red",
    ActorState.PAUSED: "yellow",
    ActorState.STOPPED: "dim",
}


class View(abc.ABC):
    """Told what happens, in this order: notes, updates with one ``ready`` among them, stopping, close.

    ``max_age_s``: how old the figures in an update may be.
    """

    max_age_s: ClassVar[float] = 0.0

    def __init__(self, console: Console, spec: LaunchSpec) -> None:
        self.console = console
        self.spec = spec

    def __enter__(self) -> View:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def line(self, text: str) -> None:
        """One line of text, as it is."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def log_stream(self) -> TextIO:
        """Where log lines go."""
        return sys.stderr

    def notes(self, lines: list[str]) -> None:
        """Where things are."""
        for text in lines:
            self.line(text)

    @abc.abstractmethod
    def update(self, overview: Overview) -> None:
        """The newest state."""

    def ready(self, overview: Overview) -> None:
        """It answers requests for the first time."""
        self.line(f"{self.spec.served_model_name} is ready at {overview.url}/v1 (OpenAI API)")

    @abc.abstractmethod
    def stopping(self) -> None:
        """The stop began."""

    def close(self) -> None:
        """Nothing more will come; idempotent."""
        return


_SMALLEST_LOAD_BYTES = 4096


class PlainView(View):
    """A line for every change that matters; reads no figures."""

    max_age_s: ClassVar[float] = 10.0

    def __init__(self, console: Console, spec: LaunchSpec) -> None:
        super().__init__(console, spec)
        self._last = ""
        self._decile = -1

    def update(self, overview: Overview) -> None:
        health = overview.health
        if overview.phase is Phase.STARTING:
            decile = 10 * health.done_bytes // health.total_bytes if health.total_bytes else -1
            if decile > self._decile:
                self._decile = decile
                self.line(f"loading {health.what}: {_progress_text(health.done_bytes, health.total_bytes)}")
        elif (text := f"{health.state}{': ' * bool(health.detail)}{health.detail}") != self._last:
            is_first = not self._last and overview.phase is Phase.READY  # `ready` has its own line
            self._last = text
            if not is_first:
                self.line(text)

    def stopping(self) -> None:
        self.line("stopping")


class _AboveTheView(io.TextIOBase):
    """A text stream that ends up above the live picture."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def write(self, text: str) -> int:
        self._console.out(text, end="", highlight=False)
        return len(text)


class LiveView(View):
    """Loading bars, then status. What is printed meanwhile appears above it."""

    def __init__(self, console: Console, spec: LaunchSpec) -> None:
        super().__init__(console, spec)
        self._live: Live | None = None
        self._rate = TokenRate()
        self._is_stopping = False

    def log_stream(self) -> TextIO:
        return cast(TextIO, _AboveTheView(self.console))

    def update(self, overview: Overview) -> None:
        if self._is_stopping:
            return
        starting = overview.phase is Phase.STARTING
        self._show(self._loading(overview) if starting else self._status(overview))

    def stopping(self) -> None:
        self._is_stopping = True
        self._show(Text("stopping in order (Ctrl-C again: at once)", style="yellow"))

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _show(self, renderable: RenderableType) -> None:
        if self._live is None:
            self._live = Live(console=self.console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(renderable, refresh=True)

    def _loading(self, overview: Overview) -> RenderableType:
        health = overview.health
        bar = ProgressBar(total=health.total_bytes or None, completed=health.done_bytes, pulse=not health.total_bytes)
        line = Table.grid(padding=(0, 1))
        line.add_row(bar, Text(f"{health.what} {_progress_text(health.done_bytes, health.total_bytes)}"))
        return Group(Text(f"loading {self.spec.served_model_name}: {health.detail}"), line)

    def _status(self, overview: Overview) -> RenderableType:
        health = overview.health
        figures = Table.grid(padding=(0, 2))
        ready = overview.phase is Phase.READY
        figures.add_row(
            "state", Text(f"{health.state} {health.detail}".rstrip(), style="bold green" if ready else "bold red")
        )
        figures.add_row("model", Text(self.spec.served_model_name))
        figures.add_row("API", Text(f"{overview.url}/v1" if overview.url else "-", style="bold"))
        figures.add_row("requests", Text(requests_line(overview, self._rate.update(overview))))
        if self.spec.model.is_moe:
            figures.add_row("experts", Text(experts_line(overview)))
        figures.add_row("KV cache", Text(kv_line(overview)))
        return Group(figures, actor_table(overview), Text("Ctrl-C stops the engine", style="dim"))


def actor_table(overview: Overview) -> Table:
    """Every actor's state."""
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for column in ("actor", "state", "process", "epoch", "restarts", "detail"):
        table.add_column(column)
    for status in overview.actors:
        name, state, *rest = actor_row(status)
        table.add_row(name, Text(state, style=_STATE_STYLES.get(status.state, "")), *map(Text, rest))
    return table


def _progress_text(done_bytes: int, total_bytes: int) -> str:
    if total_bytes < _SMALLEST_LOAD_BYTES:  # not bytes, but graphs being captured
        return f"{done_bytes} of {total_bytes}" if total_bytes else ""
    return f"{format_bytes(done_bytes)} of {format_bytes(total_bytes)}"
