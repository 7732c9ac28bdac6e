"""Table of the page of aclnnSparseFlashAttentionGrad: the edition with lists of 2048 entries."""

from collections.abc import Sequence

import torch

from clauses.checks import INVALID, NULL, Args, Page, computes, filled, forbids, merged, prototype, refuses, repeats
from clauses.derived import of_parameters
from clauses.dtype_abbreviations import BF, F32, F64, I32, I64, H
from clauses.error_bounds import Near, near, softmax
from clauses.selected_key_helpers import Item, flat, items_of, lists, of_lists, selected, sequences_of
from clauses.values import draw, enlarged, fractal, gapped, ints, long, longer, swapped, to, widened, zeros

PROTOTYPE = prototype("""
    aclTensor query key value sparseIndices dOut out softmaxMax softmaxSum actualSeqLengthsQueryOptional
    aclTensor actualSeqLengthskvOptional queryRopeOptional keyRopeOptional
    double    scaleValue
    int64_t   sparseBlockSize
    char      layoutOptional
    int64_t   sparseMode preTokens nextTokens
    bool      deterministic
    aclTensor dQueryOut dKeyOut dValueOut dQueryRopeOutOptional dKeyRopeOutOptional
""")
LENGTHS = ("actualSeqLengthsQueryOptional", "actualSeqLengthskvOptional")
INF = 2147483647


def base(
    layout: str = "TND",
    q: Sequence[int] = (3, 5),
    kv: Sequence[int] = (70, 160),
    N: int = 4,
    D: int = 512,
    Dr: int = 64,
    dtype: torch.dtype = H,
    mode: int = 3,
    block: int = 1,
    count: int = 48,
    rope: bool = True,
    lengths: bool = True,
    tokens: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Args:
    """Makes a legal call of the gradient of attention to selected keys.

    Args:
        q, kv: inclusive ends of sequences in TND; BSND: q[0] and kv[0] are S of all len(q) sequences.
        count: maximum number of blocks that a row selects.
        lengths: pass the lengths; tokens: lengths of sequences in BSND, if shorter than S.
    """
    items, t1, t2, given = sequences_of(layout, q, kv, tokens)

    def shaped(t: torch.Tensor) -> torch.Tensor:
        return t if layout == "TND" else t.unflatten(0, (len(q), -1))

    query, query_rope = shaped(draw(t1, N, D, d=dtype)), shaped(draw(t1, N, Dr, d=dtype))
    key, key_rope = shaped(draw(t2, 1, D, d=dtype)), shaped(draw(t2, 1, Dr, d=dtype))
    statistics = torch.ones((1, t1, N) if layout == "TND" else (len(q), 1, q[0], N), dtype=F32)
    return filled(
        PROTOTYPE,
        query=query,
        key=key,
        value=shaped(draw(t2, 1, D, d=dtype)),
        sparseIndices=shaped(lists(items, t1, mode, block, count)),
        dOut=shaped(draw(t1, N, D, d=dtype)),
        out=torch.zeros_like(query),
        softmaxMax=torch.zeros_like(statistics),
        softmaxSum=statistics,
        **{
            name: torch.tensor(lengths_of_side, dtype=I32)
            for name, lengths_of_side in zip(LENGTHS, given, strict=True)
            if lengths
        },
        queryRopeOptional=query_rope if rope else None,
        keyRopeOptional=key_rope if rope else None,
        scaleValue=0.04,
        sparseBlockSize=block,
        layoutOptional=layout,
        sparseMode=mode,
        preTokens=INF,
        nextTokens=INF,
        deterministic=False,
        dQueryOut=torch.empty_like(query),
        dKeyOut=torch.empty_like(key),
        dValueOut=torch.empty_like(key),
        dQueryRopeOutOptional=torch.empty_like(query_rope) if rope else None,
        dKeyRopeOutOptional=torch.empty_like(key_rope) if rope else None,
    )


def joined(args: Args, argument: str, rope: str) -> torch.Tensor:
    """Returns rows [T, N, D + Dr] with their rope part."""
    parts = [args[argument], args[rope]] if args[rope] is not None else [args[argument]]
    return flat(torch.cat(parts, -1))


def scores_of(args: Args, item: Item, query: torch.Tensor, key: torch.Tensor) -> Near:
    """Returns the scores [rows * N, keys] of a sequence: scaleValue Q K^T."""
    rows = near(query[item.row : item.row + item.rows].flatten(0, 1))
    return (rows @ near(key[item.key : item.key + item.keys, 0]).T) * args["scaleValue"]


def items_and_rows(args: Args) -> tuple[list[Item], torch.Tensor, torch.Tensor]:
    """Returns (sequences, query rows, key rows), with rope parts."""
    query = joined(args, "query", "queryRopeOptional")
    return items_of(args, *LENGTHS), query, joined(args, "key", "keyRopeOptional")


def finish(args: Args, changed: frozenset[str]) -> None:
    """Sets out, softmaxMax and softmaxSum to results of the forward operator; zeros for rows without keys."""
    items, query, key = items_and_rows(args)
    heads = args["query"].shape[-2]
    value, out = flat(args["value"]), torch.zeros_like(flat(args["query"]))
    top, total = torch.zeros(out.shape[:2]), torch.zeros(out.shape[:2])
    for item in items:
        visible = selected(args, item, args["sparseMode"], args["sparseBlockSize"]).repeat_interleave(heads, 0)
        some = visible.any(-1)
        if not visible.numel():
            continue
        p, m, s = softmax(scores_of(args, item, query, key), visible | ~some[:, None])
        where = slice(item.row, item.row + item.rows)
        rows = (p.value @ value[item.key : item.key + item.keys, 0].double()) * some[:, None]
        out[where] = rows.reshape(out[where].shape).to(out.dtype)
        top[where] = torch.where(some, m.value[:, 0], 0).reshape(item.rows, heads).float()
        total[where] = torch.where(some, s.value[:, 0], 0).reshape(item.rows, heads).float()
    if "out" not in changed:
        args["out"] = out.reshape(args["query"].shape)
    for name, rows in (("softmaxMax", top), ("softmaxSum", total)):
        if name not in changed:
            args[name] = rows.reshape(args[name].shape)


def formula(args: Args) -> dict[str, Near]:
    """dV = P^T dO; dS = P * (dO V^T - rowsum(dO * O)); dQ = dS K and dK = dS^T Q, times scaleValue."""
    items, query, key = items_and_rows(args)
    heads, dim, dtype = args["query"].shape[-2], args["query"].shape[-1], args["query"].dtype
    value, given, out = (flat(args[name]) for name in ("value", "dOut", "out"))
    sums = [near(torch.zeros(shape)) for shape in (query.shape, key.shape, value.shape)]
    for item in items:
        rows, keys = slice(item.row, item.row + item.rows), slice(item.key, item.key + item.keys)
        visible = selected(args, item, args["sparseMode"], args["sparseBlockSize"]).repeat_interleave(heads, 0)
        if not visible.numel():
            continue
        some = visible.any(-1, keepdim=True)
        p = softmax(scores_of(args, item, query, key), visible | ~some)[0].only(visible, 0)
        d_out = near(given[rows].flatten(0, 1))
        d_p = d_out @ near(value[keys, 0]).T
        d_s = p * (d_p - (d_out * near(out[rows].flatten(0, 1))).sum(-1))
        d_s, p = d_s.rounded(dtype).only(visible, 0), p.rounded(dtype).only(visible, 0)
        d_q = (d_s @ near(key[keys, 0])) * args["scaleValue"]
        d_k = (d_s.T @ near(query[rows].flatten(0, 1))) * args["scaleValue"]
        d_v = p.T @ d_out
        for total, one, where in zip(sums, (d_q, d_k, d_v), (rows, keys, keys), strict=True):
            total.prepare(where, one)
    results = {}
    pairs = (("dQueryOut", 0, 0), ("dKeyOut", 1, 0), ("dValueOut", 2, 0))
    ropes = (("dQueryRopeOutOptional", 0, dim), ("dKeyRopeOutOptional", 1, dim))
    for name, which, first in pairs + (ropes if args["queryRopeOptional"] is not None else ()):
        last = dim if first == 0 else None
        rounded_sum = sums[which].rounded(dtype)
        shape = args[name].shape
        results[name] = Near(
            rounded_sum.value[..., first:last].reshape(shape), rounded_sum.slack[..., first:last].reshape(shape)
        )
    return results


BSND = {"layout": "BSND", "q": (3, 3), "kv": (70,)}
ROWS = ("key", "value", "dOut", "out", "queryRopeOptional", "keyRopeOptional")
OUTPUTS = ("dQueryOut", "dKeyOut", "dValueOut")
ROPE_OUTPUTS = ("dQueryRopeOutOptional", "dKeyRopeOutOptional")
NO_ROPE = {"queryRopeOptional": None, "keyRopeOptional": None}
REQUIRED = ("query", "key", "value", "sparseIndices", "dOut", "out", "softmaxMax", "softmaxSum", *OUTPUTS)


STATEMENTS = {
    "Rows and their gradients are FLOAT16 or BFLOAT16, all of one dtype.": [
        computes(dtype=BF, rope=False),
        computes(dtype=BF, **BSND),
        *(refuses(INVALID, "query", dtype=d) for d in (F32, F64)),
        refuses(INVALID, "query key", query=to(F32)),
        *(refuses(INVALID, name, **{name: to(d)}) for name in (*ROWS, *OUTPUTS, *ROPE_OUTPUTS) for d in (F32, BF)),
    ],
    "sparseIndices is INT64 in the table and INT32 in the example: both are taken (ruling 12).": [
        *(computes(sparseIndices=to(d), **over) for d, over in ((I64, {}), (I32, BSND), (I64, BSND))),
    ],
    "actualSeqLengthsQueryOptional and actualSeqLengthskvOptional are INT32, in the example INT64: both (ruling 28).": [
        computes(**dict.fromkeys(LENGTHS, to(I64))),
    ],
    "Tensors that may be null are ND too.": [
        *(refuses(INVALID, name, **{name: fractal}) for name in (*ROWS[4:], *ROPE_OUTPUTS, *LENGTHS)),
    ],
    "value is needed with its gradient.": [refuses(NULL, "value", value=None, dValueOut=None)],
    "BSND needs no lengths; given, they are the valid tokens of every item.": [
        computes(lengths=False, **BSND),
        computes(tokens=((2, 1), (60, 3)), **BSND),
        computes(tokens=((3, 0), (2, 70)), mode=0, **BSND),
        computes(**{name: zeros(0, d=I32) for name in LENGTHS}, **BSND),
        computes(actualSeqLengthsQueryOptional=None, **BSND),
        *(forbids(name, **{name: ints(*n)}, **BSND) for name in LENGTHS for n in ((3,), (3, 71), (-1, 3))),
    ],
    "Both rope parts or none; their gradients exactly with them.": [
        computes(rope=False),
        computes(rope=False, **BSND),
        refuses(NULL, "queryRopeOptional keyRopeOptional", queryRopeOptional=None),
        refuses(NULL, "queryRopeOptional keyRopeOptional", keyRopeOptional=None),
        *(refuses(NULL, name, **{name: None}) for name in ROPE_OUTPUTS),
        forbids(" ".join(ROPE_OUTPUTS), **NO_ROPE),
        computes(rope=False, dQueryRopeOutOptional=zeros(0, d=H), dKeyRopeOutOptional=zeros(0, d=H)),
    ],
    "layoutOptional is BSND or TND; null is BSND.": [
        computes(layoutOptional=None, **BSND),
        forbids("query", layoutOptional="BSND"),
        forbids("query", layoutOptional="TND", **BSND),
    ],
    "Shapes agree in T1, T2, N1, D, Dr and G; gradients have the shape of what they belong to.": [
        *(forbids(f"{name} key", **{name: longer}) for name in REQUIRED[2:]),
        *(forbids(name, **{name: longer}) for name in ("queryRopeOptional", "keyRopeOptional", *ROPE_OUTPUTS)),
        *(forbids(name, **{name: widened}) for name in ("dOut", "out", "softmaxSum", *OUTPUTS)),
        forbids("value dOut", value=widened),
        forbids("softmaxMax softmaxSum", softmaxMax=widened),
        *(forbids(name, **{name: widened}) for name in ROPE_OUTPUTS),
        *(forbids(name, **{name: widened}, **BSND) for name in ("softmaxSum", "dOut", "dKeyOut")),
        *(forbids(name, **{name: longer}, **BSND) for name in ("key", "value", "sparseIndices", "softmaxSum")),
    ],
    "N1 is 1, 2, 4, 8, 16, 32, 64 or 128.": [
        *(computes(N=n, q=(2,), kv=(5,)) for n in (1, 2, 4, 8, 16, 32, 64, 128)),
        *(forbids("query", N=n) for n in (3, 5, 24, 256)),
    ],
    "N2 is 1.": [
        *(
            forbids("key value sparseIndices softmaxMax", **{name: lambda old: old.expand(-1, 2, -1)})
            for name in ("key", "sparseIndices")
        ),
        forbids(
            "key",
            **{
                name: lambda old: old.expand(-1, 2, -1).clone()
                for name in ("key", "value", "sparseIndices", "keyRopeOptional", "dKeyOut", "dValueOut")
            },
            dKeyRopeOutOptional=lambda old: old.expand(-1, 2, -1).clone(),
            softmaxMax=zeros(2, 5, 2),
            softmaxSum=zeros(2, 5, 2),
        ),
    ],
    "D is 512, Dr 64.": [
        *(forbids("query", D=n) for n in (256, 511, 513, 128)),
        *(forbids("queryRopeOptional keyRopeOptional", Dr=n) for n in (32, 65, 128)),
        forbids("keyRopeOptional queryRopeOptional", keyRopeOptional=widened),
    ],
    "sparseIndices has K = 2048 entries per row, numbers of blocks of its sequence.": [
        forbids("sparseIndices", block=16, sparseIndices=lambda old: old.index_fill(-1, torch.tensor(0), 10)),
        *(forbids("sparseIndices", sparseIndices=zeros(5, 1, n, d=I32)) for n in (1, 64, 1024, 2047, 4096)),
        computes(q=(2,), kv=(2100,), N=2, count=2048),
    ],
    "S1 and S2 are 1 to 128K.": [
        forbids(
            "key query actualSeqLengthskvOptional",
            q=(1,),
            kv=(1,),
            N=1,
            actualSeqLengthskvOptional=ints(131073),
            **dict.fromkeys(("key", "value", "keyRopeOptional"), long(0)),
            **dict.fromkeys(("dKeyOut", "dValueOut", "dKeyRopeOutOptional"), enlarged(0)),
        ),
        forbids(
            "query actualSeqLengthsQueryOptional",
            q=(1,),
            kv=(1,),
            N=1,
            actualSeqLengthsQueryOptional=ints(131073),
            **dict.fromkeys(("query", "dOut", "out", "queryRopeOptional", "sparseIndices"), long(0)),
            **dict.fromkeys(("dQueryOut", "dQueryRopeOutOptional"), enlarged(0)),
            **dict.fromkeys(("softmaxMax", "softmaxSum"), long(1)),
        ),
    ],
    "S1 and S2 may differ, either way.": [
        *(computes(q=(7,), kv=(3,), mode=mode) for mode in (0, 3)),
        computes(q=(2, 5), kv=(0, 60)),
        *(computes(q=(1,), kv=(90,), mode=mode) for mode in (0, 3)),
        computes(layout="BSND", q=(7, 7), kv=(3,)),
    ],
    "sparseBlockSize is 1, 8, 16, 32 or 64; blocks end with the keys that a row sees.": [
        *(computes(block=n, mode=mode, count=3) for n in (8, 16, 32, 64) for mode in (0, 3)),
        computes(block=8, count=2, **BSND),
    ],
    "sparseMode is 0, no mask, or 3, causal from the lower right corner.": [
        *(computes(mode=0, **over) for over in ({}, BSND)),
    ],
    "The largest INT64, which torch_npu passes by default, stands for 2147483647 (ruling 20).": [
        computes(preTokens=2**63 - 1, nextTokens=2**63 - 1),
    ],
    "deterministic is a bool; results repeat with either.": [
        repeats(deterministic=True, **BSND),
    ],
    "dV = P^T dO, dS = P * (dO V^T - FlashSoftmaxGrad(dO, O)), dQ = dS K and dK = dS^T Q, scaled once.": [
        *(computes(q=(20, 45), kv=(90, 200), dtype=d, N=8, rope=rope) for d, rope in ((H, True), (BF, False))),
        *(computes(scaleValue=s) for s in (0.0, 0.2, -0.04)),
        *(computes(mode=mode, count=2048, **over) for mode, over in ((0, {}), (3, BSND))),
        *(computes(count=n) for n in (0, 1)),
    ],
    "Rows may be transposed.": [
        computes(**dict.fromkeys(("query", "queryRopeOptional", "dQueryOut", "dOut"), swapped)),
        computes(sparseIndices=gapped, **BSND),
    ],
}
CLAUSES = merged(
    of_parameters(
        " ".join(REQUIRED),
        " ".join(("query", *ROWS, *OUTPUTS, *ROPE_OUTPUTS)),
        "softmaxMax softmaxSum",
        " ".join(("sparseIndices", *LENGTHS)),
        {
            "layoutOptional": ("BNSD", "BSH", "SBH", "tnd", ""),
            "sparseBlockSize": (0, 2, 4, 24, 65, 128, -1),
            "sparseMode": (1, 2, 4, 5, 6, 7, 8, 9, -1),
            **dict.fromkeys(("preTokens", "nextTokens"), (65536, 0, -1)),  # they act in mode 4 alone
        },
        " ".join(("query", *ROWS, "sparseIndices", *OUTPUTS, *ROPE_OUTPUTS)),
    ),
    of_lists(LENGTHS, "layout", ints, N=1),
    STATEMENTS,
)

PAGE = Page("aclnnSparseFlashAttentionGrad", PROTOTYPE, base, formula, CLAUSES, finish)
