"""Table of the page of aclnnFlashAttentionScoreV2: the edition for Atlas A2 that ends with a REG_OP."""

from typing import Any

import torch

from clauses.checks import (
    INVALID,
    NULL,
    RUN_TIME,
    Args,
    Check,
    Page,
    computes,
    filled,
    forbids,
    prototype,
    refuses,
    repeats,
)
from clauses.dtype_abbreviations import BF, BOOL, F32, F64, I8, I32, U8, H
from clauses.error_bounds import Near, near, softmax
from clauses.training_formulas import PREFIX_TRIANGLE, TRIANGLE, band, biased, bits, given, grid, hiding, tabled
from clauses.values import (
    GENERATOR,
    draw,
    drawn,
    drawn_integers,
    fractal,
    gapped,
    heads_first,
    prepared,
    swapped,
    to,
    zeros,
)

PROTOTYPE = prototype("""
    aclTensor   query key value realShiftOptional=pse dropMaskOptional paddingMaskOptional attenMaskOptional
    aclIntArray prefixOptional qStartIdxOptional kvStartIdxOptional
    double      scaleValueOptional=scale:1.0 keepProbOptional:1.0
    int64_t     preTokensOptional:2147483647 nextTokensOptional:2147483647 headNum
    char        inputLayout
    int64_t     innerPreciseOptional:0 sparseModeOptional:0 pseTypeOptional:1
    aclTensor   softmaxMaxOut softmaxSumOut softmaxOutOut attentionOutOut
""")
FLT_MAX = torch.finfo(torch.float32).max


def base(
    layout: str = "BSND",
    B: int = 2,
    S1: int = 5,
    S2: int = 7,
    N: int = 4,
    N2: int = 2,
    D: int = 16,
    Dv: int = 0,
    dtype: torch.dtype = H,
) -> Args:
    """Makes a legal call of padded batches; Dv = 0 means Dv = D."""
    query = prepared(draw(B, N, S1, D, d=dtype), layout)
    return filled(
        PROTOTYPE,
        query=query,
        key=prepared(draw(B, N2, S2, D, d=dtype), layout),
        value=prepared(draw(B, N2, S2, Dv or D, d=dtype), layout),
        scaleValueOptional=0.25,
        headNum=N,
        inputLayout=layout,
        softmaxMaxOut=torch.empty(B, N, S1, 8, dtype=F32),
        softmaxSumOut=torch.empty(B, N, S1, 8, dtype=F32),
        attentionOutOut=torch.empty_like(prepared(torch.empty(B, N, S1, Dv or D, dtype=dtype), layout)),
    )


def _visible(args: Args, batch: int, rows: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns visibility by the band [B, 1, rows, keys] and by the mask [B or 1, N or 1, rows, keys]."""
    mask, mode = given(args["attenMaskOptional"]), args["sparseModeOptional"]
    everything = torch.ones(1, 1, rows, keys, dtype=torch.bool)
    if mask is None:
        return everything, everything
    prefix = args["prefixOptional"] or [0] * batch
    low = max(keys - rows, 0)
    if mode == 5 and not all(low <= n <= keys for n in prefix):
        mode = 1
    tokens = args["preTokensOptional"], args["nextTokensOptional"]
    bands = torch.stack([band(mode, rows, keys, *tokens, n) for n in (prefix if mode in (5, 6) else prefix[:1])])
    return bands[:, None], mask == 0 if mode in (0, 1, 5) else everything


def _bias(args: Args, rows: int, keys: int) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Returns (bias [B or 1, N, rows or 1, keys] or slopes [B or 1, N], distances [rows, keys])."""
    i, j = grid(rows, keys)
    starts = [(args[name] or [0])[0] for name in ("qStartIdxOptional", "kvStartIdxOptional")]
    distance = (j + starts[1]) - (i + starts[0])
    bias = given(args["realShiftOptional"])
    if bias is not None and args["pseTypeOptional"] in (0, 1) and bias.shape[-2] == 1024 and rows > 1024:
        # A bias of 1024 rows depends on row - key: its last row has the values of all distances that a row sees.
        bias = tabled(torch.nn.functional.pad(bias[..., -1, :].flip(-1), (keys - 1, 0)), rows, keys)
    return bias, distance


def formula(args: Args) -> dict[str, Near]:
    """attention_out = Dropout(Softmax(Mask(scale * (query * key^T) + pse, atten_mask), keep_prob)) * value."""
    heads, layout, dtype = args["headNum"], args["inputLayout"], args["query"].dtype
    query = heads_first(args["query"], layout, heads)
    batch, _, rows, dim = query.shape
    width = args["key"].shape[-1]
    kv_heads = width // dim if layout in ("BSH", "SBH") else args["key"].shape[1 if layout == "BNSD" else 2]
    group = torch.arange(heads) // (heads // kv_heads)
    key, value = (heads_first(args[name], layout, kv_heads)[:, group] for name in ("key", "value"))
    keys = key.shape[2]
    if not (batch and rows and keys):
        return {name: near(torch.zeros_like(t)) for name in OUTPUTS if (t := args[name]) is not None}
    bias, distance = _bias(args, rows, keys)
    names = {"scaleValue": args["scaleValueOptional"], "pseType": args["pseTypeOptional"]}
    scores = biased(near(query) @ near(key).T, names, bias, distance)
    window, mask = _visible(args, batch, rows, keys)
    visible = (window & mask).expand(scores.value.shape)
    some, full = visible.any(-1, keepdim=True), (batch, heads, rows, 8)
    weights, top, total = softmax(scores, visible | ~some)
    zeros = args["innerPreciseOptional"] == 2 or not bool(window.any(-1).all())
    # Rows without keys return zeros, or the mean of all values.
    mean = near(torch.tensor(0.0 if zeros else 1 / keys))
    weights = Near(torch.where(some, weights.value, mean.value), torch.where(some, weights.slack, 0))
    drop = given(args["dropMaskOptional"])
    if drop is not None:
        keep = bits(drop, scores.value.numel()).reshape(scores.value.shape)
        weights = weights.only(keep, 0) / args["keepProbOptional"]
    out = (weights.rounded(dtype) @ near(value)).rounded(dtype)
    top, total = top.only(some, -FLT_MAX), total.only(some, FLT_MAX if zeros else keys)
    out = Near(prepared(out.value, layout), prepared(out.slack, layout))
    lanes = [Near(x.value.expand(full), x.slack.expand(full)) for x in (top, total)]
    return dict(zip(OUTPUTS, (*lanes, out), strict=True))


OUTPUTS = ("softmaxMaxOut", "softmaxSumOut", "attentionOutOut")


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
# Query length less than, greater than and equal to the key length.
SIDES = ({}, {"S1": 7, "S2": 5}, SQUARE)


def triangle(old: object) -> torch.Tensor:
    return TRIANGLE


def prefix_triangle(old: object) -> torch.Tensor:
    return PREFIX_TRIANGLE


def mode(number: int, **over: Any) -> dict[str, Any]:
    """Returns changes for a sparse mode and the mask that it needs."""
    mask = {0: hiding(2, 1, 5, 7), 1: hiding(2, 1, 5, 7), 6: prefix_triangle}.get(number, triangle)
    return {"sparseModeOptional": number, "attenMaskOptional": mask} | over


def full(*shape: int, number: int = 1, **over: Any) -> dict[str, Any]:
    """Returns changes for a mode with a full mask of the given shape."""
    return mode(number, attenMaskOptional=hiding(*shape), **over)


def prefixed(rows: int, keys: int, prefix: list[int], number: int = 6, **over: Any) -> dict[str, Any]:
    """Returns changes for mode 5 or 6 with prefixes; in mode 5 with the corresponding full mask."""
    i, j = torch.arange(rows)[:, None], torch.arange(keys)
    masks = torch.stack([(j > i + keys - rows) & (j >= n) for n in prefix])[:, None]
    mask = {"attenMaskOptional": lambda old: masks} if number == 5 else {}
    return {"S1": rows, "S2": keys} | mode(number, prefixOptional=prefix, **mask) | over


def shift(*shape: int, d: torch.dtype = H, kind: int = 1, **over: Any) -> Check:
    """Makes a check with a random bias of the given shape."""
    return computes(realShiftOptional=drawn(*shape, d=d), pseTypeOptional=kind, **over)


def slopes(*shape: int, kind: int, **over: Any) -> Check:
    """Makes a check with random slopes, from which the operator computes the bias."""
    return computes(realShiftOptional=lambda old: draw(*shape).abs(), pseTypeOptional=kind, **SQUARE | over)


def alibi(batch: int, rows: int, keys: int, **over: Any) -> dict[str, Any]:
    """Returns changes for the last 1024 rows of a bias that depends on row - key."""

    def last(old: object) -> torch.Tensor:
        return tabled(draw(batch, 1, rows + keys, d=H), rows, keys)[:, :, -1024:].contiguous()

    return {"B": 1, "S1": rows, "S2": keys, "N": 1, "N2": 1, "D": 8, "realShiftOptional": last} | over


def dropping(keep_prob: float, **over: Any) -> Check:
    """Makes a check of dropout with random bits."""
    bytes_ = 64

    def drawn_bits(old: object) -> torch.Tensor:
        keep = torch.rand(bytes_ * 8, generator=GENERATOR) < keep_prob
        return (keep.reshape(-1, 8) * (1 << torch.arange(8))).sum(1).to(U8)

    return computes(dropMaskOptional=drawn_bits, keepProbOptional=keep_prob, **over)


CLAUSES = {
    # ---------------------------------------------------------------------------------------------- layouts, dtypes
    "inputLayout is BSH, SBH, BSND or BNSD; rows are FLOAT16, BFLOAT16 or FLOAT32.": [
        *(computes(layout=x, dtype=d) for x in LAYOUTS for d in DTYPES),
        *(computes(layout=x, N=4, N2=n) for x in LAYOUTS for n in (1, 4)),
    ],
    "There is no other inputLayout.": [
        *(forbids("inputLayout", inputLayout=x) for x in ("TND", "bsnd", "XYZ", "", "BNSD_BSND")),
    ],
    "query, key, value and attentionOutOut have one dtype.": [
        *(refuses(INVALID, name, **{name: to(d)}) for name in ("key", "value", "attentionOutOut") for d in (BF, F32)),
        refuses(INVALID, "query key", query=to(F32)),
        refuses(INVALID, "query", dtype=F64),
        refuses(INVALID, "query", query=to(I8), key=to(I8), value=to(I8), attentionOutOut=to(I8)),
    ],
    "Statistics are FLOAT; attenMaskOptional is BOOL or UINT8, dropMaskOptional UINT8.": [
        *(refuses(INVALID, name, **{name: to(d)}) for name in OUTPUTS[:2] for d in (H, F64)),
        *(computes(**full(2, 1, 5, 7) | {"attenMaskOptional": hiding(5, 7, d=d)}) for d in (BOOL, U8)),
        *(refuses(INVALID, "attenMaskOptional", attenMaskOptional=zeros(5, 7, d=d)) for d in (I8, I32, H)),
        *(
            refuses(INVALID, "dropMaskOptional", keepProbOptional=0.5, dropMaskOptional=zeros(280, d=d))
            for d in (BOOL, I8)
        ),
    ],
    "paddingMaskOptional and softmaxOutOut are not used, and still have dtypes.": [
        *(refuses(INVALID, "paddingMaskOptional", paddingMaskOptional=zeros(5, 7, d=d)) for d in (F64, I32)),
        *(refuses(INVALID, "softmaxOutOut", softmaxOutOut=zeros(2, 4, 5, 8, d=d)) for d in (I8, F64)),
    ],
    "paddingMaskOptional and softmaxOutOut are null, 0-dim or empty: a real one is refused (ruling 20).": [
        forbids("paddingMaskOptional", paddingMaskOptional=zeros(5, 7, d=H)),
        forbids("softmaxOutOut", softmaxOutOut=zeros(2, 4, 5, 8, d=H)),
        *(computes(**{name: zeros(0, d=I8)}) for name in ("paddingMaskOptional", "softmaxOutOut")),
    ],
    "Tensors are ND.": [
        *(refuses(INVALID, name, **{name: fractal}) for name in REQUIRED),
        refuses(INVALID, "attenMaskOptional", attenMaskOptional=lambda old: fractal(zeros(5, 7, d=BOOL)(old))),
        refuses(INVALID, "realShiftOptional", realShiftOptional=lambda old: fractal(drawn(2, 4, 5, 7, d=H)(old))),
        refuses(
            INVALID,
            "dropMaskOptional",
            keepProbOptional=0.5,
            dropMaskOptional=lambda old: fractal(zeros(40, d=U8)(old)),
        ),
    ],
    # ---------------------------------------------------------------------------------------------- required arguments
    "Required tensors, outputs and inputLayout are not null.": [
        *(refuses(NULL, name, **{name: None}) for name in (*REQUIRED, "inputLayout")),
    ],
    "Optional tensors may be null, and are as good as null without axes or elements.": [
        *(computes(**{name: None}) for name in OPTIONAL),
        *(computes(**{name: zeros(*shape, d=d)}) for name, d in OPTIONAL.items() for shape in ((), (0,))),
        *(computes(**{name: []}) for name in ("prefixOptional", "qStartIdxOptional", "kvStartIdxOptional")),
    ],
    **RUN_TIME,
    # ---------------------------------------------------------------------------------------------------------- shapes
    "query, key and value have one B, key and value one S, query N = headNum; outputs go with query.": [
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
    ],
    "inputLayout holds for query, key and value alike.": [
        forbids("key value", key=drawn(2, 2, 7, 16, d=H), value=drawn(2, 2, 7, 16, d=H)),
        forbids("query", inputLayout="BSH"),
        forbids("query", layout="BSH", inputLayout="BNSD"),
    ],
    "query, key and value have one D; rows of key and value are as long.": [
        forbids("key", key=drawn(2, 7, 2, 8, d=H)),
        *(forbids("value", Dv=n, layout=x) for n in (24, 8) for x in ("BSND", "BSH")),
    ],
    "D is 1 to 512.": [
        *(computes(D=n, layout=x) for n, x in ((1, "BSND"), (5, "BSH"), (40, "BNSD"), (512, "SBH"))),
        *(forbids("query", D=n, B=1, S1=2, S2=3, N=1, N2=1) for n in (513, 768, 769)),
    ],
    "N is 1 to 256.": [
        computes(B=1, N=256, N2=256, D=4),
        computes(B=1, N=1, N2=1),
        forbids("query headNum", B=1, N=257, N2=257, D=4),
    ],
    "S is 1 to 1M.": [
        computes(B=1, S1=1, S2=2**20, N=1, N2=1, D=1),
        forbids("key query", B=1, S1=1, S2=2**20 + 1, N=1, N2=1, D=1),
        forbids("query", B=1, S1=2**20 + 1, S2=1, N=1, N2=1, D=1),
    ],
    "B is 1 to 2M, with prefixOptional at most 2K.": [
        computes(B=3000, S1=1, S2=1, N=1, N2=1, D=1),
        forbids("query", B=2**21 + 1, S1=1, S2=1, N=1, N2=1, D=1),
        computes(**prefixed(1, 1, [0] * 2048, B=2048, N=1, N2=1, D=1)),
        forbids("prefixOptional query", **prefixed(1, 1, [0] * 2049, B=2049, N=1, N2=1, D=1)),
    ],
    "Without rows there is nothing to do; without keys results are 0.": [
        *(computes(**{axis: 0}, layout=x) for axis in ("S2", "B", "S1") for x in ("BSND", "SBH")),
    ],
    # ------------------------------------------------------------------------------------------------------------ masks
    "attenMaskOptional is [B,N,S,S], [B,1,S,S], [1,1,S,S] or [S,S].": [
        *(computes(**full(*shape, number=number)) for shape in MASKS for number in (0, 1)),
        *(
            forbids("attenMaskOptional", **full(*shape))
            for shape in ((1, 4, 5, 7), (2, 1, 1, 7), (2, 5, 7), (7,), (5, 6), (2, 1, 7, 5), (2, 2, 5, 7))
        ),
    ],
    "attenMaskOptional has these shapes in mode 5 too, even where one mask serves several prefixes (ruling 28).": [
        computes(**prefixed(5, 7, [4, 6], 5)),
        computes(**prefixed(5, 7, [4], 5, B=1)),
        *(computes(**full(*shape, number=5, prefixOptional=[4, 6])) for shape in MASKS),
    ],
    "sparseModeOptional 0 to 6, as the page of sparse modes says.": [
        *(computes(**mode(n) | side) for n in (2, 3) for side in SIDES),
        *(computes(**mode(4, preTokensOptional=a, nextTokensOptional=b)) for a, b in ((2, 1), (0, 0), (-1, 3), (9, 0))),
        *(computes(**mode(4, preTokensOptional=3, nextTokensOptional=2) | side) for side in SIDES[1:]),
        *(computes(**prefixed(*s, n)) for s in ((5, 7, [4, 6]), (7, 5, [1, 5]), (6, 6, [0, 3])) for n in (5, 6)),
        computes(**mode(0, attenMaskOptional=zeros(5, 7, d=U8), preTokensOptional=2, nextTokensOptional=1)),
        computes(**mode(0, attenMaskOptional=hiding(5, 7), preTokensOptional=4, nextTokensOptional=3)),
    ],
    "Modes 2, 3 and 4 take the mask of 2048 x 2048, mode 6 that of 3072 x 2048, of two axes.": [
        *(forbids("attenMaskOptional", **mode(n, attenMaskOptional=hiding(5, 7))) for n in (2, 3, 4)),
        *(forbids("attenMaskOptional", **mode(n, attenMaskOptional=prefix_triangle)) for n in (2, 3, 4)),
        *(forbids("attenMaskOptional", **mode(n, attenMaskOptional=lambda old: TRIANGLE[None, None])) for n in (2, 3)),
        forbids("attenMaskOptional", **prefixed(5, 7, [4, 6]) | {"attenMaskOptional": triangle}),
        forbids("attenMaskOptional", **prefixed(5, 7, [4, 6]) | {"attenMaskOptional": hiding(2, 1, 5, 7)}),
    ],
    "There is no other sparseModeOptional.": [
        *(forbids("sparseModeOptional", sparseModeOptional=n, attenMaskOptional=triangle) for n in (7, 8, 9, -1)),
    ],
    "Modes 1, 2, 3, 5 and 6 take no notice of preTokensOptional and nextTokensOptional.": [
        *(computes(**mode(n, preTokensOptional=0, nextTokensOptional=0)) for n in (1, 2, 3)),
        *(computes(**prefixed(5, 7, [4, 6], n, preTokensOptional=0, nextTokensOptional=0)) for n in (5, 6)),
    ],
    "Without attenMaskOptional no mode hides a key (ruling 3).": [
        *(computes(sparseModeOptional=n) for n in range(1, 7)),
        computes(preTokensOptional=0, nextTokensOptional=0),
    ],
    "In mode 4 preTokensOptional and nextTokensOptional leave a band that meets the scores.": [
        forbids("preTokensOptional nextTokensOptional", **mode(4, preTokensOptional=-2, nextTokensOptional=-1)),
        forbids("preTokensOptional nextTokensOptional", **mode(4, preTokensOptional=-3, nextTokensOptional=1)),
        forbids("preTokensOptional nextTokensOptional", **mode(4, preTokensOptional=-9, nextTokensOptional=9)),
        computes(**mode(4, preTokensOptional=-1, nextTokensOptional=1)),
    ],
    "prefixOptional is one number per item: from 0 where Sq > Skv, else from Skv - Sq, up to Skv.": [
        computes(**prefixed(5, 7, [2, 7])),
        computes(**prefixed(7, 5, [0, 5])),
        *(forbids("prefixOptional", **prefixed(5, 7, n)) for n in ([1, 6], [2, 8], [-1, 4], [4], [4, 4, 4])),
        *(forbids("prefixOptional", **prefixed(7, 5, n)) for n in ([-1, 4], [0, 6])),
        forbids("prefixOptional", **mode(6)),
    ],
    "In mode 5 the mask decides: without a legal prefix it does so alone, as in mode 1 (ruling 28).": [
        computes(**full(2, 4, 5, 7, number=5, prefixOptional=[1, 6])),
        computes(**full(2, 1, 5, 7, number=5)),
        computes(**full(2, 1, 5, 7, number=5, prefixOptional=[9, 9])),
    ],
    "Rows that a mode leaves without keys are found; innerPreciseOptional 2 treats all such rows so (ruling 1).": [
        computes(**mode(3, S1=7, S2=5)),
        computes(**mode(4, S1=7, S2=5, preTokensOptional=1, nextTokensOptional=-1)),
        computes(innerPreciseOptional=2, attenMaskOptional=lambda old: torch.ones(5, 7, dtype=BOOL)),
        computes(innerPreciseOptional=2, **full(2, 1, 5, 7)),
    ],
    "innerPreciseOptional 0 and 1 are reserved: a row that its mask hides has the mean of all values (ruling 1).": [
        *(computes(innerPreciseOptional=n, attenMaskOptional=lambda old: torch.ones(5, 7, dtype=BOOL)) for n in (0, 1)),
        *(computes(innerPreciseOptional=n) for n in (0, 1, 2)),
        *(forbids("innerPreciseOptional", innerPreciseOptional=n) for n in (3, -1)),
    ],
    # ------------------------------------------------------------------------------------------------------------- bias
    "realShiftOptional is [B,N,S,S], [B,N,1,S] or [1,N,S,S]; pseTypeOptional 0 adds it to scaled scores, 1 before.": [
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
    ],
    "realShiftOptional has the dtype of query, and FLOAT32 where it holds slopes.": [
        *(refuses(INVALID, "realShiftOptional", realShiftOptional=drawn(2, 4, 5, 7, d=d)) for d in (BF, F32, F64)),
        *(
            refuses(INVALID, "realShiftOptional", realShiftOptional=drawn(4, d=d), pseTypeOptional=n, **SQUARE)
            for n in (2, 3)
            for d in (H, F64)
        ),
    ],
    "pseTypeOptional 2 and 3 compute the bias, 3 from roots of distances; slopes are FLOAT32 [B,N] or [N].": [
        *(slopes(*shape, kind=n) for shape in ((2, 4), (4,)) for n in (2, 3)),
        *(slopes(2, 4, kind=n, dtype=d) for n in (2, 3) for d in (BF, F32)),
        *(
            forbids("realShiftOptional", realShiftOptional=drawn(*s), pseTypeOptional=n, **SQUARE)
            for s in ((2,), (2, 2), (3, 4), (2, 4, 6, 6))
            for n in (2, 3)
        ),
        *(forbids("realShiftOptional", pseTypeOptional=n, **SQUARE) for n in (2, 3)),
    ],
    "qStartIdxOptional and kvStartIdxOptional say where a cut begins; each is 0 unless given (ruling 21).": [
        *(
            slopes(2, 4, kind=n, qStartIdxOptional=q, kvStartIdxOptional=k)
            for n in (2, 3)
            for q, k in (([9], [4]), ([9], None), (None, [9]), ([0], [100]))
        ),
        computes(qStartIdxOptional=[9], kvStartIdxOptional=[4]),
    ],
    "pseTypeOptional is 0, 1, 2 or 3.": [
        *(forbids("pseTypeOptional", pseTypeOptional=n, realShiftOptional=drawn(2, 4, 5, 7, d=H)) for n in (4, -1, 9)),
    ],
    "Where Sq > 1024 the last 1024 rows of a bias do, for equal Sq and Skv and what hides keys above the diagonal.": [
        computes(**alibi(1, 1030, 1030) | mode(3)),
        computes(**alibi(1, 1030, 1030) | mode(2, pseTypeOptional=0)),
        computes(**alibi(1, 1030, 1030) | mode(0, attenMaskOptional=lambda old: TRIANGLE[:1030, :1030].contiguous())),
        computes(**alibi(2, 1025, 1025, B=2) | mode(3)),
        forbids("realShiftOptional", **alibi(1, 1030, 1040) | mode(3)),
        forbids("realShiftOptional", **alibi(1, 1030, 1030)),
        forbids("realShiftOptional", **alibi(1, 1030, 1030) | mode(1, attenMaskOptional=zeros(1030, 1030, d=U8))),
        forbids("realShiftOptional", realShiftOptional=drawn(1, 4, 1024, 7, d=H)),
    ],
    # ---------------------------------------------------------------------------------------------------------- dropout
    "keepProbOptional lies in (0, 1].": [
        *(forbids("keepProbOptional", keepProbOptional=n) for n in (0.0, -0.1, 1.1, float("nan"), float("inf"))),
        computes(keepProbOptional=1.0),
    ],
    "A bit of dropMaskOptional per score: 1 keeps it, divided by keepProbOptional, not in statistics (ruling 9).": [
        *(dropping(keep_prob, layout=x) for keep_prob in (0.5, 0.9) for x in LAYOUTS),
        dropping(0.5, dtype=F32),
        dropping(0.7, **full(2, 4, 5, 7)),
        forbids("dropMaskOptional", keepProbOptional=0.5, dropMaskOptional=zeros(34, d=U8)),
    ],
    "dropMaskOptional and a keepProbOptional below 1 come together (ruling 9).": [
        forbids("dropMaskOptional keepProbOptional", keepProbOptional=0.5),
        forbids("dropMaskOptional keepProbOptional", dropMaskOptional=zeros(64, d=U8)),
    ],
    # ---------------------------------------------------------------------------------------------------------- numbers
    "Dropout(Softmax(Mask(scale * (query * key^T) + pse, atten_mask), keep_prob)) * value, all of it together.": [
        *(computes(B=1, S1=60, S2=90, D=64, dtype=d, **full(1, 1, 60, 90)) for d in DTYPES),
        *(computes(scaleValueOptional=s) for s in (0.0, 1.0, -0.5)),
        *(
            dropping(0.8, realShiftOptional=drawn(2, 4, 5, 7, d=d), pseTypeOptional=0, dtype=d, **full(5, 7))
            for d in DTYPES
        ),
        repeats(B=1, S1=100, S2=90, N=8),
        *(computes(**{name: change}) for name in ("query", "key", "value") for change in (gapped, swapped)),
        computes(attentionOutOut=gapped),
    ],
    "Bits of dropMaskOptional follow [B,N,Sq,Skv], least significant first (ruling 9).": [
        *(
            computes(
                keepProbOptional=0.5, dropMaskOptional=lambda old, n=n: drawn_integers(40, high=n, d=U8), dtype=F32
            )
            for n in (2, 256)
        ),
    ],
}

PAGE = Page("aclnnFlashAttentionScoreV2", PROTOTYPE, base, formula, CLAUSES)
