"""Operations that must differ between device npu and the CPU: moving modules, histc of integers, masked encoders."""

from typing import Any

import pytest
import torch

from fusion_attention.testing.estimated_rounding_errors import compare_with

pytestmark = pytest.mark.usefixtures("torch_npu")


def test_module_to_npu_keeps_parameter_identity_and_sharing() -> None:
    """As with CUDA, layers still share a weight, and an optimizer made before the move updates it."""
    first, second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    second.weight = weight = first.weight
    optimizer = torch.optim.SGD([weight], lr=1.0)
    model = torch.nn.Sequential(first, second)
    model(torch.ones(1, 3)).sum().backward()
    assert model.to("npu") is model
    assert first.weight is second.weight is weight
    assert weight.device == weight.grad.device == torch.device("npu:0")
    before, gradient = weight.detach().clone(), weight.grad.clone()
    optimizer.step()
    assert torch.equal(first.weight, before - gradient)
    assert model.cpu()[1].weight is weight
    assert weight.device == weight.grad.device == torch.device("cpu")
    model.half().npu()
    assert (weight.dtype, weight.device.type, second.weight is weight) == (torch.float16, "npu", True)


def test_assigning_sparse_data_to_npu_tensor_raises() -> None:
    x = torch.ones(2, device="npu")
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        x.data = torch.ones(2).to_sparse()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.float32])
def test_histc_counts_integers_on_npu(dtype: Any) -> None:
    """Mixture-of-experts models call histc with integers except on a CPU, which has no such kernel."""
    ids = torch.tensor([0, 3, 1, 3, 3, 7, 2, 0, 200]).to(dtype)
    counts = torch.histc(ids.npu(), bins=8, min=0, max=7)
    assert (counts.dtype, counts.device.type) == (dtype, "npu")
    assert counts.tolist() == [2, 1, 1, 3, 0, 0, 0, 1]
    assert torch.histc(ids[:0].npu(), bins=2, min=0, max=1).tolist() == [0, 0]
    large = torch.tensor([2**53 - 1, 2**53 - 1, 2**53 - 3], device="npu")
    assert torch.histc(large, bins=2, min=2**53 - 3, max=2**53 - 1).tolist() == [1, 2]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_transformer_encoder_with_padding_mask_on_npu_matches_float64() -> None:
    """In eval mode torch would pack the unmasked rows into a nested tensor; on npu it must not."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2).npu().eval()
    rows, hidden = torch.randn(2, 3, 8), torch.tensor([[False, False, True], [False, True, True]])
    with torch.no_grad():
        got = model(rows.npu(), src_key_padding_mask=hidden.npu()).cpu()
    model.cpu().double().train()  # torch's layers, one operation after the other
    compare_with("rows", got[~hidden], lambda: model(rows.double(), src_key_padding_mask=hidden)[~hidden])


def test_record_stream_accepts_npu_tensors_and_raises_for_cpu_tensors() -> None:
    x = torch.ones(2, device="npu")
    for stream in (torch.npu.Stream(), torch.npu.current_stream(), torch.Stream("npu")):  # type: ignore[attr-defined]
        x.record_stream(stream)
    with pytest.raises(NotImplementedError, match="record_stream"):
        torch.ones(2).record_stream(torch.Stream("npu"))
