"""Pooling of windows under the interpreter: within rounding errors of float64, also with NaN and infinity."""

from functools import partial

import pytest
import torch
from support.bits import same_bits, same_where_not_finite
from support.pooling import Case, both, computed, expected, specified

from fusion_attention.backends import triton
from fusion_attention.backends.triton.window_pooling import launch
from fusion_attention.ops.compressed.pooling import PoolingBackward
from fusion_attention.testing.estimated_rounding_errors import compare_with
from fusion_attention.torch_ops import eager


@pytest.fixture(autouse=True)
def few_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes ranges of results so few that one has several results."""
    monkeypatch.setattr(launch, "RANGES", 3)


OVERLAPPING = Case(dim=20, lengths=(13, 13))
CASES = [
    (Case(overlap=False, dim=20, lengths=(13, 13)), torch.float32),
    (OVERLAPPING, torch.float32),
    (Case(dim=20, lengths=(11, 3)), torch.float32),
    (Case(dim=20, lengths=(11, 3), packed=True), torch.bfloat16),
    (Case(ratio=20, overlap=False, dim=20, lengths=(45, 45), size=45), torch.float16),
    (Case(dim=20, lengths=(13, 13), before=True, biased=False), torch.float32),
    (Case(ratio=1, dim=20, lengths=(3, 3), size=3), torch.float32),
    (Case(ratio=7, overlap=False, dim=20, lengths=(5, 5), size=5), torch.float32),
]
run = partial(eager.run, backend="triton")


@pytest.mark.parametrize(("case", "dtype"), CASES, ids=str)
def test_triton_pooling_results_and_gradients_match_float64(case: Case, dtype: torch.dtype) -> None:
    compare_with(str(case), computed(case, dtype, run), lambda: expected(case, dtype))


def test_triton_pooling_gradients_do_not_depend_on_requested_results() -> None:
    rows, gates, dout = (
        OVERLAPPING.rows(1, torch.float32),
        OVERLAPPING.rows(2, torch.float32),
        OVERLAPPING.upstream(torch.float32),
    )
    call = OVERLAPPING.lowered(rows, gates, OVERLAPPING.table())
    first = both(call, dout, run)
    same_bits(both(call, dout, run), first)
    same_bits(tuple(run(PoolingBackward(call, dout, of_bias=False)).values()), first[1:3])


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("name", ["rows", "gates", "dout"])
def test_triton_pooling_nan_and_infinity_appear_exactly_as_in_float64(name: str, value: float) -> None:
    case = OVERLAPPING
    given = {
        "rows": case.rows(1, torch.float32),
        "gates": case.rows(2, torch.float32),
        "dout": case.upstream(torch.float32),
    }
    given[name][0, 1, 0, 3:9] = value
    if name == "rows":
        given["gates"][0, 1, 0, 3:6] = -200  # a weight that no float32 holds
    got = both(case.lowered(given["rows"], given["gates"], case.table()), given["dout"], run)
    same_where_not_finite({"all": got}, {"all": specified(case, **given)}, name)


def test_triton_pooling_workspace_bytes_match_formula() -> None:
    case = OVERLAPPING
    call = case.lowered(case.rows(1, torch.float32), case.rows(2, torch.float32), case.table())
    p, e = call.problem, call.extents
    needed = triton.workspace_bytes(p, e, "pooling_backward")
    assert needed == 4 * (3 * 6 * 2 * 20 + launch.RANGES * 4 * 40)
    assert triton.workspace_bytes(p, e, "pooling") == 0
