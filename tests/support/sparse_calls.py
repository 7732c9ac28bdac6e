"""Calls that select keys, and what they give: row by row, from gathered keys, in float64 or as a plain program would.

Shares no line with the back ends, and not their way either: every row gathers its keys and applies the formulas.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from support.witness import room, rows

from fusion_attention.waist.kv import PagedView, RowView
from fusion_attention.waist.mask import INFINITE
from fusion_attention.waist.problem import Extents, Grads, Operands, Problem, Stats

Tensors = list[torch.Tensor]
Results = dict[str, Tensors]
INPUTS = ("q", "k", "v", "q_rope", "k_rope")


@dataclass(eq=False)
class SparseCall:
    """Tensors of the operand dtype, one per sequence: [heads, tokens, dim]; indices [heads_kv, q_len, select_count]."""

    problem: Problem
    extents: Extents
    q: Tensors
    k: Tensors
    v: Tensors
    indices: Tensors
    dout: Tensors
    q_rope: Tensors = field(default_factory=list)
    k_rope: Tensors = field(default_factory=list)
    sink: torch.Tensor | None = None


def extents_of(q_len: tuple[int, ...], kv_len: tuple[int, ...], causal: bool) -> Extents:
    """Rows see all keys, or those up to the diagonal that ends in the last corner."""
    q, kv = np.array(q_len, np.int64), np.array(kv_len, np.int64)
    hi = kv - q + 1 if causal else np.full_like(q, INFINITE)
    return Extents(q, kv, np.full_like(q, -INFINITE), hi, np.zeros_like(q), np.zeros_like(q))


def draw_list(rng: random.Random, kv_len: int, count: int, block: int, duplicates: bool) -> list[int]:
    """Blocks of a sequence: some order, perhaps repeated, perhaps a tail of -1 with anything legal behind it."""
    blocks = -(-kv_len // block)
    if duplicates:
        chosen = [rng.randrange(blocks) for _ in range(count)] if blocks else []
    else:
        chosen = rng.sample(range(blocks), min(blocks, count))
    chosen += [-1] * (count - len(chosen))
    if rng.random() < 0.3:
        chosen[rng.randrange(count)] = -1
    return chosen


def make_sparse(
    problem: Problem, q_len: tuple[int, ...], kv_len: tuple[int, ...], causal: bool, seed: int, duplicates: bool = False
) -> SparseCall:
    """Random tensors for a problem; keys that no list names are NaN."""
    p, rng, generator = problem, random.Random(seed), torch.Generator().manual_seed(seed)
    extents = extents_of(q_len, kv_len, causal)

    def tensors(heads: int, lengths: tuple[int, ...], dim: int) -> Tensors:
        shapes = [(heads, n, dim) for n in lengths] if dim else []
        return [torch.randn(shape, generator=generator, dtype=torch.float64).to(p.torch_dtype) for shape in shapes]

    indices = [
        torch.tensor(
            [
                [draw_list(rng, n, p.select_count, p.select_block, duplicates) for _ in range(m)]
                for _ in range(p.heads_kv)
            ],
            dtype=torch.int32,
        ).reshape(p.heads_kv, m, p.select_count)
        for m, n in zip(q_len, kv_len, strict=True)
    ]
    k = tensors(p.heads_kv, kv_len, p.dim_qk)
    v = [t[..., : p.dim_v] for t in k] if p.shares_kv else tensors(p.heads_kv, kv_len, p.dim_v)
    call = SparseCall(
        problem,
        extents,
        q=tensors(p.heads_q, q_len, p.dim_qk),
        k=k,
        v=v,
        indices=indices,
        dout=tensors(p.heads_q, q_len, p.dim_v),
        q_rope=tensors(p.heads_q, q_len, p.dim_rope),
        k_rope=tensors(p.heads_kv, kv_len, p.dim_rope),
        sink=torch.randn(p.heads_q, generator=generator) if p.has_sink else None,
    )
    for b in range(len(extents)):
        for h in range(p.heads_kv):
            named = {j for i in range(q_len[b]) for j in entries(call, b, h, i)}
            unnamed = [j for j in range(kv_len[b]) if j not in named]
            for tensor in (call.k, call.v, call.k_rope):
                if tensor:
                    tensor[b][h, unnamed] = torch.nan
    return call


def scan(listed: list[int], vis: int, block: int) -> list[int]:
    """The keys that a list names, in its order: the rule of selection, literally."""
    found = []
    for entry in listed[: -(-vis // block) if vis > 0 else 0]:
        if entry < 0:
            break
        found += [j for j in range(entry * block, (entry + 1) * block) if j < vis]
    return found


def entries(call: SparseCall, b: int, head_kv: int, row: int) -> list[int]:
    """scan() of a row of a call."""
    vis = min(int(call.extents.kv_len[b]), row + int(call.extents.hi[b]))
    return scan(call.indices[b][head_kv, row].tolist(), vis, call.problem.select_block)


def formulas(call: SparseCall, wide: torch.dtype, saved: Results | None = None) -> Results:
    """Everything, row by row; in float32 as a plain program rounds, which narrows weights of bfloat16.

    Gradients come from what is saved, if given, else from this forward.
    """
    p, low = call.problem, call.problem.torch_dtype if wide == torch.float32 else wide
    shapes = {"out": call.dout, "max": call.q, "sum": call.q, **{f"d{n}": getattr(call, n) for n in INPUTS}}
    results = {n: [torch.zeros(t.shape, dtype=wide) for t in like] for n, like in shapes.items() if like}
    for name, empty in (("max", -torch.inf), ("sum", 0.0)):
        results[name] = [torch.full((*t.shape[:2], 1), empty, dtype=wide) for t in call.q]
    if call.sink is not None:
        results["dsink"] = [torch.zeros(p.heads_q, dtype=wide)]

    def narrow(t: torch.Tensor) -> torch.Tensor:
        return t.to(low).to(wide) if p.dtype == "bfloat16" else t

    for b in range(len(call.extents)):
        for i in range(int(call.extents.q_len[b])):
            for g in range(p.heads_kv):
                _row(call, (b, i, g), wide, narrow, results, saved)
    for name, tensors in results.items():
        if name not in ("max", "sum", "dsink"):
            results[name] = [t.to(low) for t in tensors]
    if p.shares_kv:
        del results["dv"]
    return results


def _row(call, at, wide, narrow, results, saved) -> None:  # type: ignore[no-untyped-def]
    p, (b, i, g) = call.problem, at
    heads, js = slice(g * p.group, (g + 1) * p.group), entries(call, b, g, i)
    q, k, v = call.q[b][heads, i].to(wide), call.k[b][g, js].to(wide), call.v[b][g, js].to(wide)
    if p.dim_rope:
        q, k = torch.cat((q, call.q_rope[b][heads, i].to(wide)), -1), torch.cat((k, call.k_rope[b][g, js].to(wide)), -1)
    s = p.scale * (q @ k.mT)
    top = s.amax(-1, keepdim=True) if js else torch.full((p.group, 1), -torch.inf, dtype=wide)
    sink = None if call.sink is None else call.sink[heads, None].to(wide)
    if sink is not None:
        top = torch.maximum(top, sink)
    e = (s - top.masked_fill(top == -torch.inf, 0)).exp()
    total = e.sum(-1, keepdim=True) + (0 if sink is None else (sink - top).exp())
    found = (narrow(e) @ v) / total.masked_fill(total == 0, 1)
    results["out"][b][heads, i], results["max"][b][heads, i], results["sum"][b][heads, i] = found, top, total
    out = found.to(results_dtype(call, wide)).to(wide)
    if saved:
        out, top, total = (saved[n][b][heads, i].to(wide) for n in ("out", "max", "sum"))
    alive = total != 0
    prob = torch.where(alive, (s - top.masked_fill(top == -torch.inf, 0)).exp() / total.masked_fill(~alive, 1), 0)
    dout = call.dout[b][heads, i].to(wide)
    delta = (dout * out).sum(-1, keepdim=True)
    ds = torch.where(alive, prob * (dout @ v.mT - delta), 0)
    dq, dk, dv = p.scale * (narrow(ds) @ k), p.scale * (narrow(ds).mT @ q), narrow(prob).mT @ dout
    at_keys = torch.tensor(js, dtype=torch.long)
    results["dq"][b][heads, i] = dq[:, : p.dim_qk]
    if p.dim_rope:
        results["dq_rope"][b][heads, i] = dq[:, p.dim_qk :]
        results["dk_rope"][b][g].index_add_(0, at_keys, dk[:, p.dim_qk :])
    results["dk"][b][g].index_add_(0, at_keys, dk[:, : p.dim_qk])
    values = results["dk"][b][g][:, : p.dim_v] if p.shares_kv else results["dv"][b][g]
    values.index_add_(0, at_keys, dv)
    if sink is not None:
        shares = torch.where(alive, delta * (sink - top).exp() / total.masked_fill(~alive, 1), 0)
        results["dsink"][0][heads] -= shares[:, 0]


def results_dtype(call: SparseCall, wide: torch.dtype) -> torch.dtype:
    """What out is stored as."""
    return call.problem.torch_dtype if wide == torch.float32 else wide


# ---------------------------------------------------------------------------------------------------------- in memory


def int_rows(tensors: Tensors) -> RowView:
    """As witness.rows, head-major, with lists that would read far outside between the rows."""
    dim = tensors[0].shape[2]
    keep = tuple(torch.full((t.shape[0], t.shape[1] + 1, dim + 5), 1 << 30, dtype=torch.int32) for t in tensors)
    for memory, t in zip(keep, tensors, strict=True):
        memory[:, : t.shape[1], 2 : dim + 2] = t
    stride_head = np.array([memory.stride(0) for memory in keep])
    return RowView(keep, np.full(len(keep), 2), dim + 5, stride_head, dim)


def pages_of(tensors: Tensors, size: int, seed: int) -> PagedView:
    """The rows in pages that lie anywhere in a pool of NaN; entries of the table that no key needs point outside."""
    heads, dim = tensors[0].shape[0], tensors[0].shape[2]
    counts = [-(-t.shape[1] // size) for t in tensors]
    order = random.Random(seed).sample(range(sum(counts) + 3), sum(counts))
    pool = torch.full((sum(counts) + 3, heads, size, dim + 2), torch.nan, dtype=tensors[0].dtype)
    table = torch.full((len(tensors), max(counts, default=0) + 2), 1 << 29, dtype=torch.int32)
    for b, t in enumerate(tensors):
        for n in range(counts[b]):
            page, part = order.pop(), t[:, n * size : (n + 1) * size]
            table[b, n] = page
            pool[page, :, : part.shape[1], :dim] = part
    return PagedView(pool, table, size, pool.stride(0), pool.stride(2), pool.stride(1), dim)


def load_sparse(call: SparseCall, packed: bool = True, page_size: int = 0) -> Operands:
    """The operands, with poisoned room for out and statistics."""
    p = call.problem

    def keys(tensors: Tensors) -> RowView | PagedView:
        return pages_of(tensors, page_size, len(tensors[0])) if page_size else rows(tensors, packed)

    k = keys(call.k)
    return Operands(
        q=rows(call.q, packed),
        k=k,
        v=replace(k, dim=p.dim_v) if p.shares_kv else keys(call.v),
        out=room(call.q, p.dim_v, p.torch_dtype),
        stats=Stats(*(room(call.q, 1, torch.float32) for _ in range(2))),
        q_rope=rows(call.q_rope, not packed) if p.dim_rope else None,
        k_rope=keys(call.k_rope) if p.dim_rope else None,
        indices=int_rows(call.indices),
        sink=call.sink,
    )


def room_for_gradients(call: SparseCall) -> Grads:
    """Poisoned memory for every gradient."""
    p, dtype = call.problem, call.problem.torch_dtype
    given = {n: getattr(call, n) for n in INPUTS if getattr(call, n) and not (n == "v" and p.shares_kv)}
    views = {f"d{n}": room(like, like[0].shape[2], dtype) for n, like in given.items()}
    dsink = None if call.sink is None else torch.full_like(call.sink, torch.nan)
    return Grads(rows(call.dout, packed=False), **{"dv": None, **views}, dsink=dsink)
