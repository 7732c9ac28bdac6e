"""Table of the page of aclnnLightningIndexerV2."""

from collections.abc import Sequence
from typing import Any

import torch

from clauses.checks import NULL, Args, Page, computes, filled, forbids, merged, prototype, refuses
from clauses.compressed_key_helpers import ends_of, has_bound, of_lengths, rows_of
from clauses.derived import of_parameters
from clauses.dtype_abbreviations import BF, F32, I32, H
from clauses.error_bounds import Near, near
from clauses.values import draw, ints, longer, widened, zeros

PROTOTYPE = prototype("""
    aclTensor q k w cuSeqlensQ cuSeqlensK sequsedQ sequsedK cmpResidualK blockTable outputIdxOffset metadata
    int64_t   topk maxSeqlenQ
    char      layoutQ layoutK
    int64_t   maskMode cmpRatio returnValue
    aclTensor sparseIndices sparseValues
""")
ENDS, USED = ("cuSeqlensQ", "cuSeqlensK"), ("sequsedQ", "sequsedK")
BSND: dict[str, Any] = {"layout": "BSND", "rows": (6, 6), "keys": (4, 4), "residual": (0, 3)}
FULL: dict[str, Any] = {"rows": (3, 2), "keys": (8, 9), "topk": 4}  # every row sees as many keys as it chooses


def base(
    layout: str = "TND", rows: Sequence[int] = (7, 5), keys: Sequence[int] = (5, 4), N: int = 64, D: int = 128,
    topk: int = 3, ratio: int = 4, residual: Sequence[int] = (1, 0), mode: int = 3, dtype: torch.dtype = H,
    values: bool = False,
) -> Args:  # fmt: skip
    """Makes a legal call; rows, keys, ratio, residual, mode: as in sparse_lightning_indexer_kl_loss_grad.py."""
    packed, total = layout == "TND", sum(rows)

    def shaped(t: torch.Tensor) -> torch.Tensor:
        return t if packed else t.unflatten(0, (len(rows), -1))

    chosen = shaped(torch.empty(total, 1, topk))
    return filled(
        PROTOTYPE,
        q=shaped(draw(total, N, D, d=dtype)),
        k=shaped(draw(sum(keys), 1, D, d=dtype)),
        w=shaped(draw(total, N)),
        **(ends_of(ENDS, rows, keys) if packed else {}),
        cmpResidualK=torch.tensor(residual, dtype=I32) if has_bound(ratio, mode) else None,
        topk=topk,
        maxSeqlenQ=-1,
        layoutQ=layout,
        layoutK=layout,
        maskMode=mode,
        cmpRatio=ratio,
        returnValue=int(values),
        sparseIndices=chosen.to(I32),
        sparseValues=chosen if values else torch.empty(0),
    )


def formula(args: Args) -> dict[str, Near]:
    """Computes the keys with the largest sums of w * max(0, q k), in descending order, and the sums."""
    q, k = (args[name] if args[name].dim() == 3 else args[name].flatten(0, 1) for name in ("q", "k"))
    w, topk, offset = args["w"].flatten(0, -2), args["topk"], args["outputIdxOffset"]
    indices, values = torch.full((len(q), topk), -1), near(torch.full((len(q), topk), -torch.inf))
    for b, row, key, visible in rows_of(args, ENDS, USED, "cmpResidualK"):
        products = near(q[row]) @ near(k[key : key + visible, 0]).T
        scores = (near(w[row])[:, None] * products.relu()).sum(0)[0]
        order = scores.value.sort(descending=True, stable=True).indices[:topk]
        added = 0 if offset is None else int(offset.flatten()[row if offset.dim() > 1 else b])
        indices[row, : len(order)] = order + added
        values.prepare(slice(row, row + 1), Near(
            torch.cat((scores.value[order], values.value[row, len(order) :])),
            torch.cat((scores.slack[order], values.slack[row, len(order) :])),
        ))  # fmt: skip
    results = {"sparseIndices": near(indices)} | ({"sparseValues": values} if args["returnValue"] else {})
    return {name: t.reshape(tuple(args[name].shape)) for name, t in results.items()}


CLAUSES = merged(
    of_lengths(ENDS, USED, "cmpResidualK"),
    of_parameters(
        "q k w sparseIndices",
        "q k",
        "w",
        " ".join(ENDS),
        {"cmpRatio": (129,), "returnValue": (2,), "layoutQ": ("BNSD",), "layoutK": ("BSND",)},
        "q k w sparseIndices",
    ),
    {
        "The largest scores of the keys that a row sees, -1 behind them (ruling 43).": [
            *(computes(mode=m, ratio=r, **over) for m in (0, 3) for r in (1, 4) for over in ({}, BSND)),
            *(computes(dtype=d, values=True, **FULL) for d in (H, BF)),
            *(computes(topk=n, values=True) for n in (1, 8, 2048)),
            computes(rows=(30, 5)),
        ],
        "outputIdxOffset is added to numbers of keys, of a row or of a sequence (ruling 43).": [
            computes(outputIdxOffset=ints(100, 200, d=I32)),
            computes(outputIdxOffset=lambda old: torch.arange(12)[:, None].int()),
            forbids("outputIdxOffset", outputIdxOffset=zeros(3, d=I32)),
        ],
        "Rows, keys, heads and results agree; keys in pages have a table.": [
            *(forbids(name, **{name: widened}) for name in ("k", "w", "sparseIndices")),
            forbids("sparseValues", values=True, sparseValues=widened),
            *(forbids(name, **{name: longer}) for name in ("w", "sparseIndices")),
            forbids("topk", topk=0),
            *(forbids("maskMode", ratio=1, maskMode=n) for n in (1, 4)),
            forbids("cmpRatio", ratio=1, cmpRatio=0),
            forbids("q", D=64),
            refuses(NULL, "blockTable", blockTable=zeros(2, 1, d=I32)),
        ],
        "Residuals are needed of keys that stand for several tokens, and of no others (ruling 43).": [
            refuses(NULL, "cmpResidualK", cmpResidualK=None),
            refuses(NULL, "cmpResidualK", ratio=1, cmpResidualK=ints(0, 0, d=I32)),
        ],
        "maxSeqlenQ and metadata change nothing (ruling 43).": [
            computes(maxSeqlenQ=3),
            computes(metadata=zeros(1024, d=F32)),
        ],
    },
)
PAGE = Page("aclnnLightningIndexerV2", PROTOTYPE, base, formula, CLAUSES)
