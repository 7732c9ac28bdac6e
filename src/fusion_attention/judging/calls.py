"""A recorded call of any operator with its outputs, which can be checked and be computed again by a back end."""

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fusion_attention.backends import load
from fusion_attention.captures import gradients as captured
from fusion_attention.captures.reader import Recording
from fusion_attention.captures.result_names import returned
from fusion_attention.contract import (
    REQUIRED,
    Array,
    Attr,
    BackendError,
    ContractError,
    ContractWarning,
    Op,
    Tensors,
    bind,
)
from fusion_attention.judging import lower_backward
from fusion_attention.ops import RECORDS
from fusion_attention.plan import compute

Tensor = torch.Tensor
BACKENDS = ("cpu", "triton", "golden")
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
# Bytes; golden does not compute calls that need more memory. The judge's formulas need little: they compute blocks.
BUFFER = 1 << 29


class JudgeError(ValueError):
    """The error for a recorded call that is invalid, or whose outputs are not those of the operator."""


class MissingError(JudgeError):
    """The error for a recorded call that lacks a required argument or all outputs."""


@dataclass(frozen=True, eq=False)
class Recorded:
    """A call of an operator with its results, read from a file or a program."""

    op: Op  # the operator definition
    # args, outputs: arguments and results by parameter name.
    args: dict[str, Any]
    outputs: dict[str, Tensor]
    seed: int = 0  # seed of dropout
    source: str = ""  # the file that the call was read from, or ""
    notes: tuple[str, ...] = ()  # remarks for the report
    # saved, upstream: of a backward, the forward's results (statistics may be absent) and their gradients.
    saved: Mapping[str, Tensor] = field(default_factory=dict)
    upstream: Mapping[str, Tensor] = field(default_factory=dict)
    # Results of this object's methods, stored because they are used several times.
    cached: dict[str, Any] = field(default_factory=dict)

    def bound(self) -> Any:
        """Returns the recorded arguments, checked against the operator's definition once, with derived sizes."""
        if "bound" not in self.cached:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", ContractWarning)
                    self.cached["bound"] = bind(self.op, self.args, strict=False, check_content=False)
            except ContractError as error:
                raise JudgeError(f"not a call of {self.op.name}: {'; '.join(str(error).splitlines())}") from None
        return self.cached["bound"]

    def lowered(self) -> Any:
        """Returns the call's parameters, lengths and tensors as back ends read them, with all results; those of the
        backward if gradients of results were recorded."""
        call = captured.complete_call(self.op, self.bound(), self.seed, self.args.get("offset"))
        if not self.upstream:
            return call
        if lower_backward.is_training(call) and not lower_backward.names_of(call).keys() <= self.saved.keys():
            if "backward" not in self.cached:
                self.cached["backward"] = lower_backward.backward_of(call, *self._beside(call))
            return self.cached["backward"]
        backward = captured.backward_of(call, self.saved, self.upstream)
        if backward is None:
            raise JudgeError(f"{self.op.name}: a backward that cannot be judged from what was recorded")
        return backward

    def _beside(self, call: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns (saved results, gradients of results) by name, checked against the shapes of the forward `call`'s
        results and converted to their dtypes."""
        call_results, names = lower_backward.with_kernel_statistics(call).results(), lower_backward.names_of(call)
        result: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
        for given, checked, prefix in zip((self.saved, self.upstream), result, ("", "gradient of "), strict=True):
            for name, t in given.items():
                want = call_results[names[name]]
                if t.shape != want.shape or not t.is_floating_point():
                    raise JudgeError(
                        f"{self.op.name}: {prefix}{name}: expected {_described(want)}, got {_described(t)}"
                    )
                checked[name] = t.to(want.dtype).contiguous()
        return result

    def judgeable(self, lowered: Any) -> dict[str, Tensor]:
        """Returns the recorded outputs that have a formula to judge them by, by name, in the dtypes of the results of
        `lowered`, the call as back ends read it.

        Raises:
            JudgeError: an output has the wrong shape or kind, or the operator has no output of its name.
        """
        call_results = with_lse(lowered.results())
        unknown = sorted(self.outputs.keys() - call_results.keys() - {p.name for p in self.op.tensors(output=True)})
        unknown = [name for name in unknown if name not in returned(self.op)]
        if unknown:
            backward = not self.upstream and {*unknown} <= lower_backward.gradients_of(self.op).keys()
            advice = f"; gradients need {lower_backward.DOUT} among the inputs" if backward else ""
            names = f"it has {', '.join(call_results)}{advice}"
            raise JudgeError(f"{self.op.name} has no output {', '.join(unknown)} ({names})")
        results = {
            n: t for n, t in self.outputs.items() if n in call_results and (t.numel() or call_results[n].numel())
        }
        if not results:
            raise JudgeError(f"{self.op.name}: no output to judge (it has {', '.join(call_results)})")
        for name, t in results.items():
            want = call_results[name]
            if t.shape != want.shape or _kind(t) != _kind(want):
                got = _described(t) if t.numel() else f"nothing ({_described(t)})"
                turned = t.shape != want.shape and sorted(t.shape) == sorted(want.shape)
                advice = " (axes in another order: transpose it, or give the layout that inputs have)" if turned else ""
                raise JudgeError(f"{self.op.name}: output {name}: expected {_described(want)}, got {got}{advice}")
            if t.is_floating_point():
                results[name] = t.to(want.dtype)
        return results

    def unjudged(self, names: Collection[str]) -> dict[str, str]:
        """Returns the reason why an output is not judged, by name, for each output that is not in `names`."""
        others = [name for name, t in self.outputs.items() if name not in names and t.numel()]
        return dict.fromkeys(others, "the judge has no formula for it, or the call does not ask for it")

    def doubts(self) -> tuple[str, ...]:
        """Returns the errors of a strict check of arguments and their contents; none prevents the computation."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ContractWarning)
                bind(self.op, self.args, strict=True, check_content=True)
        except ContractError as error:
            return tuple(str(error).splitlines())
        return ()

    def computed(self, backend: str, names: Mapping[str, Tensor]) -> dict[str, Tensor] | str:
        """Returns the outputs named in `names`, computed on this machine, or the reason why the back end cannot compute
        them. backend: "cpu", "triton" (GPU), or "golden" (the float64 reference)."""
        call = self.lowered()
        try:
            reasons = load(backend).reasons_against(call.problem, call.device)
        except (ImportError, BackendError) as error:
            return str(error).splitlines()[0]
        if reasons:
            return "; ".join(reasons)
        if backend == "golden":
            needed = load("golden").workspace_bytes(call.problem, call.extents, call.op_kind)
            if needed > BUFFER:
                return f"left out: it would take {needed / 2**30:.1f} GiB (the formulas judge piece by piece)"
        results: dict[str, Tensor] = call.results()
        try:
            compute(call, results, backend)
        except (BackendError, ImportError, MemoryError) as error:
            return str(error).splitlines()[0]
        return {name: t for name, t in with_lse(results).items() if name in names}


def from_recording(recording: Recording, source: str = "") -> Recorded:
    """Returns a recorded call, read from a file that capture() wrote; source: the file's name, for reports."""
    outputs = {n: t.cpu().contiguous() for n, t in recording.outputs.items()}
    return Recorded(
        recording.op, recording.args, outputs, recording.seed, source, (), recording.saved, recording.upstream
    )


def operator_of(name: str) -> Op:
    """Returns the definition (parameters, results, rules) of an operator; raises JudgeError for an unknown name."""
    if not isinstance(name, str):
        raise JudgeError(f"operator: expected a name, got {type(name).__name__}")
    if name not in RECORDS:
        near = ", ".join(n for n in RECORDS if name.lower() in n.lower() or n.lower() in name.lower())
        raise JudgeError(f"operator {name!r} has no definition here" + (f" (did you mean {near}?)" if near else ""))
    return RECORDS[name]


def recorded(
    operator: str, inputs: Mapping[str, Any], outputs: Mapping[str, Tensor], *, seed: int = 0, source: str = ""
) -> Recorded:
    """Makes a recorded call from an operator's name, its arguments and its results; computes nothing.

    Args:
        operator: the operator's name.
        inputs: arguments by name, as in the operator's definition or in the public function.
        outputs: results by name, or gradients if the inputs include the gradient of a result.
        seed: seed of dropout.
        source: the name of a file, for reports; "" without one.

    Raises:
        JudgeError: an unknown operator or argument, or no output.
    """
    op = operator_of(operator)
    for what, given in (("inputs", inputs), ("outputs", outputs)):
        if not isinstance(given, Mapping):
            raise JudgeError(f"{operator}: {what}: expected tensors by name, got {type(given).__name__}")
    saved, upstream, inputs = _of_backward(op, inputs)
    shown = {p.shown: p.name for p in op.params} | {p.name: p.name for p in op.params}
    unknown = sorted(set(inputs) - shown.keys())
    if unknown:
        raise JudgeError(
            f"{operator} has no parameter {', '.join(unknown)} (it has {', '.join(p.shown for p in op.params)})"
        )
    args = {shown[name]: _value(op, shown[name], value) for name, value in inputs.items() if value is not None}
    names = lower_backward.gradients_of(op) if upstream else {}
    results = {names.get(name, name): torch.empty(0) if t is None else t for name, t in outputs.items()}
    result = {name: _in_memory(f"{operator}: output {name}", t).contiguous() for name, t in results.items()}
    required = [p for p in op.params if not p.optional and not getattr(p, "output", False)]
    required = [p for p in required if not isinstance(p, Attr) or p.default is REQUIRED]
    missing = [p.shown for p in required if p.name not in args]
    lacks = [f"the call lacks {', '.join(missing)}"] if missing else []
    if not any(t.numel() for t in result.values()):
        lacks.append(f"no output to judge (results: {', '.join(op.results)})")
    if lacks:
        raise MissingError(f"{operator}: {'; '.join(lacks)}")
    return Recorded(op, args, result, seed, source, (), saved, upstream)


def _of_backward(op: Op, inputs: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor], Mapping[str, Any]]:
    """Splits a backward's arguments into (the forward's saved results, their gradients, other arguments), by name.
    inputs: the arguments of operator `op`. Without a gradient among them (a forward) the first two dicts are empty."""
    sources = lower_backward.upstream_of(op)
    upstream = {name: result for name, result in sources.items() if inputs.get(name) is not None}
    if not upstream:
        return {}, {}, {name: value for name, value in inputs.items() if name not in sources}
    results = {*op.results} - {p.name for p in op.params}
    beside = {name: _in_memory(f"{op.name}: {name}", inputs[name]) for name in {*results, *upstream} & inputs.keys()}
    saved = {name: t for name, t in beside.items() if name in results}
    others = {name: value for name, value in inputs.items() if name not in beside}
    return saved, {result: beside[name] for name, result in upstream.items()}, others


def _value(op: Op, name: str, value: Any) -> Any:
    p = op.by_name[name]
    if isinstance(p, Array):
        return [int(n) for n in (value.tolist() if hasattr(value, "tolist") else value)]
    who = f"{op.name}: {p.shown}"
    if isinstance(p, Tensors) and isinstance(value, (list, tuple)):
        return [_in_memory(who, t) for t in value]
    return _in_memory(who, value) if isinstance(value, Tensor) else value


def _in_memory(who: str, value: Any) -> Tensor:
    """Returns a dense tensor on the CPU, detached; raises a JudgeError, which begins with `who`, for other values."""
    if not isinstance(value, Tensor):
        raise JudgeError(f"{who}: expected a tensor, got {type(value).__name__}")
    if value.is_meta or value.is_quantized or value.is_nested or value.layout != torch.strided:
        what = "on device meta" if value.is_meta else "that is nested" if value.is_nested else f"of {value.layout}"
        what = f"of {value.dtype}" if value.is_quantized else what
        raise JudgeError(f"{who}: expected a dense tensor that holds its numbers, got one {what}")
    return value.detach().cpu()


def with_lse(results: dict[str, Tensor]) -> dict[str, Tensor]:
    """Adds lse = max + log(sum) to results, tensors by name, that have softmax statistics "max" and "sum"."""
    if not {"max", "sum"} <= results.keys():
        return results
    return results | {lower_backward.LSE: results["max"] + results["sum"].log()}


def _described(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}"


def _kind(t: Tensor) -> str:
    if t.is_floating_point():
        return "floating"
    return "integer" if t.dtype in _INTEGERS else str(t.dtype)
