"""The page of aclnnFlashAttentionScoreV2, clause by clause: the edition for Atlas A2 that ends with a REG_OP."""

from typing import Any

import torch

from clauses.dtypes import BF, BOOL, F32, F64, I8, I32, U8, H
from clauses.flash_attention_score_v2_calls import OUTPUTS, PROTOTYPE, base, formula
from clauses.table import INVALID, NULL, RUN_TIME, Check, Page, clause, computes, forbids, refuses, repeats
from clauses.training import PREFIX_TRIANGLE, TRIANGLE, hiding, tabled
from clauses.values import GENERATOR, draw, drawn, drawn_integers, fractal, gapped, swapped, to, zeros

LAYOUTS = ("BSH", "SBH", "BSND", "BNSD")
DTYPES = (H, BF, F32)
REQUIRED = ("query", "key", "value", *OUTPUTS)
OPTIONAL = {
    "realShiftOptional": H,
    "dropMaskOptional": U8,
    "paddingMaskOptional": H,
    "attenMaskOptional": BOOL,
    "softmaxOutOut": H,
}
MASKS = ((2, 4, 5, 7), (2, 1, 5, 7), (1, 1, 5, 7), (5, 7))
SQUARE = {"S1": 6, "S2": 6}
# Queries, keys: fewer, more, as many.
SIDES = ({}, {"S1": 7, "S2": 5}, SQUARE)


def triangle(old: object) -> torch.Tensor:
    """The compressed mask of modes 2, 3 and 4."""
    return TRIANGLE


def prefix_triangle(old: object) -> torch.Tensor:
    """The compressed mask of mode 6."""
    return PREFIX_TRIANGLE


def mode(number: int, **over: Any) -> dict[str, Any]:
    """A sparse mode with the mask that it needs."""
    mask = {0: hiding(2, 1, 5, 7), 1: hiding(2, 1, 5, 7), 6: prefix_triangle}.get(number, triangle)
    return {"sparseModeOptional": number, "attenMaskOptional": mask} | over


def full(*shape: int, number: int = 1, **over: Any) -> dict[str, Any]:
    """A mode with a full mask of a shape."""
    return mode(number, attenMaskOptional=hiding(*shape), **over)


def prefixed(rows: int, keys: int, prefix: list[int], number: int = 6, **over: Any) -> dict[str, Any]:
    """Modes 5 and 6; of 5 the mask that the prefix stands for."""
    i, j = torch.arange(rows)[:, None], torch.arange(keys)
    masks = torch.stack([(j > i + keys - rows) & (j >= n) for n in prefix])[:, None]
    mask = {"attenMaskOptional": lambda old: masks} if number == 5 else {}
    return {"S1": rows, "S2": keys} | mode(number, prefixOptional=prefix, **mask) | over


def shift(*shape: int, d: torch.dtype = H, kind: int = 1, **over: Any) -> Check:
    """A bias."""
    return computes(realShiftOptional=drawn(*shape, d=d), pseTypeOptional=kind, **over)


def slopes(*shape: int, kind: int, **over: Any) -> Check:
    """Slopes of a bias that is computed."""
    return computes(realShiftOptional=lambda old: draw(*shape).abs(), pseTypeOptional=kind, **SQUARE | over)


def alibi(batch: int, rows: int, keys: int, **over: Any) -> dict[str, Any]:
    """The last 1024 rows of a bias that depends on row - key."""

    def last(old: object) -> torch.Tensor:
        return tabled(draw(batch, 1, rows + keys, d=H), rows, keys)[:, :, -1024:].contiguous()

    return {"B": 1, "S1": rows, "S2": keys, "N": 1, "N2": 1, "D": 8, "realShiftOptional": last} | over


def dropping(keep_prob: float, **over: Any) -> Check:
    """Dropout of about a share of the scores."""
    bytes_ = 64

    def drawn_bits(old: object) -> torch.Tensor:
        keep = torch.rand(bytes_ * 8, generator=GENERATOR) < keep_prob
        return (keep.reshape(-1, 8) * (1 << torch.arange(8))).sum(1).to(U8)

    return computes(dropMaskOptional=drawn_bits, keepProbOptional=keep_prob, **over)


CLAUSES = (
    # ---------------------------------------------------------------------------------------------- layouts, dtypes
    clause(
        "layouts",
        "inputLayout is BSH, SBH, BSND or BNSD; rows are FLOAT16, BFLOAT16 or FLOAT32.",
        *(computes(layout=x, dtype=d) for x in LAYOUTS for d in DTYPES),
        *(computes(layout=x, N=4, N2=n) for x in LAYOUTS for n in (1, 4)),
    ),
    clause(
        "layouts-else",
        "No other inputLayout.",
        *(forbids("inputLayout", inputLayout=x) for x in ("TND", "bsnd", "XYZ", "", "BNSD_BSND")),
    ),
    clause(
        "dtypes",
        "query, key, value and attentionOutOut have one dtype.",
        *(refuses(INVALID, name, **{name: to(d)}) for name in ("key", "value", "attentionOutOut") for d in (BF, F32)),
        refuses(INVALID, "query key", query=to(F32)),
        refuses(INVALID, "query", dtype=F64),
        refuses(INVALID, "query", query=to(I8), key=to(I8), value=to(I8), attentionOutOut=to(I8)),
    ),
    clause(
        "dtypes-else",
        "Statistics are FLOAT; attenMaskOptional is BOOL or UINT8, dropMaskOptional UINT8.",
        *(refuses(INVALID, name, **{name: to(d)}) for name in OUTPUTS[:2] for d in (H, F64)),
        *(computes(**full(2, 1, 5, 7) | {"attenMaskOptional": hiding(5, 7, d=d)}) for d in (BOOL, U8)),
        *(refuses(INVALID, "attenMaskOptional", attenMaskOptional=zeros(5, 7, d=d)) for d in (I8, I32, H)),
        *(
            refuses(INVALID, "dropMaskOptional", keepProbOptional=0.5, dropMaskOptional=zeros(280, d=d))
            for d in (BOOL, I8)
        ),
    ),
    clause(
        "dtypes-reserved",
        "paddingMaskOptional and softmaxOutOut are not used, and still have dtypes.",
        *(refuses(INVALID, "paddingMaskOptional", paddingMaskOptional=zeros(5, 7, d=d)) for d in (F64, I32)),
        *(refuses(INVALID, "softmaxOutOut", softmaxOutOut=zeros(2, 4, 5, 8, d=d)) for d in (I8, F64)),
    ),
    clause(
        "reserved",
        "paddingMaskOptional and softmaxOutOut are null, 0-dim or empty: a real one is refused.",
        forbids("paddingMaskOptional", paddingMaskOptional=zeros(5, 7, d=H)),
        forbids("softmaxOutOut", softmaxOutOut=zeros(2, 4, 5, 8, d=H)),
        *(computes(**{name: zeros(0, d=I8)}) for name in ("paddingMaskOptional", "softmaxOutOut")),
        ruling=20,
    ),
    clause(
        "formats",
        "Tensors are ND.",
        *(refuses(INVALID, name, **{name: fractal}) for name in REQUIRED),
        refuses(INVALID, "attenMaskOptional", attenMaskOptional=lambda old: fractal(zeros(5, 7, d=BOOL)(old))),
        refuses(INVALID, "realShiftOptional", realShiftOptional=lambda old: fractal(drawn(2, 4, 5, 7, d=H)(old))),
        refuses(
            INVALID,
            "dropMaskOptional",
            keepProbOptional=0.5,
            dropMaskOptional=lambda old: fractal(zeros(40, d=U8)(old)),
        ),
    ),
    # ---------------------------------------------------------------------------------------------- what must be there
    clause(
        "null",
        "A null required tensor, output or inputLayout.",
        *(refuses(NULL, name, **{name: None}) for name in (*REQUIRED, "inputLayout")),
    ),
    clause(
        "optional",
        "Optional tensors may be null, and are as good as null without axes or elements.",
        *(computes(**{name: None}) for name in OPTIONAL),
        *(computes(**{name: zeros(*shape, d=d)}) for name, d in OPTIONAL.items() for shape in ((), (0,))),
        *(computes(**{name: []}) for name in ("prefixOptional", "qStartIdxOptional", "kvStartIdxOptional")),
    ),
    RUN_TIME,
    # ---------------------------------------------------------------------------------------------------------- shapes
    clause(
        "shapes",
        "query, key and value have one B, key and value one S, query N = headNum; outputs go with query.",
        forbids("key value", key=drawn(3, 7, 2, 16, d=H)),
        forbids("value", value=drawn(3, 7, 2, 16, d=H)),
        forbids("value", value=drawn(2, 6, 2, 16, d=H)),
        forbids("value", value=drawn(2, 7, 4, 16, d=H)),
        *(forbids("headNum query", headNum=n) for n in (2, 3, 8, 0, -4)),
        forbids("key", N=4, N2=3),
        *(forbids(name, **{name: zeros(2, 4, 6, 8)}) for name in OUTPUTS[:2]),
        *(forbids(name, **{name: zeros(2, 4, 5, 1)}) for name in OUTPUTS[:2]),
        forbids("attentionOutOut", attentionOutOut=zeros(2, 5, 4, 8, d=H)),
        forbids("key", key=drawn(2, 7, 32, d=H)),
    ),
    clause(
        "one-layout",
        "inputLayout holds for query, key and value alike.",
        forbids("key value", key=drawn(2, 2, 7, 16, d=H), value=drawn(2, 2, 7, 16, d=H)),
        forbids("query", inputLayout="BSH"),
        forbids("query", layout="BSH", inputLayout="BNSD"),
    ),
    clause(
        "dims",
        "query, key and value have one D; rows of key and value are as long.",
        forbids("key", key=drawn(2, 7, 2, 8, d=H)),
        *(forbids("value", Dv=n, layout=x) for n in (24, 8) for x in ("BSND", "BSH")),
    ),
    clause(
        "sizes-d",
        "D is 1 to 512.",
        *(computes(D=n, layout=x) for n, x in ((1, "BSND"), (5, "BSH"), (40, "BNSD"), (512, "SBH"))),
        *(forbids("query", D=n, B=1, S1=2, S2=3, N=1, N2=1) for n in (513, 768, 769)),
    ),
    clause(
        "sizes-n",
        "N is 1 to 256.",
        computes(B=1, N=256, N2=256, D=4),
        computes(B=1, N=1, N2=1),
        forbids("query headNum", B=1, N=257, N2=257, D=4),
    ),
    clause(
        "sizes-s",
        "S is 1 to 1M.",
        computes(B=1, S1=1, S2=2**20, N=1, N2=1, D=1),
        forbids("key query", B=1, S1=1, S2=2**20 + 1, N=1, N2=1, D=1),
        forbids("query", B=1, S1=2**20 + 1, S2=1, N=1, N2=1, D=1),
    ),
    clause(
        "sizes-b",
        "B is 1 to 2M, with prefixOptional at most 2K.",
        computes(B=3000, S1=1, S2=1, N=1, N2=1, D=1),
        forbids("query", B=2**21 + 1, S1=1, S2=1, N=1, N2=1, D=1),
        computes(**prefixed(1, 1, [0] * 2048, B=2048, N=1, N2=1, D=1)),
        forbids("prefixOptional query", **prefixed(1, 1, [0] * 2049, B=2049, N=1, N2=1, D=1)),
    ),
    clause(
        "empty",
        "Without rows there is nothing to do; without keys results are 0.",
        *(computes(**{axis: 0}, layout=x) for axis in ("S2", "B", "S1") for x in ("BSND", "SBH")),
    ),
    # ------------------------------------------------------------------------------------------------------------ masks
    clause(
        "mask-shapes",
        "attenMaskOptional is [B,N,S,S], [B,1,S,S], [1,1,S,S] or [S,S].",
        *(computes(**full(*shape, number=number)) for shape in MASKS for number in (0, 1)),
        *(
            forbids("attenMaskOptional", **full(*shape))
            for shape in ((1, 4, 5, 7), (2, 1, 1, 7), (2, 5, 7), (7,), (5, 6), (2, 1, 7, 5), (2, 2, 5, 7))
        ),
    ),
    clause(
        "mask-shapes-prefix",
        "In mode 5, too, even where one mask serves several prefixes.",
        computes(**prefixed(5, 7, [4, 6], 5)),
        computes(**prefixed(5, 7, [4], 5, B=1)),
        *(computes(**full(*shape, number=5, prefixOptional=[4, 6])) for shape in MASKS),
        ruling=28,
    ),
    clause(
        "modes",
        "sparseModeOptional 0 to 6, as the page of sparse modes says.",
        *(computes(**mode(n) | side) for n in (2, 3) for side in SIDES),
        *(computes(**mode(4, preTokensOptional=a, nextTokensOptional=b)) for a, b in ((2, 1), (0, 0), (-1, 3), (9, 0))),
        *(computes(**mode(4, preTokensOptional=3, nextTokensOptional=2) | side) for side in SIDES[1:]),
        *(computes(**prefixed(*s, n)) for s in ((5, 7, [4, 6]), (7, 5, [1, 5]), (6, 6, [0, 3])) for n in (5, 6)),
        computes(**mode(0, attenMaskOptional=zeros(5, 7, d=U8), preTokensOptional=2, nextTokensOptional=1)),
        computes(**mode(0, attenMaskOptional=hiding(5, 7), preTokensOptional=4, nextTokensOptional=3)),
    ),
    clause(
        "modes-masks",
        "Modes 2, 3 and 4 take the mask of 2048 x 2048, mode 6 that of 3072 x 2048, of two axes.",
        *(forbids("attenMaskOptional", **mode(n, attenMaskOptional=hiding(5, 7))) for n in (2, 3, 4)),
        *(forbids("attenMaskOptional", **mode(n, attenMaskOptional=prefix_triangle)) for n in (2, 3, 4)),
        *(forbids("attenMaskOptional", **mode(n, attenMaskOptional=lambda old: TRIANGLE[None, None])) for n in (2, 3)),
        forbids("attenMaskOptional", **prefixed(5, 7, [4, 6]) | {"attenMaskOptional": triangle}),
        forbids("attenMaskOptional", **prefixed(5, 7, [4, 6]) | {"attenMaskOptional": hiding(2, 1, 5, 7)}),
    ),
    clause(
        "modes-else",
        "No other sparseModeOptional.",
        *(forbids("sparseModeOptional", sparseModeOptional=n, attenMaskOptional=triangle) for n in (7, 8, 9, -1)),
    ),
    clause(
        "modes-tokens",
        "Modes 1, 2, 3, 5 and 6 take no notice of preTokensOptional and nextTokensOptional.",
        *(computes(**mode(n, preTokensOptional=0, nextTokensOptional=0)) for n in (1, 2, 3)),
        *(computes(**prefixed(5, 7, [4, 6], n, preTokensOptional=0, nextTokensOptional=0)) for n in (5, 6)),
    ),
    clause(
        "modes-bare",
        "Without attenMaskOptional no mode hides a key.",
        *(computes(sparseModeOptional=n) for n in range(1, 7)),
        computes(preTokensOptional=0, nextTokensOptional=0),
        ruling=3,
    ),
    clause(
        "band",
        "In mode 4 the tokens meet.",
        forbids("preTokensOptional nextTokensOptional", **mode(4, preTokensOptional=-2, nextTokensOptional=-1)),
        forbids("preTokensOptional nextTokensOptional", **mode(4, preTokensOptional=-3, nextTokensOptional=1)),
        forbids("preTokensOptional nextTokensOptional", **mode(4, preTokensOptional=-9, nextTokensOptional=9)),
        computes(**mode(4, preTokensOptional=-1, nextTokensOptional=1)),
    ),
    clause(
        "prefix",
        "prefixOptional is one number per item: from 0 where Sq > Skv, else from Skv - Sq, up to Skv.",
        computes(**prefixed(5, 7, [2, 7])),
        computes(**prefixed(7, 5, [0, 5])),
        *(forbids("prefixOptional", **prefixed(5, 7, n)) for n in ([1, 6], [2, 8], [-1, 4], [4], [4, 4, 4])),
        *(forbids("prefixOptional", **prefixed(7, 5, n)) for n in ([-1, 4], [0, 6])),
        forbids("prefixOptional", **mode(6)),
    ),
    clause(
        "prefix-mode-5",
        "In mode 5 the mask decides: without a legal prefix it does so alone, as in mode 1.",
        computes(**full(2, 4, 5, 7, number=5, prefixOptional=[1, 6])),
        computes(**full(2, 1, 5, 7, number=5)),
        computes(**full(2, 1, 5, 7, number=5, prefixOptional=[9, 9])),
        ruling=28,
    ),
    clause(
        "rows-without-keys",
        "Rows that a mode leaves without keys are found by themselves; innerPreciseOptional 2 treats all such rows so.",
        computes(**mode(3, S1=7, S2=5)),
        computes(**mode(4, S1=7, S2=5, preTokensOptional=1, nextTokensOptional=-1)),
        computes(innerPreciseOptional=2, attenMaskOptional=lambda old: torch.ones(5, 7, dtype=BOOL)),
        computes(innerPreciseOptional=2, **full(2, 1, 5, 7)),
        ruling=1,
    ),
    clause(
        "precision",
        "innerPreciseOptional 0 and 1 are reserved: a row that its mask leaves nothing has the mean of all values.",
        *(computes(innerPreciseOptional=n, attenMaskOptional=lambda old: torch.ones(5, 7, dtype=BOOL)) for n in (0, 1)),
        *(computes(innerPreciseOptional=n) for n in (0, 1, 2)),
        *(forbids("innerPreciseOptional", innerPreciseOptional=n) for n in (3, -1)),
        ruling=1,
    ),
    # ------------------------------------------------------------------------------------------------------------- bias
    clause(
        "shift",
        "realShiftOptional is [B,N,S,S], [B,N,1,S] or [1,N,S,S]; pseTypeOptional 0 adds it to scaled scores, 1 before.",
        *(
            shift(*s, kind=n, dtype=d, d=d)
            for s in ((2, 4, 5, 7), (2, 4, 1, 7), (1, 4, 5, 7))
            for n in (0, 1)
            for d in DTYPES
        ),
        *(
            forbids("realShiftOptional", realShiftOptional=drawn(*s, d=H))
            for s in ((2, 1, 5, 7), (1, 1, 5, 7), (5, 7), (2, 2, 5, 7), (2, 4, 5, 6), (2, 4, 5, 1), (4, 5, 7))
        ),
    ),
    clause(
        "shift-dtype",
        "realShiftOptional has the dtype of query, and FLOAT32 where it holds slopes.",
        *(refuses(INVALID, "realShiftOptional", realShiftOptional=drawn(2, 4, 5, 7, d=d)) for d in (BF, F32, F64)),
        *(
            refuses(INVALID, "realShiftOptional", realShiftOptional=drawn(4, d=d), pseTypeOptional=n, **SQUARE)
            for n in (2, 3)
            for d in (H, F64)
        ),
    ),
    clause(
        "slopes",
        "pseTypeOptional 2 and 3 compute the bias, 3 from roots of distances; slopes are FLOAT32 [B,N] or [N].",
        *(slopes(*shape, kind=n) for shape in ((2, 4), (4,)) for n in (2, 3)),
        *(slopes(2, 4, kind=n, dtype=d) for n in (2, 3) for d in (BF, F32)),
        *(
            forbids("realShiftOptional", realShiftOptional=drawn(*s), pseTypeOptional=n, **SQUARE)
            for s in ((2,), (2, 2), (3, 4), (2, 4, 6, 6))
            for n in (2, 3)
        ),
        *(forbids("realShiftOptional", pseTypeOptional=n, **SQUARE) for n in (2, 3)),
    ),
    clause(
        "starts",
        "qStartIdxOptional and kvStartIdxOptional say where a cut begins; each is 0 unless given.",
        *(
            slopes(2, 4, kind=n, qStartIdxOptional=q, kvStartIdxOptional=k)
            for n in (2, 3)
            for q, k in (([9], [4]), ([9], None), (None, [9]), ([0], [100]))
        ),
        computes(qStartIdxOptional=[9], kvStartIdxOptional=[4]),
        ruling=21,
    ),
    clause(
        "pse-type",
        "pseTypeOptional is 0, 1, 2 or 3.",
        *(forbids("pseTypeOptional", pseTypeOptional=n, realShiftOptional=drawn(2, 4, 5, 7, d=H)) for n in (4, -1, 9)),
    ),
    clause(
        "alibi",
        "Where Sq > 1024 the last 1024 rows of a bias do, for equal Sq and Skv and what hides keys above the diagonal.",
        computes(**alibi(1, 1030, 1030) | mode(3)),
        computes(**alibi(1, 1030, 1030) | mode(2, pseTypeOptional=0)),
        computes(**alibi(1, 1030, 1030) | mode(0, attenMaskOptional=lambda old: TRIANGLE[:1030, :1030].contiguous())),
        computes(**alibi(2, 1025, 1025, B=2) | mode(3)),
        forbids("realShiftOptional", **alibi(1, 1030, 1040) | mode(3)),
        forbids("realShiftOptional", **alibi(1, 1030, 1030)),
        forbids("realShiftOptional", **alibi(1, 1030, 1030) | mode(1, attenMaskOptional=zeros(1030, 1030, d=U8))),
        forbids("realShiftOptional", realShiftOptional=drawn(1, 4, 1024, 7, d=H)),
    ),
    # ---------------------------------------------------------------------------------------------------------- dropout
    clause(
        "keep",
        "keepProbOptional lies in (0, 1].",
        *(forbids("keepProbOptional", keepProbOptional=n) for n in (0.0, -0.1, 1.1, float("nan"), float("inf"))),
        computes(keepProbOptional=1.0),
    ),
    clause(
        "dropout",
        "A bit of dropMaskOptional per score, 1 keeps it and divides by keepProbOptional; statistics do not see it.",
        *(dropping(keep_prob, layout=x) for keep_prob in (0.5, 0.9) for x in LAYOUTS),
        dropping(0.5, dtype=F32),
        dropping(0.7, **full(2, 4, 5, 7)),
        forbids("dropMaskOptional", keepProbOptional=0.5, dropMaskOptional=zeros(34, d=U8)),
        ruling=9,
    ),
    clause(
        "dropout-both",
        "dropMaskOptional and a keepProbOptional below 1 come together.",
        forbids("dropMaskOptional keepProbOptional", keepProbOptional=0.5),
        forbids("dropMaskOptional keepProbOptional", dropMaskOptional=zeros(64, d=U8)),
        ruling=9,
    ),
    # ---------------------------------------------------------------------------------------------------------- numbers
    clause(
        "formula",
        "Dropout(Softmax(Mask(scale * (query * key^T) + pse, atten_mask), keep_prob)) * value, all of it together.",
        *(computes(B=1, S1=60, S2=90, D=64, dtype=d, **full(1, 1, 60, 90)) for d in DTYPES),
        *(computes(scaleValueOptional=s) for s in (0.0, 1.0, -0.5)),
        *(
            dropping(0.8, realShiftOptional=drawn(2, 4, 5, 7, d=d), pseTypeOptional=0, dtype=d, **full(5, 7))
            for d in DTYPES
        ),
        repeats(B=1, S1=100, S2=90, N=8),
        *(computes(**{name: change}) for name in ("query", "key", "value") for change in (gapped, swapped)),
        computes(attentionOutOut=gapped),
    ),
    clause(
        "words",
        "Bits of dropMaskOptional follow [B,N,Sq,Skv], least significant first.",
        *(
            computes(
                keepProbOptional=0.5, dropMaskOptional=lambda old, n=n: drawn_integers(40, high=n, d=U8), dtype=F32
            )
            for n in (2, 256)
        ),
        ruling=9,
    ),
)

PAGE = Page("aclnnFlashAttentionScoreV2", PROTOTYPE, base, formula, CLAUSES)
