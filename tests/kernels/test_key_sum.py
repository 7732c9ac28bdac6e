"""Sums of rows by key under Triton's interpreter: one order of additions for any list and number of chunks."""

import numpy as np
import pytest
import torch
from support.bits import same_bits

from fusion_attention.backends.triton.common import layout_table
from fusion_attention.backends.triton.selected import launch_key_sum
from fusion_attention.backends.triton.selected.launch_key_sum import KeySum, Where
from fusion_attention.ir.memory_views import RowView
from fusion_attention.ir.problem import Extents

NONE, KEYS = -1, 5
LISTS = {
    "mixed": [3, 0, NONE, 3, 4, 0, NONE, 0, 0, 3],
    "one key": [2] * 19,
    "no key": [NONE] * 6,
    "sorted": [0, 0, 1, 1, 2, 2, 3, 3],
}


def rows_of(entries: list[int], columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns rows that have a sum which depends on the order; rows without a key are NaN."""
    generator = torch.Generator().manual_seed(len(entries))
    rows = torch.randn(len(entries), columns, generator=generator) * 10.0 ** (torch.arange(len(entries)) % 5)[:, None]
    rows[torch.tensor(entries) == NONE] = torch.nan
    return rows.to(dtype)


def block_after_block(entries: list[int], rows: torch.Tensor, size: int) -> torch.Tensor:
    total = torch.zeros(KEYS, rows.shape[1])
    for first in range(0, len(entries), size):
        block_sum = torch.zeros_like(total)
        for key, row in zip(entries[first : first + size], rows.float()[first:], strict=False):
            if key != NONE:
                block_sum[key] += row
        total += block_sum
    return total


@pytest.mark.parametrize(
    ("name", "columns", "dtype"),
    [*((name, 20, torch.float32) for name in LISTS), ("mixed", 300, torch.bfloat16)],
    ids=str,
)
def test_key_sum_is_bitwise_equal_for_any_chunk_and_block_size(
    name: str, columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the block size nor the row count above which several programs sum a key changes a bit."""
    entries = LISTS[name]
    rows, ids = rows_of(entries, columns, dtype), torch.tensor(entries, dtype=torch.int32)
    for block, hot, chunks in ((1, 1, (1, 99)), (5, 2, (1, 3, 99)), (5, 1 << 20, (99,)), (1 << 20, 1, (99,))):
        monkeypatch.setattr(launch_key_sum, "BLOCK", block)
        monkeypatch.setattr(launch_key_sum, "HOT", hot)
        for tokens in chunks:
            size = 2 * launch_key_sum.whole_blocks(tokens, 2)
            total = KeySum(rows, KEYS, columns)
            for some, whose in zip(rows.split(size), ids.split(size), strict=True):
                total.add(some, whose, 2)
            want = block_after_block(entries, rows, 2 * launch_key_sum.block_of(2))
            same_bits(total.total, want, f"{name} in blocks of {block}, chunks of {size}, hot from {hot} on")


def test_key_sum_writes_only_the_key_rows_of_a_strided_view() -> None:
    """Two heads, an empty sequence, more keys than a tile, columns from the middle; other memory stays NaN."""
    lengths, heads, dim, buffer = np.array([3, 0, 20]), 2, 3, 7
    e = Extents(lengths, lengths, lengths * 0, lengths * 0, lengths * 0, lengths * 0)
    like = torch.zeros(1)
    total = KeySum(like, int(lengths.sum()) * heads, 6)
    total.total.copy_(torch.arange(total.total.numel()).view(total.total.shape))
    out = torch.full((int(lengths.sum()), heads, buffer), torch.nan, dtype=torch.bfloat16)
    view = RowView((out,), e.kv_start * heads * buffer, heads * buffer, np.full(3, buffer, np.int64), dim)
    views = {"ids": launch_key_sum.numbered(like, e.kv_len, heads), "dk": view}
    where = Where(torch.from_numpy(layout_table.strides(views, 3)), torch.from_numpy(launch_key_sum.key_tiles(e)), 3)
    total.write(out, "dk", 2, dim, heads, where)
    want = total.total.view(-1, heads, 6)[..., 2:5].to(torch.bfloat16)
    same_bits(out[..., :dim], want)
    assert out[..., dim:].isnan().all()


def test_key_sum_without_keys_or_entries_is_zero() -> None:
    like = torch.zeros(1)
    KeySum(like, 0, 4).add(like.new_zeros(2, 4), torch.full((2,), NONE, dtype=torch.int32), 1)
    total = KeySum(like, 2, 4)
    total.add(like.new_zeros(0, 4), torch.zeros(0, dtype=torch.int32), 1)
    assert not total.total.any()
    assert launch_key_sum.workspace_bytes(2, 4, 9, 1) == total.total.nbytes + 3 * 4 * 3 + 4
