"""While npu is installed, the process group "hccl" is gloo's on every rank; uninstall() removes the name."""

import datetime
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.sources import ROOT

from fusion_attention import npu

if not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)

PROGRAM = """
import os, sys, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rank = int(os.environ["LOCAL_RANK"])
torch.npu.set_device(rank)
device = torch.device("npu", rank)
dist.init_process_group(sys.argv[1])
x = torch.full((3,), 1.0 + rank, device="npu")
dist.all_reduce(x)
assert x.tolist() == [3.0] * 3, x
got = torch.empty(3, device="npu")
for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x + rank, 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)]):
    work.wait()
assert got.tolist() == [4.0 - rank] * 3, got
dist.barrier(group=dist.new_group([0, 1], backend="hccl"))
torch.manual_seed(0)
layer = torch.nn.Linear(8, 8).npu()
weight, bias = (p.detach().clone() for p in (layer.weight, layer.bias))
fully_shard(layer, mesh=init_device_mesh("npu", (2,)))
rows = torch.arange(16.0).reshape(2, 8).npu()
assert torch.equal(layer(rows), torch.nn.functional.linear(rows, weight, bias))
layer(rows).sum().backward()
assert layer.weight.grad.to_local().shape == (4, 8)
twin = DistributedDataParallel(torch.nn.Linear(8, 8).to(device), device_ids=[rank], output_device=rank)
data = TensorDataset(torch.arange(32.0).reshape(4, 8))
sampler = DistributedSampler(data, shuffle=False)
for (batch,) in DataLoader(data, batch_size=2, sampler=sampler, pin_memory=True):
    batch = batch.npu(non_blocking=True)
    twin(batch).sum().backward()
    assert batch.device == twin.module.weight.grad.device == device
assert torch.equal(twin.module.weight.grad.cpu(), data.tensors[0].sum(0).div(2).expand(8, 8)), twin.module.weight.grad
torch.npu.synchronize()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("words", ["hccl", "cpu:gloo,npu:hccl"])
def test_two_hccl_ranks_all_reduce_send_receive_and_train(words: str, tmp_path: Path) -> None:
    """The program does not import torch_npu; torch's autoload of device extensions does."""
    (tmp_path / "program.py").write_text(PROGRAM)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "fusion_attention.npu", str(tmp_path / "program.py"), words]
    run = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr


def test_hccl_group_reports_its_name_and_uninstall_restores_backends() -> None:
    before = list(dist.Backend.backend_list), dict(dist.Backend.backend_capability), dict(dist.Backend._plugins)
    mesh = dist.init_device_mesh
    npu.install()
    try:
        import torch_npu

        options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
        options.hccl_config = {"hccl_buffer_size": 200}
        assert torch_npu.distributed.is_hccl_available()
        assert dist.is_hccl_available()
        dist.init_process_group(
            "hccl", store=dist.HashStore(), rank=0, world_size=1, pg_options=options,
            timeout=datetime.timedelta(seconds=30),
        )  # fmt: skip
        try:
            assert dist.get_backend() == "hccl"
            x = torch.arange(3.0, device="npu")
            dist.all_reduce(x)
            assert x.tolist() == [0.0, 1.0, 2.0]
        finally:
            dist.destroy_process_group()
    finally:
        npu.uninstall()
    after = list(dist.Backend.backend_list), dict(dist.Backend.backend_capability), dict(dist.Backend._plugins)
    assert after == before
    assert dist.init_device_mesh is mesh
    assert not hasattr(dist, "is_hccl_available")
    assert not hasattr(dist.Backend, "HCCL")
