"""The judge reports verdict, place and cause, also for replays and backward calls."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.planted_dense import BASE, CAUSAL, planted_call

import fusion_attention as fa
from fusion_attention.judging.chi_square_limits import Errors
from fusion_attention.judging.error_location import Map
from fusion_attention.judging.standards import Tally
from fusion_attention.npu import npu_fusion_attention


@pytest.mark.parametrize("mode", [2, 3])
def test_wrong_causal_alignment_is_diagnosed(mode: int) -> None:
    result = planted_call(replace(CAUSAL, sparse_mode=mode), "causal-alignment")
    judgement = fa.diagnose(result.operator, result.inputs, result.outputs)
    assert [m.name for m in judgement.mistakes] == ["causal-alignment"]
    lines = str(judgement).splitlines()
    assert len(lines) == 5
    assert lines[1] == "verdict  wrong (attention_out, softmax_max, softmax_sum)"
    assert "tensor" not in str(judgement)
    assert json.loads(json.dumps(judgement.json()))["mistakes"][0]["confirmed"]
    assert fa.judge(result.operator, result.inputs, result.outputs).mistakes == ()


def test_indistinguishable_mistakes_are_all_reported() -> None:
    """In this call each of the three mistakes makes all keys visible to every row."""
    judgement = planted_call(replace(CAUSAL, q_len=(30,), kv_len=(70,)), "mask-ignored").diagnosed()
    assert {m.name for m in judgement.mistakes} == {"mask-ignored", "mask-ends-early", "causal-alignment"}
    assert all(m.confirmed for m in judgement.mistakes)


def test_mistake_is_diagnosed_despite_float16_noise() -> None:
    result = planted_call(replace(BASE, dtype="float32"), "scale-missing")
    result.outputs["attention_out"] = result.outputs["attention_out"].half().float()
    judgement = result.diagnosed()
    assert judgement.verdict == "wrong"
    assert judgement.mistakes[0].name == "scale-missing"
    assert judgement.mistakes[0].noisy


def test_replay_of_captures_reports_right_or_wrong(tmp_path: Path) -> None:
    q = torch.randn(1, 70, 2, 16, requires_grad=True)
    mask = torch.ones(2048, 2048).triu(1).bool()
    with fa.capture(tmp_path) as recorded:
        out = npu_fusion_attention(q, q, q, 2, "BSND", scale=0.25, atten_mask=mask, sparse_mode=3)[0]
        direct = fa.attention(q, q.detach(), q.detach(), band=fa.Band.causal())
        (out.sum() + direct.square().sum()).backward()
    names = [file.name.partition("-")[2] for file in recorded.files]
    assert names[:2] == ["npu_fusion_attention.safetensors", "attention.safetensors"]
    assert sorted(names[2:]) == ["attention-backward.safetensors", "npu_fusion_attention-backward.safetensors"]
    assert recorded.files[0].stat().st_size < 700_000  # 2048 x 2048 bits, not bytes
    for file in recorded.files:
        again = fa.replay(file)
        assert again.worst == 0.0
        lines = repr(again).splitlines()
        assert len(lines) == 5
        assert lines[1] == "verdict  right: as exact as a kernel that sums in float32"
        assert "tensor(" not in repr(again)
        assert again.judgement.passes
    (full,) = (file for file in recorded.files if "npu_fusion_attention-backward" in file.name)
    assert fa.replay(full).recorded.keys() == {"dq", "dk", "dv"}
    wrong = fa.replay(recorded.files[0])
    wrong.recorded["attention_out"].mul_(1.5)
    assert repr(wrong).splitlines()[1] == "verdict  wrong (attention_out)"


def of_rows(bad: torch.Tensor) -> list[str]:
    """Sentences about a map of wrong elements, bool [heads, rows]."""
    tally = Tally(torch.float32, Errors([bad.shape[1]], bad.shape[0], 1))
    tally.errors.add(0, slice(None), slice(None), bad[..., None] * 81.0)
    return Map(tally).sentences()


def test_error_location_is_described_by_heads_rows_and_tiles() -> None:
    none = torch.zeros(4, 256, dtype=torch.bool)
    assert of_rows(none) == []
    assert of_rows(~none) == ["all 4 heads", "all 256 rows"]
    late = none.clone()
    late[1, 128:] = True
    assert of_rows(late) == ["head 1 of 4", "every row from 128 on (of 256); 128 is an edge of tiles of 128"]
    last = none.clone()
    last[:, -1] = True
    assert of_rows(last) == ["all 4 heads", "the last row alone"]
    tiles = none.clone()
    tiles[0].view(-1, 32)[:, 30:] = True
    assert of_rows(tiles)[1] == (
        "rows 30-31, 62-63, 94-95, 126-127 and 4 more of 256; "
        "the same rows (30-31, 62-63, 94-95, 126-127) of every tile of 128"
    )


@pytest.mark.parametrize("lane", [0, 3, 7])
@pytest.mark.parametrize("by", [0.01, -0.01, torch.nan])
def test_error_in_any_softmax_max_lane_is_wrong(lane: int, by: float) -> None:
    """CANN repeats a row's maximum and sum in eight lanes; its backward may read any of them."""
    result = planted_call(CAUSAL, "")
    top = result.outputs["softmax_max"]
    assert top.shape[-1] == 8
    assert fa.judge(result.operator, result.inputs, result.outputs).passes
    top[..., lane] += by
    assert fa.judge(result.operator, result.inputs, result.outputs).failing() == ["softmax_max"]


@pytest.mark.parametrize("rows", [1, 17])
def test_unwritten_output_is_diagnosed(rows: int) -> None:
    """If another mistake gives zeros too, the judge names each."""
    q, k = torch.randn(1, rows, 2, 8), torch.randn(1, 2, 2, 8)
    judgement = fa.diagnose(
        "attention", {"q": q, "k": k, "v": k, "band": fa.Band.causal()}, {"out": torch.zeros_like(q)}
    )
    assert "output-unwritten" in [m.name for m in judgement.mistakes if m.confirmed]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_output_rounded_to_a_coarser_dtype_is_wrong(dtype: torch.dtype) -> None:
    q = torch.randn(1, 16, 2, 64)
    out = fa.attention(q, q, q)
    inputs = dict.fromkeys("qkv", q)
    assert fa.judge("attention", inputs, {"out": out.double()}).passes
    assert fa.judge("attention", inputs, {"out": out.to(dtype)}).failing() == ["out"]
