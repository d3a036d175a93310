"""Compile every kernel that the CUDA device launches for a model shape, without a GPU, into Triton's cache.

    python bench/gpu/compile_program.py [--arch 90] [--jobs 8] [--dtype bf16] [--shape qwen3-30b-a3b]
    [--multiprocessors 132]

``--shape`` is a shape that can be made up, or one of the tiny models of the tests (needs `transformers`); ``--dtype
f32`` is what their oracle tests run. Shows that the layer program fits its kernels for an architecture, and saves a
machine whose GPU should not wait for compilers the time. Runs the program on CPU tensors with launches turned into
compilations; exit status 1 when one fails.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import torch
from triton.runtime import driver

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.gpu.compile import OfflineDriver, Recorder


def build_model(shape: str, dtype: str, multiprocessors: int, max_samples: int):  # type: ignore[no-untyped-def]
    """A DeviceModel with uninitialised weights, on CPU tensors: two layers of a made-up shape or a whole tiny model."""
    from freetoken._native import Mailbox, SharedSegment
    from freetoken.checkpoint.synthetic.shapes import shape_config
    from freetoken.execution.cuda.arena import CudaArena
    from freetoken.execution.cuda.data_plane import DataPlane, ExpertRecords
    from freetoken.execution.cuda.device_model import DeviceLimits, DeviceModel, StepBuffers
    from freetoken.execution.cuda.host_memory import MailboxWindow
    from freetoken.execution.cuda.staging import RecordSources, Stager
    from freetoken.execution.cuda.weights import DenseWeights
    from freetoken.execution.kv_geometry import KVGeometry
    from freetoken.kernels.triton.linear import Q4_0Weight
    from freetoken.models.registry import dense_tensor_names, parse_model_config
    from freetoken.quant.q4_0_record import plan_q4_0_layout
    from freetoken.quant.record import plan_record_layout
    from freetoken.testing.cuda_rig import HostCopier, HostDriver
    from freetoken.testing.tiny_checkpoints import load_tiny_checkpoint
    from freetoken.testing.tiny_models import TINY_MODELS

    if shape in TINY_MODELS:
        spec = load_tiny_checkpoint(shape).spec
    else:
        spec = parse_model_config(shape_config(shape, {"layers": 2}))
    compute_dtype = torch.float32 if dtype == "f32" else torch.bfloat16
    device = torch.device("cpu")
    weights: dict[str, torch.Tensor | Q4_0Weight] = {}
    for name, size in dense_tensor_names(spec).items():
        quantised = dtype == "q4_0" and len(size) == 2 and "mlp.gate." not in name
        if quantised:
            nibbles = torch.zeros((size[0], size[1] // 2), dtype=torch.uint8)
            weights[name] = Q4_0Weight(nibbles, torch.zeros((size[0], size[1] // 32), dtype=torch.float16))
        else:
            weights[name] = torch.zeros(size, dtype=compute_dtype)
    dense = DenseWeights.upload(spec, weights, 32768, compute_dtype, device)
    limits = DeviceLimits(4 * max_samples + 64, max_samples, 4096, 32768, 16)
    kv = KVGeometry(64, spec.num_layers, 16, spec.num_kv_heads, spec.head_dim, "f32" if dtype == "f32" else "bf16")
    layers = len(spec.moe_layers)
    buffers = StepBuffers(spec, limits, device)
    if not spec.is_moe:
        model = DeviceModel(dense, CudaArena(kv, 0, 0, 0, device), None, buffers, limits)
        model.num_multiprocessors = multiprocessors
        model.attach(None)
        return model
    layout = (
        plan_q4_0_layout(spec.hidden_size, spec.moe_intermediate_size)
        if dtype == "q4_0"
        else plan_record_layout(dtype, spec.hidden_size, spec.moe_intermediate_size)
    )
    arena = CudaArena(kv, 2, layout.stride_bytes, 16 * layout.stride_bytes, device)
    geometry = (128, spec.num_experts_per_tok, spec.hidden_size, layers, spec.num_experts, 128, False)
    segment = SharedSegment.create("compile", Mailbox.required_bytes(*geometry))
    mailbox = Mailbox.create(segment, 0, *geometry)
    window = MailboxWindow(HostDriver(), Mailbox.required_bytes(*geometry))
    # Addresses as they are on the machine: above 4 GiB, so 64-bit arguments.
    records = ExpertRecords(torch.ones((layers, spec.num_experts), dtype=torch.int64), (layout,) * layers)
    assert spec.router is not None
    plane = DataPlane(window, records, arena, spec.router, 20.0, buffers.report.counts, True)
    strides = (layout.stride_bytes,) * layers
    stager = Stager(HostCopier(), strides, spec.num_experts, arena.staging_address, arena.staging.numel(), device)
    nowhere = np.zeros((layers, spec.num_experts), np.int64)
    stager.reads(RecordSources(nowhere, nowhere.astype(np.int32)))
    model = DeviceModel(dense, arena, plane, buffers, limits, stager)
    model.num_multiprocessors = multiprocessors
    model.attach(mailbox)
    return model


def main() -> int:
    """Compile, and say what failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "q4_0", "f32"))
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--multiprocessors", type=int, default=132)
    parser.add_argument("--max-samples", type=int, default=32)
    parser.add_argument(
        "--cases",
        default="decode1,decode2,decode4,decode8,decode16,decode32,piece8,piece16,piece32,piece64,piece128,"
        "long128,long512,long1024",
    )
    parser.add_argument("--part", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.jobs > 1 and options.part == 0:
        workers = [
            subprocess.Popen([sys.executable, *sys.argv, "--part", str(part + 1)]) for part in range(options.jobs)
        ]
        return max(worker.wait() for worker in workers)
    offline = OfflineDriver()
    offline.arch = options.arch
    driver.set_active(offline)
    recorder = Recorder()
    torch.set_num_threads(1)
    from freetoken.execution.cuda.device_model import DecodeBatch
    from freetoken.execution.cuda.inputs import StepShape
    from freetoken.execution.cuda.staging import NothingMissing, StagedStep

    model = build_model(options.shape, options.dtype, options.multiprocessors, options.max_samples)
    failures = 0
    for index, case in enumerate(options.cases.split(",")):
        if options.part and index % options.jobs != options.part - 1:
            continue
        started = time.perf_counter()
        recorder.kernels.clear()
        size = int("".join(filter(str.isdigit, case)))
        try:
            if case.startswith("decode"):
                batch = DecodeBatch(model, size)
                batch.run()
                for greedy in (True, False):
                    model.sampler.run(batch.logits, batch.inputs, greedy, model.report, model.table)
                model.masks.warm_up(batch.logits)
            else:
                shape = StepShape(size, 1, 1)
                views = model.inputs.host_views(shape)
                for view in views.values():
                    view[...] = np.zeros((), view.dtype)
                model.inputs.upload(shape)
                inputs = model.inputs.device_views(shape)
                if case.startswith("long"):
                    model.allocate_long_piece()
                    ways: list[StagedStep | None] = [None]
                    if model.stager is not None:
                        missing = NothingMissing(len(model.weights.spec.moe_layers), model.weights.spec.num_experts)
                        ways.append(StagedStep(model.stager, missing, 0))
                    for staged in ways:
                        model.long_piece.run(inputs, 0, 0, (0, 1), 1, size, staged)
                else:
                    for context in (1, 1 << 20):
                        model.piece(size).run(inputs, 0, 0, (0, 1), context)
                model.program.logits(model.sampled_rows[:1], model.normed_rows[:1], model.logits[:1])
        except Exception:
            traceback.print_exc()
            failures += 1
        names = sorted({kernel.metadata.name for kernel in recorder.kernels})
        print(f"{case}: {time.perf_counter() - started:.1f} s, {len(names)} kernels: {' '.join(names)}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
