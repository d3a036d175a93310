"""Settings that must be made before anything is imported."""

import os
from pathlib import Path

# Triton decides at its first import (which transformers and others trigger) whether kernels run in its interpreter.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")
