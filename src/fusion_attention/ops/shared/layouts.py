"""The shared grave of interface words: layouts, packed lengths, sparse modes and statistics end here.

Above: BSND, sparse_mode, pre/next tokens, eight lanes. Below: RowView, MatrixView, Band intervals, Stats. Loops over
sequences where it must, never over tokens.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fusion_attention.memory import empty
from fusion_attention.waist.kv import MatrixView, RowView
from fusion_attention.waist.mask import INFINITE, Band, tokens
from fusion_attention.waist.problem import Extents, Grads, Operands, Problem, Stats

# Axis order of each layout: batch, sequence, head (None: head and element share the last axis).
LAYOUTS: dict[str, tuple[int | None, int, int | None]] = {
    "BSH": (0, 1, None),
    "SBH": (1, 0, None),
    "BSND": (0, 1, 2),
    "BNSD": (0, 2, 1),
    "TND": (None, 0, 1),
}
FLT_MAX = float(np.finfo(np.float32).max)
LANES = 8
# Views kept for one set of lengths; a caller whose strides change all the time starts over.
_KEPT = 256
EXTRAS = ("q_rope", "k_rope", "bias", "slopes", "blocked", "drop_bits", "sink")
BIAS = EXTRAS.index("bias")


@dataclass(frozen=True)
class Form:
    """How the tensors of a call lie, which kernels do not ask. Crosses an operator's boundary as one line of text.

    Args:
        layout: of q, k, v, rope tensors, out and their gradients.
        bias: "none"; "broadcast" (4-D, size 1 repeats; packed sequences read the upper left corner); packed blocks
            end to end: "blocks" ([N, S1, S2] each) or "row_blocks" ([N, 1, S2] each); "aligned" (4-D, the right
            columns are a sequence's own).
        blocked: "none", "broadcast" (2-D or 4-D), or "diagonal" ([T1, T2], a sequence's block on the diagonal).
        stats: order of packed statistics: "item" (head-major in each sequence) or "token".
    """

    layout: str = "BSND"
    bias: str = "none"
    blocked: str = "none"
    stats: str = "token"

    @property
    def packed(self) -> bool:
        """Sequences lie end to end on one axis."""
        return LAYOUTS[self.layout][0] is None


@dataclass(eq=False, slots=True)
class Call:
    """A lowered call: everything that an operator of autograd.py takes. extras follow EXTRAS.

    memo is shared by all calls that differ in their tensors' memory and content alone, and set by who knows that; a
    copy with other fields has none.
    """

    problem: Problem
    form: Form
    extents: Extents
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    extras: tuple[torch.Tensor | None, ...]
    seed: int = 0
    offset: int = 0
    memo: dict[Any, Any] | None = field(default=None, init=False)


# ---------------------------------------------------------------------------------------------------------- lengths


def lengths_of(ends: np.ndarray) -> np.ndarray:
    """Lengths from inclusive cumulative ends; a tail of zeros after a positive end disables its items."""
    return np.maximum(np.diff(ends, prepend=0), 0)


def broken_end(ends: np.ndarray) -> int:
    """The first item whose end falls below its predecessor's and that is not in a tail of zeros; -1 if none."""
    used = len(np.trim_zeros(ends, "b"))
    falls = np.flatnonzero(ends[:used] < np.append(0, ends[:used])[:used])  # a difference might leave int64
    return int(falls[0]) if len(falls) else -1


# ------------------------------------------------------------------------------------------------------------ bands


def sparse_band(mode: int, pre: int, next_: int, prefix: np.ndarray | None) -> Band:
    """The band of a sparse mode of the training operators, given that a mask came with it.

    0 window from the upper left corner (beside the mask), 1 the mask alone, 2 causal from the upper left, 3 causal to
    the lower right, 4 window to the lower right, 5 and 6 prefix, 7 as 3 and 8 as 2 (their cut sequence: mode_band).
    """
    match mode:
        case 0:
            return Band.window(pre, next_, "start")
        case 2 | 8:
            return Band.causal("start")
        case 3 | 7:
            return Band.causal("end")
        case 4:
            return Band.window(pre, next_, "end")
        case 5 | 6 if prefix is not None:
            return Band.prefix_causal(prefix.tolist())
        case _:
            return Band.full()


def mode_band(
    mode: int, has_mask: bool, pre: int, next_: int, prefix: np.ndarray | None, q_len: np.ndarray, kv_len: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(lo, hi, prefix) per sequence. Without a mask the training operators ignore the mode: everything is visible.

    Modes 7 and 8 shift the diagonal of the one sequence that was cut between two devices: the last (7) or the first
    (8) with query rows.
    """
    if not has_mask:
        return Band.full().resolve(q_len, kv_len)
    lo, hi, prefixes = sparse_band(mode, pre, next_, prefix).resolve(q_len, kv_len)
    rows = np.flatnonzero(q_len)
    if mode in (7, 8) and len(rows):
        cut = rows[-1] if mode == 7 else rows[0]
        hi[cut] = np.clip(kv_len[cut] - q_len[cut] + tokens(next_) + 1, -INFINITE, INFINITE)
    return lo, hi, prefixes


def band_empties_rows(extents: Extents) -> bool:
    """Whether some row of a sequence with keys sees none of them by the band alone."""
    e = extents
    past_the_end = e.q_len - 1 + e.lo >= e.kv_len
    before_the_start = (e.hi <= 0) & (e.prefix <= 0)
    inside_out = (e.lo >= e.hi) & (e.prefix <= 0)
    return bool(((e.q_len > 0) & (e.kv_len > 0) & (past_the_end | before_the_start | inside_out)).any())


# ------------------------------------------------------------------------------------------------------------ views


def row_shape(tensor: torch.Tensor, layout: str, heads: int, dim: int) -> tuple[int, ...]:
    """The shape of a tensor with the batch and sequence axes of another, and rows of dim elements per head."""
    return (*tensor.shape[:-1], dim if LAYOUTS[layout][2] is not None else heads * dim)


def wide(tensor: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """A sink or slopes as kernels read them: in float32, however they came; float64 beside rows of float64."""
    if tensor is None or tensor.dtype == torch.float32 or tensor.dtype == q.dtype == torch.float64:
        return tensor
    return tensor.float()


def row_view(tensor: torch.Tensor, layout: str, heads: int, extents: Extents, side: str) -> RowView:
    """The rows of a tensor of the query ("q") or key ("kv") side."""
    stride = tensor.stride()
    if stride[-1] != 1 and tensor.shape[-1] > 1:
        # Kernels read rows of neighbouring elements; any other last axis is copied, here and nowhere else.
        tensor = tensor.contiguous()
        stride = tensor.stride()
    key = (layout, heads, side, tensor.shape, stride)
    view = extents.memo.get(key) or _keep(extents, key, _row_view(tensor, layout, heads, extents, side))
    return view.over(tensor)


def _keep(extents: Extents, key: Any, found: Any) -> Any:
    """Keeps what depends on lengths and strides alone."""
    if len(extents.memo) >= _KEPT:
        extents.memo.clear()
    extents.memo[key] = found
    return found


def _row_view(tensor: torch.Tensor, layout: str, heads: int, extents: Extents, side: str) -> RowView:
    batch, token, head = LAYOUTS[layout]
    start = extents.q_start if side == "q" else extents.kv_start
    stride_token = tensor.stride(token)
    address = start * stride_token if batch is None else np.arange(len(start)) * tensor.stride(batch)
    dim = tensor.shape[-1] if head is not None else tensor.shape[-1] // max(heads, 1)
    stride_head = tensor.stride(head) if head is not None else dim
    return RowView((), address.astype(np.int64), stride_token, np.full(len(start), stride_head, np.int64), dim)


def matrix_view(tensor: torch.Tensor, form: str, heads: int, extents: Extents) -> MatrixView:
    """A bias or a blocked matrix in one of the forms of Form."""
    count = np.arange(len(extents))
    if form in ("blocks", "row_blocks"):
        return _blocks(tensor.reshape(-1), heads, extents.q_len if form == "blocks" else None, extents.kv_len)
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        # Kernels read along keys with stride 1 or 0. clone() sees to the strides of what has no rows, too.
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    if form == "diagonal":
        address = extents.q_start * tensor.stride(0) + extents.kv_start
        return MatrixView(tensor, address, np.zeros_like(address), np.full_like(address, tensor.stride(0)), 1)
    tensor = tensor.reshape((1,) * (4 - tensor.dim()) + tuple(tensor.shape))
    batch, head, row, key = (s if n > 1 else 0 for s, n in zip(tensor.stride(), tensor.shape, strict=True))
    address = (count * batch).astype(np.int64)
    if form == "aligned":
        address += tensor.shape[-1] - extents.kv_len
    return MatrixView(tensor, address, np.full_like(address, head), np.full_like(address, row), key)


def _blocks(flat: torch.Tensor, heads: int, rows: np.ndarray | None, keys: np.ndarray) -> MatrixView:
    """Blocks [heads, rows, keys] of the sequences, end to end; rows None: one row serves all."""
    if flat.stride(0) != 1:
        flat = flat.contiguous()  # Kernels count a block's elements one by one.
    head = keys if rows is None else rows * keys
    size = heads * head
    row = np.zeros_like(keys) if rows is None else keys
    return MatrixView(flat, np.cumsum(size) - size, head.astype(np.int64), row.astype(np.int64), 1)


def bits_view(bits: torch.Tensor, heads: int, form: Form, sizes: tuple[int, int], extents: Extents) -> MatrixView:
    """Packed drop bits, linear over [B, N, S1, S2] (sizes = S1, S2), or sequence by sequence where rows are packed."""
    if form.packed:
        return _blocks(bits.reshape(-1), heads, extents.q_len, extents.kv_len)
    return _blocks(bits.reshape(-1), heads, np.full(len(extents), sizes[0]), np.full(len(extents), sizes[1]))


def stats_shape(q: torch.Tensor, form: Form, heads: int) -> tuple[int, ...]:
    """[B, N1, S1], or [T1, N1] where rows are packed."""
    batch, token, _ = LAYOUTS[form.layout]
    return (q.shape[0], heads) if batch is None else (q.shape[batch], heads, q.shape[token])


def stats_view(tensor: torch.Tensor, form: Form, heads: int, extents: Extents) -> RowView:
    """Statistics that stats_shape() describes, in the order of form.stats."""
    key = (form.layout, form.stats, heads, tensor.shape)
    view = extents.memo.get(key) or _keep(extents, key, _stats_view(tensor, form, heads, extents))
    return view.over(tensor)


def _stats_view(tensor: torch.Tensor, form: Form, heads: int, extents: Extents) -> RowView:
    count = len(extents)
    if not form.packed:
        rows = tensor.shape[-1]
        return RowView((), np.arange(count) * (heads * rows), 1, np.full(count, rows), 1)
    if form.stats == "token":
        return RowView((), extents.q_start * heads, heads, np.ones(count, np.int64), 1)
    return RowView((), extents.q_start * heads, 1, extents.q_len, 1)


def operands_of(call: Call, out: torch.Tensor, max_: torch.Tensor, sum_: torch.Tensor) -> Operands:
    """The views of a call's tensors, its output and its statistics."""
    p, form, e = call.problem, call.form, call.extents
    layout = form.layout
    return Operands(
        q=row_view(call.q, layout, p.heads_q, e, "q"),
        k=row_view(call.k, layout, p.heads_kv, e, "kv"),
        v=row_view(call.v, layout, p.heads_kv, e, "kv"),
        out=row_view(out, layout, p.heads_q, e, "q"),
        stats=Stats(stats_view(max_, form, p.heads_q, e), stats_view(sum_, form, p.heads_q, e)),
        seed=call.seed,
        offset=call.offset,
        **(_extra_operands(call) if any(t is not None for t in call.extras) else {}),
    )


def _extra_operands(call: Call) -> dict[str, Any]:
    """The operands that a call may lack, as far as it has them."""
    p, form, e = call.problem, call.form, call.extents
    token = LAYOUTS[form.layout][1]
    sizes = (call.q.shape[token], call.k.shape[token])
    build: dict[str, Any] = {
        "q_rope": lambda t: row_view(t, form.layout, p.heads_q, e, "q"),
        "k_rope": lambda t: row_view(t, form.layout, p.heads_kv, e, "kv"),
        "bias": lambda t: matrix_view(t, form.bias, p.heads_q, e),
        "slopes": lambda t: t.reshape(-1, p.heads_q).expand(len(e), p.heads_q),
        # A bool and a byte are the same memory; the view makes one kernel type of them.
        "blocked": lambda t: matrix_view(t.view(torch.uint8), form.blocked, p.heads_q, e),
        "drop_bits": lambda t: bits_view(t, p.heads_q, form, sizes, e),
        "sink": lambda t: t,
    }
    given = zip(EXTRAS, call.extras, strict=True)
    return {name: build[name](tensor) for name, tensor in given if tensor is not None}


def grads_of(call: Call, dout: torch.Tensor, gradients: tuple[torch.Tensor, ...]) -> tuple[Grads, torch.Tensor | None]:
    """The views of gradients = (dq, dk, dv, dq_rope, dk_rope, dbias, dsink), and where dbias is summed if it must be.

    A gradient without elements is not wanted; dbias is as the bias is stored, in its dtype.
    """
    p, form, e = call.problem, call.form, call.extents
    dq, dk, dv, dq_rope, dk_rope, dbias, dsink = gradients
    bias, summed, owned = None, None, False
    if call.extras[BIAS] is not None and dbias.numel():
        if dbias.is_contiguous():
            bias = matrix_view(dbias, form.bias, p.heads_q, e)
            owned = p.bias == "matrix" and _one_pair_each(bias, p.heads_q, e)
        if not owned:
            # Sequences and broadcast axes add up: in the bias's own dtype the sum would lose bits.
            wide = torch.float64 if call.q.dtype == torch.float64 else torch.float32
            summed = empty(dbias, dbias.shape, wide)
            bias = matrix_view(summed, form.bias, p.heads_q, e)
    rope = p.dim_rope > 0
    grads = Grads(
        dout=row_view(dout, form.layout, p.heads_q, e, "q"),
        dq=row_view(dq, form.layout, p.heads_q, e, "q"),
        dk=row_view(dk, form.layout, p.heads_kv, e, "kv"),
        dv=row_view(dv, form.layout, p.heads_kv, e, "kv"),
        dq_rope=row_view(dq_rope, form.layout, p.heads_q, e, "q") if rope else None,
        dk_rope=row_view(dk_rope, form.layout, p.heads_kv, e, "kv") if rope else None,
        dbias=bias,
        dsink=dsink if p.has_sink else None,
        owns_dbias=owned,
    )
    return grads, summed


def _one_pair_each(bias: MatrixView, heads: int, e: Extents) -> bool:
    """Whether no element of a bias belongs to two pairs of a row and a key."""
    some = (e.q_len > 0) & (e.kv_len > 0)
    repeats = (e.q_len[some] > 1) & (bias.stride_row[some] == 0) | (heads > 1) & (bias.stride_head[some] == 0)
    starts = bias.address[some]
    return bias.stride_key == 1 and not repeats.any() and len(np.unique(starts)) == len(starts)


def clear_gradients(call: Call, gradients: tuple[torch.Tensor, ...], summed: torch.Tensor | None) -> None:
    """Zeroes what is added to, and the gradients of tokens, and of elements of a bias, that belong to no sequence."""
    dq, dk, dv, dq_rope, dk_rope, dbias, dsink = gradients
    for side, tensors in (("q", (dq, dq_rope)), ("kv", (dk, dv, dk_rope))):
        if uncovered(call, side):
            for tensor in tensors:
                tensor.zero_()
    if call.problem.has_sink and not len(call.extents):
        dsink.zero_()  # No back end runs.
    if summed is not None:
        summed.zero_()
    elif dbias.numel() and dbias.numel() > call.problem.heads_q * int(call.extents.q_len @ call.extents.kv_len):
        dbias.zero_()


def uncovered(call: Call, side: str) -> bool:
    """Whether some tokens of the query ("q") or key ("kv") side belong to no sequence: their outputs are zero."""
    tensor, e = call.q if side == "q" else call.k, call.extents
    batch, token, _ = LAYOUTS[call.form.layout]
    held = tensor.shape[token]
    key = ("uncovered", side, batch is None, held)
    found: bool | None = e.memo.get(key)
    if found is None:
        lengths = e.q_len if side == "q" else e.kv_len
        found = int(lengths.sum()) != held if batch is None else bool((lengths != held).any())
        _keep(e, key, found)
    return found


# ------------------------------------------------------------------------------------------------------- statistics


def to_lanes(call: Call, max_: torch.Tensor, sum_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Statistics as the training operators return them: finite(), in eight equal lanes."""
    lowest, one = _lanes(max_.device, max_.dtype)
    if not call.extents.keyless:
        return torch.maximum(max_.unsqueeze(-1), lowest), _finite_sum(call, max_, sum_).unsqueeze(-1) * one
    max_, sum_ = finite(call, max_, sum_)
    return max_.unsqueeze(-1) * one, sum_.unsqueeze(-1) * one


def lay_lanes(call: Call, max_: torch.Tensor, sum_: torch.Tensor, to_max: torch.Tensor, to_sum: torch.Tensor) -> None:
    """to_lanes() into given memory."""
    if call.extents.keyless:
        for target, lanes in zip((to_max, to_sum), to_lanes(call, max_, sum_), strict=True):
            target.copy_(lanes)
        return
    lowest, one = _lanes(max_.device, max_.dtype)
    torch.maximum(max_.unsqueeze(-1), lowest, out=to_max)
    torch.mul(_finite_sum(call, max_, sum_).unsqueeze(-1), one, out=to_sum)


def finite(call: Call, max_: torch.Tensor, sum_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Statistics without infinities, in new tensors.

    Empty rows: max -FLT_MAX with sum +FLT_MAX (zero form) or the number of keys (mean form); rows of a sequence
    without keys: 0 and 0.
    """
    finite_max, finite_sum = max_.clamp_min(-FLT_MAX), _finite_sum(call, max_, sum_)
    for view in _keyless(call, finite_max, finite_sum):
        view.zero_()
    return finite_max, finite_sum


def _finite_sum(call: Call, max_: torch.Tensor, sum_: torch.Tensor) -> torch.Tensor:
    if uncovered(call, "q"):
        # Rows of no sequence hold 0 and 0, and keep them.
        return torch.where((max_ == -torch.inf) & (sum_ == 0), FLT_MAX, sum_)
    return torch.threshold(sum_, 0.0, FLT_MAX)  # 0 only in empty rows: any other row adds exp(0)


@functools.lru_cache(maxsize=32)
def _lanes(device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """-FLT_MAX and 1 in every lane: an operation with them is the cheapest way to repeat a number."""
    return torch.full((LANES,), -FLT_MAX, device=device, dtype=dtype), torch.ones(LANES, device=device, dtype=dtype)


def from_lanes(call: Call, max_: torch.Tensor, sum_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What to_lanes() wrote, as kernels keep it."""
    return from_finite(call, max_[..., 0], sum_[..., 0])


def from_finite(call: Call, max_: torch.Tensor, sum_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What finite() made, as kernels keep it."""
    empty = max_ == -FLT_MAX
    # Views of statistics count on their own order, so a caller's strides end here.
    sum_ = torch.where(empty & (sum_ == FLT_MAX), 0.0, sum_).contiguous()
    max_ = torch.where(empty, -torch.inf, max_).contiguous()
    for view in _keyless(call, sum_):
        view.fill_(1.0)  # Nothing is seen there; a sum of 0 would make the sink's share 0 / 0.
    return max_, sum_


def _keyless(call: Call, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """The statistics of the sequences that have rows but no keys."""
    e, heads = call.extents, call.problem.heads_q
    return [
        stats_view(tensor, call.form, heads, e).sequence(int(b), heads, int(e.q_len[b]))
        for b in e.keyless
        for tensor in tensors
    ]
