"""What makes two calls one signature: shapes, strides, dtypes, devices, attributes; and the bytes of their lengths.

The native core reads them, without a Python frame for each. Where it cannot be loaded, Python does: slower, and alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from fusion_attention.contract.arguments import lost, members, to_array
from fusion_attention.contract.expressions import lazy
from fusion_attention.contract.record import Array, Attr, Op, Tensor, Tensors

# A key that signatures are found by, or None where a value cannot be part of one; the bytes of each list of integers
# that came, or None where one has another form than usual; whether the storages of all tensors hold them.
Reading = tuple[Any, tuple[bytes, ...] | None, bool]
Reader = Callable[[Mapping[str, Any], bool, bool], Reading]

_KINDS = {Attr: "a", Tensor: "t", Tensors: "s", Array: "i"}


def reader(op: Op) -> Reader:
    """What reads the arguments of an operator's calls: from a dictionary by canonical name, strictness, and whether
    tensors that rules ask about may wait for gradients."""
    try:
        from fusion_attention import _native
    except ImportError:
        return python_reader(op)
    watched = tuple(i in op.watched for i in range(len(op.params)))
    types, integers = (torch.Tensor, torch.nn.Parameter), (torch.int64, torch.int32)
    return _native.Signature(op.names, "".join(_KINDS[type(p)] for p in op.params), watched, types, integers).read


def python_reader(op: Op) -> Reader:
    """reader() without the native core."""

    def read(args: Mapping[str, Any], strict: bool, grad: bool) -> Reading:
        key: list[Any] = [strict, grad]
        content: list[Any] = []
        given: list[torch.Tensor] = []
        try:
            for i, p in enumerate(op.params):
                value = args.get(p.name)
                tensors: tuple[Any, ...] = ()
                if value is None or isinstance(p, Attr):
                    key += [value, type(value)]  # True == 1 == 1.0, but not all of them are legal.
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
        except Exception:  # No tensor, no strides (sparse, nested), no hash (symbols of a trace have none).
            return None, None, True
        return results, None if None in content else tuple(content), not any(map(lost, given))

    return read
