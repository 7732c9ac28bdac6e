"""torch_npu's functions that merge partial results of attention: of a ring's two steps, and of a list of ranks.

The arithmetic is waist/merge.py's; here layouts, lanes, and what the statistics of empty rows look like.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from fusion_attention.contract import ContractError, Failure, intact, no_tensor, show, to_array
from fusion_attention.torch_ops.aliases import aliased
from fusion_attention.waist.merge import Partial, empty_partial, merge

__all__ = ["npu_attention_update", "npu_ring_attention_update"]

Tensor = torch.Tensor
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_LOWEST, _LARGEST = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
_OUTS = ("prev_attn_out", "cur_attn_out")
_STATISTICS = ("prev_softmax_max", "prev_softmax_sum", "cur_softmax_max", "cur_softmax_sum")
_LANES = 8


@aliased
def npu_ring_attention_update(
    prev_attn_out: Tensor,
    prev_softmax_max: Tensor,
    prev_softmax_sum: Tensor,
    cur_attn_out: Tensor,
    cur_softmax_max: Tensor,
    cur_softmax_sum: Tensor,
    *,
    actual_seq_qlen: Tensor | Sequence[int] | None = None,
    input_layout: str = "SBH",
    input_softmax_layout: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention to the keys of two steps of a ring, from the results of each.

    max = maximum(prev_max, cur_max),  w_i = sum_i * exp(max_i - max),  sum = w_prev + w_cur
    out = (w_prev * prev_out + w_cur * cur_out) / sum

    Args:
        prev_attn_out, cur_attn_out: [S, B, H] or [T, N, D], as npu_fusion_attention returns them.
        prev_softmax_max, prev_softmax_sum, cur_softmax_max, cur_softmax_sum: float32 in eight equal lanes:
            [B, N, S, 8], or [T, N, 8].
        actual_seq_qlen: TND: cumulative ends of the sequences; a 0 before them is allowed.
        input_layout: "SBH" or "TND".
        input_softmax_layout: of TND: "TND", statistics lie token by token; "" or "SBH", head by head in each sequence.

    Returns:
        (attn_out, softmax_max, softmax_sum) in the dtypes and layouts that came. A row that has seen no key in either
        step keeps its statistics.

    Raises:
        ContractError: shapes, dtypes, layouts or lengths that do not fit.
        NotImplementedError: a tensor that waits for a gradient; npu_fusion_attention_grad takes merged statistics.

    Source: Ascend op-plugin, npu_ring_attention_update.

    Example:
        >>> from fusion_attention import npu
        >>> q, k = torch.randn(2, 6, 1, 32)
        >>> steps = [npu.npu_fusion_attention(q, part, part, 4, "SBH")[:3] for part in k.split(3)]
        >>> out, *_ = npu_ring_attention_update(*steps[0], *steps[1])
        >>> torch.allclose(out, npu.npu_fusion_attention(q, k, k, 4, "SBH")[0], atol=1e-6)
        True
    """
    name, layouts = "npu_ring_attention_update", (input_layout, input_softmax_layout)
    outs, stats = (prev_attn_out, cur_attn_out), (prev_softmax_max, prev_softmax_sum, cur_softmax_max, cur_softmax_sum)
    _refuse(name, list(_ring_failures(outs, stats, actual_seq_qlen, *layouts)))
    _demand(name, (*_OUTS, *_STATISTICS), (*outs, *stats))
    heads = prev_softmax_max.shape[1]
    order = None
    if input_layout == "TND" and input_softmax_layout != "TND":
        order = _head_major(to_array(actual_seq_qlen).tolist(), heads).to(prev_attn_out.device)
    with torch.no_grad():
        prev, cur = (
            _partial(out, _by_token(max_, order), _by_token(sum_, order), heads)
            for out, max_, sum_ in zip(outs, stats[::2], stats[1::2], strict=True)
        )
        kept = [_by_token(t, order) for t in stats[:2]]
        merge(prev, cur)
        seen = prev.sum != 0  # NaN too
        mean = prev.max == -torch.inf
        found = (
            torch.where(seen, torch.where(mean, _LOWEST, prev.max), kept[0]),
            torch.where(seen, prev.sum, kept[1]),
        )
        max_, sum_ = (_in_lanes(t, stats[0], order) for t in found)
        return prev.out.reshape(prev_attn_out.shape).to(prev_attn_out.dtype), max_, sum_


@aliased
def npu_attention_update(
    lse: Sequence[Tensor], local_out: Sequence[Tensor], update_type: int
) -> tuple[Tensor, Tensor | None]:
    """Attention to the keys of several ranks, from the result of each.

    lse_m = log(sum_i exp(lse_i)),  out = sum_i exp(lse_i - lse_m) * local_out_i

    Args:
        lse: of every rank, float32 [rows]; +inf or -inf: the row saw no key there.
        local_out: of every rank, [rows, D].
        update_type: 0: out alone; 1: out and lse_m.

    Returns:
        (out, lse_m): out in the dtype of local_out; lse_m float32 [rows], or None. A row without keys on any rank is 0,
        its lse_m -inf.

    Raises:
        ContractError: shapes, dtypes or numbers of tensors that do not fit.
        NotImplementedError: a tensor that waits for a gradient.

    Source: Ascend op-plugin, npu_attention_update.

    Example:
        >>> out, lse = npu_attention_update([torch.zeros(1), torch.zeros(1)], [torch.ones(1, 8), torch.zeros(1, 8)], 1)
        >>> out[0, 0].item(), lse.exp().item()
        (0.5, 2.0)
    """
    name = "npu_attention_update"
    _refuse(name, list(_list_failures(lse, local_out, update_type)))
    names = [f"{param}[{i}]" for param in ("lse", "local_out") for i in range(len(lse))]
    _demand(name, names, (*lse, *local_out))
    with torch.no_grad():
        out = local_out[0]
        found = empty_partial(out, tuple(out.shape[:1]), out.shape[1])
        for peak, part in zip(lse, local_out, strict=True):
            top = torch.where(peak == torch.inf, -torch.inf, peak)
            merge(found, Partial(part.float(), top, (top != -torch.inf).float()))
        return found.out.to(out.dtype), found.max + found.sum.log() if update_type == 1 else None


# ------------------------------------------------------------------------------------------------------- what is wrong


def _refuse(name: str, failures: list[tuple[str, ...]]) -> None:
    if failures:
        raise ContractError([Failure(name, *failure) for failure in failures])  # type: ignore[arg-type]


def _demand(name: str, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    """Memory under every tensor, on one device, and none that waits for a gradient."""
    device = tensors[0].device
    _refuse(
        name,
        [
            (param, f"a tensor on {device} as {names[0]}", f"one on {t.device}", f'move it: .to("{device}")')
            for param, t in zip(names, tensors, strict=True)
            if t.device != device
        ],
    )
    intact(name, names, tensors)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise NotImplementedError(
            f"fusion_attention: {name} has no derivative: detach() its tensors, or call it inside an autograd.Function "
            "(attention's gradient takes merged statistics)"
        )


def _ring_failures(
    outs: tuple[Any, Any], stats: tuple[Any, ...], lengths: Any, layout: Any, softmax_layout: Any
) -> Iterator[tuple[str, ...]]:
    """(parameter, what was expected, what came, what to do) of everything that is wrong."""
    known = {"input_layout": (layout, ("SBH", "TND")), "input_softmax_layout": (softmax_layout, ("", "SBH", "TND"))}
    wrong = {name: given for name, (given, words) in known.items() if not isinstance(given, str) or given not in words}
    for name, given in wrong.items():
        yield name, '"SBH" or "TND"' if name == "input_layout" else '"", "SBH" or "TND"', show(given)
    if wrong:
        return
    of_out = list(zip(_OUTS, outs, strict=True))
    of_stats = list(zip(_STATISTICS, stats, strict=True))
    missing = [(name, *fault) for name, t in (*of_out, *of_stats) if (fault := no_tensor(t, False))]
    yield from missing
    if missing:
        return
    first = outs[0]
    for name, t in of_out:
        if t.dim() != 3 or t.dtype not in _FLOATS or t.shape != first.shape or t.dtype != first.dtype:
            yield name, "float32, float16 or bfloat16 of three axes, alike before and now", _said(t)
            return
    axes = 4 if layout == "SBH" else 3
    shape = stats[0].shape
    for name, t in of_stats:
        if t.dim() != axes or t.dtype != torch.float32 or t.shape != shape or t.shape[-1] != _LANES:
            yield name, f"float32 of {axes} axes, the last one of eight lanes, all four alike", _said(t)
            return
    if not _covers(first.shape, shape, layout):
        yield "prev_softmax_max", "a number for every row and head of prev_attn_out", _said(stats[0])
    if layout == "TND":
        yield from _length_failures(lengths, first.shape[0])


def _covers(out: Sequence[int], stats: Sequence[int], layout: str) -> bool:
    """Whether statistics have the rows of out, and heads that divide it."""
    if layout == "TND":
        return tuple(out[:2]) == tuple(stats[:2])
    return (out[1], out[0]) == (stats[0], stats[2]) and stats[1] > 0 and out[2] % stats[1] == 0


def _length_failures(lengths: Any, tokens: int) -> Iterator[tuple[str, ...]]:
    ends = to_array(lengths)
    if isinstance(ends, np.ndarray) and ends.dtype == np.int64:
        if not any(a > b for a, b in itertools.pairwise([0, *ends.tolist(), tokens])):
            return
        lengths = ends.tolist()
    yield (
        "actual_seq_qlen",
        f"cumulative ends of the sequences in TND, ascending to {tokens} tokens at most",
        show(lengths),
    )


def _list_failures(lse: Any, local_out: Any, update_type: Any) -> Iterator[tuple[str, ...]]:
    if isinstance(update_type, bool) or not isinstance(update_type, int) or update_type not in (0, 1):
        yield "update_type", "0 or 1", show(update_type)
    for name, given in (("lse", lse), ("local_out", local_out)):
        if not isinstance(given, (list, tuple)) or not given or not all(isinstance(t, torch.Tensor) for t in given):
            yield name, "a list of tensors, one of every rank", show(given)
            return
    for name, given in (("lse", lse), ("local_out", local_out)):
        for i, t in enumerate(given):
            if fault := no_tensor(t, False):
                yield f"{name}[{i}]", *fault
                return
    if len(lse) != len(local_out):
        yield "lse", f"as many tensors as local_out has, {len(local_out)}", str(len(lse))
        return
    first = local_out[0]
    for i, t in enumerate(local_out):
        if t.dim() != 2 or t.dtype not in _FLOATS or t.shape != first.shape or t.dtype != first.dtype:
            yield f"local_out[{i}]", "float32, float16 or bfloat16 [rows, D], alike on all ranks", _said(t)
            return
    for i, t in enumerate(lse):
        if t.dtype != torch.float32 or t.shape != first.shape[:1]:
            yield f"lse[{i}]", f"float32 [{first.shape[0]}]", _said(t)


def _said(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}"


# ---------------------------------------------------------------------------------------------------- from lanes, back


def _head_major(ends: Sequence[int], heads: int) -> Tensor:
    """[tokens * heads]: where the statistics of (token, head) lie that are head by head in each sequence."""
    places, start = [], 0
    for end in ends:
        token, head = torch.arange(end - start)[:, None], torch.arange(heads)
        places.append((start * heads + head * (end - start) + token).flatten())
        start = end
    return torch.cat(places) if places else torch.zeros(0, dtype=torch.int64)


def _by_token(lanes: Tensor, order: Tensor | None) -> Tensor:
    """[S, B, N] or [T, N]: a statistic's first lane."""
    one = lanes[..., 0]
    if one.dim() == 3:
        return one.permute(2, 0, 1)
    if order is None:
        return one
    found = one.flatten().clone()  # tokens of no sequence stay as they are
    found[: len(order)] = one.flatten()[order]
    return found.view(one.shape)


def _in_lanes(one: Tensor, like: Tensor, order: Tensor | None) -> Tensor:
    """What _by_token() reads, as it came."""
    if like.dim() == 4:
        one = one.permute(1, 2, 0)
    elif order is not None:
        found = one.flatten().clone()
        found[order] = one.flatten()[: len(order)]
        one = found.view(one.shape)
    return one.unsqueeze(-1).repeat_interleave(_LANES, -1)


def _partial(out: Tensor, max_: Tensor, sum_: Tensor, heads: int) -> Partial:
    """Float32 copies; statistics of empty rows as kernels have them."""
    empty = max_ == _LOWEST
    total = torch.where(empty & (sum_ == _LARGEST), 0.0, sum_)
    peak = torch.where(empty | (total == 0), -torch.inf, max_)
    rows = out.reshape(*max_.shape[:-1], heads, -1).to(torch.float32, copy=True)
    return Partial(rows, peak.contiguous().clone(), total.contiguous().clone())
