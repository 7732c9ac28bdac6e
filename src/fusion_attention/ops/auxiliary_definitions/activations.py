"""Operator definitions of activation functions, with and without a gate."""

from dataclasses import replace

from fusion_attention.contract import Attr
from fusion_attention.ops.auxiliary_definitions.common import auxiliary, floats, result, same_shape, two_halves
from fusion_attention.ops.shared.params import one_of
from fusion_attention.ops.shared.rules import invalid

X = floats("input", "The tensor with both halves.")
DIM = Attr("dim", "The axis that is divided into two halves.", default=-1)
GRADIENT_OF_HALF = invalid(
    "grad_output.shape == half_of(input, dim)",
    "grad_output: the shape of input, half as long along dim (as the forward returns it)",
    when="has_axis(input, dim)",
    invalid={"grad_output": "B S1 W"},
)
SAMPLE = {"input": "B S1 W"}

SWIGLU = auxiliary(
    "npu_swiglu",
    "SiLU of the first half of an axis, times the second half.",
    (X, DIM),
    (result("y", "In the shape of input, half as long along dim.", "=input"),),
    rules=two_halves(),
    formula="a, b = the halves of x along dim\ny = a / (1 + exp(-a)) * b",
    tex=r"y = \frac{a}{1 + e^{-a}} \cdot b \qquad a, b = \text{the halves of } x",
    sample=SAMPLE,
    example="""\
>>> npu_swiglu(torch.tensor([0.0, 2.0, 1.0, 3.0])).tolist()[0]
0.0""",
)
SWIGLU_BACKWARD = auxiliary(
    "npu_swiglu_backward",
    "The gradient of npu_swiglu.",
    (floats("grad_output", "Gradient of y."), floats("input", "The forward's input.", like="grad_output"), DIM),
    (result("dx", "In the shape of input.", "=input"),),
    rules=(*two_halves(grad_output="3 2"), GRADIENT_OF_HALF),
    formula="s = 1 / (1 + exp(-a))\nda = dy * b * s * (1 + a * (1 - s)),  db = dy * a * s",
    sample={**SAMPLE, "grad_output": "B S1 H"},
    example="""\
>>> x = torch.randn(3, 8, requires_grad=True)
>>> npu_swiglu(x).sum().backward()
>>> torch.allclose(npu_swiglu_backward(torch.ones(3, 4), x.detach()), x.grad, atol=1e-6)
True""",
)

GEGLU_FORMULA = "a, b = the halves of x along dim\ny = a * gelu(b);  with activate_left gelu(a) * b"
APPROXIMATE = one_of("approximate", "GELU by 1: tanh, 0: the error function.", (0, 1), default=1)
LEFT = Attr("activate_left", "Apply GELU to the first half; False: to the second.", type=bool, default=False)
GEGLU = auxiliary(
    "npu_geglu",
    "GELU of one half of an axis, times the other half.",
    (X, DIM, APPROXIMATE, LEFT),
    (
        result("y", "In the shape of input, half as long along dim.", "=input"),
        result("gelu", "GELU of the one half, in the shape of y.", "=input"),
    ),
    rules=two_halves(),
    formula=GEGLU_FORMULA,
    returns="(y, gelu); y alone has a derivative.",
    tex=r"y = a \cdot \operatorname{gelu}(b) \qquad a, b = \text{the halves of } x",
    sample=SAMPLE,
    example="""\
>>> y, gelu = npu_geglu(torch.tensor([2.0, 3.0]), approximate=0)
>>> (y / gelu).item()
2.0""",
)
GEGLU_GRAD = auxiliary(
    "npu_geglu_grad",
    "The gradient of npu_geglu.",
    (
        floats("grad_output", "Gradient of y."),
        floats("input", "The forward's input.", like="grad_output"),
        floats("gelu", "The forward's second result.", like="grad_output"),
        *(DIM, APPROXIMATE, LEFT),
    ),
    (result("dx", "In the shape of input.", "=input"),),
    rules=(
        *two_halves(grad_output="3 2", gelu="3 2"),
        replace(GRADIENT_OF_HALF, invalid=dict.fromkeys(("grad_output", "gelu"), "B S1 W")),
        same_shape("gelu", "grad_output", invalid={"gelu": "B S1 W"}),
    ),
    formula="da = dy * gelu(b),  db = dy * a * gelu'(b);  with activate_left the other way round",
    sample={**SAMPLE, "grad_output": "B S1 H", "gelu": "B S1 H"},
    example="""\
>>> x = torch.randn(3, 8, requires_grad=True)
>>> y, gelu = npu_geglu(x)
>>> y.sum().backward()
>>> torch.allclose(npu_geglu_grad(torch.ones(3, 4), x.detach(), gelu), x.grad, atol=1e-6)
True""",
)
WORD = one_of("approximate", 'GELU by "none": the error function, "tanh": tanh.', ("none", "tanh"))
ANY = floats("input", "A tensor of any shape.")
SAME = result("y", "In the shape of input.", "=input")
GELU = auxiliary(
    "npu_gelu",
    "GELU: x times the standard normal distribution function of x.",
    (ANY, WORD),
    (SAME,),
    formula="y = x * Phi(x), Phi the distribution function of a normal variable",
    tex=r"y = x \, \Phi(x)",
    sample=SAMPLE,
    keywords="approximate",
    example="""\
>>> round(npu_gelu(torch.tensor(1.0)).item(), 4)
0.8413""",
)
GELU_BACKWARD = auxiliary(
    "npu_gelu_backward",
    "The gradient of npu_gelu.",
    (floats("grad_output", "Gradient of y."), floats("input", "The forward's input.", like="grad_output"), WORD),
    (result("dx", "In the shape of input.", "=input"),),
    rules=(same_shape("grad_output", "input"),),
    formula="dx = dy * (Phi(x) + x * phi(x)), phi the density",
    sample={**SAMPLE, "grad_output": "B S1 W"},
    keywords="approximate",
    example="""\
>>> round(npu_gelu_backward(torch.tensor(1.0), torch.tensor(0.0)).item(), 4)
0.5""",
)
FAST_GELU = auxiliary(
    "npu_fast_gelu",
    "GELU, approximated by the logistic function.",
    (ANY,),
    (SAME,),
    formula="y = x / (1 + exp(-1.702 x))",
    tex=r"y = \frac{x}{1 + e^{-1.702 x}}",
    sample=SAMPLE,
    example="""\
>>> round(npu_fast_gelu(torch.tensor(1.0)).item(), 4)
0.8458""",
)
FAST_GELU_BACKWARD = auxiliary(
    "npu_fast_gelu_backward",
    "The gradient of npu_fast_gelu.",
    (floats("grad", "Gradient of y."), floats("input", "The forward's input.", like="grad")),
    (result("dx", "In the shape of input.", "=input"),),
    rules=(same_shape("grad", "input"),),
    formula="s = 1 / (1 + exp(-1.702 x))\ndx = dy * s * (1 + 1.702 x * (1 - s))",
    sample={**SAMPLE, "grad": "B S1 W"},
    example="""\
>>> npu_fast_gelu_backward(torch.tensor(1.0), torch.tensor(0.0)).item()
0.5""",
)

RECORDS = (SWIGLU, SWIGLU_BACKWARD, GEGLU, GEGLU_GRAD, GELU, GELU_BACKWARD, FAST_GELU, FAST_GELU_BACKWARD)
