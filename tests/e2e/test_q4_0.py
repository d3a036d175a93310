"""A Q4_0 model behind the HTTP front: its experts run from slots, from the store, and on CpuExecutor."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from freetoken import _native
from freetoken.cli.process import EngineProcess
from freetoken.execution.arena import Arena
from freetoken.execution.cpu_ops import CpuOps
from freetoken.execution.experts import StoreExperts
from freetoken.execution.kv_geometry import KVGeometry
from freetoken.models.decoder import Decoder
from freetoken.testing.paged_sequences import PagedRunner, PagedSequence
from freetoken.testing.q4_0_models import load_q4_0_model
from tests.e2e.conftest import TINY_SETTINGS, complete, get

pytestmark = pytest.mark.e2e

NUM_TOKENS = 20
PROMPTS = [[(7 * i + 3 * j) % 500 + 5 for j in range(length)] for i, length in enumerate((1, 17, 70))]


def greedy(directory: Path) -> list[list[int]]:
    """The continuations that the CPU device computes without an engine, with the engine's bfloat16 KV."""
    model = load_q4_0_model("qwen3_moe", directory)
    spec = model.spec
    kv = KVGeometry(64, spec.num_layers, 16, spec.num_kv_heads, spec.head_dim, "bf16")
    pool = _native.WorkerPool(1)
    experts = StoreExperts(pool, model.store.build_expert_store(model.index), deterministic=True)
    ops = CpuOps(pool, Arena(kv, 0, 0), experts, deterministic=True)
    run = PagedRunner(Decoder(spec, model.dense, 1024, ops.prepare), ops, 16, 64)
    continuations = []
    for prompt in PROMPTS:
        sequence = PagedSequence(list(prompt))
        for _ in range(NUM_TOKENS):
            (logits,) = run.run([(sequence, len(sequence.tokens) - sequence.num_computed)])
            sequence.tokens.append(int(logits[-1].argmax()))
        run.release(sequence)
        continuations.append(sequence.tokens[len(prompt) :])
    pool.close()
    return continuations


def test_the_engine_gives_the_tokens_of_the_kernels(tmp_path: Path) -> None:
    expected = greedy(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "ftw" / "tokenizer.json"))
    settings = (*TINY_SETTINGS, "--runtime", "local", "--set", "deterministic=true")
    # A few slots for 32 records.
    with EngineProcess(str(tmp_path / "ftw"), *settings, "--set", "vram=4.37MiB") as engine:
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            answer = complete(engine.url, prompt, NUM_TOKENS)
            assert answer["choices"][0]["text"] == tokenizer.decode(tokens)
        status = get(engine.url, "/v1/cache/status")
    assert status["plan"]["kv_dtype"] == "bf16" and 0 < status["experts"]["slots"] < 32
    assert min(status["experts"][kind] for kind in ("hits_total", "fetches_total", "cpu_total")) > 0
