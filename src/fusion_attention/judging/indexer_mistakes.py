"""Well-known mistakes of the indexer and of its loss."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from fusion_attention.ir.mask import INFINITE
from fusion_attention.ir.problem import Extents
from fusion_attention.judging.indexer_formulas import Index
from fusion_attention.judging.mistakes.compressed import BOUND, RESIDUAL, bounds, residuals
from fusion_attention.judging.mistakes.kinds import finite, moved

Tries = Iterator[tuple[str, Index]]
_TILES = (16, 32, 64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True)
class IndexMistake:
    """A mistake in a call of the indexer, its statistics or its loss; see mistakes.kinds.Mistake."""

    name: str
    means: str
    fix: str
    tries: Callable[[Index], Tries]


def _banded(x: Index, **edges: np.ndarray) -> Index:
    e = x.extents
    return x.changed(
        extents=Extents(e.q_len, e.kv_len, edges.get("lo", e.lo), edges.get("hi", e.hi), e.prefix, e.shift)
    )


@partial(
    IndexMistake, "causal-alignment", "The diagonal of the band starts in the wrong corner of the matrix.",
    "sparse_mode 3 counts from the lower right corner.",
)  # fmt: skip
def _alignment(x: Index) -> Tries:
    d = x.extents.kv_len - x.extents.q_len
    if d.any() and finite(x.extents.hi).any():
        yield "from the upper left corner", _banded(x, hi=moved(x.extents.hi, -d))
        yield "from the lower right corner", _banded(x, hi=moved(x.extents.hi, d))


@partial(IndexMistake, "mask-ignored", "Keys that the call's mask removes are visible.", "Is sparse_mode passed on?")
def _unmasked(x: Index) -> Tries:
    if finite(x.extents.hi).any():
        yield "the sparse mode", _banded(x, hi=np.full_like(x.extents.hi, INFINITE))


@partial(
    IndexMistake, "causal-uncalled", "Keys after the diagonal are removed, but the call is not causal.",
    "Look for a default of sparse_mode.",
)  # fmt: skip
def _uncalled(x: Index) -> Tries:
    if not finite(x.extents.hi).any():
        yield "to the lower right corner", _banded(x, hi=x.extents.kv_len - x.extents.q_len + 1)


@partial(IndexMistake, "window-off-by-one", "An edge of the band is one key off.", "A row sees its own key.")
def _by_one(x: Index) -> Tries:
    if finite(x.extents.hi).any() and x.problem.ratio == 1:
        yield "the diagonal itself is not visible", _banded(x, hi=moved(x.extents.hi, -1))
        yield "one key after the right edge is visible", _banded(x, hi=moved(x.extents.hi, 1))


@partial(IndexMistake, *BOUND)
def _bound(x: Index) -> Tries:
    e, ratio = x.extents, x.problem.ratio
    if finite(e.hi).any() and ratio > 1:
        for detail, hi in bounds(e.hi, ratio):
            yield detail, _banded(x, hi=hi)


@partial(IndexMistake, *RESIDUAL)
def _residual(x: Index) -> Tries:
    e, ratio = x.extents, x.problem.ratio
    if finite(e.hi).any() and ratio > 1:
        for detail, hi in residuals(e.hi, e.q_len, e.kv_len, ratio):
            yield detail, _banded(x, hi=hi)


@partial(
    IndexMistake, "topk-ties", "Of equal scores the later key comes first.",
    "Among equals the smaller index comes first: sort stably, or compare (score, -index).",
)  # fmt: skip
def _ties(x: Index) -> Tries:
    if x.op_kind == "indexer_topk":
        yield "", x.changed(last_first=True)


@partial(IndexMistake, "topk-order", "The list is in another order.", "Largest scores first.")
def _order(x: Index) -> Tries:
    if x.op_kind == "indexer_topk":
        yield "the smallest are chosen", x.changed(largest=False)
        yield "in the order of keys", x.changed(by_key=True)


@partial(
    IndexMistake, "relu-missing", "Negative products are not set to zero before they are weighed.",
    "I = sum_h w_h * max(0, q_h . k).",
)  # fmt: skip
def _relu(x: Index) -> Tries:
    yield "", x.changed(relu=False)


@partial(
    IndexMistake, "index-weights-missing", "Heads are added up without their weights.",
    "I = sum_h w_h * max(0, q_h . k).",
)  # fmt: skip
def _weights(x: Index) -> Tries:
    yield "", x.changed(weighted=False)


@partial(
    IndexMistake, "index-weights-moved", "Heads have the weights of their neighbours.",
    "Weights are [.., S1, N1]: the heads of a row are adjacent.",
)  # fmt: skip
def _neighbours(x: Index) -> Tries:
    if x.heads > 1:
        yield "of the next head", x.changed(weights_from=1)
        yield "of the previous head", x.changed(weights_from=-1)


@partial(
    IndexMistake,
    "list-shortened",
    "The last entry of full lists is missing.",
    "Lists have sparse_count keys if that many are visible.",
)
def _shorter(x: Index) -> Tries:
    if x.op_kind == "indexer_topk" and x.problem.top_k > 1:
        yield "-1 for it", x.changed(shorter=1)


@partial(
    IndexMistake, "tile-skipped", "Keys of a tile are never chosen.",
    "Look at the loop over tiles of keys: its end, and the merge of their best keys.",
)  # fmt: skip
def _unread(x: Index) -> Tries:
    lengths = sorted({int(n) for n in x.extents.kv_len})
    for tile in _TILES if x.op_kind == "indexer_topk" and lengths else ():
        if tile < lengths[-1]:
            yield f"the first {tile} keys", x.changed(unread=(0, tile))
            yield f"from key {tile} on", x.changed(unread=(tile, lengths[-1]))
            if len(lengths) == 1 and lengths[0] % tile and lengths[0] > 2 * tile:
                yield f"the last, partial tile of {tile}", x.changed(unread=(lengths[0] // tile * tile, lengths[0]))


@partial(IndexMistake, "index-scale", "The indexer's scores are scaled.", "They have no scale.")
def _factor(x: Index) -> Tries:
    if x.op_kind == "indexer_topk":
        yield "1 / sqrt(D)", x.changed(factor=x.problem.dim**-0.5)
        yield "1 / sqrt(D * N)", x.changed(factor=(x.problem.dim * x.heads) ** -0.5)
        yield "1 / N", x.changed(factor=1 / x.heads)


def _loss(x: Index) -> bool:
    return x.op_kind == "indexer_loss"


@partial(
    IndexMistake, "kl-direction", "The divergence is taken in the other direction: KL(y | p), not KL(p | y).",
    "KL(p | y) = sum p (log p - log y); p is the attention's distribution.",
)  # fmt: skip
def _direction(x: Index) -> Tries:
    if _loss(x) and not x.problem.has_target:
        yield "the loss and its gradients", x.changed(direction="y|p")
        yield "the loss alone", x.changed(direction="y|p", loss_alone=True)


@partial(IndexMistake, "loss-mean", "Loss and gradients are means over rows, not sums.", "Divide outside the call.")
def _mean(x: Index) -> Tries:
    if _loss(x):
        yield "", x.changed(reduction="mean")


@partial(IndexMistake, "loss-sign", "The gradients have the other sign.", "dI = y - p.")
def _sign(x: Index) -> Tries:
    if _loss(x):
        yield "", x.changed(sign=-1.0)


@partial(
    IndexMistake, "target-mass",
    "A given target that sums to less than 1 counts as one that sums to 1, or the other way round.",
    "dI = y * sum_j p_j - p; without lists CANN's is y - p.",
)  # fmt: skip
def _mass(x: Index) -> Tries:
    if _loss(x) and x.problem.has_target:
        yield "", x.changed(problem=replace(x.problem, unit_target=not x.problem.unit_target))


@partial(
    IndexMistake, "target-heads", "The target is not divided by the number of heads.",
    "p is the mean of the heads' probabilities.",
)  # fmt: skip
def _heads(x: Index) -> Tries:
    if _loss(x) and x.problem.heads_q > 1:
        yield "", x.changed(per_head=False)


@partial(IndexMistake, "scale-missing", "Products of the attention are not scaled.", "Is scale_value passed?")
def _scale(x: Index) -> Tries:
    if _loss(x) and x.problem.scale != 1.0:
        yield "", x.changed(scaled=False)


INDEX_MISTAKES = (
    _alignment,
    _unmasked,
    _uncalled,
    _by_one,
    _bound,
    _residual,
    _ties,
    _order,
    _relu,
    _weights,
    _neighbours,
    _shorter,
    _unread,
    _factor,
    _direction,
    _mean,
    _sign,
    _heads,
    _mass,
    _scale,
)
