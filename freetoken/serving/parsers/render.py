"""The reverse of parsing: calls as the model would have written them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from freetoken.serving.parsers.arguments import dump, json_members, load
from freetoken.serving.parsers.format import CallSyntax


def render_calls(syntax: CallSyntax, calls: Sequence[tuple[str, str]]) -> str:
    """The text of one or more calls, each a name and the JSON text of an object. Raises ``ValueError`` for more calls
    than the format can have, and ``MalformedError`` if arguments are no object."""
    if not calls or (len(calls) > 1 and not syntax.parallel):
        raise ValueError(f"{len(calls)} calls where the format has {'one or more' if syntax.parallel else 'one'}")
    written = syntax.separator.join(render_call(syntax, name, arguments) for name, arguments in calls)
    return syntax.section_begin + written + syntax.section_end


def render_call(syntax: CallSyntax, name: str, arguments: str) -> str:
    """The text of one call without what stands around all of them."""
    address = syntax.address + name if syntax.address else ""
    return address + syntax.begin + name + syntax.after_name + _body(syntax, arguments) + syntax.end


def _body(syntax: CallSyntax, arguments: str) -> str:
    members = json_members(arguments)
    if syntax.body == "json":
        return arguments
    if syntax.body == "object":
        return _notation(load(arguments), syntax.quote)
    if syntax.body == "elements":
        return _elements(load(arguments), syntax.prefix)
    parts = []
    for key, spelled in members.items():
        value = load(spelled)
        is_string = isinstance(value, str)
        middle = syntax.after_string if is_string else syntax.after_json
        parts.append(syntax.parameter_begin + key + middle + (value if is_string else spelled) + syntax.parameter_end)
    return "".join(parts)


def _notation(value: Any, quote: str) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_notation(member, quote)}" for key, member in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_notation(item, quote) for item in value) + "]"
    return f"{quote}{value}{quote}" if isinstance(value, str) else dump(value)


def _elements(value: Any, prefix: str) -> str:
    if isinstance(value, dict):
        named = [(key, member) for key, member in value.items() if member is not None]
    elif isinstance(value, list):
        named = [("item", item) for item in value]
    else:
        return value if isinstance(value, str) else dump(value)
    return "".join(f"{prefix}<{key}>{_elements(member, prefix)}{prefix}</{key}>" for key, member in named)
