"""Mistral: a JSON list after a special token (tokenizer v3 to v7), name and arguments after it (v11 and later)."""

from freetoken.serving.parsers.format import CallSyntax, JsonCalls, OutputFormat, Reasoning

_FAMILIES = ("mistral", "mistral3", "mistral4", "mixtral")
_TURN = ("[/INST]", "[/TOOL_RESULTS]")
_REASONING = (Reasoning("[THINK]", "[/THINK]"), Reasoning("<think>", "</think>"))
_CALLS = (
    JsonCalls(
        begin="[TOOL_CALLS]",
        header=r"\s*(?:(?P<list>\[)\s*|(?:(?P<name>[^\s\[\]{}]+)\s*(?:\[CALL_ID\][^\s\[]*)?(?:\[ARGS\])?\s*)?)",
    ),
)
_TOKENS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")

MISTRAL = OutputFormat(
    name="mistral",
    families=_FAMILIES,
    detect=(("[TOOL_CALLS]", "[ARGS]"),),
    turn_begin=_TURN,
    reasoning=_REASONING,
    calls=_CALLS,
    call_syntax=CallSyntax(body="json", begin="[TOOL_CALLS]", after_name="[ARGS]", end=""),
    special_tokens=_TOKENS,
    stop_tokens=("</s>",),
)

MISTRAL_LIST = OutputFormat(
    name="mistral-list",
    families=_FAMILIES,
    detect=(("[TOOL_CALLS]",),),
    turn_begin=_TURN,
    reasoning=_REASONING,
    calls=_CALLS,
    call_syntax=CallSyntax(
        body="json",
        section_begin="[TOOL_CALLS] [",
        begin='{"name": "',
        after_name='", "arguments": ',
        end="}",
        separator=", ",
        section_end="]",
    ),
    special_tokens=_TOKENS,
    stop_tokens=("</s>",),
)

FORMATS = (MISTRAL, MISTRAL_LIST)
