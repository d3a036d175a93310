"""A kernel that writes past the end of its tensor: what a sanitizer that works must report.

compute-sanitizer --tool memcheck --error-exitcode 9 python bench/gpu/past_the_end.py     (ends with 9)
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _past_the_end(numbers, length):
    tl.store(numbers + length + tl.arange(0, 32), 1.0)


numbers = torch.zeros(1024, device="cuda")
_past_the_end[(1,)](numbers, numbers.numel())
torch.cuda.synchronize()
