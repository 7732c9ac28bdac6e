"""Operator definitions of the softmax of masked scores and of its gradient."""

import torch

from fusion_attention.contract import Attr, Tensor
from fusion_attention.ops.auxiliary_definitions.common import auxiliary, floats, result, same_shape
from fusion_attention.ops.shared.rules import finite_scale, invalid

MASK = Tensor(
    "mask",
    "True: the score becomes -10000. It broadcasts to the scores. A row whose scores are all masked is uniform.",
    dtypes="bool",
    make=lambda shape: torch.ones(shape, dtype=torch.bool).triu(1),
)
TRIANGLE = Attr("fixed_triu_mask", "Mask the scores above the diagonal, and ignore mask.", type=bool, default=False)
FORMULA = "y = softmax(where(mask, -10000, scale * x)) over the last axis"


def _mask_fits(scores: str, *also: str) -> tuple:  # type: ignore[type-arg]
    advice, text = "axes of size 1 are repeated", f"a shape that broadcasts to that of {scores}"
    return (
        invalid(
            f"{scores}.dim() > 1",
            f"{scores}: two axes or more (rows of scores)",
            invalid=dict.fromkeys((scores, *also), "7") | {"mask": ("7", "zeros")},
        ),
        invalid(f"expands_to(mask, {scores})", f"mask: {text} ({advice})", invalid={"mask": "5 7"}),
    )


SCALED_MASKED_SOFTMAX = auxiliary(
    "npu_scaled_masked_softmax",
    "The softmax of scaled scores, of which masked ones are -10000.",
    (
        floats("x", "Scores [..., rows, keys]."),
        MASK,
        Attr("scale", "Factor on the scores.", type=float, default=1),
        TRIANGLE,
    ),
    (result("y", "In the shape of x.", "=x"),),
    rules=(*_mask_fits("x"), finite_scale("scale")),
    formula=FORMULA,
    tex=r"y = \operatorname{softmax}\begin{cases} -10000 & mask \\ scale \cdot x & \text{else} \end{cases}",
    sample={"x": "B N1 S1 W", "mask": "S1 W"},
    example="""\
>>> npu_scaled_masked_softmax(torch.zeros(1, 2), torch.tensor([[False, True]])).tolist()
[[1.0, 0.0]]""",
)
SCALED_MASKED_SOFTMAX_BACKWARD = auxiliary(
    "npu_scaled_masked_softmax_backward",
    "The gradient of npu_scaled_masked_softmax.",
    (
        floats("y_grad", "Gradient of y."),
        floats("y", "The forward's result.", like="y_grad"),
        MASK,
        Attr("scale", "The forward's factor on the scores.", type=float),
        Attr("fixed_triu_mask", "The forward's value.", type=bool),
    ),
    (result("dx", "In the shape of y.", "=y"),),
    rules=(same_shape("y_grad", "y"), *_mask_fits("y", "y_grad"), finite_scale("scale", optional=False)),
    formula="dx = scale * y * (dy - sum(dy * y)),  0 where masked",
    sample={"y_grad": "B N1 S1 W", "y": "B N1 S1 W", "mask": "S1 W", "scale": 0.5, "fixed_triu_mask": False},
    example="""\
>>> x, dy, mask = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3), torch.eye(3, dtype=torch.bool)
>>> y = npu_scaled_masked_softmax(x, mask, 0.5)
>>> y.backward(dy)
>>> dx = npu_scaled_masked_softmax_backward(dy, y.detach(), mask, 0.5, False)
>>> torch.allclose(dx, x.grad, atol=1e-6)
True""",
)

RECORDS = (SCALED_MASKED_SOFTMAX, SCALED_MASKED_SOFTMAX_BACKWARD)
