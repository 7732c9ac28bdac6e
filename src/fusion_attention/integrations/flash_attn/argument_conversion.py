"""Conversion of flash-attn's arguments and results: windows, cumulative lengths, lse."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from fusion_attention.integrations.transformers_masks import cached
from fusion_attention.ir.mask import UNLIMITED, Band
from fusion_attention.torch_ops.dispatch import is_traced

Tensor = torch.Tensor
Window = Sequence[int] | Tensor

NO_WINDOW = (-1, -1)
_FULL, _CAUSAL = Band.full(), Band.causal()


def band_of(causal: bool, window: Window) -> Band:
    """Returns the Band (range of keys) for flash-attn's window (left, right), aligned to the last key; -1: no limit on
    that side; causal: right counts as 0."""
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
    """Returns a tensor's integers as a list, on a GPU cached, so that a model's layers share one synchronizing read."""
    if tensor.device.type == "cpu":
        return tensor.tolist()
    result: list[int] = cached(tensor, "numbers", lambda t: t.tolist())
    return result


def lengths_of(ends: Tensor, name: str) -> list[int] | Tensor:
    """Returns the length of each sequence from cumulative lengths `ends` with a leading 0; while torch traces, as a
    tensor. name: the argument's name, for the error."""
    if is_traced((ends,)):
        return ends.diff().long()
    result = numbers(ends)
    if not result or result[0] != 0:
        first = f"{result[0]} in front" if result else "none"
        raise ValueError(f"flash_attn: {name}: expected cumulative lengths that begin with 0, got {first}")
    return [end - begin for begin, end in itertools.pairwise(result)]


def capped(softcap: float) -> float:
    """Converts flash-attn's softcap (at most 0 for no cap) to that of attention(): 0 for no cap."""
    return max(float(softcap), 0.0)


def returned(result: Any, with_probs: bool, *, packed: bool = False) -> Any:
    """Returns attention()'s `result`, or, if `with_probs`, (out, lse, None) with lse [B, N1, S1] or packed [N1, T1]."""
    if not with_probs:
        return result
    out, lse = result
    return out, lse.transpose(0, 1) if packed else lse, None
