"""Mistakes in the second source of keys: compressed keys, each of several tokens."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np

from fusion_attention.ir.mask import INFINITE
from fusion_attention.ir.problem import Compressed
from fusion_attention.judging.editable_call import Setting
from fusion_attention.judging.mistakes.kinds import Case, Mistake, Try

Edges = Iterable[tuple[str, np.ndarray]]
BOUND = (
    "compressed-bound", "Compressed keys are visible too early or too late.",
    "A row at position p sees (p + 1) // ratio of them: each from its last token on.",
)  # fmt: skip
RESIDUAL = (
    "compressed-residual", "Positions are computed from the compressed keys alone, without the tokens after them.",
    "The residual is tokens % ratio; with keys % ratio rows see future tokens.",
)  # fmt: skip


def bounds(hi: np.ndarray, ratio: int) -> Edges:
    """Yields (description, wrong hi) of mistakes in the number (row + hi) // ratio of visible compressed keys; ratio:
    tokens of a compressed key; hi: a number per sequence."""
    yield "position // ratio: a token late", hi - 1
    yield "position // ratio + 1: before their last token", hi + ratio - 1
    if ratio > 2:
        yield "a token early", hi + 1
    yield "one key fewer", hi - ratio
    yield "one key more", hi + ratio


def residuals(hi: np.ndarray, q_len: np.ndarray, keys: np.ndarray, ratio: int) -> Edges:
    """Yields (description, wrong upper edge of the band over compressed keys), from a wrong number of tokens after the
    last one. Arrays have a number per sequence: hi is the correct edge, tokens - q_len + 1; keys: numbers of compressed
    keys, of `ratio` tokens each."""
    residual = hi + q_len - 1 - keys * ratio
    for detail, other in (("keys % ratio for tokens % ratio", keys % ratio), ("0 for tokens % ratio", 0 * keys)):
        if (other != residual).any():
            yield detail, hi - residual + other


def _bounded(s: Setting, hi: np.ndarray) -> Iterator[Setting]:
    """Yields the call s with another upper edge `hi` of the compressed keys' band, if a query then sees other keys."""
    changed, ratio = s.of_compressed(hi), s.problem.compressed_ratio
    for b, rows in enumerate(s.extents.q_len.tolist()):
        row = np.arange(rows)
        if (s.extents.compressed_end(b, row, ratio) != changed.extents.compressed_end(b, row, ratio)).any():
            yield changed
            return


def _tries(case: Case, edges: Callable[[Setting, Compressed], Edges]) -> Iterator[Try]:
    """Yields variants of a call with compressed keys, each with a wrong upper edge of their band from edges()."""
    s, second = case.setting, case.setting.extents.compressed
    for detail, hi in () if second is None else edges(s, second):
        yield from (Try(detail, changed) for changed in _bounded(s, hi))


def compressed_unmasked(case: Case) -> Iterator[Try]:
    for way in _tries(case, lambda s, keys: [("", np.full_like(keys.hi, INFINITE))]):
        yield way
        e = way.setting.extents
        lo, hi = np.full_like(e.lo, -INFINITE), np.full_like(e.hi, INFINITE)
        yield Try("and all keys of the window's source", way.setting.of_extents(lo=lo, hi=hi))


MISTAKES = (
    Mistake(*BOUND, partial(_tries, edges=lambda s, keys: bounds(keys.hi, s.problem.compressed_ratio))),
    Mistake(*RESIDUAL, partial(
        _tries, edges=lambda s, keys: residuals(keys.hi, s.extents.q_len, keys.kv_len, s.problem.compressed_ratio)
    )),
    Mistake("compressed-unmasked", "All compressed keys are visible to every row.",
            "cmp_mask_mode is 0 by default; pass 3 (and ori_mask_mode 4 with its window).", compressed_unmasked),
    Mistake("compressed-missing", "Rows read no compressed keys.",
            "Is cmp_kv passed, and do lists count from the sequence's first compressed key?",
            partial(_tries, edges=lambda s, keys: [("", np.full_like(keys.hi, -INFINITE))])),
)  # fmt: skip
