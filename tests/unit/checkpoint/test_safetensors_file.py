"""The safetensors container: every dtype, shards, and every way a file can be wrong."""

import json

import numpy as np
import pytest

from freetoken.checkpoint.safetensors_file import DTYPE_BITS, SafetensorsDirectory, SafetensorsFile
from freetoken.errors import CheckpointError
from freetoken.testing.checkpoint_files import write_safetensors


def test_every_dtype_of_the_format_reads_back(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {}
    for dtype, bits in DTYPE_BITS.items():
        size = 4 * 8 * bits // 8
        raw = rng.integers(0, 2 if dtype == "BOOL" else 256, size, dtype=np.uint8)
        if bits >= 8:
            raw = raw.reshape(4, size // 4)
        tensors[dtype] = (dtype, raw)

    def shapes(header):
        for dtype in DTYPE_BITS:
            header[dtype]["shape"] = [4, 8]

    path = tmp_path / "all.safetensors"
    write_safetensors(path, tensors, edit_header=shapes)
    file = SafetensorsFile(path)
    assert set(file.entries) == set(DTYPE_BITS)
    for dtype, (_, raw) in tensors.items():
        view = file.view(dtype)
        if DTYPE_BITS[dtype] >= 8:
            assert view.shape == (4, 8) and view.itemsize * 8 == DTYPE_BITS[dtype]
        assert view.tobytes() == raw.tobytes()
    file.close()


def test_files_written_by_the_safetensors_package_read_the_same(tmp_path):
    numpy_format = pytest.importorskip("safetensors.numpy")
    rng = np.random.default_rng(1)
    arrays = {
        "a.weight": rng.standard_normal((3, 5)).astype(np.float32),
        "b": rng.standard_normal(7).astype(np.float16),
        "c": rng.integers(-9, 9, (2, 2, 2)),
        "scalar": np.array(2.5, np.float64),
        "empty": np.zeros((0, 4), np.float32),
        "flags": np.array([True, False]),
    }
    numpy_format.save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert file.metadata == {"format": "pt"}
    assert set(file.entries) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(file.view(name), array)
        assert file.view(name).dtype == array.dtype


def make(tmp_path, **options):
    path = tmp_path / "m.safetensors"
    tensors = {"first": ("F32", np.arange(6, dtype=np.float32)), "second": ("BF16", np.arange(4, dtype=np.uint16))}
    write_safetensors(path, tensors, **options)
    return path


@pytest.mark.parametrize(
    "edit,match",
    [
        (lambda h: h["second"].update(data_offsets=[20, 28]), "'second' overlaps tensor 'first'"),
        (lambda h: h["second"].update(data_offsets=[28, 36]), "'second' leaves a hole after tensor 'first'"),
        (lambda h: h["second"].update(shape=[5]), "'second'.*do not hold BF16 values of shape"),
        (lambda h: h["second"].update(shape=[-4]), "'second'"),
        (lambda h: h["second"].update(dtype="Q7"), "'second' has the unknown dtype 'Q7'"),
        (lambda h: h["second"].pop("shape"), "'second': damaged header entry"),
        (lambda h: h.pop("second"), "8 bytes after the last tensor"),
        (
            lambda h: h.update(third={"dtype": "U8", "shape": [9], "data_offsets": [32, 41]}),
            "truncated: tensor 'third'",
        ),
        (lambda h: h.update(__metadata__=[1]), "__metadata__"),
    ],
)
def test_inconsistent_headers_name_file_and_tensor(tmp_path, edit, match):
    path = make(tmp_path, edit_header=edit)
    with pytest.raises(CheckpointError, match=match) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)


def test_truncation_anywhere_is_noticed(tmp_path):
    path = make(tmp_path)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=str(path)):
            SafetensorsFile(path)
    path.write_bytes(whole)
    SafetensorsFile(path).close()


def test_foreign_and_missing_files(tmp_path):
    path = tmp_path / "m.safetensors"
    with pytest.raises(CheckpointError, match="cannot be opened: No such file"):
        SafetensorsFile(path)
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        SafetensorsFile(path)
    path.write_bytes((8).to_bytes(8, "little") + b"{broken!")
    with pytest.raises(CheckpointError, match="damaged safetensors header"):
        SafetensorsFile(path)
    entry = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    header = f'{{"a":{entry},"a":{entry}}}'.encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"x")
    with pytest.raises(CheckpointError, match="'a' appears twice"):
        SafetensorsFile(path)


def shards(tmp_path, weight_map=None):
    one, two = np.ones(2, np.float32), np.full(3, 2, np.float32)
    write_safetensors(tmp_path / "x-1.safetensors", {"one": ("F32", one)})
    write_safetensors(tmp_path / "x-2.safetensors", {"two": ("F32", two)})
    index = {"weight_map": weight_map or {"one": "x-1.safetensors", "two": "x-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))


def test_shards_are_joined_by_their_index(tmp_path):
    shards(tmp_path)
    files = SafetensorsDirectory(tmp_path)
    assert set(files.names) == {"one", "two"}
    np.testing.assert_array_equal(files.view("two"), [2, 2, 2])
    assert "x-1.safetensors: tensor 'one'" in files.describe("one")


@pytest.mark.parametrize(
    "weight_map,match",
    [
        ({"one": "x-1.safetensors"}, None),
        ({"one": "x-2.safetensors", "two": "x-2.safetensors"}, "x-2.safetensors: tensor 'one' is missing"),
        ({"one": "x-1.safetensors", "two": "x-9.safetensors"}, "x-9.safetensors: cannot be opened"),
        ({"one": "../x-1.safetensors"}, "leaves the directory"),
        ({"one": "x-1.safetensors", "uno": "x-1.safetensors"}, "tensor 'uno' is missing"),
        ([1], "damaged or foreign shard index"),
    ],
)
def test_wrong_shard_indexes(tmp_path, weight_map, match):
    shards(tmp_path, weight_map)
    if match is None:
        assert set(SafetensorsDirectory(tmp_path).names) == {"one"}
        return
    with pytest.raises(CheckpointError, match=match):
        SafetensorsDirectory(tmp_path)


def test_a_tensor_that_the_index_does_not_list_is_an_error(tmp_path):
    shards(tmp_path, {"one": "x-1.safetensors"})
    write_safetensors(tmp_path / "x-1.safetensors", {n: ("F32", np.ones(2, np.float32)) for n in ("one", "extra")})
    with pytest.raises(CheckpointError, match="'extra' is not in model"):
        SafetensorsDirectory(tmp_path)


def test_directories_without_a_usable_file(tmp_path):
    with pytest.raises(CheckpointError, match="no safetensors file"):
        SafetensorsDirectory(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="is a pickled checkpoint"):
        SafetensorsDirectory(tmp_path)
    for name in ("a", "b"):
        write_safetensors(tmp_path / f"{name}.safetensors", {name: ("F32", np.ones(1, np.float32))})
    with pytest.raises(CheckpointError, match="2 safetensors files but no"):
        SafetensorsDirectory(tmp_path)
