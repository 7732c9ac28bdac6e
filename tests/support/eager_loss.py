"""Computes the indexer's loss in a few lines of torch from its formula; reference for the tests of the modules.

Uses no saved statistics: a softmax over the keys of each row gives target and distribution. Autograd differentiates
sum(logsumexp(I) - p . I); the value is the KL divergence without clamping.
"""

from typing import Any

import torch
from torch import Tensor


def chosen_keys(indices: Tensor | None, rows: int) -> Tensor:
    """Returns bool [rows, rows]: the keys of a sequence that each row sees and, with indices, selected."""
    visible = torch.ones(rows, rows, dtype=torch.bool).tril()
    if indices is None:
        return visible
    chosen = torch.zeros(rows, rows + 1, dtype=torch.bool)
    chosen.scatter_(1, indices.long().where(indices >= 0, rows), True)
    return visible & chosen[:, :rows]


def one_sequence(
    q: Tensor, k: Tensor, index_q: Tensor, index_k: Tensor, weights: Tensor, keys: Tensor, scale: float
) -> Tensor:
    """Returns the loss of a sequence: q [S, N1, D], k [S, N2, D] (rope parts appended), keys bool [S, S]."""
    with torch.no_grad():
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = torch.einsum("ihd,jhd->hij", q, k) * scale
        p = scores.masked_fill(~keys, -torch.inf).softmax(-1).mean(0)
    index = (torch.einsum("ihd,jd->ihj", index_q, index_k[:, 0]).relu() * weights[..., None]).sum(1)
    index = index.masked_fill(~keys, -torch.inf)
    logs = index.log_softmax(-1).masked_fill(~keys, 0)
    return (torch.special.xlogy(p, p) - p * logs).sum()


def eager_loss(
    q: Tensor,
    k: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    weights: Tensor,
    indices: Tensor | None = None,
    *,
    lengths: Any = None,
    q_rope: Tensor | None = None,
    k_rope: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Returns the loss summed over all rows of padded [B, S, ...] or packed [T, ...] tensors."""
    if q_rope is not None and k_rope is not None:
        q, k = torch.cat([q, q_rope], -1), torch.cat([k, k_rope], -1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    tensors = [q, k, index_q, index_k, weights]
    if q.dim() == 3:
        items = [t.split([int(n) for n in lengths]) for t in (*tensors, *([] if indices is None else [indices]))]
        lists = items[5] if indices is not None else [None] * len(items[0])
    else:
        sizes = [q.shape[1]] * len(q) if lengths is None else [int(n) for n in lengths]
        items = [[row[:n] for row, n in zip(t, sizes, strict=True)] for t in tensors]
        lists = [None if indices is None else indices[b, :n] for b, n in enumerate(sizes)]
    total = q.new_zeros(())
    for *parts, chosen in zip(*items[:5], lists, strict=True):
        keys = chosen_keys(None if chosen is None else chosen[:, 0], len(parts[0]))
        total = total + one_sequence(*parts, keys, scale)
    return total
