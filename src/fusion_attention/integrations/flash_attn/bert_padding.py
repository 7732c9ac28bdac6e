"""flash_attn.bert_padding: differentiable conversion between padded and packed tensors."""

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Returns input[indices]: selected rows of the first axis."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Returns [first_axis_dim, ...] with the values in the rows of `indices`, and zeros in other rows."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_put((indices,), values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (input[indices], input)."""
    return input.index_select(0, indices), input


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs the tokens that a mask selects.

    Args:
        hidden_states: [B, S, ...].
        attention_mask: [B, S], 1 for a token and 0 for padding.
        unused_mask: [B, S], 1 for padding that is packed too, but not counted in the last result.

    Returns:
        (packed tokens [T, ...], their indices [T] in the flattened axes [B * S], cumulative lengths [B + 1] as int32,
        largest length, number of tokens per sequence [B] as int32).

    Example:
        >>> tokens, indices, ends, longest, counts = unpad_input(
        ...     torch.randn(2, 3, 8), torch.tensor([[1, 1, 0], [1, 1, 1]])
        ... )
        >>> tokens.shape, ends.tolist(), longest
        (torch.Size([5, 8]), [0, 2, 5], 3)
    """
    mask_total = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = mask_total.sum(-1, dtype=torch.int32)
    used = attention_mask.sum(-1, dtype=torch.int32)
    indices = mask_total.flatten().nonzero().flatten()
    return hidden_states.flatten(0, 1).index_select(0, indices), indices, _ends(lengths), _longest(lengths), used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Packs the tokens of a batch whose items contain several sequences each, one after another.

    Args:
        hidden_states: [B, S, ...].
        attention_mask_in_length: [B, S]: the lengths of an item's sequences, then zeros.

    Returns:
        (packed tokens [T, ...], their indices [T] in the flattened axes [B * S], cumulative lengths as int32, largest
        length).
    """
    rows, columns = attention_mask_in_length.sum(-1), attention_mask_in_length.shape[-1]
    is_token = torch.arange(columns, device=rows.device) < rows[:, None]
    lengths = attention_mask_in_length.flatten()
    lengths = lengths[lengths != 0]
    indices = is_token.flatten().nonzero().flatten()
    return hidden_states.flatten(0, 1).index_select(0, indices), indices, _ends(lengths), _longest(lengths)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Unpacks tokens [T, ...] to their positions in [batch, seqlen, ...]; other positions are zero."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _ends(lengths: Tensor) -> Tensor:
    return F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _longest(lengths: Tensor) -> int:
    return int(lengths.max()) if lengths.numel() else 0
