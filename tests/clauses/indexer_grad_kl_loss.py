"""The page of aclnnSparseLightningIndexerGradKLLoss, clause by clause: the edition of 16-bit weights."""

import torch

from clauses.dtypes import BF, F32, F64, I8, I16, I64, U8, H
from clauses.indexer_grad_kl_loss_calls import LENGTHS, PROTOTYPE, base, finish, formula
from clauses.table import INVALID, NULL, RUN_TIME, Page, clause, computes, forbids, refuses, repeats
from clauses.values import deeper, ends, fractal, gapped, longer, swapped, to, widened, zeros

BSND = {"axes": "BSND", "q": (3, 3), "kv": (70,)}
ROWS = ("key", "queryIndex", "keyIndex", "queryRope", "keyRope")
OUTPUTS = ("dQueryIndex", "dKeyIndex", "dWeights", "loss")
REQUIRED = ("query", "key", "queryIndex", "keyIndex", "weights", "sparseIndices", "softmaxMax", "softmaxSum", *OUTPUTS)

CLAUSES = (
    # ---------------------------------------------------------------------------------------------------------- dtypes
    clause(
        "dtypes",
        "query, key, queryIndex and keyIndex are FLOAT16 or BFLOAT16, of one dtype, and so are the rope parts.",
        *(computes(dtype=d, **over) for d in (H, BF) for over in ({}, BSND)),
        refuses(INVALID, "query", dtype=F32),
        refuses(INVALID, "query", dtype=F64),
        refuses(INVALID, "query key", query=to(F32)),
        *(refuses(INVALID, name, **{name: to(d)}) for name in ROWS for d in (F32, BF)),
        refuses(INVALID, "key", key=to(I8)),
    ),
    clause(
        "weights-dtype",
        "weights are FLOAT16 or BFLOAT16.",
        computes(weights_dtype=H),
        computes(dtype=BF, weights_dtype=BF),
        *(refuses(INVALID, "weights", weights_dtype=d) for d in (F32, F64, I8)),
        refuses(INVALID, "weights", dtype=BF, weights_dtype=F32),
    ),
    clause(
        "weights-other",
        "weights of the other of these dtypes than the rows are not taken.",
        refuses(INVALID, "weights", weights_dtype=BF),
        refuses(INVALID, "weights", dtype=BF, weights_dtype=H),
        ruling=28,
    ),
    clause(
        "indices-dtype",
        "sparseIndices are INT32.",
        computes(),
        *(refuses(INVALID, "sparseIndices", sparseIndices=to(d)) for d in (I16, U8, F32)),
    ),
    clause(
        "indices-int64",
        "INT64 sparseIndices, as other pages have them, are taken.",
        computes(sparseIndices=to(I64)),
        ruling=12,
    ),
    clause(
        "float32",
        "softmaxMax, softmaxSum and loss are FLOAT32.",
        *(refuses(INVALID, name, **{name: to(d)}) for name in ("softmaxMax", "softmaxSum", "loss") for d in (H, F64)),
    ),
    clause(
        "gradient-dtypes",
        "Gradients have the dtype of what they belong to.",
        *(refuses(INVALID, name, **{name: to(d)}) for name in OUTPUTS[:3] for d in (BF, F32)),
        *(refuses(INVALID, name, dtype=BF, **{name: to(H)}) for name in OUTPUTS[:3]),
    ),
    clause(
        "formats",
        "Tensors are ND.",
        *(refuses(INVALID, name, **{name: fractal}) for name in (*REQUIRED, "queryRope", "keyRope")),
    ),
    # ---------------------------------------------------------------------------------------------- what must be there
    clause(
        "null",
        "A null required tensor or output.",
        *(refuses(NULL, name, **{name: None}) for name in REQUIRED),
        *(refuses(NULL, name, **{name: None}, **BSND) for name in ("key", "weights", "loss")),
    ),
    clause(
        "layout-null",
        "layout is required.",
        refuses(NULL, "layout", layout=None),
        refuses(NULL, "layout", layout=None, **BSND),
    ),
    RUN_TIME,
    clause(
        "lengths-given",
        "TND needs both lengths.",
        *(refuses(NULL, name, **{name: None}) for name in LENGTHS),
        refuses(NULL, " ".join(LENGTHS), **dict.fromkeys(LENGTHS)),
    ),
    clause(
        "ropes",
        "queryRope and keyRope come together; without them the attention has no such part.",
        computes(rope=False),
        computes(rope=False, **BSND),
        refuses(NULL, "queryRope keyRope", queryRope=None),
        refuses(NULL, "queryRope keyRope", keyRope=None),
        computes(rope=False, queryRope=zeros(0, d=H), keyRope=zeros(0, d=H)),
        ruling=28,
    ),
    clause(
        "layouts",
        "layout is BSND or TND.",
        computes(),
        computes(**BSND),
        *(forbids("layout", layout=x) for x in ("BNSD", "BSH", "SBH", "tnd", "")),
        forbids("query", layout="BSND"),
        refuses(NULL, " ".join(LENGTHS), layout="TND", **BSND),
    ),
    # ---------------------------------------------------------------------------------------------------------- shapes
    clause(
        "ranks",
        "Every tensor has the axes of its layout.",
        *(forbids(name, **{name: deeper}) for name in (*REQUIRED, "queryRope", "keyRope")),
        *(forbids(name, **{name: deeper}, **BSND) for name in ("key", "weights", "softmaxMax")),
    ),
    clause(
        "shapes",
        "Shapes agree in T1, T2, N1, Nidx1, D, Dr and G; gradients have the shape of what they belong to.",
        *(forbids(f"{name} key keyIndex", **{name: longer}) for name in (*REQUIRED[1:8], "queryRope", "keyRope")),
        *(forbids(name, **{name: longer}) for name in OUTPUTS),
        *(forbids(name, **{name: widened}) for name in ("key", "keyIndex", "weights", "softmaxSum", *OUTPUTS)),
        forbids("softmaxMax softmaxSum", softmaxMax=widened),
        forbids("loss", loss=zeros()),
        *(forbids(name, **{name: longer}, **BSND) for name in ("keyIndex", "weights", "sparseIndices", "dKeyIndex")),
    ),
    clause(
        "heads",
        "N1 is 8, 16, 32, 64 or 128.",
        *(computes(N=n, count=20) for n in (8, 16, 32, 64, 128)),
        *(forbids("query", N=n) for n in (1, 4, 7, 24, 256)),
    ),
    clause(
        "index-heads",
        "Nidx1 is 8, 16, 32 or 64.",
        *(computes(Nidx=n, count=20) for n in (8, 16, 32, 64)),
        *(forbids("queryIndex", Nidx=n) for n in (1, 4, 7, 24, 128)),
        computes(N=64, Nidx=32, **BSND),
    ),
    clause(
        "one-key-head",
        "N2 and Nidx2 are 1.",
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
    ),
    clause(
        "dims",
        "D is 512, Drope 64, D of the indexer 128.",
        *(forbids("query", D=n) for n in (256, 511, 576)),
        *(forbids("queryRope keyRope", Dr=n) for n in (32, 65, 128)),
        *(forbids("queryIndex", Didx=n) for n in (64, 127, 129, 512)),
    ),
    clause(
        "count",
        "sparseIndices has topk = 2048 entries per row.",
        *(forbids("sparseIndices", K=n) for n in (1, 64, 1024, 2047, 4096, 8193)),
        computes(q=(2,), kv=(2100,), count=2048),
    ),
    clause(
        "batch",
        "B is 1 to 256.",
        computes(q=ends(256), kv=ends(256)),
        forbids("query actualSeqLengthsQuery", q=ends(257), kv=ends(257)),
        forbids("query", axes="BSND", q=(1,) * 257, kv=(1,)),
    ),
    clause(
        "tokens",
        "S1 and S2 are 1 to 128K.",
        forbids(
            "key query actualSeqLengthsKey",
            q=(1,),
            kv=(1,),
            actualSeqLengthsKey=[131073],
            dKeyIndex=lambda old: old.new_empty(131073, 1, 128),
            **{name: lambda old: old.expand(131073, 1, old.shape[-1]) for name in ("key", "keyIndex", "keyRope")},
        ),
        forbids(
            "key query",
            axes="BSND",
            q=(1,),
            kv=(1,),
            dKeyIndex=lambda old: old.new_empty(1, 131073, 1, 128),
            **{name: lambda old: old.expand(1, 131073, 1, old.shape[-1]) for name in ("key", "keyIndex", "keyRope")},
        ),
    ),
    clause(
        "unequal",
        "S1 and S2 may differ: more keys than rows.",
        computes(q=(1,), kv=(90,)),
        computes(q=(1, 8), kv=(33, 40)),
        computes(axes="BSND", q=(2, 2), kv=(90,)),
        computes(q=(7,), kv=(7,)),
    ),
    clause(
        "unequal-rows",
        "More rows than keys, which the page allows, is refused as the chip's host code does.",
        forbids("query actualSeqLengthsQuery", q=(5,), kv=(3,)),
        forbids("query", axes="BSND", q=(5, 5), kv=(3,)),
        ruling=28,
    ),
    # ------------------------------------------------------------------------------------------------------- attributes
    clause(
        "modes",
        "sparseMode is 3, causal from the lower right corner.",
        computes(),
        computes(q=(9,), kv=(9,), count=9),
        *(forbids("sparseMode", sparseMode=n) for n in (0, 1, 2, 4, 5, 6, 7, 8, 9, -1)),
    ),
    clause(
        "window",
        "pre_tokens and next_tokens act in no mode that is offered.",
        *(computes(**{name: n}) for name in ("pre_tokens", "next_tokens") for n in (65536, 2**31 - 1, 2**63 - 1, 0)),
        ruling=20,
    ),
    clause(
        "deterministic",
        "deterministic has no effect; results repeat.",
        repeats(deterministic=False),
        repeats(deterministic=True, **BSND),
    ),
    clause(
        "lengths",
        "In TND lengths, of each sequence by the letter, are inclusive ends, one per item, up to T1 and T2.",
        computes(q=(2, 2, 5), kv=(10, 20, 60)),
        forbids("actualSeqLengthsQuery", actualSeqLengthsQuery=[3, 6]),
        forbids("actualSeqLengthsKey", actualSeqLengthsKey=[70, 161]),
        forbids("actualSeqLengthsQuery", actualSeqLengthsQuery=[5, 3]),
        forbids("actualSeqLengthsKey", actualSeqLengthsKey=[160, 70]),
        *(forbids(" ".join(LENGTHS), **{name: n}) for name, n in zip(LENGTHS, ([5], [70, 100, 160]), strict=True)),
        ruling=28,
    ),
    clause(
        "lengths-end",
        "The ends add up to T1 and T2: none stops before its tensor does, as lengths per item would.",
        forbids("actualSeqLengthsQuery", actualSeqLengthsQuery=[3, 4]),
        forbids("actualSeqLengthsQuery", actualSeqLengthsQuery=[2, 3]),
        forbids("actualSeqLengthsKey", actualSeqLengthsKey=[70, 90], count=0),
    ),
    clause(
        "lengths-bsnd",
        "In BSND they are the valid tokens of every item.",
        computes(tokens=((2, 1), (60, 3)), **BSND),
        computes(tokens=((3, 3), (70, 70)), **BSND),
        *(forbids(name, **{name: n}, **BSND) for name in LENGTHS for n in ([3], [3, 71], [-1, 3])),
    ),
    # --------------------------------------------------------------------------------------------------------- numbers
    clause(
        "formulas",
        "I = W ReLU(q K^T), loss = sum KL(p, softmax(I)), dI = softmax(I) - p, dW, dq and dK by the chain rule.",
        *(computes(q=(20, 45), kv=(90, 200), dtype=d, rope=rope) for d in (H, BF) for rope in (True, False)),
        *(computes(peak=n) for n in (0.0, 0.005, 0.05, 0.08)),
        *(computes(scaleValue=n) for n in (0.0, 1 / 24, 0.1, -0.04)),
        *(computes(count=n) for n in (0, 1, 2, 2048)),
        computes(weights=lambda old: -old),
        computes(count=2048, **BSND),
    ),
    clause(
        "normalised",
        "p is L1-normalised by the text, divided by N1 here: the same where the statistics are of the listed keys.",
        computes(),
        computes(softmaxMax=zeros(1, 5, 8), softmaxSum=lambda old: old * 40),
        computes(softmaxMax=zeros(2, 1, 3, 8), softmaxSum=lambda old: old * 7, **BSND),
        ruling=14,
    ),
    clause(
        "indices",
        "sparseIndices names keys of the row's own sequence.",
        *(
            forbids("sparseIndices", sparseIndices=lambda old, n=n: old.index_fill(-1, torch.tensor(0), n))
            for n in (160, 90, -2, 2**30)
        ),
    ),
    clause(
        "empty-query",
        "Without query rows it returns at once.",
        computes(q=(0,), kv=(20,)),
        computes(axes="BSND", q=(0, 0), kv=(20,)),
        ruling=24,
    ),
    clause(
        "strides",
        "Every tensor may be non-contiguous.",
        *(computes(**{name: gapped}) for name in (*REQUIRED[:6], "queryRope", "keyRope", *OUTPUTS[:3])),
        *(computes(**{name: swapped}) for name in ("query", "queryIndex", "dQueryIndex")),
        computes(queryIndex=gapped, **BSND),
    ),
)

PAGE = Page("aclnnSparseLightningIndexerGradKLLoss", PROTOTYPE, base, formula, CLAUSES, finish)
