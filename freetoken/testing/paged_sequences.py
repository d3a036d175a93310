"""Drives a Decoder over paged KV without scheduler or allocator: block tables are handed out in a scrambled order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from freetoken.models.decoder import Decoder, DecoderBatch, DecoderOps


@dataclass
class PagedSequence:
    """A sequence of known tokens, of which the first ``num_computed`` have their KV in ``blocks``."""

    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0


class PagedRunner:
    """Runs chunks of sequences as one ragged batch and returns all their logits."""

    def __init__(self, decoder: Decoder, ops: DecoderOps, block_size: int, num_blocks: int, seed: int = 0) -> None:
        self._decoder = decoder
        self._ops = ops
        self._block_size = block_size
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)

    def run(self, chunks: Sequence[tuple[PagedSequence, int]]) -> list[Tensor]:
        """Compute the next n tokens of each sequence; their logits [n, V], in the same order."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for sequence, count in chunks:
            end = sequence.num_computed + count
            assert end <= len(sequence.tokens)
            while len(sequence.blocks) * self._block_size < end:
                sequence.blocks.append(self._free.pop())
            for position in range(sequence.num_computed, end):
                token_ids.append(sequence.tokens[position])
                positions.append(position)
                block = sequence.blocks[position // self._block_size]
                slots.append(block * self._block_size + position % self._block_size)
            sequence.num_computed = end
            starts.append(len(token_ids))
        width = max(len(sequence.blocks) for sequence, _ in chunks)
        tables = np.full((len(chunks), width), -1, dtype=np.int32)
        for row, (sequence, _) in enumerate(chunks):
            tables[row, : len(sequence.blocks)] = sequence.blocks
        batch = DecoderBatch(
            token_ids=np.array(token_ids, dtype=np.int64),
            positions=np.array(positions, dtype=np.int32),
            slot_mapping=np.array(slots, dtype=np.int64),
            row_starts=np.array(starts, dtype=np.int32),
            block_tables=tables,
            admit=np.ones(len(token_ids), dtype=np.uint8),
            logit_tokens=np.arange(len(token_ids), dtype=np.int64),
        )
        logits = torch.as_tensor(self._decoder.forward(batch, self._ops))
        return list(logits.split([count for _, count in chunks]))

    def release(self, sequence: PagedSequence) -> None:
        """Give a sequence's blocks back."""
        self._free.extend(sequence.blocks)
        sequence.blocks.clear()
        sequence.num_computed = 0
