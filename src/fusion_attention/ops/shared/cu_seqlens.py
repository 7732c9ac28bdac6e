"""Length parameters of CANN's newer operators, and their rules: cumulative ends that begin with 0 (cu_seqlens_q,
cu_seqlens_kv), and the number of used tokens of each sequence (seqused_q, seqused_kv)."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fusion_attention.contract import Array, Rule
from fusion_attention.ops.shared.checks import Outcome
from fusion_attention.ops.shared.rules import PACKED, meaning, needed, of_lengths, presence


def ends_param(side: str, of: str) -> Array:
    """Returns the parameter cu_seqlens_q or cu_seqlens_k (side), cumulative ends of sequences; of: word for rows."""
    text = f"0, then the cumulative ends of the sequences of {of}: required in layout TND, None in other layouts."
    return Array(f"cu_seqlens_{side}", text, True)


def used_param(side: str, of: str) -> Array:
    """Returns the parameter seqused_q or seqused_k (side), used tokens of each sequence; of: word for the tokens."""
    return Array(f"seqused_{side}", f"Number of leading {of} of each sequence that are used; None: all.", True)


def ends_fit(ends: np.ndarray | None, tokens: int | None) -> Outcome:
    """True (else text) if cumulative ends begin with 0, never fall, and end with the number of tokens in the tensor."""
    if ends is None:
        return True
    if not len(ends) or ends[0] != 0:
        return "no leading 0"
    if bool((np.diff(ends) < 0).any()):
        return "a negative length"
    return int(ends[-1]) == (tokens or 0) or f"{ends[-1]} tokens in all, {tokens} in the tensor"


def one_each(given: np.ndarray | None, count: int | None, ends: np.ndarray | None) -> Outcome:
    """True (else error text) if `given` has a number for each of `count` sequences, or of len(ends) - 1 packed ones."""
    count = count if ends is None else len(ends) - 1
    return given is None or len(given) == count or f"{len(given)} for {count} sequences"


def within(used: np.ndarray | None, capacity: np.ndarray) -> Outcome:
    """True (else error text) if numbers of used tokens are between 0 and the tokens of each sequence (capacity)."""
    if used is None:
        return True
    outside = np.flatnonzero((used < 0) | (used > capacity))
    return not len(outside) or f"{used[outside[0]]} of sequence {outside[0]}, outside [0, {capacity[outside[0]]}]"


def stored(ends: np.ndarray | None, count: int, padded: int | None) -> np.ndarray:
    """Returns the number of tokens in memory, used or not, of each of `count` sequences, int64: differences of the
    cumulative ends if sequences are packed, else the padded length."""
    return np.full(count, padded or 0, np.int64) if ends is None else np.diff(ends)


FUNCTIONS = {f.__name__: f for f in (ends_fit, one_each, within)}


def rules_of(side: str, axis: str, layout: str, packed: Mapping[str, Any]) -> tuple[Rule, ...]:
    """Returns the rules of cu_seqlens_q and seqused_q (or _k, _kv), cumulative ends and used lengths of sequences.

    Args:
        side: "q", "k" or "kv".
        axis: name of the axis of all tokens of a packed tensor.
        layout: name of the attribute with the layout of this side.
        packed: arguments of example calls with packed sequences, which tests of the rules make.

    The operator definition's `derive` must return q_capacity (k_, kv_), the result of stored().
    """
    ends, used = f"cu_seqlens_{side}", f"seqused_{side}"
    wrong = list(packed[ends])
    wrong[-1] = 999
    return (
        needed(
            ends,
            "the tensor does not show where a sequence ends",
            text="the ends of packed sequences",
            when=f"{layout} == 'TND'",
            only=PACKED,
            given=packed,
        ),
        presence(
            f"{ends} is None or {layout} == 'TND'",
            f"{ends}: None, as rows are not packed ({used} has the used tokens of padded sequences)",
            only=("BSND",),
            invalid={ends: [0, 4, 8]},
        ),
        of_lengths(
            f"ends_fit({ends}, {axis})",
            f"{ends}: cumulative ends that cover all rows of the tensor (a 0, then the end of every sequence)",
            only=PACKED,
            given=packed,
            invalid={ends: wrong},
        ),
        of_lengths(
            f"one_each({used}, B, cu_seqlens_q)",
            f"{used}: one number per sequence (the used tokens of each sequence)",
            invalid={used: [1, 1, 1]},
        ),
        meaning(
            f"within({used}, {side}_capacity)",
            f"{used}: numbers between 0 and the tokens of the sequences (at most the tokens in memory)",
            given={used: [1, 1]},
            invalid={used: [1, 99]},
        ),
    )
