"""The judge calls right outputs right for every program: 2000 draws, of which `make test` runs a few, and 250 of this
library's native core with every instruction set of the machine."""

import pytest
from support.native_dense import VARIANTS, draw_call, judge, native
from support.oracle import forward
from support.right_results import right

# FlexAttention warns if it is not compiled.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")
EVERYDAY, DRAWS = 60, 2000


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=pytest.mark.slow if n >= EVERYDAY else ()) for n in range(DRAWS)]
)
def test_correct_outputs_of_other_programs_are_judged_right(seed: int) -> None:
    program, result = right(seed)
    assert result.verdict == "right", (program, result)


@pytest.mark.parametrize("seed", [pytest.param(n, marks=pytest.mark.slow) for n in range(5000, 5250)])
def test_native_core_outputs_are_judged_right(seed: int) -> None:
    call = draw_call(seed)
    for variant in VARIANTS:
        got = native(call, variant)
        judge(call, got, forward(call), (seed, variant))
