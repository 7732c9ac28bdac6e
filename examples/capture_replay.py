"""Records the attention calls of a program in files, and replays each on its back end and on the float64 reference."""

import tempfile
from pathlib import Path

import torch

import fusion_attention as fa
from fusion_attention import npu

folder = Path(tempfile.mkdtemp())


@fa.capture(folder)
def work() -> None:
    """Calls a packed npu_fusion_attention with dropout, the function of its gradient, and fa.attention."""
    q = torch.randn(48, 4, 64, dtype=torch.bfloat16)
    given = {"actual_seq_qlen": [20, 48], "actual_seq_kvlen": [20, 48], "keep_prob": 0.9}
    out, top, total, _, seed, offset, _ = npu.npu_fusion_attention(q, q, q, 4, "TND", scale=0.125, **given)
    given |= {"softmax_max": top, "softmax_sum": total, "attention_in": out, "seed": seed, "offset": offset}
    npu.npu_fusion_attention_grad(q, q, q, out, 4, "TND", scale_value=0.125, **given)
    fa.attention(q[None], q[None], q[None], band=fa.Band.window(7, 0))


torch.manual_seed(0)
work()
for file in sorted(folder.iterdir()):
    repeated, judged = fa.replay(file), fa.replay(file, backend="golden")
    assert repeated.worst == 0, "the same back end gives the same bits, dropout included"
    assert judged.worst < 0.1
    shown = ", ".join(f"{name} {difference:.1e}" for name, difference in judged.differences.items())
    print(f"{file.name}: {file.stat().st_size} bytes; against golden: {shown}")
