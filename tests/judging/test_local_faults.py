"""A fault in one place of a long right result is called wrong, however long the rest is.

400 faults are drawn by seeds over families, dtypes and lengths; a share runs every day. Exempt is a fault whose change
is below two expected errors in every tile: a right kernel may be off as far.
"""

import random
from collections.abc import Callable
from functools import cache

import pytest
from support.faults import VALUES, planted
from support.long_calls import Long, decode, dense, failing, gradient, sparse, sparse_gradient

from fusion_attention.judging.expected_error import PROGRAM

DTYPES = ("float32", "float16", "bfloat16")
CALLS: dict[str, Callable[[], Long]] = {
    **{f"dense {d} {n}": lambda d=d, n=n: dense(d, n, n) for d in DTYPES for n in (256, 1024, 4096, 16384)},
    **{f"gradient {d} {n}": lambda d=d, n=n: gradient(d, n, n) for d in DTYPES for n in (256, 1024, 4096, 16384)},
    **{f"full {d}": lambda d=d: gradient(d, 2048, 2048, causal=False) for d in DTYPES},
    **{f"sparse {d} {n}": lambda d=d, n=n: sparse(d, 256, n) for d in DTYPES for n in (2048, 16384)},
    **{f"sparse gradient {d}": lambda d=d: sparse_gradient(d, 256, 4096) for d in DTYPES},
    **{f"decode {d}": lambda d=d: decode(d, (16384, 700, 5000)) for d in DTYPES[1:]},
}


@cache
def right(name: str) -> Long:
    return CALLS[name]()


@pytest.mark.sampled(120)
@pytest.mark.parametrize("seed", range(400))
def test_a_local_fault_is_wrong(seed: int) -> None:
    rng = random.Random(seed)
    long = right(rng.choice([*CALLS])).restored()
    fault = planted(long, rng)
    result = failing(long, fault.units, PROGRAM)
    # What changes values themselves shows everywhere; keys of small weights may not.
    assert fault.output in result or (fault.effect < 2 and fault.what not in VALUES), fault
