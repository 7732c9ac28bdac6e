"""aclnnSparseLightningIndexerGradKLLoss: its prototype, a legal call, and the page's formulas."""

from collections.abc import Sequence

import torch

from clauses.dtypes import F32, I32, H
from clauses.near import Near, near, softmax
from clauses.selections import Item, flat, items_of, lists, selected, sequences_of
from clauses.table import Args, filled, prototype
from clauses.values import draw

PROTOTYPE = prototype("""
    aclTensor   query key queryIndex keyIndex weights sparseIndices softmaxMax softmaxSum queryRope keyRope
    aclIntArray actualSeqLengthsQuery actualSeqLengthsKey
    double      scaleValue
    char        layout
    int64_t     sparseMode pre_tokens next_tokens
    bool        deterministic
    aclTensor   dQueryIndex dKeyIndex dWeights loss
""")
LENGTHS = ("actualSeqLengthsQuery", "actualSeqLengthsKey")


def base(
    axes: str = "TND",
    q: Sequence[int] = (3, 5),
    kv: Sequence[int] = (70, 160),
    N: int = 8,
    Nidx: int = 8,
    D: int = 512,
    Dr: int = 64,
    Didx: int = 128,
    dtype: torch.dtype = H,
    weights_dtype: torch.dtype | None = None,
    count: int = 48,
    K: int = 2048,
    rope: bool = True,
    peak: float = 0.02,
    tokens: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Args:
    """The loss of an indexer over selected keys.

    Args:
        axes: "TND" or "BSND".
        q, kv: inclusive ends of sequences; BSND: the first is S of each of len(q) items, which tokens may shorten.
        count: keys that every row selects at most; K: entries of a list.
        peak: of the indexer's weights, on which depends how peaked its distribution is.
    """
    items, t1, t2, lengths = sequences_of(axes, q, kv, tokens)

    def shaped(t: torch.Tensor) -> torch.Tensor:
        return t if axes == "TND" else t.unflatten(0, (len(q), -1))

    statistics = torch.ones((1, t1, N) if axes == "TND" else (len(q), 1, q[0], N), dtype=F32)
    query_index, key_index = shaped(draw(t1, Nidx, Didx, d=dtype)), shaped(draw(t2, 1, Didx, d=dtype))
    weights = shaped((draw(t1, Nidx) * peak).to(weights_dtype or dtype))
    listed = torch.full((t1, 1, K), -1, dtype=I32)
    listed[..., :2048] = lists(items, t1, 3, 1, min(count, K))[..., :K]
    return filled(
        PROTOTYPE,
        query=shaped(draw(t1, N, D, d=dtype)),
        key=shaped(draw(t2, 1, D, d=dtype)),
        queryIndex=query_index,
        keyIndex=key_index,
        weights=weights,
        sparseIndices=shaped(listed),
        softmaxMax=torch.zeros_like(statistics),
        softmaxSum=statistics,
        queryRope=shaped(draw(t1, N, Dr, d=dtype)) if rope else None,
        keyRope=shaped(draw(t2, 1, Dr, d=dtype)) if rope else None,
        **dict(zip(LENGTHS, lengths, strict=True) if axes == "TND" or tokens else ()),
        scaleValue=0.04,
        layout=axes,
        sparseMode=3,
        pre_tokens=65536,
        next_tokens=65536,
        deterministic=False,
        dQueryIndex=torch.empty_like(query_index),
        dKeyIndex=torch.empty_like(key_index),
        dWeights=torch.empty_like(weights),
        loss=torch.empty(1),
    )


def sequences(args: Args) -> list[tuple[Item, torch.Tensor]]:
    """Every sequence with rows and keys, and [rows, keys]: what its rows selected."""
    return [(item, selected(args, item, 3, 1)) for item in items_of(args, *LENGTHS) if item.rows and item.keys]


def scores_of(args: Args, item: Item) -> Near:
    """[rows, N1, keys]: scaleValue Q K^T of the attention, rope included."""
    ropes = (("query", "queryRope"), ("key", "keyRope"))
    query, key = (flat(torch.cat([args[x] for x in pair if args[x] is not None], -1)) for pair in ropes)
    keys = near(key[item.key : item.key + item.keys, 0])
    return (near(query[item.row : item.row + item.rows]) @ keys.T) * args["scaleValue"]


def finish(args: Args, changed: frozenset[str]) -> None:
    """softmaxMax and softmaxSum of the attention over the selected keys."""
    heads = args["query"].shape[-2]
    for name, which in (("softmaxMax", 1), ("softmaxSum", 2)):
        if name in changed:
            continue
        rows = torch.zeros(flat(args["query"]).shape[0], heads)
        for item, visible in sequences(args):
            visible = wide_of(visible, heads)
            result = softmax(scores_of(args, item), visible | ~visible.any(-1, keepdim=True))[which].value[..., 0]
            rows[item.row : item.row + item.rows] = (result * visible.any(-1)).float()
        args[name] = rows.reshape(args[name].shape)


def formula(args: Args) -> dict[str, Near]:
    """I = W ReLU(q K^T), y = softmax(I), p = mean of the attention's heads, loss = sum p log(p / y), dI = y - p."""
    q, k, w = flat(args["queryIndex"]), flat(args["keyIndex"])[:, 0], args["weights"].flatten(0, -2)
    heads, dtype = args["query"].shape[-2], args["query"].dtype
    d_q, d_k, d_w = (near(torch.zeros(t.shape)) for t in (q, k, w))
    loss = near(torch.zeros(1, 1))
    # The rows' own axis first, which is the second or third one.
    statistics = [args[name].squeeze(-3).flatten(0, -2) for name in ("softmaxMax", "softmaxSum")]
    for item, visible in sequences(args):
        rows, keys = slice(item.row, item.row + item.rows), slice(item.key, item.key + item.keys)
        some = visible.any(-1, keepdim=True)
        visible_of_heads = wide_of(visible, heads)
        top, total = (near(t[rows])[..., None] for t in statistics)
        of_heads = (
            (scores_of(args, item).only(visible_of_heads, 0) - top).exp() / total.only(total.value > 0, 1)
        ).only(visible_of_heads, 0)
        p = of_heads.sum(1)[:, 0] / heads
        products = near(q[rows]) @ near(k[keys]).T
        weight = near(w[rows])[..., None]
        y = softmax((weight * products.relu()).sum(1)[:, 0], visible | ~some)[0].only(visible, 0)
        logs = p.only(visible, 1).log() - y.only(visible, 1).log()
        loss = loss + (p * logs).sum(1).sum(0)
        d_i = (y - p)[:, None]
        d_w.prepare(rows, (d_i * products.relu()).sum(2))
        d_s = (d_i * weight * products.step()).rounded(dtype).only(wide_of(visible, q.shape[1]), 0)
        d_q.prepare(rows, d_s @ near(k[keys]))
        flat_s = Near(d_s.value.flatten(0, 1), d_s.slack.flatten(0, 1))
        d_k.prepare(keys, flat_s.T @ near(q[rows].flatten(0, 1)))
    results = {"dQueryIndex": d_q, "dKeyIndex": d_k, "dWeights": d_w, "loss": loss}
    return {name: x.rounded(args[name].dtype).reshape(args[name].shape) for name, x in results.items()}


def wide_of(visible: torch.Tensor, heads: int) -> torch.Tensor:
    """[rows, heads, keys]."""
    return visible[:, None].expand(-1, heads, -1)
