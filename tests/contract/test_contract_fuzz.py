"""Random invalid values in every parameter: a call raises a clear error, or golden can compute it."""

import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.contract_failures import EVERY_INTERFACE, Args, call, layouts, of_versions, starts

from fusion_attention import BackendError, ContractError, ContractWarning
from fusion_attention.contract import Array, Attr, Bound, Op, Param, Tensor, bind, show
from fusion_attention.contract.sampling import sample
from fusion_attention.ir.mask import Band
from fusion_attention.ops import RECORDS
from fusion_attention.ops.auxiliary_definitions.definitions import CONTRACTS
from fusion_attention.ops.fused import definitions as fused_inference
from fusion_attention.ops.fused.geometry import words
from fusion_attention.plan import compute

LARGEST = 1 << 20  # elements of a score matrix that golden is asked to make here

INTS = [*range(9), -1, -3, -9, 12, 100, 2**31 - 1, -(2**31), 2**40, 2**63 - 1, -(2**63), 2**63, 10**400]
FLOATS = [0.5, 1.0, 0.0, -0.0, -2.5, 1e-30, 1e38, 1e300, float("inf"), float("-inf"), float("nan")]
WORDS = ["", "BSND", "BSH", "SBH", "BNSD", "TND", "bsnd", "same_as_input", "mean", "zero", "\ud800", "x" * 5000]
OBJECTS = [None, True, False, b"BSND", 1j, object(), [], {}, [[]], np.int64(2), np.float32(0.5), np.True_, int]
OBJECTS += [torch.ones(2), torch.empty(0), torch.tensor([3]), torch.tensor(0.5), torch.ones(3, device="meta")]
BANDS = [Band(), Band.causal(), Band.window(2, -5), Band.prefix_causal([1, 2]), Band.prefix_causal([9, -(2**80)])]
BANDS += [Band(0.5), Band(-(2**90)), Band(hi=True), Band("1"), Band(prefix=[1, 2]), Band(prefix=(None, 1))]
LISTS = [[], [0], [4], [3, 8], [5, 12], [8, 8], [0, 8], [3, 8, 0], [3, 0, 8], [8, 3], [4, 4], [-1, 8], [2, 6], [0, 0]]
LISTS += [[1, 6], [2**41, 0], [3, 2**62], [-(2**63), 2**63 - 1], [3, None], [3, "8"], [1.5, 2], [True, 8], [[3, 8]]]
SHAPES = [(), (0,), (1,), (4,), (3,), (1024,), (112,), (164,), (2, 4), (1, 4), (4, 6), (8, 12), (2048, 2048), (1,) * 7]
SHAPES += [(0, 4, 6), (4, 4, 6), (1, 1, 4, 6), (2, 1, 4, 6), (2, 4, 4, 6), (1, 4, 1, 6), (2, 4, 4, 8), (1, 4, 1024, 7)]
DTYPES = ["float32", "float16", "float64", "uint8", "bool", "int64", "int32", "complex64", "float8_e5m2"]
SIZES = [{}, {"B": 0}, {"S1": 0}, {"S2": 0}, {"B": 1, "S1": 6}, {"N2": 4}, {"N1": 0}, {"D": 3, "Dv": 5}, {"S1": 6}]

CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "drop an axis": lambda t: t[0],
    "add an axis": lambda t: t[None],
    "swap axes": lambda t: t.transpose(0, -1),
    "strides": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "repeat": lambda t: t[:1].expand_as(t),
    "shorten": lambda t: t[1:],
    "shorten the last axis": lambda t: t[..., 1:],
    "empty": lambda t: t[:0],
    "empty the last axis": lambda t: t[..., :0],
    "grow": lambda t: torch.cat((t, t)),
    "NaN": lambda t: torch.full_like(t, float("nan")) if t.is_floating_point() else torch.ones_like(t),
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "leaf": lambda t: t.clone().requires_grad_() if t.is_floating_point() else t,
    "numpy": lambda t: t.numpy(),
    "list": lambda t: t.tolist(),
    **{name: (lambda t, name=name: t.to(getattr(torch, name))) for name in DTYPES},
}


class Shown(dict[str, Any]):
    """Arguments of a call with a short repr for failure messages."""

    def __repr__(self) -> str:
        return ", ".join(f"{name}={show(value)}" for name, value in self.items() if value is not None)


def odd_values(p: Param) -> list[Any]:
    candidates: list[Any] = LISTS if isinstance(p, Array) else OBJECTS
    if isinstance(p, Attr):
        candidates = {int: INTS, float: FLOATS + INTS, str: WORDS, Band: BANDS}.get(p.type, [True, False])
    return [*candidates, *OBJECTS, *(INTS + FLOATS + WORDS + LISTS)[::3]]


@st.composite
def calls(draw: st.DrawFn, op: Op) -> Args:
    chosen = {**draw(st.sampled_from(SIZES)), **draw(st.sampled_from(starts(op))), **draw(st.sampled_from(layouts(op)))}
    args = sample(op, **chosen)
    inputs = [p for p in op.params if not (isinstance(p, Tensor) and p.output)]
    for p in draw(st.lists(st.sampled_from(inputs), max_size=3)):
        value = args[p.name]
        how = draw(st.integers(0, 9))
        if isinstance(p, Tensor) and isinstance(value, torch.Tensor) and how:
            try:
                args[p.name] = CHANGES[draw(st.sampled_from(list(CHANGES)))](value)
            except (RuntimeError, IndexError, TypeError, NotImplementedError):
                args[p.name] = None  # this tensor cannot be changed in this way
        elif isinstance(p, Tensor) and how:
            tensor = torch.ones(draw(st.sampled_from(SHAPES))).to(getattr(torch, draw(st.sampled_from(DTYPES))))
            args[p.name] = tensor
        else:
            args[p.name] = draw(st.sampled_from(odd_values(p)))
    return Shown(args)


def run_golden(bound: Bound) -> None:
    lowered = bound.op.lower(bound, **({"seed": 5} if "keep_prob" in bound.op.by_name else {}))
    compute(lowered, lowered.results(), "golden")


def is_small(bound: Bound) -> bool:
    n = bound.names
    tensors = (value for value in n.values() if isinstance(value, torch.Tensor))
    sizes = (n.get(name) for name in ("N1", "S1", "S2"))  # operators without attention have none
    pairs = math.prod(1 if size is None else size for size in sizes)
    return pairs * (n.get("B") or 1) <= LARGEST and not any(t.is_meta for t in tensors)


def refusal(act: Callable[[], Any]) -> tuple[str, Any]:
    """Returns (error text, error), or ("", result) if the call succeeds."""
    try:
        return "", act()
    except (ContractError, BackendError) as error:
        return str(error), error


def try_call(op: Op, args: Args) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ContractWarning)
        if op.name in EVERY_INTERFACE:  # functions make their own outputs
            args = Shown({**args, **{p.name: None for p in op.tensors(output=True)}})
        refused, bound = refusal(lambda: bind(op, args))
        if refused:
            assert refused.startswith(str(op.failure(bound.param, "", "")))
            assert bound.code in (161001, 161002, 561002)
        if op.name in EVERY_INTERFACE:  # the two-phase functions take handles: tests/acl/test_aclnn.py
            answer, error = refusal(lambda: call(op, args))
            if "acl_format" in args and isinstance(args["acl_format"], torch.Tensor):
                return  # the functions read the tensor's format, the record a number
            if op.name == "npu_grouped_matmul" and answer and "weight: expected float16" in refused:
                return  # the function unpacks int4 of int32 before bind(), and refuses the int8 that they are
            if isinstance(error, BackendError):
                assert not refused
                assert "float64" in answer or "meta" in answer
            else:
                assert answer == refused, "bind and the function differ"
        if not refused and op.lower is not None and is_small(bound):
            run_golden(bound)


pytestmark = pytest.mark.filterwarnings("ignore:Casting complex values to real")  # a change on purpose


def fuzz(op: Op, examples: int) -> None:
    @settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(calls(op))
    def check(args: Args) -> None:
        try_call(op, args)

    check()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", [pytest.param(name, marks=of_versions(name)) for name in CONTRACTS])
def test_random_argument_values_are_refused_or_computed(name: str) -> None:
    fuzz(CONTRACTS[name], 30 if name in RECORDS else 15)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTRACTS)
def test_many_random_argument_values_are_refused_or_computed(name: str) -> None:
    fuzz(CONTRACTS[name], 10_000 if name in RECORDS else 3_000)


ONE = torch.tensor([0.01])
SCALES: dict[str, Args] = {
    "none": {},
    "of products": dict.fromkeys(("dequant_scale1", "quant_scale1", "dequant_scale2"), ONE),
    "of rows": {"query_quant_mode": 3, "key_antiquant_scale": ONE, "value_antiquant_scale": ONE},
}


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("name", [op.name for op in fused_inference.RECORDS])
def test_an_int8_query_is_computed_or_refused(name: str, scales: str) -> None:
    """Each layout, rope parts of each dtype or none; operators without scales for int8 must refuse."""
    op = CONTRACTS[name]
    for layout, rope in itertools.product(op.layouts, ("", "bfloat16", "int8", "int32")):
        args = sample(op, **{op.layout_attr: layout})
        args |= {p: args[p].to(torch.int8) for p in ("query", "key", "value")}
        if "query_rope" in op.by_name:
            sides = {"query_rope": "1", "key_rope": "2"}
            parts = sample(
                op, **{p: words(side, "Dr")[layout] for p, side in sides.items()}, **{op.layout_attr: layout}
            )
            args |= {p: parts[p].to(getattr(torch, rope)) if rope else None for p in sides}
        args |= {p: value for p, value in SCALES[scales].items() if p in op.by_name}
        if scales == "of rows" and "dequant_scale_query" in op.by_name:
            heads = (args["num_heads"],) if layout.startswith("BSH") else ()
            args["dequant_scale_query"] = torch.ones(*args["query"].shape[:-1], *heads)
        try_call(op, Shown(args))
