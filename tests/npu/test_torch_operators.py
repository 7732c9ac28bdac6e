"""torch.ops.npu has an operator for every implemented function of torch_npu, under torch_npu's name."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.bits import same_bits
from support.operators import CHECKED, declared, normalised, sampled
from torch.utils._pytree import tree_leaves

from fusion_attention import npu
from fusion_attention.contract import ContractError
from fusion_attention.npu import operators
from fusion_attention.npu.surface.modules import functions
from fusion_attention.ops.auxiliary_definitions import atb, atb_cache_and_rotary

# Operators of torch_npu with known parameters but unknown results.
OUT = {"npu_fusion_attention_v3.out", "npu_fusion_attention_grad_v3.out"}
# Operators that only the torch_npu package after 2.14.0 declares.
LATER = {"npu_block_sparse_attention", "npu_block_sparse_attention_backward"}
RETURNED = OUT | {
    *("npu_fused_infer_attention_score.out", "npu_fused_infer_attention_score_v2.out"),
    *("npu_scatter_nd_update_", "npu_kv_rmsnorm_rope_cache", "npu_format_cast_"),
    *("npu_mla_prolog", "npu_mla_prolog_v2"),
}
WRITTEN = RETURNED | {"npu_mla_prolog_v3", "npu_scatter_pa_kv_cache", "npu_gather_pa_kv_cache"}
WRITTEN |= {op.name for op in (*atb.RECORDS, *atb_cache_and_rotary.RECORDS) if not op.results}
EAGER = {"npu_fusion_attention", "npu_fusion_attention_v2"}  # in a trace their numels is 0
CHEAP = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.fixture(scope="module", autouse=True)
def ops() -> Iterator[Any]:
    npu.install()
    yield torch.ops.npu
    npu.uninstall()


def packet_of(name: str) -> Any:
    return getattr(torch.ops.npu if hasattr(torch.ops.npu, name) else torch.ops.atb, name)


def named(operator: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Arguments renamed to the parameters of the operator's schema."""
    names = {p.name for p in operator._schema.arguments}
    return {name if name in names else {"input": "self"}[name]: value for name, value in args.items()}


def overloads() -> Iterator[tuple[str, Any]]:
    for name in functions():
        packet = packet_of(name)
        for overload in packet.overloads():
            yield (name if overload == "default" else f"{name}.{overload}"), getattr(packet, overload)


def test_operator_schemas_equal_declarations_of_torch_npu() -> None:
    theirs = declared()
    for name, overload in overloads():
        ours = str(overload._schema).partition("::")[2]
        if name in theirs or not (name.startswith("_npu") or name in OUT | LATER):
            assert normalised(ours) == normalised(theirs[name])


def test_operators_that_write_inputs_have_mutable_schemas() -> None:
    written = {name for name, overload in overloads() if overload._schema.is_mutable}
    assert written == WRITTEN


def test_single_integer_active_expert_range_is_refused(ops: Any) -> None:
    """torch passes an operator one number as two."""
    x, ids = torch.ones(3, 4), torch.zeros(3, 1, dtype=torch.int32)
    for call, text in (
        (ops.npu_moe_init_routing_v2, r"\[start, end\) .* got .*\[2, 2\]"),
        (npu.npu_moe_init_routing_v2, r"integers \(list, tuple or tensor\), got 2$"),
    ):
        with pytest.raises(ContractError, match=f"active_expert_range: expected {text}"):
            call(x, ids, expert_num=5, active_expert_range=2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CHECKED)
def test_every_operator_passes_opcheck(name: str) -> None:
    overload = packet_of(name).default
    args = named(overload, sampled(name))
    assert torch.library.opcheck(overload, (), args, test_utils=CHEAP) == dict.fromkeys(CHEAP, "SUCCESS")


def test_npu_format_cast_operator_does_not_return_its_input(ops: Any) -> None:
    x = torch.randn(2, 3)
    assert npu.npu_format_cast(x, 2) is x
    assert torch.library.opcheck(ops.npu_format_cast.default, (x, 2), test_utils="test_schema") == {
        "test_schema": "SUCCESS"
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CHECKED if name not in RETURNED | EAGER])
def test_every_operator_passes_opcheck_with_dynamic_aot_dispatch(name: str) -> None:
    overload = packet_of(name).default
    torch.library.opcheck(overload, (), named(overload, sampled(name)), test_utils="test_aot_dispatch_dynamic")


def test_operator_results_and_gradients_match_function(ops: Any) -> None:
    for name in ("npu_fusion_attention", "npu_sparse_flash_attention", "npu_swiglu"):
        args, operator = sampled(name), getattr(ops, name).default
        trained = [t for t in args.values() if isinstance(t, torch.Tensor) and t.requires_grad]
        trained = trained or [args["input"].requires_grad_()]
        result = []
        for returned in (operator(**named(operator, args)), getattr(npu, name)(**args)):
            results = [t for t in tree_leaves(returned) if isinstance(t, torch.Tensor)]
            result.append([*results, *torch.autograd.grad(results[0].sum(), trained)])
        for got, want in zip(*result, strict=True):
            same_bits(got, want, name)


def test_operator_errors_match_function_and_vmap_and_forward_mode_raise(ops: Any) -> None:
    q = torch.randn(1, 16, 2, 64)
    with pytest.raises(ContractError, match="npu_fusion_attention: input_layout: expected one of BSND"):
        ops.npu_fusion_attention(q, q, q, 2, "NHWC")
    with pytest.raises(NotImplementedError, match="vmap is not supported"):
        torch.vmap(lambda q: ops.npu_fusion_attention(q, q, q, 2, "BSND")[0])(q[None])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        with pytest.raises(NotImplementedError, match="forward-mode"):
            ops.npu_lightning_indexer(dual, q[:, :, :1], q[..., 0])


def test_compiled_graph_contains_npu_operator_and_runs_after_uninstall(ops: Any) -> None:
    """Graph passes search for the operator, and the graph must run after uninstall()."""
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[Any] = []
    q = torch.randn(1, 16, 2, 64)

    def attend(q: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.npu.npu_fusion_attention(q, q, q, 2, "BSND", scale=0.125)[0]
        return result

    compiled = torch.compile(
        attend, backend=aot_autograd(fw_compiler=lambda graph, _: graphs.append(graph) or graph), fullgraph=True
    )
    with torch.no_grad():
        same_bits(compiled(q), attend(q))
        assert [n.target for n in graphs[0].graph.nodes].count(ops.npu_fusion_attention.default) == 1
        npu.uninstall()
        same_bits(graphs[0](q)[0], npu.npu_fusion_attention(q, q, q, 2, "BSND", scale=0.125)[0])
        npu.install()


def test_dropout_with_random_seed_in_a_trace_raises(ops: Any) -> None:
    q = torch.randn(1, 16, 2, 64)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(q)
        with pytest.raises(NotImplementedError, match=r"seed: expected a number in a trace.*npu_fusion_attention_v3"):
            ops.npu_fusion_attention(fake, fake, fake, 2, "BSND", keep_prob=0.5)
        assert ops.npu_fusion_attention_v3(fake, fake, fake, 2, "BSND", keep_prob=0.5)[0].shape == q.shape


def test_register_all_keeps_operators_of_other_libraries() -> None:
    with torch.library._scoped_library("npu", "FRAGMENT") as theirs:
        theirs.define("npu_of_theirs(Tensor x) -> Tensor")
        theirs.impl("npu_of_theirs", torch.neg, "CPU")
        operators.register_all({"npu_of_theirs": lambda x: x})
        assert torch.ops.npu.npu_of_theirs(torch.ones(1)).item() == -1


def test_atb_functions_are_registered_under_torch_ops_atb(ops: Any) -> None:
    name = "_npu_flash_attention_unpad"
    assert not hasattr(ops, name)
    q, rows, result, wanted = torch.randn(5, 4, 16), torch.tensor([2, 3]), *torch.zeros(2, 5, 4, 16)
    getattr(torch.ops.atb, name)(q, q, q, rows, 0.25, 4, 4, out=result)
    getattr(npu, name)(q, q, q, rows, 0.25, 4, 4, out=wanted)
    same_bits(result, wanted, name)


def test_grouped_matmul_has_an_overload_for_group_list_as_python_list(ops: Any) -> None:
    x, weight = torch.randn(5, 3), torch.randn(2, 3, 4)
    given: dict[str, Any] = {"group_list": [2, 5], "split_item": 3, "group_type": 0, "output_dtype": torch.float32}
    for operator in (ops.npu_grouped_matmul, ops.npu_grouped_matmul.List):
        same_bits(operator([x], [weight], **given)[0], npu.npu_grouped_matmul([x], [weight], **given)[0])


OUTS: list[tuple[Any, int]] = [(npu.npu_fusion_attention_v3, 6), (npu.npu_fusion_attention_grad_v3, 5)]


@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize(("interface", "count"), OUTS)
@pytest.mark.parametrize("packed", [False, True])
def test_out_overload_writes_results_into_out_tensors(interface: Any, count: int, device: str, packed: bool) -> None:
    q = torch.randn(6, 2, 16, device=device) if packed else torch.randn(1, 2, 6, 16, device=device)
    sink = torch.zeros(2, device=device)
    given: dict[str, Any] = {"scale": 0.25, "sink": sink}
    if packed:
        given |= {"actual_seq_qlen": torch.tensor([2, 6]), "actual_seq_kvlen": torch.tensor([2, 6])}
    args: tuple[Any, ...] = (q, q, q, 2, "TND" if packed else "BNSD")
    if count == 5:
        out, top, total, *_ = npu.npu_fusion_attention_v3(*args, **given)
        args = (q, q, q, out, *args[3:])
        given |= {"softmax_max": top, "softmax_sum": total, "attention_in": out, "scale_value": given.pop("scale")}
    wanted = interface(*args, **given)
    for out_of in (interface.out, getattr(torch.ops.npu, interface.__name__).out):
        buffer = [torch.full_like(t, 7) if t.numel() else torch.full((3,), 7.0, device=device) for t in wanted]
        result = out_of(*args, **given, workspace=None, out=buffer)
        for ours, theirs, into in zip(result, wanted, buffer, strict=True):
            assert ours.data_ptr() == into.data_ptr()
            same_bits(into, theirs if theirs.numel() else torch.full((3,), 7.0, device=device))


def test_mismatched_out_raises_and_leaves_out_unwritten() -> None:
    q = torch.randn(1, 2, 6, 16)
    buffer = [torch.zeros_like(t) for t in npu.npu_fusion_attention_v3(q, q, q, 2, "BNSD", scale=0.25)]
    out = npu.npu_fusion_attention_v3.out
    with pytest.raises(ContractError, match=r"out: expected \[attention_out, .*offset\]"):
        out(q, q, q, 2, "BNSD", scale=0.25, out=buffer[:2])
    with pytest.raises(ContractError, match="softmax_max: expected out as the result"):
        out(q, q, q, 2, "BNSD", scale=0.25, out=[buffer[0], buffer[1].double(), *buffer[2:]])
    assert not any(t.any() for t in buffer)
