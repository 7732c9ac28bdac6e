"""torch_npu's training attention by its own names, signatures, defaults and returns, on any device.

Each function names its arguments as its record does; training_call.py computes. Differentiable in query, key, value,
pse, rope tensors and sink.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from fusion_attention.ir.mask import UNLIMITED
from fusion_attention.npu import training_call
from fusion_attention.npu.fused_out import with_copies
from fusion_attention.ops.shared.params import ONE, chosen
from fusion_attention.ops.training import records as training
from fusion_attention.torch_ops.aliases import aliased

__all__ = [
    "npu_fusion_attention",
    "npu_fusion_attention_grad",
    "npu_fusion_attention_grad_v2",
    "npu_fusion_attention_grad_v3",
    "npu_fusion_attention_v2",
    "npu_fusion_attention_v3",
]

Tensor = torch.Tensor
# The first of a union is what torch_npu declares (operators.py).
Lengths = Sequence[int] | Tensor | None
LengthsTensor = Tensor | Sequence[int] | None


@aliased
def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = ONE,
    keep_prob: float = 1.0,
    pre_tockens: int = UNLIMITED,
    next_tockens: int = UNLIMITED,
    inner_precise: int = 0,
    prefix: Lengths = None,
    actual_seq_qlen: Lengths = None,
    actual_seq_kvlen: Lengths = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """Softmax attention for training, padded or packed, with CANN's masks, biases, dropout and statistics.

    S = scale * (Q K^T + pse);  out = dropout(softmax(S over the visible keys)) V

    Args:
        query: [B, S1, N1, D] and its kin: BSH [B, S1, N1*D], SBH, BNSD, TND [T1, N1, D]; float16, bfloat16 or float32.
        key: [B, S2, N2, D], N1 a multiple of N2. value: [B, S2, N2, Dv].
        head_num: N1.
        input_layout: "BSH", "SBH", "BSND", "BNSD" or "TND".
        pse: added before scaling: [B or 1, N1, S1 or 1, S2], or its last 1024 rows; TND: 1024 rows, or blocks.
        padding_mask: reserved.
        atten_mask: bool or uint8, 1 removes a score; shape as sparse_mode says. Without it every key is visible.
        scale: factor on the scores; 1.0, not 1 / sqrt(D).
        keep_prob: share of probabilities kept; below 1 without dropout_mask, bits are drawn from (seed, offset).
        pre_tockens, next_tockens: window in tokens, modes 0 and 4 (7 and 8: next_tockens).
        inner_precise: 2 makes rows that see no key zero.
        prefix: per sequence the keys that every row sees, modes 5 and 6.
        actual_seq_qlen, actual_seq_kvlen: TND: cumulative end of every sequence.
        sparse_mode: 0 to 8.
        gen_mask_parallel, sync: accepted without effect.
        softmax_layout: "" (packed statistics head-major in each sequence) or "TND" (token-major).
        sink: float32 [N1], one more logit per row and head.
        dropout_mask: uint8, one bit per score, 1 = kept, least significant bit first.
        seed, offset: of drawn dropout; both 0 draws a seed from torch's default generator. Beside a mask they are
            handed back, and draw nothing.

    Returns:
        (attention_out, softmax_max, softmax_sum, softmax_out, seed, offset, numels): the output in the query's layout;
        float32 statistics [B, N1, S1, 8] or [T1, N1, 8] (which lie as softmax_layout says); an empty tensor; what the
        gradient needs to draw again.

    Raises:
        ContractError: a call that `fusion-attention ops npu_fusion_attention` does not allow.
        BackendError: no back end computes it.

    Source: Ascend op-plugin, npu_fusion_attention.

    Example:
        >>> q = torch.randn(1, 16, 2, 64)
        >>> out, smax, ssum, *_ = npu_fusion_attention(q, q, q, 2, "BSND", scale=0.125)
        >>> list(out.shape), list(smax.shape)
        ([1, 16, 2, 64], [1, 2, 16, 8])
    """
    args = {
        "query": query, "key": key, "value": value, "head_num": head_num, "input_layout": input_layout, "pse": pse,
        "padding_mask": padding_mask, "atten_mask": atten_mask, "scale": chosen(scale), "keep_prob": keep_prob,
        "pre_tokens": pre_tockens, "next_tokens": next_tockens, "inner_precise": inner_precise, "prefix": prefix,
        "actual_seq_qlen": actual_seq_qlen, "actual_seq_kvlen": actual_seq_kvlen, "sparse_mode": sparse_mode,
        "gen_mask_parallel": gen_mask_parallel, "sync": sync, "softmax_layout": softmax_layout, "sink": sink,
        "drop_mask": dropout_mask, "seed": seed, "offset": offset,
    }  # fmt: skip
    return training_call.forward(training.TORCH_V1, args)


@aliased
def npu_fusion_attention_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    scale: float = ONE,
    keep_prob: float = 1.0,
    pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED,
    inner_precise: int = 0,
    prefix: Lengths = None,
    actual_seq_qlen: Lengths = None,
    actual_seq_kvlen: Lengths = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    pse_type: int = 1,
    q_start_idx: Lengths = None,
    kv_start_idx: Lengths = None,
    softmax_layout: str = "",
    sink: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """npu_fusion_attention with rope parts, four kinds of pse and start positions.

    S = scale * (Q K^T + Q_rope K_rope^T) + pse, or as pse_type says;  out = dropout(softmax(S)) V

    Args:
        query_rope: [.., N1, Dr] in the query's layout and dtype; key_rope: [.., N2, Dr].
        pse_type: 1 scale * (qk + pse); 0 scale * qk + pse; 2 and 3 subtract slope * distance, or its square root, with
            the float32 slopes [B, N1] or [N1] passed as pse and distance = |key + kv_start - row - q_start|.
        q_start_idx, kv_start_idx: positions of the first row and the first key (tokens; element 0 is read); None: 0.
        pre_tokens, next_tokens and all others: as npu_fusion_attention.

    Returns:
        As npu_fusion_attention.

    Raises:
        ContractError, BackendError: as npu_fusion_attention.

    Source: Ascend op-plugin, npu_fusion_attention_v2.

    Example:
        >>> q = torch.randn(1, 16, 2, 64)
        >>> slopes = torch.tensor([0.5, 0.25])
        >>> out, *_ = npu_fusion_attention_v2(q, q, q, 2, "BSND", pse=slopes, pse_type=2, scale=0.125)
        >>> list(out.shape)
        [1, 16, 2, 64]
    """
    args = {
        "query": query, "key": key, "value": value, "head_num": head_num, "input_layout": input_layout, "pse": pse,
        "padding_mask": padding_mask, "atten_mask": atten_mask, "query_rope": query_rope, "key_rope": key_rope,
        "scale": chosen(scale), "keep_prob": keep_prob, "pre_tokens": pre_tokens, "next_tokens": next_tokens,
        "inner_precise": inner_precise, "prefix": prefix, "actual_seq_qlen": actual_seq_qlen,
        "actual_seq_kvlen": actual_seq_kvlen, "sparse_mode": sparse_mode, "gen_mask_parallel": gen_mask_parallel,
        "sync": sync, "pse_type": pse_type, "q_start_idx": q_start_idx, "kv_start_idx": kv_start_idx,
        "softmax_layout": softmax_layout, "sink": sink, "drop_mask": dropout_mask, "seed": seed, "offset": offset,
    }  # fmt: skip
    return training_call.forward(training.TORCH_V2, args)


@with_copies(training.TORCH_V3, "attention_out", "softmax_max", "softmax_sum", "softmax_out", "seed", "offset")
@partial(aliased, host=2)
def npu_fusion_attention_v3(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = ONE,
    keep_prob: float = 1.0,
    pre_tockens: int = UNLIMITED,
    next_tockens: int = UNLIMITED,
    inner_precise: int = 0,
    prefix: Lengths = None,
    actual_seq_qlen: LengthsTensor = None,
    actual_seq_kvlen: LengthsTensor = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """npu_fusion_attention with lengths, seed and offset as host tensors.

    S = scale * (Q K^T + pse);  out = dropout(softmax(S over the visible keys)) V

    Args:
        actual_seq_qlen, actual_seq_kvlen: int64 [B], cumulative ends; all others: as npu_fusion_attention.

    Returns:
        (attention_out, softmax_max, softmax_sum, softmax_out, seed, offset), the last two int64 [1].

    Raises:
        ContractError, BackendError: as npu_fusion_attention.

    Source: Ascend op-plugin, npu_fusion_attention_v3.

    Example:
        >>> q, ends = torch.randn(16, 2, 64), torch.tensor([5, 16])
        >>> lengths = {"actual_seq_qlen": ends, "actual_seq_kvlen": ends}
        >>> out, *_ = npu_fusion_attention_v3(q, q, q, 2, "TND", scale=0.125, **lengths)
        >>> list(out.shape)
        [16, 2, 64]
    """
    args = {
        "query": query, "key": key, "value": value, "head_num": head_num, "input_layout": input_layout, "pse": pse,
        "padding_mask": padding_mask, "atten_mask": atten_mask, "scale": chosen(scale), "keep_prob": keep_prob,
        "pre_tokens": pre_tockens, "next_tokens": next_tockens, "inner_precise": inner_precise, "prefix": prefix,
        "actual_seq_qlen": actual_seq_qlen, "actual_seq_kvlen": actual_seq_kvlen, "sparse_mode": sparse_mode,
        "gen_mask_parallel": gen_mask_parallel, "sync": sync, "softmax_layout": softmax_layout, "sink": sink,
    }  # fmt: skip
    *tensors, seed, offset, _ = training_call.forward(training.TORCH_V3, args)
    drawn = seed.reshape(1) if isinstance(seed, Tensor) else torch.tensor([seed])
    return (*tensors, drawn, torch.tensor([offset]))  # type: ignore[return-value]


@aliased
def npu_fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = UNLIMITED,
    next_tockens: int = UNLIMITED,
    inner_precise: int = 0,
    seed: int = 0,
    offset: int = 0,
    numels: int = 0,
    prefix: Lengths = None,
    actual_seq_qlen: Lengths = None,
    actual_seq_kvlen: Lengths = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of npu_fusion_attention, from its statistics and its output.

    dV = P^T dY;  dS = P * (dY V^T - rowsum(dY * out));  dQ = scale * dS K;  dK = scale * dS^T Q;  dpse = scale * dS

    Args:
        dy: gradient of attention_out, in its shape.
        softmax_max, softmax_sum: float32 [B, N1, S1, 8] or [T1, N1, 8], as returned by the forward; needed. In TND the
            [N1, q_len, 8] of each sequence lie end to end, whatever the shape says, unless softmax_layout is "TND".
        softmax_in: reserved.
        attention_in: the forward's attention_out; needed.
        scale_value: the forward's scale.
        seed, offset, numels: as returned by the forward; keep_prob < 1 draws the same bits again (a mask that the
            forward was given is known to autograd alone).
        all others: as given to the forward.

    Returns:
        (dq, dk, dv, dpse, dsink); dpse is the true gradient summed over broadcast axes; absent ones are empty.

    Raises:
        ContractError, BackendError: as npu_fusion_attention.

    Source: Ascend op-plugin, npu_fusion_attention_grad.

    Example:
        >>> q = torch.randn(1, 16, 2, 64)
        >>> out, smax, ssum, *_ = npu_fusion_attention(q, q, q, 2, "BSND", scale=0.125)
        >>> dq, *_ = npu_fusion_attention_grad(q, q, q, out, 2, "BSND", softmax_max=smax, softmax_sum=ssum,
        ...     attention_in=out, scale_value=0.125)
        >>> list(dq.shape)
        [1, 16, 2, 64]
    """
    args = {
        "query": query, "key": key, "value": value, "dy": dy, "head_num": head_num, "input_layout": input_layout,
        "pse": pse, "padding_mask": padding_mask, "atten_mask": atten_mask, "softmax_max": softmax_max,
        "softmax_sum": softmax_sum, "softmax_in": softmax_in, "attention_in": attention_in, "scale": scale_value,
        "keep_prob": keep_prob, "pre_tokens": pre_tockens, "next_tokens": next_tockens,
        "inner_precise": inner_precise, "seed": seed, "offset": offset, "numels": numels, "prefix": prefix,
        "actual_seq_qlen": actual_seq_qlen, "actual_seq_kvlen": actual_seq_kvlen, "sparse_mode": sparse_mode,
        "gen_mask_parallel": gen_mask_parallel, "sync": sync, "softmax_layout": softmax_layout, "sink": sink,
    }  # fmt: skip
    dq, dk, dv, _, _, dpse, dsink = training_call.backward(training.TORCH_GRAD_V1, args)
    return dq, dk, dv, dpse, dsink


@aliased
def npu_fusion_attention_grad_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED,
    inner_precise: int = 0,
    seed: int = 0,
    offset: int = 0,
    numels: int = 0,
    prefix: Lengths = None,
    actual_seq_qlen: Lengths = None,
    actual_seq_kvlen: Lengths = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    pse_type: int = 1,
    q_start_idx: Lengths = None,
    kv_start_idx: Lengths = None,
    softmax_layout: str = "",
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of npu_fusion_attention_v2, from its statistics and its output.

    As npu_fusion_attention_grad; dQ_rope = scale * dS K_rope;  dK_rope = scale * dS^T Q_rope;  dpse = dS for pse_type 0

    Args:
        query_rope, key_rope, pse_type, q_start_idx, kv_start_idx: as given to the forward.
        all others: as npu_fusion_attention_grad.

    Returns:
        (dq, dk, dv, dpse, dq_rope, dk_rope, dsink); absent ones are empty, and slopes get zeros.

    Raises:
        ContractError, BackendError: as npu_fusion_attention.

    Source: Ascend op-plugin, npu_fusion_attention_grad_v2.

    Example:
        >>> q = torch.randn(1, 16, 2, 64)
        >>> out, smax, ssum, *_ = npu_fusion_attention_v2(q, q, q, 2, "BSND", scale=0.125)
        >>> dq, *_ = npu_fusion_attention_grad_v2(q, q, q, out, 2, "BSND", softmax_max=smax, softmax_sum=ssum,
        ...     attention_in=out, scale_value=0.125)
        >>> list(dq.shape)
        [1, 16, 2, 64]
    """
    args = {
        "query": query, "key": key, "value": value, "dy": dy, "head_num": head_num, "input_layout": input_layout,
        "pse": pse, "padding_mask": padding_mask, "atten_mask": atten_mask, "softmax_max": softmax_max,
        "softmax_sum": softmax_sum, "softmax_in": softmax_in, "attention_in": attention_in, "query_rope": query_rope,
        "key_rope": key_rope, "scale": scale_value, "keep_prob": keep_prob, "pre_tokens": pre_tokens,
        "next_tokens": next_tokens, "inner_precise": inner_precise, "seed": seed, "offset": offset, "numels": numels,
        "prefix": prefix, "actual_seq_qlen": actual_seq_qlen, "actual_seq_kvlen": actual_seq_kvlen,
        "sparse_mode": sparse_mode, "gen_mask_parallel": gen_mask_parallel, "sync": sync, "pse_type": pse_type,
        "q_start_idx": q_start_idx, "kv_start_idx": kv_start_idx, "softmax_layout": softmax_layout, "sink": sink,
    }  # fmt: skip
    grads = training_call.backward(training.TORCH_GRAD_V2, args)
    dq, dk, dv, dq_rope, dk_rope, dpse, dsink = grads
    return dq, dk, dv, dpse, dq_rope, dk_rope, dsink


@with_copies(training.TORCH_GRAD_V3, "dq", "dk", "dv", "dpse", "dsink")
@aliased
def npu_fusion_attention_grad_v3(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = UNLIMITED,
    next_tockens: int = UNLIMITED,
    inner_precise: int = 0,
    seed: Tensor | None = None,
    offset: Tensor | None = None,
    prefix: Lengths = None,
    actual_seq_qlen: LengthsTensor = None,
    actual_seq_kvlen: LengthsTensor = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of npu_fusion_attention_v3, from its statistics and its output.

    As npu_fusion_attention_grad, with seed and offset as the int64 tensors that the forward returned.

    Args:
        seed, offset: int64 [1].
        all others: as npu_fusion_attention_grad.

    Returns:
        (dq, dk, dv, dpse, dsink); absent ones are empty.

    Raises:
        ContractError, BackendError: as npu_fusion_attention.

    Source: Ascend op-plugin, npu_fusion_attention_grad_v3.

    Example:
        >>> q = torch.randn(1, 16, 2, 64)
        >>> out, smax, ssum, _, seed, offset = npu_fusion_attention_v3(q, q, q, 2, "BSND", scale=0.125)
        >>> dq, *_ = npu_fusion_attention_grad_v3(q, q, q, out, 2, "BSND", softmax_max=smax, softmax_sum=ssum,
        ...     attention_in=out, scale_value=0.125, seed=seed, offset=offset)
        >>> list(dq.shape)
        [1, 16, 2, 64]
    """
    args = {
        "query": query, "key": key, "value": value, "dy": dy, "head_num": head_num, "input_layout": input_layout,
        "pse": pse, "padding_mask": padding_mask, "atten_mask": atten_mask, "softmax_max": softmax_max,
        "softmax_sum": softmax_sum, "softmax_in": softmax_in, "attention_in": attention_in, "scale": scale_value,
        "keep_prob": keep_prob, "pre_tokens": pre_tockens, "next_tokens": next_tockens,
        "inner_precise": inner_precise, "seed": seed, "offset": offset, "prefix": prefix,
        "actual_seq_qlen": actual_seq_qlen, "actual_seq_kvlen": actual_seq_kvlen, "sparse_mode": sparse_mode,
        "gen_mask_parallel": gen_mask_parallel, "sync": sync, "softmax_layout": softmax_layout, "sink": sink,
    }  # fmt: skip
    dq, dk, dv, _, _, dpse, dsink = training_call.backward(training.TORCH_GRAD_V3, args)
    return dq, dk, dv, dpse, dsink
