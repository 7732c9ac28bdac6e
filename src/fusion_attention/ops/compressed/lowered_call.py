"""Lowered calls of SparseFlashMla: attention to two sources of keys with one statistic, softmax_lse, per row."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from fusion_attention.ir.call import Filled
from fusion_attention.ir.memory_views import RowView
from fusion_attention.memory import empty
from fusion_attention.ops.compressed.probabilities import ListedRows, write_probabilities
from fusion_attention.ops.shared.lowered_call import Results
from fusion_attention.ops.sparse.lowered_call import RESULTS, Sparse, SparseBackward, statistics

Tensor = torch.Tensor
OUT, LSE, NORM, NORM_OF_KEYS = "attention_out", "softmax_lse", "cmp_softmax_l1_norm", "ori_softmax_l1_norm"
COUNTS = "topk_length"


class FlashMla(Sparse):
    """A forward call of SparseFlashMla (attention to keys and compressed keys), as back ends compute it.
    softmax_lse is log(sum(exp(s))) over the keys of both sources and the sink, in CANN's order of statistics. In a row
    without visible keys, out and softmax_lse are 0, also with a sink. Lists select keys of the second source; if there
    is none, they select keys of the first, and the tensor "topk_length" limits the entries of each list."""

    def lists(self) -> Tensor | None:
        """Returns the lists of selected keys, [.., entries], ended by -1; None if keys are not selected."""
        lists, counts = self.tensors["sparse_indices"], self.tensors.get(COUNTS)
        if lists is None or counts is None:
            return lists
        slots = torch.arange(lists.shape[-1], device=lists.device)
        return lists.where(slots < counts[..., None], -1)  # Kernels read lists to their first -1.

    def results(self) -> dict[str, Tensor]:
        result = replace_statistics(super().results())
        return result if self.stats else {OUT: result[OUT]}

    def convert(self, outputs: Mapping[str, Tensor], max_: Tensor, sum_: Tensor) -> None:
        """Writes softmax_lse = max_ + log(sum_), from statistics [.., N1], to outputs, if it is among them."""
        if LSE in outputs:
            lse = max_ + sum_.log()
            lse.masked_fill_(lse == -torch.inf, 0)
            if self.problem.has_sink:
                self._clear_rows_without_keys(lse)
            outputs[LSE].copy_(self.grouped(lse))

    def backward(self, results: Results, upstream: Results) -> SparseBackward:
        """Returns the object by which back ends compute gradients, from the forward's results, softmax_lse included,
        and the results' gradients (`upstream`)."""
        out, lse, dout = results[OUT], results[LSE], upstream.get(OUT)
        dout = torch.zeros_like(out) if dout is None else dout
        return SparseBackward(self, dout, out, lse, self.divisors(lse), upstream.get(LSE))

    def gradient(self, out: Tensor, lse: Tensor, dout: Tensor, entries: int | None) -> FlashMlaBackward:
        """Returns the object by which back ends compute gradients, from the forward's out and lse, and dout.
        entries: number of entries in each list of selected keys for which it also returns probabilities; None: none."""
        result = FlashMlaBackward(self, dout, out, lse, self.divisors(lse))
        result.entries = entries
        return result

    def listed_rows(self, lse: Tensor) -> ListedRows:
        """Returns the input of write_probabilities(): query rows, the keys that lists select from, and lse."""
        if self.second is None:
            keys, keys_of = self.keys(self.given("key")), self.extents.kv_len
        else:
            view, keys_of = self.compressed(self.given("key_compressed")), self.second[1].kv_len
            assert view is not None
            keys = view
        assert isinstance(keys, RowView)
        lengths = self.extents.q_len.tolist()
        ends = [self._listed_end(b, np.arange(count)) for b, count in enumerate(lengths)]
        q = self.given("query")
        return ListedRows(self, self.problem.scale, q, lengths, keys, keys_of, ends, lse, self.lists())

    def _listed_end(self, b: int, row: np.ndarray) -> np.ndarray:
        """Returns the number of keys that rows of sequence b see in the source that lists select from; row: indices."""
        if self.second is None:
            return np.full(len(row), self.extents.kv_len[b])
        return self.extents.compressed_end(b, row, self.problem.compressed_ratio)

    def divisors(self, lse: Tensor) -> Tensor:
        """Returns softmax sums for kernels that read lse as the maximum: 1, or 0 in rows without visible keys."""
        result = torch.ones_like(lse)
        divisors, _ = statistics(self.given("query"))
        self.grouped(divisors).copy_(result)
        self._clear_rows_without_keys(divisors)
        return result.copy_(self.grouped(divisors))

    def _clear_rows_without_keys(self, rows: Tensor) -> None:
        """Sets softmax statistics [.., N1] of rows without visible keys to 0."""
        p, e = self.problem, self.extents
        heads, view = p.heads_q, self.rows(rows.unsqueeze(-1), p.heads_q)
        lists = self.lists()
        listed = None if lists is None else self.rows(lists, p.heads_kv)
        for b, count in enumerate(e.q_len.tolist()):
            row = np.arange(count)
            first, end = e.row_interval(b, row)
            closed = self._listed_end(b, row)
            reads = torch.from_numpy((end > first) & (self.second is not None)).to(rows.device)
            visible = torch.from_numpy(closed).to(rows.device)[:, None]
            if listed is None:
                reads = reads | (visible[:, 0] > 0)
            else:
                entries = listed.sequence(b, p.heads_kv, count)[0]
                slots = torch.arange(entries.shape[1], device=rows.device)
                read = (entries >= 0).cumprod(-1).bool() & (slots < visible) & (entries < visible)
                reads = reads | read.any(-1)
            view.sequence(b, heads, count)[..., 0].masked_fill_(~reads, 0)


def replace_statistics(results: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns a dictionary of results with softmax_lse in place of "max" and "sum"."""
    out, top, *_ = (results.get(name) for name in RESULTS)
    assert out is not None
    return {OUT: out} if top is None else {OUT: out, LSE: empty(top, top.shape, top.dtype)}


class FlashMlaBackward(SparseBackward):
    """A gradient call of SparseFlashMla for back ends, which also returns selected keys' mean probabilities."""

    call: FlashMla
    entries: int | None = None

    @property
    def norm(self) -> str:
        """The name of the result with selected keys' mean probabilities; it depends on the number of sources."""
        return NORM_OF_KEYS if self.call.second is None else NORM

    def results(self) -> dict[str, Tensor]:
        q = self.call.given("query")
        shape = (*q.shape[:-2], 1, self.entries or 0)
        return super().results() | ({} if self.entries is None else {self.norm: empty(q, shape, torch.float32)})

    def fill(self, outputs: Mapping[str, Tensor]) -> Filled:
        gradients = {name: tensor for name, tensor in outputs.items() if name != self.norm}
        if self.call.second is not None:  # The operator does not return the gradient of empty compressed keys.
            compressed = self.call.given("key_compressed")
            gradients.setdefault("dkey_compressed", empty(compressed, compressed.shape, compressed.dtype))
        filled, norm = super().fill(gradients), outputs.get(self.norm)
        if norm is not None and norm.numel():
            filled.convert = lambda: write_probabilities(self.call.listed_rows(self.saved[2]), norm)
        return filled
