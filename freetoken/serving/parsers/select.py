"""Which output format a model has."""

from __future__ import annotations

from collections.abc import Callable

from freetoken.serving.parsers.families import deepseek, gemma, glm, gpt_oss, llama, minimax, mistral, muse, qwen
from freetoken.serving.parsers.format import OutputFormat, Reasoning

FORMATS: tuple[OutputFormat, ...] = (
    *muse.FORMATS,
    *gpt_oss.FORMATS,
    *gemma.FORMATS,
    *minimax.FORMATS,
    *deepseek.FORMATS,
    *glm.FORMATS,
    *qwen.FORMATS,
    *mistral.FORMATS,
    *llama.FORMATS,
)

PLAIN = OutputFormat(name="plain", notes="Text, and nothing else.")
PLAIN_THINKING = OutputFormat(
    name="plain-thinking",
    detect=(("<think>",), ("</think>",)),
    reasoning=(Reasoning("<think>", "</think>"),),
    special_tokens=("<think>", "</think>"),
)


def format_for(
    family: str | None, template: str | None, has_token: Callable[[str], bool] | None = None
) -> OutputFormat:
    """The format of a model of ``family`` (``ModelSpec.family``, None if unknown) with this chat template.

    What the template writes decides, as the same weights may be trained on another format than their family's first;
    the family's own formats are tried before all others. Without a template (some models come with none) it is the
    family's first format whose special tokens the vocabulary has (``has_token``; unknown: all). ``PLAIN`` where nothing
    fits: then there is no reasoning and nothing is a call.
    """
    own = [candidate for candidate in FORMATS if family is not None and family in candidate.families]
    others = [candidate for candidate in FORMATS if candidate not in own]
    if template:
        for candidate in (*own, *others, PLAIN_THINKING):
            if any(all(words in template for words in group) for group in candidate.detect):
                return candidate
        return PLAIN
    for candidate in own:
        if has_token is None or all(map(has_token, candidate.special_tokens[:1])):
            return candidate
    return PLAIN


def format_named(name: str) -> OutputFormat:
    """The format called ``name``. Raises ``KeyError``."""
    for candidate in (*FORMATS, PLAIN, PLAIN_THINKING):
        if candidate.name == name:
            return candidate
    raise KeyError(f"no output format is called {name!r}; there are: {[f.name for f in FORMATS]}")
