"""picture(): the keys that a mask shows in each interface, computed by the functions that translate real calls.

python_to_javascript.py translates this module to JavaScript, so it uses only the syntax that that module supports.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fusion_attention.ir.mask import INFINITE, UNLIMITED, Band, tokens
from fusion_attention.ops.fused.geometry import TRIANGLE, visibility
from fusion_attention.ops.fused.lower import fused_band
from fusion_attention.ops.training.lower import dense_extents

BAND = -1  # the mode of a setting with a Band instead of a sparse mode
MODES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, BAND)
INTERFACES = ("own", "training", "inference", "two_phase")
FULL_MODES, WINDOWED_MODES, PREFIX_MODES = (0, 1, 5, 9), (0, 4, 7, 8), (5, 6)


@dataclass(frozen=True)
class Setting:
    """The arguments of a call that determine its visible keys: lengths, mask mode, edges, prefix, mask tensor."""

    mode: int  # a sparse mode (CANN's number of a mask pattern), or BAND
    # q_len, kv_len: query tokens and keys of every sequence.
    q_len: tuple[int, ...]
    kv_len: tuple[int, ...]
    packed: bool = False  # True: sequences end to end, [T, N, D]; False: one sequence, [1, S, N, D]
    # pre, next: visible tokens before and after the diagonal; 2**31 - 1: no limit.
    pre: int = UNLIMITED
    next: int = UNLIMITED
    prefix: tuple[int, ...] = ()  # number of keys of the prefix, per sequence; empty: no prefix
    align: str = "end"  # Band.align
    # The mask tensor of modes with a full mask: "zeros", "triangle" (triu(1)) or "own"; "none": no tensor.
    mask: str = "zeros"
    own: Sequence[Sequence[int]] | None = None  # the elements of the mask "own", rows of 0 and 1


@dataclass(frozen=True)
class Mask:
    """A mask tensor without content, for rules and for the translation of calls, which read only its shape."""

    shape: tuple[int, ...]

    def dim(self) -> int:
        """Returns the number of axes."""
        return len(self.shape)

    def numel(self) -> int:
        """Returns the number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


def own_band(s: Setting) -> Band:
    """Returns the Band (range of visible keys around the diagonal) of mask arguments with mode BAND."""
    return Band(-tokens(s.pre), min(tokens(s.next) + 1, INFINITE), s.align, s.prefix)


def as_mode(s: Setting) -> Setting | None:
    """Returns `s` with a sparse mode (CANN's mask pattern) in place of a Band; None if no mode has this mask."""
    if s.mode != BAND:
        return s
    if len(s.prefix) > 0:
        causal = s.align == "end" and s.next == 0
        return Setting(6, s.q_len, s.kv_len, s.packed, prefix=s.prefix) if causal else None
    causal = s.pre >= UNLIMITED and s.next == 0
    mode = (2 if causal else 0) if s.align == "start" else (3 if causal else 4)
    return Setting(mode, s.q_len, s.kv_len, s.packed, s.pre, s.next)


def window_of(s: Setting) -> list[int]:
    """Returns [pre_tokens, next_tokens], visible keys before and after the diagonal; 2**31 - 1 if the mode has none."""
    return [s.pre, s.next] if s.mode in WINDOWED_MODES else [UNLIMITED, UNLIMITED]


def own_says(s: Setting) -> bool:
    """True if fa.attention() can express the mask of `s`: always except mode 9 with more query rows than keys."""
    return s.mode != 9 or all(rows <= keys for rows, keys in zip(s.q_len, s.kv_len, strict=True))


def mask_of(s: Setting) -> Mask | None:
    """Returns the shape of the mask tensor that CANN's operator takes for `s`; None if it takes none."""
    if s.mask == "none":
        return None
    if s.mode == 9:
        rows = max(s.q_len)
        return Mask((sum([r * r for r in s.q_len]),)) if s.packed else Mask((1, rows, rows))
    if s.mode in FULL_MODES:
        return Mask((max(s.q_len), max(s.kv_len)))
    return Mask((TRIANGLE + TRIANGLE // 2 if s.mode == 6 else TRIANGLE, TRIANGLE))


def training_names(s: Setting) -> dict[str, Any]:
    """Returns name -> value of the mask arguments `s`, as the functions and rules of training attention read them."""
    return {
        "sparse_mode": s.mode,
        "pre_tokens": window_of(s)[0],
        "next_tokens": window_of(s)[1],
        "prefix": np.array(s.prefix) if len(s.prefix) > 0 else None,
        "q_len": np.array(s.q_len),
        "kv_len": np.array(s.kv_len),
        "S1": max(s.q_len),
        "S2": max(s.kv_len),
        "atten_mask": mask_of(s),
        "pse_type": 1,
        "q_start_idx": None,
        "kv_start_idx": None,
    }


def inference_names(s: Setting) -> dict[str, Any]:
    """Returns name -> value of the mask arguments `s`, as the functions and rules of inference attention read them."""
    one_token = not s.packed and s.q_len[0] == 1
    given = {
        "sparse_mode": s.mode,
        "pre_tokens": window_of(s)[0],
        "next_tokens": window_of(s)[1],
        "atten_mask": mask_of(s),
        "query_padding_size": None,
        "kv_padding_size": None,
    }
    return {
        **given,
        **visibility(given, one_token),
        "one_token": one_token,
        "q_used": np.array(s.q_len),
        "kv_used": np.array(s.kv_len),
        "common": 0,
        "B": len(s.q_len),
        "S1": max(s.q_len),
        "T1": sum(s.q_len) if s.packed else None,
        "columns": max(s.kv_len),
        "query_rope": None,
        "key_shared_prefix": None,
        "pse_shift": None,
        "quant_scale2": None,
    }


def picture(s: Setting, api: str) -> dict[str, Any] | None:
    """Returns the visible keys of a mask in an interface (`api`, e.g. "training") as a dictionary: q_len, kv_len,
    lo, hi, prefix (lists) and mask.

    Query i of a sequence sees the keys max(0, i + lo) <= j < min(kv_len, max(prefix, i + hi)) that the mask tensor does
    not remove. "mask" is "" (it removes none), "full", or "tree" (it covers only the last keys). None: no call of the
    interface has this mask.
    """
    q_len, kv_len = np.array(s.q_len), np.array(s.kv_len)
    if api == "own" and s.mode == BAND:
        return _picture_of(q_len, kv_len, own_band(s).resolve(q_len, kv_len), "")
    canonical = as_mode(s)
    if canonical is None or (api == "own" and not own_says(canonical)):
        return None
    if api == "inference":
        n = inference_names(canonical)
        edges, kind = fused_band(n).resolve(q_len, kv_len), n["mask_kind"]
    elif api == "own" and canonical.mode == 9:
        edges, kind = Band.full().resolve(q_len, kv_len), "tree"
    else:
        e = dense_extents(training_names(canonical))
        edges, kind = (e.lo, e.hi, e.prefix), "full" if canonical.mode in (0, 1, 5) else ""
    acts = kind in ("full", "tree") and canonical.mask in ("triangle", "own")
    return _picture_of(q_len, kv_len, edges, kind if acts else "")


def _picture_of(q_len: np.ndarray, kv_len: np.ndarray, edges: tuple[np.ndarray, ...], kind: str) -> dict[str, Any]:
    lo, hi, prefix = edges
    return {
        "q_len": q_len.tolist(),
        "kv_len": kv_len.tolist(),
        "lo": lo.tolist(),
        "hi": hi.tolist(),
        "prefix": prefix.tolist(),
        "mask": kind,
    }


def mask_row(s: Setting, kind: str, b: int, i: int) -> list[Any]:
    """Returns [first, start, cells], the keys that the mask tensor removes from query i of sequence b: every key from
    `first` on, and each key start + n for which cells[n] is not 0. kind: "" (no tensor), "full", "tree" (last keys)."""
    start = s.kv_len[b] - s.q_len[b] if kind == "tree" else 0
    if kind == "":
        return [INFINITE, start, []]
    if s.mask == "triangle":
        return [max(0, start + i + 1), start, []]
    return [INFINITE, start, s.own[i] if s.own is not None and i < len(s.own) else []]


def edges_of(p: dict[str, Any], b: int, i: int) -> list[int]:
    """Returns [first, end) of the keys that query i of sequence b sees without a mask tensor; p: lists lo, hi, ..."""
    first = max(0, i + p["lo"][b])
    last = min(p["kv_len"][b], max(p["prefix"][b], i + p["hi"][b]))
    return [first, max(first, last)]
