"""Three and four heads of a group, whose rows the decode meets in vectors of their own, over lines and parts of lines:
against the specification and against the same rows alone.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.native_decode import narrowed, native, plain_case
from support.native_dense import VARIANTS, judge
from support.witness import forward

from fusion_attention.waist.problem import Problem

EXACT = ("v4+avx512bf16",)  # variants that multiply integers as such: no order of sums changes a bit


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("dim", [8, 40, 72, 136])
@pytest.mark.parametrize("group", [3, 4])
def test_three_and_four_rows_meet_lines_and_parts_of_lines(group: int, dim: int, dtype: str) -> None:
    problem = Problem(2 * group, 2, dim, 24, dim_rope=16, dtype=dtype, scale=0.1, page_size=16)
    case = plain_case(problem, (1, 1, 1), (145, 7, 300), seed=dim)
    want = forward(case.call)
    for variant in VARIANTS:
        judge(case.call, native(case, variant), want, variant)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("dim", [16, 32, 80, 96, 128, 160, 256])
@pytest.mark.parametrize("group", [3, 4])
def test_rows_of_integers_that_are_met_together_are_those_met_alone(group: int, dim: int, kind: str) -> None:
    form = {"kv_dtype": kind, "dequant_k": "channel", "dequant_v": "channel", "page_size": 48}
    problem = Problem(2 * group, 2, dim, dim, dtype="bfloat16", scale=0.02, **form)
    case = plain_case(problem, (1, 1, 1, 1), (145, 7, 300, 128), seed=dim)
    want = forward(case.call)
    for variant in VARIANTS:
        together = native(case, variant)
        judge(narrowed(case), together, want, (variant, problem))
        if variant not in EXACT:
            continue
        for row in range(group):
            one = replace(case.call.problem, heads_q=2)
            own = replace(case.call, problem=one, q=[q[row::group] for q in case.call.q])
            alone = native(replace(case, call=own, problem=replace(problem, heads_q=2)), variant)
            for name, found in together.items():
                for t, wanted in zip(found, alone[name], strict=True):
                    assert torch.equal(t[row::group], wanted), (name, row)
