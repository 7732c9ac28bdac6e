"""Mistakes in addresses and stored values: heads, pages, lengths, dequantisation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from fusion_attention.ir.kv import Dequant, PagedView, RowView
from fusion_attention.judging.mistakes.kinds import Case, Mistake, Try, finite
from fusion_attention.judging.setting import Setting

_CACHED = ("k", "v", "k_rope")


@partial(
    Mistake, "gqa-order", "Query heads meet the wrong key heads.",
    "Query head h belongs to key head h // (N1 / N2): repeat_interleave, not repeat.",
)  # fmt: skip
def group_order(case: Case) -> Iterator[Try]:
    s, p = case.setting, case.setting.problem
    if p.heads_kv > 1 and p.group > 1 and s.grads is None:
        heads = np.arange(p.heads_q)
        yield Try("head h meets key head h % N2, not h // (N1 / N2)", s.changed(kv_heads=heads % p.heads_kv))
        yield Try("every head meets the first key head", s.changed(kv_heads=0 * heads))
        yield Try("in the other direction", s.changed(kv_heads=(heads // p.group)[::-1].copy()))


@partial(
    Mistake, "head-offset", "Keys or values are those of a neighbouring key head.",
    "Look at the stride and the offset of heads where tiles of keys and values are read.",
)  # fmt: skip
def head_offset(case: Case) -> Iterator[Try]:
    s, p = case.setting, case.setting.problem
    if p.heads_kv == 1 or s.grads is not None:
        return
    right = np.arange(p.heads_q) // p.group
    for word, by in (("next", 1), ("previous", -1)):
        other = (right + by) % p.heads_kv
        yield Try(f"values of the {word} head", s.changed(v_heads=other))
        yield Try(f"keys of the {word} head", s.changed(kv_heads=other, v_heads=right))
        yield Try(f"keys and values of the {word} head", s.changed(kv_heads=other))


@partial(
    Mistake, "sequence-offset", "Keys or values are those of another sequence, or begin a token too early or too late.",
    "Look at the stride of sequences, or at the cumulative lengths, where keys and values are read.",
)  # fmt: skip
def sequence_offset(case: Case) -> Iterator[Try]:
    s, o = case.setting, case.setting.operands
    if s.grads is not None or not isinstance(o.k, RowView) or not isinstance(o.v, RowView):
        return

    def moved(view: RowView, sequences: int, tokens: int) -> RowView:
        address = np.roll(view.address, -sequences)
        return replace(view, address=address + tokens * view.stride_token)

    equal = len(s.extents) > 1 and bool((s.extents.kv_len == s.extents.kv_len[0]).all())
    ways = [("next sequence", 1, 0), ("previous sequence", -1, 0)] if equal else []
    ways += [("one token late", 0, 1), ("one token early", 0, -1)]
    for detail, sequences, tokens in ways:
        k, v = (moved(view, sequences, tokens) for view in (o.k, o.v))
        yield Try(f"values: {detail}", s.of_operands(v=v))
        yield Try(f"keys: {detail}", s.of_operands(k=k))
        yield Try(f"keys and values: {detail}", s.of_operands(k=k, v=v))


@partial(Mistake, "kv-confused", "Keys and values are confused.", "Look at the order of key and value in the call.")
def values_confused(case: Case) -> Iterator[Try]:
    s, p, o = case.setting, case.setting.problem, case.setting.operands
    if p.dim_qk == p.dim_v and not p.shares_kv and s.grads is None and p.dequant_k == "none":
        swapped = {"k": o.v, "v": o.k, "k_common": o.v_common, "v_common": o.k_common}
        yield Try("each in the other's place", s.of_operands(**swapped))
        yield Try("keys for values", s.of_operands(v=o.k, v_common=o.k_common))
        yield Try("values for keys", s.of_operands(k=o.v, k_common=o.v_common))


def _paged(s: Setting) -> bool:
    return isinstance(s.operands.k, PagedView)


def _with_table(s: Setting, change: Any) -> Setting:
    views = {n: getattr(s.operands, n) for n in _CACHED}
    return s.of_operands(**{n: replace(v, table=change(v)) for n, v in views.items() if isinstance(v, PagedView)})


@partial(
    Mistake, "page-table", "Pages are found through the wrong entries of the block table.",
    "Token t lies in page block_table[b, t // block_size], at row t % block_size.",
)  # fmt: skip
def page_table(case: Case) -> Iterator[Try]:
    s = case.setting
    if not _paged(s):
        return

    def blocks(view: PagedView) -> int:
        return int(view.pool.shape[0])

    yield Try("each entry one column to the right", _with_table(s, lambda v: v.table.roll(-1, -1).contiguous()))
    yield Try("each entry one column to the left", _with_table(s, lambda v: v.table.roll(1, -1).contiguous()))
    yield Try("page numbers plus one", _with_table(s, lambda v: (v.table + 1).clamp(0, blocks(v) - 1)))
    yield Try("page numbers minus one", _with_table(s, lambda v: (v.table - 1).clamp(min=0)))
    yield Try("pages in order, without the table", _with_table(s, _in_order))
    if len(s.extents) > 1:
        yield Try("the first sequence's pages for all", _with_table(s, lambda v: v.table[:1].repeat(len(v.table), 1)))


def _in_order(view: PagedView) -> Any:
    rows, columns = view.table.shape
    order = np.arange(rows * columns).reshape(rows, columns) % max(int(view.pool.shape[0]), 1)
    return view.table.new_tensor(order)


def _capacity(case: Case) -> np.ndarray | None:
    """Returns the number of key slots per sequence; None for packed sequences."""
    s = case.setting
    count, k = len(s.extents), s.operands.k
    if isinstance(k, PagedView):
        return np.full(count, k.table.shape[1] * k.page_size)
    if case.layout in ("TND", "NTD") or not isinstance(k, RowView):
        return None
    tokens = case.names.get("S2")
    return None if not tokens else np.full(count, int(tokens))


def _longer(case: Case, lengths: np.ndarray) -> Setting:
    """Returns a setting with other key lengths; band edges relative to the last key move with it."""
    s, e = case.setting, case.setting.extents
    edges = {n: np.where(finite(a), a + (lengths - e.kv_len), a) for n, a in (("lo", e.lo), ("hi", e.hi))}
    return s.of_extents(kv_len=lengths, **edges)


@partial(
    Mistake, "lengths-cumulative", "Lengths are read as cumulative ends, or the other way round.",
    "Padded and paged inference takes lengths; TND takes cumulative ends.",
)  # fmt: skip
def lengths_cumulative(case: Case) -> Iterator[Try]:
    e, buffer = case.setting.extents, _capacity(case)
    if buffer is None or len(e) < 2:
        return
    for detail, lengths in (
        ("lengths added up, as if they were to be cumulative", np.cumsum(e.kv_len)),
        ("each length less the one before, as if they were cumulative", np.diff(e.kv_len, prepend=0)),
    ):
        lengths = np.clip(lengths, 0, buffer)
        if (lengths != e.kv_len).any():
            yield Try(detail, _longer(case, lengths))


@partial(
    Mistake, "padding-seen", "Slots behind a sequence's last key are seen.",
    "Mask the last page, or the padding, by actual_seq_lengths.",
)  # fmt: skip
def lengths_ignored(case: Case) -> Iterator[Try]:
    e, buffer = case.setting.extents, _capacity(case)
    if buffer is None or (buffer == e.kv_len).all():
        return
    yield Try("every slot is a key", _longer(case, np.maximum(buffer, e.kv_len)))
    k = case.setting.operands.k
    if isinstance(k, PagedView):
        pages = -(-e.kv_len // k.page_size) * k.page_size
        yield Try("every slot of the last page is a key", _longer(case, pages))
    yield Try(
        "the first sequence's length for all", _longer(case, np.minimum(np.full_like(buffer, e.kv_len[0]), buffer))
    )


def _rescaled(s: Setting, change: Any) -> Setting:
    o = s.operands
    return s.of_operands(**{n: change(d) for n, d in (("dequant_k", o.dequant_k), ("dequant_v", o.dequant_v)) if d})


def _transposed(dequant: Dequant) -> Dequant:
    """Returns scales [heads, dim] as if they were [dim, heads]."""

    def other(view: RowView | PagedView | None) -> RowView | PagedView | None:
        if not isinstance(view, RowView) or view.stride_token or len(view.keep) != 1:
            return view
        heads, dim = view.keep[0].reshape(-1, view.dim).shape
        table = view.keep[0].reshape(-1).reshape(dim, heads).T.contiguous()
        return RowView((table,), np.zeros_like(view.address), 0, np.full_like(view.stride_head, dim), view.dim)

    return Dequant(other(dequant.scale), other(dequant.offset))  # type: ignore[arg-type]


def _of_first(dequant: Dequant) -> Dequant:
    def other(view: RowView | PagedView | None) -> RowView | PagedView | None:
        return replace(view, stride_head=np.zeros_like(view.stride_head)) if isinstance(view, RowView) else view

    return Dequant(other(dequant.scale), other(dequant.offset))  # type: ignore[arg-type]


@partial(
    Mistake, "dequantisation", "Stored integers are scaled in another way.",
    "(stored + offset) * scale, scales [2, N2, D], keys first.",
)  # fmt: skip
def dequantisation(case: Case) -> Iterator[Try]:
    s, p, o = case.setting, case.setting.problem, case.setting.operands
    if p.dequant_k == "none" and p.dequant_v == "none":
        return
    if p.dequant_k == p.dequant_v and o.dequant_k is not None and o.dequant_v is not None:
        yield Try(
            "the scales of keys and values exchanged", s.of_operands(dequant_k=o.dequant_v, dequant_v=o.dequant_k)
        )
    if p.heads_kv > 1:
        yield Try("scales prepared [D, N2], not [N2, D]", _rescaled(s, _transposed))
        yield Try("the first head's scales for all heads", _rescaled(s, _of_first))
    if any(d is not None and d.offset is not None for d in (o.dequant_k, o.dequant_v)):
        yield Try("stored * scale + offset, not (stored + offset) * scale", s.changed(offset_outside=True))
        yield Try("offsets left out", _rescaled(s, lambda d: Dequant(d.scale)))
    yield Try("keys are not scaled", s.of_operands(dequant_k=None))
    yield Try("values are not scaled", s.of_operands(dequant_v=None))
    if p.kv_dtype == "int4":
        yield Try("the even element in the high half of a byte", s.changed(high_first=True))


MISTAKES = (
    group_order, head_offset, sequence_offset, values_confused, page_table, lengths_cumulative, lengths_ignored,
    dequantisation,
)  # fmt: skip
