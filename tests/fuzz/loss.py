"""Calls of indexer_loss, torch_npu's sparse and dense loss functions, and the function for the loss's statistics."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import fusion_attention as fa
from fusion_attention import npu

from .attention import draw_scale
from .core import Drawn, Results, Value
from .dense import Batch, fill_batch, hide_unseen
from .formulas import EXP, Rows, U
from .indexer import Scores, draw_parts, place_gradients, place_weights, scores_of
from .sparse import Lists, draw_lists, draw_sequences, given_lengths, place_lists, place_stats, visible
from .storage import Rng, Tensor, dim, leaf, maybe, normal, pick, place, place_rows

INDEX = ("iq", "ik", "iw")
GRADIENTS = {"index_q": "dq", "index_k": "dk", "weights": "dw"}
LEAST = 1e-8  # of a probability in a logarithm


@dataclass
class Plan:
    """Random parameters of a call, besides its tensors; counts: how often a row counts a key, [R, K] per sequence."""

    batch: Batch
    index: Batch
    call: dict[str, Any]
    interface: str
    kind: torch.dtype
    scale: float
    counts: list[Tensor]
    sink: Tensor | None
    lists: Lists | None
    trained: list[str] = field(default_factory=list)
    lse: list[Tensor] = field(default_factory=list)
    given: tuple[list[Tensor], list[Tensor]] = field(default_factory=lambda: ([], []))
    factor: float = 1.0


def _attention(batch: Batch, s: int, count: Tensor, scale: float, sink: Tensor | None) -> Rows:
    sink64 = None if sink is None else sink.double()
    full = count.expand(batch.heads, -1, -1)
    return Rows(batch.q(s), batch.k(s), batch.k(s)[..., :1], scale, full, batch.dtype, sink=sink64)


def draw(rng: Rng) -> Drawn:
    batch = draw_sequences(rng, 130)
    if maybe(rng, 0.3):
        batch.dim_rope = dim(rng, 32)
    batch.dim = min(batch.dim, 100)
    index = replace(batch, heads=int(rng.integers(1, 9)) if maybe(rng, 0.9) else int(rng.integers(9, 40)), heads_kv=1)
    index.dim, index.dim_rope, index.parts = dim(rng, 64), 0, {}
    interface = str(pick(rng, "own", "npu sparse", "npu dense", "npu statistics"))
    causal = maybe(rng, 0.7)
    fill_batch(batch, values=False)
    kind = draw_parts(index, maybe(rng, 0.1), INDEX)
    selects = interface == "npu sparse" or (interface == "own" and maybe(rng, 0.6))
    lists = draw_lists(batch, 1, 1, causal) if selects else None
    everything = [
        (torch.arange(n) < visible(m, n, causal)[:, None]).int() for m, n in zip(batch.q_len, batch.kv_len, strict=True)
    ]
    counts = everything if lists is None else [item_counts[0] for item_counts in lists.counts]
    sink = normal(rng, batch.heads).float() if maybe(rng, 0.25) and interface in ("own", "npu sparse") else None
    scale = draw_scale(rng, batch.dim + batch.dim_rope)
    p = Plan(batch, index, {}, interface, kind, scale, counts, sink, lists)
    denser = maybe(rng, 0.15)
    dense = everything if denser else counts
    if sink is not None and any(_takes_all(p, s, count, sink) for s, count in enumerate(dense)):
        p.sink = sink = None
    for s, count in enumerate(dense):
        rows = _attention(batch, s, count, p.scale, sink if batch.kv_len[s] else None)
        p.lse.append(rows.lse.float().double())
        gone = ~rows.max.isfinite()
        p.given[0].append(torch.where(gone, 0.0, rows.max).float().double())
        p.given[1].append(torch.where(gone, 0.0, rows.sum).float().double())
    if not denser:
        hide_unseen(batch, [count.expand(batch.heads, -1, -1) for count in counts], True)
        if maybe(rng, 0.6):
            for s, count in enumerate(counts):
                index.parts["ik"][s][~(count > 0).any(0)] = torch.nan
    _arguments(p, causal)
    about = {"interface": interface, "factor": p.factor, **p.call}
    return Drawn(about, lambda: _run(p), lambda _: _expect(p))


def _takes_all(p: Plan, s: int, count: Tensor, sink: Tensor) -> bool:
    """Returns True if the sinks take almost all weight of a row: rounding then decides the divisor, which may be 0."""
    if not p.batch.kv_len[s]:
        return False
    rows = _attention(p.batch, s, count, p.scale, sink)
    left = (1 - (sink.double()[:, None] - rows.lse).exp()).sum(0)
    return bool((~rows.empty.all(0) & (left * 4096 < p.batch.heads)).any())


def _arguments(p: Plan, causal: bool) -> None:
    b, rng, is_python = p.batch, p.batch.rng, p.interface == "own"
    names = ("q_len", "kv_len") if is_python else ("actual_seq_qlen", "actual_seq_klen")
    p.call |= given_lengths(b, not is_python, names)
    index = {"q": p.index.tensor("iq", "q"), "k": p.index.tensor("ik", "kv")}
    index["w"] = place_weights(b, p.index.parts["iw"], p.kind, torch.nan)
    long = {"q": "query_index", "k": "key_index", "w": "weights"}
    index = {("index_" + n if n != "w" else "weights") if is_python else long[n]: t for n, t in index.items()}
    p.call |= index | {"layout": b.layout}
    p.call |= {"causal": causal} if is_python else {"sparse_mode": 3 if causal else 0}
    if p.interface == "npu statistics":
        return
    kinds = {"q": "query", "k": "key", "q_rope": "query_rope", "k_rope": "key_rope"}
    p.call |= {n if is_python else kinds[n]: b.tensor(n, "q" if n[0] == "q" else "kv") for n in kinds if n in b.parts}
    p.call["scale" if is_python else "scale_value"] = p.scale
    if p.sink is not None:
        p.call["sink" if is_python else "sinks"] = place(rng, p.sink)
    if p.lists is not None:
        dtype = torch.int64 if maybe(rng, 0.4) else torch.int32
        p.call["indices" if is_python else "sparse_indices"] = place_lists(b, p.lists.entries, dtype)
    if is_python:
        p.call["lse"] = place(rng, place_rows(p.lse, b.packed, b.tokens[0], -torch.inf).float())
        p.trained = [n for n in ("index_q", "index_k", "weights") if maybe(rng, 0.7)]
        p.call |= {n: leaf(p.call[n]) for n in p.trained}
        p.factor = float(rng.choice([1.0, 2.0, -4.0]))
        return
    for name, parts in zip(("softmax_max", "softmax_sum"), p.given, strict=True):
        p.call[name] = place(rng, place_stats(b, parts).float())
    if p.interface == "npu dense":
        for name, parts in zip(("softmax_max_index", "softmax_sum_index"), _index_statistics(p), strict=True):
            p.call[name] = place(rng, _by_row(p, [rows.float() for rows, _ in parts]))


def _by_row(p: Plan, parts: Sequence[Tensor]) -> Tensor:
    """Returns [B, 1, S1] or [1, T1] from [R] per sequence."""
    packed_rows = place_rows([rows[None] for rows in parts], p.batch.packed, p.batch.tokens[0])
    return packed_rows.T if p.batch.packed else packed_rows


def _masked(p: Plan, s: int) -> tuple[Scores, Tensor, Tensor]:
    """Returns (the indexer's scores of visible keys, counts, errors of the scores)."""
    count = p.counts[s]
    index = p.index
    key = index.parts["ik"][s]
    index.parts["ik"][s] = torch.where((count > 0).any(0)[:, None, None], key, 0.0)
    scores = scores_of(index, s, names=INDEX)
    index.parts["ik"][s] = key
    return scores, count, scores.error + 4 * U * scores.value.abs()


def _peak(scores: Scores, is_visible: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the largest visible score of each row and its error, [R, 1]; 0 and 0 without visible keys."""
    if not is_visible.shape[1]:
        return scores.value.new_zeros(len(is_visible), 1), scores.value.new_zeros(len(is_visible), 1)
    top = scores.value.masked_fill(~is_visible, -torch.inf).amax(-1, keepdim=True)
    top = top.masked_fill(~is_visible.any(-1, keepdim=True), 0.0)
    return top, torch.where(is_visible, error, 0.0).amax(-1, keepdim=True)


def _index_statistics(p: Plan) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    """Returns (max, error) and (sum, error) [R] of every sequence; 0 and 0 for rows without visible keys."""
    tops, sums = [], []
    for s in range(len(p.counts)):
        scores, count, error = _masked(p, s)
        is_visible = count > 0
        peak, off = _peak(scores, is_visible, error)
        total = torch.where(is_visible, (scores.value - peak).exp(), 0.0).sum(-1, keepdim=True)
        relative = torch.expm1(2 * off) + EXP + (is_visible.shape[1] + 9) * U
        tops.append((peak[:, 0], (off + U * peak.abs())[:, 0]))
        sums.append((total[:, 0], (total * relative)[:, 0]))
    return tops, sums


def _run(p: Plan) -> Results:
    if p.interface == "npu statistics":
        call = p.call
        return dict(zip(("max", "sum"), npu.npu_dense_lightning_indexer_softmax_lse(**call), strict=True))
    if p.interface == "own":
        loss = fa.indexer_loss(**p.call)
        results = {"loss": loss.detach().reshape(1)}
        if p.trained:
            grads = torch.autograd.grad(loss, [p.call[n] for n in p.trained], torch.tensor(p.factor))
            results |= {GRADIENTS[n]: g for n, g in zip(p.trained, grads, strict=True)}
        return results
    function = getattr(npu, f"{p.interface.replace(' ', '_')}_lightning_indexer_grad_kl_loss")
    return dict(zip(("dq", "dk", "dw", "loss"), function(**p.call), strict=True))


def _target(p: Plan, s: int) -> tuple[Tensor, Tensor]:
    """Returns the target p [R, K] of visible keys, and its error."""
    b, count = p.batch, p.counts[s]
    rows = _attention(b, s, count, p.scale, None)
    if p.interface == "own":
        lse, size = p.lse[s], p.lse[s].nan_to_num(0, 0, 0).abs()
    else:
        peak, total = p.given[0][s], p.given[1][s]
        lse = torch.where(total > 0, peak + total.log(), -torch.inf)
        size = peak.abs() + total.clamp(min=1e-30).log().abs()
    # Target: 1 / N1 sum_h exp(s - lse) over keys, without the weights of the sinks.
    each = torch.where(rows.visible, (rows.scores - lse[..., None].nan_to_num(0, 0, 0)).exp(), 0.0)
    shift = rows.score_error + 4 * U * size[..., None]
    off = each * (torch.expm1(shift.clamp(max=50)) + 2 * EXP + 16 * U) + (2 * U + TINY_WEIGHT) * (each > 0)
    heads, doubt = torch.full(count.shape[:1], float(b.heads)).double(), torch.zeros(count.shape[0]).double()
    if p.sink is not None and b.kv_len[s]:
        gone = torch.where(lse.isfinite(), (p.sink.double()[:, None] - lse).exp(), 0.0)
        heads = heads - gone.sum(0)
        doubt = (gone * (8 * U * (size + p.sink.double().abs()[:, None]) + 2 * EXP + 16 * U)).sum(0) + b.heads * 4 * U
    relative = (doubt / heads.clamp(min=1e-30))[:, None] + (b.heads + 8) * U
    heads = torch.where(rows.empty.all(0), 1.0, heads)[:, None]
    value = each.sum(0) / heads
    return value, off.sum(0) / heads * (1 + relative) + value * relative


TINY_WEIGHT = 2.0**-126


def _distribution(p: Plan, s: int, given: tuple[list[Tensor], list[Tensor]] | None) -> tuple[Scores, Tensor, Tensor]:
    """Returns (scores, y [R, K], error of y) of the indexer."""
    scores, count, error = _masked(p, s)
    is_visible = count > 0
    if given is not None:
        peak, total = given[0][s][:, None], given[1][s][:, None]
        off = torch.zeros_like(peak)
    else:
        peak, off = _peak(scores, is_visible, error)
        total = torch.where(is_visible, count * (scores.value - peak).exp(), 0.0).sum(-1, keepdim=True)
    y = torch.where(is_visible, (scores.value - peak).exp() / torch.where(total > 0, total, 1.0), 0.0)
    relative = torch.expm1((error + off + 4 * U * peak.abs()).clamp(max=50)) + 2 * EXP + (is_visible.shape[1] + 16) * U
    return scores, y, torch.where(is_visible, y * relative + TINY_WEIGHT, 0.0)


def _expect(p: Plan) -> dict[str, Value]:
    if p.interface == "npu statistics":
        results = {}
        for name, parts in zip(("max", "sum"), _index_statistics(p), strict=True):
            value, error = (_by_row(p, [item[i] for item in parts]) for i in (0, 1))
            results[name] = Value(value, error + U * value.abs(), torch.float32)
        return results
    given = None
    if p.interface == "npu dense":
        tops, sums = _index_statistics(p)
        given = [t.float().double() for t, _ in tops], [t.float().double() for t, _ in sums]
    loss, doubt, slopes = 0.0, 0.0, []
    for s, count in enumerate(p.counts):
        scores, y, y_error = _distribution(p, s, given)
        t, t_error = _target(p, s)
        inside, off = _terms(t, t_error, y, y_error, p.lists is not None)
        loss += float((count * inside).sum())
        doubt += float((count * (off + (count.shape[1] + 8) * U * inside.abs())).sum())
        di, di_error = count * (y - t), count * (y_error + t_error + 4 * U * (y + t))
        di, di_error = (torch.where(count > 0, x, 0.0) for x in (di, di_error))
        slopes.append(scores.gradients(di, di_error, di.abs()))
    value = torch.tensor([loss], dtype=torch.float64)
    expected = {"loss": Value(value, doubt + 4 * U * value.abs() + 1e-37, torch.float32)}
    packed_rows = place_gradients(p.index, slopes, p.kind)
    requested = [GRADIENTS[n] for n in p.trained] if p.interface == "own" else packed_rows
    for name in requested:
        g = packed_rows[name]
        expected[name] = Value(g.value * p.factor, g.error * abs(p.factor), g.dtype)
    return expected


def _terms(t: Tensor, t_error: Tensor, y: Tensor, y_error: Tensor, selected: bool) -> tuple[Tensor, Tensor]:
    """Returns p * (ln max(p, 1e-8) - ln max(y, 1e-8)) of each key; with selected keys, the factor p is clamped too."""
    high, low = t.clamp(min=LEAST), y.clamp(min=LEAST)
    factor = high if selected else t
    logs = high.log() - low.log()
    of_logs = torch.minimum(t_error / (t - t_error).clamp(min=LEAST), t_error / LEAST)
    of_logs = of_logs + y_error / (y - y_error).clamp(min=LEAST)
    of_logs = of_logs + 4 * EXP + 8 * U * (high.log().abs() + low.log().abs())
    return factor * logs, t_error * logs.abs() + (factor + t_error) * of_logs
