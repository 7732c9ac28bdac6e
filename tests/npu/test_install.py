"""npu.install() provides the module torch_npu and the device "npu" until uninstall(), which removes them."""

import importlib.metadata
import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import same_bits
from support.installed_state import surroundings, there

from fusion_attention import npu


def test_uninstall_restores_torch_and_import_state() -> None:
    npu.install()
    torch.randn(2).npu()
    npu.uninstall()
    assert not there()
    assert not any(hasattr(owner, "npu") for owner in (torch.Tensor, torch.nn.Module))
    before = surroundings()  # what is left for good, a first time leaves: only a second one compares
    npu.install()
    npu.install("cpu")
    changed = surroundings()
    assert changed != before
    npu.uninstall()
    npu.uninstall()
    assert surroundings() == before
    assert importlib.util.find_spec("torch_npu") is None
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("torch_npu")
    with pytest.raises(RuntimeError):
        torch.ones(1, device="npu")


def test_installed_torch_npu_is_found_by_importlib_and_metadata(torch_npu: Any) -> None:
    spec = importlib.util.find_spec("torch_npu")
    assert spec is not None
    assert spec.name == "torch_npu"
    assert importlib.util.find_spec("torch_npu.npu") is not None
    for name in ("torch_npu", "torch-npu"):
        assert importlib.metadata.version(name) == torch_npu.__version__
    assert importlib.metadata.packages_distributions()["torch_npu"] == ["torch_npu"]
    assert importlib.import_module("torch_npu.npu") is torch_npu.npu is torch.npu  # type: ignore[attr-defined]
    assert torch_npu.__version__.split("+")[0] == torch.__version__.split("+")[0]
    for name in npu.__all__:
        if name.startswith("npu_"):
            assert getattr(torch_npu, name) is getattr(torch.npu, name)  # type: ignore[attr-defined]
            assert inspect.unwrap(getattr(torch_npu, name)) is inspect.unwrap(getattr(npu, name))


@pytest.fixture(params=[("cpu", "npu:0"), ("host", "cpu")], ids=["own", "host"])
def way(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Install npu as a device or as an alias of the host; yield the device that tensors then report."""
    device, base = request.param
    npu.install(device)
    yield torch.device(base)
    npu.uninstall()


@pytest.mark.parametrize("text", ["npu", "npu:0"])
def test_npu_device_strings_are_accepted_by_torch_functions(way: torch.device, text: str, tmp_path: Path) -> None:
    x = torch.randn(2, 3, device=text)
    torch.save(x, tmp_path / "x.pt")
    layer = torch.nn.Linear(3, 3, device=text).to(text).npu()
    with torch.device(text):
        inside = torch.ones(2)
    torch.set_default_device(text)
    torch.set_default_device(None)
    tensors = (x, x.to(text), x.to(device=text), torch.tensor([1], device=text), x.new_zeros(2, device=text), inside)
    tensors += (x.npu(), x.npu(0), torch.zeros(1, device=torch.device(text)), torch.load(tmp_path / "x.pt", text))
    tensors += (layer.weight, torch.empty_like(x, device=text), torch.arange(3, device=text))
    for tensor in tensors:
        assert tensor.is_npu
        assert tensor.device == way
    with torch.autocast(text[:3], torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    with torch.npu.amp.autocast(dtype=torch.bfloat16):  # type: ignore[attr-defined]
        assert layer(x).dtype == torch.bfloat16
    assert torch.einsum("np,np->n", x, x).shape == (2,)  # a string that is no device


@pytest.mark.parametrize("text", ["npu:8", "npu:99"])
@pytest.mark.usefixtures("way")
def test_npu_index_beyond_last_device_raises(text: str) -> None:
    for use in (
        lambda: torch.zeros(1, device=text),
        lambda: torch.zeros(1, device="npu").to(text),
        lambda: torch.zeros(1).npu(text),
        lambda: torch.npu.set_device(text),
    ):  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match=r"torch.npu: device: expected npu:0 to npu:7, got 'npu:"):
            use()


def test_runtime_settings_of_torch_npu_are_accepted(torch_npu: Any) -> None:
    device = torch.npu  # type: ignore[attr-defined]
    device.set_compile_mode(jit_compile=False)
    device.config.allow_internal_format = False
    assert device.is_bf16_supported()
    assert "cpu" in device.get_device_name(0)


def test_attention_on_npu_bitwise_equals_cpu(torch_npu: Any) -> None:
    x = torch.randn(1, 6, 2, 16)
    results = []
    for q in (x.npu().requires_grad_(), x.requires_grad_()):  # type: ignore[attr-defined]
        out = torch_npu.npu_fusion_attention(q, q, q, 2, "BSND", scale=0.25)[0]
        results.append([t.cpu() for t in (out, *torch.autograd.grad(out.sum(), q))])
    same_bits(*results)


def test_install_raises_if_a_real_torch_npu_is_importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch_npu.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    before = surroundings()
    with pytest.raises(RuntimeError, match=r"expected no other torch_npu, got one in .*torch_npu.py \(import that one"):
        npu.install()
    assert surroundings() == before


@pytest.mark.parametrize("device", ["meta", "host:1", "cuda:99" if torch.cuda.is_available() else "cuda"])
def test_install_refuses_unsupported_devices(device: str) -> None:
    with pytest.raises(
        ValueError, match=r'npu.install: device: expected "cpu", "host", or "cuda" where there is one, got'
    ):
        npu.install(device)
