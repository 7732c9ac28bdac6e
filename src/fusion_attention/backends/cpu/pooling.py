"""Pooling of windows of rows in the native core."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

import fusion_attention._native as _native
from fusion_attention.backends.cpu.native import DTYPES
from fusion_attention.memory import empty

Tensor = torch.Tensor
_Rows = tuple[int, np.ndarray, np.ndarray, int, int]


def reads(*tensors: Tensor | None) -> bool:
    """True if the core can read these rows."""
    return all(t is None or (t.is_cpu and t.dtype in DTYPES and t.numel() > 0) for t in tensors)


class Pooling:
    """A division of rows into windows; sequences of rows [B, S, N, C], or packed [T, N, C].

    Args:
        lengths: rows of every sequence. before: as in the operator.
        size: rows of every sequence in memory; None: packed rows.
        variant: an instruction set that runs here, None: the fastest.
    """

    def __init__(
        self,
        ratio: int,
        overlap: bool,
        lengths: Sequence[int],
        before: bool,
        size: int | None,
        variant: str | None = None,
    ) -> None:
        self.ratio, self.overlap, self.size, self.variant = ratio, overlap, size, variant
        used = np.asarray(lengths, np.int64)
        self.count = len(used)
        self.results = np.maximum(used // ratio - before, 0)
        self.room = self.results if size is None else np.full_like(used, max(size // ratio - before, 0))
        self.rows = used if size is None else np.full_like(used, size)
        self.before = np.where(self.results > 0, int(before), 0)

    def forward(self, kv: Tensor, gate: Tensor, bias: Tensor | None) -> Tensor:
        """Results of all windows; bias: float32."""
        heads, channels = kv.shape[-2:]
        shape = (int(self.room.sum()),) if self.size is None else (self.count, int(self.room[0]))
        out = empty(kv, (*shape, heads, channels // (1 + self.overlap)))
        table = None if bias is None else bias.contiguous()
        rows, results = (self._view(t, n) for t, n in ((kv, self.rows), (out, self.room)))
        operands = rows, self._view(gate, self.rows), _place(table), results, None, None, 0
        _native.pool(torch.get_num_threads(), self._problem(kv), self._lengths(), operands, self.variant)
        return out

    def backward(
        self, kv: Tensor, gate: Tensor, bias: Tensor | None, dout: Tensor, wants_dbias: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gradients of kv, gate and (float32) bias."""
        table = None if bias is None else bias.contiguous()
        dkv, dgate = empty(kv, kv.shape), empty(gate, gate.shape)
        dbias = None if table is None or not wants_dbias else empty(table, table.shape)
        views = (self._view(t, self.rows) for t in (dkv, dgate))
        rows = self._view(kv, self.rows), self._view(gate, self.rows)
        operands = *rows, _place(table), self._view(dout, self.room), *views, _place(dbias)
        _native.pool_gradients(torch.get_num_threads(), self._problem(kv), self._lengths(), operands, self.variant)
        return dkv, dgate, dbias

    def _problem(self, kv: Tensor) -> tuple[int, int, int, bool, int]:
        heads, channels = kv.shape[-2:]
        return heads, channels // (1 + self.overlap), self.ratio, self.overlap, DTYPES[kv.dtype]

    def _lengths(self) -> tuple[np.ndarray, ...]:
        return self.rows, self.results, self.before, self.room

    def _view(self, tensor: Tensor, rows: np.ndarray) -> _Rows:
        """Rows of all sequences; the caller keeps the tensor."""
        *_, stride_token, stride_head, _ = tensor.stride()
        first = np.cumsum(rows) - rows if self.size is None else np.arange(self.count)
        address = first * (stride_token if self.size is None else tensor.stride(0))
        return tensor.data_ptr(), address, np.full(self.count, stride_head), stride_token, tensor.shape[-1]


def _place(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
