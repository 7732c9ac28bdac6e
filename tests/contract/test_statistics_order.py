"""Statistics of packed rows in another layout than the gradient expects: reported if scores show it, else accepted."""

from typing import Any

import pytest
import torch
from clauses.training_formulas import TRIANGLE
from support.two_phase import Args

from fusion_attention import npu
from fusion_attention.contract import ContractError, bind
from fusion_attention.ops import RECORDS

pytestmark = pytest.mark.usefixtures("runtime")
GRAD = RECORDS["npu_fusion_attention_grad_v2"]
Q_ENDS, KV_ENDS = [5, 5, 12, 40], [9, 12, 12, 45]  # rows without keys, keys without rows
OTHER = {"": "TND", "TND": ""}


def removed(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(3)) < 0.5


CAUSAL: Args = {"atten_mask": TRIANGLE, "sparse_mode": 3}
MODES: dict[str, Args] = {
    "full": {},
    "causal": CAUSAL,
    "causal from the upper left": {"atten_mask": TRIANGLE, "sparse_mode": 2},
    "window": {"atten_mask": TRIANGLE, "sparse_mode": 4, "pre_tokens": 6, "next_tokens": 1},
    "mask": {"atten_mask": removed(28, 33), "sparse_mode": 1},
    "mask of all heads": {"atten_mask": removed(1, 1, 28, 33), "sparse_mode": 1},
    "mask of each head": {"atten_mask": removed(4, 4, 28, 33), "sparse_mode": 1},
    "mask of all tokens": {"atten_mask": removed(40, 45), "sparse_mode": 1},
    "sink": {"sink": torch.linspace(-1, 2, 4)},
    "rope": {**CAUSAL, "query_rope": torch.randn(40, 4, 8), "key_rope": torch.randn(45, 2, 8)},
}


def arguments(
    heads: int = 4, groups: int = 2, q_ends: list[int] = Q_ENDS, kv_ends: list[int] = KV_ENDS, **more: Any
) -> Args:
    generator = torch.Generator().manual_seed(5)
    shapes = {"query": (q_ends[-1], heads), **dict.fromkeys(("key", "value"), (kv_ends[-1], groups))}
    tensors = {name: torch.randn(*shape, 16, generator=generator) for name, shape in shapes.items()}
    lengths = {"actual_seq_qlen": q_ends, "actual_seq_kvlen": kv_ends}
    return {**tensors, "head_num": heads, "input_layout": "TND", **lengths, "scale": 0.25, **more}


def saved(args: Args, layout: str) -> Args:
    """Runs the forward with a statistics layout; returns the arguments of the gradient."""
    out, peak, total, *_ = npu.npu_fusion_attention_v2(**args, softmax_layout=layout)
    return {**args, "dy": torch.zeros_like(out), "attention_in": out, "softmax_max": peak, "softmax_sum": total}


def verdict(args: Args, layout: str, **options: bool) -> str:
    """Binds the gradient with a statistics layout; returns the error text, or ""."""
    try:
        bind(GRAD, args | {"softmax_layout": layout}, **({"check_content": True} | options))
    except ContractError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("layout", OTHER)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_in_the_wrong_softmax_layout_are_detected(dtype: torch.dtype, mode: str, layout: str) -> None:
    args = arguments(**MODES[mode])
    args |= {
        name: t.to(dtype)
        for name, t in args.items()
        if isinstance(t, torch.Tensor) and t.dtype == torch.float32 and name != "sink"
    }
    given = saved(args, layout)
    assert not verdict(given, layout)
    assert not verdict(given, OTHER[layout], check_content=False)
    text = verdict(given, OTHER[layout])
    assert "softmax_max: expected statistics in the order of softmax_layout" in text
    assert "keys that add up to" in text
    assert "; the other order fits (pass the forward's statistics and its softmax_layout" in text


@pytest.mark.parametrize("layout", OTHER)
def test_statistics_over_keys_of_all_shards_pass_in_right_layout_only(layout: str) -> None:
    """In ring attention statistics cover the keys of all shards, but the gradient receives the keys of one."""
    ends = [7, 16]
    full = saved(arguments(q_ends=ends, kv_ends=[14, 32]), layout)
    first = torch.cat([torch.arange(7), torch.arange(14, 23)])
    for shard in (first, first + torch.tensor([7] * 7 + [9] * 9)):
        shard_of_keys = {name: full[name][shard] for name in ("key", "value")}
        local = full | shard_of_keys | {"actual_seq_kvlen": ends}
        assert not verdict(local, layout)
        assert "keys that add up to" in verdict(local, OTHER[layout])
    spread = {"softmax_max": full["softmax_max"] - 3, "softmax_sum": full["softmax_sum"] * 20.085537}
    assert not verdict(full | spread, layout), "any max and sum of the right log-sum are legal"


@pytest.mark.parametrize(
    "changes", [{"heads": 1, "groups": 1}, {"q_ends": [1, 2, 3], "kv_ends": [4, 9, 20]}, {"kv_ends": [0, 0, 0, 0]}]
)
def test_statistics_pass_in_each_layout_if_the_layouts_coincide(changes: Args) -> None:
    args = arguments(**changes)
    for layout in OTHER:
        given = saved(args, layout)
        assert not verdict(given, layout)
        assert not verdict(given, OTHER[layout])


def test_statistics_layout_is_checked_for_a_single_sequence() -> None:
    given = saved(arguments(q_ends=[40], kv_ends=[45]), "")
    assert not verdict(given, "")
    assert verdict(given, "TND")


def test_statistics_layout_is_not_reported_if_scores_cannot_decide() -> None:
    """Cases: equal rows; statistics that no forward returns in any layout; a bias, which the check does not include."""
    args = arguments()
    even = saved(args | {name: torch.ones_like(args[name]) for name in ("query", "key")}, "")
    assert not verdict(even, "")
    for broken in (torch.full((40, 4, 8), -9.0), torch.full((40, 4, 8), float("nan")), torch.zeros(40, 4, 8)):
        given = saved(args, "") | {"softmax_max": broken}
        assert not any(verdict(given, layout) for layout in OTHER)
    pse = {"pse": torch.linspace(0, 9, 4), "pse_type": 2}
    biased = saved(args | pse, "")
    assert not any(verdict(biased, layout) for layout in OTHER)
