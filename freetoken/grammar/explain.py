"""Where in a JSON schema the part is that cannot be enforced."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from freetoken.grammar.compiler import GrammarCompiler
from freetoken.grammar.errors import GrammarError

_ROOT = "#/$defs/root"
_MAX_TRIALS = 200
_MAX_DEPTH = 64
_BY_NAME = ("properties", "patternProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_UNIMPLEMENTED = re.compile(r'Unimplemented keys: \[(".*")\]')


def explain_schema(compiler: GrammarCompiler, schema: Mapping[str, Any], reason: str) -> GrammarError:
    """``reason`` is why ``schema`` was refused; the error names the innermost part that is refused for the same."""
    root = _rewritten(schema, 0)
    trials = 0
    seen: set[str] = set()

    def reason_at(pointer: str) -> str:
        nonlocal trials
        trials += 1
        if trials > _MAX_TRIALS:
            return ""
        source = {"$ref": f"{_ROOT}{pointer}", "$defs": {"root": root}}
        return compiler.problem(json.dumps({"grammars": [{"json_schema": source}]})).replace(_ROOT[1:], "")

    def innermost(pointer: str, node: Any) -> tuple[str, Any] | None:
        """The part at fault at or below ``pointer``, which is refused; None when all of it was looked at before."""
        seen.add(pointer)
        target = node.get("$ref")
        if isinstance(target, str) and target.removeprefix(_ROOT) in seen:
            return None
        for candidate, child in _children(root, pointer, node):
            if candidate not in seen and reason_at(candidate) == wanted:
                found = innermost(candidate, child)
                if found is not None:
                    return found
        return pointer, node

    wanted = reason_at("")
    pointer, node = (innermost("", root) if wanted else None) or ("", root)
    reason = wanted or reason
    unimplemented = _UNIMPLEMENTED.search(reason)
    if unimplemented:
        keys = json.loads(f"[{unimplemented[1]}]")
        if isinstance(node, dict) and keys[0] in node:
            pointer = f"{pointer}/{_escaped(keys[0])}"
        names = " and ".join(repr(key) for key in keys)
        reason = f"{names} cannot be enforced on generated text"
    elif reason.startswith("oneOf constraints"):
        reason = "the alternatives of 'oneOf' are not seen to exclude each other; use 'anyOf'"
    return GrammarError(reason, pointer)


def _children(root: Any, pointer: str, node: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(node, dict):
        return
    target = node.get("$ref")
    if isinstance(target, str) and target.startswith(_ROOT):
        found = _at(root, target.removeprefix(_ROOT))
        if isinstance(found, dict):
            yield target.removeprefix(_ROOT), found
    for key in _BY_NAME:
        members = node.get(key)
        for name, child in members.items() if isinstance(members, dict) else ():
            if isinstance(child, dict):
                yield f"{pointer}/{key}/{_escaped(name)}", child
    for key in _LISTS:
        members = node.get(key)
        for i, child in enumerate(members) if isinstance(members, list) else ():
            if isinstance(child, dict):
                yield f"{pointer}/{key}/{i}", child
    for key in ("items", "additionalProperties", "additionalItems"):
        if isinstance(node.get(key), dict):
            yield f"{pointer}/{key}", node[key]


def _at(node: Any, pointer: str) -> Any:
    for part in pointer.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            node = node.get(part)
        elif isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        else:
            return None
    return node


def _rewritten(node: Any, depth: int) -> Any:
    """References to the document's own parts lead to where the document will stand."""
    if depth > _MAX_DEPTH:
        return node
    if isinstance(node, list):
        return [_rewritten(item, depth + 1) for item in node]
    if not isinstance(node, dict):
        return node
    out = {}
    for key, value in node.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            out[key] = f"{_ROOT}{value[1:]}"
        elif depth or key not in ("$id", "$schema"):
            out[key] = _rewritten(value, depth + 1)
    return out


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
