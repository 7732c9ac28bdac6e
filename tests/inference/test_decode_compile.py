"""Decoding under torch.compile: equal bits, one graph, lengths as inputs, paged caches, clear errors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.bits import same_bits
from support.compiled import compiled, draw

import fusion_attention as fa
from fusion_attention import npu

pytestmark = pytest.mark.usefixtures("fresh")
SINK, SCALES = torch.tensor([0.5, -1.0, 2.0, 0.0]), torch.tensor([0.03, 0.05])
STORED = torch.arange(2 * 9 * 2 * 16).view(2, 9, 2, 16).mul(37).remainder(255).sub(127).to(torch.int8)


def decoded(q: Any, k: Any, v: Any) -> torch.Tensor:
    return fa.decode_attention(q, (k, v), kv_len=[9, 4], band=fa.Band.window(5, 0), sink=SINK, return_lse=True)[1]


def listed(q: Any, k: Any, v: Any) -> torch.Tensor:
    return fa.decode_attention(q, ([k[:1], k[1:, :5]], [v[:1], v[1:, :5]]))


def shared(q: Any, k: Any, v: Any) -> torch.Tensor:
    return fa.decode_attention(q, k, dim_v=8) + v[0, 0, 0, 0]


def integers(q: Any, k: Any, v: Any) -> torch.Tensor:
    return (
        fa.decode_attention(q, (STORED, STORED), k_scale=SCALES, v_scale=SCALES, out_scale=torch.ones(1))
        + k[0, 0, 0, 0]
    )


def named(q: Any, k: Any, v: Any) -> torch.Tensor:
    given = {"num_heads": 4, "num_key_value_heads": 2, "scale_value": 0.25, "input_layout": "BSND"}
    return npu.npu_incre_flash_attention(q, k, v, actual_seq_lengths=[3, 9], **given)


def tensors() -> tuple[torch.Tensor, ...]:
    return draw(2, 1, 4, 16, count=1)[0].detach(), *(t.detach() for t in draw(2, 9, 2, 16, count=2, seed=1))


@pytest.mark.parametrize("function", [decoded, listed, shared, integers, named], ids=lambda f: f.__name__)
def test_decode_functions_compile_to_one_graph_with_same_bits(function: Callable[..., Any]) -> None:
    fast, graphs = compiled(function)
    given = tensors()
    same_bits(fast(*given), function(*given))
    same_bits(fast(*(t * 2 for t in given)), function(*(t * 2 for t in given)))
    assert len(graphs) == 1


def test_decode_compiles_once_for_all_lengths_and_page_tables() -> None:
    def step(q: Any, k: Any, v: Any, table: Any, lengths: Any) -> torch.Tensor:
        given = {"num_heads": 4, "num_key_value_heads": 2, "input_layout": "BSND", "block_size": 3}
        pages = (t.view(6, 3, 32) for t in (k, v))
        named = npu.npu_incre_flash_attention(q, *pages, actual_seq_lengths=lengths, block_table=table, **given)
        pages = tuple(t.view(6, 3, 2, 16) for t in (k, v))
        return named + fa.decode_attention(q, pages, kv_len=lengths, block_table=table)

    fast, graphs = compiled(step)
    q, k, v = tensors()
    k[1, 3:], v[1, 3:] = float("nan"), float("nan")  # beyond the last page of the second sequence
    table = torch.tensor([[2, 0, 1], [3, 3, 3]], dtype=torch.int32)
    for lengths in ([9, 3], [8, 2], [1, 0]):
        given = (q, k, v, table, torch.tensor(lengths))
        same_bits(fast(*given), step(*given))
    assert len(graphs) == 1


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["", "int8"])
def test_compiled_step_with_paged_kv_cache_equals_eager(stored: str) -> None:
    caches = [fa.PagedKVCache(2, 16, 8, page_size=4, stored=stored) for _ in range(2)]

    def step(cache: fa.PagedKVCache, sequence: int, q: Any, k: Any, v: Any) -> torch.Tensor:
        cache.append([sequence], k * 2, v)
        return fa.decode_attention(q + 1, cache, sequences=[sequence]) * 3

    fast = torch.compile(step, backend="aot_eager")
    first, second = (cache.allocate() for cache in caches)
    for turn in range(5):
        q, (k, v) = draw(1, 1, 4, 16, count=1, seed=turn)[0].detach(), draw(1, 2, 2, 16, count=2, seed=turn + 9)
        with torch.no_grad():
            assert torch.equal(step(caches[0], first, q, k, v), fast(caches[1], second, q, k, v))
    assert caches[0].lengths() == caches[1].lengths() == [10]


def test_compiled_decode_refuses_invalid_arguments_and_vmap() -> None:
    q, k, v = tensors()
    fast, _ = compiled(lambda q, k, v, lengths: fa.decode_attention(q, (k, v), kv_len=lengths))
    with pytest.raises(fa.ContractError, match="kv_len: expected 0 <= length"):
        fast(q, k, v, torch.tensor([9, 10]))
    with pytest.raises(Exception, match="k: expected a divisor of N1 heads"):
        compiled(lambda q, k, v: fa.decode_attention(q, (k, v)))[0](q[:, :, :3], k, v)
    with pytest.raises(NotImplementedError, match="vmap is not supported"):
        torch.func.vmap(lambda q: fa.decode_attention(q, (k, v)))(q[None])


def test_exported_decode_equals_eager_and_output_does_not_require_grad() -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            return fa.decode_attention(q, (k, k), kv_len=lengths)

    q, k, _ = tensors()
    exported = torch.export.export(Layer(), (q, k, torch.tensor([9, 4]))).module()
    for lengths in (torch.tensor([9, 4]), torch.tensor([2, 7])):
        assert torch.equal(exported(q, k, lengths), Layer()(q, k, lengths))
    assert not compiled(Layer())[0](q.requires_grad_(), k, torch.tensor([9, 4])).requires_grad
