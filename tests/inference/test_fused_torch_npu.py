"""Fused inference attention through torch_npu's functions: errors, torch.compile, output buffers."""

import importlib
import random
import re
from typing import Any

import pytest
import torch
from support.bits import same_bits
from support.compiled import compiled
from support.contract_failures import Args, call, outcome
from support.two_phase import call as call_phases
from support.two_phase import done, outputs_of

from fusion_attention import ContractError, npu
from fusion_attention.contract import Op, bind
from fusion_attention.contract.sampling import sample, violation
from fusion_attention.ops.fused import definitions as fused
from fusion_attention.torch_ops import dispatch

Tensor = torch.Tensor
FIA, FIA_V2 = npu.npu_fused_infer_attention_score, npu.npu_fused_infer_attention_score_v2
TORCH = (fused.TORCH_PFA, fused.TORCH_V1, fused.TORCH_V2)
PACKED: Args = {"input_layout": "TND"}
SQUARE: Args = {"atten_mask": "2048 2048", "sparse_mode": 3}
PAGES: Args = {
    "block_table": "B 2", "block_size": 16, "actual_seq_lengths_kv": [20, 32], "key": "8 16 N2*D", "value": "8 16 N2*D"
}  # fmt: skip
ONE_TOKEN: Args = {"S1": 1}


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


def packed(**more: Any) -> dict[str, Any]:
    heads = {"num_heads": 4, "num_key_value_heads": 2, "scale": 0.125, "input_layout": "TND"}
    cache = {"key": rows(12, 2, 64, seed=1), "value": rows(12, 2, 64, seed=2)}
    return {"query": rows(8, 4, 64), **cache, **heads, **more}


# ---------------------------------------------------------------------------------------------------------- error texts


@pytest.mark.parametrize(
    ("settings", "strict", "text"),
    [
        ({"pse_shift": "B 1 1 S2", "S1": 1}, False, "axis 1 must be N (4), got 1: repeat it per head"),
        ({**PACKED, "T1": 21, "actual_seq_lengths": [10, 20]}, True, "21 query rows, lengths end at 20"),
        ({"B": 16, "actual_seq_lengths_kv": [6] * 9}, False, "9 lengths for 16 sequences"),
        ({**PACKED, "D": 256, "Dv": 256}, True, "D and Dv of 64, 128, 192 or 192 and 128"),
        ({"atten_mask": "S1 S2", "sparse_mode": 3}, False, "the 2048 x 2048 mask that sparse_mode 2, 3 and 4 take"),
        ({"atten_mask": "B 1 1 S2"}, False, "repeat it over the query rows, 3 of them, or use actual_seq_lengths_kv"),
        ({**PAGES, "block_table": torch.tensor([[0, 1], [8, 3]])}, False, "8 at [1, 0], outside [0, 8)"),
        ({**PAGES, "key": "8 16 N2 D", "value": "8 16 N2 D"}, False, "view it as [8, 16, N*D]"),
        (
            {"key_shared_prefix": "1 4 N2*D", "value_shared_prefix": "1 4 N2*D", "actual_shared_prefix_len": [5]},
            False,
            "a prefix is no longer than its tensor",
        ),
        ({**PACKED, "actual_seq_lengths": [5, 3]}, False, "3 after 5 at sequence 1"),
        ({"atten_mask": "B N1 S1 S2"}, False, "all heads share a mask, axis 1 must be 1"),
    ],
)
def test_fused_attention_error_text_names_the_cause(settings: Args, strict: bool, text: str) -> None:
    op = fused.TORCH_V1
    failures, _ = outcome(op, sample(op, **settings), strict=strict)
    assert any(text in str(f) for f in failures), failures


@pytest.mark.parametrize(("number", "scale"), [(6, None), (torch.float32, None), (5, "1"), (torch.bfloat16, "1")])
def test_fused_attention_refuses_wrong_out_dtype(number: Any, scale: Any) -> None:
    args = sample(fused.TORCH_V2, quant_scale2=scale)
    with pytest.raises(ContractError, match="out_dtype: expected torch's number of the output's dtype, got"):
        call(fused.TORCH_V2, args | {"out_dtype": number})


@pytest.mark.parametrize(
    ("op", "settings", "text"),
    [
        (fused.TORCH_V1, {"S1": 1, "sparse_mode": 4}, "one-token queries see every key except in layout TND"),
        (fused.TORCH_PFA, {"atten_mask": "S1 S2"}, "its default 0 makes this call causal"),
        (fused.TORCH_V1, {"atten_mask": "2048 2048"}, "they read it as a mask of rows by keys"),
        (fused.PROMPT_V1, {"pse_shift": "B N1 S1 S2"}, "this version ignores it"),
    ],
)
def test_doubtful_fused_attention_call_gets_one_note_with_the_reason(op: Op, settings: Args, text: str) -> None:
    failures, notes = outcome(op, sample(op, **settings))
    assert not failures
    assert len(notes) == 1
    assert text in notes[0]


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_fused_attention_refuses_inputs_that_require_grad(name: str) -> None:
    given = packed(actual_seq_lengths=[3, 8], actual_seq_lengths_kv=[5, 12])
    given[name].requires_grad_()
    with pytest.raises(ContractError, match=f"{name}: .*train with npu_fusion_attention"):
        FIA(**given)
    fast, _ = compiled(lambda **given: FIA(**given)[0])
    with pytest.raises(Exception, match="train with npu_fusion_attention"):
        fast(**given)
    with torch.no_grad():
        assert not FIA(**given)[0].requires_grad


# -------------------------------------------------------------------------------------------------------- result shapes


def results(op: Op, args: Args) -> list[Tensor]:
    result = dispatch.results(op, args)
    nothing = torch.empty(0, device=args["query"].device)
    return [result.get(name, nothing) for name in op.results]


@pytest.mark.parametrize("op", TORCH[1:], ids=lambda op: op.name)
@pytest.mark.parametrize("lse", [False, True])
def test_infer_output_buffers_have_shapes_and_dtypes_of_results(op: Op, lse: bool) -> None:
    buffer = getattr(npu, f"_{op.name}_infer_output")
    shown = {p.name: p.shown for p in op.params}
    for layout in op.layouts:
        args = sample(op, input_layout=layout, softmax_lse_flag=lse)
        names = ("query", "value", "input_layout", "block_table", "num_heads", "num_key_value_heads", "query_rope")
        got = buffer(**{shown[name]: args[name] for name in (*names, "softmax_lse_flag")})
        for ours, real in zip(got, results(op, args), strict=True):
            assert (ours.shape, ours.dtype) == (real.shape, real.dtype), layout


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"input_layout": "SBH"}, "input_layout: expected one of BSH"),
        ({"query": torch.zeros(2, 3, 4, 64)}, "query: expected 3 dimensions in layout BSH"),
        ({"num_heads": 0}, "num_heads: expected num_heads > 0, got 0"),
        ({"num_heads": "BSND"}, "num_heads: expected num_heads > 0, got 'BSND'"),
        ({"value": torch.zeros(2, 64)}, "value: expected 3 dimensions in layout BSH"),
    ],
)
def test_infer_output_refuses_invalid_arguments(wrong: dict[str, Any], text: str) -> None:
    given = {"query": torch.zeros(2, 3, 256), "value": torch.zeros(2, 6, 256), "num_heads": 4} | wrong
    with pytest.raises(ContractError, match=re.escape(text)):
        npu._npu_fused_infer_attention_score_infer_output(**given)


# ------------------------------------------------------------------------------------------------------- output buffers

ENDS = {"actual_seq_lengths": [3, 8], "actual_seq_lengths_kv": [5, 12]}


def test_fused_attention_writes_into_strided_out_or_the_query() -> None:
    want, lse = FIA(**packed(**ENDS, softmax_lse_flag=True))
    buffer, stats = torch.full((8, 8, 64), 7.0).half(), torch.full((8, 4, 1), 7.0)
    FIA.out(**packed(**ENDS, softmax_lse_flag=True), out=[buffer[:, ::2], stats])
    same_bits(buffer[:, ::2], want)
    same_bits(stats, lse)
    assert (buffer[:, 1::2] == 7).all()
    given = packed(**ENDS)
    result, _ = FIA.out(**given, out=(given["query"], torch.empty(0)))
    same_bits(result, want)


@pytest.mark.parametrize(
    ("out", "text"),
    [
        ([torch.zeros(7, 4, 64).half(), torch.zeros(8, 4, 1)], "attention_out: expected axis 0 to be T1=8"),
        ([torch.zeros(8, 4, 64), torch.zeros(8, 4, 1)], "attention_out: expected the dtype of the output, got"),
        ([torch.zeros(8, 4, 32).half(), torch.zeros(8, 4, 1)], "attention_out: expected the shape of the output"),
        ([torch.zeros(8, 4, 64).half(), torch.zeros(8, 4, 8)], "softmax_lse: expected a last axis of 1"),
        ([torch.zeros(8, 4, 64).half(), torch.zeros(8, 4, 1).half()], "softmax_lse: expected float32"),
        ([torch.zeros(8, 4, 64).half()], "out: expected [attention_out, softmax_lse]"),
        (torch.zeros(8, 4, 64).half(), "out: expected [attention_out, softmax_lse]"),
    ],
)
def test_fused_attention_refuses_out_of_wrong_shape_or_dtype(out: Any, text: str) -> None:
    tensors = out if isinstance(out, list) else [out]
    with pytest.raises(ContractError, match=re.escape(text)):
        FIA.out(**packed(**ENDS, softmax_lse_flag=True), out=out)
    assert all((t == 0).all() for t in tensors)


@pytest.mark.parametrize("interface", [FIA.out, npu._npu_fused_infer_attention_score_get_max_workspace])
def test_out_and_max_workspace_functions_refuse_unknown_arguments(interface: Any) -> None:
    given, query = packed(**ENDS), rows(8, 4, 64)
    out = {"out": [torch.empty(0), torch.empty(0)]} if interface is FIA.out else {}
    for positional, named in (
        ((), given | {"heads": 4}),
        ((), {"query": query, "num_heads": 4}),
        ((query,), given),
        ((query,) * 4, ENDS),
    ):
        with pytest.raises(TypeError, match="argument"):
            interface(*positional, **named, **out)


def test_max_workspace_is_empty_and_invalid_call_raises() -> None:
    ask = npu._npu_fused_infer_attention_score_get_max_workspace
    assert ask(**packed(**ENDS)).numel() == 0
    with pytest.raises(ContractError, match="num_heads"):
        ask(**packed(**ENDS) | {"num_heads": 3})


def test_installed_torch_npu_has_out_and_max_workspace_functions() -> None:
    npu.install()
    try:
        torch_npu = importlib.import_module("torch_npu")
        query = {n: t.to("npu") if isinstance(t, torch.Tensor) else t for n, t in packed(**ENDS).items()}
        workspace = torch_npu._npu_fused_infer_attention_score_get_max_workspace(**query)
        out, lse = torch.empty(8, 4, 64, dtype=torch.float16, device="npu"), torch.empty(1, device="npu")
        torch_npu.npu_fused_infer_attention_score.out(**query, workspace=workspace, out=[out, lse])
    finally:
        npu.uninstall()
    same_bits(out.cpu(), FIA(**packed(**ENDS))[0])


# -------------------------------------------------------------------------------------------------------- torch.compile


@pytest.mark.usefixtures("fresh")
def test_fused_attention_compiles_once_for_all_lengths() -> None:
    table = torch.tensor([[0, 5], [3, 1]], dtype=torch.int32)
    pages = {"key": rows(8, 16, 128, seed=1), "value": rows(8, 16, 128, seed=2), "block_table": table}
    given = packed(**pages, block_size=16, softmax_lse_flag=True)
    del given["query"]

    def step(query: Tensor, ends: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return FIA(query, actual_seq_lengths=ends, actual_seq_lengths_kv=lengths, **given)

    fast, graphs = compiled(step)
    for ends, lengths in (([3, 8], [20, 32]), ([8, 8], [9, 0])):
        inputs = rows(8, 4, 64), torch.tensor(ends), torch.tensor(lengths)
        same_bits(fast(*inputs), step(*inputs))
    assert len(graphs) == 1


@pytest.mark.usefixtures("fresh")
def test_fused_attention_with_out_compiles_to_one_graph() -> None:
    given = packed(**ENDS, softmax_lse_flag=True)
    query = given.pop("query")

    def step(query: Tensor, out: Tensor, lse: Tensor) -> Tensor:
        FIA.out(query, **given, out=[out, lse])
        return out + 1

    fast, graphs = compiled(step)
    buffers = torch.zeros(8, 4, 64).half(), torch.zeros(8, 4, 1)
    result = fast(query, *buffers)
    same_bits(buffers, FIA(query, **given))
    same_bits(result, buffers[0] + 1)
    assert len(graphs) == 1


# ------------------------------------------------------------------------------------------------ sparse modes 10 to 14


def test_prompt_flash_attention_sparse_mode_plus_10_equals_sparse_mode() -> None:
    for mode in range(5):
        more = {"atten_mask": "2048 2048" if mode > 1 else "S1 S2", "next_tokens": 2147483647}
        ordinary, precise = (
            call(fused.TORCH_PFA, sample(fused.TORCH_PFA, sparse_mode=m, **more)) for m in (mode, mode + 10)
        )
        same_bits(precise, ordinary)


# ------------------------------------------------------------------------------------------------ two-phase interface


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize("op", fused.ACLNN[3:], ids=lambda op: op.name)
def test_aclnn_fused_attention_writes_softmax_lse_only_on_request(op: Op) -> None:
    args = sample(op, softmax_lse_flag=True)
    result = done(op, args)
    assert result["softmax_lse"].isfinite().all()
    assert call_phases(op, args, {**outputs_of(op, args), "softmax_lse": None}) == (161001, 0)
    unasked, other = sample(op), torch.full((1,), 7.0).half()
    given = {**outputs_of(op, unasked), "softmax_lse": other}
    assert call_phases(op, unasked, given) == (0, 0)
    assert other == 7
    same_bits(given["attention_out"], result["attention_out"])


# ------------------------------------------------------------------------------------------- two or three rules at once


def together(op: Op, chance: random.Random) -> Args | None:
    """Returns a random call that obeys or violates two or three rules; None if its axes contradict them."""
    settings: Args = {"input_layout": chance.choice(op.layouts), "softmax_lse_flag": chance.random() < 0.3}
    for rule in chance.sample(op.applicable_rules, chance.choice((2, 3))):
        settings |= violation(op, rule) if chance.random() < 0.5 else rule.given
    settings |= {axis: chance.choice((0, 1, 2, 5)) for axis in ("B", "S1", "S2", "T1") if chance.random() < 0.1}
    if max(settings.get(axis, 0) for axis in ("B", "S2", "N1")) > 100:
        return None  # what only the limits of a chip are about
    try:
        args = sample(op, **settings)
    except (RuntimeError, KeyError, TypeError, IndexError):
        return None
    outputs = {p.name for p in op.tensors(output=True)}
    return {name: t.detach() if isinstance(t, Tensor) else t for name, t in args.items() if name not in outputs}


@pytest.mark.filterwarnings("ignore::fusion_attention.ContractWarning")
@pytest.mark.parametrize("op", TORCH, ids=lambda op: op.name)
def test_random_fused_calls_are_refused_or_have_same_shapes_on_meta(op: Op) -> None:
    chance, ran = random.Random(7), 0
    for _ in range(200):
        args = together(op, chance)
        if args is None:
            continue
        try:
            names = bind(op, args).names
        except ContractError:
            continue
        result, ran = results(op, args), ran + 1
        assert result[0].shape == names["shape_out"]
        bare = {name: t.to("meta") if isinstance(t, Tensor) else t for name, t in args.items()}
        lists = {name: [t.to("meta") for t in value] for name, value in args.items() if is_list(value)}
        for real, meta in zip(result, results(op, bare | lists), strict=True):
            assert (meta.shape, meta.dtype) == (real.shape, real.dtype)
    assert ran > 30


def is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Tensor)


@pytest.mark.parametrize("name", ["query_padding_size", "kv_padding_size"])
def test_padding_size_without_elements_is_refused(name: str) -> None:
    q = torch.randn(1, 2, 4, 16)
    with pytest.raises(ContractError, match=f"{name}: expected one number"):
        npu.npu_fused_infer_attention_score(q, q, q, num_heads=2, input_layout="BNSD", **{name: []})


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["npu_fused_infer_attention_score", "npu_prompt_flash_attention"])
@pytest.mark.parametrize(("layout", "shape"), [("BNSD", (2, 2, 6, 16)), ("BSND", (2, 6, 2, 16)), ("TND", (6, 2, 16))])
def test_values_with_head_dim_0_are_refused(layout: str, shape: tuple[int, ...], name: str) -> None:
    rows = torch.randn(shape).half()
    lengths = {"actual_seq_lengths": [1, 3, 6], "actual_seq_lengths_kv": [1, 3, 6]} if layout == "TND" else {}
    with pytest.raises(ContractError, match="value: expected 1 <= Dv <= 768"):
        getattr(npu, name)(rows, rows, rows[..., :0], num_heads=2, input_layout=layout, **lengths)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("elements", [0, 8, 32])
def test_value_list_with_head_dim_unlike_first_tensor_is_refused(elements: int) -> None:
    q, row, other = (
        torch.randn(2, 2, 1, 16).half(),
        torch.randn(1, 2, 6, 16).half(),
        torch.randn(1, 2, 6, elements).half(),
    )
    with pytest.raises(ContractError, match="value: expected the shape of key except for the last axis"):
        npu.npu_fused_infer_attention_score(q, [row, row], [row, other], num_heads=2, input_layout="BNSD", scale=1.0)
