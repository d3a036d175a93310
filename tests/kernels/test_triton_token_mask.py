"""Masks of constrained rows on the device against the reference."""

import pytest
import torch

from freetoken.kernels.triton import reference
from freetoken.kernels.triton.token_mask import apply_token_masks
from tests.kernels.triton_device import DEVICE


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 512, 4100, 8192])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_masked_rows_lose_forbidden_tokens_and_others_nothing(vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(5, vocab, generator=generator).to(dtype)
    words = -(-vocab // 32)
    masks = torch.randint(-(2**31), 2**31, (3, words), generator=generator, dtype=torch.int64).to(torch.int32)
    masks[1] = -1
    rows = torch.tensor([4, 0, 2], dtype=torch.int32)
    expected = reference.apply_token_masks(logits, rows, masks)
    actual = logits.to(DEVICE)
    apply_token_masks(actual, rows.to(DEVICE), masks.to(DEVICE))
    assert torch.equal(actual.cpu(), expected)
    assert torch.equal(actual[[0, 1, 3]].cpu(), logits[[0, 1, 3]])
    assert bool((expected[4] == float("-inf")).any()) or vocab == 1


def test_wrong_shapes_are_refused_and_no_rows_are_nothing() -> None:
    logits = torch.zeros(2, 40, device=DEVICE)
    rows = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=r"needed are \[1, 2\]"):
        apply_token_masks(logits, rows, torch.zeros(1, 1, dtype=torch.int32, device=DEVICE))
    apply_token_masks(logits, rows[:0], torch.zeros(0, 2, dtype=torch.int32, device=DEVICE))
    assert not logits.any()
