"""Compressed keys: windows of rows pooled by a softmax per channel, in torch's own operators."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def pooled(rows: Tensor, gates: Tensor, ratio: int, overlap: bool, *, first: bool = True) -> Tensor:
    """Pools windows of `ratio` rows of [B, tokens, ..., C] to [B, windows, ..., D]; ratio divides tokens.

        out[w, d] = sum_p softmax_p(gates[p, d]) * rows[p, d]

    Without overlap, p are the rows of window w and D = C. With overlap, D = C / 2 and p are two sets of rows: the first
    D channels of window w - 1 and the last D channels of window w. first: window 0 has no window before it; otherwise
    the first window is the one before the first result. Computes in float32, or in float64 for float64 rows.
    """
    dtype = torch.promote_types(rows.dtype, torch.float32)
    x, z = (t.to(dtype).unflatten(1, (t.shape[1] // ratio, ratio)) for t in (rows, gates))
    if overlap:
        x, z = _with_previous(x, 0.0), _with_previous(z, -torch.inf)
        if not first:
            x, z = x[:, 1:], z[:, 1:]
    return (z.softmax(2) * x).sum(2).to(rows.dtype)


def _with_previous(windows: Tensor, absent: float) -> Tensor:
    """Windows of twice the rows, [B, windows, 2 * ratio, ..., D]: the first D channels of the previous window, then the
    last D channels of the window; absent: value before the first window."""
    half = windows.shape[-1] // 2
    previous, current = windows[..., :half], windows[..., half:]
    none = torch.full_like(previous[:, :1], absent)
    return torch.cat((torch.cat((none, previous[:, :-1]), 1), current), 2)
