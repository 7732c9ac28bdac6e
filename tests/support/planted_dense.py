"""Simulates kernels of dense attention with common mistakes, in plain torch and from CANN's pages.

Shares no code with the judge or the intermediate representation. A mistake is a change of the call that the kernel
computes, or an edit of its results. Sums are in float32; weights are rounded where a device's kernel rounds them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from support.planted import Capture, Planted

from fusion_attention.ops import RECORDS
from fusion_attention.testing.cases import UNLIMITED, Case, arguments, part, seen, stats_part
from fusion_attention.testing.plain import _bias, _keep_mask
from fusion_attention.testing.run_case import pythonic

Tensor = torch.Tensor
Args = dict[str, Any]
Results = dict[str, Tensor]
LANES = 8


# -------------------------------------------------------------------------------------------------------- the kernel


def attended(case: Case, args: Args, b: int, low: torch.dtype | None) -> tuple[Tensor, Tensor, Tensor]:
    """Computes (out, max, sum) [heads, rows, ..] of a sequence; low: dtype in which scores and sums of values are."""

    def rounded(x: Tensor) -> Tensor:
        return x if low is None else x.to(low).float()

    def rows_of(name: str) -> Tensor:
        if name.startswith("query"):
            return part(case, args[name], "q", case.heads_q, b).float()
        of_query = torch.arange(case.heads_q) // (case.heads_q // case.heads_kv)
        return part(case, args[name], "kv", case.heads_kv, b).float()[args.get("key_heads", of_query)]

    wrong, cap = args.get("mistake"), case.softcap
    products, values = rows_of("query") @ rows_of("key").mT, rows_of("value")
    if args["query_rope"] is not None:
        products = products + rows_of("query_rope") @ rows_of("key_rope").mT
    bias, visible = _bias(case, args, b), seen(case, args, b)
    bias = bias if isinstance(bias, float) else bias.float()
    scores = rounded(products * case.scale + bias)
    if cap and wrong == "softcap-order":
        scores = cap * torch.tanh(scores / cap)
    elif cap:
        scores = cap * torch.tanh(products * case.scale / cap) + bias
    scores = scores.masked_fill(~visible, -cap if wrong == "softcap-order:mask" else -math.inf)
    sink = torch.tensor(-math.inf) if args["sink"] is None else args["sink"].float()[:, None, None]
    top = torch.maximum(scores.amax(-1, keepdim=True), sink)
    weights = (scores - top).exp().nan_to_num(0.0)
    keep = torch.as_tensor(_keep_mask(case, args, b)).float()
    if case.dropout != "none" and wrong != "dropout-divisor":
        keep = keep / case.keep_prob
    divided = weights * keep if wrong == "dropout-divisor" else weights
    total = divided.sum(-1, keepdim=True) + (sink - top).exp().nan_to_num(0.0)
    carried = (weights.to(torch.bfloat16).float() if case.dtype == "bfloat16" else weights) * keep
    out = carried @ values
    if low is not None:
        out = torch.zeros_like(out)
        for key in range(values.shape[1]):  # one product at a time, with each sum rounded
            out = rounded(out + rounded(carried[..., key, None] * values[:, None, key]))
    return (out if wrong == "unnormalised" else out / total), top, total


def forward(case: Case, args: Args, low: torch.dtype | None = None) -> Results:
    """Computes attention_out, softmax_max and softmax_sum like npu_fusion_attention."""
    out = torch.zeros(args["dy"].shape, dtype=getattr(torch, case.dtype))
    shape = (case.tokens("q"), case.heads_q) if case.packed else (len(case.q_len), case.heads_q, case.tokens("q"))
    top, total = (torch.zeros(*shape, LANES) for _ in range(2))
    for b in range(len(case.q_len)):
        rows, m, l = attended(case, args, b, low)
        part(case, out, "q", case.heads_q, b).copy_(rows)
        stats_part(case, top, b).copy_(m.expand(-1, -1, LANES))
        stats_part(case, total, b).copy_(l.expand(-1, -1, LANES))
    return {"attention_out": out, "softmax_max": top, "softmax_sum": total}


# ----------------------------------------------------------------------------------------------------------- mistakes


@dataclass(frozen=True)
class Mistake:
    """A mistake and the calls in which it changes results.

    Attributes:
        change: function of a case and its arguments; returns those that the wrong kernel computes.
        edit: function of the case, the arguments and the results; returns the results that change.
    """

    cases: list[Case]
    change: Callable[[Case, Args], tuple[Case, Args]] = lambda case, args: (case, args)
    edit: Callable[[Case, Args, Results], Results] = lambda case, args, results: {}


def of_case(cases: list[Case], **changes: Any) -> Mistake:
    """Returns a mistake in fields of the case; a change is a value, or a function of the case."""
    return Mistake(cases, lambda c, args: (replace(c, **{n: v(c) if callable(v) else v for n, v in changes.items()}),
                                           args))  # fmt: skip


def of_args(cases: list[Case], **changes: Any) -> Mistake:
    """Returns a mistake in arguments; a change is a value, or a function of the arguments."""
    return Mistake(cases, lambda c, args: (c, args | {n: v(args) if callable(v) else v for n, v in changes.items()}))


def edited(cases: list[Case], edit: Callable[[Tensor, Tensor], dict[str, Tensor]]) -> Mistake:
    """Returns a mistake in statistics; edit: function of the maximum and the sum; returns "max" and "sum"."""

    def of_results(case: Case, args: Args, results: Results) -> Results:
        edits = edit(results["softmax_max"], results["softmax_sum"])
        return {f"softmax_{name}": t for name, t in edits.items()}

    return Mistake(cases, edit=of_results)


def hidden_from(cases: list[Case], first: int) -> Mistake:
    """Returns a mistake that hides the keys from number `first` on."""

    def change(case: Case, args: Args) -> tuple[Case, Args]:
        mask = (torch.arange(case.kv_len[0]) >= first).expand(case.q_len[0], -1)
        return replace(case, mask="matrix"), args | {"atten_mask": mask}

    return Mistake(cases, change)


def mixed(case: Case, args: Args) -> tuple[Case, Args]:
    """Returns a packed batch as one long causal sequence, in which keys of sequences before are visible."""
    ends = np.cumsum(case.kv_len).tolist()
    keys = {name: torch.cat([args[name][:end] for end in ends]) for name in ("key", "value")}
    return replace(case, kv_len=tuple(ends)), args | keys


def reinterpreted(t: Tensor) -> Tensor:
    """Returns a tensor [B, S, N, D] whose memory is read as [B, N, S, D]."""
    return t.reshape(t.shape[0], t.shape[2], t.shape[1], -1).transpose(1, 2)


def from_zero(top: Tensor, total: Tensor) -> dict[str, Tensor]:
    """Returns the statistics of a softmax whose maximum begins at 0."""
    return {"max": top.clamp(min=0), "sum": total * (top - top.clamp(min=0)).exp()}


def unscaled(case: Case, args: Args, results: Results) -> Results:
    """Returns statistics of scores before the scale."""
    bare = forward(replace(case, scale=1.0), args)
    return {name: bare[name] for name in ("softmax_max", "softmax_sum")}


BASE = Case(q_len=(33, 33), kv_len=(47, 47), heads_q=4, heads_kv=2, dim_qk=32, dim_v=32, scale=0.2)
PACKED = replace(BASE, layout="TND", q_len=(17, 30, 9), kv_len=(17, 41, 25))
CAUSAL = replace(BASE, sparse_mode=3, mask="compressed")
LONG = replace(BASE, q_len=(20,), kv_len=(650,))
WINDOW = replace(BASE, sparse_mode=4, mask="compressed")
THREE = (("BSND", "float32"), ("BNSD", "bfloat16"), ("SBH", "float16"))
OTHERS = (("BSH", "bfloat16"), ("BSND", "float16"), ("BNSD", "float32"))
OPERATORS = ("npu_fusion_attention_v2", "aclnnFlashAttentionScoreV3", "npu_fusion_attention_v2")


def over(case: Case, layouts: tuple[tuple[str, str], ...] = THREE) -> list[Case]:
    """Returns the case in three layouts and dtypes."""
    return [replace(case, layout=layout, dtype=dtype) for layout, dtype in layouts]


def packed_over(case: Case) -> list[Case]:
    return [replace(case, dtype=dtype) for dtype in ("float32", "bfloat16", "float16")]


PACKED_CAUSAL = replace(PACKED, sparse_mode=3, mask="compressed")
DROPPED = replace(BASE, dropout="bits", keep_prob=0.8)
CAPPED = replace(CAUSAL, scale=1.0, softcap=5.0)
# Calls of CANN's functions by mistake; the text after a colon is the variant.
MISTAKES: dict[str, Mistake] = {
    "causal-alignment": of_case(
        [*over(replace(CAUSAL, sparse_mode=2))[:2], replace(PACKED_CAUSAL, dtype="bfloat16")],
        sparse_mode=lambda c: 5 - c.sparse_mode,
    ),
    "mask-ignored": of_case([*over(replace(BASE, mask="head"))[1:], replace(CAUSAL, layout="BSH")], mask="none"),
    "mask-polarity": of_args(over(replace(BASE, mask="batch"), OTHERS), atten_mask=lambda a: a["atten_mask"] == 0),
    "window-off-by-one": of_case(over(replace(WINDOW, pre=9, next=3)), pre=8),
    "window-mirrored": of_case(over(replace(WINDOW, pre=12, next=2), OTHERS), pre=2, next=12),
    "window-ignored": of_case(over(replace(WINDOW, pre=9, next=0), OTHERS), pre=UNLIMITED),
    "prefix-ignored": of_case(over(replace(CAUSAL, sparse_mode=6, prefix=(22, 30))), sparse_mode=3),
    "causal-uncalled": of_case(over(BASE, OTHERS), sparse_mode=3, mask="compressed"),
    "tile-skipped:512": hidden_from(over(LONG), 512),
    "tile-skipped:32": hidden_from(over(BASE, OTHERS)[:1], 32),
    "mask-ends-early:512": of_args(
        over(replace(LONG, mask="ones")),
        atten_mask=lambda a: a["atten_mask"] & (torch.arange(a["atten_mask"].shape[-1]) < 512),
    ),
    "scale-missing": of_case([*over(CAUSAL)[:2], replace(PACKED, dtype="float16")], scale=1.0),
    "scale-twice": of_case(over(replace(CAUSAL, scale=0.4), OTHERS), scale=lambda c: c.scale**2),
    "scale-default": of_case(over(replace(BASE, scale=0.3), OTHERS), scale=lambda c: c.dim_qk**-0.5),
    "pse-order": of_case(over(replace(BASE, pse="full", pse_type=1)), pse_type=0),
    "pse-missing": of_args(over(replace(BASE, pse="shared_row", pse_type=0), OTHERS), pse=None),
    "alibi-distance:sign": of_args(over(replace(BASE, pse="slopes", pse_type=2))[:2], pse=lambda a: -a["pse"]),
    "alibi-distance:root": of_case(over(replace(BASE, pse="slopes", pse_type=3))[2:], pse_type=2),
    "gqa-order": of_args([*over(CAUSAL)[1:], PACKED_CAUSAL], key_heads=torch.arange(4) % 2),
    "kv-confused": of_args(over(BASE, OTHERS), key=lambda a: a["value"], value=lambda a: a["key"]),
    "rope-missing": of_args(over(replace(CAUSAL, dim_rope=16), OTHERS), query_rope=None),
    "sink-missing": of_args(over(replace(CAUSAL, sink=True), OTHERS), sink=None),
    "dropout-scale": of_case(over(DROPPED), keep_prob=1.0),
    "dropout-missing": of_case(over(replace(DROPPED, keep_prob=0.9), OTHERS), dropout="none"),
    "dropout-bits": of_args(
        [*over(replace(DROPPED, keep_prob=0.7))[:2], replace(PACKED, dropout="bits", keep_prob=0.7)],
        drop_mask=lambda a: torch.from_numpy(np.packbits(np.unpackbits(a["drop_mask"].numpy()), bitorder="little")),
    ),
    "dropout-divisor": Mistake(over(DROPPED, OTHERS)),
    "uniform-average": of_args(
        [*over(CAUSAL, OTHERS)[:2], replace(PACKED, dtype="bfloat16")], query=lambda a: torch.zeros_like(a["query"])
    ),
    "sequences-mixed": Mistake(packed_over(PACKED_CAUSAL), mixed),
    "statistics-order": of_case(packed_over(PACKED), softmax_layout="TND"),
    "statistics-swapped": edited(over(BASE, OTHERS), lambda top, total: {"max": total, "sum": top}),
    "lse-unscaled": Mistake(over(CAUSAL), edit=unscaled),
    "lse-base": edited(over(CAUSAL, OTHERS), lambda top, total: {"max": top * math.log2(math.e)}),
    "lse-parts": edited(over(CAUSAL), lambda top, total: {"sum": total.log()}),
    "lse-parts:zero": edited(over(replace(CAUSAL, sparse_mode=2)), from_zero),
    "input-layout": of_args(
        over(CAUSAL, tuple(("BSND", dtype) for _, dtype in THREE)),
        **{name: lambda a, name=name: reinterpreted(a[name]) for name in ("key", "value")},
    ),
    "output-layout": Mistake(
        [*over(CAUSAL, OTHERS)[1:], *over(CAUSAL)[:1]],
        edit=lambda case, args, results: {
            "attention_out": (out := results["attention_out"]).transpose(1, 2).reshape(out.shape)
        },
    ),
    "unnormalised": Mistake(over(CAUSAL, OTHERS)),
}
# Calls of fusion_attention.attention.
OF_ATTENTION: dict[str, Mistake] = {
    "softcap-missing": of_case(over(CAPPED, OTHERS), softcap=0.0),
    "softcap-order:mask": Mistake(over(replace(CAPPED, softcap=2.0), OTHERS)),
    "softcap-order": Mistake(over(replace(BASE, scale=1.0, softcap=5.0, pse="full", pse_type=0))),
}
FAULTS = MISTAKES | OF_ATTENTION
CASES = [(case, i, wrong in OF_ATTENTION) for wrong, m in FAULTS.items() for i, case in enumerate(m.cases)]


def planted_call(
    case: Case, wrong: str, operator: str = "npu_fusion_attention_v2", low: torch.dtype | None = None
) -> Capture:
    """Makes a capture of a training call of an operator with a mistake, or with none for ""."""
    args = arguments(case)
    if wrong == "input-layout":  # memory that has gaps cannot be read in this way
        args |= {name: args[name].contiguous() for name in ("key", "value")}
    mistake = FAULTS[wrong] if wrong else Mistake([])
    changed, given = mistake.change(case, args)
    results = forward(changed, given | {"mistake": wrong}, low)
    results |= mistake.edit(changed, given, results)
    if operator == "attention":
        python_args = pythonic(case, args)
        assert python_args is not None
        inputs, results = {n: v for n, v in python_args.items() if v is not None}, {"out": results["attention_out"]}
    else:
        names = RECORDS[operator].by_name
        inputs = {n: v for n, v in args.items() if n in names and v is not None and n != "dy"}
    return Capture(operator, inputs, results)


# -------------------------------------------------------------------------------------------------------- the captures


def operator_of(case: Case, number: int, in_python: bool) -> str:
    """Returns the operator of a mistake's capture `number`; in_python: fusion_attention.attention."""
    if in_python:
        return "attention"
    return "npu_fusion_attention_v2" if case.packed or case.dim_rope else OPERATORS[number % 3]


def planted(name: str, seed: int, low: bool = False) -> Planted:
    """Returns a call with the mistake `name`; low: in bfloat16."""
    cases = FAULTS[name].cases
    case = replace(cases[seed % len(cases)], **({"dtype": "bfloat16"} if low else {}))
    operator = operator_of(case, seed % len(cases), name in OF_ATTENTION)
    return planted_call(case, name, operator), (name.partition(":")[0],), ()


def right(seed: int) -> Capture:
    """Returns one of the calls without its mistake."""
    case, number, in_python = CASES[seed % len(CASES)]
    return planted_call(case, "", operator_of(case, number, in_python))


def noisy() -> list[tuple[Case, torch.dtype]]:
    """Returns cases, and the dtypes of 16 bits in which a kernel without mistakes rounds every sum."""
    calls = (CAUSAL, BASE, replace(BASE, mask="head"), replace(CAUSAL, scale=0.1), PACKED,
             replace(WINDOW, pre=9, next=3), replace(BASE, pse="full"))  # fmt: skip
    dtypes = (("float32", torch.float16), ("float16", torch.float16), ("bfloat16", torch.bfloat16))
    every = [(replace(case, dtype=dtype), low) for case in calls for dtype, low in dtypes]
    return every[:-1]  # the last is exact


UNNAMED = {
    "a sine of it": lambda o: o.sin() * 1.3,
    "other halves of every second row": lambda o: torch.cat((o[..., :16], o[..., 16:].roll(1, 1)), -1),
    "garbage": lambda o: torch.randn(o.shape, generator=torch.Generator().manual_seed(5)),
    "a NaN": lambda o: o.index_fill(1, torch.tensor([3]), math.nan),
    "one element": lambda o: o.clone().index_put_(tuple(torch.tensor([0]) for _ in range(4)), torch.tensor(9.0)),
    "three bits fewer": lambda o: (o * 16).round() / 16,
}


def made_unnamed(case: Case, change: str) -> Capture:
    """Makes a capture with a mistake of UNNAMED, for which the judge has no name."""
    result = planted_call(case, "")
    out = result.outputs["attention_out"]
    result.outputs["attention_out"] = UNNAMED[change](out.float()).to(out.dtype)
    return result
