"""The Python API of compressed keys: pooling of windows of rows, for whole sequences and token by token."""

from collections.abc import Sequence
from typing import Any, Literal

import torch

from fusion_attention.backends import BackendName
from fusion_attention.contract import ContractError
from fusion_attention.ops.compressed.pooling import RECORD
from fusion_attention.torch_ops import dispatch
from fusion_attention.torch_ops.aliases import aliased

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

    def continued(self, args: dict[str, Any], backend: str) -> Tensor:
        """Pools the windows that the rows of a call complete, and keeps the rows of the unfinished window, and with
        overlap those of the window before it."""
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
        """Raises ContractError if this is the state of other rows or windows."""
        windows = args["ratio"], args["overlap"]
        if args["layout"] != "BSND" or args["kv_len"] is not None:
            raise _refused("None beside kv_len or packed rows", "a state", "its sequences have one length")
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
                    raise _refused(f"the state of rows like {name}", _shown(old), "start a new CompressionState")


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
    """Pools every window of `ratio` rows to one, with a softmax per channel over the rows of the window.

        z_p = gate_p + position_bias[p % ratio]
        out[w, d] = sum_p exp(z[p, d]) kv[p, d] / sum_p exp(z[p, d]),  p from w * ratio to w * ratio + ratio - 1

    With overlap, rows have 2 D channels, and a window pools two sets of rows: channels 0 to D - 1 of the window before
    it (none before window 0), and channels D to 2 D - 1 of its own. These are the compressed keys of
    compressed_attention(). A sequence's unfinished last window gives none. Differentiable in kv, gate and
    position_bias. Computed in float32.

    Args:
        kv: rows [B, S, N2, C], C = D or, with overlap, 2 D; float16, bfloat16 or float32 (float64: backend="golden").
        gate: as kv.
        ratio: rows of a window.
        position_bias: [ratio, C], added to the gates by the position of a row in its window; None: none.
        overlap: windows overlap as above.
        layout: "BSND", or packed "TND": [T, N2, C].
        kv_len: tokens of every sequence; packed: needed.
        state: of earlier calls, whose unfinished windows go on here; this call's rows join it. Rows of earlier
            calls receive no gradient. "BSND" without kv_len only.
        backend: "auto", "cpu", "triton" or "golden".

    Returns:
        [B, S // ratio, N2, D], with zeros behind the kv_len // ratio windows of a sequence; packed, [sum(kv_len //
        ratio), N2, D]. With a state, the windows that this call completes.

    Raises:
        ContractError: a call that `fusion-attention ops compress` does not allow, or the state of other rows.
        BackendError: no back end computes it, and why.

    Source: this library; the pooling of CANN's compressor, whose projections are the caller's.

    Example:
        >>> kv, gate = torch.randn(1, 9, 1, 16), torch.randn(1, 9, 1, 16)
        >>> compress(kv, gate, ratio=4).shape
        torch.Size([1, 2, 1, 16])
    """
    args: dict[str, Any] = {
        "kv": kv, "gate": gate, "ratio": ratio, "position_bias": position_bias, "overlap": overlap, "layout": layout,
        "kv_len": kv_len, "before": False,
    }  # fmt: skip
    if state is not None:
        if not isinstance(state, CompressionState):
            raise _refused("a CompressionState", repr(state), "keep one object for all calls of a sequence")
        return state.continued(args, backend)
    if layout == "TND":
        args["windows"] = _windows(kv_len, ratio)
    return dispatch.results(RECORD, args, backend)["out"]


def _windows(kv_len: Any, ratio: Any) -> int:
    """The number of results of packed sequences, which the results' shape needs; 0 for a call that is refused."""
    try:
        return min(int(sum(max(int(n), 0) // ratio for n in kv_len)), torch.iinfo(torch.int64).max)
    except (TypeError, ValueError, ArithmeticError, RuntimeError):  # RuntimeError: of a tensor on meta
        return 0


def _refused(expected: str, got: str, advice: str) -> ContractError:
    return ContractError([RECORD.failure("state", expected, got, advice)])


def _shown(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
