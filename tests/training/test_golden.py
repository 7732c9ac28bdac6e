"""The float64 reference against independent computations: autograd through a plain formula, torch's attention, finite
differences, and a rule for the results that a NaN may reach.
"""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.oracle import INF, Call, Results, buffer, forward, keep_of, load, make, read, rows, run, seen_by, witness

from fusion_attention.backends import golden
from fusion_attention.ir.mask import Band
from fusion_attention.ir.problem import Grads, Problem, Stats

PROBLEM = Problem(4, 2, 6, 5, dtype="float64", scale=0.4)


def agree(got: Results, want: Results) -> None:
    assert got.keys() == want.keys()
    for name in want:
        for b, (g, w) in enumerate(zip(got[name], want[name], strict=True)):
            # Inputs are of size 1; so are the terms that cancel in gradients which are exactly zero.
            size = w[w.isfinite()].abs().amax().clamp(min=1.0).item() if w.isfinite().any() else 1.0
            torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-12 * size, msg=lambda m, at=(name, b): f"{at}: {m}")


BITS = {"dropout": "bits", "keep_prob": 0.65}
BIASES = ["hij", "ij", "hj", "hi", "i", "j", "h", ""]
CASES: dict[str, tuple[dict, dict]] = {
    "full": ({}, {}),
    "one_kv_head": ({"heads_kv": 1, "dim_v": 9}, {}),
    "no_group": ({"heads_kv": 4, "dim_qk": 1}, {}),
    "causal_start": ({}, {"band": Band.causal("start")}),
    "causal_end": ({}, {"band": Band.causal()}),
    "window": ({}, {"band": Band.window(2, 1)}),
    "negative_window": ({}, {"band": Band.window(-2, 4, "start")}),
    "crossed_window": ({}, {"band": Band.window(-3, 1)}),
    "prefix": ({}, {"band": Band.prefix_causal([3, 1, 0, 9])}),
    "rope": ({"dim_rope": 3}, {"band": Band.causal()}),
    "sink": ({"has_sink": True}, {"band": Band.window(1, 0, "start")}),
    "bits": (BITS, {"band": Band.causal()}),
    "philox": ({"dropout": "philox", "keep_prob": 0.65}, {"band": Band.causal()}),
    "slopes": ({"bias": "slopes"}, {"shift": -2}),
    "slopes_sqrt": ({"bias": "slopes_sqrt", "bias_scaled": True}, {}),
    "table": ({"bias": "table"}, {"band": Band.causal("start")}),
    "table_of_all_heads": ({"bias": "table", "bias_scaled": True}, {"bias_axes": "ij"}),
    "shared_bias": ({"bias": "matrix"}, {"shared": True, "q_len": (5, 5, 5), "kv_len": (4, 4, 4)}),
    "everything": (
        {"dim_rope": 2, "has_sink": True, "bias": "matrix", "bias_scaled": True, "has_blocked": True, **BITS},
        {"band": Band.window(2, 1)},
    ),
    "softcap": ({"softcap": 0.8}, {"band": Band.causal()}),
    "softcap_and_everything": (
        {"softcap": 1.5, "dim_rope": 2, "has_sink": True, "bias": "matrix", "bias_scaled": True, "has_blocked": True}
        | {"empty_rows": "mean", **BITS},
        {"band": Band.window(2, 1)},
    ),
    "softcap_slopes": ({"softcap": 3.0, "bias": "slopes"}, {"shift": -2}),
    **{f"bias_{axes}": ({"bias": "matrix", "bias_scaled": axes == "ij"}, {"bias_axes": axes}) for axes in BIASES},
    **{f"blocked_{axes}": ({"has_blocked": True}, {"blocked_axes": axes}) for axes in BIASES},
    **{
        f"tiles_{form}_{axes}": (
            {"has_blocked_tiles": True, "has_blocked": axes == "ij", "empty_rows": form},
            {"q_len": (200, 0, 130), "kv_len": (300, 140, 9), "band": Band.window(170, 3), "blocked_axes": axes},
        )
        for form, axes in (("zero", "hij"), ("mean", "ij"), ("mean_in_band", "hij"))
    },
    **{
        f"{form}_{band.lo}": ({"empty_rows": form, "has_blocked": True, "dim_rope": 2, **BITS}, {"band": band})
        for form in ("zero", "mean", "mean_in_band")
        for band in (Band.causal(), Band.window(0, 0, "start"))
    },
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_golden_matches_autograd_through_plain_formula(name: str) -> None:
    fields, arguments = CASES[name]
    call = make(replace(PROBLEM, **fields), **arguments)
    agree(run(call), witness(call))


@pytest.mark.parametrize("form", ["zero", "mean"])
def test_golden_with_scores_of_minus_infinity_matches_autograd(form: str) -> None:
    call = make(replace(PROBLEM, bias="matrix", empty_rows=form, **BITS), band=Band.causal())
    for t in call.bias:
        t[t > 0.8] = -INF
    call.bias[0][1, 2] = -INF  # a row that sees keys, and is empty
    call.bias[3][:, :, 0] = -INF
    want = witness(call)
    assert want["max"][0][1, 2] == -INF
    agree(run(call), want)


def test_golden_sink_of_minus_infinity_has_no_effect() -> None:
    call = make(replace(PROBLEM, has_sink=True), band=Band.window(1, 0, "start"))
    assert call.sink is not None
    call.sink[2] = -INF  # and of its rows, some see no key
    agree(run(call), witness(call))


@pytest.mark.parametrize("form", ["full", "causal", "blocked", "bias"])
def test_golden_matches_torch_scaled_dot_product_attention(form: str) -> None:
    problem = replace(PROBLEM, bias="matrix" if form == "bias" else "none", has_blocked=form == "blocked")
    call = make(problem, (9, 6), (7, 8), Band.causal("start") if form == "causal" else None)
    for t in call.blocked:
        t[..., 0] = False
    for b, out in enumerate(forward(call)["out"]):
        mask = ~call.blocked[b] if call.blocked else call.bias[b] if call.bias else None
        want = torch.nn.functional.scaled_dot_product_attention(
            call.q[b], call.k[b], call.v[b], mask, is_causal=form == "causal", scale=0.4, enable_gqa=True
        )
        torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("softcap", [0.0, 0.9])
def test_golden_gradients_match_finite_differences(softcap: float) -> None:
    problem = Problem(2, 1, 2, 2, 1, "float64", 0.7, "matrix", True, has_sink=True, dropout="bits", keep_prob=0.6)
    problem = replace(problem, softcap=softcap)
    call = make(problem, (3,), (3,), Band.causal())
    gradients = run(call)
    step = 1e-5

    def objective() -> float:
        return float((forward(call)["out"][0] * call.dout[0]).sum())

    for name in ("q", "k", "v", "q_rope", "k_rope", "bias", "sink"):
        tensor = call.sink if name == "sink" else getattr(call, name)[0]
        slope = torch.empty_like(tensor)
        for at in np.ndindex(*tensor.shape):
            value = tensor[at].item()
            tensor[at] = value + step
            above = objective()
            tensor[at] = value - step
            slope[at] = (above - objective()) / (2 * step)
            tensor[at] = value
        torch.testing.assert_close(gradients[f"d{name}"][0], slope, rtol=1e-8, atol=1e-9)


# ------------------------------------------------------------------------------------------------------ reach of NaN


def expected_nan(call: Call, name: str, at: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Returns by result the rows (sequence 0) that are NaN if an input's row at[:2] (bias: element at) is."""
    p, heads = call.problem, torch.arange(call.problem.heads_q)
    visible, keep = seen_by(call, 0), keep_of(call, 0)
    mean = ~visible.any(-1, keepdim=True) & (p.empty_rows == "mean")
    weighed = (visible | mean) & keep  # where V is read
    of_kv_head = heads // p.group == at[0]
    struck = torch.zeros_like(visible[..., 0])  # rows with a NaN on their way to out; for dout, the row itself
    if name in ("k", "k_rope", "v"):
        struck = (weighed if name == "v" else visible)[:, :, at[1]] & of_kv_head[:, None]
    elif name == "bias":
        struck[at[0], at[1]] = visible[at]
    else:
        struck[at[0], at[1]] = name == "dout" or visible[at[0], at[1]].any()
    dscores = struck[:, :, None] & visible
    dv = {"v": torch.zeros_like(visible), "dout": struck[:, :, None] & weighed}.get(name, dscores & keep)

    def per_kv_head(pairs: torch.Tensor) -> torch.Tensor:
        return pairs.any(1).view(p.heads_kv, p.group, -1).any(1)

    none = torch.zeros_like(struck)
    return {
        "out": none if name == "dout" else struck,
        **dict.fromkeys(("max", "sum"), none if name in ("v", "dout") else struck),
        **dict.fromkeys(("dq", "dq_rope"), dscores.any(-1)),
        **dict.fromkeys(("dk", "dk_rope"), per_kv_head(dscores)),
        "dv": per_kv_head(dv),
        "dbias": dscores,
        "dsink": struck.any(1),
    }


@pytest.mark.parametrize("name", ["q", "k", "v", "dout", "q_rope", "k_rope", "bias"])
@pytest.mark.parametrize("form", ["zero", "mean"])
def test_golden_nan_reaches_exactly_the_dependent_results(name: str, form: str) -> None:
    fields = {"dim_rope": 2, "bias": "matrix", "has_blocked": True, "empty_rows": form, "has_sink": form == "zero"}
    call = make(replace(PROBLEM, **fields, **BITS), (5, 2), (6, 3), Band.window(3, 1))
    call.blocked[0][:, :, 3] = True  # a key that no row sees
    call.blocked[0][:, 1] = True  # a row that sees nothing
    call.keep[0][:, :, 2] = False  # a key that every row drops
    clean = run(call)
    shape = getattr(call, name)[0].shape
    positions = list(np.ndindex(*shape)) if name == "bias" else list(np.ndindex(*shape[:2]))
    # Every head and row of queries, every key of every head.
    for at in positions[:: {"bias": 7, "q": 3, "q_rope": 3, "dout": 3}.get(name, 1)]:
        poisoned = copy.deepcopy(call)
        getattr(poisoned, name)[0][at] = torch.nan
        got = run(poisoned)
        for result, wanted in expected_nan(call, name, at).items():
            if result not in got:
                continue
            value, untouched = got[result][0], clean[result][0]
            wanted = wanted.view(*wanted.shape, *[1] * (value.dim() - wanted.dim())).expand_as(value)
            assert torch.equal(value.isnan(), wanted), (name, at, result)
            torch.testing.assert_close(value[~wanted], untouched[~wanted], rtol=1e-12, atol=1e-12)
            if result != "dsink":
                assert torch.equal(got[result][1], clean[result][1]), (name, at, result)


@pytest.mark.parametrize("value", [INF, -INF])
def test_golden_visible_infinite_value_causes_infinite_output_and_finite_dv(value: float) -> None:
    call = make(PROBLEM, (6,), (6,), Band.causal())
    call.v[0][1, 4, 2] = value
    got, want = run(call), witness(call)
    agree({n: got[n] for n in ("out", "max", "sum")}, {n: want[n] for n in ("out", "max", "sum")} | {"out": got["out"]})
    assert torch.equal(got["out"][0][2:, 4:, 2], torch.full((2, 2), value, dtype=torch.float64))
    assert got["out"][0].isinf().sum() == 4
    assert got["dv"][0].isfinite().all()


# ------------------------------------------------------------------------------------------------ the saved statistics


def test_golden_gradients_of_key_halves_add_up_with_whole_statistics() -> None:
    full = make(replace(PROBLEM, has_sink=True), (5, 3), (8, 6))
    saved, want = forward(full), run(full)
    halves = []
    for half in range(2):
        call = copy.deepcopy(full)
        call.k, call.v = ([t.chunk(2, 1)[half] for t in side] for side in (full.k, full.v))
        call.extents = make(call.problem, (5, 3), (4, 3)).extents
        halves.append(run(call, saved))
    first, second = halves
    got = {n: [torch.cat(pair, 1) for pair in zip(first[n], second[n], strict=True)] for n in ("dk", "dv")}
    got["dq"] = [a + b for a, b in zip(first["dq"], second["dq"], strict=True)]
    got["dsink"] = first["dsink"]
    agree(got, {n: want[n] for n in got})


def test_golden_backward_of_empty_row_divides_by_saved_sum() -> None:
    call = make(replace(PROBLEM, has_blocked=True), (3,), (5,))
    call.blocked[0][:, 1] = True
    saved = forward(call)
    assert (saved["sum"][0][:, 1] == 0).all()
    saved["sum"][0][:, 1] = 10.0  # as if five more keys lay elsewhere
    zero, mean = run(call), run(call, saved)
    more = call.dout[0][:, 1].view(2, 2, 1, 5).sum(1) / 10
    agree({n: mean[n] for n in ("dq", "dk", "dv")}, {"dq": zero["dq"], "dk": zero["dk"], "dv": [zero["dv"][0] + more]})


# ------------------------------------------------------------------------------------------------------ operation kinds


def test_golden_rounds_only_stored_results() -> None:
    call = make(PROBLEM)
    operands = load(call, torch.bfloat16)
    operands = replace(operands, stats=Stats(*(buffer(call.q, 1, torch.float32) for _ in range(2))))
    golden.attention_forward(call.problem, call.extents, None, operands)
    exact = forward(call)
    for name, view in (("out", operands.out), ("max", operands.stats.max), ("sum", operands.stats.sum)):
        for stored, value in zip(read(view, call.q), exact[name], strict=True):
            assert torch.equal(stored, value.to(stored.dtype))


def test_golden_backward_writes_only_requested_gradients() -> None:
    call = make(replace(PROBLEM, dim_rope=2))
    saved, want = forward(call), run(call)
    operands = replace(load(call), out=rows(saved["out"]), stats=Stats(rows(saved["max"]), rows(saved["sum"])))
    dk = buffer(call.k, 6)
    golden.attention_backward(call.problem, call.extents, None, operands, Grads(rows(call.dout), None, dk, None))
    agree({"dk": read(dk, call.k)}, {"dk": want["dk"]})
