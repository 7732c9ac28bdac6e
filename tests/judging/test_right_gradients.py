"""The judge calls right gradients right for every program: 1000 draws, of which `make test` runs a few."""

import pytest
from support.right_gradients import right

# FlexAttention warns if it is not compiled.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")
EVERYDAY, DRAWS = 15, 1000
# Seeds once called wrong: all keys of a row share its lse's rounding, or all weights of a key are below 2^-60.
ONCE_WRONG = {353, 888, 890, 895}


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=() if n < EVERYDAY or n in ONCE_WRONG else pytest.mark.slow) for n in range(DRAWS)]
)
def test_correct_gradients_of_other_programs_are_judged_right(seed: int) -> None:
    program, result = right(seed)
    assert result.verdict == "right", (program, result)
