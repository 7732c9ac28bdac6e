"""Every expression with which programs detect the chip is true while npu is installed."""

from typing import Any

import torch

# Expressions of programs for the chip. x: tensor on npu, y: tensor on the CPU, m: module on npu, d: its device.
YES = (
    "torch.npu.Stream().device == torch.npu.current_stream().device == x.device",
    'x.device.type == "npu" and not x.is_cuda and not x.is_cpu',
    'str(x.device) == f"{x.device}" == "npu:0"',
    'x.device == torch.device("npu", 0) == torch.device("npu:0")',
    'x.device == torch.device(type="npu", index=torch.npu.current_device())',
    "x.device == x.npu().device == y.npu().device",
    "x.device == torch.zeros(1, device=x.device).device",
    "x.device != y.device",
    "x.is_npu and not y.is_npu",
    "x.get_device() == 0",
    "x.device.index == torch.npu.current_device()",
    'x.untyped_storage().device.type == "npu"',
    'x.grad_fn is None and (x * 2).device.type == "npu"',
    '{b.device.type for b in [*m.parameters(), *m.state_dict().values()]} == {"npu"}',
    'isinstance(d, torch.device) and torch.device(d).type == torch.device("npu").type == "npu"',
    'torch.empty_like(x).device.type == "npu"',
    'torch.tensor([1], device="npu").device.type == "npu"',
    'torch.tensor([1], device=torch.npu.current_device()).device.type == "npu"',
    'y.to("npu").device.type == "npu"',
    'y.to(x).device.type == "npu"',
    'x.cpu().device.type == "cpu"',
    "torch.npu.is_available() and torch.npu.device_count() > 0",
    'torch.get_device_module("npu") is torch.get_device_module(x.device) is torch.npu',
    'torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == "npu"',
    'torch._C._get_privateuse1_backend_name() == "npu"',
    'torch.Generator("npu").device.type == "npu"',
    'torch.Generator(device=x.device).device == x.device',
    'torch.amp.is_autocast_available("npu")',
    'importlib.util.find_spec("torch_npu") is not None',
    'importlib.metadata.version("torch_npu")',
    'torch.distributed.is_hccl_available()',
)  # fmt: skip


def test_device_checks_of_programs_are_true_on_npu(torch_npu: Any) -> None:
    module = torch.nn.Linear(2, 2).npu()
    names = {"torch": torch, "x": torch.ones(2, device="npu"), "y": torch.ones(2), "m": module}
    names |= {"d": module.weight.device}
    exec("import importlib.metadata, importlib.util", names)
    assert [text for text in YES if not eval(text, names)] == []
