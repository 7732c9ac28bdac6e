"""Registers the functions of torch_npu and of CANN's Python package as operators of torch.

They are in torch.ops.npu, torch.ops.atb and torch.ops.cann_ops_transformer. Schemas are derived from the functions'
signatures.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any

import torch

from fusion_attention.npu.auxiliary import atb, atb_cache_and_rotary
from fusion_attention.torch_ops.autograd_guards import no_tangents
from fusion_attention.torch_ops.registration import register

_LIBRARIES = {name: torch.library.Library(name, "FRAGMENT") for name in ("npu", "atb", "cann_ops_transformer")}
_OF_ATB = {name for module in (atb, atb_cache_and_rotary) for name in module.__all__}
Interface = Callable[..., Any]

# Python types -> types in torch's schemas. Of a union, the first member is used, which is torch_npu's type.
# Annotated[Tensor, "a!"] is a tensor that the operator writes; as a result, it is that argument.
# Annotated[Sequence[int], 2] is a list of two numbers, or one number for both.
_TYPES = {torch.Tensor: "Tensor", int: "int", float: "float", bool: "bool", str: "str", torch.dtype: "ScalarType"}
# Operators that torch_npu registers as a named overload.
_OVERLOADS = {"_npu_dropout_gen_mask": "Tensor"}
# Functions that may return an argument, which operators must not.
_HANDS_BACK = {"npu_format_cast"}
# Functions whose parameter `input` keeps its name in the schema; in others the schema has `self`.
_INPUT = {
    *("npu_cross_entropy_loss", "npu_dynamic_quant", "npu_transpose_batchmatmul"),
    *("npu_format_cast", "npu_format_cast_", "get_npu_format"),
}
# Functions with an overload `.List`, and the types of parameters that differ in it; None: no such parameter.
_LISTS: dict[str, dict[str, Any]] = {
    "npu_grouped_matmul": {
        "group_list": Sequence[int] | None,
        "output_dtype": torch.dtype | None,
        **dict.fromkeys(("tuning_config", "x_dtype", "weight_dtype", "scale_dtype", "per_token_scale_dtype")),
    }
}


def register_all(interfaces: Mapping[str, Interface], namespace: str = "") -> None:
    """Registers functions as operators, and their `.out` if they have one; existing operators are not replaced.

    Operators stay registered after uninstall(), because torch crashes if a graph calls a removed one.

    Args:
        interfaces: functions by name.
        namespace: the operators' namespace in torch.ops; "": npu or atb, as in torch_npu.
    """
    for name, interface in interfaces.items():
        library = _LIBRARIES[namespace or ("atb" if name in _OF_ATB else "npu")]
        if not hasattr(getattr(torch.ops, library.ns), name):
            _register(".".join(filter(None, (name, _OVERLOADS.get(name)))), interface, library)
            if hasattr(interface, "out"):
                _register(f"{name}.out", interface.out, library)
            if name in _LISTS:
                _register(f"{name}.List", _changed(interface, _LISTS[name]), library)


def _changed(interface: Interface, types: Mapping[str, Any]) -> Interface:
    """Returns a function like `interface` whose signature has the annotations `types` for the named parameters; a
    parameter with type None is left out."""

    @functools.wraps(interface)
    def run(*args: Any, **kwargs: Any) -> Any:
        return interface(*args, **kwargs)

    signature = inspect.signature(interface)
    retained = [p for p in signature.parameters.values() if types.get(p.name, p) is not None]
    parameters = [p.replace(annotation=types.get(p.name, p.annotation)) for p in retained]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


def _register(name: str, interface: Interface, library: torch.library.Library) -> None:
    """Registers a function as the operator `name` ("name" or "name.overload") of a library, with its implementation for
    fake tensors and its derivative."""
    schema = schema_of(interface, name)
    packet, _, overload = name.partition(".")

    def autograd(*args: Any, **kwargs: Any) -> Any:
        """Calls the Python function, which records its derivative, if a gradient is required, else the operator's
        implementation."""
        tensors = list(_tensors((*args, *kwargs.values())))
        no_tangents(tensors)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return run(*args, **kwargs)
        operator = getattr(getattr(getattr(torch.ops, library.ns), packet), overload or "default")
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args, **kwargs)

    run = _with_int_result(interface) if "int" in schema.rpartition("->")[2] else interface
    run = _apart(interface) if packet in _HANDS_BACK else run
    fake = _nothing if schema.endswith("-> ()") else run
    keys: tuple[str, ...] = ("CPU", "CUDA", "PrivateUse1")
    if "Tensor " not in schema:  # torch cannot determine a device without a tensor argument.
        keys = ("CompositeExplicitAutograd",)
    register(schema, run, fake, autograd, library, keys=keys)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Does nothing: the implementation for fake tensors of a function that only writes its arguments."""


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _with_int_result(interface: Interface) -> Interface:
    """Wraps a function that returns a seed, an offset and a count as integers (from result 4 on): raises
    NotImplementedError if one is a tensor, as in a trace."""

    @functools.wraps(interface)
    def run(*args: Any, **kwargs: Any) -> Any:
        result = interface(*args, **kwargs)
        if any(isinstance(value, torch.Tensor) for value in result[4:]):
            raise NotImplementedError(
                f"torch.ops.npu.{interface.__name__}: seed: expected a number in a trace, because the operator returns "
                "an int, got a seed to draw (pass a seed, or call npu_fusion_attention_v3, which returns a tensor)"
            )
        return result

    return run


def _apart(interface: Interface) -> Interface:
    """Wraps a function so that it returns a copy of its first argument where it would return this argument itself,
    which an operator must not do."""

    @functools.wraps(interface)
    def run(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = interface(first, *args, **kwargs)
        return result.clone() if result is first else result

    return run


def schema_of(function: Interface, name: str = "") -> str:
    """Returns the schema of a function for torch.library; types are from the function's annotations.

    Args:
        function: a function with annotations of all parameters and of its return.
        name: the operator's name with its overload; "": the function's name.
    """
    signature = inspect.signature(function)
    written = any(isinstance(p.annotation, str) for p in signature.parameters.values())  # not as types
    types = typing.get_type_hints(inspect.unwrap(function), include_extras=True) if written else {}
    words, star = [], False
    for p in signature.parameters.values():
        if p.kind is p.KEYWORD_ONLY and not star:
            words.append("*")
            star = True
        shown = "self" if p.name == "input" and function.__name__ not in _INPUT else p.name
        default = list(p.default) if isinstance(p.default, tuple) else p.default
        default = f'"{default}"' if isinstance(default, str) else default
        given = "" if p.default is p.empty else f"={default}"
        words.append(f"{_type(types[p.name] if isinstance(p.annotation, str) else p.annotation)} {shown}{given}")
    returns = signature.return_annotation
    returns = types["return"] if isinstance(returns, str) else returns
    results = typing.get_args(returns) if typing.get_origin(returns) is tuple else (returns,)
    listed = ", ".join(_type(t).removesuffix("?") for t in results if t not in (None, NoneType))
    listed = listed if len(results) == 1 and listed else f"({listed})"
    return f"{name or function.__name__}({', '.join(words)}) -> {listed}"


def _type(annotation: Any) -> str:
    """Returns the text of an annotation in an operator's schema; of a union, that of its first member, with "?" if None
    is a member."""
    members: tuple[Any, ...] = (annotation,)
    if typing.get_origin(annotation) in (typing.Union, UnionType):
        members = typing.get_args(annotation)
    first = next(t for t in members if t is not NoneType)
    alias = size = ""
    if typing.get_origin(first) is typing.Annotated:
        first, size_of_list = typing.get_args(first)
        alias, size = ("", str(size_of_list)) if isinstance(size_of_list, int) else (f"({size_of_list})", "")
    if typing.get_origin(first) is not None:
        (element,) = set(typing.get_args(first)) - {...}
        result = (f"int[{size}]" if size else "SymInt[]") if element is int else f"{_TYPES[element]}{alias}[]"
    else:
        result = _TYPES[first] + alias
    return result + "?" if NoneType in members else result
