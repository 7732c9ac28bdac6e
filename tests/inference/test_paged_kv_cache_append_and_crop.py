"""PagedKVCache: append, crop, windows, growth and release do not change the remaining tokens."""

import pytest
import torch

import fusion_attention as fa

STORES = ["", "int8", "int4"]


def paged(pages: int = 8, stored: str = "", dim_v: int | None = None) -> fa.PagedKVCache:
    return fa.PagedKVCache(2, 16, pages, page_size=4, stored=stored, dim_v=dim_v)


def rows(tokens: int, seed: int = 0, dim: int = 16) -> torch.Tensor:
    return torch.randn(1, tokens, 2, dim, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("stored", STORES)
@pytest.mark.parametrize("swapped", [False, True])
def test_paged_kv_cache_rows_equal_keys_and_values_read_by_decode(stored: str, swapped: bool) -> None:
    dims = (12, 16)[:: -1 if swapped else 1]  # what is told of values holds for keys, the other way round
    cache = fa.PagedKVCache(2, dims[0], 8, dim_v=dims[1], page_size=4, stored=stored)
    for tokens in (9, 4):
        sequence = cache.allocate()
        cache.append([sequence], rows(tokens, dim=dims[0]), rows(tokens, 9, dims[1]))
        k, v = cache.rows(sequence)
        assert k.shape == (tokens, 2, dims[0])
        if not stored:
            assert torch.equal(k, rows(tokens, dim=dims[0])[0])
        for token in range(tokens):  # a band of one token returns that token's values
            band = fa.Band(token - tokens + 1, token - tokens + 2)
            q = rows(1, 5, dims[0])
            got = fa.decode_attention(q, cache, sequences=[sequence], band=band, backend="golden")
            assert torch.equal(got[0, 0], v[token])


@pytest.mark.parametrize("stored", STORES)
@pytest.mark.parametrize("removed", [0, 1, 2, 5, 9, 12])
def test_append_after_crop_replaces_the_cropped_tokens(removed: int, stored: str) -> None:
    cache, full = paged(stored=stored), paged(stored=stored)
    a, b = cache.allocate(), full.allocate()
    cache.append([a], rows(9), rows(9, 1))
    cache.crop(a, removed)
    retained = max(9 - removed, 0)
    assert cache.lengths() == [retained]
    assert cache.free_pages == 8 - -(-retained // 4)
    cache.append([a], rows(3, 2), rows(3, 3))
    full.append([b], rows(9)[:, :retained], rows(9, 1)[:, :retained])
    full.append([b], rows(3, 2), rows(3, 3))
    for got, want in zip(cache.rows(a), full.rows(b), strict=True):
        assert torch.equal(got, want)


def test_crop_of_forked_sequence_leaves_the_other_sequence_unchanged() -> None:
    cache = paged()
    a = cache.allocate()
    cache.append([a], rows(7), rows(7))
    b = cache.fork(a)
    cache.crop(b, 2)
    assert cache.block_table([a, b])[:, 1].unique().numel() == 1
    cache.append([b], rows(2, 5), rows(2, 5))
    assert torch.equal(cache.rows(a)[0], rows(7)[0])
    assert torch.equal(cache.rows(b)[0], torch.cat((rows(7)[0, :5], rows(2, 5)[0])))
    cache.crop(b, 7)
    cache.free(a)
    assert cache.free_pages == 8


def test_slide_frees_pages_before_the_window() -> None:
    cache, band, q = paged(), fa.Band.window(5), rows(1, 7)
    a = cache.allocate()
    cache.append([a], rows(11), rows(11, 1))
    want = fa.decode_attention(q, cache, band=band, backend="golden")
    cache.slide(a, 6)
    assert cache.lengths() == [7]  # tokens 4 to 10: the sixth from behind lies in the second page
    assert cache.free_pages == 6
    assert torch.equal(cache.rows(a)[1], rows(11, 1)[0, 4:])
    assert torch.equal(fa.decode_attention(q, cache, band=band, backend="golden"), want)
    cache.slide(a, 6)
    assert cache.lengths() == [7]
    cache.slide(a, 0)
    assert cache.lengths() == [3]


def test_add_pages_keeps_stored_rows_and_block_table() -> None:
    for stored in STORES:
        cache = paged(2, stored)
        a, b = cache.allocate(), cache.allocate()
        cache.append([a, b], rows(4).repeat(2, 1, 1, 1), rows(4).repeat(2, 1, 1, 1))
        before, table = cache.rows(a), cache.block_table()
        cache.add_pages(3)
        assert cache.free_pages == 3
        assert torch.equal(cache.block_table(), table)
        cache.append([b], rows(12, 1), rows(12, 1))
        assert cache.free_pages == 0
        assert all(map(torch.equal, cache.rows(a), before))
        assert cache.lengths() == [4, 16]


@pytest.mark.parametrize("wrong", [-1, 1.5, True, None, "2"])
def test_crop_slide_and_add_pages_refuse_negative_and_non_integer_counts(wrong: object) -> None:
    cache = paged()
    a = cache.allocate()
    calls = (lambda: cache.crop(a, wrong), lambda: cache.slide(a, wrong), lambda: cache.add_pages(wrong))  # type: ignore[arg-type]
    for call in calls:
        with pytest.raises(ValueError, match="PagedKVCache: count: expected an integer >= 0, got"):
            call()
    with pytest.raises(ValueError, match="sequence: expected a sequence of this cache that was not freed"):
        cache.crop(99, 1)
