"""Training attention beside torch's scaled_dot_product_attention: padded, causal, grouped, packed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import fusion_attention as fa
from benchmarks.pair import Pair

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _flops(q: torch.Tensor, k: torch.Tensor, causal: bool, backward: bool) -> int:
    """Multiply-adds counted twice over visible pairs: two matmuls forward, five backward."""
    batch, heads, rows, dim = q.shape
    pairs = rows * (rows + 1) // 2 if causal else rows * k.shape[2]
    return 2 * batch * heads * pairs * dim * (5 if backward else 2)


def padded(name: str, dtype: torch.dtype, heads: tuple[int, int], size: int, dim: int, causal: bool) -> Iterator[Pair]:
    """Forward and backward of one padded call, [1, heads, size, dim]."""
    torch.manual_seed(0)
    q = torch.randn(1, heads[0], size, dim, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(1, heads[1], size, dim, dtype=dtype, requires_grad=True) for _ in range(2))
    band = fa.Band.causal() if causal else fa.Band.full()

    def ours() -> torch.Tensor:
        return fa.attention(q, k, v, layout="BNSD", band=band)

    def peer() -> torch.Tensor:
        return sdpa(q, k, v, is_causal=causal, enable_gqa=heads[0] != heads[1])

    with torch.no_grad():
        yield Pair(f"{name} forward", ours, peer, _flops(q, k, causal, False))
    mine, theirs = ours(), peer()
    dout = torch.randn_like(mine)

    def gradient(out: torch.Tensor) -> object:
        return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    yield Pair(f"{name} backward", lambda: gradient(mine), lambda: gradient(theirs), _flops(q, k, causal, True))


def packed(dtype: torch.dtype, heads: int, dim: int, lengths: list[int]) -> Iterator[Pair]:
    """Sequences of different lengths: packed here, padded with a key mask there."""
    torch.manual_seed(0)
    total, longest = sum(lengths), max(lengths)
    q, k, v = (torch.randn(total, heads, dim, dtype=dtype) for _ in range(3))
    wide = torch.zeros(3, len(lengths), heads, longest, dim, dtype=dtype)
    for b, rows in enumerate(torch.stack((q, k, v)).split(lengths, dim=1)):
        wide[:, b, :, : lengths[b]] = rows.transpose(1, 2)
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None])[:, None, None]
    flops = sum(4 * heads * n * n * dim for n in lengths)
    with torch.no_grad():
        yield Pair(
            f"packed {len(lengths)} sequences, {total} of {len(lengths) * longest} tokens",
            lambda: fa.attention(q, k, v, layout="TND", q_len=lengths),
            lambda: sdpa(*wide, attn_mask=mask),
            flops,
        )


def pairs(quick: bool) -> Iterator[Pair]:
    """All rows; quick: small sizes, for a look."""
    size = 512 if quick else 2048
    for label, dtype in DTYPES.items():
        for causal in (False, True):
            yield from padded(f"{label} D128 S{size} {'causal' if causal else 'full'}", dtype, (8, 8), size, 128, causal)
    yield from padded(f"bf16 D128 S{size} 32/8 heads", torch.bfloat16, (32, 8), size // 2, 128, False)
    yield from packed(torch.float32, 12, 32, [8 + 13 * i % 120 for i in range(64 if quick else 200)])
