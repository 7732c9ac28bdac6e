"""Kernel of the lightning indexer's scores of a tile of keys for the rows that may see them.

Keys are the rows of the product and (token, head) pairs its columns, so that the sum over heads is a sum along a row,
and several tokens with few heads fill one product. A tile of keys stays in registers while the kernel iterates over
tokens.
"""

# mypy: disable-error-code="no-untyped-def"
# Annotations are for Triton, which evaluates them: tl.constexpr marks compile-time values.

import triton
import triton.language as tl

from fusion_attention.backends.triton.common import layout_index
from fusion_attention.backends.triton.common.kernels import PER_TILE, heads_at, inner_three, lengths_at, load_three
from fusion_attention.backends.triton.common.pages import cache_at, offset_of, pages_of


@triton.jit
def columns_ahead(at, within, there):
    """Returns the indexer's weights at address `at` + `within`, one per (token, head) column; 0 where `there` is false.

    Each weight is loaded twice and reduced to one: otherwise Triton repeats the load in the layout of the product, with
    32 loads per thread in place of one, and 60 registers.
    """
    twice = tl.zeros([1, 2], tl.int32)
    return tl.max(tl.load(at + within[:, None] + twice, mask=there[:, None] & (twice == 0), other=0.0), 1)


@triton.jit
def index_product(keys, rows, D1: tl.constexpr, D2: tl.constexpr):
    """Returns max(0, keys . rows), [keys, rows], NaN for NaN; both are three column blocks (D1, D2 0: unused)."""
    return tl.maximum(inner_three(keys, rows, D1, D2), 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["count", "begin", "head0", "width", "step", "last", "pitch"])
def index_scores(q, k, weights, scores, table, strides, lengths, tiles, count: tl.int32, begin: tl.int32,
                 head0: tl.int32, width: tl.int32, step: tl.int32, last: tl.int32, pitch: tl.int32,
                 HEADS: tl.constexpr, H: tl.constexpr, ADDS: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
                 D2: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, RATIO: tl.constexpr, ALIGN: tl.constexpr,
                 BT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Writes scores I = sum_h w_h max(0, q_h . k) of BN keys and BT rows of a tile, over H heads from head0 on.

    Grid (tiles of keys, tiles of rows from `begin` on); BM (token, head) columns are multiplied at a time. ADDS: scores
    are added to those of earlier heads. pitch: stride of rows in scores; keys that are hidden from all rows of the tile
    are not written. width: entries per row of the page table.
    """
    TOKENS: tl.constexpr = BM // H
    tile = tiles + (begin + tl.program_id(1)).to(tl.int64) * PER_TILE
    b, row0, row1 = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    _, kv_len, lo, hi, prefix, _ = lengths_at(lengths, count, b)
    if PAGE:
        kv_len = tl.minimum(kv_len, width.to(tl.int64) * PAGE)
    j0 = tl.program_id(0) * BN
    # Rows that may see one of these keys.
    earliest = tl.maximum(row0, j0 + 1 - hi)
    if RATIO != 1:  # computing a product with RATIO 1 too would take registers that two programs per processor lack
        earliest = tl.minimum(tl.maximum(row0, (j0 + 1).to(tl.int64) * RATIO - hi), row1)
    start = tl.where(prefix > j0, row0, earliest).to(tl.int32)
    stop = tl.minimum(row1, j0 + BN - lo).to(tl.int32)
    if (j0 < kv_len) & (start < stop):
        j = j0 + tl.arange(0, BN)
        cache = cache_at(strides, count, b, 0, layout_index.K, ALIGN)
        page = pages_of(table, b, step, last, j, kv_len, PAGE)
        keys = load_three(k, offset_of(cache, page, j, PAGE), j < kv_len, True, D0, D1, D2, DIM)
        first, head, token = heads_at(strides, count, b, layout_index.Q, ALIGN)
        n = tl.arange(0, BM)
        u, h = n // H, n % H
        if ADDS:  # head0 is zero otherwise; a run-time value costs registers in every load of rows
            h += head0
        within = u * token + h * head
        first_w, _, token_w = heads_at(strides, count, b, layout_index.WEIGHTS, 1)
        within_w, there = u * token_w + h, h < HEADS
        weights += first_w
        ahead = columns_ahead(weights + start * token_w, within_w, there & (start + u < stop))
        out = scores + (tl.program_id(1).to(tl.int64) * BT - row0) * pitch + j0
        s = tl.arange(0, TOKENS)
        for t in tl.range(start, stop, TOKENS):
            weight = ahead.to(tl.float32)
            after = t + TOKENS
            ahead = columns_ahead(weights + after * token_w, within_w, there & (after + u < stop))
            rows = load_three(q + first + t * token, within, there & (t + u < stop), True, D0, D1, D2, DIM)
            x = index_product(keys, rows, D1, D2) * weight[None, :]
            if HEADS % H:
                x = tl.where(there[None, :], x, 0.0)  # 0 * inf is NaN
            total = tl.sum(tl.reshape(x, [BN, TOKENS, H]), 2)
            to = out + (t + s).to(tl.int64)[None, :] * pitch + tl.arange(0, BN)[:, None]
            if ADDS:
                total += tl.load(to, mask=(t + s < stop)[None, :], other=0.0)
            tl.store(to, total, mask=(t + s < stop)[None, :])
