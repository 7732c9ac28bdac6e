"""Well-known mistakes of the indexer and of its loss."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fusion_attention.ir.mask import INFINITE
from fusion_attention.judging.indexer_formulas import Index
from fusion_attention.judging.mistakes.compressed import BOUND, RESIDUAL, bounds, residuals
from fusion_attention.judging.mistakes.kinds import finite, moved

Ways = Mapping[str, Mapping[str, Any]]  # changed fields of a call, by description of the way to make a mistake
_TILES = (16, 32, 64, 128, 256, 512, 1024, 2048)


def _selects(x: Index) -> bool:
    return x.op_kind == "indexer_topk"


def _loss(x: Index) -> bool:
    return x.op_kind == "indexer_loss"


def _causal(x: Index) -> bool:
    return bool(finite(x.extents.hi).any())


def _when(suits: Callable[[Index], bool], ways: Ways) -> Callable[[Index], Ways]:
    """Returns a function of a call: `ways` (changed fields by description of a mistake) if suits(call), else {}."""
    return lambda x: ways if suits(x) else {}


def _banded(x: Index, edges: Mapping[str, np.ndarray]) -> Ways:
    """Returns {description: fields of the indexer call x that give its causal band other upper edges}; edges: the edges
    [sequences], by description."""
    return {detail: {"extents": replace(x.extents, hi=hi)} for detail, hi in edges.items()}


def _alignment(x: Index) -> Ways:
    e, d = x.extents, x.extents.kv_len - x.extents.q_len
    corners = {"upper left": -d, "lower right": d} if d.any() and _causal(x) else {}
    return _banded(x, {f"from the {word} corner": moved(e.hi, by) for word, by in corners.items()})


def _by_one(x: Index) -> Ways:
    ways = {"the diagonal itself is not visible": -1, "one key after the right edge is visible": 1}
    suits = _causal(x) and x.problem.ratio == 1
    return _banded(x, {detail: moved(x.extents.hi, by) for detail, by in ways.items() if suits})


def _compressed(edges: Callable[[Index], Any]) -> Callable[[Index], Ways]:
    """Returns a function of an indexer call that returns {description: changed fields} for wrong upper edges of its
    band, if it is causal and a key represents several tokens; edges(call) yields (description, edges [sequences])."""
    return lambda x: _banded(x, dict(edges(x)) if _causal(x) and x.problem.ratio > 1 else {})


def _unread(x: Index) -> Ways:
    lengths = sorted({int(n) for n in x.extents.kv_len})
    ways = {}
    for tile in _TILES if _selects(x) and lengths else ():
        if tile < lengths[-1]:
            ways[f"the first {tile} keys"] = {"unread": (0, tile)}
            ways[f"from key {tile} on"] = {"unread": (tile, lengths[-1])}
            if len(lengths) == 1 and lengths[0] % tile and lengths[0] > 2 * tile:
                ways[f"the last, partial tile of {tile}"] = {"unread": (lengths[0] // tile * tile, lengths[0])}
    return ways


def _scales(x: Index) -> Ways:
    if not _selects(x):
        return {}
    dim, heads = x.problem.dim, x.heads
    factors = {"1 / sqrt(D)": dim**-0.5, "1 / sqrt(D * N)": (dim * heads) ** -0.5, "1 / N": 1 / heads}
    return {detail: {"factor": factor} for detail, factor in factors.items()}


# (name, description, advice, function of a call that returns the ways to make the mistake in it)
INDEX_MISTAKES: tuple[tuple[str, str, str, Callable[[Index], Ways]], ...] = (
    ("causal-alignment", "The diagonal of the band starts in the wrong corner of the matrix.",
     "sparse_mode 3 counts from the lower right corner.", _alignment),
    ("mask-ignored", "Keys that the call's mask removes are visible.", "Is sparse_mode passed on?",
     lambda x: _banded(x, {"the sparse mode": np.full_like(x.extents.hi, INFINITE)} if _causal(x) else {})),
    ("causal-uncalled", "Keys after the diagonal are removed, but the call is not causal.",
     "Look for a default of sparse_mode.",
     lambda x: {} if _causal(x) else _banded(x, {
         "to the lower right corner": x.extents.kv_len - x.extents.q_len + 1
     })),
    ("window-off-by-one", "An edge of the band is one key off.", "A row sees its own key.", _by_one),
    (*BOUND, _compressed(lambda x: bounds(x.extents.hi, x.problem.ratio))),
    (*RESIDUAL, _compressed(lambda x: residuals(x.extents.hi, x.extents.q_len, x.extents.kv_len, x.problem.ratio))),
    ("topk-ties", "Of equal scores the later key comes first.",
     "Among equals the smaller index comes first: sort stably, or compare (score, -index).",
     _when(_selects, {"": {"last_first": True}})),
    ("topk-order", "The list is in another order.", "Largest scores first.",
     _when(_selects, {"the smallest are chosen": {"largest": False}, "in the order of keys": {"by_key": True}})),
    ("relu-missing", "Negative products are not set to zero before they are weighed.",
     "I = sum_h w_h * max(0, q_h . k).", lambda x: {"": {"relu": False}}),
    ("index-weights-missing", "Heads are added up without their weights.", "I = sum_h w_h * max(0, q_h . k).",
     lambda x: {"": {"weighted": False}}),
    ("index-weights-moved", "Heads have the weights of their neighbours.",
     "Weights are [.., S1, N1]: the heads of a row are adjacent.",
     _when(lambda x: x.heads > 1, {
         "of the next head": {"weights_from": 1}, "of the previous head": {"weights_from": -1}
     })),
    ("list-shortened", "The last entry of full lists is missing.",
     "Lists have sparse_count keys if that many are visible.",
     _when(lambda x: _selects(x) and x.problem.top_k > 1, {"-1 for it": {"shorter": 1}})),
    ("tile-skipped", "Keys of a tile are never chosen.",
     "Look at the loop over tiles of keys: its end, and the merge of their best keys.", _unread),
    ("index-scale", "The indexer's scores are scaled.", "They have no scale.", _scales),
    ("kl-direction", "The divergence is taken in the other direction: KL(y | p), not KL(p | y).",
     "KL(p | y) = sum p (log p - log y); p is the attention's distribution.",
     _when(lambda x: _loss(x) and not x.problem.has_target, {
         "the loss and its gradients": {"direction": "y|p"},
         "the loss alone": {"direction": "y|p", "loss_alone": True},
     })),
    ("loss-mean", "Loss and gradients are means over rows, not sums.", "Divide outside the call.",
     _when(_loss, {"": {"reduction": "mean"}})),
    ("loss-sign", "The gradients have the other sign.", "dI = y - p.", _when(_loss, {"": {"sign": -1.0}})),
    ("target-heads", "The target is not divided by the number of heads.",
     "p is the mean of the heads' probabilities.",
     _when(lambda x: _loss(x) and x.problem.heads_q > 1, {"": {"per_head": False}})),
    ("target-mass", "A given target that sums to less than 1 counts as one that sums to 1, or the other way round.",
     "dI = y * sum_j p_j - p; without lists CANN's is y - p.",
     lambda x: {
         "": {"problem": replace(x.problem, unit_target=not x.problem.unit_target)}
     } if _loss(x) and x.problem.has_target else {}),
    ("scale-missing", "Products of the attention are not scaled.", "Is scale_value passed?",
     _when(lambda x: _loss(x) and x.problem.scale != 1.0, {"": {"scaled": False}})),
)  # fmt: skip
