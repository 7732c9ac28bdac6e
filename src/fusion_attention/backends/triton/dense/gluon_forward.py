"""The forward kernel for sm_90 in Gluon, for rows of 128 elements and no mask but a band; select_gluon.py selects it.

One warp loads tiles of keys (TMA); two warpgroups multiply (wgmma) and compute the softmax of 64 rows each.

While a warpgroup computes the weights of a tile, the tensor cores sum the values of the previous tile. A buffer has two
barriers: `full` counts the bytes of a copy, `empty` the warpgroups that have read it. Use i of a ring of STAGES buffers
waits for phase i // STAGES & 1.
"""

# mypy: disable-error-code="no-untyped-def"
# Annotations are for Triton, which evaluates them: tl.constexpr marks compile-time values.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fusion_attention.backends.triton.common import layout_index
from fusion_attention.backends.triton.common.kernels import PER_TILE, band_at, lengths_at, rows_at
from fusion_attention.backends.triton.dense.forward import finish, weigh

described = tma.make_tensor_descriptor  # Triton 3.5 has none, so the import fails here
copy_rows = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # its name until 3.7
WARPGROUPS = gl.constexpr(2)
ROWS = gl.constexpr(64)  # rows of a warpgroup, the size of a wgmma instruction
LOADER_REGISTERS = gl.constexpr(24)


@gluon.jit
def key_of(i, walk, BN: gl.constexpr):
    """Returns the first key of iteration i over tiles of keys: masked at the left, then the right edge, then full ones.

    walk: (first key, tiles at the left edge, first key of full tiles, first key at the right edge, masked tiles, all
    tiles).
    """
    begin, left, full, again, masked_tiles, _ = walk
    right = gl.where(i < masked_tiles, again + (i - left) * BN, full + (i - masked_tiles) * BN)
    return gl.where(i < left, begin + i * BN, right)


@gluon.jit
def ring(rows, STAGES: gl.constexpr):
    """Allocates a ring of STAGES shared-memory buffers for tiles of rows; returns (buffers, their "full" barriers,
    their "empty" barriers). rows: a tensor descriptor."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=WARPGROUPS)
    return (
        gl.allocate_shared_memory(rows.dtype, [STAGES, rows.block_shape[0], rows.block_shape[1]], rows.layout),
        full,
        empty,
    )


@gluon.jit
def fill(rows, ring, i, j0, STAGES: gl.constexpr):
    """Copies the rows from j0 on of the tensor descriptor `rows` into buffer i % STAGES of a ring, after the readers
    have signalled that it is empty; i: number of the copy."""
    buffers, full, empty = ring
    s = i % STAGES
    mbarrier.wait(empty.index(s), (i // STAGES & 1) ^ 1)
    mbarrier.expect(full.index(s), rows.block_type.nbytes)
    copy_rows(rows, [j0, 0], full.index(s), buffers.index(s))


@gluon.jit
def load(keys, values, key_ring, value_ring, walk, BN: gl.constexpr, STAGES: gl.constexpr):
    """Copies all tiles of keys and values (tensor descriptors) into their rings of shared-memory buffers, in the
    loading warp; walk: first keys and numbers of the masked and the full tiles, as key_of() reads them."""
    for i in range(walk[5]):
        j0 = key_of(i, walk, BN)
        fill(keys, key_ring, i, j0, STAGES)
        fill(values, value_ring, i, j0, STAGES)


@gluon.jit
def taken(ring, i, STAGES: gl.constexpr):
    """Waits until copy number i into a ring of shared-memory buffers is complete, and returns its buffer."""
    buffers, full, _ = ring
    mbarrier.wait(full.index(i % STAGES), i // STAGES & 1)
    return buffers.index(i % STAGES)


@gluon.jit
def give_back(ring, i, STAGES: gl.constexpr):
    """Signals that this warpgroup has read buffer i % STAGES of a ring, which may then be overwritten; i: number of the
    copy."""
    mbarrier.arrive(ring[2].index(i % STAGES), count=1)


@gluon.jit
def masked(s, i, walk, first, end, BN: gl.constexpr, SCORES: gl.constexpr):
    """Returns the scores s [rows, BN] of iteration i over the tiles of keys in `walk`, with -inf for keys outside
    [first, end) of their row; tiles without such keys are not tested. SCORES: the register layout of s."""
    if i < walk[4]:
        j = key_of(i, walk, BN) + gl.arange(0, BN, gl.SliceLayout(0, SCORES))
        s = gl.where((j[None, :] >= first[:, None]) & (j[None, :] < end[:, None]), s, -float("inf"))
    return s


@gluon.jit
def stored(m, l, sink, h, unit, keep_prob, first, end, kv_len, SINK: gl.constexpr, MEAN: gl.constexpr):
    """Returns (max and sum to store, factor from sums of weight * value to the output) from running max m and sum l.

    Maxima are converted to natural-logarithm units, and maxima and sums include the sink of head h. A row without
    visible keys has max -inf and sum 0, or kv_len if its result is the mean of V. first, end: visible keys.
    """
    top, l, fade = finish(m, l, sink, h, unit, SINK)
    empty = top == -float("inf")
    l = gl.where(empty, 0.0, l)
    rescale = gl.where(empty, 0.0, fade / (gl.where(empty, 1.0, l) * keep_prob))
    if MEAN:  # a row whose scores are all -inf gets NaN, which recompute_out() replaces by the mean of V
        mean = empty & (end > gl.maximum(first, 0))
        l = gl.where(mean, kv_len.to(gl.float32), l)
        rescale = gl.where(mean, float("nan"), rescale)
    return top, l, rescale


@gluon.jit
def attend(query, queries, key_ring, value_ring, out, max_, sum_, sink, where, rows, band, walk, numbers,
           SINK: gl.constexpr, MEAN: gl.constexpr, ALIGN: gl.constexpr, DIM: gl.constexpr, BN: gl.constexpr,
           STAGES: gl.constexpr):  # fmt: skip
    """Writes out, max and sum of ROWS query rows from rows[0] on, below rows[1], in one warpgroup. query: their tile in
    shared memory; key_ring, value_ring: rings of buffers that the loading warp fills; walk: the tiles of keys."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = query.dtype
    row0, row1 = rows
    _, kv_len, lo, hi, prefix = band
    exponent, unit, keep_prob = numbers
    turns = walk[5]
    row = row0 + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    first = row + lo
    end = gl.minimum(gl.maximum(row + hi, prefix), kv_len)
    m = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, SCORES))
    l = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.zeros([ROWS, DIM], gl.float32, SUMS)
    none = gl.zeros([ROWS, BN], gl.float32, SCORES)
    mbarrier.wait(queries, 0)
    if turns > 0:
        s = warpgroup_mma(query, taken(key_ring, 0, STAGES).permute((1, 0)), none, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, [s])
        give_back(key_ring, 0, STAGES)
        p, fade, m, l = weigh(masked(s, 0, walk, first, end, BN, SCORES), m, l, exponent)
        for i in range(1, turns):
            s = warpgroup_mma(query, taken(key_ring, i, STAGES).permute((1, 0)), none, use_acc=False, is_async=True)
            weights = gl.convert_layout(p.to(dtype), WEIGHTS)
            acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, SUMS))[:, None]
            acc = warpgroup_mma(weights, taken(value_ring, i - 1, STAGES), acc, is_async=True)
            s = warpgroup_mma_wait(1, [s])
            give_back(key_ring, i, STAGES)
            p, fade, m, l = weigh(masked(s, i, walk, first, end, BN, SCORES), m, l, exponent)
            # The product reads weights from registers, which are in use until it completes.
            acc, weights = warpgroup_mma_wait(0, [acc, weights])
            give_back(value_ring, i - 1, STAGES)
        acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, SUMS))[:, None]
        weights = gl.convert_layout(p.to(dtype), WEIGHTS)
        acc = warpgroup_mma(weights, taken(value_ring, turns - 1, STAGES), acc, is_async=True)
        acc, weights = warpgroup_mma_wait(0, [acc, weights])
    strides, count, b, h = where
    top, l, rescale = stored(m, l, sink, h, unit, keep_prob, first, end, kv_len, SINK, MEAN)
    acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, SUMS))[:, None]
    at_out, stride_out = rows_at(strides, count, b, h, layout_index.OUT, ALIGN)
    i = row0 + gl.arange(0, ROWS, gl.SliceLayout(1, STORED))
    d = gl.arange(0, DIM, gl.SliceLayout(0, STORED))
    at = out + at_out + i.to(gl.int64)[:, None] * stride_out + d[None, :]
    gl.store(at, gl.convert_layout(acc.to(dtype), STORED), mask=(i < row1)[:, None])
    at_max, stride_max = rows_at(strides, count, b, h, layout_index.MAX, 1)
    at_sum, stride_sum = rows_at(strides, count, b, h, layout_index.SUM, 1)
    row64 = row.to(gl.int64)
    gl.store(max_ + at_max + row64 * stride_max, top, mask=row < row1)
    gl.store(sum_ + at_sum + row64 * stride_sum, l, mask=row < row1)


@gluon.jit(do_not_specialize=["count"])
def gluon_forward(q, k, v, out, max_, sum_, sink, strides, lengths, tiles, count: gl.int32, exponent: gl.float32,
                  unit: gl.float32, keep_prob: gl.float32, GROUP: gl.constexpr, SINK: gl.constexpr, MEAN: gl.constexpr,
                  DIM: gl.constexpr, ALIGN: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
                  REGISTERS: gl.constexpr):  # fmt: skip
    """Writes out, max and sum of the softmax for a tile of WARPGROUPS * ROWS query rows of one head; grid (tiles,
    heads_q). One warp loads keys and values, the warpgroups multiply."""
    dtype: gl.constexpr = q.dtype.element_ty
    HIGH: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DIM], dtype)
    KEY_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, DIM], dtype)
    tile = tiles + gl.program_id(0).to(gl.int64) * PER_TILE
    b, h = gl.load(tile).to(gl.int64), gl.program_id(1).to(gl.int64)
    row0, row1, begin, left = gl.load(tile + 1), gl.load(tile + 2), gl.load(tile + 3), gl.load(tile + 4)
    full, again, right = gl.load(tile + 5), gl.load(tile + 6), gl.load(tile + 7)
    walk = (begin, left, full, again, left + right, left + right + (again - full) // BN)
    band = band_at(lengths_at(lengths, count, b))
    at_q, stride_q = rows_at(strides, count, b, h, layout_index.Q, ALIGN)
    at_k, stride_k = rows_at(strides, count, b, h // GROUP, layout_index.K, ALIGN)
    at_v, stride_v = rows_at(strides, count, b, h // GROUP, layout_index.V, ALIGN)
    rows = described(q + at_q, [band[0], DIM], [stride_q, 1], [ROWS, DIM], HIGH)
    keys = described(k + at_k, [band[1], DIM], [stride_k, 1], [BN, DIM], KEY_TILE)
    values = described(v + at_v, [band[1], DIM], [stride_v, 1], [BN, DIM], KEY_TILE)
    query = gl.allocate_shared_memory(dtype, [WARPGROUPS, ROWS, DIM], HIGH)
    queries = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(queries, count=1)
    key_ring, value_ring = ring(keys, STAGES), ring(values, STAGES)
    fence_async_shared()
    mbarrier.expect(queries, WARPGROUPS * rows.block_type.nbytes)
    copy_rows(rows, [row0, 0], queries, query.index(0))
    copy_rows(rows, [row0 + ROWS, 0], queries, query.index(1))
    where, numbers = (strides, count, b, h), (exponent, unit, keep_prob)
    gl.warp_specialize(
        [
            (attend, (query.index(0), queries, key_ring, value_ring, out, max_, sum_, sink, where, (row0, row1), band,
                      walk, numbers, SINK, MEAN, ALIGN, DIM, BN, STAGES)),
            (attend, (query.index(1), queries, key_ring, value_ring, out, max_, sum_, sink, where, (row0 + ROWS, row1),
                      band, walk, numbers, SINK, MEAN, ALIGN, DIM, BN, STAGES)),
            (load, (keys, values, key_ring, value_ring, walk, BN, STAGES)),
        ],
        [4, 1],
        [REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip
