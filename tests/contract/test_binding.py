"""bind() normalises values (numbers, lengths and blank tensors in any form) and caches results per call signature."""

import gc
import re
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import same_bits
from support.contract_failures import ATTENTION, PACKED, Args, call, one, outcome

from fusion_attention import npu
from fusion_attention.contract import Bound, ContractError, bind, binding
from fusion_attention.contract.sampling import sample
from fusion_attention.ir.mask import Band
from fusion_attention.ops import RECORDS
from fusion_attention.ops.training import definitions as training

# ----------------------------------------------------------------------------------- conversion of values


@pytest.mark.parametrize(
    "value",
    [
        [3, 8],
        (3, 8),
        range(3, 13, 5),
        np.array([3, 8]),
        np.array([3, 8], np.int32),
        np.array([[1, 3], [2, 8]])[:, 1],
        torch.tensor([3, 8]),
        torch.tensor([3, 8], dtype=torch.int32),
        torch.tensor([3, 0, 8])[::2],
        [np.int64(3), torch.tensor(8)],
    ],
    ids=str,
)
def test_lengths_are_accepted_as_list_tuple_range_numpy_or_tensor(value: Any) -> None:
    args = sample(training.TORCH_V1, **PACKED) | {"actual_seq_qlen": value}
    bound = bind(training.TORCH_V1, args)
    assert bound["actual_seq_qlen"].tolist() == [3, 8]
    assert bound["q_len"].dtype == np.int64
    assert bound["q_len"].tolist() == [3, 5]


@pytest.mark.parametrize(
    "value",
    [
        *(
            5,
            "38",
            [3.0, 8.0],
            [3, None],
            [[3], [8]],
            [3, [8]],
            [3, 1 << 70],
            [True, False],
            {3: 8},
            {3, 8},
            [object()],
        ),
        *(np.array(3), np.array([3.0, 8.0]), np.array([3, 8], np.uint64), torch.tensor(3), torch.tensor([3.0, 8.0])),
        *(torch.ones(2, 2).int(), torch.ones(2).int().to("meta"), [object()], [torch.ones(1, device="meta")]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_non_integer_lengths_are_refused(value: Any) -> None:
    text = one(training.TORCH_V1, sample(training.TORCH_V1, **PACKED) | {"actual_seq_qlen": value})
    assert "actual_seq_qlen: expected integers (list, tuple or tensor), got " in text


def test_lengths_are_copied() -> None:
    for mine in (torch.tensor([3, 8]), np.array([3, 8])):
        bound = bind(replace(training.TORCH_V1), sample(training.TORCH_V1, **PACKED) | {"actual_seq_qlen": mine})
        mine[0] = 1
        assert bound["actual_seq_qlen"].tolist() == [3, 8]


@pytest.mark.parametrize(
    ("name", "value", "legal"),
    [
        ("head_num", np.int32(4), True),
        ("head_num", 4.0, False),
        ("head_num", True, False),
        ("head_num", "4", False),
        ("scale", 1, True),
        ("scale", np.float32(0.5), True),
        ("scale", True, False),
        ("scale", 1j, False),
        ("scale", 10**400, False),
        ("pre_tokens", 1 << 63, False),
        ("pre_tokens", -(1 << 63), True),
        ("sync", 1, False),
        ("sync", np.True_, True),
        ("input_layout", b"BSND", False),
        ("input_layout", np.str_("BSND"), True),
        ("keep_prob", float("nan"), False),
        ("keep_prob", [0.5], False),
        ("inner_precise", torch.tensor(1), True),
        ("inner_precise", torch.tensor([1]), False),
    ],
)
def test_number_types_are_accepted_or_refused_per_parameter(name: str, value: Any, legal: bool) -> None:
    args = sample(training.TORCH_V1, input_layout="BSND") | {name: value}
    assert (outcome(training.TORCH_V1, args)[0] == ()) is legal


def test_int_for_float_attribute_is_converted_and_refused_beyond_float64() -> None:
    """torch computes with no int above 64 bits."""
    args = sample(training.TORCH_V1, input_layout="BSND")
    scale = bind(training.TORCH_V1, args | {"scale": 2**64})["scale"]
    assert (scale, type(scale)) == (2.0**64, float)
    x = torch.randn(2, 4)
    same_bits(npu.npu_rms_norm(x, torch.ones(4), 2**64)[0], npu.npu_rms_norm(x, torch.ones(4), 2.0**64)[0])
    for value in (10**400, -(1 << 1024)):
        with pytest.raises(ContractError, match=r"routed_scaling_factor: expected a number below 2\*\*1024, got -?1"):
            npu.npu_moe_gating_top_k(x, 2, routed_scaling_factor=value)
    assert npu.npu_moe_gating_top_k(x, 2, routed_scaling_factor=10**300)[0].isinf().all()


def test_empty_optional_tensors_count_as_omitted() -> None:
    blanks = {p.name: torch.empty(0) for p in training.TORCH_V2.tensors() if p.optional}
    names = bind(training.TORCH_V2, sample(training.TORCH_V2) | blanks, strict=True).names
    assert all(names[name] is None for name in blanks)
    names = bind(training.TORCH_V2, sample(training.TORCH_V2) | {"sink": torch.tensor(1.0)}).names
    assert names["sink"] is None
    assert "sink: expected 1 dimensions [N1]" in one(ATTENTION, sample(ATTENTION) | {"sink": torch.tensor(1.0)})
    assert "blocked: expected" in one(ATTENTION, sample(ATTENTION) | {"blocked": torch.tensor(True)})


def test_zero_dimensional_seed_and_offset_count_as_present_in_bind_and_function() -> None:
    op = training.TORCH_GRAD_V3
    args = sample(op, keep_prob=0.5, seed=torch.tensor([3]), offset=torch.tensor([0]))
    same_bits(call(op, args | {"seed": torch.tensor(3), "offset": torch.tensor(0)})[0], call(op, args)[0])
    assert bind(op, args | {"seed": torch.tensor(3)})["seed"].item() == 3
    text = one(op, args | {"seed": torch.tensor(3.0)})
    assert text == "npu_fusion_attention_grad_v3: seed: expected int64, got float32 (convert it with .to())"
    with pytest.raises(ContractError, match=re.escape(text)):
        call(op, args | {"seed": torch.tensor(3.0)})


EMPTY = [
    {"input_layout": "BSND", "B": 0},
    {"input_layout": "BNSD", "S1": 0},
    {"input_layout": "SBH", "S2": 0},
    {"input_layout": "BSND", "S1": 0, "atten_mask": "S1 S2", "pse": "B N1 S1 S2", "pse_type": 0},
    {"input_layout": "BSND", "S2": 0, "atten_mask": "2048 2048", "sparse_mode": 4, "pre_tokens": 1, "next_tokens": 0},
    {"input_layout": "BSND", "S1": 0, "query_rope": True, "key_rope": True},
    {"input_layout": "TND", "T1": 0, "actual_seq_qlen": [0, 0]},
    {"input_layout": "TND", "T1": 0, "actual_seq_qlen": [0, 0], "query_rope": True, "key_rope": True},
    {"input_layout": "TND", "T2": 0, "actual_seq_kvlen": [0, 0]},
]


@pytest.mark.parametrize("settings", EMPTY)
@pytest.mark.parametrize("name", ["npu_fusion_attention_v2", "npu_fusion_attention_grad_v2"])
def test_empty_tensors_are_legal(name: str, settings: Args) -> None:
    op = RECORDS[name]
    args = sample(op, **settings)
    results = call(op, args)
    assert all(not t.any() for t in results if isinstance(t, torch.Tensor))
    if args["query_rope"] is not None and name.startswith("npu_fusion_attention_grad"):
        assert [t.shape for t in results[4:6]] == [args["query_rope"].shape, args["key_rope"].shape]


def test_trailing_zero_ends_are_sequences_without_tokens() -> None:
    args = sample(training.TORCH_V1, **PACKED) | {"actual_seq_qlen": [3, 8, 0], "actual_seq_kvlen": [0, 12, 12]}
    bound = bind(training.TORCH_V1, args)
    assert (bound["q_len"].tolist(), bound["kv_len"].tolist()) == ([3, 5, 0], [0, 12, 0])
    assert (bound["B"], bound["S1"], bound["S2"]) == (3, 5, 12)


# ------------------------------------------------------------------------------------------------- cached signatures


def names_of(bound: Bound) -> Args:
    return {k: v.tolist() if isinstance(v, (np.ndarray, torch.Tensor)) else v for k, v in bound.names.items()}


def listed(value: Any) -> list[Any]:
    """Returns the items of a list or tuple, or a list with the single value."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


@pytest.mark.parametrize("name", RECORDS)
def test_second_bind_from_cache_entry_returns_the_same_names(name: str) -> None:
    op = replace(RECORDS[name])  # remembers nothing
    for layout in op.layouts:
        args = sample(op, **{op.layout_attr: layout})
        first = bind(op, args)
        signature_count = len(op.signatures)
        second = bind(op, args)
        assert len(op.signatures) == signature_count
        assert names_of(first) == names_of(second)
        assert first.call_cache is second.call_cache
        assert all(
            a is b for p in op.tensors() for a, b in zip(*map(listed, (second[p.name], args[p.name])), strict=True)
        )


@pytest.mark.parametrize("strict", [False, True])
def test_changed_lengths_are_checked_again_for_a_cached_call(strict: bool) -> None:
    op = replace(training.TORCH_V1)
    legal = sample(op, **PACKED, atten_mask="2048 2048", sparse_mode=3)
    first = bind(op, legal, strict=strict)
    for wrong in ([5, 13], [12, 5], [12], [], [5.0, 12.0], None):
        assert outcome(op, legal | {"actual_seq_kvlen": wrong}, strict=strict)[0], wrong
    # A query row without keys breaks a chip limit: only strict calls are refused.
    assert bool(outcome(op, legal | {"actual_seq_kvlen": [2, 12]}, strict=strict)[0]) is strict
    other = bind(op, legal | {"actual_seq_kvlen": [4, 12]}, strict=strict)
    assert (other["kv_len"].tolist(), other["S2"]) == ([4, 8], 8)
    assert other.call_cache is not first.call_cache
    assert names_of(bind(op, legal, strict=strict)) == names_of(first)
    assert len(op.signatures) == 1


def test_axes_that_depend_on_lengths_are_not_cached() -> None:
    """B, S1 and S2 of a packed call follow from its lengths alone."""
    op = replace(ATTENTION)
    legal = sample(op, layout="TND")
    bind(op, legal)
    bound = bind(op, legal | {"q_len": [1, 1, 6], "kv_len": [4, 4, 4], "bias": legal["q"].new_zeros(1, 4, 6, 4)})
    bound = bind(op, legal | {"q_len": [1, 1, 6], "kv_len": [4, 4, 4]})
    assert (bound["B"], bound["S1"], bound["S2"]) == (3, 6, 4)
    text = one(op, legal | {"kv_len": [12]})
    assert text == (
        "attention: kv_len: expected len(q_len) == len(kv_len), got q_len=[3, 5], kv_len=[12] (one length per sequence "
        "in both)"
    )


def test_mask_content_is_checked_again_for_a_cached_call() -> None:
    op = replace(training.TORCH_V1)
    args = sample(op, S1=1030, S2=1030, N1=2, B=1, pse="1 N1 1024 S2", atten_mask="S1 S2", sparse_mode=1)
    args["atten_mask"].fill_(1).tril_(-1)
    args["atten_mask"] = args["atten_mask"].T.contiguous()  # above the diagonal
    bind(op, args)
    args["atten_mask"][0, 3] = 0
    for _ in range(2):
        assert "pse: expected no visible key beyond the diagonal" in one(op, args)
    args["atten_mask"][0, 3] = 1
    args["atten_mask"][1026, 1027] = 0  # a row that the table holds
    bind(op, args)


def test_equal_numbers_of_different_types_are_checked_separately() -> None:
    op = replace(training.TORCH_V1)
    legal = sample(op, inner_precise=1)
    bind(op, legal)
    for value in (True, 1.0, "1", np.float64(1.0)):
        assert outcome(op, legal | {"inner_precise": value})[0], value
    assert not outcome(op, legal | {"inner_precise": np.int64(1), "keep_prob": 1, "scale": np.float64(1.0)})[0]
    assert outcome(op, legal | {"sync": 0})[0]
    assert outcome(op, legal | {"keep_prob": True})[0]


def test_changed_dtype_device_layout_shape_or_strict_mode_is_checked_again() -> None:
    op = replace(training.TORCH_V1)
    legal = sample(op, sink="N1", Dv=16)
    bind(op, legal)
    assert outcome(op, legal, strict=True)[0], "strict after lenient"
    assert not outcome(op, legal)[0]
    assert outcome(op, legal | {"sink": legal["sink"].double()})[0]
    assert outcome(op, legal | {"sink": legal["sink"].to("meta")})[0]
    assert outcome(op, legal | {"sink": legal["sink"].to_sparse()})[0]
    assert outcome(op, legal | {"value": legal["value"][:, :, :1]})[0]
    assert not outcome(op, legal | {"sink": None})[0]
    assert bind(op, legal | {"sink": None})["sink"] is None


def test_signature_cache_keeps_no_tensor_alive() -> None:
    op = replace(training.TORCH_V1)
    args = sample(op, **PACKED, atten_mask="2048 2048", sparse_mode=3, sink="N1")
    watched = [weakref.ref(t) for t in args.values() if isinstance(t, torch.Tensor)]
    bind(op, args)
    bind(op, args | {"actual_seq_qlen": [4, 8]})
    outcome(op, args | {"actual_seq_qlen": [9]})
    del args
    gc.collect()
    assert [ref() for ref in watched] == [None] * 5
    assert op.signatures


def test_signature_cache_size_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "SIGNATURES_KEPT", 16)
    op = replace(ATTENTION)
    args = sample(op, S1=1, S2=1, D=1, Dv=1, B=1)
    for offset in range(26):
        bind(op, args | {"offset": offset})
    assert 0 < len(op.signatures) <= 16
    with pytest.raises(ContractError):
        bind(op, args | {"band": Band(prefix=([1],))})  # type: ignore[arg-type]
    assert len(op.signatures) <= 10, "what has no hash is not remembered"
