"""Checks of lengths, windows, prefixes and masks that rules use, against brute force over every small case."""

from itertools import product

import numpy as np
import pytest
import torch

from fusion_attention.ops.shared.cumulative_ends import last_end, rising
from fusion_attention.ops.training import checks
from fusion_attention.ops.training.checks import (
    dense_window,
    is_compressed_mask,
    packed_window,
    prefix_fits,
    table_reaches,
    window_holds_mask,
)

INFINITE = 2**31 - 1


def sees(mode: int, pre: int, next_: int, rows: int, keys: int) -> np.ndarray:
    """Returns [rows, keys] bool, true if visible, of the modes 0, 3 and 4; mode 3 is causal, from the last key."""
    i, j = np.mgrid[:rows, :keys]
    origin = 0 if mode == 0 else keys - rows
    left, right = (INFINITE, 0) if mode == 3 else (pre, next_)
    return (i + origin - left <= j) & (j <= i + origin + right)


@pytest.mark.parametrize("mode", [0, 4])
def test_dense_window_is_legal_only_if_some_key_is_visible(mode: int) -> None:
    for pre, next_, rows, keys in product(
        (-6, -4, -2, -1, 0, 1, 3, INFINITE), (-6, -3, -1, 0, 2, INFINITE), *[range(1, 6)] * 2
    ):
        legal = dense_window(mode, pre, next_, rows, keys) is True
        assert legal is bool(sees(mode, pre, next_, rows, keys).any()), (pre, next_, rows, keys)
    assert dense_window(mode, -1, -1, 0, 4) is True
    assert dense_window(mode, -1, -1, 4, 0) is True


@pytest.mark.parametrize("mode", [0, 3, 4])
def test_packed_window_is_legal_only_if_every_row_sees_a_key(mode: int) -> None:
    for pre, next_, q_len, kv_len in product((-3, -1, 0, 2, INFINITE), (-3, -1, 0, 2, INFINITE), range(5), range(1, 5)):
        legal = packed_window(mode, pre, next_, np.array([1, q_len]), np.array([9, kv_len])) is True
        every = bool(sees(mode, pre, next_, 1, 9).any() and sees(mode, pre, next_, q_len, kv_len).any(1).all())
        if mode == 4 and pre < 0:
            every = False  # the last row sees nothing, or there is no row; the chip does not look
        assert legal is every, (pre, next_, q_len, kv_len)


@pytest.mark.parametrize(
    ("mode", "pre", "next_", "q_len", "kv_len", "legal"),
    [
        (7, 6, -2, [3, 2, 0], [3, 6, 1], True),  # the worked example of the page, with an empty tail
        (7, 5, -2, [3, 2], [3, 6], False),
        (7, 6, 1, [3, 2], [3, 6], False),
        (7, 6, -5, [3, 2], [3, 6], False),
        (7, 6, -4, [3, 2], [3, 6], True),
        (7, 6, 0, [4, 2], [3, 6], False),
        (8, 4, 1, [3, 5, 4], [4, 5, 4], True),
        (8, 3, 1, [3, 5, 4], [4, 5, 4], False),
        (8, 4, -2, [0, 3, 5], [9, 4, 5], False),
        (8, 4, -1, [0, 3, 5], [9, 4, 5], True),
        (8, 4, -1, [3, 9], [4, 5], True),  # only the cut sequence is asked
        (8, 0, 0, [0, 0], [4, 5], True),
    ],
)
def test_sparse_modes_7_and_8_check_the_window_of_the_cut_sequence(
    mode: int, pre: int, next_: int, q_len: list[int], kv_len: list[int], legal: bool
) -> None:
    assert (packed_window(mode, pre, next_, np.array(q_len), np.array(kv_len)) is True) is legal


def test_prefix_check_reports_prefix_outside_allowed_bounds() -> None:
    for q_len, kv_len, prefix in product(range(4), range(5), range(-1, 6)):
        low = max(0, kv_len - q_len) if q_len else 0
        answer = prefix_fits(np.array([0, prefix]), np.array([3, q_len]), np.array([2, kv_len]))
        assert (answer is True) is (low <= prefix <= kv_len)
        assert answer is True or answer == f"prefix[1]={prefix}, outside [{low}, {kv_len}]"
    assert prefix_fits(None, np.array([1, 1]), np.array([1, 1])) == "None for 2 sequences"
    assert prefix_fits(np.array([1]), np.array([1, 1]), np.array([1, 1])) == "1 values for 2 sequences"


@pytest.mark.parametrize(
    ("ends", "answer", "tokens"),
    [
        ([3, 8], True, 8),
        ([0, 3, 3, 8], True, 8),
        ([3, 8, 0, 0], True, 8),
        ([0, 0], True, 0),
        ([3, 0, 8], "item 1: 0 after 3", 8),
        ([8, 3], "item 1: 3 after 8", 8),
        ([-1, 3], "item 0: -1 after 0", 3),
        ([3, 8, 0, 5], "item 2: 0 after 8", 8),
        ([3, -(2**63)], f"item 1: {-(2**63)} after 3", 3),
        ([2**63 - 1, -(2**63), 0], f"item 1: {-(2**63)} after {2**63 - 1}", 2**63 - 1),
    ],
)
def test_cumulative_lengths_check_reports_first_descending_item(
    ends: list[int], answer: bool | str, tokens: int
) -> None:
    assert rising(np.array(ends)) == answer
    assert last_end(np.array(ends)) == tokens


@pytest.mark.parametrize("form", ["corner", "diagonal", "batch"])
def test_bias_table_check_refuses_masks_visible_beyond_the_diagonal(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stored rows replace the usual 1024. Only the mask's parts of sequences are read."""
    monkeypatch.setattr(checks, "TABLE_ROWS", 2)
    q_len, kv_len = np.array([4, 2, 3]), np.array([5, 4, 3])
    starts = np.cumsum(q_len) - q_len, np.cumsum(kv_len) - kv_len
    shape = {"corner": (4, 5), "diagonal": (9, 12), "batch": (3, 1, 4, 5)}[form]
    causal = torch.ones(shape, dtype=torch.uint8)
    for b, (rows, keys) in enumerate(zip(q_len, kv_len, strict=True)):
        table = causal[b, 0] if form == "batch" else causal
        row, key = (starts[0][b], starts[1][b]) if form == "diagonal" else (0, 0)
        table[row : row + rows, key : key + keys] *= torch.ones(rows, keys, dtype=torch.uint8).triu(keys - rows + 1)
    if form == "corner":
        causal[:] = torch.ones(4, 5, dtype=torch.uint8).triu(1)

    def reaches(mask: torch.Tensor, next_: int = INFINITE) -> bool | str:
        return table_reaches(0, mask, INFINITE, next_, None, q_len, kv_len)

    assert reaches(causal) is True
    wrong = causal.clone()
    row, key = (starts[0][2], starts[1][2] + 1) if form == "diagonal" else (0, 1)
    table = wrong[2, 0] if form == "batch" else wrong
    table[row, key] = 0
    assert reaches(wrong) == "sequence 2: keys beyond the diagonal are visible to rows before the last 2"
    assert reaches(wrong.to("meta")) is True
    if form == "batch":
        assert reaches(wrong, next_=0) is True, "the window hides it"
    assert table_reaches(2, wrong, 0, 0, None, q_len, kv_len) is True
    assert table_reaches(1, None, 0, 0, None, q_len, kv_len) != True  # noqa: E712


def test_window_check_reports_visible_mask_element_outside_window() -> None:
    mask = torch.ones(3, 4, dtype=torch.uint8)
    mask[0, 0] = mask[2, 3] = 0
    one = np.array([3]), np.array([4])
    text = "a visible element outside the window of sequence {}, at {} of its mask"
    assert window_holds_mask(mask, 0, 1, *one) is True
    assert window_holds_mask(mask, 0, 0, *one) == text.format(0, "[2, 3]")
    assert window_holds_mask(mask[None, None], -1, INFINITE, *one) == text.format(0, "[0, 0, 0, 0]")
    assert window_holds_mask(mask, 0, 0, np.array([2, 3, 3]), np.array([4, 3, 4])) == text.format(2, "[2, 3]")
    assert window_holds_mask(mask, 0, 0, np.array([2, 3]), np.array([4, 3])) is True, "the corner is not read"
    each = torch.stack((torch.ones_like(mask), mask))[:, None]
    assert window_holds_mask(each, 0, 0, np.array([3, 3]), np.array([4, 4])) == text.format(1, "[0, 2, 3]")
    none = np.zeros(0, np.int64)
    assert window_holds_mask(torch.ones(0, 1, 3, 4), 0, 0, none, none) is True


def test_window_check_counts_rows_and_keys_within_each_packed_sequence() -> None:
    """The mask covers all tokens; pairs of different sequences are not read."""
    q_len, kv_len = np.array([2, 3]), np.array([5, 4])
    mask = torch.zeros(5, 9, dtype=torch.uint8)
    mask[:2, :5] = 1 - torch.eye(2, 5)
    mask[2:, 5:] = 1 - torch.eye(3, 4)
    assert window_holds_mask(mask, 0, 0, q_len, kv_len) is True
    mask[4, 8] = 0
    wrong = window_holds_mask(mask, 0, 0, q_len, kv_len)
    assert wrong == "a visible element outside the window of sequence 1, at [2, 3] of its mask"


def test_compressed_mask_check_recognises_masks_of_modes_3_4_and_6() -> None:
    square = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    assert is_compressed_mask(square, 3)
    assert is_compressed_mask(square[None, None].to(torch.uint8) * 7, 4)
    assert not is_compressed_mask(square.mT, 3)
    tall = torch.cat((square, torch.zeros(1024, 2048, dtype=torch.bool)))
    tall[2048:, 1024:] = True
    assert is_compressed_mask(tall, 6)
    tall[2048, 0] = True
    assert not is_compressed_mask(tall, 6)
