"""aclnnFlashAttentionUnpaddingScoreGradV3: its prototype, a legal call, and the page's formulas."""

from collections.abc import Iterator, Sequence

import torch

from clauses.dtypes import BF, F32
from clauses.near import Near, near, softmax
from clauses.selections import Item, packed
from clauses.table import Args, filled, prototype
from clauses.training import INF, TRIANGLE, band, edge_mode, given
from clauses.values import draw

PROTOTYPE = prototype("""
    aclTensor   query queryRope keyIn keyInRope=key_rope value dy pseShiftOptional=pse dropMaskOptional
    aclTensor   paddingMaskOptional attenMaskOptional softmaxMaxOptional softmaxSumOptional
    aclTensor   softmaxInOptional=softmax_in attentionInOptional=attention_in
    aclIntArray prefixOptional actualSeqQLenOptional actualSeqKvLenOptional qStartIdxOptional kvStartIdxOptional
    double      scaleValue=scale keepProb
    int64_t     preTokens nextTokens headNum
    char        inputLayout
    int64_t     innerPrecise sparseMode pseType
    aclTensor   dqOut dqRopeOut dkOut dkRopeOut dvOut dpseOut
""")


def base(
    q: Sequence[int] = (5, 11),
    kv: Sequence[int] = (7, 16),
    N: int = 4,
    N2: int = 2,
    D: int = 16,
    Dv: int = 0,
    Dr: int = 8,
    dtype: torch.dtype = BF,
    rope: bool = True,
) -> Args:
    """The gradient of packed attention; q, kv: inclusive ends; Dv 0 is D."""
    t1, t2 = q[-1], kv[-1]
    query, key, value = draw(t1, N, D, d=dtype), draw(t2, N2, D, d=dtype), draw(t2, N2, Dv or D, d=dtype)
    query_rope, key_rope = (draw(t, n, Dr, d=dtype) if rope else None for t, n in ((t1, N), (t2, N2)))
    dy = draw(t1, N, Dv or D, d=dtype)
    return filled(
        PROTOTYPE,
        query=query,
        queryRope=query_rope,
        keyIn=key,
        keyInRope=key_rope,
        value=value,
        dy=dy,
        attenMaskOptional=TRIANGLE,
        softmaxMaxOptional=torch.zeros(t1, N, 8, dtype=F32),
        softmaxSumOptional=torch.ones(t1, N, 8, dtype=F32),
        attentionInOptional=torch.zeros_like(dy),
        actualSeqQLenOptional=list(q),
        actualSeqKvLenOptional=list(kv),
        scaleValue=0.2,
        keepProb=1.0,
        preTokens=INF,
        nextTokens=INF,
        headNum=N,
        inputLayout="TND",
        innerPrecise=0,
        sparseMode=3,
        pseType=1,
        dqOut=torch.empty_like(query),
        dqRopeOut=torch.empty_like(query_rope) if rope else None,
        dkOut=torch.empty_like(key),
        dkRopeOut=torch.empty_like(key_rope) if rope else None,
        dvOut=torch.empty_like(value),
    )


def _visible(args: Args, items: Sequence[Item], number: int) -> torch.Tensor:
    """[N or 1, rows, keys]: what the rows of a sequence see."""
    item, mode, mask = items[number], args["sparseMode"], args["attenMaskOptional"]
    unmasked = torch.ones(1, item.rows, item.keys, dtype=torch.bool)
    if mode in (0, 1):
        full = mask if mask.dim() == 4 else mask[None, None]
        unmasked = full[number if full.shape[0] > 1 else 0, :, : item.rows, : item.keys] == 0
    if mode in (7, 8):
        used = [i for i, other in enumerate(items) if other.rows]
        mode = edge_mode(mode, number == used[0], number == used[-1])
    prefix = (args["prefixOptional"] or [0] * len(items))[number] if mode == 6 else 0
    return unmasked & band(mode, item.rows, item.keys, args["preTokens"], args["nextTokens"], prefix)


def rows_of(args: Args, item: Item) -> Iterator[Near]:
    """query, key, value, dy and attentionIn of a sequence, heads first, rope parts joined, key heads repeated."""
    heads = args["headNum"]
    rows, keys = slice(item.row, item.row + item.rows), slice(item.key, item.key + item.keys)
    names = ("query", rows, "queryRope"), ("keyIn", keys, "keyInRope"), ("value", keys, None)
    for name, where, rope in (*names, ("dy", rows, None), ("attentionInOptional", rows, None)):
        t = args[name][where]
        rope_rows = given(args[rope]) if rope else None
        t = t if rope_rows is None else torch.cat([t, rope_rows[where]], -1)
        group = torch.arange(heads) // (heads // t.shape[1])
        yield near(t.transpose(0, 1)[group])


def sequences(args: Args) -> Iterator[tuple[Item, torch.Tensor]]:
    """Every sequence with rows and keys, and what its rows see."""
    items = list(packed(args["actualSeqQLenOptional"], args["actualSeqKvLenOptional"]))
    return ((item, _visible(args, items, i)) for i, item in enumerate(items) if item.rows and item.keys)


def finish(args: Args, changed: frozenset[str]) -> None:
    """attentionIn, softmaxMax and softmaxSum of the forward operator: statistics lie head by head in every item."""
    out = torch.zeros(args["dy"].shape, dtype=torch.float64)
    rows, heads = args["query"].shape[:2]
    statistics = torch.zeros(rows * heads), torch.ones(rows * heads)
    for item, visible in sequences(args):
        query, key, value, *_ = rows_of(args, item)
        some = visible.any(-1, keepdim=True)
        p, top, total = softmax((query @ key.T) * args["scaleValue"], (visible | ~some).expand(heads, -1, -1))
        out[item.row : item.row + item.rows] = ((p.value * some) @ value.value).transpose(0, 1)
        where = slice(item.row * heads, (item.row + item.rows) * heads)
        statistics[0][where], statistics[1][where] = top.value.reshape(-1).float(), total.value.reshape(-1).float()
    for name, rows in zip(("softmaxMaxOptional", "softmaxSumOptional"), statistics, strict=True):
        if name not in changed:
            args[name] = rows[:, None].expand(-1, 8).reshape(args[name].shape).contiguous()
    if "attentionInOptional" not in changed:
        args["attentionInOptional"] = out.to(args["dy"].dtype)


def formula(args: Args) -> dict[str, Near]:
    """dV = P^T dY, dS = P * (dY V^T - rowsum(dY * Y)), [dQ, dqRope] = dS K and [dK, dkRope] = dS^T Q, times scale."""
    heads, dim, dtype = args["headNum"], args["query"].shape[-1], args["query"].dtype
    sums = {}
    for name, argument, rope in (("q", "query", "queryRope"), ("k", "keyIn", "keyInRope"), ("v", "value", None)):
        rope_rows = given(args[rope]) if rope else None
        more = 0 if rope_rows is None else rope_rows.shape[-1]
        sums[name] = near(torch.zeros(*args[argument].shape[:2], args[argument].shape[2] + more))
    for item, visible in sequences(args):
        query, key, value, dy, out = rows_of(args, item)
        visible = visible.expand(heads, -1, -1)
        some = visible.any(-1, keepdim=True)
        p = softmax((query @ key.T) * args["scaleValue"], visible | ~some)[0].only(visible, 0)
        d_s = p * ((dy @ value.T) - (dy * out).sum(-1))
        d_s, p = d_s.rounded(dtype).only(visible, 0), p.rounded(dtype).only(visible, 0)
        rows, keys = slice(item.row, item.row + item.rows), slice(item.key, item.key + item.keys)
        _add(sums["q"], rows, (d_s @ key) * args["scaleValue"])
        _add(sums["k"], keys, (d_s.T @ query) * args["scaleValue"])
        _add(sums["v"], keys, p.T @ dy)
    results = {"dqOut": sums["q"][..., :dim], "dkOut": sums["k"][..., :dim], "dvOut": sums["v"]}
    if given(args["queryRope"]) is not None:
        results |= {"dqRopeOut": sums["q"][..., dim:], "dkRopeOut": sums["k"][..., dim:]}
    return {name: x.rounded(dtype) for name, x in results.items()}


def _add(total: Near, where: slice, addend: Near) -> None:
    """Lays heads first rows where they belong; query heads of one key head are summed."""
    heads = total.value.shape[1]
    grouped = Near(*(x.reshape(heads, -1, *x.shape[1:]) for x in (addend.value, addend.slack))).sum(1)
    total.value[where], total.slack[where] = (x[:, 0].transpose(0, 1) for x in (grouped.value, grouped.slack))
