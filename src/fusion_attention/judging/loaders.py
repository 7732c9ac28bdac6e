"""Reads recorded calls from files of capture() and msprobe (Ascend's debugger), and from .npz, .pt and .safetensors.

Code in a file is not executed: torch's reader with weights_only=True reads pickles, unless the caller permits the
other. Sizes are checked before values are read.
"""

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fusion_attention.captures.reader import FORMAT, CaptureError, read
from fusion_attention.judging.calls import JudgeError, Recorded, from_recording
from fusion_attention.judging.msprobe import DumpedCall, calls_of
from fusion_attention.judging.naming import Reading, named, of_call, results_of, value_of
from fusion_attention.ops import RECORDS

Tensor = torch.Tensor
LIMIT = 8 << 30  # bytes of a file's values
UNNAMED = Reading()
_DEEPEST = 16  # largest number of levels of nested dicts


def read_calls(path: Path, how: Reading = UNNAMED) -> Iterator[Recorded]:
    """Yields the recorded calls in a file or folder; how: names and options for files that capture() did not write.

    Raises:
        JudgeError: the file cannot be read, or has no valid call; the message is one sentence.
    """
    if not path.exists():
        raise JudgeError(f"{path}: no such file or folder")
    try:
        if path.is_dir():
            yield from _folder(path, how)
        else:
            yield from _file(path, how)
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
                yield from _file(file, how)
    elif any(path.glob("*.npy")) or any(path.glob("*.pt")):
        content: dict[str, Any] = {}
        for file in sorted(path.iterdir()):
            if file.suffix in (".npy", ".pt"):
                content |= _flat(_within(file, path, how), file.stem)
        yield from named(path, content, how)
    else:
        raise JudgeError(f"{path}: no captures, no dump.json and no .npy or .pt files in it")


def _file(path: Path, how: Reading) -> Iterator[Recorded]:
    if not path.is_file():
        raise JudgeError(f"{path}: no such file, or not one that can be read to its end")
    if path.suffix == ".npz":
        yield from named(path, _read(path, how), how)
    elif path.suffix in (".npy", ".pt", ".pth"):
        content = _within(path, path.resolve().parent, how)
        if isinstance(content, Tensor):
            raise JudgeError(
                f"{path}: one tensor is no call: save a dict of the call's tensors, or give the folder that holds "
                "them, with --op"
            )
        yield from named(path, _flat(content), how)
    else:
        _sized(path, path.stat().st_size)
        tensors = _plain_safetensors(path)
        if tensors is None:
            yield from_recording(read(path, torch.device("cpu")), path.name)
        else:
            yield from named(path, tensors, how)


def _flat(content: Any, name: str = "", depth: int = 0) -> dict[str, Any]:
    """Returns the tensors, numbers and texts of nested dicts and lists by name; nested names are joined by dots. name:
    the name of `content` itself, "" at the top; depth: its depth, which is limited."""
    if depth > _DEEPEST:
        raise JudgeError(f"{name[:80]}: nested more than {_DEEPEST} deep")
    if isinstance(content, (list, tuple)) and not all(isinstance(each, int) for each in content):
        content = dict(enumerate(content))
    if not isinstance(content, dict):
        return {} if content is None else {name: content}
    results: dict[str, Any] = {}
    for key, value in content.items():
        results |= _flat(value, f"{name}.{key}" if name else str(key), depth + 1)
    return results


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


def _of_array(who: str, array: np.ndarray) -> Any:
    """Returns an array as a tensor, an array with one text as a string; who: the file, for error messages."""
    if array.dtype.kind in "US" and array.size == 1:
        return str(array.reshape(-1)[0])
    if array.dtype.kind == "V":
        raise JudgeError(
            f"{who}: bytes without a dtype (numpy has no bfloat16: save float32, and say --dtype bfloat16)"
        )
    return torch.from_numpy(np.array(array))


def _within(path: Path, folder: Path, how: Reading) -> Any:
    """Reads a .npy or .pt file, which must be inside `folder` (a dump may name any path); how: reading options."""
    if not path.resolve().is_relative_to(folder.resolve()):
        raise JudgeError(f"{path}: leaves the folder {folder}")
    if not path.is_file():
        raise JudgeError(f"{path}: no such file")
    _sized(path, path.stat().st_size)
    return _read(path, how)


def _read(path: Path, how: Reading) -> Any:
    """Returns the content of a .npz (a dict), .npy (a tensor) or .pt file (any object); how: reading options."""
    try:
        if path.suffix == ".npy":
            return _of_array(str(path), np.load(path, allow_pickle=False))
        if path.suffix == ".npz" or zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                _sized(path, sum(entry.file_size for entry in archive.infolist()))
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                return {name: _of_array(f"{path}: {name}", archive[name]) for name in archive.files}
        return torch.load(path, map_location="cpu", weights_only=not how.unsafe_pickle)
    except JudgeError:
        raise
    except Exception as error:  # the readers raise many types
        hint = "; save a dict of tensors, numbers and strings; --unsafe-pickle reads what may run code"
        hint = "" if path.suffix in (".npy", ".npz") or how.unsafe_pickle else hint
        raise JudgeError(f"{path}: not a readable {path.suffix} file ({_short(error)}){hint}") from None


def _sized(path: Path, size: int) -> None:
    if size > LIMIT:
        raise JudgeError(f"{path}: {size / 2**30:.1f} GiB of values, more than the {LIMIT >> 30} GiB that are read")


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:160]


def _dumped(call: DumpedCall, how: Reading) -> Recorded:
    op = RECORDS[call.operator]

    def loaded(value: Any) -> Any:
        if not isinstance(value, Path):
            return [loaded(each) for each in value] if isinstance(value, list) else value
        result = _within(value, call.folder, how)
        if not isinstance(result, Tensor):
            raise JudgeError(f"{value}: expected one tensor, got {type(result).__name__}")
        return result.detach()

    shown = [p.shown for p in op.params if not getattr(p, "output", False)]
    if len(call.args) > len(shown):
        raise JudgeError(f"{call.name}: {len(call.args)} positional arguments, {op.name} has {len(shown)}")
    inputs = {n: loaded(v) for n, v in (*zip(shown, call.args, strict=False), *call.kwargs.items())}
    results = results_of(op)
    outputs = {n: loaded(v) for n, v in zip(results, call.outputs, strict=False) if isinstance(v, Path)}
    outputs = {n: t for n, t in outputs.items() if t.numel()}  # torch_npu's results that were not requested are empty
    values = {name: value_of(op, name, value) for name, value in how.values.items()}
    return of_call(op, {**inputs, **values}, outputs, how, call.name)
