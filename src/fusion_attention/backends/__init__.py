"""The interface of back ends (cpu: C++, triton: GPUs, golden: the float64 reference), and their selection.

Each back end is a module that computes attention operations, and reports the problems (sizes, dtypes, masks, ...) that
it cannot compute. Back ends never import one another; load() imports the selected one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch

from fusion_attention.contract import BackendError
from fusion_attention.ir.pooling import PoolingGrads, PoolingOperands, PoolingProblem
from fusion_attention.ir.problem import (
    AnyProblem,
    Extents,
    Grads,
    IndexerGrads,
    IndexerLossOperands,
    IndexerLossProblem,
    IndexerOperands,
    IndexerProblem,
    Operands,
    Problem,
)
from fusion_attention.settings import override

# The order in which "auto" tries back ends. golden is used by name only.
AUTO = ("triton", "cpu")
SHAPES = "meta"  # torch's device without memory, and the back end for it
BACKENDS = (*AUTO, "golden")
BackendName = Literal["auto", "cpu", "triton", "golden"]  # for type checkers
_GOLDEN = ' golden computes it, in float64: backend="golden", or a block with fusion_attention.use_backend("golden").'
Accepted = Any  # a problem that the back end computes


class Backend(Protocol):
    """The interface of a back end, a module that computes the problems to which reasons_against() has no reason.

    The properties are functions that compute one operation each, from problem, extents, schedule, operands and
    gradients. `problem` has the properties that select a kernel (heads, dims, dtypes, masks, bias), `extents` the
    lengths and bands of the sequences, `op_kind` is an operation's name ("attention_forward"), `schedule` a result of
    schedule() for these three; `operands` and gradients are strided views of memory.
    """

    NAME: str

    def reasons_against(self, problem: AnyProblem, device: torch.device, op_kind: str = "", /) -> list[str]:
        """Returns a sentence for each property of a problem (heads, dims, dtypes, mask, ...) that an operation does not
        support on the device; [] if it supports all. op_kind: the operation, such as "attention_forward"; "": any."""
        ...

    def schedule(self, problem: Accepted, extents: Extents, op_kind: str, /) -> Any:
        """Returns the division of an operation's work into tiles for the sequence lengths and bands in `extents`, which
        each run receives; None if the back end needs none. op_kind: the operation, such as "attention_forward"."""
        ...

    def reschedule(self, problem: Accepted, extents: Extents, op_kind: str, schedule: Any, /) -> Any:
        """Returns a schedule for other key lengths (`extents`) of the same sequences: `schedule`, updated, or a new
        one."""
        ...

    def workspace_bytes(self, problem: Accepted, extents: Extents, op_kind: str, /) -> int:
        """Returns the bytes of scratch memory that an operation allocates, besides operands and results."""
        ...

    def prepare(
        self, problem: Accepted, schedule: Any, operands: Any, names: tuple[str, ...], /
    ) -> Callable[..., bool] | None:
        """Returns a function that repeats a forward on tensors of equal shapes and strides; None if it is not faster.

        The function takes tensors in the order of `names` (names of operands); max and sum may be None if they are not
        read. It returns False if its results are incomplete; the caller then runs the operation.
        """
        ...

    def keep(self, operands: Any, /) -> Any:
        """Returns an object that replaces `operands` in later runs and caches the values that the back end derives from
        them; None if the back end caches nothing."""
        ...

    @property
    def attention_forward(self) -> Callable[[Problem, Extents, Any, Operands], None]:
        """The function that computes attention: writes operands.out and the softmax's max and sum (operands.stats)."""
        ...

    @property
    def attention_backward(self) -> Callable[[Problem, Extents, Any, Operands, Grads], None]:
        """The function that writes all gradients of attention from grads.dout and the saved out, max and sum of the
        softmax; dbias is written if grads.owns_dbias, else the sums are added to it."""
        ...

    @property
    def indexer_topk(self) -> Callable[[IndexerProblem, Extents, Any, IndexerOperands], None]:
        """The function that scores keys (sum_h w_h * max(0, q_h . k)), and writes for each query row the indices of the
        top_k visible keys, and their scores if problem.has_values."""
        ...

    @property
    def indexer_backward(self) -> Callable[[IndexerProblem, Extents, Any, IndexerOperands, IndexerGrads], None]:
        """The function that writes the indexer's dq, dk and dweights from dvalues, gradients of the selected scores."""
        ...

    @property
    def indexer_lse(self) -> Callable[[IndexerProblem, Extents, Any, IndexerOperands], None]:
        """The function that writes max and sum of a softmax of the indexer's scores over each row's visible keys."""
        ...

    @property
    def indexer_loss(self) -> Callable[[IndexerLossProblem, Extents, Any, IndexerLossOperands, IndexerGrads], None]:
        """The function that writes the indexer's KL divergence from attention, over all rows, and its gradients."""
        ...

    @property
    def pooling(self) -> Callable[[PoolingProblem, Extents, Any, PoolingOperands], None]:
        """The function that writes operands.out: for every window of rows, their sum weighted by a softmax of gates."""
        ...

    @property
    def pooling_backward(self) -> Callable[[PoolingProblem, Extents, Any, PoolingOperands, PoolingGrads], None]:
        """The function that writes the gradients of all rows and gates (softmax logits), and of the bias if wanted."""
        ...


def load(name: str) -> Backend:
    """Imports and returns the module of a back end; others are not imported, as their requirements may be missing."""
    result: Backend
    if name == "triton":
        from fusion_attention.backends import triton

        result = triton
    elif name == "cpu":
        from fusion_attention.backends import cpu

        result = cpu
    elif name == SHAPES:
        from fusion_attention.backends import meta

        result = meta
    else:
        from fusion_attention.backends import golden

        result = golden
    return result


def choose(problem: AnyProblem, device: torch.device, backend: str, op_kind: str = "") -> str:
    """Returns the name of a back end that computes a problem's operation ("": all) on a device: the requested one, or
    for "auto" the first of triton (on CUDA) and cpu that does.

    Raises:
        ValueError: an unknown name.
        BackendError: no back end computes it; the message lists the reasons of each.
    """
    _check_name(backend)
    if device.type == SHAPES:
        return SHAPES
    # Triton computes on CUDA devices only, and its import is slow.
    automatic = AUTO if device.type == "cuda" else AUTO[1:]
    listed = []
    for name in automatic if backend == "auto" else (backend,):
        against = reasons_of(name, problem, device, op_kind)
        if not against:
            return name
        listed += [f"{name}: {reason}" for reason in against]
    advice = "" if backend == "golden" else _GOLDEN
    raise BackendError(f"fusion_attention: no back end computes this call. {'; '.join(listed)}{advice}")


def _check_name(backend: str) -> None:
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"fusion_attention: backend: expected one of auto, {', '.join(BACKENDS)}, got {backend!r}")


def reasons_of(name: str, problem: AnyProblem, device: torch.device, op_kind: str = "") -> list[str]:
    """Returns reasons why back end `name` cannot compute op_kind ("": all operations) of a problem; [] if it can."""
    try:
        module = load(name)
    except ImportError as error:
        return [f"the {name} back end cannot be loaded ({error})."]
    return module.reasons_against(problem, device, op_kind)


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Selects the back end for calls without an argument `backend`, in a block or in a decorated function.

    It applies to this thread (and asyncio task), and to all interfaces except CANN's two-phase one, whose back end
    acl.init() selects. A graph that torch.compile or torch.export traces in the block stores this back end. A graph
    that was traced elsewhere uses it when it runs in the block.

    Args:
        name: "auto" (by the device), "cpu", "triton" or "golden", the float64 model.

    Raises:
        ValueError: an unknown name.

    Example:
        >>> import fusion_attention as fa
        >>> q = torch.randn(1, 4, 1, 8, dtype=torch.float64)
        >>> with use_backend("golden"):
        ...     fa.attention(q, q, q).dtype
        torch.float64
    """
    _check_name(name)
    with override(backend=name):
        yield
