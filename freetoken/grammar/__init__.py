"""Output that must match a grammar: which tokens may come next. The only user of llguidance, which is imported when a
vocabulary is loaded."""

from freetoken.grammar.compiler import MAX_TEXT_CHARS, GrammarCompiler
from freetoken.grammar.errors import ConstraintError, GrammarError
from freetoken.grammar.matcher import Matcher
from freetoken.grammar.vocabulary import Vocabulary, load_vocabulary

__all__ = [
    "MAX_TEXT_CHARS",
    "ConstraintError",
    "GrammarCompiler",
    "GrammarError",
    "Matcher",
    "Vocabulary",
    "load_vocabulary",
]
