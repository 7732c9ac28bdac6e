"""The backward kernels: what each row needs, then dq by tiles of rows, then dk and dv by tiles of keys.

    P = exp(S - max) / sum,  dP = (dout . v) * M,  dS = P * (dP - D),  D = dout . out,  M = keep / keep_prob
    dq = scale * dS k,  dk = scale * dS^T q,  dv = (P * M)^T dout       beneath a cap, dS * (1 - tanh^2) for dS

Two kernels compute S twice, but every gradient of a row or a key has one owner, which sums in one order: the same bits
in every run. Each has one loop that tests the mask in every tile: a second copy of a loop this big spills registers.
"""

# mypy: disable-error-code="no-untyped-def"
# Annotations are Triton's here: they are evaluated, and say what is known while compiling.

import triton
import triton.language as tl

from fusion_attention.backends.triton import views
from fusion_attention.backends.triton.bias import add_dbias, biased, capped
from fusion_attention.backends.triton.common import (
    LOG2E,
    PER_TILE,
    add_three,
    heads_at,
    inner_three,
    interval,
    kept_keys,
    lengths_at,
    load_part,
    load_three,
    not_blocked,
    products,
    rows_at,
    store_part,
    store_three,
    zeros_three,
)


@triton.jit(do_not_specialize=["count", "plane"])
def prepare(out, dout, max_, sum_, flat, sink, part, places, tiles, count: tl.int32, plane: tl.int64,
            SINK: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, DIM_V: tl.constexpr,
            ALIGN: tl.constexpr, BM: tl.constexpr):  # fmt: skip
    """Writes three planes of flat: max, 1 / sum and D of each row; grid (tiles, heads_q).

    An empty row has a share of 0, one in mean form -1 / n. `part` receives the tile's share of dsink.
    """
    tile = tiles + tl.program_id(0).to(tl.int64) * PER_TILE
    b, h = tl.load(tile).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = tl.load(tile + 1) + tl.arange(0, BM)
    valid = row < tl.load(tile + 2)
    wide = row.to(tl.int64)
    at_out, stride_out = rows_at(places, count, b, h, views.OUT, ALIGN)
    at_dout, stride_dout = rows_at(places, count, b, h, views.DOUT, ALIGN)
    o = load_three(out + at_out, wide * stride_out, valid, True, V0, V1, V2, DIM_V)
    do = load_three(dout + at_dout, wide * stride_dout, valid, True, V0, V1, V2, DIM_V)
    delta = products(o, do, V1, V2)
    at_max, stride_max = rows_at(places, count, b, h, views.MAX, 1)
    at_sum, stride_sum = rows_at(places, count, b, h, views.SUM, 1)
    peak = tl.load(max_ + at_max + wide * stride_max, mask=valid, other=0.0)
    total = tl.load(sum_ + at_sum + wide * stride_sum, mask=valid, other=1.0)
    empty = peak == -float("inf")
    share = tl.where(empty, tl.where(total > 0, -1.0 / total, 0.0), 1.0 / total)
    peak = tl.where(empty, 0.0, peak)
    at, stride = rows_at(places, count, b, h, views.FLAT, 1)
    at = flat + at + wide * stride
    tl.store(at, peak, mask=valid)
    tl.store(at + plane, share, mask=valid)
    tl.store(at + 2 * plane, tl.where(empty, 0.0, delta), mask=valid)
    if SINK:
        given = delta * tl.exp2((tl.load(sink + h) - peak) * LOG2E) * share
        given = tl.where(empty | (row >= tl.load(tile + 2)), 0.0, given)
        tl.store(part + tl.program_id(0).to(tl.int64) * tl.num_programs(1) + h, -tl.sum(given, 0))


@triton.jit
def row_notes(flat, plane, at, stride, row, valid):
    """(max, share, D) of rows, as prepare() wrote them."""
    at = flat + at + row.to(tl.int64) * stride
    peak, share = tl.load(at, mask=valid, other=0.0), tl.load(at + plane, mask=valid, other=0.0)
    return peak, share, tl.load(at + 2 * plane, mask=valid, other=0.0)


@triton.jit(do_not_specialize=["count", "heads_q", "seed", "offset", "threshold", "plane"])
def backward_query(q, k, v, dout, q_rope, k_rope, dq, dq_rope, bias, dbias, slopes, blocked, bits, flat, places,
                   lengths, tiles, count: tl.int32, heads_q: tl.int32, plane: tl.int64, scale: tl.float32,
                   factor: tl.float32, keep_prob: tl.float32, seed: tl.int64, offset: tl.int32, threshold: tl.int32,
                   GROUP: tl.constexpr, BIAS: tl.constexpr, BLOCKED: tl.constexpr, DROPOUT: tl.constexpr,
                   D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DIM: tl.constexpr, R: tl.constexpr,
                   DIM_ROPE: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, DIM_V: tl.constexpr,
                   ALIGN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAP: tl.constexpr):  # fmt: skip
    """Writes dq of one tile of rows of one head, and adds to dbias; grid (tiles, heads_q)."""
    tile = tiles + tl.program_id(0).to(tl.int64) * PER_TILE
    b, h = tl.load(tile).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = tl.load(tile + 1) + tl.arange(0, BM)
    valid = row < tl.load(tile + 2)
    begin, turns = tl.load(tile + 3), tl.load(tile + 4)
    q_len, kv_len, lo, hi, prefix, shift = lengths_at(lengths, count, b)
    first_key, end_key = interval(row, valid, kv_len, lo, hi, prefix)
    wide = row.to(tl.int64)
    at_q, stride_q = rows_at(places, count, b, h, views.Q, ALIGN)
    at_k, stride_k = rows_at(places, count, b, h // GROUP, views.K, ALIGN)
    at_v, stride_v = rows_at(places, count, b, h // GROUP, views.V, ALIGN)
    at_do, stride_do = rows_at(places, count, b, h, views.DOUT, ALIGN)
    query = load_three(q, at_q + wide * stride_q, valid, True, D0, D1, D2, DIM)
    do = load_three(dout, at_do + wide * stride_do, valid, True, V0, V1, V2, DIM_V)
    dr = tl.zeros([BM, R if R else 16], tl.float32)
    rope, stride_r, kr = query[0], stride_k, k
    if R:
        at_qr, stride_qr = rows_at(places, count, b, h, views.Q_ROPE, ALIGN)
        at_kr, stride_r = rows_at(places, count, b, h // GROUP, views.K_ROPE, ALIGN)
        rope, kr = load_part(q_rope, at_qr + wide * stride_qr, valid, 0, R, DIM_ROPE, True), k_rope + at_kr
    at_flat, stride_flat = rows_at(places, count, b, h, views.FLAT, 1)
    peak, share, delta = row_notes(flat, plane, at_flat, stride_flat, row, valid)
    end_key = tl.where(share <= 0, 0, end_key)  # an empty row gives dq nothing, one of NaN gives NaN
    k, v, where = k + at_k, v + at_v, (places, count, b, h, heads_q)
    dq0, dq1, dq2 = zeros_three(BM, D0, D1, D2)
    for t in tl.range(0, turns):
        j0 = begin + t * BN
        j = j0 + tl.arange(0, BN)
        inside = j < kv_len
        at = j.to(tl.int64)
        keys = load_three(k, at * stride_k, inside, True, D0, D1, D2, DIM)
        s = inner_three(query, keys, D1, D2)
        tail = keys[0]
        if R:
            tail = load_part(kr, at * stride_r, inside, 0, R, DIM_ROPE, True)
            s = tl.dot(rope, tl.trans(tail), s, input_precision="ieee")
        x = s
        seen = (j[None, :] >= first_key[:, None]) & (j[None, :] < end_key[:, None])
        s = biased(s, scale, factor, bias, slopes, places, count, b, h, heads_q, row[:, None], j[None, :], seen,
                   (q_len, kv_len, shift), BIAS, CAP)  # fmt: skip
        if BLOCKED:
            seen = seen & not_blocked(blocked, places, count, b, h, row[:, None], j[None, :], seen)
        dp = inner_three(do, load_three(v, at * stride_v, inside, True, V0, V1, V2, DIM_V), V1, V2)
        if DROPOUT:
            keep = kept_keys(bits, where, row, j0, seen, (seed, offset, threshold), DROPOUT, BN)
            dp = tl.where(keep, dp / keep_prob, 0.0)
        p = tl.exp2((s - peak[:, None]) * LOG2E) * share[:, None]
        ds = tl.where(seen, p * (dp - delta[:, None]), 0.0)
        if dbias is not None:  # nothing mends what is added to it
            ds = tl.where(s == -float("inf"), 0.0, ds)
            add_dbias(dbias, where, row[:, None], j[None, :], seen, ds * factor, (q_len, kv_len, shift), BIAS)
        if CAP != 0:
            ds = tl.where(seen, ds * capped(x, scale, CAP)[1], 0.0)
        dq0, dq1, dq2 = add_three((dq0, dq1, dq2), ds, keys, D1, D2)
        if R:
            dr = tl.dot(ds.to(tail.dtype), tail, dr, input_precision="ieee")
    at_dq, stride_dq = rows_at(places, count, b, h, views.DQ, ALIGN)
    store_three(dq, at_dq + wide * stride_dq, valid, (dq0, dq1, dq2), scale, D0, D1, D2, DIM)
    if R:
        at_dr, stride_dr = rows_at(places, count, b, h, views.DQ_ROPE, ALIGN)
        store_part(dq_rope, at_dr + wide * stride_dr, valid, dr * scale, 0, R, DIM_ROPE)


@triton.jit(do_not_specialize=["count", "heads_q", "seed", "offset", "threshold", "plane"])
def backward_key(q, k, v, dout, q_rope, k_rope, dk, dv, dk_rope, bias, slopes, blocked, bits, flat, places, lengths,
                 tiles, count: tl.int32, heads_q: tl.int32, plane: tl.int64, scale: tl.float32, factor: tl.float32,
                 keep_prob: tl.float32, seed: tl.int64, offset: tl.int32, threshold: tl.int32, GROUP: tl.constexpr,
                 BIAS: tl.constexpr, BLOCKED: tl.constexpr, DROPOUT: tl.constexpr, MEAN: tl.constexpr,
                 D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DIM: tl.constexpr, R: tl.constexpr,
                 DIM_ROPE: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, DIM_V: tl.constexpr,
                 ALIGN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAP: tl.constexpr):  # fmt: skip
    """Writes dk and dv of one tile of keys of one key head, all its query heads in turn; grid (tiles, heads_kv).

    Scores stand with keys as rows: weights go into the products as they were computed, from registers.
    """
    tile = tiles + tl.program_id(0).to(tl.int64) * PER_TILE
    b, hk = tl.load(tile).to(tl.int64), tl.program_id(1).to(tl.int64)
    j0 = tl.load(tile + 1)
    j = j0 + tl.arange(0, BN)
    inside = j < tl.load(tile + 2)
    begin, turns = tl.load(tile + 3), tl.load(tile + 4)
    q_len, kv_len, lo, hi, prefix, shift = lengths_at(lengths, count, b)
    wide = j.to(tl.int64)
    at_k, stride_k = rows_at(places, count, b, hk, views.K, ALIGN)
    at_v, stride_v = rows_at(places, count, b, hk, views.V, ALIGN)
    keys = load_three(k, at_k + wide * stride_k, inside, True, D0, D1, D2, DIM)
    values = load_three(v, at_v + wide * stride_v, inside, True, V0, V1, V2, DIM_V)
    tail, dr = keys[0], tl.zeros([BN, R if R else 16], tl.float32)
    if R:
        at_kr, stride_kr = rows_at(places, count, b, hk, views.K_ROPE, ALIGN)
        tail = load_part(k_rope, at_kr + wide * stride_kr, inside, 0, R, DIM_ROPE, True)
    dk0, dk1, dk2 = zeros_three(BN, D0, D1, D2)
    dv0, dv1, dv2 = zeros_three(BN, V0, V1, V2)
    # Loaded before the loop: an address that is loaded in it keeps the rows behind it from being loaded ahead.
    at_q, head_q, stride_q = heads_at(places, count, b, views.Q, ALIGN)
    at_do, head_do, stride_do = heads_at(places, count, b, views.DOUT, ALIGN)
    at_flat, head_flat, stride_flat = heads_at(places, count, b, views.FLAT, 1)
    if R:
        at_qr, head_qr, stride_qr = heads_at(places, count, b, views.Q_ROPE, ALIGN)
    for turn in tl.range(0, turns * GROUP):
        h = hk * GROUP + turn // turns
        row = begin + turn % turns * BM + tl.arange(0, BM)
        valid = row < q_len
        at = row.to(tl.int64)
        where = (places, count, b, h, heads_q)
        query = load_three(q + h * head_q, at_q + at * stride_q, valid, True, D0, D1, D2, DIM)
        s = inner_three(keys, query, D1, D2)
        rope = query[0]
        if R:
            rope = load_part(q_rope + h * head_qr, at_qr + at * stride_qr, valid, 0, R, DIM_ROPE, True)
            s = tl.dot(tail, tl.trans(rope), s, input_precision="ieee")
        x = s
        peak, share, delta = row_notes(flat, plane, at_flat + h * head_flat, stride_flat, row, valid)
        first_key, end_key = interval(row, valid & ~(share <= 0), kv_len, lo, hi, prefix)
        seen = (j[:, None] >= first_key[None, :]) & (j[:, None] < end_key[None, :])
        s = biased(s, scale, factor, bias, slopes, places, count, b, h, heads_q, row[None, :], j[:, None], seen,
                   (q_len, kv_len, shift), BIAS, CAP)  # fmt: skip
        if BLOCKED:
            seen = seen & not_blocked(blocked, places, count, b, h, row[None, :], j[:, None], seen)
        p = tl.where(seen, tl.exp2((s - peak[None, :]) * LOG2E) * share[None, :], 0.0)
        weight = p
        if MEAN:
            weight = tl.where((share < 0)[None, :] & inside[:, None], -share[None, :], p)
        do = load_three(dout + h * head_do, at_do + at * stride_do, valid, True, V0, V1, V2, DIM_V)
        dp = inner_three(values, do, V1, V2)
        if DROPOUT:
            there = valid[:, None] & inside[None, :]
            keep = tl.trans(kept_keys(bits, where, row, j0, there, (seed, offset, threshold), DROPOUT, BN))
            weight = tl.where(keep, weight, 0.0)
            dp = tl.where(keep, dp / keep_prob, 0.0)
        dv0, dv1, dv2 = add_three((dv0, dv1, dv2), weight, do, V1, V2)
        ds = tl.where(seen, p * (dp - delta[None, :]), 0.0)
        if CAP != 0:
            ds = tl.where(seen, ds * capped(x, scale, CAP)[1], 0.0)
        dk0, dk1, dk2 = add_three((dk0, dk1, dk2), ds, query, D1, D2)
        if R:
            dr = tl.dot(ds.to(rope.dtype), rope, dr, input_precision="ieee")
    at_dk, stride_dk = rows_at(places, count, b, hk, views.DK, ALIGN)
    at_dv, stride_dv = rows_at(places, count, b, hk, views.DV, ALIGN)
    store_three(dk, at_dk + wide * stride_dk, inside, (dk0, dk1, dk2), scale, D0, D1, D2, DIM)
    store_three(dv, at_dv + wide * stride_dv, inside, (dv0, dv1, dv2), 1.0 / keep_prob, V0, V1, V2, DIM_V)
    if R:
        at_dr, stride_dr = rows_at(places, count, b, hk, views.DK_ROPE, ALIGN)
        store_part(dk_rope, at_dr + wide * stride_dr, inside, dr * scale, 0, R, DIM_ROPE)
