"""Calls recorded to files, and computed again: capture() around any code, replay() on any machine.

A capture is one .safetensors file: tensors by the record's parameter names, everything else as JSON in its metadata.
Refuses to know what an operator computes; replay() goes the way that the faces go.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import ContextDecorator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from fusion_attention import api, lowered_operators, operators
from fusion_attention.contract import Array, Attr, ContractError, Op, Tensors, bind
from fusion_attention.dropout import draw_seed
from fusion_attention.npu import indexer_loss, inference, sparse, training
from fusion_attention.ops import RECORDS, attention
from fusion_attention.plan import compute

FORMAT, VERSION = "fusion_attention.capture", 1
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
_FACES = (training, inference, sparse, indexer_loss)
_OUTPUT = "output."
_FIELDS = ("operator", "attributes", "arrays", "strides", "outputs", "seed", "library")


class CaptureError(ValueError):
    """A file that is no capture, or whose parts do not belong together."""


# ----------------------------------------------------------------------------------------------------------- recording


class capture(ContextDecorator):
    """Records every attention call inside a block or a function, each as one file in a folder.

    Recorded are the functions of fusion_attention.npu (and so those of an installed `torch_npu`) and of
    fusion_attention, in every thread and however they were imported; and those of a real torch_npu, as attributes of
    its module. What torch.compile has compiled, and a call that fails, is not recorded.

    Args:
        path: the folder; made if absent. Files are named 0000-npu_fusion_attention.safetensors and so on, behind those
            that are there.

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
        self.path = Path(path)
        self.files: list[Path] = []
        self._patched: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> capture:
        """Starts recording."""
        self.path.mkdir(parents=True, exist_ok=True)
        for owner, name, wrap in _places(self):
            self._patched.append((owner, name, getattr(owner, name)))
            setattr(owner, name, wrap(getattr(owner, name)))
        return self

    def __exit__(self, *_: object) -> None:
        """Ends recording."""
        while self._patched:
            setattr(*self._patched.pop())

    def write(self, op: Op, args: Mapping[str, Any], outputs: Mapping[str, Any], seed: int, backend: str) -> None:
        """Writes one call; a file appears whole or not at all."""
        taken = [int(p.name[:4]) for p in self.path.glob("[0-9][0-9][0-9][0-9]-*.safetensors")]
        path = self.path / f"{max(taken, default=-1) + 1:04}-{op.name}.safetensors"
        given = {p.name: args.get(p.name) for p in op.params if args.get(p.name) is not None}
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
        content = tensors | {_OUTPUT + name: value for name, value in results.items()}
        text = {k: v if isinstance(v, str) else json.dumps(v) for k, v in metadata.items()}
        unfinished = path.with_suffix(".part")
        # A file holds values in order, and none of them twice: views and shared memory end here.
        values = {n: t.detach().to("cpu", copy=True).contiguous() for n, t in content.items()}
        from safetensors.torch import save_file  # a machine that records nothing needs no safetensors

        save_file(values, unfinished, text)
        unfinished.replace(path)
        self.files.append(path)


def _integers(value: Any) -> list[int]:
    return [int(n) for n in (value.tolist() if isinstance(value, torch.Tensor) else value)]


def _plain(value: Any) -> Any:
    """An attribute as JSON; a Band as the list of its fields."""
    if isinstance(value, (bool, int, float, str)):
        return value
    return [getattr(value, field.name) for field in fields(value)]


def _places(recorder: capture) -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """(module, attribute, what wraps it): everything that capture() changes while it records."""

    def forward(function: Any) -> Any:
        def recorded(op: Op, args: dict[str, Any]) -> Any:
            results = function(op, args)
            if not operators.needed(args.values()):
                recorder.write(op, args, dict(zip(FORWARD, results, strict=True)), results[4], "auto")
            return results

        return recorded

    def backward(function: Any) -> Any:
        def recorded(op: Op, args: dict[str, Any]) -> Any:
            results = function(op, args)
            if not operators.needed(args.values()):
                recorder.write(op, args, dict(zip(BACKWARD, results, strict=True)), int(args.get("seed") or 0), "auto")
            return results

        return recorded

    def own(function: Any) -> Any:
        def recorded(args: dict[str, Any], backend: str, *, stats: bool) -> Any:
            if operators.needed(args.values()):
                return function(args, backend, stats=stats)
            drawn = isinstance(args["keep_prob"], float) and args["keep_prob"] < 1 and args["drop_bits"] is None
            if drawn and args["seed"] is None:
                args["seed"] = draw_seed()
            results = function(args, backend, stats=True)
            recorder.write(attention.RECORD, args, dict(zip(OWN, results, strict=True)), args["seed"] or 0, backend)
            return results

        return recorded

    places: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (training, "_forward", forward),
        (training, "_backward", backward),
        (api, "_attention", own),
        (lowered_operators, "results", lambda function: _lowered(recorder, function)),
    ]
    real = sys.modules.get("torch_npu")
    if real is not None and vars(real).get("npu_fusion_attention") is not training.npu_fusion_attention:
        functions = {name: getattr(module, name) for module in _FACES for name in module.__all__}
        here = [(name, function) for name, function in functions.items() if hasattr(real, name)]
        places += [(real, name, _foreign(recorder, name, function)) for name, function in here]
    return places


def _lowered(recorder: capture, function: Any) -> Any:
    """What wraps the one way of all records that name their results."""

    def recorded(op: Op, args: dict[str, Any], backend: str = "auto", **how: bool) -> Any:
        results = function(op, args, backend, **how)
        if not operators.needed(args.values()):
            recorder.write(op, args, results, 0, backend)
        return results

    return recorded


def _foreign(recorder: capture, name: str, ours: Any) -> Callable[[Any], Any]:
    """What wraps a function of a real torch_npu: arguments by our signature of it, which is the same."""
    op = RECORDS[name]
    signature = inspect.signature(ours)
    names = [p.name for p in op.params]
    returns = op.results or _RETURNS.get(name.removeprefix("npu_fusion_attention"), FORWARD)

    def wrap(function: Any) -> Any:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            results = function(*args, **kwargs)
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            several = results if isinstance(results, tuple) else (results,)
            outputs = dict(zip(returns, several, strict=False))  # older releases return fewer
            by_name = dict(zip(names, given.arguments.values(), strict=False))
            recorder.write(op, by_name, outputs, int(outputs.get("seed", by_name.get("seed")) or 0), "torch_npu")
            return results

        return recorded

    return wrap


# ------------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True, eq=False)
class Replay:
    """A recorded call and what it gives here.

    Attributes:
        operator: the record's name; args: its arguments by canonical name.
        recorded, recomputed: outputs by name.
        differences: the largest absolute difference of each output; inf where shapes or NaN places differ.
    """

    operator: str
    args: dict[str, Any]
    recorded: dict[str, torch.Tensor]
    recomputed: dict[str, torch.Tensor]
    differences: dict[str, float]

    @property
    def worst(self) -> float:
        """The largest of the differences; 0.0 where every output is equal."""
        return max(self.differences.values(), default=0.0)


def replay(path: str | Path, *, backend: str = "auto", device: str | torch.device = "cpu") -> Replay:
    """Computes a recorded call again and puts both results side by side.

    Drawn dropout is drawn again from the recorded seed; the bits are this library's, not the chip's.

    Args:
        path: a file that capture() wrote.
        backend: "auto", "cpu" or "golden".
        device: where to compute.

    Returns:
        A Replay.

    Raises:
        CaptureError: no capture, or one whose parts do not belong together.
        OSError: no such file.
        BackendError: no back end computes it.

    Example:
        >>> replay("nothing.safetensors")
        Traceback (most recent call last):
        FileNotFoundError: [Errno 2] No such file or directory: 'nothing.safetensors'
    """
    op, args, recorded, seed = _read(Path(path), torch.device(device))
    try:
        recomputed = _compute(op, args, seed, backend)
    except ContractError as error:
        raise CaptureError(f"{path}: the recorded call is not one of {op.name}: {error}") from None
    missing = recorded.keys() - recomputed.keys()
    if missing:
        raise CaptureError(f"{path}: {op.name} has no output {', '.join(sorted(missing))} for the recorded call")
    recomputed = {name: recomputed[name].cpu() for name in recorded}
    differences = {name: _difference(value, recomputed[name]) for name, value in recorded.items()}
    return Replay(op.name, args, recorded, recomputed, differences)


def _compute(op: Op, args: dict[str, Any], seed: int, backend: str) -> dict[str, torch.Tensor]:
    """Every output of a call, by name."""
    assert op.lower is not None
    bound = bind(op, args, strict=False, check_content=False)  # It ran: it is not for this process to refuse.
    call = op.lower(bound, seed=seed, offset=int(args.get("offset") or 0))
    if op.trains:
        call = call.whole()  # A call that trains gives more than it asks for.
    results: dict[str, torch.Tensor] = call.results()
    compute(call, results, backend)
    return results


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    one, other = one.double(), other.double()
    same = (one == other) | (one.isnan() & other.isnan())
    apart = (one - other).abs().nan_to_num(nan=float("inf"), posinf=float("inf")).masked_fill(same, 0.0)
    return float(apart.max()) if apart.numel() else 0.0


def _read(path: Path, device: torch.device) -> tuple[Op, dict[str, Any], dict[str, torch.Tensor], int]:
    """(record, arguments, outputs, seed) of a file."""
    if not path.is_file():
        raise FileNotFoundError(2, "No such file or directory", str(path))
    import safetensors

    try:
        with safetensors.safe_open(path, framework="pt", device="cpu") as file:
            text = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # Whatever the bytes make the format's reader do.
        raise CaptureError(f"{path}: not a readable .safetensors file ({error})") from None
    if text.get("format") != FORMAT or not set(_FIELDS) <= text.keys():
        raise CaptureError(f"{path}: a .safetensors file, but not one that capture() wrote")
    if text.get("version") != str(VERSION):
        raise CaptureError(f"{path}: format version {text.get('version')}, and this library reads {VERSION}")
    op = RECORDS.get(text["operator"])
    if op is None:
        raise CaptureError(f"{path}: operator {text['operator']!r} has no record here")
    return op, *_parts(path, op, text, tensors, device)


def _parts(
    path: Path, op: Op, text: dict[str, str], tensors: dict[str, torch.Tensor], device: torch.device
) -> tuple[dict[str, Any], dict[str, torch.Tensor], int]:
    try:
        attributes, arrays = (json.loads(text[name]) for name in ("attributes", "arrays"))
        outputs, seed = json.loads(text["outputs"]), int(json.loads(text["seed"]))
        args: dict[str, Any] = {}
        for name, value in attributes.items():
            attr = op.by_name[name]
            plain = not isinstance(value, list)
            args[name] = value if plain or not isinstance(attr, Attr) else attr.type(*map(_tupled, value))
        for name, value in arrays.items():
            args[op.by_name[name].name] = [int(n) for n in value]
        recorded = {name: tensors.pop(_OUTPUT + name) for name in outputs}
        for name, value in sorted(tensors.items(), key=lambda item: (item[0].split("[")[0], len(item[0]), item[0])):
            canonical = op.by_name[name.split("[")[0]].name
            if "[" in name:
                args.setdefault(canonical, []).append(value.to(device))
            else:
                args[canonical] = value.to(device)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CaptureError(f"{path}: its parts do not belong to a call of {op.name} ({error!r})") from None
    return args, recorded, seed


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
