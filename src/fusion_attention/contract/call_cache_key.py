"""Signatures of calls: shapes, strides, dtypes, devices and attributes, the key under which validation is cached.

The native core computes them, or an equivalent Python function if the core cannot be loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from fusion_attention.contract.argument_checks import lost, members, to_array
from fusion_attention.contract.expressions import lazy
from fusion_attention.contract.record import Array, Attr, Op, Tensor, Tensors

# The result of reading a call: (key of the signature, None if a value is not hashable; bytes of each given list of
# integers, None if a list is empty or has other elements; True if the storages of all tensors are large enough).
Reading = tuple[Any, tuple[bytes, ...] | None, bool]
Reader = Callable[[Mapping[str, Any], bool, bool], Reading]

_KINDS = {Attr: "a", Tensor: "t", Tensors: "s", Array: "i"}


def reader(op: Op) -> Reader:
    """Returns the function that computes the signature (shapes, strides, dtypes, attributes) of an operator's calls.

    Its arguments are the call's arguments by parameter name, `strict`, and True if the signature must contain which
    tensors require gradients.
    """
    try:
        from fusion_attention import _native
    except ImportError:
        return python_reader(op)
    watched = tuple(i in op.watched for i in range(len(op.params)))
    types, integers = (torch.Tensor, torch.nn.Parameter), (torch.int64, torch.int32)
    return _native.Signature(op.names, "".join(_KINDS[type(p)] for p in op.params), watched, types, integers).read


def python_reader(op: Op) -> Reader:
    """Returns a Python function that computes the signatures of an operator's calls, if there is no native core."""

    def read(args: Mapping[str, Any], strict: bool, grad: bool) -> Reading:
        key: list[Any] = [strict, grad]
        content: list[Any] = []
        given: list[torch.Tensor] = []
        try:
            for i, p in enumerate(op.params):
                value = args.get(p.name)
                tensors: tuple[Any, ...] = ()
                if value is None or isinstance(p, Attr):
                    key += [value, type(value)]  # with the type, because True == 1 == 1.0, but not all are legal
                elif isinstance(p, Array):
                    key.append(Array)
                    array = to_array(value)
                    content.append(array.tobytes() if isinstance(array, np.ndarray) and array.size else None)
                else:
                    tensors = members(value)
                    if type(tensors) is not tuple:
                        return None, None, True
                    key.append(len(tensors))
                for t in tensors:
                    waits = grad and i in op.watched and t.requires_grad
                    key += [(type(t), t.shape, t.dtype, t.stride(), t.device, lazy(t), waits)]
                given += tensors
            results = tuple(key)
            hash(results)
        except Exception:  # Not a tensor, no strides (sparse, nested), or no hash (symbolic sizes of a trace).
            return None, None, True
        return results, None if None in content else tuple(content), not any(map(lost, given))

    return read
