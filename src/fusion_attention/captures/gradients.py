"""Gradients in saved calls: watch() observes autograd to save backwards, backward_of() makes the backward of a call.

A backward's file contains the arguments of its forward, the forward's results (names with `saved.`), their gradients
(`upstream.`), and as outputs the gradients of the inputs.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fusion_attention.contract import Op
from fusion_attention.ir.call import Lowered

Tensor = torch.Tensor
OnGradients = Callable[[dict[str, Tensor], dict[str, Tensor]], None]
SAVED, UPSTREAM = "saved.", "upstream."
_NAMES = {"query": "dq", "key": "dk", "value": "dv", "query_rope": "dq_rope", "key_rope": "dk_rope", "pse": "dpse",
          "sink": "dsink", "q": "dq", "k": "dk", "v": "dv", "q_rope": "dq_rope", "k_rope": "dk_rope",
          "bias": "dpse"}  # fmt: skip


def gradient_name(op: Op, name: str) -> str:
    """Returns the name of the backward's output that is the gradient of the input `name` of an operator."""
    is_dense = "keep_prob" in op.by_name or "block_mask" in op.by_name
    return _NAMES.get(name, f"d{name}") if is_dense else f"d{name}"


def watch(op: Op, args: Mapping[str, Any], outputs: Mapping[str, Any], on_gradients: OnGradients) -> None:
    """Calls on_gradients(upstream, gradients) each time autograd runs the backward of a call of `op`. args, outputs:
    its arguments and results by name. upstream: gradients of the results by name; gradients: those of the inputs."""
    results = {n: t for n, t in outputs.items() if isinstance(t, Tensor) and t.grad_fn is not None}
    if not results:
        return
    node: Any = next(iter(results.values())).grad_fn
    outputs_by_number = {t.output_nr: n for n, t in results.items() if t.grad_fn is node}
    given = {n: t for n, t in args.items() if isinstance(t, Tensor) and t.requires_grad}
    edges = {n: torch.autograd.graph.get_gradient_edge(t) for n, t in given.items()}

    def hook(of_inputs: Any, of_results: Any) -> None:
        upstream = {
            outputs_by_number[i]: g for i, g in enumerate(of_results) if g is not None and i in outputs_by_number
        }
        left = [(function, place, g) for (function, place), g in zip(node.next_functions, of_inputs, strict=False)]
        result: dict[str, Tensor] = {}
        for name, edge in edges.items():
            at = next((i for i, (f, n, _) in enumerate(left) if f is edge.node and n == edge.output_nr), None)
            if at is not None:
                gradient = left.pop(at)[2]  # removed, because a tensor that is several inputs has several gradients
                if gradient is not None:
                    result[gradient_name(op, name)] = gradient
        if upstream and result:
            on_gradients(upstream, result)

    node.register_hook(hook)


def complete_call(op: Op, bound: Any, seed: int, offset: Any) -> Any:
    """Returns the validated call `bound` as back ends compute it, with all results; seed, offset: of dropout."""
    assert op.lower is not None
    call = op.lower(bound, **({"seed": seed, "offset": int(offset or 0)} if "keep_prob" in op.by_name else {}))
    return call.complete() if op.trains else call


def backward_of(call: Any, saved: Mapping[str, Tensor], upstream: Mapping[str, Tensor]) -> Lowered | None:
    """Returns the backward of the forward `call`, both translated for back ends; None if there is no derivative. saved:
    the forward's results by name; upstream: their gradients by name."""
    try:
        backward: Lowered = call.backward(saved, upstream)
    except (AttributeError, KeyError):  # the operator has no derivative, or its statistics were not saved
        return None
    return backward
