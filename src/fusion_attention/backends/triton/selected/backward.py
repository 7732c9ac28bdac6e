"""Kernels of the backward over selected keys: products over all heads of a token; key_sum.py sums rows per key.

    P = 2^(S * log2(e) - lse),  dP = dout . v,  dS = scale * P * (dP - D)        for a token, its heads and its slots
    dq = dS k                   rows = dS^T q (dk), P^T dout (dv): one row per slot, summed over the heads

A slot has one key: an entry of a row's list has one slot per token of a block. read_lists() writes the key of each
slot, or -1 (selection.py); the other kernels load zeros for -1. Each loop has one accumulator, and P and dS are stored
in memory between kernels, so that no register spills. lse and D come from prepare() of the dense backward.

With a second source of keys (RATIO > 0), slots before BAND, a multiple of the tile, have the keys of the band.

dS of float16 is divided by 256 if some |dout| of a key head's rows exceeds 256, as in the dense backward.

Slots with a weight of 0 are multiplied too, and 0 * inf is NaN. The kernels therefore flag tokens where that may
happen, and not_finite_gradients.py computes flagged tokens again.
"""

# mypy: disable-error-code="no-untyped-def"
# Annotations are for Triton, which evaluates them: tl.constexpr marks compile-time values.

import triton
import triton.language as tl

from fusion_attention.backends.triton.common import layout_index
from fusion_attention.backends.triton.common.kernels import heads_at, rows_at
from fusion_attention.backends.triton.dense.backward import shrinking
from fusion_attention.backends.triton.selected.selection import token_at


@triton.jit
def load_tile(base, offset, there, c, DIM: tl.constexpr, MASKED: tl.constexpr):
    """Loads columns c of rows at base + offset; zeros in rows not `there` and, if MASKED, from column DIM on."""
    at = base + offset[:, None] + c[None, :]
    if MASKED:
        return tl.load(at, mask=there[:, None] & (c < DIM)[None, :], other=0.0)
    else:
        return tl.load(at, mask=there[:, None], other=0.0)


@triton.jit
def inner(acc, a, b, FIRST: tl.constexpr, DIM: tl.constexpr, BC: tl.constexpr):
    """Returns acc + a b^T over columns FIRST to DIM, BC at a time; a, b: (address, offsets of rows, mask of rows)."""
    for c0 in tl.range(FIRST, DIM, BC):
        c = c0 + tl.arange(0, BC)
        x = load_tile(a[0], a[1], a[2], c, DIM, DIM % BC != 0)
        y = load_tile(b[0], b[1], b[2], c, DIM, DIM % BC != 0)
        acc = tl.dot(x, tl.trans(y), acc, input_precision="ieee")
    return acc


@triton.jit
def heads_of(strides, count, b, row, head, VIEW: tl.constexpr, ALIGN: tl.constexpr):
    """Returns the offsets, in elements, of heads `head` of the token `row` of sequence b in tensor number VIEW of the
    table `strides` of `count` sequences."""
    at, stride_head, stride = heads_at(strides, count, b, VIEW, ALIGN)
    return at + row.to(tl.int64) * stride + head * stride_head


@triton.jit
def keys_of(strides, count, b, hk, j, VIEW: tl.constexpr, ALIGN: tl.constexpr):
    """Returns the offsets, in elements, of keys j of key head hk in sequence b in tensor number VIEW of the table
    `strides`; that of j = -1 must not be loaded."""
    at, stride = rows_at(strides, count, b, hk, VIEW, ALIGN)
    return at + j.to(tl.int64) * stride


@triton.jit
def sources_of(rows, rows_compressed, strides, count, b, hk, RATIO: tl.constexpr, VIEW: tl.constexpr,
               VIEW_COMPRESSED: tl.constexpr, ALIGN: tl.constexpr):  # fmt: skip
    """Returns ((address of key head hk's first key, stride of a token) of the keys, the same of the compressed keys) of
    sequence b; without compressed keys (RATIO 0) twice the first."""
    at, stride = rows_at(strides, count, b, hk, VIEW, ALIGN)
    first, second = (rows + at, stride), (rows + at, stride)
    if RATIO:
        at, stride = rows_at(strides, count, b, hk, VIEW_COMPRESSED, ALIGN)
        second = (rows_compressed + at, stride)
    return first, second


@triton.jit
def source_of(sources, slot, RATIO: tl.constexpr, BAND: tl.constexpr, ALIGN: tl.constexpr):
    """Returns (address, stride of a token) of the keys (slot < BAND) or of the compressed keys; sources: both, as a
    pair. RATIO 0: there are no compressed keys."""
    memory, stride = sources[0]
    if RATIO:
        memory = tl.where(slot < BAND, memory, sources[1][0])
        stride = tl.where(slot < BAND, stride, sources[1][1])
        if ALIGN > 1:
            stride = tl.multiple_of(stride, ALIGN)
    return memory, stride


@triton.jit(do_not_specialize=["count", "first", "plane"])
def weigh_slots(q, k, v, k_compressed, v_compressed, dout, q_rope, k_rope, flat, large, keys, used, noted, weights, ds,
                strides, tokens, count: tl.int32, first: tl.int64, plane: tl.int64, scale: tl.float32,
                exponent: tl.float32, GROUP: tl.constexpr, HEADS_KV: tl.constexpr, RATIO: tl.constexpr,
                BAND: tl.constexpr, SHARED: tl.constexpr, DIM: tl.constexpr, DIM_ROPE: tl.constexpr,
                DIM_V: tl.constexpr, SLOTS: tl.constexpr, ALIGN: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr,
                BC: tl.constexpr):  # fmt: skip
    """Writes P = softmax(S) and dS = scale * P (dP - D) of BH query heads for BN of a token's selected keys (slots).

    Grid (tiles of slots, tiles of heads, tokens * heads_kv). flat: lse and D = dout . out - dlse of each row. keys: key
    of each slot, -1: none. used: end of the slots with a key. noted: 1 if a result is not finite. large: 1: shrink dS.
    """
    token_head = tl.program_id(2).to(tl.int64)
    if tl.program_id(0) * BN < tl.load(used + token_head):
        hk = token_head % HEADS_KV
        b, row = token_at(tokens, first + token_head // HEADS_KV)
        slot = tl.program_id(0) * BN + tl.arange(0, BN)
        h = tl.program_id(1) * BH + tl.arange(0, BH)
        valid, head = h < GROUP, hk * GROUP + h
        j = tl.load(keys + token_head * SLOTS + slot)
        chosen = j >= 0
        at_q = (q, heads_of(strides, count, b, row, head, layout_index.Q, ALIGN), valid)
        at_do = (dout, heads_of(strides, count, b, row, head, layout_index.DOUT, ALIGN), valid)
        both = sources_of(k, k_compressed, strides, count, b, hk, RATIO, layout_index.K, layout_index.K_COMPRESSED,
                          ALIGN)  # fmt: skip
        keys_k, stride_k = source_of(both, tl.program_id(0) * BN, RATIO, BAND, ALIGN)
        at_k = (keys_k, j.to(tl.int64) * stride_k, chosen)
        s, dp = tl.zeros([BH, BN], tl.float32), tl.zeros([BH, BN], tl.float32)
        # Values are the first elements of keys, which are loaded once for both products.
        BOTH: tl.constexpr = DIM_V // BC * BC if SHARED else 0
        for c0 in tl.range(0, BOTH, BC):
            c = c0 + tl.arange(0, BC)
            key = tl.trans(load_tile(at_k[0], at_k[1], chosen, c, DIM, False))
            s = tl.dot(load_tile(q, at_q[1], valid, c, DIM, False), key, s, input_precision="ieee")
            dp = tl.dot(load_tile(dout, at_do[1], valid, c, DIM, False), key, dp, input_precision="ieee")
        if BOTH < DIM:
            s = inner(s, at_q, at_k, BOTH, DIM, BC)
        if BOTH < DIM_V:
            at_v = at_k
            if not SHARED:
                both = sources_of(v, v_compressed, strides, count, b, hk, RATIO, layout_index.V,
                                  layout_index.V_COMPRESSED, ALIGN)  # fmt: skip
                keys_v, stride_v = source_of(both, tl.program_id(0) * BN, RATIO, BAND, ALIGN)
                at_v = (keys_v, j.to(tl.int64) * stride_v, chosen)
            dp = inner(dp, at_do, at_v, BOTH, DIM_V, BC)
        if DIM_ROPE:
            at_qr = (q_rope, heads_of(strides, count, b, row, head, layout_index.Q_ROPE, ALIGN), valid)
            at_kr = (k_rope, keys_of(strides, count, b, hk, j, layout_index.K_ROPE, ALIGN), chosen)
            s = inner(s, at_qr, at_kr, 0, DIM_ROPE, BC)
        notes = flat + heads_of(strides, count, b, row, head, layout_index.FLAT, 1)
        lse = tl.load(notes, mask=valid, other=float("inf"))
        delta = tl.load(notes + plane, mask=valid, other=0.0)
        # Non-finite elements of q or k make a score non-finite; those of dout or a visible value make D non-finite.
        wild = ~(tl.abs(delta) < float("inf"))
        strange = wild[:, None] | ~(tl.abs(s) < float("inf"))
        tl.store(noted + token_head, 1, mask=tl.max(tl.max(strange.to(tl.int32), 1), 0) > 0)
        shrink = shrinking(large, b, hk, HEADS_KV)
        s = s * exponent
        visible = chosen[None, :] & (s != -float("inf")) & (lse != float("inf"))[:, None]
        weight = tl.exp2(s - lse[:, None])
        # A weight of a visible key that underflows must not be 0 if it is multiplied by an infinity.
        LEAST: tl.constexpr = 2.0**-24 if weights.dtype.element_ty == tl.float16 else 2.0**-126
        weight = tl.where(visible, tl.where(wild[:, None] & (weight < LEAST), LEAST, weight), 0.0)
        gradient = tl.where(visible, weight * (dp * shrink - (delta * shrink)[:, None]), 0.0) * scale
        at = token_head * GROUP * SLOTS
        offset = h[:, None] * SLOTS + slot[None, :]
        tl.store(weights + at + offset, weight.to(weights.dtype.element_ty), mask=valid[:, None])
        tl.store(ds + at + offset, gradient.to(ds.dtype.element_ty), mask=valid[:, None])


@triton.jit(do_not_specialize=["count", "first"])
def backward_rows(k, k_compressed, out, large, keys, used, ds, strides, tokens, count: tl.int32, first: tl.int64,
                  GROUP: tl.constexpr, HEADS_KV: tl.constexpr, RATIO: tl.constexpr, BAND: tl.constexpr,
                  DIM: tl.constexpr, SLOTS: tl.constexpr, ALIGN: tl.constexpr, READ: tl.constexpr,
                  WRITTEN: tl.constexpr, FIRST: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr,
                  BC: tl.constexpr):  # fmt: skip
    """Writes BC columns of dq, or of its rope part, of BH heads of a token: sum over its slots (selected keys) of dS k;
    `k` and `out` are the tensors number READ and WRITTEN of the table `strides`.

    Columns begin at FIRST. Grid (panels of BC columns, tiles of heads, tokens * heads_kv).
    """
    token_head = tl.program_id(2).to(tl.int64)
    hk = token_head % HEADS_KV
    b, row = token_at(tokens, first + token_head // HEADS_KV)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    valid, head = h < GROUP, hk * GROUP + h
    c = FIRST + tl.program_id(0) * BC + tl.arange(0, BC)
    end = tl.load(used + token_head)
    both = sources_of(k, k_compressed, strides, count, b, hk, RATIO, READ, layout_index.K_COMPRESSED, ALIGN)
    keys += token_head * SLOTS
    ds += token_head * GROUP * SLOTS
    acc = tl.zeros([BH, BC], tl.float32)
    # Keys are loaded one iteration ahead, so that their rows are loaded as early as dS.
    ahead = tl.load(keys + tl.arange(0, BN))
    for slot0 in tl.range(0, end, BN):
        slot = slot0 + tl.arange(0, BN)
        j = ahead
        ahead = tl.load(keys + slot + BN, mask=slot + BN < SLOTS, other=-1)
        rows, stride = source_of(both, slot0, RATIO, BAND, ALIGN)
        key = load_tile(rows, j.to(tl.int64) * stride, j >= 0, c, DIM, DIM % BC != 0)
        offset = h[:, None] * SLOTS + slot[None, :]
        weights = tl.load(ds + offset, mask=valid[:, None], other=0.0)
        acc = tl.dot(weights, key, acc, input_precision="ieee")
    acc *= 1.0 / shrinking(large, b, hk, HEADS_KV)
    at = heads_of(strides, count, b, row, head, WRITTEN, ALIGN)
    there = valid[:, None] & (c < DIM)[None, :]
    tl.store(out + at[:, None] + c[None, :], acc.to(out.dtype.element_ty), mask=there)


@triton.jit
def add_heads(acc, weights, at, stride, slot, h, c, GROUP: tl.constexpr, SLOTS: tl.constexpr, DIM: tl.constexpr):
    """Returns acc + weights^T x, [slots, columns], summed over heads h < GROUP; weights: address of [GROUP, SLOTS]; x:
    rows of heads at address `at`, of which columns c are read; stride: from a head to the next."""
    there = h < GROUP
    weight = tl.load(weights + h[None, :] * SLOTS + slot[:, None], mask=there[None, :], other=0.0)
    return tl.dot(weight, load_tile(at, h * stride, there, c, DIM, True), acc, input_precision="ieee")


@triton.jit(do_not_specialize=["count", "first"])
def backward_slots(x, also, weights, weights_also, rows, used, large, strides, tokens, count: tl.int32,
                   first: tl.int64, GROUP: tl.constexpr, HEADS_KV: tl.constexpr, COLUMNS: tl.constexpr,
                   DIM: tl.constexpr, DIM_ALSO: tl.constexpr, SLOTS: tl.constexpr, ALIGN: tl.constexpr,
                   VIEW: tl.constexpr, VIEW_ALSO: tl.constexpr, FIRST: tl.constexpr, AT: tl.constexpr,
                   BH: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """Writes BC columns of a token's contributions to dk or dv of BN of its selected keys (slots): weights^T x, summed
    over query heads (weights: dS or P, x: q or dout), plus weights_also^T also if that is not None.

    Columns begin at FIRST in x and at AT in a row of `rows`. Grid (tiles of slots, panels of BC columns, tokens *
    heads_kv).
    """
    token_head = tl.program_id(2).to(tl.int64)
    if tl.program_id(0) * BN < tl.load(used + token_head):
        hk = token_head % HEADS_KV
        b, row = token_at(tokens, first + token_head // HEADS_KV)
        slot = tl.program_id(0) * BN + tl.arange(0, BN)
        c = tl.program_id(1) * BC + tl.arange(0, BC)
        acc = tl.zeros([BN, BC], tl.float32)
        weights += token_head * GROUP * SLOTS
        at_x, head_x, stride_x = heads_at(strides, count, b, VIEW, ALIGN)
        at_x = x + at_x + row.to(tl.int64) * stride_x + hk * GROUP * head_x
        BOTH: tl.constexpr = also is not None and large is None
        at_also, head_also = at_x, head_x
        if also is not None:
            weights_also += token_head * GROUP * SLOTS
            at_also, head_also, stride_also = heads_at(strides, count, b, VIEW_ALSO, ALIGN)
            at_also = also + at_also + row.to(tl.int64) * stride_also + hk * GROUP * head_also
        for h0 in tl.range(0, GROUP, BH):
            h = h0 + tl.arange(0, BH)
            acc = add_heads(acc, weights, at_x, head_x, slot, h, FIRST + c, GROUP, SLOTS, DIM)
            if BOTH:
                acc = add_heads(acc, weights_also, at_also, head_also, slot, h, FIRST + c, GROUP, SLOTS, DIM_ALSO)
        acc *= 1.0 / shrinking(large, b, hk, HEADS_KV)
        if also is not None and not BOTH:  # only the first product is divided by 256
            for h0 in tl.range(0, GROUP, BH):
                h = h0 + tl.arange(0, BH)
                acc = add_heads(acc, weights_also, at_also, head_also, slot, h, FIRST + c, GROUP, SLOTS, DIM_ALSO)
        there = (FIRST + c < DIM)[None, :]
        at = rows + token_head * SLOTS * COLUMNS + slot[:, None] * COLUMNS + AT + c[None, :]
        tl.store(at, acc.to(rows.dtype.element_ty), mask=there)
