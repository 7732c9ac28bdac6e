"""The process group "hccl", which gloo implements on a CPU and nccl on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from fusion_attention.patches import Changes, Layer

NAME = "hccl"
# The class of torch.distributed that implements "hccl", for each type of computing device.
_CARRIERS = {"cpu": "ProcessGroupGloo", "cuda": "ProcessGroupNCCL"}


class Options(SimpleNamespace):
    """A substitute for ProcessGroupHCCL.Options, of NPU process groups: accepts every field, without effect."""

    hccl_config: Any = None
    is_high_priority_stream = False

    def __repr__(self) -> str:
        return f"ProcessGroupHCCL.Options({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


# For programs that import it from torch_npu._C._distributed_c10d.
ProcessGroupHCCL = SimpleNamespace(Options=Options)


def register(changes: Changes, base: torch.device, kind: str) -> None:
    """Makes "hccl", the NPU's communication library, a back end of torch.distributed, until the patches are removed.

    Args:
        changes: records the patches.
        base: the computing device.
        kind: device type of tensors on "npu"; if it differs from base's type, groups send aliases of the tensors on the
            computing device.
    """
    if not torch.distributed.is_available():
        return
    changes.set(torch.distributed, "is_hccl_available", lambda: True)

    def change(c10d: ModuleType) -> None:
        """Registers "hccl" as c10d.Backend.register_backend() does, but by patches that can be removed."""
        backend = c10d.Backend
        plugin = backend._BackendPlugin(lambda options, given=None: _carrier(c10d, base, options), True)
        changes.set(backend, NAME.upper(), NAME)
        changes.set(backend, "backend_list", [*backend.backend_list, NAME])
        changes.set(backend.backend_capability, NAME, list(dict.fromkeys((base.type, kind))))
        changes.set(backend.backend_type_map, NAME, c10d.ProcessGroup.BackendType.CUSTOM)
        changes.set(backend._plugins, NAME.upper(), plugin)
        if kind != base.type:
            changes.set(backend.default_device_backend_map, kind, NAME)

    changes.when_loaded("torch.distributed.distributed_c10d", change)


def _carrier(c10d: ModuleType, base: torch.device, options: Any) -> Any:
    """Returns the process group that implements "hccl" on the device `base`: Gloo on a CPU, NCCL on a GPU; options:
    torch.distributed's, for the new group. RuntimeError if torch lacks it."""
    kind = getattr(c10d, _CARRIERS[base.type], None)
    if kind is None:
        raise RuntimeError(
            f'npu.install: process group "hccl": expected a torch with {_CARRIERS[base.type]}, which implements it '
            f"on {base.type}, got a torch without it (install another build of torch)"
        )
    if base.type == "cpu":
        group = kind(options.store, options.group_rank, options.group_size, options.timeout)
    else:
        settings = kind.Options()
        settings._timeout = options.timeout
        settings.global_ranks_in_group, settings.group_name = options.global_ranks_in_group, options.group_id
        group = kind(options.store, options.group_rank, options.group_size, settings)
    group._set_sequence_number_for_group()
    return group


def read_meshes(changes: Changes, mapped: Callable[[Layer, int, str], Any]) -> None:
    """Makes init_device_mesh("npu", ...) and DeviceMesh("npu", ...) create meshes of the computing device.

    FSDP and DTensor place tensors by a mesh's device type.

    Args:
        changes: records the patches.
        mapped: wraps a patched function so that the argument with this position or name is translated.
    """

    def change(module: ModuleType) -> None:
        changes.wrap(module.DeviceMesh, "__init__", lambda layer: mapped(layer, 1, "device_type"))
        changes.wrap(module, "init_device_mesh", lambda layer: mapped(layer, 0, "device_type"))
        changes.set(torch.distributed, "init_device_mesh", module.init_device_mesh)

    if torch.distributed.is_available():
        changes.when_loaded("torch.distributed.device_mesh", change)
