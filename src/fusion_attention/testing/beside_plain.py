"""A result beside a plain program: its error against golden, counted in the error that a plain program makes.

For tests whose golden result is a formula of their own, without the expected size of its error. A ratio of two errors
over few numbers is a matter of luck: what has an expected size is judged by compare().
"""

from __future__ import annotations

import math

import numpy as np
import torch

from fusion_attention.testing.cases import Tensor

FLT_MAX = float(np.finfo(np.float32).max)
# How often a plain program's mean and RMS error, and its largest error, a result may have.
MEAN, LARGEST = 2, 10


def epsilon(dtype: torch.dtype, golden: Tensor, kv_len: int) -> Tensor:
    """What no implementation can be asked to resolve: a number, or (low dtypes) one per row of the last axis."""
    size = golden.abs().masked_fill(~golden.isfinite() | (golden.abs() >= FLT_MAX), 0)
    if dtype in (torch.float32, torch.float64):
        return 2.0**-24 * math.sqrt(kv_len) * size.amax()
    if not dtype.is_floating_point:
        return torch.ones((), dtype=torch.float64)  # A value beside the middle of two integers may become either.
    info = torch.finfo(dtype)
    exponent = torch.frexp(size.amax(-1, keepdim=True).clamp(min=info.smallest_normal))[1] - 1
    return torch.exp2(exponent.double()) * (info.eps / 2)


def beside_plain(name: str, ours: Tensor, golden: Tensor, plain: Tensor, kv_len: int, terms: float = 0.0) -> None:
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
