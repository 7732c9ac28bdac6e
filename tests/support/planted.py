"""Simulates kernels with common mistakes, in plain torch and from CANN's pages, which the judge must detect.

Shares no code with the judge or the intermediate representation. A kernel is a loop over sequences; `wrong` names the
mistake, or "" for none. Sums are in float32; weights are rounded where a device's kernel rounds them.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch

from fusion_attention.ops import RECORDS
from fusion_attention.testing.cases import Case, arguments, part, seen, stats_part
from fusion_attention.testing.python_calls import pythonic

Tensor = torch.Tensor
LANES = 8


@dataclass(frozen=True)
class Capture:
    """A call with its results and the mistake in them."""

    mistake: str
    operator: str
    inputs: dict[str, Any]
    outputs: dict[str, Tensor]
    what: str = ""


def visible(case: Case, args: dict[str, Any], b: int, wrong: str) -> Tensor:
    """Returns bool [heads, rows, keys]: the visible pairs."""
    rows, keys = case.q_len[b], case.kv_len[b]
    right = seen(case, args, b)
    i, j = torch.arange(rows)[:, None], torch.arange(keys)
    if wrong == "causal-alignment":
        return seen(replace(case, sparse_mode={2: 3, 3: 2}[case.sparse_mode]), args, b)
    if wrong == "mask-ignored":
        return torch.ones_like(right)
    if wrong == "mask-polarity":
        return ~right
    if wrong == "window-off-by-one":
        return seen(replace(case, pre=case.pre - 1), args, b)
    if wrong == "window-mirrored":
        return seen(replace(case, pre=case.next, next=case.pre), args, b)
    if wrong == "window-ignored":
        return seen(replace(case, pre=(1 << 31) - 1), args, b)
    if wrong == "prefix-ignored":
        return (j <= i + keys - rows).expand_as(right)
    if wrong == "causal-uncalled":
        return right & (j <= i + keys - rows)
    if wrong.startswith("tile-skipped"):
        return right & (j < int(wrong.rpartition(":")[2]))
    if wrong.startswith("mask-ends-early"):
        return right | (j >= int(wrong.rpartition(":")[2]))
    return right


def bias_of(case: Case, args: dict[str, Any], b: int, wrong: str) -> tuple[Tensor | float, bool]:
    """Returns (bias [heads, rows, keys], true if it is added before scaling)."""
    pse, rows, keys = args["pse"], case.q_len[b], case.kv_len[b]
    if pse is None or wrong == "pse-missing":
        return 0.0, False
    if case.pse_type in (0, 1):
        before = (case.pse_type == 1) != (wrong == "pse-order")
        full = pse[b if pse.shape[0] > 1 else 0].float()
        return full[:, :rows, :keys].expand(-1, rows, -1), before
    slope = pse.float() if pse.dim() == 1 else pse[b if pse.shape[0] > 1 else 0].float()
    away = (torch.arange(rows)[:, None] - torch.arange(keys)).abs().float()
    away = away.sqrt() if (case.pse_type == 3) != (wrong == "alibi-distance:root") else away
    sign = 1.0 if wrong == "alibi-distance:sign" else -1.0
    return sign * slope[:, None, None] * away, False


def kept_of(case: Case, args: dict[str, Any], b: int, wrong: str) -> Tensor | None:
    """Returns the dropout mask [heads, rows, keys] as ones and zeros, or None."""
    if case.dropout == "none" or wrong == "dropout-missing":
        return None
    rows, keys = case.q_len[b], case.kv_len[b]
    sizes = [case.heads_q * m * n for m, n in zip(case.q_len, case.kv_len, strict=True)]
    first = sum(sizes[:b])
    order = "big" if wrong == "dropout-bits" else "little"
    bits = np.unpackbits(args["drop_mask"].numpy(), bitorder=order)[first : first + sizes[b]]
    return torch.from_numpy(bits.astype(np.float32)).view(case.heads_q, rows, keys)


def scale_of(case: Case, wrong: str) -> float:
    factor = {"scale-missing": 1.0, "scale-twice": case.scale**2, "scale-default": case.dim_qk**-0.5}
    return factor.get(wrong, case.scale)


@dataclass(frozen=True)
class Rounding:
    """The rounding of a kernel that accumulates in 16 bits, key by key; to: the dtype, or None for no rounding."""

    to: torch.dtype | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return x if self.to is None else x.to(self.to).float()


def row_block(case: Case, args: dict[str, Any], b: int, wrong: str, rough: Rounding) -> tuple[Tensor, ...]:
    """Computes (out, max, sum) [heads, rows, ..] of a sequence."""
    group, dtype = case.heads_q // case.heads_kv, getattr(torch, case.dtype)

    def keys_of(name: str) -> Tensor:
        result = part(case, args[name], "kv", case.heads_kv, b).float()
        if wrong == "input-layout":
            result = result.transpose(0, 1).reshape(result.shape)
        return result.repeat(group, 1, 1) if wrong == "gqa-order" else result.repeat_interleave(group, 0)

    q, k, v = part(case, args["query"], "q", case.heads_q, b).float(), keys_of("key"), keys_of("value")
    if wrong == "kv-confused":
        k, v = v, k
    products = q @ k.mT
    if case.dim_rope and wrong != "rope-missing":
        products = products + part(case, args["query_rope"], "q", case.heads_q, b).float() @ keys_of("key_rope").mT
    bias, before = bias_of(case, args, b, wrong)
    scale = scale_of(case, wrong)
    scores = rough((products + bias) * scale if before else products * scale + bias)
    if wrong == "uniform-average":
        scores = torch.zeros_like(scores)
    if case.softcap and wrong != "softcap-missing":
        scaled = products * scale
        scores = case.softcap * torch.tanh(scaled / case.softcap) + bias
        if wrong == "softcap-order:mask":
            scores = scores.where(visible(case, args, b, ""), -case.softcap)
        if wrong == "softcap-order":
            scores = case.softcap * torch.tanh((scaled + bias) / case.softcap)
    hidden = torch.tensor(False) if wrong == "softcap-order:mask" else ~visible(case, args, b, wrong)
    scores = scores.masked_fill(hidden, -math.inf)
    top = scores.amax(-1, keepdim=True)
    top = top.clamp(min=0) if wrong == "lse-parts:zero" else top
    sink = args["sink"].float()[:, None, None] if case.sink and wrong != "sink-missing" else None
    top = top if sink is None else torch.maximum(top, sink)
    weights = (scores - top).exp().nan_to_num(0.0)
    keep = kept_of(case, args, b, wrong)
    total = (weights if wrong != "dropout-divisor" or keep is None else weights * keep).sum(-1, keepdim=True)
    total = total if sink is None else total + (sink - top).exp()
    carried = weights.to(dtype).float() if dtype == torch.bfloat16 else weights
    if keep is not None:
        carried = carried * keep / (1.0 if wrong in ("dropout-scale", "dropout-divisor") else case.keep_prob)
    out = accumulated(carried, v, rough)
    return (out if wrong == "unnormalised" else out / total), top, total, scores


def accumulated(weights: Tensor, values: Tensor, rough: Rounding) -> Tensor:
    if rough.to is None:
        return weights @ values
    total = torch.zeros(*weights.shape[:2], values.shape[-1])
    for key in range(values.shape[1]):  # one product at a time, with each sum rounded
        total = rough(total + rough(weights[..., key, None] * values[:, None, key]))
    return total


def forward(case: Case, args: dict[str, Any], wrong: str = "", rough: Rounding = Rounding()) -> dict[str, Tensor]:
    """Computes attention_out, softmax_max and softmax_sum like npu_fusion_attention."""
    dtype = getattr(torch, case.dtype)
    out = torch.zeros(args["dy"].shape, dtype=dtype)
    shape = (case.tokens("q"), case.heads_q) if case.packed else (len(case.q_len), case.heads_q, case.tokens("q"))
    top, total = (torch.zeros(*shape, LANES) for _ in range(2))
    stored = case
    if wrong == "statistics-order":
        stored = replace(case, softmax_layout="" if case.softmax_layout else "TND")
    source = mixed(case, args) if wrong == "sequences-mixed" else None
    for b in range(len(case.q_len)):
        result = row_block(case, args, b, wrong, rough) if source is None else source[b]
        rows, m, l, scores = result
        if wrong == "lse-unscaled":
            bare = scores / case.scale
            m = bare.amax(-1, keepdim=True)
            l = (bare - m).exp().sum(-1, keepdim=True)
        if wrong == "lse-base":
            m = m * math.log2(math.e)
        if wrong == "lse-parts":
            l = l.log()
        if wrong == "statistics-swapped":
            m, l = l, m
        part(case, out, "q", case.heads_q, b).copy_(rows)
        stats_part(stored, top, b).copy_(m.expand(-1, -1, LANES))
        stats_part(stored, total, b).copy_(l.expand(-1, -1, LANES))
    if wrong == "output-layout":
        out = out.transpose(1, 2).reshape(out.shape).contiguous() if not case.packed else out
    return {"attention_out": out, "softmax_max": top, "softmax_sum": total}


def mixed(case: Case, args: dict[str, Any]) -> list[tuple[Tensor, ...]]:
    """Computes a packed batch as one long causal sequence, in which keys of other sequences are visible."""
    total_q, total_kv = sum(case.q_len), sum(case.kv_len)
    one = replace(case, q_len=(total_q,), kv_len=(total_kv,), sparse_mode=0, mask="none")
    q_rows = torch.cat([torch.arange(m) + n - m + sum(case.kv_len[:b]) for b, (m, n) in
                        enumerate(zip(case.q_len, case.kv_len, strict=True))])  # fmt: skip
    group = case.heads_q // case.heads_kv
    q = part(one, args["query"], "q", case.heads_q, 0).float()
    k, v = (part(one, args[n], "kv", case.heads_kv, 0).float().repeat_interleave(group, 0) for n in ("key", "value"))
    scores = (q @ k.mT * case.scale).masked_fill(torch.arange(total_kv) > q_rows[:, None], -math.inf)
    m = scores.amax(-1, keepdim=True)
    weights = (scores - m).exp()
    l = weights.sum(-1, keepdim=True)
    carried = weights.to(getattr(torch, case.dtype)).float() if case.dtype == "bfloat16" else weights
    out = carried @ v / l
    ends = np.cumsum(case.q_len)
    return [tuple(t[:, e - n : e] for t in (out, m, l, scores)) for e, n in zip(ends, case.q_len, strict=True)]


def backward(case: Case, args: dict[str, Any], saved: dict[str, Tensor], wrong: str = "") -> dict[str, Tensor]:
    """Computes dq, dk and dv like npu_fusion_attention_grad, from the forward's results."""
    dtype, group = getattr(torch, case.dtype), case.heads_q // case.heads_kv
    results = {
        n: torch.zeros(args[of].shape, dtype=dtype) for n, of in (("dq", "query"), ("dk", "key"), ("dv", "value"))
    }
    for b in range(len(case.q_len)):
        q = part(case, args["query"], "q", case.heads_q, b).float()
        k, v = (part(case, args[n], "kv", case.heads_kv, b).float().repeat_interleave(group, 0)
                for n in ("key", "value"))  # fmt: skip
        dy = part(case, args["dy"], "q", case.heads_q, b).float()
        out = part(case, saved["attention_out"], "q", case.heads_q, b).float()
        m, l = (stats_part(case, saved[n], b)[..., :1] for n in ("softmax_max", "softmax_sum"))
        scores = (q @ k.mT * case.scale).masked_fill(~visible(case, args, b, wrong), -math.inf)
        p = (scores - m).exp() / l
        dp = dy @ v.mT
        ds = p * (dp if wrong == "delta-missing" else dp - (dy * out).sum(-1, keepdim=True))
        low = dtype == torch.bfloat16
        ds, p = (t.to(dtype).float() if low else t for t in (ds, p))
        scale = 1.0 if wrong == "gradient-scale" else case.scale
        full = {"dk": scale * ds.mT @ q, "dv": p.mT @ dy}
        part(case, results["dq"], "q", case.heads_q, b).copy_(scale * ds @ k)
        for name, by_head in full.items():
            by_group = by_head.unflatten(0, (case.heads_kv, group))
            total = by_group[:, 0] if wrong == "group-sum" else by_group.sum(1)
            part(case, results[name], "kv", case.heads_kv, b).copy_(total)
    return results


# -------------------------------------------------------------------------------------------------------------- calls


def inputs_of(operator: str, args: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments that an operator has and that are not None."""
    names = RECORDS[operator].by_name
    return {n: v for n, v in args.items() if n in names and v is not None and n not in ("dy", "seed", "offset")}


def planted_call(
    case: Case, wrong: str, operator: str = "npu_fusion_attention_v2", rough: Rounding = Rounding()
) -> Capture:
    """Makes a capture of a training call with an operator of CANN."""
    args = arguments(case)
    if wrong == "input-layout":
        args |= {name: args[name].contiguous() for name in ("key", "value")}
    results = forward(case, args, wrong, rough)
    return Capture(wrong.partition(":")[0], operator, inputs_of(operator, args), results, case.id)


def made_gradient(case: Case, wrong: str) -> Capture:
    """Makes a capture of a training gradient."""
    args, operator = arguments(case), "npu_fusion_attention_grad_v2"
    saved = forward(case, args)
    given = {**args, **saved, "attention_in": saved["attention_out"]}
    inputs = inputs_of(operator, given) | {"dy": args["dy"]}
    return Capture(wrong, operator, inputs, backward(case, args, saved, wrong), case.id)


# ----------------------------------------------------------------------------------- unnamed mistakes and our functions


def made_own(case: Case, wrong: str) -> Capture:
    """Makes a capture of fusion_attention.attention."""
    args = arguments(case)
    given = pythonic(case, args)
    assert given is not None
    inputs = {n: v for n, v in given.items() if v is not None}
    out = {"out": forward(case, args, wrong)["attention_out"]}
    return Capture(wrong.partition(":")[0], "attention", inputs, out, case.id)


UNNAMED = {
    "a sine of it": lambda o: o.sin() * 1.3,
    "other halves of every second row": lambda o: torch.cat((o[..., :16], o[..., 16:].roll(1, 1)), -1),
    "garbage": lambda o: torch.randn(o.shape, generator=torch.Generator().manual_seed(5)),
    "a NaN": lambda o: o.index_fill(1, torch.tensor([3]), math.nan),
    "one element": lambda o: o.clone().index_put_(tuple(torch.tensor([0]) for _ in range(4)), torch.tensor(9.0)),
    "three bits fewer": lambda o: (o * 16).round() / 16,
}


def made_unnamed(case: Case, what: str) -> Capture:
    """Makes a capture with a mistake that the judge has no name for."""
    result = planted_call(case, "")
    out = result.outputs["attention_out"]
    result.outputs["attention_out"] = UNNAMED[what](out.float()).to(out.dtype)
    return result


# ------------------------------------------------------------------------------------ faults of other simulated kernels

C = TypeVar("C")
R = TypeVar("R")
P = ParamSpec("P")
# Changes a result [B, heads, rows, elements] in place; returns the text of the change's parameters in the diagnosis.
Edit = Callable[[Tensor, random.Random], str]


def fault(program: Callable[Concatenate[C, P], R]) -> Callable[P, Callable[[C], R]]:
    """Takes a function of a call and of a fault's parameters: f(call, a, b) becomes f(a, b)(call)."""

    def given(*parameters: P.args, **options: P.kwargs) -> Callable[[C], R]:
        return lambda call: program(call, *parameters, **options)

    return given


def moved(change: Callable[[Tensor], Tensor], word: str) -> Edit:
    def edit(result: Tensor, rng: random.Random) -> str:
        result.copy_(change(result))
        return word

    return edit


def shifted_rows(*distances: int) -> Edit:
    def edit(result: Tensor, rng: random.Random) -> str:
        by = rng.choice(distances)
        result.copy_(result.roll(by, 2))
        return f"row r {'-' if by > 0 else '+'} {abs(by)}"

    return edit


def rolled_columns(result: Tensor, rng: random.Random) -> str:
    by = rng.choice([1, 4, 8])
    result.copy_(result.roll(by, 3))
    return f"columns rolled by {by}"


def head_factor(result: Tensor, rng: random.Random) -> str:
    by = rng.choice([0.5, 2.0, -1.0])
    result[:, rng.randrange(result.shape[1])] *= by
    return f"{by:g} times"


def zero_tail(result: Tensor, rng: random.Random) -> str:
    result[:, :, result.shape[2] // 16 * 16 - 16 :] = 0
    return ""
