"""Prompts of consecutive turns: the next one extends the ids of the last one and of what was generated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from freetoken.serving.choice import Finish
from freetoken.serving.conversation import (
    Conversation,
    Part,
    ReasoningPart,
    TextPart,
    ToolCallPart,
    ToolResultPart,
    Turn,
)
from freetoken.serving.errors import ApiError
from freetoken.serving.output_memory import ANSWER_TOKENS, OutputMemory
from freetoken.serving.prompt import PromptRenderer, RenderedPrompt
from freetoken.serving.reply import ChoiceEnded, ReplyCall, ReplyMessage, ReplyReasoning, ReplyText
from freetoken.serving.tokenizer import TextModel
from freetoken.serving.tools import ToolChoice, ToolSpec
from freetoken.testing.chat_templates import ALL, CHANNELS, OPENED, PLAIN, STRICT, THINKING

LS = ToolSpec("ls", description="List.", schema={"type": "object", "properties": {"path": {"type": "string"}}})
WithTemplate = Callable[[str], TextModel]


def user(text: str) -> Turn:
    return Turn("user", (TextPart(text),))


def assistant(*parts: Part) -> Turn:
    return Turn("assistant", parts)


def result(call_id: str, text: str) -> Turn:
    return Turn("tool", (ToolResultPart.of_text(call_id, text),))


class Session:
    """Renders turn after turn, and remembers answers as the front does."""

    def __init__(self, model: TextModel, **options: Any) -> None:
        self.model = model
        self.memory = OutputMemory(10_000)
        self.renderer = PromptRenderer(model, self.memory, (2,), **options)

    def text(self, prompt: RenderedPrompt) -> str:
        return self.model.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)

    def odd_ids(self, text: str) -> list[int]:
        """Ids of ``text`` as a model may choose them: byte by byte, unlike the tokeniser's."""
        return [i for c in text for i in self.model.tokenizer.encode(c, add_special_tokens=False)]

    def answer(
        self,
        prompt: RenderedPrompt,
        raw: str,
        text: str = "",
        reasoning: str = "",
        call: tuple[str, str, str] | None = None,
    ) -> tuple[int, ...]:
        message = ReplyMessage(0)
        if reasoning:
            message.parts.append(ReplyReasoning(reasoning))
        if text:
            message.parts.append(ReplyText(text))
        if call is not None:
            message.parts.append(ReplyCall(0, call[0], call[1], arguments=call[2]))
        message.ended = ChoiceEnded(0, "stop", Finish("stop"))
        ids = self.odd_ids(raw)
        self.renderer.remember(prompt, message, ids)
        return prompt.token_ids + tuple(ids)


RAW_CALL = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "ls", "arguments": {"path": "/"}}\n</tool_call>'
RAW = {
    "plain": '<tool_call>{"name": "ls", "arguments": {"path": "/"}}</tool_call>',
    "thinking": RAW_CALL,
    "opened": RAW_CALL.removeprefix("<think>\n"),
    "channels": '<|c|>analysis<|m|>hm<|im_end|><|im_start|>assistant to=functions.ls<|m|>{"path":"/"}',
    "strict": '[CALLS]ls{"path": "/"}',
}
CALL = ToolCallPart("call_1", "ls", {"path": "/"})


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("sends_reasoning", [True, False])
def test_each_turn_extends_the_one_before(name: str, sends_reasoning: bool, with_template: WithTemplate) -> None:
    session = Session(with_template(ALL[name]))
    turns: list[Turn] = [Turn("system", (TextPart("Be brief."),)), user("look")]
    tools = (LS,)
    first = session.renderer.render(Conversation(tuple(turns), tools))
    has_reasoning = "hm" in RAW[name]
    said = session.answer(first, RAW[name], "", "hm" if has_reasoning else "", ("call_1", "ls", '{"path": "/"}'))

    echo = (ReasoningPart("hm"), CALL) if sends_reasoning and has_reasoning else (CALL,)
    turns += [assistant(*echo), result("call_1", "a.txt")]
    second = session.renderer.render(Conversation(tuple(turns), tools))
    assert second.token_ids[: len(said)] == said
    assert second.num_recognised == 1
    assert session.text(second).count("a.txt") == 1
    assert session.text(second).count("hm") == has_reasoning

    said = session.answer(second, "It is a.txt", "It is a.txt")
    turns += [assistant(TextPart("It is a.txt")), user("again")]
    third = session.renderer.render(Conversation(tuple(turns), tools))
    assert third.token_ids[: len(said)] == said
    assert third.num_recognised == 2


@pytest.mark.parametrize("name", ALL)
def test_the_text_around_a_recognised_turn_is_the_templates(name: str, with_template: WithTemplate) -> None:
    session = Session(with_template(ALL[name]))
    turns = [user("hi"), assistant(TextPart("hello")), user("bye")]
    plain = session.text(session.renderer.render(Conversation(tuple(turns))))
    first = session.renderer.render(Conversation(tuple(turns[:1])))
    opening = "<|c|>final<|m|>" if name == "channels" else "stop\n</think>\n\n" if name == "opened" else ""
    session.answer(first, f"{opening}hello", "hello")
    recognised = session.renderer.render(Conversation(tuple(turns)))
    assert recognised.num_recognised == 1
    assert session.text(recognised).endswith(plain.partition("hello")[2])


def test_what_a_template_says_after_a_call_does_not_hide_the_turn(with_template: WithTemplate) -> None:
    """Some templates show a message's text behind its calls, or drop it once there is an answer."""
    behind = CHANNELS.replace(
        "{% if m.content %}<|im_start|>assistant<|c|>analysis<|m|>{{ m.content }}<|im_end|>{% endif %}", ""
    )
    behind = behind.replace("| tojson }}<|call|>", "| tojson }}<|call|>{{ m.content }}")
    session = Session(with_template(behind))
    first = session.renderer.render(Conversation((user("look"),), (LS,)))
    said = session.answer(first, RAW["channels"], "so", "hm", ("call_1", "ls", '{"path": "/"}'))
    turns = (user("look"), assistant(TextPart("so"), CALL), result("call_1", "a.txt"))
    second = session.renderer.render(Conversation(turns, (LS,)))
    assert second.token_ids[: len(said)] == said
    assert session.text(second).endswith('functions.ls to=assistant<|m|>"a.txt"<|im_end|><|im_start|>assistant')


def test_thinking_of_earlier_turns_is_kept_or_left_to_the_template(with_template: WithTemplate) -> None:
    turns = (user("hi"), assistant(TextPart("hello")), user("bye"))
    for keep in (True, False):
        session = Session(with_template(THINKING), keep_reasoning=keep)
        first = session.renderer.render(Conversation(turns[:1]))
        session.answer(first, "<think>\nhm\n</think>\n\nhello", "hello", "hm")
        again = session.renderer.render(Conversation(turns))
        assert again.num_recognised == keep
        assert ("hm" in session.text(again)) == keep


def test_what_the_client_changed_is_not_recognised(with_template: WithTemplate) -> None:
    session = Session(with_template(THINKING))
    first = session.renderer.render(Conversation((user("hi"),)))
    session.answer(first, "hello", "hello")
    for turns in (
        (user("hi"), assistant(TextPart("hello!")), user("bye")),
        (user("hi "), assistant(TextPart("hello")), user("bye")),
        (user("hi"), user("x"), assistant(TextPart("hello")), user("bye")),
    ):
        prompt = session.renderer.render(Conversation(turns))
        assert prompt.num_recognised == 0
        assert "hello" in session.text(prompt)
    other_tools = session.renderer.render(Conversation((user("hi"), assistant(TextPart("hello")), user("b")), (LS,)))
    assert other_tools.num_recognised == 0


def test_equal_answers_keep_their_own_ids(with_template: WithTemplate) -> None:
    session = Session(with_template(PLAIN))
    turns: list[Turn] = []
    said: tuple[int, ...] = ()
    for thought in ("one", "two"):
        turns.append(user("go"))
        prompt = session.renderer.render(Conversation(tuple(turns)))
        assert prompt.token_ids[: len(said)] == said
        said = session.answer(prompt, f"({thought})done", "done", thought)
        turns.append(assistant(TextPart("done")))
    turns.append(user("end"))
    assert session.renderer.render(Conversation(tuple(turns))).token_ids[: len(said)] == said


def test_changed_spelling_is_recognised(with_template: WithTemplate) -> None:
    session = Session(with_template(THINKING))
    first = session.renderer.render(Conversation((user("hi"),), (LS,)))
    session.answer(first, RAW_CALL, "\n\nsure ", "hm", ("call_1", "ls", '{"a": 1.0, "b": [2]}'))
    echo = assistant(TextPart("sure"), ToolCallPart("call1", "ls", {"b": [2], "a": 1}))
    second = session.renderer.render(Conversation((user("hi"), echo, result("call1", "x")), (LS,)))
    assert second.num_recognised == 1


def test_reasoning_is_given_back_where_the_ids_cannot_be(with_template: WithTemplate) -> None:
    session = Session(with_template(THINKING))
    first = session.renderer.render(Conversation((user("hi"),), (LS,)))
    session.answer(first, RAW_CALL, "", "hm", ("call_1", "ls", '{"path": "/"}'))
    turns = (user("changed"), assistant(ToolCallPart("call1", "ls", {"path": "/"})), result("call1", "x"))
    second = session.renderer.render(Conversation(turns, (LS,)))
    assert second.num_recognised == 0
    assert "<think>\nhm\n</think>" in session.text(second)


def test_a_template_that_looks_ahead_is_noticed(with_template: WithTemplate) -> None:
    source = "{{ messages | length }}" + PLAIN
    session = Session(with_template(source))
    first = session.renderer.render(Conversation((user("hi " * 50),)))
    session.answer(first, "hello", "hello")
    turns = (user("hi " * 50), assistant(TextPart("hello")), user("bye"))
    second = session.renderer.render(Conversation(turns))
    assert second.num_recognised == 0
    assert session.text(second).startswith("3")
    assert "hello" in session.text(second)


def test_a_client_that_writes_the_mark_of_another_process_is_harmless(with_template: WithTemplate) -> None:
    session = Session(with_template(PLAIN))
    mark = session.renderer._mark
    prompt = session.renderer.render(Conversation((user(f"{mark}n0x"), assistant(TextPart("a")), user("b"))))
    assert f"{mark}n0x" in session.text(prompt)


def test_the_memory_is_bounded(with_template: WithTemplate) -> None:
    session = Session(with_template(PLAIN))
    session.memory = OutputMemory(2 * (8 + ANSWER_TOKENS) + 4)
    session.renderer = PromptRenderer(session.model, session.memory, (2,))
    for i in range(10):
        prompt = session.renderer.render(Conversation((user(f"hi {i}"),)))
        session.answer(prompt, "12345678", "12345678", call=(f"call_{i}", "f", "{}"))
        assert session.memory.num_tokens <= 2 * (8 + ANSWER_TOKENS)
    assert len(session.memory) == 2
    assert len(session.memory._calls) == 2


def test_continuing_the_last_turn(with_template: WithTemplate) -> None:
    for source in (PLAIN, THINKING, STRICT):
        session = Session(with_template(source))
        turns = (user("hi"), assistant(TextPart("The answer is")))
        prompt = session.renderer.render(Conversation(turns, continue_final=True))
        assert session.text(prompt).endswith("The answer is")
        assert prompt.end is None


def test_long_segments_are_encoded_once(with_template: WithTemplate, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(with_template(PLAIN))
    encoded: list[int] = []
    tokenizer = session.model.tokenizer
    original = tokenizer.encode

    def counting(text: str, add_special_tokens: bool) -> list[int]:
        encoded.append(len(text))
        return original(text, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode", counting)
    turns: list[Turn] = [user("the quick brown fox " * 500)]
    for i in range(3):
        encoded.clear()
        prompt = session.renderer.render(Conversation(tuple(turns)))
        assert sum(encoded) < 200 or i == 0
        session.answer(prompt, "ok", "ok")
        turns += [assistant(TextPart("ok")), user("go on")]


def test_errors_are_the_clients(text_model: TextModel, with_template: WithTemplate) -> None:
    with pytest.raises(ApiError, match="no chat template"):
        Session(replace(text_model, template=None)).renderer.render(Conversation((user("x"),)))
    with pytest.raises(ApiError, match="must alternate"):
        Session(with_template(STRICT)).renderer.render(Conversation((assistant(TextPart("a")),)))


def test_tools_are_hidden_when_none_may_be_called(with_template: WithTemplate) -> None:
    session = Session(with_template(CHANNELS))
    shown = session.renderer.render(Conversation((user("x"),), (LS,)))
    hidden = session.renderer.render(Conversation((user("x"),), (LS,), ToolChoice("none")))
    assert '"ls"' in session.text(shown) and '"ls"' not in session.text(hidden)


def test_ordered_tools(with_template: WithTemplate) -> None:
    other = ToolSpec("cat", schema={"type": "object", "properties": {"b": {}, "a": {}}})
    twin = ToolSpec("cat", schema={"properties": {"a": {}, "b": {}}, "type": "object"})
    session = Session(with_template(OPENED), ordered_tools=True)
    one = session.renderer.render(Conversation((user("x"),), (LS, other)))
    two = session.renderer.render(Conversation((user("x"),), (twin, LS)))
    assert one.token_ids == two.token_ids
    faithful = Session(with_template(OPENED))
    one = faithful.renderer.render(Conversation((user("x"),), (LS, other)))
    two = faithful.renderer.render(Conversation((user("x"),), (twin, LS)))
    assert one.token_ids != two.token_ids
