"""Attention layers with a window of keys and compressed keys: those of DeepSeek-V4."""

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
    """Compressed keys of hidden states: projections, pooling of windows, a norm and a rotation.

        kv, gate = kv_proj(x), gate_proj(x);  out_w = rope(kv_norm(compress(kv, gate + position_bias))_w, w * ratio)

    Args:
        dim: elements of a token's hidden state.
        head_dim: elements of a compressed key.
        ratio: tokens of a window.
        overlap: windows overlap, as in compress().
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
        """All compressed keys [B, windows, 1, D] after the tokens of x; rope: of all positions from 0 on; step: a call
        of a layer, whose cache may have earlier ones."""
        step, name = step or CompressedStep(None, self, x), type(self).__name__
        kv, gate = self.kv_proj(x).unsqueeze(-2), self.gate_proj(x).unsqueeze(-2)
        how = {"ratio": self.ratio, "position_bias": self.position_bias, "overlap": self.overlap}
        rows, before = step.pooled(name, kv, gate, **how)
        at = slice(before * self.ratio, (before + rows.shape[1]) * self.ratio, self.ratio)
        return step.all_entries(name, rotate_end(self.kv_norm(rows), (rope[0][at], rope[1][at])))


class CompressedIndexer(Compressor):
    """Scores every compressed key for every row with a few small heads, and selects the best.

        q_h = rope(q_b_proj(query)_h),  k = compressed keys by this Compressor,  w = weights_proj(x) / sqrt(heads * D)
        I_e = sum_h w_h * max(0, q_h . k_e);  indices = the top_k largest I among the visible compressed keys

    Its inputs are detached, so its loss trains the indexer only. Parameters have the names of DeepSeek-V4.

    Args:
        dim: elements of a token's hidden state.
        heads, head_dim: query heads, and elements of a head.
        top_k: number of compressed keys that a row selects.
        query_dim: elements of the query latent.
        ratio: tokens of a compressed key.
    """

    def __init__(self, dim: int, heads: int, head_dim: int, top_k: int, *, query_dim: int, ratio: int) -> None:
        super().__init__(dim, head_dim, ratio, overlap=True)
        self.heads, self.head_dim, self.top_k = heads, head_dim, top_k
        self.q_b_proj = nn.Linear(query_dim, heads * head_dim, bias=False)
        self.scorer = nn.ModuleDict({"weights_proj": nn.Linear(dim, heads, bias=False)})

    def forward(self, x: Tensor, query: Tensor, rope: Rope, step: CompressedStep | None = None) -> Index:
        """The indexer's rows, without a selection; query: the layer's query latent."""
        step = step or CompressedStep(None, self, x)
        x, query = x.detach(), query.detach()
        q = self.q_b_proj(query).unflatten(-1, (self.heads, self.head_dim))
        q = rotate_end(q, (rope[0][step.first : step.tokens], rope[1][step.first : step.tokens]))
        project = self.scorer["weights_proj"]
        weights = project(x) * (self.heads * self.head_dim) ** -0.5
        return Index(q, self.compressed(x, rope, step), weights, None)


class CompressedAttention(StagedAttention):
    """Causal attention to a window of keys beside compressed keys: the attention layers of DeepSeek-V4, with its names.

        kind           arguments        a row reads
        window         no ratio         the last `window` keys
        selected       ratio and top_k  those, and the top_k compressed keys that an indexer selects
        all            ratio alone      those, and all compressed keys of its position

        query = norm(q_a(x)),  q = rope(norm(q_b(query)));  k = v = rope(norm(kv(x)))
        out = o_b(o_a(rope^-1(attention(q, k, compressed, sink))))

    Layers that select have three stages, as SparseAttention has; the others compute the same in all of them:

        stage     compressed keys     loss
        "dense"   all                 0
        "warmup"  all                 m * KL(p / m || softmax(I)) over all visible ones
        "sparse"  those of largest I  m * KL(p / m || softmax(I)) over those

    where p is the mean over heads of the attention's probabilities of compressed keys, m their sum (window and sink
    have the rest of 1), and I the indexer's scores. The state of transformers' DeepseekV4Attention loads.

    Args:
        dim: elements of a token's hidden state.
        heads: query heads; keys have one head.
        head_dim: elements of a head; the last of them rotate, as many as the rope table has.
        q_rank: elements of the query's latent.
        window: keys that a row sees, its own included.
        ratio: tokens of a compressed key; None: no compressed keys.
        top_k: compressed keys that a row selects; windows of the compressor then overlap. None: all.
        index_heads, index_dim: of the indexer; needed beside top_k.
        out_groups, out_rank: groups of heads in the output projection, and elements of each group's latent; None: dim.
        stage: one of STAGES.

    Raises:
        ValueError: sizes that do not go together, or an unknown stage.

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
                "CompressedAttention: top_k: expected a ratio, index_heads and index_dim beside it, got "
                f"{ratio}, {index_heads} and {index_dim} for top_k {top_k}"
            )
        if window < 1 or heads % out_groups:
            raise ValueError(
                "CompressedAttention: window, out_groups: expected at least 1 key, and a divisor of the heads, got "
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
        """The indexer of a layer that selects."""
        result: CompressedIndexer | None = None if self.ratio is None else getattr(self.compressor, "indexer", None)
        return result

    def forward(
        self, x: Tensor, *, rope: Rope, lengths: Any = None, cache: CompressedCache | None = None
    ) -> tuple[Tensor, Tensor]:
        """The layer's output and the indexer's loss.

        Args:
            x: hidden states, [B, S, dim].
            rope: (cos, sin) of all positions from 0 on, [P, R / 2]: P is at least the number of tokens with those of
                the cache. R elements of each head rotate.
            lengths: tokens of every sequence; rows behind them have no loss, and may be anything. None: all are tokens.
            cache: of earlier tokens; those of x are appended, and rows attend to all of them.

        Returns:
            (out, loss): out as x; loss is a scalar, the mean over all tokens, and 0 in evaluation mode, in the dense
            stage, without an indexer and with a cache.

        Raises:
            ValueError: hidden states, a table, lengths or a cache that do not go together.
        """
        if cache is not None:
            return self._append(x, rope, lengths, cache)
        return self._computed(x, rope, lengths, CompressedStep(None, self, x))

    def project(self, x: Tensor, turns: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Projects x to the query latent [B, S, q_rank], q [B, S, heads, head_dim] and k [B, S, 1, head_dim].

        turns: (cos, sin) of these tokens.
        """
        query = self.q_a_norm(self.q_a_proj(x))
        q = rms_norm(self.q_b_proj(query).unflatten(-1, (self.heads, self.head_dim)), (self.head_dim,), eps=EPS)
        k = self.kv_norm(self.kv_proj(x)).unsqueeze(-2)
        return query, rotate_end(q, turns), rotate_end(k, turns)

    @untraced
    def _append(self, x: Tensor, rope: Rope, lengths: Any, cache: CompressedCache) -> tuple[Tensor, Tensor]:
        """A call with a cache, which changes if the call succeeds."""
        if lengths is not None:
            raise ValueError(
                f"{type(self).__name__}: lengths: expected None beside a cache, got {show(lengths)} (its sequences "
                "have one length)"
            )
        step = CompressedStep(cache, self, x)
        result = self._computed(x, rope, lengths, step)
        step.commit()
        return result

    def _computed(self, x: Tensor, rope: Rope, lengths: Any, step: CompressedStep) -> tuple[Tensor, Tensor]:
        self._check(x, rope, step)
        turns = rope[0][step.first : step.tokens], rope[1][step.first : step.tokens]
        query, q, k = self.project(x, turns)
        mixed, loss = self._attended(x, query, q, step.keys(k, self.window), rope, lengths, step)
        mixed = rotate_end(mixed, (turns[0], -turns[1])).flatten(-2).unflatten(-1, (self.groups, -1))
        latent = torch.einsum("...gi,goi->...go", mixed, self.o_a_proj.weight.unflatten(0, (self.groups, -1)))
        return self.o_b_proj(latent.flatten(-2)), loss

    def _check(self, x: Tensor, rope: Rope, step: CompressedStep) -> None:
        name = type(self).__name__
        if x.dim() != 3:
            raise ValueError(f"{name}: x: expected padded [B, S, dim], got {show(x)}")
        positions, width = rope[0].shape if rope[0].dim() == 2 else (0, 0)
        if positions < step.tokens or 2 * width > self.head_dim:
            raise ValueError(
                f"{name}: rope: expected the cosines and sines of positions 0 to {step.tokens - 1}, of at most "
                f"{self.head_dim // 2} pairs, got {show(rope[0])}"
            )

    def _attended(
        self, x: Tensor, query: Tensor, q: Tensor, k: Tensor, rope: Rope, lengths: Any, step: CompressedStep
    ) -> tuple[Tensor, Tensor]:
        """Attention of projected rows, and the indexer's loss."""
        band, none = Band.window(self.window - 1), x.new_zeros((), dtype=torch.float32)
        if self.ratio is None:
            return attention(q, k, k, band=band, sink=self.sinks), none
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
            return out, none
        target = probabilities(q, entries, lse, lists, self.ratio, step.tokens % self.ratio)
        if lengths is not None:
            real = torch.arange(x.shape[1], device=x.device) < torch.as_tensor(lengths, device=x.device)[:, None]
            target = target.where(real[..., None, None], 0)
        loss = indexer_target_loss(index.q, index.k, index.weights, target, lists, **common)
        mass = target.sum(-1)
        loss = loss - torch.xlogy(mass, mass).sum()  # of p / m, not of p: no gradient changes, and the loss is above 0
        return out, loss / (len(x) * x.shape[1] if lengths is None else real.sum().clamp(min=1))

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


@torch.no_grad()
def probabilities(q: Tensor, entries: Tensor, lse: Tensor, lists: Tensor | None, ratio: int, residual: int) -> Tensor:
    """Probabilities of compressed keys, a mean over heads: float32, as indexer_target_loss() takes them.

    Args:
        q, entries: rows [B, S, N1, D] and compressed keys [B, S3, 1, D] of the attention. lse: [B, N1, S].
        lists: selected keys [B, S, 1, K]; None: all visible ones.
    """
    q, entries, lse = (t.to(torch.float32) if t.dtype == torch.float64 else t for t in (q, entries, lse))
    args: dict[str, Any] = {
        "query": q, "key": entries, "softmax_lse": lse.transpose(1, 2).unsqueeze(1), "sparse_indices": lists,
        "cmp_residual_k": torch.full((len(q),), residual, dtype=torch.int32), "scale_value": q.shape[-1] ** -0.5,
        "ratio": ratio, "mask_mode": 3, "layout": "BSND", "layout_k": "BSND",
    }  # fmt: skip
    dispatch.autocast(args, ("query", "key"))
    return dispatch.results(l1_norm.TORCH, args)[l1_norm.OUT]
