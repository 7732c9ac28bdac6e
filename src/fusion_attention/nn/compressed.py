"""CompressedAttention: the attention layers of DeepSeek-V4, with a window of keys and compressed keys."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from fusion_attention.api.attention import attention
from fusion_attention.api.compressed import compressed_attention
from fusion_attention.api.sparse import indexer_target_loss, lightning_indexer
from fusion_attention.contract import show
from fusion_attention.ir.mask import Band
from fusion_attention.nn.cache import untraced
from fusion_attention.nn.compressed_cache import CompressedCache, CompressedStep
from fusion_attention.nn.indexer import Index
from fusion_attention.nn.rope import rotate_end
from fusion_attention.nn.stages import Stage, StagedAttention
from fusion_attention.ops.compressed import l1_norm
from fusion_attention.torch_ops import dispatch

if TYPE_CHECKING:
    from fusion_attention.nn.indexer import called_as

Rope = tuple[Tensor, Tensor]
EPS = 1e-6


class Compressor(nn.Module):
    """Computes compressed keys from hidden states: per window w of `ratio` tokens, compress() averages kv by softmax
    weights of gate + position_bias.

        kv, gate = kv_proj(x), gate_proj(x);  out_w = rope(kv_norm(compress(kv, gate + position_bias))_w, w * ratio)

    Args:
        dim: elements of a token's hidden state.
        head_dim: elements of a compressed key.
        ratio: tokens of a window.
        overlap: each window also pools the tokens of the window before it.
    """

    def __init__(self, dim: int, head_dim: int, ratio: int, *, overlap: bool) -> None:
        super().__init__()
        self.ratio, self.overlap = ratio, overlap
        channels = head_dim * (1 + overlap)
        self.kv_proj = nn.Linear(dim, channels, bias=False)
        self.gate_proj = nn.Linear(dim, channels, bias=False)
        self.position_bias = nn.Parameter(torch.zeros(ratio, channels))
        self.kv_norm = nn.RMSNorm(head_dim, eps=EPS)

    def compressed(self, x: Tensor, rope: Rope, step: CompressedStep | None = None) -> Tensor:
        """Returns the compressed keys of all tokens up to those of x, [B, windows, 1, head_dim].

        Args:
            x: hidden states, [B, S, dim].
            rope: (cos, sin) of all positions from 0 on.
            step: the layer's current forward, whose cache has the compressed keys of earlier tokens; None: no cache.
        """
        step, name = step or CompressedStep(None, self, x), type(self).__name__
        kv, gate = self.kv_proj(x).unsqueeze(-2), self.gate_proj(x).unsqueeze(-2)
        windows = {"ratio": self.ratio, "position_bias": self.position_bias, "overlap": self.overlap}
        rows, before = step.pooled(name, kv, gate, **windows)
        first_tokens = slice(before * self.ratio, (before + rows.shape[1]) * self.ratio, self.ratio)
        rope_of_windows = rope[0][first_tokens], rope[1][first_tokens]
        return step.all_entries(name, rotate_end(self.kv_norm(rows), rope_of_windows))


class CompressedIndexer(Compressor):
    """The indexer of CompressedAttention: scores each compressed key e for each query by a few small heads h.

        q_h = rope(q_b_proj(query)_h),  k = compressed(x) of this module,  w = weights_proj(x) / sqrt(heads * head_dim)
        I_e = sum_h w_h * max(0, q_h . k_e)

    The inputs are detached, so the indexer's loss trains only the indexer. Parameters have the names of DeepSeek-V4.

    Args:
        dim: elements of a token's hidden state.
        heads, head_dim: query heads, and elements of a head.
        top_k: number of compressed keys that a query selects.
        query_dim: elements of the query latent.
        ratio: tokens of a compressed key.
    """

    def __init__(self, dim: int, heads: int, head_dim: int, top_k: int, *, query_dim: int, ratio: int) -> None:
        super().__init__(dim, head_dim, ratio, overlap=True)
        self.heads, self.head_dim, self.top_k = heads, head_dim, top_k
        self.q_b_proj = nn.Linear(query_dim, heads * head_dim, bias=False)
        self.scorer = nn.ModuleDict({"weights_proj": nn.Linear(dim, heads, bias=False)})

    def forward(self, x: Tensor, query: Tensor, rope: Rope, step: CompressedStep | None = None) -> Index:
        """Returns an Index with the indexer's queries, compressed keys and head weights; its selected keys are None.

        Args:
            x: hidden states, [B, S, dim].
            query: the layer's query latent, [B, S, query_dim].
            rope: (cos, sin) of all positions from 0 on.
            step: the call of the layer, whose cache has the compressed keys of earlier tokens; None: no cache.
        """
        step = step or CompressedStep(None, self, x)
        x, query = x.detach(), query.detach()
        q = self.q_b_proj(query).unflatten(-1, (self.heads, self.head_dim))
        q = rotate_end(q, (rope[0][step.first : step.tokens], rope[1][step.first : step.tokens]))
        project = self.scorer["weights_proj"]
        weights = project(x) * (self.heads * self.head_dim) ** -0.5
        return Index(q, self.compressed(x, rope, step), weights, None)


class CompressedAttention(StagedAttention):
    """An attention layer of DeepSeek-V4: causal attention to a window of keys and to compressed keys.

        kind           arguments        a query reads
        window         no ratio         the last `window` keys
        selected       ratio and top_k  these, and the top_k compressed keys that an indexer selects
        all            only ratio       these, and all compressed keys that it sees

        query = norm(q_a(x)),  q = rope(norm(q_b(query)));  k = v = rope(norm(kv(x)))
        out = o_b(o_a(rope^-1(attention(q, k, compressed, sink))))

    Layers of the kind "selected" have three stages, like SparseAttention; the others compute the same in every stage:

        stage     compressed keys     the indexer's loss
        "dense"   all                 0
        "warmup"  all                 m * KL(p / m || softmax(I)) over all visible compressed keys
        "sparse"  those of largest I  m * KL(p / m || softmax(I)) over these

    where p is the mean over heads of the attention's probabilities of compressed keys, m the sum of p (window and sink
    have the rest of the probability), and I the indexer's scores. Parameters have the names of transformers'
    DeepseekV4Attention, whose state_dict loads.

    Args:
        dim: elements of a token's hidden state.
        heads: query heads; keys have one head.
        head_dim: elements of a head; the last of them are rotated, twice as many as rope has columns.
        q_rank: elements of the query's latent.
        window: number of keys that a query sees, its own included.
        ratio: tokens of a compressed key; None: no compressed keys.
        top_k: number of compressed keys that a query selects; windows of the compressor then overlap. None: all.
        index_heads, index_dim: heads of the indexer and their elements; required with top_k.
        out_groups, out_rank: groups of heads in the output projection, and elements of each group's latent; None: dim.
        stage: "dense", "warmup" or "sparse".

    Raises:
        ValueError: sizes that contradict each other, or an unknown stage.

    Source: this library; DeepSeek-V4.

    Example:
        >>> from fusion_attention.nn import rope_table
        >>> sizes = dict(head_dim=16, q_rank=32, window=8, ratio=4, top_k=3, index_heads=2, index_dim=16)
        >>> layer = CompressedAttention(64, 4, **sizes)
        >>> out, loss = layer(torch.randn(2, 32, 64), rope=rope_table(torch.arange(32), 8))
        >>> out.shape, loss.shape
        (torch.Size([2, 32, 64]), torch.Size([]))
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        head_dim: int,
        q_rank: int,
        window: int,
        ratio: int | None = None,
        top_k: int | None = None,
        index_heads: int = 0,
        index_dim: int = 0,
        out_groups: int = 1,
        out_rank: int | None = None,
        stage: Stage = "sparse",
    ) -> None:
        super().__init__(stage)
        if top_k is not None and (ratio is None or min(top_k, index_heads, index_dim) < 1):
            raise ValueError(
                "CompressedAttention: top_k: expected a ratio, index_heads and index_dim with it, got "
                f"{ratio}, {index_heads} and {index_dim} for top_k {top_k}"
            )
        if window < 1 or heads % out_groups:
            raise ValueError(
                "CompressedAttention: window, out_groups: expected at least 1, and a divisor of heads, got "
                f"{window} and {out_groups} of {heads}"
            )
        self.heads, self.head_dim, self.window, self.ratio = heads, head_dim, window, ratio
        self.groups, out_rank = out_groups, out_rank or dim
        self.q_a_proj = nn.Linear(dim, q_rank, bias=False)
        self.q_a_norm = nn.RMSNorm(q_rank, eps=EPS)
        self.q_b_proj = nn.Linear(q_rank, heads * head_dim, bias=False)
        self.kv_proj = nn.Linear(dim, head_dim, bias=False)
        self.kv_norm = nn.RMSNorm(head_dim, eps=EPS)
        self.o_a_proj = nn.Linear(heads * head_dim // out_groups, out_groups * out_rank, bias=False)
        self.o_b_proj = nn.Linear(out_groups * out_rank, dim, bias=False)
        self.sinks = nn.Parameter(torch.zeros(heads))
        if ratio is None:
            return
        self.compressor = Compressor(dim, head_dim, ratio, overlap=top_k is not None)
        if top_k is not None:
            sizes = {"query_dim": q_rank, "ratio": ratio}
            self.compressor.indexer = CompressedIndexer(dim, index_heads, index_dim, top_k, **sizes)

    @property
    def indexer(self) -> CompressedIndexer | None:
        """The module that selects compressed keys; None in a layer without top_k."""
        result: CompressedIndexer | None = None if self.ratio is None else getattr(self.compressor, "indexer", None)
        return result

    def forward(
        self, x: Tensor, *, rope: Rope, lengths: Any = None, cache: CompressedCache | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the layer's output and the indexer's loss.

        Args:
            x: hidden states, [B, S, dim].
            rope: (cos, sin) of all positions from 0 on, [P, R / 2], where P is at least the number of tokens, with
                those in the cache. The last R elements of each head are rotated.
            lengths: tokens of every sequence; rows after them are padding, and have no loss. None: no padding.
            cache: the CompressedCache of earlier tokens; the tokens of x are appended, and attend to all tokens.

        Returns:
            (out, loss): out has x's shape; loss is a scalar, the mean over all tokens, and 0 in evaluation mode, in the
            dense stage, without an indexer and with a cache.

        Raises:
            ValueError: x, rope, lengths and cache contradict each other.
        """
        if cache is not None:
            return self._append(x, rope, lengths, cache)
        return self._computed(x, rope, lengths, CompressedStep(None, self, x))

    def project(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Projects x to the query latent [B, S, q_rank], q [B, S, heads, head_dim] and k [B, S, 1, head_dim].
        rope: (cos, sin) of the tokens of x."""
        query = self.q_a_norm(self.q_a_proj(x))
        q = rms_norm(self.q_b_proj(query).unflatten(-1, (self.heads, self.head_dim)), (self.head_dim,), eps=EPS)
        k = self.kv_norm(self.kv_proj(x)).unsqueeze(-2)
        return query, rotate_end(q, rope), rotate_end(k, rope)

    @untraced
    def _append(self, x: Tensor, rope: Rope, lengths: Any, cache: CompressedCache) -> tuple[Tensor, Tensor]:
        """Returns forward()'s (output, loss) with a cache, which changes only if no error is raised. lengths: None."""
        if lengths is not None:
            raise ValueError(
                f"{type(self).__name__}: lengths: expected None with a cache, got {show(lengths)} (all its sequences "
                "have the same length)"
            )
        step = CompressedStep(cache, self, x)
        result = self._computed(x, rope, lengths, step)
        step.commit()
        return result

    def _computed(self, x: Tensor, rope: Rope, lengths: Any, step: CompressedStep) -> tuple[Tensor, Tensor]:
        """Returns (output [B, S, dim], the indexer's scalar loss) for hidden states x [B, S, dim]. rope: (cos, sin) of
        all positions; lengths: tokens of each sequence, or None; step: the cache during this forward."""
        name = type(self).__name__
        if x.dim() != 3:
            raise ValueError(f"{name}: x: expected padded [B, S, dim], got {show(x)}")
        positions, width = rope[0].shape if rope[0].dim() == 2 else (0, 0)
        if positions < step.tokens or 2 * width > self.head_dim:
            raise ValueError(
                f"{name}: rope: expected the cosines and sines of positions 0 to {step.tokens - 1}, of at most "
                f"{self.head_dim // 2} pairs, got {show(rope[0])}"
            )
        cos, sin = rope[0][step.first : step.tokens], rope[1][step.first : step.tokens]
        query, q, k = self.project(x, (cos, sin))
        mixed, loss = self._attended(x, query, q, step.keys(k, self.window), rope, lengths, step)
        mixed = rotate_end(mixed, (cos, -sin)).flatten(-2).unflatten(-1, (self.groups, -1))
        latent = torch.einsum("...gi,goi->...go", mixed, self.o_a_proj.weight.unflatten(0, (self.groups, -1)))
        return self.o_b_proj(latent.flatten(-2)), loss

    def _attended(
        self, x: Tensor, query: Tensor, q: Tensor, k: Tensor, rope: Rope, lengths: Any, step: CompressedStep
    ) -> tuple[Tensor, Tensor]:
        """Returns (attention [B, S, heads, head_dim], the indexer's scalar loss). x: hidden states [B, S, dim]; query,
        q: its latent queries [B, S, q_rank] and its queries; k: cached and new keys; rope: (cos, sin) of all positions;
        lengths: tokens of each sequence, or None; step: the cache during this forward."""
        band, no_loss = Band.window(self.window - 1), x.new_zeros((), dtype=torch.float32)
        if self.ratio is None:
            return attention(q, k, k, band=band, sink=self.sinks), no_loss
        entries = self.compressor.compressed(x, rope, step)
        common: dict[str, Any] = {"ratio": self.ratio, "residual": [step.tokens % self.ratio] * len(x)}
        index, trains = None, self.training and self.stage != "dense" and step.cache is None
        if self.indexer is not None and (self.stage == "sparse" or trains):
            index = self.indexer(x, query, rope, step)
            if self.stage == "sparse":
                with torch.no_grad():
                    indices, _ = lightning_indexer(index.q, index.k, index.weights, self.indexer.top_k, **common)
                index = index._replace(indices=indices)
        lists = None if index is None else index.indices
        out, lse = compressed_attention(
            q, k, entries, lists, band=band, sink=self.sinks, return_lse=True, **common
        )  # fmt: skip
        if index is None or not trains:
            return out, no_loss
        target = probabilities(q, entries, lse, lists, self.ratio, step.tokens % self.ratio)
        if lengths is not None:
            is_token = torch.arange(x.shape[1], device=x.device) < torch.as_tensor(lengths, device=x.device)[:, None]
            target = target.where(is_token[..., None, None], 0)
        loss = indexer_target_loss(index.q, index.k, index.weights, target, lists, **common)
        mass = target.sum(-1)
        # Changes the divergence of p to that of p / m, which is never negative; gradients stay the same.
        loss = loss - torch.xlogy(mass, mass).sum()
        return out, loss / (len(x) * x.shape[1] if lengths is None else is_token.sum().clamp(min=1))

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


@torch.no_grad()
def probabilities(q: Tensor, entries: Tensor, lse: Tensor, lists: Tensor | None, ratio: int, residual: int) -> Tensor:
    """Returns the attention's probabilities of compressed keys, the target of indexer_target_loss().

    Args:
        q, entries: query rows [B, S, N1, D] and compressed keys [B, S3, 1, D]. lse: log-sum-exp of scores [B, N1, S].
        lists: the selected compressed keys of every row [B, S, 1, K]; None: all compressed keys.
        ratio, residual: tokens of a compressed key, and tokens after the last complete one.

    Returns:
        float32 [B, S, 1, K] or [B, S, 1, S3]: the mean over heads, 0 for keys that a row does not see.
    """
    q, entries, lse = (t.to(torch.float32) if t.dtype == torch.float64 else t for t in (q, entries, lse))
    args: dict[str, Any] = {
        "query": q, "key": entries, "softmax_lse": lse.transpose(1, 2).unsqueeze(1), "sparse_indices": lists,
        "cmp_residual_k": torch.full((len(q),), residual, dtype=torch.int32), "scale_value": q.shape[-1] ** -0.5,
        "ratio": ratio, "mask_mode": 3, "layout": "BSND", "layout_k": "BSND",
    }  # fmt: skip
    dispatch.autocast(args, ("query", "key"))
    return dispatch.results(l1_norm.TORCH, args)[l1_norm.OUT]
