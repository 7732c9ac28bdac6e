"""Settings per block or process (strict mode, checks of content, back end), also in threads and traces."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.compiled import compiled
from support.two_phase import handles_of
from torch.utils.checkpoint import checkpoint

import fusion_attention as fa
from fusion_attention import acl, aclnn, npu
from fusion_attention.backends import BACKENDS
from fusion_attention.contract.sampling import sample
from fusion_attention.ops import RECORDS
from fusion_attention.settings import PROCESS, Settings, current

HALF = torch.float16
DOUBLE = torch.randn(1, 4, 2, 8, dtype=torch.float64)


def rows(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype)


def three_rows(query: torch.Tensor | None = None) -> torch.Tensor:
    """Decodes three query rows, more than the chip accepts."""
    query = rows(1, 3, 64) if query is None else query
    cache = rows(1, 9, 64)
    return npu.npu_incre_flash_attention(query, cache, cache, scale_value=0.125)


@pytest.fixture(autouse=True)
def nothing_is_set() -> Iterator[None]:
    assert (current(), PROCESS) == (Settings(), Settings())
    yield
    assert (current(), PROCESS) == (Settings(), Settings())


# --------------------------------------------------------------------------------------------------------- strict mode

BEYOND_THE_CHIP: dict[str, tuple[str, Callable[[], Any]]] = {
    "rows": ("query: expected S1 == 1", three_rows),
    "value": (
        "value: expected Dv <= D",
        lambda: npu.npu_fusion_attention(rows(1, 4, 2, 8), rows(1, 4, 2, 8), rows(1, 4, 2, 16), 2, "BSND", scale=0.3),
    ),
}


@pytest.mark.parametrize("name", BEYOND_THE_CHIP)
def test_strict_mode_refuses_calls_beyond_chip_limits(name: str) -> None:
    text, call = BEYOND_THE_CHIP[name]
    call()
    with npu.strict(), pytest.raises(fa.ContractError, match=text):
        call()
    call()


def test_check_content_setting_enables_mask_content_check() -> None:
    query, mask = rows(1, 4, 2, 8), torch.zeros(4, 4, dtype=torch.bool)
    call = lambda: npu.npu_fusion_attention(query, query, query, 2, "BSND", atten_mask=mask, pre_tockens=1)  # noqa: E731
    with npu.strict():
        call()
    with npu.strict(check_content=True), pytest.raises(fa.ContractError, match="agrees with pre_tockens"):
        call()
    with npu.strict(False, check_content=True), pytest.raises(fa.ContractError, match="agrees with pre_tockens"):
        call()


def test_settings_blocks_nest_and_restore_settings_after_errors() -> None:
    with npu.strict(check_content=True):
        with npu.strict(False):
            three_rows()
            assert current() == Settings()
        with fa.use_backend("golden"):
            assert current() == Settings(True, True, "golden")
        with pytest.raises(fa.ContractError):
            three_rows()
    with pytest.raises(KeyError), npu.strict():
        raise KeyError
    three_rows()


def test_strict_works_as_a_decorator() -> None:
    assert fa.strict is npu.strict
    refuses = npu.strict()(three_rows)
    for _ in range(2):
        with pytest.raises(fa.ContractError):
            refuses()
    three_rows()


def in_thread(call: Callable[[], Any]) -> Any:
    """Runs a call in another thread; returns its result or its exception."""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(call)
    return done.exception() or done.result()


def test_strict_block_is_thread_local_and_install_strict_is_process_wide() -> None:
    with npu.strict():
        assert isinstance(in_thread(three_rows), torch.Tensor)
    npu.install(strict=True)
    try:
        assert isinstance(in_thread(three_rows), fa.ContractError)
        with npu.strict(False):
            three_rows()
        npu.install()  # says nothing of it
        assert isinstance(in_thread(three_rows), fa.ContractError)
        npu.install(strict=False)
        assert isinstance(in_thread(three_rows), torch.Tensor)
        npu.install(strict=True)
    finally:
        npu.uninstall()
    assert isinstance(in_thread(three_rows), torch.Tensor)


def test_checkpoint_recomputation_uses_settings_active_at_backward() -> None:
    q = DOUBLE.clone().requires_grad_()
    with fa.use_backend("golden"):
        out = checkpoint(lambda q: fa.attention(q, q, q), q, use_reentrant=False)
    with pytest.raises(fa.BackendError):
        out.sum().backward()
    with fa.use_backend("golden"):
        checkpoint(lambda q: fa.attention(q, q, q), q, use_reentrant=False).sum().backward()
    assert q.grad is not None


@pytest.mark.usefixtures("runtime")
def test_two_phase_interface_ignores_strict_blocks() -> None:
    op = RECORDS["aclnnIncreFlashAttention"]
    args = sample(op, S1=2)
    handles = handles_of(op, args, {"attention_out": torch.zeros_like(args["query"])}).values()
    with npu.strict():
        ret, *_ = aclnn.aclnnIncreFlashAttentionGetWorkspaceSize(*handles, strict=False)
    assert ret == 0, acl.get_recent_err_msg()
    with npu.strict(False):
        assert aclnn.aclnnIncreFlashAttentionGetWorkspaceSize(*handles)[0] != 0


# ----------------------------------------------------------------------------------------------------------- back ends


def test_use_backend_block_selects_the_back_end() -> None:
    with pytest.raises(fa.BackendError, match=r'golden computes it.*backend="golden".*use_backend\("golden"\)'):
        fa.attention(DOUBLE, DOUBLE, DOUBLE)
    with fa.use_backend("golden"):
        assert fa.attention(DOUBLE, DOUBLE, DOUBLE).dtype == torch.float64
        with pytest.raises(fa.BackendError, match="cpu: the cpu back end computes dtype"):
            fa.attention(DOUBLE, DOUBLE, DOUBLE, backend="cpu")  # a call that says so itself
        assert fa.decode_attention(DOUBLE, (DOUBLE, DOUBLE)).dtype == torch.float64
        assert fa.lightning_indexer(DOUBLE, DOUBLE[:, :, :1], DOUBLE[..., 0], 3)[1].dtype == torch.float64
    with pytest.raises(fa.BackendError):
        fa.attention(DOUBLE, DOUBLE, DOUBLE)


def test_use_backend_refuses_unknown_back_end() -> None:
    with (
        pytest.raises(ValueError, match=f"expected one of auto, {', '.join(BACKENDS)}, got 'gpu'"),
        fa.use_backend("gpu"),
    ):
        raise AssertionError


def test_use_backend_applies_to_torch_npu_functions() -> None:
    """Results of golden and cpu differ in their bits, which shows the back end that computed them."""
    query = rows(1, 40, 2, 64, dtype=torch.float32)
    call = lambda: npu.npu_fusion_attention(query, query, query, 2, "BSND", scale=0.125)[0]  # noqa: E731
    usual = call()
    with fa.use_backend("golden"):
        exact = call()
    assert torch.equal(exact, fa.attention(query, query, query, scale=0.125, backend="golden"))
    assert not torch.equal(usual, exact)
    assert torch.equal(usual, call())


def test_backward_uses_the_back_end_of_its_forward() -> None:
    q = DOUBLE.clone().requires_grad_()
    weights = DOUBLE[..., 0].clone().requires_grad_()
    with fa.use_backend("golden"):
        out = fa.attention(q, q, q)
        values = fa.lightning_indexer(q, q[:, :, :1], weights, 3)[1]
    out.sum().backward()
    values[values.isfinite()].sum().backward()
    assert q.grad is not None
    assert weights.grad is not None


# -------------------------------------------------------------------------------------------------------------- traces


@pytest.mark.usefixtures("fresh")
def test_compiled_graph_obeys_strict_mode_at_run_time() -> None:
    graph, query = compiled(three_rows)[0], rows(1, 3, 64)
    graph(query)
    with npu.strict(), pytest.raises(fa.ContractError, match="expected S1 == 1"):
        graph(query)
    graph(query)


@pytest.mark.usefixtures("fresh")
def test_graph_traced_in_strict_mode_stays_strict() -> None:
    """A graph receives lengths as inputs, so invalid lengths are detected when it runs."""
    graph, _ = compiled(lambda q, n: fa.attention(q, q, q, layout="TND", q_len=n))
    q = rows(8, 2, 8, dtype=torch.float32)
    with npu.strict():
        graph(q, torch.tensor([3, 5]))
    with pytest.raises(fa.ContractError, match="sequences that take up all T1 rows"):
        graph(q, torch.tensor([3, 4]))


@pytest.mark.usefixtures("fresh")
def test_tracing_in_strict_mode_raises_for_calls_beyond_chip_limits() -> None:
    with npu.strict(), pytest.raises(Exception, match="expected S1 == 1"):
        compiled(three_rows)[0](rows(1, 3, 64))


@pytest.mark.usefixtures("fresh")
def test_compiled_graph_uses_back_end_of_trace_or_of_run_time() -> None:
    graph, _ = compiled(lambda q: fa.attention(q, q, q))
    query = rows(1, 40, 2, 64, dtype=torch.float32)
    usual = graph(query)
    with fa.use_backend("golden"):
        exact = graph(query)
    assert torch.equal(exact, fa.attention(query, query, query, backend="golden"))
    assert torch.equal(usual, graph(query))
    fast, _ = compiled(lambda q: fa.attention(q, q, q))
    with fa.use_backend("golden"):
        fast(query)
    assert torch.equal(fast(query), exact)


@pytest.mark.usefixtures("fresh")
def test_use_backend_inside_compiled_function_applies() -> None:
    def layer(q: torch.Tensor) -> torch.Tensor:
        with fa.use_backend("golden"):
            return fa.attention(q, q, q)

    assert torch.compile(layer, backend="aot_eager")(DOUBLE).dtype == torch.float64
