"""The intermediate representation: what is computed (Problem), on which lengths (Extents), with which memory (Operands,
Grads).

Everything above speaks some interface's words and ends here; everything below knows only this. Validates nothing.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from fusion_attention.ir.kv import Dequant, MatrixView, PagedView, RowView

EXTENT_ROWS = ("q_len", "kv_len", "lo", "hi", "prefix", "shift")
# Tokens at multiples of which a sequence may be cut into parts that together have the whole's bits.
CUT = 64
PART_ROWS = ("first_row", "first_key", "stream", "q_len", "kv_len")

# Fields that every kernel of lists, or of a second source of keys, takes with these values alone.
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
    """A problem's dtype in torch's words."""

    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """dtype as torch names it."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


@dataclass(frozen=True)
class Problem(_Typed):
    """Softmax attention with everything that changes a kernel, and nothing that changes from call to call.

        x   = scale * row_scale * (q . k + q_rope . k_rope)            bias' = scale * bias if bias_scaled else bias
        s   = x + bias', or where there is a softcap: softcap * tanh(x / softcap) + bias'
        out = sum_j keep_j / keep_prob * exp(s_j - max) * v_j / (sum_j exp(s_j - max) + exp(sink - max))

    over the keys that a row sees; one whose score is -inf it does not see, whatever its v. A row that sees no key is an
    empty row.

    Args:
        heads_q, heads_kv: query heads and key/value heads; group = heads_q / heads_kv query heads share one.
        dim_qk, dim_v, dim_rope: elements per row; dim_rope 0 without rope operands.
        dtype: of q, k, v and out: "float32", "float16" or "bfloat16".
        scale: factor on the dot products.
        bias: "none", "matrix", "table" (last 1024 rows stored), "slopes" or "slopes_sqrt" (distances computed).
        bias_scaled: the bias is multiplied by scale too.
        has_blocked: a matrix removes keys (true = not seen) beside the band.
        has_sink: one more logit per query head joins the denominator.
        dropout: "none", "bits" (given) or "philox" (drawn).
        keep_prob: share of kept probabilities, and the divisor.
        empty_rows: what an empty row of a sequence with keys returns: "zero"; "mean" of all its V rows; or
            "mean_in_band", the mean only where the band leaves keys and `blocked` takes them all, else zero.
        shares_kv: v is the first dim_v elements of k's rows; there is no v operand, and dk receives both gradients.
        page_size: tokens of a page of k and v; 0: not paged.
        kv_dtype: how k and v are stored where that is not dtype: "" (as dtype), "int8", or "int4" (two in a byte, the
            even element in the low half).
        dequant_k, dequant_v: "none", "channel" (a scale per head and element) or "token" (a scale per head and token).
        out_quant: "none"; "tensor" or "channel": out is int8, round(out * out_scale + out_offset) saturated, halves to
            even ("tensor") or away from zero ("channel").
        common_keys: the first keys of every sequence, so many of them, are the same rows of memory for all sequences
            (k_common, v_common), and k and v hold the keys behind them: their token 0 is key common_keys. Lengths,
            bands, biases and blocked count all keys; scales per channel are those of both.
        has_row_scale: every row and head has a factor of its own on q . k + q_rope . k_rope (of an int8 query, whose
            integers dtype holds exactly); else 1.
        has_weight_scale: the v_j are weighed by round(weight_scale * exp(s_j - max)), halves to even, saturated as
            int8, against the row's final maximum; the divisor sums weights that are not rounded. A row in mean form
            weighs all its keys by round(weight_scale).
        has_blocked_tiles: keys are removed tile by tile of 128 rows by 128 keys, beside band and matrix.
        select_count: entries of a row's list of selected blocks; 0: no selection, rows see their whole band.
        select_block: tokens of a selected block. A row that sees the keys before `end` reads the first
            ceil(end / select_block) entries at most, and none from the first negative one on; it weighs the keys of a
            block that its band leaves, once for every time that the block is listed.
        softcap: what the scaled product comes near to and never exceeds, whatever its size; 0: none. A product of -inf
            becomes -softcap, so its key is seen.
        wide_results: what a run writes in rows of dtype (out; the gradients of rows and keys) is float32, to be added
            up partial results. The saved out that a backward reads is rows of dtype all the same.
        compressed_ratio: a second source of keys (k_compressed, v_compressed; Extents.compressed) joins the softmax,
            one key of which stands for so many tokens: a row sees one more of them every compressed_ratio rows, beside
            the keys of its band. Lists select keys of this source alone; where select_count is 0, a row reads all of
            it that it sees. 0: there is one source.
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
        """Query heads that share one key/value head."""
        return self.heads_q // self.heads_kv

    @property
    def selects(self) -> bool:
        """Whether rows read keys one by one: those of lists, or of two sources."""
        return bool(self.select_count or self.compressed_ratio)

    def flops(self, extents: Extents, backward: bool = False) -> int:
        """Multiply-adds counted twice, over visible pairs of the band only: two matmuls forward, five backward."""
        qk, v = self.dim_qk + self.dim_rope, self.dim_v
        pairs = extents.visible_pairs
        if self.compressed_ratio:
            pairs += _compressed_pairs(extents, self.compressed_ratio, self.select_count * self.select_block)
        return 2 * self.heads_q * pairs * (3 * qk + 2 * v if backward else qk + v)

    def __str__(self) -> str:
        values = ((f.name, getattr(self, f.name), f.default) for f in fields(self))
        return ",".join(f"{name}={value!r}" for name, value, default in values if value != default)


@dataclass(frozen=True, eq=False)
class Part:
    """Of sequences that are parts of longer ones, computed elsewhere or at another time: where they stand there.

    Host int64 arrays, one number per sequence. Bands, shifts and lengths of Extents count from a part's own first row
    and key; what a whole sequence decides is decided by these: which pairs dropout takes, which kernel computes and
    where it cuts rows. So parts whose first row and first key are multiples of CUT have the whole's bits.

    Args:
        first_row, first_key: what a part's row 0 and key 0 are in the whole sequence; keys at a multiple of 8.
        stream: of dropout, for the part's head 0: in a whole batch, sequence * heads_q.
        q_len, kv_len: of the whole sequence.
    """

    first_row: np.ndarray
    first_key: np.ndarray
    stream: np.ndarray
    q_len: np.ndarray
    kv_len: np.ndarray


@dataclass(frozen=True, eq=False)
class Compressed:
    """Lengths and bounds of a second source of keys: host int64 arrays, one number per sequence.

    Row i sees its first min(kv_len, (i + hi) // ratio) keys, where that is positive; Problem.compressed_ratio is ratio.
    """

    kv_len: np.ndarray
    hi: np.ndarray


@dataclass(frozen=True, eq=False)
class Extents:
    """Lengths and bands per sequence: host int64 arrays, all of one length.

    Row i of sequence b sees the keys max(0, i + lo) <= j < min(kv_len, max(prefix, i + hi)); a prefix goes only with
    lo = -INFINITE. shift is the distance origin of computed biases: |j - i + shift|. part: None where sequences are
    whole; parts have no bias tables, no drop bits and no blocked tiles. compressed: of a second source of keys, which
    are numbered behind the kv_len of the first.
    """

    q_len: np.ndarray
    kv_len: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    prefix: np.ndarray
    shift: np.ndarray
    part: Part | None = None
    compressed: Compressed | None = None

    def __len__(self) -> int:
        return len(self.q_len)

    @functools.cached_property
    def key(self) -> bytes:
        """What a cache of plans compares."""
        own = b"".join(getattr(self, name).tobytes() for name in EXTENT_ROWS)
        if self.compressed is not None:
            return b"compressed" + own + self.compressed.kv_len.tobytes() + self.compressed.hi.tobytes()
        if self.part is None:
            return own
        # Four bytes more: no batch of whole sequences has a key of that length.
        return b"part" + own + b"".join(getattr(self.part, name).tobytes() for name in PART_ROWS)

    @functools.cached_property
    def call_cache(self) -> dict[Any, Any]:
        """For what depends on these lengths alone, and on how tensors lie."""
        return {}

    @functools.cached_property
    def keyless(self) -> list[int]:
        """The sequences that have rows but no keys."""
        keys = self.kv_len if self.compressed is None else self.kv_len + self.compressed.kv_len
        result: list[int] = np.flatnonzero((keys == 0) & (self.q_len > 0)).tolist()
        return result

    @functools.cached_property
    def scores(self) -> int:
        """Pairs of a row and a key, seen or not, over all sequences."""
        return int(self.q_len @ self.kv_len)

    @functools.cached_property
    def q_start(self) -> np.ndarray:
        """Packed: the first token of each sequence."""
        return np.cumsum(self.q_len) - self.q_len

    @functools.cached_property
    def kv_start(self) -> np.ndarray:
        """Packed: the first key token of each sequence."""
        return np.cumsum(self.kv_len) - self.kv_len

    @property
    def chosen_by(self) -> tuple[np.ndarray, np.ndarray]:
        """(q_len, kv_len) of the whole sequences, which decide what computes them."""
        return (self.q_len, self.kv_len) if self.part is None else (self.part.q_len, self.part.kv_len)

    def drawn(self, b: int, heads: int) -> tuple[int, slice, slice]:
        """(stream, rows, keys) that dropout draws for: of head 0 of sequence b, counted in the whole sequence."""
        p = self.part
        stream, row, key = (b * heads, 0, 0) if p is None else (int(a[b]) for a in (p.stream, p.first_row, p.first_key))
        return stream, slice(row, row + int(self.q_len[b])), slice(key, key + int(self.kv_len[b]))

    def row_interval(self, b: int, row: np.ndarray, ratio: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """(first, end) of the keys that the given rows of sequence b see; end <= first where they see none.

        ratio: as in IndexerProblem.
        """
        first = np.maximum(row + self.lo[b], 0)
        end = np.minimum(np.maximum((row + self.hi[b]) // ratio, self.prefix[b]), self.kv_len[b])
        return first, end

    def compressed_end(self, b: int, row: np.ndarray, ratio: int) -> np.ndarray:
        """How many keys of the second source the given rows of sequence b see."""
        assert self.compressed is not None
        return np.clip((row + self.compressed.hi[b]) // ratio, 0, self.compressed.kv_len[b])

    def all_keys(self, b: int) -> int:
        """Keys of sequence b in both sources."""
        return int(self.kv_len[b]) + (0 if self.compressed is None else int(self.compressed.kv_len[b]))

    @functools.cached_property
    def visible_pairs(self) -> int:
        """How many (row, key) pairs the bands leave, over all sequences."""
        total = 0
        for b in range(len(self)):
            first, end = self.row_interval(b, np.arange(self.q_len[b]))
            total += int(np.maximum(end - first, 0).sum())
        return total


def _compressed_pairs(extents: Extents, ratio: int, listed: int) -> int:
    """How many pairs of a row and a key of the second source are read; listed: keys of a list, 0 for none."""
    ends = (extents.compressed_end(b, np.arange(extents.q_len[b]), ratio) for b in range(len(extents)))
    return sum(int((np.minimum(end, listed) if listed else end).sum()) for end in ends)


@dataclass(eq=False)
class Stats:
    """Softmax statistics, one float32 per row and head (RowViews with dim 1).

    An empty row has max = -inf, and sum = 0 (zero form) or the sequence's kv_len (mean form).
    """

    max: RowView
    sum: RowView


@dataclass(eq=False)
class Operands:
    """The memory of one call: inputs, and out and stats, which forward writes and backward reads."""

    q: RowView
    k: RowView | PagedView
    v: RowView | PagedView  # k, narrowed to dim_v, where the problem shares them
    out: RowView
    stats: Stats
    q_rope: RowView | None = None
    k_rope: RowView | PagedView | None = None
    bias: MatrixView | None = None
    slopes: torch.Tensor | None = None  # float32 [sequences, heads_q]
    blocked: MatrixView | None = None  # true (non-zero) = not seen
    drop_bits: MatrixView | None = None  # addresses count bits
    seed: int = 0
    offset: int = 0
    sink: torch.Tensor | None = None  # float32 [heads_q]
    dequant_k: Dequant | None = None
    dequant_v: Dequant | None = None
    out_scale: torch.Tensor | None = None  # float32 [heads_q, dim_v], broadcast by strides
    out_offset: torch.Tensor | None = None  # as out_scale
    k_common: RowView | None = None  # of one sequence, which stands for all
    v_common: RowView | None = None  # k_common, narrowed to dim_v, where the problem shares them
    row_scale: RowView | None = None  # float32, dim 1, as out lies
    weight_scale: torch.Tensor | None = None  # one float32
    indices: RowView | None = None  # int32 rows of select_count entries, [heads_kv, q_len] rows per sequence
    # int32, an element per tile, which counts in tiles: ALL_BLOCKED, NONE_BLOCKED, or the number of its bits; one that
    # has no bits blocks all.
    blocked_tiles: MatrixView | None = None
    blocked_bits: torch.Tensor | None = None  # uint8 [n, 128, 16], a bit per pair, lowest first; 1 = not seen
    k_compressed: RowView | PagedView | None = None
    v_compressed: RowView | PagedView | None = None  # k_compressed, narrowed to dim_v, where the problem shares them


@dataclass(eq=False)
class Grads:
    """What backward reads (dout, dlse) and writes; what the problem has no operand for is None.

    dlse is the gradient of max + log(sum), float32, with dim 1; None: there is none. Those of empty rows count nothing.

    dbias is added to (the caller zeroes it, in at least float32): sequences may share a bias. Where owns_dbias, each of
    its elements belongs to one pair of a row and a key alone: every pair of every sequence is written, in the dtype of
    the memory, with zeros where a row does not see the key.

    Of a selection, an indexer and its loss, gradients of keys (dk, dk_rope and dv, all of them) may be float32 beside
    rows of another dtype, to add up partial results.
    """

    dout: RowView
    dq: RowView
    dk: RowView
    dv: RowView | None  # None where dk receives it (shares_kv)
    dq_rope: RowView | None = None
    dk_rope: RowView | None = None
    dbias: MatrixView | None = None
    dsink: torch.Tensor | None = None  # float32 [heads_q], overwritten
    owns_dbias: bool = False
    dlse: RowView | None = None
    dk_compressed: RowView | None = None
    dv_compressed: RowView | None = None  # None where dk_compressed receives it


@dataclass(frozen=True)
class IndexerProblem(_Typed):
    """The lightning indexer: how much each visible key matters to a row, and the keys that matter most.

        I[i, j] = sum_h weights[i, h] * max(0, q[i, h] . k[j])

    over the keys that a row sees, one key head for all query heads. Chosen are the top_k largest, by descending score
    and, among equals, ascending index; a row that sees fewer has index -1 and value -inf behind its last. A NaN comes
    before all numbers, and a score of -inf is a key not seen.

    The gradient reads a row's list as attention does: at most as many entries as the row sees keys, none from the
    first negative one on, none of a key that it does not see.

    Args:
        heads, dim: query heads, and elements of a row.
        dtype: of q, k and values.
        weights_dtype: of the weights.
        top_k: how many keys a row chooses.
        has_values: the chosen scores are returned too.
        page_size: tokens of a page of k; 0: not paged.
        wide_values: they are returned as they are compared, in float32, whatever dtype is.
        ratio: tokens that a key stands for: row i sees the keys j < min(kv_len, (i + hi) // ratio). Where it is not 1,
            lo is -INFINITE and prefix 0 (Extents).
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
    """The memory of one call of the indexer; indices and values are written by the choice of keys, read by gradients.

    The indexer's statistics (one head) are written by indexer_lse and read by a loss without selection. values of a
    loss are y of its target's elements, written where a row reads them: the caller zeroes the others.
    """

    q: RowView
    k: RowView | PagedView
    weights: RowView  # one head, rows of `heads` elements
    indices: RowView | None = None  # int32, one head, rows of top_k elements, positions within the sequence
    values: RowView | None = None
    stats: Stats | None = None


@dataclass(eq=False)
class IndexerGrads:
    """What the indexer's backward reads (dvalues, per chosen key; a loss has none) and writes."""

    dq: RowView
    dk: RowView
    dweights: RowView
    dvalues: RowView | None = None  # one head, rows of top_k elements


@dataclass(frozen=True)
class IndexerLossProblem(_Typed):
    """How far the indexer's distribution over keys is from the attention's, and the gradients that bring it nearer.

        p_j  = (1 / N) sum_h exp(s_hj - max_h) / sum_h,     s_hj = scale * (q_h . k_j + q_rope_h . k_rope_j)
        N    = heads_q - sum_h exp(sink_h - max_h) / sum_h  (heads_q without sinks)
        I_j  = sum_h w_h * max(0, S_hj),                    S_hj = index.q_h . index.k_j
        y    = softmax(I);   given statistics:              y_j = exp(I_j - max) / sum
        loss = sum_j p_j * (ln max(p_j, 1e-8) - ln max(y_j, 1e-8))
        dI   = y - p,  dw_h = sum_j dI_j * max(0, S_hj),  dS = dI * w * [S > 0],  dq_h = dS k,  dk = sum_h dS^T q_h

    over the keys that a row selects (select_count entries, read as attention reads them, a token weighed once for
    every time that it is listed), or that its band shows (select_count 0, with the indexer's statistics given). Under
    selection the factor before the logarithms is max(p_j, 1e-8) too. The loss is a sum over all rows; the gradients are
    those of the sum, and none reaches the attention. A row without keys contributes nothing.

    A target that is an operand (heads_q 0) may sum to less than 1, where a row attends to other keys too:

        loss = sum_j p_j * (ln max(p_j, 1e-8) - ln max(y_j, 1e-8)),   dI = y * sum_j p_j - p

    with a p per entry of a row's list, or per key of its band, and nothing is read of entries and keys that the row
    does not read. y may be a result (IndexerOperands.values, float32).

    Args:
        heads_q, heads_kv, dim_qk, dim_rope, dtype, scale, has_sink: of the attention, as in Problem; heads_q 0: there
            is none, and the target is an operand.
        heads_index, dim_index, weights_dtype: of the indexer; its q and k have dtype too, and one key head.
        select_count: entries of a row's list, shared by all heads; 0: no selection.
        ratio: as in IndexerProblem.
        unit_target: a target without selection counts as one that sums to 1: dI = y - p.
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
        """Whether the target is an operand."""
        return self.heads_q == 0


@dataclass(eq=False)
class IndexerLossOperands:
    """The memory of one indexer_loss: what it reads of the attention or of a target, and of the indexer, and the loss,
    overwritten."""

    index: IndexerOperands
    loss: torch.Tensor  # float32 [1]
    target: RowView | None = None  # float32, one head, an element per entry of a list, or per key
    q: RowView | None = None
    k: RowView | None = None
    stats: Stats | None = None  # of the attention, read
    q_rope: RowView | None = None
    k_rope: RowView | None = None
    sink: torch.Tensor | None = None  # float32 [heads_q]


AnyProblem = Problem | IndexerProblem | IndexerLossProblem
