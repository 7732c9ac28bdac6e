"""The package torchair, which compiles graphs for the chip; here torch traces and runs them.

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
    """Options of the chip's compiler: accepts any attribute, nested to any depth."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        result = CompilerConfig()
        setattr(self, name, result)
        return result


def get_npu_backend(*, compiler_config: Any = None, custom_decompositions: Any = None) -> str:
    """The name of torch.compile's back end for graphs of the chip."""
    return _RUN


def contents() -> dict[str, dict[str, Any]]:
    """The content of each module by name, packages before their modules."""
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
    """Registers the back end "npugraph_ex" of torch.compile, until the patches are removed."""

    def change(registry: ModuleType) -> None:
        if "npugraph_ex" not in registry._BACKENDS:
            registry.register_backend(
                lambda graph, inputs, **_: registry.lookup_backend(_RUN)(graph, inputs), name="npugraph_ex"
            )
            for registered in (registry._BACKENDS, registry._COMPILER_FNS):
                changes.after(registered.pop, "npugraph_ex", None)

    changes.when_loaded("torch._dynamo.backends.registry", change)
