"""Verifies a user's kernel by a call of fa.diagnose(), then from a file by the command `fusion-attention verify`.

python examples/verify_kernel.py
"""

import math
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

import fusion_attention as fa


def my_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Computes causal attention over [B, S, N, D] with a bug: the diagonal is wrong if keys are more than rows."""
    q, k, v = (t.transpose(1, 2).float() for t in (q, k, v))
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * scale
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)  # counted from the upper left corner
    out = scores.masked_fill(future, -math.inf).softmax(-1) @ v.repeat_interleave(group, 1)
    return out.transpose(1, 2).to(torch.bfloat16)


def main() -> None:
    """Verifies the kernel by fa.diagnose() and by the command."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, rows, heads, 64).bfloat16() for rows, heads in ((100, 8), (160, 2), (160, 2)))
    out = my_kernel(q, k, v, 0.125)

    # In a program: the call's arguments, and the kernel's results.
    inputs = {"q": q, "k": k, "v": v, "scale": 0.125, "band": fa.Band.causal()}
    result = fa.diagnose("attention", inputs, {"out": out})
    print(result)
    assert result.verdict == "wrong"
    assert result.mistakes[0].name == "causal-alignment"

    # From a file: the same tensors under other names; arguments that the file does not contain are options.
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder) / "dump.npz"
        np.savez(dump, **{n: t.float().numpy() for n, t in (("Q", q), ("K", k), ("V", v), ("O", out))})
        names = [f"--map={name}" for name in ("q=Q", "k=K", "v=V", "out=O")]
        words = ["--op=attention", "--dtype=bfloat16", "--set=scale=0.125", "--set=band=causal(align='start')"]
        command = [sys.executable, "-m", "fusion_attention", "verify", str(dump), *names, *words]
        code = subprocess.run(command, check=False).returncode
    print(f"\nwith a diagonal that starts in the upper left corner, verify exits with {code}")


if __name__ == "__main__":
    main()
