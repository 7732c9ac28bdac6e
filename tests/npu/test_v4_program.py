"""A training program for the chip with a DeepSeek-V4 layer is compared with the layer in torch's operators."""

import runpy
import subprocess
import sys
from pathlib import Path

import torch
from support.sources import ROOT

from fusion_attention.testing import check
from fusion_attention.testing.estimated_rounding_errors import expected_of

PROGRAM = ROOT / "tests" / "support" / "programs" / "v4_layer.py"


def test_deepseek_v4_layer_on_npu_matches_unfused_torch_layer(tmp_path: Path) -> None:
    file = tmp_path / "results.pt"
    command = [sys.executable, "-m", "fusion_attention.npu", str(PROGRAM), str(file)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    got = torch.load(file, weights_only=True)
    program = runpy.run_path(str(PROGRAM))

    def plainly() -> dict[str, torch.Tensor]:
        results: dict[str, torch.Tensor] = program["step"](*program["layer_on"]("cpu", torch.float64), fused=False)
        return results

    assert all(t.isfinite().all() and t.any() for t in got.values())
    check("layer", got, expected_of(plainly, got, 16))
