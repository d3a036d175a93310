"""GGUF files with Q4_0 tensors become FTW with the very same bits, and what is not Q4_0 all through is named."""

import json
import logging

import gguf
import numpy as np
import pytest

from freetoken.checkpoint.convert import ConvertOptions, convert, convert_source
from freetoken.checkpoint.ftw import FtwIndex, open_dense_tensors
from freetoken.checkpoint.gguf_source import GgufSource, half_split_order
from freetoken.checkpoint.source import ArraySource
from freetoken.checkpoint.verify import verify_checkpoint
from freetoken.cli.main import main
from freetoken.errors import CheckpointError, UnsupportedModelError
from freetoken.quant.formats import FORMATS, plan_layout, tensor_bytes, unpack_record
from freetoken.quant.q4_0_matrix import Q4_0Matrix, matrix_bytes, matrix_view, scales_offset_bytes
from freetoken.quant.q4_0_record import dequantize_blocks, join_blocks, unpack_q4_0_expert
from freetoken.quant.record import RecordLayout
from freetoken.testing.checkpoint_files import CONFIGS, edit_index, flip_byte, tiny_arrays
from freetoken.testing.gguf_files import gguf_tensors, write_gguf

MOE = {**CONFIGS["qwen3_moe"], "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 96}
DENSE = {**CONFIGS["llama"], "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}
MIXTRAL = {**CONFIGS["mixtral"], "hidden_size": 32, "intermediate_size": 64}
PARTS = ("gate", "up", "down")


def q4_0_but_norms_and_routers(name):
    return "F32" if "norm" in name or "gate_inp" in name or name.endswith("bias") else "Q4_0"


def make(tmp_path, config, name="m.gguf", choose_type=q4_0_but_norms_and_routers, stacked=True, arrays=None):
    tensors = gguf_tensors(config, arrays or tiny_arrays(config), stacked)
    return write_gguf(tmp_path / name, config, tensors, choose_type=choose_type)


def blocks_of(array):
    """As the gguf package quantises it: ``[..., n, 18]``."""
    raw = gguf.quants.quantize(np.ascontiguousarray(array, np.float32), gguf.GGMLQuantizationType.Q4_0)
    return raw.reshape(*array.shape[:-1], -1, 18)


def record_blocks(index, layer, expert):
    layout = index.layout_of(layer)
    name = index.files[int(index.record_file[layer, expert])].name
    raw = np.fromfile(index.path / name, np.uint8, layout.stride_bytes, offset=int(index.record_offset[layer, expert]))
    assert not raw[layout.payload_bytes :].any()
    return unpack_q4_0_expert(layout, raw)


def dense_matrix(index, name):
    tensor = index.tensors[name]
    path = index.path / index.files[tensor.file_index].name
    return matrix_view(np.fromfile(path, np.uint8, tensor.size_bytes, offset=tensor.offset_bytes), tensor.shape)


def as_stored(name, shape):
    """Whether the converter keeps this dense tensor in Q4_0."""
    return len(shape) == 2 and not name.endswith(".mlp.gate.weight")


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("tile_columns", [None, 96])
def test_experts_and_projections_keep_every_bit(tmp_path, stacked, tile_columns):
    arrays = tiny_arrays(MOE)
    convert(make(tmp_path, MOE, stacked=stacked), tmp_path / "ftw", ConvertOptions(tile_columns=tile_columns))
    index = FtwIndex.load(tmp_path / "ftw")
    assert [(x.format, x.tile_columns) for x in index.layouts] == [("q4_0", tile_columns or 32)]
    for name, tensor in index.tensors.items():
        if as_stored(name, tensor.shape):
            assert tensor.dtype == "q4_0" and tensor.size_bytes == matrix_bytes(tensor.shape)
            matrix = dense_matrix(index, name)
            np.testing.assert_array_equal(join_blocks(matrix.nibbles, matrix.scales), blocks_of(arrays[name]), name)
            np.testing.assert_array_equal(index.read_tensor(name), dequantize_blocks(blocks_of(arrays[name])))
        else:
            assert tensor.dtype == "f32"
            np.testing.assert_array_equal(index.read_tensor(name), arrays[name])
    for ordinal, layer in enumerate(index.spec.moe_layers):
        for expert in range(index.spec.num_experts):
            found = record_blocks(index, ordinal, expert)
            for part, blocks, values in zip(PARTS, found, index.read_expert(ordinal, expert), strict=True):
                expected = blocks_of(arrays[f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"])
                np.testing.assert_array_equal(blocks, expected)
                np.testing.assert_array_equal(values, dequantize_blocks(expected))
    assert index.spec.dtype == "bf16"
    assert not verify_checkpoint(tmp_path / "ftw").problems
    assert index.dense_bytes == sum(tensor_bytes(t.dtype, t.shape) for t in index.tensors.values())


@pytest.mark.parametrize("config", [DENSE, MIXTRAL], ids=["llama", "mixtral"])
def test_rows_of_llama_queries_and_keys_are_put_in_order(tmp_path, config):
    arrays = tiny_arrays(config)
    index = convert(make(tmp_path, config), tmp_path / "ftw")
    for name, tensor in index.tensors.items():
        if as_stored(name, tensor.shape):
            matrix = dense_matrix(index, name)
            np.testing.assert_array_equal(join_blocks(matrix.nibbles, matrix.scales), blocks_of(arrays[name]), name)
    source = GgufSource(tmp_path / "m.gguf")
    name = "model.layers.1.self_attn.k_proj.weight"
    blocks = blocks_of(arrays[name])
    np.testing.assert_array_equal(source.read_blocks(name, 3, 9), blocks[3:9])
    assert not np.array_equal(half_split_order(len(blocks), 8), np.arange(len(blocks)))
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' has no quantised blocks"):
        source.read_blocks("model.norm.weight")
    source.close()


def test_views_of_the_store(tmp_path):
    index = convert(make(tmp_path, MOE), tmp_path / "ftw")
    segments = [(index.path / file.name).read_bytes() for file in index.files]
    views = open_dense_tensors(index, segments)
    for name, tensor in index.tensors.items():
        view = views[name]
        values = view.dequantize() if isinstance(view, Q4_0Matrix) else view
        assert isinstance(view, Q4_0Matrix) == (tensor.dtype == "q4_0")
        np.testing.assert_array_equal(values, index.read_tensor(name))


@pytest.mark.parametrize("target", ["f32", "bf16"])
def test_asking_for_numbers_gives_numbers(tmp_path, target):
    path = make(tmp_path, MOE)
    index = convert(path, tmp_path / target, ConvertOptions(dtype=target))
    assert {t.dtype for t in index.tensors.values()} == {target} == {x.format for x in index.layouts}
    if target == "f32":
        name = "model.layers.0.self_attn.q_proj.weight"
        kept = convert(path, tmp_path / "kept")
        np.testing.assert_array_equal(index.read_tensor(name), kept.read_tensor(name))
        for numbers, quantised in zip(index.read_expert(1, 3), kept.read_expert(1, 3), strict=True):
            np.testing.assert_array_equal(numbers, quantised)


@pytest.mark.parametrize(("fallback", "expected"), [("f32", np.float32), ("bf16", np.uint16)])
def test_other_formats_become_the_fallback(tmp_path, fallback, expected):
    def choose(name):
        return {"token_embd.weight": "Q8_0", "output.weight": "F16"}.get(name, q4_0_but_norms_and_routers(name))

    index = convert(make(tmp_path, MOE, choose_type=choose), tmp_path / "m", ConvertOptions(fallback_dtype=fallback))
    found = {n: t.dtype for n, t in index.tensors.items() if t.dtype != "q4_0"}
    assert found.pop("model.embed_tokens.weight") == found.pop("lm_head.weight") == fallback
    assert set(found.values()) == {"f32"}  # norms and routers are what they were
    assert index.read_tensor("lm_head.weight").dtype == expected
    assert index.layouts[0].format == "q4_0"


def test_a_router_in_q4_0_becomes_numbers(tmp_path):
    def choose(name):
        return "F32" if "norm" in name else "Q4_0"

    index = convert(make(tmp_path, MOE, choose_type=choose), tmp_path / "m")
    name = "model.layers.0.mlp.gate.weight"
    assert index.tensors[name].dtype == "f32"
    np.testing.assert_array_equal(index.read_tensor(name), dequantize_blocks(blocks_of(tiny_arrays(MOE)[name])))


@pytest.mark.parametrize("odd", ["blk.2.ffn_down_exps.weight", "blk.2.ffn_gate_exps.weight"])
def test_a_layer_of_mixed_experts_is_widened_and_named(tmp_path, caplog, odd):
    def choose(name):
        return "Q8_0" if name == odd else q4_0_but_norms_and_routers(name)

    path = make(tmp_path, MOE, choose_type=choose)
    with caplog.at_level(logging.WARNING):
        index = convert(path, tmp_path / "m", ConvertOptions(fallback_dtype="bf16"))
    assert [index.layout_of(layer).format for layer in range(2)] == ["q4_0", "bf16"]
    (record,) = caplog.records
    part = odd.split("_")[1]
    assert "layer=2" in record.message and f"experts.0.{part}_proj.weight" in record.message
    assert "format=q8_0" in record.message
    FtwIndex.load(tmp_path / "m")
    assert not verify_checkpoint(tmp_path / "m").problems
    exact = convert(path, tmp_path / "exact")
    source = GgufSource(path)
    for part, values in zip(PARTS, exact.read_expert(1, 4), strict=True):
        np.testing.assert_array_equal(values, source.read(f"model.layers.2.mlp.experts.4.{part}_proj.weight"))
    source.close()


def test_layers_of_different_formats_have_their_own_layouts(tmp_path, caplog):
    def choose(name):
        return "Q8_0" if name.startswith("blk.0.ffn") and "exps" in name else q4_0_but_norms_and_routers(name)

    with caplog.at_level(logging.WARNING):
        index = convert(make(tmp_path, MOE, choose_type=choose), tmp_path / "m")
    assert [index.layout_of(layer).format for layer in range(2)] == ["f32", "q4_0"]
    assert index.layouts[0].stride_bytes > index.layouts[1].stride_bytes
    assert "layer=0 dtype=f32" in caplog.text


def test_without_q4_0_nothing_is_said(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        convert(make(tmp_path, MOE, choose_type=lambda n: "F32" if "norm" in n else "Q8_0"), tmp_path / "m")
    assert not caplog.records


def test_splitting_a_quantised_llama(tmp_path):
    path = make(tmp_path, {**DENSE, "intermediate_size": 128})
    index = convert(path, tmp_path / "m", ConvertOptions(split_dense_into_experts=4))
    assert {x.format for x in index.layouts} == {"f32"}
    assert index.tensors["model.layers.0.self_attn.q_proj.weight"].dtype == "q4_0"
    source = GgufSource(path)
    gate, _, down = index.read_expert(1, 2)
    np.testing.assert_array_equal(gate, source.read("model.layers.1.mlp.gate_proj.weight", 64, 96))
    np.testing.assert_array_equal(down, 4 * source.read("model.layers.1.mlp.down_proj.weight")[:, 64:96])
    source.close()


def test_tiles_must_be_made_of_blocks(tmp_path):
    with pytest.raises(CheckpointError, match="tile_columns 48 is not a positive multiple of 32"):
        convert(make(tmp_path, MOE), tmp_path / "m", ConvertOptions(tile_columns=48))


def test_an_interrupted_conversion_goes_on(tmp_path, monkeypatch):
    from freetoken.checkpoint import convert as module

    path = make(tmp_path, MOE)
    whole = convert(path, tmp_path / "whole")
    pack, calls = module.pack_q4_0_expert, []

    def stop_after_three(*arguments):
        calls.append(1)
        if len(calls) > 3:
            raise KeyboardInterrupt
        return pack(*arguments)

    monkeypatch.setattr(module, "pack_q4_0_expert", stop_after_three)
    with pytest.raises(KeyboardInterrupt):
        convert(path, tmp_path / "m")
    monkeypatch.setattr(module, "pack_q4_0_expert", lambda *a: calls.append(1) or pack(*a))
    calls.clear()
    again = convert(path, tmp_path / "m")
    assert len(calls) == whole.num_records - 3
    assert again.fingerprint == whole.fingerprint


def test_command_line(tmp_path, capsys):
    path = make(tmp_path, MOE, choose_type=lambda n: "F16" if n == "output.weight" else q4_0_but_norms_and_routers(n))
    assert main(["convert", str(path), str(tmp_path / "m"), "--fallback-dtype", "bf16"]) == 0
    assert main(["verify", str(tmp_path / "m")]) == 0
    assert FtwIndex.load(tmp_path / "m").tensors["lm_head.weight"].dtype == "bf16"
    index = FtwIndex.load(tmp_path / "m")
    flip_byte(index.path / "experts-00000.ftw", int(index.record_offset[1, 2]) + 100)
    assert main(["verify", str(tmp_path / "m")]) != 0
    assert "layer 2 expert 2" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- what load() checks


@pytest.fixture
def checkpoint(tmp_path):
    convert(make(tmp_path, MOE), tmp_path / "m")
    return tmp_path / "m"


def test_a_quantised_norm_is_refused(checkpoint):
    def edit(data):
        data["tensors"]["model.norm.weight"]["dtype"] = "q4_0"

    edit_index(checkpoint, edit)
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' has dtype q4_0; only embeddings and projections"):
        FtwIndex.load(checkpoint)


@pytest.mark.parametrize("name", ["model.layers.0.mlp.gate.weight", "model.layers.1.input_layernorm.weight"])
def test_only_embeddings_and_projections_can_be_quantised(checkpoint, name):
    edit_index(checkpoint, lambda data: data["tensors"][name].update(dtype="q4_0"))
    with pytest.raises(CheckpointError, match="only embeddings and projections"):
        FtwIndex.load(checkpoint)


def test_sizes_must_fit(checkpoint):
    name = "model.layers.1.mlp.up_proj.weight"
    edit_index(
        checkpoint, lambda data: data["tensors"][name].update(size_bytes=data["tensors"][name]["size_bytes"] - 2)
    )
    with pytest.raises(CheckpointError, match=r"up_proj\.weight': \d+ bytes contradict its dtype and shape"):
        FtwIndex.load(checkpoint)


def test_unknown_formats_are_refused(checkpoint):
    edit_index(checkpoint, lambda data: data["tensors"]["lm_head.weight"].update(dtype="q4_1"))
    with pytest.raises(UnsupportedModelError, match=r"has dtype 'q4_1'; supported: \['bf16', 'f32', 'q4_0'\]"):
        FtwIndex.load(checkpoint)


def test_layouts_must_be_those_of_this_version(checkpoint):
    def edit(data):
        data["record_layouts"][0]["fields"][0]["offset_bytes"] += 64

    edit_index(checkpoint, edit)
    with pytest.raises(CheckpointError, match="'q4_0' is not the version 1 layout"):
        FtwIndex.load(checkpoint)
    edit_index(checkpoint, lambda data: data["record_layouts"][0].update(format="q8_0"))
    with pytest.raises(UnsupportedModelError, match="record format 'q8_0' is not supported"):
        FtwIndex.load(checkpoint)


def test_json_keeps_the_layout(checkpoint):
    data = json.loads((checkpoint / "ftw.json").read_text())
    layout = RecordLayout.from_json(data["record_layouts"][0])
    assert layout == plan_layout("q4_0", 64, 96)
    assert [f.name for f in layout.fields] == ["gate_q", "up_q", "gate_d", "up_d", "down_q", "down_d"]


def test_sizes_of_matrices():
    assert FORMATS == ("f32", "bf16", "q4_0")
    assert scales_offset_bytes((3, 32)) == 64 and matrix_bytes((3, 32)) == 70
    assert tensor_bytes("q4_0", (4, 64)) == 128 + 16 and tensor_bytes("bf16", (4, 64)) == 512
    for shape in ((4, 48), (32,), (4, 0), (2, 2, 32)):
        with pytest.raises(CheckpointError, match="q4_0: a matrix of shape"):
            matrix_bytes(shape)
    with pytest.raises(CheckpointError, match="record dtype 'q8_0'"):
        plan_layout("q8_0", 32, 32)
    layout = plan_layout("q4_0", 32, 32)
    with pytest.raises(CheckpointError, match="record format 'iq1' is not one of f32, bf16, q4_0"):
        unpack_record(RecordLayout("iq1", 32, 32, 32, 1, 64, 4096, layout.fields), np.zeros(4096, np.uint8))


def test_sources_without_blocks_say_so():
    source = ArraySource(CONFIGS["llama"], tiny_arrays(CONFIGS["llama"]))
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' has no quantised blocks"):
        source.read_blocks("lm_head.weight")


def test_blocks_of_another_width_are_refused(tmp_path):
    class Wrong(GgufSource):
        def read_blocks(self, name, start=0, stop=None):
            return super().read_blocks(name, start, stop)[:, :1]

    source = Wrong(make(tmp_path, MOE))
    with pytest.raises(CheckpointError, match="bytes"):
        convert_source(source, tmp_path / "m")
    source.close()
