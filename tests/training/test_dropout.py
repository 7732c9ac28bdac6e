"""Dropout as torch_npu's programs use it: a mask together with a seed, generated masks, and torch's seeds."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch

import fusion_attention as fa
from fusion_attention import npu
from fusion_attention.contract import ContractError, ContractWarning
from fusion_attention.ir import dropout

SIZES = (2, 4, 5, 13)  # B, N1, S1, S2
KEEP = 0.7


def tensors(*, train: bool = False) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    shapes = (2, 5, 4, 16), (2, 13, 2, 16), (2, 13, 2, 16)
    return tuple(torch.randn(shape, generator=generator).requires_grad_(train) for shape in shapes)


def mask_of(seed: int, offset: int, *, size: tuple[int, ...] = SIZES, p: float = 1 - KEEP) -> torch.Tensor:
    return npu._npu_dropout_gen_mask(torch.empty(0), size, p, seed, offset, parallel=True, sync=False)


FORWARD = {1: npu.npu_fusion_attention, 2: npu.npu_fusion_attention_v2}
GRADIENT = {1: npu.npu_fusion_attention_grad, 2: npu.npu_fusion_attention_grad_v2, 3: npu.npu_fusion_attention_grad_v3}

# ---------------------------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("version", [1, 2])
def test_dropout_mask_with_matching_seed_equals_mask_drawn_from_seed(version: int) -> None:
    """The call returns seed and offset, from which the gradient functions draw the same bits."""
    q, k, v = tensors(train=True)
    call = FORWARD[version]
    weight = torch.randn(q.shape, generator=torch.Generator().manual_seed(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        given = call(q, k, v, 4, "BSND", keep_prob=KEEP, dropout_mask=mask_of(9, 2), seed=9, offset=2)
    alone = call(q, k, v, 4, "BSND", keep_prob=KEEP, dropout_mask=mask_of(9, 2))
    drawn = call(q, k, v, 4, "BSND", keep_prob=KEEP, seed=9, offset=2)
    assert given[4:] == drawn[4:] == (9, 2, 2 * 4 * 5 * 13)
    assert alone[4:] == (0, 0, 2 * 4 * 5 * 13)
    grads = [torch.autograd.grad(result[0], (q, k, v), weight) for result in (given, alone, drawn)]
    for other, theirs in zip((alone, drawn), grads[1:], strict=True):
        for one, two in zip((*given[:3], *grads[0]), (*other[:3], *theirs), strict=True):
            assert torch.equal(one, two)
    saved = {"softmax_max": given[1], "softmax_sum": given[2], "attention_in": given[0].detach(), "keep_prob": KEEP}
    replay = dict(zip(("seed", "offset", "numels"), given[4:], strict=True))
    with torch.no_grad():
        explicit = GRADIENT[version](q, k, v, weight, 4, "BSND", **saved, **replay)
        as_tensors = {name: torch.tensor([replay[name]]) for name in ("seed", "offset")}
        third = npu.npu_fusion_attention_grad_v3(q, k, v, weight, 4, "BSND", **saved, **as_tensors)
    for one, two, three in zip(explicit, third, grads[0], strict=False):
        assert torch.equal(one, three)
        assert torch.equal(two, three)


def test_dropout_mask_that_contradicts_seed_is_used_with_warning() -> None:
    """The gradient functions would draw another mask from the seed, which the warning reports."""
    q, k, v = tensors(train=True)
    mask = torch.randint(0, 256, (65,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    alone = npu.npu_fusion_attention(q, k, v, 4, "BSND", keep_prob=KEEP, dropout_mask=mask)[0]
    for args in ({"seed": 5}, {"offset": 5}):
        with pytest.warns(ContractWarning, match=r"dropout_mask: expected the bits that seed=\d, offset=\d draw"):
            given = npu.npu_fusion_attention(q, k, v, 4, "BSND", keep_prob=KEEP, dropout_mask=mask, **args)
        with npu.strict(), pytest.raises(ContractError, match="dropout_mask: expected the bits that"):
            npu.npu_fusion_attention(q, k, v, 4, "BSND", scale=0.25, keep_prob=KEEP, dropout_mask=mask, **args)
        assert torch.equal(given[0], alone)
        assert given[4:6] == (args.get("seed", 0), args.get("offset", 0))
        one, two = (torch.autograd.grad(out.sum(), k, retain_graph=True)[0] for out in (given[0], alone))
        assert torch.equal(one, two)


def test_packed_dropout_mask_with_matching_seed_equals_drawn_mask() -> None:
    q = torch.randn(8, 4, 16)
    ends = {"actual_seq_qlen": [0, 8], "actual_seq_kvlen": [0, 8]}
    drawn = npu.npu_fusion_attention(q, q, q, 4, "TND", keep_prob=KEEP, seed=9, offset=2, **ends)
    bits = dropout.keep_from_philox(9, 2, KEEP, 4, 4, slice(0, 8), slice(0, 8)).numpy()
    mask = torch.from_numpy(np.packbits(bits, bitorder="little"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        given = npu.npu_fusion_attention(q, q, q, 4, "TND", keep_prob=KEEP, dropout_mask=mask, seed=9, offset=2, **ends)
        nothing = {"actual_seq_qlen": [0, 0], "actual_seq_kvlen": [0, 0]}
        npu.npu_fusion_attention(*[q[:0]] * 3, 4, "TND", keep_prob=KEEP, dropout_mask=mask, seed=9, **nothing)
    assert torch.equal(given[0], drawn[0])
    with pytest.warns(ContractWarning, match="dropout_mask"):
        npu.npu_fusion_attention(q, q, q, 4, "TND", keep_prob=KEEP, dropout_mask=mask, seed=9, offset=3, **ends)


@pytest.mark.parametrize(
    "size", [(2, 4, 5, 13), (3, 7, 8), (5, 3), (17,), (1,), (), (2, 1, 3, 16), (1, 11, 200_003), (4, 0, 3), (128,)]
)
def test_dropout_gen_mask_bits_and_padding_match_philox_reference(size: tuple[int, ...]) -> None:
    *streams, rows, keys = (1, 1, *size)
    count = int(np.prod(size, dtype=np.int64))
    mask = mask_of(2**63 + 5, 7, size=size, p=0.4)
    assert (mask.dtype, mask.shape) == (torch.uint8, (-(-count // 128) * 16,))
    bits = np.unpackbits(mask.numpy(), bitorder="little")
    want = dropout.keep_from_philox(
        2**63 + 5, 7, 1 - 0.4, 0, int(np.prod(streams, dtype=np.int64)), slice(0, rows), slice(0, keys)
    )
    assert np.array_equal(bits[:count], want.numpy().reshape(-1)[:count])
    assert not bits[count:].any()
    for p, value in ((0, 1), (1, 0), (1.0, 0)):
        assert (np.unpackbits(mask_of(3, 0, size=size, p=p).numpy(), bitorder="little")[:count] == value).all()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"input": None}, "input: expected a tensor, got None"),
        ({"size": [2, -1]}, r"size: expected a list of sizes, got \[2, -1\]"),
        ({"size": 7}, "size: expected a list of sizes, got 7"),
        ({"size": [1.5]}, "size: expected"),
        ({"p": 1.5}, "p: expected a number from 0 to 1, got 1.5"),
        ({"p": float("nan")}, "p: expected a number from 0 to 1, got nan"),
        ({"p": "x"}, "p: expected a number from 0 to 1, got 'x'"),
        ({"seed": 2**64}, r"seed: expected an int below 2\*\*64"),
        ({"seed": 1.0}, r"seed: expected an int below 2\*\*64"),
        ({"offset": 2**32}, r"offset: expected 0 <= offset < 2\*\*32, got 4294967296"),
        ({"offset": -1}, r"offset: expected 0 <= offset < 2\*\*32, got -1"),
    ],
)
def test_dropout_gen_mask_refuses_invalid_arguments(change: dict[str, Any], text: str) -> None:
    args = {"input": torch.empty(0), "size": [2, 3], "p": 0.5, "seed": 1, "offset": 0}
    with pytest.raises(ContractError, match=f"^_npu_dropout_gen_mask: {text}"):
        npu._npu_dropout_gen_mask(**{**args, **change})


# ---------------------------------------------------------------------------------------------------- seeds and offsets

SEEDS = [-(2**63), -5, 2**63 - 1, 2**63, 2**64 - 5, 2**64 - 1]


@pytest.mark.parametrize("seed", SEEDS)
def test_unsigned_and_negative_seeds_of_equal_64_bits_draw_equal_masks(seed: int) -> None:
    q, k, v = tensors(train=True)
    other = seed + 2**64 if seed < 0 else seed - 2**64 if seed >= 2**63 else seed
    for backend in ("golden", "auto"):
        outs = [fa.attention(q, k, v, keep_prob=KEEP, seed=s, backend=backend) for s in (seed, other)]
        assert torch.equal(*outs)
    grads = [torch.autograd.grad(fa.attention(q, k, v, keep_prob=KEEP, seed=s).sum(), k)[0] for s in (seed, other)]
    assert torch.equal(*grads)
    one, two = (npu.npu_fusion_attention(q, k, v, 4, "BSND", keep_prob=KEEP, seed=s) for s in (seed, other))
    assert torch.equal(one[0], two[0])
    assert (one[4], two[4]) == (seed, other)
    saved = {"softmax_max": one[1], "softmax_sum": one[2], "attention_in": one[0].detach(), "keep_prob": KEEP}
    with torch.no_grad():
        explicit = npu.npu_fusion_attention_grad(q, k, v, one[0], 4, "BSND", **saved, seed=one[4])
    assert torch.equal(explicit[1], torch.autograd.grad(one[0], k, one[0])[0])


WRONG = {
    "seed": [(2**64, r"an int below 2\*\*64"), (-(2**63) - 1, r"an int below 2\*\*64"), (1.5, r"an int below 2\*\*64")],
    "offset": [(2**32, r"0 <= offset < 2\*\*32"), (-1, r"0 <= offset < 2\*\*32"), (2**63, r"an int below 2\*\*63")],
}


@pytest.mark.parametrize(
    ("name", "value", "text"), [(n, *wrong) for n, wrong_values in WRONG.items() for wrong in wrong_values]
)
def test_invalid_dropout_seeds_and_offsets_are_refused(name: str, value: Any, text: str) -> None:
    q, k, v = tensors()
    given = {"seed": 3, name: value}
    stats = torch.ones(2, 4, 5, 8)
    saved = {"softmax_max": stats, "softmax_sum": stats, "attention_in": q, "keep_prob": KEEP}
    calls = [lambda: fa.attention(q, k, v, keep_prob=KEEP, **given)]
    calls += [lambda call=call: call(q, k, v, 4, "BSND", keep_prob=KEEP, **given) for call in FORWARD.values()]
    calls += [lambda v_=v_: GRADIENT[v_](q, k, v, q, 4, "BSND", **saved, **given) for v_ in (1, 2)]
    for call in calls:
        with pytest.raises(ContractError, match=f"{name}: expected {text}"):
            call()
    if name == "offset" and value < 2**63:
        offset = torch.tensor([value])
        with pytest.raises(ContractError, match=f"^npu_fusion_attention_grad_v3: offset: expected {text}, got {value}"):
            npu.npu_fusion_attention_grad_v3(q, k, v, q, 4, "BSND", **saved, seed=torch.tensor([3]), offset=offset)


# -------------------------------------------------------------------------------------------------------- torch.compile


@pytest.mark.slow
def test_compiled_dropout_equals_eager_for_every_seed_and_mask() -> None:
    torch._dynamo.reset()
    q, k, v = tensors()

    def call(q: torch.Tensor, seed: int, offset: int, mask: torch.Tensor | None) -> Any:
        return npu.npu_fusion_attention(q, k, v, 4, "BSND", keep_prob=KEEP, seed=seed, offset=offset, dropout_mask=mask)

    fast = torch.compile(call, fullgraph=True, backend="aot_eager")
    for seed, offset in ((3, 0), (4, 7), (2**63 - 1, 2**32 - 1), (2**63, 1), (2**64 - 1, 0)):
        want = call(q, seed, offset, None)
        for mask in (None, mask_of(seed, offset)):
            got = fast(q, seed, offset, mask)
            assert torch.equal(got[0], want[0])
            assert got[4:6] == (seed, offset)
    with pytest.raises(Exception, match=r"offset: expected 0 <= offset < 2\*\*32"):
        fast(q, 3, 2**32, None)
    drawn = torch.compile(
        lambda q: npu._npu_dropout_gen_mask(q, SIZES, 1 - KEEP, 9, 2), fullgraph=True, backend="eager"
    )
    assert torch.equal(drawn(q), mask_of(9, 2))


def test_functional_gradient_refuses_dropout_seed_beyond_64_bits() -> None:
    q, k, v = tensors()
    with pytest.raises(TypeError, match=r"attention: seed: expected an int below 2\*\*63 \(a seed: 2\*\*64\)"):
        torch.func.grad(lambda q: fa.attention(q, k, v, keep_prob=KEEP, seed=2**64).sum())(q)
    gradient = torch.func.grad(lambda q: fa.attention(q, k, v, keep_prob=KEEP, seed=2**64 - 5).sum())(q)
    assert torch.equal(gradient, torch.func.grad(lambda q: fa.attention(q, k, v, keep_prob=KEEP, seed=-5).sum())(q))
