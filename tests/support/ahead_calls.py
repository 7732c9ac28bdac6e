"""Makes a call of one sequence for any problem, and records the kernel launches that it starts on a chip.

The back end runs as on a GPU of that chip, with tensors in the CPU's memory, which no kernel reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from unittest import mock

import numpy as np
import torch

from fusion_attention import memory
from fusion_attention.backends import triton as backend
from fusion_attention.backends.triton.common import launching, shapes
from fusion_attention.backends.triton.common.shapes import Tile
from fusion_attention.backends.triton.decode import launch as launch_decode
from fusion_attention.backends.triton.selected import shapes as shapes_sparse
from fusion_attention.ir.mask import INFINITE
from fusion_attention.ir.memory_views import Dequant, MatrixView, PagedView, RowView
from fusion_attention.ir.pooling import PoolingGrads, PoolingOperands, PoolingProblem
from fusion_attention.ir.problem import (
    AnyProblem,
    Compressed,
    Extents,
    Grads,
    IndexerGrads,
    IndexerLossOperands,
    IndexerLossProblem,
    IndexerOperands,
    IndexerProblem,
    Operands,
    Problem,
    Stats,
)

KEYS = 128  # keys of the sequence, and those that a row sees beside compressed keys
ZERO = np.zeros(1, np.int64)
FLOAT32, INT32 = torch.float32, torch.int32
OF_INDEXER = {
    **dict.fromkeys(("index_scores", "index_choice", "index_write"), "indexer_topk"),
    "warm_lse": "indexer_lse",
}
FORWARDS = ("forward", "gluon_forward", "decode", "join", "recompute_out", "sparse_forward", "recompute_lists")


@dataclass(frozen=True, eq=False)
class Launched:
    """A launch: the kernel, its arguments by name, and Triton's options."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]

    @property
    def tile(self) -> Tile:
        """The tile's sizes and options; 0 for a size that the kernel does not have."""
        sizes = (self.arguments.get(name, 0) for name in ("BM", "BN"))
        return Tile(*sizes, *self.options.values(), self.arguments.get("TMA", False))


@dataclass(frozen=True)
class Config:
    """A launch of a kernel in a call.

    Args:
        kernel: name of the kernel's function.
        problem: the Problem of the call.
        which: index of the launch among the launches of the kernel in the call; -1: the last.
        align: elements to which rows are aligned; 0: 16 bytes.
        rows: query rows of the sequence.
        processors: streaming multiprocessors of the GPU, by which the keys of a row are divided among programs.
    """

    kernel: str
    problem: AnyProblem
    which: int = 0
    align: int = 0
    rows: int = 1
    processors: int = 1

    @property
    def op_kind(self) -> str:
        """Name of the operation that launches the kernel."""
        if isinstance(self.problem, IndexerLossProblem):
            return "indexer_loss"
        if isinstance(self.problem, PoolingProblem):
            return "pooling" if self.kernel == "pool" else "pooling_backward"
        if isinstance(self.problem, IndexerProblem):
            return OF_INDEXER.get(self.kernel, "indexer_backward")
        return "attention_forward" if self.kernel in FORWARDS else "attention_backward"

    def has_tile(self, chip: int) -> bool:
        """Returns True if a chip's tables (80, 86 or 90) have tiles for the problem."""
        if isinstance(self.problem, Problem) and not self.problem.selects:
            with mock.patch.object(shapes, "chip_of", return_value=chip):
                return not backend.against_shape(self.problem, torch.device("cpu"), self.op_kind)
        return isinstance(self.problem, PoolingProblem) or not shapes_sparse.against(self.problem, self.op_kind, chip)

    def launched(self, chip: int) -> Launched:
        """Returns the launch on a chip that has tiles for the problem."""
        with on_chip(chip, self.processors) as launches:
            call(self.problem, self.op_kind, self.rows, self.align)
        return [one for one in launches if one.kernel.__name__ == self.kernel][self.which]


@contextlib.contextmanager
def on_chip(chip: int, processors: int) -> Iterator[list[Launched]]:
    """Runs the back end as on a chip and yields a list, to which launches are added instead of started."""
    launches: list[Launched] = []

    def record(kernel: Any, grid: tuple[int, ...], arguments: list[Any], options: dict[str, int]) -> None:
        launches.append(Launched(kernel, dict(zip(kernel.arg_names, arguments, strict=True)), options))

    with (
        mock.patch.object(launching, "launch", record),
        mock.patch.object(shapes, "chip_of", return_value=chip),
        mock.patch.object(launch_decode, "processors", return_value=processors),
        mock.patch.object(memory, "_ready", lambda fresh: fresh),  # conftest.py writes NaN to scratch
    ):
        yield launches


def call(p: AnyProblem, op_kind: str, rows: int, align: int) -> None:
    extents, *operands = memory_of(p, rows, align)
    if op_kind in ("attention_forward", "indexer_topk", "indexer_lse", "pooling"):
        del operands[1]
    getattr(backend, op_kind)(p, extents, backend.schedule(p, extents, op_kind), *operands)


def rows_of(tokens: int, heads: int, dim: int, dtype: torch.dtype, align: int = 0) -> RowView:
    """Returns rows whose strides are multiples of `align` elements; 0: of 16 bytes."""
    unit = 16 // dtype.itemsize
    width = -(-dim // unit) * unit + align
    memory = torch.empty(tokens, heads, width, dtype=dtype)
    return RowView((memory,), ZERO, heads * width, np.array([width]), dim)


def in_pages(rows: RowView, table: torch.Tensor, size: int) -> PagedView:
    """Returns rows as a pool of pages of `size` tokens."""
    head = int(rows.stride_head[0])
    return PagedView(rows.keep[0], table, size, size * rows.stride_token, rows.stride_token, head, rows.dim)


def matrix_of(dtype: torch.dtype) -> MatrixView:
    """Returns one element that stands for all pairs of rows and keys."""
    return MatrixView(torch.empty(1, 1, dtype=dtype), ZERO, ZERO, ZERO, 1)


def extents_of(q_len: int, kv_len: int = KEYS, window: int = 0, compressed: int = 0) -> Extents:
    """Returns causal visibility in which the last row sees the last key; window: keys that a row sees; 0: all."""
    q, kv = np.array([q_len]), np.array([kv_len])
    hi = kv - q + 1
    second = Compressed(np.array([compressed]), hi) if compressed else None
    return Extents(q, kv, hi - window if window else ZERO - INFINITE, hi, ZERO, kv - q, compressed=second)


@lru_cache(maxsize=1)
def memory_of(p: AnyProblem, q_len: int, align: int) -> tuple[Extents, Any, Any]:
    """Returns lengths, operands and gradients of a call of `q_len` rows."""
    if isinstance(p, PoolingProblem):
        return _pooling(p, align)
    if isinstance(p, IndexerProblem):
        return extents_of(q_len), *_indexer(p, p.heads, p.dim, p.top_k, q_len, align)
    if isinstance(p, IndexerLossProblem):
        return extents_of(q_len), *_loss(p, q_len, align)
    return _attention(p, q_len, align)


def _attention(p: Problem, q_len: int, align: int) -> tuple[Extents, Operands, Grads]:
    table = torch.empty(1, KEYS // (p.page_size or KEYS), dtype=INT32)

    def query(dim: int, dtype: torch.dtype = p.torch_dtype) -> RowView:
        return rows_of(q_len, p.heads_q, dim, dtype, align)

    def key(dim: int) -> RowView:
        return rows_of(KEYS, p.heads_kv, dim, p.torch_dtype, align)

    def stored(dim: int, dtype: torch.dtype, page: int = p.page_size) -> RowView | PagedView:
        rows = rows_of(KEYS, p.heads_kv, dim, dtype, align)
        return in_pages(rows, table, page) if page else rows

    def dequant(kind: str, dim: int) -> Dequant | None:
        if kind == "none":
            return None
        per_channel = RowView((torch.empty(p.heads_kv, dim),), ZERO, 0, np.array([dim]), dim)
        return Dequant(*((stored(1, FLOAT32) if kind == "token" else per_channel,) * 2))

    dtype = torch.int8 if p.kv_dtype else p.torch_dtype
    k, v = stored(p.dim_qk, dtype), stored(p.dim_v, dtype)
    operands = Operands(
        query(p.dim_qk), k, replace(k, dim=p.dim_v) if p.shares_kv else v, query(p.dim_v),
        Stats(query(1, FLOAT32), query(1, FLOAT32)), query(p.dim_rope), stored(p.dim_rope, p.torch_dtype),
        bias=matrix_of(p.torch_dtype), blocked=matrix_of(torch.uint8), drop_bits=matrix_of(torch.uint8),
        slopes=torch.empty(1, p.heads_q), sink=torch.empty(p.heads_q),
        dequant_k=dequant(p.dequant_k, p.dim_qk), dequant_v=dequant(p.dequant_v, p.dim_v),
        indices=rows_of(q_len, p.heads_kv, p.select_count, INT32),
    )  # fmt: skip
    grads = Grads(
        query(p.dim_v), query(p.dim_qk), key(p.dim_qk), key(p.dim_v), query(p.dim_rope), key(p.dim_rope),
        matrix_of(FLOAT32), torch.empty(p.heads_q) if p.has_sink else None,
    )  # fmt: skip
    if not p.compressed_ratio:
        return extents_of(q_len), operands, grads
    k = stored(p.dim_qk, p.torch_dtype, p.page_size // 4)
    operands.k_compressed, operands.v_compressed = k, replace(k, dim=p.dim_v)
    grads.dk_compressed, grads.dv_compressed = key(p.dim_qk), key(p.dim_v)
    return extents_of(q_len, window=KEYS, compressed=KEYS), operands, grads


def _indexer(
    p: IndexerProblem | IndexerLossProblem, heads: int, dim: int, count: int, q_len: int, align: int
) -> tuple[IndexerOperands, IndexerGrads]:
    """Returns operands and gradients of an indexer; count: entries of a list."""
    weights_dtype = getattr(torch, p.weights_dtype)
    q, dq = (rows_of(q_len, heads, dim, p.torch_dtype, align) for _ in range(2))
    k, dk = (rows_of(KEYS, 1, dim, p.torch_dtype, align) for _ in range(2))
    weights, dweights = (rows_of(q_len, 1, heads, weights_dtype) for _ in range(2))
    stats = Stats(*(rows_of(q_len, 1, 1, FLOAT32) for _ in range(2)))
    operands = IndexerOperands(q, k, weights, rows_of(q_len, 1, count, INT32), stats=stats)
    if isinstance(p, IndexerProblem):
        operands.values = rows_of(q_len, 1, count, p.torch_dtype)
        if p.page_size:
            operands.k = in_pages(k, torch.empty(1, KEYS // p.page_size, dtype=INT32), p.page_size)
    return operands, IndexerGrads(dq, dk, dweights, rows_of(q_len, 1, count, p.torch_dtype))


def _loss(p: IndexerLossProblem, q_len: int, align: int) -> tuple[IndexerLossOperands, IndexerGrads]:
    index, grads = _indexer(p, p.heads_index, p.dim_index, p.select_count, q_len, align)
    operands = IndexerLossOperands(index, torch.empty(1))
    if p.has_target:
        operands.target = rows_of(q_len, 1, p.select_count or KEYS, FLOAT32)
        index.values = rows_of(q_len, 1, p.select_count or KEYS, FLOAT32)
        return operands, grads
    operands.q, operands.q_rope = (rows_of(q_len, p.heads_q, n, p.torch_dtype, align) for n in (p.dim_qk, p.dim_rope))
    operands.k, operands.k_rope = (rows_of(KEYS, p.heads_kv, n, p.torch_dtype, align) for n in (p.dim_qk, p.dim_rope))
    operands.stats = Stats(*(rows_of(q_len, p.heads_q, 1, FLOAT32) for _ in range(2)))
    operands.sink = torch.empty(p.heads_q) if p.has_sink else None
    return operands, grads


def _pooling(p: PoolingProblem, align: int) -> tuple[Extents, PoolingOperands, PoolingGrads]:
    dtype = getattr(torch, p.dtype)
    kv, gate, dkv, dgate = (rows_of(p.ratio, p.heads, p.channels, dtype, align) for _ in range(4))
    out, dout = (rows_of(1, p.heads, p.dim, dtype, align) for _ in range(2))
    bias, dbias = (torch.empty(p.ratio, p.channels) if p.has_bias else None for _ in range(2))
    extents = replace(extents_of(1, p.ratio), lo=ZERO)
    return extents, PoolingOperands(kv, gate, out, bias), PoolingGrads(dout, dkv, dgate, dbias)
