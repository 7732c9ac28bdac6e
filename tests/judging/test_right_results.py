"""Right outputs are called right, whichever program computes them: 2000 draws, of which a few run every day, and 250 of
this library's native core by every variant that runs here."""

import pytest
from support.native_dense import VARIANTS, draw_call, judge, native
from support.oracle import forward
from support.right_results import right

# FlexAttention asks to be compiled.
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
