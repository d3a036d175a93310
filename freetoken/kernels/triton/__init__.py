"""Kernels for the CUDA device, in Triton. Nothing here is imported unless that device is used.

``docs/gpu-kernels.md`` has the contracts; ``reference.py`` has the arithmetic in plain torch. Set
``TRITON_INTERPRET=1`` before the first import to run them on the CPU, with float32 or float16 data (the interpreter is
wrong on bfloat16).
"""
