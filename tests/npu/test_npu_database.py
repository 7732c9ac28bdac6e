"""torch's operator database (op_db) gives the same bits, gradients or error on npu as on the CPU, in a drawn sample."""

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from support.bits import same_bits
from torch.utils._pytree import tree_leaves, tree_map_only

from fusion_attention import npu

pytest.importorskip("expecttest", reason="torch's tests import it")
pytestmark = pytest.mark.slow  # the import of the database takes five seconds

DTYPES = (torch.float32, torch.int64, torch.bfloat16, torch.complex64, torch.bool)
ROWS, SAMPLES = 500, 4  # rows, and samples of one row

# Operator -> the reason why it differs from the CPU by definition.
APART = {
    "empty": "not written",
    "empty_like": "not written",
    "empty_permuted": "not written",
    "empty_strided": "not written",
    "new_empty": "not written",
    "new_empty_strided": "not written",
    "as_strided.partial_views": "reads what lies around a view, which a copy to another device does not have",
    "to": "its sample says on which device the result lies",
    "tensor_split": "takes its places from the CPU, whatever the device",
    "nn.functional.linear_cross_entropy.chunked": "rounds otherwise on the CPU than on any other device",
    "nn.functional.linear_cross_entropy.chunked_none": "rounds otherwise on the CPU than on any other device",
    "linalg.lstsq": "its last bits differ from call to call on the CPU alone",
    "linalg.lstsq.grad_oriented": "its last bits differ from call to call on the CPU alone",
    **{
        f"jiterator_{name}": "CUDA's alone"
        for name in ("unary", "binary", "binary_return_by_ref", "4inputs_with_extra_args", "2inputs_2outputs")
    },
    "to_sparse": "the device has no sparse tensors",
    "sparse.mm.reduce": "the device has no sparse tensors",
    "sparse.sampled_addmm": "the device has no sparse tensors",
}


def title(op: Any) -> str:
    return ".".join(filter(None, (op.name, op.variant_test_name)))


def database() -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return op_db


@cache
def drawn() -> list[tuple[Any, torch.dtype]]:
    rows = [(op, dtype) for op in database() for dtype in DTYPES if dtype in op.dtypes and title(op) not in APART]
    return random.Random(28).sample(rows, ROWS)


@pytest.fixture(scope="module", autouse=True)
def installed() -> Iterator[None]:
    npu.install()
    yield
    npu.uninstall()


def moved(given: Any) -> Any:
    """Arguments with all tensors, and all device names, moved to npu."""

    def tensor(x: torch.Tensor) -> torch.Tensor:
        return x.detach().npu().requires_grad_(x.requires_grad)  # type: ignore[attr-defined]

    given = tree_map_only(torch.Tensor, tensor, given)
    return tree_map_only(str, lambda text: "npu" if text == "cpu" else text, given)


def run(op: Any, given: Any) -> tuple[list[Any], list[Any]] | Exception:
    """(returned values, gradients), or the exception that was raised."""
    torch.manual_seed(1)
    args, kwargs = given
    try:
        returned = tree_leaves(op(*args, **kwargs))
        ends = [x for x in returned if isinstance(x, torch.Tensor) and x.requires_grad]
        leaves = [x for x in tree_leaves(given) if isinstance(x, torch.Tensor) and x.requires_grad]
        if not ends or not leaves:
            return returned, []
        return returned, list(torch.autograd.grad(ends, leaves, [torch.ones_like(x) for x in ends], allow_unused=True))
    except (RuntimeError, ValueError, IndexError, NotImplementedError, TypeError) as error:
        return error


def same(got: Any, want: Any) -> None:
    assert type(got) is type(want)
    if not isinstance(want, torch.Tensor) or want.layout != torch.strided:
        return
    assert got.device.type == "npu"
    assert got.stride() == want.stride()
    one, other = (x.detach().cpu().resolve_conj().resolve_neg() for x in (got, want))
    same_bits(*(torch.view_as_real(x) if x.is_complex() else x for x in (one, other)))


@pytest.mark.parametrize("row", range(ROWS))
@pytest.mark.filterwarnings("ignore")
def test_torch_operator_on_npu_bitwise_equals_cpu(row: int) -> None:
    op, dtype = drawn()[row]
    torch.manual_seed(0)
    wants_gradient = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    for sample in list(op.sample_inputs("cpu", dtype, requires_grad=wants_gradient))[:SAMPLES]:
        given = (sample.input, *sample.args), dict(sample.kwargs)
        theirs = moved(given)  # before the CPU's call, which may write its arguments
        want, got = run(op, given), run(op, theirs)
        if isinstance(want, Exception) or isinstance(got, Exception):
            assert type(got) is type(want), got
            continue
        for of_npu, of_cpu in zip(got, want, strict=True):
            assert len(of_npu) == len(of_cpu)
            for mine, other in zip(of_npu, of_cpu, strict=True):
                same(mine, other)
