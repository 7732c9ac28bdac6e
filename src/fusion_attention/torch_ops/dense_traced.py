"""The operators that torch sees where it does not simply run: under torch.compile, export, function transforms, modes.

They take a call as it was made (tensors, lengths as int64 tensors, numbers, one line of text), so that a trace holds
no length and no plan: checking, lowering and planning happen inside, when the operator runs. Eager calls on plain
tensors go to dense_eager.py directly, which saves the dispatcher's and the text's time.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.function import _SingleLevelFunction

from fusion_attention.contract import NESTED, Array, Attr, Bound, ContractError, Failure, Op, Tensor, bind, intact, show
from fusion_attention.contract import Tensors as Listed
from fusion_attention.memory import empty
from fusion_attention.ops import RECORDS
from fusion_attention.ops.shared.layouts import LAYOUTS, row_shape
from fusion_attention.ops.training import lower
from fusion_attention.ops.training import own as attention
from fusion_attention.ops.training.call import DenseCall
from fusion_attention.ops.training.statistics import LANES, finite, from_finite
from fusion_attention.settings import chosen, current
from fusion_attention.torch_ops import dense_eager
from fusion_attention.torch_ops.derivative import below, forward_mode, no_tangents, once
from fusion_attention.waist.dropout import signed
from fusion_attention.waist.mask import Band

Tensors = tuple[torch.Tensor, ...]
Given = Sequence[torch.Tensor | None]

_LIBRARY = torch.library.Library("fusion_attention", "DEF")
_CALL = "Tensor?[] tensors, Tensor?[] arrays, SymInt[] ints, float[] floats, Tensor? seed, str call"
_LIBRARY.define(f"attn_fwd({_CALL}) -> (Tensor out, Tensor max, Tensor sum)")
_LIBRARY.define(f"attn_bwd(Tensor dout, Tensor out, Tensor max, Tensor sum, {_CALL}, bool dbias) -> Tensor[]")
# The arguments of a dense gradient record that attn_bwd takes by themselves.
_SAVED = ("dy", "attention_in", "softmax_max", "softmax_sum")
_USUAL = frozenset({torch.Tensor, torch.nn.Parameter, type(None), int, float, str, bool, list, tuple, Band})


def needed(args: Iterable[Any]) -> bool:
    """Whether a call with these arguments must be one of the operators: it is traced, transformed, under a mode, or
    on tensors of a class of their own."""
    if (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state() is not None
        or forward_mode()
    ):
        return True
    return not _USUAL.issuperset(map(type, args)) and any(
        isinstance(value, torch.Tensor) and type(value) not in _USUAL for value in args
    )


def autocast(args: dict[str, Any], names: Sequence[str]) -> None:
    """Under autocast: the named tensors in its dtype, as scaled_dot_product_attention has them cast; names[0] is q."""
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
        return  # the usual case, found out faster than a tensor's device
    q = args[names[0]]
    device = q.device.type if isinstance(q, torch.Tensor) else ""
    if device not in ("", "meta") and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        for name in names:
            tensor = args.get(name)
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64:
                args[name] = tensor.to(dtype)


def drops(keep_prob: Any) -> bool:
    """Whether a traced call drops probabilities; None keeps all, and what is no number bind() refuses."""
    return not isinstance(keep_prob, (str, type(None))) and bool(keep_prob < 1)


# ------------------------------------------------------------------------------------------------------------- packing


class Names(NamedTuple):
    """The canonical names of what a record takes and gives."""

    tensors: tuple[str, ...]  # inputs
    arrays: tuple[str, ...]
    attributes: tuple[str, ...]
    lists: tuple[str, ...]  # of tensors
    results: tuple[str, ...]


def names_of(op: str) -> Names:
    """The names of a record."""
    record = RECORDS[op]
    apart = () if record.results else _SAVED
    return Names(
        tuple(p.name for p in record.params if isinstance(p, Tensor) and not p.output and p.name not in apart),
        tuple(p.name for p in record.params if isinstance(p, Array)),
        tuple(p.name for p in record.params if isinstance(p, Attr)),
        tuple(p.name for p in record.params if isinstance(p, Listed)),
        record.results,
    )


def known_names(op: str) -> Names:
    """names_of(), a constant in a trace."""
    if torch.compiler.is_compiling():
        from fusion_attention.torch_ops import trace_constants

        return trace_constants.names_of(op)
    return names_of(op)


def pack(op: str, args: Mapping[str, Any], seed: torch.Tensor | None = None, backend: str = "auto") -> tuple[Any, ...]:
    """The arguments of _CALL, from a record's name and arguments by canonical name.

    A list of lengths becomes a constant of the trace, a tensor an input. Numbers go by their own type, not the
    record's: what is wrong with them bind() says.
    """
    names = known_names(op)
    ints: dict[str, Any] = {}
    floats: dict[str, Any] = {}
    words: dict[str, Any] = {}
    for name in names.attributes:
        value = args.get(name)
        if value is None:
            continue
        if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
            value = value.item()  # in a trace of dynamo a number of numpy is an array
        if isinstance(value, (bool, str)):
            words[name] = value
        elif isinstance(value, (int, torch.SymInt)):
            if isinstance(value, int) and name == "seed":
                value = signed(value)
            if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
                raise TypeError(f"{op}: {name}: expected an int below 2**63 (a seed: 2**64)")
            ints[name] = value
        elif isinstance(value, (float, torch.SymFloat)):
            floats[name] = value
        elif isinstance(value, Band):
            words[name] = tuple(getattr(value, f.name) for f in fields(value))
        else:
            raise TypeError(f"{op}: {name}: expected a plain number or word, got {show(value)}")
    given: list[Any] = []
    lists: dict[str, int] = {}
    for name in names.tensors:
        value = args.get(name)
        several = list(value) if name in names.lists and isinstance(value, (list, tuple)) else [value]
        for tensor in several:
            if tensor is not None and not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{op}: {name}: expected a tensor, got {type(tensor)}")
            if tensor is not None and tensor.is_nested:
                raise nested(op, name)
        if isinstance(value, (list, tuple)):
            lists[name] = len(several)
        given += several
    text = f"{op};{_known_settings(backend)};{','.join(ints)};{','.join(floats)};{lists!r};{words!r}"
    lengths = [_as_tensor(args.get(name)) for name in names.arrays]
    return given, lengths, list(ints.values()), list(floats.values()), seed, text


def nested(op: str, name: str) -> ContractError:
    """What is wrong with a nested tensor, which no operator would even be called for."""
    return ContractError([Failure(op, RECORDS[op].by_name[name].shown, "a dense tensor", "a nested one", NESTED)])


def settings_of(backend: str) -> str:
    """The back end of a call that is traced, and how it is checked: what is set where it is traced stays with it."""
    asked = current()
    return f"{chosen(backend)},{asked.strict:d},{asked.check_content:d}"


def _known_settings(backend: str) -> str:
    """settings_of(), a constant in a trace."""
    if torch.compiler.is_compiling():
        from fusion_attention.torch_ops import trace_constants

        return trace_constants.settings_of(backend)
    return settings_of(backend)


def _as_tensor(lengths: Any) -> torch.Tensor | None:
    if lengths is None or isinstance(lengths, torch.Tensor):
        return lengths
    # What is no whole number stays so for bind() to refuse; an empty list has no dtype of its own.
    return torch.tensor(lengths) if len(lengths) else torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True)
class Text:
    """What the line of text says: record, settings, names of numbers, lengths of lists, and the words themselves.

    Attributes:
        strict, check_content: None where the trace did not ask for it, so that it is for those who run it to say.
    """

    op: Op
    backend: str
    strict: bool | None
    check_content: bool | None
    ints: tuple[str, ...]
    floats: tuple[str, ...]
    lists: dict[str, int]
    words: dict[str, Any]


@functools.lru_cache(maxsize=1024)
def read(text: str) -> Text:
    """The line of text, read once."""
    name, asked, ints, floats, lists, words = text.split(";", 5)
    backend, strict, content = asked.split(",")
    op = RECORDS[name]
    values = ast.literal_eval(words)
    for key, value in values.items():
        attr = op.by_name[key]
        if isinstance(value, tuple) and isinstance(attr, Attr):
            values[key] = attr.type(*value)
    whole, broken = (tuple(filter(None, names.split(","))) for names in (ints, floats))
    checks = strict == "1" or None, content == "1" or None
    return Text(op, backend, *checks, whole, broken, ast.literal_eval(lists), values)


def unpack(tensors: Given, arrays: Given, ints: Any, floats: Any, text: Text) -> dict[str, Any]:
    """The arguments by canonical name."""
    names = names_of(text.op.name)
    args = dict(text.words)
    left = iter(tensors)
    for name in names.tensors:
        count = text.lists.get(name)
        args[name] = next(left) if count is None else tuple(itertools.islice(left, count))
    for keys, values in zip((names.arrays, text.ints, text.floats), (arrays, ints, floats), strict=True):
        args.update(zip(keys, values, strict=True))
    return args


def bound(text: Text, args: dict[str, Any]) -> Bound:
    """The checked call."""
    return bind(text.op, args, strict=text.strict, check_content=text.check_content)


def _lowered(text: Text, args: dict[str, Any], seed: torch.Tensor | None) -> DenseCall:
    """The checked and lowered call; a seed that was drawn for it comes as a tensor."""
    op = text.op
    if op is attention.RECORD:
        drawn = args.get("seed") if seed is None else int(seed)
        return attention.dense_call(bound(text, args), seed=int(drawn or 0))
    if seed is not None:
        args = {**args, "seed": int(seed)}
    return lower.dense_call(bound(text, args), **{name: int(args.get(name) or 0) for name in ("seed", "offset")})


# ----------------------------------------------------------------------------------------------------------- operators


def _forward(
    tensors: Given, arrays: Given, ints: Any, floats: Any, seed: torch.Tensor | None, call: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    text = read(call)
    lowered = _lowered(text, unpack(tensors, arrays, ints, floats, text), seed)
    with torch.no_grad():
        out, max_, sum_ = dense_eager.attention(lowered, text.backend)
        return (out, max_, sum_) if text.op is attention.RECORD else (out, *finite(lowered, max_, sum_))


def _backward(
    dout: torch.Tensor,
    out: torch.Tensor,
    max_: torch.Tensor,
    sum_: torch.Tensor,
    tensors: Given,
    arrays: Given,
    ints: Any,
    floats: Any,
    seed: torch.Tensor | None,
    call: str,
    dbias: bool,
) -> list[torch.Tensor]:
    text = read(call)
    intact(f"{text.op.name}, backward", ("dout", "out", "max", "sum", "seed"), (dout, out, max_, sum_, seed))
    args = unpack(tensors, arrays, ints, floats, text)
    lanes = (t.unsqueeze(-1).expand(*t.shape, LANES) for t in (max_, sum_))
    if _SAVED[0] in text.op.by_name:
        args |= dict(zip(_SAVED, (dout, out, *lanes), strict=True))
    lowered = _lowered(text, args, seed)
    stats = (max_, sum_) if text.op is attention.RECORD else from_finite(lowered, max_, sum_)
    with torch.no_grad():
        *grads, dsink = dense_eager.attention_backward(lowered, dout, out, stats, dbias=dbias, backend=text.backend)
    sink = args.get("sink")
    return [*grads, dsink if sink is None else dsink.to(sink.dtype)]  # it may have come in fewer bits


def _heads(op: Op, args: Mapping[str, Any], q: torch.Tensor, layout: str) -> Any:
    head = LAYOUTS[layout][2]
    if head is not None:
        return q.shape[head]
    return next(args[p.name] for p in op.params if isinstance(p, Attr) and p.axis == "N1")


def _forward_fake(tensors: Given, arrays: Given, ints: Any, floats: Any, seed: Any, call: str) -> Tensors:
    text = read(call)
    args = unpack(tensors, arrays, ints, floats, text)
    check(text, args, arrays)
    q, k, v = (t for t in tensors[:3] if t is not None)
    layout = args.get(text.op.layout_attr, text.op.layouts[0])
    heads = _heads(text.op, args, q, layout)
    batch, token, head = LAYOUTS[layout]
    dim_v = v.shape[-1] if head is not None else v.shape[-1] // (k.shape[-1] // (q.shape[-1] // heads))
    out = empty(q, row_shape(q, layout, heads, dim_v))
    shape = (q.shape[0], heads) if batch is None else (q.shape[batch], heads, q.shape[token])
    stats = torch.float64 if q.dtype == torch.float64 else torch.float32
    return out, empty(q, shape, stats), empty(q, shape, stats)


def check(text: Text, args: dict[str, Any], arrays: Given) -> None:
    """What is wrong with the call, while it is traced; symbols and lengths wait until it runs."""
    given = list(itertools.chain.from_iterable(v if isinstance(v, tuple) else (v,) for v in args.values()))
    sizes = [size for t in given if isinstance(t, torch.Tensor) for size in (*t.shape, *t.stride())]
    known = not any(isinstance(value, (torch.SymInt, torch.SymFloat)) for value in (*given, *sizes))
    if known and not any(t is not None for t in arrays):
        bind(text.op, args, strict=text.strict, reads=False, memory=False)


def _backward_fake(
    dout: torch.Tensor, out: torch.Tensor, max_: torch.Tensor, sum_: torch.Tensor, tensors: Given, *rest: Any
) -> list[torch.Tensor]:
    *_, call, dbias = rest
    names = names_of(read(call).op.name).tensors
    own = attention.RECORD.name == read(call).op.name
    slots = ("q_rope", "k_rope", "bias") if own else ("query_rope", "key_rope", "pse")
    given = dict(zip(names, tensors, strict=True))
    present = [*tensors[:3], *(given.get(name) for name in slots[:2]), given.get(slots[2]) if dbias else None]
    present.append(given.get("sink"))
    return [dout.new_empty(0) if t is None else empty(t, t.shape) for t in present]


class _Differentiable(_SingleLevelFunction):
    """attn_fwd with attn_bwd as its derivative.

    Of one level: torch.func brings the level itself.
    """

    @staticmethod
    def forward(ctx: Any, rest: tuple[Any, ...], places: tuple[int, ...], *tensors: Any) -> Tensors:
        with below():
            results = torch.ops.fusion_attention.attn_fwd(list(tensors), *rest)
        arrays, ints, floats, seed, call = rest
        ctx.save_for_backward(*results, seed, *tensors, *arrays)
        ctx.rest, ctx.count, ctx.places = (ints, floats, call), len(tensors), places
        ctx.mark_non_differentiable(*results[1:])
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, dout: Any, *_: Any) -> Any:
        wanted = ctx.needs_input_grad[2:]
        gradients: list[Any] = [None] * len(wanted)
        if dout is not None:
            out, max_, sum_, seed, *saved = ctx.saved_tensors
            tensors, arrays = saved[: ctx.count], saved[ctx.count :]
            ints, floats, call = ctx.rest
            *_, bias, _ = ctx.places
            grads = torch.ops.fusion_attention.attn_bwd(
                dout, out, max_, sum_, tensors, arrays, ints, floats, seed, call, bias >= 0 and wanted[bias]
            )
            for place, gradient in zip(ctx.places, grads, strict=True):
                if place >= 0 and wanted[place]:
                    gradients[place] = gradient
        return None, None, *gradients


def _places(op: Op, args: Mapping[str, Any]) -> tuple[int, ...]:
    """Where the tensors of the seven gradients stand among the record's; -1 where it has none."""
    names = names_of(op.name).tensors
    slots = ("q", "k", "v", "q_rope", "k_rope", "bias", "sink")
    if op is not attention.RECORD:
        pse = "pse" if args.get("pse_type", 1) in (0, 1) else ""  # slopes have no gradient
        slots = ("query", "key", "value", "query_rope", "key_rope", pse, "sink")
    return tuple(names.index(name) if name in names else -1 for name in slots)


def _forward_autograd(
    tensors: Given, arrays: Given, ints: Any, floats: Any, seed: torch.Tensor | None, call: str
) -> Any:
    no_tangents(tensors)
    rest = (arrays, ints, floats, seed, call)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        text = read(call)
        places = _places(text.op, unpack(tensors, arrays, ints, floats, text))
        with enable_single_level_autograd_function():
            return _Differentiable.apply(rest, places, *tensors)  # type: ignore[attr-defined]
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.fusion_attention.attn_fwd(tensors, *rest)


def once_of(operator: str) -> Callable[..., list[torch.Tensor]]:
    """What autograd calls for an operator of ours that computes gradients."""

    def call(*args: Any) -> list[torch.Tensor]:
        tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
        no_tangents(tensors)

        def compute() -> list[torch.Tensor]:
            with below():
                found: list[torch.Tensor] = getattr(torch.ops.fusion_attention, operator)(*args)
                return found

        return list(once(compute, tensors))  # type: ignore[arg-type]

    return call


def no_vmap(*args: Any) -> Any:
    """What answers torch.vmap."""
    raise NotImplementedError(
        "fusion_attention: vmap is not supported: make the mapped axis part of the batch axis of one call"
    )


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("attn_fwd", _forward, _key)
    _LIBRARY.impl("attn_bwd", _backward, _key)
torch.library.register_fake("fusion_attention::attn_fwd", _forward_fake, lib=_LIBRARY)
torch.library.register_fake("fusion_attention::attn_bwd", _backward_fake, lib=_LIBRARY)
_LIBRARY.impl("attn_fwd", _forward_autograd, "Autograd")
_LIBRARY.impl("attn_bwd", once_of("attn_bwd"), "Autograd")
for _name in ("attn_fwd", "attn_bwd"):
    _LIBRARY.impl(_name, no_vmap, "FuncTorchBatched")


# --------------------------------------------------------------------------------------------------------------- faces


def forward(
    op: Op, args: Mapping[str, Any], *, seed: torch.Tensor | None = None, backend: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, max, sum) of a forward record's call by canonical name; attention's statistics are the kernels', the
    others' finite, one lane."""
    out, max_, sum_ = torch.ops.fusion_attention.attn_fwd(*pack(op.name, args, seed, backend))
    return out, max_, sum_


def backward(op: Op, args: Mapping[str, Any], *, seed: torch.Tensor | None, dbias: bool) -> Tensors:
    """(dq, dk, dv, dq_rope, dk_rope, dbias, dsink) of a gradient record's call by canonical name."""
    dy, out, max_, sum_ = (args[name] for name in _SAVED)
    packed = pack(op.name, args, seed)
    return tuple(torch.ops.fusion_attention.attn_bwd(dy, out, max_[..., 0], sum_[..., 0], *packed, dbias))
