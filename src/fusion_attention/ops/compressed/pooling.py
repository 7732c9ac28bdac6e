"""The operator definition of this library's compress() and its lowered calls, which pool windows of rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fusion_attention.contract import Array, Attr, Bound, Op, Tensor
from fusion_attention.ir.call import Filled, buffer
from fusion_attention.ir.memory_views import RowView
from fusion_attention.ir.pooling import PoolingGrads, PoolingOperands, PoolingProblem
from fusion_attention.ir.problem import Extents
from fusion_attention.memory import empty
from fusion_attention.ops.shared.checks import Outcome, lengths_fit
from fusion_attention.ops.shared.layouts import row_view, to_float32
from fusion_attention.ops.shared.lowered_call import OfCall, Results, Run, TensorCall
from fusion_attention.ops.shared.params import OWN_FLOATS, output
from fusion_attention.ops.shared.rules import invalid, meaning, needed, of_lengths
from fusion_attention.ops.sparse.definitions import LAYOUT

OUT = "out"
DIFFERENTIABLE = ("kv", "gate", "position_bias")


@dataclass(frozen=True, eq=False)
class Pooling(TensorCall):
    """A forward call of compress(), which averages windows of rows, as back ends compute it.

    Args:
        layout: of the rows and of the results.
        windows: number of results of each padded sequence in memory, or of all packed sequences.
    """

    problem: PoolingProblem
    windows: int
    op_kind = "pooling"

    def results(self) -> dict[str, torch.Tensor]:
        kv = self.given("kv")
        return {OUT: empty(kv, (*kv.shape[:-3], self.windows, self.problem.heads, self.problem.dim))}

    def memory_rows(self, tensor: torch.Tensor) -> RowView:
        """Returns a view, by sequence and row, of a tensor with the shape of kv."""
        return row_view(tensor, self.layout, self.problem.heads, self.extents, "kv")

    def operands(self, out: torch.Tensor | None) -> PoolingOperands:
        """Returns views of memory for back ends: of kv, gate and `out`, and a contiguous float32 position_bias."""
        bias = to_float32(self.tensors["position_bias"], self.given("kv"))
        rows = None if out is None else self.rows(out, self.problem.heads)
        kv, gate = (self.memory_rows(self.given(name)) for name in ("kv", "gate"))
        # Back ends read a contiguous bias.
        return PoolingOperands(kv, gate, rows, None if bias is None else bias.contiguous())

    def fill(self, outputs: Mapping[str, torch.Tensor]) -> Filled:
        out = buffer(outputs[OUT])
        clears = () if self.covers(out) else (out,)
        return Filled((self.operands(out),), (out,), (outputs[OUT],), clears)

    def backward(self, results: Results, upstream: Results) -> PoolingBackward:
        """Returns the object by which back ends compute gradients, from the gradient of the result (in `upstream`)."""
        return PoolingBackward(self, upstream[OUT])

    def gradients(
        self, results: Results, upstream: Results, run: Run, wanted: Collection[str] | None = None
    ) -> dict[str, torch.Tensor]:
        result = run(PoolingBackward(self, upstream[OUT], wanted is None or "position_bias" in wanted))
        return {name: result[f"d{name}"] for name in DIFFERENTIABLE if f"d{name}" in result}


class PoolingBackward(OfCall):
    """A gradient call of compress(), as back ends compute it; of_bias: the gradient of position_bias is wanted."""

    call: Pooling
    op_kind = "pooling_backward"

    def __init__(self, call: Pooling, dout: torch.Tensor, of_bias: bool = True) -> None:
        super().__init__(call)
        self.dout, bias = dout, call.tensors["position_bias"]
        self.bias = bias if of_bias else None

    def results(self) -> dict[str, torch.Tensor]:
        like = {"dkv": self.call.given("kv"), "dgate": self.call.given("gate")}
        like |= {} if self.bias is None else {"dposition_bias": self.bias}
        return {name: empty(t, t.shape) for name, t in like.items()}

    def fill(self, outputs: Mapping[str, torch.Tensor]) -> Filled:
        call, result = self.call, tuple(outputs.values())
        dkv, dgate, *dbias = (buffer(tensor) for tensor in result)
        # Back ends write the gradient of a bias in the precision of its sums.
        dbias = [empty(t, t.shape, torch.promote_types(call.given("kv").dtype, torch.float32)) for t in dbias]
        dout = call.rows(self.dout.to(dkv.dtype), call.problem.heads)
        grads = PoolingGrads(dout, call.memory_rows(dkv), call.memory_rows(dgate), *dbias)
        nothing = () if len(call.extents) else tuple(dbias)  # Then no back end runs.
        return Filled((call.operands(None), grads), (dkv, dgate, *dbias), result, nothing)


def _lower(bound: Bound) -> Pooling:
    n = bound.names
    kv = n["kv"]

    def described(names: dict[str, Any]) -> tuple[PoolingProblem, Extents]:
        memory = names["kv_len"] if names["layout"] == "TND" else np.full(names["B"], names["S"], np.int64)
        used = memory if names["kv_len"] is None else names["kv_len"]
        results = np.maximum(used // names["ratio"] - names["before"], 0)
        none = np.zeros_like(results)
        dtype = str(kv.dtype).removeprefix("torch.")
        dim = names["C"] // (1 + names["overlap"])
        problem = PoolingProblem(
            names["N2"], dim, names["ratio"], bool(names["overlap"]), dtype, names["position_bias"] is not None
        )
        return problem, Extents(results, memory, (results > 0) * int(names["before"]), none, none, none)

    problem, extents = bound.once(described)
    return Pooling(extents, n["layout"], {name: n[name] for name in DIFFERENTIABLE}, problem, _windows(n))


def _windows(n: Mapping[str, Any]) -> Any:
    """Returns how many windows (rows of the output, one compressed key each) the output tensor of a call with arguments
    `n` has room for along its axis of windows: an int, or a torch.SymInt in a trace."""
    return n["windows"] if n["layout"] == "TND" else torch.sym_max(n["kv"].shape[1] // n["ratio"] - n["before"], 0)


def _fresh(n: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    *rows, heads, channels = n["kv"].shape
    return {OUT: empty(n["kv"], (*rows[:-1], _windows(n), heads, channels // (1 + n["overlap"])))}


def lengths_add_up(given: np.ndarray, tokens: int) -> Outcome:
    """True (else the fault as text) if the lengths `given` are not negative and add up to `tokens`, all packed rows."""
    each = bool(((given >= 0) & (given <= tokens)).all())  # Their sum cannot overflow then.
    return (each and int(given.sum()) == tokens) or f"{given.tolist()}, {tokens} rows in the tensor"


_SHAPE = {"BSND": "B S N2 C", "TND": "T N2 C"}
_LENGTHS = {"layout": "TND", "kv_len": [9, 8], "windows": 4}
RECORD = Op(
    "compress",
    "Pools every window of rows to one row, a sum weighted per channel by a softmax over the window.",
    params=(
        Tensor("kv", "Rows; with overlap, the first C / 2 channels are for the next window, the others for their own "
               "window.", dtypes=OWN_FLOATS, shape=_SHAPE),
        Tensor("gate", "Logits of the weights, per row and channel.", dtypes="=kv", shape=_SHAPE),
        Attr("ratio", "Rows of a window.", axis="R"),
        Tensor("position_bias", "Added to the gates by the position of a row in its window.", True, dtypes=OWN_FLOATS,
               shape="R C"),
        Attr("overlap", "A window also pools the rows of the previous window; rows have 2 D channels.", type=bool,
             default=False),
        LAYOUT,
        Array("kv_len", "Rows of every sequence; required in layout TND.", True),
        Attr("before", "The first window in memory has no result; it precedes the first one.", type=bool,
             default=False),
        Attr("windows", "Number of results of all packed sequences.", default=0),
        output(OUT, "A row for every complete window.", {"BSND": "B W N2 D", "TND": "W N2 D"}, "=kv"),
    ),
    rules=(
        needed("kv_len", "the tensor does not show where a sequence ends", text="the lengths of packed sequences",
               only=("TND",)),
        of_lengths("lengths_fit(kv_len, False, B, S, None)",
                   "kv_len: the lengths of the sequences in kv (one per sequence)", only=("BSND",),
                   invalid={"kv_len": [1, 10]}),
        of_lengths("lengths_add_up(kv_len, T)",
                   "kv_len: the lengths of all sequences in kv (they add up to the rows of kv)",
                   only=("TND",), invalid={"kv_len": [9, 9]}),
        invalid("N2 >= 1 and C >= 1", "kv: at least one head and one channel (other rows have no keys)",
                invalid={"C": 0}),
        invalid("not overlap or C % 2 == 0",
                "kv: an even number of channels with overlap (half of them are for the next window)",
                invalid={"overlap": True, "C": 5}),
        meaning("windows == sum((kv_len // ratio - before).clip(0))",
                "windows: the complete windows of the sequences (pass kv_len as a list of integers)", only=("TND",),
                invalid={"windows": 3}),
    ),
    formula="z_p = gate_p + position_bias[p % ratio],  out_w = sum_p softmax_p(z_p) * kv_p,  p in window w",
    tex=r"z_p = gate_p + bias_{p \bmod r} \qquad out_w = \sum_{p=wr}^{wr+r-1} "
        r"\operatorname{softmax}_p(z_p) \odot kv_p",
    layouts=("BSND", "TND"),
    layout_attr="layout",
    neutral={"overlap": False, "before": False, "windows": 0, **dict.fromkeys(("kv_len", "B", "S", "T", "W", "D"))},
    functions={one.__name__: one for one in (lengths_fit, lengths_add_up)},
    lower=_lower,
    results=(OUT,),
    fresh=_fresh,
    trains={OUT: DIFFERENTIABLE},
    sizes={"B": 2, "S": 9, "T": 17, "N2": 1, "C": 8, "R": 4},
    samples={"BSND": {"ratio": 4}, "TND": {"ratio": 4, **_LENGTHS}},
)  # fmt: skip
RECORDS = (RECORD,)
