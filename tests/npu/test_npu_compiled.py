"""torch.compile with the default back end for tensors on npu: the graph is compiled for the CPU, results are on npu."""

import copy
import importlib
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.bits import same_bits
from torch.utils.flop_counter import FlopCounterMode

from fusion_attention import npu
from fusion_attention.npu.device import compiled
from fusion_attention.testing.estimated_rounding_errors import compare_with

pytestmark = pytest.mark.usefixtures("torch_npu", "fresh")


def compiling(function: Callable[..., Any], devices: list[Any], **options: Any) -> Callable[..., Any]:
    """torch.compile with a back end in inductor's place: it runs the graph and records its inputs' devices."""

    def below(model: Any, inputs: Sequence[Any]) -> Any:
        devices.extend(x.device.type for x in inputs if isinstance(x, torch.Tensor))
        return model

    return torch.compile(function, backend=compiled._compiling(SimpleNamespace(below=below), "cpu"), **options)  # type: ignore[arg-type]


def test_compiled_npu_graph_runs_on_cpu_and_returns_npu_tensors() -> None:
    x, w = (torch.randn(3, 3, device="npu", requires_grad=True) for _ in range(2))
    devices: list[Any] = []

    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        created = torch.ones(3, device="npu") + torch.arange(3, device=x.device)
        rows = npu.npu_fusion_attention(x[None], w[None], w[None], 1, "BSH", scale=0.5)[0]
        return rows[0] @ w + created

    got, want = compiling(call, devices)(x, w), call(x, w)
    assert got.device.type == "npu"
    assert devices == ["cpu", "cpu"]
    same_bits(got.detach().cpu(), want.detach().cpu())
    for mine, theirs in zip(*(torch.autograd.grad(out.sum(), (x, w)) for out in (got, want)), strict=True):
        assert mine.device.type == "npu"
        same_bits(mine.cpu(), theirs.cpu())


def test_compiled_function_returns_views_of_its_argument() -> None:
    x = torch.zeros(2, 3, device="npu")

    def call(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.add_(1)
        return x, x.T

    same, turned = compiling(call, [])(x)
    assert same is x
    assert x._version == 1
    turned.mul_(3)
    assert x.tolist() == [[3.0] * 3] * 2
    assert turned.untyped_storage()._cdata == x.untyped_storage()._cdata


def test_dynamic_compile_handles_changing_sizes() -> None:
    call = compiling(lambda x: torch.softmax(x, -1) @ x.T, [], dynamic=True)
    for rows in (3, 5, 4):
        x = torch.randn(rows, 2, device="npu")
        same_bits(call(x).cpu(), (torch.softmax(x, -1) @ x.T).cpu())


def test_cpu_graph_compiles_and_mixed_npu_cpu_graph_raises() -> None:
    devices: list[Any] = []
    x = torch.ones(2, 2)
    assert compiling(lambda x: x + 1, devices)(x).device.type == "cpu"
    with pytest.raises(
        Exception, match='backend "inductor" on device npu: expected all tensors of a graph on npu, except'
    ):
        compiling(lambda x: x.cpu() + 1, devices)(x.npu())  # type: ignore[attr-defined]
    assert devices == ["cpu"]


def test_inductor_is_wrapped_only_while_npu_is_installed() -> None:
    module = importlib.import_module("torch._inductor.compile_fx")
    inside = module.compile_fx
    npu.uninstall()
    assert module.compile_fx is not inside


@pytest.mark.slow
def test_transformer_layer_gradients_under_inductor_match_float64() -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    x = torch.randn(2, 5, 16)

    def results(device: str, dtype: torch.dtype, run: Callable[[Any], Any]) -> list[torch.Tensor]:
        here = copy.deepcopy(layer).to(device, dtype)
        out = run(here)(x.to(device, dtype))
        assert out.device.type == device
        return [t.cpu() for t in (out, *torch.autograd.grad(out.square().sum(), [*here.parameters()]))]

    ours = results("npu", torch.float32, torch.compile)
    compare_with("[out, *gradients]", ours, lambda: results("cpu", torch.float64, lambda layer: layer))


LENGTHS: list[list[int] | torch.Tensor] = [[2, 6], torch.tensor([2, 6])]


@pytest.mark.parametrize("lengths", LENGTHS, ids=["list", "host tensor"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_attention_accepts_lengths_in_host_memory(backend: str, lengths: list[int] | torch.Tensor) -> None:
    x = torch.randn(6, 2, 16, device="npu", requires_grad=True)

    def call(x: torch.Tensor) -> Any:
        how = {"actual_seq_qlen": lengths, "actual_seq_kvlen": lengths, "scale": 0.25}
        return npu.npu_fusion_attention_v3(x, x.to("npu"), x, 2, "TND", **how)[0]  # type: ignore[arg-type]

    got, want = torch.compile(call, backend=backend, fullgraph=True)(x), call(x)
    assert got.device.type == "npu"
    same_bits(got.detach().cpu(), want.detach().cpu())
    for mine, theirs in zip(*(torch.autograd.grad(out.sum(), x) for out in (got, want)), strict=True):
        same_bits(mine.cpu(), theirs.cpu())


WAYS = [partial(compiling, devices=[]), pytest.param(torch.compile, marks=pytest.mark.slow)]


@pytest.mark.parametrize("compiler", WAYS, ids=["in its place", "inductor"])
def test_compiled_graph_returns_host_lengths_on_the_host(compiler: Callable[..., Any]) -> None:
    x, lengths = torch.randn(2, 2, 8, 16, device="npu"), torch.tensor([8, 5])

    def call(x: torch.Tensor, lengths: torch.Tensor) -> Any:
        how: dict[str, Any] = {"num_heads": 2, "input_layout": "BNSD", "scale": 0.25}
        return npu.npu_fused_infer_attention_score(x, x, x, actual_seq_lengths_kv=lengths, **how)[0], lengths + 1, x + 1

    for got, want in zip(compiler(call, fullgraph=True)(x, lengths), call(x, lengths), strict=True):
        assert got.device == want.device
        same_bits(got.cpu(), want.cpu())


def test_host_lengths_work_under_flop_counter_and_in_npu_graph(torch_npu: Any) -> None:
    x, lengths = torch.randn(6, 2, 16, device="npu"), torch.tensor([2, 6])

    def call() -> torch.Tensor:
        how = {"actual_seq_qlen": lengths, "actual_seq_kvlen": lengths, "scale": 0.25}
        return npu.npu_fusion_attention_v3(x, x, x, 2, "TND", **how)[0]  # type: ignore[arg-type]

    want = call().cpu()
    with FlopCounterMode(display=False):
        same_bits(call().cpu(), want)
    graph = torch_npu.npu.NPUGraph()
    with torch_npu.npu.graph(graph):
        result = call()
    graph.replay()
    same_bits(result.cpu(), want)


def test_torchair_and_npugraph_ex_backends_compile_with_gradients(torch_npu: Any) -> None:
    torchair = importlib.import_module("torchair")
    config = importlib.import_module("torchair.configs.compiler_config").CompilerConfig()
    config.mode, config.experimental_config.frozen_parameter = "reduce-overhead", True
    config.debug.graph_dump.type = "pbtxt"
    importlib.import_module("torchair.core.utils").logger.setLevel("ERROR")
    x = torch.randn(2, 4, 32, device="npu", requires_grad=True)
    want = torch_npu.npu_swiglu(x) * 2
    ways: list[dict[str, Any]] = [{"backend": torchair.get_npu_backend(compiler_config=config), "dynamic": False}]
    ways.append({"backend": "npugraph_ex", "options": {"force_eager": True}})
    for way in ways:
        got = torch.compile(lambda x: torch_npu.npu_swiglu(x) * 2, fullgraph=True, **way)(x)
        same_bits(got.detach().cpu(), want.detach().cpu())
        (grad,) = torch.autograd.grad(got.sum(), x)
        assert grad.device.type == "npu"
    with pytest.raises(AttributeError, match="fusion_attention's torchair has no inference"):
        torchair.inference  # noqa: B018
