"""DenseCall, the tensors and parameters of a training attention call for back ends, and memory views of its tensors."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fusion_attention.ir.memory_views import MatrixView
from fusion_attention.ir.problem import Extents, Grads, Operands, Problem, Stats
from fusion_attention.memory import empty
from fusion_attention.ops.shared import layouts
from fusion_attention.ops.training.block_mask import to_matrix, to_tiles

Tensor = torch.Tensor
EXTRAS = ("q_rope", "k_rope", "bias", "slopes", "blocked", "drop_bits", "sink", "blocked_tiles", "blocked_bits")
BIAS = EXTRAS.index("bias")


@dataclass(eq=False, slots=True)
class DenseCall:
    """The tensors and parameters of a call of training attention, from which back ends compute.

    Args:
        extras: optional tensors (rope, bias, slopes, masks, sink), in the order of EXTRAS.
        seed, offset: from which dropout masks are drawn.
        names: canonical names of q, k, v and extras; "" for tensors that the operator does not have.
    """

    problem: Problem
    form: layouts.Form
    extents: Extents
    q: Tensor
    k: Tensor
    v: Tensor
    extras: tuple[Tensor | None, ...]
    seed: int = 0
    offset: int = 0
    names: tuple[str, ...] = ("q", "k", "v", *EXTRAS)

    @property
    def device(self) -> torch.device:
        return self.q.device

    def covers(self, side: str) -> bool:
        """True if every token of the query tensor (side "q") or of the key tensor ("kv") belongs to a sequence."""
        return layouts.covered(self.q if side == "q" else self.k, self.form.layout, self.extents, side)


def fresh(call: DenseCall, *lanes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Allocates output, softmax max and sum; lanes: size of a further last axis of max and sum, or none."""
    q, p = call.q, call.problem
    return empty(q, layouts.row_shape(q, call.form.layout, p.heads_q, p.dim_v)), *statistics(call, *lanes)


def statistics(call: DenseCall, *lanes: int) -> tuple[Tensor, Tensor]:
    """Allocates softmax max and sum; lanes: size of a further last axis, along which CANN repeats them, or none."""
    q = call.q
    shape = (*layouts.stats_shape(q, call.form.layout, call.problem.heads_q), *lanes)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return empty(q, shape, dtype), empty(q, shape, dtype)


def operands_of(call: DenseCall, out: Tensor, max_: Tensor, sum_: Tensor) -> Operands:
    """Returns memory views of the input tensors, the output, and the softmax statistics max_ and sum_."""
    p, form, e = call.problem, call.form, call.extents
    layout = form.layout
    return Operands(
        q=layouts.row_view(call.q, layout, p.heads_q, e, "q"),
        k=layouts.row_view(call.k, layout, p.heads_kv, e, "kv"),
        v=layouts.row_view(call.v, layout, p.heads_kv, e, "kv"),
        out=layouts.row_view(out, layout, p.heads_q, e, "q"),
        stats=Stats(layouts.stats_view(max_, form, p.heads_q, e), layouts.stats_view(sum_, form, p.heads_q, e)),
        seed=call.seed,
        offset=call.offset,
        **(_extra_operands(call) if any(t is not None for t in call.extras) else {}),
    )


def _extra_operands(call: DenseCall) -> dict[str, Any]:
    """Returns {name: memory view} of the optional input tensors that are not None."""
    p, form, e = call.problem, call.form, call.extents
    token = layouts.LAYOUTS[form.layout][1]
    sizes = (call.q.shape[token], call.k.shape[token])
    build: dict[str, Any] = {
        "q_rope": lambda t: layouts.row_view(t, form.layout, p.heads_q, e, "q"),
        "k_rope": lambda t: layouts.row_view(t, form.layout, p.heads_kv, e, "kv"),
        "bias": lambda t: layouts.matrix_view(t, form.bias, p.heads_q, e),
        "slopes": lambda t: t.reshape(-1, p.heads_q).expand(len(e), p.heads_q),
        # Kernels read bytes; bool and uint8 have the same representation.
        "blocked": lambda t: layouts.matrix_view(t.view(torch.uint8), form.blocked, p.heads_q, e),
        "drop_bits": lambda t: layouts.bits_view(t, p.heads_q, form, sizes, e),
        "sink": lambda t: t,
        "blocked_tiles": lambda t: layouts.matrix_view(t, "broadcast", p.heads_q, e),
        # Strided bits are copied, because kernels require contiguous tiles.
        "blocked_bits": lambda t: t.contiguous(),
    }
    given = {name: t for name, t in zip(EXTRAS, call.extras, strict=True) if t is not None}
    if form.block and "blocked_tiles" in given:
        mask, (rows, keys) = given.pop("blocked_tiles"), form.block
        longest = int(e.q_len.max(initial=0)), int(e.kv_len.max(initial=0))
        if p.has_blocked_tiles:
            given |= to_tiles(mask, (rows, keys), longest)
        else:
            given["blocked"] = to_matrix(mask, (rows, keys), longest)
    return {name: build[name](tensor) for name, tensor in given.items()}


def grads_of(
    call: DenseCall, dout: Tensor, gradients: tuple[Tensor, ...], dlse: Tensor | None = None
) -> tuple[Grads, Tensor | None]:
    """Returns (memory views of dout and of gradients = (dq, dk, dv, dq_rope, dk_rope, dbias, dsink), a buffer to sum
    dbias in, or None if kernels write dbias directly). dbias has the shape and dtype of the bias, and is not computed
    if it has no elements; dlse, the gradient of the log-sum-exp, has the shape of softmax statistics."""
    p, form, e = call.problem, call.form, call.extents
    dq, dk, dv, dq_rope, dk_rope, dbias, dsink = gradients
    bias, summed, owned = None, None, False
    if call.extras[BIAS] is not None and dbias.numel():
        if dbias.is_contiguous():
            bias = layouts.matrix_view(dbias, form.bias, p.heads_q, e)
            owned = p.bias == "matrix" and _one_pair_each(bias, p.heads_q, e)
        if not owned:
            # Sums over sequences and broadcast axes would lose precision in the dtype of the bias.
            sum_dtype = torch.float64 if call.q.dtype == torch.float64 else torch.float32
            summed = empty(dbias, dbias.shape, sum_dtype)
            bias = layouts.matrix_view(summed, form.bias, p.heads_q, e)
    rope = p.dim_rope > 0
    grads = Grads(
        dout=layouts.row_view(dout, form.layout, p.heads_q, e, "q"),
        dq=layouts.row_view(dq, form.layout, p.heads_q, e, "q"),
        dk=layouts.row_view(dk, form.layout, p.heads_kv, e, "kv"),
        dv=layouts.row_view(dv, form.layout, p.heads_kv, e, "kv"),
        dq_rope=layouts.row_view(dq_rope, form.layout, p.heads_q, e, "q") if rope else None,
        dk_rope=layouts.row_view(dk_rope, form.layout, p.heads_kv, e, "kv") if rope else None,
        dbias=bias,
        dsink=dsink if p.has_sink else None,
        owns_dbias=owned,
        dlse=None if dlse is None else layouts.stats_view(dlse, form, p.heads_q, e),
    )
    return grads, summed


def owns_bias(call: DenseCall) -> bool:
    """True if there is a bias each of whose gradient's elements is written once, not accumulated over rows or heads."""
    bias, p, e = call.extras[BIAS], call.problem, call.extents
    if bias is None or p.bias != "matrix":
        return False
    return _one_pair_each(layouts.matrix_view(empty(bias, bias.shape), call.form.bias, p.heads_q, e), p.heads_q, e)


def _one_pair_each(bias: MatrixView, heads: int, e: Extents) -> bool:
    """True if each element of a bias view belongs to at most one score (head, row, key) of all sequences."""
    some = (e.q_len > 0) & (e.kv_len > 0)
    repeats = (e.q_len[some] > 1) & (bias.stride_row[some] == 0) | (heads > 1) & (bias.stride_head[some] == 0)
    starts = bias.address[some]
    return bias.stride_key == 1 and not repeats.any() and len(np.unique(starts)) == len(starts)


def clear_gradients(call: DenseCall, gradients: tuple[Tensor, ...], summed: Tensor | None) -> None:
    """Zeroes `summed`, the accumulated gradient of a bias, and elements of gradients that belong to no sequence."""
    dq, dk, dv, dq_rope, dk_rope, dbias, dsink = gradients
    for side, tensors in (("q", (dq, dq_rope)), ("kv", (dk, dv, dk_rope))):
        if not call.covers(side):
            for tensor in tensors:
                tensor.zero_()
    if call.problem.has_sink and not len(call.extents):
        dsink.zero_()  # No back end runs.
    if summed is not None:
        summed.zero_()
    elif dbias.numel() and dbias.numel() > call.problem.heads_q * int(call.extents.q_len @ call.extents.kv_len):
        dbias.zero_()
