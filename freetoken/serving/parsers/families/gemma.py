"""Gemma 4: object notation between special tokens, thoughts on a channel."""

from freetoken.serving.parsers.format import CallSyntax, ObjectCalls, OutputFormat, Reasoning

GEMMA4 = OutputFormat(
    name="gemma4",
    families=("gemma4",),
    detect=(("<|tool_call>", '<|"|>'), ("<|tool_call>call:",)),
    turn_begin=("<|turn>model\n", "<tool_response|>"),
    reasoning=(Reasoning("<|channel>thought", "<channel|>"),),
    calls=(ObjectCalls(begin="<|tool_call>", end="<tool_call|>", name_prefix="call:", quote='<|"|>'),),
    call_syntax=CallSyntax(
        body="object",
        begin="<|tool_call>call:",
        after_name="",
        end="<tool_call|>",
        quote='<|"|>',
    ),
    special_tokens=("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
    stop_tokens=("<turn|>", "<|tool_response>", "<eos>"),
)

FORMATS = (GEMMA4,)
