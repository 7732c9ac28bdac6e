"""Length parameters of CANN's newer operators and their rules: cumulative ends that begin with 0 (cu_seqlens), and the
number of used tokens of each sequence (seqused)."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fusion_attention.contract import Array, Rule
from fusion_attention.ops.shared.checks import Outcome
from fusion_attention.ops.shared.rules import PACKED, meaning, needed, of_lengths, presence


def ends_param(side: str, of: str) -> Array:
    """The parameter cu_seqlens_SIDE: ends of packed sequences."""
    return Array(f"cu_seqlens_{side}", f"Ends of packed sequences of {of}, a 0 before them: TND alone, needed.", True)


def used_param(side: str, of: str) -> Array:
    """The parameter seqused_SIDE: used tokens of each sequence."""
    text = f"{of} of every sequence that count, the first ones; None: all."
    return Array(f"seqused_{side}", text[0].upper() + text[1:], True)


def ends_fit(ends: np.ndarray | None, tokens: int | None) -> Outcome:
    """True if cumulative ends begin with 0, never fall, and end with the number of tokens in the tensor."""
    if ends is None:
        return True
    if not len(ends) or ends[0] != 0:
        return "no 0 before them"
    if bool((np.diff(ends) < 0).any()):
        return "a length below 0"
    return int(ends[-1]) == (tokens or 0) or f"{ends[-1]} tokens in all, {tokens} in the tensor"


def one_each(given: np.ndarray | None, count: int | None, ends: np.ndarray | None) -> Outcome:
    """True if there is a number for every sequence; the number of sequences is that of `ends`, or `count` if None."""
    count = count if ends is None else len(ends) - 1
    return given is None or len(given) == count or f"{len(given)} for {count} sequences"


def within(used: np.ndarray | None, room: np.ndarray) -> Outcome:
    """True if each length is between 0 and the sequence's capacity in tokens (room)."""
    if used is None:
        return True
    outside = np.flatnonzero((used < 0) | (used > room))
    return not len(outside) or f"{used[outside[0]]} of sequence {outside[0]}, outside [0, {room[outside[0]]}]"


def stored(ends: np.ndarray | None, count: int, padded: int | None) -> np.ndarray:
    """Capacity of each sequence in tokens: the distance of its ends if packed, else the size of the padded axis."""
    return np.full(count, padded or 0, np.int64) if ends is None else np.diff(ends)


FUNCTIONS = {f.__name__: f for f in (ends_fit, one_each, within)}


def rules_of(side: str, axis: str, layout: str, packed: Mapping[str, Any]) -> tuple[Rule, ...]:
    """The rules of cu_seqlens_SIDE and seqused_SIDE.

    Args:
        axis: axis word for all tokens of a packed tensor.
        layout: name of the attribute with the layout of this side.
        packed: settings of sample calls of packed sequences. The operator definition's `derive` must return SIDE_room,
            which within() reads.
    """
    ends, used = f"cu_seqlens_{side}", f"seqused_{side}"
    wrong = list(packed[ends])
    wrong[-1] = 999
    return (
        needed(
            ends,
            "packed rows do not show where a sequence ends",
            text="the ends of packed sequences",
            when=f"{layout} == 'TND'",
            only=PACKED,
            given=packed,
        ),
        presence(
            f"{ends} is None or {layout} == 'TND'",
            f"{ends}: None, as rows are not packed ({used} says how much of a padded sequence counts)",
            only=("BSND",),
            invalid={ends: [0, 4, 8]},
        ),
        of_lengths(
            f"ends_fit({ends}, {axis})",
            f"{ends}: cumulative lengths of all rows of the tensor (a 0, then the end of every sequence)",
            only=PACKED,
            given=packed,
            invalid={ends: wrong},
        ),
        of_lengths(
            f"one_each({used}, B, cu_seqlens_q)",
            f"{used}: a length for every sequence (one for each sequence)",
            invalid={used: [1, 1, 1]},
        ),
        meaning(
            f"within({used}, {side}_room)",
            f"{used}: lengths from 0 to those of the sequences (no more tokens than there is memory for)",
            given={used: [1, 1]},
            invalid={used: [1, 99]},
        ),
    )
