"""The intermediate representation (band, tiles, drop bits, bias) against the same rules in plain Python loops."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.bits import same_bits

from fusion_attention.ir import bias, dropout, tiles
from fusion_attention.ir.mask import INFINITE, Band
from fusion_attention.ir.memory_views import MatrixView
from fusion_attention.ir.problem import Extents, Problem

# ---------------------------------------------------------------------------------------------------- bands and tiles


def sees(row: int, key: int, kv_len: int, lo: int, hi: int, prefix: int, ratio: int = 1) -> bool:
    """Returns whether a row sees a key of `ratio` tokens, by the rule of the band."""
    first, end = row + lo, math.floor((row + hi) / ratio)
    if first < 0:
        first = 0
    if prefix > end:
        end = prefix
    if kv_len < end:
        end = kv_len
    return first <= key < end


def literal(q_len: int, kv_len: int, lo: int, hi: int, prefix: int, ratio: int = 1) -> list[list[bool]]:
    return [[sees(i, j, kv_len, lo, hi, prefix, ratio) for j in range(kv_len)] for i in range(q_len)]


def extents_of(q_len: list[int], kv_len: list[int], lo: list[int], hi: list[int], prefix: list[int]) -> Extents:
    return Extents(*(np.array(a, np.int64) for a in (q_len, kv_len, lo, hi, prefix, [0] * len(q_len))))


def random_extents(rng: np.random.Generator, count: int) -> Extents:
    """Returns short sequences with any band: crossed, negative, infinite, prefixes beyond the keys, no rows."""

    def edge(away: int) -> int:
        return away if rng.random() < 0.3 else int(rng.integers(-12, 13))

    lo = [edge(-INFINITE) for _ in range(count)]
    hi = [edge(INFINITE) for _ in range(count)]
    prefix = [int(rng.integers(0, 12)) if a == -INFINITE and rng.random() < 0.5 else 0 for a in lo]
    return extents_of(rng.integers(0, 10, count).tolist(), rng.integers(0, 10, count).tolist(), lo, hi, prefix)


def matrices(extents: Extents, ratio: int = 1) -> list[np.ndarray]:
    """Returns the result of the rule, [q_len, kv_len] bool, for each sequence."""
    result = []
    for b in range(len(extents)):
        q_len, kv_len, lo, hi, prefix = (
            int(a[b]) for a in (extents.q_len, extents.kv_len, extents.lo, extents.hi, extents.prefix)
        )
        result.append(np.array(literal(q_len, kv_len, lo, hi, prefix, ratio), bool).reshape(q_len, kv_len))
    return result


def of_ratio(extents: Extents) -> Extents:
    """Returns the extents with bands that compressed keys allow: no first key and no prefix."""
    return replace(extents, lo=np.full_like(extents.lo, -INFINITE), prefix=np.zeros_like(extents.prefix))


@pytest.mark.parametrize("ratio", [2, 3, 128])
def test_band_with_ratio_shows_one_more_key_every_ratio_rows(ratio: int) -> None:
    extents = of_ratio(random_extents(np.random.default_rng(ratio), 200))
    extents = replace(extents, hi=extents.hi * 3)
    for b, visible in enumerate(matrices(extents, ratio)):
        first, end = extents.row_interval(b, np.arange(len(visible)), ratio)
        assert (first == 0).all()
        assert np.array_equal(np.maximum(end, 0), visible.sum(1))


def test_interval_of_visible_keys_matches_rule_of_band() -> None:
    extents = random_extents(np.random.default_rng(0), 400)
    for b, visible in enumerate(matrices(extents)):
        first, end = extents.row_interval(b, np.arange(len(visible)))
        assert all(set(range(f, e)) == set(np.flatnonzero(row)) for f, e, row in zip(first, end, visible, strict=True))
    assert extents.visible_pairs == sum(int(visible.sum()) for visible in matrices(extents))


@pytest.mark.parametrize(("q_len", "kv_len"), [(5, 5), (3, 7), (7, 3), (1, 6), (4, 0), (0, 4)])
def test_band_visible_matches_rules_written_by_hand(q_len: int, kv_len: int) -> None:
    d = kv_len - q_len
    for align, a in (("start", 0), ("end", d)):
        expected = {
            Band.full(): lambda i, j: True,
            Band.causal(align): lambda i, j, a=a: j <= i + a,
            Band.window(2, 1, align): lambda i, j, a=a: i + a - 2 <= j <= i + a + 1,
            Band.window(-1, 3, align): lambda i, j, a=a: i + a + 1 <= j <= i + a + 3,
            Band.window(1, 2**31 - 1, align): lambda i, j, a=a: j >= i + a - 1,
            Band.prefix_causal([2]): lambda i, j: j < 2 or j <= i + d,
        }
        for band, rule in expected.items():
            wanted = [[rule(i, j) for j in range(kv_len)] for i in range(q_len)]
            assert band.visible(q_len, kv_len).tolist() == wanted, band
    assert Band.window(2**31 - 1, 2**31 - 1) == Band.full()
    assert Band.window(2**31 - 1, 0) == Band.causal()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ratio", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 64])
@pytest.mark.parametrize("tiles_by", [tiles.by_query, tiles.by_key])
def test_tiles_cover_exactly_the_visible_pairs(tiles_by, size: int, ratio: int) -> None:
    extents = random_extents(np.random.default_rng(size), 200)
    extents = extents if ratio == 1 else of_ratio(extents)
    # by_key lists the tiles of the transposed matrix.
    visible = matrices(extents, ratio)
    visible = visible if tiles_by is tiles.by_query else [m.T for m in visible]
    listed = [np.zeros(len(m), int) for m in visible]
    t = tiles_by(extents, size, ratio)
    for b, row0, row1, begin, full_begin, full_end, end in zip(
        t.seq, t.row0, t.row1, t.begin, t.full_begin, t.full_end, t.end, strict=True
    ):
        rows = visible[b][row0:row1]
        assert 0 < row1 - row0 <= size
        assert 0 <= begin <= full_begin <= full_end <= end <= rows.shape[1]
        assert not rows[:, :begin].any()
        assert not rows[:, end:].any()
        assert rows[:, full_begin:full_end].all()
        assert (begin == end) == (not rows.any())
        listed[b][row0:row1] += 1
    assert all((count == 1).all() for count in listed)


def test_problem_str_group_and_flops_match_definition() -> None:
    problem = Problem(4, 2, 8, 6, scale=0.125, bias="table")
    assert str(problem) == "heads_q=4,heads_kv=2,dim_qk=8,dim_v=6,scale=0.125,bias='table'"
    assert problem.group == 2
    extents = random_extents(np.random.default_rng(1), 5)
    pairs = sum(int(m.sum()) for m in matrices(extents))
    assert problem.flops(extents) == 2 * 4 * pairs * (8 + 6)
    assert problem.flops(extents, backward=True) == 2 * 4 * pairs * (3 * 8 + 2 * 6)


# ---------------------------------------------------------------------------------------------------------- drop bits


def scalar_philox(counter: list[int], key: list[int], rounds: int = 7) -> list[int]:
    """Philox4x32 in Python's integers, as in the published algorithm."""
    c, k = list(counter), list(key)
    for _ in range(rounds):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 % 2**32, (p0 >> 32) ^ c[3] ^ k[1], p0 % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


# Known answers, published with the Random123 library.
ANSWERS = [
    (7, "00000000 00000000 00000000 00000000 00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (7, "ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (7, "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
    (10, "00000000 00000000 00000000 00000000 00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
]


@pytest.mark.parametrize(("rounds", "given", "answer"), ANSWERS)
def test_philox_matches_known_answers(rounds: int, given: str, answer: str) -> None:
    words = [int(w, 16) for w in given.split()]
    expected = [int(w, 16) for w in answer.split()]
    assert scalar_philox(words[:4], words[4:], rounds) == expected
    counter = tuple(torch.tensor(w) for w in words[:4])
    assert [int(w) for w in dropout.philox(counter, (words[4], words[5]), rounds)] == expected


@pytest.mark.parametrize(("seed", "offset", "keep_prob"), [(0, 0, 0.5), (2**63 - 25, 2**32 - 1, 0.9), (-3, 7, 0.1)])
def test_drawn_dropout_bits_match_philox_definition(seed: int, offset: int, keep_prob: float) -> None:
    heads, rows, keys, stream = 2, 3, 21, 5
    drawn = dropout.keep_from_philox(seed, offset, keep_prob, stream, heads, slice(0, rows), slice(0, keys))
    key = [seed % 2**32, (seed >> 32) % 2**32]
    for h in range(heads):
        for i in range(rows):
            words = [w for m in range(3) for w in scalar_philox([m, i, stream + h, offset], key)]
            halves = [half for w in words for half in (w % 2**16, w >> 16)]
            assert drawn[h, i].tolist() == [half < round(65536 * keep_prob) for half in halves[:keys]]


def test_slice_of_drawn_dropout_bits_equals_bits_drawn_for_the_slice() -> None:
    full = dropout.keep_from_philox(11, 3, 0.8, 0, 4, slice(0, 120), slice(0, 333))
    assert abs(full.double().mean().item() - 0.8) < 5 * (0.16 / full.numel()) ** 0.5
    rng = np.random.default_rng(0)
    for _ in range(20):
        (i0, i1), (j0, j1), (h0, h1) = (np.sort(rng.integers(0, n + 1, 2)).tolist() for n in (120, 333, 4))
        sliced = dropout.keep_from_philox(11, 3, 0.8, h0, h1 - h0, slice(i0, i1), slice(j0, j1))
        assert torch.equal(sliced, full[h0:h1, i0:i1, j0:j1])
    for other in ({"seed": 12}, {"offset": 4}, {"first_stream": 4}):
        given = {"seed": 11, "offset": 3, "keep_prob": 0.8, "first_stream": 0} | other
        moved = dropout.keep_from_philox(**given, heads=4, rows=slice(0, 120), keys=slice(0, 333))
        equal = 0.8**2 + 0.2**2  # independent
        assert abs((moved == full).double().mean().item() - equal) < 5 * (equal * (1 - equal) / full.numel()) ** 0.5


def test_packed_dropout_bits_match_numpy_unpackbits() -> None:
    packed = np.random.default_rng(0).integers(0, 256, 40, np.uint8)
    bits = np.unpackbits(packed, bitorder="little")
    # Two sequences that start within a byte; heads of the second share bits; the tensor has an offset.
    view = MatrixView(torch.from_numpy(packed)[2:], np.array([3, 131]), np.array([60, 0]), np.array([11, 13]), 1)
    for b, heads in ((0, 2), (1, 3)):
        got = dropout.keep_from_bits(view, b, heads, slice(1, 5), slice(2, 11))
        for h in range(heads):
            for i in range(1, 5):
                start = 16 + (3 + 60 * h + 11 * i if b == 0 else 131 + 13 * i)
                assert got[h, i - 1].tolist() == bits[start + 2 : start + 11].astype(bool).tolist()


# --------------------------------------------------------------------------------------------------------------- bias


def table_view(table: torch.Tensor) -> MatrixView:
    """Returns a view of one sequence's table [heads, 1024, keys]; an expanded head axis keeps stride 0."""
    strides = (np.array([s]) for s in table.stride()[:2])
    return MatrixView(table, np.array([0]), *strides, 1)


@pytest.mark.parametrize("q_len", [3, 1024, 1025, 1300, 2100])
def test_bias_table_rebuilds_the_full_bias_matrix(q_len: int) -> None:
    distance = (torch.arange(q_len)[None, :] - torch.arange(q_len)[:, None]).abs()
    full = -torch.tensor([0.5, 0.125]).double()[:, None, None] * distance
    table = torch.full((2, 1024, q_len), torch.nan).double()
    stored = min(q_len, 1024)
    table[:, 1024 - stored :] = full[:, q_len - stored :]
    below = torch.ones(q_len, q_len, dtype=torch.bool).tril()
    for rows, keys in ((slice(0, q_len), slice(0, q_len)), (slice(q_len // 3, q_len - 1), slice(1, q_len // 2))):
        got = bias.from_table(table_view(table), 0, 2, (q_len, q_len), rows, keys)
        visible = below[rows, keys]
        assert torch.equal(got[:, visible], full[:, rows, keys][:, visible])


@pytest.mark.parametrize("shared", [False, True])
def test_bias_table_gradient_is_added_to_the_source_elements(shared: bool) -> None:
    q_len = 1100
    below = torch.ones(q_len, q_len, dtype=torch.bool).tril()
    gradient = torch.randn(2, q_len, q_len, dtype=torch.float64) * below
    table = torch.zeros(1 if shared else 2, 1024, q_len, dtype=torch.float64)
    for rows in (slice(0, 500), slice(500, q_len)):
        for keys in (slice(0, 64), slice(64, q_len)):
            view = table_view(table.expand(2, -1, -1))
            bias.add_table_gradient(view, 0, (q_len, q_len), gradient[:, rows, keys], rows, keys)
    expected = torch.zeros(2, 1024, q_len, dtype=torch.float64)
    for i in range(q_len):
        r = i - (q_len - 1024) if i >= q_len - 1024 else i % 1024
        moved = (q_len - 1024 + r) - i
        expected[:, r, moved : moved + i + 1] += gradient[:, i, : i + 1]
    if shared:
        expected = expected.sum(0, keepdim=True)
    torch.testing.assert_close(table, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("root", [False, True])
def test_bias_from_slopes_matches_distances_computed_by_hand(root: bool) -> None:
    slopes = torch.tensor([0.5, 2.0])
    got = bias.from_slopes(slopes, -3, slice(1, 4), slice(2, 6), root)
    for h in range(2):
        for i in range(1, 4):
            for j in range(2, 6):
                distance = abs(j - i - 3)
                assert got[h, i - 1, j - 2] == -slopes[h] * torch.tensor(distance**0.5 if root else float(distance))


@pytest.mark.parametrize("shape", [(3, 4, 5), (1, 4, 5), (3, 1, 5), (3, 4, 1), (1, 1, 5), (1, 4, 1), (1, 1, 1)])
def test_bias_matrix_and_gradient_by_tiles_match_whole_matrix(shape: tuple[int, int, int]) -> None:
    stored = torch.randn(shape, dtype=torch.float64)
    memory = torch.full((2 + stored.numel(),), torch.nan, dtype=torch.float64)
    memory[2:] = stored.flatten()
    strides = [0 if n == 1 else s for n, s in zip(shape, stored.stride(), strict=True)]
    view = MatrixView(memory, np.array([2]), np.array([strides[0]]), np.array([strides[1]]), strides[2])
    gradient = torch.randn(3, 4, 5, dtype=torch.float64)
    parts = [(rows, keys) for rows in (slice(0, 3), slice(3, 4), slice(2, 2)) for keys in (slice(0, 2), slice(2, 5))]
    for rows, keys in parts:
        assert torch.equal(bias.from_matrix(view, 0, 3, rows, keys), stored.expand(3, 4, 5)[:, rows, keys])
    for rows, keys in parts:
        bias.add_matrix_gradient(view, 0, gradient[:, rows, keys], rows, keys)
    axes = [axis for axis, n in enumerate(shape) if n == 1]
    total = gradient.sum(axes, keepdim=True) if axes else gradient
    torch.testing.assert_close(memory[2:].view(shape), stored + total, rtol=1e-12, atol=1e-12)
    assert memory[:2].isnan().all()


def test_bias_gradient_of_zero_rows_leaves_memory_unchanged() -> None:
    # The last sequence has no rows, so its address is the end of the memory.
    memory = torch.linspace(0, 1, 6)
    before, view = memory.clone(), MatrixView(memory, np.array([6]), np.array([3]), np.array([0]), 1)
    bias.add_matrix_gradient(view, 0, torch.zeros(1, 0, 3), slice(0, 0), slice(0, 3))
    bias.add_table_gradient(view, 0, (0, 3), torch.zeros(1, 0, 3), slice(0, 0), slice(0, 3))
    same_bits(memory, before)
