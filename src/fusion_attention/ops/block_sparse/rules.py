"""Rules, the checks of calls, of BlockSparseAttention and its gradient."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from fusion_attention.ir.mask import UNLIMITED
from fusion_attention.ops.shared import rules
from fusion_attention.ops.shared.checks import float32, lengths_fit

Q_LENGTHS, KV_LENGTHS = "actual_seq_lengths", "actual_seq_lengths_kv"
BLOCK = (2, 128)  # of samples


def is_block(shape: Sequence[int]) -> bool:
    """True if block_shape has at least two numbers, of which the first two are positive."""
    return len(shape) >= 2 and min(shape[:2]) > 0


FUNCTIONS = {f.__name__: f for f in (is_block, float32, lengths_fit)} | {
    "bfloat16": lambda t: t.dtype == torch.bfloat16
}

LENGTHS = (
    rules.presence(
        f"{Q_LENGTHS} is not None",
        f"{Q_LENGTHS}: the lengths of packed sequences (tokens of every packed sequence, not cumulative ends)",
        only=rules.PACKED,
        invalid={Q_LENGTHS: None, KV_LENGTHS: None},
    ),
    rules.presence(
        f"({Q_LENGTHS} is None) == ({KV_LENGTHS} is None)",
        f"{KV_LENGTHS}: lengths if {Q_LENGTHS} has some, otherwise None (pass lengths for both or for neither)",
        invalid={KV_LENGTHS: None},
    ),
    *(
        rules.of_lengths(
            f"lengths_fit({name}, False, B, S{axis}, T{axis})",
            f"{name}: lengths of the sequences that the {side} tensor holds (tokens of every sequence, not "
            "cumulative ends)",
            invalid={name: too_long},
        )
        for name, axis, side, too_long in ((Q_LENGTHS, 1, "query", [3, 6]), (KV_LENGTHS, 2, "key", [130, 8]))
    ),
    rules.one_length_each(Q_LENGTHS, KV_LENGTHS),
    *rules.covered(Q_LENGTHS, KV_LENGTHS, rules.NOT_CUMULATIVE, {Q_LENGTHS: [3, 4], KV_LENGTHS: [129, 7]}),
)
BLOCKS = (
    rules.of_lengths(
        "is_block(block_shape)",
        "block_shape: two positive numbers (rows and keys of a block, such as [128, 128])",
        invalid={"block_shape": [0, 128]},
    ),
    rules.invalid(
        "fits(block_mask, 'B N1 Xs Ys')",
        "block_mask: shape [B, N1, ceil(rows / block rows), ceil(keys / block keys)] (blocks are counted from each "
        "sequence's first token, up to the longest sequence's last)",
        invalid={"block_mask": ("B N1 Xs 3", "int8")},
    ),
)
FORMS = (
    rules.meaning(
        "layout_kv == layout",
        "layout_kv: as layout (queries and keys have one axis order)",
        invalid={"layout_kv": "BSND"},
    ),
    rules.meaning("mask_type == 0", "mask_type (the only mask is block_mask)"),
    rules.absent("atten_mask", "the only mask is block_mask"),
    rules.absent("block_table", "paged keys are not supported: gather them, or use fused inference attention"),
    *(rules.absent(f"{of}_dequant_scale") for of in ("q", "k", "v")),
    rules.absent("p_quant_scale", "reserved: leave it out"),
    rules.meaning("quant_mode == 0", f"quant_mode (fp8 and fp4: {rules.OF_950})", invalid={"quant_mode": 1}),
    *(
        rules.doubt(f"{name} == {UNLIMITED}", f"{name}: {UNLIMITED} (windows have no effect)", invalid={name: 64})
        for name in ("pre_tokens", "next_tokens")
    ),
    rules.doubt(
        "scale_value != 0",
        "scale_value: a scale, such as D ** -0.5 (0 gives all keys equal weights; the default is not 1 / sqrt(D))",
    ),
    rules.finite_scale("scale_value", optional=False),
    replace(rules.groups_of_heads("key"), invalid={"N2": 3, "num_key_value_heads": 3}),
    rules.elements("D", "query"),
)


def _in(dtype: str) -> dict[str, tuple[str, str]]:
    """Returns {tensor name: (names of axes, dtype)} for sample calls with packed tensors of this dtype."""
    rows, keys = ("T1 N1 D", dtype), ("T2 N2 D", dtype)
    return dict.fromkeys(("query", "dy", "attention_in"), rows) | dict.fromkeys(("key", "value"), keys)


UNMASKED = rules.limit(
    "block_mask is not None",
    "block_mask: a mask (the chip takes no call without one; here all keys are visible)",
    invalid={"block_mask": None},
)
LIMITS = (
    rules.refused(
        "not float32(query)", "query: float16 or bfloat16 (the chip computes no float32 here)", invalid=_in("float32")
    ),
    UNMASKED,
    rules.limit("inner_precise in (0, 1, 4)", "inner_precise (it has no effect here)"),
    rules.limit(
        "inner_precise != 1 or not bfloat16(query)",
        "inner_precise: 0 with bfloat16 (1 is a softmax in float16; here it is always in float32)",
        invalid={"inner_precise": 1, **_in("bfloat16")},
    ),
    rules.limit("block_size == 0", "block_size (the size of a page, and keys are not paged)"),
)
SAME_DTYPE = rules.meaning(
    "attention_out_dtype is None or attention_out_dtype == query.dtype",
    f"attention_out_dtype: None, or query's dtype (others are for fp8 and fp4: {rules.OF_950})",
    invalid={"attention_out_dtype": torch.float64},
)
FORWARD = (
    rules.limit(
        "block[1] % 128 == 0",
        "block_shape: a multiple of 128 keys (the chip takes no other blocks; here any size is legal)",
        when="block_mask is not None",
        invalid={"block_shape": [2, 64], "Ys": 3},
    ),
    rules.refused("D in (64, 128)", "query (the chip takes no other dim)", when="D <= 768", invalid={"D": 32}),
    rules.invalid(
        "softmax_lse is None or softmax_lse.shape[-1] == 1",
        "softmax_lse: a last axis of 1 (it has one number per row and head)",
        invalid={"softmax_lse": "T1 N1 3"},
    ),
)
BACKWARD = (
    rules.refused("D <= 128", "query (the chip takes no wider rows)", when="D <= 768", invalid={"D": 256}),
    *(
        rules.invalid(
            f"fits(softmax_lse, '{words} 1 | {words}')",
            "softmax_lse (as the forward returned it)",
            only=(layout,),
            invalid={"softmax_lse": (f"{words} 2", "float32")},
        )
        for layout, words in {"TND": "T1 N1", "BNSD": "B N1 S1", "BSND": "B S1 N1"}.items()
    ),
)
