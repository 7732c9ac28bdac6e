"""Makes torch_npu importable in processes that this one starts: spawned ones, torchrun's, pytest-xdist's.

This folder is added to PYTHONPATH for started processes, so that each of them runs sitecustomize.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

DEVICE, STRICT, PATH = "FUSION_ATTENTION_NPU_DEVICE", "FUSION_ATTENTION_NPU_STRICT", "PYTHONPATH"


def tell(device: str, strict: bool = False) -> Callable[[], None]:
    """Sets the arguments of install() for processes that are started later, in the environment; returns a function that
    undoes it."""
    before = {name: os.environ.get(name) for name in (DEVICE, STRICT, PATH)}
    path = filter(None, [str(Path(__file__).parent), before[PATH]])
    os.environ.update({DEVICE: device, STRICT: "1" if strict else "", PATH: os.pathsep.join(path)})

    def unsay() -> None:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    return unsay


def done() -> None:
    """Removes the on-demand import hook after install()."""
    finder = getattr(sys.modules.get("sitecustomize"), "ON_DEMAND", None)
    if finder in sys.meta_path:
        sys.meta_path.remove(finder)
