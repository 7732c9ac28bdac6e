"""Makes a small correct call of every family of operators: (operator, inputs, outputs) of a back end."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from support.planted_cache import divergence, paged, stored, topk

from fusion_attention.judging.calls import recorded
from fusion_attention.ops import RECORDS
from fusion_attention.testing import decode, indexer_loss, sparse
from fusion_attention.testing.cases import Case, arguments

Tensor = torch.Tensor
Call = tuple[str, dict[str, Any], dict[str, Tensor]]
CASE = Case(q_len=(21,), kv_len=(37,), heads_q=4, heads_kv=2, dim_qk=16, dim_v=16, sparse_mode=3, mask="compressed")
SPARSE = sparse.SparseCase("BSND", 0, "bfloat16", (9,), (40,), count=12, dim_qk=16, dim_v=16, scale=0.25, mode=3)
LOSS = indexer_loss.LossCase("BSND", 0, "float16", (9,), (40,), count=12, dim_qk=16, dim_v=16, scale=0.25, mode=3)


def computed(operator: str, inputs: dict[str, Any], backend: str = "cpu") -> Call:
    """Computes a call with a back end; omits None and arguments that the operator does not have."""
    names = RECORDS[operator].by_name
    inputs = {n: v for n, v in inputs.items() if n in names and v is not None and n not in ("seed", "offset")}
    call = recorded(operator, inputs, {"none yet": torch.zeros(1)})
    result = call.computed(backend, call.lowered().results())
    assert not isinstance(result, str), result
    return operator, inputs, {n: t.clone() for n, t in result.items() if t.numel()}


def gradient_of(args: dict[str, Any], backend: str = "cpu") -> Call:
    """Computes the backward of a call from the saved results of the same back end."""
    saved = computed("npu_fusion_attention_v2", args, backend)[2]
    given = {"attention_in": "attention_out", "softmax_max": "softmax_max", "softmax_sum": "softmax_sum"}
    args |= {"scale_value": args.get("scale"), **{n: saved[o] for n, o in given.items()}}
    return computed("npu_fusion_attention_grad_v2", args, backend)


def sparse_gradient(case: sparse.SparseCase) -> Call:
    args = sparse.arguments(case)
    result = computed("npu_sparse_flash_attention", args)[2]
    return computed("npu_sparse_flash_attention_grad", args | {"attention_in": result.pop("attention_out")} | result)


def statistics(case: indexer_loss.LossCase) -> Call:
    """Computes the statistics of the indexer's scores."""
    args = {n: t for n, t in indexer_loss.arguments(case).items() if not n.startswith("softmax_")}
    return computed("npu_dense_lightning_indexer_softmax_lse", args)


def _planted(capture: Any) -> Call:
    return capture.operator, capture.inputs, capture.outputs


def attention_call(dtype: torch.dtype) -> Call:
    """Computes a call of attention."""
    make = torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, n, h, 16, generator=make).to(dtype) for n, h in ((21, 4), (37, 2)))
    return computed("attention", {"q": q, "k": k, "v": k.flip(1)})


FAMILIES: dict[str, Callable[[], Call]] = {
    "own float32": lambda: attention_call(torch.float32),
    "own float16": lambda: attention_call(torch.float16),
    "dense": lambda: computed("npu_fusion_attention_v2", arguments(replace(CASE, dtype="bfloat16"))),
    "gradient": lambda: gradient_of(arguments(replace(CASE, dtype="bfloat16", pse="full", sink=True))),
    "pages": lambda: _planted(paged("", torch.float16, "npu_fused_infer_attention_score", 1)),
    "int8 cache": lambda: _planted(stored("", torch.bfloat16, True, 2)),
    "int8 output": lambda: computed("npu_incre_flash_attention", decode.arguments(decode.DecodeCase(out="channel"))),
    "sparse": lambda: computed("npu_sparse_flash_attention", sparse.arguments(SPARSE)),
    "sparse gradient": lambda: sparse_gradient(SPARSE),
    "indexer": lambda: _planted(topk("", torch.float32, 6, 3)),
    "own loss": lambda: _planted(divergence("", torch.float32, 4)),
    "loss of lists": lambda: computed(
        "npu_sparse_lightning_indexer_grad_kl_loss", indexer_loss.arguments(replace(LOSS, weights="float16"))
    ),
    "statistics": lambda: statistics(replace(LOSS, count=0, weights="float16")),
}


@cache
def _recorded(name: str) -> Call:
    return FAMILIES[name]()


def small(name: str) -> Call:
    """Returns the call of a family, with copied results."""
    operator, inputs, outputs = _recorded(name)
    return operator, inputs, {n: t.clone() for n, t in outputs.items()}
