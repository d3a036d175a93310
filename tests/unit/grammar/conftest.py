"""A vocabulary of 512 tokens: all bytes, some words, four special tokens."""

from __future__ import annotations

import pytest

from freetoken.grammar import GrammarCompiler, load_vocabulary
from freetoken.testing.tiny_models import IM_END_ID, VOCAB_SIZE, write_tiny_tokenizer


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(directory)
    return GrammarCompiler(load_vocabulary(directory, VOCAB_SIZE, (IM_END_ID,)))
