"""What the decoder refuses, and what it leaves alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from freetoken.errors import CheckpointError
from freetoken.execution.cpu_ops import CpuOps
from freetoken.execution.kv_geometry import KVGeometry
from freetoken.execution.reference_ops import ReferenceOps
from freetoken.models.decoder import Decoder, DecoderBatch
from freetoken.testing.tiny_checkpoints import load_tiny_checkpoint


def test_missing_and_misshapen_weights_are_named() -> None:
    tiny = load_tiny_checkpoint("llama")
    name = "model.layers.1.self_attn.k_proj.weight"
    with pytest.raises(CheckpointError, match=name):
        Decoder(tiny.spec, {key: value for key, value in tiny.dense.items() if key != name}, 64, ReferenceOps.prepare)
    with pytest.raises(CheckpointError, match=r"k_proj.*\(32, 63\)"):
        Decoder(tiny.spec, {**tiny.dense, name: tiny.dense[name][:, :63]}, 64, ReferenceOps.prepare)
    with pytest.raises(CheckpointError, match="float16"):
        Decoder(tiny.spec, {**tiny.dense, name: tiny.dense[name].half()}, 64, ReferenceOps.prepare)


def test_matrices_are_used_where_they_lie() -> None:
    tiny = load_tiny_checkpoint("llama_tied", "bfloat16")
    decoder = Decoder(tiny.spec, tiny.dense, 64, CpuOps.prepare)
    used = {layer.q.weight.ctypes.data for layer in decoder._layers}
    assert used == {tiny.dense[f"model.layers.{i}.self_attn.q_proj.weight"].data_ptr() for i in range(2)}
    assert decoder._lm_head.ctypes.data == tiny.dense["model.embed_tokens.weight"].data_ptr()


def test_no_sampling_rows_gives_no_logits_but_writes_kv() -> None:
    tiny = load_tiny_checkpoint("llama")
    spec = tiny.spec
    ops = ReferenceOps(KVGeometry(3, spec.num_layers, 4, spec.num_kv_heads, spec.head_dim, "f32"))
    batch = DecoderBatch(
        token_ids=np.array([7, 8, 9]),
        positions=np.arange(3, dtype=np.int32),
        slot_mapping=np.array([8, 9, -1]),
        row_starts=np.array([0, 3], dtype=np.int32),
        block_tables=np.array([[2]], dtype=np.int32),
        admit=np.zeros(3, dtype=np.uint8),
        logit_tokens=np.empty(0, dtype=np.int64),
    )
    weights = {name: tensor.clone() for name, tensor in tiny.dense.items()}
    logits = Decoder(spec, tiny.dense, 64, ops.prepare).forward(batch, ops)
    assert logits.shape == (0, spec.vocab_size)
    written = ops.kv.abs().amax(dim=(1, 2, 4, 5)) > 0
    assert written.tolist() == [[False] * 4, [False] * 4, [True, True, False, False]]
    assert all(torch.equal(tensor, weights[name]) for name, tensor in tiny.dense.items())
