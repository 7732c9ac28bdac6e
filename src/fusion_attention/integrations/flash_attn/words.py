"""What flash-attn's arguments mean here: windows, cumulative lengths, what comes back."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from fusion_attention.ir.mask import UNLIMITED, Band
from fusion_attention.torch_ops.dispatch import is_traced

Tensor = torch.Tensor
Window = Sequence[int] | Tensor

_FULL, _CAUSAL = Band.full(), Band.causal()
# Lengths that were read from another device, which waits for it: tensor's id -> (the tensor, its version, numbers).
# The layers of a model read the same ones. Weak, and bounded.
_READ: dict[int, tuple[weakref.ref[Tensor], int, list[int]]] = {}
_ENTRIES = 64


def band_of(causal: bool, window: Window) -> Band:
    """The keys that a row sees, aligned to the lower right corner: -1 is no limit, causal leaves none to the right."""
    left, right = (n if type(n) is int else int(n) for n in window)
    if causal:
        right = 0
    if left < 0:
        if right < 0:
            return _FULL
        if right == 0:
            return _CAUSAL
    return Band.window(left if left >= 0 else UNLIMITED, right if right >= 0 else UNLIMITED)


def numbers(tensor: Tensor) -> list[int]:
    """The whole numbers of a tensor; of one on another device, read once until torch has seen it change."""
    if tensor.device.type == "cpu" or tensor.is_inference():
        return tensor.tolist()
    entry = _READ.get(id(tensor))
    if entry is not None and entry[0]() is tensor and entry[1] == tensor._version:
        return entry[2]
    result: list[int] = tensor.tolist()
    while len(_READ) >= _ENTRIES:
        del _READ[next(iter(_READ))]
    _READ[id(tensor)] = weakref.ref(tensor), tensor._version, result
    return result


def lengths_of(ends: Tensor, name: str) -> list[int] | Tensor:
    """Tokens of every sequence from cumulative ends with a leading 0; a tensor of them in a trace."""
    if is_traced((ends,)):
        return ends.diff().long()
    result = numbers(ends)
    if not result or result[0] != 0:
        first = f"{result[0]} in front" if result else "none"
        raise ValueError(f"flash_attn: {name}: expected cumulative lengths that begin with 0, got {first}")
    return [end - begin for begin, end in itertools.pairwise(result)]


def capped(softcap: float) -> float:
    """Our softcap: what is not above 0 is none."""
    return max(float(softcap), 0.0)


def returned(result: Any, with_probs: bool, *, packed: bool = False) -> Any:
    """out, or (out, lse, None) as flash-attn returns it: lse [B, N, S], packed [N, T]."""
    if not with_probs:
        return result
    out, lse = result
    return out, lse.transpose(0, 1) if packed else lse, None
