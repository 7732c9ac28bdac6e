"""Recomputation of result rows that are not finite, one by one, from visible keys only.

Products of tiles multiply hidden keys by 0, and 0 * NaN is NaN, so values that are not finite reach rows to which they
are not visible. These kernels run after the others, read each result once, and return if all of it is finite, as it
nearly always is. Otherwise they select before they multiply: hidden keys, and keys with score -inf, do not count. A
branch in the other kernels would cost registers in every loop.

One row at a time is slow, and in a diverged training run everything is NaN. Therefore rows that must stay NaN (by their
statistics) are not recomputed, and a sum stops when all elements that were NaN are NaN again: the cost of a diverged
run is linear in its rows. Infinities need no recomputation, since 0 * inf is NaN, except where results are scaled or
rounded after the sum (scales of integers, float16).
"""

# mypy: disable-error-code="no-untyped-def"
# Annotations are for Triton, which evaluates them: tl.constexpr marks compile-time values.

import triton
import triton.language as tl

from fusion_attention.backends.triton.common import kernels as common
from fusion_attention.backends.triton.common import layout_index
from fusion_attention.backends.triton.common.bias import biased, capped
from fusion_attention.backends.triton.common.kernels import LOG2E
from fusion_attention.backends.triton.common.pages import cache_at, dequantised_three, offset_of, pages_of, scale_offset
from fusion_attention.backends.triton.dense.backward import row_notes

LEAST = tl.constexpr(2.0**-126)


@triton.jit
def wrong(x, INF: tl.constexpr):
    """Returns true for elements of x that are NaN, or with INF not finite: tiles may have computed them wrongly."""
    x = x.to(tl.float32)
    return ~(tl.abs(x) < float("inf")) if INF else x != x


@triton.jit
def wrong_three(base, offset, there, INF: tl.constexpr,
                W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, DIM: tl.constexpr):  # fmt: skip
    """Returns int32 [rows], 1 for rows at base + offset that contain a NaN (with INF also an infinity), else 0."""
    parts = common.load_three(base, offset, there, True, W0, W1, W2, DIM)
    flagged = tl.max(wrong(parts[0], INF).to(tl.int32), 1)
    if W1:
        flagged = tl.maximum(flagged, tl.max(wrong(parts[1], INF).to(tl.int32), 1))
    if W2:
        flagged = tl.maximum(flagged, tl.max(wrong(parts[2], INF).to(tl.int32), 1))
    return flagged


@triton.jit
def left(acc, old, INF: tl.constexpr):
    """Returns 1 if an element of row `old` is NaN (INF: or infinite) but its recomputed sum in `acc` is not, else 0."""
    return tl.max(tl.max((wrong(old, INF) & (acc == acc)).to(tl.int32), 1), 0)


@triton.jit
def left_three(acc, base, offset, there, INF: tl.constexpr,
               W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, DIM: tl.constexpr):  # fmt: skip
    """Returns 1 if the row at base + offset has a NaN (INF: or infinity) whose recomputed sum in `acc` is not NaN."""
    old = common.load_three(base, offset, there, True, W0, W1, W2, DIM)
    flagged = left(acc[0], old[0], INF)
    if W1:
        flagged = tl.maximum(flagged, left(acc[1], old[1], INF))
    if W2:
        flagged = tl.maximum(flagged, left(acc[2], old[2], INF))
    return flagged


@triton.jit
def recomputed(base, offset, there, acc, factor, INF: tl.constexpr, FIRST: tl.constexpr, W: tl.constexpr,
               DIM: tl.constexpr):  # fmt: skip
    """Overwrites the NaN (with INF also infinite) elements in W columns from FIRST on of a row by acc * factor."""
    old = common.load_part(base, offset, there, FIRST, W, DIM, True)
    common.store_part(base, offset, there, tl.where(wrong(old, INF), acc * factor, old.to(tl.float32)), FIRST, W, DIM)


@triton.jit
def recomputed_three(base, offset, there, acc, factor, INF: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr,
                     W2: tl.constexpr, DIM: tl.constexpr):  # fmt: skip
    """Overwrites NaN (INF: and infinite) elements of the row at base + offset by acc * factor, in column blocks."""
    recomputed(base, offset, there, acc[0], factor, INF, 0, W0, DIM)
    if W1:
        recomputed(base, offset, there, acc[1], factor, INF, W0, W1, DIM)
    if W2:
        recomputed(base, offset, there, acc[2], factor, INF, W0 + W1, W2, DIM)


@triton.jit
def outlasting(weight):
    """Returns the weight, or 2^-126 if it is 0, so that its product with an infinity is infinite instead of NaN."""
    return tl.where(weight == 0.0, LEAST, weight)


@triton.jit
def product(weight, x):
    """Returns weight * x; where x is infinite and the weight underflowed to 0, infinity instead of NaN."""
    return tl.where(tl.abs(x) < float("inf"), weight, outlasting(weight)) * x


@triton.jit
def gathered(weight, wild, counted, x):
    """Returns [1, W], the sum of weight * x over the rows of x [rows, W] for which `counted` is true; elements of x
    that are infinite or NaN have the weight `wild`. weight, wild, counted: [rows, 1]."""
    x = x.to(tl.float32)
    weighed = tl.where(tl.abs(x) < float("inf"), weight, wild) * x
    return tl.sum(tl.where(counted, weighed, 0.0), 0)[None, :]


@triton.jit
def gather_three(acc, weight, wild, counted, x, W1: tl.constexpr, W2: tl.constexpr):
    """Returns acc + sum of weight * x over `counted` rows x, as column blocks; wild: weight of infinities and NaN."""
    acc0, acc1, acc2 = acc
    acc0 += gathered(weight, wild, counted, x[0])
    if W1:
        acc1 += gathered(weight, wild, counted, x[1])
    if W2:
        acc2 += gathered(weight, wild, counted, x[2])
    return acc0, acc1, acc2


@triton.jit(do_not_specialize=["count", "heads_q", "blocks", "width", "step", "last", "seed", "offset", "threshold"])
def recompute_out(q, k, v, out, max_, sum_, q_rope, k_rope, bias, slopes, blocked, bits, table, scale_k, offset_k,
                  scale_v, offset_v, strides, lengths, count: tl.int32, heads_q: tl.int32, blocks: tl.int32,
                  width: tl.int32, step: tl.int64, last: tl.int32, scale: tl.float32, factor: tl.float32,
                  keep_prob: tl.float32, seed: tl.int64, offset: tl.int32, threshold: tl.int32, GROUP: tl.constexpr,
                  BIAS: tl.constexpr, BLOCKED: tl.constexpr, DROPOUT: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
                  D2: tl.constexpr, DIM: tl.constexpr, R: tl.constexpr, DIM_ROPE: tl.constexpr, V0: tl.constexpr,
                  V1: tl.constexpr, V2: tl.constexpr, DIM_V: tl.constexpr, PAGE: tl.constexpr, DEQUANT_K: tl.constexpr,
                  DEQUANT_V: tl.constexpr, ALIGN: tl.constexpr, ALIGN_KV: tl.constexpr, BM: tl.constexpr,
                  BN: tl.constexpr, CAP: tl.constexpr):  # fmt: skip
    """Recomputes the NaN (or infinite) elements of rows of out from visible keys only, with the stored max and sum of
    the softmax; grid (sequences * blocks of BM rows, heads_q)."""
    b, h = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(1).to(tl.int64)
    q_len, kv_len, lo, hi, prefix, shift = common.lengths_at(lengths, count, b)
    if PAGE:
        kv_len = tl.minimum(kv_len, width.to(tl.int64) * PAGE)
    begin = tl.program_id(0) % blocks * BM
    row = begin + tl.arange(0, BM)
    at_out, stride_out = common.rows_at(strides, count, b, h, layout_index.OUT, ALIGN)
    INF: tl.constexpr = DEQUANT_V != 0
    flagged = wrong_three(out, at_out + row.to(tl.int64) * stride_out, row < q_len, INF, V0, V1, V2, DIM_V)
    at_sum, stride_sum = common.rows_at(strides, count, b, h, layout_index.SUM, 1)
    sums = tl.load(sum_ + at_sum + row.to(tl.int64) * stride_sum, mask=row < q_len, other=0.0)
    flagged = tl.max(tl.where(sums == sums, flagged, 0), 0)
    for n in tl.range(begin, tl.where(flagged > 0, tl.minimum(begin + BM, q_len), begin).to(tl.int32)):
        one = n + tl.zeros([1], tl.int32)
        there, row64 = one < q_len, one.to(tl.int64)
        at_out, stride_out = common.rows_at(strides, count, b, h, layout_index.OUT, ALIGN)
        bad = wrong_three(out, at_out + row64 * stride_out, there, INF, V0, V1, V2, DIM_V) > 0
        first_key, end_key = common.interval(one, there, kv_len, lo, hi, prefix)
        at_max, stride_max = common.rows_at(strides, count, b, h, layout_index.MAX, 1)
        at_sum, stride_sum = common.rows_at(strides, count, b, h, layout_index.SUM, 1)
        peak, total = tl.load(max_ + at_max + row64 * stride_max), tl.load(sum_ + at_sum + row64 * stride_sum)
        bad = bad & (total == total)
        empty = peak == -float("inf")
        mean = empty & (total > 0)
        first_key = tl.where(mean, 0, first_key)
        end_key = tl.where(mean & bad, kv_len.to(tl.int32), tl.where(empty | ~bad, 0, end_key))
        at_q, stride_q = common.rows_at(strides, count, b, h, layout_index.Q, ALIGN)
        query = common.load_three(q, at_q + row64 * stride_q, there, True, D0, D1, D2, DIM)
        cache_k = cache_at(strides, count, b, h // GROUP, layout_index.K, ALIGN_KV)
        cache_v = cache_at(strides, count, b, h // GROUP, layout_index.V, ALIGN_KV)
        rope, cache_r = query[0], cache_k
        if R:
            at_qr, stride_qr = common.rows_at(strides, count, b, h, layout_index.Q_ROPE, ALIGN)
            rope = common.load_part(q_rope, at_qr + row64 * stride_qr, there, 0, R, DIM_ROPE, True)
            cache_r = cache_at(strides, count, b, h // GROUP, layout_index.K_ROPE, ALIGN)
        acc0, acc1, acc2 = common.zeros_three(1, V0, V1, V2)
        j0, end = tl.min(first_key, 0) // BN * BN, tl.max(end_key, 0)
        while j0 < end:
            j = j0 + tl.arange(0, BN)
            inside = j < end
            page = pages_of(table, b, step, last, j, end, PAGE)
            keys = common.load_three(k, offset_of(cache_k, page, j, PAGE), inside, True, D0, D1, D2, DIM)
            if DEQUANT_K:
                at_scale = scale_offset(strides, count, b, h // GROUP, page, j, layout_index.SCALE_K, DEQUANT_K, PAGE)
                at_offset = scale_offset(strides, count, b, h // GROUP, page, j, layout_index.OFFSET_K, DEQUANT_K, PAGE)
                keys = dequantised_three(keys, scale_k, offset_k, at_scale, at_offset, inside, j0 < end,
                                         DEQUANT_K, D0, D1, D2, DIM)  # fmt: skip
            s = common.products(query, keys, D1, D2)
            if R:
                tail = common.load_part(k_rope, offset_of(cache_r, page, j, PAGE), inside, 0, R, DIM_ROPE, True)
                s += tl.sum(rope.to(tl.float32) * tail.to(tl.float32), 1)
            counted = (inside & (j >= first_key))[:, None]
            s = biased(s[:, None], scale, factor, bias, slopes, strides, count, b, h, heads_q, one[None, :], j[:, None],
                       counted & ~mean[None, :], (q_len, kv_len, shift), BIAS, CAP)  # fmt: skip
            if BLOCKED:
                left = common.not_blocked(blocked, strides, count, b, h, one[None, :], j[:, None], counted)
                counted = counted & (left | mean[None, :])
            counted = counted & ((s != -float("inf")) | mean[None, :])
            p = tl.where(mean[None, :], 1.0, tl.exp2((s - peak[None, :]) * LOG2E))
            wild = outlasting(p)
            if DROPOUT:
                counted = counted & tl.trans(common.kept_keys(bits, (strides, count, b, h, heads_q), one, j0,
                                                              inside[None, :], (seed, offset, threshold), DROPOUT,
                                                              BN))  # fmt: skip
            values = common.load_three(v, offset_of(cache_v, page, j, PAGE), inside, True, V0, V1, V2, DIM_V)
            if DEQUANT_V:
                at_scale = scale_offset(strides, count, b, h // GROUP, page, j, layout_index.SCALE_V, DEQUANT_V, PAGE)
                at_offset = scale_offset(strides, count, b, h // GROUP, page, j, layout_index.OFFSET_V, DEQUANT_V, PAGE)
                values = dequantised_three(values, scale_v, offset_v, at_scale, at_offset, inside, j0 < end,
                                           DEQUANT_V, V0, V1, V2, DIM_V)  # fmt: skip
            acc0, acc1, acc2 = gather_three((acc0, acc1, acc2), p, wild, counted, values, V1, V2)
            more = left_three((acc0, acc1, acc2), out, at_out + row64 * stride_out, there, INF, V0, V1, V2, DIM_V)
            j0 = tl.where(more > 0, j0 + BN, end)
        rescale = tl.where(total == 0, 1.0, 1.0 / (total * keep_prob))[:, None]
        recomputed_three(
            out, at_out + row64 * stride_out, there & bad, (acc0, acc1, acc2), rescale, INF, V0, V1, V2, DIM_V
        )


@triton.jit(do_not_specialize=["count", "heads_q", "blocks", "seed", "offset", "threshold", "plane"])
def recompute_query(q, k, v, dout, q_rope, k_rope, dq, dq_rope, bias, slopes, blocked, bits, flat, strides, lengths,
                    count: tl.int32, heads_q: tl.int32, blocks: tl.int32, plane: tl.int64, scale: tl.float32,
                    factor: tl.float32, keep_prob: tl.float32, seed: tl.int64, offset: tl.int32, threshold: tl.int32,
                    GROUP: tl.constexpr, BIAS: tl.constexpr, BLOCKED: tl.constexpr, DROPOUT: tl.constexpr,
                    D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DIM: tl.constexpr, R: tl.constexpr,
                    DIM_ROPE: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, DIM_V: tl.constexpr,
                    ALIGN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAP: tl.constexpr):  # fmt: skip
    """Recomputes NaN elements of dq and its rope part from visible keys; grid (sequences * blocks of BM rows,
    heads_q)."""
    b, h = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(1).to(tl.int64)
    q_len, kv_len, lo, hi, prefix, shift = common.lengths_at(lengths, count, b)
    begin = tl.program_id(0) % blocks * BM
    row = begin + tl.arange(0, BM)
    at_dq, stride_dq = common.rows_at(strides, count, b, h, layout_index.DQ, ALIGN)
    INF: tl.constexpr = q.dtype.element_ty == tl.float16
    flagged = wrong_three(dq, at_dq + row.to(tl.int64) * stride_dq, row < q_len, INF, D0, D1, D2, DIM)
    if R:
        at_dr, stride_dr = common.rows_at(strides, count, b, h, layout_index.DQ_ROPE, ALIGN)
        rope_rows = common.load_part(dq_rope, at_dr + row.to(tl.int64) * stride_dr, row < q_len, 0, R, DIM_ROPE, True)
        flagged = tl.maximum(flagged, tl.max(wrong(rope_rows, INF).to(tl.int32), 1))
    at_flat, stride_flat = common.rows_at(strides, count, b, h, layout_index.FLAT, 1)
    note = tl.load(flat + at_flat + row.to(tl.int64) * stride_flat, mask=row < q_len, other=0.0)
    flagged = tl.max(tl.where(note == note, flagged, 0), 0)
    for n in tl.range(begin, tl.where(flagged > 0, tl.minimum(begin + BM, q_len), begin).to(tl.int32)):
        one = n + tl.zeros([1], tl.int32)
        there, row64 = one < q_len, one.to(tl.int64)
        first_key, end_key = common.interval(one, there, kv_len, lo, hi, prefix)
        at_flat, stride_flat = common.rows_at(strides, count, b, h, layout_index.FLAT, 1)
        lse, delta = row_notes(flat, plane, at_flat, stride_flat, one, there)
        bad = wrong_three(dq, at_dq + row64 * stride_dq, there, INF, D0, D1, D2, DIM)
        if R:
            end_of_row = common.load_part(dq_rope, at_dr + row64 * stride_dr, there, 0, R, DIM_ROPE, True)
            bad = tl.maximum(bad, tl.max(wrong(end_of_row, INF).to(tl.int32), 1))
        end_key = tl.where((tl.abs(lse) == float("inf")) | (lse != lse) | (bad == 0), 0, end_key)
        there = there & (lse == lse)
        at_q, stride_q = common.rows_at(strides, count, b, h, layout_index.Q, ALIGN)
        at_k, stride_k = common.rows_at(strides, count, b, h // GROUP, layout_index.K, ALIGN)
        at_v, stride_v = common.rows_at(strides, count, b, h // GROUP, layout_index.V, ALIGN)
        at_do, stride_do = common.rows_at(strides, count, b, h, layout_index.DOUT, ALIGN)
        query = common.load_three(q, at_q + row64 * stride_q, there, True, D0, D1, D2, DIM)
        do = common.load_three(dout, at_do + row64 * stride_do, there, True, V0, V1, V2, DIM_V)
        rope, dr = query[0], tl.zeros([1, R if R else 16], tl.float32)
        if R:
            at_qr, stride_qr = common.rows_at(strides, count, b, h, layout_index.Q_ROPE, ALIGN)
            at_kr, stride_kr = common.rows_at(strides, count, b, h // GROUP, layout_index.K_ROPE, ALIGN)
            rope = common.load_part(q_rope, at_qr + row64 * stride_qr, there, 0, R, DIM_ROPE, True)
        dq0, dq1, dq2 = common.zeros_three(1, D0, D1, D2)
        j0, end = tl.min(first_key, 0) // BN * BN, tl.max(end_key, 0)
        while j0 < end:
            j = j0 + tl.arange(0, BN)
            inside, at = j < end, j.to(tl.int64)
            keys = common.load_three(k, at_k + at * stride_k, inside, True, D0, D1, D2, DIM)
            s, tail = common.products(query, keys, D1, D2), keys[0]
            if R:
                tail = common.load_part(k_rope, at_kr + at * stride_kr, inside, 0, R, DIM_ROPE, True)
                s += tl.sum(rope.to(tl.float32) * tail.to(tl.float32), 1)
            visible, x = (inside & (j >= first_key))[:, None], s[:, None]
            s = biased(x, scale, factor, bias, slopes, strides, count, b, h, heads_q, one[None, :], j[:, None],
                       visible, (q_len, kv_len, shift), BIAS, CAP)  # fmt: skip
            if BLOCKED:
                visible = visible & common.not_blocked(blocked, strides, count, b, h, one[None, :], j[:, None], visible)
            visible = visible & (s != -float("inf"))
            dp = common.products(
                do, common.load_three(v, at_v + at * stride_v, inside, True, V0, V1, V2, DIM_V), V1, V2
            )[:, None]
            if DROPOUT:
                keep = common.kept_keys(bits, (strides, count, b, h, heads_q), one, j0, inside[None, :],
                                        (seed, offset, threshold), DROPOUT, BN)  # fmt: skip
                dp = tl.where(tl.trans(keep), dp / keep_prob, 0.0)
            ds = product(tl.exp2(s * LOG2E - lse[None, :]), dp - delta[None, :])
            if CAP != 0:
                ds = ds * capped(x, scale, CAP)[1]
            dq0, dq1, dq2 = gather_three((dq0, dq1, dq2), ds, ds, visible, keys, D1, D2)
            more = left_three((dq0, dq1, dq2), dq, at_dq + row64 * stride_dq, there, INF, D0, D1, D2, DIM)
            if R:
                dr += gathered(ds, ds, visible, tail)
                end_of_row = common.load_part(dq_rope, at_dr + row64 * stride_dr, there, 0, R, DIM_ROPE, True)
                more = tl.maximum(more, left(dr, end_of_row, INF))
            j0 = tl.where(more > 0, j0 + BN, end)
        recomputed_three(dq, at_dq + row64 * stride_dq, there, (dq0, dq1, dq2), scale, INF, D0, D1, D2, DIM)
        if R:
            recomputed(dq_rope, at_dr + row64 * stride_dr, there, dr, scale, INF, 0, R, DIM_ROPE)


@triton.jit(do_not_specialize=["count", "heads_q", "blocks", "seed", "offset", "threshold", "plane"])
def recompute_key(q, k, v, dout, q_rope, k_rope, dk, dv, dk_rope, bias, slopes, blocked, bits, flat, strides, lengths,
                  count: tl.int32, heads_q: tl.int32, blocks: tl.int32, plane: tl.int64, scale: tl.float32,
                  factor: tl.float32, keep_prob: tl.float32, seed: tl.int64, offset: tl.int32, threshold: tl.int32,
                  GROUP: tl.constexpr, BIAS: tl.constexpr, BLOCKED: tl.constexpr, DROPOUT: tl.constexpr,
                  D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DIM: tl.constexpr, R: tl.constexpr,
                  DIM_ROPE: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, DIM_V: tl.constexpr,
                  ALIGN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAP: tl.constexpr):  # fmt: skip
    """Recomputes the NaN elements of rows of dk, of its rope part and of dv from the query rows that see the key; grid
    (sequences * blocks of BN keys, heads_kv)."""
    b, hk = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(1).to(tl.int64)
    q_len, kv_len, lo, hi, prefix, shift = common.lengths_at(lengths, count, b)
    begin = tl.program_id(0) % blocks * BN
    j = begin + tl.arange(0, BN)
    at_dk, stride_dk = common.rows_at(strides, count, b, hk, layout_index.DK, ALIGN)
    at_dv, stride_dv = common.rows_at(strides, count, b, hk, layout_index.DV, ALIGN)
    INF: tl.constexpr = q.dtype.element_ty == tl.float16
    flagged = wrong_three(dk, at_dk + j.to(tl.int64) * stride_dk, j < kv_len, INF, D0, D1, D2, DIM)
    in_dv = wrong_three(dv, at_dv + j.to(tl.int64) * stride_dv, j < kv_len, False, V0, V1, V2, DIM_V)
    flagged = tl.maximum(flagged, in_dv)
    if R:
        at_dr, stride_dr = common.rows_at(strides, count, b, hk, layout_index.DK_ROPE, ALIGN)
        rope_rows = common.load_part(dk_rope, at_dr + j.to(tl.int64) * stride_dr, j < kv_len, 0, R, DIM_ROPE, True)
        flagged = tl.maximum(flagged, tl.max(wrong(rope_rows, INF).to(tl.int32), 1))
    flagged = tl.max(flagged, 0)
    for n in tl.range(begin, tl.where(flagged > 0, tl.minimum(begin + BN, kv_len), begin).to(tl.int32)):
        one = n + tl.zeros([1], tl.int32)
        inside, key64 = one < kv_len, one.to(tl.int64)
        wrong_k = wrong_three(dk, at_dk + key64 * stride_dk, inside, INF, D0, D1, D2, DIM)
        wrong_v = wrong_three(dv, at_dv + key64 * stride_dv, inside, False, V0, V1, V2, DIM_V) > 0
        if R:
            end_of_row = common.load_part(dk_rope, at_dr + key64 * stride_dr, inside, 0, R, DIM_ROPE, True)
            wrong_k = tl.maximum(wrong_k, tl.max(wrong(end_of_row, INF).to(tl.int32), 1))
        wrong_k = wrong_k > 0
        at_k, stride_k = common.rows_at(strides, count, b, hk, layout_index.K, ALIGN)
        at_v, stride_v = common.rows_at(strides, count, b, hk, layout_index.V, ALIGN)
        key = common.load_three(k, at_k + key64 * stride_k, inside, True, D0, D1, D2, DIM)
        value = common.load_three(v, at_v + key64 * stride_v, inside, True, V0, V1, V2, DIM_V)
        tail, dr = key[0], tl.zeros([1, R if R else 16], tl.float32)
        if R:
            at_kr, stride_kr = common.rows_at(strides, count, b, hk, layout_index.K_ROPE, ALIGN)
            tail = common.load_part(k_rope, at_kr + key64 * stride_kr, inside, 0, R, DIM_ROPE, True)
        dk0, dk1, dk2 = common.zeros_three(1, D0, D1, D2)
        dv0, dv1, dv2 = common.zeros_three(1, V0, V1, V2)
        turns = tl.cdiv(q_len, BM).to(tl.int32)
        # Start at the first row to which the key is visible: if all elements are NaN, one iteration suffices.
        first = tl.where(n < prefix, 0, tl.maximum(n - hi + 1, 0))
        first = tl.minimum(first // BM, turns - 1).to(tl.int32)
        turn, end = 0, tl.where(tl.max((wrong_k | wrong_v).to(tl.int32), 0) > 0, turns * GROUP, 0)
        while turn < end:
            h = hk * GROUP + turn // turns
            row = (first + turn) % turns * BM + tl.arange(0, BM)
            valid, at = row < q_len, row.to(tl.int64)
            at_q, stride_q = common.rows_at(strides, count, b, h, layout_index.Q, ALIGN)
            query = common.load_three(q, at_q + at * stride_q, valid, True, D0, D1, D2, DIM)
            s, rope = common.products(key, query, D1, D2), query[0]
            if R:
                at_qr, stride_qr = common.rows_at(strides, count, b, h, layout_index.Q_ROPE, ALIGN)
                rope = common.load_part(q_rope, at_qr + at * stride_qr, valid, 0, R, DIM_ROPE, True)
                s += tl.sum(rope.to(tl.float32) * tail.to(tl.float32), 1)
            at_flat, stride_flat = common.rows_at(strides, count, b, h, layout_index.FLAT, 1)
            lse, delta = row_notes(flat, plane, at_flat, stride_flat, row, valid)
            there = valid & ~(tl.abs(lse) == float("inf"))
            first_key, end_key = common.interval(row, there, kv_len, lo, hi, prefix)
            visible, x = ((one >= first_key) & (one < end_key))[:, None], s[:, None]
            s = biased(x, scale, factor, bias, slopes, strides, count, b, h, heads_q, row[:, None],
                       one[None, :], visible, (q_len, kv_len, shift), BIAS, CAP)  # fmt: skip
            if BLOCKED:
                visible = visible & common.not_blocked(
                    blocked, strides, count, b, h, row[:, None], one[None, :], visible
                )
            visible = visible & (s != -float("inf"))
            mean = ((lse == float("inf")) & (delta > 0))[:, None]
            p = tl.where(mean, delta[:, None], tl.exp2(s * LOG2E - lse[:, None]))
            at_do, stride_do = common.rows_at(strides, count, b, h, layout_index.DOUT, ALIGN)
            do = common.load_three(dout, at_do + at * stride_do, valid, True, V0, V1, V2, DIM_V)
            dp, counted = common.products(value, do, V1, V2)[:, None], visible | mean
            if DROPOUT:  # one draw gives eight keys
                eight = n // 8 * 8
                keys = eight + tl.arange(0, 8)
                there = valid[:, None] & (keys < kv_len)[None, :]
                keep = common.kept_keys(bits, (strides, count, b, h, heads_q), row, eight, there,
                                        (seed, offset, threshold), DROPOUT, 8)  # fmt: skip
                keep = tl.sum(tl.where(keep & (keys == n)[None, :], 1, 0), 1)[:, None] > 0
                counted = counted & keep
                dp = tl.where(keep, dp / keep_prob, 0.0)
            dv0, dv1, dv2 = gather_three((dv0, dv1, dv2), p, outlasting(p), counted, do, V1, V2)
            ds = product(p, dp - delta[:, None])
            if CAP != 0:
                ds = ds * capped(x, scale, CAP)[1]
            dk0, dk1, dk2 = gather_three((dk0, dk1, dk2), ds, ds, visible, query, D1, D2)
            more = left_three((dk0, dk1, dk2), dk, at_dk + key64 * stride_dk, inside, INF, D0, D1, D2, DIM)
            if R:
                dr += gathered(ds, ds, visible, rope)
                end_of_row = common.load_part(dk_rope, at_dr + key64 * stride_dr, inside, 0, R, DIM_ROPE, True)
                more = tl.maximum(more, left(dr, end_of_row, INF))
            of_dv = left_three((dv0, dv1, dv2), dv, at_dv + key64 * stride_dv, inside, False, V0, V1, V2, DIM_V)
            turn = tl.where(tl.maximum(more, of_dv) > 0, turn + 1, end)
        recomputed_three(dk, at_dk + key64 * stride_dk, inside & wrong_k, (dk0, dk1, dk2), scale, INF, D0, D1, D2, DIM)
        recomputed_three(dv, at_dv + key64 * stride_dv, inside & wrong_v, (dv0, dv1, dv2), 1.0 / keep_prob, False,
                     V0, V1, V2, DIM_V)  # fmt: skip
        if R:
            recomputed(dk_rope, at_dr + key64 * stride_dr, inside & wrong_k, dr, scale, INF, 0, R, DIM_ROPE)
