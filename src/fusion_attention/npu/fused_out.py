"""Makes functions related to torch_npu's fused attention from operator definitions: the variant `.out`, and functions
that return its workspace (scratch memory) and new tensors for results."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import GenericAlias
from typing import Annotated, Any, ParamSpec, Protocol, TypeVar, cast

import torch

from fusion_attention.contract import ContractError, Op, bind, show
from fusion_attention.memory import empty
from fusion_attention.npu.functions_from_definitions import Args, reader
from fusion_attention.ops.fused.geometry import OUT_DTYPES, WORDS, lse_shape, of_inputs, out_dtype, out_shape
from fusion_attention.torch_ops import dispatch
from fusion_attention.torch_ops.device_aliases import aliased

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
Pair = tuple[torch.Tensor, torch.Tensor]
_NUMBERS = {dtype: number for number, dtype in OUT_DTYPES.items()}


def numbered(args: Args) -> Args:
    """Returns the arguments with a torch.dtype in `out_dtype` replaced by torch's integer code, -1 if unsupported."""
    dtype = args.get("out_dtype")
    return {**args, "out_dtype": _NUMBERS.get(dtype, -1)} if isinstance(dtype, torch.dtype) else args


class WithOut(Protocol[P, R_co]):
    """A function with a variant `.out`.

    Attributes:
        out: `.out(..., workspace=None, out=[...])`, which writes its results to the given tensors and returns them.
    """

    __name__: str
    out: Callable[..., Any]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Calls the function, which makes new tensors for its results."""
        ...


def with_out(op: Op) -> Callable[[Callable[P, Pair]], WithOut[P, Pair]]:
    """Returns a decorator that gives a function of the definition `op` a variant `.out`, which computes directly into
    the caller's tensors (attention_out, softmax_lse)."""

    read = reader(op)

    @aliased
    def out(*positional: Any, workspace: torch.Tensor | None = None, out: Sequence[torch.Tensor], **named: Any) -> Any:
        if not (isinstance(out, (list, tuple)) and len(out) == 2 and all(isinstance(t, torch.Tensor) for t in out)):
            raise ContractError([op.failure("out", "[attention_out, softmax_lse]", show(out))])
        attention, lse = out
        args = numbered(read(*positional, **named))
        wants_lse = bool(args["softmax_lse_flag"])
        result = dispatch.results(op, {**args, "attention_out": attention, "softmax_lse": lse if wants_lse else None})
        attention.copy_(result["attention_out"])
        if wants_lse:
            lse.copy_(result["softmax_lse"])
        return attention, lse

    rest = "A softmax_lse that the call does not request is not written."
    return lambda function: _attached(function, out, op, ("attention_out", "softmax_lse"), rest)


def with_copies(op: Op, *results: str) -> Callable[[Callable[P, R_co]], WithOut[P, R_co]]:
    """Returns a decorator that gives a function of the definition `op` a variant `.out`, which copies results to the
    caller's tensors; results: their names, in order."""

    def decorate(function: Callable[P, R_co]) -> WithOut[P, R_co]:
        @aliased
        def out(*given: Any, workspace: torch.Tensor | None = None, out: Sequence[torch.Tensor], **named: Any) -> Any:
            if not isinstance(out, (list, tuple)) or len(out) != len(results):
                raise ContractError([op.failure("out", f"[{', '.join(results)}]", show(out))])
            with torch.no_grad():
                result: Any = function(*given, **named)
                pairs = [(n, o, t) for n, o, t in zip(results, out, result, strict=True) if t.numel()]
                for name, buffer, value in pairs:
                    if (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
                        raise ContractError([op.failure(name, f"out as the result, {show(value)}", show(buffer))])
                for _, buffer, value in pairs:
                    buffer.copy_(value)
            return tuple(out)

        rest = "Tensors for results that the call does not compute are not written. Nothing is differentiable."
        return _attached(function, out, op, results, rest)

    return decorate


def _attached(
    function: Callable[P, R_co], out: Callable[..., Any], op: Op, results: Sequence[str], rest: str
) -> WithOut[P, R_co]:
    """Makes `out` the variant `.out` of `function`, which it returns; signature and docstring are derived from it.
    results: names of the results. rest: a further sentence of the docstring about the argument `out`."""
    buffers = (
        inspect.Parameter("workspace", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=torch.Tensor | None),
        inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[Sequence[torch.Tensor], "a!"]),
    )
    parameters = [*inspect.signature(function).parameters.values(), *buffers]
    written = (Annotated[torch.Tensor, "a!"],) * len(results)  # in the operator's schema (operators.py)
    signature = inspect.Signature(parameters, return_annotation=GenericAlias(tuple, written))
    out.__signature__ = signature  # type: ignore[attr-defined]
    out.__wrapped__ = function  # type: ignore[attr-defined]
    out.__qualname__ = f"{function.__name__}.out"
    out.__doc__ = f"""Writes the results of {function.__name__} to given tensors, and returns these tensors.

Args:
    workspace: not used; this library allocates its memory itself.
    out: [{", ".join(results)}], with the shapes and dtypes of the results.
        {rest}

Other arguments are those of {function.__name__}. Source: {op.page}.
"""
    result = cast("WithOut[P, R_co]", function)
    result.out = out
    return result


def workspace_of(function: WithOut[P, Pair], op: Op) -> Callable[P, torch.Tensor]:
    """Returns torch_npu's function `_{function}_get_max_workspace`: it checks a call as `function` does, and returns an
    empty tensor, the scratch memory (workspace) that `.out` accepts."""
    read = reader(op)

    @aliased
    def get_max_workspace(*positional: Any, **named: Any) -> torch.Tensor:
        args = numbered(read(*positional, **named))
        if not dispatch.is_traced(args.values()):
            bind(op, args)
        query: torch.Tensor = args["query"]
        return query.new_empty(0)

    signature = inspect.signature(function).replace(return_annotation=torch.Tensor)
    get_max_workspace.__signature__ = signature  # type: ignore[attr-defined]
    get_max_workspace.__wrapped__ = function  # type: ignore[attr-defined]
    get_max_workspace.__name__ = get_max_workspace.__qualname__ = f"_{function.__name__}_get_max_workspace"
    get_max_workspace.__doc__ = f"""Returns the workspace of {function.__name__}.out: a tensor without elements.

This library allocates its memory itself. An invalid call raises here as in {function.__name__}.

Args: those of {function.__name__}. Source: {op.page}.
"""
    return get_max_workspace


def allocated(op: Op, given: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns new tensors (attention_out, softmax_lse), whose shapes the arguments `given` of `op` determine."""
    args = {**op.neutral, **numbered(given)}
    layout, query, heads = args["input_layout"], args["query"], args["num_heads"]

    def refuse(name: str, expected: str, got: str) -> ContractError:
        return ContractError([op.failure(op.by_name[name].shown, expected, got)])

    if layout not in op.layouts:
        raise refuse("input_layout", "one of " + ", ".join(op.layouts), show(layout))
    rank = len(WORDS[of_inputs(layout)].split())
    if not isinstance(query, torch.Tensor) or query.dim() != rank:
        raise refuse("query", f"{rank} dimensions in layout {layout}", show(query))
    numbers = heads, args["num_key_value_heads"]
    if not all(isinstance(n, int) for n in numbers) or heads <= 0 or numbers[1] < 0:
        raise refuse("num_heads", f"{op.by_name['num_heads'].shown} > 0", show(heads))
    if not isinstance(args["value"], torch.Tensor) or (args["block_table"] is None and args["value"].dim() != rank):
        raise refuse("value", f"{rank} dimensions in layout {layout}", show(args["value"]))
    return empty(query, out_shape(args), out_dtype(args)), empty(query, lse_shape(args), torch.float32)
