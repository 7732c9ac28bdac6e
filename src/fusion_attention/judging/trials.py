"""Judges a call by the formulas: every output of the whole call, or of pieces drawn from it, under any setting.

Knows nothing of mistakes: a setting that has one is a setting like another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from fusion_attention.judging import formulas
from fusion_attention.judging.outputs import Output, Unit, computed, of_heads
from fusion_attention.judging.places import Map
from fusion_attention.judging.setting import Setting
from fusion_attention.judging.standards import Tally, epsilon

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Result:
    """What a setting gives on some pieces: each output's tally, (of whole calls) its map, and tallies of other results
    of the same call, by who computed them."""

    tallies: dict[str, Tally]
    maps: dict[str, Map]
    beside: dict[str, dict[str, Tally]]

    @property
    def passes(self) -> bool:
        """Every output is right by the house law."""
        return all(tally.house().passes for tally in self.tallies.values())

    @property
    def failing(self) -> list[str]:
        """The outputs that are not."""
        return [name for name, tally in self.tallies.items() if not tally.house().passes]

    @property
    def times_plain(self) -> float:
        """The largest error of all outputs, counted in a plain program's."""
        return max((tally.times_plain for tally in self.tallies.values()), default=0.0)


def measured(
    setting: Setting,
    outputs: Sequence[Output],
    pieces: Iterable[Unit],
    *,
    poor: bool = False,
    mapped: bool = False,
    beside: Mapping[str, Sequence[Output]] = MappingProxyType({}),
) -> Result:
    """How near the captured outputs are to the setting's; poor: beside a poor program, not a plain one."""
    e, p = setting.extents, setting.problem
    kv_len = int(e.kv_len.max(initial=0))

    def fresh(found: Sequence[Output]) -> dict[str, Tally]:
        return {o.name: Tally(o.tensor.dtype, kv_len) for o in found}

    tallies, others = fresh(outputs), {who: fresh(found) for who, found in beside.items()}
    maps = {}
    if mapped:
        for o in outputs:
            if o.view is not None:
                lengths, count = (e.kv_len, p.heads_kv) if o.by_keys else (e.q_len, p.heads_q)
                maps[o.name] = Map([int(n) for n in lengths], count, "keys" if o.by_keys else "rows")
    precision = formulas.poor if poor else formulas.plain
    dtype = p.torch_dtype
    for unit in pieces:
        golden, plain = computed(setting, unit, list(outputs), formulas.GOLDEN, precision(dtype))
        heads = of_heads(setting, unit)
        for o in outputs:
            if o.name in golden and o.by_keys == unit.by_keys:
                ours = o.rows(setting, unit.b, heads, unit.rows)
                values = ours, golden[o.name], plain[o.name]
                tallies[o.name].add(*values)
                if o.name in maps and ours.numel():
                    slack = epsilon(ours.dtype, golden[o.name], kv_len)
                    maps[o.name].add(unit.b, heads, unit.rows, values, slack)
        for who, found in beside.items():
            for o in found:
                if o.name in golden and o.by_keys == unit.by_keys:
                    theirs = o.rows(setting, unit.b, heads, unit.rows)
                    others[who][o.name].add(theirs, golden[o.name], plain[o.name])
    return Result(tallies, maps, others)


def drawn(maps: dict[str, Map], outputs: Sequence[Output], setting: Setting, generator: torch.Generator) -> list[Unit]:
    """Pieces of where outputs fail, and of where they do not: a few heads and rows each, the first failure too."""
    found: set[tuple[int, int, int, int, int, bool]] = set()
    for o in outputs:
        if o.name not in maps:
            continue
        wrong = maps[o.name].wrong
        for want, count in ((True, 6), (False, 3)):
            places = [
                (b, int(h), int(r)) for b, w in enumerate(wrong) for h, r in _some(w == want, count * 3, generator)
            ]
            order = torch.randperm(len(places), generator=generator).tolist()
            chosen = [places[0], places[-1], *(places[i] for i in order[: count - 2])] if places else []
            found |= {_piece(setting, o, place) for place in chosen}
    return [Unit(b, slice(h, z), slice(first, end), by) for b, h, z, first, end, by in sorted(found)]


def _some(places: Tensor, count: int, generator: torch.Generator) -> list[list[int]]:
    """The first and last true places, and some between."""
    flat = places.flatten().nonzero().flatten()
    if not len(flat):
        return []
    picked = flat[torch.randint(len(flat), (count,), generator=generator)]
    both = torch.cat((flat[:1], flat[-1:], picked)).unique()
    return [[int(n) // places.shape[1], int(n) % places.shape[1]] for n in both]


def _piece(setting: Setting, o: Output, place: tuple[int, int, int]) -> tuple[int, int, int, int, int, bool]:
    b, head, row = place
    group, e = setting.group, setting.extents
    length = int((e.kv_len if o.by_keys else e.q_len)[b])
    heads = (head * group, head * group + group) if o.by_keys else (head, head + 1)
    first = row // 4 * 4
    return b, *heads, first, min(first + 4, length), o.by_keys
