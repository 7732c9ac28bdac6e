"""Cache keys of call signatures: the native reader of arguments and the Python one compute equal keys."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fusion_attention.contract.call_cache_key import python_reader, reader
from fusion_attention.contract.sampling import sample
from fusion_attention.ops import RECORDS

pytestmark = pytest.mark.filterwarnings("ignore::fusion_attention.ContractWarning")


class Subclass(torch.Tensor):
    pass


CHANGES: list[Callable[[Any], Any]] = [
    lambda t: t.clone(),
    lambda t: t.contiguous().transpose(0, -1).contiguous().transpose(0, -1),
    lambda t: t[..., :0],
    lambda t: t.to("meta"),
    lambda t: t.as_subclass(Subclass),
    lambda t: torch.nn.Parameter(t, requires_grad=False) if t.is_floating_point() else t,
    lambda t: t.double(),
    lambda t: t.unsqueeze(0),
    lambda t: torch._neg_view(t) if t.is_floating_point() else t,
    lambda t: t.clone().requires_grad_() if t.is_floating_point() else t,
    lambda _: None,
    lambda _: "a string",
]
NUMBERS = [0, 1, True, 1.0, -1, 1 << 62, 1 << 70, 0.5, float("nan"), "BSND", "", None, np.float64(1.0), [1]]


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("grad", [False, True])
def test_python_and_native_cache_keys_distinguish_the_same_calls(name: str, grad: bool) -> None:
    op = RECORDS[name]
    args = sample(op)
    variants: list[dict[str, Any]] = [args, dict(args)]
    for p in op.params:
        value = args.get(p.name)
        if isinstance(value, torch.Tensor):
            variants += [{**args, p.name: change(value)} for change in CHANGES if value.dim()]
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], int):
            variants += [{**args, p.name: other} for other in ([*value, 1], tuple(value), torch.tensor(value), [0.5])]
            variants += [{**args, p.name: torch.tensor(value).repeat_interleave(2)[::2]}]
        elif value is None or isinstance(value, (int, float, str)):
            variants += [{**args, p.name: number} for number in NUMBERS]
    native, python = ([read(given, False, grad) for given in variants] for read in (reader(op), python_reader(op)))
    for i, (one, other) in enumerate(zip(native, python, strict=True)):
        assert (one[0] is None) == (other[0] is None), variants[i]
        assert one[2] == other[2]
        if None not in (one[1], other[1]):
            assert one[1] == other[1]
    for i in range(len(variants)):
        for j in range(i):
            if native[i][0] is not None and native[j][0] is not None:
                assert (native[i][0] == native[j][0]) == (python[i][0] == python[j][0]), (variants[i], variants[j])


def test_cache_key_adds_no_guard_for_symbolic_shapes() -> None:
    shapes = ShapeEnv()
    q = FakeTensorMode(shape_env=shapes).from_tensor(torch.zeros(3, 5, 4, 16))
    assert not isinstance(q.shape[0], int)
    op = RECORDS["attention"]
    for read in (reader(op), python_reader(op)):
        assert read({**sample(op), "q": q}, False, False) == (None, None, True)
    assert shapes.guards == []


def test_strict_mode_is_part_of_the_cache_key() -> None:
    op = RECORDS["attention"]
    for read in (reader(op), python_reader(op)):
        assert read(sample(op), True, False)[0] != read(sample(op), False, False)[0]
