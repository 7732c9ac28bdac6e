"""The public function compress(), which pools windows of rows to one row each, and its state for decoding."""

from collections.abc import Sequence
from typing import Any, Literal

import torch

from fusion_attention.backends import BackendName
from fusion_attention.contract import ContractError
from fusion_attention.ops.compressed.pooling import RECORD
from fusion_attention.torch_ops import dispatch
from fusion_attention.torch_ops.device_aliases import aliased

__all__ = ["CompressionState", "compress"]

Tensor = torch.Tensor


class CompressionState:
    """State of compress(), which pools windows of `ratio` rows, between calls: the rows of incomplete windows.

    Attributes:
        tokens: number of rows of each sequence in all calls so far.
        residual: tokens % ratio, an argument of compressed_attention(); 0 before the first call.

    Example:
        >>> state, rows = CompressionState(), torch.randn(1, 9, 1, 16)
        >>> compress(rows, rows, ratio=4, state=state).shape, state.residual
        (torch.Size([1, 2, 1, 16]), 1)
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.residual = 0
        self._rows: tuple[Tensor, Tensor] | None = None
        self._windows: tuple[int, bool] | None = None  # ratio and overlap of the calls

    def continued(self, args: dict[str, Any], backend: str) -> Tensor:
        """Pools the windows that the rows of a compress() call complete, and returns the pooled rows; stores the rows
        of the unfinished window and, with overlap, of the window before it.

        args: compress()'s arguments by name. backend: the back end's name.
        """
        self._check(args)
        kv, gate, ratio, overlap = (args[name] for name in ("kv", "gate", "ratio", "overlap"))
        before = overlap and self.tokens >= ratio
        if self._rows is not None:
            kv, gate = (torch.cat(pair, 1) for pair in zip(self._rows, (kv, gate), strict=True))
        result = dispatch.results(RECORD, {**args, "kv": kv, "gate": gate, "before": before}, backend)["out"]
        self.tokens += args["kv"].shape[1]
        self._windows = ratio, overlap
        self.residual = self.tokens % ratio
        first = kv.shape[1] - self.residual - (ratio if overlap and self.tokens >= ratio else 0)
        self._rows = kv[:, first:].detach().clone(), gate[:, first:].detach().clone()
        return result

    def _check(self, args: dict[str, Any]) -> None:
        """Raises ContractError if `args` (compress()'s) are packed, or windows or rows differ from before."""
        windows = args["ratio"], args["overlap"]
        if args["layout"] != "BSND" or args["kv_len"] is not None:
            expected = "None for packed rows or with kv_len"
            raise _refused(expected, "a state", "all sequences of a state have the same length")
        if self._windows not in (None, windows):
            raise _refused(f"a state of windows of {windows}", str(self._windows), "start a new CompressionState")
        if self._rows is not None:
            old = self._rows[0]
            for name in ("kv", "gate"):
                new = args[name]
                alike = isinstance(new, Tensor) and (new.dtype, new.dim(), new.shape[:1], new.shape[2:]) == (
                    old.dtype, old.dim(), old.shape[:1], old.shape[2:]
                )  # fmt: skip
                if not alike:
                    shown = f"{old.dtype} {list(old.shape)}"
                    raise _refused(f"the state of rows like {name}", shown, "start a new CompressionState")


@aliased
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
    backend: BackendName = "auto",
) -> Tensor:
    """Pools every window of `ratio` rows to one row, weighted by a softmax of the gates over the window's rows.

        z_p = gate_p + position_bias[p % ratio]
        out[w, d] = sum_p exp(z[p, d]) kv[p, d] / sum_p exp(z[p, d]),  p from w * ratio to w * ratio + ratio - 1

    The softmax is separate for every channel d. With overlap, rows have 2 D channels, and the softmax of window w
    covers channels 0 to D - 1 of the rows of window w - 1 (none for window 0) and channels D to 2 D - 1 of the rows of
    window w. The results are compressed keys for compressed_attention(). Rows of an incomplete last window are not
    pooled. Differentiable in kv, gate and position_bias. Computed in float32.

    Args:
        kv: rows [B, S, N2, C], C = D or, with overlap, 2 D; float16, bfloat16 or float32 (float64: backend="golden").
        gate: the logits of the softmax, of kv's shape and dtype.
        ratio: rows of a window.
        position_bias: [ratio, C], added to the gates by the position of a row in its window; None: none.
        overlap: True: a window also pools rows of the previous window, as described above.
        layout: "BSND", or packed "TND": [T, N2, C].
        kv_len: tokens of every sequence (not cumulative); required for packed rows.
        state: a CompressionState that stores the rows of incomplete windows from call to call; this call continues
            them. Rows of earlier calls receive no gradient. Only for "BSND" without kv_len.
        backend: "auto", "cpu", "triton" or "golden".

    Returns:
        [B, S // ratio, N2, D], with zeros after the kv_len // ratio windows of a sequence; packed [sum(kv_len //
        ratio), N2, D]. With a state, the results of the windows that this call completes.

    Raises:
        ContractError: a call that `fusion-attention ops compress` does not allow, or a state of rows of another shape.
        BackendError: no back end computes the call; the message lists the reasons.

    Source: this library; the pooling of CANN's compressor, without its projections.

    Example:
        >>> kv, gate = torch.randn(1, 9, 1, 16), torch.randn(1, 9, 1, 16)
        >>> compress(kv, gate, ratio=4).shape
        torch.Size([1, 2, 1, 16])
    """
    args: dict[str, Any] = {
        "kv": kv, "gate": gate, "ratio": ratio, "position_bias": position_bias, "overlap": overlap, "layout": layout,
        "kv_len": kv_len, **computed_arguments(layout, kv_len, ratio),
    }  # fmt: skip
    if state is not None:
        if not isinstance(state, CompressionState):
            raise _refused("a CompressionState", repr(state), "pass the same object to all calls of a sequence")
        return state.continued(args, backend)
    return dispatch.results(RECORD, args, backend)["out"]


def computed_arguments(layout: Any, kv_len: Any, ratio: Any) -> dict[str, Any]:
    """Returns the arguments of pooling that compress() computes from its own: {"before": False} (no earlier window),
    and for packed rows (layout "TND") "windows", the number of complete windows of all sequences."""
    return {"before": False} | ({"windows": _windows(kv_len, ratio)} if layout == "TND" else {})


def _windows(kv_len: Any, ratio: Any) -> int:
    """Returns the number of complete windows of all packed sequences, sum(kv_len // ratio); 0 if kv_len or ratio is
    invalid, which a later check reports."""
    try:
        return min(int(sum(max(int(n), 0) // ratio for n in kv_len)), torch.iinfo(torch.int64).max)
    except (TypeError, ValueError, ArithmeticError, RuntimeError):  # RuntimeError: a tensor on device meta
        return 0


def _refused(expected: str, got: str, advice: str) -> ContractError:
    return ContractError([RECORD.failure("state", expected, got, advice)])
