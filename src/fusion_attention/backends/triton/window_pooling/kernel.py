"""Kernels of pooling, out[w, d] = sum over rows p of window w of softmax_p(gate + bias)[p, d] * x[p, d]; gradients.

A program computes some channels d of one window. A window with overlap pools the first channels of the previous
window's rows, and the last channels of its rows. Each half of a row is pooled by one window, so no two programs write
to the same element. The gradient of a bias is a sum over windows: each program adds a fixed range of them, in order.

Common parameters: q and k are the memory of rows x and gates; at_x, step_x, at_z and step_z are their first elements
and strides of a row; w is a window of RATIO rows, d its channels (of DIM), `half` 0 for the previous window's rows (if
HALVES is 2), r0 the first of BR rows; top and total are the softmax's maximum and sum.
"""

# mypy: disable-error-code="no-untyped-def"
# Annotations are for Triton, which evaluates them: tl.constexpr marks compile-time values.

import triton
import triton.language as tl

from fusion_attention.backends.triton.common import layout_index
from fusion_attention.backends.triton.common.kernels import rows_at
from fusion_attention.backends.triton.selected.selection import token_at

INFINITE = tl.constexpr(float("inf"))
LEAST = tl.constexpr(-745.0)  # the logarithm of float64's smallest positive number


@triton.jit
def _window(tokens, lengths, count, n):
    """Returns int64 (sequence, index of the pooled row in it, number of its window) of pooled row n of all sequences.

    tokens: (sequence, index) of every pooled row. lengths: table of lengths, of `count` sequences.
    """
    b, row = token_at(tokens, n)
    return b, row, row + tl.load(lengths + 2 * count + b)


@triton.jit
def _rows(w, r0, half, d, RATIO: tl.constexpr, HALVES: tl.constexpr, DIM: tl.constexpr, BR: tl.constexpr):
    """Returns (positions in the window, row numbers, columns, mask [rows, columns]) of BR rows that window w pools for
    channels d, from position r0 on; half 0: the previous window's rows if windows overlap (HALVES 2), else its own."""
    position = r0 + tl.arange(0, BR)
    row = (w - (HALVES - 1 - half)) * RATIO + position
    return position, row, half * DIM + d, ((position < RATIO) & (row >= 0))[:, None] & (d < DIM)[None, :]


@triton.jit
def _gates(k, bias, at, step, position, row, column, there, RATIO: tl.constexpr, HALVES: tl.constexpr,
           DIM: tl.constexpr, HAS_BIAS: tl.constexpr):  # fmt: skip
    """Returns float32 [rows, channels], the gates k (logits of the pooling softmax) of rows plus the bias of their
    positions in the window; -inf where `there` is false. at, step: offset of the first row, stride of a row."""
    z = tl.load(k + at + row[:, None] * step + column[None, :], mask=there, other=-INFINITE).to(tl.float32)
    if HAS_BIAS:
        z += tl.load(bias + position[:, None] * (HALVES * DIM) + column[None, :], mask=there, other=0.0)
    return z


@triton.jit
def _softmax(k, bias, at, step, w, d, RATIO: tl.constexpr, HALVES: tl.constexpr, DIM: tl.constexpr,
             HAS_BIAS: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """Returns [BD] (max of the gates, 0 if all are -inf; sum of exp(gate - max)) over rows of window w, for channels d.
    k: memory of the gates; at, step: offset and stride of its rows."""
    top, total = tl.full([BD], -INFINITE, tl.float32), tl.zeros([BD], tl.float32)
    for half in tl.static_range(HALVES):
        for r0 in tl.range(0, RATIO, BR):
            position, row, column, there = _rows(w, r0, half, d, RATIO, HALVES, DIM, BR)
            z = _gates(k, bias, at, step, position, row, column, there, RATIO, HALVES, DIM, HAS_BIAS)
            new = tl.maximum(top, tl.max(z, 0))  # NaN reaches the sum
            base = tl.where(new == -INFINITE, 0.0, new)
            total = total * tl.exp(top - base) + tl.sum(tl.exp(z - base[None, :]), 0)
            top = new
    return tl.where(top == -INFINITE, 0.0, top), total


@triton.jit
def _weighed(q, k, bias, at_x, step_x, at_z, step_z, top, total, w, r0, half, d, RATIO: tl.constexpr,
             HALVES: tl.constexpr, DIM: tl.constexpr, HAS_BIAS: tl.constexpr, BR: tl.constexpr):  # fmt: skip
    """Returns (row numbers, columns, mask, gates minus their maximum, values, softmax weights) of BR rows of window w
    from r0 on. q, k: values, gates; at_*, step_*: their offsets, row strides; top, total: softmax maximum and sum."""
    position, row, column, there = _rows(w, r0, half, d, RATIO, HALVES, DIM, BR)
    gap = _gates(k, bias, at_z, step_z, position, row, column, there, RATIO, HALVES, DIM, HAS_BIAS) - top[None, :]
    x = tl.load(q + at_x + row[:, None] * step_x + column[None, :], mask=there, other=0.0).to(tl.float32)
    return row, column, there, gap, x, tl.exp(gap) / total[None, :]


@triton.jit
def _pooled(q, k, bias, at_x, step_x, at_z, step_z, top, total, w, d, RATIO: tl.constexpr, HALVES: tl.constexpr,
            DIM: tl.constexpr, HAS_BIAS: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """Returns float32 [BD], sum of softmax weight * value over the rows of window w, for channels d; infinite values
    stay unless their weight is 0 in float64 too. q, k: values, gates; top, total: softmax maximum and sum."""
    acc = tl.zeros([BD], tl.float32)
    for half in tl.static_range(HALVES):
        for r0 in tl.range(0, RATIO, BR):
            _, _, there, gap, x, weights = _weighed(q, k, bias, at_x, step_x, at_z, step_z, top, total, w, r0, half, d,
                                                    RATIO, HALVES, DIM, HAS_BIAS, BR)  # fmt: skip
            lasting = (tl.abs(x) == INFINITE) & (gap > LEAST)
            acc += tl.sum(tl.where(there, tl.where(lasting, x, weights * x), 0.0), 0)
    return acc


@triton.jit
def _delta(q, k, bias, at_x, step_x, at_z, step_z, top, total, upstream, acc, w, d, RATIO: tl.constexpr,
           HALVES: tl.constexpr, DIM: tl.constexpr, HAS_BIAS: tl.constexpr, BR: tl.constexpr,
           BD: tl.constexpr):  # fmt: skip
    """Returns [BD], sum of P * dP over rows of window w (P: softmax weights, dP = upstream * value): upstream * acc, or
    term by term if upstream is infinite. acc, upstream: pooled row, its gradient; top, total: softmax maximum, sum."""
    infinite = tl.abs(upstream) == INFINITE
    delta = upstream * acc
    if tl.max(infinite.to(tl.int32), 0) > 0:
        terms = tl.zeros([BD], tl.float32)
        for half in tl.static_range(HALVES):
            for r0 in tl.range(0, RATIO, BR):
                _, _, there, _, x, weights = _weighed(q, k, bias, at_x, step_x, at_z, step_z, top, total, w, r0, half,
                                                      d, RATIO, HALVES, DIM, HAS_BIAS, BR)  # fmt: skip
                terms += tl.sum(tl.where(there, weights * (upstream[None, :] * x), 0.0), 0)
        delta = tl.where(infinite, terms, delta)
    return delta


@triton.jit(do_not_specialize=["count"])
def pool(q, k, bias, out, strides, lengths, tokens, count: tl.int32, RATIO: tl.constexpr, HALVES: tl.constexpr,
         DIM: tl.constexpr, HAS_BIAS: tl.constexpr, ALIGN: tl.constexpr, BR: tl.constexpr,
         BD: tl.constexpr):  # fmt: skip
    """Writes BD channels of one pooled row, sum over a window of softmax(gate + bias) * x; q: rows x; k: gates; HALVES:
    2 if windows overlap. Grid (pooled rows, heads, blocks of BD channels)."""
    h, d = tl.program_id(1).to(tl.int64), tl.program_id(2) * BD + tl.arange(0, BD)
    b, row, w = _window(tokens, lengths, count, tl.program_id(0))
    at_x, step_x = rows_at(strides, count, b, h, layout_index.Q, ALIGN)
    at_z, step_z = rows_at(strides, count, b, h, layout_index.K, ALIGN)
    top, total = _softmax(k, bias, at_z, step_z, w, d, RATIO, HALVES, DIM, HAS_BIAS, BR, BD)
    acc = _pooled(q, k, bias, at_x, step_x, at_z, step_z, top, total, w, d, RATIO, HALVES, DIM, HAS_BIAS, BR, BD)
    at, step = rows_at(strides, count, b, h, layout_index.OUT, ALIGN)
    tl.store(out + at + row * step + d, acc.to(out.dtype.element_ty), mask=d < DIM)


@triton.jit(do_not_specialize=["count", "plane"])
def pool_gradient(q, k, bias, dout, dq, dk, notes, strides, lengths, tokens, count: tl.int32, plane: tl.int64,
                  RATIO: tl.constexpr, HALVES: tl.constexpr, DIM: tl.constexpr, HAS_BIAS: tl.constexpr,
                  ALIGN: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """Writes BD channels of the gradients of a window's rows (dq) and gates (dk) from the pooled row's gradient dout.

    Grid (pooled rows, heads, blocks of BD channels). q: rows x; k: gates; tokens: (sequence, index) of every pooled
    row; HALVES: 2 if windows overlap. With a bias, `notes` receives for pool_bias() three planes of `plane` elements,
    [pooled rows, heads, DIM]: the softmax's maximum and sum, and sum(P * x * dout).
    """
    n, h, d = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2) * BD + tl.arange(0, BD)
    b, of_result, w = _window(tokens, lengths, count, n)
    at_x, step_x = rows_at(strides, count, b, h, layout_index.Q, ALIGN)
    at_z, step_z = rows_at(strides, count, b, h, layout_index.K, ALIGN)
    top, total = _softmax(k, bias, at_z, step_z, w, d, RATIO, HALVES, DIM, HAS_BIAS, BR, BD)
    acc = _pooled(q, k, bias, at_x, step_x, at_z, step_z, top, total, w, d, RATIO, HALVES, DIM, HAS_BIAS, BR, BD)
    at, step = rows_at(strides, count, b, h, layout_index.DOUT, ALIGN)
    upstream = tl.load(dout + at + of_result * step + d, mask=d < DIM, other=0.0).to(tl.float32)
    delta = _delta(q, k, bias, at_x, step_x, at_z, step_z, top, total, upstream, acc, w, d, RATIO, HALVES, DIM,
                   HAS_BIAS, BR, BD)  # fmt: skip
    if HAS_BIAS:
        of_notes = notes + (n.to(tl.int64) * tl.num_programs(1) + h) * DIM + d
        tl.store(of_notes, top, mask=d < DIM)
        tl.store(of_notes + plane, total, mask=d < DIM)
        tl.store(of_notes + 2 * plane, delta, mask=d < DIM)
    at_dx, step_dx = rows_at(strides, count, b, h, layout_index.DQ, ALIGN)
    at_dz, step_dz = rows_at(strides, count, b, h, layout_index.DK, ALIGN)
    for half in tl.static_range(HALVES):
        for r0 in tl.range(0, RATIO, BR):
            row, column, there, _, x, weights = _weighed(q, k, bias, at_x, step_x, at_z, step_z, top, total, w, r0,
                                                         half, d, RATIO, HALVES, DIM, HAS_BIAS, BR)  # fmt: skip
            dx, dz = weights * upstream[None, :], weights * (upstream[None, :] * x - delta[None, :])
            tl.store(dq + at_dx + row[:, None] * step_dx + column[None, :], dx.to(dq.dtype.element_ty), mask=there)
            tl.store(dk + at_dz + row[:, None] * step_dz + column[None, :], dz.to(dk.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["count", "plane", "results", "per", "heads"])
def pool_bias(q, k, bias, dout, notes, added, strides, lengths, tokens, count: tl.int32, plane: tl.int64,
              results: tl.int32, per: tl.int32, heads: tl.int32, RATIO: tl.constexpr, HALVES: tl.constexpr,
              DIM: tl.constexpr, ALIGN: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """Writes a partial sum of the bias's gradient for one position in the window and BD channels: the sum over heads
    and `per` pooled rows of P * (x * dout - sum(P * x * dout)); `notes` has P's maximum and sum, and the inner sum,
    from pool_gradient(). Grid (positions, twice with overlap; blocks of channels; ranges of pooled rows)."""
    position, half = tl.program_id(0) % RATIO, tl.program_id(0) // RATIO
    d, split = tl.program_id(1) * BD + tl.arange(0, BD), tl.program_id(2)
    column, there = half * DIM + d, d < DIM
    z_bias = tl.load(bias + position * (HALVES * DIM) + column, mask=there, other=0.0)
    acc = tl.zeros([BD], tl.float32)
    for i in tl.range(0, tl.minimum(per, results - split * per)):
        n = split * per + i
        b, of_result, w = _window(tokens, lengths, count, n)
        row = (w - (HALVES - 1 - half)) * RATIO + position
        here = there & (row >= 0)
        for h in tl.range(0, heads):
            at_x, step_x = rows_at(strides, count, b, h, layout_index.Q, ALIGN)
            at_z, step_z = rows_at(strides, count, b, h, layout_index.K, ALIGN)
            at, step = rows_at(strides, count, b, h, layout_index.DOUT, ALIGN)
            of_notes = notes + (n.to(tl.int64) * heads + h) * DIM + d
            top, total = tl.load(of_notes, mask=here, other=0.0), tl.load(of_notes + plane, mask=here, other=1.0)
            delta = tl.load(of_notes + 2 * plane, mask=here, other=0.0)
            z = tl.load(k + at_z + row * step_z + column, mask=here, other=-INFINITE).to(tl.float32) + z_bias
            x = tl.load(q + at_x + row * step_x + column, mask=here, other=0.0).to(tl.float32)
            upstream = tl.load(dout + at + of_result * step + d, mask=here, other=0.0).to(tl.float32)
            acc += tl.where(here, tl.exp(z - top) / total * (upstream * x - delta), 0.0)
    at_added = added + (split.to(tl.int64) * RATIO + position) * (HALVES * DIM) + column
    tl.store(at_added, acc, mask=there)
