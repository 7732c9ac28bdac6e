"""Operator definitions of CANN's Compressor and CompressorGrad, which torch's operators compute."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fusion_attention.contract import Attr, Bound, Declared, Param, Rule, Tensor
from fusion_attention.memory import empty
from fusion_attention.ops.auxiliary_definitions.common import floats, result
from fusion_attention.ops.auxiliary_definitions.compressor import COMPRESSOR
from fusion_attention.ops.compressed.compressor_computation import Saved, Sequences, compressed, gradients
from fusion_attention.ops.shared.checks import float32
from fusion_attention.ops.shared.lowered_call import NO_SEQUENCE, Results, TorchCall
from fusion_attention.ops.shared.prototypes import ON_DEVICE
from fusion_attention.ops.shared.rules import invalid, no_float32, refused

OUT, SAVED = "cmp_kv", ("softmax_score", "kv")
GRADIENTS = ("dx", "dwkv", "dwgate", "dape")


def _results(x: torch.Tensor, wkv: torch.Tensor, of: Sequences, saves: bool) -> dict[str, torch.Tensor]:
    dim = wkv.shape[0] // of.coff
    saved = dict.fromkeys(SAVED, of.shape(of.coff * of.ratio, dim)) if saves else {}
    return {OUT: empty(x, of.shape(dim))} | {
        name: empty(x, shape, torch.promote_types(x.dtype, torch.float32)) for name, shape in saved.items()
    }


def _gradients(n: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    like = {"d" + name: n[name] for name in ("x", "wkv", "wgate")}
    dape = empty(n["x"], (n["cmp_ratio"], n["wkv"].shape[0]), torch.promote_types(n["x"].dtype, torch.float32))
    return {name: empty(t, t.shape) for name, t in like.items()} | {"dape": dape}


def _sequences(n: Mapping[str, Any]) -> Sequences:
    return Sequences.of(n["x"], n["cmp_ratio"], n["coff"], n["cu_seqlens"], n["seqused"], n["start_pos"])


def _lower(bound: Bound) -> TorchCall:
    n = bound.names
    tensors = {name: n[name] for name in ("x", "wkv", "wgate", "state_cache", "ape", "state_block_table")}
    x, wkv, wgate, state_cache, ape, table = tensors.values()
    of, saves, mode = _sequences(n), n["grad_enabled"], n["cache_mode"]

    def compute(results: Results) -> None:
        saved = Saved(*(results[name] for name in SAVED)) if saves else None
        results[OUT].copy_(compressed(x, wkv, wgate, state_cache, ape, table, mode, of, saved=saved))

    allocate = partial(_results, x, wkv, of, saves)
    return TorchCall(NO_SEQUENCE, "", tensors, allocate, compute, clears=SAVED if saves else ())


def _lower_grad(bound: Bound) -> TorchCall:
    n = bound.names
    tensors = {name: n[name] for name in ("x", "wkv", "wgate", "dcmp_kv")}
    (x, wkv, wgate, dcmp_kv), of = tensors.values(), _sequences(n)

    def compute(results: Results) -> None:
        computed = gradients(x, wkv, wgate, dcmp_kv, Saved(*(n[name] for name in SAVED)), of)
        for name, gradient in zip(GRADIENTS, computed, strict=True):
            results[name].copy_(gradient)

    return TorchCall(NO_SEQUENCE, "", tensors, partial(_gradients, n), compute, op_kind="attention_backward")


# -------------------------------------------------------------------------------------------------------------- records


def covers_windows(
    result: torch.Tensor, x: torch.Tensor, wkv: torch.Tensor, ratio: int, coff: int, *lengths: Any
) -> bool | str:
    """True (else the fault as text) if a tensor has an entry per window of x: a row, or (with one more axis) coff *
    ratio saved rows.
    wkv: [coff * D, ..]; coff: 2 if windows overlap, else 1; lengths: cu_seqlens, seqused and start_pos."""
    of, dim = Sequences.of(x, ratio, coff, *lengths), wkv.shape[0] // coff
    saved = result.dim() == (4 if of.size is not None else 3)
    wanted = of.shape(coff * ratio, dim) if saved else of.shape(dim)
    return tuple(result.shape) == wanted or f"{list(result.shape)} instead of {list(wanted)}"


def layout_of(n: Mapping[str, Any]) -> str:
    """Returns the layout of a call's rows: "BSH" padded, "TH" packed (with cu_seqlens); n: the call's arguments."""
    return "BSH" if n["cu_seqlens"] is None else "TH"


def _derive(n: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {axis name: size} of the results of a call with arguments `n`; Rw, saved rows of a window, or None."""
    x, wkv = n["x"], n["wkv"]
    if wkv.dim() != 2 or x.dim() != (3 if n["cu_seqlens"] is None else 2):
        return {}
    saved = n["coff"] * n["cmp_ratio"] if n["grad_enabled"] else None
    sizes = {"Cw": wkv.shape[0], "D": wkv.shape[0] // n["coff"], "H": x.shape[-1], "Pw": n["cmp_ratio"], "Rw": saved}
    padded = x.shape[:2] if n["cu_seqlens"] is None else (len(n["cu_seqlens"]) - 1, 0)
    return sizes | {"B": padded[0], "S": padded[1], "Nw": -(-padded[1] // n["cmp_ratio"])}


_WINDOWS = {"BSH": "B Nw D", "TH": "Tw D"}
_SAVED_ROWS = {"BSH": "B Nw Rw D", "TH": "Tw Rw D"}
_SHAPES = {OUT: _WINDOWS, **dict.fromkeys(SAVED, _SAVED_ROWS), "dx": {"BSH": "B S H", "TH": "T H"}}
_SHAPES |= {"dwkv": "Cw H", "dwgate": "Cw H", "dape": "Pw Cw"}  # type: ignore[dict-item]


def _shaped(p: Param) -> Tensor:
    assert isinstance(p, Tensor)
    return replace(p, shape=_SHAPES[p.name], form=layout_of)


_P = COMPRESSOR.by_name
_CALL = "x, wkv, cmp_ratio, coff, cu_seqlens, seqused, start_pos"
_WHEN = ("wkv.dim() == 2 and x.dim() == (3 if cu_seqlens is None else 2)"
         " and lengths_fit(x, cu_seqlens, seqused, start_pos)")  # fmt: skip


def _placed(name: str, advice: str, sample: str) -> Rule:
    return invalid(f"{name} is None or covers_windows({name}, {_CALL})", f"{name}: a row for every window ({advice})",
                   invalid={name: (sample, "float16" if name.endswith(OUT) else "float32")}, when=_WHEN)  # fmt: skip


def _sized(rule: Rule) -> Rule:
    """Returns a copy of a rule whose invalid sample call has the axis sizes of this module's samples, SIZES."""
    cache = rule.invalid.get("state_cache")
    if isinstance(cache, torch.Tensor):
        return replace(rule, invalid={"state_cache": torch.zeros(3, 1, 1).expand(3, 4, 256)})
    if rule.param == "cu_seqlens":
        return replace(rule, invalid={**rule.invalid, "x": ("6 H", "float16")})
    return replace(rule, invalid={"wkv": "Cw 6", "wgate": "Cw 6"}) if rule.param == "wkv" else rule


# Tensors of this interface have no gradients to wait for.
_RULES = tuple(_sized(rule) for rule in COMPRESSOR.rules if "trained" not in rule.check)
LIMITS = (
    replace(no_float32("x"), invalid={"x": ("B 6 H", "float32")}),
    refused("x.shape[-1] % 512 == 0 and 1024 <= x.shape[-1] <= 10240", "x (the chip takes no other rows)",
            when="x.dim() > 1", invalid={"x": "B 6 512", "wkv": "Cw 512", "wgate": "Cw 512"}),
    refused("wkv.shape[0] // coff in (128, 512)", "wkv (the chip pools to 128 or 512 channels)", when="wkv.dim() == 2",
            invalid={"wkv": "4 H", "wgate": "4 H", "ape": "4 4", "state_cache": "3 4 8"}),
    refused("2 <= cmp_ratio <= 128", "cmp_ratio (the chip takes no other windows)",
            invalid={"cmp_ratio": 129, "ape": "129 Cw"}),
)  # fmt: skip
SIZES = {"B": 2, "H": 1024, "W": 1024, "Cw": 128}
_SAMPLE: dict[str, Any] = {
    "x": ("B 6 H", "float16"), "wkv": "Cw H", "wgate": "Cw H",
}  # fmt: skip
C = Declared(names={"state_cache": "stateCacheRef"}, on_device=ON_DEVICE).of_page()
V1 = COMPRESSOR.version(
    "aclnnCompressor",
    COMPRESSOR.summary,
    params=(
        *(_P[name] for name in ("x", "wkv", "wgate", "state_cache", "ape", "state_block_table")),
        *(_P[name] for name in ("cu_seqlens", "seqused", "start_pos", "cmp_ratio", "coff", "cache_mode")),
        Attr("state_cache_stride_dim0", "Without effect: strides are those of the tensor.", default=0),
        Attr("grad_enabled", "Write softmax_score and kv, which the gradient reads.", type=bool, default=False),
        _shaped(_P[OUT]),
        *(
            _shaped(result(name, f"{text}, [B, ceil(S / cmp_ratio), coff * cmp_ratio, D], or packed as cmp_kv; with "
                           "coff 2 rows of the previous window and of the window alternate.", "float32"))
            for name, text in (("softmax_score", "Weights of the rows of windows"), ("kv", "Rows of windows"))
        ),
    ),
    rules=(
        *_RULES,
        _placed(OUT, "one result per window", "2 1 128"),
        *(_placed(name, "saved rows for every window", "2 2 4 64") for name in SAVED),
        *LIMITS,
    ),
    c=C,
    blank_is_absent=True,
    rulings=(44,),
    layouts=("BSH",),
    neutral={"input_layout": "BSH", **dict.fromkeys(("B", "S", "Nw", "D", "Rw", "H", "Cw", "Pw"))},
    derive=_derive,
    functions={**COMPRESSOR.functions, "covers_windows": covers_windows, "float32": float32},
    lower=_lower,
    results=(OUT, *SAVED),
    fresh=lambda n: _results(n["x"], n["wkv"], _sequences(n), n["grad_enabled"]),
    sizes={**COMPRESSOR.sizes, **SIZES},
    samples={"BSH": {**COMPRESSOR.samples[""], **_SAMPLE, "state_cache": "3 4 256"}},
    keywords="",
    declared={},
    example="",
)  # fmt: skip
_SAVED_SAMPLES = {
    "wkv": {"dcmp_kv": "2 2 4", "softmax_score": ("2 2 4 4", "float32"), "kv": ("2 2 4 4", "float32")},
    "cmp_ratio": {"dcmp_kv": "2 1 Cw", "softmax_score": ("2 1 129 Cw", "float32"), "kv": ("2 1 129 Cw", "float32")},
}
GRAD_V1 = V1.version(
    "aclnnCompressorGrad",
    "Gradients of Compressor, from the rows that it saved.",
    params=(
        *(_P[name] for name in ("x", "wkv", "wgate")),
        floats("dcmp_kv", "Gradient of cmp_kv.", like="x"),
        *(Tensor(name, f"{name} of the forward.", dtypes="float32") for name in SAVED),
        *(_P[name] for name in ("cu_seqlens", "seqused", "start_pos", "cmp_ratio", "coff")),
        *(_shaped(result(f"d{name}", f"Gradient of {name}, in its shape.", "=x")) for name in ("x", "wkv", "wgate")),
        _shaped(result("dape", "Gradient of ape, [cmp_ratio, coff * D].", "float32")),
    ),
    rules=(
        *(rule for rule in _RULES if not {"ape", "state_cache", "state_block_table"} & {rule.param}),
        _placed("dcmp_kv", "the shape of cmp_kv", "2 1 128"),
        *(_placed(name, "as the forward wrote it", "2 2 4 64") for name in SAVED),
        *(
            invalid(f"d{name} is None or d{name}.shape == {name}.shape",
                    f"d{name}: the shape of {name} (a gradient for each element)",
                    invalid={f"d{name}": ("7 6 H" if name == "x" else "Cw 6", "float16")})
            for name in ("x", "wkv", "wgate")
        ),
        invalid("dape is None or list(dape.shape) == [cmp_ratio, wkv.shape[0]]",
                "dape: [cmp_ratio, coff * D] (a gradient for each element)", when="wkv.dim() == 2",
                invalid={"dape": "3 Cw"}),
        *(
            replace(
                rule,
                invalid={k: v for k, v in rule.invalid.items() if k not in ("ape", "state_cache")}
                | _SAVED_SAMPLES.get(rule.param, {}),
            )
            for rule in LIMITS
        ),
    ),
    formula="dkv_p = W_p * dcmp,  dz_p = W_p * (dcmp * kv_p - sum_p W_p * dcmp * kv_p)\n"
            "dx = dkv wkv + dz wgate,  dwkv = dkv^T x,  dwgate = dz^T x,  dape = sum of dz by position",
    tex=r"dkv_p = W_p \odot dcmp \qquad dz_p = W_p \odot \Big(dcmp \odot kv_p - \sum_{p'} W_{p'} \odot dcmp \odot "
        r"kv_{p'}\Big) \qquad dx = dkv\, W_{kv} + dz\, W_{gate}",
    neutral={**V1.neutral, "grad_enabled": False},
    c=C.but(dcmp_kv="dCmpKv", dx="dX", dwkv="dWkv", dwgate="dWgate", dape="dApe"),
    lower=_lower_grad,
    results=GRADIENTS,
    fresh=_gradients,
    samples={"BSH": _SAMPLE | {"dcmp_kv": "2 2 128", "softmax_score": "2 2 4 128", "kv": "2 2 4 128"}},
)  # fmt: skip
RECORDS = (V1, GRAD_V1)
