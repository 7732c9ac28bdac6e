"""aclOpExecutor of CANN: an operator call that phase 1 plans and phase 2 runs, once or (if made repeatable) often."""

from typing import Any

from fusion_attention.acl.state import Refusal, coded, integer
from fusion_attention.acl.tensors import Tensor
from fusion_attention.contract import INVALID, RUNTIME, Op

INNER_NULL = 561103


class Executor:
    """A checked and planned operator call: aclnnXxxGetWorkspaceSize (phase 1) returns it, aclnnXxx (phase 2) runs it.

    Attributes:
        op: the operator's definition.
        values: the arguments in the operator's order; options: Options of the call (device, back end, ...).
        workspace_size: bytes of temporary memory that phase 2 needs.
        job: the computation on the current addresses of the tensors, which phase 2 runs.
        repeatable: True if phase 2 may run more than once. used: True after the first run. destroyed: True after end().
    """

    __slots__ = ("destroyed", "job", "op", "options", "repeatable", "used", "values", "workspace_size")

    def __init__(self, op: Op, workspace_size: int, values: tuple[Any, ...], options: Any, job: Any) -> None:
        self.op, self.workspace_size, self.values, self.options, self.job = op, workspace_size, values, options, job
        self.repeatable = self.used = self.destroyed = False

    def end(self) -> None:
        """Marks the executor as destroyed and releases its references to tensors."""
        self.destroyed = True
        self.job, self.values = None, ()

    def __repr__(self) -> str:
        state = "destroyed" if self.destroyed else "used" if self.used else "ready"
        return f"acl.Executor({self.op.name}, {state}{', repeatable' if self.repeatable else ''})"


def _live(executor: Any) -> Executor:
    if executor is None:
        raise Refusal(INNER_NULL, "executor: expected one from phase 1, got null")
    if not isinstance(executor, Executor):
        raise Refusal(INVALID, f"executor: expected one from phase 1, got {type(executor).__name__}")
    if executor.destroyed:
        raise Refusal(RUNTIME, f"executor: {executor.op.name}: destroyed before")
    return executor


@coded
def set_acl_op_executor_repeatable(executor: Executor) -> None:
    """aclSetAclOpExecutorRepeatable: allows a planned operator call (executor) to run any number of times, if it has
    not run yet; returns an error code (0: success)."""
    live = _live(executor)
    if live.used:
        raise Refusal(RUNTIME, f"executor: {live.op.name}: used before it was made repeatable")
    live.repeatable = True


@coded
def destroy_acl_op_executor(executor: Executor) -> None:
    """aclDestroyAclOpExecutor: destroys a planned operator call (executor); returns an error code (0: success)."""
    _live(executor).end()


def _move(executor: Any, index: Any, tensor: Any, data: Any, sides: tuple[bool, ...]) -> None:
    """Makes a tensor of a planned operator call (executor) use the memory `data`, an address, torch tensor or storage.
    index: its number among the operator's inputs (sides (False,)), outputs ((True,)) or both ((False, True))."""
    live = _live(executor)
    if tensor is None:
        raise Refusal(INNER_NULL, "tensor: expected the one to move, got null")
    if not isinstance(tensor, Tensor) or tensor.view is None:
        raise Refusal(INVALID, f"tensor: expected a live acl.Tensor, got {tensor!r}")
    if not live.repeatable:
        raise Refusal(RUNTIME, f"executor: {live.op.name}: make it repeatable before addresses change")
    at = integer(index, "index", INVALID)
    slots = [p.name for side in sides for p in live.op.tensors(side)]
    if not 0 <= at < len(slots):
        raise Refusal(INVALID, f"index: expected 0 to {len(slots) - 1}, got {at}")
    bound = live.op.named(live.values)[slots[at]]
    if bound is None:
        raise Refusal(INVALID, f"index: {at} was null in phase 1")
    if bound is not tensor:
        raise Refusal(INVALID, f"tensor: expected the one that phase 1 was given at index {at}, got {tensor!r}")
    tensor.move(data)


@coded
def set_input_tensor_addr(executor: Executor, index: int, tensor: Tensor, addr: Any) -> None:
    """aclSetInputTensorAddr: sets another address for an input tensor of a repeatable planned operator call.

    Args:
        executor: the planned call, made repeatable by set_acl_op_executor_repeatable().
        index: index among the operator's input tensors, absent ones included.
        tensor: the tensor that was passed at this index when the call was planned.
        addr: an address from acl.rt.malloc, a torch tensor or a torch storage, large enough for the same view.

    Returns:
        ret: 0; 561103 for null, 161002 for a wrong index, tensor or memory.
    """
    _move(executor, index, tensor, addr, (False,))


@coded
def set_output_tensor_addr(executor: Executor, index: int, tensor: Tensor, addr: Any) -> None:
    """aclSetOutputTensorAddr: sets another address, torch tensor or storage (addr) for `tensor`, output number `index`
    of a repeatable planned operator call (executor); returns an error code (0: success)."""
    _move(executor, index, tensor, addr, (True,))


@coded
def set_tensor_addr(executor: Executor, index: int, tensor: Tensor, addr: Any) -> None:
    """aclSetTensorAddr: sets another address, torch tensor or storage (addr) for `tensor` of a repeatable planned
    operator call (executor); `index` counts inputs, then outputs. Returns an error code (0: success)."""
    _move(executor, index, tensor, addr, (False, True))
