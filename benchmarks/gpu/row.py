"""What is timed, as a row of the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Call = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One thing computed by ours and by peers; flops and bytes of ours, bytes 0 where they are not the limit."""

    group: str
    name: str
    ours: Call
    peers: dict[str, Call]
    flops: int
    bytes: int = 0
