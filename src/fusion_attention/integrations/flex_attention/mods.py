"""Evaluates FlexAttention's mask_mod and score_mod as torch does; caches results until a captured value changes."""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

T = TypeVar("T")
Mod = Callable[..., Any]  # function of (b, h, q_idx, kv_idx)

# ------------------------------------------------------------------------------------------------------- evaluating


class _Indexed(TorchFunctionMode):
    """A mode in which table[q_idx] is a gather, because vmap cannot convert q_idx to a Python number, as torch does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(i, Tensor) for i in index) and all(isinstance(i, (Tensor, int)) for i in index):
                device = args[0].device
                indices = [i if isinstance(i, Tensor) else torch.tensor(i, device=device) for i in index]
                return torch.ops.aten.index(args[0], indices)
        return func(*args, **(kwargs or {}))


def at_pairs(mod: Mod, b: Tensor, h: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """Returns [n, R, K]: mod(b, h, row, key) of all pairs of R query indices rows [n, R] and K key indices keys [n, K],
    for n pairs of batch and head, b and h [n]. mod is called with four scalar tensors, as in torch."""
    over_keys = torch.vmap(mod, in_dims=(None, None, None, 0))
    over_rows = torch.vmap(over_keys, in_dims=(None, None, 0, None))
    with _Indexed():
        return torch.vmap(over_rows)(b, h, rows, keys)


def at_points(mod: Mod, *points: Tensor) -> Any:
    """Evaluates a mask_mod or score_mod at n points, given as one tensor [n] per argument of `mod`; returns [n]."""
    with _Indexed():
        return torch.vmap(mod)(*points)


def depends(mod: Mod, axis: int, device: torch.device) -> bool:
    """True if mod(batch, head, row, key) depends on its argument number `axis` (0 to 3)."""
    zero = torch.zeros((), dtype=torch.int64, device=device)
    in_dims = tuple(0 if i == axis else None for i in range(4))
    points = [zero.expand(1) if i == axis else zero for i in range(4)]
    try:
        with _Indexed():
            torch.vmap(mod, in_dims=in_dims, out_dims=None)(*points)
    except ValueError:  # vmap cannot return a batched value as unbatched
        return True
    return False


# --------------------------------------------------------------------------------------------------- relative positions


class Absolute(Exception):
    """The error of a function that reads an absolute position, and not only a distance between positions."""


def _of_difference(compare: Callable[[Any, Any], Any]) -> Any:
    """Returns a comparison of Positions, as __lt__: compare(self - other, 0); it raises Absolute for other operands."""

    def method(self: Position, other: Any) -> Any:
        if not isinstance(other, Position):
            raise Absolute
        return compare(self._shift - other._shift, 0)

    return method


class Position:
    """The index of a row or key of which only the distance to another Position is known.
    The difference of two Positions is a tensor. A function that accepts Positions has the same value for all pairs of
    row and key at that distance. Operations that need the index itself raise Absolute."""

    def __init__(self, shift: Any) -> None:
        self._shift = shift

    def __add__(self, other: Any) -> Position:
        return Position(self._shift + _number(other))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        if isinstance(other, Position):
            return self._shift - other._shift
        return Position(self._shift - _number(other))

    __ge__, __gt__, __le__, __lt__ = map(_of_difference, (operator.ge, operator.gt, operator.le, operator.lt))
    __eq__, __ne__ = map(_of_difference, (operator.eq, operator.ne))
    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Absolute

    def __getattr__(self, name: str) -> Any:
        raise Absolute


def _number(value: Any) -> Any:
    if not isinstance(value, (int, Tensor)) or isinstance(value, bool):
        raise Absolute
    return value


def by_distance(mod: Mod, b: Tensor, h: Tensor, distances: Tensor) -> Tensor | None:
    """Returns [n, D]: mod for each pair b[i], h[i] (batch and head) at each of D values of row - key; None if mod reads
    absolute positions, and not only their difference."""

    def of_distance(b: Tensor, h: Tensor, distance: Tensor) -> Any:
        return mod(b, h, Position(distance), Position(torch.zeros_like(distance)))

    try:
        with _Indexed():
            return torch.vmap(torch.vmap(of_distance, in_dims=(None, None, 0)), in_dims=(0, 0, None))(b, h, distances)
    except Exception:  # any error, because a symbolic position caused it, not the caller
        return None


# --------------------------------------------------------------------------------------------------------- remembering

_ATTRIBUTE = "_fusion_attention_cache"
_ENTRIES = 4  # results for different shapes


class _Cache(OrderedDict[Any, Any]):
    """A cache of results that is stored on a function or mask; a copied or pickled object gets an empty one."""

    def __reduce__(self) -> Any:
        return _Cache, ()

    def __deepcopy__(self, memo: Any) -> _Cache:
        return _Cache()


def remembered(
    owner: Any,
    key: Any,
    captured: tuple[Any, ...],
    compute: Callable[[], T],
    *,
    content: bool = True,
    keep: Callable[[T], bool] = lambda result: True,
) -> T:
    """Returns compute(), or the earlier result that `owner` stores for `key`, while nothing in `captured` has changed.

    Args:
        owner: the object that stores results; nothing is stored on objects without attributes.
        captured: objects that compute() reads: functions with all that they capture, tensors with their content.
        content: False if compute() does not read the content of tensors, so that changes of it do not count.
        keep: returns True for a result that may be reused.
    """
    try:
        results = vars(owner).get(_ATTRIBUTE)
        if type(results) is not _Cache:
            results = _Cache()
            setattr(owner, _ATTRIBUTE, results)
    except (TypeError, AttributeError):
        return compute()
    # Equal lists mean that nothing has changed: numbers, texts, ids of `owners`, versions of tensors.
    owners: list[Any] = []
    state = [atom for value in captured for atom in _atoms(value, frozenset(), set(), owners)]
    if content:
        state += [_content(value) for value in owners if isinstance(value, Tensor)]
    entry = results.get(key)
    if entry is not None and entry[0] == state:
        return entry[2]
    result = compute()
    if not keep(result):
        return result
    results[key] = (state, owners, result)  # while the owners live, their ids are not reused
    while len(results) > _ENTRIES:
        results.popitem(last=False)
    return result


def _atoms(value: Any, names: frozenset[str], visited: set[Any], owners: list[Any]) -> Iterator[Any]:
    """Yields numbers, texts and ids that identify an object and all that it contains or captures, to detect changes.
    names: attributes of the object that its user (a function that captures it) reads. visited, owners: ids of the
    objects yielded so far, and these objects; updated."""
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        yield type(value), value
        return
    # Different functions may read different attributes of one object.
    visit = id(value) if isinstance(value, (Tensor, types.FunctionType)) else (id(value), names)
    if visit in visited:
        yield id(value)
        return
    visited.add(visit)
    owners.append(value)
    if isinstance(value, (tuple, list, set, frozenset)):
        yield type(value), len(value)
        for item in value:
            yield from _atoms(item, names, visited, owners)
        return
    if isinstance(value, dict):
        yield dict, len(value)
        for item in (*value.keys(), *value.values()):
            yield from _atoms(item, names, visited, owners)
        return
    if isinstance(value, types.MethodType):  # every access makes a new object
        yield from _atoms(value.__func__, names, visited, owners)
        yield from _atoms(value.__self__, _names(getattr(value.__func__, "__code__", None)), visited, owners)
        return
    yield id(value)
    if isinstance(value, Tensor):
        return
    if isinstance(value, types.FunctionType):
        names = _names(value.__code__)
        cells = [_cell(cell) for cell in value.__closure__ or ()]
        named = [value.__globals__[name] for name in sorted(names & value.__globals__.keys())]
        for item in (value.__code__, value.__defaults__, value.__kwdefaults__, *cells, *named):
            yield from _atoms(item, names, visited, owners)
    elif isinstance(value, functools.partial):
        yield from _atoms((value.func, value.args, value.keywords), names, visited, owners)
    elif isinstance(value, (types.ModuleType, type)):
        for name in sorted(names):
            result = inspect.getattr_static(value, name, None)
            if isinstance(result, (Tensor, bool, int, float, str, tuple, list, dict, set)):
                yield from _atoms(result, names, visited, owners)
    elif not isinstance(value, (types.CodeType, torch.dtype, torch.device)):
        yield from _attributes(value, names, visited, owners)


def _attributes(value: Any, names: frozenset[str], visited: set[Any], owners: list[Any]) -> Iterator[Any]:
    """Yields numbers, texts and ids that identify the attributes of an object that its __call__ reads or `names` lists,
    to detect changes. visited, owners: ids of the objects yielded so far, and these objects; updated. A property yields
    a new object, so that no state with it equals another: a property may compute anything."""
    call = inspect.getattr_static(type(value), "__call__", None)
    if isinstance(value, torch.nn.Module):
        call = type(value).forward
    if isinstance(call, types.FunctionType):
        yield from _atoms(call, names, visited, owners)
        names = names | _names(call.__code__)
    tables = [getattr(value, "__dict__", {})]
    tables += [tables[0][name] for name in ("_parameters", "_buffers", "_modules") if name in tables[0]]
    for name in sorted(names):
        if (id(value), name) in visited:
            continue
        visited.add((id(value), name))
        table = next((table for table in tables if name in table), None)
        result = inspect.getattr_static(type(value), name, None) if table is None else table[name]
        if table is None and isinstance(result, types.FunctionType):  # a method, which reads its object
            further = _names(result.__code__) - names
            yield from _atoms(result, names, visited, owners)
            yield from _attributes(value, further, visited, owners) if further else ()
        elif table is None and hasattr(type(result), "__get__"):
            yield object()
        elif result is not None:
            yield from _atoms(result, names, visited, owners)


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _content(tensor: Tensor) -> Any:
    """Returns a tuple that changes when a tensor is written or moved; an inference tensor always counts as changed."""
    if tensor.is_inference():
        return object()
    return tensor._version, tensor.requires_grad, tensor.data_ptr() if tensor.layout is torch.strided else 0


@functools.lru_cache(maxsize=256)
def _names(code: types.CodeType | None) -> frozenset[str]:
    """Returns the global names and attributes that a function's code reads, nested functions included."""
    if code is None:
        return frozenset()
    inner = (_names(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return frozenset(code.co_names).union(*inner)
