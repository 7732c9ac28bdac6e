"""The operator definition of CANN's compressor, which projects rows and pools their windows to compressed keys."""

from collections.abc import Sequence
from typing import Annotated

import torch

from fusion_attention.contract import Array, Attr, Tensor
from fusion_attention.ops.auxiliary_definitions.caches import apart, in_place
from fusion_attention.ops.auxiliary_definitions.common import auxiliary, floats, result
from fusion_attention.ops.shared.params import TENSOR_FIRST, one_of
from fusion_attention.ops.shared.rules import invalid, meaning


def lengths_of(
    x: torch.Tensor, cumulative: Sequence[int] | None, used: Sequence[int] | None, start: Sequence[int] | None
) -> tuple[list[int], list[int], list[int]]:
    """Returns lists (first row in x, number of tokens, position of the first token) with an element per sequence.
    cumulative: 0 and ends of packed sequences, None if x is padded; used: tokens of each that count, None: all; start:
    position of each first token, None: 0."""
    if cumulative is None:
        ends = [(b + 1) * x.shape[1] for b in range(x.shape[0])]
        first = [end - x.shape[1] for end in ends]
    else:
        ends = [int(n) for n in cumulative[1:]]
        first = [int(n) for n in cumulative[:-1]]
    tokens = [end - begin for begin, end in zip(first, ends, strict=True)] if used is None else [int(n) for n in used]
    return first, tokens, [0] * len(first) if start is None else [int(n) for n in start]


def ends_fit(x: torch.Tensor, cumulative: Sequence[int] | None) -> bool | str:
    """True (else the fault as text) if cumulative ends begin with 0, ascend, and end with the number of rows of x."""
    if cumulative is None:
        return True
    ends = [int(n) for n in cumulative]
    fits = bool(ends) and ends[0] == 0 and ends[-1] == x.shape[0] and ends == sorted(ends)
    return fits or f"{ends} of {x.shape[0]} rows"


def used_fit(x: torch.Tensor, cumulative: Sequence[int] | None, used: Sequence[int] | None) -> bool | str:
    """True (else the fault as text) if `used` has a number per sequence, at most its rows; cumulative: ends in x."""
    first, tokens, _ = lengths_of(x, cumulative, None, None)
    if used is not None and any(n > most for n, most in zip(used, tokens, strict=False)):
        return f"{[int(n) for n in used]} of sequences with {tokens} rows"
    return _one_each(used, len(first))


def starts_fit(x: torch.Tensor, cumulative: Sequence[int] | None, start: Sequence[int] | None) -> bool | str:
    """True (else the fault as text) if `start` has an int64 position per sequence; cumulative: ends of sequences."""
    first, _, _ = lengths_of(x, cumulative, None, None)
    if start is not None and max(start, default=0) > torch.iinfo(torch.int64).max - x.shape[-2]:
        return f"{[int(n) for n in start]} of {x.shape[-2]} rows, whose positions overflow int64"
    return _one_each(start, len(first))


def _one_each(given: Sequence[int] | None, count: int) -> bool | str:
    numbers = [0] * count if given is None else [int(n) for n in given]
    return (len(numbers) == count and min(numbers, default=0) >= 0) or f"{numbers} of {count} sequences"


def lengths_fit(
    x: torch.Tensor, cumulative: Sequence[int] | None, used: Sequence[int] | None, start: Sequence[int] | None
) -> bool:
    """True if ends_fit(), used_fit() and starts_fit() are: ends cover x, and all lengths and positions are legal."""
    return ends_fit(x, cumulative) is True and (
        used_fit(x, cumulative, used) is True and starts_fit(x, cumulative, start) is True
    )


def positions_fit(
    table: torch.Tensor | None, cache: torch.Tensor, x: torch.Tensor, cumulative: Sequence[int] | None,
    used: Sequence[int] | None, start: Sequence[int] | None, mode: int, reach: int,
) -> bool | str:  # fmt: skip
    """True (else the fault as text) if a page table of the compressor's state cache has a page for every row that a
    call writes or reads. mode: 1: [B, pages], 2: [B], one page each, a ring; cumulative, used, start: ends, used
    lengths and first positions of sequences in x; reach: most rows before the first token that a window reads."""
    first, tokens, positions = lengths_of(x, cumulative, used, start)
    if table is None:
        return max(positions, default=0) == 0 or f"None with start_pos {positions}"
    if table.dim() != (2 if mode == 1 else 1) or table.shape[0] != len(first):
        return f"{list(table.shape)} for {len(first)} sequences in cache_mode {mode}"
    size = cache.shape[1]
    end = max((p + n for p, n in zip(positions, tokens, strict=True)), default=0)
    if mode == 1 and end > table.shape[1] * size:
        return f"{table.shape[1]} blocks of {size} rows, and {end} positions"
    if mode == 2 and max(tokens, default=0) + reach > size:
        return f"blocks of {size} rows, and {max(tokens)} new rows behind {reach}"
    return True


def shapes_fit(x: torch.Tensor, weight: torch.Tensor, coff: int) -> bool:
    """True if a projection's weight is [coff * D, H], for rows of x with H elements; coff: 2 if windows overlap."""
    sized = weight.dim() == 2 and weight.shape[1] == x.shape[-1]
    return sized and weight.shape[0] >= coff and weight.shape[0] % coff == 0


_AXES = "x.dim() == (3 if cu_seqlens is None else 2)"
_ENDS = f"{_AXES} and ends_fit(x, cu_seqlens) is True"
_LENGTHS = "x, cu_seqlens, seqused, start_pos"
_FUNCTIONS = (ends_fit, used_fit, starts_fit, lengths_fit, positions_fit, shapes_fit, apart)


COMPRESSOR = auxiliary(
    "cann_ops_transformer.compressor",
    "Projects rows to keys and gates, and pools every window of cmp_ratio rows to one compressed key.",
    (
        floats("x", "Rows [B, S, H], or packed [T, H] with cu_seqlens."),
        floats("wkv", "Projection to keys, [coff * D, H].", like="x"),
        floats("wgate", "Projection to gates, [coff * D, H].", like="x"),
        Tensor(
            "state_cache",
            "Keys and gates of earlier rows, in blocks [blocks, rows, 2 * coff * D]; written in place.",
            dtypes="float32",
        ),
        Tensor("ape", "Bias of gates by position in the window, [cmp_ratio, coff * D].", dtypes="float32"),
        Attr("cmp_ratio", "Rows of a window.", default=4, domain="cmp_ratio >= 1"),
        Tensor(
            "state_block_table",
            "Blocks of state_cache: [B, blocks of a sequence] in cache_mode 1, where rows of block 0 are not "
            "stored; [B] in cache_mode 2. None: no rows are stored.",
            True,
            dtypes="int32",
        ),
        Array("cu_seqlens", "Packed rows: 0, then the cumulative ends of the sequences.", True),
        Array("seqused", "Number of used rows of each sequence; None: all.", True),
        Array("start_pos", "Position of the first row of every sequence; None: 0.", True),
        one_of("coff", "2: windows overlap: rows have 2 * D channels, and the first D are for the next window; 1: "
               "they do not.", (1, 2)),
        one_of("cache_mode", "1: a page table of blocks; 2: one block per sequence, used as a ring.", (1, 2)),
    ),
    (
        result("cmp_kv", "[B, ceil(S / cmp_ratio), D], zeros behind the windows of each sequence; or packed "
               "[min(T, T // cmp_ratio + B), D], zeros behind the windows of all.", "=x"),
    ),
    rules=(
        invalid(_AXES,
                "x: [B, S, H], or [T, H] with cu_seqlens (packed rows require cu_seqlens)", invalid={"x": "4 W"}),
        invalid("shapes_fit(x, wkv, coff)", "wkv: [coff * D, H], where x has rows of H elements (a row per "
                "channel)",
                invalid={"wkv": "4 6", "wgate": "4 6"}, when="x.dim() > 1"),
        invalid("wgate.shape == wkv.shape", "wgate: the shape of wkv (a gate per channel)",
                invalid={"wgate": "6 W"}),
        invalid("ape.dim() == 2 and ape.shape[0] == cmp_ratio and ape.shape[1] == wkv.shape[0]",
                "ape: [cmp_ratio, coff * D] (a row per position in a window)", invalid={"ape": "3 4"},
                when="wkv.dim() == 2"),
        invalid("state_cache.dim() == 3 and state_cache.shape[2] == 2 * wkv.shape[0]",
                "state_cache: [blocks, rows, 2 * coff * D] (keys, then gates)", invalid={"state_cache": "3 4 6"},
                when="wkv.dim() == 2"),
        meaning("ends_fit(x, cu_seqlens)", "cu_seqlens: 0, then ends that never fall, the last the number of "
                "rows of x (sequences are packed)", invalid={"x": "6 W", "cu_seqlens": [1, 4, 6]}, when=_AXES),
        meaning("used_fit(x, cu_seqlens, seqused)", "seqused: one number per sequence, at most its rows (the used "
                "rows of each sequence)", invalid={"seqused": [7, 2]}, when=_ENDS),
        meaning("starts_fit(x, cu_seqlens, start_pos)", "start_pos: one position per sequence (the number of its "
                "earlier rows)", invalid={"start_pos": [-1, 0]}, when=_ENDS),
        meaning(f"positions_fit(state_block_table, state_cache, {_LENGTHS}, cache_mode, coff * cmp_ratio - 1)",
                "state_block_table: a block for every row that is stored or read (windows read earlier rows)",
                invalid={"start_pos": [30, 0]},
                when=f"{_AXES} and state_cache.dim() == 3"
                f" and lengths_fit({_LENGTHS})"),
        meaning("state_block_table is None or within(state_block_table, state_cache.shape[0])",
                "state_block_table: numbers of blocks of state_cache (from 0 on)", reads=True,
                when="state_cache.dim() == 3",
                invalid={"state_block_table": torch.tensor([[1, 9], [0, 2]], dtype=torch.int32)}),
        *in_place(torch.float32, state_cache=(3, 4, 8)),
    ),
    functions={one.__name__: one for one in _FUNCTIONS},
    sizes={"Cw": 4},
    sample={
        "x": "B 6 W", "wkv": "Cw W", "wgate": "Cw W", "state_cache": "3 4 8", "ape": "4 Cw",
        "state_block_table": torch.tensor([[1, 2], [0, 2]], dtype=torch.int32),
    },
    formula="z_p = wgate x_p + ape[p % r],  cmp_w = sum_p softmax_p(z_p) * (wkv x_p),  p in window w",
    tex=r"z_p = W_{gate}\, x_p + ape_{p \bmod r} \qquad cmp_w = \sum_{p=wr}^{wr+r-1} "
        r"\operatorname{softmax}_p(z_p) \odot W_{kv}\, x_p",
    keywords="state_block_table",
    declared={"state_cache": Annotated[torch.Tensor, "a!"]}
    | dict.fromkeys(("cu_seqlens", "seqused", "start_pos"), TENSOR_FIRST),
    example="""\
>>> x, wkv, wgate = torch.randn(1, 9, 32), torch.randn(16, 32), torch.randn(16, 32)
>>> state, table = torch.zeros(2, 16, 32), torch.ones(1, 1, dtype=torch.int32)
>>> compressor(x, wkv, wgate, state, torch.zeros(4, 16), 4, state_block_table=table).shape
torch.Size([1, 3, 16])""",
)  # fmt: skip
RECORDS = (COMPRESSOR,)
