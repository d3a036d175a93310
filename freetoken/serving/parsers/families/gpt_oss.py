"""GPT-OSS: Harmony, messages on channels."""

from freetoken.serving.parsers.format import CallSyntax, Channels, OutputFormat

GPT_OSS = OutputFormat(
    name="harmony",
    families=("gpt_oss",),
    detect=(("<|channel|>", "<|message|>", "<|start|>"),),
    turn_begin=("<|start|>assistant",),
    channels=Channels(
        start="<|start|>",
        message="<|message|>",
        ends=("<|end|>", "<|return|>"),
        call_ends=("<|call|>",),
        channel="<|channel|>",
        constrain="<|constrain|>",
        reasoning_on=("analysis",),
        text_to=("user", "all"),
        tool_prefix="functions.",
    ),
    call_syntax=CallSyntax(
        body="json",
        begin="<|channel|>commentary to=functions.",
        after_name=" <|constrain|>json<|message|>",
        end="",
        parallel=False,
        ends_turn="<|call|>",
    ),
    special_tokens=(
        "<|start|>",
        "<|end|>",
        "<|message|>",
        "<|channel|>",
        "<|constrain|>",
        "<|call|>",
        "<|return|>",
    ),
    stop_tokens=("<|call|>", "<|return|>", "<|endoftext|>"),
)

FORMATS = (GPT_OSS,)
