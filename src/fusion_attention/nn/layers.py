"""Attention layers with a lightning indexer: for given projections, for multi-head and for latent attention."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fusion_attention.api.decode import decode_attention
from fusion_attention.api.sparse import sparse_attention
from fusion_attention.ir.mask import Band
from fusion_attention.nn.cache import Cache, step, untraced
from fusion_attention.nn.indexer import LightningIndexer, Rope
from fusion_attention.nn.ranks import Lengths, functions, rows_of, tokens_of
from fusion_attention.nn.rope import apply_rope
from fusion_attention.nn.stages import Stage, StagedAttention

if TYPE_CHECKING:
    from fusion_attention.nn.indexer import called_as


class SparseAttention(StagedAttention):
    """Causal attention of projected rows to all keys or to the indexer's selection, and the indexer's loss.

        stage     attention reads          the indexer's loss
        "dense"   all keys                 0
        "warmup"  all keys                 KL(p || softmax(I)) over all visible keys
        "sparse"  the keys of largest I    KL(p || softmax(I)) over these keys

    where p is the mean over heads of the attention's probabilities, and I the indexer's scores. A layer with
    projections calls this module, or derives from it and calls attend(), like SparseSelfAttention and
    SparseLatentAttention. The stage is not in the state_dict; set_stage() changes it in all layers of a model.

    If the indexer has a group, each rank passes its shards of the tensors and the lengths of the complete sequences.
    Every rank returns the same loss, that of all ranks: add it once to each rank's loss. Positions for rope come from
    distributed.positions().

    Args:
        indexer: the module that selects the keys.
        stage: "dense", "warmup" or "sparse".

    Raises:
        ValueError: an unknown stage.

    Source: this library; the schedule of DeepSeek-V3.2.

    Example:
        >>> layer = SparseAttention(LightningIndexer(64, heads=4, head_dim=16, top_k=8))
        >>> x, q, kv = torch.randn(2, 32, 64), torch.randn(2, 32, 4, 16), torch.randn(2, 32, 2, 16)
        >>> out, loss = layer(x, q, kv, kv)
        >>> out.shape, loss.shape
        (torch.Size([2, 32, 4, 16]), torch.Size([]))
    """

    def __init__(self, indexer: LightningIndexer, stage: Stage = "sparse") -> None:
        super().__init__(stage)
        self.indexer = indexer

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Returns attend()'s (out, loss): attention of projected queries, keys and values, and the indexer's loss."""
        return self.attend(*args, **kwargs)

    def attend(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor | None = None,
        *,
        query: Tensor | None = None,
        q_rope: Tensor | None = None,
        k_rope: Tensor | None = None,
        scale: float | None = None,
        index_rope: Rope = None,
        lengths: Lengths = None,
        tokens: int | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the attention of projected rows in the current stage, and the indexer's loss.

        Args:
            x: hidden states, read by the indexer: [B, S, dim], or packed [T, dim].
            q: query rows, [B, S, N1, D], or packed [T, N1, D].
            k: key rows, [B, S, N2, D]; N1 is a multiple of N2.
            v: value rows, [B, S, N2, Dv]; None: each row of k is also its value (a latent).
            query: input of the indexer's query projection; None: x.
            q_rope, k_rope: rope elements [B, S, N1, Dr], [B, S, N2, Dr].
            scale: factor on the dot products; None: 1 / sqrt(D + Dr).
            index_rope: (cos, sin) of the tokens for the indexer; None: no rotation.
            lengths: tokens of every sequence; packed: required. Padded: rows after them are 0 and have no loss.
            tokens: if sequences are sharded over ranks, the tokens of a complete padded sequence; None: equal shards.
            cache: the Cache of earlier tokens; keys and values of x are appended, and rows attend to all tokens.

        Returns:
            (out, loss): out has q's layout with Dv elements per head. loss is a scalar, the mean over all tokens, and 0
            in evaluation mode, in the dense stage and with a cache; add it to the model's loss (in warm-up it is the
            only loss).

        Raises:
            ValueError: a cache that is full, of another batch, layer, stage, dtype or device, or used with a group,
                packed rows or gradients.
        """
        ranks = self.indexer.ranks
        if cache is not None:
            ropes = (q_rope, k_rope, index_rope)
            out = self._append(cache, x, q, k, v, query=query, ropes=ropes, scale=scale, lengths=lengths)
            return out, out.new_zeros((), dtype=torch.float32)
        of, common = functions(ranks), {**rows_of(x, lengths, ranks, tokens), "scale": scale}
        common |= {"q_rope": q_rope, "k_rope": k_rope}
        indices = None
        if self.stage != "sparse":
            values = k if v is None else v
            out, lse = of.attention(q, k, values, band=Band.causal(), return_lse=True, **common)
            if self.stage == "dense" or not self.training:
                return out, out.new_zeros((), dtype=torch.float32)
            index = self.indexer(x, query, rope=index_rope, lengths=lengths, choose=False, tokens=tokens)
        else:
            index = self.indexer(x, query, rope=index_rope, lengths=lengths, tokens=tokens)
            indices = index.indices
            assert indices is not None
            lists = indices.expand(*k.shape[:-1], -1)  # the same selection for all key heads
            out, lse = of.sparse_attention(q, k, v, lists, return_lse=True, **common)
            if not self.training:
                return out, out.new_zeros((), dtype=torch.float32)
        loss = of.indexer_loss(q, k, lse, index.q, index.k, index.weights, indices, **common)
        return out, loss / tokens_of(x, lengths, ranks, tokens)

    @untraced
    def _append(
        self,
        cache: Cache,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        *,
        query: Tensor | None,
        ropes: tuple[Tensor | None, Tensor | None, Rope],
        scale: float | None,
        lengths: Lengths,
    ) -> Tensor:
        """Returns the attention [B, S, N1, Dv] of q to all tokens of a cache, to which keys and values of x are
        appended. ropes: (q_rope, k_rope, index_rope) of attend(); lengths: the tokens of every sequence."""
        (q_rope, k_rope, index_rope), dim, chooses = ropes, k.shape[-1], self.stage == "sparse"
        index = self.indexer(x, query, rope=index_rope, choose=False) if chooses else None
        if q_rope is not None and k_rope is not None:  # copied, because decode_attention() has no rope operands
            q, k = torch.cat([q, q_rope], -1), torch.cat([k, k_rope], -1)
        rows = {"k": k, "v": v, "index_k": None if index is None else index.k}
        with step(cache, self, self.indexer.ranks, x, q, lengths, **rows) as (q, stored, call_lengths):
            k, v = stored["k"], stored.get("v")
            common: dict[str, Any] = {**call_lengths, "scale": scale, "dim_v": dim if v is None else 0}
            if index is None:
                return decode_attention(q, k if v is None else (k, v), **common)
            lists = self.indexer._choose(index._replace(k=stored["index_k"]), **call_lengths).indices
            assert lists is not None
            return sparse_attention(q, k, v, lists.expand(*q.shape[:-2], k.shape[-2], -1), **common)

    if TYPE_CHECKING:

        @called_as(attend)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class SparseSelfAttention(SparseAttention):
    """Multi-head or grouped-query attention layer with an indexer: projections, and SparseAttention.attend().

    Args:
        dim: elements of a token's hidden state.
        heads: query heads, N1.
        kv_heads: key heads, N2; None: N1.
        head_dim: elements of a head; None: dim / heads.
        index_heads, index_dim, top_k: heads of the indexer, elements of each, and number of keys that it selects.
        stage: "dense" or "warmup" (attention to all keys), or "sparse" (to the keys that the indexer selects).
        group, schedule: ranks over which sequences are sharded, and how tokens are divided, as in LightningIndexer.

    Source: this library.

    Example:
        >>> from fusion_attention.nn import rope_table
        >>> layer = SparseSelfAttention(64, heads=4, kv_heads=2, index_heads=2, index_dim=16, top_k=8)
        >>> out, loss = layer(torch.randn(2, 32, 64), rope=rope_table(torch.arange(32), 16))
        >>> out.shape
        torch.Size([2, 32, 64])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        index_heads: int,
        index_dim: int,
        top_k: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        stage: Stage = "sparse",
        group: Any = None,
        schedule: str = "zigzag",
    ) -> None:
        super().__init__(LightningIndexer(dim, index_heads, index_dim, top_k, group=group, schedule=schedule), stage)
        self.head_dim = head_dim or dim // heads
        self.q_proj = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(dim, (kv_heads or heads) * self.head_dim, bias=False)
        self.v_proj = nn.Linear(dim, (kv_heads or heads) * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(
        self,
        x: Tensor,
        *,
        rope: Rope = None,
        index_rope: Rope = None,
        lengths: Lengths = None,
        tokens: int | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the layer's output and the indexer's loss.

        Args:
            x: hidden states, [B, S, dim], or packed [T, dim].
            rope: (cos, sin) of the tokens, [S, R / 2], [B, S, R / 2] or [T, R / 2], R <= head_dim.
            index_rope: the same for the indexer, R <= index_dim; None: rope.
            lengths, tokens, cache: tokens of each sequence, tokens of a sharded one, and cache, as in attend().

        Returns:
            (out, loss): out has x's shape; loss is the indexer's, a scalar.
        """
        q, k, v = self.project(x, rope)
        index_rope = rope if index_rope is None else index_rope
        out, loss = self.attend(x, q, k, v, index_rope=index_rope, lengths=lengths, tokens=tokens, cache=cache)
        return self.o_proj(out.flatten(-2)), loss

    if TYPE_CHECKING:

        @called_as(forward)  # not attend's signature, which the base class declares
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...  # type: ignore[override]

    def project(self, x: Tensor, rope: Rope = None) -> tuple[Tensor, Tensor, Tensor]:
        """Projects x to q [..., heads, head_dim], k and v [..., kv_heads, head_dim], rotated by rope."""
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)) for f in (self.q_proj, self.k_proj, self.v_proj))
        return (q, k, v) if rope is None else (apply_rope(q, rope), apply_rope(k, rope), v)


class SparseLatentAttention(SparseAttention):
    """The attention layer of DeepSeek-V3.2: multi-head latent attention (MLA) with an indexer.

        q_latent = norm(q_a(x)),  q, q_rope = q_b(q_latent);  latent, k_rope = norm, rope of kv_a(x)
        k, v = kv_b(latent),  out = o(attention(q, k, v, q_rope, k_rope))

    For attention to all keys the layer computes k and v: nope_dim + rope_dim + v_dim multiply-adds for each pair of row
    and key. For selected keys, and with a cache, it uses the absorbed form: kv_b is multiplied into the query and the
    output, and the latent is key and value: 2 kv_rank + rope_dim multiply-adds, but one latent serves all heads. Both
    forms have the same scores. Parameters have the names of transformers' DeepseekV32Attention.

    Args:
        dim: elements of a token's hidden state.
        heads: query heads.
        q_rank, kv_rank: elements of the query's and the key's latent.
        nope_dim, rope_dim, v_dim: elements of a head's key without rope, with rope, and of its value.
        index_heads, index_dim, top_k: heads of the indexer, elements of each, and number of keys that it selects.
        scale: factor on the dot products; None: 1 / sqrt(nope_dim + rope_dim).
        stage: "dense" or "warmup" (attention to all keys), or "sparse" (to the keys that the indexer selects).
        group, schedule: ranks over which sequences are sharded, and how tokens are divided, as in LightningIndexer.

    Source: this library; DeepSeek-V3.2.

    Example:
        >>> from fusion_attention.nn import rope_table
        >>> sizes = dict(q_rank=32, kv_rank=24, nope_dim=16, rope_dim=8, v_dim=16)
        >>> layer = SparseLatentAttention(64, 4, **sizes, index_heads=2, index_dim=16, top_k=8)
        >>> out, loss = layer(torch.randn(2, 32, 64), rope=rope_table(torch.arange(32), 8))
        >>> out.shape
        torch.Size([2, 32, 64])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        q_rank: int,
        kv_rank: int,
        nope_dim: int,
        rope_dim: int,
        v_dim: int,
        index_heads: int,
        index_dim: int,
        top_k: int,
        scale: float | None = None,
        stage: Stage = "sparse",
        group: Any = None,
        schedule: str = "zigzag",
    ) -> None:
        ranks = {"group": group, "schedule": schedule}
        super().__init__(LightningIndexer(dim, index_heads, index_dim, top_k, query_dim=q_rank, **ranks), stage)
        self.heads, self.parts = heads, (nope_dim, rope_dim, v_dim)
        self.scale = (nope_dim + rope_dim) ** -0.5 if scale is None else scale
        self.q_a_proj = nn.Linear(dim, q_rank, bias=False)
        self.q_a_layernorm = nn.RMSNorm(q_rank, eps=1e-6)
        self.q_b_proj = nn.Linear(q_rank, heads * (nope_dim + rope_dim), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(dim, kv_rank + rope_dim, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(kv_rank, eps=1e-6)
        self.kv_b_proj = nn.Linear(kv_rank, heads * (nope_dim + v_dim), bias=False)
        self.o_proj = nn.Linear(heads * v_dim, dim, bias=False)

    def forward(
        self,
        x: Tensor,
        *,
        rope: tuple[Tensor, Tensor],
        lengths: Lengths = None,
        tokens: int | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the layer's output and the indexer's loss.

        Args:
            x: hidden states, [B, S, dim], or packed [T, dim].
            rope: (cos, sin) of the tokens, [S, rope_dim / 2], [B, S, rope_dim / 2] or [T, rope_dim / 2].
            lengths, tokens, cache: tokens of each sequence, tokens of a sharded one, and cache, as in attend().

        Returns:
            (out, loss): out has x's shape; loss is the indexer's, a scalar.
        """
        nope, rotated, v_dim = self.parts
        q_latent = self.q_a_layernorm(self.q_a_proj(x))
        q, q_rope = self.q_b_proj(q_latent).unflatten(-1, (self.heads, -1)).split((nope, rotated), -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).unsqueeze(-2).split((self.kv_b_proj.in_features, rotated), -1)
        latent = self.kv_a_layernorm(latent)
        q_rope, k_rope = apply_rope(q_rope, rope, True), apply_rope(k_rope, rope, True)
        common: dict[str, Any] = {"query": q_latent, "scale": self.scale, "index_rope": rope}
        common |= {"lengths": lengths, "tokens": tokens, "cache": cache}
        if self.stage == "sparse" or cache is not None:
            up_k, up_v = self.kv_b_proj.weight.unflatten(0, (self.heads, -1)).split((nope, v_dim), 1)
            absorbed = torch.einsum("...hd,hdr->...hr", q, up_k)
            mixed, loss = self.attend(x, absorbed, latent, q_rope=q_rope, k_rope=k_rope, **common)
            out = torch.einsum("...hr,hdr->...hd", mixed, up_v)
        else:
            k, v = self.kv_b_proj(latent.squeeze(-2)).unflatten(-1, (self.heads, -1)).split((nope, v_dim), -1)
            k_rope = k_rope.expand(*k.shape[:-1], -1)
            out, loss = self.attend(x, q, k, v, q_rope=q_rope, k_rope=k_rope, **common)
        return self.o_proj(out.flatten(-2)), loss

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...  # type: ignore[override]
