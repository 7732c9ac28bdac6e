"""The decode kernels under Triton's interpreter against golden: pages, quantised caches, the work list."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from support.paged_decode_calls import CACHES, Cache, judge, operands_on

import fusion_attention as fa
from fusion_attention.backends import triton as backend
from fusion_attention.backends.triton.common import shapes
from fusion_attention.backends.triton.decode import launch as launch_decode
from fusion_attention.ir.mask import INFINITE
from fusion_attention.ir.memory_views import Dequant, PagedView, RowView
from fusion_attention.ir.problem import Extents, Operands, Problem
from fusion_attention.judging.chi_square_limits import Expected
from fusion_attention.judging.expected_error import rounding, stored
from fusion_attention.testing import compare


def compute(cache: Cache, operands: Operands, extents: Extents) -> None:
    p = cache.problem
    assert backend.reasons_against(p, "cpu") == []
    backend.attention_forward(p, extents, backend.schedule(p, extents, "attention_forward"), operands)


@pytest.mark.parametrize("cache", CACHES, ids=lambda cache: cache.id)
def test_triton_decode_of_every_cache_form_matches_reference(cache: Cache) -> None:
    e, operands = cache.extents(), operands_on(cache, "cpu")
    compute(cache, operands, e)
    judge(cache, operands, e)


def test_triton_decode_ignores_keys_before_window_that_starts_inside_a_page() -> None:
    cache = Cache(kv_len=(400, 90), q_len=3, more={"bias": "slopes"})
    full, operands = cache.extents(), operands_on(cache, "cpu")
    compute(cache, operands, full)
    everything = operands.out.keep[0].clone()
    band = dataclasses.replace(full, lo=full.kv_len - cache.q_len - 20)
    compute(cache, operands, band)
    assert not torch.equal(operands.out.keep[0], everything)
    # Keys before the window have weight 0: other values there change no bit.
    result = operands.out.keep[0].clone()
    for view in (operands.k, operands.v):
        assert isinstance(view, PagedView)
        for b, n in enumerate(cache.kv_len):
            view.pool[view.table[b, : (n - cache.q_len - 20) // view.page_size].long()] = 7.0
    compute(cache, operands, band)
    assert torch.equal(operands.out.keep[0], result)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_triton_decode_ignores_token_scales_before_the_window(dtype: str) -> None:
    cache = Cache(kv_len=(40, 25), dequant="token", dtype=dtype)
    full, operands = cache.extents(), operands_on(cache, "cpu")
    band = dataclasses.replace(full, lo=full.kv_len - cache.q_len - 9)
    compute(cache, operands, band)
    result = operands.out.keep[0].clone()
    assert operands.dequant_v is not None
    scale = operands.dequant_v.scale
    assert isinstance(scale, PagedView)
    for b, n in enumerate(cache.kv_len):
        for j in range(n - cache.q_len - 9):
            scale.pool[scale.table[b, j // scale.page_size].long(), j % scale.page_size] = 1e30
    compute(cache, operands, band)
    assert torch.equal(operands.out.keep[0], result)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dims", [(32, 32), (24, 16), (40, 24)], ids=str)
@pytest.mark.parametrize("dequant", ["none", "channel"])
def test_triton_decode_with_key_prefix_as_values_matches_reference(dims: tuple[int, int], dequant: str) -> None:
    cache = Cache(q_len=2, heads_q=8, dim_qk=dims[0], dim_v=dims[1], dequant=dequant, dtype="float16",
                  more={"shares_kv": True})  # fmt: skip
    operands = operands_on(cache, "cpu")
    assert isinstance(operands.k, PagedView)
    operands.v = dataclasses.replace(operands.k, dim=dims[1])
    if operands.dequant_k is not None:
        scale, offset = operands.dequant_k.scale, operands.dequant_k.offset
        assert offset is not None
        operands.dequant_v = Dequant(*(dataclasses.replace(view, dim=dims[1]) for view in (scale, offset)))
    compute(cache, operands, cache.extents())
    judge(cache, operands, cache.extents())


def test_triton_decode_of_latent_paged_kv_cache_matches_reference() -> None:
    cache = fa.PagedKVCache(1, 48, 8, dim_v=32, page_size=16, shares_kv=True, dtype=torch.bfloat16)
    sequences = [cache.allocate(), cache.allocate()]
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randn(n, m, 1, 48, generator=generator).bfloat16() for n, m in ((2, 9), (1, 31))]
    cache.append(sequences, rows[0])
    cache.append(sequences[:1], rows[1])
    q = torch.randn(2, 1, 20, 48, generator=generator).bfloat16()
    call = functools.partial(fa.decode_attention, q, cache, sequences=sequences)
    result, want = call(backend="triton"), call(backend="golden").double()
    # Each result is rounded once. Rounding of weights (sum 1) moves a row by at most its largest value's rounding.
    largest = max(float(r.abs().amax()) for r in rows)
    variance = 2 * stored(want, torch.bfloat16) + rounding(torch.bfloat16) * largest**2
    compare("out", result, Expected(want, variance.sqrt()))


@pytest.mark.parametrize("factor", [1e-6, 10.0])
def test_triton_decode_with_tiny_and_large_token_scales_keeps_accuracy(factor: float) -> None:
    cache = Cache(dequant="token", dtype="float16", dim_v=32, kv_len=(90, 20))
    operands = operands_on(cache, "cpu")
    assert operands.dequant_v is not None
    operands.dequant_v.scale.pool.abs_().add_(0.5).mul_(factor)  # type: ignore[union-attr]
    compute(cache, operands, cache.extents())
    judge(cache, operands, cache.extents())


def test_triton_decode_with_tiny_channel_scales_keeps_accuracy() -> None:
    cache = Cache(dequant="channel", dtype="float16", kv_len=(90, 20))
    operands = operands_on(cache, "cpu")
    assert operands.dequant_k is not None
    assert isinstance(operands.dequant_k.scale, RowView)
    operands.dequant_k.scale.keep[0].mul_(1e-6)
    operands.q.keep[0].mul_(100.0)
    compute(cache, operands, cache.extents())
    judge(cache, operands, cache.extents())


# ----------------------------------------------------------------------------------------------------------- work list

PROBLEM = Problem(8, 2, 64, 64)
TILE = shapes.Tile(16, 16, 4, 1)
WANTED = 10


def bands(generator: np.random.Generator, q_len: np.ndarray) -> Extents:
    """Returns extents with random key lengths and windows for the given numbers of rows."""
    kv_len = generator.integers(0, 700, len(q_len)) * generator.integers(0, 2, len(q_len))
    hi = kv_len - q_len + 1
    lo = np.where(generator.integers(0, 2, len(q_len)) > 0, hi - generator.integers(1, 90, len(q_len)), -INFINITE)
    return Extents(q_len, kv_len, lo, hi, generator.integers(0, 9, len(q_len)), kv_len - q_len)


@pytest.mark.parametrize("seed", range(6))
def test_decode_work_list_covers_every_visible_key_of_every_row_once(seed: int) -> None:
    generator = np.random.default_rng(seed)
    q_len = generator.integers(0, 12, 5)
    for _ in range(4):  # the same rows with other keys: the same buffer
        e = bands(generator, q_len)
        listed = launch_decode.work(PROBLEM, e, TILE, WANTED)
        split_tiles, buffer = launch_decode.buffer_for_shares(PROBLEM, e, TILE, WANTED)
        assert len(listed) == WANTED + (-(-q_len * PROBLEM.group // TILE.BM)).sum()
        met = {(b, r): np.zeros(n, int) for b, n in enumerate(e.kv_len) for r in range(q_len[b] * PROBLEM.group)}
        for b, r0, r1, begin, end, *_ in listed.tolist():
            assert begin % TILE.BN == 0 or begin == end
            for r in range(r0, r1):
                met[b, r][begin:end] += 1
        for (b, r), counts in met.items():
            row = r // PROBLEM.group
            first, end = max(row + e.lo[b], 0), min(max(row + e.hi[b], e.prefix[b]), e.kv_len[b])
            assert (counts <= 1).all()
            assert (counts[first : max(end, first)] == 1).all()
        shared = np.flatnonzero(listed[:, 5] > 1)
        assert (shared < buffer).all()
        firsts = [(first, count) for *_, first, count in listed.tolist() if count]
        assert len(firsts) <= split_tiles
        assert [n for first, count in firsts for n in range(first, first + count)] == shared.tolist()
        for first, count in firsts:  # one tile's shares, one after the other
            assert (listed[first : first + count, :3] == listed[first, :3]).all()
            assert (listed[first : first + count, 5] == count).all()


def test_decode_work_list_splits_a_long_sequence_among_short_sequences() -> None:
    keys = np.array([131072, *(1024,) * 63])
    zero = np.zeros(64, np.int64)
    e = Extents(zero + 1, keys, zero - INFINITE, keys, zero, keys - 1)
    listed = launch_decode.work(PROBLEM, e, shapes.Tile(16, 64, 4, 3), 49)
    longest = (listed[:, 4] - listed[:, 3]).max()
    assert longest <= -(-keys.sum() // 49) + 64
    assert (listed[listed[:, 2] > 0, 5] > 1).sum() == (listed[:, 0] == 0)[listed[:, 2] > 0].sum() >= 30


def test_decode_gathers_key_tiles_across_pages_or_with_huge_strides() -> None:
    operands, tile = operands_on(Cache(), "cpu"), shapes.Tile(16, 16, 4, 1)
    views = {"k": operands.k, "v": operands.v}
    assert launch_decode.within(Cache().problem, views, tile)
    assert not launch_decode.within(Cache(page_size=24).problem, views, tile)
    far = dataclasses.replace(operands.v, stride_token=1 << 27)
    assert not launch_decode.within(Cache().problem, views | {"v": far}, tile)


@pytest.mark.parametrize(
    ("more", "rows", "table"),
    [
        ({}, 16, "decode"),
        ({}, 64, "prefill"),
        ({"kv_dtype": "int8"}, 64, "prefill int8"),
        ({"shares_kv": True}, 16, "latent"),
        ({"shares_kv": True, "kv_dtype": "int8"}, 128, "prefill int8"),
    ],
)
def test_decode_tile_table_depends_on_row_count_and_cache_kind(more: dict[str, object], rows: int, table: str) -> None:
    problem = dataclasses.replace(PROBLEM, **more)  # type: ignore[arg-type]
    assert launch_decode.tables_for(problem, rows)[0] == table
    assert launch_decode.tables_for(problem, rows)[-1] == "decode"
