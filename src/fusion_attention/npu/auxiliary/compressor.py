"""cann_ops_transformer's compressor: torch's operators project rows, this library's compress() pools windows."""

from collections.abc import Sequence

import torch

from fusion_attention.npu.auxiliary.call import as_given, computed
from fusion_attention.ops.auxiliary_definitions.compressor import COMPRESSOR
from fusion_attention.ops.compressed.compressor_computation import Sequences, compressed
from fusion_attention.ops.compressed.pooling import RECORD
from fusion_attention.ops.shared.softmax_pooling import Windows
from fusion_attention.torch_ops import dispatch
from fusion_attention.torch_ops.device_aliases import crossing

Tensor = torch.Tensor
Lengths = Sequence[int] | None


@computed(COMPRESSOR)
def compressor(
    x: Tensor, wkv: Tensor, wgate: Tensor, state_cache: Tensor, ape: Tensor, cmp_ratio: int,
    state_block_table: Tensor | None, cu_seqlens: Lengths, seqused: Lengths, start_pos: Lengths, coff: int,
    cache_mode: int,
) -> Tensor:  # fmt: skip
    with as_given(x):
        sequences = Sequences.of(x, cmp_ratio, coff, cu_seqlens, seqused, start_pos)
        return compressed(x, wkv, wgate, state_cache, ape, state_block_table, cache_mode, sequences, _pooled)


@crossing
def _pooled(kv: Tensor, gate: Tensor, bias: Tensor | None, windows: Windows) -> Tensor:
    """Returns windows of padded rows kv [B, S, ...], averaged by softmax weights from gate: [B, windows, ...]; float64
    is computed by the reference back end.

    bias: added to the gates by position in a window, or None. windows: ratio, overlap and the earlier tokens.
    """
    args = {
        "kv": kv, "gate": gate, "ratio": windows.ratio, "position_bias": bias, "overlap": windows.overlap,
        "layout": "BSND", "before": windows.before,
    }  # fmt: skip
    return dispatch.results(RECORD, args, "golden" if kv.dtype == torch.float64 else "auto")["out"]
