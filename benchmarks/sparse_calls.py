"""Tensors of one sequence with DeepSeek's sizes, and our calls: attention to lists, the indexer and its loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.backward_only import Call
from fusion_attention import indexer_loss, lightning_indexer, sparse_attention
from fusion_attention.backends import BackendName

DIM, ROPE, CHOSEN, INDEX_DIM = 512, 64, 2048, 128
SCALE = (DIM + ROPE) ** -0.5
# Floating-point operations of a pair of a query head's row and a key: forward, backward.
FORWARD, BACKWARD = 2 * (2 * DIM + ROPE), 2 * (3 * (DIM + ROPE) + 2 * DIM)


def drawn(device: str, dtype: torch.dtype, *shapes: tuple[int, ...], grad: bool = False) -> list[torch.Tensor]:
    """Returns random tensors."""
    return [torch.randn(shape, device=device, dtype=torch.float32).to(dtype).requires_grad_(grad) for shape in shapes]


def lists_of(tokens: int, keys: int, local: bool, device: str) -> torch.Tensor:
    """Returns int32 [tokens, 1, CHOSEN]: unique random keys, or the keys around a token's position."""
    if local:
        first = torch.linspace(0, keys - CHOSEN, tokens, device=device).long()[:, None]
        return (first + torch.arange(CHOSEN, device=device)).int()[:, None]
    parts = [torch.rand(min(256, tokens), keys, device=device).topk(CHOSEN).indices for _ in range(0, tokens, 256)]
    return torch.cat(parts)[:tokens].int()[:, None]


@dataclass(frozen=True, eq=False)
class Selection:
    """The tensors of attention to latents (MLA): all query heads use one key head, whose rows are also the values."""

    q: torch.Tensor
    k: torch.Tensor
    q_rope: torch.Tensor
    k_rope: torch.Tensor
    lists: torch.Tensor
    backend: BackendName = "auto"

    @classmethod
    def of(
        cls, tokens: int, heads: int, keys: int, local: bool = False, *, dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu", grad: bool = False,
    ) -> Selection:  # fmt: skip
        """Returns random tensors; local: rows select the keys around their position."""
        torch.manual_seed(0)
        shapes = (tokens, heads, DIM), (keys, 1, DIM), (tokens, heads, ROPE), (keys, 1, ROPE)
        tensors = drawn(device, dtype, *shapes, grad=grad)
        return cls(*tensors, lists_of(tokens, keys, local, device), "triton" if device == "cuda" else "auto")

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        """Returns the tensors that may require gradients."""
        return self.q, self.k, self.q_rope, self.k_rope

    def attend(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes (output, lse) with our kernels."""
        result = sparse_attention(
            self.q, self.k, None, self.lists, layout="TND", q_len=[len(self.q)], kv_len=[len(self.k)],
            q_rope=self.q_rope, k_rope=self.k_rope, scale=SCALE, causal=False, backend=self.backend, return_lse=True,
        )  # fmt: skip
        return result[0], result[1]

    def ours(self) -> torch.Tensor:
        """Computes the output with our kernels."""
        return self.attend()[0]


@dataclass(frozen=True, eq=False)
class Index:
    """The tensors of the indexer."""

    q: torch.Tensor
    k: torch.Tensor
    weights: torch.Tensor
    backend: BackendName = "auto"

    @classmethod
    def of(
        cls, tokens: int, heads: int, keys: int, *, dtype: torch.dtype = torch.bfloat16, device: str = "cpu",
        grad: bool = False,
    ) -> Index:  # fmt: skip
        """Returns random tensors."""
        torch.manual_seed(0)
        shapes = (tokens, heads, INDEX_DIM), (keys, 1, INDEX_DIM), (tokens, heads)
        q, k, weights = drawn(device, dtype, *shapes, grad=grad)
        with torch.no_grad():
            weights /= (heads * INDEX_DIM) ** 0.5  # scores of about 1, so that the loss's softmax is no maximum
        return cls(q, k, weights, "triton" if device == "cuda" else "auto")

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        """Returns the tensors that the loss trains."""
        return self.q, self.k, self.weights

    def ours(self) -> object:
        """Returns the selected keys and their scores."""
        return lightning_indexer(
            *self.leaves, CHOSEN, layout="TND", q_len=[len(self.q)], kv_len=[len(self.k)], causal=False,
            backend=self.backend,
        )  # fmt: skip

    def eager(self, dtype: torch.dtype, chunk: int = 64) -> object:
        """Returns the selected keys by torch.topk of scores of a few tokens at a time; dtype: of sums over heads."""
        results = []
        for i in range(0, len(self.q), chunk):
            dots = torch.relu(torch.einsum("thd,sd->ths", self.q[i : i + chunk], self.k[:, 0]))
            weights = self.weights[i : i + chunk].to(dtype)
            results.append(torch.einsum("ths,th->ts", dots.to(dtype), weights).topk(CHOSEN))
        return results


def loss_with_gradients(
    rows: Selection, index: Index, lse: torch.Tensor, lists: torch.Tensor | None, *, causal: bool = False
) -> Call:
    """Returns a function that computes the indexer's loss and its gradients; lse: of the attention, [tokens, heads]."""

    def call() -> object:
        result = indexer_loss(
            rows.q, rows.k, lse, *index.leaves, lists, layout="TND", q_len=[len(rows.q)], kv_len=[len(rows.k)],
            q_rope=rows.q_rope, k_rope=rows.k_rope, scale=(rows.q.shape[-1] + ROPE) ** -0.5, causal=causal,
            backend=rows.backend,
        )  # fmt: skip
        return torch.autograd.grad(result, index.leaves)

    return call
