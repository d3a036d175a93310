"""Logits and greedy tokens equal those of `transformers` on the same tiny random weights."""

from __future__ import annotations

import random

import pytest
import torch

from freetoken.execution.kv_geometry import KVGeometry
from freetoken.execution.reference_ops import ReferenceOps
from freetoken.models.decoder import Decoder
from freetoken.testing.paged_sequences import PagedRunner, PagedSequence
from freetoken.testing.tiny_checkpoints import TinyCheckpoint, load_tiny_checkpoint
from freetoken.testing.tiny_models import TINY_MODELS, VOCAB_SIZE

BLOCK_SIZE, NUM_BLOCKS = 8, 80
TOLERANCE = 1e-4


def prompt(length: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(5, VOCAB_SIZE) for _ in range(length)]


def geometry(tiny: TinyCheckpoint, kv_dtype: str = "f32") -> KVGeometry:
    spec = tiny.spec
    return KVGeometry(NUM_BLOCKS, spec.num_layers, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim, kv_dtype)


def runner(tiny: TinyCheckpoint) -> PagedRunner:
    decoder = Decoder(tiny.spec, tiny.dense, max_positions=512)
    return PagedRunner(decoder, ReferenceOps(geometry(tiny), tiny.experts), BLOCK_SIZE, NUM_BLOCKS)


def in_chunks(run: PagedRunner, tokens: list[int], chunk: int) -> torch.Tensor:
    sequence = PagedSequence(tokens)
    parts = []
    while sequence.num_computed < len(tokens):
        parts += run.run([(sequence, min(chunk, len(tokens) - sequence.num_computed))])
    return torch.cat(parts)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_reference_chunks(name: str) -> None:
    tiny = load_tiny_checkpoint(name)
    tokens = prompt(61, 1)
    expected = tiny.oracle_logits(tokens)
    for chunk in (61, 24, 7, 1):
        error = (in_chunks(runner(tiny), tokens, chunk) - expected).abs().max()
        assert error < TOLERANCE, (chunk, float(error))
