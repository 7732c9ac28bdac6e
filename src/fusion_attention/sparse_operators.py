"""Sparse attention and the indexer as operators that torch sees in a trace, as operators.py for the dense ones.

They take a call as it was made: tensors, lengths as int64 tensors, and one line of text for the rest. Checking,
lowering and planning happen inside, when the operator runs.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.function import _SingleLevelFunction, once_differentiable

from fusion_attention import sparse_autograd
from fusion_attention.contract import Attr, Op, bind
from fusion_attention.operators import no_vmap
from fusion_attention.ops import RECORDS
from fusion_attention.ops.indexer_lower import Backward as IndexerBackward
from fusion_attention.ops.indexer_lower import Forward as IndexerForward
from fusion_attention.ops.indexer_lower import indexer_call
from fusion_attention.ops.sparse_lower import (
    DIFFERENTIABLE,
    GRADIENTS,
    OTHERS,
    STATISTICS,
    Backward,
    Forward,
    sparse_call,
)

Tensor = torch.Tensor
Tensors = tuple[Tensor, ...]
LENGTHS = ("actual_seq_qlen", "actual_seq_kvlen")
_SPARSE = (*DIFFERENTIABLE, *OTHERS, *LENGTHS)
_INDEXER = ("query", "key", "weights", "block_table", *LENGTHS)
_SAVED = ("dy", "attention_in", *STATISTICS)

_LIBRARY = torch.library.Library("fusion_attention", "FRAGMENT")
_INPUTS = "Tensor query, Tensor key, Tensor? value, Tensor? query_rope, Tensor? key_rope, Tensor? sinks, "
_INPUTS += "Tensor sparse_indices, Tensor? block_table, Tensor? actual_seq_qlen, Tensor? actual_seq_kvlen"
_INDEXER_INPUTS = "Tensor query, Tensor key, Tensor weights, Tensor? block_table, Tensor? actual_seq_qlen, "
_INDEXER_INPUTS += "Tensor? actual_seq_kvlen"
_LIBRARY.define(f"sparse_fwd({_INPUTS}, str call) -> (Tensor out, Tensor max, Tensor sum)")
_LIBRARY.define(f"sparse_bwd(Tensor dout, Tensor out, Tensor max, Tensor sum, {_INPUTS}, str call) -> Tensor[]")
_LIBRARY.define(f"indexer_fwd({_INDEXER_INPUTS}, str call) -> (Tensor indices, Tensor values)")
_LIBRARY.define(f"indexer_bwd(Tensor dvalues, Tensor indices, {_INDEXER_INPUTS}, str call) -> Tensor[]")


@torch.compiler.assume_constant_result
def _attributes(op: str) -> tuple[str, ...]:
    """The canonical names of a record's attributes."""
    return tuple(p.name for p in RECORDS[op].params if isinstance(p, Attr))


def _pack(op: str, args: Mapping[str, Any], names: tuple[str, ...], backend: str) -> tuple[Any, ...]:
    """The arguments of an operator: tensors, lengths as tensors, and the line of text."""
    words = {name: args[name] for name in _attributes(op) if args.get(name) is not None}
    given = [args.get(name) for name in names]
    for name, value in zip(names, given, strict=True):
        if value is not None and name not in LENGTHS and not isinstance(value, torch.Tensor):
            raise TypeError(f"{op}: {name}: expected a tensor, got {type(value)}")
    tensors = [torch.tensor(value, dtype=torch.int64) if isinstance(value, (list, tuple)) else value for value in given]
    return *tensors, f"{op};{backend};{words!r}"


def _unpack(names: tuple[str, ...], values: tuple[Any, ...], call: str) -> tuple[Op, str, dict[str, Any]]:
    """(record, back end, arguments by canonical name)."""
    op, backend, words = call.split(";", 2)
    return RECORDS[op], backend, {**ast.literal_eval(words), **dict(zip(names, values, strict=True))}


def _check(op: Op, args: dict[str, Any]) -> None:
    """What is wrong with a call, while it is traced; sizes that are symbols, lengths and content wait."""
    tensors = [t for t in args.values() if isinstance(t, torch.Tensor)]
    known = not any(isinstance(size, torch.SymInt) for t in tensors for size in (*t.shape, *t.stride()))
    if known and all(args[name] is None for name in LENGTHS):
        bind(op, args, reads=False)


# ---------------------------------------------------------------------------------------------------- sparse attention


def _sparse_forward(*values: Any) -> Tensors:
    op, backend, args = _unpack(_SPARSE, values[:-1], values[-1])
    call = sparse_call(bind(op, args))
    results = sparse_autograd.run(Forward(sparse_autograd.with_statistics(call)), backend)
    return tuple(results.values())


def _sparse_forward_fake(*values: Any) -> Tensors:
    op, _, args = _unpack(_SPARSE, values[:-1], values[-1])
    _check(op, args)
    q, k, v = (args[name] for name in DIFFERENTIABLE[:3])
    heads, own = k.shape[-2], args.get("dim_v") or k.shape[-1]
    out = q.new_empty((*q.shape[:-1], own if v is None else v.shape[-1]))
    packed = args.get("layout", "BSND") == "TND"
    rows = (heads, q.shape[0]) if packed else (q.shape[0], heads, q.shape[1])
    stats = torch.float64 if q.dtype == torch.float64 else torch.float32
    max_, sum_ = (q.new_empty((*rows, q.shape[-2] // heads), dtype=stats) for _ in range(2))
    return out, max_, sum_


def _sparse_backward(dout: Tensor, out: Tensor, max_: Tensor, sum_: Tensor, *values: Any) -> list[Tensor]:
    op, backend, args = _unpack(_SPARSE, values[:-1], values[-1])
    saved = (dout, out, max_, sum_)
    if _SAVED[0] in op.by_name:
        args |= dict(zip(_SAVED, saved, strict=True))
    grads = sparse_autograd.run(Backward(sparse_call(bind(op, args)), *saved), backend)
    return [grads.get(name, dout.new_empty(0)) for name in GRADIENTS]


def _sparse_backward_fake(dout: Tensor, out: Tensor, max_: Tensor, sum_: Tensor, *values: Any) -> list[Tensor]:
    _, _, args = _unpack(_SPARSE, values[:-1], values[-1])
    given = [args[name] for name in DIFFERENTIABLE]
    return [dout.new_empty(0) if t is None else t.new_empty(t.shape) for t in given]


class _Sparse(_SingleLevelFunction):  # torch.func brings the level itself
    @staticmethod
    def forward(ctx: Any, *values: Any) -> Tensors:
        with torch._C._AutoDispatchBelowAutograd():
            results: Tensors = torch.ops.fusion_attention.sparse_fwd(*values)
        ctx.save_for_backward(*results, *values[:-1])
        ctx.call = values[-1]
        ctx.mark_non_differentiable(*results[1:])
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Any, *_: Any) -> Any:
        wanted = ctx.needs_input_grad
        gradients: list[Any] = [None] * len(wanted)
        if dout is not None:
            out, max_, sum_, *values = ctx.saved_tensors
            grads = torch.ops.fusion_attention.sparse_bwd(dout, out, max_, sum_, *values, ctx.call)
            gradients[: len(grads)] = [g if need else None for g, need in zip(grads, wanted, strict=False)]
        return tuple(gradients)


# ------------------------------------------------------------------------------------------------------------- indexer


def _indexer_forward(*values: Any) -> Tensors:
    op, backend, args = _unpack(_INDEXER, values[:-1], values[-1])
    call = indexer_call(bind(op, args))
    indices, *scores = sparse_autograd.run(IndexerForward(call), backend).values()
    return indices, scores[0] if scores else call.query.new_empty(0)


def _indexer_forward_fake(*values: Any) -> Tensors:
    op, _, args = _unpack(_INDEXER, values[:-1], values[-1])
    _check(op, args)
    q = args["query"]
    shape = (*q.shape[:-2], 1, args["sparse_count"])
    returned = args.get("return_values", "return_values" not in op.by_name)
    return q.new_empty(shape, dtype=torch.int32), q.new_empty(shape if returned else (0,))


def _indexer_backward(dvalues: Tensor, indices: Tensor, *values: Any) -> list[Tensor]:
    op, backend, args = _unpack(_INDEXER, values[:-1], values[-1])
    if "dy" in op.by_name:
        args |= {"dy": dvalues, "sparse_indices": indices}
    call = IndexerBackward(indexer_call(bind(op, args)), dvalues, indices)
    return list(sparse_autograd.run(call, backend).values())


def _indexer_backward_fake(dvalues: Tensor, indices: Tensor, *values: Any) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in values[:3]]


class _Indexer(_SingleLevelFunction):
    @staticmethod
    def forward(ctx: Any, *values: Any) -> Tensors:
        with torch._C._AutoDispatchBelowAutograd():
            indices, scores = torch.ops.fusion_attention.indexer_fwd(*values)
        ctx.save_for_backward(indices, *values[:-1])
        ctx.call = values[-1]
        ctx.mark_non_differentiable(indices)
        ctx.set_materialize_grads(False)
        return indices, scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Any, dvalues: Any) -> Any:
        wanted = ctx.needs_input_grad
        gradients: list[Any] = [None] * len(wanted)
        if dvalues is not None:
            indices, *values = ctx.saved_tensors
            grads = torch.ops.fusion_attention.indexer_bwd(dvalues, indices, *values, ctx.call)
            gradients[:3] = [g if need else None for g, need in zip(grads, wanted, strict=False)]
        return tuple(gradients)


def _with_derivative(function: Any, plain: str) -> Any:
    """The Autograd kernel of an operator: the function where a gradient is wanted, else the operator below."""

    def run(*values: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in values):
            with enable_single_level_autograd_function():
                return function.apply(*values)
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(torch.ops.fusion_attention, plain)(*values)

    return run


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("sparse_fwd", _sparse_forward, _key)
    _LIBRARY.impl("sparse_bwd", _sparse_backward, _key)
    _LIBRARY.impl("indexer_fwd", _indexer_forward, _key)
    _LIBRARY.impl("indexer_bwd", _indexer_backward, _key)
for _name, _fake in (
    ("sparse_fwd", _sparse_forward_fake),
    ("sparse_bwd", _sparse_backward_fake),
    ("indexer_fwd", _indexer_forward_fake),
    ("indexer_bwd", _indexer_backward_fake),
):
    torch.library.register_fake(f"fusion_attention::{_name}", _fake, lib=_LIBRARY)
    _LIBRARY.impl(_name, no_vmap, "FuncTorchBatched")
_LIBRARY.impl("sparse_fwd", _with_derivative(_Sparse, "sparse_fwd"), "Autograd")
_LIBRARY.impl("indexer_fwd", _with_derivative(_Indexer, "indexer_fwd"), "Autograd")


# --------------------------------------------------------------------------------------------------------------- faces


def attention(op: str, args: Mapping[str, Any], backend: str = "auto") -> Tensors:
    """(out, max, sum) of a forward record's call by canonical name."""
    found: Tensors = torch.ops.fusion_attention.sparse_fwd(*_pack(op, args, _SPARSE, backend))
    return found


def attention_gradients(op: str, args: Mapping[str, Any]) -> Tensors:
    """(dq, dk, dv, dq_rope, dk_rope) of a gradient record's call by canonical name; absent ones are empty."""
    saved = [args[name] for name in _SAVED]
    found = torch.ops.fusion_attention.sparse_bwd(*saved, *_pack(op, args, _SPARSE, "auto"))
    return tuple(found[:5])


def indexer(op: str, args: Mapping[str, Any], backend: str = "auto") -> Tensors:
    """(indices, values) of a forward record's call by canonical name; values are empty where they are not wanted."""
    found: Tensors = torch.ops.fusion_attention.indexer_fwd(*_pack(op, args, _INDEXER, backend))
    return found


def indexer_gradients(op: str, args: Mapping[str, Any]) -> Tensors:
    """(dq, dk, dweights) of a gradient record's call by canonical name."""
    saved = args["dy"], args["sparse_indices"]
    return tuple(torch.ops.fusion_attention.indexer_bwd(*saved, *_pack(op, args, _INDEXER, "auto")))
