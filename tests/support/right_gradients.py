"""Computes correct gradients with random programs, dtypes, lengths and inputs.

The programs are plain torch: autograd of eager attention in the dtype, backwards of scaled_dot_product_attention and
FlexAttention, and backwards as kernels write them: tile by tile from the log-sum-exp, delta from the stored output or
from probabilities, keys split, rows in random order, sums over a group in the dtype or in float32.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from support.planted import Capture
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

import fusion_attention as fa
from fusion_attention.judging.verdict import Judgement

Tensor = torch.Tensor
Grads = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Call:
    """A backward of fusion_attention.attention.

    Attributes:
        q, k, v, dout: [B, heads, tokens, elements]. visible: bool [S1, S2]. sink: [N1], or None.
        bias: [B, N1, S1, S2] in the dtype, or None. keep: bool [B, N1, S1, S2], false for dropped pairs, or None.
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
    sink: Tensor | None = None

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.q.dtype

    def per_head(self, t: Tensor) -> Tensor:
        """Repeats key heads for each query head."""
        return t.repeat_interleave(self.q.shape[1] // t.shape[1], 1)

    def dropped(self, p: Tensor, rows: Any = slice(None), keys: slice = slice(None)) -> Tensor:
        """Returns probabilities or their gradients of some rows and keys after dropout."""
        return p if self.keep is None else p * self.keep[:, :, rows][..., keys] / self.keep_prob

    def scores(self, rows: Any = slice(None), keys: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Returns scores in float32 before the mask, and their derivative by the scaled product."""
        scores = self.q[:, :, rows].float() @ self.per_head(self.k)[:, :, keys].float().mT * self.scale
        slope = torch.ones(())
        if self.softcap:
            tanh = torch.tanh(scores / self.softcap)
            scores, slope = self.softcap * tanh, 1 - tanh * tanh
        return (scores if self.bias is None else scores + self.bias[:, :, rows][..., keys].float()), slope

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Computes (out, max, sum) like a kernel that rounds weights to the dtype and sums in float32."""
        scores = self.scores()[0].masked_fill(~self.visible, -math.inf)
        sink = torch.tensor(-math.inf) if self.sink is None else self.sink[:, None, None]
        top = torch.maximum(scores.amax(-1, keepdim=True), sink)
        weights = (scores - top).exp()
        total = weights.sum(-1, keepdim=True) + (sink - top).exp()
        carried = self.dropped(weights).to(self.dtype).float()
        return (carried @ self.per_head(self.v).float() / total).to(self.dtype), top, total

    def captured(self, grads: Grads) -> Capture:
        """Returns the backward with these gradients and the saved results of forward()."""
        out, top, total = self.forward()
        inputs = {
            "q": self.q, "k": self.k, "v": self.v, "layout": "BNSD", "scale": self.scale, "bias": self.bias,
            "blocked": None if bool(self.visible.all()) else ~self.visible, "softcap": self.softcap,
            "sink": self.sink, "keep_prob": self.keep_prob, "drop_bits": self.drop_bits, "dout": self.dout,
            "out": out, "max": top[..., 0], "sum": total[..., 0],
        }  # fmt: skip
        return Capture("attention", inputs, grads)

    @property
    def drop_bits(self) -> Tensor | None:
        if self.keep is None:
            return None
        bits = np.packbits(self.keep.numpy().reshape(-1), bitorder="little")
        return torch.from_numpy(np.pad(bits, (0, -len(bits) % 16)))

    def leaves(self) -> list[Tensor]:
        given = (self.q, self.k, self.v, self.bias)
        return [t.detach().clone().requires_grad_() for t in given if t is not None]

    def named(self, grads: Sequence[Tensor]) -> Grads:
        return dict(zip(("dq", "dk", "dv", "dpse"), grads, strict=False))


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
    return c.dropped(weights.to(q.dtype)) @ c.per_head(v)


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
    q, k, v, *bias = leaves
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
    return c.named(torch.autograd.grad(out, leaves, c.dout))


def flex(c: Call, rng: random.Random) -> Grads:
    """Runs FlexAttention's eager formulas, which can be differentiated on a CPU although it raises an error."""
    leaves = c.leaves()
    q, k, v, *_ = leaves

    def shown(score: Tensor, b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        if c.softcap:
            score = c.softcap * torch.tanh(score / c.softcap)
        return torch.where(c.visible[row, key], score, -math.inf)

    torch.compiler.reset()  # so that it traces with static shapes
    with mock.patch("torch.nn.attention.flex_attention._validate_device"):
        out = flex_attention(q, k, v, score_mod=shown, scale=c.scale, enable_gqa=c.group > 1)
    return c.named(torch.autograd.grad(out, leaves, c.dout))


def tiled(c: Call, rng: random.Random) -> Grads:
    """Computes gradients by tiles of keys, with rows in random order, P from the log-sum-exp, and sums in float32."""
    out, top, total = c.forward()
    lse = top + total.log()
    rows = torch.randperm(c.q.shape[2])
    step, block = rng.choice([16, 64, 100, 1000]), rng.choice([32, 128, 1000])
    low = rng.random() < 0.7  # weights and gradients of scores are rounded to the dtype
    from_out, group_low = rng.random() < 0.6, rng.random() < 0.4
    dq = torch.zeros(c.q.shape)
    dk, dv = (torch.zeros(c.per_head(t).shape) for t in (c.k, c.v))
    dbias = None if c.bias is None else torch.zeros(c.bias.shape)
    for some in rows.split(block):
        dout, q = c.dout[:, :, some].float(), c.q[:, :, some].float()
        delta = (dout * out[:, :, some].float()).sum(-1, keepdim=True)
        if not from_out:
            _, p, upstream = probabilities(c, some, slice(None), lse, dout)
            delta = (p * upstream).sum(-1, keepdim=True)
        for first in range(0, c.k.shape[2], step):
            keys = slice(first, first + step)
            slope, p, upstream = probabilities(c, some, keys, lse, dout)
            dscores = p * (upstream - delta)
            dropped_weights, dx = c.dropped(p, some, keys), dscores * slope
            if dbias is not None:
                dbias[:, :, some, keys] = dscores
            if low:
                dropped_weights, dx = dropped_weights.to(c.dtype).float(), dx.to(c.dtype).float()
            dv[:, :, keys] += dropped_weights.mT @ dout
            dk[:, :, keys] += dx.mT @ q * c.scale
            dq[:, :, some] += dx @ c.per_head(c.k)[:, :, keys].float() * c.scale
    if group_low:
        dk, dv = dk.to(c.dtype), dv.to(c.dtype)
    dk, dv = (t.unflatten(1, (-1, c.group)).sum(2) for t in (dk, dv))
    result = [dq, dk, dv] + ([] if dbias is None else [dbias])
    return c.named([t.to(c.dtype) for t in result])


def probabilities(c: Call, rows: Tensor, keys: slice, lse: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (derivative of the scores, P before dropout, dP) of some rows and keys."""
    scores, slope = c.scores(rows, keys)
    scores = scores.masked_fill(~c.visible[rows][:, keys], -math.inf)
    upstream = c.dropped(dout @ c.per_head(c.v)[:, :, keys].float().mT, rows, keys)
    return slope, (scores - lse[:, :, rows]).exp(), upstream


def ours(c: Call, rng: random.Random) -> Grads:
    leaves = c.leaves()
    q, k, v, *bias = leaves
    out = fa.attention(
        q, k, v, layout="BNSD", scale=c.scale, softcap=c.softcap, bias=bias[0] if bias else None, blocked=~c.visible,
        keep_prob=c.keep_prob, drop_bits=c.drop_bits,
    )  # fmt: skip
    return c.named(torch.autograd.grad(out, leaves, c.dout))


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
    heads = group * heads_kv
    shapes = ((1, heads, rows, dim), (1, heads_kv, keys, dim), (1, heads_kv, keys, dim_v), (1, heads, rows, dim_v))
    q, k, v, dout = ((torch.randn(s) * b).to(dtype) for s, b in zip(shapes, by, strict=True))
    if rng.random() < 0.2:
        v = v + rng.choice([1, 10])
    visible = torch.ones(rows, keys, dtype=torch.bool)
    visible = visible.tril(keys - rows) if rows <= keys and rng.random() < 0.5 else visible
    result = Call(q, k, v, dout, visible, scale)
    if rng.random() < 0.25:
        result = replace(result, bias=(torch.randn(1, heads, rows, keys) * rng.choice([1, 3])).to(dtype))
    if rng.random() < 0.2:
        keep_prob = rng.choice([0.9, 0.5])
        result = replace(result, keep=torch.rand(1, heads, rows, keys) < keep_prob, keep_prob=keep_prob)
    if rng.random() < 0.2:
        result = replace(result, softcap=rng.choice([5.0, 30.0]))
    return result


def judged(c: Call, grads: Grads) -> Judgement:
    """Judges gradients with saved results; plain calls use CANN's record of gradients."""
    if c.keep is not None or c.softcap:
        call = c.captured(grads)
        return fa.judge(call.operator, call.inputs, call.outputs, backends=False)
    out, top, total = c.forward()
    lanes = (t.expand(*t.shape[:-1], 8) for t in (top, total))
    names = ("query", "key", "value", "dy", "attention_in", "softmax_max", "softmax_sum", "pse")
    given = zip(names, (c.q, c.k, c.v, c.dout, out, *lanes, c.bias), strict=True)
    inputs: dict[str, Any] = {n: t for n, t in given if t is not None}
    inputs |= {"head_num": c.q.shape[1], "input_layout": "BNSD", "scale_value": c.scale}
    inputs |= {"atten_mask": None if bool(c.visible.all()) else ~c.visible}
    inputs |= {} if c.bias is None else {"pse_type": 0}
    return fa.judge("npu_fusion_attention_grad_v2", inputs, grads, backends=False)


def right(seed: int) -> tuple[str, Judgement]:
    """Draws a call and a program; returns their description and the verdict on the gradients."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    call = drawn(rng)
    program = rng.choice(programs(call))
    return f"{program.__name__}, {call.dtype}, {[*call.q.shape]}, {[*call.k.shape]}", judged(call, program(call, rng))
