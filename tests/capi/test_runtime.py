"""The C runtime: memory, streams, handles and what goes wrong with them, called as C programs call it.

Without Python in the libraries: nothing here reaches an operator.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.c_runtime import HEADERS, LIBRARIES, Parameter, Runtime, functions, numbers

from fusion_attention.capi.environment import LIBRARY

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the C libraries are built for Linux")
MIB = 1 << 20
FAR = 1 << 62
FLOAT, FLOAT16, INT32, BF16 = 0, 1, 3, 27
TO_DEVICE, TO_HOST, ON_DEVICE, BY_ADDRESS = 1, 2, 3, 4
# docs/two_phase.md's table, and those that only C has: files and events.
CODES = {0, 100000, 100001, 100002, 100003, 100005, 100006, 100008, 100037, 107000, 107001, 107002, 107006, 107007,
         107017, 161001, 161002, 207001, 207002, 207004, 361001, 561103}  # fmt: skip


@pytest.fixture
def library() -> Iterator[Runtime]:
    """Before aclInit(); whatever a test leaves running ends with it."""
    found = Runtime()
    yield found
    found.aclFinalize()
    found.message()


@pytest.fixture
def acl(library: Runtime) -> Iterator[Runtime]:
    yield from library.started()


@pytest.fixture
def checked(library: Runtime, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Runtime]:
    config = tmp_path / "acl.json"
    config.write_text('{"dump": {"dump_list": []}, "fusion_attention": {"checked": true}}')
    yield from library.started(config)


def copied(acl: Runtime, data: np.ndarray, size: int | None = None) -> int:
    """Device memory with an array's bytes."""
    address = acl.malloc(data.nbytes if size is None else size)
    assert acl.aclrtMemcpy(address, data.nbytes, data.ctypes.data, data.nbytes, TO_DEVICE) == 0, acl.message()
    return address


# ------------------------------------------------------------------------------------------- what the libraries are


def exported(name: str) -> set[str]:
    reader = shutil.which("nm")
    if reader is None:
        pytest.fail("nm, of binutils, is missing")
    command = [reader, "-D", "--defined-only", str(LIBRARY / f"lib{name}.so")]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {line.split()[-1] for line in table.splitlines()}


def test_headers_declare_what_the_libraries_export() -> None:
    found = {name for library in LIBRARIES for name in exported(library) if not name.startswith(("_ZN", "_ZNK"))}
    assert found >= set(functions())
    assert {name for name in found if name.startswith("acl")} == set(functions()) - {
        n for n in functions() if n[0] == "A"
    }


def test_libraries_need_no_python_no_torch_and_no_new_glibc() -> None:
    for name in LIBRARIES:
        text = subprocess.run(
            ["readelf", "--wide", "-d", "-V", LIBRARY / f"lib{name}.so"], capture_output=True, text=True, check=True
        ).stdout
        needed = set(re.findall(r"\(NEEDED\).*\[(.*?)\]", text))
        assert needed <= {
            "libc.so.6",
            "libdl.so.2",
            "libgcc_s.so.1",
            "libm.so.6",
            "libpthread.so.0",
            "libascendcl.so",
        } | {n for n in needed if n.startswith("ld-linux")}
        versions = {tuple(map(int, found)) for found in re.findall(r"GLIBC_(\d+)\.(\d+)", text)}
        assert max(versions) <= (2, 28), versions
        assert "$ORIGIN" in text
        assert "NODELETE" in text


# ------------------------------------------------------------------------------------------------- begin and end


def test_a_runtime_begins_once_and_ends_once(library: Runtime) -> None:
    assert library.aclInit(None) == 0
    assert library.aclInit(None) == 100002
    assert "aclInit: called before" in (library.message() or "")
    assert library.message() is None
    assert library.aclFinalize() == 0
    assert library.aclFinalize() == 100037
    assert library.aclInit(None) == 0
    assert library.aclFinalize() == 0


def test_a_process_that_never_began_cannot_end() -> None:
    text = "import sys; sys.path[:0] = ['tests']; from support.c_runtime import Runtime; print(Runtime().aclFinalize())"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout == "100001\n"


@pytest.mark.parametrize(("text", "code", "says"), [
    ("{}", 0, None),
    ('{"profiler": {"switch": "on"}, "x": [1, -2.5e3, null, "\\u00e9\\n"], "fusion_attention": {"checked": false}}', 0, None),
    ("", 100006, "expected a value, got the end of the file"),
    ("[]", 100006, "expected {...}"),
    ('{"a": 1', 100006, "line 1: expected ',' or '}', got the end of the file"),
    ('{"a": 1}\n}', 100006, "line 2: expected the end of the file, got '}'"),
    ("[" * 100000, 100006, "fewer brackets"),
    ('{"a": tru}', 100006, "expected true"),
    ('{"a": "\\x"}', 100006, "after a backslash"),
    ('{"a": \x00}', 100006, "expected a value"),
    ('{"fusion_attention": 3}', 100008, "fusion_attention: expected {...}"),
    ('{"fusion_attention": {"chekced": true}}', 100008, "chekced: expected device, backend, memory or checked"),
    ('{"fusion_attention": {"checked": 1}}', 100008, "expected a text or true"),
    ('{"fusion_attention": {"checked": "perhaps"}}', 100008, "expected true, false or abort"),
    ('{"fusion_attention": {"device": "npu:0"}}', 207004, "expected cpu, cuda or cuda:<number>, got 'npu:0'"),
])  # fmt: skip
def test_configurations(library: Runtime, tmp_path: Path, text: str, code: int, says: str | None) -> None:
    path = tmp_path / "acl.json"
    path.write_bytes(text.encode())
    assert library.aclInit(str(path).encode()) == code
    message = library.message()
    assert message is None if says is None else says in (message or ""), message
    assert library.aclFinalize() == (0 if code == 0 else 100037)
    library.message()


def test_files_that_are_none(library: Runtime, tmp_path: Path) -> None:
    large = tmp_path / "large.json"
    large.write_bytes(b" " * (10 * MIB + 1))
    for path, code in ((tmp_path / "absent", 100003), (tmp_path, 100003), (Path("/dev/zero"), 100003), (large, 100005)):
        assert library.aclInit(str(path).encode()) == code
        assert str(path) in (library.message() or "")


def test_the_environment_wins_over_the_file(library: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSION_ATTENTION_DEVICE", "tpu")
    path = tmp_path / "acl.json"
    path.write_text('{"fusion_attention": {"device": "cpu"}}')
    assert library.aclInit(str(path).encode()) == 207004
    assert library.message() == "aclInit: FUSION_ATTENTION_DEVICE: expected cpu, cuda or cuda:<number>, got 'tpu'"


# -------------------------------------------------------------------------------------------------- devices, streams


def test_devices_and_contexts(acl: Runtime) -> None:
    device, count = ctypes.c_int32(), ctypes.c_uint32()
    assert acl.aclrtGetDeviceCount(ctypes.byref(count)) == 0
    assert count.value == 8
    for number in range(8):
        assert acl.aclrtSetDevice(number) == 0
        assert acl.aclrtGetDevice(ctypes.byref(device)) == 0
        assert device.value == number
    for number in (8, -1, -(1 << 31), (1 << 31) - 1):
        assert acl.aclrtSetDevice(number) == 107001
        assert acl.aclrtResetDevice(number) == 107001
        assert f"expected 0 to 7, got {number}" in (acl.message() or "")
    context = acl.made("aclrtCreateContext", 3)
    assert acl.aclrtGetDevice(ctypes.byref(device)) == 0
    assert device.value == 3
    assert acl.aclrtDestroyContext(context) == 0
    assert acl.aclrtGetDevice(ctypes.byref(device)) == 107002
    assert acl.aclrtSetCurrentContext(context) == 107017
    assert acl.aclrtDestroyContext(context) == 107017
    assert acl.aclrtResetDevice(5) == 0
    assert acl.aclrtResetDevice(5) == 107002


def test_a_thread_has_no_device_of_another_ones(acl: Runtime) -> None:
    found = []

    def other() -> None:
        found.append(acl.aclrtMalloc(ctypes.byref(ctypes.c_void_p()), 64, 0))
        found.append(acl.message())
        found.append(acl.aclrtSetDevice(0))
        found.append(acl.aclrtFree(acl.malloc(64)))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == [107002, "aclrtMalloc: no device: this thread calls aclrtSetDevice() first", 0, 0]
    assert acl.message() is None  # each thread has its own


def test_streams_end_with_their_context(acl: Runtime) -> None:
    context = acl.made("aclrtCreateContext", 1)
    stream = acl.made("aclrtCreateStream")
    assert stream % 256 == 0
    assert acl.aclrtSynchronizeStream(stream) == 0
    assert acl.aclrtDestroyContext(context) == 0
    assert acl.aclrtSynchronizeStream(stream) == 107017
    assert "a context that was destroyed" in (acl.message() or "")
    assert acl.aclrtDestroyStream(stream) == 0
    assert acl.aclrtDestroyStream(stream) == 107017
    assert acl.message() == "aclrtDestroyStream: stream: expected an aclrtStream, got an aclrtStream that was destroyed"


def test_events_measure(acl: Runtime) -> None:
    first, second, status, time = (
        acl.made("aclrtCreateEvent"),
        acl.made("aclrtCreateEvent"),
        ctypes.c_int(7),
        ctypes.c_float(),
    )
    assert acl.aclrtQueryEventStatus(first, ctypes.byref(status)) == 0
    assert status.value == 0
    assert acl.aclrtEventElapsedTime(ctypes.byref(time), first, second) == 107006
    for event in (first, second):
        assert acl.aclrtRecordEvent(event, None) == 0
    assert acl.aclrtQueryEventStatus(first, ctypes.byref(status)) == 0
    assert status.value == 1
    assert acl.aclrtEventElapsedTime(ctypes.byref(time), first, second) == 0
    assert 0 <= time.value < 60_000
    assert acl.aclrtEventElapsedTime(ctypes.byref(time), second, first) in (0, 107007)
    assert acl.aclrtStreamWaitEvent(None, first) == 0
    assert acl.aclrtDestroyEvent(first) == 0
    assert acl.aclrtDestroyEvent(second) == 0


# ------------------------------------------------------------------------------------------------------------ memory


@pytest.mark.parametrize(("policy", "grain"), [(0, 2 * MIB), (1, 2 * MIB), (2, 4096), (3, 2 * MIB), (5, 4096)])
def test_memory_comes_in_the_chips_pages(acl: Runtime, policy: int, grain: int) -> None:
    """Programs copy and lay tensors over more than they asked for; on the chip the page has it."""
    address, data = acl.malloc(100, policy), np.zeros(2 * grain, np.uint8)
    assert address % 512 == 0
    assert acl.aclrtMemcpy(address, grain, data.ctypes.data, grain, TO_DEVICE) == 0
    assert acl.aclrtMemcpy(address, grain + 1, data.ctypes.data, grain + 1, TO_DEVICE) == 107000
    assert "101" not in (acl.message() or "")
    assert acl.aclrtFree(address) == 0


def test_bytes_arrive(acl: Runtime) -> None:
    data = np.random.default_rng(3).integers(0, 256, 5 * MIB, np.uint8)
    back = np.zeros_like(data)
    first, second = copied(acl, data), acl.malloc(data.nbytes)
    stream = acl.made("aclrtCreateStream")
    assert acl.aclrtMemcpyAsync(second, data.nbytes, first, data.nbytes, ON_DEVICE, stream) == 0
    assert acl.aclrtMemcpy(back.ctypes.data, back.nbytes, second, back.nbytes, BY_ADDRESS) == 0
    assert np.array_equal(back, data)
    assert acl.aclrtMemset(second + 3, 100, 0x1FF, 5) == 0
    assert acl.aclrtMemcpy(back.ctypes.data, 10, second, 10, TO_HOST) == 0
    assert back[:10].tolist() == [*data[:3], 255, 255, 255, 255, 255, *data[8:10]]
    # Overlapping ends: as if over a buffer of its own.
    assert acl.aclrtMemcpy(first + 1, 1000, first, 1000, ON_DEVICE) == 0
    assert acl.aclrtMemcpy(back.ctypes.data, 1001, first, 1001, TO_HOST) == 0
    assert np.array_equal(back[1:1001], data[:1000])
    host = acl.made("aclrtMallocHost", 64)
    assert acl.aclrtMemcpy(host, 64, first, 64, TO_HOST) == 0
    assert ctypes.string_at(host, 64) == back[:64].tobytes()
    assert acl.aclrtFreeHost(host) == 0
    assert acl.aclrtDestroyStream(stream) == 0


def test_planes_arrive(acl: Runtime) -> None:
    data, back = np.arange(60, dtype=np.uint8).reshape(6, 10), np.zeros((6, 12), np.uint8)
    device = acl.malloc(6 * 16)
    assert acl.aclrtMemcpy2d(device, 16, data.ctypes.data, 10, 7, 6, TO_DEVICE) == 0
    assert acl.aclrtMemcpy2d(back.ctypes.data, 12, device, 16, 7, 6, TO_HOST) == 0
    assert np.array_equal(back[:, :7], data[:, :7])
    assert not back[:, 7:].any()
    for width, height, pitch in ((11, 6, 10), (7, FAR, 10), (7, 6, FAR), (7, (1 << 64) - 1, 16)):
        assert acl.aclrtMemcpy2d(device, 16, data.ctypes.data, pitch, width, height, TO_DEVICE) == 107000


def test_what_does_not_fit_copies_nothing(acl: Runtime) -> None:
    data = np.full(64, 7, np.uint8)
    device, host = copied(acl, data, 4096), data.ctypes.data
    refused: list[tuple[tuple[Any, ...], int, str]] = [
        ((device, 63, host, 64, TO_DEVICE), 107000, "count: expected 0 to destMax=63, got 64"),
        ((device, FAR, host, FAR, TO_DEVICE), 107000, "dst: 4611686018427387904 bytes asked of an allocation of 4096"),
        ((host, FAR, device, FAR, TO_HOST), 107000, "count: 4611686018427387904 bytes do not fit behind dst"),
        ((host, FAR, host, FAR, 0), 107000, "count: 4611686018427387904 bytes do not fit behind dst"),
        ((device, 64, host, 64, TO_HOST), 107000, "src: expected device memory, as ACL_MEMCPY_DEVICE_TO_HOST says"),
        ((device, 64, device, 64, TO_DEVICE), 107000, "src: expected host memory"),
        ((device, 64, host, 64, ON_DEVICE), 107000, "src: expected device memory"),
        ((device, 64, host, 64, 8), 100000, "kind: expected 0 to 7, got 8"),
        ((device, 64, host, 64, -1), 100000, "kind: expected 0 to 7, got -1"),
        ((device, 64, None, 64, TO_DEVICE), 100000, "src: expected an address, got null"),
        ((None, 64, host, 64, TO_DEVICE), 100000, "dst: expected an address, got null"),
    ]
    for args, code, text in refused:
        assert acl.aclrtMemcpy(*args) == code, args
        message = acl.message() or ""
        assert message.startswith("aclrtMemcpy: " + text), message
    back = np.zeros(64, np.uint8)
    assert acl.aclrtMemcpy(back.ctypes.data, 64, device, 64, TO_HOST) == 0
    assert np.array_equal(back, data)
    assert acl.aclrtMemset(device, 8 * MIB, 0, 8 * MIB) == 107000
    assert acl.aclrtMemset(device, 1, 0, 2) == 107000


def test_memory_ends_once(acl: Runtime) -> None:
    device, host = acl.malloc(64), acl.made("aclrtMallocHost", 64)
    assert acl.aclrtFree(None) == 100000
    assert acl.aclrtFree(host) == 207002
    assert acl.aclrtFreeHost(device) == 207002
    assert acl.aclrtFree(device + 1) == 207002
    assert "got byte 1 of an allocation of 64 bytes" in (acl.message() or "")
    assert acl.aclrtFree(device) == 0
    assert acl.aclrtFree(device) == 207002
    assert acl.aclrtFree(0xDEAD000) == 207002
    data = np.zeros(4, np.uint8)
    assert acl.aclrtMemcpy(data.ctypes.data, 4, device, 4, TO_HOST) == 107000
    assert acl.aclrtFreeHost(host) == 0


def test_more_than_there_is(acl: Runtime) -> None:
    place = ctypes.c_void_p(0x5A)
    for size, code in ((FAR, 207001), ((1 << 64) - 1, 207001), (1 << 47, 207001), (0, 100000)):
        assert acl.aclrtMalloc(ctypes.byref(place), size, 0) == code
        assert acl.aclrtMallocHost(ctypes.byref(place), size) == code
        assert place.value == 0x5A
    assert acl.aclrtMalloc(ctypes.byref(place), 1, -1) == 100000
    free, total, before = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_size_t()
    assert acl.aclrtGetMemInfo(1, ctypes.byref(before), ctypes.byref(total)) == 0
    held = acl.malloc(3 * MIB)
    assert acl.aclrtGetMemInfo(1, ctypes.byref(free), ctypes.byref(total)) == 0
    assert before.value - free.value == 4 * MIB
    assert acl.aclrtFree(held) == 0
    assert acl.aclrtGetMemInfo(1, ctypes.byref(free), ctypes.byref(total)) == 0
    assert free.value == before.value <= total.value


# ----------------------------------------------------------------------------------------------------------- handles


def test_tensors_say_what_they_are(acl: Runtime) -> None:
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
    number, wide, place = ctypes.c_int(), ctypes.c_int64(), ctypes.c_void_p()
    assert acl.aclGetDataType(tensor, ctypes.byref(number)) == 0
    assert number.value == BF16
    assert acl.aclGetFormat(tensor, ctypes.byref(number)) == 0
    assert number.value == 2
    assert acl.aclGetViewOffset(tensor, ctypes.byref(wide)) == 0
    assert wide.value == 5
    assert acl.aclSetRawTensorAddr(tensor, data + 64) == 0
    assert acl.aclGetRawTensorAddr(tensor, ctypes.byref(place)) == 0
    assert place.value == data + 64
    assert acl.aclSetRawTensorAddr(tensor, data + 2 * MIB - 2) == 161002
    assert acl.aclGetRawTensorAddr(tensor, ctypes.byref(place)) == 0
    assert place.value == data + 64  # as before
    assert acl.aclDestroyTensor(tensor) == 0


def test_tensors_that_cannot_be(acl: Runtime) -> None:
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
    # Phase 1 may do without an address: aclSetInputTensorAddr() brings it.
    later = acl.tensor((4,), FLOAT, None)
    assert later is not None
    assert acl.aclDestroyTensor(later) == 0


def test_lists_own_their_tensors(acl: Runtime) -> None:
    data = acl.malloc(64)
    tensors = [acl.tensor((4,), FLOAT, data) for _ in range(3)]
    kept = acl.aclCreateTensorList((ctypes.c_void_p * 3)(*tensors), 3)
    size = ctypes.c_uint64()
    assert acl.aclGetTensorListSize(kept, ctypes.byref(size)) == 0
    assert size.value == 3
    # As in a program of an operator's page: one ends before its list does.
    assert acl.aclDestroyTensor(tensors[1]) == 0
    assert acl.aclCreateTensorList((ctypes.c_void_p * 3)(*tensors), 3) is None
    assert acl.message() == "aclCreateTensorList: value[1]: expected an aclTensor, got an aclTensor that was destroyed"
    assert acl.aclDestroyTensorList(kept) == 0
    assert [acl.aclDestroyTensor(tensor) for tensor in tensors] == [161002] * 3


def test_arrays_are_copies(acl: Runtime) -> None:
    values, size = numbers((1, -2, 1 << 62)), ctypes.c_uint64()
    array = acl.aclCreateIntArray(values, 3)
    assert acl.aclGetIntArraySize(array, ctypes.byref(size)) == 0
    assert size.value == 3
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
    seen = set()
    for _ in range(2000):
        array = acl.aclCreateIntArray(None, 0)
        assert acl.aclDestroyIntArray(array) == 0
        seen.add(array)
    assert len(seen) == 2000
    assert all(handle % 256 == 0 for handle in seen)


# ------------------------------------------------------------------------------------------------ anything anywhere


def one_of_each(acl: Runtime) -> dict[str, int]:
    """A live handle of every kind that can be made without an operator."""
    data = acl.malloc(64)
    tensor, scalar = acl.tensor((4,), FLOAT, data), acl.aclCreateScalar(numbers((1,)), FLOAT)
    assert tensor is not None
    assert scalar is not None
    held = [acl.tensor((4,), FLOAT, data), acl.aclCreateScalar(numbers((1,)), FLOAT)]
    return {
        "tensor": tensor, "scalar": scalar,
        "tensor list": acl.aclCreateTensorList((ctypes.c_void_p * 1)(held[0]), 1),
        "scalar list": acl.aclCreateScalarList((ctypes.c_void_p * 1)(held[1]), 1),
        "int array": acl.aclCreateIntArray(None, 0), "float array": acl.aclCreateFloatArray(None, 0),
        "bool array": acl.aclCreateBoolArray(None, 0), "context": acl.made("aclrtCreateContext", 0),
        "stream": acl.made("aclrtCreateStream"), "event": acl.made("aclrtCreateEvent"),
    }  # fmt: skip


def ordinary(parameter: Parameter, room: Any) -> Any:
    """A value that is no mistake by itself, so that only the hostile one next to it is."""
    return ctypes.addressof(room) if parameter.is_pointer and not parameter.is_handle else 0


NOT_FOR_ALL = {"aclInit", "aclFinalize", "aclGetRecentErrMsg", "aclrtGetSocName", "aclrtSetDevice", "aclrtResetDevice",
               "aclnnInit"}  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(functions()) - NOT_FOR_ALL))
def test_nothing_that_is_handed_over_crashes(library: Runtime, name: str) -> None:
    """Null, freed and wild addresses, ended handles, handles of every other kind, in every position; before and after."""
    function = functions()[name]
    room = (ctypes.c_uint64 * 32)()
    for begun in (False, True):
        gone: dict[str, int] = {}
        alive: dict[str, int] = {}
        if begun:
            assert library.aclInit(None) == 0
            assert library.aclrtSetDevice(0) == 0
            alive = one_of_each(library)
            gone = {"ended": library.aclCreateIntArray(None, 0), "stream": library.made("aclrtCreateStream")}
            library.aclDestroyIntArray(gone["ended"])
            library.aclrtDestroyStream(gone["stream"])
        for i, parameter in enumerate(function.parameters):
            hostile = [None, *gone.values()] if parameter.is_pointer else [-1, FAR]
            if parameter.is_handle:
                hostile += [1, 256, 1 << 40, 0xAC << 48, (0xAC << 48) + (1 << 43), (1 << 64) - 1, *alive.values()]
            for value in hostile:
                args = [ordinary(p, room) for p in function.parameters]
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


def test_the_runtime_is_needed(library: Runtime) -> None:
    for name, function in functions().items():
        of_runtime = name.startswith("aclrt") and function.returns == "aclError" and name != "aclrtGetVersion"
        if of_runtime:
            room = (ctypes.c_uint64 * 32)()
            assert getattr(library, name)(*[ordinary(p, room) for p in function.parameters]) == 100001, name
            assert library.message() == f"{name}: called before aclInit() or after aclFinalize()"
            assert bytes(room) == bytes(256)


def test_what_was_made_ends_with_the_runtime(library: Runtime) -> None:
    assert library.aclInit(None) == 0
    assert library.aclrtSetDevice(0) == 0
    made, data = one_of_each(library), library.malloc(64)
    assert library.aclFinalize() == 0
    assert library.aclInit(None) == 0
    assert library.aclrtSynchronizeStream(made["stream"]) == 107017
    assert library.aclrtMalloc(ctypes.byref(ctypes.c_void_p()), 64, 0) == 107002
    assert library.aclrtFree(data) == 207002
    assert library.aclDestroyTensor(made["tensor"]) == 0  # handles of operators are the program's
    assert library.aclFinalize() == 0


def test_threads_share_the_runtime(acl: Runtime) -> None:
    """Each copies through its own memory and through one that others move and destroy meanwhile."""
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


def test_float16_both_ways(library: Runtime) -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    values = every.view(np.float16).astype(np.float32)
    for bits in (*range(0, 1 << 16, 97), 0, 1, 0x3FF, 0x400, 0x7BFF, 0x7C00, 0xFC00, 0x8000, 0x83FF):
        found = np.float32(library.aclFloat16ToFloat(bits))
        assert found.tobytes() == values[bits].tobytes() or (np.isnan(found) and np.isnan(values[bits])), hex(bits)
    draws = np.random.default_rng(1).integers(0, 1 << 32, 4000, np.uint32).view(np.float32)
    edges = np.array(
        [65504, 65519.99, 65520, 5.9604645e-8, 2.9802322e-8, 2.9802326e-8, 6.1e-5, 0, -0.0, np.inf], np.float32
    )
    near = np.random.default_rng(2).standard_normal(2000).astype(np.float32)
    with np.errstate(over="ignore"):
        for value in np.concatenate([draws[~np.isnan(draws)], edges, near, near * np.float32(1e-5)]):
            assert library.aclFloatToFloat16(float(value)) == value.astype(np.float16).view(np.uint16), value


# ------------------------------------------------------------------------------------------------------ checked mode


def reported(capfd: pytest.CaptureFixture[str]) -> list[str]:
    out, err = capfd.readouterr()
    assert out == ""
    assert all(line.startswith("fusion_attention: checked: ") for line in err.splitlines()), err
    return err.splitlines()


def test_off_nothing_is_reported(acl: Runtime, capfd: pytest.CaptureFixture[str]) -> None:
    address = acl.malloc(100)
    assert acl.aclrtMemset(address, 200, 0, 200) == 0
    assert acl.aclrtFree(address) == 0
    assert acl.aclrtFree(address) == 207002
    assert reported(capfd) == []


def test_copies_beyond_what_was_asked_for(checked: Runtime, capfd: pytest.CaptureFixture[str]) -> None:
    address, data = checked.malloc(100), np.zeros(3 * MIB, np.uint8)
    assert checked.aclrtMemcpy(address, 128, data.ctypes.data, 128, TO_DEVICE) == 0  # as on the chip
    assert "128 bytes asked of an allocation of 100 bytes" in (checked.message() or "")
    (line,) = reported(capfd)
    assert "aclrtMemcpy: dst: 128 bytes asked of an allocation of 100 bytes (aclrtMalloc, call " in line
    assert re.search(r"\[call \d+, .*\+0x[0-9a-f]+", line)
    assert checked.aclrtMemcpy(address, 3 * MIB, data.ctypes.data, 3 * MIB, TO_DEVICE) == 107000
    (line,) = reported(capfd)
    assert "(107000)" in line
    assert checked.aclrtFree(address) == 0
    checked.message()


def test_uses_after_free(checked: Runtime, capfd: pytest.CaptureFixture[str]) -> None:
    address, data = checked.malloc(64), np.zeros(64, np.uint8)
    assert checked.aclrtFree(address) == 0
    others = [checked.malloc(64) for _ in range(8)]
    assert address not in others
    assert checked.aclrtMemcpy(data.ctypes.data, 64, address, 64, TO_HOST) == 107000
    assert checked.aclrtFree(address) == 207002
    assert checked.tensor((4,), FLOAT, address) is None
    lines = reported(capfd)
    assert len(lines) == 3
    for line in lines:
        assert re.search(
            r"an allocation of 64 bytes \(aclrtMalloc, call \d+, .*\) that was freed \(aclrtFree, call \d+, ", line
        ), line
    for other in others:
        assert checked.aclrtFree(other) == 0


def test_ends_that_overlap(checked: Runtime, capfd: pytest.CaptureFixture[str]) -> None:
    address = checked.malloc(4096)
    assert checked.aclrtMemcpy(address + 10, 100, address, 100, ON_DEVICE) == 0
    assert checked.aclrtMemcpy(address + 200, 100, address, 100, ON_DEVICE) == 0
    (line,) = reported(capfd)
    assert "src and dst overlap in an allocation of 4096 bytes" in line
    assert checked.aclrtFree(address) == 0


def test_host_types_that_are_not_the_tensors(checked: Runtime, capfd: pytest.CaptureFixture[str]) -> None:
    """16-bit values copied to where a tensor of 32 bits is laid; 32-bit values read where one of 16 bits lies."""
    address = copied(checked, np.zeros(16, np.float16), 64)
    wide = checked.tensor((16,), FLOAT, address)
    (line,) = reported(capfd)
    assert (
        "aclCreateTensor: dataType: a tensor of ACL_FLOAT has 64 bytes where the program put 32 (aclrtMemcpy, call "
        in line
    )
    other = checked.malloc(64)
    narrow = checked.tensor((16,), BF16, other)
    back = np.zeros(16, np.float32)
    assert checked.aclrtMemcpy(back.ctypes.data, 64, other, 64, TO_HOST) == 0
    (line,) = reported(capfd)
    assert (
        "aclrtMemcpy: dst: 64 bytes where a tensor of ACL_BF16 has 32 bytes: the host's type is not the tensor's"
        in line
    )
    for tensor in (wide, narrow):
        assert checked.aclDestroyTensor(tensor) == 0
    for memory in (address, other):
        assert checked.aclrtFree(memory) == 0
    right = copied(checked, np.zeros(16, np.float32))
    tensor = checked.tensor((16,), FLOAT, right)
    assert checked.aclrtMemcpy(back.ctypes.data, 64, right, 64, TO_HOST) == 0
    assert checked.aclDestroyTensor(tensor) == 0
    assert checked.aclrtFree(right) == 0
    assert reported(capfd) == []


def test_leaks_are_listed_at_the_end(library: Runtime, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "acl.json"
    config.write_text('{"fusion_attention": {"checked": true}}')
    assert library.aclInit(str(config).encode()) == 0
    assert library.aclrtSetDevice(0) == 0
    library.malloc(300)
    library.made("aclrtMallocHost", 200)
    made = one_of_each(library)
    assert library.aclrtDestroyEvent(made["event"]) == 0
    capfd.readouterr()
    assert library.aclFinalize() == 0
    lines = reported(capfd)
    for text in ("an aclTensor is still there, 2 times, the first (aclCreateTensor, call", "an aclrtStream is still there (",
                 "an aclIntArray is still there", "an allocation of 300 bytes is still there (aclrtMalloc, call",
                 "a host allocation of 200 bytes is still there (aclrtMallocHost, call"):  # fmt: skip
        assert sum(text in line and "aclFinalize: leak: " in line for line in lines) == 1, (text, lines)
    assert not any("aclrtEvent" in line for line in lines)
    for name, handle in made.items():
        if name not in ("context", "stream", "event"):
            kind = "".join(word.title() for word in name.split())
            assert getattr(library, f"aclDestroy{kind}")(handle) == 0


def test_an_abort_ends_the_process_at_the_first_defect() -> None:
    text = """if True:
        import sys; sys.path[:0] = ['tests']
        from support.c_runtime import Runtime
        acl = Runtime(); acl.aclInit(None); acl.aclrtSetDevice(0)
        acl.aclrtMemset(acl.malloc(64), 65, 0, 65)
        print("went on")"""
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=False,
        env={"FUSION_ATTENTION_CHECKED": "abort", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == -6
    assert "65 bytes asked of an allocation of 64 bytes" in done.stderr
    assert "went on" not in done.stdout


def test_headers_are_all_read() -> None:
    assert len(HEADERS) == 5
    assert len(functions()) > 90
