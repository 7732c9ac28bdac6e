"""Parameters, rules and check functions that definitions of several auxiliary operators use."""

from functools import partial
from typing import Annotated, Any

import torch

from fusion_attention.contract import Op, Rule, Tensor, functions_in, trained
from fusion_attention.ops.shared.rules import invalid, refused, untrained

FLOATS = "float16 bfloat16 float32"
SIZES = {"B": 2, "S1": 4, "N1": 4, "W": 8, "H": 4}  # W: elements of a row, H: half as many


def ends_with(tensor: torch.Tensor, last: torch.Tensor) -> bool:
    """True if the shape of `tensor` ends with the shape of `last`, which has an axis."""
    return 0 < last.dim() <= tensor.dim() and tensor.shape[tensor.dim() - last.dim() :] == last.shape


def has_axis(tensor: torch.Tensor, dim: int) -> bool:
    """True if a tensor has the axis `dim`; negative ones count from the end."""
    return -tensor.dim() <= dim < tensor.dim()


def halves(tensor: torch.Tensor, dim: int) -> bool:
    """True if the tensor has an axis `dim`, of even size."""
    return has_axis(tensor, dim) and tensor.shape[dim] % 2 == 0


def expands_to(tensor: torch.Tensor, target: torch.Tensor) -> bool:
    """True if a tensor broadcasts to the shape of `target`."""
    if tensor.dim() > target.dim():
        return False
    shape = target.shape[target.dim() - tensor.dim() :]
    return all(n in (1, m) for n, m in zip(tensor.shape, shape, strict=True))


def half_of(tensor: torch.Tensor, dim: int) -> tuple[int, ...]:
    """Returns a tensor's shape with half the size along the axis `dim`."""
    at = dim % tensor.dim()
    return (*tensor.shape[:at], tensor.shape[at] // 2, *tensor.shape[at + 1 :])


def within(indices: torch.Tensor, *sizes: int, low: int = 0) -> bool | str:
    """True if every column of `indices` [.., len(sizes)] is in [low, size); else text with a wrong index."""
    if indices.is_meta or not indices.numel():
        return True
    columns = indices.reshape(-1, len(sizes))
    for top, bottom, size in zip(columns.amax(0).tolist(), columns.amin(0).tolist(), sizes, strict=True):
        if bottom < low or top >= size:
            return f"{bottom if bottom < low else top}, outside [{low}, {size})"
    return True


FUNCTIONS = functions_in(globals()) | {"trained": trained}


def floats(name: str, text: str, *, like: str = "", **changes: Any) -> Tensor:
    """Returns a floating-point tensor parameter of an operator, whose shape other rules check; text: its description;
    like: the parameter whose dtype it must have, "": any; changes: other fields of Tensor."""
    return Tensor(name, text, dtypes=f"={like}" if like else FLOATS, **changes)


def result(name: str, text: str, dtypes: str) -> Tensor:
    """Returns the parameter for an operator's result of one of several dtypes; text: describes it and its shape."""
    return Tensor(name, text, dtypes=dtypes, output=True)


def auxiliary(name: str, summary: str, inputs: tuple[Any, ...], results: tuple[Tensor, ...], **more: Any) -> Op:
    """Returns the definition of an operator with these parameters, computed by torch.
    more: other fields of Op; `sample`: shapes of the default sample; `functions`: further functions that rules call."""
    return Op(
        name,
        summary,
        (*inputs, *results),
        results=tuple(p.name for p in results),
        sizes=SIZES | more.pop("sizes", {}),
        samples={"": more.pop("sample")},
        functions=FUNCTIONS | more.pop("functions", {}),
        **more,
    )


def writes(*names: str) -> dict[str, Any]:
    """Returns {name: type} of at most two tensor parameters that a function writes in place: torch.Tensor, annotated
    "a!" and "b!" as in torch's schemas."""
    return {name: Annotated[torch.Tensor, f"{letter}!"] for name, letter in zip(names, "ab", strict=False)}


def same_shape(name: str, other: str, **more: Any) -> Rule:
    """Returns a rule that checks calls: tensor `name` has the shape of tensor `other`; more: `invalid`, arguments of a
    sample call that violates the rule."""
    broken = more.pop("invalid", {name: "7"})
    return invalid(
        f"{name}.shape == {other}.shape", f"{name}: the shape of {other} (element by element)", invalid=broken
    )


def two_halves(**more: Any) -> tuple[Rule, ...]:
    """Returns rules that check calls: tensor `input` has an axis `dim` of even size; more: an invalid sample call."""
    return (
        invalid("has_axis(input, dim)", "dim: an axis of input (negative axes count from the end)", invalid={"dim": 4}),
        invalid(
            "halves(input, dim)",
            "input: an even size along dim (it is divided into two halves)",
            when="has_axis(input, dim)",
            invalid={"input": "3 5", **more},
        ),
    )


# Limit: the chip has no derivative of some functions. This library has, so only strict calls fail.
no_derivative = partial(untrained, "the chip has no derivative of this function", kind=refused)
