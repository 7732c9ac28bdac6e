"""Auxiliary operators give the same bits on every device and memory layout, and reject float64."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.bits import same_bits
from support.contract_failures import AUXILIARY_INTERFACES

from fusion_attention import ContractError, npu
from fusion_attention.contract import Tensor
from fusion_attention.contract.sampling import sample
from fusion_attention.ops.auxiliary_definitions.definitions import AUXILIARY

# Operators that move elements without arithmetic accept every dtype.
OF_ANY_DTYPE = {"npu_confusion_transpose", "npu_confusion_transpose_backward", "npu_format_cast", "npu_format_cast_"}


@pytest.fixture(scope="module", autouse=True)
def _device() -> Iterator[None]:
    npu.install()
    yield
    npu.uninstall()


def each(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Apply `change` to every tensor of a value, also in lists and tuples."""
    if isinstance(value, torch.Tensor):
        return change(value)
    return [each(change, v) for v in value] if isinstance(value, (list, tuple)) else value


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in tensors(v)] if isinstance(value, (list, tuple)) else []


def given(name: str) -> dict[str, Any]:
    """Arguments of a sample call by the function's spelling; tensors are clones, because some functions write them."""
    op = AUXILIARY[name]
    args, inputs = sample(op), [p for p in op.params if not (isinstance(p, Tensor) and p.output)]
    return {p.shown: each(torch.clone, args[p.name]) for p in inputs}


def every_second(tensor: torch.Tensor) -> torch.Tensor:
    """Copy of the tensor in which no two elements are adjacent in memory."""
    storage = torch.zeros([2 * n for n in tensor.shape], dtype=tensor.dtype)
    result = storage[tuple(slice(None, None, 2) for _ in tensor.shape)]
    return result.copy_(tensor)


def on_npu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("npu")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("change", [every_second, on_npu], ids=["strided", "npu"])
@pytest.mark.parametrize("name", AUXILIARY)
def test_results_of_strided_or_npu_tensors_bitwise_equal_contiguous_cpu(
    name: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    original, changed = given(name), {key: each(change, value) for key, value in given(name).items()}
    results = [AUXILIARY_INTERFACES[name](**args) for args in (original, changed)]
    want, got = (
        [*tensors(result), *tensors([*args.values()])]
        for result, args in zip(results, (original, changed), strict=True)
    )
    assert len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.device.type == ("cpu" if change is every_second else "npu")
        same_bits(ours.cpu(), theirs, name)


@pytest.mark.parametrize("name", [name for name in AUXILIARY if name not in OF_ANY_DTYPE])
def test_float64_is_refused(name: str) -> None:
    floats = [
        key for key, value in given(name).items() if isinstance(value, torch.Tensor) and value.dtype == torch.float32
    ]
    for key in floats:
        args = given(name)
        with pytest.raises(ContractError, match=rf"{name}: \w+: expected .*float64"):
            AUXILIARY_INTERFACES[name](**{**args, key: args[key].double()})


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "device"),
    [
        *((name, "cpu") for name in AUXILIARY if "paged" not in name and "flash" not in name),
        *((name, "npu") for name in AUXILIARY if "matmul" in name or "prolog" in name or "rotary" in name),
    ],
)
def test_autocast_does_not_change_auxiliary_results(name: str, device: str) -> None:
    outside, within = (
        {key: each(lambda t: t.to(device), value) for key, value in given(name).items()} for _ in range(2)
    )
    want = tensors(AUXILIARY_INTERFACES[name](**outside))
    with torch.autocast(device, dtype=torch.bfloat16):
        got = tensors(AUXILIARY_INTERFACES[name](**within))
    for ours, theirs in zip(got, want, strict=True):
        same_bits(ours.cpu(), theirs.cpu(), name)
