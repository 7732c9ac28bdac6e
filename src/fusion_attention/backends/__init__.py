"""The protocol of back ends, which compute the operations of the intermediate representation, and their selection.

Each back end is a module that reports what it cannot compute. Back ends never import one another; load() imports the
selected one.
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
SHAPES = "meta"  # the device without memory, and its back end
BACKENDS = (*AUTO, "golden")
BackendName = Literal["auto", "cpu", "triton", "golden"]  # for type checkers
_GOLDEN = ' golden computes it, in float64: backend="golden", or a block with fusion_attention.use_backend("golden").'
Accepted = Any  # a problem that the back end computes


class Backend(Protocol):
    """A back end: a module with these functions. Only reasons_against() is called for problems that it rejects.

    The properties are the operation kinds: functions of problem, extents, schedule and memory.
    """

    NAME: str

    def reasons_against(self, problem: AnyProblem, device: torch.device, op_kind: str = "", /) -> list[str]:
        """One sentence for each property of the problem that it does not support; op_kind "": for every operation."""
        ...

    def schedule(self, problem: Accepted, extents: Extents, op_kind: str, /) -> Any:
        """The schedule of an operation on given lengths, which every run receives; None if it needs none."""
        ...

    def reschedule(self, problem: Accepted, extents: Extents, op_kind: str, schedule: Any, /) -> Any:
        """The schedule for other key lengths of the same sequences: the given one, modified, or a new one."""
        ...

    def workspace_bytes(self, problem: Accepted, extents: Extents, op_kind: str, /) -> int:
        """Bytes that an operation allocates besides operands and results."""
        ...

    def prepare(
        self, problem: Accepted, schedule: Any, operands: Any, names: tuple[str, ...], /
    ) -> Callable[..., bool] | None:
        """A function for repeated forward calls whose views differ only in memory; None if it would not be faster.

        The function takes tensors in the order of names (those of ir.places); max and sum may be None if they are not
        read. The function returns False if the results are incomplete, and the caller then runs the operation.
        """
        ...

    def keep(self, operands: Any, /) -> Any:
        """Operands that many runs use unchanged, in a data structure of the back end; None if it has none for them."""
        ...

    @property
    def attention_forward(self) -> Callable[[Problem, Extents, Any, Operands], None]:
        """Writes out and stats for every row of every sequence."""
        ...

    @property
    def attention_backward(self) -> Callable[[Problem, Extents, Any, Operands, Grads], None]:
        """Writes all gradients (adds to dbias unless owns_dbias) from the saved statistics and the saved out."""
        ...


class IndexerBackend(Backend, Protocol):
    """A back end that also computes the indexer, its loss and pooling, as all of them do."""

    @property
    def indexer_topk(self) -> Callable[[IndexerProblem, Extents, Any, IndexerOperands], None]:
        """Writes indices, and values if problem.has_values, for every row of every sequence."""
        ...

    @property
    def indexer_backward(self) -> Callable[[IndexerProblem, Extents, Any, IndexerOperands, IndexerGrads], None]:
        """Writes dq, dk and dweights from the selected indices and dvalues."""
        ...

    @property
    def indexer_lse(self) -> Callable[[IndexerProblem, Extents, Any, IndexerOperands], None]:
        """Writes the softmax statistics of the indexer's scores over the keys in the band."""
        ...

    @property
    def indexer_loss(self) -> Callable[[IndexerLossProblem, Extents, Any, IndexerLossOperands, IndexerGrads], None]:
        """Writes the loss, summed over all rows, and its gradients dq, dk and dweights."""
        ...

    @property
    def pooling(self) -> Callable[[PoolingProblem, Extents, Any, PoolingOperands], None]:
        """Writes out for every window of every sequence."""
        ...

    @property
    def pooling_backward(self) -> Callable[[PoolingProblem, Extents, Any, PoolingOperands, PoolingGrads], None]:
        """Writes the gradients of all rows and gates, and of the bias if it is wanted."""
        ...


def load(name: str) -> Backend:
    """Imports a back end by name; the others, whose requirements may be missing on this machine, are not imported."""
    result: IndexerBackend
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
    """Name of the back end for an operation ("": for all operations): the requested one, or the first of AUTO that
    computes the problem.

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
    """Raises ValueError if no back end has this name."""
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"fusion_attention: backend: expected one of auto, {', '.join(BACKENDS)}, got {backend!r}")


def reasons_of(name: str, problem: AnyProblem, device: torch.device, op_kind: str = "") -> list[str]:
    """Reasons why a back end does not compute a problem on a device; empty if it does."""
    try:
        module = load(name)
    except ImportError as error:
        return [f"the {name} back end cannot be loaded ({error})."]
    return module.reasons_against(problem, device, op_kind)


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Inside the block, or the function that it decorates, calls that name no back end are computed by this one.

    The choice counts in this thread (and asyncio task), for every interface but the two-phase one, whose back end
    acl.init() says. A graph that torch.compile or torch.export traces inside keeps it; one traced outside takes it
    where it runs inside.

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
