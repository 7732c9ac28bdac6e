"""Startup code of every Python process that a program under `python -m fusion_attention.npu` starts.

It installs an import hook that calls install() when the process imports torch. It imports neither torch nor this
library, because many of these processes use neither. The environment's sitecustomize also runs.
"""

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

NAMES = ("torch_npu", "mindspeed", "cann_ops_transformer")


class _OnDemand:
    """An import hook that calls install() when torch or a package for Ascend NPUs is imported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        """Returns the spec of an Ascend package after install(), or torch's spec, whose loader calls install()."""
        if name != "torch" and name.partition(".")[0] not in NAMES:
            return None
        if importlib.util.find_spec("fusion_attention") is None:  # another environment's Python
            return None
        if name == "torch":
            return self._torch()
        _install()
        module = sys.modules.get(name)
        return None if module is None else module.__spec__

    def _torch(self) -> "ModuleSpec | None":
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec("torch", None) for finder in others)), None)
        loader = None if spec is None else spec.loader
        if loader is None or "fusion_attention" in sys.modules:  # this library may be loading torch itself
            return spec
        load = loader.exec_module

        def load_and_install(module: ModuleType) -> None:
            load(module)
            _install()

        loader.exec_module = load_and_install  # type: ignore[method-assign]
        return spec


def _install() -> None:
    from fusion_attention.npu import install

    install(os.environ["FUSION_ATTENTION_NPU_DEVICE"], strict=bool(os.environ.get("FUSION_ATTENTION_NPU_STRICT")))


def _next() -> None:
    """Runs the environment's sitecustomize, which this file hides."""
    here = Path(__file__).parent
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != here.resolve()]
    for finder in sys.meta_path:
        spec = finder.find_spec("sitecustomize", others) if hasattr(finder, "find_spec") else None
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
            return


_next()
ON_DEMAND = _OnDemand()
if "FUSION_ATTENTION_NPU_DEVICE" in os.environ:
    sys.meta_path.insert(0, ON_DEMAND)
