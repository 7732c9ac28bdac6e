"""Profiles of CUDA programs under transfer_to_npu are written, with little output on stderr."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
from fusion_attention import npu; npu.install()
import sys
from pathlib import Path
import torch
import torch_npu
from torch_npu.contrib import transfer_to_npu

layer = torch.nn.Linear(16, 16).cuda()
rows = torch.randn(8, 16, device="cuda")


def step():
    layer(rows).square().sum().backward()
    layer.zero_grad()


def profiled(profiler, activities, folder):
    with profiler.profile(
        activities=activities,
        schedule=profiler.schedule(wait=1, warmup=1, active=20, repeat=1),
        on_trace_ready=profiler.tensorboard_trace_handler(folder),
    ) as profile:
        for _ in range(22):
            step()
            profile.step()
    assert profile.key_averages().table(sort_by="self_cuda_time_total")


kinds, theirs = torch_npu.profiler.ProfilerActivity, torch.profiler.ProfilerActivity
profiled(torch_npu.profiler, [kinds.CPU, kinds.NPU], "npu")
profiled(torch.profiler, [theirs.CPU, theirs.CUDA], "cuda")
profiled(torch.profiler, None, "all")
for folder, words in {"autograd": {"use_device": "cuda"}, "old": {"use_cuda": True}}.items():
    with torch.autograd.profiler.profile(**words) as profile:
        for _ in range(20):
            step()
    Path(folder).mkdir()
    profile.export_chrome_trace(f"{folder}/1.pt.trace.json")
"""


@pytest.mark.slow
def test_cuda_profiles_write_traces_with_little_stderr_output(tmp_path: Path) -> None:
    """A fault printed a page of stderr for each of some 400 events, which took 350 times as long."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert len(run.stderr.splitlines()) < 50
    traces = list(tmp_path.glob("*/*.json"))
    assert sorted(trace.parent.name for trace in traces) == ["all", "autograd", "cuda", "npu", "old"]
    for trace in traces:
        assert trace.read_text().count("aten::addmm") >= 20
