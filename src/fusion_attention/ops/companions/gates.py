"""Gated and plain activations: the records."""

from __future__ import annotations

from fusion_attention.contract import Attr
from fusion_attention.ops.companions.common import companion, floats, result, two_halves
from fusion_attention.ops.shared.rules import invalid

X = floats("self", "Both halves.")
DIM = Attr("dim", "The axis that is cut in the middle.", default=-1)
SAMPLE = {"self": "B S1 W"}

SWIGLU = companion(
    "npu_swiglu",
    "torch_npu's gated SiLU.",
    (X, DIM),
    (result("y", "In the shape of self, half as long along dim.", "=self"),),
    rules=two_halves(),
    formula="a, b = the halves of x along dim\ny = a / (1 + exp(-a)) * b",
    tex=r"y = \frac{a}{1 + e^{-a}} \cdot b \qquad a, b = \text{the halves of } x",
    sample=SAMPLE,
)
SWIGLU_BACKWARD = companion(
    "npu_swiglu_backward",
    "The gradient of npu_swiglu.",
    (floats("grad_output", "Gradient of y."), floats("self", "Both halves.", like="grad_output"), DIM),
    (result("dx", "In the shape of self.", "=self"),),
    rules=(
        *two_halves(grad_output="3 2"),
        invalid(
            "grad_output.shape == half_of(self, dim)",
            "grad_output",
            "as npu_swiglu returns it",
            "the shape of self, half as long along dim",
            when="has_axis(self, dim)",
            spoil={"grad_output": "B S1 W"},
        ),
    ),
    formula="s = 1 / (1 + exp(-a))\nda = dy * b * s * (1 + a * (1 - s)),  db = dy * a * s",
    functions={"half_of": lambda x, dim: half_of(tuple(x.shape), dim)},
    sample={**SAMPLE, "grad_output": "B S1 H"},
)


def half_of(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    """A shape, half as long along an axis."""
    at = dim % len(shape)
    return (*shape[:at], shape[at] // 2, *shape[at + 1 :])


RECORDS = (SWIGLU, SWIGLU_BACKWARD)
