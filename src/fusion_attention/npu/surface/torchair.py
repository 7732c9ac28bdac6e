"""The packages that compile graphs for the chip, as programs name them: here torch traces the graph, and runs it.

Options of the chip's compiler are taken, and change nothing.
"""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

from fusion_attention.patches import Changes

NAME = "torchair"
_RUN = "aot_eager"  # torch's back end that traces, gradients included, and compiles nothing


class CompilerConfig:
    """Options of the chip's compiler: any may be set, at any depth."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        result = CompilerConfig()
        setattr(self, name, result)
        return result


def get_npu_backend(*, compiler_config: Any = None, custom_decompositions: Any = None) -> str:
    """The back end that torch.compile takes for the chip's graphs."""
    return _RUN


def contents() -> dict[str, dict[str, Any]]:
    """What every module holds, by its name, packages before what they hold."""
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
    """torch.compile(backend="npugraph_ex") from now on; the changes take it back."""

    def change(registry: ModuleType) -> None:
        if "npugraph_ex" not in registry._BACKENDS:
            registry.register_backend(
                lambda graph, inputs, **_: registry.lookup_backend(_RUN)(graph, inputs), name="npugraph_ex"
            )
            for registered in (registry._BACKENDS, registry._COMPILER_FNS):
                changes.after(registered.pop, "npugraph_ex", None)

    changes.when_loaded("torch._dynamo.backends.registry", change)
