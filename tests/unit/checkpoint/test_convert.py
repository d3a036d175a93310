"""Whole conversions of Hugging Face directories: every value arrives, and every misfit is named."""

import json

import numpy as np
import pytest

from freetoken.checkpoint.convert import ConvertOptions, convert, convert_source, open_source
from freetoken.checkpoint.ftw import FtwIndex
from freetoken.checkpoint.source import ArraySource
from freetoken.checkpoint.verify import verify_checkpoint
from freetoken.errors import CheckpointError, UnsupportedModelError
from freetoken.quant import bf16
from freetoken.testing.checkpoint_files import CONFIGS, tiny_arrays, write_hf_checkpoint, write_safetensors

PARTS = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2"), "qwen3": ("mlp", "gate_proj", "up_proj", "down_proj")}


def as_f32(array):
    return bf16.to_f32(array) if array.dtype == np.uint16 else array


def check_values(index, arrays):
    """Every tensor of the source is in the checkpoint, value for value."""
    seen = set()
    for name, tensor in index.tensors.items():
        source = name.replace(".mlp.gate.", ".block_sparse_moe.gate.") if index.spec.family == "mixtral" else name
        np.testing.assert_array_equal(as_f32(index.read_tensor(name)), arrays[source], err_msg=name)
        assert index.read_tensor(name).shape == tensor.shape
        seen.add(source)
    for ordinal, layer in enumerate(index.spec.moe_layers):
        mlp, *parts = PARTS[index.spec.family]
        for expert in range(index.spec.num_experts):
            for part, matrix in zip(parts, index.read_expert(ordinal, expert), strict=True):
                name = f"model.layers.{layer}.{mlp}.experts.{expert}.{part}.weight"
                np.testing.assert_array_equal(as_f32(matrix), arrays[name], err_msg=name)
                seen.add(name)
    assert seen == set(arrays)


@pytest.mark.parametrize("model", sorted(CONFIGS))
@pytest.mark.parametrize("dtype,num_shards", [("F32", 1), ("BF16", 3), ("F16", 2)])
@pytest.mark.parametrize("max_file_bytes", [None, 65536])
def test_round_trip(tmp_path, model, dtype, num_shards, max_file_bytes):
    arrays = tiny_arrays(CONFIGS[model])
    source = write_hf_checkpoint(tmp_path / "hf", CONFIGS[model], arrays, dtype=dtype, num_shards=num_shards)
    convert(source, tmp_path / "ftw", ConvertOptions(max_file_bytes=max_file_bytes))
    index = FtwIndex.load(tmp_path / "ftw")
    check_values(index, arrays)
    expected = "bf16" if dtype == "BF16" else "f32"
    assert {t.dtype for t in index.tensors.values()} == {expected} == {index.spec.dtype}
    assert all(layout.format == expected for layout in index.layouts)
    assert all(file.size_bytes <= (max_file_bytes or 2**28) for file in index.files)
    assert json.loads((tmp_path / "ftw" / "config.json").read_text()) == index.model_config
    assert index.model_config["dtype"] == {"f32": "float32", "bf16": "bfloat16"}[expected]
    assert index.source["kind"] == "huggingface" and index.source["path"] == str(source)
    assert not verify_checkpoint(tmp_path / "ftw").problems


@pytest.mark.parametrize("tile_columns", [1, 5, 8, 40, None])
def test_tile_sizes(tmp_path, tile_columns):
    config = CONFIGS["qwen3_moe"]
    arrays = tiny_arrays(config)
    index = convert_source(ArraySource(config, arrays), tmp_path / "m", ConvertOptions(tile_columns=tile_columns))
    assert index.layouts[0].tile_columns == (tile_columns or 40)
    check_values(index, arrays)


def test_tiles_must_divide(tmp_path):
    config = CONFIGS["qwen3_moe"]
    with pytest.raises(CheckpointError, match="tile_columns 7 does not divide intermediate size 40"):
        convert_source(ArraySource(config, tiny_arrays(config)), tmp_path / "m", ConvertOptions(tile_columns=7))


def test_mixed_dtypes_keep_every_tensor_exact(tmp_path):
    config = CONFIGS["qwen3_moe"]
    arrays = tiny_arrays(config)

    def dtype(name):  # layer 2's experts are mixed: its records must hold both
        return "F32" if "norm" in name or "layers.2.mlp.experts.1.up" in name else "BF16"

    source = write_hf_checkpoint(tmp_path / "hf", config, arrays, dtype=dtype)
    index = convert(source, tmp_path / "ftw")
    check_values(index, arrays)
    assert [index.layout_of(i).format for i in range(2)] == ["bf16", "f32"]
    assert {n for n, t in index.tensors.items() if t.dtype == "f32"} == {n for n in index.tensors if "norm" in n}
    assert index.spec.dtype == "bf16"


@pytest.mark.parametrize("target,source_dtype", [("f32", "BF16"), ("bf16", "F32"), ("bf16", "F16")])
def test_chosen_dtype(tmp_path, target, source_dtype):
    config = CONFIGS["mixtral"]
    arrays = tiny_arrays(config)
    source = write_hf_checkpoint(tmp_path / "hf", config, arrays, dtype=source_dtype)
    index = convert(source, tmp_path / "ftw", ConvertOptions(dtype=target))
    check_values(index, arrays)  # the values fit BF16
    assert {t.dtype for t in index.tensors.values()} == {target}


def test_bf16_rounds(tmp_path):
    config = CONFIGS["llama"]
    arrays = {k: v + np.float32(1e-3) for k, v in tiny_arrays(config).items()}
    index = convert_source(ArraySource(config, arrays), tmp_path / "m", ConvertOptions(dtype="bf16"))
    name = "model.embed_tokens.weight"
    np.testing.assert_array_equal(index.read_tensor(name), bf16.from_f32(arrays[name]))


def test_companions_are_copied_and_templates_get_their_file(tmp_path):
    config = CONFIGS["llama"]
    source = write_hf_checkpoint(tmp_path / "hf", {**config, "torch_dtype": "float32"}, tiny_arrays(config))
    (source / "tokenizer.json").write_text('{"a": 1}')
    (source / "generation_config.json").write_text('{"eos_token_id": 7}')
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    convert(source, tmp_path / "ftw")
    made = {p.name: p.read_text() for p in (tmp_path / "ftw").iterdir() if p.suffix != ".ftw"}
    assert made["tokenizer.json"] == '{"a": 1}' and made["generation_config.json"] == '{"eos_token_id": 7}'
    assert made["chat_template.jinja"] == "{{ messages }}"
    assert "torch_dtype" not in json.loads(made["config.json"])
    (source / "chat_template.jinja").write_text("file")
    named = [{"name": "default", "template": "named"}, {"name": "tool_use", "template": "t"}]
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    convert(source, tmp_path / "second")
    assert (tmp_path / "second" / "chat_template.jinja").read_text() == "file"
    (source / "chat_template.jinja").unlink()
    convert(source, tmp_path / "third")
    assert (tmp_path / "third" / "chat_template.jinja").read_text() == "named"


EXPERT = "model.layers.1.block_sparse_moe.experts.3.w2.weight"


@pytest.mark.parametrize(
    "change,match",
    [
        (lambda a: a.pop("model.norm.weight"), r"lacks 'model\.norm\.weight' \(1 tensors missing"),
        (lambda a: a.pop(EXPERT), "lacks 'layer 1 expert 3 down'"),
        (
            lambda a: a.update({"model.layers.2.input_layernorm.weight": a["model.norm.weight"]}),
            r"layers\.2.*not belong",
        ),
        (
            lambda a: a.update({EXPERT.replace("experts.3", "experts.4"): a[EXPERT]}),
            r"experts\.4.*names layer 1 expert 4",
        ),
        (lambda a: a.update({EXPERT.replace("layers.1", "layers.9"): a[EXPERT]}), r"layers\.9.*names layer 9"),
        (lambda a: a.update({EXPERT: a[EXPERT].T}), r"w2\.weight' has shape \[48, 32\].*asks for \[32, 48\]"),
        (lambda a: a.update({"lm_head.weight": a["lm_head.weight"][:7]}), r"'lm_head\.weight' has shape \[7, 32\]"),
        (
            lambda a: a.update({"model.layers.0.mlp.gate.weight": a["model.layers.0.block_sparse_moe.gate.weight"]}),
            "are the same thing",
        ),
    ],
)
def test_missing_extra_and_misshapen_tensors(tmp_path, change, match):
    config = CONFIGS["mixtral"]
    arrays = tiny_arrays(config)
    change(arrays)
    with pytest.raises(CheckpointError, match=match):
        convert_source(ArraySource(config, arrays), tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_unknown_tensors_are_never_dropped(tmp_path):
    config = CONFIGS["mixtral"]
    arrays = {**tiny_arrays(config), "model.layers.0.mtp.weight": np.zeros((2, 2), np.float32)}
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.0\.mtp\.weight"):
        convert_source(ArraySource(config, arrays), tmp_path / "m")


def test_tensors_without_use_are_skipped(tmp_path):
    config = {**CONFIGS["llama"], "tie_word_embeddings": True}
    arrays = tiny_arrays(CONFIGS["llama"])
    arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    index = convert_source(ArraySource(config, arrays), tmp_path / "m")
    assert "lm_head.weight" not in index.tensors and len(index.tensors) == len(arrays) - 2


@pytest.mark.parametrize(
    "config,match",
    [
        ({"architectures": ["Grok1ForCausalLM"]}, "Grok1ForCausalLM"),
        (
            {**CONFIGS["llama"], "quantization_config": {"quant_method": "fp8"}},
            "quantised with 'fp8' are not supported",
        ),
        ({**CONFIGS["llama"], "hidden_act": "relu"}, "relu"),
    ],
)
def test_unsupported_models(tmp_path, config, match):
    source = write_hf_checkpoint(tmp_path / "hf", config, tiny_arrays(CONFIGS["llama"]))
    with pytest.raises(UnsupportedModelError, match=match):
        convert(source, tmp_path / "ftw")


@pytest.mark.parametrize(
    "change", [{"hidden_size": "many"}, {"num_attention_heads": 0, "head_dim": None}, {"rope_theta": [1]}]
)
def test_malformed_configurations(tmp_path, change):
    arrays = tiny_arrays(CONFIGS["llama"])
    source = write_hf_checkpoint(tmp_path / "hf", {**CONFIGS["llama"], **change}, arrays)
    for options in (ConvertOptions(), ConvertOptions(split_dense_into_experts=2)):
        with pytest.raises(CheckpointError, match="configuration is malformed"):
            convert(source, tmp_path / "ftw", options)


def test_unsupported_tensor_dtype(tmp_path):
    source = write_hf_checkpoint(tmp_path / "hf", CONFIGS["llama"], {})
    write_safetensors(source / "model.safetensors", {"model.norm.weight": ("F8_E4M3", np.zeros(32, np.uint8))})
    with pytest.raises(
        UnsupportedModelError, match=r"model\.safetensors: tensor 'model\.norm\.weight' has dtype F8_E4M3"
    ):
        convert(source, tmp_path / "ftw")


def test_foreign_sources(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        open_source(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        open_source(tmp_path)
    (tmp_path / "x.gguf").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"it holds x\.gguf, name that file"):
        open_source(tmp_path)
    with pytest.raises(CheckpointError, match="neither a Hugging Face checkpoint directory nor a GGUF file"):
        open_source(tmp_path / "x.gguf")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: not valid JSON"):
        open_source(tmp_path)


def test_array_source_takes_float32_and_bf16_only():
    with pytest.raises(TypeError, match="'x' is float64"):
        ArraySource({}, {"x": np.zeros(2)})


@pytest.mark.parametrize(
    "name,dtype",
    [("qwen3_moe_mixed", "bfloat16"), ("mixtral", "float32"), ("llama_bias_yarn", "float32"), ("qwen3", "bfloat16")],
)
def test_checkpoints_saved_by_transformers(tmp_path, name, dtype):
    from freetoken.testing.tiny_models import write_tiny_checkpoint

    numpy_format = pytest.importorskip("safetensors.torch")
    source = write_tiny_checkpoint(name, tmp_path / "hf", dtype=dtype)
    index = convert(source, tmp_path / "ftw")
    tensors = numpy_format.load_file(source / "model.safetensors")
    check_values(index, {n: t.float().numpy() for n, t in tensors.items()})
    assert index.spec.dtype == {"bfloat16": "bf16", "float32": "f32"}[dtype]
    assert (tmp_path / "ftw" / "chat_template.jinja").exists() and (tmp_path / "ftw" / "tokenizer.json").exists()
