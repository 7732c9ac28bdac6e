"""Kernels that sum rows per key: the gradients of keys from the rows of all tokens that selected them.

The list of the rows' keys is sorted first, stably, so that the rows of a key are adjacent and in their order. Rows are
summed within blocks of a fixed number of entries, one after the other, and the sums of blocks are then added to the sum
of the key, block after block. One program does so for a key; for a key with many rows, other programs compute the sums
of blocks before. No two programs add to the same element, and a sum that continues with a later block does not depend
on the chunk or program of earlier blocks: every run gives the same bits, for any number of chunks.
"""

# mypy: disable-error-code="no-untyped-def"
# Annotations are for Triton, which evaluates them: tl.constexpr marks compile-time values.

import triton
import triton.language as tl

from fusion_attention.backends.triton.common.kernels import PER_TILE, rows_at

TURN = tl.constexpr(8)  # number of rows that are loaded at once


@triton.jit
def _listed(marked, e, end):
    """Loads TURN (8) int32 from `marked` + e on, as a tuple; zeros from `end` on."""
    return (
        tl.load(marked + e, mask=e < end, other=0), tl.load(marked + e + 1, mask=e + 1 < end, other=0),
        tl.load(marked + e + 2, mask=e + 2 < end, other=0), tl.load(marked + e + 3, mask=e + 3 < end, other=0),
        tl.load(marked + e + 4, mask=e + 4 < end, other=0), tl.load(marked + e + 5, mask=e + 5 < end, other=0),
        tl.load(marked + e + 6, mask=e + 6 < end, other=0), tl.load(marked + e + 7, mask=e + 7 < end, other=0),
    )  # fmt: skip


@triton.jit
def _row_of(mark):
    """Returns the row r that mark() stored as r, or as -1 - r at the start of a block."""
    return tl.where(mark < 0, -1 - mark, mark)


@triton.jit
def _added(acc, rows, marked, begin, end, c, there, COLUMNS: tl.constexpr):
    """Returns acc plus rows[r] over the entries r of `marked` [begin, end), in order; rows of one block are summed
    first, then added to acc. marked: r, or -1 - r at the start of a block. c, there: columns, and their mask."""
    segment = tl.zeros_like(acc)
    # Entries are loaded one iteration ahead, so that the addresses of rows are known.
    ahead = _listed(marked, begin, end)
    for e in tl.range(begin, end, TURN):
        now = ahead
        ahead = _listed(marked, e + TURN, end)
        for n in tl.static_range(TURN):
            at = rows + _row_of(now[n]).to(tl.int64) * COLUMNS + c
            row = tl.load(at, mask=there & (e + n < end), other=0.0).to(tl.float32)
            acc = tl.where(now[n] < 0, acc + segment, acc)
            segment = tl.where(now[n] < 0, 0.0, segment) + row
    return acc + segment


@triton.jit
def _first_of(marked, row, begin, end):
    """Returns the first index in [begin, end) of `marked` (ascending rows, from mark()) whose row is at least `row`."""
    while begin < end:
        middle = (begin + end) // 2
        is_before = _row_of(tl.load(marked + middle)) < row
        begin, end = tl.where(is_before, middle + 1, begin), tl.where(is_before, end, middle)
    return begin


@triton.jit(do_not_specialize=["entries", "per"])
def mark(order, marked, entries: tl.int32, per: tl.int32, BN: tl.constexpr):
    """Writes the row r = order[e] of each entry e to `marked`, as -1 - r if its block (r // per, `per` rows) differs
    from that of the entry before, else as r; grid (blocks of BN entries)."""
    e = tl.program_id(0) * BN + tl.arange(0, BN)
    there = e < entries
    row = tl.load(order + e, mask=there, other=0).to(tl.int32)
    before = tl.load(order + e - 1, mask=there & (e > 0), other=0).to(tl.int32)
    tl.store(marked + e, tl.where(row // per == before // per, row, -1 - row), mask=there)


@triton.jit(do_not_specialize=["keys"])
def find_hot(starts, hot, strides, keys: tl.int32, HOT: tl.constexpr, BN: tl.constexpr):
    """Writes to `hot` the number of keys with more than HOT rows to sum and then these keys, in any order; writes each
    key's index among them, or -1, to `strides`. starts: first row of each key. Grid (blocks of BN keys)."""
    key = tl.program_id(0) * BN + tl.arange(0, BN)
    there = key < keys
    rows = tl.load(starts + key + 1, mask=there, other=0) - tl.load(starts + key, mask=there, other=0)
    place = tl.atomic_add(hot + key * 0, 1, mask=rows > HOT, sem="relaxed")
    tl.store(hot + 1 + place, key, mask=rows > HOT)
    tl.store(strides + key, tl.where(rows > HOT, place, -1), mask=there)


@triton.jit(do_not_specialize=["count", "per"])
def add_blocks(rows, marked, starts, hot, parts, count: tl.int32, per: tl.int32, COLUMNS: tl.constexpr,
               W: tl.constexpr):  # fmt: skip
    """Writes W columns of the sum of one block of rows of a key with many rows to parts [keys, count, COLUMNS].

    rows: the addends; marked: their order by key, from mark(); starts: first entry of each key. hot: the number of keys
    with many rows, then these keys. count: blocks per key; per: rows of a block. Grid (keys, blocks, panels).
    """
    place, block = tl.program_id(0), tl.program_id(1)
    if place < tl.load(hot):
        key = tl.load(hot + 1 + place)
        last = tl.load(starts + key + 1)
        begin = _first_of(marked, block * per, tl.load(starts + key), last)
        end = _first_of(marked, (block + 1) * per, begin, last)
        c = tl.program_id(2) * W + tl.arange(0, W)
        block_sum = _added(tl.zeros([W], tl.float32), rows, marked, begin, end, c, c < COLUMNS, COLUMNS)
        tl.store(parts + (place * count + block).to(tl.int64) * COLUMNS + c, block_sum, mask=c < COLUMNS)


@triton.jit(do_not_specialize=["count"])
def add_rows(rows, marked, starts, strides, parts, total, count: tl.int32, COLUMNS: tl.constexpr,
             W: tl.constexpr):  # fmt: skip
    """Adds W columns of all rows of a key, in order, to its row of `total`; grid (keys, panels of W columns).

    marked: order of the rows by key, from mark(); starts: first entry of each key, and the end; strides: index of a key
    in `parts` or -1; parts: sums of `count` blocks of rows of the keys with many rows.
    """
    key = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(starts + key), tl.load(starts + key + 1)
    if begin < end:
        c = tl.program_id(1) * W + tl.arange(0, W)
        there = c < COLUMNS
        at = total + key * COLUMNS + c
        acc = tl.load(at, mask=there, other=0.0)
        place = tl.load(strides + key)
        if place < 0:
            acc = _added(acc, rows, marked, begin, end, c, there, COLUMNS)
        else:
            of_key = parts + place.to(tl.int64) * count * COLUMNS + c
            for n in tl.range(0, count):
                acc += tl.load(of_key + n * COLUMNS, mask=there, other=0.0)
        tl.store(at, acc, mask=there)


@triton.jit(do_not_specialize=["count"])
def write_rows(total, out, strides, tiles, count: tl.int32, VIEW: tl.constexpr, IDS: tl.constexpr,
               COLUMNS: tl.constexpr, FIRST: tl.constexpr, DIM: tl.constexpr, W: tl.constexpr,
               BN: tl.constexpr):  # fmt: skip
    """Converts DIM columns from FIRST on of the sums `total` to the dtype of `out` (tensor number VIEW of the table
    `strides`), and writes them; tensor number IDS gives the row of `total` for each key. Grid (tiles of keys, heads,
    panels of W columns)."""
    tile = tiles + tl.program_id(0).to(tl.int64) * PER_TILE
    b, h = tl.load(tile).to(tl.int64), tl.program_id(1).to(tl.int64)
    j = tl.load(tile + 1) + tl.arange(0, BN)
    c = tl.program_id(2) * W + tl.arange(0, W)
    there = (j < tl.load(tile + 2))[:, None] & (c < DIM)[None, :]
    first, step = rows_at(strides, count, b, h, IDS, 1)
    key = first + j.to(tl.int64) * step
    sums = tl.load(total + key[:, None] * COLUMNS + FIRST + c[None, :], mask=there, other=0.0)
    at, stride = rows_at(strides, count, b, h, VIEW, 1)
    at = out + at + j.to(tl.int64)[:, None] * stride + c[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), mask=there)
