"""Blocked tiles: every case against golden, golden against formulas that know no tiles, and the call's other words."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from support.cases import BITS, CAUSAL, DRAWN, DTYPES, operands

from fusion_attention.testing import Case, golden, plain

Tensor = torch.Tensor

BASE = Case(mask="tiles", q_len=(300,), kv_len=(520,), heads_q=2, heads_kv=1)
PACKED = replace(BASE, layout="TND", softmax_layout="TND", q_len=(300, 0, 5, 140), kv_len=(290, 7, 260, 0))
TILED = [
    *(replace(BASE, dtype=d, blank=b) for d in DTYPES for b in (False, True)),
    *(replace(BASE, dtype=d, q_len=(130,), kv_len=(1500,), dim_qk=16) for d in DTYPES),
    *(replace(PACKED, dtype=d) for d in DTYPES),
    replace(BASE, **{**CAUSAL, "mask": "tiles"}),
    replace(BASE, layout="BNSD", q_len=(200, 131), kv_len=(260, 129), sink=True, blank=True, dtype="bfloat16"),
    replace(BASE, sparse_mode=4, pre=150, next=-40, dim_rope=4, dtype="bfloat16"),
    replace(BASE, sparse_mode=0, pre=-20, next=200, layout="SBH", q_len=(129, 129), kv_len=(257, 257)),
    replace(BASE, pse="full", pse_type=0, heads_q=4, heads_kv=2, blank=True),
    replace(BASE, pse="row", pse_type=0, dtype="bfloat16", q_len=(140, 140), kv_len=(300, 300)),
    replace(BASE, pse="slopes_flat", pse_type=2, dtype="float16"),
    replace(PACKED, dtype="bfloat16", sink=True, dim_rope=8, **BITS),
    replace(PACKED, heads_q=6, heads_kv=2, q_rest=3, kv_rest=2, **DRAWN),
    replace(BASE, q_len=(3, 9), kv_len=(700, 260)),
    replace(BASE, q_len=(1,), kv_len=(1,)),
    replace(BASE, q_len=(0, 0), kv_len=(200, 200)),
    replace(BASE, q_len=(200, 200), kv_len=(0, 0)),
]


@cache
def truth(case: Case) -> dict[str, Tensor]:
    return golden(case, operands(case))


@pytest.mark.parametrize("case", TILED, ids=lambda case: case.id)
def test_golden_against_the_formulas(case: Case) -> None:
    want = plain(case, operands(case), torch.float64)
    for name, value in truth(case).items():
        size = value.masked_fill(value.abs() > 1e38, 0).abs().amax().clamp(min=1.0).item() if value.numel() else 1.0
        torch.testing.assert_close(value, want[name], rtol=1e-12, atol=1e-12 * size, msg=lambda m, n=name: f"{n}: {m}")
