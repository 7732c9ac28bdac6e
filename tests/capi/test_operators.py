"""Operators called from C: bytes, codes and error texts equal those of the Python interface; executors; threads."""

import ctypes
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import same
from support.c_operators import KINDS, PHASE_1, Inexpressible, Operators, prototypes
from support.c_programs import needs_compiler
from support.c_runtime import TO_DEVICE, TO_HOST, Runtime
from support.two_phase import Args, call, outputs_of

from fusion_attention import acl as python
from fusion_attention.contract import Op
from fusion_attention.contract.sampling import invalid_samples, sample
from fusion_attention.ops import RECORDS

OPERATORS = {name: op for name, op in RECORDS.items() if name.startswith("aclnn")}
SCORE = "aclnnFlashAttentionScore"
pytestmark = [needs_compiler, pytest.mark.filterwarnings("ignore::fusion_attention.ContractWarning")]


@pytest.fixture
def c(acl: Runtime) -> Iterator[Operators]:
    """Yields the C operators, with the Python interface initialised as well."""
    assert python.init() == 0
    assert python.rt.set_device(0) == 0
    yield Operators(acl)
    python.finalize()
    python.get_recent_err_msg()


def both(c: Operators, op: Op, args: Args) -> tuple[int, int]:
    """Makes a call in C and in Python, compares their outputs and error texts; returns (C code, Python code)."""
    ours, theirs = outputs_of(op, args), outputs_of(op, args)
    result = c.call(op, args, ours)
    error_text = c.runtime.message() or ""
    expected = max(call(op, args, theirs, tensors=False))
    words = python.get_recent_err_msg()
    if expected:
        assert error_text.startswith((f"{op.name}{PHASE_1}: ", f"{op.name}: ")), error_text
        assert error_text.split(": ", 1)[1] == words.replace(f"{op.name}: ", "")
    for name, tensor in theirs.items():
        assert tensor is None or same(tensor, ours[name]), name
    return result, expected


@pytest.mark.sampled(1)
@pytest.mark.parametrize("op", OPERATORS.values(), ids=lambda op: op.name)
def test_c_operator_results_and_errors_equal_those_of_python(op: Op, c: Operators) -> None:
    codes = []
    for layout in op.layouts or ("",):
        result, expected = both(c, op, sample(op, **({op.layout_attr: layout} if layout else {})))
        assert result == expected
        codes.append(result)
    assert 0 in codes, "no sample is within the limits of the chip"


def test_c_operator_on_strided_views_bitwise_equals_python(c: Operators) -> None:
    args = sample(OPERATORS[SCORE], input_layout="BSND")
    for name in ("query", "key", "value"):
        larger = torch.randn(
            *args[name].shape[:-1], 3 * args[name].shape[-1], generator=torch.Generator().manual_seed(1)
        )
        args[name] = larger.to(args[name].dtype)[..., args[name].shape[-1] : 2 * args[name].shape[-1]]
        assert args[name].storage_offset() > 0
    assert both(c, OPERATORS[SCORE], args) == (0, 0)


def broken(c: Operators, op: Op) -> int:
    """Compares each invalid sample call in C and Python; returns the number of calls that C can express."""
    count = 0
    for broken in invalid_samples(op):
        try:
            result, expected = both(c, op, broken.args)
        except Inexpressible:
            continue
        assert result == expected, broken.id
        count += result != 0
    return count


@pytest.mark.parametrize("name", [SCORE, "aclnnIncreFlashAttentionV4"])
def test_invalid_c_calls_have_error_codes_and_messages_of_python(name: str, c: Operators) -> None:
    assert broken(c, OPERATORS[name]) > 20


@pytest.mark.slow
@pytest.mark.parametrize("op", OPERATORS.values(), ids=lambda op: op.name)
def test_invalid_c_calls_of_all_operators_have_error_codes_of_python(op: Op, c: Operators) -> None:
    """C programs can break rules, but not pass another type; functions of metadata have no rules."""
    assert broken(c, op) > (10 if op.rules else 0)


# ----------------------------------------------------------------------------------------------------------- executors


class Attention:
    """Attention of 2 heads over `tokens` tokens in device memory. All keys are equal: the output is the mean of
    the values, which are small integers, and therefore exact."""

    def __init__(self, c: Operators, tokens: int = 16, seed: int = 0) -> None:
        self.c, generator = c, torch.Generator().manual_seed(seed)
        shape = (1, tokens, 2, 16)
        self.values = torch.randint(-8, 9, shape, generator=generator).float()
        self.rows = [torch.randn(shape, generator=generator), torch.ones(shape), self.values]
        self.out, self.statistics = torch.full((1, tokens, 2, 16), 7.0), torch.zeros(1, 2, tokens, 8)
        every = [*self.rows, self.out, self.statistics, self.statistics]
        self.addresses = [c.runtime.malloc(t.nbytes) for t in every]
        for place, t in zip(self.addresses, every, strict=True):
            c.copy(place, t.data_ptr(), t.nbytes, TO_DEVICE)
        self.handles = [c.tensor(t, place) for t, place in zip(every, self.addresses, strict=True)]

    def plan(self) -> tuple[int, int, int | None]:
        q, k, v, out, top, total = map(ctypes.c_void_p, self.handles)
        numbers: list[Any] = [ctypes.c_double(0.25), ctypes.c_double(1.0), *map(ctypes.c_int64, (65536, 65536, 2))]
        tail: list[Any] = [ctypes.c_char_p(b"BSND"), ctypes.c_int64(0), ctypes.c_int64(0), top, total, None, out]
        return self.c.first(SCORE, [q, k, v, *[None] * 5, *numbers, *tail])

    def result(self, place: int | None = None) -> torch.Tensor:
        out = torch.zeros_like(self.out)
        self.c.copy(out.data_ptr(), self.addresses[3] if place is None else place, out.nbytes, TO_HOST)
        return out

    def is_right(self, place: int | None = None) -> bool:
        return bool((self.result(place) == self.values.mean(1, keepdim=True)).all())


def message(c: Operators) -> str:
    return c.runtime.message() or ""


def test_executor_refuses_a_second_run(c: Operators) -> None:
    attention = Attention(c)
    ret, size, executor = attention.plan()
    assert ret == 0, message(c)
    assert c.second(SCORE, executor, size) == 0, message(c)
    assert attention.is_right()
    assert c.second(SCORE, executor, size) == 361001
    assert f"{SCORE}: executor: expected one" in message(c)


def test_repeatable_executor_uses_replaced_tensor_addresses(c: Operators) -> None:
    first, second = Attention(c, seed=1), Attention(c, seed=2)
    _, size, executor = first.plan()
    assert c.runtime.aclSetAclOpExecutorRepeatable(executor) == 0
    assert [c.second(SCORE, executor, size) for _ in range(2)] == [0, 0]
    assert first.is_right()
    c.copy(second.addresses[3], torch.zeros_like(second.out).data_ptr(), second.out.nbytes, TO_DEVICE)
    for index, (handle, place) in enumerate(zip(first.handles[:3], second.addresses[:3], strict=True)):
        assert c.runtime.aclSetInputTensorAddr(executor, index, handle, place) == 0, message(c)
    assert c.runtime.aclSetOutputTensorAddr(executor, 3, first.handles[3], second.addresses[3]) == 0, message(c)
    assert c.second(SCORE, executor, size) == 0, message(c)
    assert second.is_right()
    assert first.is_right(), "the old output was written"
    assert c.runtime.aclDestroyAclOpExecutor(executor) == 0
    assert c.second(SCORE, executor, size) == 361001


def test_tensor_address_may_be_set_after_phase_1(c: Operators) -> None:
    attention = Attention(c)
    attention.handles[0] = c.tensor(attention.rows[0], 0)
    ret, size, executor = attention.plan()
    assert ret == 0, message(c)
    assert c.runtime.aclSetAclOpExecutorRepeatable(executor) == 0
    assert c.second(SCORE, executor, size) == 361001
    assert "query: expected an address before phase 2" in message(c)
    assert c.runtime.aclSetTensorAddr(executor, 0, attention.handles[0], attention.addresses[0]) == 0, message(c)
    assert c.second(SCORE, executor, size) == 0, message(c)
    assert attention.is_right()


@pytest.mark.parametrize("wrong", ["no workspace", "small", "of the host", "beyond", "freed", "destroyed", "stream"])
def test_refused_phase_2_leaves_output_unwritten_and_can_be_repeated(wrong: str, c: Operators) -> None:
    attention = Attention(c)
    _, size, executor = attention.plan()
    assert size > 0
    workspace: int | None = c.runtime.malloc(size, 2)
    stream = None
    name = "workspace"
    if wrong == "no workspace":
        workspace = None
    elif wrong == "small":
        size -= 1
        name = "workspaceSize"
    elif wrong == "of the host":
        workspace = c.runtime.create("aclrtMallocHost", size)
    elif wrong == "beyond":
        workspace, size = attention.addresses[0], 1 << 40
    elif wrong == "freed":
        assert c.runtime.aclrtFree(attention.addresses[0]) == 0
        name = "query"
    elif wrong == "destroyed":
        assert c.runtime.aclDestroyTensor(attention.handles[1]) == 0
        name = "key"
    else:
        stream, name = ctypes.c_void_p(12345), "stream"
    run = c.library[SCORE]
    run.argtypes = None
    ret = run(*map(ctypes.c_void_p, (workspace,)), ctypes.c_uint64(size), ctypes.c_void_p(executor), stream)
    assert ret in (361001, 161002)
    assert message(c).startswith(f"{SCORE}: {name}: ")
    assert bool((attention.result() == 7).all())
    if wrong not in ("freed", "destroyed"):
        _, size, _ = attention.plan()
        assert c.second(SCORE, executor, size) == 0, message(c)
        assert attention.is_right()


@pytest.mark.parametrize("place", range(6))
@pytest.mark.parametrize("wrong", ["null", "destroyed", "a list", "an address"])
def test_invalid_handle_in_phase_1_returns_error_code(wrong: str, place: int, c: Operators) -> None:
    attention = Attention(c)
    handle = attention.handles[place]
    if wrong == "destroyed":
        assert c.runtime.aclDestroyTensor(handle) == 0
    else:
        listed = c.runtime.aclCreateTensorList((ctypes.c_void_p * 1)(handle), 1)
        attention.handles[place] = {"null": 0, "a list": listed, "an address": id(c)}[wrong]
    ret, size, executor = attention.plan()
    assert (size, executor) == (0, None)
    assert ret == (161001 if wrong == "null" else 161002), message(c)
    assert message(c).startswith(f"{SCORE}{PHASE_1}: ")


def nothing(name: str) -> list[Any]:
    return [KINDS[kind](0) if kind in KINDS else None for kind in prototypes()[name]]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", OPERATORS)
def test_phase_1_with_null_arguments_returns_error_code(name: str, c: Operators) -> None:
    assert c.first(name, nothing(name)) == (161001, 0, None)
    assert message(c).startswith(f"{name}{PHASE_1}: ")


def test_null_workspace_size_or_executor_returns_error_code(c: Operators) -> None:
    assert c.library[SCORE + PHASE_1](*nothing(SCORE), None, None) == 161001
    assert "workspaceSize: expected where to write it" in message(c)
    assert c.second(SCORE, None) == 161001
    assert c.second(SCORE, 77) == 161002
    assert "executor: expected one of" in message(c)


def test_executor_of_another_operator_is_refused(c: Operators) -> None:
    _, size, executor = Attention(c).plan()
    assert c.second("aclnnFlashAttentionScoreV2", executor, size) == 161002
    assert c.second(SCORE, executor, size) == 0, message(c)


def test_operator_before_acl_init_returns_error_code(library: Runtime) -> None:
    c = Operators(library)
    assert c.first(SCORE, nothing(SCORE)) == (361001, 0, None)
    assert "called before aclInit" in message(c)
    assert c.second(SCORE, None) == 361001


# ------------------------------------------------------------------------------------------ memory of another allocator


def test_operators_compute_in_memory_allocated_by_torch(library: Runtime, tmp_path: Path) -> None:
    """Runs the table of allocation functions for GPU memory on the CPU."""
    config = tmp_path / "acl.json"
    config.write_text('{"fusion_attention": {"memory": "torch"}}')
    for _ in library.started(config):
        c = Operators(library)
        attention = Attention(c)
        ret, size, executor = attention.plan()
        assert ret == 0, message(c)
        assert c.second(SCORE, executor, size) == 0, message(c)
        assert attention.is_right()
        assert library.aclrtMemset(attention.addresses[3], 64, 7, 64) == 0
        raw = attention.result().view(torch.uint8).flatten()
        assert bool((raw[:64] == 7).all())
        assert bool((raw[64:68].view(torch.float32) == attention.values.mean(1).flatten()[16]).all())
        assert library.aclrtFree(attention.addresses[0]) == 0
        assert library.aclrtFree(attention.addresses[0]) != 0
        assert library.aclrtMalloc(ctypes.byref(ctypes.c_void_p()), 1 << 62, 0) == 207001


# ------------------------------------------------------------------------------------------------------------- threads


@pytest.mark.parametrize("loader", [ctypes.CDLL, ctypes.PyDLL])
def test_concurrent_threads_run_operators_correctly(loader: Any, c: Operators) -> None:
    """Calls with the GIL released (ctypes.CDLL) and with the GIL held (ctypes.PyDLL)."""
    c.library = loader(c.library._name)
    attentions = [Attention(c, tokens=16 << i % 4, seed=i) for i in range(16)]

    def work(attention: Attention) -> bool:
        for _ in range(5):
            ret, size, executor = attention.plan()
            if ret or c.second(SCORE, executor, size):
                return False
        return attention.is_right()

    with ThreadPoolExecutor(4, initializer=c.runtime.aclrtSetDevice, initargs=(0,)) as threads:
        assert all(threads.map(work, attentions, timeout=60))


@pytest.mark.parametrize("loader", [ctypes.CDLL, ctypes.PyDLL])
def test_repeatable_executor_runs_in_several_threads(loader: Any, c: Operators) -> None:
    c.library = loader(c.library._name)
    attention = Attention(c, tokens=256)
    _, size, executor = attention.plan()
    assert c.runtime.aclSetAclOpExecutorRepeatable(executor) == 0
    workspace = c.runtime.malloc(size)
    with ThreadPoolExecutor(4, initializer=c.runtime.aclrtSetDevice, initargs=(0,)) as threads:
        assert set(threads.map(lambda _: c.second(SCORE, executor, size, workspace), range(40), timeout=60)) == {0}
    assert attention.is_right()
