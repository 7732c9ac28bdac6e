"""Kernel functions for the softcap, a bias (a matrix, a table of its last rows, or ALiBi slopes) and its gradient."""

# mypy: disable-error-code="no-untyped-def"
# Annotations are for Triton, which evaluates them: tl.constexpr marks compile-time values.

import triton
import triton.language as tl

from fusion_attention.backends.triton.common import layout_index
from fusion_attention.backends.triton.common.kernels import LOG2E, matrix_at
from fusion_attention.ir.bias import TABLE_ROWS as _TABLE_ROWS

TABLE_ROWS = tl.constexpr(_TABLE_ROWS)
BIASES = {"none": 0, "matrix": 1, "table": 2, "slopes": 3, "slopes_sqrt": 4}
MATRIX, TABLE, SLOPES, SLOPES_SQRT = (tl.constexpr(n) for n in range(1, 5))


@triton.jit
def capped(x, scale, CAP: tl.constexpr):
    """Returns (t, 1 - t^2) with t = tanh(x * scale / CAP); 1 - t^2 is the derivative of tanh.

    Triton's interpreter has no tanh. For |y| below 0.625, tanh(y) is a minimax polynomial, exact at 0; above it is
    1 - 2 / (e^2y + 1), which has full precision there.
    """
    y = x * scale / CAP
    size = tl.abs(y)
    square = size * size
    p = -5.7049774e-3 * square + 2.0639079e-2
    p = ((p * square - 5.3739713e-2) * square + 1.3331442e-1) * square - 3.3333282e-1
    large = 1.0 - 2.0 / (tl.exp2(size * (2 * LOG2E)) + 1.0)
    tanh = tl.where(size < 0.625, size + size * square * p, large)
    tanh = tl.where(y < 0, -tanh, tanh)
    return tanh, 1.0 - tanh * tanh


@triton.jit
def biased(x, scale, factor, bias, slopes, strides, count, b, h, heads, row, key, there, lengths, KIND: tl.constexpr,
           CAP: tl.constexpr):  # fmt: skip
    """Returns scale * x (CAP 0) or CAP * tanh(scale * x / CAP), plus factor * bias, for head h of sequence b.

    KIND: none; an element of the matrix `bias`, at strides from the table `strides`; the same with only its last rows
    stored (TABLE); -slope * |key - row + shift|, or its square root (SLOPES, SLOPES_SQRT). row, key: indices that
    broadcast; there: mask of valid pairs; lengths: (q_len, kv_len, shift).
    """
    q_len, kv_len, shift = lengths
    if CAP != 0:
        x = capped(x, scale, CAP)[0] * CAP
    else:
        x = x * scale
    if KIND == MATRIX or KIND == TABLE:  # noqa: SIM109 (Triton has no `in`)
        first, stride_row, stride_key = matrix_at(strides, count, b, h, layout_index.BIAS)
        stored, column = row.to(tl.int64), key.to(tl.int64)
        if KIND == TABLE:
            stored, column = table_place(stored, column, q_len, kv_len)
        value = tl.load(bias + first + stored * stride_row + column * stride_key, mask=there, other=0.0)
        x += factor * value.to(tl.float32)
    if KIND == SLOPES or KIND == SLOPES_SQRT:  # noqa: SIM109
        distance = tl.abs(key - row + shift.to(tl.int32)).to(tl.float32)
        if KIND == SLOPES_SQRT:
            distance = tl.sqrt(distance)
        x -= factor * tl.load(slopes + b * heads + h) * distance
    return x


@triton.jit
def table_place(row, key, q_len, kv_len):
    """Returns (row, column) of the pair (row, key) in a table of only the last TABLE_ROWS rows of a bias that depends
    on key - row alone; q_len, kv_len: lengths of the sequence."""
    first = q_len - TABLE_ROWS
    stored = tl.where(row >= first, row - first, row % TABLE_ROWS)
    return stored, tl.minimum(key + (first + stored - row), kv_len - 1)


@triton.jit
def add_dbias(dbias, where, row, key, visible, gradient, lengths, KIND: tl.constexpr):
    """Adds `gradient` of pairs (row, key) to dbias, atomically, because pairs share the elements of a broadcast bias.
    where: (strides, count, b, h, heads): table of strides, number of sequences, sequence, head, heads. visible: mask of
    pairs. lengths: (q_len, kv_len, shift). KIND: TABLE if only the last rows are stored."""
    strides, count, b, h, _ = where
    first, stride_row, stride_key = matrix_at(strides, count, b, h, layout_index.DBIAS)
    stored, column = row.to(tl.int64), key.to(tl.int64)
    if KIND == TABLE:
        stored, column = table_place(stored, column, lengths[0], lengths[1])
    tl.atomic_add(dbias + first + stored * stride_row + column * stride_key, gradient, mask=visible, sem="relaxed")
