"""Placement, atomicity, resuming, and refusals of the operating system."""

import dataclasses
import errno
import json
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.checkpoint import ftw_writer
from freetoken.checkpoint.convert import ConvertOptions, convert_source
from freetoken.checkpoint.ftw import FtwIndex
from freetoken.checkpoint.ftw_writer import FtwWriter, plan_index
from freetoken.checkpoint.source import ArraySource
from freetoken.checkpoint.verify import verify_checkpoint
from freetoken.errors import CheckpointError
from freetoken.models.registry import dense_tensor_names, parse_model_config
from freetoken.quant.record import DTYPE_BYTES
from freetoken.testing.checkpoint_files import CONFIGS, flip_byte, tiny_arrays

CONFIG = CONFIGS["mixtral"]
OPTIONS = ConvertOptions(max_file_bytes=65536, tile_columns=16)
ALL_READS = 17 + 24  # dense tensors, and three matrices of each expert


class Interrupted(Exception):
    pass


class CountingSource(ArraySource):
    """Fails at read number ``fail_at``; counts what was read."""

    def __init__(self, fail_at=None, seed=0, fingerprint="memory"):
        super().__init__(CONFIG, tiny_arrays(CONFIG, seed), fingerprint)
        self.fail_at = fail_at
        self.reads = 0

    def read(self, name, start=0, stop=None):
        if self.reads == self.fail_at:
            raise Interrupted
        self.reads += 1
        return super().read(name, start, stop)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    directory = tmp_path_factory.mktemp("reference") / "model"
    convert_source(CountingSource(), directory, OPTIONS)
    return {p.name: p.read_bytes() for p in directory.iterdir()}


def content(directory):
    return {p.name: p.read_bytes() for p in directory.iterdir()}


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(CONFIGS)),
    max_file_bytes=st.one_of(st.none(), st.integers(3, 60).map(lambda n: n * 4096 + 17)),
    seed=st.integers(0, 10),
)
def test_placement_is_sound(name, max_file_bytes, seed):
    rng = np.random.default_rng(seed)
    config = CONFIGS[name]
    spec = parse_model_config(config)
    dense = {n: str(rng.choice(["f32", "bf16"])) for n in dense_tensor_names(spec)}
    layers = [str(rng.choice(["f32", "bf16"])) for _ in spec.moe_layers]
    try:
        plan = plan_index(config, dense, layers, max_file_bytes=max_file_bytes)
    except CheckpointError as error:
        assert max_file_bytes is not None and "a data file holds at most" in str(error)
        return
    plan._validate_tensors()
    plan._validate_layouts()
    plan._validate_placement()
    assert plan.dense_bytes == sum(np.prod(s) * DTYPE_BYTES[dense[n]] for n, s in dense_tensor_names(spec).items())
    assert all(f.size_bytes <= (max_file_bytes or 8 * 2**30) for f in plan.files)
    assert plan.store_bytes >= plan.dense_bytes + plan.expert_bytes
    used = {t.file_index for t in plan.tensors.values()} | set(plan.record_file.ravel().tolist())
    assert used == set(range(len(plan.files)))


def test_a_tensor_larger_than_a_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"tensor 'model.embed_tokens.weight' has 12288 bytes.*at most 8192"):
        convert_source(CountingSource(), tmp_path / "m", dataclasses.replace(OPTIONS, max_file_bytes=8192))


def test_nothing_but_the_checkpoint_is_left(tmp_path, reference):
    convert_source(CountingSource(), tmp_path / "m", OPTIONS)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    assert content(tmp_path / "m") == reference
    assert {"ftw.json", "config.json", "dense-00000.ftw", "experts-00000.ftw"} <= set(reference)


@pytest.mark.parametrize("fail_at", [0, 1, 10, 16, 17, 18, 19, 30, 40])
def test_an_interrupted_conversion_goes_on_where_it_was(tmp_path, reference, fail_at):
    with pytest.raises(Interrupted):
        convert_source(CountingSource(fail_at), tmp_path / "m", OPTIONS)
    assert not (tmp_path / "m").exists() and (tmp_path / ".m.partial").exists()
    second = CountingSource()
    progress = []
    convert_source(second, tmp_path / "m", OPTIONS, lambda done, total, what: progress.append((done, total)))
    assert content(tmp_path / "m") == reference
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    # A record of which only some matrices were read is read again as a whole; everything else is read once.
    assert ALL_READS <= fail_at + second.reads <= ALL_READS + 2
    assert progress[-1][0] == progress[-1][1] and [d for d, _ in progress] == sorted(d for d, _ in progress)


def test_a_damaged_part_is_done_again(tmp_path, reference):
    with pytest.raises(Interrupted):
        convert_source(CountingSource(40), tmp_path / "m", OPTIONS)
    flip_byte(tmp_path / ".m.partial" / "dense-00000.ftw", 100)
    flip_byte(tmp_path / ".m.partial" / "experts-00000.ftw", 9000)
    convert_source(CountingSource(), tmp_path / "m", OPTIONS)
    assert content(tmp_path / "m") == reference


def test_a_lost_data_file_and_a_torn_journal_are_done_again(tmp_path, reference):
    with pytest.raises(Interrupted):
        convert_source(CountingSource(40), tmp_path / "m", OPTIONS)
    (tmp_path / ".m.partial" / "dense-00000.ftw").unlink()
    journal = tmp_path / ".m.partial" / "progress.jsonl"
    journal.write_bytes(journal.read_bytes()[:-9])
    convert_source(CountingSource(), tmp_path / "m", OPTIONS)
    assert content(tmp_path / "m") == reference


@pytest.mark.parametrize("damage", [b"", b"garbage\n", b'{"identity": "someone else"}\n', b"\xff\xfe\n"])
def test_a_foreign_journal_starts_afresh(tmp_path, reference, damage):
    with pytest.raises(Interrupted):
        convert_source(CountingSource(40), tmp_path / "m", OPTIONS)
    (tmp_path / ".m.partial" / "progress.jsonl").write_bytes(damage)
    (tmp_path / ".m.partial" / "stray").write_text("x")
    second = CountingSource()
    convert_source(second, tmp_path / "m", OPTIONS)
    assert content(tmp_path / "m") == reference and second.reads >= ALL_READS


def test_a_journal_of_impossible_parts_is_harmless(tmp_path, reference):
    with pytest.raises(Interrupted):
        convert_source(CountingSource(10), tmp_path / "m", OPTIONS)
    with (tmp_path / ".m.partial" / "progress.jsonl").open("a") as journal:
        for entry in ({"tensor": "nobody", "crc32c": 1}, {"record": [7, 7], "crc32c": 1}, {"record": 5, "crc32c": 1}):
            journal.write(json.dumps(entry) + "\n")
    convert_source(CountingSource(), tmp_path / "m", OPTIONS)
    assert content(tmp_path / "m") == reference


@pytest.mark.parametrize(
    "source,options",
    [
        (CountingSource(fingerprint="changed"), OPTIONS),
        (CountingSource(), dataclasses.replace(OPTIONS, dtype="bf16")),
        (CountingSource(), dataclasses.replace(OPTIONS, tile_columns=8)),
        (CountingSource(), dataclasses.replace(OPTIONS, max_file_bytes=131072)),
    ],
)
def test_another_source_or_option_starts_afresh(tmp_path, source, options):
    with pytest.raises(Interrupted):
        convert_source(CountingSource(40, seed=9), tmp_path / "m", OPTIONS)
    source.reads = 0
    index = convert_source(source, tmp_path / "m", options)
    assert source.reads >= ALL_READS
    assert not verify_checkpoint(index.path).problems


def test_disk_full_is_clear_and_resumable(tmp_path, reference, monkeypatch):
    real, budget = os.pwrite, [150_000]

    def small_disk(fd, data, offset):
        budget[0] -= len(data)
        if budget[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data[: max(1, len(data) // 2)], offset)  # short writes are allowed, too

    monkeypatch.setattr(ftw_writer.os, "pwrite", small_disk)
    with pytest.raises(CheckpointError, match=r"cannot write .* to .*\.ftw: No space left.*Free some space and run"):
        convert_source(CountingSource(), tmp_path / "m", OPTIONS)
    monkeypatch.setattr(ftw_writer.os, "pwrite", real)
    second = CountingSource()
    convert_source(second, tmp_path / "m", OPTIONS)
    assert second.reads < 40
    assert content(tmp_path / "m") == reference


def test_an_io_error_while_finishing_is_resumable(tmp_path, reference, monkeypatch):
    def broken(fd):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(ftw_writer.os, "fsync", broken)
        with pytest.raises(CheckpointError, match="cannot finish: Input/output error"):
            convert_source(CountingSource(), tmp_path / "m", OPTIONS)
    second = CountingSource()
    convert_source(second, tmp_path / "m", OPTIONS)
    assert second.reads == 0 and content(tmp_path / "m") == reference


def test_too_little_space_is_said_before_writing(tmp_path, monkeypatch):
    usage = type("usage", (), {"free": 1000})()
    monkeypatch.setattr(ftw_writer.shutil, "disk_usage", lambda path: usage)
    source = CountingSource()
    with pytest.raises(CheckpointError, match=r"conversion needs .* KiB more on this file system, 1000 B are free"):
        convert_source(source, tmp_path / "m", OPTIONS)
    assert source.reads == 0


def test_existing_destinations(tmp_path, reference):
    source = CountingSource()
    destination = tmp_path / "m"
    destination.mkdir()
    convert_source(source, destination, OPTIONS)  # an empty directory may be used
    with pytest.raises(CheckpointError, match="exists; use --overwrite"):
        convert_source(source, destination, OPTIONS)
    other = CountingSource(seed=5)
    replaced = convert_source(other, destination, dataclasses.replace(OPTIONS, overwrite=True))
    assert FtwIndex.load(destination).fingerprint == replaced.fingerprint
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("x")
    with pytest.raises(CheckpointError, match="holds other files than a checkpoint"):
        convert_source(source, tmp_path / "precious", dataclasses.replace(OPTIONS, overwrite=True))
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is not a directory"):
        convert_source(source, tmp_path / "file", OPTIONS)


def test_two_conversions_do_not_mix(tmp_path):
    plan = plan_index(
        CONFIG, dict.fromkeys(dense_tensor_names(parse_model_config(CONFIG)), "f32"), ["f32"] * 2, max_file_bytes=65536
    )
    first, second = FtwWriter(tmp_path / "m", plan, "a"), FtwWriter(tmp_path / "m", plan, "a")
    with first, pytest.raises(CheckpointError, match="another process is converting into it"):
        second.__enter__()
    with FtwWriter(tmp_path / "m", plan, "a"):
        pass


def test_missing_and_oversized_parts_are_refused(tmp_path):
    names = dense_tensor_names(parse_model_config(CONFIG))
    plan = plan_index(CONFIG, dict.fromkeys(names, "f32"), ["f32"] * 2, max_file_bytes=65536)
    with FtwWriter(tmp_path / "m", plan, "a") as writer:
        with pytest.raises(CheckpointError, match=r"tensor 'model.norm.weight' has 64 of 128 bytes"):
            writer.write_tensor("model.norm.weight", [np.zeros(16, np.float32)])
        with pytest.raises(CheckpointError, match="has more than its 128 bytes"):
            writer.write_tensor("model.norm.weight", [np.zeros(16, np.float32)] * 3)
        with pytest.raises(CheckpointError, match="not its layout's stride"):
            writer.write_record(0, 0, np.zeros(4096, np.uint8))
        with pytest.raises(CheckpointError, match=r"tensor 'model.embed_tokens.weight' was not written"):
            writer.finish({})
        for name, shape in names.items():
            writer.write_tensor(name, [np.zeros(shape, np.float32)])
        with pytest.raises(CheckpointError, match="record of expert layer 0 expert 0 is missing"):
            writer.finish({})
    assert not (tmp_path / "m").exists()
