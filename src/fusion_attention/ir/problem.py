"""The types of the intermediate representation: the computation (Problem), lengths (Extents), memory (Operands, Grads).

Interfaces are lowered to these types, and back ends read nothing else. The types validate nothing.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from fusion_attention.ir.memory_views import Dequant, MatrixView, PagedView, RowView
from fusion_attention.ir.pooling import PoolingProblem

EXTENT_ROWS = ("q_len", "kv_len", "lo", "hi", "prefix", "shift")
# A sequence that is split at multiples of so many tokens gives the same bits as the unsplit sequence.
CHUNK_UNIT = 64
ORIGIN_ROWS = ("first_row", "first_key", "stream", "q_len", "kv_len")

# The only values of these fields that kernels for selected or compressed keys support.
PLAIN_SELECTION: dict[str, object] = {
    "bias": "none",
    "has_blocked": False,
    "has_blocked_tiles": False,
    "dropout": "none",
    "empty_rows": "zero",
    "kv_dtype": "",
    "out_quant": "none",
    "common_keys": 0,
    "has_row_scale": False,
    "has_weight_scale": False,
    "softcap": 0.0,
}


class _Typed:
    """The base class of records with a field `dtype`, the name of a torch.dtype."""

    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch.dtype that the field `dtype` names."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


@dataclass(frozen=True)
class Problem(_Typed):
    """Parameters of softmax attention that select or specialize a kernel; lengths and addresses are not among them.

        x   = scale * row_scale * (q . k + q_rope . k_rope)            bias' = scale * bias if bias_scaled else bias
        s   = x + bias', or where there is a softcap: softcap * tanh(x / softcap) + bias'
        out = sum_j keep_j / keep_prob * exp(s_j - max) * v_j / (sum_j exp(s_j - max) + exp(sink - max))

    summed over the visible keys of a query (a row). A key with score -inf is not visible, whatever its v. A row without
    visible keys is an empty row.

    Args:
        heads_q, heads_kv: query heads and key/value heads; group = heads_q / heads_kv query heads share one.
        dim_qk, dim_v, dim_rope: elements per row; dim_rope 0 without rope operands.
        dtype: of q, k, v and out: "float32", "float16" or "bfloat16".
        scale: factor on the dot products.
        bias: "none", "matrix", "table" (last 1024 rows stored), "slopes" or "slopes_sqrt" (computed from distances).
        bias_scaled: the bias is also multiplied by scale.
        has_blocked: in addition to the band, a matrix hides keys (nonzero: hidden).
        has_sink: the denominator has one additional logit per query head.
        dropout: "none", "bits" (mask given) or "philox" (mask drawn).
        keep_prob: probability that an element is kept; kept elements are divided by it.
        empty_rows: result of an empty row in a sequence with keys: "zero"; "mean" of all V rows; or "mean_in_band",
            the mean if the band is not empty and `blocked` hides all of it, else zero.
        shares_kv: v is the first dim_v elements of k's rows; there is no v operand, and dk receives both gradients.
        page_size: tokens of a page of k and v; 0: not paged.
        kv_dtype: storage format of k and v: "" (as dtype), "int8", or "int4" (two in a byte, the even element in the
            low half).
        dequant_k, dequant_v: "none", "channel" (a scale per head and element) or "token" (a scale per head and token).
        out_quant: "none"; "tensor" or "channel": out is int8, round(out * out_scale + out_offset) saturated, halves to
            even ("tensor") or away from zero ("channel").
        common_keys: length of a prefix of keys that all sequences share in memory (k_common, v_common); token 0 of k
            and v is key common_keys. Lengths, bands, biases and blocked count all keys; scales per channel apply to
            both tensors.
        has_row_scale: each row and head has a factor row_scale on q . k + q_rope . k_rope (the scale of an int8 query,
            whose integers dtype represents exactly); else the factor is 1.
        has_weight_scale: the weight of v_j is round(weight_scale * exp(s_j - max)), halves to even, saturated to
            int8, with the row's final maximum; the divisor sums weights that are not rounded. In an empty row that
            returns the mean, all weights are round(weight_scale).
        has_blocked_tiles: in addition to band and matrix, a table hides keys in tiles of 128 rows by 128 keys.
        select_count: selected key blocks of a query row, listed per key head; 0: no selection, rows read their complete
            band.
        select_block: tokens of a selected block. A row whose last visible key is `end` - 1 reads at most the first
            ceil(end / select_block) entries, and stops at the first negative entry. Keys of a block outside the band
            are skipped; a block that is listed n times counts n times.
        softcap: bound of the absolute value of the scaled product, by tanh; 0: none. A product of -inf becomes
            -softcap, so its key stays visible.
        wide_results: out and the gradients of q, k and v are written in float32, so that partial results can be
            summed. The saved out that backward reads still has dtype.
        compressed_ratio: tokens per key in a second source of keys (k_compressed, v_compressed; Extents.compressed);
            0: there is none. One softmax is over these keys and those of the band; every compressed_ratio rows, one
            more of these keys becomes visible. Lists select keys of this source only; if select_count is 0, a row
            reads all that are visible.
    """

    heads_q: int
    heads_kv: int
    dim_qk: int
    dim_v: int
    dim_rope: int = 0
    dtype: str = "float32"
    scale: float = 1.0
    bias: str = "none"
    bias_scaled: bool = False
    has_blocked: bool = False
    has_sink: bool = False
    dropout: str = "none"
    keep_prob: float = 1.0
    empty_rows: str = "zero"
    shares_kv: bool = False
    page_size: int = 0
    kv_dtype: str = ""
    dequant_k: str = "none"
    dequant_v: str = "none"
    out_quant: str = "none"
    common_keys: int = 0
    has_row_scale: bool = False
    has_weight_scale: bool = False
    select_count: int = 0
    select_block: int = 1
    softcap: float = 0.0
    has_blocked_tiles: bool = False
    wide_results: bool = False
    compressed_ratio: int = 0

    @property
    def group(self) -> int:
        """Number of query heads that share one key/value head."""
        return self.heads_q // self.heads_kv

    @property
    def selects(self) -> bool:
        """True if query rows gather keys individually: selected keys, or keys of two sources."""
        return bool(self.select_count or self.compressed_ratio)

    def flops(self, extents: Extents, backward: bool = False) -> int:
        """Returns the floating-point operations of visible (query, key) pairs: 2 matmuls forward, 5 backward."""
        qk, v = self.dim_qk + self.dim_rope, self.dim_v
        pairs = extents.visible_pairs
        if self.compressed_ratio:
            pairs += _compressed_pairs(extents, self.compressed_ratio, self.select_count * self.select_block)
        return 2 * self.heads_q * pairs * (3 * qk + 2 * v if backward else qk + v)

    def __str__(self) -> str:
        values = ((f.name, getattr(self, f.name), f.default) for f in fields(self))
        return ",".join(f"{name}={value!r}" for name, value, default in values if value != default)


@dataclass(frozen=True, eq=False)
class ChunkOrigin:
    """The positions of chunks in longer sequences, whose other chunks are computed on other ranks or at other times.

    Host int64 arrays, one number per sequence. Bands, shifts and lengths (Extents) count from the chunk's first row and
    key. The complete sequence's positions and lengths determine dropped pairs, kernel and tile boundaries, so chunks
    that start at multiples of 64 tokens have the same bits as the complete sequence.

    Args:
        first_row, first_key: position of the chunk's row 0 and key 0 in the complete sequence; first_key is a multiple
            of 8.
        stream: dropout stream of the chunk's head 0; in a batch of complete sequences, sequence * heads_q.
        q_len, kv_len: lengths of the complete sequence.
    """

    first_row: np.ndarray
    first_key: np.ndarray
    stream: np.ndarray
    q_len: np.ndarray
    kv_len: np.ndarray


@dataclass(frozen=True, eq=False)
class Compressed:
    """Lengths and bounds of a second source of keys, compressed ones: host int64 arrays, one number per sequence.
    Visible to query i are the first min(kv_len, (i + hi) // (tokens per compressed key)) keys, if that is positive."""

    kv_len: np.ndarray
    hi: np.ndarray


@dataclass(frozen=True, eq=False)
class Extents:
    """Lengths and masks' bands per sequence: host int64 arrays, all of one length. Visible to query i of sequence b are
    the keys max(0, i + lo) <= j < min(kv_len, max(prefix, i + hi)); a prefix requires lo = -INFINITE. shift: origin of
    distances in computed biases, |j - i + shift|. chunk_origin: None if sequences are complete; chunks have no bias
    tables, drop bits or blocked tiles. compressed: lengths of a second source of keys, with indices from kv_len on.
    starts: (q_start, kv_start), if other rows are between packed sequences in memory."""

    q_len: np.ndarray
    kv_len: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    prefix: np.ndarray
    shift: np.ndarray
    chunk_origin: ChunkOrigin | None = None
    compressed: Compressed | None = None
    starts: tuple[np.ndarray, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.q_len)

    @functools.cached_property
    def key(self) -> bytes:
        """Bytes that identify these lengths and bands in caches."""
        lengths = b"".join(getattr(self, name).tobytes() for name in EXTENT_ROWS)
        if self.compressed is not None:
            return b"compressed" + lengths + self.compressed.kv_len.tobytes() + self.compressed.hi.tobytes()
        if self.chunk_origin is None:
            return lengths
        # The prefix of four bytes makes the key's length differ from every key without a chunk_origin.
        return b"part" + lengths + b"".join(getattr(self.chunk_origin, name).tobytes() for name in ORIGIN_ROWS)

    @functools.cached_property
    def call_cache(self) -> dict[Any, Any]:
        """Cache of objects that depend only on these lengths and on memory layouts of tensors."""
        return {}

    @functools.cached_property
    def keyless(self) -> list[int]:
        """Indices of the sequences with queries but without keys."""
        keys = self.kv_len if self.compressed is None else self.kv_len + self.compressed.kv_len
        result: list[int] = np.flatnonzero((keys == 0) & (self.q_len > 0)).tolist()
        return result

    @functools.cached_property
    def scores(self) -> int:
        """Number of (query, key) pairs over all sequences, visible or not."""
        return int(self.q_len @ self.kv_len)

    @functools.cached_property
    def first_query(self) -> np.ndarray:
        """Index of each sequence's first query among the queries of all sequences, int64 [sequences]."""
        return np.cumsum(self.q_len) - self.q_len

    @property
    def q_start(self) -> np.ndarray:
        """Index of each sequence's first query in packed tensors, int64 [sequences]."""
        return self.first_query if self.starts is None else self.starts[0]

    @functools.cached_property
    def kv_start(self) -> np.ndarray:
        """Index of each sequence's first key in packed tensors, int64 [sequences]."""
        return np.cumsum(self.kv_len) - self.kv_len if self.starts is None else self.starts[1]

    @property
    def chosen_by(self) -> tuple[np.ndarray, np.ndarray]:
        """(q_len, kv_len) by which a kernel is chosen, of the complete sequences even for chunks; int64 [sequences]."""
        complete = self if self.chunk_origin is None else self.chunk_origin
        return complete.q_len, complete.kv_len

    def drawn(self, b: int, heads: int) -> tuple[int, slice, slice]:
        """Returns (stream number of head 0, slice of queries, slice of keys) at which sequence b's dropout mask is
        drawn; slices count in the complete sequence."""
        p = self.chunk_origin
        stream, row, key = (b * heads, 0, 0) if p is None else (int(a[b]) for a in (p.stream, p.first_row, p.first_key))
        return stream, slice(row, row + int(self.q_len[b])), slice(key, key + int(self.kv_len[b]))

    def row_interval(self, b: int, row: np.ndarray, ratio: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Returns (first, end) of the visible keys of the given query rows in sequence b; end <= first if a row has
        none. ratio: tokens that a key represents."""
        first = np.maximum(row + self.lo[b], 0)
        end = np.minimum(np.maximum((row + self.hi[b]) // ratio, self.prefix[b]), self.kv_len[b])
        return first, end

    def compressed_end(self, b: int, row: np.ndarray, ratio: int) -> np.ndarray:
        """Returns the number of compressed keys that each query of `row` in sequence b sees; ratio: tokens per key."""
        assert self.compressed is not None
        return np.clip((row + self.compressed.hi[b]) // ratio, 0, self.compressed.kv_len[b])

    def all_keys(self, b: int) -> int:
        """Returns the number of keys of sequence b, compressed keys (the second source) included."""
        return int(self.kv_len[b]) + (0 if self.compressed is None else int(self.compressed.kv_len[b]))

    @functools.cached_property
    def visible_pairs(self) -> int:
        """Number of (query, key) pairs inside the mask's bands, over all sequences."""
        total = 0
        for b in range(len(self)):
            first, end = self.row_interval(b, np.arange(self.q_len[b]))
            total += int(np.maximum(end - first, 0).sum())
        return total


def _compressed_pairs(extents: Extents, ratio: int, listed: int) -> int:
    """Returns the number of (query, compressed key) pairs that are read; listed: most keys that a query reads, or 0."""
    ends = (extents.compressed_end(b, np.arange(extents.q_len[b]), ratio) for b in range(len(extents)))
    return sum(int((np.minimum(end, listed) if listed else end).sum()) for end in ends)


@dataclass(eq=False)
class Stats:
    """Softmax statistics in memory, one float32 per query and head. A query without keys has max = -inf; its sum is 0
    if it returns zeros, or the sequence's kv_len if it returns the mean of V."""

    max: RowView
    sum: RowView


@dataclass(eq=False)
class Operands:
    """The tensors of one attention call: inputs, and the out and softmax statistics that forward writes."""

    q: RowView
    k: RowView | PagedView
    v: RowView | PagedView  # the first dim_v elements of k if problem.shares_kv
    out: RowView
    stats: Stats
    q_rope: RowView | None = None
    k_rope: RowView | PagedView | None = None
    bias: MatrixView | None = None
    slopes: torch.Tensor | None = None  # float32 [sequences, heads_q]
    blocked: MatrixView | None = None  # nonzero: hidden
    drop_bits: MatrixView | None = None  # addresses count bits
    seed: int = 0
    offset: int = 0
    sink: torch.Tensor | None = None  # float32 [heads_q]
    dequant_k: Dequant | None = None
    dequant_v: Dequant | None = None
    out_scale: torch.Tensor | None = None  # float32 [heads_q, dim_v], broadcast by strides
    out_offset: torch.Tensor | None = None  # as out_scale
    k_common: RowView | None = None  # one sequence, shared by all
    v_common: RowView | None = None  # the first dim_v elements of k_common if problem.shares_kv
    row_scale: RowView | None = None  # float32, dim 1, a row per row of out
    weight_scale: torch.Tensor | None = None  # one float32
    indices: RowView | None = None  # int32 rows of select_count entries, [heads_kv, q_len] rows per sequence
    # int32, an element per tile (strides count tiles): ALL_BLOCKED, NONE_BLOCKED, or an index into blocked_bits; an
    # index out of range blocks the complete tile.
    blocked_tiles: MatrixView | None = None
    blocked_bits: torch.Tensor | None = None  # uint8 [n, 128, 16], a bit per pair, lowest first; 1: hidden
    k_compressed: RowView | PagedView | None = None
    v_compressed: RowView | PagedView | None = None  # the first dim_v elements of k_compressed if problem.shares_kv


@dataclass(eq=False)
class Grads:
    """The gradients that attention's backward reads (dout, dlse) and writes; None for absent operands.

    dlse is the gradient of max + log(sum), float32, with dim 1, or None. Values at rows without keys are ignored.

    dbias is accumulated, because sequences may share a bias: the caller zeroes it, in float32 or wider. If owns_dbias,
    each element belongs to a single (row, key) pair: all pairs of all sequences are overwritten, in the dtype of the
    memory, with zeros where the key is not visible.

    For selected keys, an indexer and its loss, the gradients of keys (dk, dk_rope and dv together) may be float32 when
    the other rows are not, so that partial results can be summed.
    """

    dout: RowView
    dq: RowView
    dk: RowView
    dv: RowView | None  # None if dk includes it (shares_kv)
    dq_rope: RowView | None = None
    dk_rope: RowView | None = None
    dbias: MatrixView | None = None
    dsink: torch.Tensor | None = None  # float32 [heads_q], overwritten
    owns_dbias: bool = False
    dlse: RowView | None = None
    dk_compressed: RowView | None = None
    dv_compressed: RowView | None = None  # None if dk_compressed includes it


@dataclass(frozen=True)
class IndexerProblem(_Typed):
    """The lightning indexer: scores the visible keys of each query row, and selects the top_k.

        I[i, j] = sum_h weights[i, h] * max(0, q[i, h] . k[j])

    for visible keys j; all query heads share one key head. The top_k largest scores are selected, in descending order,
    equal scores by ascending index. Entries beyond a row's visible keys are index -1 and value -inf. NaN sorts before
    all numbers, and a key with score -inf is not visible.

    The gradient reads a row's list as attention does: at most as many entries as there are visible keys, up to the
    first negative one, without entries of keys that are not visible.

    Args:
        heads, dim: query heads, and elements of a row.
        dtype: of q, k and values.
        weights_dtype: of the weights.
        top_k: number of keys that a row selects.
        has_values: the selected scores are a result too.
        page_size: tokens of a page of k; 0: not paged.
        wide_values: values are float32, the precision in which they are compared, whatever dtype is.
        ratio: tokens per key: visible to row i are the keys j < min(kv_len, (i + hi) // ratio). Other ratios than 1
            require lo = -INFINITE and prefix = 0 (Extents).
    """

    heads: int
    dim: int
    dtype: str = "float32"
    weights_dtype: str = "float32"
    top_k: int = 2048
    has_values: bool = False
    page_size: int = 0
    wide_values: bool = False
    ratio: int = 1


@dataclass(eq=False)
class IndexerOperands:
    """The memory of one call of an indexer (a key selector); its top-k writes indices and values, its gradient reads
    them. Its log-sum-exp kernel writes stats (one head), which a loss without selection reads. A loss whose target is
    an operand writes y, the softmax of scores, to values, for the entries or keys that a row reads; the caller zeroes
    the others."""

    q: RowView
    k: RowView | PagedView
    weights: RowView  # one head, rows of `heads` elements
    indices: RowView | None = None  # int32, one head, rows of top_k elements, positions within the sequence
    values: RowView | None = None
    stats: Stats | None = None


@dataclass(eq=False)
class IndexerGrads:
    """The gradients that an indexer's backward reads (dvalues, of the selected scores; None in a loss) and writes."""

    dq: RowView
    dk: RowView
    dweights: RowView
    dvalues: RowView | None = None  # one head, rows of top_k elements


@dataclass(frozen=True)
class IndexerLossProblem(_Typed):
    """Kullback-Leibler divergence of the indexer's distribution over keys from the attention's, and its gradients.

        p_j  = (1 / N) sum_h exp(s_hj - max_h) / sum_h,     s_hj = scale * (q_h . k_j + q_rope_h . k_rope_j)
        N    = heads_q - sum_h exp(sink_h - max_h) / sum_h  (heads_q without sinks)
        I_j  = sum_h w_h * max(0, S_hj),                    S_hj = index.q_h . index.k_j
        y    = softmax(I);   given statistics:              y_j = exp(I_j - max) / sum
        loss = sum_j p_j * (ln max(p_j, 1e-8) - ln max(y_j, 1e-8))
        dI   = y - p,  dw_h = sum_j dI_j * max(0, S_hj),  dS = dI * w * [S > 0],  dq_h = dS k,  dk = sum_h dS^T q_h

    over the selected keys of a row (select_count entries, read as attention reads them; a token that is listed n times
    counts n times), or over its band (select_count 0, with the indexer's statistics given). With selection the factor
    before the logarithms is max(p_j, 1e-8) too. The loss is the sum over all rows. Gradients are those of the sum, for
    the indexer only. A row without keys contributes 0.

    A target that is an operand (heads_q 0) may sum to less than 1, if the row attends to further keys:

        loss = sum_j p_j * (ln max(p_j, 1e-8) - ln max(y_j, 1e-8)),   dI = y * sum_j p_j - p

    with one p per entry of a row's list, or per key of its sequence; p of entries and keys that the row does not read
    is ignored. y may be a result too (IndexerOperands.values, float32).

    Args:
        heads_q, heads_kv, dim_qk, dim_rope, dtype, scale, has_sink: the attention's; heads_q 0: no
            attention, the target is an operand.
        heads_index, dim_index, weights_dtype: the indexer's; its q and k have dtype too, and one key head.
        select_count: entries of a row's list, shared by all heads; 0: no selection.
        ratio: tokens per key: row i sees the keys j < (i + hi) // ratio.
        unit_target: a target without selection is treated as summing to 1: dI = y - p.
    """

    heads_q: int
    heads_kv: int
    dim_qk: int
    heads_index: int
    dim_index: int
    dim_rope: int = 0
    dtype: str = "float32"
    weights_dtype: str = "float32"
    scale: float = 1.0
    has_sink: bool = False
    select_count: int = 0
    ratio: int = 1
    unit_target: bool = False

    @property
    def has_target(self) -> bool:
        """True if the loss's target is passed by the caller instead of computed from attention's operands."""
        return self.heads_q == 0


@dataclass(eq=False)
class IndexerLossOperands:
    """The memory of one indexer_loss call: inputs of attention (or a target) and of the indexer, and the loss."""

    index: IndexerOperands
    loss: torch.Tensor  # float32 [1], overwritten
    target: RowView | None = None  # float32, one head, an element per entry of a list, or per key
    q: RowView | None = None
    k: RowView | None = None
    stats: Stats | None = None  # of the attention, read
    q_rope: RowView | None = None
    k_rope: RowView | None = None
    sink: torch.Tensor | None = None  # float32 [heads_q]


AnyProblem = Problem | IndexerProblem | IndexerLossProblem | PoolingProblem
