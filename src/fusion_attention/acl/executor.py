"""aclOpExecutor: the planned call that phase 1 returns and phase 2 runs, once or (if made repeatable) many times."""

from typing import Any

from fusion_attention.acl.state import Refusal, coded, integer
from fusion_attention.acl.tensors import Tensor
from fusion_attention.contract import INVALID, RUNTIME, Op

INNER_NULL = 561103


class Executor:
    """The planned call that phase 1 of an operator returns and phase 2 runs.

    Attributes:
        op: the operator's definition.
        values: the arguments in the operator's order; options: the other arguments of phase 1.
        workspace_size: bytes that phase 2 needs.
        job: the Job that phase 2 runs, on the current addresses of the tensors.
        repeatable, used, destroyed: True if it may run more than once; was run or made repeatable; was destroyed.
    """

    __slots__ = ("destroyed", "job", "op", "options", "repeatable", "used", "values", "workspace_size")

    def __init__(self, op: Op, workspace_size: int, values: tuple[Any, ...], options: Any, job: Any) -> None:
        self.op, self.workspace_size, self.values, self.options, self.job = op, workspace_size, values, options, job
        self.repeatable = self.used = self.destroyed = False

    def end(self) -> None:
        """Destroys the executor and releases its references."""
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
    """aclSetAclOpExecutorRepeatable: allows any number of runs, if called before the first; returns an error code."""
    live = _live(executor)
    if live.used:
        raise Refusal(RUNTIME, f"executor: {live.op.name}: used before it was made repeatable")
    live.repeatable = True


@coded
def destroy_acl_op_executor(executor: Executor) -> None:
    """aclDestroyAclOpExecutor: destroys an executor, as needed for a repeatable one; returns an error code."""
    _live(executor).end()


def _move(executor: Any, index: Any, tensor: Any, data: Any, sides: tuple[bool, ...]) -> None:
    """Changes the memory of one tensor of an executor to `data`; sides: False for its inputs, True for its outputs, of
    which `index` counts the tensors in this order."""
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
    """aclSetInputTensorAddr: sets another address for an input of a repeatable executor.

    Args:
        executor: a repeatable executor.
        index: index among the operator's input tensors, absent ones included.
        tensor: the tensor at this index in phase 1.
        addr: an address from acl.rt.malloc, a torch tensor or a torch storage, large enough for the same view.

    Returns:
        ret: 561103 for null, 161002 for a wrong index, tensor or memory.
    """
    _move(executor, index, tensor, addr, (False,))


@coded
def set_output_tensor_addr(executor: Executor, index: int, tensor: Tensor, addr: Any) -> None:
    """aclSetOutputTensorAddr: as set_input_tensor_addr(), but `index` counts output tensors."""
    _move(executor, index, tensor, addr, (True,))


@coded
def set_tensor_addr(executor: Executor, index: int, tensor: Tensor, addr: Any) -> None:
    """aclSetTensorAddr: as set_input_tensor_addr(), but `index` counts inputs, then outputs."""
    _move(executor, index, tensor, addr, (False, True))
