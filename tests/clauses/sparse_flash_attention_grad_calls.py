"""aclnnSparseFlashAttentionGrad: its prototype, a legal call, and the page's formula."""

from collections.abc import Sequence

import torch

from clauses.dtypes import F32, I32, H
from clauses.near import Near, near, softmax
from clauses.selections import Item, flat, items_of, lists, selected, sequences_of
from clauses.table import Args, filled, prototype
from clauses.values import draw

PROTOTYPE = prototype("""
    aclTensor query key value sparseIndices dOut out softmaxMax softmaxSum actualSeqLengthsQueryOptional
    aclTensor actualSeqLengthskvOptional queryRopeOptional keyRopeOptional
    double    scaleValue
    int64_t   sparseBlockSize
    char      layoutOptional
    int64_t   sparseMode preTokens nextTokens
    bool      deterministic
    aclTensor dQueryOut dKeyOut dValueOut dQueryRopeOutOptional dKeyRopeOutOptional
""")
LENGTHS = ("actualSeqLengthsQueryOptional", "actualSeqLengthskvOptional")
INF = 2147483647


def base(
    layout: str = "TND",
    q: Sequence[int] = (3, 5),
    kv: Sequence[int] = (70, 160),
    N: int = 4,
    D: int = 512,
    Dr: int = 64,
    dtype: torch.dtype = H,
    mode: int = 3,
    block: int = 1,
    count: int = 48,
    rope: bool = True,
    lengths: bool = True,
    tokens: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Args:
    """The gradient of attention to selected keys.

    Args:
        q, kv: inclusive ends of TND's sequences; BSND: the first is S of each of len(q) items.
        count: blocks that every row selects at most.
        lengths: whether they are given; tokens: of the items of BSND, where these are not full.
    """
    items, t1, t2, given = sequences_of(layout, q, kv, tokens)

    def shaped(t: torch.Tensor) -> torch.Tensor:
        return t if layout == "TND" else t.unflatten(0, (len(q), -1))

    query, query_rope = shaped(draw(t1, N, D, d=dtype)), shaped(draw(t1, N, Dr, d=dtype))
    key, key_rope = shaped(draw(t2, 1, D, d=dtype)), shaped(draw(t2, 1, Dr, d=dtype))
    statistics = torch.ones((1, t1, N) if layout == "TND" else (len(q), 1, q[0], N), dtype=F32)
    return filled(
        PROTOTYPE,
        query=query,
        key=key,
        value=shaped(draw(t2, 1, D, d=dtype)),
        sparseIndices=shaped(lists(items, t1, mode, block, count)),
        dOut=shaped(draw(t1, N, D, d=dtype)),
        out=torch.zeros_like(query),
        softmaxMax=torch.zeros_like(statistics),
        softmaxSum=statistics,
        **{
            name: torch.tensor(lengths_of_side, dtype=I32)
            for name, lengths_of_side in zip(LENGTHS, given, strict=True)
            if lengths
        },
        queryRopeOptional=query_rope if rope else None,
        keyRopeOptional=key_rope if rope else None,
        scaleValue=0.04,
        sparseBlockSize=block,
        layoutOptional=layout,
        sparseMode=mode,
        preTokens=INF,
        nextTokens=INF,
        deterministic=False,
        dQueryOut=torch.empty_like(query),
        dKeyOut=torch.empty_like(key),
        dValueOut=torch.empty_like(key),
        dQueryRopeOutOptional=torch.empty_like(query_rope) if rope else None,
        dKeyRopeOutOptional=torch.empty_like(key_rope) if rope else None,
    )


def joined(args: Args, argument: str, rope: str) -> torch.Tensor:
    """Rows with their rope part."""
    parts = [args[argument], args[rope]] if args[rope] is not None else [args[argument]]
    return flat(torch.cat(parts, -1))


def scores_of(args: Args, item: Item, query: torch.Tensor, key: torch.Tensor) -> Near:
    """[rows * N, keys]: scaleValue Q K^T of a sequence."""
    rows = near(query[item.row : item.row + item.rows].flatten(0, 1))
    return (rows @ near(key[item.key : item.key + item.keys, 0]).T) * args["scaleValue"]


def items_and_rows(args: Args) -> tuple[list[Item], torch.Tensor, torch.Tensor]:
    """(sequences, query rows, key rows), rope included."""
    query = joined(args, "query", "queryRopeOptional")
    return items_of(args, *LENGTHS), query, joined(args, "key", "keyRopeOptional")


def finish(args: Args, changed: frozenset[str]) -> None:
    """out, softmaxMax and softmaxSum as the forward operator leaves them: zeros where nothing is seen."""
    items, query, key = items_and_rows(args)
    heads = args["query"].shape[-2]
    value, out = flat(args["value"]), torch.zeros_like(flat(args["query"]))
    top, total = torch.zeros(out.shape[:2]), torch.zeros(out.shape[:2])
    for item in items:
        visible = selected(args, item, args["sparseMode"], args["sparseBlockSize"]).repeat_interleave(heads, 0)
        some = visible.any(-1)
        if not visible.numel():
            continue
        p, m, s = softmax(scores_of(args, item, query, key), visible | ~some[:, None])
        where = slice(item.row, item.row + item.rows)
        rows = (p.value @ value[item.key : item.key + item.keys, 0].double()) * some[:, None]
        out[where] = rows.reshape(out[where].shape).to(out.dtype)
        top[where] = torch.where(some, m.value[:, 0], 0).reshape(item.rows, heads).float()
        total[where] = torch.where(some, s.value[:, 0], 0).reshape(item.rows, heads).float()
    if "out" not in changed:
        args["out"] = out.reshape(args["query"].shape)
    for name, rows in (("softmaxMax", top), ("softmaxSum", total)):
        if name not in changed:
            args[name] = rows.reshape(args[name].shape)


def formula(args: Args) -> dict[str, Near]:
    """dV = P^T dO; dS = P * (dO V^T - rowsum(dO * O)); dQ = dS K and dK = dS^T Q, times scaleValue."""
    items, query, key = items_and_rows(args)
    heads, dim, dtype = args["query"].shape[-2], args["query"].shape[-1], args["query"].dtype
    value, given, out = (flat(args[name]) for name in ("value", "dOut", "out"))
    sums = [near(torch.zeros(shape)) for shape in (query.shape, key.shape, value.shape)]
    for item in items:
        rows, keys = slice(item.row, item.row + item.rows), slice(item.key, item.key + item.keys)
        visible = selected(args, item, args["sparseMode"], args["sparseBlockSize"]).repeat_interleave(heads, 0)
        if not visible.numel():
            continue
        some = visible.any(-1, keepdim=True)
        p = softmax(scores_of(args, item, query, key), visible | ~some)[0].only(visible, 0)
        d_out = near(given[rows].flatten(0, 1))
        d_p = d_out @ near(value[keys, 0]).T
        d_s = p * (d_p - (d_out * near(out[rows].flatten(0, 1))).sum(-1))
        d_s, p = d_s.rounded(dtype).only(visible, 0), p.rounded(dtype).only(visible, 0)
        d_q = (d_s @ near(key[keys, 0])) * args["scaleValue"]
        d_k = (d_s.T @ near(query[rows].flatten(0, 1))) * args["scaleValue"]
        d_v = p.T @ d_out
        for total, one, where in zip(sums, (d_q, d_k, d_v), (rows, keys, keys), strict=True):
            total.prepare(where, one)
    results = {}
    pairs = (("dQueryOut", 0, 0), ("dKeyOut", 1, 0), ("dValueOut", 2, 0))
    ropes = (("dQueryRopeOutOptional", 0, dim), ("dKeyRopeOutOptional", 1, dim))
    for name, which, first in pairs + (ropes if args["queryRopeOptional"] is not None else ()):
        last = dim if first == 0 else None
        rounded_sum = sums[which].rounded(dtype)
        shape = args[name].shape
        results[name] = Near(
            rounded_sum.value[..., first:last].reshape(shape), rounded_sum.slack[..., first:last].reshape(shape)
        )
    return results
