"""Kernels: one interface, the float32 truth in PyTorch, and the C++ implementation. See ``interface.py``."""

from freetoken.kernels.dispatch import load_kernels
from freetoken.kernels.interface import ExpertBank, Kernels, PagedKv

__all__ = ["ExpertBank", "Kernels", "PagedKv", "load_kernels"]
