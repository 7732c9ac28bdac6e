"""lightning_indexer() for rows that say how many keys they see.

Rows become sequences of one row over shared pages: a page holds the keys of a batch element, so nothing is copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fusion_attention.contract import ContractError, Failure, show
from fusion_attention.ops.indexer import fa_record as indexer
from fusion_attention.torch_ops import dispatch, traced

Tensor = torch.Tensor
_NAME = indexer.RECORD.name
_TRAINED = ("query", "key", "weights")
_ALONE = {"layout": "BSND", "actual_seq_qlen": None, "actual_seq_kvlen": None, "ratio": 1, "residual": None}
_ALONE["block_table"] = None


def choose_visible(args: Mapping[str, Any], visible: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """(indices, values), differentiable as lightning_indexer()'s; args: by the record's names."""
    q, k, weights = (args[name] for name in _TRAINED)
    if not all(isinstance(t, torch.Tensor) and t.dim() == axes for t, axes in ((q, 4), (k, 4), (weights, 3))):
        dispatch.results(indexer.RECORD, args, backend)  # raises: the record says what is wrong
    _check(args, visible)
    batch, rows = q.shape[:2]
    pages = torch.arange(batch, dtype=torch.int32, device=q.device).repeat_interleave(rows)
    given = {
        **args,
        "query": q.detach().flatten(0, 1).unsqueeze(1),
        "key": k.detach(),
        "weights": weights.detach().flatten(0, 1).unsqueeze(1),
        "actual_seq_kvlen": visible.reshape(-1),
        "causal": False,
        "block_table": pages.unsqueeze(1),
    }
    results_by_name = dispatch.results(indexer.RECORD, given, backend)
    indices, values = (
        results_by_name[name].reshape(*q.shape[:2], 1, -1) for name in ("sparse_indices_out", "sparse_values_out")
    )
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or weights.requires_grad):
        values = _Values.apply(backend, indices, values, q, k, weights)
    return indices, values


def _check(args: Mapping[str, Any], visible: Tensor) -> None:
    """Raises where the call is not one of padded rows, or the counts are not of its rows."""
    for name, value in _ALONE.items():
        if args[name] is not value and not (value is not None and args[name] == value):
            raise _refusal(name, "none beside visible" if value is None else f"{value!r} beside visible", args[name])
    q, k = args["query"], args["key"]
    if not isinstance(visible, torch.Tensor) or visible.dtype not in (torch.int32, torch.int64):
        raise _refusal("visible", "an int32 or int64 tensor", getattr(visible, "dtype", visible))
    if visible.shape != q.shape[:2]:
        raise _refusal("visible", f"shape [B, S1] = {list(q.shape[:2])}", list(visible.shape))
    if k.shape[0] != q.shape[0]:
        raise _refusal("key", f"{q.shape[0]} batch elements, as q", k.shape[0])
    if dispatch.is_traced((visible,)) or visible.is_meta or not visible.numel():
        return  # in a trace the operator checks them as lengths when it runs
    least, most = int(visible.min()), int(visible.max())
    if least < 0 or most > k.shape[1]:
        raise _refusal("visible", f"0 to {k.shape[1]} keys", f"{least} to {most}")


def _refusal(name: str, expected: str, got: Any) -> ContractError:
    param = indexer.RECORD.by_name.get(name)
    return ContractError([Failure(_NAME, param.shown if param else name, expected, show(got))])


class _Values(torch.autograd.Function):
    """Values of chosen keys, with the gradients of a call that sees all keys: they depend on the indices alone."""

    @staticmethod
    def forward(ctx: Any, backend: str, indices: Tensor, values: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(indices, values, *tensors)
        ctx.backend = backend
        return values.view_as(values)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dvalues: Tensor) -> Any:
        indices, values, *tensors = ctx.saved_tensors
        args = {**_ALONE, **dict(zip(_TRAINED, tensors, strict=True)), "causal": False}
        args["sparse_count"] = values.shape[-1]
        results = dict(zip(indexer.RECORD.results, (indices, values), strict=True))
        upstream = {indexer.RECORD.results[1]: dvalues}
        gradients = traced.gradients(indexer.RECORD, args, results, upstream, ctx.backend)
        return None, None, None, *(gradients[name] for name in _TRAINED)
