"""A Q4_0 matrix as PyTorch tensors: what the store's bytes are mapped to, on whichever device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freetoken.quant.q4_0_record import FORMAT


@dataclass(frozen=True)
class Q4_0Weight:
    """[O, I] as planes: ``nibbles`` uint8 [O, I / 2], ``scales`` float16 [O, I / 32], contiguous, as
    ``quant.q4_0_record.split_blocks`` makes them."""

    nibbles: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I)."""
        return self.nibbles.shape[0], self.nibbles.shape[1] * 2

    @property
    def format(self) -> str:
        """``"q4_0"``."""
        return FORMAT

    def dequantize(self) -> Tensor:
        """Float32 [O, I], exact."""
        outputs, inputs = self.shape
        q = self.nibbles.view(outputs, inputs // 32, 16)
        values = torch.cat([q & 15, q >> 4], dim=2).to(torch.float32) - 8.0
        return (values * self.scales.float()[:, :, None]).view(outputs, inputs)
