"""The dense attention backward: preparation of each row, then dq by tiles of rows, then dk and dv by tiles of keys.

    S = scale * q . k + bias,  P = 2^(S * log2(e) - lse),  lse = max * log2(e) + log2(sum),  M = keep / keep_prob
    dP = (dout . v) * M,  D = dout . out - dlse,  dS = P * (dP - D)     with a softcap times 1 - tanh^2
    dq = scale * dS k,  dk = scale * dS^T q,  dv = (P * M)^T dout

S is computed twice, once per kernel, but every gradient of a row or a key is summed by one program in one order, so
every run gives the same bits. Each kernel has one loop, which skips the mask in tiles where all keys are visible: a
second copy of such a large loop would spill registers. Hidden keys have a score of -inf, so their weight is 0.

dS is rounded to the rows' dtype before it is multiplied, and may exceed float16's range if the loss is scaled. If some
|dout| of a key head's rows exceeds 256, dS is therefore divided by 256, and dq and dk are multiplied at the end.

Parameters that kernels of this package share: `strides`, `count`, VIEW, ALIGN and the widths of column blocks are those
of common/kernels.py; `lengths` and `tiles` are tables of dense/launch.py; `flat` is the memory of lse and D, two planes
of `plane` numbers; GROUP query heads share a key head; BM and BN are rows and keys of a tile.
"""

# mypy: disable-error-code="no-untyped-def"
# Annotations are for Triton, which evaluates them: tl.constexpr marks compile-time values.

import triton
import triton.language as tl

from fusion_attention.backends.triton.common import kernels as common
from fusion_attention.backends.triton.common import layout_index
from fusion_attention.backends.triton.common.bias import MATRIX, TABLE, add_dbias, biased, capped
from fusion_attention.backends.triton.common.kernels import LOG2E, PER_TILE

LARGE, SHRINK = tl.constexpr(256.0), tl.constexpr(1 / 256)
HUGE, HUGE_BITS = tl.constexpr(2.0**29), tl.constexpr(2.0**-21)


@triton.jit
def largest(parts, W1: tl.constexpr, W2: tl.constexpr):
    """Returns the largest absolute value, in float32, of the elements of rows; parts: the rows in column blocks."""
    magnitude = tl.max(tl.max(tl.abs(parts[0]).to(tl.float32), 1), 0)
    if W1:
        magnitude = tl.maximum(magnitude, tl.max(tl.max(tl.abs(parts[1]).to(tl.float32), 1), 0))
    if W2:
        magnitude = tl.maximum(magnitude, tl.max(tl.max(tl.abs(parts[2]).to(tl.float32), 1), 0))
    return magnitude


@triton.jit(do_not_specialize=["count", "plane"])
def prepare(out, dout, dlse, max_, sum_, flat, large, sink, partials, strides, tiles, count: tl.int32, plane: tl.int64,
            GROUP: tl.constexpr, SINK: tl.constexpr, MEAN: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
            V2: tl.constexpr, DIM_V: tl.constexpr, ALIGN: tl.constexpr, BM: tl.constexpr):  # fmt: skip
    """Writes log2(sum exp(S)) (lse) and D = dout . out - dlse of each query row to `flat`, all lse first, D `plane`
    elements later; grid (tiles, heads_q).

    A row without visible keys has lse inf, so that its weights are 0, and D 0, or 1 / n if its result is the mean of n
    values. `partials` receives the tile's contribution to dsink. `large`, initially zeros, receives a 1 for each
    (sequence, key head) with |dout| above 256.
    """
    tile = tiles + tl.program_id(0).to(tl.int64) * PER_TILE
    b, h = tl.load(tile).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = tl.load(tile + 1) + tl.arange(0, BM)
    valid = row < tl.load(tile + 2)
    row64 = row.to(tl.int64)
    at_out, stride_out = common.rows_at(strides, count, b, h, layout_index.OUT, ALIGN)
    at_dout, stride_dout = common.rows_at(strides, count, b, h, layout_index.DOUT, ALIGN)
    o = common.load_three(out + at_out, row64 * stride_out, valid, True, V0, V1, V2, DIM_V)
    do = common.load_three(dout + at_dout, row64 * stride_dout, valid, True, V0, V1, V2, DIM_V)
    delta = common.products(o, do, V1, V2)
    if dlse is not None:
        at_dlse, stride_dlse = common.rows_at(strides, count, b, h, layout_index.DLSE, 1)
        delta -= tl.load(dlse + at_dlse + row64 * stride_dlse, mask=valid, other=0.0)
    if large is not None:  # all programs write the same value
        tl.store(large + b * (tl.num_programs(1) // GROUP) + h // GROUP, 1, mask=largest(do, V1, V2) > LARGE)
    at_max, stride_max = common.rows_at(strides, count, b, h, layout_index.MAX, 1)
    at_sum, stride_sum = common.rows_at(strides, count, b, h, layout_index.SUM, 1)
    peak = tl.load(max_ + at_max + row64 * stride_max, mask=valid, other=0.0)
    total = tl.load(sum_ + at_sum + row64 * stride_sum, mask=valid, other=1.0)
    empty = peak == -float("inf")
    lse = peak * LOG2E + tl.log2(total)
    # inf marks empty rows; infinite statistics become NaN.
    lse = tl.where(tl.abs(lse) == float("inf"), float("nan"), lse)
    # If the last bit of a score exceeds the exponent range of weights, lse is rounded up so that no score is above it.
    lse = tl.where(tl.abs(lse) > HUGE, lse + tl.abs(lse) * HUGE_BITS, lse)
    lse, delta = tl.where(empty, float("inf"), lse), tl.where(empty, 0.0, delta)
    if SINK:
        given = delta * tl.exp2(tl.load(sink + h) * LOG2E - lse)
        tl.store(
            partials + tl.program_id(0).to(tl.int64) * tl.num_programs(1) + h,
            -tl.sum(tl.where(empty | ~valid, 0.0, given), 0),
        )
    if MEAN:
        mean = empty & (total > 0)
        delta = tl.where(mean, 1.0 / total, delta)
    at, stride = common.rows_at(strides, count, b, h, layout_index.FLAT, 1)
    at = flat + at + row64 * stride
    tl.store(at, lse, mask=valid)
    tl.store(at + plane, delta, mask=valid)


@triton.jit
def row_notes(flat, plane, at, stride, row, valid):
    """Loads (lse = log2(sum(exp(scores))), D = dout . out - dlse) of the rows `row` of a head from memory that
    prepare() wrote: flat + at + row * stride, D `plane` elements later. Invalid rows get (inf, 0)."""
    at = flat + at + row.to(tl.int64) * stride
    return tl.load(at, mask=valid, other=float("inf")), tl.load(at + plane, mask=valid, other=0.0)


@triton.jit
def shrinking(large, b, hk, heads):
    """Returns the factor on dS of key head hk in sequence b before it is rounded to 16 bits: 1/256 if `large`
    [sequences, heads] flags |dout| > 256, else 1; large None: 1."""
    if large is None:
        return 1.0
    else:
        return tl.where(tl.load(large + b * heads + hk) > 0, SHRINK, 1.0)


@triton.jit
def load_notes(notes, h, row0, valid, PLANE: tl.constexpr, BM: tl.constexpr, TMA: tl.constexpr):
    """Loads lse (PLANE 0) or D = dout . out - dlse (PLANE 1) of the BM rows of head h from row0 on, which prepare()
    wrote; notes: (tensor descriptor or address, heads, stride of a head). valid: bool [BM], false for missing rows."""
    base, heads, head = notes
    if TMA:
        return base.load([PLANE * heads + h, row0]).reshape(BM)
    else:
        at = base + (PLANE * heads + h).to(tl.int64) * head + (row0 + tl.arange(0, BM))
        return tl.load(at, mask=valid, other=0.0 if PLANE else float("inf"))


@triton.jit
def add_means(dv, do_rows, notes, turns, head, rows, j0, inside, bits, where, drop, GROUP: tl.constexpr,
              DROPOUT: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, DIM_V: tl.constexpr,
              BM: tl.constexpr, BN: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """Returns dv of the BN keys from j0 on plus the sum of dout / n, where dropout keeps the key, over the query rows
    without visible keys whose result is the mean of n values."""
    dv0, dv1, dv2 = dv
    strides, count, b, heads = where
    for turn in tl.range(0, turns * GROUP):
        h, row0 = (head + turn // turns).to(tl.int32), turn % turns * BM
        row = row0 + tl.arange(0, BM)
        valid = row < rows
        lse, mean_weight = load_notes(notes, h, row0, valid, 0, BM, TMA), load_notes(notes, h, row0, valid, 1, BM, TMA)
        mean = (lse == float("inf")) & (mean_weight > 0) & valid
        weight = tl.where(mean[None, :] & inside[:, None], mean_weight[None, :], 0.0)
        if DROPOUT:
            keep = common.kept_keys(bits, (strides, count, b, h.to(tl.int64), heads), row, j0, valid[:, None] &
                                    inside[None, :], drop, DROPOUT, BN)  # fmt: skip
            weight = tl.where(tl.trans(keep), weight, 0.0)
        do = common.load_group(do_rows, h, row0, valid, BM, V0, V1, V2, DIM_V, TMA)
        dv0, dv1, dv2 = common.add_three((dv0, dv1, dv2), weight, do, V1, V2)
    return dv0, dv1, dv2


@triton.jit
def sees(row, key, band):
    """Returns true where row + lo <= key < max(row + hi, prefix); band: (q_len, kv_len, lo, hi, prefix)."""
    rows, keys, lo, hi, prefix = band
    end = tl.minimum(tl.maximum(row + hi, prefix), keys)
    return (key >= row + lo) & (key < tl.where(row < rows, end, 0))


@triton.jit
def weights(x, lse, masked, row, key, band, numbers, extras, where, lengths, RAW: tl.constexpr, BIAS: tl.constexpr,
            BLOCKED: tl.constexpr, CAP: tl.constexpr):  # fmt: skip
    """Returns (P, S), probabilities and scores of a tile of products x = q . k, [rows, keys] or [keys, rows]; S is -inf
    for keys that are not visible. P = exp2(S * exponent - lse). masked: False if all keys of the tile are visible.
    extras: (bias, slopes, mask matrix); where: (table of strides, sequences, sequence, head, heads)."""
    scale, factor, exponent = numbers
    bias, slopes, blocked = extras
    strides, count, b, h, heads = where
    s, visible = x, None
    if BLOCKED or BIAS == MATRIX or BIAS == TABLE:  # noqa: SIM109 (Triton has no `in`)
        visible = sees(row, key, band)
    if not RAW:
        s = biased(s, scale, factor, bias, slopes, strides, count, b, h, heads, row, key, visible, lengths, BIAS, CAP)
    if BLOCKED:
        visible = visible & common.not_blocked(blocked, strides, count, b, h, row, key, visible)
    if visible is not None:
        s = tl.where(visible, s, -float("inf"))
    elif masked:
        s = tl.where(sees(row, key, band), s, -float("inf"))
    return tl.exp2(s * exponent - lse), s


@triton.jit(do_not_specialize=["count", "heads_q", "seed", "offset", "threshold", "plane"])
def backward_query(q, k, v, dout, q_rope, k_rope, dq, dq_rope, bias, dbias, slopes, blocked, bits, flat, large,
                   strides, lengths, tiles, count: tl.int32, heads_q: tl.int32, plane: tl.int64, scale: tl.float32,
                   factor: tl.float32, exponent: tl.float32, keep_prob: tl.float32, seed: tl.int64, offset: tl.int32,
                   threshold: tl.int32, GROUP: tl.constexpr, RAW: tl.constexpr, BIAS: tl.constexpr,
                   BLOCKED: tl.constexpr, DROPOUT: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
                   DIM: tl.constexpr, R: tl.constexpr, DIM_ROPE: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
                   V2: tl.constexpr, DIM_V: tl.constexpr, ALIGN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                   CAP: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """Writes dq = scale * sum_j dS_j k_j of one tile of rows of one head, and adds dS = P * (dP - D) to dbias.

    Grid (tiles, heads_q). flat: lse and D; large: flags of |dout| > 256. tiles: int32 [tiles, 8], sequence, rows, keys.
    """
    tile = tiles + tl.program_id(0).to(tl.int64) * PER_TILE
    b, h = tl.load(tile).to(tl.int64), tl.program_id(1).to(tl.int64)
    row0, row1 = tl.load(tile + 1), tl.load(tile + 2)
    begin, turns = tl.load(tile + 3), tl.load(tile + 4)
    row = row0 + tl.arange(0, BM)
    valid, row64 = row < row1, row.to(tl.int64)
    extents = common.lengths_at(lengths, count, b)
    band = common.band_at(extents)
    _, end_key, lo, hi, prefix = band
    at_q, stride_q = common.rows_at(strides, count, b, h, layout_index.Q, ALIGN)
    at_k, stride_k = common.rows_at(strides, count, b, h // GROUP, layout_index.K, ALIGN)
    at_v, stride_v = common.rows_at(strides, count, b, h // GROUP, layout_index.V, ALIGN)
    at_do, stride_do = common.rows_at(strides, count, b, h, layout_index.DOUT, ALIGN)
    query = common.load_three(q, at_q + row64 * stride_q, valid, True, D0, D1, D2, DIM)
    do = common.load_three(dout, at_do + row64 * stride_do, valid, True, V0, V1, V2, DIM_V)
    k_rows = common.rows_of(k + at_k, stride_k, end_key, BN, D0, D1, D2, DIM, TMA)
    v_rows = common.rows_of(v + at_v, stride_v, end_key, BN, V0, V1, V2, DIM_V, TMA)
    rope, r_rows, dr = query[0], k_rows, tl.zeros([BM, R if R else 16], tl.float32)
    if R:
        at_qr, stride_qr = common.rows_at(strides, count, b, h, layout_index.Q_ROPE, ALIGN)
        at_kr, stride_r = common.rows_at(strides, count, b, h // GROUP, layout_index.K_ROPE, ALIGN)
        rope = common.load_part(q_rope, at_qr + row64 * stride_qr, valid, 0, R, DIM_ROPE, True)
        r_rows = common.rows_of(k_rope + at_kr, stride_r, end_key, BN, R, 0, 0, DIM_ROPE, TMA)
    at_flat, stride_flat = common.rows_at(strides, count, b, h, layout_index.FLAT, 1)
    lse, delta = row_notes(flat, plane, at_flat, stride_flat, row, valid)
    shrink = shrinking(large, b, h // GROUP, heads_q // GROUP)
    delta *= shrink
    # Keys from full_begin to full_end are visible to all rows.
    full_begin, full_end = row1 - 1 + lo, tl.minimum(tl.maximum(row0 + hi, prefix), end_key)
    numbers, extras, where = (scale, factor, exponent), (bias, slopes, blocked), (strides, count, b, h, heads_q)
    dq0, dq1, dq2 = common.zeros_three(BM, D0, D1, D2)
    for t in tl.range(0, turns):
        j0 = begin + t * BN
        j = j0 + tl.arange(0, BN)
        inside = j < end_key
        keys = common.load_rows(k_rows, j0, inside, True, BN, D0, D1, D2, DIM, TMA)
        x = common.inner_three(query, keys, D1, D2)
        tail = keys[0]
        if R:
            tail = common.load_rows(r_rows, j0, inside, True, BN, R, 0, 0, DIM_ROPE, TMA)[0]
            x = tl.dot(rope, tl.trans(tail), x, input_precision="ieee")
        p, s = weights(x, lse[:, None], (j0 < full_begin) | (j0 + BN > full_end), row[:, None], j[None, :], band,
                       numbers, extras, where, (extents[0], extents[1], extents[5]), RAW, BIAS, BLOCKED,
                       CAP)  # fmt: skip
        dp = common.inner_three(do, common.load_rows(v_rows, j0, inside, True, BN, V0, V1, V2, DIM_V, TMA), V1, V2)
        if DROPOUT:
            there = valid[:, None] & inside[None, :]
            keep = common.kept_keys(bits, where, row, j0, there, (seed, offset, threshold), DROPOUT, BN)
            dp = tl.where(keep, dp * (1.0 / keep_prob), 0.0)
        ds = p * (dp * shrink - delta[:, None])
        if dbias is not None:  # dbias is not recomputed, so values must be finite here
            visible = (s != -float("inf")) & (lse != float("inf"))[:, None]
            ds = tl.where(visible, ds, 0.0)
            add_dbias(
                dbias,
                where,
                row[:, None],
                j[None, :],
                visible,
                ds * (factor / shrink),
                (extents[0], extents[1], extents[5]),
                BIAS,
            )
        if CAP != 0:
            ds = ds * capped(x, scale, CAP)[1]
        dq0, dq1, dq2 = common.add_three((dq0, dq1, dq2), ds, keys, D1, D2)
        if R:
            dr = tl.dot(ds.to(tail.dtype), tail, dr, input_precision="ieee")
    at_dq, stride_dq = common.rows_at(strides, count, b, h, layout_index.DQ, ALIGN)
    common.store_three(dq, at_dq + row64 * stride_dq, valid, (dq0, dq1, dq2), scale / shrink, D0, D1, D2, DIM)
    if R:
        at_dr, stride_dr = common.rows_at(strides, count, b, h, layout_index.DQ_ROPE, ALIGN)
        common.store_part(dq_rope, at_dr + row64 * stride_dr, valid, dr * (scale / shrink), 0, R, DIM_ROPE)


@triton.jit(do_not_specialize=["count", "heads_q", "seed", "offset", "threshold", "plane"])
def backward_key(q, k, v, dout, q_rope, k_rope, dk, dv, dk_rope, bias, slopes, blocked, bits, flat, large, strides,
                 lengths, tiles, count: tl.int32, heads_q: tl.int32, plane: tl.int64, scale: tl.float32,
                 factor: tl.float32, exponent: tl.float32, keep_prob: tl.float32, seed: tl.int64, offset: tl.int32,
                 threshold: tl.int32, GROUP: tl.constexpr, RAW: tl.constexpr, BIAS: tl.constexpr,
                 BLOCKED: tl.constexpr, DROPOUT: tl.constexpr, MEAN: tl.constexpr, D0: tl.constexpr,
                 D1: tl.constexpr, D2: tl.constexpr, DIM: tl.constexpr, R: tl.constexpr, DIM_ROPE: tl.constexpr,
                 V0: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, DIM_V: tl.constexpr, ALIGN: tl.constexpr,
                 BM: tl.constexpr, BN: tl.constexpr, CAP: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """Writes dk = scale * sum_i dS_i q_i and dv = sum_i P_i dout_i of one tile of keys of one key head.

    Grid (tiles, heads_kv). Scores are transposed, [keys, rows], so that weights enter the products from registers.
    flat: lse and D; large: flags of |dout| > 256. tiles: int32 [tiles, 8], sequence, keys, rows that see them.
    """
    tile = tiles + tl.program_id(0).to(tl.int64) * PER_TILE
    b, hk = tl.load(tile).to(tl.int64), tl.program_id(1).to(tl.int64)
    j0 = tl.load(tile + 1)
    j = j0 + tl.arange(0, BN)
    inside, key64 = j < tl.load(tile + 2), j.to(tl.int64)
    begin, turns = tl.load(tile + 3), tl.load(tile + 4)
    extents = common.lengths_at(lengths, count, b)
    band = common.band_at(extents)
    rows, end_key, lo, hi, prefix = band
    at_k, stride_k = common.rows_at(strides, count, b, hk, layout_index.K, ALIGN)
    at_v, stride_v = common.rows_at(strides, count, b, hk, layout_index.V, ALIGN)
    keys = common.load_three(k, at_k + key64 * stride_k, inside, True, D0, D1, D2, DIM)
    values = common.load_three(v, at_v + key64 * stride_v, inside, True, V0, V1, V2, DIM_V)
    # Addresses are loaded before the loop: loads that depend on an address inside it are not prefetched.
    at_q, head_q, stride_q = common.heads_at(strides, count, b, layout_index.Q, ALIGN)
    at_do, head_do, stride_do = common.heads_at(strides, count, b, layout_index.DOUT, ALIGN)
    at_flat, head_flat, _ = common.heads_at(strides, count, b, layout_index.FLAT, 1)
    q_rows = common.rows_of_group(q + at_q, head_q, stride_q, heads_q, rows, BM, D0, D1, D2, DIM, TMA)
    do_rows = common.rows_of_group(dout + at_do, head_do, stride_do, heads_q, rows, BM, V0, V1, V2, DIM_V, TMA)
    noted = flat + at_flat
    if TMA:
        noted = tl.make_tensor_descriptor(flat + at_flat, [2 * heads_q, rows], [head_flat, 1], [1, BM])
    notes = (noted, heads_q, head_flat)
    tail, r_rows, dr = keys[0], q_rows, tl.zeros([BN, R if R else 16], tl.float32)
    if R:
        at_kr, stride_kr = common.rows_at(strides, count, b, hk, layout_index.K_ROPE, ALIGN)
        at_qr, head_qr, stride_qr = common.heads_at(strides, count, b, layout_index.Q_ROPE, ALIGN)
        tail = common.load_part(k_rope, at_kr + key64 * stride_kr, inside, 0, R, DIM_ROPE, True)
        r_rows = common.rows_of_group(q_rope + at_qr, head_qr, stride_qr, heads_q, rows, BM, R, 0, 0, DIM_ROPE, TMA)
    dk0, dk1, dk2 = common.zeros_three(BN, D0, D1, D2)
    dv0, dv1, dv2 = common.zeros_three(BN, V0, V1, V2)
    numbers, extras = (scale, factor, exponent), (bias, slopes, blocked)
    shrink = shrinking(large, b, hk, heads_q // GROUP)
    h, row0, last = (hk * GROUP).to(tl.int32), begin, begin + turns * BM
    for _ in tl.range(0, turns * GROUP):
        row = row0 + tl.arange(0, BM)
        valid = row < rows
        query = common.load_group(q_rows, h, row0, valid, BM, D0, D1, D2, DIM, TMA)
        x = common.inner_three(keys, query, D1, D2)
        rope = query[0]
        if R:
            rope = common.load_group(r_rows, h, row0, valid, BM, R, 0, 0, DIM_ROPE, TMA)[0]
            x = tl.dot(tail, tl.trans(rope), x, input_precision="ieee")
        lse = load_notes(notes, h, row0, valid, 0, BM, TMA)
        end = tl.minimum(tl.maximum(row0 + hi, prefix), end_key)
        where = (strides, count, b, h.to(tl.int64), heads_q)
        p, _ = weights(x, lse[None, :], (row0 + BM > rows) | (row0 + BM - 1 + lo > j0) | (end < j0 + BN),
                       row[None, :], j[:, None], band, numbers, extras, where, (extents[0], extents[1], extents[5]),
                       RAW, BIAS, BLOCKED, CAP)  # fmt: skip
        weight = p
        if DROPOUT:
            there = valid[:, None] & inside[None, :]
            keep = tl.trans(common.kept_keys(bits, where, row, j0, there, (seed, offset, threshold), DROPOUT, BN))
            weight = tl.where(keep, weight, 0.0)
        do = common.load_group(do_rows, h, row0, valid, BM, V0, V1, V2, DIM_V, TMA)
        if TMA:  # dv first: the scores of 64 x 128 then need no stack
            dv0, dv1, dv2 = common.add_three((dv0, dv1, dv2), weight, do, V1, V2)
            dp = common.inner_three(values, do, V1, V2)
        else:  # dP first: 768 elements need none on sm_80
            dp = common.inner_three(values, do, V1, V2)
            dv0, dv1, dv2 = common.add_three((dv0, dv1, dv2), weight, do, V1, V2)
        if DROPOUT:
            dp = tl.where(keep, dp * (1.0 / keep_prob), 0.0)
        # Loaded late, so that it occupies no registers before.
        ds = p * (dp * shrink - (load_notes(notes, h, row0, valid, 1, BM, TMA) * shrink)[None, :])
        if CAP != 0:
            ds = ds * capped(x, scale, CAP)[1]
        dk0, dk1, dk2 = common.add_three((dk0, dk1, dk2), ds, query, D1, D2)
        if R:
            dr = tl.dot(ds.to(rope.dtype), rope, dr, input_precision="ieee")
        row0 += BM
        over = row0 >= last
        h, row0 = tl.where(over, h + 1, h), tl.where(over, begin, row0)
    if MEAN:
        acc = add_means((dv0, dv1, dv2), do_rows, notes, tl.load(tile + 5), hk * GROUP, rows, j0, inside, bits,
                        (strides, count, b, heads_q), (seed, offset, threshold), GROUP, DROPOUT, V0, V1, V2, DIM_V, BM,
                        BN, TMA)  # fmt: skip
        dv0, dv1, dv2 = acc
    at_dk, stride_dk = common.rows_at(strides, count, b, hk, layout_index.DK, ALIGN)
    at_dv, stride_dv = common.rows_at(strides, count, b, hk, layout_index.DV, ALIGN)
    common.store_three(dk, at_dk + key64 * stride_dk, inside, (dk0, dk1, dk2), scale / shrink, D0, D1, D2, DIM)
    common.store_three(dv, at_dv + key64 * stride_dv, inside, (dv0, dv1, dv2), 1.0 / keep_prob, V0, V1, V2, DIM_V)
    if R:
        at_dr, stride_dr = common.rows_at(strides, count, b, hk, layout_index.DK_ROPE, ALIGN)
        common.store_part(dk_rope, at_dr + key64 * stride_dr, inside, dr * (scale / shrink), 0, R, DIM_ROPE)
