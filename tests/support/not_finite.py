"""Makes calls with lists in which one element is not finite; back ends must match the golden model's NaN and inf.

A weight of 0 times infinity is NaN, so results depend on elements whose scores are -inf or not above 0.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from support.sparse_checks import Args, Results, cloned

from fusion_attention.ir.call import Lowered
from fusion_attention.judging.chi_square_limits import Expected
from fusion_attention.ops.indexer.lowered_call import IndexerBackward
from fusion_attention.ops.indexer_loss.lowered_call import INDEX_STATISTICS, Loss
from fusion_attention.ops.sparse.lowered_call import SparseBackward
from fusion_attention.testing import check, indexer_loss, sparse
from fusion_attention.testing.expected_indexer import check_index
from fusion_attention.testing.indexer_loss import LossCase
from fusion_attention.testing.sparse import IndexerCase, SparseCase

FILLS = (math.nan, math.inf, -math.inf)
TWO: dict[str, Any] = {"q_len": (3, 4), "kv_len": (7, 9)}
HALF = {"dtype": "bfloat16", "weights": "bfloat16"}
FLOAT16 = {"dtype": "float16", "weights": "float16"}

Run = Callable[[Lowered], Results]


def backward(args: Args) -> tuple[SparseBackward, dict[str, Expected]]:
    """Returns the backward of the golden model's rounded output and statistics, and the expected results."""
    call = sparse.lowered(args)
    want = sparse.expected(call, args["dy"])
    out, top, total = (want.pop(name).value for name in ("out", "max", "sum"))
    return SparseBackward(call, args["dy"], out.to(call.problem.torch_dtype), top.float(), total.float()), want


def attention(case: SparseCase, args: Args, run: Run) -> Results:
    """Runs the backward of attention on golden results, checks its gradients and returns them."""
    step, want = backward(args)
    result = run(step)
    check(case.id, result, want)
    return result


def values(case: IndexerCase, args: Args, run: Run) -> Results:
    """Runs the backward of the indexer, checks its gradients and returns them."""
    step = IndexerBackward(sparse.lowered_indexer(args), args["dy"], args["lists"])
    result = run(step)
    check_index(step, {case.id: result})
    return result


def loss(case: LossCase, args: Args, run: Run) -> Results:
    """Runs the loss, checks its results and returns them; without lists, the call gets the indexer's statistics."""
    call = indexer_loss.lowered(case, args)
    given = {} if case.count else {name: args[name] for name in INDEX_STATISTICS}
    call = Loss(call.extents, call.layout, {**call.tensors, **given}, call.problem)
    result = run(call)
    check_index(call, {case.id: result})
    return result


Family = Callable[[Any, Args, Run], Results]
OF_ATTENTION = ("query", "key", "value", "query_rope", "key_rope", "dy", "sinks")
OF_VALUES = ("query", "key", "weights", "dy")
OF_LOSS = ("query", "key", "query_rope", "key_rope", "query_index", "key_index", "weights", "softmax_max")
CASES: list[tuple[Family, Any, tuple[str, ...]]] = [
    (attention, SparseCase("TND", sink=True, dim_rope=4, **TWO), OF_ATTENTION),
    (attention, SparseCase(count=3, heads_kv=2, dtype="bfloat16", **TWO), OF_ATTENTION),
    (attention, SparseCase(count=6, shares_kv=True, dim_qk=20, dim_v=18, heads_q=3, dtype="float16", **TWO), ("key",)),
    (attention, SparseCase(lists="all", count=9, heads_q=3, mode=0, **TWO), OF_ATTENTION),
    (values, IndexerCase(**TWO), OF_VALUES),
    (values, IndexerCase("TND", heads=3, top_k=6, **FLOAT16, **TWO), OF_VALUES),
    (values, IndexerCase("TND", heads=33, top_k=20, q_len=(3, 2), kv_len=(20, 5), **HALF), OF_VALUES),
    (loss, LossCase(count=6, **TWO), OF_LOSS),
    (loss, LossCase("TND", count=6, dim_rope=3, **FLOAT16, **TWO), OF_LOSS),
    (loss, LossCase("TND", count=6, heads=5, heads_q=6, heads_kv=3, sink=True, lists="wild", **HALF, **TWO), OF_LOSS),
]
# ((family, case, names), tensor, index of an element or row, new value), for calls whose products are all above 0.
HIDDEN = [
    (CASES[0], "key", (1, 0), -math.inf),
    (CASES[3], "query", (1, 1, 1), -math.inf),
    (CASES[5], "query", (0, 0, 0), math.nan),
    (CASES[4], "key", (0, 0, 0, 0), math.inf),
    (CASES[7], "key_index", (1, 1, 0), math.inf),
    (CASES[8], "query_index", (0, 0, 0), -math.inf),
]


def arguments_of(family: Family, case: Any, positive: bool) -> Args:
    """Returns arguments; positive: all products are above 0, so that -inf in a row makes all of its scores -inf."""
    arguments = {attention: sparse.arguments, values: sparse.indexer_arguments, loss: indexer_loss.arguments}[family]
    args = cloned(arguments(case))
    if positive:
        for name in ("query_index", "key_index") if family is loss else ("query", "key"):
            args[name].abs_()
    if family is values:
        args["lists"] = sparse.chosen(sparse.in_float64(sparse.lowered_indexer(args)), "golden")[0]
    return args | indexer_loss.statistics(case, args) if family is loss else args


def strides(tensor: torch.Tensor) -> Iterator[tuple[int, ...]]:
    """Yields indices of the first element, of a late element and of a whole row."""
    yield tuple(0 for _ in tensor.shape)
    yield tuple(max(n - 2, 0) if axis < 2 else n - 1 for axis, n in enumerate(tensor.shape))
    if tensor.dim() > 2:
        yield tuple(min(1, n - 1) for n in tensor.shape[:-1])


def hides(what: Any, name: str, at: tuple[int, ...], fill: float, run: Run) -> None:
    """Tests an entry of HIDDEN."""
    family, case, _ = what
    args = arguments_of(family, case, positive=True)
    args[name][at] = fill
    family(case, args, run)


def every_tensor(family: Family, case: Any, names: tuple[str, ...], positive: bool, run: Run) -> None:
    """Tests elements and rows of every tensor; the three places of a tensor take the three values, in turns."""
    full = arguments_of(family, case, positive)
    for n, name in enumerate(names):
        for i, at in enumerate(strides(full[name]) if full[name] is not None else ()):
            args = cloned(full)
            args[name][at] = FILLS[(n + i + positive) % 3]
            family(case, args, run)


def outlasts(dtype: str, run: Run) -> None:
    """Tests that an entry's tiny weight still multiplies an infinity, while a key with score -inf gets no gradient."""
    case = SparseCase(q_len=(3,), kv_len=(20,), count=20, lists="all", heads_q=2, scale=1.0, dim_qk=4, dtype=dtype)
    args = cloned(sparse.arguments(case))
    args["query"].fill_(1.0), args["key"].zero_()
    args["key"][0, 11, 0, 0] = 300.0
    args["key"][0, 3, 0, 0] = -math.inf
    args["dy"][0, 2, 1, 1] = -math.inf
    result = attention(case, args, run)
    assert result["dvalue"][0, 3].isfinite().all()
    assert result["dvalue"][0, :, 0, 1].isinf().sum() > 9


def entries_that_do_not_count(run: Run) -> None:
    """Tests that gradients of values are ignored where the list entry names no visible key."""
    case = IndexerCase("TND", q_len=(3,), kv_len=(7,), top_k=4)
    args = arguments_of(values, case, positive=False)
    args["lists"][0, 0, 1], args["lists"][1, 0, 2] = 6, -1
    args["dy"][0, 0, 1] = args["dy"][1, 0, 2:] = math.nan
    result = values(case, args, run)
    assert all(t.isfinite().all() for t in result.values())
