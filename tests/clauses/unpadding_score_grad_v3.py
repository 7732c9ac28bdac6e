"""Table of the page of aclnnFlashAttentionUnpaddingScoreGradV3: the edition for Atlas A2 and A3."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from clauses.checks import INVALID, NULL, RUN_TIME, Args, Page, computes, filled, forbids, prototype, refuses, repeats
from clauses.dtype_abbreviations import BF, BOOL, F32, F64, I8, I32, U8, H
from clauses.error_bounds import Near, near, softmax
from clauses.selected_key_helpers import Item, packed
from clauses.training_formulas import INF, PREFIX_TRIANGLE, TRIANGLE, band, edge_mode, given, hiding
from clauses.values import deeper, draw, drawn, ends, fractal, gapped, longer, swapped, to, widened, zeros

PROTOTYPE = prototype("""
    aclTensor   query queryRope keyIn keyInRope=key_rope value dy pseShiftOptional=pse dropMaskOptional
    aclTensor   paddingMaskOptional attenMaskOptional softmaxMaxOptional softmaxSumOptional
    aclTensor   softmaxInOptional=softmax_in attentionInOptional=attention_in
    aclIntArray prefixOptional actualSeqQLenOptional actualSeqKvLenOptional qStartIdxOptional kvStartIdxOptional
    double      scaleValue=scale keepProb
    int64_t     preTokens nextTokens headNum
    char        inputLayout
    int64_t     innerPrecise sparseMode pseType
    aclTensor   dqOut dqRopeOut dkOut dkRopeOut dvOut dpseOut
""")


def base(
    q: Sequence[int] = (5, 11),
    kv: Sequence[int] = (7, 16),
    N: int = 4,
    N2: int = 2,
    D: int = 16,
    Dv: int = 0,
    Dr: int = 8,
    dtype: torch.dtype = BF,
    rope: bool = True,
) -> Args:
    """Makes a legal call; q, kv: inclusive ends of packed sequences; Dv = 0 means Dv = D."""
    t1, t2 = q[-1], kv[-1]
    query, key, value = draw(t1, N, D, d=dtype), draw(t2, N2, D, d=dtype), draw(t2, N2, Dv or D, d=dtype)
    query_rope, key_rope = (draw(t, n, Dr, d=dtype) if rope else None for t, n in ((t1, N), (t2, N2)))
    dy = draw(t1, N, Dv or D, d=dtype)
    return filled(
        PROTOTYPE,
        query=query,
        queryRope=query_rope,
        keyIn=key,
        keyInRope=key_rope,
        value=value,
        dy=dy,
        attenMaskOptional=TRIANGLE,
        softmaxMaxOptional=torch.zeros(t1, N, 8, dtype=F32),
        softmaxSumOptional=torch.ones(t1, N, 8, dtype=F32),
        attentionInOptional=torch.zeros_like(dy),
        actualSeqQLenOptional=list(q),
        actualSeqKvLenOptional=list(kv),
        scaleValue=0.2,
        keepProb=1.0,
        preTokens=INF,
        nextTokens=INF,
        headNum=N,
        inputLayout="TND",
        innerPrecise=0,
        sparseMode=3,
        pseType=1,
        dqOut=torch.empty_like(query),
        dqRopeOut=torch.empty_like(query_rope) if rope else None,
        dkOut=torch.empty_like(key),
        dkRopeOut=torch.empty_like(key_rope) if rope else None,
        dvOut=torch.empty_like(value),
    )


def _visible(args: Args, items: Sequence[Item], number: int) -> torch.Tensor:
    """Returns bool [N or 1, rows, keys]: visible keys of a sequence."""
    item, mode, mask = items[number], args["sparseMode"], args["attenMaskOptional"]
    unmasked = torch.ones(1, item.rows, item.keys, dtype=torch.bool)
    if mode in (0, 1):
        full = mask if mask.dim() == 4 else mask[None, None]
        unmasked = full[number if full.shape[0] > 1 else 0, :, : item.rows, : item.keys] == 0
    if mode in (7, 8):
        used = [i for i, other in enumerate(items) if other.rows]
        mode = edge_mode(mode, number == used[0], number == used[-1])
    prefix = (args["prefixOptional"] or [0] * len(items))[number] if mode == 6 else 0
    return unmasked & band(mode, item.rows, item.keys, args["preTokens"], args["nextTokens"], prefix)


def rows_of(args: Args, item: Item) -> Iterator[Near]:
    """Yields query, key, value, dy and attentionIn of a sequence [N, S, D]: rope parts appended, key heads repeated."""
    heads = args["headNum"]
    rows, keys = slice(item.row, item.row + item.rows), slice(item.key, item.key + item.keys)
    names = ("query", rows, "queryRope"), ("keyIn", keys, "keyInRope"), ("value", keys, None)
    for name, where, rope in (*names, ("dy", rows, None), ("attentionInOptional", rows, None)):
        t = args[name][where]
        rope_rows = given(args[rope]) if rope else None
        t = t if rope_rows is None else torch.cat([t, rope_rows[where]], -1)
        group = torch.arange(heads) // (heads // t.shape[1])
        yield near(t.transpose(0, 1)[group])


def sequences(args: Args) -> Iterator[tuple[Item, torch.Tensor]]:
    """Yields every sequence with rows and keys, and its visible keys."""
    items = list(packed(args["actualSeqQLenOptional"], args["actualSeqKvLenOptional"]))
    return ((item, _visible(args, items, i)) for i, item in enumerate(items) if item.rows and item.keys)


def finish(args: Args, changed: frozenset[str]) -> None:
    """Sets attentionIn, softmaxMax and softmaxSum to results of the forward; statistics are head-major per sequence."""
    out = torch.zeros(args["dy"].shape, dtype=torch.float64)
    rows, heads = args["query"].shape[:2]
    statistics = torch.zeros(rows * heads), torch.ones(rows * heads)
    for item, visible in sequences(args):
        query, key, value, *_ = rows_of(args, item)
        some = visible.any(-1, keepdim=True)
        p, top, total = softmax((query @ key.T) * args["scaleValue"], (visible | ~some).expand(heads, -1, -1))
        out[item.row : item.row + item.rows] = ((p.value * some) @ value.value).transpose(0, 1)
        where = slice(item.row * heads, (item.row + item.rows) * heads)
        statistics[0][where], statistics[1][where] = top.value.reshape(-1).float(), total.value.reshape(-1).float()
    for name, rows in zip(("softmaxMaxOptional", "softmaxSumOptional"), statistics, strict=True):
        if name not in changed:
            args[name] = rows[:, None].expand(-1, 8).reshape(args[name].shape).contiguous()
    if "attentionInOptional" not in changed:
        args["attentionInOptional"] = out.to(args["dy"].dtype)


def formula(args: Args) -> dict[str, Near]:
    """dV = P^T dY, dS = P * (dY V^T - rowsum(dY * Y)), [dQ, dqRope] = dS K and [dK, dkRope] = dS^T Q, times scale."""
    heads, dim, dtype = args["headNum"], args["query"].shape[-1], args["query"].dtype
    sums = {}
    for name, argument, rope in (("q", "query", "queryRope"), ("k", "keyIn", "keyInRope"), ("v", "value", None)):
        rope_rows = given(args[rope]) if rope else None
        more = 0 if rope_rows is None else rope_rows.shape[-1]
        sums[name] = near(torch.zeros(*args[argument].shape[:2], args[argument].shape[2] + more))
    for item, visible in sequences(args):
        query, key, value, dy, out = rows_of(args, item)
        visible = visible.expand(heads, -1, -1)
        some = visible.any(-1, keepdim=True)
        p = softmax((query @ key.T) * args["scaleValue"], visible | ~some)[0].only(visible, 0)
        d_s = p * ((dy @ value.T) - (dy * out).sum(-1))
        d_s, p = d_s.rounded(dtype).only(visible, 0), p.rounded(dtype).only(visible, 0)
        rows, keys = slice(item.row, item.row + item.rows), slice(item.key, item.key + item.keys)
        _add(sums["q"], rows, (d_s @ key) * args["scaleValue"])
        _add(sums["k"], keys, (d_s.T @ query) * args["scaleValue"])
        _add(sums["v"], keys, p.T @ dy)
    results = {"dqOut": sums["q"][..., :dim], "dkOut": sums["k"][..., :dim], "dvOut": sums["v"]}
    if given(args["queryRope"]) is not None:
        results |= {"dqRopeOut": sums["q"][..., dim:], "dkRopeOut": sums["k"][..., dim:]}
    return {name: x.rounded(dtype) for name, x in results.items()}


def _add(total: Near, where: slice, addend: Near) -> None:
    """Writes head-major rows to the token-major total; query heads that share a key head are summed."""
    heads = total.value.shape[1]
    grouped = Near(*(x.reshape(heads, -1, *x.shape[1:]) for x in (addend.value, addend.slack))).sum(1)
    total.value[where], total.slack[where] = (x[:, 0].transpose(0, 1) for x in (grouped.value, grouped.slack))


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
    """Returns changes for a sparse mode, with the mask and the numbers that it needs."""
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
    """Returns changes for mode 6 with two sequences of these lengths."""
    return mode(6, q=(q, 2 * q), kv=(kv, 2 * kv), prefixOptional=prefix)


CLAUSES = {
    # ---------------------------------------------------------------------------------------------------------- dtypes
    "query, keyIn, value, dy, attentionInOptional and gradients are FLOAT16, BFLOAT16 or FLOAT32, all of one.": [
        *(computes(dtype=d, rope=False) for d in DTYPES),
        computes(),
        *(refuses(INVALID, name, **{name: to(d)}) for name in (*ROWS, *OUTPUTS) for d in (H, F32)),
        *(refuses(INVALID, name, rope=False, **{name: to(F64)}) for name in (*ROWS, *OUTPUTS)),
        refuses(INVALID, "query keyIn", query=to(H)),
        refuses(INVALID, "query", dtype=F64),
        refuses(INVALID, "query keyIn", query=to(I8)),
        refuses(INVALID, "keyIn", keyIn=to(I32)),
    ],
    "queryRope and keyInRope: BFLOAT16 by one column, as query by another, which holds (ruling 28).": [
        *(computes(dtype=d) for d in DTYPES),
        *(refuses(INVALID, name, **{name: to(d)}) for name in (*ROPES, *ROPE_OUTPUTS) for d in (H, F32)),
        refuses(INVALID, "queryRope", dtype=H, queryRope=to(BF)),
    ],
    "Statistics are FLOAT, attenMaskOptional BOOL or UINT8, dropMaskOptional UINT8.": [
        *(refuses(INVALID, name, **{name: to(d)}) for name in STATISTICS for d in (BF, F64)),
        *(computes(attenMaskOptional=to(d)) for d in (BOOL, U8)),
        *(refuses(INVALID, "attenMaskOptional", attenMaskOptional=to(d)) for d in (I8, I32)),
        refuses(INVALID, "dropMaskOptional", dropMaskOptional=zeros(99, d=BOOL), rope=False),
    ],
    "paddingMaskOptional and softmaxInOptional are not used, and still have dtypes.": [
        *(refuses(INVALID, "paddingMaskOptional", paddingMaskOptional=zeros(6, 9, d=d)) for d in (F64, I32)),
        *(refuses(INVALID, "softmaxInOptional", softmaxInOptional=zeros(11, 4, 8, d=d)) for d in (I8, F64)),
    ],
    "Tensors are ND.": [
        *(
            refuses(INVALID, name, **{name: fractal})
            for name in (*REQUIRED, *ROPES, *ROPE_OUTPUTS, "attenMaskOptional")
        ),
    ],
    # ---------------------------------------------------------------------------------------------- required arguments
    "Required tensors, outputs, inputLayout and lengths are not null.": [
        *(refuses(NULL, name, **{name: None}) for name in (*REQUIRED, "inputLayout", *LENGTHS)),
    ],
    **RUN_TIME,
    "Both rope parts or none, their gradients with them.": [
        computes(rope=False),
        computes(**NO_ROPE),
        *(refuses(NULL, " ".join(ROPES), **{name: None}) for name in ROPES),
        *(refuses(NULL, name, **{name: None}) for name in ROPE_OUTPUTS),
    ],
    "Dimension 0: optional tensors are as good as null without axes or elements; so are empty arrays.": [
        *(computes(**{name: zeros(*s, d=d)}) for name, d in OPTIONAL.items() for s in ((), (0,))),
        *(computes(**NO_ROPE | dict.fromkeys(ROPES, zeros(*s, d=BF))) for s in ((), (0,))),
        *(computes(**NO_ROPE | dict.fromkeys(ROPE_OUTPUTS, zeros(*s, d=BF))) for s in ((), (0,))),
        *(computes(dpseOut=zeros(*s, d=BF)) for s in ((), (0,))),
        *(computes(**{name: []}) for name in ("prefixOptional", "qStartIdxOptional", "kvStartIdxOptional")),
    ],
    "pseShiftOptional is null, with and without rope.": [
        *(forbids("pseShiftOptional queryRope", pseShiftOptional=drawn(1, 4, 1024, 9, d=BF), **x) for x in EITHER),
        forbids(
            "pseShiftOptional",
            rope=False,
            pseShiftOptional=drawn(1, 4, 1024, 9, d=BF),
            dpseOut=zeros(1, 4, 1024, 9, d=BF),
        ),
    ],
    "dpseOut is not used: a real tensor is refused (ruling 28).": [
        *(forbids("dpseOut", dpseOut=zeros(1, 4, 1024, 9, d=BF), **x) for x in EITHER),
    ],
    "Mode 7 takes no bias; mode 8 may by its own line, and does not, since none is ever taken (ruling 28).": [
        *(
            forbids("pseShiftOptional queryRope", **mode(n), pseShiftOptional=drawn(1, 4, 1024, 9, d=BF))
            for n in (7, 8)
        ),
    ],
    "dropMaskOptional is null and keepProb 1, with and without rope.": [
        *(
            forbids("dropMaskOptional keepProb queryRope", keepProb=0.5, dropMaskOptional=zeros(99, d=U8), **x)
            for x in EITHER
        ),
        *(forbids("keepProb dropMaskOptional queryRope", keepProb=n, **x) for n in (0.9, 0.0, 1.1) for x in EITHER),
        *(forbids("dropMaskOptional queryRope", dropMaskOptional=zeros(99, d=U8), **x) for x in EITHER),
    ],
    "attenMaskOptional is given, with and without rope.": [
        *(refuses(NULL, "attenMaskOptional", attenMaskOptional=None, **x) for x in EITHER),
        *(refuses(NULL, "attenMaskOptional", attenMaskOptional=zeros(d=U8), **x) for x in EITHER),
        refuses(NULL, "attenMaskOptional", attenMaskOptional=None, sparseMode=0, rope=False),
    ],
    "paddingMaskOptional is not supported, softmaxInOptional null (ruling 20).": [
        forbids("paddingMaskOptional", paddingMaskOptional=zeros(6, 9, d=U8)),
        forbids("softmaxInOptional", softmaxInOptional=zeros(11, 4, 8, d=BF)),
    ],
    "pseType: one line has 1 alone, another 0 and 1, which is taken; without a bias they are the same (ruling 27).": [
        *(computes(pseType=n, **x) for n in (0, 1) for x in EITHER),
        *(forbids("pseType pseShiftOptional", pseType=n, **x) for n in (2, 3, 4, -1) for x in EITHER),
    ],
    "inputLayout is TND.": [
        *(forbids("inputLayout query", inputLayout=x) for x in ("BSH", "SBH", "BSND", "BNSD", "tnd", "")),
    ],
    # ------------------------------------------------------------------------------------------------------------ modes
    "sparseMode is 0 to 8, as the page of sparse modes says.": [
        *(computes(dtype=F32, **mode(n), **x) for n in (0, 1, 2, 3, 4, 6, 7, 8) for x in EITHER),
        *(computes(**mode(n, preTokens=0, nextTokens=0)) for n in (1, 2, 3)),
        computes(**mode(0, attenMaskOptional=hiding(6, 9), preTokens=8, nextTokens=5)),
        computes(**mode(4, preTokens=0, nextTokens=0)),
        *(forbids("sparseMode", sparseMode=n) for n in (9, -1)),
    ],
    "Mode 5, which the range has, is refused: prefixes are offered as mode 6 alone (ruling 28).": [
        forbids("sparseMode", sparseMode=5, prefixOptional=[3, 5]),
        forbids("sparseMode", sparseMode=5, rope=False, prefixOptional=[3, 5], attenMaskOptional=hiding(6, 9)),
    ],
    "attenMaskOptional is [B,N,S,S], [B,1,S,S], [1,1,S,S] or [S,S] of the longest sequences; 1 takes no part.": [
        *(computes(**mode(n, attenMaskOptional=hiding(*s))) for s in MASKS for n in (0, 1)),
        *(
            forbids("attenMaskOptional", **mode(1, attenMaskOptional=hiding(*s)))
            for s in ((1, 4, 6, 9), (2, 6, 9), (9,), (6, 8), (5, 9), (2, 1, 1, 9))
        ),
    ],
    "Modes 2, 3, 4, 7 and 8 take the mask of 2048 x 2048, mode 6 that of 3072 x 2048, of two axes.": [
        *(forbids("attenMaskOptional", **mode(n, attenMaskOptional=hiding(6, 9))) for n in (2, 3, 4, 6, 7, 8)),
        forbids("attenMaskOptional", attenMaskOptional=lambda old: old[None, None]),
        forbids("attenMaskOptional", **mode(6, attenMaskOptional=lambda old: PREFIX_TRIANGLE[:2048])),
        forbids("attenMaskOptional", attenMaskOptional=lambda old: PREFIX_TRIANGLE),
    ],
    "prefixOptional is one number per item: from 0 where Sq > Skv, else from Skv - Sq, up to Skv.": [
        *(computes(**prefixed(5, 7, n)) for n in ([2, 7], [4, 4])),
        *(computes(**prefixed(7, 5, n)) for n in ([1, 5], [3, 4])),
        *(forbids("prefixOptional", **prefixed(5, 7, n)) for n in ([1, 6], [2, 8], [-1, 4], [4], [4, 4, 4], None)),
        *(forbids("prefixOptional", **prefixed(7, 5, n)) for n in ([-1, 4], [1, 6])),
    ],
    "qStartIdxOptional and kvStartIdxOptional have no effect without a bias, nor has prefixOptional but in mode 6.": [
        computes(qStartIdxOptional=[9], kvStartIdxOptional=[4]),
        computes(qStartIdxOptional=[9]),
        computes(prefixOptional=[0], **mode(0)),
    ],
    "innerPrecise is not used.": [*(computes(innerPrecise=n) for n in (0, 1, 2, 3, 7, -1))],
    # ----------------------------------------------------------------------------------------------------------- shapes
    "softmaxMaxOptional and softmaxSumOptional are [T, N, 8], in every item head by head (ruling 7).": [
        computes(q=(3, 8, 12), kv=(5, 10, 15)),
        computes(q=(12,), kv=(15,), N=8),
        computes(N=1, N2=1),
        *(forbids(f"{name} softmaxSumOptional", **{name: widened}) for name in STATISTICS),
        *(forbids(name, **{name: longer}) for name in STATISTICS),
    ],
    "Statistics have three axes: one column says 4, the constraints and the example 3 (ruling 28).": [
        *(forbids(name, **{name: deeper}) for name in STATISTICS),
    ],
    "T, N, d and the number of sequences agree; gradients have the shape of what they belong to.": [
        *(forbids(f"{name} keyIn", **{name: longer}) for name in (*ROWS[1:], *OUTPUTS)),
        *(forbids(name, **{name: longer}) for name in (*ROPES, *ROPE_OUTPUTS)),
        *(forbids(f"{name} dy", **{name: widened}) for name in ("value", "attentionInOptional", *OUTPUTS)),
        *(forbids(name, **{name: deeper}) for name in REQUIRED),
        *(forbids(" ".join(LENGTHS), **{name: [16]}) for name in LENGTHS[1:]),
        forbids(" ".join(LENGTHS), actualSeqQLenOptional=[3, 5, 11]),
    ],
    "query and keyIn have one d, a multiple of 8, with and without rope.": [
        *(computes(D=n, rope=rope) for n in (8, 24, 40) for rope in (True, False)),
        *(forbids("query queryRope", D=n, **x) for n in (12, 20, 1) for x in EITHER),
        forbids("keyIn", keyIn=lambda old: old[..., :8].contiguous()),
    ],
    "queryRope and keyInRope have one d, a multiple of 8, at most that of query.": [
        *(computes(Dr=n) for n in (8, 16)),
        *(forbids("queryRope", Dr=n) for n in (4, 12, 24)),
        forbids(" ".join(ROPES), keyInRope=lambda old: torch.cat([old, old], -1)),
    ],
    "dy has the shape of query where all d are the same; otherwise it goes with value.": [
        computes(Dv=8),
        computes(Dv=8, rope=False),
        forbids("dy attentionInOptional", dy=widened),
    ],
    "Nq / Nkv is a whole number; Nq is headNum, 1 to 256.": [
        *(computes(N=n, N2=m) for n, m in ((1, 1), (4, 4), (6, 2), (8, 1))),
        computes(N=256, N2=2, D=8),
        *(forbids("query headNum", N=257, N2=257, D=8, **x) for x in EITHER),
        *(forbids("keyIn", N=4, N2=3, **x) for x in EITHER),
        *(forbids("headNum query", headNum=n) for n in (2, 3, 8, 0, -1)),
    ],
    "D is 1 to 512.": [
        *(computes(D=512, q=(2,), kv=(3,), **x) for x in EITHER),
        *(forbids("query", D=n, q=(1,), kv=(1,), **x) for n in (520, 768) for x in EITHER),
    ],
    "T is 1 to 1M.": [
        computes(q=(1,), kv=(2**16,), rope=False, **SMALL),
        forbids("keyIn query", q=(1,), kv=(2**20 + 1,), rope=False, **SMALL),
        forbids("query", q=(2**20 + 1,), kv=(1,), rope=False, sparseMode=2, **SMALL),
    ],
    "Lengths are 1 to 2K items, beside prefixOptional at most 1K.": [
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
    ],
    "Lengths are inclusive ends, one per item; an item may have no query.": [
        computes(q=(5, 5, 11), kv=(7, 9, 16)),
        computes(q=(0, 11), kv=(0, 16)),
        computes(q=(5, 5, 11), kv=(7, 7, 16)),
        computes(q=(5, 5, 11), kv=(7, 9, 16), rope=False, dtype=F32),
        *(forbids(name, **{name: [n, 5]}) for name in LENGTHS for n in (11, 6)),
        *(forbids(name, **{name: [5, 17]}) for name in LENGTHS),
        *(forbids(name, **{name: [-1, 11]}) for name in LENGTHS),
    ],
    "T counts the tokens of all items: ends that stop before it are refused.": [
        *(forbids(name, **{name: n}) for name, n in zip(LENGTHS, ([5, 10], [7, 15]), strict=True)),
        forbids(LENGTHS[0], actualSeqQLenOptional=[5, 6]),
    ],
    # ---------------------------------------------------------------------------------------------------------- numbers
    "dV = P^T dY, dQ = dS K, dqRope = dS kRope, dK = dS^T Q, dkRope = dS^T qRope, scaled once.": [
        *(computes(q=(30, 77, 78), kv=(40, 140, 205), N=8, D=64, Dr=32, dtype=d, **x) for d in DTYPES for x in EITHER),
        *(computes(scaleValue=n) for n in (0.0, 1.0, -0.3)),
        *(computes(N=8, N2=2, dtype=F32, **mode(n)) for n in (0, 3, 6)),
        *(repeats(N=8, **x) for x in EITHER),
    ],
    "Every tensor may be non-contiguous.": [
        *(computes(**{name: gapped}) for name in ("query", *ROWS, *ROPES, *OUTPUTS, *ROPE_OUTPUTS)),
        *(computes(**{name: swapped}) for name in ("query", "dy", "dqOut", "attenMaskOptional")),
    ],
}

PAGE = Page("aclnnFlashAttentionUnpaddingScoreGradV3", PROTOTYPE, base, formula, CLAUSES, finish)
