"""Makes calls of every family of operation kinds, for tests that find unwritten results."""

from collections.abc import Callable
from dataclasses import replace

import torch
from support.unwritten import Results

from fusion_attention.contract import bind
from fusion_attention.ops.indexer_loss import definitions as indexer_loss
from fusion_attention.ops.inference import api_definition as decode_attention
from fusion_attention.testing import Case, arguments, lowered, run, sparse
from fusion_attention.testing import indexer_loss as loss
from fusion_attention.torch_ops import eager


def training(backend: str) -> Results:
    case = Case(pse="full", sink=True, dim_rope=4)
    args = arguments(case)
    return run(lowered(case, args), args["dy"], backend)


def decode(backend: str) -> Results:
    q, k, v = torch.ones(2, 1, 4, 16), torch.ones(2, 70, 2, 16), torch.ones(2, 70, 2, 16)
    call = decode_attention.lower(bind(decode_attention.RECORD, {"q": q, "k": k, "v": v}))
    return eager.run(replace(call, names=decode_attention.RESULTS), backend)


def selected(backend: str) -> Results:
    case = sparse.SparseCase(sink=True, dim_rope=4)
    args = sparse.arguments(case)
    return sparse.compute(case, sparse.lowered(args), args["dy"], backend)


def chosen(backend: str) -> Results:
    case = sparse.IndexerCase(exact=True)
    args = sparse.indexer_arguments(case)
    call = sparse.lowered_indexer(args)
    indices, values = sparse.chosen(call, backend)
    gradients = sparse.indexer_gradients(call, torch.ones_like(values), sparse.chosen(call, "cpu")[0], backend)
    return {"indices": indices, "values": values, **gradients}


def statistics(backend: str) -> Results:
    args = sparse.indexer_arguments(sparse.IndexerCase())
    given = {"query_index": args["query"], "key_index": args["key"], "weights": args["weights"]}
    call = indexer_loss.TORCH_LSE.lower(bind(indexer_loss.TORCH_LSE, given))
    return eager.run(call, backend)


def losses(backend: str) -> Results:
    case = loss.LossCase(count=4)
    return eager.run(loss.lowered(case, loss.arguments(case)), backend)


# (family, operation kind): number of results of the operation kind.
FAMILIES: dict[tuple[Callable[[str], Results], str], int] = {
    (training, "attention_forward"): 3,
    (training, "attention_backward"): 7,
    (decode, "attention_forward"): 3,
    (selected, "attention_forward"): 3,
    (selected, "attention_backward"): 6,
    (chosen, "indexer_topk"): 2,
    (chosen, "indexer_backward"): 3,
    (statistics, "indexer_lse"): 2,
    (losses, "indexer_loss"): 4,
}
