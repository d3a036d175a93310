"""Tool declarations and tool choice of the Responses dialect."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from freetoken.serving.errors import bad_value, unsupported
from freetoken.serving.openai_schema import shown
from freetoken.serving.request_id import REQUEST_ID
from freetoken.serving.tools import ToolChoice, ToolGrammar, ToolSpec
from freetoken.serving.toolset import Toolset

logger = logging.getLogger(__name__)

TOOL_SEARCH = "tool_search"
MAX_NAME_CHARACTERS = 256

Key = tuple[str | None, str]
"""A tool by namespace and name."""


@dataclass(slots=True)
class ToolTable:
    """The tools of a request as they are collected: from ``tools``, from input items, from the results of searches.

    A tool that is declared twice stays what it was first. ``declared`` is what the response shows of them.
    """

    specs: dict[Key, ToolSpec] = field(default_factory=dict)
    declared: list[dict[str, Any]] = field(default_factory=list)
    searches: bool = False
    ignored: set[str] = field(default_factory=set)

    def add(self, tools: Iterable[Any], path: str, deferred: bool = False) -> list[ToolSpec]:
        """Read declarations; those of them that can be called. Raises ``ApiError`` (400) for malformed ones; kinds that
        only a hosted service can run are left out, with a warning in the log."""
        added: list[ToolSpec] = []
        for i, tool in enumerate(tools):
            where = f"{path}[{i}]"
            if not isinstance(tool, Mapping):
                raise bad_value(f"{where} is {shown(tool)}: it must be an object with a type", where)
            added += self._add_one(tool, where, deferred)
        return added

    def _add_one(self, tool: Mapping[str, Any], where: str, deferred: bool) -> list[ToolSpec]:
        kind = tool.get("type")
        if kind == "namespace":
            return self._add_namespace(tool, where, deferred)
        if kind == TOOL_SEARCH and tool.get("execution") == "client":
            spec = ToolSpec(TOOL_SEARCH, description=_text(tool, "description", where), schema=_schema(tool, where))
            self.searches = self.searches or (None, TOOL_SEARCH) not in self.specs
            self._take(spec, {**tool})
            return [spec]
        if kind not in ("function", "custom"):
            self._ignore(kind, where)
            return []
        spec, shape = _read(tool, where, None, deferred)
        self._take(spec, shape)
        return [spec]

    def _add_namespace(self, tool: Mapping[str, Any], where: str, deferred: bool) -> list[ToolSpec]:
        namespace = _name(tool, where)
        members = tool.get("tools")
        if not isinstance(members, list):
            raise bad_value(f"{where}.tools is {shown(members)}: it must be a list of tools", f"{where}.tools")
        added, shapes = [], []
        for i, member in enumerate(members):
            inner = f"{where}.tools[{i}]"
            if not isinstance(member, Mapping):
                raise bad_value(f"{inner} is {shown(member)}: it must be an object with a type", inner)
            if member.get("type", "function") not in ("function", "custom"):
                self._ignore(member.get("type"), inner)
                continue
            spec, shape = _read(member, inner, namespace, deferred)
            added.append(spec)
            if self.specs.setdefault((namespace, spec.name), spec) is spec:
                shapes.append(shape)
        if shapes:
            description = _text(tool, "description", where)
            self.declared.append({"type": "namespace", "name": namespace, "description": description, "tools": shapes})
        return added

    def _take(self, spec: ToolSpec, shape: dict[str, Any]) -> None:
        if self.specs.setdefault((spec.namespace, spec.name), spec) is spec:
            self.declared.append(shape)

    def _ignore(self, kind: Any, where: str) -> None:
        if not isinstance(kind, str):
            raise bad_value(f"{where}.type is {shown(kind)}: it must be a string", f"{where}.type")
        if kind not in self.ignored:
            self.ignored.add(kind)
            logger.warning("event=tool_ignored request=%s type=%s path=%s", REQUEST_ID.get(), shown(kind), where)

    def find(self, name: str, namespace: str | None) -> ToolSpec | None:
        """The tool of this name; without a namespace, also the only one of that name in any."""
        exact = self.specs.get((namespace, name))
        if exact is not None or namespace is not None:
            return exact
        matches = [spec for spec in self.specs.values() if spec.name == name]
        return matches[0] if len(matches) == 1 else None

    def flat_name(self, spec: ToolSpec) -> str:
        """The name that the model knows a tool by, which tells members of different namespaces apart."""
        return Toolset(tuple(self.specs.values())).flat_name(spec.name, spec.namespace)


def _read(
    tool: Mapping[str, Any], where: str, namespace: str | None, deferred: bool
) -> tuple[ToolSpec, dict[str, Any]]:
    """One function or custom tool, and its declaration in full form."""
    name = _name(tool, where)
    description = _text(tool, "description", where)
    shape: dict[str, Any] = {"type": tool.get("type", "function"), "name": name, "description": description}
    if tool.get("type") == "custom":
        grammar = _grammar(tool.get("format"), f"{where}.format")
        form: dict[str, Any] = {"type": "text"}
        if grammar is not None:
            form = {"type": "grammar", "syntax": grammar.syntax, "definition": grammar.definition}
        spec = ToolSpec(name, "custom", description, namespace=namespace, grammar=grammar, deferred=deferred)
        return spec, {**shape, "format": form}
    schema = _schema(tool, where)
    spec = ToolSpec(name, "function", description, schema, namespace, deferred=deferred)
    return spec, {**shape, "parameters": schema, "strict": bool(tool.get("strict"))}


def _name(tool: Mapping[str, Any], where: str) -> str:
    name = tool.get("name")
    if name is None:
        raise bad_value(f"{where}.name is required", f"{where}.name", "missing_required_parameter")
    if not isinstance(name, str) or not name or len(name) > MAX_NAME_CHARACTERS:
        raise bad_value(
            f"{where}.name is {shown(name)}: it must be a string of 1 to {MAX_NAME_CHARACTERS} characters",
            f"{where}.name",
        )
    return name


def _text(tool: Mapping[str, Any], key: str, where: str) -> str:
    value = tool.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise bad_value(f"{where}.{key} is {shown(value)}: it must be a string", f"{where}.{key}")
    return value


def _schema(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    value = tool.get("parameters")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise bad_value(f"{where}.parameters is {shown(value)}: it must be a JSON schema", f"{where}.parameters")
    return value


def _grammar(form: Any, where: str) -> ToolGrammar | None:
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, Mapping) else None
    if kind == "text":
        return None
    if not isinstance(form, Mapping) or kind != "grammar":
        raise bad_value(f"{where} is {shown(form)}: its type must be 'text' or 'grammar'", where)
    syntax, definition = form.get("syntax"), form.get("definition")
    if syntax not in ("lark", "regex"):
        raise bad_value(f"{where}.syntax is {shown(syntax)}: it must be 'lark' or 'regex'", f"{where}.syntax")
    if not isinstance(definition, str):
        raise bad_value(f"{where}.definition is {shown(definition)}: it must be a string", f"{where}.definition")
    return ToolGrammar("lark" if syntax == "lark" else "regex", definition)


def read_choice(value: Any, table: ToolTable) -> tuple[ToolChoice, Any]:
    """``tool_choice``, and how the response shows it. Raises ``ApiError`` (400) for tools that are not there."""
    path = "tool_choice"
    if value is None or value == "auto":
        return ToolChoice("auto"), "auto"
    if value == "none":
        return ToolChoice("none"), "none"
    if value == "required":
        if not table.specs:
            raise bad_value("tool_choice is 'required', but there are no tools to call", path)
        return ToolChoice("required"), "required"
    if not isinstance(value, Mapping):
        raise bad_value(
            f"tool_choice is {shown(value)}: it must be 'auto', 'none', 'required' or an object that names tools", path
        )
    kind = value.get("type")
    if kind == "allowed_tools":
        return _allowed(value, table)
    if kind in ("function", "custom", TOOL_SEARCH):
        spec = _named(value, path, table)
        return ToolChoice("named", (table.flat_name(spec),)), {**value}
    if not isinstance(kind, str):
        raise bad_value(f"tool_choice.type is {shown(kind)}: it must be a string", "tool_choice.type")
    raise unsupported(
        f"tool_choice of type {shown(kind)} cannot be enforced; 'function', 'custom' and 'allowed_tools' can", path
    )


def _named(value: Mapping[str, Any], path: str, table: ToolTable) -> ToolSpec:
    name = TOOL_SEARCH if value.get("type") == TOOL_SEARCH else value.get("name")
    if name is None and isinstance(value.get("function"), Mapping):  # as chat completions write it
        name = value["function"].get("name")
    namespace = value.get("namespace")
    if not isinstance(name, str):
        raise bad_value(f"{path}.name is {shown(name)}: it must be the name of a tool", f"{path}.name")
    if namespace is not None and not isinstance(namespace, str):
        raise bad_value(f"{path}.namespace is {shown(namespace)}: it must be a string", f"{path}.namespace")
    spec = table.find(name, namespace)
    if spec is None:
        known = ", ".join(sorted(spec.name for spec in table.specs.values())) or "none"
        raise bad_value(f"{path} names the tool {shown(name)}, which is not among the tools ({known[:300]})", path)
    return spec


def _allowed(value: Mapping[str, Any], table: ToolTable) -> tuple[ToolChoice, Any]:
    mode, tools = value.get("mode", "auto"), value.get("tools")
    if mode not in ("auto", "required"):
        raise bad_value(f"tool_choice.mode is {shown(mode)}: it must be 'auto' or 'required'", "tool_choice.mode")
    if not isinstance(tools, list):
        raise bad_value(f"tool_choice.tools is {shown(tools)}: it must be a list of tools", "tool_choice.tools")
    names: list[str] = []
    for i, tool in enumerate(tools):
        where = f"tool_choice.tools[{i}]"
        if not isinstance(tool, Mapping):
            raise bad_value(f"{where} is {shown(tool)}: it must be an object that names a tool", where)
        kind = tool.get("type", "function")
        if kind in ("function", "custom", TOOL_SEARCH):
            names.append(table.flat_name(_named(tool, where, table)))
    shape = {"type": "allowed_tools", "mode": mode, "tools": [{**tool} for tool in tools]}
    if not names:
        if mode == "required":
            raise bad_value("tool_choice requires a call, but allows no tool that is here", "tool_choice.tools")
        return ToolChoice("none"), shape
    unique = tuple(dict.fromkeys(names))
    return ToolChoice("auto" if mode == "auto" else "required", unique), shape
