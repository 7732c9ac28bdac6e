"""Block masks: torch_npu's functions, the functions of CANN's package, and the two-phase interface."""

import itertools
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import pytest
import torch
from support.bits import same_bits
from support.pieces import Call, expected
from support.two_phase import done

import fusion_attention as fa
from fusion_attention import npu
from fusion_attention.contract import bind
from fusion_attention.ir.mask import ALL_BLOCKED, NONE_BLOCKED, blocked_by_tiles
from fusion_attention.ops import RECORDS
from fusion_attention.ops.block_sparse import definitions
from fusion_attention.ops.shared.layouts import matrix_view
from fusion_attention.ops.training.api_definition import RECORD
from fusion_attention.ops.training.block_mask import to_matrix, to_tiles
from fusion_attention.testing import compare, hostile
from fusion_attention.testing.estimated_rounding_errors import compare_with

Tensor = torch.Tensor
SCALE = 0.125
GRADIENTS = ("dq", "dk", "dv")


@dataclass(frozen=True)
class BlockCase:
    """A call. rest: rows of the tensors that belong to no sequence."""

    block: tuple[int, int] = (128, 128)
    layout: str = "TND"
    dtype: str = "float32"
    q_len: tuple[int, ...] = (130, 0, 260)
    kv_len: tuple[int, ...] = (300, 5, 129)
    heads: tuple[int, int] = (4, 2)
    dim: int = 64
    density: float = 0.5
    rest: int = 3

    @property
    def id(self) -> str:
        lengths = f"{'x'.join(map(str, self.q_len))}-{'x'.join(map(str, self.kv_len))}"
        return f"{self.layout}-{self.dtype}-{self.block[0]}x{self.block[1]}-{lengths}-{self.density}"


CASES = [
    *(BlockCase(block, layout) for block in ((128, 128), (64, 128), (100, 37)) for layout in definitions.LAYOUTS),
    *(BlockCase(block) for block in ((300, 256), (1, 1), (7, 200), (2, 128), (128, 16))),
    *(
        BlockCase(layout=layout, dtype=d, block=(64, 128))
        for d in ("float16", "bfloat16")
        for layout in ("TND", "BNSD")
    ),
    BlockCase(q_len=(5,), kv_len=(1500,), block=(2, 128), dtype="bfloat16", dim=128),
    BlockCase(density=0.0),
    BlockCase(density=1.0, dtype="bfloat16"),
    BlockCase(q_len=(0, 0), kv_len=(3, 140)),
    BlockCase(q_len=(3, 140), kv_len=(0, 0)),
    BlockCase(heads=(6, 3), dim=24, rest=0),
]


def given(case: BlockCase) -> dict[str, Any]:
    """Returns the arguments in poisoned memory, with dy; rows of no sequence are NaN."""
    generator = torch.Generator().manual_seed(len(case.id) + case.block[0])
    dtype = getattr(torch, case.dtype)

    def rows(lengths: tuple[int, ...], heads: int) -> Tensor:
        packed = case.layout == "TND"
        shape = (sum(lengths) + case.rest,) if packed else (len(lengths), max(lengths) + case.rest)
        values = torch.randn(*shape, heads, case.dim, generator=generator).to(dtype)
        if packed:
            values[sum(lengths) :] = torch.nan
        else:
            for b, n in enumerate(lengths):
                values[b, n:] = torch.nan
        return hostile(values.transpose(1, 2) if case.layout == "BNSD" else values)

    longest = [max(n) + (0 if case.layout == "TND" else case.rest) for n in (case.q_len, case.kv_len)]
    blocks = [-(-n // size) for n, size in zip(longest, case.block, strict=True)]
    mask = (torch.rand(len(case.q_len), case.heads[0], *blocks, generator=generator) < case.density).to(torch.int8)
    if mask.numel() and case.density < 1:
        mask[0, 0, 0] = 0
    return {
        "query": rows(case.q_len, case.heads[0]),
        "key": rows(case.kv_len, case.heads[1]),
        "value": rows(case.kv_len, case.heads[1]),
        "block_mask": mask,
        "dy": rows(case.q_len, case.heads[0]),
    }


def words(case: BlockCase) -> dict[str, Any]:
    return {
        "q_input_layout": case.layout, "kv_input_layout": case.layout, "num_key_value_heads": case.heads[1],
        "scale_value": SCALE, "actual_seq_lengths": list(case.q_len), "actual_seq_lengths_kv": list(case.kv_len),
    }  # fmt: skip


def run(case: BlockCase, args: dict[str, Any]) -> dict[str, Tensor]:
    """Returns out, lse and the gradients by autograd."""
    q, k, v = (args[name].detach().requires_grad_() for name in ("query", "key", "value"))
    out, lse = npu.npu_block_sparse_attention(q, k, v, args["block_mask"], list(case.block), **words(case))
    gradients = torch.autograd.grad(out, (q, k, v), args["dy"])
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(GRADIENTS, gradients, strict=True))}


def hidden(case: BlockCase, mask: Tensor, b: int) -> Tensor:
    """Returns the mask of a sequence pair by pair, [N, rows, keys] bool: true hides a pair."""
    rows, keys = case.q_len[b], case.kv_len[b]
    result = torch.empty(case.heads[0], rows, keys, dtype=torch.bool)
    for i, j in itertools.product(range(-(-rows // case.block[0])), range(-(-keys // case.block[1]))):
        (x, y), (down, across) = case.block, (i, j)
        block = mask[b, :, down, across] == 0
        result[:, x * i : x * (i + 1), y * j : y * (j + 1)] = block[:, None, None]
    return result


def sequences(case: BlockCase, tensor: Tensor, lengths: tuple[int, ...]) -> list[Tensor]:
    """Returns [N, tokens, ...] of every sequence."""
    if case.layout == "TND":
        return [t.transpose(0, 1) for t in tensor[: sum(lengths)].split(lengths)]
    heads_first = tensor if case.layout == "BNSD" else tensor.transpose(1, 2)
    return [heads_first[b, :, :n] for b, n in enumerate(lengths)]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_block_sparse_forward_and_gradients_match_mask_matrix_reference(case: BlockCase) -> None:
    """Error bounds are those of attention with a mask matrix; rows of no sequence are zero."""
    args = given(case)
    results = run(case, args)
    sides = {name: case.q_len if name in ("query", "dy", "out", "lse", "dq") else case.kv_len
             for name in (*args, *results) if name != "block_mask"}  # fmt: skip
    parts = {name: sequences(case, {**args, **results}[name], lengths) for name, lengths in sides.items()}
    for b, (rows, keys) in enumerate(zip(case.q_len, case.kv_len, strict=True)):
        q, k, v, dy = (parts[name][b].transpose(0, 1)[None].contiguous() for name in ("query", "key", "value", "dy"))
        lengths = {"layout": "BSND", "q_len": [rows], "kv_len": [keys], "scale": SCALE}
        if not rows or not keys:
            assert not parts["out"][b].any()
            assert (parts["lse"][b] == -torch.inf).all()
            assert not any(parts[name][b].any() for name in GRADIENTS)
            continue
        wanted = expected(
            Call({"q": q, "k": k, "v": v, "blocked": hidden(case, args["block_mask"], b)[None], **lengths}, dy)
        )
        for name in ("out", *GRADIENTS):
            compare(f"{name} of {b}", parts[name][b].transpose(0, 1)[None], wanted[name])
        compare(f"lse of {b}", parts["lse"][b][None, ..., 0], wanted["lse"])
    for name in ("out", *GRADIENTS):
        of_no_sequence = results[name].clone()
        for rows_of_one in sequences(case, of_no_sequence, sides[name]):
            rows_of_one.zero_()
        assert not of_no_sequence.any()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_block_sparse_backward_function_is_bitwise_equal_to_autograd(case: BlockCase) -> None:
    args = given(case)
    results = run(case, args)
    dy, q, k, v = (args[name] for name in ("dy", "query", "key", "value"))
    for lse in (results["lse"], results["lse"].squeeze(-1)):
        given_back = npu.npu_block_sparse_attention_backward(
            dy, q, k, v, results["out"], lse, args["block_mask"], list(case.block), **words(case)
        )
        same_bits(given_back, tuple(results[name] for name in GRADIENTS))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("block", [(128, 128), (64, 128), (256, 384), (100, 37), (1, 3), (1000, 1000), (32, 16)])
def test_block_mask_tiles_hide_exactly_the_masked_blocks(block: tuple[int, int]) -> None:
    for rows, keys in [(1, 1), (260, 129), (300, 700), *([(0, 5), (5, 0)] if block == (100, 37) else [])]:
        hides_masked_blocks(rows, keys, block)


def hides_masked_blocks(rows: int, keys: int, block: tuple[int, int]) -> None:
    case = BlockCase(block, q_len=(rows,), kv_len=(keys,))
    mask = torch.rand(1, 4, -(-rows // block[0]), -(-keys // block[1])) < 0.6
    extents = RECORD.lower(  # type: ignore[misc]
        bind(
            RECORD, {"q": torch.zeros(1, rows, 4, 1), "k": torch.zeros(1, keys, 2, 1), "v": torch.zeros(1, keys, 2, 1)}
        )
    ).extents
    tiles, bits = to_tiles(mask, block, (rows, keys)).values()
    assert tiles.dtype == torch.int32
    assert ((tiles >= NONE_BLOCKED) & (tiles < len(bits))).all()
    view = matrix_view(tiles, "broadcast", 4, extents)
    want = hidden(case, mask, 0)
    assert torch.equal(blocked_by_tiles(view, bits, 0, 4, rows, keys), want)
    assert torch.equal(to_matrix(mask, block, (rows, keys))[0].bool(), want)
    if block[0] % 128 == block[1] % 128 == 0:
        assert len(bits) == 0
        assert ((tiles == ALL_BLOCKED) | (tiles == NONE_BLOCKED)).all()


def test_equal_mask_tiles_share_stored_bits() -> None:
    mask = torch.tensor([1, 0, 0, 1] * 64, dtype=torch.int8).view(1, 1, 32, 8)
    tiles, bits = to_tiles(mask, (64, 64), (2048, 512)).values()
    assert tiles.shape == (1, 1, 16, 4)
    assert len(bits) <= 2
    assert bits.shape[1:] == (128, 16)


def test_block_mask_lowers_to_tiles_on_cpu_and_to_matrix_on_other_devices() -> None:
    args = given(BlockCase())
    lowered = {}
    for device in ("cpu", "meta"):
        inputs = {name: t.to(device) for name, t in args.items() if name != "dy"}
        call = dict.fromkeys(p.name for p in definitions.TORCH.params) | inputs | {
            "layout": "TND", "layout_kv": "TND", "num_key_value_heads": 2, "block_shape": [128, 128],
            "actual_seq_lengths": [130, 0, 260], "actual_seq_lengths_kv": [300, 5, 129],
        }  # fmt: skip
        bound = bind(definitions.TORCH, call)
        lowered[device] = definitions.TORCH.lower(bound).problem  # type: ignore[misc]
    assert lowered["cpu"].has_blocked_tiles
    assert not lowered["cpu"].has_blocked
    assert replace(lowered["cpu"], has_blocked_tiles=False, has_blocked=True) == lowered["meta"]


def test_block_sparse_lse_gradient_matches_formula() -> None:
    q, k, v = (torch.randn(1, 2, 6, 4, requires_grad=True) for _ in range(3))
    mask = torch.tensor([[1, 0], [1, 1], [0, 0]], dtype=torch.int8).expand(1, 2, 3, 2).contiguous()
    layout: dict[str, Any] = {"q_input_layout": "BNSD", "kv_input_layout": "BNSD", "num_key_value_heads": 2}
    out, lse = npu.npu_block_sparse_attention(q, k, v, mask, [2, 3], **layout, scale_value=0.5)
    dlse, dout = torch.randn(1, 2, 4), torch.randn(1, 2, 6, 4)
    ours = torch.autograd.grad((lse[:, :, :4, 0] * dlse).sum() + (out * dout).sum(), (q, k, v))

    def formula() -> tuple[Tensor, ...]:
        q64, k64, v64 = (t.detach().double().requires_grad_() for t in (q, k, v))
        blocked = (mask == 0).repeat_interleave(2, 2).repeat_interleave(3, 3)[:, :, :4]
        scores = (0.5 * q64[:, :, :4] @ k64.mT).masked_fill(blocked, -torch.inf)
        total = (scores.logsumexp(-1) * dlse).sum() + (scores.softmax(-1) @ v64 * dout[:, :, :4]).sum()
        return torch.autograd.grad(total, (q64, k64, v64))

    compare_with("gradients", ours, formula)


def test_block_mask_accepts_every_dtype_and_default_lengths_and_block_shape() -> None:
    """Nonzero numbers show a block; without lengths all rows count; default blocks are 128 wide."""
    q, k = torch.randn(2, 4, 200, 64), torch.randn(2, 2, 140, 64)
    mask = torch.tensor([[5, 0], [-1, 1]], dtype=torch.int8).expand(2, 4, 2, 2).contiguous()
    layout: dict[str, Any] = {
        "q_input_layout": "BNSD",
        "kv_input_layout": "BNSD",
        "num_key_value_heads": 2,
        "scale_value": SCALE,
    }
    out, lse = npu.npu_block_sparse_attention(q, k, k, mask, [128, 128], **layout)
    for other in (mask != 0, (mask != 0).to(torch.uint8)):
        same_bits(npu.npu_block_sparse_attention(q, k, k, other, [128, 128], **layout), (out, lse))
    lengths: dict[str, Any] = {"actual_seq_lengths": [200, 200], "actual_seq_lengths_kv": [140, 140]}
    same_bits(npu.npu_block_sparse_attention(q, k, k, mask, [128, 128], **layout, **lengths), (out, lse))
    want = npu.npu_block_sparse_attention_backward(out, q, k, k, out, lse, mask, [128, 128], **layout)
    same_bits(npu.npu_block_sparse_attention_backward(out, q, k, k, out, lse, mask, None, **layout), want)


@pytest.mark.usefixtures("runtime")
def test_block_sparse_attention_without_mask_equals_full_attention() -> None:
    case = BlockCase(dtype="float16", rest=0)
    args = given(case)
    op = RECORDS["aclnnBlockSparseAttentionV3"]
    settings = {"num_key_value_heads": 2, "scale_value": SCALE, "inner_precise": 4, "softmax_lse_flag": 1,
                "actual_seq_lengths": list(case.q_len), "actual_seq_lengths_kv": list(case.kv_len)}  # fmt: skip
    call = (
        {p.name: getattr(p, "default", None) for p in op.params} | {n: args[n] for n in definitions.INPUTS} | settings
    )
    outputs: Any = {"attention_out": torch.empty_like(args["query"]), "softmax_lse": torch.empty(390, 4, 1)}
    written = done(op, call, outputs, strict=False)
    want, lse = fa.attention(args["query"], args["key"], args["value"], layout="TND", q_len=case.q_len,
                             kv_len=case.kv_len, scale=SCALE, return_lse=True)  # fmt: skip
    same_bits(written, {"attention_out": want, "softmax_lse": lse.unsqueeze(-1)})


def test_cann_ops_transformer_block_sparse_functions_equal_torch_npu(torch_npu: Any) -> None:
    cann = import_module("cann_ops_transformer")
    case = BlockCase((64, 128), "BNSD", rest=0, q_len=(130, 130), kv_len=(200, 200))
    args = given(case)
    results = run(case, args)
    inputs: Any = [args[name] for name in ("query", "key", "value", "block_mask")]
    for function in (cann.block_sparse_attention, torch.ops.cann_ops_transformer.block_sparse_attention):
        out, lse = function(*inputs, [64, 128], return_softmax_lse=True, **words(case))
        same_bits(out, results["out"])
        same_bits(lse, results["lse"])
        out, lse = function(*inputs, [64, 128], **words(case))
        same_bits(out, results["out"])
        assert lse.numel() == 0
    saved: Any = (args["dy"], *inputs[:3], results["out"], results["lse"], inputs[3], [64, 128])
    same_bits(cann.block_sparse_attention_grad(*saved, **words(case)), tuple(results[name] for name in GRADIENTS))


def test_compiled_block_sparse_attention_is_bitwise_equal_to_eager() -> None:
    case = BlockCase((64, 128))
    args = given(case)
    want = run(case, args)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
        return npu.npu_block_sparse_attention(q, k, v, mask, [64, 128], **words(case))

    leaves = q, k, v = tuple(args[name].detach().requires_grad_() for name in ("query", "key", "value"))
    out, lse = compiled(q, k, v, args["block_mask"])
    gradients = torch.autograd.grad(out, leaves, args["dy"])
    same_bits({"out": out.detach(), "lse": lse.detach(), **dict(zip(GRADIENTS, gradients, strict=True))}, want)


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"block_sparse_mask": torch.ones(3, 4, 2, 3, dtype=torch.int8)}, "block_sparse_mask: expected shape"),
        ({"block_shape": [128]}, "block_shape: expected two positive numbers"),
        ({"block_shape": [-1, 128]}, "block_shape: expected two positive numbers"),
        ({"kv_input_layout": "BNSD"}, "kv_input_layout: expected as q_input_layout"),
        ({"actual_seq_lengths": [130, 0, 264]}, "actual_seq_lengths: expected lengths of the sequences"),
        ({"actual_seq_lengths": [130, 0, 2**62]}, "actual_seq_lengths: expected lengths of the sequences"),
        ({"actual_seq_lengths": None}, "actual_seq_lengths: expected the lengths of packed sequences"),
        ({"actual_seq_lengths_kv": None}, "actual_seq_lengths_kv: expected lengths if actual_seq_lengths has some"),
        ({"num_key_value_heads": 1}, "key: expected axis 1 to be N2=1"),
        ({"softmax_lse_flag": 2}, "softmax_lse_flag: expected"),
        ({"scale_value": float("nan")}, "scale_value: expected a finite scale"),
    ],
)  # fmt: skip
def test_block_sparse_attention_refuses_invalid_arguments(changed: dict[str, Any], error: str) -> None:
    case = BlockCase(rest=0)
    args = given(case)
    names = {"block_sparse_mask" if n == "block_mask" else n: t for n, t in args.items() if n != "dy"}
    with pytest.raises(fa.ContractError, match=error):
        npu.npu_block_sparse_attention(**{**names, "block_shape": [128, 128], **words(case), **changed})


@pytest.mark.parametrize("name", ["q_dequant_scale", "k_dequant_scale", "v_dequant_scale"])
def test_block_sparse_quantised_arguments_of_ascend_950_are_refused(name: str, torch_npu: Any) -> None:
    cann = import_module("cann_ops_transformer")
    case = BlockCase(rest=0)
    args = given(case)
    inputs: Any = [args[n] for n in ("query", "key", "value", "block_mask")]
    with pytest.raises(fa.ContractError, match=f"{name}: expected None, got .*950 only"):
        cann.block_sparse_attention(*inputs, [128, 128], **words(case), **{name: torch.ones(3, 4, 2, 1)})
    with pytest.raises(fa.ContractError, match=r"quant_mode: expected quant_mode == 0, got 1 .*950 only"):
        cann.block_sparse_attention(*inputs, [128, 128], **words(case), quant_mode=1)
