"""Results of rows without visible keys as the mean of V: out = (1/n) sum_j M_j v_j over all n keys, softmax sum = n.

M_j is 1 / keep_prob if dropout keeps key j, else 0. The gradient is dv_j += M_j dout / n. The C++ core, which runs
before, writes 0 and a maximum of -inf for these rows.
"""

import math
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter

import numpy as np
import torch

from fusion_attention.backends.cpu import dequantize
from fusion_attention.ir.dropout import keep_from_bits, keep_from_philox
from fusion_attention.ir.problem import Extents, Grads, Operands, Problem

# Rows and keys of a block; memory is linear in the sequence length.
_ROWS = _KEYS = 256
# Bits to which values are rounded, so that sums over a block of 2^8 keys are exact in float64's 53 bits.
_DIGITS = 53 - 1 - 8


@torch.no_grad()
def add_means(problem: Problem, extents: Extents, operands: Operands) -> None:
    """Overwrites out by the mean of V, and the softmax's sum by kv_len, for rows without visible keys (of those, if
    problem.empty_rows is "mean_in_band", only rows whose band has a key)."""
    heads = problem.heads_q
    for b, tile, rows in _tiles(extents):
        empty = operands.stats.max.sequence(b, heads, rows.stop)[:, rows] == -math.inf
        if problem.empty_rows == "mean_in_band":
            first, end = extents.row_interval(b, np.arange(rows.start, rows.stop))
            empty &= torch.from_numpy(end > first)[:, None]
        if not empty.any():
            continue
        kv_len = int(extents.kv_len[b])
        mean = torch.zeros(heads, tile.stop - tile.start, problem.dim_v, dtype=torch.float32)
        for at in range(0, kv_len, _KEYS):
            keys = slice(at, min(at + _KEYS, kv_len))
            v = dequantize.dequantized(dequantize.values(problem, operands, b, keys), operands.dequant_v, b, keys)
            mean += _kept_sum(
                _unmasked(problem, extents, operands, b, tile, keys), v.repeat_interleave(problem.group, 0)
            )
        mean = mean[:, rows.start - tile.start : rows.stop - tile.start]
        if problem.has_weight_scale and operands.weight_scale is not None:
            mean *= operands.weight_scale.round().clamp(-128, 127)
        mean = dequantize.rounded(problem, operands, (mean.double() / (kv_len * problem.keep_prob)).float())
        for view, value in ((operands.out, mean), (operands.stats.sum, float(kv_len))):
            target = view.sequence(b, heads, rows.stop)[:, rows]
            target.copy_(torch.where(empty, value, target.float()))


@torch.no_grad()
def add_mean_gradients(problem: Problem, extents: Extents, operands: Operands, grads: Grads) -> None:
    """Adds to grads.dv dout / number of keys for rows without visible keys whose result is the mean of V."""
    p, heads = problem, problem.heads_q
    for b, tiles in groupby(_tiles(extents), key=itemgetter(0)):
        kv_len, full = int(extents.kv_len[b]), int(extents.chosen_by[1][b])
        first = 0 if extents.chunk_origin is None else int(extents.chunk_origin.first_key[b])
        given = None
        for _, _, rows in tiles:
            stats = operands.stats.max, operands.stats.sum
            peak, total = (view.sequence(b, heads, rows.stop)[:, rows] for view in stats)
            mean = (peak == -math.inf) & (total > 0)
            if not mean.any():
                continue
            dout = grads.dout.sequence(b, heads, rows.stop)[:, rows].float()
            weight = torch.where(mean, dout / (total.double() * p.keep_prob), 0.0).float()
            if given is None:
                given = torch.zeros(p.heads_kv, kv_len, p.dim_v, dtype=torch.float32)
            for tile, keys in _tiles_of(first, kv_len, full, _KEYS):
                by_head = _kept_sum(_unmasked(p, extents, operands, b, rows, tile).mT, weight)
                by_head = by_head[:, keys.start - tile.start : keys.stop - tile.start]
                given[:, keys] += by_head.unflatten(0, (p.heads_kv, p.group)).sum(1)
        if given is not None:
            assert grads.dv is not None  # a problem with means never shares v with k
            target = grads.dv.sequence(b, p.heads_kv, kv_len)
            target.copy_(target.float() + given)


def _tiles_of(first: int, length: int, full: int, size: int) -> Iterator[tuple[slice, slice]]:
    """Yields (tile, overlap), ranges of positions: fixed tiles of a complete sequence that overlap a chunk of it, and
    the overlap. Products are over complete tiles, because the bits of torch's products depend on sizes.

    Positions count from the chunk's first token. first, length: the chunk; full: the sequence's length; size: a tile's.
    """
    for start in range(first // size * size, first + length, size):
        tile = slice(start - first, min(start + size, full) - first)
        yield tile, slice(max(tile.start, 0), min(tile.stop, length))


def _tiles(extents: Extents) -> Iterator[tuple[int, slice, slice]]:
    """Yields (sequence, tile, overlap) for all sequences with keys: a fixed range of query rows of the complete
    sequence, and the computed chunk's rows in it, both counted from the chunk's first row."""
    full = extents.chosen_by[0]
    for b in np.flatnonzero(extents.kv_len).tolist():
        first = 0 if extents.chunk_origin is None else int(extents.chunk_origin.first_row[b])
        for tile, rows in _tiles_of(first, int(extents.q_len[b]), int(full[b]), _ROWS):
            yield b, tile, rows


def _unmasked(problem: Problem, extents: Extents, operands: Operands, b: int, rows: slice, keys: slice) -> torch.Tensor:
    """Returns bool [heads_q, rows, keys], true for the pairs (row, key) of sequence b that dropout keeps.

    rows, keys: ranges of positions, counted from the chunk's first row and first key.
    """
    p = problem
    if p.dropout == "none":
        return torch.ones(1, 1, 1, dtype=torch.bool).expand(p.heads_q, rows.stop - rows.start, keys.stop - keys.start)
    if p.dropout == "bits":
        assert operands.drop_bits is not None
        return keep_from_bits(operands.drop_bits, b, p.heads_q, rows, keys)
    stream, *first = extents.drawn(b, p.heads_q)
    rows, keys = (slice(a.start + at.start, a.start + at.stop) for a, at in zip(first, (rows, keys), strict=True))
    return keep_from_philox(operands.seed, operands.offset, p.keep_prob, stream, p.heads_q, rows, keys)


def _kept_sum(unmasked: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Returns sum_n unmasked * values, [heads, m, d], from bool unmasked [heads, m, n] and values [heads, n, d]; masked
    NaN adds nothing.

    Values are rounded to multiples of a unit, whose sums are exact in float64, so bits do not depend on the order of
    addition or the number of threads.
    """
    finite = values.isfinite()
    clean = values.where(finite, 0.0).double()
    peak = clean.abs().amax((1, 2), keepdim=True)
    unit = torch.ldexp(torch.ones_like(peak), peak.frexp().exponent - _DIGITS)
    total = ((unmasked.double() @ (clean / unit).round_()) * unit).float()
    for n in (~finite).any(-1).any(0).nonzero().flatten().tolist():
        wild = values[:, n].where(~finite[:, n], 0.0)[:, None]
        total += wild.where(unmasked[:, :, n, None], 0.0)
    return total
