"""From a request's constraint to something that knows the next tokens."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from freetoken.grammar.errors import GrammarError
from freetoken.grammar.vocabulary import Vocabulary
from freetoken.messages import Constraint, ConstraintKind

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

MAX_TEXT_CHARS = 512 * 1024
"""Longest text of a constraint. All tools of a large agent are about 120,000 characters."""
# Between the marks of JSON: a blank, or a line break with its indentation. Without a limit, a model that has nothing to
# say fills its answer with blanks.
JSON_SPACE = r" |\n[ \t]{0,40}"
_LEADING_SPACE = r"/[ \n\r\t]{1,16}/"
_CACHED = 32


class GrammarCompiler:
    """Compiles constraints for one vocabulary, and remembers the last ones: agents send the same tools again and again.
    May be used by several threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._lock = threading.Lock()
        self._known: OrderedDict[str, LLMatcher] = OrderedDict()

    def compile(self, constraint: Constraint) -> LLMatcher:
        """A matcher at its start. Raises ``GrammarError`` without a path."""
        source = grammar_source(constraint)
        with self._lock:
            prototype = self._known.get(source)
            if prototype is not None:
                self._known.move_to_end(source)
        if prototype is None:
            prototype = self._build(source)
            with self._lock:
                self._known[source] = prototype
                while len(self._known) > _CACHED:
                    self._known.popitem(last=False)
        with self._lock:
            return prototype.deep_copy()

    def _build(self, source: str) -> LLMatcher:
        from llguidance import LLMatcher

        matcher = LLMatcher(self.vocabulary.tokenizer, source, log_level=0, limits=_limits())
        if matcher.is_error():
            raise GrammarError(first_line(matcher.get_error()))
        matcher.compute_bitmask()
        if matcher.is_error():
            if "NoExtension" in matcher.get_error():
                raise GrammarError("it matches no text")
            raise GrammarError(first_line(matcher.get_error()))
        return matcher

    def problem(self, source: str) -> str:
        """What is wrong with a grammar; empty when it is good. Cheaper than ``compile``, and finds less."""
        from llguidance import LLMatcher

        try:
            is_error, messages = LLMatcher.validate_grammar_with_warnings(
                source, self.vocabulary.tokenizer, limits=_limits()
            )
        except BaseException as error:
            # A panic, which Python does not count among exceptions. Matchers report theirs as errors; this does not,
            # and what passes every handler of errors would take the connection with it.
            if type(error).__name__ != "PanicException":
                raise
            return f"the grammar library cannot read it: {first_line(str(error), 160)}"
        return first_line(messages[0]) if is_error else ""


def _limits() -> LLParserLimits:
    """What one grammar may cost: compiling stays below a second, and one mask below some tens of milliseconds, whatever
    the input."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_items_in_row=2_000,
        max_lexer_states=100_000,
        max_grammar_size=500_000,
        verbose_errors=False,
    )


def grammar_source(constraint: Constraint) -> str:
    """The grammar in llguidance's own form. Raises ``GrammarError`` for a text that is too long or no JSON."""
    if len(constraint.text) > MAX_TEXT_CHARS:
        raise GrammarError(f"{len(constraint.text)} characters exceed the limit of {MAX_TEXT_CHARS}")
    match constraint.kind:
        case ConstraintKind.JSON_OBJECT:
            body: dict[str, Any] = {"json_schema": json_source({"type": "object"})}
        case ConstraintKind.JSON_SCHEMA:
            try:
                schema = json.loads(constraint.text)
            except (ValueError, RecursionError) as error:
                raise GrammarError(f"not JSON: {error}") from None
            body = {"json_schema": json_source(schema)}
        case ConstraintKind.REGEX:
            body = {"lark_grammar": f"start: TEXT\nTEXT: /{escape_slashes(constraint.text)}/"}
        case ConstraintKind.LARK:
            body = {"lark_grammar": constraint.text}
    if not constraint.free_until:
        return json.dumps({"grammars": [body]})
    # Models write a line break or two between their reasoning and their answer.
    start = {"name": "start", "lark_grammar": f"start: SPACE? @body\nSPACE: {_LEADING_SPACE}"}
    return json.dumps({"grammars": [start, {"name": "body", **body}]})


def json_source(schema: Any, *, lenient: bool = False) -> Any:
    """``schema`` with our options; those it brought itself are dropped. ``lenient``: keywords that cannot be enforced
    are ignored. Raises ``GrammarError`` for what is neither object nor boolean."""
    if isinstance(schema, bool):
        return {"x-guidance": {"whitespace_pattern": JSON_SPACE}} if schema else False
    if not isinstance(schema, dict):
        raise GrammarError(f"a JSON schema is an object, not {type(schema).__name__}")
    options: dict[str, Any] = {"whitespace_pattern": JSON_SPACE}
    if lenient:
        options.update(lenient=True, coerce_one_of=True)
    return {**schema, "x-guidance": options}


def escape_slashes(regex: str) -> str:
    """A regular expression as it stands between slashes in Lark."""
    out: list[str] = []
    escaped = False
    for char in regex:
        out.append({"/": "\\/", "\n": "\\n", "\r": "\\r"}.get(char, char) if not escaped else char)
        escaped = char == "\\" and not escaped
    return "".join(out)


def first_line(message: str, limit: int = 300) -> str:
    """The library's reason without its dumps."""
    lines = [line.strip() for line in message.split("<state>")[0].splitlines() if line.strip()]
    text = "; ".join(line for line in lines if line != "<non-verbose/>" and not line.startswith("while processing "))
    return text if len(text) <= limit else text[:limit] + "..."
