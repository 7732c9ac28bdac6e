"""Attention layers that learn to choose their keys: the lightning indexer, and the stages in which it is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from fusion_attention.api.attention import attention
from fusion_attention.api.sparse import indexer_loss, lightning_indexer, sparse_attention
from fusion_attention.waist.mask import Band

__all__ = [
    "STAGES",
    "Index",
    "LightningIndexer",
    "SparseAttention",
    "SparseLatentAttention",
    "SparseSelfAttention",
    "apply_rope",
    "rope_table",
    "set_stage",
]

STAGES = ("dense", "warmup", "sparse")
Stage = Literal["dense", "warmup", "sparse"]

Lengths = Sequence[int] | Tensor | None
Rope = tuple[Tensor, Tensor] | None

if TYPE_CHECKING:
    P = ParamSpec("P")
    T = TypeVar("T")

    def called_as(function: Callable[P, T]) -> Callable[[Callable[..., Any]], Callable[P, T]]:
        """Says what a layer's call takes and returns; nn.Module says (*args, **kwargs) -> Any."""


def rope_table(positions: Tensor, dim: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """The cosines and sines by which rotary embedding rotates `dim` elements of a row.

        angle_i = position * base ** (-2 i / dim)

    Args:
        positions: of tokens, any shape; packed sequences count from 0 each.
        dim: elements of a row that are rotated; even.
        base: ratio of the longest wave to the shortest.

    Returns:
        (cos, sin): float32 [*positions.shape, dim / 2].

    Source: this library.

    Example:
        >>> cos, sin = rope_table(torch.arange(6), 8)
        >>> cos.shape
        torch.Size([6, 4])
    """
    rate = base ** (-torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device) / dim)
    angle = positions[..., None] * rate
    return angle.cos(), angle.sin()


def apply_rope(rows: Tensor, rope: tuple[Tensor, Tensor], interleaved: bool = False) -> Tensor:
    """Rows whose first elements are rotated by their positions; the elements behind the table's width stay.

        (a, b) -> (a cos - b sin, b cos + a sin)

    Args:
        rows: [..., heads, D].
        rope: (cos, sin), each [..., R / 2] with R <= D, as rope_table() gives them.
        interleaved: pairs are neighbours (2 i, 2 i + 1), and the results stand halves apart; False: pairs stand
            halves apart (i, i + R / 2).

    Raises:
        ValueError: the table is wider than the rows.

    Source: this library; DeepSeek-V3.2 rotates attention interleaved and its indexer halves apart.

    Example:
        >>> rows = torch.randn(2, 6, 4, 16)
        >>> rotated = apply_rope(rows, rope_table(torch.arange(6), 8))
        >>> torch.equal(rotated[:, 0], rows[:, 0]) and torch.equal(rotated[..., 8:], rows[..., 8:])
        True
    """
    cos, sin = (t.unsqueeze(-2) for t in rope)
    width = 2 * cos.shape[-1]
    if width > rows.shape[-1]:
        raise ValueError(
            f"apply_rope: rope: expected at most {rows.shape[-1] // 2} columns, got {cos.shape[-1]} "
            f"(rows have {rows.shape[-1]} elements; make a narrower rope_table)"
        )
    rotated = rows[..., :width]
    a, b = (rotated[..., 0::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, -1)
    parts = (a * cos - b * sin).to(rows.dtype), (b * cos + a * sin).to(rows.dtype), rows[..., width:]
    return torch.cat(parts, -1)


class Index(NamedTuple):
    """What an indexer says of a batch: its query, key and weights, and the keys that it chose (None: not asked)."""

    q: Tensor
    k: Tensor
    weights: Tensor
    indices: Tensor | None


class LightningIndexer(nn.Module):
    """Scores every key for every row with a few small heads, and chooses the best.

        q_h = wq_b(query)_h,  k = k_norm(wk(x)),  w = weights_proj(x) / sqrt(heads * head_dim)
        I_j = sum_h w_h * max(0, q_h . k_j);  indices = the top_k largest I among the keys that a row sees

    What it reads is detached: its loss teaches the indexer alone. Parameters have the names of DeepSeek-V3.2; the
    Hadamard rotation of its inference code is left out, as it changes no product.

    Args:
        dim: elements of a token's hidden state.
        heads: query heads.
        head_dim: elements of a head.
        top_k: keys that a row chooses.
        query_dim: elements of what queries are made of (MLA's query latent); None: the hidden state, dim.

    Source: this library; the indexer of DeepSeek-V3.2.

    Example:
        >>> indexer = LightningIndexer(64, heads=4, head_dim=16, top_k=8)
        >>> indexer(torch.randn(2, 32, 64)).indices.shape
        torch.Size([2, 32, 1, 8])
    """

    def __init__(self, dim: int, heads: int, head_dim: int, top_k: int, *, query_dim: int | None = None) -> None:
        super().__init__()
        self.heads, self.head_dim, self.top_k = heads, head_dim, top_k
        self.wq_b = nn.Linear(query_dim or dim, heads * head_dim, bias=False)
        self.wk = nn.Linear(dim, head_dim, bias=False)
        self.k_norm = nn.LayerNorm(head_dim, eps=1e-6)
        self.weights_proj = nn.Linear(dim, heads, bias=False)

    def forward(
        self, x: Tensor, query: Tensor | None = None, *, rope: Rope = None, lengths: Lengths = None, choose: bool = True
    ) -> Index:
        """The indexer's rows, and the keys that every row chooses.

        Args:
            x: hidden states, [B, S, dim], or packed [T, dim].
            query: [B, S, query_dim], or packed [T, query_dim]; None: x.
            rope: (cos, sin) of the tokens, [S, R / 2], [B, S, R / 2] or [T, R / 2]; R elements of each head rotate.
            lengths: tokens of every sequence; packed: needed.
            choose: False: indices are None.
        """
        x = x.detach()
        query = x if query is None else query.detach()
        q = self.wq_b(query).unflatten(-1, (self.heads, self.head_dim))
        k = self.k_norm(self.wk(x)).unsqueeze(-2)
        if rope is not None:
            q, k = apply_rope(q, rope), apply_rope(k, rope)
        # weights_proj may stay in float32 where the model does not.
        weights = self.weights_proj(x.to(self.weights_proj.weight.dtype)) * (self.heads * self.head_dim) ** -0.5
        indices = None
        if choose:
            with torch.no_grad():
                indices, _ = lightning_indexer(q, k, weights, self.top_k, **_rows(x, lengths))
        return Index(q, k, weights, indices)

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class SparseAttention(nn.Module):
    """Causal attention that is dense, or dense while its indexer learns to imitate it, or over the keys it chooses.

        stage     attention                loss
        "dense"   all keys                 0
        "warmup"  all keys                 KL(p || softmax(I)) over all keys
        "sparse"  the keys of largest I    KL(p || softmax(I)) over those keys

    where p is the mean over heads of the attention's probabilities, and I the indexer's scores. A layer with
    projections of its own calls attend() (as SparseSelfAttention and SparseLatentAttention do), or this module as
    it is. The stage is no part of the state_dict; set_stage() changes it in a whole model.

    Args:
        indexer: chooses the keys.
        stage: one of STAGES.

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
        super().__init__()
        self.indexer, self.stage = indexer, _checked(stage)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As attend()."""
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
    ) -> tuple[Tensor, Tensor]:
        """Attention of projected rows in the present stage, and the indexer's loss.

        Args:
            x: hidden states, read by the indexer: [B, S, dim], or packed [T, dim].
            q: query rows, [B, S, N1, D], or packed [T, N1, D].
            k: key rows, [B, S, N2, D]; N1 is a multiple of N2.
            v: value rows, [B, S, N2, Dv]; None: k's rows are the values too (MLA's latent).
            query: what the indexer makes its query of; None: x.
            q_rope, k_rope: rope parts [B, S, N1, Dr], [B, S, N2, Dr].
            scale: factor on the dot products; None: 1 / sqrt(D + Dr).
            index_rope: (cos, sin) for the indexer's rows.
            lengths: tokens of every sequence; packed: needed. Padded: rows behind them are 0 and lose nothing.

        Returns:
            (out, loss): out as q with Dv elements per head. loss is a scalar, the mean over all tokens, and 0 in
            evaluation mode and in the dense stage; add it to the model's own loss (in warm-up it is all there is).
        """
        common = {**_rows(x, lengths), "q_rope": q_rope, "k_rope": k_rope, "scale": scale}
        indices = None
        if self.stage != "sparse":
            values = k if v is None else v
            out, lse = attention(q, k, values, band=Band.causal(), return_lse=True, **common)
            if self.stage == "dense" or not self.training:
                return out, out.new_zeros((), dtype=torch.float32)
            index = self.indexer(x, query, rope=index_rope, lengths=lengths, choose=False)
        else:
            index = self.indexer(x, query, rope=index_rope, lengths=lengths)
            indices = index.indices
            assert indices is not None
            lists = indices.expand(*k.shape[:-1], -1)  # One choice for all key heads.
            out, lse = sparse_attention(q, k, v, lists, return_lse=True, **common)
            if not self.training:
                return out, out.new_zeros((), dtype=torch.float32)
        loss = indexer_loss(q, k, lse, index.q, index.k, index.weights, indices, **common)
        return out, loss / _tokens(x, lengths)

    if TYPE_CHECKING:

        @called_as(attend)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class SparseSelfAttention(SparseAttention):
    """Multi-head or grouped-query attention with an indexer: projections around SparseAttention.attend().

    Args:
        dim: elements of a token's hidden state.
        heads: query heads, N1.
        kv_heads: key heads, N2; None: N1.
        head_dim: elements of a head; None: dim / heads.
        index_heads, index_dim, top_k: of the indexer.
        stage: one of STAGES.

    Source: this library.

    Example:
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
    ) -> None:
        super().__init__(LightningIndexer(dim, index_heads, index_dim, top_k), stage)
        self.head_dim = head_dim or dim // heads
        self.q_proj = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(dim, (kv_heads or heads) * self.head_dim, bias=False)
        self.v_proj = nn.Linear(dim, (kv_heads or heads) * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(
        self, x: Tensor, *, rope: Rope = None, index_rope: Rope = None, lengths: Lengths = None
    ) -> tuple[Tensor, Tensor]:
        """The layer's output and the indexer's loss.

        Args:
            x: hidden states, [B, S, dim], or packed [T, dim].
            rope: (cos, sin) of the tokens, [S, R / 2], [B, S, R / 2] or [T, R / 2], R <= head_dim.
            index_rope: the same for the indexer, R <= index_dim; None: rope.
            lengths: tokens of every sequence; packed: needed.

        Returns:
            (out, loss): out as x; loss as attend() says.
        """
        q, k, v = self.project(x, rope)
        index_rope = rope if index_rope is None else index_rope
        out, loss = self.attend(x, q, k, v, index_rope=index_rope, lengths=lengths)
        return self.o_proj(out.flatten(-2)), loss

    if TYPE_CHECKING:

        @called_as(forward)  # Projections take other arguments than what they make.
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...  # type: ignore[override]

    def project(self, x: Tensor, rope: Rope = None) -> tuple[Tensor, Tensor, Tensor]:
        """The rows that attention reads: q [..., heads, head_dim], k and v [..., kv_heads, head_dim]."""
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)) for f in (self.q_proj, self.k_proj, self.v_proj))
        return (q, k, v) if rope is None else (apply_rope(q, rope), apply_rope(k, rope), v)


class SparseLatentAttention(SparseAttention):
    """Multi-head latent attention (MLA) with an indexer: the attention layer of DeepSeek-V3.2, with its names.

        q_latent = norm(q_a(x)),  q, q_rope = q_b(q_latent);  latent, k_rope = norm, rope of kv_a(x)
        k, v = kv_b(latent),  out = o(attention(q, k, v, q_rope, k_rope))

    Over all keys, k and v are formed: nope + rope + v products for every pair of row and key. Over chosen keys,
    kv_b is multiplied into the query and the output instead: 2 kv_rank + rope products, but a row gathers one latent
    for all heads. The scores are the same.

    Args:
        dim: elements of a token's hidden state.
        heads: query heads.
        q_rank, kv_rank: elements of the query's and the key's latent.
        nope_dim, rope_dim, v_dim: elements of a head's key without rope, with rope, and of its value.
        index_heads, index_dim, top_k: of the indexer.
        scale: factor on the dot products; None: 1 / sqrt(nope_dim + rope_dim).
        stage: one of STAGES.

    Source: this library; DeepSeek-V3.2.

    Example:
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
    ) -> None:
        super().__init__(LightningIndexer(dim, index_heads, index_dim, top_k, query_dim=q_rank), stage)
        self.heads, self.parts = heads, (nope_dim, rope_dim, v_dim)
        self.scale = (nope_dim + rope_dim) ** -0.5 if scale is None else scale
        self.q_a_proj = nn.Linear(dim, q_rank, bias=False)
        self.q_a_layernorm = nn.RMSNorm(q_rank, eps=1e-6)
        self.q_b_proj = nn.Linear(q_rank, heads * (nope_dim + rope_dim), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(dim, kv_rank + rope_dim, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(kv_rank, eps=1e-6)
        self.kv_b_proj = nn.Linear(kv_rank, heads * (nope_dim + v_dim), bias=False)
        self.o_proj = nn.Linear(heads * v_dim, dim, bias=False)

    def forward(self, x: Tensor, *, rope: tuple[Tensor, Tensor], lengths: Lengths = None) -> tuple[Tensor, Tensor]:
        """The layer's output and the indexer's loss.

        Args:
            x: hidden states, [B, S, dim], or packed [T, dim].
            rope: (cos, sin) of the tokens, [S, rope_dim / 2], [B, S, rope_dim / 2] or [T, rope_dim / 2].
            lengths: tokens of every sequence; packed: needed.

        Returns:
            (out, loss): out as x; loss as attend() says.
        """
        nope, rotated, v_dim = self.parts
        q_latent = self.q_a_layernorm(self.q_a_proj(x))
        q, q_rope = self.q_b_proj(q_latent).unflatten(-1, (self.heads, -1)).split((nope, rotated), -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).unsqueeze(-2).split((self.kv_b_proj.in_features, rotated), -1)
        latent = self.kv_a_layernorm(latent)
        q_rope, k_rope = apply_rope(q_rope, rope, True), apply_rope(k_rope, rope, True)
        common: dict[str, Any] = {"query": q_latent, "scale": self.scale, "index_rope": rope, "lengths": lengths}
        if self.stage == "sparse":
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


def set_stage(model: nn.Module, stage: Stage) -> None:
    """Brings every SparseAttention in a model to a stage, and says to autograd which parameters learn in it.

        "dense": all but the indexers;  "warmup": the indexers alone;  "sparse": all

    requires_grad of every parameter is set, so freeze others afterwards. DDP reads it when it wraps a model: wrap
    after it, and again after the next change of stage; then every parameter that DDP waits for gets a gradient
    (find_unused_parameters is not needed). Optimizers pass over the rest.

    Args:
        model: holds at least one SparseAttention.
        stage: one of STAGES.

    Raises:
        ValueError: an unknown stage, or a model without SparseAttention.

    Source: this library; the schedule of DeepSeek-V3.2.

    Example:
        >>> layer = SparseSelfAttention(64, heads=4, index_heads=2, index_dim=16, top_k=8)
        >>> set_stage(layer, "warmup")
        >>> sorted({name.split(".")[0] for name, p in layer.named_parameters() if p.requires_grad})
        ['indexer']
    """
    _checked(stage)
    layers = [module for module in model.modules() if isinstance(module, SparseAttention)]
    if not layers:
        raise ValueError("set_stage: model: expected a SparseAttention among its modules, got none")
    indexers = {parameter for layer in layers for parameter in layer.indexer.parameters()}
    for layer in layers:
        layer.stage = stage
    # Integers, as quantised layers keep them, learn in no stage.
    for parameter in (p for p in model.parameters() if p.is_floating_point() or p.is_complex()):
        parameter.requires_grad_(stage == "sparse" or (parameter in indexers) == (stage == "warmup"))


def _checked(stage: Stage) -> Stage:
    if stage not in STAGES:
        raise ValueError(f"SparseAttention: stage: expected one of {', '.join(STAGES)}, got {stage!r}")
    return stage


def _rows(x: Tensor, lengths: Lengths) -> dict[str, Any]:
    """How the tokens of hidden states lie, in the words of the functions."""
    return {"layout": "TND" if x.dim() == 2 else "BSND", "q_len": lengths, "kv_len": lengths}


def _tokens(x: Tensor, lengths: Lengths) -> int | Tensor:
    """Tokens that are not padding, at least 1."""
    if lengths is None:
        return max(1, x.shape[:-1].numel())
    return lengths.sum().clamp(min=1) if isinstance(lengths, Tensor) else max(1, sum(lengths))
