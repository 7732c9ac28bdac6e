"""Lowered calls of the indexer's losses and statistics: problem, views, and allocation of results."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fusion_attention.ir.call import Filled, buffer
from fusion_attention.ir.kv import RowView
from fusion_attention.ir.problem import (
    Extents,
    IndexerGrads,
    IndexerLossOperands,
    IndexerLossProblem,
    IndexerOperands,
    IndexerProblem,
    Stats,
)
from fusion_attention.memory import empty
from fusion_attention.ops.shared.call import Results, Run, TensorCall
from fusion_attention.ops.shared.layouts import row_view
from fusion_attention.ops.sparse.lowered_call import grouped, narrow, statistics

Tensor = torch.Tensor
DIFFERENTIABLE = ("query_index", "key_index", "weights")
ATTENTION = ("query", "key", "query_rope", "key_rope", "sinks")
STATISTICS = ("softmax_max", "softmax_sum")
INDEX_STATISTICS = ("softmax_max_index", "softmax_sum_index")
INPUTS = (*DIFFERENTIABLE, *ATTENTION, "sparse_indices", *STATISTICS, *INDEX_STATISTICS, "lse")
RESULTS = ("dquery_index", "dkey_index", "dweights", "loss")
TARGET_INPUTS = (*DIFFERENTIABLE, "target", "sparse_indices", "softmax_lse")
TARGET_RESULTS = (*RESULTS[:3], "softmax_out")


def fresh(n: Mapping[str, Any]) -> dict[str, Tensor]:
    """Allocates the results of a loss from its arguments and derived values `n`."""
    gradients = (empty(n[name], n[name].shape) for name in DIFFERENTIABLE)
    loss = empty(n["query"], (1,), torch.float32)
    return dict(zip(RESULTS, (*gradients, loss), strict=True))


def fresh_target(n: Mapping[str, Any], names: tuple[str, ...] = TARGET_RESULTS) -> dict[str, Tensor]:
    """Allocates the results `names` of a loss against a target that the caller passes; n: the call's arguments."""
    results = fresh({**n, "query": n["query_index"]})
    if "loss" not in names:
        results["softmax_out"] = empty(n["target"], n["target"].shape)
    return {name: results[name] for name in names}


def fresh_statistics(n: Mapping[str, Any]) -> dict[str, Tensor]:
    """Allocates the softmax maximum and sum of the indexer's scores; n: the call's arguments and derived values."""
    q = n["query_index"]
    shape = (1, q.shape[0]) if n["layout"] == "TND" else (q.shape[0], 1, q.shape[1])
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return {name: empty(q, shape, dtype) for name in STATISTICS}


def fresh_lse(n: Mapping[str, Any]) -> dict[str, Tensor]:
    """Allocates the log-sum-exp of the indexer's scores; n: the call's arguments and derived values."""
    return {"softmax_lse": fresh_statistics(n)[STATISTICS[0]]}


@dataclass(frozen=True, eq=False)
class _Call(TensorCall):
    """A lowered call of an indexer's loss or statistics; `capacities`, if a subclass has it, is as in Indexer."""

    @property
    def memory(self) -> Extents:
        """Rows and keys of the sequences in memory, which determine their positions in packed tensors."""
        capacities: Extents | None = getattr(self, "capacities", None)
        return capacities or self.extents

    def rows(self, tensor: Tensor, heads: int = 1) -> RowView:
        """View of a tensor that has a row per query token and head."""
        return row_view(tensor, self.layout, heads, self.memory, "q")

    def keys(self, tensor: Tensor, heads: int = 1) -> RowView:
        """View of a tensor that has a row per key token and head."""
        return row_view(tensor, self.layout, heads, self.memory, "kv")

    def statistic(self, tensor: Tensor) -> RowView:
        """View of a statistic of the indexer, [B, 1, S1] or [1, T1]: one number per query token."""
        return self.rows(tensor.transpose(-1, -2).unsqueeze(-1))

    def index(self, heads: int, indices: Tensor | None, max_: Tensor | None, sum_: Tensor | None) -> IndexerOperands:
        """Views of the indexer's tensors; heads: its query heads; indices, max_, sum_: its lists and statistics."""
        stats = None if max_ is None or sum_ is None else Stats(self.statistic(max_), self.statistic(sum_))
        return IndexerOperands(
            q=self.rows(self.given("query_index"), heads),
            k=self.keys(self.given("key_index")),
            weights=self.rows(self.given("weights").unsqueeze(-2)),
            indices=None if indices is None else self.rows(narrow(indices)),
            stats=stats,
        )


# ---------------------------------------------------------------------------------------------------------- statistics


@dataclass(frozen=True, eq=False)
class Statistics(_Call):
    """The lowered call of the softmax statistics of the indexer's scores over all visible keys of a row."""

    problem: IndexerProblem
    capacities: Extents | None = None
    op_kind = "indexer_lse"

    def results(self) -> dict[str, Tensor]:
        return fresh_statistics({**self.tensors, "layout": self.layout})

    def fill(self, outputs: Mapping[str, Tensor]) -> Filled:
        return _StatisticsRun(self, outputs)


class _StatisticsRun(Filled):
    __slots__ = ()

    def __init__(self, call: Statistics, outputs: Mapping[str, Tensor]) -> None:
        buffers = tuple(outputs[name] for name in STATISTICS)
        clears = () if call.covers(call.given("query_index")) else buffers
        super().__init__((call.index(call.problem.heads, None, *buffers),), buffers, clears=clears)

    def finish(self) -> None:
        max_, _ = self.buffers
        max_.masked_fill_(max_ == -torch.inf, 0)  # CANN's statistics of a row without visible keys are 0 and 0.


@dataclass(frozen=True, eq=False)
class LogSum(Statistics):
    """The lowered call of the log-sum-exp, max + log(sum), of the indexer's scores."""

    def results(self) -> dict[str, Tensor]:
        return fresh_lse({**self.tensors, "layout": self.layout})

    def fill(self, outputs: Mapping[str, Tensor]) -> Filled:
        return _LogSumRun(self, outputs)


class _LogSumRun(_StatisticsRun):
    __slots__ = ("lse",)

    def __init__(self, call: LogSum, outputs: Mapping[str, Tensor]) -> None:
        super().__init__(call, fresh_statistics({**call.tensors, "layout": call.layout}))
        self.lse = outputs["softmax_lse"]

    def finish(self) -> None:
        max_, sum_ = self.buffers
        self.lse.copy_(torch.where(sum_ == 0, -torch.inf, max_ + sum_.log()))


# ---------------------------------------------------------------------------------------------------------------- loss


@dataclass(frozen=True, eq=False)
class _AnyLoss(_Call):
    """A lowered call of a loss that returns its gradients too; autograd multiplies them by the loss's gradient."""

    problem: IndexerLossProblem
    op_kind = "indexer_loss"

    def gradients(
        self, results: Results, upstream: Results, run: Run, wanted: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        """The gradients that the loss returned, multiplied by the loss's gradient; arguments: see Differentiable."""
        factor = upstream["loss"].reshape(())
        return {name: results[f"d{name}"] * factor for name in DIFFERENTIABLE}

    def first(self) -> tuple[Statistics, dict[str, Tensor]] | None:
        """The call that computes the indexer's statistics, and its results; None if the caller passed them or a list
        of keys makes them unnecessary."""
        if self.tensors["sparse_indices"] is not None or self.given_statistics() is not None:
            return None
        p = self.problem
        problem = IndexerProblem(p.heads_index, p.dim_index, p.dtype, p.weights_dtype, top_k=0, ratio=p.ratio)
        tensors = {name: self.tensors[name] for name in DIFFERENTIABLE}
        call = Statistics(self.extents, self.layout, tensors, problem, self.memory)
        return call, call.results()

    def given_statistics(self) -> tuple[Tensor, Tensor] | None:
        """The indexer's statistics (maximum, sum) passed by the caller, or None."""
        raise NotImplementedError

    def written(self, dq: Tensor, dk: Tensor, dweights: Tensor) -> tuple[IndexerGrads, list[Tensor]]:
        """(views of the gradients dq, dk and dweights, those to clear, as they have rows outside all sequences)."""
        grads = IndexerGrads(
            dq=self.rows(dq, self.problem.heads_index), dk=self.keys(dk), dweights=self.rows(dweights.unsqueeze(-2))
        )
        sides = (dq, "q"), (dk, "kv"), (dweights, "q")
        return grads, [tensor for tensor, side in sides if not self.covers(tensor, side)]


@dataclass(frozen=True, eq=False)
class Loss(_AnyLoss):
    """The lowered call of a loss against the attention's probabilities, computed from query and key."""

    def results(self) -> dict[str, Tensor]:
        return fresh(self.tensors)

    def given_statistics(self) -> tuple[Tensor, Tensor] | None:
        """The maximum and sum passed by the caller, or None."""
        max_, sum_ = (self.tensors[name] for name in INDEX_STATISTICS)
        return None if max_ is None or sum_ is None else (max_, sum_)

    def fill(self, outputs: Mapping[str, Tensor]) -> Filled:
        return _LossRun(self, outputs)


class _LossRun(Filled):
    __slots__ = ("call", "stats")

    def __init__(self, call: Loss, outputs: Mapping[str, Tensor]) -> None:
        p, t, q = call.problem, call.tensors, call.given("query")
        self.call, self.stats, result = call, statistics(q), tuple(outputs[name] for name in RESULTS)
        dq, dk, dweights, loss = buffers = tuple(buffer(tensor) for tensor in result)
        query_rope, key_rope = t["query_rope"], t["key_rope"]
        first = call.first()
        index_stats = (call.given_statistics() or (None, None)) if first is None else first[1].values()
        operands = IndexerLossOperands(
            q=call.rows(q, p.heads_q),
            k=call.keys(call.given("key"), p.heads_kv),
            stats=Stats(*(call.rows(s.unsqueeze(-1), p.heads_q) for s in self.stats)),
            index=call.index(p.heads_index, t["sparse_indices"], *index_stats),
            loss=loss,
            q_rope=None if query_rope is None else call.rows(query_rope, p.heads_q),
            k_rope=None if key_rope is None else call.keys(key_rope, p.heads_kv),
            sink=t["sinks"],
        )
        grads, clears = call.written(dq, dk, dweights)
        nothing = () if len(call.extents) else (loss,)  # Then no back end runs.
        super().__init__((operands, grads), (*buffers, *self.stats), result, (*clears, *nothing), first)

    def begin(self) -> None:
        super().begin()
        call, (max_, sum_) = self.call, self.stats
        lse = call.tensors["lse"]
        if lse is None:
            for name, stats in zip(STATISTICS, self.stats, strict=True):
                grouped(stats, call.problem.heads_kv, call.layout).copy_(call.given(name))
        else:
            max_.copy_(lse if call.layout == "TND" else lse.mT)
            sum_.copy_(max_ != -torch.inf)  # exp(s - lse) is the probability; 0 in a row without keys
        max_.masked_fill_(sum_ == 0, -torch.inf)


# --------------------------------------------------------------------------------------------------------- given target


@dataclass(frozen=True, eq=False)
class TargetLoss(_AnyLoss):
    """The lowered call of a loss against a target passed by the caller.

    Args:
        capacities: as in Indexer.
        names: names of the results: gradients, and "loss" or "softmax_out" (y for every element of the target).
    """

    capacities: Extents | None = None
    names: tuple[str, ...] = RESULTS

    def results(self) -> dict[str, Tensor]:
        return fresh_target(self.tensors, self.names)

    def given_statistics(self) -> tuple[Tensor, Tensor] | None:
        """(log-sum-exp, ones) as maximum and sum, or None if the caller did not pass it."""
        lse = self.tensors["softmax_lse"]
        return None if lse is None else (lse, torch.ones_like(lse))

    def fill(self, outputs: Mapping[str, Tensor]) -> Filled:
        result = tuple(outputs[name] for name in self.names)
        dq, dk, dweights, last = buffers = tuple(buffer(tensor) for tensor in result)
        grads, clears = self.written(dq, dk, dweights)
        first = self.first()
        index_stats = (self.given_statistics() or (None, None)) if first is None else first[1].values()
        index = self.index(self.problem.heads_index, self.tensors["sparse_indices"], *index_stats)
        loss = last
        if self.names[-1] != "loss":
            loss, index.values = empty(last, (1,), torch.float32), self.rows(last)
            clears.append(last)
        operands = IndexerLossOperands(index=index, loss=loss, target=self.rows(self.given("target")))
        nothing = () if len(self.extents) else (loss,)  # Then no back end runs.
        return Filled((operands, grads), buffers, result, (*clears, *nothing), first)
