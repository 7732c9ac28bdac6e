"""Tile shapes of lists of selected keys, of the indexer and of its loss; which sizes each verb's kernels hold.

Found as those of shapes.py were: by compiling, not by timing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusion_attention.backends.triton import shapes_loss
from fusion_attention.backends.triton.shapes import Tile
from fusion_attention.waist.problem import AnyProblem, IndexerLossProblem, IndexerProblem, Problem

# ------------------------------------------------------------------------------------------- attention to lists


def forward_tile(problem: Problem, chip: int) -> Tile | None:
    """BM heads of a token meet BN keys of its list."""
    return Tile(16, 16, 4, 1)


# --------------------------------------------------------------------------------------- its backward, sums per key


# ---------------------------------------------------------------------------------------------------- the indexer


# -------------------------------------------------------------------------------------------------- what is refused

# Verb -> whether its kernels have a tile for a problem on a chip; a verb that is not listed has one for all.
HOLDS: dict[str, Callable[[Any, int], bool]] = {
    "attention_forward": lambda p, chip: forward_tile(p, chip) is not None,
    "indexer_lse": shapes_loss.holds_lse,
    "indexer_loss": shapes_loss.holds_loss,
}


def verbs_of(problem: AnyProblem) -> tuple[str, ...]:
    """The verbs that compute a problem."""
    if isinstance(problem, Problem):
        return "attention_forward", "attention_backward"
    return ("indexer_loss",) if isinstance(problem, IndexerLossProblem) else (
        "indexer_topk", "indexer_backward", "indexer_lse"
    )  # fmt: skip


def sizes_of(problem: AnyProblem) -> str:
    """What a refusal says of a problem's sizes."""
    p = problem
    if isinstance(p, IndexerProblem):
        return f"{p.heads} indexer heads of {p.dim} elements, top_k {p.top_k}"
    sizes = f"dim_qk {p.dim_qk}, dim_rope {p.dim_rope}"
    if isinstance(p, IndexerLossProblem):
        return f"{sizes}, {p.heads_q} heads, and {p.heads_index} indexer heads of {p.dim_index} elements"
    return f"{sizes} and dim_v {p.dim_v}"


def against(problem: AnyProblem, verb: str, chip: int) -> list[str]:
    """Why no kernel of a verb, or without one of all that compute the problem, has code for its sizes."""
    verbs = (verb,) if verb else verbs_of(problem)
    if all(HOLDS[name](problem, chip) for name in verbs if name in HOLDS):
        return []
    said = f"{sizes_of(problem)} in {problem.dtype}"
    return [f"the triton back end has no tile for {said}: shared memory or registers do not hold one."]
