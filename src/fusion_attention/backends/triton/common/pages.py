"""Kernel functions that read rows of a KV cache, paged or contiguous, and dequantize stored integers.

Page numbers are clamped, so that kernels read only the pool, whatever the page table contains.

Common parameters: `cache` is (first element, stride of a token, stride of a page), PAGE the tokens of a page (0:
contiguous rows), `page` page numbers, KIND NO_SCALE, PER_CHANNEL or PER_TOKEN; `table` is the page table, `step` the
stride of its rows, `last` the pool's last page. A tile has BN keys from j0 on; WITHIN: true if all are in one page.
"""

# mypy: disable-error-code="no-untyped-def"
# Annotations are for Triton, which evaluates them: tl.constexpr marks compile-time values.

import triton
import triton.language as tl

from fusion_attention.backends.triton.common.kernels import PER_VIEW, load_three, rows_at

NO_SCALE, PER_CHANNEL, PER_TOKEN = (tl.constexpr(n) for n in range(3))


@triton.jit
def cache_at(strides, count, b, hk, VIEW: tl.constexpr, ALIGN: tl.constexpr):
    """Returns (offset of head hk's first element, stride of a token, stride of a page), in elements, of sequence b of
    the KV cache number VIEW, from the table `strides` of `count` sequences."""
    first, token = rows_at(strides, count, b, hk, VIEW, ALIGN)
    page = tl.load(strides + (VIEW * PER_VIEW + 3) * count + b)
    if ALIGN > 1:
        page = tl.multiple_of(page, ALIGN)
    return first, token, page


@triton.jit
def offset_of(cache, page, j, PAGE: tl.constexpr):
    """Returns offsets, in elements, of keys j in a KV cache. cache: (first element, stride of a token, stride of a
    page); page: the number of each key's page; PAGE: tokens of a page, 0: no pages."""
    first, token, stride_page = cache
    if PAGE:
        return first + page * stride_page + (j % PAGE).to(tl.int64) * token
    else:
        return first + j.to(tl.int64) * token


@triton.jit
def dequantised(values, scale, offset):
    """Returns (values + offset) * scale in float32; scale and offset broadcast."""
    return (values.to(tl.float32) + offset) * scale


@triton.jit
def dequant_factors(scale, offset, at_scale, at_offset, inside, in_loop, FIRST: tl.constexpr, WIDTH: tl.constexpr,
                    DIM: tl.constexpr, KIND: tl.constexpr):  # fmt: skip
    """Returns (scale, offset) for columns FIRST to FIRST + WIDTH of stored integers: [1, WIDTH] per channel, [rows, 1]
    per token, or (1, 0), by KIND.

    scale, offset: addresses of the numbers, offset may be None; at_scale, at_offset: their offsets there; inside:
    mask of the tokens. in_loop: a condition that is always true, which the compiler cannot know before the loop, so
    that it does not move the loads of channels' numbers out of the loop, where they would spill registers.
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
def dequantised_three(parts, scale, offset, at_scale, at_offset, inside, in_loop, KIND: tl.constexpr,
                      W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, DIM: tl.constexpr):  # fmt: skip
    """Returns (values + offset) * scale in float32 for rows of integers in column blocks (parts). scale, offset:
    addresses of numbers per channel or token (KIND), at at_scale and at_offset; inside: mask of the tokens."""
    s, o = dequant_factors(scale, offset, at_scale, at_offset, inside, in_loop, 0, W0, DIM, KIND)
    x0 = dequantised(parts[0], s, o)
    x1, x2 = x0, x0
    if W1:
        s, o = dequant_factors(scale, offset, at_scale, at_offset, inside, in_loop, W0, W1, DIM, KIND)
        x1 = dequantised(parts[1], s, o)
    if W2:
        s, o = dequant_factors(scale, offset, at_scale, at_offset, inside, in_loop, W0 + W1, W2, DIM, KIND)
        x2 = dequantised(parts[2], s, o)
    return x0, x1, x2


@triton.jit
def scale_offset(strides, count, b, hk, page, j, VIEW: tl.constexpr, KIND: tl.constexpr, PAGE: tl.constexpr):
    """Returns the offsets, in elements, of the scales of keys j of head hk in tensor number VIEW of the table
    `strides`; one offset for all if scales are per channel (KIND). page: page numbers."""
    cache = cache_at(strides, count, b, hk, VIEW, 1)
    if KIND == PER_TOKEN:
        return offset_of(cache, page, j, PAGE)
    else:
        return cache[0]


@triton.jit
def clamped(page, last):
    """Returns a page number as int64, clamped to the pool's pages 0 to `last`."""
    return tl.minimum(tl.maximum(page, 0), last).to(tl.int64)


@triton.jit
def pages_of(table, b, step, last, j, end, PAGE: tl.constexpr):
    """Returns int64 page numbers of keys j of sequence b, clamped to `last`, from the page table `table`, whose rows
    are `step` numbers apart; 0 for keys from `end` on; j without pages (PAGE 0)."""
    if PAGE:
        return clamped(tl.load(table + b * step + j // PAGE, mask=j < end, other=0), last)
    else:
        return j.to(tl.int64)


# ------------------------------------------------------------------ tiles of keys, and integers as they are stored


@triton.jit
def page_ahead(table, row, last, j0, end, PAGE: tl.constexpr, WITHIN: tl.constexpr, BN: tl.constexpr):
    """Returns the page number of the BN keys from j0 on, if they are WITHIN one page, else one number per key; 0 for
    keys from `end` on. table: the page table; row: offset of the sequence's row in it; last: largest page number."""
    if PAGE and WITHIN:
        return clamped(tl.load(table + row + j0 // PAGE, mask=j0 < end, other=0), last)
    else:
        return pages_of(table, 1, row, last, j0 + tl.arange(0, BN), end, PAGE)


@triton.jit
def tile_at(cache, page, j0, PAGE: tl.constexpr, WITHIN: tl.constexpr, BN: tl.constexpr):
    """Returns (offset of the first element, offsets [BN] of rows from it) of the BN keys from j0 on in a KV cache; the
    latter int32 if WITHIN one page. cache: (first element, stride of a token, of a page); page: page numbers."""
    first, token, stride_page = cache
    n = tl.arange(0, BN)
    if not WITHIN:
        return first, offset_of((0, token, stride_page), page, j0 + n, PAGE)
    elif PAGE:
        return first + page * stride_page + j0 % PAGE * token, n * token.to(tl.int32)
    else:
        return first + j0 * token, n * token.to(tl.int32)


@triton.jit
def load_rows(base, cache, page, j0, inside, PAGE: tl.constexpr, WITHIN: tl.constexpr, BN: tl.constexpr,
              W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, DIM: tl.constexpr):  # fmt: skip
    """Loads the BN keys from j0 on of a KV cache as three column blocks; zeros where `inside` is false. base: its
    address; cache: (first element, stride of a token, of a page); page: page numbers."""
    first, offset = tile_at(cache, page, j0, PAGE, WITHIN, BN)
    return load_three(base + first, offset, inside, True, W0, W1, W2, DIM)


@triton.jit
def tokens_at(base, cache, page, j0, inside, PAGE: tl.constexpr, WITHIN: tl.constexpr, BN: tl.constexpr):
    """Loads a number, such as a scale, for each of the BN keys from j0 on of a KV cache, [BN]; 0 where `inside` is
    false. cache: (first element, stride of a token, of a page); page: page numbers."""
    first, offset = tile_at(cache, page, j0, PAGE, WITHIN, BN)
    return tl.load(base + first + offset, mask=inside, other=0.0)


@triton.jit
def stored(values, like):
    """Converts int8 values to the dtype of the tensor `like`, exactly; values of other dtypes are unchanged."""
    if values.dtype != tl.int8:
        return values
    elif like.dtype == tl.float16:
        # Sets the bits of the float16 number 1024 + 128 + integer; a conversion instruction has a quarter of the rate.
        bits = (values.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint16) | 0x6400
        return bits.to(tl.float16, bitcast=True) - 1152.0
    else:
        return values.to(tl.float32).to(like.dtype)


@triton.jit
def stored_three(parts, like, W1: tl.constexpr, W2: tl.constexpr):
    """Converts rows of int8 in column blocks to the dtype of the tensor `like`, exactly; other dtypes are unchanged."""
    x0 = stored(parts[0], like)
    x1, x2 = x0, x0
    if W1:
        x1 = stored(parts[1], like)
    if W2:
        x2 = stored(parts[2], like)
    return x0, x1, x2


@triton.jit
def rows_summed(parts, W1: tl.constexpr, W2: tl.constexpr):
    """Returns float32 [rows], the sum of each row's elements; parts: the rows in three column blocks."""
    x = tl.sum(parts[0].to(tl.float32), 1)
    if W1:
        x += tl.sum(parts[1].to(tl.float32), 1)
    if W2:
        x += tl.sum(parts[2].to(tl.float32), 1)
    return x


@triton.jit
def safe_unit(largest):
    """Returns `largest`, an absolute value, as a divisor: 1 if it is 0 or not finite."""
    return tl.where((largest > 0.0) & (largest < float("inf")), largest, 1.0)


@triton.jit
def of_channels(base, cache, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """Loads a number (such as a scale) per channel from FIRST on, [1, WIDTH]; channel 0 is at base + cache[0]."""
    d = FIRST + tl.arange(0, WIDTH)
    return tl.load(base + cache[0] + d, mask=d < DIM, other=0.0)[None, :]


@triton.jit
def channel_product(values, unit, offset, cache, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, like):
    """Returns (x = values / unit in the dtype of `like`, sum over channels of x times the channels' offsets [rows]).
    values: [rows, WIDTH], columns from FIRST on. unit: [rows]. offset: address, the first at cache[0], or None."""
    x = (values / unit[:, None]).to(like.dtype)
    added = tl.zeros([values.shape[0]], tl.float32)
    if offset is not None:
        added = tl.sum(x.to(tl.float32) * of_channels(offset, cache, FIRST, WIDTH, DIM), 1)
    return x, added


@triton.jit
def channels_folded(query, scale, offset, scales, offsets, W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr,
                    DIM: tl.constexpr):  # fmt: skip
    """Returns (x, a, u) with x . stored * u + a = query . ((stored + offset) * scale), for integers of scaled channels.

    u is the row's largest |element * scale|, so that small scales do not underflow. scale, offset: the channels'
    numbers; scales, offsets: (first element, _, _) of each.
    """
    x0 = query[0].to(tl.float32) * of_channels(scale, scales, 0, W0, DIM)
    largest = tl.max(tl.abs(x0), 1)
    x1, x2 = x0, x0
    if W1:
        x1 = query[1].to(tl.float32) * of_channels(scale, scales, W0, W1, DIM)
        largest = tl.maximum(largest, tl.max(tl.abs(x1), 1))
    if W2:
        x2 = query[2].to(tl.float32) * of_channels(scale, scales, W0 + W1, W2, DIM)
        largest = tl.maximum(largest, tl.max(tl.abs(x2), 1))
    unit = safe_unit(largest)
    y0, added = channel_product(x0, unit, offset, offsets, 0, W0, DIM, query[0])
    y1, y2 = y0, y0
    if W1:
        y1, more = channel_product(x1, unit, offset, offsets, W0, W1, DIM, query[0])
        added += more
    if W2:
        y2, more = channel_product(x2, unit, offset, offsets, W0 + W1, W2, DIM, query[0])
        added += more
    return (y0, y1, y2), added * unit, unit


@triton.jit
def scaled_weights(p, fade, scales, unit, like):
    """Returns (p * scales / unit, factor on the sums so far, new unit), for softmax weights p [rows, keys] and the
    keys' scales [keys].

    In float16 the products would underflow for small scales, so the unit is the largest scale so far / 2^14; in other
    dtypes it is not used. Scales of keys without weight are ignored, because those of masked keys are arbitrary. fade:
    factor on the sums so far without scales. unit: that of earlier keys. like: a tensor of the products' dtype.
    """
    if like.dtype == tl.float16:
        scales = tl.where(tl.max(p, 0) > 0.0, scales, 0.0)
        now = tl.maximum(unit, tl.max(tl.abs(scales), 0) * (2.0**-14))
        safe = safe_unit(now)
        return p * (scales / safe)[None, :], fade * (unit / safe), now
    else:
        return p * scales[None, :], fade, unit


@triton.jit
def lifted_part(acc, lifted, unit, scale, offset, scales, offsets, FIRST: tl.constexpr, WIDTH: tl.constexpr,
                DIM: tl.constexpr, KIND: tl.constexpr):  # fmt: skip
    """Returns columns FIRST to FIRST + WIDTH of sums of weight * (integer + offset) * scale; acc: these columns of sums
    of weight * integer. lifted: [rows], the sum of weights (KIND PER_CHANNEL) or of weight * offset (PER_TOKEN); unit:
    divisor of the weights; scale, offset: the channels' numbers."""
    if KIND == NO_SCALE:
        return acc
    elif KIND == PER_CHANNEL:
        if offset is not None:
            acc += lifted[:, None] * of_channels(offset, offsets, FIRST, WIDTH, DIM)
        return acc * of_channels(scale, scales, FIRST, WIDTH, DIM)
    else:
        return (acc + lifted[:, None]) * safe_unit(unit)


@triton.jit
def lifted_three(acc, lifted, unit, scale, offset, scales, offsets, KIND: tl.constexpr, W0: tl.constexpr,
                 W1: tl.constexpr, W2: tl.constexpr, DIM: tl.constexpr):  # fmt: skip
    """Returns sums of weight * (integer + offset) * scale from `acc`, sums of weight * integer; both in column blocks.

    lifted: [rows], the sum of weights (KIND PER_CHANNEL) or of weights times the tokens' offsets (PER_TOKEN). unit:
    result of scaled_weights(). scale, offset: the channels' numbers; scales, offsets: (first element, _, _) of each.
    """
    acc0, acc1, acc2 = acc
    acc0 = lifted_part(acc0, lifted, unit, scale, offset, scales, offsets, 0, W0, DIM, KIND)
    if W1:
        acc1 = lifted_part(acc1, lifted, unit, scale, offset, scales, offsets, W0, W1, DIM, KIND)
    if W2:
        acc2 = lifted_part(acc2, lifted, unit, scale, offset, scales, offsets, W0 + W1, W2, DIM, KIND)
    return acc0, acc1, acc2


@triton.jit
def pairs_at(cache):
    """Returns the three results of cache_at() for an int8 cache (first element, stride of a token, stride of a page) in
    units of two bytes."""
    first, token, page = cache
    return tl.multiple_of(first // 2, 8), tl.multiple_of(token // 2, 8), tl.multiple_of(page // 2, 8)


@triton.jit
def unpaired(pairs, like):
    """Returns (values of even columns, of odd ones) in the dtype of `like`, from int16 elements with two int8 each."""
    return stored(pairs.to(tl.int8), like), stored((pairs >> 8).to(tl.int8), like)
