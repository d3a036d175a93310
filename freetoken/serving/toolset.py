"""The tools of one request under the names the model knows them by."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from freetoken.serving.tools import ToolChoice, ToolSpec

_SEPARATORS = re.compile(r"__|[./:]")


def qualified(namespace: str, name: str) -> str:
    """The name of a namespace's member where its inner name alone is taken."""
    return f"{namespace}__{name}"


class Toolset:
    """Models call functions by one plain name. A namespace's member goes by its inner name, or by ``namespace__name``
    where another tool has that name; ``find`` maps back what the model wrote.

    ``flat`` are all tools under these names (without namespaces), in the request's order, the first of two that are
    declared twice; ``visible`` those that the prompt's tools section shows, ``callable`` those the model may call.
    """

    def __init__(self, tools: Sequence[ToolSpec], choice: ToolChoice | None = None) -> None:
        choice = choice or ToolChoice()
        distinct = dict.fromkeys((tool.namespace, tool.name) for tool in tools)
        shared = Counter(name for _, name in distinct)
        self._names: dict[tuple[str | None, str], str] = {}
        self._tools: dict[str, ToolSpec] = {}
        for tool in tools:
            key = (tool.namespace, tool.name)
            clash = tool.namespace is not None and shared[tool.name] > 1
            name = qualified(tool.namespace or "", tool.name) if clash else tool.name
            self._names.setdefault(key, name)
            self._tools.setdefault(name, tool)
        self.flat = tuple(replace(tool, name=name, namespace=None) for name, tool in self._tools.items())
        self.visible = () if choice.mode == "none" else tuple(tool for tool in self.flat if not tool.deferred)
        allowed = set(choice.names) if choice.names else None
        self.callable = tuple(
            flat
            for flat, tool in zip(self.flat, self._tools.values(), strict=True)
            if choice.mode != "none" and (allowed is None or flat.name in allowed or tool.name in allowed)
        )

    def __len__(self) -> int:
        return len(self._tools)

    def flat_name(self, name: str, namespace: str | None = None) -> str:
        """How the model knows a tool that a client names; tools of earlier turns may not be declared any more."""
        known = self._names.get((namespace, name))
        if known is not None:
            return known
        if namespace is None or self._names.get((None, name)) is None:
            return name
        return qualified(namespace, name)

    def by_name(self, flat_name: str) -> ToolSpec | None:
        """A tool under its flat name."""
        for tool in self.flat:
            if tool.name == flat_name:
                return tool
        return None

    def find(self, written: str) -> ToolSpec | None:
        """The declared tool that the model means by ``written``, also when it wrote ``ns.name`` or ``ns__name``."""
        found = self._tools.get(written)
        if found is not None:
            return found
        for match in _SEPARATORS.finditer(written):
            namespace, name = written[: match.start()], written[match.end() :]
            for tool in self._tools.values():
                if tool.name == name and tool.namespace == namespace:
                    return tool
        return None
