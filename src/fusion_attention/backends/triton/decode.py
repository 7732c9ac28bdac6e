"""Few query rows against many keys, paged or not: the keys are split among programs, and a second kernel joins them.

A program owns the query rows that share a key head (group * q_len of them) and one share of the keys. Lengths are read
on the device, so a captured graph computes with whatever they are when it is replayed. A page number is loaded one turn
before its rows, which can then be loaded ahead.
"""

# mypy: disable-error-code="no-untyped-def"
# Annotations are Triton's here: they are evaluated, and say what is known while compiling.

import triton
import triton.language as tl

from fusion_attention.backends.triton import views
from fusion_attention.backends.triton.bias import biased
from fusion_attention.backends.triton.common import (
    add_three,
    inner_three,
    interval,
    lengths_at,
    load_part,
    load_three,
    not_blocked,
    rows_at,
    store_three,
    zeros_three,
)
from fusion_attention.backends.triton.forward import finish
from fusion_attention.backends.triton.pages import cache_at, dequantised_three, offset_of, pages_of, scale_offset


@triton.jit(do_not_specialize=["count", "heads_q", "width", "step", "last", "splits", "plane"])
def decode(q, k, v, q_rope, k_rope, bias, slopes, blocked, table, scale_k, offset_k, scale_v, offset_v, part,
           places, lengths, count: tl.int32, heads_q: tl.int32, width: tl.int32, step: tl.int64, last: tl.int32,
           splits: tl.int32, plane: tl.int64, scale: tl.float32, factor: tl.float32, exponent: tl.float32,
           GROUP: tl.constexpr, RAW: tl.constexpr, BIAS: tl.constexpr, BLOCKED: tl.constexpr, D0: tl.constexpr,
           D1: tl.constexpr, D2: tl.constexpr, DIM: tl.constexpr, R: tl.constexpr, DIM_ROPE: tl.constexpr,
           V0: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, DIM_V: tl.constexpr, PAGE: tl.constexpr,
           DEQUANT_K: tl.constexpr, DEQUANT_V: tl.constexpr, ALIGN: tl.constexpr, ALIGN_KV: tl.constexpr,
           BM: tl.constexpr, BN: tl.constexpr, CAP: tl.constexpr):  # fmt: skip
    """Writes (max, sum, weighted values) of BM rows over one share of the keys; grid (rows * splits, heads_kv, B).

    part: `splits` planes of rows of 2 + DIM_V floats. width: pages that a row of the table names.
    """
    b, hk = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    split = tl.program_id(0) % splits
    q_len, kv_len, lo, hi, prefix, shift = lengths_at(lengths, count, b)
    if PAGE:
        kv_len = tl.minimum(kv_len, width.to(tl.int64) * PAGE)
    r = tl.program_id(0) // splits * BM + tl.arange(0, BM)
    row, h = r // GROUP, hk * GROUP + r % GROUP
    valid = row < q_len
    first_key, end_key = interval(row, valid, kv_len, lo, hi, prefix)
    wide = row.to(tl.int64)
    at_q, stride_q = rows_at(places, count, b, h, views.Q, ALIGN)
    query = load_three(q, at_q + wide * stride_q, valid, True, D0, D1, D2, DIM)
    rope = query[0]
    if R:
        at_qr, stride_qr = rows_at(places, count, b, h, views.Q_ROPE, ALIGN)
        rope = load_part(q_rope, at_qr + wide * stride_qr, valid, 0, R, DIM_ROPE, True)
    cache_k = cache_at(places, count, b, hk, views.K, ALIGN_KV)
    cache_v = cache_at(places, count, b, hk, views.V, ALIGN_KV)
    cache_r = cache_k
    if R:
        cache_r = cache_at(places, count, b, hk, views.K_ROPE, ALIGN)

    end = tl.max(end_key, 0)
    begin = tl.minimum(tl.min(tl.where(end_key > first_key, first_key, end), 0), end) // BN * BN
    each = tl.cdiv(tl.cdiv(end - begin, BN), splits) * BN
    begin = begin + split * each
    end = tl.minimum(begin + each, end)
    acc0, acc1, acc2 = zeros_three(BM, V0, V1, V2)
    m = tl.full([BM], -float("inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    ahead = pages_of(table, b, step, last, begin + tl.arange(0, BN), end, PAGE)
    for j0 in tl.range(begin, end, BN):
        j = j0 + tl.arange(0, BN)
        inside = j < end
        page = ahead
        ahead = pages_of(table, b, step, last, j + BN, end, PAGE)
        keys = load_three(k, offset_of(cache_k, page, j, PAGE), inside, True, D0, D1, D2, DIM)
        if DEQUANT_K:
            at_scale = scale_offset(places, count, b, hk, page, j, views.SCALE_K, DEQUANT_K, PAGE)
            at_offset = scale_offset(places, count, b, hk, page, j, views.OFFSET_K, DEQUANT_K, PAGE)
            keys = dequantised_three(keys, scale_k, offset_k, at_scale, at_offset, inside, j0 < end, query[0],
                                     DEQUANT_K, D0, D1, D2, DIM)  # fmt: skip
        s = inner_three(query, keys, D1, D2)
        if R:
            tail = load_part(k_rope, offset_of(cache_r, page, j, PAGE), inside, 0, R, DIM_ROPE, True)
            s = tl.dot(rope, tl.trans(tail), s, input_precision="ieee")
        seen = (j[None, :] >= first_key[:, None]) & (j[None, :] < end_key[:, None]) & inside[None, :]
        if not RAW:
            s = biased(s, scale, factor, bias, slopes, places, count, b, h[:, None], heads_q, row[:, None], j[None, :],
                       seen, (q_len, kv_len, shift), BIAS, CAP)  # fmt: skip
        if BLOCKED:
            seen = seen & not_blocked(blocked, places, count, b, h[:, None], row[:, None], j[None, :], seen)
        s = tl.where(seen, s, -float("inf"))
        now = tl.maximum(m, tl.max(s, 1))
        base = tl.where(now == -float("inf"), 0.0, now)
        p = tl.exp2((s - base[:, None]) * exponent)
        fade = tl.exp2((m - base) * exponent)
        l = l * fade + tl.sum(p, 1)
        m = now
        values = load_three(v, offset_of(cache_v, page, j, PAGE), inside, True, V0, V1, V2, DIM_V)
        if DEQUANT_V:
            at_scale = scale_offset(places, count, b, hk, page, j, views.SCALE_V, DEQUANT_V, PAGE)
            at_offset = scale_offset(places, count, b, hk, page, j, views.OFFSET_V, DEQUANT_V, PAGE)
            values = dequantised_three(values, scale_v, offset_v, at_scale, at_offset, inside, j0 < end,
                                       query[0], DEQUANT_V, V0, V1, V2, DIM_V)  # fmt: skip
        acc0 = acc0 * fade[:, None]
        if V1:
            acc1 = acc1 * fade[:, None]
        if V2:
            acc2 = acc2 * fade[:, None]
        acc0, acc1, acc2 = add_three((acc0, acc1, acc2), p.to(query[0].dtype), values, V1, V2)
    at, stride = rows_at(places, count, b, h, views.FLAT, 1)
    at = split * plane + (at + wide * stride) * (DIM_V + 2)
    tl.store(part + at, m, mask=valid)
    tl.store(part + at + 1, l, mask=valid)
    store_three(part, at + 2, valid, (acc0, acc1, acc2), 1.0, V0, V1, V2, DIM_V)


@triton.jit
def fold(part, at, splits, plane, top, exponent, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """One part of a row, summed over its shares."""
    d = FIRST + tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float32)
    for split in tl.range(0, splits):
        here = part + at + split * plane
        weight = tl.exp2((tl.load(here) - top) * exponent)
        total += weight * tl.load(here + 2 + d, mask=d < DIM, other=0.0)
    return total


@triton.jit(do_not_specialize=["count", "heads_q", "splits", "plane"])
def join(out, max_, sum_, sink, part, places, lengths, count: tl.int32, heads_q: tl.int32, splits: tl.int32,
         plane: tl.int64, exponent: tl.float32, unit: tl.float32, SINK: tl.constexpr, V0: tl.constexpr,
         V1: tl.constexpr, V2: tl.constexpr, DIM_V: tl.constexpr, ALIGN: tl.constexpr):  # fmt: skip
    """Writes out, max and sum of a row of a head from its shares; grid (most rows * heads_q, B)."""
    b = tl.program_id(1).to(tl.int64)
    row, h = (tl.program_id(0) // heads_q).to(tl.int64), (tl.program_id(0) % heads_q).to(tl.int64)
    there = tl.arange(0, 1) + row < tl.load(lengths + b)
    at, stride = rows_at(places, count, b, h, views.FLAT, 1)
    at = tl.where(row < tl.load(lengths + b), at + row * stride, 0) * (DIM_V + 2)
    m, l = -float("inf"), 0.0
    for split in tl.range(0, splits):
        here = part + at + split * plane
        peak = tl.load(here)
        now = tl.maximum(m, peak)
        base = tl.where(now == -float("inf"), 0.0, now)
        l = l * tl.exp2((m - base) * exponent) + tl.load(here + 1) * tl.exp2((peak - base) * exponent)
        m = now
    top, total, fade = finish(m, l, sink, h, unit, SINK)
    none = top == -float("inf")
    total = tl.where(none, 0.0, total)
    share = tl.where(none, 0.0, fade / tl.where(none, 1.0, total))
    base = tl.where(m == -float("inf"), 0.0, m)
    at_out, stride_out = rows_at(places, count, b, h, views.OUT, ALIGN)
    at_out = at_out + row * stride_out + tl.zeros([1], tl.int64)
    x0 = fold(part, at, splits, plane, base, exponent, 0, V0, DIM_V)[None, :]
    x1, x2 = x0, x0
    if V1:
        x1 = fold(part, at, splits, plane, base, exponent, V0, V1, DIM_V)[None, :]
    if V2:
        x2 = fold(part, at, splits, plane, base, exponent, V0 + V1, V2, DIM_V)[None, :]
    store_three(out, at_out, there, (x0, x1, x2), share, V0, V1, V2, DIM_V)
    one = tl.zeros([1], tl.int64)
    at_max, stride_max = rows_at(places, count, b, h, views.MAX, 1)
    at_sum, stride_sum = rows_at(places, count, b, h, views.SUM, 1)
    tl.store(max_ + at_max + row * stride_max + one, top, mask=there)
    tl.store(sum_ + at_sum + row * stride_sum + one, total, mask=there)
