"""Defines cases whose operands are near the limits of their dtype, and cases with a tiny keep_prob."""

from dataclasses import replace
from typing import Any

import torch

from fusion_attention.testing import Case, arguments, check, expected, lowered, run

_SMALL: dict[str, Any] = {"q_len": (20,), "kv_len": (30,), "heads_q": 2, "heads_kv": 1, "dim_qk": 24, "dim_v": 16}
CASES = [
    replace(case, dtype=dtype)
    for case in (
        Case(**_SMALL),
        Case(**_SMALL, sink=True, pse="full"),
        Case(**_SMALL, dropout="bits", keep_prob=0.7, softcap=2.0),
        Case(**_SMALL, mask="matrix", blank=True, inner_precise=2, sink=True),
    )
    for dtype in ("float32", "bfloat16", "float16")
]
# 1e-40 is subnormal in float32 and bfloat16, 1e-6 in float16; other factors give zeros and infinities in float16.
FACTORS = [1e-40, 1e-38, 1e-30, 1e-20, 1e-6, 1e20, 1e30]
OPERANDS = ["query", "key", "value", "dy", "pse", "sink"]
# In float32, the last is a normal number, those before it are subnormal, and the first three are 0.
TINY = [5e-324, 1e-160, 1e-46, 1e-40, 1e-38, 1.2e-38]
DROPPED = Case(**_SMALL, dropout="bits", keep_prob=1e-38, pse="full")


def scaled(case: Case, operand: str, factor: float) -> dict[str, Any] | None:
    """Returns the arguments of a case with one of them multiplied; None if it is absent or its dtype cannot hold it."""
    args = arguments(case)
    if args[operand] is None:
        return None
    args[operand] = (args[operand].double() * factor).to(args[operand].dtype)
    left = args[operand][args[operand].isfinite()]
    return args if left.numel() and bool((left != 0).any()) else None


def dropped(dtype: str, keep_prob: float) -> tuple[Case, dict[str, Any]]:
    """Returns a case with a tiny keep_prob that keeps a quarter of the weights; value and dy are scaled down for it."""
    case = replace(DROPPED, dtype=dtype, keep_prob=keep_prob)
    args = arguments(case)
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(0, 256, args["drop_mask"].shape, generator=generator, dtype=torch.uint8)
    args["drop_mask"] = bits & torch.randint(0, 256, bits.shape, generator=generator, dtype=torch.uint8)
    smaller = max(keep_prob, 1e-40) ** 0.5 if dtype != "float16" else 1e-3
    for name in ("value", "dy"):
        args[name] = (args[name].double() * smaller).to(args[name].dtype)
    return case, args


def judge_kept(dtype: str, keep_prob: float, backend: str) -> None:
    """Compares all results of dropped(); if out is infinite, without the gradients that read it."""
    case, args = dropped(dtype, keep_prob)
    got, want = run(lowered(case, args), args["dy"], backend), expected(case, args)
    rest = max(1e-100 / keep_prob, 1.0)  # below 1e-100, the operands have the sizes of 1e-100
    want |= {name: replace(w, size=w.size * rest) for name, w in want.items() if name not in ("max", "sum")}
    some = [*want] if bool(got["out"].isfinite().all()) else ["out", "max", "sum", "dv"]
    check(case.id, {name: got[name] for name in some}, {name: want[name] for name in some})
