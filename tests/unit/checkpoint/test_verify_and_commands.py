"""``freetoken convert`` and ``freetoken verify``."""

import argparse
import os

import pytest

from freetoken.checkpoint.ftw import FtwIndex
from freetoken.checkpoint.verify import verify_checkpoint
from freetoken.cli import convert as convert_command
from freetoken.cli import verify as verify_command
from freetoken.testing.checkpoint_files import CONFIGS, flip_byte, tiny_arrays, write_hf_checkpoint


def command(*words):
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers(dest="command")
    convert_command.add_parser(subparsers)
    verify_command.add_parser(subparsers)
    args = parser.parse_args([str(word) for word in words])
    return {"convert": convert_command, "verify": verify_command}[args.command].run(args)


@pytest.fixture
def source(tmp_path):
    return write_hf_checkpoint(tmp_path / "hf", CONFIGS["qwen3_moe"], tiny_arrays(CONFIGS["qwen3_moe"]))


def test_convert_and_verify(tmp_path, source, capsys):
    assert command("convert", source, tmp_path / "m", "--max-file-bytes", "64KiB", "--tile-columns", 8) == 0
    assert "Qwen3MoeForCausalLM" in capsys.readouterr().out
    assert len(FtwIndex.load(tmp_path / "m").files) > 3
    assert command("verify", tmp_path / "m") == 0
    assert "all sound" in capsys.readouterr().out
    assert command("convert", source, tmp_path / "m") == 1
    assert "use --overwrite" in capsys.readouterr().err
    assert command("convert", source, tmp_path / "m", "--overwrite", "--dtype", "bf16") == 0
    assert FtwIndex.load(tmp_path / "m").spec.dtype == "bf16"


def test_split_option(tmp_path, capsys):
    source = write_hf_checkpoint(tmp_path / "hf", CONFIGS["llama"], tiny_arrays(CONFIGS["llama"]))
    assert command("convert", source, tmp_path / "m", "--split-dense-into-experts", 4) == 0
    assert FtwIndex.load(tmp_path / "m").spec.num_experts == 4
    assert command("convert", source, tmp_path / "n", "--split-dense-into-experts", 5) == 1
    assert "must be a power of two" in capsys.readouterr().err


def test_verify_names_every_damaged_part(tmp_path, source, capsys):
    command("convert", source, tmp_path / "m", "--max-file-bytes", 65536)
    index = FtwIndex.load(tmp_path / "m")
    record = index.path / index.files[index.record_file[1, 3]].name
    flip_byte(record, int(index.record_offset[1, 3]) + index.layouts[0].stride_bytes - 1)
    tensor = index.tensors["model.layers.1.mlp.up_proj.weight"]
    dense = index.path / index.files[tensor.file_index].name
    flip_byte(dense, tensor.offset_bytes)
    progress = []
    report = verify_checkpoint(tmp_path / "m", lambda *step: progress.append(step))
    assert [p.split(": checksum")[0] for p in report.problems] == [
        f"{dense}: tensor 'model.layers.1.mlp.up_proj.weight'",
        f"{record}: record of layer 2 expert 3",
    ]
    assert (report.num_records, report.num_tensors) == (10, len(index.tensors))
    assert progress[-1][:2] == (report.num_bytes, report.num_bytes)
    capsys.readouterr()
    assert command("verify", tmp_path / "m") == 1
    output = capsys.readouterr()
    assert "record of layer 2 expert 3" in output.err and "2 damaged" in output.out


def test_every_byte_that_matters_is_covered(tmp_path, source):
    """Flipping any byte is noticed, but for the padding between tensors and at the end of a file."""
    command("convert", source, tmp_path / "m")
    index = FtwIndex.load(tmp_path / "m")
    for name, offsets in (("experts-00000.ftw", (0, 4095, 20000)), ("dense-00000.ftw", (0, 1000, 30000))):
        for offset in offsets:
            flip_byte(index.path / name, offset)
            assert len(verify_checkpoint(index.path).problems) == 1, (name, offset)
            flip_byte(index.path / name, offset)
    assert not verify_checkpoint(index.path).problems


def test_verify_of_what_is_no_checkpoint(tmp_path, source, capsys):
    assert command("verify", tmp_path) == 1
    assert "is not an FTW checkpoint" in capsys.readouterr().err
    command("convert", source, tmp_path / "m")
    os.truncate(tmp_path / "m" / "dense-00000.ftw", 4096)
    assert command("verify", tmp_path / "m") == 1
    assert "dense-00000.ftw: truncated" in capsys.readouterr().err
