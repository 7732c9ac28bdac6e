"""The page of aclnnSparseFlashAttentionGrad, clause by clause: the edition whose lists have 2048 entries."""

import torch

from clauses.dtypes import BF, F32, F64, I8, I16, I32, I64, U8, H
from clauses.sparse_flash_attention_grad_calls import LENGTHS, PROTOTYPE, base, finish, formula
from clauses.table import INVALID, NULL, RUN_TIME, Page, clause, computes, forbids, refuses, repeats
from clauses.values import deeper, drawn, ends, fractal, gapped, ints, longer, swapped, to, widened, zeros

BSND = {"layout": "BSND", "q": (3, 3), "kv": (70,)}
ROWS = ("key", "value", "dOut", "out", "queryRopeOptional", "keyRopeOptional")
OUTPUTS = ("dQueryOut", "dKeyOut", "dValueOut")
ROPE_OUTPUTS = ("dQueryRopeOutOptional", "dKeyRopeOutOptional")
NO_ROPE = {"queryRopeOptional": None, "keyRopeOptional": None}
REQUIRED = ("query", "key", "value", "sparseIndices", "dOut", "out", "softmaxMax", "softmaxSum", *OUTPUTS)


CLAUSES = (
    # ---------------------------------------------------------------------------------------------------------- dtypes
    clause(
        "dtypes",
        "Rows and their gradients are FLOAT16 or BFLOAT16, all of one dtype.",
        *(computes(dtype=d, rope=rope) for d in (H, BF) for rope in (True, False)),
        *(computes(dtype=d, **BSND) for d in (H, BF)),
        refuses(INVALID, "query", dtype=F32),
        refuses(INVALID, "query", dtype=F64),
        refuses(INVALID, "query key", query=to(F32)),
        *(refuses(INVALID, name, **{name: to(d)}) for name in ROWS for d in (F32, BF)),
        *(refuses(INVALID, name, **{name: to(d)}) for name in (*OUTPUTS, *ROPE_OUTPUTS) for d in (F32, BF)),
        refuses(INVALID, "key", key=to(I8)),
        refuses(INVALID, "value", value=to(F64)),
    ),
    clause(
        "indices-dtype",
        "sparseIndices is INT64 in the table and INT32 in the example: both are taken.",
        *(computes(sparseIndices=to(d)) for d in (I32, I64)),
        *(computes(sparseIndices=to(d), **BSND) for d in (I32, I64)),
        *(refuses(INVALID, "sparseIndices", sparseIndices=to(d)) for d in (I16, U8, F32)),
        ruling=12,
    ),
    clause(
        "lengths-dtype",
        "actualSeqLengthsQueryOptional and actualSeqLengthskvOptional are INT32, INT64 in the example: both are taken.",
        *(computes(**{name: to(d) for name in LENGTHS}) for d in (I32, I64)),
        *(refuses(INVALID, name, **{name: to(d)}) for name in LENGTHS for d in (F32, I16, I8)),
        ruling=28,
    ),
    clause(
        "statistics-dtype",
        "softmaxMax and softmaxSum are FLOAT32.",
        *(refuses(INVALID, name, **{name: to(d)}) for name in ("softmaxMax", "softmaxSum") for d in (H, F64)),
    ),
    clause(
        "formats",
        "Tensors are ND.",
        *(
            refuses(INVALID, name, **{name: fractal})
            for name in (*REQUIRED, "queryRopeOptional", "keyRopeOptional", *ROPE_OUTPUTS, *LENGTHS)
        ),
    ),
    # ---------------------------------------------------------------------------------------------- what must be there
    clause(
        "null",
        "A null required tensor, value and its gradient among them.",
        *(refuses(NULL, name, **{name: None}) for name in REQUIRED),
        refuses(NULL, "value", value=None, dValueOut=None),
    ),
    RUN_TIME,
    clause(
        "lengths-given",
        "TND needs both lengths.",
        *(refuses(NULL, name, **{name: None}) for name in LENGTHS),
        refuses(NULL, " ".join(LENGTHS), **dict.fromkeys(LENGTHS)),
    ),
    clause(
        "lengths-bsnd",
        "BSND needs no lengths; given, they are the valid tokens of every item.",
        computes(lengths=False, **BSND),
        computes(**BSND),
        computes(tokens=((2, 1), (60, 3)), **BSND),
        computes(tokens=((3, 0), (2, 70)), mode=0, **BSND),
        computes(**{name: zeros(0, d=I32) for name in LENGTHS}, **BSND),
        computes(actualSeqLengthsQueryOptional=None, **BSND),
        *(forbids(name, **{name: ints(*n)}, **BSND) for name in LENGTHS for n in ((3,), (3, 71), (-1, 3))),
    ),
    clause(
        "ropes",
        "Both rope parts or none; their gradients exactly with them.",
        computes(rope=False),
        computes(rope=False, **BSND),
        refuses(NULL, "queryRopeOptional keyRopeOptional", queryRopeOptional=None),
        refuses(NULL, "queryRopeOptional keyRopeOptional", keyRopeOptional=None),
        *(refuses(NULL, name, **{name: None}) for name in ROPE_OUTPUTS),
        forbids(" ".join(ROPE_OUTPUTS), **NO_ROPE),
        computes(rope=False, dQueryRopeOutOptional=zeros(0, d=H), dKeyRopeOutOptional=zeros(0, d=H)),
    ),
    clause(
        "layouts",
        "layoutOptional is BSND or TND; null is BSND.",
        computes(),
        computes(**BSND),
        computes(layoutOptional=None, **BSND),
        *(forbids("layoutOptional", layoutOptional=x) for x in ("BNSD", "BSH", "SBH", "tnd", "")),
        forbids("query", layoutOptional="BSND"),
        forbids("query", layoutOptional="TND", **BSND),
    ),
    # ---------------------------------------------------------------------------------------------------------- shapes
    clause(
        "ranks",
        "query, key, value, sparseIndices, dOut, out, softmaxMax and softmaxSum have as many axes as each other.",
        *(forbids(name, **{name: deeper}) for name in REQUIRED[1:]),
        forbids("query", query=deeper),
    ),
    clause(
        "shapes",
        "Shapes agree in T1, T2, N1, D, Dr and G; gradients have the shape of what they belong to.",
        *(forbids(f"{name} key", **{name: longer}) for name in REQUIRED[2:]),
        *(forbids(name, **{name: longer}) for name in ("queryRopeOptional", "keyRopeOptional", *ROPE_OUTPUTS)),
        *(forbids(name, **{name: widened}) for name in ("dOut", "out", "softmaxSum", *OUTPUTS)),
        forbids("value dOut", value=widened),
        forbids("softmaxMax softmaxSum", softmaxMax=widened),
        *(forbids(name, **{name: widened}) for name in ROPE_OUTPUTS),
        *(forbids(name, **{name: widened}, **BSND) for name in ("softmaxSum", "dOut", "dKeyOut")),
        *(forbids(name, **{name: longer}, **BSND) for name in ("key", "value", "sparseIndices", "softmaxSum")),
    ),
    clause(
        "heads",
        "N1 is 1, 2, 4, 8, 16, 32, 64 or 128.",
        *(computes(N=n, count=20) for n in (1, 2, 4, 8, 16, 32, 64, 128)),
        *(forbids("query", N=n) for n in (3, 5, 24, 256)),
    ),
    clause(
        "one-key-head",
        "N2 is 1.",
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
    ),
    clause(
        "dims",
        "D is 512, Dr 64.",
        *(forbids("query", D=n) for n in (256, 511, 513, 128)),
        *(forbids("queryRopeOptional keyRopeOptional", Dr=n) for n in (32, 65, 128)),
        forbids("keyRopeOptional queryRopeOptional", keyRopeOptional=widened),
    ),
    clause(
        "count",
        "sparseIndices has K = 2048 entries per row.",
        *(forbids("sparseIndices", sparseIndices=zeros(5, 1, n, d=I32)) for n in (1, 64, 1024, 2047, 4096)),
        computes(q=(2,), kv=(2100,), N=2, count=2048),
    ),
    clause(
        "batch",
        "B is 1 to 256.",
        computes(q=ends(256), kv=ends(256), N=1),
        forbids("query actualSeqLengthsQueryOptional", q=ends(257), kv=ends(257), N=1),
        forbids("query", layout="BSND", q=(1,) * 257, kv=(1,), N=1),
    ),
    clause(
        "tokens",
        "S1 and S2 are 1 to 128K.",
        *(
            forbids(
                "key query actualSeqLengthskvOptional",
                q=(1,),
                kv=(1,),
                N=1,
                key=lambda old: old.expand(131073, 1, 512),
                value=lambda old: old.expand(131073, 1, 512),
                keyRopeOptional=lambda old: old.expand(131073, 1, 64),
                actualSeqLengthskvOptional=ints(131073),
                dKeyOut=lambda old: old.new_empty(131073, 1, 512),
                dValueOut=lambda old: old.new_empty(131073, 1, 512),
                dKeyRopeOutOptional=lambda old: old.new_empty(131073, 1, 64),
                sparseMode=mode,
            )
            for mode in (0, 3)
        ),
        forbids(
            "query actualSeqLengthsQueryOptional",
            q=(1,),
            kv=(1,),
            N=1,
            sparseIndices=lambda old: old.expand(131073, 1, 2048),
            actualSeqLengthsQueryOptional=ints(131073),
            **{name: lambda old: old.expand(131073, 1, 512) for name in ("query", "dOut", "out")},
            queryRopeOptional=lambda old: old.expand(131073, 1, 64),
            dQueryOut=lambda old: old.new_empty(131073, 1, 512),
            dQueryRopeOutOptional=lambda old: old.new_empty(131073, 1, 64),
            **{name: lambda old: old.expand(1, 131073, 1) for name in ("softmaxMax", "softmaxSum")},
        ),
    ),
    clause(
        "unequal",
        "S1 and S2 may differ, either way.",
        *(computes(q=(7,), kv=(3,), mode=mode) for mode in (0, 3)),
        *(computes(q=(1,), kv=(90,), mode=mode) for mode in (0, 3)),
        computes(layout="BSND", q=(7, 7), kv=(3,)),
    ),
    # ------------------------------------------------------------------------------------------------------- attributes
    clause(
        "blocks",
        "sparseBlockSize is 1, 8, 16, 32 or 64; blocks end with the keys that a row sees.",
        *(computes(block=n, mode=mode, count=3) for n in (1, 8, 16, 32, 64) for mode in (0, 3)),
        *(computes(block=n, count=2, **BSND) for n in (8, 64)),
        *(forbids("sparseBlockSize", sparseBlockSize=n) for n in (0, 2, 4, 24, 65, 128, -1)),
    ),
    clause(
        "modes",
        "sparseMode is 0, no mask, or 3, causal from the lower right corner.",
        *(computes(mode=mode, **over) for mode in (0, 3) for over in ({}, BSND, {"rope": False})),
        *(forbids("sparseMode", sparseMode=n) for n in (1, 2, 4, 5, 6, 7, 8, 9, -1)),
    ),
    clause(
        "window",
        "preTokens and nextTokens take 2147483647 alone, and act in mode 4 alone, which is not offered.",
        *(forbids(name, **{name: n}) for name in ("preTokens", "nextTokens") for n in (65536, 0, -1)),
    ),
    clause(
        "window-int64",
        "The largest INT64, which torch_npu passes by default, stands for 2147483647.",
        *(computes(**{name: 2**63 - 1}) for name in ("preTokens", "nextTokens")),
        ruling=20,
    ),
    clause(
        "deterministic",
        "deterministic is a bool; results repeat with either.",
        repeats(deterministic=False),
        repeats(deterministic=True, **BSND),
    ),
    clause(
        "lengths",
        "In TND lengths, of each sequence by the letter, are inclusive ends, one per item, up to T1 and T2.",
        computes(q=(2, 2, 5), kv=(10, 20, 60)),
        computes(q=(2, 5), kv=(0, 60)),
        forbids("actualSeqLengthsQueryOptional", actualSeqLengthsQueryOptional=ints(3, 6)),
        forbids("actualSeqLengthskvOptional", actualSeqLengthskvOptional=ints(70, 161)),
        forbids("actualSeqLengthsQueryOptional", actualSeqLengthsQueryOptional=ints(5, 3)),
        forbids("actualSeqLengthskvOptional", actualSeqLengthskvOptional=ints(160, 70)),
        forbids(" ".join(LENGTHS), actualSeqLengthsQueryOptional=ints(5)),
        forbids(" ".join(LENGTHS), actualSeqLengthskvOptional=ints(70, 100, 160)),
        ruling=28,
    ),
    clause(
        "lengths-end",
        "The ends add up to T1 and T2: none stops before its tensor does, as lengths per item would.",
        forbids("actualSeqLengthsQueryOptional", actualSeqLengthsQueryOptional=ints(2, 3)),
        forbids("actualSeqLengthskvOptional", actualSeqLengthskvOptional=ints(70, 90), count=0),
    ),
    # --------------------------------------------------------------------------------------------------------- numbers
    clause(
        "formulas",
        "dV = P^T dO, dS = P * (dO V^T - FlashSoftmaxGrad(dO, O)), dQ = dS K and dK = dS^T Q, scaled once.",
        *(computes(q=(20, 45), kv=(90, 200), dtype=d, N=8, rope=rope) for d in (H, BF) for rope in (True, False)),
        *(computes(scaleValue=s) for s in (0.0, 1 / 24, 0.2, -0.04)),
        *(computes(mode=mode, count=2048, **over) for mode in (0, 3) for over in ({}, BSND)),
        computes(value=lambda old: old * 3),
        computes(count=1),
        computes(count=0),
    ),
    clause(
        "value-is-key",
        "value may hold what key holds; each has its own gradient.",
        computes(q=(5,), kv=(60,), value=drawn(60, 1, 512, d=H)),
    ),
    clause(
        "indices",
        "sparseIndices names blocks of the row's own sequence.",
        *(
            forbids("sparseIndices", sparseIndices=lambda old, n=n: old.index_fill(-1, torch.tensor(0), n))
            for n in (160, 90, -2, 2**30)
        ),
        forbids("sparseIndices", block=16, sparseIndices=lambda old: old.index_fill(-1, torch.tensor(0), 10)),
    ),
    clause(
        "empty-query",
        "Without query rows it returns at once.",
        computes(q=(0,), kv=(20,)),
        computes(layout="BSND", q=(0, 0), kv=(20,)),
        ruling=24,
    ),
    clause(
        "strides",
        "Every tensor may be non-contiguous.",
        *(computes(**{name: gapped}) for name in ("query", "key", "value", "dOut", "out", *OUTPUTS, *ROPE_OUTPUTS)),
        *(computes(**{name: swapped}) for name in ("query", "queryRopeOptional", "dQueryOut", "dOut")),
        computes(sparseIndices=gapped),
        computes(sparseIndices=gapped, **BSND),
    ),
)

PAGE = Page("aclnnSparseFlashAttentionGrad", PROTOTYPE, base, formula, CLAUSES, finish)
