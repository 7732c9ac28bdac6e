"""The kernel that computes rows of attention to selected keys again if their results are not finite, head by head.

Products multiply slots with a weight of 0 too, and 0 * inf is NaN. A weight is 0 if the score of its key is -inf, or if
it underflows. This kernel runs after the forward kernel, and returns at once if all results are finite.
"""

# mypy: disable-error-code="no-untyped-def"
# Annotations are for Triton, which evaluates them: tl.constexpr marks compile-time values.

import triton
import triton.language as tl

from fusion_attention.backends.triton.common import kernels as common
from fusion_attention.backends.triton.common import layout_index
from fusion_attention.backends.triton.common.kernels import LOG2E
from fusion_attention.backends.triton.common.pages import cache_at
from fusion_attention.backends.triton.dense import not_finite
from fusion_attention.backends.triton.selected import selection
from fusion_attention.backends.triton.selected.forward import NUMBERS, heads_of, offset_within, page_of


@triton.jit
def row_of(strides, count, b, row, VIEW: tl.constexpr, ALIGN: tl.constexpr):
    """Returns (offset of head 0 of token `row` of sequence b, stride of a head) in tensor number VIEW of `strides`."""
    at, head, token = common.heads_at(strides, count, b, VIEW, ALIGN)
    return at + row * token, head


@triton.jit
def add_finite(acc, query, rope, memory, caches, entries, table, last, first, end, slots, peak, scale, at_out, there,
               LISTED: tl.constexpr, BLOCK: tl.constexpr, SHARED: tl.constexpr, PAGE: tl.constexpr,
               NEAR: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DIM: tl.constexpr,
               R: tl.constexpr, DIM_ROPE: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
               DIM_V: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Returns acc (column blocks) plus weight * value over a query row's visible keys in its list (LISTED) or band.

    Stops as soon as all elements that are NaN at `at_out` (address, offset) are NaN in the sum too. peak: maximum of
    the row's scores. memory, caches: addresses of k, v, k_rope; their (first element, strides of token and page).
    entries: the list; slots: number of its keys; first, end: visible keys.
    """
    acc0, acc1, acc2 = acc
    k, v, k_rope = memory
    cache_k, cache_v, cache_r = caches
    n0 = tl.zeros([], tl.int32)
    while n0 < slots:
        n = n0 + tl.arange(0, BN)
        if LISTED:
            key = selection.key_ahead(entries, n, slots, first, end, BLOCK)
        else:
            key = tl.where(n < slots, first + n, -1)
        counted = key >= 0
        page = page_of(table, key, counted, last, PAGE)
        keys = common.load_three(k + cache_k[0], offset_within(cache_k, key, page, PAGE, NEAR), counted, True, D0, D1,
                                 D2, DIM)  # fmt: skip
        s = common.products(query, keys, D1, D2)
        if R:
            offset = offset_within(cache_r, key, page, PAGE, NEAR)
            tail = common.load_part(k_rope + cache_r[0], offset, counted, 0, R, DIM_ROPE, True)
            s += tl.sum(rope.to(tl.float32) * tail.to(tl.float32), 1)
        s = s * scale
        values = keys
        if not SHARED:
            offset = offset_within(cache_v, key, page, PAGE, NEAR)
            values = common.load_three(v + cache_v[0], offset, counted, True, V0, V1, V2, DIM_V)
        p = tl.exp2((s - peak) * LOG2E)[:, None]
        counted = (counted & (s != -float("inf")))[:, None]
        acc0, acc1, acc2 = not_finite.gather_three(
            (acc0, acc1, acc2), p, not_finite.outlasting(p), counted, values, V1, V2
        )
        more = not_finite.left_three((acc0, acc1, acc2), at_out[0], at_out[1], there, False, V0, V1, V2, DIM_V)
        n0 = tl.where(more > 0, n0 + BN, slots)
    return acc0, acc1, acc2


@triton.jit(do_not_specialize=NUMBERS[:-1])
def recompute_lists(q, k, v, out, max_, sum_, q_rope, k_rope, k_compressed, v_compressed, indices, table,
                    table_compressed, strides, lengths, tokens, count: tl.int32, heads_kv: tl.int32, width: tl.int32,
                    step: tl.int64, last: tl.int32, width_compressed: tl.int32, step_compressed: tl.int64,
                    last_compressed: tl.int32, scale: tl.float32, GROUP: tl.constexpr, SELECT: tl.constexpr,
                    BLOCK: tl.constexpr, RATIO: tl.constexpr, SHARED: tl.constexpr, PAGE: tl.constexpr,
                    PAGE_COMPRESSED: tl.constexpr, NEAR: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
                    D2: tl.constexpr, DIM: tl.constexpr, R: tl.constexpr, DIM_ROPE: tl.constexpr, V0: tl.constexpr,
                    V1: tl.constexpr, V2: tl.constexpr, DIM_V: tl.constexpr, ALIGN: tl.constexpr, BM: tl.constexpr,
                    BN: tl.constexpr):  # fmt: skip
    """Recomputes the NaN elements of rows of out from visible keys only, with the stored max and sum of the softmax;
    grid (tokens * tiles of BM heads of a token)."""
    programs = heads_kv * ((GROUP + BM - 1) // BM)
    b, row = selection.token_at(tokens, tl.program_id(0) // programs)
    hk, h, valid = heads_of(tl.program_id(0) % programs, GROUP, BM)
    at_out, head_out = row_of(strides, count, b, row, layout_index.OUT, ALIGN)
    at_max, head_max = row_of(strides, count, b, row, layout_index.MAX, 1)
    at_sum, head_sum = row_of(strides, count, b, row, layout_index.SUM, 1)
    flagged = not_finite.wrong_three(out + at_out, h * head_out, valid, False, V0, V1, V2, DIM_V)
    sums = tl.load(sum_ + at_sum + h * head_sum, mask=valid, other=0.0)
    some = tl.max(tl.where(sums == sums, flagged, 0), 0) > 0
    begin = tl.min(h, 0).to(tl.int32)
    _, kv_len, lo, hi, prefix, _ = common.lengths_at(lengths, count, b)
    if PAGE:
        kv_len = tl.minimum(kv_len, width.to(tl.int64) * PAGE)
        table += b * step
    first, end = selection.band_of(row, kv_len, lo, hi, prefix)
    entries = indices
    if SELECT:
        entries = selection.list_at(indices, strides, count, b, hk, row)
    last_end = end
    if RATIO:
        last_end = selection.compressed_end(lengths, count, b, row, RATIO)
        if PAGE_COMPRESSED:
            last_end = tl.minimum(last_end, width_compressed * PAGE_COMPRESSED)
            table_compressed += b * step_compressed
    for one in tl.range(begin, tl.where(some, tl.minimum(begin + BM, (hk + 1) * GROUP), begin).to(tl.int32)):
        head = one + tl.zeros([1], tl.int64)
        there = head >= 0
        bad = not_finite.wrong_three(out + at_out, head * head_out, there, False, V0, V1, V2, DIM_V) > 0
        peak, total = tl.load(max_ + at_max + head * head_max), tl.load(sum_ + at_sum + head * head_sum)
        bad = bad & (total == total) & (peak != -float("inf"))
        any_bad = tl.max(bad.to(tl.int32), 0) > 0
        slots = tl.where(any_bad, tl.maximum(end - first, 0), 0)
        if not RATIO:
            slots = selection.slots_read(entries, tl.where(any_bad, end, 0), SELECT, BLOCK)
        at_q, head_q = row_of(strides, count, b, row, layout_index.Q, ALIGN)
        query = common.load_three(q + at_q, head * head_q, there, True, D0, D1, D2, DIM)
        cache_k = cache_at(strides, count, b, hk, layout_index.K, ALIGN)
        cache_v, cache_r, rope = cache_k, cache_k, query[0]
        if not SHARED:
            cache_v = cache_at(strides, count, b, hk, layout_index.V, ALIGN)
        if R:
            at_r, head_r = row_of(strides, count, b, row, layout_index.Q_ROPE, ALIGN)
            rope = common.load_part(q_rope + at_r, head * head_r, there, 0, R, DIM_ROPE, True)
            cache_r = cache_at(strides, count, b, hk, layout_index.K_ROPE, ALIGN)
        acc = common.zeros_three(1, V0, V1, V2)
        at_head = (out + at_out, head * head_out)
        acc = add_finite(
            acc, query, rope, (k, v, k_rope), (cache_k, cache_v, cache_r), entries, table, last, first, end, slots,
            peak, scale, at_head, there, not RATIO, BLOCK, SHARED, PAGE, NEAR, D0, D1, D2, DIM, R, DIM_ROPE, V0, V1,
            V2, DIM_V, BN)  # fmt: skip
        if RATIO:
            slots = tl.where(any_bad, last_end, 0)
            if SELECT:
                slots = selection.slots_read(entries, slots, SELECT, BLOCK)
            cache_k = cache_at(strides, count, b, hk, layout_index.K_COMPRESSED, ALIGN)
            cache_v = cache_k
            if not SHARED:
                cache_v = cache_at(strides, count, b, hk, layout_index.V_COMPRESSED, ALIGN)
            acc = add_finite(
                acc, query, rope, (k_compressed, v_compressed, k_rope), (cache_k, cache_v, cache_k), entries,
                table_compressed, last_compressed, first * 0, last_end, slots, peak, scale, at_head, there, SELECT > 0,
                BLOCK, SHARED, PAGE_COMPRESSED, NEAR, D0, D1, D2, DIM, 0, 0, V0, V1, V2, DIM_V, BN)  # fmt: skip
        rescale = tl.where(total == 0, 1.0, 1.0 / total)[:, None]
        not_finite.recomputed_three(out + at_out, head * head_out, bad, acc, rescale, False, V0, V1, V2, DIM_V)
