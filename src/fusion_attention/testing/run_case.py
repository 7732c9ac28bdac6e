"""Functions that run a test call: arguments of attention(), conversion for back ends, results, float64 reference."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fusion_attention.contract import Op, bind
from fusion_attention.ir.mask import Band
from fusion_attention.ops.training import api_definition, lower
from fusion_attention.ops.training import definitions as training
from fusion_attention.ops.training.forward_backward import GRADIENTS, DenseBackward, DenseForward
from fusion_attention.ops.training.lowered_call import BIAS, DenseCall
from fusion_attention.ops.training.statistics import to_lanes
from fusion_attention.testing.cases import Case, Results, Tensor, hostile, in_band, prefix_fits, seen
from fusion_attention.testing.mask_to_tiles import cut_tiles
from fusion_attention.torch_ops import eager


def pythonic(case: Case, args: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns {name: argument} of attention() for a test call with arguments `args`; None if it cannot express it."""
    matrix = case.pse in ("full", "shared_full", "row", "shared_row")
    slopes = "slopes" in case.pse
    if case.mask == "tokens" or (slopes and (case.pse_type == 3 or case.sparse_mode == 8)) or case.disabled:
        return None
    if case.pse != "none" and not slopes and (not matrix or case.packed or (case.pse_type == 1 and case.scale != 1)):
        return None
    banded = [(in_band(case, b).any(-1), seen(case, args, b).any(-1)) for b in range(len(case.q_len))]
    keyed = [pair for pair, keys in zip(banded, case.kv_len, strict=True) if keys]
    beyond = any(not band.all() for band, _ in keyed)
    if case.packed and beyond and any((band & ~some).any() for band, some in keyed):
        return None  # two kinds of empty rows in one call
    mode, mask = case.sparse_mode, args["atten_mask"]
    prefix = mode == 6 or (mode == 5 and prefix_fits(case))
    tiles = cut_tiles(mask) if case.mask == "tiles" else ()
    return {
        "q": args["query"],
        "k": args["key"],
        "v": args["value"],
        "layout": case.layout,
        "heads": case.heads_q,
        "q_rope": args["query_rope"],
        "k_rope": args["key_rope"],
        "scale": case.scale,
        "sink": args["sink"],
        "q_len": case.q_len if case.packed or not case.npu else None,
        "kv_len": case.kv_len if case.packed or not case.npu else None,
        "band": Band.prefix_causal(case.prefix or ()) if prefix and mask is not None else None,
        "sparse_mode": None if prefix or mask is None else 1 if mode == 5 else mode,
        "pre_tokens": case.pre,
        "next_tokens": case.next,
        "blocked": None if case.mask in ("compressed", "tiles") else mask,
        "bias": args["pse"] if matrix else None,
        "alibi_slopes": args["pse"] if slopes else None,
        "alibi_start": (case.starts or (0, 0)) if slopes else None,
        "keep_prob": case.keep_prob,
        "drop_bits": args["drop_mask"],
        "seed": args.get("seed"),
        "offset": args.get("offset", 0),
        "empty_rows": "zero" if case.inner_precise == 2 or beyond or not case.npu else "mean",
        "softcap": case.softcap,
        **{f"blocked_{name}": hostile(t) for name, t in zip(("tiles", "bits"), tiles, strict=False)},
    }


def call_interface(function: Callable[..., Any], op: Op, args: Mapping[str, Any]) -> Any:
    """Calls a torch_npu function and returns its result; args: arguments by name, of which those of `op` are passed."""
    given = {p.shown: args[p.name] for p in op.params if args.get(p.name) is not None}
    return function(**given)


def lowered(case: Case, args: Mapping[str, Any]) -> DenseCall:
    """Returns a test call, as back ends compute it, of torch_npu's function, or of attention() if only that has it."""
    if case.npu:
        return lower.dense_call(bind(training.TORCH_V2, args), seed=args.get("seed", 0), offset=args.get("offset", 0))
    given = pythonic(case, args)
    assert given is not None, f"{case.id}: no interface can express it"
    return api_definition.dense_call(bind(api_definition.RECORD, given), seed=args.get("seed", 0))


def run(call: DenseCall, dy: Tensor, backend: str) -> Results:
    """Returns {name: result} of forward and backward on a back end: out, max and sum (each [..., 8]), and the
    gradients; dy: the gradient of out."""
    out, *stats = eager.run(DenseForward(call), backend).values()
    lanes = to_lanes(call, *stats)
    backward = DenseBackward(call, (dy, out, *lanes), call.extras[BIAS])
    return {"out": out, "max": lanes[0], "sum": lanes[1], **eager.run(backward, backend)}


def attention(call: DenseCall, backend: str = "auto") -> tuple[Tensor, ...]:
    """Returns (out, max, sum) of a call on a back end; max and sum have one number per row and head."""
    return tuple(eager.run(DenseForward(call), backend).values())


def attention_backward(
    call: DenseCall,
    dout: Tensor,
    out: Tensor,
    stats: tuple[Tensor, ...],
    *,
    dlse: Tensor | None = None,
    dbias: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, ...]:
    """Returns the gradients (dq, dk, dv, dq_rope, dk_rope, dbias, dsink) of a call, empty for absent inputs.

    Args:
        call: the forward call, as back ends compute it.
        dout: the gradient of out. out, stats: results of attention().
        dlse: the gradient of max + log(sum), or None.
        dbias: False: the bias's gradient is not computed, and empty.
        backend: name of the back end.
    """
    bias = call.extras[BIAS] if dbias else None
    gradients = eager.run(DenseBackward(call, (dout, out, *stats), bias, dlse, lanes=False), backend)  # type: ignore[arg-type]
    return tuple(gradients[name] if name in gradients else call.q.new_empty(0) for name in GRADIENTS)


def golden(case: Case, args: Mapping[str, Any]) -> Results:
    """Returns {name: output or gradient} of a test call in float64, from the reference back end; args: arguments()."""
    call = lowered(case, args)
    problem = replace(call.problem, dtype="float64")
    extras = tuple(t.double() if t is not None and t.is_floating_point() else t for t in call.extras)
    call64 = replace(call, problem=problem, q=call.q.double(), k=call.k.double(), v=call.v.double(), extras=extras)
    return run(call64, args["dy"].double(), "golden")
