"""Is there a GPU that this engine can use?"""

from __future__ import annotations

import importlib.util

import torch

from freetoken.errors import ConfigError

MIN_CAPABILITY = (8, 0)
_OTHERWISE = "; --device cpu runs the same engine on the processor"


def require_cuda(index: int = 0) -> torch.device:
    """The CUDA device to use. Raises ``ConfigError`` naming what is missing."""
    if torch.version.cuda is None:
        raise ConfigError(
            f"device=cuda needs a PyTorch built for CUDA, installed is {torch.__version__}; "
            "install one from https://download.pytorch.org/whl/" + _OTHERWISE
        )
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device=cuda, but PyTorch {torch.__version__} finds no usable GPU: is the NVIDIA driver installed and at "
            f"least as new as CUDA {torch.version.cuda} needs, and is the GPU visible (CUDA_VISIBLE_DEVICES)?"
            + _OTHERWISE
        )
    capability = torch.cuda.get_device_capability(index)
    if capability < MIN_CAPABILITY:
        raise ConfigError(
            f"the GPU {torch.cuda.get_device_name(index)} has compute capability "
            f"{capability[0]}.{capability[1]}; needed: {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} (Ampere) or later"
            + _OTHERWISE
        )
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("device=cuda needs the package triton (pip install 'freetoken-actors[cuda]')" + _OTHERWISE)
    return torch.device("cuda", index)
