"""aclnnIncreFlashAttentionV4: its prototype, a legal call, and the page's formula."""

from collections.abc import Sequence

import torch

from clauses.checks import Args, filled, prototype
from clauses.dtype_abbreviations import I8, I32, H
from clauses.error_bounds import Near, near, softmax
from clauses.values import draw, drawn_integers, heads_first, prepared

PROTOTYPE = prototype("""
    aclTensor     query
    aclTensorList key value
    aclTensor     pseShift attenMask
    aclIntArray   actualSeqLengths
    aclTensor     dequantScale1 quantScale1 dequantScale2 quantScale2 quantOffset2 antiquantScale
    aclTensor     antiquantOffset blocktable kvPaddingSize
    int64_t       numHeads
    double        scaleValue
    char          inputLayout
    int64_t       numKeyValueHeads:0 blockSize innerPrecise
    aclTensor     attentionOut
""")


def base(
    layout: str = "BNSD",
    B: int = 2,
    N: int = 4,
    N2: int = 2,
    S: int = 9,
    D: int = 16,
    Sq: int = 1,
    dtype: torch.dtype = H,
    cache: torch.dtype | None = None,
    page: int = 0,
    pages: str = "BSH",
    tokens: Sequence[int] = (20, 32),
    listed: Sequence[int] = (),
) -> Args:
    """Makes a legal call with one query token per sequence and a cache.

    Args:
        cache: dtype of keys and values: I8, with scales per tensor, or the query's.
        page: slots of a page; pages: "BSH" (blocknum, blocksize, H) or "BNSD" (blocknum, KV_N, blocksize, D);
            tokens: length of each sequence in pages.
        listed: lengths of the sequences, if keys are a list of tensors.
    """

    def rows(n: int, s: int, heads: int, order: str, d: torch.dtype) -> torch.Tensor:
        shape = (n, heads, s, D)
        return prepared(drawn_integers(*shape, low=-128, high=128, d=d) if d == I8 else draw(*shape, d=d), order)

    stored = cache or dtype
    spread, table = [(B, S)] if not listed else [(1, s) for s in listed], None
    if page:
        counts = [-(-t // page) for t in tokens]
        table = torch.full((B, max(counts)), -1, dtype=I32)
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(2)).to(I32)
        for b, ids in enumerate(order.split(counts)):
            table[b, : len(ids)] = ids
        spread = [(sum(counts), page)]
    key, value = ([rows(n, s, N2, pages if page else layout, stored) for n, s in spread] for _ in range(2))
    query = rows(B, Sq, N, layout, dtype)
    return filled(
        PROTOTYPE,
        query=query,
        key=key,
        value=value,
        actualSeqLengths=list(tokens) if page else None,
        antiquantScale=torch.tensor([0.01, 0.02]).to(dtype) if stored == I8 else None,
        blocktable=table,
        numHeads=N,
        scaleValue=0.25,
        inputLayout=layout,
        numKeyValueHeads=N2,
        blockSize=page,
        innerPrecise=1,
        attentionOut=torch.empty_like(query),
    )


def _cache(args: Args, which: str, heads: int) -> torch.Tensor:
    """Returns stored numbers [B, N, slots, D]: pages in the order of the table, or a list padded to equal length."""
    tensors, table = args[which], args["blocktable"]
    if table is not None and table.numel():
        (pool,) = tensors
        pool = heads_first(pool, "BSH" if pool.dim() == 3 else "BNSD", heads)
        return pool[table.clamp_min(0).long()].transpose(1, 2).flatten(2, 3)
    items = [heads_first(t, args["inputLayout"], heads) for t in tensors]
    slots = max(t.shape[2] for t in items)
    return torch.cat([torch.nn.functional.pad(t, (0, 0, 0, slots - t.shape[2])) for t in items])


def _window(args: Args, items: int, slots: int) -> torch.Tensor:
    """Returns bool [B, 1, 1, slots], True for the tokens of every sequence."""
    given, listed, pad = args["actualSeqLengths"], len(args["key"]) > 1, args["kvPaddingSize"]
    layout = args["inputLayout"]
    capacities = [heads_first(t, layout, 1 if t.dim() == 3 else 0).shape[2] for t in args["key"]] if listed else [slots]
    lengths = torch.tensor(given if given is not None else capacities).expand(items)
    last = torch.full((items,), slots)
    first = torch.zeros(items, dtype=torch.int64)
    if pad is not None and pad.numel() and pad.dim() and given is not None:
        last = last - max(int(pad), 0)
        first = last - lengths
        lengths = torch.where(first < 0, 0, lengths)  # An item that does not fit has no tokens.
    slot = torch.arange(slots)
    return ((slot >= first[:, None]) & (slot < (first + lengths)[:, None]))[:, None, None]


def _stored(args: Args, which: int, heads: int) -> Near:
    """Returns dequantised keys (0) or values (1): (stored + antiquantOffset) * antiquantScale."""
    rows = near(_cache(args, ("key", "value")[which], heads))
    for name, apply in (("antiquantOffset", Near.__add__), ("antiquantScale", Near.__mul__)):
        number = args[name]
        if number is not None and number.numel():
            one = number[which].double()
            rows = apply(rows, near(one.reshape(heads, 1, -1) if one.dim() else one))
    return rows


def _sixteen(x: Near) -> Near:
    """Adds the error of rounding a row to 16-bit integers, which programs may do before products with an int8 cache."""
    return Near(x.value, x.slack + 2.0**-15 * x.value.abs().amax(-1, keepdim=True))


def formula(args: Args) -> dict[str, Near]:
    """attentionOut = Softmax(scaleValue Q K^T + pseShift) V over the tokens that attenMask leaves."""
    heads, layout, dtype = args["numHeads"], args["inputLayout"], args["query"].dtype
    kv_heads = args["numKeyValueHeads"] or heads
    query = near(heads_first(args["query"], layout, heads))
    group = torch.arange(heads) // (heads // kv_heads)
    key, value = (_stored(args, which, kv_heads)[:, group] for which in range(2))
    integers = args["key"][0].dtype == I8
    visible = _window(args, query.value.shape[0], key.value.shape[2])
    scores = ((_sixteen(query) if integers else query) @ key.T) * args["scaleValue"]
    pse, mask = args["pseShift"], args["attenMask"]
    columns = key.value.shape[2]
    if pse is not None and pse.numel():
        scores = scores + near(pse[..., :columns])
    if mask is not None and mask.numel():
        visible = visible & (mask.reshape(mask.shape[0], 1, 1, -1)[..., :columns] == 0)
    visible = visible.expand(scores.value.shape)
    empty = ~visible.any(-1, keepdim=True)
    weights = softmax(scores, visible | empty)[0].rounded(dtype)
    out = ((_sixteen(weights) if integers else weights) @ value).only(~empty, 0.0)
    if args["attentionOut"].dtype == I8:
        out = _integers(args, out)
    else:
        out = out.rounded(args["attentionOut"].dtype)
    out = out if layout == "BNSD" else Near(out.value.transpose(1, 2), out.slack.transpose(1, 2))
    shape = args["attentionOut"].shape
    return {"attentionOut": Near(out.value.reshape(shape), out.slack.reshape(shape))}


def _integers(args: Args, out: Near) -> Near:
    """Computes round(out * quantScale2 + quantOffset2), saturated to int8."""
    heads = out.value.shape[1]
    for name, apply in (("quantScale2", Near.__mul__), ("quantOffset2", Near.__add__)):
        number = args[name]
        if number is not None and number.numel():
            out = apply(out, near(number.reshape(heads, 1, -1) if number.numel() > 1 else number.reshape(())))
    low, middle, high = (x.round().clamp(-128, 127) for x in (out.value - out.slack, out.value, out.value + out.slack))
    return Near(middle, torch.maximum(high - middle, middle - low))
