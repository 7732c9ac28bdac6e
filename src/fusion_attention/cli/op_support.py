"""What of an operator each back end computes: its record's sample calls, lowered, and the back ends asked."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusion_attention.contract import Op, Tensor

COLUMNS = {"cpu": "CPU", "triton": "NVIDIA GPU (Triton)", "golden": "golden (float64)"}
CHIP = "the chip's page"


def refusals(problem: Any, name: str) -> list[str]:
    """Why a back end does not compute a problem, wherever its tensors lie: what this machine lacks is left out."""
    import torch

    from fusion_attention.backends import load, triton

    device = torch.device("cuda" if name == "triton" else "cpu")
    result = load(name).reasons_against(problem, device)
    absent = triton.against_device(device) if name == "triton" else []
    return [reason for reason in result if reason not in absent]


def lowered(op: Op, settings: dict[str, Any], *, strict: bool = False) -> Any | None:
    """A sample call, checked and lowered; None of one that the record does not allow."""
    from fusion_attention.contract import ContractError, bind
    from fusion_attention.contract.sampling import sample

    assert op.lower is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return op.lower(bind(op, sample(op, **settings), strict=strict))
        except (ContractError, AttributeError, TypeError, ValueError, NotImplementedError):
            return None  # what cannot be lowered is not computed


def matrix(op: Op) -> list[tuple[str, dict[str, str]]]:
    """(dtype of the first tensor, column -> the layouts that are computed) for every dtype of the record."""
    first: Tensor = op.tensors()[0]
    rows = []
    for dtype in first.dtypes.split():
        results: dict[str, list[str]] = {name: [] for name in (*COLUMNS, CHIP)}
        for layout in op.layouts:
            settings: dict[str, Any] = {op.layout_attr: layout}
            for p in op.tensors():
                if not p.optional and dtype in p.dtypes.split() and p.words(layout):
                    settings[p.name] = (" ".join(p.words(layout)), dtype)
            call = lowered(op, settings)
            if call is None:
                continue
            for name in COLUMNS:
                results[name] += [layout] if not refusals(call.problem, name) else []
            results[CHIP] += [layout] if lowered(op, settings, strict=True) is not None else []
        rows.append((dtype, {name: _layouts(op, layouts) for name, layouts in results.items()}))
    return [row for row in rows if any(row[1].values())]


def _layouts(op: Op, computed: list[str]) -> str:
    if len(computed) == len(op.layouts):
        return "yes"
    return ", ".join(computed)


def gaps(op: Op) -> dict[str, list[str]]:
    """Back end -> what it refuses among calls that the record's rules are asked of, beside the plain one."""
    results: dict[str, list[str]] = {}
    for settings in _settings(op):
        call = lowered(op, settings)
        if call is not None:
            for name in ("cpu", "triton"):
                for reason in refusals(call.problem, name):
                    text = reason.removeprefix(f"the {name} back end ").rstrip(".")
                    texts = results.setdefault(name, [])
                    if text not in texts:
                        texts.append(text)
    return results


def _settings(op: Op) -> Iterator[dict[str, Any]]:
    """The plain call, and those under which a rule is asked, each once."""
    yield {op.layout_attr: op.layouts[0]}
    settings_listed = set()
    for rule in op.asked:
        layout = next(name for name in op.layouts if name in (rule.only or op.layouts))
        settings = {op.layout_attr: layout, **rule.given}
        if rule.given and (text := str(sorted(settings.items(), key=str))) not in settings_listed:
            settings_listed.add(text)
            yield settings
