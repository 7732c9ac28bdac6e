"""Mistakes in stored rows of outputs and gradients: wrong factors, unwritten rows, misplaced rows and columns."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from fusion_attention.judging.editable_call import Block, Setting
from fusion_attention.judging.expected_error import KERNEL, LEFT, Grade
from fusion_attention.judging.formulas import Precision
from fusion_attention.judging.mistakes.kinds import (
    Case,
    Mistake,
    Try,
    factor_of,
    grown,
    returning,
    wrong_outputs,
    wrong_rows,
)
from fusion_attention.judging.outputs import Output, Unit, Wanted, computed
from fusion_attention.judging.standards import marked

Tensor = torch.Tensor
At = Block | Unit
_mistake = partial(Mistake, general=True)
_SAMPLES = 12


def _suits(case: Case) -> list[Output]:
    return wrong_outputs(case) if case.setting.problem.out_quant == "none" else []


def _golden(s: Setting, o: Output, b: int, heads: slice, rows: slice, grade: Grade = KERNEL) -> Wanted:
    """Returns the exact rows of output o in sequence b [heads, rows, elements], with the variance of their error in a
    program of precision `grade`. heads and rows are those of the output: key heads and keys for gradients of keys."""
    if not o.by_keys:
        return computed(s, Unit(b, heads, rows), [o], grade)[o.name]
    group, before = s.group, o.before(s.extents, b)
    rows = slice(rows.start + before, rows.stop + before)
    unit = Unit(b, slice(heads.start * group, heads.stop * group), rows, True, o.second)
    return computed(s, unit, [o], grade, exact=False)[o.name]


def _samples(case: Case, o: Output) -> list[tuple[Tensor, Tensor]]:
    """Returns (recorded row, exact row), both [elements], of up to twelve wrong rows of output o."""
    s, results = case.setting, []
    for b, h, r in case.wrong_rows_of(o, _SAMPLES):
        heads, rows = slice(h, h + 1), slice(r, r + 1)
        before = o.before(s.extents, b)
        mine = o.rows(s, b, heads, slice(r + before, r + before + 1))[0, 0]
        results.append((mine.double(), _golden(s, o, b, heads, rows).value[0, 0]))
    return results


def _changed(
    case: Case, o: Output, detail: str, change: Callable[[Tensor, At], Tensor], errors: Callable[..., Tensor] = grown
) -> Try:
    """Returns a variant of the judged call in which the wrong rows of output o are changed, as `detail` says in a few
    words. change: (exact rows [heads, rows, elements], their block) -> the rows that a wrong kernel returns. errors: a
    function that changes the variances of their errors."""
    wrong = wrong_rows(case, o)

    def result(kind: str, value: Tensor, raw: dict[str, Tensor], x: At, p: Precision) -> Tensor:
        return change(value, x).to(value.dtype).where(wrong(x), value) if kind == o.kind else value

    def of_errors(kind: str, variance: Tensor, before: Tensor, after: Tensor, x: At, grade: Grade) -> Tensor:
        if kind != o.kind:
            return variance
        return errors(kind, variance, before, after, x, grade).where(wrong(x), variance)

    return Try(detail, returning(case.setting, result, of_errors))


def multiplied(case: Case) -> Iterator[Try]:
    for o in _suits(case):
        pairs = [(a, b) for a, b in case.once(_samples, o) if a.isfinite().all() and b.any()]
        if pairs:
            yield from _multiplied(case, o, pairs)


def _multiplied(case: Case, o: Output, pairs: list[tuple[Tensor, Tensor]]) -> Iterator[Try]:
    mine, right = (torch.cat(rows) for rows in zip(*pairs, strict=True))
    factor = factor_of(mine, right)
    if (mine - factor * right).norm() < LEFT * (mine - right).norm() and factor:
        yield _changed(case, o, f"{factor:.4g} times", lambda value, x: factor * value)


def unwritten(case: Case) -> Iterator[Try]:
    for o in _suits(case):
        if o.kind == "out" and not o.tensor.any():
            continue  # the mistake output-unwritten
        zeros = torch.stack([(mine == 0) & (right != 0) for mine, right in case.once(_samples, o)]).all(0)
        if zeros.any():
            columns = zeros.nonzero().flatten()
            first, last = int(columns[0]), int(columns[-1])
            detail = "" if zeros.all() else f"columns {first} to {last}"
            yield _changed(case, o, detail, partial(_without, zeros))


def _without(zeros: Tensor, value: Tensor, x: At) -> Tensor:
    return value.masked_fill(zeros, 0)


def _orders(dim: int) -> dict[str, Tensor]:
    """Returns orders in which wrong kernels store `dim` columns: {description: the column stored in each place}."""
    columns = torch.arange(dim)
    results: dict[str, Tensor] = {}
    for by in (1, 2, 4, 8, 16, 32, 64, 128):
        if 2 * by < dim:
            results |= {f"columns rolled by {by}": columns.roll(by), f"columns rolled by -{by}": columns.roll(-by)}
    if dim % 2 == 0:
        results["halves exchanged"] = columns.roll(dim // 2)
        results["halves interleaved"] = columns.view(2, -1).T.reshape(-1)
        results["even columns before odd ones"] = columns.view(-1, 2).T.reshape(-1)
        results["pairs exchanged"] = columns.view(-1, 2).flip(1).reshape(-1)
    return results | {"columns reversed": columns.flip(0)}


def columns_moved(case: Case) -> Iterator[Try]:
    for o in _suits(case):
        mine, right = (torch.stack(rows) for rows in zip(*case.once(_samples, o), strict=True))
        error = (mine - right).norm()
        for detail, order in _orders(right.shape[-1]).items():
            if (mine - right[:, order]).norm() < LEFT * error:
                yield _ordered(case, o, detail, order)


def _ordered(case: Case, o: Output, detail: str, order: Tensor) -> Try:
    return _changed(
        case, o, detail, lambda value, x: value[..., order], lambda kind, variance, *_: variance[..., order]
    )


@dataclass(frozen=True)
class Place:
    """A mapping of each output row to another row, modulo the numbers of sequences, heads and rows."""

    sequence: int  # added to the sequence's number
    # heads, rows: (sign, number): head h is mapped to head sign * h + number, and row i to row sign * i + number.
    heads: tuple[int, int]
    rows: tuple[int, int]

    def __str__(self) -> str:
        names = ("head", "row"), (self.heads, self.rows)
        words = [
            f"{name} {'-' if sign < 0 else ''}{name[0]}{f' {number:+d}'.replace('+', '+ ').replace('-', '- ')}"
            for name, (sign, number) in zip(*names, strict=True)
            if (sign, number) != (1, 0)
        ]
        if self.sequence:
            words.insert(0, f"sequence b {'+' if self.sequence > 0 else '-'} {abs(self.sequence)}")
        return ", ".join(words)

    def of(self, setting: Setting, o: Output, x: At, grade: Grade = KERNEL) -> Wanted:
        """Returns the exact rows [heads, rows, elements] of output o that this mapping puts in place of the rows of x.
        It includes the variance of their errors in a program that rounds as `grade`; setting: the call."""
        e, p = setting.extents, setting.problem
        b = (x.b + self.sequence) % len(e)
        count = p.heads_kv if o.by_keys else p.heads_q
        heads, rows = (
            (sign * torch.arange(at.start, at.stop) + number) % end
            for (sign, number), at, end in ((self.heads, x.heads, count), (self.rows, x.rows, o.lengths(e)[b]))
        )
        (h0, h1), (r0, r1) = ((int(n.min()), int(n.max()) + 1) for n in (heads, rows))
        every = _golden(setting, o, b, slice(h0, h1), slice(r0, r1), grade)
        at = (heads - h0)[:, None], rows - r0
        return Wanted(every.value[at], every.variance[at])


def _short(number: int, end: int) -> int:
    """Returns the number of smallest absolute value that is congruent to `number` modulo `end`."""
    number %= end
    return number if 2 * number <= end else number - end


def _other_places(case: Case, o: Output) -> list[Place]:
    """Returns up to four mappings to other rows, heads or sequences that explain most sampled wrong rows of output o. A
    wrong row is compared with all exact rows by one number per row, a product with fixed numbers."""
    votes: Counter[Place] = Counter()
    direct: set[Place] = set()  # mappings that need no modulus
    wrong = case.wrong_rows_of(o, _SAMPLES)
    precision = 2.0**-6 if o.tensor.element_size() == 2 else 1e-4
    for b, head, row in wrong:
        at = row + o.before(case.setting.extents, b)
        mine = o.rows(case.setting, b, slice(head, head + 1), slice(at, at + 1))[0, 0].double()
        if not mine.any() or not mine.isfinite().all():
            continue
        for other, marks in enumerate(case.marks[o.name]):
            near = (marks - marked(mine)).abs() < precision * float(mine.norm())
            for h, r in near.nonzero().tolist():
                if (other, h, r) != (b, head, row):
                    heads, length = marks.shape
                    sequence = _short(other - b, len(case.marks[o.name]))
                    direct.add(Place(sequence, (1, h - head), (1, r - row)))
                    votes.update({
                        Place(sequence, by_head, by_row)
                        for by_head in ((1, h - head), (1, _short(h - head, heads)), (-1, (h + head) % heads))
                        for by_row in ((1, r - row), (1, _short(r - row, length)), (-1, (r + row) % length))
                    })  # fmt: skip
    simple = sorted(votes, key=lambda p: (-votes[p], p.heads[0] + p.rows[0] < 2, p not in direct))
    return [p for p in simple[:4] if votes[p] >= max(0.7 * len(wrong), min(2, len(wrong)))]


def rows_moved(case: Case) -> Iterator[Try]:
    for o in _suits(case):
        for place in _other_places(case, o) if case.marks.get(o.name) else []:
            yield _moved(case, o, place)


def _moved(case: Case, o: Output, place: Place) -> Try:
    def errors(kind: str, variance: Tensor, before: Tensor, after: Tensor, x: At, grade: Grade) -> Tensor:
        return place.of(case.setting, o, x, grade).variance

    return _changed(case, o, f"those of {place}", lambda value, x: place.of(case.setting, o, x).value, errors)


MISTAKES = (
    _mistake("output-factor", "Output rows are a multiple of the correct rows.",
             "Look at the last step of the row, and at factors that only some heads or tiles take.", multiplied),
    _mistake("rows-unwritten", "Some output rows, or columns of them, are zeros.",
             "Look at the bounds of the last store: rows or columns after a tile's edge are not written.", unwritten),
    _mistake("columns-order", "Columns of output rows are in another order.",
             "Look at the mapping of a tile's registers to columns when they are stored.", columns_moved),
    _mistake("rows-moved", "Output rows are those of other rows, heads or sequences.",
             "Look at the offset of a tile of rows, and at the strides of heads and sequences, where rows are read or "
             "stored.", rows_moved),
)  # fmt: skip
