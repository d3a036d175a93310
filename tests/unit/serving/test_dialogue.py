"""What a dialogue takes from the model's output format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from freetoken.serving.dialogue import Dialogue
from freetoken.serving.tokenizer import TextModel
from freetoken.testing.front_fakes import CHATML, make_front_spec

CALLS = '{# <tool_call> {"name": ..., "arguments": ...} </tool_call> #}'


def test_tokens_that_end_a_turn_in_the_format_end_the_sequence(
    with_template: Callable[[str], TextModel], tmp_path: Path
) -> None:
    text = with_template(CHATML + CALLS)
    dialogue = Dialogue.of(make_front_spec(tmp_path), text)
    assert dialogue.output.name == "qwen-json"
    ids = [text.tokenizer.token_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    assert dialogue.stop_ids == tuple(ids)
    assert dialogue.ending(text).defaults.eos_token_ids == tuple(ids)


def test_a_format_that_the_template_does_not_have_ends_nothing(
    with_template: Callable[[str], TextModel], tmp_path: Path
) -> None:
    text = with_template(CHATML)
    dialogue = Dialogue.of(make_front_spec(tmp_path), text)
    assert dialogue.output.calls
    assert dialogue.stop_ids == ()
    assert dialogue.ending(text) == text
