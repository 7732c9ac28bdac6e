"""Support of torch.compile's inductor for tensors on "npu": graphs are compiled for the computing device (CPU or CUDA).

The compiled function runs on aliases of the tensors (torch_ops/device_aliases.py); its results are tensors on "npu",
with gradients.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from fusion_attention.patches import Changes, Layer
from fusion_attention.torch_ops.device_aliases import COUNTS

Tensor = torch.Tensor

_NAME = re.compile(r"npu(:\d+)?")


def enter(changes: Changes, base: str) -> None:
    """Makes inductor accept graphs on "npu", from the time when it is loaded until the patches are removed.

    Args:
        changes: records the patches.
        base: type of the computing device.
    """

    def change(module: ModuleType) -> None:
        changes.wrap(module, "compile_fx", lambda layer: _compiling(layer, base))

    changes.when_loaded("torch._inductor.compile_fx", change)


def _on_npu(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "npu"


def _counts(value: Any) -> bool:
    """Returns True for an integer tensor on the CPU: it is not moved, as operators may read it as lengths or a seed."""
    return isinstance(value, Tensor) and value.device.type == "cpu" and value.dtype in COUNTS


def _compiling(layer: Layer, base: str) -> Callable[..., Any]:
    """Wraps torch's compile_fx(): graphs with tensors on "npu" are compiled for the computing device `base`, others
    unchanged; a graph that mixes devices raises NotImplementedError."""

    def named(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device(base) if value.type == "npu" else value
        return base if isinstance(value, str) and _NAME.fullmatch(value) else value

    @functools.wraps(layer.below)
    def compile_fx(model: Any, inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        values = [*inputs, *(node.meta.get("example_value") for node in _nodes(model))]
        if not any(map(_on_npu, values)):
            return layer.below(model, inputs, *args, **kwargs)
        if not all(_on_npu(value) or _counts(value) for value in values if isinstance(value, Tensor)):
            raise NotImplementedError(
                'torch.compile: backend "inductor" on device npu: expected all tensors of a graph on npu, except '
                "lengths and seeds, got some on another device (copy to and from npu outside the graph, or compile "
                'with backend="aot_eager")'
            )
        results: list[Any] = []  # fake tensors, which have shapes without memory
        for node in _nodes(model):
            if node.op == "output":
                torch.fx.node.map_arg(node.args, lambda n: results.append(n.meta.get("example_value")))
            node.args = torch.fx.node.map_aggregate(node.args, named)
            node.kwargs = torch.fx.node.map_aggregate(node.kwargs, named)
        model.recompile()
        stay = [n for n, value in enumerate(results) if _counts(value)]
        traced = [node.meta["example_value"] for node in _nodes(model) if node.op == "placeholder"]
        there = list(inputs)
        for at, (fake, _) in enumerate(zip(traced, inputs, strict=True)):
            if _on_npu(fake):  # the compiler gets a fake tensor on the computing device in its place
                with fake.fake_mode, torch.enable_grad():
                    alias = torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype, device=base)
                    there[at] = alias.requires_grad_(fake.requires_grad)
        return _crossing(layer.below(model, there, *args, **kwargs), stay)

    return compile_fx


def _nodes(model: Any) -> Sequence[Any]:
    graph = getattr(model, "graph", None)
    return () if graph is None else list(graph.nodes)


def _crossing(compiled: Callable[..., Any], stay: Sequence[int]) -> Callable[..., Any]:
    """Wraps a function compiled for the computing device, so that it accepts and returns tensors on "npu", without
    copies. stay: indices of the results that remain on the host."""
    ops = torch.ops.fusion_attention_npu

    def run(*given: Any) -> Any:
        tensors = [value for value in given if _on_npu(value)]
        aliases = {id(tensor): ops.to_base.default(tensor) for tensor in tensors}
        back = {id(aliases[id(tensor)]): tensor for tensor in tensors}
        results = compiled(*(aliases.get(id(value), value) for value in given))
        place = itertools.count()

        def home(out: Tensor) -> Tensor:
            if next(place) in stay:
                return out
            return back[id(out)] if id(out) in back else ops.to_npu.default(out, tensors)

        return tree_map_only(Tensor, home, results)

    return run
