"""The nine sparse modes, restated by literal loops over items, rows and keys, against the band of the lowering and
against real calls whose outputs show which keys each row has seen.
"""

from itertools import product

import numpy as np
import pytest
import torch
from clauses.training import PREFIX_TRIANGLE, TRIANGLE

from fusion_attention.npu import npu_fusion_attention, npu_fusion_attention_grad
from fusion_attention.ops.shared.sparse_modes import mode_band

FLT_MAX = torch.finfo(torch.float32).max
UNLIMITED = 2**31 - 1
Lengths = list[tuple[int, int]]
pytestmark = pytest.mark.filterwarnings("ignore::fusion_attention.ContractWarning")


def window(j: int, diagonal: int, pre: int, nxt: int) -> bool:
    """A window around a diagonal; a token count of 2**31 - 1 has no end."""
    if pre < UNLIMITED and j < diagonal - pre:
        return False
    return nxt >= UNLIMITED or j <= diagonal + nxt


def prefix_is_legal(prefix: list[int] | None, items: Lengths) -> bool:
    if prefix is None or len(prefix) != len(items):
        return False
    return all(max(0, keys - rows) <= n <= keys for n, (rows, keys) in zip(prefix, items, strict=True))


def literal(mode: int, pre: int, nxt: int, prefix: list[int] | None, items: Lengths) -> list[np.ndarray]:
    """Per item the matrix of what the mode leaves, before a full mask is asked; CANN's page in loops."""
    with_rows = [b for b in range(len(items)) if items[b][0] > 0]
    result = []
    for b, (rows, keys) in enumerate(items):
        visible = np.zeros((rows, keys), bool)
        for i, j in np.ndindex(rows, keys):
            right_down = i + keys - rows
            if mode == 0:
                visible[i, j] = window(j, i, pre, nxt)
            elif mode == 1 or (mode == 5 and not prefix_is_legal(prefix, items)):
                visible[i, j] = True
            elif mode == 2:
                visible[i, j] = j <= i
            elif mode == 3:
                visible[i, j] = j <= right_down
            elif mode == 4:
                visible[i, j] = window(j, right_down, pre, nxt)
            elif mode in (5, 6):
                visible[i, j] = j <= right_down or j < prefix[b]
            elif mode == 7:
                visible[i, j] = j <= right_down + (nxt if b == with_rows[-1] else 0)
            else:
                visible[i, j] = j <= right_down + nxt if b == with_rows[0] else j <= i
        result.append(visible)
    return result


ITEMS: list[Lengths] = [
    [(5, 5)],
    [(3, 7), (7, 3)],
    [(4, 6), (1, 1), (6, 6)],
    [(0, 4), (3, 5), (2, 2), (0, 3)],
    [(2, 0), (5, 9), (4, 4), (3, 0)],
]
WINDOWS = [(UNLIMITED, UNLIMITED), (UNLIMITED, 0), (2, UNLIMITED), (1, 2), (0, 0), (-1, 3), (4, -2), (9, -1), (-2, -3)]


def prefixes(items: Lengths) -> list[list[int] | None]:
    least = [max(0, keys - rows) for rows, keys in items]
    most = [keys for _, keys in items]
    return [least, most, [(a + b + 1) // 2 for a, b in zip(least, most, strict=True)]]


@pytest.mark.parametrize("mode", range(9))
def test_the_band_of_a_mode(mode: int) -> None:
    for items, (pre, nxt) in product(ITEMS, WINDOWS):
        q_len, kv_len = np.array(items, np.int64).T
        for prefix in prefixes(items) if mode in (5, 6) else [None]:
            given = None if prefix is None else np.array(prefix)
            lo, hi, n = mode_band(mode, True, pre, nxt, given, q_len, kv_len)
            for b, want in enumerate(literal(mode, pre, nxt, prefix, items)):
                i, j = np.indices(want.shape)
                got = (j >= i + lo[b]) & (j < np.maximum(i + hi[b], n[b]))
                assert np.array_equal(got, want), (items, pre, nxt, prefix, b)


@pytest.mark.parametrize("mode", range(9))
def test_without_a_mask_a_mode_means_nothing(mode: int) -> None:
    q_len, kv_len = np.array([3, 7, 2]), np.array([5, 4, 2])
    lo, hi, prefix = mode_band(mode, False, 1, -1, np.array([2, 3, 1]), q_len, kv_len)
    i, j = np.indices((7, 5))
    assert all(((j >= i + a) & (j < np.maximum(i + b, n))).all() for a, b, n in zip(lo, hi, prefix, strict=True))


# ---------------------------------------------------------------------------------------------------------- real calls

HEADS = 2


def probe(layout: str, items: Lengths, mask: torch.Tensor | None, **words: object) -> list[torch.Tensor]:
    """[heads, rows, keys] per item: which keys weigh on which rows, and they say the same forward and backward.

    Scores are all zero, V is the identity, and dY is the identity: an output's elements are the weights of its keys,
    and the elements of dV are the weights of a key in each row. A row whose maximum is -FLT_MAX saw nothing.
    """
    rows, keys = (sum(n) if layout == "TND" else max(n) for n in zip(*items, strict=True))
    width, height = (max(n, 1) for n in (max(k for _, k in items), max(r for r, _ in items)))
    kv_at = np.concatenate([np.arange(k) for _, k in items]) if layout == "TND" else np.arange(keys)
    row_at = np.concatenate([np.arange(r) for r, _ in items]) if layout == "TND" else np.arange(rows)
    dim = max(width, height)
    identity = torch.eye(dim)
    v = identity[torch.from_numpy(kv_at).long()][:, None].expand(-1, HEADS, -1)
    dy = identity[torch.from_numpy(row_at).long()][:, None].expand(-1, HEADS, -1)
    if layout != "TND":
        v, dy = (t.expand(len(items), *t.shape) for t in (v, dy))
    q, k = torch.zeros_like(dy)[..., :1], torch.zeros_like(v)[..., :1]
    if layout == "TND":
        ends = np.cumsum(np.array(items), 0).T.tolist()
        words = {**words, "actual_seq_qlen": ends[0], "actual_seq_kvlen": ends[1], "softmax_layout": "TND"}
    out, top, total, *_ = npu_fusion_attention(q, k, v, HEADS, layout, atten_mask=mask, **words)
    saved = {"softmax_max": top, "softmax_sum": total, "attention_in": out}
    dv = npu_fusion_attention_grad(q, k, v, dy, HEADS, layout, atten_mask=mask, **saved, **words)[2]
    results = []
    starts = np.cumsum([(0, 0), *items], 0)
    for b, (n_rows, n_keys) in enumerate(items):
        i, j = starts[b]
        packed = layout == "TND"
        weights, seen_by = (out[i : i + n_rows], dv[j : j + n_keys]) if packed else (out[b, :n_rows], dv[b, :n_keys])
        empty = top[i : i + n_rows, :, 0].mT == -FLT_MAX if packed else top[b, :, :n_rows, 0] == -FLT_MAX
        forward = (weights[..., :n_keys].transpose(0, 1) > 0) & ~empty[..., None]
        backward = (seen_by[..., :n_rows].permute(1, 2, 0) > 0) & ~empty[..., None]
        assert torch.equal(forward, backward)
        results.append(forward)
    return results


def check(layout: str, items: Lengths, mode: int, mask: torch.Tensor | None, **words: object) -> None:
    """A probe against the literal rule, and, where the mask is full, its elements: zero is seen, 1 is not."""
    pre, nxt = (int(words.get(name, UNLIMITED)) for name in ("pre_tockens", "next_tockens"))  # type: ignore[call-overload]
    want = literal(mode, pre, nxt, words.get("prefix"), items)  # type: ignore[arg-type]
    q_at = kv_at = 0
    for b, got in enumerate(probe(layout, items, mask, sparse_mode=mode, **words)):
        rows, keys = items[b]
        for h, i, j in np.ndindex(HEADS, rows, keys):
            is_visible = bool(want[b][i, j])
            if mode in (0, 1, 5):
                assert mask is not None
                at = (i, j)
                if mask.dim() == 2 and mask.shape == (sum(r for r, _ in items), sum(k for _, k in items)):
                    at = (q_at + i, kv_at + j)
                if mask.dim() == 4:
                    at = (min(b, mask.shape[0] - 1), min(h, mask.shape[1] - 1), *at)
                is_visible = is_visible and int(mask[at]) == 0
            assert bool(got[h, i, j]) == is_visible, (layout, mode, words, b, h, i, j)
        q_at, kv_at = q_at + rows, kv_at + keys


def random_mask(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) < 0.4


SIZES = [(4, 4), (3, 6), (6, 3)]


@pytest.mark.parametrize(("rows", "keys"), SIZES)
@pytest.mark.parametrize("mode", range(7))
def test_padded_calls(mode: int, rows: int, keys: int) -> None:
    items = [(rows, keys)] * 2
    compressed = PREFIX_TRIANGLE if mode == 6 else TRIANGLE
    masks = [compressed]
    if mode in (0, 1, 5):
        shapes = [(rows, keys), (1, 1, rows, keys), (2, 1, rows, keys), (2, HEADS, rows, keys)]
        masks = [random_mask(*shape) for shape in (shapes[2:] if mode == 5 else shapes)]
    if mode in (0, 4):
        # The windows that a padded call takes: some key is visible.
        legal = [w for w in WINDOWS if literal(mode, *w, None, items)[0].any()]
        assert len(legal) >= 4
        for (pre, nxt), mask in product(legal, masks):
            check("BSND", items, mode, mask, pre_tockens=pre, next_tockens=nxt)
        return
    low = max(0, keys - rows)
    legal_prefixes = [[low, keys], [min(low + 1, keys), low], [0, keys], [keys, keys + 1], None]
    for mask in masks:
        for prefix in legal_prefixes if mode == 5 else legal_prefixes[:2] if mode == 6 else [None]:
            check("BSND", items, mode, mask, prefix=prefix)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("items", ITEMS, ids=str)
@pytest.mark.parametrize("mode", [0, 1, 2, 3, 4, 6, 7, 8])
def test_packed_calls(mode: int, items: Lengths) -> None:
    if mode == 6:
        for prefix in prefixes(items):
            check("TND", items, mode, PREFIX_TRIANGLE, prefix=prefix)
        return
    rows, keys = zip(*items, strict=True)
    masks = [random_mask(max(rows), max(keys)), random_mask(sum(rows), sum(keys))] if mode in (0, 1) else [TRIANGLE]
    windows = WINDOWS if mode in (0, 4, 7, 8) else WINDOWS[:1]
    for (pre, nxt), mask in product(windows, masks):
        check("TND", items, mode, mask, pre_tockens=pre, next_tockens=nxt)


# ---------------------------------------------------------------------------------------------------- CANN's examples


def test_the_cut_batches_of_the_page() -> None:
    """One packed batch on two cards sees, row by row, what the whole batch sees: CANN's examples of modes 7 and 8."""
    # Mode 3 cut in the query direction: the front card in mode 7, the rear card in mode 3.
    whole_3 = literal(3, UNLIMITED, UNLIMITED, None, [(3, 3), (4, 6), (5, 5), (4, 4)])
    front_7 = probe("TND", [(3, 3), (2, 6)], TRIANGLE, sparse_mode=7, pre_tockens=6, next_tockens=-2)
    rear_3 = probe("TND", [(2, 6), (5, 5), (4, 4)], TRIANGLE, sparse_mode=3)
    # Mode 2 cut: the front card in mode 2, the rear card in mode 8.
    whole_2 = literal(2, UNLIMITED, UNLIMITED, None, [(3, 3), (5, 4), (5, 5), (4, 4)])
    front_2 = probe("TND", [(3, 3), (2, 4)], TRIANGLE, sparse_mode=2)
    rear_8 = probe("TND", [(3, 4), (5, 5), (4, 4)], TRIANGLE, sparse_mode=8, pre_tockens=4, next_tockens=1)
    for full, front, rear in ((whole_3, front_7, rear_3), (whole_2, front_2, rear_8)):
        joined = [front[0][0], np.concatenate((front[1][0], rear[0][0])), rear[1][0], rear[2][0]]
        assert all(np.array_equal(got, want) for got, want in zip(joined, full, strict=True))
