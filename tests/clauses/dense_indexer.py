"""Tables of the pages of aclnnDenseLightningIndexerKLLossGrad and aclnnDenseLightningIndexerSoftmaxLseV2, derived from
the table of the loss over lists.
"""

from collections.abc import Iterator
from functools import wraps
from typing import Any

import torch

from clauses import sparse_lightning_indexer_kl_loss_grad as lists
from clauses.checks import INVALID, NULL, Args, Check, Page, computes, filled, forbids, merged, prototype, refuses
from clauses.compressed_key_helpers import rows_of, sequences
from clauses.derived import of_page
from clauses.dtype_abbreviations import BF, F32, F64, I32, H
from clauses.error_bounds import Near, near, softmax
from clauses.sparse_lightning_indexer_kl_loss_grad import BSND, ENDS, RESIDUAL, USED
from clauses.values import deeper, draw, drawn, fractal, gapped, ints, longer, to, widened, zeros

GRAD = prototype("""
    aclTensor q k w attnSoftmaxL1Norm softmaxLse cuSeqLensQOptional cuSeqLensKOptional seqUsedQOptional
    aclTensor seqUsedKOptional cmpResidualKOptional metadataOptional
    char      layoutQ layoutK
    int64_t   maskMode cmpRatio
    aclTensor dq dk dw softmaxOut
""")
LSE = prototype("""
    aclTensor queryIndex keyIndex weight cuSeqLensQOptional cuSeqLensKOptional seqUsedQOptional seqUsedKOptional
    aclTensor cmpResidualKOptional metadataOptional
    char      layoutQ layoutK
    int64_t   maskMode cmpRatio
    aclTensor softmaxLse
""")
NAMES = {"q": "queryIndex", "k": "keyIndex", "w": "weight"}


@wraps(lists.base)
def base(**over: Any) -> Args:
    """Makes a legal call of the loss with a target for every key; packed targets have one column more than needed."""
    args = lists.base(**over)
    q, k = args["q"], args["k"]
    packed = q.dim() == 3
    columns = 1 + max(n for _, n in sequences(args, "k", ENDS[1], USED[1])) if packed else k.shape[1]
    target = draw(*q.shape[:-2], 1, columns).softmax(-1)  # Not zero where rows see no key either.
    given = {p.name: args[p.name] for p in GRAD if p.name in args}
    return filled(GRAD, **given | {
        "attnSoftmaxL1Norm": target,
        "softmaxLse": torch.zeros((1, len(q)) if packed else (len(q), 1, q.shape[1])),
        "softmaxOut": torch.empty_like(target),
    })  # fmt: skip


@wraps(lists.base)
def lse_base(**over: Any) -> Args:
    """Makes a legal call of the operator of statistics with the same rows and keys."""
    args = base(**over)
    args |= {new: args[name] for name, new in NAMES.items()}
    return filled(LSE, **{p.name: args[p.name] for p in LSE})


def finish(args: Args, changed: frozenset[str]) -> None:
    """Sets softmaxLse to the result of the operator of statistics."""
    if "softmaxLse" not in changed:
        args["softmaxLse"] = lse(args)["softmaxLse"].value.float()


def scores(args: Args) -> Iterator[tuple[int, slice, Near, Near]]:
    """Yields (row, slice of its keys, q k^T by head, I) of every row that sees a key."""
    q, k = (t if t.dim() == 3 else t.flatten(0, 1) for t in (args["q"], args["k"]))
    w = args["w"].flatten(0, -2)
    for _, row, key, visible in rows_of(args, ENDS, USED, RESIDUAL):
        if visible:
            products = near(q[row]) @ near(k[key : key + visible, 0]).T
            score = (near(w[row])[:, None] * products.relu()).sum(0)
            yield row, slice(key, key + visible), products, score


def lse(args: Args) -> dict[str, Near]:
    """Computes log(sum(exp(I))) over the visible keys of a row; -inf without visible keys."""
    result = near(torch.full((args["w"].shape[:-1].numel(), 1), -torch.inf))
    for row, _, _, score in scores(args):
        _, top, total = softmax(score, torch.ones_like(score.value, dtype=torch.bool))
        result.prepare(slice(row, row + 1), top + total.log())
    return {"softmaxLse": result.rounded(F32).reshape(tuple(args["softmaxLse"].shape))}


def lse_formula(args: Args) -> dict[str, Near]:
    """Computes lse() of arguments with the names of this page."""
    return lse(args | {name: args[new] for name, new in NAMES.items()})


def formula(args: Args) -> dict[str, Near]:
    """y = exp(I - softmaxLse), dI = y - p, and the gradients from it."""
    q, k = (t if t.dim() == 3 else t.flatten(0, 1) for t in (args["q"], args["k"]))
    w, target, saved = args["w"].flatten(0, -2), args["attnSoftmaxL1Norm"].flatten(0, -3)[:, 0], args["softmaxLse"]
    d_q, d_k, d_w, out = (near(torch.zeros(t.shape)) for t in (q, k[:, 0], w, target))
    for row, its_keys, products, score in scores(args):
        at, visible = slice(row, row + 1), its_keys.stop - its_keys.start
        y = (score - near(saved.flatten()[row])).exp()
        d_i = y - near(target[at, :visible])
        d_s = (d_i * near(w[row])[:, None] * products.step()).rounded(q.dtype)
        d_q.prepare(at, d_s @ near(k[its_keys, 0]))
        d_w.prepare(at, (d_i * products.relu()).sum(1))
        d_k.prepare(its_keys, d_k[its_keys] + d_s.T @ near(q[row]))
        out.prepare(at, y @ near(torch.eye(visible, target.shape[1])))
    results = {"dq": d_q, "dk": d_k, "dw": d_w, "softmaxOut": out}
    return {name: x.rounded(args[name].dtype).reshape(tuple(args[name].shape)) for name, x in results.items()}


def shared(check: Check) -> bool:
    """Returns False for checks of lists, which the dense loss does not have."""
    return not {"sparseIndices", "K", "mass"} & {*check.over, *check.names}


def of_statistics(check: Check) -> bool:
    """Returns False for checks of parameters that only the gradient has."""
    return not {"attnSoftmaxL1Norm", "dq", "dk", "dw", "softmaxOut"} & {*check.over, *check.names}


CLAUSES = merged(
    {
        "softmaxLse is log(sum(exp(I))) of the indexer's scores, dI = exp(I - softmaxLse) - p (ruling 45).": [
            *(computes(dtype=d, mode=m, **over) for d, over in ((H, BSND), (BF, {})) for m in (0, 3)),
            *(computes(mode=m, ratio=1) for m in (0, 3)),
            computes(rows=(20, 30), keys=(5, 8), residual=(2, 3), N=16),
            computes(rows=(3, 9), keys=(300, 2), residual=(3, 3)),
        ],
        "softmaxLse is FLOAT32, a number for every row, without an axis of heads (ruling 45).": [
            *(refuses(INVALID, "softmaxLse", softmaxLse=to(d)) for d in (H, BF, F64)),
            refuses(INVALID, "softmaxLse", softmaxLse=fractal),
            refuses(NULL, "softmaxLse", softmaxLse=None),
            *(
                forbids("softmaxLse", softmaxLse=change, **over)
                for change in (deeper, longer, widened)
                for over in ({}, BSND)
            ),
        ],
        "Tensors of rows may have gaps.": [computes(**dict.fromkeys("qkw", gapped))],
        "Nothing is computed of no rows; rows without keys have -inf, and gradients of 0.": [
            computes(seqUsedKOptional=ints(0, 2, d=I32), **BSND),
            computes(keys=(0, 0), residual=(3, 3)),
            computes(rows=(0, 5), keys=(3, 0), residual=(0, 1)),
            computes(rows=(0, 0)),
        ],
    },
    of_page({text: checks for text, checks in lists.CLAUSES.items() if not text.startswith("dI =")}, {}, shared),
)
LSE_CLAUSES = of_page(CLAUSES, NAMES, of_statistics)
TARGETS = {
    "Targets, statistics and gradients may have gaps.": [
        computes(**dict.fromkeys(("attnSoftmaxL1Norm", "softmaxLse", "dq", "dk", "dw", "softmaxOut"), gapped)),
    ],
    "p is as it is given, of every key that a row sees; packed, of the longest sequence's keys or more (ruling 45).": [
        *(computes(attnSoftmaxL1Norm=drawn(12, 1, n), softmaxOut=zeros(12, 1, n)) for n in (3, 9)),
        computes(attnSoftmaxL1Norm=torch.zeros_like),
        computes(softmaxLse=torch.ones_like),  # not of these scores
        forbids("attnSoftmaxL1Norm", attnSoftmaxL1Norm=drawn(12, 1, 2), softmaxOut=zeros(12, 1, 2)),
        forbids("attnSoftmaxL1Norm", attnSoftmaxL1Norm=widened, softmaxOut=widened, **BSND),
    ],
}
PAGE = Page("aclnnDenseLightningIndexerKLLossGrad", GRAD, base, formula, merged(TARGETS, CLAUSES), finish)
LSE_PAGE = Page("aclnnDenseLightningIndexerSoftmaxLseV2", LSE, lse_base, lse_formula, LSE_CLAUSES)
