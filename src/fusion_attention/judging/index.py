"""Judges calls of the indexer's family: chosen keys by their scores, values, statistics, the loss and its gradients.

A list of keys is judged by what the keys score: where two score alike, rounding may choose either; where two score
the very same, the smaller index comes first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fusion_attention.judging.calls import BACKENDS, JudgeError, Recorded
from fusion_attention.judging.index_formulas import Index, chosen, loss, statistics
from fusion_attention.judging.index_mistakes import INDEX_MISTAKES
from fusion_attention.judging.places import Map
from fusion_attention.judging.standards import Tally, epsilon
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


def judged(call: Recorded, lowered: Any, *, search: bool, backends: bool) -> Judgement:
    """A call, as judging.judged()."""
    if lowered.verb not in _VERBS:
        raise JudgeError(f"{call.op.name}: the judge has no formula for it")
    x = _setting(call, lowered)
    captured = {n: t for n, t in call.judgeable(lowered).items() if n in _NAMES}
    if not captured:
        raise JudgeError(f"{call.op.name}: no output to judge")
    theirs: dict[str, Any] = {who: call.computed(who, captured) for who in BACKENDS} if backends else {}
    base = _measured(x, lowered, captured, mapped=True)
    found: tuple[Explanation, ...] = ()
    noisy = False
    if search and not base.passes:
        found = _explained(x, lowered, captured, base)
        noisy = not found and _measured(x, lowered, captured, poor=True).passes
    beside = {
        who: t if isinstance(t, str) else {n: y.times_plain for n, y in _measured(x, lowered, t).tallies.items()}
        for who, t in theirs.items()
    }
    return Judgement(
        call.op.name,
        call.source,
        RIGHT if base.passes else NOISY if noisy else WRONG,
        {n: opinion(n, tally, base.maps.get(n)) for n, tally in base.tallies.items()},
        dict.fromkeys(call.outputs.keys() - captured.keys(), "the judge has no formula for it"),
        beside,
        found,
        search,
        (*call.notes, *call.doubts()),
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
    x: Index, lowered: Any, captured: Mapping[str, Tensor], *, poor: bool = False, mapped: bool = False
) -> Result:
    views = _views(lowered, captured)
    e, dtype = x.extents, x.problem.torch_dtype
    kinds = {n: _NAMES[n] for n in captured}
    terms = int(e.kv_len.max(initial=1))
    tallies = {n: Tally(torch.float32 if kinds[n] == "indices" else t.dtype, terms) for n, t in captured.items()}
    maps = {n: Map([int(k) for k in e.q_len], x.heads if kinds[n] == "dq" else 1) for n in captured} if mapped else {}
    maps = {n: m for n, m in maps.items() if kinds[n] not in ("loss", "dk")}
    sums: dict[str, list[Tensor]] = {}
    low = torch.bfloat16 if dtype == torch.bfloat16 else torch.float16
    for b in range(len(e)):
        q_len, kv_len = int(e.q_len[b]), int(e.kv_len[b])
        step = max(1, PAIRS // max(x.heads * kv_len, 1))
        keys: list[Tensor] = []
        for first in range(0, q_len, step):
            rows = slice(first, min(first + step, q_len))
            golden, plain = _both(x, b, rows, low if poor else None)
            for n, kind in kinds.items():
                if kind in ("loss", "dk"):
                    found = sums.setdefault(kind, []) if kind == "loss" else keys
                    both = golden[kind], plain[kind]
                    found[:] = [a + c for a, c in zip(found, both, strict=True)] if found else both
                    continue
                ours = _ours(x, views, kind, b, rows, golden, q_len)
                theirs = plain[kind].to(captured[n].dtype) if kind != "indices" else plain[kind]
                values = ours, golden[kind], theirs
                tallies[n].add(*values)
                if kind == "indices":
                    tallies[n].strange += _misordered(views["indices"], golden["scores"], b, rows, q_len, x)
                if n in maps and ours.numel():
                    maps[n].add(
                        b, slice(0, ours.shape[0]), rows, values, epsilon(tallies[n].dtype, golden[kind], terms)
                    )
        for n, kind in kinds.items():
            if kind == "dk" and keys:
                ours = views["dk"].sequence(b, 1, kv_len)
                tallies[n].add(ours, keys[0], keys[1].to(captured[n].dtype))
    for n, kind in kinds.items():
        if kind == "loss" and sums:
            tallies[n].add(captured[n], *sums["loss"])
    return Result(tallies, maps, {})


def _both(x: Index, b: int, rows: slice, poor: torch.dtype | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(golden, plain) of some rows, by kind."""
    if x.verb == "indexer_topk":
        scores, values, _ = chosen(x, b, rows, torch.float64)
        measure, theirs, picked = chosen(x, b, rows, torch.float32)
        if poor is not None:
            measure = measure.to(poor).float()
            order = measure.sort(dim=-1, descending=True, stable=True).indices[:, : values.shape[-1]]
            theirs, picked = theirs.clone(), picked.clone()
            theirs[:, : order.shape[1]] = measure.gather(-1, order)
            picked[:, : order.shape[1]] = order.where(theirs[:, : order.shape[1]] != -torch.inf, -1)
        golden = {"values": values[None], "indices": values[None], "scores": scores}
        return golden, {"values": theirs[None], "indices": _scored(scores, picked)[None]}
    if x.verb == "indexer_lse":
        return tuple(  # type: ignore[return-value]
            dict(zip(("max", "sum"), (t[None] for t in statistics(x, b, rows, wide)), strict=True))
            for wide in (torch.float64, torch.float32)
        )
    low = poor or x.problem.torch_dtype
    found = loss(x, b, rows, torch.float32, low)
    if poor is not None:
        found = {n: t.to(poor).float() for n, t in found.items()}
    return loss(x, b, rows, torch.float64, None), found


def _scored(scores: Tensor, indices: Tensor) -> Tensor:
    """What the keys of a list score; NaN of a key that is not there, or is listed twice."""
    listed = indices.long()
    inside = (listed >= 0) & (listed < scores.shape[-1])
    found = scores.gather(-1, listed.where(inside, 0)) if scores.shape[-1] else torch.zeros(listed.shape).double()
    found = found.where(inside, torch.where(listed == -1, -torch.inf, torch.nan))
    ordered = listed.masked_fill(~inside, -1).sort(-1).values
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(-1, keepdim=True)
    return found.masked_fill(twice, torch.nan)


def _misordered(view: Any, scores: Tensor, b: int, rows: slice, q_len: int, x: Index) -> int:
    """Neighbours of a list that score the very same and stand in the wrong order."""
    listed = view.sequence(b, 1, q_len)[0, rows].long()
    values = _scored(scores, listed)
    equal = (values[:, 1:] == values[:, :-1]) & (values[:, 1:] != -torch.inf)
    wrong = listed[:, 1:] > listed[:, :-1] if x.last_first else listed[:, 1:] < listed[:, :-1]
    return int((equal & wrong).sum())


def _ours(
    x: Index, views: Mapping[str, Any], kind: str, b: int, rows: slice, golden: Mapping[str, Tensor], q_len: int
) -> Tensor:
    heads = x.heads if kind == "dq" else 1
    found: Tensor = views[kind].sequence(b, heads, q_len)[:, rows]
    return _scored(golden["scores"], found[0])[None] if kind == "indices" else found


def _explained(x: Index, lowered: Any, captured: Mapping[str, Tensor], base: Result) -> tuple[Explanation, ...]:
    found = []
    failing: Sequence[str] = base.failing
    for m in INDEX_MISTAKES:
        for detail, other in m.tries(x):
            result = _measured(other, lowered, captured)
            left = [
                result.tallies[n].rms / base.tallies[n].rms
                for n in failing
                if base.tallies[n].rms and not base.tallies[n].strange
            ]
            if result.passes and all(share <= _LEFT for share in left):
                found.append(Explanation(m.name, detail, m.means, m.mend, tuple(failing), result.times_plain, True))
    kept: dict[str, Explanation] = {}
    for e in sorted(found, key=lambda e: e.error):
        kept.setdefault(e.name, e)
    return tuple(kept.values())
