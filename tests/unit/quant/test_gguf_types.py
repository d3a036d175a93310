"""Reference decoders against the gguf package: every bit of every element, on random blocks."""

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from freetoken.quant import bf16
from freetoken.quant.gguf_types import GGUF_TYPES, describe_type


@pytest.mark.parametrize("type_id", sorted(GGUF_TYPES), ids=lambda i: GGUF_TYPES[i].name)
def test_random_blocks_decode_bit_exactly(type_id):
    kind = GGUF_TYPES[type_id]
    reference_type = GGMLQuantizationType(type_id)
    assert (kind.block_elements, kind.block_bytes) == GGML_QUANT_SIZES[reference_type]
    assert kind.name == reference_type.name
    rng = np.random.default_rng(type_id)
    blocks = rng.integers(
        0, 256, (2000, kind.block_bytes), dtype=np.uint8
    )  # random halves include inf, nan, subnormals
    blocks[0], blocks[1] = 0, 255
    with np.errstate(all="ignore"):
        expected = quants.dequantize(blocks, reference_type).reshape(len(blocks), kind.block_elements)
        actual = kind.dequantize(blocks)
    assert actual.dtype == np.float32 and actual.shape == expected.shape
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(actual), nan)
    np.testing.assert_array_equal(actual.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_weights_decode_close_to_the_original(name):
    reference_type = GGMLQuantizationType[name]
    weights = np.random.default_rng(1).standard_normal((8, 256)).astype(np.float32)
    packed = quants.quantize(weights, reference_type)
    kind = GGUF_TYPES[reference_type.value]
    decoded = kind.dequantize(packed.reshape(-1, kind.block_bytes)).reshape(weights.shape)
    assert np.abs(decoded - weights).max() < (0.05 if name == "Q8_0" else 0.5)


def test_unknown_types_are_described_by_number_and_name():
    assert describe_type(29) == "type 29 (IQ1_M)"
    assert describe_type(12) == "type 12 (Q4_K)"
    assert describe_type(4711) == "type 4711"


def test_bf16_rounds_to_nearest_even():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(2)
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32)
    ties = (rng.integers(0, 2**16, 1000).astype(np.uint32) << 16) | 0x8000
    values = np.concatenate([bits, ties, np.array([0, 0x80000000, 0x7F7FFFFF, 0x7F800000, 0xFF800000], np.uint32)])
    values = values.view(np.float32)
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    actual = bf16.from_f32(values)
    finite = ~np.isnan(values)
    np.testing.assert_array_equal(actual[finite], expected[finite])
    assert np.isnan(bf16.to_f32(actual[~finite])).all()
    every = np.arange(2**16, dtype=np.uint16)
    numbers = every[~np.isnan(bf16.to_f32(every))]
    np.testing.assert_array_equal(bf16.from_f32(bf16.to_f32(numbers)), numbers)
