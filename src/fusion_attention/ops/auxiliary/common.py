"""What records of auxiliary operators have in common: their parts of the record, and what their rules may call."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import torch

from fusion_attention.contract import Op, Rule, Tensor, trained
from fusion_attention.ops.shared.rules import invalid, refused, untrained

FLOATS = "float16 bfloat16 float32"
SIZES = {"B": 2, "S1": 4, "N1": 4, "W": 8, "H": 4}  # W: elements of a row, H: half as many


def ends_with(tensor: torch.Tensor, last: torch.Tensor) -> bool:
    """Whether a tensor's last axes are those of another one, which has some."""
    return 0 < last.dim() <= tensor.dim() and tensor.shape[tensor.dim() - last.dim() :] == last.shape


def has_axis(tensor: torch.Tensor, dim: int) -> bool:
    """Whether a tensor has this axis; negative ones count from the end."""
    return -tensor.dim() <= dim < tensor.dim()


def halves(tensor: torch.Tensor, dim: int) -> bool:
    """Whether an axis has two halves."""
    return has_axis(tensor, dim) and tensor.shape[dim] % 2 == 0


def expands_to(tensor: torch.Tensor, target: torch.Tensor) -> bool:
    """True if a tensor is repeated along axes of size 1, or along missing ones, to another one's shape."""
    if tensor.dim() > target.dim():
        return False
    shape = target.shape[target.dim() - tensor.dim() :]
    return all(n in (1, m) for n, m in zip(tensor.shape, shape, strict=True))


def half_of(tensor: torch.Tensor, dim: int) -> tuple[int, ...]:
    """A tensor's shape, half as long along an axis."""
    at = dim % tensor.dim()
    return (*tensor.shape[:at], tensor.shape[at] // 2, *tensor.shape[at + 1 :])


def within(indices: torch.Tensor, *sizes: int, low: int = 0) -> bool | str:
    """Whether indices are from `low` to below a size, each column below its own; reads them. What is not, if any."""
    if indices.is_meta or not indices.numel():
        return True
    columns = indices.reshape(-1, len(sizes))
    for top, bottom, size in zip(columns.amax(0).tolist(), columns.amin(0).tolist(), sizes, strict=True):
        if bottom < low or top >= size:
            return f"{bottom if bottom < low else top}, outside [{low}, {size})"
    return True


FUNCTIONS = {
    "ends_with": ends_with,
    "has_axis": has_axis,
    "halves": halves,
    "half_of": half_of,
    "expands_to": expands_to,
    "within": within,
    "trained": trained,
}


def floats(name: str, text: str, *, like: str = "", **changes: Any) -> Tensor:
    """A tensor of floats, of any shape that rules allow; like: the tensor whose dtype it has."""
    return Tensor(name, text, dtypes=f"={like}" if like else FLOATS, **changes)


def result(name: str, text: str, dtypes: str) -> Tensor:
    """What an auxiliary operator returns; its text says the shape."""
    return Tensor(name, text, dtypes=dtypes, output=True)


def auxiliary(name: str, summary: str, inputs: tuple[Any, ...], results: tuple[Tensor, ...], **more: Any) -> Op:
    """A record of an auxiliary operator; a plain sample's shapes stand in `sample`, what rules call besides in
    `functions`."""
    return Op(
        name,
        summary,
        (*inputs, *results),
        source="Ascend op-plugin",
        results=tuple(p.name for p in results),
        sizes=SIZES | more.pop("sizes", {}),
        samples={"": more.pop("sample")},
        functions=FUNCTIONS | more.pop("functions", {}),
        **more,
    )


def writes(*names: str) -> dict[str, Any]:
    """Tensors that a function writes, as the schema of its operator says it (Op.declared)."""
    return {name: Annotated[torch.Tensor, f"{letter}!"] for name, letter in zip(names, "ab", strict=False)}


def same_shape(name: str, other: str, **more: Any) -> Rule:
    """A tensor of another one's shape."""
    broken = more.pop("invalid", {name: "7"})
    return invalid(
        f"{name}.shape == {other}.shape", name, "element by element", f"the shape of {other}", invalid=broken
    )


def two_halves(dim: str = "dim", tensor: str = "input", **more: Any) -> tuple[Rule, ...]:
    """An axis that is there, and is cut in the middle; more: what a sample with an odd axis needs besides."""
    present, advice = f"has_axis({tensor}, {dim})", "negative axes count from the end"
    return (
        invalid(present, dim, advice, f"an axis of {tensor}", invalid={dim: 4}),
        invalid(
            f"halves({tensor}, {dim})",
            tensor,
            "it is cut in the middle",
            f"an even size along {dim}",
            when=present,
            invalid={tensor: "3 5", **more},
        ),
    )


# The chip has no derivative of some functions: here they have one, so that strict calls alone are refused.
no_derivative = partial(untrained, "the chip has no derivative of this function", kind=refused)
