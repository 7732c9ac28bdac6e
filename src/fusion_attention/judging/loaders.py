"""Reads calls with inputs and outputs from files: of capture(), dumps of msprobe (mindstudio-probe), .npz,
.safetensors.

No code in a file is executed: torch's restricted reader reads pickles, unless the caller permits others. Sizes are
checked before values are read.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fusion_attention.captures.reader import FORMAT, CaptureError, read
from fusion_attention.captures.results import returned
from fusion_attention.contract import Op
from fusion_attention.judging.calls import JudgeError, Recorded, from_recording, recorded
from fusion_attention.judging.msprobe import DumpedCall, calls_of
from fusion_attention.ops import RECORDS

Tensor = torch.Tensor
LIMIT = 8 << 30  # bytes of a file's values
_OUTPUT = "output."


@dataclass(frozen=True)
class Reading:
    """Options for reading files that capture() did not write.

    Attributes:
        operator: the operator's name. names: map from parameters (and "output.<result>") to names in the file.
        values: arguments that are in no file. seed: of dropout. unsafe_pickle: True if pickles may execute code.
        pick: text that the names of selected calls of a dump contain.
        dtype: dtype of the call, if files store its values as float32 ("bfloat16", which numpy lacks); "": unchanged.
    """

    operator: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    unsafe_pickle: bool = False
    pick: str = ""
    dtype: str = ""


def read_calls(path: Path, how: Reading = Reading()) -> Iterator[Recorded]:
    """Yields the calls of a file or folder.

    Raises:
        JudgeError: the file cannot be read, or has no valid call; the message is one sentence.
    """
    if not path.exists():
        raise JudgeError(f"{path}: no such file or folder")
    try:
        if path.is_dir():
            yield from _folder(path, how)
        else:
            yield _file(path, how)
    except CaptureError as error:
        raise JudgeError(" ".join(str(error).split())) from None
    except OSError as error:
        raise JudgeError(f"{path}: {error.strerror or error}") from None
    except MemoryError:
        raise JudgeError(f"{path}: it does not fit in memory") from None


def _folder(path: Path, how: Reading) -> Iterator[Recorded]:
    dumps = sorted(result for depth in ("dump.json", "*/dump.json", "*/*/dump.json") for result in path.glob(depth))
    captures = sorted(path.glob("*.safetensors"))
    if dumps:
        calls = [call for dump in dumps for call in calls_of(dump, how.pick)]
        if not calls:
            raise JudgeError(f"{path}: its dump.json names no call of an operator of this library")
        for call in calls:
            yield _dumped(call, how)
    elif captures:
        for file in captures:
            if how.pick in file.name:
                yield _file(file, how)
    elif any(path.glob("*.npy")) or any(path.glob("*.pt")):
        tensors = {f.stem: tensor_of(f, path, how) for f in sorted(path.iterdir()) if f.suffix in (".npy", ".pt")}
        yield _named(path, tensors, how)
    else:
        raise JudgeError(f"{path}: no captures, no dump.json and no .npy or .pt files in it")


def _file(path: Path, how: Reading) -> Recorded:
    if not path.is_file():
        raise JudgeError(f"{path}: no such file, or not one that can be read to its end")
    if path.suffix == ".npz":
        return _named(path, _npz(path), how)
    if path.suffix in (".npy", ".pt"):
        raise JudgeError(f"{path}: one tensor is no call: give the folder that it lies in, with --op")
    _sized(path, path.stat().st_size)
    tensors = _plain_safetensors(path)
    if tensors is None:
        result = read(path, torch.device("cpu"))
        return from_recording(result, path.name)
    return _named(path, tensors, how)


def _plain_safetensors(path: Path) -> dict[str, Tensor] | None:
    """Returns the tensors of a .safetensors file; None if capture() wrote it or it is unreadable."""
    import safetensors

    try:
        with safetensors.safe_open(path, framework="pt", device="cpu") as file:
            if (file.metadata() or {}).get("format") == FORMAT:
                return None
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception:  # safetensors raises many types for invalid bytes; read() reports the error
        return None


def _npz(path: Path) -> dict[str, Tensor]:
    try:
        with zipfile.ZipFile(path) as archive:
            _sized(path, sum(entry.file_size for entry in archive.infolist()))
        with np.load(path, allow_pickle=False) as archive:
            return {name: torch.from_numpy(np.array(archive[name])) for name in archive.files}
    except JudgeError:
        raise
    except Exception as error:  # numpy's reader, too, raises many types
        raise JudgeError(f"{path}: not a readable .npz file ({_short(error)})") from None


def tensor_of(path: Path, folder: Path, how: Reading) -> Tensor:
    """Reads a tensor from a .npy or .pt file within a folder."""
    if not path.resolve().is_relative_to(folder.resolve()):
        raise JudgeError(f"{path}: leaves the folder {folder}")
    if not path.is_file():
        raise JudgeError(f"{path}: no such file")
    _sized(path, path.stat().st_size)
    try:
        if path.suffix == ".npy":
            result = torch.from_numpy(np.load(path, allow_pickle=False))
        else:
            if zipfile.is_zipfile(path):
                with zipfile.ZipFile(path) as archive:
                    _sized(path, sum(entry.file_size for entry in archive.infolist()))
            result = torch.load(path, map_location="cpu", weights_only=not how.unsafe_pickle)
    except JudgeError:
        raise
    except Exception as error:
        hint = "" if path.suffix == ".npy" or how.unsafe_pickle else "; --unsafe-pickle reads what may run code"
        raise JudgeError(f"{path}: not a readable {path.suffix} file ({_short(error)}){hint}") from None
    if not isinstance(result, Tensor):
        raise JudgeError(f"{path}: expected one tensor, got {type(result).__name__}")
    return result.detach()


def _sized(path: Path, size: int) -> None:
    if size > LIMIT:
        raise JudgeError(f"{path}: {size / 2**30:.1f} GiB of values, more than the {LIMIT >> 30} GiB that are read")


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:160]


def _named(path: Path, tensors: dict[str, Tensor], how: Reading) -> Recorded:
    """Builds a Recorded from tensors by name."""
    if not how.operator:
        raise JudgeError(f"{path}: not a capture: say which operator it is a call of (--op)")
    op = _record(how.operator)
    results = _results(op)
    inputs: dict[str, Any] = {}
    outputs: dict[str, Tensor] = {}
    parameters = {p.shown for p in op.params} | {p.name for p in op.params}
    wanted = dict(how.names)
    for name in wanted:
        if name.removeprefix(_OUTPUT) not in parameters and not name.startswith(_OUTPUT):
            raise JudgeError(f"{path}: {op.name} has no parameter {name} (results begin with {_OUTPUT!r})")
    for target, source in wanted.items():
        if source not in tensors:
            raise JudgeError(f"{path}: has no tensor {source!r} (it has {', '.join(sorted(tensors)) or 'none'})")
        tensor = tensors[source]
        if target.startswith(_OUTPUT):
            outputs[target.removeprefix(_OUTPUT)] = tensor
        else:
            inputs[target] = tensor
    for name, tensor in tensors.items():
        if name in wanted.values():
            continue
        result_name = name.removeprefix(_OUTPUT)
        if name.startswith(_OUTPUT) or (result_name in results and result_name not in parameters):
            outputs.setdefault(result_name, tensor)
        elif name in results and name not in inputs:
            outputs.setdefault(name, tensor)
        elif name in parameters:
            inputs.setdefault(name, tensor)
        else:
            raise JudgeError(f"{path}: {name!r} is no parameter and no result of {op.name}: map it (--map NAME={name})")
    return _recorded(op, {**inputs, **how.values}, outputs, how, path.name)


def _record(operator: str) -> Op:
    op = RECORDS.get(operator)
    if op is None:
        recorded(operator, {}, {})  # raises with a list of operators
        raise AssertionError
    return op


def _results(op: Op) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*returned(op), *(p.name for p in op.tensors(output=True)))))


def _dumped(call: DumpedCall, how: Reading) -> Recorded:
    op = RECORDS[call.operator]

    def loaded(value: Any) -> Any:
        if isinstance(value, Path):
            return tensor_of(value, call.folder, how)
        return [loaded(each) for each in value] if isinstance(value, list) else value

    shown = [p.shown for p in op.params if not getattr(p, "output", False)]
    if len(call.args) > len(shown):
        raise JudgeError(f"{call.name}: {len(call.args)} positional arguments, {op.name} has {len(shown)}")
    inputs = {n: loaded(v) for n, v in (*zip(shown, call.args, strict=False), *call.kwargs.items())}
    results = _results(op)
    outputs = {n: loaded(v) for n, v in zip(results, call.outputs, strict=False) if isinstance(v, Path)}
    outputs = {n: t for n, t in outputs.items() if t.numel()}  # torch_npu's results that were not requested are empty
    return _recorded(op, {**inputs, **how.values}, outputs, how, call.name)


def _recorded(op: Op, inputs: dict[str, Any], outputs: dict[str, Tensor], how: Reading, source: str) -> Recorded:
    """Builds a Recorded of a call whose values may have been stored in a larger dtype."""
    words = {name: getattr(p, "dtypes", "") for p in op.params for name in (p.shown, p.name)}
    free = {n: v for n, v in inputs.items() if isinstance(v, Tensor) and words.get(n) != "float32"}
    if how.dtype:
        if how.dtype not in _LOW:
            raise JudgeError(f"--dtype: expected one of {', '.join(_LOW)}, got {how.dtype!r}")
        inputs = {**inputs, **{n: _narrowed(v, how.dtype) for n, v in free.items()}}
        outputs = {n: _narrowed(t, how.dtype) for n, t in outputs.items()}
    result = recorded(op.name, inputs, outputs, seed=how.seed, source=source)
    float32_inputs = [t for t in free.values() if t.dtype == torch.float32]
    low = next(
        (d for d in _LOW if float32_inputs and all(_narrowed(t, d).dtype != torch.float32 for t in float32_inputs)), ""
    )
    if low and not how.dtype:
        note = f"every float32 value of the inputs is a {low} number: was it a call in {low}? Then say --dtype {low}"
        return replace(result, notes=(note,))
    return result


_LOW = ("bfloat16", "float16")


def _narrowed(t: Tensor, dtype: str) -> Tensor:
    """Converts a float32 tensor to a dtype if that is exact; else returns it unchanged."""
    if t.dtype != torch.float32:
        return t
    low = t.to(getattr(torch, dtype))
    return low if torch.equal(low.float(), t) else t


def values_from(text: str) -> Any:
    """Parses a value as JSON; other text is a string."""
    try:
        return json.loads(text)
    except ValueError:
        return text
