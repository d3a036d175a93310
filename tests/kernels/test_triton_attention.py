"""Paged attention against plain torch (see ``triton_device``)."""

import pytest
import torch

from freetoken.kernels.triton import reference
from freetoken.kernels.triton.attention import AttentionShape, QueryBlocks, attention, workspace
from freetoken.kernels.triton.rope_kv import PagedKV
from tests.kernels.triton_device import DEVICE, relative_error

BLOCK_SIZE = 4
NUM_BLOCKS = 24


class PagedRows:
    """Rows of random keys and values scattered over blocks."""

    def __init__(self, lengths, kv_heads, dim, dtype=torch.float32):
        generator = torch.Generator().manual_seed(len(lengths))
        record = 2 * 2 * BLOCK_SIZE * kv_heads * dim
        data = torch.full((NUM_BLOCKS * record,), float("nan"), dtype=dtype)
        cells = data.view(NUM_BLOCKS, 2, 2, BLOCK_SIZE, kv_heads, dim)
        free = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
        self.keys, self.values = [], []
        tables = torch.full((len(lengths), 12), -1, dtype=torch.int32)
        for row, length in enumerate(lengths):
            pair = torch.randn(2, length, kv_heads, dim, generator=generator).to(dtype)
            for i in range(length):
                if i % BLOCK_SIZE == 0:
                    tables[row, i // BLOCK_SIZE] = free.pop()
                cells[tables[row, i // BLOCK_SIZE], 1, :, i % BLOCK_SIZE] = pair[:, i]
            self.keys.append(pair[0].to(DEVICE))
            self.values.append(pair[1].to(DEVICE))
        self.tables = tables.to(DEVICE)
        self.kv = PagedKV(data.to(DEVICE), record // 2, record, BLOCK_SIZE, kv_heads, dim)


def run(rows, queries_per_row, q_heads, dim, blocks, shape, window=0, with_sinks=False, dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    tokens = sum(queries_per_row)
    q = torch.randn(tokens, q_heads, dim, generator=generator).to(dtype).to(DEVICE)
    sinks = torch.randn(q_heads, generator=generator).to(DEVICE) if with_sinks else None
    positions = torch.cat(
        [torch.arange(len(k) - n, len(k)) for k, n in zip(rows.keys, queries_per_row, strict=True)]
    ).int().to(DEVICE)  # fmt: skip
    out = torch.full((tokens, q_heads * dim), float("nan"), dtype=dtype, device=DEVICE)
    work = workspace(tokens, q_heads, dim, shape.splits, DEVICE)
    for tensor in work:
        tensor.fill_(float("nan"))
    scale = dim**-0.5
    attention(
        q, rows.kv, rows.tables, positions, blocks, out, scale=scale, window=window, sinks=sinks, shape=shape, work=work
    )
    start = 0
    expected = []
    for key, value, n in zip(rows.keys, rows.values, queries_per_row, strict=True):
        part = slice(start, start + n)
        expected.append(reference.attention(q[part], key, value, positions[part], scale, window, sinks))
        start += n
    return out, torch.cat(expected).reshape(tokens, -1)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("sinks", [False, True])
def test_decode(splits, window, sinks):
    rows = PagedRows([1, 37, 16], kv_heads=2, dim=16)
    shape = AttentionShape(keys=16, splits=splits)
    out, expected = run(rows, [1, 1, 1], 8, 16, QueryBlocks.decode(3, DEVICE), shape, window, sinks)
    assert relative_error(out, expected) < 1e-5


@pytest.mark.parametrize(
    ("splits", "window", "q_heads", "kv_heads", "dim"),
    [(1, 0, 4, 2, 16), (2, 0, 6, 2, 16), (1, 9, 6, 2, 16), (2, 9, 2, 2, 24)],
)
def test_prefill_of_ragged_rows(splits, window, q_heads, kv_heads, dim):
    queries = [21, 0, 5, 1]
    rows = PagedRows([21, 3, 33, 20], kv_heads, dim)
    starts = [0, 21, 21, 26, 27]
    blocks = QueryBlocks.prefill(starts, 8, DEVICE)
    out, expected = run(rows, queries, q_heads, dim, blocks, AttentionShape(keys=16, splits=splits), window, True)
    assert relative_error(out, expected) < 1e-5


def test_half_precision():
    rows = PagedRows([30], kv_heads=1, dim=16, dtype=torch.float16)
    out, expected = run(
        rows, [30], 4, 16, QueryBlocks.prefill([0, 30], 16, DEVICE), AttentionShape(keys=16), dtype=torch.float16
    )
    assert relative_error(out, expected) < 2e-3


def test_padded_rows_of_a_decode_batch_give_zeros():
    rows = PagedRows([9, 1], kv_heads=2, dim=16)
    q = torch.randn(2, 4, 16, device=DEVICE)
    positions = torch.tensor([8, -1], dtype=torch.int32, device=DEVICE)
    for splits in (1, 2):
        out = torch.full((2, 64), float("nan"), device=DEVICE)
        work = workspace(2, 4, 16, splits, DEVICE)
        work[0].fill_(float("nan"))
        attention(
            q, rows.kv, rows.tables, positions, QueryBlocks.decode(2, DEVICE), out, scale=0.25,
            shape=AttentionShape(keys=16, splits=splits), work=work,
        )  # fmt: skip
        assert not out[1].any()
        assert (
            relative_error(
                out[0].view(1, 4, 16), reference.attention(q[:1], rows.keys[0], rows.values[0], positions[:1], 0.25)
            )
            < 1e-5
        )


def test_refusals():
    rows = PagedRows([4], kv_heads=2, dim=16)
    q = torch.zeros(1, 3, 16, device=DEVICE)
    with pytest.raises(ValueError, match="does not fit 2 KV heads"):
        attention(q, rows.kv, rows.tables, q, QueryBlocks.decode(1, DEVICE), q, scale=1.0)
    with pytest.raises(ValueError, match="needs a workspace"):
        q = torch.zeros(1, 4, 16, device=DEVICE)
        attention(
            q, rows.kv, rows.tables, q, QueryBlocks.decode(1, DEVICE), q, scale=1.0, shape=AttentionShape(splits=2)
        )
