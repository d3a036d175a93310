"""Synthetic checkpoints in their three formats hold the same weights, and the command that makes them."""

import argparse
import json
from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from freetoken.checkpoint.convert import convert
from freetoken.checkpoint.ftw import FtwIndex
from freetoken.checkpoint.gguf_file import GgufFile
from freetoken.checkpoint.gguf_writer import plan_gguf
from freetoken.checkpoint.synthetic import SyntheticWeights, SynthOptions, shape_config, synthesize
from freetoken.checkpoint.synthetic.parallel import for_each, ordered_map
from freetoken.checkpoint.synthetic.parts import Part, write_files
from freetoken.checkpoint.synthetic.weights import to_f32
from freetoken.checkpoint.verify import verify_checkpoint
from freetoken.cli import synth as synth_command
from freetoken.errors import CheckpointError

SHAPES = ("qwen3-moe-tiny", "mixtral-tiny", "qwen3-tiny", "llama-tiny")
PARTS = ("gate", "up", "down")


def make(shape, path, **options):
    return synthesize(shape, path, SynthOptions(**{"seed": 5, "num_threads": 2, "measure_tokens": 0, **options}))


def same_values(index, weights):
    """Every tensor and every expert of the FTW checkpoint, against the generator."""
    for name in weights.shapes:
        assert np.array_equal(to_f32(index.read_tensor(name)), to_f32(weights.rows(name))), name
    for layer, expert in np.ndindex(*index.record_file.shape):
        for part, matrix in zip(PARTS, index.read_expert(layer, expert), strict=True):
            expected = to_f32(weights.expert(layer, expert, part))
            assert np.array_equal(to_f32(matrix), expected), (layer, expert, part)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_every_format_holds_the_same_weights(tmp_path, shape, dtype):
    weights = SyntheticWeights(shape_config(shape), dtype, seed=5)
    make(shape, tmp_path / "ftw", dtype=dtype)
    make(shape, tmp_path / "hf", dtype=dtype, format="safetensors")
    make(shape, tmp_path / "m.gguf", dtype=dtype, format="gguf")
    direct = FtwIndex.load(tmp_path / "ftw")
    assert not verify_checkpoint(tmp_path / "ftw").problems
    same_values(direct, weights)
    from_hf = convert(tmp_path / "hf", tmp_path / "from-hf")
    assert from_hf.spec == direct.spec
    assert from_hf.tensors == direct.tensors  # checksums included
    assert np.array_equal(from_hf.record_crc32c, direct.record_crc32c)
    from_gguf = convert(tmp_path / "m.gguf", tmp_path / "from-gguf")
    assert np.array_equal(from_gguf.record_crc32c, direct.record_crc32c)
    same_values(from_gguf, weights)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        texts = {(tmp_path / d / name).read_text() for d in ("ftw", "hf", "from-hf", "from-gguf")}
        assert len(texts) == 1, name


@pytest.mark.parametrize("shape", SHAPES)
def test_q4_0_records_and_matrices_have_the_bits_of_the_gguf(tmp_path, shape):
    weights = SyntheticWeights(shape_config(shape), "q4_0", seed=5)
    make(shape, tmp_path / "ftw", dtype="q4_0")
    make(shape, tmp_path / "m.gguf", dtype="q4_0", format="gguf")
    direct = FtwIndex.load(tmp_path / "ftw")
    assert not verify_checkpoint(tmp_path / "ftw").problems
    same_values(direct, weights)
    assert {t.dtype for t in direct.tensors.values()} == {"q4_0", "f32"}
    converted = convert(tmp_path / "m.gguf", tmp_path / "from-gguf")
    assert converted.tensors == direct.tensors
    assert np.array_equal(converted.record_crc32c, direct.record_crc32c)
    assert converted.layouts == direct.layouts
    assert converted.spec == direct.spec
    same_values(converted, weights)


@pytest.mark.parametrize("shape", SHAPES)
def test_q4_0_gguf_and_its_safetensors_hold_the_same_values(tmp_path, shape):
    weights = SyntheticWeights(shape_config(shape), "q4_0", 0.0, seed=5)
    make(shape, tmp_path / "m.gguf", dtype="q4_0", format="gguf")
    same_values(convert(tmp_path / "m.gguf", tmp_path / "from-gguf"), weights)
    make(shape, tmp_path / "hf", dtype="q4_0", format="safetensors")
    arrays = load_file(tmp_path / "hf" / "model.safetensors")
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.float32)}
    name = "model.layers.1.self_attn.q_proj.weight"
    assert np.array_equal(arrays[name], to_f32(weights.rows(name)))


@pytest.mark.parametrize("shape", SHAPES)
def test_gguf_file_as_other_readers_see_it(tmp_path, shape):
    make(shape, tmp_path / "m.gguf", dtype="q4_0", format="gguf")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert {t for n, t in types.items() if "norm" in n or "ffn_gate_inp" in n} == {"F32"}
    assert {t for n, t in types.items() if "norm" not in n and "ffn_gate_inp" not in n} == {"Q4_0"}
    spec = SyntheticWeights(shape_config(shape), "q4_0").spec
    architecture = reader.fields["general.architecture"].contents()
    assert reader.fields[f"{architecture}.block_count"].contents() == spec.num_layers
    assert reader.fields["tokenizer.ggml.pre"].contents() == "qwen2"
    assert len(reader.fields["tokenizer.ggml.tokens"].contents()) == spec.vocab_size
    if spec.is_moe:
        stacked = next(t for t in reader.tensors if t.name == "blk.1.ffn_down_exps.weight")
        assert list(stacked.shape) == [spec.moe_intermediate_size, spec.hidden_size, spec.num_experts]


def test_threads_and_file_sizes_change_nothing_but_the_files(tmp_path):
    one = make("qwen3-moe-tiny", tmp_path / "one", num_threads=1)
    many = make("qwen3-moe-tiny", tmp_path / "many", num_threads=7, max_file_bytes=128 * 1024)
    first, second = FtwIndex.load(one.path), FtwIndex.load(many.path)
    assert len(second.files) > len(first.files) == 2
    assert np.array_equal(first.record_crc32c, second.record_crc32c)
    assert {n: t.crc32c for n, t in first.tensors.items()} == {n: t.crc32c for n, t in second.tensors.items()}


def test_shards_are_indexed(tmp_path):
    result = make("mixtral-tiny", tmp_path / "hf", format="safetensors", max_file_bytes=150_000)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 3 and files == {p.name for p in (tmp_path / "hf").glob("*.safetensors")}
    assert result.size_bytes > index["metadata"]["total_size"]
    assert convert(tmp_path / "hf", tmp_path / "ftw").spec == result.spec


def test_interrupted_ftw_goes_on(tmp_path):
    def stop(done, total, what):
        if what.startswith("layer 2"):
            raise KeyboardInterrupt

    options = SynthOptions(seed=5, num_threads=2, measure_tokens=0)
    with pytest.raises(KeyboardInterrupt):
        synthesize("qwen3-moe-tiny", tmp_path / "m", options, stop)
    assert not (tmp_path / "m").exists()
    seen = []
    synthesize("qwen3-moe-tiny", tmp_path / "m", options, lambda done, total, what: seen.append((done, total)))
    assert len(seen) < 20 and seen[-1][0] == seen[-1][1]
    assert not verify_checkpoint(tmp_path / "m").problems


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_interruption_leaves_nothing_behind(tmp_path, kind):
    def stop(done, total, what):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthesize("llama-tiny", tmp_path / "m", SynthOptions(format=kind, measure_tokens=0), stop)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["ftw", "safetensors", "gguf"])
def test_only_what_was_made_here_is_replaced(tmp_path, kind):
    target = tmp_path / "m"
    make("llama-tiny", target, format=kind)
    with pytest.raises(CheckpointError, match="use --overwrite to replace it"):
        make("llama-tiny", target, format=kind)
    make("llama-tiny", target, format=kind, overwrite=True, seed=6)
    other = tmp_path / "other"
    if kind == "gguf":
        other.write_text("a diary")
    else:
        other.mkdir()
        (other / "diary.txt").write_text("")
    with pytest.raises(CheckpointError, match="choose another name"):
        make("llama-tiny", other, format=kind, overwrite=True)
    assert other.exists()


def test_index_says_how_it_was_made(tmp_path):
    result = make("qwen3-moe-tiny", tmp_path / "m", locality=0.3, measure_tokens=64, overrides={"layers": 2})
    source = FtwIndex.load(tmp_path / "m").source
    assert (
        source["kind"] == "synthetic" and source["shape"] == "qwen3-moe-tiny" and source["overrides"] == {"layers": 2}
    )
    assert source["locality"] == 0.3 and source["seed"] == 5 and source["dtype"] == "bf16"
    assert source["routing"] == result.routing.to_json()
    assert set(source["routing"]["walk"]["layers"]) == {"0", "1"}


def test_special_tokens_end_a_generation(tmp_path):
    make("qwen3-moe-tiny", tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json"))
    assert [tokenizer.id_to_token(i) for i in config["eos_token_id"]] == ["<|im_end|>", "<|endoftext|>"]
    assert config["dtype"] == "bfloat16" and config["vocab_size"] == tokenizer.get_vocab_size()
    assert json.loads((tmp_path / "m" / "generation_config.json").read_text())["eos_token_id"] == config["eos_token_id"]


# ------------------------------------------------------------------------------------------------------ the command


def command(*words):
    parser = argparse.ArgumentParser()
    synth_command.add_parser(parser.add_subparsers(dest="command"))
    return synth_command.run(parser.parse_args(["synth", *(str(word) for word in words)]))


def test_command_prints_the_measured_routing(tmp_path, capsys):
    assert command("qwen3-moe-tiny", tmp_path / "m", "--experts", 32, "--locality", 0.3, "--threads", 2) == 0
    out = capsys.readouterr().out
    for words in ("experts of 64", "shared with", "entropy", "generation", "uniform choice", "Qwen3MoeForCausalLM"):
        assert words in out
    assert FtwIndex.load(tmp_path / "m").spec.num_experts == 32


def test_command_says_what_is_wrong(tmp_path, capsys):
    assert command("llama-tiny", tmp_path / "m", "--experts", 4) == 1
    assert "has no experts to override" in capsys.readouterr().err
    assert command("llama-tiny", tmp_path / "m", "--threads", 0) == 1
    assert "0 threads are too few" in capsys.readouterr().err
    assert command("llama-tiny", tmp_path / "m", "--seed", -1) == 1
    assert "seed -1 is negative" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert command("llama-tiny", tmp_path / "file" / "m", "--format", "gguf") == 1
    assert "cannot be written to" in capsys.readouterr().err
    assert command("mixtral-tiny", tmp_path / "m", "--locality", 0.99) == 1
    assert "locality 0.99 is not between 0 and 0.9" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------ parts


def test_gguf_plan_is_read_back(tmp_path):
    metadata = {
        "general.architecture": "llama", "a.int": 7, "a.negative": -7, "a.float": 0.5, "a.yes": True, "a.text": "wörld",
        "a.ints": [1, 3, 1], "a.texts": ["a", ""], "a.floats": [0.5, 1.5],
    }  # fmt: skip
    plan = plan_gguf(metadata, [("x", (3, 2, 32), 2), ("y", (5,), 0)])
    path = tmp_path / "m.gguf"
    path.write_bytes(plan.header + bytes(plan.size_bytes - len(plan.header)))
    file = GgufFile(path)
    assert file.metadata == metadata and file.tensors == plan.tensors
    file.close()


@pytest.mark.parametrize(
    ("metadata", "tensors", "message"),
    [
        ({"k": None}, [], "'k': None has no GGUF type"),
        ({"k": []}, [], "has no GGUF type"),
        ({"k": [1, "a"]}, [], "elements of one type"),
        ({"k": 2**32}, [], "does not fit its GGUF type"),
        ({}, [("x", (4, 33), 2)], "cannot be Q4_0"),
        ({}, [("x", (4,), 0), ("x", (4,), 0)], "cannot be F32"),
    ],
)
def test_impossible_gguf_is_refused(metadata, tensors, message):
    with pytest.raises(CheckpointError, match=message):
        plan_gguf(metadata, tensors)


def test_space_is_checked_first(tmp_path):
    with pytest.raises(CheckpointError, match=r"are needed on this file system"):
        write_files(tmp_path, {"huge": 1 << 60}, [], 1)
    assert list(tmp_path.iterdir()) == []


def test_part_of_another_size_is_an_error(tmp_path):
    part = Part("f", 0, 8, "tensor 'x'", lambda: np.zeros(4, np.uint8))
    with pytest.raises(CheckpointError, match="tensor 'x' has 4 bytes, 8 were planned"):
        write_files(tmp_path, {"f": 8}, [part], 1)


def test_first_failure_stops_the_work():
    begun = []

    def work(item):
        begun.append(item)
        if item == 3:
            raise ValueError("three")

    with pytest.raises(ValueError, match="three"):
        for_each(work, range(10**9), 2)
    assert 3 in begun


def test_ordered_map_keeps_order_and_stays_within_its_window():
    taken = []

    def items():
        for i in range(50):
            taken.append(i)
            yield i

    with ThreadPoolExecutor(4) as pool:
        results = ordered_map(pool, lambda i: i * i, items(), 5)
        assert next(results) == 0 and len(taken) == 5
        assert [0, *results] == [i * i for i in range(50)]
