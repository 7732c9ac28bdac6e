"""Values that are not finite reach the same rows as in golden: kernels that recompute, under Triton's interpreter."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from support import paged_decode_calls
from support.bits import same_bits
from support.cases import BITS, CAUSAL, DRAWN
from support.paged_decode_calls import Cache, answer, operands_on, results

from fusion_attention.backends import triton as backend
from fusion_attention.judging.chi_square_limits import Expected
from fusion_attention.testing import Case, arguments, check, expected, golden, lowered, part, run

pytestmark = pytest.mark.filterwarnings("ignore::fusion_attention.contract.ContractWarning")

NAMES = ("query", "key", "value", "query_rope", "key_rope", "dy")
FILLS = (math.nan, math.inf, -math.inf)
CASES = [
    Case(
        q_len=(3, 20),
        kv_len=(4, 20),
        heads_q=2,
        heads_kv=1,
        dim_rope=2,
        mask="head",
        blank=True,
        pse="full",
        pse_type=0,
        **BITS,
    ),
    Case("BNSD", "bfloat16", (2, 20), (2, 20), 2, 1, dim_qk=24, dim_v=40, dim_rope=2, sink=True, **CAUSAL),
    Case(
        "TND", "float16", (3, 20), (5, 20), 2, 1, dim_rope=2, sparse_mode=4, mask="compressed", pre=1, next=1, **DRAWN
    ),
    # Empty rows that return the mean of V see every key.
    Case("BNSD", q_len=(4, 9), kv_len=(4, 20), heads_q=2, heads_kv=1, dim_rope=2, mask="head", blank=True, **DRAWN),
    # Computed by the decode kernels, without a cache.
    Case(q_len=(2, 3), kv_len=(8, 520), heads_q=2, heads_kv=1, dim_rope=2, mask="head", inner_precise=2),
]
EVERYDAY = [(CASES[1], "key", math.inf), (CASES[3], "value", math.nan), (CASES[0], "dy", math.inf)]
BENT = dataclasses.replace(CASES[0], softcap=0.9)  # where an infinite product is a finite score
EVERYDAY += [(BENT, "key", math.inf)]
REST = [(BENT, "query", math.nan), *((case, name, fill) for case in CASES for name in NAMES for fill in FILLS)]
REST = [item for item in REST if item not in EVERYDAY]


@pytest.mark.parametrize(
    ("case", "name", "fill"), [*EVERYDAY, *(pytest.param(*item, marks=pytest.mark.slow) for item in REST)]
)
def test_triton_nan_or_infinite_element_reaches_exactly_the_reference_rows(case: Case, name: str, fill: float) -> None:
    """Changes one element of one head's row, in the middle of a tile."""
    args = arguments(case)
    calm = {name: t.clone() if isinstance(t, torch.Tensor) else t for name, t in args.items()}
    side, heads = ("kv", case.heads_kv) if name in ("key", "value", "key_rope") else ("q", case.heads_q)
    row = part(case, args[name], side, heads, 1)[heads - 1, 1]
    row[0] = -fill
    opposite = golden(case, args)
    row[0] = fill
    want = golden(case, args)
    # A value that makes all scores of a row or key -inf masks it: for one of the signs results may be finite.
    assert any(not t.isfinite().all() for t in (*want.values(), *opposite.values()))
    check(case.id, run(lowered(case, args), args["dy"], "triton"), expected(case, calm, want))


@pytest.mark.parametrize("largest", [300.0, 3000.0])
@pytest.mark.parametrize("name", ["value", "dy"])
def test_triton_infinity_survives_underflowing_attention_weight(name: str, largest: float) -> None:
    """exp(-300) is no float32, exp(-3000) no float64. Keys with a score of -inf are not visible."""
    case = Case(q_len=(3,), kv_len=(20,), heads_q=2, heads_kv=1, scale=1.0, dim_qk=4)
    args = arguments(case)
    args["query"].fill_(1.0), args["key"].zero_()
    args["key"][0, 17:19, 0, 0] = largest  # these two share all that a float holds
    calm = {name: t.clone() if isinstance(t, torch.Tensor) else t for name, t in args.items()}
    args["key"][0, 3, 0, 0] = -math.inf
    args[name][0, 2, 0, 1] = -math.inf
    if name == "value":
        args[name][0, 3, 0, 2] = math.inf
    want = golden(case, args)
    assert want["out"][..., 2].isfinite().all()
    reached = want["out"][..., 1] if name == "value" else want["dv"][0, :, 0, 1]
    assert (reached == -math.inf).sum() == (6 if name == "value" else 19)
    got = run(lowered(case, args), args["dy"], "triton")
    assert torch.equal(got["dq"].isfinite(), want["dq"].isfinite())
    wanted = expected(case, calm, want)
    for result in (got, wanted):  # of whose numbers cancelling leaves nothing but rounding
        del result["dq"]
    check(case.id, got, wanted)


TWO = {"heads_q": 2, "heads_kv": 1}
MASKED = [
    Case(q_len=(3, 20), kv_len=(20, 24), dim_rope=2, pse="full", pse_type=0, **TWO, **BITS),
    Case("BNSD", "bfloat16", (5, 5), (20, 20), dim_qk=24, dim_v=40, pse="row", sink=True, **TWO, **CAUSAL),
    Case("TND", "float16", (2, 6), (9, 20), pse="row_blocks", mask="matrix", blank=True, inner_precise=2, **TWO),
    # Computed by the decode kernels, without a cache.
    Case(q_len=(2, 3), kv_len=(8, 40), pse="shared_full", pse_type=0, inner_precise=2, **TWO),
]


def masked(case: Case, name: str, fill: float) -> dict[str, Any]:
    """Returns arguments: pse is -inf at the last two keys, which hold `fill`, and at key 0 for the last row."""
    args, first = arguments(case), 0
    part(case, args["query"], "q", case.heads_q, 1)[..., 0].abs_()
    for b, (rows, keys) in enumerate(zip(case.q_len, case.kv_len, strict=True)):
        if case.packed:
            pse = args["pse"][first : first + case.heads_q * keys].view(case.heads_q, 1, keys)
            first += pse.numel()
        else:
            pse = args["pse"][b % args["pse"].shape[0], ..., :rows, :keys]
        pse[..., -2:] = -math.inf
        if pse.shape[1] > 1:
            pse[:, -1, 0] = -math.inf
        if b:
            part(case, args[name], "kv", case.heads_kv, b)[:, -2:, :1] = fill
    return args


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("name", "fill"),
    [
        ("value", math.nan),
        ("key", -math.inf),
        *(pytest.param("value", fill, marks=pytest.mark.slow) for fill in FILLS if not math.isnan(fill)),
    ],
)
@pytest.mark.parametrize("case", MASKED, ids=lambda case: case.id)
def test_triton_float_mask_hides_nan_and_infinity(case: Case, name: str, fill: float) -> None:
    """Includes keys with an infinite element that alone makes the score -inf."""
    args = masked(case, name, fill)
    want = golden(case, args)
    assert all(t.isfinite().all() for t in want.values())
    check(case.id, run(lowered(case, args), args["dy"], "triton"), expected(case, masked(case, name, 0.0), want))


@pytest.mark.parametrize("fill", [FILLS[0], *(pytest.param(fill, marks=pytest.mark.slow) for fill in FILLS[1:])])
@pytest.mark.parametrize(
    "cache",
    [
        Cache((37, 20), q_len=3, heads_q=8, dim_qk=24, dim_v=40, more={"dim_rope": 16, "has_sink": True}),
        Cache((18, 40), q_len=4, dtype="float16", dequant="token", more={"bias": "slopes"}),
        Cache((18, 40), q_len=4, dtype="bfloat16", dequant="channel"),
    ],
    ids=lambda cache: cache.id,
)
def test_triton_decode_of_nan_or_infinite_cached_value_matches_reference(cache: Cache, fill: float) -> None:
    """Changes the last key of each sequence, which only the last row sees."""
    p, e, operands = cache.problem, cache.extents(), operands_on(cache, "cpu")
    calm = paged_decode_calls.expected(cache, operands, e)
    wild = operands.dequant_v.scale if operands.dequant_v is not None else operands.v
    if cache.dequant == "channel":
        wild.keep[0][0, 1] = fill  # type: ignore[union-attr]
    else:
        for b, n in enumerate(cache.kv_len):
            page = wild.table[b, (n - 1) // wild.page_size]  # type: ignore[union-attr]
            wild.pool[page, (n - 1) % wild.page_size, 0, 0] = fill  # type: ignore[union-attr]
    backend.attention_forward(p, e, backend.schedule(p, e, "attention_forward"), operands)
    assert operands.out.keep[0].isfinite().any()
    want = dict(zip(paged_decode_calls.NAMES, answer(cache, operands, e), strict=True))
    wanted = {name: Expected(want[name], one.size) for name, one in calm.items()}
    check(cache.id, dict(zip(paged_decode_calls.NAMES, results(operands), strict=True)), wanted)


def test_recompute_kernels_do_not_change_finite_results(monkeypatch: pytest.MonkeyPatch) -> None:
    case = dataclasses.replace(CASES[0], dtype="float32")
    args = arguments(case)
    recomputed = run(lowered(case, args), args["dy"], "triton")
    monkeypatch.setattr("fusion_attention.backends.triton.dense.launch.launch_recompute", lambda *_: [])
    plainly = run(lowered(case, args), args["dy"], "triton")
    same_bits(recomputed, plainly)
