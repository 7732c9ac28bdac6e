"""The gradient of the lightning indexer's values, a token at a time: of its query rows and weights, and what it gives
to every key of its list, which key_sum.py adds up.
"""

# mypy: disable-error-code="no-untyped-def"
# Annotations are Triton's here: they are evaluated, and say what is known while compiling.

import triton
import triton.language as tl

from fusion_attention.backends.triton import views
from fusion_attention.backends.triton.common import (
    add_three,
    heads_at,
    lengths_at,
    load_three,
    rows_at,
    store_three,
    zeros_three,
)
from fusion_attention.backends.triton.indexer_scores import index_product
from fusion_attention.backends.triton.pages import safe_unit
from fusion_attention.backends.triton.selection import SCANNED, band_of, key_ahead, list_at, slots_read, token_at

THREADS = tl.constexpr(256)  # of a program, at most


@triton.jit
def largest_of(values, slots):
    """The largest size among the first `slots` numbers; 1 where it is zero or not finite."""
    found = tl.full([], 0.0, tl.float32)
    for n0 in tl.range(0, slots, SCANNED):
        n = n0 + tl.arange(0, SCANNED)
        found = tl.maximum(found, tl.max(tl.abs(tl.load(values + n, mask=n < slots, other=0.0).to(tl.float32)), 0))
    return safe_unit(found)


@triton.jit
def write_owners(owners, entries, ids, slots, first, end, SELECT: tl.constexpr):
    """Says of every slot of a list whose row it has: the key's number among those of all sequences, or -1."""
    start, step = ids
    for n0 in tl.range(0, SELECT, SCANNED):
        n = n0 + tl.arange(0, SCANNED)
        key = key_ahead(entries, n, slots, first, end, 1)
        tl.store(owners + n, tl.where(key >= 0, (start + key * step).to(tl.int32), -1), mask=n < SELECT)


@triton.jit
def slots_ahead(entries, values, n, slots, first, end):
    """(keys, values in float32) of slots n. Loaded more than once, so that there is one for each thread: of fewer
    elements Triton loads anew what each layout of the turn wants of them, half of all its instructions."""
    COPIES: tl.constexpr = THREADS // n.shape[0]
    copy = tl.zeros([1, COPIES], tl.int32)
    s = n[:, None] + copy
    value = tl.load(values + s, mask=s < slots, other=0.0).to(tl.float32)
    return tl.max(key_ahead(entries, s, slots, first, end, 1), 1), tl.max(value, 1)


@triton.jit(do_not_specialize=["count", "begin", "head0"])
def index_gradient(q, k, weights, indices, dvalues, dq, dweights, rows, owners, places, lengths, tokens,
                   count: tl.int32, begin: tl.int32, head0: tl.int32,
                   HEADS: tl.constexpr, ADDS: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
                   DIM: tl.constexpr, SELECT: tl.constexpr, UNITS: tl.constexpr, ALIGN: tl.constexpr, BM: tl.constexpr,
                   BN: tl.constexpr):  # fmt: skip
    """dq and dweights of one token's BM heads from head0 on, and the row of each of its SELECT slots, BN at a time,
    added to that of heads before where ADDS; grid (tokens from `begin` on).

    UNITS: dS is rounded to float16, so gradients and weights are held in units of the largest.
    """
    b, row = token_at(tokens, begin + tl.program_id(0))
    _, kv_len, lo, hi, prefix, _ = lengths_at(lengths, count, b)
    first, end = band_of(row, kv_len, lo, hi, prefix)
    entries = list_at(indices, places, count, b, 0, row)
    slots = slots_read(entries, end, SELECT, 1)
    at, token = rows_at(places, count, b, 0, views.DVALUES, 1)
    dvalues += at + row * token
    slot0 = tl.program_id(0).to(tl.int64) * SELECT
    write_owners(owners + slot0, entries, rows_at(places, count, b, 0, views.IDS, 1), slots, first, end, SELECT)

    h, n = head0 + tl.arange(0, BM), tl.arange(0, BN)
    there = h < HEADS
    at, head, token = heads_at(places, count, b, views.Q, ALIGN)
    query = load_three(q + at + row * token, h * head, there, True, D0, D1, D2, DIM)
    at, token = rows_at(places, count, b, 0, views.WEIGHTS, 1)
    weight = tl.load(weights + at + row * token + h, mask=there, other=0.0).to(tl.float32)
    unit, unit_w = 1.0, 1.0
    if UNITS:
        unit, unit_w = largest_of(dvalues, slots), safe_unit(tl.max(tl.abs(weight), 0))
        weight = weight / unit_w
    at_k, token_k = rows_at(places, count, b, 0, views.K, ALIGN)
    acc0, acc1, acc2 = zeros_three(BM, D0, D1, D2)
    dw = tl.zeros([BM], tl.float32)
    ahead, upstream = slots_ahead(entries, dvalues, n, slots, first, end)
    for s0 in tl.range(0, slots, BN):
        key, g = ahead, upstream
        s = s0 + n
        ahead, upstream = slots_ahead(entries, dvalues, s + BN, slots, first, end)
        if UNITS:
            g = g / unit
        chosen = key >= 0
        keys = load_three(k + at_k, tl.maximum(key, 0).to(tl.int64) * token_k, chosen, True, D0, D1, D2, DIM)
        x = tl.where(chosen[None, :], index_product(query, keys, D1, D2), 0.0)
        dw += tl.sum(x * g[None, :], 1)
        ds = tl.where(x > 0.0, weight[:, None] * g[None, :], 0.0).to(query[0].dtype)
        acc0, acc1, acc2 = add_three((acc0, acc1, acc2), ds, keys, D1, D2)
        part0, part1, part2 = zeros_three(BN, D0, D1, D2)
        parts = add_three((part0, part1, part2), tl.trans(ds), query, D1, D2)
        if UNITS:
            parts = parts[0] * unit * unit_w, parts[1] * unit * unit_w, parts[2] * unit * unit_w
        if ADDS:
            before = load_three(rows, (slot0 + s) * DIM, chosen, True, D0, D1, D2, DIM)
            parts = parts[0] + before[0], parts[1] + before[1], parts[2] + before[2]
        store_three(rows, (slot0 + s) * DIM, chosen, parts, 1.0, D0, D1, D2, DIM)
    at, head, token = heads_at(places, count, b, views.DQ, ALIGN)
    if UNITS:
        acc0, acc1, acc2 = acc0 * unit * unit_w, acc1 * unit * unit_w, acc2 * unit * unit_w
        dw = dw * unit
    store_three(dq + at + row * token, h * head, there, (acc0, acc1, acc2), 1.0, D0, D1, D2, DIM)
    at, token = rows_at(places, count, b, 0, views.DWEIGHTS, 1)
    tl.store(dweights + at + row * token + h, dw.to(dweights.dtype.element_ty), mask=there)
