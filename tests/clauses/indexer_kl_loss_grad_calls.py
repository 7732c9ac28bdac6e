"""aclnnSparseLightningIndexerKLLossGrad: its prototype, a legal call, and the formula of its outputs."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from clauses.dtypes import F32, I32, H
from clauses.near import Near, near, softmax
from clauses.table import Args, filled, prototype
from clauses.values import GENERATOR, draw

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
    """A loss over lists of up to three keys.

    Args:
        rows, keys: of every sequence; BSND: all alike.
        K: entries of a list.
        ratio, residual: tokens of a key, and those behind the last one; ratio 1 or mode 0: no residual.
        mass: of every row's target over the entries of its list.
    """
    packed, total = layout == "TND", sum(rows)

    def shaped(t: torch.Tensor) -> torch.Tensor:
        return t if packed else t.unflatten(0, (len(rows), -1))

    q, k = shaped(draw(total, N, D, d=dtype)), shaped(draw(sum(keys), 1, D, d=dtype))
    w, target = shaped(draw(total, N) * 0.02), torch.zeros(total, 1, K)
    lists = torch.full((total, 1, K), -1, dtype=I32)
    bounds = has_bound(ratio, mode)
    for b, (start, count) in enumerate(zip(accumulate(rows, initial=0), rows, strict=False)):
        for i in range(count):
            visible = bound(i, count, keys[b], ratio, residual[b] if bounds else 0, mode)
            chosen = torch.randperm(visible, generator=GENERATOR)[: min(3, K)]
            lists[start + i, 0, : len(chosen)] = chosen.to(I32)
            target[start + i, 0, : len(chosen)] = draw(len(chosen)).softmax(-1) * mass
    ends = {
        name: torch.tensor([*accumulate(n, initial=0)], dtype=I32) for name, n in zip(ENDS, (rows, keys), strict=True)
    }
    return filled(
        PROTOTYPE,
        q=q,
        k=k,
        w=w,
        sparseIndices=shaped(lists),
        attnSoftmaxL1Norm=shaped(target),
        **(ends if packed else {}),
        cmpResidualKOptional=torch.tensor(residual, dtype=I32) if bounds else None,
        layoutQ=layout,
        layoutK=layout,
        maskMode=mode,
        cmpRatio=ratio,
        dq=torch.empty_like(q),
        dk=torch.empty_like(k),
        dw=torch.empty_like(w),
        softmaxOut=torch.empty_like(shaped(target), dtype=F32),
    )


def has_bound(ratio: int, mode: int) -> bool:
    """Whether a residual says where rows stand."""
    return ratio > 1 and mode == 3


def bound(row: int, rows: int, keys: int, ratio: int, residual: int, mode: int) -> int:
    """How many keys a row sees: those whose tokens have all come."""
    return keys if mode == 0 else min(max((keys * ratio + residual - rows + row + 1) // ratio, 0), keys)


def sequences(args: Args, tensor: str, ends: str, used: str) -> list[tuple[int, int]]:
    """(first row, rows) of every sequence, in a tensor's rows end to end."""
    rows = args[tensor].shape[1]
    room = args[ends].tolist() if args[tensor].dim() == 3 else [b * rows for b in range(len(args[tensor]) + 1)]
    counts = [b - a for a, b in pairwise(room)] if args[used] is None else args[used].tolist()
    return list(zip(room, counts, strict=False))


def formula(args: Args) -> dict[str, Near]:
    """y = softmax(I) over the entries that a row reads, dI = y * sum p - p, and the gradients from it."""
    q, k = (t if t.dim() == 3 else t.flatten(0, 1) for t in (args["q"], args["k"]))
    w, dtype = args["w"].flatten(0, -2), q.dtype
    lists, target = (args[name].flatten(0, -3)[:, 0] for name in ("sparseIndices", "attnSoftmaxL1Norm"))
    d_q, d_k, d_w, out = (near(torch.zeros(t.shape)) for t in (q, k[:, 0], w, target))
    sides = zip(sequences(args, "q", ENDS[0], USED[0]), sequences(args, "k", ENDS[1], USED[1]), strict=True)
    for b, ((first, count), (key, keys)) in enumerate(sides):
        residual = 0 if args[RESIDUAL] is None else int(args[RESIDUAL][b])
        for i in range(count):
            row, visible = (
                slice(first + i, first + i + 1),
                bound(i, count, keys, args["cmpRatio"], residual, args["maskMode"]),
            )
            entries = lists[first + i, :visible].tolist()
            entries = entries[: entries.index(-1)] if -1 in entries else entries
            slots = [n for n, entry in enumerate(entries) if entry < visible]
            if not slots:
                continue
            chosen = torch.tensor([key + entries[n] for n in slots])
            listed, query, weight = near(k[chosen, 0]), near(q[first + i]), near(w[first + i])[:, None]
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
