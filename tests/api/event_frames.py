"""What the checkers of all dialects share: the frames of an event stream, and judging by a vendor's own types."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError


@dataclass(frozen=True)
class Frame:
    """One event: its ``event:`` line (None without one) and its joined ``data:`` lines."""

    name: str | None
    data: str


def frames_of(raw: bytes) -> tuple[list[Frame], list[str]]:
    """The frames of a whole stream, comments left out, and what is wrong with the framing."""
    problems: list[str] = []
    if raw and not raw.endswith(b"\n\n"):
        problems.append("the stream ends inside an event")
    frames: list[Frame] = []
    for block in raw.decode("utf-8").split("\n\n"):
        name: str | None = None
        data: list[str] = []
        for line in block.split("\n"):
            if line.startswith("event:"):
                name = line[6:].strip()
            elif line.startswith("data:"):
                data.append(line[5:].removeprefix(" "))
            elif line and not line.startswith(":"):
                problems.append(f"a line that is no field of an event: {line[:80]!r}")
        if data:
            frames.append(Frame(name, "\n".join(data)))
    return frames, problems


def event_classes(union: Any) -> dict[str, type[BaseModel]]:
    """The classes of an SDK's union of events by their ``type``."""
    if isinstance(union, type) and issubclass(union, BaseModel):
        return dict.fromkeys(typing.get_args(union.model_fields["type"].annotation), union)
    found: dict[str, type[BaseModel]] = {}
    for member in typing.get_args(union):
        if typing.get_args(member) or isinstance(member, type):
            found.update(event_classes(member))
    return found


def _unknown_fields(value: Any, extras: Set[str], path: str = "") -> Iterator[str]:
    if isinstance(value, BaseModel):
        for name in set(value.model_extra or {}) - extras:
            yield f"{path}.{name}"
        for name in type(value).model_fields:
            yield from _unknown_fields(getattr(value, name, None), extras, f"{path}.{name}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _unknown_fields(item, extras, f"{path}[{i}]")


def strict(model: type[BaseModel], value: Any, extras: Set[str]) -> tuple[Any, list[str]]:
    """``value`` as the vendor's type, and what is wrong with it: all fields are required, and none but ``extras`` may
    be unknown (the SDKs themselves construct leniently)."""
    try:
        parsed = model.model_validate(value)
    except ValidationError as error:
        return None, [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:5]]
    return parsed, [f"{name} is unknown to {model.__name__}" for name in _unknown_fields(parsed, extras)]
