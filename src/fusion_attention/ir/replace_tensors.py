"""Replacement of the tensors in a forward call's operands, by name, so that a prepared call runs on other memory."""

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import replace
from typing import Any, TypeVar

import torch

from fusion_attention.ir.memory_views import Dequant, MatrixView, PagedView, RowView
from fusion_attention.ir.problem import IndexerOperands, Operands, Stats

Some = TypeVar("Some", Operands, IndexerOperands)
View = RowView | PagedView | MatrixView | torch.Tensor


def operand_tensors(operands: Operands | IndexerOperands) -> dict[str, torch.Tensor]:
    """Returns the tensors of a call's operands by name: names of fields, "max", "sum", "k_scale", "k_offset",
    "v_scale", "v_offset", "table" (of pages) and "compressed_table" (of the pages of compressed keys).

    Raises:
        ValueError: keys or values in several tensors, two page tables of one source, or a weight_scale, which has no
            name.
    """
    result: dict[str, torch.Tensor] = {}
    for name, view in _views(operands):
        if isinstance(view, PagedView) and result.setdefault(_table_of(name), view.table) is not view.table:
            raise ValueError("pages of two tables")
        if isinstance(view, RowView) and len(view.keep) != 1:
            raise ValueError("rows of several tensors")
        result[name] = _tensor_of(view)
    return result


def moved(operands: Some, tensors: Mapping[str, torch.Tensor]) -> Some:
    """Returns a copy of a call's operands with views of other tensors; `tensors` has one for every name of
    operand_tensors()."""
    new: dict[str, Any] = {
        name: _over(view, tensors[name], tensors.get(_table_of(name))) for name, view in _views(operands)
    }
    if "max" in new:
        new["stats"] = Stats(new.pop("max"), new.pop("sum"))
    for side in "kv":
        if f"{side}_scale" in new:
            new[f"dequant_{side}"] = Dequant(new.pop(f"{side}_scale"), new.pop(f"{side}_offset", None))
    result = copy(operands)
    vars(result).update(new)
    return result


def _views(o: Operands | IndexerOperands) -> Iterator[tuple[str, View]]:
    for name, value in vars(o).items():
        if value is None:
            continue  # Most are, and this runs in every call.
        if name == "weight_scale":
            raise ValueError("a weight_scale")
        if isinstance(value, Stats):
            yield from (("max", value.max), ("sum", value.sum))
        elif isinstance(value, Dequant):
            yield f"{name[-1]}_scale", value.scale
            if value.offset is not None:
                yield f"{name[-1]}_offset", value.offset
        elif isinstance(value, View):
            yield name, value


def _table_of(name: str) -> str:
    return "compressed_table" if name.endswith("_compressed") else "table"


def _tensor_of(view: View) -> torch.Tensor:
    if isinstance(view, RowView):
        return view.keep[0]
    return view.pool if isinstance(view, PagedView) else view.keep if isinstance(view, MatrixView) else view


def _over(view: View, tensor: torch.Tensor, table: torch.Tensor | None) -> View:
    if isinstance(view, torch.Tensor):
        return tensor
    if isinstance(view, MatrixView):
        return replace(view, keep=tensor)
    if isinstance(view, RowView):
        return view.over(tensor)
    assert table is not None
    return replace(view, pool=tensor, table=table)
