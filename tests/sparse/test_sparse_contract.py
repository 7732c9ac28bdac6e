"""The records of sparse attention and the indexer: their rules' levels and codes, and the two-phase interface."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import same_bits
from support.two_phase import Args, call, handles_of

import fusion_attention as fa
from fusion_attention import acl, aclnn, npu
from fusion_attention.contract import INVALID, NULL_POINTER, TILING, ContractError, Op, bind
from fusion_attention.contract.sampling import sample
from fusion_attention.ops import RECORDS
from fusion_attention.ops.indexer import definitions as indexer
from fusion_attention.ops.indexer_loss import definitions as indexer_loss
from fusion_attention.ops.shared.checks import pages_exist
from fusion_attention.ops.sparse import api_definition
from fusion_attention.ops.sparse import definitions as sparse
from fusion_attention.ops.sparse.call import narrow
from fusion_attention.ops.sparse.checks import entries_fit
from fusion_attention.torch_ops.eager import run

OPS = {op.name: op for op in (*sparse.RECORDS, *indexer.RECORDS, *indexer_loss.RECORDS)}
ACLNN = {op.name: op for op in (*sparse.ACLNN, *indexer.ACLNN, *indexer_loss.ACLNN)}

# Levels and codes restated (docs/rulings.md 15): what is not listed is meaning, and 561002.
LIMITS = {
    *(("query", t) for t in ("float16 or bfloat16", "1, 2, 4, ... 128 heads", "D == 512", "D == 128", "N1 <= 64")),
    *(
        ("key", "N2 == 1"),
        ("value", "Dv == 512"),
        ("query_rope", "Dr == 64"),
        ("attention_mode", "attention_mode == 2"),
    ),
    ("sparse_block_size", "a power of two"),
    ("sparse_block_size", "a divisor of the page size"),
    ("sparse_block_size", "sparse_block_size in (1, 8, 16, 32, 64)"),
    ("block_table", "Ps % 16 == 0 and Ps <= 1024"),
    ("block_table", "int32"),
    ("sparse_indices", "lists of 2048 entries"),
    ("sparse_count", "1 to 2048, 3072, 4096, ... 8192"),
    ("return_values", "no values of paged keys"),
    *(
        ("query", t)
        for t in ("N1 in (8, 16, 32, 64, 128)", "N1 in (32, 64, 128)", "no more rows than keys in a sequence")
    ),
    *(("query_index", t) for t in ("float16 or bfloat16", "Ni in (8, 16, 32, 64)", "N1 in (8, 16, 32, 64)")),
    *(("query_index", t) for t in ("D == 128", "Di == 128", "no more rows than keys in a sequence")),
    *((t, "up to 256 sequences") for t in ("query", "query_index")),
    *(("key", "N2 == N1"), ("sparse_mode", "sparse_mode == 3")),
    ("actual_seq_qlen", "no end above that of the keys"),
    *((t, "at most 131072 tokens in a sequence") for t in ("query", "query_index")),
    *((t, "no limit: 2147483647, or the largest int64") for t in ("pre_tokens", "next_tokens")),
    *(("value", "value rows"), ("weights", "float16 or bfloat16")),
}
CONTENT = {
    ("sparse_indices", "at most as many entries as blocks with visible keys"),
    ("sparse_indices", "blocks with keys that are visible to the row"),
}
DOUBTS = {
    ("actual_seq_qlen", "sequences that take up all T1 rows of the tensor"),
    ("actual_seq_kvlen", "sequences that take up all T2 rows of the tensor"),
    ("sparse_count", "at most max(S2, 8192)"),
    ("sparse_indices", "no entry behind a -1"),
}
MISSING = {"actual_seq_qlen is not None", "actual_seq_kvlen is not None", "(query_rope is None) == (key_rope is None)"}
MISSING |= {"value is not None", "(block_table is not None) == (layout_kv == 'PA_BSND')"}
SHAPES_AND_DTYPES = {
    *(("query", t) for t in ("1 <= D <= 768", "float16 or bfloat16", "D == 512", "D == 128")),
    *(
        ("value", "1 <= Dv <= 768"),
        ("value", "Dv == 512"),
        ("query_rope", "1 <= Dr <= 768"),
        ("query_rope", "Dr == 64"),
    ),
    *(("attention_out", "rows as long as the key's"), ("dy", "rows as long as the key's")),
    ("block_table", "int32"),
    *(("query_index", t) for t in ("float16 or bfloat16", "D == 128", "Di == 128")),
    *(("query_index", t) for t in ("1 <= D <= 768", "1 <= Di <= 768")),
    *(("weights", f"the dtype of {t}, or float32") for t in ("q", "query_index")),
    *(("weights", f"one weight for every head of {t}") for t in ("q", "query", "index_q", "query_index")),
    ("weights", "float16 or bfloat16"),
    *(("softmax_max", "a last axis of N1 / N2"), ("sparse_indices", "lists of at least one entry")),
    *(("weights", "the dtype of query, or float32"), ("layout_kv", "layout, or PA_BSND")),
    ("sparse_values_out", "sparse_count values per row"),
    ("sparse_indices_out", "sparse_count indices per row"),
}


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_levels_and_codes(op: Op) -> None:
    for rule in op.asked:
        key = rule.param, rule.expected
        levels = {"limit": LIMITS, "content": CONTENT, "doubt": DOUBTS}
        assert rule.level == next((level for level, keys in levels.items() if key in keys), "meaning"), key
        wanted = NULL_POINTER if rule.check in MISSING else INVALID if key in SHAPES_AND_DTYPES else TILING
        assert rule.code == wanted, key


# ---------------------------------------------------------------------------------------------- the two-phase interface


def outputs_of(op: Op, args: Args) -> dict[str, torch.Tensor]:
    """Poisoned memory for the results of a call, where there can be any."""
    try:
        call = op.lower(bind(op, args, reads=False))  # type: ignore[misc]
    except ContractError:
        return {}
    return {name: torch.full_like(tensor, 77) for name, tensor in call.results().items() if name in op.by_name}


VARIANTS: dict[str, Args] = {
    "plain": {},
    "shared": {"value": None},
    "rope": {"query_rope": True, "key_rope": True},
    "everything": {"return_softmax_lse": True, "return_values": True, "sparse_mode": 0, "K": 5, "D": 48, "Dv": 48},
    "heads": {"N1": 6, "N2": 3, "G": 2},
    "blocks": {"sparse_block_size": 4},
    "float32": dict.fromkeys(("query", "query_index", "weights"), (True, "float32")),
}


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize("layout", ["BSND", "TND"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("op", ACLNN.values(), ids=ACLNN)
def test_it_gives_the_bytes_of_a_plain_run(op: Op, variant: str, layout: str) -> None:
    args = sample(op, layout=layout, **VARIANTS[variant])
    outputs = outputs_of(op, args)
    assert call(op, args, outputs, tensors=True, strict=variant in ("plain", "rope")) == (0, 0), (
        acl.get_recent_err_msg()
    )
    want = run(op.lower(bind(op, args)))  # type: ignore[misc]
    assert outputs.keys() == want.keys() & op.by_name.keys()
    for name, tensor in outputs.items():
        same_bits(tensor, want[name], name)


@pytest.mark.usefixtures("runtime")
def test_outputs_of_any_strides() -> None:
    op = sparse.GRAD_V1
    args = sample(op, K=4, D=16, Dv=16)
    want = run(op.lower(bind(op, args)))  # type: ignore[misc]
    outputs = {
        name: torch.full((*t.shape[::-1], 2), 7.0, dtype=t.dtype)[..., 0].permute(3, 2, 1, 0)
        for name, t in want.items()
    }
    assert call(op, args, outputs, tensors=True, strict=False) == (0, 0), acl.get_recent_err_msg()
    for name, tensor in want.items():
        same_bits(outputs[name], tensor, name)


@pytest.mark.usefixtures("runtime")
def test_what_is_not_asked_for_is_null_or_empty() -> None:
    op = sparse.V1
    args = sample(op)
    for blank in (None, torch.empty(0), torch.empty(())):
        outputs: dict[str, Any] = {**outputs_of(op, args), "softmax_max": blank, "softmax_sum": blank}
        assert call(op, args, outputs, tensors=True) == (0, 0), acl.get_recent_err_msg()
    given = torch.zeros(2, 1, 4, 4)
    assert call(op, args, {**outputs_of(op, args), "softmax_max": given}, tensors=True)[0] == TILING
    assert "softmax_max (softmaxMax): expected None or an empty tensor" in acl.get_recent_err_msg()
    lacking = {"attention_out": outputs_of(op, args)["attention_out"]}
    assert call(op, {**args, "return_softmax_lse": True}, lacking, tensors=True)[0] == NULL_POINTER


@pytest.mark.usefixtures("runtime")
def test_content_may_come_between_the_phases() -> None:
    """Lists and lengths that phase 2 finds are those that count."""
    op = sparse.V1
    args = sample(op, layout="TND", K=4, D=16, Dv=16)
    lists = torch.full_like(args["sparse_indices"], 1 << 20)
    ends = torch.tensor([1, 8]), torch.tensor([5, 12])
    given = {**args, "sparse_indices": lists}
    outputs = outputs_of(op, args)
    given |= dict(zip(("actual_seq_qlen", "actual_seq_kvlen"), ends, strict=True))
    handles = handles_of(op, given, outputs).values()
    ret, size, executor = aclnn.aclnnSparseFlashAttentionGetWorkspaceSize(*handles, strict=False)
    assert ret == 0, acl.get_recent_err_msg()
    lists.copy_(args["sparse_indices"])
    ends[0].copy_(torch.tensor([3, 8]))
    workspace = acl.rt.malloc(2 * size + 1024)[0]
    assert aclnn.aclnnSparseFlashAttention(workspace, 2 * size + 1024, executor, None) == 0, acl.get_recent_err_msg()
    want = run(op.lower(bind(op, args)))  # type: ignore[misc]
    same_bits(outputs["attention_out"], want["attention_out"], "attention_out")


def test_an_empty_query() -> None:
    for op in (sparse.TORCH_GRAD, indexer.TORCH_GRAD):
        args = sample(op, S1=0, D=16, Dv=16, K=4)
        got = getattr(npu, op.name)(
            **{p.shown: args[p.name] for p in op.params if p.name in args and not getattr(p, "output", False)}
        )
        assert got[0].numel() == 0
        assert not got[1].any()
        assert all(not t.any() for t in got)


def test_lengths_of_every_kind() -> None:
    op = api_definition.RECORD
    legal = sample(op, layout="TND")
    for kind in (list, tuple, np.array, torch.tensor, lambda n: torch.tensor(n, dtype=torch.int32)):
        given = {n: kind(legal[n]) for n in ("actual_seq_qlen", "actual_seq_kvlen")}
        assert bind(op, {**legal, **given})["q_len"].tolist() == [3, 5]
    assert set(RECORDS) >= set(OPS)


def test_what_lies_on_a_device_is_read_on_request_alone() -> None:
    """Reading it waits for the device."""
    elsewhere: Any = SimpleNamespace(is_meta=False, is_cpu=False)  # and nothing else of a tensor
    lengths = np.array([3])
    checks = (
        lambda: entries_fit(elsewhere, "TND", lengths, lengths, 1),
        lambda: pages_exist(elsewhere, lengths, 16, 2),
    )
    for check in checks:
        assert check() is True
        with fa.strict(False, check_content=True), pytest.raises(AttributeError):
            check()


def test_an_entry_that_32_bits_do_not_hold_stays_outside() -> None:
    lists = torch.tensor([[5, (1 << 32) + 3, 1 << 31, -(1 << 32), -1]])
    assert narrow(lists).tolist() == [[5, (1 << 31) - 1, (1 << 31) - 1, -1, -1]]
    assert narrow(lists).dtype == torch.int32
