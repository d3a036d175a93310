"""The CUDA device's kernels compile where the interpreter is more lenient than the compiler. Needs no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_the_program_of_a_model_with_odd_sizes_compiles(dtype):
    # 40 intermediate columns: no multiple of the 16 that a tensor core's step has.
    command = [
        sys.executable, "bench/gpu/compile_program.py", "--shape", "qwen3_moe", "--dtype", dtype, "--max-samples", "2",
        "--cases", "decode1,piece32,long256",
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert all(f"{case}:" in done.stdout for case in ("decode1", "piece32", "long256"))
