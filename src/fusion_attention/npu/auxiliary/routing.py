"""torch_npu's choice of experts, and the rows that it makes of it, in torch's own operators; float32 inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch

from fusion_attention.npu.auxiliary.call import checked
from fusion_attention.npu.auxiliary.experts import taken
from fusion_attention.npu.auxiliary.quantised import rounded, row_scales
from fusion_attention.ops.auxiliary import routing

__all__ = [
    "npu_moe_finalize_routing",
    "npu_moe_gating_top_k",
    "npu_moe_gating_top_k_softmax",
    "npu_moe_init_routing_v2",
]

Tensor = torch.Tensor


def _largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row and where they are, the first of equals first."""
    values, index = scores.sort(dim=-1, descending=True, stable=True)
    return values[..., :k], index[..., :k]


def npu_moe_gating_top_k_softmax(
    x: Tensor, finished: Tensor | None = None, k: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """The k best experts of every token by softmax.

    y, expert = the k largest of softmax(x), the first of equals first

    Args:
        x: scores [T, E] or [B, T, E]; float16, bfloat16 or float32.
        finished: bool [T]: tokens that take part no more, whose experts are E.
        k: how many experts a token has.

    Returns:
        (y in the dtype of x, expert_idx int32, row_idx int32): j * T + i for choice j of token i. y is differentiable.

    Raises:
        ContractError: a call that `fusion-attention ops npu_moe_gating_top_k_softmax` does not allow.

    Source: Ascend op-plugin, npu_moe_gating_top_k_softmax.

    Example:
        >>> y, expert, row = npu_moe_gating_top_k_softmax(torch.tensor([[0.0, 2.0, 1.0], [5.0, 0.0, 0.0]]), k=2)
        >>> expert.tolist(), row.tolist()
        ([[1, 2], [0, 1]], [[0, 2], [1, 3]])
    """
    k = checked(routing.SOFTMAX, {"x": x, "finished": finished, "k": k})["k"]
    y, expert = _largest(x.float().softmax(-1), k)
    if finished is not None:
        expert = torch.where(finished.unsqueeze(-1), x.shape[-1], expert)
    tokens = expert[..., 0].numel()
    row = torch.arange(tokens * k, dtype=torch.int32, device=x.device).view(k, tokens).T.reshape(expert.shape)
    return y.to(x.dtype), expert.to(torch.int32), row


def npu_moe_gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    """The k best experts of every token, within its best groups of experts.

    out = softmax(x) or sigmoid(x);  chosen = the k largest of out + bias within the k_group best groups
    y = routed_scaling_factor * out[chosen], divided by sum + eps after a sigmoid

    Args:
        x: scores [T, E]; float16, bfloat16 or float32.
        k: how many experts a token has.
        bias: [E]; counts where experts are chosen, not in their weights.
        input_ids, tid2eid: of a table of experts: not computed here.
        k_group, group_count: how many groups are kept, of how many.
        group_select_mode: a group's score. 0: its best; 1: the sum of its two best.
        renorm: reserved.
        norm_type: 0: softmax; 1: sigmoid.
        out_flag: whether out is wanted; it is there in any case.
        routed_scaling_factor, eps: as the formula has them.

    Returns:
        (y [T, k] in the dtype of x, expert_idx int32 [T, k], out float32 [T, E]). y and out are differentiable.

    Raises:
        ContractError: a call that `fusion-attention ops npu_moe_gating_top_k` does not allow.

    Source: Ascend op-plugin, npu_moe_gating_top_k.

    Example:
        >>> scores = torch.tensor([[0.1, 0.2, 3.0, 2.0]])
        >>> y, expert, _ = npu_moe_gating_top_k(scores, 2, k_group=1, group_count=2, norm_type=1)
        >>> expert.tolist(), round(y.sum().item(), 6)
        ([[2, 3]], 1.0)
    """
    given = checked(routing.GATING, {
        "x": x, "k": k, "bias": bias, "input_ids": input_ids, "tid2eid": tid2eid, "k_group": k_group,
        "group_count": group_count, "group_select_mode": group_select_mode, "renorm": renorm,
        "norm_type": norm_type, "out_flag": out_flag, "routed_scaling_factor": routed_scaling_factor, "eps": eps,
    })  # fmt: skip
    groups, sigmoid = given["group_count"], given["norm_type"] == 1
    out = x.float().sigmoid() if sigmoid else x.float().softmax(-1)
    scores = out.detach() if bias is None else out.detach() + bias.float()
    if groups > 1:
        grouped = scores.unflatten(-1, (groups, -1))
        best = _largest(grouped, 2)[0].sum(-1) if given["group_select_mode"] else grouped.amax(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, _largest(best, given["k_group"])[1], True)
        scores = grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(-2)
    expert = _largest(scores, k)[1]
    y = out.gather(-1, expert)
    if sigmoid:
        y = y / (y.sum(-1, keepdim=True) + given["eps"])
    return (y * given["routed_scaling_factor"]).to(x.dtype), expert.to(torch.int32), out


def npu_moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Annotated[Sequence[int], 2] | int = (),
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The rows of tokens in the order of experts, how many each expert has, and perhaps the rows as int8.

    order = stable sort of the choices by expert, those below the active ones last
    expanded_x[i] = x[order[i] // K],  expanded_row_idx[order[i]] = i

    Args:
        x: [T, H]; float16, bfloat16, float32 or int8.
        expert_idx: the experts of every token, int32 or int64 [T, K].
        scale: float32. Without quantisation: [T], carried along; dynamic: factors of the elements, [experts, H] or
            [1, H]; static: [1]. Without elements it is absent.
        offset: float32 [1], static quantisation.
        active_num: at most so many rows; -1 and 0: all. expert_num: how many experts there are.
        expert_capacity, drop_pad_mode, x_dtype: only their defaults are computed here.
        expert_tokens_num_type: 0: cumulative counts; 1: a count of each active expert; 2: pairs (expert, count).
        expert_tokens_num_flag: whether counts are wanted.
        quant_mode: -1: none; 0: static; 1: each row by its own largest element.
        active_expert_range: [start, end) of the experts that count; empty: all. One number is both, and no range.
        row_idx_type: 0: the place of each choice, -1 without one; 1: the choice at each place; behind those of active
            experts those of higher ones, in their order, then those of lower ones.

    Returns:
        (expanded_x [rows, H], expanded_row_idx int32 [T*K], counts int64, expanded_scale float32 [rows]). What the chip
        leaves undefined is 0: rows and scales behind those of active experts.

    Raises:
        ContractError: a call that `fusion-attention ops npu_moe_init_routing_v2` does not allow.

    Source: Ascend op-plugin, npu_moe_init_routing_v2.

    Example:
        >>> x, ids = torch.tensor([[1.0], [2.0]]), torch.tensor([[1, 0], [1, 2]], dtype=torch.int32)
        >>> rows, places, counts, _ = npu_moe_init_routing_v2(
        ...     x, ids, expert_num=3, expert_tokens_num_type=1, expert_tokens_num_flag=True)
        >>> rows[:, 0].tolist(), places.tolist(), counts.tolist()
        ([1.0, 1.0, 2.0, 2.0], [1, 0, 2, 3], [1, 2, 1])
    """
    if isinstance(active_expert_range, int):
        active_expert_range = (active_expert_range, active_expert_range)
    scale, offset = (None if isinstance(t, Tensor) and t.numel() == 0 else t for t in (scale, offset))
    given = checked(routing.INIT, {
        "x": x, "expert_idx": expert_idx, "scale": scale, "offset": offset, "active_num": active_num,
        "expert_capacity": expert_capacity, "expert_num": expert_num, "drop_pad_mode": drop_pad_mode,
        "expert_tokens_num_type": expert_tokens_num_type, "expert_tokens_num_flag": expert_tokens_num_flag,
        "quant_mode": quant_mode, "active_expert_range": active_expert_range, "row_idx_type": row_idx_type,
        "x_dtype": x_dtype,
    })  # fmt: skip
    start, end = tuple(active_expert_range or ()) or (0, expert_num)
    expert = expert_idx.flatten().long()
    active = (expert >= start) & (expert < end)
    order = torch.where(expert < start, torch.iinfo(torch.int32).max, expert).argsort(stable=True)
    expert = torch.where(active, expert, end)
    rows = order.numel() if given["active_num"] <= 0 else min(given["active_num"], order.numel())
    first = order[:rows]
    token = first // max(expert_idx.shape[1], 1)
    result, scales = _expanded(
        x[token], active[first], scale, offset, given["quant_mode"], token, expert[first] - start
    )
    choices = order if given["row_idx_type"] else torch.where(active, order.argsort(), -1)
    counts = _counts(expert, (start, end), given) if given["expert_tokens_num_flag"] else expert.new_zeros(0)
    return result, choices.to(torch.int32), counts, scales


def _expanded(
    rows: Tensor, there: Tensor, scale: Tensor | None, offset: Tensor | None, mode: int, token: Tensor, expert: Tensor
) -> tuple[Tensor, Tensor]:
    """(rows, perhaps as int8, and their scales); what is not there is 0."""
    result = rows.masked_fill(~there.unsqueeze(1), 0)
    scales = rows.new_zeros(len(rows), dtype=torch.float32)
    if mode == 0 and scale is not None and offset is not None:
        return rounded((result.float() * scale + offset).masked_fill(~there.unsqueeze(1), 0), 127), scales
    if mode == 1:
        wide = result.float()
        if scale is not None:
            wide = wide * scale[expert.clamp(max=scale.shape[0] - 1)]
        scales = row_scales(wide, 127, (-1,))
        return rounded(wide / torch.where(scales == 0, 1.0, scales).unsqueeze(1), 127), scales
    return result, scales if scale is None else scale[token].masked_fill(~there, 0)


def _counts(expert: Tensor, bounds: tuple[int, ...], given: Mapping[str, Any]) -> Tensor:
    """How many rows each active expert has, as expert_tokens_num_type says."""
    kind = given["expert_tokens_num_type"]
    ids = torch.arange(*bounds, device=expert.device)
    counts = (expert.unsqueeze(0) == ids.unsqueeze(1)).sum(1)
    if kind == 0:
        return counts.cumsum(0)
    if kind == 1:
        return counts
    first = (counts == 0).to(torch.int8).argsort(stable=True)  # those that have any, in their order
    pairs = torch.stack((ids, counts), 1)[first].masked_fill((counts[first] == 0).unsqueeze(1), 0)
    return torch.nn.functional.pad(pairs, (0, 0, 0, given["expert_num"] - len(ids)))


def npu_moe_finalize_routing(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> Tensor:
    """Each token's sum over the rows that its experts made, weighted, with biases of the experts and residuals.

    out[i] = skip1[i] + skip2[i] + sum_j scales[i, j] * (rows[place(i, j)] + bias[expert[i, j]])

    Args:
        expanded_permuted_rows: [rows, H], or [E, C, H] in drop_pad_mode 1 and 3.
        skip1, skip2: [T, H].
        bias: [E, H], for which export_for_source_row says the experts.
        scales: [T, K].
        expanded_src_to_dst_row: the row of every choice, int32 [T*K]; rows that are not there count as zeros.
        export_for_source_row: int32 [T, K].
        drop_pad_mode: 0, 1: choice j of token i stands at j * T + i; 2, 3: at i * K + j.
        k: K, where there are no scales.

    Returns:
        [T, H] in the dtype of the rows; differentiable in rows, skips, bias and scales.

    Raises:
        ContractError: a call that `fusion-attention ops npu_moe_finalize_routing` does not allow.

    Source: Ascend op-plugin, npu_moe_finalize_routing.

    Example:
        >>> rows, places = torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.tensor([0, 1, 2, 3], dtype=torch.int32)
        >>> npu_moe_finalize_routing(rows, None, None, None, torch.ones(2, 2), places, None, 2)[:, 0].tolist()
        [3.0, 7.0]
    """
    checked(
        routing.FINALIZE,
        {
            "expanded_permuted_rows": expanded_permuted_rows,
            "skip1": skip1,
            "skip2": skip2,
            "bias": bias,
            "scales": scales,
            "expanded_src_to_dst_row": expanded_src_to_dst_row,
            "export_for_source_row": export_for_source_row,
            "drop_pad_mode": drop_pad_mode,
            "k": k,
        },
    )
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
