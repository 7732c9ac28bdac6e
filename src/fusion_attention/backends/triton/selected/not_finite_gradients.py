"""Kernels that compute gradients of attention to lists again from P and dS in memory if an operand is not finite.

Products multiply slots with a weight of 0 too, and 0 * inf is NaN. These kernels run after those of a chunk, return at
once for tokens that are not flagged, and skip slots with a weight of 0. For hidden keys P and dS are exactly 0; for
visible keys they are not 0 if it matters, because non-finite rows or keys make them NaN, and weigh_slots() does not
round weights to 0 in rows with an infinity.

Earlier results are wrong only where they are NaN; a sum stops once all elements that were NaN are NaN again.
"""

# mypy: disable-error-code="no-untyped-def"
# Annotations are for Triton, which evaluates them: tl.constexpr marks compile-time values.

import triton
import triton.language as tl

from fusion_attention.backends.triton.common import layout_index
from fusion_attention.backends.triton.common.kernels import heads_at
from fusion_attention.backends.triton.dense.backward import shrinking
from fusion_attention.backends.triton.selected.backward import heads_of, load_tile, source_of, sources_of
from fusion_attention.backends.triton.selected.selection import token_at


@triton.jit
def weighed(weight, x):
    return tl.where(weight != 0.0, weight.to(tl.float32) * x.to(tl.float32), 0.0)


@triton.jit
def unsettled(old, acc):
    """Returns True if an element is NaN in `old` but not yet in `acc`."""
    return tl.max(tl.ravel((old != old) & (acc == acc)).to(tl.int32), 0) > 0


@triton.jit(do_not_specialize=["count", "first"])
def recompute_rows(k, k_compressed, out, large, keys, used, noted, ds, strides, tokens, count: tl.int32,
                   first: tl.int64, GROUP: tl.constexpr, HEADS_KV: tl.constexpr, RATIO: tl.constexpr,
                   BAND: tl.constexpr, DIM: tl.constexpr, SLOTS: tl.constexpr, ALIGN: tl.constexpr,
                   READ: tl.constexpr, WRITTEN: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """Recomputes NaN elements of dq, or of its rope part, as sum of dS k over nonzero dS, for tokens flagged in
    `noted`; grid (tokens * heads_kv). `k` and `out` are the tensors number READ and WRITTEN of the table `strides`."""
    token_head = tl.program_id(0).to(tl.int64)
    hk = token_head % HEADS_KV
    b, row = token_at(tokens, first + token_head // HEADS_KV)
    both = sources_of(k, k_compressed, strides, count, b, hk, RATIO, READ, layout_index.K_COMPRESSED, ALIGN)
    heads = tl.where(tl.load(noted + token_head) > 0, GROUP, 0)
    keys += token_head * SLOTS
    ds += token_head * GROUP * SLOTS
    for h in tl.range(0, heads):
        at = heads_of(strides, count, b, row, hk * GROUP + h, WRITTEN, ALIGN)
        for c0 in tl.range(0, DIM, BC):
            c = c0 + tl.arange(0, BC)
            old = tl.load(out + at + c, mask=c < DIM, other=0.0).to(tl.float32)
            acc = tl.zeros([BC], tl.float32)
            slot0 = tl.zeros([], tl.int32)
            end = tl.where(unsettled(old, acc), tl.load(used + token_head), 0)
            while slot0 < end:
                slot = slot0 + tl.arange(0, BN)
                j = tl.load(keys + slot, mask=slot < end, other=-1)
                rows, stride = source_of(both, slot0, RATIO, BAND, ALIGN)
                key = load_tile(rows, j.to(tl.int64) * stride, j >= 0, c, DIM, True)
                weight = tl.load(ds + h * SLOTS + slot, mask=slot < end, other=0.0)
                acc += tl.sum(weighed(weight[:, None], key), 0)
                slot0 = tl.where(unsettled(old, acc), slot0 + BN, end)
            acc *= 1.0 / shrinking(large, b, hk, HEADS_KV)
            tl.store(out + at + c, tl.where(old != old, acc, old).to(out.dtype.element_ty), mask=c < DIM)


@triton.jit(do_not_specialize=["count", "first"])
def recompute_slots(x, also, weights, weights_also, rows, used, noted, large, strides, tokens,
                    count: tl.int32, first: tl.int64, GROUP: tl.constexpr, HEADS_KV: tl.constexpr,
                    COLUMNS: tl.constexpr, DIM: tl.constexpr, DIM_ALSO: tl.constexpr, SLOTS: tl.constexpr,
                    ALIGN: tl.constexpr, VIEW: tl.constexpr, VIEW_ALSO: tl.constexpr, AT: tl.constexpr,
                    BN: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """Recomputes NaN elements of `rows`, a token's contributions to dk or dv of its keys (slots), from column AT on, of
    tokens flagged in `noted`: weights^T x, plus weights_also^T also if `also` is given; grid (tokens * heads_kv)."""
    token_head = tl.program_id(0).to(tl.int64)
    hk = token_head % HEADS_KV
    b, row = token_at(tokens, first + token_head // HEADS_KV)
    weights += token_head * GROUP * SLOTS
    at_x, head_x, stride_x = heads_at(strides, count, b, VIEW, ALIGN)
    at_x = x + at_x + row.to(tl.int64) * stride_x + hk * GROUP * head_x
    at_also, head_also = at_x, head_x
    if also is not None:
        weights_also += token_head * GROUP * SLOTS
        at_also, head_also, stride_also = heads_at(strides, count, b, VIEW_ALSO, ALIGN)
        at_also = also + at_also + row.to(tl.int64) * stride_also + hk * GROUP * head_also
    grow = 1.0 / shrinking(large, b, hk, HEADS_KV)
    slots = tl.where(tl.load(noted + token_head) > 0, tl.load(used + token_head), 0)
    for slot0 in tl.range(0, slots, BN):
        slot = slot0 + tl.arange(0, BN)
        for c0 in tl.range(0, DIM, BC):
            c = c0 + tl.arange(0, BC)
            there = (slot < slots)[:, None] & (c < DIM)[None, :]
            at = rows + (token_head * SLOTS + slot)[:, None] * COLUMNS + AT + c[None, :]
            old = tl.load(at, mask=there, other=0.0).to(tl.float32)
            acc = tl.zeros([BN, BC], tl.float32)
            h = tl.zeros([], tl.int32)
            end = tl.where(unsettled(old, acc), GROUP, 0)
            while h < end:
                weight = tl.load(weights + h * SLOTS + slot, mask=slot < slots, other=0.0)[:, None]
                acc += weighed(weight, tl.load(at_x + h * head_x + c, mask=c < DIM, other=0.0)[None, :]) * grow
                if also is not None:
                    weight = tl.load(weights_also + h * SLOTS + slot, mask=slot < slots, other=0.0)[:, None]
                    acc += weighed(weight, tl.load(at_also + h * head_also + c, mask=c < DIM_ALSO, other=0.0)[None, :])
                h = tl.where(unsettled(old, acc), h + 1, end)
            tl.store(at, tl.where(old != old, acc, old).to(rows.dtype.element_ty), mask=there)
