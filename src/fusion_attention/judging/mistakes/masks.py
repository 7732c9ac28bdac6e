"""Mistakes of kernels in the keys that a query sees: masks, bands, windows, prefixes, and their edges in tiles."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from fusion_attention.ir.mask import INFINITE
from fusion_attention.ir.memory_views import PagedView
from fusion_attention.ir.problem import Extents
from fusion_attention.judging.editable_call import Block, Setting
from fusion_attention.judging.mistakes.kinds import (
    Case,
    Mistake,
    Try,
    finite,
    moved,
    opened,
    same_band,
    unmasked,
    without_matrix,
)

_LOOKS = 64  # number of rows, or of keys, at which a candidate is compared with the wrong output
TILES = (512, 128, 256, 64, 32, 16, 1024, 2048)


def _bands(s: Setting) -> bool:
    e = s.extents
    return bool(finite(e.lo).any() or finite(e.hi).any())


def _other(case: Case, detail: str, changed: Setting) -> Iterator[Try]:
    """Yields the variant `changed` of a call, described by `detail`, if its mask's band shows other keys."""
    if not same_band(case.setting, changed):
        yield Try(detail, changed)


def _distance(s: Setting) -> np.ndarray:
    result: np.ndarray = s.extents.kv_len - s.extents.q_len
    return result


def causal_alignment(case: Case) -> Iterator[Try]:
    s, e, d = case.setting, case.setting.extents, _distance(case.setting)
    for by, corner in ((-d, "upper left"), (d, "lower right")):
        yield from _other(case, f"from the {corner} corner", s.of_extents(lo=moved(e.lo, by), hi=moved(e.hi, by)))


def mask_ignored(case: Case) -> Iterator[Try]:
    s = case.setting
    blocks = s.problem.has_blocked or s.problem.has_blocked_tiles
    if blocks:
        yield Try("the mask's elements", without_matrix(s))
    if _bands(s):
        yield Try("the sparse mode or band", opened(s))
        if blocks:
            yield Try("both the mask and the band", unmasked(s))


def band_uncalled(case: Case) -> Iterator[Try]:
    s, d = case.setting, _distance(case.setting)
    if not finite(s.extents.hi).any():
        corners = [(d, "lower right"), (0 * d, "upper left")] if d.any() else [(d, "lower right")]
        for by, corner in corners:
            yield from _other(case, f"to the {corner} corner", s.of_extents(hi=by + 1))


def mask_polarity(case: Case) -> Iterator[Try]:
    s = case.setting
    if s.problem.has_blocked and s.operands.blocked is not None:
        keep = s.operands.blocked.keep
        flat = keep.as_strided((keep.untyped_storage().nbytes() // keep.element_size(),), (1,), 0)
        other = (flat == 0).to(torch.uint8).as_strided(keep.shape, keep.stride(), keep.storage_offset())
        yield Try("the mask's elements", s.of_operands(blocked=replace(s.operands.blocked, keep=other)))
    if _bands(s) and not s.problem.select_count:

        def complement(x: Block) -> Block:
            first, end = s.extents.row_interval(x.b, np.arange(x.rows.start, x.rows.stop))
            low, high = (torch.from_numpy(edge)[:, None] for edge in (first, end))
            inside = (x.positions >= low) & (x.positions < high)
            return replace(x, visible=x.visible & ~inside, in_band=~inside.all(-1))

        yield Try("the sparse mode or band", opened(s).changed(complement))


def window_by_one(case: Case) -> Iterator[Try]:
    s, e = case.setting, case.setting.extents
    yield from _other(case, "the diagonal itself is not visible", s.of_extents(hi=moved(e.hi, -1)))
    yield from _other(case, "one key after the right edge is visible", s.of_extents(hi=moved(e.hi, 1)))
    yield from _other(case, "one key before the left edge is visible", s.of_extents(lo=moved(e.lo, -1)))
    yield from _other(case, "the first key of the window is not visible", s.of_extents(lo=moved(e.lo, 1)))
    right = ("one key after the right edge is visible", 0, 1)
    left = ("the first key of the window is not visible", 1, 0)
    yield from _in_tiles(case, *[right] * bool(finite(e.hi).any()), *[left] * bool(finite(e.lo).any()))


@dataclass(frozen=True)
class _Tiled:
    """The mask of a wrong kernel that skips tiles of `rows` queries x `keys` keys without a visible pair, and applies a
    band with moved edges in the other tiles."""

    extents: Extents
    rows: int = 1
    keys: int = 1
    # left, right: number of keys by which an edge is moved in tiles that it crosses; None: it is not applied there.
    left: int | None = 0
    right: int | None = 0

    def visible(self, b: int, rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Returns bool [rows, keys], true for the pairs of the given queries and keys of sequence b that a kernel with
        this mask sees."""
        count, length = int(self.extents.q_len[b]), int(self.extents.kv_len[b])
        edges = self.extents.row_interval(b, np.arange(count))
        some = edges[0] < edges[1]
        tops, tile = np.arange(0, count, self.rows), keys // self.keys * self.keys
        first, last, least, most = (
            operation.reduceat(np.where(some, edge, unseen), tops)[rows // self.rows, None]
            for operation, edge, unseen in (
                (np.maximum, edges[0], 0), (np.minimum, edges[1], length),  # all rows of a tile see the keys between
                (np.minimum, edges[0], length), (np.maximum, edges[1], 0),  # one does
            )
        )  # fmt: skip
        low, high = (edge[rows, None] for edge in edges)
        result: np.ndarray = (tile < most) & (tile + self.keys > least)
        full = (tile >= first) & (tile + self.keys <= last)
        if self.left is not None:
            result = result & (full | (keys >= low + self.left))
        if self.right is not None:
            result = result & (full | (keys < high + self.right))
        return result

    def __call__(self, x: Block) -> Block:
        keys = np.arange(x.keys.start, x.keys.stop)
        band = torch.from_numpy(self.visible(x.b, np.arange(x.rows.start, x.rows.stop), keys))
        return replace(x, visible=x.visible & band, in_band=band.any(-1))

    def explains(self, case: Case) -> bool:
        """True if the visible keys of this mask and of the call's band differ in most wrong rows of the outputs and in
        few correct ones (rows of gradients of keys are keys). False if the tiles hide no pair."""
        band, hides = _Tiled(self.extents), False
        for o in case.outputs:
            for b, wrong in enumerate(case.wrong.get(o.name, ())):
                marks = wrong.any(0)
                if o.kind == "max" or not marks.any():  # a maximum is often equal among other keys
                    continue
                bad, good = (t[:: len(t) // _LOOKS + 1] for t in (marks.nonzero()[:, 0], (~marks).nonzero()[:, 0]))
                at, every = torch.cat((bad, good)).numpy(), np.arange(self.extents.q_len[b])
                pairs = (every, at) if o.by_keys else (at, np.arange(self.extents.kv_len[b]))
                visible = self.visible(b, *pairs)
                hides |= not visible.all()
                changed = (visible != band.visible(b, *pairs)).any(int(not o.by_keys))
                if changed[: len(bad)].sum() < 0.9 * len(bad) or changed[len(bad) :].sum() > 0.5 * len(good):
                    return False
        return hides


def _in_tiles(case: Case, *edges: tuple[str, int | None, int | None]) -> Iterator[Try]:
    """Yields a variant of a call for each pair of tile sizes and each (description, left, right) of `edges`, in which a
    kernel moves the band's edges in tiles by left and right keys, or omits them (None)."""
    s = case.setting
    if s.problem.select_count or s.problem.compressed_ratio or s.extents.prefix.any():
        return
    for rows in TILES[:6]:
        for keys in TILES[:6]:
            for detail, left, right in edges:
                change = _Tiled(s.extents, rows, keys, left, right)
                if change.explains(case):
                    yield Try(f"{detail}, tiles of {rows} rows and {keys} keys", opened(s).changed(change))


def window_ignored(case: Case) -> Iterator[Try]:
    s, e = case.setting, case.setting.extents
    if finite(e.lo).any() and finite(e.hi).any():
        yield from _other(case, "the left edge", s.of_extents(lo=np.full_like(e.lo, -INFINITE)))
        yield from _other(case, "the right edge", s.of_extents(hi=np.full_like(e.hi, INFINITE)))


def window_mirrored(case: Case) -> Iterator[Try]:
    s, e = case.setting, case.setting.extents
    if finite(e.lo).all() and finite(e.hi).all():
        for origin in (np.zeros_like(e.lo), _distance(s)):
            swapped = s.of_extents(lo=1 - e.hi + 2 * origin, hi=1 - e.lo + 2 * origin)
            yield from _other(case, "pre_tokens and next_tokens", swapped)


def prefix_ignored(case: Case) -> Iterator[Try]:
    without = case.setting.of_extents(prefix=np.zeros_like(case.setting.extents.prefix))
    yield from _other(case, "causal alone", without)


def tile_skipped(case: Case) -> Iterator[Try]:
    s, lengths = case.setting, case.setting.extents.kv_len
    words: dict[tuple[int, ...], list[str]] = {}  # by each sequence's first omitted key
    for tile in TILES:
        if int(lengths.max(initial=0)) > tile:
            words.setdefault(tuple(np.minimum(lengths, tile).tolist()), []).append(f"from key {tile} on")
    for tile in TILES:
        if int(lengths.max(initial=0)) > tile and (lengths % tile).any():
            named = words.setdefault(tuple((lengths // tile * tile).tolist()), [])
            named.append(f"{'or' if 'partial' in ''.join(named) else 'the last, partial tile of'} {tile}")
    for ends, named in words.items():

        def before(x: Block, ends: tuple[int, ...] = ends) -> Block:
            return replace(x, visible=x.visible & (x.positions < ends[x.b]))

        yield Try(" ".join(named).replace(" the last", ", the last"), s.changed(before))


def mask_ends(case: Case) -> Iterator[Try]:
    s = case.setting
    if not (s.problem.has_blocked or _bands(s)):
        return
    longest = int(s.extents.kv_len.max(initial=0))
    everything = unmasked(s)
    for tile in TILES:
        if longest > tile:

            def from_tile(x: Block, tile: int = tile) -> Block:
                masked = s.block(x.b, x.heads, x.rows, x.keys)
                return replace(x, visible=masked.visible | (x.positions >= tile), in_band=torch.ones_like(x.in_band))

            yield Try(f"from key {tile} on", everything.changed(from_tile))


def sequences_mixed(case: Case) -> Iterator[Try]:
    s, e, o = case.setting, case.setting.extents, case.setting.operands
    if case.layout not in ("TND", "NTD") or len(e) < 2 or isinstance(o.k, PagedView) or s.problem.select_count:
        return
    if s.problem.bias != "none" or s.problem.has_blocked or s.problem.dropout != "none":
        return
    starts = e.kv_start

    def full_memory(view: object) -> object:
        return replace(view, address=view.address - starts * view.stride_token)  # type: ignore[type-var, attr-defined]

    memory = {n: full_memory(getattr(o, n)) for n in ("k", "v", "k_rope") if getattr(o, n) is not None}
    total = np.full_like(e.kv_len, int(e.kv_len.sum()))
    joined = s.of_operands(**memory)
    banded = joined.of_extents(kv_len=total, lo=moved(e.lo, starts), hi=moved(e.hi, starts))
    yield Try("all keys of the batch within the band", banded)
    if _bands(s):
        yield Try("all keys of the batch", opened(joined.of_extents(kv_len=total)))


def empty_rows(case: Case) -> Iterator[Try]:
    s = case.setting
    forms = {"zero": ("mean", "the mean of V, not zero"), "mean": ("zero", "zero, not the mean of V")}
    form, detail = forms.get(s.problem.empty_rows, ("zero", "zero, not the mean of V"))
    if s.problem.has_blocked or s.problem.bias != "none" or _bands(s):
        yield Try(detail, s.of_problem(empty_rows=form))


def edge_tiles(case: Case) -> Iterator[Try]:
    e = case.setting.extents
    right, left = bool(finite(e.hi).any()), bool(finite(e.lo).any())
    edges = [("the right edge", 0, None)] * right + [("the left edge", None, 0)] * left
    yield from _in_tiles(case, *edges, *([("both edges", None, None)] if right and left else []))


MISTAKES = (
    Mistake("causal-alignment", "The diagonal of the band starts in the wrong corner of the matrix.",
            "sparse_mode 2 counts from the upper left corner, 3 and 4 to the lower right one; they differ where the "
            "numbers of queries and keys do.", causal_alignment),
    Mistake("mask-ignored", "Keys that the call's mask removes are visible.",
            "Without an atten_mask the training operators ignore sparse_mode; in inference look at the mask's shape.",
            mask_ignored),
    Mistake("causal-uncalled", "Keys after the diagonal are removed, but the call is not causal.",
            "Look for a default of is_causal or sparse_mode.", band_uncalled),
    Mistake("mask-polarity", "The mask is inverted: only the keys that it removes are visible.",
            "True removes a key in CANN; in torch's SDPA True keeps it: pass ~mask.", mask_polarity),
    Mistake("window-off-by-one", "An edge of the band is one key off.",
            "pre_tokens counts the keys before the diagonal, without the diagonal's key.", window_by_one),
    Mistake("window-ignored", "Only one edge of the window is applied.",
            "Mode 4 needs pre_tokens and next_tokens; modes 2 and 3 ignore both.", window_ignored),
    Mistake("window-mirrored", "The two sides of the window are exchanged.",
            "pre_tokens is the number of keys to the left of the diagonal, next_tokens to the right.", window_mirrored),
    Mistake("prefix-ignored", "The prefix, which all rows see, is masked like other keys.",
            "Modes 5 and 6 take one prefix per sequence.", prefix_ignored),
    Mistake("tile-skipped", "Keys after the edge of a tile are omitted.",
            "Look at the loop over tiles of keys: its end, and its last, partial tile.", tile_skipped),
    Mistake("mask-ends-early", "After the edge of a tile the mask is not read: all keys are visible.",
            "Look at the addresses of the mask's tiles, above all for masks with one row for all rows.", mask_ends),
    Mistake("sequences-mixed", "Rows of a packed batch see the keys of other sequences.",
            "actual_seq_qlen and actual_seq_kvlen are cumulative ends, one per sequence.", sequences_mixed),
    Mistake("empty-rows", "Rows that see no key return the result of another mode.",
            "inner_precise 2 returns zeros; a mask that removes all keys returns the mean of V.", empty_rows),
    Mistake("edge-tiles-unmasked", "An edge of the band is not applied inside the tiles that it crosses.",
            "A tile's first and last row and key tell whether it is skipped or needs no mask; other tiles need a "
            "comparison per key.", edge_tiles),
)  # fmt: skip
