"""Case: a test call of training attention in CANN's terms, whose tensors are views into memory filled with NaN.

The visible keys of rows are computed here from CANN's documentation, without the code that is tested.
"""

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
import torch

Tensor = torch.Tensor
Results = dict[str, Tensor]
UNLIMITED = (1 << 31) - 1
SEED, OFFSET = 0x5DEECE66D, 11


class Named:
    """Base class of dataclasses that describe test calls; their id lists the fields that differ from the defaults.

    Attributes:
        fresh: a number other than 0 changes the random tensors of all test calls.
    """

    fresh: ClassVar[int] = 0

    @property
    def id(self) -> str:
        """The fields that differ from their defaults, as text "name=value,...", or "default"."""
        values = ((f.name, getattr(self, f.name), f.default) for f in fields(self))  # type: ignore[arg-type]
        changed = (f"{name}={str(value).replace(' ', '')}" for name, value, default in values if value != default)
        return ",".join(changed) or "default"

    def generator(self) -> torch.Generator:
        """Returns a random generator whose seed is made from the test call's id."""
        return torch.Generator().manual_seed(zlib.crc32(f"{self.id}{self.fresh or ''}".encode()))


class Sequences(Named):
    """Base class of descriptions of test calls whose query rows and keys are sequences of tokens."""

    layout: str
    q_len: tuple[int, ...]
    kv_len: tuple[int, ...]
    q_rest: int
    kv_rest: int

    @property
    def packed(self) -> bool:
        """True if query rows are concatenated: the layout is TND."""
        return self.layout == "TND"

    def lengths(self, side: str) -> tuple[int, ...]:
        """Returns the number of tokens of each sequence: q_len for side "q", kv_len for side "kv"."""
        return self.q_len if side == "q" else self.kv_len

    def tokens(self, side: str) -> int:
        """Returns the size of a tensor's axis of tokens, for queries (side "q") or keys ("kv"): T if packed, S if
        padded (3 for an empty batch), q_rest or kv_rest included."""
        rest, lengths = (self.q_rest if side == "q" else self.kv_rest), self.lengths(side)
        return rest + (sum(lengths) if self.packed else max(lengths, default=3))


@dataclass(frozen=True)
class Case(Sequences):
    """A test call of training attention, forward and backward, in CANN's terms.

    Args:
        layout: layout of query, key and value: "BSND", "BSH", "SBH", "BNSD" or "TND".
        dtype: dtype of the query, and of all tensors that must have the query's dtype.
        q_len, kv_len: tokens of every sequence. Only attention() supports padded layouts with different lengths, or
            with q_rest or kv_rest.
        q_rest, kv_rest: number of tokens after the last sequence (TND) or after the longest one (padded).
        disabled: number of trailing zeros in the cumulative lengths (TND).
        heads_q, heads_kv, dim_qk, dim_v, dim_rope, scale: query and key heads, elements per head of queries, values and
            rope tensors, and factor on q . k.
        sparse_mode, pre, next, prefix, inner_precise, softmax_layout, keep_prob, pse_type: arguments of
            npu_fusion_attention_v2.
        mask: "none"; "compressed"; random masks: "matrix" [S1, S2], "ones" [1, 1, S1, S2], "batch" [B, 1, S1, S2],
            "head" [B, N1, S1, S2], "tokens" [T1, T2]; "tiles" [B, N1, S1, S2], which removes all, some or none of the
            scores of each 128 x 128 tile (attention() only).
        mask_dtype: "bool" or "uint8" (255 removes a key).
        blank: True: a random mask removes every key in some rows; False: it never removes the first key of the band.
        pse: "none"; "full" [B, N1, S1, S2], "row" [B, N1, 1, S2], "table" [B, N1, 1024, S2], "slopes" [B, N1], each
            also as "shared_..." with 1 for B; "slopes_flat" [N1]; packed "blocks" and "row_blocks".
        starts: (q_start_idx, kv_start_idx).
        dropout: "none", "bits" (a given mask) or "philox" (drawn from a seed).
        sink: True: one more logit per head is in the softmax's denominator.
        softcap: scores become softcap * tanh(scores / softcap); 0: unchanged (attention() only).
    """

    layout: str = "BSND"
    dtype: str = "float32"
    q_len: tuple[int, ...] = (5, 5)
    kv_len: tuple[int, ...] = (7, 7)
    q_rest: int = 0
    kv_rest: int = 0
    disabled: int = 0
    heads_q: int = 4
    heads_kv: int = 2
    dim_qk: int = 8
    dim_v: int = 8
    dim_rope: int = 0
    scale: float = 0.3
    sparse_mode: int = 0
    mask: str = "none"
    mask_dtype: str = "bool"
    blank: bool = False
    pre: int = UNLIMITED
    next: int = UNLIMITED
    prefix: tuple[int, ...] | None = None
    pse: str = "none"
    pse_type: int = 1
    starts: tuple[int, int] | None = None
    dropout: str = "none"
    keep_prob: float = 1.0
    sink: bool = False
    inner_precise: int = 0
    softmax_layout: str = ""
    softcap: float = 0.0

    @property
    def npu(self) -> bool:
        """True if torch_npu's functions can make this call: they lack masks of tiles, a softcap, and padded sequences
        of unequal lengths or followed by further rows."""
        ragged = len({*self.q_len}) > 1 or len({*self.kv_len}) > 1 or self.q_rest > 0 or self.kv_rest > 0
        ours_only = self.mask == "tiles" or self.softcap != 0
        return not ours_only and (self.packed or not ragged)

    def longest(self, side: str) -> int:
        """Returns the size of the axis of query rows (side "q": S1) or keys ("kv": S2) in masks and biases."""
        return max(self.lengths(side), default=0) if self.packed else self.tokens(side)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns a tensor filled with NaN (integers: 255): a view with gaps into a larger buffer of NaN."""
    fill: float = math.nan if dtype.is_floating_point else True if dtype == torch.bool else 255
    if len(shape) == 1:
        return torch.full((2 * shape[0] + 3,), fill, dtype=dtype)[3::2][: shape[0]]
    *leading, last = shape
    buffer = torch.full([*(n + 2 for n in reversed(leading)), last + 3], fill, dtype=dtype)
    inner = buffer[tuple(slice(1, 1 + n) for n in (*reversed(leading), last))]
    return inner.permute(*reversed(range(len(leading))), len(leading))


def hostile(values: Tensor) -> Tensor:
    """Returns a copy of `values` as a strided view into memory filled with NaN."""
    return poisoned(tuple(values.shape), values.dtype).copy_(values)


def part(case: Case, tensor: Tensor, side: str, heads: int, b: int) -> Tensor:
    """Returns sequence b of a tensor in the layout of `case`, as a view [heads, tokens, dim]; side: "q" or "kv"."""
    length = case.lengths(side)[b]
    if case.layout in ("BSH", "SBH"):
        tensor = tensor.unflatten(-1, (heads, tensor.shape[-1] // heads))
    if case.packed:
        start = sum(case.lengths(side)[:b])
        return tensor[start : start + length].transpose(0, 1)
    one = tensor[:, b] if case.layout == "SBH" else tensor[b]
    return (one if case.layout == "BNSD" else one.transpose(0, 1))[:, :length]


def stats_part(case: Case, tensor: Tensor, b: int) -> Tensor:
    """Returns sequence b of softmax statistics, contiguous [.., 8], of a test call, as a view [heads_q, rows, 8]."""
    rows, heads = case.q_len[b], case.heads_q
    if not case.packed:
        return tensor[b, :, :rows]
    start = sum(case.q_len[:b])
    if case.softmax_layout == "TND":
        return tensor[start : start + rows].transpose(0, 1)
    return tensor.view(-1, 8)[heads * start : heads * (start + rows)].view(heads, rows, 8)


def rows_shape(case: Case, side: str, heads: int, dim: int) -> tuple[int, ...]:
    """Returns the shape of a tensor in a test call's layout, with heads * dim elements per token; side: "q" or "kv"."""
    b, s = len(case.q_len), case.tokens(side)
    return {
        "BSND": (b, s, heads, dim),
        "BNSD": (b, heads, s, dim),
        "BSH": (b, s, heads * dim),
        "SBH": (s, b, heads * dim),
        "TND": (s, heads, dim),
    }[case.layout]


def arguments(case: Case) -> dict[str, Any]:
    """Returns {name: argument} of npu_fusion_attention_v2 for a test call, and dy: strided views in memory of NaN."""
    generator = case.generator()
    dtype: torch.dtype = getattr(torch, case.dtype)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def rows(side: str, dim: int) -> Tensor:
        heads = case.heads_q if side == "q" else case.heads_kv
        tensor = poisoned(rows_shape(case, side, heads, dim), dtype)
        for b in range(len(case.q_len)):
            place = part(case, tensor, side, heads, b)
            place.copy_(draw(*place.shape))
        return tensor

    ends = {side: np.cumsum(case.lengths(side)).tolist() + [0] * case.disabled for side in ("q", "kv")}
    args: dict[str, Any] = {
        "query": rows("q", case.dim_qk),
        "key": rows("kv", case.dim_qk),
        "value": rows("kv", case.dim_v),
        "dy": rows("q", case.dim_v),
        "head_num": case.heads_q,
        "input_layout": case.layout,
        "query_rope": rows("q", case.dim_rope) if case.dim_rope else None,
        "key_rope": rows("kv", case.dim_rope) if case.dim_rope else None,
        "actual_seq_qlen": ends["q"] if case.packed else None,
        "actual_seq_kvlen": ends["kv"] if case.packed else None,
        "pse": _pse(case, draw, dtype),
        "atten_mask": _mask(case, generator),
        "drop_mask": _drop_mask(case, generator) if case.dropout == "bits" else None,
        "sink": hostile(draw(case.heads_q)) if case.sink else None,
        "prefix": None if case.prefix is None else [*case.prefix] + [0] * case.disabled,
        "q_start_idx": None if case.starts is None else [case.starts[0]],
        "kv_start_idx": None if case.starts is None else [case.starts[1]],
        **({"seed": SEED, "offset": OFFSET} if case.dropout == "philox" else {}),
        "pre_tokens": case.pre,
        "next_tokens": case.next,
    }
    same = ("scale", "sparse_mode", "keep_prob", "pse_type", "inner_precise", "softmax_layout")
    return args | {name: getattr(case, name) for name in same}


def _pse(case: Case, draw: Callable[..., Tensor], dtype: torch.dtype) -> Tensor | None:
    """Returns a random additive bias in the shape that case.pse names, or None; draw: random numbers of a shape."""
    batch, heads, s1, s2 = len(case.q_len) + case.disabled, case.heads_q, case.longest("q"), case.longest("kv")
    kind = case.pse.removeprefix("shared_")
    batch = 1 if kind != case.pse else batch
    if kind == "none":
        return None
    if kind.startswith("slopes"):
        return hostile(draw(*([batch, heads] if kind == "slopes" else [heads])).abs())
    if kind.endswith("blocks"):
        rows = case.q_len if kind == "blocks" else (1,) * len(case.kv_len)
        return hostile(draw(heads * int(np.dot(rows, case.kv_len))).to(dtype))
    return hostile(draw(batch, heads, {"full": s1, "row": 1, "table": 1024}[kind], s2).to(dtype))


def _mask(case: Case, generator: torch.Generator) -> Tensor | None:
    """Returns a random attention mask in the shape that case.mask names, true or 255 where it hides a key; or None."""
    batch, heads, s1, s2 = len(case.q_len) + case.disabled, case.heads_q, case.longest("q"), case.longest("kv")
    dtype = torch.uint8 if case.mask_dtype == "uint8" else torch.bool
    if case.mask == "none":
        return None
    if case.mask == "compressed":  # all ones, to test that the content has no effect
        return torch.ones(1, 1, dtype=dtype).expand(3072 if case.sparse_mode == 6 else 2048, 2048)
    shape = {"matrix": (s1, s2), "ones": (1, 1, s1, s2), "batch": (batch, 1, s1, s2), "head": (batch, heads, s1, s2)}
    shape["tokens"], shape["tiles"] = (case.tokens("q"), case.tokens("kv")), shape["head"]
    removed = torch.rand(shape[case.mask], generator=generator) < 0.3
    if case.mask == "tiles":
        kind = torch.randint(3, (batch, heads, -(-s1 // 128), -(-s2 // 128)), generator=generator)
        kind = kind.repeat_interleave(128, -1).repeat_interleave(128, -2)[..., :s1, :s2]
        removed = (removed | (kind == 0)) & (kind != 1)
    for b, rows in enumerate(case.q_len):
        place = _mask_part(case, removed, b)
        if not case.blank and case.kv_len[b]:
            first = in_band(case, b).int().argmax(-1)
            place[..., torch.arange(rows), first] = False
    if case.blank:
        removed[..., ::2, :] = True
    mask = poisoned(tuple(removed.shape), dtype)
    return mask.copy_(removed.byte() * 255)


def _mask_part(case: Case, mask: Tensor, b: int) -> Tensor:
    """Returns sequence b of a test call's random attention mask as a view [1 or heads_q, rows, keys]."""
    rows, keys = case.q_len[b], case.kv_len[b]
    if case.mask == "tokens":
        i, j = sum(case.q_len[:b]), sum(case.kv_len[:b])
        return mask[None, i : i + rows, j : j + keys]
    mask = mask if mask.dim() == 4 else mask[None, None]
    return mask[b if mask.shape[0] > 1 else 0, :, :rows, :keys]


def drop_shape(case: Case, b: int) -> tuple[int, int, int]:
    """Returns (heads, rows, keys): the shape of the dropout mask of sequence b of a test call."""
    rows, keys = (case.q_len[b], case.kv_len[b]) if case.packed else (case.tokens("q"), case.tokens("kv"))
    return case.heads_q, rows, keys


def _drop_mask(case: Case, generator: torch.Generator) -> Tensor:
    """Returns a test call's random dropout mask, uint8 [bytes], a bit per score, least significant first, some more."""
    count = sum(math.prod(drop_shape(case, b)) for b in range(len(case.q_len)))
    keep = torch.rand(count + 13, generator=generator) < case.keep_prob
    return hostile(torch.from_numpy(np.packbits(keep.numpy(), bitorder="little")))


# ------------------------------------------------------------------------------------------------------- visible keys


def prefix_fits(case: Case) -> bool:
    """True if every prefix (number of visible leading keys) is in the range of sparse mode 5; else CANN ignores it."""
    prefix = case.prefix or ()
    bounds = zip(prefix, case.q_len, case.kv_len, strict=False)
    return len(prefix) == len(case.q_len) and all(max(0, keys - rows) <= n <= keys for n, rows, keys in bounds)


def in_band(case: Case, b: int) -> Tensor:
    """Returns bool [rows, keys] of sequence b of a test call: true for keys that its sparse mode makes visible."""
    rows, keys = case.q_len[b], case.kv_len[b]
    i, j = torch.arange(rows)[:, None], torch.arange(keys)
    d, mode, everything = keys - rows, case.sparse_mode, torch.ones(rows, keys, dtype=torch.bool)
    pre, nxt = (n if n < UNLIMITED else 1 << 40 for n in (case.pre, case.next))
    used = [s for s, length in enumerate(case.q_len) if length]
    if case.mask == "none" or mode == 1 or (mode == 5 and not prefix_fits(case)):
        return everything
    if mode in (0, 4):
        a = d if mode == 4 else 0
        return (j >= i + a - pre) & (j <= i + a + nxt)
    if mode in (5, 6):
        assert case.prefix is not None
        return (j <= i + d) | (j < case.prefix[b])
    if (mode == 7 and b == used[-1:][0]) or (mode == 8 and b == used[:1][0]) if used else False:
        return j <= i + d + nxt
    return j <= (i if mode in (2, 8) else i + d)


def seen(case: Case, args: Mapping[str, Any], b: int) -> Tensor:
    """Returns bool [heads_q, rows, keys] of sequence b of a test call: true for visible keys; args: arguments()."""
    visible = in_band(case, b).expand(case.heads_q, -1, -1)
    matrix = case.mask not in ("none", "compressed") and args["atten_mask"] is not None
    return visible & (_mask_part(case, args["atten_mask"], b) == 0) if matrix else visible
