"""Mistakes in scores and weights: scale, bias, softcap, rope, sink, dropout."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from fusion_attention.judging.formulas import Precision
from fusion_attention.judging.mistakes.kinds import Case, Mistake, Try, returning, unmasked
from fusion_attention.judging.setting import Block

Tensor = torch.Tensor


@partial(Mistake, "scale-missing", "Products are not scaled.", "Is scale passed, and is its default 1.0?")
def scale_missing(case: Case) -> Iterator[Try]:
    if case.setting.problem.scale != 1.0:
        yield Try("", case.setting.of_problem(scale=1.0))


@partial(Mistake, "scale-twice", "Products are scaled twice.", "Is the query scaled before the call too?")
def scale_twice(case: Case) -> Iterator[Try]:
    scale = case.setting.problem.scale
    if scale not in (0.0, 1.0):
        yield Try("", case.setting.of_problem(scale=scale * scale))


@partial(
    Mistake, "scale-default", "Another scale than the call's is used.",
    "CANN's default is 1.0; torch's is 1 / sqrt(D), with rope 1 / sqrt(D + Dr).",
)  # fmt: skip
def scale_other(case: Case) -> Iterator[Try]:
    p = case.setting.problem
    results = {
        "1 / sqrt(D)": 1 / math.sqrt(p.dim_qk),
        "1 / sqrt(D + Dr)": 1 / math.sqrt(p.dim_qk + p.dim_rope),
        "1 / sqrt(Dv)": 1 / math.sqrt(p.dim_v),
        "1 / scale": 1 / p.scale if p.scale else 0.0,
        "1 / D": 1 / p.dim_qk,
    }
    scales = {p.scale, 1.0, p.scale * p.scale}
    for detail, scale in results.items():
        if not any(math.isclose(scale, other, rel_tol=1e-6) for other in scales):
            scales.add(scale)
            yield Try(detail, case.setting.of_problem(scale=scale))


@partial(
    Mistake, "pse-order", "The bias is added before the scale, not after it, or the other way round.",
    "pse_type 1 adds before the scale, 0 after it; inference adds after it.",
)  # fmt: skip
def bias_order(case: Case) -> Iterator[Try]:
    p = case.setting.problem
    if p.bias != "none" and p.scale != 1.0:
        if p.bias in ("matrix", "table"):
            detail = "after it, not before" if p.bias_scaled else "before it, not after"
            yield Try(detail, case.setting.of_problem(bias_scaled=not p.bias_scaled))
        else:

            def scaled(x: Block) -> Block:
                return replace(x, bias=None if x.bias is None else p.scale * x.bias)

            yield Try("before it, not after", case.setting.changed(scaled))


@partial(Mistake, "pse-missing", "The bias is not added.", "Is pse passed on, and is pse_type one that reads it?")
def bias_missing(case: Case) -> Iterator[Try]:
    if case.setting.problem.bias != "none":
        yield Try("", case.setting.of_problem(bias="none"))


@partial(Mistake, "pse-sign", "The bias is subtracted.", "Scores are scale * q . k + bias.")
def bias_sign(case: Case) -> Iterator[Try]:
    if case.setting.problem.bias in ("matrix", "table"):
        yield Try("", case.setting.changed(lambda x: replace(x, bias=None if x.bias is None else -x.bias)))


@partial(
    Mistake, "alibi-distance", "Biases of distances are computed by another formula.",
    "pse_type 2 is -slope * |distance|, 3 its root; q_start_idx and kv_start_idx move the origin.",
)  # fmt: skip
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


@partial(Mistake, "softcap-missing", "Scores are not capped.", "Is softcap passed on?")
def softcap_missing(case: Case) -> Iterator[Try]:
    if case.setting.problem.softcap:
        yield Try("", case.setting.of_problem(softcap=0.0))


@partial(
    Mistake, "softcap-order", "The cap is applied after the bias or the mask.",
    "flash-attn's order: the scaled product is capped, then the bias is added.",
)  # fmt: skip
def softcap_order(case: Case) -> Iterator[Try]:
    p = case.setting.problem
    if p.softcap and p.bias != "none":
        yield Try("the bias is capped too", case.setting.changed(lambda x: replace(x, bias_capped=True)))
    if p.softcap and p.bias == "none":
        yield from _masked_keys_capped(case)


def _masked_keys_capped(case: Case) -> Iterator[Try]:
    """Yields a variant of a call whose mask is added before the cap, which makes -softcap of -inf."""
    s = case.setting

    def capped(x: Block) -> Block:
        visible = s.block(x.b, x.heads, x.rows, x.keys).visible
        hidden = torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, -math.inf)
        return replace(x, bias=hidden, bias_capped=True, in_band=torch.ones_like(x.in_band))

    yield Try("the mask is applied before the cap", unmasked(s).changed(capped))


@partial(
    Mistake, "overflow", "Scores overflow in float16.", "Sum products in float32; scale the query before the product."
)
def overflow(case: Case) -> Iterator[Try]:
    s, most = case.setting, torch.finfo(torch.float16).max
    if s.problem.dtype != "float16":
        return

    def infinite(x: Block, *, scaled: bool) -> Block:
        scores = x.q @ x.k.mT * (x.scores_by if scaled else 1.0)
        beyond = scores.where(scores.abs() > most, 0) * math.inf
        beyond = beyond.nan_to_num(0.0, math.inf, -math.inf)
        return replace(x, bias=beyond if x.bias is None else x.bias + beyond)

    yield Try("products, before the scale", s.changed(partial(infinite, scaled=False)))
    yield Try("scaled products", s.changed(partial(infinite, scaled=True)))


@partial(
    Mistake, "denormals-flushed", "Subnormal numbers of float16 are read as zeros.",
    "Numbers below 2^-14 are subnormal in float16: switch off flushing, or convert to float32 first.",
)  # fmt: skip
def denormals_flushed(case: Case) -> Iterator[Try]:
    s, least = case.setting, torch.finfo(torch.float16).tiny
    if s.problem.dtype != "float16":
        return

    def flushed(t: Tensor) -> Tensor:
        return t.where(t.abs() >= least, 0)

    def of_inputs(x: Block) -> Block:
        return replace(x, q=flushed(x.q), k=flushed(x.k), v=flushed(x.v))

    def of_rows(kind: str, value: Tensor, raw: dict[str, Tensor], x: Block, p: Precision) -> Tensor:
        return flushed(value) if kind == "out" else value

    yield Try("of q, k and v", s.changed(of_inputs))
    yield Try("of the output", returning(s, of_rows))


@partial(
    Mistake, "rope-missing", "The products of the rope parts are not added to the scores.",
    "Are query_rope and key_rope passed, or concatenated to query and key before the call?",
)  # fmt: skip
def rope_missing(case: Case) -> Iterator[Try]:
    if case.setting.problem.dim_rope:
        yield Try("", case.setting.of_problem(dim_rope=0))


@partial(
    Mistake, "sink-missing", "The sink is not in the denominator.",
    "The sink is one more logit per head: it is in each row's sum, and has no value.",
)  # fmt: skip
def sink_missing(case: Case) -> Iterator[Try]:
    if case.setting.problem.has_sink:
        yield Try("", case.setting.of_problem(has_sink=False))


@partial(
    Mistake, "dropout-scale", "Kept probabilities are not divided by keep_prob.",
    "keep_prob is the probability to keep a weight, 1 - dropout_p.",
)  # fmt: skip
def dropout_scale(case: Case) -> Iterator[Try]:
    if case.setting.problem.dropout != "none":
        yield Try("", case.setting.changed(lambda x: replace(x, keep_factor=1.0)))


@partial(Mistake, "dropout-missing", "Nothing is dropped.", "Is keep_prob passed to this kernel?")
def dropout_missing(case: Case) -> Iterator[Try]:
    if case.setting.problem.dropout != "none":
        yield Try("", case.setting.changed(lambda x: replace(x, keep=None, keep_factor=1.0)))


@partial(
    Mistake, "dropout-bits", "The bits of the dropout mask are read in another way.",
    "Bits count from the least significant one, 1 keeps, row-major over [B, N, S1, S2].",
)  # fmt: skip
def dropout_bits(case: Case) -> Iterator[Try]:
    s = case.setting
    if s.problem.dropout == "bits":
        yield Try("bits from the most significant one on", s.changed(drop_msb=True))
    if s.problem.dropout != "none":

        def inverted(x: Block) -> Block:
            return replace(x, keep=None if x.keep is None else ~x.keep)

        yield Try("a set bit drops", s.changed(inverted))


@partial(
    Mistake, "dropout-divisor", "Probabilities are normalised after dropout, not before.",
    "The row's sum is that of all weights, dropped ones too.",
)  # fmt: skip
def dropout_divisor(case: Case) -> Iterator[Try]:
    if case.setting.problem.dropout != "none":
        undivided = case.setting.changed(lambda x: replace(x, dropped_divisor=True, keep_factor=1.0))
        yield Try("", undivided)


@partial(
    Mistake, "uniform-average", "The output is the plain average of V: scores do not matter.",
    "Known for TND with sparse_mode 0 and no mask; check that q and k are read at all.",
)  # fmt: skip
def uniform_average(case: Case) -> Iterator[Try]:
    s, p = case.setting, case.setting.problem

    def flat(x: Block) -> Block:
        return replace(x, scores_by=0.0, bias=None)

    yield Try("over the keys that a row sees", s.changed(flat))
    if p.has_blocked or (np.abs(s.extents.hi) < 1 << 39).any():
        yield Try("over all keys", unmasked(s).changed(flat))


MISTAKES = (
    scale_missing,
    scale_twice,
    scale_other,
    bias_order,
    bias_missing,
    bias_sign,
    slopes_wrong,
    softcap_missing,
    softcap_order,
    overflow,
    denormals_flushed,
    rope_missing,
    sink_missing,
    dropout_scale,
    dropout_missing,
    dropout_bits,
    dropout_divisor,
    uniform_average,
)
