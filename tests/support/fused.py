"""Makes the arguments of fused inference attention for a case, in poisoned memory, and computes the expected results.

Uses neither the lowering nor a back end.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from fusion_attention.testing.cases import Named
from fusion_attention.testing.decode import poisoned

Tensor = torch.Tensor
Args = dict[str, Any]
FLT_MAX = torch.finfo(torch.float32).max
UNLIMITED = (1 << 31) - 1
MODES = {"tensor": 0, "channel": 0, "token": 1, "head": 2, "token_head": 3, "pages": 4, "pages_head": 5}
# Permutations from [batch, heads, tokens, elements], or packed [heads, tokens, elements], to each layout.
AXES = {"BNSD": (0, 1, 2, 3), "BSND": (0, 2, 1, 3), "BSH": (0, 2, 1, 3), "NBSD": (1, 0, 2, 3)}
AXES |= {"NTD": (0, 1, 2), "NSD": (0, 1, 2), "TND": (1, 0, 2), "SH": (1, 0, 2)}


@dataclass(frozen=True)
class FusedCase(Named):
    """A call of fused inference attention.

    Args:
        layout: input_layout. rest: number of packed rows after the last item.
        q_len, kv_len: rows and keys of every item, without a prefix.
        rows, slots: rows and keys of an item in padded tensors; 0: those of the longest item.
        store: "stack", "list", or a layout of pages: "rows" [blocks, size, N*D], "heads" [blocks, N, size, D], "pieces"
            [blocks, N, D / d0, size, d0].
        mode, pre, next, precise: sparse_mode, pre_tokens, next_tokens, inner_precise.
        mask: pass a random full mask; blank: it hides all keys of every item's second row.
        pse: "", "batch", "shared" or "row" (one row for all rows).
        left: number of slots after every item's rows and keys (left padding).
        prefix: number of keys of a shared prefix; its tensor has one key more.
        keys, values: kind of the scales of stored integers, a key of MODES, or "".
        bits: 8 or 4; joint: scales of keys and values are one tensor; offsets: integers have offsets.
        full: int8 query with a scale for each product. factor: of its weights, which are rounded.
        latent: int8 query with rope parts and a scale for each row.
        shares: the values are the keys.
        out: kind of the scale of an int8 output: "", "tensor" or "channel".
    """

    layout: str = "BSND"
    dtype: str = "float16"
    heads_q: int = 4
    heads_kv: int = 2
    dim: int = 16
    dim_v: int = 16
    rope: int = 0
    q_len: tuple[int, ...] = (3, 5)
    kv_len: tuple[int, ...] = (9, 6)
    rows: int = 0
    slots: int = 0
    rest: int = 0
    store: str = "stack"
    page_size: int = 4
    mode: int = 0
    pre: int = UNLIMITED
    next: int = UNLIMITED
    precise: int = 0
    mask: bool = False
    blank: bool = False
    pse: str = ""
    left: tuple[int, int] | None = None
    prefix: int = 0
    sink: bool = False
    keys: str = ""
    values: str = ""
    bits: int = 8
    joint: bool = False
    offsets: bool = False
    full: bool = False
    factor: float = 127.0
    latent: bool = False
    shares: bool = False
    out: str = ""

    @property
    def inside(self) -> str:
        return self.layout.partition("_")[0]

    @property
    def outside(self) -> str:
        return self.layout.rpartition("_")[2]

    @property
    def packed(self) -> bool:
        return len(AXES[self.inside]) == 3

    @property
    def paged(self) -> bool:
        return self.store not in ("stack", "list")

    @property
    def row_slots(self) -> int:
        return sum(self.q_len) + self.rest if self.packed else self.rows or max(self.q_len)

    @property
    def key_slots(self) -> int:
        return sum(self.kv_len) if self.packed and not self.paged else self.slots or max(self.kv_len)

    @property
    def q_first(self) -> tuple[int, ...]:
        return tuple(self.row_slots - self.left[0] - n for n in self.q_len) if self.left else (0,) * len(self.q_len)

    @property
    def kv_first(self) -> tuple[int, ...]:
        return tuple(self.key_slots - self.left[1] - n for n in self.kv_len) if self.left else (0,) * len(self.kv_len)

    @property
    def columns(self) -> int:
        longest = max(self.kv_len) if self.packed or self.paged else self.key_slots
        return self.prefix + longest + 2

    @property
    def fits(self) -> tuple[bool, ...]:
        return tuple(q >= 0 and k >= 0 for q, k in zip(self.q_first, self.kv_first, strict=True))

    @property
    def integers(self) -> bool:
        return bool(self.keys) or self.full or self.latent


@cache
def logical(case: FusedCase) -> Args:
    """Returns a case's numbers by item: q [N1, rows, D], stored k and v [N2, prefix + keys, D], scales, masks."""
    generator = case.generator()
    dtype, low = getattr(torch, case.dtype), -8 if case.bits == 4 else -128

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    def integers(*shape: int) -> Tensor:
        return torch.randint(low, -low, shape, generator=generator, dtype=torch.int8)

    def stored(dim: int) -> list[Tensor]:
        make = integers if case.integers else draw
        common = make(case.heads_kv, case.prefix, dim)
        return [torch.cat((common, make(case.heads_kv, length, dim)), 1) for length in case.kv_len]

    query = integers if case.full or case.latent else draw
    n: Args = {"q": [query(case.heads_q, length, case.dim) for length in case.q_len], "k": stored(case.dim)}
    n["v"] = [k[..., : case.dim_v] for k in n["k"]] if case.shares else stored(case.dim_v)
    n["q_rope"] = [draw(case.heads_q, length, case.rope) for length in case.q_len]
    n["k_rope"] = [draw(case.heads_kv, length, case.rope) for length in case.kv_len]
    n["row_scale"] = [draw(case.heads_q, length).float().abs() / 100 + 0.001 for length in case.q_len]
    for side, dim in (("k", case.dim), ("v", case.dim_v)):
        for what in ("scale", "offset"):
            n[f"{side}_{what}"] = _scales(case, side, what, dim, draw)
    rows, batch = max(case.row_slots if not case.packed else 0, *case.q_len), len(case.q_len)
    n["mask"] = torch.rand(batch, rows + 1, case.columns, generator=generator) < 0.3
    n["mask"][..., 0] = False
    for first, hidden in zip(case.kv_first, n["mask"], strict=True):
        hidden[:, case.prefix + max(first, 0)] = False
        if case.blank:
            hidden[max(case.q_first[0], 0) + 1] = True
    n["tree"] = [torch.rand(length, length, generator=generator) < 0.4 for length in case.q_len]
    n["pse"] = draw(batch if case.pse == "batch" else 1, case.heads_q, 1 if case.pse == "row" else rows, case.columns)
    n["sink"] = draw(case.heads_q)
    n["out_scale"] = torch.rand(case.heads_q * case.dim_v if case.out == "channel" else 1, generator=generator) * 40
    n["out_offset"] = torch.rand(n["out_scale"].shape, generator=generator) * 4 if case.offsets else None
    return n


def _scales(case: FusedCase, side: str, what: str, dim: int, draw: Any) -> Any:
    """Returns scales or offsets by item: [1 or N2, 1 or prefix + keys, 1 or dim]."""
    kind = case.keys if side == "k" else case.values
    heads = case.heads_kv if kind in ("channel", "head", "token_head", "pages_head") else 1
    tokens = kind in ("token", "token_head", "pages", "pages_head")

    def one(count: int) -> Tensor:
        x = draw(heads, count if tokens else 1, dim if kind == "channel" else 1)
        x = x * 4 if what == "offset" else x.abs() / (4 if case.bits == 4 else 64) + 0.01
        return x.float() if tokens else x

    if tokens:
        return [one(length) for length in case.kv_len]
    return [one(0)] * len(case.kv_len)


# ------------------------------------------------------------------------------------------------------------- the call


def _shaped(case: FusedCase, by_head: Tensor, layout: str) -> Tensor:
    """Copies [batch, heads, tokens, elements], or packed rows without the batch, to a layout."""
    moved = by_head.permute(AXES[layout])
    memory = poisoned(tuple(moved.shape), moved.dtype)
    memory.copy_(moved)
    return memory.flatten(-2) if layout in ("BSH", "SH") else memory


def rows_of(case: FusedCase, items: list[Tensor], layout: str, tokens: int, first: tuple[int, ...]) -> Tensor:
    """Returns rows of items [heads, tokens, elements] in a layout; all other rows are poison."""
    heads, _, dim = items[0].shape
    if len(AXES[layout]) == 3:
        full = poisoned((heads, tokens, dim), items[0].dtype)
        start = 0
        for rows in items:
            full[:, start : start + rows.shape[1]] = rows
            start += rows.shape[1]
        return _shaped(case, full, layout)
    full = poisoned((len(items), heads, tokens, dim), items[0].dtype)
    for b, rows in enumerate(items):
        if first[b] >= 0:
            full[b, :, first[b] : first[b] + rows.shape[1]] = rows
    return _shaped(case, full, layout)


def table_of(case: FusedCase) -> Tensor | None:
    """Returns a block table of pages in random order; unused entries are -1."""
    if not case.paged:
        return None
    count = -(-max(case.kv_len) // case.page_size) + 1
    ids = torch.randperm(len(case.kv_len) * count, generator=torch.Generator().manual_seed(3)).to(torch.int32)
    table = ids.view(len(case.kv_len), count)
    for b, length in enumerate(case.kv_len):
        table[b, -(-length // case.page_size) :] = -1
    return table


def cache_of(case: FusedCase, items: list[Tensor]) -> Any:
    """Returns keys or values [N2, tokens, elements] of all items in the form of the case's store."""
    if case.store == "stack":
        return rows_of(case, items, case.inside, case.key_slots, case.kv_first)
    if case.store == "list":
        return [rows_of(case, [rows], case.inside, rows.shape[1] + b, (0,)) for b, rows in enumerate(items)]
    table, (heads, _, dim), size = table_of(case), items[0].shape, case.page_size
    assert table is not None
    fragment = 32 // items[0].element_size() if case.store == "pieces" else dim
    pool = poisoned((len(table) * table.shape[1] + 1, heads, dim // fragment, size, fragment), items[0].dtype)
    for b, rows in enumerate(items):
        for t in range(rows.shape[1]):
            pool[table[b, t // size], :, :, t % size] = rows[:, t].unflatten(-1, (-1, fragment))
    if case.store == "pieces":
        return pool
    return pool[:, :, 0] if case.store == "heads" else pool[:, :, 0].transpose(1, 2).contiguous().flatten(2)


def _int32(stored: Any) -> Any:
    """Packs eight int4 numbers into an int32; the first number has the lowest bits."""
    if isinstance(stored, list):
        return [_int32(one) for one in stored]
    nibbles = (stored & 15).to(torch.int64).unflatten(-1, (-1, 8))
    words = (nibbles << (4 * torch.arange(8))).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _scale_tensor(case: FusedCase, kind: str, items: list[Tensor]) -> Tensor:
    if kind in ("tensor", "channel", "head"):
        return items[0].flatten() if kind != "channel" else items[0].flatten(1)
    if kind in ("pages", "pages_head"):
        pages = cache_of(replace(case, store="heads"), items)[..., 0]
        return pages if kind == "pages_head" else pages[:, 0]
    width = max(case.kv_len) + 3
    full = rows_of(case, items, "BNSD", width, (0,) * len(items))[..., 0]
    return full if kind == "token_head" else full[:, 0]


def arguments(case: FusedCase) -> Args:
    """Returns the arguments by canonical name."""
    n, table = logical(case), table_of(case)
    suffix = {name: [rows[:, case.prefix :] for rows in n[name]] for name in "kv"}
    k, v = (cache_of(case, suffix[name]) for name in "kv")
    if case.bits == 4:
        k, v = _int32(k), _int32(v)
    args: Args = {
        "query": rows_of(case, n["q"], case.inside, case.row_slots, case.q_first),
        "key": k,
        "value": k if case.shares else v,
        "num_heads": case.heads_q,
        "num_key_value_heads": case.heads_kv,
        "scale_value": 0.3,
        "input_layout": case.layout,
        "block_table": table,
        "block_size": case.page_size if case.paged else 0,
        "sparse_mode": case.mode,
        "pre_tokens": case.pre,
        "next_tokens": case.next,
        "inner_precise": case.precise,
        "softmax_lse_flag": True,
    }
    q_len, kv_len = list(case.q_len), list(case.kv_len)
    if case.packed and case.inside not in ("NSD", "SH"):
        ends = [torch.tensor(x).cumsum(0).tolist() for x in (q_len, kv_len)]
        q_len, kv_len = ends[0], kv_len if case.paged else ends[1]
    args |= {"actual_seq_lengths": q_len, "actual_seq_lengths_kv": kv_len}
    args["atten_mask"] = _mask(case, n)
    if case.pse:
        args["pse_shift"] = n["pse"]
    if case.left:
        args["query_padding_size"], args["kv_padding_size"] = (torch.tensor([pad]) for pad in case.left)
    if case.prefix:
        for name, full in (("k", "key"), ("v", "value")):
            rows = torch.cat((n[name][0][:, : case.prefix], poisoned((*n[name][0].shape[:1], 1, n[name][0].shape[2]),
                              n[name][0].dtype)), 1)  # fmt: skip
            args[f"{full}_shared_prefix"] = rows_of(case, [rows], case.inside, case.prefix + 1, (0,))
        args["actual_shared_prefix_len"] = [case.prefix]
    if case.sink:
        args["learnable_sink"] = n["sink"]
    if case.rope:
        rope = n["q_rope"]
        if case.latent:
            rope = [r / (s[..., None] * 0.05) for r, s in zip(rope, n["row_scale"], strict=True)]
            rope = [r.to(getattr(torch, case.dtype)) for r in rope]
        args["query_rope"] = rows_of(case, rope, case.inside, case.row_slots, case.q_first)
        args["key_rope"] = cache_of(case, n["k_rope"])
    return args | _quantised(case, n)


def _mask(case: FusedCase, n: Args) -> Tensor | None:
    if case.mode in (2, 3, 4):
        return torch.ones(2048, 2048, dtype=torch.bool).triu_(1)
    if case.mode == 9:
        trees = n["tree"]
        return torch.cat([t.flatten() for t in trees]) if case.packed else torch.stack(trees)
    if not case.mask and not case.blank:
        return None
    one = case.row_slots == 1 and not case.packed
    mask: Tensor = n["mask"][:, 0] if one else n["mask"]
    return mask


def _quantised(case: FusedCase, n: Args) -> Args:
    args: Args = {}
    if case.full:
        args = {"dequant_scale1": torch.tensor([0.002]), "quant_scale1": torch.tensor([case.factor])}
        args["dequant_scale2"] = torch.tensor([0.0004])
    elif case.latent:
        scale = rows_of(case, [s[..., None] for s in n["row_scale"]], "BSND" if case.inside == "BSH" else case.inside,
                        case.row_slots, case.q_first)  # fmt: skip
        args = {"dequant_scale_query": scale[..., 0], "key_antiquant_scale": torch.tensor([0.05])}
        args["value_antiquant_scale"] = torch.tensor([0.03])
        args["query_quant_mode"] = 3
    elif case.keys:
        for what in ("scale", "offset") if case.offsets else ("scale",):
            sides = [_scale_tensor(case, kind, n[f"{s}_{what}"]) for s, kind in (("k", case.keys), ("v", case.values))]
            if case.joint:
                args[f"antiquant_{what}"] = torch.stack(sides) if case.keys != "tensor" else torch.cat(sides)
            else:
                args |= {f"{side}_antiquant_{what}": t for side, t in zip(("key", "value"), sides, strict=True)}
        if case.joint:
            args["antiquant_mode"] = MODES[case.keys]
        else:
            args |= {"key_antiquant_mode": MODES[case.keys], "value_antiquant_mode": MODES[case.values]}
    if case.out:
        args["quant_scale2"] = n["out_scale"]
        if case.offsets:
            args["quant_offset2"] = n["out_offset"]
    return args


# ----------------------------------------------------------------------------------------------------------- expected


def visible_of(case: FusedCase, b: int) -> tuple[Tensor, Tensor]:
    """Returns ([rows, keys] visible, [rows] true if the band leaves a key) of an item."""
    rows, keys = case.q_len[b], case.prefix + case.kv_len[b]
    i, j = torch.arange(rows)[:, None], torch.arange(keys)
    beyond, mode = keys - rows, case.mode
    one_token = case.layout in ("BSH", "BSND", "BNSD") and case.row_slots == 1 and not case.rope
    one_token = one_token and case.dim == case.dim_v
    masked = (case.mask or case.blank) and mode in (0, 1)
    everything = torch.ones(rows, keys, dtype=torch.bool)
    if one_token:
        band = everything
    elif mode == 0 and masked and case.left is None:
        band = (j >= i - case.pre) & (j <= i + case.next)
    elif mode == 2:
        band = j <= i + 0 * everything
    elif mode == 3:
        band = j <= i + beyond
    elif mode == 4:
        band = (j >= i + beyond - case.pre) & (j <= i + beyond + case.next)
    else:
        band = everything
    visible = band
    n = logical(case)
    if masked:
        hidden = n["mask"][b, max(case.q_first[b], 0) :][:rows]
        visible = band & ~hidden[:, max(case.kv_first[b], 0) :][:, :keys]
    if mode == 9:
        visible = everything.clone()
        visible[:, beyond:] = ~n["tree"][b]
    return visible, band.any(-1)


def item(case: FusedCase, b: int) -> tuple[Tensor, Tensor]:
    """Computes (out [N1, rows, dim_v], lse [N1, rows]) of an item."""
    n, group = logical(case), case.heads_q // case.heads_kv
    q, k, v = n["q"][b].double(), *(_meaning(case, n, side, b) for side in "kv")
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q @ k.mT
    if case.full:
        scores = scores * torch.tensor(0.002).double()
    if case.latent:
        rope = n["q_rope"][b].float() / (n["row_scale"][b][..., None] * 0.05)
        rope = rope.to(getattr(torch, case.dtype)).double()
        scores = scores + rope @ n["k_rope"][b].double().repeat_interleave(group, 0).mT
        scores = scores * (n["row_scale"][b] * torch.tensor(0.05)).double()[..., None]
    elif case.rope:
        scores = scores + n["q_rope"][b].double() @ n["k_rope"][b].double().repeat_interleave(group, 0).mT
    scores = 0.3 * scores
    rows, keys = scores.shape[1:]
    if case.pse:
        first = 0 if case.pse == "row" else max(case.q_first[b], 0)
        pse = n["pse"][b if case.pse == "batch" else 0][:, first:][:, :rows, max(case.kv_first[b], 0) :][..., :keys]
        scores = scores + pse.double()
    visible, in_band = visible_of(case, b)
    scores = scores.masked_fill(~visible, -math.inf)
    sink = n["sink"].double()[:, None, None].expand(-1, rows, 1) if case.sink else scores[..., :0]
    joined = torch.cat((scores, sink), -1)
    empty = ~visible.any(-1) if keys else torch.ones(rows, dtype=torch.bool)
    peak = joined.amax(-1, keepdim=True) if joined.shape[-1] else torch.full((case.heads_q, rows, 1), -math.inf)
    peak = peak.masked_fill(empty[:, None], 0)
    weights, total = (scores - peak).exp(), (joined - peak).exp().sum(-1, keepdim=True)
    mean = empty & in_band & (keys > 0) & (not case.precise & 2) & (not case.sink)
    weights = torch.where(mean[:, None], torch.ones_like(weights), weights)
    if case.full:
        weights = (case.factor * weights).round().clamp(-128, 127)
    total = torch.where(mean[:, None], keys, total)
    out = (weights @ v) / torch.where(empty[:, None] & ~mean[:, None], torch.ones_like(total), total)
    out = out.masked_fill((empty & ~mean)[:, None], 0)
    lse = (peak + total.log())[..., 0].masked_fill(empty, math.inf).masked_fill(mean, -FLT_MAX)
    return _narrow(case, n, out) if case.out else out, lse


def _meaning(case: FusedCase, n: Args, side: str, b: int) -> Tensor:
    stored: Tensor = n[side][b].double()
    if case.full:
        return stored if side == "k" else stored * torch.tensor(0.0004).double()
    if case.latent:
        return stored if side == "k" else stored * torch.tensor(0.03).double()
    if not case.keys:
        return stored
    offset = n[f"{side}_offset"][b].double() if case.offsets else 0
    return (stored + offset) * n[f"{side}_scale"][b].double()


def _narrow(case: FusedCase, n: Args, out: Tensor) -> Tensor:
    def channels(t: Tensor | None) -> Any:
        if t is None:
            return 0
        return t.double().view(case.heads_q, 1, -1) if case.out == "channel" else t.double()

    value = out * channels(n["out_scale"]) + channels(n["out_offset"])
    full = value.round() if case.out == "tensor" else value.sign() * (value.abs() + 0.5).floor()
    return full.clamp(-128, 127)


def answer(case: FusedCase) -> tuple[Tensor, Tensor]:
    """Returns the expected (attention_out, softmax_lse) in their layouts; rows of no item are 0 and +inf."""
    results = [item(case, b) for b in range(len(case.q_len))]
    packed = len(AXES[case.outside]) == 3
    lead = (case.heads_q,) if packed else (len(results), case.heads_q)
    out = torch.zeros(*lead, case.row_slots, case.dim_v, dtype=torch.float64)
    lse = torch.full((*lead, case.row_slots), math.inf, dtype=torch.float64)
    start = 0
    for b, (rows, logarithm) in enumerate(results):
        first = start if packed else case.q_first[b]
        where = slice(first, first + rows.shape[1])
        start += rows.shape[1]
        if case.fits[b]:
            (out if packed else out[b])[:, where] = rows
            (lse if packed else lse[b])[:, where] = logarithm
    shaped = out.permute(AXES[case.outside])
    shaped = shaped.flatten(-2) if case.outside in ("BSH", "SH") else shaped
    if case.inside == "NSD":
        return shaped, lse[None, ..., None]
    return shaped, (lse.mT if packed else lse)[..., None]
