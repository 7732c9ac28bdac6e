"""Calls of lightning_indexer and torch_npu's indexer: selected keys, their order, and the gradient of the values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import fusion_attention as fa
from fusion_attention import npu

from .core import Drawn, Results, Value, exact
from .dense import Batch
from .formulas import HALF, U, narrowing, rounding
from .sparse import Lists, draw_lists, draw_sequences, given_lengths, place_lists, place_pages, read_entries, visible
from .storage import Rng, Tensor, leaf, maybe, normal, pick, place, place_dense


@dataclass
class Scores:
    """One sequence: s [N, R, K] = q . k, I [R, K] = sum_h w_h * max(0, s_h), and the errors of s and I."""

    q: Tensor
    k: Tensor
    w: Tensor
    dtype: torch.dtype
    exact: bool = False

    def __post_init__(self) -> None:
        self.s = self.q @ self.k.mT
        self.s_error = (self.q.shape[-1] + 4) * U * (self.q.abs() @ self.k.abs().mT)
        w = self.w.T[..., None]
        self.value = (w * self.s.clamp(min=0)).sum(0)
        terms = w.abs() * self.s.abs()
        self.error = (w.abs() * self.s_error).sum(0) + (len(self.w.T) + 4) * U * terms.sum(0)
        if self.exact:  # small whole numbers: no program rounds them
            self.s_error, self.error = torch.zeros_like(self.s), torch.zeros_like(self.value)

    def gradients(self, di: Tensor, di_error: Tensor, size: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns dq [N, R, D], dk [K, D] and dw [R, N] from dI [R, K]; ReLU's slope is uncertain where s is near 0.

        size: sum of absolute dI of all entries that name a key, because each entry may be rounded separately.
        """
        w = self.w.T[..., None]
        on = (self.s > 0).double()
        unsure = (self.s.abs() <= self.s_error) & (self.s_error > 0)
        positive = self.s.clamp(min=0)
        dw = (di * positive).sum(-1)
        dw_error = (di_error * positive + size * (self.s_error + (di.shape[-1] + 4) * U * positive)).sum(-1)
        ds = di * w * on
        off = (size + di_error) * w.abs()
        ds_error = di_error * w.abs() * on + torch.where(unsure, off, 0.0) + (narrowing(self.dtype) + 8 * U) * off
        dq, dk = ds @ self.k, (ds.mT @ self.q).sum(0)
        dq_error = (ds_error + (ds.shape[-1] + 4) * U * ds.abs()) @ self.k.abs()
        rows = ds.shape[0] * ds.shape[1] + 4
        dk_error = ((ds_error + rows * U * ds.abs()).mT @ self.q.abs()).sum(0)
        return {"dq": (dq, dq_error), "dk": (dk, dk_error), "dw": (dw.T, dw_error.T)}


def draw_parts(batch: Batch, coarse: bool, names: tuple[str, str, str] = ("q", "k", "w")) -> torch.dtype:
    """Draws q, k and weights; coarse: small integers, so that scores tie. Returns the dtype of the weights."""
    rng, b = batch.rng, batch
    kind = torch.float32 if maybe(rng, 0.5) else b.dtype
    for name, lengths, heads, elements in zip(
        names, (b.q_len, b.kv_len, b.q_len), (b.heads, 1, 1), (b.dim, b.dim, b.heads), strict=True
    ):
        if coarse:
            full = torch.from_numpy(rng.integers(-2, 3, (sum(lengths), heads, elements)).astype(np.float64))
        else:
            full = normal(rng, sum(lengths), heads, elements)
        b.parts[name] = list(full.to(kind if name == names[2] else b.dtype).double().split(lengths))
    return kind


def place_weights(batch: Batch, parts: Sequence[Tensor], dtype: torch.dtype, fill: float) -> Tensor:
    """Returns weights [B, S1, N] or [T1, N] from [R, 1, N] per sequence."""
    return place(batch.rng, place_dense([p.to(dtype) for p in parts], batch.layout, batch.tokens[0], fill).squeeze(-2))


@dataclass
class Plan:
    """Random parameters of a call, besides its tensors."""

    batch: Batch
    call: dict[str, Any]
    interface: str
    kind: torch.dtype
    causal: bool
    count: int
    coarse: bool
    trained: list[str]
    lists: Lists | None = None
    values: bool = True

    def name(self, short: str) -> str:
        """Returns the interface's parameter name of q, k or w."""
        return short if self.interface == "own" and short != "w" else {"q": "query", "k": "key", "w": "weights"}[short]


def draw(rng: Rng) -> Drawn:
    batch = draw_sequences(rng, 300)
    batch.heads_kv, batch.heads = 1, int(rng.integers(1, 9)) if maybe(rng, 0.9) else int(rng.integers(9, 65))
    if maybe(rng, 0.6):
        batch.dim = min(batch.dim, 48)
    interface = str(pick(rng, "own", "npu", "npu gradient"))
    coarse = maybe(rng, 0.3)
    kind = draw_parts(batch, coarse)
    count = int(rng.integers(1, 16)) if maybe(rng, 0.6) else int(rng.integers(1, 400))
    p = Plan(batch, {}, interface, kind, maybe(rng, 0.7), count, coarse, [])
    pages = maybe(rng, 0.2) and interface != "npu gradient"
    is_python = interface == "own"
    names = ("q_len", "kv_len") if is_python else ("actual_seq_lengths_query", "actual_seq_lengths_key")
    p.call |= given_lengths(batch, not is_python, names, pages)
    _hide(batch)
    packed_rows, table = place_pages(batch, ["k"], is_python) if pages else ({"k": batch.tensor("k", "kv")}, None)
    packed_rows |= {"q": batch.tensor("q", "q"), "w": place_weights(batch, batch.parts["w"], kind, torch.nan)}
    p.call |= {p.name(n): tensor for n, tensor in packed_rows.items()}
    if interface == "npu gradient":
        return _draw_gradient(p)
    if is_python:
        p.call |= {"top_k": count, "layout": batch.layout, "causal": p.causal, "page_table": table}
    else:
        p.values = maybe(rng, 0.7)
        p.call |= {"sparse_count": count, "layout_query": batch.layout, "sparse_mode": 3 if p.causal else 0}
        p.call |= {"layout_key": "PA_BSND" if pages else batch.layout, "block_table": table, "return_value": p.values}
    dy = None
    if p.values and not pages and maybe(rng, 0.6):
        p.trained = [name for name in ("q", "k", "w") if maybe(rng, 0.7)]
        p.call |= {p.name(n): leaf(p.call[p.name(n)]) for n in p.trained}
        batch.parts["dy"] = [normal(rng, m, 1, count).to(batch.dtype).double() for m in batch.q_len]
        dy = batch.tensor("dy", "q") if p.trained else None
    return Drawn({"interface": interface, **p.call, "dy": dy}, lambda: _run(p, dy), lambda got: _expect(p, got))


def _hide(batch: Batch) -> None:
    """Writes NaN to the keys of sequences without rows."""
    for b, (m, n) in enumerate(zip(batch.q_len, batch.kv_len, strict=True)):
        if m == 0 and n:
            batch.parts["k"][b] = torch.full_like(batch.parts["k"][b], torch.nan)


def _run(p: Plan, dy: Tensor | None) -> Results:
    function: Any = fa.lightning_indexer if p.interface == "own" else npu.npu_lightning_indexer
    chosen, values = function(**p.call)
    results = {"indices": chosen, "values": values}
    if p.trained:
        leaves = [p.call[p.name(n)] for n in p.trained]
        results |= {"d" + n: g for n, g in zip(p.trained, torch.autograd.grad(values, leaves, dy), strict=True)}
    return results


def scores_of(batch: Batch, b: int, exact: bool = False, names: tuple[str, str, str] = ("q", "k", "w")) -> Scores:
    q, k, w = (batch.parts[name][b] for name in names)
    k = torch.zeros_like(k) if not len(q) else k
    return Scores(q.transpose(0, 1), k[:, 0], w[:, 0], batch.dtype, exact)


def fair(scores: Scores, chosen: Tensor, visible_keys: Tensor, count: int) -> Tensor:
    """Returns [R, count]: the computed list if rounding can explain its order, else the list by exact scores."""
    want = torch.full((len(visible_keys), count), -1, dtype=torch.int64)
    for row, vis in enumerate(visible_keys.tolist()):
        value, error = scores.value[row, :vis], scores.error[row, :vis]
        most = min(count, vis)
        order = torch.from_numpy(np.lexsort((np.arange(vis), -value.numpy()))[:most].copy())
        want[row, :most] = order
        mine = chosen[row, :most]
        legal = (
            bool(((mine >= 0) & (mine < vis)).all())
            and len(mine.unique()) == most
            and bool((chosen[row, most:] == -1).all())
        )
        if not legal or torch.equal(mine, order) or not most:
            continue
        low, off = value[mine], error[mine]
        rest = torch.ones(vis, dtype=torch.bool)
        rest[mine] = False
        falls = bool((low[:-1] + off[:-1] >= low[1:] - off[1:]).all())
        ties = (low[:-1] == low[1:]) & (off[:-1] == 0) & (off[1:] == 0) & (mine[:-1] > mine[1:])
        left = value[rest] - error[rest]
        if falls and not bool(ties.any()) and (not len(left) or bool(left.max() <= (low + off).min())):
            want[row, :most] = mine
    return want


def _expect(p: Plan, got: Results) -> dict[str, Value]:
    b = p.batch
    every = [scores_of(b, s, p.coarse) for s in range(len(b.q_len))]
    visible_keys = [visible(m, n, p.causal) for m, n in zip(b.q_len, b.kv_len, strict=True)]
    lists = b.split(got["indices"].long().squeeze(-2))
    wanted = [fair(e, entries, v, p.count) for e, entries, v in zip(every, lists, visible_keys, strict=True)]
    expected = {"indices": exact(_lay(b, wanted, -1).int())}
    if p.values:
        value = [torch.where(w >= 0, _at(e.value, w), -torch.inf) for e, w in zip(every, wanted, strict=True)]
        error = [torch.where(w >= 0, _at(e.error, w), 0.0) for e, w in zip(every, wanted, strict=True)]
        packed_rows = _lay(b, value, -torch.inf)
        off = rounding(packed_rows.nan_to_num(0, 0, 0), _lay(b, error, 0.0), b.dtype)
        expected["values"] = Value(packed_rows, torch.where(packed_rows.isfinite(), off, 0.0), b.dtype)
    else:
        expected["values"] = Value(torch.empty(0).double(), torch.empty(0).double(), b.dtype)
    if p.trained:
        expected |= _slopes(p, every, wanted, visible_keys)
    return expected


def _at(values: Tensor, positions: Tensor) -> Tensor:
    """Returns values[row, positions[row]]; arbitrary numbers for negative positions."""
    if not values.shape[1]:
        return torch.zeros(positions.shape, dtype=torch.float64)
    return values.gather(1, positions.clamp(min=0))


def _lay(batch: Batch, parts: Sequence[Tensor], fill: float) -> Tensor:
    return place_dense([rows[:, None] for rows in parts], batch.layout, batch.tokens[0], fill)


def scatter_slots(slots: Tensor, entries: Tensor, read: Tensor, keys: int) -> Tensor:
    """Returns [R, keys]: sums of slot values per key, over the slots that are read."""
    total = torch.zeros(len(slots), keys + 1, dtype=torch.float64)
    total.scatter_add_(1, torch.where(read, entries.clamp(max=keys), keys), torch.where(read, slots, 0.0))
    return total[:, :keys]


def place_gradients(
    batch: Batch, every: Sequence[dict[str, tuple[Tensor, Tensor]]], kind: torch.dtype
) -> dict[str, Value]:
    """Returns the expected dq, dk and dw in the layout."""
    expected = {
        "dq": batch.place_dense([e["dq"] for e in every], "q"),
        "dk": batch.place_dense([(e["dk"][0][None], e["dk"][1][None]) for e in every], "kv"),
    }
    value, error = (_lay(batch, [e["dw"][i] for e in every], 0.0).squeeze(-2) for i in (0, 1))
    expected["dw"] = Value(value, torch.where(error > 0, rounding(value, error, kind), HALF[kind] * value.abs()), kind)
    return expected


def _slopes(
    p: Plan, every: Sequence[Scores], lists: Sequence[Tensor], visible_keys: Sequence[Tensor]
) -> dict[str, Value]:
    b, result = p.batch, []
    for s, scores in enumerate(every):
        read = read_entries(lists[s], visible_keys[s], 1) & (lists[s] < visible_keys[s][:, None])
        dy = b.parts["dy"][s][:, 0]
        di = scatter_slots(dy, lists[s], read, b.kv_len[s])
        count = scatter_slots(torch.ones_like(dy), lists[s], read, b.kv_len[s])
        terms = scatter_slots(dy.abs(), lists[s], read, b.kv_len[s])
        result.append(scores.gradients(di, count * U * terms, terms))
    return {n: value for n, value in place_gradients(b, result, p.kind).items() if n[1:] in p.trained}


def _draw_gradient(p: Plan) -> Drawn:
    b, rng = p.batch, p.batch.rng
    p.lists = draw_lists(b, 1, 1, p.causal)
    count = p.lists.entries[0].shape[-1]
    b.parts["dy"] = [normal(rng, m, 1, count).to(b.dtype).double() for m in b.q_len]
    lists = place_lists(b, p.lists.entries, torch.int64 if maybe(rng, 0.5) else torch.int32)
    dy = b.tensor("dy", "q")
    if maybe(rng, 0.4):
        lists = lists.squeeze(-2)
    if maybe(rng, 0.4):
        dy = dy.squeeze(-2)
    p.call |= {"sparse_indices": lists, "dy": dy, "layout": b.layout, "sparse_mode": 3 if p.causal else 0}
    p.trained = ["q", "k", "w"]

    def run() -> Results:
        return dict(zip(("dq", "dk", "dw"), npu.npu_lightning_indexer_grad(**p.call), strict=True))

    def expect(_: Results) -> dict[str, Value]:
        assert p.lists is not None
        every = [scores_of(b, s, p.coarse) for s in range(len(b.q_len))]
        visible_keys = [visible(m, n, p.causal) for m, n in zip(b.q_len, b.kv_len, strict=True)]
        return _slopes(p, every, [entries[0] for entries in p.lists.entries], visible_keys)

    return Drawn({"interface": p.interface, **p.call}, run, expect)
