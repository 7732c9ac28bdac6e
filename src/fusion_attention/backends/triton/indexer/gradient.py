"""Kernels of the lightning indexer's gradient: from dI, the gradient of its scores, to dq, dweights and a row for every
selected key; key_sum.py sums these rows per key.

    dw_h = sum_j dI_j * max(0, S_hj),  dS = dI * w * [S > 0],  dq = dS k,  rows = dS^T q

dI is the gradient of the values of selected keys, or y - p of a loss over lists; selection.read_lists() selects the
valid keys. Products S that are not positive are multiplied by 0, and 0 * inf is NaN: index_gradient() flags such
tokens, and recompute_gradient() computes them again.
"""

# mypy: disable-error-code="no-untyped-def"
# Annotations are for Triton, which evaluates them: tl.constexpr marks compile-time values.

import triton
import triton.language as tl

from fusion_attention.backends.triton.common import kernels as common
from fusion_attention.backends.triton.common import layout_index
from fusion_attention.backends.triton.common.pages import safe_unit
from fusion_attention.backends.triton.dense.not_finite import gather_three, recomputed_three, wrong_three
from fusion_attention.backends.triton.indexer.loss_parts import is_finite
from fusion_attention.backends.triton.indexer.scores import index_product
from fusion_attention.backends.triton.selected.selection import SCANNED, token_at


@triton.jit
def largest_of(dscores, slots):
    """Returns the largest finite absolute value of `slots` numbers at address `dscores`; 1 if it is 0."""
    magnitude = tl.full([], 0.0, tl.float32)
    for n0 in tl.range(0, slots, SCANNED):
        n = n0 + tl.arange(0, SCANNED)
        g = tl.load(dscores + n, mask=n < slots, other=0.0).to(tl.float32)
        magnitude = tl.maximum(magnitude, tl.max(tl.where(is_finite(g), tl.abs(g), 0.0), 0))
    return safe_unit(magnitude)


@triton.jit
def slots_ahead(keys, dscores, n, slots, THREADS: tl.constexpr):
    """Returns (int32 keys, float32 dI: gradients of their scores) of entries n of a token's list; -1, 0 for n >= slots.

    Each element is loaded by several threads, so that every thread loads one: with fewer loads, Triton repeats them for
    each layout (half of all instructions of an iteration); more would need registers.
    """
    COPIES: tl.constexpr = THREADS // n.shape[0]
    copy = tl.zeros([1, COPIES], tl.int32)
    s = n[:, None] + copy
    value = tl.load(dscores + s, mask=s < slots, other=0.0).to(tl.float32)
    return tl.max(tl.load(keys + s, mask=s < slots, other=-1), 1), tl.max(value, 1)


@triton.jit
def dscores_at(dscores, strides, count, b, row, list_index, SLOTS: tl.constexpr, VIEWED: tl.constexpr):
    """Returns the address of dI, the gradients of the scores of a token's selected keys: in the caller's tensor
    (VIEWED), else in scratch memory, SLOTS per token. list_index: the token's number in the chunk."""
    if VIEWED:
        at, token = common.rows_at(strides, count, b, 0, layout_index.DVALUES, 1)
        return dscores + at + row * token
    else:
        return dscores + list_index * SLOTS


@triton.jit
def strange_three(x, W1: tl.constexpr, W2: tl.constexpr):
    """Returns 1 if an element of x is NaN or infinite, else 0; x: rows as three column blocks (W1, W2 0: unused)."""
    strange = tl.max(tl.max((~is_finite(x[0])).to(tl.int32), 1), 0)
    if W1:
        strange = tl.maximum(strange, tl.max(tl.max((~is_finite(x[1])).to(tl.int32), 1), 0))
    if W2:
        strange = tl.maximum(strange, tl.max(tl.max((~is_finite(x[2])).to(tl.int32), 1), 0))
    return strange


@triton.jit(do_not_specialize=["count", "first", "head0"])
def index_gradient(index_q, index_k, weights, keys, used, noted, dscores, dq, dweights, rows, strides, tokens,
                   count: tl.int32, first: tl.int64, head0: tl.int32, HEADS: tl.constexpr, ADDS: tl.constexpr,
                   D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DIM: tl.constexpr, SLOTS: tl.constexpr,
                   UNITS: tl.constexpr, ALIGN: tl.constexpr, Q: tl.constexpr, K: tl.constexpr,
                   VIEWED: tl.constexpr, THREADS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Writes dq_h = sum_j dS_hj k_j and dw_h = sum_j dI_j max(0, S_hj) of BM heads h of one token from head0 on, and
    for each of its selected keys j sum_h dS_hj q_h, the token's contribution to dk, to `rows`. S = q . k, dS = dI * w *
    [S > 0].

    Grid (tokens from `first` on); keys are read BN at a time. ADDS: `rows` has the sums of earlier heads. UNITS: dS is
    rounded to float16, so dI and weights are divided by their largest magnitudes. Q, K: numbers of q, k in `strides`.
    noted: 1 for a token with NaN or inf.
    """
    list_index = tl.program_id(0).to(tl.int64)
    b, row = token_at(tokens, first + list_index)
    slots = tl.load(used + list_index)
    keys += list_index * SLOTS
    dscores = dscores_at(dscores, strides, count, b, row, list_index, SLOTS, VIEWED)
    rows += list_index * SLOTS * DIM

    h, n = head0 + tl.arange(0, BM), tl.arange(0, BN)
    there = h < HEADS
    at, head, token = common.heads_at(strides, count, b, Q, ALIGN)
    query = common.load_three(index_q + at + row * token, h * head, there, True, D0, D1, D2, DIM)
    tl.store(noted + list_index, 1, mask=strange_three(query, D1, D2) > 0)
    at, token = common.rows_at(strides, count, b, 0, layout_index.WEIGHTS, 1)
    weight = tl.load(weights + at + row * token + h, mask=there, other=0.0).to(tl.float32)
    unit, unit_w = 1.0, 1.0
    if UNITS:
        unit, unit_w = largest_of(dscores, slots), safe_unit(tl.max(tl.abs(weight), 0))
        weight = weight / unit_w
    at_k, token_k = common.rows_at(strides, count, b, 0, K, ALIGN)
    acc0, acc1, acc2 = common.zeros_three(BM, D0, D1, D2)
    dw = tl.zeros([BM], tl.float32)
    ahead, upstream = slots_ahead(keys, dscores, n, slots, THREADS)
    for s0 in tl.range(0, slots, BN):
        key, g = ahead, upstream
        s = s0 + n
        ahead, upstream = slots_ahead(keys, dscores, s + BN, slots, THREADS)
        chosen = key >= 0
        g = tl.where(chosen, g, 0.0)
        if UNITS:
            g = g / unit
        listed = common.load_three(
            index_k + at_k, tl.maximum(key, 0).to(tl.int64) * token_k, chosen, True, D0, D1, D2, DIM
        )
        x = tl.where(chosen[None, :], index_product(query, listed, D1, D2), 0.0)
        dw += tl.sum(x * g[None, :], 1)
        ds = tl.where(x > 0.0, weight[:, None] * g[None, :], 0.0).to(query[0].dtype)
        acc0, acc1, acc2 = common.add_three((acc0, acc1, acc2), ds, listed, D1, D2)
        part0, part1, part2 = common.zeros_three(BN, D0, D1, D2)
        parts = common.add_three((part0, part1, part2), tl.trans(ds), query, D1, D2)
        if UNITS:
            parts = parts[0] * unit * unit_w, parts[1] * unit * unit_w, parts[2] * unit * unit_w
        if ADDS:
            before = common.load_three(rows, s * DIM, chosen, True, D0, D1, D2, DIM)
            parts = parts[0] + before[0], parts[1] + before[1], parts[2] + before[2]
        common.store_three(rows, s * DIM, chosen, parts, 1.0, D0, D1, D2, DIM)
    tl.store(noted + list_index, 1, mask=strange_three((acc0, acc1, acc2), D1, D2) > 0)
    at, head, token = common.heads_at(strides, count, b, layout_index.DQ, ALIGN)
    if UNITS:
        acc0, acc1, acc2 = acc0 * unit * unit_w, acc1 * unit * unit_w, acc2 * unit * unit_w
        dw = dw * unit
    common.store_three(dq + at + row * token, h * head, there, (acc0, acc1, acc2), 1.0, D0, D1, D2, DIM)
    at, token = common.rows_at(strides, count, b, 0, layout_index.DWEIGHTS, 1)
    tl.store(dweights + at + row * token + h, dw.to(dweights.dtype.element_ty), mask=there)


@triton.jit
def slots_weighed(listed, query, weight, g, chosen, W1: tl.constexpr, W2: tl.constexpr):
    """Returns (dS = weight * dI of one head, true where q . k > 0 and the key is valid), both [slots, 1]; listed: rows
    of the token's selected keys; g: their dI; chosen: mask of valid keys."""
    live = chosen & (common.products(query, listed, W1, W2) > 0.0)
    return (weight * g)[:, None], live[:, None]


@triton.jit(do_not_specialize=["count", "first"])
def recompute_gradient(index_q, index_k, weights, keys, used, noted, dscores, dq, rows, strides, tokens,
                       count: tl.int32, first: tl.int64, HEADS: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
                       D2: tl.constexpr, DIM: tl.constexpr, SLOTS: tl.constexpr, ALIGN: tl.constexpr, Q: tl.constexpr,
                       K: tl.constexpr, VIEWED: tl.constexpr, THREADS: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Recomputes results of index_gradient() for the tokens that it flagged as not finite: the gradient rows of their
    selected keys, and the NaN elements of dq, head by head; grid (tokens)."""
    list_index = tl.program_id(0).to(tl.int64)
    b, row = token_at(tokens, first + list_index)
    slots = tl.where(tl.load(noted + list_index) > 0, tl.load(used + list_index), 0)
    keys += list_index * SLOTS
    dscores = dscores_at(dscores, strides, count, b, row, list_index, SLOTS, VIEWED)
    at_q, head_q, token_q = common.heads_at(strides, count, b, Q, ALIGN)
    at_k, token_k = common.rows_at(strides, count, b, 0, K, ALIGN)
    at_w, token_w = common.rows_at(strides, count, b, 0, layout_index.WEIGHTS, 1)
    index_q += at_q + row * token_q
    index_k += at_k
    weights += at_w + row * token_w
    at_dq, head_dq, token_dq = common.heads_at(strides, count, b, layout_index.DQ, ALIGN)
    dq += at_dq + row * token_dq
    n, heads = tl.arange(0, BN), tl.where(slots > 0, HEADS, 0)
    for s0 in tl.range(0, slots, BN):
        s = s0 + n
        key, g = slots_ahead(keys, dscores, s, slots, THREADS)
        chosen = key >= 0
        listed = common.load_three(index_k, key.to(tl.int64) * token_k, chosen, True, D0, D1, D2, DIM)
        part0, part1, part2 = common.zeros_three(BN, D0, D1, D2)
        for one in tl.range(0, HEADS):
            h = one + tl.zeros([1], tl.int64)
            query = common.load_three(index_q, h * head_q, h >= 0, True, D0, D1, D2, DIM)
            ds, live = slots_weighed(listed, query, tl.load(weights + h).to(tl.float32), g, chosen, D1, D2)
            part0 += tl.where(live, ds * query[0].to(tl.float32), 0.0)
            if D1:
                part1 += tl.where(live, ds * query[1].to(tl.float32), 0.0)
            if D2:
                part2 += tl.where(live, ds * query[2].to(tl.float32), 0.0)
        common.store_three(rows, (list_index * SLOTS + s) * DIM, chosen, (part0, part1, part2), 1.0, D0, D1, D2, DIM)
    for one in tl.range(0, heads):
        h = one + tl.zeros([1], tl.int64)
        there = h >= 0
        flagged = tl.max(wrong_three(dq, h * head_dq, there, False, D0, D1, D2, DIM), 0)
        query = common.load_three(index_q, h * head_q, there, True, D0, D1, D2, DIM)
        weight = tl.load(weights + h).to(tl.float32)
        acc0, acc1, acc2 = common.zeros_three(1, D0, D1, D2)
        for s0 in tl.range(0, tl.where(flagged > 0, slots, 0), BN):
            key, g = slots_ahead(keys, dscores, s0 + n, slots, THREADS)
            chosen = key >= 0
            listed = common.load_three(index_k, key.to(tl.int64) * token_k, chosen, True, D0, D1, D2, DIM)
            ds, live = slots_weighed(listed, query, weight, g, chosen, D1, D2)
            acc0, acc1, acc2 = gather_three((acc0, acc1, acc2), ds, ds, live, listed, D1, D2)
        recomputed_three(dq, h * head_dq, there, (acc0, acc1, acc2), 1.0, False, D0, D1, D2, DIM)
