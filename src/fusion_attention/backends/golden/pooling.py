"""Pooling of each window of rows to one row by a softmax of gates, and gradients, in float64, like the formulas."""

import torch

from fusion_attention.ir.pooling import PoolingGrads, PoolingOperands, PoolingProblem
from fusion_attention.ir.problem import Extents

Tensor = torch.Tensor


def _windows(rows: Tensor, p: PoolingProblem, first: int, count: int, absent: float) -> Tensor:
    """Returns the rows in windows first to first + count - 1, [heads, windows, ratio, dim], or with overlap 2 ratio
    rows: the previous window's, then its own.

    rows: [heads, rows, channels] of a sequence. absent: the value of rows before the first window.
    """
    ratio = p.ratio
    current = rows[:, first * ratio : (first + count) * ratio].unflatten(1, (count, ratio))
    if not p.overlap:
        return current
    lead = rows[:, max(first - 1, 0) * ratio : (first + count - 1) * ratio, : p.dim]
    none = rows.new_full((p.heads, count * ratio - lead.shape[1], p.dim), absent)
    return torch.cat((torch.cat((none, lead), 1).unflatten(1, (count, ratio)), current[..., p.dim :]), 2)


def _inputs(p: PoolingProblem, o: PoolingOperands, b: int, rows: int) -> tuple[Tensor, Tensor]:
    """Returns (rows, their gates plus position bias) of sequence b, both float64 [heads, rows, channels]."""
    kv, z = (view.sequence(b, p.heads, rows).double() for view in (o.kv, o.gate))
    if o.bias is not None:
        z = z + o.bias.double()[torch.arange(rows, device=z.device) % p.ratio]
    return kv, z


def _placed(windows: Tensor, rows: Tensor, p: PoolingProblem, first: int) -> None:
    """Writes gradients of windows, [heads, windows, ratio or 2 ratio, dim] from window `first` on, to the rows that
    they pool, rows [heads, rows, channels]; the inverse of _windows()."""
    count, ratio = windows.shape[1], p.ratio
    rows[:, first * ratio : (first + count) * ratio, p.channels - p.dim :] = windows[:, :, -ratio:].flatten(1, 2)
    if p.overlap:
        lead = windows[:, :, :ratio].flatten(1, 2)[:, 0 if first else ratio :]
        rows[:, max(first - 1, 0) * ratio : (first + count - 1) * ratio, : p.dim] = lead


@torch.no_grad()
def pooling(p: PoolingProblem, extents: Extents, schedule: None, o: PoolingOperands) -> None:
    """Writes out = sum_p softmax_p(z) kv_p over positions p of each window, per channel; z: gates + position bias."""
    assert o.out is not None
    for b, (count, rows) in enumerate(zip(extents.q_len.tolist(), extents.kv_len.tolist(), strict=True)):
        if count:
            kv, z = _inputs(p, o, b, rows)
            first = int(extents.lo[b])
            kv, z = _windows(kv, p, first, count, 0.0), _windows(z, p, first, count, -torch.inf)
            o.out.sequence(b, p.heads, count).copy_((z.softmax(2) * kv).sum(2))


@torch.no_grad()
def pooling_backward(p: PoolingProblem, extents: Extents, schedule: None, o: PoolingOperands, g: PoolingGrads) -> None:
    """Writes the gradients of rows, gates and position bias, with P = softmax_p(z), z = gates + bias:

    dkv_p = P_p dout,  dz_p = P_p (dout kv_p - sum_p P_p dout kv_p),  dbias = the sum of dz over rows of a position
    """
    total = torch.zeros(p.ratio, p.channels, dtype=torch.float64, device=g.dkv.keep[0].device)
    for b, (count, rows) in enumerate(zip(extents.q_len.tolist(), extents.kv_len.tolist(), strict=True)):
        kv, z = _inputs(p, o, b, rows)
        dkv, dz = torch.zeros_like(kv), torch.zeros_like(z)
        if count:
            first = int(extents.lo[b])
            kv, z = _windows(kv, p, first, count, 0.0), _windows(z, p, first, count, -torch.inf)
            weights, dout = z.softmax(2), g.dout.sequence(b, p.heads, count).double().unsqueeze(2)
            upstream = dout * kv
            _placed(weights * dout, dkv, p, first)
            _placed(weights * (upstream - (weights * upstream).sum(2, keepdim=True)), dz, p, first)
        g.dkv.sequence(b, p.heads, rows).copy_(dkv)
        g.dgate.sequence(b, p.heads, rows).copy_(dz)
        total.index_add_(0, torch.arange(rows, device=dz.device) % p.ratio, dz.sum(0))
    if g.dbias is not None:
        g.dbias.copy_(total)
