"""Fused inference attention: worked examples, computed elsewhere; golden matches all printed digits."""

import math
from typing import Any

import pytest
import torch
from support import run_inference_calls

from fusion_attention.contract import bind
from fusion_attention.ops.fused import definitions as fused

Tensor = torch.Tensor
INF = math.inf
COLUMNS = torch.arange(4) / 10  # of values: an output row is its first element and these


def counted(*shape: int) -> Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)


def query(rows: int, heads: int) -> Tensor:
    return (0.37 * counted(1, rows, heads, 4) + 0.1).sin().float()


def key(rows: int) -> Tensor:
    return (0.23 * counted(1, rows, 1, 4)).cos().float()


def value(rows: int) -> Tensor:
    return (0.1 * counted(1, rows, 1, 4) - 1).float()


def run(record: Any = fused.TORCH_V2, **args: Any) -> tuple[Tensor, Tensor]:
    """Returns out and lse [heads, rows] of a call in layout BSND, without the batch axis."""
    given = {"input_layout": "BSND", "scale_value": 0.5, "num_heads": args["query"].shape[2]}
    given |= {"num_key_value_heads": 1, "softmax_lse_flag": True}
    results = run_inference_calls.run(record.lower(bind(record, given | args)), "golden")
    return results["attention_out"][0], results["softmax_lse"][0, ..., 0]


def near(got: Tensor, want: Any) -> None:
    torch.testing.assert_close(got.double(), torch.as_tensor(want, dtype=torch.float64), rtol=0, atol=1e-6)


def padded(rows: Tensor, slots: int, first: int, end: int) -> Tensor:
    """Returns the rows from `first` to `end` in a tensor of more slots, which holds NaN elsewhere."""
    result = torch.full((1, slots, 1, 4), math.nan)
    result[:, first:end] = rows[:, first:end]
    return result


def cycle(count: int, factor: int, more: int, size: int, less: int) -> Tensor:
    return ((factor * torch.arange(count) + more) % size - less).to(torch.int8)


TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu_(1)
ZEROS = torch.zeros(3, 4, dtype=torch.bool)
CAUSAL = {"sparse_mode": 3, "atten_mask": TRIANGLE}
K7, V7 = cycle(12, 7, 3, 17, 8).view(1, 3, 1, 4), cycle(12, 5, 1, 13, 6).view(1, 3, 1, 4)
STORED = {"record": fused.TORCH_V1, "query": query(1, 2), "key": K7, "value": V7}
KSCALE, KOFFSET = torch.tensor([0.1, 0.2, 0.05, 0.25]), torch.tensor([1, 0, -2, 0.5])
VSCALE, VOFFSET = torch.tensor([0.5, 0.25, 0.125, 1]), torch.tensor([0.0, 1, -1, 2])
KTOKEN, VTOKEN = torch.tensor([[0.1, 0.2, 0.3]]), torch.tensor([[1, 0.5, 0.25]])
BY_CHANNEL = [[-1.758999, 0.224753, 0.487377, 0.482002], [-1.558671, 0.130089, 0.440045, 0.882659]]
BY_TOKEN = [[-1.525196, -0.368443, 1.916167, -0.611352], [-1.044411, -0.667332, 1.471115, -0.189032]]
LATENT = cycle(12, 7, 3, 29, 14).view(1, 3, 1, 4)
Q_SCALE = torch.tensor([[[0.02, 0.03]]])
Q_ROPE = ((0.9 * counted(1, 1, 2, 2)).sin() + 0.2).float()
LATENTS = {
    "query": cycle(8, 11, 5, 31, 15).view(1, 1, 2, 4),
    "key": LATENT,
    "value": LATENT,
    "key_rope": (0.7 * counted(1, 3, 1, 2)).cos().float(),
    "dequant_scale_query": Q_SCALE,
    **dict.fromkeys(("key_antiquant_scale", "value_antiquant_scale"), torch.tensor([0.05])),
    "query_quant_mode": 3,
    "scale_value": 0.125,
}
ONE = torch.tensor([1])
# Arguments; out[row][head], where a number x stands for the row x + COLUMNS; lse[head].
EXAMPLES: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "E1": (
        {"query": query(3, 2), "key": key(4), "value": value(4), **CAUSAL},
        [[-0.875115, -0.883973], [-0.434962, -0.322363], [-0.566390, -0.838391]],
        [[1.339086, 1.183920, 1.314216], [1.791155, 1.165128, 2.017978]],
    ),
    "E1b": (
        {"query": query(3, 2), "key": key(4), "value": value(4), "sparse_mode": 2, "atten_mask": TRIANGLE},
        [[-1.000000] * 2, [-0.739232], [-0.712492]],
        [[0.964812, 0.353198, 1.139727], [1.448572, -0.256156, 1.994320]],
    ),
    "E1b by a window": (
        {"query": query(3, 2), "key": key(4), "value": value(4), "atten_mask": ZEROS, "next_tokens": 0},
        [[-1.000000] * 2, [-0.739232], [-0.712492]],
        [[0.964812, 0.353198, 1.139727], [1.448572, -0.256156, 1.994320]],
    ),
    "E2, rows before the first key": (
        {"query": query(4, 1), "key": key(2), "value": value(2), **CAUSAL},
        [[[0.0] * 4], [[0.0] * 4], [-1.000000], [-0.706882]],
        [[INF, INF, -0.702123, -0.256156]],
    ),
    "E3": (
        {"query": query(3, 1), "key": key(4), "value": value(4), "sparse_mode": 4, "atten_mask": TRIANGLE}
        | {"pre_tokens": 1, "next_tokens": 0},
        [[-0.875115], [-0.516431], [0.020339]],
        [[1.339086, 0.787870, 1.412082]],
    ),
    "E3b": (
        {"query": query(3, 1), "key": key(4), "value": value(4), "atten_mask": ZEROS}
        | {"pre_tokens": 1, "next_tokens": 0},
        [[-1.000000], [-0.883973], [-0.333940]],
        [[0.964812, 1.791155, 1.019434]],
    ),
    "E4, left padding": (
        {"query": padded(query(4, 1), 4, 1, 3), "key": padded(key(5), 5, 1, 4), "value": padded(value(5), 5, 1, 4)}
        | {"record": fused.TORCH_V1, "actual_seq_lengths": [2], "actual_seq_lengths_kv": [3]}
        | {"query_padding_size": ONE, "kv_padding_size": ONE, **CAUSAL},
        [[[0.0] * 4], [-0.516431], [-0.094061], [[0.0] * 4]],
        [[INF, 0.787870, 1.615932, INF]],
    ),
    "E5, a shared prefix": (
        {"record": fused.TORCH_V1, "query": query(2, 1), "key": (0.41 * counted(1, 2, 1, 4)).sin().float()}
        | {"value": (1 - 0.1 * counted(1, 2, 1, 4)).float(), "actual_shared_prefix_len": [2]}
        | {"key_shared_prefix": key(3), "value_shared_prefix": value(3), **CAUSAL},
        [[[-0.182844, -0.156681, -0.130519, -0.104357]], [[-0.122362, -0.115748, -0.109135, -0.102522]]],
        [[1.799834, 2.420264]],
    ),
    "E6, sinks": (
        {"query": query(1, 2), "key": key(3), "value": value(3), "learnable_sink": torch.tensor([0.5, -1.0])},
        [[[-0.578444, -0.506222, -0.434000, -0.361778], [-0.790271, -0.695663, -0.601054, -0.506445]]],
        [[1.780924], [1.920390]],
    ),
    "E7a, stored integers": (
        {**STORED, "key_antiquant_scale": KSCALE, "key_antiquant_offset": KOFFSET}
        | {"value_antiquant_scale": VSCALE, "value_antiquant_offset": VOFFSET},
        [BY_CHANNEL],
        [[1.217850], [1.347446]],
    ),
    "E7a combined": (
        STORED
        | {"antiquant_scale": torch.stack((KSCALE, VSCALE)), "antiquant_offset": torch.stack((KOFFSET, VOFFSET))},
        [BY_CHANNEL],
        [[1.217850], [1.347446]],
    ),
    "E7b": (
        {**STORED, "key_antiquant_scale": KTOKEN, "value_antiquant_scale": VTOKEN}
        | {"key_antiquant_mode": 1, "value_antiquant_mode": 1},
        [BY_TOKEN],
        [[1.198690], [1.448293]],
    ),
    "E7b combined": (
        {**STORED, "antiquant_scale": torch.stack((KTOKEN, VTOKEN)), "antiquant_mode": 1},
        [BY_TOKEN],
        [[1.198690], [1.448293]],
    ),
    "E7c": (
        {**STORED, "key_antiquant_scale": KSCALE, "value_antiquant_scale": VTOKEN, "value_antiquant_mode": 1},
        [[[-1.750897, -0.207899, 2.126593, -0.817100], [-1.467105, -0.392484, 1.863288, -0.564796]]],
        [[1.191614], [1.306785]],
    ),
    "E10": (
        {"query": query(2, 2), "key": key(3), "value": value(3), **CAUSAL}
        | {"scale_value": 0.4, "query_rope": ((0.9 * counted(1, 2, 2, 2)).sin() + 0.2).float()}
        | {"key_rope": (0.7 * counted(1, 3, 1, 2)).cos().float()},
        [[-0.907243, -0.922412], [-0.395693, -0.335211]],
        [[1.416512, 1.356823], [2.035970, 1.149121]],
    ),
    "E10b, integer latents": (
        {**LATENTS, "query_rope": Q_ROPE / (Q_SCALE[..., None] * 0.05)},
        [[[-0.595671, -0.245671, 0.104329, 0.454329], [-0.592951, -0.242951, 0.107049, 0.457049]]],
        [[1.086982], [1.093411]],
    ),
    "E10b, a rope part that is not divided": (
        {**LATENTS, "query_rope": Q_ROPE},
        [[[-0.600017, -0.250017, 0.099983, 0.449983]]],
        [[1.106962]],
    ),
    "E11": (
        {"query": query(2, 2), "key": key(3), "value": value(3)}
        | {"pse_shift": (0.25 * counted(1, 2, 2, 3) - 1).float()},
        [[-0.749893, -0.793145], [-0.384716, -0.292365]],
        [[0.595452, 1.303228], [2.480692, 2.848443]],
    ),
    "E12": (
        {"query": query(3, 1), "key": key(5), "value": value(5), "sparse_mode": 9}
        | {"atten_mask": torch.tensor([[[0, 1, 1], [0, 0, 1], [0, 1, 0]]], dtype=torch.bool)},
        [[-0.800926], [-0.800585], [-0.115683]],
        [[1.455498, 1.899080, 1.552803]],
    ),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", EXAMPLES)
def test_fused_attention_reproduces_worked_example(name: str) -> None:
    args, want, lse = EXAMPLES[name]
    out, got = run(**args)
    for row, heads in zip(out, want, strict=True):
        for head, numbers in zip(row, heads, strict=False):
            near(head, numbers if isinstance(numbers, list) else numbers + COLUMNS)
    for head, numbers in zip(got, lse, strict=False):
        near(head, numbers)


def test_worked_example_e7c_unpacks_eight_int4_values_from_int32() -> None:
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


def test_worked_example_e8_int8_attention_matches_printed_digits() -> None:
    out, lse = run(fused.TORCH_V1, **FULL)
    assert out.dtype == torch.float16
    # float16 rounds by less than the effect of rounded weights (0.0015 and more), so the test detects it.
    torch.testing.assert_close(out.double(), torch.tensor(FULL_OUT).double(), rtol=2.0**-11, atol=0)
    near(lse, [[1.769445, 2.089338], [0.377127, 0.669146]])


def test_uint64_dequant_scales_are_read_as_truncated_float32() -> None:
    """Bits 13 to 31 of a word are the upper bits of a float32: 0.02 is read as 0.019989..."""
    short, words = dict(FULL), dict(FULL)
    for name in ("dequant_scale1", "dequant_scale2"):
        bits = FULL[name].view(torch.int32).to(torch.int64)
        short[name] = (bits & 0xFFFFE000).to(torch.int32).view(torch.float32)
        words[name] = (bits | 1 << 46).view(torch.uint64)
    assert short["dequant_scale1"].item() == 0.019989013671875
    assert all(map(torch.equal, run(fused.TORCH_V1, **words), run(fused.TORCH_V1, **short)))


def test_worked_example_e8_int8_output_matches_printed_integers() -> None:
    narrow = {"quant_scale2": torch.tensor([20.0]), "quant_offset2": torch.tensor([3.0])}
    out, _ = run(fused.TORCH_V1, **FULL, **narrow)
    rows = [[[30, -79, -29, 22], [17, -75, -24, 27]], [[40, -83, -33, 18], [29, -79, -28, 22]]]
    assert out.tolist() == rows


@pytest.mark.parametrize(("count", "want"), [(1, [2, 8, -2, -8, 2, 127, -128]), (7, [3, 8, -3, -8, 2, 127, -128])])
def test_worked_example_e9_ties_round_to_even_per_tensor_and_away_per_channel(count: int, want: list[int]) -> None:
    x = torch.tensor([0.125, 0.375, -0.125, -0.375, 0.1, 6.5, -7]).view(1, 1, 1, 7)
    out, _ = run(fused.TORCH_V1, query=torch.zeros(1, 2, 1, 7), key=x, value=x, quant_scale2=torch.full((count,), 20.0))
    assert out[1, 0].tolist() == want
