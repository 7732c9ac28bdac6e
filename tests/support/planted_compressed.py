"""Kernels of a window beside compressed keys, and of their indexer, with well-known mistakes, in plain torch."""

import math
from typing import Any

import torch

Tensor = torch.Tensor
Results = dict[str, Tensor]
LATE, EARLY, RESIDUAL = "compressed-bound:late", "compressed-bound:early", "compressed-residual"


def closed_keys(rows: int, tokens: int, keys: int, ratio: int, wrong: str) -> Tensor:
    """The number of compressed keys that every row sees; the last row is the last token."""
    if wrong == RESIDUAL:
        tokens = keys * ratio + keys % ratio
    position = torch.arange(tokens - rows, tokens)
    visible = {LATE: position // ratio, EARLY: position // ratio + 1}.get(wrong, (position + 1) // ratio)
    if wrong.startswith("compressed-unmasked") or wrong == "mask-ignored":
        visible = torch.full_like(position, keys)
    return visible.clamp(0, keys)


def attended(args: dict[str, Any], wrong: str = "") -> Results:
    """attention_out, and softmax_max and softmax_sum [B, 1, S, N]: rows of whole sequences, in float64."""
    q, k, c = (args[name].double() for name in ("query", "key", "key_compressed"))
    rows, ratio = q.shape[1], args["ratio"]
    scale = 1.0 if wrong == "scale-missing" else q.shape[-1] ** -0.5
    row, key, entry = torch.arange(rows)[:, None], torch.arange(rows), torch.arange(c.shape[1])
    first = args["band"].lo + (wrong == "window-off-by-one")
    near = (key <= row) & (key >= row + first) | (wrong == "compressed-unmasked:both")
    closed = closed_keys(rows, rows, c.shape[1], ratio, wrong)[:, None]
    far = (entry < closed).expand(len(q), -1, -1)
    if args.get("sparse_indices") is not None:
        lists = args["sparse_indices"][:, :, 0].long()
        read = (lists >= 0).cumprod(-1).bool() & (torch.arange(lists.shape[-1]) < closed)
        marked = torch.zeros(*lists.shape[:2], c.shape[1] + 1, dtype=torch.bool)
        far = far & marked.scatter_(-1, lists.where(read, c.shape[1]), True)[..., :-1]
    visible = torch.cat((near.expand(len(q), -1, -1), far), -1)[:, None]
    every = torch.cat((k, c), 1)[:, :, 0]
    scores = (scale * torch.einsum("bshd,bjd->bhsj", q, every)).masked_fill(~visible, -math.inf)
    sinks = args["sinks"].double().view(1, -1, 1, 1).expand(len(q), -1, rows, 1)
    with_sink = torch.cat((scores, sinks), -1)
    out = torch.einsum("bhsj,bjd->bshd", with_sink.softmax(-1)[..., :-1], every)
    counted = scores if wrong == "lse-sink" else with_sink
    top = counted.amax(-1)
    total = (counted - top[..., None]).exp().sum(-1)
    results = {"attention_out": out.to(args["query"].dtype)}
    return results | {n: t.mT[:, None].float() for n, t in (("softmax_max", top), ("softmax_sum", total))}


def chosen(args: dict[str, Any], wrong: str = "") -> Results:
    """sparse_indices_out and sparse_values_out of whole sequences."""
    q, k, w = (args[name].double() for name in ("query", "key", "weights"))
    scores = (w[..., None] * torch.einsum("bshd,bjd->bshj", q, k[:, :, 0]).relu()).sum(2)
    rows, count = q.shape[1], args["sparse_count"]
    closed = closed_keys(rows, rows, k.shape[1], args["ratio"], wrong)[:, None]
    scores = scores.masked_fill(torch.arange(k.shape[1]) >= closed, -math.inf)
    scores = torch.nn.functional.pad(scores, (0, max(0, count - k.shape[1])), value=-math.inf)
    values, indices = scores.sort(dim=-1, descending=True, stable=True)
    indices = indices.masked_fill(values == -math.inf, -1)[..., :count]
    dtype = args["query"].dtype
    return {"sparse_indices_out": indices[:, :, None].int(), "sparse_values_out": values[:, :, None, :count].to(dtype)}
