"""acl: devices, streams, memory, tensors and lists; invalid arguments return a code and a text, and never crash."""

import doctest
import importlib
import random
from typing import Any

import numpy as np
import pytest
import torch
from support.two_phase import failed

from fusion_attention import acl
from fusion_attention.contract import INVALID

pytestmark = pytest.mark.usefixtures("runtime")


def test_device_context_and_stream_functions_return_values_and_codes() -> None:
    for wrong in (8, -1, "0", None, 1.5, True):
        failed(acl.rt.set_device(wrong), 107001, "device_id")
    assert acl.rt.set_device(7) == 0
    assert acl.rt.get_device() == (7, 0)
    assert acl.rt.get_device_count() == (8, 0)
    assert acl.rt.get_run_mode() == (acl.ACL_HOST, 0)
    context, ret = acl.rt.create_context(5)
    assert (ret, acl.rt.get_context()) == (0, (context, 0))
    stream, ret = acl.rt.create_stream()
    assert (ret, acl.rt.synchronize_stream(stream), acl.rt.synchronize_device()) == (0, 0, 0)
    assert acl.rt.synchronize_stream(0) == acl.rt.synchronize_stream(None) == 0
    assert acl.rt.destroy_context(context) == 0
    failed(acl.rt.synchronize_stream(stream), 107017, "stream: destroyed")
    failed(acl.rt.create_stream()[1], 107002, "set_device")
    failed(acl.rt.set_context(context), 107017, "context")
    failed(acl.rt.destroy_stream("stream"), 100000, "stream")
    assert acl.rt.set_device(7) == 0
    stream, _ = acl.rt.create_stream()
    assert acl.rt.reset_device(7) == 0
    failed(acl.rt.destroy_stream(stream), 107017, "stream")
    failed(acl.rt.reset_device(7), 107002, "not in use")
    failed(acl.rt.malloc(8)[1], 107002, "set_device")


def test_malloc_and_free_update_memory_info_and_refuse_invalid_sizes() -> None:
    free, total, ret = acl.rt.get_mem_info(1)
    assert (ret, free) == (0, total)
    address, ret = acl.rt.malloc(1000, acl.ACL_MEM_MALLOC_HUGE_FIRST)
    assert ret == 0
    assert acl.rt.get_mem_info()[0] == free - 1000
    assert acl.rt.free(address) == 0
    failed(acl.rt.free(address), 207002, "freed before")
    failed(acl.rt.free(0), 100000, "address")
    failed(acl.rt.free("text"), 100000, "address")
    assert acl.rt.get_mem_info()[0] == free
    for size, code in ((0, 100000), (-1, 100000), ("8", 100000), (1 << 60, 207001), (1 << 80, 207001)):
        address, ret = acl.rt.malloc(size)
        assert address == 0
        failed(ret, code)
    host, _ = acl.rt.malloc_host(8)
    failed(acl.rt.free(host), 207002)
    assert acl.rt.free_host(host) == 0


def test_memcpy_copies_bytes_and_refuses_invalid_arguments() -> None:
    device, host = acl.rt.malloc(64)[0], acl.rt.malloc_host(64)[0]
    values, back = np.arange(16, dtype=np.float32), np.zeros(16, np.float32)
    kinds = acl.ACL_MEMCPY_HOST_TO_DEVICE, acl.ACL_MEMCPY_DEVICE_TO_HOST, acl.ACL_MEMCPY_DEVICE_TO_DEVICE
    assert acl.rt.memcpy(device, 64, acl.util.numpy_to_ptr(values), 64, kinds[0]) == 0
    assert acl.rt.memcpy(device + 4, 60, device, 60, kinds[2]) == 0
    assert acl.rt.memcpy(host, 64, device, 64, kinds[1]) == 0
    assert acl.rt.memcpy(back, 64, host, 64, acl.ACL_MEMCPY_HOST_TO_HOST) == 0
    assert back.tolist() == [0, *range(15)]
    tensor = torch.zeros(8, dtype=torch.bfloat16)
    assert acl.rt.memcpy(device, 16, torch.ones(8, dtype=torch.bfloat16), 16, kinds[0]) == 0
    assert acl.rt.memcpy(tensor, 16, device, 16, kinds[1]) == 0
    assert tensor.tolist() == [1] * 8
    assert acl.rt.memset(device, 64, 0x1FF, 8) == 0
    assert acl.rt.memcpy(host, 64, device, 64, kinds[1]) == 0
    assert acl.util.ptr_to_bytes(host, 9) == b"\xff" * 8 + b"\x80"
    assert acl.rt.memcpy(device, 64, acl.util.bytes_to_ptr(b"abcd"), 4, kinds[0]) == 0
    failed(acl.rt.memcpy(device, 64, values, 65, kinds[0]), 107000, "dest_max=64")
    failed(acl.rt.memcpy(device, 128, np.zeros(99, np.float32), 65, kinds[0]), 107000, "allocation of 64")
    failed(acl.rt.memcpy(device, 64, values[:4], 64, kinds[0]), 107000, "64 bytes asked of 16")
    failed(acl.rt.memcpy(device, 64, values, 64, kinds[1]), 107000, "ACL_MEMCPY_HOST_TO_DEVICE")
    failed(acl.rt.memcpy(device, 64, values, 64, 9), 100000, "kind")
    failed(acl.rt.memcpy(bytes(64), 64, device, 64, kinds[1]), 107000, "read-only")
    failed(acl.rt.memcpy(device, 64, 7.5, 64, kinds[0]), 100000, "float")
    failed(acl.rt.memcpy(0, 64, values, 64, kinds[0]), 100000, "got 0")
    failed(acl.rt.memcpy(device, 64, values[::2], 8, kinds[0]), 100000, "contiguous")
    failed(acl.rt.memset(device, 64, 0, 65), 107000, "max_count")
    acl.rt.free(device)
    failed(acl.rt.memcpy(device, 64, values, 64, kinds[0]), 107000, "lies in no allocation")
    assert acl.util.ptr_to_bytes(device, 4) is None
    assert acl.util.numpy_to_ptr("text") is None  # type: ignore[arg-type]
    assert acl.util.bytes_to_ptr("text") is None  # type: ignore[arg-type]


def test_create_tensor_makes_views_and_refuses_invalid_descriptions() -> None:
    address, _ = acl.rt.malloc(96)
    make = acl.create_tensor
    tensor = make((2, 3), acl.ACL_FLOAT, (1, 2), 3, acl.ACL_FORMAT_ND, (24,), address)
    assert tensor is not None
    assert tensor.view.stride() == (1, 2)  # type: ignore[union-attr]
    assert tensor.start == address + 12
    full = make((24,), torch.float32, data=address)
    assert full is not None
    full.view.copy_(torch.arange(24.0))  # type: ignore[union-attr]
    assert tensor.view.tolist() == [[3, 5, 7], [4, 6, 8]]  # type: ignore[union-attr]
    assert make((3,), acl.ACL_FLOAT, data=torch.arange(9.0)[4:].untyped_storage()).view.tolist() == [0, 1, 2]  # type: ignore[union-attr]
    assert make((3,), acl.ACL_FLOAT, data=torch.arange(9.0)[4:]).view.tolist() == [4, 5, 6]  # type: ignore[union-attr]
    wrong: list[tuple[tuple[Any, ...], str]] = [
        (((2, 3), 0, (1, -2), 0, 2, (24,), address), "no negative"),
        (((2, -3), 0, None, 0, 2, (24,), address), "no negative"),
        (((2, 3), 0, (1,), 0, 2, (24,), address), "expected 2 of them"),
        (((2, 3), 0, None, -1, 2, (24,), address), "offset >= 0"),
        (((5, 5), 0, None, 0, 2, (24,), address), "a storage of 24"),
        (((5, 5), 0, None, 0, 2, (25,), address), "an allocation of 96"),
        (((5, 5), 0, None, 0, 2, None, address), "an allocation of 96"),
        (((2,), 0, None, 0, 2, (2,), address + 1), "aligned to 4"),
        (((2,), 0, None, 0, 2, (2,), 12345), "lies in no allocation"),
        (((2,), 0, None, 0, 2, (2,), None), "got null"),
        (((2,), 99, None, 0, 2, (2,), address), "no DataType"),
        (((2,), acl.ACL_INT4, None, 0, 2, (2,), address), "ACL_INT4"),
        (((2,), 0, None, 0, 5, (2,), address), "no Format"),
        ((2, 0, None, 0, 2, (2,), address), "view_shape"),
        (((2.5,), 0, None, 0, 2, (2,), address), "view_shape"),
    ]
    for arguments, words in wrong:
        assert make(*arguments) is None
        failed(0, 0, words)
    tensors = acl.create_tensor_list([tensor, full])
    assert acl.destroy_tensor_list(tensors) == 0
    failed(acl.destroy_tensor(tensor), INVALID, "destroyed before")
    failed(acl.destroy_tensor_list(tensors), INVALID, "destroyed before")
    assert acl.create_tensor_list([tensor]) is None
    assert acl.create_tensor_list("ab") is None  # type: ignore[arg-type]
    for values in ("12", [1.5], [1 << 70], 7, [True]):
        assert acl.create_int_array(values) is None  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        acl.Tensor.of("text")  # type: ignore[arg-type]


@pytest.mark.parametrize("module", ["acl", "acl.rt", "acl.tensors", "acl.util"])
def test_acl_docstring_examples_pass_doctest(module: str) -> None:
    acl.finalize()
    acl.get_recent_err_msg()
    result = doctest.testmod(importlib.import_module(f"fusion_attention.{module}"))
    assert result.attempted > 0
    assert result.failed == 0
    acl.finalize()


def test_constants_are_those_of_cann() -> None:
    assert (acl.ACL_FLOAT, acl.ACL_FLOAT16, acl.ACL_BF16, acl.ACL_UINT8, acl.ACL_BOOL) == (0, 1, 27, 4, 12)
    assert (acl.ACL_FORMAT_ND, acl.ACL_FORMAT_FRACTAL_NZ, acl.ACL_INT64, acl.ACL_SUCCESS) == (2, 29, 9, 0)
    with pytest.raises(AttributeError):
        acl.ACL_NO_SUCH_THING  # noqa: B018


HUGE: list[tuple[Any, Any, Any, Any]] = [  # view_shape, strides, offset, storage_shape
    ((0, 2**62, 2**62), None, 0, (0,)),
    ((2**31, 2**31, 2**31), (0, 0, 0), 0, (1,)),
    ((2**62, 2**62, 0), None, 0, None),
    ((1,), (2**63,), 0, None),
    ((1, 0), (2**64, 1), 0, None),
    ((2**63,), (0,), 0, None),
    ((2**64, 1), None, 0, None),
    ((2,), (2**62,), 0, None),
    ((1,), (1,), 2**62, None),
    ((1,), (1,), 2**80, None),
    ((0,), (1,), 2**63, None),
    ((2,), None, 0, (2**80,)),
    ((10**5000,), None, 0, None),
    ((2,), (-(10**5000),), 0, None),
    ((2,), None, 10**5000, (10**5000,)),
    ((2**21,) * 70, (0,) * 70, 0, None),
]


@pytest.mark.parametrize("at", range(len(HUGE)))
def test_create_tensor_refuses_sizes_beyond_memory(at: int) -> None:
    shape, strides, offset, storage = HUGE[at]
    address, _ = acl.rt.malloc(64)
    assert acl.create_tensor(shape, acl.ACL_FLOAT, strides, offset, acl.ACL_FORMAT_ND, storage, address) is None
    text = acl.get_recent_err_msg()
    assert any(name in text for name in ("view_shape", "strides", "offset", "data")), text
    assert acl.create_tensor((2, 8), acl.ACL_FLOAT, (8, 1), 0, acl.ACL_FORMAT_ND, (16,), address) is not None


def test_random_acl_arguments_return_handles_or_error_codes() -> None:
    draw = random.Random(5)
    odd = [0, 1, 2, 3, 7, -1, 2**31, 2**62, 2**63 - 1, 2**63, 2**64, 2**130, 10**5000, -(10**5000), np.int64(5)]
    odd += [np.uint64(2**63), 1.5, True, None, "x", [1], torch.tensor(3), float("inf")]
    address, _ = acl.rt.malloc(4096)
    created = 0

    def sizes() -> Any:
        few = (*range(5), draw.choice(odd)) if draw.random() < 0.5 else range(5)
        numbers = [draw.choice(few) for _ in range(draw.choice((0, 1, 2, 2, 3, 9, 70)))]
        return draw.choice((numbers, tuple(numbers), None, None, 5, "ab"))

    for _ in range(2000):
        arguments = (sizes(), draw.choice((acl.ACL_FLOAT, acl.ACL_BF16, torch.int8, draw.choice(odd))), sizes())
        rest = (draw.choice((0, 0, 0, draw.choice(odd))), draw.choice((2, 2, 2, draw.choice(odd))), sizes())
        handle = acl.create_tensor(*arguments, *rest, draw.choice((address, address, address + 4, draw.choice(odd))))
        created += handle is not None
        if handle is not None:
            assert handle.stop - address <= 4096
        else:
            assert acl.get_recent_err_msg()
        acl.create_int_array(sizes())
        acl.create_tensor_list(sizes())
        for ret in (
            acl.rt.memcpy(address, draw.choice(odd), address, draw.choice(odd), draw.choice(odd)),
            acl.rt.memset(draw.choice(odd), draw.choice(odd), draw.choice(odd), draw.choice(odd)),
            acl.rt.set_device(draw.choice(odd)),
        ):
            assert isinstance(ret, int)
        acl.get_recent_err_msg()
    assert created > 25
