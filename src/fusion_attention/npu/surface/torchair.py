"""The package torchair, which compiles graphs for Ascend NPUs; in this library torch traces and runs the graphs.

Options of the chip's compiler are accepted without effect.
"""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

from fusion_attention.patches import Changes

NAME = "torchair"
_RUN = "aot_eager"  # torch's back end that traces forward and backward, without compilation


class CompilerConfig:
    """Options of the chip's compiler: every attribute exists, nested to any depth, without effect."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        result = CompilerConfig()
        setattr(self, name, result)
        return result


def get_npu_backend(*, compiler_config: Any = None, custom_decompositions: Any = None) -> str:
    """Returns the name of torch.compile's back end that takes the place of the chip's compiler."""
    return _RUN


def contents() -> dict[str, dict[str, Any]]:
    """Returns {module name: {name: object}} for the modules that stand for torchair's, packages first."""
    names = {"CompilerConfig": CompilerConfig}
    return {
        NAME: {"get_npu_backend": get_npu_backend, **names},
        f"{NAME}.configs": {},
        f"{NAME}.configs.compiler_config": names,
        f"{NAME}.core": {},
        f"{NAME}.core.utils": {"logger": logging.getLogger(NAME)},
        f"{NAME}.ge_concrete_graph": {},
        f"{NAME}.ge_concrete_graph.ge_apis": {},
    }


def enter(changes: Changes) -> None:
    """Registers torch.compile's back end "npugraph_ex", which runs graphs by torch, until the patches are removed."""

    def change(registry: ModuleType) -> None:
        if "npugraph_ex" not in registry._BACKENDS:
            registry.register_backend(
                lambda graph, inputs, **_: registry.lookup_backend(_RUN)(graph, inputs), name="npugraph_ex"
            )
            for registered in (registry._BACKENDS, registry._COMPILER_FNS):
                changes.after(registered.pop, "npugraph_ex", None)

    changes.when_loaded("torch._dynamo.backends.registry", change)
