"""compared(): compares two runs of the benchmark, row by row, from their JSON files.

In both runs this library and the peer are timed alternately, so a change of the machine's speed affects both equally.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fusion_attention.bench.pair import REACHED

LARGEST = 64 << 20  # largest size of a file in bytes


class FiguresError(ValueError):
    """The error about a file without benchmark figures; the message is one sentence."""


@dataclass(frozen=True)
class Change:
    """The change of one benchmark between two runs: this library's times, and ratios to another library's times."""

    # group, name, peer_name: the benchmark's group, its name, and the compared library (peer).
    group: str
    name: str
    peer_name: str
    # before_ms, after_ms: time of this library in each run, in milliseconds.
    before_ms: float
    after_ms: float
    faster: float  # before_ms / after_ms
    peer_faster: float  # the peer's time before / after, which changes only with the machine's speed
    net: float  # ratio after / ratio before, where a ratio is the peer's time divided by this library's
    # "faster" or "slower" if the ranges of the ratio in the two runs do not overlap, and net differs from 1 by more
    # than between two runs of the same code; else "same".
    says: str


class Row(NamedTuple):
    """The figures of one benchmark in one run: milliseconds of two libraries, the ratio of times and its range."""

    # ours, peer: milliseconds of this library and of the compared library (peer).
    ours: float
    peer: float
    ratio: float  # median of peer's time / ours; low, high: its range without outliers
    low: float
    high: float


def compared(before: Path, after: Path) -> tuple[list[Change], list[str], list[str]]:
    """Compares the benchmark figures of two files; returns (changes of the benchmarks in both, names of those in the
    first file only, names of those in the second only).

    Raises:
        FiguresError: a file has no figures, or the files have no benchmark in common.
    """
    one, other = figures(before), figures(after)
    changes = [_change(key, one[key], other[key]) for key in one if key in other]
    if not changes:
        raise FiguresError(f"{before} and {after} have no row in common")
    only = [[": ".join(key[:2]) for key in these if key not in those] for these, those in ((one, other), (other, one))]
    return changes, only[0], only[1]


def figures(path: Path) -> dict[tuple[str, str, str], Row]:
    """Reads a file of benchmark figures; returns {(group, name, compared library): figures}.

    Raises:
        FiguresError: the file cannot be read, or bench did not write it.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise FiguresError(f"{path} has more than {LARGEST} bytes: `fusion-attention bench` did not write it")
        result = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FiguresError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise FiguresError(f"{path} is not JSON: {error}"[:300]) from None
    rows = result.get("rows") if isinstance(result, dict) else None
    if not isinstance(rows, list) or not rows:
        raise FiguresError(f"{path} has no rows: `fusion-attention bench --output` did not write it")
    return dict(_row(path, number, row) for number, row in enumerate(rows))


def _row(path: Path, number: int, row: Any) -> tuple[tuple[str, str, str], Row]:
    words = [row.get(word) for word in ("group", "name", "peer_name")] if isinstance(row, dict) else []
    values = [row.get(word) for word in ("ours_ms", "peer_ms", "ratio")] if words else []
    numbers = all(type(t) in (int, float) and math.isfinite(t) and t > 0 for t in values)
    if not words or not all(isinstance(word, str) for word in words) or not numbers:
        raise FiguresError(f"{path}: rows[{number}]: expected group, name, peer_name, and times and a ratio above zero")
    ours, peer, ratio = map(float, values)
    between = [row.get(word) for word in ("low", "high")]
    has_range = all(type(q) in (int, float) and math.isfinite(q) and q > 0 for q in between)
    low, high = map(float, between) if has_range else (ratio, ratio)  # files of older releases have no range
    return (str(words[0]), str(words[1]), str(words[2])), Row(ours, peer, ratio, low, high)


def _change(key: tuple[str, str, str], before: Row, after: Row) -> Change:
    net = after.ratio / before.ratio
    says = "same"
    if net < REACHED and after.high < before.low:
        says = "slower"
    elif net > 1 / REACHED and after.low > before.high:
        says = "faster"
    return Change(*key, before.ours, after.ours, before.ours / after.ours, before.peer / after.peer, net, says)
