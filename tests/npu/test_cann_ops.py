"""torch.ops.cann_ops_transformer, and its metadata functions for the chip's work split, which return zeros here."""

from importlib import import_module
from typing import Any

import pytest
import torch
from support.bits import same_bits

import fusion_attention as fa
from fusion_attention.npu.operators import schema_of

# Function -> (elements of the result, positional arguments of a call without lengths).
OPAQUE: dict[str, tuple[int, tuple[int, ...]]] = {
    "lightning_indexer_metadata": (1024, (64, 1, 128, 512)),
    "sparse_flash_mla_metadata": (1024, (64, 1, 512)),
    "sparse_flash_mla_grad_metadata": (1024, (64, 1, 512)),
    "sparse_flash_mla_softmax_l1_norm_metadata": (64, (64, 1, 512)),
    "sparse_lightning_indexer_kl_loss_grad_metadata": (64, (64, 1, 128)),
    "dense_lightning_indexer_kl_loss_grad_metadata": (64, (64, 1, 128)),
    "dense_lightning_indexer_softmax_lse_metadata": (64, (64, 1, 128)),
}


@pytest.fixture
def operators(torch_npu: Any) -> Any:
    return torch.ops.cann_ops_transformer


@pytest.mark.parametrize("name", OPAQUE)
def test_metadata_functions_return_zeros_of_chip_shape_and_dtype(name: str, operators: Any) -> None:
    elements, given = OPAQUE[name]
    functions = [getattr(import_module(f"cann_ops_transformer{module}"), name) for module in ("", ".ops")]
    ends = torch.tensor([0, 3, 8], dtype=torch.int32, device="npu")
    for function in (*functions, getattr(operators, name)):
        for lengths in ({}, {"cu_seqlens_q": ends}):
            result = function(*given, **lengths, cmp_ratio=4)
            assert (result.shape, result.dtype, result.device.type) == ((elements,), torch.int32, "npu")
            assert not result.any()
    with pytest.raises(TypeError, match="missing a required argument"):
        functions[0](64, 1)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        functions[0](*given, seqused=1)


def test_every_cann_function_is_in_package_ops_module_and_torch_ops(operators: Any) -> None:
    package, module = (import_module(f"cann_ops_transformer{suffix}") for suffix in ("", ".ops"))
    names = {name for name in vars(module) if not name.startswith("__")}
    assert names > {*OPAQUE, "lightning_indexer", "sparse_lightning_indexer_kl_loss_grad"}
    assert all(getattr(package, name) is getattr(module, name) for name in names)
    assert {name for name in names if not hasattr(operators, name)} == {"flash_attn_metadata"}


def test_operator_schemas_declare_lengths_as_tensors() -> None:
    """The chip's operator schemas do so; the Python functions also accept lists."""
    function = import_module("fusion_attention.npu.surface.cann_ops").FROM_RECORDS
    schema = schema_of(function["cann_ops_transformer.sparse_flash_mla"])
    assert "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_ori_kv=None" in schema
    assert schema.endswith("bool return_softmax_lse=False) -> (Tensor, Tensor)")


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_sparse_flash_mla_operator_matches_function_and_its_gradients(device: str, operators: Any) -> None:
    q, k = torch.randn(1, 9, 2, 16, device=device), torch.randn(1, 9, 1, 16, device=device)
    sinks, words = torch.randn(2, device=device), {"ori_mask_mode": 4, "ori_win_left": 3, "ori_win_right": 0}
    function = import_module("cann_ops_transformer").sparse_flash_mla
    metadata = torch.randint(-9, 9, (1024,), dtype=torch.int32, device=device)
    leaves = [t.clone().requires_grad_() for t in (q, k, sinks)]
    out, lse = function(leaves[0], leaves[1], sinks=leaves[2], return_softmax_lse=True, **words)
    want = torch.autograd.grad(out.sum(), leaves)
    again, other = operators.sparse_flash_mla(
        leaves[0], leaves[1], sinks=leaves[2], metadata=metadata, return_softmax_lse=True, **words
    )
    same_bits(again.cpu(), out.cpu())
    same_bits(other.cpu(), lse.cpu())
    for mine, expected in zip(torch.autograd.grad(again.sum(), leaves), want, strict=True):
        same_bits(mine.cpu(), expected.cpu())
    with torch.no_grad():
        same_bits(operators.sparse_flash_mla(q, k, sinks=sinks, **words)[0].cpu(), out.cpu())
        meta = operators.sparse_flash_mla(q.to("meta"), k.to("meta"), sinks=sinks.to("meta"), **words)
    assert [list(t.shape) for t in meta] == [list(out.shape), []]


def test_explain_accepts_calls_with_cann_ops_transformer_prefix() -> None:
    call = "sparse_flash_mla(bf16[1,8,64,512], bf16[1,8,1,512], sinks=f32[64], ori_mask_mode={})"
    for package in ("", "cann_ops_transformer.", "torch.ops.cann_ops_transformer."):
        result = fa.explain(package + call.format(1))
        assert result.operator == "cann_ops_transformer.sparse_flash_mla"
        assert result.findings[0].param == "ori_mask_mode"
