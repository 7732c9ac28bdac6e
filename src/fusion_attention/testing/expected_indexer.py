"""Whether results of the indexer's family are as good as can be asked: the chosen keys, values, statistics, the loss.

The values are the golden back end's, the sizes of errors those of judging.expected_indexer_error.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from fusion_attention.judging.error_bound import Expected
from fusion_attention.judging.expected_error import KERNEL
from fusion_attention.judging.indexer import KINDS, judgeable, pieces, setting_of, views_of
from fusion_attention.ops.indexer.call import IndexerBackward
from fusion_attention.testing.cases import Results
from fusion_attention.testing.compare import check, compare
from fusion_attention.testing.sparse import in_float64
from fusion_attention.torch_ops.eager import run


def check_index(call: Any, results: Mapping[str, Results]) -> None:
    """Asserts that results differ from golden's by roundings alone; of a list of keys, what they score does.

    Args:
        call: lowered, of the indexer, its gradients, its statistics or its loss.
        results: as run() names them, by who found them.

    Raises:
        AssertionError: naming who found it, the output, what fails, the coordinates and the values.
    """
    lists = {who: result for who, result in results.items() if any(KINDS[name] == "indices" for name in result)}
    wanted = expected_index(call, lists)
    for who, result in results.items():
        judged = {name: t for name, t in result.items() if KINDS[name] != "indices"}
        check(who, judged, wanted)


def expected_index(call: Any, chosen: Mapping[str, Results] = MappingProxyType({})) -> dict[str, Expected]:
    """The expected results of a call beside the keys that it chooses: golden's, and the sizes of errors.

    Args:
        call: as check_index() takes it. chosen: results whose keys are judged meanwhile, by what they score.
    """
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
    """The results of a call in float64 by golden; a loss is rounded to float32."""
    if isinstance(call, IndexerBackward):
        return run(IndexerBackward(in_float64(call.call), call.dvalues.double(), call.indices), "golden")
    return run(in_float64(call), "golden")
