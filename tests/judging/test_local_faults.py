"""The judge calls a fault in one place of a long right result wrong, for any length of the rest.

400 faults are drawn by seeds over families, dtypes and lengths; `make test` runs some. A fault that changes every tile
by less than two expected errors is exempt, because a right kernel may differ as much.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from support.long_calls import TILE, Long, decode, dense, failing, gradient, sparse, sparse_gradient

from fusion_attention.judging.chi_square_limits import Errors, ratios
from fusion_attention.judging.editable_call import Block
from fusion_attention.judging.expected_error import PROGRAM
from fusion_attention.judging.outputs import Output, Unit, computed, of_heads

Tensor = torch.Tensor
Edit = Callable[[Block], Block]
PAGE = 128
TENTH = "a tenth more on 64 tokens"


@dataclass(frozen=True, eq=False)
class Planted:
    """An introduced error.

    Attributes:
        what: name of the error.
        output: name of the changed output.
        units: the rows to judge, in whole tiles.
        effect: largest 2 z / limit of a tile; z is the root mean square error relative to the expected error of a
            program in the dtype, and the limit is 2 for all but small tiles.
    """

    what: str
    output: str
    units: list[Unit]
    effect: float


def planted(long: Long, rng: random.Random) -> Planted:
    """Changes a random place of a random output of the call in a random way."""
    o = rng.choice([o for o in long.outputs if o.view is not None])
    b = rng.randrange(len(long.setting.extents))
    head = rng.randrange(long.setting.problem.heads_q)
    length = long.length(o, b)
    count = min(64, length)
    first = min(rng.randint(0, length - 1) // count * count, length - count)
    unit = long.unit(o, b, head, first, count)
    what = rng.choice([what for what in (*VALUES, *EDITS) if what != TENTH or length >= 64])
    right = computed(long.setting, unit, long.outputs, PROGRAM, exact=False)[o.name]
    rows = o.rows(long.setting, b, of_heads(long.setting, unit), unit.rows)
    before = right.value
    if what in VALUES:
        after = VALUES[what](before, rng)
        changed = after != before
        rows[changed] = VALUES[what](rows.clone(), rng)[changed] if what == TENTH else after[changed].to(rows)
    else:
        edited = long.setting.changed(EDITS[what](long, unit, rng))
        after = computed(edited, unit, long.outputs, PROGRAM, exact=False)[o.name].value
        rows.copy_((rows.double() + (after - before)).to(rows.dtype))
    start, stop = first // TILE * TILE, min(-(-(first + count) // TILE) * TILE, length)
    if stop == length:  # the last tile is the last 32 rows
        start = max(min(start, length - TILE), 0) // TILE * TILE
    return Planted(
        what, o.name, [replace(unit, rows=slice(start, stop))], _effect(long, o, unit, after - before, right.variance)
    )


def _effect(long: Long, o: Output, unit: Unit, change: Tensor, variance: Tensor) -> float:
    """Returns Planted.effect: the largest over tiles and over 16 columns of tiles."""
    errors = Errors([long.length(o, unit.b)], of_heads(long.setting, unit).stop, change.shape[-1])
    result = ratios(change, torch.zeros_like(change), variance.sqrt())
    errors.add(0, of_heads(long.setting, unit), unit.rows, result)
    return max((2 * look.z / look.limit for _, look in errors.worst() if look.kind in ("tile", "columns")), default=0.0)


# ------------------------------------------------------------------------------------------------- changes of a result


def _unwritten(before: Tensor, rng: random.Random) -> Tensor:
    after = before.clone()
    after[rng.randrange(len(after)), rng.randrange(after.shape[1])] = 0
    return after


def _columns(before: Tensor, rng: random.Random) -> Tensor:
    first = rng.randint(0, max(before.shape[-1] - 16, 0))
    after = before.clone()
    after[rng.randrange(len(after)), :, first : first + 16] = 0
    return after


VALUES: dict[str, Callable[[Tensor, random.Random], Tensor]] = {
    "a row unwritten": _unwritten,
    "16 columns unwritten": _columns,
    TENTH: lambda before, rng: before * 1.1,
}


# ------------------------------------------------------------------------------------------------ changes of a formula


def _of_pairs(long: Long, unit: Unit, change: Callable[[Block, Tensor], Block], rng: random.Random, count: int) -> Edit:
    """Returns an edit that changes `count` keys of the unit's rows, or `count` query rows of the unit's keys."""
    e = long.setting.extents
    if unit.by_keys:
        begin, end = 0, int(e.q_len[unit.b])
        begin = max(begin, end - int(e.kv_len[unit.b]) + unit.rows.start if int(e.hi[unit.b]) < 1 << 30 else 0)
    else:
        first, stop = e.row_interval(unit.b, torch.arange(unit.rows.start, unit.rows.stop).numpy())
        begin, end = max(int(first.min()), 0), min(int(stop.max()), int(e.kv_len[unit.b]))
    at = rng.randint(min(begin, end), max(end - count, begin))

    def edit(block: Block) -> Block:
        across = torch.arange(block.rows.start, block.rows.stop) if unit.by_keys else block.positions
        here = (across >= at) & (across < at + count)
        return change(block, here[:, None] if unit.by_keys else here[None, :])

    return edit


def _skipped(block: Block, here: Tensor) -> Block:
    return replace(block, visible=block.visible & ~here)


def _doubled(block: Block, here: Tensor) -> Block:
    times = torch.ones(1, 1, 1, dtype=block.q.dtype) if block.times is None else block.times
    return replace(block, times=times * (1.0 + here.double()))


def _moved(block: Block, here: Tensor) -> Block:
    """Replaces keys and values by those of another place."""
    k, v = block.k.clone(), block.v.clone()
    k[:, here], v[:, here] = (t.roll(17, 1)[:, here].flip(1) for t in (block.k, block.v))
    return replace(block, k=k, v=v)


def _wrong_page(long: Long, unit: Unit, rng: random.Random) -> Edit:
    """Returns an edit that replaces 128 keys of the rows or, for gradients of keys, the unit's own keys."""
    if unit.by_keys:
        return lambda block: _moved(block, torch.ones(block.k.shape[1], dtype=torch.bool))
    return _of_pairs(long, unit, lambda block, here: _moved(block, here[0]), rng, PAGE)


def _no_diagonal(long: Long, unit: Unit, rng: random.Random) -> Edit:
    e = long.setting.extents
    shift = int(e.kv_len[unit.b]) - int(e.q_len[unit.b])

    def edit(block: Block) -> Block:
        row = torch.arange(block.rows.start, block.rows.stop)[:, None]
        return replace(block, visible=block.visible & (block.positions[None] != row + shift))

    return edit


EDITS: dict[str, Callable[[Long, Unit, random.Random], Edit]] = {
    "16 keys skipped": lambda long, unit, rng: _of_pairs(long, unit, _skipped, rng, 16),
    "a tile skipped": lambda long, unit, rng: _of_pairs(long, unit, _skipped, rng, 64),
    "a tile doubled": lambda long, unit, rng: _of_pairs(long, unit, _doubled, rng, 64),
    "a page wrong": _wrong_page,
    "the diagonal missing": _no_diagonal,
    "a head's scale": lambda long, unit, rng: lambda block: replace(block, scores_by=block.scores_by * 1.1),
}

DTYPES = ("float32", "float16", "bfloat16")
CALLS: dict[str, Callable[[], Long]] = {
    **{f"dense {d} {n}": lambda d=d, n=n: dense(d, n, n) for d in DTYPES for n in (256, 1024, 4096, 16384)},
    **{f"gradient {d} {n}": lambda d=d, n=n: gradient(d, n, n) for d in DTYPES for n in (256, 1024, 4096, 16384)},
    **{f"full {d}": lambda d=d: gradient(d, 2048, 2048, causal=False) for d in DTYPES},
    **{f"sparse {d} {n}": lambda d=d, n=n: sparse(d, 256, n) for d in DTYPES for n in (2048, 16384)},
    **{f"sparse gradient {d}": lambda d=d: sparse_gradient(d, 256, 4096) for d in DTYPES},
    **{f"decode {d}": lambda d=d: decode(d, (16384, 700, 5000)) for d in DTYPES[1:]},
}


@cache
def right(name: str) -> Long:
    return CALLS[name]()


@pytest.mark.sampled(200)
@pytest.mark.parametrize("seed", range(400))
def test_local_fault_in_a_long_result_is_called_wrong(seed: int) -> None:
    rng = random.Random(seed)
    long = right(rng.choice([*CALLS])).restored()
    fault = planted(long, rng)
    result = failing(long, fault.units, PROGRAM)
    # Changed values are always detected; changed keys with small weights may not be.
    assert fault.output in result or (fault.effect < 2 and fault.what not in VALUES), fault
