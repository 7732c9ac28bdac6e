"""The interfaces of training attention: torch's operators have the bits of eager calls, drawn dropout, and what a call
may not ask for is said clearly."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.bits import same_bits
from support.cases import BITS, CAUSAL, DRAWN, FLOATS, PACKED, Args, compute, operands
from support.compiled import Recorder
from torch.utils._pytree import tree_map_only

import fusion_attention as fa
from fusion_attention import npu
from fusion_attention.ops.training import definitions as training
from fusion_attention.testing import Case, call_interface

pytestmark = pytest.mark.filterwarnings("ignore::fusion_attention.ContractWarning")


def values_of(args: Args) -> Args:
    """The same call without strange strides, gaps, or NaN where no sequence lies."""
    return {n: torch.nan_to_num(t).contiguous().clone() if isinstance(t, torch.Tensor) else t for n, t in args.items()}


# ------------------------------------------------------------------------------------------------- interfaces, versions

LEAVES = {"query": "q", "key": "k", "value": "v", "query_rope": "q_rope", "key_rope": "k_rope", "sink": "sink"}


VERSIONS = {
    1: (npu.npu_fusion_attention, training.TORCH_V1, npu.npu_fusion_attention_grad, training.TORCH_GRAD_V1),
    2: (npu.npu_fusion_attention_v2, training.TORCH_V2, npu.npu_fusion_attention_grad_v2, training.TORCH_GRAD_V2),
    3: (npu.npu_fusion_attention_v3, training.TORCH_V3, npu.npu_fusion_attention_grad_v3, training.TORCH_GRAD_V3),
}


@pytest.mark.parametrize(
    "name", ["pse", "padding_mask", "atten_mask", "query_rope", "key_rope", "sink", "dropout_mask"]
)
@pytest.mark.parametrize("nothing", [torch.empty(0), torch.tensor(1.0)], ids=["empty", "0-dim"])
def test_an_empty_optional_tensor_was_not_given(name: str, nothing: torch.Tensor) -> None:
    args = operands(Case())
    forward, op, *_ = VERSIONS[2]
    want = call_interface(forward, op, args)
    got = forward(**{p.shown: args[p.name] for p in op.params if args.get(p.name) is not None}, **{name: nothing})
    for one, other in zip(got[:3], want[:3], strict=True):
        same_bits(one, other, name)


# ------------------------------------------------------------------------------------------------------------- dropout


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_drawn_seed_follows_torch_and_its_gradient_follows_it(version: int) -> None:
    case = replace(PACKED, dropout="philox", keep_prob=0.6)
    args = {**operands(case), "seed": 0, "offset": 0}
    forward, op, backward, grad_op = VERSIONS[version]
    leaves = {n: args[n].detach().requires_grad_() for n in ("query", "key", "value")}

    def once() -> tuple[Any, ...]:
        return call_interface(forward, op, {**args, **leaves})

    torch.manual_seed(3)
    first, second = once(), once()
    torch.manual_seed(3)
    again = once()
    assert int(first[4]) == int(again[4]) != int(second[4])
    same_bits(first[0], again[0], "same seed")
    assert not torch.equal(first[0], second[0])
    out, top, total, _, seed, offset, *numels = second
    saved = {"softmax_max": top, "softmax_sum": total, "attention_in": out.detach(), "seed": seed, "offset": offset}
    saved |= {"numels": numels[0]} if numels else {}
    explicit = call_interface(backward, grad_op, {**args, **saved})
    for one, other in zip(explicit, torch.autograd.grad(out, list(leaves.values()), args["dy"]), strict=False):
        same_bits(one, other, "regenerated")


def test_the_pythonic_api_draws_from_torch_too() -> None:
    q = torch.randn(1, 9, 2, 4)
    torch.manual_seed(5)
    first, second = (fa.attention(q, q, q, keep_prob=0.5) for _ in range(2))
    torch.manual_seed(5)
    same_bits(fa.attention(q, q, q, keep_prob=0.5), first, "manual_seed")
    assert not torch.equal(first, second)
    same_bits(fa.attention(q, q, q, keep_prob=0.5, seed=4), fa.attention(q, q, q, keep_prob=0.5, seed=4), "seed")


# ------------------------------------------------------------------------------------------------ torch.library, golden

OPCHECKED = [
    Case(),
    Case(dtype="bfloat16", mask="head", pse="full", sink=True, dim_rope=2, **BITS),
    Case(q_len=(0, 0), kv_len=(4, 4)),
    replace(PACKED, q_rest=1, pse="blocks", sink=True, **DRAWN),
    replace(PACKED, dim_v=5, pse="slopes_flat", pse_type=3, softmax_layout="TND", **CAUSAL),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", OPCHECKED, ids=lambda case: case.id)
def test_the_operators_that_torch_sees(case: Case) -> None:
    """They have the bits of the eager call, and pass torch's own checks, with gradients and without."""
    args = values_of(operands(case))
    want = compute(case, args)
    names = [n for n in FLOATS[:-1] if args[n] is not None and (n != "pse" or "dpse" in want)]
    leaves = [args[n].requires_grad_() for n in names]
    with Recorder() as recorder:
        out, top, total, *_ = call_interface(*VERSIONS[2][:2], args)
        gradients = torch.autograd.grad(out, leaves, args["dy"])
    results = ["dpse" if n == "pse" else f"d{LEAVES[n]}" for n in names]
    got = {"out": out.detach(), "max": top, "sum": total, **dict(zip(results, gradients, strict=True))}
    same_bits(got, want)
    (forward, given), (backward, saved) = recorder.calls
    assert (forward.__name__, backward.__name__) == ("lowered.default", "lowered_grad.default")
    torch.library.opcheck(forward, given)
    torch.library.opcheck(backward, tree_map_only(torch.Tensor, torch.Tensor.detach, saved))


def test_gradcheck_of_the_pythonic_api() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    def call(q: Any, k: Any, v: Any, q_rope: Any, k_rope: Any, bias: Any) -> torch.Tensor:
        ropes = {"q_rope": q_rope, "k_rope": k_rope, "band": fa.Band.causal(), "keep_prob": 0.7, "seed": 3}
        return fa.attention(q, k, v, bias=bias, backend="golden", **ropes)

    inputs = (draw(1, 3, 2, 2), draw(1, 4, 1, 2), draw(1, 4, 1, 3), draw(1, 3, 2, 1), draw(1, 4, 1, 1), draw(2, 3, 4))
    assert torch.autograd.gradcheck(call, inputs, fast_mode=False)


def test_gradients_only_for_what_asks() -> None:
    case = Case(pse="full", sink=True, dim_rope=2)
    args = operands(case)
    want = compute(case, args)
    for name, result in (("value", "dv"), ("pse", "dpse"), ("sink", "dsink"), ("key_rope", "dk_rope")):
        leaf = args[name].detach().requires_grad_()
        out = call_interface(*VERSIONS[2][:2], {**args, name: leaf})[0]
        same_bits(torch.autograd.grad(out, leaf, args["dy"])[0], want[result], result)
    assert not call_interface(*VERSIONS[2][:2], args)[0].requires_grad


def test_a_back_end_that_is_not_there() -> None:
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match=r"backend: expected one of auto, .*cpu.*golden, got 'gpu'"):
        fa.attention(q, q, q, backend="gpu")
    for bad in (["cpu"], {}, 5, None, torch.ones(2).numpy()):
        with pytest.raises(ValueError, match="backend: expected a name, got "):
            fa.attention(q, q, q, backend=bad)


@pytest.mark.parametrize("backend", ["auto", "cpu"])
def test_float64_needs_golden(backend: str) -> None:
    q = torch.randn(1, 4, 2, 8, dtype=torch.float64)
    with pytest.raises(
        fa.BackendError, match=r"no back end computes this call\. .*cpu back end computes dtype .*float64"
    ):
        fa.attention(q, q, q, backend=backend)
    assert fa.attention(q, q, q, backend="golden").dtype == torch.float64
