"""Values that are not finite reach the same gradients as in golden: selected keys, the indexer and its loss."""

from functools import partial
from typing import Any

import pytest
from support import not_finite

from fusion_attention.backends.triton.common.shapes import Tile
from fusion_attention.backends.triton.indexer import launch_loss, shapes_loss
from fusion_attention.backends.triton.selected import launch_backward as launched
from fusion_attention.backends.triton.selected import shapes as shapes_sparse
from fusion_attention.backends.triton.selected.shapes_backward import SlotTile
from fusion_attention.torch_ops import eager

pytestmark = pytest.mark.filterwarnings("ignore::fusion_attention.contract.ContractWarning")
SMALL = Tile(16, 16, 4, 1)
run = partial(eager.run, backend="triton")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes tiles so low that a case of a few slots has several, and the indexer's heads several launches."""
    monkeypatch.setattr(launched.cuts, "tile_of", lambda *_: SlotTile(16, 16, 16, 4, 1))
    monkeypatch.setattr(shapes_sparse, "gradient_tile", lambda *_: SMALL)
    monkeypatch.setattr(shapes_sparse, "ONE_LAUNCH", 16)
    monkeypatch.setattr(shapes_loss, "selected_tiles", lambda *_: shapes_loss.Selected(SMALL, SMALL, 16))
    monkeypatch.setattr(launch_loss, "SLOTS", 16)


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
