"""Layers over selected keys on the Triton back end, under its interpreter, against golden; and errors."""

import copy
from typing import Any

import pytest
import torch
from support.reference_layers import HEADS, LATENT, output_and_loss

import fusion_attention as fa
from fusion_attention import nn
from fusion_attention.backends import triton as backend
from fusion_attention.ir.problem import IndexerLossProblem, IndexerProblem, Problem
from fusion_attention.testing.estimated_rounding_errors import compare_with

DIM, LENGTH = 32, 12
SIZES: dict[str, Any] = {"index_heads": 3, "index_dim": 12, "top_k": 5}
Results = dict[str, torch.Tensor]


def layer_of(form: str, stage: str) -> nn.SparseAttention:
    torch.manual_seed(0)
    layer: nn.SparseAttention = (
        nn.SparseLatentAttention(DIM, HEADS, **LATENT, **SIZES)
        if form == "latent"
        else nn.SparseSelfAttention(DIM, 2, kv_heads=1, **SIZES)
    )
    nn.set_stage(layer, stage)
    return layer


def trained(layer: nn.SparseAttention, out: torch.Tensor, loss: torch.Tensor) -> Results:
    """Returns the output, loss and gradients of a layer."""
    layer.zero_grad()
    (out.square().mean() + loss).backward()
    return {"out": out, "loss": loss} | {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("form", "stage"), [("grouped", "sparse"), ("latent", "sparse"), ("latent", "warmup")])
def test_sparse_attention_layers_on_triton_match_float64_layers(form: str, stage: str) -> None:
    layer = layer_of(form, stage)
    x, layer64 = torch.randn(1, LENGTH, DIM, generator=torch.Generator().manual_seed(1)), copy.deepcopy(layer).double()
    with fa.use_backend("triton"):
        got = trained(layer, *layer(x, rope=nn.rope_table(torch.arange(LENGTH), 6 if form == "latent" else 8)))

    def program() -> Results:
        out, loss = output_and_loss(layer64, x[0].double())
        return trained(layer64, out[None], loss / LENGTH)

    compare_with(f"{form} {stage}", got, program)


@pytest.mark.parametrize(
    ("problem", "op_kind", "words"),
    [
        (Problem(2, 1, 16, 16, select_count=4, bias="matrix"), "attention_forward", ["bias with select_count"]),
        (
            Problem(2, 1, 16, 16, select_count=4, softcap=2.0, dtype="float64", empty_rows="mean"),
            "",
            ["dtype", "empty_rows with select_count", "softcap with select_count"],
        ),
        (Problem(2, 1, 900, 16, select_count=4), "attention_forward", ["no tile for dim_qk 900"]),
        (IndexerProblem(4, 16, "float64"), "indexer_topk", ["dtype float32, float16, bfloat16, not float64"]),
        (IndexerProblem(4, 900), "indexer_topk", ["no tile for 4 indexer heads of 900 elements"]),
        (IndexerProblem(4, 64, top_k=(1 << 20) + 1), "indexer_topk", ["of 64 elements, top_k 1048577"]),
        (IndexerLossProblem(4, 1, 16, 4, 900), "indexer_loss", ["4 indexer heads of 900 elements"]),
        (Problem(2, 1, 16, 16, select_count=4, page_size=16), "attention_forward", []),
    ],
)
def test_triton_back_end_lists_reasons_against_unsupported_sparse_problems(
    problem: Any, op_kind: str, words: list[str]
) -> None:
    reasons = backend.reasons_against(problem, "cpu", op_kind)
    assert [word in reason for word, reason in zip(words, reasons, strict=True)] == [True] * len(words)
