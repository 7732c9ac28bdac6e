"""fixes(): single changes that make an illegal operator call legal. Common mistakes are reversed, each result checked.

Such mistakes are lengths instead of cumulative lengths, the string of another layout, or a mask that was not expanded.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import accumulate, islice
from typing import Any

import torch

from fusion_attention.contract import REQUIRED, Array, Attr, Op

Args = Mapping[str, Any]
Fix = tuple[str, dict[str, Any]]  # description and changed arguments
TRIANGLE = "torch.ones(2048, 2048, dtype=torch.bool).triu(1)"
_LENGTHS = 4096  # largest number of elements of a list of lengths that is changed


def fixes(op: Op, args: Args, is_legal: Callable[[Args], bool]) -> list[str]:
    """Returns descriptions of at most three single changes, each of which makes a call of `op` legal; [] if none does.
    args: arguments by name, tensors without memory. is_legal: returns True for arguments that break no rule."""
    without_zero = "without the leading 0 of cu_seqlens", lambda n: n[1:] if n[0] == 0 else n
    cumulative = "cumulative ends in place of lengths", lambda n: list(accumulate(n))
    of_lengths = (partial(_of_lengths, title, change) for title, change in (without_zero, cumulative))
    kinds: tuple[Callable[[Op, Args], Iterator[Fix]], ...] = (*of_lengths, _mask, _layout, _heads, _dtype, _absent)
    for kind in kinds:
        legal = (text for text, changes in kind(op, args) if is_legal({**args, **changes}))
        if result := list(islice(legal, 3)):
            return result  # kinds are ordered by frequency: rarer kinds are not tried if a common one fits
    return []


def _of_lengths(title: str, change: Callable[[list[int]], list[int]], op: Op, args: Args) -> Iterator[Fix]:
    """Yields (title and values, changed arguments): all lists of lengths changed by `change`, then each alone."""
    lists = []
    for p in op.params:
        value = args.get(p.name)
        if isinstance(p, Array) and value is not None:
            numbers = value.tolist() if isinstance(value, torch.Tensor) else value
            listed = isinstance(numbers, (list, tuple)) and 0 < len(numbers) <= _LENGTHS
            if listed and all(type(n) is int for n in numbers) and change(list(numbers)) != list(numbers):
                lists.append((p, change(list(numbers))))
    for several in ([lists] if len(lists) > 1 else []) + [[one] for one in lists]:
        text = ", ".join(f"{p.shown}={shortened(numbers)}" for p, numbers in several)
        yield f"{title}: {text}", {p.name: numbers for p, numbers in several}


def _mask(op: Op, args: Args) -> Iterator[Fix]:
    p, mask = op.by_name.get("atten_mask"), args.get("atten_mask")
    if p is None:
        return
    triangle = torch.zeros((2048, 2048), dtype=torch.bool, device="meta")
    if isinstance(mask, torch.Tensor):
        if mask.dtype not in (torch.bool, torch.uint8, torch.int8):
            yield f"{p.shown} as bool, true where a key is hidden", {"atten_mask": mask.to(torch.bool)}
        rows = _rows(op, args)
        if mask.dim() == 4 and mask.shape[2] == 1 and rows:
            expanded = mask.expand(*mask.shape[:2], rows, mask.shape[3])
            yield f"{p.shown}=mask.expand(-1, -1, {rows}, -1)", {"atten_mask": expanded}
        if mask.dim() == 2 and rows and mask.shape[0] != rows:
            expanded = mask[:, None, None].expand(mask.shape[0], 1, rows, mask.shape[1])
            yield f"{p.shown}=mask[:, None, None].expand(-1, 1, {rows}, -1)", {"atten_mask": expanded}
        if args.get("sparse_mode") not in (None, 0, 1):
            yield "sparse_mode=1 for a mask of your own, or sparse_mode=0", {"sparse_mode": 1}
    yield f"{p.shown}={TRIANGLE}", {"atten_mask": triangle}


def _rows(op: Op, args: Args) -> int:
    """Returns the query rows per sequence in padded layouts; 0 in other layouts."""
    query, layout = args.get("query"), str(args.get(op.layout_attr) or "")
    axis = {"BSH": 1, "BSND": 1, "BNSD": 2, "SBH": 0}.get(layout.split("_")[0])
    return int(query.shape[axis]) if isinstance(query, torch.Tensor) and axis is not None and query.dim() > axis else 0


def _layout(op: Op, args: Args) -> Iterator[Fix]:
    if op.layouts and op.layout_attr in op.by_name:
        p = op.by_name[op.layout_attr]
        shown, now = p.shown, args.get(p.name) or getattr(p, "default", "")
        for layout in op.layouts:
            if layout != now:
                yield f'{shown}="{layout}", if this is the layout of the tensors', {op.layout_attr: layout}


def _heads(op: Op, args: Args) -> Iterator[Fix]:
    """Yields (text, changed arguments) that set a number of heads, or a page size, to the size of an axis of q or k."""
    axes = {"head_num": "query", "num_heads": "query", "num_key_value_heads": "key", "heads": "q", "block_size": "key"}
    for name, of in axes.items():
        p, tensor = op.by_name.get(name), args.get(of)
        tensor = tensor[0] if isinstance(tensor, (list, tuple)) and tensor else tensor
        if isinstance(p, Attr) and isinstance(tensor, torch.Tensor):
            for size in dict.fromkeys(tensor.shape[1:]):
                yield f"{p.shown}={size}, an axis of {op.by_name[of].shown}", {name: int(size)}


def _dtype(op: Op, args: Args) -> Iterator[Fix]:
    """Yields (text, changed arguments) with all floating-point tensors in one dtype: the query's, bfloat16, float16."""
    tensors = {p.name: t for p in op.tensors() if isinstance(t := args.get(p.name), torch.Tensor)}
    floating = {name: t for name, t in tensors.items() if t.is_floating_point()}
    first = next(iter(tensors), "")
    if first not in floating:
        return
    for dtype in dict.fromkeys((floating[first].dtype, torch.bfloat16, torch.float16)):
        changes = {name: t.to(dtype) for name, t in floating.items() if t.dtype != dtype}
        shown = ", ".join(op.by_name[name].shown for name in changes)
        yield f"{shown} in {str(dtype).removeprefix('torch.')}", changes


def _absent(op: Op, args: Args) -> Iterator[Fix]:
    """Yields (text, changed arguments), each without one of the optional arguments."""
    for p in op.params:
        may_lack = p.optional or (isinstance(p, Attr) and p.default is not REQUIRED and p.name != op.layout_attr)
        default = p.default if isinstance(p, Attr) else None
        if may_lack and args.get(p.name) is not None and args[p.name] is not default:
            yield f"without {p.shown}", {p.name: None}


def shortened(numbers: list[int]) -> str:
    """Returns a list of numbers as text: [1, 2], or its first six numbers, followed by "..."."""
    return f"{numbers[:6]}".replace("]", ", ...]") if len(numbers) > 6 else str(numbers)
