"""Tile shapes: one table per kernel, and the column blocks into which rows are divided.

The entries are the largest shapes that, when compiled, spill no registers and fit in shared memory.

Common parameters: `chip` is a compute capability, 90, 80 or 86; `align` the alignment of rows, in elements.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

from fusion_attention.ir.problem import AnyProblem, Problem

T = TypeVar("T")
WIDEST_PART = 256  # most columns of a block; wider accumulators do not fit in registers
MOST_PARTS = 3  # most column blocks of a row
WIDEST_ROPE = 256
NARROWEST = 16  # smallest size of an operand of a matrix instruction
TMA = True  # value of Tile.TMA


class Tile(NamedTuple):
    """The tile of query rows (BM) and keys (BN) that one program computes at a time, and Triton's numbers of warps and
    pipeline stages."""

    BM: int
    BN: int
    num_warps: int
    num_stages: int
    TMA: bool = False  # rows are loaded by tensor descriptors, which require alignment to 16 bytes


def power(n: int) -> int:
    """Returns the smallest power of two that is at least n, and at least 16, the smallest size of a matrix operand."""
    return max(NARROWEST, 1 << (n - 1).bit_length())


@functools.lru_cache(maxsize=64)
def parts(dim: int) -> tuple[int, int, int]:
    """Returns the widths of up to three column blocks for dim elements (at most 768), such as 576 = 256 + 256 + 64.

    Widths are powers of two, at most 256. A second block is used if both have fewer columns than one block would have.
    """
    results: list[int] = []
    rest = dim
    while rest > WIDEST_PART:
        results.append(WIDEST_PART)
        rest -= WIDEST_PART
    if rest > 0:
        low = max(NARROWEST, 1 << (rest.bit_length() - 1))
        splits = len(results) < MOST_PARTS - 1 and rest > low and low + power(rest - low) < power(rest)
        results += [low, power(rest - low)] if splits else [power(rest)]
    first, second, third = (*results, 0, 0, 0)[:MOST_PARTS]
    return first, second, third


def spans(problem: Problem) -> tuple[int, int]:
    """Returns (columns of a query row with rope, columns of a value row), padded to the widths that kernels load."""
    rope = power(problem.dim_rope) if problem.dim_rope else 0
    return sum(parts(problem.dim_qk)) + rope, sum(parts(problem.dim_v))


# Tiles of the kernels that recompute rows whose results are not finite: for rows of up to WIDEST_PART elements, and for
# wider ones. BN keys, or BM rows, determine the registers: dropout draws eight keys at once, and 4 rows spill in
# addition to the four rows of 768 elements in recompute_key.
RECOMPUTE = {
    "recompute_out": (Tile(16, 16, 4, 1), Tile(8, 8, 8, 1)),
    "recompute_query": (Tile(16, 16, 4, 1), Tile(8, 8, 8, 1)),
    "recompute_key": (Tile(16, 16, 4, 1), Tile(2, 8, 8, 1)),
}

Rows = tuple[tuple[int, int, Tile, Tile, int], ...]

# (chip, bytes of an element) -> (most elements of a query row, most of a value row, tile, tile of a heavy problem, KB
# of shared memory of a program); the first entry that fits is used. Heavy problems read or draw a value for every (row,
# key) pair (bias, blocked matrix, dropout): 64-bit addresses of a tile of scores need a third of its registers. If a
# forward reads several such values, tiles of more than FEW rows are halved, because Triton 3.7.1 would spill up to 736
# bytes. float32 products are multiply-adds (tensor cores would round to 10 bits) with operands in registers: beyond 128
# elements every shape of the backward spills.
FEW = 32
FLOAT32_CHIPS = ((90, 4), (80, 4), (86, 4))  # keys of the tables for elements of 4 bytes
FORWARD: dict[tuple[int, int], Rows] = {
    (90, 2): (
        (64, 64, Tile(64, 128, 4, 3, TMA), Tile(128, 32, 8, 2, TMA), 105),  # two programs share a processor
        (128, 128, Tile(128, 128, 8, 2, TMA), Tile(128, 32, 8, 2, TMA), 161),  # 251 registers
        # A cap, and dim_qk 192 in one piece, keep 16 to 24 bytes on the stack, outside the loops; 64 keys keep none,
        # and issue two fifths more.
        (192, 128, Tile(128, 128, 8, 2, TMA), Tile(128, 32, 8, 2, TMA), 209),
        (256, 256, Tile(128, 64, 8, 2, TMA), Tile(64, 32, 8, 2, TMA), 193),  # means: 8 bytes, outside the loops
        (768, 768, Tile(32, 32, 8, 2, TMA), Tile(16, 32, 8, 1, TMA), 147),  # 64 rows spill in any shape
    ),
    (80, 2): (
        (64, 64, Tile(64, 64, 4, 3), Tile(128, 32, 8, 2), 40),  # two programs share a processor
        (128, 128, Tile(128, 64, 8, 3), Tile(128, 32, 8, 2), 96),  # 255 registers
        (192, 128, Tile(128, 32, 8, 2), Tile(128, 32, 8, 2), 84),  # 128 x 64 takes 88 KB: no second program
        (256, 256, Tile(64, 64, 8, 2), Tile(64, 32, 8, 2), 104),  # 128 x 32 spills here
        (768, 768, Tile(32, 32, 8, 1), Tile(16, 32, 8, 1), 98),  # as above
    ),
    (86, 2): (
        (64, 64, Tile(64, 64, 4, 3), Tile(128, 32, 8, 2), 40),  # two programs share a processor
        (128, 128, Tile(128, 32, 8, 2), Tile(128, 32, 8, 2), 64),  # 128 x 64 spills here
        (192, 128, Tile(128, 32, 8, 2), Tile(128, 32, 8, 2), 84),
        (256, 256, Tile(64, 32, 8, 2), Tile(64, 32, 8, 2), 72),  # 64 x 64 does not fit
        (768, 768, Tile(32, 32, 8, 1), Tile(16, 32, 8, 1), 98),
    ),
    **dict.fromkeys(FLOAT32_CHIPS, ((128, 128, Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), 36),)),  # 198 to 212 registers
}
QUERY: dict[tuple[int, int], Rows] = {
    (90, 2): (
        (64, 64, Tile(64, 128, 4, 2, TMA), Tile(64, 32, 8, 2, TMA), 81),  # 224 registers: two programs
        (128, 128, Tile(128, 64, 8, 3, TMA), Tile(64, 32, 8, 2, TMA), 161),  # 211 registers
        (192, 128, Tile(128, 64, 8, 2, TMA), Tile(32, 32, 8, 1), 161),  # 239 registers; a heavy one of 64 rows spills
        (256, 256, Tile(128, 32, 8, 2, TMA), Tile(32, 32, 8, 1, TMA), 193),  # 255 registers; 128 x 64 spills
        (1024, 768, Tile(16, 32, 8, 1, TMA), Tile(16, 32, 8, 1, TMA), 112),  # 32 x 32 spills
    ),
    (80, 2): (
        (64, 64, Tile(64, 64, 4, 2), Tile(32, 32, 8, 1), 36),  # 182 registers: two programs
        (128, 128, Tile(64, 64, 8, 2), Tile(32, 32, 8, 1), 72),  # 72 KB shared: two programs share a processor
        (192, 128, Tile(32, 64, 8, 2), Tile(32, 32, 8, 1), 64),  # 64 x 32 spills
        (256, 256, Tile(64, 32, 8, 2), Tile(32, 32, 8, 1), 100),  # 64 x 64 spills
        (1024, 768, Tile(16, 32, 8, 1), Tile(16, 32, 8, 1), 112),  # 254 registers
    ),
    (86, 2): (
        (64, 64, Tile(64, 64, 4, 2), Tile(32, 32, 8, 1), 36),
        (128, 128, Tile(64, 64, 8, 2), Tile(32, 32, 8, 1), 72),
        (256, 256, Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), 64),  # 64 x 32 takes 100 KB with two stages
        (1024, 768, Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), 96),
    ),
    **dict.fromkeys(FLOAT32_CHIPS, ((128, 128, Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), 32),)),  # 168 to 255 registers
}
KEY: dict[tuple[int, int], Rows] = {
    (90, 2): (
        (64, 64, Tile(64, 128, 8, 2, TMA), Tile(32, 64, 8, 2, TMA), 66),  # 230 registers
        (128, 128, Tile(32, 128, 8, 2, TMA), Tile(32, 64, 8, 2, TMA), 130),  # 64 x 128 spills with slopes or a cap
        (192, 128, Tile(32, 128, 8, 2, TMA), Tile(32, 32, 8, 2, TMA), 121),  # 64 x 128 spills
        (256, 256, Tile(32, 64, 8, 1, TMA), Tile(32, 32, 8, 1, TMA), 202),  # two stages spill with slopes or a cap
        (1024, 768, Tile(32, 16, 8, 1), Tile(16, 16, 8, 2), 160),  # descriptors spill here
    ),
    (80, 2): (
        (64, 64, Tile(32, 64, 8, 1), Tile(32, 32, 8, 1), 28),  # 64 x 64 spills here, and only here
        (128, 128, Tile(64, 64, 8, 2), Tile(32, 32, 8, 1), 73),  # 182 registers
        (256, 256, Tile(32, 32, 8, 1), Tile(32, 16, 8, 1), 80),  # 180 registers
        (1024, 768, Tile(16, 16, 8, 1), Tile(16, 16, 8, 2), 104),  # a heavy one spills with one stage
    ),
    (86, 2): (
        (64, 64, Tile(32, 64, 8, 1), Tile(32, 32, 8, 1), 28),
        (128, 128, Tile(64, 64, 8, 2), Tile(32, 32, 8, 1), 73),
        (256, 256, Tile(32, 32, 8, 1), Tile(32, 16, 8, 1), 80),
        (640, 512, Tile(16, 16, 8, 1), Tile(16, 16, 8, 2), 97),  # 768 elements take 104 KB
    ),
    **dict.fromkeys(FLOAT32_CHIPS, ((128, 128, Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), 33),)),  # 182 to 183 registers
}
# The decode kernel with more rows of a key head than in DECODE, for floats and for int8: few sizes; without an entry,
# DECODE is used.
PREFILL: dict[tuple[int, int], Rows] = {
    (90, 2): (
        (128, 128, Tile(128, 64, 8, 3), Tile(64, 32, 8, 2), 128),  # 238 registers
        (192, 128, Tile(128, 64, 8, 2), Tile(64, 32, 8, 2), 128),  # 254 registers
        (256, 256, Tile(64, 64, 8, 2), Tile(64, 32, 8, 2), 168),  # 246 registers
    ),
    (80, 2): (
        (128, 128, Tile(64, 64, 8, 3), Tile(64, 32, 8, 2), 88),  # 176 registers
        (192, 128, Tile(64, 64, 8, 2), Tile(32, 32, 8, 2), 73),  # 248 registers
        (256, 256, Tile(64, 32, 8, 2), Tile(32, 32, 8, 2), 69),  # 172 registers
    ),
    **dict.fromkeys(FLOAT32_CHIPS, ()),
}
PREFILL[86, 2] = PREFILL[80, 2]
PREFILL_INT8: dict[tuple[int, int], Rows] = {
    (90, 2): ((128, 128, Tile(64, 64, 8, 3), Tile(64, 32, 8, 2), 73),),  # 128 x 64 spills 32 bytes
    (80, 2): ((128, 128, Tile(64, 32, 8, 3), Tile(32, 32, 8, 2), 37),),  # 64 x 64 spills 136 bytes
    **dict.fromkeys(FLOAT32_CHIPS, ()),
}
PREFILL_INT8[86, 2] = PREFILL_INT8[80, 2]
# Values are the first elements of the keys (MLA), and both products read one tile of latents.
LATENT: dict[tuple[int, int], Rows] = {
    (90, 2): ((576, 512, Tile(64, 32, 8, 3), Tile(16, 32, 8, 1), 184),),  # 64 x 64 spills 40 bytes
    (80, 2): ((576, 512, Tile(64, 32, 8, 2), Tile(16, 32, 8, 1), 113),),  # 255 registers
    (86, 2): ((576, 512, Tile(32, 32, 8, 2), Tile(16, 32, 8, 1), 75),),
    **dict.fromkeys(FLOAT32_CHIPS, ()),
}
# BM is reduced to the least power of two that is at least the rows of a key head.
DECODE: dict[tuple[int, int], Rows] = {
    (90, 2): (
        (128, 128, Tile(32, 64, 4, 3), Tile(16, 32, 4, 2), 76),  # 16 rows: three programs, of int8 two
        (256, 256, Tile(16, 64, 8, 2), Tile(16, 32, 8, 1), 74),  # 192 registers
        (576, 512, Tile(16, 32, 8, 2), Tile(16, 32, 8, 1), 87),  # one stage spills with the factors of int8
        (768, 768, Tile(16, 16, 8, 2), Tile(16, 32, 8, 1), 122),  # 32 keys spill with the factors of int8
    ),
    (80, 2): (
        (128, 128, Tile(32, 64, 4, 3), Tile(16, 32, 4, 2), 76),  # 255 registers with 32 rows
        (256, 256, Tile(16, 64, 8, 2), Tile(16, 32, 8, 1), 74),  # 180 registers
        (576, 512, Tile(16, 32, 8, 2), Tile(16, 32, 8, 1), 87),  # one stage spills with the factors of int8
        (768, 768, Tile(16, 32, 8, 2), Tile(16, 32, 8, 1), 122),  # 140 registers
    ),
    (86, 2): (
        (128, 128, Tile(32, 64, 8, 3), Tile(16, 32, 4, 2), 77),
        (576, 512, Tile(16, 32, 8, 2), Tile(16, 32, 8, 1), 87),
        (768, 768, Tile(16, 16, 8, 2), Tile(16, 32, 8, 1), 74),  # 16 x 32 takes 122 KB with two stages
    ),
    **dict.fromkeys(FLOAT32_CHIPS, ((128, 128, Tile(16, 32, 8, 1), Tile(16, 32, 8, 1), 27),)),  # 106 to 124 registers
}
# (width of a query row as a power of two, tile of the table) -> the tile of dk and dv for scores without modifiers: the
# registers that slopes, a cap or means of empty rows would need allow more rows.
PLAIN_KEY = {
    (128, Tile(32, 128, 8, 2, TMA)): Tile(64, 128, 8, 2, TMA),  # 255 registers
    (256, Tile(32, 64, 8, 1, TMA)): Tile(64, 64, 8, 2, TMA),  # 255 registers, 201 KB shared
}
# Most rows of a tile of the forward kernel, by chip, if rows are not aligned to 16 bytes: more spill.
ODD = {80: 32, 86: 32, 90: 64}
TABLES = {"forward": FORWARD, "query": QUERY, "key": KEY, "decode": DECODE}
TABLES |= {"prefill": PREFILL, "prefill int8": PREFILL_INT8, "latent": LATENT}
# Chips of the tables: least major compute capability and KB of shared memory of the devices that use their entries. All
# have the same registers. So sm_87 uses those of sm_80, sm_89 and sm_120 those of sm_86, sm_100 those of sm_90.
CHIPS = {90: (9, 227), 80: (8, 163), 86: (8, 99)}


@functools.lru_cache(maxsize=16)
def shared_memory(index: int) -> int:
    """Returns the KB of shared memory per program on the GPU with number `index`."""
    from triton.runtime import driver

    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"]) >> 10


def chip_of(device: torch.device) -> int | None:
    """Returns the compute capability (90, 80 or 86) whose table of tile shapes suits a device; None if it has too
    little shared memory; 90 without a GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return next(iter(CHIPS))
    major, available = torch.cuda.get_device_capability(device)[0], shared_memory(index_of(device))
    return next((chip for chip, (least, needed) in CHIPS.items() if major >= least and available >= needed), None)


def index_of(device: torch.device) -> int:
    """Returns the number of a GPU; of "cuda", the current one's."""
    return torch.cuda.current_device() if device.index is None else device.index


def on(device: torch.device, table: Callable[..., T | None], problem: AnyProblem, *more: int) -> T:
    """Returns table(problem, compute capability of the device, *more), a kernel's tile shape (or several)."""
    chip = chip_of(device)
    result = None if chip is None else table(problem, chip, *more)
    assert result is not None  # reasons_against() ensures it
    return result


def recompute_tile(kernel: str, problem: Problem) -> Tile:
    """Returns the tile shape of the kernel named `kernel`, which recomputes rows with infinite or NaN results."""
    return RECOMPUTE[kernel][max(spans(problem)) > WIDEST_PART]


def heavy(problem: Problem) -> bool:
    """Returns True if every (row, key) pair needs a value that is read or drawn: a bias, a mask matrix or dropout."""
    return problem.bias in ("matrix", "table") or problem.has_blocked or problem.dropout != "none"


def row_of(kernel: str, problem: Problem, chip: int) -> tuple[Tile, Tile, int] | None:
    """Returns (tile shape, tile shape for problems with a bias matrix, mask matrix or dropout, KB of shared memory) of
    the kernel named `kernel`; None if no tile fits the problem's dims. chip: compute capability, 90, 80 or 86."""
    if max(problem.dim_qk, problem.dim_v) > MOST_PARTS * WIDEST_PART:
        return None
    width = 4 if problem.dtype == "float32" else 2
    qk, v = spans(problem)
    rows = TABLES[kernel][chip, width]
    return next((row[2:] for row in rows if qk <= row[0] and v <= row[1]), None)


def widest(problem: AnyProblem) -> int:
    """Returns the number of elements of the problem's dtype in 16 bytes, which the widest load instruction reads."""
    return 4 if problem.dtype == "float32" else 8


def tile_of(kernel: str, problem: Problem, chip: int, align: int) -> Tile | None:
    """Returns the tile shape of the kernel named `kernel`; None if no tile fits the problem's dims.

    Rows that are not aligned to 16 bytes are loaded in smaller units, which needs registers like a bias or dropout.
    chip: compute capability, 90, 80 or 86. align: alignment of rows, in elements.
    """
    row = row_of(kernel, problem, chip)
    if row is None:
        return None
    light, weighed, _ = row
    read = problem.bias in ("matrix", "table"), problem.has_blocked, problem.dropout == "bits"  # per (row, key) pair
    if kernel == "forward" and sum(read) > 1 and weighed.BM > FEW:
        few = weighed.BM // 2  # products of fewer than 64 rows (mma.sync) are faster with pointers
        weighed = weighed._replace(BM=few, TMA=weighed.TMA and few >= 64)
    unmodified = not heavy(problem) and problem.bias == "none" and problem.softcap == 0  # scores are scaled products
    if align == widest(problem) and kernel == "key" and unmodified:
        return PLAIN_KEY.get((power(spans(problem)[0]), light), light)
    if align == widest(problem):
        return weighed if heavy(problem) else light
    weighed = weighed._replace(TMA=False)
    if kernel == "key" and align == 1:  # rows are not prefetched two bytes at a time
        weighed = weighed._replace(num_stages=1)
    return weighed._replace(BM=min(weighed.BM, ODD[chip])) if kernel == "forward" else weighed
