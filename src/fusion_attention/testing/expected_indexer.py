"""check_index(): compares results of the indexer and its loss (keys, scores, loss, gradients) with a float64 reference.

Values come from the reference back end, error sizes from judging.expected_indexer_error.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from fusion_attention.judging.chi_square_limits import Expected
from fusion_attention.judging.expected_error import KERNEL
from fusion_attention.judging.indexer import KINDS, judgeable, pieces, setting_of, views_of
from fusion_attention.ops.indexer.lowered_call import IndexerBackward
from fusion_attention.testing.cases import Results
from fusion_attention.testing.compare import check, compare
from fusion_attention.testing.sparse import in_float64
from fusion_attention.torch_ops.eager import run


def check_index(call: Any, results: Mapping[str, Results]) -> None:
    """Asserts that an indexer's results (selected keys: their scores) differ from the float64 ones only by rounding.

    Args:
        call: a call, as back ends compute it, of the indexer, its gradients, its statistics or its loss.
        results: {program (a name for the message): {name: result}}.

    Raises:
        AssertionError: the message has the program, the output, the elements that fail, coordinates and values.
    """
    lists = {who: result for who, result in results.items() if any(KINDS[name] == "indices" for name in result)}
    wanted = expected_index(call, lists)
    for who, result in results.items():
        judged = {name: t for name, t in result.items() if KINDS[name] != "indices"}
        check(who, judged, wanted)


def expected_index(call: Any, chosen: Mapping[str, Results] = MappingProxyType({})) -> dict[str, Expected]:
    """Returns {name: float64 result with expected error sizes} of a call of the indexer, its gradients, statistics or
    loss, without the selected keys. chosen: {program: its results}, whose selected keys are compared with the
    reference's here, by their scores."""
    x, golden = setting_of(call), golden_of(call)
    golden = {name: t for name, t in golden.items() if chosen or KINDS[name] != "indices"}
    sizes = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in golden.items()}
    views, kinds = views_of(call, sizes), [KINDS[name] for name in golden]
    lists = {who: views_of(call, result) for who, result in chosen.items()}
    for block in pieces(x, kinds, KERNEL):
        if block.kind == "indices":
            for who, shown in lists.items():
                scores, wanted = judgeable(x, shown[block.kind], block)
                expected = Expected(wanted.value, wanted.variance.sqrt())
                compare(f"{who}: scores of the keys chosen by sequence {block.b}", scores, expected)
        elif block.kind == "loss":  # golden rounds it to float32
            golden["loss"], sizes["loss"] = block.wanted.value.reshape(1), block.wanted.variance.sqrt().reshape(1)
        else:
            judgeable(x, views[block.kind], block)[0].copy_(block.wanted.variance.sqrt())
    return {name: Expected(t, sizes[name]) for name, t in golden.items() if KINDS[name] != "indices"}


def golden_of(call: Any) -> Results:
    """Returns {name: result} of a call in float64, from the reference back end; a loss is rounded to float32."""
    if isinstance(call, IndexerBackward):
        return run(IndexerBackward(in_float64(call.call), call.dvalues.double(), call.indices), "golden")
    return run(in_float64(call), "golden")
