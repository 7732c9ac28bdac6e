"""Fused inference attention: worked examples of stored integers, computed elsewhere, to their printed digits."""

import math
from typing import Any

import pytest
import torch

from fusion_attention.contract import bind
from fusion_attention.ops.fused import definitions as fused
from fusion_attention.plan import compute

Tensor = torch.Tensor


def counted(*shape: int) -> Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)


def query(rows: int, heads: int) -> Tensor:
    return (0.37 * counted(1, rows, heads, 4) + 0.1).sin().float()


def key(rows: int) -> Tensor:
    return (0.23 * counted(1, rows, 1, 4)).cos().float()


def value(rows: int) -> Tensor:
    return (0.1 * counted(1, rows, 1, 4) - 1).float()


def run(record: Any = fused.TORCH_V2, **args: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call in layout BSND, each without its batch axis; lse [heads, rows]."""
    given = {"input_layout": "BSND", "scale_value": 0.5, "num_heads": args["query"].shape[2]}
    given |= {"num_key_value_heads": 1, "softmax_lse_flag": True}
    call = record.lower(bind(record, given | args))
    results = call.results()
    for t in results.values():
        t.view(torch.uint8).fill_(0xA5)
    compute(call, results, "golden")
    return results["attention_out"][0], results["softmax_lse"][0, ..., 0]


def near(got: Tensor, want: Any) -> None:
    torch.testing.assert_close(got.double(), torch.tensor(want, dtype=torch.float64), rtol=0, atol=1e-6)


def cycle(count: int, factor: int, more: int, size: int, less: int) -> Tensor:
    return ((factor * torch.arange(count) + more) % size - less).to(torch.int8)


K7, V7 = cycle(12, 7, 3, 17, 8).view(1, 3, 1, 4), cycle(12, 5, 1, 13, 6).view(1, 3, 1, 4)
KSCALE, KOFFSET = torch.tensor([0.1, 0.2, 0.05, 0.25]), torch.tensor([1, 0, -2, 0.5])
VSCALE, VOFFSET = torch.tensor([0.5, 0.25, 0.125, 1]), torch.tensor([0.0, 1, -1, 2])
KTOKEN, VTOKEN = torch.tensor([[0.1, 0.2, 0.3]]), torch.tensor([[1, 0.5, 0.25]])


@pytest.mark.parametrize(
    ("scales", "want", "lse"),
    [
        (
            {"key_antiquant_scale": KSCALE, "key_antiquant_offset": KOFFSET}
            | {"value_antiquant_scale": VSCALE, "value_antiquant_offset": VOFFSET},
            [[-1.758999, 0.224753, 0.487377, 0.482002], [-1.558671, 0.130089, 0.440045, 0.882659]],
            [[1.217850], [1.347446]],
        ),
        (
            {"antiquant_scale": torch.stack((KSCALE, VSCALE)), "antiquant_offset": torch.stack((KOFFSET, VOFFSET))},
            [[-1.758999, 0.224753, 0.487377, 0.482002], [-1.558671, 0.130089, 0.440045, 0.882659]],
            [[1.217850], [1.347446]],
        ),
        (
            {"key_antiquant_scale": KTOKEN, "value_antiquant_scale": VTOKEN}
            | {"key_antiquant_mode": 1, "value_antiquant_mode": 1},
            [[-1.525196, -0.368443, 1.916167, -0.611352], [-1.044411, -0.667332, 1.471115, -0.189032]],
            [[1.198690], [1.448293]],
        ),
        (
            {"antiquant_scale": torch.stack((KTOKEN, VTOKEN)), "antiquant_mode": 1},
            [[-1.525196, -0.368443, 1.916167, -0.611352], [-1.044411, -0.667332, 1.471115, -0.189032]],
            [[1.198690], [1.448293]],
        ),
        (
            {"key_antiquant_scale": KSCALE, "value_antiquant_scale": VTOKEN, "value_antiquant_mode": 1},
            [[-1.750897, -0.207899, 2.126593, -0.817100], [-1.467105, -0.392484, 1.863288, -0.564796]],
            [[1.191614], [1.306785]],
        ),
    ],
    ids=["a", "a combined", "b", "b combined", "c"],
)
def test_e7_stored_integers(scales: dict[str, Any], want: Any, lse: Any) -> None:
    out, got = run(fused.TORCH_V1, query=query(1, 2), key=K7, value=V7, **scales)
    near(out[0], want)
    near(got, lse)


def test_e7c_eight_integers_in_an_int32() -> None:
    word = torch.tensor([[[[0x7210FED8]]]], dtype=torch.int32)
    ones = torch.ones(1)
    out, _ = run(
        fused.TORCH_V1,
        query=torch.zeros(1, 1, 1, 8),
        key=word,
        value=word,
        key_antiquant_scale=ones,
        value_antiquant_scale=ones,
    )
    assert out.flatten().tolist() == [-8, -3, -2, -1, 0, 1, 2, 7]


FULL = {
    "query": cycle(16, 11, 5, 31, 15).view(1, 2, 2, 4),
    "key": cycle(12, 7, 3, 29, 14).view(1, 3, 1, 4),
    "value": cycle(12, 5, 1, 23, 11).view(1, 3, 1, 4),
    "dequant_scale1": torch.tensor([0.02]),
    "quant_scale1": torch.tensor([127.0]),
    "dequant_scale2": torch.tensor([0.004]),
}
FULL_OUT = [
    [[1.329101, -4.117551, -1.575593, 0.966364], [0.704342, -3.895601, -1.359039, 1.177523]],
    [[1.859700, -4.316381, -1.775854, 0.764674], [1.302400, -4.102769, -1.564545, 0.973680]],
]


def test_e8_int8_throughout() -> None:
    out, lse = run(fused.TORCH_V1, **FULL)
    assert out.dtype == torch.float16
    # Stored in half precision: what the rounded weights add to, 0.0015 and more, is seen all the same.
    torch.testing.assert_close(out.double(), torch.tensor(FULL_OUT).double(), rtol=2.0**-11, atol=0)
    near(lse, [[1.769445, 2.089338], [0.377127, 0.669146]])


def test_scales_of_64_bits_are_hardware_words() -> None:
    """Bits 13 to 31 of a word are a float32's upper ones: 0.02 is 0.019989..., and what stands above is not read."""
    short, words = dict(FULL), dict(FULL)
    for name in ("dequant_scale1", "dequant_scale2"):
        bits = FULL[name].view(torch.int32).to(torch.int64)
        short[name] = (bits & 0xFFFFE000).to(torch.int32).view(torch.float32)
        words[name] = (bits | 1 << 46).view(torch.uint64)
    assert short["dequant_scale1"].item() == 0.019989013671875
    assert all(map(torch.equal, run(fused.TORCH_V1, **words), run(fused.TORCH_V1, **short)))


def test_e8_int8_output() -> None:
    narrow = {"quant_scale2": torch.tensor([20.0]), "quant_offset2": torch.tensor([3.0])}
    out, _ = run(fused.TORCH_V1, **FULL, **narrow)
    rows = [[[30, -79, -29, 22], [17, -75, -24, 27]], [[40, -83, -33, 18], [29, -79, -28, 22]]]
    assert out.tolist() == rows


@pytest.mark.parametrize(
    ("divided", "want", "lse"),
    [
        (
            True,
            [[-0.595671, -0.245671, 0.104329, 0.454329], [-0.592951, -0.242951, 0.107049, 0.457049]],
            [[1.086982], [1.093411]],
        ),
        (False, [[-0.600017, -0.250017, 0.099983, 0.449983], []], [[1.106962], []]),
    ],
    ids=["divided", "not divided"],
)
def test_e10b_integer_latents(divided: bool, want: Any, lse: Any) -> None:
    scale, one = torch.tensor([[[0.02, 0.03]]]), torch.tensor([0.05])
    rope = ((0.9 * counted(1, 1, 2, 2)).sin() + 0.2).float()
    latent = cycle(12, 7, 3, 29, 14).view(1, 3, 1, 4)
    record = fused.TORCH_V2
    args = {
        "query": cycle(8, 11, 5, 31, 15).view(1, 1, 2, 4),
        "key": latent,
        "value": latent,
        "query_rope": rope / (scale[..., None] * 0.05) if divided else rope,
        "key_rope": (0.7 * counted(1, 3, 1, 2)).cos().float(),
        "dequant_scale_query": scale,
        "key_antiquant_scale": one,
        "value_antiquant_scale": one,
        "query_quant_mode": 3,
        "scale_value": 0.125,
    }
    out, got = run(record, **args)
    for head, (row, number) in enumerate(zip(want, lse, strict=True)):
        if row:
            near(out[0, head], row)
            near(got[head], number)
