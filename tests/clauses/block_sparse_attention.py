"""Tables of the pages of aclnnBlockSparseAttention and aclnnBlockSparseAttentionGrad."""

from collections.abc import Iterator, Sequence
from functools import wraps
from itertools import accumulate, pairwise
from typing import Any

import torch

from clauses.checks import INVALID, NULL, Args, Page, computes, filled, forbids, merged, prototype, refuses, taken_over
from clauses.derived import of_parameters
from clauses.dtype_abbreviations import BF, H
from clauses.error_bounds import Near, near, softmax
from clauses.values import GENERATOR, draw, prepared, widened, zeros

FORWARD = prototype("""
    aclTensor   query key value blockSparseMaskOptional attenMaskOptional
    aclIntArray blockShapeOptional actualSeqLengthsOptional actualSeqLengthsKvOptional
    aclTensor   blockTableOptional
    char        qInputLayout kvInputLayout
    int64_t     numKeyValueHeads maskType
    double      scaleValue
    int64_t     innerPrecise blockSize preTokens nextTokens softmaxLseFlag
    aclTensor   attentionOut softmaxLseOptional
""")
GRAD = prototype("""
    aclTensor   dout query key value attentionOut softmaxLse blockSparseMaskOptional attenMaskOptional
    aclIntArray blockShapeOptional actualSeqLengthsOptional actualSeqLengthsKvOptional
    char        qInputLayout kvInputLayout
    int64_t     numKeyValueHeads maskType
    double      scaleValue
    int64_t     preTokens nextTokens
    aclTensor   dq dk dv
""")
INF = 2147483647
LENGTHS = ("actualSeqLengthsOptional", "actualSeqLengthsKvOptional")
BNSD: dict[str, Any] = {"layout": "BNSD", "rows": (5, 5), "keys": (260, 260)}
MASK = "blockSparseMaskOptional"


def base(
    layout: str = "TND", rows: Sequence[int] = (3, 5), keys: Sequence[int] = (140, 260), N: int = 4, N2: int = 2,
    D: int = 64, block: tuple[int, int] = (2, 128), dtype: torch.dtype = H, most: int = 2,
) -> Args:  # fmt: skip
    """Makes a legal call; BNSD, BSND: sequences of equal length. most: a block is visible if randint(most) is not 0."""

    def shaped(lengths: Sequence[int], heads: int) -> torch.Tensor:
        if layout == "TND":
            return draw(sum(lengths), heads, D, d=dtype)
        return prepared(draw(len(lengths), heads, lengths[0], D, d=dtype), layout)

    query, key, value = shaped(rows, N), shaped(keys, N2), shaped(keys, N2)
    blocks = len(rows), N, -(-max(rows) // block[0]), -(-max(keys) // block[1])
    return filled(
        FORWARD,
        query=query,
        key=key,
        value=value,
        blockSparseMaskOptional=torch.randint(0, most, blocks, generator=GENERATOR).to(torch.int8),
        blockShapeOptional=list(block),
        **{name: list(n) for name, n in zip(LENGTHS, (rows, keys), strict=True) if layout == "TND"},
        qInputLayout=layout,
        kvInputLayout=layout,
        numKeyValueHeads=N2,
        maskType=0,
        scaleValue=0.125,
        innerPrecise=0,
        blockSize=0,
        preTokens=INF,
        nextTokens=INF,
        softmaxLseFlag=1,
        attentionOut=torch.empty_like(query),
        softmaxLseOptional=torch.empty(*query.shape[:-1], 1),
    )


def by_head(t: torch.Tensor, args: Args, side: int) -> list[torch.Tensor]:
    """Returns views [N, S, ...] of every sequence."""
    if args["qInputLayout"] != "TND":
        return list(t if args["qInputLayout"] == "BNSD" else t.transpose(1, 2))
    ends = [0, *accumulate(args[LENGTHS[side]])]
    return [t[first:end].transpose(0, 1) for first, end in pairwise(ends)]


def heads_of(args: Args) -> Iterator[tuple[int, int, int, torch.Tensor, Near]]:
    """Yields (sequence, head, key head, visible [rows, keys], scores) of every head."""
    query, key = by_head(args["query"], args, 0), by_head(args["key"], args, 1)
    for b, (q, k) in enumerate(zip(query, key, strict=True)):
        for h in range(len(q)):
            of = h // (len(q) // len(k))
            visible = args[MASK][b, h] != 0
            for axis, size in enumerate(args["blockShapeOptional"]):
                visible = visible.repeat_interleave(size, axis)
            visible = visible[: q.shape[1], : k.shape[1]]
            yield b, h, of, visible, (near(q[h]) @ near(k[of]).T) * args["scaleValue"]


def formula(args: Args) -> dict[str, Near]:
    """Computes a softmax over the keys of visible blocks; a row without visible keys has out 0 and softmaxLse -inf."""
    dtype, values = args["query"].dtype, by_head(args["value"], args, 1)
    names = [name for name in ("attentionOut", "softmaxLseOptional") if args[name] is not None]
    written = {name: torch.zeros(args[name].shape, dtype=torch.float64) for name in names}
    slack = {name: torch.zeros_like(t) for name, t in written.items()}
    for b, h, of, visible, scores in heads_of(args):
        some = visible.any(-1, keepdim=True)
        p, top, total = softmax(scores, visible | ~some)
        out = (p.rounded(dtype) @ near(values[b][of])).only(some, 0).rounded(dtype)
        lse = (top + total.log()).only(some, -torch.inf)
        for name, result in zip(names, (out, lse), strict=False):
            by_head(written[name], args, 0)[b][h] = result.value
            by_head(slack[name], args, 0)[b][h] = result.slack
    return {name: Near(written[name], slack[name]) for name in written}


FORMS = {
    "A mask over blocks, of the block shape, for every head; any number but 0 shows a block (ruling 46).": [
        *(computes(block=n) for n in ((1, 128), (2, 256), (128, 128))),
        *(computes(most=n) for n in (1, 7)),
        *(computes(**{MASK: lambda old, d=d: old.to(d)}) for d in (torch.bool, torch.uint8)),
        forbids(MASK, **{MASK: widened}),
        forbids("blockShapeOptional", blockShapeOptional=[0, 128]),
    ],
    "Layouts, heads and lengths; other masks are not defined (ruling 46).": [
        *(computes(dtype=d, **over) for d in (H, BF) for over in ({}, BNSD)),
        computes(D=128),
        computes(N2=1),
        *(forbids("key", numKeyValueHeads=n) for n in (3, 4)),
        forbids("qInputLayout", qInputLayout="SBH"),
        forbids("kvInputLayout", kvInputLayout="BSND"),
        *(refuses(NULL, " ".join(LENGTHS), **{name: None}) for name in LENGTHS),
        *(forbids(name, **{name: [3, 9999]}) for name in LENGTHS),
        refuses(NULL, "attenMaskOptional", attenMaskOptional=zeros(2, 2)),
        forbids("maskType", maskType=1),
        *(forbids(name, **{name: 64}) for name in ("preTokens", "nextTokens")),
        computes(scaleValue=-0.3),
    ],
}
ROWS = "query key value attentionOut"
CLAUSES = merged(
    of_parameters(ROWS, "query key value attentionOut", "softmaxLseOptional", "", {"innerPrecise": (2,)}),
    FORMS,
    {
        "Keys of a block are a multiple of 128; pages are not defined; softmaxLse is asked for (ruling 46).": [
            refuses(INVALID, "qInputLayout", layout="BSND", rows=(5, 5), keys=(260, 260)),
            computes(softmaxLseFlag=0, softmaxLseOptional=None),
            forbids("blockShapeOptional", block=(2, 64)),
            refuses(NULL, "blockTableOptional", blockTableOptional=zeros(2, 2, d=torch.int32)),
            forbids("blockSize", blockSize=128),
            *(forbids("query", D=n) for n in (32, 96)),
            forbids("softmaxLseOptional", softmaxLseOptional=widened),
            refuses(NULL, "softmaxLseOptional", softmaxLseOptional=None),
        ],
    },
)
PAGE = Page("aclnnBlockSparseAttention", FORWARD, base, formula, CLAUSES)


@wraps(base)
def grad_base(**over: Any) -> Args:
    a = base(**over)
    return taken_over(
        GRAD,
        a,
        dout=draw(*a["query"].shape, d=a["query"].dtype),
        softmaxLse=torch.empty_like(a["softmaxLseOptional"]),
        **{name: torch.empty_like(a[of]) for name, of in (("dq", "query"), ("dk", "key"), ("dv", "value"))},
    )


def finish(args: Args, changed: frozenset[str]) -> None:
    """Sets attentionOut and softmaxLse to results of the forward operator."""
    results = formula({**args, "softmaxLseOptional": args["softmaxLse"]})
    for name, result in (("attentionOut", "attentionOut"), ("softmaxLse", "softmaxLseOptional")):
        if name not in changed:
            args[name] = results[result].value.to(args[name].dtype)


def gradients(args: Args) -> dict[str, Near]:
    """dS = P (dO V - rowsum(dO * O)): dq = scale dS K, dk = scale dS^T Q, dv = P^T dO."""
    dtype, scale = args["query"].dtype, args["scaleValue"]
    names = {"dq": ("query", 0), "dk": ("key", 1), "dv": ("value", 1)}
    rows = {n: by_head(args[n], args, 0) for n in ("query", "dout", "attentionOut", "softmaxLse")}
    keys = {n: by_head(args[n], args, 1) for n in ("key", "value")}
    sums = {n: [[near(torch.zeros(t.shape)) for t in heads] for heads in by_head(args[of], args, side)]
            for n, (of, side) in names.items()}  # fmt: skip
    for b, h, of, visible, scores in heads_of(args):
        lse = rows["softmaxLse"][b][h]
        p = (scores - near(lse.where(lse > -torch.inf, 0))).exp().only(visible, 0)
        do = near(rows["dout"][b][h])
        delta = (do * near(rows["attentionOut"][b][h])).sum(1)
        d_s = (p * (do @ near(keys["value"][b][of]).T - delta)).rounded(dtype).only(visible, 0)
        sums["dq"][b][h] = (d_s @ near(keys["key"][b][of])) * scale
        sums["dk"][b][of] = sums["dk"][b][of] + (d_s.T @ near(rows["query"][b][h])) * scale
        sums["dv"][b][of] = sums["dv"][b][of] + p.rounded(dtype).only(visible, 0).T @ do
    results = {}
    for name, (_, side) in names.items():
        value, slack = (torch.zeros(args[name].shape, dtype=torch.float64) for _ in range(2))
        for b, heads in enumerate(sums[name]):
            for h, t in enumerate(heads):
                by_head(value, args, side)[b][h], by_head(slack, args, side)[b][h] = t.value, t.slack
        results[name] = Near(value, slack).rounded(dtype)
    return results


GRAD_CLAUSES = merged(
    of_parameters(
        f"{ROWS} dout softmaxLse dq dk dv", f"{ROWS} dout dq dk dv", "softmaxLse", outputs="query dout dq dk dv"
    ),
    FORMS,
    {
        "Shapes agree; dims are at most 128.": [
            *(forbids(name, **{name: widened}) for name in ("attentionOut", "dq", "dk", "dv")),
            forbids("query", dout=widened),
            forbids("query", D=256),
        ],
    },
)
GRAD_PAGE = Page("aclnnBlockSparseAttentionGrad", GRAD, grad_base, gradients, GRAD_CLAUSES, finish)
