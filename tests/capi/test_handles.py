"""CANN's opaque handles in C, and invalid arguments in every position of every function."""

import ctypes
import sys
import threading
from typing import Any

import numpy as np
import pytest
from support.c_runtime import (
    BF16,
    FAR,
    FLOAT,
    MIB,
    TO_HOST,
    Parameter,
    Runtime,
    copied,
    functions,
    numbers,
    one_of_each,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the C libraries are built for Linux")
# Codes of docs/two_phase.md, and those that only the C interface returns (files, events).
CODES = {0, 100000, 100001, 100002, 100003, 100005, 100006, 100008, 100037, 107000, 107001, 107002, 107006, 107007,
         107017, 161001, 161002, 207001, 207002, 207004, 361001, 561103}  # fmt: skip


def test_acl_tensor_queries_return_its_description(acl: Runtime) -> None:
    data = acl.malloc(4096)
    tensor = acl.tensor((2, 3, 4), BF16, data, strides=(24, 8, 2), offset=5, storage=(60,))
    assert tensor is not None
    assert tensor % 256 == 0
    for name, expected in (
        ("aclGetViewShape", [2, 3, 4]),
        ("aclGetViewStrides", [24, 8, 2]),
        ("aclGetStorageShape", [60]),
    ):
        values, count = ctypes.c_void_p(), ctypes.c_uint64()
        assert getattr(acl, name)(tensor, ctypes.byref(values), ctypes.byref(count)) == 0
        assert list((ctypes.c_int64 * count.value).from_address(values.value or 0)) == expected
    number, offset, place = ctypes.c_int(), ctypes.c_int64(), ctypes.c_void_p()
    assert acl.aclGetDataType(tensor, ctypes.byref(number)) == 0
    assert number.value == BF16
    assert acl.aclGetFormat(tensor, ctypes.byref(number)) == 0
    assert number.value == 2
    assert acl.aclGetViewOffset(tensor, ctypes.byref(offset)) == 0
    assert offset.value == 5
    assert acl.aclSetRawTensorAddr(tensor, data + 64) == 0
    assert acl.aclGetRawTensorAddr(tensor, ctypes.byref(place)) == 0
    assert place.value == data + 64
    assert acl.aclSetRawTensorAddr(tensor, data + 2 * MIB - 2) == 161002
    assert acl.aclGetRawTensorAddr(tensor, ctypes.byref(place)) == 0
    assert place.value == data + 64  # as before
    assert acl.aclDestroyTensor(tensor) == 0


def test_acl_create_tensor_refuses_invalid_descriptions(acl: Runtime) -> None:
    data, host = acl.malloc(100), np.zeros(100, np.uint8)
    more: dict[str, Any]
    for shape, dtype, address, more, text in (
        ((-1,), FLOAT, data, {}, "viewDims: expected no negative number, got -1"),
        ((4,), FLOAT, data, {"strides": (-1,)}, "stride: expected no negative number"),
        ((4,), FLOAT, data, {"offset": -1}, "offset: expected no negative number"),
        ((4,), 5, data, {}, "dataType: expected an aclDataType"),
        ((4,), 13, data, {}, "dataType: expected an aclDataType"),
        ((4,), FLOAT, data, {"format": 99}, "format: expected an aclFormat, got 99"),
        ((1,) * 26, FLOAT, data, {}, "viewDims: expected at most 25 dimensions"),
        ((4,), FLOAT, data, {"storage": (3,)}, "viewDims: the view ends at element 4 of a storage of 3"),
        ((4,), FLOAT, data, {"storage": (FAR, FAR)}, "storageDims: expected fewer elements"),
        ((FAR, FAR), FLOAT, data, {"storage": ()}, "viewDims: expected fewer elements"),
        ((FAR,), FLOAT, data, {"storage": ()}, "viewDims: expected fewer bytes"),
        ((2,), FLOAT, data, {"strides": (FAR,), "storage": ()}, "viewDims: expected fewer bytes"),
        ((2,), FLOAT, data, {"offset": (1 << 63) - 1, "storage": ()}, "offset: expected fewer elements"),
        ((MIB,), FLOAT, data, {}, "tensorData: the view ends at byte 4194304 of an allocation of 100 bytes"),
        ((4,), FLOAT, data + 1, {}, "tensorData: expected memory aligned to 4 bytes"),
        ((4,), FLOAT, host.ctypes.data, {}, "tensorData: expected memory of aclrtMalloc()"),
        ((4,), FLOAT, 8, {}, "tensorData: expected memory of aclrtMalloc()"),
    ):
        assert acl.tensor(shape, dtype, address, **more) is None, text
        message = acl.message() or ""
        assert message.startswith(f"aclCreateTensor: {text}"), message
    assert acl.aclCreateTensor(None, 2, FLOAT, None, 0, 2, None, 0, data) is None
    assert acl.aclCreateTensor(None, FAR, FLOAT, None, 0, 2, None, 0, data) is None
    assert acl.aclCreateTensor(numbers((2,)), 1, FLOAT, None, 0, 2, None, FAR, data) is None
    scalar = acl.aclCreateTensor(None, 0, FLOAT, None, 0, 2, None, 0, data)
    assert scalar is not None
    assert acl.aclDestroyTensor(scalar) == 0
    # Address is optional in phase 1: aclSetInputTensorAddr() can set it later.
    later = acl.tensor((4,), FLOAT, None)
    assert later is not None
    assert acl.aclDestroyTensor(later) == 0


def test_destroying_a_tensor_list_destroys_its_tensors(acl: Runtime) -> None:
    data = acl.malloc(64)
    tensors = [acl.tensor((4,), FLOAT, data) for _ in range(3)]
    tensor_list = acl.aclCreateTensorList((ctypes.c_void_p * 3)(*tensors), 3)
    size = ctypes.c_uint64()
    assert acl.aclGetTensorListSize(tensor_list, ctypes.byref(size)) == 0
    assert size.value == 3
    # A tensor may be destroyed before its list, as in a program of CANN's pages.
    assert acl.aclDestroyTensor(tensors[1]) == 0
    assert acl.aclCreateTensorList((ctypes.c_void_p * 3)(*tensors), 3) is None
    assert acl.message() == "aclCreateTensorList: value[1]: expected an aclTensor, got an aclTensor that was destroyed"
    assert acl.aclDestroyTensorList(tensor_list) == 0
    assert [acl.aclDestroyTensor(tensor) for tensor in tensors] == [161002] * 3


def test_acl_arrays_and_scalars_are_created_and_destroyed_once(acl: Runtime) -> None:
    values, size = numbers((1, -2, 1 << 62)), ctypes.c_uint64()
    array = acl.aclCreateIntArray(values, 3)
    assert acl.aclGetIntArraySize(array, ctypes.byref(size)) == 0
    assert size.value == 3
    assert acl.aclDestroyFloatArray(array) == 161002
    assert "expected an aclFloatArray, got an aclIntArray" in (acl.message() or "")
    assert acl.aclDestroyIntArray(array) == 0
    assert acl.aclDestroyIntArray(array) == 161002
    for name in ("Int", "Float", "Bool"):
        create = getattr(acl, f"aclCreate{name}Array")
        assert create(None, 1) is None
        assert create(values, FAR) is None
        empty = create(None, 0)
        assert empty is not None
        assert getattr(acl, f"aclDestroy{name}Array")(empty) == 0
    scalar = acl.aclCreateScalar(values, FLOAT)
    assert acl.aclCreateScalar(None, FLOAT) is None
    assert acl.aclCreateScalar(values, 13) is None
    assert acl.aclDestroyScalar(scalar) == 0


def test_handles_are_never_used_again(acl: Runtime) -> None:
    handles = set()
    for _ in range(2000):
        array = acl.aclCreateIntArray(None, 0)
        assert acl.aclDestroyIntArray(array) == 0
        handles.add(array)
    assert len(handles) == 2000
    assert all(handle % 256 == 0 for handle in handles)


def ordinary(parameter: Parameter, buffer: Any) -> Any:
    """Returns a valid value for a parameter, so that only the hostile argument next to it is invalid."""
    return ctypes.addressof(buffer) if parameter.is_pointer and not parameter.is_handle else 0


NOT_FOR_ALL = {"aclInit", "aclFinalize", "aclGetRecentErrMsg", "aclrtGetSocName", "aclrtSetDevice", "aclrtResetDevice",
               "aclnnInit"}  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(functions()) - NOT_FOR_ALL))
def test_c_functions_survive_hostile_arguments_in_every_position(library: Runtime, name: str) -> None:
    """Arguments: null, freed and random addresses, destroyed handles, handles of other types."""
    function = functions()[name]
    buffer = (ctypes.c_uint64 * 32)()
    for begun in (False, True):
        gone: dict[str, int] = {}
        alive: dict[str, int] = {}
        if begun:
            assert library.aclInit(None) == 0
            assert library.aclrtSetDevice(0) == 0
            alive = one_of_each(library)
            gone = {"ended": library.aclCreateIntArray(None, 0), "stream": library.create("aclrtCreateStream")}
            library.aclDestroyIntArray(gone["ended"])
            library.aclrtDestroyStream(gone["stream"])
        for i, parameter in enumerate(function.parameters):
            hostile = [None, *gone.values()] if parameter.is_pointer else [-1, FAR]
            if parameter.is_handle:
                hostile += [1, 256, 1 << 40, 0xAC << 48, (0xAC << 48) + (1 << 43), (1 << 64) - 1, *alive.values()]
            for value in hostile:
                args = [ordinary(p, buffer) for p in function.parameters]
                args[i] = value
                library.aclGetRecentErrMsg()
                answer = getattr(library, name)(*args)
                if function.returns in ("aclError", "aclnnStatus"):
                    assert answer in CODES, (parameter, value, answer)
                    message = library.message()
                    assert (message is None) == (answer == 0), (parameter, value, answer, message)
                    assert answer == 0 or (message or "").startswith(name + ": "), message
                elif parameter.is_handle and function.returns.endswith("*"):
                    assert answer is None
        if not function.parameters:
            assert getattr(library, name)() in CODES
        if begun:
            assert library.aclFinalize() == 0
    library.message()


def test_runtime_functions_before_acl_init_return_error_code(library: Runtime) -> None:
    for name, function in functions().items():
        of_runtime = name.startswith("aclrt") and function.returns == "aclError" and name != "aclrtGetVersion"
        if of_runtime:
            buffer = (ctypes.c_uint64 * 32)()
            assert getattr(library, name)(*[ordinary(p, buffer) for p in function.parameters]) == 100001, name
            assert library.message() == f"{name}: called before aclInit() or after aclFinalize()"
            assert bytes(buffer) == bytes(256)


def test_streams_and_memory_are_invalid_after_acl_finalize(library: Runtime) -> None:
    assert library.aclInit(None) == 0
    assert library.aclrtSetDevice(0) == 0
    handles, data = one_of_each(library), library.malloc(64)
    assert library.aclFinalize() == 0
    assert library.aclInit(None) == 0
    assert library.aclrtSynchronizeStream(handles["stream"]) == 107017
    assert library.aclrtMalloc(ctypes.byref(ctypes.c_void_p()), 64, 0) == 107002
    assert library.aclrtFree(data) == 207002
    assert library.aclDestroyTensor(handles["tensor"]) == 0  # handles of operators are the program's
    assert library.aclFinalize() == 0


def test_concurrent_threads_copy_memory_and_change_a_shared_tensor(acl: Runtime) -> None:
    """Each thread copies through private memory, and through a tensor that other threads change and destroy."""
    shared, wrong = [acl.tensor((4,), FLOAT, None)], []

    def work(seed: int) -> None:
        assert acl.aclrtSetDevice(seed % 8) == 0
        data, back = np.random.default_rng(seed).integers(0, 256, 5000, np.uint8), np.zeros(5000, np.uint8)
        for turn in range(100):
            device = copied(acl, data)
            tensor = acl.tensor((1250,), FLOAT, device)
            acl.aclSetRawTensorAddr(shared[0], device)
            if turn % 7 == seed % 7:
                acl.aclDestroyTensor(shared[0])
                shared[0] = acl.tensor((4,), FLOAT, None)
            code = acl.aclrtMemcpy(back.ctypes.data, 5000, device, 5000, TO_HOST)
            if code or not np.array_equal(back, data) or acl.aclDestroyTensor(tensor) or acl.aclrtFree(device):
                wrong.append((seed, turn, code, acl.message()))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
