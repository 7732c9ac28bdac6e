"""torch_npu's permutations of tokens into the order of their experts and back, computed by torch's operators.

Sums over a token's rows are computed in float32 and rounded once. A row whose index is out of range is zero.
"""

from collections.abc import Sequence

import torch

from fusion_attention.npu.auxiliary.call import as_given, computed
from fusion_attention.npu.auxiliary.saved import Some, keeping
from fusion_attention.ops.auxiliary_definitions import token_permute

Tensor = torch.Tensor


def taken(rows: Tensor, index: Tensor) -> Tensor:
    """Returns rows[index], [len(index), elements], with zeros for an index out of range."""
    there = (index >= 0) & (index < rows.shape[0])
    if rows.shape[0] == 0:
        return rows.new_zeros(index.shape[0], rows.shape[1])
    return rows.index_select(0, torch.where(there, index, 0)).masked_fill_(~there.unsqueeze(1), 0)


def _spread(tokens: Tensor, choices: int, order: Tensor, positions: Tensor) -> Tensor:
    """Returns [rows, elements], the tokens in the order of experts: row i is the token of choice order[i]. Each token
    has `choices` choices of an expert.

    The gradient sums over the choices of a token in float32.

    Args:
        tokens: [T, elements].
        choices: experts per token.
        order: int [rows]; choice t * choices + c is the c-th of token t.
        positions: the inverse of order, which the gradient reads.
    """
    count = tokens.shape[0]

    def compute(tokens: Tensor) -> tuple[tuple[Tensor], Some]:
        return (tokens.unsqueeze(1).expand(-1, choices, -1)[order // choices, order % choices],), (positions,)

    (rows,) = keeping(compute, lambda _, dy, positions: (_sum_of_choices(dy, positions, count, choices),), tokens)
    return rows


def _sum_of_choices(rows: Tensor, positions: Tensor, count: int, choices: int) -> Tensor:
    """Returns [count, elements] for `count` tokens: the sum of each token's rows, computed in float32.

    rows: [rows, elements], in the order of experts. positions: int [count * choices], the row of each token's choice.
    """
    return taken(rows, positions).unflatten(0, (count, choices)).sum(1, dtype=torch.float32).to(rows.dtype)


@computed(token_permute.PERMUTE)
def npu_moe_token_permute(tokens: Tensor, indices: Tensor, num_out_tokens: int | None) -> tuple[Tensor, Tensor]:
    order = indices.flatten().argsort(stable=True)
    retained = order[:num_out_tokens] if num_out_tokens else order
    choices = 1 if indices.dim() == 1 else indices.shape[1]
    positions = order.argsort().to(torch.int32)
    return _spread(tokens, choices, retained, positions), positions


@computed(token_permute.PERMUTE_GRAD)
def npu_moe_token_permute_grad(
    tokens: Tensor, grad_permuted_tokens: Tensor, indices: Tensor, sorted_indices: Tensor
) -> Tensor:
    choices = 1 if indices.dim() == 1 else indices.shape[1]
    return _sum_of_choices(grad_permuted_tokens, sorted_indices, tokens.shape[0], choices)


def _weighed(permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor | None) -> Tensor:
    """Returns [T, elements], the sums of tokens' rows weighted by probs [T, K]; None: each token has one row.

    permuted_tokens: rows in the order of experts. sorted_indices: int [T * K], the row of each of a token's choices.
    """
    count = permuted_tokens.shape[0]

    def compute(permuted: Tensor, probs: Tensor | None) -> tuple[tuple[Tensor], Some]:
        rows = taken(permuted, sorted_indices)
        if probs is not None:
            of_tokens = rows.reshape(*probs.shape, rows.shape[1])
            rows = (of_tokens * probs.float().unsqueeze(-1)).sum(1).to(rows.dtype)
        return (rows,), (sorted_indices, probs, permuted if probs is not None and probs.requires_grad else None)

    def gradient(
        wanted: tuple[bool, bool], dy: Tensor, positions: Tensor, probs: Tensor | None, permuted: Tensor | None
    ) -> Some:
        return (
            _of_permuted(dy, positions, probs, count) if wanted[0] else None,
            None if probs is None or permuted is None else _of_probs(dy, positions, probs, permuted),
        )

    (rows,) = keeping(compute, gradient, permuted_tokens, probs)
    return rows


npu_moe_token_unpermute = computed(token_permute.UNPERMUTE)(_weighed)


def _of_permuted(dy: Tensor, positions: Tensor, probs: Tensor | None, count: int) -> Tensor:
    """Returns the gradient of rows in the order of experts, [count, elements], from dy [T, elements]; positions: int [T
    * K], the row of each token's choice; probs: weights [T, K], or None for one row per token."""
    weighed = dy if probs is None else (dy.unsqueeze(1) * probs.unsqueeze(-1)).flatten(0, 1).to(dy.dtype)
    there = (positions >= 0) & (positions < count)
    result = dy.new_zeros(count + 1, dy.shape[1])  # the last row collects rows out of range
    with as_given(result):
        return result.index_add_(0, torch.where(there, positions, count), weighed)[:-1]


def _of_probs(dy: Tensor, positions: Tensor, probs: Tensor, permuted: Tensor) -> Tensor:
    """Returns the gradient of the weights probs [T, K] from dy [T, elements]; permuted: rows in the order of experts;
    positions: int [T * K], the row of each token's choice."""
    rows = taken(permuted, positions).reshape(*probs.shape, permuted.shape[1])
    return (rows * dy.float().unsqueeze(1)).sum(-1).to(probs.dtype)


@computed(token_permute.UNPERMUTE_GRAD)
def npu_moe_token_unpermute_grad(
    permuted_tokens: Tensor, grad_unpermuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    rows = _of_permuted(grad_unpermuted_tokens, sorted_indices, probs, permuted_tokens.shape[0])
    weights = None if probs is None else _of_probs(grad_unpermuted_tokens, sorted_indices, probs, permuted_tokens)
    return rows, weights


@computed(token_permute.PERMUTE_MAP)
def npu_moe_token_permute_with_routing_map(
    tokens: Tensor, routing_map: Tensor, probs: Tensor | None, num_out_tokens: int | None, drop_and_pad: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    count, experts_ = routing_map.shape
    rows = count if num_out_tokens is None else num_out_tokens
    by_expert = routing_map.bool().T
    if drop_and_pad:
        capacity = rows // experts_ if experts_ else 0
        token = by_expert.to(torch.int8).argsort(stable=True, dim=1, descending=True)[:, :capacity].flatten()
        expert = torch.arange(experts_, device=token.device).repeat_interleave(token.numel() // max(experts_, 1))
        positions, permuted = token, tokens.float().index_select(0, token).to(tokens.dtype)
    else:
        choices = rows // count if count else 0
        flat = by_expert.flatten().to(torch.int8).argsort(stable=True, descending=True)[: choices * count]
        expert, token = flat // max(count, 1), flat % max(count, 1)
        positions = token.argsort(stable=True)
        permuted = _spread(tokens, choices, positions.argsort(), positions.to(torch.int32)) if choices else tokens[:0]
    weights = None if probs is None else probs[token, expert]
    return permuted, weights, positions.to(torch.int32)


@computed(token_permute.UNPERMUTE_MAP)
def npu_moe_token_unpermute_with_routing_map(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: Sequence[int],
    probs: Tensor | None,
    routing_map: Tensor | None,
    drop_and_pad: bool,
) -> Tensor:
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
