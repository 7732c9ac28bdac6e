"""Read by every Python that `python -m fusion_attention.npu` starts: torch_npu is there once somebody asks for it.

Loads nothing itself, for most of these processes ask for nothing. An environment's own sitecustomize is read as well.
"""

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path


class _OnDemand:
    """Finds torch_npu by installing it, the first time that anybody looks for it."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        """The spec that install() put there."""
        if name.partition(".")[0] not in ("torch_npu", "mindspeed"):
            return None
        from fusion_attention.npu import install

        # install() takes this finder away: its own answer from here on.
        install(os.environ["FUSION_ATTENTION_NPU_DEVICE"], strict=bool(os.environ.get("FUSION_ATTENTION_NPU_STRICT")))
        module = sys.modules.get(name)
        return None if module is None else module.__spec__


def _next() -> None:
    """Runs the sitecustomize that this one hides."""
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
