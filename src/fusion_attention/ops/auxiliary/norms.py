"""Root-mean-square norms: the records."""

from __future__ import annotations

from dataclasses import replace

from fusion_attention.contract import Attr
from fusion_attention.ops.auxiliary.common import auxiliary, floats, result, same_shape
from fusion_attention.ops.shared.rules import invalid

X = floats("input", "What is normalised.")
GAMMA = floats("gamma", "A weight for every element of the axes that are normalised together: the last ones of input.")
EPSILON = Attr(
    "epsilon", "Added to the mean square.", type=float, default=1e-6, domain="0 <= epsilon < 3.4e38", bad=-1.0
)
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
    "gamma",
    "a weight for every element that is normalised",
    "the last axes of input",
    invalid={"gamma": "7"},
)

RMS_NORM = auxiliary(
    "npu_rms_norm",
    "torch_npu's root-mean-square norm: (y, rstd).",
    (X, GAMMA, EPSILON),
    (Y, RSTD),
    rules=(WEIGHTS,),
    formula=FORMULA,
    tex=TEX,
    sample=SAMPLE,
)
RMS_NORM_BACKWARD = auxiliary(
    "npu_rms_norm_backward",
    "Gradients of npu_rms_norm: (dx, dgamma).",
    (
        floats("dy", "Gradient of y."),
        floats("input", "What was normalised.", like="dy"),
        GAMMA,
        floats("rstd", "The forward's 1 / rms."),
    ),
    (result("dx", "In the shape of input.", "=input"), result("dgamma", "In the shape of gamma.", "float32")),
    rules=(
        same_shape("dy", "input"),
        WEIGHTS,
        invalid(
            "rstd.shape == one_per_row(input, gamma)",
            "rstd",
            "as npu_rms_norm returns it",
            "the shape of input with the normalised axes of size 1",
            when="ends_with(input, gamma)",
            invalid={"rstd": "B S1"},
        ),
    ),
    formula="xhat = x * rstd\ndx = rstd * (dy * gamma - xhat * mean(dy * gamma * xhat)),  dgamma = sum(dy * xhat)",
    functions={"one_per_row": lambda x, gamma: (*x.shape[: x.dim() - gamma.dim()], *(1,) * gamma.dim())},
    sample={**SAMPLE, "dy": "B S1 W", "rstd": ("B S1 1", "float32")},
)
ADD_RMS_NORM = auxiliary(
    "npu_add_rms_norm",
    "torch_npu's root-mean-square norm of a sum: (y, rstd, x).",
    (
        floats("x1", "One addend."),
        floats("x2", "The other.", like="x1"),
        replace(
            GAMMA, text="A weight for every element of the axes that are normalised together: the last ones of x1."
        ),
        EPSILON,
    ),
    (
        result("y", "In the shape of x1.", "=x1"),
        result("rstd", "1 / rms, in the shape of x1 with the normalised axes of size 1.", "float32"),
        result("x", "The sum.", "=x1"),
    ),
    rules=(
        same_shape("x2", "x1"),
        invalid("ends_with(x1, gamma)", "gamma", WEIGHTS.advice, "the last axes of x1", invalid={"gamma": "7"}),
    ),
    formula=f"x = x1 + x2\n{FORMULA}",
    sample={"x1": "B S1 W", "x2": "B S1 W", "gamma": "W"},
)
GEMMA_RMS_NORM = auxiliary(
    "npu_gemma_rms_norm",
    "torch_npu's root-mean-square norm with weights that count from 1: (y, rstd).",
    (X, GAMMA, EPSILON),
    (Y, RSTD),
    rules=(WEIGHTS,),
    formula=FORMULA.replace("* gamma", "* (1 + gamma)"),
    tex=TEX.replace(r"\cdot \gamma", r"(1 + \gamma)"),
    sample=SAMPLE,
)

RECORDS = (RMS_NORM, RMS_NORM_BACKWARD, ADD_RMS_NORM, GEMMA_RMS_NORM)
