"""Calls of torch_npu's training functions v1, v2, v3: forward, statistics, autograd and gradient functions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fusion_attention import npu

from .attention import UNLIMITED, draw_scale, mode_visible
from .core import Drawn, Results, Value, exact
from .dense import (
    Batch,
    Dropout,
    draw_batch,
    draw_bits,
    draw_blocked,
    draw_seed,
    dsink,
    fill_batch,
    gradients,
    hide_by_inf,
    hide_unseen,
)
from .formulas import Rows
from .pse import Pse, draw_pse
from .storage import DENSE_LAYOUTS, Rng, Tensor, leaf, lengths, maybe, normal, pick, place

FLT_MAX = float(np.finfo(np.float32).max)
SQUARE, TALL = (2048, 2048), (3072, 2048)
_TRIANGLE = torch.ones(SQUARE, dtype=torch.bool).triu(1)
_PREFIX = torch.cat((_TRIANGLE, (torch.arange(2048) >= 1024).expand(1024, 2048)))


@dataclass
class Plan:
    """Random parameters of a call, besides its tensors."""

    batch: Batch
    call: dict[str, Any]
    version: int
    scale: float
    bands: list[Tensor] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)
    pse: Pse | None = None
    slopes: list[Tensor] | None = None
    sink: Tensor | None = None
    drop: Dropout = field(default_factory=Dropout)
    trained: list[str] = field(default_factory=list)
    saves: bool = False

    @property
    def token_major(self) -> bool:
        return self.call.get("softmax_layout") == "TND"

    def name(self, short: str) -> str:
        return {"q": "query", "k": "key", "v": "value", "q_rope": "query_rope", "k_rope": "key_rope"}.get(short, short)


# ----------------------------------------------------------------------------------------------------- modes and masks


def _legal_window(mode: int, pre: int, next_: int, rows: int, keys: int) -> bool:
    """Returns True if a padded call may have this window, given from the upper left corner: it must reach a score."""
    if mode not in (0, 4) or not rows or not keys:
        return True
    shift = keys - rows if mode == 4 else 0
    left, right = (n if abs(n) >= UNLIMITED else n + s for n, s in ((pre, -shift), (next_, shift)))
    if left < 0 and right < 0:
        return False
    if left < 0:
        return right >= -left and -left < keys
    return right >= 0 or (left >= -right and -right < rows)


def _draw_window(p: Plan, mode: int) -> tuple[int, int]:
    rng, b = p.batch.rng, p.batch
    most = max([*b.q_len, *b.kv_len, 1])
    for _ in range(50):
        pre, next_ = (
            UNLIMITED if maybe(rng, 0.3) else int(rng.integers(-most if maybe(rng, 0.3) else 0, most + 2))
            for _ in range(2)
        )
        if b.packed or _legal_window(mode, pre, next_, *b.tokens):
            return pre, next_
    return UNLIMITED, UNLIMITED


def _draw_prefix(p: Plan) -> list[int]:
    pairs = zip(p.batch.q_len, p.batch.kv_len, strict=True)
    return [int(p.batch.rng.integers(max(n - m, 0) if m else 0, n + 1)) for m, n in pairs]


def _compressed(p: Plan, mode: int) -> Tensor:
    """Draws the documented matrix, or another one of its shape, because compressed masks are not read."""
    rng, kind = p.batch.rng, p.batch.rng.random()
    mask = _PREFIX if mode == 6 else _TRIANGLE
    if kind < 0.3:
        mask = torch.tensor(bool(rng.integers(2))).expand(mask.shape)
    elif kind < 0.4:
        mask = mask.mT.contiguous().mT
    mask = mask.view(torch.uint8) if maybe(rng, 0.3) and mask.stride()[-1] == 1 else mask
    return mask[None] if maybe(rng, 0.1) else mask[None, None] if maybe(rng, 0.1) else mask


def _draw_full_mask(p: Plan) -> list[Tensor]:
    """Draws a full mask; returns the keys that remain, [N, R, K] of every sequence."""
    b, rng = p.batch, p.batch.rng
    full = b.shape
    forms = [full, (full[0], 1, *full[2:]), (1, 1, *full[2:]), full[2:]]
    dtypes = (torch.bool, torch.uint8)
    if b.packed and maybe(rng, 0.4) and b.tokens != full[2:]:
        matrix = draw_blocked(rng, (1, 1, *b.tokens), b.tokens, dtypes)
        p.call["atten_mask"] = matrix.tensor
        result, row, key = [], 0, 0
        for m, n in zip(b.q_len, b.kv_len, strict=True):
            result.append(~matrix.values[0, :, row : row + m, key : key + n].expand(b.heads, -1, -1))
            row, key = row + m, key + n
        return result
    shape = forms[int(rng.integers(4))]
    some = tuple(1 if maybe(rng, 0.1) else n for n in shape)
    matrix = draw_blocked(rng, some, some, dtypes)
    p.call["atten_mask"] = matrix.tensor.expand(shape)
    return [~matrix.of(s, m, n, b.heads) for s, (m, n) in enumerate(zip(b.q_len, b.kv_len, strict=True))]


def _draw_mode(p: Plan) -> None:
    b, rng = p.batch, p.batch.rng
    modes = (0, 1, 2, 3, 4, 6, 7, 8) if b.packed else (0, 1, 2, 3, 4, 5, 6)
    mode = int(modes[int(rng.integers(len(modes)))])
    pre, next_ = _draw_window(p, mode)
    full = [torch.ones(m, n, dtype=torch.bool) for m, n in zip(b.q_len, b.kv_len, strict=True)]
    p.bands = full
    names = ("pre_tokens", "next_tokens") if p.version == 2 else ("pre_tockens", "next_tockens")
    p.call |= {"sparse_mode": mode} | (
        {} if maybe(rng, 0.1) and pre == next_ == UNLIMITED else dict(zip(names, (pre, next_), strict=True))
    )
    if maybe(rng, 0.15):
        p.counts = [band.expand(b.heads, -1, -1).int() for band in full]
        return
    masks = None
    if mode in (0, 1, 5):
        masks = _draw_full_mask(p)
    else:
        p.call["atten_mask"] = _compressed(p, mode)
    if mode in (5, 6):
        prefix = _draw_prefix(p)
        given = mode == 6 or maybe(rng, 0.7)
        if mode == 5 and given and maybe(rng, 0.2) and prefix:
            prefix[0], given = b.kv_len[0] + 1, False
            p.call["prefix"] = prefix
        elif given:
            p.call["prefix"] = lengths(rng, prefix)
        p.bands = [
            (torch.arange(n) - torch.arange(m)[:, None] <= n - m) | (torch.arange(n) < first)
            for m, n, first in zip(b.q_len, b.kv_len, prefix, strict=True)
        ]
        p.bands = p.bands if given else full
    else:
        p.bands = mode_visible(mode, pre, next_, b.q_len, b.kv_len)
    p.counts = [band.expand(b.heads, -1, -1).int() for band in p.bands]
    if masks is not None:
        p.counts = [torch.where(mask, count, 0) for mask, count in zip(masks, p.counts, strict=True)]


# ---------------------------------------------------------------------------------------------------------------- calls


def _draw_dropout(p: Plan) -> None:
    rng = p.batch.rng
    if maybe(rng, 0.7):
        return
    drop = p.drop = Dropout(float(rng.choice([0.9, 0.5, 0.1, 0.8])))
    p.call["keep_prob"] = drop.keep_prob
    if p.version != 3 and maybe(rng, 0.5):
        drop.bits = draw_bits(p.batch)
        p.call["dropout_mask"] = place(rng, drop.bits)
        if maybe(rng, 0.3):  # the mask says what is kept; seed and offset are handed back
            drop.seed, drop.offset = draw_seed(rng)
    elif p.version != 3 and maybe(rng, 0.6):
        drop.seed, drop.offset = draw_seed(rng)
    if drop.seed or drop.offset:
        p.call |= {"seed": drop.seed, "offset": drop.offset}


def _ends(rng: Rng, seq_lens: Sequence[int], version: int) -> object:
    """Returns cumulative ends; trailing empty sequences have the end 0 or repeat the last end."""
    ends = [int(n) for n in np.cumsum(seq_lens)]
    tail = next((i for i in range(len(seq_lens), 0, -1) if seq_lens[i - 1]), len(seq_lens))
    if maybe(rng, 0.5) and 0 < tail < len(seq_lens) and ends[tail - 1] > 0:
        ends[tail:] = [0] * (len(seq_lens) - tail)
    return torch.tensor(ends) if version == 3 and maybe(rng, 0.7) else lengths(rng, ends)


def _draw_plan(rng: Rng) -> Plan:
    version = int(rng.integers(1, 4))
    batch = draw_batch(rng, (*DENSE_LAYOUTS, "TND"), rope=0.2 if version == 2 else 0.0)
    if not batch.packed and maybe(rng, 0.004):  # a bias of which only the last 1024 rows are stored
        batch.tokens = (1024 + int(rng.integers(1, 20)),) * 2
        batch.q_len, batch.kv_len = [batch.tokens[0]], [batch.tokens[1]]
        batch.heads = batch.heads_kv = 1
    p = Plan(batch, {}, version, 1.0)
    p.scale = 1.0 if maybe(rng, 0.2) else draw_scale(rng, batch.dim + batch.dim_rope)
    if batch.packed:
        p.call |= {"actual_seq_qlen": _ends(rng, batch.q_len, version)}
        p.call |= {"actual_seq_kvlen": _ends(rng, batch.kv_len, version)}
        p.call["softmax_layout"] = str(pick(rng, "", "TND"))
    fill_batch(batch)
    _draw_mode(p)
    if max(batch.q_len, default=0) > 1024:  # rebuilt rows have no element beyond the diagonal
        p.call |= {"sparse_mode": 3, "atten_mask": _TRIANGLE}
        p.bands = [torch.ones(batch.tokens, dtype=torch.bool).tril()]
        p.counts = [band.expand(batch.heads, -1, -1).int() for band in p.bands]
    p.call["inner_precise"] = int(rng.integers(3))
    if maybe(rng, 0.35) or batch.tokens[0] > 1024:
        draw_pse(p)
    if maybe(rng, 0.2):
        p.sink = normal(rng, batch.heads).float()
        p.call["sink"] = place(rng, p.sink)
    _draw_dropout(p)
    return p


def _means(p: Plan) -> list[Tensor]:
    """Returns bool [N, R] of every sequence: rows that return the mean of v if they see no key."""
    b = p.batch
    emptied = [~band.any(-1) for band in p.bands]
    some = any(bool(e.any()) and n for e, n in zip(emptied, b.kv_len, strict=True))
    none = p.call["inner_precise"] == 2 or p.sink is not None or (not b.packed and some)
    return [
        torch.zeros(b.heads, m, dtype=torch.bool) if none or not n else ~e.expand(b.heads, -1)
        for e, m, n in zip(emptied, b.q_len, b.kv_len, strict=True)
    ]


def draw(rng: Rng) -> Drawn:
    p = _draw_plan(rng)
    b, may_mean = p.batch, _means(p)
    mean = any(bool(m.any()) for m in may_mean)
    hide_unseen(b, p.counts, mean)
    if p.pse is not None:
        hide_by_inf(b, p.counts, [p.pse.bias(s) for s in range(len(p.counts))], mean)
    b.draw("dy", "q", b.heads, b.dim_v)
    p.call |= {p.name(n): b.tensor(n, "q" if n[0] == "q" else "kv") for n in b.parts if n != "dy"}
    p.call |= {"scale": p.scale, "head_num": b.heads, "input_layout": b.layout}
    how = rng.random()
    names = [n for n in ("q", "k", "v", "q_rope", "k_rope", "pse", "sink") if p.call.get(p.name(n)) is not None]
    if p.slopes is not None:
        names.remove("pse")
    if how < 0.4:
        p.trained = [n for n in names if maybe(rng, 0.7)]
        p.call |= {p.name(n): leaf(p.call[p.name(n)]) for n in p.trained}
    elif how < 0.8 and p.drop.bits is None:
        p.saves, p.trained = True, names
    dy = b.tensor("dy", "q") if p.trained else None
    function = f"npu_fusion_attention v{p.version}{' and its gradient function' * p.saves}"
    return Drawn({"function": function, **p.call, "dy": dy}, lambda: _run(p, dy), lambda got: _expect(p, may_mean, got))


SUFFIX = {1: "", 2: "_v2", 3: "_v3"}


def _run(p: Plan, dy: Tensor | None) -> Results:
    forward: Callable[..., Any] = getattr(npu, "npu_fusion_attention" + SUFFIX[p.version])
    out, top, total, blank, seed, offset, *numels = forward(**p.call)
    results: Results = {"out": out, "max": top, "sum": total, "empty": blank}
    results |= {"seed": torch.as_tensor(seed).reshape(-1), "offset": torch.as_tensor(offset).reshape(-1)}
    if numels:
        results["numels"] = torch.tensor(numels)
    if p.saves:
        results |= _run_gradient(p, dy, results)
    elif p.trained:
        leaves = [p.call[p.name(n)] for n in p.trained]
        results |= {"d" + n: g for n, g in zip(p.trained, torch.autograd.grad(out, leaves, dy), strict=True)}
    return results


def _run_gradient(p: Plan, dy: Tensor | None, saved: Results) -> Results:
    given = {n: v for n, v in p.call.items() if n not in ("scale", "seed", "offset", "dropout_mask")}
    rng = p.batch.rng
    given |= {"dy": dy, "scale_value": p.scale, "attention_in": place(rng, saved["out"].detach())}
    given |= {"softmax_max": place(rng, saved["max"]), "softmax_sum": place(rng, saved["sum"])}
    seed, offset = saved["seed"], saved["offset"]
    if p.drop.keep_prob < 1 or maybe(rng, 0.3):
        given |= {"seed": seed, "offset": offset} if p.version == 3 else {"seed": int(seed), "offset": int(offset)}
    gradient: Callable[..., Any] = getattr(npu, "npu_fusion_attention_grad" + SUFFIX[p.version])
    names = ["q", "k", "v", "pse", "q_rope", "k_rope", "sink"] if p.version == 2 else ["q", "k", "v", "pse", "sink"]
    return {"d" + n: g for n, g in zip(names, gradient(**given), strict=True)}


# --------------------------------------------------------------------------------------------------------- expectations


def _rows(p: Plan, s: int, may_mean: Tensor) -> Rows:
    b = p.batch
    bias = p.pse.bias(s) if p.pse is not None else None if p.slopes is None else p.slopes[s]
    sink = None if p.sink is None or not b.kv_len[s] else p.sink.double()
    terms = (b.q(s), b.k(s), b.v(s), p.scale, p.counts[s], b.dtype, bias, p.drop.keep(b, s), sink)
    rows = Rows(*terms)
    return Rows(*terms, rows.empty & may_mean) if bool((rows.empty & may_mean).any()) else rows


def _statistics(rows: Rows) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Returns ((max, error), (sum, error)) [N, R] with CANN's values for empty rows."""
    top, total = rows.max, rows.sum
    if not rows.count.shape[-1]:
        top = total = torch.zeros_like(top)
    elif rows.sink is None:
        top = torch.where(rows.empty, -FLT_MAX, top)
        form = torch.where(rows.mean, float(rows.count.shape[-1]), FLT_MAX)
        total = torch.where(rows.empty, form, total)
    has_statistics = ~rows.empty | (torch.tensor(rows.sink is not None))
    max_error, sum_error = (torch.where(has_statistics, error, 0.0) for error in (rows.max_error, rows.sum_error))
    return (top, max_error), (total, sum_error.nan_to_num(0))


def _lanes(p: Plan, parts: list[tuple[Tensor, Tensor]]) -> Value:
    result = p.batch.by_row(parts, head_major=not p.token_major)
    value, error = (t.unsqueeze(-1).expand(*t.shape, 8) for t in (result.value, result.error))
    return Value(value, torch.where(value.abs() == FLT_MAX, 0.0, error), torch.float32)


def _saved_rows(p: Plan, lanes: Tensor) -> list[Tensor]:
    """Splits statistics with eight lanes into [N, R] of every sequence."""
    b = p.batch
    flat = lanes[..., 0].double()
    if not b.packed:
        return list(flat)
    if p.token_major:
        return [rows.T for rows in b.split(flat)]
    by_item = flat.reshape(-1)[: b.heads * sum(b.q_len)].split([b.heads * m for m in b.q_len])
    return [rows.view(b.heads, m) for rows, m in zip(by_item, b.q_len, strict=True)]


def _parts(b: Batch, tensor: Tensor, elements: int) -> list[Tensor]:
    """Splits a tensor in the layout into [N, R, elements] of every sequence."""
    t = tensor.double()
    if b.packed:
        return [rows.transpose(0, 1) for rows in b.split(t)]
    t = t.transpose(0, 1) if b.layout == "SBH" else t
    t = t.unflatten(2, (b.heads, elements)) if b.layout in ("BSH", "SBH") else t
    return list(t if b.layout == "BNSD" else t.transpose(1, 2))


def _expect(p: Plan, may_mean: list[Tensor], got: Results) -> dict[str, Value]:
    b = p.batch
    drops = p.drop.keep_prob < 1
    if drops and p.drop.bits is None and not p.drop.seed and not p.drop.offset:
        p.drop.seed, p.drop.offset = int(got["seed"]), int(got["offset"])
    every = [_rows(p, s, may_mean[s]) for s in range(len(b.q_len))]
    expected = {"out": b.place_dense([(r.out, r.stored_error) for r in every], "q")}
    stats = [_statistics(r) for r in every]
    expected |= {name: _lanes(p, [s[i] for s in stats]) for i, name in enumerate(("max", "sum"))}
    expected["empty"] = exact(torch.empty(0, dtype=b.dtype))
    expected |= {n: exact(torch.tensor([v])) for n, v in (("seed", p.drop.seed), ("offset", p.drop.offset))}
    if "numels" in got:
        scores = sum(m * n for m, n in zip(b.q_len, b.kv_len, strict=True))
        expected["numels"] = exact(torch.tensor([b.heads * scores]))
    if not p.trained:
        return expected
    dys = [b.rows(s, "dy") for s in range(len(b.q_len))]
    if p.saves:
        saved = zip(_parts(b, got["out"], b.dim_v), _saved_rows(p, got["max"]), _saved_rows(p, got["sum"]), strict=True)
        slopes = [r.saved(*results, dy) for r, results, dy in zip(every, saved, dys, strict=True)]
    else:
        slopes = [r.slopes(dy) for r, dy in zip(every, dys, strict=True)]
    expected |= gradients(b, slopes, dict.fromkeys(p.trained))
    if "pse" in p.trained:
        assert p.pse is not None
        expected["dpse"] = p.pse.gradient(slopes)
    if "sink" in p.trained:
        expected["dsink"] = dsink(b, [s for s in slopes if s.p_sink is not None])
    return expected
