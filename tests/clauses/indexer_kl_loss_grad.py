"""The page of aclnnSparseLightningIndexerKLLossGrad, clause by clause."""

import torch

from clauses.dtypes import BF, F32, F64, I8, I16, I32, I64, H
from clauses.indexer_kl_loss_grad_calls import ENDS, PROTOTYPE, RESIDUAL, USED, base, formula
from clauses.table import INVALID, NULL, RUN_TIME, Page, clause, computes, forbids, refuses, repeats
from clauses.values import deeper, drawn, fractal, gapped, ints, longer, swapped, to, widened, zeros

BSND = {"layout": "BSND", "rows": (6, 6), "keys": (2, 2), "residual": (0, 3)}
NEEDED = ("q", "k", "w", "sparseIndices", "attnSoftmaxL1Norm", "dq", "dk", "dw", "softmaxOut")
SINGLES = ("w", "attnSoftmaxL1Norm", "dw", "softmaxOut")

CLAUSES = (
    clause(
        "dtypes",
        "q and k are FLOAT16 or BFLOAT16, of one dtype, and so are their gradients.",
        *(computes(dtype=d, **over) for d in (H, BF) for over in ({}, BSND)),
        refuses(INVALID, "q", dtype=F32),
        refuses(INVALID, "q", dtype=F64),
        *(refuses(INVALID, name, **{name: to(d)}) for name in ("k", "dq", "dk") for d in (F32, BF, I8)),
    ),
    clause(
        "float32",
        "w, attnSoftmaxL1Norm, dw and softmaxOut are FLOAT32.",
        *(refuses(INVALID, name, **{name: to(d)}) for name in SINGLES for d in (H, BF, F64)),
    ),
    clause(
        "integers",
        "Lists and lengths are INT32; INT64 is taken too.",
        *(computes(**{name: to(d)}) for name in ("sparseIndices", RESIDUAL, *ENDS) for d in (I32, I64)),
        *(refuses(INVALID, name, **{name: to(d)}) for name in ("sparseIndices", *ENDS) for d in (I16, F32)),
        ruling=12,
    ),
    clause("formats", "Tensors are ND.", *(refuses(INVALID, name, **{name: fractal}) for name in NEEDED)),
    clause(
        "null",
        "Rows, lists, the target and the outputs, the ends of packed sequences, and a residual of compressed keys.",
        *(refuses(NULL, name, **{name: None}) for name in (*NEEDED, *ENDS, RESIDUAL)),
    ),
    RUN_TIME,
    clause(
        "metadata",
        "metadataOptional of any content changes nothing.",
        computes(metadataOptional=ints(*range(-5, 5), d=I32)),
        computes(metadataOptional=drawn(64)),
        computes(metadataOptional=zeros(64, d=I32)),
    ),
    clause(
        "masks",
        "maskMode is 0 (all keys) or 3 (causal).",
        *(computes(mode=0, ratio=n, **over) for n in (1, 4) for over in ({}, BSND)),
        *(forbids("maskMode", ratio=1, maskMode=n) for n in (1, 2, 4, -1)),
    ),
    clause(
        "ratio",
        "cmpRatio is the tokens of a key, 1 to 128.",
        *(computes(ratio=n, residual=(n - 1, 0)) for n in (2, 3, 4, 128)),
        computes(ratio=1, rows=(3, 2)),
        computes(ratio=1, **{**BSND, "rows": (2, 2)}),
        *(forbids("cmpRatio", ratio=1, cmpRatio=n) for n in (0, -4)),
        forbids("cmpRatio", ratio=129),
    ),
    clause(
        "residual",
        "cmpResidualKOptional is from 0 to cmpRatio - 1; without compressed keys there is none.",
        *(computes(residual=(n, 3 - n)) for n in range(4)),
        *(forbids(RESIDUAL, **{RESIDUAL: ints(*n, d=I32)}) for n in ((4, 2), (-1, 2), (1,), (1, 2, 0))),
        *(refuses(NULL, RESIDUAL, ratio=n, mode=m, **{RESIDUAL: ints(0, 0, d=I32)}) for n, m in ((1, 3), (4, 0))),
        ruling=45,
    ),
    clause(
        "layouts",
        "layoutQ is BSND or TND, and layoutK the same.",
        *(forbids("layoutQ", layoutQ=x) for x in ("BNSD", "SBH", "tnd")),
        *(forbids("layoutK", layoutK=x) for x in ("BSND", "PA_BBND", "")),
        *(refuses(NULL, name, **{name: ints(0, 6, 12, d=I32)}, **BSND) for name in ENDS),
    ),
    clause(
        "shapes",
        "Shapes agree in T1, T2, N1, D and K.",
        *(forbids(name, **{name: deeper}) for name in NEEDED),
        *(forbids(name, **{name: widened}) for name in ("k", "w", "dq", "dk", "dw", "softmaxOut")),
        forbids("softmaxOut", attnSoftmaxL1Norm=widened),
        *(forbids(name, **{name: longer}) for name in ("w", "sparseIndices", "attnSoftmaxL1Norm", "dw", "softmaxOut")),
    ),
    clause("heads", "N1 is 1 to 128.", *(computes(N=n) for n in (1, 2, 8, 64, 128)), forbids("q", N=129)),
    clause("dims", "D is 128.", *(forbids("q", D=n) for n in (64, 127, 256))),
    clause(
        "lists-sizes",
        "K is 512, 1024, 2048, 4096 or 8192.",
        *(computes(K=n) for n in (1024, 2048)),
        *(forbids("sparseIndices", K=n) for n in (1, 256, 513)),
    ),
    clause(
        "lengths",
        "Ends begin with 0, never fall, and end with the tokens of their tensor.",
        computes(rows=(0, 5), keys=(3, 2)),
        computes(rows=(7, 0, 2), keys=(3, 0, 1), residual=(1, 0, 2)),
        *(forbids(name, **{name: ints(*n, d=I32)}) for name in ENDS for n in ((1, 3, 12), (0, 99, 5), (0, 3))),
    ),
    clause(
        "used",
        "seqUsed are lengths; the rows behind them are padding, whose results are 0.",
        computes(seqUsedQOptional=ints(4, 0, d=I32)),
        computes(seqUsedQOptional=ints(4, 5, d=I32)),
        computes(
            seqUsedQOptional=ints(5, 3, d=I32), seqUsedKOptional=ints(2, 2, d=I32), sparseIndices=torch.zeros_like
        ),
        computes(seqUsedQOptional=ints(5, 1, d=I32), **BSND),
        computes(seqUsedKOptional=ints(2, 1, d=I32), sparseIndices=torch.zeros_like, **BSND),
        *(forbids(name, **{name: ints(*n, d=I32)}) for name in USED for n in ((1, 99), (-1, 2), (1,))),
        *(forbids(name, **{name: ints(*n, d=I32)}, **BSND) for name in USED for n in ((1, 99), (-1, 2), (1, 1, 1))),
    ),
    clause(
        "formula",
        "dI = y * sum p - p, with p as it is given.",
        *(computes(mass=m, **over) for m in (0.0, 0.3, 1.0, 2.0) for over in ({}, BSND)),
        computes(rows=(20, 30), keys=(5, 8), residual=(2, 3), N=16),
        ruling=45,
    ),
    clause(
        "rows-without-keys",
        "A row that sees no key has zeros.",
        computes(rows=(30, 5), keys=(3, 2)),
        computes(keys=(0, 2), residual=(3, 0)),
        ruling=45,
    ),
    clause(
        "lists",
        "A list ends at its first -1; a row reads as many slots as it sees keys, and none of a later key.",
        computes(sparseIndices=lambda old: torch.full_like(old, -1)),
        computes(sparseIndices=torch.zeros_like),  # one key again and again
        computes(sparseIndices=torch.ones_like),  # past the bound of the first rows
        forbids("sparseIndices", sparseIndices=lambda old: old.flip(-1)),  # holes
        *(
            forbids("sparseIndices", sparseIndices=lambda old, n=n: old.index_fill(-1, torch.tensor(0), n))
            for n in (3, -2, 2**30)
        ),
        ruling=45,
    ),
    clause(
        "strides",
        "Tensors may be non-contiguous.",
        *(computes(**{name: gapped}) for name in NEEDED),
        *(computes(**{name: swapped}) for name in ("q", "dq")),
    ),
    clause("repeats", "Results are the same bits again.", repeats(), repeats(**BSND)),
)

PAGE = Page("aclnnSparseLightningIndexerKLLossGrad", PROTOTYPE, base, formula, CLAUSES)
