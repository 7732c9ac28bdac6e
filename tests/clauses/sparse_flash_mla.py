"""The page of aclnnSparseFlashMla, clause by clause: the forms that A2 and A3 have, and lists of keys."""

import torch

from clauses.dtypes import BF, F32, F64, I8, I16, I32, I64, H
from clauses.sparse_flash_mla_calls import ENTRIES, PROTOTYPE, SIDES, base, formula
from clauses.table import INVALID, NULL, RUN_TIME, TILING, Page, clause, computes, forbids, refuses, repeats
from clauses.values import deeper, drawn, fractal, gapped, ints, longer, swapped, to, widened, zeros

BSND = {"layout": "BSND", "rows": (4, 4), "tokens": (14, 14)}
KINDS = ("window", "all", "chosen")
ENDS = tuple(f"cuSeqlens{side}" for side in SIDES)
USED = tuple(f"seqused{side}" for side in SIDES)
ROWS = ("q", "oriKv", "cmpKv")


def first_entry(value: int) -> object:
    """A list whose first entries are one number."""
    return lambda old: old.index_fill(-1, torch.tensor(0), value)


CLAUSES = (
    # ---------------------------------------------------------------------------------------------------------- dtypes
    clause(
        "dtypes",
        "Rows are FLOAT16 or BFLOAT16, all of one dtype.",
        *(computes(dtype=d, kind=kind) for d in (H, BF) for kind in KINDS),
        computes(dtype=BF, **BSND),
        refuses(INVALID, "q", dtype=F32),
        refuses(INVALID, "q", dtype=F64),
        *(refuses(INVALID, name, **{name: to(d)}) for name in ("oriKv", "cmpKv", "attnOut") for d in (F32, BF, I8)),
    ),
    clause(
        "integers",
        "Lists and lengths are INT32; INT64 is taken too.",
        *(computes(**{name: to(d)}) for name in ("cmpSparseIndices", "cmpResidualKv", *ENDS) for d in (I32, I64)),
        *(refuses(INVALID, name, **{name: to(d)}) for name in ("cmpSparseIndices", *ENDS) for d in (I16, F32)),
        refuses(INVALID, "cmpResidualKv", cmpResidualKv=to(F32)),
        ruling=12,
    ),
    clause(
        "sink-dtype",
        "sinks and softmaxLseOut are FLOAT32.",
        *(refuses(INVALID, name, **{name: to(d)}) for name in ("sinks", "softmaxLseOut") for d in (H, F64)),
    ),
    clause("formats", "Tensors are ND.", *(refuses(INVALID, name, **{name: fractal}) for name in (*ROWS, "attnOut"))),
    # ---------------------------------------------------------------------------------------------- what must be there
    clause(
        "null",
        "q, oriKv and attnOut, softmaxLseOut where it is asked for, and the ends of packed sequences.",
        *(refuses(NULL, name, **{name: None}) for name in ("q", "oriKv", "attnOut", "softmaxLseOut", *ENDS)),
        refuses(TILING, "sinks", sinks=None),
        refuses(TILING, "cmpResidualKv", cmpResidualKv=None, tokens=(8, 12)),
    ),
    RUN_TIME,
    clause(
        "kinds",
        "A window alone, with all compressed keys, or with chosen ones.",
        *(computes(kind=kind, **over) for kind in KINDS for over in ({}, BSND)),
        refuses(NULL, "cmpSparseIndices", cmpKv=None, cuSeqlensCmpKv=None, cmpResidualKv=None, cmpMaskMode=0),
    ),
    clause(
        "lse",
        "softmaxLseOut is written where returnSoftmaxLse says so.",
        computes(saves=False, returnSoftmaxLse=False),
        computes(saves=False, **BSND),
    ),
    clause(
        "metadata",
        "metadata of any content changes nothing.",
        computes(metadata=ints(*range(-5, 5), d=I32)),
        computes(metadata=drawn(1024)),
        computes(metadata=zeros(1024, d=I32)),
    ),
    # ------------------------------------------------------------------------------------------------------- attributes
    clause(
        "masks",
        "oriMaskMode is 0 (all keys), 3 (causal) or 4 (a window).",
        *(computes(mode=mode, kind=kind) for mode in (0, 3) for kind in KINDS),
        *(computes(window=w) for w in ((0, 0), (127, 0), (2, 1), (-1, 0), (3, -1))),
        *(forbids("oriMaskMode", oriMaskMode=n) for n in (1, 2, 5, -1)),
        *(forbids("oriWinLeft", oriMaskMode=n) for n in (0, 3)),
        forbids("oriWinLeft", mode=3, oriWinRight=0),
    ),
    clause(
        "compressed-masks",
        "cmpMaskMode is 3 with compressed keys, 0 without.",
        *(forbids("cmpMaskMode", cmpMaskMode=n) for n in (0, 1, 4, -1)),
        *(forbids("cmpMaskMode", kind="window", cmpMaskMode=n) for n in (3, 4)),
    ),
    clause(
        "ratio",
        "cmpRatio is the tokens of a compressed key, 1 without them.",
        *(computes(ratio=n, kind=kind) for n in (1, 2, 4, 128) for kind in ("all", "chosen")),
        computes(ratio=128, tokens=(300, 257), kind="all"),
        *(forbids("cmpRatio", cmpRatio=n) for n in (0, -4)),
        forbids("cmpRatio", kind="window", cmpRatio=4),
        forbids("cmpResidualKv", cmpRatio=3),
    ),
    clause(
        "residual",
        "cmpResidualKv is from 0 to cmpRatio - 1, and with the compressed keys the tokens of oriKv.",
        *(computes(tokens=(8 + n, 12 + n), kind=kind) for n in range(4) for kind in ("all", "chosen")),
        *(forbids("cmpResidualKv", cmpResidualKv=ints(*n, d=I32)) for n in ((4, 2), (-1, 2), (1,), (1, 2, 0), (2, 2))),
        ruling=42,
    ),
    clause("positions", "topkValueMode is 1.", *(forbids("topkValueMode", topkValueMode=n) for n in (0, 2))),
    clause(
        "forms-of-950",
        "Another chip takes lists of oriKv, with their lengths, in oriMaskMode 0; those of both sources are refused.",
        *(computes(kind="keys", **over) for over in ({}, BSND, {"rows": (0, 5)}, {"dtype": BF})),
        computes(kind="keys", oriSparseIndices=lambda old: torch.full_like(old, -1)),
        refuses(TILING, "oriTopkLength", kind="keys", oriTopkLength=None),
        *(forbids("oriSparseIndices", kind="keys", oriSparseIndices=first_entry(n)) for n in (9, -2, 2**30)),
        *(forbids("oriMaskMode", kind="keys", oriMaskMode=n) for n in (3, 4)),
        refuses(NULL, "oriSparseIndices", oriSparseIndices=zeros(8, 1, 4, d=I32)),
        *(refuses(NULL, name, **{name: zeros(8, 1, d=I32)}) for name in ("oriTopkLength", "cmpTopkLength")),
        ruling=42,
    ),
    # ---------------------------------------------------------------------------------------------------------- shapes
    clause(
        "layouts",
        "layoutQ is BSND or TND, layoutKv the same or PA_BBND.",
        *(forbids("layoutQ", layoutQ=x) for x in ("BNSD", "SBH", "tnd")),
        *(forbids("layoutKv", layoutKv=x) for x in ("BSND", "PA_BSND", "")),
        refuses(NULL, " ".join(ENDS), layoutQ="BSND", layoutKv="BSND"),
        refuses(NULL, "oriBlockTable cmpBlockTable sequsedOriKv sequsedCmpKv", layoutKv="PA_BBND"),
        *(refuses(NULL, name, **{name: zeros(2, 1, d=I32)}) for name in ("oriBlockTable", "cmpBlockTable")),
        *(refuses(NULL, name, **{name: ints(0, 4, 8, d=I32)}, **BSND) for name in ENDS),
    ),
    clause(
        "shapes",
        "Shapes agree in T1, T2, T3, N1, D and G.",
        *(forbids(name, **{name: deeper}) for name in ("q", "oriKv", "cmpKv", "attnOut", "cmpSparseIndices")),
        *(
            forbids(f"{name} cuSeqlensOriKv cuSeqlensCmpKv softmaxLseOut", **{name: longer})
            for name in ("q", "oriKv", "cmpKv", "attnOut", "cmpSparseIndices")
        ),
        *(forbids(name, **{name: widened}) for name in ("oriKv", "cmpKv", "attnOut", "softmaxLseOut")),
        *(forbids("sinks", sinks=zeros(n)) for n in (1, 3, 5)),
        forbids("sinks", sinks=zeros(4, 1)),
    ),
    clause("heads", "N1 is 1 to 128.", *(computes(N=n) for n in (1, 2, 64, 128)), forbids("q", N=129)),
    clause("dims", "D is 512.", *(forbids("q", D=n) for n in (64, 128, 511, 576))),
    clause(
        "lengths",
        "Ends begin with 0, never fall, and end with the tokens of their tensor.",
        computes(rows=(0, 5), tokens=(9, 14)),
        computes(rows=(3, 0, 2), tokens=(9, 0, 14)),
        *(forbids(name, **{name: ints(*n, d=I32)}) for name in ENDS for n in ((1, 3, 8), (0, 99, 3), (0, 3))),
        forbids("cuSeqlensOriKv", cuSeqlensOriKv=ints(0, 9, 14, 23, d=I32)),
    ),
    clause(
        "used",
        "seqused are lengths; the rows behind them are padding, whose results are 0.",
        computes(sequsedQ=ints(2, 0, d=I32)),
        computes(
            sequsedQ=ints(2, 5, d=I32),
            sequsedOriKv=ints(9, 11, d=I32),
            sequsedCmpKv=ints(2, 2, d=I32),
            cmpResidualKv=ints(1, 3, d=I32),
            kind="all",
        ),
        computes(sequsedQ=ints(4, 1, d=I32), **BSND),
        computes(
            sequsedOriKv=ints(14, 9, d=I32),
            sequsedCmpKv=ints(3, 2, d=I32),
            cmpResidualKv=ints(2, 1, d=I32),
            **BSND,
            kind="all",
        ),
        *(forbids(name, **{name: ints(*n, d=I32)}) for name in USED for n in ((1, 99), (-1, 2), (1,))),
        *(forbids(name, **{name: ints(*n, d=I32)}, **BSND) for name in USED for n in ((1, 99), (-1, 2), (1, 1, 1))),
        ruling=42,
    ),
    # --------------------------------------------------------------------------------------------------------- numbers
    clause(
        "formula",
        "One softmax over both sources and the sink, which is part of softmaxLseOut.",
        *(computes(softmaxScale=s) for s in (0.0, 1.0, -0.04, 512**-0.5)),
        *(computes(sinks=lambda old, n=n: torch.full_like(old, n)) for n in (-1e4, 0.0, 30.0)),
        computes(rows=(20, 30), tokens=(60, 90), ratio=4, N=8),
        ruling=42,
    ),
    clause(
        "rows-without-keys",
        "A row that sees no key of either source has output 0 and softmaxLseOut 0.",
        *(computes(rows=(9, 5), tokens=(4, 5), kind=kind) for kind in KINDS),
        ruling=42,
    ),
    clause(
        "lists",
        "A list ends at its first -1; a row reads as many slots as it sees compressed keys, and none of a later key.",
        computes(cmpSparseIndices=lambda old: torch.full_like(old, -1)),
        computes(cmpSparseIndices=zeros(8, 1, ENTRIES, d=I32)),  # one entry again and again
        computes(cmpSparseIndices=lambda old: torch.full_like(old, 1)),  # past the bound of the first rows
        computes(cmpSparseIndices=zeros(8, 1, 1, d=I32)),
        forbids("cmpSparseIndices", cmpSparseIndices=lambda old: old.flip(-1)),  # holes
        *(forbids("cmpSparseIndices", cmpSparseIndices=first_entry(n)) for n in (3, -2, 2**30)),
        ruling=42,
    ),
    clause(
        "strides",
        "Tensors may be non-contiguous.",
        *(computes(**{name: gapped}) for name in (*ROWS, "attnOut", "cmpSparseIndices")),
        *(computes(**{name: swapped}) for name in ("q", "attnOut")),
    ),
    clause("repeats", "Results are the same bits again.", repeats(), repeats(kind="all", **BSND)),
)

PAGE = Page("aclnnSparseFlashMla", PROTOTYPE, base, formula, CLAUSES)
