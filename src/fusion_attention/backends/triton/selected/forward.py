"""The forward kernel of attention to selected keys: the heads of a token that share a key head attend to the keys of
its list, or to those of a band and of a second source of keys.

If there are few tokens, several programs compute one token, and decode.join() merges their results.

Entries are loaded two iterations before the rows of their keys and page numbers one iteration before, so that rows can
be loaded ahead. Every loop-carried value is computed in its iteration, because Triton does not load ahead in a loop
that only passes a value on.
"""

# mypy: disable-error-code="no-untyped-def"
# Annotations are for Triton, which evaluates them: tl.constexpr marks compile-time values.

import triton
import triton.language as tl

from fusion_attention.backends.triton.common import kernels as common
from fusion_attention.backends.triton.common import layout_index
from fusion_attention.backends.triton.common.pages import cache_at, clamped
from fusion_attention.backends.triton.decode.kernel import share_at, write_rows
from fusion_attention.backends.triton.dense.forward import weigh
from fusion_attention.backends.triton.selected import selection

# Arguments whose values are not compiled into a kernel (no specialisation).
PAGES = ("width", "step", "last", "width_compressed", "step_compressed", "last_compressed")
NUMBERS = ("count", "heads_kv", *PAGES, "per")
COPIES = tl.constexpr(4)  # loads of each entry


@triton.jit
def entry_once(entries, n, slots, BLOCK: tl.constexpr):
    """Returns int32 list entries n // BLOCK (each selects a block of BLOCK keys) for key numbers n; -1 for n >= slots.

    If n has 32 numbers, COPIES threads load each entry. Triton repeats loads of fewer elements than threads for each
    register layout of a loop, which took a fifth of all instructions. With 16 numbers the loop's products need these
    registers, and with 64 the products of sm_90 would wait for each other.
    """
    if n.shape[0] != 32:
        return selection.entry_ahead(entries, n, slots, BLOCK)
    else:
        copies = n[:, None] + tl.zeros([1, COPIES], tl.int32)
        return tl.max(selection.entry_ahead(entries, copies, slots, BLOCK), 1)


@triton.jit
def page_of(table, key, there, last, PAGE: tl.constexpr):
    """Returns int64 page numbers of keys, clamped to 0 to `last`; without pages (PAGE 0) the keys themselves. table:
    address of the sequence's row in the page table. there: mask of the keys. PAGE: tokens of a page."""
    if PAGE:
        return clamped(tl.load(table + key // PAGE, mask=there, other=0), last)
    else:
        return key


@triton.jit
def offset_within(cache, key, page, PAGE: tl.constexpr, NEAR: tl.constexpr):
    """Returns offsets, in elements, of keys' rows from the first element of `cache`, (first element, stride of a token,
    of a page). page: page numbers; PAGE: tokens of a page, 0: no pages; NEAR: offsets fit into int32."""
    _, token, stride_page = cache
    if NEAR:
        token, stride_page, page = token.to(tl.int32), stride_page.to(tl.int32), page.to(tl.int32)
    else:
        key = key.to(tl.int64)
    if PAGE:
        return page * stride_page + key % PAGE * token
    else:
        return key * token


@triton.jit
def key_of(entry, n, slots, first, end, LISTED: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the int32 key of each slot n: token n % BLOCK of the block that `entry` selects (LISTED), else first + n,
    -1 for n >= slots. The key may be invisible; in_band() tests that."""
    if LISTED:
        return selection.named(entry, n, end, BLOCK)
    else:
        return tl.where(n < slots, first + n, -1)


@triton.jit
def heads_of(program, GROUP: tl.constexpr, BM: tl.constexpr):
    """Returns (key head, int64 query heads [BM], true for existing heads [BM]) of program number `program` of a token.

    Elements beyond the GROUP query heads of the key head repeat the last head.
    """
    BLOCKS: tl.constexpr = (GROUP + BM - 1) // BM
    hk = (program // BLOCKS).to(tl.int64)
    g = program % BLOCKS * BM + tl.arange(0, BM)
    return hk, hk * GROUP + tl.minimum(g, GROUP - 1), g < GROUP


@triton.jit
def attend(state, query, rope, memory, caches, entries, table, last, first, end, begin, slots, scale, exponent,
           LISTED: tl.constexpr, BLOCK: tl.constexpr, SHARED: tl.constexpr, RAW: tl.constexpr, PAGE: tl.constexpr,
           NEAR: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DIM: tl.constexpr,
           R: tl.constexpr, DIM_ROPE: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
           DIM_V: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Continues an online softmax over the slots [begin, slots) of one source of keys, and returns the new state; a
    slot is a key of the token's list (LISTED) or of its band. memory: addresses of k, v, k_rope; caches: their (first
    element, stride of a token, stride of a page).

    Args:
        state: sums of weight * value (three column blocks), maxima and sums, for the slots before.
        query, rope: the rows of a token's heads, and their rope part or None.
        entries: address of the token's list; without lists, slots are the keys from `first` on.
        table, last: the sequence's row of the page table, and the pool's last page.
        first, end: range of the visible keys.
        scale, exponent: factors on scores, the latter in base 2.
    """
    acc0, acc1, acc2, m, l = state
    k, v, k_rope = memory
    cache_k, cache_v, cache_r = caches
    n = tl.arange(0, BN)
    entry, entry_next = n, n
    if LISTED:
        entry = entry_once(entries, begin + n, slots, BLOCK)
    key = key_of(entry, begin + n, slots, first, end, LISTED, BLOCK)
    page = page_of(table, key, selection.in_band(key, first, end), last, PAGE)
    if LISTED:
        entry_next = entry_once(entries, begin + BN + n, slots, BLOCK)
    for n0 in tl.range(begin, slots, BN):
        key_next = key_of(entry_next, n0 + BN + n, slots, first, end, LISTED, BLOCK)
        page_next = page_of(table, key_next, selection.in_band(key_next, first, end), last, PAGE)
        if LISTED:
            entry_next = entry_once(entries, n0 + 2 * BN + n, slots, BLOCK)
        there = selection.in_band(key, first, end)
        keys = common.load_three(
            k + cache_k[0], offset_within(cache_k, key, page, PAGE, NEAR), there, True, D0, D1, D2, DIM
        )
        s = common.inner_three(query, keys, D1, D2)
        if R:
            offset = offset_within(cache_r, key, page, PAGE, NEAR)
            tail = common.load_part(k_rope + cache_r[0], offset, there, 0, R, DIM_ROPE, True)
            s = tl.dot(rope, tl.trans(tail), s, input_precision="ieee")
        if not RAW:
            s = s * scale
        s = tl.where(there[None, :], s, -float("inf"))
        p, fade, m, l = weigh(s, m, l, exponent)
        acc0 = acc0 * fade[:, None]
        if V1:
            acc1 = acc1 * fade[:, None]
        if V2:
            acc2 = acc2 * fade[:, None]
        values = keys
        if not SHARED:
            offset = offset_within(cache_v, key, page, PAGE, NEAR)
            values = common.load_three(v + cache_v[0], offset, there, True, V0, V1, V2, DIM_V)
        acc0, acc1, acc2 = common.add_three((acc0, acc1, acc2), p, values, V1, V2)
        key, page = key_next, page_next
    return acc0, acc1, acc2, m, l


@triton.jit(do_not_specialize=NUMBERS)
def sparse_forward(q, k, v, out, max_, sum_, q_rope, k_rope, k_compressed, v_compressed, sink, indices, table,
                   table_compressed, partials, strides, lengths, tokens, count: tl.int32, heads_kv: tl.int32,
                   width: tl.int32, step: tl.int64, last: tl.int32, width_compressed: tl.int32,
                   step_compressed: tl.int64, last_compressed: tl.int32, per: tl.int32, scale: tl.float32,
                   exponent: tl.float32, unit: tl.float32, GROUP: tl.constexpr, RAW: tl.constexpr, SINK: tl.constexpr,
                   SELECT: tl.constexpr, BLOCK: tl.constexpr, RATIO: tl.constexpr, SHARED: tl.constexpr,
                   PAGE: tl.constexpr, PAGE_COMPRESSED: tl.constexpr, NEAR: tl.constexpr, D0: tl.constexpr,
                   D1: tl.constexpr, D2: tl.constexpr, DIM: tl.constexpr, R: tl.constexpr, DIM_ROPE: tl.constexpr,
                   V0: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, DIM_V: tl.constexpr, BUFFER: tl.constexpr,
                   SPLIT: tl.constexpr, ALIGN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Writes out, max and sum of the softmax of BM heads of one token over its slots: the keys in its list, or in its
    band and then its compressed keys (RATIO: tokens of one). Grid (tokens * programs per token, splits).

    Programs of a token are adjacent, so that the next one finds keys in the cache. SHARED: values are the first columns
    of the keys. SPLIT: a program computes `per` slots and writes (sums of weight * value, max, sum), BUFFER floats per
    head, to `partials`. tokens: (sequence, row) of each token. NEAR: offsets of keys fit into int32.
    """
    programs = heads_kv * ((GROUP + BM - 1) // BM)
    b, row = selection.token_at(tokens, tl.program_id(0) // programs)
    hk, h, valid = heads_of(tl.program_id(0) % programs, GROUP, BM)
    _, kv_len, lo, hi, prefix, _ = common.lengths_at(lengths, count, b)
    if PAGE:
        kv_len = tl.minimum(kv_len, width.to(tl.int64) * PAGE)
        table += b * step
    first, end = selection.band_of(row, kv_len, lo, hi, prefix)
    entries = indices
    if SELECT:
        entries = selection.list_at(indices, strides, count, b, hk, row)
    slots = tl.maximum(end - first, 0)
    if not RATIO:
        slots = selection.slots_read(entries, end, SELECT, BLOCK)

    at_q, head_q, token_q = common.heads_at(strides, count, b, layout_index.Q, ALIGN)
    query = common.load_three(q + at_q + row * token_q, h * head_q, valid, True, D0, D1, D2, DIM)
    cache_k = cache_at(strides, count, b, hk, layout_index.K, ALIGN)
    cache_v, cache_r, rope = cache_k, cache_k, query[0]
    if not SHARED:
        cache_v = cache_at(strides, count, b, hk, layout_index.V, ALIGN)
    if R:
        at_r, head_r, token_r = common.heads_at(strides, count, b, layout_index.Q_ROPE, ALIGN)
        rope = common.load_part(q_rope + at_r + row * token_r, h * head_r, valid, 0, R, DIM_ROPE, True)
        cache_r = cache_at(strides, count, b, hk, layout_index.K_ROPE, ALIGN)

    acc0, acc1, acc2 = common.zeros_three(BM, V0, V1, V2)
    m = tl.full([BM], -float("inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    begin, last_slot = 0, slots
    if SPLIT:
        begin = tl.program_id(1) * per
        last_slot = tl.minimum(slots, begin + per)
    acc0, acc1, acc2, m, l = attend(
        (acc0, acc1, acc2, m, l), query, rope, (k, v, k_rope), (cache_k, cache_v, cache_r), entries, table, last,
        first, end, begin, last_slot, scale, exponent, not RATIO, BLOCK, SHARED, RAW, PAGE, NEAR, D0, D1, D2, DIM, R,
        DIM_ROPE, V0, V1, V2, DIM_V, BN)  # fmt: skip
    if RATIO:
        end = selection.compressed_end(lengths, count, b, row, RATIO)
        if PAGE_COMPRESSED:
            end = tl.minimum(end, width_compressed * PAGE_COMPRESSED)
            table_compressed += b * step_compressed
        last_slot = end
        if SELECT:
            last_slot = selection.slots_read(entries, end, SELECT, BLOCK)
        if SPLIT:
            last_slot = tl.minimum(last_slot, begin + per - slots)
            begin = tl.maximum(begin - slots, 0)
        cache_k = cache_at(strides, count, b, hk, layout_index.K_COMPRESSED, ALIGN)
        cache_v = cache_k
        if not SHARED:
            cache_v = cache_at(strides, count, b, hk, layout_index.V_COMPRESSED, ALIGN)
        acc0, acc1, acc2, m, l = attend(
            (acc0, acc1, acc2, m, l), query, rope, (k_compressed, v_compressed, k_rope), (cache_k, cache_v, cache_k),
            entries, table_compressed, last_compressed, first * 0, end, begin, last_slot, scale, exponent, SELECT > 0,
            BLOCK, SHARED, RAW, PAGE_COMPRESSED, NEAR, D0, D1, D2, DIM, 0, 0, V0, V1, V2, DIM_V, BN)  # fmt: skip
    # Loaded and computed again, because they would occupy registers in the loop. Sequence numbers are not negative.
    at = tokens + tl.program_id(0) // programs * 2
    b, row = tl.load(at, volatile=True).to(tl.int64), tl.load(at + 1, volatile=True).to(tl.int64)
    hk, h, valid = heads_of(tl.program_id(0) % programs + tl.minimum(b, 0).to(tl.int32), GROUP, BM)
    if SPLIT:
        slot = tl.program_id(0) // programs * tl.num_programs(1) + tl.program_id(1)
        at = share_at(slot, hk, GROUP, h - hk * GROUP, heads_kv, BUFFER)
        common.store_three(partials, at, valid, (acc0, acc1, acc2), 1.0, V0, V1, V2, DIM_V)
        tl.store(partials + at + DIM_V, m, mask=valid)
        tl.store(partials + at + DIM_V + 1, l, mask=valid)
    else:
        write_rows(out, max_, sum_, sink, strides, count, b, h, row, valid, (acc0, acc1, acc2), m, l, unit, SINK, V0,
                   V1, V2, DIM_V, ALIGN)  # fmt: skip
