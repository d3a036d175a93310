"""Checkpoints: readers for safetensors and GGUF, the FTW format, conversion, and the actor that owns the store.

No torch. ``ftw.FtwIndex.load`` opens a converted checkpoint; ``convert.convert`` makes one.
"""
