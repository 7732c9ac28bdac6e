"""Kernel functions for addresses, visible keys, dropout, and rows in blocks of columns.

Indices of rows and keys broadcast, with either axis first, so the functions serve scores and transposed scores.

Common parameters: `strides` is the layout table (layout_table.py) of `count` sequences, VIEW the index of a view in it
(layout_index.py), b a sequence, h a head; ALIGN is the alignment of rows in elements. `there`, bool, masks invalid
elements. A row of DIM elements is a tuple of three column blocks of widths W0, W1 and W2 (0: unused).
"""

# mypy: disable-error-code="no-untyped-def"
# Annotations are for Triton, which evaluates them: tl.constexpr marks compile-time values.

import triton
import triton.language as tl

from fusion_attention.backends.triton.common import layout_index
from fusion_attention.backends.triton.common.layout_table import FIELDS, TILE_FIELDS, VIEWS
from fusion_attention.ir.dropout import ROUNDS as _ROUNDS

LOG2E = tl.constexpr(1.4426950408889634)
ROUNDS = tl.constexpr(_ROUNDS)
# Named in the functions that read the layout table, so that Triton's key of a compiled kernel depends on the order of
# views: the key ignores constants that a kernel reads through a module, as the indices in layout_index.py.
ORDER = tl.constexpr(" ".join(VIEWS))
PER_VIEW = tl.constexpr(FIELDS)
PER_TILE = tl.constexpr(TILE_FIELDS)

BITS, PHILOX = tl.constexpr(1), tl.constexpr(2)
DROPOUTS = {"none": 0, "bits": 1, "philox": 2}


@triton.jit
def heads_at(strides, count, b, VIEW: tl.constexpr, ALIGN: tl.constexpr):
    """Returns (offset of the first element, stride of a head, stride of a token), in elements, multiples of ALIGN, of
    sequence b of tensor number VIEW, from the table `strides` of `count` sequences."""
    tl.static_assert(ORDER != "")
    at = strides + VIEW * PER_VIEW * count + b
    first, head, token = tl.load(at), tl.load(at + count), tl.load(at + 2 * count)
    if ALIGN > 1:
        first, head = tl.multiple_of(first, ALIGN), tl.multiple_of(head, ALIGN)
        token = tl.multiple_of(token, ALIGN)
    return first, head, token


@triton.jit
def rows_at(strides, count, b, h, VIEW: tl.constexpr, ALIGN: tl.constexpr):
    """Returns (offset of head h's first element, stride of a token), in elements, multiples of ALIGN, of sequence b of
    tensor number VIEW, from the table `strides` of `count` sequences."""
    first, head, token = heads_at(strides, count, b, VIEW, ALIGN)
    return first + h * head, token


@triton.jit
def matrix_at(strides, count, b, h, VIEW: tl.constexpr):
    """Returns (offset of head h's first element, stride of a row, stride of a key), in elements, of sequence b of the
    matrix number VIEW (bias, mask, ...), from the table `strides` of `count` sequences."""
    tl.static_assert(ORDER != "")
    at = strides + VIEW * PER_VIEW * count + b
    return tl.load(at) + h * tl.load(at + count), tl.load(at + 2 * count), tl.load(at + 3 * count)


@triton.jit
def lengths_at(lengths, count, b):
    """Returns (q_len, kv_len, lo, hi, prefix, shift) of sequence b from a table [6, count]: row i sees the keys from i
    + lo to before max(i + hi, prefix); ALiBi's distance is key - row + shift."""
    at = lengths + b
    q_len, kv_len, lo = tl.load(at), tl.load(at + count), tl.load(at + 2 * count)
    return q_len, kv_len, lo, tl.load(at + 3 * count), tl.load(at + 4 * count), tl.load(at + 5 * count)


@triton.jit
def interval(row, valid, kv_len, lo, hi, prefix, RATIO: tl.constexpr = 1):
    """Returns int32 (first, end) of each row's visible keys: row + lo and max((row + hi) // RATIO, prefix), clamped to
    0 and kv_len (lo, hi: the band relative to the row); end 0 for an invalid row. RATIO: tokens of a key."""
    row64 = row.to(tl.int64)
    first = tl.minimum(tl.maximum(row64 + lo, 0), kv_len)
    end = tl.minimum(tl.maximum((row64 + hi) // RATIO, prefix), kv_len)
    return first.to(tl.int32), tl.where(valid, end, 0).to(tl.int32)


@triton.jit
def band_at(extents):
    """Returns (q_len, kv_len, lo, hi, prefix) of a sequence in int32: row i sees keys i + lo to before max(i + hi,
    prefix). lo and hi are clamped, so that sums with a row or key do not overflow. extents: these and shift."""
    q_len, kv_len, lo, hi, prefix, _ = extents
    lo, hi = tl.minimum(tl.maximum(lo, -q_len), kv_len), tl.minimum(tl.maximum(hi, -q_len), kv_len)
    return (q_len.to(tl.int32), kv_len.to(tl.int32), lo.to(tl.int32), hi.to(tl.int32),
            tl.minimum(prefix, kv_len).to(tl.int32))  # fmt: skip


@triton.jit
def load_part(base, offset, there, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr):
    """Loads columns [FIRST, FIRST + WIDTH) of the rows at base + offset, [rows, WIDTH]; zeros from column DIM on and,
    if MASKED, in rows where `there` is false."""
    d = FIRST + tl.arange(0, WIDTH)
    at = base + offset[:, None] + d[None, :]
    if FIRST + WIDTH > DIM:
        return tl.load(at, mask=there[:, None] & (d < DIM)[None, :], other=0.0)
    elif MASKED:
        return tl.load(at, mask=there[:, None], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def store_part(base, offset, there, value, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """Stores `value` to columns FIRST to FIRST + WIDTH (below DIM) of the rows at base + offset, where `there`."""
    d = FIRST + tl.arange(0, WIDTH)
    mask = there[:, None] & (d < DIM)[None, :]
    tl.store(base + offset[:, None] + d[None, :], value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def not_blocked(blocked, strides, count, b, h, row, key, there):
    """Returns bool, true for pairs (row, key) of head h of sequence b whose element of the mask matrix `blocked` is 0;
    false where `there` is false. strides: table of strides of `count` sequences."""
    first, stride_row, stride_key = matrix_at(strides, count, b, h, layout_index.BLOCKED)
    at = blocked + first + row.to(tl.int64) * stride_row + key.to(tl.int64) * stride_key
    return tl.load(at, mask=there, other=1) == 0


@triton.jit
def kept_bits(bits, strides, count, b, h, row, key, there):
    """Returns bool, true for pairs (row, key) of head h of sequence b whose bit in the dropout mask `bits` is 1; false
    where `there` is false. strides: table of strides of `count` sequences."""
    first, stride_row, stride_key = matrix_at(strides, count, b, h, layout_index.BITS)
    bit = first + row.to(tl.int64) * stride_row + key.to(tl.int64) * stride_key
    byte = tl.load(bits + (bit >> 3), mask=there, other=0).to(tl.int32)
    return ((byte >> (bit & 7).to(tl.int32)) & 1) != 0


@triton.jit
def kept_drawn(seed, offset, threshold, stream, row, j0, KEYS: tl.constexpr):
    """Draws a dropout mask with Philox: bool [rows, KEYS], true: kept, for rows `row` [rows] and keys from j0 on, a
    multiple of 8. 16 bits per pair are kept if below `threshold`. stream: the head's number among all heads; seed,
    offset: of the generator."""
    draw = (j0 // 8 + tl.arange(0, KEYS // 8))[None, :]
    zero = tl.zeros([row.shape[0], KEYS // 8], tl.int32)
    c0, c1, c2, c3 = zero + draw, zero + row[:, None], zero + stream, zero + offset
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, c2, c3, ROUNDS)
    # Halves in little-endian order: key 8 m + 4 a + 2 b + c is half c of word 2 a + b.
    low = tl.interleave(tl.interleave(_low(w0), _low(w2)), tl.interleave(_low(w1), _low(w3)))
    high = tl.interleave(tl.interleave(_high(w0), _high(w2)), tl.interleave(_high(w1), _high(w3)))
    return tl.interleave(low, high) < threshold


@triton.jit
def _low(word):
    return (word & 0xFFFF).to(tl.int32)


@triton.jit
def _high(word):
    return (word >> 16).to(tl.int32)


@triton.jit
def kept_keys(bits, where, row, j0, there, drop, DROPOUT: tl.constexpr, KEYS: tl.constexpr):
    """Returns bool [rows, KEYS], true for pairs of a row and a key from j0 on that dropout keeps: by the caller's
    packed mask `bits` (DROPOUT BITS; there: valid pairs) or drawn from drop = (seed, offset, threshold) (DROPOUT
    PHILOX). where: (table of strides, sequences, sequence, head, _)."""
    strides, count, b, h, _ = where
    if DROPOUT == PHILOX:
        seed, offset, threshold = drop
        stream, row0, key0 = matrix_at(strides, count, b, h, layout_index.BITS)  # drawn dropout uses this entry
        row, j0 = row + row0.to(tl.int32), j0 + key0.to(tl.int32)
        return kept_drawn(seed, offset, threshold, stream.to(tl.int32), row, j0, KEYS)
    else:
        return kept_bits(bits, strides, count, b, h, row[:, None], (j0 + tl.arange(0, KEYS))[None, :], there)


# --------------------------------------------------------------------------------- rows in up to three column blocks


@triton.jit
def load_three(base, offset, there, MASKED: tl.constexpr,
               W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, DIM: tl.constexpr):  # fmt: skip
    """Loads the rows at base + offset as three column blocks [rows, W0], [rows, W1], [rows, W2]; one of width 0 repeats
    the first. Zeros from column DIM on and, if MASKED, in rows where `there` is false."""
    x0 = load_part(base, offset, there, 0, W0, DIM, MASKED)
    x1, x2 = x0, x0
    if W1:
        x1 = load_part(base, offset, there, W0, W1, DIM, MASKED)
    if W2:
        x2 = load_part(base, offset, there, W0 + W1, W2, DIM, MASKED)
    return x0, x1, x2


@triton.jit
def rows_of(base, stride, count, ROWS: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr,
            DIM: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """Returns the source from which load_rows() loads rows of DIM elements: (base, stride), or with TMA three tensor
    descriptors, for column blocks of widths W0, W1, W2, which read zeros for rows from `count` on."""
    if TMA:
        count = count.to(tl.int32)
        x0 = tl.make_tensor_descriptor(base, [count, DIM], [stride, 1], [ROWS, W0])
        x1, x2 = x0, x0
        if W1:
            x1 = tl.make_tensor_descriptor(base, [count, DIM], [stride, 1], [ROWS, W1])
        if W2:
            x2 = tl.make_tensor_descriptor(base, [count, DIM], [stride, 1], [ROWS, W2])
        return x0, x1, x2
    else:
        return base, stride


@triton.jit
def load_rows(rows, j0, inside, MASKED: tl.constexpr, ROWS: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr,
              W2: tl.constexpr, DIM: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """Loads rows j0 to j0 + ROWS - 1 from `rows`, (base, stride) or with TMA tensor descriptors, as three column blocks
    of widths W0, W1 and W2; without TMA, if MASKED, zeros where not `inside`."""
    if TMA:
        x0 = rows[0].load([j0, 0])
        x1, x2 = x0, x0
        if W1:
            x1 = rows[1].load([j0, W0])
        if W2:
            x2 = rows[2].load([j0, W0 + W1])
        return x0, x1, x2
    else:
        base, stride = rows
        offset = (j0 + tl.arange(0, ROWS)).to(tl.int64) * stride
        return load_three(base, offset, inside, MASKED, W0, W1, W2, DIM)


@triton.jit
def rows_of_group(base, head, stride, heads, count, ROWS: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr,
                  W2: tl.constexpr, DIM: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """Returns the source from which load_group() loads rows of any head: (base, stride of a head, stride of a row), or
    with TMA a tensor descriptor for each of three column blocks."""
    if TMA:
        count = count.to(tl.int32)
        x0 = tl.make_tensor_descriptor(base, [heads, count, DIM], [head, stride, 1], [1, ROWS, W0])
        x1, x2 = x0, x0
        if W1:
            x1 = tl.make_tensor_descriptor(base, [heads, count, DIM], [head, stride, 1], [1, ROWS, W1])
        if W2:
            x2 = tl.make_tensor_descriptor(base, [heads, count, DIM], [head, stride, 1], [1, ROWS, W2])
        return x0, x1, x2
    else:
        return base, head, stride


@triton.jit
def load_group(rows, h, first, inside, ROWS: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr,
               DIM: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """Loads rows first to first + ROWS - 1 of head h as three column blocks of widths W0, W1 and W2; rows: (base,
    stride of a head, stride of a row), or with TMA tensor descriptors; zeros where not `inside`."""
    if TMA:
        x0 = rows[0].load([h, first, 0]).reshape(ROWS, W0)
        x1, x2 = x0, x0
        if W1:
            x1 = rows[1].load([h, first, W0]).reshape(ROWS, W1)
        if W2:
            x2 = rows[2].load([h, first, W0 + W1]).reshape(ROWS, W2)
        return x0, x1, x2
    else:
        base, head, stride = rows
        return load_rows((base + h * head, stride), first, inside, True, ROWS, W0, W1, W2, DIM, TMA)


@triton.jit
def store_three(base, offset, there, parts, factor,
                W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, DIM: tl.constexpr):  # fmt: skip
    """Stores rows (`parts`: columns in blocks W0, W1, W2) times `factor` [rows, 1] at base + offset, if `there`."""
    store_part(base, offset, there, parts[0] * factor, 0, W0, DIM)
    if W1:
        store_part(base, offset, there, parts[1] * factor, W0, W1, DIM)
    if W2:
        store_part(base, offset, there, parts[2] * factor, W0 + W1, W2, DIM)


@triton.jit
def zeros_three(ROWS: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr):
    """Returns float32 zeros [ROWS, W0], [ROWS, W1], [ROWS, W2] for rows in column blocks; width 0: the first again."""
    x0 = tl.zeros([ROWS, W0], tl.float32)
    x1, x2 = x0, x0
    if W1:
        x1 = tl.zeros([ROWS, W1], tl.float32)
    if W2:
        x2 = tl.zeros([ROWS, W2], tl.float32)
    return x0, x1, x2


@triton.jit
def inner_three(a, b, W1: tl.constexpr, W2: tl.constexpr):
    """Returns the product a b^T, [rows of a, rows of b]; a and b are rows in three column blocks (width 0: unused)."""
    x = tl.dot(a[0], tl.trans(b[0]), input_precision="ieee")
    if W1:
        x = tl.dot(a[1], tl.trans(b[1]), x, input_precision="ieee")
    if W2:
        x = tl.dot(a[2], tl.trans(b[2]), x, input_precision="ieee")
    return x


@triton.jit
def products(a, b, W1: tl.constexpr, W2: tl.constexpr):
    """Returns float32 [rows], dot products of row i of a and row i of b, which are in three column blocks."""
    x = tl.sum(a[0].to(tl.float32) * b[0].to(tl.float32), 1)
    if W1:
        x += tl.sum(a[1].to(tl.float32) * b[1].to(tl.float32), 1)
    if W2:
        x += tl.sum(a[2].to(tl.float32) * b[2].to(tl.float32), 1)
    return x


@triton.jit
def add_three(acc, p, x, W1: tl.constexpr, W2: tl.constexpr):
    """Returns acc + p x; acc, x: rows in column blocks; p: weights [rows of acc, rows of x], rounded to x's dtype."""
    acc0, acc1, acc2 = acc
    p = p.to(x[0].dtype)
    acc0 = tl.dot(p, x[0], acc0, input_precision="ieee")
    if W1:
        acc1 = tl.dot(p, x[1], acc1, input_precision="ieee")
    if W2:
        acc2 = tl.dot(p, x[2], acc2, input_precision="ieee")
    return acc0, acc1, acc2
