"""Mistakes in the second source of keys: compressed keys, each of several tokens."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from fusion_attention.ir.mask import INFINITE
from fusion_attention.judging.mistakes.kinds import Case, Mistake, Try
from fusion_attention.judging.setting import Setting

Edges = Iterator[tuple[str, np.ndarray]]
BOUND = (
    "compressed-bound", "Compressed keys are visible too early or too late.",
    "A row at position p sees (p + 1) // ratio of them: each from its last token on.",
)  # fmt: skip
RESIDUAL = (
    "compressed-residual", "Positions are computed from the compressed keys alone, without the tokens after them.",
    "The residual is tokens % ratio; with keys % ratio rows see future tokens.",
)  # fmt: skip


def bounds(hi: np.ndarray, ratio: int) -> Edges:
    """Yields (detail, other hi) for the bound (row + hi) // ratio of visible compressed keys of `ratio` tokens."""
    yield "position // ratio: a token late", hi - 1
    yield "position // ratio + 1: before their last token", hi + ratio - 1
    if ratio > 2:
        yield "a token early", hi + 1
    yield "one key fewer", hi - ratio
    yield "one key more", hi + ratio


def residuals(hi: np.ndarray, q_len: np.ndarray, keys: np.ndarray, ratio: int) -> Edges:
    """Yields (detail, wrong upper edge of the band over compressed keys), from a wrong number of tokens after the last
    one.

    All arrays have a number per sequence: hi is the correct edge, tokens - q_len + 1; keys: numbers of compressed keys,
    of `ratio` tokens each.
    """
    residual = hi + q_len - 1 - keys * ratio
    for detail, other in (("keys % ratio for tokens % ratio", keys % ratio), ("0 for tokens % ratio", 0 * keys)):
        if (other != residual).any():
            yield detail, hi - residual + other


def _bounded(s: Setting, hi: np.ndarray) -> Iterator[Setting]:
    """Yields the call s with another upper edge `hi` of the band over compressed keys, if a row then sees others."""
    changed, ratio = s.of_compressed(hi), s.problem.compressed_ratio
    for b, rows in enumerate(s.extents.q_len.tolist()):
        row = np.arange(rows)
        if (s.extents.compressed_end(b, row, ratio) != changed.extents.compressed_end(b, row, ratio)).any():
            yield changed
            return


@partial(Mistake, *BOUND)
def compressed_bound(case: Case) -> Iterator[Try]:
    s, second = case.setting, case.setting.extents.compressed
    if second is not None:
        for detail, hi in bounds(second.hi, s.problem.compressed_ratio):
            yield from (Try(detail, changed) for changed in _bounded(s, hi))


@partial(Mistake, *RESIDUAL)
def compressed_residual(case: Case) -> Iterator[Try]:
    s, second = case.setting, case.setting.extents.compressed
    if second is not None:
        ratio = s.problem.compressed_ratio
        for detail, hi in residuals(second.hi, s.extents.q_len, second.kv_len, ratio):
            yield from (Try(detail, changed) for changed in _bounded(s, hi))


@partial(
    Mistake, "compressed-unmasked", "All compressed keys are visible to every row.",
    "cmp_mask_mode is 0 by default; pass 3 (and ori_mask_mode 4 with its window).",
)  # fmt: skip
def compressed_unmasked(case: Case) -> Iterator[Try]:
    s, second = case.setting, case.setting.extents.compressed
    if second is not None:
        for every in _bounded(s, np.full_like(second.hi, INFINITE)):
            yield Try("", every)
            e = every.extents
            lo, hi = np.full_like(e.lo, -INFINITE), np.full_like(e.hi, INFINITE)
            yield Try("and all keys of the window's source", every.of_extents(lo=lo, hi=hi))


@partial(
    Mistake, "compressed-missing", "Rows read no compressed keys.",
    "Is cmp_kv passed, and do lists count from the sequence's first compressed key?",
)  # fmt: skip
def compressed_missing(case: Case) -> Iterator[Try]:
    s, second = case.setting, case.setting.extents.compressed
    if second is not None:
        yield from (Try("", changed) for changed in _bounded(s, np.full_like(second.hi, -INFINITE)))


MISTAKES = (compressed_bound, compressed_residual, compressed_unmasked, compressed_missing)
