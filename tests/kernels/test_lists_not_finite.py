"""Values that are not finite reach the same gradients as in golden: selected keys, the indexer and its loss."""

from functools import partial
from typing import Any

import pytest
from support import not_finite

from fusion_attention.torch_ops import eager

pytestmark = pytest.mark.filterwarnings("ignore::fusion_attention.contract.ContractWarning")
run = partial(eager.run, backend="triton")


@pytest.mark.parametrize(("what", "name", "at", "fill"), not_finite.HIDDEN, ids=lambda value: str(value)[-12:])
def test_triton_gradients_match_reference_if_zero_weights_hide_nan_or_inf(
    what: Any, name: str, at: tuple[int, ...], fill: float
) -> None:
    not_finite.hides(what, name, at, fill, run)


@pytest.mark.slow
@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize(("family", "case", "names"), not_finite.CASES, ids=lambda value: getattr(value, "id", None))
def test_triton_gradients_match_reference_for_nan_or_infinity_in_any_input(
    family: not_finite.Family, case: Any, names: tuple[str, ...], positive: bool
) -> None:
    not_finite.every_tensor(family, case, names, positive, run)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_triton_underflowing_weight_still_passes_infinity_to_gradients(dtype: str) -> None:
    not_finite.outlasts(dtype, run)


def test_indexer_gradient_ignores_nan_dy_of_entries_without_visible_key() -> None:
    not_finite.entries_that_do_not_count(run)
