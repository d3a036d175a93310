"""From the rows of a step to the packed inputs of its batch or its pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from freetoken.execution.batch_state import RequestState
from freetoken.execution.cuda.inputs import NUM_REAL_STRIDE, StepInputs, StepShape
from freetoken.execution.cuda.pieces import Piece, query_blocks
from freetoken.execution.cuda.sampler import samples_on_host
from freetoken.execution.step_executor import StepLimits
from freetoken.messages import StepRow
from freetoken.models.decoder import ADMIT_ROW, ADMIT_RUN

_SEED_MASK = (1 << 63) - 1

Running = Sequence[tuple[StepRow, RequestState]]
Views = dict[str, NDArray[np.generic]]


@dataclass(slots=True)
class Draw:
    """A sampled row of a step under way: its request, where its token goes, and its number among the sampled rows."""

    state: RequestState
    token_index: int
    row: int
    on_host: bool
    refused: str | None = None
    """Why its grammar allows nothing."""


@dataclass(frozen=True, slots=True)
class PieceInputs:
    """What was filled in: ``ranges`` of query blocks and ``contexts`` (keys that the last token sees) by piece,
    ``logit_tokens`` [S] on the host."""

    shape: StepShape
    draws: list[Draw]
    ranges: list[tuple[int, int]]
    contexts: list[int]
    logit_tokens: NDArray[np.int64]


def fill_decode(
    inputs: StepInputs, shape: StepShape, step_id: int, running: Running, slots: list[int], limits: StepLimits
) -> list[Draw]:
    """Rows of one token each; ``slots`` are their requests'."""
    views = inputs.host_views(shape)
    count, block_size = len(running), limits.block_size
    draws = []
    views["step_id"][0] = step_id
    views["num_real"][0] = count
    token, position, mapping = views["token"], views["position"], views["slot_mapping"]
    request_slot, sample_slot, admit = views["request_slot"], views["sample_slot"], views["admit"]
    for view, padding in (
        (token, 0),
        (position, -1),
        (mapping, -1),
        (request_slot, 0),
        (sample_slot, 0),
        (admit, 0),
    ):
        view[count:] = padding
    for i, (row, state) in enumerate(running):
        start = row.start
        token[i] = state.tokens[start]
        position[i] = start
        mapping[i] = int(state.blocks[start // block_size]) * block_size + start % block_size
        request_slot[i] = slots[i]
        sample_slot[i] = slots[i] if row.sample else 0
        admit[i] = ADMIT_ROW if row.sample or limits.seed_tail_tokens else 0
        if row.sample:
            draws.append(Draw(state, 0, i, samples_on_host(state)))
    _fill_sampling(views, draws, shape.samples)
    return draws


def fill_pieces(
    inputs: StepInputs,
    step_id: int,
    running: Running,
    slots: list[int],
    pieces: list[Piece],
    tokens_per_block: int,
    limits: StepLimits,
) -> PieceInputs:
    """Rows of any length, cut into ``pieces``."""
    blocks = [query_blocks(piece, tokens_per_block) for piece in pieces]
    block_ends = np.cumsum([-(-len(b) // NUM_REAL_STRIDE) * NUM_REAL_STRIDE for b in blocks])
    sampled = [i for i, (row, _) in enumerate(running) if row.sample]
    shape = StepShape(pieces[-1].offset + pieces[-1].bucket, len(sampled), int(block_ends[-1]), len(pieces))
    views = inputs.host_views(shape)
    views["step_id"][0] = step_id
    _fill_tokens(views, running, slots, pieces, limits)
    ranges = []
    for number, mine in enumerate(blocks):
        begin = int(block_ends[number - 1]) if number else 0
        ranges.append((begin, begin + len(mine)))
        views["num_real"][number * NUM_REAL_STRIDE] = pieces[number].num_real
        for at, (row_index, first, count) in enumerate(mine, begin):
            views["block_row"][at] = slots[row_index]
            views["block_first"][at] = first
            views["block_count"][at] = count
    last_token: dict[int, int] = {}
    for piece in pieces:
        for part in piece.parts:
            last_token[part.row] = piece.offset + part.first + part.count - 1
    draws = []
    for number, index in enumerate(sampled):
        state = running[index][1]
        draws.append(Draw(state, 0, number, samples_on_host(state)))
        views["logit_token"][number] = last_token[index]
        views["sample_slot"][number] = slots[index]
    _fill_sampling(views, draws, shape.samples)
    contexts = [max(running[part.row][0].start + part.start + part.count for part in piece.parts) for piece in pieces]
    return PieceInputs(shape, draws, ranges, contexts, views["logit_token"].astype(np.int64))


def _fill_tokens(views: Views, running: Running, slots: list[int], pieces: list[Piece], limits: StepLimits) -> None:
    block_size, tail = limits.block_size, limits.seed_tail_tokens
    for name, padding in (("token", 0), ("position", -1), ("slot_mapping", -1), ("request_slot", 0), ("admit", 0)):
        views[name][...] = padding
    for piece in pieces:
        for part in piece.parts:
            row, state = running[part.row]
            begin = piece.offset + part.first
            cells = slice(begin, begin + part.count)
            start = row.start + part.start
            span = np.arange(start, start + part.count, dtype=np.int64)
            views["token"][cells] = state.tokens[start : start + part.count]
            views["position"][cells] = span
            views["request_slot"][cells] = slots[part.row]
            views["slot_mapping"][cells] = (
                state.blocks[span // block_size].astype(np.int64) * block_size + span % block_size
            )
            decoding = row.num_tokens == 1 and row.sample
            admitted = span >= row.start + row.num_tokens - (1 if decoding else tail)
            views["admit"][cells] = np.where(admitted, ADMIT_ROW if decoding else ADMIT_RUN, 0)


def _fill_sampling(views: Views, draws: list[Draw], rows: int) -> None:
    for name, neutral in (
        ("seed", 0),
        ("sample_position", 0),
        ("top_k", 0),
        ("temperature", 0),
        ("top_p", 1),
        ("min_p", 0),
    ):
        views[name][:rows] = neutral
    for draw in draws:
        params, row = draw.state.sampling, draw.row
        views["seed"][row] = draw.state.seed & _SEED_MASK
        views["sample_position"][row] = len(draw.state.tokens)
        if draw.on_host:
            continue
        views["temperature"][row] = params.temperature
        views["top_k"][row] = params.top_k
        views["top_p"][row] = params.top_p
        views["min_p"][row] = params.min_p
