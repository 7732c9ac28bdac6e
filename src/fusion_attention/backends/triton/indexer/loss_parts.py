"""Kernel functions and kernels that both indexer losses use (over selected keys, and over all keys of a band).

They compute logarithms of the attention's statistics, replace rows that are not finite, and complete sums per key.
"""

# mypy: disable-error-code="no-untyped-def"
# Annotations are for Triton, which evaluates them: tl.constexpr marks compile-time values.

import math

import triton
import triton.language as tl

from fusion_attention.backends.triton.common import layout_index
from fusion_attention.backends.triton.common.kernels import LOG2E, PER_TILE, heads_at, load_part, rows_at, store_part

LEAST = tl.constexpr(1e-8)  # smallest probability in logarithms
LN_LEAST = tl.constexpr(math.log(1e-8))
# Factor on differences y - p in float16 products. Their magnitude is at most 1, so products do not overflow; with 128k
# equally likely keys, a thirtieth of a probability times UNIT is still a normal number.
UNIT = tl.constexpr(256.0)


@triton.jit
def at_least(x, least):
    """Returns max(x, least); NaN for NaN."""
    return tl.maximum(x, least, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def is_finite(x):
    """Returns true where x is neither NaN nor infinite."""
    return tl.abs(x.to(tl.float32)) < float("inf")


@triton.jit
def finite_rows(x):
    """Returns x [rows, elements] with zeros in place of the rows that have a non-finite element.

    Products of these rows are then 0, so no gradient flows through the rows, as the formulas require: a product that is
    NaN or -inf is not positive. Scores are computed from the original rows.
    """
    bad = tl.max((~is_finite(x)).to(tl.int32), 1)
    return tl.where(bad[:, None] > 0, tl.zeros_like(x), x)


@triton.jit
def finite_weights(w):
    """Returns w with 1 in place of non-finite weights; the gradients of such a row's scores are NaN for every visible
    key anyway."""
    return tl.where(is_finite(w), w, 1.0)


@triton.jit
def unit_of(largest):
    """Returns a power of two that scales (y - p) * weight to the range of float16; 1 if `largest` is None. largest:
    address of the largest weight's bits. The unit stays finite in float32 even for weights too small for any gradient
    in float16."""
    if largest is None:
        return 1.0
    else:
        w = tl.load(largest).to(tl.float32, bitcast=True)
        exponent = tl.ceil(tl.log2(tl.where(w > 0, w, 1.0)))
        return UNIT / tl.exp2(tl.minimum(tl.maximum(exponent, -100.0), 127.0))


@triton.jit
def difference(p, x, top, total, visible, SELECTED: tl.constexpr):
    """Returns (y - p, loss terms p (ln p - ln y)), y = exp(x - top) / total of the indexer's scores x; 0 for hidden
    keys.

    p: the attention's probabilities. visible: mask of keys. SELECTED: a loss over lists, of max(p, 1e-8).
    """
    y = tl.exp2((x - top) * LOG2E) / total
    log_y = (x - top) - tl.log(total)
    clamped = at_least(p, LEAST)
    factor = clamped if SELECTED else p
    loss = factor * (tl.log(clamped) - at_least(log_y, LN_LEAST))
    return tl.where(visible, y - p, 0.0), tl.where(visible, loss, 0.0)


@triton.jit
def given_difference(p, mass, y, visible):
    """Returns (y * mass - p, loss terms p (ln p - ln y)) for indexer's probabilities y and a target p that sums to
    `mass`; 0 where `visible` is false."""
    loss = p * (tl.log(at_least(p, LEAST)) - tl.log(at_least(y, LEAST)))
    return tl.where(visible, y * mass - p, 0.0), tl.where(visible, loss, 0.0)


@triton.constexpr_function
def steps(dim, columns):
    """Returns ceil(dim / columns), the number of column blocks of a row."""
    return -(-dim // columns)


@triton.jit
def columns_at(c, base, rope, at, at_rope, stride, stride_rope, DIM: tl.constexpr, DIM_ROPE: tl.constexpr,
               BC: tl.constexpr):  # fmt: skip
    """Returns (address of column block c of a row, stride of rows, number of columns from there to the row's end); a
    row of DIM elements at base + at, in blocks of BC, is followed by the blocks of its rope part at rope + at_rope."""
    first = c * BC
    place, left = base + at + first, DIM - first
    if DIM_ROPE:
        behind = first - steps(DIM, BC) * BC
        is_rope = behind >= 0
        place = tl.where(is_rope, rope + at_rope + behind, place)
        stride, left = tl.where(is_rope, stride_rope, stride), tl.where(is_rope, DIM_ROPE - behind, left)
    return place, stride, left


# ------------------------------------------------------------------------------------------------------------- kernels


@triton.jit(do_not_specialize=["count", "heads_q", "heads_index", "step_head", "step_row"])
def note(max_, sum_, sink, weights, notes, largest, strides, tiles, count: tl.int32, heads_q: tl.int32,
         heads_index: tl.int32, step_head: tl.int64, step_row: tl.int64, BM: tl.constexpr):  # fmt: skip
    """Writes to `notes`, for each query row of the attention, log2(sum(exp(scores))) of every head, and the divisor of
    the mean over heads (their number, less the sinks' probabilities); for float16, also the largest indexer weight;
    grid (tiles)."""
    tile = tiles + tl.program_id(0).to(tl.int64) * PER_TILE
    b, row0, row1, flat = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 7)
    row = (row0 + tl.arange(0, BM)).to(tl.int64)
    valid = row < row1
    at_max, head_max, stride_max = heads_at(strides, count, b, layout_index.MAX, 1)
    at_sum, head_sum, stride_sum = heads_at(strides, count, b, layout_index.SUM, 1)
    to = notes + (flat + tl.arange(0, BM)).to(tl.int64) * step_row
    heads = tl.zeros([BM], tl.float32) + heads_q
    for h in tl.range(0, heads_q):
        m = tl.load(max_ + at_max + h * head_max + row * stride_max, mask=valid, other=0.0)
        s = tl.load(sum_ + at_sum + h * head_sum + row * stride_sum, mask=valid, other=1.0)
        tl.store(to + h * step_head, m * LOG2E + tl.log2(s), mask=valid)
        if sink is not None:
            heads -= tl.exp2((tl.load(sink + h) - m) * LOG2E) / s
    tl.store(to + heads_q * step_head, heads, mask=valid)
    if largest is not None:
        at_w, stride_w = rows_at(strides, count, b, 0, layout_index.WEIGHTS, 1)
        magnitude = tl.zeros([BM], tl.float32)
        for h in tl.range(0, heads_index):
            w = tl.load(weights + at_w + row * stride_w + h, mask=valid, other=0.0).to(tl.float32)
            magnitude = tl.maximum(magnitude, tl.where(is_finite(w), tl.abs(w), 0.0))
        tl.atomic_max(largest, tl.max(magnitude, 0).to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit(do_not_specialize=["count"])
def clean_keys(index_k, keys, strides, tiles, count: tl.int32, E: tl.constexpr, DIM_INDEX: tl.constexpr,
               ALIGN: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Writes one tile of the indexer's keys to `keys`, with zeros in place of keys that have a NaN or infinity, padded
    with rows of zeros; grid (tiles of keys)."""
    tile = tiles + tl.program_id(0).to(tl.int64) * PER_TILE
    b, key0, key1, to = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 5)
    key = (key0 + tl.arange(0, BN)).to(tl.int64)
    at, stride = rows_at(strides, count, b, 0, layout_index.INDEX_K, ALIGN)
    rows = load_part(index_k + at, key * stride, key < key1, 0, E, DIM_INDEX, True)
    out = (to + tl.arange(0, BN)).to(tl.int64) * E
    there = tl.arange(0, BN) < tl.load(tile + 6)
    tl.store(keys + out[:, None] + tl.arange(0, E)[None, :], finite_rows(rows), mask=there[:, None])


@triton.jit(do_not_specialize=["count", "plane"])
def finish_keys(added, dk, largest, strides, tiles, count: tl.int32, plane: tl.int64, SPLITS: tl.constexpr,
                E: tl.constexpr, DIM_INDEX: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Writes dk of one tile of the indexer's keys, the sum of SPLITS partial sums in `added`; grid (tiles of keys)."""
    tile = tiles + tl.program_id(0).to(tl.int64) * PER_TILE
    b, key0, key1, at = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 5)
    key = (key0 + tl.arange(0, BN)).to(tl.int64)
    offset = (at + tl.arange(0, BN)).to(tl.int64) * E
    place = added + offset[:, None] + tl.arange(0, E)[None, :]
    total = tl.load(place)
    for _ in tl.static_range(1, SPLITS):
        place += plane
        total += tl.load(place)
    at_dk, stride_dk = rows_at(strides, count, b, 0, layout_index.DK, 1)
    store_part(dk + at_dk, key * stride_dk, key < key1, total / unit_of(largest), 0, E, DIM_INDEX)
