"""Well-known mistakes of the indexer and of its loss."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from fusion_attention.ir.mask import INFINITE
from fusion_attention.judging.indexer_formulas import Index
from fusion_attention.judging.mistakes.compressed import BOUND, RESIDUAL, bounds, residuals
from fusion_attention.judging.mistakes.kinds import finite, moved

Ways = Mapping[str, Index]
_TILES = (16, 32, 64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True)
class IndexMistake:
    """A mistake in a call of the indexer, its statistics or its loss."""

    # name, means, fix: as in mistakes.kinds.Mistake.
    name: str
    means: str
    fix: str
    # Returns the ways to make the mistake in a call, {detail: the call with it}; {} if it is impossible there.
    ways: Callable[[Index], Ways]


def _selects(x: Index) -> bool:
    return x.op_kind == "indexer_topk"


def _loss(x: Index) -> bool:
    return x.op_kind == "indexer_loss"


def _causal(x: Index) -> bool:
    return bool(finite(x.extents.hi).any())


def _compressed(x: Index) -> bool:
    """True for a causal call x whose keys represent several tokens each."""
    return _causal(x) and x.problem.ratio > 1


def _banded(x: Index, edges: Mapping[str, np.ndarray]) -> Ways:
    """Returns {description: the call x with these other upper edges of its band (a number per sequence)}."""
    return {detail: x.changed(extents=replace(x.extents, hi=hi)) for detail, hi in edges.items()}


def _alignment(x: Index) -> Ways:
    e, d = x.extents, x.extents.kv_len - x.extents.q_len
    corners = {"upper left": -d, "lower right": d} if d.any() and _causal(x) else {}
    return _banded(x, {f"from the {word} corner": moved(e.hi, by) for word, by in corners.items()})


def _by_one(x: Index) -> Ways:
    ways = {"the diagonal itself is not visible": -1, "one key after the right edge is visible": 1}
    suits = _causal(x) and x.problem.ratio == 1
    return _banded(x, {detail: moved(x.extents.hi, by) for detail, by in ways.items() if suits})


def _unread(x: Index) -> Ways:
    lengths = sorted({int(n) for n in x.extents.kv_len})
    ways = {}
    for tile in _TILES if _selects(x) and lengths else ():
        if tile < lengths[-1]:
            ways[f"the first {tile} keys"] = x.changed(unread=(0, tile))
            ways[f"from key {tile} on"] = x.changed(unread=(tile, lengths[-1]))
            if len(lengths) == 1 and lengths[0] % tile and lengths[0] > 2 * tile:
                unread = lengths[0] // tile * tile, lengths[0]
                ways[f"the last, partial tile of {tile}"] = x.changed(unread=unread)
    return ways


def _scales(x: Index) -> Ways:
    if not _selects(x):
        return {}
    dim, heads = x.problem.dim, x.heads
    factors = {"1 / sqrt(D)": dim**-0.5, "1 / sqrt(D * N)": (dim * heads) ** -0.5, "1 / N": 1 / heads}
    return {detail: x.changed(factor=factor) for detail, factor in factors.items()}


INDEX_MISTAKES = (
    IndexMistake(
        "causal-alignment", "The diagonal of the band starts in the wrong corner of the matrix.",
        "sparse_mode 3 counts from the lower right corner.",
        _alignment,
    ),
    IndexMistake(
        "mask-ignored", "Keys that the call's mask removes are visible.", "Is sparse_mode passed on?",
        lambda x: _banded(x, {"the sparse mode": np.full_like(x.extents.hi, INFINITE)} if _causal(x) else {}),
    ),
    IndexMistake(
        "causal-uncalled", "Keys after the diagonal are removed, but the call is not causal.",
        "Look for a default of sparse_mode.",
        lambda x: {} if _causal(x) else _banded(
            x, {"to the lower right corner": x.extents.kv_len - x.extents.q_len + 1}
        ),
    ),
    IndexMistake("window-off-by-one", "An edge of the band is one key off.", "A row sees its own key.", _by_one),
    IndexMistake(
        *BOUND,
        lambda x: _banded(x, dict(bounds(x.extents.hi, x.problem.ratio)) if _compressed(x) else {}),
    ),
    IndexMistake(
        *RESIDUAL,
        lambda x: _banded(
            x,
            dict(residuals(x.extents.hi, x.extents.q_len, x.extents.kv_len, x.problem.ratio)) if _compressed(x) else {},
        ),
    ),
    IndexMistake(
        "topk-ties", "Of equal scores the later key comes first.",
        "Among equals the smaller index comes first: sort stably, or compare (score, -index).",
        lambda x: {"": x.changed(last_first=True)} if _selects(x) else {},
    ),
    IndexMistake(
        "topk-order", "The list is in another order.", "Largest scores first.",
        lambda x: {
            "the smallest are chosen": x.changed(largest=False), "in the order of keys": x.changed(by_key=True)
        } if _selects(x) else {},
    ),
    IndexMistake(
        "relu-missing", "Negative products are not set to zero before they are weighed.",
        "I = sum_h w_h * max(0, q_h . k).",
        lambda x: {"": x.changed(relu=False)},
    ),
    IndexMistake(
        "index-weights-missing", "Heads are added up without their weights.", "I = sum_h w_h * max(0, q_h . k).",
        lambda x: {"": x.changed(weighted=False)},
    ),
    IndexMistake(
        "index-weights-moved", "Heads have the weights of their neighbours.",
        "Weights are [.., S1, N1]: the heads of a row are adjacent.",
        lambda x: {
            "of the next head": x.changed(weights_from=1), "of the previous head": x.changed(weights_from=-1)
        } if x.heads > 1 else {},
    ),
    IndexMistake(
        "list-shortened", "The last entry of full lists is missing.",
        "Lists have sparse_count keys if that many are visible.",
        lambda x: {"-1 for it": x.changed(shorter=1)} if _selects(x) and x.problem.top_k > 1 else {},
    ),
    IndexMistake(
        "tile-skipped", "Keys of a tile are never chosen.",
        "Look at the loop over tiles of keys: its end, and the merge of their best keys.",
        _unread,
    ),
    IndexMistake("index-scale", "The indexer's scores are scaled.", "They have no scale.", _scales),
    IndexMistake(
        "kl-direction", "The divergence is taken in the other direction: KL(y | p), not KL(p | y).",
        "KL(p | y) = sum p (log p - log y); p is the attention's distribution.",
        lambda x: {
            "the loss and its gradients": x.changed(direction="y|p"),
            "the loss alone": x.changed(direction="y|p", loss_alone=True),
        } if _loss(x) and not x.problem.has_target else {},
    ),
    IndexMistake(
        "loss-mean", "Loss and gradients are means over rows, not sums.", "Divide outside the call.",
        lambda x: {"": x.changed(reduction="mean")} if _loss(x) else {},
    ),
    IndexMistake(
        "loss-sign", "The gradients have the other sign.", "dI = y - p.",
        lambda x: {"": x.changed(sign=-1.0)} if _loss(x) else {},
    ),
    IndexMistake(
        "target-heads", "The target is not divided by the number of heads.",
        "p is the mean of the heads' probabilities.",
        lambda x: {"": x.changed(per_head=False)} if _loss(x) and x.problem.heads_q > 1 else {},
    ),
    IndexMistake(
        "target-mass",
        "A given target that sums to less than 1 counts as one that sums to 1, or the other way round.",
        "dI = y * sum_j p_j - p; without lists CANN's is y - p.",
        lambda x: {
            "": x.changed(problem=replace(x.problem, unit_target=not x.problem.unit_target))
        } if _loss(x) and x.problem.has_target else {},
    ),
    IndexMistake(
        "scale-missing", "Products of the attention are not scaled.", "Is scale_value passed?",
        lambda x: {"": x.changed(scaled=False)} if _loss(x) and x.problem.scale != 1.0 else {},
    ),
)  # fmt: skip
