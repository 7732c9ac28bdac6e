"""Functions generated from operator definitions: help() and the TypeErrors of wrong calls."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusion_attention import npu
from fusion_attention.contract import Op
from fusion_attention.ops.auxiliary_definitions.definitions import CONTRACTS
from fusion_attention.torch_ops.misspelled_arguments import misused

OPERATORS = {name: op for name, op in CONTRACTS.items() if name in npu.__all__}


def with_defaults(one: int, two: int, three: int = 3, *, four: int, five: int = 5) -> None:
    """Function written in Python, for comparison of error texts."""


def by_name(*, one: int, two: int, three: int) -> None:
    """Function with keyword-only parameters."""


def one(given: int) -> None:
    """Function with one parameter."""


@pytest.mark.parametrize(
    ("function", "given", "named"),
    [
        (with_defaults, (), {}),
        (with_defaults, (1,), {"four": 4}),
        (with_defaults, (), {"two": 2, "four": 4}),
        (with_defaults, (1, 2), {}),
        (with_defaults, (1, 2), {"one": 1, "four": 4}),
        (with_defaults, (1, 2, 3, 4), {}),
        (with_defaults, (), {"one": 1, "three": 3}),
        (by_name, (), {}),
        (by_name, (), {"one": 1}),
        (one, (1, 2), {}),
    ],
)
def test_argument_errors_have_the_text_of_python_type_errors(
    function: Callable[..., None], given: tuple[int, ...], named: dict[str, int]
) -> None:
    with pytest.raises(TypeError) as python:
        function(*given, **named)
    assert str(misused(function, given, named)) == str(python.value)


@pytest.mark.parametrize(
    ("given", "named", "says"),
    [
        ((), {}, "missing 5 required positional arguments: 'query', 'key', 'value', 'head_num', and 'input_layout'"),
        ((1, 2, 3), {"query": 1}, "got multiple values for argument 'query'"),
        ((), {"pre_tokens": 1}, "got an unexpected keyword argument 'pre_tokens' (did you mean pre_tockens=?)"),
        ((1,) * 25, {}, "takes from 5 to 24 positional arguments but 25 were given"),
    ],
)
def test_argument_error_names_function_and_argument(given: tuple[int, ...], named: dict[str, int], says: str) -> None:
    """A canonical parameter name is rejected by a function that spells the parameter differently."""
    with pytest.raises(TypeError, match=re.escape(f"npu_fusion_attention() {says}")):
        npu.npu_fusion_attention(*given, **named)


@pytest.mark.parametrize("name", OPERATORS)
def test_help_text_lists_summary_parameters_source_and_example(name: str) -> None:
    op: Op = OPERATORS[name]
    function = getattr(npu, name)
    text = inspect.getdoc(function) or ""
    assert (function.__name__, function.__qualname__) == (name, name)
    assert "def call(" not in inspect.getsource(function)  # the body, not what calls it
    assert text.startswith(op.summary)
    assert all(len(line) < 120 for line in text.splitlines() if line.startswith("    "))
    for p in op.inputs:
        assert f"\n    {p.shown}: " in text, p.shown
    assert "\nSource: " in text
    assert f"{name}(" in text.partition("\nExample:\n")[2]
    assert list(inspect.signature(function).parameters) == [p.shown for p in op.inputs]


def test_omitted_scale_is_distinguished_from_explicit_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale is 1.0 in each call; only a rule depends on whether the call passes it."""
    scales: list[Any] = []
    monkeypatch.setattr("fusion_attention.npu.training_call.forward", lambda op, args: scales.append(args["scale"]))
    q = torch.zeros(1)
    npu.npu_fusion_attention(q, q, q, 1, "BSND")
    npu.npu_fusion_attention(q, q, q, 1, "BSND", scale=1.0)
    assert scales == [None, 1.0]
    assert inspect.signature(npu.npu_fusion_attention).parameters["scale"].default == 1.0
