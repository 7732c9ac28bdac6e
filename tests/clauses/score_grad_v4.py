"""Table of the page of aclnnFlashAttentionScoreGradV4; checks of packed rows come from UnpaddingScoreGradV3."""

from functools import wraps
from typing import Any

from clauses import unpadding_score_grad_v3 as v3
from clauses.checks import NULL, Args, Check, Page, computes, filled, forbids, merged, prototype, refuses
from clauses.derived import of_page
from clauses.error_bounds import Near
from clauses.values import zeros

PROTOTYPE = prototype("""
    aclTensor   query key value dy pseShift=pse dropMask paddingMask attenMask softmaxMax softmaxSum
    aclTensor   softmaxIn attentionIn sinkIn queryRope keyRope dScaleQ dScaleK dScaleV dScaleDy dScaleO
    aclIntArray prefix actualSeqQLen actualSeqKvLen qStartIdx kvStartIdx
    double      scaleValue=scale keepProb
    int64_t     preTokens nextTokens headNum
    char        inputLayout softmaxInLayout=softmax_layout
    int64_t     innerPrecise sparseMode pseType seed offset outDtype
    aclTensor   dq dk dv dqRope dkRope dpse dsink
""")
OTHERS = {"keyIn": "key", "keyInRope": "keyRope"}
NAMES = {
    p.name: OTHERS.get(p.name) or p.name.removesuffix("Optional" if p.name.endswith("Optional") else "Out")
    for p in v3.PROTOTYPE
}


@wraps(v3.base)
def base(**over: Any) -> Args:
    given = {NAMES[name]: value for name, value in v3.base(**{"rope": False, **over}).items()}
    return filled(PROTOTYPE, **given, softmaxInLayout="", seed=0, offset=0, outDtype=0)


def of_v3(args: Args) -> Args:
    return {name: args[new] for name, new in NAMES.items()}


def formula(args: Args) -> dict[str, Near]:
    return {NAMES[name]: t for name, t in v3.formula(of_v3(args)).items()}


def finish(args: Args, changed: frozenset[str]) -> None:
    """Sets the inputs that are results of the forward operator."""
    given = of_v3(args)
    v3.finish(given, frozenset(name for name, new in NAMES.items() if new in changed))
    args.update({NAMES[name]: value for name, value in given.items()})


def holds(check: Check) -> bool:
    """Returns False for checks that do not apply to V4: rope parts (V4 needs 128 other elements), calls that V4 accepts
    (rows of more than 512 elements, no mask, padded rows), and pseType 0, which needs a bias."""
    named, over = {*check.over, *check.names}, check.over
    taken = ({*over} == {"attenMaskOptional"} and NULL in check.codes) or over.get("inputLayout") in ("BSH", "SBH")
    rope = any("rope" in name.lower() or name == "Dr" for name in named)
    return not (rope or taken or over.get("D", 0) > 512 or over == {"pseType": 0})


ROPE: dict[str, Any] = {"rope": True, "D": 128, "Dr": 64}
CLAUSES = merged(
    {
        "Rope parts beside 128 elements; a sink and its gradient; fp8's parameters are refused (ruling 47).": [
            computes(**ROPE),
            computes(outDtype=1, seed=7, offset=9),
            refuses(NULL, "queryRope", **{**ROPE, "keyRope": None}),
            forbids("queryRope", rope=True),
            forbids("sinkIn", sinkIn=zeros(3), dsink=zeros(3)),
            refuses(NULL, "dsink", sinkIn=zeros(4)),
            *(refuses(NULL, f"dScale{of}", **{f"dScale{of}": zeros(2, 4, 1, 1)}) for of in ("Q", "K", "V", "Dy", "O")),
            forbids("keepProb", keepProb=1.5),
            forbids("softmaxInLayout", softmaxInLayout="TND"),
            forbids("dqRope", **ROPE, dqRope=zeros(11, 4, 32)),
            forbids("dkRope", **ROPE, dkRope=zeros(16, 2, 32)),
        ],
    },
    of_page(v3.CLAUSES, NAMES, holds),
)
PAGE = Page("aclnnFlashAttentionScoreGradV4", PROTOTYPE, base, formula, CLAUSES, finish)
