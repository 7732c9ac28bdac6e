"""Functions in rules of sparse attention and of the indexer: each returns True for a legal call, otherwise False, or
text with the illegal value."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from fusion_attention.contract import functions_in
from fusion_attention.ops.shared.checks import Outcome, float32, int32, lengths_fit, pages_exist, stays_unread, within
from fusion_attention.ops.shared.cumulative_ends import last_end, lengths_of

PAGED = "PA_BSND"


def keys_in(layout: str, layout_kv: str | None, block_table: torch.Tensor | None) -> str:
    """Returns the layout of keys: layout_kv if given, else paged with a block_table, else the queries' layout."""
    if layout_kv is not None:
        return layout_kv
    return layout if block_table is None else PAGED


def sequences_fit(
    given: np.ndarray | None, form: str, cumulative: bool, b: Any, s: Any, t: Any, table: Any = None, page: Any = 0
) -> Outcome:
    """True (else error text) if lengths `given` (None: True; cumulative ends if packed and `cumulative`) fit a tensor
    in layout `form`. b: sequences; s: most tokens of one; t: all packed tokens; table: page table; page: its tokens."""
    if form == PAGED:
        return lengths_fit(given, False, b, 0 if table is None else table.shape[1] * page, None)
    packed = form == "TND"
    return lengths_fit(given, packed and cumulative, None if packed else b, None if packed else s, t)


def lengths(names: dict[str, Any]) -> dict[str, Any]:
    """Returns {name: value} derived from the arguments `names`: lengths per sequence (q_len, kv_len), and the sizes of
    those axes (B, S1, S2) that the tensors' shapes do not show in their layout."""
    form = keys_in(names["layout"], names["layout_kv"], names["block_table"])
    given, cumulative = names["actual_seq_qlen"], names["cumulative"]
    packed = names["layout"] == "TND"
    if given is None:
        q_len = np.full(names["B"], names["S1"], np.int64)
    else:
        q_len = lengths_of(given) if packed and cumulative else given
    given = names["actual_seq_kvlen"]
    if given is None:
        kv_len = q_len if packed else np.full(len(q_len), names["S2"], np.int64)
    else:
        kv_len = lengths_of(given) if form == "TND" and cumulative else given
    results: dict[str, Any] = {"q_len": q_len, "kv_len": kv_len}
    if packed:
        results |= {"B": len(q_len), "S1": int(q_len.max(initial=0))}
    if form != "BSND":
        results["S2"] = int(kv_len.max(initial=0))
    return results


# ---------------------------------------------------------------------------------------------------- selected blocks


def lists_of(
    indices: torch.Tensor, layout: str, q_len: np.ndarray, q_start: np.ndarray | None = None
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields (b, selected keys [rows, heads, entries] of sequence b) for all sequences, from the tensor `indices`.

    q_start: the first row of each packed sequence; None: no rows are between sequences.
    """
    if indices.dim() == (3 if layout == "BSND" else 2):
        indices = indices.unsqueeze(-2)
    start = np.cumsum(q_len) - q_len if q_start is None else q_start
    for b, (first, count) in enumerate(zip(start, q_len, strict=True)):
        listed = indices[b, :count] if layout == "BSND" else indices[first : first + count]
        if listed.numel():
            yield b, listed


def _first(bad: torch.Tensor, listed: torch.Tensor, b: int) -> str:
    """Returns text with the first illegal entry (True in `bad`) of `listed`, [rows, heads, entries] of sequence b."""
    row, head, slot = bad.nonzero()[0].tolist()
    heads = f"head {head}, " if listed.shape[1] > 1 else ""
    return f"{int(listed[row, head, slot])} at batch {b}, row {row}, {heads}slot {slot}"


def entries_fit(
    indices: torch.Tensor,
    layout: str,
    q_len: np.ndarray,
    kv_len: np.ndarray,
    block: int = 1,
    q_start: np.ndarray | None = None,
) -> Outcome:
    """True (else the fault as text) if every entry of `indices` is -1 or the number of a block of its sequence's keys,
    or the tensor must not be read. block: keys of a block; q_len, kv_len: lengths per sequence; q_start: the first row
    of each packed sequence, or None."""
    # In the usual case all entries exist even in the shortest sequence.
    if stays_unread(indices) or (len(kv_len) and within(indices, -1, -(-int(kv_len.min()) // block) - 1)):
        return True
    for b, listed in lists_of(indices, layout, q_len, q_start):
        blocks = -(-int(kv_len[b]) // block)
        low, high = (int(edge) for edge in listed.aminmax())
        if low < -1 or high >= blocks:
            entries = listed.long()  # torch compares int32 with the lower 32 bits of a larger int
            return f"{_first((entries < -1) | (entries >= blocks), entries, b)}, outside [-1, {blocks})"
    return True


def unbroken(indices: torch.Tensor) -> bool:
    """True if no entry >= 0 follows a -1, which ends a list of selected keys, or if the tensor must not be read."""
    return stays_unread(indices) or not bool(((indices[..., 1:] >= 0) & (indices[..., :-1] < 0)).any())


def visible_keys(
    mode: int, rows: int, keys: int, device: torch.device, ratio: int = 1, behind: int = 0
) -> torch.Tensor:
    """Returns the number of visible keys of each row of a sequence, [rows, 1, 1]; mode: sparse_mode, 3 for causal.

    ratio: tokens that a key stands for; behind: tokens of the sequence after those of the last key.
    """
    row = torch.arange(rows, device=device)[:, None, None]
    if mode != 3:
        return torch.full_like(row, keys)
    return (row + keys * ratio + behind - rows + 1).div(ratio, rounding_mode="floor").clamp(0, keys)


def unread(
    indices: torch.Tensor,
    layout: str,
    q_len: np.ndarray,
    reads: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor],
    text: str,
    q_start: np.ndarray | None = None,
) -> Outcome:
    """True if reads(b, lists, slots) is True for all entries >= 0 of each sequence b, else text with the first other
    entry, followed by `text`. indices: tensor of selected keys; lists: entries [rows, heads, entries] of a sequence;
    slots: positions of the entries; q_start: the first row of each packed sequence, or None."""
    for b, listed in lists_of(indices, layout, q_len, q_start):
        bad = (listed >= 0) & ~reads(b, listed, torch.arange(listed.shape[-1], device=listed.device))
        if bool(bad.any()):
            return f"{_first(bad, listed, b)}, {text}"
    return True


def few_enough(
    indices: torch.Tensor, layout: str, q_len: np.ndarray, kv_len: np.ndarray, block: int, mode: int
) -> Outcome:
    """True (else text) if no list of selected blocks is longer than the number of blocks with visible keys of its row.
    block: keys of a block; mode: sparse_mode, 3 if causal; q_len, kv_len: lengths per sequence."""

    def reads(b: int, listed: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        return slot < -(-visible_keys(mode, len(listed), int(kv_len[b]), listed.device) // block)

    return unread(indices, layout, q_len, reads, "which is not read")


def in_the_past(
    indices: torch.Tensor, layout: str, q_len: np.ndarray, kv_len: np.ndarray, block: int, mode: int
) -> Outcome:
    """True (else error text) if every selected block, of `block` keys, has a visible key; mode: 3 if causal."""

    def reads(b: int, listed: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        return listed.long() * block < visible_keys(mode, len(listed), int(kv_len[b]), listed.device)

    return unread(indices, layout, q_len, reads, "which its row does not see")


FUNCTIONS = (
    functions_in(globals())
    | {f.__name__: f for f in (pages_exist, last_end, float32, int32)}
    | {
        "same_dtype": lambda a, b: a.dtype == b.dtype,
        "floating": lambda t: t.dtype.is_floating_point,
        "power_of_two": lambda n: n > 0 and n & (n - 1) == 0,
    }
)
