"""LightningIndexer: the module that scores every key for every query row and selects the keys of largest score."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from fusion_attention.nn.cache import Cache, step, untraced
from fusion_attention.nn.ranks import Lengths, Ranks, functions, rows_of
from fusion_attention.nn.rope import apply_rope

Rope = tuple[Tensor, Tensor] | None

if TYPE_CHECKING:
    P = ParamSpec("P")
    T = TypeVar("T")

    def called_as(function: Callable[P, T]) -> Callable[[Callable[..., Any]], Callable[P, T]]:
        """Returns a decorator that gives a module's __call__ the signature of `function`, for type checkers."""


class Index(NamedTuple):
    """The results of an indexer, a module that selects keys for sparse attention.

    Attributes:
        q, k: its query rows [B, S, heads, head_dim] and key rows [B, S2, 1, head_dim]; packed without the axis B.
        weights: one number per row and head, [B, S, heads].
        indices: the selected keys, int32 [B, S, 1, top_k]; None if not requested.
    """

    q: Tensor
    k: Tensor
    weights: Tensor
    indices: Tensor | None


class LightningIndexer(nn.Module):
    """Scores each key j for each query by a few small heads h, and selects the top_k keys of largest score.

        q_h = wq_b(query)_h,  k = k_norm(wk(x)),  w = weights_proj(x) / sqrt(heads * head_dim)
        I_j = sum_h w_h * max(0, q_h . k_j);  indices = the top_k largest I among the visible keys

    The inputs are detached, so the indexer's loss trains only the indexer. Parameters have the names of DeepSeek-V3.2.
    The Hadamard rotation of DeepSeek's inference code is omitted, because it does not change the products.

    Args:
        dim: elements of a token's hidden state.
        heads: query heads.
        head_dim: elements of a head.
        top_k: number of keys that a query selects.
        query_dim: elements of the input from which queries are projected (a latent query); None: dim.
        group: a process group or DeviceMesh over whose ranks sequences are sharded by distributed.shard() with
            `schedule`; None: not sharded. A layer with this indexer uses the same ranks.
        schedule: how tokens are divided over the ranks, such as "zigzag".

    Source: this library; the indexer of DeepSeek-V3.2.

    Example:
        >>> indexer = LightningIndexer(64, heads=4, head_dim=16, top_k=8)
        >>> indexer(torch.randn(2, 32, 64)).indices.shape
        torch.Size([2, 32, 1, 8])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        head_dim: int,
        top_k: int,
        *,
        query_dim: int | None = None,
        group: Any = None,
        schedule: str = "zigzag",
    ) -> None:
        super().__init__()
        self.ranks = None if group is None else Ranks(group, schedule)
        self.heads, self.head_dim, self.top_k = heads, head_dim, top_k
        self.wq_b = nn.Linear(query_dim or dim, heads * head_dim, bias=False)
        self.wk = nn.Linear(dim, head_dim, bias=False)
        self.k_norm = nn.LayerNorm(head_dim, eps=1e-6)
        self.weights_proj = nn.Linear(dim, heads, bias=False)

    def forward(
        self,
        x: Tensor,
        query: Tensor | None = None,
        *,
        rope: Rope = None,
        lengths: Lengths = None,
        choose: bool = True,
        tokens: int | None = None,
        cache: Cache | None = None,
    ) -> Index:
        """Returns an Index: the indexer's queries, keys and head weights, and the selected keys of every query.

        Args:
            x: hidden states, [B, S, dim], or packed [T, dim].
            query: input of the query projection, [B, S, query_dim], or packed [T, query_dim]; None: x.
            rope: (cos, sin) of the tokens, [S, R / 2], [B, S, R / 2] or [T, R / 2]; the first R elements of each head
                are rotated.
            lengths: tokens of every sequence; required for packed x.
            choose: True: select keys; False: indices are None.
            tokens: if sequences are sharded over ranks, the tokens of a complete padded sequence; None: equal shards.
            cache: the Cache of earlier tokens; the keys of x are appended, rows select among all keys, and k has all.

        Raises:
            ValueError: a cache that is full, of another batch, layer, dtype or device, or used with a group, packed
                rows or gradients.
        """
        x = x.detach()
        query = x if query is None else query.detach()
        q = self.wq_b(query).unflatten(-1, (self.heads, self.head_dim))
        k = self.k_norm(self.wk(x)).unsqueeze(-2)
        if rope is not None:
            q, k = apply_rope(q, rope), apply_rope(k, rope)
        # weights_proj may be float32 in a model of another dtype.
        weights = self.weights_proj(x.to(self.weights_proj.weight.dtype)) * (self.heads * self.head_dim) ** -0.5
        index = Index(q, k, weights, None)
        if cache is not None:
            return self._append(cache, x, index, lengths, choose)
        return self._choose(index, **rows_of(x, lengths, self.ranks, tokens)) if choose else index

    @torch.no_grad()
    def _choose(self, index: Index, **rows: Any) -> Index:
        """Returns `index` with the selected keys' indices; rows: keyword arguments (layout, lengths, ranks)."""
        indices, _ = functions(self.ranks).lightning_indexer(*index[:3], self.top_k, **rows)
        return index._replace(indices=indices)

    @untraced
    def _append(self, cache: Cache, x: Tensor, index: Index, lengths: Lengths, choose: bool) -> Index:
        """Returns the Index of x's queries and of all keys in a cache, to which x's keys are appended. choose: True:
        with selected keys; lengths: tokens of every sequence."""
        with step(cache, self, self.ranks, x, index.q, lengths, index_k=index.k) as (_, stored, call_lengths):
            index = index._replace(k=stored["index_k"])
            return self._choose(index, **call_lengths) if choose else index

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
