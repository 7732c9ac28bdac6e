"""Computes correct gradients with random programs, dtypes, lengths and inputs.

The programs are plain torch: autograd of eager attention in the dtype, backwards of scaled_dot_product_attention and
FlexAttention, and backwards as kernels write them: tile by tile from the log-sum-exp, delta from the stored output or
from probabilities, keys split, rows in random order, sums over a group in the dtype or in float32.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

import fusion_attention as fa
from fusion_attention.judging import judge
from fusion_attention.judging.calls import recorded
from fusion_attention.judging.verdict import Judgement

Tensor = torch.Tensor
Grads = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Call:
    """Attention of one sequence [heads, rows, dim], and the gradient of its output.

    Attributes:
        visible: bool [rows, keys]. bias: [heads, rows, keys] in the dtype, or None. keep: bool [heads, rows, keys].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    visible: Tensor
    scale: float
    bias: Tensor | None = None
    keep: Tensor | None = None
    keep_prob: float = 1.0
    softcap: float = 0.0

    @property
    def group(self) -> int:
        return len(self.q) // len(self.k)

    @property
    def dtype(self) -> torch.dtype:
        return self.q.dtype

    def leaves(self) -> list[Tensor]:
        given = (self.q, self.k, self.v, self.bias)
        return [t.detach().clone().requires_grad_() for t in given if t is not None]

    def named(self, grads: tuple[Tensor, ...]) -> Grads:
        return dict(zip(("dq", "dk", "dv", "dpse"), grads, strict=False))

    def per_head(self, t: Tensor) -> Tensor:
        """Repeats key heads for each query head."""
        return t.repeat_interleave(self.group, 0)


Program = Callable[[Call, random.Random], Grads]


def attended(c: Call, leaves: list[Tensor], softmax_in: torch.dtype | None) -> Tensor:
    """Computes eager attention with every step in the dtype of the tensors, except for the softmax."""
    q, k, v, *bias = leaves
    scores = q @ c.per_head(k).mT * c.scale
    if c.softcap:
        scores = c.softcap * torch.tanh(scores / c.softcap)
    if bias:
        scores = scores + bias[0]
    weights = scores.masked_fill(~c.visible, -math.inf).softmax(-1, dtype=softmax_in)
    weights = weights.to(q.dtype)
    if c.keep is not None:
        weights = weights * c.keep / c.keep_prob
    return weights @ c.per_head(v)


def eager(c: Call, rng: random.Random) -> Grads:
    """Computes every step in the dtype, with the softmax in float32 or not."""
    leaves = c.leaves()
    out = attended(c, leaves, rng.choice([None, torch.float32]))
    return c.named(torch.autograd.grad(out, leaves, c.dout))


def wide_eager(c: Call, rng: random.Random) -> Grads:
    """Computes in float32 and rounds the gradients at the end."""
    leaves = [t.detach().float().requires_grad_() for t in c.leaves()]
    out = attended(c, leaves, None)
    return c.named(tuple(g.to(c.dtype) for g in torch.autograd.grad(out, leaves, c.dout.float())))


def sdpa(c: Call, rng: random.Random) -> Grads:
    """Runs torch's flash or math kernel for the CPU."""
    leaves = c.leaves()
    q, k, v, *bias = (t[None] for t in leaves)
    causal = bool(c.visible.all())
    mask = None if causal else c.visible
    if bias:
        mask = bias[0].masked_fill(~c.visible, -math.inf)
    if rng.random() < 0.5:  # autograd adds the gradients of a group's repeated heads
        k, v = (t.repeat_interleave(c.group, 1) for t in (k, v))
    flash = not bias and rng.random() < 0.6
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH] if flash else SDPBackend.MATH):
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=c.scale, enable_gqa=k.shape[1] < q.shape[1]
        )
    return c.named(torch.autograd.grad(out[0], leaves, c.dout))


def flex(c: Call, rng: random.Random) -> Grads:
    """Runs FlexAttention's eager formulas, which can be differentiated on a CPU although it raises an error."""
    leaves = c.leaves()
    q, k, v, *_ = (t[None] for t in leaves)

    def shown(score: Tensor, b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        if c.softcap:
            score = c.softcap * torch.tanh(score / c.softcap)
        return torch.where(c.visible[row, key], score, -math.inf)

    torch.compiler.reset()  # so that it traces with static shapes
    with mock.patch("torch.nn.attention.flex_attention._validate_device"):
        out = flex_attention(q, k, v, score_mod=shown, scale=c.scale, enable_gqa=c.group > 1)
    return c.named(torch.autograd.grad(out[0], leaves, c.dout))


def scores_of(c: Call, rows: Tensor, keys: slice) -> tuple[Tensor, Tensor]:
    """Returns (scores in float32, their derivative by the scaled product) of some rows and keys."""
    product = c.q[:, rows].float() @ c.per_head(c.k)[:, keys].float().mT * c.scale
    result, slope = product, torch.ones_like(product)
    if c.softcap:
        tanh = torch.tanh(product / c.softcap)
        result, slope = c.softcap * tanh, 1 - tanh * tanh
    if c.bias is not None:
        result = result + c.bias[:, rows][..., keys].float()
    return result.masked_fill(~c.visible[rows][:, keys], -math.inf), slope


def forward(c: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Computes (out in the dtype, max, sum) like a kernel that rounds weights to the dtype and sums in float32."""
    every = torch.arange(c.q.shape[1])
    scores, _ = scores_of(c, every, slice(None))
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    dropped_weights = weights if c.keep is None else weights * c.keep / c.keep_prob
    return (dropped_weights.to(c.dtype).float() @ c.per_head(c.v).float() / total).to(c.dtype), top, total


def tiled(c: Call, rng: random.Random) -> Grads:
    """Computes gradients by tiles of keys, with rows in random order, P from the log-sum-exp, and sums in float32."""
    out, top, total = forward(c)
    lse = top + total.log()
    rows = torch.randperm(c.q.shape[1])
    step, block = rng.choice([16, 64, 100, 1000]), rng.choice([32, 128, 1000])
    low = rng.random() < 0.7  # weights and gradients of scores are rounded to the dtype
    from_out, group_low = rng.random() < 0.6, rng.random() < 0.4
    dq = torch.zeros(c.q.shape)
    dk, dv = (torch.zeros(len(c.q), *t.shape[1:]) for t in (c.k, c.v))
    dbias = None if c.bias is None else torch.zeros(c.bias.shape)
    for some in rows.split(block):
        dout, q = c.dout[:, some].float(), c.q[:, some].float()
        delta = (dout * out[:, some].float()).sum(-1, keepdim=True)
        if not from_out:
            _, p, upstream = probabilities(c, some, slice(None), lse, dout)
            delta = (p * upstream).sum(-1, keepdim=True)
        for first in range(0, c.k.shape[1], step):
            keys = slice(first, first + step)
            slope, p, upstream = probabilities(c, some, keys, lse, dout)
            dscores = p * (upstream - delta)
            dropped_weights = p if c.keep is None else p * c.keep[:, some][..., keys] / c.keep_prob
            dx = dscores * slope
            if dbias is not None:
                dbias[:, some, keys] = dscores
            if low:
                dropped_weights, dx = dropped_weights.to(c.dtype).float(), dx.to(c.dtype).float()
            dv[:, keys] += dropped_weights.mT @ dout
            dk[:, keys] += dx.mT @ q * c.scale
            dq[:, some] += dx @ c.per_head(c.k)[:, keys].float() * c.scale
    if group_low:
        dk, dv = dk.to(c.dtype), dv.to(c.dtype)
    dk, dv = (t.unflatten(0, (-1, c.group)).sum(1) for t in (dk, dv))
    result = [dq, dk, dv] + ([] if dbias is None else [dbias])
    return c.named(tuple(t.to(c.dtype) for t in result))


def probabilities(c: Call, rows: Tensor, keys: slice, lse: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (derivative of the scores, P before dropout, dP) of some rows and keys."""
    scores, slope = scores_of(c, rows, keys)
    upstream = dout @ c.per_head(c.v)[:, keys].float().mT
    if c.keep is not None:
        upstream = upstream * c.keep[:, rows][..., keys] / c.keep_prob
    return slope, (scores - lse[:, rows]).exp(), upstream


def ours(c: Call, rng: random.Random) -> Grads:
    """Computes gradients with this library."""
    leaves = c.leaves()
    q, k, v, *bias = leaves
    out = fa.attention(
        *(t[None] for t in (q, k, v)), layout="BNSD", scale=c.scale, softcap=c.softcap,
        bias=bias[0][None] if bias else None, blocked=~c.visible, keep_prob=c.keep_prob,
        drop_bits=None if c.keep is None else bits(c.keep),
    )  # fmt: skip
    return c.named(torch.autograd.grad(out, leaves, c.dout[None]))


def bits(keep: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits(keep.numpy(), bitorder="little"))


ANY: list[Program] = [eager, wide_eager, tiled, tiled, ours]


def programs(c: Call) -> list[Program]:
    """Returns the programs that support a call."""
    is_supported = c.keep is None and not c.softcap
    return ANY + [sdpa] * is_supported + [flex] * (c.keep is None and c.bias is None)


def drawn(rng: random.Random) -> Call:
    """Draws a call of 1 to 900 rows and keys."""
    dtype = rng.choice([torch.float32, torch.float16, torch.bfloat16])
    group, heads_kv, dim = rng.choice([1, 1, 2, 4]), rng.choice([1, 2]), rng.choice([1, 8, 16, 32, 64, 128])
    dim_v = dim if rng.random() < 0.8 else rng.choice([8, 16, 64])
    rows, keys = (rng.choice([1, 7, rng.randint(2, 300), rng.randint(2, 900)]) for _ in range(2))
    scale = rng.choice([1.0, 1.0, 3.0]) * dim**-0.5
    by = [rng.choice([1, 1, 1, 4, 0.1]) for _ in range(4)]
    shapes = (
        (group * heads_kv, rows, dim),
        (heads_kv, keys, dim),
        (heads_kv, keys, dim_v),
        (group * heads_kv, rows, dim_v),
    )
    q, k, v, dout = ((torch.randn(s) * b).to(dtype) for s, b in zip(shapes, by, strict=True))
    if rng.random() < 0.2:
        v = v + rng.choice([1, 10])
    visible = torch.ones(rows, keys, dtype=torch.bool)
    visible = visible.tril(keys - rows) if rows <= keys and rng.random() < 0.5 else visible
    result = Call(q, k, v, dout, visible, scale)
    if rng.random() < 0.25:
        result = replace(result, bias=(torch.randn(len(q), rows, keys) * rng.choice([1, 3])).to(dtype))
    if rng.random() < 0.2:
        keep_prob = rng.choice([0.9, 0.5])
        result = replace(result, keep=torch.rand(len(q), rows, keys) < keep_prob, keep_prob=keep_prob)
    if rng.random() < 0.2:
        result = replace(result, softcap=rng.choice([5.0, 30.0]))
    return result


def judged(c: Call, grads: Grads) -> Judgement:
    """Judges gradients as a recorded backward with saved results; plain calls use CANN's record of gradients."""
    out, top, total = forward(c)
    results = {n: g[None] for n, g in grads.items()}
    mask = None if bool(c.visible.all()) else ~c.visible
    if c.keep is None and not c.softcap:
        lanes = (t.expand(*t.shape[:-1], 8) for t in (top, total))
        names = ("query", "key", "value", "dy", "attention_in", "softmax_max", "softmax_sum", "pse")
        given = zip(names, (c.q, c.k, c.v, c.dout, out, *lanes, c.bias), strict=True)
        inputs = {n: t[None] for n, t in given if t is not None}
        inputs |= {"head_num": len(c.q), "input_layout": "BNSD", "scale_value": c.scale, "atten_mask": mask}
        inputs |= {} if c.bias is None else {"pse_type": 0}
        return fa.judge("npu_fusion_attention_grad_v2", inputs, results, backends=False)
    inputs = {"q": c.q[None], "k": c.k[None], "v": c.v[None], "layout": "BNSD", "scale": c.scale, "blocked": mask,
              "softcap": c.softcap, "bias": None if c.bias is None else c.bias[None], "keep_prob": c.keep_prob,
              "drop_bits": None if c.keep is None else bits(c.keep)}  # fmt: skip
    saved = {"out": out[None], "max": top[None, ..., 0], "sum": total[None, ..., 0]}
    call = replace(recorded("attention", inputs, results), saved=saved, upstream={"out": c.dout[None]})
    return judge.judged(call, search=False, backends=False)


def right(seed: int) -> tuple[str, Judgement]:
    """Draws a call and a program; returns their description and the verdict on the gradients."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    call = drawn(rng)
    program = rng.choice(programs(call))
    return f"{program.__name__}, {call.dtype}, {[*call.q.shape]}, {[*call.k.shape]}", judged(call, program(call, rng))
