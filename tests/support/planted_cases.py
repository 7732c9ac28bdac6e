"""Defines the captures for tests of the judge: at least three of each mistake, and correct and noisy ones."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from support.planted import Capture, Rounding, made_gradient, made_own, planted_call

from fusion_attention.testing.cases import Case

Make = Callable[[], Capture]
BASE = Case(q_len=(33, 33), kv_len=(47, 47), heads_q=4, heads_kv=2, dim_qk=32, dim_v=32, scale=0.2)
PACKED = replace(BASE, layout="TND", q_len=(17, 30, 9), kv_len=(17, 41, 25))
CAUSAL = replace(BASE, sparse_mode=3, mask="compressed")
LONG = replace(BASE, q_len=(20,), kv_len=(650,))
THREE = (("BSND", "float32"), ("BNSD", "bfloat16"), ("SBH", "float16"))
OTHERS = (("BSH", "bfloat16"), ("BSND", "float16"), ("BNSD", "float32"))
OPERATORS = ("npu_fusion_attention_v2", "aclnnFlashAttentionScoreV3", "npu_fusion_attention_v2")


def over(case: Case, layouts: tuple[tuple[str, str], ...] = THREE) -> list[Case]:
    """Returns the case in three layouts and dtypes."""
    return [replace(case, layout=layout, dtype=dtype) for layout, dtype in layouts]


def packed_over(case: Case) -> list[Case]:
    return [replace(case, dtype=dtype) for dtype in ("float32", "bfloat16", "float16")]


DENSE: dict[str, list[Case]] = {
    "causal-alignment": [
        *over(replace(BASE, sparse_mode=2, mask="compressed"))[:2],
        replace(PACKED, sparse_mode=3, mask="compressed", dtype="bfloat16"),
    ],
    "mask-ignored": [*over(replace(BASE, mask="head"))[1:], replace(CAUSAL, layout="BSH")],
    "mask-polarity": over(replace(BASE, mask="batch", q_len=(33, 33)), OTHERS),
    "window-off-by-one": over(replace(BASE, sparse_mode=4, pre=9, next=3, mask="compressed")),
    "window-mirrored": over(replace(BASE, sparse_mode=4, pre=12, next=2, mask="compressed"), OTHERS),
    "window-ignored": over(replace(BASE, sparse_mode=4, pre=9, next=0, mask="compressed"), OTHERS),
    "prefix-ignored": over(replace(BASE, sparse_mode=6, prefix=(22, 30), mask="compressed")),
    "causal-uncalled": over(BASE, OTHERS),
    "tile-skipped:512": over(LONG),
    "tile-skipped:32": over(BASE, OTHERS)[:1],
    "mask-ends-early:512": over(replace(LONG, mask="ones")),
    "scale-missing": [*over(CAUSAL)[:2], replace(PACKED, dtype="float16")],
    "scale-twice": over(replace(CAUSAL, scale=0.4), OTHERS),
    "scale-default": over(replace(BASE, scale=0.3), OTHERS),
    "pse-order": over(replace(BASE, pse="full", pse_type=1)),
    "pse-missing": over(replace(BASE, pse="shared_row", pse_type=0), OTHERS),
    "alibi-distance:sign": over(replace(BASE, pse="slopes", pse_type=2))[:2],
    "alibi-distance:root": over(replace(BASE, pse="slopes", pse_type=3))[2:],
    "gqa-order": [*over(CAUSAL)[1:], replace(PACKED, sparse_mode=3, mask="compressed")],
    "kv-confused": over(BASE, OTHERS),
    "rope-missing": over(replace(CAUSAL, dim_rope=16), OTHERS),
    "sink-missing": over(replace(CAUSAL, sink=True), OTHERS),
    "dropout-scale": over(replace(BASE, dropout="bits", keep_prob=0.8)),
    "dropout-missing": over(replace(BASE, dropout="bits", keep_prob=0.9), OTHERS),
    "dropout-bits": [*over(replace(BASE, dropout="bits", keep_prob=0.7))[:2],
                     replace(PACKED, dropout="bits", keep_prob=0.7)],
    "dropout-divisor": over(replace(BASE, dropout="bits", keep_prob=0.8), OTHERS),
    "uniform-average": [*over(CAUSAL, OTHERS)[:2], replace(PACKED, dtype="bfloat16")],
    "sequences-mixed": packed_over(replace(PACKED, sparse_mode=3, mask="compressed")),
    "statistics-order": packed_over(PACKED),
    "statistics-swapped": over(BASE, OTHERS),
    "lse-unscaled": over(CAUSAL),
    "lse-base": over(CAUSAL, OTHERS),
    "lse-parts": over(CAUSAL),
    "lse-parts:zero": over(replace(BASE, sparse_mode=2, mask="compressed")),
    "input-layout": over(CAUSAL, tuple(("BSND", dtype) for _, dtype in THREE)),
    "output-layout": [c for c in over(CAUSAL, OTHERS) if c.layout in ("BSND", "BNSD")] + over(CAUSAL)[:1],
    "unnormalised": over(CAUSAL, OTHERS),
}  # fmt: skip
GRADIENTS: dict[str, list[Case]] = {
    "delta-missing": over(CAUSAL),
    "gradient-scale": over(CAUSAL, OTHERS),
    "group-sum": [*over(CAUSAL)[1:], replace(PACKED, sparse_mode=3, mask="compressed")],
}

OTHER_CASES: dict[str, list[Case]] = {
    "softcap-missing": over(replace(CAUSAL, scale=1.0, softcap=5.0), OTHERS),
    "softcap-order:mask": over(replace(CAUSAL, scale=1.0, softcap=2.0), OTHERS),
    "softcap-order": over(replace(BASE, scale=1.0, softcap=5.0, pse="full", pse_type=0)),
}


def operator_of(case: Case, number: int) -> str:
    """Returns the operator of a mistake's capture number `number`."""
    is_simple = case.layout != "TND" and not case.dim_rope
    return OPERATORS[number % 3] if is_simple else "npu_fusion_attention_v2"


def planted(wrongs: bool = True) -> Iterator[tuple[str, Make]]:
    """Yields (name, function that makes a capture); wrongs: with mistakes, else the same calls without them."""
    for make, mistakes in ((planted_call, DENSE), (made_gradient, GRADIENTS), (made_own, OTHER_CASES)):
        for wrong, cases in mistakes.items():
            for i, case in enumerate(cases):
                operator = (operator_of(case, i),) if mistakes is DENSE else ()
                yield f"{'' if wrongs else 'right-'}{wrong}-{i}", partial(make, case, wrong * wrongs, *operator)


correct = partial(planted, False)


def noisy() -> Iterator[tuple[str, Make]]:
    """Yields captures of kernels that round every sum to 16 bits and make no mistake."""
    calls = (CAUSAL, BASE, replace(BASE, mask="head"), replace(CAUSAL, scale=0.1), PACKED,
             replace(BASE, sparse_mode=4, pre=9, next=3, mask="compressed"), replace(BASE, pse="full"))  # fmt: skip
    for i, case in enumerate(calls):
        for dtype, low in (("float32", torch.float16), ("float16", torch.float16), ("bfloat16", torch.bfloat16)):
            if i < 6 or dtype != "bfloat16":
                result = replace(case, dtype=dtype)
                yield f"noisy-{i}-{dtype}", partial(planted_call, result, "", rough=Rounding(low))
