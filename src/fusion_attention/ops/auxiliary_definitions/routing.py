"""Operator definitions of expert selection (gating), and of the order of rows by experts (routing)."""

from collections.abc import Sequence
from typing import Annotated

import torch

from fusion_attention.contract import INVALID, REQUIRED, Array, Attr, Tensor
from fusion_attention.ops.auxiliary_definitions.common import FLOATS, floats, result
from fusion_attention.ops.auxiliary_definitions.token_permute import counting, moe, within
from fusion_attention.ops.shared.params import one_of
from fusion_attention.ops.shared.rules import invalid, meaning, presence


def _active(bounds: Sequence[int] | None, count: int) -> int:
    """Returns the number of experts in `bounds`, [start, end) or None: all; count: the number of all experts."""
    return count if bounds is None or len(bounds) != 2 else int(bounds[1]) - int(bounds[0])


X = floats("x", "A score of every expert for every token.", shape="T E")
K = Attr("k", "Number of experts per token.", default=1, domain="k >= 1")
CHOICES = invalid(
    "x.dim() == 0 or k <= x.shape[-1]",
    "k: at most the number of experts (a token's experts are different)",
    invalid={"k": 4},
)
IDS = result("expert_idx", "int32: numbers of the selected experts by descending score.", "int32")

SOFTMAX = moe(
    "npu_moe_gating_top_k_softmax",
    "Selects the k experts of every token with the largest softmax weights.",
    (
        floats("x", "A score of every expert for every token: [T, E] or [B, T, E]."),
        Tensor(
            "finished", "True for tokens without experts, whose expert_idx is E: [T].", optional=True, dtypes="bool"
        ),
        K,
    ),
    (
        result("y", "Weights of the experts.", "=x"),
        IDS,
        result("row_idx", "int32: j * tokens + i for expert j of token i.", "int32"),
    ),
    rules=(
        invalid(
            "x.dim() in (2, 3)", "x: [T, E] or [B, T, E] (a score of every expert for every token)", invalid={"x": "3"}
        ),
        CHOICES,
        invalid(
            "finished is None or finished.shape == x.shape[:-1]",
            "finished: the shape of x without its last axis (a mark for every token)",
            when="x.dim() in (2, 3)",
            given={"finished": ("T", "bool")},
            invalid={"finished": ("5", "bool")},
        ),
    ),
    formula="y, expert = the k largest of softmax(x); of equal ones the lower expert first",
    sample={"x": "T E", "k": 2},
    returns="(y, expert_idx, row_idx); y is differentiable.",
    example="""\
>>> y, expert, row = npu_moe_gating_top_k_softmax(torch.tensor([[0.0, 2.0, 1.0], [5.0, 0.0, 0.0]]), k=2)
>>> expert.tolist(), row.tolist()
([[1, 2], [0, 1]], [[0, 2], [1, 3]])""",
)
GATING = moe(
    "npu_moe_gating_top_k",
    "Selects the k experts of every token with the largest scores, within its groups of experts with the largest "
    "scores.",
    (
        X,
        Attr("k", "Number of experts per token.", domain="k >= 1"),
        floats("bias", "Added to scores for the selection, not to the weights.", shape="E", optional=True),
        Tensor("input_ids", "Not supported: for a table of experts.", optional=True, dtypes="int32 int64"),
        Tensor("tid2eid", "Not supported: a table of experts.", optional=True, dtypes="int32 int64"),
        Attr("k_group", "Number of groups from which experts are selected.", default=1, domain="k_group >= 1"),
        Attr("group_count", "Number of groups.", default=1, domain="group_count >= 1"),
        one_of("group_select_mode", "Score of a group: 0: its largest score; 1: the sum of its two largest.", (0, 1)),
        Attr("renorm", "Reserved: 0.", default=0, domain="renorm == 0"),
        one_of("norm_type", "0: softmax; 1: sigmoid, with weights divided by their sum.", (0, 1)),
        Attr("out_flag", "Without effect: out is always returned.", type=bool, default=False),
        Attr("routed_scaling_factor", "Factor on the weights.", type=float, default=1.0),
        Attr("eps", "Added to the sum of the weights.", type=float, default=1e-20, domain="eps >= 0"),
    ),
    (result("y", "Weights: [T, k].", "=x"), IDS, result("out", "softmax or sigmoid of the scores: float32 [T, E].",
                                                        "float32")),
    rules=(
        invalid("E % group_count == 0", "group_count: a divisor of the number of experts (groups have the same size)",
                invalid={"group_count": 2}),
        invalid("k_group <= group_count", "k_group (groups are selected from all groups)", invalid={"k_group": 2}),
        invalid("k * group_count <= E * k_group",
                "k: at most the experts of k_group groups (experts are selected from them)",
                when="E % group_count == 0 and k_group <= group_count", invalid={"k": 4}),
        invalid("group_select_mode == 0 or E >= 2 * group_count",
                "group_select_mode: 1 only with groups of at least two experts (it adds two scores)",
                invalid={"group_select_mode": 1, "group_count": 3, "k_group": 2}),
        invalid("input_ids is None", "input_ids: None (tables of experts are not supported)"),
        invalid("tid2eid is None", "tid2eid: None (tables of experts are not supported)"),
    ),
    formula="out = softmax(x) or sigmoid(x);  chosen = the k largest of out + bias in the k_group groups with the "
    "largest scores\n"
    "y = routed_scaling_factor * out[chosen], divided by sum + eps after a sigmoid",
    sample={"k": 2},
    keywords="bias",
    returns="(y, expert_idx, out); y and out are differentiable.",
    example="""\
>>> scores = torch.tensor([[0.1, 0.2, 3.0, 2.0]])
>>> y, expert, _ = npu_moe_gating_top_k(scores, 2, k_group=1, group_count=2, norm_type=1)
>>> expert.tolist(), round(y.sum().item(), 6)
([[2, 3]], 1.0)""",
)  # fmt: skip

INIT = moe(
    "npu_moe_init_routing_v2",
    "Copies the rows of tokens in the order of their experts, counts them per expert, and can quantise them to int8.",
    (
        Tensor("x", "A row for every token.", dtypes=f"{FLOATS} int8", shape="T H"),
        Tensor("expert_idx", "The experts of every token.", dtypes="int32 int64", shape="T K", make=counting(3)),
        Tensor("scale", "Without quantisation: [T], returned in the order of the rows. Dynamic: factors [experts, H] "
               "or [1, H]. Static: [1].", optional=True, dtypes="float32"),
        Tensor("offset", "Static quantisation: [1].", optional=True, dtypes="float32"),
        Attr("active_num", "Largest number of rows; -1 and 0: all.", default=-1, domain="active_num >= -1"),
        Attr("expert_capacity", "Without effect: for drop_pad_mode 1.", default=-1),
        Attr("expert_num", "Number of experts.", default=-1, domain="1 <= expert_num <= 10240"),
        Attr("drop_pad_mode", "0: no rows are dropped or padded.", default=0, domain="drop_pad_mode == 0"),
        one_of("expert_tokens_num_type", "Form of the counts: 0: cumulative; 1: per expert; 2: pairs (expert, count) "
               "of experts with rows.", (0, 1, 2)),
        Attr("expert_tokens_num_flag", "Return counts; False: they are empty.", type=bool, default=False),
        one_of("quant_mode", "-1: none; 0: static; 1: dynamic, by the largest element of each row.", (-1, 0, 1)),
        Array("active_expert_range", "[start, end) of the active experts; empty: all.",
              optional=True, default=()),
        one_of("row_idx_type", "0: per token and expert its row, -1 if it has none; 1: per row its token and expert, "
               "t * K + k; rows of active experts, then of higher ones, then of lower ones.", (0, 1)),
        Attr("x_dtype", "None: dtypes that torch does not have are not supported.", default=None,
             domain="x_dtype is None"),
    ),
    (
        result("expanded_x", "[rows, H].", ""),
        result("expanded_row_idx", "int32 [T*K].", "int32"),
        result("expert_token_cumsum_or_count", "int64.", "int64"),
        result("expanded_scale", "float32 [rows].", "float32"),
    ),
    rules=(
        invalid("active_expert_range is None or len(active_expert_range) == 0 or (len(active_expert_range) == 2 and "
                "0 <= active_expert_range[0] < active_expert_range[1] <= expert_num)",
                "active_expert_range: [start, end) within 0 and expert_num (the active experts)",
                invalid={"active_expert_range": [2, 4]}),
        invalid("quant_mode == -1 or x.dtype.is_floating_point", "x: a floating-point tensor (it is quantised)",
                given={"quant_mode": 1}, invalid={"x": ("T H", "int8")}),
        invalid("quant_mode != 1 or H > 0", "x: rows with elements (the largest is the scale of its row)",
                given={"quant_mode": 1}, invalid={"H": 0}),
        invalid("quant_mode != -1 or scale is None or fits(scale, 'T')", "scale: [T] (one per token)",
                given={"scale": "T"}, invalid={"scale": "5"}),
        invalid("quant_mode != 1 or scale is None or fits(scale, '1 H') or "
                "scale.shape == (active(active_expert_range, expert_num), H)",
                "scale: [experts, H] or [1, H] (factors on the elements, per active expert or for all)",
                given={"quant_mode": 1, "scale": "E H"}, invalid={"scale": "2 H"}),
        presence("quant_mode != 0 or scale is not None and offset is not None",
                 "scale: scale and offset (static quantisation)", given={"quant_mode": 0, "scale": "1", "offset": "1"},
                 invalid={"scale": None}),
        invalid("quant_mode != 0 or scale.numel() == 1", "scale: one element (static quantisation)",
                given={"quant_mode": 0, "scale": "1", "offset": "1"}, invalid={"scale": "2"}),
        invalid("quant_mode != 0 or offset.numel() == 1", "offset: one element (static quantisation)",
                given={"quant_mode": 0, "scale": "1", "offset": "1"}, invalid={"offset": "2"}),
    ),
    functions={"active": _active},
    blank_is_absent=True,
    formula="order = stable sort of expert_idx [T*K], experts below the active ones last\n"
    "expanded_x[i] = x[order[i] // K],  expanded_row_idx[order[i]] = i",
    sample={"expert_num": 3},
    keywords="scale",
    declared={"active_expert_range": Annotated[Sequence[int], 2]},
    returns="(expanded_x, expanded_row_idx, expert_token_cumsum_or_count, expanded_scale); rows and scales behind "
    "those of active experts are 0 (on the chip undefined).",
    example="""\
>>> x, ids = torch.tensor([[1.0], [2.0]]), torch.tensor([[1, 0], [1, 2]], dtype=torch.int32)
>>> rows, places, counts, _ = npu_moe_init_routing_v2(
...     x, ids, expert_num=3, expert_tokens_num_type=1, expert_tokens_num_flag=True)
>>> rows[:, 0].tolist(), places.tolist(), counts.tolist()
([1.0, 1.0, 2.0, 2.0], [1, 0, 2, 3], [1, 2, 1])""",
)  # fmt: skip
FINALIZE = moe(
    "npu_moe_finalize_routing",
    "Sums the rows of each token's experts, with weights and biases of the experts, and adds residuals.",
    (
        floats("expanded_permuted_rows", "Result rows of experts: [rows, H], or [E, C, H]."),
        floats("skip1", "First residual.", shape="T H", like="expanded_permuted_rows", optional=True),
        floats("skip2", "Second residual.", shape="T H", like="expanded_permuted_rows", optional=True),
        floats("bias", "Bias of every expert.", shape="E H", like="expanded_permuted_rows", optional=True),
        floats("scales", "Weights of the experts of each token.", shape="T K", optional=True),
        Tensor("expanded_src_to_dst_row", "Per token and expert the index of its row; rows that do not exist are read "
               "as zeros.", dtypes="int32 int64", shape="P", make=counting(12)),
        Tensor("export_for_source_row", "The experts of every token; required for bias.", optional=True,
               default=REQUIRED, dtypes="int32 int64", shape="T K", make=counting(3)),
        one_of("drop_pad_mode", "Index of expert j of token i in expanded_src_to_dst_row: 0, 1: j * T + i; 2, 3: "
               "i * K + j. 1 and 3: rows are [E, C, H].", (0, 1, 2, 3)),
        Attr("k", "Number of experts per token, if there are no scales.", default=1, domain="k >= 1"),
    ),
    (result("out", "[T, H].", "=expanded_permuted_rows"),),
    rules=(
        invalid("expanded_permuted_rows.dim() == (3 if drop_pad_mode in (1, 3) else 2)",
                "expanded_permuted_rows: [rows, H], or [E, C, H] in drop_pad_mode 1 and 3 (C rows per expert)",
                invalid={"drop_pad_mode": 1}),
        invalid("H is None or expanded_permuted_rows.shape[-1:] == (H,)",
                "expanded_permuted_rows: rows as long as those of skip1, skip2 and bias (they are added)",
                given={"skip1": True}, invalid={"expanded_permuted_rows": "P 5"}),
        invalid("scales is None or P == T * K", "expanded_src_to_dst_row: [T*K] (one per token and expert)",
                given={"scales": True}, invalid={"P": 13}),
        invalid("scales is not None or P % k == 0 and (T is None or P == T * k)",
                "expanded_src_to_dst_row: [T*k] (one per token and expert)", given={"scales": None}, invalid={"k": 5}),
        invalid("scales is not None or export_for_source_row is None or K == k",
                "k: the number of columns of export_for_source_row (the experts of each token)",
                given={"scales": None, "export_for_source_row": True, "k": 2}, invalid={"k": 1, "P": 6}),
        presence("skip2 is None or skip1 is not None", "skip1 (skip2 requires it)",
                 given={"skip1": True, "skip2": True}, invalid={"skip1": None}),
        presence("bias is None or export_for_source_row is not None", "export_for_source_row (it has the experts, "
                 "whose bias is added)",
                 given={"bias": True, "export_for_source_row": True}, invalid={"export_for_source_row": None}),
        meaning("within(export_for_source_row, bias.shape[0])",
                "export_for_source_row: 0 <= expert < E (bias has E rows)", when="bias is not None", code=INVALID,
                reads=True, given={"bias": True, "export_for_source_row": True},
                invalid={"export_for_source_row": torch.full((6, 2), 5)}),
    ),
    functions={"within": within},
    neutral={"T": None, "K": None, "H": None},
    formula="out[i] = skip1[i] + skip2[i] + sum_j scales[i, j] * (rows[place(i, j)] + bias[expert[i, j]])",
    sample={"expanded_permuted_rows": "P H", "scales": True},
    declared={"drop_pad_mode": int | None, "k": int | None},
    returns="Differentiable in rows, skips, bias and scales.",
    example="""\
>>> rows, places = torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.tensor([0, 1, 2, 3], dtype=torch.int32)
>>> npu_moe_finalize_routing(rows, None, None, None, torch.ones(2, 2), places, None, 2)[:, 0].tolist()
[3.0, 7.0]""",
)  # fmt: skip
RECORDS = (SOFTMAX, GATING, INIT, FINALIZE)
