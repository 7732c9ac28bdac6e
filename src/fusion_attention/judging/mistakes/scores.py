"""Mistakes in scores and weights: scale, bias, softcap, rope, sink, dropout."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from fusion_attention.ir.problem import Problem
from fusion_attention.judging.editable_call import Block, Setting
from fusion_attention.judging.mistakes.kinds import Case, Mistake, Try, changing, of_results, unmasked

Tensor = torch.Tensor


def scale_other(s: Setting, p: Problem) -> dict[str, Setting]:
    results = {
        "1 / sqrt(D)": 1 / math.sqrt(p.dim_qk),
        "1 / sqrt(D + Dr)": 1 / math.sqrt(p.dim_qk + p.dim_rope),
        "1 / sqrt(Dv)": 1 / math.sqrt(p.dim_v),
        "1 / scale": 1 / p.scale if p.scale else 0.0,
        "1 / D": 1 / p.dim_qk,
    }
    scales, ways = {p.scale, 1.0, p.scale * p.scale}, {}
    for detail, scale in results.items():
        if not any(math.isclose(scale, other, rel_tol=1e-6) for other in scales):
            scales.add(scale)
            ways[detail] = s.of_problem(scale=scale)
    return ways


def bias_order(s: Setting, p: Problem) -> dict[str, Setting]:
    if p.bias == "none" or p.scale == 1.0:
        return {}
    if p.bias in ("matrix", "table"):
        detail = "after it, not before" if p.bias_scaled else "before it, not after"
        return {detail: s.of_problem(bias_scaled=not p.bias_scaled)}
    return {"before it, not after": s.changed(partial(_biased, by=p.scale))}


def _biased(x: Block, by: float) -> Block:
    return replace(x, bias=None if x.bias is None else by * x.bias)


def slopes_wrong(case: Case) -> Iterator[Try]:
    s, p, e = case.setting, case.setting.problem, case.setting.extents
    if p.bias not in ("slopes", "slopes_sqrt") or s.operands.slopes is None:
        return
    yield Try("with the other sign", s.of_operands(slopes=-s.operands.slopes))
    other = "slopes" if p.bias == "slopes_sqrt" else "slopes_sqrt"
    yield Try("of the distance itself" if other == "slopes" else "of its root", s.of_problem(bias=other))
    for shift in (np.zeros_like(e.shift), e.q_len - e.kv_len):
        if (shift != e.shift).any():
            yield Try("from another origin", s.of_extents(shift=shift))


def softcap_order(s: Setting, p: Problem) -> dict[str, Setting]:
    def capped_mask(x: Block) -> Block:  # which makes -softcap of -inf
        visible = s.block(x.b, x.heads, x.rows, x.keys).visible
        hidden = torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, -math.inf)
        return replace(x, bias=hidden, bias_capped=True, in_band=torch.ones_like(x.in_band))

    if not p.softcap:
        return {}
    if p.bias != "none":
        return {"the bias is capped too": s.of_blocks(bias_capped=True)}
    return {"the mask is applied before the cap": unmasked(s).changed(capped_mask)}


def overflow(s: Setting, p: Problem) -> dict[str, Setting]:
    most = torch.finfo(torch.float16).max

    def infinite(x: Block, *, scaled: bool) -> Block:
        scores = x.q @ x.k.mT * (x.scores_by if scaled else 1.0)
        beyond = scores.where(scores.abs() > most, 0) * math.inf
        beyond = beyond.nan_to_num(0.0, math.inf, -math.inf)
        return replace(x, bias=beyond if x.bias is None else x.bias + beyond)

    ways = {"products, before the scale": False, "scaled products": True} if p.dtype == "float16" else {}
    return {detail: s.changed(partial(infinite, scaled=scaled)) for detail, scaled in ways.items()}


def denormals_flushed(s: Setting, p: Problem) -> dict[str, Setting]:
    def flushed(t: Tensor) -> Tensor:
        return t.where(t.abs() >= torch.finfo(torch.float16).tiny, 0)

    def of_inputs(x: Block) -> Block:
        return replace(x, q=flushed(x.q), k=flushed(x.k), v=flushed(x.v))

    if p.dtype != "float16":
        return {}
    of_rows = of_results(s, {"out": lambda value, raw, x: flushed(value)})
    return {"of q, k and v": s.changed(of_inputs), "of the output": of_rows}


def dropout_bits(s: Setting, p: Problem) -> dict[str, Setting]:
    ways = {}
    if p.dropout == "bits":
        ways["bits from the most significant one on"] = s.changed(drop_msb=True)
    if p.dropout != "none":
        ways["a set bit drops"] = s.changed(lambda x: replace(x, keep=None if x.keep is None else ~x.keep))
    return ways


def uniform_average(s: Setting, p: Problem) -> dict[str, Setting]:
    ways = {"over the keys that a row sees": s.of_blocks(scores_by=0.0, bias=None)}
    if p.has_blocked or (np.abs(s.extents.hi) < 1 << 39).any():
        ways["over all keys"] = unmasked(s).of_blocks(scores_by=0.0, bias=None)
    return ways


MISTAKES = (
    changing("scale-missing", "Products are not scaled.", "Is scale passed, and is its default 1.0?",
             lambda s, p: {"": s.of_problem(scale=1.0)} if p.scale != 1.0 else {}),
    changing("scale-twice", "Products are scaled twice.", "Is the query scaled before the call too?",
             lambda s, p: {"": s.of_problem(scale=p.scale * p.scale)} if p.scale not in (0.0, 1.0) else {}),
    changing("scale-default", "Another scale than the call's is used.",
             "CANN's default is 1.0; torch's is 1 / sqrt(D), with rope 1 / sqrt(D + Dr).", scale_other),
    changing("pse-order", "The bias is added before the scale, not after it, or the other way round.",
             "pse_type 1 adds before the scale, 0 after it; inference adds after it.", bias_order),
    changing("pse-missing", "The bias is not added.", "Is pse passed on, and is pse_type one that reads it?",
             lambda s, p: {"": s.of_problem(bias="none")} if p.bias != "none" else {}),
    changing("pse-sign", "The bias is subtracted.", "Scores are scale * q . k + bias.",
             lambda s, p: {"": s.changed(partial(_biased, by=-1))} if p.bias in ("matrix", "table") else {}),
    Mistake("alibi-distance", "Biases of distances are computed by another formula.",
            "pse_type 2 is -slope * |distance|, 3 its root; q_start_idx and kv_start_idx move the origin.",
            slopes_wrong),
    changing("softcap-missing", "Scores are not capped.", "Is softcap passed on?",
             lambda s, p: {"": s.of_problem(softcap=0.0)} if p.softcap else {}),
    changing("softcap-order", "The cap is applied after the bias or the mask.",
             "flash-attn's order: the scaled product is capped, then the bias is added.", softcap_order),
    changing("overflow", "Scores overflow in float16.", "Sum products in float32; scale the query before the product.",
             overflow),
    changing("denormals-flushed", "Subnormal numbers of float16 are read as zeros.",
             "Numbers below 2^-14 are subnormal in float16: switch off flushing, or convert to float32 first.",
             denormals_flushed),
    changing("rope-missing", "The products of the rope parts are not added to the scores.",
             "Are query_rope and key_rope passed, or concatenated to query and key before the call?",
             lambda s, p: {"": s.of_problem(dim_rope=0)} if p.dim_rope else {}),
    changing("sink-missing", "The sink is not in the denominator.",
             "The sink is one more logit per head: it is in each row's sum, and has no value.",
             lambda s, p: {"": s.of_problem(has_sink=False)} if p.has_sink else {}),
    changing("dropout-scale", "Kept probabilities are not divided by keep_prob.",
             "keep_prob is the probability to keep a weight, 1 - dropout_p.",
             lambda s, p: {"": s.of_blocks(keep_factor=1.0)} if p.dropout != "none" else {}),
    changing("dropout-missing", "Nothing is dropped.", "Is keep_prob passed to this kernel?",
             lambda s, p: {"": s.of_blocks(keep=None, keep_factor=1.0)} if p.dropout != "none" else {}),
    changing("dropout-bits", "The bits of the dropout mask are read in another way.",
             "Bits count from the least significant one, 1 keeps, row-major over [B, N, S1, S2].", dropout_bits),
    changing("dropout-divisor", "Probabilities are normalised after dropout, not before.",
             "The row's sum is that of all weights, dropped ones too.",
             lambda s, p: {"": s.of_blocks(dropped_divisor=True, keep_factor=1.0)} if p.dropout != "none" else {}),
    changing("uniform-average", "The output is the plain average of V: scores do not matter.",
             "Known for TND with sparse_mode 0 and no mask; check that q and k are read at all.", uniform_average),
)  # fmt: skip
