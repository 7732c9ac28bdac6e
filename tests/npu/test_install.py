"""npu.install(): the module torch_npu and the device "npu" while it lasts, nothing of them before and after, and
transformers' own NPU integration on top, unchanged.
"""

import importlib.metadata
import importlib.util
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import same_bits
from support.surroundings import modes, surroundings, there

from fusion_attention import npu


def test_uninstall_restores_everything() -> None:
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


def test_modes_entered_later_survive() -> None:
    npu.install()
    torch.set_default_device("cpu")
    npu.uninstall()
    assert len(modes()) == 1
    torch.set_default_device(None)
    assert not modes()


def test_the_module_can_be_found(torch_npu: Any) -> None:
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
    """What x.device says in both ways of being installed: a device of its own, another name of the host."""
    device, base = request.param
    npu.install(device)
    yield torch.device(base)
    npu.uninstall()


@pytest.mark.parametrize("text", ["npu", "npu:0"])
def test_device_strings(way: torch.device, text: str, tmp_path: Path) -> None:
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
def test_a_device_that_is_not_there(text: str) -> None:
    for use in (
        lambda: torch.zeros(1, device=text),
        lambda: torch.zeros(1, device="npu").to(text),
        lambda: torch.zeros(1).npu(text),
        lambda: torch.npu.set_device(text),
    ):  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match=r"torch.npu: device: expected npu:0 to npu:7, got 'npu:"):
            use()


def test_torch_npu_runtime(torch_npu: Any) -> None:
    device = torch.npu  # type: ignore[attr-defined]
    assert device.is_available()
    assert (device.device_count(), device.current_device()) == (8, 0)
    device.set_device("npu:0")
    device.set_device(0)
    for seed in (device.manual_seed, device.manual_seed_all):
        seed(3)
        one = torch.randn(4, device="npu")
        seed(3)
        assert torch.equal(one, torch.randn(4, device="npu"))
    state = device.get_rng_state()
    one = torch.rand(2)
    device.set_rng_state(state)
    assert torch.equal(one, torch.rand(2))
    stream, start, end = device.Stream(), device.Event(enable_timing=True), device.Event(enable_timing=True)
    with device.stream(stream):
        assert device.current_stream() == stream
        start.record()
        end.record(stream)
    assert device.current_stream() == device.default_stream() != stream
    stream.wait_stream(device.current_stream())
    stream.wait_event(stream.record_event())
    for wait in (stream.synchronize, device.synchronize, end.synchronize, device.empty_cache):
        wait()
    assert start.elapsed_time(end) >= 0
    with pytest.raises(RuntimeError, match="expected two recorded events"):
        start.elapsed_time(device.Event())
    assert device.memory_allocated() == 0
    assert "cpu" in device.get_device_name(0)
    device.set_compile_mode(jit_compile=False)
    device.config.allow_internal_format = False
    assert device.is_bf16_supported()


def test_attention_under_the_mode(torch_npu: Any) -> None:
    """Same bits, gradients too, and torch.compile(fullgraph=True) passes through the mode."""
    q = torch.randn(1, 6, 2, 16, device="npu").requires_grad_()

    def call(q: torch.Tensor) -> torch.Tensor:
        return torch_npu.npu_fusion_attention(q, q.to("npu"), q, 2, "BSND", scale=0.25)[0]

    out = call(q)
    (gradient,) = torch.autograd.grad(out.sum(), q)
    fast = torch.compile(call, fullgraph=True, backend="aot_eager")(q)
    npu.uninstall()
    want = npu.npu_fusion_attention(q, q, q, 2, "BSND", scale=0.25)[0]
    for got in (out, fast):
        same_bits(got, want)
    same_bits(gradient, torch.autograd.grad(want.sum(), q)[0])


def test_a_real_torch_npu_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch_npu.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    before = surroundings()
    with pytest.raises(RuntimeError, match=r"expected no other torch_npu, got one in .*torch_npu.py \(import that one"):
        npu.install()
    assert surroundings() == before


@pytest.mark.parametrize("device", ["meta", "host:1", "cuda:99" if torch.cuda.is_available() else "cuda"])
def test_a_device_that_cannot_compute_is_refused(device: str) -> None:
    with pytest.raises(
        ValueError, match=r'npu.install: device: expected "cpu", "host", or "cuda" where there is one, got'
    ):
        npu.install(device)


def transformers_on_npu() -> None:
    """Runs in a process of its own: transformers decides at its import whether there is an NPU."""
    import torch
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel, Qwen3Config, Qwen3Model
    from transformers.integrations import npu_flash_attention
    from transformers.utils import is_torch_npu_available

    assert is_torch_npu_available()
    calls = []
    original = npu_flash_attention.npu_fusion_attention

    def counted(*args, **kwargs):
        calls.append(kwargs.get("input_layout", args[4] if len(args) > 4 else None))
        return original(*args, **kwargs)

    npu_flash_attention.npu_fusion_attention = counted
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4}
    grouped = {**sizes, "num_key_value_heads": 2}
    models = (LlamaModel(LlamaConfig(**grouped)), Qwen3Model(Qwen3Config(**grouped, head_dim=16)))
    models += (BertModel(BertConfig(**sizes)),)
    ids = torch.randint(0, 64, (3, 9), device="npu")
    padding = torch.ones(3, 9, dtype=torch.long, device="npu")
    padding[1, 5:] = 0
    padding[2, 1:] = 0
    for model in models:
        model = model.eval().npu()
        for mask in (None, padding):
            is_token = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
            results = []
            for implementation in ("eager", "flash_attention_2"):
                model.set_attn_implementation(implementation)
                model.zero_grad()
                calls.clear()
                out = model(input_ids=ids, attention_mask=mask).last_hidden_state[is_token]
                out.square().mean().backward()
                gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
                results.append({"out": out.detach(), **gradients})
            assert calls == ["BSND" if mask is None else "TND"] * 2, calls
            eager, ours = results
            assert eager.keys() == ours.keys()
            for name, value in eager.items():
                size = 1e-6 + 1e-5 * value.abs().max()
                assert (value - ours[name]).abs().max() <= size, (type(model).__name__, name)
        print(type(model).__name__)  # noqa: T201


@pytest.mark.slow
def test_transformers_unchanged() -> None:
    body = textwrap.dedent(inspect.getsource(transformers_on_npu)) + "\ntransformers_on_npu()\n"
    script = "from fusion_attention import npu\nnpu.install()\n" + body
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["LlamaModel", "Qwen3Model", "BertModel"]
