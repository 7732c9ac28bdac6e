"""Mistakes of kernels in the addresses of heads and sequences, and in sequence lengths."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from fusion_attention.ir.memory_views import PagedView, RowView
from fusion_attention.judging.editable_call import Setting
from fusion_attention.judging.mistakes.kinds import SIZES, Case, Mistake, Try, finite, layouts

Tensor = torch.Tensor


def group_order(case: Case) -> Iterator[Try]:
    s, p = case.setting, case.setting.problem
    if p.heads_kv > 1 and p.group > 1:
        heads = np.arange(p.heads_q)
        if s.grads is not None:
            order = heads.reshape(p.group, p.heads_kv).T.reshape(-1)
            yield Try("key head n sums over query heads h with h % N2 = n", s.changed(q_heads=order))
        yield Try("head h reads key head h % N2, not h // (N1 / N2)", s.changed(kv_heads=heads % p.heads_kv))
        yield Try("every head reads the first key head", s.changed(kv_heads=0 * heads))
        yield Try("in the other direction", s.changed(kv_heads=(heads // p.group)[::-1].copy()))


def head_offset(case: Case) -> Iterator[Try]:
    s, p = case.setting, case.setting.problem
    if p.heads_kv == 1:
        return
    right = np.arange(p.heads_q) // p.group
    for word, by in (("next", 1), ("previous", -1)):
        other = (right + by) % p.heads_kv
        yield Try(f"values of the {word} head", s.changed(v_heads=other))
        yield Try(f"keys of the {word} head", s.changed(kv_heads=other, v_heads=right))
        yield Try(f"keys and values of the {word} head", s.changed(kv_heads=other))


def sequence_offset(case: Case) -> Iterator[Try]:
    s, o = case.setting, case.setting.operands
    if s.grads is not None or not isinstance(o.k, RowView) or not isinstance(o.v, RowView):
        return

    def moved(view: RowView, sequences: int, tokens: int) -> RowView:
        address = np.roll(view.address, -sequences)
        return replace(view, address=address + tokens * view.stride_token)

    equal = len(s.extents) > 1 and bool((s.extents.kv_len == s.extents.kv_len[0]).all())
    ways = [("next sequence", 1, 0), ("previous sequence", -1, 0)] if equal else []
    ways += [("one token late", 0, 1), ("one token early", 0, -1)]
    for detail, sequences, tokens in ways:
        k, v = (moved(view, sequences, tokens) for view in (o.k, o.v))
        yield Try(f"values: {detail}", s.of_operands(v=v))
        yield Try(f"keys: {detail}", s.of_operands(k=k))
        yield Try(f"keys and values: {detail}", s.of_operands(k=k, v=v))


def input_layout(case: Case) -> Iterator[Try]:
    s, o, p = case.setting, case.setting.operands, case.setting.problem
    for names in (("q",), ("k",), ("v",), ("k", "v"), ("q", "k", "v")):
        views: dict[str, dict[str, RowView]] = {}  # by layout
        for name in names:
            view, of_keys = getattr(o, name), name != "q"
            if isinstance(view, RowView) and view.keep[0].is_contiguous():
                for layout, other in layouts(case, view, p.heads_kv if of_keys else p.heads_q, of_keys=of_keys):
                    views.setdefault(layout, {})[name] = other
        for layout, changed in views.items():
            if changed.keys() == {*names}:
                yield Try(f"{', '.join(names)} as {layout} has them", s.of_operands(**changed))


def values_confused(case: Case) -> Iterator[Try]:
    s, p, o = case.setting, case.setting.problem, case.setting.operands
    if p.dim_qk == p.dim_v and not p.shares_kv and s.grads is None and p.dequant_k == "none":
        swapped = {"k": o.v, "v": o.k, "k_common": o.v_common, "v_common": o.k_common}
        yield Try("each in the other's place", s.of_operands(**swapped))
        yield Try("keys for values", s.of_operands(v=o.k, v_common=o.k_common))
        yield Try("values for keys", s.of_operands(k=o.v, k_common=o.v_common))


def _capacity(case: Case) -> np.ndarray | None:
    """Returns int [sequences], how many keys a call's tensor or pages can hold; None for packed sequences."""
    s = case.setting
    count, k = len(s.extents), s.operands.k
    if isinstance(k, PagedView):
        return np.full(count, k.table.shape[1] * k.page_size)
    if case.layout in ("TND", "NTD") or not isinstance(k, RowView):
        return None
    tokens = case.names.get("S2")
    return None if not tokens else np.full(count, int(tokens))


def _longer(case: Case, lengths: np.ndarray) -> Setting:
    """Returns the call with other numbers of keys (`lengths` [sequences]); its mask's band moves with the last key."""
    s, e = case.setting, case.setting.extents
    edges = {n: np.where(finite(a), a + (lengths - e.kv_len), a) for n, a in (("lo", e.lo), ("hi", e.hi))}
    return s.of_extents(kv_len=lengths, **edges)


def lengths_cumulative(case: Case) -> Iterator[Try]:
    e, buffer = case.setting.extents, _capacity(case)
    if buffer is None or len(e) < 2:
        return
    for detail, lengths in (
        ("lengths are added up to cumulative ends", np.cumsum(e.kv_len)),
        ("each length minus the previous one, as of cumulative ends", np.diff(e.kv_len, prepend=0)),
    ):
        lengths = np.clip(lengths, 0, buffer)
        if (lengths != e.kv_len).any():
            yield Try(detail, _longer(case, lengths))


def length_by_one(case: Case) -> Iterator[Try]:
    lengths, buffer = case.setting.extents.kv_len, _capacity(case)
    yield Try("the last key is not read", case.setting.of_extents(kv_len=np.maximum(lengths - 1, 0)))
    if buffer is not None and (buffer > lengths).any():
        yield Try("one key after the last is read", _longer(case, np.minimum(lengths + 1, buffer)))


def lengths_ignored(case: Case) -> Iterator[Try]:
    yield from _past_the_end(case)
    e, buffer = case.setting.extents, _capacity(case)
    if buffer is None or (buffer == e.kv_len).all():
        return
    yield Try("every slot is a key", _longer(case, np.maximum(buffer, e.kv_len)))
    k = case.setting.operands.k
    if isinstance(k, PagedView):
        pages = -(-e.kv_len // k.page_size) * k.page_size
        yield Try("every slot of the last page is a key", _longer(case, pages))
    yield Try(
        "the first sequence's length for all", _longer(case, np.minimum(np.full_like(buffer, e.kv_len[0]), buffer))
    )


def _past_the_end(case: Case) -> Iterator[Try]:
    """Yields a variant of a call per tile size, in which the last tile also reads the keys after a sequence's end
    (zeros after the end of the tensor)."""
    s, o, e = case.setting, case.setting.operands, case.setting.extents
    views = {name: getattr(o, name) for name in ("k", "v", "k_rope") if getattr(o, name) is not None}
    if not all(isinstance(v, RowView) and len(v.keep) == 1 and v.keep[0].is_contiguous() for v in views.values()):
        return
    ends: dict[tuple[int, ...], list[int]] = {}  # tile sizes, by the number of keys that are read
    for size in SIZES:
        ends.setdefault(tuple((-(-e.kv_len // size) * size).tolist()), []).append(size)
    for lengths, sizes in ends.items():
        if lengths != tuple(e.kv_len.tolist()):
            longer = {}
            for name, view in views.items():
                zeros = (0, sizes[0] * view.stride_token)
                longer[name] = replace(view, keep=(torch.nn.functional.pad(view.keep[0].reshape(-1), zeros),))
            detail = f"keys after the last, in tiles of {' or '.join(map(str, sizes))}"
            yield Try(detail, s.of_operands(**longer).of_extents(kv_len=np.array(lengths)))


MISTAKES = (
    Mistake("gqa-order", "Query heads are multiplied with the wrong key heads.",
            "Query head h belongs to key head h // (N1 / N2): repeat_interleave, not repeat.", group_order),
    Mistake("head-offset", "Keys or values are those of a neighbouring key head.",
            "Look at the stride and the offset of heads where tiles of keys and values are read.", head_offset),
    Mistake("sequence-offset", "Keys or values are those of another sequence, or begin a token too early or too late.",
            "Look at the stride of sequences, or at the cumulative lengths, where keys and values are read.",
            sequence_offset),
    Mistake("input-layout", "Queries, keys or values are read as in another layout.",
            "Look at the strides of heads and tokens that the kernel is given.", input_layout),
    Mistake("kv-confused", "Keys and values are exchanged.", "Look at the order of key and value in the call.",
            values_confused),
    Mistake("lengths-cumulative", "Lengths are read as cumulative ends, or the other way round.",
            "Padded and paged inference takes lengths; TND takes cumulative ends.", lengths_cumulative),
    Mistake("length-off-by-one", "The number of keys is one too small or too large.",
            "The new token's key is stored before the call, and counts.", length_by_one),
    Mistake("padding-seen", "Slots after a sequence's last key are visible.",
            "Mask the last page, or the padding, by actual_seq_lengths.", lengths_ignored),
)  # fmt: skip
