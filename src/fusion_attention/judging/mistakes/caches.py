"""Mistakes of kernels in KV caches: in pages and their table, and in dequantisation."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from fusion_attention.ir.mask import INFINITE
from fusion_attention.ir.memory_views import Dequant, PagedView, RowView
from fusion_attention.judging import formulas
from fusion_attention.judging.editable_call import Block, Setting
from fusion_attention.judging.expected_error import LEFT
from fusion_attention.judging.mistakes.kinds import Case, Mistake, Try, out_of
from fusion_attention.judging.outputs import Output

Tensor = torch.Tensor
_SAMPLES = 4  # number of compared rows of a sequence
_NUMBERS = 1 << 24  # largest number of elements of the results for all pairs (page of a sequence, block of the pool)


def _with_table(
    s: Setting, change: Callable[[PagedView], Tensor], names: Collection[str] = ("k", "v", "k_rope")
) -> Setting:
    views = {n: getattr(s.operands, n) for n in names}
    return s.of_operands(**{n: replace(v, table=change(v)) for n, v in views.items() if isinstance(v, PagedView)})


def page_table(case: Case) -> Iterator[Try]:
    s = case.setting
    if not isinstance(s.operands.k, PagedView):
        return

    ways: dict[str, Callable[[PagedView], Tensor]] = {
        "each entry one column to the right": lambda v: v.table.roll(-1, -1).contiguous(),
        "each entry one column to the left": lambda v: v.table.roll(1, -1).contiguous(),
        "page numbers plus one": lambda v: (v.table + 1).clamp(0, v.pool.shape[0] - 1),
        "page numbers minus one": lambda v: (v.table - 1).clamp(min=0),
        "pages in order, without the table": _in_order,
    }
    if len(s.extents) > 1:
        ways["the first sequence's pages for all"] = lambda v: v.table[:1].repeat(len(v.table), 1)
    for detail, change in ways.items():
        yield Try(detail, _with_table(s, change))
        if not s.problem.shares_kv:
            yield Try(f"{detail}, of keys alone", _with_table(s, change, ("k", "k_rope")))
            yield Try(f"{detail}, of values alone", _with_table(s, change, ("v",)))


def _in_order(view: PagedView) -> Tensor:
    rows, columns = view.table.shape
    order = np.arange(rows * columns).reshape(rows, columns) % max(int(view.pool.shape[0]), 1)
    return view.table.new_tensor(order)


def _of_pages(blocks: Sequence[Block], sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Returns for each block of keys of one query row the sums over its pages of the weights exp(score - the largest
    score of all blocks), [pages], and of weights times values [pages, elements]. sizes: keys of a page, by block."""
    scores = [formulas.scores_of(x)[0][0, 0] for x in blocks]
    top, results = torch.cat(scores).nan_to_num(-torch.inf).amax(), []
    for x, of_keys, size in zip(blocks, scores, sizes, strict=True):
        weights, values = (of_keys - top).exp().unflatten(0, (-1, size)), x.v[0].unflatten(0, (-1, size))
        results.append((weights.sum(-1), (weights[:, None] @ values).squeeze(1)))
    return results


def page_wrong(case: Case) -> Iterator[Try]:
    s, o = case.setting, out_of(case)
    k, p = s.operands.k, s.problem
    supported = p.bias == "none" and not p.has_blocked and not p.has_sink and not p.selects and not p.common_keys
    if o is None or not isinstance(k, PagedView) or not supported or p.dequant_k != "none" or p.dim_rope:
        return
    for b in [b for b, wrong in enumerate(case.wrong[o.name]) if wrong.any()]:
        for page, other in _exchanged(case, o, k, b):

            def change(view: PagedView, b: int = b, page: int = page, other: int = other) -> Tensor:
                table = view.table.clone()
                table[b, page] = other
                return table

            detail = f"page {page} of sequence {b} is block {other}, not {int(k.table[b, page])}"
            yield Try(detail, _with_table(s, change))


def _exchanged(case: Case, o: Output, k: PagedView, b: int) -> list[tuple[int, int]]:
    """Returns the pairs (page of sequence b, block of the pool) that explain the wrong rows of output o: a kernel that
    reads this block of the paged KV cache `k` in place of the one in the page table makes these errors."""
    s, size = case.setting, k.page_size
    length, blocks = int(s.extents.kv_len[b]), int(k.pool.shape[0])
    pages = length // size  # an exchanged last, partial page has other keys
    if not 0 < pages * blocks * s.problem.dim_v <= _NUMBERS:
        return []
    every = torch.arange(blocks, dtype=k.table.dtype)
    pool = _with_table(s, lambda v: every.expand(len(v.table), -1).contiguous())
    full = np.full_like(s.extents.kv_len, blocks * size)
    pool = pool.of_extents(kv_len=full, lo=np.full_like(full, -INFINITE), hi=np.full_like(full, INFINITE))
    left = torch.zeros(pages, blocks, dtype=torch.float64)
    rows = [(h, r) for sequence, h, r in case.wrong_rows_of(o, 1 << 30) if sequence == b]
    for h, r in rows[:: max(1, len(rows) // _SAMPLES)][:_SAMPLES]:
        at = b, slice(h, h + 1), slice(r, r + 1)
        of_row = s.block(*at, slice(0, pages * size)), pool.block(*at), s.block(*at, slice(pages * size, length))
        (weights, values), there, rest = _of_pages(of_row, (size, size, max(length - pages * size, 1)))
        total, summed = weights.sum() + rest[0].sum(), values.sum(0) + rest[1].sum(0)
        mine = o.rows(s, *at)[0, 0].double()
        error = float((mine - summed / total).norm())
        result = summed - values[:, None] + there[1]
        result = result / (total - weights[:, None] + there[0])[..., None]
        left = torch.maximum(left, ((result - mine).norm(dim=-1) / error).nan_to_num(torch.inf, torch.inf))
    best = sorted((left <= LEFT).nonzero().tolist(), key=lambda at: float(left[tuple(at)]))
    return [(page, other) for page, other in best[:2]]


def _rescaled(s: Setting, change: Callable[[Dequant], Dequant], sides: Collection[str] = ("k", "v")) -> Setting:
    both = {f"dequant_{side}": getattr(s.operands, f"dequant_{side}") for side in sides}
    return s.of_operands(**{name: change(d) for name, d in both.items() if d is not None})


def _moved(s: Setting, change: Callable[[Any], Any], sides: Collection[str] = ("k", "v")) -> Setting:
    return _rescaled(s, lambda d: Dequant(change(d.scale), change(d.offset)), sides)


def _reread(s: Setting, change: Callable[[Tensor], Tensor], view: RowView | PagedView | None) -> Any:
    """Returns a view of a call's dequantisation scales after change() was applied to those of each sequence, [heads,
    tokens, elements], or [heads, 1, elements] per channel."""
    if view is None:
        return None
    by_token = isinstance(view, PagedView) or view.stride_token != 0
    lengths = s.extents.kv_len if by_token else np.ones_like(s.extents.kv_len)
    rows = [view.sequence(b, s.problem.heads_kv, int(n)) for b, n in enumerate(lengths)]
    keep = tuple(change(t.clone()).contiguous() for t in rows)
    return RowView(keep, np.zeros_like(lengths), view.dim if by_token else 0, lengths * view.dim, view.dim)


def _next(s: Setting, view: Any) -> Any:
    """Returns a view of scales that has the next token's for each token; the last token of a sequence is unchanged."""
    if isinstance(view, RowView):
        return replace(view, address=view.address + view.stride_token)
    if view is None:
        return None
    slots = -(-s.extents.kv_len // view.page_size) * view.page_size
    every = s.of_extents(kv_len=slots)
    return _reread(every, lambda t: torch.cat((t[:, 1:], t[:, -1:]), 1), view)


def _beside(s: Setting, view: Any, by: int) -> Any:
    """Returns a view of paged scales in which each page has those of the page `by` pages later in its sequence. A page
    keeps its scales if no such page exists."""
    if not isinstance(view, PagedView):
        return view
    last = -(-s.extents.kv_len // view.page_size) - 1
    columns = np.clip(np.arange(view.table.shape[1]) + by, 0, last[:, None])
    return replace(view, table=view.table.gather(1, torch.from_numpy(columns)).contiguous())


def _transposed(rows: Tensor) -> Tensor:
    """Returns scales [heads, 1, elements] (`rows`) as if their memory were [elements, heads]; others unchanged."""
    return rows.reshape(rows.shape[2], rows.shape[0]).T.reshape(rows.shape) if rows.shape[1] == 1 else rows


def _scales(case: Case) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Yields (description, function that gives scales [heads, tokens, elements] to another head, token or channel)."""
    p, o = case.setting.problem, case.setting.operands
    if p.heads_kv > 1:
        yield "scales prepared [D, N2], not [N2, D]", _transposed
        yield "the first head's scales for all heads", lambda t: t[:1].expand_as(t)
        yield "the scales of the next head", lambda t: t.roll(-1, 0)
        if p.heads_kv > 2:
            yield "the scales of the previous head", lambda t: t.roll(1, 0)
    if "token" in (p.dequant_k, p.dequant_v):
        yield "the scales of the previous token", lambda t: t.roll(1, 1)
        yield "the first token's scales for all tokens", lambda t: t[:, :1].expand_as(t)
    elif any(d is not None and d.scale.dim > 1 for d in (o.dequant_k, o.dequant_v)):
        yield "the scales of the next channel", lambda t: t.roll(-1, 2)
        yield "the scales of the previous channel", lambda t: t.roll(1, 2)
        yield "the first channel's scales for all channels", lambda t: t[..., :1].expand_as(t)


def dequantisation(case: Case) -> Iterator[Try]:
    s, p, o = case.setting, case.setting.problem, case.setting.operands
    if p.dequant_k == "none" and p.dequant_v == "none":
        return
    if p.dequant_k == p.dequant_v and o.dequant_k is not None and o.dequant_v is not None:
        yield Try(
            "the scales of keys and values exchanged", s.of_operands(dequant_k=o.dequant_v, dequant_v=o.dequant_k)
        )
    of_sides = ({"k", "v"}, {"k"}, {"v"}) if o.dequant_k is not None and o.dequant_v is not None else ({"k", "v"},)
    for detail, change in _scales(case):
        for sides in of_sides:
            word = "" if len(sides) == 2 else ", of keys alone" if "k" in sides else ", of values alone"
            yield Try(f"{detail}{word}", _moved(s, partial(_reread, s, change), sides))
    if "token" in (p.dequant_k, p.dequant_v):
        yield Try("the scales of the next token", _moved(s, partial(_next, s)))
        if any(d is not None and isinstance(d.scale, PagedView) for d in (o.dequant_k, o.dequant_v)):
            for word, by in (("next", 1), ("previous", -1)):
                yield Try(f"the scales of the {word} page", _moved(s, partial(_beside, s, by=by)))
            ordered = _moved(s, lambda v: replace(v, table=_in_order(v)) if isinstance(v, PagedView) else v)
            yield Try("the scales of pages in order, without the table", ordered)
    if any(d is not None and d.offset is not None for d in (o.dequant_k, o.dequant_v)):
        yield Try("stored * scale + offset, not (stored + offset) * scale", s.changed(offset_outside=True))
        yield Try("offsets left out", _rescaled(s, lambda d: Dequant(d.scale)))
        negative = _rescaled(s, lambda d: Dequant(d.scale, _reread(s, torch.neg, d.offset)))
        yield Try("offsets with the other sign", negative)
    yield Try("keys are not scaled", s.of_operands(dequant_k=None))
    yield Try("values are not scaled", s.of_operands(dequant_v=None))
    if p.kv_dtype == "int4":
        yield Try("the even element in the high half of a byte", s.changed(high_first=True))
        yield Try("integers without their sign", s.changed(unsigned=True))


MISTAKES = (
    Mistake("page-table", "Pages are read through the wrong entries of the block table.",
            "Token t is in page block_table[b, t // block_size], at row t % block_size.", page_table),
    Mistake("page-wrong", "A page of a sequence is another block of the pool.",
            "Look at the entry of the block table, and at buffers of entries or pages that are overwritten too early.",
            page_wrong),
    Mistake("dequantisation", "Stored integers are scaled in another way.",
            "(stored + offset) * scale, scales [2, N2, D], keys first.", dequantisation),
)  # fmt: skip
