"""aclnnFlashAttentionScoreV2: its prototype, a legal call, and the page's formula."""

import torch

from clauses.dtypes import F32, H
from clauses.near import Near, near, softmax
from clauses.table import Args, filled, prototype
from clauses.training import band, biased, bits, given, grid, tabled
from clauses.values import draw, heads_first, prepared

PROTOTYPE = prototype("""
    aclTensor   query key value realShiftOptional=pse dropMaskOptional paddingMaskOptional attenMaskOptional
    aclIntArray prefixOptional qStartIdxOptional kvStartIdxOptional
    double      scaleValueOptional=scale:1.0 keepProbOptional:1.0
    int64_t     preTokensOptional:2147483647 nextTokensOptional:2147483647 headNum
    char        inputLayout
    int64_t     innerPreciseOptional:0 sparseModeOptional:0 pseTypeOptional:1
    aclTensor   softmaxMaxOut softmaxSumOut softmaxOutOut attentionOutOut
""")
FLT_MAX = torch.finfo(torch.float32).max


def base(
    layout: str = "BSND",
    B: int = 2,
    S1: int = 5,
    S2: int = 7,
    N: int = 4,
    N2: int = 2,
    D: int = 16,
    Dv: int = 0,
    dtype: torch.dtype = H,
) -> Args:
    """Attention of padded batches; Dv 0 is D."""
    query = prepared(draw(B, N, S1, D, d=dtype), layout)
    return filled(
        PROTOTYPE,
        query=query,
        key=prepared(draw(B, N2, S2, D, d=dtype), layout),
        value=prepared(draw(B, N2, S2, Dv or D, d=dtype), layout),
        scaleValueOptional=0.25,
        headNum=N,
        inputLayout=layout,
        softmaxMaxOut=torch.empty(B, N, S1, 8, dtype=F32),
        softmaxSumOut=torch.empty(B, N, S1, 8, dtype=F32),
        attentionOutOut=torch.empty_like(prepared(torch.empty(B, N, S1, Dv or D, dtype=dtype), layout)),
    )


def _visible(args: Args, batch: int, rows: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """([B, 1, rows, keys] of the band, [B or 1, N or 1, rows, keys] of the mask)."""
    mask, mode = given(args["attenMaskOptional"]), args["sparseModeOptional"]
    everything = torch.ones(1, 1, rows, keys, dtype=torch.bool)
    if mask is None:
        return everything, everything
    prefix = args["prefixOptional"] or [0] * batch
    low = max(keys - rows, 0)
    if mode == 5 and not all(low <= n <= keys for n in prefix):
        mode = 1
    tokens = args["preTokensOptional"], args["nextTokensOptional"]
    bands = torch.stack([band(mode, rows, keys, *tokens, n) for n in (prefix if mode in (5, 6) else prefix[:1])])
    return bands[:, None], mask == 0 if mode in (0, 1, 5) else everything


def _bias(args: Args, rows: int, keys: int) -> tuple[torch.Tensor | None, torch.Tensor]:
    """(bias [B or 1, N, rows or 1, keys] or slopes [B or 1, N], distances)."""
    i, j = grid(rows, keys)
    starts = [(args[name] or [0])[0] for name in ("qStartIdxOptional", "kvStartIdxOptional")]
    distance = (j + starts[1]) - (i + starts[0])
    bias = given(args["realShiftOptional"])
    if bias is not None and args["pseTypeOptional"] in (0, 1) and bias.shape[-2] == 1024 and rows > 1024:
        # The last 1024 rows of a bias that depends on row - key: its last row holds every one that is seen.
        bias = tabled(torch.nn.functional.pad(bias[..., -1, :].flip(-1), (keys - 1, 0)), rows, keys)
    return bias, distance


def formula(args: Args) -> dict[str, Near]:
    """attention_out = Dropout(Softmax(Mask(scale * (query * key^T) + pse, atten_mask), keep_prob)) * value."""
    heads, layout, dtype = args["headNum"], args["inputLayout"], args["query"].dtype
    query = heads_first(args["query"], layout, heads)
    batch, _, rows, dim = query.shape
    width = args["key"].shape[-1]
    kv_heads = width // dim if layout in ("BSH", "SBH") else args["key"].shape[1 if layout == "BNSD" else 2]
    group = torch.arange(heads) // (heads // kv_heads)
    key, value = (heads_first(args[name], layout, kv_heads)[:, group] for name in ("key", "value"))
    keys = key.shape[2]
    if not (batch and rows and keys):
        return {name: near(torch.zeros_like(t)) for name in OUTPUTS if (t := args[name]) is not None}
    bias, distance = _bias(args, rows, keys)
    names = {"scaleValue": args["scaleValueOptional"], "pseType": args["pseTypeOptional"]}
    scores = biased(near(query) @ near(key).T, names, bias, distance)
    window, mask = _visible(args, batch, rows, keys)
    visible = (window & mask).expand(scores.value.shape)
    some, full = visible.any(-1, keepdim=True), (batch, heads, rows, 8)
    weights, top, total = softmax(scores, visible | ~some)
    zeros = args["innerPreciseOptional"] == 2 or not bool(window.any(-1).all())
    # A row without keys: zeros, or the mean of all values.
    mean = near(torch.tensor(0.0 if zeros else 1 / keys))
    weights = Near(torch.where(some, weights.value, mean.value), torch.where(some, weights.slack, 0))
    drop = given(args["dropMaskOptional"])
    if drop is not None:
        keep = bits(drop, scores.value.numel()).reshape(scores.value.shape)
        weights = weights.only(keep, 0) / args["keepProbOptional"]
    out = (weights.rounded(dtype) @ near(value)).rounded(dtype)
    top, total = top.only(some, -FLT_MAX), total.only(some, FLT_MAX if zeros else keys)
    out = Near(prepared(out.value, layout), prepared(out.slack, layout))
    lanes = [Near(x.value.expand(full), x.slack.expand(full)) for x in (top, total)]
    return dict(zip(OUTPUTS, (*lanes, out), strict=True))


OUTPUTS = ("softmaxMaxOut", "softmaxSumOut", "attentionOutOut")
