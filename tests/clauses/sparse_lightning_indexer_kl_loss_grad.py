"""Table of the page of aclnnSparseLightningIndexerKLLossGrad."""

from collections.abc import Sequence

import torch

from clauses.checks import INVALID, NULL, Args, Page, computes, filled, forbids, merged, prototype, refuses, repeats
from clauses.compressed_key_helpers import ends_of, has_bound, lists_of, rows_of
from clauses.derived import of_parameters
from clauses.dtype_abbreviations import BF, F32, F64, I32, I64, H
from clauses.error_bounds import Near, near, softmax
from clauses.values import draw, drawn, ints, longer, swapped, to, widened

PROTOTYPE = prototype("""
    aclTensor q k w sparseIndices attnSoftmaxL1Norm cuSeqLensQOptional cuSeqLensKOptional seqUsedQOptional
    aclTensor seqUsedKOptional cmpResidualKOptional metadataOptional
    char      layoutQ layoutK
    int64_t   maskMode cmpRatio
    aclTensor dq dk dw softmaxOut
""")
ENDS = ("cuSeqLensQOptional", "cuSeqLensKOptional")
USED = ("seqUsedQOptional", "seqUsedKOptional")
RESIDUAL = "cmpResidualKOptional"


def base(
    layout: str = "TND",
    rows: Sequence[int] = (7, 5),
    keys: Sequence[int] = (3, 2),
    N: int = 8,
    D: int = 128,
    K: int = 512,
    ratio: int = 4,
    residual: Sequence[int] = (1, 0),
    mode: int = 3,
    dtype: torch.dtype = H,
    mass: float = 0.6,
) -> Args:
    """Makes a legal call of the loss over lists of up to three keys.

    Args:
        rows, keys: number of rows and of keys of every sequence; BSND: equal numbers.
        K: entries of a list.
        ratio: tokens per key; residual: tokens after the last full group, unless ratio is 1 or mode is 0.
        mass: sum of every row's target over the entries of its list.
    """
    packed, total = layout == "TND", sum(rows)

    def shaped(t: torch.Tensor) -> torch.Tensor:
        return t if packed else t.unflatten(0, (len(rows), -1))

    q, k = shaped(draw(total, N, D, d=dtype)), shaped(draw(sum(keys), 1, D, d=dtype))
    lists = lists_of(rows, keys, K, ratio, residual, mode)
    target = draw(total, 1, K).masked_fill(lists < 0, -torch.inf).softmax(-1).nan_to_num(0) * mass
    return filled(
        PROTOTYPE,
        q=q,
        k=k,
        w=shaped(draw(total, N) * 0.02),
        sparseIndices=shaped(lists),
        attnSoftmaxL1Norm=shaped(target),
        **(ends_of(ENDS, rows, keys) if packed else {}),
        cmpResidualKOptional=torch.tensor(residual, dtype=I32) if has_bound(ratio, mode) else None,
        layoutQ=layout,
        layoutK=layout,
        maskMode=mode,
        cmpRatio=ratio,
        dq=torch.empty_like(q),
        dk=torch.empty_like(k),
        dw=shaped(torch.empty(total, N)),
        softmaxOut=torch.empty_like(shaped(target), dtype=F32),
    )


def formula(args: Args) -> dict[str, Near]:
    """y = softmax(I) over the entries that a row reads, dI = y * sum(p) - p, and the gradients from dI."""
    q, k = (t if t.dim() == 3 else t.flatten(0, 1) for t in (args["q"], args["k"]))
    w, dtype = args["w"].flatten(0, -2), q.dtype
    lists, target = (args[name].flatten(0, -3)[:, 0] for name in ("sparseIndices", "attnSoftmaxL1Norm"))
    d_q, d_k, d_w, out = (near(torch.zeros(t.shape)) for t in (q, k[:, 0], w, target))
    for _, at, key, visible in rows_of(args, ENDS, USED, RESIDUAL):
        row = slice(at, at + 1)
        entries = lists[at, :visible].tolist()
        entries = entries[: entries.index(-1)] if -1 in entries else entries
        slots = [n for n, entry in enumerate(entries) if entry < visible]
        if not slots:
            continue
        chosen = torch.tensor([key + entries[n] for n in slots])
        listed, query, weight = near(k[chosen, 0]), near(q[at]), near(w[at])[:, None]
        products = query @ listed.T
        y = softmax((weight * products.relu()).sum(0), torch.ones(1, len(slots), dtype=torch.bool))[0]
        p = near(target[row][:, slots])
        d_i = y * p.sum(1) - p
        d_s = (d_i * weight * products.step()).rounded(dtype)
        d_q.prepare(row, (d_s @ listed).reshape((1, *q.shape[1:])))
        d_w.prepare(row, (d_i * products.relu()).sum(1).reshape((1, -1)))
        d_k = d_k + near(torch.eye(len(k))[:, chosen]) @ (d_s.T @ query)
        out.prepare(row, y @ near(torch.eye(target.shape[1])[slots]))
    results = {"dq": d_q, "dk": d_k, "dw": d_w, "softmaxOut": out}
    return {name: x.rounded(args[name].dtype).reshape(tuple(args[name].shape)) for name, x in results.items()}


BSND = {"layout": "BSND", "rows": (6, 6), "keys": (2, 2), "residual": (0, 3)}
NEEDED = ("q", "k", "w", "sparseIndices", "attnSoftmaxL1Norm", "dq", "dk", "dw", "softmaxOut")
SINGLES = ("w", "attnSoftmaxL1Norm", "dw", "softmaxOut")

STATEMENTS = {
    "q and k are FLOAT16 or BFLOAT16, of one dtype, and so are their gradients.": [
        computes(),
        computes(dtype=BF, **BSND),
        *(refuses(INVALID, "q", dtype=d) for d in (F32, F64)),
        *(refuses(INVALID, name, **{name: to(d)}) for name in ("k", "dq", "dk") for d in (F32, BF)),
    ],
    "Lists and lengths are INT32; INT64 is taken too (ruling 12).": [
        computes(sparseIndices=to(I64)),
        computes(**dict.fromkeys((RESIDUAL, *ENDS), to(I64))),
    ],
    "Ends of packed sequences and residuals of compressed keys are required.": [
        *(refuses(NULL, name, **{name: None}) for name in (*ENDS, RESIDUAL)),
    ],
    "metadataOptional of any content changes nothing.": [
        computes(metadataOptional=ints(*range(-5, 5), d=I32)),
        computes(metadataOptional=drawn(64)),
    ],
    "maskMode is 0 (all keys) or 3 (causal).": [
        *(computes(mode=0, ratio=n, **over) for n, over in ((1, {}), (4, BSND))),
        *(forbids("maskMode", ratio=1, maskMode=n) for n in (1, 2, 4, -1)),
    ],
    "cmpRatio is the tokens of a key, 1 to 128.": [
        *(computes(ratio=n, residual=(n - 1, 0)) for n in (2, 128)),
        computes(ratio=1, rows=(3, 2)),
        computes(ratio=1, **{**BSND, "rows": (2, 2)}),
        *(forbids("cmpRatio", ratio=1, cmpRatio=n) for n in (0, -4)),
        forbids("cmpRatio", ratio=129),
    ],
    "cmpResidualKOptional is from 0 to cmpRatio - 1; without compressed keys there is none (ruling 45).": [
        *(computes(residual=n) for n in ((0, 3), (2, 1))),
        *(forbids(RESIDUAL, **{RESIDUAL: ints(*n, d=I32)}) for n in ((4, 2), (-1, 2), (1,), (1, 2, 0))),
        *(refuses(NULL, RESIDUAL, ratio=n, mode=m, **{RESIDUAL: ints(0, 0, d=I32)}) for n, m in ((1, 3), (4, 0))),
    ],
    "layoutQ is BSND or TND, and layoutK the same.": [
        *(refuses(NULL, name, **{name: ints(0, 6, 12, d=I32)}, **BSND) for name in ENDS),
    ],
    "Shapes agree in T1, T2, N1, D and K.": [
        *(forbids(name, **{name: widened}) for name in ("k", "w", "dq", "dk", "dw", "softmaxOut")),
        forbids("softmaxOut", attnSoftmaxL1Norm=widened),
        *(forbids(name, **{name: longer}) for name in ("w", "sparseIndices", "attnSoftmaxL1Norm", "dw", "softmaxOut")),
    ],
    "N1 is 1 to 128.": [*(computes(N=n, rows=(1, 2)) for n in (1, 64, 128)), forbids("q", N=129)],
    "D is 128.": [*(forbids("q", D=n) for n in (64, 127, 256))],
    "K is 512, 1024, 2048, 4096 or 8192.": [
        *(computes(K=n) for n in (1024, 2048)),
        *(forbids("sparseIndices", K=n) for n in (1, 256, 513)),
    ],
    "Ends begin with 0, never fall, and end with the tokens of their tensor.": [
        computes(rows=(0, 5), keys=(3, 2)),
        computes(rows=(7, 0, 2), keys=(3, 0, 1), residual=(1, 0, 2)),
        *(forbids(name, **{name: ints(*n, d=I32)}) for name in ENDS for n in ((1, 3, 12), (0, 99, 5), (0, 3))),
    ],
    "seqUsed are lengths; the rows behind them are padding, whose results are 0.": [
        computes(seqUsedQOptional=ints(4, 0, d=I32)),
        computes(seqUsedQOptional=ints(4, 5, d=I32)),
        computes(
            seqUsedQOptional=ints(5, 3, d=I32), seqUsedKOptional=ints(2, 2, d=I32), sparseIndices=torch.zeros_like
        ),
        computes(seqUsedQOptional=ints(5, 1, d=I32), **BSND),
        computes(seqUsedKOptional=ints(2, 1, d=I32), sparseIndices=torch.zeros_like, **BSND),
        *(forbids(name, **{name: ints(*n, d=I32)}) for name in USED for n in ((1, 99), (-1, 2), (1,))),
        *(forbids(name, **{name: ints(*n, d=I32)}, **BSND) for name in USED for n in ((1, 99), (-1, 2), (1, 1, 1))),
    ],
    "dI = y * sum p - p, with p as it is given (ruling 45).": [
        *(computes(mass=m, **over) for m, over in ((0.0, {}), (1.0, BSND), (2.0, {}))),
        computes(rows=(20, 30), keys=(5, 8), residual=(2, 3), N=16),
    ],
    "A row that sees no key has zeros (ruling 45).": [
        computes(rows=(30, 5), keys=(3, 2)),
        computes(keys=(0, 2), residual=(3, 0)),
    ],
    "A list ends at its first -1; a row reads as many slots as it sees keys, and none of a later key (ruling 45).": [
        computes(sparseIndices=lambda old: torch.full_like(old, -1)),
        computes(sparseIndices=torch.zeros_like),  # one key again and again
        computes(sparseIndices=torch.ones_like),  # past the bound of the first rows
        forbids("sparseIndices", sparseIndices=lambda old: old.flip(-1)),  # holes
        *(
            forbids("sparseIndices", sparseIndices=lambda old, n=n: old.index_fill(-1, torch.tensor(0), n))
            for n in (3, -2, 2**30)
        ),
    ],
    "Rows may be transposed.": [computes(q=swapped, dq=swapped)],
    "Padded results are the same bits again.": [repeats(**BSND)],
}
CLAUSES = merged(
    of_parameters(
        " ".join(NEEDED),
        "q k dq dk",
        " ".join(SINGLES),
        " ".join(("sparseIndices", *ENDS)),
        {"layoutQ": ("BNSD", "SBH", "tnd"), "layoutK": ("BSND", "PA_BBND", "")},
        " ".join(NEEDED),
    ),
    STATEMENTS,
)

PAGE = Page("aclnnSparseLightningIndexerKLLossGrad", PROTOTYPE, base, formula, CLAUSES)
