"""Integer quantisation of rows, integer products and grouped matrix products are compared with naive loops."""

import itertools
import struct
from typing import Any

import pytest
import torch
from support.bits import same_bits

from fusion_attention import ContractError, npu
from fusion_attention.npu.auxiliary.grouped_matmul import ACTIVATIONS
from fusion_attention.ops.auxiliary_definitions.grouped_matmul import GROUPED
from fusion_attention.testing.estimated_rounding_errors import compare_with

M, K, N, E = 9, 16, 6, 3


def test_dynamic_quantisation_of_rows_without_elements() -> None:
    groups = {"smooth_scales": torch.ones(2, 8), "group_index": torch.tensor([1, 4])}
    with pytest.raises(ContractError, match="input: expected at least two axes, and at least one element"):
        npu.npu_dynamic_quant(torch.ones(4, 0), **groups)


@pytest.mark.parametrize("mode", ["pertoken", "perchannel", "pertensor"])
def test_dynamic_quant_matches_formula_in_each_mode(mode: str) -> None:
    x, smooth = torch.randn(2, M, K).bfloat16(), torch.rand(M if mode == "perchannel" else K).bfloat16()
    x[0, 3], x[..., 5] = 0, 0
    y, scale = npu.npu_dynamic_quant(x, smooth_scales=smooth, quant_mode=mode)
    smoothed = x.float() * (smooth.float().unsqueeze(1) if mode == "perchannel" else smooth.float())
    axes = {"pertoken": (-1,), "perchannel": (1,), "pertensor": (0, 1, 2)}[mode]
    peak = smoothed.abs().amax(axes, keepdim=True) / 127
    same_bits(scale.reshape(peak.shape), peak)
    same_bits(y, (smoothed / peak).nan_to_num(0).round().to(torch.int8))


def test_dynamic_quant_int4_with_grouped_smooth_scales_matches_naive_loops() -> None:
    x, smooth, ends = torch.randn(M, K), torch.rand(E, K) + 0.5, torch.tensor([2, 2, M], dtype=torch.int32)
    y, scale = npu.npu_dynamic_quant(x, smooth_scales=smooth, group_index=ends, dst_type=torch.quint4x2)
    assert (y.dtype, list(y.shape)) == (torch.int32, [M, K // 8])
    for row in range(M):
        smoothed = x[row] * smooth[0 if row < 2 else 2]
        for i in range(K):
            nibble = (y[row, i // 8].item() >> (4 * (i % 8))) & 15
            assert (nibble ^ 8) - 8 == (smoothed[i] / scale[row]).round().item()


QUANTIZED = [
    *((dtype, True) for dtype in (torch.qint8, torch.quint8, torch.qint32)),
    *((dtype, False) for dtype in (torch.qint8, torch.quint4x2)),
]


@pytest.mark.parametrize(("dtype", "divides"), QUANTIZED)
@pytest.mark.parametrize("axis", [1, -2, -1])
def test_npu_quantize_matches_naive_loops(dtype: torch.dtype, divides: bool, axis: int) -> None:
    x = torch.randn(2, M, K).bfloat16()
    x[0, 0, 0], x[0, 0, 1], x[0, 0, 2] = torch.nan, 1e30, -torch.inf
    of = (axis if axis == -2 else -1) if not divides else axis
    scales = (torch.rand(x.shape[of]) / 9 + 0.01).bfloat16()
    zeros = torch.randint(-9, 9, scales.shape, dtype=torch.int32) if divides else torch.randn_like(scales)
    for by, to in ((scales, zeros), (scales[:1], None)):
        result = npu.npu_quantize(x, by, to, dtype, axis, divides)
        low, high = {torch.quint8: (0, 255), torch.quint4x2: (-8, 7), torch.qint32: (-(2**31), 2**31 - 1)}.get(
            dtype, (-128, 127)
        )
        rounded = torch.zeros(x.shape, dtype=torch.int64)
        for at in itertools.product(*map(range, x.shape)):
            where = at[of] if len(by) > 1 else 0
            number = x[at].float() / by[where].float() if divides else x[at].float() * by[where].float()
            number = (number if to is None else number + to[where].float()).nan_to_num(0.0).item()
            rounded[at] = min(max(round(number), low), high)
        kind = {torch.quint8: torch.uint8, torch.qint32: torch.int32, torch.quint4x2: torch.int32}.get(
            dtype, torch.int8
        )
        same_bits(result, nibbles(rounded) if dtype == torch.quint4x2 else rounded.to(kind))
        full = [1, 1, 1]
        full[of] = len(by)
        same_bits(npu.npu_quantize(x, by.view(full), to if to is None else to.view(full), dtype, axis, divides), result)


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("integer_bias", [True, False])
def test_quant_matmul_int8_matches_integer_arithmetic(dtype: torch.dtype | None, integer_bias: bool) -> None:
    x1, x2 = torch.randint(-128, 128, (2, M, 3000)).to(torch.int8), torch.randint(-128, 128, (3000, N)).to(torch.int8)
    scale, rows = torch.rand(N) * 1e-5, torch.rand(M)
    bias = torch.randint(-9999, 9999, (N,), dtype=torch.int32) if integer_bias else torch.randn(N)
    offset = torch.rand(N) * 9 if dtype is None else None
    out = npu.npu_quant_matmul(x1, x2, scale, offset=offset, pertoken_scale=rows, bias=bias, output_dtype=dtype)
    product = (x1.long() @ x2.long() + (bias if integer_bias else 0)).float() * scale * rows.unsqueeze(1)
    want = product + (0 if integer_bias else bias) + (0 if offset is None else offset)
    want = want if dtype else want.round().clamp(-128, 127)
    same_bits(out, want.to(dtype or torch.int8))


@pytest.mark.parametrize("biased", [True, False])
def test_quant_matmul_int32_output_is_not_scaled(biased: bool) -> None:
    x1, x2 = torch.randint(-128, 128, (2, M, 3000)).to(torch.int8), torch.randint(-128, 128, (3000, N)).to(torch.int8)
    bias = torch.randint(-9999, 9999, (N,), dtype=torch.int32) if biased else None
    call: dict[str, Any] = {"pertoken_scale": torch.rand(M), "output_dtype": torch.int32}
    out = npu.npu_quant_matmul(x1, x2, torch.full((N,), torch.nan), bias=bias, **call)
    same_bits(out, (x1.long() @ x2.long() + (0 if bias is None else bias)).to(torch.int32))
    with pytest.raises(ContractError, match="bias: expected int32"):
        npu.npu_quant_matmul(x1, x2, torch.ones(N), bias=torch.ones(N), **call)


def nibbles(x: torch.Tensor) -> torch.Tensor:
    """Pack eight 4-bit elements into each int32, with a loop over the elements."""
    words = [
        sum((n & 15) << 4 * i for i, n in enumerate(row[at : at + 8]))
        for row in x.flatten(0, -2).tolist()
        for at in range(0, len(row), 8)
    ]
    signed = [word - 2**32 if word >= 2**31 else word for word in words]
    return torch.tensor(signed, dtype=torch.int32).reshape(*x.shape[:-1], -1)


@pytest.mark.parametrize("transposed", [False, True])
def test_quant_matmul_int4_matches_integer_arithmetic(transposed: bool) -> None:
    x1, x2 = torch.randint(-8, 8, (2, M, K), dtype=torch.int32), torch.randint(-8, 8, (K, 8 * N), dtype=torch.int32)
    packed = npu.npu_convert_weight_to_int4pack(x2.T.contiguous()).T if transposed else nibbles(x2)
    same_bits(npu.npu_convert_weight_to_int4pack(x2), nibbles(x2))
    scale, rows, bias = torch.rand(8 * N), torch.rand(M), torch.randn(8 * N)
    call: dict[str, Any] = {"pertoken_scale": rows, "output_dtype": torch.bfloat16, "bias": bias}
    out = npu.npu_quant_matmul(nibbles(x1), packed, scale, **call)
    same_bits(out, ((x1.long() @ x2.long()).float() * scale * rows.unsqueeze(1) + bias).bfloat16())


def test_quant_matmul_int8_rows_by_blockwise_int4_weight_matches_float64() -> None:
    x1, x2 = torch.randint(-128, 128, (M, K)).to(torch.int8), torch.randint(-8, 8, (K, 8 * N), dtype=torch.int32)
    scale, rows, offset = torch.rand(4, 8 * N), torch.rand(M, 1), torch.randn(8 * N)
    packed, sizes = npu.npu_convert_weight_to_int4pack(x2), [0, 0, K // 4]
    by = npu.npu_trans_quant_param(scale.reshape(-1)).reshape(scale.shape)
    call: dict[str, Any] = {"offset": offset, "pertoken_scale": rows, "output_dtype": torch.float16}
    out = npu.npu_quant_matmul(x1, packed, by, group_sizes=sizes, **call)
    truncated = (scale.view(torch.int32) & ~0x1FFF).view(torch.float32).double().repeat_interleave(K // 4, 0)
    high, low = x1.int() // 16, (x1.int() & 15) - 8  # as the chip parts a row, whence the 8
    compare_with("out", out, lambda: ((high * 16 + low).double() @ (x2 * truncated) + offset.double()) * rows.double())
    with pytest.raises(ContractError, match="group_sizes: expected"):
        npu.npu_quant_matmul(x1, packed, by, **call)


def encoded(scale: torch.Tensor, offset: torch.Tensor | None, mode: int) -> list[int]:
    """Expected result of npu_trans_quant_param, one element at a time."""
    results = []
    for i, number in enumerate(scale.tolist()):
        (bits,) = struct.unpack("<I", struct.pack("<f", number))
        low = bits & 0x1FFF
        up = mode == 1 and (low > 0x1000 or (low == 0x1000 and bits >> 13 & 1))
        word = ((bits >> 13) + up) << 13 | 1 << 46
        if offset is not None:
            full = max(-256, min(255, round(offset[i if len(offset) > 1 else 0].item())))
            word |= full % 512 << 37
        results.append(word)
    return results


@pytest.mark.parametrize("mode", [0, 1])
def test_trans_quant_param_encodes_scale_and_offset_as_int64(mode: int) -> None:
    bits = torch.tensor([0x3F801000, 0x3F803000, 0x3F800FFF, 0x3F801001, 0x7F7FFFFF, 1, 0], dtype=torch.int32)
    scale = torch.cat((torch.randn(9), -bits.view(torch.float32), bits.view(torch.float32)))
    offset = torch.cat((torch.randn(len(scale) - 6) * 99, torch.tensor([-1e9, 1e9, 0.5, 1.5, -256.5, 255.5])))
    for of in (None, offset, offset[:1]):
        result = npu.npu_trans_quant_param(scale, of, mode)
        assert (result.dtype, result.tolist()) == (torch.int64, encoded(scale, of, mode))
    assert npu.npu_trans_quant_param(scale[:1], offset[None]).shape == (1, len(offset))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_matmuls_accept_scales_encoded_as_64_bit_integers(dtype: torch.dtype) -> None:
    x1, x2 = torch.randint(-128, 128, (M, K)).to(torch.int8), torch.randint(-128, 128, (K, N)).to(torch.int8)
    scale, offset = (torch.rand(N) - 0.5) * 1e-2, torch.randint(-256, 256, (N,)).float()
    truncated = (scale.view(torch.int32) & ~0x1FFF).view(torch.float32)
    full, bare = npu.npu_trans_quant_param(scale, offset).view(dtype), scale.view(torch.int32).long() & 0xFFFFFFFF
    product = (x1.long() @ x2.long()).float()
    want = (product * truncated + offset).round().clamp(-128, 127).to(torch.int8)
    same_bits(npu.npu_quant_matmul(x1, x2, full), want)
    same_bits(npu.npu_quant_matmul(x1, x2, full, offset=offset), want)
    same_bits(npu.npu_quant_matmul(x1, x2, full, output_dtype=torch.float16), (product * truncated).half())
    same_bits(npu.npu_quant_matmul(x1, x2, bare.view(dtype), output_dtype=torch.float16), (product * scale).half())
    call: dict[str, Any] = {"group_list": torch.tensor([4, M]), "group_type": 0, "split_item": 2}
    weights, by = [torch.stack((x2, x2))], [torch.stack((full.view(torch.int64), bare)).view(dtype)]
    (y,) = npu.npu_grouped_matmul([x1], weights, scale=by, output_dtype=torch.int8, **call)
    same_bits(y, torch.cat((want[:4], (product[4:] * scale).round().clamp(-128, 127).to(torch.int8))))
    x, weight = torch.randint(-9, 9, (M, E, K)).half(), torch.randint(-9, 9, (E, K, N)).half()
    by_all = npu.npu_trans_quant_param(scale.repeat(E), offset.repeat(E)).view(dtype)
    batched = torch.einsum("mek,ekn->men", x.double(), weight.double()).flatten(1).float()
    want = (batched * truncated.repeat(E) + offset.repeat(E)).round().clamp(-128, 127).to(torch.int8).unsqueeze(1)
    same_bits(npu.npu_transpose_batchmatmul(x, weight, scale=by_all, perm_x1=[1, 0, 2]), want)


def of_groups(ends: list[int]) -> list[tuple[int, int]]:
    return list(zip([0, *ends[:-1]], ends, strict=True))


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_matmul_over_row_groups_matches_naive_loops_with_gradients(kind: int, transposed: bool) -> None:
    x = torch.randn(M, K, requires_grad=True)
    weight = (torch.randn(E, N, K).transpose(1, 2) if transposed else torch.randn(E, K, N)).requires_grad_()
    ends = [4, 4, 7]
    given = torch.tensor(ends if kind == 0 else [4, 0, 3])
    call: dict[str, Any] = {"group_list": given, "group_list_type": kind, "group_type": 0}
    (y,) = npu.npu_grouped_matmul([x], [weight], **call, split_item=2)
    dy = torch.randn_like(y)
    parts = npu.npu_grouped_matmul([x], list(weight.unbind()), **call)

    def golden() -> list[Any]:
        inputs64 = [t.detach().double().requires_grad_() for t in (x, weight)]
        want = [inputs64[0][a:b] @ inputs64[1][i] for i, (a, b) in enumerate(of_groups(ends))]
        full = torch.cat([*want, torch.zeros(2, N).double()])
        return [full, *torch.autograd.grad(full, inputs64, dy.double()), want]

    ours = [y, *torch.autograd.grad(y, (x, weight), dy), parts]
    compare_with("[y, dx, dweight, parts]", ours, golden)
    listed = npu.npu_grouped_matmul([x], [weight], group_list=ends, split_item=2)
    same_bits(listed[0], y)


def test_grouped_matmul_over_k_groups_and_tensor_lists_matches_naive_loops() -> None:
    x, dy, ends = torch.randn(M, K), torch.randn(M, N), [4, 4, 9]
    (result,) = npu.npu_grouped_matmul([x.T], [dy], group_list=torch.tensor(ends), group_type=2, split_item=2)
    x64, dwide = x.double(), dy.double()
    compare_with("sums", result, lambda: torch.stack([x64[a:b].T @ dwide[a:b] for a, b in of_groups(ends)]))
    xs, weights = [torch.randn(2, 3, K), torch.randn(1, 5, 4)], [torch.randn(K, N), torch.randn(4, 2)]
    listed = npu.npu_grouped_matmul(xs, weights, group_type=-1)
    compare_with("list", listed, lambda: [a.double() @ b.double() for a, b in zip(xs, weights, strict=True)])


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_quantised_grouped_matmul_with_activation_matches_formula(act: int) -> None:
    ends = [3, 5, M]
    weight = torch.randint(-127, 128, (E, K, N)).to(torch.int8)
    scale, shift, bias = torch.rand(E, N) * 1e-2, torch.randn(E, N), torch.randn(E, N)
    call: dict[str, Any] = {"group_list": torch.tensor(ends), "group_type": 0, "split_item": 3, "act_type": act}
    x = torch.randn(M, K)
    (y,) = npu.npu_grouped_matmul([x], [weight], bias=[bias], antiquant_scale=[scale], antiquant_offset=[shift], **call)

    def golden() -> torch.Tensor:
        weight64 = (weight.double() + shift.double().unsqueeze(1)) * scale.double().unsqueeze(1)
        rows = [x[a:b].double() @ weight64[i] + bias[i].double() for i, (a, b) in enumerate(of_groups(ends))]
        result: torch.Tensor = ACTIVATIONS[act](torch.cat(rows))
        return result

    compare_with("y", y, golden)
    rows, per_token = torch.randint(-127, 128, (M, K)).to(torch.int8), torch.rand(M)
    (y,) = npu.npu_grouped_matmul(
        [rows], [weight], scale=[scale], per_token_scale=[per_token], output_dtype=torch.bfloat16, **call
    )
    full = torch.cat([rows[a:b].long() @ weight[i].long() * scale[i] for i, (a, b) in enumerate(of_groups(ends))])
    same_bits(y, ACTIVATIONS[act](full * per_token.unsqueeze(1)).bfloat16())


@pytest.mark.parametrize("packed", ["no", "rows", "columns"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_matmul_rounds_blockwise_dequantised_weight_to_row_dtype(dtype: torch.dtype, packed: str) -> None:
    x, weight = torch.randn(M, K).to(dtype), torch.randint(-8, 8, (E, K, 8 * N), dtype=torch.int32)
    scale, shift = (torch.randn(E, 4, 8 * N).to(dtype) for _ in range(2))
    given = {"no": weight.to(torch.int8), "rows": nibbles(weight), "columns": nibbles(weight.mT).mT}[packed]
    call: dict[str, Any] = {"group_list": [3, 5, M], "split_item": 2, "antiquant_scale": [scale]}
    (y,) = npu.npu_grouped_matmul([x], [given], antiquant_offset=[shift], **call)
    parts = npu.npu_grouped_matmul(
        list(x.split([3, 2, 4])), list(given), group_type=-1, antiquant_offset=list(shift), antiquant_scale=list(scale)
    )

    def golden() -> list[Any]:
        by, of = (t.repeat_interleave(K // 4, 1) for t in (scale, shift))
        if dtype == torch.bfloat16:  # rounded twice, which is no error
            weight64 = ((weight.float() + of.float()).to(dtype).float() * by.float()).to(dtype).double()
        else:
            weight64 = (weight.double() + of.double()) * by.double()
        rows = [x[a:b].double() @ weight64[i] for i, (a, b) in enumerate(of_groups([3, 5, M]))]
        return [torch.cat(rows), rows]

    compare_with("[y, parts]", [y, parts], golden)


def test_grouped_matmul_of_unscaled_int8_and_scaled_int4_matches_formula() -> None:
    x, weight = torch.randint(-128, 128, (M, K)).to(torch.int8), torch.randint(-8, 8, (E, K, 8 * N), dtype=torch.int32)
    bias, ends = torch.randint(-(2**30), 2**30, (E, 8 * N), dtype=torch.int32), [3, 5, M]
    call: dict[str, Any] = {"group_list": ends, "split_item": 2}
    (y,) = npu.npu_grouped_matmul([x], [weight.to(torch.int8)], bias=[bias], output_dtype=torch.int32, **call)
    same_bits(y, torch.cat([x[a:b].int() @ weight[i] + bias[i] for i, (a, b) in enumerate(of_groups(ends))]))
    with pytest.raises(ContractError, match="weight: expected"):
        npu.npu_grouped_matmul([x], [weight.to(torch.int8)], output_dtype=torch.bfloat16, **call)
    scale, rows, make_up = torch.rand(E, 2, 8 * N), torch.rand(M), torch.randn(E, 8 * N)
    call |= {"per_token_scale": [rows], "output_dtype": torch.bfloat16, "scale": [scale]}
    (y,) = npu.npu_grouped_matmul([x], [nibbles(weight)], bias=[make_up], **call)
    weight64 = weight.double() * scale.double().repeat_interleave(K // 2, 1)
    want = [(x[a:b].double() - 8) @ weight64[i] + make_up[i].double() for i, (a, b) in enumerate(of_groups(ends))]
    compare_with("y", y, lambda: torch.cat(want) * rows.double().unsqueeze(1))


def test_grouped_matmul_accepts_group_pairs_and_empty_optional_lists() -> None:
    x, weight = torch.randn(M, K), torch.randn(E, K, N)
    empty: dict[str, Any] = {p.name: [] for p in GROUPED.tensors() if p.optional}
    call: dict[str, Any] = {"group_list_type": 2, "group_type": 0, "split_item": 2, **empty}
    (y,) = npu.npu_grouped_matmul([x], [weight], group_list=torch.tensor([[2, 3], [0, 5], [0, 0]]), **call)
    x64, by = x.double(), weight.double()
    compare_with("y", y, lambda: torch.cat((x64[:3] @ by[2], x64[3:8] @ by[0], torch.zeros(1, N).double())))
    for pairs in ([[3, 1]], [[-1, 1]], [[0, M + 1]], [[0, -1]]):
        with pytest.raises(ContractError, match="group_list: expected"):
            npu.npu_grouped_matmul([x], [weight], group_list=torch.tensor(pairs), **call)
    for kind in (torch.ones(2), torch.empty(0)):
        with pytest.raises(ContractError, match="group_list_type: expected an int below"):
            npu.npu_grouped_matmul(
                [x], [weight], group_list=torch.tensor([3, 8, 9]), **call | {"group_list_type": kind}
            )
    for name, words in (("x", weight), ("weight", weight), ("x", nibbles(weight.int().repeat(1, 1, 4)))):
        with pytest.raises(ContractError, match=f"{name}: expected a tensor or a list"):
            npu.npu_grouped_matmul(**{"x": [x], "weight": [words], name: [], "group_type": -1})


@pytest.mark.parametrize("kind", [0, 2])
def test_compiled_grouped_matmul_matches_eager(kind: int) -> None:
    x, weight = torch.randn(M, K), torch.randn(E, K, N)
    ends = torch.tensor([4, 4, 7] if kind == 0 else [[0, 4], [2, 3], [1, 0]])

    def grouped(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        call: dict[str, Any] = {"group_list_type": kind, "split_item": 2, "group_type": 0}
        return npu.npu_grouped_matmul([x], [weight], group_list=ends, **call)[0]

    compiled = torch.compile(grouped, backend="aot_eager", fullgraph=True)
    first, last = x[:4].double(), x[4:7].double()
    weight64 = weight.double()
    compare_with(
        "(compiled, eager)",
        (compiled(x, weight, ends), grouped(x, weight, ends)),
        lambda: (torch.cat((first @ weight64[0], last @ weight64[2], torch.zeros(2, N).double())),) * 2,
    )
