"""FlexAttention's mask_mod and score_mod: calling them as torch does, and the tensors they capture."""

from __future__ import annotations

import functools
import inspect
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

T = TypeVar("T")
Mod = Callable[..., Any]  # of (b, h, q_idx, kv_idx)

# ------------------------------------------------------------------------------------------------------- evaluating


class _Indexed(TorchFunctionMode):
    """Reads table[q_idx] as a gather: torch would make a Python number of an index without dimensions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(i, Tensor) for i in index) and all(isinstance(i, (Tensor, int)) for i in index):
                device = args[0].device
                indices = [i if isinstance(i, Tensor) else torch.tensor(i, device=device) for i in index]
                return torch.ops.aten.index(args[0], indices)
        return func(*args, **(kwargs or {}))


def at_pairs(mod: Mod, b: Tensor, h: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """mod at every pair of a row and a key of n blocks: [n, R, K], from b, h [n], rows [n, R] and keys [n, K].

    As torch has it, the function sees four scalars.
    """
    over_keys = torch.vmap(mod, in_dims=(None, None, None, 0))
    over_rows = torch.vmap(over_keys, in_dims=(None, None, 0, None))
    with _Indexed():
        return torch.vmap(over_rows)(b, h, rows, keys)


def at_points(mod: Mod, *points: Tensor) -> Any:
    """mod at n points, from tensors [n]."""
    with _Indexed():
        return torch.vmap(mod)(*points)


def depends(mod: Mod, axis: int, device: torch.device) -> bool:
    """Whether what mod says depends on its position number `axis` (0: batch, 1: head, 2: row, 3: key) at all."""
    zero = torch.zeros((), dtype=torch.int64, device=device)
    in_dims = tuple(0 if i == axis else None for i in range(4))
    points = [zero.expand(1) if i == axis else zero for i in range(4)]
    try:
        with _Indexed():
            torch.vmap(mod, in_dims=in_dims, out_dims=None)(*points)
    except ValueError:  # vmap refuses to return as unbatched what is batched
        return True
    return False


# ------------------------------------------------------------------------------------------------------ relative ones


class Absolute(Exception):
    """A function asked where a row or a key lies, not only how far they are apart."""


class Position:
    """A row or a key of unknown position, with a known distance from another: differences of two are tensors.

    What a function says of these is what it says at every pair that is as far apart. Whatever else is asked of one
    raises: then the function is not known to be relative.
    """

    def __init__(self, shift: Any) -> None:
        self._shift = shift

    def __add__(self, other: Any) -> Position:
        return Position(self._shift + _number(other))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        if isinstance(other, Position):
            return self._shift - other._shift
        return Position(self._shift - _number(other))

    def __ge__(self, other: Any) -> Any:
        return self._apart(other) >= 0

    def __gt__(self, other: Any) -> Any:
        return self._apart(other) > 0

    def __le__(self, other: Any) -> Any:
        return self._apart(other) <= 0

    def __lt__(self, other: Any) -> Any:
        return self._apart(other) < 0

    def __eq__(self, other: object) -> Any:
        return self._apart(other) == 0

    def __ne__(self, other: object) -> Any:
        return self._apart(other) != 0

    __hash__ = None  # type: ignore[assignment]

    def _apart(self, other: Any) -> Any:
        if not isinstance(other, Position):
            raise Absolute
        return self._shift - other._shift

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
    """mod where a row lies `distances` behind a key: [n, D], from b, h [n]; None if it is not known to be relative."""

    def of_distance(b: Tensor, h: Tensor, distance: Tensor) -> Any:
        return mod(b, h, Position(distance), Position(torch.zeros_like(distance)))

    try:
        with _Indexed():
            return torch.vmap(torch.vmap(of_distance, in_dims=(None, None, 0)), in_dims=(0, 0, None))(b, h, distances)
    except Exception:  # of any kind: what such a stand-in causes is no error of the caller's
        return None


# --------------------------------------------------------------------------------------------------------- remembering

_ATTRIBUTE = "_fusion_attention_cache"
_ENTRIES = 4  # answers for other shapes


class _Cache(OrderedDict[Any, Any]):
    """What was found out about an object; a copy of the object begins anew."""

    def __reduce__(self) -> Any:
        return _Cache, ()

    def __deepcopy__(self, memo: Any) -> _Cache:
        return _Cache()


def remembered(
    owner: Any,
    question: Any,
    captured: tuple[Any, ...],
    answer: Callable[[], T],
    *,
    content: bool = True,
    keep: Callable[[T], bool] = lambda result: True,
) -> T:
    """answer(), or what it was last time, as long as nothing in `captured` changed; kept on the owner, dies with it.

    Args:
        owner: an object with attributes; one without is asked anew each time.
        question: hashable: what else the answer depends on.
        captured: objects that the answer reads: functions with all they captured, tensors with their content.
        answer: finds out.
        content: False where the answer does not read what tensors hold.
        keep: whether an answer may serve again.
    """
    try:
        answers = vars(owner).get(_ATTRIBUTE)
        if type(answers) is not _Cache:
            answers = _Cache()
            setattr(owner, _ATTRIBUTE, answers)
    except (TypeError, AttributeError):
        return answer()
    state, owners = _state(captured, content)
    entry = answers.get(question)
    if entry is not None and entry[0] == state:
        return entry[2]
    result = answer()
    if not keep(result):
        return result
    answers[question] = (state, owners, result)  # while the owners live, their ids are not reused
    while len(answers) > _ENTRIES:
        answers.popitem(last=False)
    return result


def _state(values: tuple[Any, ...], content: bool) -> tuple[list[Any], list[Any]]:
    """(what is compared, the objects behind it) of values and of all that functions among them captured."""
    owners: list[Any] = []
    atoms = [atom for value in values for atom in _atoms(value, frozenset(), set(), owners)]
    if content:
        atoms += [_content(value) for value in owners if isinstance(value, Tensor)]
    return atoms, owners


def _atoms(value: Any, names: frozenset[str], visited: set[Any], owners: list[Any]) -> Iterator[Any]:
    """names: attributes that the function around reads."""
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        yield type(value), value
        return
    # What another function reads of the same object is another question.
    question = id(value) if isinstance(value, (Tensor, types.FunctionType)) else (id(value), names)
    if question in visited:
        yield id(value)
        return
    visited.add(question)
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
    if isinstance(value, types.MethodType):  # made anew whenever it is asked for
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
        yield from _constants(value, names, visited, owners)
    elif not isinstance(value, (types.CodeType, torch.dtype, torch.device)):
        yield from _attributes(value, names, visited, owners)


def _constants(owner: Any, names: frozenset[str], visited: set[Any], owners: list[Any]) -> Iterator[Any]:
    """Of a module or a class, what the function around it names and what is no code."""
    for name in sorted(names):
        result = inspect.getattr_static(owner, name, None)
        if isinstance(result, (Tensor, bool, int, float, str, tuple, list, dict, set)):
            yield from _atoms(result, names, visited, owners)


def _attributes(value: Any, names: frozenset[str], visited: set[Any], owners: list[Any]) -> Iterator[Any]:
    """Of an object, what its own call reads, and what the function around it names.

    An attribute may compute anything: then nothing is remembered.
    """
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
    """Changes when the content does; an inference tensor does not say, and counts as changed."""
    if tensor.is_inference():
        return object()
    return tensor._version, tensor.requires_grad, tensor.data_ptr() if tensor.layout is torch.strided else 0


@functools.lru_cache(maxsize=256)
def _names(code: types.CodeType | None) -> frozenset[str]:
    """The global names and attributes that a function's code reads, functions inside it included."""
    if code is None:
        return frozenset()
    inner = (_names(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return frozenset(code.co_names).union(*inner)
