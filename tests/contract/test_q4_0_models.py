"""Q4_0 models from GGUF to logits: equal to `transformers` in float32 on the dequantised weights.

The weights themselves are exact: the reference operations agree with the oracle within 1e-4. The CPU device rounds
activations to 8 bits before every quantised product, which moves logits with a standard deviation of about 1 by 0.014
on average and by up to 0.11 at worst; a token whose router is near a tie may take another expert.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from freetoken import _native
from freetoken.execution.arena import Arena
from freetoken.execution.cpu_ops import CpuOps
from freetoken.execution.experts import ExpertRunner, NoExperts, StoreExperts
from freetoken.execution.kv_geometry import KVGeometry
from freetoken.execution.reference_ops import ExpertMatrices, ReferenceOps
from freetoken.kernels.q4_0_weight import Q4_0Weight
from freetoken.messages import ExpertCounters
from freetoken.models.decoder import Decoder, DecoderOps
from freetoken.testing.expert_group import ExpertGroup
from freetoken.testing.paged_sequences import PagedRunner, PagedSequence
from freetoken.testing.q4_0_models import CONFIGS, Q4_0Model, load_q4_0_model
from freetoken.testing.tiny_models import VOCAB_SIZE

BLOCK_SIZE, NUM_BLOCKS = 8, 96
EXACT_TOLERANCE = 1e-4
TOLERANCE, MEAN_TOLERANCE = 0.15, 0.03
LENGTHS = (61, 1, 17, 8)


@pytest.fixture(scope="module")
def pool() -> Iterator[_native.WorkerPool]:
    pool = _native.WorkerPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Q4_0Model]:
    directory: Path = tmp_path_factory.mktemp("q4_0")
    return {name: load_q4_0_model(name, directory / name) for name in CONFIGS}


def prompt(length: int) -> list[int]:
    generator = random.Random(length)
    return [generator.randrange(5, VOCAB_SIZE) for _ in range(length)]


def geometry(model: Q4_0Model) -> KVGeometry:
    spec = model.spec
    return KVGeometry(NUM_BLOCKS, spec.num_layers, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim, "f32")


def paged(model: Q4_0Model, ops: DecoderOps) -> PagedRunner:
    return PagedRunner(Decoder(model.spec, model.dense, 512, ops.prepare), ops, BLOCK_SIZE, NUM_BLOCKS)


def cpu_ops(model: Q4_0Model, pool: _native.WorkerPool, deterministic: bool = False) -> CpuOps:
    """Experts straight from the store."""
    experts: ExpertRunner = NoExperts()
    if model.spec.is_moe:
        experts = StoreExperts(pool, model.store.build_expert_store(model.index), deterministic)
    return CpuOps(pool, Arena(geometry(model), 0, 0), experts, deterministic)


def in_chunks(run: PagedRunner, tokens: list[int], chunk: int) -> Tensor:
    """All logits of one sequence, computed alone."""
    sequence = PagedSequence(tokens)
    parts = []
    while sequence.num_computed < len(tokens):
        parts += run.run([(sequence, min(chunk, len(tokens) - sequence.num_computed))])
    run.release(sequence)
    return torch.cat(parts)


def every_way(run: PagedRunner) -> list[list[Tensor]]:
    """Logits of the prompts in several chunk sizes, and all in one batch."""
    prompts = [prompt(length) for length in LENGTHS]
    results = [[in_chunks(run, tokens, chunk) for tokens in prompts] for chunk in (96, 7, 1)]
    sequences = [PagedSequence(tokens) for tokens in prompts]
    results.append(run.run([(sequence, len(sequence.tokens)) for sequence in sequences]))
    for sequence in sequences:
        run.release(sequence)
    return results


def assert_close(logits: list[Tensor], model: Q4_0Model) -> None:
    """Within the tolerance but for the tokens of other experts, and the same greedy token where the margin allows."""
    ours = torch.cat(logits)
    expected = torch.cat([model.oracle_logits(prompt(length)) for length in LENGTHS])
    usual = (ours - expected).abs().amax(dim=-1) < TOLERANCE
    assert usual.float().mean() > (0.95 if model.spec.is_moe else 0.999)
    assert float((ours - expected).abs().mean()) < MEAN_TOLERANCE
    best = expected.topk(2, dim=-1).values
    clear = usual & (best[:, 0] - best[:, 1] > 2 * TOLERANCE)
    assert clear.float().mean() > 0.2
    assert torch.equal(ours.argmax(-1)[clear], expected.argmax(-1)[clear])


@pytest.mark.parametrize("name", CONFIGS)
def test_the_weights_are_exact(name: str, models: dict[str, Q4_0Model]) -> None:
    model = models[name]
    quantised = {n for n, weight in model.dense.items() if isinstance(weight, Q4_0Weight)}
    assert quantised == {
        n for n, t in model.index.tensors.items() if len(t.shape) == 2 and not n.endswith("mlp.gate.weight")
    }
    experts: dict[int, ExpertMatrices] = {}
    for layer in range(len(model.spec.moe_layers)):
        matrices = [model.index.read_expert(layer, e) for e in range(model.spec.num_experts)]
        gate, up, down = (torch.from_numpy(np.stack(part)) for part in zip(*matrices, strict=True))
        experts[layer] = (gate, up, down)
    run = paged(model, ReferenceOps(geometry(model), experts))
    tokens = prompt(61)
    assert float((in_chunks(run, tokens, 61) - model.oracle_logits(tokens)).abs().max()) < EXACT_TOLERANCE


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_logits(name: str, deterministic: bool, models: dict[str, Q4_0Model], pool: _native.WorkerPool) -> None:
    results = every_way(paged(models[name], cpu_ops(models[name], pool, deterministic)))
    for logits in results:
        assert_close(logits, models[name])
    if deterministic:
        for logits in results[1:]:
            assert all(torch.equal(ours, first) for ours, first in zip(logits, results[0], strict=True))


@pytest.mark.parametrize(
    ("slots", "fetch_fraction", "kinds"),
    [(32, 1.0, {"hits"}), (12, 0.5, {"hits", "fetches", "cpu"}), (0, 0.5, {"fetches", "cpu"}), (16, 0.0, {"cpu"})],
    ids=["resident", "mix", "no slots", "all on the CPU"],
)
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_wherever_experts_run(
    slots: int,
    fetch_fraction: float,
    kinds: set[str],
    deterministic: bool,
    models: dict[str, Q4_0Model],
    pool: _native.WorkerPool,
) -> None:
    model = models["qwen3_moe"]
    (layout,) = model.index.layouts
    arena = Arena(geometry(model), slots, layout.stride_bytes)
    with ExitStack() as stack:
        group = ExpertGroup(
            model.spec,
            model.store.build_expert_store(model.index),
            layout,
            arena,
            pool,
            fetch_fraction=fetch_fraction,
            max_tokens=96,
            deterministic=deterministic,
            split_records=True,
        )
        stack.enter_context(group)
        group.experts.begin_step(1)
        results = every_way(paged(model, CpuOps(pool, arena, group.experts, deterministic)))
        counters = group.experts.step_counters()
    for logits in results:
        assert_close(logits, model)
    if deterministic:
        direct = every_way(paged(model, cpu_ops(model, pool, deterministic=True)))
        for logits in results:
            assert all(torch.equal(ours, first) for ours, first in zip(logits, direct[0], strict=True))
    assert_kinds(counters, kinds)


def assert_kinds(counters: ExpertCounters, kinds: set[str]) -> None:
    """These and no others, but for the fetches that fill slots."""
    seen = {kind for kind in ("hits", "fetches", "cpu") if getattr(counters, kind) > 0}
    assert seen - {"fetches"} == kinds - {"fetches"} and kinds <= seen


def test_deterministic_bits_do_not_depend_on_threads(models: dict[str, Q4_0Model]) -> None:
    results = []
    for threads in (1, 2, 3):
        pool = _native.WorkerPool(threads)
        results.append(in_chunks(paged(models["qwen3_moe"], cpu_ops(models["qwen3_moe"], pool, True)), prompt(61), 40))
        pool.close()
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_greedy_continuation(models: dict[str, Q4_0Model], pool: _native.WorkerPool) -> None:
    """Token by token, as long as the oracle's margin is clear."""
    model = models["llama"]
    run = paged(model, cpu_ops(model, pool))
    for length in (30, 5, 12):
        sequence = PagedSequence(prompt(length))
        for _ in range(12):
            (logits,) = run.run([(sequence, len(sequence.tokens) - sequence.num_computed)])
            expected = model.oracle_logits(sequence.tokens)[-1]
            first, second = expected.topk(2).values.tolist()
            chosen = int(logits[-1].argmax())
            assert chosen == int(expected.argmax()) or first - second < 2 * TOLERANCE
            sequence.tokens.append(chosen)
        run.release(sequence)
