"""Runs lowered calls of cases on the native core, with a given variant, number of threads and poisoned memory."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from support.oracle import rows

from fusion_attention.backends import cpu
from fusion_attention.ir.call import Lowered
from fusion_attention.ir.mask import Band
from fusion_attention.ir.memory_views import RowView
from fusion_attention.ir.problem import Extents
from fusion_attention.testing.sparse import Maker, Rows, lengths_of, sequence_of

Args = dict[str, Any]
Results = dict[str, torch.Tensor]
FAR = 1 << 30


def run(call: Lowered, variant: str | None = None, threads: int = 2, apart: bool = False) -> Results:
    """Returns the results of a call; apart: every sequence of an input has its own head-major buffer."""
    outputs = call.results()
    filled = call.fill(outputs)
    filled.begin()
    operands = [prepared_apart(each, call.extents) for each in filled.operands] if apart else filled.operands
    torch.set_num_threads(threads)
    plan = cpu.schedule(call.problem, call.extents, call.op_kind, variant)
    getattr(cpu, call.op_kind)(call.problem, call.extents, plan, *operands)
    filled.finish()
    return outputs


def prepared_apart(operands: Any, extents: Extents) -> Any:
    """Returns the operands with inputs in a NaN buffer for each sequence, with gaps between heads and tokens."""
    results: dict[str, Any] = {}
    for name in ("q", "k", "v", "q_rope", "k_rope", "weights"):
        view, lengths = getattr(operands, name, None), extents.kv_len if name[0] in "kv" else extents.q_len
        if isinstance(view, RowView) and not (name == "v" and view.keep[0] is operands.k.keep[0]):
            heads = view.keep[0].shape[-2]
            results[name] = rows([view.sequence(b, heads, int(n)) for b, n in enumerate(lengths)], packed=False)
        elif isinstance(view, RowView):
            results[name] = replace(results["k"], dim=view.dim)  # the values are part of the keys' rows
    if hasattr(operands, "index"):
        results["index"] = prepared_apart(operands.index, extents)
    return replace(operands, **results)


def hostile(case: Rows, args: Args, weighed: Callable[[int, int, int], list[int]], heads: int) -> Args:
    """Returns the call with NaN in keys that no row uses, and lists within memory of out-of-range numbers.

    Args:
        weighed: function of sequence, row and key head; returns the keys that the row uses.
        heads: number of key heads with separate lists; with 1, all heads use one list.
    """
    for b, h in np.ndindex(len(case.q_len), heads):
        named = {token for row in range(case.q_len[b]) for token in weighed(b, row, h)}
        unnamed = [token for token in range(case.kv_len[b]) if token not in named]
        for name in ("key", "value", "key_rope", "key_index"):
            if args.get(name) is not None:
                sequence_of(case, args[name], "kv", b)[unnamed, slice(None) if heads == 1 else h] = torch.nan
    return args | {"sparse_indices": far(args["sparse_indices"])}


def far(lists: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the lists within memory of out-of-range numbers."""
    if lists is None:
        return None
    memory = torch.full((*lists.shape[:-1], lists.shape[-1] + 5), FAR, dtype=lists.dtype)
    return memory[..., 2:-3].copy_(lists)


def in_pages(case: Rows, args: Args, size: int) -> Args:
    """Returns the call with keys in pages; unused pages and slots contain NaN."""
    paged = replace(case, page=size)
    make = Maker(paged)
    table = make.table()
    keys = {name: make.paged(args[name], table) for name in ("key", "value", "key_rope") if args.get(name) is not None}
    return {**args, **keys, "block_table": table, "layout_kv": "PA_BSND", **lengths_of(paged)}


def extents_of(q_len: tuple[int, ...], kv_len: tuple[int, ...]) -> Extents:
    """Returns causal visibility in which the last row attends to all keys."""
    q, kv = np.array(q_len, np.int64), np.array(kv_len, np.int64)
    return Extents(q, kv, *Band.causal().resolve(q, kv), np.zeros_like(q))
