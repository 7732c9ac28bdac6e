"""Makes calls from dense tensors for tests of the golden model, and computes the expected results with autograd.

Memory is poisoned: sequences are strided and offset in buffers of NaN, and results contain poison before each call.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from fusion_attention.backends import golden
from fusion_attention.ir import dropout
from fusion_attention.ir.mask import Band
from fusion_attention.ir.memory_views import MatrixView, RowView
from fusion_attention.ir.problem import EXTENT_ROWS, Extents, Grads, Operands, Problem, Stats
from fusion_attention.testing import cut_tiles
from fusion_attention.testing.expected import sizes

Tensors = list[torch.Tensor]
Results = dict[str, Tensors]
INF = float("inf")
INPUTS = ("q", "k", "v", "q_rope", "k_rope")

# ------------------------------------------------------------------------------------------- from tensors to operands


@dataclass
class Call:
    """Dense float64 tensors, one per sequence: [heads, tokens, dim], or [heads or 1, rows or 1, keys or 1]."""

    problem: Problem
    extents: Extents
    q: Tensors
    k: Tensors
    v: Tensors
    dout: Tensors
    q_rope: Tensors = field(default_factory=list)
    k_rope: Tensors = field(default_factory=list)
    bias: Tensors = field(default_factory=list)  # with a table: [heads or 1, 1024, keys]
    slopes: torch.Tensor | None = None
    blocked: Tensors = field(default_factory=list)
    tiled: Tensors = field(default_factory=list)  # like blocked, but passed to back ends as tiles
    keep: Tensors = field(default_factory=list)
    sink: torch.Tensor | None = None
    seed: int = 5
    offset: int = 9

    @cached_property
    def sizes(self) -> Results:
        """Expected errors of results() in the problem's dtype, computed from the tensors at the first use."""
        operands = load(self, self.problem.torch_dtype, torch.float32)
        size = sizes(self.problem, self.extents, operands)
        views = {"out": operands.out, "max": operands.stats.max, "sum": operands.stats.sum}
        return {name: read(view.over(size[name]), self.q) for name, view in views.items()}


def poison(dtype: torch.dtype, size: int) -> torch.Tensor:
    """Returns memory of NaN, or of an integer that no test stores."""
    return torch.full((size,), torch.nan if dtype.is_floating_point else 85, dtype=dtype)


def rows(tensors: Tensors, packed: bool = True) -> RowView:
    """Copies tensors with gaps between rows: packed into one token-major NaN buffer, else into head-major buffers."""
    dim = tensors[0].shape[2]
    longest = max(t.shape[1] for t in tensors)
    stride_token = tensors[0].shape[0] * (dim + 1) + 2 if packed else dim + 3
    stride_head = [dim + 1 if packed else stride_token * t.shape[1] + 1 for t in tensors]
    size = max(t.shape[0] * h + longest * stride_token for t, h in zip(tensors, stride_head, strict=True))
    count = 1 if packed else len(tensors)
    keep = tuple(poison(tensors[0].dtype, 9 + size * len(tensors))[4:] for _ in range(count))
    address = [size * b + 3 for b in range(len(tensors))]
    for b, t in enumerate(tensors):
        memory = keep[b % count]
        first = memory.storage_offset() + address[b]
        memory.as_strided(t.shape, (stride_head[b], stride_token, 1), first).copy_(t)
    return RowView(keep, np.array(address), stride_token, np.array(stride_head), dim)


def buffer(like: Tensors, dim: int, dtype: torch.dtype = torch.float64) -> RowView:
    """Returns poisoned memory for a result with the heads and lengths of an input."""
    return rows([torch.full((*t.shape[:2], dim), torch.nan, dtype=dtype) for t in like], packed=False)


def matrix(tensors: Tensors) -> MatrixView:
    """Copies matrices to poisoned memory; axes of size 1 get stride 0, and each tensor object is stored once."""
    poison = torch.full((3,), torch.nan if tensors[0].is_floating_point() else 1).to(tensors[0].dtype)
    once = {id(t): t for t in tensors}
    place = dict(zip(once, np.cumsum([1, *(t.numel() + 3 for t in once.values())]).tolist(), strict=False))
    memory = torch.cat([poison, *(chunk for t in once.values() for chunk in (t.flatten(), poison))])[2:]
    strides = np.array([[t[0].numel(), t.shape[2], 1] * (np.array(t.shape) != 1) for t in tensors])
    address = np.array([place[id(t)] for t in tensors])
    return MatrixView(memory, address, strides[:, 0], strides[:, 1], int(strides[0, 2]))


def bits(keep: Tensors) -> MatrixView:
    """Packs boolean matrices into bits, least significant first, without alignment to bytes."""
    loose = np.concatenate([np.ones(5, bool), *(t.numpy().ravel() for t in keep), np.ones(5, bool)])
    address = np.cumsum([5, *(t.numel() for t in keep)])[:-1]
    strides = np.array([[t[0].numel(), t.shape[2]] for t in keep])
    return MatrixView(torch.from_numpy(np.packbits(loose, bitorder="little")), address, strides[:, 0], strides[:, 1], 1)


def tiled(blocked: Tensors) -> dict[str, Any]:
    """Returns the operands of blocked tiles: numbers of tiles for each sequence, and one list of their bits."""
    tiles_cut = [cut_tiles(t) for t in blocked]
    before = np.cumsum([0, *(len(bits) for _, bits in tiles_cut)]).tolist()
    numbers = [torch.where(t >= 0, t + n, t) for (t, _), n in zip(tiles_cut, before, strict=False)]
    return {"blocked_tiles": matrix(numbers), "blocked_bits": torch.cat([bits for _, bits in tiles_cut])}


def load(
    call: Call, dtype: torch.dtype = torch.float64, stats: torch.dtype = torch.float64, packed: bool = True
) -> Operands:
    """Returns the operands with poisoned memory for out and statistics (of any dtypes); packed: pack q and v, not k."""
    return Operands(
        q=rows(call.q, packed),
        k=rows(call.k, not packed),
        v=rows(call.v, packed),
        out=buffer(call.q, call.problem.dim_v, dtype),
        stats=Stats(buffer(call.q, 1, stats), buffer(call.q, 1, stats)),
        q_rope=rows(call.q_rope, packed=False) if call.q_rope else None,
        k_rope=rows(call.k_rope) if call.k_rope else None,
        bias=matrix(call.bias) if call.bias else None,
        slopes=call.slopes,
        blocked=matrix(call.blocked) if call.blocked else None,
        **(tiled(call.tiled) if call.tiled else {}),
        drop_bits=bits(call.keep) if call.keep else None,
        seed=call.seed,
        offset=call.offset,
        sink=call.sink,
    )


def read(view: RowView, like: Tensors) -> Tensors:
    return [view.sequence(b, *t.shape[:2]) for b, t in enumerate(like)]


def results(call: Call, operands: Operands) -> Results:
    views = {"out": operands.out, "max": operands.stats.max, "sum": operands.stats.sum}
    return {name: [t.clone() for t in read(view, call.q)] for name, view in views.items()}


def forward(call: Call) -> Results:
    operands = load(call)
    golden.attention_forward(call.problem, call.extents, None, operands)
    return results(call, operands)


def backward(
    call: Call,
    saved: Results,
    compute: Callable[[Operands, Grads], None],
    dtype: torch.dtype = torch.float64,
    stats: torch.dtype = torch.float64,
    packed: bool = True,
    shared: bool = False,
    owned: bool = False,
) -> Results:
    """Computes gradients from the saved results (of any dtypes) of a forward.

    Args:
        packed: as in load().
        shared: return dbias as one buffer.
        owned: the call writes dbias; else it adds to its previous values.
    """
    lanes = {name: rows([t.to(stats) for t in saved[name]]) for name in ("max", "sum")}
    out = rows([t.to(dtype) for t in saved["out"]])
    operands = replace(load(call, dtype, packed=packed), out=out, stats=Stats(**lanes))
    inputs = {n: getattr(call, n) for n in INPUTS if getattr(call, n)}
    views = {f"d{n}": buffer(like, like[0].shape[2], dtype) for n, like in inputs.items()}
    dbias = operands.bias
    if dbias is not None:
        ones = torch.ones_like(dbias.keep, dtype=stats)
        dbias = replace(dbias, keep=torch.full_like(dbias.keep, torch.nan) if owned else ones)
    dsink = None if call.sink is None else torch.full_like(call.sink, torch.nan)
    dout = rows([t.to(dtype) for t in call.dout], packed=not packed)
    compute(operands, Grads(dout, dbias=dbias, dsink=dsink, owns_dbias=owned, **views))
    result = {f"d{n}": [t.clone() for t in read(views[f"d{n}"], like)] for n, like in inputs.items()}
    if dbias is not None:
        each = [dbias.sequence(b, *t.shape) - (0 if owned else 1) for b, t in enumerate(call.bias)]
        result["dbias"] = [dbias.keep] if shared else each
    return result if dsink is None else result | {"dsink": [dsink]}


def run(call: Call, saved: Results | None = None) -> Results:
    """Runs the forward, and the backward from its statistics and out or from those given."""
    saved = saved or forward(call)
    return saved | backward(call, saved, partial(golden.attention_backward, call.problem, call.extents, None))


def make(
    problem: Problem,
    q_len: tuple[int, ...] = (5, 0, 3, 6),
    kv_len: tuple[int, ...] = (7, 4, 0, 4),
    band: Band | None = None,
    bias_axes: str = "hij",
    shared: bool = False,
    blocked_axes: str = "hij",
    shift: int = 0,
    seed: int = 0,
) -> Call:
    """Makes a call with random tensors; axes not named in bias_axes or blocked_axes have size 1; shared: one bias."""
    generator = torch.Generator().manual_seed(seed)
    lengths = np.array(q_len, np.int64), np.array(kv_len, np.int64)
    shifts = np.full_like(lengths[0], shift)
    extents = Extents(*lengths, *(band or Band.full()).resolve(*lengths), shifts)
    p, count = problem, len(q_len)

    def draw(heads: int, tokens: tuple[int, ...], dim: int) -> Tensors:
        return [torch.randn(heads, n, dim, generator=generator, dtype=torch.float64) for n in tokens]

    def draw_pairs(axes: str, row_count: int | None = None) -> Tensors:
        sizes = [(p.heads_q, row_count or i, j) for i, j in zip(q_len, kv_len, strict=True)]
        shapes = [[n if name in axes else 1 for n, name in zip(size, "hij", strict=True)] for size in sizes]
        return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]

    call = Call(p, extents, *(draw(p.heads_q, q_len, p.dim_qk), draw(p.heads_kv, kv_len, p.dim_qk)), [], [])
    call.v, call.dout = draw(p.heads_kv, kv_len, p.dim_v), draw(p.heads_q, q_len, p.dim_v)
    if p.dim_rope:
        call.q_rope, call.k_rope = draw(p.heads_q, q_len, p.dim_rope), draw(p.heads_kv, kv_len, p.dim_rope)
    if p.bias in ("matrix", "table"):
        call.bias = draw_pairs(bias_axes, 1024 if p.bias == "table" else None)
        call.bias = call.bias[:1] * count if shared else call.bias
    if p.bias.startswith("slopes"):
        call.slopes = torch.rand(count, p.heads_q, generator=generator, dtype=torch.float64)
    if p.has_blocked:
        call.blocked = [t > 0.3 for t in draw_pairs(blocked_axes)]
    if p.has_blocked_tiles:
        call.tiled = [mixed(t > 0.3, generator) for t in draw_pairs("hij" if "h" in blocked_axes else "ij")]
    if p.dropout == "bits":
        call.keep = [t > -0.4 for t in draw_pairs("hij")]
    if p.has_sink:
        call.sink = torch.randn(p.heads_q, generator=generator, dtype=torch.float64)
    return call


def mixed(blocked: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Returns the mask with some tiles completely blocked and some completely visible."""
    heads, *sizes = blocked.shape
    kind = torch.randint(4, (heads, *(-(-n // 128) for n in sizes)), generator=generator)
    kind = kind.repeat_interleave(128, -1).repeat_interleave(128, -2)[:, : sizes[0], : sizes[1]]
    return (blocked | (kind == 0)) & (kind != 1)


def alone(call: Call, b: int) -> Call:
    """Returns a call of only sequence b."""
    tensors = {n: getattr(call, n)[b : b + 1] for n in (*INPUTS, "bias", "blocked", "tiled", "keep", "dout")}
    slopes = None if call.slopes is None else call.slopes[b : b + 1]
    extents = Extents(*(getattr(call.extents, name)[b : b + 1] for name in EXTENT_ROWS))
    return replace(call, extents=extents, slopes=slopes, **tensors)


# ---------------------------------------------------------------------------------------------------------- witnesses


def in_band(call: Call, b: int) -> torch.Tensor:
    """Returns bool [q_len, kv_len]: the band, by loops over the definition of its intervals."""
    e = call.extents
    q_len, kv_len, lo, hi, prefix = (int(a[b]) for a in (e.q_len, e.kv_len, e.lo, e.hi, e.prefix))
    visible = [[i + lo <= j and (j < i + hi or j < prefix) for j in range(kv_len)] for i in range(q_len)]
    return torch.tensor(visible, dtype=torch.bool).reshape(q_len, kv_len)


def seen_by(call: Call, b: int) -> torch.Tensor:
    """Returns bool [heads_q, q_len, kv_len]: pairs in the band that are not blocked."""
    visible = in_band(call, b).expand(call.problem.heads_q, -1, -1)
    visible = visible & ~call.tiled[b] if call.tiled else visible
    return visible & ~call.blocked[b] if call.blocked else visible


def keep_of(call: Call, b: int) -> torch.Tensor:
    p, shape = call.problem, seen_by(call, b).shape
    if p.dropout == "philox":
        spans = slice(0, shape[1]), slice(0, shape[2])
        streams = [b * p.heads_q + h for h in range(p.heads_q)]
        return torch.cat([dropout.keep_from_philox(call.seed, call.offset, p.keep_prob, s, 1, *spans) for s in streams])
    return call.keep[b] if call.keep else torch.ones(shape, dtype=torch.bool)


def full_bias(call: Call, b: int, stored: torch.Tensor | None) -> torch.Tensor | float:
    q_len, kv_len = in_band(call, b).shape
    if call.slopes is not None:
        root = 0.5 if call.problem.bias == "slopes_sqrt" else 1.0
        distance = [[abs(j - i + int(call.extents.shift[b])) ** root for j in range(kv_len)] for i in range(q_len)]
        return -call.slopes[b][:, None, None] * torch.tensor(distance, dtype=torch.float64).reshape(q_len, kv_len)
    if stored is None:
        return 0.0
    return stored[:, 1024 - q_len :] if call.problem.bias == "table" else stored


def formulas(call: Call, b: int, t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes (out, max, sum) of sequence b: one matmul over concatenated rows, mask, softmax, dropout."""
    p = call.problem
    q = torch.cat([t["q"], t["q_rope"]], -1) if "q_rope" in t else t["q"]
    k = torch.cat([t["k"], t["k_rope"]], -1) if "k_rope" in t else t["k"]
    k, v = (x.repeat_interleave(p.heads_q // p.heads_kv, 0) for x in (k, t["v"]))
    added = full_bias(call, b, t.get("bias"))
    scores = torch.einsum("hid,hjd->hij", q, k)
    scores = p.scale * scores
    if p.softcap:
        scores = p.softcap * (2 * torch.sigmoid(2 / p.softcap * scores) - 1)
    scores = scores + (p.scale * added if p.bias_scaled else added)
    scores = scores.masked_fill(~seen_by(call, b), -INF)
    heads, q_len, kv_len = scores.shape
    if "sink" in t:
        scores = torch.cat([t["sink"].view(-1, 1, 1).expand(-1, q_len, 1), scores], -1)
    if scores.shape[-1] == 0:
        zero = torch.zeros(heads, q_len, 1, dtype=torch.float64)
        return zero.expand(-1, -1, p.dim_v), zero - INF, zero
    row_max = scores.amax(-1, keepdim=True)
    empty = row_max == -INF
    form = {"zero": empty & False, "mean": empty, "mean_in_band": empty & in_band(call, b).any(-1, keepdim=True)}
    mean = form[p.empty_rows]
    probabilities = torch.where(empty, 0.0, scores).softmax(-1)[..., scores.shape[-1] - kv_len :]
    probabilities = torch.where(empty, mean.double() / max(kv_len, 1), probabilities)
    row_sum = torch.where(empty, mean * float(kv_len), (scores.logsumexp(-1, keepdim=True) - row_max).exp())
    if p.dropout != "none":
        probabilities = probabilities * keep_of(call, b) / p.keep_prob
    return probabilities @ v, row_max, row_sum


def witness(call: Call) -> Results:
    """Computes the results of run() with autograd."""
    names = [n for n in (*INPUTS, "bias") if getattr(call, n)]
    leaves = {id(t): t.clone().requires_grad_() for n in names for t in getattr(call, n)}
    sink = None if call.sink is None else call.sink.clone().requires_grad_()
    results: Results = {"out": [], "max": [], "sum": []}
    total = torch.zeros((), dtype=torch.float64)
    for b in range(len(call.extents)):
        t = {n: leaves[id(getattr(call, n)[b])] for n in names} | ({} if sink is None else {"sink": sink})
        values = formulas(call, b, t)
        total = total + (values[0] * call.dout[b]).sum()
        for name, value in zip(("out", "max", "sum"), values, strict=True):
            results[name].append(value.detach())
    total.backward()

    def gradient(leaf: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad

    results |= {f"d{n}": [gradient(leaves[id(t)]) for t in getattr(call, n)] for n in names}
    return results if sink is None else results | {"dsink": [gradient(sink)]}
