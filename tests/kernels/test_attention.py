"""KV pages and paged attention against gathered keys and PyTorch's attention in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from freetoken import _native
from freetoken.kernels import Kernels, PagedKv
from tests.kernels.implementations import IMPLEMENTATIONS, make_kernels, to_dtype


@pytest.fixture(params=IMPLEMENTATIONS, scope="module")
def kernels(request):
    return make_kernels(request.param)


@dataclass
class Pages:
    """Sequences of random keys and values in scattered blocks; the second of two layers is used."""

    kv: PagedKv
    tables: Tensor
    keys: list[Tensor]  # [length, KVH, D] as stored, float64
    values: list[Tensor]


def fill_pages(
    kernels: Kernels, lengths: list[int], kv_heads: int, head_dim: int, block_size: int, dtype: str
) -> Pages:
    blocks_of = [-(-length // block_size) for length in lengths]
    num_blocks = sum(blocks_of) + 3
    layer_bytes = 2 * block_size * kv_heads * head_dim * (4 if dtype == "f32" else 2)
    segment = _native.SharedSegment.create("kv", num_blocks * 2 * layer_bytes)
    kv = PagedKv(segment, layer_bytes, 2 * layer_bytes, block_size, kv_heads, head_dim, dtype)
    order = torch.randperm(num_blocks).tolist()
    tables = torch.full((len(lengths), max(blocks_of) + 1), -1, dtype=torch.int32)
    pages = Pages(kv, tables, [], [])
    for row, length in enumerate(lengths):
        blocks = [order.pop() for _ in range(blocks_of[row])]
        tables[row, : len(blocks)] = torch.tensor(blocks)
        keys, values = torch.randn(length, kv_heads, head_dim), torch.randn(length, kv_heads, head_dim)
        slots = torch.tensor([blocks[p // block_size] * block_size + p % block_size for p in range(length)])
        kernels.kv_store(keys, values, slots, kv)
        pages.keys.append(to_dtype(keys, dtype).double())
        pages.values.append(to_dtype(values, dtype).double())
    return pages


def expected_attention(pages: Pages, queries: Tensor, starts: list[int], positions: Tensor, window: int) -> Tensor:
    rows = []
    for row, (keys, values) in enumerate(zip(pages.keys, pages.values, strict=True)):
        for token in range(starts[row], starts[row + 1]):
            end = int(positions[token]) + 1
            begin = max(0, end - window) if window else 0
            out = F.scaled_dot_product_attention(
                queries[token].double().unsqueeze(1),
                keys[begin:end].transpose(0, 1),
                values[begin:end].transpose(0, 1),
                scale=0.3,
                enable_gqa=True,
            )
            rows.append(out.flatten())
    return torch.stack(rows)


CASES = {
    # lengths, new tokens, query heads, KV heads, head dim, block size, sliding window
    "decode": ([1, 17, 40], [1, 1, 1], 4, 2, 16, 16, 0),
    "one token each, one head": ([1, 2], [1, 1], 1, 1, 1, 1, 0),
    "prefill": ([33], [33], 6, 2, 20, 8, 0),
    "mixed, with an empty row": ([50, 9, 30], [7, 0, 1], 8, 8, 24, 5, 0),
    "many heads per KV head": ([20], [3], 40, 1, 8, 16, 0),
    "more rows than a block": ([90], [60], 4, 2, 16, 16, 0),
    "several partitions": ([600, 513], [2, 1], 4, 2, 32, 16, 0),
    "window": ([300, 20], [30, 20], 4, 2, 16, 16, 7),
    "window over partitions": ([700], [3], 4, 4, 16, 32, 260),
}


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_paged_attention(kernels, case, dtype):
    torch.manual_seed(3)
    lengths, new, heads, kv_heads, head_dim, block_size, window = CASES[case]
    pages = fill_pages(kernels, lengths, kv_heads, head_dim, block_size, dtype)
    starts = [0, *torch.tensor(new).cumsum(0).tolist()]
    positions = torch.cat([torch.arange(length - n, length) for length, n in zip(lengths, new, strict=True)]).int()
    queries = torch.randn(starts[-1], heads, head_dim)
    out = kernels.paged_attention(
        queries, torch.tensor(starts).int(), positions, pages.tables, pages.kv, 0.3, sliding_window=window
    )
    expected = expected_attention(pages, queries, starts, positions, window)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=3e-6)


def test_blocks_outside_the_window_are_not_read(kernels):
    """A sliding window lets the allocator take old blocks back."""
    torch.manual_seed(4)
    pages = fill_pages(kernels, [64], 2, 8, 8, "f32")
    pages.tables[0, :6] = -1
    queries, positions = torch.randn(2, 4, 8), torch.tensor([62, 63], dtype=torch.int32)
    starts = torch.tensor([0, 2], dtype=torch.int32)
    out = kernels.paged_attention(queries, starts, positions, pages.tables, pages.kv, 0.3, sliding_window=10)
    expected = expected_attention(pages, queries, [0, 2], positions, 10)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("magnitude", [300.0, 1e4])
def test_large_scores_do_not_overflow(kernels, magnitude):
    torch.manual_seed(5)
    pages = fill_pages(kernels, [300], 1, 4, 16, "f32")
    queries, positions = torch.randn(1, 1, 4) * magnitude, torch.tensor([299], dtype=torch.int32)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    out = kernels.paged_attention(queries, starts, positions, pages.tables, pages.kv, 0.3)
    expected = expected_attention(pages, queries, [0, 1], positions, 0)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_kv_store_writes_its_layer_only(kernels, dtype):
    torch.manual_seed(6)
    element = 4 if dtype == "f32" else 2
    layer_bytes = 2 * 4 * 2 * 3 * element
    segment = _native.SharedSegment.create("kv", 5 * 3 * layer_bytes)
    kv = PagedKv(segment, layer_bytes, 3 * layer_bytes, 4, 2, 3, dtype)
    keys, values = torch.randn(4, 2, 3), torch.randn(4, 2, 3)
    kernels.kv_store(keys, values, torch.tensor([19, 0, -1, 6]), kv)
    stored = torch.frombuffer(memoryview(segment), dtype=torch.float32 if dtype == "f32" else torch.bfloat16)
    expected = torch.zeros(5, 3, 2, 4, 2, 3, dtype=stored.dtype)  # block, layer, k/v, offset, head, dim
    for token, slot in ((0, 19), (1, 0), (3, 6)):
        expected[slot // 4, 1, 0, slot % 4] = keys[token].to(stored.dtype)
        expected[slot // 4, 1, 1, slot % 4] = values[token].to(stored.dtype)
    assert torch.equal(stored.reshape(expected.shape), expected)


@pytest.mark.parametrize("isa", [name for name in IMPLEMENTATIONS if name != "reference"])
def test_bf16_rounds_to_nearest_even_like_pytorch(isa):
    bits = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800001, -0x7FFFFF, 1], dtype=torch.int64)
    row = bits.to(torch.int32).view(torch.float32).reshape(1, 1, 7)
    segment = _native.SharedSegment.create("kv", 28)
    make_kernels(isa).kv_store(row, row, torch.tensor([0]), PagedKv(segment, 0, 28, 1, 1, 7, "bf16"))
    stored = torch.frombuffer(memoryview(segment), dtype=torch.bfloat16)[:7]
    torch.testing.assert_close(stored, row.flatten().bfloat16(), rtol=0, atol=0, equal_nan=True)
