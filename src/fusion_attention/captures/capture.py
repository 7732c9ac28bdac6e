"""capture(): saves the attention calls of any code to files; judging/replay.py computes saved calls again.

A saved call is one .safetensors file: inputs and outputs by the operator's names, everything else as JSON in metadata.
"""

import inspect
import json
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from fusion_attention.captures.gradients import SAVED, UPSTREAM, watch
from fusion_attention.captures.reader import FORMAT, OUTPUT, VERSION, packed_bits
from fusion_attention.captures.result_names import BACKWARD, FORWARD, returned
from fusion_attention.contract import Array, Op, Tensor, Tensors
from fusion_attention.ir.dropout import draw_seed
from fusion_attention.ir.mask import Band
from fusion_attention.npu import fused_inference, sparse, training, training_call
from fusion_attention.ops import RECORDS
from fusion_attention.ops.training.forward_backward import RESULTS
from fusion_attention.patches import Changes, Counted, Layer
from fusion_attention.torch_ops import attention_forward, dispatch

__all__ = ["capture"]

_INTERFACES = (training, fused_inference, sparse)
# Every call of this library runs one of these functions (module, name), which an active capture() replaces. So calls
# outside a capture() are not slower.
HOOKED = (
    (training_call, "forward"),
    (training_call, "backward"),
    (attention_forward, "forward"),
    (dispatch, "results"),
)


class capture(Counted):
    """Saves every attention call (inputs and outputs) inside a block or a function, each as one file in a folder.

    Calls of functions of fusion_attention and fusion_attention.npu (and of its installed module torch_npu) are saved in
    every thread, however the functions were imported. Calls of a real torch_npu are saved if the program calls the
    functions as attributes of the module. Compiled calls, failing calls, and calls on device meta are not saved.
    Several captures may be active at the same time, also for one folder, and may end in any order.

    Args:
        path: the folder, created if it does not exist. Files are named 0000-npu_fusion_attention.safetensors and so on,
            with numbers after those of existing files; 10000 follows 9999. Existing files are never overwritten, also
            if several processes write to one folder.

    Attributes:
        files: paths of the files written so far.

    Source: this library.

    Example:
        >>> import tempfile
        >>> from fusion_attention import replay
        >>> q = torch.randn(1, 16, 2, 64)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with capture(folder) as recorded:
        ...         out = training.npu_fusion_attention(q, q, q, 2, "BSND", scale=0.125)[0]
        ...     again = replay(recorded.files[0], backend="golden")
        >>> again.operator, again.worst < 1e-5
        ('npu_fusion_attention', True)
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = Path(path).absolute()  # the program may change its working directory
        self.files: list[Path] = []
        self.numbers = count()

    def begin(self, changes: Changes) -> None:
        """Replaces the functions whose calls are saved, at the entry of this capture's first block; changes: undoes
        it."""
        self.path.mkdir(parents=True, exist_ok=True)
        same_folder = [other for other in _recorders if other.path.resolve() == self.path.resolve()]
        # Numbers have at most twelve digits.
        numbers = (re.match(r"([0-9]{4,12})-.*\.safetensors$", file.name) for file in self.path.iterdir())
        first = max((int(number[1]) for number in numbers if number), default=-1) + 1
        self.numbers = same_folder[0].numbers if same_folder else count(first)
        changes.after(_forget, self)
        _recorders.append(self)
        for owner, name, wrapper in _hooks(self):
            changes.wrap(owner, name, wrapper)

    def record(self, op: Op, args: Mapping[str, Any], outputs: Mapping[str, Any], seed: Any, backend: str) -> None:
        """Writes one operator call to a file, unless it is traced, on device meta, or this capture has ended (then a
        later capture still calls this one's wrapper).

        Args:
            op: the operator's definition.
            args: arguments by the definition's parameter names. outputs: results by name.
            seed: the seed of drawn dropout, or None.
            backend: the back end of the call.
        """

        def backward(upstream: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor]) -> None:
            if self in _recorders:
                above = {UPSTREAM + n: t for n, t in upstream.items()}
                self.write(op, args, gradients, int(seed or 0), backend, forward_tensors={**above, **saved})

        if self not in _recorders or dispatch.is_traced(args.values()):
            return
        with torch._C.DisableTorchFunction():  # modes must not see the operations that write the file
            if not any(isinstance(t, torch.Tensor) and t.is_meta for t in outputs.values()):
                self.write(op, args, outputs, int(seed or 0), backend)
                saved = {SAVED + n: t.detach() for n, t in outputs.items() if isinstance(t, torch.Tensor) and t.numel()}
                watch(op, args, outputs, backward)

    def write(
        self, op: Op, args: Mapping[str, Any], outputs: Mapping[str, Any], seed: int, backend: str,
        forward_tensors: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """Writes a call of `op` to a file, completely or not at all. args, outputs: arguments, results by name; seed:
        of dropout; forward_tensors: for a backward, results of the forward and their gradients, by prefixed name."""
        inputs = [p for p in op.params if not (isinstance(p, Tensor) and p.output)]
        given = {p.name: args.get(p.name) for p in inputs if args.get(p.name) is not None}
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        arrays = {p.name: _integers(given[p.name]) for p in op.params if isinstance(p, Array) and p.name in given}
        tensors = {name: value for name, value in tensors.items() if name not in arrays}
        several = [p.name for p in op.params if isinstance(p, Tensors) and isinstance(given.get(p.name), (list, tuple))]
        lists: dict[str, Any] = {name: given[name] for name in several}
        tensors |= {f"{name}[{i}]": value for name, result in lists.items() for i, value in enumerate(result)}
        results = {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor) and value.numel()}
        metadata = {
            "format": FORMAT,
            "version": str(VERSION),
            "operator": op.name,
            "attributes": {
                n: [getattr(v, field.name) for field in fields(v)] if isinstance(v, Band) else v
                for n, v in given.items()
                if n not in {*tensors, *arrays, *lists}
            },
            "arrays": arrays,
            "strides": {name: list(value.stride()) for name, value in tensors.items()},
            "bits": {n: list(t.shape) for n, t in tensors.items() if t.dtype == torch.bool},
            "outputs": list(results),
            "seed": seed,
            "library": sys.modules["fusion_attention"].__version__,
            "backend": backend,
        }
        content = tensors | {OUTPUT + name: value for name, value in results.items()} | dict(forward_tensors)
        text = {k: v if isinstance(v, str) else json.dumps(v) for k, v in metadata.items()}
        # The format stores contiguous tensors that share no memory.
        values = {n: t.detach().to("cpu", copy=True).contiguous() for n, t in content.items()}
        values |= {n: packed_bits(values[n]) for n in metadata["bits"]}  # one bit per element of a mask
        self._save(f"{op.name}-backward" if forward_tensors else op.name, values, text)

    def _save(self, name: str, values: dict[str, torch.Tensor], text: dict[str, str]) -> None:
        """Writes tensors and metadata to the next NUMBER-`name`.safetensors; a .part file reserves the number."""
        from safetensors.torch import save_file  # only writing needs this package

        while True:
            path = self.path / f"{next(self.numbers):04}-{name}.safetensors"
            unfinished, written = path.with_suffix(".part"), False
            try:
                unfinished.touch(exist_ok=False)
            except FileExistsError:
                continue
            except FileNotFoundError:
                message = f"capture: {self.path} no longer exists, so this call of {name} is not written"
                warnings.warn(message, stacklevel=2)
                return
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


def _integers(value: Any) -> list[int]:
    return [int(n) for n in (value.tolist() if isinstance(value, torch.Tensor) else value)]


_recorders: list[capture] = []  # the active captures


def _forget(recorder: capture) -> None:
    if recorder in _recorders:
        _recorders.remove(recorder)


def _hooks(recorder: capture) -> list[tuple[Any, str, Callable[[Layer], Any]]]:
    """Returns (module, attribute, wrapper) for every function that the capture `recorder` replaces to save calls;
    wrapper: a function from the replaced function to its replacement."""

    def training_of(names: tuple[str, ...]) -> Callable[[Layer], Any]:
        def wrap(layer: Layer) -> Any:
            def recorded(op: Op, args: dict[str, Any]) -> Any:
                results = layer.below(op, args)
                outputs = dict(zip(names, results, strict=True))
                recorder.record(op, args, outputs, outputs.get("seed", args.get("seed")), "auto")
                return results

            return recorded

        return wrap

    def attention_wrapper(layer: Layer) -> Any:
        def recorded(args: dict[str, Any], backend: str, *, stats: bool) -> Any:
            if not layer.on or dispatch.is_traced(args.values()):
                return layer.below(args, backend, stats=stats)
            drawn = isinstance(args["keep_prob"], float) and args["keep_prob"] < 1 and args["drop_bits"] is None
            if drawn and args["seed"] is None:
                args["seed"] = draw_seed()
            results = layer.below(args, backend, stats=True)
            recorder.record(RECORDS["attention"], args, dict(zip(RESULTS, results, strict=True)), args["seed"], backend)
            return results

        return recorded

    def lowered(layer: Layer) -> Any:
        def recorded(op: Op, args: dict[str, Any], backend: str = "auto", **how: bool) -> Any:
            if op.repeats:
                how["complete"] = True  # statistics are saved, also if the caller did not request them
            results = layer.below(op, args, backend, **how)
            recorder.record(op, args, results, 0, backend)
            return results

        return recorded

    wrappers = (training_of(FORWARD), training_of(BACKWARD), attention_wrapper, lowered)
    hooks: list[Any] = [(*place, wrapper) for place, wrapper in zip(HOOKED, wrappers, strict=True)]
    foreign = sys.modules.get("torch_npu")
    if foreign is not None and vars(foreign).get("npu_fusion_attention") is not training.npu_fusion_attention:
        ours = {name: getattr(module, name) for module in _INTERFACES for name in module.__all__ if name in RECORDS}
        both = [(name, function) for name, function in ours.items() if hasattr(foreign, name)]
        hooks += [(foreign, name, _foreign(recorder, name, function)) for name, function in both]
    return hooks


def _foreign(recorder: capture, name: str, ours: Any) -> Callable[[Layer], Any]:
    """Returns the wrapper that saves calls of function `name` of a real torch_npu in the capture `recorder`; ours: this
    library's function of this name, whose signature gives the argument names."""
    op = RECORDS[name]
    signature = inspect.signature(ours)
    returns = returned(op)

    def wrap(layer: Layer) -> Any:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            results = layer.below(*args, **kwargs)
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            several = results if isinstance(results, tuple) else (results,)
            outputs = dict(zip(returns, several, strict=False))  # older releases return fewer
            by_name = {p.name: given.arguments[p.shown] for p in op.params if p.shown in given.arguments}
            recorder.record(op, by_name, outputs, outputs.get("seed", by_name.get("seed")), "torch_npu")
            return results

        return recorded

    return wrap
