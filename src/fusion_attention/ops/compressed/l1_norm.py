"""The operator definition of CANN's SparseFlashMlaSoftmaxL1Norm: probabilities of compressed keys, by torch."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fusion_attention.contract import Array, Attr, Bound, Declared, Rule, Tensor, dtype_text
from fusion_attention.ir.problem import Extents, Problem
from fusion_attention.memory import empty
from fusion_attention.ops.compressed import definitions as forward
from fusion_attention.ops.compressed.api_definition import LISTS
from fusion_attention.ops.compressed.checks import FUNCTIONS
from fusion_attention.ops.compressed.lowered_call import LSE
from fusion_attention.ops.compressed.probabilities import ListedRows, write_probabilities
from fusion_attention.ops.compressed.rules import LIMITS_OF_ROWS, ROWS, SAVED, Side, lengths_of, own_entries
from fusion_attention.ops.shared import cu_seqlens
from fusion_attention.ops.shared.layouts import row_view
from fusion_attention.ops.shared.lowered_call import NO_SEQUENCE, Results, TensorCall, TorchCall
from fusion_attention.ops.shared.metadata import metadata
from fusion_attention.ops.shared.params import TENSOR_FIRST, one_of, output, spelled
from fusion_attention.ops.shared.prototypes import ON_DEVICE, of_cann
from fusion_attention.ops.shared.rules import invalid, keys_lie, limit, meaning, of_lengths, own_scale
from fusion_attention.ops.sparse import definitions as sparse

OUT = "l1_norm"
SIDES: tuple[Side, ...] = (("q", "query", "S1", "T1", "", ""), ("k", "key", "S2", "T2", "", ""))


def fresh(n: Mapping[str, Any], columns: int) -> dict[str, torch.Tensor]:
    """Allocates {name: result [B, S1, 1, columns] or packed [T1, 1, columns]} from a call's arguments `n`."""
    q = n["query"]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return {OUT: empty(q, (*q.shape[:-2], 1, columns), dtype)}


def _columns(n: Mapping[str, Any]) -> int:
    if n["sparse_indices"] is not None:
        return int(n["sparse_indices"].shape[-1])
    return int(n["max_seqlen_k"] if n["layout"] == "TND" else n["key"].shape[1])


def lower(bound: Bound) -> TorchCall:
    """Converts `bound`, checked arguments of a call for compressed keys' probabilities, to one that torch computes."""
    n = bound.names
    q_len, k_len, none = n["q_len"], n["kv_len"], np.zeros_like(n["q_len"])
    extents = Extents(q_len, k_len, none, none, none, none, starts=(n["q_start"], n["kv_start"]))
    problem = Problem(n["N1"], n["N2"], n["D"], n["D"], 0, dtype_text(n["query"]), n["scale_value"], shares_kv=True)
    ends = []
    for b, count in enumerate(q_len.tolist()):
        end = np.full(count, k_len[b])
        if n["mask_mode"]:
            end = np.clip((np.arange(count) + n["tokens"][b] - count + 1) // n["ratio"], 0, k_len[b])
        ends.append(end)
    tensors = {name: n[name] for name in ("query", "key", LSE, "sparse_indices", "topk_length")}
    views = TensorCall(extents, n["layout"], tensors)

    def compute(results: Results) -> None:
        keys = row_view(n["key"], n["layout"], 1, extents, "kv")
        lists = n["sparse_indices"], n["topk_length"]
        rows = ListedRows(views, problem.scale, n["query"], q_len.tolist(), keys, k_len, ends, n[LSE], *lists)
        write_probabilities(rows, results[OUT])

    return TorchCall(NO_SEQUENCE, n["layout"], tensors, lambda: fresh(n, _columns(n)), compute, problem)


def derive(n: dict[str, Any]) -> dict[str, Any]:
    """Returns {name: value} derived from a call's arguments `n`: lengths, axes, tokens, columns of the result."""
    (q_len, q_start), (k_len, k_start) = forward.side_lengths(n, SIDES)
    given, ratio = n["cmp_residual_k"], n["ratio"]
    residual = np.zeros_like(k_len) if given is None or ratio == 1 else np.asarray(given, np.int64)
    result: dict[str, Any] = {"q_len": q_len, "kv_len": k_len, "residual": residual}
    result |= {"q_start": q_start, "kv_start": k_start}
    result["tokens"] = k_len * ratio + residual if len(residual) == len(k_len) else k_len
    if n["sparse_indices"] is not None or n["key"] is not None:
        result["Kc"] = _columns(n)
    if n["layout"] == "TND":
        result |= {"B": len(q_len), "S1": int(q_len.max(initial=0)), "S2": int(k_len.max(initial=0))}
    return result


# --------------------------------------------------------------------------------------------------------------- record

KEY = {"BSND": "B S2 N2 D", "TND": "T2 N2 D"}
LENGTHS = (
    *(cu_seqlens.ends_param(side, side) for side in ("q", "k")),
    *(forward.used_rows(side, side) for side in ("q", "k")),
    Array("cmp_residual_k", "Tokens of every sequence behind those of its last compressed key.", True),
)
TOPK = Tensor(
    "topk_length",
    "Number of entries of every list; None: a list ends at its first -1.",
    True,
    dtypes="int32",
    shape={"BSND": "B S1 N2", "TND": "T1 N2"},
)
RULES: tuple[Rule, ...] = (
    *lengths_of(SIDES, "cmp_residual_k"),
    keys_lie(param="layout_k"),
    *ROWS,
    SAVED,
    meaning(
        "all(0 <= n < ratio for n in residual)",
        "cmp_residual_k: numbers from 0 to cmp_ratio - 1 (cmp_ratio tokens or more are further compressed keys)",
        invalid={"cmp_residual_k": [9, 9]},
    ),
    of_lengths(
        "sparse_indices is not None or cu_seqlens_k is None or max_seqlen_k >= longest(cu_seqlens_k, seqused_k)",
        "max_seqlen_k: at least the keys of the longest sequence (it is the number of columns of the result)",
        only=("TND",),
        invalid={"sparse_indices": None, "max_seqlen_k": 1},
    ),
    own_entries(
        "sparse_indices", "sparse_indices is None or entries_fit(sparse_indices, layout, q_len, kv_len, 1, q_start)"
    )[0],
    invalid(
        "l1_norm is None or l1_norm.shape[-1] == Kc",
        f"{OUT}: a column for each entry of a list, or without lists for each of the compressed keys (max_seqlen_k "
        "columns if packed)",
        invalid={OUT: "B S1 N2 3"},
    ),
    *LIMITS_OF_ROWS,
    limit("ratio <= 128", "ratio (the chip takes no more)", invalid={"ratio": 129}),
)


def longest(ends: np.ndarray, used: np.ndarray | None) -> int:
    """Returns the largest number of keys of a packed sequence, from cumulative ends, or `used` lengths if given."""
    return int((np.diff(ends) if used is None else used).max(initial=0))


SAMPLE: dict[str, Any] = {"sparse_indices": True, "ratio": 3, "mask_mode": 3, "cmp_residual_k": [0, 0]}
PACKED = {"layout_k": "TND", "cu_seqlens_q": [0, 3, 8], "cu_seqlens_k": [0, 5, 12], "max_seqlen_k": 7}
V1 = of_cann(
    "aclnnSparseFlashMlaSoftmaxL1Norm",
    "Probabilities of compressed keys in SparseFlashMla's softmax, a mean over heads.",
    (
        *(
            spelled(sparse.QUERY, "q"),
            replace(sparse.KEY, spelled="k", text="Compressed key rows.", shape=KEY, form=None),
        ),
        *(
            replace(forward.LSE_IN, text="softmax_lse that the forward returned, over both sources and the sink."),
            spelled(LISTS, ""),
        ),
        *LENGTHS,
        TOPK,
        *(forward.METADATA, forward.SCALE),
        Attr(
            "max_seqlen_k",
            "Columns of the result for packed rows without lists: at least the keys of the longest sequence.",
            default=0,
        ),
        *(
            forward.RATIO,
            one_of(
                "mask_mode", "0: all compressed keys are visible; 3: the first (position + 1) // cmp_ratio.", (0, 3)
            ),
        ),
        spelled(sparse.LAYOUT, "layout_q"),
        Attr("layout_k", "Axis order of keys; it must be layout_q.", type=str, default="BSND"),
        output(
            OUT,
            "A column for each entry of a list, or without lists for each compressed key; 0 if it is not read.",
            {"BSND": "B S1 N2 Kc", "TND": "T1 N2 Kc"},
            "float32",
            spelled="out",
        ),
    ),
    RULES,
    formula="""out_j = sum_h exp(softmax_scale * q_h . k_j - softmax_lse_h) / N1
for the compressed keys j < (row + tokens - rows + 1) // cmp_ratio, all or those in sparse_indices""",
    tex=r"""out_j = \frac{1}{N_1} \sum_h e^{scale\; q_h \cdot k_j - lse_h} \qquad
j < \left\lfloor \frac{i + L - S_1 + 1}{ratio} \right\rfloor \text{, all or those listed}""",
    rulings=(42,),
    layouts=sparse.LAYOUTS,
    layout_attr="layout",
    neutral={**sparse.NEUTRAL, "Kc": None, "ratio": 1, **dict.fromkeys(("sparse_indices", "key"))},
    derive=derive,
    functions=FUNCTIONS | {"longest": longest},
    lower=lower,
    c=Declared(on_device=ON_DEVICE).of_page(),
    results=(OUT,),
    fresh=lambda n: fresh(n, _columns(n)),
    sizes={**sparse.V1.sizes, "Kc": sparse.V1.sizes["K"]},
    samples={"BSND": SAMPLE, "TND": {**SAMPLE, **PACKED}},
)
TORCH = V1.version(
    "cann_ops_transformer.sparse_flash_mla_softmax_l1_norm",
    V1.summary,
    rules=(*V1.rules, own_scale("scale_value")),
    keywords="sparse_indices",
    declared=dict.fromkeys([p.name for p in LENGTHS], TENSOR_FIRST),
    returns="float32 [B, S1, 1, Kc] or [T1, 1, Kc], with a column for each entry of a list, or without lists for each "
    "compressed key.",
    example="""\
>>> q, compressed, lse = torch.randn(1, 6, 4, 16), torch.randn(1, 3, 1, 16), torch.full((1, 1, 6, 4), 5.0)
>>> out = sparse_flash_mla_softmax_l1_norm(q, compressed, lse, softmax_scale=0.25, cmp_ratio=2, mask_mode=3)
>>> (out[0, :, 0] > 0).int().sum(-1).tolist()
[0, 1, 1, 2, 2, 3]""",
)
OPAQUE = metadata(
    V1.name,
    (*LENGTHS, TOPK),
    "num_heads_q num_heads_k head_dim batch_size=0 max_seqlen_q=0 max_seqlen_k=0 topk=0 layout_q=BSND layout_k=BSND "
    "mask_mode=0 cmp_ratio=1",
    64,
)
RECORDS = (V1, TORCH, OPAQUE)
