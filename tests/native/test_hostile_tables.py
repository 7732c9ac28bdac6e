"""Invalid page tables and lengths on every paged path give an error that names the argument, or the bits of a valid
table. `make test-asan` runs these tests, so a read outside the tensors fails.
"""

from collections.abc import Callable

import pytest
import torch
from support.bits import same_bits

import fusion_attention as fa

PAGES, SIZE, HEADS, DIM = 9, 16, 2, 32
KEYS = [70, 40]  # five and three of the five pages in a row of the table
LARGEST = torch.iinfo(torch.int32).max
Lengths = list[int]
Call = Callable[[torch.Tensor, Lengths], torch.Tensor]


def drawn(*shape: int, seed: int = 5) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def pages(heads: int = HEADS, dim: int = DIM) -> torch.Tensor:
    return drawn(PAGES, SIZE, heads, dim, seed=6)


def decode(table: torch.Tensor, lengths: Lengths) -> torch.Tensor:
    return fa.decode_attention(drawn(2, 1, 4, DIM), (pages(), pages()), kv_len=lengths, block_table=table)


def many_rows(table: torch.Tensor, lengths: Lengths) -> torch.Tensor:
    return fa.decode_attention(
        drawn(2, 1, 64, 64), pages(1, 64), kv_len=lengths, block_table=table, dim_v=DIM, backend="cpu"
    )


def prompts(table: torch.Tensor, lengths: Lengths) -> torch.Tensor:
    return fa.decode_attention(drawn(2, 40, 4, DIM), (pages(), pages()), kv_len=lengths, block_table=table)


def integers(table: torch.Tensor, lengths: Lengths) -> torch.Tensor:
    stored, scale = (pages() * 50).to(torch.int8), torch.full((PAGES, SIZE, HEADS), 0.02)
    return fa.decode_attention(
        drawn(2, 1, 4, DIM), (stored, stored), kv_len=lengths, block_table=table, k_scale=scale, v_scale=scale
    )


def selected(table: torch.Tensor, lengths: Lengths) -> torch.Tensor:
    lists = torch.arange(8, dtype=torch.int32).repeat(2, 3, HEADS, 1)
    return fa.sparse_attention(drawn(2, 3, 4, DIM), pages(), pages(), lists, kv_len=lengths, page_table=table)


def compressed(table: torch.Tensor, lengths: Lengths) -> torch.Tensor:
    few = torch.arange(2, dtype=torch.int32).view(2, 1)
    return fa.compressed_attention(
        drawn(2, 3, 4, DIM), pages(), pages(), ratio=8, kv_len=lengths, page_table=table,
        compressed_len=[n // 8 for n in KEYS], compressed_page_table=few,
    )  # fmt: skip


def compressed_source(table: torch.Tensor, lengths: Lengths) -> torch.Tensor:
    """Passes `table` for the compressed keys, one for two tokens."""
    tokens = torch.arange(2 * PAGES, dtype=torch.int32).view(2, PAGES)
    q, k = drawn(2, 3, 4, DIM), drawn(2 * PAGES, SIZE, HEADS, DIM)
    return fa.compressed_attention(
        q, k, pages(), ratio=2, kv_len=[2 * n for n in KEYS], page_table=tokens,
        compressed_len=lengths, compressed_page_table=table,
    )  # fmt: skip


def indexer(table: torch.Tensor, lengths: Lengths) -> torch.Tensor:
    return fa.lightning_indexer(drawn(2, 3, 4, DIM), pages(1), drawn(2, 3, 4), 16, kv_len=lengths, page_table=table)[0]


PATHS = [decode, many_rows, prompts, integers, selected, compressed, compressed_source, indexer]
paths = pytest.mark.parametrize("call", PATHS, ids=lambda call: call.__name__)
NAMES = "block_table|page_table"


def table() -> torch.Tensor:
    return torch.tensor([[3, 0, 8, 1, 5], [7, 2, 6, 4, 4]], dtype=torch.int32)


@pytest.mark.sampled(1)
@paths
@pytest.mark.parametrize("entry", [-1, PAGES, LARGEST, -LARGEST - 1])
@pytest.mark.parametrize("place", [(0, 0), (0, 4), (1, 2)], ids=str)
def test_error_names_position_of_page_table_entry_out_of_range(call: Call, entry: int, place: tuple[int, int]) -> None:
    bad = table()
    bad[place] = entry
    where = rf"{entry} at \[{place[0]}, {place[1]}\]"
    with pytest.raises(fa.ContractError, match=rf"(?s)({NAMES}).*{where}"):
        call(bad, KEYS)


@pytest.mark.sampled(1)
@paths
@pytest.mark.parametrize("entry", [(1 << 32) + 3, -(1 << 32) + 3, 1 << 62, -(1 << 63)])
def test_page_table_entry_with_valid_low_32_bits_but_wrong_high_bits_is_refused(call: Call, entry: int) -> None:
    bad = table().long()
    bad[0, 1] = entry
    with pytest.raises(fa.ContractError, match=NAMES):
        call(bad, KEYS)


@paths
def test_page_table_entries_behind_last_used_page_are_not_read(call: Call) -> None:
    bad = table()
    bad[1, 3:] = torch.tensor([-1, LARGEST])
    same_bits(call(bad, KEYS), call(table(), KEYS))


@pytest.mark.sampled(1)
@paths
@pytest.mark.parametrize(
    "change",
    [
        lambda t: t[:, :4],
        lambda t: t[:, :0],
        lambda t: t[:1],
        lambda t: t[0],
        lambda t: torch.cat([t, t]),
        lambda t: t[None],
        lambda t: t.float(),
    ],
    ids=["few columns", "no column", "few rows", "one axis", "many rows", "three axes", "floats"],
)
def test_page_table_of_wrong_shape_or_dtype_raises(call: Call, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(fa.ContractError, match=f"{NAMES}|len"):
        call(change(table()), KEYS)


@pytest.mark.sampled(1)
@paths
@pytest.mark.parametrize(
    "lengths",
    [[-1, 40], [70, -(1 << 63)], [LARGEST, 40], [70, (1 << 63) - 1], [81, 40], [70], [70, 40, 3], [1 << 40, 1 << 40]],
    ids=str,
)
def test_kv_lengths_that_do_not_fit_the_page_table_raise(call: Call, lengths: Lengths) -> None:
    with pytest.raises(fa.ContractError, match=f"len|{NAMES}"):
        call(table(), lengths)


@paths
def test_page_table_strides_do_not_change_results(call: Call) -> None:
    want = call(table(), KEYS)
    assert not want.isnan().any()
    assert want.any()
    same_bits(call(table().t().contiguous().t(), KEYS), want)
    padded = torch.full((4, 11), LARGEST, dtype=torch.int32)
    padded[::2, 1::2] = table()
    same_bits(call(padded[::2, 1::2], KEYS), want)


@paths
def test_page_table_changed_in_place_between_calls_is_checked_again(call: Call) -> None:
    changing, want = table(), call(table(), KEYS)
    for _ in range(3):  # later calls are prepared
        call(changing, KEYS)
    changing[0, 2] = PAGES
    with pytest.raises(fa.ContractError, match=rf"{PAGES} at \[0, 2\]"):
        call(changing, KEYS)
    changing[0, 2] = table()[0, 2]
    same_bits(call(changing, KEYS), want)
