"""The dense forward kernel: attention of a tile of query rows of one head to the keys of its band, in two loops.

The first loop processes the tiles of keys at both edges of the band, with a mask. The second loop processes the tiles
that are visible to all rows, without a mask. If nothing is added to scores (RAW), they are not scaled: the scale is
part of the exponent's factor, and the maximum is scaled once, when it is stored.
"""

# mypy: disable-error-code="no-untyped-def"
# Annotations are for Triton, which evaluates them: tl.constexpr marks compile-time values.

import triton
import triton.language as tl

from fusion_attention.backends.triton.common import kernels as common
from fusion_attention.backends.triton.common import layout_index
from fusion_attention.backends.triton.common.bias import biased
from fusion_attention.backends.triton.common.kernels import LOG2E, PER_TILE


@triton.jit
def weigh(s, m, l, exponent):
    """Computes a step of the online softmax over scores s [rows, keys], of weights 2^(s * exponent - max), from maxima
    m and sums l [rows] so far; returns (weights [rows, keys], factor on earlier sums, new maxima, new sums)."""
    now = tl.maximum(m, tl.max(s, 1))
    # A row without visible keys so far has max -inf; 0 in its place gives weights 0, not NaN.
    base = tl.where(now == -float("inf"), 0.0, now)
    p = tl.exp2(s * exponent - (base * exponent)[:, None])
    # The difference comes first: with a fused multiply-add of two products earlier weights would drift every iteration.
    fade = tl.exp2((m - base) * exponent)
    return p, fade, now, l * fade + tl.sum(p, 1)


@triton.jit
def attend(state, query, rope, memory, extras, where, row, edges, lengths, numbers, drop, keys,
           MASKED: tl.constexpr, RAW: tl.constexpr, BIAS: tl.constexpr, BLOCKED: tl.constexpr, DROPOUT: tl.constexpr,
           D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DIM: tl.constexpr, R: tl.constexpr,
           DIM_ROPE: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, DIM_V: tl.constexpr,
           BN: tl.constexpr, CAP: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """Continues an online softmax over `left` tiles of BN keys from key `begin` on, then `right` tiles from `again` on;
    returns the new state.

    Args:
        state: three accumulators of weight * value (column blocks [rows, V0], ...), running maxima and sums [rows].
        query, rope: the query rows as column blocks, and their rope part or None.
        memory: sources of keys, values and keys' rope parts, for load_rows().
        extras: addresses of the bias, slopes, mask matrix and dropout bits; None for absent ones.
        where: (table of strides, number of sequences, sequence, head, number of heads).
        row, edges: numbers of the rows; (mask of the rows, first, end of the visible keys of each).
        lengths, numbers, drop: (q_len, kv_len, shift), factors on scores, (seed, offset, threshold) of dropout.
        keys: (begin, left, again, right).
    """
    acc0, acc1, acc2, m, l = state
    k, v, kr = memory
    bias, slopes, blocked, bits = extras
    strides, count, b, h, heads = where
    valid, first_key, end_key = edges
    scale, factor, exponent = numbers
    begin, left, again, right = keys
    for t in tl.range(0, left + right):
        j0 = begin + t * BN
        if MASKED:
            j0 = tl.where(t < left, j0, again + (t - left) * BN)
        j = j0 + tl.arange(0, BN)
        inside = j < lengths[1]
        s = common.inner_three(query, common.load_rows(k, j0, inside, MASKED, BN, D0, D1, D2, DIM, TMA), D1, D2)
        if R:
            rope_keys = common.load_rows(kr, j0, inside, MASKED, BN, R, 0, 0, DIM_ROPE, TMA)[0]
            s = tl.dot(rope, tl.trans(rope_keys), s, input_precision="ieee")
        there = valid[:, None] & inside[None, :]
        if not RAW:
            s = biased(s, scale, factor, bias, slopes, strides, count, b, h, heads, row[:, None], j[None, :], there,
                       lengths, BIAS, CAP)  # fmt: skip
        if MASKED:
            visible = (j[None, :] >= first_key[:, None]) & (j[None, :] < end_key[:, None])
            if BLOCKED:
                visible = visible & common.not_blocked(blocked, strides, count, b, h, row[:, None], j[None, :], there)
            s = tl.where(visible, s, -float("inf"))
        p, fade, m, l = weigh(s, m, l, exponent)
        if DROPOUT:
            p = tl.where(common.kept_keys(bits, where, row, j0, there, drop, DROPOUT, BN), p, 0.0)
        acc0 = acc0 * fade[:, None]
        if V1:
            acc1 = acc1 * fade[:, None]
        if V2:
            acc2 = acc2 * fade[:, None]
        values = common.load_rows(v, j0, inside, MASKED, BN, V0, V1, V2, DIM_V, TMA)
        acc0, acc1, acc2 = common.add_three((acc0, acc1, acc2), p, values, V1, V2)
    return acc0, acc1, acc2, m, l


@triton.jit
def add_means(acc, mean, v, bits, where, row, valid, drop, kv_len, DROPOUT: tl.constexpr,
              V0: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, DIM_V: tl.constexpr, BN: tl.constexpr,
              TMA: tl.constexpr):  # fmt: skip
    """Adds to acc (three column blocks of widths V0, V1, V2), for rows where `mean` is true (no visible keys; the
    result is the mean of V), the sum of all kv_len values, read from v, that dropout keeps; returns acc."""
    acc0, acc1, acc2 = acc
    end = tl.where(tl.max(mean.to(tl.int32), 0) > 0, kv_len, 0).to(tl.int32)
    for j0 in tl.range(0, end, BN):
        j = j0 + tl.arange(0, BN)
        inside = j < kv_len
        there = valid[:, None] & inside[None, :]
        p = tl.where(mean[:, None] & there, 1.0, 0.0)
        if DROPOUT:
            p = tl.where(common.kept_keys(bits, where, row, j0, there, drop, DROPOUT, BN), p, 0.0)
        values = common.load_rows(v, j0, inside, True, BN, V0, V1, V2, DIM_V, TMA)
        acc0, acc1, acc2 = common.add_three((acc0, acc1, acc2), p, values, V1, V2)
    return acc0, acc1, acc2


@triton.jit
def finish(m, l, sink, h, unit, SINK: tl.constexpr):
    """Returns (max, sum, factor on the accumulated sums of weight * value) of rows from running maxima m and sums l,
    including the sink of head h, if there is one; max, m * unit, is in natural-logarithm units."""
    nothing = m == -float("inf")
    top = tl.where(nothing, -float("inf"), m * unit)
    fade = tl.where(nothing, 0.0, 1.0)
    if SINK:
        logit = tl.load(sink + h)
        joint = tl.maximum(top, logit)
        base = tl.where(joint == -float("inf"), 0.0, joint)
        fade = tl.where(top == joint, fade, tl.exp2((top - base) * LOG2E))
        l = l * fade + tl.where(logit == -float("inf"), 0.0, tl.exp2((logit - base) * LOG2E))
        top = joint
    # A NaN among the scores is in the sum only, because maxima ignore it.
    top = tl.where((l != l) & (top != float("inf")), float("nan"), top)
    return top, l, fade


@triton.jit(do_not_specialize=["count", "heads_q", "seed", "offset", "threshold"])
def forward(q, k, v, out, max_, sum_, q_rope, k_rope, bias, slopes, blocked, bits, sink, strides, lengths, tiles,
            count: tl.int32, heads_q: tl.int32, scale: tl.float32, factor: tl.float32, exponent: tl.float32,
            unit: tl.float32, keep_prob: tl.float32, seed: tl.int64, offset: tl.int32, threshold: tl.int32,
            GROUP: tl.constexpr, RAW: tl.constexpr, BIAS: tl.constexpr, BLOCKED: tl.constexpr, DROPOUT: tl.constexpr,
            SINK: tl.constexpr, MEAN: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
            DIM: tl.constexpr, R: tl.constexpr, DIM_ROPE: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
            V2: tl.constexpr, DIM_V: tl.constexpr, ALIGN: tl.constexpr, BM: tl.constexpr,
            BN: tl.constexpr, CAP: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """Writes out, max and sum of the softmax for one tile of query rows of one head; grid (tiles, heads_q).

    strides, lengths: tables of the tensors' strides and of the sequences' lengths. tiles: int32 [tiles, 8], sequence,
    rows and keys of each tile. MEAN: result of a row without visible keys: 0: zeros; 1: the mean of V; 2: the mean of V
    if its band has a key, else zeros.
    """
    tile = tiles + tl.program_id(0).to(tl.int64) * PER_TILE
    b, h = tl.load(tile).to(tl.int64), tl.program_id(1).to(tl.int64)
    row0 = tl.load(tile + 1)
    row = row0 + tl.arange(0, BM)
    valid = row < tl.load(tile + 2)
    begin, left, full, again, right = (
        tl.load(tile + 3), tl.load(tile + 4), tl.load(tile + 5), tl.load(tile + 6), tl.load(tile + 7)
    )  # fmt: skip
    q_len, kv_len, lo, hi, prefix, shift = common.lengths_at(lengths, count, b)
    first_key, end_key = common.interval(row, valid, kv_len, lo, hi, prefix)
    at_q, stride_q = common.rows_at(strides, count, b, h, layout_index.Q, ALIGN)
    at_k, stride_k = common.rows_at(strides, count, b, h // GROUP, layout_index.K, ALIGN)
    at_v, stride_v = common.rows_at(strides, count, b, h // GROUP, layout_index.V, ALIGN)
    row64 = row.to(tl.int64)
    # Below 64 rows mma.sync is used, which keeps rows from a descriptor in registers: wide rows would spill.
    TMA_Q: tl.constexpr = TMA and BM >= 64
    query = common.load_rows(common.rows_of(q + at_q, stride_q, q_len, BM, D0, D1, D2, DIM, TMA_Q), row0, valid, True,
                             BM, D0, D1, D2, DIM, TMA_Q)  # fmt: skip
    keys = common.rows_of(k + at_k, stride_k, kv_len, BN, D0, D1, D2, DIM, TMA)
    values = common.rows_of(v + at_v, stride_v, kv_len, BN, V0, V1, V2, DIM_V, TMA)
    rope, kr = query[0], keys
    if R:
        at_qr, stride_qr = common.rows_at(strides, count, b, h, layout_index.Q_ROPE, ALIGN)
        at_kr, stride_r = common.rows_at(strides, count, b, h // GROUP, layout_index.K_ROPE, ALIGN)
        rope = common.load_rows(common.rows_of(q_rope + at_qr, stride_qr, q_len, BM, R, 0, 0, DIM_ROPE, TMA_Q), row0,
                                valid, True, BM, R, 0, 0, DIM_ROPE, TMA_Q)[0]  # fmt: skip
        kr = common.rows_of(k_rope + at_kr, stride_r, kv_len, BN, R, 0, 0, DIM_ROPE, TMA)

    acc0, acc1, acc2 = common.zeros_three(BM, V0, V1, V2)
    m = tl.full([BM], -float("inf"), tl.float32)
    state = (acc0, acc1, acc2, m, tl.zeros([BM], tl.float32))
    memory, extras, where = (keys, values, kr), (bias, slopes, blocked, bits), (strides, count, b, h, heads_q)
    numbers, drop = (scale, factor, exponent), (seed, offset, threshold)
    edges, sizes = (valid, first_key, end_key), (q_len, kv_len, shift)
    state = attend(state, query, rope, memory, extras, where, row, edges, sizes, numbers, drop,
                   (begin, left, again, right), True, RAW, BIAS, BLOCKED, DROPOUT, D0, D1, D2, DIM, R, DIM_ROPE,
                   V0, V1, V2, DIM_V, BN, CAP, TMA)  # fmt: skip
    if not BLOCKED:
        state = attend(state, query, rope, memory, extras, where, row, edges, sizes, numbers, drop,
                       (full, (again - full) // BN, again, 0), False, RAW, BIAS, BLOCKED, DROPOUT, D0, D1, D2, DIM, R,
                       DIM_ROPE, V0, V1, V2, DIM_V, BN, CAP, TMA)  # fmt: skip
    acc0, acc1, acc2, m, l = state
    top, l, fade = finish(m, l, sink, h, unit, SINK)
    none = top == -float("inf")
    mean = none
    if MEAN:
        mean = none & (row < tl.where(kv_len > 0, tl.load(tile + 2), 0))
        if MEAN == 2:
            mean = mean & (end_key > first_key)
        acc = add_means((acc0, acc1, acc2), mean, values, bits, where, row, valid, drop, kv_len, DROPOUT, V0, V1,
                        V2, DIM_V, BN, TMA)  # fmt: skip
        acc0, acc1, acc2 = acc
        l = tl.where(mean, kv_len.to(tl.float32), l)
        fade = tl.where(mean, 1.0, fade)
        none = none & ~mean
    l = tl.where(none, 0.0, l)
    rescale = tl.where(none, 0.0, fade / (tl.where(none, 1.0, l) * keep_prob))

    at_out, stride_out = common.rows_at(strides, count, b, h, layout_index.OUT, ALIGN)
    common.store_three(out, at_out + row64 * stride_out, valid, (acc0, acc1, acc2), rescale[:, None], V0, V1, V2, DIM_V)
    at_max, stride_max = common.rows_at(strides, count, b, h, layout_index.MAX, 1)
    at_sum, stride_sum = common.rows_at(strides, count, b, h, layout_index.SUM, 1)
    tl.store(max_ + at_max + row64 * stride_max, top, mask=valid)
    tl.store(sum_ + at_sum + row64 * stride_sum, l, mask=valid)
