"""Compile every kernel at the benchmark's shapes for several architectures, without a GPU, and print what each needs.

    python bench/gpu/compile.py [--arch 80 86 89 90 120] [--sass DIR] [--timed --jobs 8]

With ``--timed`` it compiles all variants that ``kernels.py`` times into Triton's cache (for a machine whose GPU should
not wait for compilers) and prints problems only.

Exit status 1 when a kernel needs more shared memory than the smallest supported card gives a block (99 KiB). Spills and
registers are printed; a kernel that spills much is worth a look.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

SHARED_LIMIT_BYTES = 99 * 1024
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class OfflineDriver:
    """Stands in for the CUDA driver as far as compiling needs one."""

    arch = 90

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0


class Recorder:
    """Turns launches into compilations and remembers the compiled kernels."""

    def __init__(self) -> None:
        self.kernels: list[Any] = []
        original = jit.JITFunction.run

        def compile_only(function: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> Any:
            kernel = original(function, *args, grid=grid, warmup=True, **keywords)
            self.kernels.append(kernel.result() if hasattr(kernel, "result") else kernel)
            return self.kernels[-1]

        jit.JITFunction.run = compile_only


def resources(kernel: Any) -> tuple[int, int]:
    """(registers, bytes of stack) of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert match is not None, text
    return int(match[1]), int(match[2])


def disassemble(kernel: Any) -> str:
    """SASS of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(TOOLS / "nvdisasm"), "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> int:
    """Compile, print, and say whether all fits."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 86, 89, 90, 120])
    parser.add_argument("--sass", type=Path, help="write the machine code of each kernel into this directory")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--timed", action="store_true", help="the variants that kernels.py times")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--part", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.jobs > 1 and options.part == 0:
        command = [sys.executable, *sys.argv]
        workers = [subprocess.Popen([*command, "--part", str(part + 1)]) for part in range(options.jobs)]
        return max(worker.wait() for worker in workers)
    offline = OfflineDriver()
    driver.set_active(offline)
    recorder = Recorder()
    from bench.gpu.selection import compile_cases, timed_cases

    too_large = 0
    for arch in options.arch:
        offline.arch = arch
        for index, case in enumerate(timed_cases() if options.timed else compile_cases()):
            if options.only not in case.name or (options.part and index % options.jobs != options.part - 1):
                continue
            recorder.kernels.clear()
            start = time.perf_counter()
            try:
                case.run()
            except Exception as error:
                print(f"sm_{arch} {case.name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                too_large += 1
                continue
            if options.timed:
                continue
            for kernel in recorder.kernels:
                registers, stack = resources(kernel)
                shared = kernel.metadata.shared
                over = shared > SHARED_LIMIT_BYTES
                too_large += over
                print(
                    f"sm_{arch} {case.name:60s} {kernel.metadata.name:24s} regs {registers:3d} stack {stack:4d} "
                    f"shared {shared:6d}{' TOO LARGE' if over else ''}  {time.perf_counter() - start:.1f} s",
                    flush=True,
                )
                if options.sass is not None:
                    options.sass.mkdir(parents=True, exist_ok=True)
                    name = re.sub(r"[^\w=]+", "_", f"sm_{arch} {case.name} {kernel.metadata.name}")
                    (options.sass / f"{name}.sass").write_text(disassemble(kernel))
    return 1 if too_large else 0


if __name__ == "__main__":
    raise SystemExit(main())
