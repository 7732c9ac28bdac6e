"""Operator definitions of cross entropy with its gradient, and of a Kullback-Leibler loss."""

from typing import Any

import torch

from fusion_attention.contract import INVALID, Attr, Tensor
from fusion_attention.ops.auxiliary_definitions.common import auxiliary, floats, result, same_shape
from fusion_attention.ops.auxiliary_definitions.token_permute import counting
from fusion_attention.ops.shared.params import one_of
from fusion_attention.ops.shared.rules import invalid, meaning

SIZES = {"T": 6, "C": 5}
NOT_HERE = "neither the chip nor this library computes the loss of lse"


def labels(target: torch.Tensor, classes: int, ignored: int) -> bool | str:
    """True if each label in `target` is in [0, classes) or equal to `ignored`; else text with one. Reads them."""
    if target.is_meta:
        return True
    wrong = target[(target != ignored) & ((target < 0) | (target >= classes))]
    return f"{wrong[0].item()}, outside [0, {classes})" if wrong.numel() else True


TARGET = Tensor("target", "The class of every row.", dtypes="int64", shape="T", make=counting(5, torch.int64))
WEIGHT = Tensor("weight", "Weight of every class.", True, dtypes="float32", shape="C")
SCALE = Attr(
    "lse_square_scale_for_zloss", f"0: {NOT_HERE}.", type=float, default=0.0, domain="lse_square_scale_for_zloss == 0"
)
HOW = (
    one_of("reduction", '"mean" (weighted), "sum" or "none" of the rows.', ("mean", "sum", "none")),
    Attr("ignore_index", "Label of ignored rows; it may be negative.", default=-100),
    Attr("label_smoothing", "s: weight of the uniform distribution over classes in a row's target.", type=float,
         default=0.0,
         domain="0 <= label_smoothing < 1"),
)  # fmt: skip


def loss(name: str, summary: str, inputs: tuple[Any, ...], results: tuple[Tensor, ...], rows: str, **more: Any) -> Any:
    """Returns the operator definition of a cross entropy or its gradient. inputs, results: its parameters; rows: the
    name of the one that is [tokens, classes]."""
    has_rows = meaning(f"labels(target, {rows}.shape[1], ignore_index)",
                       f"target: labels below the number of columns of {rows} (or ignore_index)", code=INVALID,
                       reads=True, when=f"{rows}.dim() == 2", invalid={"target": torch.arange(6)})  # fmt: skip
    some = invalid(f"{rows}.shape[1] > 0", f"{rows}: [rows, classes] (at least one class)", when=f"{rows}.dim() == 2",
                   invalid={"C": 0, "target": torch.full((6,), -100)})  # fmt: skip
    sample = more.pop("sample", {})
    rules = (has_rows, some, *more.pop("rules", ()))
    return auxiliary(
        name, summary, inputs, results, rules=rules, functions={"labels": labels}, sizes=SIZES, sample=sample, **more
    )


CROSS_ENTROPY = loss(
    "npu_cross_entropy_loss",
    "The cross entropy of rows of class scores.",
    (
        floats("input", "Scores of every class.", shape="T C"),
        *(TARGET, WEIGHT, *HOW, SCALE),
        Attr("return_zloss", f"False: {NOT_HERE}.", type=bool, default=False, domain="not return_zloss"),
    ),
    (
        result("loss", '[1]; for reduction "none" [T].', "=input"),
        result("log_prob", "Log-probabilities [T, C], for the gradient.", "=input"),
        result("zloss", "A tensor without elements.", "=input"),
        result("lse_for_zloss", "A tensor without elements.", "=input"),
    ),
    "input",
    formula="""log_prob = x - log(sum(exp(x)))    of each row
l = -(1 - s) * weight[y] * log_prob[y] - s / C * sum_c weight[c] * log_prob[c]
loss = l,  sum(l),  or sum(l) / sum(weight[y])""",
    returns="(loss, log_prob, zloss, lse_for_zloss); the loss alone is differentiable. If all rows are ignored, the "
    "mean is NaN.",
    tex=r"l = -(1 - s)\, w_y \log p_y - \frac{s}{C} \sum_c w_c \log p_c \qquad p = \operatorname{softmax}(x)",
    example="""\
>>> loss, *_ = npu_cross_entropy_loss(torch.zeros(3, 4), torch.tensor([0, 3, -100]))
>>> round(loss.exp().item(), 4)
4.0""",
)
CROSS_ENTROPY_BACKWARD = loss(
    "npu_cross_entropy_loss_backward",
    "The gradient of npu_cross_entropy_loss.",
    (
        floats("grad_loss", 'Gradient of the loss: one element; for reduction "none" [T].'),
        floats("log_prob", "The forward's second result.", shape="T C", like="grad_loss"),
        *(TARGET, WEIGHT),
        Tensor("grad_zloss", f"None: {NOT_HERE}.", True),
        Tensor("lse_for_zloss", f"None: {NOT_HERE}.", True),
        *(*HOW, SCALE),
    ),
    (result("grad_input", "[T, C].", "=log_prob"),),
    "log_prob",
    rules=(
        invalid(
            "grad_loss.shape == target.shape if reduction == 'none' else grad_loss.numel() == 1",
            'grad_loss: one element; for reduction "none" one per row (the shape of the loss)',
            given={"reduction": "none", "grad_loss": "T"},
            invalid={"reduction": "mean"},
        ),
        *(
            invalid(f"{name} is None or {name}.numel() == 0", f"{name}: None ({NOT_HERE})", invalid={name: "T"})
            for name in ("grad_zloss", "lse_for_zloss")
        ),
    ),
    formula="""dx = g * ((1 - s) * weight[y] * (p - onehot(y)) + s / C * (sum(weight) * p - weight)),  p = exp(log_prob)
g = dloss of the row,  dloss,  or dloss / sum(weight[y]);  0 in ignored rows""",
    sample={"grad_loss": "1"},
    example="""\
>>> x, y = torch.randn(3, 4, requires_grad=True), torch.tensor([0, 3, 1])
>>> loss, log_prob, *_ = npu_cross_entropy_loss(x, y)
>>> loss.backward()
>>> torch.allclose(npu_cross_entropy_loss_backward(torch.ones(1), log_prob, y), x.grad, atol=1e-6)
True""",
)


def _numbers(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(7))


KL_LOSS = auxiliary(
    "cann_ops_transformer.lightning_indexer_kl_loss",
    "Kullback-Leibler divergence of an indexer's distribution over keys from a target, without gradients.",
    (
        floats("target_score", "y, the target's probability of every key: [.., K].", make=_numbers),
        floats("index_probs", "p, the indexer's softmax over the same keys.", like="target_score", make=_numbers),
        Attr("eps", "Lower bound of q, and addend of p, in the logarithms.", type=float, default=1e-9,
             domain="0 < eps < 3.4e38", code=INVALID),
        one_of("weight_type", 'Weights of the logarithms: "logits": y, "probs": q.',
               ("logits", "probs"), code=INVALID),
    ),
    (result("loss", "A scalar.", "=target_score"),),
    rules=(
        same_shape("index_probs", "target_score"),
        invalid("target_score.dim() in (2, 3)", "target_score: [T, K] or [B, S, K] (packed or padded rows)",
                invalid={"target_score": "7", "index_probs": "7"}),
    ),
    formula="""q = y / (sum(y) + eps)                                                 for the keys of a row
loss = sum((ln max(q, eps) - ln(p + eps)) * (y or q))                  over all rows""",
    rulings=(45,),
    returns="The loss, a sum over all rows, computed in float32; without a gradient.",
    tex=r"""loss = \sum \Big(\ln \max(q, \epsilon) - \ln(p + \epsilon)\Big)\, w
\qquad q = \frac{y}{\sum y + \epsilon}, \quad w = y \text{ or } q""",
    sample={"target_score": "B S1 W", "index_probs": "B S1 W"},
    example="""\
>>> y = torch.tensor([[0.5, 0.25, 0.0]])
>>> round(lightning_indexer_kl_loss(y, torch.tensor([[0.25, 0.5, 0.25]])).item(), 3)
0.389""",
)  # fmt: skip
RECORDS = (CROSS_ENTROPY, CROSS_ENTROPY_BACKWARD, KL_LOSS)
