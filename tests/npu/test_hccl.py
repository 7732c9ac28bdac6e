"""Programs that ask for the process group "hccl" get gloo's under that name on every rank, and it can be taken back."""

import datetime
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from support.sources import ROOT

from fusion_attention import npu

if not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)

PROGRAM = """
import datetime, sys, torch, torch_npu
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

words, address = sys.argv[1], sys.argv[2]
for rank in [int(sys.argv[3])]:
    dist.init_process_group(words, init_method=address, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
    x = torch.full((3,), 1.0 + rank, device="npu")
    dist.all_reduce(x)
    assert x.tolist() == [3.0] * 3, x
    got = torch.empty(3, device="npu:0")
    there, back = dist.P2POp(dist.isend, x + rank, 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)
    for work in dist.batch_isend_irecv([there, back]):
        work.wait()
    assert got.tolist() == [4.0 - rank] * 3, got
    half = dist.new_group([0, 1], backend="hccl")
    dist.barrier(group=half)
    mesh = init_device_mesh("npu", (2,))
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8).npu()
    weight, bias = (p.detach().clone() for p in (layer.weight, layer.bias))
    fully_shard(layer, mesh=mesh)
    rows = torch.arange(16.0).reshape(2, 8).npu()
    assert torch.equal(layer(rows), torch.nn.functional.linear(rows, weight, bias))
    layer(rows).sum().backward()
    assert layer.weight.grad.to_local().shape == (4, 8)
    twin = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).npu())
    twin(rows + rank).sum().backward()
    assert torch.equal(twin.module.weight.grad, (2 * rows + 1).sum(0).div(2).expand(8, 8)), twin.module.weight.grad
    dist.destroy_process_group()
"""


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.slow
@pytest.mark.parametrize("words", ["hccl", pytest.param("cpu:gloo,npu:hccl", marks=pytest.mark.slow)])
def test_two_ranks_reduce_exchange_and_shard_weights(words: str) -> None:
    program = f"from fusion_attention import npu; npu.install()\n{PROGRAM}"
    address = free_address()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, words, address, str(rank)],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for rank in ranks:
            output, _ = rank.communicate(timeout=120)
            assert rank.returncode == 0, output
    finally:
        for rank in ranks:
            rank.kill()


def test_a_group_of_one_says_its_name_and_leaves_nothing_behind() -> None:
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
