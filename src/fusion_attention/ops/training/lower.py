"""Lowers a bound call of training attention to the intermediate representation (DenseCall).

Forward and gradient records lower alike; what a record lacks has its neutral value.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fusion_attention.contract import Bound, dtype_text
from fusion_attention.ir.problem import Extents, Problem
from fusion_attention.ops.shared.layouts import Form
from fusion_attention.ops.shared.sparse_modes import band_empties_rows, mode_band
from fusion_attention.ops.training.call import DenseCall
from fusion_attention.ops.training.checks import prefix_fits
from fusion_attention.ops.training.run import DenseBackward, DenseForward

BIAS_KINDS = {2: "slopes", 3: "slopes_sqrt"}


def dense_call(bound: Bound, *, seed: int = 0, offset: int = 0) -> DenseCall:
    """The call of a bound forward or gradient record; keep_prob < 1 without a mask draws from (seed, offset)."""
    n = bound.names
    problem, form, extents, names = bound.once(_without_tensors)
    extras = tuple([n[name] if name else None for name in names])
    call = DenseCall(problem, form, extents, n["query"], n["key"], n["value"], extras, seed, offset)
    call.call_cache = bound.call_cache
    return call


def lower(bound: Bound, *, seed: int = 0, offset: int = 0) -> DenseForward | DenseBackward:
    """A bound forward or gradient record."""
    call, n = dense_call(bound, seed=seed, offset=offset), bound.names
    if "dy" not in bound.op.by_name:
        return DenseForward(call)
    return DenseBackward(call, (n["dy"], n["attention_in"], n["softmax_max"], n["softmax_sum"]), n["pse"])


def _without_tensors(n: dict[str, Any]) -> tuple[Problem, Form, Extents, tuple[str, ...]]:
    """What a signature and its lengths decide, and the names of the tensors that are the call's extras."""
    extents, form = dense_extents(n), _form(n)
    bias = ("", "pse") if n["pse_type"] in BIAS_KINDS else ("pse", "")
    blocked = "atten_mask" if _blocks(n) else ""
    names = ("query_rope", "key_rope", *bias, blocked, "drop_mask", "sink", "", "")
    return _problem(n, form, extents), form, extents, names


def _blocks(n: dict[str, Any]) -> bool:
    """Whether the mask itself removes keys: compressed masks only stand for their formula."""
    return n["atten_mask"] is not None and n["sparse_mode"] in (0, 1, 5)


def _form(n: dict[str, Any]) -> Form:
    layout, mask = n["input_layout"], n["atten_mask"]
    blocked = "none"
    if _blocks(n):
        # A matrix over all tokens and one over the longest lengths differ only where there are several sequences.
        corner = tuple(mask.shape[-2:]) == (n["S1"], n["S2"])
        blocked = "broadcast" if corner or layout != "TND" else "diagonal"
    bias = "none" if n["pse"] is None or n["pse_type"] in BIAS_KINDS else n["pse_form"]
    return Form(layout, bias, blocked, "token" if n["softmax_layout"] else "item")


def dense_extents(n: dict[str, Any]) -> Extents:
    """Lengths and bands of every sequence, from the names of a bound call."""
    q_len, kv_len, mode = n["q_len"], n["kv_len"], n["sparse_mode"]
    prefix = n["prefix"]
    if mode == 5 and prefix_fits(prefix, q_len, kv_len) is not True:
        prefix = None
    band = mode_band(mode, n["atten_mask"] is not None, n["pre_tokens"], n["next_tokens"], prefix, q_len, kv_len)
    return Extents(q_len, kv_len, *band, _distance_shift(n, q_len))


def _distance_shift(n: dict[str, Any], q_len: np.ndarray) -> np.ndarray:
    """Origin of computed biases: kv_start - q_start, each 0 unless given; in mode 8 only the cut sequence has one."""
    shift = np.zeros_like(q_len)
    q_start, kv_start = (0 if s is None or not len(s) else int(s[0]) for s in (n["q_start_idx"], n["kv_start_idx"]))
    if n["pse_type"] in BIAS_KINDS:
        distance = kv_start - q_start
        if n["sparse_mode"] == 8:
            shift[np.flatnonzero(q_len)[:1]] = distance
        else:
            shift[:] = distance
    return shift


def _problem(n: dict[str, Any], form: Form, extents: Extents) -> Problem:
    bias = BIAS_KINDS.get(n["pse_type"]) or {"none": "none", "aligned": "table"}.get(form.bias, "matrix")
    # The chip finds rows that the band alone empties and then zeroes all empty rows of a padded call; in a packed
    # call only such rows are zero. Where it finds none, a row emptied by the mask is the mean of its V rows.
    zero = n["inner_precise"] == 2 or (not form.packed and band_empties_rows(extents))
    dropout = "none"
    if n["keep_prob"] < 1:
        dropout = "philox" if n["drop_mask"] is None else "bits"
    return Problem(
        heads_q=n["N1"],
        heads_kv=n["N2"],
        dim_qk=n["D"],
        dim_v=n["Dv"],
        dim_rope=n["Dr"] or 0,
        dtype=dtype_text(n["query"]),
        scale=float(n["scale"]),
        bias=bias,
        bias_scaled=bias in ("matrix", "table") and n["pse_type"] == 1,
        has_blocked=_blocks(n),
        has_sink=n["sink"] is not None,
        dropout=dropout,
        keep_prob=float(n["keep_prob"]) if dropout != "none" else 1.0,
        empty_rows="zero" if zero else "mean_in_band",
    )
