"""What a chat template can take, found by rendering small conversations with it.

Templates differ in what they accept and in what they silently drop, and do not say so. Every trait here is seen in the
rendered text of a probe: a probe that raises, loses a word or moves it has failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from freetoken.serving.template import ChatTemplate, TemplateRefusedError

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")

# Words that no template contains. They are short, alphanumeric, and no part of one another.
_SYS, _SYS2, _USER, _USER2, _SAID, _THOUGHT = "zqSystemA", "zqSystemB", "zqUserA", "zqUserB", "zqSaid", "zqThought"
_TOOL, _VALUE, _RESULT = "zqtool", "zqValue", "zqResult"

PROBE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": _TOOL,
        "description": "zqDescription",
        "parameters": {"type": "object", "properties": {"zqkey": {"type": "string", "description": "zqKeyText"}}},
    },
}


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What the template does.

    - ``system``: takes a system message at the front; ``system_anywhere``: and leaves later ones in their place.
    - ``developer``: has that role.
    - ``repeated_users``: keeps two user messages in a row; ``user_after_result``: and one after a tool's result.
    - ``tools``, ``calls``, ``results``: shows declarations, earlier calls, and what they returned; the renderer writes
      declarations itself where the template does not, and calls with results where it does not show both.
    - ``arguments_as_text``: wants a call's arguments as JSON text.
    - ``results_alone``: shows a result just so when the message before it names no call.
    - ``reasoning_field``: the field of a message whose text it shows as reasoning.
    - ``call_closing``: what it writes behind a call whose last character is that of a string argument.
    """

    system: bool = True
    system_anywhere: bool = False
    developer: bool = False
    repeated_users: bool = True
    user_after_result: bool = True
    tools: bool = False
    calls: bool = False
    results: bool = False
    arguments_as_text: bool = False
    results_alone: bool = False
    reasoning_field: str | None = None
    call_closing: str = ""

    @property
    def shows_calls(self) -> bool:
        """The template writes calls and their results."""
        return self.calls and self.results


def message(role: str, content: str, **fields: Any) -> dict[str, Any]:
    """A message as templates expect it."""
    return {"role": role, "content": content, **fields}


def call_message(content: str, arguments: Any, name: str = _TOOL, call_id: str = "000000001") -> dict[str, Any]:
    """An assistant's message with one call."""
    function = {"name": name, "arguments": arguments}
    return message("assistant", content, tool_calls=[{"id": call_id, "type": "function", "function": function}])


def _result_message() -> dict[str, Any]:
    return message("tool", _RESULT, tool_call_id="000000001", name=_TOOL)


class _Probe:
    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def render(self, *messages: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The text, or an empty one when the template refuses."""
        try:
            return self._template.render(list(messages), tools, add_generation_prompt=False)
        except TemplateRefusedError:
            return ""

    def in_order(self, *words: str, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Each word stands exactly once in the text, and in this order."""
        text = self.render(*messages)
        places = [text.find(word) for word in words]
        return min(places) >= 0 and places == sorted(places) and all(text.count(word) == 1 for word in words)


def probe(template: ChatTemplate) -> TemplateTraits:
    """The traits of ``template``: some twenty tiny renderings."""
    see = _Probe(template)
    system, user, user2 = message("system", _SYS), message("user", _USER), message("user", _USER2)
    said = message("assistant", _SAID)
    late = message("system", _SYS2)
    takes_system = see.in_order(_SYS, _USER, messages=[system, user])
    anywhere = (
        takes_system
        and see.in_order(_SYS, _USER, _SYS2, messages=[system, user, late])
        and see.in_order(_SYS, _USER, _SYS2, _SAID, _USER2, messages=[system, user, late, said, user2])
        and see.in_order(_USER, _SYS2, messages=[user, late])
        and see.in_order(_SYS, _SYS2, _USER, messages=[system, late, user])
    )
    developer = template.knows_developer_role and see.in_order(_SYS, _USER, messages=[message("developer", _SYS), user])
    shown = see.render(user, tools=[PROBE_TOOL])
    tools = all(word in shown for word in (_TOOL, "zqKeyText"))
    as_text, calls = _arguments(see)
    arguments: Any = f'{{"zqkey": "{_VALUE}"}}' if as_text else {"zqkey": _VALUE}
    calling = call_message("", arguments)
    results = calls and see.in_order(_USER, _VALUE, _RESULT, messages=[user, calling, _result_message()])
    closing = see.render(user, calling).rpartition(_VALUE)
    return TemplateTraits(
        system=takes_system,
        system_anywhere=anywhere,
        developer=developer,
        repeated_users=see.in_order(_USER, _USER2, messages=[user, user2]),
        user_after_result=not results
        or see.in_order(_VALUE, _RESULT, _USER2, messages=[user, calling, _result_message(), user2]),
        tools=tools,
        calls=calls,
        results=results,
        arguments_as_text=as_text,
        results_alone=results and _results_alone(see, user, arguments),
        reasoning_field=_reasoning_field(see, user),
        call_closing=closing[2] if calls and closing[1] else "",
    )


def _arguments(see: _Probe) -> tuple[bool, bool]:
    """(arguments go in as text, calls are shown at all). Objects are preferred: what the template makes of them is what
    the model was trained on; a Python rendering of them is not."""
    user = message("user", _USER)
    text = see.render(user, call_message("", {"zqkey": _VALUE}))
    if _TOOL in text and _VALUE in text and "'zqkey'" not in text:
        return False, True
    text = see.render(user, call_message("", f'{{"zqkey": "{_VALUE}"}}'))
    return True, _TOOL in text and _VALUE in text


def _results_alone(see: _Probe, user: Mapping[str, Any], arguments: Any) -> bool:
    """Whether what follows an assistant's message is the same with and without a call in it."""
    following = [_result_message(), message("assistant", "zqLater"), message("user", _USER2)]
    bare = see.render(user, message("assistant", _SAID), *following)
    full = see.render(user, call_message(_SAID, arguments), *following)
    if bare.count(_SAID) != 1 or bare.count(_RESULT) != 1 or not full:
        return False
    return full.endswith(bare.partition(_SAID)[2])


def _reasoning_field(see: _Probe, user: Mapping[str, Any]) -> str | None:
    for name in REASONING_FIELDS:
        if see.in_order(_THOUGHT, _SAID, messages=[user, message("assistant", _SAID, **{name: _THOUGHT})]):
            return name
    return None
