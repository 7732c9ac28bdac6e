"""Judges calls of the indexer, of its statistics and of its loss.

A list of selected keys is judged by the keys' scores, because of two similar scores rounding may select either. Of two
equal scores the smaller index must come first.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from fusion_attention.judging.calls import JudgeError
from fusion_attention.judging.chi_square_limits import Errors
from fusion_attention.judging.error_location import Map, looks_like
from fusion_attention.judging.expected_error import POOR, Grade
from fusion_attention.judging.expected_indexer_error import TOTALS, at_keys, completed, wanted
from fusion_attention.judging.indexer_formulas import Index, chosen, compared, given, gradients, softmax
from fusion_attention.judging.indexer_mistakes import INDEX_MISTAKES
from fusion_attention.judging.measure import Beside, Result, Subject, explanations
from fusion_attention.judging.outputs import Wanted
from fusion_attention.judging.standards import Tally
from fusion_attention.judging.verdict import Explanation

Tensor = torch.Tensor
PAIRS = 1 << 21
KINDS = {"sparse_indices_out": "indices", "sparse_values_out": "values", "softmax_max": "max", "softmax_sum": "sum",
          "dquery_index": "dq", "dkey_index": "dk", "dquery": "dq", "dkey": "dk", "dweights": "dweights",
          "loss": "loss", "softmax_out": "y"}  # fmt: skip
_OP_KINDS = ("indexer_topk", "indexer_lse", "indexer_loss", "indexer_backward")


def serves(lowered: Any) -> bool:
    """True if a call is of an indexer (it scores and selects keys), of its softmax statistics or of its loss."""
    return str(lowered.op_kind).startswith("indexer")


def subject_of(operator: str, lowered: Any, captured: Mapping[str, Tensor]) -> Subject:
    """Returns the object that judges the outputs `captured` of an indexer call of `operator`."""
    if lowered.op_kind not in _OP_KINDS:
        raise JudgeError(f"{operator}: the judge has no formula for it")
    x = setting_of(lowered)
    captured = {n: t for n, t in captured.items() if n in KINDS}
    if not captured:
        raise JudgeError(f"{operator}: no output to judge")
    return Indexed(x, lowered, captured)


@dataclass(frozen=True, eq=False)
class Indexed(Subject):
    """Judges a call of an indexer, of its softmax statistics or of its loss: x is the call, perhaps with a mistake;
    captured are the recorded outputs."""

    x: Index
    lowered: Any
    captured: Mapping[str, Tensor]

    def measured(
        self, names: Sequence[str] | None, grade: Grade, beside: Beside = MappingProxyType({}), *,
        with_baseline: bool = False,
    ) -> Result:  # fmt: skip
        x, captured = self.x, self.captured if names is None else {n: self.captured[n] for n in names}
        kinds = {KINDS[n]: n for n in captured}
        # Outputs were rounded to their own dtype; float64 and integer ones, to the dtype that the call returns.
        floating = {k: captured[n].dtype for k, n in kinds.items() if captured[n].is_floating_point()}
        dtypes = {k: x.stored(k) if floating.get(k, torch.float64) == torch.float64 else floating[k] for k in kinds}
        results: dict[str, Mapping[str, Tensor]] = {"": captured, **beside}
        tallies = {who: {n: _tally(x, k, t[n]) for k, n in kinds.items()} for who, t in results.items()}
        views = {who: views_of(self.lowered, t) for who, t in results.items()}
        for block in pieces(x, [*kinds], grade, dtypes, with_baseline=with_baseline):
            name = kinds[block.kind]
            for who, t in results.items():
                if block.kind == "loss":
                    ours, result = t[name].reshape(1, 1, 1), block.wanted
                else:
                    ours, result = judgeable(x, views[who][block.kind], block)
                tallies[who][name].add((block.b, slice(0, ours.shape[0]), block.rows), ours, result)
        errors = tallies.pop("")
        maps = {n: Map(errors[n], "keys" if k == "dk" else "rows") for k, n in kinds.items() if k != "loss"}
        return Result(errors, maps, tallies)

    def explained(self, base: Result) -> tuple[tuple[Explanation, ...], bool]:
        tries = (
            (name, detail, means, fix, replace(self, x=replace(self.x, **fields)))
            for name, means, fix, ways in INDEX_MISTAKES
            for detail, fields in ways(self.x).items()
        )
        mistakes = explanations(tries, base, lambda tally: 0.0 if tally.strange else tally.errors.z_tile)
        return mistakes, not mistakes and self.measured(None, POOR).passes

    def looks(self, name: str, tally: Tally) -> list[str]:
        x, kind, views = self.x, KINDS[name], views_of(self.lowered, self.captured)
        if kind in ("loss", "max", "sum"):
            return looks_like(tally, "number")
        if kind == "indices":  # judgeable() marks wrong entries by NaN
            sentences = looks_like(tally, "list")
            return [s.replace("holds NaN", _LISTS[0]).replace("hold NaN", _LISTS[1]) for s in sentences if "NaN" in s]
        heads, lengths = x.heads if kind == "dq" else 1, x.extents.kv_len if kind == "dk" else x.extents.q_len
        word = "key" if kind == "dk" else "row"
        return looks_like(tally, word, lambda b: views[kind].sequence(b, heads, int(lengths[b])))


_LISTS = tuple(
    f"{has} a key that does not exist, is not visible, is listed twice, or precedes a smaller index with an equal score"
    for has in ("has", "have")
)


def setting_of(lowered: Any) -> Index:
    """Returns the tensors and parameters of a call of an indexer, its statistics or its loss, with fields that
    reproduce mistakes of kernels."""
    filled = lowered.fill(lowered.results())
    if filled.first is not None:
        from fusion_attention.plan import compute

        first, results = filled.first
        compute(first, results, "golden")
    filled.begin()
    operands, *grads = filled.operands
    op_kind, problem, extents = lowered.op_kind, lowered.problem, lowered.extents
    if op_kind == "indexer_loss":
        return Index(op_kind, problem, extents, operands.index, operands, own_statistics=filled.first is not None)
    return Index(op_kind, problem, extents, operands, grads=grads[0] if grads else None)


@dataclass(frozen=True, eq=False)
class Block:
    """The exact values of an output for a range of rows of sequence b (all rows if the output sums over rows), and the
    scores of all keys."""

    kind: str
    b: int
    rows: slice
    wanted: Wanted
    scores: Wanted | None = None


def pieces(
    x: Index,
    kinds: Sequence[str],
    grade: Grade,
    dtypes: dict[str, torch.dtype] | None = None,
    *,
    with_baseline: bool = False,
) -> Iterator[Block]:
    """Yields the exact values of an indexer call's outputs, with expected errors, in blocks [heads, rows, elements];
    the last is the loss, [1, 1, 1].
    x: the call, perhaps with a mistake; dtypes: by kind, the dtype to which the output is rounded, if not the call's;
    grade: precision of the judged program; with_baseline: True adds results of a float32 program."""
    e, dtypes = x.extents, dtypes or {}
    losses: list[Wanted] = []
    pairs = x.heads + (x.problem.heads_q if x.of_loss is not None else 0)
    for b in range(len(e)):
        q_len, kv_len = int(e.q_len[b]), int(e.kv_len[b])
        step = max(1, PAIRS // max(pairs * kv_len, 1))
        keys: list[Wanted] = []
        for first in range(0, q_len, step):
            rows = slice(first, min(first + step, q_len))
            result = wanted(x, b, rows, grade, dtypes)
            if with_baseline:
                result = _with_baseline(x, b, rows, result)
            for kind in kinds:
                if kind in TOTALS:
                    (losses if kind == "loss" else keys).append(result[kind])
                else:
                    yield Block(kind, b, rows, result[kind], result.get("scores"))
        if keys:
            yield Block("dk", b, slice(0, kv_len), completed(x, b, "dk", _sum(keys), grade, dtypes.get("dk")))
    if losses:
        total = completed(x, 0, "loss", _sum(losses), grade, dtypes.get("loss"))
        shaped = (t if t is None else t.reshape(1, 1, 1) for t in (total.value, total.variance, total.baseline))
        yield Block("loss", 0, slice(0, 1), Wanted(*shaped))  # type: ignore[arg-type]


def _sum(terms: Sequence[Wanted]) -> Wanted:
    baseline = None if terms[0].baseline is None else sum(t.baseline for t in terms)  # type: ignore[misc]
    return Wanted(sum(t.value for t in terms), sum(t.variance for t in terms), baseline)  # type: ignore[arg-type]


def _with_baseline(x: Index, b: int, rows: slice, expected: Mapping[str, Wanted]) -> dict[str, Wanted]:
    """Adds to the exact values `expected` (by kind, of some rows of sequence b) the results of a float32 program."""
    narrow, dtype = torch.float32, x.problem.torch_dtype
    if x.op_kind == "indexer_topk":
        _, values, indices = chosen(x, x.scored(b, rows, narrow), x.visible(b, rows))
        baseline = {"values": values[None], "indices": indices[None]}
    elif x.op_kind == "indexer_lse":
        max_and_sum = softmax(x.scored(b, rows, narrow).scores, x.visible(b, rows).to(narrow))
        baseline = {"max": max_and_sum[0][None], "sum": max_and_sum[1][None]}
    elif x.op_kind == "indexer_loss":
        c = compared(x, b, rows, narrow, dtype)
        baseline = gradients(c.scored, c.dscores, c.times > 0) | {"loss": c.losses.sum().reshape(1)}
    else:
        dscores, _, times = given(x, b, rows, narrow)
        baseline = gradients(x.scored(b, rows, narrow), dscores, times > 0)
    rounded = {n: t if n in (*TOTALS, "indices") else t.to(x.stored(n)) for n, t in baseline.items()}
    return {n: Wanted(w.value, w.variance, rounded.get(n)) for n, w in expected.items()}


def _tally(x: Index, kind: str, tensor: Tensor) -> Tally:
    e = x.extents
    terms = int(e.kv_len.max(initial=1))
    if kind == "loss":
        return Tally(tensor.dtype, Errors([1], 1, 1), terms)
    lengths = [int(n) for n in (e.kv_len if kind == "dk" else e.q_len)]
    columns = 1 if kind in ("max", "sum") else tensor.shape[-1]
    dtype = torch.float32 if kind == "indices" else tensor.dtype
    return Tally(dtype, Errors(lengths, x.heads if kind == "dq" else 1, columns), terms)


def views_of(lowered: Any, captured: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns the outputs `captured` of an indexer call by kind ("indices", "dq", ..), each as a memory view [heads,
    rows, elements] per sequence."""
    o, *grads = lowered.fill({**lowered.results(), **captured}).operands
    if lowered.op_kind == "indexer_topk":
        return {"indices": o.indices, "values": o.values}
    if lowered.op_kind == "indexer_lse":
        return {"max": o.stats.max, "sum": o.stats.sum}
    of_loss = {"y": o.index.values} if lowered.op_kind == "indexer_loss" else {}
    return {"dq": grads[0].dq, "dk": grads[0].dk, "dweights": grads[0].dweights, **of_loss}


def judgeable(x: Index, view: Any, block: Block) -> tuple[Tensor, Wanted]:
    """Returns (recorded output, expected output) of a block of the call x, [heads, rows, elements].
    view: the recorded output. Indices of selected keys are replaced by the keys' scores, because keys with nearly equal
    scores may be in either order."""
    heads, lengths = x.heads if block.kind == "dq" else 1, x.extents.kv_len if block.kind == "dk" else x.extents.q_len
    ours: Tensor = view.sequence(block.b, heads, int(lengths[block.b]))[:, block.rows]
    if block.scores is None or block.kind != "indices":
        return ours, block.wanted
    scores, variance, result = block.scores.value[0], block.scores.variance[0], block.wanted
    value, baseline = _listed(scores, result.value[0])[None], None
    if result.baseline is not None:
        baseline = _listed(scores, result.baseline[0])[None]
    mine = _listed(scores, ours[0])
    wrong = _misplaced(scores, mine, ours[0].long(), x)
    # Entries that are wrong for any score become NaN, or inf if golden is NaN.
    mine = torch.where(wrong, torch.where(value[0].isnan(), torch.inf, torch.nan), mine)
    return mine[None], Wanted(value, result.variance + at_keys(variance, ours[0])[None], baseline)


def _listed(scores: Tensor, indices: Tensor) -> Tensor:
    """Returns the scores [rows, entries] of selected keys, from scores [rows, keys] and indices [rows, entries].
    Entries that are not the index of a key, such as -1, get -inf."""
    listed = indices.long()
    inside = (listed >= 0) & (listed < scores.shape[-1])
    result = scores.gather(-1, listed.where(inside, 0)) if scores.shape[-1] else torch.zeros(listed.shape).double()
    return result.masked_fill(~inside, -torch.inf)


def _misplaced(scores: Tensor, mine: Tensor, listed: Tensor, x: Index) -> Tensor:
    """Returns bool [rows, entries], true for selected keys that are wrong whatever the scores' errors: keys that do not
    exist, invisible or repeated keys, and keys with equal scores in the wrong order (x has the rule). scores: of all
    keys [rows, keys]; listed: the recorded indices; mine: the scores of their keys [rows, entries]."""
    none = (listed != -1) & ((listed < 0) | (listed >= scores.shape[-1]) | (mine == -torch.inf))
    order = listed.sort(dim=-1, stable=True)
    again = torch.zeros_like(none)
    again[:, 1:] = (order.values[:, 1:] == order.values[:, :-1]) & (order.values[:, 1:] >= 0)
    twice = torch.zeros_like(none).scatter_(-1, order.indices, again)
    equal = (mine[:, 1:] == mine[:, :-1]) & (mine[:, 1:] != -torch.inf)
    wrong = listed[:, 1:] > listed[:, :-1] if x.last_first else listed[:, 1:] < listed[:, :-1]
    swapped = torch.zeros_like(none)
    swapped[:, 1:] = (equal & wrong) & (not x.by_key)
    return none | twice | swapped
