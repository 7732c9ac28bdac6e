"""Times lists of selected keys, the indexer and its loss beside eager torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.gpu.timing import Call, Row, gradient
from fusion_attention import indexer_loss, lightning_indexer, sparse_attention
from fusion_attention.backends.triton.selected import launch_backward as launch_sparse_backward

TOKENS, DIM, ROPE, CHOSEN = 4096, 512, 64, 2048
INDEX_HEADS, INDEX_DIM = 64, 128
SCALE = (DIM + ROPE) ** -0.5
CHUNK = 64  # tokens whose keys eager torch gathers at once


def _drawn(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=grad)


def _lists(keys: int, local: bool) -> torch.Tensor:
    """Returns [tokens, 1, CHOSEN]: unique random keys, or the keys around a token's position."""
    if local:
        first = torch.linspace(0, keys - CHOSEN, TOKENS, device="cuda").long()[:, None]
        return (first + torch.arange(CHOSEN, device="cuda")).int()[:, None]
    drawn = [torch.rand(256, keys, device="cuda").topk(CHOSEN).indices for _ in range(0, TOKENS, 256)]
    return torch.cat(drawn).int()[:, None]


@dataclass(frozen=True, eq=False)
class Selection:
    """The tensors of attention to latents (MLA): all query heads use one key head, whose rows are also the values."""

    q: torch.Tensor
    k: torch.Tensor
    q_rope: torch.Tensor
    k_rope: torch.Tensor
    lists: torch.Tensor

    @classmethod
    def of(cls, heads: int, keys: int, local: bool, grad: bool = False) -> Selection:
        """Returns random tensors."""
        shapes = (TOKENS, heads, DIM), (keys, 1, DIM), (TOKENS, heads, ROPE), (keys, 1, ROPE)
        return cls(*(_drawn(*shape, grad=grad) for shape in shapes), _lists(keys, local))

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        """Returns the tensors that require gradients."""
        return self.q, self.k, self.q_rope, self.k_rope

    def ours(self) -> torch.Tensor:
        """Computes attention with our kernels."""
        out = sparse_attention(
            self.q, self.k, None, self.lists, layout="TND", q_len=[TOKENS], kv_len=[len(self.k)], q_rope=self.q_rope,
            k_rope=self.k_rope, scale=SCALE, causal=False, backend="triton",
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out

    def eager(self) -> torch.Tensor:
        """Computes attention by gathers and batched products of a few tokens at a time."""
        parts = []
        for i in range(0, TOKENS, CHUNK):
            chosen = self.lists[i : i + CHUNK, 0].long()
            k, rope = self.k[:, 0][chosen], self.k_rope[:, 0][chosen]
            scores = self.q[i : i + CHUNK] @ k.mT + self.q_rope[i : i + CHUNK] @ rope.mT
            parts.append(torch.softmax(scores.float() * SCALE, -1).to(k.dtype) @ k)
        return torch.cat(parts)


def _atomic(call: Call) -> Call:
    """Returns a function that runs the call with nondeterministic sums of the keys' gradients."""

    def run() -> object:
        before, launch_sparse_backward.ATOMIC = launch_sparse_backward.ATOMIC, True
        try:
            return call()
        finally:
            launch_sparse_backward.ATOMIC = before

    return run


def selected(quick: bool) -> Iterator[Row]:
    """Times forward and backward over lists; 8 heads are padded to 16, the smallest tile."""
    for heads in (8, 16, 64, 128):
        for keys in (8192,) if quick or heads < 128 else (8192, 32768):
            for local in (False, True):
                name = f"H{heads} S{keys} {'local' if local else 'random'}"
                forward = Selection.of(heads, keys, local)
                pairs = TOKENS * CHOSEN * heads
                yield Row("lists", name, forward.ours, {"eager": forward.eager}, 2 * (2 * DIM + ROPE) * pairs)
                graded = Selection.of(heads, keys, local, grad=True)
                flops = 2 * (3 * (DIM + ROPE) + 2 * DIM) * pairs
                ours, eager = (gradient(way, graded.leaves) for way in (graded.ours, graded.eager))
                yield Row("lists backward", name, ours, {"atomic": _atomic(ours), "eager": eager}, flops)


@dataclass(frozen=True, eq=False)
class Index:
    """The tensors of the indexer."""

    q: torch.Tensor
    k: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(cls, keys: int, grad: bool = False) -> Index:
        """Returns random tensors."""
        shapes = (TOKENS, INDEX_HEADS, INDEX_DIM), (keys, 1, INDEX_DIM), (TOKENS, INDEX_HEADS)
        return cls(*(_drawn(*shape, grad=grad) for shape in shapes))

    def ours(self) -> object:
        """Returns the selected keys."""
        return lightning_indexer(
            self.q, self.k, self.weights, CHOSEN, layout="TND", q_len=[TOKENS], kv_len=[len(self.k)], causal=False,
            backend="triton",
        )  # fmt: skip

    def eager(self) -> object:
        """Returns the selected keys by scores of a few tokens at a time and torch.topk."""
        results = []
        for i in range(0, TOKENS, CHUNK):
            dots = torch.relu(torch.einsum("thd,sd->ths", self.q[i : i + CHUNK], self.k[:, 0]))
            scores = torch.einsum("ths,th->ts", dots.float(), self.weights[i : i + CHUNK].float())
            results.append(scores.topk(CHOSEN))
        return results


def indexer(quick: bool) -> Iterator[Row]:
    """Times scores and the selection of keys."""
    for keys in (8192,) if quick else (8192, 65536):
        index = Index.of(keys)
        flops = 2 * TOKENS * keys * INDEX_HEADS * INDEX_DIM
        yield Row("indexer", f"S{keys} top {CHOSEN}", index.ours, {"eager": index.eager}, flops)


def _with_gradients(rows: Selection, index: Index, lists: torch.Tensor | None, heads: int) -> Call:
    lse = torch.full((TOKENS, heads), 12.0, device="cuda")
    learns = index.q, index.k, index.weights

    def call() -> object:
        result = indexer_loss(
            rows.q, rows.k, lse, *learns, lists, layout="TND", q_len=[TOKENS], kv_len=[len(rows.k)],
            q_rope=rows.q_rope, k_rope=rows.k_rope, scale=SCALE, causal=False, backend="triton",
        )  # fmt: skip
        return torch.autograd.grad(result, learns)

    return call


def loss(quick: bool) -> Iterator[Row]:
    """Times the indexer's loss and gradients over lists and, for the warm-up stage, over all keys; 128 heads."""
    heads = 128
    for keys in (8192,) if quick else (8192, 32768, 131072):
        for warm in (False, True):
            if warm and keys > 8192:
                continue
            rows, index = Selection.of(heads, keys, local=False), Index.of(keys, grad=True)
            call = _with_gradients(rows, index, None if warm else rows.lists, heads)
            pairs = TOKENS * (keys if warm else CHOSEN)
            flops = 2 * pairs * (heads * (DIM + ROPE) + 3 * INDEX_HEADS * INDEX_DIM)
            yield Row("loss", f"{'warm-up' if warm else 'lists'} H{heads} S{keys}", call, {}, flops)
