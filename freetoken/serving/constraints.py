"""What a request asks its output to be, as a constraint for the engine: compiled here first, so that what cannot be
enforced is a 400 before anything is generated.

What is built depends on ``output``, the model's format, and ``prompt_tail``, the end of the rendered prompt: reasoning
before the answer stays free, whether the prompt has opened it, the model may open it, or there is none.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetoken.errors import CheckpointError
from freetoken.grammar import ConstraintError, GrammarCompiler, GrammarError, Matcher, load_vocabulary
from freetoken.grammar.compiler import escape_slashes, json_source
from freetoken.grammar.explain import explain_schema
from freetoken.messages import Constraint, ConstraintKind
from freetoken.serving.call_grammar import CallGrammar
from freetoken.serving.conversation import ResponseFormat
from freetoken.serving.errors import ApiError, bad_value, unsupported
from freetoken.serving.tools import ToolChoice, ToolSpec

if TYPE_CHECKING:
    from freetoken.serving.parsers.format import CallSyntax, OutputFormat

logger = logging.getLogger(__name__)

COMPILE_TIMEOUT_S = 10.0
MAX_SCHEMA_DEPTH = 64
_TEXT = ResponseFormat()


class Constraints:
    """Builds and checks constraints with the vocabulary of one checkpoint, which is read when the first is wanted.
    ``for_request`` from the event loop; the work is done in ``pool``."""

    def __init__(
        self, directory: str | Path, vocab_size: int, eos_token_ids: Sequence[int], pool: Executor | None
    ) -> None:
        self._directory = Path(directory)
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._pool = pool
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None

    async def for_request(
        self,
        output: OutputFormat,
        prompt_tail: str,
        *,
        response_format: ResponseFormat = _TEXT,
        tools: Sequence[ToolSpec] = (),
        choice: ToolChoice | None = None,
        parallel: bool = True,
        format_param: str = "response_format",
        tool_param: str = "tool_choice",
    ) -> Constraint | None:
        """The constraint of a request; None if its output is free.

        ``tools`` are those the model may call, under the names it knows them by (``Toolset.callable``). With
        ``required`` or ``named``, the answer is calls. Otherwise a ``response_format`` other than text binds the
        answer; with ``auto`` and tools, the answer may be calls instead (not in formats whose calls are bare JSON).

        Raises 400 ``ApiError`` naming ``format_param`` or ``tool_param``, the place in the schema and the reason.
        """
        mode = choice.mode if choice is not None else "auto"
        forced = mode in ("required", "named")
        if not forced and response_format.kind == "text":
            return None

        def work() -> Constraint:
            return self.build(
                output,
                prompt_tail,
                response_format=response_format,
                tools=() if mode == "none" else tools,
                forced=forced,
                parallel=parallel,
                format_param=format_param,
                tool_param=tool_param,
            )

        loop = asyncio.get_running_loop()
        param = tool_param if forced else format_param
        try:
            return await asyncio.wait_for(loop.run_in_executor(self._pool, work), COMPILE_TIMEOUT_S)
        except CheckpointError as error:
            logger.error("event=no_grammar_vocabulary detail=%r", str(error))
            raise unsupported(
                f"{param} cannot be enforced: grammars do not work with this model's tokenizer", param
            ) from None
        except asyncio.TimeoutError:
            raise bad_value(f"{param} takes more than {COMPILE_TIMEOUT_S:g} s to compile; simplify it", param) from None

    def build(
        self,
        output: OutputFormat,
        prompt_tail: str,
        *,
        response_format: ResponseFormat = _TEXT,
        tools: Sequence[ToolSpec] = (),
        forced: bool = False,
        parallel: bool = True,
        format_param: str = "response_format",
        tool_param: str = "tool_choice",
    ) -> Constraint:
        """``for_request`` without waiting; for any thread. ``forced``: the answer must be calls of ``tools``."""
        if forced:
            constraint, param = self._calls(output, tools, parallel, tool_param), tool_param
        else:
            constraint, param = self._answer(response_format, format_param), format_param
            self._check(constraint, param)
            if tools and output.call_syntax is not None and _is_marked(output.call_syntax):
                calls = self._call_text(output, tools, parallel)
                constraint = Constraint(ConstraintKind.LARK, _either(self._body(constraint, output), calls))
            elif output.channels is not None:
                constraint = Constraint(ConstraintKind.LARK, f"start: {self._body(constraint, output)}")
        constraint = self._after_reasoning(constraint, output, prompt_tail)
        self._check(constraint, param)
        return constraint

    # ------------------------------------------------------------------------------------------ answers

    def _answer(self, wanted: ResponseFormat, param: str) -> Constraint:
        match wanted.kind:
            case "json_schema":
                return self._of_schema(wanted.schema, param)
            case "json_object":
                return Constraint(ConstraintKind.JSON_OBJECT)
            case "regex":
                return Constraint(ConstraintKind.REGEX, wanted.source)
            case "grammar":
                return Constraint(ConstraintKind.LARK, wanted.source)
        raise AssertionError(wanted.kind)

    def _of_schema(self, schema: Any, param: str) -> Constraint:
        if not isinstance(schema, (Mapping, bool)):
            raise bad_value(f"{param} must be a JSON schema: an object, not {type(schema).__name__}", param)
        deep = _too_deep(schema)
        if deep is not None:
            raise bad_value(
                f"{param}{_dotted(deep)}: the schema is nested deeper than the limit of {MAX_SCHEMA_DEPTH}",
                param,
                "invalid_json_schema",
            )
        return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False))

    def _body(self, constraint: Constraint, output: OutputFormat) -> str:
        """An answer as a Lark expression, with the header that messages have where a turn consists of several."""
        text = constraint.text
        if constraint.kind is ConstraintKind.JSON_OBJECT:
            body = f"%json {json.dumps(json_source({'type': 'object'}))}"
        elif constraint.kind is ConstraintKind.JSON_SCHEMA:
            body = f"%json {json.dumps(json_source(json.loads(text)))}"
        elif constraint.kind is ConstraintKind.REGEX:
            body = f"%lark {{\nstart: TEXT\nTEXT: /{escape_slashes(text)}/\n}}"
        else:
            body = f"%lark {{\n{text}\n}}"
        channels = output.channels
        if channels is None:
            return body
        literal = self.compiler.vocabulary.literal
        if channels.channel:
            return f"{literal(channels.channel + 'final' + channels.message)} {body}"
        addressed = f" to={channels.text_to[0]}" if channels.text_to else ""
        return f"{literal(addressed + channels.message)} {body}"

    # ------------------------------------------------------------------------------------------ calls

    def _calls(self, output: OutputFormat, tools: Sequence[ToolSpec], parallel: bool, param: str) -> Constraint:
        if not tools:
            raise bad_value(f"{param} asks for a tool call, but there is no tool that may be called", param)
        if output.call_syntax is None:
            raise unsupported(f"{param} cannot be enforced: this model has no format for tool calls", param)
        return Constraint(ConstraintKind.LARK, self._call_text(output, tools, parallel))

    def _call_text(self, output: OutputFormat, tools: Sequence[ToolSpec], parallel: bool) -> str:
        assert output.call_syntax is not None
        compiler = self.compiler

        def is_usable(source: Any) -> bool:
            return not compiler.problem(json.dumps({"grammars": [{"json_schema": source}]}))

        return CallGrammar(output.call_syntax, compiler.vocabulary.literal, is_usable).text(tools, parallel)

    # ------------------------------------------------------------------------------------------ reasoning

    @staticmethod
    def _after_reasoning(constraint: Constraint, output: OutputFormat, prompt_tail: str) -> Constraint:
        begun = output.begun_turn(prompt_tail)
        channels = output.channels
        if channels is not None:
            until = f"{channels.ends[0]}{channels.start}assistant"
            opener = (
                f"{channels.channel}{channels.reasoning_on[0]}"
                if channels.channel and channels.reasoning_on
                else f" to={channels.reasoning_to[0]}"
                if channels.reasoning_to
                else ""
            )
            if not opener:
                return constraint
            inside = opener.strip() in begun and not begun.rstrip().endswith(until)
            return replace(constraint, free_until=until, free_opener="" if inside else opener)
        pairs = output.reasoning
        if not pairs:
            return constraint
        for pair in pairs:
            begin, end = begun.rfind(pair.begin), begun.rfind(pair.end)
            if begin > end:
                return replace(constraint, free_until=pair.end)
            if end >= 0:
                return constraint
        return replace(constraint, free_until=pairs[0].end, free_opener=pairs[0].begin)

    # ------------------------------------------------------------------------------------------ check

    @property
    def compiler(self) -> GrammarCompiler:
        """Reads the vocabulary when it is first wanted. Raises ``CheckpointError``."""
        with self._lock:
            if self._compiler is None:
                vocabulary = load_vocabulary(self._directory, self._vocab_size, self._eos_token_ids)
                self._compiler = GrammarCompiler(vocabulary)
            return self._compiler

    def _check(self, constraint: Constraint, param: str) -> None:
        compiler = self.compiler
        try:
            # An end is known to the engine only; whichever there is will do.
            Matcher(compiler, constraint, compiler.vocabulary.eos_token_ids or (0,))
        except (GrammarError, ConstraintError) as error:
            raise self._refusal(constraint, param, error) from None
        except Exception as error:
            logger.exception("event=grammar_refused kind=%s", constraint.kind)
            raise bad_value(f"{param} cannot be compiled: {error}", param, "invalid_grammar") from None
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            # A panic of the library, which Python does not count among exceptions.
            logger.error("event=grammar_panic kind=%s detail=%r", constraint.kind, str(error))
            raise bad_value(f"{param} cannot be compiled: {error}", param, "invalid_grammar") from None

    def _refusal(self, constraint: Constraint, param: str, error: GrammarError | ConstraintError) -> ApiError:
        if constraint.kind is not ConstraintKind.JSON_SCHEMA or isinstance(error, ConstraintError):
            return bad_value(f"{param} cannot be enforced: {error}", param, "invalid_grammar")
        schema = json.loads(constraint.text)
        found = explain_schema(self.compiler, schema, error.reason) if isinstance(schema, dict) else error
        return bad_value(f"{param}{_dotted(found.path)}: {found.reason}", f"{param}{_dotted(found.path)}",
                         "invalid_json_schema")  # fmt: skip


def _is_marked(syntax: CallSyntax) -> bool:
    """Whether a call is told from a JSON answer by its first character."""
    return not (syntax.section_begin + syntax.address + syntax.begin).lstrip().startswith("{")


def _either(answer: str, calls: str) -> str:
    """One of two grammars: ``answer`` is an expression, ``calls`` a grammar of its own."""
    return f"start: SPACE? ({answer} | %lark {{\n{calls}\n}})\nSPACE: /[ \\n\\r\\t]{{1,16}}/"


def _too_deep(schema: Any) -> str | None:
    """JSON pointer of the first part that is nested too deep."""
    waiting: list[tuple[Any, str, int]] = [(schema, "", 0)]
    while waiting:
        node, pointer, depth = waiting.pop()
        if depth > MAX_SCHEMA_DEPTH:
            return pointer
        if isinstance(node, Mapping):
            waiting += [(child, f"{pointer}/{key}", depth + 1) for key, child in node.items()]
        elif isinstance(node, list):
            waiting += [(child, f"{pointer}/{i}", depth + 1) for i, child in enumerate(node)]
    return None


def _dotted(pointer: str) -> str:
    """A JSON pointer in the way other parameters are named; shortened if it is very long."""
    parts = [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]
    if len(parts) > 24:
        parts = [*parts[:12], "...", *parts[-6:]]
    return "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in parts)
