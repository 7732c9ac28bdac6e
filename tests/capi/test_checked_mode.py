"""Checked mode: errors that the chip would not detect are reported with the call and the memory involved."""

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.c_operators import Operators, prototypes
from support.c_runtime import BF16, FLOAT, MIB, ON_DEVICE, TO_DEVICE, TO_HOST, Runtime, copied, one_of_each
from support.two_phase import outputs_of

from fusion_attention.contract.sampling import sample
from fusion_attention.ops import RECORDS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the C libraries are built for Linux")


def reported(capfd: pytest.CaptureFixture[str]) -> list[str]:
    out, err = capfd.readouterr()
    assert out == ""
    assert all(line.startswith("fusion_attention: checked: ") for line in err.splitlines()), err
    return err.splitlines()


def test_checked_mode_off_reports_no_defect(acl: Runtime, capfd: pytest.CaptureFixture[str]) -> None:
    address = acl.malloc(100)
    assert acl.aclrtMemset(address, 200, 0, 200) == 0
    assert acl.aclrtFree(address) == 0
    assert acl.aclrtFree(address) == 207002
    assert reported(capfd) == []


def test_checked_mode_reports_copy_beyond_allocation_size(checked: Runtime, capfd: pytest.CaptureFixture[str]) -> None:
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


def test_checked_mode_reports_use_after_free(checked: Runtime, capfd: pytest.CaptureFixture[str]) -> None:
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


def test_checked_mode_reports_overlapping_copy(checked: Runtime, capfd: pytest.CaptureFixture[str]) -> None:
    address = checked.malloc(4096)
    assert checked.aclrtMemcpy(address + 10, 100, address, 100, ON_DEVICE) == 0
    assert checked.aclrtMemcpy(address + 200, 100, address, 100, ON_DEVICE) == 0
    (line,) = reported(capfd)
    assert "src and dst overlap in an allocation of 4096 bytes" in line
    assert checked.aclrtFree(address) == 0


def test_checked_mode_reports_host_dtype_that_differs_from_tensor(
    checked: Runtime, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two cases: float16 host data for a 32-bit tensor, and 32-bit host memory for a 16-bit tensor."""
    address = copied(checked, np.zeros(16, np.float16), 64)
    float_tensor = checked.tensor((16,), FLOAT, address)
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
    for tensor in (float_tensor, narrow):
        assert checked.aclDestroyTensor(tensor) == 0
    for memory in (address, other):
        assert checked.aclrtFree(memory) == 0
    right = copied(checked, np.zeros(16, np.float32))
    tensor = checked.tensor((16,), FLOAT, right)
    assert checked.aclrtMemcpy(back.ctypes.data, 64, right, 64, TO_HOST) == 0
    assert checked.aclDestroyTensor(tensor) == 0
    assert checked.aclrtFree(right) == 0
    assert reported(capfd) == []


def test_checked_mode_lists_leaks_at_acl_finalize(
    library: Runtime, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "acl.json"
    config.write_text('{"fusion_attention": {"checked": true}}')
    assert library.aclInit(str(config).encode()) == 0
    assert library.aclrtSetDevice(0) == 0
    library.malloc(300)
    library.create("aclrtMallocHost", 200)
    handles = one_of_each(library)
    assert library.aclrtDestroyEvent(handles["event"]) == 0
    capfd.readouterr()
    assert library.aclFinalize() == 0
    lines = reported(capfd)
    for text in (
        "an aclTensor is still there, 2 times, the first (aclCreateTensor, call",
        "an aclrtStream is still there (",
        "an aclIntArray is still there (",
        "an allocation of 300 bytes is still there (aclrtMalloc, call",
        "a host allocation of 200 bytes is still there (aclrtMallocHost, call",
    ):
        assert sum(text in line and "aclFinalize: leak: " in line for line in lines) == 1, (text, lines)
    assert not any("aclrtEvent" in line for line in lines)
    for name, handle in handles.items():
        if name not in ("context", "stream", "event"):
            kind = "".join(word.title() for word in name.split())
            assert getattr(library, f"aclDestroy{kind}")(handle) == 0


def test_checked_mode_abort_ends_the_process_at_the_first_defect() -> None:
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


def test_checked_mode_reports_invalid_workspace_executor_and_memory(
    checked: Runtime, capfd: pytest.CaptureFixture[str]
) -> None:
    c, op = Operators(checked), RECORDS["aclnnFlashAttentionScore"]
    args = sample(op)
    given = outputs_of(op, args) | {name: value for name, value in args.items() if value is not None}
    arguments = [
        c.argument(kind, given.get(p.name)) for p, kind in zip(op.params, prototypes()[op.name], strict=True)
    ]  # fmt: skip
    ret, size, executor = c.first(op.name, arguments)
    assert ret == 0
    assert size > 0
    small = checked.malloc(size - 1)
    assert reported(capfd) == []
    assert c.second(op.name, executor, size, small) == 0, checked.message()  # as on the chip
    (line,) = reported(capfd)
    assert f"{op.name}: workspace: expected {size} bytes, got an allocation of {size - 1} bytes (aclrtMalloc, " in line
    assert c.second(op.name, executor, size, small) == 361001
    (line,) = reported(capfd)
    assert f"{op.name}: executor: expected one" in line
    _, _, executor = c.first(op.name, arguments)
    place = ctypes.c_void_p()
    assert checked.aclGetRawTensorAddr(arguments[0], ctypes.byref(place)) == 0
    assert checked.aclrtFree(place) == 0
    assert c.second(op.name, executor, size) == 361001
    (line,) = reported(capfd)
    assert "query: expected device memory, got an allocation of " in line
    assert "that was freed (aclrtFree, call " in line
