"""Well-formed requests of every dialect, for a fuzzer to begin with, and values that programs do not expect."""

from __future__ import annotations

from typing import Any

_SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "n": {"type": "integer", "minimum": 0},
        "deep": {"enum": ["a", 1, None]},
    },
    "required": ["path"],
    "additionalProperties": False,
}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "ls", "arguments": '{"path": "/", "n": 3}'}}
_CHAT_TOOLS = [
    {"type": "function", "function": {"name": "ls", "description": "Lists.", "parameters": _SCHEMA, "strict": True}},
    {"type": "custom", "custom": {"name": "patch", "format": {"type": "grammar", "grammar": _SCHEMA}}},
    {"type": "web_search"},
]
_CHAT_TOOLS[1]["custom"]["format"]["grammar"] = {"syntax": "regex", "definition": "[a-z]+"}  # type: ignore[index]
_CHAT = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "What is in /?"}, {"type": "image_url", "image_url": {"url": "x"}}],
    },
    {"role": "assistant", "content": None, "reasoning_content": "I look.", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "bin etc"},
    {"role": "user", "content": "And /etc? größe 你好 😀"},
]
_RESPONSES_TOOLS = [
    {"type": "function", "name": "ls", "description": "Lists.", "parameters": _SCHEMA, "strict": True},
    {"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "cat", "parameters": _SCHEMA}]},
    {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a"+'}},
    {"type": "tool_search", "execution": "client"},
    {"type": "web_search"},
]
_INPUT = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
    {"role": "user", "content": "What is in /?"},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "I look."}], "encrypted_content": "nonsense"},
    {"type": "function_call", "call_id": "call_1", "name": "ls", "arguments": '{"path": "/"}'},
    {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "bin etc"}]},
    {"type": "custom_tool_call", "call_id": "call_2", "name": "patch", "input": "aaa"},
    {"type": "custom_tool_call_output", "call_id": "call_2", "output": "done"},
    {"type": "local_shell_call", "call_id": "call_3", "action": {"type": "exec", "command": ["ls", "/"]}},
    {"type": "local_shell_call_output", "call_id": "call_3", "output": "bin"},
]
_BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "I look.", "signature": "c2ln"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "toolu_1", "name": "ls", "input": {"path": "/", "n": 3}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "bin"}]},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
        ],
    },
    {"role": "system", "content": "<total_tokens>1000 tokens left</total_tokens>"},
    {"role": "user", "content": "Go on."},
]  # fmt: skip
_ANTHROPIC_TOOLS = [
    {"name": "ls", "description": "Lists.", "input_schema": _SCHEMA},
    {"name": "late", "input_schema": {"type": "object"}, "defer_loading": True},
    {"type": "web_search_20250305", "name": "web_search"},
]

SEEDS: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
        {"messages": _CHAT, "tools": _CHAT_TOOLS, "max_completion_tokens": 4, "stream": True, "seed": 1},
        {"messages": _CHAT[:2], "tools": _CHAT_TOOLS, "tool_choice": {"type": "function", "function": {"name": "ls"}}},
        {
            "messages": _CHAT[:2], "tools": _CHAT_TOOLS, "stream": True,
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "ls"}}]},
            },
        },
        {
            "messages": _CHAT[-1:], "max_tokens": 3,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA, "strict": True}},
        },
        {"messages": _CHAT[-1:], "max_tokens": 3, "response_format": {"type": "regex", "pattern": "[ab]{2,5}c?"}},
        {"messages": _CHAT[-1:], "max_tokens": 2, "response_format": {"type": "grammar", "grammar": 'start: "a"'}},
        {
            "messages": _CHAT[-1:], "max_tokens": 2, "n": 2, "logprobs": True, "top_logprobs": 3, "stream": True,
            "stream_options": {"include_usage": True}, "logit_bias": {"5": -100, "6": 3.5}, "stop": ["x", "yz"],
            "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 1,
            "repetition_penalty": 1.1,
        },
        {
            "messages": [*_CHAT[:1], {"role": "assistant", "content": "I be"}], "max_tokens": 2,
            "continue_final_message": True, "add_generation_prompt": False, "reasoning_effort": "none",
            "chat_template_kwargs": {"enable_thinking": False, "x": [1]}, "thinking": {"type": "disabled"},
        },
    ],
    "/v1/completions": [
        {"prompt": "once upon", "max_tokens": 3},
        {"prompt": [5, 6, 7], "max_tokens": 3, "stream": True, "echo": True, "logprobs": 2},
        {"prompt": ["a", [8, 9]], "max_tokens": 2, "n": 2, "stop": "q", "min_tokens": 1, "ignore_eos": True},
        {"prompt": "", "max_tokens": 1, "stop_token_ids": [9], "seed": -5, "include_stop_str_in_output": True},
    ],
    "/v1/responses": [
        {"input": "hi", "max_output_tokens": 3},
        {"input": _INPUT, "tools": _RESPONSES_TOOLS, "max_output_tokens": 4, "stream": True, "store": False,
         "include": ["reasoning.encrypted_content"], "reasoning": {"effort": "low", "summary": "auto"}},
        {"input": _INPUT[:2], "tools": _RESPONSES_TOOLS, "tool_choice": "required", "max_output_tokens": 4,
         "instructions": "Be brief.", "metadata": {"a": "b"}, "parallel_tool_calls": False},
        {"input": _INPUT[:2], "tools": _RESPONSES_TOOLS, "max_output_tokens": 4, "stream": True,
         "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "ls"}]}},
        {"input": [{"type": "item_reference", "id": "msg_nowhere"}], "max_output_tokens": 3},
        {"input": "hi", "max_output_tokens": 3, "previous_response_id": "resp_nowhere"},
        {"input": "hi", "max_output_tokens": 3, "text": {"verbosity": "low", "format": {
            "type": "json_schema", "name": "x", "schema": _SCHEMA}}},
    ],
    "/v1/messages": [
        {"messages": _BLOCKS[-1:], "max_tokens": 3},
        {"messages": _BLOCKS, "system": [{"type": "text", "text": "Be brief."}], "tools": _ANTHROPIC_TOOLS,
         "max_tokens": 4, "stream": True, "thinking": {"type": "enabled", "budget_tokens": 1024},
         "metadata": {"user_id": '{"session_id": "s"}'}},
        {"messages": _BLOCKS[:1], "tools": _ANTHROPIC_TOOLS, "tool_choice": {"type": "tool", "name": "ls"},
         "max_tokens": 3, "stream": True},
        {"messages": _BLOCKS[:1], "system": "x-anthropic-billing-header: cch=1;", "max_tokens": 3, "top_k": 0,
         "stop_sequences": ["x"],
         "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": _SCHEMA}}},
    ],
    "/v1/messages/count_tokens": [{"messages": _BLOCKS, "tools": _ANTHROPIC_TOOLS, "system": "Be brief."}],
    "/v1/cache/rebalance": [{"kv_tokens": 64}, {"expert_bytes": "1MiB"}, {"auto": True}],
    "/v1/cache/trace": [{"action": "start", "max_bytes": "64KiB"}, {"action": "stop"}],
}  # fmt: skip
"""Path -> bodies without ``model``."""

SCHEMAS: list[Any] = [
    {"$ref": "#"},
    {"$ref": "#/$defs/x", "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}]}}},
    {"$ref": "http://example.invalid/schema"},
    {"type": "string", "pattern": "(a{1000}){1000}"},
    {"type": "string", "pattern": "("},
    {"type": "string", "minLength": 10**9},
    {"type": "integer", "minimum": 10**400, "maximum": -1},
    {"type": "array", "minItems": 10**7, "items": {"type": "number", "multipleOf": 1e-300}},
    {"enum": []},
    {"not": {}},
    {"allOf": [{"type": "string"}, {"type": "number"}]},
    {"type": "object", "properties": {"\u0000": {"type": ["string", 7]}}, "required": [3]},
    {"if": {"const": 1}, "then": False, "unevaluatedProperties": False},
    {"type": "nonsense"},
    True,
    False,
]
"""Schemas that are recursive, enormous, contradictory or none at all."""

TEXTS: list[str] = [
    "",
    " ",
    "\u0000",
    "\ud800",
    "\udfff\ud800 x",
    "\ufeff\u202e\u2028",
    "<|im_start|>system\n<|im_end|><tool_call>{</tool_call></think>",
    "{{ 7 * 7 }}{% for x in range(10**9) %}{% endfor %}",
    "%s%n{0}",
    "../../etc/passwd",
    "😀" * 300,
    "a" * 70_000,
    "e\u0301" * 2_000,
    "x-anthropic-billing-header: cch=",
    "<total_tokens>9 tokens left</total_tokens>",
    "(a{1000}){1000}",
    "(?=a)(a*)*b",
    'start: start start | "a"',
    '%import nothing\nstart: /[/',
    "{",
    '{"path": NaN, "path": 1e999}',
    "true",
    "null",
]  # fmt: skip

VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31 - 1,
    2**31,
    2**53 + 1,
    2**63 - 1,
    2**63,
    -(2**63) - 1,
    2**64,
    10**400,
    0.1,
    -0.0,
    5e-324,
    1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
    [],
    {},
    [[]],
    [None],
    [{}],
    {"": None},
    {"type": {}},
    {"type": []},
    {"type": None},
    {"type": "text"},
    {"type": "text", "text": {}},
    {"type": "tool_use", "name": [], "input": "x"},
    {"type": "function", "function": []},
    {"role": {}},
    {"role": "user", "content": {}},
    {"$ref": "#"},
    {"__class__": {"__init__": 1}, "messages": []},
]
"""Of other types and sizes than expected. NaN and infinities are written as Python's ``json`` writes them."""
