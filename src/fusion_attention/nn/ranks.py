"""The attention functions that a layer calls, and their arguments: on one process, or with sequences over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from fusion_attention.api.attention import attention
from fusion_attention.api.sparse import indexer_loss, lightning_indexer, sparse_attention

Lengths = Sequence[int] | Tensor | None


class Ranks:
    """A process group or DeviceMesh over whose ranks sequences are sharded; schedule: the division of tokens."""

    def __init__(self, group: Any, schedule: str) -> None:
        self.group, self.schedule = group, schedule

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self  # A process group cannot be copied, so a copy of a layer uses the same ranks.


_ONE_RANK = SimpleNamespace(
    **{one.__name__: one for one in (attention, indexer_loss, lightning_indexer, sparse_attention)}
)


def functions(ranks: Ranks | None) -> Any:
    """Returns the namespace of attention functions: for one process (ranks None), or fusion_attention.distributed."""
    if ranks is None:
        return _ONE_RANK

    from fusion_attention import distributed

    return distributed


def rows_of(x: Tensor, lengths: Lengths, ranks: Ranks | None, tokens: int | None) -> dict[str, Any]:
    """Returns the keyword arguments of attention functions with the layout of x, [B, S, dim] or packed [T, dim],
    lengths and ranks. tokens: those of a complete padded sequence, if sequences are sharded."""
    rows = {"layout": "TND" if x.dim() == 2 else "BSND", "q_len": lengths, "kv_len": lengths}
    return rows if ranks is None else {**rows, "group": ranks.group, "schedule": ranks.schedule, "tokens": tokens}


def tokens_of(x: Tensor, lengths: Lengths, ranks: Ranks | None, tokens: int | None) -> int | Tensor:
    """Returns the number of tokens of x on all ranks, without padding, at least 1. lengths: tokens of each sequence, or
    None; tokens: those of a complete padded sequence, if sequences are sharded."""
    if lengths is not None:
        return lengths.sum().clamp(min=1) if isinstance(lengths, Tensor) else max(1, sum(lengths))
    count = x.shape[:-1].numel()
    if ranks is not None:
        from fusion_attention.distributed.groups import group_of

        count = x.shape[0] * tokens if tokens is not None else count * group_of(ranks.group).world
    return max(1, count)
