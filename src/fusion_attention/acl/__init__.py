"""CANN's runtime for Huawei's Ascend chips, emulated: memory, tensors, streams and planned operator calls (executors).

Names and returns follow pyACL, Huawei's Python binding: functions return ret (error code, 0 for success) or (value,
ret). Functions that only C has are named after it. Constants of CANN's enums are attributes, such as acl.ACL_FLOAT16.
"""

from typing import Any

import torch

from fusion_attention.acl import rt, state, util
from fusion_attention.acl.executor import (
    Executor,
    destroy_acl_op_executor,
    set_acl_op_executor_repeatable,
    set_input_tensor_addr,
    set_output_tensor_addr,
    set_tensor_addr,
)
from fusion_attention.acl.rt import MallocPolicy, MemcpyKind, RunMode
from fusion_attention.acl.state import STATE, Context, State, Stream
from fusion_attention.acl.tensors import (
    DataType,
    Format,
    IntArray,
    Tensor,
    TensorList,
    create_int_array,
    create_tensor,
    create_tensor_list,
    destroy_int_array,
    destroy_tensor,
    destroy_tensor_list,
)
from fusion_attention.backends import BACKENDS

__all__ = [
    "ACL_SUCCESS",
    "Context",
    "DataType",
    "Executor",
    "Format",
    "IntArray",
    "Stream",
    "Tensor",
    "TensorList",
    "create_int_array",
    "create_tensor",
    "create_tensor_list",
    "destroy_acl_op_executor",
    "destroy_int_array",
    "destroy_tensor",
    "destroy_tensor_list",
    "finalize",
    "get_recent_err_msg",
    "init",
    "rt",
    "set_acl_op_executor_repeatable",
    "set_input_tensor_addr",
    "set_output_tensor_addr",
    "set_tensor_addr",
    "util",
]

ACL_SUCCESS = state.SUCCESS
_ENUMS = (DataType, Format, MemcpyKind, MallocPolicy, RunMode)


def __getattr__(name: str) -> Any:
    for enum in _ENUMS:
        if name in enum.__members__:
            return enum[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def init(config_path: str | None = None, *, device: str | torch.device = "cpu", backend: str = "auto") -> int:
    """Initializes the emulated CANN runtime of this process; every other function of `acl` requires it.

    Args:
        config_path: accepted without effect.
        device: the device of the ids 0 to 7: "cpu", or "cuda" if there is one.
        backend: "auto", or a back end's name ("golden" for the reference).

    Returns:
        ret: 0; 100002 if it already was initialized, 207004 for a missing device, 100000 for an unknown back end.

    Example:
        >>> init(), init(), finalize()
        (0, 100002, 0)
    """
    if STATE.device is not None:
        state.note("acl: init: called before; acl.finalize() ends the running one")
        return state.REPEAT_INITIALIZE
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        state.note(f"acl: device: {str(error).splitlines()[0]}")
        return state.RT_NO_DEVICE
    if chosen.type not in ("cpu", "cuda") or (chosen.type == "cuda" and not torch.cuda.is_available()):
        state.note(f"acl: device: expected cpu, or cuda where torch sees one, got {device!r}")
        return state.RT_NO_DEVICE
    if backend not in ("auto", *BACKENDS):
        state.note(f"acl: backend: expected auto, {', '.join(BACKENDS)}, got {backend!r}")
        return state.INVALID_PARAM
    _reset()
    if str(chosen) == "cuda":  # no index given
        chosen = torch.device("cuda", torch.cuda.current_device())
    STATE.device, STATE.backend = chosen, backend
    return state.SUCCESS


def finalize() -> int:
    """Ends the emulated CANN runtime of this process: closes contexts and streams, and frees memory. Returns 0, or an
    error code: 100037 if it was already ended, 100001 if it was never initialized."""
    if STATE.device is None:
        state.note("acl: finalize: called twice, or before acl.init()")
        return state.REPEAT_FINALIZE if STATE.finalized else state.UNINITIALIZED
    _reset()
    STATE.finalized = True
    return state.SUCCESS


def _reset() -> None:
    for contexts in STATE.contexts.values():
        for context in contexts:
            context.open = False
    for memory in STATE.memories.values():
        memory.alive = False
    fresh = State(local=STATE.local)
    STATE.__dict__.update(fresh.__dict__)


def get_recent_err_msg() -> str:
    """The error text of this thread's last failed call, or ""; reading it clears it.

    Example:
        >>> finalize() in (100001, 100037), get_recent_err_msg()
        (True, 'acl: finalize: called twice, or before acl.init()')
        >>> get_recent_err_msg()
        ''
    """
    return state.take_note()
