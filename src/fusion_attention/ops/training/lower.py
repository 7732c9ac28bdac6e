"""Conversion of validated calls of CANN's training attention to a DenseCall, which back ends compute.

Forward and gradient operators are converted alike; parameters that an operator lacks have values without effect
(Op.neutral).
"""

from typing import Any

import numpy as np
from torch import Tensor

from fusion_attention.contract import Bound, dtype_text
from fusion_attention.ir.problem import Extents, Problem
from fusion_attention.ops.shared.layouts import Form
from fusion_attention.ops.shared.sparse_modes import band_empties_rows, mode_band
from fusion_attention.ops.training.checks import prefix_fits
from fusion_attention.ops.training.forward_backward import FORWARD, DenseBackward, DenseForward
from fusion_attention.ops.training.lowered_call import DenseCall

BIAS_KINDS = {2: "slopes", 3: "slopes_sqrt"}


def dense_call(bound: Bound, *, seed: int | None = None, offset: int | None = None) -> DenseCall:
    """Converts a validated call `bound` of a forward or gradient operator to a DenseCall, which back ends compute.
    seed, offset: from which a dropout mask is drawn if keep_prob < 1 and there is no drop mask; None: those in
    `bound`."""
    n = bound.names
    problem, form, extents, names = bound.once(_without_tensors)
    q, k, v = (n[name] for name in names[:3])
    extras = tuple([n[name] if name else None for name in names[3:]])
    drawn = (_number(n["seed"] if seed is None else seed), _number(n["offset"] if offset is None else offset))
    return DenseCall(problem, form, extents, q, k, v, extras, *drawn, names)


def _number(value: int | Tensor | None) -> int:
    return 0 if value is None or (isinstance(value, Tensor) and value.is_meta) else int(value)


def results_call(bound: Bound, out: Tensor) -> DenseCall:
    """Returns a DenseCall that serves only to convert softmax max and sum: the output `out` stands for q, k and v."""
    problem, form, extents, _ = bound.once(_without_tensors)
    return DenseCall(problem, form, extents, out, out, out, ())


def lower(
    bound: Bound, *, seed: int | None = None, offset: int | None = None, lanes: bool = True
) -> DenseForward | DenseBackward:
    """Converts a validated call `bound` of training attention to a forward or gradient call for back ends. seed,
    offset: from which dropout is drawn; lanes: True for softmax max and sum in CANN's format, [..., 8]."""
    call, n = dense_call(bound, seed=seed, offset=offset), bound.names
    if "dy" not in bound.op.by_name:
        return DenseForward(call, FORWARD, lanes=lanes)
    return DenseBackward(call, (n["dy"], n["attention_in"], n["softmax_max"], n["softmax_sum"]), n["pse"])


def _without_tensors(n: dict[str, Any]) -> tuple[Problem, Form, Extents, tuple[str, ...]]:
    """Returns (Problem, Form, Extents, names of input tensors) from a call's shapes and lengths; n: values by name."""
    extents, form = dense_extents(n), _form(n)
    bias = ("", "pse") if n["pse_type"] in BIAS_KINDS else ("pse", "")
    blocked = "atten_mask" if _blocks(n) else ""
    names = ("query", "key", "value", "query_rope", "key_rope", *bias, blocked, "drop_mask", "sink", "", "")
    return _problem(n, form, extents), form, extents, names


def _blocks(n: dict[str, Any]) -> bool:
    """True if the content of atten_mask hides keys, as in sparse modes 0, 1 and 5; a band replaces compressed masks."""
    return n["atten_mask"] is not None and n["sparse_mode"] in (0, 1, 5)


def _form(n: dict[str, Any]) -> Form:
    layout, mask = n["input_layout"], n["atten_mask"]
    blocked = "none"
    if _blocks(n):
        # [T1, T2] and [S1, S2] are equal if there is one sequence.
        corner = tuple(mask.shape[-2:]) == (n["S1"], n["S2"])
        blocked = "broadcast" if corner or layout != "TND" else "diagonal"
    bias = "none" if n["pse"] is None or n["pse_type"] in BIAS_KINDS else n["pse_form"]
    return Form(layout, bias, blocked, "token" if n["softmax_layout"] else "item")


def dense_extents(n: dict[str, Any]) -> Extents:
    """Returns the Extents (lengths and bands of visible keys) of a validated call; n: arguments and derived values."""
    q_len, kv_len, mode = n["q_len"], n["kv_len"], n["sparse_mode"]
    prefix = n["prefix"]
    if mode == 5 and prefix_fits(prefix, q_len, kv_len) is not True:
        prefix = None
    band = mode_band(mode, n["atten_mask"] is not None, n["pre_tokens"], n["next_tokens"], prefix, q_len, kv_len)
    return Extents(q_len, kv_len, *band, _distance_shift(n, q_len))


def _distance_shift(n: dict[str, Any], q_len: np.ndarray) -> np.ndarray:
    """Returns int64 [sequences], kv_start - q_start, added to key - row in the distances of ALiBi biases; n: arguments.

    Both are 0 by default. In mode 8 only the first sequence with rows, which is split between devices, has a shift.
    """
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
    # If the band leaves no key for some row, the chip returns zeros for all empty rows of a padded call, but in a
    # packed call only for such rows. Other rows whose keys are all masked return the mean of V.
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
