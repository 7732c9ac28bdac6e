"""Whether a result is as good as can be asked: its error against golden, measured by the error of a plain program."""

from __future__ import annotations

import math

import numpy as np

from fusion_attention.judging.standards import FLT_MAX, LARGEST, MEAN, epsilon
from fusion_attention.testing.cases import Case, Results, Tensor

__all__ = ["check", "compare", "epsilon"]


def compare(name: str, ours: Tensor, golden: Tensor, plain: Tensor, kv_len: int, terms: float = 0.0) -> None:
    """Asserts that ours is about as near to golden as plain is.

    error(ours) <= error(plain) * 2 in mean and RMS, * 10 in its largest element, each plus epsilon(); places that are
    not finite, or as large as FLT_MAX, must be golden's exactly.

    Args:
        name: of the output.
        ours, golden, plain: it, in float64, and by a plain program.
        kv_len: how many terms a number of it sums.
        terms: the absolute terms behind a number together, where they cancel: what float32 may lose of them is more
            than golden's size tells, and plain need not lose it.

    Raises:
        AssertionError: naming the output, the coordinates and the three values.
    """
    assert ours.shape == golden.shape == plain.shape, f"{name}: shapes {ours.shape}, {golden.shape}, {plain.shape}"
    if not golden.numel():
        return
    mine, measure = ours.double(), plain.double()
    special = ~golden.isfinite() | (golden.abs() >= FLT_MAX)

    def report(wrong: Tensor, what: str) -> str:
        first = int(wrong.reshape(-1).int().argmax())
        at = tuple(int(n) for n in np.unravel_index(first, tuple(wrong.shape)))
        return f"{name}{list(at)}: {what}: ours {mine[at]:.9g}, golden {golden[at]:.9g}, plain {measure[at]:.9g}"

    strange = ~mine.isfinite() | (mine.abs() >= FLT_MAX)
    same = (strange == special) & ((mine == golden) | (mine.isnan() & golden.isnan()) | ~special)
    assert same.all(), report(~same, "a value that is not finite, or should not be")
    error, allowed = ((t - golden).masked_fill(special, 0).abs() for t in (mine, measure))
    eps = (epsilon(ours.dtype, golden, kv_len) + 2.0**-24 * math.sqrt(kv_len) * terms).expand_as(error)
    worst = error == error.amax()
    limits = (
        ("mean error", error.mean(), MEAN * allowed.mean() + eps.mean()),
        ("RMS error", error.square().mean().sqrt(), MEAN * allowed.square().mean().sqrt() + eps.square().mean().sqrt()),
    )
    for what, found, limit in limits:
        assert found <= limit, report(worst, f"{what} {found:.3g} > {limit:.3g}, worst element")
    far = error > LARGEST * allowed.amax() + eps
    assert not far.any(), report(far, f"error {error[far].amax():.3g}, plain's largest {allowed.amax():.3g}")


def check(case: Case, ours: Results, golden: Results, plain: Results) -> None:
    """compare() for every output of a case."""
    assert ours.keys() == golden.keys() == plain.keys(), f"{case.id}: {[*ours]}, {[*golden]}, {[*plain]}"
    for name in golden:
        compare(f"{case.id}: {name}", ours[name], golden[name], plain[name], max(case.kv_len, default=0))
