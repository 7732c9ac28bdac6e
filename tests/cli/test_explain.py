"""`fusion-attention explain`: calls as text, as captures and in CANN's logs; violated rules and their fixes."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.commands import run as command

import fusion_attention as fa
from fusion_attention import npu
from fusion_attention.contract import Array, Op, Tensor
from fusion_attention.contract.sampling import InvalidSample, invalid_samples, sample
from fusion_attention.ir.mask import Band
from fusion_attention.ops import RECORDS
from fusion_attention.refusals import explanation
from fusion_attention.refusals.cann_logs import CODES, read_log
from fusion_attention.refusals.explanation import Explanation, explain, explain_arguments


def written(op: Op, args: Mapping[str, Any], interface: bool = True) -> str:
    """Returns the text of a call with every argument by name; interface: without outputs, which functions of torch_npu
    and of this package do not have."""
    words = []
    for p in op.params:
        value = args.get(p.name)
        if value is None or (interface and isinstance(p, Tensor) and p.output):
            continue
        if isinstance(p, Array) and isinstance(value, torch.Tensor):
            value = value.tolist()
        words.append(f"{p.shown}={word(value)}")
    return f"{op.name}({', '.join(words)})"


def word(value: Any) -> str:
    """Returns the text of a value; a tensor is written with its dtype and shape."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape)) or '()'}]"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(word, value)) + "]"
    if isinstance(value, np.ndarray):
        return str(value.tolist())
    if isinstance(value, Band):
        return f"Band({value.lo}, {value.hi}, {value.align!r}, {value.prefix!r})"
    if isinstance(value, float) and value != value:
        return "float('nan')"
    return f"float('{value}')" if isinstance(value, float) and abs(value) == float("inf") else repr(value)


# Without those of which some parameters of the definition are no arguments: a cache, and computed sizes.
OPERATORS = [name for name in RECORDS if name not in ("decode_attention", "compress")]
# Words of rules that a call's shapes and dtypes cannot violate.
UNSEEN = ("contiguous", "gradient", "shares no memory", "separate memory address")
HEADS = "f16[2,5,8,64], f16[2,5,8,64], f16[2,5,8,64], 8"
TOKENS = "bf16[300,8,64], bf16[300,8,64], bf16[300,8,64], 8"


def padded(words: str) -> str:
    return f'npu_fusion_attention({HEADS}, "BSND", scale=0.125, {words})'


def packed(q_ends: object, kv_ends: object) -> str:
    ends = f"actual_seq_qlen={q_ends}, actual_seq_kvlen={kv_ends}"
    return f'npu_fusion_attention({TOKENS}, "TND", scale=0.1, {ends})'


def sentences(explanation: Explanation, where: str = "everywhere") -> list[str]:
    return [f.sentence for f in explanation.findings if f.where == where]


# ------------------------------------------------------------------------------------------------ operator definitions


@pytest.mark.parametrize("name", OPERATORS)
def test_legal_call_of_every_operator_has_no_findings(name: str) -> None:
    op = RECORDS[name]
    result = explain(written(op, sample(op), interface=False))
    assert result.operator == name
    assert sentences(result) == []
    assert result.results
    assert set(result.computes) == {"cpu", "golden", "triton"}
    assert result.computes["golden"] == "yes"


def test_explain_finds_the_function_of_every_operator() -> None:
    assert all(callable(explanation._function(op)) for op in RECORDS.values())


def test_legal_call_of_compress_has_no_findings() -> None:
    result = explain('fa.compress(f32[9,1,16], f32[9,1,16], ratio=4, layout="TND", kv_len=[4, 5])')
    assert (sentences(result), result.results) == ([], {"out": "float32[2, 1, 16]"})


def broken_calls(op: Op, every: int) -> list[InvalidSample]:
    """About one in `every` of the calls that break one rule visible in their text, always the same calls."""
    read = {op.spell(rule.expected) for rule in op.applicable_rules if rule.reads or rule.level == "content"}
    outputs = {p.shown for p in op.tensors(output=True)}
    stated = {p.name for p in op.tensors(output=True) if op.name.startswith("npu_")}  # no arguments of these functions
    chosen = [one for one in invalid_samples(op) if zlib.crc32(one.id.encode()) % every == 0]
    shown = [one for one in chosen if one.expected not in read and one.param not in outputs]
    shown = [one for one in shown if all(one.args.get(name) is None for name in stated)]
    return [one for one in shown if not one.id.endswith("-type") and not any(word in one.expected for word in UNSEEN)]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("every", [40, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OPERATORS)
def test_explain_finds_the_broken_rule_of_an_invalid_call(name: str, every: int) -> None:
    op = RECORDS[name]
    for one in broken_calls(op, every):
        result = explain(written(op, one.args, interface=False))
        broken = [f for f in result.findings if f.param == one.param]
        assert broken, one.id
        if one.level in ("meaning", "limit"):
            assert result.broken, one.id
            assert one.code in [f.code for f in broken], one.id
            assert not one.expected or one.expected in [f.expected for f in broken], one.id
        assert (broken[0].where == "chip") == (one.level == "limit" and bool(op.source)) or one.level != "limit"


# --------------------------------------------------------------------------------------------------------------- calls


ATTENTION = "fa.attention(bf16[1,10,4,64], bf16[1,10,4,64], bf16[1,10,4,64], {})"


@pytest.mark.parametrize(
    ("call", "where", "sentence"),
    [
        ('npu_fusion_attention(f16[2,5,8,64], f16[2,5,3,64], f16[2,5,3,64], 8, "BSND")', "everywhere",
         "key: expected N2 > 0 and N1 % N2 == 0, got N2=3, N1=8"),
        ("torch_npu.npu_incre_flash_attention(f16[1,3,64], f16[1,9,64], f16[1,9,64], scale_value=0.125)", "chip",
         "query: expected S1 == 1, got S1=3"),
        (packed([100, 150, 50], [100, 250, 300]), "everywhere",
         "actual_seq_qlen: expected ends that never fall, or only to a tail of zeros, got item 2: 50 after 150"),
        (packed([50], [300]), "chip",
         "actual_seq_qlen: expected sequences that take up all T1 rows of the tensor, got T1=300, q_len=[50]"),
        ("fa.compress(f32[1,9,1,16], f32[1,9,1,16], ratio=0)", "everywhere", "ratio: expected ratio > 0, got 0"),
        ('fa.compress(f32[9,1,16], f32[9,1,16], ratio=4, layout="TND", kv_len=[4, 4])', "everywhere",
         "kv_len: expected the lengths of all sequences in kv, got [4, 4], 9 rows in the tensor"),
        (f'npu_fusion_attention({HEADS}, "BSND", headnum=8)', "everywhere",
         "npu_fusion_attention() got an unexpected keyword argument 'headnum'"),
        (ATTENTION.format("is_causal=True"), "everywhere",
         "attention() got an unexpected keyword argument 'is_causal'"),
        (ATTENTION.format("bf16[1,10,4,64]"), "everywhere", "attention() too many positional arguments"),
        (padded("atten_mask=f16[5,5]"), "everywhere", "atten_mask: expected bool or uint8, got float16"),
    ],
)  # fmt: skip
def test_explain_reports_the_expected_error_sentence(call: str, where: str, sentence: str) -> None:
    result = explain(call)
    assert sentence in sentences(result, where)
    assert result.broken


def test_explain_reads_and_reports_cann_parameter_names() -> None:
    rows = "query=f16[2,5,512], key=f16[2,5,512], value=f16[2,5,512]"
    call = f"aclnnFlashAttentionScoreGetWorkspaceSize({rows}, {{}}headNum=8)"
    result = explain(call.format('inputLayout="BSH", scaleValue=0.125, attenMaskOptional=bool[16,1,1,5], '))
    (broken,) = [f for f in result.findings if f.where == "everywhere"]
    assert (broken.param, broken.cann, broken.code) == ("atten_mask", "attenMaskOptional", 561002)
    missing = explain(call.format(""))
    assert "input_layout" in [f.param for f in missing.findings if f.code == 161001]


def test_explain_evaluates_torch_tensor_expressions() -> None:
    call = """
import torch, torch_npu
B, S, N, D = 2, 128, 8, 64
q = torch.randn(B, S, N, D, dtype=torch.bfloat16, device="npu")
k = torch.empty((B, S, 2, D)).to(torch.bfloat16).npu()
v = torch.zeros_like(k)
mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
ends = torch.tensor([S, 2 * S]).tolist()
out, *_ = torch_npu.npu_fusion_attention(
    q.view(B * S, N, D), k.flatten(0, 1), v.reshape(-1, 2, D), head_num=N, input_layout="TND",
    atten_mask=mask, sparse_mode=3, scale=D ** -0.5, actual_seq_qlen=ends, actual_seq_kvlen=[S] * 2,
)[0]
"""
    result = explain(call.replace("[S] * 2", "ends"))
    assert sentences(result) == sentences(result, "chip") == []
    assert result.sizes["T1"] == 256
    assert result.sizes["q_len"] == [128, 128]
    assert result.results["attention_out"] == "bfloat16[256, 8, 64]"
    assert result.unread == ("atten_mask",)
    assert explain(call).broken  # [S, S] are lengths, not ends


def test_explain_reads_bands_caches_and_positional_arguments() -> None:
    window = "fa.attention(bf16[1,9,4,64], bf16[1,9,4,64], bf16[1,9,4,64], band=fa.Band.window(3, 0), return_lse=True)"
    assert not explain(window).broken
    cache = "fa.decode_attention(f16[2,1,8,64], (f16[2,100,2,64], f16[2,100,2,64]), kv_len=[100, {}])"
    assert explain(cache.format(31)).results["out"] == "float16[2, 1, 8, 64]"
    assert [f.param for f in explain(cache.format(101)).findings] == ["kv_len"]
    named = (
        'npu_fusion_attention(query=f16[2,5,512], key=f16[2,5,512], value=f16[2,5,512], head_num=8, input_layout="BSH")'
    )
    by_position = 'npu_fusion_attention(f16[2,5,512], f16[2,5,512], f16[2,5,512], 8, "BSH")'
    assert explain(named) == explain(by_position)


def test_printed_explanation_shows_verdict_finding_and_fix() -> None:
    result = fa.explain('npu_fusion_attention(f16[2,5,8,64], f32[2,5,8,64], f16[2,5,8,64], 8, "BSND", scale=0.1)')
    lines = str(result).splitlines()
    assert lines[0].startswith("npu_fusion_attention: breaks one rule")
    assert lines[1] == "everywhere: key: expected float16 as query, got float32 (convert it with .to())"
    assert "fix: key in float16" in lines


def test_doubtful_call_is_a_warning_not_a_broken_rule() -> None:
    result = explain(padded("sparse_mode=2"))
    assert [f.param for f in result.findings] == ["sparse_mode"]
    assert {f.where for f in result.findings} <= {"chip", "warning"}


LENGTHS = [100, 150, 50]
FIXES = {
    packed(LENGTHS, LENGTHS):
        "cumulative ends in place of lengths: actual_seq_qlen=[100, 250, 300], actual_seq_kvlen=[100, 250, 300]",
    packed([0, 300], [300]): "without the leading 0 of cu_seqlens: actual_seq_qlen=[300]",
    padded("atten_mask=bool[2,1,1,5]"): "atten_mask=mask.expand(-1, -1, 5, -1)",
    padded("atten_mask=f16[5,5]"): "atten_mask as bool, true where a key is hidden",
    padded("sparse_mode=3, atten_mask=bool[5,5]"): "sparse_mode=1 for a mask of your own, or sparse_mode=0",
    'npu_fusion_attention(f16[2,8,90,64], f16[2,8,90,64], f16[2,8,90,64], 8, "BSND", scale=0.1)':
        'input_layout="BNSD", if this is the layout of the tensors',
    'npu_fusion_attention(f16[2,5,8,64], f16[2,5,8,64], f16[2,5,8,64], 4, "BSND", scale=0.1)':
        "head_num=8, an axis of query",
    'npu_fusion_attention(f16[2,5,8,64], f32[2,5,8,64], f16[2,5,8,64], 8, "BSND", scale=0.1)': "key in float16",
}  # fmt: skip


@pytest.mark.parametrize(("call", "fix"), FIXES.items())
def test_explain_suggests_the_fix_of_common_mistakes(call: str, fix: str) -> None:
    assert fix in explain(call).fixes


def test_explain_suggests_no_fix_when_no_single_change_works() -> None:
    result = explain('npu_fusion_attention(f16[2,5,8,64], f32[2,5,3,60], f16[9,5,7,64], 4, "BSND", scale=0.1)')
    assert result.broken
    assert result.fixes == ()
    # The call runs here; a change without effect on the chip is not offered as a fix.
    speculating = "npu_incre_flash_attention(f16[2,3,512], f16[2,9,512], f16[2,9,512], num_heads=8, scale_value=0.125)"
    assert fa.explain(speculating).fixes == ()


# ---------------------------------------------------------------------------------------------------------------- logs

HEAD = "RuntimeError: npu_{}:build/compiler_depend.ts:275 NPU function error: call {} failed, error code is {}\n"
BODY = """[ERROR] 2026-01-21-05:41:35 (PID:7, Device:0, RankID:-1) ERR00100 PTA call acl api failed.
EZ9999: Inner Error!
EZ9999[PID: 7] 2026-01-21-05:41:35.799.239 (EZ9999):  {}[FUNC:Check][FILE:some_tiling.cpp][LINE:904]
        TraceBack (most recent call last):
       Tiling failed[FUNC:Do][FILE:other.cpp][LINE:1]
"""


def log(function: str, operator: str, code: int, reason: str = "") -> str:
    return HEAD.format(function, operator, code) + (BODY.format(reason) if reason else "")


@pytest.mark.parametrize(
    ("text", "operator", "param", "fragment"),
    [
        (
            log("fused_infer_attention_score_out_symint", "aclnnFusedInferAttentionScoreV3", 561002,
                "When layout is TND, queryT(8) must be equal to the last element of actualSequenceLengthQ(5)"),
            "npu_fused_infer_attention_score", "actual_seq_lengths", "packed lengths that cover all rows of query",
        ),
        (
            log("fusion_attention", "aclnnFlashAttentionScore", 561103,
                "get unsupported atten_mask shape, the shape is [16, 1, 1, 1500]. B=[16], N=[20], Sq=[1500]"),
            "npu_fusion_attention", "atten_mask", "[B, 1, S1, S2]",
        ),
        (
            log("fused_infer_attention_score_symint", "aclnnFusedInferAttentionScoreV3", 561002,
                "key/value's actual sequence lengths shape size is 9, it should be bigger or equal to batch size(16)"),
            "npu_fused_infer_attention_score", "actual_seq_lengths_kv", "a length per sequence, or one",
        ),
        (
            log("fused_infer_attention_score", "aclnnFusedInferAttentionScoreV3", 561002,
                "When layout is TND, queryD(128) or keyD(128) must be 192, valueD(128) must be 192/128!"),
            "npu_fused_infer_attention_score", "query", "D and Dv of 64, 128, 192",
        ),
        (
            log("fusion_attention_v2", "aclnnFlashAttentionScoreV2", 561002, "pse shape is invalid, pseType is 1"),
            "npu_fusion_attention_v2", "pse", "shape",
        ),
    ],
)  # fmt: skip
def test_explain_maps_cann_log_to_likely_rules(text: str, operator: str, param: str, fragment: str) -> None:
    result = explain(text)
    assert result.operator == operator
    assert result.log is not None
    assert str(result.log.code) in result.verdict
    assert result.log.meaning in result.verdict
    hits = [f for f in result.findings if f.param == param and fragment in f"{f.expected} {f.fix}"]
    assert hits, [f.sentence for f in result.findings]
    assert len(result.findings) <= 4
    assert all(f.where == "likely" for f in result.findings)


@pytest.mark.parametrize("code", [161001, 161002, 561002, 361001, 507015, 507035])
def test_error_code_without_reason_is_explained_in_general(code: int) -> None:
    result = explain(log("fusion_attention", "aclnnFlashAttentionScore", code))
    assert CODES[code][0] in result.verdict
    (one,) = result.findings
    assert one.code == code
    assert "fusion-attention ops npu_fusion_attention" in one.fix


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("507015", "the text names no operator: 507015 (ACL_ERROR_RT_AICORE_EXCEPTION): a kernel was stopped"),
        ("161002 aclnnIncreFlashAttentionV4", "aclnnIncreFlashAttentionV4 failed with 161002 (ACLNN_ERR_PARAM_INV"),
        ("call aclnnFlashAttentionScore failed, error code is 599999", "failed with 599999: a code that is not known"),
        ("aclnnFlashAttentionScore failed", "aclnnFlashAttentionScore failed with no code: "),
        ("call aclnnMatmul failed, error code is 161002", "aclnnMatmul has no definition here"),
        ("561003", "the text names no operator: 561003"),
    ],
)
def test_explain_reads_incomplete_log_lines(text: str, verdict: str) -> None:
    assert verdict in explain(text).verdict


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("is_causal=True", "sparse_mode=3"),
        ("softmax_scale=0.1", "here: scale="),
        ("dropout_p=0.1", "keep_prob=1 - dropout_p"),
        ("cu_seqlens_q=[0, 3]", "actual_seq_qlen=cu_seqlens_q[1:]"),
        ("sparse_modes=2", "did you mean sparse_mode=?"),
        ("colour=2", "fusion-attention ops npu_fusion_attention"),
    ],
)
def test_explain_suggests_parameters_for_names_of_other_libraries(word: str, fix: str) -> None:
    (result,) = explain(f'npu_fusion_attention({HEADS}, "BSND", {word})').findings
    assert fix in result.fix


def test_explain_suggests_block_size_from_cache_shape() -> None:
    result = explain(
        "npu_fused_infer_attention_score(bf16[2,1,1024], bf16[100,128,1024], bf16[100,128,1024], num_heads=8, "
        'input_layout="BSH", block_table=i32[2,8], actual_seq_lengths_kv=[1024, 900])'
    )
    assert [f.param for f in result.findings] == ["block_size"]
    assert result.fixes == ("block_size=128, an axis of key",)


def test_explain_compares_the_call_with_the_log_error_code() -> None:
    wrong, right = packed([300, 100], [300, 100]), packed([100, 300], [100, 300])
    failed = log("fusion_attention", "aclnnFlashAttentionVarLenScore", 561002)
    assert "code 561002 of the log agrees" in explain(wrong, log=failed).verdict
    assert "CANN has a rule that is missing here" in explain(right, log=failed).verdict
    other = log("fusion_attention", "aclnnFlashAttentionVarLenScore", 161001)
    assert "code 161001 of the log does not agree" in explain(wrong, log=other).verdict


def test_read_log_extracts_code_operator_function_and_reasons() -> None:
    result = read_log(
        log("fusion_attention_v3_symint", "aclnnFlashAttentionScoreGetWorkspaceSize", 561002, "a reason.")
    )
    assert (result.code, result.operator) == (561002, "aclnnFlashAttentionScore")
    assert result.function == "npu_fusion_attention_v3"
    assert result.reasons == ("a reason",)  # what only says that it failed is left out
    timed = "EZ9999: [PID: 12] 2025-01-01-10:00:00.000.000 pse is bad[FUNC:Check][FILE:a.cpp][LINE:1]\n"
    assert read_log(log("fusion_attention", "aclnnFlashAttentionScore", 561002) + timed).reasons == ("pse is bad",)
    assert read_log("aclnnFlashAttentionScoreGetWorkspaceSize failed with aclnnStatus=161001.").code == 161001


# --------------------------------------------------------------------------------------------------- the command line


def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
    return command("explain", *arguments, stdin=stdin)


def test_explain_command_reads_text_files_stdin_and_logs(tmp_path: Path) -> None:
    legal, broken = f'npu_fusion_attention({HEADS}, "BSND", scale=0.1)', f'npu_fusion_attention({HEADS}, "BSNX")'
    code, out, _ = run(legal)
    assert code == 0
    assert "a legal call of npu_fusion_attention" in out
    code, out, _ = run(broken)
    assert code == 1
    assert "input_layout: expected one of BSND, BSH, " in out
    assert "[161002 ACLNN_ERR_PARAM_INVALID]" in out
    file, failed = tmp_path / "call.py", tmp_path / "failed.log"
    file.write_text(f"x = 1\n{broken}\n")
    failed.write_text(log("fusion_attention", "aclnnFlashAttentionScore", 161002))
    assert run(str(file))[:2] == (code, out) == run("-", stdin=broken)[:2]
    assert run(str(failed))[0] == 1
    assert "code 161002 of the log agrees" in run(str(file), "--log", str(failed))[1]
    assert "code 161002 of the log agrees" in run(broken, "--log", failed.read_text())[1]


def test_explain_json_contains_findings_and_fixes() -> None:
    code, out, _ = run(f'npu_fusion_attention({HEADS}, "BSNX", scale=0.1)', "--json")
    result = json.loads(out)
    assert code == 1
    assert result["operator"] == "npu_fusion_attention"
    assert result["findings"][0]["name"] == "ACLNN_ERR_PARAM_INVALID"
    assert result["findings"][0]["fix"]
    assert result["fixes"] == ['input_layout="BSND", if this is the layout of the tensors']
    code, out, _ = run("call aclnnFlashAttentionScore failed, error code is 161002", "--json")
    assert json.loads(out)["log"]["name"] == "ACLNN_ERR_PARAM_INVALID"


def test_explain_checks_tensor_values_of_a_capture(tmp_path: Path) -> None:
    q = torch.randn(1, 5, 8, 64).half()
    wrong = torch.zeros(2048, 2048, dtype=torch.bool)
    with fa.capture(tmp_path) as recorded:
        npu.npu_fusion_attention(q, q, q, 8, "BSND", atten_mask=wrong, sparse_mode=2, scale=0.125)
    code, out, _ = run(str(recorded.files[0]), "--json")
    result = json.loads(out)
    assert code == 1
    assert [f["param"] for f in result["findings"]] == ["atten_mask"]
    assert "compressed mask" in result["findings"][0]["expected"]
    assert result["unread"] == []


def test_explain_arguments_accepts_real_and_meta_tensors() -> None:
    op = RECORDS["npu_incre_flash_attention"]
    args = {name: value for name, value in sample(op).items() if value is not None}
    there = explain_arguments(op, args)
    assert there.unread == ()
    gone = {n: v.to("meta") if isinstance(v, torch.Tensor) else v for n, v in args.items()}
    assert sentences(explain_arguments(op, gone)) == sentences(there) == []
