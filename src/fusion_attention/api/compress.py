"""The Python API of compressed keys: pooling of windows of rows, for whole sequences and token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from fusion_attention.contract import ContractError, Failure
from fusion_attention.torch_ops.pooling import Windows, pooled

__all__ = ["CompressionState", "compress"]

Tensor = torch.Tensor


class CompressionState:
    """State between calls of compress(): the rows of each sequence that do not fill a window yet.

    Attributes:
        tokens: rows of each sequence so far.
        residual: tokens % ratio, an argument of compressed_attention(); 0 before the first call.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.residual = 0
        self._rows: tuple[Tensor, Tensor] | None = None
        self._windows: tuple[int, bool] | None = None  # ratio and overlap of the calls

    def continued(self, rows: Tensor, gates: Tensor, bias: Tensor | None, windows: Windows) -> Tensor:
        """Pools the windows that these rows complete, and keeps the rows of the unfinished window, and with overlap
        those of the window before it."""
        ratio, tokens = windows.ratio, rows.shape[1]
        before = windows.overlap and self.tokens >= ratio
        if self._rows is not None:
            rows, gates = (torch.cat(pair, 1) for pair in zip(self._rows, (rows, gates), strict=True))
        result = pooled(rows, gates, bias, replace(windows, before=before))
        self.tokens += tokens
        self._windows = ratio, windows.overlap
        self.residual = self.tokens % ratio
        first = rows.shape[1] - self.residual - (ratio if windows.overlap and self.tokens >= ratio else 0)
        self._rows = rows[:, first:].detach().clone(), gates[:, first:].detach().clone()
        return result


def compress(
    kv: Tensor,
    gate: Tensor,
    *,
    ratio: int,
    position_bias: Tensor | None = None,
    overlap: bool = False,
    layout: Literal["BSND", "TND"] = "BSND",
    kv_len: Sequence[int] | Tensor | None = None,
    state: CompressionState | None = None,
) -> Tensor:
    """Pools every window of `ratio` rows to one, with a softmax per channel over the rows of the window.

        z_p = gate_p + position_bias[p % ratio]
        out[w, d] = sum_p exp(z[p, d]) kv[p, d] / sum_p exp(z[p, d]),  p from w * ratio to w * ratio + ratio - 1

    With overlap, rows have 2 D channels, and a window pools two sets of rows: channels 0 to D - 1 of the window before
    it (none before window 0), and channels D to 2 D - 1 of its own. These are the compressed keys of
    compressed_attention(). A sequence's unfinished last window gives none. Differentiable in kv, gate and
    position_bias. Computed in float32, or in float64 for float64 rows: on a CPU by the native core, elsewhere and for
    float64 by torch's operators.

    Args:
        kv: rows [B, S, N2, C], C = D or, with overlap, 2 D; float16, bfloat16, float32 or float64.
        gate: as kv.
        ratio: rows of a window.
        position_bias: [ratio, C], added to the gates by the position of a row in its window; None: none.
        overlap: windows overlap as above.
        layout: "BSND", or packed "TND": [T, N2, C].
        kv_len: tokens of every sequence; packed: needed.
        state: of earlier calls, whose unfinished windows go on here; this call's rows join it. Rows of earlier
            calls receive no gradient. "BSND" without kv_len only.

    Returns:
        [B, S // ratio, N2, D], with zeros behind the kv_len // ratio windows of a sequence; packed, [sum(kv_len //
        ratio), N2, D]. With a state, the windows that this call completes.

    Raises:
        ContractError: shapes, lengths or a state that do not go together, named by parameter.

    Source: this library; the pooling of CANN's compressor, whose projections are the caller's.

    Example:
        >>> kv, gate = torch.randn(1, 9, 1, 16), torch.randn(1, 9, 1, 16)
        >>> compress(kv, gate, ratio=4).shape
        torch.Size([1, 2, 1, 16])
    """
    lengths = _checked(kv, gate, ratio, position_bias, overlap, layout, kv_len, state)
    if state is not None:
        return state.continued(kv, gate, position_bias, Windows(ratio, overlap))
    used = None if kv_len is None else tuple(lengths)
    return pooled(kv, gate, position_bias, Windows(ratio, overlap, used, layout == "TND"))


def _checked(
    kv: Tensor, gate: Tensor, ratio: int, bias: Tensor | None, overlap: bool, layout: str,
    kv_len: Sequence[int] | Tensor | None, state: CompressionState | None,
) -> list[int]:  # fmt: skip
    """Checks a call, and returns its lengths.

    Raises:
        ContractError: for the first invalid parameter.
    """
    for name, tensor in (("kv", kv), ("gate", gate)):
        if not isinstance(tensor, Tensor) or tensor.dim() == 0:
            raise _failure(name, "a tensor of rows", tensor, "one row for each token and head")
    if not isinstance(ratio, int) or isinstance(ratio, bool):
        raise _failure("ratio", "an int", ratio, "rows of a window")
    if kv_len is not None and (isinstance(kv_len, int) or (isinstance(kv_len, Tensor) and kv_len.dim() != 1)):
        raise _failure("kv_len", "one number for each sequence", kv_len, "a list, or a tensor with one axis")
    lengths = [] if kv_len is None else [int(n) for n in kv_len]
    rows, axes = ("[B, S, N2, C]", 4) if layout == "BSND" else ("[T, N2, C]", 3)
    tokens = kv.shape[1] if layout == "BSND" and kv.dim() == 4 else kv.shape[0]
    within = len(lengths) == len(kv) and max(lengths, default=0) <= tokens
    fit = within if layout == "BSND" else sum(lengths) == tokens
    before = None if state is None or state._rows is None else state._rows[0]
    windows = None if state is None else state._windows
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    table: tuple[tuple[bool, str, str, Any, str], ...] = (
        (layout in ("BSND", "TND"), "layout", '"BSND" or "TND"', layout, "transpose the rows"),
        (kv.dim() == axes and kv.dtype in floats, "kv", f"floats {rows}", _shown(kv),
         "one row for each token and head"),
        (gate.shape == kv.shape, "gate", f"the shape of kv, {list(kv.shape)}", list(gate.shape),
         "one for each channel"),
        (gate.dtype == kv.dtype, "gate", f"the dtype of kv, {kv.dtype}", gate.dtype, "convert it"),
        (ratio >= 1, "ratio", "at least 1", ratio, "rows of a window"),
        (not (overlap and kv.shape[-1] % 2), "kv", "an even number of channels with overlap",
         list(kv.shape), "they are two sets"),
        (bias is None or list(bias.shape) == [ratio, kv.shape[-1]], "position_bias",
         f"[ratio, C] = {[ratio, kv.shape[-1]]}", None if bias is None else list(bias.shape),
         "a row for each position in a window"),
        (layout == "BSND" or kv_len is not None, "kv_len", "the tokens of every sequence", None,
         "packed rows do not show where a sequence ends"),
        (kv_len is None or (fit and min(lengths, default=0) >= 0), "kv_len",
         f"lengths of sequences within {tokens} tokens", lengths, "one for each sequence; packed, their sum is T"),
        (state is None or (layout == "BSND" and kv_len is None), "state", "None beside kv_len or packed rows",
         "a state", "sequences of a state have one length: call without kv_len"),
        (before is None or (before.shape[0] == kv.shape[0] and before.shape[2:] == kv.shape[2:]), "state",
         f"the state of {len(kv)} sequences of rows {list(kv.shape[2:])}",
         None if before is None else list(before.shape), "start a new CompressionState"),
        (windows in (None, (ratio, overlap)), "state", f"a state of windows of {(ratio, overlap)}", windows,
         "(ratio, overlap) of its first call; or start a new CompressionState"),
    )  # fmt: skip
    for holds, param, expected, got, advice in table:
        if not holds:
            raise _failure(param, expected, got, advice)
    return lengths


def _failure(param: str, expected: str, got: Any, advice: str) -> ContractError:
    return ContractError([Failure("compress", param, expected, str(got), advice)])


def _shown(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
