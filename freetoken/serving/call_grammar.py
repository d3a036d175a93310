"""Grammars of tool calls: any call of the callable tools, spelled as the model's family spells calls, with arguments
that follow the tools' schemas. In llguidance's Lark; see ``CallSyntax`` for the spellings."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from freetoken.grammar.compiler import escape_slashes, json_source
from freetoken.serving.tools import ToolSpec

if TYPE_CHECKING:
    from freetoken.serving.parsers.format import CallSyntax

logger = logging.getLogger(__name__)

Literal = Callable[[str], str]
"""A text as a Lark expression (``Vocabulary.literal``)."""
IsUsable = Callable[[Any], bool]
"""Whether a JSON schema (as ``json_source`` gives it) can be enforced."""

CUSTOM_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""What arguments of a custom tool look like where all arguments are JSON."""
_SPACE = "SPACE: /[ \\n\\r\\t]{1,16}/"
_ANY_TEXT = "/(?s:.*)/"
_MAX_DEPTH = 8
_SCALARS = ("string", "integer", "number", "boolean", "null")


class CallGrammar:
    """Collects the rules of one grammar."""

    def __init__(self, syntax: CallSyntax, literal: Literal, is_usable: IsUsable) -> None:
        self._syntax = syntax
        self._literal = literal
        self._is_usable = is_usable
        self._rules: list[str] = []
        self._count = 0

    def text(self, tools: Sequence[ToolSpec], parallel: bool) -> str:
        """The Lark grammar of one call of ``tools``, or with ``parallel`` (where the format has that) of one or more.

        Parts of a schema that cannot be enforced are not, and the log says so: the schema of a tool is advice to the
        model, and an agent must not fail for it.
        """
        syntax = self._syntax
        calls = [self._call(tool) for tool in tools]
        call = self._rule(" | ".join(calls))
        # What both continuations begin with is one lexeme: the lexer takes the longest and does not come back.
        common = _common(syntax.separator, syntax.section_end)
        parts = [self._literal(syntax.section_begin.lstrip()), call]
        if parallel and syntax.parallel:
            next_call = [self._literal(common), self._literal(syntax.separator.removeprefix(common)), call]
            parts.append(f"({_joined(next_call)})*")
        parts += [self._literal(common), self._literal(syntax.section_end.removeprefix(common))]
        parts.append(self._literal(syntax.ends_turn))
        if syntax.address:
            start = f"start: {_joined(parts)}"
        else:
            start = f"start: SPACE? {_joined(parts)}\n{_SPACE}"
        return "\n".join([start, *self._rules])

    # ------------------------------------------------------------------------------------------ rules

    def _rule(self, body: str, attributes: str = "") -> str:
        self._count += 1
        name = f"r{self._count}"
        self._rules.append(f"{name}{attributes}: {body or chr(34) * 2}")
        return name

    def _call(self, tool: ToolSpec) -> str:
        syntax = self._syntax
        address = syntax.address + tool.name if syntax.address else ""
        begin = self._literal(address + syntax.begin + tool.name + syntax.after_name)
        return self._rule(_joined([begin, self._body(tool), self._literal(syntax.end)]))

    def _body(self, tool: ToolSpec) -> str:
        schema = CUSTOM_SCHEMA if tool.kind == "custom" else tool.schema
        body = self._syntax.body
        if tool.grammar is not None and body == "json" and tool.grammar.syntax == "regex":
            text = {"type": "string", "pattern": f"^(?:{tool.grammar.definition})$"}
            schema = {**CUSTOM_SCHEMA, "properties": {"input": text}}
        elif tool.grammar is not None and body != "tagged":  # its text stands inside of other notation
            logger.warning("event=tool_grammar_ignored tool=%r calls=%s", tool.name, body)
        if body == "json":
            return self._json(schema or {"type": "object"}, tool.name, must_be_object=True)
        if body == "object":
            return self._notation(_Schema(schema, schema, tool.name), 0, must_be_object=True)
        if body == "elements":
            return self._members_of(_Schema(schema, schema, tool.name), 0)
        return self._tagged(tool, schema)

    def _json(self, schema: Any, tool: str, must_be_object: bool = False) -> str:
        if must_be_object and isinstance(schema, Mapping) and "type" not in schema and "$ref" not in schema:
            schema = {**schema, "type": "object"}
        for lenient in (False, True):
            source = json_source(dict(schema) if isinstance(schema, Mapping) else schema, lenient=lenient)
            if self._is_usable(source):
                if lenient:
                    logger.warning("event=tool_schema_relaxed tool=%r", tool)
                return f"%json {json.dumps(source)}"
        logger.warning("event=tool_schema_ignored tool=%r", tool)
        return f"%json {json.dumps(json_source({'type': 'object'} if must_be_object else {}))}"

    def _until(self, end: str) -> str:
        """Any text and then ``end``, which does not occur in it."""
        literal = self._literal(end)
        if literal.startswith("<["):  # a special token is never part of a text
            return _joined([self._rule("TEXT") if self._text_rule() else "", literal])
        plain = re.match(r'"(?:[^"\\]|\\.)*"', literal)
        assert plain is not None
        rest = literal[plain.end() :].strip()
        if rest:  # a special token ends the text, which must have come to ``plain`` by then
            return _joined([self._rule(f"/(?s:.*){_quoted(json.loads(plain[0]))}/"), rest])
        return self._rule(_ANY_TEXT, f"[suffix={plain[0]}]")

    def _text_rule(self) -> bool:
        rule = f"TEXT: {_ANY_TEXT}"
        if rule not in self._rules:
            self._rules.append(rule)
        return True

    # ------------------------------------------------------------------------------------------ tagged parameters

    def _tagged(self, tool: ToolSpec, schema: Mapping[str, Any]) -> str:
        syntax = self._syntax
        if tool.kind == "custom" and tool.grammar is not None:
            begin = self._literal(syntax.parameter_begin + "input" + syntax.after_string)
            if tool.grammar.syntax == "regex":
                body = self._rule(f"/{escape_slashes(tool.grammar.definition)}/")
            else:
                body = self._rule(f"%lark {{\n{tool.grammar.definition}\n}}")
            return self._rule(_joined([begin, body, self._literal(syntax.parameter_end)]))
        root = _Schema(schema, schema, tool.name)
        properties, required = root.properties, root.required
        parts = []
        for name, child in properties.items():
            rule = self._parameter(name, root.child(child))
            parts.append(rule if name in required else f"{rule}?")
        if not properties and schema.get("additionalProperties") is not False:
            key = self._rule("/[A-Za-z_][A-Za-z0-9_.-]{0,63}/")
            parts.append("(" + _joined([
                self._literal(syntax.parameter_begin), key, self._literal(syntax.after_string),
                self._until(syntax.parameter_end),
            ]) + ")*")  # fmt: skip
        return self._rule(_joined(parts))

    def _parameter(self, name: str, schema: _Schema) -> str:
        syntax = self._syntax
        as_text = _joined([
            self._literal(syntax.parameter_begin + name + syntax.after_string),
            self._plain(schema, syntax.parameter_end),
        ])  # fmt: skip
        if schema.may_be_string and (syntax.after_string == syntax.after_json or not schema.may_be_other):
            return self._rule(as_text)
        as_json = _joined([
            self._literal(syntax.parameter_begin + name + syntax.after_json),
            self._json(schema.whole(without_string=True), schema.tool),
            self._literal(syntax.parameter_end),
        ])  # fmt: skip
        return self._rule(f"{as_text} | {as_json}" if schema.may_be_string else as_json)

    def _plain(self, schema: _Schema, end: str) -> str:
        """A string without quotes, up to and with ``end``."""
        choices = schema.choices
        if choices is not None and not schema.may_be_other:
            return _joined(["(" + " | ".join(self._literal(choice) or '""' for choice in choices) + ")",
                            self._literal(end)])  # fmt: skip
        return self._until(end)

    # ------------------------------------------------------------------------------------------ nested elements

    def _members_of(self, schema: _Schema, depth: int) -> str:
        prefix = self._syntax.prefix
        parts = []
        for name, child in schema.properties.items():
            body = self._element(schema.child(child), f"{prefix}</{name}>", depth + 1)
            rule = self._rule(_joined([self._literal(f"{prefix}<{name}>"), body]))
            parts.append(rule if name in schema.required else f"{rule}?")
        return self._rule(_joined(parts))

    def _element(self, schema: _Schema, end: str, depth: int) -> str:
        """The content of an element, up to and with ``end``."""
        prefix, kind = self._syntax.prefix, schema.kind
        if kind == "object" and schema.properties and depth < _MAX_DEPTH:
            return _joined([self._members_of(schema, depth), self._literal(end)])
        if kind == "array" and isinstance(schema.node.get("items"), Mapping) and depth < _MAX_DEPTH:
            item = self._element(schema.child(schema.node["items"]), f"{prefix}</item>", depth + 1)
            rule = self._rule(_joined([self._literal(f"{prefix}<item>"), item]))
            return _joined([f"{rule}*", self._literal(end)])
        if kind in ("integer", "number", "boolean", "null"):
            return _joined([self._json(schema.whole(), schema.tool), self._literal(end)])
        return self._plain(schema, end)

    # ------------------------------------------------------------------------------------------ object notation

    def _notation(self, schema: _Schema, depth: int, must_be_object: bool = False) -> str:
        kind = "object" if must_be_object else schema.kind
        quote = self._syntax.quote
        if kind == "string":
            return self._rule(_joined([self._literal(quote), self._plain(schema, quote)]))
        if kind == "object" and schema.properties and depth < _MAX_DEPTH:
            return self._pairs(schema, depth)
        if kind == "array" and isinstance(schema.node.get("items"), Mapping) and depth < _MAX_DEPTH:
            item = self._notation(schema.child(schema.node["items"]), depth + 1)
            return self._rule(f'"[" ({item} ("," {item})*)? "]"')
        if kind in ("integer", "number", "boolean", "null"):
            return self._json(schema.whole(), schema.tool)
        return self._any_notation("object" if kind == "object" else "array" if kind == "array" else "value")

    def _pairs(self, schema: _Schema, depth: int) -> str:
        """An object: all required members, and the others or not, in the schema's order."""
        rules = [
            (_joined([self._literal(f"{name}:"), self._notation(schema.child(child), depth + 1)]), name)
            for name, child in schema.properties.items()
        ]
        after, first = '""', '""'  # what may follow a member, and what may stand where none is yet
        for body, name in reversed(rules):
            pair = self._rule(body)
            if name in schema.required:
                first, after = self._rule(f"{pair} {after}"), self._rule(f'"," {pair} {after}')
            else:
                first = self._rule(f"{pair} {after} | {first}")
                after = self._rule(f'"," {pair} {after} | {after}')
        return self._rule(f'"{{" {first} "}}"')

    def _any_notation(self, which: str) -> str:
        if not any(rule.startswith("any_value:") for rule in self._rules):
            quote = self._syntax.quote
            text = _joined([self._literal(quote), self._until(quote)])
            self._rules += [
                f'any_value: {text} | any_object | any_array | /-?[0-9]+(\\.[0-9]+)?/ | "true" | "false" | "null"',
                'any_object: "{" (any_pair ("," any_pair)*)? "}"',
                'any_pair: /[A-Za-z_][A-Za-z0-9_-]{0,63}/ ":" any_value',
                'any_array: "[" (any_value ("," any_value)*)? "]"',
            ]
        return f"any_{which}"


class _Schema:
    """A part of a tool's schema, with what it refers to."""

    def __init__(self, node: Any, root: Mapping[str, Any], tool: str) -> None:
        self._root = root
        self.tool = tool
        self.node: Mapping[str, Any] = self._resolved(node)

    def child(self, node: Any) -> _Schema:
        """A part of the same document."""
        return _Schema(node, self._root, self.tool)

    def _resolved(self, node: Any) -> Mapping[str, Any]:
        for _ in range(_MAX_DEPTH):
            if not isinstance(node, Mapping) or not isinstance(node.get("$ref"), str):
                break
            target: Any = self._root
            for part in node["$ref"].lstrip("#").split("/")[1:]:
                target = target.get(part) if isinstance(target, Mapping) else None
            node = target
        return node if isinstance(node, Mapping) else {}

    @property
    def properties(self) -> Mapping[str, Any]:
        """Declared members."""
        found = self.node.get("properties")
        return found if isinstance(found, Mapping) else {}

    @property
    def required(self) -> frozenset[str]:
        """Members that must be there."""
        found = self.node.get("required")
        return frozenset(name for name in found if isinstance(name, str)) if isinstance(found, list) else frozenset()

    @property
    def types(self) -> frozenset[str]:
        """Types of values that fit; all, where nothing says otherwise."""
        every = frozenset((*_SCALARS, "object", "array"))
        declared = self.node.get("type")
        if isinstance(declared, str):
            return frozenset((declared,))
        if isinstance(declared, list):
            return frozenset(kind for kind in declared if isinstance(kind, str))
        values = self.node.get("enum", [self.node["const"]] if "const" in self.node else None)
        if isinstance(values, list):
            return frozenset(map(_type_of, values))
        for key in ("anyOf", "oneOf"):
            branches = self.node.get(key)
            if isinstance(branches, list):
                return frozenset().union(*(self.child(branch).types for branch in branches[:32]))
        return every

    @property
    def kind(self) -> str | None:
        """The one type that values have; None if there are several."""
        types = self.types
        return next(iter(types)) if len(types) == 1 else None

    @property
    def may_be_string(self) -> bool:
        return "string" in self.types

    @property
    def may_be_other(self) -> bool:
        return bool(self.types - {"string"})

    @property
    def choices(self) -> list[str] | None:
        """The strings of an ``enum`` or ``const``."""
        values = self.node.get("enum", [self.node["const"]] if "const" in self.node else None)
        if not isinstance(values, list):
            return None
        return [value for value in values if isinstance(value, str)] or None

    def whole(self, without_string: bool = False) -> dict[str, Any]:
        """This part as a schema of its own; ``without_string`` leaves out strings where types are listed."""
        out = dict(self.node)
        if without_string and isinstance(out.get("type"), list):
            out["type"] = [kind for kind in out["type"] if kind != "string"]
        for key in ("$defs", "definitions"):
            if key in self._root and key not in out:
                out[key] = self._root[key]
        return out


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "integer", float: "number", type(None): "null", dict: "object", list: "array"}
    return names.get(type(value), "null")


def _common(a: str, b: str) -> str:
    """What both begin with."""
    count = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:count]


def _quoted(text: str) -> str:
    """A regular expression for just this text, as it stands between slashes."""
    return escape_slashes(re.escape(text))


def _joined(parts: Sequence[str]) -> str:
    return " ".join(part for part in parts if part)
