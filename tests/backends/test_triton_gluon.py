"""The Gluon forward without a GPU: when it is chosen, what it is launched with, what the compiler makes of it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from support import sass
from support.launches import watch
from support.triton_ahead import CUOBJDUMP, TYPES
from triton.backends.compiler import GPUTarget

import fusion_attention as fa
from fusion_attention.backends.triton import launch_gluon, shapes
from fusion_attention.waist.problem import Problem

HOPPER = torch.device("cuda:0")
BY_TMA = shapes.Tile(128, 128, 8, 2, shapes.TMA)
gluon = pytest.mark.skipif(launch_gluon.kernel() is None, reason=f"Triton {triton.__version__} has no Gluon for sm_90")


def problem(dim: int = 128, **more: Any) -> Problem:
    return Problem(16, 4, dim, more.pop("dim_v", dim), **({"dtype": "bfloat16", "scale": 0.1} | more))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The opt-in, on a machine with a GPU of sm_90."""
    monkeypatch.setattr(launch_gluon, "MEASURED", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))


def test_nobody_has_measured_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sets MEASURED has run tests/gpu and make bench-gpu on an sm_90, and says so in docs/gpu.md."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert not launch_gluon.serves(problem(), HOPPER, BY_TMA)


@gluon
@pytest.mark.parametrize("dim", launch_gluon.TILES)
@pytest.mark.parametrize("more", [{}, {"dtype": "float16"}, {"has_sink": True}], ids=str)
def test_a_band_alone_is_served(dim: int, more: dict[str, Any], measured: None) -> None:
    assert launch_gluon.serves(problem(dim, **more), HOPPER, BY_TMA)


@pytest.mark.parametrize(
    "more",
    [
        *({"bias": bias} for bias in ("matrix", "table", "slopes", "slopes_sqrt")),
        *({"dropout": kind, "keep_prob": 0.9} for kind in ("bits", "philox")),
        *({"softcap": 30.0}, {"has_blocked": True}, {"dim_rope": 64}, {"empty_rows": "mean"}, {"scale": -0.1}),
        *({"dim": 96}, {"dim": 256}, {"dim": 128, "dim_v": 64}),
    ],
    ids=str,
)
def test_anything_else_is_plain_tritons(more: dict[str, Any], measured: None) -> None:
    assert not launch_gluon.serves(problem(**more), HOPPER, BY_TMA)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)], ids=str)
def test_other_chips_have_no_wgmma(capability: tuple[int, int], measured: None, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert not launch_gluon.serves(problem(), HOPPER, BY_TMA)


def test_rows_that_no_descriptor_describes_are_plain_tritons(measured: None) -> None:
    assert not launch_gluon.serves(problem(), HOPPER, BY_TMA._replace(TMA=False))
    assert not launch_gluon.serves(problem(), torch.device("cpu"), BY_TMA)


@gluon
def test_a_launch_names_every_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[Any, dict[str, Any]]] = []
    watch(monkeypatch, lambda *seen: launched.append(seen), computes=False)
    monkeypatch.setattr(launch_gluon, "serves", lambda *_: True)
    monkeypatch.setattr("fusion_attention.backends.triton.reasons_against", lambda *_: [])
    q = torch.zeros(1, 3, 2, 128, dtype=torch.bfloat16)
    fa.attention(q, q, q, backend="triton")
    kernel, named = launched[0]
    known = launch_gluon.constants(problem(128, scale=q.shape[-1] ** -0.5), 8)
    assert kernel is launch_gluon.kernel()
    assert {name: value for name, value in named.items() if name.isupper()} == known | {"GROUP": 1}
    assert {name for name, value in named.items() if value is None} == {"sink"}
    assert launch_gluon.OPTIONS.items() <= named.items()


def compiled(p: Problem) -> Any:
    """The kernel for sm_90."""
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel, known = launch_gluon.kernel(), launch_gluon.constants(p, 8)
    types = {"places": "*i64", "lengths": "*i64", "tiles": "*i32", "max_": "*fp32", "sum_": "*fp32"}
    types |= {"sink": "*fp32"} if p.has_sink else {}
    types |= dict.fromkeys(("q", "k", "v", "out"), f"*{TYPES[p.dtype]}")
    signature, fixed, attributes = {}, {}, {}
    for at, (name, param) in enumerate(zip(kernel.arg_names, kernel.params, strict=True)):
        kind = types.get(name) or ("constexpr" if name in known or name == "sink" else param.annotation_type)
        signature[name] = kind
        if kind == "constexpr":
            fixed[(at,)] = known.get(name)
        elif kind.startswith("*"):
            attributes[(at,)] = [["tt.divisibility", 16]]
    options = {"num_warps": launch_gluon.TILES[p.dim_qk].num_warps, **launch_gluon.OPTIONS}
    return triton.compile(
        GluonASTSource(kernel, signature, fixed, attributes), target=GPUTarget("cuda", 90, 32), options=options
    )


@gluon
@pytest.mark.parametrize(
    ("p", "most", "shared"),
    [
        (problem(128, has_sink=True), 7.3, 176),  # instructions of a whole tile per score of a thread; KB
        pytest.param(problem(128, dtype="float16"), 7.3, 176, marks=pytest.mark.slow),
        pytest.param(problem(64), 6.7, 128, marks=pytest.mark.slow),
    ],
    ids=["128", "128 float16", "64"],
)
def test_ahead(p: Problem, most: float, shared: int, tmp_path: Path) -> None:
    """No register spills, products of a tile overlap the weighing of another, and loads are one warp's."""
    made, file = compiled(p), tmp_path / "cubin"
    file.write_bytes(made.asm["cubin"])
    usage, code = (
        subprocess.run([CUOBJDUMP, option, file], capture_output=True, text=True, check=True).stdout
        for option in ("-res-usage", "-sass")
    )
    assert re.findall(r"(?:STACK|LOCAL):(\d+)", usage) == ["0", "0"]
    assert made.metadata.shared <= (shared + 1) * 1024
    tile = launch_gluon.TILES[p.dim_qk]
    scores = sass.loops(code)
    assert len(scores) == 2  # warpgroups, each with a loop of its own
    assert all(loop.least * 32 * 4 / (64 * tile.BN) <= most for loop in scores)
    waits = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[01])", code)
    assert waits == ["0x0", "0x1", "0x0", "0x0"] * 2  # the first tile, the loop's two, the last one's
    assert "LDGSTS" not in code
