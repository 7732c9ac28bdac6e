"""torch_npu's indexer and sparse attention over int8 keys, against float64 loops by the text of torch_npu's pages."""

from typing import Any

import pytest
import torch
from support.bits import same_bits

from fusion_attention import npu
from fusion_attention.contract import ContractError
from fusion_attention.settings import strict
from fusion_attention.testing.estimated_rounding_errors import compare_with

B, S1, N1, D, SLOTS = 2, 5, 4, 16, 16
ROWS, KEYS = [5, 3], [20, 31]
TABLE = torch.tensor([[6, 1], [9, 4]], dtype=torch.int32)
GENERATOR = torch.Generator().manual_seed(11)


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, generator=GENERATOR).to(torch.int8)


def powers(*shape: int) -> torch.Tensor:
    """Returns signed powers of two: float32 holds every score, so only one selection is right."""
    return (
        2.0 ** torch.randint(-2, 3, shape, generator=GENERATOR)
        * torch.tensor([1.0, 1, 1, -1])[torch.randint(0, 4, shape, generator=GENERATOR)]
    )


QUERY, QUERY_SCALE, WEIGHTS = integers(B, S1, N1, D), powers(B, S1, N1), powers(B, S1, N1)
PAGES, PAGE_SCALES = integers(12, SLOTS, 1, D), powers(12, SLOTS, 1)


def of(pages: torch.Tensor, b: int) -> torch.Tensor:
    """Returns the keys of sequence b without pages."""
    return pages[TABLE[b].long()].flatten(0, 1)[: KEYS[b]]


def best(b: int, row: int, count: int, mode: int) -> list[int]:
    key, scale = of(PAGES, b)[:, 0].double(), of(PAGE_SCALES, b)[:, 0].double()
    products = QUERY[b, row].double() @ key.T * QUERY_SCALE[b, row].double()[:, None] * scale
    scores = (WEIGHTS[b, row].double()[:, None] * products.clamp(min=0)).sum(0)
    visible = KEYS[b] - ROWS[b] + row + 1 if mode == 3 else KEYS[b]
    result = scores[:visible].sort(descending=True, stable=True)[1][:count].tolist()
    return [*result, *[-1] * (count - len(result))]


@pytest.mark.parametrize("mode", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_npu_quant_lightning_indexer_selects_keys_of_formula(mode: int, dtype: torch.dtype) -> None:
    rows = {b: [best(b, i, 24, mode) for i in range(ROWS[b])] for b in range(B)}
    numbers: dict[str, Any] = {"query_quant_mode": 0, "key_quant_mode": 0, "sparse_count": 24, "sparse_mode": mode}
    ends, lengths = torch.tensor([5, 8], dtype=torch.int32), torch.tensor(KEYS, dtype=torch.int32)

    def packed(t: torch.Tensor) -> torch.Tensor:
        return torch.cat([t[b, : ROWS[b]] for b in range(B)])

    scales, weights = QUERY_SCALE.to(dtype), WEIGHTS.half()
    paged = npu.npu_quant_lightning_indexer(
        packed(QUERY), PAGES, packed(weights), packed(scales), PAGE_SCALES.to(dtype), block_table=TABLE,
        actual_seq_lengths_query=ends, actual_seq_lengths_key=lengths, layout_query="TND", layout_key="PA_BSND",
        **numbers,
    )  # fmt: skip
    assert paged.dtype == torch.int32
    assert paged[:, 0].tolist() == rows[0] + rows[1]
    flat = [torch.cat([of(pages, b) for b in range(B)]) for pages in (PAGES, PAGE_SCALES.to(dtype))]
    same_bits(
        npu.npu_quant_lightning_indexer(
            packed(QUERY), flat[0], packed(weights), packed(scales), flat[1], actual_seq_lengths_query=ends,
            actual_seq_lengths_key=lengths.cumsum(0), layout_query="TND", layout_key="TND", **numbers,
        ),
        paged,
    )  # fmt: skip
    one = npu.npu_quant_lightning_indexer(
        QUERY[:1], of(PAGES, 0)[None], weights[:1], scales[:1], of(PAGE_SCALES, 0)[None].to(dtype), **numbers
    )
    assert one[0, :, 0].tolist() == rows[0]


LATENT, ROPE, TILE = 32, 8, 8


def cache(pages: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns packed bytes, and the float64 numbers that they encode: [pages, slots, 1, latent + rope]."""
    numbers, rope = integers(pages, SLOTS, 1, LATENT), torch.randn(pages, SLOTS, 1, ROPE, generator=GENERATOR).to(dtype)
    scales = torch.rand(pages, SLOTS, 1, LATENT // TILE, generator=GENERATOR) / 64
    latent = numbers.double() * scales.double().repeat_interleave(TILE, -1)
    packed = torch.cat([t.contiguous().view(torch.int8) for t in (numbers, rope, scales)], -1)
    return packed, torch.cat((latent, rope.double()), -1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["PA_BSND", "BSND"])
@pytest.mark.parametrize("sinks", [None, torch.tensor([-2.0, 0.0, 1.0, 40.0])])
def test_npu_kv_quant_sparse_flash_attention_matches_formula(
    sinks: torch.Tensor | None, layout: str, dtype: torch.dtype
) -> None:
    packed, meant = cache(12, dtype)
    q = torch.randn(1, S1, N1, LATENT + ROPE, generator=GENERATOR).to(dtype)
    chosen = torch.stack([torch.randperm(KEYS[0], generator=GENERATOR)[:6] for _ in range(S1)])[None, :, None].int()
    chosen[0, 2, 0, 4:] = -1
    key, paged = of(packed, 0)[None], {}
    if layout == "PA_BSND":
        key = packed
        paged = {"block_table": TABLE[:1], "actual_seq_lengths_kv": torch.tensor(KEYS[:1], dtype=torch.int32)}
    common: dict[str, Any] = {"tile_size": TILE, "rope_head_dim": ROPE, "layout_kv": layout, "sparse_mode": 0}
    common["sinks"] = sinks
    out = npu.npu_kv_quant_sparse_flash_attention(q, key, key, chosen, 0.2, 2, 2, **common, **paged)

    def formula() -> torch.Tensor:
        keys, rows = of(meant, 0)[:, 0], []
        for i in range(S1):
            picked = [j for j in chosen[0, i, 0].tolist() if j >= 0]
            scores = 0.2 * q[0, i].double() @ keys[picked].T
            if sinks is not None:
                scores = torch.cat((scores, sinks.double()[:, None]), -1)
            rows.append(scores.softmax(-1)[:, : len(picked)] @ keys[picked][:, :LATENT])
        return torch.stack(rows)[None]

    compare_with("out", out, formula, dtype=torch.float32)  # and rounded once
    with strict(), pytest.raises(ContractError, match=r"query: expected D == 576, got D=40"):
        npu.npu_kv_quant_sparse_flash_attention(q, key, key, chosen, 0.2, 2, 2, **common, **paged)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"query": QUERY.float()}, r"query: expected int8, got float32 \(float8 forms"),
        ({"key_dequant_scale": PAGE_SCALES[:3]}, "key_dequant_scale: expected axis 0 to be P=12 as in key"),
        ({"query_quant_mode": 1}, "query_quant_mode: expected query_quant_mode == 0"),
        ({"key_dtype": 290}, "key_dtype"),
        ({"layout_query": "TND"}, "query: expected"),
        ({"actual_seq_lengths_key": torch.tensor([20, 33])}, "npu_quant_lightning_indexer: actual_seq_lengths_key"),
        ({"block_table": TABLE + 8}, "npu_quant_lightning_indexer: block_table"),
        ({"sparse_count": 0}, "sparse_count"),
    ],
)
def test_npu_quant_lightning_indexer_error_names_argument_and_operator(change: dict[str, Any], text: str) -> None:
    args = {
        "query": QUERY, "key": PAGES, "weights": WEIGHTS, "query_dequant_scale": QUERY_SCALE,
        "key_dequant_scale": PAGE_SCALES, "query_quant_mode": 0, "key_quant_mode": 0, "block_table": TABLE,
        "actual_seq_lengths_key": torch.tensor(KEYS), "layout_key": "PA_BSND", "sparse_count": 4,
    }  # fmt: skip
    npu.npu_quant_lightning_indexer(**args)
    with pytest.raises(ContractError, match=text) as caught:
        npu.npu_quant_lightning_indexer(**{**args, **change})
    assert caught.value.op == "npu_quant_lightning_indexer"


@pytest.mark.usefixtures("fresh")
def test_quantised_attention_compiles_to_one_graph() -> None:
    def attended(query: torch.Tensor, pages: torch.Tensor, lists: torch.Tensor) -> torch.Tensor:
        return npu.npu_kv_quant_sparse_flash_attention(
            query, pages, pages, lists, 0.04, 2, 2, block_table=TABLE,
            actual_seq_lengths_kv=torch.tensor(KEYS, dtype=torch.int32), layout_kv="PA_BSND", tile_size=TILE,
            rope_head_dim=ROPE,
        )  # fmt: skip

    query = torch.randn(B, S1, N1, LATENT + ROPE, generator=GENERATOR).half()
    args = query, cache(12, torch.float16)[0], torch.arange(6, dtype=torch.int32).expand(B, S1, 1, 6)
    same_bits(torch.compile(attended, backend="aot_eager", fullgraph=True)(*args), attended(*args))
