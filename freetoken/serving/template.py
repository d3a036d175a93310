"""Chat templates: the Jinja programs of a checkpoint that turn messages into one prompt, as Hugging Face runs them.

A template comes with the checkpoint and is not trusted: it runs in Jinja's immutable sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from freetoken.errors import CheckpointError

RESERVED_NAMES = frozenset({"messages", "tools", "add_generation_prompt"})


class TemplateRefusedError(Exception):
    """The template did not accept these messages; the text is for the client."""


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks what the assistant wrote, for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own way to declare it)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateRefusedError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter: no HTML escapes, key order kept."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One checkpoint's templates by name; ``default`` is used, or ``tool_use`` where tools are given and it exists.

    Compiled once; ``render`` may run in several threads at a time.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Raises ``CheckpointError`` when a template is not valid Jinja, or none is called ``default``."""
        if "default" not in sources:
            raise CheckpointError(f"no chat template is named 'default'; found: {sorted(sources)}")
        environment = _environment()
        self._special_tokens = dict(special_tokens)
        self._templates: dict[str, jinja2.Template] = {}
        variables: set[str] = set()
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
                variables |= jinja2.meta.find_undeclared_variables(environment.parse(source))
            except jinja2.TemplateSyntaxError as error:
                raise CheckpointError(
                    f"chat template {name!r} is not valid, line {error.lineno}: {error.message}"
                ) from error
        self.source = "\n".join(sources.values())
        """All templates, for those who look for words in them."""
        self.variables = frozenset(variables)
        """Names that the templates read and do not set themselves."""
        self.knows_developer_role = any("developer" in source for source in sources.values())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. ``variables`` are further names the template may read. Raises ``TemplateRefusedError``."""
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        names: dict[str, Any] = {"documents": None, **self._special_tokens, **(variables or {})}
        names.update(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt)
        try:
            return self._templates[name].render(names)
        except TemplateRefusedError as error:
            raise TemplateRefusedError(f"the chat template refuses these messages: {error}") from None
        except RecursionError:
            raise TemplateRefusedError("the messages or tools are nested too deeply for the chat template") from None
        except Exception as error:  # whatever the template's code meets in the client's data
            kind = type(error).__name__
            raise TemplateRefusedError(f"the chat template cannot render these messages: {kind}: {error}") from error
