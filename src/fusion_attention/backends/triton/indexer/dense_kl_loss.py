"""Kernels of the indexer's loss over all keys of a band, without selection: softmax statistics, loss and gradients.

The only intermediate per (row, key) pair are the differences y - p of the indexer's softmax y and the attention's
probabilities p, for a chunk of row tiles. Gradients of keys are summed chunk by chunk, rows in ascending order, so that
results do not depend on the number of chunks.
"""

# mypy: disable-error-code="no-untyped-def"
# Annotations are for Triton, which evaluates them: tl.constexpr marks compile-time values.

import triton
import triton.language as tl

from fusion_attention.backends.triton.common import kernels as common
from fusion_attention.backends.triton.common import layout_index
from fusion_attention.backends.triton.common.kernels import LOG2E, PER_TILE
from fusion_attention.backends.triton.indexer import loss_parts


@triton.jit
def sees(row, key, extents, RATIO: tl.constexpr):
    """Returns bool [rows, keys], true if row + lo <= key < max((row + hi) // RATIO, prefix), key < kv_len. extents:
    (q_len, kv_len, lo, hi, prefix, _) of the sequence; RATIO: tokens of a key."""
    q_len, kv_len, lo, hi, prefix, _ = extents
    first, end = common.interval(row, row < q_len, kv_len, lo, hi, prefix, RATIO)
    return (key[None, :] >= first[:, None]) & (key[None, :] < end[:, None])


@triton.jit
def index_scores(q, k, weights, strides, count, b, heads, row, valid, key, inside, Q: tl.constexpr, K: tl.constexpr,
                 E: tl.constexpr, DIM: tl.constexpr, ALIGN: tl.constexpr):  # fmt: skip
    """Returns the indexer's scores I = sum_h w_h * max(0, q_h . k), float32 [rows, keys], in sequence b; valid, inside:
    masks of rows and keys; Q, K: numbers of q and k in the table `strides`."""
    at_k, stride_k = common.rows_at(strides, count, b, 0, K, ALIGN)
    at_q, head_q, stride_q = common.heads_at(strides, count, b, Q, ALIGN)
    at_w, stride_w = common.rows_at(strides, count, b, 0, layout_index.WEIGHTS, 1)
    keys = common.load_part(k + at_k, key.to(tl.int64) * stride_k, inside, 0, E, DIM, True)
    offset, of_weights = row.to(tl.int64) * stride_q, weights + at_w + row.to(tl.int64) * stride_w
    x = tl.zeros([row.shape[0], key.shape[0]], tl.float32)
    for h in tl.range(0, heads):
        w = tl.load(of_weights + h, mask=valid, other=0.0).to(tl.float32)
        query = common.load_part(q + at_q + h * head_q, offset, valid, 0, E, DIM, True)
        s = tl.dot(query, tl.trans(keys), input_precision="ieee")
        x += loss_parts.at_least(s, 0.0) * w[:, None]
    return x


# ---------------------------------------------------------------------------------------------------------- statistics


@triton.jit(do_not_specialize=["count", "heads", "plane"])
def warm_lse(q, k, weights, partial, strides, lengths, tiles, count: tl.int32, heads: tl.int32, plane: tl.int64,
             E: tl.constexpr, DIM: tl.constexpr, RATIO: tl.constexpr, ALIGN: tl.constexpr, BM: tl.constexpr,
             BN: tl.constexpr):  # fmt: skip
    """Writes max and sum of the softmax of the indexer's scores, of one tile of query rows over one range of keys, to
    `partial`; grid (entries of `tiles`, int32 [entries, 8]: sequence, rows, range of keys)."""
    tile = tiles + tl.program_id(0).to(tl.int64) * PER_TILE
    b, row0, row1 = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    begin, turns, split, flat = tl.load(tile + 3), tl.load(tile + 4), tl.load(tile + 5), tl.load(tile + 7)
    row = row0 + tl.arange(0, BM)
    valid = row < row1
    extents = common.lengths_at(lengths, count, b)
    top, total = tl.full([BM], -float("inf"), tl.float32), tl.zeros([BM], tl.float32)
    strange = tl.zeros([BM], tl.int32)
    for t in tl.range(0, turns):
        key = begin + t * BN + tl.arange(0, BN)
        x = index_scores(q, k, weights, strides, count, b, heads, row, valid, key, key < extents[1], layout_index.Q,
                         layout_index.K, E, DIM, ALIGN)  # fmt: skip
        x = tl.where(sees(row, key, extents, RATIO), x, -float("inf"))
        strange = tl.maximum(strange, tl.max((x != x).to(tl.int32), 1))
        now = tl.maximum(top, tl.max(x, 1))
        shift = tl.where(now == -float("inf"), 0.0, now)
        total = total * tl.exp2((top - shift) * LOG2E) + tl.sum(tl.exp2((x - shift[:, None]) * LOG2E), 1)
        top = now
    top = tl.where(strange > 0, float("nan"), top)
    at = partial + 2 * split * plane + flat + tl.arange(0, BM)
    tl.store(at, top, mask=valid)
    tl.store(at + plane, total, mask=valid)


@triton.jit(do_not_specialize=["count", "plane"])
def join_lse(partial, max_, sum_, strides, tiles, count: tl.int32, plane: tl.int64, BM: tl.constexpr):
    """Merges the softmax's max and sum of all ranges of keys of one tile of query rows, from `partial`, and writes them
    to `max_` and `sum_`; grid (tiles of rows)."""
    tile = tiles + tl.program_id(0).to(tl.int64) * PER_TILE
    b, row0, row1 = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    shares, flat = tl.load(tile + 5), tl.load(tile + 7)
    row = row0 + tl.arange(0, BM)
    valid = row < row1
    top, total = tl.full([BM], -float("inf"), tl.float32), tl.zeros([BM], tl.float32)
    strange = tl.zeros([BM], tl.int32)
    at = partial + flat + tl.arange(0, BM)
    for _ in tl.range(0, shares):
        m, s = tl.load(at, mask=valid, other=0.0), tl.load(at + plane, mask=valid, other=0.0)
        at += 2 * plane
        strange = tl.maximum(strange, (m != m).to(tl.int32))
        now = tl.maximum(top, m)
        shift = tl.where(now == -float("inf"), 0.0, now)
        total = total * tl.exp2((top - shift) * LOG2E) + s * tl.exp2((m - shift) * LOG2E)
        top = now
    at_max, stride_max = common.rows_at(strides, count, b, 0, layout_index.MAX, 1)
    at_sum, stride_sum = common.rows_at(strides, count, b, 0, layout_index.SUM, 1)
    row64 = row.to(tl.int64)
    tl.store(max_ + at_max + row64 * stride_max, tl.where(strange > 0, float("nan"), top), mask=valid)
    tl.store(sum_ + at_sum + row64 * stride_sum, total, mask=valid)


# ---------------------------------------------------------------------------------------------------------------- loss


@triton.jit
def target(q, k, q_rope, k_rope, notes, plane, strides, count, b, heads, row, valid, flat, key, inside, exponent,
           GROUP: tl.constexpr, DIM: tl.constexpr, DIM_ROPE: tl.constexpr, BC: tl.constexpr,
           ALIGN: tl.constexpr):  # fmt: skip
    """Returns float32 [rows, keys], the attention's probabilities exp2(s * exponent - lse) summed over `heads`, in
    sequence b; notes: lse (base 2) of each head and row; q and k are read BC columns at a time."""
    STEPS: tl.constexpr = loss_parts.steps(DIM, BC) + loss_parts.steps(DIM_ROPE, BC)
    at_q, head_q, stride_q = common.heads_at(strides, count, b, layout_index.Q, ALIGN)
    at_k, head_k, stride_k = common.heads_at(strides, count, b, layout_index.K, ALIGN)
    at_qr, head_qr, stride_qr, at_kr, head_kr, stride_kr = at_q, head_q, stride_q, at_k, head_k, stride_k
    if DIM_ROPE:
        at_qr, head_qr, stride_qr = common.heads_at(strides, count, b, layout_index.Q_ROPE, ALIGN)
        at_kr, head_kr, stride_kr = common.heads_at(strides, count, b, layout_index.K_ROPE, ALIGN)
    row, key, d = row.to(tl.int64), key.to(tl.int64), tl.arange(0, BC)
    s = tl.zeros([row.shape[0], key.shape[0]], tl.float32)
    p = s
    for t in tl.range(0, heads * STEPS):
        h, c = t // STEPS, t % STEPS
        hk = h // GROUP
        lse = tl.load(notes + h * plane + flat, mask=valid, other=float("inf"))
        of_q, step_q, width = loss_parts.columns_at(c, q, q_rope, at_q + h * head_q, at_qr + h * head_qr, stride_q,
                                                    stride_qr, DIM, DIM_ROPE, BC)  # fmt: skip
        of_k, step_k, _ = loss_parts.columns_at(c, k, k_rope, at_k + hk * head_k, at_kr + hk * head_kr, stride_k,
                                                stride_kr, DIM, DIM_ROPE, BC)  # fmt: skip
        there_q, there_k = valid[:, None], inside[:, None]
        if (DIM % BC != 0) or (DIM_ROPE % BC != 0):
            there_q, there_k = there_q & (d < width)[None, :], there_k & (d < width)[None, :]
        query = tl.load(of_q + row[:, None] * step_q + d[None, :], mask=there_q, other=0.0)
        keys = tl.load(of_k + key[:, None] * step_k + d[None, :], mask=there_k, other=0.0)
        s = tl.dot(query, tl.trans(keys), s, input_precision="ieee")
        if c == STEPS - 1:
            p += tl.exp2(s * exponent - lse[:, None])
            s = tl.zeros([row.shape[0], key.shape[0]], tl.float32)
    return p


@triton.jit
def block_at(differences, tile, turn, BM: tl.constexpr, BN: tl.constexpr):
    """Returns (address of a block [BM, BN] of y - p, indexer's minus attention's probabilities, stride of its rows).

    tile: address of the tile of query rows in its table. turn: number of the tile of keys among those that it reads.
    """
    turns = tl.load(tile + 4)
    return differences + tl.load(tile + 5).to(tl.int64) * (BM * BN) + turn * BN, turns * BN


@triton.jit(do_not_specialize=["count", "first_tile", "heads_q", "plane"])
def warm_target(q, k, q_rope, k_rope, notes, differences, strides, lengths, tiles, count: tl.int32,
                first_tile: tl.int32, heads_q: tl.int32, plane: tl.int64, exponent: tl.float32, GROUP: tl.constexpr,
                DIM: tl.constexpr, DIM_ROPE: tl.constexpr, BC: tl.constexpr, ALIGN: tl.constexpr, BM: tl.constexpr,
                BN: tl.constexpr):  # fmt: skip
    """Writes p, the mean over heads of the attention's probabilities, of one tile of rows and one tile of keys to
    `differences`; grid (tiles of keys, tiles of rows)."""
    tile = tiles + (first_tile + tl.program_id(1)).to(tl.int64) * PER_TILE
    turn = tl.program_id(0)
    if turn >= tl.load(tile + 4):
        return
    b, row0, row1, begin = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    row, key = row0 + tl.arange(0, BM), begin + turn * BN + tl.arange(0, BN)
    flat, valid, inside = tl.load(tile + 7) + tl.arange(0, BM), row < row1, key < tl.load(lengths + count + b)
    p = target(q, k, q_rope, k_rope, notes, plane, strides, count, b, heads_q, row, valid, flat, key, inside, exponent,
               GROUP, DIM, DIM_ROPE, BC, ALIGN)  # fmt: skip
    p /= tl.load(notes + heads_q * plane + flat, mask=valid, other=1.0)[:, None]
    at, line = block_at(differences, tile, turn, BM, BN)
    tl.store(at + (tl.arange(0, BM) * line)[:, None] + tl.arange(0, BN)[None, :], p)


@triton.jit(do_not_specialize=["count", "first_tile", "first_block", "heads_index"])
def warm_difference(index_q, index_k, weights, index_max, index_sum, differences, losses, strides, lengths, tiles,
                    count: tl.int32, first_tile: tl.int32, first_block: tl.int32, heads_index: tl.int32,
                    GIVEN: tl.constexpr, E: tl.constexpr, DIM_INDEX: tl.constexpr, RATIO: tl.constexpr,
                    ALIGN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Overwrites p, the attention's probabilities of a tile of rows and a tile of keys, by y - p (y: softmax of the
    indexer's scores), and writes the loss sum p (ln p - ln y); grid (tiles of keys, tiles of rows). GIVEN: writes only
    y."""
    tile = tiles + (first_tile + tl.program_id(1)).to(tl.int64) * PER_TILE
    turn = tl.program_id(0)
    if turn >= tl.load(tile + 4):
        return
    b, row0, row1, begin = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    row, key = row0 + tl.arange(0, BM), begin + turn * BN + tl.arange(0, BN)
    valid, extents = row < row1, common.lengths_at(lengths, count, b)
    x = index_scores(index_q, index_k, weights, strides, count, b, heads_index, row, valid, key, key < extents[1],
                     layout_index.INDEX_Q, layout_index.INDEX_K, E, DIM_INDEX, ALIGN)  # fmt: skip
    at_max, stride_max = common.rows_at(strides, count, b, 0, layout_index.INDEX_MAX, 1)
    at_sum, stride_sum = common.rows_at(strides, count, b, 0, layout_index.INDEX_SUM, 1)
    row64 = row.to(tl.int64)
    top = tl.load(index_max + at_max + row64 * stride_max, mask=valid, other=0.0)
    total = tl.load(index_sum + at_sum + row64 * stride_sum, mask=valid, other=1.0)
    at, line = block_at(differences, tile, turn, BM, BN)
    at += (tl.arange(0, BM) * line)[:, None] + tl.arange(0, BN)[None, :]
    visible = sees(row, key, extents, RATIO) & valid[:, None]
    if GIVEN:
        y = tl.exp2((x - top[:, None]) * LOG2E) / total[:, None]
        tl.store(at, tl.where(visible, y, 0.0))
    else:
        gap, loss = loss_parts.difference(tl.load(at), x, top[:, None], total[:, None], visible, False)
        tl.store(losses + first_block + tl.load(tile + 5) + turn, tl.sum(loss))
        tl.store(at, gap)


@triton.jit(do_not_specialize=["count", "first_tile", "first_block"])
def warm_given(target, values, differences, losses, strides, lengths, tiles, count: tl.int32, first_tile: tl.int32,
               first_block: tl.int32, RATIO: tl.constexpr, UNIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
               BK: tl.constexpr):  # fmt: skip
    """Overwrites y, the indexer's probabilities of a tile of query rows, by y sum(p) - p for a given `target` p (UNIT:
    sum(p) is taken as 1); writes y to `values` (may be None), and the tile's loss sum p (ln p - ln y); grid (tiles)."""
    tile = tiles + (first_tile + tl.program_id(0)).to(tl.int64) * PER_TILE
    b, row0, row1, begin = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    turns = tl.load(tile + 4) * (BN // BK)
    if turns == 0:
        return
    row, extents = row0 + tl.arange(0, BM), common.lengths_at(lengths, count, b)
    at_p, stride_p = common.rows_at(strides, count, b, 0, layout_index.TARGET, 1)
    of_p = target + at_p + row.to(tl.int64) * stride_p
    valid, mass, lost = row < row1, tl.full([BM], UNIT, tl.float32), tl.zeros([BM], tl.float32)
    if not UNIT:
        for turn in tl.range(0, turns):
            key = begin + turn * BK + tl.arange(0, BK)
            visible = sees(row, key, extents, RATIO) & valid[:, None]
            mass += tl.sum(tl.load(of_p[:, None] + key[None, :], mask=visible, other=0.0), 1)
    at, line = block_at(differences, tile, 0, BM, BN)
    for turn in tl.range(0, turns):
        column = turn * BK + tl.arange(0, BK)
        key = begin + column
        visible = sees(row, key, extents, RATIO) & valid[:, None]
        p = tl.load(of_p[:, None] + key[None, :], mask=visible, other=0.0)
        of_gap = at + (tl.arange(0, BM) * line)[:, None] + column[None, :]
        y = tl.load(of_gap)
        if values is not None:
            at_y, stride_y = common.rows_at(strides, count, b, 0, layout_index.VALUES, 1)
            tl.store((values + at_y + row.to(tl.int64) * stride_y)[:, None] + key[None, :], y, mask=visible)
        gap, loss = loss_parts.given_difference(p, mass[:, None], y, visible)
        lost += tl.sum(loss, 1)
        tl.store(of_gap, gap)
    tl.store(losses + first_block + tl.load(tile + 5), tl.sum(lost, 0))


@triton.jit(do_not_specialize=["count", "first_tile", "tiles_of_chunk"])
def warm_query(index_q, weights, keys, differences, dq, dweights, rows, factors, largest, strides, tiles,
               count: tl.int32, first_tile: tl.int32, tiles_of_chunk: tl.int32, E: tl.constexpr,
               DIM_INDEX: tl.constexpr, UNIT: tl.constexpr, ALIGN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
               BK: tl.constexpr):  # fmt: skip
    """Writes dq = w_h sum_j [S > 0] dI_j k_j and dw_h = sum_j max(0, S) dI_j of one tile of rows and head h of the
    indexer; S = q . k, dI: from `differences`. Also writes the inputs of warm_key(): query rows (zeros for non-finite
    rows) and weights. Grid (tiles of a chunk of rows, heads)."""
    at_tile, h = tl.program_id(0), tl.program_id(1)
    tile = tiles + (first_tile + at_tile).to(tl.int64) * PER_TILE
    b, row0, row1 = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    turns, first = tl.load(tile + 4), tl.load(tile + 6)
    row, lane = (row0 + tl.arange(0, BM)).to(tl.int64), tl.arange(0, BM)
    valid = row < row1
    at_q, stride_q = common.rows_at(strides, count, b, h, layout_index.INDEX_Q, ALIGN)
    query = loss_parts.finite_rows(common.load_part(index_q + at_q, row * stride_q, valid, 0, E, DIM_INDEX, True))
    at_w, stride_w = common.rows_at(strides, count, b, 0, layout_index.WEIGHTS, 1)
    w = loss_parts.finite_weights(tl.load(weights + at_w + row * stride_w + h, mask=valid, other=0.0).to(tl.float32))
    slot = (h.to(tl.int64) * tiles_of_chunk + at_tile) * BM
    tl.store(rows + slot * E + (lane * E)[:, None] + tl.arange(0, E)[None, :], query)
    tl.store(factors + slot + lane, w * loss_parts.unit_of(largest))
    acc, dw = tl.zeros([BM, E], tl.float32), tl.zeros([BM], tl.float32)
    at_gap, line = block_at(differences, tile, 0, BM, BN)
    of_row, of_key, at_keys = lane * line, tl.arange(0, BK), keys + first.to(tl.int64) * E
    for t in tl.range(0, turns * (BN // BK)):
        k = tl.load(at_keys + (of_key * E)[:, None] + tl.arange(0, E)[None, :])
        at_keys += BK * E
        s = tl.dot(query, tl.trans(k), input_precision="ieee")
        gap = tl.load(at_gap + t * BK + of_row[:, None] + of_key[None, :])
        dw += tl.sum(tl.maximum(s, 0.0) * gap, 1)
        acc = tl.dot(tl.where(s > 0, gap * UNIT, 0.0).to(k.dtype), k, acc, input_precision="ieee")
    at_dq, stride_dq = common.rows_at(strides, count, b, h, layout_index.DQ, 1)
    common.store_part(dq + at_dq, row * stride_dq, valid, acc * (w / UNIT)[:, None], 0, E, DIM_INDEX)
    at_dw, stride_dw = common.rows_at(strides, count, b, 0, layout_index.DWEIGHTS, 1)
    tl.store(dweights + at_dw + row * stride_dw + h, dw.to(dweights.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["first_tile", "tiles_of_chunk", "heads_index", "plane"])
def warm_key(keys, differences, rows, factors, added, tiles, key_tiles, first_tile: tl.int32,
             tiles_of_chunk: tl.int32, heads_index: tl.int32, plane: tl.int64, SPLITS: tl.constexpr, E: tl.constexpr,
             BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr):  # fmt: skip
    """Adds dk = sum_h sum_i w_h [S > 0] dI_i q_i, over the query rows of a chunk in ascending order, to the sums of one
    tile of keys, for one of SPLITS groups of the indexer's heads; grid (tiles of keys, SPLITS)."""
    of_keys, split = key_tiles + tl.program_id(0).to(tl.int64) * PER_TILE, tl.program_id(1)
    key0, at = tl.load(of_keys + 1), tl.load(of_keys + 5)
    begin = tl.maximum(tl.load(of_keys + 3) - first_tile, 0)
    end = tl.minimum(tl.load(of_keys + 4) - first_tile, tiles_of_chunk)
    if begin >= end:
        return
    e, n = tl.arange(0, E), tl.arange(0, BN)
    at_keys = (n * E)[:, None] + e[None, :]
    k = tl.load(keys + at.to(tl.int64) * E + at_keys)
    place = added + split * plane + at.to(tl.int64) * E + at_keys
    acc = tl.load(place)
    low, high = split * heads_index // SPLITS, (split + 1) * heads_index // SPLITS
    lane, at_zero = tl.arange(0, BR), tl.full([], 0, tl.int64)
    for t in tl.range(begin * (BM // BR), end * (BM // BR)):
        at_tile = t // (BM // BR)
        tile = tiles + (first_tile + at_tile) * PER_TILE
        column = key0 - tl.load(tile + 3)
        at_gap, line = block_at(differences, tile, 0, BM, BN)
        met = (column >= 0) & (column < line) & (n >= 0)
        of_row = (t % (BM // BR) * BR + lane) * line
        gap = tl.load(at_gap + column + of_row[None, :] + n[:, None], mask=met[:, None], other=0.0)
        for h in tl.range(low, high):
            slot = ((at_zero + h) * tiles_of_chunk * (BM // BR) + t) * BR
            query = tl.load(rows + slot * E + (lane * E)[:, None] + e[None, :])
            s = tl.dot(k, tl.trans(query), input_precision="ieee")
            ds = tl.where(s > 0, gap * tl.load(factors + slot + lane)[None, :], 0.0)
            acc = tl.dot(ds.to(k.dtype), query, acc, input_precision="ieee")
    tl.store(place, acc)
