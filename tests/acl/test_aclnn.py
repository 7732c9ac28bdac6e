"""Two-phase interface: results equal those of the npu functions; invalid calls return a code and a text, and write
no output."""

import inspect
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import same
from support.contract_failures import layouts, of_versions, starts
from support.two_phase import V2, Args, call, done, failed, handles_of, outputs_of
from torch.utils._pytree import tree_map_only

from fusion_attention import acl, aclnn, npu, use_backend
from fusion_attention.contract import INVALID, NULL_POINTER, RUNTIME, TILING, Op, bind
from fusion_attention.contract.sampling import invalid_samples, sample
from fusion_attention.ops import RECORDS
from fusion_attention.ops.indexer import definitions as indexer
from fusion_attention.ops.indexer_loss import definitions as loss
from fusion_attention.ops.sparse import definitions as sparse
from fusion_attention.ops.training import definitions as training
from fusion_attention.ops.training import score_v4
from fusion_attention.torch_ops import eager

OPERATORS = {name: op for name, op in RECORDS.items() if name.startswith("aclnn")}
TRAINING = [op for op in OPERATORS.values() if op in (*training.RECORDS, *score_v4.RECORDS)]
FORWARD = [op for op in TRAINING if "dy" not in op.by_name]
BACKWARD = [op for op in TRAINING if "dy" in op.by_name]
PADDED = V2.layouts
FIRST = aclnn.aclnnFlashAttentionScoreV2GetWorkspaceSize
pytestmark = pytest.mark.usefixtures("runtime")


def by_name(op: Op) -> str:
    return op.name.removeprefix("aclnnFlashAttention")


# ------------------------------------------------------------------------------------- results equal the npu functions'

VARIANTS: dict[str, Args] = {
    "plain": {},
    "full_mask": {"atten_mask": "S1 S2", "sparse_mode": 0},
    "causal": {"atten_mask": "2048 2048", "sparse_mode": 2},
    "empty_rows": {"atten_mask": "2048 2048", "sparse_mode": 3, "S2": 3, "inner_precise": 2},
    "pse": {"pse": "B N1 S1 S2", "TND": {"pse": "1 N1 1024 S2", "atten_mask": "2048 2048", "sparse_mode": 3}},
    "slopes": {"pse_type": 2, "pse": ("B N1", "float32"), "S1": 6},
    "dropout": {"drop_mask": "1024", "keep_prob": 0.5},
    "rope": {"query_rope": True, "key_rope": True, "atten_mask": "2048 2048", "sparse_mode": 3}
    | {"D": 128, "Dv": 128, "Dr": 64},
    "sink": {"sink": True},
    "token_major": {"softmax_layout": "same_as_input"},
    "seed": {"keep_prob": 0.5, "seed": 7, "offset": 3, "sink": True},
    "seed of 63 bits": {"keep_prob": 0.5, "seed": 2**63 - 1, "offset": 2**32 - 1},
    "rope with seed": {"query_rope": True, "key_rope": True, "sink": True, "keep_prob": 0.5, "seed": 1, "offset": 0}
    | {"D": 128, "Dv": 128, "Dr": 64, "out_dtype": 27},
}


def variants(op: Op) -> Iterator[tuple[str, Args]]:
    """Yields sample calls of an operator, in every layout, and with every feature in TND and in one other layout."""
    for (at, (name, settings)), layout in itertools.product(enumerate(VARIANTS.items()), op.layouts):
        if name != "plain" and layout not in ("TND", PADDED[at % len(PADDED)]):
            continue
        settings_here = {**settings, **settings.get(layout, {})}
        applies = all(key in op.by_name or key in op.sizes or key in op.layouts for key in settings_here)
        of_packed = name == "token_major" or (name == "rope" and op not in score_v4.RECORDS)
        if applies and (layout == "TND") >= of_packed and not (layout == "TND" and name == "empty_rows"):
            yield f"{name}-{layout}", sample(op, input_layout=layout, **settings)


def everywhere(args: Args) -> bool:
    """Returns whether all chip versions accept a sample call: one version has neither pse nor dropout."""
    return args["pse"] is None and args["drop_mask"] is None


def torch_npu(args: Args, **changes: Any) -> tuple[torch.Tensor, ...]:
    """Makes the same forward call by npu_fusion_attention_v2."""
    names = inspect.signature(npu.npu_fusion_attention_v2).parameters
    given = {name: value for name, value in {**args, **changes}.items() if name in names and value is not None}
    given["dropout_mask"] = args["drop_mask"]
    given["softmax_layout"] = "TND" if args.get("softmax_layout") else ""
    return npu.npu_fusion_attention_v2(**given)


@pytest.mark.parametrize("op", FORWARD, ids=by_name)
def test_aclnn_forward_bitwise_equals_npu_fusion_attention(op: Op) -> None:
    for name, args in variants(op):
        got = done(op, args, strict=everywhere(args))
        expected = dict(zip(("attention_out", "softmax_max", "softmax_sum"), torch_npu(args), strict=False))
        assert got.keys() == expected.keys()
        for output, tensor in got.items():
            assert same(tensor, expected[output]), (name, output)


@pytest.mark.parametrize("op", BACKWARD, ids=by_name)
def test_aclnn_gradients_bitwise_equal_autograd(op: Op) -> None:
    for name, args in variants(op):
        inputs = {"dq": "query", "dk": "key", "dv": "value", "dq_rope": "query_rope", "dk_rope": "key_rope"}
        inputs |= {"dpse": "pse", "dsink": "sink"}
        leaves = {key: args[key].clone().requires_grad_() for key in inputs.values() if args.get(key) is not None}
        if args.get("pse_type") == 2:
            leaves["pse"].requires_grad_(False)
        out, softmax_max, softmax_sum, *_ = torch_npu(args, **leaves)
        out.backward(args["dy"])
        saved = {"attention_in": out.detach(), "softmax_max": softmax_max, "softmax_sum": softmax_sum}
        got = done(op, args | saved, strict=everywhere(args))
        assert got.keys() == {key for key in inputs if inputs[key] in leaves}
        for output, tensor in got.items():
            expected = leaves[inputs[output]].grad
            assert same(tensor, torch.zeros_like(tensor) if expected is None else expected), (name, output)


STATISTICS = {"softmax_lse", "softmax_max", "softmax_sum", "sparse_values_out"}  # outputs that flags ask for


@pytest.mark.sampled(1)
@pytest.mark.parametrize("op", OPERATORS.values(), ids=by_name)
def test_aclnn_calls_bitwise_equal_direct_computation(op: Op) -> None:
    """Each layout, with optional outputs on and off; outputs that are off may stay unwritten."""
    flags = [op.by_name[n] for n in ("return_softmax_lse", "softmax_lse_flag", "return_values") if n in op.by_name]
    for layout, flag in itertools.product(layouts(op), (0, 1) if flags else (1,)):
        args = sample(op, **layout, **{p.name: p.type(flag) for p in flags})  # type: ignore[union-attr, operator]
        want = eager.run(op.lower(bind(op, args, strict=False)))  # type: ignore[misc]
        outputs = {name: torch.full_like(t, 77) for name, t in want.items() if name in op.by_name}
        assert call(op, args, outputs, strict=False) == (0, 0), acl.get_recent_err_msg()
        for name, t in outputs.items():
            stays = not flag and name in STATISTICS and bool((t == 77).all())
            assert same(t, want[name]) or stays, (layout, flag, name)


@pytest.mark.parametrize("op", OPERATORS.values(), ids=by_name)
def test_aclnn_function_signatures_match_operator_definitions(op: Op) -> None:
    first = inspect.signature(getattr(aclnn, op.name + "GetWorkspaceSize")).parameters
    assert list(first) == [*(p.shown for p in op.params), "strict", "check_content"]
    assert all(first[name].kind is inspect.Parameter.KEYWORD_ONLY for name in ("strict", "check_content"))
    second = inspect.signature(getattr(aclnn, op.name))
    assert list(second.parameters) == ["workspace", "workspace_size", "executor", "stream"]
    assert {op.name, op.name + "GetWorkspaceSize"} <= set(aclnn.__all__) & set(dir(aclnn))
    with pytest.raises(AttributeError):
        getattr(aclnn, op.name + "V9")


# ------------------------------------------------------------------------------------------------------- invalid calls


# Lengths are arrays; for operators that read lengths on the host, tensors as well.
ARRAYS = [pytest.param(op, False, id=by_name(op), marks=of_versions(name)) for name, op in OPERATORS.items()]
LENGTHS = [pytest.param(op, True, id=f"{by_name(op)}-tensors") for op in (*sparse.ACLNN, *indexer.ACLNN, *loss.ACLNN)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("op", "tensors"), [*ARRAYS, *LENGTHS])
def test_each_broken_rule_returns_error_code_and_leaves_outputs_unwritten(op: Op, tensors: bool) -> None:
    for broken in invalid_samples(op):
        outputs = outputs_of(op, broken.args)
        before = {name: tensor.clone() for name, tensor in outputs.items() if tensor is not None}
        if broken.level == "note":
            with pytest.warns(UserWarning, match=op.name):
                assert call(op, broken.args, outputs, strict=False) == (0, 0), (broken.id, acl.get_recent_err_msg())
            continue
        content = broken.level == "content"
        later = content or any(rule.reads and broken.id.endswith(rule.id) for rule in op.applicable_rules)
        rets = call(op, broken.args, outputs, content, tensors, strict=broken.level in ("limit", "doubt"))
        text = acl.get_recent_err_msg()
        assert rets == ((0, broken.code) if later else (broken.code, 0)), (broken.id, text)
        assert text.startswith(str(op.failure(broken.param, broken.expected, ""))), (broken.id, text)
        assert "\n" not in text, (broken.id, text)
        assert all(same(before[name], outputs[name]) for name in before), broken.id  # type: ignore[arg-type]


def planned(args: Args | None = None, **outputs: Any) -> tuple[int, int, acl.Executor | None, dict[str, acl.Tensor]]:
    """Runs phase 1 of a small V2 call; returns its code, workspace size, executor and handles by name."""
    args = sample(V2) if args is None else args
    given = outputs_of(V2, args) | outputs
    handles = handles_of(V2, args, given)
    ret, size, executor = FIRST(**handles)
    return ret, size, executor, handles


def run(size: int, executor: Any, workspace: Any = ..., stream: Any = None) -> int:
    memory = acl.rt.malloc(max(size, 1))[0] if workspace is ... else workspace
    return aclnn.aclnnFlashAttentionScoreV2(memory, size, executor, stream)


def test_error_message_has_python_and_cann_names_of_the_parameter() -> None:
    ret, *_ = planned(pse=torch.zeros(7, dtype=torch.float16))
    failed(ret, TILING, "aclnnFlashAttentionScoreV2: pse (realShiftOptional): expected [B or 1, N1, S1 or 1, S2]")


@pytest.mark.parametrize("output", ["softmax_max", "softmax_sum", "attention_out"])
def test_a_null_output_is_refused(output: str) -> None:
    ret, *_ = planned(**{output: None})
    failed(ret, NULL_POINTER, str(V2.failure(output, "a tensor to write", "")))


@pytest.mark.parametrize("name", ["dq", "dq_rope", "dk", "dk_rope", "dv", "dpse", "dsink"])
def test_null_gradient_output_is_refused(name: str) -> None:
    op = RECORDS["aclnnFlashAttentionUnpaddingScoreGradV5"]
    args = sample(op, **VARIANTS["rope"], **VARIANTS["sink"]) if name != "dpse" else sample(op, pse="1 N1 1024 S2")
    assert call(op, args, outputs_of(op, args), strict=False) == (0, 0), acl.get_recent_err_msg()
    first, _ = call(op, args, outputs_of(op, args) | {name: None}, strict=False)
    failed(first, NULL_POINTER, name)


@pytest.mark.parametrize(
    ("output", "tensor", "word"),
    [
        ("softmax_max", torch.zeros(2, 4, 4, 1), "axis 3"),
        ("softmax_sum", torch.zeros(2, 4, 4, 8, dtype=torch.float16), "float32"),
        ("attention_out", torch.zeros(2, 4, 4, 8), "float16"),
        ("attention_out", torch.zeros(2, 4, 32, dtype=torch.float16), "4 dimensions"),
        ("attention_out", torch.zeros(1, dtype=torch.float16).expand(2, 4, 4, 8), "a separate memory address"),
        ("attention_out", torch.zeros(99, dtype=torch.float16).as_strided((2, 4, 4, 8), (32, 8, 2, 1)), "separate"),
    ],
)
def test_outputs_of_wrong_shape_dtype_or_strides_are_refused(output: str, tensor: torch.Tensor, word: str) -> None:
    ret, *_ = planned(**{output: tensor})
    failed(ret, INVALID, output, word)


def test_reserved_outputs_are_null_or_empty() -> None:
    for blank in (None, torch.empty(0), torch.empty(())):
        assert planned(softmax_out=blank)[0] == 0, acl.get_recent_err_msg()
    ret, *_ = planned(softmax_out=torch.empty(3, dtype=torch.float16))
    failed(ret, TILING, "softmax_out", "None or an empty tensor")


@pytest.mark.parametrize("wrong", [torch.zeros(2), np.zeros(2), "text", 7, object()], ids=lambda v: type(v).__name__)
def test_arguments_of_wrong_python_type_are_refused(wrong: Any) -> None:
    *_, handles = planned()
    for name in ("query", "atten_mask", "attention_out"):
        ret, _, executor = FIRST(**(handles | {name: wrong}))
        assert executor is None
        failed(ret, INVALID, str(V2.failure(name, "an acl.Tensor or None", "")))
    if not isinstance(wrong, np.ndarray):
        ret, *_ = FIRST(**(handles | {"prefix": wrong}))
        failed(ret, INVALID, "prefix (prefixOptional): expected an acl.IntArray")
        failed(run(1, wrong), INVALID, "executor: expected an acl.Executor")
    with pytest.raises(TypeError):
        FIRST(handles["query"])


def test_tensor_in_nz_format_is_refused() -> None:
    *_, handles = planned()
    handles["query"] = acl.Tensor.of(handles["query"].view, acl.ACL_FORMAT_FRACTAL_NZ)
    ret, *_ = FIRST(**handles)
    failed(ret, INVALID, "query: expected a plain format, got ACL_FORMAT_FRACTAL_NZ")


def test_output_sharing_input_memory_is_refused_unless_interleaved() -> None:
    args = sample(V2)
    ret, *_ = planned(args, attention_out=args["query"])
    failed(ret, INVALID, "attention_out (attentionOutOut): expected memory of its own, got some that query holds too")
    statistics = torch.zeros(2, 4, 4, 8)
    ret, *_ = planned(args, softmax_max=statistics, softmax_sum=statistics)
    failed(ret, INVALID, "memory of its own")
    fused = torch.zeros(2, 4, 4, 16, dtype=torch.float16)
    fused[..., :8] = args["query"]
    expected = done(V2, args)
    got = done(V2, args | {"query": fused[..., :8]}, outputs_of(V2, args) | {"attention_out": fused[..., 8:]})
    assert all(same(got[name], expected[name]) for name in expected)
    assert same(fused[..., :8], args["query"])


def test_executor_refuses_a_second_run() -> None:
    ret, size, executor, _ = planned()
    assert ret == 0
    assert run(size, executor) == 0
    failed(run(size, executor), RUNTIME, "executor: expected one that has not run")
    failed(acl.set_acl_op_executor_repeatable(executor), RUNTIME, "destroyed")
    failed(run(size, None), NULL_POINTER, "executor")
    _, size, executor, _ = planned()
    failed(aclnn.aclnnFlashAttentionScore(None, 0, executor, None), INVALID, "aclnnFlashAttentionScoreGetWorkspaceSize")


@pytest.mark.parametrize("workspace", [None, 0, 12345, "small", "host", "torch", "text", True])
def test_a_wrong_workspace_is_refused(workspace: Any) -> None:
    _, size, executor, handles = planned()
    assert size > 0
    before = handles["attention_out"].view.clone()
    workspaces = {"small": acl.rt.malloc(size - 1)[0], "host": acl.rt.malloc_host(size)[0], "torch": torch.zeros(3)}
    memory = workspaces.get(workspace, workspace)
    code = INVALID if workspace == "text" or workspace is True else RUNTIME
    failed(run(size, executor, memory), code, "workspace")
    if workspace == "host":
        failed(aclnn.aclnnFlashAttentionScoreV2(memory, size - 1, executor, None), RUNTIME, f"at least {size}")
        failed(aclnn.aclnnFlashAttentionScoreV2(memory, "1", executor, None), INVALID, "workspace_size")
    assert same(before, handles["attention_out"].view)
    assert run(size, executor) == 0
    assert not same(before, handles["attention_out"].view)


def test_phase_2_refuses_handles_destroyed_since_phase_1() -> None:
    stream, _ = acl.rt.create_stream()
    _, size, executor, handles = planned()
    acl.rt.destroy_stream(stream)
    failed(run(size, executor, stream=stream), RUNTIME, "stream: destroyed")
    failed(run(size, executor, stream="stream"), INVALID, "stream")
    assert acl.destroy_tensor(handles["key"]) == 0
    failed(run(size, executor), RUNTIME, "key: expected a live tensor")
    ret, *_ = FIRST(**handles)
    failed(ret, INVALID, "key: expected a live tensor")
    failed(acl.destroy_tensor(handles["key"]), INVALID, "destroyed before")
    failed(acl.destroy_tensor(None), NULL_POINTER, "got null")
    prefix = acl.create_int_array([1, 2])
    assert acl.destroy_int_array(prefix) == 0
    ret, *_ = FIRST(**(handles | {"key": handles["value"], "prefix": prefix}))
    failed(ret, INVALID, "prefix (prefixOptional): expected a live int array")
    failed(acl.destroy_int_array(prefix), INVALID, "destroyed before")


def test_phase_2_refuses_tensor_with_freed_memory() -> None:
    args = sample(V2)
    address, _ = acl.rt.malloc(args["query"].nbytes)
    shape = args["query"].shape
    query = acl.create_tensor(shape, acl.ACL_FLOAT16, None, 0, acl.ACL_FORMAT_ND, shape, address)
    *_, handles = planned()
    ret, size, executor = FIRST(**(handles | {"query": query}))
    assert (ret, acl.rt.free(address)) == (0, 0)
    failed(run(size, executor), RUNTIME, "query: expected a live tensor, got destroyed, or its memory freed")


def test_repeatable_executor_runs_again_and_uses_replaced_addresses() -> None:
    args = sample(V2, **VARIANTS["full_mask"]) | {"prefix": [0]}
    _, size, executor, handles = planned(args)
    expected, other = done(V2, args), sample(V2)["query"].flip(0).contiguous()
    failed(acl.set_input_tensor_addr(executor, 0, handles["query"], other), RUNTIME, "repeatable")
    assert acl.set_acl_op_executor_repeatable(executor) == 0
    acl.destroy_int_array(handles["prefix"])  # It was read.
    for _ in range(3):
        handles["attention_out"].view.zero_()
        assert run(size, executor) == 0
        assert same(handles["attention_out"].view, expected["attention_out"])
    first = torch.zeros(256, dtype=torch.float16)
    assert acl.set_input_tensor_addr(executor, 0, handles["query"], other) == 0
    assert acl.set_output_tensor_addr(executor, 3, handles["attention_out"], first) == 0
    failed(acl.set_tensor_addr(executor, 0, handles["query"], torch.zeros(9)), INVALID, "the view ends at byte")
    failed(acl.set_tensor_addr(executor, 0, handles["key"], other), INVALID, "that phase 1 was given")
    failed(acl.set_tensor_addr(executor, 3, handles["query"], other), INVALID, "index: 3 was null")
    failed(acl.set_tensor_addr(executor, 11, handles["query"], other), INVALID, "index: expected 0 to 10, got 11")
    failed(acl.set_tensor_addr(executor, 0, None, other), 561103, "tensor")
    failed(acl.set_tensor_addr(None, 0, handles["query"], other), 561103, "executor")
    buffer = torch.zeros(1000, dtype=torch.float16)
    assert acl.set_tensor_addr(executor, 10, handles["attention_out"], buffer[8:]) == 0
    assert run(size, executor) == 0, acl.get_recent_err_msg()
    moved = done(V2, args | {"query": other})["attention_out"]
    assert same(buffer[8 : 8 + moved.numel()], moved.reshape(-1))
    assert not first.any()
    assert acl.destroy_acl_op_executor(executor) == 0
    failed(run(size, executor), RUNTIME, "a destroyed one")
    failed(acl.destroy_acl_op_executor(executor), RUNTIME, "destroyed before")


# ------------------------------------------------------------------------------------------------------------- memory


KINDS = ("transposed", "padded rows", "offset", "every second")


def strided(like: torch.Tensor, kind: str) -> torch.Tensor:
    """Copies values to memory with the strides of `kind`, with bytes 0xA5 in all gaps."""
    shape = tuple(like.shape)
    if not like.numel() or not shape:
        return like.clone()
    sizes, view = {
        "transposed": (shape[::-1], lambda t: t.permute(*reversed(range(t.dim())))),
        "padded rows": ((*shape[:-1], shape[-1] + 3), lambda t: t[..., : shape[-1]]),
        "offset": ((like.numel() + 5,), lambda t: t[5:].view(shape)),
        "every second": ((*shape[:-1], 2 * shape[-1]), lambda t: t[..., ::2]),
    }[kind]
    memory = torch.full((math.prod(sizes) * like.itemsize,), 0xA5, dtype=torch.uint8)
    return view(memory.view(like.dtype).view(sizes)).copy_(like)  # type: ignore[no-any-return,no-untyped-call]


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns all bytes of a tensor's storage as uint8."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


@pytest.mark.sampled(8)
@pytest.mark.parametrize("op", OPERATORS.values(), ids=by_name)
def test_results_of_strided_tensors_bitwise_equal_contiguous_tensors(op: Op) -> None:
    """Calls that cover every parameter; the memory around outputs must not change."""
    for number, (settings, layout) in enumerate(itertools.product(starts(op), layouts(op))):
        args, kind = sample(op, **{**layout, **settings}), KINDS[number % 4]
        outputs = outputs_of(op, args)
        moved = args
        if "Compressor" not in op.name:  # its projections are products of torch, whose bits depend on strides
            moved = tree_map_only(torch.Tensor, lambda t, kind=kind: strided(t, kind), args)
        targets = tree_map_only(torch.Tensor, lambda t, kind=kind: strided(t, kind), outputs)
        if call(op, args, outputs, strict=False) != (0, 0):  # another rule, or an output whose size inputs do not say
            acl.get_recent_err_msg()
            continue
        assert call(op, moved, targets, strict=False) == (0, 0), acl.get_recent_err_msg()
        for name, expected in outputs.items():
            if expected is not None:
                assert same(memory_of(targets[name]), memory_of(strided(expected, kind))), (name, settings, layout)


def test_workspace_grows_by_the_size_of_converted_tensors() -> None:
    args = sample(V2)
    _, size, *_ = planned(args)
    outputs = outputs_of(V2, args)
    _, larger, *_ = planned(args, attention_out=strided(outputs["attention_out"], "transposed"))  # type: ignore[arg-type]
    assert larger == size + args["query"].nbytes


@pytest.mark.parametrize("layout", ["BSND", "SBH"])
@pytest.mark.parametrize("axis", ["B", "S1", "S2"])
def test_calls_with_an_empty_axis_return_zeros(layout: str, axis: str) -> None:
    args = sample(V2, input_layout=layout, **{axis: 0})
    outputs = outputs_of(V2, args)
    ret, size, executor, _ = planned(args, **outputs)
    assert ret == 0, acl.get_recent_err_msg()
    if axis != "S2":
        assert size == 0
    assert run(size, executor, None if axis != "S2" else ...) == 0, acl.get_recent_err_msg()
    assert all(not tensor.any() for tensor in outputs.values() if tensor is not None)
    op = RECORDS["aclnnFlashAttentionScoreGradV2"]
    args = sample(op, input_layout=layout, **{axis: 0})
    assert all(not tensor.any() for tensor in done(op, args).values())


def test_golden_back_end_of_acl_init_bitwise_equals_golden() -> None:
    args = sample(V2, **VARIANTS["pse"])
    acl.finalize()
    assert acl.init(backend="golden") == acl.rt.set_device(7) == 0
    slow = done(V2, args)
    with use_backend("golden"):
        out, *statistics = torch_npu(args)[:3]
    assert all(map(same, slow.values(), (*statistics, out)))


def test_calls_before_acl_init_or_after_finalize_return_error_codes() -> None:
    *_, handles = planned()
    _, size, executor, _ = planned()
    failed(acl.init(), 100002, "called before")
    assert acl.finalize() == 0
    failed(acl.finalize(), 100037, "called twice")
    failed(acl.rt.malloc(8)[1], 100001, "before acl.init()")
    failed(acl.rt.set_device(0), 100001)
    failed(acl.rt.get_mem_info()[2], 100001)
    assert acl.create_tensor((2,), acl.ACL_FLOAT, data=torch.zeros(2)) is None
    failed(100001, 100001, "create_tensor", "acl.init()")
    ret, *_ = FIRST(**handles)
    failed(ret, RUNTIME, "acl.init()")
    failed(aclnn.aclnnFlashAttentionScoreV2(None, size, executor, None), RUNTIME, "acl.init()")
    failed(acl.init(device="meta"), 207004, "device")
    failed(acl.init(device="no such"), 207004, "device")
    failed(acl.init(backend="no such"), 100000, "backend")
    assert acl.init() == 0
