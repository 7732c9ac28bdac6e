"""Makes calls from a file's tensors: matches the file's names to the parameters and results of an operator."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fusion_attention.captures.result_names import returned
from fusion_attention.contract import Array, Attr, Op, Param
from fusion_attention.ir.mask import Band
from fusion_attention.judging.calls import JudgeError, MissingError, Recorded, operator_of, recorded
from fusion_attention.judging.lower_backward import LSE, gradients_of, upstream_of

Tensor = torch.Tensor
OUTPUT = "output."  # prefix of a result's name if a parameter has the same name
FLASH_LSE = "softmax_lse"  # flash-attn's name of the result lse
_LOW = ("bfloat16", "float16")
_BANDS = "full, causal, window(left, right) or prefix_causal([keys of each sequence])"
_SHOWN = 24  # largest number of names in a message


@dataclass(frozen=True)
class Reading:
    """Options for reading files that capture() did not write: operator, names of tensors, further arguments, dtype."""

    operator: str = ""  # the operator's name
    # {name of a parameter or result: name in the file}; "output.<result>" for a result with the name of a parameter.
    names: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)  # arguments that the file does not contain
    seed: int = 0  # seed of dropout
    unsafe_pickle: bool = False  # True if reading a pickle may execute code
    pick: str = ""  # only calls of a dump whose names contain this text are read
    # Dtype of the call, if files store its values as float32 ("bfloat16", which numpy lacks); "": unchanged.
    dtype: str = ""


def listed(names: Any) -> str:
    """Returns the names, sorted and joined by commas, at most 24; "none" without names."""
    every = sorted(names)
    more = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return (", ".join(every[:_SHOWN]) or "none") + more


class _Names:
    """The names of an operator's parameters, results and gradients."""

    def __init__(self, op: Op) -> None:
        self.op = op
        self.results, self.gradients = results_of(op), gradients_of(op)
        self.inputs = {p.shown for p in op.params} | {p.name for p in op.params} | set(upstream_of(op))

    def __str__(self) -> str:
        inputs = [p.shown for p in self.op.params if not getattr(p, "output", False)]
        names = dict.fromkeys((*upstream_of(self.op), *self.gradients.values()))
        more = f"; of its backward {', '.join(names)}" if self.gradients else ""
        return f"it has {', '.join(inputs)}; results {', '.join(self.results)}{more}"

    def target(self, name: str) -> str:
        """Returns the operator's parameter that a name denotes, or "output." and the result; "" for other names."""
        result = name.removeprefix(OUTPUT)
        result = LSE if result == FLASH_LSE and LSE in self.results else result
        if result in self.results or result in self.gradients:
            return OUTPUT + result
        return name if name in self.inputs else ""

    def of(self, name: str, content: Mapping[str, Any]) -> str:
        """Returns the parameter that a name in a file denotes, or "output." and the result; "" for other names. The
        part after the last dot counts as the name if no other name in `content`, the file's tensors and values, ends
        with it."""
        last = name.rpartition(".")[2]
        alone = sum(other.rpartition(".")[2] == last for other in content) == 1
        return self.target(name) or (self.target(last) if alone else "")


def named(path: Path, content: Mapping[str, Any], how: Reading) -> Iterator[Recorded]:
    """Yields the calls of an operator in a file: the forward, and the backward if the file has gradients.

    Args:
        path: the file, for messages.
        content: the file's tensors and values, by their names in the file. They are those of the operator's parameters
            and results; of a name with dots (of a nested dict), the part after the last dot is used if no other name
            ends with it. Other names are ignored, with a note.
        how: the operator, further names and arguments.
    """
    if not how.operator:
        raise JudgeError(f"{path}: not a capture: say which operator it is a call of (--op); it has {listed(content)}")
    names = _Names(operator_of(how.operator))
    given: dict[str, Any] = {}
    for name, source in how.names.items():
        if not names.target(name):
            raise JudgeError(f"{path}: {names.op.name} has no parameter {name} and no such result ({names})")
        if source not in content:
            raise JudgeError(f"{path}: has no tensor {source!r} (it has {listed(content)})")
        given[names.target(name)] = _laid(names.op, name, content[source], how)
    alone = []
    for source in sorted(content.keys() - set(how.names.values())):
        target = names.of(source, content)
        if target:
            given.setdefault(target, _laid(names.op, source, content[source], how))
        else:
            alone.append(source)
    note = f"left alone: {listed(alone)} (no name of {names.op.name}'s; --map PARAMETER=NAME gives one)"
    try:
        yield from _calls(path.name, names, given, how, (note,) if alone else ())
    except MissingError as error:
        raise JudgeError(f"{path}: {error}; the file has {listed(content)} (--map PARAMETER=NAME)") from None


def _calls(
    source: str, names: _Names, given: Mapping[str, Any], how: Reading, notes: tuple[str, ...]
) -> Iterator[Recorded]:
    op = names.op
    outputs = {name.removeprefix(OUTPUT): value for name, value in given.items() if name.startswith(OUTPUT)}
    inputs = {name: value for name, value in given.items() if not name.startswith(OUTPUT)}
    inputs |= {name: value_of(op, name, value) for name, value in how.values.items()}
    for name, value in outputs.items():
        if not isinstance(value, Tensor):
            raise JudgeError(f"{op.name}: {name}: expected a tensor, got {type(value).__name__}")
    gradients = {name: outputs.pop(name) for name in names.gradients if name in outputs and name not in names.results}
    upstream = {name: inputs.pop(name) for name in upstream_of(op) if name in inputs}
    if gradients and not upstream:
        needed = " or ".join(upstream_of(op))
        raise MissingError(
            f"{op.name}: {listed(gradients)} cannot be judged without the gradient of a result: {needed}"
        )
    if outputs or not gradients:
        idle = f"left alone: {listed(upstream)} (no gradient of an input to judge)"
        idles = (idle,) if upstream and not gradients else ()
        yield of_call(op, inputs, outputs, how, f"{source}: forward" if gradients else source, (*notes, *idles))
    if gradients:
        results = {name: value for name, value in outputs.items() if name in returned(op)}
        inputs = {**inputs, **results, **upstream}
        source, notes = (f"{source}: backward", ()) if outputs else (source, notes)
        yield of_call(op, inputs, gradients, how, source, notes)


def _laid(op: Op, name: str, value: Any, how: Reading) -> Any:
    """Returns a value from a file in the form that operator `op` takes: a number for a tensor of one element if the
    parameter is a number; flash-attn's softmax_lse [N, T] (heads, packed tokens) as [T, N]. name: of a parameter or
    result, perhaps after a prefix that ends with a dot; how: reading options, with further arguments of the call."""
    last, packed = name.rpartition(".")[2], how.values.get(op.layout_attr or "", "") == "TND"
    if last == FLASH_LSE and FLASH_LSE not in results_of(op) and packed and value.dim() == 2:
        return value.mT  # flash-attn's is [N, T]
    if isinstance(value, Tensor) and isinstance(_parameter(op, last), Attr) and value.numel() == 1:
        return value.item()
    return value if isinstance(value, Tensor) else value_of(op, last, value)


def _parameter(op: Op, name: str) -> Param | None:
    return next((p for p in op.params if name in (p.shown, p.name)), None)


def value_of(op: Op, name: str, value: Any) -> Any:
    """Converts a text to the value of the operator's parameter `name`; returns other values unchanged. Of a mask
    parameter, "causal" or "window(63, 0)" becomes a Band; of a list of lengths, "100,150" becomes [100, 150]."""
    p = _parameter(op, name)
    if isinstance(p, Attr) and p.type is Band:
        return value if value is None else _band(f"{op.name}: {p.shown}", value)
    if isinstance(p, Array) and isinstance(value, str):
        try:
            return [int(n) for n in value.split(",")]
        except ValueError:
            raise JudgeError(f"{op.name}: {p.shown}: expected numbers like 100,150, got {value!r:.80}") from None
    return value


def _band(who: str, value: Any) -> Band:
    """Returns the Band (range of visible keys) of a text such as causal, window(63, 0) or Band.causal(align="start"),
    without executing it. Raises a JudgeError that begins with `who`, the parameter, for other values."""
    refused = JudgeError(f"{who}: expected {_BANDS}, got {str(value)[:80]!r}")
    if isinstance(value, Band):
        return value
    try:
        call = ast.parse(value, mode="eval").body if isinstance(value, str) and len(value) < 10_000 else None
        arguments, keywords = (call.args, call.keywords) if isinstance(call, ast.Call) else ([], [])
        head = call.func if isinstance(call, ast.Call) else call
        name = head.attr if isinstance(head, ast.Attribute) else head.id if isinstance(head, ast.Name) else ""
        if name not in ("full", "causal", "window", "prefix_causal"):
            raise refused
        positional = [ast.literal_eval(a) for a in arguments]
        band: Band = getattr(Band, name)(*positional, **{k.arg or "": ast.literal_eval(k.value) for k in keywords})
    except (SyntaxError, TypeError, ValueError, MemoryError, RecursionError):
        raise refused from None
    return band


def results_of(op: Op) -> tuple[str, ...]:
    """Returns the names of an operator's results, with "lse" (max + log(sum)) for functions of this library."""
    results = tuple(dict.fromkeys((*returned(op), *(p.name for p in op.tensors(output=True)))))
    return (*results, LSE) if {"max", "sum"} <= set(results) else results


def of_call(
    op: Op, inputs: dict[str, Any], outputs: dict[str, Tensor], how: Reading, source: str, notes: tuple[str, ...] = ()
) -> Recorded:
    """Returns a recorded call of operator op whose tensors a file stores, perhaps in a larger dtype, such as float32.
    With how.dtype, float32 tensors become that dtype again if no value changes. Without it, a note asks for it if
    every float32 input would fit a smaller dtype. inputs, outputs: by name; source: the file; notes: further notes."""
    words = {name: getattr(p, "dtypes", "") for p in op.params for name in (p.shown, p.name)}
    free = {n: v for n, v in inputs.items() if isinstance(v, Tensor) and words.get(n) != "float32"}
    if how.dtype:
        if how.dtype not in _LOW:
            raise JudgeError(f"--dtype: expected one of {', '.join(_LOW)}, got {how.dtype!r}")
        inputs = {**inputs, **{n: _narrowed(v, how.dtype) for n, v in free.items()}}
        outputs = {n: _narrowed(t, how.dtype) for n, t in outputs.items()}
    result = recorded(op.name, inputs, outputs, seed=how.seed, source=source)
    float32_inputs = [t for t in free.values() if t.dtype == torch.float32]
    fits = (d for d in _LOW if all(_narrowed(t, d).dtype != torch.float32 for t in float32_inputs))
    low = next(fits, "") if float32_inputs and not how.dtype else ""
    if low:
        note = f"every float32 value of the inputs is a {low} number: was it a call in {low}? Then say --dtype {low}"
        notes = (*notes, note)
    return replace(result, notes=(*result.notes, *notes))


def _narrowed(t: Tensor, dtype: str) -> Tensor:
    """Returns a float32 tensor in a smaller dtype if that is exact, else unchanged."""
    if t.dtype != torch.float32:
        return t
    low = t.to(getattr(torch, dtype))
    return low if torch.equal(low.float(), t) else t
