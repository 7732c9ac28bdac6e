"""Calls of the lightning indexer's KL losses and softmax statistics, as back ends compute them; results' memory."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fusion_attention.ir.call import Filled, buffer
from fusion_attention.ir.problem import IndexerLossOperands, IndexerLossProblem, IndexerOperands, IndexerProblem, Stats
from fusion_attention.memory import empty
from fusion_attention.ops.indexer.lowered_call import IndexCall, fresh_gradients
from fusion_attention.ops.shared.lowered_call import Results, Run
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
    """Allocates {name: result} of an indexer's loss: the gradients of query, key and weights, and the loss, [1]; n:
    arguments and derived values."""
    return fresh_gradients(n, DIFFERENTIABLE) | {"loss": empty(n["query_index"], (1,), torch.float32)}


def fresh_target(n: Mapping[str, Any]) -> dict[str, Tensor]:
    """Allocates {name: tensor}: gradients of query, key, weights, and softmax_out, shaped as the target; n: inputs."""
    return fresh_gradients(n, DIFFERENTIABLE) | {"softmax_out": empty(n["target"], n["target"].shape)}


def fresh_statistics(n: Mapping[str, Any]) -> dict[str, Tensor]:
    """Allocates {"softmax_max", "softmax_sum"}, [B, 1, S1] or [1, T1], of the indexer's scores; n: arguments."""
    q = n["query_index"]
    shape = (1, q.shape[0]) if n["layout"] == "TND" else (q.shape[0], 1, q.shape[1])
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return {name: empty(q, shape, dtype) for name in STATISTICS}


def fresh_lse(n: Mapping[str, Any]) -> dict[str, Tensor]:
    """Allocates {"softmax_lse": tensor}, [B, 1, S1] or [1, T1], of the indexer's scores; n: arguments."""
    return {"softmax_lse": fresh_statistics(n)[STATISTICS[0]]}


# ---------------------------------------------------------------------------------------------------------- statistics


def _views(call: IndexCall, *statistics: Tensor) -> Stats:
    """Returns memory views of the indexer's softmax max and sum, [B, 1, S1] or [1, T1]: one number per query token."""
    return Stats(*(call.rows(tensor.transpose(-1, -2).unsqueeze(-1)) for tensor in statistics))


@dataclass(frozen=True, eq=False)
class Statistics(IndexCall):
    """A call, as back ends compute it, of the maximum and sum of exp(score - max) of an indexer's scores per row."""

    problem: IndexerProblem
    trained = DIFFERENTIABLE
    op_kind = "indexer_lse"

    def results(self) -> dict[str, Tensor]:
        return fresh_statistics({**self.tensors, "layout": self.layout})

    def fill(self, outputs: Mapping[str, Tensor]) -> Filled:
        max_, sum_ = (outputs[name] for name in STATISTICS)
        return self.filled(max_, sum_, lambda: max_.masked_fill_(max_ == -torch.inf, 0))  # CANN's: 0 and 0 without keys

    def filled(self, max_: Tensor, sum_: Tensor, convert: Callable[[], Any]) -> Filled:
        """Returns the call with memory for max and sum; `convert` is called after the kernels have written these."""
        clears = () if self.covers(self.given("query_index")) else (max_, sum_)
        return Filled((self.index(stats=_views(self, max_, sum_)),), (max_, sum_), clears=clears, convert=convert)


@dataclass(frozen=True, eq=False)
class LogSum(Statistics):
    """A call, as back ends compute it, of the log-sum-exp of an indexer's scores, max + log(sum), per query row."""

    def results(self) -> dict[str, Tensor]:
        return fresh_lse({**self.tensors, "layout": self.layout})

    def fill(self, outputs: Mapping[str, Tensor]) -> Filled:
        max_, sum_ = super().results().values()
        lse = outputs["softmax_lse"]
        return self.filled(max_, sum_, lambda: lse.copy_(torch.where(sum_ == 0, -torch.inf, max_ + sum_.log())))


# ---------------------------------------------------------------------------------------------------------------- loss


@dataclass(frozen=True, eq=False)
class _AnyLoss(IndexCall):
    """Base class of calls for back ends of an indexer's loss and its gradients, which autograd multiplies.

    Args:
        names: names of the results: gradients, and "loss" or "softmax_out" (the indexer's probabilities).
    """

    problem: IndexerLossProblem
    names: tuple[str, ...] = RESULTS
    trained = DIFFERENTIABLE
    op_kind = "indexer_loss"

    @property
    def heads(self) -> int:
        return self.problem.heads_index

    def gradients(
        self, results: Results, upstream: Results, run: Run, wanted: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        """Returns {name: gradient}: the gradients in `results`, multiplied by the loss's gradient in `upstream`."""
        factor = upstream["loss"].reshape(())
        return {name: results[f"d{name}"] * factor for name in DIFFERENTIABLE}

    def results(self) -> dict[str, Tensor]:
        return fresh(self.tensors) if self.names == RESULTS else fresh_target(self.tensors)

    def first(self) -> tuple[Statistics, dict[str, Tensor]] | None:
        """Returns (a Statistics call for the indexer's softmax maximum and sum, tensors for its results by name); None
        if the caller passed these statistics, or lists of selected keys make them unnecessary."""
        if self.tensors["sparse_indices"] is not None or self.given_statistics() is not None:
            return None
        p = self.problem
        problem = IndexerProblem(p.heads_index, p.dim_index, p.dtype, p.weights_dtype, top_k=0, ratio=p.ratio)
        tensors = {name: self.tensors[name] for name in DIFFERENTIABLE}
        call = Statistics(self.extents, self.layout, tensors, problem)
        return call, call.results()

    def given_statistics(self) -> tuple[Tensor, Tensor] | None:
        """Returns the indexer's softmax statistics (maximum, sum) that the caller passed, or None."""
        raise NotImplementedError

    def operands(self, index: IndexerOperands, loss: Tensor) -> tuple[IndexerLossOperands, tuple[Tensor, ...]]:
        """Returns (memory views of all tensors, the tensors behind the views of the attention's softmax max and sum,
        which read_statistics() writes). index: views of the indexer's tensors; loss: tensor for the loss."""
        raise NotImplementedError

    def read_statistics(self, *stats: Tensor) -> None:
        """Writes the attention's softmax max and sum to `stats`, from operands(); nothing if the target is passed."""

    def fill(self, outputs: Mapping[str, Tensor]) -> Filled:
        result = tuple(outputs[name] for name in self.names)
        *gradients, loss = buffers = tuple(buffer(tensor) for tensor in result)
        grads, clears = self.written(gradients)
        first, lists = self.first(), self.tensors["sparse_indices"]
        statistics = self.given_statistics() if first is None else tuple(first[1].values())
        stats = None if statistics is None else _views(self, *statistics)
        index = self.index([] if lists is None else [self.rows(narrow(lists))], stats)
        if self.names != RESULTS:
            index.values, clears = self.rows(loss), (*clears, loss)
            loss = empty(loss, (1,), torch.float32)
        nothing = () if len(self.extents) else (loss,)  # Then no back end runs.
        operands, read = self.operands(index, loss)
        prepare = partial(self.read_statistics, *read)
        return Filled((operands, grads), (*buffers, *read), result, (*clears, *nothing), first, prepare=prepare)


@dataclass(frozen=True, eq=False)
class Loss(_AnyLoss):
    """A call of an indexer's KL loss, as back ends compute it, against attention probabilities from query and key."""

    def given_statistics(self) -> tuple[Tensor, Tensor] | None:
        max_, sum_ = (self.tensors[name] for name in INDEX_STATISTICS)
        return None if max_ is None or sum_ is None else (max_, sum_)

    def operands(self, index: IndexerOperands, loss: Tensor) -> tuple[IndexerLossOperands, tuple[Tensor, ...]]:
        p, q = self.problem, self.given("query")
        stats, query_rope, key_rope = statistics(q), self.tensors["query_rope"], self.tensors["key_rope"]
        operands = IndexerLossOperands(
            q=self.rows(q, p.heads_q),
            k=self.keys(self.given("key"), p.heads_kv),  # type: ignore[arg-type]  # not in pages
            stats=Stats(*(self.rows(s.unsqueeze(-1), p.heads_q) for s in stats)),
            index=index,
            loss=loss,
            q_rope=None if query_rope is None else self.rows(query_rope, p.heads_q),
            k_rope=None if key_rope is None else self.keys(key_rope, p.heads_kv),  # type: ignore[arg-type]
            sink=self.tensors["sinks"],
        )
        return operands, stats

    def read_statistics(self, *stats: Tensor) -> None:
        """Writes the attention's softmax max and sum, in kernels' axis order, to `stats`; an lse as max, with sum 1."""
        (max_, sum_), lse = stats, self.tensors["lse"]
        if lse is None:
            for name, statistic in zip(STATISTICS, stats, strict=True):
                grouped(statistic, self.problem.heads_kv, self.layout).copy_(self.given(name))
        else:
            max_.copy_(lse if self.layout == "TND" else lse.mT)
            sum_.copy_(max_ != -torch.inf)  # exp(s - lse) is the probability; 0 in a row without keys
        max_.masked_fill_(sum_ == 0, -torch.inf)


@dataclass(frozen=True, eq=False)
class TargetLoss(_AnyLoss):
    """A call of an indexer's KL loss, as back ends compute it, against target probabilities that the caller passes."""

    def given_statistics(self) -> tuple[Tensor, Tensor] | None:
        """Returns the indexer's softmax (maximum, sum) as (log-sum-exp, ones) if softmax_lse was passed; else None."""
        lse = self.tensors["softmax_lse"]
        return None if lse is None else (lse, torch.ones_like(lse))

    def operands(self, index: IndexerOperands, loss: Tensor) -> tuple[IndexerLossOperands, tuple[Tensor, ...]]:
        return IndexerLossOperands(index=index, loss=loss, target=self.rows(self.given("target"))), ()
