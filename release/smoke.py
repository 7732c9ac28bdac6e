"""Tests an installed wheel: `python smoke.py torch` (or `core`, which imports the core before torch).

Runs in an environment that holds the wheel and torch, outside the repository; prints one line, or ends with an error.
"""

import ctypes
import importlib
import sys
from pathlib import Path


def runtimes() -> list[str]:
    """Returns the files of the OpenMP runtimes in this process."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    files = {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}
    return sorted(f for f in files if any(name in Path(f).name for name in ("gomp", "iomp5", "libomp")))


def check_c_api() -> None:
    """Calls the C libraries in this process: an allocation, and an operator that rejects its arguments."""
    from fusion_attention.capi import environment

    assert not environment.missing(), environment.missing()
    opapi, _, ascendcl = (ctypes.CDLL(str(environment.LIBRARY / f"lib{name}.so")) for name in environment.LIBRARIES)
    ascendcl.aclGetRecentErrMsg.restype = ctypes.c_char_p
    memory, size, executor = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_void_p()
    assert ascendcl.aclInit(None) == 0, ascendcl.aclGetRecentErrMsg()
    assert ascendcl.aclrtSetDevice(0) == ascendcl.aclrtMalloc(ctypes.byref(memory), ctypes.c_size_t(64), 0) == 0
    integer, number, nothing = ctypes.c_int64(1), ctypes.c_double(1), ctypes.c_void_p()
    layout = ctypes.create_string_buffer(b"BSND")
    refused = opapi.aclnnFlashAttentionScoreGetWorkspaceSize(
        *[nothing] * 8, number, number, *[integer] * 3, layout, *[integer] * 2, *[nothing] * 4,
        ctypes.byref(size), ctypes.byref(executor),
    )  # fmt: skip
    assert refused == 161001, (refused, ascendcl.aclGetRecentErrMsg())
    assert b"aclnnFlashAttentionScoreGetWorkspaceSize: query" in ascendcl.aclGetRecentErrMsg()
    assert ascendcl.aclrtFree(memory) == ascendcl.aclFinalize() == 0


def main(first: str) -> None:
    names = ["torch", "fusion_attention._native"]
    for name in names if first == "torch" else reversed(names):
        importlib.import_module(name)
    import torch

    from fusion_attention import _native
    from fusion_attention.testing import Case, arguments, check, expected, lowered, run

    torch.set_num_threads(2)
    torch.ones(1 << 22).sum()  # torch's threads
    sizes = {"heads_q": 8, "heads_kv": 2, "dim_qk": 64, "dim_v": 64, "scale": 0.125}
    for dtype in ("float32", "bfloat16"):
        case = Case("BNSD", dtype, (300, 300), (300, 300), mask="matrix", **sizes)
        given = arguments(case)
        check(case.id, run(lowered(case, given), given["dy"], "cpu"), expected(case, given))
    check_c_api()
    result = runtimes()
    assert len(result) == 1, f"one OpenMP runtime serves torch and the core, but there are {result}"
    python = ".".join(map(str, sys.version_info[:2]))
    module, runtime = (Path(path).name for path in (_native.__file__, result[0]))
    print(f"Python {python}, torch {torch.__version__}, {first} first: {module}, threads of {runtime}")


if __name__ == "__main__":
    main(sys.argv[1])
