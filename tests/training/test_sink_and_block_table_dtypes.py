"""The Python API: sinks and slopes of every floating dtype, int32 and int64 page tables, errors of its cache."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.compiled import compiled
from support.two_phase import handles_of
from torch._subclasses.fake_utils import CrossRefFakeMode

import fusion_attention as fa
from fusion_attention import acl, aclnn, npu
from fusion_attention.contract.sampling import sample
from fusion_attention.ops import RECORDS

pytestmark = pytest.mark.usefixtures("fresh")
NARROW = (torch.float16, torch.bfloat16)
HEADS = 4
Q, K = torch.randn(2, 6, HEADS, 16), torch.randn(2, 6, 1, 16)
EVERYTHING = torch.arange(6, dtype=torch.int32).expand(2, 6, 1, 6)


def dense(sink: torch.Tensor) -> torch.Tensor:
    return fa.attention(Q, K, K, sink=sink)


def selected(sink: torch.Tensor) -> torch.Tensor:
    result: Any = fa.sparse_attention(Q, K, None, EVERYTHING, sink=sink)
    return result


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("way", "dtype"),
    [*((lambda f: (f, []), d) for d in (*NARROW, torch.float32, torch.float64)), (compiled, torch.float16)],
)
@pytest.mark.parametrize("interface", [dense, selected])
def test_sink_of_any_float_dtype_acts_as_float32_and_gradient_keeps_dtype(
    interface: Callable[..., torch.Tensor], way: Callable[..., Any], dtype: torch.dtype
) -> None:
    sink = torch.randn(HEADS).to(dtype).requires_grad_()
    sink32 = sink.detach().float().requires_grad_()
    want, out = interface(sink32), way(interface)[0](sink)
    assert torch.equal(out, want)
    want.square().sum().backward()
    out.square().sum().backward()
    assert sink.grad is not None
    assert sink.grad.dtype == dtype
    assert torch.equal(sink.grad, sink32.grad.to(dtype))  # type: ignore[union-attr]
    assert sink.grad.abs().min() > 0


@pytest.mark.parametrize("interface", [dense, selected])
def test_narrow_sink_gradient_dtype_agrees_with_fake_tensor_mode(interface: Callable[..., torch.Tensor]) -> None:
    sink = torch.randn(HEADS).bfloat16().requires_grad_()
    with CrossRefFakeMode():
        interface(sink).sum().backward()
    assert sink.grad is not None


@pytest.mark.parametrize("dtype", NARROW)
def test_narrow_sinks_and_alibi_slopes_give_same_bits_as_float32(dtype: torch.dtype) -> None:
    given = torch.rand(HEADS).to(dtype)
    out, lse = fa.attention(Q, K, K, alibi_slopes=given, return_lse=True)
    for one, other in zip((out, lse), fa.attention(Q, K, K, alibi_slopes=given.float(), return_lse=True), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(compiled(lambda s: fa.attention(Q, K, K, alibi_slopes=s))[0](given), out)
    assert not torch.equal(out, fa.attention(Q, K, K))
    assert torch.equal(
        fa.decode_attention(Q[:, :1], (K, K), sink=given),  # type: ignore[arg-type]
        fa.decode_attention(Q[:, :1], (K, K), sink=given.float()),  # type: ignore[arg-type]
    )
    index = torch.randn(2, 6, 2, 8), torch.randn(2, 6, 1, 8), torch.rand(2, 6, 2)
    losses = [fa.indexer_loss(Q, K, lse, *index, sink=sink) for sink in (given, given.float())]
    assert torch.equal(*losses)
    half = Q.to(dtype)
    assert torch.equal(fa.attention(half, half, half, sink=given), fa.attention(half, half, half, sink=given.float()))


def test_float64_sink_and_slopes_are_not_narrowed() -> None:
    q = torch.randn(1, 3, 2, 4, dtype=torch.float64, requires_grad=True)
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)
    with fa.use_backend("golden"):
        assert torch.autograd.gradcheck(lambda q, s: fa.attention(q, q, q, sink=s), (q, sink))
        precise = torch.tensor([1 / 3, 1e-9], dtype=torch.float64)
        one, other = (fa.attention(q, q, q, alibi_slopes=s) for s in (precise, precise.float()))
    assert not torch.equal(one, other)


def test_npu_fusion_attention_refuses_bfloat16_sink() -> None:
    with pytest.raises(fa.ContractError, match="sink: expected float32, got bfloat16"):
        npu.npu_fusion_attention(Q, Q, Q, HEADS, "BSND", scale=0.25, sink=torch.zeros(HEADS, dtype=torch.bfloat16))


# --------------------------------------------------------------------------------------------------------- page tables

POOL = torch.randn(8, 16, 2, 16)


def attended(table: torch.Tensor) -> torch.Tensor:
    result: Any = fa.decode_attention(torch.ones(2, 1, HEADS, 16), (POOL, POOL), kv_len=[20, 32], block_table=table)
    return result


def incre(table: torch.Tensor) -> torch.Tensor:
    flat = POOL.flatten(2)
    options = {"num_heads": HEADS, "num_key_value_heads": 2, "scale_value": 0.25, "block_size": 16}
    return npu.npu_incre_flash_attention(
        torch.ones(2, 1, HEADS * 16), flat, flat, actual_seq_lengths=[20, 32], block_table=table, **options
    )


def sparse(table: torch.Tensor) -> torch.Tensor:
    q, lists = torch.ones(2, 3, HEADS, 16), torch.arange(20).expand(2, 3, 2, 20)
    result: Any = fa.sparse_attention(q, POOL, POOL, lists, kv_len=[20, 32], page_table=table)
    return result


@pytest.mark.parametrize("interface", [attended, incre, sparse])
def test_int64_page_table_equals_int32_and_invalid_pages_are_refused(interface: Callable[..., torch.Tensor]) -> None:
    table = torch.tensor([[3, 1, 1 << 40], [0, 7, -5]])  # what no token needs may hold anything
    table[:, 2] = torch.tensor([1 << 40, -5])
    want = interface(table[:, :2].int())
    for given in (table, table.T.contiguous().T, torch.stack((table, table), -1)[..., 0]):
        assert torch.equal(interface(given), want)
    assert torch.equal(compiled(interface)[0](table), want)
    table[1, 1] = 8
    with pytest.raises(fa.ContractError, match=r"table: expected"):
        interface(table)
    table[1, 1] = (1 << 32) + 7  # its lower half is a page
    with pytest.raises(fa.ContractError, match=r"table: expected"):
        interface(table)


@pytest.mark.usefixtures("runtime")
def test_aclnn_phase_2_reads_block_table_changed_after_phase_1() -> None:
    op = RECORDS["aclnnIncreFlashAttentionV3"]
    args = sample(op, block_table="B 2", block_size=16, actual_seq_lengths=[20, 32], key="8 16 N2*D", value="8 16 N2*D")
    outputs = [torch.zeros_like(args["query"]) for _ in range(2)]
    table = torch.tensor([[3, 1], [0, 7]])
    for ids, out in zip((torch.zeros_like(table), table.int()), outputs, strict=True):
        handles = handles_of(op, {**args, "block_table": ids}, {"attention_out": out}).values()
        ret, size, executor = aclnn.aclnnIncreFlashAttentionV3GetWorkspaceSize(*handles, strict=False)
        assert ret == 0, acl.get_recent_err_msg()
        ids.copy_(table)  # between the phases
        workspace = acl.rt.malloc(size)[0] if size else None
        assert aclnn.aclnnIncreFlashAttentionV3(workspace, size, executor, None) == 0, acl.get_recent_err_msg()
    assert torch.equal(*outputs)
    assert outputs[0].any()


# --------------------------------------------------------------------------------------------------------------- caches


def rows(count: int, sequences: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(sequences, count, 2, 64), torch.randn(sequences, count, 2, 64)


def test_paged_kv_cache_repr_shows_used_pages_and_sequences() -> None:
    cache = fa.PagedKVCache(2, 64, 32, page_size=16, stored="int8")
    assert repr(cache) == "<PagedKVCache: 2 x 64, int8, 0 of 32 pages of 16 used, 0 sequences>"
    a, b = cache.allocate(), cache.allocate()
    cache.append([a], *rows(70))
    assert repr(cache) == "<PagedKVCache: 2 x 64, int8, 5 of 32 pages of 16 used, 2 sequences>"
    cache.free(b)
    assert repr(cache).endswith("1 sequence>")
    shared = fa.PagedKVCache(1, 576, 4, dim_v=512, shares_kv=True, dtype=torch.bfloat16)
    assert repr(shared) == "<PagedKVCache: 1 x 576 (values 512), bfloat16, 0 of 4 pages of 128 used, 0 sequences>"


@pytest.mark.parametrize("wrong", [3, None, [[0]], [0.0], [True], ["0"], torch.tensor([0]), [torch.tensor(0)], [7]])
def test_paged_kv_cache_refuses_invalid_sequence_lists(wrong: Any) -> None:
    cache = fa.PagedKVCache(2, 64, 8, page_size=16)
    a = cache.allocate()
    cache.allocate()
    for call in (
        lambda: cache.append(wrong, *rows(3)),
        lambda: cache.lengths(3 if wrong is None else wrong),  # type: ignore[arg-type]
        lambda: fa.decode_attention(torch.ones(1, 1, 4, 64), cache, sequences=wrong),
    ):
        with pytest.raises(ValueError, match=r"(PagedKVCache|decode_attention): sequences?: expected"):
            call()
    assert cache.free_pages == 8
    cache.append([np.int64(a)], *rows(3))  # type: ignore[list-item]
    assert cache.lengths([a]) == [3]


def test_decode_refuses_query_batch_that_differs_from_cache_sequences() -> None:
    cache = fa.PagedKVCache(2, 64, 8, page_size=16)
    a, b, _ = (cache.allocate() for _ in range(3))
    q = torch.ones(2, 1, 4, 64)
    with pytest.raises(fa.ContractError, match=r"sequences: expected 2 sequences of the cache, got 3 of <PagedKVCache"):
        fa.decode_attention(q, cache)
    with pytest.raises(fa.ContractError, match=r"sequences: expected 2 .*got \[0\].*sequences=\[\.\.\.\] assigns"):
        fa.decode_attention(q, cache, sequences=[a])
    fa.decode_attention(q, cache, sequences=[a, b])


def test_decode_error_for_negative_paged_kv_length_names_sequence() -> None:
    table = torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(fa.ContractError, match=r"kv_len: .*got -1 for sequence 0 ") as caught:
        fa.decode_attention(torch.ones(1, 1, 4, 16), (POOL, POOL), kv_len=[-1], block_table=table)
    assert str(1 << 40) not in str(caught.value)
