"""Faults that are edits of this library's Triton kernels: the report on a captured call names them."""

import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fusion_attention as fa
from fusion_attention.backends.triton.dense import backward, forward, launch
from fusion_attention.ir.mask import Band
from fusion_attention.judging.judge import judged
from fusion_attention.judging.loaders import read_calls

CAUSAL = {"band": Band.causal()}
DROPS = {"keep_prob": 0.75}


@dataclass(frozen=True)
class Edit:
    """A change of a kernel's source.

    Attributes:
        old, new: text of the source; old occurs once, or `count` times. names: mistakes that describe the change.
        given: arguments besides q, k, v; true "sink" and "drop_bits" become random tensors. keys: of the sequence.
    """

    name: str
    module: ModuleType
    old: str
    new: str
    names: tuple[str, ...]
    given: dict[str, Any] = field(default_factory=dict)
    count: int = 1
    keys: int = 72


WEIGHTS = """p = tl.exp2(s * exponent - (base * exponent)[:, None])
    # The difference comes first: with a fused multiply-add of two products earlier weights would drift every iteration.
    fade = tl.exp2("""
EDITS = (
    Edit("accumulator not rescaled", forward, "acc0 = acc0 * fade[:, None]", "acc0 = acc0", ("rescale-missing",)),
    Edit("sum not rescaled", forward, "now, l * fade + tl.sum(p, 1)", "now, l + tl.sum(p, 1)", ("rescale-missing",)),
    Edit("natural exponentials", forward, WEIGHTS, WEIGHTS.replace("exp2", "exp"), ("exponent-base",)),
    Edit("key heads in turns", forward, "h // GROUP, layout_index", "h % (heads_q // GROUP), layout_index",
         ("gqa-order",), count=3),
    Edit("values of the next head", forward, "h // GROUP, layout_index.V", "(h // GROUP + 1) % 2, layout_index.V",
         ("head-offset",)),
    Edit("a key too many", forward, "(j[None, :] < end_key[:, None])", "(j[None, :] <= end_key[:, None])",
         ("window-off-by-one", "causal-alignment"), CAUSAL),
    Edit("a key too few on the left", forward, "(j[None, :] >= first_key[:, None])",
         "(j[None, :] > first_key[:, None])", ("window-off-by-one",), {"band": Band.window(20)}),
    Edit("no mask behind the last key", forward, "visible = (j[None, :] >= first_key[:, None]) & (j[None, :] < end_key"
         "[:, None])", "visible = j[None, :] >= first_key[:, None]", ("padding-weighed",)),
    Edit("the last full tile", forward, "(full, (again - full) // BN, again, 0)",
         "(full, (again - full) // BN - 1, again, 0)", ("tile-left-out", "tile-skipped")),
    Edit("a stale tile of keys", forward, "load_rows(k, j0, inside,", "load_rows(k, tl.maximum(j0 - BN, 0), inside,",
         ("tile-stale",)),
    Edit("the last tile", forward, "(begin, left, again, right), True", "(begin, left, again, right * 0), True",
         ("tile-left-out", "tile-skipped")),
    Edit("no division", forward, "fade / (tl.where(none, 1.0, l) * keep_prob)", "fade", ("unnormalised",)),
    Edit("no sink", forward, "    if SINK:\n        logit", "    if False:\n        logit", ("sink-missing",),
         {"sink": True}),
    Edit("dropout without its factor", forward, "(tl.where(none, 1.0, l) * keep_prob)", "tl.where(none, 1.0, l)",
         ("dropout-scale",), {"drop_bits": True, **DROPS}),
    Edit("a stale tile of rows", forward, "DIM, TMA_Q), row0, valid", "DIM, TMA_Q), tl.maximum(row0 - BM, 0), valid",
         ("rows-moved",), keys=64),
    Edit("no delta", backward, "delta = common.products(o, do, V1, V2)",
         "delta = 0.0 * common.products(o, do, V1, V2)",
         ("delta-missing",)),
    Edit("dq without the scale", backward, "(dq0, dq1, dq2), scale / shrink", "(dq0, dq1, dq2), 1.0 / shrink",
         ("gradient-scale",)),
    Edit("dk without the scale", backward, "(dk0, dk1, dk2), scale / shrink", "(dk0, dk1, dk2), 1.0 / shrink",
         ("gradient-scale",)),
    Edit("the first head of a group", backward, "for _ in tl.range(0, turns * GROUP)", "for _ in tl.range(0, turns)",
         ("group-sum",)),
    Edit("dq without the last tile", backward, "for t in tl.range(0, turns)", "for t in tl.range(0, turns - 1)",
         ("tile-left-out", "tile-skipped")),
    Edit("no mask in the backward", backward, "    elif masked:\n        s = tl.where(sees(row, key, band), s, "
         '-float("inf"))', "", ("edge-tiles-unmasked",), CAUSAL),
    Edit("dv without dropout's factor", backward, "(dv0, dv1, dv2), 1.0 / keep_prob", "(dv0, dv1, dv2), 1.0",
         ("dropout-scale",), {"drop_bits": True, **DROPS}),
    Edit("lse without the sum", backward, "peak * LOG2E + tl.log2(total)",
         "peak * LOG2E",
         ("unnormalised", "probabilities-wrong")),
)  # fmt: skip
KERNELS = ("forward", "prepare", "backward_query", "backward_key")
NAMED = 22  # edits, at least


def edited(edit: Edit, folder: Path) -> ModuleType:
    """Returns a module that is loaded from the changed source."""
    source = Path(edit.module.__file__ or "").read_text(encoding="utf-8")
    assert source.count(edit.old) == edit.count, (edit.name, source.count(edit.old))
    name = f"edited_{EDITS.index(edit)}"
    (file := folder / f"{name}.py").write_text(source.replace(edit.old, edit.new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mistakes(edit: Edit, folder: Path) -> set[str] | None:
    """Returns the mistakes that the report of a captured call names; None if all calls are judged right."""
    generator = torch.Generator().manual_seed(EDITS.index(edit))
    rows = edit.keys
    q, k, v, dout = (torch.randn(1, rows, n, 16, generator=generator) for n in (4, 2, 2, 4))
    given = {"scale": 0.25 + EDITS.index(edit) / 1024} | edit.given  # plans hold kernels: no two edits have one plan
    if given.pop("sink", False):
        given["sink"] = torch.randn(4, generator=generator)
    if given.get("drop_bits", False):
        given["drop_bits"] = torch.randint(256, (4 * rows * rows // 8,), generator=generator, dtype=torch.uint8)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    module = edited(edit, folder)
    with pytest.MonkeyPatch.context() as patch, fa.capture(folder / "calls") as recorded:
        for kernel in KERNELS:
            if hasattr(module, kernel) and hasattr(edit.module, kernel):
                patch.setattr(launch, kernel, getattr(module, kernel))
        fa.attention(*leaves, backend="triton", **given).backward(dout)
    names: set[str] = set()
    right = True
    for file in recorded.files:
        for call in read_calls(file):
            result = judged(call, search=True, backends=False)
            right &= result.passes
            names |= {m.name for m in result.mistakes}
    return None if right else names


@pytest.mark.slow
def test_judge_report_names_faulty_edits_of_triton_kernels(tmp_path: Path) -> None:
    """At least NAMED edits are named; reports of the other edits name no mistake."""
    reports: dict[str, set[str]] = {}
    for edit in EDITS:
        (folder := tmp_path / f"{EDITS.index(edit)}").mkdir()
        names = mistakes(edit, folder)
        assert names is not None, f"{edit.name}: the report calls it right"
        reports[edit.name] = names
    unnamed = {edit.name: reports[edit.name] for edit in EDITS if not {*edit.names} & reports[edit.name]}
    assert len(EDITS) - len(unnamed) >= NAMED, unnamed
    assert not any(unnamed.values()), unnamed
