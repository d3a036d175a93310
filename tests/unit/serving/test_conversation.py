"""The dialect-neutral conversation."""

from __future__ import annotations

from freetoken.serving.conversation import (
    ReasoningPart,
    TextPart,
    ToolCallPart,
    ToolResultPart,
    Turn,
    join_assistant_turns,
)


def test_items_of_one_answer_become_one_turn() -> None:
    call = ToolCallPart("call_1", "exec", {"cmd": "ls"})
    turns = (
        Turn("user", (TextPart("go"),)),
        Turn("assistant", (ReasoningPart("hm"),)),
        Turn("assistant", (TextPart("I look."),)),
        Turn("assistant", (call,)),
        Turn("tool", (ToolResultPart.of_text("call_1", "a.txt"),)),
        Turn("assistant", (TextPart("done"),)),
    )
    joined = join_assistant_turns(turns)
    assert [turn.role for turn in joined] == ["user", "assistant", "tool", "assistant"]
    assert joined[1].parts == (ReasoningPart("hm"), TextPart("I look."), call)


def test_reasoning_after_an_answer_begins_the_next_answer() -> None:
    turns = (
        Turn("assistant", (ReasoningPart("a"), TextPart("one"))),
        Turn("assistant", (ReasoningPart("b"),)),
        Turn("assistant", (TextPart("two"),)),
    )
    assert join_assistant_turns(turns) == (
        Turn("assistant", (ReasoningPart("a"), TextPart("one"))),
        Turn("assistant", (ReasoningPart("b"), TextPart("two"))),
    )


def test_an_empty_result_has_no_content() -> None:
    assert ToolResultPart.of_text("c", "").content == ()
