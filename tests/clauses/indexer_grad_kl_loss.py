"""Table of the page of aclnnSparseLightningIndexerGradKLLoss: the edition with 16-bit weights."""

from collections.abc import Sequence

import torch

from clauses.checks import INVALID, NULL, Args, Page, computes, filled, forbids, merged, prototype, refuses, repeats
from clauses.derived import of_parameters
from clauses.dtype_abbreviations import BF, F32, F64, I8, I32, I64, H
from clauses.error_bounds import Near, near, softmax
from clauses.selected_key_helpers import Item, flat, items_of, lists, of_lists, selected, sequences_of
from clauses.values import deeper, draw, enlarged, fractal, gapped, long, longer, swapped, to, widened, zeros

PROTOTYPE = prototype("""
    aclTensor   query key queryIndex keyIndex weights sparseIndices softmaxMax softmaxSum queryRope keyRope
    aclIntArray actualSeqLengthsQuery actualSeqLengthsKey
    double      scaleValue
    char        layout
    int64_t     sparseMode pre_tokens next_tokens
    bool        deterministic
    aclTensor   dQueryIndex dKeyIndex dWeights loss
""")
LENGTHS = ("actualSeqLengthsQuery", "actualSeqLengthsKey")


def base(
    axes: str = "TND",
    q: Sequence[int] = (3, 5),
    kv: Sequence[int] = (70, 160),
    N: int = 8,
    Nidx: int = 8,
    D: int = 512,
    Dr: int = 64,
    Didx: int = 128,
    dtype: torch.dtype = H,
    weights_dtype: torch.dtype | None = None,
    count: int = 48,
    K: int = 2048,
    rope: bool = True,
    peak: float = 0.02,
    tokens: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Args:
    """Makes a legal call of the indexer's loss over selected keys.

    Args:
        axes: "TND" or "BSND".
        q, kv: inclusive ends of sequences; BSND: q[0] and kv[0] are S of all len(q) sequences, tokens their lengths.
        count: maximum number of keys that a row selects; K: entries of a list.
        peak: factor of the indexer's weights; a larger one makes its distribution more peaked.
    """
    items, t1, t2, lengths = sequences_of(axes, q, kv, tokens)

    def shaped(t: torch.Tensor) -> torch.Tensor:
        return t if axes == "TND" else t.unflatten(0, (len(q), -1))

    statistics = torch.ones((1, t1, N) if axes == "TND" else (len(q), 1, q[0], N), dtype=F32)
    query_index, key_index = shaped(draw(t1, Nidx, Didx, d=dtype)), shaped(draw(t2, 1, Didx, d=dtype))
    weights = shaped((draw(t1, Nidx) * peak).to(weights_dtype or dtype))
    listed = torch.full((t1, 1, K), -1, dtype=I32)
    listed[..., :2048] = lists(items, t1, 3, 1, min(count, K))[..., :K]
    return filled(
        PROTOTYPE,
        query=shaped(draw(t1, N, D, d=dtype)),
        key=shaped(draw(t2, 1, D, d=dtype)),
        queryIndex=query_index,
        keyIndex=key_index,
        weights=weights,
        sparseIndices=shaped(listed),
        softmaxMax=torch.zeros_like(statistics),
        softmaxSum=statistics,
        queryRope=shaped(draw(t1, N, Dr, d=dtype)) if rope else None,
        keyRope=shaped(draw(t2, 1, Dr, d=dtype)) if rope else None,
        **dict(zip(LENGTHS, lengths, strict=True) if axes == "TND" or tokens else ()),
        scaleValue=0.04,
        layout=axes,
        sparseMode=3,
        pre_tokens=65536,
        next_tokens=65536,
        deterministic=False,
        dQueryIndex=torch.empty_like(query_index),
        dKeyIndex=torch.empty_like(key_index),
        dWeights=torch.empty_like(weights),
        loss=torch.empty(1),
    )


def sequences(args: Args) -> list[tuple[Item, torch.Tensor]]:
    """Returns every sequence with rows and keys, and bool [rows, keys]: the keys that its rows selected."""
    return [(item, selected(args, item, 3, 1)) for item in items_of(args, *LENGTHS) if item.rows and item.keys]


def scores_of(args: Args, item: Item) -> Near:
    """Returns the scores of attention [rows, N1, keys]: scaleValue Q K^T, with rope parts."""
    ropes = (("query", "queryRope"), ("key", "keyRope"))
    query, key = (flat(torch.cat([args[x] for x in pair if args[x] is not None], -1)) for pair in ropes)
    keys = near(key[item.key : item.key + item.keys, 0])
    return (near(query[item.row : item.row + item.rows]) @ keys.T) * args["scaleValue"]


def finish(args: Args, changed: frozenset[str]) -> None:
    """Sets softmaxMax and softmaxSum to statistics of attention to the selected keys."""
    heads = args["query"].shape[-2]
    for name, which in (("softmaxMax", 1), ("softmaxSum", 2)):
        if name in changed:
            continue
        rows = torch.zeros(flat(args["query"]).shape[0], heads)
        for item, visible in sequences(args):
            visible = wide_of(visible, heads)
            result = softmax(scores_of(args, item), visible | ~visible.any(-1, keepdim=True))[which].value[..., 0]
            rows[item.row : item.row + item.rows] = (result * visible.any(-1)).float()
        args[name] = rows.reshape(args[name].shape)


def formula(args: Args) -> dict[str, Near]:
    """I = W ReLU(q K^T), y = softmax(I), p = mean of the attention's heads, loss = sum p log(p / y), dI = y - p."""
    q, k, w = flat(args["queryIndex"]), flat(args["keyIndex"])[:, 0], args["weights"].flatten(0, -2)
    heads, dtype = args["query"].shape[-2], args["query"].dtype
    d_q, d_k, d_w = (near(torch.zeros(t.shape)) for t in (q, k, w))
    loss = near(torch.zeros(1, 1))
    # Move the axis of rows to the front; it is the second or the third axis of the statistics.
    statistics = [args[name].squeeze(-3).flatten(0, -2) for name in ("softmaxMax", "softmaxSum")]
    for item, visible in sequences(args):
        rows, keys = slice(item.row, item.row + item.rows), slice(item.key, item.key + item.keys)
        some = visible.any(-1, keepdim=True)
        visible_of_heads = wide_of(visible, heads)
        top, total = (near(t[rows])[..., None] for t in statistics)
        of_heads = (
            (scores_of(args, item).only(visible_of_heads, 0) - top).exp() / total.only(total.value > 0, 1)
        ).only(visible_of_heads, 0)
        p = of_heads.sum(1)[:, 0] / heads
        products = near(q[rows]) @ near(k[keys]).T
        weight = near(w[rows])[..., None]
        y = softmax((weight * products.relu()).sum(1)[:, 0], visible | ~some)[0].only(visible, 0)
        logs = p.only(visible, 1).log() - y.only(visible, 1).log()
        loss = loss + (p * logs).sum(1).sum(0)
        d_i = (y - p)[:, None]
        d_w.prepare(rows, (d_i * products.relu()).sum(2))
        d_s = (d_i * weight * products.step()).rounded(dtype).only(wide_of(visible, q.shape[1]), 0)
        d_q.prepare(rows, d_s @ near(k[keys]))
        flat_s = Near(d_s.value.flatten(0, 1), d_s.slack.flatten(0, 1))
        d_k.prepare(keys, flat_s.T @ near(q[rows].flatten(0, 1)))
    results = {"dQueryIndex": d_q, "dKeyIndex": d_k, "dWeights": d_w, "loss": loss}
    return {name: x.rounded(args[name].dtype).reshape(args[name].shape) for name, x in results.items()}


def wide_of(visible: torch.Tensor, heads: int) -> torch.Tensor:
    """Expands [rows, keys] to [rows, heads, keys]."""
    return visible[:, None].expand(-1, heads, -1)


BSND = {"axes": "BSND", "q": (3, 3), "kv": (70,)}
ROWS = ("key", "queryIndex", "keyIndex", "queryRope", "keyRope")
OUTPUTS = ("dQueryIndex", "dKeyIndex", "dWeights", "loss")
REQUIRED = ("query", "key", "queryIndex", "keyIndex", "weights", "sparseIndices", "softmaxMax", "softmaxSum", *OUTPUTS)

STATEMENTS = {
    "query, key, queryIndex and keyIndex are FLOAT16 or BFLOAT16, of one dtype, and so are the rope parts.": [
        computes(dtype=BF, **BSND),
        *(refuses(INVALID, "query", dtype=d) for d in (F32, F64)),
        refuses(INVALID, "query key", query=to(F32)),
        *(refuses(INVALID, name, **{name: to(d)}) for name in (*ROWS, *OUTPUTS[:3]) for d in (F32, BF)),
    ],
    "weights are FLOAT16 or BFLOAT16, and have the dtype of the rows (ruling 28).": [
        *(refuses(INVALID, "weights", weights_dtype=d) for d in (BF, F32, F64, I8)),
        *(refuses(INVALID, "weights", dtype=BF, weights_dtype=d) for d in (H, F32)),
    ],
    "INT64 sparseIndices, as other pages have them, are taken (ruling 12).": [
        computes(sparseIndices=to(I64)),
    ],
    "Rope parts are ND too.": [*(refuses(INVALID, name, **{name: fractal}) for name in ("queryRope", "keyRope"))],
    "Padded calls need the same tensors, and lengths if they say that they are packed.": [
        refuses(NULL, " ".join(LENGTHS), layout="TND", **BSND),
        *(refuses(NULL, name, **{name: None}, **BSND) for name in ("key", "weights", "loss")),
    ],
    "layout is required.": [
        refuses(NULL, "layout", layout=None),
        refuses(NULL, "layout", layout=None, **BSND),
    ],
    "queryRope and keyRope come together; without them the attention has no such part (ruling 28).": [
        computes(rope=False),
        computes(rope=False, **BSND),
        refuses(NULL, "queryRope keyRope", queryRope=None),
        refuses(NULL, "queryRope keyRope", keyRope=None),
        computes(rope=False, queryRope=zeros(0, d=H), keyRope=zeros(0, d=H)),
    ],
    "Every tensor has the axes of its layout.": [
        forbids("query", layout="BSND"),
        *(forbids(name, **{name: deeper}) for name in ("queryRope", "keyRope")),
        *(forbids(name, **{name: deeper}, **BSND) for name in ("key", "weights", "softmaxMax")),
    ],
    "Shapes agree in T1, T2, N1, Nidx1, D, Dr and G; gradients have the shape of what they belong to.": [
        *(forbids(f"{name} key keyIndex", **{name: longer}) for name in (*REQUIRED[1:8], "queryRope", "keyRope")),
        *(forbids(name, **{name: longer}) for name in OUTPUTS),
        *(forbids(name, **{name: widened}) for name in ("key", "keyIndex", "weights", "softmaxSum", *OUTPUTS)),
        forbids("softmaxMax softmaxSum", softmaxMax=widened),
        forbids("loss", loss=zeros()),
        *(forbids(name, **{name: longer}, **BSND) for name in ("keyIndex", "weights", "sparseIndices", "dKeyIndex")),
    ],
    "N1 is 8, 16, 32, 64 or 128.": [
        *(computes(N=n, q=(2,), kv=(5,)) for n in (8, 16, 32, 64, 128)),
        *(forbids("query", N=n) for n in (1, 4, 7, 24, 256)),
    ],
    "Nidx1 is 8, 16, 32 or 64.": [
        *(computes(Nidx=n, q=(2,), kv=(5,)) for n in (8, 16, 32, 64)),
        *(forbids("queryIndex", Nidx=n) for n in (1, 4, 7, 24, 128)),
        computes(N=64, Nidx=32, **BSND),
    ],
    "N2 and Nidx2 are 1.": [
        *(
            forbids(f"{name} softmaxMax key keyIndex", **{name: lambda old: old.expand(-1, 2, -1)})
            for name in ("key", "keyIndex", "sparseIndices")
        ),
        forbids("keyIndex dKeyIndex", **{name: lambda old: old.repeat(1, 2, 1) for name in ("keyIndex", "dKeyIndex")}),
        forbids(
            "key",
            softmaxMax=zeros(2, 5, 4),
            softmaxSum=zeros(2, 5, 4),
            **{name: lambda old: old.repeat(1, 2, 1) for name in ("key", "keyRope")},
        ),
    ],
    "D is 512, Drope 64, D of the indexer 128.": [
        *(forbids("query", D=n) for n in (256, 511, 576)),
        *(forbids("queryRope keyRope", Dr=n) for n in (32, 65, 128)),
        *(forbids("queryIndex", Didx=n) for n in (64, 127, 129, 512)),
    ],
    "sparseIndices has topk = 2048 entries per row.": [
        *(forbids("sparseIndices", K=n) for n in (1, 64, 1024, 2047, 4096, 8193)),
        computes(q=(2,), kv=(2100,), count=2048),
    ],
    "S1 and S2 are 1 to 128K.": [
        forbids(
            "key query actualSeqLengthsKey",
            q=(1,),
            kv=(1,),
            actualSeqLengthsKey=[131073],
            dKeyIndex=enlarged(0),
            **dict.fromkeys(("key", "keyIndex", "keyRope"), long(0)),
        ),
        forbids(
            "key query",
            axes="BSND",
            q=(1,),
            kv=(1,),
            dKeyIndex=enlarged(1),
            **dict.fromkeys(("key", "keyIndex", "keyRope"), long(1)),
        ),
    ],
    "S1 and S2 may differ: more keys than rows.": [
        computes(q=(1,), kv=(90,)),
        computes(q=(1, 8), kv=(33, 40)),
        computes(axes="BSND", q=(2, 2), kv=(90,)),
        computes(q=(7,), kv=(7,)),
    ],
    "More rows than keys, which the page allows, is refused as the chip's host code does (ruling 28).": [
        forbids("query actualSeqLengthsQuery", q=(5,), kv=(3,)),
        forbids("query", axes="BSND", q=(5, 5), kv=(3,)),
    ],
    "sparseMode is 3, causal from the lower right corner.": [
        computes(q=(9,), kv=(9,), count=9),
    ],
    "pre_tokens and next_tokens act in no mode that is offered (ruling 20).": [
        *(computes(pre_tokens=n, next_tokens=m) for n, m in ((0, 2**63 - 1), (2**31 - 1, 0))),
    ],
    "deterministic has no effect; results repeat.": [
        repeats(deterministic=True, **BSND),
    ],
    "In BSND they are the valid tokens of every item.": [
        computes(tokens=((2, 1), (60, 3)), **BSND),
        computes(tokens=((3, 3), (70, 70)), **BSND),
        *(forbids(name, **{name: n}, **BSND) for name in LENGTHS for n in ([3], [3, 71], [-1, 3])),
    ],
    "I = W ReLU(q K^T), loss = sum KL(p, softmax(I)), dI = softmax(I) - p, dW, dq and dK by the chain rule.": [
        *(computes(q=(20, 45), kv=(90, 200), dtype=d, rope=rope) for d, rope in ((H, True), (BF, False))),
        *(computes(peak=n) for n in (0.0, 0.08)),
        *(computes(scaleValue=n) for n in (0.0, 0.1, -0.04)),
        *(computes(count=n) for n in (0, 1, 2048)),
        computes(weights=lambda old: -old),
        computes(count=2048, **BSND),
    ],
    "p is L1-normalised by the text, divided by N1 here: the same for statistics of the listed keys (ruling 14).": [
        computes(softmaxMax=zeros(1, 5, 8), softmaxSum=lambda old: old * 40),
        computes(softmaxMax=zeros(2, 1, 3, 8), softmaxSum=lambda old: old * 7, **BSND),
    ],
    "Rows may be transposed.": [
        computes(**dict.fromkeys(("query", "queryIndex", "dQueryIndex"), swapped)),
        computes(queryIndex=gapped, **BSND),
    ],
}
CLAUSES = merged(
    of_parameters(
        " ".join(REQUIRED),
        " ".join(("query", *ROWS, *OUTPUTS[:3])),
        "softmaxMax softmaxSum loss",
        "sparseIndices",
        {
            "layout": ("BNSD", "BSH", "SBH", "tnd", ""),
            "sparseMode": (0, 1, 2, 4, 5, 6, 7, 8, 9, -1),
        },
        " ".join((*REQUIRED[:6], "queryRope", "keyRope", *OUTPUTS[:3])),
    ),
    of_lists(LENGTHS, "axes", lambda *n: list(n)),
    STATEMENTS,
)

PAGE = Page("aclnnSparseLightningIndexerGradKLLoss", PROTOTYPE, base, formula, CLAUSES, finish)
