"""Kernels that select the top_k largest scores of a row, exactly and in descending order.

A row's candidates are int64 numbers in the order of their keys: the high half is the rank of the score (an int32 in
the order of float32 scores), the low half is the largest key minus this key, so that a descending sort breaks ties by
the lower key. When the buffer of candidates is full, only the top_k largest remain; a later key loses a tie, so scores
not above the smallest of them are dropped. The result does not depend on the block size.

Common parameters: `scores`, `entries` and `counts` are the scratch of a chunk (launch.py): scores and candidates of its
rows, and numbers of candidates; TOP is top_k, BUFFER the capacity of a row's candidates; `tiles` is the result of
row_tiles(), `begin` the chunk's first tile, BT its rows; BN keys are read at a time.
"""

# mypy: disable-error-code="no-untyped-def"
# Annotations are for Triton, which evaluates them: tl.constexpr marks compile-time values.

import triton
import triton.language as tl

from fusion_attention.backends.triton.common import layout_index
from fusion_attention.backends.triton.common.kernels import PER_TILE, lengths_at, rows_at
from fusion_attention.backends.triton.selected.selection import band_of

UNSEEN = tl.constexpr(-0x7F800001)  # the rank of -inf; such a key is not selected
NO_RANK = tl.constexpr(-0x80000000)  # below all ranks
NO_ENTRY = tl.constexpr(-0x8000000000000000)
LARGEST = tl.constexpr(0x7FFFFFFF)
# Three counts share an int64: bits of one count, bits of two, and the largest count, which is above all candidates.
COUNT, TWO_COUNTS, MOST_COUNTED = tl.constexpr(21), tl.constexpr(42), tl.constexpr((1 << 21) - 1)


@triton.jit
def rank_of(score):
    """Returns int32 ranks that are ordered as float32 scores are: NaN is above all, and both zeros are equal."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(score == score, tl.where(bits < 0, bits ^ LARGEST, bits), LARGEST)


@triton.jit
def score_of(rank):
    """Returns the float32 scores of int32 ranks, which have the order of the scores; the inverse of rank_of()."""
    return tl.where(rank < 0, rank ^ LARGEST, rank).to(tl.float32, bitcast=True)


@triton.jit
def seen_ranks(scores, j, first, end):
    """Returns int32 ranks, ordered as scores, of keys j in the row `scores` (address); of -inf outside [first, end)."""
    return rank_of(tl.load(scores + j, mask=(j >= first) & (j < end), other=-float("inf")))


@triton.jit
def floor_of(entries, entry_count, TOP: tl.constexpr, BN: tl.constexpr):
    """Returns (the TOP-th largest rank of the first `entry_count` candidates, number of candidates with a larger rank);
    entries: address of a query row's candidates, int64 with the score's rank in the high 32 bits."""
    floor = tl.full([], NO_RANK, tl.int64)
    n = tl.arange(0, BN)
    larger = tl.full([], 0, tl.int64)
    for turn in range(16):  # two bits of the rank per iteration, from the highest on
        step = tl.full([], 1, tl.int64) << (30 - 2 * turn)
        one, two = (floor + step).to(tl.int32), (floor + 2 * step).to(tl.int32)
        three = (floor + 3 * step).to(tl.int32)
        counts = tl.zeros([BN], tl.int64)
        for s0 in tl.range(0, entry_count, BN):
            rank = (tl.load(entries + s0 + n, mask=s0 + n < entry_count, other=NO_ENTRY) >> 32).to(tl.int32)
            counts += (rank >= one).to(tl.int64)
            counts += ((rank >= two).to(tl.int64) << COUNT) + ((rank >= three).to(tl.int64) << TWO_COUNTS)
        total = tl.sum(counts, 0)
        of_one, of_two, of_three = total & MOST_COUNTED, (total >> COUNT) & MOST_COUNTED, total >> TWO_COUNTS
        reached = (of_one >= TOP).to(tl.int64) + (of_two >= TOP).to(tl.int64) + (of_three >= TOP).to(tl.int64)
        next_one = tl.where(reached == 0, of_one, tl.where(reached == 1, of_two, of_three))
        larger = tl.where(reached == 3, larger, next_one)
        floor += reached * step
    return floor.to(tl.int32), larger.to(tl.int32)


@triton.jit
def prune(entries, entry_count, TOP: tl.constexpr, BN: tl.constexpr):
    """Keeps the TOP largest of a query row's first `entry_count` candidates (the first among equals) at the start of
    its buffer; returns the smallest rank kept. entries: address of the candidates, int64 with the score's rank in the
    high 32 bits."""
    floor, larger = floor_of(entries, entry_count, TOP, BN)
    written, equals = tl.full([], 0, tl.int32), TOP - larger
    n = tl.arange(0, BN)
    for s0 in tl.range(0, entry_count, BN):
        entry = tl.load(entries + s0 + n, mask=s0 + n < entry_count, other=NO_ENTRY)
        rank = (entry >> 32).to(tl.int32)
        equal = (rank == floor).to(tl.int32)
        stays = ((rank > floor) | ((equal > 0) & (tl.cumsum(equal, 0) <= equals))).to(tl.int32)
        equals -= tl.sum(equal, 0)
        tl.debug_barrier()  # all threads read before one writes
        tl.store(entries + written + tl.cumsum(stays, 0) - 1, entry, mask=stays > 0)
        written += tl.sum(stays, 0)
    tl.debug_barrier()
    return floor


@triton.jit(do_not_specialize=["count", "begin", "width", "pitch"])
def index_choice(scores, entries, counts, strides, lengths, tiles, count: tl.int32, begin: tl.int32, width: tl.int32,
                 pitch: tl.int32, TOP: tl.constexpr, BUFFER: tl.constexpr, PAGE: tl.constexpr, RATIO: tl.constexpr,
                 BT: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Selects the keys of the TOP largest scores of one query row; writes them unordered, as int64 candidates (rank of
    the score in the high 32 bits, key in the low ones), to `entries`, and their number to `counts`.

    Grid (rows of tiles from tile `begin` on). Scores are read BN at a time. entries: BUFFER candidates per row, with
    BUFFER at least TOP + BN.
    """
    tile = tiles + (begin + tl.program_id(0) // BT).to(tl.int64) * PER_TILE
    b, row = tl.load(tile).to(tl.int64), tl.load(tile + 1).to(tl.int64) + tl.program_id(0) % BT
    if row < tl.load(tile + 2):
        _, kv_len, lo, hi, prefix, _ = lengths_at(lengths, count, b)
        if PAGE:
            kv_len = tl.minimum(kv_len, width.to(tl.int64) * PAGE)
        first, end = band_of(row, kv_len, lo, hi, prefix, RATIO)
        slot = tl.program_id(0).to(tl.int64)
        scores, entries = scores + slot * pitch, entries + slot * BUFFER
        have, floor = tl.full([], 0, tl.int32), tl.full([], UNSEEN, tl.int32)
        n = tl.arange(0, BN)
        ahead = seen_ranks(scores, first // BN * BN + n, first, end)
        for j0 in tl.range(first // BN * BN, end + BN, BN):  # the last iteration has no keys and prunes
            rank, j = ahead, j0 + n
            ahead = seen_ranks(scores, j + BN, first, end)
            takes = (rank > floor).to(tl.int32)
            taken = tl.sum(takes, 0)
            if (have + taken > BUFFER) | ((j0 >= end) & (have > TOP)):
                floor = prune(entries, have, TOP, BN)
                have = tl.full([], TOP, tl.int32)
            tl.store(entries + have + tl.cumsum(takes, 0) - 1, entry_of(rank, j), mask=takes > 0)
            have += taken
            tl.debug_barrier()  # other threads read these candidates
        tl.store(counts + slot, have)


@triton.jit
def entry_of(rank, key):
    """Returns an int64 candidate: the score's rank in the high 32 bits, then the key, inverted so that of equal scores
    the smaller key sorts first in descending order."""
    return (rank.to(tl.int64) << 32) | (key ^ LARGEST).to(tl.int64)


@triton.jit(do_not_specialize=["count", "begin"])
def index_write(entries, counts, indices, values, strides, tiles, count: tl.int32, begin: tl.int32,
                TOP: tl.constexpr, BUFFER: tl.constexpr, SORTS: tl.constexpr, BT: tl.constexpr,
                BN: tl.constexpr):  # fmt: skip
    """Writes BN entries of the lists of selected keys: keys to `indices`, their scores to `values`, from the candidates
    of index_choice(); grid (rows of tiles from tile `begin` on, blocks of BN entries).

    SORTS: the candidates are unordered, in one block, and are sorted here; else each row has TOP candidates in order.
    """
    tile = tiles + (begin + tl.program_id(0) // BT).to(tl.int64) * PER_TILE
    b, row = tl.load(tile).to(tl.int64), tl.load(tile + 1).to(tl.int64) + tl.program_id(0) % BT
    if row < tl.load(tile + 2):
        s = tl.program_id(1) * BN + tl.arange(0, BN)
        slot = tl.program_id(0).to(tl.int64)
        entry = tl.load(entries + slot * BUFFER + s, mask=s < tl.load(counts + slot), other=NO_ENTRY)
        if SORTS:
            entry = tl.sort(entry, descending=True)
        there = entry != NO_ENTRY
        at, stride = rows_at(strides, count, b, 0, layout_index.INDICES, 1)
        key = tl.where(there, (entry & LARGEST).to(tl.int32) ^ LARGEST, -1)
        tl.store(indices + at + row * stride + s, key, mask=s < TOP)
        if values is not None:
            at, stride = rows_at(strides, count, b, 0, layout_index.VALUES, 1)
            value = tl.where(there, score_of((entry >> 32).to(tl.int32)), -float("inf"))
            tl.store(values + at + row * stride + s, value.to(values.dtype.element_ty), mask=s < TOP)
