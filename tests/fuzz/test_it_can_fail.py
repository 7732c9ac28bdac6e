"""Planted mistakes in formulas: each must be detected within a few dozen calls."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from . import attention, caches, decode, dense, formulas, indexer, loss, sparse, training
from .core import Mismatch, Value, drawn, judge
from .formulas import Rows

Patch = pytest.MonkeyPatch
Mistake = Callable[[Patch], None]
CALLS = 150


def wrong(family: str, number: int) -> bool:
    try:
        judge(drawn(family, number))
    except Mismatch:
        return True
    return False


def around(owner: Any, name: str) -> Callable[[Callable[..., Any]], Mistake]:
    """Returns a decorator for a function that replaces owner.name; it receives the original as first argument."""

    def mistaken(wrong: Callable[..., Any]) -> Mistake:
        @functools.wraps(wrong)
        def patch(monkeypatch: Patch) -> None:
            right = getattr(owner, name)
            monkeypatch.setattr(owner, name, lambda *args, **how: wrong(right, *args, **how))

        return patch

    return mistaken


def of_rows(change: Callable[[Rows], dict[str, Any]]) -> Mistake:
    """Returns a mistake in the inputs of one sequence; change: function of Rows that returns changed fields."""

    @around(Rows, "__post_init__")
    def changed(right: Callable[[Rows], None], self: Rows) -> None:
        vars(self).update(change(self))
        right(self)

    return changed


def without_a_key(count: torch.Tensor) -> torch.Tensor:
    """Returns counts [N, R, K] in which the last row lacks its last visible key."""
    columns = count[:, -1].nonzero() if count.numel() else []
    if len(columns):
        count = count.clone()
        count[columns[-1][0], -1, columns[-1][1]] = 0
    return count


def with_a_tile(count: torch.Tensor) -> torch.Tensor:
    """Returns counts [N, R, K] with an unmasked corner of 16 x 16."""
    count = count.clone()
    count[:, :16, :16] = count[:, :16, :16].clamp(min=1)
    return count


OF_ROWS: dict[str, Mistake] = {
    "scale": of_rows(lambda r: {"scale": r.scale * 1.01}),
    "heads": of_rows(lambda r: {"q": r.q.roll(1, 0)}),
    "a key less": of_rows(lambda r: {"count": without_a_key(r.count)}),
    "a tile more": of_rows(
        lambda r: {"count": with_a_tile(r.count), "k": r.k.nan_to_num(0, 0, 0), "v": r.v.nan_to_num(0, 0, 0)}
    ),
    "no bias": of_rows(lambda r: {"bias": None}),
    "another sink": of_rows(lambda r: {} if r.sink is None else {"sink": r.sink - 0.1}),
    "no divisor": of_rows(lambda r: {} if r.keep is None else {"keep": (r.keep > 0).double()}),
    "duplicates once": of_rows(lambda r: {"count": r.count.clamp(max=1)}),
    "no means": of_rows(lambda r: {"mean": None}),
}


@around(dense, "given_bits")
def big_endian(right: Any, bits: np.ndarray, first: int, shape: tuple[int, int, int]) -> torch.Tensor:
    flat = np.unpackbits(bits)[first : first + int(np.prod(shape))]
    return torch.from_numpy(flat.reshape(shape).astype(np.float64))


@around(attention, "draw_tiles")
def next_row_of_bits(right: Any, batch: dense.Batch, call: dict[str, Any]) -> dense.Matrix:
    result = right(batch, call)
    result.values = result.values.roll(1, -2)
    return result


@around(formulas, "philox")
def next_seed(right: Any, counter: Any, seed: int) -> Any:
    return right(counter, seed + 1)


@around(formulas, "grouped")
def first_head_alone(right: Any, by_head: torch.Tensor, n: int) -> torch.Tensor:
    return by_head.unflatten(0, (n, -1))[:, 0]


@around(formulas.Slopes, "__post_init__")
def no_delta(right: Any, self: formulas.Slopes) -> None:
    """Omits delta from dS: dS = P * dP."""
    self.out = torch.zeros_like(self.out)
    right(self)


def other_order(monkeypatch: Patch) -> None:
    """Uses the wrong order of packed statistics."""
    monkeypatch.setattr(training.Plan, "token_major", property(lambda self: self.call.get("softmax_layout") != "TND"))


@around(caches.Cache, "pack")
def swapped_nibbles(right: Any, self: caches.Cache, parts: Any) -> list[torch.Tensor]:
    return [(p & 15) << 4 | p >> 4 for p in right(self, parts)]


@around(decode, "draw_bands")
def no_window(right: Any, s: decode.Step, call: dict[str, Any]) -> None:
    right(s, call)
    s.counts = [torch.ones_like(count) for count in s.counts]


@around(decode, "stored_out")
def wrong_rounding(right: Any, s: decode.Step, layout: str, rows: list[Rows]) -> Value:
    """Lowers int8 results by 1, like truncation in place of rounding."""
    result = right(s, layout, rows)
    return result if s.out_scale is None else Value(result.value - 1, result.error, result.dtype)


def holes_are_passed(monkeypatch: Patch) -> None:
    """Reads list entries after a -1 too."""

    def wrong(entries: torch.Tensor, vis: torch.Tensor, block: int) -> torch.Tensor:
        return (torch.arange(entries.shape[1]) < -(-vis // block)[:, None]) & (entries >= 0)

    monkeypatch.setattr(sparse, "read_entries", wrong)
    monkeypatch.setattr(indexer, "read_entries", wrong)


@around(indexer, "scatter_slots")
def slots_close_up(right: Any, slots: torch.Tensor, entries: torch.Tensor, read: torch.Tensor, keys: int) -> Any:
    """Assigns gradients to list slots as if skipped entries were absent."""
    moved = slots.gather(1, (read.int().cumsum(1) - 1).clamp(min=0))
    return right(moved, entries, read, keys)


@around(indexer, "fair")
def ties_from_behind(right: Any, scores: Any, chosen: torch.Tensor, vis: torch.Tensor, count: int) -> torch.Tensor:
    want = right(scores, chosen, vis, count)
    for row, n in enumerate(vis.tolist()):
        order = np.lexsort((-np.arange(n), -scores.value[row, :n].numpy()))[:count]
        want[row, : len(order)] = torch.from_numpy(order.copy())
    return want


@around(indexer.Scores, "gradients")
def no_gate(right: Any, self: indexer.Scores, *given: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    result = right(self, *given)
    ds = given[0] * self.w.T[..., None]
    return result | {"dq": (ds @ self.k, result["dq"][1])}


@around(loss, "_target")
def loss_of_means(right: Any, p: loss.Plan, s: int) -> tuple[torch.Tensor, ...]:
    return tuple(1.02 * term for term in right(p, s))


def no_clamp(monkeypatch: Patch) -> None:
    monkeypatch.setattr(loss, "LEAST", 1e-30)


# Mistakes by family: names in OF_ROWS, and other mistakes.
MISTAKES: dict[str, tuple[tuple[str, ...], tuple[Mistake, ...]]] = {
    "attention": (
        ("scale", "heads", "a key less", "a tile more", "another sink", "no bias", "no divisor", "no means"),
        (big_endian, next_seed, first_head_alone, no_delta, next_row_of_bits),
    ),
    "training": (
        ("scale", "heads", "a key less", "a tile more", "another sink", "no bias", "no divisor", "no means"),
        (big_endian, next_seed, first_head_alone, no_delta, other_order),
    ),
    "decode": (("scale", "heads", "a key less", "no bias"), (swapped_nibbles, no_window, wrong_rounding)),
    "infer": (("scale", "heads", "a key less", "no bias"), ()),
    "sparse": (
        ("scale", "heads", "a key less", "a tile more", "another sink", "duplicates once"),
        (holes_are_passed, no_delta),
    ),
    "indexer": ((), (holes_are_passed, slots_close_up, ties_from_behind, no_gate)),
    "loss": (("scale",), (loss_of_means, no_clamp, no_gate)),
}
EACH = [
    pytest.param(family, mistake, id=f"{family}-{name}")
    for family, (of_row, others) in MISTAKES.items()
    for name, mistake in [(name, OF_ROWS[name]) for name in of_row] + [(m.__name__, m) for m in others]
]


@pytest.mark.parametrize(("family", "mistake"), EACH)
def test_planted_mistake_is_detected_within_150_calls(family: str, mistake: Mistake, monkeypatch: Patch) -> None:
    with monkeypatch.context() as patch:
        mistake(patch)
        number = next((n for n in range(CALLS) if wrong(family, n)), None)
    assert number is not None
    judge(drawn(family, number))  # without the mistake it is right
