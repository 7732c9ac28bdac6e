"""torch_npu's selection of experts and routing of rows to them, computed by torch's operators in float32."""

from collections.abc import Sequence

import torch

from fusion_attention.npu.auxiliary.call import computed
from fusion_attention.npu.auxiliary.quantised import rounded, row_scales
from fusion_attention.npu.auxiliary.token_permute import taken
from fusion_attention.ops.auxiliary_definitions import routing

Tensor = torch.Tensor


def _largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns (values, indices) of the k largest scores in each row; equal scores by ascending index."""
    values, index = scores.sort(dim=-1, descending=True, stable=True)
    return values[..., :k], index[..., :k]


@computed(routing.SOFTMAX)
def npu_moe_gating_top_k_softmax(x: Tensor, finished: Tensor | None, k: int) -> tuple[Tensor, Tensor, Tensor]:
    y, expert = _largest(x.float().softmax(-1), k)
    if finished is not None:
        expert = torch.where(finished.unsqueeze(-1), x.shape[-1], expert)
    tokens = expert[..., 0].numel()
    row = torch.arange(tokens * k, dtype=torch.int32, device=x.device).view(k, tokens).T.reshape(expert.shape)
    return y.to(x.dtype), expert.to(torch.int32), row


@computed(routing.GATING)
def npu_moe_gating_top_k(
    x: Tensor,
    k: int,
    bias: Tensor | None,
    k_group: int,
    group_count: int,
    group_select_mode: int,
    norm_type: int,
    routed_scaling_factor: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    groups, sigmoid = group_count, norm_type == 1
    out = x.float().sigmoid() if sigmoid else x.float().softmax(-1)
    scores = out.detach() if bias is None else out.detach() + bias.float()
    if groups > 1:
        grouped = scores.unflatten(-1, (groups, -1))
        best = _largest(grouped, 2)[0].sum(-1) if group_select_mode else grouped.amax(-1)
        chosen_groups = torch.zeros_like(best, dtype=torch.bool).scatter(-1, _largest(best, k_group)[1], True)
        scores = grouped.masked_fill(~chosen_groups.unsqueeze(-1), -torch.inf).flatten(-2)
    expert = _largest(scores, k)[1]
    y = out.gather(-1, expert)
    if sigmoid:
        y = y / (y.sum(-1, keepdim=True) + eps)
    return (y * routed_scaling_factor).to(x.dtype), expert.to(torch.int32), out


@computed(routing.INIT)
def npu_moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    scale: Tensor | None,
    offset: Tensor | None,
    active_num: int,
    expert_num: int,
    expert_tokens_num_type: int,
    expert_tokens_num_flag: bool,
    quant_mode: int,
    active_expert_range: Sequence[int] | None,
    row_idx_type: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # Without axes or elements they count as absent, as bind() reads them.
    scale, offset = (t if t is not None and t.dim() and t.numel() else None for t in (scale, offset))
    start, end = (() if active_expert_range is None else tuple(active_expert_range)) or (0, expert_num)
    expert = expert_idx.flatten().long()
    active = (expert >= start) & (expert < end)
    order = torch.where(expert < start, torch.iinfo(torch.int32).max, expert).argsort(stable=True)
    expert = torch.where(active, expert, end)
    rows = order.numel() if active_num <= 0 else min(active_num, order.numel())
    first = order[:rows]
    token = first // max(expert_idx.shape[1], 1)
    result, scales = _expanded(x[token], active[first], scale, offset, quant_mode, token, expert[first] - start)
    choices = order if row_idx_type else torch.where(active, order.argsort(), -1)
    counts = expert.new_zeros(0)
    if expert_tokens_num_flag:
        counts = _counts(expert, (start, end), expert_tokens_num_type, expert_num)
    return result, choices.to(torch.int32), counts, scales


def _expanded(
    rows: Tensor, there: Tensor, scale: Tensor | None, offset: Tensor | None, mode: int, token: Tensor, expert: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns (rows, float32 scales [rows]); rows are quantized to int8 if `mode` requires it; inactive rows are 0.

    Args:
        rows: in the order of experts.
        there: bool [rows], true for active ones.
        scale, offset: the operator's arguments, or None.
        mode: the operator's quant_mode: 0 static, 1 a scale per row, else unquantized.
        token, expert: int [rows], the token and the expert of each row.
    """
    result = rows.masked_fill(~there.unsqueeze(1), 0)
    scales = rows.new_zeros(len(rows), dtype=torch.float32)
    if mode == 0 and scale is not None and offset is not None:
        return rounded((result.float() * scale + offset).masked_fill(~there.unsqueeze(1), 0), 127), scales
    if mode == 1:
        result32 = result.float()
        if scale is not None:
            result32 = result32 * scale[expert.clamp(max=scale.shape[0] - 1)]
        scales = row_scales(result32, 127, (-1,))
        return rounded(result32 / torch.where(scales == 0, 1.0, scales).unsqueeze(1), 127), scales
    return result, scales if scale is None else scale[token].masked_fill(~there, 0)


def _counts(expert: Tensor, bounds: tuple[int, ...], kind: int, experts: int) -> Tensor:
    """Returns the numbers of rows of the active experts, in the form that expert_tokens_num_type (`kind`) requests.
    expert: int [rows]. bounds: first and end of the active experts. experts: number of all experts. kind 0: cumulative
    counts; 1: counts; else: pairs (expert, count) of experts with rows, then zeros."""
    ids = torch.arange(*bounds, device=expert.device)
    counts = (expert.unsqueeze(0) == ids.unsqueeze(1)).sum(1)
    if kind == 0:
        return counts.cumsum(0)
    if kind == 1:
        return counts
    first = (counts == 0).to(torch.int8).argsort(stable=True)  # experts with rows, in order
    pairs = torch.stack((ids, counts), 1)[first].masked_fill((counts[first] == 0).unsqueeze(1), 0)
    return torch.nn.functional.pad(pairs, (0, 0, 0, experts - len(ids)))


@computed(routing.FINALIZE)
def npu_moe_finalize_routing(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int | None,
    k: int | None,
) -> Tensor:
    width = expanded_permuted_rows.shape[-1]
    choices = (1 if k is None else k) if scales is None else scales.shape[1]
    tokens = expanded_src_to_dst_row.numel() // max(choices, 1)
    place = expanded_src_to_dst_row
    if drop_pad_mode not in (2, 3):
        place = place.reshape(choices, tokens).T.flatten()
    rows = taken(expanded_permuted_rows.flatten(0, -2), place).reshape(tokens, choices, width).float()
    if bias is not None and export_for_source_row is not None:
        rows = rows + bias.float()[export_for_source_row.long()]
    out = (rows if scales is None else rows * scales.unsqueeze(-1)).sum(1)
    for skip in (skip1, skip2):
        out = out if skip is None else out + skip
    return out.to(expanded_permuted_rows.dtype)
