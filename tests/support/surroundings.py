"""Everything that npu.install() changes, in this thread."""

import sys
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack


def modes() -> list[Any]:
    return list(_get_current_function_mode_stack())


def surroundings() -> list[Any]:
    owners = (torch, torch.Tensor, torch.nn.Module, torch.autocast)
    return [*(dict(vars(owner)) for owner in owners), list(sys.meta_path), sorted(sys.modules), modes()]
