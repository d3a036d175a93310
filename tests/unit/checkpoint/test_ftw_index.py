"""Loading an FTW index: what is right comes back, and whatever is wrong is named."""

import json
import shutil

import numpy as np
import pytest

from freetoken.checkpoint.convert import ConvertOptions, convert_source
from freetoken.checkpoint.ftw import FtwIndex, open_dense_tensors
from freetoken.checkpoint.source import ArraySource
from freetoken.errors import CheckpointError, UnsupportedModelError
from freetoken.testing.checkpoint_files import CONFIGS, edit_index, tiny_arrays


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    config = CONFIGS["qwen3_moe"]
    directory = tmp_path_factory.mktemp("ftw") / "model"
    options = ConvertOptions(tile_columns=8, max_file_bytes=65536)
    convert_source(ArraySource(config, tiny_arrays(config)), directory, options)
    return directory


@pytest.fixture
def model(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "model")


def test_index_describes_the_model(pristine):
    index = FtwIndex.load(pristine)
    arrays = tiny_arrays(CONFIGS["qwen3_moe"])
    assert index.version == 1 and index.path == pristine
    assert index.spec.moe_layers == (0, 2) and index.spec.num_experts == 5
    assert index.record_file.shape == index.record_offset.shape == index.record_crc32c.shape == (2, 5)
    assert (index.record_file.dtype, index.record_offset.dtype) == (np.int32, np.int64)
    assert len(index.layouts) == 1 and index.layer_layout == (0, 0)
    assert index.expert_bytes == 10 * index.layouts[0].stride_bytes
    assert index.dense_bytes == sum(a.nbytes for n, a in arrays.items() if ".experts." not in n)
    assert len(index.files) > 4 and all(f.size_bytes <= 65536 and f.size_bytes % 4096 == 0 for f in index.files)
    assert not index.record_offset.ravel()[index.record_file.ravel() < 0].any()
    assert all(index.files[f].kind == "experts" for f in index.record_file.ravel())
    assert not (index.record_offset % 4096).any()
    assert all(t.offset_bytes % 64 == 0 for t in index.tensors.values())
    assert FtwIndex.load(str(pristine)).fingerprint == index.fingerprint


def test_dense_views_share_the_segments(pristine):
    index = FtwIndex.load(pristine)
    segments = [bytearray((pristine / f.name).read_bytes()) for f in index.files]
    views = open_dense_tensors(index, segments)
    arrays = tiny_arrays(CONFIGS["qwen3_moe"])
    assert set(views) == set(index.tensors)
    for name, view in views.items():
        np.testing.assert_array_equal(view, arrays[name])
        np.testing.assert_array_equal(index.read_tensor(name), arrays[name])
    tensor = index.tensors["model.norm.weight"]
    segments[tensor.file_index][tensor.offset_bytes : tensor.offset_bytes + 4] = np.float32(7).tobytes()
    assert views["model.norm.weight"][0] == 7


def test_a_directory_without_index(tmp_path):
    with pytest.raises(CheckpointError, match=r"is not an FTW checkpoint: it has no ftw\.json"):
        FtwIndex.load(tmp_path)


@pytest.mark.parametrize(
    "content,match",
    [
        (b"", "not valid JSON"),
        (b'{"format": "ftw", "ver', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[1]", "not an FTW index"),
        (b'{"format": "gguf"}', "not an FTW index"),
        (b'{"format": "ftw", "version": 2}', "version 2 is not supported.*reads version 1"),
        (b'{"format": "ftw", "version": 1}', "malformed index.*'model_config'"),
    ],
)
def test_foreign_and_broken_indexes(model, content, match):
    (model / "ftw.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=match):
        FtwIndex.load(model)


def test_an_edited_index_is_noticed(model):
    path = model / "ftw.json"
    data = json.loads(path.read_text())
    data["records"]["crc32c"][0][0] ^= 1
    path.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match="does not match its own fingerprint"):
        FtwIndex.load(model)


def test_data_files_must_have_their_size(model):
    index = FtwIndex.load(model)
    number = int(index.record_file[1, 2])
    name = index.files[number].name
    size = (model / name).stat().st_size
    with (model / name).open("r+b") as file:
        file.truncate(int(index.record_offset[1, 2]) + 100)
    with pytest.raises(CheckpointError, match=f"{name}: truncated: .*the first loss is the record of layer 2 expert 2"):
        FtwIndex.load(model)
    with (model / name).open("r+b") as file:
        file.truncate(size + 4096)
    with pytest.raises(CheckpointError, match=f"{name}: longer than it should be"):
        FtwIndex.load(model)
    (model / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name}: data file cannot be opened"):
        FtwIndex.load(model)


def test_a_truncated_dense_file_names_its_first_tensor(model):
    index = FtwIndex.load(model)
    tensor = index.tensors["model.layers.1.mlp.up_proj.weight"]
    name = index.files[tensor.file_index].name
    with (model / name).open("r+b") as file:
        file.truncate(tensor.offset_bytes + 1)
    with pytest.raises(CheckpointError, match=f"{name}: truncated.*first loss is tensor 'model.layers.1.mlp.up_proj"):
        FtwIndex.load(model)


def set_tensor(name, **changes):
    return lambda data: data["tensors"][name].update(changes)


def set_record(key, value):
    def edit(data):
        data["records"][key][0][1] = value

    return edit


NORM = "model.norm.weight"
DAMAGE = {
    "missing tensor": (lambda d: d["tensors"].pop(NORM), "tensor 'model.norm.weight' is missing"),
    "extra tensor": (
        lambda d: d["tensors"].update(x=d["tensors"][NORM]),
        "tensor 'x' does not belong to the model",
    ),
    "wrong shape": (set_tensor(NORM, shape=[31]), r"'model.norm.weight' has shape \[31\], the model needs \[32\]"),
    "wrong size": (set_tensor(NORM, size_bytes=4), "'model.norm.weight': 4 bytes contradict"),
    "tensor outside": (set_tensor(NORM, offset_bytes=2**40), "tensor 'model.norm.weight' at offset"),
    "negative offset": (set_tensor(NORM, offset_bytes=-64), "tensor 'model.norm.weight' at offset -64"),
    "misaligned tensor": (set_tensor(NORM, offset_bytes=4), "tensor 'model.norm.weight' at offset 4"),
    "tensor overlap": (set_tensor(NORM, offset_bytes=0, file=0), "tensor .* and tensor .* overlap"),
    "tensor in expert file": (set_tensor(NORM, file=999), "'model.norm.weight' lies in file 999"),
    "record outside": (set_record("offset_bytes", 65536), "record of layer 0 expert 1 at offset 65536"),
    "record misaligned": (set_record("offset_bytes", 64), "record of layer 0 expert 1 at offset 64"),
    "record overlap": (
        lambda d: [set_record(k, d["records"][k][0][0])(d) for k in ("file", "offset_bytes")],
        "record of layer 0 expert 0 and record of layer 0 expert 1 overlap",
    ),
    "record in dense file": (set_record("file", 0), "record of layer 0 expert 1 lies in file 0, which is no experts"),
    "record file negative": (set_record("file", -1), "record of layer 0 expert 1 lies in file -1"),
    "checksum too big": (set_record("crc32c", 2**32), "record checksums hold a value outside uint32"),
    "row missing": (lambda d: d["records"]["crc32c"].pop(), r"record checksums have shape \[1, 5\]"),
    "ragged rows": (lambda d: d["records"]["file"][0].pop(), "malformed index"),
    "layer_layout short": (lambda d: d["layer_layout"].pop(), "names 1 expert layers, the model has 2"),
    "layer_layout wild": (lambda d: d.update(layer_layout=[0, 3]), "names record layout 3, there are 1"),
    "layout of another model": (
        lambda d: d["model_config"].update(moe_intermediate_size=24),
        "record layout of 40x32 does not fit the model's 24x32",
    ),
    "file name leaves": (lambda d: d["files"][0].update(name="../dense-00000.ftw"), "is not allowed"),
    "file name repeated": (lambda d: d["files"][1].update(name="dense-00000.ftw"), "not allowed or repeated"),
    "file kind wrong": (lambda d: d["files"][0].update(kind="experts"), "not allowed"),
    "file size odd": (lambda d: d["files"][0].update(size_bytes=100), "size 100 is not a positive multiple of 4096"),
}


@pytest.mark.parametrize("edit,match", DAMAGE.values(), ids=DAMAGE.keys())
def test_inconsistent_indexes_are_refused(model, edit, match):
    edit_index(model, edit)
    with pytest.raises(CheckpointError, match=match) as caught:
        FtwIndex.load(model)
    assert str(model) in str(caught.value)


@pytest.mark.parametrize(
    "edit,match",
    [
        (lambda d: d["model_config"].update(architectures=["GPT9"]), "GPT9"),
        (set_tensor(NORM, dtype="q4"), "'model.norm.weight' has dtype 'q4'"),
        (lambda d: d["record_layouts"][0].update(format="q4"), "record format 'q4' is not supported"),
    ],
)
def test_what_another_version_could_run(model, edit, match):
    edit_index(model, edit)
    with pytest.raises(UnsupportedModelError, match=match):
        FtwIndex.load(model)
