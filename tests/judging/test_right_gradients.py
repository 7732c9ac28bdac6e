"""Right gradients are called right, whichever program computes them: 1000 draws, of which a few run every day."""

import pytest
from support.right_gradients import right

# FlexAttention asks to be compiled.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")
EVERYDAY, DRAWS = 15, 1000
# Once called wrong: one row, all of whose keys share the rounding of its log-sum-exp, and keys that no row sees with
# more than 2^-60.
ONCE_WRONG = {353, 888, 890, 895}


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=() if n < EVERYDAY or n in ONCE_WRONG else pytest.mark.slow) for n in range(DRAWS)]
)
def test_correct_gradients_of_other_programs_are_judged_right(seed: int) -> None:
    program, result = right(seed)
    assert result.verdict == "right", (program, result)
