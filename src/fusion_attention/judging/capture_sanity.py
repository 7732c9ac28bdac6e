"""Remarks on inputs and outputs that suggest a mistake in recording the call, such as NaN in every element."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fusion_attention.judging.calls import JudgeError, Recorded
from fusion_attention.judging.measure import Result

Tensor = torch.Tensor


def remarks(call: Recorded) -> tuple[str, ...]:
    """Returns a remark on each input and output of a recorded call that has NaN.

    Raises:
        JudgeError: all elements of an input are NaN, so that any result would be correct.
    """
    results = []
    inputs = dict(_tensors({**call.args, **{f"gradient of {n}": t for n, t in call.upstream.items()}}))
    for name, t in inputs.items():
        nan = int(t.isnan().sum())
        if nan == t.numel():
            raise JudgeError(
                f"{call.op.name}: {name}: every number is NaN, so there is nothing to compare with (read the input "
                "from the device before the kernel runs, and wait for the copy)"
            )
        results += [f"{name}: {nan} of {t.numel()} numbers are NaN"] if nan else []
    for name, t in _tensors(call.outputs):
        nan = int(t.isnan().sum())
        results += [f"{name}: every number is NaN"] if nan == t.numel() else []
    return tuple(results)


def _tensors(values: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, value in values.items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            yield name, value.float() if value.dtype.itemsize == 1 else value


def alien(result: Result) -> tuple[str, ...]:
    """Returns remarks on the judged outputs in `result` that are probably those of another call: in most rows they
    differ more from the exact values than zeros would."""
    remarks = []
    for name, map_ in result.maps.items():
        tally = result.tallies[name]
        if not tally.passes and not tally.strange and tally.relative_rms > 1 and map_.fraction > 0.5:
            remarks.append(f"{name}: further from the right result than zeros are: is it a result of this call?")
    return tuple(remarks)
