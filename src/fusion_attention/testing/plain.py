"""plain(): computes a test call of training attention by dense matrices in float64, to test the reference back end."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fusion_attention.ir.dropout import keep_from_philox
from fusion_attention.testing.cases import (
    OFFSET,
    SEED,
    Case,
    Results,
    Tensor,
    drop_shape,
    in_band,
    part,
    seen,
    stats_part,
)

FLT_MAX = float(np.finfo(np.float32).max)


def _pse_places(case: Case, pse: Tensor, b: int) -> Tensor:
    """Returns for each score of sequence b the index of its bias in pse.flatten(): [heads_q, rows, keys]."""
    heads, rows, keys = case.heads_q, case.q_len[b], case.kv_len[b]
    indices = torch.arange(pse.numel())
    if case.pse.endswith("blocks"):
        shapes = [(heads, m if case.pse == "blocks" else 1, n) for m, n in zip(case.q_len, case.kv_len, strict=True)]
        first = sum(math.prod(shape) for shape in shapes[:b])
        block = indices[first : first + math.prod(shapes[b])].view(shapes[b])
        return block.expand(heads, rows, keys)
    indices = indices.view(pse.shape)[b if pse.shape[0] > 1 else 0]
    if case.pse.endswith("table"):
        i, j = torch.arange(rows)[:, None], torch.arange(keys)
        stored = torch.where(i >= rows - 1024, i - (rows - 1024), i % 1024)
        column = pse.shape[3] - keys + j + (rows - 1024 + stored) - i
        return indices[:, stored, column.clamp(max=pse.shape[3] - 1)]  # clamped columns are never visible
    return indices[:, :rows].expand(heads, rows, -1)[..., :keys]


def _bias(case: Case, args: Mapping[str, Any], b: int) -> Tensor | float:
    """Returns the additive bias of the scores of sequence b of a test call, [heads_q, rows, keys]; 0.0 without one."""
    pse = args["pse"]
    if pse is None:
        return 0.0
    if case.pse_type in (0, 1):
        value = pse.reshape(-1)[_pse_places(case, pse, b)].double()
        return value * case.scale if case.pse_type == 1 else value
    slope = (pse[b if pse.shape[0] > 1 else 0] if pse.dim() == 2 else pse).double()[:, None, None]
    first = next((s for s, length in enumerate(case.q_len) if length), 0)
    start = (0, 0) if case.starts is None or (case.sparse_mode == 8 and b != first) else case.starts
    row, key = torch.arange(case.q_len[b])[:, None] + start[0], torch.arange(case.kv_len[b]) + start[1]
    distance = (key - row).abs().double()
    return -slope * (distance if case.pse_type == 2 else distance.sqrt())


def _capped(case: Case, scores: Tensor) -> tuple[Tensor, Tensor | float]:
    """Returns (softcap * tanh(scores / softcap), its derivative), or (scores, 1.0) without a softcap."""
    if not case.softcap:
        return scores, 1.0
    tanh = (scores / case.softcap).tanh()
    return case.softcap * tanh, 1 - tanh**2


def _keep_mask(case: Case, args: Mapping[str, Any], b: int) -> Tensor | float:
    """Returns the dropout mask of sequence b of a test call, [heads_q, rows, keys], 1: kept; or 1.0 without dropout."""
    rows, keys = case.q_len[b], case.kv_len[b]
    if case.dropout == "none":
        return 1.0
    if case.dropout == "philox":
        drawn = (slice(0, rows), slice(0, keys))
        return keep_from_philox(SEED, OFFSET, case.keep_prob, b * case.heads_q, case.heads_q, *drawn).int()
    bits = np.unpackbits(args["drop_mask"].numpy(), bitorder="little")
    first, shape = sum(math.prod(drop_shape(case, c)) for c in range(b)), drop_shape(case, b)
    return torch.from_numpy(bits[first : first + math.prod(shape)].reshape(shape).astype(np.int32))[:, :rows, :keys]


def _softmax(case: Case, args: Mapping[str, Any], b: int, scores: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns for sequence b the weights exp(scores - max), max, sum, and a bool tensor, [heads_q, rows, 1], true for
    rows with visible keys. Rows without have the values that CANN returns."""
    visible, keys = seen(case, args, b), case.kv_len[b]
    scores = scores.masked_fill(~visible, -math.inf)
    if case.sink:
        scores = torch.cat((scores, args["sink"].to(scores)[:, None, None].expand(-1, scores.shape[1], 1)), -1)
    if not keys:
        nothing = torch.zeros(*scores.shape[:2], 1, dtype=scores.dtype)
        return scores[..., :0], nothing, nothing, nothing.bool()
    top = scores.amax(-1, keepdim=True)
    empty = ~visible.any(-1, keepdim=True)
    result = (torch.finfo(torch.float32).min, FLT_MAX) if not case.sink else (0.0, 1.0)
    weights = (scores - top.masked_fill(top == -math.inf, 0)).exp()
    total = weights.sum(-1, keepdim=True)
    if not case.sink:
        some = [in_band(case, s).any(-1, keepdim=True) for s in range(len(case.q_len)) if case.kv_len[s]]
        zero = case.inner_precise == 2 or not case.npu or (not case.packed and not all(t.all() for t in some))
        mean = empty & in_band(case, b).any(-1, keepdim=True) & (not zero)
        top, total = top.masked_fill(empty, result[0]), total.masked_fill(empty, result[1]).masked_fill(mean, keys)
        weights = weights.masked_fill(mean, 1.0)
    return weights[..., :keys], top, total, ~empty


def _results(case: Case, args: Mapping[str, Any]) -> Results:
    """Returns {name: zeros} in the shape of every output and gradient of a test call; args: from arguments()."""
    stats = (len(case.q_len), case.heads_q, case.tokens("q"), 8)
    stats = (case.tokens("q"), case.heads_q, 8) if case.packed else stats  # type: ignore[assignment]
    like = {"out": "dy", "dq": "query", "dk": "key", "dv": "value", "dq_rope": "query_rope", "dk_rope": "key_rope"}
    shapes = {name: args[of].shape for name, of in like.items() if args[of] is not None} | {"max": stats, "sum": stats}
    if case.pse_type in (0, 1) and args["pse"] is not None:
        shapes["dpse"] = args["pse"].shape
    shapes |= {"dsink": (case.heads_q,)} if case.sink else {}
    return {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}


def plain(case: Case, args: Mapping[str, Any]) -> Results:
    """Returns {name: tensor}, float64, of every output and gradient of a test call, computed with dense matrices."""
    results = _results(case, args)
    for b in range(len(case.q_len)):
        _plain_sequence(case, args, b, results)
    return results


def _plain_sequence(case: Case, args: Mapping[str, Any], b: int, results: Results) -> None:
    """Computes sequence b of a test call with dense matrices, and writes its rows of `results`."""
    group, scale = case.heads_q // case.heads_kv, case.scale

    def rows(name: str) -> Tensor:
        return part(case, args[name], "q", case.heads_q, b).double()

    def keys(name: str) -> Tensor:
        return part(case, args[name], "kv", case.heads_kv, b).double().repeat_interleave(group, 0)

    def store_keys(name: str, by_head: Tensor) -> None:
        total = by_head.unflatten(0, (case.heads_kv, group)).sum(1)
        part(case, results[name], "kv", case.heads_kv, b).copy_(total)

    q, k, v, dy = rows("query"), keys("key"), keys("value"), rows("dy")
    if case.dim_rope:
        q, k = torch.cat((q, rows("query_rope")), -1), torch.cat((k, keys("key_rope")), -1)
    keep = _keep_mask(case, args, b)
    scores, slope = _capped(case, scale * (q @ k.mT))
    weights, top, total, alive = _softmax(case, args, b, scores + _bias(case, args, b))
    divisor = total.masked_fill(total == 0, 1)
    out = (weights * keep) @ v / case.keep_prob / divisor
    part(case, results["out"], "q", case.heads_q, b).copy_(out)
    for name, value in (("max", top), ("sum", total)):
        stats_part(case, results[name], b).copy_(value)

    p = weights / divisor
    delta = (dy * out).sum(-1, keepdim=True)
    ds = (p * ((dy @ v.mT) * keep / case.keep_prob - delta)).masked_fill(~alive, 0)
    dx = ds * slope
    dq, dk = scale * (dx @ k), scale * (dx.mT @ q)
    for name, tail, side in (("dq", slice(0, case.dim_qk), "q"), ("dq_rope", slice(case.dim_qk, None), "q")):
        if name in results:
            part(case, results[name], side, case.heads_q, b).copy_(dq[..., tail])
    store_keys("dk", dk[..., : case.dim_qk])
    store_keys("dv", (p * keep).mT @ dy / case.keep_prob)
    if case.dim_rope:
        store_keys("dk_rope", dk[..., case.dim_qk :])
    if "dpse" in results:
        indices = _pse_places(case, args["pse"], b)
        added = ds * scale if case.pse_type == 1 else ds
        results["dpse"].view(-1).index_add_(0, indices.reshape(-1), added.reshape(-1))
    if case.sink and case.kv_len[b]:
        results["dsink"] -= (delta * (args["sink"].double()[:, None, None] - top).exp() / total).sum((1, 2))
