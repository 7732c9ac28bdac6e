"""torch.ops.npu: every function of torch_npu that is here, as an operator of torch under torch_npu's name."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.bits import same_bits
from support.operators import CHECKED, declared, plain, sampled
from torch._dynamo.backends.common import aot_autograd

from fusion_attention import npu
from fusion_attention.contract import ContractError
from fusion_attention.npu import operators
from fusion_attention.npu.surface.modules import functions
from fusion_attention.ops.companions import atb

RETURNED = {
    *("npu_fused_infer_attention_score.out", "npu_fused_infer_attention_score_v2.out"),
    *("npu_scatter_nd_update_", "npu_kv_rmsnorm_rope_cache"),
}
WRITTEN = RETURNED | {"npu_scatter_pa_kv_cache", "npu_gather_pa_kv_cache"}
WRITTEN |= {op.name for op in atb.RECORDS if not op.results}
CHEAP = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.fixture(scope="module", autouse=True)
def ops() -> Iterator[Any]:
    npu.install()
    yield torch.ops.npu
    npu.uninstall()


def overloads(ops: Any) -> Iterator[tuple[str, Any]]:
    for name in functions():
        packet = getattr(ops, name)
        for overload in packet.overloads():
            yield (name if overload == "default" else f"{name}.{overload}"), getattr(packet, overload)


def test_schemas_are_those_that_torch_npu_declares(ops: Any) -> None:
    theirs = declared()
    for name, overload in overloads(ops):
        ours = str(overload._schema).removeprefix("npu::")
        if name in theirs or not name.startswith("_npu"):
            assert plain(ours) == plain(theirs[name])


def test_tensors_that_are_written_are_declared(ops: Any) -> None:
    written = {name for name, overload in overloads(ops) if overload._schema.is_mutable}
    assert written == WRITTEN


@pytest.mark.parametrize("name", CHECKED)
def test_opcheck(name: str, ops: Any) -> None:
    args = sampled(name)
    overload = getattr(ops, name).default
    assert torch.library.opcheck(overload, (), args, test_utils=CHEAP) == dict.fromkeys(CHEAP, "SUCCESS")


def test_an_operator_returns_no_argument(ops: Any) -> None:
    x = torch.randn(2, 3)
    assert npu.npu_format_cast(x, 2) is x
    assert torch.library.opcheck(ops.npu_format_cast.default, (x, 2), test_utils="test_schema") == {
        "test_schema": "SUCCESS"
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CHECKED if name not in RETURNED])  # torch refuses to trace those
def test_opcheck_traced(name: str, ops: Any) -> None:
    args = sampled(name)
    torch.library.opcheck(getattr(ops, name).default, (), args, test_utils="test_aot_dispatch_dynamic")


def test_results_and_gradients_are_the_function_s(ops: Any) -> None:
    for name in ("npu_fusion_attention", "npu_sparse_flash_attention"):
        args = sampled(name)
        trained = [t for t in args.values() if isinstance(t, torch.Tensor) and t.requires_grad]
        found = []
        for function in (getattr(ops, name), getattr(npu, name)):
            results = [t for t in function(**args) if isinstance(t, torch.Tensor)]
            found.append([*results, *torch.autograd.grad(results[0].sum(), trained)])
        for got, want in zip(*found, strict=True):
            same_bits(got, want, name)


def test_gradients_of_what_torch_itself_computes(ops: Any) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    gradients = [torch.autograd.grad(f(x).sum(), x)[0] for f in (ops.npu_swiglu, npu.npu_swiglu)]
    same_bits(*gradients, "npu_swiglu")


def test_errors_are_the_function_s(ops: Any) -> None:
    q = torch.randn(1, 16, 2, 64)
    with pytest.raises(ContractError, match="npu_fusion_attention: input_layout: expected one of BSND"):
        ops.npu_fusion_attention(q, q, q, 2, "NHWC")
    with pytest.raises(NotImplementedError, match="vmap is not supported"):
        torch.vmap(lambda q: ops.npu_fusion_attention(q, q, q, 2, "BSND")[0])(q[None])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        with pytest.raises(NotImplementedError, match="forward-mode"):
            ops.npu_lightning_indexer(dual, q[:, :, :1], q[..., 0])


def test_a_graph_holds_the_operator(ops: Any) -> None:
    """So that passes that look for it find it, and a graph that holds it outlives the installation."""
    graphs: list[Any] = []
    q = torch.randn(1, 16, 2, 64)

    def attend(q: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.ops.npu.npu_fusion_attention(q, q, q, 2, "BSND", scale=0.125)[0]
        return found

    compiled = torch.compile(
        attend, backend=aot_autograd(fw_compiler=lambda graph, _: graphs.append(graph) or graph), fullgraph=True
    )
    with torch.no_grad():
        same_bits(compiled(q), attend(q))
        assert [n.target for n in graphs[0].graph.nodes].count(ops.npu_fusion_attention.default) == 1
        npu.uninstall()
        same_bits(graphs[0](q)[0], npu.npu_fusion_attention(q, q, q, 2, "BSND", scale=0.125)[0])
        npu.install()


def test_a_drawn_seed_in_a_trace_is_an_error(ops: Any) -> None:
    q = torch.randn(1, 16, 2, 64)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(q)
        with pytest.raises(NotImplementedError, match=r"returns its seed as an int.*npu_fusion_attention_v3"):
            ops.npu_fusion_attention(fake, fake, fake, 2, "BSND", keep_prob=0.5)
        assert ops.npu_fusion_attention_v3(fake, fake, fake, 2, "BSND", keep_prob=0.5)[0].shape == q.shape


def test_what_others_registered_stays_theirs() -> None:
    with torch.library._scoped_library("npu", "FRAGMENT") as theirs:
        theirs.define("npu_of_theirs(Tensor x) -> Tensor")
        theirs.impl("npu_of_theirs", torch.neg, "CPU")
        operators.register_all({"npu_of_theirs": lambda x: x})
        assert torch.ops.npu.npu_of_theirs(torch.ones(1)).item() == -1
