"""Reads the masks, lengths and positions that transformers' models pass to attention."""

import functools
from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fusion_attention.torch_ops.dispatch import is_traced

Tensor = torch.Tensor
# Results of cached() by name, each with the tensor's version: for an object, because copies share its attributes.
_RESULTS: MutableMapping[Tensor, dict[str, tuple[int, Any]]] = WeakTensorKeyDictionary()


class Padding(NamedTuple):
    """The positions of tokens and padding in a batch of padded sequences."""

    kind: str  # "none" (no padding), "left" (tokens, then padding), "run" (adjacent tokens) or "scattered"
    first: list[int]  # each sequence's first token
    end: list[int]  # the end after its last one


def padding_of(keys: Tensor) -> Padding:
    """Returns the positions of tokens in `keys`, bool [B, T], true for tokens; cached on this mask for all layers."""
    return cached(keys, "padding", read_padding)


def read_padding(keys: Tensor) -> Padding:
    """Returns the kind of padding, and each sequence's first token and end, of `keys`, bool [B, T], true for tokens."""
    length = keys.shape[1]
    if not keys.numel():
        return Padding("none", [0] * len(keys), [length] * len(keys))
    ones = keys.to(torch.uint8)
    count = ones.sum(1)
    edges = torch.stack([ones.argmax(1), length - ones.flip(1).argmax(1), count])
    first, end, counts = edges.tolist()
    end = [e if n else f for e, f, n in zip(end, first, counts, strict=True)]
    if any(e - f != n for f, e, n in zip(first, end, counts, strict=True)):
        return Padding("scattered", first, end)
    if any(first):
        return Padding("run", first, end)
    return Padding("none" if all(e == length for e in end) else "left", first, end)


def cached(tensor: Tensor, name: str, compute: Callable[[Tensor], Any]) -> Any:
    """Returns compute(tensor), cached until the tensor changes, because all layers of a forward share a mask. name: key
    of the result among those of the tensor. The result must not be a view, which would keep the tensor alive."""
    entries = _RESULTS.get(tensor)
    if entries is None:
        if tensor.is_inference():
            return compute(tensor)  # inference tensors have no version to compare
        entries = _RESULTS[tensor] = {}
    version = 0 if tensor.is_inference() else tensor._version
    if name not in entries or entries[name][0] != version:
        entries[name] = version, compute(tensor)
    return entries[name][1]


def never_changes(tensor: Tensor) -> None:
    """Lets cached() keep the results of an inference tensor, whose changes it cannot see."""
    _RESULTS[tensor] = {}


def hidden(tensor: Tensor) -> bool:
    """True if a tensor's content must not be read: while torch traces, and on the meta device."""
    return tensor.is_meta or is_traced((tensor,))


def content_of(tensor: Tensor, name: str, compute: Callable[[Tensor], Any]) -> Any:
    """Returns compute(tensor), cached until the tensor's content changes; not cached while torch traces."""
    return compute(tensor) if hidden(tensor) else cached(tensor, name, compute)


def run_lengths(ids: Tensor) -> Any:
    """Returns the lengths of the runs of equal numbers in ids [B, S], as a list; no run crosses batch items. While
    torch traces it returns int64 [B * S], padded with zeros."""
    apart = (ids + torch.arange(len(ids), device=ids.device)[:, None] * ids.shape[1]).flatten()
    if hidden(ids):
        # A trace cannot depend on the number of runs: the result has one length per token, most of them 0.
        run = (apart != apart.roll(1)).long()
        run = torch.cat([run[:1] * 0, run[1:]]).cumsum(0)
        return torch.zeros_like(run).scatter_add_(0, run, torch.ones_like(run))
    return torch.unique_consecutive(apart, return_counts=True)[1].tolist()


def _restarting(position_ids: Tensor, batch: int) -> Any:
    """Returns the lengths of packed sequences, whose position_ids [B or 1, S] restart at 0; None if there are none."""
    starts = position_ids[:, 1:] != position_ids[:, :-1] + 1
    packed = (~starts | (position_ids[:, 1:] == 0)).all()  # a jump to another position is within a sequence
    if position_ids.is_meta or (not hidden(position_ids) and not (starts.any() and packed)):
        return None
    starts = starts & packed
    return run_lengths(torch.nn.functional.pad(starts.long().cumsum(1), (1, 0)).expand(batch, -1))


def packed_lengths(
    ids: Tensor | None, ends: Tensor | None, key_ends: Tensor | None, position_ids: Tensor | None, q: Tensor, k: Tensor
) -> tuple[Any, Any]:
    """Returns (query lengths, key lengths) of packed sequences, or (None, None) if the batch [B, S, ...] is not packed.
    ids: int64 [B, S], the sequence number of each token. ends, key_ends: cumulative lengths with a leading 0.
    position_ids: [B or 1, S], of a causal layer."""
    if ids is not None:
        lengths = content_of(ids, "lengths", run_lengths)
        return lengths, lengths
    if ends is not None:
        lengths = _of_ends(ends)
        return lengths, lengths if key_ends is None else _of_ends(key_ends)
    rows = q.shape[1]
    if position_ids is None or position_ids.dim() != 2 or not 1 < rows == k.shape[1] == position_ids.shape[1]:
        return None, None  # sequences restart only without cached keys, and with one position per row
    runs = functools.partial(_restarting, batch=len(q))
    lengths = runs(position_ids) if q.device.type == "cpu" else content_of(position_ids, "runs", runs)
    return lengths, lengths


def _of_ends(ends: Tensor) -> Any:
    """Returns sequence lengths from cumulative ends [n + 1] with a leading 0: a list, on a GPU cached until `ends`
    changes; while torch traces, an int tensor [n]."""

    def between(ends: Tensor) -> Any:
        lengths = ends[1:] - ends[:-1]
        return lengths if hidden(ends) else lengths.tolist()

    return between(ends) if ends.device.type == "cpu" else content_of(ends, "between", between)
