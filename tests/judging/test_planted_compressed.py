"""Mistakes planted in captured calls of examples/train_v4.py (DeepSeek-V4 layers), and the judge's verdicts."""

from pathlib import Path

import pytest
import torch
from support.planted_compressed import EARLY, FAR, TOKENS, Captures, attended, captured, pooled, recording

import fusion_attention as fa
from fusion_attention.captures.reader import Recording, read
from fusion_attention.judging.calls import JudgeError, from_recording
from fusion_attention.judging.judge import diagnose, judged


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Captures:
    return captured(tmp_path_factory.mktemp("captures"))


@pytest.fixture
def call(captures: Captures) -> Recording:
    """A call of compress with overlapping windows."""
    calls = (recording(captures, "compress", n) for n in range(len(captures["compress"])))
    return next(c for c in calls if c.args["overlap"])


def test_captured_calls_of_train_v4_example_are_right(captures: Captures) -> None:
    """The judge has no formula for the probabilities of compressed keys."""
    judgeable = {
        "attention", "attention-backward", "compressed_attention", "compressed_attention-backward", "lightning_indexer",
        "indexer_target_loss", "compress", "compress-backward",
    }  # fmt: skip
    assert judgeable <= captures.keys()
    for name in judgeable:
        for number in range(len(captures[name])):
            result = judged(from_recording(recording(captures, name, number)), search=False, backends=False)
            assert result.verdict == "right", result
    norm = recording(captures, "cann_ops_transformer.sparse_flash_mla_softmax_l1_norm")
    with pytest.raises(JudgeError, match="sparse_flash_mla_softmax_l1_norm: the judge has no formula for it"):
        judged(from_recording(norm), search=False)


@pytest.mark.parametrize("wrong", ["", "lse-sink", "scale-missing", EARLY])
def test_planted_mistakes_of_sparse_flash_mla_are_diagnosed(wrong: str, captures: Captures) -> None:
    """The captured call is passed as a call of sparse_flash_mla, with softmax_lse."""
    call = recording(captures, "compressed_attention", 1)
    q, k, c, sinks = (call.args[name] for name in ("query", "key", "key_compressed", "sinks"))
    inputs = {
        "q": q, "ori_kv": k, "cmp_kv": c, "sinks": sinks, "cmp_residual_kv": [TOKENS % FAR] * len(q), "cmp_ratio": FAR,
        "softmax_scale": q.shape[-1] ** -0.5, "ori_mask_mode": 4, "cmp_mask_mode": 3, "ori_win_right": 0,
        "ori_win_left": -call.args["band"].lo, "return_softmax_lse": True,
    }  # fmt: skip
    results = attended(call.args, wrong)
    outputs = {
        "attention_out": results["attention_out"],
        "softmax_lse": results["softmax_max"] + results["softmax_sum"].log(),
    }
    result = diagnose("cann_ops_transformer.sparse_flash_mla", inputs, outputs)
    assert result.verdict == ("wrong" if wrong else "right"), result
    assert [m.name for m in result.mistakes][:1] == ([wrong.partition(":")[0]] if wrong else []), result
    assert {*result.outputs} == {*outputs}


@pytest.mark.parametrize("wrong", ["", "compressor-halves", "compressor-first-window", "position-bias-missing"])
def test_planted_mistakes_of_compress_are_diagnosed(wrong: str, call: Recording) -> None:
    bias = call.args["position_bias"]
    bias.copy_(torch.randn(bias.shape, generator=torch.Generator().manual_seed(1)))  # 0 before the first step
    result = diagnose("compress", call.args, {"out": pooled(call.args, wrong)})
    assert result.verdict == ("wrong" if wrong else "right"), result
    assert [m.name for m in result.mistakes][:1] == ([wrong] if wrong else []), result


def test_a_mistake_that_does_not_explain_all_errors_is_not_named(call: Recording) -> None:
    out = pooled(call.args, "compressor-halves")
    out[0, -1, 0, 0] += 1
    result = diagnose("compress", call.args, {"out": out})
    assert result.verdict == "wrong", result
    assert not result.mistakes, result


def test_position_bias_gradient_summed_over_heads_is_judged_right(tmp_path: Path) -> None:
    kv, gate, bias = (torch.randn(*shape, requires_grad=True) for shape in ((1, 8, 3, 4), (1, 8, 3, 4), (4, 4)))
    with fa.capture(tmp_path) as recorded:
        fa.compress(kv, gate, ratio=4, position_bias=bias).square().sum().backward()
    calls = [from_recording(read(file, torch.device("cpu"))) for file in recorded.files]
    results = [judged(call, search=False, backends=False) for call in calls]
    assert [result.verdict for result in results] == ["right", "right"], results
    assert "dposition_bias" in results[1].outputs
