"""Calls recorded to files: capture() around any code; replay.py computes them again, on any machine.

A capture is one .safetensors file: tensors by the record's parameter names, everything else as JSON in its metadata.
Refuses to know what an operator computes.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ContextDecorator
from dataclasses import fields
from itertools import count
from pathlib import Path
from typing import Any

import torch

from fusion_attention.api import attention
from fusion_attention.captures.replay import FORMAT, OUTPUT, VERSION, CaptureError, Replay, replay
from fusion_attention.contract import Array, Op, Tensor, Tensors
from fusion_attention.npu import fused_inference, indexer_loss, inference, sparse, training, training_call
from fusion_attention.ops import RECORDS
from fusion_attention.torch_ops import dispatch
from fusion_attention.waist.dropout import draw_seed

__all__ = ["CaptureError", "Replay", "capture", "replay"]

FORWARD = ("attention_out", "softmax_max", "softmax_sum", "softmax_out", "seed", "offset", "numels")
BACKWARD = ("dq", "dk", "dv", "dq_rope", "dk_rope", "dpse", "dsink")
OWN = ("out", "max", "sum")
# What torch_npu's functions return, by how they are called there.
_RETURNS: dict[str, tuple[str, ...]] = {
    "_grad": ("dq", "dk", "dv", "dpse", "dsink"),
    "_grad_v2": ("dq", "dk", "dv", "dpse", "dq_rope", "dk_rope", "dsink"),
    "_grad_v3": ("dq", "dk", "dv", "dpse", "dsink"),
    "npu_incre_flash_attention": ("attention_out",),
}
_FACES = (training, inference, fused_inference, sparse, indexer_loss)
# Every call passes one of these functions. Captures replace them while they record, rather than have them ask for a
# recorder: as long as nobody records, a call is not slower, and those of a real torch_npu can only be replaced.
PLACES = ((training_call, "forward"), (training_call, "backward"), (attention, "forward"), (dispatch, "results"))


class capture(ContextDecorator):
    """Records every attention call inside a block or a function, each as one file in a folder.

    Recorded are the functions of fusion_attention.npu (and so those of an installed `torch_npu`) and of
    fusion_attention, in every thread and however they were imported; and those of a real torch_npu, as attributes of
    its module. What torch.compile has compiled, a call that fails, and one on the meta device is not recorded. Several
    captures may record at once, in one folder too, and end in any order.

    Args:
        path: the folder; made if absent. Files are named 0000-npu_fusion_attention.safetensors and so on, behind those
            that are there; behind 9999 come 10000, 10001, ... A file that is there is never written over, whoever
            else writes to the folder.

    Attributes:
        files: the files written so far.

    Example:
        >>> import tempfile
        >>> q = torch.randn(1, 16, 2, 64)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with capture(folder) as recorded:
        ...         out = training.npu_fusion_attention(q, q, q, 2, "BSND", scale=0.125)[0]
        ...     again = replay(recorded.files[0], backend="golden")
        >>> again.operator, again.worst < 1e-5
        ('npu_fusion_attention', True)
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()  # a program may change its folder meanwhile
        self.files: list[Path] = []
        self._entered = 0
        self.numbers = count()

    def __enter__(self) -> capture:
        """Starts recording; an object that records already only counts how often it was entered."""
        with _LOCK:
            if not self._entered:
                self.path.mkdir(parents=True, exist_ok=True)
                _begin(self)
            self._entered += 1
        return self

    def __exit__(self, *_: object) -> None:
        """Ends recording, once it was called as often as __enter__()."""
        with _LOCK:
            if self._entered == 1:
                _end(self)
            self._entered = max(self._entered - 1, 0)

    def write(self, op: Op, args: Mapping[str, Any], outputs: Mapping[str, Any], seed: int, backend: str) -> None:
        """Writes one call; a file appears whole or not at all."""
        inputs = [p for p in op.params if not (isinstance(p, Tensor) and p.output)]  # room for results is none
        given = {p.name: args.get(p.name) for p in inputs if args.get(p.name) is not None}
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        arrays = {p.name: _integers(given[p.name]) for p in op.params if isinstance(p, Array) and p.name in given}
        tensors = {name: value for name, value in tensors.items() if name not in arrays}
        several = [p.name for p in op.params if isinstance(p, Tensors) and isinstance(given.get(p.name), (list, tuple))]
        lists: dict[str, Any] = {name: given[name] for name in several}
        tensors |= {f"{name}[{i}]": value for name, found in lists.items() for i, value in enumerate(found)}
        results = {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor) and value.numel()}
        metadata = {
            "format": FORMAT,
            "version": str(VERSION),
            "operator": op.name,
            "attributes": {n: _plain(v) for n, v in given.items() if n not in {*tensors, *arrays, *lists}},
            "arrays": arrays,
            "strides": {name: list(value.stride()) for name, value in tensors.items()},
            "outputs": list(results),
            "seed": seed,
            "library": sys.modules["fusion_attention"].__version__,
            "backend": backend,
        }
        content = tensors | {OUTPUT + name: value for name, value in results.items()}
        text = {k: v if isinstance(v, str) else json.dumps(v) for k, v in metadata.items()}
        # A file holds values in order, and none of them twice: views and shared memory end here.
        values = {n: t.detach().to("cpu", copy=True).contiguous() for n, t in content.items()}
        self._save(op.name, values, text)

    def _save(self, name: str, values: dict[str, torch.Tensor], text: dict[str, str]) -> None:
        """Writes a file under the next free number; an unfinished file of its name holds it meanwhile."""
        from safetensors.torch import save_file  # a machine that records nothing needs no safetensors

        while True:
            path = self.path / f"{next(self.numbers):04}-{name}.safetensors"
            unfinished, written = path.with_suffix(".part"), False
            try:
                unfinished.touch(exist_ok=False)
            except FileExistsError:
                continue
            try:
                if not path.exists():
                    save_file(values, unfinished, text)
                    unfinished.replace(path)
                    written = True
            finally:
                if not written:
                    unfinished.unlink()
            if written:
                self.files.append(path)
                return


def _first_number(folder: Path) -> int:
    """One more than any file of the folder has; what has more than twelve digits is a name like any other."""
    numbers = (re.match(r"([0-9]{4,12})-.*\.safetensors$", file.name) for file in folder.iterdir())
    return max((int(number[1]) for number in numbers if number), default=-1) + 1


def _integers(value: Any) -> list[int]:
    return [int(n) for n in (value.tolist() if isinstance(value, torch.Tensor) else value)]


def _plain(value: Any) -> Any:
    """An attribute as JSON; a Band as the list of its fields."""
    if isinstance(value, (bool, int, float, str)):
        return value
    return [getattr(value, field.name) for field in fields(value)]


class _Recording:
    """From the first capture's begin to the last one's end: the recorders, and one wrapper around each place.

    A wrapper that somebody has wrapped again cannot be taken off: it stays below, and its recorders are none for ever.
    """

    def __init__(self) -> None:
        self.recorders: tuple[capture, ...] = ()
        self.changes: dict[tuple[Any, str], tuple[Any, Any]] = {}  # place -> (what was there, the wrapper)

    def wrap(self) -> None:
        """Wraps the places that are not: at the beginning all, later those of a torch_npu imported meanwhile."""
        for owner, name, wrapped in _places(self):
            if (owner, name) not in self.changes:
                before = getattr(owner, name)
                wrapper = wrapped(before)
                self.changes[owner, name] = before, wrapper
                setattr(owner, name, wrapper)

    def unwrap(self) -> None:
        """Takes the wrappers off."""
        while self.changes:
            (owner, name), (before, wrapper) = self.changes.popitem()
            if getattr(owner, name, None) is wrapper:
                setattr(owner, name, before)

    def write(self, op: Op, args: Mapping[str, Any], outputs: Mapping[str, Any], seed: Any, backend: str) -> None:
        """Has every recorder write one call, unless its tensors hold nothing: it is traced, or on the meta device."""
        if dispatch.is_traced(args.values()):
            return
        with torch._C.DisableTorchFunction():  # Modes have seen the call; writing it is not theirs.
            if not any(isinstance(t, torch.Tensor) and t.is_meta for t in outputs.values()):
                for recorder in self.recorders:
                    recorder.write(op, args, outputs, int(seed or 0), backend)


_LOCK = threading.RLock()  # a generator that the collector ends ends its capture wherever the collector came
_recording: _Recording | None = None


def _begin(recorder: capture) -> None:
    global _recording  # noqa: PLW0603  (faces have one state: recorded or not)
    found = _recording or _Recording()
    beside = [other for other in found.recorders if other.path.resolve() == recorder.path.resolve()]
    recorder.numbers = beside[0].numbers if beside else count(_first_number(recorder.path))
    _recording = found
    found.recorders += (recorder,)
    found.wrap()


def _end(recorder: capture) -> None:
    global _recording  # noqa: PLW0603
    assert _recording is not None
    _recording.recorders = tuple(other for other in _recording.recorders if other is not recorder)
    if not _recording.recorders:
        _recording.unwrap()
        _recording = None


def _places(recording: _Recording) -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """(module, attribute, what wraps it): everything that changes while calls are recorded."""

    def training_of(names: tuple[str, ...]) -> Callable[[Any], Any]:
        def wrap(function: Any) -> Any:
            def recorded(op: Op, args: dict[str, Any]) -> Any:
                results = function(op, args)
                outputs = dict(zip(names, results, strict=True))
                recording.write(op, args, outputs, outputs.get("seed", args.get("seed")), "auto")
                return results

            return recorded

        return wrap

    def own(function: Any) -> Any:
        def recorded(args: dict[str, Any], backend: str, *, stats: bool) -> Any:
            if not recording.recorders or dispatch.is_traced(args.values()):
                return function(args, backend, stats=stats)
            drawn = isinstance(args["keep_prob"], float) and args["keep_prob"] < 1 and args["drop_bits"] is None
            if drawn and args["seed"] is None:
                args["seed"] = draw_seed()
            results = function(args, backend, stats=True)
            recording.write(RECORDS["attention"], args, dict(zip(OWN, results, strict=True)), args["seed"], backend)
            return results

        return recorded

    def lowered(function: Any) -> Any:
        def recorded(op: Op, args: dict[str, Any], backend: str = "auto", **how: bool) -> Any:
            if op.again:
                how["whole"] = True  # Statistics are recorded, asked for or not.
            results = function(op, args, backend, **how)
            recording.write(op, args, results, 0, backend)
            return results

        return recorded

    wrappers = (training_of(FORWARD), training_of(BACKWARD), own, lowered)
    places: list[Any] = [(*place, wrapper) for place, wrapper in zip(PLACES, wrappers, strict=True)]
    foreign = sys.modules.get("torch_npu")
    if foreign is not None and vars(foreign).get("npu_fusion_attention") is not training.npu_fusion_attention:
        ours = {name: getattr(module, name) for module in _FACES for name in module.__all__ if name in RECORDS}
        both = [(name, function) for name, function in ours.items() if hasattr(foreign, name)]
        places += [(foreign, name, _foreign(recording, name, function)) for name, function in both]
    return places


def _foreign(recording: _Recording, name: str, ours: Any) -> Callable[[Any], Any]:
    """What wraps a function of a real torch_npu: arguments by our signature of it, which is the same."""
    op = RECORDS[name]
    signature = inspect.signature(ours)
    returns = op.results or _RETURNS.get(name.removeprefix("npu_fusion_attention"), FORWARD)

    def wrap(function: Any) -> Any:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            results = function(*args, **kwargs)
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            several = results if isinstance(results, tuple) else (results,)
            outputs = dict(zip(returns, several, strict=False))  # older releases return fewer
            by_name = {p.name: given.arguments[p.shown] for p in op.params if p.shown in given.arguments}
            recording.write(op, by_name, outputs, outputs.get("seed", by_name.get("seed")), "torch_npu")
            return results

        return recorded

    return wrap
