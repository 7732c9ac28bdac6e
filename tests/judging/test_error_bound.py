"""The error bound: limits, ratios of errors, their places, and expected errors, which match simulation."""

import math

import numpy as np
import pytest
import torch
from support.fused import FusedCase
from support.fused import arguments as fused_arguments

import fusion_attention as fa
from fusion_attention.contract import bind
from fusion_attention.judging.chi_square_limits import Errors, Expected, limit, ratios
from fusion_attention.judging.expected_error import _flips, rounding, stored
from fusion_attention.judging.formulas import softmax
from fusion_attention.judging.outputs import setting_of
from fusion_attention.ops import RECORDS
from fusion_attention.testing import Case, arguments, compare, expected
from fusion_attention.testing.estimated_rounding_errors import drawn

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


# ------------------------------------------------------------------------------------------------------------- limits


def test_error_limits_are_chi_square_quantiles() -> None:
    """The limit of one element is a quantile of the normal distribution; with more elements it decreases to 2."""
    assert limit(1, 1) == pytest.approx(4.8916, abs=1e-3)  # two-sided 1e-6
    assert limit(1, 10**6) == pytest.approx(7.1305, abs=1e-3)  # 1e-12
    assert limit(10, 1) == pytest.approx(math.sqrt(46.863 / 10), abs=1e-3)
    assert limit(10**6, 1) == 2.0
    assert limit(1, 1, draws=16) > limit(1, 1, draws=64) > limit(1, 1)


@pytest.mark.parametrize("rows", [1, 5, 40, 3000])
def test_errors_of_the_expected_size_never_fail(rows: int) -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        errors = Errors([rows], 3, 24)
        errors.add(0, slice(0, 3), slice(0, rows), torch.randn(3, rows, 24, generator=generator).square())
        assert not errors.fails()
        assert not any(w.any() for w in errors.wrong())


@pytest.mark.parametrize(
    ("heads", "rows", "columns", "by", "kind"),
    [
        (slice(1, 2), slice(70, 71), slice(3, 4), 60.0, "element"),
        (slice(0, 1), slice(70, 71), slice(0, 24), 9.0, "row"),
        (slice(2, 3), slice(64, 96), slice(0, 24), 3.0, "tile"),
        (slice(2, 3), slice(64, 96), slice(16, 24), 3.2, "columns"),
        (slice(0, 3), slice(0, 500), slice(0, 24), 2.2, "whole"),
    ],
)
def test_fault_in_element_row_tile_or_columns_is_located(
    heads: slice, rows: slice, columns: slice, by: float, kind: str
) -> None:
    result = torch.randn(3, 500, 24, generator=torch.Generator().manual_seed(1)).square()
    result[heads, rows, columns] = by * by
    errors = Errors([500], 3, 24)
    errors.add(0, slice(0, 3), slice(0, 500), result)
    assert kind in {look.kind for _, look in errors.fails()}
    assert errors.wrong()[0][heads, rows].any()


@pytest.mark.parametrize("rows", [2048, 9001, 40_000])
def test_fault_in_one_tile_is_detected_in_outputs_of_any_length(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    right = torch.randn(1, rows, 16, generator=generator).square()
    for first in (0, 992, rows // 64 * 32, (rows - 64) // 32 * 32):
        result = right.clone()
        result[0, first : first + 32] *= 12
        errors = Errors([rows], 1, 16)
        errors.add(0, slice(0, 1), slice(0, rows), result)
        assert "tile" in {look.kind for _, look in errors.fails()}, first


def test_errors_added_in_row_blocks_equal_errors_added_at_once() -> None:
    result = torch.rand(2, 100, 20)
    full, pieces = Errors([100], 2, 20), Errors([100], 2, 20)
    full.add(0, slice(0, 2), slice(0, 100), result)
    for first in range(0, 100, 30):
        rows = slice(first, min(first + 30, 100))
        pieces.add(0, slice(0, 2), rows, result[:, rows])
    assert full.z == pieces.z
    assert full.z_tile == pieces.z_tile


# ------------------------------------------------------------------------------------------------------------- ratios


def test_nan_and_infinity_must_match_the_expected_value() -> None:
    value = torch.tensor([1.0, math.nan, math.inf, -math.inf, 0.0, 7e4, -7e4], dtype=torch.float64)
    size = torch.full((7,), 1e-3, dtype=torch.float64)
    right = torch.tensor([1.0, math.nan, math.inf, -math.inf, 0.0, math.inf, -65504.0], dtype=torch.float16)
    assert not ratios(right, value, size).any()
    for at in range(7):
        wrong = right.clone()
        wrong[at] = 0.5 if right[at].isnan() else math.nan
        assert ratios(wrong, value, size)[at] == math.inf
    assert ratios(-right, value, size)[2:4].isinf().all()
    assert ratios(-right, value, size)[5] == math.inf  # an overflow of the other sign


def test_values_with_zero_expected_error_must_be_equal() -> None:
    exact = Expected(torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64))
    compare("x", torch.ones(3), exact)
    with pytest.raises(AssertionError, match=r"x: .*ours 1\.0000001"):
        compare("x", torch.tensor([1.0, 1.0000001, 1.0]), exact)


def test_integer_errors_are_measured_from_the_rounding_interval() -> None:
    value = torch.tensor([2.49, 2.5, 2.51, 100.0], dtype=torch.float64)
    size = torch.full((4,), 0.01, dtype=torch.float64)
    near = ratios(torch.tensor([2, 2, 3, 100], dtype=torch.int8), value, size)
    assert float(near.amax()) < 1e-9
    assert float(ratios(torch.tensor([3, 3, 2, 99], dtype=torch.int8), value, size).sqrt()[3]) == pytest.approx(50)


def test_compare_raises_on_larger_errors_of_32_tokens_of_a_head() -> None:
    """Half of every 32 rows in memory are those of the other head, with errors of the expected size."""
    wanted = Expected(torch.randn(1, 256, 2, 16, dtype=torch.float64), torch.full((1, 256, 2, 16), 1e-3).double())
    ours = wanted.value + wanted.size * torch.randn(wanted.size.shape, dtype=torch.float64)
    compare("x", ours, wanted)
    ours[:, 64:96, 1] += 2.2e-3
    with pytest.raises(AssertionError, match=r"the error of a tile is .* of its expected size"):
        compare("x", ours, wanted)


def test_compare_raises_on_different_shapes() -> None:
    with pytest.raises(AssertionError, match="shapes"):
        compare("x", torch.ones(2), Expected(torch.ones(3), torch.ones(3)))


# ---------------------------------------------------------------------------------------------------- expected errors


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_expected_storage_error_matches_mean_rounding_error(dtype: torch.dtype) -> None:
    """rounding() is the mean for numbers with evenly distributed logarithms."""
    x = torch.exp2(torch.rand(200_000, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 6 - 3)
    error = (x.to(dtype).double() - x).square()
    assert float((error / stored(x, dtype)).mean()) == pytest.approx(1.0, rel=0.02)
    assert float((error / x.square()).mean()) == pytest.approx(rounding(dtype), rel=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_expected_error_of_subnormal_numbers_allows_flush_to_zero(dtype: torch.dtype) -> None:
    least = torch.finfo(dtype).smallest_normal
    lost = torch.rand(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * least
    assert float((lost.square() / stored(lost, dtype)).mean()) == pytest.approx(1.0, rel=0.02)
    half_least = torch.finfo(torch.float16).smallest_normal / 2  # programs hold float16's
    assert float(stored(torch.tensor(half_least), torch.float16).sqrt()) < half_least / 1000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_expected_output_error_matches_simulated_roundings(dtype: torch.dtype) -> None:
    case = Case(q_len=(24,), kv_len=(40,), heads_q=1, heads_kv=1, dtype=str(dtype).removeprefix("torch."))
    args = arguments(case)
    wanted = expected(case, args)["out"]
    q, k, v = (args[n].double()[:, :, 0][0] for n in ("query", "key", "value"))
    weights = (case.scale * (q @ k.mT)).softmax(-1)
    generator, total = torch.Generator().manual_seed(3), torch.zeros(24, v.shape[1], dtype=torch.float64)
    draws, each = 3000, math.sqrt(rounding(dtype))
    for _ in range(draws):
        noise = torch.randn(weights.shape, dtype=torch.float64, generator=generator) * each
        total += ((weights * (1 + noise)) @ v - weights @ v).square()
    spread = total / draws + stored(weights @ v, dtype)
    ratio = (spread / wanted.size[0, :, 0].square()).sqrt()
    assert float(ratio.mean()) == pytest.approx(1.0, rel=0.03)
    assert float((ratio - 1).abs().amax()) < 0.1


def test_expected_error_with_dropout_includes_dropped_keys() -> None:
    """The softmax divisor contains the errors of all scores, also of dropped keys."""
    case = Case(q_len=(24,), kv_len=(7,), heads_q=1, heads_kv=1, keep_prob=0.7, dropout="bits")
    args = arguments(case)
    args["query"][..., 0], args["key"][..., 0] = 7.3, 31.7  # every score of a row is larger by the same
    bits = np.unpackbits(args["drop_mask"].numpy(), count=24 * 7, bitorder="little")
    q, k, v = (args[n].double()[:, :, 0][0] for n in ("query", "key", "value"))
    keep = torch.from_numpy(bits).view(24, 7) / 0.7

    by_draws = drawn(lambda: (case.scale * (q @ k.mT)).softmax(-1) * keep @ v, torch.float32, draws=200)
    ratio = by_draws.size / expected(case, args)["out"].size[0, :, 0].where(by_draws.size > 0, 1.0)
    assert 0.4 < float(ratio.square().mean().sqrt()) < 1.5
    assert float(ratio.amax()) < 3


def test_integer_weights_that_may_round_either_way_are_predicted() -> None:
    """Only weights within their error of a rounding midpoint may flip, and the maximum's weight never does."""
    case = FusedCase(q_len=(200,), kv_len=(40,), dim=32, dim_v=32, full=True)
    op = RECORDS["npu_fused_infer_attention_score"]
    assert op.lower is not None
    call = op.lower(bind(op, fused_arguments(case)))
    setting, _ = setting_of(call, call.results())
    s = softmax(setting.block(0, slice(0, 4), slice(0, 200)))
    c, e = torch.tensor([127.0]).double(), 1e-8
    flipped, result = torch.zeros_like(s.shown, dtype=torch.bool), _flips(c, s, e, 0.0, torch.float64) > 0
    generator, scaled_weights = torch.Generator().manual_seed(5), c * (s.shown - s.top).exp()
    for _ in range(200):
        noise = torch.randn(scaled_weights.shape, dtype=torch.float64, generator=generator) * math.sqrt(e)
        flipped |= (scaled_weights * (1 + noise * (s.shown != s.top))).round() != scaled_weights.round()
    assert flipped.any()
    assert not (flipped & ~result).any()
    assert result.sum() < 5 * flipped.sum() + 5


@pytest.mark.parametrize(
    ("invalid", "says"), [(0.0, "rows are zero"), (math.nan, "NaN"), (None, "is a copy of row 0 of head 0")], ids=str
)
def test_wrong_rows_are_described_as_zero_nan_or_copied(invalid: float | None, says: str) -> None:
    given = dict(zip("qkv", torch.randn(3, 1, 100, 1, 32), strict=True))
    out = fa.attention(**given)
    out[:, 60:64] = out[:, :1].clone() if invalid is None else invalid
    for standard in ("error-bound", "cann-0.5%", "cann-double"):
        result = fa.judge("attention", given, {"out": out}, backends=False, standard=standard)
        assert result.verdict == "wrong", standard
        assert says in str(result)
