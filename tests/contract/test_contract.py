"""Contracts of operators: each rule of each operator definition broken alone, through bind() and through the functions;
signatures, cached signatures, error texts, pages.
"""

import inspect
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.contract_failures import ATTENTION, EVERY_INTERFACE, PACKED, Args, call, layouts, of_versions, one, outcome
from torch.utils._pytree import tree_leaves

import fusion_attention.contract.binding as binding
from fusion_attention import ContractError, ContractWarning
from fusion_attention.contract import INVALID, LEVELS, STAGES, Array, bind
from fusion_attention.contract.sampling import invalid_samples, sample
from fusion_attention.ops.auxiliary_definitions.definitions import CONTRACTS
from fusion_attention.ops.training import definitions as training
from fusion_attention.plan import Plan

# --------------------------------------------------------------------------------------------- samples, invalid samples


def test_sample_calls_of_every_operator_are_legal() -> None:
    for op in CONTRACTS.values():
        for layout in layouts(op):
            assert outcome(op, sample(op, **layout), strict=True, check_content=True) == ((), []), (op, layout)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [pytest.param(name, marks=of_versions(name)) for name in CONTRACTS])
def test_each_broken_rule_is_the_only_reported_failure(name: str) -> None:
    """Each level needs options: limits strict, content check_content, meaning neither; doubts warn unless strict."""
    op = CONTRACTS[name]
    for case in invalid_samples(op):
        op.signatures.clear()  # some warnings come with the first call of a signature
        options = {"strict": case.level in ("limit", "doubt"), "check_content": case.level == "content"}
        failures, notes = outcome(op, case.args, **options)
        usual = outcome(op, case.args)
        message = str(op.failure(case.param, case.expected, ""))
        if case.level == "note":
            assert not failures, case.id
            assert usual[1] == notes, case.id
            assert len(notes) == 1, case.id
            assert notes[0].startswith(f"{message}, got "), case.id
            continue
        assert [(f.op, f.param, f.code) for f in failures] == [(name, case.param, case.code)], (case.id, failures)
        assert case.expected in (failures[0].expected, ""), case.id
        text = str(failures[0]).removeprefix(str(op.failure(case.param, "", "")))
        assert re.fullmatch(r".+, got .+", text), case.id
        assert len(text) < 400, case.id
        # Chip limits alone may be added when all checks are enabled: a chip version may lack an input.
        more, _ = outcome(op, case.args, strict=True, check_content=True)
        others = [f for f in more if f not in failures]
        assert all(f.rule is not None and f.rule.level == "limit" for f in others), (case.id, more)
        assert more, case.id
        always = case.level == "meaning"
        warned = [f"{message} ({f.advice})" for f in failures]
        assert (bool(usual[0]), usual[1]) == (always, warned if case.level == "doubt" else []), case.id
        refused = always or case.level in ("limit", "doubt") or bool(others)
        assert bool(outcome(op, case.args, strict=True)[0]) is refused, case.id
        assert bool(outcome(op, case.args, check_content=True)[0]) is (always or case.level == "content"), case.id


def test_operator_rules_have_unique_ids_levels_stages_and_advice() -> None:
    for op in CONTRACTS.values():
        assert len({rule.id for rule in op.applicable_rules}) == len(op.applicable_rules), f"{op}: two of one name"
        for rule in op.rules:
            assert rule.level in LEVELS
            assert rule.stage in STAGES
            assert rule.advice, f"{op}: {rule.id}: say why, or what to do"


@pytest.mark.parametrize(
    ("settings", "legal"),
    [
        ({"pse": "B N1 1 S2"}, True),
        ({"pse": "1 N1 S1 S2"}, True),
        ({"pse": "S1 S2"}, False),
        ({**PACKED, "pse": "200"}, True),
        ({**PACKED, "pse": "48"}, True),
        ({**PACKED, "pse": "2 4 25"}, False),
        ({**PACKED, "pse": "2 N1 5 5"}, False),
        ({**PACKED, "pse": "1 N1 1024 7"}, True),
        ({**PACKED, "actual_seq_qlen": [4, 8], "actual_seq_kvlen": [6, 12], "pse": "2 N1 4 6"}, True),
        ({**PACKED, "actual_seq_qlen": [4, 8], "actual_seq_kvlen": [6, 12], "pse": "2 N1 6 4"}, False),
        ({**PACKED, "actual_seq_qlen": [4, 8], "actual_seq_kvlen": [6, 12], "pse": "2 N1 1 6"}, True),
    ],
)
def test_pse_shape_is_accepted_or_refused(settings: Args, legal: bool) -> None:
    assert (outcome(training.TORCH_V1, sample(training.TORCH_V1, **settings))[0] == ()) is legal


# ----------------------------------------------------------------------------------------------------------- interfaces


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any) -> None:
        raise AssertionError("a wrong call was computed")

    monkeypatch.setattr(Plan, "run", run)


@pytest.mark.sampled(6)
@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("name", EVERY_INTERFACE)
def test_python_functions_refuse_calls_that_break_operator_rules(name: str) -> None:
    op = CONTRACTS[name]
    outputs = {p.name for p in op.tensors(output=True)}
    for case in invalid_samples(op):
        if case.level != "meaning" or any(case.args.get(name) is not None for name in outputs):
            continue
        versions = [t._version for t in case.args.values() if isinstance(t, torch.Tensor)]
        with pytest.raises(ContractError, match=rf"^{name}: {case.param}: expected ") as caught:
            call(op, case.args)
        assert [(f.param, f.code) for f in caught.value.failures] == [(case.param, case.code)], case.id
        assert versions == [t._version for t in case.args.values() if isinstance(t, torch.Tensor)], case.id


@pytest.mark.parametrize("name", EVERY_INTERFACE)
def test_python_functions_compute_their_sample_calls(name: str) -> None:
    op = CONTRACTS[name]
    for layout in layouts(op):
        lengths = any(isinstance(op.by_name.get(n), Array) for n in op.samples.get(layout.get(op.layout_attr, ""), {}))
        small = ({"D": 4, "Dv": 4} | ({} if lengths else {"B": 1})) if op.lower else {}
        first, *_ = tree_leaves(call(op, sample(op, **layout, **small)))
        assert first is None or first.isfinite().all(), layout


# -------------------------------------------------------------------------------------------- stages and their failures


def test_first_failing_check_stage_reports_all_its_failures() -> None:
    """Each call adds errors of an earlier stage; only the failures of that stage are then reported."""
    op = training.TORCH_V2
    legal = sample(op, **PACKED, atten_mask="S1 S2", query_rope=True, key_rope=True)

    def params(**wrong: Any) -> list[str]:
        return [f.param for f in outcome(op, legal | wrong)[0]]

    rules = {"sparse_mode": 5, "pse_type": 0, "query_rope": None, "key_rope": None}
    assert params(**rules) == ["sparse_mode", "pse_type"]
    lengths = rules | {"actual_seq_qlen": [8, 3], "actual_seq_kvlen": [5, 13]}
    assert params(**lengths) == ["actual_seq_qlen", "actual_seq_kvlen"]
    domains = lengths | {"keep_prob": 0.0, "softmax_layout": "BSND"}
    assert params(**domains) == ["keep_prob", "softmax_layout"]
    axes = domains | {"value": legal["value"][1:], "sink": torch.zeros(3)}
    assert params(**axes) == ["value", "sink"]
    rank = axes | {"key": legal["key"][0], "sink": torch.zeros(2, 2)}
    assert params(**rank) == ["key", "sink"]
    dtype = rank | {"key": legal["key"].double(), "sink": torch.zeros(4).half(), "input_layout": "tnd"}
    assert params(**dtype) == ["key", "sink", "input_layout"]
    presence = dtype | {"value": None, "head_num": None, "pse": "x", "sync": 1, "prefix": [0.5]}
    assert params(**presence) == ["value", "head_num", "pse", "prefix", "sync"]


def test_contract_error_survives_pickling() -> None:
    with pytest.raises(ContractError) as caught:
        bind(ATTENTION, sample(ATTENTION, N2=3))
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.failures, copy.code) == (str(caught.value), caught.value.failures, caught.value.code)


NO_DENSE_TENSORS: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse": (lambda: torch.ones(2, 4, 4, 8).to_sparse(), "a sparse_coo one"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(2, 4, 4, 8), 0.1, 0, torch.qint8), "a quantized one"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(4, 4, 8)] * 2), "a nested one"),
    "jagged": (lambda: torch.nested.nested_tensor([torch.ones(4, 4)] * 2, layout=torch.jagged), "a nested one"),
    "numpy": (lambda: np.ones((2, 4, 4, 8)), "numpy float64 [2, 4, 4, 8]"),
    "huge": (lambda: 10**5000, "a value of type int"),
    "long": (lambda: "q" * 1000, "..."),
}


@pytest.mark.filterwarnings("ignore:torch.quantize", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("kind", NO_DENSE_TENSORS)
def test_sparse_quantized_nested_or_non_tensor_argument_is_refused(kind: str) -> None:
    make, got = NO_DENSE_TENSORS[kind]
    for op, name in ((ATTENTION, "q"), (training.TORCH_V1, "query"), (training.TORCH_V1, "padding_mask")):
        text = one(op, sample(op) | {name: make()})
        assert text.startswith(f"{op.name}: {name}: expected a ")
        assert got in text
        assert len(text) < 250


def test_tensors_on_different_devices_are_refused() -> None:
    args = sample(training.TORCH_V1, atten_mask="S1 S2", sink="N1")
    text = one(training.TORCH_V1, args | {"sink": args["sink"].to("meta")})
    assert text == (
        'npu_fusion_attention: sink: expected a tensor on cpu as query, got one on meta (move it: .to("cpu"))'
    )
    failures, _ = outcome(training.TORCH_V1, args | {"query": args["query"].to("meta")})
    assert [f.param for f in failures] == ["key", "value", "atten_mask", "sink"]
    assert {f.code for f in failures} == {INVALID}


def test_seed_and_offset_tensors_may_stay_on_cpu() -> None:
    op = training.TORCH_GRAD_V3
    args = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in sample(op, keep_prob=0.5).items()}
    bound = bind(op, args | {"seed": torch.tensor([3]), "offset": torch.tensor([0])})
    assert (bound.names["seed"].item(), bound.names["offset"].item()) == (3, 0)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64, torch.int8, torch.bool, torch.float64])
def test_unsupported_query_dtype_is_refused(dtype: torch.dtype) -> None:
    args = sample(training.TORCH_V1)
    odd = {name: args[name].to(dtype) for name in ("query", "key", "value")}
    text = one(training.TORCH_V1, args | odd)
    assert f"query: expected float16 or bfloat16 or float32, got {str(dtype).removeprefix('torch.')}" in text


def test_expanded_input_is_accepted_and_expanded_output_is_refused() -> None:
    op = training.SCORE_V1
    args = sample(op, drop_mask=None)
    expanded = args["query"][:1].expand(2, -1, -1, -1)
    bound = bind(op, args | {"query": expanded, "key": args["key"][:, :1].expand(2, 6, -1, -1)})
    assert bound.names["query"] is expanded
    text = one(op, args | {"attention_out": expanded})
    expected = "a separate memory address for every element"
    assert f"attention_out (attentionOutOut): expected {expected}, got strides (0, 32, 8, 1)" in text


# --------------------------------------------------------------------------------------------------- notes and rules


def test_call_keeps_its_lengths_if_another_thread_fills_its_cache_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    def lengths(q_len: list[int]) -> list[int]:
        q = torch.zeros(8, 1, 8)
        return bind(ATTENTION, {"q": q, "k": q, "v": q, "layout": "TND", "q_len": q_len}).names["q_len"].tolist()

    class Raced(binding._Signature):
        """Signature that another call fills again as soon as its `settled` attribute is set."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "settled" and meanwhile:
                lengths(meanwhile.pop())

    meanwhile: list[list[int]] = []
    monkeypatch.setattr(binding, "_Signature", Raced)
    ATTENTION.signatures.clear()
    lengths([4, 4])
    meanwhile.append([5, 3])
    assert lengths([3, 5]) == [3, 5]
    assert not meanwhile


def test_warning_has_the_file_name_of_the_caller() -> None:
    args = sample(training.TORCH_V1, sparse_mode=3)
    bound, called = (lambda: bind(training.TORCH_V1, args)), (lambda: call(training.TORCH_V1, args))
    for ask, caller in ((bound, __file__), (called, inspect.getsourcefile(call))):
        for _ in range(2):
            with pytest.warns(
                ContractWarning, match="^npu_fusion_attention: sparse_mode: expected atten_mask"
            ) as caught:
                ask()
            assert [w.filename for w in caught] == [caller]
