"""Compiles the kernels for a chip without having one, and reads from the binary what it takes.

    measure(kernel, problem, tile, 90) -> {"registers": 204, "spilled": 0, "shared": 131072, ...}

The constants are those of a launch (launch.py); what a launch finds out about its arguments - absent ones, pointers on
16 bytes - is said here by hand. Reads with the cuobjdump of Triton's own wheel.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fusion_attention.backends.triton import backward, decode, forward, launch, paged
from fusion_attention.backends.triton.shapes import Tile
from fusion_attention.problem import Problem

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int8": "i8"}
KERNELS = {
    "forward": forward.forward,
    "prepare": backward.prepare,
    "query": backward.backward_query,
    "key": backward.backward_key,
    "decode": decode.decode,
    "join": decode.join,
}


def known(kernel: str, problem: Problem, tile: Tile, mean: int = 0, aligned: bool = True) -> launch.Constants:
    """What a kernel knows while compiling."""
    if kernel == "forward":
        return launch.forward_constants(problem, tile, mean, aligned)
    if kernel in ("decode", "join"):
        return dict(zip(("decode", "join"), paged.decode_constants(problem, tile, aligned), strict=True))[kernel]
    few, query, key = launch.backward_constants(problem, tile, mean, aligned)
    return {"prepare": few, "query": query, "key": key}[kernel]


def pointer(name: str, p: Problem) -> str | None:
    """The type of an argument that is memory, or None where a problem lacks it."""
    stored = p.bias in ("matrix", "table")
    lacking = {
        **dict.fromkeys(("q_rope", "k_rope", "dq_rope", "dk_rope"), not p.dim_rope),
        **dict.fromkeys(("bias", "dbias"), not stored),
        "slopes": p.bias not in ("slopes", "slopes_sqrt"),
        "blocked": not p.has_blocked,
        "bits": p.dropout != "bits",
        **dict.fromkeys(("sink", "part"), not p.has_sink),
        "table": not p.page_size,
        **dict.fromkeys(("scale_k", "offset_k"), p.dequant_k == "none"),
        **dict.fromkeys(("scale_v", "offset_v"), p.dequant_v == "none"),
    }
    if lacking.get(name, False):
        return None
    rows = ("q", "k", "v", "out", "dout", "dq", "dk", "dv", "q_rope", "k_rope", "dq_rope", "dk_rope", "bias")
    types = {"blocked": "u8", "bits": "u8", "places": "i64", "lengths": "i64", "tiles": "i32", "table": "i32"}
    types |= dict.fromkeys(rows, TYPES[p.dtype])
    if p.kv_dtype:
        types |= dict.fromkeys(("k", "v"), TYPES[p.kv_dtype])
    return "*" + types.get(name, "fp32")


def source(kernel: str, problem: Problem, constants: launch.Constants) -> ASTSource:
    """A kernel with the types of its arguments."""
    function = KERNELS[kernel]
    signature: dict[str, str] = {}
    fixed: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for at, (name, param) in enumerate(zip(function.arg_names, function.params, strict=True)):
        kind = None if name in constants else param.annotation_type or pointer(name, problem)
        if kind is None:
            signature[name], fixed[(at,)] = "constexpr", constants.get(name)
        else:
            signature[name] = kind
            if kind.startswith("*"):
                attributes[(at,)] = [["tt.divisibility", 16]]
    return ASTSource(fn=function, signature=signature, constexprs=fixed, attrs=attributes)


def measure(
    kernel: str, problem: Problem, tile: Tile, chip: int, mean: int = 0, aligned: bool = True
) -> dict[str, int | bool]:
    """What the kernel takes on a chip (80 or 90), and with which instructions it multiplies."""
    compiled = triton.compile(
        source(kernel, problem, known(kernel, problem, tile, mean, aligned)),
        target=GPUTarget("cuda", chip, 32),
        options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([CUOBJDUMP, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    registers, stack, local = (
        int(re.search(rf"{word}:(\d+)", usage).group(1))  # type: ignore[union-attr]
        for word in ("REG", "STACK", "LOCAL")
    )
    return {
        "registers": registers,
        "spilled": stack + local,
        "shared": compiled.metadata.shared,
        "wgmma": "HGMMA" in code,
        "mma": bool(re.search(r"\bHMMA\.", code)),
        "copies": len(re.findall(r"\bLDGSTS", code)),
        "waits": len(re.findall(r"WARPGROUP\.DEPBAR", code)),
    }
