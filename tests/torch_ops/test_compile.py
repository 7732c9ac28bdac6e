"""The interfaces under torch.compile, export, autocast, transforms and modes: equal bits, one graph, clear errors."""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import same_bits
from support.compiled import Recorder, Tensors, compiled, draw, same

import fusion_attention as fa
from fusion_attention import npu

pytestmark = pytest.mark.usefixtures("fresh")
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


# ------------------------------------------------------------------------------------------------------------- compile


def dense(q: Any, k: Any, v: Any) -> torch.Tensor:
    return fa.attention(q, k, v, band=fa.Band.causal(), return_lse=True)[0]


def dense_npu(q: Any, k: Any, v: Any) -> torch.Tensor:
    return npu.npu_fusion_attention(q, k, v, 4, "BNSD", atten_mask=TRIANGLE, sparse_mode=3, scale=0.125)[0]


def packed(q: Any, k: Any, v: Any, ends: Any) -> torch.Tensor:
    lengths = {"actual_seq_qlen": ends, "actual_seq_kvlen": ends}
    out, *_ = npu.npu_fusion_attention_v3(q, k, v, 4, "TND", atten_mask=TRIANGLE, sparse_mode=3, **lengths)
    return out


def packed_own(q: Any, k: Any, v: Any, lengths: Any) -> torch.Tensor:
    return fa.attention(q, k, v, layout="TND", q_len=lengths, band=fa.Band.window(7, 0))


@pytest.mark.parametrize("function", [dense, dense_npu], ids=lambda f: f.__name__)
def test_compiled_dense_attention_equals_eager(function: Callable[..., Any]) -> None:
    fast, graphs = compiled(function)
    same(function, fast, draw(2, 4, 4, 16))
    for size in (8, 5):
        same(function, fast, draw(2, size, 4, 16) if function is dense else draw(2, 4, size, 16))
    assert len(graphs) <= 3  # as it was, and with one or two sizes as symbols


@pytest.mark.parametrize("function", [packed, packed_own], ids=lambda f: f.__name__)
def test_compiled_packed_attention_has_one_graph_for_all_lengths(function: Callable[..., Any]) -> None:
    fast, graphs = compiled(function)
    for ends in ([5, 12, 32], [20, 21, 32], [1, 2, 32]):
        given = torch.tensor(ends)
        given = given if function is packed else given.diff(prepend=torch.zeros(1).long())
        same(function, fast, draw(32, 4, 16), given)
    assert len(graphs) == 1


def test_compiled_lengths_in_a_list_are_constants_of_the_graph() -> None:
    fast, graphs = compiled(packed)
    for _ in range(2):
        same(packed, fast, draw(32, 4, 16), [5, 32])
    assert len(graphs) == 1
    same(packed, fast, draw(32, 4, 16), [7, 32])
    assert len(graphs) == 2


def explicit(q: Any, k: Any, v: Any, dy: Any) -> Tensors:
    out, top, total, *_ = npu.npu_fusion_attention_v2(q, k, v, 4, "BSND", scale=0.3)
    saved = {"softmax_max": top, "softmax_sum": total, "attention_in": out}
    return npu.npu_fusion_attention_grad_v2(q, k, v, dy, 4, "BSND", scale_value=0.3, **saved)


def test_compiled_npu_fusion_attention_grad_equals_eager() -> None:
    tensors = tuple(t.detach() for t in draw(2, 5, 4, 16, count=4))
    same_bits(explicit(*tensors), compiled(explicit)[0](*tensors))


def dropping(q: Any, k: Any, v: Any) -> Any:
    first = npu.npu_fusion_attention(q, k, v, 4, "BSND", keep_prob=0.5)
    second = fa.attention(q, k, v, scale=1.0, keep_prob=0.5)
    return first[0], second, first[4]


def test_compiled_dropout_is_drawn_anew_at_every_run() -> None:
    tensors = draw(2, 16, 4, 16)
    fast, graphs = compiled(dropping)
    torch.manual_seed(5)
    want = [dropping(*tensors) for _ in range(2)]
    torch.manual_seed(5)
    got = [fast(*tensors) for _ in range(2)]
    assert len(graphs) == 1
    for a, b in zip(want, got, strict=True):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])
        assert a[2] == int(b[2])
    assert not torch.equal(got[0][0], got[0][1])
    assert not torch.equal(got[0][0], got[1][0])
    drawn = got[0][2]
    assert drawn.shape == ()
    out, top, total, *_ = npu.npu_fusion_attention(*tensors, 4, "BSND", keep_prob=0.5, seed=int(drawn))
    saved = {"softmax_max": top, "softmax_sum": total, "attention_in": out, "keep_prob": 0.5, "seed": drawn}
    with torch.no_grad():
        explicit = npu.npu_fusion_attention_grad(*tensors, out, 4, "BSND", **saved)[0]
    assert torch.equal(explicit, torch.autograd.grad(out, tensors[0], out)[0])


def test_invalid_call_raises_while_tracing() -> None:
    q, k, _ = draw(2, 5, 4, 16)
    with pytest.raises(Exception, match=r"npu_fusion_attention: head_num: expected .*, got 3|axis 2 to be N1=3"):
        compiled(lambda q: npu.npu_fusion_attention(q, q, q, 3, "BSND")[0])[0](q)
    with pytest.raises(Exception, match=r"attention: k: expected axis 3 to be D=16 as in q, got 8"):
        compiled(lambda q, k: fa.attention(q, k, k))[0](q, k[..., :8])
    with pytest.raises(Exception, match=r"query: expected a tensor, got <class 'float'>"):
        compiled(lambda q: npu.npu_fusion_attention(1.5, q, q, 4, "BSND")[0])[0](q)


def test_invalid_lengths_raise_when_the_compiled_graph_runs() -> None:
    fast, _ = compiled(packed)
    with torch.no_grad(), pytest.raises(fa.ContractError, match="actual_seq_qlen: expected"):
        fast(*draw(32, 4, 16), torch.tensor([9, 3, 32]))


@pytest.mark.slow
@pytest.mark.parametrize("function", [dense, packed], ids=lambda f: f.__name__)
def test_inductor_results_equal_eager(function: Callable[..., Any]) -> None:
    fast = torch.compile(function, fullgraph=True)
    if function is dense:
        same(dense, fast, draw(2, 6, 4, 16))
    else:
        same(packed, fast, draw(32, 4, 16), torch.tensor([4, 32]))


# -------------------------------------------------------------------------------------------------------------- export


class Layer(torch.nn.Module):
    def forward(self, q: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return packed(q, q, q, ends)


class Dense(torch.nn.Module):
    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return fa.attention(q, q, q, band=fa.Band.causal())


@pytest.mark.parametrize("strict", [False, True])
def test_exported_modules_equal_eager_with_dynamic_shapes(strict: bool) -> None:
    q, ends = draw(32, 4, 16)[0].detach(), torch.tensor([5, 32])
    tokens, items = torch.export.Dim("tokens", min=2, max=4096), torch.export.Dim("items", min=2, max=64)
    shapes = {"q": {0: tokens}, "ends": {0: items}}
    exported = torch.export.export(Layer(), (q, ends), dynamic_shapes=shapes, strict=strict).module()
    for count, ends in ((32, [5, 32]), (40, [1, 2, 40])):
        q = draw(count, 4, 16)[0].detach()
        assert torch.equal(exported(q, torch.tensor(ends)), packed(q, q, q, ends))
    dense = torch.export.export(Dense(), (q[None],), strict=strict).module()
    assert torch.equal(dense(q[None]), Dense()(q[None]))


# ------------------------------------------------------------------------------------------------------------ autocast


def test_autocast_casts_as_sdpa_does() -> None:
    q, k, v = draw(2, 5, 4, 16)
    bias, sink = draw(5, 5, count=1)[0], torch.zeros(4)
    with torch.autocast("cpu", torch.bfloat16):
        out = fa.attention(q, k.bfloat16(), v, bias=bias, sink=sink)
        by_name, top, *_ = npu.npu_fusion_attention(q, k, v.bfloat16(), 4, "BSND", scale=0.25, sink=sink)
        assert out.dtype == torch.nn.functional.scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
        fast = compiled(lambda q, k, v: fa.attention(q, k.bfloat16(), v, bias=bias, sink=sink))[0](q, k, v)
        slopes = torch.full((4,), 0.5)
        npu.npu_fusion_attention_v2(q, k, v, 4, "BSND", pse=slopes, pse_type=2)  # slopes stay float32
    narrow = tuple(t.bfloat16() for t in (q, k, v))
    assert torch.equal(out, fa.attention(*narrow, bias=bias.bfloat16(), sink=sink))
    assert torch.equal(fast, out)
    assert torch.equal(by_name, npu.npu_fusion_attention(*narrow, 4, "BSND", scale=0.25, sink=sink)[0])
    assert top.dtype == torch.float32
    assert torch.autograd.grad(out.float().sum(), q)[0].dtype == torch.float32


# ---------------------------------------------------------------------------------------------- transforms and modes


@pytest.mark.parametrize("function", [dense, dense_npu, packed], ids=lambda f: f.__name__)
def test_torch_func_grad_equals_autograd(function: Callable[..., Any]) -> None:
    leaves, rest = (draw(32, 4, 16), [torch.tensor([5, 32])]) if function is packed else (draw(2, 4, 4, 16), [])

    def loss(*qkv: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = function(*qkv, *rest).square().sum()
        return result

    want, given = torch.autograd.grad(loss(*leaves), leaves), tuple(t.detach() for t in leaves)
    same_bits(torch.func.grad(loss, argnums=(0, 1, 2))(*given), want)
    if function is packed:
        same_bits(compiled(torch.func.grad(loss))[0](*given), want[0])


def test_vmap_raises_not_implemented() -> None:
    q = draw(3, 2, 4, 4, 16)[0]
    for function in (dense, dense_npu):
        with pytest.raises(NotImplementedError, match="vmap is not supported: make the mapped axis part of the batch"):
            torch.func.vmap(lambda q, f=function: f(q, q, q))(q)
    with pytest.raises(NotImplementedError, match="vmap is not supported"):
        torch.func.vmap(torch.func.grad(lambda q: dense(q, q, q).sum()))(q.detach())


@pytest.mark.parametrize(
    "given",
    [
        {"layout": "BSH", "heads": np.int64(4)},
        {"scale": np.float32(0.25), "keep_prob": 0.5, "seed": np.int32(3)},
        {"band": fa.Band.window(np.int64(2), np.int32(1)), "q_len": np.array([3, 4], np.int32)},
    ],
    ids=["heads", "scale and seed", "band and lengths"],
)
def test_numpy_scalars_equal_python_numbers(given: dict[str, Any]) -> None:
    q, k, v = draw(2, 4, 4, 16)
    q, k, v = (t.flatten(2) if "layout" in given else t for t in (q, k, v))
    numbers = {name: value.item() if isinstance(value, np.generic) else value for name, value in given.items()}
    want = fa.attention(q, k, v, **numbers)
    assert torch.equal(fa.attention(q, k, v, **given), want)
    with Recorder():
        assert torch.equal(fa.attention(q, k, v, **given), want)


def test_numpy_scalars_in_compiled_code_equal_python_numbers() -> None:
    q, k, v = draw(2, 4, 4, 16)
    want = fa.attention(q, k, v, scale=0.25)
    fast = torch.compile(lambda *qkv: fa.attention(*qkv, scale=1 / np.sqrt(16)), fullgraph=True, backend="aot_eager")
    assert torch.equal(fast(q, k, v), want)
    given = torch.compile(lambda *qkv, scale: fa.attention(*qkv, scale=scale), backend="aot_eager")
    assert torch.equal(given(q, k, v, scale=np.float32(0.25)), want)


@pytest.mark.parametrize("mode", [contextlib.nullcontext, Recorder])
def test_keep_prob_none_disables_dropout(mode: Callable[[], Any]) -> None:
    q, k, v = draw(2, 4, 4, 16)
    want = fa.attention(q, k, v)
    with mode():
        same_bits(fa.attention(q, k, v, keep_prob=None), want)  # type: ignore[call-overload]
        scaled = npu.npu_fusion_attention(q, k, v, 4, "BSND", scale=0.25, keep_prob=None)  # type: ignore[arg-type]
    same_bits(scaled[0], want)


def test_traced_calls_refuse_the_same_invalid_lengths_as_eager() -> None:
    q, k, v = draw(2, 4, 4, 16)
    for wrong in ([3.7, 4.0], [True, True], np.array([3.5, 4.0])):
        for mode in (contextlib.nullcontext(), Recorder()):
            with mode, pytest.raises(fa.ContractError, match="q_len: expected integers"):
                fa.attention(q, k, v, q_len=wrong)  # type: ignore[call-overload]
    with Recorder(), pytest.raises(TypeError, match="attention: band: expected a plain number or word, got"):
        fa.attention(q, k, v, band=(1, 2))


def test_fake_tensors_return_output_shapes() -> None:
    for layout, shape, out in (("BSH", (2, 5, 64), (2, 5, 32)), ("TND", (10, 4, 16), (10, 4, 8))):
        q, v = torch.empty(shape, device="meta"), torch.empty(*shape[:-1], shape[-1] // 2, device="meta")
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
            q, v, lengths = (mode.from_tensor(torch.empty(t.shape)) for t in (q, v, torch.ones(2)))
            ends = None if layout == "BSH" else lengths.long()
            got, top, *_ = npu.npu_fusion_attention_v2(q, q, v, 4, layout, actual_seq_qlen=ends, actual_seq_kvlen=ends)
        assert got.shape == out
        assert top.shape == ((2, 4, 5, 8) if layout == "BSH" else (10, 4, 8))
