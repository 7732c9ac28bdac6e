"""attention() over sequences that are sharded over several ranks; every rank calls it with its shard.

Every rank validates the unsharded call of fusion_attention.attention, and translates it for back ends, on tensors
without memory, so rules, messages and defaults are those of its operator definition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusion_attention.backends import BackendName
from fusion_attention.contract import bind, intact
from fusion_attention.distributed import schedules
from fusion_attention.distributed.chunk_attention import FullCall, Keys, Rows, Saved
from fusion_attention.distributed.groups import AnyGroup, Group, group_of
from fusion_attention.distributed.layout import layout_of
from fusion_attention.distributed.schedules import ScheduleInputs, Side
from fusion_attention.distributed.sharding import shape_of
from fusion_attention.distributed.ulysses import Heads, indivisible
from fusion_attention.ir.dropout import draw_seed
from fusion_attention.ir.mask import INFINITE, UNLIMITED, Band
from fusion_attention.ir.merge import Partial
from fusion_attention.ops.shared.layouts import LAYOUTS, to_float32
from fusion_attention.ops.training import api_definition as record
from fusion_attention.ops.training.api_definition import EmptyRows, Layout, Lengths
from fusion_attention.ops.training.lowered_call import DenseCall, owns_bias
from fusion_attention.settings import chosen
from fusion_attention.torch_ops import dispatch
from fusion_attention.torch_ops.attention_forward import forward as forward_of_one_process
from fusion_attention.torch_ops.autograd_guards import constants, once
from fusion_attention.torch_ops.foreign_arguments import refuse

Tensor = torch.Tensor
_ROWS, _KEYS, _MATRICES = ("q", "q_rope"), ("k", "v", "k_rope"), ("bias", "blocked")
_TENSORS = ("q", "k", "v", "q_rope", "k_rope", "bias", "blocked", "alibi_slopes", "sink")
_UNEVEN = "every rank must make the same calls; shards of different sizes need tokens=, the unsharded number"
_CAST = ("q", "k", "v", "q_rope", "k_rope", "bias")
_NOT_SHARDED = {
    "drop_bits": "cannot be sharded: pass seed and offset, which drop the same elements as one process",
    "blocked_tiles": "cannot be sharded: pass this rank's rows of the mask as blocked",
    "blocked_bits": "cannot be sharded: pass this rank's rows of the mask as blocked",
}


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: AnyGroup = None,
    schedule: str = "zigzag",
    tokens: int | tuple[int, int] | None = None,
    deterministic: bool = False,
    layout: Layout = "BSND",
    heads: int = 0,
    q_len: Lengths = None,
    kv_len: Lengths = None,
    q_rope: Tensor | None = None,
    k_rope: Tensor | None = None,
    scale: float | None = None,
    band: Band | None = None,
    sparse_mode: int | None = None,
    pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED,
    blocked: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    alibi_start: Sequence[int] | None = None,
    sink: Tensor | None = None,
    keep_prob: float = 1.0,
    seed: int | None = None,
    offset: int = 0,
    empty_rows: EmptyRows = "zero",
    softcap: float = 0.0,
    return_lse: bool = False,
    backend: BackendName = "auto",
    **foreign: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes fusion_attention.attention over sequences that shard() has distributed over the ranks of a group.

        out = attention(q, k, v)        this rank's rows, over the keys of all ranks

    Every rank must make the call, with the same options. It is differentiable in q, k, v, q_rope, k_rope, bias and
    sink, for a loss that is the sum of all ranks' losses. The gradient of a sink, and of a bias that all rows share, is
    this rank's contribution: sum it over ranks, like gradients of weights.

    Args:
        q: this rank's query rows, [B, local S1, N1, D] in layout BSND.
        k, v: this rank's keys and values, [B, local S2, N2, D or Dv].
        group: a ProcessGroup, a DeviceMesh of one dimension, or of two (ring, ulysses); None: all ranks.
        schedule: "zigzag" (keys circulate; balanced for causal bands), "ring" (the same with contiguous shards),
            "allgather" (every rank gathers all keys; results and dq have the bits of one process), "ulysses" (exchanges
            heads for tokens; N1 a multiple of the ranks), "ulysses+ring" (both, on a mesh of two dimensions).
        tokens: padded layouts: tokens of the unsharded tensors, S or (S1, S2); None: ranks times the local tokens.
        deterministic: with "allgather": gradients of keys also have the bits of one process, at the cost of a second
            pass. Otherwise partial sums of the ranks are added, with the same bits in every run.
        q_len, kv_len: lengths of the unsharded sequences. Required for packed layouts.
        q_rope, k_rope: this rank's shards.
        blocked, bias: padded layouts: this rank's rows x all keys, [B, N1, local S1, S2]; size 1 broadcasts.
        alibi_slopes, sink: the same on every rank.
        seed: seed of dropout, which drops the same elements as in one process; None: rank 0 draws a seed.
        layout, heads, scale, band, sparse_mode, pre_tokens, next_tokens, alibi_start, keep_prob, offset, empty_rows,
            softcap, return_lse, backend: as in fusion_attention.attention, for the unsharded call.
        foreign: parameter names of other libraries; they raise an error that has this function's name.

    Returns:
        out of this rank's rows, or (out, lse).

    Raises:
        ContractError, BackendError, TypeError: as in fusion_attention.attention.
        GroupError: ranks make different calls, a shard does not have the size of shard()'s result, or a rank died.
        NotImplementedError: the call is traced (torch.compile, torch.func); a trace cannot contain communication.

    Source: this library.

    Example:
        >>> import fusion_attention, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or torchrun's
        >>> q = torch.randn(1, 4096, 4, 64)
        >>> x = fusion_attention.distributed.shard(q, None, "zigzag", 4096)
        >>> attention(x, x, x, tokens=4096, band=Band.causal()).shape
        torch.Size([1, 4096, 4, 64])
        >>> dist.destroy_process_group()
    """
    for word in foreign.keys() & _NOT_SHARDED.keys():
        raise TypeError(f"fusion_attention: distributed.attention: {word}: {_NOT_SHARDED[word]}")
    if foreign:
        refuse(attention, foreign)
    args = {
        "q": q, "k": k, "v": v, "layout": layout, "heads": heads, "q_len": q_len, "kv_len": kv_len, "q_rope": q_rope,
        "k_rope": k_rope, "scale": scale, "band": band, "sparse_mode": sparse_mode, "pre_tokens": pre_tokens,
        "next_tokens": next_tokens, "blocked": blocked, "bias": bias, "alibi_slopes": alibi_slopes,
        "alibi_start": alibi_start, "sink": sink, "keep_prob": keep_prob, "drop_bits": None, "seed": seed,
        "offset": offset, "empty_rows": empty_rows, "softcap": softcap, "blocked_tiles": None, "blocked_bits": None,
    }  # fmt: skip
    ranks = group_of(group)
    shape = shape_of("attention", ranks, schedule)
    if ranks.world == 1:
        out, max_, sum_ = forward_of_one_process(args, backend, stats=return_lse)
    else:
        out, max_, sum_ = _shared(args, ranks, _Options(schedule, shape, tokens, deterministic), chosen(backend))
    return (out, max_ + sum_.log()) if return_lse else out


@dataclass(frozen=True)
class _Options:
    """The options of attention() over several ranks that one process lacks; shape: ranks per dimension of the mesh."""

    schedule: str
    shape: tuple[int, ...]
    tokens: int | tuple[int, int] | None
    deterministic: bool


def _shared(args: dict[str, Any], ranks: Group, options: _Options, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """Computes attention() over several ranks; returns (out, softmax max and sum) of this rank's rows."""
    dispatch.autocast(args, _CAST)
    if dispatch.is_traced(args.values()):
        raise NotImplementedError(
            "fusion_attention: distributed.attention: a trace cannot contain communication between ranks (call it "
            "eagerly, outside torch.compile and torch.func: torch.compiler.disable)"
        )
    with torch._C.DisableTorchFunction():
        whole_args = _full_args(args, options, ranks)
        bound = bind(record.RECORD, whole_args)
        lowered = record.dense_call(bound)
        batch, token, _ = LAYOUTS[lowered.form.layout]
        sides = []
        for lengths, t in ((lowered.extents.q_len, lowered.q), (lowered.extents.kv_len, lowered.k)):
            counts = tuple(lengths.tolist()) if batch is None else (t.shape[token],)
            sides.append(Side(layout_of(options.schedule, counts, options.shape), lengths, batch is None))
        _refuse(args, lowered, options, sides[0])
        call = ranks.call(
            "attention",
            {"schedule": options.schedule, "backend": backend, **_words(whole_args, bound, options)},
            args["q"].device,
            _fault(args, lowered, options, [side.placement.sizes[ranks.rank] for side in sides]),
            (args["seed"], args["offset"]),
            _UNEVEN if options.tokens is None and not sides[0].packed else "",
        )
        p, e, q = lowered.problem, lowered.extents, args["q"]
        slopes, sink = (to_float32(args[name], q) for name in ("alibi_slopes", "sink"))
        if slopes is not None:
            slopes = slopes.detach().reshape(-1, p.heads_q).expand(len(e), p.heads_q)
        seed = args["seed"] if p.dropout == "philox" else 0
        if seed is None:
            seed = call.of_first("sending the seed of rank 0", draw_seed())
        sink, owns = None if sink is None else sink.detach(), owns_bias(lowered)
        drawn = {"seed": seed, "offset": lowered.offset}
        full = FullCall(p, e, p.heads_q, slopes=slopes, sink=sink, **drawn, owns_bias=owns)
        dbias = args["bias"] is not None and args["bias"].requires_grad
        m = ScheduleInputs(full, call, sides[0], sides[1], backend, options.deterministic, dbias)
        return _Shared.apply(m, options, lowered.form.layout, *(args[name] for name in _TENSORS))


# ------------------------------------------------------------------------------------------------------ the whole call


def _full_args(args: dict[str, Any], options: _Options, ranks: Group) -> dict[str, Any]:
    """Returns this rank's arguments `args` with meta tensors of the unsharded sizes: the call on one process."""
    layout = args["layout"]
    if not isinstance(layout, str) or layout not in record.RECORD.layouts:
        return args
    batch, token, _ = LAYOUTS[layout]
    rows, keys = _tokens(args, options, ranks, token, packed=batch is None)
    results = dict(args)
    for names, full in ((_ROWS, rows), (_KEYS, keys)):
        results |= {name: _blank(args[name], token, full) for name in names}
    for name in _MATRICES:
        t = args[name]
        one = not isinstance(t, Tensor) or t.dim() < 2 or t.shape[-2] == 1
        results[name] = _blank(t, 0, None) if one else _blank(t, t.dim() - 2, rows)
    return results | {name: _blank(args[name], 0, None) for name in ("alibi_slopes", "sink")}


def _tokens(args: dict[str, Any], options: _Options, ranks: Group, token: int, *, packed: bool) -> tuple[Any, Any]:
    """Returns the numbers of tokens of (queries, keys) on all ranks together; None where the arguments do not determine
    it. token: index of the axis of tokens. packed: lengths determine the tokens."""
    if packed:
        if options.tokens is not None:
            raise ValueError(
                f"fusion_attention: distributed.attention: tokens: expected None with packed sequences, got "
                f"{options.tokens!r} (q_len and kv_len determine it)"
            )
        kv_len = args["q_len"] if args["kv_len"] is None else args["kv_len"]
        return _sum(args["q_len"]), _sum(kv_len)
    if options.tokens is None:
        rows, keys = (
            t.shape[token] * ranks.world if isinstance(t, Tensor) and t.dim() > token else None
            for t in (args["q"], args["k"])
        )
        return rows, keys
    given = (options.tokens, options.tokens) if isinstance(options.tokens, int) else options.tokens
    if not isinstance(given, tuple) or len(given) != 2 or not all(type(n) is int and 0 <= n < INFINITE for n in given):
        raise ValueError(
            f"fusion_attention: distributed.attention: tokens: expected S or (S1, S2), got {options.tokens!r}"
        )
    return given


def _sum(lengths: Any) -> int | None:
    try:
        return int(sum(lengths.tolist() if isinstance(lengths, Tensor) else lengths))
    except (TypeError, ValueError):
        return None


def _blank(value: Any, axis: int, size: int | None) -> Any:
    """Returns a meta tensor (no memory) like `value`, with `size` elements along `axis` (None: unchanged); values that
    are not dense tensors are returned unchanged."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_nested or value.dim() <= axis:
        return value
    shape = list(value.shape)
    if size is not None:
        shape[axis] = size
    return torch.zeros(shape, dtype=value.dtype, device="meta", requires_grad=value.requires_grad)


def _words(full_args: dict[str, Any], bound: Any, options: _Options) -> dict[str, Any]:
    """Returns {name: shape, dtype, length or option} that must be equal on all ranks. The number of rows of a bias or
    mask matrix is left out, because it may be 1 on some ranks. bound: the call on one process after validation."""
    settings: dict[str, Any] = {"deterministic": options.deterministic, "grad": torch.is_grad_enabled()}
    for name, value in full_args.items():
        if isinstance(value, Tensor) and name in _TENSORS:
            shape = [*value.shape[:-2], *value.shape[-1:]] if name in _MATRICES else list(value.shape)
            settings[name] = f"{shape} {value.dtype}{' with a gradient' if value.requires_grad else ''}"
        elif name in ("q_len", "kv_len"):
            settings[name] = bound[name].tolist()
        elif name not in ("seed", "offset") and value is not None:
            settings[name] = value
    return settings


def _refuse(args: dict[str, Any], lowered: DenseCall, options: _Options, rows: Side) -> None:
    """Raises ValueError, on every rank alike, if the schedule cannot shard the call's heads, bias or mask matrix."""
    why, name = "", "schedule"
    moves = options.schedule.startswith("ulysses")
    if options.deterministic and options.schedule != "allgather":
        name, why = "deterministic", f'needs schedule="allgather", got {options.schedule!r}'
    elif moves:
        why = indivisible(lowered.problem, options.shape[-1])
    one_row = 1 in rows.placement.sizes
    for matrix in _MATRICES:
        t = args[matrix]
        if t is None:
            continue
        if rows.packed:
            name, why = matrix, "needs padded sequences (packed sequences have a band, lengths and slopes)"
        elif one_row and (moves or options.deterministic or (matrix == "bias" and t.requires_grad)):
            name, why = matrix, "needs ranks with more than one row: one row could be this rank's, or one for all rows"
    if why:
        raise ValueError(f"fusion_attention: distributed.attention: {name}: {why}")


def _fault(args: dict[str, Any], lowered: DenseCall, options: _Options, sizes: Sequence[int]) -> str:
    """Returns a sentence if a tensor of this rank has not its shard's number of tokens, `sizes` (query rows, keys),
    else ""."""
    token = LAYOUTS[lowered.form.layout][1]
    for names, size in zip((_ROWS, _KEYS), sizes, strict=True):
        for name in names:
            if (t := args[name]) is not None and t.shape[token] != size:
                return (
                    f"{name} has {t.shape[token]} tokens, and this rank's shard has {size} (shard() makes it; tokens= "
                    "is the number of tokens on all ranks)"
                )
    for name in _MATRICES:
        if (t := args[name]) is not None and t.dim() >= 2 and t.shape[-2] not in (1, sizes[0]):
            advice = f"shard({name}, group, {options.schedule!r}, S1, dim=-2)"
            return f"{name} has {t.shape[-2]} rows, and this rank has {sizes[0]} ({advice})"
    return ""


# --------------------------------------------------------------------------------------------------------- this rank's


class _Shared(torch.autograd.Function):
    """The autograd function of attention over several ranks: (out, max, sum) of this rank's rows; only out has a
    derivative."""

    @staticmethod
    def forward(ctx: Any, m: ScheduleInputs, options: _Options, layout: str, *tensors: Any) -> tuple[Tensor, ...]:
        rows, keys = _canonical(m, layout, tensors)
        partial: Partial = _computed(m, options, rows, keys, None)
        packed = LAYOUTS[layout][0] is None
        stats = (t[0] if packed else t.transpose(1, 2) for t in (partial.max, partial.sum))
        results = _placement_rows(partial.out, layout), *stats
        ctx.save_for_backward(*partial, *tensors)
        ctx.settings = m, options, layout
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, dout: Any, *of_stats: Any) -> Any:
        constants(of_stats)
        wanted = ctx.needs_input_grad[3:]
        if dout is None:
            return (None,) * (3 + len(wanted))
        m, options, layout = ctx.settings
        out, max_, sum_, *tensors = ctx.saved_tensors
        intact("distributed.attention, backward", ("dout", *_TENSORS), (dout, *tensors))

        def gradients() -> tuple[Tensor | None, ...]:
            again = replace(m, call=m.call.derivative())
            rows, keys = _canonical(again, layout, tensors)
            upstream = _rows_of(dout, layout, m.full.problem.heads_q)
            g, dsink = _computed(again, options, rows, keys, Saved(upstream, out, max_, sum_))
            results = [g.dq, g.dk, g.dv, g.dq_rope, g.dk_rope]
            given = [
                None if t is None or like is None else _placement_rows(t.to(like.dtype), layout)
                for t, like in zip(results, tensors[:5], strict=True)
            ]
            bias, sink = tensors[5], tensors[8]
            dbias = None if g.dbias is None else g.dbias.reshape(bias.shape).to(bias.dtype)
            return (*given, dbias, None, None, None if sink is None or dsink is None else dsink.to(sink.dtype))

        grads = once(gradients, (dout, *tensors))
        return None, None, None, *(g if need else None for g, need in zip(grads, wanted, strict=True))


def _computed(m: ScheduleInputs, options: _Options, rows: Rows, keys: Keys, saved: Saved | None) -> Any:
    """Computes this rank's rows by the schedule `options.schedule`, with communication; returns out and the softmax's
    max and sum, or, if `saved` is given, (gradients, gradient of the sink)."""
    gathered = options.schedule == "allgather"
    forward = schedules.gathered_forward if gathered else schedules.ring_forward
    backward = schedules.gathered_backward if gathered else schedules.ring_backward
    if not options.schedule.startswith("ulysses"):
        return forward(m, rows, keys) if saved is None else backward(m, rows, keys, saved)
    mesh = len(options.shape) == 2
    line, rest = (m.call.along(1), m.call.along(0)) if mesh else (m.call, m.call.alone())
    among = Heads.divided(m, line, rest)
    return among.forward(rows, keys, forward) if saved is None else among.backward(rows, keys, saved, backward)


def _canonical(m: ScheduleInputs, layout: str, tensors: Sequence[Any]) -> tuple[Rows, Keys]:
    """Returns views [batch, tokens, heads, dim] of this rank's query tensors, and of its key tensors, with chunks."""
    p, rank = m.full.problem, m.call.rank
    given: dict[str, Any] = dict(zip(_TENSORS, (None if t is None else t.detach() for t in tensors), strict=True))
    rows: dict[str, Any] = {n: _rows_of(given[n], layout, p.heads_q) for n in _ROWS}
    keys: dict[str, Any] = {n: _rows_of(given[n], layout, p.heads_kv) for n in _KEYS}
    matrices: dict[str, Any] = {
        n: None if given[n] is None else given[n][(None,) * (4 - given[n].dim())] for n in _MATRICES
    }
    return Rows(m.rows.chunks(rank), **rows, **matrices), Keys(m.keys.chunks(rank), **keys)


def _rows_of(t: Any, layout: str, count: int) -> Any:
    """Returns a tensor t, given in a layout, as [batch, tokens, heads, dim] with `count` heads; None for None."""
    if t is None:
        return None
    batch, token, head = LAYOUTS[layout]
    if head is None:
        t = t.unflatten(-1, (count, t.shape[-1] // count))
    if batch is None:
        return t[None]
    if batch == 1:
        return t.transpose(0, 1)
    return t.transpose(1, 2) if token == 2 else t


def _placement_rows(t: Tensor, layout: str) -> Tensor:
    """Returns t [batch, tokens, heads, dim] in a layout; the inverse of _rows_of()."""
    batch, token, head = LAYOUTS[layout]
    if batch is None:
        t = t[0]
    elif batch == 1:
        t = t.transpose(0, 1)
    elif token == 2:
        t = t.transpose(1, 2)
    return t.flatten(-2) if head is None else t
