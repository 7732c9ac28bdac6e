"""Finds a bug in a Triton kernel: verifies the saved tensors of a call, and those of a call with the bug repaired.

python examples/find_the_bug.py

Without a GPU the kernel runs in Triton's interpreter. docs/find_the_bug.md explains each step.
"""

import os
import tempfile
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import triton
import triton.language as tl
from typer.testing import CliRunner

from fusion_attention.cli import app


@triton.jit
def attention_kernel(
    Q, K, V, OUT, LSE, rows, keys, scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """Computes BM rows of one head of causal attention; rows of all tensors are [sequence, token, head, dim]."""
    tile, batch, head = tl.program_id(0), tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    at_m, at_d = tile * BM + tl.arange(0, BM), tl.arange(0, DIM)
    in_range = at_m[:, None] < rows
    q = tl.load(Q + ((batch * rows + at_m[:, None]) * HEADS + head) * DIM + at_d, mask=in_range, other=0.0)
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DIM], tl.float32)
    for first in range(0, (tile + 1) * BM, BN):  # the loop over tiles of keys
        at_n = first + tl.arange(0, BN)
        offset = ((batch * keys + at_n[:, None]) * HEADS + head) * DIM + at_d
        k = tl.load(K + offset, mask=at_n[:, None] < keys, other=0.0)
        v = tl.load(V + offset, mask=at_n[:, None] < keys, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where((at_n[None, :] <= at_m[:, None]) & (at_n[None, :] < keys), scores, float("-inf"))
        new = tl.maximum(top, tl.max(scores, 1))
        factor = tl.exp(top - new)
        weights = tl.exp(scores - new[:, None])
        total = total * factor + tl.sum(weights, 1)
        if FIXED:
            acc = acc * factor[:, None]
        acc += tl.dot(weights, v, input_precision="ieee")
        top = new
    out = acc / total[:, None]
    tl.store(OUT + ((batch * rows + at_m[:, None]) * HEADS + head) * DIM + at_d, out, mask=in_range)
    tl.store(LSE + (batch * HEADS + head) * rows + at_m, top + tl.log(total), mask=at_m < rows)


def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, fixed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the kernel; returns out [B, S, N, D] and lse [B, N, S]."""
    batch, rows, heads, dim = q.shape
    out, lse = torch.empty_like(q), q.new_empty(batch, heads, rows)
    grid = (triton.cdiv(rows, 32), batch * heads)
    attention_kernel[grid](q, k, v, out, lse, rows, k.shape[1], dim**-0.5, heads, dim, 32, 64, fixed)
    return out, lse


def verify(path: Path) -> int:
    """Runs `fusion-attention verify PATH --op attention --map ... --set band=causal`, prints its report."""
    words = ["--op", "attention", "--map", "out=my_out", "--map", "lse=my_lse", "--set", "band=causal"]
    result = CliRunner().invoke(app, ["verify", str(path), *words, "--no-backends"])
    print(result.stdout)
    return result.exit_code


def main() -> None:
    """Saves the kernel's tensors and verifies the file, without and with the line that the kernel lacks."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (torch.randn(1, 200, 4, 32, device=device) for _ in range(3))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.pt"
        for fixed in (False, True):
            out, lse = run(q, k, v, fixed=fixed)
            torch.save({"q": q, "k": k, "v": v, "my_out": out, "my_lse": lse}, file)
            assert verify(file) == (0 if fixed else 1)


if __name__ == "__main__":
    main()
