"""The C runtime without operators: configuration, devices, streams, memory."""

import ctypes
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.c_runtime import BY_ADDRESS, FAR, LIBRARIES, MIB, ON_DEVICE, TO_DEVICE, TO_HOST, Runtime, copied

from fusion_attention.capi.environment import LIBRARY

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the C libraries are built for Linux")

# ---------------------------------------------------------------------------------------- dependencies of the libraries


def test_c_libraries_do_not_link_python_torch_or_new_glibc() -> None:
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
        versions = {tuple(map(int, result)) for result in re.findall(r"GLIBC_(\d+)\.(\d+)", text)}
        assert max(versions) <= (2, 28), versions
        assert "$ORIGIN" in text
        assert "NODELETE" in text


# -------------------------------------------------------------------------------------------------------- start and end


def test_second_acl_init_or_finalize_returns_error_code(library: Runtime) -> None:
    assert library.aclInit(None) == 0
    assert library.aclInit(None) == 100002
    assert "aclInit: called before" in (library.message() or "")
    assert library.message() is None
    assert library.aclFinalize() == 0
    assert library.aclFinalize() == 100037
    assert library.aclInit(None) == 0
    assert library.aclFinalize() == 0


def test_acl_finalize_without_init_returns_error_code() -> None:
    text = "import sys; sys.path[:0] = ['tests']; from support.c_runtime import Runtime; print(Runtime().aclFinalize())"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout == "100001\n"


@pytest.mark.parametrize(("text", "code", "says"), [
    ("{}", 0, None),
    ('{"profiler": {"x": "on"}, "y": [-2.5e3, null, "\\u00e9\\n"], "fusion_attention": {"checked": false}}', 0, None),
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
    ('{"fusion_attention": {"device": "\\ud83d\\ude00"}}', 207004, "got '\U0001f600'"),
    ('{"fusion_attention": {"device": "\\uD83D\\uDE00"}}', 207004, "got '\U0001f600'"),
    ('{"a": "\\u\x11\x11\x11\x11"}', 100006, "a hexadecimal digit"),
    ('{"a": "\\ud83d"}', 100006, "both halves of a surrogate pair"),
    ('{"a": "\\ude00\\ud83d"}', 100006, "both halves of a surrogate pair"),
    ('{"a": "\\ud83d\\u0041"}', 100006, "both halves of a surrogate pair"),
])  # fmt: skip
def test_acl_init_accepts_or_refuses_configuration_file(
    library: Runtime, tmp_path: Path, text: str, code: int, says: str | None
) -> None:
    path = tmp_path / "acl.json"
    path.write_bytes(text.encode())
    assert library.aclInit(str(path).encode()) == code
    message = library.message()
    assert message is None if says is None else says in (message or ""), message
    assert library.aclFinalize() == (0 if code == 0 else 100037)
    library.message()


def test_acl_init_accepts_null_and_empty_configuration_path(library: Runtime) -> None:
    """CANN treats an empty path as none, and many programs pass one."""
    for path in (None, b""):
        assert library.aclInit(path) == 0, library.message()
        assert library.aclFinalize() == 0


def test_aclnn_init_starts_the_same_runtime_as_acl_init(library: Runtime) -> None:
    """Programs call aclnnInit, aclInit, or one after the other in any order."""
    for init, end, *more in (
        ("aclnnInit", "aclnnFinalize"),
        ("aclnnInit", "aclFinalize", "aclnnFinalize"),
        ("aclInit", "aclFinalize", "aclnnFinalize"),
    ):
        assert getattr(library, init)(None) == 0
        assert library.aclnnInit(None) == 0
        assert library.aclrtSetDevice(0) == 0
        assert getattr(library, end)() == 0
        assert library.aclrtSetDevice(0) == 100001, (init, end)
        assert [getattr(library, name)() for name in more] == [0] * len(more)
    assert library.aclnnInit(b"absent") == 100003
    assert (library.message() or "").startswith("aclnnInit: configPath: ")
    assert library.aclnnInit(None) == 0
    assert library.aclInit(None) == 0
    assert library.aclInit(None) == 100002
    assert library.aclnnFinalize() == 0  # aclInit() has it now
    assert library.aclrtSetDevice(0) == 0
    assert library.aclFinalize() == 0


def test_acl_init_refuses_unreadable_configuration_files(library: Runtime, tmp_path: Path) -> None:
    large = tmp_path / "large.json"
    large.write_bytes(b" " * (10 * MIB + 1))
    for path, code in ((tmp_path / "absent", 100003), (tmp_path, 100003), (Path("/dev/zero"), 100003), (large, 100005)):
        assert library.aclInit(str(path).encode()) == code
        assert str(path) in (library.message() or "")


def test_environment_variable_overrides_configuration_file(
    library: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSION_ATTENTION_DEVICE", "tpu")
    path = tmp_path / "acl.json"
    path.write_text('{"fusion_attention": {"device": "cpu"}}')
    assert library.aclInit(str(path).encode()) == 207004
    assert library.message() == "aclInit: FUSION_ATTENTION_DEVICE: expected cpu, cuda or cuda:<number>, got 'tpu'"


# ----------------------------------------------------------------------------------------------------- devices, streams


def test_device_and_context_functions_return_values_and_error_codes(acl: Runtime) -> None:
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
    context = acl.create("aclrtCreateContext", 3)
    assert acl.aclrtGetDevice(ctypes.byref(device)) == 0
    assert device.value == 3
    assert acl.aclrtDestroyContext(context) == 0
    assert acl.aclrtGetDevice(ctypes.byref(device)) == 107002
    assert acl.aclrtSetCurrentContext(context) == 107017
    assert acl.aclrtDestroyContext(context) == 107017
    assert acl.aclrtResetDevice(5) == 0
    assert acl.aclrtResetDevice(5) == 107002


def test_current_device_is_thread_local(acl: Runtime) -> None:
    results = []

    def other() -> None:
        results.append(acl.aclrtMalloc(ctypes.byref(ctypes.c_void_p()), 64, 0))
        results.append(acl.message())
        results.append(acl.aclrtSetDevice(0))
        results.append(acl.aclrtFree(acl.malloc(64)))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert results == [107002, "aclrtMalloc: no device: this thread calls aclrtSetDevice() first", 0, 0]
    assert acl.message() is None  # each thread has its own


def test_destroying_a_context_invalidates_its_streams(acl: Runtime) -> None:
    context = acl.create("aclrtCreateContext", 1)
    stream = acl.create("aclrtCreateStream")
    assert stream % 256 == 0
    assert acl.aclrtSynchronizeStream(stream) == 0
    assert acl.aclrtDestroyContext(context) == 0
    assert acl.aclrtSynchronizeStream(stream) == 107017
    assert "a context that was destroyed" in (acl.message() or "")
    assert acl.aclrtDestroyStream(stream) == 0
    assert acl.aclrtDestroyStream(stream) == 107017
    assert acl.message() == "aclrtDestroyStream: stream: expected an aclrtStream, got an aclrtStream that was destroyed"


def test_events_measure_elapsed_time(acl: Runtime) -> None:
    first, second, status, time = (
        acl.create("aclrtCreateEvent"),
        acl.create("aclrtCreateEvent"),
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


# --------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(("policy", "grain"), [(0, 2 * MIB), (1, 2 * MIB), (2, 4096), (3, 2 * MIB), (5, 4096)])
def test_allocations_are_rounded_up_to_pages_of_the_chip(acl: Runtime, policy: int, grain: int) -> None:
    """On the chip, programs may copy to the rest of the last page beyond the requested size."""
    address, data = acl.malloc(100, policy), np.zeros(2 * grain, np.uint8)
    assert address % 512 == 0
    assert acl.aclrtMemcpy(address, grain, data.ctypes.data, grain, TO_DEVICE) == 0
    assert acl.aclrtMemcpy(address, grain + 1, data.ctypes.data, grain + 1, TO_DEVICE) == 107000
    assert "101" not in (acl.message() or "")
    assert acl.aclrtFree(address) == 0


def test_memcpy_and_memset_write_the_right_bytes(acl: Runtime) -> None:
    data = np.random.default_rng(3).integers(0, 256, 5 * MIB, np.uint8)
    back = np.zeros_like(data)
    first, second = copied(acl, data), acl.malloc(data.nbytes)
    stream = acl.create("aclrtCreateStream")
    assert acl.aclrtMemcpyAsync(second, data.nbytes, first, data.nbytes, ON_DEVICE, stream) == 0
    assert acl.aclrtMemcpy(back.ctypes.data, back.nbytes, second, back.nbytes, BY_ADDRESS) == 0
    assert np.array_equal(back, data)
    assert acl.aclrtMemset(second + 3, 100, 0x1FF, 5) == 0
    assert acl.aclrtMemcpy(back.ctypes.data, 10, second, 10, TO_HOST) == 0
    assert back[:10].tolist() == [*data[:3], 255, 255, 255, 255, 255, *data[8:10]]
    # Overlapping source and destination: the result is as with a temporary copy.
    assert acl.aclrtMemcpy(first + 1, 1000, first, 1000, ON_DEVICE) == 0
    assert acl.aclrtMemcpy(back.ctypes.data, 1001, first, 1001, TO_HOST) == 0
    assert np.array_equal(back[1:1001], data[:1000])
    host = acl.create("aclrtMallocHost", 64)
    assert acl.aclrtMemcpy(host, 64, first, 64, TO_HOST) == 0
    assert ctypes.string_at(host, 64) == back[:64].tobytes()
    assert acl.aclrtFreeHost(host) == 0
    assert acl.aclrtDestroyStream(stream) == 0


def test_memcpy2d_copies_rows_and_refuses_invalid_sizes(acl: Runtime) -> None:
    data, back = np.arange(60, dtype=np.uint8).reshape(6, 10), np.zeros((6, 12), np.uint8)
    device = acl.malloc(6 * 16)
    assert acl.aclrtMemcpy2d(device, 16, data.ctypes.data, 10, 7, 6, TO_DEVICE) == 0
    assert acl.aclrtMemcpy2d(back.ctypes.data, 12, device, 16, 7, 6, TO_HOST) == 0
    assert np.array_equal(back[:, :7], data[:, :7])
    assert not back[:, 7:].any()
    for width, height, pitch in ((11, 6, 10), (7, FAR, 10), (7, 6, FAR), (7, (1 << 64) - 1, 16)):
        assert acl.aclrtMemcpy2d(device, 16, data.ctypes.data, pitch, width, height, TO_DEVICE) == 107000


def test_invalid_memcpy_returns_error_code_and_copies_no_byte(acl: Runtime) -> None:
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


def test_free_twice_or_by_wrong_function_returns_error_code(acl: Runtime) -> None:
    device, host = acl.malloc(64), acl.create("aclrtMallocHost", 64)
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


def test_malloc_beyond_memory_fails_and_memory_info_counts_pages(acl: Runtime) -> None:
    place = ctypes.c_void_p(0x5A)
    for size, code in ((FAR, 207001), ((1 << 64) - 1, 207001), (1 << 47, 207001), (0, 100000)):
        assert acl.aclrtMalloc(ctypes.byref(place), size, 0) == code
        assert acl.aclrtMallocHost(ctypes.byref(place), size) == code
        assert place.value == 0x5A
    assert acl.aclrtMalloc(ctypes.byref(place), 1, -1) == 100000
    free, total, before = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_size_t()
    assert acl.aclrtGetMemInfo(1, ctypes.byref(before), ctypes.byref(total)) == 0
    block = acl.malloc(3 * MIB)
    assert acl.aclrtGetMemInfo(1, ctypes.byref(free), ctypes.byref(total)) == 0
    assert before.value - free.value == 4 * MIB
    assert acl.aclrtFree(block) == 0
    assert acl.aclrtGetMemInfo(1, ctypes.byref(free), ctypes.byref(total)) == 0
    assert free.value == before.value <= total.value


def test_float16_conversions_match_numpy(library: Runtime) -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    values = every.view(np.float16).astype(np.float32)
    for bits in (*range(0, 1 << 16, 97), 0, 1, 0x3FF, 0x400, 0x7BFF, 0x7C00, 0xFC00, 0x8000, 0x83FF):
        result = np.float32(library.aclFloat16ToFloat(bits))
        assert result.tobytes() == values[bits].tobytes() or (np.isnan(result) and np.isnan(values[bits])), hex(bits)
    draws = np.random.default_rng(1).integers(0, 1 << 32, 4000, np.uint32).view(np.float32)
    edges = np.array(
        [65504, 65519.99, 65520, 5.9604645e-8, 2.9802322e-8, 2.9802326e-8, 6.1e-5, 0, -0.0, np.inf], np.float32
    )
    near = np.random.default_rng(2).standard_normal(2000).astype(np.float32)
    with np.errstate(over="ignore"):
        for value in np.concatenate([draws[~np.isnan(draws)], edges, near, near * np.float32(1e-5)]):
            assert library.aclFloatToFloat16(float(value)) == value.astype(np.float16).view(np.uint16), value
