"""The operator definition of this library's compressed_attention()."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fusion_attention.contract import Array, Attr, Tensor
from fusion_attention.ir.mask import Band
from fusion_attention.ops.compressed.lower import lower
from fusion_attention.ops.compressed.rules import own_entries
from fusion_attention.ops.shared import rules
from fusion_attention.ops.shared.checks import band_fits
from fusion_attention.ops.shared.params import OWN_FLOATS, spelled
from fusion_attention.ops.sparse import api_definition as sparse
from fusion_attention.ops.sparse.checks import FUNCTIONS, PAGED, keys_in
from fusion_attention.ops.sparse.definitions import INDICES, KEY, LAYOUT, NEUTRAL, QUERY, SINKS, TABLE, V1, VALUE
from fusion_attention.ops.sparse.lowered_call import COMPRESSED, DIFFERENTIABLE
from fusion_attention.ops.sparse.rules import LENGTHS, SHAPES, TABLES

IN_PAGES = {"compressed_table": "2 Mc", "compressed_len": [2, 3], "actual_seq_kvlen": [6, 6]}


def layout_of(names: Mapping[str, Any]) -> str:
    """Returns the layout of a call's compressed keys: that of queries, "BSND" or "TND", or paged if it has a table."""
    return keys_in(names.get("layout", ""), None, names.get("compressed_table"))


def _rows(dim: str) -> dict[str, str]:
    return {"BSND": f"B S3 N2 {dim}", "TND": f"T3 N2 {dim}", PAGED: f"Pc Pcs N2 {dim}"}


KEY_COMPRESSED = Tensor(
    "key_compressed",
    "Compressed keys: key e stands for the tokens e * ratio to e * ratio + ratio - 1.",
    spelled="k_compressed",
    dtypes="=query",
    shape=_rows("D"),
    form=layout_of,
)
VALUE_COMPRESSED = replace(
    KEY_COMPRESSED,
    name="value_compressed",
    spelled="v_compressed",
    text="Compressed values; None if v is None: the compressed keys.",
    optional=True,
    shape=_rows("Dv"),
)
LISTS = replace(
    INDICES,
    text="Per row and key head a list of compressed keys, ended by -1; None: all visible ones.",
    optional=True,
    spelled="indices",
)
SHARED_LISTS = replace(
    LISTS, text=f"{LISTS.text} Nl is N2, or 1: one list for all heads.", shape={"BSND": "B S1 Nl K", "TND": "T1 Nl K"}
)
RATIO = Attr("ratio", "Tokens that a compressed key stands for.", domain="ratio >= 1")
BAND = Attr(
    "band", "The interval of keys of k that is visible to each row; None: Band.causal().", type=Band, default=None
)
LENGTHS_COMPRESSED = Array(
    "compressed_len", "Compressed keys of every sequence; required in layout TND and if paged.", True
)
RESIDUAL = Array(
    "residual",
    "Tokens of every sequence behind those of its last compressed key; the sequence then has compressed_len * ratio + "
    "residual tokens, of which k may have only the last. None: k has all tokens.",
    True,
)
COMPRESSED_TABLE = replace(
    TABLE,
    name="compressed_table",
    text="The pages of the compressed keys of every sequence; None: they are not paged.",
    spelled="compressed_page_table",
    shape="R Mc",
)

COMPRESSED_KEYS = "keys_in(layout, None, compressed_table)"
RULES = (
    rules.of_lengths(
        f"sequences_fit(compressed_len, {COMPRESSED_KEYS}, False, B, S3, T3, compressed_table, Pcs)",
        "compressed_len: the lengths of the sequences in the tensor of compressed keys (one per sequence: its tokens "
        "// ratio)",
        invalid={"compressed_len": [2, 13]},
    ),
    rules.needed(
        "compressed_len",
        "packed and paged keys do not show where a sequence ends",
        text="the lengths of packed or paged compressed keys",
        when=f"{COMPRESSED_KEYS} in ('TND', '{PAGED}')",
        given={"layout": "TND", **sparse.SAMPLE, "compressed_len": [1, 2]},
    ),
    replace(rules.one_length_each("actual_seq_qlen", "compressed_len"), invalid={"compressed_len": [3]}),
    rules.of_lengths(
        "residual is None or len(residual) == B",
        "residual: one number per sequence (the tokens of each sequence % ratio)",
        only=("BSND",),
        invalid={"residual": [0, 0, 0]},
    ),
    replace(rules.one_length_each("actual_seq_qlen", "residual"), invalid={"residual": [0]}),
    rules.invalid(
        "residual is None or all(0 <= n < ratio for n in residual)",
        "residual: numbers from 0 to ratio - 1 (ratio tokens or more are further compressed keys)",
        given={"residual": [0, 1]},
        invalid={"residual": [0, 3]},
    ),
    rules.presence(
        "(value is None) == (value_compressed is None)",
        "value_compressed: compressed values if v is a tensor, otherwise None (keys are the values of both sources, or "
        "of none)",
        given={"value": True, "value_compressed": True},
        invalid={"value_compressed": None},
    ),
    rules.meaning(
        "band is None or band_fits(band, len(q_len))",
        "band: a band with integer edges, and no prefix or one per sequence (make it with Band.causal(), "
        "Band.window() or Band.prefix_causal())",
        invalid={"band": Band.prefix_causal([1, 2, 3])},
    ),
    rules.meaning(
        "Nl in (1, N2)",
        "sparse_indices: N2 lists per row, or one (one for each of the N2 heads, or one for all)",
        when="sparse_indices is not None",
        invalid={"sparse_indices": True, "Nl": 3},
    ),
    *own_entries("sparse_indices", "sparse_indices is None or entries_fit(sparse_indices, layout, q_len, c_len, 1)"),
    rules.doubt(
        "residual is not None or keys_closed(c_len, kv_len, ratio)",
        "compressed_len: the tokens of the keys // ratio (compressed keys stand for `ratio` tokens each)",
        invalid={"ratio": 1},
    ),
    *rules.group(
        rules.meaning(
            "len(compressed_table) == len(q_len)",
            "compressed_table: one row per sequence (a row of pages for each)",
            invalid={"compressed_table": "3 Mc"},
        ),
        rules.page_numbers(
            *("compressed_table", "c_len", "Pcs", "Pc"),
            when="compressed_table is not None and len(compressed_table) == len(q_len)",
        ),
        given=IN_PAGES,
    ),
)


def keys_closed(c_len: Any, kv_len: Any, ratio: int) -> bool:
    """True if c_len, the number of compressed keys of each sequence, is kv_len // ratio."""
    return bool((c_len == kv_len // ratio).all())


def derive(names: dict[str, Any]) -> dict[str, Any]:
    """Returns {name: value} derived from a call's arguments (`names`): lengths and axes of keys and compressed keys.
    Without a value tensor, Dv, the number of elements of a value, is D."""
    result = sparse.derive(names | {"causal": True})
    given = names["compressed_len"]
    if given is None:
        given = result["q_len"] * 0 + (names["S3"] or 0)
    result["c_len"] = given
    return result | ({"Dv": names["D"]} if names["value"] is None else {})


RECORD = V1.version(
    "compressed_attention",
    "One softmax attention over a band of keys and over compressed keys.",
    params=(
        spelled(QUERY, "q", dtypes=OWN_FLOATS),
        *(spelled(KEY, "k"), KEY_COMPRESSED, SHARED_LISTS, RATIO, BAND),
        *(spelled(VALUE, "v"), VALUE_COMPRESSED, LAYOUT, sparse.Q_LENGTHS, sparse.KV_LENGTHS, LENGTHS_COMPRESSED),
        RESIDUAL,
        sparse.OPTIONAL_SCALE,
        *(spelled(SINKS, "sink", dtypes=OWN_FLOATS), spelled(TABLE, "page_table"), COMPRESSED_TABLE),
    ),
    rules=(*(*LENGTHS, sparse.PAGED_KEYS, sparse.PACKED_KEYS, *sparse.COVERED, *TABLES, *SHAPES, *RULES),),
    formula="""s_j = scale * q . k_j              for the keys j of the row's band
s_e = scale * q . k_compressed_e   for the compressed keys e < (position + 1) // ratio, all or those in indices
out = (sum_j exp(s_j) v_j + sum_e exp(s_e) v_compressed_e) / (sum_j exp(s_j) + sum_e exp(s_e) + exp(sink))""",
    tex=r"""\begin{aligned}
s_j &= scale\; q \cdot k_j \quad j \text{ in the row's band}, \qquad
t_e = scale\; q \cdot k^{compressed}_e \quad e < \lfloor (position + 1) / ratio \rfloor \text{, all or those listed} \\
out &= \frac{\sum_j e^{s_j} v_j + \sum_e e^{t_e} v^{compressed}_e}{\sum_j e^{s_j} + \sum_e e^{t_e} + e^{sink}}
\end{aligned}""",
    rulings=(1, 2, 6, 10, 11, 12),
    neutral={**NEUTRAL, **dict.fromkeys(("S3", "T3", "Pc", "Pcs", "Mc", "Nl")), "cumulative": False, "sparse_mode": 3},
    lower=lower,
    trains=dict.fromkeys(("attention_out", "softmax_max"), (*DIFFERENTIABLE, *COMPRESSED)),
    blank_is_absent=False,
    derive=derive,
    functions={**FUNCTIONS, "keys_closed": keys_closed, "band_fits": band_fits},
    sizes={**V1.sizes, "S3": 2, "T3": 4, "Pc": 3, "Pcs": 16, "Mc": 1, "Nl": 1},
    samples={
        "BSND": {"value": True, "value_compressed": True, "ratio": 3},
        "TND": {"value": True, "value_compressed": True, "ratio": 3, **sparse.SAMPLE, "compressed_len": [1, 2]},
    },
)
RECORDS = (RECORD,)
