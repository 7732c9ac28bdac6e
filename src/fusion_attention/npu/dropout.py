"""torch_npu's function that draws a dropout mask, and a check that a given mask equals the mask drawn from a seed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from fusion_attention.contract import ContractError, ContractWarning, Failure, outside, show
from fusion_attention.ir.dropout import drawn_bits, keep_from_bits, keep_from_philox
from fusion_attention.ops.shared.layouts import LAYOUTS, bits_view
from fusion_attention.ops.training.lowered_call import EXTRAS, DenseCall
from fusion_attention.settings import current
from fusion_attention.torch_ops.device_aliases import aliased

__all__ = ["_npu_dropout_gen_mask"]

_ALIGNED = 128  # bits: the length of a mask is a multiple of this
_GLANCE = 4096  # number of keys that glance_at_mask() compares in each row


@aliased
def _npu_dropout_gen_mask(
    input: torch.Tensor,
    size: Sequence[int],
    p: float,
    seed: int,
    offset: int,
    *,
    parallel: bool | None = True,
    sync: bool | None = None,
) -> torch.Tensor:
    """Returns the dropout mask that attention draws from (seed, offset), as bits.

        bit i = 1 if the probability of score i is kept;  i = ((b * N1 + n) * S1 + row) * S2 + key

    Args:
        input: a tensor on the mask's device; its content is not read.
        size: [B, N1, S1, S2], or [N1, S1, S2] of one sequence. The mask then equals the one that attention and its
            gradient functions draw for keep_prob = 1 - p and (seed, offset). Of other sizes, the last axis counts keys
            and the axis before rows; [numels] is one row.
        p: probability of dropping, 0 to 1.
        seed, offset: of the generator; unsigned seeds are allowed.
        parallel, sync: accepted without effect.

    Returns:
        uint8, least significant bit first, padded with 0 to a multiple of 128 bits.

    Raises:
        ContractError: a wrong size, probability, seed or offset.

    Source: Ascend op-plugin, _npu_dropout_gen_mask. The chip's generator draws other bits (docs/rulings.md 9).

    Example:
        >>> q = torch.randn(2, 5, 4, 16)
        >>> mask = _npu_dropout_gen_mask(q, [2, 4, 5, 5], 0.25, seed=3, offset=0)
        >>> mask.dtype, len(mask)
        (torch.uint8, 32)
    """
    size = [_number(n) for n in size] if isinstance(size, list | tuple) else size
    p, seed, offset = (_number(value) for value in (p, seed, offset))
    failures = list(_failures(input, size, p, seed, offset))
    if failures:
        raise ContractError([Failure("_npu_dropout_gen_mask", *failure) for failure in failures])
    bits = drawn_bits(size, 1.0 - p, seed, offset, input.device)
    length = -(-torch.Size(size).numel() // _ALIGNED) * _ALIGNED // 8
    return torch.nn.functional.pad(bits, (0, length - len(bits)))


def _number(value: Any) -> Any:
    one = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta
    return value.item() if one or isinstance(value, np.generic) else value


def _failures(input: Any, size: Any, p: Any, seed: Any, offset: Any) -> Iterator[tuple[str, str, str]]:
    """Yields texts (parameter name, expected, given value) for each invalid argument of _npu_dropout_gen_mask()."""

    def is_integer(value: Any, low: int, high: int) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and low <= value < high

    if not isinstance(input, torch.Tensor):
        yield "input", "a tensor", show(input)
    if not isinstance(size, (list, tuple)) or not all(is_integer(n, 0, 1 << 63) for n in size):
        yield "size", "a list of sizes", show(size)
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 <= p <= 1:
        yield "p", "a number from 0 to 1", show(p)
    if not is_integer(seed, -(1 << 63), 1 << 64):
        yield "seed", "an int below 2**64", show(seed)
    if not is_integer(offset, 0, 1 << 32):
        yield "offset", "0 <= offset < 2**32", show(offset)


def glance_at_mask(op: str, call: DenseCall) -> None:
    """Warns (strict: raises) if the dropout mask passed to the attention operator `op` is not the one its seed draws.

    One row of each head is compared. Autograd saves the given mask, but the gradient functions draw a mask from the
    seed that the forward returns.
    """
    p, e = call.problem, call.extents
    some = np.flatnonzero((e.q_len > 0) & (e.kv_len > 0))
    mask = call.extras[EXTRAS.index("drop_bits")]
    if mask is None or mask.is_meta or not len(some):
        return
    b, token = int(some[-1]), LAYOUTS[call.form.layout][1]
    view = bits_view(mask, p.heads_q, call.form, (call.q.shape[token], call.k.shape[token]), e)
    rows, keys = slice(int(e.q_len[b]) - 1, int(e.q_len[b])), slice(0, min(int(e.kv_len[b]), _GLANCE))
    drawn = keep_from_philox(call.seed, call.offset, p.keep_prob, b * p.heads_q, p.heads_q, rows, keys)
    if not torch.equal(keep_from_bits(view, b, p.heads_q, rows, keys).cpu(), drawn):
        expected = f"the bits that seed={call.seed}, offset={call.offset} draw, as the gradient functions will"
        advice = "draw it by _npu_dropout_gen_mask(query, [B, N1, S1, S2], ...); autograd keeps the mask itself"
        failure = Failure(op, "dropout_mask", expected, "others", advice)
        if current().strict:
            raise ContractError([failure])
        warnings.warn(str(failure), ContractWarning, stacklevel=outside())
