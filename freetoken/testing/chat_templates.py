"""Small chat templates with the habits of real ones, for ``write_text_checkpoint``."""

from __future__ import annotations

# No tools, no reasoning, any role anywhere.
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_TOOLS_SECTION = (
    "{% macro section() %}{% for t in tools %}\n{{ t | tojson }}{% endfor %}{% endmacro %}"
    "{% if tools %}<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}"
    "# Tools{{ section() }}<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
)

# JSON calls, results inside user turns, thinking shown only after the last user message, system only in front.
THINKING = _TOOLS_SECTION + (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'system' %}"
    "{% if not loop.first %}{{ raise_exception('System message must be at the beginning.') }}"
    "{% endif %}"
    "{% elif m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last %}<think>\n{{ m.reasoning_content | default('') | trim }}\n</think>\n\n{% endif %}"
    "{{ m.content | trim }}"
    '{% for c in m.tool_calls or [] %}\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)

# Opens the thinking in the prompt, and shows it always.
OPENED = THINKING.replace("{% if loop.index0 > ns.last %}", "{% if true %}").replace(
    "<think>\n\n</think>\n\n{% endif %}{% endif %}", "<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}{% endif %}"
)

# A result must follow a call, and is shown with its name; calls end with a token of their own.
CHANNELS = (
    "{% if tools %}<|im_start|>developer\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>{% endif %}"
    "{% set ns = namespace(call=none) %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{% if ns.call is none %}{{ raise_exception('no call before the result') }}{% endif %}"
    "<|im_start|>functions.{{ ns.call }} to=assistant<|m|>{{ m.content | tojson }}<|im_end|>"
    "{% elif m.role == 'assistant' and m.tool_calls %}"
    "{% if m.content %}<|im_start|>assistant<|c|>analysis<|m|>{{ m.content }}<|im_end|>{% endif %}"
    "{% set ns.call = m.tool_calls[0].function.name %}"
    "<|im_start|>assistant to=functions.{{ ns.call }}<|m|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant<|c|>final<|m|>{{ m.content }}<|im_end|>"
    "{% else %}<|im_start|>{{ m.role }}<|m|>{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)

# Strict alternation; no system role; arguments must be text.
STRICT = (
    "{% set ns = namespace(user=true) %}"
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != ns.user %}{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% set ns.user = not ns.user %}{% endif %}"
    "{% if m.role == 'user' %}[INST]{% if loop.first and tools %}{{ tools | tojson }}{% endif %}{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have 9 characters') }}"
    "{% endif %}[RESULT]{{ m.content }}[/RESULT]"
    "{% elif m.tool_calls %}[CALLS]"
    "{% for c in m.tool_calls %}{{ c.function.name + c.function.arguments }}{% endfor %}</s>"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)

ALL = {"plain": PLAIN, "thinking": THINKING, "opened": OPENED, "channels": CHANNELS, "strict": STRICT}
