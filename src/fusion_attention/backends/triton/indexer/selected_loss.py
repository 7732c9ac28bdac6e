"""Kernels of the indexer's loss over the selected keys of a chunk of rows.

selection.read_lists() marks the valid entries of a list; target() computes the attention's probabilities p of its keys,
and score() the indexer's scores; compare() computes the loss and dI = y - p, from which gradient.py continues. Invalid
entries load zeros and have key -1. If the caller passes p, target() does not run.
"""

# mypy: disable-error-code="no-untyped-def"
# Annotations are for Triton, which evaluates them: tl.constexpr marks compile-time values.

import triton
import triton.language as tl

from fusion_attention.backends.triton.common import layout_index
from fusion_attention.backends.triton.common.kernels import LOG2E, heads_at, load_part, rows_at
from fusion_attention.backends.triton.indexer import loss_parts
from fusion_attention.backends.triton.selected.selection import token_at


@triton.jit
def listed(keys, k, slots):
    """Returns the keys of entries k of a token's list at address `keys`; -1 for invalid ones and from `slots` on."""
    return tl.load(keys + k, mask=k < slots, other=-1)


@triton.jit(do_not_specialize=["count", "first", "slots", "heads_kv"])
def target(q, k, q_rope, k_rope, notes, keys, dscores, strides, tokens, count: tl.int32, first: tl.int64,
           slots: tl.int32, heads_kv: tl.int32, exponent: tl.float32, GROUP: tl.constexpr, DIM: tl.constexpr,
           DIM_ROPE: tl.constexpr, ALIGN: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
           BC: tl.constexpr):  # fmt: skip
    """Writes p, the mean over heads of the attention's probabilities, for BK entries of a token's list of selected keys
    to `dscores`, which compare() overwrites by dI; grid (tiles of entries, tokens)."""
    STEPS: tl.constexpr = loss_parts.steps(DIM, BC) + loss_parts.steps(DIM_ROPE, BC)
    BLOCKS: tl.constexpr = loss_parts.steps(GROUP, BH)  # of the heads that share a key head
    at_token = tl.program_id(1).to(tl.int64)
    b, row = token_at(tokens, first + at_token)
    slot, lane, d = tl.program_id(0) * BK + tl.arange(0, BK), tl.arange(0, BH), tl.arange(0, BC)
    key = listed(keys + at_token * slots, slot, slots).to(tl.int64)
    there = key >= 0
    at_q, head_q, stride_q = heads_at(strides, count, b, layout_index.Q, ALIGN)
    at_k, head_k, stride_k = heads_at(strides, count, b, layout_index.K, ALIGN)
    at_q += row * stride_q
    at_qr, head_qr, at_kr, head_kr, stride_kr = at_q, head_q, at_k, head_k, stride_k
    if DIM_ROPE:
        at_qr, head_qr, stride_qr = heads_at(strides, count, b, layout_index.Q_ROPE, ALIGN)
        at_kr, head_kr, stride_kr = heads_at(strides, count, b, layout_index.K_ROPE, ALIGN)
        at_qr += row * stride_qr
    of_notes = notes + (first + at_token) * (heads_kv * GROUP + 1)
    s, p = tl.zeros([BK, BH], tl.float32), tl.zeros([BK], tl.float32)
    for t in tl.range(0, heads_kv * (BLOCKS * STEPS)):
        c, n = t % STEPS, t // STEPS
        hk, inner = n // BLOCKS, n % BLOCKS * BH
        h = hk * GROUP + inner + lane
        in_group = lane < GROUP - inner
        lse = tl.load(of_notes + h, mask=in_group, other=float("inf"))
        of_q, step_q, width = loss_parts.columns_at(c, q, q_rope, at_q, at_qr, head_q, head_qr, DIM, DIM_ROPE, BC)
        of_k, step_k, _ = loss_parts.columns_at(c, k, k_rope, at_k + hk * head_k, at_kr + hk * head_kr, stride_k,
                                                stride_kr, DIM, DIM_ROPE, BC)  # fmt: skip
        there_q, there_k = in_group[:, None], there[:, None]
        if (DIM % BC != 0) or (DIM_ROPE % BC != 0):
            there_q, there_k = there_q & (d < width)[None, :], there_k & (d < width)[None, :]
        query = tl.load(of_q + h[:, None] * step_q + d[None, :], mask=there_q, other=0.0)
        rows = tl.load(of_k + key[:, None] * step_k + d[None, :], mask=there_k, other=0.0)
        s = tl.dot(rows, tl.trans(query), s, input_precision="ieee")
        if c == STEPS - 1:
            each = tl.exp2(s * exponent - lse[None, :])
            if GROUP % BH != 0:  # zeros of lanes without a head, multiplied by an infinite key, are NaN
                each = tl.where(in_group[None, :], each, 0.0)
            p += tl.sum(each, 1)
            s = tl.zeros([BK, BH], tl.float32)
    p /= tl.load(of_notes + heads_kv * GROUP)
    tl.store(dscores + at_token * slots + slot, tl.where(there, p, 0.0), mask=slot < slots)


@triton.jit(do_not_specialize=["count", "first", "slots", "heads_index"])
def score(index_q, index_k, weights, keys, scores, strides, tokens, count: tl.int32, first: tl.int64, slots: tl.int32,
          heads_index: tl.int32, E: tl.constexpr, DIM_INDEX: tl.constexpr, ALIGN: tl.constexpr, HI: tl.constexpr,
          PADDED: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Writes the indexer's score I = sum_h w_h max(0, q_h . k) of every key in a token's list; grid (tokens)."""
    at_token = tl.program_id(0).to(tl.int64)
    b, row = token_at(tokens, first + at_token)
    h = tl.arange(0, HI)
    at_q, head_q, stride_q = heads_at(strides, count, b, layout_index.INDEX_Q, ALIGN)
    at_k, stride_k = rows_at(strides, count, b, 0, layout_index.INDEX_K, ALIGN)
    at_w, stride_w = rows_at(strides, count, b, 0, layout_index.WEIGHTS, 1)
    there = h < heads_index
    query = load_part(index_q + at_q + row * stride_q, h * head_q, there, 0, E, DIM_INDEX, True)
    w = tl.load(weights + at_w + row * stride_w + h, mask=there, other=0.0).to(tl.float32)
    of_keys, out = keys + at_token * slots, scores + at_token * slots
    # Loaded one iteration ahead, so that rows are loaded while the previous ones are multiplied.
    ahead = listed(of_keys, tl.arange(0, BK), slots)
    for k0 in tl.range(0, slots, BK):
        k, key = k0 + tl.arange(0, BK), ahead
        ahead = listed(of_keys, k + BK, slots)
        rows = load_part(index_k + at_k, key.to(tl.int64) * stride_k, key >= 0, 0, E, DIM_INDEX, True)
        s = tl.dot(rows, tl.trans(query), input_precision="ieee")
        each = loss_parts.at_least(s, 0.0) * w[None, :]
        if PADDED:  # zeros of lanes without a head, multiplied by an infinite key, are NaN
            each = tl.where(there[None, :], each, 0.0)
        tl.store(out + k, tl.sum(each, 1), mask=k < slots)


@triton.jit(do_not_specialize=["count", "first", "slots"])
def compare(keys, scores, dscores, losses, target, values, strides, tokens, count: tl.int32, first: tl.int64,
            slots: tl.int32, GIVEN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Overwrites p in a token's part of `dscores` by dI = y - p with y = softmax(I) over its selected keys, and writes
    the token's loss sum p (ln p - ln y); grid (tokens).

    GIVEN: p is a row of `target`, dI = y sum(p) - p, and y is written to `values`, if there are any.
    """
    at_token = tl.program_id(0).to(tl.int64)
    of_keys, of_scores, of_gap = keys + at_token * slots, scores + at_token * slots, dscores + at_token * slots
    of_p, of_y = of_gap, of_gap
    if GIVEN:
        b, row = token_at(tokens, first + at_token)
        at_p, stride_p = rows_at(strides, count, b, 0, layout_index.TARGET, 1)
        of_p = target + at_p + row * stride_p
        if values is not None:
            at_y, stride_y = rows_at(strides, count, b, 0, layout_index.VALUES, 1)
            of_y = values + at_y + row * stride_y
    top = tl.full([BK], -float("inf"), tl.float32)
    for k0 in tl.range(0, slots, BK):
        k = k0 + tl.arange(0, BK)
        x = tl.load(of_scores + k, mask=k < slots, other=0.0)
        top = tl.maximum(top, tl.where(listed(of_keys, k, slots) >= 0, x, -float("inf")))
    most = tl.max(top, 0)
    total, mass = tl.zeros([BK], tl.float32), tl.zeros([BK], tl.float32)
    for k0 in tl.range(0, slots, BK):
        k = k0 + tl.arange(0, BK)
        x = tl.load(of_scores + k, mask=k < slots, other=0.0)
        valid = listed(of_keys, k, slots) >= 0
        total += tl.where(valid, tl.exp(x - most), 0.0)
        if GIVEN:
            mass += tl.load(of_p + k, mask=valid, other=0.0)
    normaliser = tl.sum(total, 0)
    lost = tl.zeros([BK], tl.float32)
    for k0 in tl.range(0, slots, BK):
        k = k0 + tl.arange(0, BK)
        x = tl.load(of_scores + k, mask=k < slots, other=0.0)
        valid = listed(of_keys, k, slots) >= 0
        if GIVEN:
            p = tl.load(of_p + k, mask=valid, other=0.0)
            y = tl.exp2((x - most) * LOG2E) / normaliser
            gap, loss = loss_parts.given_difference(p, tl.sum(mass, 0), y, valid)
            if values is not None:
                tl.store(of_y + k, y, mask=valid)
        else:
            p = tl.load(of_p + k, mask=k < slots, other=0.0)
            gap, loss = loss_parts.difference(p, x, most, normaliser, valid, True)
        lost += loss
        tl.store(of_gap + k, gap, mask=k < slots)
    tl.store(losses + first + at_token, tl.sum(lost, 0))
