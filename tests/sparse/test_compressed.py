"""A window of keys beside compressed keys: golden by autograd, every back end by golden, what must not change a bit."""

from dataclasses import replace

import pytest
import torch
from support.bits import same_bits
from support.compressed import CompressedCase, arguments, compute, golden, lowered, wanted, witness
from support.selected import close

import fusion_attention as fa
from fusion_attention.testing import check
from fusion_attention.testing.drawn import compare_with

DTYPES = ("float32", "float16", "bfloat16")
PACKED = CompressedCase(layout="TND", q_len=(3, 6, 4), kv_len=(5, 6, 9))
CASES = [
    *(CompressedCase(dtype=d, layout=layout, sink=True) for d in DTYPES for layout in ("BSND", "TND")),
    *(CompressedCase(lists=lists, count=5, heads_kv=2) for lists in ("all", "repeated", "wild", "holes", "none")),
    *(replace(PACKED, lists=lists, count=7, dtype="bfloat16", sink=True) for lists in ("all", "wild")),
    *(CompressedCase(dtype=d, lists="all", count=9, heads_q=8, dim_qk=32, window=1, sink=True) for d in DTYPES),
    *(CompressedCase(ratio=r, q_len=(9, 5), kv_len=(9, 5), c_len=(9 // r, 5 // r)) for r in (1, 3, 4)),
    CompressedCase(ratio=128, q_len=(9, 2), kv_len=(400, 260), window=100, dim_qk=64, dtype="bfloat16"),
    CompressedCase(ratio=128, q_len=(5, 5), kv_len=(9, 9), window=4),  # no compressed key
    CompressedCase(window=None, shares_kv=False, heads_q=6, heads_kv=3, dim_qk=7, dim_v=5, sink=True),
    CompressedCase(shares_kv=False, dim_v=12, dtype="float16", lists="all", count=3, wide=True),
    CompressedCase(q_len=(9, 9), kv_len=(4, 4), lists="all"),  # rows without keys
    CompressedCase(q_len=(9, 9), kv_len=(4, 4), sink=True, dtype="bfloat16"),
    replace(PACKED, q_len=(9, 2, 0, 3), kv_len=(4, 0, 5, 8), q_rest=2, kv_rest=3, c_rest=2, lists="all", sink=True),
    CompressedCase(q_len=(5, 2, 0), kv_len=(3, 9, 4), q_rest=1, kv_rest=2, c_rest=2, dtype="bfloat16"),
    CompressedCase(q_len=(0, 0), kv_len=(4, 4)),
    CompressedCase(q_len=(4, 4), kv_len=(0, 0), c_len=(2, 2), sink=True),  # keys of the second source alone
    CompressedCase(q_len=(130,), kv_len=(150,), ratio=4, count=16, heads_q=3, lists="all", window=40),
    CompressedCase(q_len=(3, 5), kv_len=(33, 7), page=16, lists="all", count=6, dtype="bfloat16", dim_qk=32),
    replace(PACKED, q_len=(3, 9), kv_len=(33, 7), page=16, heads_kv=2, sink=True),
]
SMALL = [case for case in CASES if max(case.q_len) * max(case.kv_len) < 5000]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_golden_against_autograd(case: CompressedCase) -> None:
    args = arguments(case)
    want, got = witness(case, args), golden(case, args)
    close({name: got[name] for name in want if name in got}, {name: want[name] for name in want if name in got})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_back_end_differs_from_golden_by_roundings(case: CompressedCase) -> None:
    args = arguments(case)
    check(case.id, compute(case, lowered(args), args["dy"], "cpu"), wanted(case, args))
