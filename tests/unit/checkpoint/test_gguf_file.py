"""The GGUF container, against files written by the gguf package, and every way a file can be wrong."""

import struct

import gguf
import numpy as np
import pytest

from freetoken.checkpoint.gguf_file import GgufFile
from freetoken.errors import CheckpointError, UnsupportedModelError


def write(path, alignment=32):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    for kind, value in (("uint8", 200), ("int8", -7), ("uint16", 60000), ("int16", -30000), ("uint32", 4_000_000_000)):
        getattr(writer, f"add_{kind}")(f"t.{kind}", value)
    writer.add_int32("t.int32", -2_000_000_000)
    writer.add_uint64("t.uint64", 2**63 + 5)
    writer.add_int64("t.int64", -(2**62))
    writer.add_float32("t.float32", 1.5)
    writer.add_float64("t.float64", 0.1)
    writer.add_bool("t.true", True)
    writer.add_bool("t.false", False)
    writer.add_string("t.string", "grüße 😀")
    writer.add_array("t.numbers", [1, 2, 3])
    writer.add_array("t.strings", ["a", "", "ccc"])
    writer.add_array("t.flags", [True, False])
    rng = np.random.default_rng(0)
    writer.add_tensor("plain", rng.standard_normal((3, 5)).astype(np.float32))
    writer.add_tensor("vector", rng.standard_normal(7).astype(np.float16))
    packed = gguf.quants.quantize(rng.standard_normal((4, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("packed", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("alignment", [32, 256])
def test_metadata_and_tensors_equal_the_gguf_package(tmp_path, alignment):
    path = write(tmp_path / "m.gguf", alignment)
    file, reference = GgufFile(path), gguf.GGUFReader(path)
    for key, field in reference.fields.items():
        if not key.startswith("GGUF."):
            assert file.metadata[key] == field.contents(), key
            assert type(file.metadata[key]) is type(field.contents()), key
    assert len(file.metadata) == len(reference.fields) - 3
    assert file.metadata["t.string"] == "grüße 😀"
    assert list(file.tensors) == [t.name for t in reference.tensors]
    for tensor in reference.tensors:
        mine = file.tensors[tensor.name]
        assert mine.shape == tuple(int(n) for n in tensor.shape[::-1])
        assert mine.type_id == tensor.tensor_type.value
        assert file.rows(tensor.name).tobytes() == tensor.data.tobytes()
    assert file.rows("packed").shape == (4, 68)
    assert file.rows("vector").shape == (1, 14)
    file.close()


def test_truncation_anywhere_is_noticed(tmp_path):
    path = write(tmp_path / "m.gguf")
    whole = path.read_bytes()
    last = GgufFile(path).tensors["packed"]
    end = last.offset_bytes + last.size_bytes
    for size in [*range(0, end, 7), end - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=str(path)):
            GgufFile(path)


def string(text):
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def entry(name="t", dims=(32,), type_id=0, offset=0):
    packed = string(name) + struct.pack("<I", len(dims)) + b"".join(struct.pack("<Q", d) for d in dims)
    return packed + struct.pack("<IQ", type_id, offset)


def build(path, keys=(), tensors=(), version=3, magic=b"GGUF", data=512):
    head = magic + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join(keys) + b"".join(tensors)
    path.write_bytes(head + bytes(-len(head) % 32) + bytes(data))
    return path


@pytest.mark.parametrize(
    "arguments,error,match",
    [
        ({"magic": b"GGML"}, CheckpointError, "not a GGUF file"),
        ({"version": 1}, CheckpointError, "version 1 is not supported"),
        ({"version": 3 << 24}, CheckpointError, "big-endian"),
        ({"tensors": [entry(type_id=29)]}, UnsupportedModelError, r"tensor 't' has type 29 \(IQ1_M\), which is not"),
        ({"tensors": [entry(type_id=777)]}, UnsupportedModelError, "tensor 't' has type 777, which is not supported"),
        ({"tensors": [entry(dims=(33,), type_id=2)]}, CheckpointError, "'t'.*not made of Q4_0 blocks of 32"),
        ({"tensors": [entry(dims=(0,))]}, CheckpointError, "'t': shape"),
        ({"tensors": [entry(dims=(1,) * 5)]}, CheckpointError, "'t' has 5 dimensions"),
        ({"tensors": [entry(dims=())]}, CheckpointError, "'t' has 0 dimensions"),
        ({"tensors": [entry(offset=8)]}, CheckpointError, "'t': offset 8 is not a multiple of the alignment 32"),
        ({"tensors": [entry("a"), entry("b", offset=64)]}, CheckpointError, "'b' overlaps tensor 'a'"),
        ({"tensors": [entry("a"), entry("a", offset=128)]}, CheckpointError, "'a' appears twice"),
        ({"tensors": [entry(offset=4096)]}, CheckpointError, "truncated: tensor 't'"),
        ({"tensors": [entry(dims=(2**40, 2**20))]}, CheckpointError, "truncated: tensor 't'"),
        ({"keys": [string("k") + struct.pack("<I", 99)]}, CheckpointError, "'k' has the unknown value type 99"),
        ({"keys": [string("k") + struct.pack("<II", 4, 1)] * 2}, CheckpointError, "'k' appears twice"),
        ({"keys": [string("k") + struct.pack("<IQ", 8, 2**60)]}, CheckpointError, "truncated or damaged.*'k'"),
        ({"keys": [string("k") + struct.pack("<IIQ", 9, 8, 2**60)]}, CheckpointError, "truncated or damaged.*'k'"),
        ({"keys": [string("k") + struct.pack("<IIQ", 9, 4, 2**60)]}, CheckpointError, "truncated or damaged.*'k'"),
        ({"keys": [string("general.alignment") + struct.pack("<II", 4, 24)]}, CheckpointError, "24 is not a power of"),
    ],
)
def test_inconsistent_files_are_refused(tmp_path, arguments, error, match):
    path = build(tmp_path / "m.gguf", **arguments)
    with pytest.raises(error, match=match) as caught:
        GgufFile(path)
    assert str(path) in str(caught.value)


def test_deeply_nested_arrays_are_refused(tmp_path):
    nested = string("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 50
    with pytest.raises(CheckpointError, match="'k' has the unknown value type 9"):
        GgufFile(build(tmp_path / "m.gguf", keys=[nested]))
    shallow = string("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 2 + struct.pack("<IQI", 4, 1, 5)
    assert GgufFile(build(tmp_path / "m.gguf", keys=[shallow])).metadata == {"k": [[[5]]]}


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be opened"):
        GgufFile(tmp_path / "none.gguf")
    (tmp_path / "e.gguf").touch()
    with pytest.raises(CheckpointError, match="the file is empty"):
        GgufFile(tmp_path / "e.gguf")
