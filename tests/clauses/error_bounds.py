"""Numbers with error bounds: a formula that is computed with them also gives the allowed error of its result.

Inputs are exact. Every operation adds the largest rounding error of float32 (a sum of n terms: n roundings, in any
order) and propagates the errors of its operands; rounded() adds one rounding to a storage dtype. Products of errors
are neglected, because errors are small; no bound is measured or tuned.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

UNIT = torch.finfo(torch.float32).eps / 2  # One rounding.
EXP = 4 * UNIT  # exp and log of a math library are not correctly rounded.
TINY = torch.finfo(torch.float32).tiny  # Smaller ones may be flushed to zero.


@dataclass(frozen=True)
class Near:
    """A float64 value with its allowed error: |result - value| <= slack, element by element."""

    value: torch.Tensor
    slack: torch.Tensor

    def _rounded(self, value: torch.Tensor, slack: torch.Tensor, count: int = 1) -> Near:
        return Near(value, slack + count * UNIT * value.abs())

    def __add__(self, other: Near | float) -> Near:
        other = near(other)
        return self._rounded(self.value + other.value, self.slack + other.slack)

    def __sub__(self, other: Near | float) -> Near:
        other = near(other)
        return self._rounded(self.value - other.value, self.slack + other.slack)

    def __mul__(self, other: Near | float) -> Near:
        other = near(other)
        slack = self.value.abs() * other.slack + self.slack * other.value.abs() + self.slack * other.slack
        return self._rounded(self.value * other.value, slack, 2)

    def __truediv__(self, other: Near | float) -> Near:
        other = near(other)
        value = self.value / other.value
        return self._rounded(value, (self.slack + value.abs() * other.slack) / (other.value.abs() - other.slack))

    def __matmul__(self, other: Near) -> Near:
        a, b, x, y = self.value, other.value, self.slack, other.slack
        magnitude = a.abs() @ b.abs()
        return Near(a @ b, a.abs() @ y + x @ b.abs() + x @ y + (a.shape[-1] + 1) * UNIT * magnitude)

    def __getitem__(self, at: object) -> Near:
        return Near(self.value[at], self.slack[at])  # type: ignore[index]

    def prepare(self, where: slice, addend: Near) -> None:
        """Assigns rows, reshaped to the shape of the target."""
        shape = self.value[where].shape
        self.value[where], self.slack[where] = addend.value.reshape(shape), addend.slack.reshape(shape)

    @property
    def T(self) -> Near:
        return Near(self.value.mT, self.slack.mT)

    def sum(self, dim: int) -> Near:
        slack = self.slack.sum(dim, keepdim=True)
        magnitude = self.value.abs().sum(dim, keepdim=True)
        return Near(self.value.sum(dim, keepdim=True), slack + self.value.shape[dim] * UNIT * magnitude)

    def max(self, dim: int) -> Near:
        at = self.value.argmax(dim, keepdim=True)
        return Near(self.value.gather(dim, at), self.slack.max(dim, keepdim=True).values)

    def exp(self) -> Near:
        value = self.value.exp()
        return Near(value, value * (torch.expm1(self.slack) + EXP) + TINY)

    def log(self) -> Near:
        value = self.value.log()
        return Near(value, self.slack / (self.value - self.slack) + EXP * value.abs())

    def sqrt(self) -> Near:
        value = self.value.sqrt()
        return self._rounded(value, self.slack / value.clamp_min(1e-30))

    def relu(self) -> Near:
        return Near(self.value.relu(), torch.where(self.value > -self.slack, self.slack, 0))

    def step(self) -> Near:
        """Returns 1 for positive elements, else 0; the slack is 1 where the sign is uncertain."""
        return Near((self.value > 0).double(), (self.value.abs() <= self.slack).double())

    def reshape(self, shape: tuple[int, ...]) -> Near:
        return Near(self.value.reshape(shape), self.slack.reshape(shape))

    def only(self, where: torch.Tensor, otherwise: float) -> Near:
        """Returns elements where the mask is True, and the exact number `otherwise` elsewhere."""
        return Near(torch.where(where, self.value, otherwise), torch.where(where, self.slack, 0))

    def rounded(self, dtype: torch.dtype) -> Near:
        """Adds the error of one rounding to a dtype, including subnormal numbers."""
        info = torch.finfo(dtype)
        return Near(self.value, self.slack + info.eps / 2 * (self.value.abs() + self.slack) + info.tiny * info.eps)


def near(x: Near | torch.Tensor | float) -> Near:
    """Converts an exact value to Near."""
    if isinstance(x, Near):
        return x
    value = torch.as_tensor(x).double()
    return Near(value, torch.zeros_like(value))


def softmax(scores: Near, visible: torch.Tensor) -> tuple[Near, Near, Near]:
    """Returns (probabilities, maximum, sum of exp(score - maximum)) over visible keys; each row must see a key."""
    top = scores.only(visible, float("-inf")).max(-1)
    weights = (scores.only(visible, 0) - near(top.value)).exp().only(visible, 0)  # Any number in its place cancels.
    total = weights.sum(-1)
    shifted = Near(total.value, total.slack + total.value * torch.expm1(top.slack))
    return weights / total, top, shifted


def cat(parts: list[Near], dim: int = 0) -> Near:
    return Near(torch.cat([p.value for p in parts], dim), torch.cat([p.slack for p in parts], dim))


def stack(parts: list[Near]) -> Near:
    return Near(torch.stack([p.value for p in parts]), torch.stack([p.slack for p in parts]))
