"""torch_npu's permutations of tokens between themselves and their experts, in torch's own operators.

Sums over the rows of a token are formed in float32 and rounded once. Rows whose place is not there are zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusion_attention.npu.auxiliary.call import as_given, checked
from fusion_attention.npu.auxiliary.kept import Some, keeping
from fusion_attention.ops.auxiliary import experts

__all__ = [
    "npu_moe_token_permute",
    "npu_moe_token_permute_grad",
    "npu_moe_token_permute_with_routing_map",
    "npu_moe_token_unpermute",
    "npu_moe_token_unpermute_grad",
    "npu_moe_token_unpermute_with_routing_map",
]

Tensor = torch.Tensor


def taken(rows: Tensor, index: Tensor) -> Tensor:
    """rows[index]; zeros where there is no such row."""
    there = (index >= 0) & (index < rows.shape[0])
    if rows.shape[0] == 0:
        return rows.new_zeros(index.shape[0], rows.shape[1])
    return rows.index_select(0, torch.where(there, index, 0)).masked_fill_(~there.unsqueeze(1), 0)


def _spread(tokens: Tensor, choices: int, order: Tensor, places: Tensor) -> Tensor:
    """The row of choice order[i] for every i, choices being counted token by token; gradients are summed once.

    places: order turned round, which is what the gradient reads.
    """
    count = tokens.shape[0]

    def compute(tokens: Tensor) -> tuple[tuple[Tensor], Some]:
        return (tokens.unsqueeze(1).expand(-1, choices, -1)[order // choices, order % choices],), (places,)

    (rows,) = keeping(compute, lambda _, dy, places: (_sum_of_choices(dy, places, count, choices),), tokens)
    return rows


def _sum_of_choices(rows: Tensor, places: Tensor, count: int, choices: int) -> Tensor:
    """The sum of every token's rows."""
    return taken(rows, places).unflatten(0, (count, choices)).sum(1, dtype=torch.float32).to(rows.dtype)


def npu_moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """The rows of tokens, one for every choice of an expert, in the order of experts.

    order = stable sort of the choices by expert
    permuted[i] = tokens[order[i] // K],  sorted[order[i]] = i

    Args:
        tokens: [T, H].
        indices: the experts of every token, int32 or int64 [T, K], or [T].
        num_out_tokens: how many rows are kept; None or 0: all; below 0: all but so many.
        padded_mode: False: the chip takes nothing else.

    Returns:
        (permuted_tokens [num_out_tokens, H], sorted_indices int32 [T*K]): where the row of each choice lies, for
        npu_moe_token_unpermute. The first is differentiable in tokens.

    Raises:
        ContractError: a call that `fusion-attention ops npu_moe_token_permute` does not allow.

    Source: Ascend op-plugin, npu_moe_token_permute.

    Example:
        >>> tokens = torch.tensor([[1.0], [2.0], [3.0], [0.0]])
        >>> rows, places = npu_moe_token_permute(tokens, torch.tensor([[0, 4], [4, 3], [4, 2], [1, 1]]))
        >>> rows[:, 0].tolist(), places.tolist()
        ([1.0, 0.0, 0.0, 3.0, 2.0, 1.0, 2.0, 3.0], [0, 5, 6, 4, 7, 3, 1, 2])
    """
    checked(
        experts.PERMUTE,
        {"tokens": tokens, "indices": indices, "num_out_tokens": num_out_tokens, "padded_mode": padded_mode},
    )
    order = indices.flatten().argsort(stable=True)
    kept = order[:num_out_tokens] if num_out_tokens else order
    choices = 1 if indices.dim() == 1 else indices.shape[1]
    places = order.argsort().to(torch.int32)
    return _spread(tokens, choices, kept, places), places


def npu_moe_token_permute_grad(
    tokens: Tensor, grad_permuted_tokens: Tensor, indices: Tensor, sorted_indices: Tensor, padded_mode: bool = False
) -> Tensor:
    """The gradient of npu_moe_token_permute.

    grad_tokens[t] = sum_k grad_permuted[sorted[t * K + k]]

    Args:
        tokens, indices, padded_mode: of the forward.
        grad_permuted_tokens: gradient of permuted_tokens.
        sorted_indices: what the forward returned.

    Returns:
        The gradient of tokens.

    Raises:
        ContractError: a call that `fusion-attention ops npu_moe_token_permute_grad` does not allow.

    Source: Ascend op-plugin, npu_moe_token_permute_grad.

    Example:
        >>> tokens, indices = torch.randn(3, 2, requires_grad=True), torch.tensor([[0, 1], [1, 2], [2, 0]])
        >>> rows, places = npu_moe_token_permute(tokens, indices)
        >>> rows.sum().backward()
        >>> torch.equal(npu_moe_token_permute_grad(tokens.detach(), torch.ones(6, 2), indices, places), tokens.grad)
        True
    """
    checked(
        experts.PERMUTE_GRAD,
        {
            "tokens": tokens,
            "grad_permuted_tokens": grad_permuted_tokens,
            "indices": indices,
            "sorted_indices": sorted_indices,
            "padded_mode": padded_mode,
        },
    )
    choices = 1 if indices.dim() == 1 else indices.shape[1]
    return _sum_of_choices(grad_permuted_tokens, sorted_indices, tokens.shape[0], choices)


def npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> Tensor:
    """Each token's sum over the rows that its experts made, weighted.

    out[t] = sum_k probs[t, k] * permuted[sorted[t * K + k]]

    Args:
        permuted_tokens: [rows, H].
        sorted_indices: [T*K], as npu_moe_token_permute returned it. Rows that are not there count as zeros.
        probs: [T, K], perhaps in another dtype; None: K is 1 and every weight too.
        padded_mode, restore_shape: False and None: the chip takes nothing else.

    Returns:
        [T, H] in the dtype of permuted_tokens; differentiable in permuted_tokens and probs. Without probs nothing of
        permuted_tokens is kept for the backward.

    Raises:
        ContractError: a call that `fusion-attention ops npu_moe_token_unpermute` does not allow.

    Source: Ascend op-plugin, npu_moe_token_unpermute.

    Example:
        >>> tokens, indices = torch.randn(3, 2), torch.tensor([[0, 1], [1, 2], [2, 0]])
        >>> rows, places = npu_moe_token_permute(tokens, indices)
        >>> torch.equal(npu_moe_token_unpermute(rows, places, torch.full((3, 2), 0.5)), tokens)
        True
    """
    checked(
        experts.UNPERMUTE,
        {
            "permuted_tokens": permuted_tokens,
            "sorted_indices": sorted_indices,
            "probs": probs,
            "padded_mode": padded_mode,
            "restore_shape": restore_shape,
        },
    )
    return _weighed(permuted_tokens, sorted_indices, probs)


def _weighed(permuted: Tensor, places: Tensor, probs: Tensor | None) -> Tensor:
    """The sum of every token's rows, weighted by probs [T, K]; None: of the one row that it has."""
    count = permuted.shape[0]

    def compute(permuted: Tensor, probs: Tensor | None) -> tuple[tuple[Tensor], Some]:
        rows = taken(permuted, places)
        if probs is not None:
            of_tokens = rows.reshape(*probs.shape, rows.shape[1])
            rows = (of_tokens * probs.float().unsqueeze(-1)).sum(1).to(rows.dtype)
        return (rows,), (places, probs, permuted if probs is not None and probs.requires_grad else None)

    def gradient(
        wanted: tuple[bool, bool], dy: Tensor, places: Tensor, probs: Tensor | None, permuted: Tensor | None
    ) -> Some:
        return (
            _of_permuted(dy, places, probs, count) if wanted[0] else None,
            None if probs is None or permuted is None else _of_probs(dy, places, probs, permuted),
        )

    (rows,) = keeping(compute, gradient, permuted, probs)
    return rows


def _of_permuted(dy: Tensor, places: Tensor, probs: Tensor | None, count: int) -> Tensor:
    """The gradient of the permuted rows, of which there are so many."""
    weighed = dy if probs is None else (dy.unsqueeze(1) * probs.unsqueeze(-1)).flatten(0, 1).to(dy.dtype)
    there = (places >= 0) & (places < count)
    result = dy.new_zeros(count + 1, dy.shape[1])  # one for lost rows
    with as_given(result):
        return result.index_add_(0, torch.where(there, places, count), weighed)[:-1]


def _of_probs(dy: Tensor, places: Tensor, probs: Tensor, permuted: Tensor) -> Tensor:
    """The gradient of the weights."""
    rows = taken(permuted, places).reshape(*probs.shape, permuted.shape[1])
    return (rows * dy.float().unsqueeze(1)).sum(-1).to(probs.dtype)


def npu_moe_token_unpermute_grad(
    permuted_tokens: Tensor,
    grad_unpermuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gradients of npu_moe_token_unpermute.

    dpermuted[sorted[t * K + k]] = probs[t, k] * dout[t]
    dprobs[t, k] = sum over H of dout[t] * permuted[sorted[t * K + k]]

    Args:
        permuted_tokens, sorted_indices, probs, padded_mode, restore_shape: of the forward.
        grad_unpermuted_tokens: gradient of the output.

    Returns:
        (dpermuted, dprobs), dprobs None without probs.

    Raises:
        ContractError: a call that `fusion-attention ops npu_moe_token_unpermute_grad` does not allow.

    Source: Ascend op-plugin, npu_moe_token_unpermute_grad.

    Example:
        >>> rows, places = torch.randn(6, 2), torch.tensor([0, 2, 1, 4, 3, 5])
        >>> drows, dprobs = npu_moe_token_unpermute_grad(rows, torch.ones(3, 2), places, torch.ones(3, 2))
        >>> drows.tolist() == torch.ones(6, 2).tolist(), list(dprobs.shape)
        (True, [3, 2])
    """
    checked(
        experts.UNPERMUTE_GRAD,
        {
            "permuted_tokens": permuted_tokens,
            "grad_unpermuted_tokens": grad_unpermuted_tokens,
            "sorted_indices": sorted_indices,
            "probs": probs,
            "padded_mode": padded_mode,
            "restore_shape": restore_shape,
        },
    )
    rows = _of_permuted(grad_unpermuted_tokens, sorted_indices, probs, permuted_tokens.shape[0])
    weights = None if probs is None else _of_probs(grad_unpermuted_tokens, sorted_indices, probs, permuted_tokens)
    return rows, weights


def npu_moe_token_permute_with_routing_map(
    tokens: Tensor,
    routing_map: Tensor,
    *,
    probs: Tensor | None = None,
    num_out_tokens: int | None = None,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The rows of tokens in the order of experts, where a map says which expert takes which token.

    rows = (expert, token) for every true element, experts first
    permuted[i] = tokens[token of row i],  permuted_probs[i] = probs[token, expert of row i]

    Args:
        tokens: [T, H].
        routing_map: bool, int8 or uint8 [T, E]; as many true elements in every row.
        probs: [T, E].
        num_out_tokens: how many rows there are; None: T.
        drop_and_pad: every expert takes num_out_tokens // E rows: its tokens first, then others from the beginning.

    Returns:
        (permuted_tokens, permuted_probs or None, sorted_indices int32), for npu_moe_token_unpermute_with_routing_map.
        The first is differentiable in tokens, the second in probs.

    Raises:
        ContractError: a call that `fusion-attention ops npu_moe_token_permute_with_routing_map` does not allow.

    Source: Ascend op-plugin, npu_moe_token_permute_with_routing_map.

    Example:
        >>> where = torch.tensor([[True, False], [False, True], [True, False]])
        >>> rows, _, places = npu_moe_token_permute_with_routing_map(torch.tensor([[1.0], [2.0], [3.0]]), where)
        >>> rows[:, 0].tolist(), places.tolist()
        ([1.0, 3.0, 2.0], [0, 2, 1])
    """
    checked(
        experts.PERMUTE_MAP,
        {
            "tokens": tokens,
            "routing_map": routing_map,
            "probs": probs,
            "num_out_tokens": num_out_tokens,
            "drop_and_pad": drop_and_pad,
        },
    )
    count, experts_ = routing_map.shape
    rows = count if num_out_tokens is None else num_out_tokens
    by_expert = routing_map.bool().T
    if drop_and_pad:
        capacity = rows // experts_ if experts_ else 0
        token = by_expert.to(torch.int8).argsort(stable=True, dim=1, descending=True)[:, :capacity].flatten()
        expert = torch.arange(experts_, device=token.device).repeat_interleave(token.numel() // max(experts_, 1))
        places, permuted = token, tokens.float().index_select(0, token).to(tokens.dtype)
    else:
        choices = rows // count if count else 0
        flat = by_expert.flatten().to(torch.int8).argsort(stable=True, descending=True)[: choices * count]
        expert, token = flat // max(count, 1), flat % max(count, 1)
        places = token.argsort(stable=True)
        permuted = _spread(tokens, choices, places.argsort(), places.to(torch.int32)) if choices else tokens[:0]
    weights = None if probs is None else probs[token, expert]
    return permuted, weights, places.to(torch.int32)


def npu_moe_token_unpermute_with_routing_map(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: Sequence[int],
    *,
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    drop_and_pad: bool = False,
) -> Tensor:
    """Each token's sum over the rows that its experts made, weighted, where a map says which experts they are.

    out[t] = sum over the rows of token t of probs * permuted[row]

    Args:
        permuted_tokens: [rows, H].
        sorted_indices: [rows], as npu_moe_token_permute_with_routing_map returned it; -1 is no row.
        restore_shape: [T, H].
        probs: [T, E]; needs routing_map, unless drop_and_pad.
        routing_map: [T, E].
        drop_and_pad: of the permutation.

    Returns:
        [T, H] in the dtype of permuted_tokens; differentiable in permuted_tokens and probs.

    Raises:
        ContractError: a call that `fusion-attention ops npu_moe_token_unpermute_with_routing_map` does not allow.

    Source: Ascend op-plugin, npu_moe_token_unpermute_with_routing_map.

    Example:
        >>> tokens, where = torch.randn(3, 2), torch.tensor([[1, 1], [1, 1], [1, 1]], dtype=torch.int8)
        >>> rows, _, places = npu_moe_token_permute_with_routing_map(tokens, where, num_out_tokens=6)
        >>> torch.equal(npu_moe_token_unpermute_with_routing_map(rows, places, [3, 2]), 2 * tokens)
        True
    """
    checked(
        experts.UNPERMUTE_MAP,
        {
            "permuted_tokens": permuted_tokens,
            "sorted_indices": sorted_indices,
            "restore_shape": restore_shape,
            "probs": probs,
            "routing_map": routing_map,
            "drop_and_pad": drop_and_pad,
        },
    )
    count, width = map(int, restore_shape)
    if drop_and_pad:
        rows, token = permuted_tokens.float(), sorted_indices.long()
        if probs is not None:
            experts_ = probs.shape[1]
            expert = torch.arange(experts_, device=token.device).repeat_interleave(len(token) // max(experts_, 1))
            rows = rows * probs[token, expert].unsqueeze(1)
        return rows.new_zeros(count, width).index_add(0, token, rows).to(permuted_tokens.dtype)
    choices = len(sorted_indices) // max(count, 1)
    if probs is None or routing_map is None:
        return _weighed(permuted_tokens, sorted_indices, permuted_tokens.new_ones(count, choices))
    chosen = routing_map.bool().to(torch.int8).argsort(stable=True, dim=1, descending=True)[:, :choices]
    return _weighed(permuted_tokens, sorted_indices, probs.gather(1, chosen))
