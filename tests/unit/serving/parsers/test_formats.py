"""What each format's parser makes of usual, unusual, broken and cut text."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest

from freetoken.serving.parsers import PLAIN_THINKING, ToolCallStarted, format_named
from freetoken.serving.parsers.whole import ParsedOutput, parse_output
from freetoken.serving.tools import ToolSpec
from freetoken.testing.model_outputs import TOOLS

NS = "]<]minimax[>["
BARS = "｜"
PARIS = [("get_weather", {"city": "Paris"})]


def parse(
    format: str, text: str, tail: str = "", reason: Literal["stop", "length"] = "stop", tools: Any = TOOLS
) -> ParsedOutput:
    """The output at once, after a check that character by character it is the same."""
    whole = parse_output(format_named(format), tools, tail, [text], reason)
    assert parse_output(format_named(format), tools, tail, list(text), reason) == whole
    return whole


def calls(output: ParsedOutput) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in output.calls]


# Calls that are spelled in unusual ways.


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("qwen-json", '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>'),
        ("qwen-json", '<tool_call>\n{"name": "get_weather", "parameters": {"city": "Paris"}}\n</tool_call>\n'),
        ("qwen-json", '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>'),
        ("qwen-json", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}'),
        (
            "qwen-json",
            '<tool_call>{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}'
            "</tool_call>",
        ),
        ("qwen-xml", "<tool_call><function=get_weather><parameter=city>Paris</parameter></function></tool_call>"),
        ("qwen-xml", "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>"),
        ("qwen-xml", "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</tool_call>"),
        ("qwen-xml", "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"),
        ("qwen-xml", "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</function>\n</tool_call>"),
        ("qwen-xml", "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis"),
        ("qwen-xml", "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"),
        ("glm", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value>"),
        ("glm", "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</tool_call>"),
        (
            "deepseek-v3",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
            '{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ),
        (
            "deepseek-v3.1",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
            '{"city": "Paris"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ),
        ("deepseek-v3.1", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}'),
        (
            "minimax-m2",
            '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
            "</minimax:tool_call>",
        ),
        (
            "minimax-m2",
            '<minimax:tool_call><invoke name="get_weather"><parameter name="city">Paris</parameter></invoke>',
        ),
        ("minimax-m3", f'{NS}<tool_call>{NS}<invoke name="get_weather">{NS}<city>Paris{NS}</city>{NS}</invoke>'),
        ("minimax-m3", f'{NS}<tool_call>\n{NS}<invoke name="get_weather">\n{NS}<city>Paris'),
        ("gemma4", '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}'),
        ("gemma4", '<|tool_call>get_weather{ "city" : "Paris" }<tool_call|>'),
        ("llama3", '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}'),
        ("llama3", '\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'),
        ("mistral", '[TOOL_CALLS]get_weather{"city": "Paris"}'),
        ("mistral", '[TOOL_CALLS] get_weather[CALL_ID]abc123DEF[ARGS] {"city": "Paris"}'),
        ("mistral", '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]'),
        ("mistral-list", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}'),
        ("harmony", '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}'),
        ("harmony", '<|channel|>commentary to=get_weather json<|message|>{"city": "Paris"}<|call|>'),
        (
            "muse",
            ' to=get_weather<|message|>\n<atem:function_calls>\n<atem:invoke name="get_weather">\n'
            '<atem:parameter name="city">Paris</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|>',
        ),
        (
            "muse",
            ' to=get_weather<|message|><atem:function_calls><atem:invoke name="get_weather">'
            '<atem:parameter name="city">Paris</atem:parameter>',
        ),
    ],
)
def test_a_call_is_read(format: str, text: str) -> None:
    output = parse(format, text)
    assert calls(output) == PARIS
    assert (output.text, output.reasoning) == ("", "")


@pytest.mark.parametrize("bars", ["｜", "｜｜", "|", "||"])
@pytest.mark.parametrize(("section", "space"), [("tool_calls", ""), ("function_calls", ""), ("calls", " ")])
@pytest.mark.parametrize("format", ["deepseek-v3.2", "deepseek-v4", "deepseek-v4.1"])
def test_dsml_delimiters_of_all_kinds(format: str, section: str, space: str, bars: str) -> None:
    def tag(name: str) -> str:
        return f"{bars}DSML{bars}{space}{name}"

    text = (
        f'Look.\n\n<{tag(section)}>\n<{tag("invoke")} name="get_weather">\n'
        f'<{tag("parameter")} name="city" string="true">Paris</{tag("parameter")}>\n</{tag("invoke")}>\n'
        f"</{tag(section)}>"
    )
    output = parse(format, text)
    assert calls(output) == PARIS
    assert output.text == "Look."


def test_an_unknown_delimiter_is_text_and_no_call() -> None:
    text = '<¦DSML¦tool_calls>\n<¦DSML¦invoke name="get_weather">\n</¦DSML¦invoke>\n</¦DSML¦tool_calls>'
    output = parse("deepseek-v4", text)
    assert (output.text, output.calls) == (text, [])


def test_parameters_that_forget_to_close_keep_their_own_text() -> None:
    text = (
        "<tool_call>\n<function=write_file>\n<parameter=path>\na.md\n<parameter=content>\n"
        "<parameter=x>\n</parameter> is how it goes\n</parameter>\n</function>\n</tool_call>"
    )
    expected = {"path": "a.md", "content": "<parameter=x>\n</parameter> is how it goes"}
    assert calls(parse("qwen-xml", text)) == [("write_file", expected)]


def test_llama_calls_may_be_separated() -> None:
    one = '{"name": "get_weather", "parameters": {"city": "Paris"}}'
    assert calls(parse("llama3", f"{one}; {one}")) == PARIS * 2
    assert calls(parse("llama3", f"<|python_tag|>{one};{one}")) == PARIS * 2


def test_elements_nest_and_lists_are_items() -> None:
    body = (
        f'{NS}<tool_call>\n{NS}<invoke name="get_weather">{NS}<city>Paris{NS}</city>{NS}<detail>'
        f"{NS}<a>{NS}<item>1{NS}</item>{NS}<item>{NS}<b>x < y{NS}</b>{NS}</item>{NS}</a>{NS}</detail>{NS}</invoke>\n"
        f'{NS}<invoke name="get_time">{NS}</invoke>\n{NS}</tool_call>'
    )
    expected = [("get_weather", {"city": "Paris", "detail": {"a": [1, {"b": "x < y"}]}}), ("get_time", {})]
    assert calls(parse("minimax-m3", body)) == expected


def test_unknown_tools_are_called_all_the_same() -> None:
    output = parse("qwen-json", '<tool_call>{"name": "no_such_tool", "arguments": {"a": 1}}</tool_call>')
    assert calls(output) == [("no_such_tool", {"a": 1})]
    # Without a marker only a declared name makes a call of an object.
    text = '{"name": "no_such_tool", "parameters": {"a": 1}}'
    assert parse("llama3", text).text == text


def test_key_order_and_number_spelling_are_the_models() -> None:
    text = (
        '<tool_call>{"name": "get_weather", "arguments": {"z": 1e5, "a": 0.10, "m": 12345678901234567890}}</tool_call>'
    )
    assert parse("qwen-json", text).calls == [("get_weather", '{"z": 1e5, "a": 0.10, "m": 12345678901234567890}')]


def test_line_breaks_in_json_strings_are_mended() -> None:
    output = parse("qwen-json", '<tool_call>{"name": "write_file", "arguments": {"content": "a\nb"}}</tool_call>')
    assert output.calls == [("write_file", '{"content": "a\\nb"}')]


# Custom tools.


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("qwen-json", '<tool_call>{"name": "apply_patch", "arguments": {"input": "*** Begin\\n+1"}}</tool_call>'),
        ("qwen-json", '<tool_call>{"name": "apply_patch", "arguments": {"patch": "*** Begin\\n+1"}}</tool_call>'),
        ("qwen-json", '<tool_call>{"name": "apply_patch", "arguments": "*** Begin\\n+1"}</tool_call>'),
        (
            "qwen-xml",
            "<tool_call>\n<function=apply_patch>\n<parameter=input>\n*** Begin\n+1\n</parameter>\n</function>",
        ),
        (
            "harmony",
            '<|channel|>commentary to=functions.apply_patch <|constrain|>json<|message|>{"input":"*** Begin\\n+1"}',
        ),
        ("harmony", "<|channel|>commentary to=functions.apply_patch<|message|>*** Begin\n+1<|call|>"),
        ("harmony", "<|channel|>commentary to=functions.apply_patch <|constrain|>patch<|message|>*** Begin\n+1"),
        (
            "minimax-m3",
            f'{NS}<tool_call>{NS}<invoke name="apply_patch">{NS}<input>*** Begin\n+1{NS}</input>{NS}</invoke>',
        ),
    ],
)
def test_a_custom_tool_gets_plain_text(format: str, text: str) -> None:
    assert parse(format, text).calls == [("apply_patch", "*** Begin\n+1")]


def test_tools_in_namespaces_are_known_by_any_of_their_names() -> None:
    tool = ToolSpec("spawn", schema={"properties": {"count": {"type": "integer"}}}, namespace="agents")
    for name in ("agents__spawn", "agents.spawn", "spawn"):
        text = f"<tool_call>{name}<arg_key>count</arg_key><arg_value>2</arg_value></tool_call>"
        assert calls(parse("glm", text, tools=[tool])) == [(name, {"count": 2})]


# What is no call.


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("qwen-json", "Calls stand between <tool_call> and </tool_call> tags."),
        ("qwen-json", "<tool_call>not JSON</tool_call> but so."),
        ("qwen-json", '<tool_call>{"name": "x", "arguments": {}'),
        ("qwen-json", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("qwen-json", '<tool_call>{"name": "x", "arguments": [1]}</tool_call>'),
        ("qwen-json", '<tool_call>{"name": "x", "arguments": {"a": NaN}}</tool_call>'),
        ("qwen-json", 'Write `<tool_call>{"name": "get_time", "arguments": {}}</tool_call>` to call.'),
        ("qwen-xml", "Use <function=NAME> and then the rest."),
        ("glm", "The tag <tool_call> opens a call."),
        ("deepseek-v3", "<｜tool▁calls▁begin｜>nothing<｜tool▁calls▁end｜>"),
        ("deepseek-v4", "<｜DSML｜tool_calls>\n</｜DSML｜tool_calls>"),
        ("minimax-m2", "<minimax:tool_call>\n<invoke>\n</invoke>"),
        ("minimax-m3", f'{NS}<tool_call>{NS}<invoke name="x">loose text{NS}</invoke>'),
        ("gemma4", "<|tool_call>call:bad no brace<tool_call|>"),
        ("gemma4", '<|tool_call>call:bad{a:<|"|>b<|"|> c}<tool_call|>'),
        ("llama3", '{"answer": 42}'),
        ("llama3", '{"answer": 42'),
        ("llama3", '{"name": "get_time"} is what I would write'),
        ("mistral", "[TOOL_CALLS] not JSON at all"),
        ("mistral", "[TOOL_CALLS][]"),
    ],
)
def test_what_only_looks_like_a_call_is_text(format: str, text: str) -> None:
    output = parse(format, text)
    assert (output.text, output.calls) == (text, [])


@pytest.mark.parametrize(
    ("text", "called"),
    [
        ("Let me look at `a.py`CALL", True),
        ('It says "no"CALL', True),
        ("`a` and `CALL`", False),
        ('"CALL" calls it', False),
        ("“CALL” calls it", False),
        ("`open\n\nCALL", True),
        ("`CALL", False),
        ("CALL`", True),
    ],
)
def test_only_an_open_quotation_makes_a_call_text(text: str, called: bool) -> None:
    call = '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
    output = parse("qwen-json", text.replace("CALL", call))
    assert bool(output.calls) is called
    assert called or output.text == text.replace("CALL", call)


def test_a_call_after_something_that_is_none_is_found() -> None:
    text = 'A <tool_call> opens: <tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
    output = parse("qwen-json", text)
    assert (output.text, calls(output)) == ("A <tool_call> opens:", [("get_time", {})])


def test_without_tools_nothing_is_a_call() -> None:
    text = '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
    output = parse("qwen-json", "<think>hm</think>" + text, tools=())
    assert (output.text, output.reasoning, output.calls) == (text, "hm", [])
    assert parse("llama3", '{"name": "x", "parameters": {}}', tools=()).calls == []


def test_messages_to_nobody_here_are_dropped() -> None:
    text = "<|channel|>commentary to=python <|constrain|>code<|message|>1 + 1<|call|><|start|>assistant<|channel|>final"
    output = parse("harmony", text + "<|message|>2")
    assert (output.text, output.reasoning, output.calls) == ("2", "", [])


def test_calls_echoed_to_the_user_or_to_oneself_are_not_executed() -> None:
    call = '<atem:function_calls>\n<atem:invoke name="get_time">\n</atem:invoke>\n</atem:function_calls>'
    text = f" to=self<|message|>{call}<|eom|><|start|>assistant to=user<|message|>{call}<|eot|>"
    output = parse("muse", text)
    assert (output.text, output.reasoning, output.calls) == (call, call, [])


# Reasoning.


@pytest.mark.parametrize(
    ("tail", "text", "reasoning", "answer"),
    [
        ("<|im_start|>assistant\n", "<think>\nhm\n</think>\n\nyes", "hm", "yes"),
        ("<|im_start|>assistant\n", "yes", "", "yes"),
        ("<|im_start|>assistant\n<think>\n", "hm\n</think>\n\nyes", "hm", "yes"),
        ("<|im_start|>assistant\n<think>\n", "hm", "hm", ""),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "yes", "", "yes"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "a </think> b", "", "a </think> b"),
        ("<|im_start|>assistant\n<think>\n", "a</think>The tag </think> ends it.", "a", "The tag </think> ends it."),
        ("<|im_start|>user\nwhat is <think>?<|im_end|>\n<|im_start|>assistant\n", "it", "", "it"),
        ("<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n<think>\nWell,", " hm</think>it", " hm", "it"),
        ("another template<think>", "hm</think>yes", "hm", "yes"),
        ("another template<think>\n\n</think>\n\n", "yes", "", "yes"),
        ("another template", "A <think> in the text is text.", "", "A <think> in the text is text."),
        ("<|im_start|>assistant\nSure:", " <think>no</think>", "", " <think>no</think>"),
    ],
)
@pytest.mark.parametrize("format", ["qwen-json", "qwen-xml"])
def test_the_prompts_end_decides_where_reasoning_begins(
    format: str, tail: str, text: str, reasoning: str, answer: str
) -> None:
    output = parse(format, text, tail)
    assert (output.reasoning, output.text) == (reasoning, answer)


def test_a_call_in_reasoning_is_not_executed() -> None:
    call = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    output = parse("qwen-json", f"I could {call} now.</think>{call}", "<|im_start|>assistant\n<think>\n")
    assert (output.reasoning, output.text, calls(output)) == (f"I could {call} now.", "", [("get_time", {})])


def test_reasoning_and_answer_of_several_messages_are_set_apart() -> None:
    parts = ["analysis<|message|>one", "analysis<|message|>two", "commentary<|message|>Hi.", "final<|message|>Done."]
    text = "<|end|><|start|>assistant".join("<|channel|>" + part for part in parts)
    output = parse("harmony", text, "<|start|>assistant")
    assert (output.reasoning, output.text) == ("one\n\ntwo", "Hi.\n\nDone.")


def test_a_prompt_may_have_begun_a_message_or_a_call() -> None:
    output = parse("harmony", "go on<|end|>", "<|start|>assistant<|channel|>final<|message|>Please")
    assert output.text == "go on"
    output = parse(
        "qwen-json", ' "get_time", "arguments": {}}\n</tool_call>', '<|im_start|>assistant\n<tool_call>\n{"name":'
    )
    assert calls(output) == [("get_time", {})]


@pytest.mark.parametrize(
    ("format", "tail", "text", "reasoning", "answer"),
    [
        # The same turn goes on after a tool's result.
        (
            "gemma4",
            "<|turn>model\n<|tool_call>call:f{}<tool_call|><|tool_response>response:f{x:1}<tool_response|>",
            "<|channel>thought\nhm\n<channel|>yes",
            "hm",
            "yes",
        ),
        (
            "mistral",
            "[/INST][TOOL_CALLS]f[ARGS]{}</s>[TOOL_RESULTS]1[/TOOL_RESULTS]",
            "[THINK]hm[/THINK]yes",
            "hm",
            "yes",
        ),
        ("deepseek-v3.1", "<｜Assistant｜></think>a<｜tool▁output▁begin｜>1<｜tool▁output▁end｜>", "yes", "", "yes"),
        # The last turn that begins as expected is over: the template begins turns in another way, too.
        ("qwen-json", "<|im_start|>assistant\n<think>\na<|im_end|>\n<|other|>", "yes", "", "yes"),
        ("qwen-json", "<|im_start|>assistant\na<|im_end|>\n<|other|><think>", "hm</think>yes", "hm", "yes"),
    ],
)
def test_a_turn_that_goes_on_or_begins_otherwise(
    format: str, tail: str, text: str, reasoning: str, answer: str
) -> None:
    output = parse(format, text, tail)
    assert (output.reasoning, output.text) == (reasoning, answer)


def test_calls_of_the_prompt_do_not_count() -> None:
    call = '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
    parser = format_named("qwen-json").open(TOOLS, "<|im_start|>assistant\n" + call)
    assert parser.num_calls == 0
    assert parser.feed("\n" + call)[0] == ToolCallStarted(0, "get_time")


def test_a_model_that_writes_no_header_is_heard() -> None:
    assert parse("harmony", "Just text.", "<|start|>assistant").text == "Just text."
    long = "Just text. " * 100
    assert parse("harmony", long, "<|start|>assistant").text == long


def test_plain_thinking_has_no_calls() -> None:
    text = '<think>a</think>b <tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
    output = parse_output(PLAIN_THINKING, TOOLS, "", [text])
    assert (output.reasoning, output.calls) == ("a", [])
    assert output.text.startswith("b <tool_call>")


# White space.


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("CALL", ""),
        ("\n\nCALL\n", ""),
        ("Look.\n\nCALL\nCALL\n", "Look."),
        ("Look. CALL", "Look."),
        ("Look. CALL Done.", "Look.  Done."),
        ("CALL\n\nDone.", "Done."),
        ("Look.\nCALL\n\nDone.\n", "Look.\n\nDone.\n"),
        ("  indented\n\n", "  indented\n\n"),
    ],
)
def test_white_space_around_calls(text: str, answer: str) -> None:
    call = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    output = parse("qwen-json", text.replace("CALL", call))
    assert output.text == answer
    assert len(output.calls) == text.count("CALL")
