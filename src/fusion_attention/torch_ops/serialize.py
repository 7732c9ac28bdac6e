"""Serialization of a call of any operator as arguments of one torch operator: tensors, numbers and a line of text.

A trace therefore contains no lengths and no work division: checks, conversion and planning run inside the operator.
pack() serializes arguments; read() and unpack() restore them.
"""

import ast
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch

from fusion_attention.contract import NESTED, Array, Attr, Bound, ContractError, Failure, Op, Tensor, bind, show
from fusion_attention.contract import Tensors as Listed
from fusion_attention.ir.dropout import signed
from fusion_attention.ir.mask import Band
from fusion_attention.ops import RECORDS
from fusion_attention.settings import chosen, current

Given = Sequence[torch.Tensor | None]

CALL = "Tensor?[] tensors, Tensor?[] arrays, SymInt[] ints, float[] floats, Tensor? seed, str call"


class Names(NamedTuple):
    """The canonical names of an operator's parameters, grouped by kind, and of its results."""

    tensors: tuple[str, ...]  # inputs
    arrays: tuple[str, ...]
    attributes: tuple[str, ...]
    lists: tuple[str, ...]  # of tensors
    results: tuple[str, ...]


def names_of(op: str) -> Names:
    """Returns the names of the parameters, by kind, and of the results of the operator named `op`."""
    record = RECORDS[op]
    return Names(
        tuple(p.name for p in record.params if isinstance(p, Tensor) and not p.output),
        tuple(p.name for p in record.params if isinstance(p, Array)),
        tuple(p.name for p in record.params if isinstance(p, Attr)),
        tuple(p.name for p in record.params if isinstance(p, Listed)),
        record.results,
    )


def constant(function: Callable[[str], Any], value: str) -> Any:
    """Returns function(value); in a trace it is evaluated as a constant, so that torch does not trace the function."""
    if torch.compiler.is_compiling():
        from fusion_attention.torch_ops import trace_constants

        return trace_constants.constant(function, value)
    return function(value)


def pack(op: str, args: Mapping[str, Any], seed: torch.Tensor | None = None, backend: str = "auto") -> tuple[Any, ...]:
    """Returns the arguments of the registered torch operator for a call of operator `op` with the arguments `args`. A
    list of lengths becomes a constant of a trace, a tensor an input. Numbers are sorted by their type, not by the
    declared one; bind() reports wrong types later."""
    names = constant(names_of, op)
    ints: dict[str, Any] = {}
    floats: dict[str, Any] = {}
    words: dict[str, Any] = {}
    for name in names.attributes:
        value = args.get(name)
        if value is None:
            continue
        if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
            value = value.item()  # dynamo traces a numpy scalar as an array
        if isinstance(value, (bool, str)):
            words[name] = value
        elif isinstance(value, (int, torch.SymInt)):
            if isinstance(value, int) and name == "seed":
                value = signed(value)
            if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
                raise TypeError(f"{op}: {name}: expected an int below 2**63 (a seed: 2**64)")
            ints[name] = value
        elif isinstance(value, (float, torch.SymFloat)):
            floats[name] = value
        elif isinstance(value, Band):
            words[name] = tuple(getattr(value, f.name) for f in fields(value))
        else:
            raise TypeError(f"{op}: {name}: expected a plain number or word, got {show(value)}")
    given: list[Any] = []
    lists: dict[str, int] = {}
    for name in names.tensors:
        value = args.get(name)
        several = list(value) if name in names.lists and isinstance(value, (list, tuple)) else [value]
        for tensor in several:
            if tensor is not None and not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{op}: {name}: expected a tensor, got {type(tensor)}")
            if tensor is not None and tensor.is_nested:
                shown = RECORDS[op].by_name[name].shown  # torch would not pass the tensor to an operator
                raise ContractError([Failure(op, shown, "a dense tensor", "a nested one", NESTED)])
        if isinstance(value, (list, tuple)):
            lists[name] = len(several)
        given += several
    text = f"{op};{constant(settings_of, backend)};{','.join(ints)};{','.join(floats)};{lists!r};{words!r}"
    lengths = [_as_tensor(args.get(name)) for name in names.arrays]
    return given, lengths, list(ints.values()), list(floats.values()), seed, text


def settings_of(backend: str) -> str:
    """Returns the settings as text "backend,strict,check_content", such as "cpu,0,1", which a traced call stores."""
    settings = current()
    return f"{chosen(backend)},{settings.strict:d},{settings.check_content:d}"


def _as_tensor(lengths: Any) -> torch.Tensor | None:
    if lengths is None or isinstance(lengths, torch.Tensor):
        return lengths
    # Numbers that are not integers keep their dtype, so that bind() reports them; an empty list has no dtype.
    return torch.tensor(lengths) if len(lengths) else torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True)
class Text:
    """The parsed line of text by which a trace stores the operator, back end, settings and attributes of a call.

    Attributes:
        strict, check_content: True if set when the call was traced; None: settings at run time decide.
        ints, floats: names of numbers; lists: {parameter: number of its tensors}; words: {other attribute: value}.
    """

    op: Op
    backend: str
    strict: bool | None
    check_content: bool | None
    ints: tuple[str, ...]
    floats: tuple[str, ...]
    lists: dict[str, int]
    words: dict[str, Any]


@functools.lru_cache(maxsize=1024)
def read(text: str) -> Text:
    """Returns the Text of `text`, the line that a trace stores for a call of an operator; results are cached."""
    name, settings, ints, floats, lists, words = text.split(";", 5)
    backend, strict, content = settings.split(",")
    op = RECORDS[name]
    values = ast.literal_eval(words)
    for key, value in values.items():
        attr = op.by_name[key]
        if isinstance(value, tuple) and isinstance(attr, Attr):
            values[key] = attr.type(*value)
    int_names, float_names = (tuple(filter(None, names.split(","))) for names in (ints, floats))
    checks = strict == "1" or None, content == "1" or None
    return Text(op, backend, *checks, int_names, float_names, ast.literal_eval(lists), values)


def unpack(tensors: Given, arrays: Given, ints: Any, floats: Any, text: Text) -> dict[str, Any]:
    """Returns {name: argument} of a call, the inverse of pack(); text: the parsed line that the trace stores for it."""
    names = names_of(text.op.name)
    args = dict(text.words)
    left = iter(tensors)
    for name in names.tensors:
        count = text.lists.get(name)
        args[name] = next(left) if count is None else tuple(itertools.islice(left, count))
    for keys, values in zip((names.arrays, text.ints, text.floats), (arrays, ints, floats), strict=True):
        args.update(zip(keys, values, strict=True))
    return args


def bound(text: Text, args: dict[str, Any]) -> Bound:
    """Validates a call in a trace, of the operator in `text` with the arguments `args`, and returns it as Bound."""
    return bind(text.op, args, strict=text.strict, check_content=text.check_content)


def check(text: Text, args: dict[str, Any], arrays: Given) -> None:
    """Validates a call in a trace; one with symbolic sizes or with lengths (arrays) is validated when it runs."""
    given = list(itertools.chain.from_iterable(v if isinstance(v, tuple) else (v,) for v in args.values()))
    sizes = [size for t in given if isinstance(t, torch.Tensor) for size in (*t.shape, *t.stride())]
    is_concrete = not any(isinstance(value, (torch.SymInt, torch.SymFloat)) for value in (*given, *sizes))
    if is_concrete and not any(t is not None for t in arrays):
        bind(text.op, args, strict=text.strict, reads=False, memory=False)
