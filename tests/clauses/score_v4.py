"""Table of the page of aclnnFlashAttentionScoreV4; checks of statements that are also on V2's page come from V2."""

from functools import wraps
from typing import Any

import torch

from clauses import flash_attention_score_v2 as v2
from clauses.checks import NULL, Args, Check, Page, computes, filled, forbids, merged, prototype, refuses
from clauses.derived import of_page
from clauses.dtype_abbreviations import H
from clauses.error_bounds import Near
from clauses.values import drawn, zeros

PROTOTYPE = prototype("""
    aclTensor   query key value realShift=pse dropMask paddingMask attenMask queryRope keyRope
    aclTensor   dScaleQ dScaleK dScaleV sink
    aclIntArray prefix actualSeqQLen actualSeqKvLen qStartIdx kvStartIdx
    double      scaleValue=scale keepProb
    int64_t     preTokens nextTokens headNum
    char        inputLayout
    int64_t     innerPrecise sparseMode outDtype pseType
    char        softmaxOutLayout=softmax_layout
    int64_t     seed offset
    aclTensor   softmaxMax softmaxSum softmaxOut attentionOut
""")


def renamed(name: str) -> str:
    """Returns the name in V4 of a parameter of V2."""
    return name.removesuffix("Optional") if name.endswith("Optional") else name.removesuffix("Out") or name


NAMES = {p.name: renamed(p.name) for p in v2.PROTOTYPE}


@wraps(v2.base)
def base(**over: Any) -> Args:
    given = {NAMES[name]: value for name, value in v2.base(**over).items()}
    return filled(PROTOTYPE, **given, outDtype=0, softmaxOutLayout="", seed=0, offset=0)


def formula(args: Args) -> dict[str, Near]:
    """Computes the formula of V2 for rows with their rope parts appended."""
    of_v2 = {name: args[new] for name, new in NAMES.items()}
    for name, rope in (("query", "queryRope"), ("key", "keyRope")):
        if args[rope] is not None:
            of_v2[name] = torch.cat((args[name], args[rope]), -1)
    return {NAMES[name]: t for name, t in v2.formula(of_v2).items()}


def holds(check: Check) -> bool:
    """Returns False for calls that only V2 refuses: packed rows, Dv unlike D, D > 512, dropout drawn from a seed."""
    over = check.over
    at_random = {*over} == {"keepProbOptional"} and over["keepProbOptional"] == 0.5
    taken = over.get("inputLayout") == "TND" or "Dv" in over or over.get("D", 0) > 512 or at_random
    return not (check.codes and taken)


ROPE: dict[str, Any] = {"D": 128, "queryRope": drawn(2, 5, 4, 64, d=H), "keyRope": drawn(2, 7, 2, 64, d=H)}
SCALES = ("dScaleQ", "dScaleK", "dScaleV")
CLAUSES = merged(
    {
        "Rope parts beside 128 elements; a sink; packed rows with ends; fp8's parameters are refused (ruling 47).": [
            computes(**ROPE),
            computes(Dv=8),
            computes(sink=lambda old: torch.full((4,), -1e4)),
            computes(outDtype=1, seed=7, offset=9),
            refuses(NULL, "queryRope", **{**ROPE, "keyRope": None}),
            forbids("queryRope", **{**ROPE, "queryRope": drawn(2, 5, 4, 32, d=H), "keyRope": drawn(2, 7, 2, 32, d=H)}),
            forbids("sink", sink=zeros(3)),
            *(refuses(NULL, name, **{name: zeros(2, 4, 1, 1)}) for name in SCALES),
            refuses(NULL, "actualSeqQLen actualSeqKvLen", inputLayout="TND"),
            forbids("softmaxOutLayout", softmaxOutLayout="TND"),
        ],
    },
    of_page(v2.CLAUSES, NAMES, holds),
)
PAGE = Page("aclnnFlashAttentionScoreV4", PROTOTYPE, base, formula, CLAUSES)
