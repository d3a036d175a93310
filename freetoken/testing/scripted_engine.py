"""A whole engine with a scripted model, in a process of its own."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freetoken.cli.process import EngineProcess
from freetoken.testing.chat_templates import THINKING
from freetoken.testing.scripted_model import Script, write_scripted_model


@dataclass
class ScriptedEngine:
    """``model`` is where its script lies."""

    process: EngineProcess
    model: Path

    @property
    def url(self) -> str:
        """Where it listens."""
        return self.process.url

    def play(self, script: Script) -> None:
        """From the next answer on."""
        script.write(self.model)


@contextlib.contextmanager
def scripted_engine(
    directory: Path, *arguments: str, template: str = THINKING, **settings: Any
) -> Iterator[ScriptedEngine]:
    """An engine that has said nothing yet. In ``settings`` two underscores stand for a dot."""
    model = write_scripted_model(directory / "tiny", Script(), template=template)
    defaults = {"server.port": 0, "experts.measure": "false", "loader.cache_dir": directory / "cache"}
    chosen = {**defaults, **{key.replace("__", "."): value for key, value in settings.items()}}
    flags = itertools.chain.from_iterable(("--set", f"{key}={value}") for key, value in chosen.items())
    with EngineProcess(
        str(model), *flags, *arguments, module="freetoken.testing.scripted_launch", ready_timeout_s=180
    ) as process:
        yield ScriptedEngine(process, model)
