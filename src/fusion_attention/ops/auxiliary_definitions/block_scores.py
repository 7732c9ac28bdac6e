"""The operator definition of MsaIndexScore: scores of blocks of keys, by which a model selects blocks for each row."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fusion_attention.contract import Array, Attr, Op, Tensor
from fusion_attention.ops.auxiliary_definitions.common import result
from fusion_attention.ops.shared.checks import float32, pages_exist
from fusion_attention.ops.shared.cu_seqlens import ends_fit
from fusion_attention.ops.shared.params import PAGE_IDS, in_order, one_of
from fusion_attention.ops.shared.rules import group, limit, meaning, needed, of_lengths, presence, typed

BLOCK = 128  # keys of a block, and of a page
NOT_SCORED = torch.finfo(torch.float32).min
FIRST, LOCAL = 1e30, 1e29  # scores of the first blocks, and of the blocks near a row


def _form(names: Mapping[str, Any]) -> str:
    key, layout = names.get("key"), str(names.get("layout_key", ""))
    return "BBND without heads" if layout == "BBND" and getattr(key, "ndim", 4) == 3 else layout


PARAMS = (
    Tensor("query", "Packed query rows of the index heads.", dtypes="float16 bfloat16 float32", shape="T1 N1 D"),
    Tensor(
        "key",
        "Keys of one head: pages of 128 keys (BBND, whose axis of heads may be missing, or BNBD), or packed (TND).",
        dtypes="float16 bfloat16 float32 int8",
        shape={"BBND": "P Ps 1 D", "BNBD": "P 1 Ps D", "TND": "T2 1 D", "BBND without heads": "P Ps D"},
        form=_form,
    ),
    Tensor(
        "start_loc",
        "Number of the block with the rows of each sequence: it and the local_blocks - 1 blocks before it score 1e29.",
        dtypes="int32",
        shape="B",
        make=lambda shape: torch.zeros(shape, dtype=torch.int32),
    ),
    Tensor("block_table", "The pages of every sequence; None if keys are packed.", True, dtypes=PAGE_IDS, shape="B M",
           make=in_order),
    Tensor("scale", "Scale of every int8 key; None for other keys.", True, dtypes="float32",
           shape={"BBND": "P 1 Ps", "BNBD": "P 1 Ps", "TND": "T2 1"}),
    Tensor("atten_mask", "Without effect: sparse_mode determines the visible keys.", True),
    Array("actual_seq_qlen", "0, then the cumulative ends of the sequences' rows; required.", True),
    Array("actual_seq_klen", "Keys of every sequence; packed keys: 0, then cumulative ends. Required.", True),
    Attr("layout_key", "BBND or BNBD: pages; TND: packed.", type=str, default="BBND"),
    one_of("sparse_mode", "3: causal, the last row sees the last key; 0: all keys.", (0, 3), default=3),
    Attr("init_blocks", "Number of first blocks, which score 1e30.", default=0, domain="init_blocks >= 0"),
    Attr("local_blocks", "Number of blocks up to that of the rows, which score 1e29.", default=1,
         domain="local_blocks >= 0"),
)  # fmt: skip
IN_PAGES = {"actual_seq_qlen": [0, 3, 8], "actual_seq_klen": [100, 200], "block_table": "B M"}
IN_TND = {"actual_seq_qlen": [0, 3, 8], "actual_seq_klen": [0, 100, 300]}


def lengths_within(lengths: Any, count: int, capacity: int) -> bool | str:
    """True if there are `count` lengths, each between 0 and `capacity` keys; else the fault, as text."""
    if len(lengths) != count:
        return f"{len(lengths)} lengths for {count} sequences"
    wrong = [n for n in lengths if not 0 <= n <= capacity]
    return not wrong or f"{wrong[0]}, outside [0, {capacity}]"


RULES = (
    needed("actual_seq_qlen", "the tensor does not show where a sequence ends", text="the ends of the sequences' rows"),
    needed("actual_seq_klen", "the tensor does not show where a sequence ends",
           text="lengths of keys, or ends of packed ones"),
    presence("(block_table is None) == (layout_key == 'TND')",
             "block_table: a table if keys are paged, otherwise None (it has the pages of each sequence)",
             invalid={"block_table": None}),
    presence("(scale is None) == (not int8(key))",
             "scale: a scale if keys are int8, otherwise None (keys are integers * scale)",
             invalid={"scale": "P 1 Ps"}),
    typed("int8(key) or same_dtype(key, query)",
          "key: the dtype of query, or int8 with a scale (convert it with .to(query.dtype))",
          when="floating(key) or int8(key)",
          invalid={"key": ("P Ps 1 D", "bfloat16"), "query": ("T1 N1 D", "float16")}),
    of_lengths("ends_fit(actual_seq_qlen, T1)",
               "actual_seq_qlen: cumulative ends that cover all rows of the tensor (a 0, then the end of every "
               "sequence)",
               invalid={"actual_seq_qlen": [0, 3, 9]}),
    of_lengths("len(actual_seq_qlen) == B + 1",
               "actual_seq_qlen: a 0, then one end per sequence (start_loc has one number per sequence)",
               invalid={"actual_seq_qlen": [0, 8]}),
    of_lengths("layout_key == 'TND' or lengths_within(actual_seq_klen, B, block_table.shape[1] * 128)",
               "actual_seq_klen: one length per sequence (at most the keys in its pages)",
               invalid={"actual_seq_klen": [100, 999]}),
    of_lengths("layout_key != 'TND' or len(actual_seq_klen) == B + 1 and ends_fit(actual_seq_klen, T2)",
               "actual_seq_klen: cumulative ends that cover all keys of the tensor (a 0, then the end of every "
               "sequence)",
               only=("TND",), invalid={"actual_seq_klen": [0, 100, 999]}),
    *group(
        meaning("Ps == 128", "key: pages of 128 keys (a block is a page)", invalid={"Ps": 64}),
        meaning("pages_exist(block_table, klen, Ps, P)",
                "block_table: numbers of pages (entries behind a sequence's last page are not read)", reads=True,
                invalid={"block_table": torch.tensor([[7, 0], [1, 2]], dtype=torch.int32)}),
        when="layout_key != 'TND'",
    ),
    meaning("N1 >= 1", "query: at least one head (every head has scores)", invalid={"N1": 0}),
    limit("D == 128", "query (the chip takes no other dim)", invalid={"D": 64}),
    limit("not float32(query)", "query: float16 or bfloat16 (the chip computes no float32 here)",
          invalid={"query": ("T1 N1 D", "float32"), "key": ("P Ps 1 D", "float32")}),
)  # fmt: skip

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ends_fit": ends_fit,
    "pages_exist": pages_exist,
    "lengths_within": lengths_within,
    "float32": float32,
    "floating": torch.is_floating_point,
    "int8": lambda t: t.dtype == torch.int8,
    "same_dtype": lambda a, b: a.dtype == b.dtype,
}


def derive(n: dict[str, Any]) -> dict[str, Any]:
    """Returns {"klen": the number of keys of every sequence, [B]}, from the arguments `n` of a call."""
    given = n["actual_seq_klen"]
    return {"klen": given[1:] - given[:-1] if n["layout_key"] == "TND" else given}


INDEX_SCORE = Op(
    "cann_ops_transformer.msa_index_score",
    "The largest score of every row and head over the keys of each block of 128 keys.",
    (
        *PARAMS,
        result("score", "[N1, T1, blocks rounded up to 16]; -3.4028235e38 if no key of the block is visible.", ""),
    ),
    rules=RULES,
    formula="""score[h, t, b] = max of q[t, h] . k_j for the keys j of block b that are visible to row t
then 1e30 for b < init_blocks,  then 1e29 for max(0, start_loc + 1 - local_blocks) <= b <= start_loc""",
    tex=r"score_{htb} = \max_{j \in b,\; j \le t}\; q_{th} \cdot k_j",
    layouts=("BBND", "BNBD", "TND"),
    layout_attr="layout_key",
    results=("score",),
    derive=derive,
    functions=FUNCTIONS,
    sizes={"T1": 8, "N1": 4, "D": 128, "P": 5, "Ps": BLOCK, "B": 2, "M": 2, "T2": 300},
    samples={"BBND": IN_PAGES, "BNBD": IN_PAGES, "TND": IN_TND},
    keywords="block_table",
    returns="float32 scores, without gradients. The caller selects blocks (torch.topk) and computes the attention.",
    example="""\
>>> q, pages = torch.randn(2, 4, 128), torch.randn(3, 128, 1, 128)
>>> lengths = {"actual_seq_qlen": [0, 1, 2], "actual_seq_klen": [100, 200]}
>>> table, blocks = torch.tensor([[0, 0], [1, 2]]), torch.tensor([0, 1], dtype=torch.int32)
>>> list(msa_index_score(q, pages, blocks, block_table=table, **lengths).shape)
[4, 2, 16]""",
)
RECORDS = (INDEX_SCORE,)
