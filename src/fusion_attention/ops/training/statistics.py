"""Conversion of softmax statistics between the kernels' format and CANN's: finite numbers, each stored eight times."""

import functools

import numpy as np
import torch

from fusion_attention.ops.shared.layouts import covered, stats_view
from fusion_attention.ops.training.lowered_call import DenseCall

Tensor = torch.Tensor
FLT_MAX = float(np.finfo(np.float32).max)
LANES = 8


def to_lanes(
    call: DenseCall, max_: Tensor, sum_: Tensor, to_max: Tensor | None = None, to_sum: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns softmax (max, sum) in CANN's format: without infinities, each stored eight times along a new last axis,
    in to_max and to_sum if they are given. Empty rows have max -FLT_MAX, and sum FLT_MAX if they return zeros, or the
    number of keys if they return the mean of V. In rows of a sequence without keys both are 0."""
    lowest, one = _lanes(max_.device, max_.dtype)
    if covered(call.q, call.form.layout, call.extents, "q"):
        total = torch.threshold(sum_, 0.0, FLT_MAX)  # 0 only in empty rows: any other row adds exp(0)
    else:  # Both statistics of rows outside all sequences stay 0.
        total = torch.where((max_ == -torch.inf) & (sum_ == 0), FLT_MAX, sum_)
    if call.extents.keyless:
        max_ = max_.clone()
        for view in _keyless(call, max_, total):
            view.zero_()
    return torch.maximum(max_.unsqueeze(-1), lowest, out=to_max), torch.mul(total.unsqueeze(-1), one, out=to_sum)


@functools.lru_cache(maxsize=32)
def _lanes(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns tensors [8] of -FLT_MAX and of 1: max(m, first) and s * second repeat softmax max m and sum s 8 times."""
    return torch.full((LANES,), -FLT_MAX, device=device, dtype=dtype), torch.ones(LANES, device=device, dtype=dtype)


def from_lanes(call: DenseCall, max_: Tensor, sum_: Tensor) -> tuple[Tensor, Tensor]:
    """Returns softmax (max, sum) in the kernels' format, one number per row and head, from CANN's, [..., 8]."""
    max_, sum_ = max_[..., 0], sum_[..., 0]
    empty = max_ == -FLT_MAX
    # Views of statistics assume contiguous memory.
    sum_ = torch.where(empty & (sum_ == FLT_MAX), 0.0, sum_).contiguous()
    max_ = torch.where(empty, -torch.inf, max_).contiguous()
    for view in _keyless(call, sum_):
        view.fill_(1.0)  # There are no visible keys; a sum of 0 would make the sink's probability 0 / 0.
    return max_, sum_


def _keyless(call: DenseCall, *tensors: Tensor) -> list[Tensor]:
    """Returns views of the rows, in the statistics `tensors`, of sequences that have query rows but no keys."""
    e, heads = call.extents, call.problem.heads_q
    return [
        stats_view(tensor, call.form, heads, e).sequence(int(b), heads, int(e.q_len[b]))
        for b in e.keyless
        for tensor in tensors
    ]
