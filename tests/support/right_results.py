"""Computes correct outputs with random programs, dtypes, lengths and inputs.

The programs are plain torch: eager in the dtype, scaled_dot_product_attention, FlexAttention, tiles of keys in any
order by the online softmax, keys split and merged by their log-sum-exps, and sums over keys in random order.
"""

import random
from collections.abc import Callable

import torch
from torch.nn.attention.flex_attention import flex_attention

import fusion_attention as fa
from fusion_attention.judging.verdict import Judgement

Tensor = torch.Tensor
Program = Callable[[Tensor, Tensor, Tensor, Tensor, float, random.Random], Tensor]


def eager(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, rng: random.Random) -> Tensor:
    """Computes every step in the dtype, except for the exponentials of the softmax."""
    scores = (q @ k.mT * scale).masked_fill(~visible, float("-inf"))
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v


def torch_sdpa(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, rng: random.Random) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)


def flex(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, rng: random.Random) -> Tensor:
    def shown(score: Tensor, b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return torch.where(visible[row, key], score, float("-inf"))

    return flex_attention(q, k, v, score_mod=shown, scale=scale)


def tiled(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, rng: random.Random) -> Tensor:
    """Runs an online softmax over tiles of keys in random order, with weights in the dtype and sums in float32."""
    step = rng.choice([16, 64, 100])
    starts = list(range(0, k.shape[-2], step))
    rng.shuffle(starts)
    top = torch.full((*q.shape[:-1], 1), -1e30)
    total, out = torch.zeros_like(top), torch.zeros(*q.shape[:-1], v.shape[-1])
    for first in starts:
        here = slice(first, first + step)
        scores = (q.float() @ k[..., here, :].float().mT * scale).masked_fill(~visible[:, here], float("-inf"))
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights, decay = (scores - higher).exp(), (top - higher).exp()
        total = total * decay + weights.sum(-1, keepdim=True)
        out = out * decay + weights.to(q.dtype).float() @ v[..., here, :].float()
        top = higher
    return (out / total).to(q.dtype)


def split(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, rng: random.Random) -> Tensor:
    """Computes two parts of the keys and merges them by their log-sum-exps in float32."""
    at = rng.randint(1, k.shape[-2])
    parts = []
    for here in (slice(0, at), slice(at, None)):
        scores = (q.float() @ k[..., here, :].float().mT * scale).masked_fill(~visible[:, here], float("-inf"))
        top = torch.nn.functional.pad(scores, (0, 1), value=-1e30).amax(-1, keepdim=True)
        weights = (scores - top).exp()
        total = weights.sum(-1, keepdim=True)
        out = weights.to(q.dtype).float() @ v[..., here, :].float() / total.clamp(min=1e-30)
        parts.append((out, top + total.log()))
    (one, first), (two, second) = parts
    higher = torch.maximum(first, second)
    first, second = (first - higher).exp(), (second - higher).exp()
    return ((one * first + two * second) / (first + second)).to(q.dtype)


def reordered(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, rng: random.Random) -> Tensor:
    order = torch.randperm(k.shape[-2])
    return eager(q, k[..., order, :], v[..., order, :], visible[:, order], scale, rng)


PROGRAMS: dict[str, Program] = {f.__name__: f for f in (eager, torch_sdpa, flex, tiled, split, reordered)}


def right(seed: int) -> tuple[str, Judgement]:
    """Draws a call and a program; returns their description and the verdict on the output."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype = rng.choice([torch.float32, torch.float16, torch.bfloat16])
    heads, dim = rng.choice([1, 2, 5]), rng.choice([16, 32, 64, 128])
    rows, keys = (rng.choice([1, 7, rng.randint(2, 400), rng.randint(2, 900)]) for _ in range(2))
    scale = rng.choice([1.0, 1.0, 3.0]) * dim**-0.5
    q, k, v = (torch.randn(1, heads, n, dim, dtype=dtype) * rng.choice([1, 1, 4]) for n in (rows, keys, keys))
    q, k, v = (t.to(dtype) for t in (q, k, v))
    name = rng.choice([*PROGRAMS])
    causal = rng.random() < 0.5 and rows <= keys
    visible = torch.ones(rows, keys, dtype=torch.bool)
    visible = visible.tril(keys - rows) if causal else visible
    out = PROGRAMS[name](q, k, v, visible, scale, rng)
    band = {"band": fa.Band.causal("end")} if causal else {}
    result = fa.judge(
        "attention", {"q": q, "k": k, "v": v, "layout": "BNSD", "scale": scale, **band}, {"out": out}, backends=False
    )
    return f"{name}, {dtype}, {[*q.shape]}, {[*k.shape]}", result
