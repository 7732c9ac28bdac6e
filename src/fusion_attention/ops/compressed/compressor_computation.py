"""The computation of CANN's compressor and its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fusion_attention.ops.auxiliary_definitions.compressor import lengths_of
from fusion_attention.ops.shared.softmax_pooling import Windows, pooled, rows_of_windows

Tensor = torch.Tensor
Lengths = Sequence[int] | None
Pool = Callable[[Tensor, Tensor, "Tensor | None", Windows], Tensor]


@dataclass(frozen=True)
class Sequences:
    """The division of a compressor's rows, [B, S, H] or packed [T, H], into sequences and windows.

    Args:
        ratio: rows of a window.
        coff: 2 if windows overlap, else 1.
        size: windows of each padded sequence in results; None: rows are packed.
        count: windows of all packed sequences in results.
        spans: (first row in x, rows, position of the first row) of every sequence.
    """

    ratio: int
    coff: int
    size: int | None
    count: int
    spans: tuple[tuple[int, int, int], ...]

    @staticmethod
    def of(x: Tensor, ratio: int, coff: int, ends: Lengths, used: Lengths, start: Lengths) -> Sequences:
        """Returns the sequences of rows x of a checked call, from cu_seqlens (`ends`), seqused and start_pos."""
        given = (None if n is None else [int(i) for i in n] for n in (ends, used, start))
        spans = tuple(zip(*lengths_of(x, *given), strict=True))
        packed = ends is not None
        count = min(len(x), len(x) // ratio + len(spans)) if packed else 0
        return Sequences(ratio, coff, None if packed else -(-x.shape[1] // ratio), count, spans)

    def closed(self, tokens: int, start: int) -> int:
        """Returns the number of windows that a sequence completes with `tokens` rows from position `start` on."""
        return (start + tokens) // self.ratio - start // self.ratio

    def shape(self, *of: int) -> tuple[int, ...]:
        """Returns the shape of a result with an entry of shape `of` per window, [B, windows, *of] or [windows, *of]."""
        return (self.count, *of) if self.size is None else (len(self.spans), self.size, *of)

    def at(self, result: Tensor) -> list[Tensor]:
        """Returns a list of views of a result, one per sequence, of the windows that the sequence completes."""
        counts = [self.closed(tokens, start) for _, tokens, start in self.spans]
        if self.size is None:
            return list(result[: sum(counts)].split(counts)) if counts else []
        return [rows[:n] for rows, n in zip(result, counts, strict=True)]


@dataclass(frozen=True)
class Saved:
    """The softmax weights and keys of all windows' rows, [windows, coff * ratio, D] in float32, which the gradient
    reads. With coff 2, rows of the previous window and of the window alternate."""

    softmax_score: Tensor
    kv: Tensor


def compressed(
    x: Tensor, wkv: Tensor, wgate: Tensor, state_cache: Tensor, ape: Tensor, table: Tensor | None, cache_mode: int,
    of: Sequences, pool: Pool = pooled, saved: Saved | None = None,
) -> Tensor:  # fmt: skip
    """Returns the compressed keys [B, windows, D] or [all windows, D] of the sequences `of`: per window of rows the
    average of x @ wkv.T by softmax weights from x @ wgate.T + ape.

    Stores rows that later calls need in state_cache, in blocks that `table` has (cache_mode 1: a list per
    sequence, 2: one, a ring), and rows of windows in `saved`, cleared memory for the backward. pool: averages windows.
    """
    dim, ratio, coff = wkv.shape[0] // of.coff, of.ratio, of.coff
    dtype = torch.promote_types(x.dtype, torch.float32)
    rows = x.flatten(0, -2).to(dtype)
    projected = rows @ wkv.to(dtype).T, rows @ wgate.to(dtype).T
    stored_rows = [] if saved is None else [of.at(saved.softmax_score), of.at(saved.kv)]
    results = []
    for b, (first, tokens, start) in enumerate(of.spans):
        at = torch.arange(start, start + tokens, device=x.device)
        kv, z = (t[first : first + tokens] for t in projected)
        z = z + ape.to(dtype)[at % ratio]
        state = _State(state_cache, None if table is None else table[b], cache_mode)
        last = (start + tokens) // ratio * ratio
        # A ring has slots only for rows that a later window reads.
        stored = start if cache_mode == 1 else max(start, last - (coff - 1) * ratio)
        begin = max(start // ratio - (coff - 1), 0) * ratio
        before = state.read(begin, start).to(dtype)
        state.write(stored, torch.cat((kv, z), -1)[stored - start :])
        kv, z = (
            torch.cat(pair)[None, : max(last - begin, 0), None]
            for pair in zip(before.chunk(2, -1), (kv, z), strict=True)
        )
        closed = of.closed(tokens, start)
        windows = Windows(ratio, coff == 2, before=begin < start // ratio * ratio)
        results.append(pool(kv, z, None, windows)[0, :closed, 0].to(x.dtype))
        if stored_rows and closed:
            values, gates = (t[0, :, :, 0] for t in rows_of_windows(kv, z, None, windows))
            stored_rows[0][b].copy_(_alternating(gates.softmax(1), coff))
            stored_rows[1][b].copy_(_alternating(values, coff))
    if of.size is None:
        every = torch.cat(results) if results else x.new_zeros(0, dim)
        return torch.cat((every, x.new_zeros(of.count - len(every), dim)))
    filled = [torch.cat((one, x.new_zeros(of.size - len(one), dim))) for one in results]
    return torch.stack(filled) if filled else x.new_zeros(of.shape(dim))


def gradients(
    x: Tensor, wkv: Tensor, wgate: Tensor, dcmp_kv: Tensor, saved: Saved, of: Sequences
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns (dx, dwkv, dwgate, dape) from dcmp_kv, the gradient of the compressed keys, and the windows' rows in
    `saved`; ape: the position bias. Parameters are as in compressed(). Rows from state_cache have no gradient."""
    dim, dtype = wkv.shape[0] // of.coff, torch.promote_types(x.dtype, torch.float32)
    rows = x.flatten(0, -2)
    dkv, dz = (torch.zeros(len(rows), wkv.shape[0], dtype=dtype, device=x.device) for _ in range(2))
    dape = torch.zeros(of.ratio, wkv.shape[0], dtype=dtype, device=x.device)
    windows = zip(of.at(dcmp_kv), of.at(saved.softmax_score), of.at(saved.kv), strict=True)
    for (first, tokens, start), (upstream, weight, value) in zip(of.spans, windows, strict=True):
        if not len(upstream):
            continue
        weighted = upstream[:, None].to(dtype) * weight
        slope = weight * (upstream[:, None].to(dtype) * value - (weighted * value).sum(1, keepdim=True))
        for target, of_rows in ((dkv, weighted), (dz, slope)):
            per_token = _by_token(of_rows.unflatten(1, (of.ratio, of.coff)), dim)
            begin = (start // of.ratio - of.coff + 1) * of.ratio  # the position of its first row
            span = slice(max(start - begin, 0), start + tokens - begin)
            given = per_token[span]
            target[first : first + len(given)] = given
            if target is dz:
                at = torch.arange(start, start + len(given), device=x.device)
                dape.index_add_(0, at % of.ratio, given)
    narrow = [t.to(x.dtype).to(dtype) for t in (dkv, dz)]
    inputs = rows.to(dtype)
    dx = narrow[0] @ wkv.to(dtype) + narrow[1] @ wgate.to(dtype)
    dwkv, dwgate = ((t.T @ inputs).to(x.dtype) for t in narrow)
    return dx.view(x.shape).to(x.dtype), dwkv, dwgate, dape


def _alternating(rows: Tensor, coff: int) -> Tensor:
    """Returns the rows of windows [windows, coff * ratio, D] in another order: with coff 2, not all rows of the
    previous window and then all of the window, but one row of each in turn."""
    return rows.unflatten(1, (coff, -1)).transpose(1, 2).flatten(1, 2)


def _by_token(rows: Tensor, dim: int) -> Tensor:
    """Returns gradients of tokens [tokens, coff * dim] from those of windows' rows, [windows, ratio, coff, dim]; with
    coff 2, the first `ratio` tokens are those before the first window."""
    count, ratio, coff, _ = rows.shape
    result = rows.new_zeros(count + coff - 1, ratio, coff * dim)
    for half in range(coff):
        result[half : half + count, :, half * dim : (half + 1) * dim] = rows[:, :, half]
    return result.flatten(0, 1)


class _State:
    """The rows of one sequence that the compressor's cache stores between calls, without gradients."""

    def __init__(self, cache: Tensor, block: Tensor | None, mode: int) -> None:
        self.cache, self.block, self.mode = cache.detach(), block, mode

    def _slots(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        at = torch.arange(first, last, device=self.cache.device)
        size = self.cache.shape[1]
        assert self.block is not None
        page = self.block.long()[at // size] if self.mode == 1 else self.block.long().expand(len(at))
        return page, at % size

    def read(self, first: int, last: int) -> Tensor:
        """Returns the stored rows of positions [first, last), [last - first, elements], in the cache's dtype."""
        if first >= last:
            return self.cache.new_zeros(0, self.cache.shape[2])
        return self.cache[self._slots(first, last)]

    def write(self, first: int, rows: Tensor) -> None:
        """Stores rows at positions from `first` on; in cache_mode 1, rows of page 0 are not stored."""
        if self.block is None or not len(rows):
            return
        page, row = self._slots(first, first + len(rows))
        stored = page > 0 if self.mode == 1 else torch.ones_like(page, dtype=torch.bool)
        self.cache[page[stored], row[stored]] = rows.detach()[stored].to(self.cache.dtype)
