"""Outputs of the programs on CANN's pages (cann_sample_programs.py): derived by hand for the data on the page, and
compared with the page's formula on random data.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch
from clauses import (
    flash_attention_score_v2,
    incre_flash_attention_v4,
    indexer_grad_kl_loss,
    sparse_flash_attention_grad,
    unpadding_score_grad_v3,
)
from clauses.checks import Args, Page, not_computed
from clauses.dtype_abbreviations import I8, U8
from clauses.error_bounds import UNIT, near
from clauses.training_formulas import hiding
from clauses.values import GENERATOR
from support.cann_sample_programs import CORRECTED, FILL, PRINTED, Given, Printed, check, indexer_grad_kl_loss_refused
from support.cann_sample_programs import incre_flash_attention_v4 as run_incre
from support.cann_sample_programs import indexer_grad_kl_loss as run_loss
from support.cann_sample_programs import score_v2 as run_score
from support.cann_sample_programs import sparse_flash_attention_grad as run_sparse
from support.cann_sample_programs import unpadding_score_grad_v3 as run_unpadding

from fusion_attention import acl


@pytest.fixture(autouse=True)
def finalized() -> Iterator[None]:
    yield
    acl.finalize()
    acl.get_recent_err_msg()


def tensor_of(printed: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """Returns the tensor in the bytes that a program copied; all bytes after the tensor must be the fill value."""
    raw = torch.from_numpy(printed).view(torch.uint8)
    assert bool((raw[like.nbytes :] == FILL).all())
    return raw[: like.nbytes].view(like.dtype).view(like.shape)


# ------------------------------------------------------------------------------------------------ data of the pages


def unpadding_as_printed() -> None:
    got = run_unpadding({})
    # A float32 1 in bfloat16 memory is the pair (0, 1): 96 products of ones per score. The saved statistics are max 3
    # and sum 3, so P = exp(0.088388 * 96 - 3) / 3 = 80.37, and dv = 256 P in the columns where dY is 1. bfloat16 has
    # 20480 and 20608 around 20575; P rounded to bfloat16, 80.5, gives 20608 as well.
    assert 80.25 < math.exp(0.088388 * 96 - 3) / 3 < 80.75
    rows = {name: tensor_of(values, torch.empty(values.size, dtype=torch.bfloat16)) for name, values in got.items()}
    # Compare with bool(): with CI set, pytest would print the differences of lists with thousands of numbers.
    assert rows["dv"].numel() == 32768
    assert bool((rows["dv"].view(-1, 2) == torch.tensor([0.0, 20608.0])).all())
    # dY V^T and rowsum(dY * out) are equal (64), so the gradients of q and k are zero.
    assert all(not rows[name].any() for name in ("dq", "dqRope", "dk", "dkRope"))


def score_as_printed() -> None:
    got = run_score({})
    # An int16 1 reads as the smallest float16, 2**-24: all scores are equal, and the mean of equal rows is that row.
    assert got["attentionOut"].size == 32768
    assert bool((got["attentionOut"] == 1).all())
    score = 0.088388 * 128 * 2.0**-48
    assert (np.abs(got["softmaxMax"] - score) <= 130 * UNIT * score).all()  # 128 terms, the scale and its product
    assert got["softmaxSum"].size == 2048
    assert bool((got["softmaxSum"] == 256.0).all())


def incre_as_printed() -> None:
    # A float32 1 in float16 memory is the pair (0, 1.875): all keys are equal, and the mean of equal rows is a row.
    assert run_incre({})["out"].tolist() == [0.0, 1.875] * 16


def sparse_as_printed() -> None:
    got = run_sparse({})
    # Every number is 2**-24, so scores are negligible beside the saved maximum 3: P = exp(-3) / 3 for each key.
    # dv = P dY summed over 16 heads is about a quarter of 2**-24, the smallest float16: rounded to zero.
    # dq and dk contain the product of three such numbers.
    assert 16 * math.exp(-3) / 3 < 0.49
    assert all(not values.any() for values in got.values())


def loss_as_corrected() -> None:
    got = run_loss({})
    # The int16 data read as multiples of 2**-24: scores are almost 0, so y is uniform over the n visible keys of a row,
    # and p is exp(0 - 1) / 1 for every key, because the saved statistics are 1.
    p = near(-1.0).exp()
    loss = near(0.0)
    for n in (5, 6, 7, 8):
        loss = loss + p * (p.log() - (near(1.0) / n).log()) * n
    assert abs(float(got["loss"][0]) - loss.value) <= loss.slack
    # dS has a factor of 2**-24, dweights one of 128 * 30 * 2**-48: float16 cannot represent such small numbers.
    assert all(not got[name].view(np.float16).any() for name in ("dQIndex", "dKIndex", "dWeight"))


# ------------------------------------------------------------------------------------------------------ random data


def unpadding_args() -> Args:
    args = unpadding_score_grad_v3.base(q=(256,), kv=(256,), N=1, N2=1, D=128, Dr=64)
    mask = hiding(256, 256, d=U8)(None)
    tokens = {"preTokens": 65536, "nextTokens": 65536}
    return args | tokens | {"attenMaskOptional": mask, "scaleValue": 0.088388, "sparseMode": 0}


def score_args() -> Args:
    args = flash_attention_score_v2.base("SBH", B=1, S1=256, S2=256, N=1, N2=1, D=128)
    mask = hiding(256, 256, d=U8)(None)
    tokens = {"preTokensOptional": 65536, "nextTokensOptional": 65536}
    return args | tokens | {"attenMaskOptional": mask, "scaleValueOptional": 0.088388}


def incre_args() -> Args:
    args = incre_flash_attention_v4.base("BNSD", B=1, N=2, N2=2, S=16)
    return args | {"attenMask": hiding(1, 1, 1, 16, d=I8)(None), "actualSeqLengths": [16]}


def sparse_args() -> Args:
    """Selects 1500 keys, so that the list of 2048 entries is not full."""
    args = sparse_flash_attention_grad.base("TND", q=(1,), kv=(2048,), N=16, mode=0, count=1500)
    return args | {"scaleValue": 0.088388}


def loss_args() -> Args:
    """Scales queries down: with scale 1 the softmax then gives every key some weight."""
    args = indexer_grad_kl_loss.base("TND", q=(4,), kv=(8,), N=64, Nidx=32, count=8)
    small = {name: args[name] * 0.04 for name in ("query", "queryRope")}
    return args | small | {"scaleValue": 1.0}


class Program(NamedTuple):
    """A program and its expected results.

    Args:
        run: runs the program; by_hand: checks its original data by hand arithmetic.
        page: the formula; args: the same call with the page's parameter names, on random data.
        names: the program's tensors -> the page's names; the last `outputs` entries are outputs.
    """

    run: Callable[[Given], Printed]
    by_hand: Callable[[], None]
    page: Page
    args: Callable[[], Args]
    outputs: int
    names: dict[str, str]


def pairs(names: str, page: str) -> dict[str, str]:
    return dict(zip(names.split(), page.split(), strict=True))


PROGRAMS = [
    Program(
        *(run_unpadding, unpadding_as_printed, unpadding_score_grad_v3.PAGE, unpadding_args, 5),
        pairs(
            "q qRope k kRope v dx attenmask softmaxMax softmaxSum attentionIn dq dqRope dk dkRope dv",
            "query queryRope keyIn keyInRope value dy attenMaskOptional softmaxMaxOptional softmaxSumOptional "
            "attentionInOptional dqOut dqRopeOut dkOut dkRopeOut dvOut",
        ),
    ),
    Program(
        *(run_score, score_as_printed, flash_attention_score_v2.PAGE, score_args, 3),
        pairs(
            "q k v attenmask softmaxMax softmaxSum attentionOut",
            "query key value attenMaskOptional softmaxMaxOut softmaxSumOut attentionOutOut",
        ),
    ),
    Program(
        *(run_incre, incre_as_printed, incre_flash_attention_v4.PAGE, incre_args, 1),
        pairs("query key value atten out", "query key value attenMask attentionOut"),
    ),
    Program(
        *(run_sparse, sparse_as_printed, sparse_flash_attention_grad.PAGE, sparse_args, 5),
        pairs(
            "q k v sparseIndices out dOut softmaxMax softmaxSum qRope kRope dq dk dv dqRope dkRope",
            "query key value sparseIndices out dOut softmaxMax softmaxSum queryRopeOptional keyRopeOptional "
            "dQueryOut dKeyOut dValueOut dQueryRopeOutOptional dKeyRopeOutOptional",
        ),
    ),
    Program(
        *(run_loss, loss_as_corrected, indexer_grad_kl_loss.PAGE, loss_args, 4),
        pairs(
            "q k qIndex kIndex weight sparseIndices softmaxMax softmaxSum qRope kRope dQIndex dKIndex dWeight loss",
            "query key queryIndex keyIndex weights sparseIndices softmaxMax softmaxSum queryRope keyRope "
            "dQueryIndex dKeyIndex dWeights loss",
        ),
    ),
]
EACH = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.run.__name__)


def by_formula(program: Program) -> str:
    """Runs a program on random data; returns a description of the first wrong output, or ""."""
    GENERATOR.manual_seed(1)
    args = program.args()
    if program.page.finish is not None:
        program.page.finish(args, frozenset())
    names = list(program.names.items())
    inputs, outputs = names[: -program.outputs], names[-program.outputs :]
    given = {name_here: args[name][0] if isinstance(args[name], list) else args[name] for name_here, name in inputs}
    printed = program.run(given)
    assert printed.keys() == {name_here for name_here, _ in outputs}
    args.update({name: tensor_of(printed[name_here], args[name]) for name_here, name in outputs})
    return not_computed(program.page, args)


@EACH
def test_cann_sample_program_results_match_hand_calculation(program: Program) -> None:
    program.by_hand()


@EACH
def test_cann_sample_program_on_random_data_matches_formula(program: Program) -> None:
    assert by_formula(program) == ""


# ------------------------------------------------------------------------- the last program with its original data


def test_kl_loss_program_with_16_bit_host_data_is_refused_in_phase_1() -> None:
    """Tensors larger than their host data are null: the program does not check for null, phase 1 does."""
    nulls, ret, text = indexer_grad_kl_loss_refused(PRINTED)
    assert nulls == {
        "sparseIndices": "data: the view ends at byte 8192 of an allocation of 4096",
        "softmaxMax": "data: the view ends at byte 1024 of an allocation of 512",
        "softmaxSum": "data: the view ends at byte 1024 of an allocation of 512",
        "loss": "data: the view ends at byte 4 of an allocation of 2",
    }
    assert ret == 161001
    results = [line.split(": ", 2)[1:] for line in text.splitlines()]
    assert [name for name, _ in results] == [
        "sparse_indices (sparseIndices)",
        "softmax_max (softmaxMax)",
        "softmax_sum (softmaxSum)",
    ]
    assert all(message.startswith("expected a value") and message.endswith("got None") for _, message in results)


def test_kl_loss_program_with_64_weights_for_32_heads_is_refused() -> None:
    """Original data of the page, except that host data have the dtypes of their tensors."""
    nulls, ret, text = indexer_grad_kl_loss_refused(PRINTED, np.int32, np.float32)
    assert (nulls, ret) == ({}, 161002)
    assert text == (
        "aclnnSparseLightningIndexerGradKLLoss: weights: expected one weight for every head of query_index, got "
        "weights=float16 [4, 64], query_index=float16 [4, 32, 128] (a score is a sum over heads)"
    )


@pytest.mark.parametrize("wrong", ["sparseIndices", "softmaxMax", "softmaxSum"])
def test_kl_loss_program_with_2d_indices_or_statistics_is_refused(wrong: str) -> None:
    names = {"sparseIndices": "sparse_indices", "softmaxMax": "softmax_max", "softmaxSum": "softmax_sum"}
    _, ret, text = indexer_grad_kl_loss_refused({**CORRECTED, wrong: PRINTED[wrong]}, np.int32, np.float32)
    assert ret == 161002
    assert f"{names[wrong]} ({wrong}): expected 3 dimensions" in text


def test_set_device_beyond_the_last_device_returns_error_code() -> None:
    check(acl.init(None))
    assert acl.rt.set_device(8) == 107001
    assert acl.get_recent_err_msg() == "device_id: expected 0 to 7, got 8"
