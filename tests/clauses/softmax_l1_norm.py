"""Table of the page of aclnnSparseFlashMlaSoftmaxL1Norm."""

from collections.abc import Sequence
from typing import Any

import torch

from clauses.checks import NULL, Args, Page, computes, filled, forbids, merged, prototype, refuses
from clauses.compressed_key_helpers import ends_of, lists_of, of_lengths, rows_of
from clauses.derived import of_parameters
from clauses.dtype_abbreviations import BF, F32, I32, H
from clauses.error_bounds import Near, near
from clauses.values import draw, longer, widened, zeros

PROTOTYPE = prototype("""
    aclTensor q k softmaxLse sparseIndices cuSeqlensQ cuSeqlensK sequsedQ sequsedK cmpResidualK topkLength metadata
    double    softmaxScale
    int64_t   maxSeqlenK cmpRatio maskMode
    char      layoutQ layoutK
    aclTensor out
""")
ENDS, USED = ("cuSeqlensQ", "cuSeqlensK"), ("sequsedQ", "sequsedK")
BSND: dict[str, Any] = {"layout": "BSND", "rows": (6, 6), "keys": (2, 2), "residual": (0, 3)}


def base(
    layout: str = "TND", rows: Sequence[int] = (7, 5), keys: Sequence[int] = (3, 2), N: int = 4, D: int = 512,
    K: int = 8, ratio: int = 4, residual: Sequence[int] = (1, 0), mode: int = 3, dtype: torch.dtype = H,
    chosen: bool = True,
) -> Args:  # fmt: skip
    """Makes a legal call; its log-sum-exp includes more keys than the call has.

    Args:
        rows, keys, ratio, residual, mode: as in sparse_lightning_indexer_kl_loss_grad.py. K: entries of a list.
        chosen: pass lists.
    """
    packed, total, columns = layout == "TND", sum(rows), K if chosen else max(keys) + 1

    def shaped(t: torch.Tensor) -> torch.Tensor:
        return t if packed else t.unflatten(0, (len(rows), -1))

    lists = lists_of(rows, keys, K, ratio, residual, mode)
    out = shaped(torch.empty(total, 1, columns if packed or chosen else keys[0]))
    return filled(
        PROTOTYPE,
        q=shaped(draw(total, N, D, d=dtype)),
        k=shaped(draw(sum(keys), 1, D, d=dtype)),
        softmaxLse=(draw(1, total, N) if packed else draw(len(rows), 1, rows[0], N)) + 5,
        sparseIndices=shaped(lists) if chosen else None,
        **(ends_of(ENDS, rows, keys) if packed else {}),
        cmpResidualK=torch.tensor(residual, dtype=I32) if mode and ratio > 1 else None,
        softmaxScale=0.04,
        maxSeqlenK=columns if packed and not chosen else 0,
        cmpRatio=ratio,
        maskMode=mode,
        layoutQ=layout,
        layoutK=layout,
        out=out,
    )


def formula(args: Args) -> dict[str, Near]:
    """Computes the mean over heads of exp(scale q k - lse), in the columns of keys that a row reads."""
    q, k = (args[name] if args[name].dim() == 3 else args[name].flatten(0, 1) for name in ("q", "k"))
    lse, columns = args["softmaxLse"].reshape(len(q), -1), args["out"].shape[-1]
    out = near(torch.zeros(len(q), columns))
    lists, counts = (
        args[name] if args[name] is None else args[name].flatten() for name in ("sparseIndices", "topkLength")
    )
    for _, row, key, visible in rows_of(args, ENDS, USED, "cmpResidualK"):
        entries = list(range(visible))
        if lists is not None:
            row_list = lists.view(len(q), columns)[row, : min(visible, columns)].tolist()
            row_list = row_list if counts is None else row_list[: int(counts[row])]
            entries = row_list[: row_list.index(-1)] if -1 in row_list else row_list
        slots = [n for n, entry in enumerate(entries) if entry < visible]
        if not slots:
            continue
        x = near(k[[key + entries[n] for n in slots], 0])
        p = ((near(q[row]) @ x.T) * args["softmaxScale"] - near(lse[row][:, None])).exp()
        mean = p.sum(0) * (1 / q.shape[1])
        out.prepare(slice(row, row + 1), mean @ near(torch.eye(columns)[slots]))
    return {"out": out.reshape(tuple(args["out"].shape))}


CLAUSES = merged(
    of_lengths(ENDS, USED, "cmpResidualK"),
    {
        "Probabilities are of the entries of lists, or of all keys; mode 0 shows all keys (ruling 42).": [
            *(computes(chosen=c, mode=m, **over) for c in (True, False) for m in (0, 3) for over in ({}, BSND)),
            *(computes(dtype=d) for d in (H, BF)),
            *(computes(sparseIndices=fill) for fill in (torch.zeros_like, torch.ones_like)),
            computes(topkLength=lambda old: torch.arange(12)[:, None].int() % 3),
            computes(N=1),
        ],
        "Columns are those of lists, or maxSeqlenK; heads and elements agree.": [
            *(forbids(name, **{name: widened}) for name in ("k", "softmaxLse", "out")),
            *(forbids(name, **{name: longer}) for name in ("sparseIndices", "out")),
            forbids("maxSeqlenK", chosen=False, maxSeqlenK=1),
            forbids("q", N=129),
            forbids("q", D=256),
        ],
        "Rows without keys have zeros; packed sequences need ends.": [
            computes(rows=(30, 5)),
            refuses(NULL, " ".join(ENDS), **{ENDS[0]: None}),
        ],
        "Any scale; metadata of any content.": [
            *(computes(softmaxScale=s) for s in (0.0, -0.1)),
            computes(metadata=zeros(64, d=F32)),
        ],
    },
    of_parameters(
        "q k softmaxLse out",
        "q k",
        "softmaxLse out",
        " ".join(("sparseIndices", *ENDS)),
        {"maskMode": (1, 4), "cmpRatio": (0, 129), "layoutQ": ("BNSD",), "layoutK": ("BSND",)},
        "q k softmaxLse out",
        workspace=False,
    ),
)
PAGE = Page("aclnnSparseFlashMlaSoftmaxL1Norm", PROTOTYPE, base, formula, CLAUSES)
