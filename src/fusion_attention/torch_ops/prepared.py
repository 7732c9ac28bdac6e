"""A forward whose plan and views are known: what remains of a call is where its tensors begin.

Kept in the call cache of a signature and its lengths (contract.CallCache), by back end.
"""

from __future__ import annotations

from typing import Any

import torch

from fusion_attention.ir.problem import Operands
from fusion_attention.memory import another, template
from fusion_attention.ops.shared.call import over
from fusion_attention.plan import Plan

Tensor = torch.Tensor


class Prepared:
    """What the calls of one call cache share: plan, views and the shapes of results. Holds no tensor of a caller."""

    __slots__ = ("_core", "_plan", "_rows", "_templates")

    def __init__(self, plan: Plan, views: Operands, rows: Operands, results: tuple[Tensor, Tensor, Tensor]) -> None:
        """views: those of a call; rows: the same over no memory; results: out, max and sum of that call."""
        self._templates = [template(t, t.shape, t.dtype) for t in results]
        self._plan, self._rows = plan, rows
        self._core = plan.module.prepare_forward(plan.problem, plan.schedule, views)

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None = None, *, stats: bool
    ) -> tuple[Tensor, Any, Any]:
        """(out, max, sum) of other tensors; perhaps without the last two if they are not asked for."""
        core = self._core  # another thread may forget it meanwhile
        if core is not None:
            out, max_, sum_ = self._results() if stats else (another(self._templates[0]), None, None)
            if core(q, k, v, table, out, max_, sum_):
                return out, max_, sum_
        self._core = None  # The core left rows unfinished, and would again: run the plan.
        results = self._results()
        self._plan.run(over(self._rows, q, (k,), (v,), table, results))
        return results

    def _results(self) -> tuple[Tensor, Tensor, Tensor]:
        out, max_, sum_ = map(another, self._templates)
        return out, max_, sum_
