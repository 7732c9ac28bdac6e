"""The decode kernels: programs compute attention of few query rows to ranges of keys, and a second kernel merges them.

The host lists the work (decode/launch.py): tiles of the rows that share a key head, each with a range of keys. A
program with all keys of its rows writes the result directly. Page numbers are loaded one iteration before their rows,
so that the rows can be prefetched.
"""

# mypy: disable-error-code="no-untyped-def"
# Annotations are for Triton, which evaluates them: tl.constexpr marks compile-time values.

import triton
import triton.language as tl

from fusion_attention.backends.triton.common import kernels as common
from fusion_attention.backends.triton.common import layout_index, pages
from fusion_attention.backends.triton.common.bias import biased
from fusion_attention.backends.triton.common.kernels import PER_TILE
from fusion_attention.backends.triton.common.pages import PER_CHANNEL, PER_TOKEN
from fusion_attention.backends.triton.dense.forward import finish, weigh

MOST_SHARES = tl.constexpr(128)
AT_ONCE = tl.constexpr(16)  # partial results that join() sums as one tile


@triton.jit
def share_at(slot, hk, rows, row, heads_kv, BUFFER: tl.constexpr):
    """Returns the offset, in floats, of a partial result of a query row in the buffer `partials`, which has BUFFER
    floats per row: [slot, heads_kv, rows, BUFFER].

    slot: number of the range of keys. hk: key head. row: row in the tile of `rows` query rows.
    """
    return ((slot.to(tl.int64) * heads_kv + hk) * rows + row) * BUFFER


@triton.jit
def write_rows(out, max_, sum_, sink, strides, count, b, h, row, valid, acc, m, l, unit, SINK: tl.constexpr,
               V0: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, DIM_V: tl.constexpr,
               ALIGN: tl.constexpr):  # fmt: skip
    """Writes out, max and sum of the `valid` query rows of head h in sequence b, from acc (sums of weight * value in
    three column blocks of widths V0, V1, V2), m and l (running max and sum of the softmax); unit: factor on m."""
    top, l, fade = finish(m, l, sink, h, unit, SINK)
    none = top == -float("inf")
    l = tl.where(none, 0.0, l)
    rescale = tl.where(none, 0.0, fade / tl.where(none, 1.0, l))
    at_out, stride_out = common.rows_at(strides, count, b, h, layout_index.OUT, ALIGN)
    common.store_three(out, at_out + row * stride_out, valid, acc, rescale[:, None], V0, V1, V2, DIM_V)
    at_max, stride_max = common.rows_at(strides, count, b, h, layout_index.MAX, 1)
    at_sum, stride_sum = common.rows_at(strides, count, b, h, layout_index.SUM, 1)
    tl.store(max_ + at_max + row * stride_max, top, mask=valid)
    tl.store(sum_ + at_sum + row * stride_sum, l, mask=valid)


@triton.jit(do_not_specialize=["count", "heads_q", "width", "step", "last", "rows"])
def decode(q, k, v, out, max_, sum_, q_rope, k_rope, bias, slopes, blocked, sink, table, scale_k, offset_k, scale_v,
           offset_v, partials, strides, lengths, work, count: tl.int32, heads_q: tl.int32, width: tl.int32,
           step: tl.int64, last: tl.int32, rows: tl.int32, scale: tl.float32, factor: tl.float32, exponent: tl.float32,
           unit: tl.float32, GROUP: tl.constexpr, RAW: tl.constexpr, BIAS: tl.constexpr, BLOCKED: tl.constexpr,
           SINK: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DIM: tl.constexpr,
           R: tl.constexpr, DIM_ROPE: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
           DIM_V: tl.constexpr, BUFFER: tl.constexpr, SHARED: tl.constexpr, PAIRED: tl.constexpr, PAGE: tl.constexpr,
           WITHIN: tl.constexpr, DEQUANT_K: tl.constexpr, DEQUANT_V: tl.constexpr, ALIGN: tl.constexpr,
           ALIGN_KV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAP: tl.constexpr):  # fmt: skip
    """Computes one entry of the work list, query rows over a range of keys, for one key head; grid (entries, heads_kv).

    Writes out, max and sum, or, if the keys are split, BUFFER floats per row (sums of weight * value, max, sum) to
    `partials`. width: entries of a row of the page table. WITHIN: a tile of keys is within one page. SHARED: values are
    the first columns of the keys. PAIRED: values are int8, loaded in pairs.
    """
    entry, hk = work + tl.program_id(0) * PER_TILE, tl.program_id(1).to(tl.int64)
    b, r0, end_row = tl.load(entry).to(tl.int64), tl.load(entry + 1), tl.load(entry + 2)
    begin, end, shares = tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5)
    q_len, kv_len, lo, hi, prefix, shift = common.lengths_at(lengths, count, b)
    if PAGE:
        kv_len = tl.minimum(kv_len, width.to(tl.int64) * PAGE)
    end = tl.minimum(end, kv_len.to(tl.int32))
    r = r0 + tl.arange(0, BM)
    row, h = r // GROUP, hk * GROUP + r % GROUP
    valid = r < end_row
    first_key, end_key = common.interval(row, valid, kv_len, lo, hi, prefix)
    end_key = tl.minimum(end_key, end)
    # Keys from full_begin to full_end are visible to all rows.
    full_begin, full_end = tl.max(tl.where(valid, first_key, 0), 0), tl.min(tl.where(valid, end_key, end), 0)
    row64 = row.to(tl.int64)
    at_q, stride_q = common.rows_at(strides, count, b, h, layout_index.Q, ALIGN)
    query = common.load_three(q, at_q + row64 * stride_q, valid, True, D0, D1, D2, DIM)
    rope = query[0]
    if R:
        at_qr, stride_qr = common.rows_at(strides, count, b, h, layout_index.Q_ROPE, ALIGN)
        rope = common.load_part(q_rope, at_qr + row64 * stride_qr, valid, 0, R, DIM_ROPE, True)
    cache_k = pages.cache_at(strides, count, b, hk, layout_index.K, ALIGN_KV)
    cache_v = pages.cache_at(strides, count, b, hk, layout_index.V, ALIGN_KV)
    cache_r, scale_ks, offset_ks, scale_vs, offset_vs = cache_k, cache_k, cache_k, cache_v, cache_v
    if R:
        cache_r = pages.cache_at(strides, count, b, hk, layout_index.K_ROPE, ALIGN)
    if DEQUANT_K:
        scale_ks = pages.cache_at(strides, count, b, hk, layout_index.SCALE_K, 1)
        offset_ks = pages.cache_at(strides, count, b, hk, layout_index.OFFSET_K, 1)
    if DEQUANT_V:
        scale_vs = pages.cache_at(strides, count, b, hk, layout_index.SCALE_V, 1)
        offset_vs = pages.cache_at(strides, count, b, hk, layout_index.OFFSET_V, 1)
    added, unit_k = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    if DEQUANT_K == PER_CHANNEL:
        query, added, unit_k = pages.channels_folded(query, scale_k, offset_k, scale_ks, offset_ks, D0, D1, D2, DIM)
    if DEQUANT_K == PER_TOKEN:
        added = pages.rows_summed(query, D1, D2)

    if PAIRED:
        acc0, acc1, acc2 = common.zeros_three(BM, V0 // 2, V0 // 2, 0)
        pairs_v = pages.pairs_at(cache_v)
    else:
        acc0, acc1, acc2 = common.zeros_three(BM, V0, V1, V2)
        pairs_v = cache_v
    m = tl.full([BM], -float("inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    lifted = tl.zeros([BM], tl.float32)  # the offsets' contribution to every element of a row
    unit_v = 0.0
    ahead = pages.page_ahead(table, b * step, last, begin, end, PAGE, WITHIN, BN)
    for j0 in tl.range(begin, end, BN):
        j = j0 + tl.arange(0, BN)
        inside = j < end
        page = ahead
        ahead = pages.page_ahead(table, b * step, last, j0 + BN, end, PAGE, WITHIN, BN)
        # Loaded early, because they are not prefetched.
        offsets_k, offsets_v = inside, inside
        if DEQUANT_K == PER_TOKEN and offset_k is not None:
            offsets_k = pages.tokens_at(offset_k, offset_ks, page, j0, inside, PAGE, WITHIN, BN)
        if DEQUANT_V == PER_TOKEN and offset_v is not None:
            offsets_v = pages.tokens_at(offset_v, offset_vs, page, j0, inside, PAGE, WITHIN, BN)
        keys = pages.stored_three(
            pages.load_rows(k, cache_k, page, j0, inside, PAGE, WITHIN, BN, D0, D1, D2, DIM), query[0], D1, D2
        )
        s = common.inner_three(query, keys, D1, D2)
        if DEQUANT_K == PER_CHANNEL:
            s = s * unit_k[:, None] + added[:, None]
        if DEQUANT_K == PER_TOKEN:
            if offset_k is not None:
                s += added[:, None] * offsets_k[None, :]
            s = s * pages.tokens_at(scale_k, scale_ks, page, j0, inside, PAGE, WITHIN, BN)[None, :]
        if R:
            tail = pages.load_rows(k_rope, cache_r, page, j0, inside, PAGE, WITHIN, BN, R, 0, 0, DIM_ROPE)
            s = tl.dot(rope, tl.trans(tail[0]), s, input_precision="ieee")
        if not RAW:
            s = biased(s, scale, factor, bias, slopes, strides, count, b, h[:, None], heads_q, row[:, None], j[None, :],
                       valid[:, None] & inside[None, :], (q_len, kv_len, shift), BIAS, CAP)  # fmt: skip
        if (j0 < full_begin) | (j0 + BN > full_end) | BLOCKED:
            visible = (j[None, :] >= first_key[:, None]) & (j[None, :] < end_key[:, None])
            if BLOCKED:
                visible = visible & common.not_blocked(
                    blocked, strides, count, b, h[:, None], row[:, None], j[None, :], visible
                )
            s = tl.where(visible, s, -float("inf"))
        p, fade, m, l = weigh(s, m, l, exponent)
        values = keys
        if PAIRED:
            pairs = pages.load_rows(
                v.to(tl.pointer_type(tl.int16)), pairs_v, page, j0, inside, PAGE, WITHIN, BN, V0 // 2, 0, 0, DIM_V // 2
            )
            even, odd = pages.unpaired(pairs[0], query[0])
            values = (even, odd, odd)
        elif not SHARED:
            stored = pages.load_rows(v, cache_v, page, j0, inside, PAGE, WITHIN, BN, V0, V1, V2, DIM_V)
            values = pages.stored_three(stored, query[0], V1, V2)
        if DEQUANT_V == PER_TOKEN:
            scales = pages.tokens_at(scale_v, scale_vs, page, j0, inside, PAGE, WITHIN, BN)
            p, fade, unit_v = pages.scaled_weights(p, fade, scales, unit_v, query[0])
        p = p.to(query[0].dtype)
        if offset_v is not None:
            weight = p.to(tl.float32)
            if DEQUANT_V == PER_TOKEN:
                weight = weight * offsets_v[None, :]
            lifted = lifted * fade + tl.sum(weight, 1)
        acc0 = acc0 * fade[:, None]
        if V1 or PAIRED:
            acc1 = acc1 * fade[:, None]
        if V2:
            acc2 = acc2 * fade[:, None]
        acc0, acc1, acc2 = common.add_three((acc0, acc1, acc2), p, values, V1 or PAIRED, V2)
    if PAIRED:
        acc0 = tl.interleave(acc0, acc1)
    acc = pages.lifted_three((acc0, acc1, acc2), lifted, unit_v, scale_v, offset_v, scale_vs, offset_vs, DEQUANT_V, V0,
                             V1, V2, DIM_V)  # fmt: skip
    # Loaded again, so that it occupies no register during the loop.
    r = tl.load(entry + 1, volatile=True) + tl.arange(0, BM)
    row, h, valid = r // GROUP, hk * GROUP + r % GROUP, r < tl.load(entry + 2, volatile=True)
    row64 = row.to(tl.int64)
    if shares <= 1:
        write_rows(out, max_, sum_, sink, strides, count, b, h, row64, valid, acc, m, l, unit, SINK, V0, V1, V2, DIM_V,
                   ALIGN)  # fmt: skip
    else:
        at = share_at(tl.program_id(0), hk, rows, r - r0, tl.num_programs(1), BUFFER)
        common.store_three(partials, at, valid, acc, 1.0, V0, V1, V2, DIM_V)
        tl.store(partials + at + DIM_V, m, mask=valid)
        tl.store(partials + at + DIM_V + 1, l, mask=valid)


@triton.jit
def joined(partials, at, apart, shares, top, exponent, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """Returns columns [1, WIDTH] from FIRST on of a row's sum of weight * value, merged from `shares` partial results.

    at: offset of the first in `partials`; apart: from one to the next. top: maximum of the row. exponent: factor on
    maxima in base 2.
    """
    d = FIRST + tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float32)
    for first in tl.range(0, shares, AT_ONCE):
        split = first + tl.arange(0, AT_ONCE)
        here = partials + (at + split * apart)
        peak = tl.load(here + DIM, mask=split < shares, other=-float("inf"))
        weight = tl.where(split < shares, tl.exp2((peak - top) * exponent), 0.0)
        mask = (split < shares)[:, None] & (d < DIM)[None, :]
        total += tl.sum(weight[:, None] * tl.load(here[:, None] + d[None, :], mask=mask, other=0.0), 0)
    return total[None, :]


@triton.jit(do_not_specialize=["count", "rows"])
def join(out, max_, sum_, sink, partials, strides, work, count: tl.int32, rows: tl.int32, exponent: tl.float32,
         unit: tl.float32, GROUP: tl.constexpr, SINK: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
         V2: tl.constexpr, DIM_V: tl.constexpr, BUFFER: tl.constexpr, ALIGN: tl.constexpr):  # fmt: skip
    """Writes out, max and sum of one query row, merged from partial results; grid (split tiles * rows, heads_kv)."""
    listed, hk = work + tl.program_id(0) // rows * PER_TILE, tl.program_id(1).to(tl.int64)
    slot, shares = tl.load(listed + 6), tl.load(listed + 7)
    entry, n = work + slot * PER_TILE, tl.program_id(0) % rows
    r = tl.load(entry + 1) + n
    if (shares > 0) & (r < tl.load(entry + 2)):
        b, heads_kv = tl.load(entry).to(tl.int64), tl.num_programs(1)
        at = share_at(slot, hk, rows, n, heads_kv, BUFFER)
        apart = heads_kv * rows.to(tl.int64) * BUFFER
        split = tl.arange(0, MOST_SHARES)
        here = partials + (at + split * apart) + DIM_V
        peak = tl.load(here, mask=split < shares, other=-float("inf"))
        total = tl.load(here + 1, mask=split < shares, other=0.0)
        m = tl.max(peak, 0)
        base = tl.where(m == -float("inf"), 0.0, m)
        l = tl.sum(tl.where(split < shares, total * tl.exp2((peak - base) * exponent), 0.0), 0)
        x0 = joined(partials, at, apart, shares, base, exponent, 0, V0, DIM_V)
        x1, x2 = x0, x0
        if V1:
            x1 = joined(partials, at, apart, shares, base, exponent, V0, V1, DIM_V)
        if V2:
            x2 = joined(partials, at, apart, shares, base, exponent, V0 + V1, V2, DIM_V)
        one = tl.arange(0, 1)
        h, row = hk * GROUP + (r % GROUP + one), (r // GROUP + one).to(tl.int64)
        zero = tl.zeros([1], tl.float32)
        write_rows(out, max_, sum_, sink, strides, count, b, h, row, one == 0, (x0, x1, x2), m + zero, l + zero, unit,
                   SINK, V0, V1, V2, DIM_V, ALIGN)  # fmt: skip
