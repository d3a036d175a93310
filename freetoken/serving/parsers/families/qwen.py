"""Qwen: JSON calls in tags (Hermes style: Qwen 2.5, Qwen3), tagged parameters (Qwen3-Coder, Qwen3.5 and later)."""

from freetoken.serving.parsers.format import CallSyntax, JsonCalls, OutputFormat, Reasoning, TaggedCalls

_FAMILIES = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe")
_TURN = ("<|im_start|>assistant\n",)
_THINK = (Reasoning("<think>", "</think>"),)
_STOPS = ("<|im_end|>", "<|endoftext|>")

_JSON = JsonCalls(begin="<tool_call>", end="</tool_call>")


def _tagged(begin: str) -> TaggedCalls:
    return TaggedCalls(
        begin=begin,
        end="</tool_call>",
        call_open="<function=",
        call_header_end=r">",
        call_header=r"(?P<name>[^<>\n]+)",
        call_close="</function>",
        parameter_open="<parameter=",
        parameter_header_end=r">",
        parameter_header=r"(?P<name>[^<>\n]+)",
        parameter_close="</parameter>",
        close_followers=("<parameter=", "</function>", "</tool_call>", ""),
        implied_open="\n<parameter=",
        implied_name_end=">",
        implied_closes=(("\n</function>", ("</tool_call>", "")), ("\n</tool_call>", ("",))),
        newlines=True,
    )


# Coder models leave out the opening tag now and then.
_XML = (_tagged("<tool_call>"), _tagged("<function="))

QWEN_XML = OutputFormat(
    name="qwen-xml",
    families=_FAMILIES,
    detect=(("<function=", "<parameter="),),
    turn_begin=_TURN,
    reasoning=_THINK,
    calls=_XML,
    call_syntax=CallSyntax(
        body="tagged",
        begin="<tool_call>\n<function=",
        after_name=">\n",
        end="</function>\n</tool_call>",
        separator="\n",
        parameter_begin="<parameter=",
        after_string=">\n",
        after_json=">\n",
        parameter_end="\n</parameter>\n",
    ),
    special_tokens=("<tool_call>", "</tool_call>", "<think>", "</think>"),
    stop_tokens=_STOPS,
)

QWEN_JSON = OutputFormat(
    name="qwen-json",
    families=_FAMILIES,
    detect=(("<tool_call>", '"arguments"'), ("<tool_call>", '\\"arguments\\"')),
    turn_begin=_TURN,
    reasoning=_THINK,
    calls=(_JSON,),
    call_syntax=CallSyntax(
        body="json",
        begin='<tool_call>\n{"name": "',
        after_name='", "arguments": ',
        end="}\n</tool_call>",
        separator="\n",
    ),
    special_tokens=("<tool_call>", "</tool_call>", "<think>", "</think>"),
    stop_tokens=_STOPS,
)

FORMATS = (QWEN_XML, QWEN_JSON)
