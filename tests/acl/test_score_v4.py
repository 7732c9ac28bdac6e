"""FlashAttentionScoreV4 and its gradient: seed 0, masks and unsupported inputs. test_aclnn.py compares all results."""

from typing import Any

import pytest
import torch
from support.bits import same_bits
from support.two_phase import call, done, failed, outputs_of

from fusion_attention.contract.sampling import sample
from fusion_attention.ops.training.score_v4 import GRAD_V4, SCORE_V4

Tensor = torch.Tensor
pytestmark = pytest.mark.usefixtures("runtime")


def gradients_of(args: dict[str, Any], saved: dict[str, Tensor]) -> dict[str, Tensor]:
    given = {p.name: args.get(p.name) for p in GRAD_V4.params}
    given |= {"dy": saved["attention_out"], "attention_in": saved["attention_out"]}
    given |= {name: saved[name] for name in ("softmax_max", "softmax_sum")}
    return done(GRAD_V4, given)


def test_seed_0_draws_dropout_and_keep_prob_1_disables_dropout() -> None:
    args = sample(SCORE_V4, keep_prob=0.5, seed=0, offset=0)
    first, again = done(SCORE_V4, args)["attention_out"], done(SCORE_V4, args)["attention_out"]
    same_bits(again, first)
    other = done(SCORE_V4, {**args, "seed": 1})["attention_out"]
    all_kept = done(SCORE_V4, {**args, "keep_prob": 1.0})["attention_out"]
    assert not torch.equal(first, other)
    assert not torch.equal(first, all_kept)
    same_bits(done(SCORE_V4, {**args, "seed": 9, "offset": 4, "keep_prob": 1.0})["attention_out"], all_kept)
    saved = done(SCORE_V4, args)
    gradients = gradients_of(args, saved)
    wrong = gradients_of({**args, "seed": 1}, saved)
    assert not torch.equal(gradients["dv"], wrong["dv"])


def test_drop_mask_overrides_seed_and_offset() -> None:
    args = sample(SCORE_V4, input_layout="TND", keep_prob=0.5, seed=5, offset=1, drop_mask="1024")
    args["drop_mask"] = torch.randint(0, 256, (1024,), dtype=torch.uint8)
    want = done(SCORE_V4, {**args, "seed": 0, "offset": 0})
    same_bits(done(SCORE_V4, args), want)
    same_bits(gradients_of(args, want), gradients_of({**args, "seed": 0, "offset": 0}, want))


def test_trailing_zero_lengths_do_not_change_packed_results() -> None:
    """Zeros after the last cumulative end mean sequences without rows."""
    args = sample(SCORE_V4, input_layout="TND")
    longer = {name: [*args[name], 0, 0] for name in ("actual_seq_qlen", "actual_seq_kvlen")}
    same_bits(done(SCORE_V4, {**args, **longer}), done(SCORE_V4, args))


def test_rope_dims_and_float32_sink_beyond_chip_limits_need_strict_false() -> None:
    """Cases: head size other than 128 with rope, and float32 with a sink."""
    narrow = sample(SCORE_V4, query_rope=True, key_rope=True)
    failed(call(SCORE_V4, narrow, outputs_of(SCORE_V4, narrow))[0], 161002, "query_rope", "128")
    done(SCORE_V4, narrow, strict=False)
    floats = sample(SCORE_V4, sink=True, **{n: (f"B S{i} N{i} D", "float32") for n, i in (("query", 1), ("key", 2))},
                  value=("B S2 N2 D", "float32"))  # fmt: skip
    failed(call(SCORE_V4, floats, outputs_of(SCORE_V4, floats))[0], 561002, "sink", "float32")
    done(SCORE_V4, floats, strict=False)
