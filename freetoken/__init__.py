"""FreeToken: an edge-native serving engine for Mixture-of-Experts language models."""

import os

__version__ = "0.1.0"

# Read by CUDA when a process begins to use it: the order of nvidia-smi, so that both mean the same card by a number.
os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
