"""Sums of rows by the key that each belongs to: what tokens that chose a key give to its gradient.

A list says of every row whose it is. It is sorted first, stably, so that the rows of a key stand side by side in the
order in which they were given; then one program adds them to what the key has so far, one after the other. No two
programs add to one element, and a sum that is taken up again where it was left does not depend on where that was: the
same bits in every run, and for any number of chunks.
"""

# mypy: disable-error-code="no-untyped-def"
# Annotations are Triton's here: they are evaluated, and say what is known while compiling.

import triton
import triton.language as tl

from fusion_attention.backends.triton import views
from fusion_attention.backends.triton.common import PER_TILE, rows_at

TURN = tl.constexpr(8)  # rows whose loads are in flight together


@triton.jit
def _listed(order, e, end):
    """The next TURN entries of the sorted list from e on."""
    return (
        tl.load(order + e, mask=e < end, other=0), tl.load(order + e + 1, mask=e + 1 < end, other=0),
        tl.load(order + e + 2, mask=e + 2 < end, other=0), tl.load(order + e + 3, mask=e + 3 < end, other=0),
        tl.load(order + e + 4, mask=e + 4 < end, other=0), tl.load(order + e + 5, mask=e + 5 < end, other=0),
        tl.load(order + e + 6, mask=e + 6 < end, other=0), tl.load(order + e + 7, mask=e + 7 < end, other=0),
    )  # fmt: skip


@triton.jit
def add_rows(rows, order, starts, total, COLUMNS: tl.constexpr, W: tl.constexpr):
    """Adds a key's rows to its row of `total`, W columns of it; grid (keys, panels of columns).

    order: int64, the rows' numbers, sorted by key; starts: where each key's begin, and where the last one's end.
    """
    key = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(starts + key), tl.load(starts + key + 1)
    if begin < end:
        c = tl.program_id(1) * W + tl.arange(0, W)
        there = c < COLUMNS
        at = total + key * COLUMNS + c
        acc = tl.load(at, mask=there, other=0.0)
        # One turn ahead: where a row lies is known when its turn comes.
        ahead = _listed(order, begin, end)
        for e in tl.range(begin, end, TURN):
            now = ahead
            ahead = _listed(order, e + TURN, end)
            for n in tl.static_range(TURN):
                row = tl.load(rows + now[n] * COLUMNS + c, mask=there & (e + n < end), other=0.0)
                acc += row.to(tl.float32)
        tl.store(at, acc, mask=there)


@triton.jit(do_not_specialize=["count"])
def write_rows(total, out, places, tiles, count: tl.int32, VIEW: tl.constexpr, COLUMNS: tl.constexpr,
               FIRST: tl.constexpr, DIM: tl.constexpr, W: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Writes DIM columns of `total` from FIRST on to the rows of a view; grid (tiles of keys, heads, panels)."""
    tile = tiles + tl.program_id(0).to(tl.int64) * PER_TILE
    b, h = tl.load(tile).to(tl.int64), tl.program_id(1).to(tl.int64)
    j = tl.load(tile + 1) + tl.arange(0, BN)
    c = tl.program_id(2) * W + tl.arange(0, W)
    there = (j < tl.load(tile + 2))[:, None] & (c < DIM)[None, :]
    first, step = rows_at(places, count, b, h, views.IDS, 1)
    key = first + j.to(tl.int64) * step
    found = tl.load(total + key[:, None] * COLUMNS + FIRST + c[None, :], mask=there, other=0.0)
    at, stride = rows_at(places, count, b, h, VIEW, 1)
    at = out + at + j.to(tl.int64)[:, None] * stride + c[None, :]
    tl.store(at, found.to(out.dtype.element_ty), mask=there)
