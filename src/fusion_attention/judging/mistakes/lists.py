"""Mistakes in lists of selected keys or blocks of keys."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from fusion_attention.ir.memory_views import RowView
from fusion_attention.judging.editable_call import Lists, Setting
from fusion_attention.judging.mistakes.kinds import Case, Mistake, Try, changing

Tensor = torch.Tensor
_BLOCKS = (1, 16, 32, 64, 128)


def _changed(case: Case, detail: str, change: Callable[[Lists], Lists]) -> Iterator[Try]:
    if case.setting.problem.select_count:
        yield Try(detail, case.setting.changed(lists=change))


def _without(x: Lists, number: int) -> Lists:
    """Returns the selected blocks x without the entry at position `number`; -1: without the last one that is read."""
    at = torch.arange(x.entries.shape[-1])
    count = x.read.sum(-1, keepdim=True)
    return x._replace(read=x.read & (at != (count - 1 if number < 0 else number)))


def shortened(case: Case) -> Iterator[Try]:
    count = case.setting.problem.select_count
    for detail, number in (("the last before -1", -1), ("the last of full lists", count - 1), ("the first", 0)):
        yield from _changed(case, detail, partial(_without, number=number))


def _with_ends(x: Lists, key: int) -> Lists:
    """Returns the selected blocks x with entries of -1 (no block) read as key number `key`; key -1: the last key."""
    ends = x.entries < 0
    return x._replace(entries=x.entries.masked_fill(ends, key % max(x.keys, 1)), read=x.read | ends)


def end_read(case: Case) -> Iterator[Try]:
    for key, word in ((-1, "last"), (0, "first")):
        for way in _changed(case, f"-1 as the {word} key", partial(_with_ends, key=key)):
            yield way
            unmasked = way.setting.changed(lambda x: x if x.times is None else replace(x, visible=x.times > 0))
            yield Try(f"{way.detail}, also for rows to which it is not visible", unmasked)
    yield from _changed(case, "after -1", lambda x: x._replace(read=x.entries >= 0))


def other_rows(case: Case) -> Iterator[Try]:
    s, view = case.setting, case.setting.operands.indices
    if s.problem.select_count and isinstance(view, RowView):
        for detail, by in (("of the row before", -1), ("of the row after", 1)):
            yield Try(detail, s.of_operands(indices=_moved(s, view, by)))
            across = replace(view, address=view.address + by * view.stride_token)
            yield Try(f"{detail}, across sequences", s.of_operands(indices=across))


def _moved(s: Setting, view: RowView, by: int) -> RowView:
    """Returns a memory view of selected key indices in which each query has those of the query `by` later in its
    sequence. Where no such query exists, it has those of the sequence's first or last query."""
    lengths = s.extents.q_len
    rows = [view.sequence(b, s.problem.heads_kv, int(n)) for b, n in enumerate(lengths)]
    keep = tuple(t[:, (torch.arange(t.shape[1]) + by).clamp(0, max(t.shape[1] - 1, 0))].contiguous() for t in rows)
    return RowView(keep, np.zeros_like(lengths), view.dim, lengths * view.dim, view.dim)


def block_size(case: Case) -> Iterator[Try]:
    p = case.setting.problem
    for size in _BLOCKS if p.select_count and not p.compressed_ratio else ():
        if size != p.select_block:
            other = case.setting.of_problem(select_block=size)
            yield Try(f"blocks of {size}, not {p.select_block}", other.changed(lists=_complete))
            yield Try(f"blocks of {size}, not {p.select_block}, for the number of entries too", other)


def _complete(x: Lists) -> Lists:
    """Returns the selected blocks x, read up to their first -1, also beyond the number of keys that the query sees."""
    return x._replace(read=(x.entries >= 0).cumprod(-1).bool())


MISTAKES = (
    Mistake("list-shortened", "An entry of the lists is not read.",
            "A list ends at its first -1, or after its last entry.", shortened),
    Mistake("list-end-read", "Entries at or after the end of a list are read.",
            "-1 ends a list: it is no key, and entries after it are arbitrary.", end_read),
    changing("list-duplicates", "A key that a list has twice counts once.", "Every entry of a list counts.",
             lambda s, p: {
                 "": s.changed(lambda x: x if x.times is None else replace(x, times=x.times.clamp(max=1.0)))
             } if p.select_count else {}),
    Mistake("list-of-another-row", "Rows read the lists of other rows.", "Look at the offset and strides of lists.",
            other_rows),
    changing("list-ignored", "Rows read all visible keys, not only those of their lists.", "Are lists passed?",
             lambda s, p: {"": s.of_problem(select_count=0)} if p.select_count and not p.compressed_ratio else {}),
    Mistake("list-block", "Entries are read as numbers of blocks of another size.",
            "Entry n is the block of keys from n * block on.", block_size),
)  # fmt: skip
