"""Implements attention as simple torch programs, whose errors benchmarks/accuracy.py compares with this library's.

Their inputs are a judge's Block: queries, keys and values of a sequence, exact in the dtype or dequantised.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from fusion_attention.judging import indexer, indexer_formulas
from fusion_attention.judging.editable_call import Block, Edit
from fusion_attention.judging.indexer_formulas import Index
from fusion_attention.judging.outputs import setting_of

Tensor = torch.Tensor
Leaves = dict[str, Tensor]
KEYS = 64  # keys of a tile
# Inputs for which torch's scaled_dot_product_attention has no argument.
BEYOND = ("bias", "keep", "sink", "q_rope", "weight_scale")


def leaves(x: Block, dtype: torch.dtype) -> Leaves:
    """Returns the tensors of a block in the dtype; keys and values have one copy for each key head."""
    one = {
        n: t if len(t) == 1 else t[:: x.problem.group] for n in ("k", "v", "k_rope") if (t := getattr(x, n)) is not None
    }
    one |= {n: t for n in ("q", "q_rope", "bias") if (t := getattr(x, n)) is not None}
    result = {n: t.to(dtype) for n, t in one.items()}
    return result if x.sink is None else result | {"sink": x.sink.float()}


def by_query_head(t: Leaves, name: str) -> Tensor:
    """Returns keys or values expanded to [heads_q, keys, dim]."""
    return t[name].repeat_interleave(len(t["q"]) // len(t[name]), 0)


def eager(x: Block, t: Leaves) -> Tensor:
    """Computes every step in the dtype, except softmax, as models do."""
    k, v = by_query_head(t, "k"), by_query_head(t, "v")
    products = t["q"] @ k.mT
    if "q_rope" in t:
        products = products + t["q_rope"] @ by_query_head(t, "k_rope").mT
    scores = products * x.problem.scale
    if x.softcap:
        scores = x.softcap * (scores / x.softcap).tanh()
    if "bias" in t:
        scores = scores + t["bias"]
    scores = scores.masked_fill(~x.visible, -math.inf)
    if "sink" in t:
        scores = torch.cat((scores.float(), t["sink"][:, None, None].expand(-1, scores.shape[1], 1)), -1)
    weights = scores.softmax(-1, dtype=torch.float32)[..., : k.shape[1]].to(v.dtype)
    if x.keep is not None:
        weights = weights * x.keep * x.keep_factor
    return weights @ v


def torch_sdpa(x: Block, t: Leaves) -> Tensor:
    """Returns the output of torch's scaled_dot_product_attention."""
    q, k, v = (tensor[None] for tensor in (t["q"], by_query_head(t, "k"), by_query_head(t, "v")))
    mask = x.visible.expand(len(t["q"]), -1, -1)[None]
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=x.problem.scale)[0]


def tiled(x: Block, t: Leaves) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) as flash-attn computes them: an online softmax over tiles of keys with sums in float32."""
    q, k, v = t["q"].float(), by_query_head(t, "k").float(), by_query_head(t, "v").float()
    top = torch.full((*q.shape[:-1], 1), -1e30)
    total, out = torch.zeros_like(top), torch.zeros(*q.shape[:-1], v.shape[-1])
    for first in range(0, k.shape[1], KEYS):
        here = slice(first, first + KEYS)
        scores = (q @ k[:, here].mT * x.problem.scale).masked_fill(~x.visible[..., here], -math.inf)
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights, decay = (scores - higher).exp(), (top - higher).exp()
        total = total * decay + weights.sum(-1, keepdim=True)
        out = out * decay + weights.to(t["q"].dtype).float() @ v[:, here]
        top = higher
    return (out / total).to(t["q"].dtype), top + total.log()


def tiled_gradients(x: Block, t: Leaves, dout: Tensor) -> Leaves:
    """Returns gradients computed tile by tile from out and lse: probabilities and dS in the dtype, sums in float32."""
    dtype, scale, out_lse = t["q"].dtype, x.problem.scale, tiled(x, t)
    q, k, v, out = t["q"].float(), by_query_head(t, "k").float(), by_query_head(t, "v").float(), out_lse[0].float()
    delta, dout = (dout.float() * out).sum(-1, keepdim=True), dout.float()
    result = {"q": torch.zeros_like(q), "k": torch.zeros_like(k), "v": torch.zeros_like(v)}
    for first in range(0, k.shape[1], KEYS):
        here = slice(first, first + KEYS)
        scores = (q @ k[:, here].mT * scale).masked_fill(~x.visible[..., here], -math.inf)
        soft = (scores - out_lse[1]).exp()
        dscores = (soft * (dout @ v[:, here].mT - delta)).to(dtype).float()
        result["q"] += dscores @ k[:, here] * scale
        result["k"][:, here] = dscores.mT @ q * scale
        result["v"][:, here] = soft.to(dtype).float().mT @ dout
    shared = {n: g if n == "q" else g.unflatten(0, (len(t[n]), -1)).sum(1) for n, g in result.items()}
    return {n: g.to(dtype) for n, g in shared.items()}


def autograd(program: Callable[[Block, Leaves], Tensor]) -> Callable[[Block, Leaves, Tensor], Leaves]:
    """Returns a function that computes a program's gradients with torch's autograd."""

    def gradients(x: Block, t: Leaves, dout: Tensor) -> Leaves:
        t = {n: each.clone().requires_grad_() for n, each in t.items()}
        with torch.enable_grad():
            return dict(zip(t, torch.autograd.grad(program(x, t), [*t.values()], dout), strict=True))

    return gradients


FORWARD: dict[str, Callable[[Block, Leaves], Tensor]] = {
    "SDPA": torch_sdpa, "tiles": lambda x, t: tiled(x, t)[0], "eager": eager,
}  # fmt: skip
NAMES = tuple(FORWARD)
BACKWARD = {"SDPA": autograd(torch_sdpa), "tiles": tiled_gradients, "eager": autograd(eager)}


def results(who: str, call: Any, change: Edit | None = None) -> Leaves:
    """Returns a program's results for a call, by output names; empty where the program cannot compute it. change: edit
    applied to every block before the computation; introduces a fault."""
    outputs: Leaves = call.results()
    if indexer.serves(call):
        if who != "eager" or call.op_kind not in ("indexer_topk", "indexer_backward"):
            return {}
        _indexer(indexer.setting_of(call), indexer.views_of(call, outputs))
        return outputs
    setting, selected_outputs = setting_of(call, outputs)
    setting = setting if change is None else setting.changed(change)
    p, e = setting.problem, setting.extents
    written: Leaves = {}
    for b in range(len(e)):
        heads, rows = slice(0, p.heads_q), slice(0, int(e.q_len[b]))
        x = setting.block(b, heads, rows, slice(0, int(e.kv_len[b])))
        if x.out_scale is not None or (
            who != "eager" and (x.softcap or any(getattr(x, n) is not None for n in BEYOND))
        ):
            return {}
        t = leaves(x, p.torch_dtype)
        if setting.grads is None:
            result = {"out": FORWARD[who](x, t)}
        else:
            result = {f"d{n}": g for n, g in BACKWARD[who](x, t, x.saved[0].to(p.torch_dtype)).items()}
            result = {"dpse" if n == "dbias" else n: g for n, g in result.items()}
        for o in selected_outputs:
            if o.kind in result:
                written[o.name] = o.tensor
                if o.view is None:  # the output has one sequence
                    o.tensor.copy_(result[o.kind].reshape(o.tensor.shape))
                else:
                    every = slice(0, p.heads_kv) if o.by_keys else heads
                    o.rows(setting, b, every, slice(None)).copy_(result[o.kind])
    return written


def _indexer(x: Index, views: dict[str, Any]) -> None:
    """Writes the indexer's lists and values, or the gradients of values, to the views; computes in the dtype."""
    dtype = x.problem.torch_dtype
    for b in range(len(x.extents)):
        q_len, kv_len = int(x.extents.q_len[b]), int(x.extents.kv_len[b])
        s = x.scored(b, slice(0, q_len), dtype)
        given = [t.clone().requires_grad_() for t in (s.q, s.k, s.weights)]
        with torch.enable_grad():
            scores = (given[2] * (given[0] @ given[1].mT).relu()).sum(0)
        if x.grads is None:
            scores = scores.detach().masked_fill(~x.visible(b, slice(0, q_len)), -math.inf)
            values, indices = scores.sort(dim=-1, descending=True, stable=True)
            chosen = {"values": values, "indices": indices.where(values != -math.inf, -1)}
            for kind, t in chosen.items():
                views[kind].sequence(b, 1, q_len)[0].copy_(t[:, : x.problem.top_k])
            continue
        dscores = indexer_formulas.given(x, b, slice(0, q_len), torch.float64)[0].to(dtype)
        dq, dk, dw = torch.autograd.grad(scores, given, dscores)
        for kind, t, heads, length in (("dq", dq, x.heads, q_len), ("dk", dk[None], 1, kv_len),
                                       ("dweights", dw[..., 0].mT[None], 1, q_len)):  # fmt: skip
            views[kind].sequence(b, heads, length).copy_(t)
