"""Lowered calls of cases on the native core: a forced variant, any number of threads, and hostile memory."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from support.oracle import rows

from fusion_attention.backends import cpu
from fusion_attention.ir.call import Lowered
from fusion_attention.ir.kv import RowView
from fusion_attention.ir.mask import Band
from fusion_attention.ir.problem import Extents
from fusion_attention.testing.sparse import Maker, Rows, lengths_of, part

Args = dict[str, Any]
Results = dict[str, torch.Tensor]
FAR = 1 << 30


def run(call: Lowered, variant: str | None = None, threads: int = 2, apart: bool = False) -> Results:
    """The results of a call; apart: every sequence of an input lies in a buffer of its own, head by head."""
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
    """The same operands; rows of inputs in a buffer of NaN for each sequence, with gaps between heads and tokens."""
    results: dict[str, Any] = {}
    for name in ("q", "k", "v", "q_rope", "k_rope", "weights"):
        view, lengths = getattr(operands, name, None), extents.kv_len if name[0] in "kv" else extents.q_len
        if isinstance(view, RowView) and not (name == "v" and view.keep[0] is operands.k.keep[0]):
            heads = view.keep[0].shape[-2]
            results[name] = rows([view.sequence(b, heads, int(n)) for b, n in enumerate(lengths)], packed=False)
        elif isinstance(view, RowView):
            results[name] = replace(results["k"], dim=view.dim)  # values that are a part of the keys' rows
    if hasattr(operands, "index"):
        results["index"] = prepared_apart(operands.index, extents)
    return replace(operands, **results)


def hostile(case: Rows, args: Args, weighed: Callable[[int, int, int], list[int]], heads: int) -> Args:
    """The same call: keys that no row weighs are NaN, and lists lie between numbers that would read far outside.

    Args:
        weighed: the keys of a sequence that a row weighs by the lists of a key head.
        heads: key heads with lists of their own; one list is every head's.
    """
    for b, h in np.ndindex(len(case.q_len), heads):
        named = {token for row in range(case.q_len[b]) for token in weighed(b, row, h)}
        unnamed = [token for token in range(case.kv_len[b]) if token not in named]
        for name in ("key", "value", "key_rope", "key_index"):
            if args.get(name) is not None:
                part(case, args[name], "kv", b)[unnamed, slice(None) if heads == 1 else h] = torch.nan
    return args | {"sparse_indices": far(args["sparse_indices"])}


def far(lists: torch.Tensor | None) -> torch.Tensor | None:
    """The same lists, between numbers that would read far outside."""
    if lists is None:
        return None
    memory = torch.full((*lists.shape[:-1], lists.shape[-1] + 5), FAR, dtype=lists.dtype)
    return memory[..., 2:-3].copy_(lists)


def in_pages(case: Rows, args: Args, size: int) -> Args:
    """The same call with keys in pages: those that no key needs, and the rest of the last ones, hold NaN."""
    paged = replace(case, page=size)
    make = Maker(paged)
    table = make.table()
    keys = {name: make.paged(args[name], table) for name in ("key", "value", "key_rope") if args.get(name) is not None}
    return {**args, **keys, "block_table": table, "layout_kv": "PA_BSND", **lengths_of(paged)}


def extents_of(q_len: tuple[int, ...], kv_len: tuple[int, ...]) -> Extents:
    """Causal from the last corner."""
    q, kv = np.array(q_len, np.int64), np.array(kv_len, np.int64)
    return Extents(q, kv, *Band.causal().resolve(q, kv), np.zeros_like(q))
