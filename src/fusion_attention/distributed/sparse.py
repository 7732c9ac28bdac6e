"""Sparse attention, its indexer and the indexer's loss over sharded sequences.

Every rank computes its rows; keys are gathered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fusion_attention.contract import ContractError, Failure
from fusion_attention.distributed.groups import AnyGroup, group_of
from fusion_attention.distributed.lists import invalid_entry, owned
from fusion_attention.distributed.sharded_call import ShardedCall, Sums, Tokens, make_sharded_call, returned
from fusion_attention.distributed.topk import Merged, named
from fusion_attention.ops.indexer import api_definition as indexer_record
from fusion_attention.ops.indexer import lowered_call as indexer
from fusion_attention.ops.indexer_loss import api_definition as loss_record
from fusion_attention.ops.indexer_loss import lowered_call as loss
from fusion_attention.ops.shared.layouts import to_float32
from fusion_attention.ops.sparse import api_definition as sparse_record
from fusion_attention.ops.sparse import lowered_call as sparse
from fusion_attention.torch_ops import dispatch
from fusion_attention.torch_ops.autograd_guards import constants, once

Tensor = torch.Tensor
Lengths = Sequence[int] | Tensor | None
_Q = ("query", "query_rope", "sparse_indices")
_KV = ("key", "value", "key_rope")
_INDEX_Q, _INDEX_KV = ("query", "weights"), ("key",)
_LOSS_Q = ("query", "query_rope", "query_index", "weights", "sparse_indices", "lse")
_LOSS_KV = ("key", "key_rope", "key_index")


def lightning_indexer(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    top_k: int = 2048,
    *,
    group: AnyGroup = None,
    schedule: str = "zigzag",
    tokens: Tokens = None,
    layout: str = "BSND",
    q_len: Lengths = None,
    kv_len: Lengths = None,
    causal: bool = True,
    merge_topk: bool = False,
    deterministic: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Selects, among the keys of all ranks, the top_k with the largest index scores for every query token of this rank.

    Indices and values have the bits of fa.lightning_indexer(). Keys are gathered; their gradient is summed over ranks.

    Args:
        q, k, weights: this rank's shards, from shard().
        group: a process group or DeviceMesh; None: all ranks.
        schedule: the distribution of tokens, as in attention().
        tokens: S, or (S1, S2), of unsharded padded sequences; None: every rank has as many tokens as this one.
        q_len, kv_len: lengths of the unsharded sequences. Required for packed layouts (kv_len defaults to q_len).
        merge_topk: True to gather queries in place of keys: every rank selects among its keys for all queries, and the
            selections are merged. This communicates less if queries are few, as in decoding. Results have the same
            bits; gradients of q and weights are summed over ranks, k's gradient is computed on its rank.
        deterministic: True for a gradient of k with the bits of one process, at the cost of a second backward; else it
            has the same bits in every run. It must be False with merge_topk, which has these bits for k always.
        top_k, layout, causal, backend: as in fa.lightning_indexer().

    Returns:
        (indices, values: their scores) of this rank's queries; indices are key positions in the unsharded sequence.

    Raises:
        GroupError: no group, different calls on the ranks, or a rank died.
        ContractError: the call is not allowed by `fusion-attention ops lightning_indexer`.

    Source: this library.
    """
    args = {
        "query": q, "key": k, "weights": weights, "sparse_count": top_k, "layout": layout, "actual_seq_qlen": q_len,
        "actual_seq_kvlen": kv_len, "causal": causal,
    }  # fmt: skip
    _eager("lightning_indexer", args)
    dispatch.autocast(args, ("query", "key"))
    if merge_topk and deterministic:
        raise ValueError(
            "fusion_attention: distributed.lightning_indexer: deterministic: expected False with merge_topk, whose "
            "gradients of rows are sums over ranks (pass one of the two)"
        )
    if merge_topk and group_of(group).axes:
        raise ValueError(
            "fusion_attention: distributed.lightning_indexer: merge_topk: expected False on a mesh of two dimensions, "
            "which sums along one dimension after the other (omit it, or pass a group of one dimension)"
        )
    if group_of(group).world == 1:
        result = dispatch.results(indexer_record.RECORD, args, backend)
        return result["sparse_indices_out"], result["sparse_values_out"]
    sharded = make_sharded_call(
        "lightning_indexer", indexer_record.RECORD, args, _INDEX_Q, _INDEX_KV, group=group, schedule=schedule,
        tokens=tokens, backend=backend,
        settings={"merge_topk": merge_topk, **_settings(args, deterministic, indexer.DIFFERENTIABLE)},
    )  # fmt: skip
    flat = _flat(sharded, args, _INDEX_Q, _INDEX_KV)
    tensors = (flat[name] for name in indexer.DIFFERENTIABLE)
    indices, values = (
        Merged.apply(sharded, *tensors) if merge_topk else _Indexer.apply(sharded, deterministic, *tensors)
    )
    return sharded.q.unflattened(indices), sharded.q.unflattened(values)


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    indices: Tensor,
    *,
    group: AnyGroup = None,
    schedule: str = "zigzag",
    tokens: Tokens = None,
    layout: str = "BSND",
    q_len: Lengths = None,
    kv_len: Lengths = None,
    q_rope: Tensor | None = None,
    k_rope: Tensor | None = None,
    scale: float | None = None,
    block: int = 1,
    causal: bool = True,
    dim_v: int = 0,
    sink: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes attention of this rank's query tokens over the selected blocks of keys of all ranks.

    Results have the bits of fa.sparse_attention(). Keys are gathered in one exchange; their gradients are summed over
    ranks in float32, in the order of ranks.

    Args:
        q, k, v, indices, q_rope, k_rope: this rank's shards, from shard().
        group, schedule, tokens, q_len, kv_len: as in distributed.lightning_indexer().
        sink: the same on every rank; its gradient is the contribution of this rank's queries: sum it over ranks.
        deterministic: True for gradients of keys with the bits of one process: queries and gradients of all ranks are
            gathered, and a second backward computes the gradients of each rank's keys. Else they have the same bits in
            every run.
        layout, scale, block, causal, dim_v, return_lse, backend: as in fa.sparse_attention().

    Returns:
        out of this rank's query tokens, in the shape of q with v's dim, or (out, lse).

    Raises:
        GroupError, ContractError: as in distributed.lightning_indexer().

    Source: this library; the scheme of Megatron and MindSpeed, extended to packed sequences of any lengths.
    """
    args = {
        "query": q, "key": k, "value": v, "sparse_indices": indices, "layout": layout, "actual_seq_qlen": q_len,
        "actual_seq_kvlen": kv_len, "query_rope": q_rope, "key_rope": k_rope, "scale_value": scale,
        "sparse_block_size": block, "causal": causal, "dim_v": dim_v, "sinks": sink,
    }  # fmt: skip
    _eager("sparse_attention", args)
    dispatch.autocast(args, ("query", "key", "value", "query_rope", "key_rope"))
    if group_of(group).world == 1:
        result = dispatch.results(sparse_record.RECORD, args, backend, complete=return_lse)
        out = result["attention_out"]
        return (out, _lse(result["softmax_max"], result["softmax_sum"], layout)) if return_lse else out
    sharded = make_sharded_call(
        "sparse_attention", sparse_record.RECORD, args, _Q, _KV, group=group, schedule=schedule, tokens=tokens,
        backend=backend, settings=_settings(args, deterministic, sparse.DIFFERENTIABLE),
    )  # fmt: skip
    flat = _flat(sharded, args, _Q, _KV)
    _check_lists("sparse_attention", sharded, flat, block)
    flat["sinks"] = to_float32(sink, q)
    names = (*sparse.DIFFERENTIABLE, "sparse_indices")
    out, max_, sum_ = _Attention.apply(sharded, deterministic, *(flat[name] for name in names))
    out = sharded.q.unflattened(out)
    if not return_lse:
        return out
    lse = sharded.q.unflattened(_lse(max_, sum_, "TND"))
    return out, lse if layout == "TND" else lse.transpose(1, 2)


def indexer_loss(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    weights: Tensor,
    indices: Tensor | None = None,
    *,
    group: AnyGroup = None,
    schedule: str = "zigzag",
    tokens: Tokens = None,
    layout: str = "BSND",
    q_len: Lengths = None,
    kv_len: Lengths = None,
    q_rope: Tensor | None = None,
    k_rope: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    sink: Tensor | None = None,
    deterministic: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Computes fa.indexer_loss() of sharded sequences: the KL divergence from attention's to the indexer's
    probabilities, summed over the query tokens of all ranks.

    Every rank gets the total loss, whose backward computes the gradients of the rank's tensors: add it to the loss on
    every rank, and call backward() on every rank. In a sum of all ranks' losses for a report, count it once.

    Args:
        q, k, lse, index_q, index_k, weights, indices, q_rope, k_rope: this rank's shards, from shard(); lse from
            distributed attention.
        group, schedule, tokens, q_len, kv_len: as in distributed.lightning_indexer().
        deterministic: True for a loss and gradients with the bits of one process: every rank gathers all queries and
            computes the unsharded call. Else they have the same bits in every run.
        layout, scale, causal, sink, backend: as in fa.indexer_loss().

    Returns:
        The loss, a float32 scalar, the same on every rank.

    Raises:
        GroupError, ContractError: as in distributed.lightning_indexer().

    Source: this library.
    """
    args = {
        "query": q, "key": k, "lse": lse, "query_index": index_q, "key_index": index_k, "weights": weights,
        "sparse_indices": indices, "layout": layout, "actual_seq_qlen": q_len, "actual_seq_kvlen": kv_len,
        "query_rope": q_rope, "key_rope": k_rope, "scale_value": scale, "causal": causal, "sinks": sink,
    }  # fmt: skip
    _eager("indexer_loss", args)
    dispatch.autocast(args, ("query", "key", "query_index", "key_index", "query_rope", "key_rope"))
    if group_of(group).world == 1:
        return dispatch.results(loss_record.RECORD, args, backend)["loss"].reshape(())
    sharded = make_sharded_call(
        "indexer_loss", loss_record.RECORD, args, _LOSS_Q, _LOSS_KV, group=group, schedule=schedule, tokens=tokens,
        backend=backend, settings=_settings(args, deterministic, loss.DIFFERENTIABLE),
    )  # fmt: skip
    heads_last = args if layout == "TND" else {**args, "lse": lse.transpose(1, 2)}
    flat = _flat(sharded, heads_last, _LOSS_Q, _LOSS_KV)
    _check_lists("indexer_loss", sharded, flat, 1)
    flat["sinks"] = to_float32(sink, q)
    constant = {name: None if t is None else t.detach() for name, t in flat.items() if name not in loss.DIFFERENTIABLE}
    return _Loss.apply(sharded, deterministic, constant, *(flat[name] for name in loss.DIFFERENTIABLE)).reshape(())


# -------------------------------------------------------------------------------------------------------------- helpers


def _eager(function: str, args: Mapping[str, Any]) -> None:
    """Raises NotImplementedError if a call is traced, because the trace would store received data as constants."""
    if dispatch.is_traced(args.values()):
        raise NotImplementedError(
            f"fusion_attention: distributed.{function}: calls of several ranks cannot be traced: exclude them from "
            "torch.compile (torch.compiler.disable), torch.func and other traces"
        )


def _settings(args: Mapping[str, Any], deterministic: bool, trained: Sequence[str]) -> dict[str, Any]:
    """Returns name -> value that must be equal on all ranks: `deterministic`, and the names in `trained` of the inputs
    that need a gradient."""
    grads = [name for name in trained if isinstance(args[name], Tensor) and args[name].requires_grad]
    return {"deterministic": deterministic, "trained": grads if torch.is_grad_enabled() else []}


def _flat(
    sharded: ShardedCall, args: Mapping[str, Any], rows: Sequence[str], keys: Sequence[str]
) -> dict[str, Tensor | None]:
    """Returns this rank's tensors by name, with batch and sequence axes merged to one axis of tokens, None if absent;
    rows, keys: names of the tensors along query tokens and along keys."""
    results: dict[str, Tensor | None] = {}
    for side, names in ((sharded.q, rows), (sharded.kv, keys)):
        results |= {name: None if args.get(name) is None else side.flat(args[name]) for name in names}
    return results


def _check_lists(function: str, sharded: ShardedCall, flat: Mapping[str, Tensor | None], block: int) -> None:
    """Raises ContractError for an invalid entry of this rank's lists of selected blocks of `block` keys, from which
    kernels compute addresses; flat: this rank's tensors by name."""
    indices = flat["sparse_indices"]
    if indices is not None and (got := invalid_entry(indices, sharded.q.segments, sharded.full.extents.kv_len, block)):
        text = "-1, or the number of a block of the row's sequence"
        advice = "positions count in unsharded sequences"
        raise ContractError([Failure(f"distributed.{function}", "indices", text, got, advice)])


def _lse(max_: Tensor, sum_: Tensor, layout: str) -> Tensor:
    """Returns lse = max + log(sum) as [B, query heads, S], or packed (layout "TND") as [tokens, query heads], from
    softmax statistics [B, key heads, S, query heads per key head], or [key heads, tokens, query heads per key head]."""
    lse = max_ + sum_.log()
    return lse.movedim(0, 1).flatten(1) if layout == "TND" else lse.mT.flatten(1, 2)


# ---------------------------------------------------------------------------------------------------------- the indexer


class _Indexer(torch.autograd.Function):
    """The autograd function of lightning_indexer() for this rank's query tokens: selected key indices and their scores,
    [tokens, heads, top_k]; scores have a derivative."""

    @staticmethod
    def forward(ctx: Any, sharded: ShardedCall, deterministic: bool, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        given = named(tensors)
        result = sharded.run(sharded.rows(given | sharded.keys(given, _INDEX_KV), sharded.q.segments))
        indices, values = (result[name] for name in indexer.RESULTS)
        ctx.settings = sharded, deterministic
        ctx.save_for_backward(indices, *tensors)
        ctx.mark_non_differentiable(indices)
        return indices, values

    @staticmethod
    def backward(ctx: Any, _: Any, upstream: Tensor) -> Any:
        sharded, deterministic = ctx.settings
        indices, *tensors = ctx.saved_tensors

        def gradients() -> tuple[Tensor | None, ...]:
            given = named(tensors)
            full = given | sharded.keys(given, _INDEX_KV)
            sums = Sums(sharded.call, sharded.kv, ("dquery", "dweights"), upstream.dtype)
            for segments in sharded.q.rounds:
                backward = indexer.IndexerBackward(sharded.rows(full, segments), upstream, indices)
                sums.add(segments, sharded.run(backward, ("dkey",)))
            results = {name: sums.local[f"d{name}"] for name in _INDEX_Q}
            if deterministic:
                beside = {"indices": indices, "dvalues": upstream}
                rows = sharded.all_rows({name: given[name] for name in _INDEX_Q} | beside)
                lists, grads = owned(sharded, sharded.kv.segments, rows.pop("indices"), 1, rows.pop("dvalues"))
                backward = indexer.IndexerBackward(sharded.everything(full | rows), grads, lists)
                results["key"] = sharded.kv.local(sharded.run(backward)["dkey"])
            else:
                results["key"] = sums.summed()["dkey"]
            return returned(ctx, results, indexer.DIFFERENTIABLE, 2)

        return once(gradients, (upstream, *tensors))


# ------------------------------------------------------------------------------------------------------------ attention


class _Attention(torch.autograd.Function):
    """The autograd function of sparse_attention() for this rank's query tokens: out [tokens, heads, dim], softmax max
    and sum; only out has a derivative."""

    @staticmethod
    def forward(ctx: Any, sharded: ShardedCall, deterministic: bool, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        given = _of_attention(tensors)
        result = sharded.run(sharded.rows(given | sharded.keys(given, _KV), sharded.q.segments).complete())
        results = tuple(result[name] for name in sparse.RESULTS)
        ctx.settings = sharded, deterministic
        ctx.save_for_backward(*results, *tensors)
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, *statistics: Tensor | None) -> Any:
        sharded, deterministic = ctx.settings
        constants(statistics)
        saved, tensors = ctx.saved_tensors[:3], ctx.saved_tensors[3:]
        dout = torch.zeros_like(saved[0]) if upstream is None else upstream

        def gradients() -> tuple[Tensor | None, ...]:
            given = _of_attention(tensors)
            full = given | sharded.keys(given, _KV)
            sums = Sums(sharded.call, sharded.kv, ("dquery", "dquery_rope"), dout.dtype)
            dsinks: Tensor | None = None
            for segments in sharded.q.rounds:
                backward = sparse.SparseBackward(sharded.rows(full, segments), dout, *saved)
                result = sharded.run(backward, ("dkey", "dvalue", "dkey_rope"))
                more = result.pop("dsinks", None)
                dsinks = more if dsinks is None or more is None else dsinks + more
                sums.add(segments, result)
            grads = sums.local | (_from_all_rows(sharded, given, full, dout, saved) if deterministic else sums.summed())
            if dsinks is not None:
                grads["dsinks"] = dsinks
            by_name = {name: grads[f"d{name}"] for name in sparse.DIFFERENTIABLE if f"d{name}" in grads}
            return returned(ctx, by_name, (*sparse.DIFFERENTIABLE, "sparse_indices"), 2)

        return once(gradients, (dout, *tensors))


def _of_attention(tensors: Sequence[Tensor | None]) -> dict[str, Tensor | None]:
    names = (*sparse.DIFFERENTIABLE, "sparse_indices")
    return {**dict(zip(names, tensors, strict=True)), "block_table": None}


def _from_all_rows(
    sharded: ShardedCall,
    given: Mapping[str, Tensor | None],
    full: dict[str, Tensor | None],
    dout: Tensor,
    saved: Sequence[Tensor],
) -> dict[str, Tensor]:
    """Returns the gradients of this rank's keys from the queries of all ranks, with the bits of one process. given,
    full: tensors by name with this rank's keys, and with all. saved: out, softmax max and sum of this rank's rows."""
    out, max_, sum_ = saved
    # Statistics [N2, T1, G] are exchanged with rows first.
    beside = {"dout": dout, "out": out, "max": max_.transpose(0, 1), "sum": sum_.transpose(0, 1)}
    rows = sharded.all_rows({name: given[name] for name in _Q} | beside)
    dout, out, max_, sum_ = (rows.pop(name) for name in beside)  # type: ignore[assignment]
    lists, _ = owned(sharded, sharded.kv.segments, rows["sparse_indices"], sharded.full.problem.select_block)
    call = sharded.everything(full | rows | {"sparse_indices": lists})
    result = sharded.run(sparse.SparseBackward(call, dout, out, max_.transpose(0, 1), sum_.transpose(0, 1)))
    return {name: sharded.kv.local(result[name]) for name in ("dkey", "dvalue", "dkey_rope") if name in result}


# ----------------------------------------------------------------------------------------------------------------- loss


class _Loss(torch.autograd.Function):
    """The autograd function of the indexer's loss of all ranks' queries; its forward also computes all gradients."""

    @staticmethod
    def forward(
        ctx: Any, sharded: ShardedCall, deterministic: bool, constant: dict[str, Tensor | None], *tensors: Tensor
    ) -> Tensor:
        given = {**dict.fromkeys(loss.INPUTS), **constant, **dict(zip(loss.DIFFERENTIABLE, tensors, strict=True))}
        full = given | sharded.keys(given, _LOSS_KV)
        ctx.sharded, ctx.sums, ctx.gradients = sharded, None, None
        if deterministic:
            rows = sharded.all_rows({name: given[name] for name in _LOSS_Q})
            result = sharded.run(sharded.everything(full | rows))
            sides = {"dquery_index": sharded.q, "dweights": sharded.q, "dkey_index": sharded.kv}
            ctx.gradients = {name: side.local(result[name]) for name, side in sides.items()}
            return result["loss"]
        ctx.sums = Sums(sharded.call, sharded.kv, ("dquery_index", "dweights"), tensors[1].dtype)
        total = torch.zeros(1, dtype=torch.float32, device=tensors[0].device)
        for segments in sharded.q.rounds:
            result = sharded.run(sharded.rows(full, segments), ("dkey_index",))
            total += result.pop("loss")
            ctx.sums.add(segments, result)
        return sharded.call.sum_to_all("summing the loss", total)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        factor = upstream.reshape(())

        def gradients() -> tuple[Tensor | None, ...]:
            if ctx.gradients is not None:
                scaled_gradients = {name: t * factor for name, t in ctx.gradients.items()}
            else:
                scaled = ctx.sums.scaled(factor)
                scaled_gradients = scaled.local | scaled.summed()
            return returned(ctx, {name[1:]: t for name, t in scaled_gradients.items()}, loss.DIFFERENTIABLE, 3)

        return once(gradients, (upstream,))
