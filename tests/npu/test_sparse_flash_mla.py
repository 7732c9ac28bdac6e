"""sparse_flash_mla and its gradient are compared with compressed_attention() and with a formula in float64."""

from importlib import import_module
from itertools import accumulate
from typing import Any

import pytest
import torch
from support.bits import same_bits
from support.compressed import CompressedCase, arguments, wanted

import fusion_attention as fa
from fusion_attention.contract import Attr, bind
from fusion_attention.ops import RECORDS
from fusion_attention.testing import check
from fusion_attention.testing.estimated_rounding_errors import compare_with

RATIO, WINDOW = 4, 6
CAUSAL: dict[str, Any] = {"ori_mask_mode": 4, "ori_win_left": WINDOW - 1, "ori_win_right": 0}
BOTH: dict[str, Any] = {**CAUSAL, "cmp_mask_mode": 3, "cmp_ratio": RATIO}
Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture
def cann(torch_npu: Any) -> Any:
    return import_module("cann_ops_transformer")


def rows(tokens: int = 21, heads: int = 4, dim: int = 16, batch: int = 2, dtype: torch.dtype = torch.float32) -> Rows:
    """Random q [B, S, N, D], ori_kv, cmp_kv [B, S // RATIO, 1, D] and sinks [N]."""
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
def test_padded_output_and_gradients_match_compressed_attention(listed: bool, tokens: int, cann: Any) -> None:
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
    kwargs: dict[str, Any] = {
        "ratio": RATIO,
        "band": fa.Band.window(WINDOW - 1),
        "scale": case.scale,
        "sink": sinks,
        "return_lse": True,
    }
    want, want_lse = fa.compressed_attention(q, k, c, indices, **kwargs)
    same_bits(out, want)
    same_bits(lse[:, 0].mT.detach(), want_lse.detach())
    assert lse.shape == (2, 1, tokens, 4)
    gradients = torch.autograd.grad(out, tuple(leaves.values()), dy)
    named = {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    bound = wanted(case, args)
    check(case.id, named, {name: bound[name] for name in named})
    with torch.no_grad():
        results = cann.sparse_flash_mla_grad(q, dy, out, lse, k, c, None, indices, sinks=sinks, **words)
    for mine, other in zip(results[:4], gradients, strict=True):
        same_bits(mine, other)
    assert results[4].numel() == 0
    if not listed:
        assert results[5].numel() == 0
        return
    norm = results[5]
    assert norm.shape == indices.shape

    def mean_probabilities() -> tuple[torch.Tensor]:
        listed = c.double()[:, :, 0][torch.arange(2)[:, None, None], indices[:, :, 0].clamp(min=0).long()]
        scores = case.scale * torch.einsum("bshd,bskd->bshk", q.double(), listed) - lse[:, 0, ..., None].double()
        return (scores.exp().mean(2).masked_fill(indices[:, :, 0] < 0, 0)[:, :, None],)

    compare_with("cmp_softmax_l1_norm", (norm,), mean_probabilities)


def test_result_with_paged_keys_bitwise_equals_padded_keys(cann: Any) -> None:
    q, k, c, sinks = rows(20, dtype=torch.bfloat16)
    words = {**BOTH, "cmp_residual_kv": residual(20), "sinks": sinks}
    pages, few = torch.full((5, 16, 1, 16), torch.nan).bfloat16(), torch.full((4, 8, 1, 16), torch.nan).bfloat16()
    table, few_table = torch.tensor([[3, 0], [1, 4]], dtype=torch.int32), torch.tensor([[2], [1]], dtype=torch.int32)
    for b in range(2):
        pages[table[b, 0]], pages[table[b, 1], :4] = k[b, :16], k[b, 16:]
        few[few_table[b, 0], :5] = c[b]
    used = {"seqused_ori_kv": torch.tensor([20, 20]), "seqused_cmp_kv": torch.tensor([5, 5]), "layout_kv": "PA_BBND"}
    chosen = lists(20)
    want, _ = cann.sparse_flash_mla(q, k, c, None, chosen, **words)
    out, _ = cann.sparse_flash_mla(
        q, pages, few, None, chosen, ori_block_table=table, cmp_block_table=few_table, **words, **used
    )
    same_bits(out, want)


@pytest.mark.parametrize(("mode", "band"), [(0, fa.Band.full()), (3, fa.Band.causal()), (4, fa.Band.window(2, 1))])
def test_sparse_flash_mla_without_compressed_keys_matches_attention(mode: int, band: fa.Band, cann: Any) -> None:
    q, k, _, sinks = rows(9)
    words = {"ori_mask_mode": mode, "softmax_scale": 0.25, "sinks": sinks, "seqused_cmp_kv": [7, 7]}  # counts nothing
    words |= {"ori_win_left": 2, "ori_win_right": 1} if mode == 4 else {}
    out, nothing = cann.sparse_flash_mla(q, k, **words)
    assert (nothing.shape, float(nothing)) == ((), 0.0)
    same_bits(out, fa.compressed_attention(q, k, k[:, :0], ratio=16, band=band, sink=sinks, scale=0.25))
    _, lse = cann.sparse_flash_mla(q, k, **words, return_softmax_lse=True)
    grads = [cann.sparse_flash_mla_grad(q, q, out, lse, k, **{**words, "seqused_cmp_kv": n}) for n in ([7, 7], None)]
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("sunk", [True, False])
def test_rows_without_keys_have_zero_output_lse_and_gradient(sunk: bool, cann: Any) -> None:
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


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"ori_kv": None}, r"ori_kv: expected rows of keys"),
    ({"ori_sparse_indices": torch.zeros(2, 8, 1, 2).int()}, r"ori_sparse_indices: expected None beside cmp_kv"),
    ({"ori_topk_length": torch.ones(2, 8, 1).int()}, r"ori_topk_length: expected None without ori_sparse_indices"),
    ({"cmp_topk_length": torch.ones(2, 8, 1, dtype=torch.int32)}, r"cmp_topk_length: expected None, .*950 only"),
    ({"cmp_kv": None, "cmp_residual_kv": None}, r"cmp_mask_mode: expected 0 without cmp_kv"),
    ({"cu_seqlens_q": torch.tensor([0, 8, 16])}, r"cu_seqlens_q: expected None, as rows are not packed"),
    (
        {"seqused_ori_kv": torch.tensor([9, 8])},
        r"seqused_ori_kv: expected one length .*9 of sequence 0, outside \[0, 8\]",
    ),
    ({"layout_q": "BNSD"}, r"layout_q: expected"),
    ({"cmp_mask_mode": 0}, r"cmp_mask_mode: expected 3 with cmp_kv, .*0: this form \(950 only\) is not"),
    ({"ori_mask_mode": 1}, r"ori_mask_mode: expected ori_mask_mode in \(0, 3, 4\), got 1"),
    ({"ori_mask_mode": 3}, r"ori_win_left: expected -1, and ori_win_right -1, except in ori_mask_mode 4"),
    ({"cmp_ratio": 0}, r"cmp_ratio: expected cmp_ratio >= 1, got 0"),
    ({"cmp_residual_kv": torch.tensor([4, 0])}, r"cmp_residual_kv: expected numbers from 0 to cmp_ratio - 1"),
    ({"layout_kv": "TND"}, r"layout_kv: expected layout_q, or PA_BBND"),
    ({"layout_kv": "PA_BBND"}, r"seqused_ori_kv: expected the lengths of keys in pages"),
    ({"cmp_kv": None, "cmp_sparse_indices": torch.zeros(2, 8, 1, 2, dtype=torch.int32)}, r"lists only with cmp_kv"),
    ({"cmp_sparse_indices": torch.full((2, 8, 1, 2), 2, dtype=torch.int32)}, r"got 2 at batch 0, row 0, slot 0"),
    ({"topk_value_mode": 0}, r"topk_value_mode: expected topk_value_mode == 1"),
    ({"sinks": torch.ones(3)}, r"sinks: expected axis 0 to be N1=4 as in q, got 3"),
]


@pytest.mark.parametrize(
    ("change", "message"), REFUSED, ids=[f"{n}-{next(iter(c))}" for n, (c, _) in enumerate(REFUSED)]
)
def test_invalid_padded_call_error_names_parameter(change: dict[str, Any], message: str, cann: Any) -> None:
    q, k, c, sinks = rows(8)
    given = {"q": q, "ori_kv": k, "cmp_kv": c, "sinks": sinks, "cmp_residual_kv": residual(8), **BOTH}
    with pytest.raises(fa.ContractError, match=message):
        cann.sparse_flash_mla(**{**given, **change})


def test_invalid_packed_lengths_error_names_parameter(cann: Any) -> None:
    q, k, c, sinks = (t.flatten(0, 1) if t.dim() > 1 else t for t in rows(8))
    ends = {f"cu_seqlens_{side}": torch.tensor([0, 8, 16]) for side in ("q", "ori_kv")} | {
        "cu_seqlens_cmp_kv": torch.tensor([0, 2, 4])
    }
    words = {**BOTH, **ends, "layout_q": "TND", "layout_kv": "TND", "sinks": sinks, "cmp_residual_kv": torch.zeros(2)}
    words["cmp_residual_kv"] = torch.zeros(2, dtype=torch.int32)
    for name, wrong, message in (
        ("cu_seqlens_q", None, "cu_seqlens_q: expected the ends of packed sequences"),
        ("cu_seqlens_q", torch.tensor([8, 16]), "cu_seqlens_q: expected cumulative .* no leading 0"),
        ("cu_seqlens_ori_kv", torch.tensor([0, 9, 8]), "cu_seqlens_ori_kv: expected .* a negative length"),
        (
            "cu_seqlens_cmp_kv",
            torch.tensor([0, 2, 5]),
            "cu_seqlens_cmp_kv: expected .* 5 tokens in all, 4 in the tensor",
        ),
        ("seqused_q", torch.tensor([9, 8]), r"seqused_q: expected .* 9 of sequence 0, outside \[0, 8\]"),
        ("seqused_cmp_kv", torch.tensor([2]), "seqused_cmp_kv: expected .* 1 lengths for 2 sequences"),
        ("cu_seqlens_cmp_kv", None, "cu_seqlens_cmp_kv: expected the ends of packed sequences"),
        ("layout_kv", "BSND", "layout_kv: expected layout_q, or PA_BBND"),
    ):
        with pytest.raises(fa.ContractError, match=message):
            cann.sparse_flash_mla(q, k, c, **{**words, name: wrong})


# ------------------------------------------------------------------------------------------ the formula, row by row


def reads(
    rows: int, keys: int, entries: int, ratio: int, rest: int, lists: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Boolean [rows, keys] and [rows, entries]: the keys and compressed keys of a sequence that each row reads."""
    near, far = torch.zeros(rows, keys, dtype=torch.bool), torch.zeros(rows, entries, dtype=torch.bool)
    for i in range(rows):
        end = keys - rows + i + 1
        near[i, max(end - WINDOW, 0) : max(min(end, keys), 0)] = True
        bound = min(max((entries * ratio + rest - rows + i + 1) // ratio, 0), entries)
        slots = list(range(bound)) if lists is None else lists[i, :bound].tolist()
        for entry in slots[: slots.index(-1)] if -1 in slots else slots:
            far[i, entry] = entry < bound
    return near, far


def formula(
    q: torch.Tensor,
    x: torch.Tensor,
    c: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
    read: tuple[torch.Tensor, ...],
    saved: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, lse, mean probabilities [S, entries]), float64, of q [S, N, D], keys x [L, D], compressed c [entries, D];
    read: visible keys; saved: lse [S, N] for the probabilities, if not the computed one."""
    visible, keys = torch.cat(read, 1), torch.cat((x, c)).double()
    scores = scale * torch.einsum("snd,kd->snk", q.double(), keys)
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    lse = torch.logaddexp(scores.logsumexp(-1), sink.double()).where(visible.any(1, keepdim=True), 0)
    weights = (scores - (lse if saved is None else saved.double())[..., None]).exp()
    return torch.einsum("snk,kd->snd", weights, keys), lse, weights[..., len(x) :].mean(1)


def columns(mean: torch.Tensor, lists: torch.Tensor | None) -> torch.Tensor:
    """Columns of `mean` [S, entries] at the entries of lists [S, K]; 0 where an entry is -1."""
    return mean if lists is None else mean.gather(1, lists.clamp(min=0).long()).where(lists >= 0, 0)


# (rows, keys, compressed keys) of three sequences: allocated and used lengths.
ROOM, USED = [(9, 12, 5), (7, 7, 4), (3, 5, 2)], [(6, 11, 3), (0, 7, 2), (2, 3, 1)]
REST = [2, 1, 0]


@pytest.mark.parametrize("listed", [True, False])
def test_packed_rows_beyond_seqused_are_not_read_and_have_zero_results(listed: bool, cann: Any) -> None:
    heads, dim, ratio, scale = 4, 16, 3, 0.25
    q, x, c = (torch.randn(sum(n[side] for n in ROOM), h, dim) for side, h in enumerate((heads, 1, 1)))
    sinks, names = torch.randn(heads), ("q", "ori_kv", "cmp_kv")
    ends = [[0, *accumulate(n[side] for n in ROOM)] for side in range(3)]
    for tensor, end, side in ((q, ends[0], 0), (x, ends[1], 1), (c, ends[2], 2)):
        for b in range(3):
            tensor[end[b] + USED[b][side] : end[b + 1]] = torch.nan
    lists = torch.full((len(q), 1, 3), -1, dtype=torch.int32)
    lists[:9, 0, :2], lists[16:, 0, 0] = torch.tensor([2, 0]), 0
    words: dict[str, Any] = {f"cu_seqlens_{n}": torch.tensor(e) for n, e in zip(names, ends, strict=True)}
    words |= {f"seqused_{n}": torch.tensor([u[side] for u in USED]) for side, n in enumerate(names)}
    words |= {"layout_q": "TND", "layout_kv": "TND", "cmp_residual_kv": torch.tensor(REST), "sinks": sinks}
    words |= {**BOTH, "cmp_ratio": ratio, "softmax_scale": scale, "cmp_sparse_indices": lists if listed else None}
    leaves = [t.clone().requires_grad_() for t in (q, x, c)]
    out, lse = cann.sparse_flash_mla(*leaves, **words, return_softmax_lse=True)
    used = [slice(ends[0][b], ends[0][b] + USED[b][0]) for b in range(3)]
    keep = torch.zeros(len(q), dtype=torch.bool)
    for rows_of in used:
        keep[rows_of] = True
    assert not out[~keep].any()
    assert not lse[:, ~keep].any()

    sequence = [t[ends[side][0] : ends[side][0] + USED[0][side]] for side, t in enumerate((q, x[:, 0], c[:, 0]))]
    read = reads(*(len(t) for t in sequence), ratio, REST[0], lists[used[0], 0] if listed else None)
    compare_with(
        "attention",
        (out[used[0]].detach(), lse[0, used[0]].detach()),
        lambda: formula(*sequence, sinks, scale, read)[:2],
    )
    dy = torch.randn_like(q) * keep[:, None, None]
    grads = torch.autograd.grad(out, leaves, dy)
    with torch.no_grad():
        norms = cann.sparse_flash_mla_grad(q, dy, out, lse, x, c, **words)[5]
    for b in range(3):  # the bits of the sequence alone
        spans = [slice(ends[side][b], ends[side][b] + USED[b][side]) for side in range(3)]
        for mine, span, side in zip(grads, spans, range(3), strict=True):
            assert not mine[span.stop : ends[side][b + 1]].any()
        if not USED[b][0]:
            continue
        args = [t[span][None].clone().requires_grad_() for t, span in zip((q, x, c), spans, strict=True)]
        single = {**BOTH, "cmp_ratio": ratio, "softmax_scale": scale, "sinks": sinks}
        single |= {"cmp_residual_kv": torch.tensor(REST[b : b + 1])}
        single |= {"cmp_sparse_indices": lists[spans[0]][None] if listed else None}
        alone, lse_alone = cann.sparse_flash_mla(*args, **single, return_softmax_lse=True)
        same_bits(out[spans[0]], alone[0])
        for mine, span, other in zip(grads, spans, torch.autograd.grad(alone, args, dy[spans[0]][None]), strict=True):
            same_bits(mine[span], other[0])
        if listed:
            with torch.no_grad():
                given = (args[0], dy[spans[0]][None], alone, lse_alone, *args[1:])
                same_bits(norms[spans[0]], cann.sparse_flash_mla_grad(*given, **single)[5][0])
    assert not norms[~keep].any() if listed else norms.numel() == 0


@pytest.mark.sampled(4)
@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("listed", [True, False])
def test_softmax_l1_norm_matches_formula(listed: bool, packed: bool, device: str, cann: Any) -> None:
    """Probabilities of keys that a row does not read are 0, so a row sums to less than 1."""
    tokens, heads, dim, scale = 14, 4, 16, 0.3
    q, x, c, sinks = rows(tokens, heads, dim)
    chosen = lists(tokens) if listed else None
    if chosen is not None:
        chosen[:, 5, 0, :2] = torch.tensor([2, 0])  # an entry that the row does not see, and one behind its slots
    words: dict[str, Any] = {"sinks": sinks, "softmax_scale": scale, "cmp_residual_kv": residual(tokens), **BOTH}
    _, lse = cann.sparse_flash_mla(q, x, c, None, chosen, **words, return_softmax_lse=True)
    args: dict[str, Any] = {"softmax_scale": scale, "cmp_ratio": RATIO, "mask_mode": 3, "sparse_indices": chosen}
    args["cmp_residual_k"] = residual(tokens).to(device)
    given = [q, c, lse]
    if packed:
        given = [q.flatten(0, 1), c.flatten(0, 1), lse[:, 0].flatten(0, 1)[None]]
        args |= {"layout_q": "TND", "layout_k": "TND", "max_seqlen_k": 0 if listed else 5}
        args |= {f"cu_seqlens_{n}": torch.tensor([0, t, 2 * t]) for n, t in (("q", tokens), ("k", tokens // RATIO))}
        args["sparse_indices"] = None if chosen is None else chosen.flatten(0, 1)
    args = {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in args.items()}
    norm = cann.sparse_flash_mla_softmax_l1_norm(*(t.to(device) for t in given), **args).cpu()
    assert norm.dtype == torch.float32
    assert float(norm.sum(-1).max()) < 1
    norm = norm.view(2, tokens, -1)
    if packed and not listed:
        assert not norm[..., 3:].any()  # behind the sequence's keys
        norm = norm[..., :3]
    for b in range(2):
        chosen_here = None if chosen is None else chosen[b, :, 0]
        read = reads(tokens, tokens, tokens // RATIO, RATIO, tokens % RATIO, chosen_here)
        sequence = (q[b], x[b, :, 0], c[b, :, 0], sinks, scale, read, lse[b, 0])
        compare_with(
            "norm",
            (norm[b],),
            lambda sequence=sequence, chosen_here=chosen_here: (columns(formula(*sequence)[2], chosen_here),),
        )


def test_softmax_l1_norm_with_topk_length_and_without_lists(cann: Any) -> None:
    q, _, c, _ = rows(8)
    lse, chosen = torch.full((2, 1, 8, 4), 4.0), torch.tensor([1, 0], dtype=torch.int32).expand(2, 8, 1, 2)
    every = cann.sparse_flash_mla_softmax_l1_norm(q, c, lse)  # mode 0: a row sees all keys
    assert (every > 0).all()
    listed = cann.sparse_flash_mla_softmax_l1_norm(q, c, lse, sparse_indices=chosen)

    def mean() -> tuple[torch.Tensor]:
        scores = torch.einsum("bshd,bkd->bskh", q.double(), c[:, :, 0].double())
        return ((scores - 4).exp().mean(-1)[:, :, None],)

    compare_with("all keys", (every,), mean)
    compare_with("listed", (listed.flip(-1),), mean)
    counts = torch.ones(2, 8, 1, dtype=torch.int32)
    counted = cann.sparse_flash_mla_softmax_l1_norm(q, c, lse, sparse_indices=chosen, topk_length=counts)
    same_bits(counted[..., 0], listed[..., 0])
    assert not counted[..., 1].any()
    ends = torch.tensor([0, 2, 4])
    with pytest.raises(fa.ContractError, match=r"max_seqlen_k: expected at least the keys of the longest sequence"):
        cann.sparse_flash_mla_softmax_l1_norm(
            q.flatten(0, 1), c.flatten(0, 1), lse.view(1, 16, 4), cu_seqlens_q=ends * 4, cu_seqlens_k=ends,
            layout_q="TND", layout_k="TND", max_seqlen_k=1,
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("tokens", "change", "message"),
    [
        (9, {"cmp_residual_kv": torch.tensor([1, 2])}, "cmp_residual_kv: expected as many tokens in compressed keys"),
        (9, {"cmp_residual_kv": None}, "cmp_residual_kv: expected as many tokens in compressed keys"),
        (9, {"cmp_ratio": 3}, "cmp_residual_kv: expected as many tokens in compressed keys"),
        (
            8,
            {"cmp_sparse_indices": torch.tensor([0, -1, 1], dtype=torch.int32).expand(2, 8, 1, 3)},
            "cmp_sparse_indices: expected no entry behind a -1",
        ),
    ],
)
def test_doubtful_residuals_and_lists_warn_and_strict_mode_raises(
    tokens: int, change: dict[str, Any], message: str, cann: Any
) -> None:
    q, k, c, sinks = rows(tokens)
    given = {**BOTH, "cmp_residual_kv": residual(tokens), "sinks": sinks, **change}
    with pytest.warns(fa.ContractWarning, match=message):
        cann.sparse_flash_mla(q, k, c, **given)
    half = [t.bfloat16() for t in (q, k, c)]
    with fa.npu.strict(), pytest.raises(fa.ContractError, match=message):
        cann.sparse_flash_mla(*half, **given)


def test_list_entries_past_causal_bound_are_ignored_and_counted_in_error(cann: Any) -> None:
    q, k, c, sinks = rows(8)
    past = torch.tensor([1, 0], dtype=torch.int32).expand(2, 8, 1, 2)
    op = RECORDS["cann_ops_transformer.sparse_flash_mla"]
    names = {p.shown: p.name for p in op.params}
    words = {**BOTH, "cmp_residual_kv": residual(8), "sinks": sinks, "cmp_sparse_indices": past}
    args = {"query": q, "key": k, "key_compressed": c} | {names[word]: value for word, value in words.items()}
    # Rows 0 to 2 see no entry and rows 3 to 6 one: their lists [1, 0] have 7 * 2 entries past the bound per sequence.
    with pytest.raises(fa.ContractError, match=r"got 28 entries past their rows' bound, the first 1 at batch 0, row 0"):
        bind(op, {p.name: args.get(p.name, p.default if isinstance(p, Attr) else None) for p in op.params},
             check_content=True)  # fmt: skip
    out, _ = cann.sparse_flash_mla(q, k, c, **words)
    ignored = past.masked_fill(torch.arange(8)[:, None, None] < 7, -1)
    same_bits(out, cann.sparse_flash_mla(q, k, c, **{**words, "cmp_sparse_indices": ignored})[0])


def test_gradient_with_paged_keys_raises(cann: Any) -> None:
    q, k, _, sinks = rows(8)
    out, lse = cann.sparse_flash_mla(q, k, sinks=sinks, return_softmax_lse=True)
    with pytest.raises(fa.ContractError, match=r"layout_kv: expected layout_q, got .*paged keys have no"):
        cann.sparse_flash_mla_grad(q, out, out, lse, k, sinks=sinks, layout_kv="PA_BBND")
