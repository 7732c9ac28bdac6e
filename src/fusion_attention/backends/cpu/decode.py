"""Plans and runs the C++ core's decode kernel: attention of few query rows to long, paged or quantized keys.

It converts views of memory to the core's arguments.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

import fusion_attention._native as _native
from fusion_attention.backends.cpu import native
from fusion_attention.ir.memory_views import Dequant, PagedView, RowView
from fusion_attention.ir.problem import Extents, Operands, Problem

_STORAGES = {"float32": 0, "float16": 1, "bfloat16": 2, "int8": 3, "int4": 4}
_STORED = {"int8": torch.int8, "int4": torch.uint8}
_DEQUANTS = {"none": 0, "channel": 1, "token": 2}
_ROUNDINGS = {"none": 0, "tensor": 1, "channel": 2}
# Largest number of rows (query tokens * heads of a group) for which the decode kernel's pass over keys as they are in
# memory is faster than the dense forward, which packs keys: in sequences of at most _FEW_TOKENS tokens, whose heads the
# dense forward computes one by one, and in others. Measured.
_FEW_TOKENS, _ROWS_OF_FEW, _ROWS = 8, 64, 16
# The same numbers for keys that are paged, or shared with values or other sequences.
_ROWS_OF_CACHE, _TOKENS_OF_CACHE = 128, 3
# With at most _FEW_KEYS keys the dense forward is faster, because scores stay in registers (csrc/dense/short.h), unless
# there are at most _FEWER_TOKENS tokens. Other bounds must not depend on the number of keys, which changes between the
# steps of a plan.
_FEW_KEYS, _FEWER_TOKENS = 32, 2


def needed(problem: Problem) -> bool:
    """Returns True if only the decode kernel supports the problem: keys in pages, as integers, or shared with values or
    by all sequences; a scale per row; int8 results."""
    p = problem
    common = p.common_keys > 0 or p.has_row_scale
    return p.page_size > 0 or p.kv_dtype != "" or p.shares_kv or p.out_quant != "none" or common


def reasons_against(problem: Problem) -> list[str]:
    """Returns a sentence for each property that the decode kernel does not support, for problems that only this kernel
    could compute (pages, stored integers, ...); [] for others."""
    p, reasons = problem, []
    if needed(p) and p.dropout != "none":
        reasons.append(
            "the cpu back end computes no dropout over pages, stored integers, shared or common keys, "
            "with a scale per row or with an int8 result."
        )
    if needed(p) and p.has_blocked_tiles:
        reasons.append("the cpu back end computes blocked tiles over dense rows of keys alone.")
    if p.common_keys and (p.dim_rope or "token" in (p.dequant_k, p.dequant_v)):
        reasons.append("the cpu back end computes common_keys without rope parts and scales of tokens.")
    return reasons


def chosen(problem: Problem, extents: Extents) -> np.ndarray:
    """Returns bool [sequences], true if the decode kernel computes a sequence, in general one with few query rows.

    It depends only on the problem and the complete sequences' lengths, not on the chunk of one that is computed.
    """
    if problem.kv_dtype or problem.out_quant != "none":
        return np.ones(len(extents), bool)
    q_len, kv_len = extents.chosen_by
    rows = q_len * problem.group
    if needed(problem):
        few: np.ndarray = (rows <= _ROWS_OF_CACHE) | (q_len <= _TOKENS_OF_CACHE)
        return few
    if problem.dropout != "none" or problem.dim_rope or problem.has_blocked_tiles or problem.wide_results:
        return np.zeros(len(extents), bool)
    few = rows <= np.where(q_len <= _FEW_TOKENS, _ROWS_OF_FEW, _ROWS)
    few &= (kv_len > _FEW_KEYS) | (q_len <= _FEWER_TOKENS)
    few[rows == 0] = few[rows > 0].all()  # Sequences without rows follow the others.
    return few


@dataclass(eq=False)
class Schedule:
    """Plans of an attention forward: `decode` (few query rows) for some sequences, `dense` for others (None: none)."""

    decode: _native.DecodePlan
    dense: _native.ForwardPlan | None
    decoded: np.ndarray  # [sequences] bool: true for sequences that the decode kernel computes
    decodes_all: bool  # true if it computes all sequences, for any number of keys

    @property
    def variant(self) -> str:
        """Name of the plan's instruction set."""
        return self.decode.variant

    def workspace_bytes(self, threads: int) -> int:
        """Returns the bytes of scratch: the larger need of both plans, which run one after the other."""
        dense = self.dense.workspace_bytes(threads) if self.dense else 0
        return max(self.decode.workspace_bytes(threads), dense)

    def update(self, problem: Problem, extents: Extents) -> bool:
        """Sets key lengths and bands of the same sequences in the decode plan, from `extents`; returns False, and
        changes nothing, if they need another plan."""
        if self.dense is not None or not (self.decodes_all or chosen(problem, extents).all()):
            return False
        self.decode.update(extents.kv_len, extents.lo, extents.hi)
        return True


def plan(problem: Problem, extents: Extents, variant: str | None) -> Schedule | _native.ForwardPlan:
    """Returns the C++ core's plan of attention: of the dense forward alone, or a Schedule of the decode kernel and, for
    other sequences, the dense forward. variant: an instruction set, None: the fastest."""
    decoded = chosen(problem, extents)
    if not decoded.any() and not needed(problem):
        return native.plan_forward(problem, extents, variant)
    p = problem
    storage = _STORAGES[p.kv_dtype or p.dtype]
    dequants = _DEQUANTS[p.dequant_k], _DEQUANTS[p.dequant_v]
    more = storage, *dequants, _ROUNDINGS[p.out_quant], p.shares_kv, p.common_keys, p.has_row_scale
    own_extents = extents if decoded.all() else replace(extents, q_len=np.where(decoded, extents.q_len, 0))
    decode = _native.DecodePlan(native.problem_of(p), more, native.extents_of(own_extents), variant)
    rest = None if decoded.all() else replace(extents, q_len=np.where(decoded, 0, extents.q_len))
    stays = needed(p) or bool((extents.q_len <= _FEWER_TOKENS).all() and decoded.all())
    return Schedule(decode, native.plan_forward(p, rest, variant) if rest else None, decoded, stays)


def run(schedule: Schedule, problem: Problem, operands: Operands) -> int:
    """Writes attention's out, max and sum to `operands`; returns the number of rows without visible keys (out is 0)."""
    threads = torch.get_num_threads()
    if schedule.dense and not needed(problem):
        empty = native.run_forward(schedule.dense, problem, operands)
    else:
        empty = 0
    with native.Floats() as floats:
        values = native.core_arguments(_operands, problem, operands, floats)
        if schedule.dense and needed(problem):
            empty = schedule.decode.run_dense(schedule.dense, threads, values)
        return empty + schedule.decode.run(threads, values)


def prepare(schedule: Schedule, problem: Problem, operands: Operands, names: tuple[str, ...]) -> _native.PreparedDecode:
    """Returns an object whose run() repeats the decode kernel's forward on other tensors of equal shapes and strides,
    in the order of `names`; only for a schedule without a dense plan. operands: views of the first call's tensors."""
    with native.Floats() as floats:
        return schedule.decode.prepare(_operands(problem, operands, floats), names)


def _operands(p: Problem, o: Operands, floats: native.Floats) -> tuple[Any, ...]:
    """Returns the addresses and strides of all operands, in the order of the native decode kernel's arguments; floats:
    keeps float32 copies of slopes and sinks alive."""
    dtype = p.torch_dtype
    stored = _STORED.get(p.kv_dtype, dtype)
    return (
        native.rows_of(o.q, dtype),
        native.rows_of(o.out, dtype if p.out_quant == "none" else torch.int8),
        native.rows_of(o.stats.max, torch.float32),
        native.rows_of(o.stats.sum, torch.float32),
        native.rows_of(o.q_rope, dtype) if p.dim_rope else None,
        native.matrix_of(o.bias, native.DTYPES[o.bias.keep.dtype]) if o.bias and p.bias != "none" else None,
        floats.address(o.slopes) if p.bias in ("slopes", "slopes_sqrt") else 0,
        native.matrix_of(o.blocked, 0) if p.has_blocked and o.blocked else None,
        floats.address(o.sink) if p.has_sink else 0,
        _cache(o.k, stored),
        _cache(o.v, stored),
        _cache(o.k_rope, dtype) if p.dim_rope else None,
        *_quantised(o.dequant_k, p.dequant_k),
        *_quantised(o.dequant_v, p.dequant_v),
        _per_channel(o.out_scale) if p.out_quant != "none" else None,
        _per_channel(o.out_offset) if p.out_quant != "none" else None,
        _cache(o.k_common, stored) if p.common_keys else None,
        _cache(o.v_common, stored) if p.common_keys else None,
        native.rows_of(o.row_scale, torch.float32) if p.has_row_scale else None,
    )


def _cache(view: RowView | PagedView | None, dtype: torch.dtype) -> tuple[Any, ...]:
    """Returns address, element size and strides of stored keys or values, contiguous or in pages, as the native core
    reads them; raises TypeError if their dtype is not `dtype`."""
    if isinstance(view, PagedView):
        pool, table = view.pool, view.table
        if pool.dtype is not dtype or table.dtype is not torch.int32:
            raise TypeError(f"fusion_attention: native core: expected {dtype} in memory, got {pool.dtype}")
        pages = table.data_ptr(), table.stride(0), view.page_size, view.stride_page, view.stride_head
        fragments = (view.fragment, view.stride_fragment) if view.fragment else ()
        return pool.data_ptr(), pool.itemsize, *pages, view.stride_token, view.dim, *fragments
    start, address, stride_head, stride_token, dim = native.rows_of(view, dtype)
    return start, dtype.itemsize, address, stride_head, stride_token, dim


def _quantised(dequant: Dequant | None, kind: str) -> tuple[Any, Any]:
    """Returns (scales, offsets) of stored integers as addresses and strides for the native core; None for absent ones.
    kind: "none", or the axis of the scales."""
    if kind == "none" or dequant is None:
        return None, None
    offset = None if dequant.offset is None else _cache(dequant.offset, torch.float32)
    return _cache(dequant.scale, torch.float32), offset


def _per_channel(values: torch.Tensor | None) -> tuple[int, int, int] | None:
    """Returns (address, stride of a head, stride of a channel) of float32 numbers [heads, channels]; None for None."""
    if values is None:
        return None
    if values.dtype is not torch.float32:
        raise TypeError(f"fusion_attention: native core: expected float32 in memory, got {values.dtype}")
    return values.data_ptr(), values.stride(0), values.stride(1)
