"""What the kernels of this package compute, in plain torch, float32 or float64, on any device. Slow; for tests and
benches."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freetoken.quant.pack import unpack_expert
from freetoken.quant.q4_0_record import FORMAT as Q4_0
from freetoken.quant.q4_0_record import dequantize_blocks, dequantize_q4_0_expert, join_blocks
from freetoken.quant.record import RecordLayout


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, float32."""
    return torch.nn.functional.silu(gate.float()) * up.float()


def q4_0_matrix(nibbles: Tensor, scales: Tensor) -> Tensor:
    """Float32 [O, I] from planes."""
    blocks = join_blocks(nibbles.cpu().numpy(), scales.cpu().numpy())
    return torch.from_numpy(dequantize_blocks(blocks)).to(nibbles.device)


def expert_matrices(layout: RecordLayout, record: NDArray[np.uint8]) -> tuple[Tensor, Tensor, Tensor]:
    """Float32 gate [I, H], up [I, H] and down [H, I] of a record."""
    if layout.format == Q4_0:
        gate, up, down = dequantize_q4_0_expert(layout, record)
        return torch.from_numpy(gate), torch.from_numpy(up), torch.from_numpy(down)
    parts = unpack_expert(layout, record)
    if layout.format == "bf16":
        return tuple(torch.from_numpy(p.view(np.int16)).view(torch.bfloat16).float() for p in parts)  # type: ignore[return-value]
    return tuple(torch.from_numpy(np.ascontiguousarray(p)) for p in parts)  # type: ignore[return-value]


def expert_output(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """One expert on rows x [N, H], float32."""
    x = x.float()
    return silu_mul(x @ gate.T, x @ up.T) @ down.T


def choose_experts(
    logits: Tensor, k: int, scoring: str, renormalize: bool, scaling: float, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(ids int32, weights float32), as ``router.top_k``."""
    logits = torch.where(logits.isnan(), -3e38, logits).double()
    scores = torch.sigmoid(logits) if scoring == "sigmoid" else torch.softmax(logits, -1)
    choice = scores if scoring == "sigmoid" else logits
    if bias is not None:
        choice = choice + bias.double()
    # A stable descending sort keeps the lower id first among equals.
    ids = torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(-1, ids)
    if renormalize or scoring == "softmax_of_chosen":
        weights = weights / weights.sum(-1, keepdim=True)
    return ids.int(), (weights * scaling).float()


def rotate(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotary embedding of x [T, heads, D] float32, at positions >= 0."""
    half = cos.shape[1]
    c, s = cos[positions.long()][:, None, :], sin[positions.long()][:, None, :]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * c - second * s, second * c + first * s, rest], -1)


def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    scale: float,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """One row: q [T, QH, D] at positions [T] over keys and values [N, KVH, D]; [T, QH, D] in float32."""
    group = q.shape[1] // keys.shape[1]
    k = keys.float().repeat_interleave(group, 1)
    v = values.float().repeat_interleave(group, 1)
    scores = torch.einsum("thd,nhd->htn", q.float(), k) * scale
    index = torch.arange(keys.shape[0], device=q.device)
    allowed = index[None, :] <= positions[:, None]
    if window > 0:
        allowed &= index[None, :] > positions[:, None] - window
    scores = scores.masked_fill(~allowed[None], float("-inf"))
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(-1, q.shape[0], 1)
        weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    return torch.einsum("htn,nhd->thd", weights, v)


def kept_tokens(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Which tokens [V] may be drawn after top-k, top-p and min-p, by sorting (float64); ties with the last are kept."""
    scaled = logits.double() / temperature
    probabilities = torch.softmax(scaled, -1)
    order = torch.sort(probabilities, descending=True).values
    keep = torch.ones_like(probabilities, dtype=torch.bool)
    if 0 < top_k < len(order):
        keep &= probabilities >= order[top_k - 1]
    if top_p < 1:
        kept = torch.sort(torch.where(keep, probabilities, 0.0), descending=True).values
        running = torch.cumsum(kept, -1)
        last = int((running < top_p * kept.sum()).sum())
        keep &= probabilities >= kept[min(last, len(kept) - 1)]
    return keep & (probabilities >= min_p * probabilities.max())


def philox(seed: int, token: NDArray[np.int64], position: int) -> NDArray[np.uint32]:
    """First word of Philox-4x32-10 (Salmon et al. 2011) with counter (token, position low, position high, 0)."""
    mask = np.uint64(0xFFFFFFFF)
    counter = [
        token.astype(np.uint64),
        *(np.full(token.shape, v, np.uint64) for v in (position & 0xFFFFFFFF, position >> 32, 0)),
    ]
    key = [np.uint64(seed & 0xFFFFFFFF), np.uint64((seed >> 32) & 0xFFFFFFFF)]
    for _ in range(10):
        a = counter[0] * np.uint64(0xD2511F53)
        b = counter[2] * np.uint64(0xCD9E8D57)
        counter = [
            (b >> np.uint64(32)) ^ counter[1] ^ key[0],
            b & mask,
            (a >> np.uint64(32)) ^ counter[3] ^ key[1],
            a & mask,
        ]
        key = [(key[0] + np.uint64(0x9E3779B9)) & mask, (key[1] + np.uint64(0xBB67AE85)) & mask]
    return counter[0].astype(np.uint32)


def gumbel_scores(logits: Tensor, temperature: float, seed: int, position: int) -> Tensor:
    """logit / temperature + noise [V] in float64: the largest kept one is the draw."""
    words = philox(seed, np.arange(logits.shape[-1]), position)
    v = torch.from_numpy((words.astype(np.float64) + 0.5) / 2**32)
    return logits.double().cpu() / temperature - torch.log(-torch.log1p(-v))


def apply_token_masks(logits: Tensor, rows: Tensor, masks: Tensor) -> Tensor:
    """``logits`` [S, V] with -inf in row rows[c] wherever masks[c] (one bit a token) has a zero; a copy."""
    out = logits.clone()
    token = torch.arange(logits.shape[1], device=logits.device)
    for row, mask in zip(rows.tolist(), masks, strict=True):
        allowed = (mask[token // 32] >> (token % 32)) & 1
        out[row] = torch.where(allowed.bool(), out[row], float("-inf"))
    return out
