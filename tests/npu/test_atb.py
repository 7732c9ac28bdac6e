"""torch_npu's functions of ATB (Ascend Transformer Boost) equal float64 loops over sequences, rows and pages."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.bits import same_bits

from fusion_attention import npu
from fusion_attention.contract import ContractError, bind
from fusion_attention.npu.auxiliary.call import in_place_of
from fusion_attention.ops.auxiliary_definitions.definitions import CONTRACTS
from fusion_attention.testing.estimated_rounding_errors import compare_with

N1, N2, D, DV, SLOTS = 4, 2, 16, 8, 16
ROWS, KEYS = torch.tensor([2, 0, 5, 3]), torch.tensor([20, 0, 31, 16])
TABLE = torch.tensor([[4, 1], [0, 0], [3, 7], [2, 6]], dtype=torch.int32)
T = int(ROWS.sum())
GENERATOR = torch.Generator().manual_seed(28)
Q, K = torch.randn(T, N1, D, generator=GENERATOR), torch.randn(T, N2, D, generator=GENERATOR)
V = torch.randn(T, N2, DV, generator=GENERATOR)
PAGES, VALUES = (torch.randn(8, SLOTS, N2, n, generator=GENERATOR) for n in (D, DV))
SCALE = 0.3
Visible = Callable[[int, int, int], torch.Tensor]  # of (sequence, row, keys): which keys a row sees


def everything(sequence: int, row: int, keys: int) -> torch.Tensor:
    return torch.ones(keys, dtype=torch.bool)


def causal(rows: torch.Tensor) -> Visible:
    return lambda b, i, keys: torch.arange(keys) <= i + keys - int(rows[b])


def loop(
    q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], rows: torch.Tensor, visible: Visible
) -> torch.Tensor:
    """Attention of packed q [T, N1, D] to each sequence's keys and values, row by row in q's dtype; rows: q lengths."""
    out, start = [], 0
    for b, count in enumerate(rows.tolist()):
        shared = q.shape[1] // keys[b].shape[1]
        k, v = (t[b].to(q.dtype).repeat_interleave(shared, 1).transpose(0, 1) for t in (keys, values))
        for i in range(count):
            scores = (k @ q[start + i].unsqueeze(2)).mT * SCALE
            out.append((scores.masked_fill(~visible(b, i, k.shape[1]), -math.inf).softmax(2) @ v).squeeze(1))
        start += count
    return torch.stack(out)


def unpaged(pages: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor) -> list[torch.Tensor]:
    return [pages[row.long()].flatten(0, 1)[:n] for row, n in zip(table, lengths.tolist(), strict=True)]


def packed(rows: torch.Tensor) -> list[torch.Tensor]:
    return list(rows.split(ROWS.tolist()))


def judge(
    outs: torch.Tensor | list[torch.Tensor], keys: Any, values: Any, rows: torch.Tensor, visible: Visible, q: Any = Q
) -> None:
    """Compares one result, or several of equal calls, with the loops."""
    several = outs if isinstance(outs, list) else [outs]
    compare_with("out", several, lambda: [loop(q.double(), keys, values, rows, visible)] * len(several))


def buffer(rows: int = T, dim: int = DV) -> torch.Tensor:
    return torch.full((rows, N1, dim), math.nan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_flash_attention_matches_naive_loops(dtype: torch.dtype) -> None:
    q, k, v, out = Q.to(dtype), K.to(dtype), V.to(dtype), buffer().to(dtype)
    keys, values = packed(k), packed(v)
    npu._npu_flash_attention_unpad(q, k, v, ROWS, SCALE, N1, N2, out)
    judge(out, keys, values, ROWS, everything, q)
    npu._npu_flash_attention_v3(q, k, v, torch.ones(7, 7).triu(1), ROWS, SCALE, N1, N2, out=out)
    outs = [out]
    for hidden in (1.0, -math.inf, -10000.0):
        mask = torch.zeros(6, 6).masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), hidden).to(dtype)
        npu._npu_flash_attention(q, k, v, mask, ROWS.int(), SCALE, N1, N2, masked := torch.zeros_like(out))
        outs.append(masked)
    judge(outs, keys, values, ROWS, causal(ROWS), q)


def test_flash_attention_with_one_mask_per_sequence_matches_naive_loops() -> None:
    mask = torch.rand(4, 5, 5, generator=GENERATOR) < 0.4
    mask[:, :, 0] = False
    out = buffer()
    npu._npu_flash_attention(Q, K, V, mask, ROWS, SCALE, N1, N2, out)
    judge(out, packed(K), packed(V), ROWS, lambda b, i, keys: ~mask[b, i, :keys])
    again = buffer()
    npu._npu_flash_attention(Q, K, V, mask[:, None].to(torch.int8), ROWS, SCALE, N1, N2, again)
    same_bits(again, out)


def test_result_with_nz_mask_bitwise_equals_result_with_plain_mask() -> None:
    def fractals(mask: torch.Tensor) -> torch.Tensor:
        return torch.stack([mask[:, 16 * j : 16 * j + 16] for j in range(mask.shape[1] // 16)])[None]

    lengths, k, triangle = torch.tensor([7, 9]), torch.randn(16, N2, D, generator=GENERATOR), torch.ones(32, 32).triu(1)
    q, table = torch.randn(16, N1, D, generator=GENERATOR), torch.tensor([[1], [2]], dtype=torch.int32)
    rows = triangle[torch.cat([torch.arange(7), torch.arange(9)])]
    calls: tuple[Callable[[torch.Tensor, torch.Tensor], None], ...] = (
        lambda mask, out: npu._npu_flash_attention(q, k, k, mask, lengths, SCALE, N1, N2, out),
        lambda mask, out: npu._npu_flash_attention_v3(q, k, k, mask, lengths, SCALE, N1, N2, out=out),
        lambda mask, out: npu._npu_flash_attention_qlens(
            q, PAGES, PAGES, table, mask, lengths, lengths, N2, N1, SCALE, out
        ),
        lambda mask, out: npu._npu_paged_attention_splitfuse(
            q, PAGES, PAGES, table, lengths, mask, lengths, N2, N1, SCALE, out
        ),
    )
    for call, mask in zip(calls, (triangle, triangle, triangle, rows), strict=True):
        result = torch.full((2, 16, N1, D), math.nan)
        call(mask, result[0])
        call(fractals(mask), result[1])
        same_bits(*result)


@pytest.mark.parametrize("kernel", [0, 2, None])
def test_kernel_type_does_not_change_the_result(kernel: int | None) -> None:
    npu._npu_flash_attention_unpad(Q, K, V, ROWS, SCALE, N1, N2, wanted := buffer())
    npu._npu_flash_attention_unpad_v2(Q, K, V, ROWS, SCALE, N1, N2, kernel_type=kernel, out=(out := buffer()))
    same_bits(out, wanted)


def test_output_rows_after_the_last_sequence_are_not_written() -> None:
    rows, out = torch.tensor([2, 3]), buffer()
    npu._npu_flash_attention_unpad(Q, K, V, rows, SCALE, N1, N2, out)
    judge(out[:5], K[:5].split([2, 3]), V[:5].split([2, 3]), rows, everything, Q[:5])
    assert out[5:].isnan().all()
    npu._npu_flash_attention_unpad(Q, K, V, rows * 0, SCALE, N1, N2, out.zero_())
    assert not out.any()


def test_prefill_attention_over_paged_cache_matches_naive_loops() -> None:
    out, keys, values = buffer(), unpaged(PAGES, KEYS, TABLE), unpaged(VALUES, KEYS, TABLE)
    triangle = torch.ones(128, 128, dtype=torch.bfloat16).triu(1)
    npu._npu_flash_attention_qlens(Q, PAGES, VALUES, TABLE, triangle, ROWS, KEYS, N2, N1, SCALE, out)
    judge(out, keys, values, ROWS, causal(ROWS))
    again, pages = buffer(), {"block_table": TABLE, "context_lens": KEYS, "seq_len": ROWS}
    npu._npu_paged_attention_splitfuse_v2(
        Q, PAGES, VALUES, mask=triangle, **pages, num_kv_heads=N2, num_heads=N1, scale_value=SCALE, out=again
    )
    same_bits(again, out)
    line = torch.rand(T, 33, generator=GENERATOR) < 0.5
    line[:, 1] = False
    starts = ROWS.cumsum(0) - ROWS
    npu._npu_paged_attention_splitfuse(
        query=Q, key_cache=PAGES, value_cache=VALUES, mask=line.float() * -10000, block_table=TABLE, seq_len=ROWS,
        context_lens=KEYS, num_kv_heads=N2, num_heads=N1, scale_value=SCALE, out=out,
    )  # fmt: skip
    judge(out, keys, values, ROWS, lambda b, i, n: ~line[starts[b] + i, :n])


def test_paged_decode_attention_matches_naive_loops() -> None:
    some = KEYS > 0
    keys, table, q = KEYS[some], TABLE[some], Q[:3]
    ones, out = torch.ones(3, dtype=torch.int64), buffer(3)
    args = {
        "query": q, "key_cache": PAGES, "value_cache": VALUES, "num_kv_heads": N2, "num_heads": N1,
        "scale_value": SCALE, "block_table": table, "context_lens": keys.int(), "out": out,
    }  # fmt: skip
    workspace = npu._npu_paged_attention_get_workspace(**args)
    npu._npu_paged_attention(**args, workspace=workspace)
    judge(out, unpaged(PAGES, keys, table), unpaged(VALUES, keys, table), ones, everything, q)
    npu._npu_paged_attention(Q[:4], PAGES, VALUES, N2, N1, SCALE, TABLE, KEYS, out4 := buffer(4))
    assert not out4[1].any()  # a sequence without keys
    for heads in (1, N2):
        pages = PAGES[:, :, :heads]
        npu._npu_paged_attention_mla(q, pages, heads, N1, SCALE, table, keys, 12, latent := buffer(3, 12))
        judge(latent, unpaged(pages, keys, table), unpaged(pages[..., :12], keys, table), ones, everything, q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_reshape_and_cache_writes_rows_to_slots_and_skips_negative_slots(dtype: torch.dtype) -> None:
    slots = [17, -1, 3, 127, 0, 64, 65, -7, 30, 31]
    key, value, pages, values = ((9 * t).to(dtype) for t in (K, V, PAGES, VALUES))
    wanted = [pages.clone(), values.clone()]
    for cache, rows in zip(wanted, (key, value), strict=True):
        for slot, row in zip(slots, rows, strict=True):
            if slot >= 0:
                cache[slot // SLOTS, slot % SLOTS] = row
    one, flat = pages.clone(), pages.clone()
    npu._npu_reshape_and_cache(key, value, pages, values, torch.tensor(slots))
    same_bits(pages, wanted[0])
    same_bits(values, wanted[1])
    npu._npu_reshape_and_cache_siso(key, one, torch.tensor(slots, dtype=torch.int32))
    same_bits(one, wanted[0])
    npu._npu_reshape_and_cache_siso(key.flatten(1), flat.view(8, SLOTS, 1, N2 * D), torch.tensor(slots))
    same_bits(flat, wanted[0])


def test_reshape_and_cache_writes_nz_caches_of_different_dtypes() -> None:
    """MLA caches have int8 latents next to bfloat16 rope rows, stored in the chip's NZ format."""
    key, value = (9 * torch.randn(3, 2, 64)).to(torch.int8), torch.randn(3, 1, 64).bfloat16()
    pages, values = torch.zeros(2, 4, 16, 32, dtype=torch.int8), torch.zeros(2, 4, 16, 16, dtype=torch.bfloat16)
    npu._npu_reshape_and_cache(key, value, pages, values, torch.tensor([17, -1, 31]))
    for cache, rows in ((pages, key), (values, value)):
        stored = cache.transpose(1, 2).flatten(2)
        same_bits(stored[1, 1], rows[0].flatten())
        same_bits(stored[1, 15], rows[2].flatten())
        assert int(stored.ne(0).any(-1).sum()) == 2
    with pytest.raises(ContractError, match="slots of value_cache"):
        npu._npu_reshape_and_cache(key, value, pages, values[:1].clone(), torch.tensor([17, -1, 31]))


@pytest.mark.parametrize("neox", [False, True])
def test_rotary_embedding_matches_complex_rotation(neox: bool) -> None:
    angles = torch.rand(40, D // 2, generator=GENERATOR)
    cos, sin, positions = angles.cos(), angles.sin(), torch.randint(0, 40, (T,), generator=GENERATOR)
    query, key = Q.flatten(1).clone(), K.clone()
    npu._npu_rotary_embedding(positions, query, key, D, torch.cat((cos, sin), -1), neox)

    def turned(rows: torch.Tensor) -> torch.Tensor:
        pairs = rows.double().unflatten(-1, (2, -1)).mT if neox else rows.double().unflatten(-1, (-1, 2))
        turns = torch.complex(cos.double(), sin.double())[positions].unsqueeze(1)
        result = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turns)
        return (result.mT if neox else result).flatten(-2)

    compare_with("[query, key]", [query.view(T, N1, D), key], lambda: [turned(Q), turned(K)])


def call(name: str, **changes: Any) -> dict[str, Any]:
    """Arguments of a legal call of function `name`, updated with `changes`."""
    rows, pages = torch.tensor([2, 3]), torch.tensor([20, 31])
    common = {"scale_value": SCALE, "num_heads": N1, "num_kv_heads": N2}
    args: dict[str, Any] = {"query": Q[:5], "key": K[:5], "value": V[:5], "seq_len": rows, "out": buffer(5), **common}
    if "paged" in name:
        args = {"query": Q[:2], "key_cache": PAGES, "value_cache": VALUES, "block_table": TABLE[:2], **common}
        args |= {"context_lens": pages, "out": buffer(2)}
    elif "unpad" not in name:
        args["mask"] = torch.zeros(5, 5)
    return args | changes


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("_npu_flash_attention", {"seq_len": torch.tensor([2, 5])}, "seq_len: expected lengths that add up to"),
        (
            "_npu_flash_attention_unpad",
            {"seq_len": torch.tensor([2**62, 2**62])},
            "seq_len: expected lengths that add up to",
        ),
        ("_npu_flash_attention", {"seq_len": torch.tensor([2, -3])}, "seq_len: expected lengths >= 0"),
        ("_npu_flash_attention", {"mask": torch.zeros(2, 2)}, r"mask: expected \[S, S\]"),
        ("_npu_flash_attention", {"mask": torch.full((5, 5), -0.5)}, "or 0, got -0.5"),
        ("_npu_flash_attention", {"out": buffer(5).double()}, "out: expected float32 as query"),
        ("_npu_flash_attention", {"out": buffer(5)[:1].expand(5, N1, DV)}, "a separate memory address"),
        ("_npu_flash_attention", {"query": Q[:5].clone().requires_grad_()}, "query: .*npu_fusion_attention"),
        ("_npu_flash_attention_unpad", {"num_kv_heads": 3}, "key: expected axis 1 to be"),
        ("_npu_flash_attention_unpad", {"scale_value": math.inf}, "a finite scale"),
        ("_npu_flash_attention_unpad_v2", {"kernel_type": 1}, r"kernel_type: expected kernel_type in \(0, 2\)"),
        ("_npu_paged_attention", {"context_lens": torch.tensor([20, 33])}, "at most the tokens of the pages"),
        ("_npu_paged_attention", {"block_table": torch.tensor([[4, 1], [3, 8]])}, "block_table"),
        ("_npu_paged_attention", {"context_lens": torch.tensor([20])}, "one length per row of block_table"),
        ("_npu_flash_attention_unpad", {"query": Q[:5, :, :0], "key": K[:5, :, :0]}, "query: expected 1 <= D <= 768"),
        ("_npu_flash_attention_unpad", {"value": V[:5, :, :0], "out": buffer(5)[..., :0]}, "value: expected 1 <= Dv"),
        (
            "_npu_paged_attention",
            {"key_cache": PAGES[:0], "value_cache": VALUES[:0]},
            r"block_table: .*outside \[0, 0\)",
        ),
    ],
)
def test_invalid_call_raises_and_leaves_out_unwritten(name: str, changes: dict[str, Any], text: str) -> None:
    args = call(name, **changes)
    with pytest.raises(ContractError, match=f"{name}: .*{text}" if "query" not in text else text) as refused:
        getattr(npu, name)(**args)
    with pytest.raises(ContractError) as by_definition:
        bind(CONTRACTS[name], args)
    assert str(by_definition.value) == str(refused.value)
    assert args["out"].isnan().all()


def test_error_of_the_computing_function_names_the_called_function() -> None:
    q, op = Q[None], CONTRACTS["_npu_flash_attention"]
    with (
        pytest.raises(ContractError, match=f"^{op.name}: mask: "),
        in_place_of(op, atten_mask="mask"),
    ):
        npu.npu_fusion_attention(q, q, q, N1, "BSND", atten_mask=torch.zeros(2, 2))
