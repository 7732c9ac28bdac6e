"""replay(): computes a call from a file of capture() again, and compares the results."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fusion_attention.captures.gradients import backward_of, complete_call, gradient_name
from fusion_attention.captures.reader import CaptureError, Recording, read
from fusion_attention.contract import BackendError, ContractError, bind
from fusion_attention.ir.call import Lowered
from fusion_attention.plan import compute

if TYPE_CHECKING:
    from fusion_attention.judging.verdict import Judgement

__all__ = ["CaptureError", "Replay", "replay"]


@dataclass(frozen=True, eq=False, repr=False)
class Replay:
    """A saved call with its saved and recomputed results; printed as five lines with a verdict.

    Attributes:
        operator: the operator's name.
        args: its arguments by parameter name.
        recorded, recomputed: outputs by name, from the file and from the new computation.
        differences: the largest absolute difference of each output; inf if shapes or positions of NaN differ.
        recording: the content of the file, if there was one.
    """

    operator: str
    args: dict[str, Any]
    recorded: dict[str, torch.Tensor]
    recomputed: dict[str, torch.Tensor]
    differences: dict[str, float]
    recording: Recording | None = None

    def __repr__(self) -> str:
        """Returns five lines of text: four of the verdict on the saved outputs, and the largest difference of the
        recomputed outputs."""
        from fusion_attention.judging.calls import JudgeError

        replayed = f"replayed {len(self.differences)} outputs, largest difference {self.worst:.3g}"
        try:
            lines = self.judgement.lines()
        except JudgeError as error:
            lines = [self.operator, "verdict  none", f"error    {error}", "where    unknown", ""]
        return "\n".join((*lines[:4], replayed))

    @functools.cached_property
    def judgement(self) -> Judgement:
        """The verdict on the saved outputs, by expected rounding errors; computed on first use."""
        from fusion_attention.judging.calls import JudgeError, from_recording
        from fusion_attention.judging.judge import judged

        if self.recording is None:
            raise JudgeError(f"{self.operator}: no recording to judge")
        return judged(from_recording(self.recording), search=False, backends=False)

    @property
    def worst(self) -> float:
        """The largest absolute difference between saved and recomputed outputs; 0.0 if all are equal."""
        return max(self.differences.values(), default=0.0)


def replay(path: str | Path, *, backend: str = "auto", device: str | torch.device = "cpu") -> Replay:
    """Computes a call that capture() saved again and compares the results.

    Dropout is drawn from the saved seed by this library's generator, which differs from the chip's.

    Args:
        path: a file that capture() wrote.
        backend: "auto" (by the device), "cpu", "triton" or "golden".
        device: the device that computes.

    Returns:
        A Replay.

    Raises:
        CaptureError: capture() did not write the file, or its fields contradict each other.
        OSError: the file does not exist.
        BackendError: no back end computes the call.

    Example:
        >>> import tempfile
        >>> import fusion_attention as fa
        >>> q = torch.randn(1, 16, 2, 64)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with fa.capture(folder) as recorded:
        ...         out = fa.attention(q, q, q)
        ...     again = replay(recorded.files[0])
        >>> torch.equal(again.recorded["out"], out), again.differences
        (True, {'out': 0.0, 'max': 0.0, 'sum': 0.0})
    """
    place = torch.device(device)
    if place.type == "meta":
        raise BackendError("replay: device: expected one with memory: on meta there are no values to compare")
    result = read(Path(path), place)
    op, args, recorded = result.op, result.args, result.outputs
    try:
        recomputed = _compute(result, backend)
    except ContractError as error:
        raise CaptureError(f"{path}: the recorded call is not one of {op.name}: {error}") from None
    missing = recorded.keys() - recomputed.keys()
    if missing:
        raise CaptureError(f"{path}: {op.name} has no output {', '.join(sorted(missing))} for the recorded call")
    recomputed = {name: recomputed[name].cpu() for name in recorded}
    differences = {name: _difference(value, recomputed[name]) for name, value in recorded.items()}
    return Replay(op.name, args, recorded, recomputed, differences, result)


def _compute(recording: Recording, backend: str) -> dict[str, torch.Tensor]:
    """Returns the outputs of a recorded call, computed again by `backend`, by name."""
    op, args = recording.op, recording.args
    bound = bind(op, args, strict=False, check_content=False)  # the call has run, so limits do not matter
    call = complete_call(op, bound, recording.seed, args.get("offset"))
    if recording.upstream:
        backward = backward_of(call, recording.saved, recording.upstream)
        if backward is None and not hasattr(call, "gradients"):
            raise CaptureError(f"{op.name}: a backward that cannot be computed from what was recorded")
        if backward is None:
            return _gradients(call, recording, backend)
        call = backward
    return _run(call, backend)


def _run(call: Lowered, backend: str) -> dict[str, torch.Tensor]:
    results: dict[str, torch.Tensor] = call.results()
    compute(call, results, backend)
    return results


def _gradients(call: Any, recording: Recording, backend: str) -> dict[str, torch.Tensor]:
    """Returns the gradients of a recorded call, by name, computed by call.gradients() with the back end `backend`."""
    try:
        given = call.gradients(recording.saved, recording.upstream, lambda further: _run(further, backend))
    except KeyError as error:
        raise CaptureError(f"{recording.op.name}: the backward's file lacks {error}") from None
    return {gradient_name(recording.op, name): t for name, t in given.items()}


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    one, other = one.double(), other.double()
    same = (one == other) | (one.isnan() & other.isnan())
    apart = (one - other).abs().nan_to_num(nan=float("inf"), posinf=float("inf")).masked_fill(same, 0.0)
    return float(apart.max()) if apart.numel() else 0.0
