"""MiniMax: tagged parameters (M2), nested elements behind a token of their own (M3)."""

from freetoken.serving.parsers.format import CallSyntax, ElementCalls, OutputFormat, Reasoning, TaggedCalls

_TURN = ("]~b]ai\n",)
_STOPS = ("[e~[",)
_NAMED = r'\s+name="(?P<name>[^"]+)"\s*'
_PREFIX = "]<]minimax[>["

MINIMAX_M2 = OutputFormat(
    name="minimax-m2",
    families=("minimax_m2",),
    detect=(("<minimax:tool_call>",),),
    turn_begin=_TURN,
    reasoning=(Reasoning("<think>", "</think>"),),
    calls=(
        TaggedCalls(
            begin="<minimax:tool_call>",
            end="</minimax:tool_call>",
            call_open="<invoke",
            call_header_end=r">",
            call_header=_NAMED + r"(?P<empty>/)?",
            call_close="</invoke>",
            parameter_open="<parameter",
            parameter_header_end=r">",
            parameter_header=_NAMED,
            parameter_close="</parameter>",
            close_followers=("<parameter", "</invoke>", "</minimax:tool_call>", ""),
            implied_open='\n<parameter name="',
            implied_name_end='"',
            implied_closes=(
                ("\n</invoke>", ("</minimax:tool_call>", "<invoke", "")),
                ("\n</minimax:tool_call>", ("",)),
            ),
        ),
    ),
    call_syntax=CallSyntax(
        body="tagged",
        section_begin="<minimax:tool_call>\n",
        begin='<invoke name="',
        after_name='">\n',
        end="</invoke>",
        separator="\n",
        section_end="\n</minimax:tool_call>",
        parameter_begin='<parameter name="',
        after_string='">',
        after_json='">',
        parameter_end="</parameter>\n",
    ),
    special_tokens=("<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>"),
    stop_tokens=_STOPS,
)

MINIMAX_M3 = OutputFormat(
    name="minimax-m3",
    families=("minimax_m3", "minimax_m3_vl"),
    detect=((_PREFIX,),),
    turn_begin=_TURN,
    reasoning=(Reasoning("<mm:think>", "</mm:think>"), Reasoning("<think>", "</think>")),
    calls=(
        ElementCalls(
            begin=f"{_PREFIX}<tool_call>",
            end=f"{_PREFIX}</tool_call>",
            call_open=f"{_PREFIX}<invoke",
            call_header_end=r">",
            call_header=_NAMED,
            call_close=f"{_PREFIX}</invoke>",
            prefix=_PREFIX,
        ),
    ),
    call_syntax=CallSyntax(
        body="elements",
        section_begin=f"{_PREFIX}<tool_call>\n",
        begin=f'{_PREFIX}<invoke name="',
        after_name='">',
        end=f"{_PREFIX}</invoke>",
        separator="\n",
        section_end=f"\n{_PREFIX}</tool_call>",
        prefix=_PREFIX,
    ),
    special_tokens=(_PREFIX, "<tool_call>", "</tool_call>", "<mm:think>", "</mm:think>"),
    stop_tokens=_STOPS,
)

FORMATS = (MINIMAX_M3, MINIMAX_M2)
