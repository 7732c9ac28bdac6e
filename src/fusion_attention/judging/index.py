"""Judges calls of the indexer's family: chosen keys by their scores, values, statistics, the loss and its gradients.

A list of keys is judged by what the keys score: where two score alike, rounding may choose either; where two score
the very same, the smaller index comes first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fusion_attention.judging.calls import BACKENDS, JudgeError, Recorded
from fusion_attention.judging.error_bound import Errors
from fusion_attention.judging.expected_error import KERNEL, POOR, PROGRAM, Grade, summed
from fusion_attention.judging.index_formulas import Index, chosen, loss, of_scores, of_statistics, statistics
from fusion_attention.judging.index_mistakes import INDEX_MISTAKES
from fusion_attention.judging.outputs import Wanted
from fusion_attention.judging.places import Map
from fusion_attention.judging.standards import Tally
from fusion_attention.judging.trials import Result
from fusion_attention.judging.verdict import NOISY, RIGHT, WRONG, Explanation, Judgement, opinion

Tensor = torch.Tensor
PAIRS = 1 << 21
_LEFT = 0.25
_NAMES = {"sparse_indices_out": "indices", "sparse_values_out": "values", "softmax_max": "max", "softmax_sum": "sum",
          "dquery_index": "dq", "dkey_index": "dk", "dweights": "dweights", "loss": "loss"}  # fmt: skip
_VERBS = ("indexer_topk", "indexer_lse", "indexer_loss")


def serves(lowered: Any) -> bool:
    """Whether a call is one of the indexer's family."""
    return str(lowered.verb).startswith("indexer")


def judged(call: Recorded, lowered: Any, *, search: bool, backends: bool, standard: str = "error-bound") -> Judgement:
    """A call, as judging.judged()."""
    if lowered.verb not in _VERBS:
        raise JudgeError(f"{call.op.name}: the judge has no formula for it")
    x = _setting(call, lowered)
    captured = {n: t for n, t in call.judgeable(lowered).items() if n in _NAMES}
    if not captured:
        raise JudgeError(f"{call.op.name}: no output to judge")
    theirs: dict[str, Any] = {who: call.computed(who, captured) for who in BACKENDS} if backends else {}
    base = _measured(x, lowered, captured, plain=standard == "cann-double")
    grades = dict.fromkeys(base.tallies, KERNEL)
    if not base.passes:
        failing = {n: t for n, t in captured.items() if n in base.failing}
        again = _measured(x, lowered, failing, PROGRAM, plain=standard == "cann-double")
        grades |= dict.fromkeys(again.tallies, PROGRAM)
        base = Result(base.tallies | again.tallies, base.maps | again.maps, {})
    found: tuple[Explanation, ...] = ()
    noisy = False
    if search and not base.passes:
        found = _explained(x, lowered, captured, base)
        noisy = not found and _measured(x, lowered, captured, POOR).passes
    beside = {
        who: t if isinstance(t, str) else {n: y.z for n, y in _measured(x, lowered, t).tallies.items()}
        for who, t in theirs.items()
    }
    opinions = {n: opinion(n, tally, grades[n], standard, base.maps.get(n)) for n, tally in base.tallies.items()}
    right = all(o.passes for o in opinions.values())
    return Judgement(
        call.op.name,
        call.source,
        RIGHT if right else NOISY if noisy and not base.passes else WRONG,
        opinions,
        dict.fromkeys(call.outputs.keys() - captured.keys(), "the judge has no formula for it"),
        beside,
        found,
        search,
        (*call.notes, *call.doubts()),
        standard,
    )


def _setting(call: Recorded, lowered: Any) -> Index:
    scratch = lowered.results()
    filled = lowered.fill(scratch)
    if filled.first is not None:
        from fusion_attention.plan import compute

        first, results = filled.first
        compute(first, results, "golden")
    filled.begin()
    operands = filled.operands[0]
    if lowered.verb == "indexer_loss":
        return Index(lowered.verb, lowered.problem, lowered.extents, operands.index, operands)
    return Index(lowered.verb, lowered.problem, lowered.extents, operands)


def _views(lowered: Any, captured: Mapping[str, Tensor]) -> dict[str, Any]:
    """Views of captured outputs, by kind."""
    filled = lowered.fill({**lowered.results(), **captured})
    o, *grads = filled.operands
    if lowered.verb == "indexer_topk":
        return {"indices": o.indices, "values": o.values}
    if lowered.verb == "indexer_lse":
        return {"max": o.stats.max, "sum": o.stats.sum}
    return {"dq": grads[0].dq, "dk": grads[0].dk, "dweights": grads[0].dweights}


def _measured(
    x: Index, lowered: Any, captured: Mapping[str, Tensor], grade: Grade = KERNEL, *, plain: bool = False
) -> Result:
    views = _views(lowered, captured)
    e = x.extents
    kinds = {n: _NAMES[n] for n in captured}
    tallies = {n: _tally(x, n, kinds[n], t) for n, t in captured.items()}
    losses: list[Wanted] = []
    for b in range(len(e)):
        q_len, kv_len = int(e.q_len[b]), int(e.kv_len[b])
        step = max(1, PAIRS // max(x.heads * kv_len, 1))
        keys: list[Wanted] = []
        for first in range(0, q_len, step):
            rows = slice(first, min(first + step, q_len))
            wanted = _wanted(x, b, rows, grade, views, plain=plain)
            for n, kind in kinds.items():
                if kind in ("loss", "dk"):
                    (losses if kind == "loss" else keys).append(wanted[kind])
                    continue
                ours = _ours(x, views, kind, b, rows, wanted, q_len)
                tallies[n].add(
                    (b, slice(0, ours.shape[0]), rows), ours, _stored(x, wanted[kind], kind, captured[n], grade)
                )
                if kind == "indices":
                    tallies[n].disorder(
                        _misordered(views["indices"], wanted["scores"].value, b, rows, q_len, x), b, rows
                    )
        for n, kind in kinds.items():
            if kind == "dk" and keys:
                ours = views["dk"].sequence(b, 1, kv_len)
                total = _stored(x, _sum(keys), kind, captured[n], grade, q_len * x.heads)
                tallies[n].add((b, slice(0, 1), slice(0, kv_len)), ours, total)
    for n, kind in kinds.items():
        if kind == "loss" and losses:
            total = _stored(x, _sum(losses), kind, captured[n], grade, int(e.visible_pairs))
            plain_loss = None if total.plain is None else total.plain.reshape(1, 1, 1)
            shaped = Wanted(total.value.reshape(1, 1, 1), total.variance.reshape(1, 1, 1), plain_loss)
            tallies[n].add((0, slice(0, 1), slice(0, 1)), captured[n].reshape(1, 1, 1), shaped)
    maps = {n: Map(t, "keys" if kinds[n] == "dk" else "rows") for n, t in tallies.items() if kinds[n] != "loss"}
    return Result(tallies, maps, {})


def _tally(x: Index, name: str, kind: str, tensor: Tensor) -> Tally:
    e = x.extents
    terms = int(e.kv_len.max(initial=1))
    if kind == "loss":
        return Tally(tensor.dtype, Errors([1], 1, 1), terms)
    lengths = [int(n) for n in (e.kv_len if kind == "dk" else e.q_len)]
    columns = 1 if kind in ("max", "sum") else tensor.shape[-1]
    dtype = torch.float32 if kind == "indices" else tensor.dtype
    return Tally(dtype, Errors(lengths, x.heads if kind == "dq" else 1, columns), terms)


def _sum(parts: Sequence[Wanted]) -> Wanted:
    plain = None if parts[0].plain is None else sum(p.plain for p in parts)  # type: ignore[misc]
    return Wanted(sum(p.value for p in parts), sum(p.variance for p in parts), plain)  # type: ignore[arg-type]


def _stored(x: Index, found: Wanted, kind: str, tensor: Tensor, grade: Grade, terms: int = 0) -> Wanted:
    """With what a sum's own size and storing it add."""
    dtype = x.problem.torch_dtype
    if kind == "indices":
        return found
    variance = found.variance
    if kind in ("dq", "dk", "dweights", "loss"):
        terms = terms or int(x.extents.kv_len.max(initial=1))
        variance = variance + summed(found.value, terms, dtype, grade)
    return Wanted(found.value, grade.stored(found.value, variance, tensor.dtype), found.plain)


def _wanted(x: Index, b: int, rows: slice, grade: Grade, views: Mapping[str, Any], *, plain: bool) -> dict[str, Wanted]:
    """Golden of some rows with its variances, by kind."""
    if x.verb == "indexer_topk":
        scores, values, indices = chosen(x, b, rows, torch.float64)
        variance = of_scores(x, b, rows, grade)
        of_values = _of_keys(variance, indices)[None]
        listed = views["indices"].sequence(b, 1, int(x.extents.q_len[b]))[0, rows] if "indices" in views else indices
        pair = of_values + _of_keys(variance, listed)[None]
        by_plain: dict[str, Tensor] = {}
        if plain:
            _, found, picked = chosen(x, b, rows, torch.float32)
            by_plain = {"values": found[None], "indices": _scored(scores, picked)[None]}
        return {
            "values": Wanted(values[None], of_values, by_plain.get("values")),
            "indices": Wanted(values[None], pair, by_plain.get("indices")),
            "scores": Wanted(scores, variance),
        }
    if x.verb == "indexer_lse":
        three = statistics(x, b, rows, torch.float64), of_statistics(x, b, rows, grade)
        theirs = [t[None] for t in statistics(x, b, rows, torch.float32)] if plain else [None, None]
        return {n: Wanted(v[None], s[None], t) for n, v, s, t in zip(("max", "sum"), *three, theirs, strict=True)}
    found_loss, variances = loss(x, b, rows, torch.float64, None, grade)
    measure = loss(x, b, rows, torch.float32, x.problem.torch_dtype)[0] if plain else {}
    return {n: Wanted(v, variances[n], measure.get(n)) for n, v in found_loss.items()}


def _of_keys(variance: Tensor, indices: Tensor) -> Tensor:
    """[rows, entries]: variance of the listed keys' scores; 0 of entries without a key."""
    if not variance.shape[-1]:
        return torch.zeros(indices.shape, dtype=variance.dtype)
    listed = indices.long()
    inside = (listed >= 0) & (listed < variance.shape[-1])
    return variance.gather(-1, listed.where(inside, 0)).where(inside, 0)


def _scored(scores: Tensor, indices: Tensor) -> Tensor:
    """What the keys of a list score; NaN of a key that is not there, or is listed twice."""
    listed = indices.long()
    inside = (listed >= 0) & (listed < scores.shape[-1])
    found = scores.gather(-1, listed.where(inside, 0)) if scores.shape[-1] else torch.zeros(listed.shape).double()
    found = found.where(inside, torch.where(listed == -1, -torch.inf, torch.nan))
    ordered = listed.masked_fill(~inside, -1).sort(-1).values
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(-1, keepdim=True)
    return found.masked_fill(twice, torch.nan)


def _misordered(view: Any, scores: Tensor, b: int, rows: slice, q_len: int, x: Index) -> Tensor:
    """[rows]: neighbours of a list that score the very same and stand in the wrong order."""
    listed = view.sequence(b, 1, q_len)[0, rows].long()
    values = _scored(scores, listed)
    equal = (values[:, 1:] == values[:, :-1]) & (values[:, 1:] != -torch.inf)
    wrong = listed[:, 1:] > listed[:, :-1] if x.last_first else listed[:, 1:] < listed[:, :-1]
    return (equal & wrong).any(-1)


def _ours(
    x: Index, views: Mapping[str, Any], kind: str, b: int, rows: slice, golden: Mapping[str, Wanted], q_len: int
) -> Tensor:
    heads = x.heads if kind == "dq" else 1
    found: Tensor = views[kind].sequence(b, heads, q_len)[:, rows]
    return _scored(golden["scores"].value, found[0])[None] if kind == "indices" else found


def _explained(x: Index, lowered: Any, captured: Mapping[str, Tensor], base: Result) -> tuple[Explanation, ...]:
    found = []
    failing: Sequence[str] = base.failing
    for m in INDEX_MISTAKES:
        for detail, other in m.tries(x):
            result = _measured(other, lowered, captured, PROGRAM)
            left = [
                result.tallies[n].rms / base.tallies[n].rms
                for n in failing
                if base.tallies[n].rms and not base.tallies[n].strange
            ]
            if result.passes and all(share <= _LEFT for share in left):
                found.append(Explanation(m.name, detail, m.means, m.mend, tuple(failing), result.z, True))
    kept: dict[str, Explanation] = {}
    for e in sorted(found, key=lambda e: e.error):
        kept.setdefault(e.name, e)
    return tuple(kept.values())
