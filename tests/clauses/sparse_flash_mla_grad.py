"""Table of the page of aclnnSparseFlashMlaGrad."""

from functools import wraps
from typing import Any

import torch

from clauses import sparse_flash_mla as forward
from clauses.checks import NULL, TILING, Args, Page, computes, forbids, merged, prototype, refuses, taken_over
from clauses.derived import of_parameters
from clauses.dtype_abbreviations import BF, F32, H
from clauses.error_bounds import Near, near
from clauses.selected_key_helpers import flat
from clauses.sparse_flash_mla import ENTRIES, SIDES, keys_of, lengths_of, row_entries
from clauses.values import draw, ints, widened, zeros

PROTOTYPE = prototype("""
    aclTensor query dOut out lse oriKv cmpKv oriSparseIndices cmpSparseIndices cuSeqlensQ cuSeqlensOriKv cuSeqlensCmpKv
    aclTensor sequsedQ sequsedOriKv sequsedCmpKv cmpResidualKv oriTopkLength cmpTopkLength sinks metadata
    double    scaleValue
    int64_t   cmpRatio oriMaskMode cmpMaskMode oriWinLeft oriWinRight
    char      layoutQ layoutKv
    aclTensor dQuery dOriKv dCmpKv dSinks oriSoftmaxL1Norm cmpSoftmaxL1Norm
""")
NORMS = {"oriSparseIndices": "oriSoftmaxL1Norm", "cmpSparseIndices": "cmpSoftmaxL1Norm"}
BSND: dict[str, Any] = {"layout": "BSND", "rows": (4, 4), "tokens": (14, 14)}


@wraps(forward.base)
def base(**over: Any) -> Args:
    a = forward.base(**over)
    query, compressed = a["q"], a["cmpKv"]
    norms = {norm: None if a[name] is None else torch.empty(a[name].shape, dtype=F32) for name, norm in NORMS.items()}
    return taken_over(
        PROTOTYPE,
        a,
        **norms,
        query=query,
        dOut=draw(*query.shape, d=query.dtype),
        out=torch.empty_like(query),
        lse=torch.empty_like(a["softmaxLseOut"]),
        scaleValue=a["softmaxScale"],
        dQuery=torch.empty_like(query),
        dOriKv=torch.empty_like(a["oriKv"]),
        dCmpKv=None if compressed is None else torch.empty_like(compressed),
        dSinks=torch.empty_like(a["sinks"]),
    )


def finish(args: Args, changed: frozenset[str]) -> None:
    """Sets out and lse to results of the forward operator."""
    of_forward = {"q": args["query"], "softmaxScale": args["scaleValue"], "returnSoftmaxLse": True}
    results = forward.formula({**args, **of_forward, "attnOut": args["out"], "softmaxLseOut": args["lse"]})
    for name, result in (("out", "attnOut"), ("lse", "softmaxLseOut")):
        if name not in changed:
            args[name] = results[result].value.to(args[name].dtype)


def formula(args: Args) -> dict[str, Near]:
    """dS = P (dO x - D), D = rowsum(dO * O): dQ = scale dS x, dx = scale dS^T Q + P^T dO."""
    query, d_out, out = (flat(args[name]) for name in ("query", "dOut", "out"))
    of_forward, dtype, heads = {**args, "q": args["query"]}, query.dtype, query.shape[1]
    lse, sinks = args["lse"].reshape(len(query), heads), args["sinks"]
    keys = [None if args[name] is None else flat(args[name])[:, 0] for name in ("oriKv", "cmpKv")]
    d_q, d_sink = near(torch.zeros(query.shape)), near(torch.zeros(heads, 1))
    d_x = [None if k is None else near(torch.zeros(k.shape)) for k in keys]
    norms = {norm: near(torch.zeros(len(query), args[name].shape[-1]))
             for name, norm in NORMS.items() if args[name] is not None}  # fmt: skip
    sides = [lengths_of(of_forward, side) for side in range(3)]
    for b, (first, count) in enumerate(sides[0]):
        for row in range(first, first + count):
            read = row_entries(of_forward, b, row - first, sides)
            if not read:
                continue
            x, q, do, of_row = near(keys_of(args, read)), near(query[row]), near(d_out[row]), near(lse[row][:, None])
            p = ((q @ x.T) * args["scaleValue"] - of_row).exp()
            delta = (do * near(out[row])).sum(1)
            d_s, rounded = (p * (do @ x.T - delta)).rounded(dtype), p.rounded(dtype)
            d_q.prepare(slice(row, row + 1), (d_s @ x) * args["scaleValue"])
            if sinks is not None:
                d_sink = d_sink - (near(sinks[:, None]) - of_row).exp() * delta
            d_keys = (d_s.T @ q) * args["scaleValue"] + rounded.T @ do
            for source, total in enumerate(d_x):
                mine = [n for n, entry in enumerate(read) if entry[0] == source]
                if total is not None and mine:
                    at = torch.tensor([read[n][1] for n in mine])
                    d_x[source] = total + near(torch.eye(len(total.value))[:, at]) @ d_keys[mine]
            listed_source = int(args["oriSparseIndices"] is None)
            mine = [n for n, entry in enumerate(read) if entry[0] == listed_source]
            for norm in norms.values():
                if mine:
                    slots = torch.tensor([read[n][2] for n in mine])
                    mean = p.sum(0)[:, mine] * (1 / heads)
                    norm.prepare(slice(row, row + 1), mean @ near(torch.eye(norm.value.shape[1])[slots]))
    results = {"dQuery": d_q, "dOriKv": d_x[0], "dCmpKv": d_x[1], "dSinks": d_sink, **norms}
    return {
        name: t.rounded(args[name].dtype).reshape(tuple(args[name].shape))
        for name, t in results.items()
        if t is not None and args[name] is not None
    }


ROWS = "query dOut out oriKv dQuery dOriKv"
ENDS = " ".join(f"cuSeqlens{side}" for side in SIDES)
CLAUSES = merged(
    of_parameters(
        f"{ROWS} lse",
        ROWS,
        "lse dSinks",
        ENDS,
        {
            "oriMaskMode": (1, 2, 5),
            "cmpMaskMode": (0, 4),
            "cmpRatio": (0, -4),
            "layoutQ": ("BNSD",),
            "layoutKv": ("BSND", "PA_BBND"),
        },
        "query dOut dQuery dOriKv dCmpKv cmpSoftmaxL1Norm",
    ),
    {
        "A window alone, with all compressed keys, or with chosen ones; lists of keys of another chip (ruling 42).": [
            *(computes(kind=kind, **over) for kind in ("window", "all", "chosen", "keys") for over in ({}, BSND)),
            *(computes(dtype=d) for d in (H, BF)),
            *(computes(mode=mode) for mode in (0, 3)),
        ],
        "sinks are needed; their gradient is part of the results.": [
            *(computes(sinks=lambda old, n=n: torch.full_like(old, n)) for n in (-1e4, 0.0, 5.0)),
            refuses(TILING, "sinks", sinks=None, dSinks=None),
            forbids("dSinks", dSinks=widened),
        ],
        "Rows behind seqused, and rows without keys, have no gradient (ruling 42).": [
            computes(sequsedQ=ints(2, 0, d=torch.int32)),
            computes(rows=(9, 5), tokens=(4, 5)),
            forbids("sequsedQ", sequsedQ=ints(1, 99, d=torch.int32)),
            forbids("sequsedOriKv", sequsedOriKv=ints(1, 99, d=torch.int32)),
            forbids("sequsedCmpKv", sequsedCmpKv=ints(1, 99, d=torch.int32)),
        ],
        "The norm has a column for every entry of a list, 0 of those that are not read.": [
            computes(cmpSparseIndices=lambda old: torch.full_like(old, -1)),
            computes(cmpSparseIndices=zeros(8, 1, ENTRIES, d=torch.int32)),
            forbids("cmpSoftmaxL1Norm", cmpSoftmaxL1Norm=widened),
            forbids("oriSoftmaxL1Norm", kind="keys", oriSoftmaxL1Norm=widened),
            refuses(NULL, "cmpTopkLength", cmpTopkLength=zeros(8, 1, d=torch.int32)),
            refuses(NULL, "oriSparseIndices", oriSparseIndices=zeros(8, 1, 4, d=torch.int32)),
            refuses(NULL, "oriTopkLength", oriTopkLength=zeros(8, 1, d=torch.int32)),
        ],
        "Any scale; a window; a residual; metadata of any content.": [
            *(computes(scaleValue=s) for s in (0.0, -0.04)),
            computes(window=(2, 1)),
            *(forbids(name, oriMaskMode=3) for name in ("oriWinLeft",)),
            forbids("oriWinLeft", mode=3, oriWinRight=0),
            forbids("cmpResidualKv", cmpRatio=3),
            forbids("cmpResidualKv", cmpResidualKv=ints(4, 2, d=torch.int32)),
            forbids("cmpKv", cmpKv=widened),
            refuses(NULL, "dCmpKv", dCmpKv=None),
            computes(metadata=ints(*range(-5, 5), d=torch.int32)),
        ],
    },
)
PAGE = Page("aclnnSparseFlashMlaGrad", PROTOTYPE, base, formula, CLAUSES, finish)
