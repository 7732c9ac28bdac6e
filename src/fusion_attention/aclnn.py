"""CANN's two-phase operators as Python functions: aclnnXxxGetWorkspaceSize(...) checks and plans, aclnnXxx(...) runs.

Functions return codes (0 is success) and raise no exceptions. Each function is made from its operator's definition on
first use, with CANN's parameters in CANN's order. Phase 1 returns an executor, which holds the planned call; phase 2
takes it, and address and size of the memory that it may use as workspace.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fusion_attention import acl, contract
from fusion_attention.acl import rt, state
from fusion_attention.acl.state import STATE, Refusal
from fusion_attention.acl.two_phase_call import (
    Job,
    Options,
    check_disjoint,
    handles,
    job_of,
    layout_of,
    may_lack,
    refusal,
)
from fusion_attention.ops import RECORDS

SUCCESS = state.SUCCESS
INNER, NO_KERNEL = 561000, 561003
OPERATORS = {name: op for name, op in RECORDS.items() if name.startswith("aclnn")}
PHASE_1 = "GetWorkspaceSize"

__all__ = [name + phase for name in OPERATORS for phase in (PHASE_1, "")]


# ------------------------------------------------------------------------------------------------------------ phase 1


def _first(
    op: contract.Op, values: tuple[Any, ...], strict: bool, check_content: bool
) -> tuple[int, int, acl.Executor | None]:
    """Runs phase 1 of a CANN operator (check and plan) on `values`, its arguments in order; returns (error code, bytes
    of workspace that phase 2 needs, the planned call or None).

    strict: True: the chip's limits are errors; check_content: True: phase 2 checks the values in tensors too.
    """
    try:
        if STATE.device is None:
            raise Refusal(contract.RUNTIME, f"{op.name}: called before acl.init() or after acl.finalize()")
        executor = planned(op, values, Options(strict, check_content, STATE.device, STATE.backend))
        return SUCCESS, executor.workspace_size, executor
    except Exception as error:
        return _code(op, error), 0, None


def planned(op: contract.Op, values: tuple[Any, ...], options: Options) -> acl.Executor:
    """Checks and plans an operator call (phase 1 of CANN's interface), and returns the planned call for phase 2.

    Args:
        values: the arguments in the order of the operator definition.

    Raises:
        Exception: any error; failure() converts it to a code and a text.
    """
    job = _prepare(op, values, options)
    return acl.Executor(op, job.layout.workspace, values, options, job)


def _code(op: contract.Op, error: Exception) -> int:
    """Returns CANN's code of an error in a call of `op`, and stores its text for acl.get_recent_err_msg()."""
    if isinstance(error, contract.ContractWarning):
        raise error  # The caller's warning filter turns warnings into exceptions.
    code, text = failure(op, error)
    state.note(text)
    return code


def failure(op: contract.Op, error: Exception) -> tuple[int, str]:
    """Returns (CANN's error code, text) of any exception in a call of `op`, as C programs cannot catch exceptions."""
    code, text = INNER, f"{op.name}: {type(error).__name__}: {error}"
    if isinstance(error, (contract.ContractError, Refusal)):
        code, text = error.code, str(error)
    elif isinstance(error, contract.BackendError):
        code = NO_KERNEL
    elif isinstance(error, MemoryError) or "memory" in str(error):
        code = contract.RUNTIME
    return code, text


def _prepare(op: contract.Op, values: tuple[Any, ...], options: Options) -> Job:
    """Checks and plans an operator call, and returns the Job that computes it on the memory of its tensors; values: the
    arguments in the order of the operator definition."""
    args = _arguments(op, values)
    # Tensor content is read in phase 2, because it may be written after phase 1.
    bound = contract.bind(op, args, strict=options.strict, reads=False)
    assert op.lower is not None
    call = op.lower(bound)
    layouts = bound.call_cache.two_phase
    layout = layouts.get((options.backend, options.device))
    if layout is None:
        layout = layouts[options.backend, options.device] = layout_of(bound, call, args, options)
    check_disjoint(op, values, layout)
    return job_of(layout, call, args)


def _arguments(op: contract.Op, values: tuple[Any, ...]) -> dict[str, Any]:
    """Returns the arguments by the operator definition's parameter names, with acl handles converted to torch tensors
    and int64 arrays; values: the arguments in order."""
    args = op.named(values)
    for i in op.positions[contract.Tensor]:
        value = values[i]
        if value is not None:
            args[op.params[i].name] = _view(op, i, value)
    for i in op.positions[contract.Tensors]:
        value = values[i]
        if type(value) is acl.TensorList and value.tensors is None:
            raise refusal(op, op.params[i].shown, "a live tensor list", "a destroyed one")
        if value is not None:
            args[op.params[i].name] = tuple([_view(op, i, tensor) for tensor in handles(value)])
    for i in may_lack(op):
        view = args[op.params[i].name]
        if view is not None and view.dim() < 2 and (view.dim() == 0 or view.numel() == 0):
            args[op.params[i].name] = None  # An empty tensor counts as absent.
    for i in op.positions[contract.Array]:
        value, p = values[i], op.params[i]
        if isinstance(value, acl.IntArray):
            if value.values is None:
                raise refusal(op, p.shown, "a live int array", "a destroyed one")
            args[p.name] = value.values
        elif type(value) is acl.Tensor:
            args[p.name] = _integers(op, i, _view(op, i, value))
        elif value is not None:
            if not isinstance(value, (list, tuple, np.ndarray)):
                raise refusal(op, p.shown, "an acl.IntArray, an acl.Tensor, a list or None", contract.show(value))
            args[p.name] = contract.to_array(value)
    return args


def _view(op: contract.Op, position: int, value: Any) -> torch.Tensor:
    """Returns the torch tensor of the acl.Tensor `value`, the argument at `position`; raises Refusal if it was
    destroyed or is not row-major."""
    if (
        type(value) is acl.Tensor
        and value.view is not None
        and value.memory.alive
        and value.is_strided
        and not value.lost
    ):
        return value.view
    raise _no_tensor(op, op.params[position].shown, value)


def _integers(op: contract.Op, position: int, view: torch.Tensor) -> Any:
    """Returns the integers in `view`, the tensor of the argument at `position`, as an int64 array; None if it is empty,
    which counts as absent."""
    return contract.array_of(op, position, view if view.dim() else view.new_empty(0))


def _no_tensor(op: contract.Op, param: str, value: Any) -> Refusal:
    if not isinstance(value, acl.Tensor):
        advice = " (acl.Tensor.of(tensor) makes one)" if isinstance(value, torch.Tensor) else ""
        return refusal(op, param, "an acl.Tensor or None", contract.show(value) + advice)
    if not value.alive:
        return refusal(op, param, "a live tensor", "one destroyed, or whose memory was freed")
    if value.lost:
        return _lost(op, param, value)
    return refusal(op, param, "a plain format", value.format.name, "ACL_FORMAT_ND")


def _lost(op: contract.Op, param: str, value: acl.Tensor, code: int = contract.INVALID) -> Refusal:
    assert value.view is not None
    got = f"one of {value.view.untyped_storage().nbytes()}"
    advice = "it was resized under the handle"
    return refusal(op, param, f"a storage that holds its elements, {value.needs} bytes", got, advice, code)


# ------------------------------------------------------------------------------------------------------------ phase 2


def _second(op: contract.Op, workspace: Any, workspace_size: Any, executor: Any, stream: Any) -> int:
    """Runs phase 2 of a CANN operator: checks arguments, and runs the planned call (executor); returns an error
    code."""
    try:
        ready = _check_executor(op, executor)
        _check_stream(op, stream)
        _check_workspace(op, workspace, workspace_size, ready.workspace_size)
        job = due(ready)
        ready.used = True
        if not ready.repeatable:
            ready.end()
        job.run()
    except Exception as error:
        return _code(op, error)
    return SUCCESS


def due(executor: acl.Executor) -> Job:
    """Returns the Job that computes a planned call on its tensors' current memory; checks the values in tensors.

    Raises:
        Exception: any error, which failure() converts to CANN's error code; no output was written.
    """
    op, job, options = executor.op, executor.job, executor.options
    if _moved(op, job, executor.values):
        # Int arrays were read in phase 1, and may have been destroyed since.
        pairs = zip(op.params, executor.values, strict=True)
        values = tuple(job.args[p.name] if type(v) is acl.IntArray else v for p, v in pairs)
        job = executor.job = _prepare(op, values, options)
    if options.check_content or job.layout.reads:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", contract.ContractWarning)  # Phase 1 issued them.
            contract.bind(op, job.args, strict=options.strict, check_content=options.check_content)
    return job


def _moved(op: contract.Op, job: Job, values: tuple[Any, ...]) -> bool:
    """True if the memory of an argument, or an array of lengths, changed since `job` was made; values: the arguments.

    Raises:
        Refusal: a tensor or list was destroyed.
    """
    moved = False
    for i, name in job.layout.given:
        value = values[i]
        if type(value) is acl.Tensor and value.view is job.args[name] and value.memory.alive and not value.lost:
            continue
        if type(value) is acl.TensorList and value.tensors is None:
            raise refusal(
                op, op.params[i].shown, "a live tensor list", "destroyed since phase 1", code=contract.RUNTIME
            )
        for tensor, view in zip(handles(value), contract.members(job.args[name]), strict=True):
            _check_there(op, i, tensor)
            moved = moved or tensor.view is not view
    return moved or any(_changed(op, i, values[i], job.args[op.params[i].name]) for i in op.positions[contract.Array])


def _check_there(op: contract.Op, position: int, tensor: acl.Tensor) -> None:
    """Raises Refusal if an acl.Tensor, the argument at `position`, was destroyed, or its memory was freed."""
    param = op.params[position].shown
    if not tensor.alive:
        text = "destroyed, or its memory freed, since phase 1"
        raise refusal(op, param, "a live tensor", text, code=contract.RUNTIME)
    if tensor.lost:
        raise _lost(op, param, tensor, contract.RUNTIME)


def _changed(op: contract.Op, position: int, value: Any, read: np.ndarray | None) -> bool:
    """True if `value`, the argument at `position`, is a tensor of lengths that differ from `read`, those of phase 1."""
    if type(value) is not acl.Tensor:
        return False
    _check_there(op, position, value)
    result = _integers(op, position, value.view)  # type: ignore[arg-type]
    return result is not read if result is None or read is None else not np.array_equal(result, read)


def _check_executor(op: contract.Op, executor: Any) -> acl.Executor:
    if STATE.device is None:
        raise Refusal(contract.RUNTIME, f"{op.name}: called before acl.init() or after acl.finalize()")
    if executor is None:
        raise refusal(op, "executor", f"what {op.name}{PHASE_1} returned", "None", code=contract.NULL_POINTER)
    if not isinstance(executor, acl.Executor):
        raise refusal(op, "executor", "an acl.Executor", type(executor).__name__)
    if executor.op is not op:
        raise refusal(op, "executor", f"one of {op.name}{PHASE_1}", f"one of {executor.op.name}{PHASE_1}")
    if executor.destroyed:
        how = "one that ran before" if executor.used and not executor.repeatable else "a destroyed one"
        advice = "plan again, or acl.set_acl_op_executor_repeatable(executor) before the first run"
        raise refusal(op, "executor", "one that has not run", how, advice, contract.RUNTIME)
    return executor


def _check_stream(op: contract.Op, stream: Any) -> None:
    try:
        rt.check_stream(stream)
    except Refusal as error:
        code = contract.INVALID if error.code == state.INVALID_PARAM else contract.RUNTIME
        raise Refusal(code, f"{op.name}: {error.text}") from None


def _check_workspace(op: contract.Op, workspace: Any, size: Any, needed: int) -> None:
    if isinstance(size, bool) or not isinstance(size, (int, np.integer)):
        raise refusal(op, "workspace_size", "an int", type(size).__name__)
    if not needed:
        return
    advice = f"phase 1 returned workspace_size={needed}"
    if workspace is None or (isinstance(workspace, int) and workspace == 0):
        raise refusal(op, "workspace", f"{needed} bytes of device memory", "None", advice, contract.RUNTIME)
    if size < needed:
        raise refusal(op, "workspace_size", f"at least {needed}", str(size), advice, contract.RUNTIME)
    if isinstance(workspace, torch.Tensor):
        available = workspace.numel() * workspace.element_size()
    elif isinstance(workspace, (int, np.integer)) and not isinstance(workspace, bool):
        try:
            memory, start = STATE.find(int(workspace))
        except Refusal as error:
            raise refusal(
                op, "workspace", f"{size} bytes of device memory", error.text, advice, contract.RUNTIME
            ) from None
        available = 0 if memory.host else memory.bytes.numel() - start
    else:
        raise refusal(op, "workspace", "an address or a torch tensor", type(workspace).__name__)
    if available < size:
        raise refusal(op, "workspace", f"{size} bytes of device memory", f"{available}", advice, contract.RUNTIME)


# ---------------------------------------------------------------------------------------------------------- functions


def _annotation(p: Any) -> Any:
    if isinstance(p, contract.Attr):
        return p.type
    if isinstance(p, contract.Tensors):
        return acl.TensorList | None
    return acl.IntArray | acl.Tensor | Sequence[int] | None if isinstance(p, contract.Array) else acl.Tensor | None


def _phase_1(op: contract.Op) -> Callable[..., Any]:
    """Returns the function aclnnXxxGetWorkspaceSize (phase 1) of an operator: it checks and plans a call; its
    parameters are those of the definition."""
    names = ", ".join(p.shown for p in op.params)
    head = f"{op.name}{PHASE_1}({names}, *, strict=True, check_content=False)"
    space: dict[str, Any] = {"_first": _first, "_op": op}
    # exec makes a function with a real signature, as dataclasses do; the names come from the operator definition, not
    # from a caller.
    exec(f"def {head}:\n    return _first(_op, ({names},), strict, check_content)", space)
    function: Callable[..., Any] = space[op.name + PHASE_1]
    function.__annotations__ = {p.shown: _annotation(p) for p in op.params} | {
        "strict": bool,
        "check_content": bool,
        "return": tuple[int, int, acl.Executor | None],
    }
    lines = "\n".join(f"    {p.shown}: {p.text}{' May be None.' if p.optional else ''}" for p in op.params)
    function.__doc__ = f"""{op.summary} Phase 1: checks and plans, and returns how much workspace phase 2 needs.

Args:
{lines}
    strict: calls beyond the chip's limits are errors too.
    check_content: phase 2 also checks the values in tensors.

Returns:
    (ret, workspace_size, executor): 0, the bytes that phase 2 needs, and its executor; after an error a code, 0, None.

Source: {op.page}.
"""
    return function


def _phase_2(op: contract.Op) -> Callable[..., Any]:
    """Returns the function aclnnXxx (phase 2) of an operator, which computes the call that phase 1 has planned."""

    def run(workspace: Any, workspace_size: int, executor: acl.Executor | None, stream: acl.Stream | None) -> int:
        return _second(op, workspace, workspace_size, executor, stream)

    run.__name__ = run.__qualname__ = op.name
    run.__doc__ = f"""{op.summary} Phase 2: runs what phase 1 planned, into its output tensors.

Args:
    workspace: address of device memory (or a torch tensor) of at least workspace_size bytes; None if that is 0.
    workspace_size: as phase 1 returned it, or more.
    executor: as phase 1 returned it; it runs once, unless acl.set_acl_op_executor_repeatable() made it repeatable.
    stream: from acl.rt.create_stream(); None: the default stream.

Returns:
    ret: 0; or an error's code, and acl.get_recent_err_msg() returns its text. Checks fail before anything is written.

Source: {op.page}.
"""
    return run


if TYPE_CHECKING:
    from fusion_attention._aclnn import *  # noqa: F403


def _entry(name: str) -> Any:
    op = OPERATORS.get(name.removesuffix(PHASE_1))
    if op is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    function = _phase_1(op) if name.endswith(PHASE_1) else _phase_2(op)
    function.__module__ = __name__
    return globals().setdefault(name, function)


if not TYPE_CHECKING:  # Type checkers read these functions from _aclnn.pyi, and report names that it lacks.
    __getattr__ = _entry


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
