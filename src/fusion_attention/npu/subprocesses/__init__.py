"""Makes torch_npu importable in the processes that this process starts, such as torchrun's and pytest-xdist's.

This folder is added to PYTHONPATH, so that each started process runs sitecustomize.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

DEVICE, STRICT, PATH = "FUSION_ATTENTION_NPU_DEVICE", "FUSION_ATTENTION_NPU_STRICT", "PYTHONPATH"


def export(device: str, strict: bool = False) -> Callable[[], None]:
    """Writes the arguments of install() to environment variables, which processes started later read.
    Returns a function that restores the environment."""
    before = {name: os.environ.get(name) for name in (DEVICE, STRICT, PATH)}
    path = filter(None, [str(Path(__file__).parent), before[PATH]])
    os.environ.update({DEVICE: device, STRICT: "1" if strict else "", PATH: os.pathsep.join(path)})

    def restore() -> None:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    return restore


def done() -> None:
    """Removes the import hook of sitecustomize.py from this process; install() calls it."""
    finder = getattr(sys.modules.get("sitecustomize"), "ON_DEMAND", None)
    if finder in sys.meta_path:
        sys.meta_path.remove(finder)
