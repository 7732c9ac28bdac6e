"""NaN and infinity reach the same gradients as in golden, in every variant: selected keys, the indexer, its losses."""

from functools import partial
from typing import Any

import pytest
from support import native_lowered, not_finite
from support.native_dense import VARIANTS
from support.not_finite import CASES, FLOAT16, HALF, HIDDEN, OF_LOSS, TWO

from fusion_attention.testing.indexer_loss import LossCase
from fusion_attention.testing.sparse import SparseCase

pytestmark = [
    pytest.mark.filterwarnings("ignore::fusion_attention.contract.ContractWarning"),
    pytest.mark.parametrize("run", [partial(native_lowered.run, variant=name) for name in VARIANTS], ids=VARIANTS),
]
# Complete blocks of keys that are read in place, and more keys than a chunk; rows of a band.
LONG = {"q_len": (2, 19), "kv_len": (5, 150), "heads_q": 17, "count": 130}
BANDS = [
    LossCase(**TWO),
    LossCase("TND", dim_rope=3, **FLOAT16, **TWO),
    LossCase("TND", heads=5, heads_q=6, heads_kv=3, sink=True, window=3, mode=0, **HALF, **TWO),
]
MORE = [
    (not_finite.attention, SparseCase("TND", dim_qk=64, dim_v=32, dim_rope=32, lists="wild", **LONG), ("key", "dy")),
    (not_finite.attention, SparseCase("TND", shares_kv=True, dim_qk=64, dim_v=64, dtype="bfloat16", **LONG), ("key",)),
    *((not_finite.loss, case, OF_LOSS) for case in BANDS),
]


@pytest.mark.parametrize(("what", "name", "at", "fill"), HIDDEN, ids=lambda value: str(value)[-12:])
def test_gradients_match_reference_if_zero_weights_hide_nan_or_infinity(
    what: Any, name: str, at: tuple[int, ...], fill: float, run: Any
) -> None:
    not_finite.hides(what, name, at, fill, run)


@pytest.mark.sampled(48)
@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize(("family", "case", "names"), [*CASES, *MORE], ids=lambda value: getattr(value, "id", None))
def test_gradients_match_reference_for_nan_or_infinity_in_any_input(
    family: not_finite.Family, case: Any, names: tuple[str, ...], positive: bool, run: Any
) -> None:
    not_finite.every_tensor(family, case, names, positive, run)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_underflowing_weight_still_passes_infinity_to_gradients(dtype: str, run: Any) -> None:
    not_finite.outlasts(dtype, run)


def test_indexer_gradient_ignores_nan_dy_of_list_entries_without_visible_key(run: Any) -> None:
    not_finite.entries_that_do_not_count(run)
