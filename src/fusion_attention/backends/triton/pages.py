"""Rows of a cache: where they lie, in pages or at addresses, and what stored integers mean.

A page number is clamped: whatever the table says, only the pool is read.
"""

# mypy: disable-error-code="no-untyped-def"
# Annotations are Triton's here: they are evaluated, and say what is known while compiling.

import triton
import triton.language as tl

from fusion_attention.backends.triton.common import PER_VIEW, rows_at

NO_SCALE, PER_CHANNEL, PER_TOKEN = (tl.constexpr(n) for n in range(3))


@triton.jit
def cache_at(places, count, b, hk, VIEW: tl.constexpr, ALIGN: tl.constexpr):
    """(first element of head hk, stride of a token, stride of a page) of a cache."""
    first, token = rows_at(places, count, b, hk, VIEW, ALIGN)
    page = tl.load(places + (VIEW * PER_VIEW + 3) * count + b)
    if ALIGN > 1:
        page = tl.multiple_of(page, ALIGN)
    return first, token, page


@triton.jit
def offset_of(cache, page, j, PAGE: tl.constexpr):
    """Where the rows of keys j lie in a cache; page: their page numbers."""
    first, token, stride_page = cache
    if PAGE:
        return first + page * stride_page + (j % PAGE).to(tl.int64) * token
    else:
        return first + j.to(tl.int64) * token


@triton.jit
def dequantised(part, scale, offset, KIND: tl.constexpr, like):
    """(part + offset) * scale in the dtype of `like`; scale and offset broadcast."""
    if KIND == NO_SCALE:
        return part.to(like.dtype)
    else:
        return ((part.to(tl.float32) + offset) * scale).to(like.dtype)


@triton.jit
def dequant_factors(scale, offset, at_scale, at_offset, inside, in_loop, FIRST: tl.constexpr, WIDTH: tl.constexpr,
                    DIM: tl.constexpr, KIND: tl.constexpr):  # fmt: skip
    """(scale, offset) of one part of rows: per channel [1, WIDTH] or per token [rows, 1].

    in_loop: what is true in every turn of a loop, and not known before it: channels' factors are then loaded in it.
    Loaded before the loop, those of 512 channels spill.
    """
    wanted, added = 1.0, 0.0
    if KIND == PER_CHANNEL:
        d = FIRST + tl.arange(0, WIDTH)
        wanted = tl.load(scale + at_scale + d, mask=(d < DIM) & in_loop, other=0.0)[None, :]
        if offset is not None:
            added = tl.load(offset + at_offset + d, mask=(d < DIM) & in_loop, other=0.0)[None, :]
    if KIND == PER_TOKEN:
        wanted = tl.load(scale + at_scale, mask=inside, other=0.0)[:, None]
        if offset is not None:
            added = tl.load(offset + at_offset, mask=inside, other=0.0)[:, None]
    return wanted, added


@triton.jit
def dequantised_three(parts, scale, offset, at_scale, at_offset, inside, in_loop, like, KIND: tl.constexpr,
                      W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, DIM: tl.constexpr):  # fmt: skip
    """dequantised() for rows in parts."""
    s, o = dequant_factors(scale, offset, at_scale, at_offset, inside, in_loop, 0, W0, DIM, KIND)
    x0 = dequantised(parts[0], s, o, KIND, like)
    x1, x2 = x0, x0
    if W1:
        s, o = dequant_factors(scale, offset, at_scale, at_offset, inside, in_loop, W0, W1, DIM, KIND)
        x1 = dequantised(parts[1], s, o, KIND, like)
    if W2:
        s, o = dequant_factors(scale, offset, at_scale, at_offset, inside, in_loop, W0 + W1, W2, DIM, KIND)
        x2 = dequantised(parts[2], s, o, KIND, like)
    return x0, x1, x2


@triton.jit
def scale_offset(places, count, b, hk, page, j, VIEW: tl.constexpr, KIND: tl.constexpr, PAGE: tl.constexpr):
    """Where the scales or offsets of keys j lie."""
    cache = cache_at(places, count, b, hk, VIEW, 1)
    if KIND == PER_TOKEN:
        return offset_of(cache, page, j, PAGE)
    else:
        return cache[0]


@triton.jit
def pages_of(table, b, step, last, j, end, PAGE: tl.constexpr):
    """int64 page numbers of keys j, within the pool whatever the table holds; step: from one row of it to the next."""
    if PAGE:
        page = tl.load(table + b * step + j // PAGE, mask=j < end, other=0)
        return tl.minimum(tl.maximum(page, 0), last).to(tl.int64)
    else:
        return j.to(tl.int64)
