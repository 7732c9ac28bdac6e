"""torch_npu's merge of partial results, and a ring as user programs build it on npu_fusion_attention."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.bits import same_bits
from support.pieces import Call, expected

from fusion_attention import ContractError, npu
from fusion_attention.ir.merge import Partial, empty_partial, join_sink, merge
from fusion_attention.judging.chi_square_limits import Expected
from fusion_attention.judging.expected_error import stored
from fusion_attention.testing import compare
from fusion_attention.testing.estimated_rounding_errors import compare_with

Tensor = torch.Tensor
HEADS, DIM = 4, 32
Q_LEN, KV_LEN = (5, 9), (6, 14)
INF, NAN = float("inf"), float("nan")
LANES = ("attention_out", "softmax_max", "softmax_sum")


def ends(lengths: tuple[int, ...]) -> list[int]:
    return torch.tensor(lengths).cumsum(0).tolist()


def rows(seed: int, tokens: int, layout: str, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (tokens, HEADS, DIM) if layout == "TND" else (tokens, 2, HEADS * DIM)
    return torch.randn(shape, generator=generator).to(dtype)


class Ring:
    """Two ring steps, over the first and the last keys of every sequence, as programs for the chip make them."""

    def __init__(self, layout: str, order: str, dtype: torch.dtype, causal: bool) -> None:
        packed = layout == "TND"
        self.q, self.dy = (rows(seed, sum(Q_LEN) if packed else 7, layout, dtype) for seed in (1, 2))
        self.k, self.v = (rows(seed, sum(KV_LEN) if packed else 10, layout, dtype) for seed in (3, 4))
        self.layout, self.order, self.causal = layout, order, causal
        first = torch.zeros(len(self.k), dtype=torch.bool)
        for end, length in zip(ends(KV_LEN) if packed else [10], KV_LEN if packed else [10], strict=True):
            first[end - length : end - length // 2] = True
        self.steps = [first, ~first]

    def lengths(self, step: int | None) -> dict[str, Any]:
        if self.layout != "TND":
            return {}
        halves = [[-(-n // 2) for n in KV_LEN], [n // 2 for n in KV_LEN]]
        keys = KV_LEN if step is None else tuple(halves[step])
        return {"actual_seq_qlen": ends(Q_LEN), "actual_seq_kvlen": ends(keys), "softmax_layout": self.order}

    def mask(self, step: int | None) -> dict[str, Any]:
        """Returns arguments with a padded mask matrix: row i sees keys up to i, counted over the two steps."""
        if not self.causal:
            return {}
        keys = torch.arange(10)
        visible_keys = keys if step is None else keys[self.steps[step]]
        return {"atten_mask": visible_keys[None] > torch.arange(7)[:, None], "sparse_mode": 1}

    def ordered(self, stats: Tensor) -> Tensor:
        """Returns statistics [tokens, heads] in the ring's order: by token, or packed by sequence and head."""
        if self.layout != "TND" or self.order == "TND":
            return stats
        return torch.cat([of_one.mT.reshape(-1, HEADS) for of_one in stats.split(Q_LEN)])

    def keys(self, step: int | None) -> tuple[Tensor, Tensor]:
        return (self.k, self.v) if step is None else (self.k[self.steps[step]], self.v[self.steps[step]])

    def forward(self, step: int | None) -> tuple[Tensor, ...]:
        call = {"scale": DIM**-0.5, **self.lengths(step), **self.mask(step)}
        return npu.npu_fusion_attention(self.q, *self.keys(step), HEADS, self.layout, **call)[:3]

    def backward(self, step: int | None, out: Tensor, max_: Tensor, sum_: Tensor) -> tuple[Tensor, ...]:
        saved = {"softmax_max": max_, "softmax_sum": sum_, "attention_in": out, "scale_value": DIM**-0.5}
        call = {**saved, **self.lengths(step), **self.mask(step)}
        return npu.npu_fusion_attention_grad(self.q, *self.keys(step), self.dy, HEADS, self.layout, **call)[:3]

    def merged(self, lengths: Any = None) -> tuple[Tensor, ...]:
        call: dict[str, Any] = {"input_layout": self.layout}
        if self.layout == "TND":
            call |= {"actual_seq_qlen": ends(Q_LEN) if lengths is None else lengths, "input_softmax_layout": self.order}
        return npu.npu_ring_attention_update(*self.forward(0), *self.forward(1), **call)


RINGS = [("SBH", "", True), ("SBH", "", False), ("TND", "", False), ("TND", "TND", False)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("layout", "order", "causal"), RINGS)
def test_ring_of_two_steps_matches_attention_over_all_keys(
    layout: str, order: str, causal: bool, dtype: torch.dtype
) -> None:
    """Gradients are computed from the merged statistics, and from their lse alone."""
    ring = Ring(layout, order, dtype, causal)
    merged, wanted = ring.merged(), of_two_steps(ring)
    for name, ours in zip(LANES, merged, strict=True):
        assert ours.dtype == (dtype if name == "attention_out" else torch.float32)
        compare(name, ours, wanted[name])
    for saved in (merged, lse_alone(*merged)):
        results = [ring.backward(step, *saved) for step in (0, 1)]
        ours = [
            (results[0][0].float() + results[1][0].float()).to(dtype),
            torch.zeros_like(ring.k),
            torch.zeros_like(ring.v),
        ]
        for keys, (_, *of_keys) in zip(ring.steps, results, strict=True):
            ours[1][keys], ours[2][keys] = of_keys
        for name, got in zip(("dq", "dk", "dv"), ours, strict=True):
            compare(name, got, wanted[name])


def of_two_steps(ring: Ring) -> dict[str, Expected]:
    """Returns expected results; error bounds include the rounding of each step's results to the dtype."""
    args: dict[str, Any] = {"q": ring.q, "k": ring.k, "v": ring.v, "layout": ring.layout, "scale": DIM**-0.5}
    if ring.layout == "TND":
        args |= {"q_len": Q_LEN, "kv_len": KV_LEN}
    else:
        args |= {"heads": HEADS, "blocked": ring.mask(None).get("atten_mask")}
    result = expected(Call(args, ring.dy))
    by_token = Ring(ring.layout, "TND", ring.q.dtype, ring.causal)
    variances = {name: result[name].size.square() for name in ("out", "dq")}
    merged = by_token.merged()
    for step in (0, 1):
        out, max_, sum_ = by_token.forward(step)
        weight = (max_[..., 0] + sum_[..., 0].log()).double() - result["lse"].value
        weight = (weight if ring.layout == "TND" else weight.movedim(-1, 0)).exp().repeat_interleave(DIM, -1)
        variances["out"] += weight.view(out.shape).square() * stored(out, out.dtype)
        dq = by_token.backward(step, *merged)[0]
        variances["dq"] += stored(dq, dq.dtype)
    for name, variance in variances.items():
        result[name] = Expected(result[name].value, variance.sqrt())
    lanes = {
        name: result[name].map(lambda t: ring.ordered(t)[..., None].expand(*t.shape, 8)) for name in ("max", "sum")
    }
    return result | {"attention_out": result["out"]} | {f"softmax_{name}": e for name, e in lanes.items()}


def lse_alone(out: Tensor, max_: Tensor, sum_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns statistics as other ring programs pass them: lse as the maximum, and a sum of 1."""
    return out, max_ + sum_.log(), torch.ones_like(sum_)


@pytest.mark.parametrize("order", ["", "TND"])
def test_ring_update_ignores_leading_zero_of_cumulative_lengths(order: str) -> None:
    ring = Ring("TND", order, torch.float32, False)
    same_bits(ring.merged(torch.tensor([0, *ends(Q_LEN)])), ring.merged())


@pytest.mark.parametrize("order", ["", "TND"])
def test_ring_update_with_empty_partial_returns_packed_partial_unchanged(order: str) -> None:
    ring = Ring("TND", order, torch.float32, False)
    out, max_, sum_ = ring.forward(0)
    nothing = torch.zeros_like(out), torch.full_like(max_, -torch.inf), torch.zeros_like(sum_)
    call = {"actual_seq_qlen": ends(Q_LEN), "input_layout": "TND", "input_softmax_layout": order}
    for steps in ((out, max_, sum_, *nothing), (*nothing, out, max_, sum_)):
        same_bits(npu.npu_ring_attention_update(*steps, **call), (out, max_, sum_))


def test_ring_update_of_rows_without_keys_keeps_the_other_partial() -> None:
    """If the row has no keys in the two partials, the first output stays."""
    ring = Ring("SBH", "", torch.float32, True)
    first = ring.forward(0)
    blind = npu.npu_fusion_attention(
        ring.q, *ring.keys(1), HEADS, "SBH", atten_mask=torch.ones(7, 5, dtype=torch.bool), sparse_mode=1
    )[:3]
    assert (blind[1] == -torch.finfo(torch.float32).max).all()
    same_bits(npu.npu_ring_attention_update(*first, *blind), first)
    same_bits(npu.npu_ring_attention_update(*blind, *first), first)
    out, max_, sum_ = npu.npu_ring_attention_update(*blind, *blind)  # means of five keys each
    same_bits([out, max_, sum_], [blind[0], blind[1], 2 * blind[2]])
    zeros = torch.zeros_like(out), blind[1], torch.full_like(sum_, torch.finfo(torch.float32).max)
    same_bits(npu.npu_ring_attention_update(*zeros, *zeros), zeros)
    same_bits(npu.npu_ring_attention_update(*zeros, *first), first)
    poisoned = [torch.full_like(t, NAN) for t in first]
    assert all(t.isnan().all() for t in npu.npu_ring_attention_update(*zeros, *poisoned))


# ----------------------------------------------------------------------------------------- merge of partial results


def partial(out: float, max_: float, sum_: float) -> Partial:
    return Partial(torch.full((1, 1, 2), out), torch.full((1, 1), max_), torch.full((1, 1), sum_))


@pytest.mark.parametrize(
    ("one", "other", "want"),
    [
        ((1.0, 0.0, 1.0), (3.0, 0.0, 1.0), (2.0, 0.0, 2.0)),
        ((1.0, 0.0, 1.0), (0.0, -INF, 0.0), (1.0, 0.0, 1.0)),  # saw no key
        ((0.0, -INF, 0.0), (0.0, -INF, 0.0), (0.0, -INF, 0.0)),
        ((1.0, -INF, 2.0), (4.0, -INF, 1.0), (2.0, -INF, 3.0)),  # means of two keys, and of one
        ((1.0, -INF, 2.0), (4.0, 5.0, 1.0), (4.0, 5.0, 1.0)),  # a mean beside a row with keys
        ((INF, -INF, 2.0), (4.0, 5.0, 1.0), (4.0, 5.0, 1.0)),
        ((4.0, 5.0, 1.0), (NAN, -INF, 2.0), (4.0, 5.0, 1.0)),
        ((1.0, 0.0, 1.0), (INF, -500.0, 1.0), (INF, 0.0, 1.0)),  # an infinity that is seen, however little it weighs
        ((NAN, NAN, NAN), (1.0, 0.0, 1.0), (NAN, NAN, NAN)),
        ((NAN, INF, NAN), (1.0, 0.0, 1.0), (NAN, INF, NAN)),
    ],
)
def test_merge_of_partials_handles_empty_rows_nan_and_infinity(one: Any, other: Any, want: Any) -> None:
    for first, second in ((one, other), (other, one)):
        into = partial(*first)
        merge(into, partial(*second))
        for got, value in zip(into, want, strict=True):
            assert torch.equal(got.nan_to_num(nan=7e7), torch.full_like(got, value).nan_to_num(nan=7e7)), (first, got)


def test_sink_joined_to_partial_acts_as_key_without_value() -> None:
    into = empty_partial(torch.zeros(1), (5, 2), 4)
    merge(into, Partial(torch.ones(5, 2, 4), torch.zeros(5, 2), torch.full((5, 2), 3.0)))
    join_sink(into, torch.tensor([0.0, -INF]))
    assert torch.equal(into.out, torch.tensor([0.75, 1.0])[:, None].expand(5, 2, 4))
    assert torch.equal(into.sum, torch.tensor([4.0, 3.0]).expand(5, 2))
    assert not into.max.any()


# ------------------------------------------------------------------------------------------------- merge over ranks


def test_attention_update_weights_ranks_by_softmax_of_lse() -> None:
    generator = torch.Generator().manual_seed(0)
    lse = 3 * torch.randn(3, 11, generator=generator)
    outs = torch.randn(3, 11, 16, generator=generator)
    lse[1, 2], lse[2, 2], lse[:, 5] = INF, -INF, -INF  # CANN's two words for a row that saw no key
    finite_lse = lse.double().masked_fill(lse == INF, -INF)

    def formula() -> tuple[Tensor, Tensor]:
        weights = finite_lse.softmax(0).nan_to_num()
        return (weights[..., None] * outs.double()).sum(0), finite_lse.logsumexp(0)

    out, total = npu.npu_attention_update(list(lse), list(outs), 1)
    compare_with("(out, lse)", (out, total), formula)
    alone, nothing = npu.npu_attention_update(list(lse), list(outs.bfloat16()), 0)
    assert nothing is None
    assert alone.dtype == torch.bfloat16


# ------------------------------------------------------------------------------------------------------ invalid input

GOOD: dict[str, Any] = {
    "prev_attn_out": torch.zeros(5, 4, 8), "cur_attn_out": torch.zeros(5, 4, 8), "input_layout": "TND",
    "actual_seq_qlen": [2, 5], **dict.fromkeys(
        ("prev_softmax_max", "prev_softmax_sum", "cur_softmax_max", "cur_softmax_sum"), torch.zeros(5, 4, 8)
    ),
}  # fmt: skip


# Errors of lengths, storages, devices and strides that all operators share are tested in tests/contract.


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"input_layout": "BSND"}, "input_layout: expected one of SBH, TND, got 'BSND'"),
        ({"input_softmax_layout": "BNSD"}, "input_softmax_layout: expected"),
        ({"cur_attn_out": torch.zeros(5, 4, 9)}, "cur_attn_out: expected axis 2 to be D=8 as in prev_attn_out, got 9"),
        ({"cur_attn_out": None}, "cur_attn_out: expected a value"),
        ({"prev_softmax_sum": torch.zeros(5, 4, 1)}, "prev_softmax_sum: expected axis 2 to be 8, got 1"),
        ({"cur_softmax_max": torch.zeros(5, 4, 8).half()}, "cur_softmax_max: expected float32"),
        ({"actual_seq_qlen": None}, "actual_seq_qlen: expected cumulative ends"),
        ({"actual_seq_qlen": [5, 2]}, r"actual_seq_qlen: expected .* got actual_seq_qlen=\[5, 2\]"),
        ({"actual_seq_qlen": [-1, 5]}, "actual_seq_qlen: expected"),
        ({"actual_seq_qlen": [2, 6]}, "actual_seq_qlen: expected ascending cumulative ends"),
        ({"prev_attn_out": torch.zeros(6, 4, 8), "cur_attn_out": torch.zeros(6, 4, 8)}, "prev_softmax_max: expected a"),
        ({"input_layout": "SBH"}, r"prev_softmax_max: expected 4 dimensions \[L, N, S, 8\] in layout SBH"),
        ({"prev_attn_out": torch.tensor(0.0)}, r"prev_attn_out: expected 3 dimensions .* got 0 dimensions"),
    ],
)
def test_ring_update_refuses_invalid_arguments(change: dict[str, Any], text: str) -> None:
    npu.npu_ring_attention_update(**GOOD)
    with pytest.raises(ContractError, match=f"npu_ring_attention_update: {text}"):
        npu.npu_ring_attention_update(**{**GOOD, **change})


@pytest.mark.parametrize(
    ("lse", "outs", "kind", "text"),
    [
        ([], [], 0, "lse: expected a tensor or a list of tensors"),
        (torch.zeros(2, 3), [torch.zeros(3, 8)], 0, r"lse: expected tensors \[rows\], one per rank"),
        ([torch.zeros(3)], [torch.zeros(3, 8)] * 2, 0, "lse: expected as many tensors as local_out has"),
        ([torch.zeros(3)] * 2, [torch.zeros(3, 8), torch.zeros(3, 9)], 0, r"local_out: expected tensors \[rows, D\]"),
        ([torch.zeros(3), torch.zeros(4)], [torch.zeros(3, 8)] * 2, 0, r"lse: expected tensors \[rows\], one per rank"),
        ([torch.zeros(3).half()], [torch.zeros(3, 8)], 0, "lse: expected float32, got float16"),
        ([torch.zeros(3)], [torch.zeros(3, 8)], 2, r"update_type: expected update_type in \(0, 1\), got 2"),
        ([torch.zeros(3)], [torch.zeros(3, 8).int()], 0, "local_out: expected float16 or bfloat16 or float32"),
        ([torch.zeros(3)], 100, 0, "local_out: expected a tensor or a list of tensors, got 100"),
        ([torch.zeros(3)], [torch.zeros(3, 8)], torch.tensor([0, 1]), "update_type: expected an int"),
    ],
)
def test_attention_update_refuses_invalid_arguments(lse: Any, outs: Any, kind: int, text: str) -> None:
    with pytest.raises(ContractError, match=f"npu_attention_update: {text}"):
        npu.npu_attention_update(lse, outs, kind)


def test_ring_and_attention_update_refuse_inputs_that_require_grad() -> None:
    out = torch.zeros(5, 4, 8, requires_grad=True)
    calls: list[Callable[[], Any]] = [
        lambda: npu.npu_ring_attention_update(**{**GOOD, "prev_attn_out": out}),
        lambda: npu.npu_attention_update([torch.zeros(5)], [out[:, 0]], 0),
    ]
    for call in calls:
        with pytest.raises(ContractError, match=r"does not require a gradient.*detach\(\)"):
            call()
        with torch.no_grad():
            call()
