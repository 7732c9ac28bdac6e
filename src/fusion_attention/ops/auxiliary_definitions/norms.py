"""Operator definitions of root-mean-square norms."""

from dataclasses import replace

from fusion_attention.contract import Attr
from fusion_attention.ops.auxiliary_definitions.common import auxiliary, floats, result, same_shape
from fusion_attention.ops.shared.rules import invalid

X = floats("input", "The tensor that is normalised.")
GAMMA = floats("gamma", "Weights, in the shape of the last axes of input, which are normalised together.")
EPSILON = Attr("epsilon", "Added to the mean square.", type=float, default=1e-6, domain="0 <= epsilon < 3.4e38")
Y = result("y", "In the shape of input.", "=input")
RSTD = result("rstd", "1 / rms, in the shape of input with the normalised axes of size 1.", "float32")
SAMPLE = {"input": "B S1 W", "gamma": "W"}
FORMULA = """rstd = 1 / sqrt(mean(x^2) + epsilon)            over the axes of gamma
y = x * rstd * gamma"""
TEX = r"""\begin{aligned}
rstd &= \frac{1}{\sqrt{\operatorname{mean}(x^2) + \epsilon}} \quad \text{over the axes of } \gamma \\
y &= x \cdot rstd \cdot \gamma
\end{aligned}"""
WEIGHTS = invalid(
    "ends_with(input, gamma)",
    "gamma: the shape of the last axes of input (a weight for every element that is normalised)",
    invalid={"gamma": "7"},
)

RMS_NORM = auxiliary(
    "npu_rms_norm",
    "Divides rows by their root mean square, and multiplies their elements by weights.",
    (X, GAMMA, EPSILON),
    (Y, RSTD),
    returns="(y, rstd); y alone has a derivative.",
    rules=(WEIGHTS,),
    formula=FORMULA,
    tex=TEX,
    sample=SAMPLE,
    example="""\
>>> y, rstd = npu_rms_norm(torch.full((2, 4), 3.0), torch.ones(4))
>>> list(y.shape), list(rstd.shape), round(rstd[0].item(), 3)
([2, 4], [2, 1], 0.333)""",
)
RMS_NORM_BACKWARD = auxiliary(
    "npu_rms_norm_backward",
    "The gradients of npu_rms_norm.",
    (
        floats("dy", "Gradient of y."),
        floats("input", "The forward's input.", like="dy"),
        GAMMA,
        floats("rstd", "The forward's 1 / rms."),
    ),
    (result("dx", "In the shape of input.", "=input"), result("dgamma", "In the shape of gamma.", "float32")),
    rules=(
        same_shape("dy", "input"),
        WEIGHTS,
        invalid(
            "rstd.shape == one_per_row(input, gamma)",
            "rstd: the shape of input with the normalised axes of size 1 (as npu_rms_norm returns it)",
            when="ends_with(input, gamma)",
            invalid={"rstd": "B S1"},
        ),
    ),
    formula="xhat = x * rstd\ndx = rstd * (dy * gamma - xhat * mean(dy * gamma * xhat)),  dgamma = sum(dy * xhat)",
    functions={"one_per_row": lambda x, gamma: (*x.shape[: x.dim() - gamma.dim()], *(1,) * gamma.dim())},
    sample={**SAMPLE, "dy": "B S1 W", "rstd": ("B S1 1", "float32")},
    example="""\
>>> x, gamma = torch.randn(2, 4, requires_grad=True), torch.ones(4)
>>> y, rstd = npu_rms_norm(x, gamma)
>>> y.sum().backward()
>>> torch.allclose(npu_rms_norm_backward(torch.ones(2, 4), x.detach(), gamma, rstd)[0], x.grad, atol=1e-6)
True""",
)
ADD_RMS_NORM = auxiliary(
    "npu_add_rms_norm",
    "npu_rms_norm of the sum of two tensors; returns the sum too.",
    (
        floats("x1", "First addend."),
        floats("x2", "Second addend.", like="x1"),
        replace(GAMMA, text="Weights, in the shape of the last axes of x1, which are normalised together."),
        EPSILON,
    ),
    (
        result("y", "In the shape of x1.", "=x1"),
        result("rstd", "1 / rms, in the shape of x1 with the normalised axes of size 1.", "float32"),
        result("x", "The sum.", "=x1"),
    ),
    rules=(
        same_shape("x2", "x1"),
        invalid(
            "ends_with(x1, gamma)",
            f"gamma: the shape of the last axes of x1 ({WEIGHTS.advice})",
            invalid={"gamma": "7"},
        ),
    ),
    formula=f"x = x1 + x2\n{FORMULA}",
    returns="(y, rstd, x); y and x have a derivative.",
    sample={"x1": "B S1 W", "x2": "B S1 W", "gamma": "W"},
    example="""\
>>> y, _, x = npu_add_rms_norm(torch.ones(2, 4), torch.ones(2, 4), torch.ones(4))
>>> x[0, 0].item(), round(y[0, 0].item(), 4)
(2.0, 1.0)""",
)
GEMMA_RMS_NORM = RMS_NORM.version(
    "npu_gemma_rms_norm",
    "npu_rms_norm with weights 1 + gamma, as in Gemma.",
    formula=FORMULA.replace("* gamma", "* (1 + gamma)"),
    tex=TEX.replace(r"\cdot \gamma", r"(1 + \gamma)"),
    example="""\
>>> x = torch.randn(2, 4)
>>> torch.equal(npu_gemma_rms_norm(x, torch.zeros(4))[0], npu_rms_norm(x, torch.ones(4))[0])
True""",
)

RECORDS = (RMS_NORM, RMS_NORM_BACKWARD, ADD_RMS_NORM, GEMMA_RMS_NORM)
