"""Llama 3.1 to 3.3: a JSON object is the whole answer, or follows a special token."""

from freetoken.serving.parsers.format import CallSyntax, JsonCalls, OutputFormat

LLAMA3 = OutputFormat(
    name="llama3",
    families=("llama",),
    detect=(("<|start_header_id|>", '"parameters"'), ("<|start_header_id|>", "<|python_tag|>")),
    turn_begin=("<|start_header_id|>assistant<|end_header_id|>\n\n",),
    calls=(JsonCalls(begin="<|python_tag|>", bare=True, separator=";"),),
    call_syntax=CallSyntax(
        body="json",
        begin='{"name": "',
        after_name='", "parameters": ',
        end="}",
        separator="; ",
        parallel=False,
    ),
    special_tokens=("<|python_tag|>",),
    stop_tokens=("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
)

FORMATS = (LLAMA3,)
