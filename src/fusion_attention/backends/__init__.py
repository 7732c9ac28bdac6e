"""What computes: back ends that give the same operation kinds in the intermediate representation's types, and the
choice among them.

Each is a module that says itself what it cannot do. They never import one another; load() imports the one chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch

from fusion_attention.contract import BackendError
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

# In the order in which "auto" tries them. golden is asked for by name, never chosen.
AUTO = ("triton", "cpu")
SHAPES = "meta"  # the device without memory, and what serves all calls there
BACKENDS = (*AUTO, "golden")
BackendName = Literal["auto", "cpu", "triton", "golden"]  # for type checkers
_GOLDEN = ' golden computes it, in float64: backend="golden", or a block with fusion_attention.use_backend("golden").'
Accepted = Any  # a problem against which a back end has no reason


class Backend(Protocol):
    """A back end: a module of these functions. Of a problem that it refuses it is asked nothing else.

    The properties are its op_kinds: they compute a problem on given lengths, with its schedule for them, in given
    memory.
    """

    NAME: str

    def reasons_against(self, problem: AnyProblem, device: torch.device, op_kind: str = "", /) -> list[str]:
        """One sentence for each thing that it cannot do; without an operation kind, for all of them."""
        ...

    def schedule(self, problem: Accepted, extents: Extents, op_kind: str, /) -> Any:
        """What it plans for one of its operation kinds on given lengths, to be handed to every run; None: nothing."""
        ...

    def reschedule(self, problem: Accepted, extents: Extents, op_kind: str, schedule: Any, /) -> Any:
        """The schedule for other key lengths of the same sequences, changed or made anew."""
        ...

    def workspace_bytes(self, problem: Accepted, extents: Extents, op_kind: str, /) -> int:
        """What an operation kind allocates besides operands and results."""
        ...

    def prepare(
        self, problem: Accepted, schedule: Any, operands: Any, names: tuple[str, ...], /
    ) -> Callable[..., bool] | None:
        """A forward for many calls whose views differ in memory alone; None where there is nothing to gain.

        names: of the tensors that the function takes, in their order, as ir.places has them; those of max and sum are
        None where they are not read. It is false where its results are not complete: then the operation has to run.
        """
        ...

    def keep(self, operands: Any, /) -> Any:
        """Operands of many runs that stay as they are, in a form of its own; None: it takes them as they are."""
        ...

    @property
    def attention_forward(self) -> Callable[[Problem, Extents, Any, Operands], None]:
        """Writes out and stats for every row of every sequence."""
        ...

    @property
    def attention_backward(self) -> Callable[[Problem, Extents, Any, Operands, Grads], None]:
        """Writes all gradients, or adds to dbias, from the saved statistics and the saved out."""
        ...


class IndexerBackend(Backend, Protocol):
    """A back end that computes the indexer and its loss too, as all of them do."""

    @property
    def indexer_topk(self) -> Callable[[IndexerProblem, Extents, Any, IndexerOperands], None]:
        """Writes indices, and values where there are any, for every row of every sequence."""
        ...

    @property
    def indexer_backward(self) -> Callable[[IndexerProblem, Extents, Any, IndexerOperands, IndexerGrads], None]:
        """Writes dq, dk and dweights from the chosen indices."""
        ...

    @property
    def indexer_lse(self) -> Callable[[IndexerProblem, Extents, Any, IndexerOperands], None]:
        """Writes stats, over the keys that the band shows."""
        ...

    @property
    def indexer_loss(self) -> Callable[[IndexerLossProblem, Extents, Any, IndexerLossOperands, IndexerGrads], None]:
        """Writes the loss, summed over all rows, and its gradients dq, dk and dweights."""
        ...


def load(name: str) -> Backend:
    """A back end; only what is chosen is imported: a machine without one's needs loads everything else."""
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
    """The back end that computes an operation kind, or all: the named one, or the first of AUTO without a reason
    against.

    Raises:
        ValueError: an unknown name.
        BackendError: none fits; the message lists every reason of every back end asked.
    """
    _check_name(backend)
    if device.type == SHAPES:
        return SHAPES
    # Triton is slow to import and has nothing to say about memory that no GPU holds.
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
    """Raises where there is no back end of this name."""
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"fusion_attention: backend: expected one of auto, {', '.join(BACKENDS)}, got {backend!r}")


def reasons_of(name: str, problem: AnyProblem, device: torch.device, op_kind: str = "") -> list[str]:
    """Why a back end does not compute a problem on a device; empty where it does."""
    try:
        module = load(name)
    except ImportError as error:
        return [f"the {name} back end cannot be loaded ({error})."]
    return module.reasons_against(problem, device, op_kind)


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Inside the block, or the function that it decorates, calls that name no back end are computed by this one.

    It counts in this thread (and asyncio task), for every interface but the two-phase one, whose back end acl.init()
    says. A graph that torch.compile or torch.export traces inside keeps it; one traced outside takes it where it runs
    inside.

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
