"""GLM 4.5 and later: keys and values in tags of their own; 4.5 and 4.6 with line breaks between them, later without."""

from freetoken.serving.parsers.format import CallSyntax, OutputFormat, Reasoning, TaggedCalls

GLM = OutputFormat(
    name="glm",
    families=("glm4_moe", "glm_moe_dsa"),
    detect=(("<arg_key>", "<arg_value>"),),
    turn_begin=("<|assistant|>",),
    reasoning=(Reasoning("<think>", "</think>"),),
    calls=(
        TaggedCalls(
            begin="<tool_call>",
            end="</tool_call>",
            call_open="<tool_call>",
            call_header_end=r"(?=[<\n])",
            call_header=r"(?P<name>[^\s<>{}]+)\s*",
            call_close="</tool_call>",
            parameter_open="<arg_key>",
            parameter_header_end=r"<arg_value>",
            parameter_header=r"(?P<name>.*?)</arg_key>\s*",
            parameter_close="</arg_value>",
            implied_open="<arg_key>",
            implied_name_end="</arg_key>",
            implied_closes=(("</tool_call>", ("<tool_call>", "")),),
        ),
    ),
    call_syntax=CallSyntax(
        body="tagged",
        begin="<tool_call>",
        after_name="",
        end="</tool_call>",
        parameter_begin="<arg_key>",
        after_string="</arg_key><arg_value>",
        after_json="</arg_key><arg_value>",
        parameter_end="</arg_value>",
    ),
    special_tokens=(
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<think>",
        "</think>",
    ),
    stop_tokens=("<|user|>", "<|observation|>", "<|endoftext|>"),
)

FORMATS = (GLM,)
