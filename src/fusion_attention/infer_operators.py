"""Decoding as an operator that torch sees in a trace, as operators.py for the dense ones.

It takes a call as it was made: caches as lists of tensors, the rest as operators.py does. Nothing is differentiable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fusion_attention.contract import Op, Tensors, bind
from fusion_attention.operators import Given, _no_vmap, _read, _unpack, pack
from fusion_attention.ops import RECORDS, decode_attention
from fusion_attention.plan import compute

Tensor = torch.Tensor

_LIBRARY = torch.library.Library("fusion_attention", "FRAGMENT")
_CALL = "Tensor[] keys, Tensor[] values, Tensor?[] tensors, Tensor?[] arrays, SymInt[] ints, float[] floats, str call"
_LIBRARY.define(f"infer_fwd({_CALL}) -> Tensor[]")


@torch.compiler.assume_constant_result
def _lists(op: str) -> tuple[str, ...]:
    """The canonical names of keys and values."""
    return tuple(p.name for p in RECORDS[op].params if isinstance(p, Tensors))


def _listed(value: Any) -> list[Tensor]:
    return [] if value is None else [value] if isinstance(value, Tensor) else list(value)


def _arguments(
    keys: Sequence[Tensor], values: Sequence[Tensor], tensors: Given, arrays: Given, ints: Any, floats: Any, call: str
) -> tuple[Op, str, dict[str, Any]]:
    """(record, back end, arguments by canonical name)."""
    text = _read(call)
    args = _unpack(tensors, arrays, ints, floats, text)
    args |= {name: tuple(given) or None for name, given in zip(_lists(text.op.name), (keys, values), strict=True)}
    return text.op, text.backend, args


def _forward(*values: Any) -> list[Tensor]:
    op, backend, args = _arguments(*values)
    assert op.lower is not None
    call = op.lower(bind(op, args))
    results: dict[str, Tensor] = call.results()
    compute(call, results, backend)
    return list(results.values())


def _forward_fake(keys: Any, values: Any, tensors: Given, arrays: Given, ints: Any, floats: Any, call: str) -> Any:
    op, _, args = _arguments(keys, values, tensors, arrays, ints, floats, call)
    given = [t for t in (*keys, *values, *tensors) if t is not None]
    known = not any(isinstance(size, torch.SymInt) for t in given for size in (*t.shape, *t.stride()))
    if known and all(t is None for t in arrays):
        bind(op, args, reads=False)  # What is wrong with the call; lengths and content wait until it runs.
    q = args["q"] if op is decode_attention.RECORD else args["query"]
    if op is not decode_attention.RECORD:
        return [q.new_empty(q.shape, dtype=q.dtype if args.get("quant_scale2") is None else torch.int8)]
    dim_v = args.get("dim_v") or _elements(values[0], keys[0], q)
    out = q.new_empty((*q.shape[:-1], dim_v), dtype=q.dtype if args.get("out_scale") is None else torch.int8)
    rows = (q.shape[2], q.shape[1]) if args.get("layout", "BSND") == "BSND" else (q.shape[1], q.shape[2])
    stats = torch.float64 if q.dtype == torch.float64 else torch.float32
    return [out, *(q.new_empty((q.shape[0], *rows), dtype=stats) for _ in range(2))]


def _elements(value: Tensor, key: Tensor, q: Tensor) -> Any:
    """Of a value row; two to a byte where it is uint8, as many as a key row's where it has as many bytes."""
    if value.shape[-1] == key.shape[-1]:
        return q.shape[-1]
    return value.shape[-1] * (2 if value.dtype == torch.uint8 else 1)


def _forward_autograd(*values: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.fusion_attention.infer_fwd(*values)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("infer_fwd", _forward, _key)
torch.library.register_fake("fusion_attention::infer_fwd", _forward_fake, lib=_LIBRARY)
_LIBRARY.impl("infer_fwd", _forward_autograd, "Autograd")
_LIBRARY.impl("infer_fwd", _no_vmap, "FuncTorchBatched")


def forward(op: Op, args: Mapping[str, Any], backend: str = "auto") -> list[Tensor]:
    """Every result of a call by canonical name, in the record's order."""
    lists = _lists(op.name)
    given, arrays, ints, floats, _, call = pack(
        op.name, {name: value for name, value in args.items() if name not in lists}, backend=backend
    )
    caches = (_listed(args.get(name)) for name in lists)
    results: list[Tensor] = torch.ops.fusion_attention.infer_fwd(*caches, given, arrays, ints, floats, call)
    return results
