"""Routing of tokens to experts and back: torch_npu's functions are compared with loops that restate CANN's pages."""

from typing import Any

import numpy as np
import pytest
import torch
from support.bits import same_bits

from fusion_attention import npu
from fusion_attention.contract import ContractError, bind
from fusion_attention.ops.auxiliary_definitions import routing
from fusion_attention.testing.estimated_rounding_errors import compare_with

T, K, E, H = 7, 2, 5, 4


def routes() -> torch.Tensor:
    """[T, K] different experts of every token."""
    return torch.stack([torch.randperm(E)[:K] for _ in range(T)])


def sorted_choices(ids: torch.Tensor) -> list[int]:
    flat = ids.flatten().tolist()
    return sorted(range(len(flat)), key=lambda i: (flat[i], i))


@pytest.mark.parametrize("retained", [None, 0, 9, -3])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_moe_token_permute_and_unpermute_match_naive_loops_with_gradients(
    retained: int | None, dtype: torch.dtype
) -> None:
    tokens, ids = torch.randn(T, H, requires_grad=True), routes().to(dtype)
    order = sorted_choices(ids)
    rows, positions = npu.npu_moe_token_permute(tokens, ids, retained)
    wanted = order[:retained] if retained else order
    same_bits(rows, torch.stack([tokens[i // K] for i in wanted]))
    assert positions.dtype == torch.int32
    assert [positions[i].item() for i in order] == list(range(T * K))
    probs = torch.rand(T, K, dtype=torch.float64).float().requires_grad_()
    out = npu.npu_moe_token_unpermute(rows, positions, probs)
    there = torch.tensor([[place < len(wanted) for place in row] for row in positions.view(T, K).tolist()])
    dy = torch.randn_like(out)
    dtokens, dprobs = torch.autograd.grad(out, (tokens, probs), dy, retain_graph=True)
    drows, again = npu.npu_moe_token_unpermute_grad(rows.detach(), dy, positions, probs.detach())
    other = npu.npu_moe_token_permute_grad(tokens, drows, ids, positions)

    def golden() -> list[torch.Tensor]:
        leaves = x, p = [t.detach().double().requires_grad_() for t in (tokens, probs)]
        want = (x.unsqueeze(1) * (p * there).unsqueeze(2)).sum(1)
        dx, dp = torch.autograd.grad(want, leaves, dy.double())
        return [want, dx, dp, dx, dp]

    names = "[out, dtokens, dprobs, dtokens again, dprobs again]"
    compare_with(names, [out, dtokens, dprobs, other, again], golden)


def test_unpermute_gradients_have_dtypes_of_float32_probs_and_bfloat16_rows() -> None:
    rows = torch.randn(T * K, H).bfloat16().requires_grad_()
    probs = torch.rand(T, K, requires_grad=True)
    out = npu.npu_moe_token_unpermute(rows, torch.randperm(T * K), probs)
    out.float().sum().backward()
    assert (out.dtype, probs.grad.dtype, rows.grad.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)


@pytest.mark.parametrize("pads", [False, True])
def test_permute_and_unpermute_with_routing_map_match_naive_loops(pads: bool) -> None:
    where = torch.zeros(T, E, dtype=torch.bool).scatter(1, routes(), True)
    tokens, probs = torch.randn(T, H, requires_grad=True), torch.rand(T, E, requires_grad=True)
    count = 3 * E if pads else T * K
    rows, weights, positions = npu.npu_moe_token_permute_with_routing_map(
        tokens, where, probs=probs, num_out_tokens=count, drop_and_pad=pads
    )
    pairs = []
    for e in range(E):
        mine = [t for t in range(T) if where[t, e]]
        rest = [t for t in range(T) if not where[t, e]]
        pairs += [(e, t) for t in ((mine + rest)[:3] if pads else mine)]
    same_bits(rows, torch.stack([tokens[t] for _, t in pairs]))
    same_bits(weights, torch.stack([probs[t, e] for e, t in pairs]))
    if pads:
        assert positions.tolist() == [t for _, t in pairs]
    back = npu.npu_moe_token_unpermute_with_routing_map(
        rows, positions, [T, H], probs=probs, routing_map=where, drop_and_pad=pads
    )

    def golden() -> torch.Tensor:
        x, p = tokens.detach().double(), probs.detach().double()
        zero = torch.zeros(H, dtype=torch.float64)
        return torch.stack([sum((x[t] * p[t, e] for e, u in pairs if u == t), zero) for t in range(T)])

    compare_with("back", back, golden)
    (dtokens,) = torch.autograd.grad(rows.sum(), tokens)
    assert dtokens[:, 0].tolist() == [sum(t == u for _, u in pairs) for t in range(T)]


def test_gating_top_k_with_expert_groups_matches_naive_loops() -> None:
    x, bias = torch.randn(T, 8), torch.randn(8)
    y, expert, out = npu.npu_moe_gating_top_k(
        x, 3, bias=bias, k_group=2, group_count=4, group_select_mode=1, norm_type=1, routed_scaling_factor=2.5
    )
    chosen = []
    for t in range(T):
        scores = (1 / (1 + (-x[t].double()).exp())).tolist()
        biased = [s + b for s, b in zip(scores, bias.tolist(), strict=True)]
        groups = sorted(range(4), key=lambda g: -(biased[2 * g] + biased[2 * g + 1]))[:2]
        best = sorted((e for e in range(8) if e // 2 in groups), key=lambda e: -biased[e])[:3]
        assert expert[t].tolist() == best
        chosen.append(best)

    def golden() -> tuple[torch.Tensor, torch.Tensor]:
        scores = x.double().sigmoid()
        picked = scores.gather(1, torch.tensor(chosen))
        return 2.5 * picked / picked.sum(1, keepdim=True), scores

    compare_with("(y, out)", (y, out), golden)


def test_gating_by_softmax_marks_finished_tokens() -> None:
    x, finished = torch.randn(2, T, E), torch.rand(2, T) < 0.5
    y, expert, row = npu.npu_moe_gating_top_k_softmax(x, finished, 2)
    index = x.topk(2).indices
    compare_with("y", y, lambda: x.double().softmax(-1).gather(-1, index))
    assert torch.equal(expert, torch.where(finished.unsqueeze(-1), E, index).int())
    assert row.reshape(-1, 2)[:, 1].tolist() == list(range(2 * T, 4 * T))


@pytest.mark.parametrize("bounds", [(), (1, 4)])
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_init_routing_and_finalize_routing_match_naive_loops(bounds: tuple[int, ...], kind: int) -> None:
    x, ids = torch.randn(T, H), routes().int()
    start, end = bounds or (0, E)
    arguments: dict[str, Any] = {"expert_num": E, "active_expert_range": bounds, "expert_tokens_num_flag": True}
    rows, positions, counts, _ = npu.npu_moe_init_routing_v2(x, ids, **arguments, expert_tokens_num_type=kind)
    order = [i for i in sorted_choices(ids) if start <= ids.flatten()[i] < end]
    same_bits(rows[: len(order)], torch.stack([x[i // K] for i in order]))
    assert not rows[len(order) :].any()
    assert positions.tolist() == [order.index(i) if i in order else -1 for i in range(T * K)]
    each = [sum(ids.flatten().tolist()[i] == e for i in order) for e in range(start, end)]
    pairs = [[e, n] for e, n in zip(range(start, end), each, strict=True) if n]
    expected = {0: torch.tensor(each).cumsum(0).tolist(), 1: each, 2: pairs + [[0, 0]] * (E - len(pairs))}
    assert counts.tolist() == expected[kind]
    by_place = npu.npu_moe_init_routing_v2(x, ids, **arguments, row_idx_type=1)[1]
    others = [i for i in sorted_choices(ids) if ids.flatten()[i] >= end]
    below = [i for i, expert in enumerate(ids.flatten().tolist()) if expert < start]
    assert by_place.tolist() == order + others + below
    for blank in (torch.empty(0), torch.empty(0, dtype=torch.int8), torch.tensor(0.5)):
        args = {"x": x, "expert_idx": ids, "scale": blank, "offset": blank, **arguments}
        assert bind(routing.INIT, args)["scale"] is None
        same_bits(npu.npu_moe_init_routing_v2(**args)[0], rows)
    for form in (torch.tensor, np.array):
        other = npu.npu_moe_init_routing_v2(x, ids, **arguments | {"active_expert_range": form(bounds or (0, E))})
        same_bits(other[0], rows)
    scales, bias, skip = torch.rand(T, K), torch.randn(E, H), torch.randn(T, H)
    given = {2: positions, 0: positions.view(T, K).T.flatten()}
    for mode, result in given.items():
        out = npu.npu_moe_finalize_routing(rows, skip, None, bias, scales, result, ids, mode)

        def golden() -> torch.Tensor:
            there = torch.tensor([i in order for i in range(T * K)]).view(T, K, 1)
            given = x.double().unsqueeze(1) * there + bias.double()[ids.long()]
            return skip.double() + (scales.double().unsqueeze(2) * given).sum(1)

        compare_with("out", out, golden)


def test_active_expert_range_beyond_64_bits_is_refused() -> None:
    x, ids = torch.randn(T, H), routes().int()
    for bounds in ([-(2**63), 2**63 - 1], [2**63 - 1, -(2**63)]):
        with pytest.raises(ContractError, match=r"active_expert_range: expected \[start, end\)"):
            npu.npu_moe_init_routing_v2(
                x, ids, scale=torch.ones(E, H), quant_mode=1, expert_num=E, active_expert_range=bounds
            )


def test_dynamic_quantisation_of_rows_without_elements() -> None:
    arguments: dict[str, Any] = {"expert_num": E, "expert_idx": routes().int()}
    with pytest.raises(ContractError, match="x: expected rows with elements"):
        npu.npu_moe_init_routing_v2(torch.empty(T, 0), **arguments, quant_mode=1)
    assert npu.npu_moe_init_routing_v2(torch.empty(T, 0), **arguments)[0].shape == (T * K, 0)


def test_restore_shape_beyond_64_bits_is_refused() -> None:
    for shape in ([-(2**63), 2**63 - 1], [2**63 - 1, 4]):
        with pytest.raises(ContractError, match=r"restore_shape: expected|sorted_indices: expected the same number"):
            npu.npu_moe_token_unpermute_with_routing_map(torch.randn(12, 4), torch.arange(12).int(), shape)


def test_init_routing_quantises_rows() -> None:
    x, ids, scale = torch.randn(T, H), routes().int(), torch.rand(E, H) + 0.5
    arguments: dict[str, Any] = {"expert_num": E, "quant_mode": 1}
    rows, _, _, scales = npu.npu_moe_init_routing_v2(x, ids, scale=scale, **arguments)
    for i, choice in enumerate(sorted_choices(ids)):
        row = x[choice // K] * scale[ids.flatten()[choice]]
        assert scales[i] == row.abs().max() / 127
        assert rows[i].tolist() == (row / scales[i]).round().tolist()
