"""The limits of CANN's pages, through the two-phase interface: blanks, sizes, reserved values."""

import warnings
from typing import Any

import pytest
import torch
from support.bits import same
from support.two_phase import V2, Args, done, handles_of, outputs_of

from fusion_attention import ContractError, acl, aclnn, npu
from fusion_attention.contract.sampling import sample
from fusion_attention.ops import RECORDS
from fusion_attention.testing.drawn import compare_with

pytestmark = pytest.mark.usefixtures("runtime")
BLANKS = {"empty": torch.zeros(0, dtype=torch.int64), "without dimensions": torch.tensor(3)}


def refused(name: str, args: Args, **options: Any) -> tuple[int, str]:
    """The code of phase 1, and its text; nothing is run."""
    op = RECORDS[name]
    handles = handles_of(op, args, outputs_of(op, args)).values()
    return getattr(aclnn, name + "GetWorkspaceSize")(*handles, **options)[0], acl.get_recent_err_msg()


# --------------------------------------------------------------------------------------------------- blanks are absent

ABSENT = {
    "left padding": ("aclnnIncreFlashAttentionV4", {"actual_seq_lengths": [4, 5]}, ("kv_padding_size",)),
    "left padding without lengths": ("aclnnIncreFlashAttentionV4", {}, ("kv_padding_size",)),
    "cache lengths": ("aclnnIncreFlashAttentionV4", {}, ("actual_seq_lengths",)),
    "padded lengths": ("aclnnSparseFlashAttentionGrad", {}, ("actual_seq_qlen", "actual_seq_kvlen")),
    "a prefix": ("aclnnFlashAttentionScoreV2", {}, ("prefix", "q_start_idx", "kv_start_idx")),
}


@pytest.mark.parametrize("blank", BLANKS)
@pytest.mark.parametrize("case", ABSENT)
def test_a_tensor_without_elements_is_no_array(case: str, blank: str) -> None:
    name, settings, arrays = ABSENT[case]
    op = RECORDS[name]
    args = sample(op, **settings)
    want = done(op, args)
    got = done(op, args | dict.fromkeys(arrays, BLANKS[blank]))
    assert all(same(got[key], want[key]) for key in want)


def test_a_needed_array_without_elements_is_missing() -> None:
    args = sample(RECORDS["aclnnSparseFlashAttentionGrad"], layout="TND")
    ret, text = refused("aclnnSparseFlashAttentionGrad", args | {"actual_seq_qlen": BLANKS["empty"]})
    assert ret == 161001
    assert (
        "actual_seq_lengths_query (actualSeqLengthsQueryOptional): expected the lengths of packed sequences, got None"
        in text
    )


def test_the_npu_interface_takes_an_empty_tensor_too() -> None:
    args = sample(RECORDS["npu_incre_flash_attention"], actual_seq_lengths=[4, 5])
    given = {p.shown: args[p.name] for p in RECORDS["npu_incre_flash_attention"].tensors()}
    more = {"num_heads": 4, "num_key_value_heads": 2, "actual_seq_lengths": [4, 5]}
    want = npu.npu_incre_flash_attention(**given, **more)
    assert same(npu.npu_incre_flash_attention(**given, **more, kv_padding_size=BLANKS["empty"]), want)
    with pytest.raises(ContractError, match="kv_padding_size: expected integers"):
        npu.npu_incre_flash_attention(**given, **more, kv_padding_size=BLANKS["without dimensions"])


# ------------------------------------------------------------------------------------------------ training attention

BACK_V3 = "aclnnFlashAttentionUnpaddingScoreGradV3"
TINY = {"N1": 1, "N2": 1, "D": 8, "Dv": 8}


def ends(count: int) -> Args:
    each = [*range(1, count + 1)]
    return {"actual_seq_qlen": each, "actual_seq_kvlen": each, "T1": count, "T2": count, **TINY}


# (operator, what to change in its sample, code): the largest that its page lets through, and one step beyond.
EDGES: list[tuple[str, Args, int]] = [
    *((BACK_V3, {"D": d, "Dv": d}, code) for d, code in ((512, 0), (520, 161002))),
    *(
        (BACK_V3, {"T2": (1 << 20) + more, "actual_seq_kvlen": [5, (1 << 20) + more], **TINY}, code)
        for more, code in ((0, 0), (1, 561002))
    ),
    *((BACK_V3, ends(n), code) for n, code in ((2048, 0), (2049, 561002))),
    *(
        (BACK_V3, {**ends(n), "atten_mask": "3072 2048", "sparse_mode": 6, "prefix": [0] * n}, code)
        for n, code in ((1024, 0), (1025, 561002))
    ),
    (BACK_V3, {"D": 12, "Dv": 12}, 161002),
    (BACK_V3, {"pse": "1 N1 1024 S2"}, 161002),
    (BACK_V3, {"drop_mask": "1024", "keep_prob": 0.5}, 161002),
    (BACK_V3, {"keep_prob": 0.5}, 161002),
    (BACK_V3, {"atten_mask": None}, 161001),
    *((BACK_V3, {"pse_type": kind}, code) for kind, code in ((0, 0), (1, 0), (2, 161002), (4, 561002))),
    (BACK_V3, {"inner_precise": 7}, 0),
    (BACK_V3, {"padding_mask": ("S1 S2", "float64")}, 161002),
    (BACK_V3, {"padding_mask": ("S1 S2", "bool")}, 561002),
    (BACK_V3, {"softmax_in": ("T1 N1 8", "int8")}, 161002),
    (BACK_V3, {"softmax_in": ("T1 N1 8", "float32")}, 561002),
    *((V2.name, {"D": d, "Dv": d}, code) for d, code in ((512, 0), (513, 161002), (768, 161002))),
    (V2.name, {"Dv": 4}, 161002),
    *(
        (V2.name, {"B": 1, "S1": 1, "S2": (1 << 20) + more, **TINY, "D": 1, "Dv": 1}, code)
        for more, code in ((0, 0), (1, 561002))
    ),
    (V2.name, {"B": (1 << 21) + 1, "S1": 1, "S2": 1, **TINY, "D": 1, "Dv": 1}, 561002),
    *(
        (
            V2.name,
            {"B": n, "S1": 1, "S2": 1, **TINY, "atten_mask": "3072 2048", "sparse_mode": 6, "prefix": [0] * n},
            code,
        )
        for n, code in ((2048, 0), (2049, 561002))
    ),
    (V2.name, {"inner_precise": 3}, 561002),
    (V2.name, {"pse_type": 0}, 561002),
    ("aclnnFlashAttentionScoreV3", {"D": 768, "Dv": 768}, 0),
    ("aclnnFlashAttentionVarLenScoreV5", {"D": 768, "Dv": 4}, 0),
    ("aclnnFlashAttentionUnpaddingScoreGradV5", {"pse": "1 N1 1024 S2"}, 0),
]


SELECT, LOSS = "aclnnSparseFlashAttentionGrad", "aclnnSparseLightningIndexerGradKLLoss"
PACKED = {"layout": "TND"}


def long(tokens: int) -> Args:
    """One row over so many keys, which lie in one place."""
    one = torch.zeros(1, 1, 1, 1, dtype=torch.float16)
    keys = {"key": one.expand(1, tokens, 1, 512), "key_index": one.expand(1, tokens, 1, 128)}
    return {"B": 1, "S1": 1, "S2": tokens, **keys, "value": keys["key"]}


EDGES += [
    *((name, {"B": n, "S1": 1}, code) for name in (SELECT, LOSS) for n, code in ((256, 0), (257, 561002))),
    *((name, long(n), code) for name in (SELECT, LOSS) for n, code in ((1 << 17, 0), ((1 << 17) + 1, 561002))),
    *((name, {**PACKED, "actual_seq_qlen": [3, 5]}, 561002) for name in (SELECT, LOSS)),
    *((name, {**PACKED, "actual_seq_kvlen": [5, 7]}, 561002) for name in (SELECT, LOSS)),
    *((name, {"K": 1024}, 561002) for name in (SELECT, LOSS)),
    *((SELECT, {"pre_tokens": n, "next_tokens": n}, code) for n, code in (((1 << 31) - 1, 0), (65536, 561002))),
    (LOSS, {"pre_tokens": 65536, "next_tokens": 65536}, 0),
    (SELECT, {"value": None}, 161001),
    (LOSS, {"weights": ("B S1 Ni", "float32")}, 161002),
]


DECODE = "aclnnIncreFlashAttentionV4"
PAGES = {"block_table": "B 2", "block_size": 16, "actual_seq_lengths": [20, 32]}


def many_heads(heads: int) -> Args:
    """Pages whose lines hold so many heads of 512 elements."""
    lines = torch.zeros(1, 1, 1, dtype=torch.float16).expand(4, 16, heads * 512).contiguous()
    many = dict.fromkeys(("N1", "N2", "num_heads", "num_key_value_heads"), heads)
    return {**PAGES, **many, "D": 512, "key": lines, "value": lines}


def gaps(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.zeros(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2]


BY_HEADS = torch.zeros(1, 1, 1, 1, dtype=torch.float16).expand(4, 129, 16, 512).contiguous()
EDGES += [
    *((DECODE, many_heads(n), code) for n, code in ((128, 0), (129, 561002))),
    (DECODE, {"input_layout": "BNSD", **many_heads(129), "key": BY_HEADS, "value": BY_HEADS}, 0),
    (DECODE, {"atten_mask": gaps(2, 6, dtype=torch.bool)}, 561002),
    (DECODE, {"pse_shift": gaps(2, 4, 1, 6)}, 561002),
    (DECODE, {"attention_out": gaps(2, 1, 64)}, 561002),
    (DECODE, {**PAGES, "key": "8 16 N2*D", "value": "8 16 N2*D", "block_table": gaps(2, 2, dtype=torch.int32)}, 561002),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "settings", "code"), EDGES)
def test_the_edges_of_a_page(name: str, settings: Args, code: int) -> None:
    """At its default a call within the page is taken; one beyond has the page's code, and computes when not strict."""
    op = RECORDS[name]
    args = sample(op, **settings)
    ret, text = refused(name, args)
    assert ret == code, text
    if code and not {"pse_type", "keep_prob"} & settings.keys():
        assert refused(name, args, strict=False)[0] == 0


def test_a_layout_without_a_default_is_required() -> None:
    for name, code in ((SELECT, 0), (LOSS, 161001)):  # their pages have layoutOptional, and layout
        op, args = RECORDS[name], sample(RECORDS[name])
        handles = handles_of(op, args | {"layout": None}, outputs_of(op, args)).values()
        assert getattr(aclnn, name + "GetWorkspaceSize")(*handles)[0] == code


@pytest.mark.parametrize("mask", ["S1 S2", "1 1 S1 S2", "B 1 S1 S2", "B N1 S1 S2"])
def test_mode_5_takes_every_mask_of_the_page(mask: str) -> None:
    """A mask and prefixes both remove keys; one mask for prefixes that differ is worth a warning."""
    args = sample(V2, atten_mask=(mask, "zeros"), sparse_mode=5, prefix=[4, 6])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert refused(V2.name, args)[0] == 0, acl.get_recent_err_msg()
        assert refused(V2.name, args | {"prefix": [5, 5]})[0] == 0
    shared = mask[0] != "B"
    assert ["expected a mask for every sequence" in str(w.message) for w in caught] == [True] * shared


# --------------------------------------------------------------------------------------------- one start index given


@pytest.mark.parametrize("layout", ["BSND", "TND"])
@pytest.mark.parametrize("given", ["q_start_idx", "kv_start_idx"])
@pytest.mark.parametrize("pse_type", [2, 3])
def test_the_other_start_index_is_zero(pse_type: int, given: str, layout: str) -> None:
    """Forward by formula; the gradient's bits as with the zero said."""
    name = "aclnnFlashAttentionScoreV2" if layout == "BSND" else "aclnnFlashAttentionVarLenScoreV2"
    lengths = {"S1": 6, "S2": 6, "actual_seq_qlen": [6, 12], "actual_seq_kvlen": [6, 12], "T1": 12, "T2": 12}
    lengths |= {"input_layout": layout, "scale": 0.5, "pse_type": pse_type, "pse": ("N1", "float32"), given: [9]}
    lengths |= dict.fromkeys(("query", "key", "value"), (True, "float32"))
    args = sample(RECORDS[name], **lengths)
    other = ({"q_start_idx", "kv_start_idx"} - {given}).pop()
    out = done(RECORDS[name], args)
    start = {given: 9, other: 0}
    rows, keys = torch.arange(6)[:, None] + start["q_start_idx"], torch.arange(6) + start["kv_start_idx"]

    def formula() -> torch.Tensor:
        q, k, v = (args[n].reshape(2, 6, -1, 8).double() for n in ("query", "key", "value"))
        k, v = (t.repeat_interleave(2, 2) for t in (k, v))
        distance = (keys - rows).abs().double()
        bias = -args["pse"].double()[:, None, None] * (distance if pse_type == 2 else distance.sqrt())
        p = (0.5 * torch.einsum("bqhd,bkhd->bhqk", q, k) + bias).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", p, v).reshape(out["attention_out"].shape)

    compare_with(name, out["attention_out"], formula)
    back = RECORDS[name.replace("VarLenScore", "UnpaddingScoreGrad").replace("AttentionScore", "AttentionScoreGrad")]
    saved = {"softmax_max": out["softmax_max"], "softmax_sum": out["softmax_sum"], "attention_in": out["attention_out"]}
    gradients = done(back, sample(back, **{**lengths, "dy": (True, "float32")}) | saved)
    resaved = done(back, sample(back, **{**lengths, "dy": (True, "float32"), other: [0]}) | saved)
    assert all(same(gradients[key], resaved[key]) for key in resaved)
