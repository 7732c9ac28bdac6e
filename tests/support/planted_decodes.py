"""Simulates decode kernels with faults in pages, splits and stored integers, for one token of three sequences.

Shares no code with the judge. A seed determines the fault, its page, split and head, and the sizes.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from support.planted import Capture, Planted, fault

Tensor = torch.Tensor


@dataclass(frozen=True)
class Call:
    """The tensors of a decode of three sequences, and the random generator of faults.

    Attributes:
        pool: pages of keys and of values [blocks, page, N2, D]; table: [3, pages].
    """

    q: Tensor  # [3, N1, D]
    pool: tuple[Tensor, Tensor]
    table: Tensor
    lengths: list[int]
    scale: float
    page: int
    rng: random.Random

    @property
    def dtype(self) -> torch.dtype:
        return self.q.dtype

    def gathered(self, side: int, table: Tensor, b: int, length: int) -> Tensor:
        """Returns keys or values [length, N2, D] of a sequence."""
        pages = table[b, : -(-length // self.page)].long()
        return self.pool[side][pages].flatten(0, 1)[:length].float()


def drawn(seed: int) -> Call:
    """Draws a call: sizes, dtype, lengths and pages."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = rng.choice([torch.float16, torch.bfloat16])
    page = rng.choice([16, 32, 64, 128])
    lengths = [rng.randint(2, 5) * page + rng.randint(1, page - 1) for _ in range(3)]
    heads, group, dim = rng.choice([2, 4]), rng.choice([1, 2, 4]), rng.choice([32, 64])
    columns = max(-(-n // page) for n in lengths)
    blocks = 3 * columns + 2
    pool = tuple(torch.randn(blocks, page, heads, dim, generator=generator).to(dtype) for _ in range(2))
    table = torch.randperm(blocks, generator=generator)[: 3 * columns].view(3, -1).int()
    q = torch.randn(3, heads * group, dim, generator=generator).to(dtype)
    return Call(q, pool, table, lengths, dim**-0.5 * rng.choice([2.0, 3.0]), page, rng)  # type: ignore[arg-type]


def attended(x: Call, q: Tensor, k: Tensor, v: Tensor, split: int = 0, merge: str = "", lost: int = -1) -> Tensor:
    """Computes the output [N1, D] of a row; split: keys per split, or 0 for no splits; merge, lost: faults."""
    group = q.shape[0] // k.shape[1]
    k, v = (t.transpose(0, 1).repeat_interleave(group, 0) for t in (k, v))
    scores = (q.float()[:, None] @ k.mT * x.scale)[:, 0]
    results = []
    size = split or scores.shape[-1]
    for n, first in enumerate(range(0, scores.shape[-1], size)):
        if n == lost:
            continue
        s, values = scores[:, first : first + size], v[:, first : first + size]
        top = s.amax(-1, keepdim=True)
        weights = (s - top).exp()
        total = weights.sum(-1, keepdim=True)
        results.append(((weights.to(x.dtype).float()[:, None] @ values)[:, 0] / total, top, total))
    out, top, total = (torch.stack(t) for t in zip(*results, strict=True))
    lse = top + total.log()
    shares = {
        "": lse.softmax(0), "mean": torch.full_like(lse, 1 / len(lse)), "sum": torch.ones_like(lse),
        "2^lse": (lse * math.log(2)).softmax(0), "maxima": total / total.sum(0), "sums": top.softmax(0),
    }[merge]  # fmt: skip
    return (out * shares).sum(0)


def paged(
    x: Call,
    *,
    tables: tuple[Tensor, Tensor] | None = None,
    beyond: str = "",
    shorter: int = 0,
    heads: Callable[[Tensor, int], Tensor] = lambda t, side: t,
    splits: int = 0,
    merge: str = "",
    lost: int = -1,
) -> Tensor:
    """Computes the output [3, N1, D]; every option is a fault."""
    tables, rows = tables or (x.table, x.table), []
    for b, length in enumerate(x.lengths):
        full = -(-length // x.page) * x.page
        other = {"seen": full, "dropped": length // x.page * x.page}
        other["summed"] = min(sum(x.lengths[: b + 1]), x.table.shape[1] * x.page)
        read = other.get(beyond, length - shorter)
        k, v = (heads(x.gathered(side, tables[side], b, read), side) for side in (0, 1))
        if beyond == "zeros":
            k, v = (torch.nn.functional.pad(t, (0, 0, 0, 0, 0, full - length)) for t in (k, v))
        rows.append(attended(x, x.q[b], k, v, -(-length // splits) if splits else 0, merge, lost))
    return torch.stack(rows).to(x.dtype)


# Operators of a decode, and their parameters of the keys' lengths.
OPERATORS = {
    "aclnnFusedInferAttentionScore": "actual_seq_lengths_kv",
    "aclnnFusedInferAttentionScoreV3": "actual_seq_lengths_kv",
    "aclnnIncreFlashAttentionV4": "actual_seq_lengths",
    "npu_incre_flash_attention": "actual_seq_lengths",
}


def capture(x: Call, out: Tensor, operator: str = "") -> Capture:
    """Makes a saved call with an output; operator "": one of OPERATORS, by the lengths."""
    operator = operator or [*OPERATORS][sum(x.lengths) % len(OPERATORS)]
    key, value = (pool.flatten(2) if operator.startswith("npu") else [pool.flatten(2)] for pool in x.pool)
    names = {
        "query": x.q[:, :, None], "key": key, "value": value, "block_table": x.table, "num_heads": x.q.shape[1],
        "scale_value": x.scale, "input_layout": "BNSD", "num_key_value_heads": x.pool[0].shape[2],
        "block_size": x.page, OPERATORS[operator]: x.lengths,
    }  # fmt: skip
    return Capture(operator, names, {"attention_out": out[:, :, None]})


# ------------------------------------------------------------------------------------------------------------- faults

Faulty = tuple[Capture, tuple[str, ...]]  # a call with the fault, and texts of its parameters in the diagnosis


@fault
def _tables(x: Call, change: Callable[[Tensor], Tensor], sides: str, word: str) -> Faulty:
    changed = change(x.table.clone())
    tables = (changed if "k" in sides else x.table, changed if "v" in sides else x.table)
    return capture(x, paged(x, tables=tables)), (word,)


def _one_page(x: Call) -> Faulty:
    table = x.table.clone()
    b = x.rng.randrange(3)
    page = x.rng.randrange(x.lengths[b] // x.page)
    table[b, page] = x.rng.choice([n for n in range(len(x.pool[0])) if n != x.table[b, page]])
    words = f"page {page} of sequence {b}", f"block {int(table[b, page])},"
    return capture(x, paged(x, tables=(table, table))), words


@fault
def _splits(x: Call, merge: str, word: str) -> Faulty:
    count = x.rng.choice([2, 3, 4, 8])
    return capture(x, paged(x, splits=count, merge=merge)), (word, f"{count} splits")


def _lost_split(x: Call) -> Faulty:
    count = x.rng.choice([2, 3, 4])
    lost = x.rng.randrange(count)
    return capture(x, paged(x, splits=count, lost=lost)), (f"split {lost} of {count} splits",)


@fault
def _fixed(x: Call, *words: str, **options: Any) -> Faulty:
    """Makes a fault without drawn parameters; words: its description, with {page} for the size of a page."""
    return capture(x, paged(x, **options)), tuple(word.format(page=x.page) for word in words)


def _modulo(x: Call) -> Faulty:
    """Gives every query head a key head, so that groups have one head."""
    out = paged(x, heads=lambda t, side: t[:, torch.arange(x.q.shape[1]) % t.shape[1]])
    return capture(x, out), ("h % N2",)


@fault
def _lse(x: Call, of: Callable[[Tensor], Tensor]) -> Faulty:
    """Returns the right output and wrong log-sum-exps; of: function of the products of query and keys [N1, S]."""
    group, rows = x.q.shape[1] // x.pool[0].shape[2], []
    for b, length in enumerate(x.lengths):
        k = x.gathered(0, x.table, b, length).transpose(0, 1).repeat_interleave(group, 0)
        rows.append(of((x.q[b].float()[:, None] @ k.mT)[:, 0]))
    call = capture(x, paged(x), "aclnnFusedInferAttentionScore")
    outputs = call.outputs | {"softmax_lse": torch.stack(rows)[:, :, None, None]}
    return replace(call, inputs=call.inputs | {"softmax_lse_flag": True}, outputs=outputs), ("",)


Meaning = Callable[[Tensor, Tensor, Tensor], Tensor]


@fault
def _quantised(x: Call, kind: str, read: Meaning, word: str, **options: Any) -> Faulty:
    """Makes a call with an integer cache; read: incorrect dequantisation of stored [S, N2, D], scale and offset."""
    return stored(x, kind, read, **options), (word,)


def stored(x: Call, kind: str, read: Meaning, swapped: bool = False) -> Capture:
    """Makes a call over a padded integer cache with offsets.

    kind: "channel", "token" or "int4". swapped: exchange the scales and offsets of keys and of values.
    """
    generator = torch.Generator().manual_seed(x.rng.randrange(1 << 30))
    heads, dim, slots = x.pool[0].shape[2], x.pool[0].shape[3], max(x.lengths) + 5
    limit = 8 if kind == "int4" else 100
    rows = [torch.randint(-limit, limit, (3, slots, heads, dim), generator=generator) for _ in range(2)]
    shape = (2, 3, slots) if kind == "token" else (2, heads, dim)
    scale = ((torch.rand(shape, generator=generator) * 1.5 + 0.5) / limit).to(x.dtype)
    offset = (torch.randn(shape, generator=generator) * limit / 9).to(x.dtype)
    scale, offset = (t.float() if kind == "token" else t for t in (scale, offset))
    outs = []
    for b, length in enumerate(x.lengths):
        meant = []
        for side in (0, 1):
            sides = [t[1 - side if swapped else side] for t in (scale, offset)]
            of = [t[b, :, None, None] if kind == "token" else t[None] for t in sides]
            meant.append(read(rows[side][b].float(), *(t.float() for t in of))[:length])
        outs.append(attended(x, x.q[b], *meant))
    if kind == "int4":
        halves = [(t & 15).to(torch.uint8).transpose(1, 2).contiguous().unflatten(-1, (-1, 2)) for t in rows]
        key, value = ((t[..., 0] | (t[..., 1] << 4)).contiguous().view(torch.int32) for t in halves)
    else:
        key, value = (t.to(torch.int8).transpose(1, 2).contiguous() for t in rows)
    call = capture(x, torch.stack(outs).to(x.dtype), "aclnnFusedInferAttentionScore")
    scale, offset = (t if kind == "token" else t.flatten(1) for t in (scale, offset))
    inputs = {name: value for name, value in call.inputs.items() if "block" not in name}  # no pages
    inputs |= {"key": [key], "value": [value], "antiquant_scale": scale, "antiquant_offset": offset}
    return replace(call, inputs=inputs | {"antiquant_mode": int(kind == "token")})


Position = Callable[[Call, Tensor], Tensor]  # from positions in a sequence to those of their scales


@fault
def _scales_in_pages(x: Call, place: Position, word: str) -> Faulty:
    return stored_in_pages(x, place), (word,)


def stored_in_pages(x: Call, place: Position = lambda x, at: at) -> Capture:
    """Makes a call over integers and token scales in pages; place: position from which a token's scale is read."""
    generator = torch.Generator().manual_seed(x.rng.randrange(1 << 30))
    rows = [torch.randint(-100, 100, x.pool[0].shape, generator=generator) for _ in range(2)]
    scale = (torch.rand(2, *x.pool[0].shape[:2], generator=generator) * 1.5 + 0.1) / 100
    outs = []
    for b, length in enumerate(x.lengths):
        pages = x.table[b, : -(-length // x.page)].long()
        at = place(x, torch.arange(length)).clamp(0, len(pages) * x.page - 1)
        k, v = (
            rows[side][pages].flatten(0, 1)[:length].float() * scale[side, pages].flatten()[at][:, None, None]
            for side in (0, 1)
        )
        outs.append(attended(x, x.q[b], k, v))
    names = capture(x, torch.stack(outs).to(x.dtype), "aclnnFusedInferAttentionScoreV3")
    inputs = names.inputs | {"key": [rows[0].flatten(2).to(torch.int8)], "value": [rows[1].flatten(2).to(torch.int8)]}
    for side, name in enumerate(("key", "value")):
        inputs |= {f"{name}_antiquant_scale": scale[side], f"{name}_antiquant_mode": 4}
    return replace(names, inputs=inputs)


def right_meaning(stored: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    return (stored + offset) * scale


def _unsigned(stored: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    return (stored % 16 + offset) * scale


def _pairs(stored: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    return (stored.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) + offset) * scale


def _turned(stored: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """Reads scales and offsets [1, N2, D] as if their memory were [D, N2]."""
    scale, offset = (t.reshape(t.shape[2], t.shape[1]).T for t in (scale, offset))
    return (stored + offset) * scale


def _next(axis: int) -> Meaning:
    return lambda t, scale, offset: (t + offset.roll(-1, axis)) * scale.roll(-1, axis)


# Faults by name: (the fault, names of the mistakes that describe it).
FAULTS: dict[str, tuple[Callable[[Call], Faulty], tuple[str, ...]]] = {
    "entries a column to the right": (_tables(lambda t: t.roll(-1, 1), "kv", "to the right"), ("page-table",)),
    "entries a column to the left": (_tables(lambda t: t.roll(1, 1), "kv", "to the left"), ("page-table",)),
    "values a column to the right": (_tables(lambda t: t.roll(-1, 1), "v", "values alone"), ("page-table",)),
    "keys a column to the left": (_tables(lambda t: t.roll(1, 1), "k", "keys alone"), ("page-table",)),
    "the first sequence's pages": (_tables(lambda t: t[:1].repeat(3, 1), "kv", "first sequence"), ("page-table",)),
    "another block for a page": (_one_page, ("page-wrong", "tile-stale")),
    "slots after the last key": (_fixed("last page", beyond="seen"), ("padding-seen",)),
    "the last, partial page left out": (
        _fixed("the last, partial tile of", " {page}", beyond="dropped"), ("tile-skipped",)
    ),
    "zeros after the last key": (_fixed("", beyond="zeros"), ("padding-weighed",)),
    "the new token left out": (_fixed("", shorter=1), ("length-off-by-one",)),
    "splits averaged": (_splits("mean", "mean"), ("tile-softmax",)),
    "splits added": (_splits("sum", "sum"), ("tile-softmax",)),
    "splits weighed by 2^lse": (_splits("2^lse", "2^lse"), ("tile-softmax",)),
    "splits without their maxima": (_splits("maxima", "without the maxima"), ("tile-softmax",)),
    "splits without their sums": (_splits("sums", "without the sums"), ("tile-softmax",)),
    "a split left out": (_lost_split, ("split-left-out", "tile-left-out", "tile-skipped")),
    "heads modulo N2": (_modulo, ("gqa-order",)),
    "values of the next head": (_fixed("values", heads=lambda t, n: t.roll(-1, 1) if n else t), ("head-offset",)),
    "keys of the next head": (_fixed("keys", heads=lambda t, n: t if n else t.roll(-1, 1)), ("head-offset",)),
    "scales of the next head": (_quantised("channel", _next(1), "next head"), ("dequantisation",)),
    "scales of the next channel": (_quantised("channel", _next(2), "next channel"), ("dequantisation",)),
    "scales of the next token": (_quantised("token", _next(0), "next token"), ("dequantisation",)),
    "scales of the next token in pages": (
        _scales_in_pages(lambda x, at: at + 1, "next token"), ("dequantisation",)
    ),
    "scales of the page before": (
        _scales_in_pages(lambda x, at: (at - x.page).where(at >= x.page, at), "previous page"), ("dequantisation",)
    ),
    "offsets of the other sign": (
        _quantised("channel", lambda t, s, o: (t - o) * s, "other sign"), ("dequantisation",)
    ),
    "offsets added after scaling": (_quantised("channel", lambda t, s, o: t * s + o, "* scale +"), ("dequantisation",)),
    "halves of int4 exchanged": (_quantised("int4", _pairs, "high half"), ("dequantisation",)),
    "int4 without its sign": (_quantised("int4", _unsigned, "without their sign"), ("dequantisation",)),
    "scales in the other order of axes": (_quantised("channel", _turned, ""), ("dequantisation",)),
    "scales of the other side": (_quantised("channel", right_meaning, "", swapped=True), ("dequantisation",)),
    "no scale": (lambda x: (capture(x, paged(replace(x, scale=1.0))), ("",)), ("scale-missing",)),
    "cumulative lengths": (_fixed("", beyond="summed"), ("lengths-cumulative",)),
    "log-sum-exps to base 2": (lambda x: _lse(lambda s: (s * x.scale).logsumexp(-1) / math.log(2))(x), ("lse-base",)),
    "log-sum-exps of unscaled products": (_lse(lambda s: s.logsumexp(-1)), ("lse-unscaled",)),
}  # fmt: skip


_FLAT = ("zeros after the last key", "the new token left out")


def planted(name: str, seed: int) -> Planted:
    """Returns a call with the fault `name`."""
    program, names = FAULTS[name]
    wanted, n = name == "heads modulo N2", 1000 * seed + [*FAULTS].index(name)
    x = drawn(n)
    while wanted and x.q.shape[1] == x.pool[0].shape[2]:
        n += 100
        x = drawn(n)
    if name in _FLAT:  # the fault is visible if no key dominates
        x = replace(x, scale=x.scale / 4)
    result, words = program(x)
    return result, names, words


def right(seed: int) -> Capture:
    """Returns a call with correct results, of any number of splits or of stored integers."""
    x = drawn(seed)
    if seed % 3 == 2:
        return stored_in_pages(x)
    if seed % 3:
        return stored(x, x.rng.choice(["channel", "token", "int4"]), right_meaning)
    return capture(x, paged(x, splits=x.rng.choice([0, 2, 3, 5, 8])))
