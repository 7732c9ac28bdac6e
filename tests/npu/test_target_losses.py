"""The indexer losses of cann_ops_transformer with a given target distribution, called as programs do."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.bits import same_bits
from support.sparse_checks import close

from fusion_attention import ContractError
from fusion_attention.contract import bind
from fusion_attention.npu.surface import cann_ops_from_definitions as losses
from fusion_attention.ops.indexer_loss import given_target_definitions as targets
from fusion_attention.testing.estimated_rounding_errors import compare_with
from fusion_attention.testing.expected_indexer import check_index
from fusion_attention.testing.sparse import in_float64
from fusion_attention.torch_ops.eager import run

LISTED, DENSE = losses.sparse_lightning_indexer_kl_loss_grad, losses.dense_lightning_indexer_kl_loss_grad
LSE = losses.dense_lightning_indexer_softmax_lse
PADDED = {"layout_q": "BSND", "layout_k": "BSND"}


def scores(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (w[..., None] * torch.einsum("ihd,jd->ihj", q, k[:, 0]).relu()).sum(1)


def of_row(i: int, rows: int, keys: int, ratio: int, residual: int) -> list[int]:
    """Compressed keys visible to row i: keys with all of their tokens at or before the row's token."""
    last = keys * ratio + residual - rows + i
    return [e for e in range(keys) if all(token <= last for token in range(e * ratio, (e + 1) * ratio))]


@pytest.mark.parametrize("ratio", [1, 3])
def test_dense_indexer_lse_and_loss_gradients_match_formula(ratio: int) -> None:
    """The float64 formula is y = exp(score - lse) and dI = y - p; some rows have no keys."""
    torch.manual_seed(3)
    rows, keys, residual = 11, 3, ratio - 1
    inputs = {"query_index": torch.randn(1, rows, 2, 8), "key_index": torch.randn(1, keys, 1, 8)}
    inputs["weights"] = torch.rand(1, rows, 2)
    q, k, w = (t[0].double().requires_grad_() for t in inputs.values())
    target = torch.rand(1, rows, 1, keys) * 0.3
    common = {"layout": "BSND", "layout_kv": "BSND", "sparse_mode": 3, "ratio": ratio}
    common |= {"residual": [residual]} if ratio > 1 else {}
    total, all_scores = torch.zeros((), dtype=torch.float64), scores(q, k, w)
    y, lse = torch.zeros(1, rows, 1, keys).double(), torch.full((1, 1, rows), -math.inf).double()
    for i in range(rows):
        visible = of_row(i, rows, keys, ratio, residual)
        if visible:
            of_visible = all_scores[i, visible]
            total = total + of_visible.logsumexp(0) - (target[0, i, 0, visible].double() * of_visible).sum()
            y[0, i, 0, visible], lse[0, 0, i] = of_visible.softmax(0).detach(), of_visible.logsumexp(0).detach()
    assert (lse == -math.inf).any()
    call = targets.TORCH_LSE.lower(bind(targets.TORCH_LSE, {**inputs, **common}))  # type: ignore[misc]
    close(run(in_float64(call), "golden"), {"softmax_lse": lse})
    given = {**inputs, **common, "target": target, "softmax_lse": lse.float()}
    call = targets.TORCH_DENSE.lower(bind(targets.TORCH_DENSE, given))  # type: ignore[misc]
    exact = in_float64(call)
    exact = replace(exact, tensors={**exact.tensors, "softmax_lse": lse})
    gradients = [t[None] for t in torch.autograd.grad(total, (q, k, w))]
    close(run(exact, "golden"), dict(zip(call.names, (*gradients, y), strict=True)))
    check_index(call, {"cpu": run(call, "cpu")})


def test_indexer_losses_default_to_packed_causal_and_lse_to_padded_unmasked() -> None:
    q, k, w = torch.randn(5, 2, 8), torch.randn(5, 1, 8), torch.rand(5, 2)
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    lists = torch.arange(3, dtype=torch.int32).expand(5, 1, 3).contiguous()
    lists[:2, 0, 2] = -1
    packed: Any = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    *_, y = LISTED(q, k, w, lists, torch.full((5, 1, 3), 0.2), **packed)
    assert [(row[0] > 0).sum().item() for row in y] == [1, 2, 1, 2, 3]
    full = LSE(q[None], k[None], w[None])
    same_bits(full, LSE(q[None], k[None], w[None], mask_mode=0, **PADDED))
    causal = LSE(q[None], k[None], w[None], mask_mode=3)
    assert (full > causal)[0, 0, :-1].any()
    same_bits(full[..., -1], causal[..., -1])


@pytest.mark.parametrize("dense", [False, True])
def test_packed_tokens_beyond_seqused_are_not_read_and_have_zero_gradients(dense: bool) -> None:
    """Results of the other tokens have the bits of sequences of the used lengths."""
    torch.manual_seed(2)
    q, k, w = torch.randn(9, 2, 8), torch.randn(7, 1, 8), torch.rand(9, 2)
    target = torch.rand(9, 1, 4) * 0.2
    lists = torch.arange(4, dtype=torch.int32).expand(9, 1, 4).clone()
    counted, keys = [0, 1, 2, 5, 6, 7], [0, 1, 4, 5, 6]
    lists[:5, 0, 2:] = -1
    lists[5:, 0, 3] = -1
    short: dict[str, Any] = {
        "cu_seqlens_q": [0, 5, 9],
        "cu_seqlens_k": [0, 4, 7],
        "seqused_q": [3, 3],
        "seqused_k": [2, 3],
    }
    full: dict[str, Any] = {"cu_seqlens_q": [0, 3, 6], "cu_seqlens_k": [0, 2, 5]}
    for t, used in ((q, counted), (w, counted), (target, counted), (k, keys)):
        rest = [i for i in range(len(t)) if i not in used]
        t[rest] = torch.nan
    results = []
    for lengths, rows, of_keys in ((short, slice(None), slice(None)), (full, counted, keys)):
        args = [q[rows], k[of_keys], w[rows]]
        if dense:
            args += [target[rows], LSE(*args, **lengths, layout_q="TND", layout_k="TND", mask_mode=3)]
            results.append(DENSE(*args, **lengths))
        else:
            results.append(LISTED(*args, lists[rows], target[rows], **lengths))
    for i, (got, want) in enumerate(zip(*results, strict=True)):
        used = keys if i == 1 else counted
        same_bits(got[used], want)
        rest = [j for j in range(len(got)) if j not in used]
        assert not got[rest].any()


def test_scalar_kl_loss_matches_formula_for_each_weight_type() -> None:
    torch.manual_seed(1)
    y, p = torch.rand(4, 7), torch.rand(4, 7).softmax(-1)
    y[1] = 0
    for eps, kind in itertools.product((1e-9, 1e-3), ("logits", "probs")):

        def program(eps: float = eps, kind: str = kind) -> torch.Tensor:
            fractions = y.double() / (y.double().sum(1, keepdim=True) + eps)
            logs = fractions.clamp(min=eps).log() - (p.double() + eps).log()
            return (logs * (y.double() if kind == "logits" else fractions)).sum()

        compare_with(kind, losses.lightning_indexer_kl_loss(y, p, eps, kind), program)
    for dtype in (torch.float16, torch.bfloat16):
        assert losses.lightning_indexer_kl_loss(y.to(dtype), p.to(dtype)[None][0]).dtype == dtype
    with pytest.raises(ContractError, match="weight_type"):
        losses.lightning_indexer_kl_loss(y, p, weight_type="mean")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attn_softmax_l1_norm": torch.rand(1, 6, 1, 5)}, "attn_softmax_l1_norm"),
        ({"w": torch.rand(1, 6, 2).half()}, "float32"),
        ({"cmp_ratio": 2}, "cmp_residual_k"),
        ({"cmp_ratio": 2, "cmp_residual_k": [2]}, "cmp_residual_k"),
        ({"mask_mode": 4}, "mask_mode"),
        ({"layout_k": "TND"}, "layout_k"),
        ({"cu_seqlens_q": [0, 6]}, "cu_seqlens_q"),
        ({"seqused_k": [7]}, "seqused_k"),
        ({"sparse_indices": torch.full((1, 6, 1, 4), 6)}, "sparse_indices"),
    ],
)
def test_invalid_indexer_loss_call_error_names_parameter(change: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {
        "q": torch.randn(1, 6, 2, 8), "k": torch.randn(1, 6, 1, 8), "w": torch.rand(1, 6, 2),
        "sparse_indices": torch.zeros(1, 6, 1, 4, dtype=torch.int32), "attn_softmax_l1_norm": torch.rand(1, 6, 1, 4),
    }  # fmt: skip
    with pytest.raises(ContractError, match=words):
        LISTED(**{**given, **PADDED, **change})
