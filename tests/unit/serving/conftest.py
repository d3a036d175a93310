"""A tokenizer with a template."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from freetoken.serving.template import ChatTemplate
from freetoken.serving.tokenizer import TextModel, load_text_model
from freetoken.testing.front_fakes import write_text_checkpoint


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return load_text_model(write_text_checkpoint(tmp_path_factory.mktemp("text")))


@pytest.fixture
def with_template(text_model: TextModel) -> Callable[[str], TextModel]:
    """The text model with another template."""

    def make(source: str) -> TextModel:
        return replace(text_model, template=ChatTemplate({"default": source}, text_model.tokenizer.special_tokens))

    return make


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).parents[3]
