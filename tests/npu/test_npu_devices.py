"""Eight "npu" devices share one memory: indices, streams, events and memory counters, as programs for the chip use."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from support.bits import same_bits

from fusion_attention import npu
from fusion_attention.npu.surface import device_module


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    npu.install()
    yield
    if device().is_available():
        device().set_device(0)
    npu.uninstall()


def device() -> Any:
    return torch.npu  # type: ignore[attr-defined]


# -------------------------------------------------------------------------------------------------------- device count


@pytest.mark.parametrize(
    ("processes", "named", "count"),
    [
        (None, None, 8),
        ("2", None, 8),
        ("16", None, 16),
        ("16", "3", 1),
        (None, "0,1,2,3", 4),
        (None, " 5, 7", 2),
        (None, "1,-1,2", 1),
        (None, "", 0),
        ("many", None, 8),
    ],
)
def test_device_count_follows_local_world_size_and_visible_devices(
    processes: str | None, named: str | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("LOCAL_WORLD_SIZE", processes), ("ASCEND_RT_VISIBLE_DEVICES", named)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert device_module.visible() == count
    for way in ("host", "cpu"):
        npu.install(way)
        assert device().device_count() == count
        assert device().is_available() == (count > 0)
    assert torch.accelerator.device_count() == count
    with pytest.raises(RuntimeError, match=f"expected npu:0 to npu:{count - 1}, got {count}"):
        device().set_device(count)


def test_visible_devices_are_read_at_first_use_of_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    npu.uninstall()
    npu.install()
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "4,5")
    device().set_device(1)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "4,5,6")
    assert device().device_count() == torch.accelerator.device_count() == 2
    with pytest.raises(RuntimeError, match="expected npu:0 to npu:1, got 'npu:2'"):
        torch.ones(1, device="npu:2")


# -------------------------------------------------------------------------------------------- tensors on device indices


def test_results_are_on_the_npu_index_of_their_inputs() -> None:
    x = torch.ones(2, 3, device="npu:1")
    tensors = [x.to("npu:1"), x + 1, x.mT, x.sum(), torch.zeros_like(x), x.new_ones(2), x.clone(), torch.cat([x, x])]
    tensors += [
        torch.ones(2).npu(1),
        torch.ones(2).to(torch.device("npu", 1)),
        x.cpu().to(device="npu:1"),
        x[0],
        *x.split(1),
    ]
    tensors += [
        torch.empty(0, device=x.device).set_(x.untyped_storage()),
        x.resize_(3, 2),
        torch.histc(x),
        x.to("npu:0").to(x),
    ]
    tensors += [torch.nn.Linear(3, 3).npu(1).weight, torch.nn.Linear(3, 3, device="npu:1").bias]
    tensors += torch.unbind(torch.nn.LSTM(3, 3, device="npu:1")(torch.ones(2, 3, device="npu:1"))[0])
    q = torch.ones(1, 1, 1, 16, device="npu:1", requires_grad=True)
    tensors += [npu.npu_fusion_attention(q, q, q, 1, "BSND")[0]]
    tensors += torch.autograd.grad(tensors[-1].sum(), q)
    for tensor in tensors:
        assert str(tensor.device) == "npu:1"
    assert str(torch.empty_like(x, device="npu:3").device) == "npu:3"
    assert str(x.untyped_storage().device) == "npu:1"
    assert device().current_device() == 0


def test_npu_without_index_means_the_current_device() -> None:
    x = torch.ones(2, device="npu:3")
    device().set_device("npu:2")
    assert torch.accelerator.current_device_index() == device().current_device() == 2
    for tensor in (torch.ones(2, device="npu"), torch.ones(2).npu(), torch.ones(2).to("npu"), x.npu(), x.to("npu")):
        assert str(tensor.device) == "npu:2"
    assert str(torch.nn.Linear(2, 2).npu().weight.device) == "npu:2"
    with device().device("npu:4"), device().device_of(x):
        assert str(torch.ones(2, device="npu").device) == "npu:3"
        with device().device_of(torch.ones(1)):
            assert device().current_device() == 3
    with pytest.raises(KeyError), device().device(6):
        raise KeyError
    assert device().current_device() == 2
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(device().current_device).result() == 0


def test_copies_between_npu_devices_propagate_gradients_back() -> None:
    x = torch.randn(3, device="npu:1", requires_grad=True)
    weight = torch.randn(3, requires_grad=True)
    there = x.to("npu:2")
    assert there.data_ptr() != x.data_ptr()
    (there * weight.to("npu:2")).sum().cpu().backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert (str(x.grad.device), str(weight.grad.device)) == ("npu:1", "cpu")
    same_bits(x.grad.cpu(), weight.detach())
    y = torch.zeros(3, device="npu:3")
    y.copy_(x.detach())
    torch._foreach_copy_([y], [there.detach()])
    same_bits(y.cpu(), x.detach().cpu())
    copied = torch.ops.aten.copy(torch.zeros(3), y)
    assert (copied.device.type, torch.ops.aten.copy(y, copied).device) == ("cpu", y.device)


def test_layers_on_three_npu_devices_train_together() -> None:
    layers = [torch.nn.Linear(4, 4, device=f"npu:{i}") for i in range(3)]
    optimizer = torch.optim.AdamW([p for layer in layers for p in layer.parameters()], foreach=True)
    rows = torch.randn(2, 4)
    for layer in layers:
        rows = layer(rows.to(layer.weight.device))
    rows.square().mean().backward()
    torch.nn.utils.clip_grad_norm_([p for layer in layers for p in layer.parameters()], 1.0)
    optimizer.step()
    for i, layer in enumerate(layers):
        assert layer.weight.grad is not None
        assert layer.weight.device == layer.weight.grad.device == torch.device("npu", i)


def test_mixed_device_error_names_the_argument_on_cpu() -> None:
    x, mask = torch.ones(1, 4, 2, 16, device="npu"), torch.zeros(4, 4, dtype=torch.bool)
    for call, name in (
        (lambda: npu.npu_fusion_attention(x, x, x.cpu(), 2, "BSND"), "value"),
        (lambda: npu.npu_fusion_attention(x, x, x, 2, "BSND", atten_mask=mask), "atten_mask"),
        (lambda: npu.npu_fused_infer_attention_score(x, [x.cpu()], [x], num_heads=2, input_layout="BSND"), "key"),
    ):
        with pytest.raises(RuntimeError, match=rf"npu:0 and cpu! \(npu_\w+: {name} is on cpu: move it to npu:0\)"):
            call()


def test_rng_states_and_seeds_of_npu_devices_match_cpu_generator() -> None:
    device().manual_seed(3)
    assert len(device().get_rng_state_all()) == 8
    state = device().get_rng_state("npu:1")
    first = torch.randn(3, device="npu:1")
    device().set_rng_state(state, 2)
    same_bits(torch.randn(3, device="npu:2").cpu(), first.cpu())
    states, first = device().get_rng_state_all(), torch.rand(3, device="npu")
    device().set_rng_state_all(states)
    same_bits(torch.rand(3, device="npu").cpu(), first.cpu())
    assert device().initial_seed() == 3
    device().seed()
    assert device().initial_seed() != 3
    generator = torch.Generator("npu:6").manual_seed(1)
    assert str(generator.device) == "npu:6"
    same_bits(
        torch.rand(3, device="npu:6", generator=generator).cpu(),
        torch.rand(3, generator=torch.Generator().manual_seed(1)),
    )


# ------------------------------------------------------------------------------------------- operations across devices


def test_index_on_a_device_other_than_cpu_or_the_same_raises() -> None:
    x, host_index = torch.arange(4.0), torch.tensor([0, 2])
    index = host_index.npu()
    for refused in (
        lambda: x[index],
        lambda: x[(x > 1).npu()],
        lambda: x.index_put_((index,), torch.ones(2, device="npu")),
        lambda: x.npu()[index.to("npu:1")],
    ):
        with pytest.raises(
            IndexError, match="indices should be either on cpu or on the same device as the indexed tensor"
        ):
            refused()
    y = x.npu()
    for refused in (
        lambda: y.index_put_((index,), torch.ones(2)),
        lambda: x.index_put_((host_index,), torch.ones(2, device="npu")),
        lambda: y.index_put_((index,), torch.ones(2, device="npu:1")),
    ):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            refused()
    assert y[host_index].tolist() == y[index].tolist() == y[(x == 0).logical_or(x == 2)].tolist() == [0, 2]
    y[host_index] = torch.tensor(5.0)
    y[index] += 1
    assert y.tolist() == [6, 1, 6, 3]


def test_set_with_storage_of_another_device_raises() -> None:
    there = torch.ones(3, device="npu")
    for refused in (
        lambda: torch.empty(0).set_(there),
        lambda: torch.empty(0, device="npu").set_(torch.ones(3)),
        lambda: torch.empty(0, device="npu").set_(torch.ones(3).untyped_storage(), 0, (3,)),
        lambda: torch.empty(0, device="npu:1").set_(there.untyped_storage(), 0, (3,)),
        lambda: torch.empty(0, device="npu:1").set_(there),
    ):
        with pytest.raises(RuntimeError, match=r"different device|at least two devices"):
            refused()
    assert torch.empty(0, device="npu").set_(there).data_ptr() == there.data_ptr()


# ------------------------------------------------------------------------------------- streams, events, memory, threads


def test_npu_streams_and_events_are_torch_streams_and_events() -> None:
    stream, event = device().Stream("npu:1"), device().Event(enable_timing=True)
    assert isinstance(stream, torch.Stream)
    assert isinstance(event, torch.Event)
    assert str(stream.device) == "npu:1"
    with device().stream(stream):
        assert device().current_stream() == torch.accelerator.current_stream() == stream
        assert device().current_device() == 1
        assert device().current_stream(0) == device().default_stream(0) != stream
    assert device().current_device() == 0
    with stream:
        assert device().current_stream("npu:1") == stream
    assert stream.record_event().query()
    start, end = (torch.Event(device="npu", enable_timing=True) for _ in range(2))
    start.record()
    end.record()
    assert start.elapsed_time(end) >= 0
    with pytest.raises(RuntimeError, match="expected two recorded events"):
        device().Event(enable_timing=True).elapsed_time(device().Event())
    stream.wait_stream(device().current_stream())
    stream.wait_event(stream.record_event())
    for wait in (stream.synchronize, device().synchronize, end.synchronize, device().empty_cache):
        wait()


def test_current_stream_is_thread_local() -> None:
    here = Barrier(2)

    def enter(first: bool) -> bool:
        stream = device().Stream()
        if not first:
            here.wait()
        with device().stream(stream):
            if first:
                here.wait()
            here.wait()
            inside = device().current_stream() == stream
            if not first:
                here.wait()
        if first:
            here.wait()
        return inside and device().current_stream() == device().default_stream()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(enter, [True, False])) == [True, True]
    assert device().current_stream() == device().default_stream()


def test_device_functions_refuse_missing_devices() -> None:
    calls = "memory_allocated max_memory_allocated memory_reserved memory_stats mem_get_info get_device_properties "
    calls += "get_device_name get_device_capability synchronize current_stream default_stream get_rng_state set_device "
    calls += "reset_peak_memory_stats Stream"
    for call in calls.split():
        for missing in (9, "npu:8", "cpu", torch.device("cpu"), torch.device("npu:8"), -1, "npu:", "npu:x"):
            with pytest.raises(RuntimeError, match=r"torch\.npu: device: expected npu:0 to npu:7, got"):
                getattr(device(), call)(missing)
        getattr(device(), call)("npu:0")


@pytest.mark.skipif(not hasattr(torch.accelerator, "memory_stats"), reason="since torch 2.9")
def test_torch_accelerator_memory_functions_work_on_npu() -> None:
    memory = torch.accelerator
    for call in ("empty_cache", "reset_peak_memory_stats", "reset_accumulated_memory_stats"):
        assert getattr(memory, call)() is None
    for call in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        assert getattr(memory, call)() == getattr(memory, call)("npu:7") == 0
    assert not any(memory.memory_stats().values())
    free, total = memory.get_memory_info()
    assert 0 < free <= total == device().mem_get_info()[1]
    with pytest.raises(RuntimeError, match="expected npu:0 to npu:7"):
        memory.memory_allocated(9)


def test_backward_keeps_autograd_multithreading_enabled() -> None:
    x = torch.ones(3, device="npu", requires_grad=True)
    y = (x * 2).sum()
    y.backward()
    assert torch.autograd.is_multithreading_enabled()
    y = (x * 2).sum()
    npu.uninstall()
    y.backward()
    assert torch.autograd.is_multithreading_enabled()
    npu.install()


def test_autograd_profiler_records_npu_time(capfd: pytest.CaptureFixture[str]) -> None:
    x = torch.ones(3, device="npu", requires_grad=True)
    with torch.autograd.profiler.profile(use_device="npu") as profile:
        (x * x).sum().backward()
    assert any(event.key == "aten::mul" and event.device_time_total > 0 for event in profile.key_averages())
    captured = capfd.readouterr()
    assert "USDT" in captured.err or not captured.err
    assert len(captured.err.splitlines()) < 10
