"""Test calls of sparse attention and of the indexer: tensors in memory filled with NaN, float64 results, and the tokens
and scores of selected keys, entry by entry as CANN's page describes, without the code that is tested."""

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch

from fusion_attention.contract import bind
from fusion_attention.judging.chi_square_limits import Expected
from fusion_attention.ops.indexer import definitions as indexer
from fusion_attention.ops.indexer.lower import indexer_call
from fusion_attention.ops.indexer.lowered_call import Indexer, IndexerBackward
from fusion_attention.ops.sparse import api_definition as sparse_own
from fusion_attention.ops.sparse import definitions as sparse
from fusion_attention.ops.sparse.lower import sparse_call
from fusion_attention.ops.sparse.lowered_call import Sparse, SparseBackward
from fusion_attention.testing.cases import Results, Sequences, Tensor, hostile, poisoned
from fusion_attention.testing.expected import expected_of
from fusion_attention.torch_ops.eager import run

Call = TypeVar("Call", bound=Any)
WILD = 1 << 30  # an invalid page number


@dataclass(frozen=True)
class Rows(Sequences):
    """Layout, lengths and causality of a test call of sparse attention, the indexer or its loss.

    Args:
        layout: "BSND" or "TND".
        page: tokens of a page of keys (forward only); 0: keys are not paged.
        dtype: of the query and of all tensors that CANN requires in the same dtype.
        q_len, kv_len: tokens of every sequence.
        q_rest, kv_rest: tokens that tensors have after their sequences.
        mode: CANN's sparse mode: 0 for all keys, or 3 for causal.
        ratio: tokens that a key represents, in a causal call of the indexer or its loss.
        residual: for each sequence, the number of tokens after those that its last key represents; (): 0 for all.
    """

    layout: str = "BSND"
    page: int = 0
    dtype: str = "float32"
    q_len: tuple[int, ...] = (5, 5)
    kv_len: tuple[int, ...] = (9, 9)
    q_rest: int = 0
    kv_rest: int = 0
    mode: int = 3
    ratio: int = 1
    residual: tuple[int, ...] = ()

    def seen(self, b: int, row: int) -> int:
        """Returns the number of keys that a row of sequence b sees; causal: keys with no token behind the row's."""
        keys, tokens = self.kv_len[b], self.kv_len[b] * self.ratio + (self.residual[b] if self.residual else 0)
        if self.mode == 0:
            return keys
        return bisect.bisect(range(self.ratio - 1, keys * self.ratio, self.ratio), tokens - self.q_len[b] + row)


@dataclass(frozen=True)
class SparseCase(Rows):
    """A test call of sparse attention, forward and backward.

    Args:
        heads_q, heads_kv, dim_qk, dim_v, dim_rope, scale: query and key heads, elements per head of queries, values and
            rope tensors, and factor on q . k.
        shares_kv: values are the first dim_v elements of the key's rows.
        block: tokens of a selectable block of keys. count: blocks that each row selects.
        lists: selected blocks: "random" (distinct), "all" (every block, in random order), "repeated" (few blocks,
            repeated), "short" (ends early), "none" (empty), "wild" (-1 and invisible blocks anywhere).
        wide: numbers of blocks are int64, else int32.
        sink: the call has sinks, one additional logit per head.
    """

    heads_q: int = 4
    heads_kv: int = 1
    dim_qk: int = 8
    dim_v: int = 8
    dim_rope: int = 0
    scale: float = 0.3
    shares_kv: bool = False
    block: int = 1
    count: int = 4
    lists: str = "random"
    wide: bool = False
    sink: bool = False

    def keys(self, b: int) -> int:
        """Returns the number of keys of sequence b from which the lists of selected keys choose."""
        return self.kv_len[b]


@dataclass(frozen=True)
class IndexerCase(Rows):
    """A test call of the indexer, forward and backward.

    Args:
        heads, dim, top_k: query heads, elements of a head, and selected keys. weights: the dtype of weights.
        exact: operands are small integers, so every sum is exact in every dtype, and many scores are equal.
    """

    heads: int = 4
    dim: int = 8
    weights: str = "float32"
    top_k: int = 4
    exact: bool = False


# ------------------------------------------------------------------------------------------------------------ operands


def sequence_of(case: Rows, tensor: Tensor, side: str, b: int) -> Tensor:
    """Returns sequence b of a test call's tensor, as a view [tokens, ...]; side: "q" for queries, "kv" for keys."""
    length = case.lengths(side)[b]
    if not case.packed:
        return tensor[b, :length]
    start = sum(case.lengths(side)[:b])
    return tensor[start : start + length]


class Maker:
    """Random generator of a test call's tensors, whose memory is NaN (or 255) outside of sequences."""

    def __init__(self, case: Rows) -> None:
        self.case, self.generator = case, case.generator()
        self.dtype: torch.dtype = getattr(torch, case.dtype)

    def draw(self, *shape: int, integers: bool = False) -> Tensor:
        """Returns a tensor of this shape with normally distributed numbers; integers: integers from -2 to 2."""
        if integers:
            return torch.randint(-2, 3, shape, generator=self.generator).float()
        return torch.randn(shape, generator=self.generator)

    def empty(self, side: str, *inner: int, dtype: torch.dtype) -> Tensor:
        """Returns a tensor with a row [*inner] per token of queries ("q") or keys ("kv"), filled with NaN or 255."""
        case = self.case
        outer = (case.tokens(side),) if case.packed else (len(case.lengths(side)), case.tokens(side))
        return poisoned((*outer, *inner), dtype)

    def rows(self, side: str, *inner: int, dtype: torch.dtype | None = None, integers: bool = False) -> Tensor:
        """Returns a tensor with a random row [*inner] per token of queries ("q") or keys ("kv"); integers: -2 to 2."""
        tensor = self.empty(side, *inner, dtype=dtype or self.dtype)
        for b in range(len(self.case.lengths(side))):
            sequence = sequence_of(self.case, tensor, side, b)
            sequence.copy_(self.draw(*sequence.shape, integers=integers))
        return tensor

    def paged(self, keys: Tensor, table: Tensor) -> Tensor:
        """Returns keys [.., heads, dim] in pages, [pages, page, heads, dim], by a page table; the rest is NaN."""
        case = self.case
        used = table[table < WILD]
        pages = int(used.max()) + 2 if len(used) else 1
        pool = poisoned((pages, case.page, *keys.shape[-2:]), self.dtype)
        for b, length in enumerate(case.kv_len):
            sequence = sequence_of(case, keys, "kv", b)
            for token in range(length):
                pool[table[b, token // case.page], token % case.page] = sequence[token]
        return pool

    def table(self) -> Tensor:
        """Returns a random page table, int32 [sequences, pages]; entries after a sequence's last page are invalid."""
        case = self.case
        counts = [-(-n // case.page) for n in case.kv_len]
        numbers = torch.randperm(sum(counts) + 2, generator=self.generator).to(torch.int32)
        table = torch.full((len(counts), max(counts) + 1), WILD, dtype=torch.int32)
        for b, count in enumerate(counts):
            table[b, :count] = numbers[sum(counts[:b]) : sum(counts[: b + 1])]
        return table


def lengths_of(case: Rows) -> dict[str, Any]:
    """Returns {name: lengths} of a test call as arguments of torch_npu: cumulative ends if packed."""
    q = np.cumsum(case.q_len).tolist() if case.packed else list(case.q_len)
    kv = np.cumsum(case.kv_len).tolist() if case.packed and not case.page else list(case.kv_len)
    return {"actual_seq_qlen": q, "actual_seq_kvlen": kv}


def bound_of(case: Rows) -> dict[str, Any]:
    """Returns {"ratio", "residual"}, arguments of the Python API for keys that represent several tokens."""
    return {"ratio": case.ratio, "residual": list(case.residual) or None}


def bounded(call: Call, args: Mapping[str, Any]) -> Call:
    """Returns an indexer's call whose keys represent args["ratio"] tokens each, which npu_lightning_indexer lacks."""
    if args.get("ratio", 1) == 1:
        return call
    e, behind = call.extents, 0 if args["residual"] is None else np.array(args["residual"], np.int64)
    extents = replace(e, hi=e.kv_len * args["ratio"] + behind - e.q_len + 1)
    return replace(call, extents=extents, problem=replace(call.problem, ratio=args["ratio"]))


def layouts_of(case: Rows) -> dict[str, Any]:
    """Returns {name: argument} of a test call: the layouts of queries and keys, and sparse_mode, CANN's number of a
    mask pattern (0: all keys, 3: causal)."""
    return {"layout": case.layout, "layout_kv": "PA_BSND" if case.page else case.layout, "sparse_mode": case.mode}


def arguments(case: SparseCase) -> dict[str, Any]:
    """Returns {name: argument} of npu_sparse_flash_attention for a test call, and dy, in memory filled with NaN."""
    make = Maker(case)
    table = make.table() if case.page else None

    def keys(dim: int) -> Tensor:
        rows = make.rows("kv", case.heads_kv, dim)
        return rows if table is None else make.paged(rows, table)

    return {
        "query": make.rows("q", case.heads_q, case.dim_qk),
        "key": keys(case.dim_qk),
        "value": None if case.shares_kv else keys(case.dim_v),
        "dy": make.rows("q", case.heads_q, case.dim_v),
        "sparse_indices": lists_of(case, make, case.heads_kv),
        "query_rope": make.rows("q", case.heads_q, case.dim_rope) if case.dim_rope else None,
        "key_rope": keys(case.dim_rope) if case.dim_rope else None,
        "sinks": hostile(make.draw(case.heads_q)) if case.sink else None,
        "block_table": table,
        "scale_value": case.scale,
        "sparse_block_size": case.block,
        "attention_mode": 2,
        "return_softmax_lse": True,
        "dim_v": case.dim_v if case.shares_kv and case.dim_v < case.dim_qk else 0,
        **lengths_of(case),
        **layouts_of(case),
    }


def lists_of(case: SparseCase, make: Maker, heads: int) -> Tensor:
    """Returns the numbers of selected blocks, int [.., heads, entries], per row and head; make: draws the tensor."""
    dtype = torch.int64 if case.wide else torch.int32
    tensor = make.empty("q", heads, case.count, dtype=dtype)
    for b, rows in enumerate(case.q_len):
        sequence = sequence_of(case, tensor, "q", b)
        sequence.fill_(-1)
        for row, head in np.ndindex(rows, heads):
            result = _list(case, b, row, make.generator)[: case.count]
            sequence[row, head, : len(result)] = result.to(dtype)
    return tensor


def _list(case: SparseCase, b: int, row: int, generator: torch.Generator) -> Tensor:
    """Returns the numbers of the blocks that a row of sequence b selects, drawn as case.lists says, e.g. "repeated"."""
    visible, all_ = (-(-keys // case.block) for keys in (case.seen(b, row), case.keys(b)))
    mixed = torch.randperm(visible, generator=generator)
    if case.lists == "none" or not all_:
        return mixed[:0]
    if case.lists == "wild":
        return torch.randint(-1, all_, (case.count,), generator=generator)
    if case.lists == "repeated" and visible:
        return mixed[:2][torch.randint(0, min(2, visible), (case.count,), generator=generator)]
    return mixed[: max(1, case.count // 2)] if case.lists == "short" else mixed


def indexer_arguments(case: IndexerCase) -> dict[str, Any]:
    """Returns {name: argument} of npu_lightning_indexer for a test call, and dy, in memory filled with NaN."""
    make = Maker(case)
    table = make.table() if case.page else None
    keys = make.rows("kv", 1, case.dim, integers=case.exact)
    weights: torch.dtype = getattr(torch, case.weights)
    return {
        "query": make.rows("q", case.heads, case.dim, integers=case.exact),
        "key": keys if table is None else make.paged(keys, table),
        "weights": make.rows("q", case.heads, dtype=weights, integers=case.exact),
        "dy": make.rows("q", 1, case.top_k),
        "block_table": table,
        "sparse_count": case.top_k,
        "return_values": True,
        **bound_of(case),
        **lengths_of(case),
        **layouts_of(case),
    }


# ------------------------------------------------------------------------------------------------------------- running


def lowered(args: Mapping[str, Any]) -> Sparse:
    """Returns the call, as back ends compute it, of npu_sparse_flash_attention, or of sparse_attention() with dim_v."""
    if not args["dim_v"]:
        return sparse_call(bind(sparse.TORCH, args))
    lengths = {
        f"actual_seq_{side}len": np.diff(args[f"actual_seq_{side}len"], prepend=0)
        for side, layout in (("q", args["layout"]), ("kv", args["layout_kv"]))
        if layout == "TND"  # CANN's cumulative lengths; this interface needs lengths
    }
    given = {p.name: args.get(p.name) for p in sparse_own.RECORD.params if p.name in args}
    python_arguments = {"causal": args["sparse_mode"] == 3, **given, **lengths}
    return replace(sparse_call(bind(sparse_own.RECORD, python_arguments)), stats=True)


def compute(case: SparseCase, call: Sparse, dy: Tensor, backend: str) -> Results:
    """Returns {name: result} on a back end: out, max, sum and (without pages) gradients; dy: the gradient of out."""
    results = run(call, backend)
    result = dict(zip(("out", "max", "sum"), results.values(), strict=True))
    return result if case.page else result | run(SparseBackward(call, dy, *results.values()), backend)


def in_float64(call: Call) -> Call:
    """Returns a call, as back ends compute it, with its dtypes and tensors converted to float64."""
    dtypes = {name: "float64" for name in ("dtype", "weights_dtype") if hasattr(call.problem, name)}
    tensors = {n: t.double() if t is not None and t.is_floating_point() else t for n, t in call.tensors.items()}
    return replace(call, problem=replace(call.problem, **dtypes), tensors=tensors)


def golden(case: SparseCase, args: Mapping[str, Any]) -> Results:
    """Returns {name: result} of a test call in float64, from the reference back end: out, max, sum, gradients."""
    return compute(case, in_float64(lowered(args)), args["dy"].double(), "golden")


def expected(call: Sparse, dy: Tensor | None = None) -> dict[str, Expected]:
    """Returns {name: float64 result with expected error sizes} of a call: out, max, sum, gradients. call: in its dtype;
    dy: the gradient of out, or None: only the forward."""
    call64 = in_float64(call)
    results = run(call64, "golden")
    result = dict(zip(("out", "max", "sum"), expected_of(call, results).values(), strict=True))
    if dy is None:
        return result
    gradients = run(SparseBackward(call64, dy.double(), *results.values()), "golden")
    return result | expected_of(SparseBackward(call, dy, *results.values()), gradients)


def lowered_indexer(args: Mapping[str, Any]) -> Indexer:
    """Returns the call of npu_lightning_indexer with these arguments by name, as back ends compute it."""
    return bounded(indexer_call(bind(indexer.TORCH, args)), args)


def chosen(call: Indexer, backend: str) -> tuple[Tensor, Tensor]:
    """Returns (indices, scores) of the keys that a call of the indexer selects on the named back end."""
    indices, values = run(call, backend).values()
    return indices, values


def indexer_gradients(call: Indexer, dy: Tensor, indices: Tensor, backend: str) -> Results:
    """Returns {name: gradient} of an indexer's scores of the keys `indices`, by a back end; dy: gradient of scores."""
    return run(IndexerBackward(call, dy, indices), backend)


# ----------------------------------------------------------------------------------------------- readers without golden


def selected(case: SparseCase, entries: list[int], b: int, row: int) -> list[int]:
    """Returns the tokens that a row of sequence b attends to, in order, with repetitions; entries: selected blocks."""
    visible, tokens = case.seen(b, row), []
    for slot, block in enumerate(entries):
        if slot >= math.ceil(visible / case.block) or block == -1:
            break
        tokens += [token for token in range(block * case.block, (block + 1) * case.block) if token < visible]
    return tokens


def keys_of(case: Rows, args: Mapping[str, Any], name: str, b: int) -> Tensor:
    """Returns sequence b's rows, [tokens, heads, dim], of the argument `name`, collected from pages if it is paged."""
    tensor, table = args[name], args["block_table"]
    if table is None:
        return sequence_of(case, tensor, "kv", b)
    slots = [(int(table[b, token // case.page]), token % case.page) for token in range(case.kv_len[b])]
    return torch.stack([tensor[slot] for slot in slots]) if slots else tensor[0, :0]


def scores_of(case: IndexerCase, args: Mapping[str, Any], b: int, dtype: torch.dtype) -> Tensor:
    """Returns an indexer's scores of sequence b, [rows, keys], computed in `dtype`; -inf for an invisible key."""
    q, w = (sequence_of(case, args[name], "q", b).to(dtype) for name in ("query", "weights"))
    k = keys_of(case, args, "key", b)[:, 0].to(dtype)
    scores = torch.einsum("rhd,kd->rhk", q, k).relu().mul(w[..., None]).sum(1)
    key = torch.arange(case.kv_len[b])
    ends = torch.tensor([case.seen(b, row) for row in range(case.q_len[b])], dtype=torch.int64)
    return scores.masked_fill(key >= ends[:, None], -math.inf)
