"""Expected errors of the indexer family are compared with simulated roundings, right results and wrong results."""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.long_calls import computed_call

import fusion_attention as fa
from fusion_attention.judging import expected_indexer_error as errors
from fusion_attention.judging import indexer as judging_indexer
from fusion_attention.judging.calls import recorded
from fusion_attention.judging.chi_square_limits import Errors, ratios
from fusion_attention.judging.expected_error import KERNEL, PROGRAM, Grade
from fusion_attention.judging.indexer_formulas import Compared, Index, compared, gradients, softmax
from fusion_attention.judging.standards import STANDARDS
from fusion_attention.plan import compute
from fusion_attention.testing import indexer_loss as losses
from fusion_attention.testing import sparse as selections

Tensor = torch.Tensor
DENSE, LISTED = "npu_dense_lightning_indexer_grad_kl_loss", "npu_sparse_lightning_indexer_grad_kl_loss"
CHOICE = "npu_lightning_indexer"
DTYPES = ["float32", "float16", "bfloat16"]


# -------------------------------------------------------------------------------------------------- simulated roundings


@dataclass(frozen=True)
class Rounds(Grade):
    """Grade with given variances: of sums and float32 steps (a), of steps in the dtype (r), of weights (w)."""

    a: float = 0.0
    r: float = 0.0
    w: float = 0.0

    def sums(self, dtype: torch.dtype) -> float:
        return self.a

    def step(self, dtype: torch.dtype) -> float:
        return self.r

    def weight(self, dtype: torch.dtype) -> float:
        return self.w + 2 * self.r


GRADES = [Rounds("a", a=1e-12), Rounds("w", w=1e-8), Rounds("a r w", a=1e-12, r=1e-9, w=1e-9)]
DRAWS, AT_ONCE = 2000, 500


class Program:
    """Simulated program: the loss in float64 with an independent error at every rounding, drawn many times."""

    def __init__(self, c: Compared, grade: Rounds, seed: int) -> None:
        self.c, self.g = c, grade
        self.generator = torch.Generator().manual_seed(seed)

    def noise(self, variance: Tensor) -> Tensor:
        """Random errors of the given variance, one per draw."""
        shape = variance.shape if len(variance) == AT_ONCE else (AT_ONCE, *variance.shape)
        drawn = torch.rand(shape, generator=self.generator, dtype=torch.float64)
        return (2 * drawn - 1) * (3 * variance).sqrt()

    def summed(self, terms: Tensor, dim: int, exact: Tensor | None = None) -> Tensor:
        """Sum in float32 in any order, with a random error."""
        total = terms.sum(dim)
        n = terms.shape[dim] if exact is None else exact
        return total + self.noise(self.g.a * n * (total.square() / 3 + terms.square().sum(dim)))

    def scores(self) -> tuple[Tensor, Tensor]:
        """(dot products S [draws, heads, rows, keys], scores I [draws, rows, keys])."""
        s, a, r, n = self.c.scored, self.g.a, self.g.r, self.c.scored.q.shape[-1]
        squares = s.q.square() @ s.k.square().mT
        variance = a * (n * (s.dots.square() / 3 + squares) + s.dots.square())
        dots = s.dots + self.noise(variance + r * (2 * s.dots.square() + squares))
        terms = s.weights * dots.clamp(min=0)
        terms = terms + self.noise((a + r) * terms.square())
        total = self.summed(terms, 1)
        return dots, total + self.noise(r * total.square())

    def y(self, scores: Tensor) -> Tensor:
        """Softmax y [draws, rows, keys], from computed or given statistics."""
        c, a, r = self.c, self.g.a, self.g.r
        visible = c.times > 0
        top = scores.masked_fill(~visible, -math.inf).amax(-1, keepdim=True) if c.own_statistics else c.top
        left = (scores - top).masked_fill(~visible, 0)
        each = left.exp() * (1 + self.noise((2 * left.square() + 8) * a + r * (left.square() + 4)))
        total = (each * c.times).sum(-1, keepdim=True) if c.own_statistics else c.total
        n = c.times.square().sum(-1, keepdim=True) if c.own_statistics else torch.zeros(1)
        shared = self.noise((a + r) * (2 + c.total.log().square()) + a * n / 3)
        return (each / total * (1 + shared)).masked_fill(~visible, 0)

    def p(self) -> Tensor:
        """Target p [draws, rows, keys]."""
        x, a, r, heads = self.c.attended, self.g.a, self.g.r, len(self.c.attended.scores)
        e = a * (x.dim * (x.scores.square() / 3 + x.squares) + 5 * x.scores.square() + 2 * x.lse.square() + 8)
        e = e + r * (x.squares + 5 * x.scores.square() + 4) + (a + r) * (x.scores - x.lse).square()
        each = x.shares / x.divisor * (1 + self.noise(e))
        total = self.summed(each, 1)
        total = total + self.noise((3 * a + 2 * r) * total.square())
        shared = self.noise(2 * (a + r) + (a + r) * (1 + x.lse.square()).mean(0) / heads)
        return (total * (1 + shared)).masked_fill(self.c.times == 0, 0)

    def outputs(self) -> dict[str, Tensor]:
        """loss, dq, dk and dweights [draws, ...], without errors proportional to the size of sums."""
        c, s, a, r, w = self.c, self.c.scored, self.g.a, self.g.r, self.g.weight(torch.float32)
        dots, scores = self.scores()
        y, p = self.y(scores), self.p()
        dscores = c.times * (y - p)
        activations, often = dots.clamp(min=0), c.times.square()  # equal terms have equal roundings
        visible_count = often.sum(-1, keepdim=True)
        live = (s.dots > 0) & (c.times > 0)
        spread = (s.weights * dscores[:, None]).masked_fill(~live, 0)
        spread = spread + self.noise((w + 2 * a) * spread.square())
        dq, dk = spread @ s.k, (spread.mT @ s.q).sum(1)
        rows, heads = len(c.times), len(s.q)
        dq = dq + self.noise(a * visible_count * (spread.square() @ s.k.square()))
        dk = dk + self.noise(a * rows * heads * ((often * spread.square()).mT @ s.q.square()).sum(1))
        terms = dscores[:, None] * activations
        terms = terms + self.noise((2 * a + 2 * r + a * visible_count) * terms.square())
        return {"loss": self.loss(y, p), "dq": dq, "dk": dk[:, None], "dweights": terms.sum(-1).mT[:, None]}

    def loss(self, y: Tensor, p: Tensor) -> Tensor:
        c, a, r = self.c, self.g.a, self.g.r
        log_p, log_y = p.clamp(min=1e-8).log(), y.clamp(min=1e-8).log()
        apart = 2 * (log_p - log_y).square()
        logs = a * (log_y.square() + 2 * log_p.square() + apart + 2) + r * (log_y.square() + log_p.square() + apart)
        each = c.times * p * (log_p - log_y + self.noise(logs))
        n = c.times.square().sum(-1)
        total = self.summed(each, -1, n)
        total = total + self.noise((a * len(n) + r) * total.square())
        return total.sum(-1, keepdim=True)


def setting(*, listed: bool, sink: bool = False, heads: int = 3, lists: str = "random", keys: int = 11) -> Index:
    """Judge's setting of a loss call with one sequence."""
    count = 6 if listed else 0
    case = losses.LossCase(
        count=count, q_len=(7,), kv_len=(keys,), heads=heads, dim=6, sink=sink,
        lists=lists,
    )  # fmt: skip
    args = losses.arguments(case)
    return judging_indexer.setting_of(losses.lowered(case, args))


@pytest.mark.parametrize("lists", ["", "random", "repeated"])
@pytest.mark.parametrize("grade", GRADES, ids=lambda g: g.words)
def test_expected_loss_and_gradient_errors_match_simulated_roundings(grade: Rounds, lists: str) -> None:
    """Elements with products near 0 are left out, because their sign is uncertain."""
    x = setting(listed=bool(lists), lists=lists)
    c, dtype = compared(x, 0, slice(0, 7), torch.float64), torch.float32
    visible = c.times > 0
    u = errors.uncertain(c.scored, dtype, grade)
    assert not u.open.any() or grade.r
    spread = errors.spread(c, u, dtype, grade)
    result = errors.of_gradients(c.scored, u, c.times, c.dscores, (spread, c.by_y, c.by_p), 7, dtype, grade)
    result["loss"] = errors.of_loss(c, spread, 7, dtype, grade)
    golden = gradients(c.scored, c.dscores, visible) | {"loss": c.losses.sum().reshape(1)}
    program, squares = Program(c, grade, 1), {n: torch.zeros_like(v) for n, v in golden.items()}
    for _ in range(DRAWS // AT_ONCE):
        for n, drawn in program.outputs().items():
            squares[n] += (drawn - golden[n]).square().sum(0)
    for n, variance in result.items():
        some = variance > 0
        ratio = (squares[n][some] / DRAWS / variance[some]).sqrt()
        assert float(squares[n][~some].sum()) < 1e-20
        if not some.any():
            assert not grade.a, n
            continue
        assert 0.93 < float(ratio.mean()) < 1.05, (n, ratio)
        far = 0.5 if lists == "repeated" else 0.3  # roundings of repeated entries are taken for one, or for as many
        assert 1 - far < float(ratio.min()) <= float(ratio.max()) < 1 + far, (n, ratio)


@pytest.mark.parametrize("grade", [GRADES[0], GRADES[2]], ids=lambda g: g.words)
def test_expected_score_and_statistic_errors_match_simulated_roundings(grade: Rounds) -> None:
    """Rows with nearly equal maxima are left out for max and sum."""
    x = setting(listed=False)
    c, dtype = compared(x, 0, slice(0, 7), torch.float64), torch.float32
    u, program = errors.uncertain(c.scored, dtype, grade), Program(c, grade, 2)
    visible, squares = c.times > 0, [0.0, 0.0, 0.0]
    top, total = softmax(c.scored.scores, c.times)
    for _ in range(DRAWS // AT_ONCE):
        _, scores = program.scores()
        shown = scores.masked_fill(~visible, -math.inf)
        mine = shown.amax(-1, keepdim=True)
        left = (shown - mine).masked_fill(~visible, 0)
        each = left.exp() * (1 + program.noise((2 * left.square() + 8) * grade.a + grade.r * (left.square() + 4)))
        added = each.masked_fill(~visible, 0).sum(-1, keepdim=True)
        added = added * (1 + program.noise((grade.a * visible.sum(-1, keepdim=True) / 3 + grade.r).expand_as(mine)))
        for i, (drawn, golden) in enumerate(((scores, c.scored.scores), (mine, top), (added, total))):
            squares[i] = squares[i] + (drawn - golden).square().sum(0)
    p = x.problem
    problem = SimpleNamespace(heads=p.heads_index, dtype=p.dtype, torch_dtype=torch.float32, ratio=p.ratio)
    s = Index("indexer_lse", problem, x.extents, x.index)
    two = errors.statistics(s, 0, slice(0, 7), grade)
    for drawn, variance in zip(squares, (u.scores, two["max"].variance[0], two["sum"].variance[0]), strict=True):
        ratio = (drawn / DRAWS / variance).sqrt()[variance > 0]
        assert 0.9 < float(ratio.mean()) < 1.05, ratio
        assert 0.7 < float(ratio.min()) <= float(ratio.max()) < 1.3, ratio


def test_product_of_uncertain_sign_enlarges_expected_gradient_error() -> None:
    """Programs may compute either sign, so the term is present or 0; the expected error is half the difference."""
    x = setting(listed=False)
    c, dtype, grade = compared(x, 0, slice(0, 7), torch.float64), torch.float32, GRADES[0]
    for factor in (-3.0, -0.5, 0.5, 3.0):
        dots = c.scored.dots.clone()
        dots[1, 6, 2] = 0
        near = type(c.scored)(**{**c.scored.__dict__, "dots": dots})
        dots = dots.clone()
        dots[1, 6, 2] = factor * errors.uncertain(near, dtype, grade).products[1, 6, 2].sqrt()
        near = type(c.scored)(**{**c.scored.__dict__, "dots": dots, "activations": dots.clamp(min=0)})
        u = errors.uncertain(near, dtype, grade)
        assert u.open.nonzero().tolist() == [[1, 6, 2]]
        given = c.dscores, None, 7, dtype, grade
        result = errors.of_gradients(near, u, c.times > 0, *given)
        sign = -1 if factor > 0 else 1
        flipped = type(near)(**{**near.__dict__, "dots": torch.where(u.open, sign * 1.0, dots)})
        one, other = (gradients(s, c.dscores, c.times > 0) for s in (near, flipped))
        for n in ("dq", "dk"):
            ratio = ratios(other[n], one[n], result[n].sqrt() + 1e-30)
            assert 1.9 < math.sqrt(float(ratio.max())) <= 2.0
    zero = type(near)(**{**near.__dict__, "dots": torch.zeros_like(dots), "activations": torch.zeros_like(dots)})
    assert not errors.uncertain(zero, dtype, grade).open.any()


def test_expected_errors_of_row_blocks_add_up_to_the_full_call() -> None:
    x = setting(listed=False)
    full = errors.wanted(x, 0, slice(0, 7), KERNEL)
    parts = [errors.wanted(x, 0, rows, KERNEL) for rows in (slice(0, 3), slice(3, 7))]
    for kind in errors.TOTALS:
        for field in ("value", "variance"):
            total = sum(getattr(p[kind], field) for p in parts)
            torch.testing.assert_close(total, getattr(full[kind], field), rtol=1e-12, atol=1e-30)
    for kind, dim in (("dq", 1), ("dweights", 1)):
        for field in ("value", "variance"):
            both = torch.cat([getattr(p[kind], field) for p in parts], dim)
            torch.testing.assert_close(both, getattr(full[kind], field), rtol=1e-12, atol=1e-30)


# -------------------------------------------------------------------------------------------------------- right results


def results_of(name: str, args: dict[str, Any], backend: str = "cpu") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(inputs, outputs) of a call."""
    call = computed_call(name, args, backend)
    return call.args, call.outputs


def indexer(dtype: str, rows: int, keys: int, **more: Any) -> dict[str, Any]:
    case = selections.IndexerCase(dtype=dtype, q_len=(rows,), kv_len=(keys,), **{"heads": 4, "dim": 32} | more)
    return selections.indexer_arguments(case)


def loss(dtype: str, rows: int, keys: int, count: int, **more: Any) -> dict[str, Any]:
    sizes = {"heads": 4, "dim": 32, "dim_qk": 32}
    return losses.arguments(losses.LossCase(dtype=dtype, q_len=(rows,), kv_len=(keys,), count=count, **sizes | more))


def of_every_kind(dtype: str, seed: int) -> list[tuple[str, dict[str, Any]]]:
    """(operator, arguments) of a call of each operator, with sizes from the seed."""
    rows, keys = 5 + 7 * seed % 83, 90 + 11 * seed % 97
    heads = (1, 2, 4, 9)[seed % 4]
    return [
        (CHOICE, indexer(dtype, rows, keys, top_k=7 + seed, heads=heads)),
        (DENSE, loss(dtype, rows, keys, 0, heads=heads)),
        (LISTED, loss(dtype, rows, keys, 5 + seed, heads=heads, sink=seed % 2 == 1)),
    ]


def right(name: str, inputs: dict[str, Any], outputs: dict[str, Tensor]) -> None:
    result = fa.judge(name, inputs, outputs, backends=False)
    assert result.verdict == "right", result
    assert result.grade == KERNEL.words, result
    for o in result.outputs.values():
        assert o.z_tile <= (4.0 if o.name == "loss" else 2.0), (o.name, o.z_tile)  # a loss is one number


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("dtype", DTYPES)
def test_cpu_back_end_results_are_judged_right(dtype: str, seed: int) -> None:
    for name, args in of_every_kind(dtype, seed):
        right(name, *results_of(name, args))


@pytest.mark.parametrize("dtype", DTYPES)
def test_cpu_results_with_2048_keys_are_judged_right(dtype: str) -> None:
    """Variances of so many products, more than 2^18 of four heads, are computed in float32."""
    right(CHOICE, *results_of(CHOICE, indexer(dtype, 36, 2048, top_k=300)))
    right(DENSE, *results_of(DENSE, loss(dtype, 36, 2048, 0)))
    right(LISTED, *results_of(LISTED, loss(dtype, 36, 2048, 200)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_float64_reference_results_are_right_by_every_standard(dtype: str) -> None:
    """Golden results have one rounding, fewer than any kernel's."""
    for name, args in of_every_kind(dtype, 5):
        inputs, outputs = results_of(name, args, "golden")
        for standard in STANDARDS:
            result = fa.judge(name, inputs, outputs, backends=False, standard=standard)
            assert result.verdict == "right", result
            assert {*result.outputs} == {*outputs}


@pytest.mark.parametrize("dtype", DTYPES)
def test_indexer_backward_gradients_are_judged(dtype: str) -> None:
    """indexer_backward has no operator definition, so its parts are judged directly."""
    call = selections.lowered_indexer(indexer(dtype, 60, 90, top_k=20))
    indices, values = selections.chosen(call, "cpu")
    backward = selections.IndexerBackward(call, torch.randn_like(values), indices)
    results = backward.results()
    compute(backward, results, "cpu")
    result = judging_indexer.Indexed(judging_indexer.setting_of(backward), backward, results).measured(None, KERNEL)
    assert result.passes
    assert {*result.tallies} == {"dquery", "dkey", "dweights"}
    assert max(t.errors.z_tile for t in result.tallies.values()) <= 2.0
    results["dkey"][0, 3:19] = 0
    results["dweights"][0, 5] *= 1.1
    result = judging_indexer.Indexed(judging_indexer.setting_of(backward), backward, results).measured(None, PROGRAM)
    assert result.failing == ["dkey", "dweights"]


# -------------------------------------------------------------------------------------------------------- wrong results


def failing(name: str, inputs: dict[str, Any], outputs: dict[str, Tensor]) -> list[str]:
    result = fa.judge(name, inputs, outputs, backends=False)
    assert result.verdict == "wrong"
    assert "NaN" not in str(result)  # which stands for an impossible index
    return result.failing()


@pytest.mark.parametrize("dtype", DTYPES)
def test_wrong_selected_indices_are_called_wrong(dtype: str) -> None:
    inputs, outputs = results_of(CHOICE, indexer(dtype, 70, 200, top_k=20))
    right(CHOICE, inputs, outputs)
    listed, values = outputs["sparse_indices_out"], outputs["sparse_values_out"]
    gaps = (values[0, :, 0, :-1] - values[0, :, 0, 1:]).float().nan_to_num(0.0, 0.0, 0.0)
    row, at = divmod(int(gaps.argmax()), gaps.shape[1])

    def changed(place: int, to: Tensor | int) -> dict[str, Tensor]:
        result = listed.clone()
        result[0, row, 0, place] = to
        return {"sparse_indices_out": result, "sparse_values_out": values}

    every = listed[0, row, 0].tolist()
    unlisted = next(j for j in range(200) if j not in every)
    one = listed[0, row, 0].clone()
    one[at], one[at + 1] = every[at + 1], every[at]
    swapped = listed.clone()
    swapped[0, row, 0] = one
    wrongs = [changed(at, to) for to in (unlisted, every[at + 1], -1, 200, -2)]
    wrongs += [{"sparse_indices_out": bad, "sparse_values_out": values} for bad in (listed * 0, swapped)]
    for wrong in wrongs:
        assert failing(CHOICE, inputs, wrong) == ["sparse_indices_out"]


def test_hidden_keys_and_wrong_tie_order_in_selections_are_called_wrong() -> None:
    """A row with three visible keys lists three; of equal scores the smaller index comes first."""
    args = indexer("float32", 6, 6, top_k=6, exact=True)
    args["key"][0, 1] = args["key"][0, 0]
    inputs, outputs = results_of(CHOICE, args)
    right(CHOICE, inputs, outputs)
    listed, values = outputs["sparse_indices_out"], outputs["sparse_values_out"]
    assert listed[0, 2, 0, 3] == -1
    hidden = listed.clone()
    hidden[0, 2, 0, 3] = 4
    assert failing(CHOICE, inputs, {"sparse_indices_out": hidden}) == ["sparse_indices_out"]
    ties = (values[0, :, 0, 1:] == values[0, :, 0, :-1]) & (values[0, :, 0, 1:] != -math.inf)
    row, at = ties.nonzero()[0].tolist()
    other = listed.clone()
    other[0, row, 0, at], other[0, row, 0, at + 1] = listed[0, row, 0, at + 1], listed[0, row, 0, at]
    assert failing(CHOICE, inputs, {"sparse_indices_out": other}) == ["sparse_indices_out"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_swapped_keys_with_scores_within_rounding_are_right(dtype: str) -> None:
    """Keys are nearly equal, so float32 rounding determines the order of the list."""
    args = indexer(dtype, 40, 300, top_k=100)
    args["key"][:] = args["key"][:, :1] * (1 + 2.0**-9 * torch.rand(300)[None, :, None, None]).to(args["key"].dtype)
    right(CHOICE, *results_of(CHOICE, args))


@pytest.mark.parametrize("name", [DENSE, LISTED])
@pytest.mark.parametrize("dtype", DTYPES)
def test_wrong_loss_or_gradients_are_called_wrong(dtype: str, name: str) -> None:
    inputs, outputs = results_of(name, loss(dtype, 128, 160, 40 if name == LISTED else 0))
    right(name, inputs, outputs)

    def changed(output: str, place: Any, factor: float) -> dict[str, Tensor]:
        results = {n: t.clone() for n, t in outputs.items()}
        results[output][place] *= factor
        return results

    for output, place, factor in (
        ("dkey_index", (0, slice(16, 32)), 0.0),
        ("dweights", (0, slice(64, 96)), 1.1),
        ("dquery_index", (0, slice(32, 64), 1), 2.0),
        ("loss", 0, 1.001 if dtype == "float32" else 1.05),
    ):
        assert failing(name, inputs, changed(output, place, factor)) == [output]


def test_bfloat16_noise_fails_kernel_grade_and_passes_program_grade() -> None:
    inputs, outputs = results_of(DENSE, loss("bfloat16", 64, 96, 0))
    x = judging_indexer.setting_of(recorded(DENSE, inputs, outputs).lowered())
    kernel, program = (errors.wanted(x, 0, slice(0, 64), g)["dq"] for g in (KERNEL, PROGRAM))
    drawn = program.value + program.variance.sqrt() * torch.randn(program.value.shape, dtype=torch.float64)
    for wanted, fails in ((kernel, True), (program, False)):
        tally = Errors([64], len(drawn), drawn.shape[-1])
        tally.add(0, slice(0, len(drawn)), slice(0, 64), ratios(drawn, wanted.value, wanted.variance.sqrt()))
        assert bool(tally.fails()) == fails
