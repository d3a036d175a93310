"""GGUF files as sources: names, row order, stacked experts, series, configuration."""

import shutil

import gguf
import numpy as np
import pytest

from freetoken.checkpoint.convert import ConvertOptions, convert
from freetoken.checkpoint.gguf_config import llama3_factors
from freetoken.checkpoint.gguf_source import GgufSource, half_split_order
from freetoken.errors import CheckpointError, UnsupportedModelError
from freetoken.quant import bf16
from freetoken.testing.checkpoint_files import CONFIGS, tiny_arrays
from freetoken.testing.gguf_files import gguf_tensors, interleave_pairs, write_gguf


def make(tmp_path, model, name="m.gguf", stacked=True, config=None, extra=None, **options):
    config = config or CONFIGS[model]
    tensors = {**gguf_tensors(config, tiny_arrays(config), stacked), **(extra or {})}
    return write_gguf(tmp_path / name, config, tensors, **options)


def read_f32(source, name):
    values = source.read(name)
    return bf16.to_f32(values) if values.dtype == np.uint16 else values


@pytest.mark.parametrize("model", sorted(CONFIGS))
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("stacked", [True, False])
def test_tensors_come_back_under_their_hugging_face_names(tmp_path, model, kind, stacked):
    path = make(tmp_path, model, stacked=stacked, choose_type=lambda n: "F32" if "norm" in n else kind)
    source, arrays = GgufSource(path), tiny_arrays(CONFIGS[model])
    assert set(source.tensors) == set(arrays)
    for name, array in arrays.items():
        assert source.tensors[name].shape == array.shape
        assert source.tensors[name].dtype == ("bf16" if kind == "BF16" and "norm" not in name else "f32")
        np.testing.assert_array_equal(read_f32(source, name), array, err_msg=name)
        np.testing.assert_array_equal(source.read(name, 3, 11), source.read(name)[3:11], err_msg=name)
    expected = {k: v for k, v in CONFIGS[model].items() if k in source.config}
    assert {k: source.config[k] for k in expected} == expected
    source.close()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_quantised_values_are_exact_through_a_whole_conversion(tmp_path, kind):
    config = {**CONFIGS["mixtral"], "intermediate_size": 64}
    arrays = tiny_arrays(config)
    path = make(tmp_path, "mixtral", config=config, choose_type=lambda n: "F32" if "norm" in n else kind)
    index = convert(path, tmp_path / "ftw", ConvertOptions(max_file_bytes=131072))
    assert index.source["kind"] == "gguf"

    def quantised(array):  # blocks run along rows, so the order of rows does not matter
        quant = gguf.GGMLQuantizationType[kind]
        return gguf.quants.dequantize(gguf.quants.quantize(array, quant), quant)

    for name in index.tensors:
        array = arrays[name.replace(".mlp.gate.", ".block_sparse_moe.gate.")]
        expected = quantised(array) if array.ndim == 2 else array
        np.testing.assert_array_equal(index.read_tensor(name), expected, err_msg=name)
    for layer, expert in np.ndindex(2, 4):
        prefix = f"model.layers.{layer}.block_sparse_moe.experts.{expert}."
        for short, matrix in zip(("w1", "w3", "w2"), index.read_expert(layer, expert), strict=True):
            np.testing.assert_array_equal(matrix, quantised(arrays[f"{prefix}{short}.weight"]))
    source = GgufSource(path)
    name = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    np.testing.assert_array_equal(source.read(name, 5, 9), quantised(arrays[name])[5:9])


@pytest.mark.parametrize("heads,dim", [(1, 2), (3, 8), (9, 64)])
def test_row_order_inverts_the_interleaving(heads, dim):
    rows = np.arange(heads * dim)
    np.testing.assert_array_equal(interleave_pairs(rows, heads)[half_split_order(heads * dim, dim)], rows)


def test_biases_of_query_and_key_are_reordered_too(tmp_path):
    config = {**CONFIGS["llama"], "attention_bias": True, "mlp_bias": True}
    source = GgufSource(make(tmp_path, "llama", config=config))
    assert source.config["attention_bias"] and source.config["mlp_bias"]
    for name, array in tiny_arrays(config).items():
        np.testing.assert_array_equal(source.read(name), array, err_msg=name)
        np.testing.assert_array_equal(source.read(name, 2, 5), array[2:5], err_msg=name)


def test_tied_embeddings_are_those_without_output(tmp_path):
    config = {**CONFIGS["llama"], "tie_word_embeddings": True}
    assert GgufSource(make(tmp_path, "llama", config=config)).config["tie_word_embeddings"]
    assert not GgufSource(make(tmp_path, "llama", name="u.gguf")).config["tie_word_embeddings"]


def test_special_token_ids(tmp_path):
    def add(writer):
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_eot_token_id(7)
        writer.add_pad_token_id(3)

    config = GgufSource(make(tmp_path, "llama", add_metadata=add)).config
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, [2, 7], 3)
    one = GgufSource(make(tmp_path, "llama", name="b.gguf", add_metadata=lambda w: w.add_eos_token_id(2))).config
    assert one["eos_token_id"] == 2 and "bos_token_id" not in one


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recognised_by_its_factors(tmp_path, factor):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = {**CONFIGS["llama"], "rope_theta": 500000.0, "head_dim": 128}
    rule = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rule |= {"original_max_position_embeddings": 8192}
    oracle = LlamaConfig(head_dim=128, rope_parameters={**rule, "rope_theta": 500000.0}, max_position_embeddings=131072)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](oracle, "cpu")
    plain = 1 / 500000.0 ** (np.arange(0, 128, 2) / 128)
    factors = (plain / scaled.numpy()).astype(np.float32)
    np.testing.assert_allclose(llama3_factors(128, 500000.0, factor, 1.0, 4.0, 8192), factors, rtol=1e-5)
    path = make(tmp_path, "llama", config=config, extra={"rope_freqs.weight": factors})
    assert GgufSource(path).config["rope_scaling"] == rule
    odd = make(tmp_path, "llama", config=config, name="odd.gguf", extra={"rope_freqs.weight": factors + 0.5})
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight' follows no known rule"):
        GgufSource(odd)


def test_yarn_and_linear_scaling(tmp_path):
    def add(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32768)

    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert GgufSource(make(tmp_path, "qwen3", add_metadata=add)).config["rope_scaling"] == expected


def test_a_series_of_files_is_one_checkpoint(tmp_path):
    config = CONFIGS["qwen3_moe"]
    tensors = gguf_tensors(config, tiny_arrays(config))
    names = sorted(tensors)
    for i in range(3):

        def add(writer, number=i):
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", 3)

        part = {name: tensors[name] for name in names[i::3]}
        write_gguf(tmp_path / f"m-{i + 1:05d}-of-00003.gguf", config, part, add_metadata=add)
    for i in (1, 3):
        source = GgufSource(tmp_path / f"m-{i:05d}-of-00003.gguf")
        for name, array in tiny_arrays(config).items():
            np.testing.assert_array_equal(source.read(name), array)
        source.close()
    shutil.copy(tmp_path / "m-00002-of-00003.gguf", tmp_path / "m-00003-of-00003.gguf")
    with pytest.raises(CheckpointError, match="part 1 of 3 by its metadata, 2 of 3 by its name"):
        GgufSource(tmp_path / "m-00001-of-00003.gguf")
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"m-00002-of-00003\.gguf: cannot be opened"):
        GgufSource(tmp_path / "m-00001-of-00003.gguf")


def test_unknown_tensors_and_architectures_are_refused(tmp_path):
    path = make(tmp_path, "llama", extra={"blk.0.ssm_a.weight": np.zeros((2, 2), np.float32)})
    with pytest.raises(UnsupportedModelError, match=r"'blk\.0\.ssm_a\.weight' is not known"):
        convert(path, tmp_path / "ftw")
    writer = gguf.GGUFWriter(tmp_path / "g.gguf", "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=r"'gemma3' is not supported; supported: \['llama'"):
        GgufSource(tmp_path / "g.gguf")


def test_malformed_metadata(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "g.gguf", "llama")
    writer.add_string("llama.embedding_length", "wide")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"g\.gguf: malformed metadata.*wide"):
        GgufSource(tmp_path / "g.gguf")


def test_missing_metadata_and_tensors_are_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "g.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"metadata has no llama\.embedding_length"):
        GgufSource(tmp_path / "g.gguf")
    config = CONFIGS["llama"]
    tensors = gguf_tensors(config, tiny_arrays(config))
    del tensors["blk.1.attn_output.weight"]
    with pytest.raises(CheckpointError, match=r"lacks 'model\.layers\.1\.self_attn\.o_proj\.weight'"):
        convert(write_gguf(tmp_path / "h.gguf", config, tensors), tmp_path / "ftw")
    del tensors["token_embd.weight"]
    with pytest.raises(CheckpointError, match=r"'token_embd\.weight' is missing"):
        GgufSource(write_gguf(tmp_path / "i.gguf", config, tensors))
