"""Operator definitions of functions that merge partial results of attention."""

import itertools

import numpy as np
import torch

from fusion_attention.contract import Array, Attr, Tensor, Tensors
from fusion_attention.ops.auxiliary_definitions.common import FLOATS, auxiliary, floats, result
from fusion_attention.ops.shared.params import TENSOR_FIRST, one_of
from fusion_attention.ops.shared.rules import invalid, presence, untrained

SIZES = {"T": 6, "N": 2, "D": 8, "S": 3, "L": 2, "H": 16}
LANES = 8  # copies of each statistic
LAYOUTS = ("SBH", "TND")
NO_DERIVATIVE = (
    "detach() its tensors, or call it inside an autograd.Function (attention's gradient takes merged statistics)"
)


def alike(tensors: tuple[torch.Tensor, ...]) -> bool:
    """True if all tensors are [rows, D] of the same shape and dtype."""
    first = tensors[0]
    return all(t.dim() == 2 and t.shape == first.shape and t.dtype == first.dtype for t in tensors)


def of_rows(tensors: tuple[torch.Tensor, ...], results: tuple[torch.Tensor, ...]) -> bool:
    """True if every tensor is [rows], where the results are [rows, D]."""
    return all(t.shape == results[0].shape[:1] for t in tensors)


def ascending(ends: np.ndarray, tokens: int) -> bool:
    """True if cumulative ends ascend from 0 to at most `tokens`."""
    return not any(a > b for a, b in itertools.pairwise([0, *ends.tolist(), tokens]))


UPDATE = auxiliary(
    "npu_attention_update",
    "Merges the results of attention on several ranks into attention to the keys of all ranks.",
    (
        Tensors("lse", "ln(sum(exp(score))) of every rank: [rows]; infinite in rows without keys.", dtypes="float32",
                shape="T"),
        Tensors("local_out", "The output rows of every rank: [rows, D].", dtypes=FLOATS, shape="T D"),
        Attr("update_type", "0: return out alone; 1: out and lse_m.", domain="update_type in (0, 1)"),
    ),
    (result("out", "[rows, D]; a row without keys on any rank is 0, and its lse_m -inf.", "=local_out"),
     result("lse_m", "[rows], or None.", "float32")),
    rules=(
        invalid("len(lse) == len(local_out) > 0", "lse: as many tensors as local_out has (one per rank)",
                invalid={"lse": [torch.zeros(6), torch.zeros(6)]}),
        invalid("alike(local_out)", "local_out: tensors [rows, D] of one shape and dtype (one per rank)",
                when="len(lse) == len(local_out) > 0", invalid={"local_out": "T", "lse": "T"}),
        invalid("of_rows(lse, local_out)", "lse: tensors [rows], one per rank (a number for every row)",
                when="len(lse) == len(local_out) > 0 and local_out[0].dim() > 0", invalid={"lse": "5"}),
        *untrained(NO_DERIVATIVE, kind=invalid, local_out=(6, 8)),
    ),
    functions={"alike": alike, "of_rows": of_rows},
    formula="lse_m = log(sum_i exp(lse_i)),  out = sum_i exp(lse_i - lse_m) * local_out_i",
    tex=r"lse_m = \log \sum_i e^{lse_i} \qquad out = \sum_i e^{lse_i - lse_m}\, out_i",
    sizes=SIZES,
    sample={"lse": "T", "local_out": "T D", "update_type": 0},
    example="""\
>>> out, lse = npu_attention_update([torch.zeros(1), torch.zeros(1)], [torch.ones(1, 8), torch.zeros(1, 8)], 1)
>>> out[0, 0].item(), lse.exp().item()
(0.5, 2.0)""",
)  # fmt: skip

ROWS = {"SBH": "S L H", "TND": "T N D"}
STATISTICS = {"SBH": f"L N S {LANES}", "TND": f"T N {LANES}"}


def statistic(name: str, text: str) -> Tensor:
    """Returns the operator parameter for a softmax statistic of each row and head, stored as eight equal copies."""
    return Tensor(name, text, dtypes="float32", shape=STATISTICS)


PACKED = {"actual_seq_qlen": [2, 6]}
RING = auxiliary(
    "npu_ring_attention_update",
    "Merges the attention of earlier ring steps with that of the current step.",
    (
        floats("prev_attn_out", "The output rows of earlier steps.", shape=ROWS),
        statistic("prev_softmax_max", "Row maxima of the scores of earlier steps."),
        statistic("prev_softmax_sum", "Row sums of exp(score - max) of earlier steps."),
        floats("cur_attn_out", "The output rows of the current step.", like="prev_attn_out", shape=ROWS),
        statistic("cur_softmax_max", "Row maxima of the scores of the current step."),
        statistic("cur_softmax_sum", "Row sums of exp(score - max) of the current step."),
        Array("actual_seq_qlen", "TND: cumulative ends of the sequences, with or without a leading 0.", True),
        Attr("input_layout", '"SBH" or "TND".', type=str, default="SBH"),
        one_of("input_softmax_layout", 'Order of statistics in layout TND: "TND": [T, N, 8]; "" or "SBH": '
               "[N, q_len, 8] of each sequence, concatenated.", ("", "SBH", "TND")),
    ),
    (
        result("attn_out", "The merged output rows, in the shape of prev_attn_out.", "=prev_attn_out"),
        *(result(name, f"The merged statistics, in the shape of prev_{name}.", "float32")
          for name in ("softmax_max", "softmax_sum")),
    ),
    rules=(
        presence("actual_seq_qlen is not None",
                 "actual_seq_qlen: cumulative ends of the sequences (the tensor does not show where a sequence ends)",
                 only=("TND",), invalid={"actual_seq_qlen": None}),
        invalid("ascending(actual_seq_qlen, T)",
                "actual_seq_qlen: ascending cumulative ends, at most the number of tokens (they are ends, not "
                "lengths)", only=("TND",), invalid={"actual_seq_qlen": [2, 7]}),
        invalid("N > 0 and H % N == 0",
                "prev_softmax_max: a number of heads that divides H (H is heads * elements)", only=("SBH",),
                invalid={"N": 3}),
        *untrained(NO_DERIVATIVE, kind=invalid, prev_attn_out=(3, 2, 16), cur_attn_out=(3, 2, 16)),
    ),
    functions={"ascending": ascending},
    formula="""max = maximum(prev_max, cur_max),  w_i = sum_i * exp(max_i - max),  sum = w_prev + w_cur
out = (w_prev * prev_out + w_cur * cur_out) / sum""",
    tex=r"w_i = \ell_i\, e^{m_i - \max(m_p, m_c)} \qquad out = \frac{w_p\, out_p + w_c\, out_c}{w_p + w_c}",
    layouts=LAYOUTS,
    neutral=dict.fromkeys(("T", "N", "D", "S", "L", "H")),
    returns="(attn_out, softmax_max, softmax_sum); a row without keys in all steps keeps its statistics. They have no "
    "derivative: pass merged statistics to npu_fusion_attention_grad.",
    keywords="actual_seq_qlen",
    declared={"actual_seq_qlen": TENSOR_FIRST},
    sizes=SIZES,
    sample={},
    example="""\
>>> from fusion_attention import npu
>>> q, k = torch.randn(2, 6, 1, 32)
>>> steps = [npu.npu_fusion_attention(q, part, part, 4, "SBH")[:3] for part in k.split(3)]
>>> out, *_ = npu_ring_attention_update(*steps[0], *steps[1])
>>> torch.allclose(out, npu.npu_fusion_attention(q, k, k, 4, "SBH")[0], atol=1e-6)
True""",
)  # fmt: skip
RING = RING.version(RING.name, RING.summary, samples={"SBH": {}, "TND": PACKED})
RECORDS = (UPDATE, RING)
