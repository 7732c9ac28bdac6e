"""DecodeCase: a test call of decoding attention, with tensors in memory filled with NaN, and its output in float64.

The output is computed here without the code that is tested.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from fusion_attention.testing.cases import Named

Tensor = torch.Tensor
Args = dict[str, Any]


@dataclass(frozen=True)
class DecodeCase(Named):
    """A test call of npu_incre_flash_attention, torch_npu's decoding attention.

    Args:
        layout: axis order of the query, and of a cache in one tensor.
        kv_len: tokens of every sequence.
        slots: capacity of a cache in one tensor, tokens per sequence.
        rows: query tokens of every sequence.
        store: form of the cache: "stack" (one tensor), "list" (a tensor per sequence), "pages" [pages, size, N2*D] or
            "headed" (pages [pages, N2, size, D]).
        integers: int8 cache with one scale ("tensor") or a scale per channel ("channel"); "": not quantized.
        offsets: True: an int8 cache and an int8 output have offsets.
        mask: True: a mask removes some tokens. blank: True: it removes all tokens of sequence 0.
        pse: an additive bias "batch" [B, ..] or "shared" [1, ..]; "": none.
        padding: left padding: number of unused positions of the cache after every sequence; -1: none.
        out: int8 output with one scale ("tensor") or a scale per channel ("channel"); "": not quantized.
    """

    layout: str = "BSH"
    dtype: str = "float16"
    heads_q: int = 4
    heads_kv: int = 2
    dim: int = 16
    kv_len: tuple[int, ...] = (21, 5)
    slots: int = 24
    rows: int = 1
    store: str = "stack"
    page_size: int = 16
    integers: str = ""
    offsets: bool = False
    mask: bool = False
    blank: bool = False
    pse: str = ""
    padding: int = -1
    out: str = ""

    @property
    def group(self) -> int:
        """The number of query heads per key head."""
        return self.heads_q // self.heads_kv

    @property
    def first(self) -> tuple[int, ...]:
        """The position of every sequence's first token in its part of the cache."""
        return tuple(self.slots - self.padding - n if self.padding >= 0 else 0 for n in self.kv_len)

    @property
    def columns(self) -> int:
        """The number of columns of masks and biases: tokens that a sequence's cache can store."""
        pages = -(-max(self.kv_len) // self.page_size)
        return pages * self.page_size if self.store in ("pages", "headed") else self.slots


@cache
def logical(case: DecodeCase) -> dict[str, Any]:
    """Returns {name: tensor} of a test call before conversion to its layout: q [B, N1, rows, D]; k and v, lists of a
    tensor [N2, kv_len, D] per sequence, in the cache's dtype; scales, offsets, mask and bias."""
    generator = case.generator()
    dtype = getattr(torch, case.dtype)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    def stored(length: int) -> Tensor:
        shape = (case.heads_kv, length, case.dim)
        if case.integers:
            return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
        return draw(*shape)

    batch = len(case.kv_len)
    results: dict[str, Any] = {}
    results["q"] = draw(batch, case.heads_q, case.rows, case.dim)
    results["k"], results["v"] = ([stored(n) for n in case.kv_len] for _ in "kv")
    channels = (2, case.heads_kv, case.dim) if case.integers == "channel" else (2,)
    results["scale"] = (draw(*channels).abs() / 64 + 0.01).to(dtype)
    results["offset"] = draw(*channels) * 8 if case.offsets else None
    results["mask"] = torch.rand(batch, case.columns, generator=generator) < 0.3
    for item, first in enumerate(case.first):
        results["mask"][item, first] = False
    if case.blank:
        results["mask"][0] = True
    results["pse"] = draw(batch if case.pse == "batch" else 1, case.heads_q, 1, case.columns)
    count = case.heads_q * case.dim if case.out == "channel" else 1
    results["out_scale"] = torch.rand(count, generator=generator) * 20 + 20
    results["out_offset"] = torch.rand(count, generator=generator) * 4 if case.offsets else None
    return results


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns a tensor filled with NaN (integers: 99), an offset view of a larger buffer."""
    fill: float = math.nan if dtype.is_floating_point else 99
    full = torch.full((math.prod(shape) + 24,), fill, dtype=dtype)
    return full[16 : 16 + math.prod(shape)].view(shape)


def place(case: DecodeCase, stored: list[Tensor], table: Tensor | None) -> Any:
    """Returns keys or values in a KV cache of the form case.store, with NaN elsewhere. stored: a tensor [N2, kv_len, D]
    per sequence; table: the page table, or None if the cache has no pages."""
    dtype, heads, dim = stored[0].dtype, case.heads_kv, case.dim
    if table is not None:
        size = case.page_size
        pool = poisoned((int(table.max()) + 2, heads, size, dim), dtype)
        if case.store == "pages":
            pool = poisoned((pool.shape[0], size, heads, dim), dtype).transpose(1, 2)
        for item, rows in enumerate(stored):
            for token in range(rows.shape[1]):
                pool[table[item, token // size], :, token % size] = rows[:, token]
        return pool if case.store == "headed" else pool.transpose(1, 2).flatten(2)

    def one(items: list[Tensor], slots: int, first: tuple[int, ...]) -> Tensor:
        axes = (len(items), heads, slots, dim) if case.layout == "BNSD" else (len(items), slots, heads, dim)
        memory = poisoned(axes, dtype)
        by_head = memory if case.layout == "BNSD" else memory.transpose(1, 2)
        for item, rows in enumerate(items):
            if first[item] >= 0:
                by_head[item, :, first[item] : first[item] + rows.shape[1]] = rows
        return memory.flatten(2) if case.layout == "BSH" else memory

    if case.store == "list":
        return [one([rows], rows.shape[1] + i, (0,)) for i, rows in enumerate(stored)]
    return one(stored, case.slots, case.first)


def pages_of(case: DecodeCase) -> Tensor | None:
    """Returns a test call's page table, [B, pages], in random order, unused entries invalid; None without pages."""
    if case.store not in ("pages", "headed"):
        return None
    count = case.columns // case.page_size
    ids = torch.randperm(len(case.kv_len) * count, generator=torch.Generator().manual_seed(3)).to(torch.int32)
    table = ids.view(len(case.kv_len), count)
    for item, length in enumerate(case.kv_len):
        table[item, -(-length // case.page_size) :] = 1 << 30
    used = [set(table[i, : -(-n // case.page_size)].tolist()) for i, n in enumerate(case.kv_len)]
    assert sum(map(len, used)) == len(set().union(*used))
    return table


def query_of(case: DecodeCase, by_head: Tensor) -> Tensor:
    """Returns a tensor [B, N1, rows, D] in the layout of a test call."""
    if case.layout == "BNSD":
        return by_head
    return by_head.transpose(1, 2).flatten(2) if case.layout == "BSH" else by_head.transpose(1, 2)


def arguments(case: DecodeCase) -> Args:
    """Returns {name: argument} of npu_incre_flash_attention for a test call."""
    n, table = logical(case), pages_of(case)
    valid_table = None if table is None else table.masked_fill(table == 1 << 30, 0)
    flat = case.layout == "BSH" and case.integers == "channel"
    args: Args = {
        "query": query_of(case, n["q"]),
        "key": place(case, n["k"], valid_table),
        "value": place(case, n["v"], valid_table),
        "actual_seq_lengths": list(case.kv_len),
        "num_heads": case.heads_q,
        "num_key_value_heads": case.heads_kv,
        "scale_value": case.dim**-0.5,
        "input_layout": case.layout,
        "block_table": table,
        "block_size": 0 if table is None else case.page_size,
        "atten_mask": n["mask"] if case.mask or case.blank else None,
        "pse_shift": n["pse"] if case.pse else None,
        "kv_padding_size": torch.tensor([case.padding]) if case.padding >= 0 else None,
        "quant_scale2": n["out_scale"] if case.out else None,
        "quant_offset2": n["out_offset"] if case.out else None,
    }
    if case.integers:
        args["antiquant_scale"] = n["scale"].flatten(1) if flat else n["scale"]
        args["antiquant_offset"] = n["offset"].flatten(1) if flat and case.offsets else n["offset"]
    return args


def answer(case: DecodeCase) -> Tensor:
    """Returns the output of a test call, [B, N1, rows, D] float64, computed by the formula with dense matrices."""
    n = logical(case)
    out = torch.zeros(len(case.kv_len), case.heads_q, case.rows, case.dim, dtype=torch.float64)
    for item, length in enumerate(case.kv_len):
        first = case.first[item]
        if not length or first < 0:
            continue
        k, v = (_meaning(case, n, side, item).repeat_interleave(case.group, 0) for side in (0, 1))
        scores = case.dim**-0.5 * (n["q"][item].double() @ k.mT)
        columns = slice(first, first + length)
        if case.pse:
            scores = scores + n["pse"][item if case.pse == "batch" else 0][..., columns].double()
        if case.mask or case.blank:
            scores = scores.masked_fill(n["mask"][item, columns], -math.inf)
        invisible = torch.arange(length) > torch.arange(case.rows)[:, None] + length - case.rows
        probabilities = scores.masked_fill(invisible, -math.inf).softmax(-1)
        empty = probabilities.isnan().all(-1, keepdim=True)
        # A row before the first token returns zeros; a row whose mask removes all tokens returns the mean of V.
        blank = torch.full_like(probabilities, 1 / length).masked_fill(invisible.all(-1, keepdim=True), 0)
        out[item] = torch.where(empty, blank, probabilities) @ v
    return _narrow(case, n, out) if case.out else out


def _meaning(case: DecodeCase, n: Args, side: int, item: int) -> Tensor:
    """Returns keys (side 0) or values (side 1) of sequence `item`, dequantised, float64; n: tensors from logical()."""
    rows: Tensor = n["kv"[side]][item].double()
    if not case.integers:
        return rows
    scale = n["scale"][side].double()
    offset = n["offset"][side].double() if case.offsets else torch.zeros_like(scale)
    if case.integers == "channel":
        scale, offset = scale[:, None], offset[:, None]
    return (rows + offset) * scale


def _narrow(case: DecodeCase, n: Args, out: Tensor) -> Tensor:
    """Returns `out` quantised to int8 with the test call's scale and offset, as float64; n: tensors from logical()."""
    scale, offset = n["out_scale"].double(), n["out_offset"].double() if case.offsets else torch.zeros(1)
    if case.out == "channel":
        scale = scale.view(case.heads_q, 1, case.dim)
        offset = offset.view(case.heads_q, 1, case.dim) if case.offsets else offset
    value = out * scale + offset
    full = value.round() if case.out == "tensor" else value.sign() * (value.abs() + 0.5).floor()
    return full.clamp(-128, 127)
