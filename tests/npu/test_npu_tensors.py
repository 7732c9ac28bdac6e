"""Tensors on the torch device "npu": shared memory, copies, random numbers, processes, and torch's error texts."""

import copy
import multiprocessing
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.bits import same_bits
from support.installed_state import there
from torch.utils._pytree import tree_leaves

from fusion_attention import attention, npu
from fusion_attention.integrations.sdpa import patched

HERE = "npu:0"


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    npu.install()
    yield
    npu.uninstall()


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Assert that `got` is on npu and has the bits of `want`, which is on the CPU."""
    assert str(got.device) == HERE
    same_bits(got.detach().cpu(), want.detach())


# -------------------------------------------------------------------------------------------------------------- memory


def test_npu_views_share_memory_and_version_counter() -> None:
    x = torch.zeros(2, 3, device="npu")
    view, row, taken, detached = x.view(6), x[1], x.T, x.detach()
    row.fill_(2)
    assert view.tolist() == [0, 0, 0, 2, 2, 2]
    assert taken[0].tolist() == detached[:, 0].tolist() == [0, 2]
    assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() == detached.data_ptr()
    assert view._base is x
    assert x._version == view._version == taken._version == 1
    assert torch.add(x, 1, out=x) is x
    assert x.add_(1) is x
    assert view[5] == 4


def test_resize_set_and_data_assignment_change_npu_storage() -> None:
    x = torch.arange(4.0, device="npu")
    view = x.view(2, 2)
    x.resize_(6)[4:] = 9
    assert x.tolist() == [0, 1, 2, 3, 9, 9]
    assert view.tolist() == [[0, 1], [2, 3]]
    other = torch.ones(3, device="npu")
    x.set_(other)
    other[0] = 5
    assert x.tolist() == [5, 1, 1]
    storage = other.untyped_storage()
    storage.resize_(0)
    assert (storage.size(), x.untyped_storage().size()) == (0, 0)
    x.data = torch.full((2,), 3.0, device="npu")
    assert x.tolist() == [3, 3]


def test_resizing_foreign_memory_on_npu_raises() -> None:
    host = torch.from_numpy(numpy.arange(3.0))
    x = torch.ops.fusion_attention_npu.to_npu(host, [])
    for resize in (lambda: x.resize_(100), lambda: x.untyped_storage().resize_(800)):
        with pytest.raises(RuntimeError, match="storage that is not resizable"):
            resize()
    assert x.add_(1).tolist() == host.tolist() == [1, 2, 3]


def test_copies_between_cpu_and_npu_do_not_share_memory() -> None:
    x = torch.ones(3, device="npu")
    for copied in (x.cpu(), x.to("cpu"), x.cpu().npu(), x.clone()):
        x.zero_()
        assert copied.tolist() == [1, 1, 1]
        x.fill_(1)
    assert x.npu() is x.to("npu") is x.to("npu:0") is x


def test_inplace_change_of_saved_npu_tensor_raises_in_backward() -> None:
    x = torch.ones(3, device="npu", requires_grad=True)
    y = x.exp()
    y.view(3)[0] = 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_parameter_view_in_inference_mode_is_not_an_inference_tensor() -> None:
    for device in ("cpu", "npu"):
        weight = torch.ones(2, 3, device=device, requires_grad=True)
        with torch.inference_mode():
            results = [tensor.is_inference() for tensor in (weight.T, weight.detach(), *weight.unbind(), weight + 1)]
            assert results == [False, False, False, False, True], device
            assert torch.nn.functional.linear(weight, weight).device.type == device


CALLS: dict[torch.dtype, list[Callable[[torch.Tensor], Any]]] = {
    torch.float32: [torch.std_mean, torch.linalg.lu_factor, lambda x: torch.meshgrid(x[0], x[1], indexing="ij"),
                    lambda x: x.hsplit(2), torch.special.i1, lambda x: x.topk(2)],
    torch.complex64: [torch.conj, lambda x: x.conj().mT @ x, lambda x: x.angle(), torch.var, lambda x: 2**x],
    torch.bool: [torch.log2, torch.tril, lambda x: x ^ ~x.T, lambda x: x.any(1), lambda x: x.zero_()],
    torch.bfloat16: [lambda x: torch.dist(x, x.T), lambda x: torch.kron(x, x), lambda x: x.round(decimals=3)],
    torch.int64: [torch.asinh, torch.flipud, lambda x: x @ x, lambda x: x.gather(1, x % 4)],
}  # fmt: skip


@pytest.mark.parametrize("dtype", CALLS)
def test_results_of_every_kind_on_npu_match_cpu(dtype: torch.dtype) -> None:
    """Numbers of each dtype, tuples, lists, views and conjugate views; test_npu_database.py has all operators."""
    x = (9 * torch.randn(4, 4)).to(dtype)
    for call in CALLS[dtype]:
        for got, want in zip(tree_leaves(call(x.npu())), tree_leaves(call(x.clone())), strict=True):
            assert str(got.device) == HERE
            assert (got.dtype, got.stride(), got.is_conj()) == (want.dtype, want.stride(), want.is_conj())
            assert torch.equal(got.cpu(), want)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_sdpa_on_npu_under_vmap_and_func_grad_matches_cpu() -> None:
    """Under vmap and func.grad, torch selects the kernel with tensors that have no storage."""
    call = torch.nn.functional.scaled_dot_product_attention
    rows = torch.randn(2, 3, 2, 4, 8)
    same(torch.vmap(call)(*[rows.npu()] * 3), torch.vmap(call)(*[rows] * 3))
    got = torch.func.grad(lambda q: call(q, q, q).sum())(rows[0].npu())
    same(got, torch.func.grad(lambda q: call(q, q, q).sum())(rows[0]))


@pytest.mark.parametrize("layer", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_recurrent_layers_on_npu_match_cpu(layer: type[torch.nn.Module]) -> None:
    """torch calls fused kernels for recurrent layers on devices such as npu."""
    model = layer(3, 4, 2, bidirectional=True)
    x = torch.randn(5, 2, 3)
    results = []
    for here in (model, copy.deepcopy(model).npu()):
        rows = x.detach().to(next(here.parameters()).device).requires_grad_()
        out = here(rows)[0]
        out.sum().backward()
        results.append([out, rows.grad, *(p.grad for p in here.parameters())])
        with torch.inference_mode():
            results[-1].append(here(rows)[0])
    for want, got in zip(*results, strict=True):
        same(got, want)
    packed = torch.nn.utils.rnn.pack_padded_sequence(x.npu(), torch.tensor([5, 3]))
    assert str(here(packed)[0].data.device) == HERE


# ---------------------------------------------------------------------------------------------------- copies and files


def test_deepcopy_and_pickle_keep_values_types_and_views_of_npu_tensors() -> None:
    x = torch.randn(2, 3, device="npu")
    both = {"x": x, "view": x[1], "weight": torch.nn.Parameter(x)}
    copied, unpickled = copy.deepcopy(both), pickle.loads(pickle.dumps(both))
    for tensors in (copied, unpickled):
        for name, tensor in both.items():
            same(tensors[name], tensor.cpu())
            assert type(tensors[name]) is type(tensor)
            assert tensors[name].data_ptr() != tensor.data_ptr()
    copied["x"].zero_()
    assert not copied["view"].any(), "a view is no view any more"
    assert x.all()


WHERE: dict[str, tuple[Any, str]] = {
    "nowhere else": (None, "npu:3"),
    "npu": ("npu", "npu:0"),
    "a device": (torch.device("cpu"), "cpu"),
    "a table": ({"npu:3": "npu:1"}, "npu:1"),
    "a function": (lambda storage, place: storage, "cpu"),
}


@pytest.mark.parametrize("where", WHERE)
def test_torch_load_maps_npu_tensors_to_map_location(where: str, tmp_path: Path) -> None:
    place, result = WHERE[where]
    x = torch.randn(2, 3, device="npu:3")
    torch.save({"x": x, "view": x[1]}, tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt", map_location=place)
    assert {str(tensor.device) for tensor in loaded.values()} == {result}
    same_bits(loaded["x"].cpu(), x.cpu())
    loaded["x"].zero_()
    assert not loaded["view"].any()


def test_torch_load_of_npu_file_needs_install_or_map_location_cpu(tmp_path: Path) -> None:
    torch.save(torch.ones(2), tmp_path / "x.pt")
    assert str(torch.load(tmp_path / "x.pt", map_location="npu").device) == HERE
    torch.save(torch.ones(2, device="npu"), tmp_path / "x.pt")
    assert str(torch.load(tmp_path / "x.pt", mmap=True).device) == HERE
    with pytest.raises(RuntimeError, match="NPU device 9 but torch"):
        torch.load(tmp_path / "x.pt", map_location="npu:9")
    npu.uninstall()
    with pytest.raises(RuntimeError):
        torch.load(tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt", map_location="cpu").tolist() == [1, 1]


def test_pin_memory_works_for_cpu_tensors_and_raises_for_npu_tensors() -> None:
    unpinned = torch.arange(4)
    pinned = unpinned.pin_memory()
    assert [t.is_pinned() for t in (unpinned, pinned, pinned[2:], pinned.clone(), torch.ones(3, pin_memory=True))] == [
        False, True, True, False, True,
    ]  # fmt: skip
    assert pinned.tolist() == [0, 1, 2, 3]
    assert str(pinned.npu(non_blocking=True).device) == HERE
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        torch.ones(2, device="npu").pin_memory()
    batches = torch.utils.data.DataLoader(unpinned, batch_size=2, pin_memory=True)
    assert [(batch.is_pinned(), batch.tolist()) for batch in batches] == [(True, [0, 1]), (True, [2, 3])]


# -------------------------------------------------------------------------------------------- random numbers, autocast


def test_npu_generator_draws_same_numbers_as_cpu_generator() -> None:
    generator, host = torch.Generator("npu").manual_seed(3), torch.Generator().manual_seed(3)
    assert str(generator.device) == HERE
    for draw in (torch.randn, torch.rand):
        same(draw(4, device="npu", generator=generator), draw(4, generator=host))
    state = generator.get_state()
    first = torch.randperm(9, device="npu", generator=generator)
    generator.set_state(state)
    same(torch.randperm(9, device="npu", generator=generator), first.cpu())
    assert generator.clone_state().initial_seed() == generator.initial_seed() == 3
    copies = copy.deepcopy(generator), pickle.loads(pickle.dumps(generator))
    want = torch.randn(4, device="npu", generator=generator).cpu()
    for copied in copies:
        same(torch.randn(4, device="npu", generator=copied), want)
    for seed in (torch.manual_seed, torch.npu.manual_seed, torch.npu.manual_seed_all):  # type: ignore[attr-defined]
        seed(5)
        one = torch.bernoulli(torch.full((20,), 0.5, device="npu"))
        torch.manual_seed(5)
        same(one, torch.bernoulli(torch.full((20,), 0.5)))


def test_npu_autocast_casts_dtypes_independently_of_cpu_autocast() -> None:
    layer = torch.nn.Linear(4, 4).npu()
    x = torch.randn(2, 4, device="npu")
    with torch.autocast("npu", torch.bfloat16):
        y = layer(x)
        assert (y.dtype, torch.softmax(y, -1).dtype, (y + x).dtype) == (torch.bfloat16, torch.float32, torch.float32)
        assert torch.cat([y, x]).dtype == torch.float32
        with torch.autocast("npu", enabled=False):
            assert layer(x).dtype == torch.float32
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            torch.nn.functional.binary_cross_entropy(x.sigmoid(), x.sigmoid())
    y.sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
    with torch.autocast("npu"):
        assert layer(x).dtype == torch.float16
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.float32, "the CPU's autocast is not this device's"


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("other", ["cpu", "npu:1"])
def test_operands_on_different_devices_raise_the_error_of_torch(other: str) -> None:
    x, y = torch.ones(2, 2, device="npu"), torch.ones(2, 2, device=other)
    calls: list[Callable[[], Any]] = [lambda: x + y, lambda: y @ x, lambda: torch.cat([x, y]), lambda: x.add_(y)]
    calls += [lambda: torch.where(x > 0, x, y), lambda: npu.npu_fusion_attention(x, y, x, 1, "TND")]
    calls += [lambda: x + y.sum(), lambda: torch.nn.LSTM(2, 2, device="npu")(y)] if other != "cpu" else []
    text = f"Expected all tensors to be on the same device, but found at least two devices, (npu:0|{other})"
    for call in calls:
        with pytest.raises(RuntimeError, match=text):
            call()
    assert (x + torch.tensor(2.0)).tolist() == [[3, 3], [3, 3]]  # a number
    assert str(x[torch.tensor([1])].device) == HERE
    assert str(x.copy_(y).device) == HERE


class _Subclass(torch.Tensor):
    pass


def test_attention_on_npu_keeps_the_tensor_subclass_of_the_query() -> None:
    q = torch.randn(1, 2, 4, 8)
    want, got = (attention(rows.as_subclass(_Subclass), rows, rows) for rows in (q, q.npu()))
    assert type(want) is type(got) is _Subclass
    same(got, want)


def test_patched_sdpa_on_npu_bitwise_equals_attention() -> None:
    q = torch.randn(1, 2, 4, 8)
    call = torch.nn.functional.scaled_dot_product_attention
    with patched():
        assert torch.nn.functional.scaled_dot_product_attention is not call
        want, got = (torch.nn.functional.scaled_dot_product_attention(rows, rows, rows) for rows in (q, q.npu()))
    same(got, want)
    same_bits(got.cpu(), attention(q, q, q, layout="BNSD"))


def test_generator_of_another_device_raises_the_error_of_torch() -> None:
    with pytest.raises(RuntimeError, match="Expected a 'npu' device type for generator but found 'cpu'"):
        torch.randn(2, device="npu", generator=torch.Generator())
    with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator but found 'npu'"):
        torch.randn(2, generator=torch.Generator("npu"))
    with pytest.raises(RuntimeError, match="expected npu:0 to npu:7, got 'npu:9'"):
        torch.Generator("npu:9")


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda x: x.to_sparse(), "Sparse"),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "quantized"),
        (lambda x: torch.nested.nested_tensor([x]), "nested"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_sparse_quantized_and_nested_npu_tensors_are_refused(make: Callable[[torch.Tensor], Any], what: str) -> None:
    with pytest.raises(NotImplementedError, match=f"device npu: expected strided tensors, got one of layout .*{what}"):
        make(torch.ones(2, 2, device="npu"))


@pytest.mark.filterwarnings("ignore")
def test_sparse_tensor_cannot_be_aliased_between_npu_and_cpu() -> None:
    one = torch.ones(1, device="npu")
    odd = torch.sparse_csr_tensor(torch.tensor([0, 1], device="npu"), one.long() * 0, one)
    cross = torch.ops.fusion_attention_npu
    with pytest.raises(NotImplementedError, match="expected a strided tensor, got one of layout SparseCsr"):
        cross.to_base(odd)
    host = torch.ones(1)
    assert cross.to_npu(host, [host.to_sparse(), odd]).tolist() == [1]


def test_numpy_of_npu_tensor_raises() -> None:
    with pytest.raises(TypeError, match="can't convert npu:0 device type tensor to numpy"):
        torch.ones(2, device="npu").numpy()


# --------------------------------------------------------------------------------------- processes, threads, uninstall


def test_npu_tensors_compute_after_uninstall_but_new_tensors_raise() -> None:
    x = torch.ones(2, 2, device="npu", requires_grad=True)
    y = (x * 3).sum()
    npu.uninstall()
    assert not there()
    assert not torch.accelerator.is_available()
    y.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[3, 3], [3, 3]]
    assert (x + x).view(4)[0].item() == 2
    assert x.cpu().device.type == "cpu"
    for new in (lambda: torch.ones(1, device="npu"), lambda: torch.ones(1).to("npu"), lambda: torch.ones(1).to(x)):
        with pytest.raises(RuntimeError, match=r'device "npu": expected fusion_attention.npu.install\(\) to be active'):
            new()
    with pytest.raises(RuntimeError, match=r"expected fusion_attention.npu.install\(\) to be active"):
        torch.zeros(1, device=x.device)
    assert torch.compile(torch.sin, backend="eager")(torch.zeros(1)).item() == 0
    npu.install()
    assert (x.detach() + torch.ones(2, 2, device="npu")).tolist() == [[2, 2], [2, 2]]


def test_install_switches_between_npu_device_and_host_alias() -> None:
    x = torch.ones(2, device="npu")
    npu.install("host")
    assert torch.ones(2, device="npu").device.type == "cpu"
    assert str((x + 1).device) == HERE
    npu.install("cpu")
    npu.install()
    assert str((x + torch.ones(2, device="npu")).device) == HERE


def test_npu_device_works_in_every_thread() -> None:
    x = torch.randn(8, 8, device="npu")
    want = (x @ x).cpu()

    def work(_: int) -> None:
        for _ in range(20):
            rows = x.clone().requires_grad_()
            same(rows @ torch.eye(8, device="npu") @ x, want)
            rows.sum().backward()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_backward_of_npu_tensor_works_alone_in_a_new_thread() -> None:
    x = torch.ones(3, device="npu", requires_grad=True)
    y, ones = x * 2, torch.ones(3, device="npu")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(torch.autograd.backward, y, ones).result()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2, 2]


def _child(x: torch.Tensor, answer: Any) -> None:
    rows = x.detach().requires_grad_()
    (rows @ rows).sum().backward()
    answer.send((rows.grad.cpu().tolist(), str(torch.ones(1, device="npu").device)))  # type: ignore[union-attr]


def test_forked_process_computes_on_npu() -> None:
    x = torch.randn(3, 3, device="npu", requires_grad=True)
    (x @ x).sum().backward()
    assert x.grad is not None
    process = multiprocessing.get_context("fork")
    mine, theirs = process.Pipe()
    child = process.Process(target=_child, args=(x, theirs))
    child.start()
    assert mine.poll(30), "the forked process hangs"
    assert mine.recv() == (x.grad.cpu().tolist(), "npu:0")
    child.join()
    assert child.exitcode == 0


class _Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.full((2,), float(number), device="npu")


def test_data_loader_worker_sends_npu_tensors() -> None:
    loader = torch.utils.data.DataLoader(
        _Rows(), batch_size=2, num_workers=1, timeout=30, multiprocessing_context="fork"
    )
    batches = list(loader)
    assert {str(batch.device) for batch in batches} == {HERE}
    assert [batch.tolist() for batch in batches] == [[[0, 0], [1, 1]], [[2, 2], [3, 3]]]


def test_pickled_npu_tensor_shares_memory_between_processes() -> None:
    x = torch.nn.Parameter(torch.arange(3.0, device="npu:3"))
    received = ForkingPickler.loads(ForkingPickler.dumps(x))
    assert type(received) is torch.nn.Parameter
    assert (str(received.device), received.requires_grad) == ("npu:3", True)
    received.detach().add_(1)
    assert x.tolist() == received.tolist() == [1, 2, 3]
    with pytest.raises(RuntimeError, match="not resizable"):
        x.untyped_storage().resize_(100)
    with pytest.raises(RuntimeError, match="non-leaf tensor"):
        ForkingPickler.dumps(x * 2)
    sent = bytes(ForkingPickler.dumps(x))
    npu.uninstall()
    with pytest.raises(RuntimeError, match=r"expected fusion_attention.npu.install\(\) in the process that receives"):
        ForkingPickler.loads(sent)


OTHERS = """
import torch
torch.utils.rename_privateuse1_backend("other")
from fusion_attention import npu
try:
    npu.install()
except RuntimeError as error:
    print(error)
npu.install("host")
print(torch.ones(1, device="npu").device)
"""


@pytest.mark.slow
def test_install_refuses_if_another_library_renamed_privateuse1() -> None:
    run = subprocess.run([sys.executable, "-c", OTHERS], capture_output=True, text=True, timeout=120, check=False)
    message, device = run.stdout.splitlines()
    assert message == (
        'npu.install: expected no other library to use torch\'s PrivateUse1, got its device "other" (use a process '
        'without that library, or install(device="host"))'
    )
    assert device == "cpu"
