"""torch_npu's grouped matrix product, computed by torch's operators."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fusion_attention.contract import is_number, to_array
from fusion_attention.npu.auxiliary.activations import fast_gelu
from fusion_attention.npu.auxiliary.call import as_given, checked
from fusion_attention.npu.auxiliary.quantised import block_sums, exact, read_scale, rounded, unpacked
from fusion_attention.npu.functions_from_definitions import Args, from_record
from fusion_attention.ops.auxiliary_definitions import grouped_matmul
from fusion_attention.ops.auxiliary_definitions.quantised import DTYPES, number_of
from fusion_attention.torch_ops.dispatch import is_traced

Tensor = torch.Tensor
Tensors = Sequence[Tensor]
ACTIVATIONS: dict[int, Callable[[Tensor], Tensor]] = {
    0: lambda y: y,
    1: F.relu,
    2: lambda y: F.gelu(y, approximate="tanh"),
    4: fast_gelu,
    5: F.silu,
}


@from_record(grouped_matmul.GROUPED, host=None)
def npu_grouped_matmul(args: Args) -> list[Tensor]:
    x, weight, group_list = args["x"], args["weight"], args["group_list"]
    dense_weight = _dense_weight(weight, x)
    given = {**args, "weight": dense_weight, "output_dtype": number_of(args["output_dtype"])}
    given["lowered"] = 0 if dense_weight is weight else 8
    kind = args["group_list_type"]
    in_pairs = (not isinstance(kind, Tensor) or is_number(kind)) and kind == 2
    if in_pairs and isinstance(group_list, Tensor) and group_list.shape[1:] == (2,):
        given["group_list"] = group_list.flatten()
    if args["group_type"] is None and isinstance(group_list, (list, tuple)):
        given["group_type"] = 0 if len(x) == 1 else -1
    given |= checked(grouped_matmul.GROUPED, given)
    with as_given(x[0]):
        x, weight = _listed(given["x"]) or (), _listed(given["weight"]) or ()
        number = given["output_dtype"]
        product = _Product(given, x[0].dtype if number is None else DTYPES[number])
        one = given["split_item"] in (2, 3)
        if given["group_type"] == 2:
            return product.of_sums(x[0], weight[0])
        if len(x) > 1 or given["group_type"] == -1:
            starts = [0, *torch.tensor([t.shape[0] for t in x]).cumsum(0).tolist()]
            results = [product(t, i, starts[i]) for i, t in enumerate(x)]
            return [torch.cat(results)] if one else results
        return product.of_rows(x[0], one)


def _listed(given: Tensor | Tensors | None) -> Tensors | None:
    return (given,) if isinstance(given, Tensor) else given


def _dense_weight(weight: Tensors, x: Tensors) -> Tensors:
    """Returns the weights; int4, eight in an int32, become int8: [K, N / 8] becomes [K, N] if x has K columns, else
    [K / 8, N] becomes [K, N]."""
    ours, rows = _listed(weight), _listed(x)
    if not (isinstance(ours, (list, tuple)) and isinstance(rows, (list, tuple)) and ours and rows):
        return weight
    if not all(isinstance(t, Tensor) and t.dim() > 1 for t in (*ours, *rows)) or {w.dtype for w in ours} != {
        torch.int32
    }:
        return weight
    inner = [rows[min(i, len(rows) - 1)].shape[-1] for i in range(len(ours))]
    return [unpacked(w) if n == w.shape[-2] else unpacked(w.mT).mT for w, n in zip(ours, inner, strict=True)]


class _Product:
    """A grouped matrix product: rows times their group's matrix, with the group's scales, bias and activation."""

    def __init__(self, given: dict[str, Any], dtype: torch.dtype) -> None:
        """Stores weights, scales and groups; given: the operator's arguments by name; dtype: dtype of results."""

        self.weights = grouped_matmul.matrices(_listed(given["weight"]) or ())
        listed = [_listed(given[name]) for name in grouped_matmul.ONE_EACH]
        self.vectors = [None if one is None else grouped_matmul.vectors(one, len(self.weights)) for one in listed]
        self.lowered = given["lowered"]
        rows = _listed(given["per_token_scale"])
        self.per_token = None if rows is None else rows[0]
        self.act, self.dtype = ACTIVATIONS[given["act_type"] or 0], dtype
        self.group_list, self.kind = given["group_list"], given["group_list_type"] or 0
        self.lazy = is_traced(given.values()) or (isinstance(self.group_list, Tensor) and self.group_list.is_meta)

    def __call__(self, x: Tensor, group: int, start: int) -> Tensor:
        """Returns x [rows, K] @ weight of `group` [K, N], scaled, with bias and activation; start: index of x's first
        row among the rows of all groups (for scales per row)."""
        weight = self.weights[group]
        bias, scale, anti, shift = [None if v is None else v[group] for v in self.vectors]
        if x.dtype == torch.int8:
            if scale is None:
                y = exact(x, weight)
                return self.act(y if bias is None else y + bias).to(self.dtype)
            factors, offset = read_scale(scale)
            if self.lowered or factors.dim() == 2:
                y = block_sums(x.double() - self.lowered, weight, factors)
                y = y if bias is None else y + bias
            else:
                y = exact(x, weight)
                y = (y if bias is None else y + bias).float() * factors
            if self.per_token is not None:
                y = y * self.per_token[start : start + x.shape[0]].unsqueeze(-1)
            if self.dtype == torch.int8:
                return rounded(self.act(y if offset is None else y + offset), 127)
        elif anti is not None and weight.dtype == torch.int8:
            blocks = (1 if anti.dim() == 1 else len(anti), -1)
            weight32 = weight.float().unflatten(0, blocks)
            weight32 = weight32 if shift is None else (weight32 + shift.float().unsqueeze(-2)).to(x.dtype).float()
            weight32 = (weight32 * anti.float().unsqueeze(-2)).to(x.dtype).float().flatten(0, 1)
            y = x.float() @ weight32
            y = y if bias is None else y + bias
        else:
            y = x @ weight if bias is None else x.float() @ weight.float() + bias
        return self.act(y).to(self.dtype)

    def of_rows(self, x: Tensor, one: bool) -> list[Tensor]:
        """Returns a list with the product [rows, N] of each group of rows of x [M, K]; one: True for one tensor [M, N]
        with the rows of all groups, 0 for rows after the last group."""
        groups = len(self.weights)
        if self.lazy:
            if not one:
                raise NotImplementedError(
                    "npu_grouped_matmul: split_item: expected 2 or 3 in a trace, where the lengths of the results of "
                    "split_item 0 and 1 have no values"
                )
            inside = self._inside(x.shape[0])
            y = x.new_zeros(x.shape[0], self.weights[0].shape[1], dtype=self.dtype)
            for i in range(groups):
                y = torch.where(inside[i].unsqueeze(1), self(x, i, 0), y)
            return [y]
        ends, order = self._ends(), grouped_matmul.groups_of(to_array(self.group_list), self.kind)
        results = [self(x[a:b], i, a) for i, a, b in zip(order, [0, *ends], ends, strict=False)]
        if not one:
            return results
        return [torch.cat((*results, x.new_zeros(x.shape[0] - ends[-1], results[0].shape[1], dtype=self.dtype)))]

    def of_sums(self, x: Tensor, weight: Tensor) -> list[Tensor]:
        """Returns a list with one tensor [E, M, N]: for each of E groups of the axis K, x [M, K] @ weight [K, N],
        summed over the group's part of K only."""
        if self.lazy:
            inside = self._inside(x.shape[1])
            results = [
                torch.where(in_group, x, 0) @ torch.where(in_group.unsqueeze(1), weight, 0) for in_group in inside
            ]
        else:
            ends = self._ends()
            results = [x[:, a:b] @ weight[a:b] for a, b in zip([0, *ends], ends, strict=False)]
        return [self.act(torch.stack(results)).to(self.dtype)]

    def _ends(self) -> list[int]:
        """Returns the end of each group's rows among all rows; reads group_list on the host."""
        ends: list[int] = grouped_matmul.sizes_of(to_array(self.group_list), self.kind).cumsum().tolist()
        return ends

    def _inside(self, rows: int) -> Tensor:
        """Returns bool [E, rows], true for the rows of each of E groups; computed on the device, as a trace needs."""
        given = torch.as_tensor(self.group_list)
        ends = (given[1::2] if self.kind == 2 else given).cumsum(0) if self.kind else given
        starts = torch.cat((ends.new_zeros(1), ends[:-1]))
        row = torch.arange(rows, device=ends.device)
        inside = (row >= starts.unsqueeze(1)) & (row < ends.unsqueeze(1))
        if self.kind != 2:
            return inside
        groups = torch.arange(len(self.weights), device=ends.device).unsqueeze(1)
        return ((given[::2] == groups).unsqueeze(2) & inside).any(1)
