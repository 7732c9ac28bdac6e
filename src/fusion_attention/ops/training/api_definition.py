"""Definition (parameters, legality rules) of this library's attention(), and its conversion for back ends.

Unlike CANN's operators it takes lengths, not cumulative ends, masks without a tensor, and biases that broadcast.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from fusion_attention.contract import INVALID, Array, Attr, Bound, Op, Tensor, dtype_text, trained
from fusion_attention.ir.mask import NONE_BLOCKED, TILE, UNLIMITED, Band
from fusion_attention.ir.problem import Extents, Problem
from fusion_attention.ops.shared import rules
from fusion_attention.ops.shared.checks import band_fits, broadcasts, lengths_fit
from fusion_attention.ops.shared.layouts import Form, to_float32
from fusion_attention.ops.shared.params import BIAS, BLOCKED, OWN_FLOATS, OWN_SINK, SOFTCAP, one_of, rows, scale_of
from fusion_attention.ops.shared.sparse_modes import mode_band
from fusion_attention.ops.training.checks import positions, tiles_exist, tiles_fit
from fusion_attention.ops.training.definitions import KEEP_PROB, OFFSET, SIZES
from fusion_attention.ops.training.forward_backward import RESULTS, DenseForward, fresh_forward
from fusion_attention.ops.training.lowered_call import DenseCall

Lengths = Sequence[int] | torch.Tensor | None
Layout = Literal["BSND", "BNSD", "BSH", "SBH", "TND"]
EmptyRows = Literal["zero", "mean"]
OWN_ROPE = {"q_rope": True, "k_rope": True}
ONE_TILE = {"blocked_tiles": "1 1 1 1"}
HEADS_FIRST = 'heads before tokens are layout="BNSD"'


RULES = (
    rules.presence(
        "heads > 0", "heads (the last axis holds heads * dim elements)", only=("BSH", "SBH"), invalid={"heads": None}
    ),
    rules.presence(
        "q_len is not None",
        "q_len: the lengths of packed sequences (tokens of every packed sequence, e.g. q_len=[100, 150, 50])",
        only=rules.PACKED,
        invalid={"q_len": None, "kv_len": None},
    ),
    rules.rope_pair("q_rope", "k_rope", OWN_ROPE),
    *(
        rules.of_lengths(
            f"lengths_fit({name}, False, B, S{axis}, T{axis})",
            f"{name}: lengths of the sequences that the {side} tensor holds (tokens of every sequence, not "
            "cumulative ends)",
            invalid={name: too_long},
        )
        for name, axis, side, too_long in (("q_len", 1, "query", [3, 6]), ("kv_len", 2, "key", [5, 8]))
    ),
    rules.one_length_each("q_len", "kv_len"),
    rules.of_lengths(
        "kv_len is not None or sum(q_len) <= T2",
        "kv_len: the lengths of keys, or at least sum(q_len) key tokens (without kv_len, keys have the lengths q_len)",
        when="q_len is not None",
        only=rules.PACKED,
        given={"T2": 8, "kv_len": None},
        invalid={"T2": 6},
    ),
    *rules.covered("q_len", "kv_len", rules.NOT_CUMULATIVE, {"q_len": [3, 4], "kv_len": [5, 6]}),
    rules.groups_of_heads("k", HEADS_FIRST),
    rules.doubt(
        "S1 == 1 or N1 <= max(S1, 256)",
        f"q: at most max(S1, 256) heads ({HEADS_FIRST})",
        only=("BSND",),
        invalid={"N1": 258},
    ),
    rules.elements("D", "q"),
    rules.elements("Dv", "v"),
    rules.elements("Dr", "q_rope", optional=True, given=OWN_ROPE),
    rules.meaning(
        "band is None or sparse_mode is None",
        "band (pass a band or a sparse_mode, not both)",
        given={"band": Band()},
        invalid={"sparse_mode": 3},
    ),
    rules.meaning(
        "band_fits(band, len(q_len))",
        "band: a band with integer edges, and no prefix or one per sequence (make it with Band.causal(), "
        "Band.window() or Band.prefix_causal())",
        given={"band": Band.prefix_causal([1, 2])},
        invalid={"band": Band.prefix_causal([1, 2, 3])},
    ),
    rules.meaning(
        "sparse_mode is None or 0 <= sparse_mode <= 8 and sparse_mode not in (5, 6)",
        "sparse_mode: one of 0, 1, 2, 3, 4, 7, 8 (prefixes: band=Band.prefix_causal(...))",
    ),
    rules.meaning(
        "sparse_mode is not None or pre_tokens == next_tokens == 2147483647",
        "pre_tokens: pre_tokens and next_tokens only beside a sparse_mode (without a mode use "
        "band=Band.window(pre_tokens, next_tokens))",
        invalid={"pre_tokens": 2},
    ),
    *rules.broadcasting("S2", "[B or 1, N1 or 1, S1 or 1, S2 or 1], leading axes may be left out"),
    rules.meaning(
        "bias is None or alibi_slopes is None",
        "bias: a bias or alibi_slopes (add the distances to the bias)",
        given={"bias": "S1 S2"},
        invalid={"alibi_slopes": ("N1", "float32")},
    ),
    rules.meaning(
        "fits(alibi_slopes, 'N1 | B N1 | 1 N1')",
        "alibi_slopes (one slope per head)",
        given={"alibi_slopes": ("N1", "float32")},
        invalid={"alibi_slopes": ("3", "float32")},
    ),
    *rules.untrained("slopes get no gradient: pass the distances as bias", alibi_slopes=(4,)),
    rules.meaning(
        "len(alibi_start) == 2 and positions(alibi_start)",
        "alibi_start: two positions below 2**40 (of the first query row and of the first key)",
        given={"alibi_slopes": ("N1", "float32"), "alibi_start": [0, 0]},
        invalid={"alibi_start": [0]},
    ),
    rules.meaning(
        "alibi_start is None",
        "alibi_start: alibi_start only beside alibi_slopes (distances need slopes)",
        when="alibi_slopes is None",
    ),
    *rules.group(
        rules.meaning(
            "drop_bits.numel() * 8 >= N1 * drop_rows",
            "drop_bits: a bit for every score (one bit per score, row-major over [B, N1, S1, S2], least significant "
            "bit first)",
            invalid={"drop_bits": "4"},
        ),
        rules.meaning(
            "keep_prob < 1",
            "drop_bits: drop_bits only with keep_prob < 1 (1 is attention without dropout)",
            invalid={"keep_prob": 1.0},
        ),
        rules.meaning(
            "seed is None",
            "drop_bits: drop_bits or a seed, not both (a seed is for drawn dropout masks, and drop_bits are a mask)",
            invalid={"seed": 3},
        ),
        when="drop_bits is not None",
        given={"drop_bits": "1024", "keep_prob": 0.5},
    ),
    rules.finite_scale("scale"),
    *rules.group(
        rules.meaning(
            "tiles_fit(blocked_tiles, B, N1, S1, S2)",
            "blocked_tiles: shape [B or 1, N1 or 1, ceil(S1 / 128), ceil(S2 / 128)] (one number per tile of 128 rows "
            "by 128 keys)",
            invalid={"blocked_tiles": "1 1 1 2"},
        ),
        rules.meaning(
            "tiles_exist(blocked_tiles, bit_tiles or 0)",
            "blocked_tiles: -1, -2, or an index into blocked_bits (-1 removes all scores of a tile, -2 none)",
            reads=True,
            invalid={"blocked_tiles": torch.zeros(1, 1, 1, 1, dtype=torch.int32)},
        ),
        when="blocked_tiles is not None",
        given=ONE_TILE,
    ),
    rules.meaning(
        "blocked_tiles is not None",
        "blocked_bits: blocked_bits only beside blocked_tiles (which index blocked_bits by tile)",
        when="blocked_bits is not None",
        given={**ONE_TILE, "blocked_bits": "3 128 16"},
        invalid={"blocked_tiles": None},
    ),
)


# Parameter names of a DenseCall's tensors.
_NAMES = (
    *("q", "k", "v", "q_rope", "k_rope", "bias", "alibi_slopes", "blocked", "drop_bits", "sink"),
    *("blocked_tiles", "blocked_bits"),
)


def lengths(names: dict[str, Any]) -> dict[str, Any]:
    """Returns {name: value} derived from the arguments `names`: lengths per sequence (q_len, kv_len), sizes of the axes
    B, S1 and S2 if tokens are packed, and drop_rows, the number of scores per head."""
    packed = names["layout"] == "TND"
    q_len, kv_len = names["q_len"], names["kv_len"]
    if packed:
        kv_len = q_len if kv_len is None else kv_len
        sizes = {"B": len(q_len), "S1": int(q_len.max(initial=0)), "S2": int(kv_len.max(initial=0))}
        return sizes | {"q_len": q_len, "kv_len": kv_len, "drop_rows": int((q_len * kv_len).sum())}
    q_len = np.full(names["B"], names["S1"], np.int64) if q_len is None else q_len
    kv_len = np.full(names["B"], names["S2"], np.int64) if kv_len is None else kv_len
    return {"q_len": q_len, "kv_len": kv_len, "drop_rows": names["B"] * names["S1"] * names["S2"]}


def dense_call(bound: Bound, *, seed: int | None = None) -> DenseCall:
    """Converts a validated attention() call to a DenseCall for back ends; seed: a drawn one, or None: bound["seed"]."""
    n = bound.names
    seed = n["seed"] or 0 if seed is None else seed
    problem, form, extents = bound.once(_without_tensors)
    slopes, sink = n["alibi_slopes"], n["sink"]
    if slopes is not None or sink is not None:
        slopes, sink = to_float32(slopes, n["q"]), to_float32(sink, n["q"])
    tiles = n["blocked_tiles"], n["blocked_bits"]
    extras = (n["q_rope"], n["k_rope"], n["bias"], slopes, n["blocked"], n["drop_bits"], sink, *tiles)
    return DenseCall(problem, form, extents, n["q"], n["k"], n["v"], extras, seed, n["offset"], _NAMES)


def _without_tensors(n: dict[str, Any]) -> tuple[Problem, Form, Extents]:
    bias, blocked = ("none" if n[name] is None else "broadcast" for name in ("bias", "blocked"))
    return _problem(n), Form(n["layout"], bias, blocked), _extents(n)


def _problem(n: dict[str, Any]) -> Problem:
    drops = n["keep_prob"] < 1
    return Problem(
        heads_q=n["N1"],
        heads_kv=n["N2"],
        dim_qk=n["D"],
        dim_v=n["Dv"],
        dim_rope=n["Dr"] or 0,
        dtype=dtype_text(n["q"]),
        scale=scale_of(n["scale"], n["D"], n["Dr"] or 0),
        bias="slopes" if n["alibi_slopes"] is not None else "none" if n["bias"] is None else "matrix",
        has_blocked=n["blocked"] is not None,
        has_sink=n["sink"] is not None,
        dropout=("philox" if n["drop_bits"] is None else "bits") if drops else "none",
        keep_prob=float(n["keep_prob"]) if drops else 1.0,
        empty_rows=n["empty_rows"],
        softcap=float(n["softcap"]),
        has_blocked_tiles=n["blocked_tiles"] is not None,
    )


def _extents(n: dict[str, Any]) -> Extents:
    q_len, kv_len, mode = n["q_len"], n["kv_len"], n["sparse_mode"]
    if mode is not None:
        band = mode_band(mode, True, n["pre_tokens"], n["next_tokens"], None, q_len, kv_len)
    else:
        band = (n["band"] or Band.full()).resolve(q_len, kv_len)
    start = n["alibi_start"]
    shift = q_len - kv_len if start is None else np.full_like(q_len, start[1] - start[0])
    # Without slopes the shift has no effect; a constant lets such calls share a plan.
    return Extents(q_len, kv_len, *band, shift if n["alibi_slopes"] is not None else np.zeros_like(q_len))


RECORD = Op(
    "attention",
    "Softmax attention over the keys that a band, a matrix and lengths leave to each query row.",
    (
        Tensor("q", "Query rows.", dtypes=OWN_FLOATS, shape=rows("1", "D")),
        Tensor("k", "Key rows.", dtypes="=q", shape=rows("2", "D")),
        Tensor("v", "Value rows.", dtypes="=q", shape=rows("2", "Dv")),
        Attr("layout", "Axis order of q, k, v and the output.", type=str, default="BSND", code=INVALID),
        Attr(
            "heads",
            "Query heads; required in layouts BSH and SBH, whose last axis is heads * dim.",
            default=0,
            axis="N1",
            code=INVALID,
        ),
        Array("q_len", "Query rows of every sequence (required in layout TND).", True),
        Array("kv_len", "Keys of every sequence.", True),
        Tensor("q_rope", "Rope part of the query rows.", True, dtypes="=q", shape=rows("1", "Dr")),
        Tensor("k_rope", "Rope part of the key rows.", True, dtypes="=q", shape=rows("2", "Dr")),
        Attr("scale", "Factor on q . k; None: 1 / sqrt(D + Dr).", type=float, default=None),
        Attr("band", "The interval of keys that is visible to each row; None: all keys.", type=Band, default=None),
        Attr("sparse_mode", "CANN's sparse mode, in place of a band; it needs no mask tensor.", default=None),
        Attr("pre_tokens", "Visible tokens before the diagonal, in modes 0 and 4.", default=UNLIMITED),
        Attr("next_tokens", "Visible tokens behind the diagonal, in modes 0, 4, 7 and 8.", default=UNLIMITED),
        *(BLOCKED, BIAS),
        Tensor("alibi_slopes", "Bias -slope * |distance to the diagonal|.", True, dtypes=OWN_FLOATS),
        Array(
            "alibi_start",
            "Positions of the first query row and the first key; None: the last row and the last key are at one.",
            True,
        ),
        OWN_SINK,
        KEEP_PROB,
        Tensor(
            "drop_bits",
            "One bit per score, 1 = kept.",
            True,
            dtypes="uint8",
            make=lambda s: torch.ones(s, dtype=torch.uint8),
        ),
        Attr("seed", "Seed of drawn dropout; None draws one.", default=None, unsigned=True),
        OFFSET,
        one_of("empty_rows", "Result of rows without visible keys: 'zero', or the 'mean' of V.", ("zero", "mean")),
        SOFTCAP,
        Tensor(
            "blocked_tiles",
            "Per tile of 128 x 128 scores: -1 removes all scores, -2 none, n >= 0 those of blocked_bits[n].",
            True,
            dtypes="int32",
            make=lambda s: torch.full(s, NONE_BLOCKED, dtype=torch.int32),
        ),
        Tensor(
            "blocked_bits",
            "Bits [rows, keys / 8 bytes] of the tiles that blocked_tiles indexes, lowest bit first; 1 removes a score.",
            True,
            dtypes="uint8",
            shape=f"bit_tiles {TILE} {TILE // 8}",
            make=lambda s: torch.zeros(s, dtype=torch.uint8),
        ),
    ),
    RULES,
    formula="out = softmax(cap(scale * (q k^T + q_rope k_rope^T)) + bias, visible keys) * keep / keep_prob @ v",
    tex=r"""\begin{aligned}
s_{ij} &= \operatorname{cap}\!\big(scale\,(q_i \cdot k_j + q^{rope}_i \cdot k^{rope}_j)\big) + bias_{ij} \\
out_i &= \sum_j \frac{keep_{ij}}{p_{keep}} \cdot \frac{e^{s_{ij}}}{\sum_{j\prime} e^{s_{ij\prime}} + e^{sink}}\;
  v_j, \qquad j \text{ over the keys that row } i \text{ sees}
\end{aligned}""",
    rulings=(1, 2, 4, 9, 10, 11, 21, 23),
    layouts=(*rules.PADDED, *rules.PACKED),
    layout_attr="layout",
    neutral=dict.fromkeys(("B", "S1", "S2", "T1", "T2", "Dr", "bit_tiles")),
    derive=lengths,
    functions={f.__name__: f for f in (lengths_fit, broadcasts, band_fits, positions, tiles_fit, tiles_exist, trained)},
    lower=lambda bound, *, seed=None, offset=None: DenseForward(dense_call(bound, seed=seed)),
    results=RESULTS,
    fresh=lambda n: fresh_forward(RESULTS, n["q"], n["k"], n["v"], n.get("layout") or "BSND", n.get("heads")),
    trains=dict.fromkeys(RESULTS[:2], ("q", "k", "v", "q_rope", "k_rope", "bias", "sink")),
    repeats=True,
    sizes=SIZES,
    samples={"TND": {"q_len": [3, 5], "kv_len": [5, 7]}, "BSH": {"heads": 4}, "SBH": {"heads": 4}},
)
RECORDS = (RECORD,)
