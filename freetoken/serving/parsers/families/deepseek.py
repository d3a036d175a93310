"""DeepSeek: JSON calls between special tokens (V3, R1, V3.1), DSML tags (V3.2, V4, V4.1)."""

from freetoken.serving.parsers.format import CallSyntax, JsonCalls, OutputFormat, Reasoning, TaggedCalls

_TURN = ("<｜Assistant｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁end｜>")
_THINK = (Reasoning("<think>", "</think>"),)
_STOPS = ("<｜end▁of▁sentence｜>",)
_SEPARATOR = "<｜tool▁sep｜>"

# V3 writes the type, then name and fenced JSON; V3.1 writes name, separator, JSON.
_JSON = JsonCalls(
    begin="<｜tool▁calls▁begin｜>",
    end="<｜tool▁calls▁end｜>",
    call_begin="<｜tool▁call▁begin｜>",
    call_end="<｜tool▁call▁end｜>",
    header=rf"\s*(?:function{_SEPARATOR})?(?P<name>[^\s<`]+)(?:{_SEPARATOR})?\s*(?:```(?:json)?\s*)?",
    fence="```",
)
_JSON_TOKENS = (_JSON.begin, _JSON.end, _JSON.call_begin, _JSON.call_end, _SEPARATOR, "<think>", "</think>")

DEEPSEEK_V3 = OutputFormat(
    name="deepseek-v3",
    families=("deepseek_v3",),
    detect=(("<｜tool▁calls▁begin｜>", "```json"),),
    turn_begin=_TURN,
    reasoning=_THINK,
    calls=(_JSON,),
    call_syntax=CallSyntax(
        body="json",
        section_begin=_JSON.begin,
        begin=f"{_JSON.call_begin}function{_SEPARATOR}",
        after_name="\n```json\n",
        end=f"\n```{_JSON.call_end}",
        separator="\n",
        section_end=_JSON.end,
    ),
    special_tokens=_JSON_TOKENS,
    stop_tokens=_STOPS,
)

DEEPSEEK_V31 = OutputFormat(
    name="deepseek-v3.1",
    families=("deepseek_v3",),
    detect=(("<｜tool▁calls▁begin｜>",),),
    turn_begin=_TURN,
    reasoning=_THINK,
    calls=(_JSON,),
    call_syntax=CallSyntax(
        body="json",
        section_begin=_JSON.begin,
        begin=_JSON.call_begin,
        after_name=_SEPARATOR,
        end=_JSON.call_end,
        section_end=_JSON.end,
    ),
    special_tokens=_JSON_TOKENS,
    stop_tokens=_STOPS,
)


def _dsml(bars: str, section: str, space: str = "") -> TaggedCalls:
    """``bars`` is what stands on either side of the letters DSML; V4.1 has a space after it."""
    opening, closing = f"<{bars}DSML{bars}{space}", f"</{bars}DSML{bars}{space}"
    return TaggedCalls(
        begin=f"{opening}{section}>",
        end=f"{closing}{section}>",
        call_open=f"{opening}invoke",
        call_header_end=r">",
        call_header=r'\s+name="(?P<name>[^"]+)"\s*(?P<empty>/)?',
        call_close=f"{closing}invoke>",
        parameter_open=f"{opening}parameter",
        parameter_header_end=r'(?<=")\s*>',
        parameter_header=r'\s+name="(?P<name>[^"]+)"(?:\s+string="(?P<string>true|false)")?',
        parameter_close=f"{closing}parameter>",
        implied_open=f'\n{opening}parameter name="',
        implied_name_end='"',
        implied_closes=(
            (f"\n{closing}invoke>", (f"{closing}{section}>", f"{opening}invoke", "")),
            (f"\n{closing}{section}>", ("",)),
        ),
    )


def _dsml_format(name: str, section: str, space: str, families: tuple[str, ...], detect: str) -> OutputFormat:
    usual = _dsml("｜", section, space)
    # What these models also write: the section names of their sisters, doubled bars, plain ASCII bars.
    forms = [usual]
    for bars in ("｜", "｜｜", "|", "||"):
        forms += [_dsml(bars, other) for other in ("tool_calls", "function_calls")]
        forms.append(_dsml(bars, "calls", " "))
    opening, closing = f"<｜DSML｜{space}", f"</｜DSML｜{space}"
    return OutputFormat(
        name=name,
        families=families,
        detect=((detect,),),
        turn_begin=_TURN,
        reasoning=_THINK,
        calls=tuple(dict.fromkeys(forms)),
        call_syntax=CallSyntax(
            body="tagged",
            section_begin=f"\n\n{usual.begin}\n",
            begin=f'{opening}invoke name="',
            after_name='">\n',
            end=f"{closing}invoke>",
            separator="\n",
            section_end=f"\n{usual.end}",
            parameter_begin=f'{opening}parameter name="',
            after_string='" string="true">',
            after_json='" string="false">',
            parameter_end=f"{closing}parameter>\n",
        ),
        special_tokens=("｜DSML｜", "<think>", "</think>"),
        stop_tokens=_STOPS,
    )


DEEPSEEK_V32 = _dsml_format("deepseek-v3.2", "function_calls", "", ("deepseek_v32",), "DSML｜function_calls")
DEEPSEEK_V4 = _dsml_format("deepseek-v4", "tool_calls", "", ("deepseek_v4",), "DSML｜tool_calls")
DEEPSEEK_V41 = _dsml_format("deepseek-v4.1", "calls", " ", ("deepseek_v4",), "DSML｜ calls")

FORMATS = (DEEPSEEK_V4, DEEPSEEK_V41, DEEPSEEK_V32, DEEPSEEK_V3, DEEPSEEK_V31)
