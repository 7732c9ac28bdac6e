"""Arguments as rules see them: host integers as int64 arrays, lists of tensors as tuples, blanks as nothing.

Refuses to know what any operator computes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fusion_attention.record import Op


def members(value: Any) -> Any:
    """A list of tensors as a tuple, one tensor as a tuple of one; else what came."""
    if isinstance(value, torch.Tensor):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def to_array(value: Any) -> Any:
    """Host integers as a new int64 array, from a list, a tuple, a range, an array or a tensor; else what came."""
    array = value
    try:
        if isinstance(value, torch.Tensor):
            array = value.detach().cpu().numpy()
        elif isinstance(value, (list, tuple, range)):
            array = np.asarray(value) if len(value) else np.zeros(0, np.int64)
    except Exception:  # Elements that are no numbers, a tensor without memory: not integers, whatever else they are.
        return value
    if isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype in (np.int64, np.int32):
        # A copy: callers change lengths in place, and what follows from these is kept.
        return array.astype(np.int64, copy=array is value or isinstance(value, torch.Tensor))
    return value.tolist() if isinstance(value, np.ndarray) else value


def array_of(op: Op, position: int, value: Any) -> Any:
    """to_array() of an argument; None where it is optional and came as a tensor without elements."""
    if isinstance(value, torch.Tensor) and value.numel() == 0 and op.blank_is_absent and op.params[position].optional:
        return None
    return to_array(value)
