"""cann_ops_transformer's sparse_flash_mla and its gradient: what compressed_attention() computes, in CANN's terms."""

from importlib import import_module
from typing import Any

import pytest
import torch
from support.bits import same_bits
from support.compressed import CompressedCase, arguments, wanted

import fusion_attention as fa
from fusion_attention.testing import check
from fusion_attention.testing.drawn import compare_with

RATIO, WINDOW = 4, 6
CAUSAL: dict[str, Any] = {"ori_mask_mode": 4, "ori_win_left": WINDOW - 1, "ori_win_right": 0}
BOTH: dict[str, Any] = {**CAUSAL, "cmp_mask_mode": 3, "cmp_ratio": RATIO}
Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture
def cann(torch_npu: Any) -> Any:
    return import_module("cann_ops_transformer")


def rows(tokens: int = 21, heads: int = 4, dim: int = 16, batch: int = 2, dtype: torch.dtype = torch.float32) -> Rows:
    """q, ori_kv, cmp_kv and sinks of sequences from position 0."""
    q, k = torch.randn(batch, tokens, heads, dim).to(dtype), torch.randn(batch, tokens, 1, dim).to(dtype)
    return q, k, torch.randn(batch, tokens // RATIO, 1, dim).to(dtype), torch.randn(heads)


def lists(tokens: int, batch: int = 2, count: int = 3) -> torch.Tensor:
    entry, row = torch.arange(tokens // RATIO), torch.arange(tokens)[:, None]
    chosen = (torch.rand(batch, tokens, len(entry)) < 0.6) & ((entry + 1) * RATIO <= row + 1)
    return fa.pack_lists(entry.masked_fill(~chosen, -1))[:, :, None, :count].int()


def residual(tokens: int, batch: int = 2) -> torch.Tensor:
    return torch.full((batch,), tokens % RATIO, dtype=torch.int32)


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("tokens", [21, 24])
def test_padded_rows_and_gradients(listed: bool, tokens: int, cann: Any) -> None:
    case = CompressedCase(
        q_len=(tokens, tokens), kv_len=(tokens, tokens), ratio=RATIO, window=WINDOW, sink=True, dim_qk=16, count=3,
        lists="all" if listed else "",
    )  # fmt: skip
    args = arguments(case)
    leaves = {n: args[n].detach().clone().requires_grad_() for n in ("query", "key", "key_compressed", "sinks")}
    q, k, c, sinks = leaves.values()
    indices, dy = args["sparse_indices"], args["dy"]
    words = {**BOTH, "cmp_residual_kv": residual(tokens), "softmax_scale": case.scale}
    metadata = cann.sparse_flash_mla_metadata(4, 1, 16, batch_size=2).cpu()
    out, lse = cann.sparse_flash_mla(
        q, k, c, None, indices, sinks=sinks, metadata=metadata, return_softmax_lse=True, **words
    )
    own = {"ratio": RATIO, "band": fa.Band.window(WINDOW - 1), "scale": case.scale, "sink": sinks, "return_lse": True}
    want, want_lse = fa.compressed_attention(q, k, c, indices, **own)
    same_bits(out, want)
    same_bits(lse[:, 0].mT.detach(), want_lse.detach())
    assert lse.shape == (2, 1, tokens, 4)
    gradients = torch.autograd.grad(out, tuple(leaves.values()), dy)
    named = {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    bound = wanted(case, args)
    check(case.id, named, {name: bound[name] for name in named})
    with torch.no_grad():
        found = cann.sparse_flash_mla_grad(q, dy, out, lse, k, c, None, indices, sinks=sinks, **words)
    for mine, other in zip(found[:4], gradients, strict=True):
        same_bits(mine, other)
    assert found[4].numel() == 0
    if not listed:
        assert found[5].numel() == 0
        return
    share = found[5]
    assert share.shape == indices.shape

    def mean_probabilities() -> tuple[torch.Tensor]:
        listed = c.double()[:, :, 0][torch.arange(2)[:, None, None], indices[:, :, 0].clamp(min=0).long()]
        scores = case.scale * torch.einsum("bshd,bskd->bshk", q.double(), listed) - lse[:, 0, ..., None].double()
        return (scores.exp().mean(2).masked_fill(indices[:, :, 0] < 0, 0)[:, :, None],)

    compare_with("cmp_softmax_l1_norm", (share,), mean_probabilities)


def test_packed_rows(cann: Any) -> None:
    case = CompressedCase(layout="TND", q_len=(3, 6, 4), kv_len=(5, 6, 9), ratio=2, sink=True, dtype="bfloat16")
    args = arguments(case)
    ends = {
        side: torch.tensor([0, *torch.tensor(case.lengths(side)).cumsum(0)], dtype=torch.int32)
        for side in ("q", "kv", "c")
    }
    out, lse = cann.sparse_flash_mla(
        args["query"], args["key"], args["key_compressed"], sinks=args["sinks"], softmax_scale=case.scale,
        cu_seqlens_q=ends["q"], cu_seqlens_ori_kv=ends["kv"], cu_seqlens_cmp_kv=ends["c"], layout_q="TND",
        layout_kv="TND", ori_mask_mode=4, ori_win_left=case.window - 1, ori_win_right=0, cmp_mask_mode=3, cmp_ratio=2,
        cmp_residual_kv=torch.tensor(case.kv_len) % 2, return_softmax_lse=True,
    )  # fmt: skip
    own = {"layout": "TND", "q_len": case.q_len, "kv_len": case.kv_len, "compressed_len": case.lengths("c")}
    want, want_lse = fa.compressed_attention(
        args["query"], args["key"], args["key_compressed"], ratio=2, band=fa.Band.window(case.window - 1),
        sink=args["sinks"], scale=case.scale, return_lse=True, **own,
    )  # fmt: skip
    same_bits(out, want)
    same_bits(lse, want_lse[None])


def test_keys_in_pages(cann: Any) -> None:
    q, k, c, sinks = rows(20, dtype=torch.bfloat16)
    words = {**BOTH, "cmp_residual_kv": residual(20), "sinks": sinks}
    want, _ = cann.sparse_flash_mla(q, k, c, None, lists(20), **words)
    pages, few = torch.full((5, 16, 1, 16), torch.nan).bfloat16(), torch.full((4, 8, 1, 16), torch.nan).bfloat16()
    table, few_table = torch.tensor([[3, 0], [1, 4]], dtype=torch.int32), torch.tensor([[2], [1]], dtype=torch.int32)
    for b in range(2):
        pages[table[b, 0]], pages[table[b, 1], :4] = k[b, :16], k[b, 16:]
        few[few_table[b, 0], :5] = c[b]
    torch.manual_seed(0)
    used = {"seqused_ori_kv": torch.tensor([20, 20]), "seqused_cmp_kv": torch.tensor([5, 5]), "layout_kv": "PA_BBND"}
    chosen = lists(20)
    want, _ = cann.sparse_flash_mla(q, k, c, None, chosen, **words)
    out, _ = cann.sparse_flash_mla(
        q, pages, few, None, chosen, ori_block_table=table, cmp_block_table=few_table, **words, **used
    )
    same_bits(out, want)


@pytest.mark.parametrize(("mode", "band"), [(0, fa.Band.full()), (3, fa.Band.causal()), (4, fa.Band.window(2, 1))])
def test_without_compressed_keys(mode: int, band: fa.Band, cann: Any) -> None:
    q, k, _, sinks = rows(9)
    window = {"ori_win_left": 2, "ori_win_right": 1} if mode == 4 else {}
    out, lse = cann.sparse_flash_mla(q, k, sinks=sinks, ori_mask_mode=mode, softmax_scale=0.25, **window)
    assert (lse.shape, float(lse)) == ((), 0.0)
    none = k[:, :0]
    same_bits(out, fa.compressed_attention(q, k, none, ratio=16, band=band, sink=sinks, scale=0.25))


@pytest.mark.parametrize("sunk", [True, False])
def test_rows_without_keys(sunk: bool, cann: Any) -> None:
    """out, lse and gradients are 0, whatever the sink is."""
    q, k, c, sinks = (t.requires_grad_() for t in rows(9))
    few = k[:, :4], c[:, :1]
    words = {**BOTH, "cmp_residual_kv": torch.zeros(2, dtype=torch.int32), "sinks": sinks if sunk else None}
    indices = torch.zeros(2, 9, 1, 2, dtype=torch.int32)
    indices[..., 1] = -1
    out, lse = cann.sparse_flash_mla(q, *few, None, indices, return_softmax_lse=True, **words)
    assert not out[:, :5].any()
    assert not lse[:, :, :5].any()
    assert lse[:, :, 5:].all()
    (dq,) = torch.autograd.grad(out.sum() + lse.sum(), (q,))
    assert not dq[:, :5].any()


def test_a_layer_on_device_npu_trains(cann: Any) -> None:
    """A program written for the chip, forward and backward, beside plain torch."""
    tokens, heads, dim = 18, 2, 8
    hidden = torch.randn(1, tokens, 12)
    weights = [torch.randn(12, n) * 0.3 for n in (heads * dim, dim, dim)]
    sinks = torch.randn(heads)

    def compressed(kv: torch.Tensor) -> torch.Tensor:
        return kv[:, : tokens // RATIO * RATIO].unflatten(1, (-1, RATIO)).mean(2)

    def layer(device: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        leaves = [t.to(device, dtype).requires_grad_() for t in (*weights, sinks)]
        x = hidden.to(device, dtype)
        q, k, c = (x @ leaves[0]).unflatten(-1, (heads, dim)), x @ leaves[1], compressed(x @ leaves[2])
        if device == "npu":
            words = {**BOTH, "cmp_residual_kv": residual(tokens, 1).npu(), "softmax_scale": dim**-0.5}
            out, _ = cann.ops.sparse_flash_mla(q, k[:, :, None], c[:, :, None], sinks=leaves[3], **words)
        else:
            row, key, entry = torch.arange(tokens)[:, None], torch.arange(tokens), torch.arange(tokens // RATIO)
            seen = torch.cat(((key <= row) & (key > row - WINDOW), (entry + 1) * RATIO <= row + 1), 1)
            every = torch.cat((k, c), 1)
            scores = torch.einsum("bshd,bkd->bhsk", q, every) * dim**-0.5
            scores = scores.masked_fill(~seen, -torch.inf)
            scores = torch.cat((scores, leaves[3].view(1, -1, 1, 1).expand(1, heads, tokens, 1)), -1)
            out = torch.einsum("bhsk,bkd->bshd", scores.softmax(-1)[..., :-1], every)
        return (out, *torch.autograd.grad(out.square().sum(), leaves))

    compare_with(
        "layer", tuple(t.cpu().detach() for t in layer("npu", torch.float32)), lambda: layer("cpu", torch.float64)
    )


@pytest.mark.parametrize("tokens", [21, 24])
def test_the_indexer_chooses_closed_compressed_keys(tokens: int, cann: Any) -> None:
    q, k, w = torch.randn(2, tokens, 2, 8), torch.randn(2, tokens // RATIO, 1, 8), torch.rand(2, tokens, 2)
    words = {"mask_mode": 3, "cmp_ratio": RATIO, "cmp_residual_k": residual(tokens)}
    indices, values = cann.lightning_indexer(q, k, w, 3, return_value=1, **words)
    closed = ((torch.arange(tokens) + 1) // RATIO).expand(2, tokens)
    want, scores = fa.lightning_indexer(q, k, w, 3, visible=closed)
    same_bits(indices, want)
    same_bits(values, scores.float())
    assert cann.lightning_indexer(q, k, w, 3, **words)[1].numel() == 0


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"ori_kv": None}, r"ori_kv: expected rows of keys"),
    ({"ori_sparse_indices": torch.zeros(2, 8, 1, 2, dtype=torch.int32)}, r"ori_sparse_indices: expected None"),
    ({"cmp_topk_length": torch.ones(2, 8, 1, dtype=torch.int32)}, r"cmp_topk_length: expected None"),
    ({"cmp_mask_mode": 0}, r"cmp_mask_mode: expected 3 with cmp_kv, 0 without"),
    ({"ori_mask_mode": 1}, r"ori_mask_mode: expected ori_mask_mode in \(0, 3, 4\), got 1"),
    ({"ori_mask_mode": 3}, r"ori_win_left: expected -1, and ori_win_right likewise, but in ori_mask_mode 4"),
    ({"cmp_ratio": 0}, r"cmp_ratio: expected cmp_ratio >= 1, got 0"),
    ({"cmp_residual_kv": torch.tensor([4, 0])}, r"cmp_residual_kv: expected numbers from 0 to cmp_ratio - 1"),
    ({"layout_kv": "TND"}, r"layout_kv: expected what the queries have, or PA_BBND"),
    ({"layout_kv": "PA_BBND"}, r"seqused_ori_kv: expected the lengths of keys in pages"),
    ({"cmp_kv": None, "cmp_sparse_indices": torch.zeros(2, 8, 1, 2, dtype=torch.int32)}, r"lists beside cmp_kv alone"),
    ({"cmp_sparse_indices": torch.full((2, 8, 1, 2), 2, dtype=torch.int32)}, r"got 2 at batch 0, row 0, slot 0"),
    ({"topk_value_mode": 0}, r"topk_value_mode: expected topk_value_mode == 1"),
    ({"sinks": torch.ones(3)}, r"sinks: expected axis 0 to be N1=4 as in q, got 3"),
]


@pytest.mark.parametrize(
    ("change", "message"), REFUSED, ids=[f"{n}-{next(iter(c))}" for n, (c, _) in enumerate(REFUSED)]
)
def test_a_wrong_call_says_what_is_wrong(change: dict[str, Any], message: str, cann: Any) -> None:
    q, k, c, sinks = rows(8)
    given = {"q": q, "ori_kv": k, "cmp_kv": c, "sinks": sinks, "cmp_residual_kv": residual(8), **BOTH}
    with pytest.raises(fa.ContractError, match=message):
        cann.sparse_flash_mla(**{**given, **change})


def test_packed_rows_say_where_they_end(cann: Any) -> None:
    q, k, c, sinks = (t.flatten(0, 1) if t.dim() > 1 else t for t in rows(8))
    ends = {f"cu_seqlens_{side}": torch.tensor([0, 8, 16]) for side in ("q", "ori_kv")} | {
        "cu_seqlens_cmp_kv": torch.tensor([0, 2, 4])
    }
    words = {**BOTH, **ends, "layout_q": "TND", "layout_kv": "TND", "sinks": sinks, "cmp_residual_kv": torch.zeros(2)}
    words["cmp_residual_kv"] = torch.zeros(2, dtype=torch.int32)
    for name, wrong, message in (
        ("cu_seqlens_q", None, "cu_seqlens_q: expected the ends of packed sequences"),
        ("cu_seqlens_q", torch.tensor([8, 16]), "cu_seqlens_q: expected cumulative lengths .* no 0 before them"),
        ("cu_seqlens_ori_kv", torch.tensor([0, 9, 8]), "cu_seqlens_ori_kv: expected .* a length below 0"),
        (
            "cu_seqlens_cmp_kv",
            torch.tensor([0, 2, 5]),
            "cu_seqlens_cmp_kv: expected .* 5 tokens in all, 4 in the tensor",
        ),
        ("seqused_q", torch.tensor([7, 8]), "seqused_q: expected None beside cumulative lengths"),
    ):
        with pytest.raises(fa.ContractError, match=message):
            cann.sparse_flash_mla(q, k, c, **{**words, name: wrong})
