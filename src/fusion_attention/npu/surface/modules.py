"""Makes the module torch_npu with its submodules; a name that they lack raises AttributeError with advice."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch

from fusion_attention.npu import dropout, fused_inference, merging, sparse, training
from fusion_attention.npu.auxiliary import (
    activations,
    atb,
    atb_cache_and_rotary,
    caches,
    grouped_matmul,
    losses,
    norms,
    prolog,
    quantised,
    quantised_sparse,
    rotary,
    routing,
    softmax,
    token_permute,
    transposes,
)
from fusion_attention.npu.device import process_groups
from fusion_attention.npu.surface import cann_ops, device_module, mindspeed, profiler, runtime, testcase, torchair
from fusion_attention.npu.surface.missing_name_hints import LIST, PAGE, instead
from fusion_attention.patches import make_modules
from fusion_attention.torch_ops.misspelled_arguments import suggested

NAME = "torch_npu"
INTERFACES = (
    *(training, dropout, fused_inference, sparse, merging),
    *(norms, activations, rotary, caches, transposes, softmax, token_permute, routing),
    *(quantised, grouped_matmul, losses, atb, atb_cache_and_rotary, quantised_sparse, prolog),
)

# Submodules of torch_npu.npu that repeat names of torch_npu.npu.
_PARTS = {
    "streams": "Stream Event",
    "random": "manual_seed manual_seed_all seed seed_all initial_seed "
    "get_rng_state set_rng_state get_rng_state_all set_rng_state_all",
    "memory": "empty_cache memory_allocated max_memory_allocated memory_reserved max_memory_reserved "
    "reset_peak_memory_stats mem_get_info memory_stats memory_summary",
    "graphs": "NPUGraph graph graph_pool_handle is_current_stream_capturing make_graphed_callables",
    "utils": "synchronize set_device current_device device_count is_available is_initialized init "
    "get_device_name get_device_properties is_bf16_supported device device_of "
    "stream set_stream current_stream default_stream",
}


def functions() -> dict[str, Callable[..., Any]]:
    """Returns {name: function} of all functions of torch_npu that this library has; errors suggest parameter names."""
    results = {name: getattr(module, name) for module in INTERFACES for name in module.__all__}
    return {name: f if hasattr(f, "__wrapped__") else suggested(f) for name, f in results.items()}


def build_modules(base: torch.device, kind: str) -> dict[str, ModuleType]:
    """Returns new modules of torch_npu by full name, packages before their modules.

    Args:
        base: the computing device.
        kind: device type of tensors on "npu": "npu", or that of base.
    """
    interfaces = functions()
    npu = {**runtime.names(), **device_module.names(base, kind), **interfaces}
    amp = device_module.amp(kind)
    contents: dict[str, dict[str, Any]] = {
        NAME: {**runtime.types(), "Format": runtime.Format, **interfaces},
        f"{NAME}.atb": {name: interfaces[name] for module in (atb, atb_cache_and_rotary) for name in module.__all__},
        f"{NAME}.npu": npu,
        **{
            f"{NAME}.npu.{submodule}": {name: npu[name] for name in names.split()}
            for submodule, names in _PARTS.items()
        },
        f"{NAME}.npu.amp": amp,
        f"{NAME}.npu.amp.autocast_mode": {"autocast": amp["autocast"]},
        f"{NAME}.npu.amp.grad_scaler": {"GradScaler": amp["GradScaler"]},
        f"{NAME}.profiler": profiler.NAMES,
        f"{NAME}.contrib": {},
        **{f"{NAME}.{submodule}": names for submodule, names in runtime.utils().items()},
        f"{NAME}._C": {},
        f"{NAME}._C._distributed_c10d": {"ProcessGroupHCCL": process_groups.ProcessGroupHCCL},
        f"{NAME}.distributed": {"is_hccl_available": lambda: True},
        f"{NAME}.testing": {},
        f"{NAME}.testing.testcase": {name: getattr(testcase, name) for name in testcase.CASES},
        f"{NAME}.testing.common_utils": {name: getattr(testcase, name) for name in testcase.HELPERS},
    }
    contents[f"{NAME}.npu.utils"] |= device_module.CHECKS
    modules = make_modules(contents, _absent)
    version = f"{torch.__version__.split('+')[0]}+fusion.attention"
    vars(modules[NAME]).update(__version__=version, __all__=[*interfaces, "npu"])
    return modules


def beside() -> dict[str, ModuleType]:
    """Returns {full name: module} of the modules that stand for mindspeed, cann_ops_transformer and torchair."""
    return make_modules(mindspeed.contents() | cann_ops.contents() | torchair.contents(), _absent)


def _absent(module: ModuleType, name: str) -> Any:
    advice = _suggestion(module.__name__, name, tuple(vars(module)))
    raise AttributeError(f"fusion_attention's {module.__name__} has no {name}{advice} ({LIST}; {PAGE})")


@lru_cache(256)  # programs may test for names often
def _suggestion(module: str, name: str, names: tuple[str, ...]) -> str:
    """Returns advice on a name that a module lacks, or similar ones of its names, as a part of an error text."""
    if sentence := instead(f"{module}.{name}"):
        return f"; instead: {sentence}"
    result = difflib.get_close_matches(name, [one for one in names if not one.startswith("__")], n=3)
    return f"; it has {', '.join(result)}" if result else ""
