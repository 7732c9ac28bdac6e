"""The self test of `fusion-attention doctor`: small calls of every group of operators, compared with the float64 model.

Results are judged by the expected size of rounding errors (testing.compare), as in this library's tests.
"""

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from random import Random
from typing import Any

from torch import Tensor

from fusion_attention.ir.call import Lowered
from fusion_attention.testing import Case, arguments, check, expected, expected_of, lowered, run


@dataclass(frozen=True)
class Step:
    """One comparison of the self test: judge() computes a call by a back end, and raises an error if it is wrong."""

    name: str
    backend: str
    judge: Callable[[], None]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one comparison of the self test: its time, and the error's text ("": the results are right)."""

    name: str
    backend: str
    seconds: float
    fault: str


def outcomes(
    backends: list[str], seconds: float, advance: Callable[[float, str], None] = lambda elapsed, words: None
) -> Iterator[Outcome]:
    """Runs the self test: fixed comparisons, then random calls; yields each outcome. After `seconds`, none is started.
    advance: called with the elapsed seconds and the name of the next comparison."""
    fixed = sorted((step for backend in backends for step in _of(backend)), key=lambda step: step.name)
    start = time.monotonic()
    for step in chain(fixed, _drawn(backends)):
        elapsed = time.monotonic() - start
        if elapsed > seconds:
            return
        advance(elapsed, f"{step.name} ({step.backend})")
        fault, begun = "", time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                step.judge()
        except Exception as error:  # a broken installation may raise anything
            fault = f"{type(error).__name__}: {error}".splitlines()[0]
        yield Outcome(step.name, step.backend, time.perf_counter() - begun, fault)


def _drawn(backends: list[str]) -> Iterator[Step]:
    """Yields, without end, comparisons of dense attention calls with random shapes, by each of the back ends."""
    draw = Random(0)
    while backends:
        layout, heads = draw.choice(("BSND", "BNSD", "BSH", "SBH", "TND", "TND")), draw.choice((1, 2, 3))
        dim, items = draw.choice((16, 40, 64, 96, 128, 192)), draw.randint(1, 3)
        alike = layout != "TND"  # sequences of a padded batch have equal lengths
        q_len, kv_len = (
            (draw.randint(1, 200),) * items if alike else tuple(draw.randint(0, 200) for _ in range(items))
            for _ in "qk"
        )
        window: dict[str, Any] = {"pre": draw.randint(0, 99), "next": draw.randint(0, 99)}
        mode = draw.choice((0, 2, 3, 4))
        case = Case(
            layout=layout,
            dtype=draw.choice(("float32", "float16", "bfloat16")),
            q_len=q_len,
            kv_len=kv_len,
            heads_q=heads * draw.choice((1, 2, 4)),
            heads_kv=heads,
            dim_qk=dim,
            dim_v=dim,
            scale=dim**-0.5,
            sparse_mode=mode,
            mask="compressed" if mode else "none",
            **(window if mode == 4 else {}),
        )
        yield from (Step(f"drawn {case.id}", name, partial(_judge_dense, case, name)) for name in backends)


def _of(backend: str) -> Iterator[Step]:
    if backend == "cpu":
        from fusion_attention import _native
        from fusion_attention.plan import compute

        variants = list(_native.cpu_features()["runnable"])
        yield from (Step(f"instruction set {name}", backend, partial(_judge_variant, name)) for name in variants)
    for dtype in ("float32", "float16", "bfloat16"):
        for name, case in _dense(dtype).items():
            yield Step(f"{name}, forward and backward, {dtype}", backend, partial(_judge_dense, case, backend))
    if backend == "cpu":
        yield Step("decoding over pages", backend, partial(_judge_decoding, partial(compute, backend=backend)))
        yield Step("sparse attention, forward and backward", backend, partial(_judge_sparse, backend))
        yield Step("the indexer's choice", backend, partial(_judge_indexer, backend))


def _dense(dtype: str) -> dict[str, Case]:
    """Returns {name: test case} of dense attention in a dtype: layouts, mask modes, biases, long sequences."""
    small: dict[str, Any] = {"dtype": dtype, "q_len": (70,), "kv_len": (90,), "dim_qk": 64, "dim_v": 64, "scale": 0.125}
    packed = {**small, "layout": "TND", "q_len": (3, 0, 40), "kv_len": (5, 4, 61)}
    long_rows = {**small, "dim_qk": 128, "dim_v": 128, "q_len": (300,), "kv_len": (400,), "scale": 0.09}
    causal: dict[str, Any] = {"sparse_mode": 3, "mask": "compressed"}
    cases = {f"layout {layout}": Case(**{**small, "layout": layout}) for layout in ("BSND", "BNSD", "BSH", "SBH")}
    cases |= {
        "packed and causal": Case(**packed, **causal),
        "packed, all keys": Case(**packed),
        "a window": Case(**small, sparse_mode=4, mask="compressed", pre=20, next=3),
        "a mask matrix": Case(**small, mask="matrix", blank=True),
        "a bias and a sink": Case(**small, pse="full", sink=True),
        "long rows": Case(**long_rows),
        "long rows, causal": Case(**long_rows, **causal),
        "dropout": Case(**small, keep_prob=0.7, dropout="bits"),
    }
    return cases


def _judge_variant(name: str) -> None:
    """Raises AssertionError if the native core's kernels for instruction set `name` attend or decode wrongly."""
    from fusion_attention.backends import cpu
    from fusion_attention.ops.training.forward_backward import DenseForward

    def compute(call: Lowered, results: dict[str, Tensor]) -> None:
        filled = call.fill(results)
        filled.begin()
        plan: Any = cpu.schedule(call.problem, call.extents, call.op_kind, name)
        cpu.attention_forward(call.problem, call.extents, plan, *filled.operands)
        filled.finish()

    for dtype in ("float32", "bfloat16"):
        case = _dense(dtype)["packed and causal"]
        args = arguments(case)
        call = DenseForward(lowered(case, args))
        results = call.results()
        compute(call, results)
        check(case.id, {"out": results["out"]}, {"out": expected(case, args)["out"]})
    _judge_decoding(compute)


def _judge_dense(case: Case, backend: str) -> None:
    args = arguments(case)
    call, dy = lowered(case, args), args["dy"]
    if backend == "triton":
        import dataclasses

        tensors = {name: getattr(call, name).cuda() for name in ("q", "k", "v")}
        extras = tuple(one if one is None else one.cuda() for one in call.extras)
        call, dy = dataclasses.replace(call, **tensors, extras=extras), dy.cuda()
    results = {name: tensor.cpu() for name, tensor in run(call, dy, backend).items()}
    check(case.id, results, expected(case, args))


def _judge_decoding(compute: Callable[[Lowered, dict[str, Tensor]], None]) -> None:
    from fusion_attention.contract import bind
    from fusion_attention.ops import RECORDS
    from fusion_attention.testing import decode

    op = RECORDS["npu_incre_flash_attention"]
    for case in (decode.DecodeCase(store="pages", dim=64, kv_len=(40, 9)), decode.DecodeCase(integers="channel")):
        assert op.lower is not None
        call = op.lower(bind(op, decode.arguments(case)))
        result = call.results()
        compute(call, result)
        check(case.id, result, expected_of(call, {"attention_out": decode.query_of(case, decode.answer(case))}))


def _judge_sparse(backend: str) -> None:
    from fusion_attention.testing import sparse

    case = sparse.SparseCase(dtype="float32", q_len=(9, 7), kv_len=(12, 9))
    args = sparse.arguments(case)
    call = sparse.lowered(args)
    got = sparse.compute(case, call, args["dy"], backend)
    check(case.id, got, sparse.expected(call, args["dy"]))


def _judge_indexer(backend: str) -> None:
    """Raises AssertionError if a back end's indexer selects other keys than the float64 model (golden)."""
    from fusion_attention.testing import sparse

    call = sparse.lowered_indexer(sparse.indexer_arguments(sparse.IndexerCase()))
    ours, expected = (sparse.chosen(call, name)[0] for name in (backend, "golden"))
    assert bool((ours == expected).all()), "the selected keys differ from those of the float64 model"
