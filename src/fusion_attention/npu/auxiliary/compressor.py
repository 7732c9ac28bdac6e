"""cann_ops_transformer's compressor, in torch's operators."""

from collections.abc import Sequence
from typing import Annotated

import torch

from fusion_attention.npu.auxiliary.call import as_given, computed
from fusion_attention.ops.auxiliary.compressor import COMPRESSOR, lengths_of
from fusion_attention.torch_ops.pooling import pooled

Tensor = torch.Tensor
Lengths = Sequence[int] | None


@computed(COMPRESSOR)
def compressor(
    x: Tensor, wkv: Tensor, wgate: Tensor, state_cache: Annotated[Tensor, "a!"], ape: Tensor, cmp_ratio: int,
    state_block_table: Tensor | None, cu_seqlens: Lengths, seqused: Lengths, start_pos: Lengths, coff: int,
    cache_mode: int,
) -> Tensor:  # fmt: skip
    with as_given(x):
        return _compressed(
            x,
            wkv,
            wgate,
            state_cache,
            ape,
            cmp_ratio,
            state_block_table,
            (cu_seqlens, seqused, start_pos),
            coff,
            cache_mode,
        )


def _compressed(
    x: Tensor, wkv: Tensor, wgate: Tensor, state_cache: Tensor, ape: Tensor, ratio: int, table: Tensor | None,
    given: tuple[Lengths, Lengths, Lengths], coff: int, cache_mode: int,
) -> Tensor:  # fmt: skip
    lengths = lengths_of(x, *(None if n is None else [int(i) for i in n] for n in given))
    dim, packed = wkv.shape[0] // coff, given[0] is not None
    dtype = torch.promote_types(x.dtype, torch.float32)
    rows = x.flatten(0, -2).to(dtype)
    projected = rows @ wkv.to(dtype).T, rows @ wgate.to(dtype).T
    results = []
    for b, (first, tokens, start) in enumerate(zip(*lengths, strict=True)):
        at = torch.arange(start, start + tokens, device=x.device)
        kv, z = (t[first : first + tokens] for t in projected)
        z = z + ape.to(dtype)[at % ratio]
        block = None if table is None else table[b]
        state = _State(state_cache, block, cache_mode)
        last = (start + tokens) // ratio * ratio
        # In a ring only rows that a later window reads have a place.
        stored = start if cache_mode == 1 else max(start, last - (coff - 1) * ratio)
        begin = max(start // ratio - (coff - 1), 0) * ratio
        before = state.read(begin, start).to(dtype)
        state.write(stored, torch.cat((kv, z), -1)[stored - start :])
        kv, z = (torch.cat(pair)[: max(last - begin, 0)] for pair in zip(before.chunk(2, -1), (kv, z), strict=True))
        closed = last // ratio - start // ratio
        windows = pooled(kv[None], z[None], ratio, coff == 2, first=begin == start // ratio * ratio)
        results.append(windows[0, : max(closed, 0)].to(x.dtype))
    if packed:
        every = torch.cat(results) if results else x.new_zeros(0, dim)
        size = min(len(x), len(x) // ratio + len(results))
        return torch.cat((every, x.new_zeros(max(size - len(every), 0), dim)))
    size = -(-x.shape[1] // ratio)
    filled = [torch.cat((one, x.new_zeros(max(size - len(one), 0), dim))) for one in results]
    return torch.stack(filled) if filled else x.new_zeros(0, size, dim)


class _State:
    """The rows of one sequence in state_cache, without gradients."""

    def __init__(self, cache: Tensor, block: Tensor | None, mode: int) -> None:
        self.cache, self.block, self.mode = cache.detach(), block, mode

    def _slots(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        at = torch.arange(first, last, device=self.cache.device)
        size = self.cache.shape[1]
        assert self.block is not None
        page = self.block.long()[at // size] if self.mode == 1 else self.block.long().expand(len(at))
        return page, at % size

    def read(self, first: int, last: int) -> Tensor:
        """Rows of positions [first, last), as they were written."""
        if first >= last:
            return self.cache.new_zeros(0, self.cache.shape[2])
        return self.cache[self._slots(first, last)]

    def write(self, first: int, rows: Tensor) -> None:
        """Writes rows from a position on; in mode 1 block 0 takes none."""
        if self.block is None or not len(rows):
            return
        page, row = self._slots(first, first + len(rows))
        stored = page > 0 if self.mode == 1 else torch.ones_like(page, dtype=torch.bool)
        self.cache[page[stored], row[stored]] = rows.detach()[stored].to(self.cache.dtype)
