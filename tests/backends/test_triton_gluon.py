"""The Gluon forward without a GPU: conditions of its choice, launch arguments, compiled instructions."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from support import sass
from support.ahead_calls import Config
from support.launches import watch
from support.triton_ahead import CUOBJDUMP, source
from triton.backends.compiler import GPUTarget

import fusion_attention as fa
from fusion_attention.backends.triton.common import shapes
from fusion_attention.backends.triton.dense import select_gluon
from fusion_attention.ir.problem import Problem

HOPPER = torch.device("cuda:0")
BY_TMA = shapes.Tile(128, 128, 8, 2, shapes.TMA)
gluon = pytest.mark.skipif(select_gluon.kernel() is None, reason=f"Triton {triton.__version__} has no Gluon for sm_90")


def problem(dim: int = 128, **more: Any) -> Problem:
    return Problem(16, 4, dim, more.pop("dim_v", dim), **({"dtype": "bfloat16", "scale": 0.1} | more))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes torch report a GPU of compute capability sm_90."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))


@gluon
@pytest.mark.parametrize(
    "more", [{}, {"dtype": "float16"}, {"has_sink": True}, {"empty_rows": "mean_in_band"}], ids=str
)
def test_gluon_forward_serves_plain_band_attention_on_hopper(more: dict[str, Any], hopper: None) -> None:
    assert select_gluon.serves(problem(**more), HOPPER, BY_TMA)


@pytest.mark.parametrize(
    "more",
    [
        *({"bias": bias} for bias in ("matrix", "table", "slopes", "slopes_sqrt")),
        *({"dropout": kind, "keep_prob": 0.9} for kind in ("bits", "philox")),
        *({"softcap": 30.0}, {"has_blocked": True}, {"dim_rope": 64}, {"empty_rows": "mean"}, {"scale": -0.1}),
        *({"dim": 64}, {"dim": 96}, {"dim": 256}, {"dim": 128, "dim_v": 64}),
    ],
    ids=str,
)
def test_gluon_forward_does_not_serve_other_features_or_head_dims(more: dict[str, Any], hopper: None) -> None:
    assert not select_gluon.serves(problem(**more), HOPPER, BY_TMA)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)], ids=str)
def test_gluon_forward_does_not_serve_chips_without_wgmma(
    capability: tuple[int, int], hopper: None, monkeypatch: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert not select_gluon.serves(problem(), HOPPER, BY_TMA)


def test_gluon_forward_does_not_serve_rows_without_tensor_descriptors(hopper: None) -> None:
    assert not select_gluon.serves(problem(), HOPPER, BY_TMA._replace(TMA=False))
    assert not select_gluon.serves(problem(), torch.device("cpu"), BY_TMA)


@gluon
def test_gluon_launch_passes_every_kernel_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[Any, dict[str, Any]]] = []
    watch(monkeypatch, lambda *launch: launched.append(launch), computes=False)
    monkeypatch.setattr(select_gluon, "serves", lambda *_: True)
    monkeypatch.setattr("fusion_attention.backends.triton.reasons_against", lambda *_: [])
    q = torch.zeros(1, 3, 2, 128, dtype=torch.bfloat16)
    fa.attention(q, q, q, backend="triton")
    kernel, named = launched[0]
    constexprs = select_gluon.constants(problem(128, scale=q.shape[-1] ** -0.5), 8)
    assert kernel is select_gluon.kernel()
    assert {name: value for name, value in named.items() if name.isupper()} == constexprs | {"GROUP": 1}
    assert {name for name, value in named.items() if value is None} == {"sink"}
    assert select_gluon.OPTIONS.items() <= named.items()


def compiled(p: Problem, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the kernel compiled for sm_90."""
    from triton.experimental.gluon._runtime import GluonASTSource

    monkeypatch.setattr(select_gluon, "serves", lambda *_: True)
    one = Config("gluon_forward", p).launched(90)
    return triton.compile(source(one, GluonASTSource), target=GPUTarget("cuda", 90, 32), options=one.options)


@gluon
@pytest.mark.parametrize(
    "p",
    [problem(has_sink=True, empty_rows="mean_in_band"), pytest.param(problem(dtype="float16"), marks=pytest.mark.slow)],
    ids=["bfloat16", "float16"],
)
def test_gluon_kernel_compiles_without_spills_and_overlaps_products(
    p: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No register spills; products of one tile overlap the softmax of another; one warp issues all loads."""
    binary, file = compiled(p, monkeypatch), tmp_path / "cubin"
    file.write_bytes(binary.asm["cubin"])
    usage, code = (
        subprocess.run([CUOBJDUMP, option, file], capture_output=True, text=True, check=True).stdout
        for option in ("-res-usage", "-sass")
    )
    assert re.findall(r"(?:STACK|LOCAL):(\d+)", usage) == ["0", "0"]
    assert binary.metadata.shared <= 177 * 1024
    tile = select_gluon.TILE
    scores = sass.loops(code)
    assert len(scores) == 2  # warpgroups, each with a loop of its own
    # Instructions per score of a thread, in a complete tile.
    assert all(loop.least * 32 * 4 / (64 * tile.BN) <= 7.3 for loop in scores)
    waits = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[01])", code)
    assert waits == ["0x0", "0x1", "0x0", "0x0"] * 2  # the first tile, the loop's two, the last one's
    assert "LDGSTS" not in code
