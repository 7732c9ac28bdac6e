"""The page of aclnnFlashAttentionUnpaddingScoreGradV3, clause by clause: the edition for Atlas A2 and A3."""

from typing import Any

import torch

from clauses.dtypes import BF, BOOL, F32, F64, I8, I32, U8, H
from clauses.table import INVALID, NULL, RUN_TIME, Page, clause, computes, forbids, refuses, repeats
from clauses.training import PREFIX_TRIANGLE, hiding
from clauses.unpadding_score_grad_v3_calls import PROTOTYPE, base, finish, formula
from clauses.values import deeper, drawn, ends, fractal, gapped, longer, swapped, to, widened, zeros

DTYPES = (H, BF, F32)
ROWS = ("keyIn", "value", "dy", "attentionInOptional")
OUTPUTS = ("dqOut", "dkOut", "dvOut")
ROPES = ("queryRope", "keyInRope")
ROPE_OUTPUTS = ("dqRopeOut", "dkRopeOut")
STATISTICS = ("softmaxMaxOptional", "softmaxSumOptional")
REQUIRED = ("query", *ROWS, *STATISTICS, *OUTPUTS)
OPTIONAL = {"pseShiftOptional": BF, "dropMaskOptional": U8, "paddingMaskOptional": U8, "softmaxInOptional": BF}
NO_ROPE = {"queryRope": None, "keyInRope": None, "dqRopeOut": None, "dkRopeOut": None}
EITHER = ({}, {"rope": False})
MASKS = ((2, 4, 6, 9), (2, 1, 6, 9), (1, 1, 6, 9), (6, 9))
LENGTHS = ("actualSeqQLenOptional", "actualSeqKvLenOptional")
SMALL = {"N": 1, "N2": 1, "D": 8}


def mode(number: int, **over: Any) -> dict[str, Any]:
    """A sparse mode with the mask, and the numbers, that it needs."""
    settings: dict[str, Any] = {
        0: {"attenMaskOptional": hiding(6, 9)},
        1: {"attenMaskOptional": hiding(6, 9)},
        4: {"preTokens": 3, "nextTokens": 1},
        6: {"attenMaskOptional": lambda old: PREFIX_TRIANGLE, "prefixOptional": [3, 5]},
        7: {"preTokens": 9, "nextTokens": -2},
        8: {"preTokens": 9, "nextTokens": 1},
    }.get(number, {})
    return {"sparseMode": number} | settings | over


def prefixed(q: int, kv: int, prefix: list[int] | None) -> dict[str, Any]:
    """Mode 6 of two sequences of these lengths."""
    return mode(6, q=(q, 2 * q), kv=(kv, 2 * kv), prefixOptional=prefix)


CLAUSES = (
    # ---------------------------------------------------------------------------------------------------------- dtypes
    clause(
        "dtypes",
        "query, keyIn, value, dy, attentionInOptional and gradients are FLOAT16, BFLOAT16 or FLOAT32, all of one.",
        *(computes(dtype=d, rope=False) for d in DTYPES),
        computes(),
        *(refuses(INVALID, name, **{name: to(d)}) for name in (*ROWS, *OUTPUTS) for d in (H, F32)),
        *(refuses(INVALID, name, rope=False, **{name: to(F64)}) for name in (*ROWS, *OUTPUTS)),
        refuses(INVALID, "query keyIn", query=to(H)),
        refuses(INVALID, "query", dtype=F64),
        refuses(INVALID, "query keyIn", query=to(I8)),
        refuses(INVALID, "keyIn", keyIn=to(I32)),
    ),
    clause(
        "rope-dtypes",
        "queryRope and keyInRope: BFLOAT16 by one column, as query by another, which holds.",
        *(computes(dtype=d) for d in DTYPES),
        *(refuses(INVALID, name, **{name: to(d)}) for name in (*ROPES, *ROPE_OUTPUTS) for d in (H, F32)),
        refuses(INVALID, "queryRope", dtype=H, queryRope=to(BF)),
        ruling=28,
    ),
    clause(
        "other-dtypes",
        "Statistics are FLOAT, attenMaskOptional BOOL or UINT8, dropMaskOptional UINT8.",
        *(refuses(INVALID, name, **{name: to(d)}) for name in STATISTICS for d in (BF, F64)),
        *(computes(attenMaskOptional=to(d)) for d in (BOOL, U8)),
        *(refuses(INVALID, "attenMaskOptional", attenMaskOptional=to(d)) for d in (I8, I32)),
        refuses(INVALID, "dropMaskOptional", dropMaskOptional=zeros(99, d=BOOL), rope=False),
    ),
    clause(
        "reserved-dtypes",
        "paddingMaskOptional and softmaxInOptional are not used, and still have dtypes.",
        *(refuses(INVALID, "paddingMaskOptional", paddingMaskOptional=zeros(6, 9, d=d)) for d in (F64, I32)),
        *(refuses(INVALID, "softmaxInOptional", softmaxInOptional=zeros(11, 4, 8, d=d)) for d in (I8, F64)),
    ),
    clause(
        "formats",
        "Tensors are ND.",
        *(
            refuses(INVALID, name, **{name: fractal})
            for name in (*REQUIRED, *ROPES, *ROPE_OUTPUTS, "attenMaskOptional")
        ),
    ),
    # ---------------------------------------------------------------------------------------------- what must be there
    clause(
        "null",
        "A null required tensor, output, inputLayout or length.",
        *(refuses(NULL, name, **{name: None}) for name in (*REQUIRED, "inputLayout", *LENGTHS)),
    ),
    RUN_TIME,
    clause(
        "ropes",
        "Both rope parts or none, their gradients with them.",
        computes(rope=False),
        computes(**NO_ROPE),
        *(refuses(NULL, " ".join(ROPES), **{name: None}) for name in ROPES),
        *(refuses(NULL, name, **{name: None}) for name in ROPE_OUTPUTS),
    ),
    clause(
        "optional",
        "Dimension 0: optional tensors are as good as null without axes or elements; so are empty arrays.",
        *(computes(**{name: zeros(*s, d=d)}) for name, d in OPTIONAL.items() for s in ((), (0,))),
        *(computes(**NO_ROPE | dict.fromkeys(ROPES, zeros(*s, d=BF))) for s in ((), (0,))),
        *(computes(**NO_ROPE | dict.fromkeys(ROPE_OUTPUTS, zeros(*s, d=BF))) for s in ((), (0,))),
        *(computes(dpseOut=zeros(*s, d=BF)) for s in ((), (0,))),
        *(computes(**{name: []}) for name in ("prefixOptional", "qStartIdxOptional", "kvStartIdxOptional")),
    ),
    clause(
        "no-shift",
        "pseShiftOptional is null, with and without rope.",
        *(forbids("pseShiftOptional queryRope", pseShiftOptional=drawn(1, 4, 1024, 9, d=BF), **x) for x in EITHER),
        forbids(
            "pseShiftOptional",
            rope=False,
            pseShiftOptional=drawn(1, 4, 1024, 9, d=BF),
            dpseOut=zeros(1, 4, 1024, 9, d=BF),
        ),
    ),
    clause(
        "no-shift-gradient",
        "dpseOut is not used: a real tensor is refused.",
        *(forbids("dpseOut", dpseOut=zeros(1, 4, 1024, 9, d=BF), **x) for x in EITHER),
        ruling=28,
    ),
    clause(
        "no-shift-cut",
        "Mode 7 takes no bias; mode 8 may by its own line, and does not, since none is ever taken.",
        *(
            forbids("pseShiftOptional queryRope", **mode(n), pseShiftOptional=drawn(1, 4, 1024, 9, d=BF))
            for n in (7, 8)
        ),
        ruling=28,
    ),
    clause(
        "no-dropout",
        "dropMaskOptional is null and keepProb 1, with and without rope.",
        *(
            forbids("dropMaskOptional keepProb queryRope", keepProb=0.5, dropMaskOptional=zeros(99, d=U8), **x)
            for x in EITHER
        ),
        *(forbids("keepProb dropMaskOptional queryRope", keepProb=n, **x) for n in (0.9, 0.0, 1.1) for x in EITHER),
        *(forbids("dropMaskOptional queryRope", dropMaskOptional=zeros(99, d=U8), **x) for x in EITHER),
    ),
    clause(
        "mask-given",
        "attenMaskOptional is given, with and without rope.",
        *(refuses(NULL, "attenMaskOptional", attenMaskOptional=None, **x) for x in EITHER),
        *(refuses(NULL, "attenMaskOptional", attenMaskOptional=zeros(d=U8), **x) for x in EITHER),
        refuses(NULL, "attenMaskOptional", attenMaskOptional=None, sparseMode=0, rope=False),
    ),
    clause(
        "reserved",
        "paddingMaskOptional is not supported, softmaxInOptional null.",
        forbids("paddingMaskOptional", paddingMaskOptional=zeros(6, 9, d=U8)),
        forbids("softmaxInOptional", softmaxInOptional=zeros(11, 4, 8, d=BF)),
        ruling=20,
    ),
    clause(
        "pse-type",
        "pseType: one line has 1 alone, another 0 and 1, which is taken; without a bias they are the same.",
        *(computes(pseType=n, **x) for n in (0, 1) for x in EITHER),
        *(forbids("pseType pseShiftOptional", pseType=n, **x) for n in (2, 3, 4, -1) for x in EITHER),
        ruling=27,
    ),
    clause(
        "layout",
        "inputLayout is TND.",
        *(forbids("inputLayout query", inputLayout=x) for x in ("BSH", "SBH", "BSND", "BNSD", "tnd", "")),
    ),
    # ------------------------------------------------------------------------------------------------------------ modes
    clause(
        "modes",
        "sparseMode is 0 to 8, as the page of sparse modes says.",
        *(computes(dtype=F32, **mode(n), **x) for n in (0, 1, 2, 3, 4, 6, 7, 8) for x in EITHER),
        *(computes(**mode(n, preTokens=0, nextTokens=0)) for n in (1, 2, 3)),
        computes(**mode(0, attenMaskOptional=hiding(6, 9), preTokens=8, nextTokens=5)),
        computes(**mode(4, preTokens=0, nextTokens=0)),
        *(forbids("sparseMode", sparseMode=n) for n in (9, -1)),
    ),
    clause(
        "mode-5",
        "Mode 5, which the range has, is refused: prefixes are offered as mode 6 alone.",
        forbids("sparseMode", sparseMode=5, prefixOptional=[3, 5]),
        forbids("sparseMode", sparseMode=5, rope=False, prefixOptional=[3, 5], attenMaskOptional=hiding(6, 9)),
        ruling=28,
    ),
    clause(
        "mask-shapes",
        "attenMaskOptional is [B,N,S,S], [B,1,S,S], [1,1,S,S] or [S,S] of the longest sequences; 1 takes no part.",
        *(computes(**mode(n, attenMaskOptional=hiding(*s))) for s in MASKS for n in (0, 1)),
        *(
            forbids("attenMaskOptional", **mode(1, attenMaskOptional=hiding(*s)))
            for s in ((1, 4, 6, 9), (2, 6, 9), (9,), (6, 8), (5, 9), (2, 1, 1, 9))
        ),
    ),
    clause(
        "mode-masks",
        "Modes 2, 3, 4, 7 and 8 take the mask of 2048 x 2048, mode 6 that of 3072 x 2048, of two axes.",
        *(forbids("attenMaskOptional", **mode(n, attenMaskOptional=hiding(6, 9))) for n in (2, 3, 4, 6, 7, 8)),
        forbids("attenMaskOptional", attenMaskOptional=lambda old: old[None, None]),
        forbids("attenMaskOptional", **mode(6, attenMaskOptional=lambda old: PREFIX_TRIANGLE[:2048])),
        forbids("attenMaskOptional", attenMaskOptional=lambda old: PREFIX_TRIANGLE),
    ),
    clause(
        "prefix",
        "prefixOptional is one number per item: from 0 where Sq > Skv, else from Skv - Sq, up to Skv.",
        *(computes(**prefixed(5, 7, n)) for n in ([2, 7], [4, 4])),
        *(computes(**prefixed(7, 5, n)) for n in ([1, 5], [3, 4])),
        *(forbids("prefixOptional", **prefixed(5, 7, n)) for n in ([1, 6], [2, 8], [-1, 4], [4], [4, 4, 4], None)),
        *(forbids("prefixOptional", **prefixed(7, 5, n)) for n in ([-1, 4], [1, 6])),
    ),
    clause(
        "starts",
        "qStartIdxOptional and kvStartIdxOptional have no effect without a bias, nor has prefixOptional but in mode 6.",
        computes(qStartIdxOptional=[9], kvStartIdxOptional=[4]),
        computes(qStartIdxOptional=[9]),
        computes(prefixOptional=[0], **mode(0)),
    ),
    clause("precision", "innerPrecise is not used.", *(computes(innerPrecise=n) for n in (0, 1, 2, 3, 7, -1))),
    # ----------------------------------------------------------------------------------------------------------- shapes
    clause(
        "statistics",
        "softmaxMaxOptional and softmaxSumOptional are [T, N, 8]; head by head in every item, whatever the shape says.",
        computes(q=(3, 8, 12), kv=(5, 10, 15)),
        computes(q=(12,), kv=(15,), N=8),
        computes(N=1, N2=1),
        *(forbids(f"{name} softmaxSumOptional", **{name: widened}) for name in STATISTICS),
        *(forbids(name, **{name: longer}) for name in STATISTICS),
        ruling=7,
    ),
    clause(
        "statistics-axes",
        "They have three axes: one column says 4, the constraints and the example 3.",
        *(forbids(name, **{name: deeper}) for name in STATISTICS),
        ruling=28,
    ),
    clause(
        "shapes",
        "T, N, d and the number of sequences agree; gradients have the shape of what they belong to.",
        *(forbids(f"{name} keyIn", **{name: longer}) for name in (*ROWS[1:], *OUTPUTS)),
        *(forbids(name, **{name: longer}) for name in (*ROPES, *ROPE_OUTPUTS)),
        *(forbids(f"{name} dy", **{name: widened}) for name in ("value", "attentionInOptional", *OUTPUTS)),
        *(forbids(name, **{name: deeper}) for name in REQUIRED),
        *(forbids(" ".join(LENGTHS), **{name: [16]}) for name in LENGTHS[1:]),
        forbids(" ".join(LENGTHS), actualSeqQLenOptional=[3, 5, 11]),
    ),
    clause(
        "dims",
        "query and keyIn have one d, a multiple of 8, with and without rope.",
        *(computes(D=n, rope=rope) for n in (8, 24, 40) for rope in (True, False)),
        *(forbids("query queryRope", D=n, **x) for n in (12, 20, 1) for x in EITHER),
        forbids("keyIn", keyIn=lambda old: old[..., :8].contiguous()),
    ),
    clause(
        "rope-dims",
        "queryRope and keyInRope have one d, a multiple of 8, at most that of query.",
        *(computes(Dr=n) for n in (8, 16)),
        *(forbids("queryRope", Dr=n) for n in (4, 12, 24)),
        forbids(" ".join(ROPES), keyInRope=lambda old: torch.cat([old, old], -1)),
    ),
    clause(
        "dy",
        "dy has the shape of query where all d are the same; it goes with value.",
        computes(Dv=8),
        computes(Dv=8, rope=False),
        forbids("dy attentionInOptional", dy=widened),
    ),
    clause(
        "heads",
        "Nq / Nkv is a whole number; Nq is headNum, 1 to 256.",
        *(computes(N=n, N2=m) for n, m in ((1, 1), (4, 4), (6, 2), (8, 1))),
        computes(N=256, N2=2, D=8),
        *(forbids("query headNum", N=257, N2=257, D=8, **x) for x in EITHER),
        *(forbids("keyIn", N=4, N2=3, **x) for x in EITHER),
        *(forbids("headNum query", headNum=n) for n in (2, 3, 8, 0, -1)),
    ),
    clause(
        "sizes-d",
        "D is 1 to 512.",
        *(computes(D=512, q=(2,), kv=(3,), **x) for x in EITHER),
        *(forbids("query", D=n, q=(1,), kv=(1,), **x) for n in (520, 768) for x in EITHER),
    ),
    clause(
        "sizes-t",
        "T is 1 to 1M.",
        computes(q=(1,), kv=(2**16,), rope=False, **SMALL),
        forbids("keyIn query", q=(1,), kv=(2**20 + 1,), rope=False, **SMALL),
        forbids("query", q=(2**20 + 1,), kv=(1,), rope=False, sparseMode=2, **SMALL),
    ),
    clause(
        "sizes-b",
        "Lengths are 1 to 2K items, beside prefixOptional at most 1K.",
        computes(q=(1,) * 2047 + (2,), kv=(1,) * 2047 + (2,), **SMALL),
        *(forbids(" ".join(LENGTHS), q=ends(2049), kv=ends(2049), **SMALL, **x) for x in EITHER),
        computes(**mode(6, q=(1,) * 1023 + (2,), kv=(1,) * 1023 + (2,), prefixOptional=[1] + [0] * 1023), **SMALL),
        *(
            forbids(
                f"prefixOptional {' '.join(LENGTHS)}",
                **mode(6, q=ends(1025), kv=ends(1025), prefixOptional=[0] * 1025),
                **SMALL,
                **x,
            )
            for x in EITHER
        ),
    ),
    clause(
        "lengths",
        "Lengths are inclusive ends, one per item; an item may have no query.",
        computes(q=(5, 5, 11), kv=(7, 9, 16)),
        computes(q=(0, 11), kv=(0, 16)),
        computes(q=(5, 5, 11), kv=(7, 7, 16)),
        computes(q=(5, 5, 11), kv=(7, 9, 16), rope=False, dtype=F32),
        *(forbids(name, **{name: [n, 5]}) for name in LENGTHS for n in (11, 6)),
        *(forbids(name, **{name: [5, 17]}) for name in LENGTHS),
        *(forbids(name, **{name: [-1, 11]}) for name in LENGTHS),
    ),
    clause(
        "lengths-end",
        "T counts the tokens of all items: ends that stop before it are refused.",
        *(forbids(name, **{name: n}) for name, n in zip(LENGTHS, ([5, 10], [7, 15]), strict=True)),
        forbids(LENGTHS[0], actualSeqQLenOptional=[5, 6]),
    ),
    # ---------------------------------------------------------------------------------------------------------- numbers
    clause(
        "formulas",
        "dV = P^T dY, dQ = dS K, dqRope = dS kRope, dK = dS^T Q, dkRope = dS^T qRope, scaled once.",
        *(computes(q=(30, 77, 78), kv=(40, 140, 205), N=8, D=64, Dr=32, dtype=d, **x) for d in DTYPES for x in EITHER),
        *(computes(scaleValue=n) for n in (0.0, 1.0, -0.3)),
        *(computes(N=8, N2=2, dtype=F32, **mode(n)) for n in (0, 3, 6)),
        *(repeats(N=8, **x) for x in EITHER),
    ),
    clause(
        "strides",
        "Every tensor may be non-contiguous.",
        *(computes(**{name: gapped}) for name in ("query", *ROWS, *ROPES, *OUTPUTS, *ROPE_OUTPUTS)),
        *(computes(**{name: swapped}) for name in ("query", "dy", "dqOut", "attenMaskOptional")),
    ),
)

PAGE = Page("aclnnFlashAttentionUnpaddingScoreGradV3", PROTOTYPE, base, formula, CLAUSES, finish)
