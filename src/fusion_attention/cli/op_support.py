"""The support of an operator by each back end, determined from sample calls of its definition."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusion_attention.contract import Op, Tensor

COLUMNS = {"cpu": "CPU", "triton": "NVIDIA GPU (Triton)", "golden": "golden (float64)"}
CHIP = "the chip's page"


def refusals(problem: Any, name: str) -> list[str]:
    """Returns reasons why the back end `name` computes no call of the sizes and options `problem` on any machine."""
    import torch

    from fusion_attention.backends import load, triton

    device = torch.device("cuda" if name == "triton" else "cpu")
    result = load(name).reasons_against(problem, device)
    absent = triton.against_device(device) if name == "triton" else []
    return [reason for reason in result if reason not in absent]


def lowered(op: Op, settings: dict[str, Any], *, strict: bool = False, device: str = "cpu") -> Any | None:
    """Returns the sample call of `op` with these settings (arguments and sizes by name) on a device, in the form that
    back ends compute; None if the operator's definition forbids it. strict: CANN's limits apply too."""
    import torch

    from fusion_attention.contract import ContractError, bind
    from fusion_attention.contract.sampling import sample

    assert op.lower is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            args = sample(op, **settings)
            if device != "cpu":
                args = {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in args.items()}
            return op.lower(bind(op, args, strict=strict))
        except (ContractError, AttributeError, TypeError, ValueError, NotImplementedError):
            return None


def on_device_of(backend: str, op: Op, settings: dict[str, Any]) -> Any | None:
    """Returns the sample call of `op` with these settings as `backend` computes it; None if illegal. Tensors are on
    torch's device meta for "triton", else on the CPU."""
    return lowered(op, settings, device="meta" if backend == "triton" else "cpu")


def matrix(op: Op) -> list[tuple[str, dict[str, str]]]:
    """Returns (dtype, {back end or CHIP: "yes" or names of the layouts that it computes}) for each dtype of an
    operator's first tensor; CHIP stands for the chip's limits."""
    first: Tensor = op.tensors()[0]
    rows = []
    for dtype in first.dtypes.split():
        results: dict[str, list[str]] = {name: [] for name in (*COLUMNS, CHIP)}
        for layout in op.layouts:
            settings: dict[str, Any] = {op.layout_attr: layout}
            for p in op.tensors():
                if not p.optional and dtype in p.dtypes.split() and p.words(layout):
                    settings[p.name] = (" ".join(p.words(layout)), dtype)
            on_host = lowered(op, settings)
            if on_host is None:
                continue
            for name in COLUMNS:
                call = on_device_of(name, op, settings) if name == "triton" else on_host
                results[name] += [layout] if call is not None and not refusals(call.problem, name) else []
            results[CHIP] += [layout] if lowered(op, settings, strict=True) is not None else []
        every = len(op.layouts)
        rows.append((dtype, {name: "yes" if len(n) == every else ", ".join(n) for name, n in results.items()}))
    return [row for row in rows if any(row[1].values())]


def gaps(op: Op) -> dict[str, list[str]]:
    """Returns {back end: sentences why it does not compute some sample calls of `op`}; the calls cover all rules."""
    results: dict[str, list[str]] = {}
    for settings in _settings(op):
        for name in ("cpu", "triton"):
            call = on_device_of(name, op, settings)
            if call is not None:
                for reason in refusals(call.problem, name):
                    text = reason.removeprefix(f"the {name} back end ").rstrip(".")
                    texts = results.setdefault(name, [])
                    if text not in texts:
                        texts.append(text)
    return results


def _settings(op: Op) -> Iterator[dict[str, Any]]:
    """Yields settings (arguments by name) of an operator's default sample call, then of one affected by each rule."""
    yield {op.layout_attr: op.layouts[0]}
    settings_listed = set()
    for rule in op.applicable_rules:
        layout = next(name for name in op.layouts if name in (rule.only or op.layouts))
        settings = {op.layout_attr: layout, **rule.given}
        if rule.given and (text := str(sorted(settings.items(), key=str))) not in settings_listed:
            settings_listed.add(text)
            yield settings
