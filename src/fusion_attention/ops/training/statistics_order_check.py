"""A check that packed softmax statistics have the axis order that the arguments of a gradient operator state.

The log-sum-exp max + log(sum) of a row is at least that of a subset of its visible keys, even if it includes more (keys
on other ranks, a sink). A statistic read in the wrong order is another row's, and may be smaller. No other check
computes scores.
"""

import math
from typing import Any

import numpy as np
import torch

from fusion_attention.ops.shared.sparse_modes import mode_band

Tensor = torch.Tensor
# Numbers of sequences, of rows per sequence and of keys per row that are checked.
SEQUENCES, ROWS, KEYS = 16, 8, 2048
# Relative rounding errors: of the least precise products (TF32, ten bits), and of each term of a float32 sum.
PRODUCT, TERM = 2.0**-10, 2.0**-23


def own_matrix(mask: Tensor, b: int, q_len: np.ndarray, kv_len: np.ndarray) -> Tensor:
    """Returns the submatrix [.., q_len, kv_len] of a mask for sequence b: its upper left corner, or, in a mask [T1, T2]
    of all packed sequences, a block on the diagonal."""
    matrix = mask[b] if mask.dim() == 4 and mask.shape[0] > 1 else mask
    corner = mask.shape[-2:] == (q_len.max(), kv_len.max())
    row, key = (0, 0) if corner else (int(q_len[:b].sum()), int(kv_len[:b].sum()))
    return matrix[..., row : row + int(q_len[b]), key : key + int(kv_len[b])]


def statistics_in_order(
    statistics: tuple[Tensor, Tensor],
    order: str,
    rows: tuple[Tensor, Tensor | None],
    keys: tuple[Tensor, Tensor | None],
    scale: float,
    mask: Tensor | None,
    band: tuple[Any, ...],
    q_len: np.ndarray,
    kv_len: np.ndarray,
) -> bool | str:
    """True (else error text) if the softmax statistics are possible in the given order, or impossible in both orders.

    Args:
        statistics: max and sum [T1, N1, 8].
        order: softmax_layout; "": [N1, q_len, 8] of each sequence, concatenated; otherwise [T1, N1, 8].
        rows, keys: (query, query_rope) and (key, key_rope).
        mask: atten_mask, whose content is read if the mode is 0 or 1.
        band: (sparse_mode, pre_tokens, next_tokens, prefix).
    """
    if any(t is not None and t.is_meta for t in (*statistics, *rows, *keys, mask)):
        return True
    mode, pre, next_, prefixes = band
    lo, hi, prefix = mode_band(mode, mask is not None, pre, next_, prefixes, q_len, kv_len)
    whose = "token" if order else "item"
    result = ""
    for b in np.flatnonzero((q_len > 1) & (kv_len > 0))[:SEQUENCES]:
        row, key = (_spread(int(n[b]), most, rows[0].device) for n, most in ((q_len, ROWS), (kv_len, KEYS)))
        at_row, at_key = row[:, None], key[None]
        visible = (at_key >= at_row + int(lo[b])) & (at_key < (at_row + int(hi[b])).clamp(min=int(prefix[b])))
        if mask is not None and mode in (0, 1):
            removed = own_matrix(mask, int(b), q_len, kv_len)[..., row, :][..., key]
            visible = visible & (removed.reshape(-1, len(row), len(key)) == 0)
        least = _least(_of(rows, int(q_len[:b].sum()) + row), _of(keys, int(kv_len[:b].sum()) + key), scale, visible)
        sums = {name: _log_sums(statistics, name, int(b), q_len, row) for name in ("item", "token")}
        beyond = {name: least > lse + (lse.abs() + int(kv_len[b])) * TERM for name, lse in sums.items()}
        if bool(beyond["item" if order else "token"].any()):
            return True
        if not result and bool(beyond[whose].any()):
            head, at = beyond[whose].nonzero()[0].tolist()
            least_sum, lse = float(least[head, at]), float(sums[whose][head, at])
            result = (
                f"item {b}, row {int(row[at])}, head {head}: log-sum {lse:.4g}, keys that add up to {least_sum:.4g}"
            )
    return f"{result}; the other order fits" if result else True


def _spread(count: int, most: int, device: torch.device) -> Tensor:
    """Returns at most `most` integers from 0 to count - 1, evenly spaced."""
    return torch.linspace(0, count - 1, min(count, most), dtype=torch.float64, device=device).long()


def _of(parts: tuple[Tensor, Tensor | None], at: Tensor) -> Tensor:
    """Returns rows `at` of a tensor and its rope tensor (`parts`), concatenated, [rows, heads, elements], float64."""
    return torch.cat([t[at].double() for t in parts if t is not None], -1)


def _least(q: Tensor, k: Tensor, scale: float, visible: Tensor) -> Tensor:
    """Returns a lower bound [N1, rows] of the log-sum-exp of the visible scores, for any rounding of the products."""
    q = q.reshape(len(q), k.shape[1], -1, q.shape[-1])
    scores, sizes = (torch.einsum("rngd,knd->ngrk", *pair).flatten(0, 1) for pair in ((q, k), (q.abs(), k.abs())))
    return (scale * scores - abs(scale) * PRODUCT * sizes).masked_fill(~visible, -math.inf).logsumexp(-1)


def _log_sums(statistics: tuple[Tensor, Tensor], order: str, b: int, q_len: np.ndarray, row: Tensor) -> Tensor:
    """Returns max + log(sum), [N1, rows], of rows `row` of sequence b; order: "token", [T1, N1, 8], or "item"."""
    heads, start = statistics[0].shape[1], int(q_len[:b].sum())
    head = torch.arange(heads, device=row.device)[:, None]
    at = (start + row) * heads + head if order == "token" else start * heads + head * int(q_len[b]) + row
    peak, total = (t.reshape(-1, t.shape[-1])[at, 0].double() for t in statistics)
    return peak + total.log()
