"""The two verbs of softmax attention: forward by the native core, backward in blocked torch with five matmuls.

Rows that see nothing are no branch of the kernel: they come out as 0 and get their mean form afterwards. Refuses to
know where rows lie and what masks are made of.
"""

from __future__ import annotations

import math

import torch

from fusion_attention.backends.cpu import panels
from fusion_attention.backends.cpu.means import add_means
from fusion_attention.backends.cpu.native import run_forward
from fusion_attention.backends.cpu.rows import RowTile, row_tiles, steps
from fusion_attention.backends.cpu.tiling import Schedule
from fusion_attention.problem import Extents, Grads, Operands, Problem


def attention_forward(problem: Problem, extents: Extents, schedule: Schedule, operands: Operands) -> None:
    """Writes operands.out and operands.stats for every row of every sequence."""
    assert schedule.native is not None
    if len(extents) == 0:
        return
    empty_rows = run_forward(schedule.native, problem, operands)
    if empty_rows and problem.empty_rows != "zero":
        add_means(problem, extents, schedule, operands)


def _live(tile: RowTile, panel: torch.Tensor, *masks: torch.Tensor | None) -> torch.Tensor | None:
    """What panels.multiply needs: None if all masks are None or the panel is finite, else all masks joined."""
    joined: torch.Tensor | None = None
    for mask in masks:
        if mask is not None:
            joined = mask if joined is None else joined & mask
    return None if joined is None or panels.is_finite(panel) else tile.fold(joined)


def _seen(unseen: torch.Tensor | None) -> torch.Tensor | None:
    return None if unseen is None else ~unseen


@torch.no_grad()
def attention_backward(
    problem: Problem, extents: Extents, schedule: Schedule, operands: Operands, grads: Grads
) -> None:
    """Writes dq, dk, dv, rope tails and dsink, and adds to dbias, from the saved statistics and the saved out."""
    dsink = torch.zeros(problem.heads_q)
    for b in range(len(extents)):
        kv_len = int(extents.kv_len[b])
        dk = torch.zeros((problem.heads_kv, kv_len, problem.dim_qk + problem.dim_rope))
        dv = torch.zeros((problem.heads_kv, kv_len, problem.dim_v))
        for tile in row_tiles(problem, extents, schedule, operands, b):
            dsink += _backward_tile(tile, schedule.keys, grads, dk, dv)
        everything = slice(0, kv_len)
        panels.store(grads.dk, grads.dk_rope, b, everything, dk.mul_(problem.scale))
        panels.store(grads.dv, None, b, everything, dv.div_(problem.keep_prob))
    if grads.dsink is not None:
        grads.dsink.copy_(dsink)


def _backward_tile(tile: RowTile, size: int, grads: Grads, dk: torch.Tensor, dv: torch.Tensor) -> torch.Tensor:
    """Stores the tile's dq, adds its share to dk (before scale) and dv (before 1 / keep_prob), returns dsink's."""
    ops = tile.operands
    q, dout = tile.load(ops.q, ops.q_rope), tile.load(grads.dout)
    peak, total = tile.load(ops.stats.max), tile.load(ops.stats.sum)
    delta = (dout * tile.load(ops.out)).sum(-1, keepdim=True)
    empty = peak == -math.inf
    some_empty = bool(empty.any())
    if some_empty:
        _means_backward(tile, size, empty & (total > 0), total, dout, dv)
        peak, total = peak.masked_fill(empty, 0.0), total.masked_fill(empty, math.inf)
        delta = delta.masked_fill(empty, 0.0)
    dq = torch.zeros_like(q)
    for keys in steps(tile.begin, tile.end, size):
        k, v = tile.load_keys(ops.k, ops.k_rope, keys), tile.load_keys(ops.v, None, keys)
        s, unseen = tile.scores(q, k, keys)
        p = s.sub_(peak).exp_().div_(total)
        if some_empty:
            nothing = tile.by_head(empty)
            unseen = nothing.expand(-1, -1, p.shape[-1]) if unseen is None else unseen | nothing
        ds = _score_gradient(tile, keys, p, unseen, (dout, v, delta), dv)
        if grads.dbias is not None:
            tile.add_bias_gradient(grads.dbias, ds, keys)
        ds = tile.narrow(ds)
        seen = _seen(unseen)
        dq += panels.multiply(ds, k, _live(tile, k, seen))
        live = _live(tile, q, seen)
        dk[:, keys].add_(panels.multiply(ds.mT, q, None if live is None else live.mT))
    tile.store(grads.dq, dq.mul_(tile.problem.scale), grads.dq_rope)
    if ops.sink is None or not tile.problem.has_sink:
        return torch.zeros(tile.problem.heads_q)
    share = (ops.sink[:, None, None] - tile.by_head(peak)).exp_().div_(tile.by_head(total))
    return -(share * tile.by_head(delta)).sum((1, 2))


def _score_gradient(
    tile: RowTile,
    keys: slice,
    p: torch.Tensor,
    unseen: torch.Tensor | None,
    sources: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dv: torch.Tensor,
) -> torch.Tensor:
    """dS = P * (dP - D) of one step over keys, from (dout, v, D); adds (P * M)^T dout to dv on the way."""
    dout, v, delta = sources
    kept = tile.kept(keys)
    if unseen is not None:
        tile.by_head(p).masked_fill_(unseen, 0.0)  # a row of NaN must not reach the keys that it does not see
    dropped = p if kept is None else p.masked_fill(tile.fold(~kept), 0.0)
    live = _live(tile, dout, _seen(unseen), kept)
    dv[:, keys].add_(panels.multiply(tile.narrow(dropped).mT, dout, None if live is None else live.mT))
    ds = torch.bmm(dout, v.mT)
    if kept is not None:
        ds.div_(tile.problem.keep_prob).masked_fill_(tile.fold(~kept), 0.0)
    ds.sub_(delta).mul_(p)
    if unseen is not None:
        tile.by_head(ds).masked_fill_(unseen, 0.0)
    return ds


def _means_backward(
    tile: RowTile, size: int, mean: torch.Tensor, total: torch.Tensor, dout: torch.Tensor, dv: torch.Tensor
) -> None:
    """Adds the share of rows in mean form, dout / n, to every key's dv that dropout keeps."""
    if not mean.any():
        return
    share = torch.where(mean, dout / total, 0.0)
    for keys in steps(0, tile.kv_len, size):
        kept = tile.kept(keys)
        if kept is None:
            dv[:, keys].add_(share.sum(1, keepdim=True))
        else:
            live = _live(tile, share, kept)
            dv[:, keys].add_(panels.multiply(tile.fold(kept).float().mT, share, None if live is None else live.mT))
