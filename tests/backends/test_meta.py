"""Calls on the meta device: all checks, and the shapes, dtypes and strides of the same calls on other devices."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusion_attention as fa
from fusion_attention import npu
from fusion_attention.contract import bind
from fusion_attention.contract.sampling import sample
from fusion_attention.ops import RECORDS

META = torch.device("meta")
Tensors = list[torch.Tensor]


def prepared(value: Any) -> Any:
    """Replaces each tensor, also inside tuples and lists, by its shape, strides and dtype."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    return type(value)(map(prepared, value)) if isinstance(value, (tuple, list)) else value


def moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to(device).requires_grad_(value.requires_grad)
    return type(value)(moved(v, device) for v in value) if isinstance(value, (tuple, list)) else value


@pytest.mark.parametrize("name", [name for name in (*npu.__all__, *fa.__all__) if name in RECORDS])
def test_meta_results_have_shapes_dtypes_and_strides_of_cpu_results(name: str) -> None:
    op, interface = RECORDS[name], getattr(fa, name, None) or getattr(npu, name)
    for layout in op.layouts:
        args = sample(op, **{op.layout_attr: layout, "B": 1, "D": 4, "Dv": 4, "K": 4})
        given = {p.shown: args[p.name] for p in op.params if p.name in args and not getattr(p, "output", False)}
        if name == "decode_attention":
            given["cache"] = given.pop("k"), given.pop("v")
        if name == "compress":
            given = {key: value for key, value in given.items() if key not in ("before", "windows")}
        want = interface(**given)
        for _ in range(2):  # a signature that is known, too
            result = interface(**{key: moved(value, META) for key, value in given.items()})
            assert prepared(result) == prepared(want), layout
            assert (result[0] if isinstance(result, tuple) else result).is_meta


def dense(q: torch.Tensor) -> torch.Tensor:
    return fa.attention(q, q, q, band=fa.Band.causal(), sink=q[0, 0, :, 0], keep_prob=0.5, seed=3)


def selected(q: torch.Tensor) -> torch.Tensor:
    indices = fa.lightning_indexer(q, q[:, :, :1], q[..., 0], 3)[0]
    result: Any = fa.sparse_attention(q, q[:, :, :1], None, indices)
    return result


def ascend(q: torch.Tensor) -> torch.Tensor:
    return npu.npu_fusion_attention(q, q, q, 4, "BSND", scale=0.25)[0]


@pytest.mark.parametrize("call", [dense, selected, ascend])
def test_meta_gradients_have_shapes_of_inputs(call: Callable[..., torch.Tensor]) -> None:
    for backend in ("auto", "golden"):
        q = torch.empty(2, 5, 4, 16, device=META, requires_grad=True)
        with fa.use_backend(backend):
            call(q).sum().backward()
        assert q.grad is not None
        assert prepared(q.grad) == prepared(q)


def test_meta_calls_refuse_invalid_arguments_and_mixed_devices() -> None:
    q = torch.empty(2, 5, 4, 16, device=META)
    with pytest.raises(fa.ContractError, match="all KV heads serve the same number"):
        fa.attention(q, q[:, :, :3], q[:, :, :3])
    with pytest.raises(fa.ContractError, match="a tensor on meta as q"):
        fa.attention(q, torch.empty(2, 5, 4, 16), q)


def test_content_checks_are_skipped_for_meta_tensors() -> None:
    q, mask = torch.empty(1, 4, 2, 32, device=META), torch.empty(2048, 2048, dtype=torch.bool, device=META)
    with npu.strict(check_content=True):
        out = npu.npu_fusion_attention(q, q, q, 2, "BSND", atten_mask=mask, sparse_mode=3, scale=0.25)[0]
    assert (out.device, out.shape) == (META, q.shape)
    assert bind(RECORDS["attention"], {"q": q, "k": q, "v": q}, check_content=True).names["q"] is q


def test_attention_runs_on_outputs_of_module_built_on_meta_device() -> None:
    with META:
        layer = torch.nn.Linear(64, 64)
        q = layer(torch.randn(2, 7, 64)).unflatten(-1, (4, 16))
        assert fa.attention(q, q, q).shape == (2, 7, 4, 16)
