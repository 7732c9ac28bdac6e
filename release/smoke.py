"""Tests an installed wheel: `python smoke.py torch` (or `core`, which imports the core before torch).

Runs in an environment that holds the wheel and torch, outside the repository; prints one line, or ends with an error.
"""

import ctypes
import importlib
import sys
from functools import partial
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

    import fusion_attention as fa
    from fusion_attention import _native
    from fusion_attention.testing.drawn import attend, compare_with

    torch.set_num_threads(2)
    torch.manual_seed(0)
    torch.ones(1 << 22).sum()  # torch's threads

    def results(attention: object, drawn: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        q, k, v, dout = drawn
        rows = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention(*rows)  # type: ignore[operator]
        return dict(zip(("out", "dq", "dk", "dv"), (out, *torch.autograd.grad(out, rows, dout)), strict=True))

    def ours(q, k, v):  # type: ignore[no-untyped-def]
        return fa.attention(q, k, v, layout="BNSD", band=fa.Band.causal())

    def theirs(q, k, v):  # type: ignore[no-untyped-def]
        k, v = (x.repeat_interleave(4, 1) for x in (k, v))
        hidden = torch.ones(300, 300, dtype=torch.bool).triu(1)

        def scores():  # type: ignore[no-untyped-def]
            return (q @ k.mT / 8).masked_fill(hidden, -torch.inf)

        return attend(scores(), v, scores)

    for dtype in (torch.float32, torch.bfloat16):
        drawn = [torch.randn(2, heads, 300, 64).to(dtype) for heads in (8, 2, 2, 8)]
        exact = [x.double() for x in drawn]
        compare_with(str(dtype), results(ours, drawn), partial(results, theirs, exact))
    check_c_api()
    result = runtimes()
    assert len(result) == 1, f"one OpenMP runtime serves torch and the core, but there are {result}"
    python = ".".join(map(str, sys.version_info[:2]))
    module, runtime = (Path(path).name for path in (_native.__file__, result[0]))
    print(f"Python {python}, torch {torch.__version__}, {first} first: {module}, threads of {runtime}")


if __name__ == "__main__":
    main(sys.argv[1])
