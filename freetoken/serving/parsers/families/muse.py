"""Muse Glimmer: messages addressed to oneself, to the user or to a tool; calls in tags."""

from freetoken.serving.parsers.format import CallSyntax, Channels, OutputFormat, TaggedCalls

_NAMED = r'\s+name="(?P<name>[^"]+)"\s*'

MUSE = OutputFormat(
    name="muse",
    families=("muse_glimmer",),
    detect=(("<|message|>", "<|eom|>", "to=self"), ("<atem:invoke",)),
    turn_begin=("<|start|>assistant",),
    channels=Channels(
        start="<|start|>",
        message="<|message|>",
        ends=("<|eom|>", "<|eot|>"),
        reasoning_to=("self",),
        text_to=("user",),
        body=TaggedCalls(
            begin="<atem:function_calls>",
            end="</atem:function_calls>",
            call_open="<atem:invoke",
            call_header_end=r">",
            call_header=_NAMED + r"(?P<empty>/)?",
            call_close="</atem:invoke>",
            parameter_open="<atem:parameter",
            parameter_header_end=r">",
            parameter_header=_NAMED,
            parameter_close="</atem:parameter>",
            implied_open='\n<atem:parameter name="',
            implied_name_end='"',
            implied_closes=(
                ("\n</atem:invoke>", ("</atem:function_calls>", "<atem:invoke", "")),
                ("\n</atem:function_calls>", ("<|eom|>", "<|eot|>", "")),
            ),
        ),
    ),
    call_syntax=CallSyntax(
        body="tagged",
        address=" to=",
        begin='<|message|><atem:function_calls>\n<atem:invoke name="',
        after_name='">\n',
        end="</atem:invoke>\n</atem:function_calls>",
        separator="<|eom|><|start|>assistant",
        parameter_begin='<atem:parameter name="',
        after_string='">',
        after_json='">',
        parameter_end="</atem:parameter>\n",
        ends_turn="<|eot|>",
    ),
    special_tokens=("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
    stop_tokens=("<|eot|>", "<|end_of_text|>"),
)

FORMATS = (MUSE,)
