"""Definition (parameters, legality rules) of this library's decode_attention(), and its conversion for back ends.

Unlike CANN's operators it describes caches by layout, scales by shape, and windows by a Band.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fusion_attention.contract import INVALID, Array, Attr, Bound, Op, Rule, Tensor, Tensors, dtype_text, show
from fusion_attention.ir.mask import INFINITE, Band
from fusion_attention.ir.problem import Extents, Problem
from fusion_attention.memory import empty
from fusion_attention.ops.inference.cache import Cache, Scales, per_channel, stored_as
from fusion_attention.ops.inference.checks import FUNCTIONS, sizes
from fusion_attention.ops.inference.lowered_call import InferenceCall, extents_of
from fusion_attention.ops.shared import params, rules
from fusion_attention.ops.shared.checks import band_fits, broadcasts
from fusion_attention.ops.shared.layouts import LAYOUTS
from fusion_attention.ops.shared.params import one_of
from fusion_attention.ops.shared.rules import elements, paged

RESULTS = ("out", "max", "sum")

PAGES: dict[str, Any] = {"block_table": "B 2", "kv_len": [5, 8], "k": "8 4 N2 D", "v": "8 4 N2 D"}
STORED: dict[str, Any] = {
    **dict.fromkeys(("k", "v"), ("B S2 N2 D", "int8")),
    **dict.fromkeys(("k_scale", "v_scale"), "N2 D"),
}


def heads_of(k: tuple[torch.Tensor, ...], layout: str) -> int:
    """Returns the number of key heads of a KV cache k in a layout; 0 if its first tensor does not have four axes."""
    axis = LAYOUTS[layout][2]
    return int(k[0].shape[axis]) if k[0].dim() == 4 and axis is not None else 0


def groups(k: tuple[torch.Tensor, ...], layout: str, heads: int) -> bool | str:
    """True (else error text) if query heads (heads) are a multiple of the key heads of a KV cache k in a layout."""
    kv_heads = heads_of(k, layout)
    return (kv_heads > 0 and heads % kv_heads == 0) or f"{show(k)} with N1={heads}"


def stored_fits(
    tensors: tuple[torch.Tensor, ...], layout: str, heads: int, dim: int, batch: int, paged: bool
) -> bool | str:
    """True (else text) if a KV cache has one of the legal forms, with rows of `dim` elements for `heads` key heads.
    The forms are one tensor for the batch, one tensor per sequence in the layout, or (paged) one tensor of pages."""
    for t in tensors:
        size = sizes(t, layout, heads)
        elements = (dim + 1) // 2 if t.dtype == torch.uint8 else dim
        if size is None or size[2] != elements:
            return f"{show(t)} with {heads} heads, {dim} elements"
    one = sizes(tensors[0], layout, heads)
    assert one is not None
    if paged or len(tensors) == 1:
        return (len(tensors) == 1 and (paged or one[0] == batch)) or f"{show(tensors)} for {batch} sequences"
    fits = len(tensors) == batch and all(t.shape[0] == 1 for t in tensors)
    return fits or f"{len(tensors)} tensors for {batch} sequences"


def values_fit(
    v: tuple[torch.Tensor, ...], k: tuple[torch.Tensor, ...], layout: str, heads: int, dim: int
) -> bool | str:
    """True (else error text) if values match keys in count, batch, heads and tokens, with rows of dim elements."""
    if len(v) != len(k):
        return f"{len(v)} tensors beside {len(k)}"
    for value, key in zip(v, k, strict=True):
        beside = sizes(key, layout, heads)
        elements = (dim + 1) // 2 if value.dtype == torch.uint8 else dim
        if beside is not None and sizes(value, layout, heads) != (*beside[:2], elements):
            return f"{show(value)} beside {show(key)} with {heads} heads, {dim} elements"
    return True


def scale_kind(scale: torch.Tensor | None, k: tuple[torch.Tensor, ...], heads: int, dim: int) -> str:
    """Returns the kind of a scale: "none", "channel" ([], [1], [heads], [heads, dim]), "token" (k.shape[:-1]) or ""."""
    if scale is None:
        return "none"
    if tuple(scale.shape) in ((), (1,), (heads,), (heads, dim)):
        return "channel"
    return "token" if len(k) == 1 and scale.shape == k[0].shape[:-1] else ""


def scales_fit(
    scale: torch.Tensor | None, offset: torch.Tensor | None, k: tuple[torch.Tensor, ...], heads: int, dim: int
) -> bool | str:
    """True (else text) if a scale is [], [1], [heads], [heads, dim] or k.shape[:-1], and its offset has that shape."""
    if scale_kind(scale, k, heads, dim) == "":
        return f"{show(scale)} with N2={heads}, {dim} elements"
    if offset is None:
        return True
    return (scale is not None and offset.shape == scale.shape) or f"{show(offset)} beside {show(scale)}"


RULES: tuple[Rule, ...] = (
    rules.lengths_of_pages("kv_len", PAGES),
    rules.meaning(
        "(v is None) == (dim_v > 0)",
        "dim_v: v, or dim_v (without v, values are the first dim_v elements of the keys)",
        stage="presence",
        invalid={"dim_v": 4},
    ),
    *(
        rules.presence(
            f"v is not None or {name} is None",
            f"{name}: None without v (values are elements of keys, which have k_scale and k_offset)",
            given={"v": None, "dim_v": 4},
            invalid={name: "1"},
        )
        for name in ("v_scale", "v_offset")
    ),
    rules.typed(
        "dtype_of(k) in ('int8', 'uint8', dtype_of(q))",
        "k: int8, uint8 or the dtype of q (uint8 holds two integers of four bits, the even element in the low half)",
        invalid={"k": ("B S2 N2 D", "complex64"), "v": ("B S2 N2 D", "complex64")},
    ),
    *(
        rules.meaning(
            f"{unless}({side}_scale is not None) == (dtype_of(k) in ('int8', 'uint8'))",
            f"{side}_scale: a scale exactly for stored integers ({what} = (stored + {side}_offset) * {side}_scale)",
            stage="dtype",
            given=STORED,
            invalid={f"{side}_scale": None},
        )
        for side, what, unless in (("k", "key", ""), ("v", "value", "v is None or "))
    ),
    rules.of_lengths(
        "groups(k, cache_layout, N1)",
        "k: a divisor of N1 heads (all KV heads serve the same number of heads)",
        invalid={"N2": 3},
    ),
    *(
        rules.of_lengths(
            f"{name} is None or len({name}) == B",
            f"{name}: a length per sequence ({what} of every sequence)",
            invalid={name: [length]},
        )
        for name, what, length in (("kv_len", "tokens", 4), ("q_len", "query rows", 1))
    ),
    rules.meaning(
        "stored_fits(k, cache_layout, N2, D, B, block_table is not None)",
        "k: one tensor of the batch, one per sequence, or pages (cache_layout is its axis order; pages are the first "
        "axis)",
        invalid={"k": "B S2 N2 3", "v": "B S2 N2 D"},
    ),
    rules.meaning(
        "values_fit(v, k, cache_layout, N2, Dv)",
        "v: the shape of k except for the last axis (one value per key)",
        invalid={"v": "3 S2 N2 D"},
    ),
    elements("D", "q"),
    rules.meaning(
        "0 <= dim_v <= D",
        "dim_v (values are the first elements of keys)",
        given={"v": None, "dim_v": 4},
        invalid={"dim_v": 9},
    ),
    rules.cached("kv_len"),
    rules.meaning("rows_within(q_len, S1)", "q_len: 0 <= length <= S1 (rows of q)", invalid={"q_len": [0, 2]}),
    *paged("page_size", "page size", PAGES, {"kv_len": [5, 9]}, [[0, 1], [2, -1]]),
    *(
        rules.meaning(
            f"scales_fit({side}_scale, {side}_offset, {side}, N2, {dim})",
            f"{side}_scale: shape [1], [N2], [N2, {dim}] or {side}'s without its last axis, and {side}_offset of the "
            "same shape (one number, one per head, per head and element, or per token and head)",
            when=f"{side} is not None",
            given=STORED,
            invalid={f"{side}_scale": "3"},
        )
        for side, dim in (("k", "D"), ("v", "Dv"))
    ),
    *rules.broadcasting("columns", "a shape that broadcasts to [B, N1, S1, S2]"),
    rules.meaning(
        "band_fits(band, B)",
        "band: integer edges, and a prefix per sequence or none (Band.window(511, 0) sees the last 512 tokens)",
        given={"band": Band.causal()},
        invalid={"band": Band.prefix_causal([1])},
    ),
    rules.meaning(
        "out_scale.numel() in (1, N1 * Dv) and beside(out_offset, out_scale) is True",
        "out_scale: 1 or N1 * Dv elements, and out_offset of the same shape (out = round(x * out_scale + out_offset) "
        "as int8)",
        given={"out_scale": "1"},
        invalid={"out_scale": "3"},
    ),
    rules.meaning(
        "out_offset is None or out_scale is not None",
        "out_offset: out_offset only beside out_scale (an offset goes with its scale)",
        stage="dtype",
        invalid={"out_offset": "1"},
    ),
    rules.finite_scale("scale", 1e39),
    *rules.untrained(
        "decoding has no derivative: call it under torch.no_grad(), or train with attention()",
        q=(2, 1, 4, 8),
        k=(2, 6, 2, 8),
        v=(2, 6, 2, 8),
    ),
)


def geometry(names: dict[str, Any]) -> dict[str, Any]:
    """Returns {name: value} derived from the arguments `names`: sizes of the axes N2, S2 and Dv, lengths per sequence
    (q_len, kv_len), and the number of tokens that the KV cache can store for each sequence (capacity)."""
    layout, batch = names["cache_layout"], names["B"]
    heads = heads_of(names["k"], layout)
    results = [sizes(t, layout, heads) or (0, 0, 0) for t in names["k"]]
    tokens = np.array([size[1] for size in results], np.int64)
    paged = names["block_table"] is not None
    capacity = np.full(batch, INFINITE, np.int64)
    if not paged:
        capacity[:] = tokens if len(tokens) in (1, batch) else 0
    kv_len = capacity if names["kv_len"] is None else names["kv_len"]
    q_len = np.full(batch, names["S1"], np.int64) if names["q_len"] is None else names["q_len"]
    values = names["v"]
    last = 0 if values is None else sum(values[0].shape[-1:])  # 0 for a tensor without axes, which a rule rejects
    stored = last * (2 if values is not None and values[0].dtype == torch.uint8 else 1)
    # The size of a row with two elements per byte does not show if dim_v is odd; keys of the same size determine it.
    same = values is not None and values[0].shape[-1:] == names["k"][0].shape[-1:]
    return {
        "N2": heads,
        "S2": int(tokens.max(initial=0)),
        "Dv": names["dim_v"] if values is None else names["D"] if same else stored,
        "blocks": results[0][0],
        "page_size": results[0][1] if paged else 0,
        "capacity": capacity,
        "columns": (names["block_table"].shape[1] * results[0][1]) if paged else int(tokens.max(initial=0)),
        "kv_len": kv_len,
        "q_len": q_len,
    }


def _scale_param(name: str, text: str) -> Tensor:
    return Tensor(name, text, True, dtypes="float32")


def fresh(n: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Allocates {name: tensor} of the results out, max and sum, from the arguments and derived values `n`."""
    q, k, v = n["q"], n["k"], n["v"]
    dim_v = n["dim_v"]
    if v is not None:  # A uint8 stores two elements.
        key, value = (side if isinstance(side, torch.Tensor) else side[0] for side in (k, v))
        dim_v = value.shape[-1] * (2 if value.dtype == torch.uint8 else 1)
        dim_v = q.shape[-1] if value.shape[-1] == key.shape[-1] else dim_v
    out = empty(q, (*q.shape[:-1], dim_v or q.shape[-1]), q.dtype if n["out_scale"] is None else torch.int8)
    tokens, heads = (1, 2) if n["layout"] == "BSND" else (2, 1)
    stats = torch.float64 if q.dtype == torch.float64 else torch.float32
    max_, sum_ = (empty(q, (q.shape[0], q.shape[heads], q.shape[tokens]), stats) for _ in range(2))
    return dict(zip(RESULTS, (out, max_, sum_), strict=True))


def lower(bound: Bound) -> InferenceCall:
    """Converts a validated decode_attention() call `bound` to an InferenceCall, which back ends compute."""
    n = bound.names
    problem, extents, cache = bound.once(_without_tensors)
    call = InferenceCall(
        problem, extents, n["layout"], cache, n["q"], n["k"], n["v"], n["block_table"], call_cache=bound.call_cache
    )
    call.names = RESULTS
    call.bias, call.blocked, call.sink = n["bias"], n["blocked"], n["sink"]
    call.out_quant = n["out_scale"], n["out_offset"]
    call.k_dequant = _scales(n, "k", n["D"])
    call.v_dequant = _scales(n, "v", n["Dv"])
    return call


def _without_tensors(n: dict[str, Any]) -> tuple[Problem, Extents, Cache]:
    band = (n["band"] or Band.causal()).resolve(n["q_len"], n["kv_len"])
    return _problem(n), extents_of(n["q_len"], n["kv_len"], band), Cache(n["cache_layout"], n["page_size"])


def _scales(n: dict[str, Any], side: str, dim: int) -> Scales:
    """Returns dequantisation scales of keys (side "k") or values ("v"): per channel [N2, dim], per token unchanged."""
    scale, offset = n[f"{side}_scale"], n[f"{side}_offset"]
    if scale_kind(scale, n["k"], n["N2"], dim) == "token":
        return Scales(scale, offset)
    return per_channel(scale, offset, n["N2"], dim)


def _problem(n: dict[str, Any]) -> Problem:
    heads, scales = n["N2"], n["out_scale"]
    of_keys = scale_kind(n["k_scale"], n["k"], heads, n["D"])
    return Problem(
        heads_q=n["N1"],
        heads_kv=heads,
        dim_qk=n["D"],
        dim_v=n["Dv"],
        dtype=dtype_text(n["q"]),
        scale=params.scale_of(n["scale"], n["D"]),
        bias="none" if n["bias"] is None else "matrix",
        has_blocked=n["blocked"] is not None,
        has_sink=n["sink"] is not None,
        shares_kv=n["v"] is None,
        page_size=n["page_size"],
        kv_dtype=stored_as(n["k"][0], n["q"].dtype),
        dequant_k=of_keys,
        dequant_v=of_keys if n["v"] is None else scale_kind(n["v_scale"], n["v"], heads, n["Dv"]),
        out_quant="none" if scales is None else "tensor" if scales.numel() == 1 else "channel",
        softcap=float(n["softcap"]),
    )


RECORD = Op(
    "decode_attention",
    "Softmax attention of the newest tokens of each sequence to the keys in its cache.",
    (
        Tensor("q", "Query rows, the newest tokens.", dtypes=params.OWN_FLOATS, shape=params.rows("1", "D")),
        Tensors("k", "Keys: one tensor, one per sequence, or pages.", shape=params.rows("2", "D")),
        Tensors("v", "Values, in the form of k.", True, dtypes="=k", shape=params.rows("2", "D")),
        Attr("layout", "Axis order of q and the output.", type=str, default="BSND", code=INVALID),
        one_of(
            "cache_layout", "Axis order of k and v; if paged, the first axis is pages.", ("BSND", "BNSD"), code=INVALID
        ),
        Array("q_len", "Query rows of every sequence; None: all.", True),
        Array("kv_len", "Tokens of every sequence in its cache.", True),
        Tensor(
            "block_table",
            "The pages of every sequence.",
            True,
            dtypes=params.PAGE_IDS,
            shape="B pages",
            make=params.in_order,
        ),
        _scale_param("k_scale", "key = (stored + k_offset) * k_scale."),
        _scale_param("k_offset", "Added to stored keys."),
        _scale_param("v_scale", "value = (stored + v_offset) * v_scale."),
        _scale_param("v_offset", "Added to stored values."),
        Attr("dim_v", "If v is None, values are the first dim_v elements of keys.", default=0),
        Attr("scale", "Factor on q . k; None: 1 / sqrt(D).", type=float, default=None),
        Attr("band", "The interval of keys that is visible to each row; None: Band.causal().", type=Band, default=None),
        *(params.BLOCKED, params.BIAS, params.OWN_SINK),
        _scale_param("out_scale", "out = round(x * out_scale + out_offset) as int8."),
        _scale_param("out_offset", "Added before rounding."),
        params.SOFTCAP,
    ),
    RULES,
    formula="""k, v = (stored + offset) * scale                     if the cache has integers
out  = softmax(cap(scale * q k^T) + bias, visible keys) @ v""",
    tex=r"""\begin{aligned}
k_j, v_j &= (stored_j + offset)\, scale \quad \text{where the cache holds integers} \\
s_{ij} &= \operatorname{cap}(scale\; q_i \cdot k_j) + bias_{ij} \\
out_i &= \frac{\sum_j e^{s_{ij}}\, v_j}{\sum_j e^{s_{ij}} + e^{sink}}
\end{aligned}""",
    rulings=(10, 11, 16, 18, 23),
    layouts=("BSND", "BNSD"),
    layout_attr="layout",
    neutral={"N2": None},
    derive=geometry,
    functions=FUNCTIONS | {f.__name__: f for f in (groups, stored_fits, values_fit, scales_fit, broadcasts, band_fits)},
    lower=lower,
    results=RESULTS,
    fresh=fresh,
    repeats=True,
    sizes={"B": 2, "S1": 1, "S2": 6, "N1": 4, "N2": 2, "D": 8},
    samples={layout: {"cache_layout": layout, "v": True} for layout in ("BSND", "BNSD")},
)
RECORDS = (RECORD,)
