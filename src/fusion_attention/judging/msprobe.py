"""Reads dumps of msprobe (mindstudio-probe, a debugger of Ascend): a file dump.json, and a file for each tensor."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusion_attention.judging.calls import JudgeError
from fusion_attention.ops import RECORDS

_TENSORS = "dump_tensor_data"
_LARGEST = 256 << 20  # bytes of a dump.json
_DEEPEST = 16


@dataclass(frozen=True)
class DumpedCall:
    """An operator's call in a dump of msprobe, a debugging tool, whose tensors are paths of files."""

    name: str  # msprobe's name of the call
    operator: str  # the operator's name
    folder: Path  # the folder that contains the files
    # args, kwargs, outputs: positional and keyword arguments, and results.
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Any, ...]


def calls_of(file: Path, pick: str = "") -> list[DumpedCall]:
    """Returns the calls of a dump.json whose operators this library has and whose names contain `pick`.

    Raises:
        JudgeError: the file is no dump.json of msprobe; the message is one sentence.
    """
    if not file.is_file():
        raise JudgeError(f"{file}: no such file, or not one that can be read to its end")
    if file.stat().st_size > _LARGEST:
        raise JudgeError(f"{file}: {file.stat().st_size >> 20} MiB, more than the {_LARGEST >> 20} MiB that are read")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise JudgeError(f"{file}: not JSON ({' '.join(str(error).split())[:120]})") from None
    data = content.get("data") if isinstance(content, dict) else None
    if not isinstance(data, dict):
        raise JudgeError(f"{file}: not a dump.json of msprobe: it has no object 'data'")
    if content.get("task") not in (None, "tensor"):
        raise JudgeError(
            f"{file}: a dump of task {content['task']!r}, which holds no tensors (dump with task 'tensor')"
        )
    results = []
    for name, entry in data.items():
        operator = _operator(name)
        if operator and pick in name and isinstance(entry, dict):
            results.append(_call(file, name, operator, entry))
    return results


def _operator(name: str) -> str:
    """Returns the operator in an entry's name, npu_fusion_attention for NPU.npu_fusion_attention.0.forward, or ""."""
    parts = name.split(".")
    return next((p for p in parts if p in RECORDS), "") if parts[-1] == "forward" else ""


def _call(file: Path, name: str, operator: str, entry: dict[str, Any]) -> DumpedCall:
    folder = file.parent

    def value(element: Any, depth: int = 0) -> Any:
        if depth > _DEEPEST:
            raise JudgeError(f"{file}: {name}: nested more than {_DEEPEST} deep")
        if isinstance(element, list):
            return [value(each, depth + 1) for each in element]
        if not isinstance(element, dict):
            return element
        if "data_name" in element:
            return _path(file, name, element["data_name"])
        if str(element.get("type", "")).endswith("Tensor"):
            raise JudgeError(f"{file}: {name}: a tensor without data (dump with task 'tensor')")
        return element.get("value")

    args, kwargs, outputs = entry.get("input_args") or [], entry.get("input_kwargs") or {}, entry.get("output") or []
    if not (isinstance(args, list) and isinstance(kwargs, dict) and isinstance(outputs, list)):
        raise JudgeError(f"{file}: {name}: expected lists input_args and output, and an object input_kwargs")
    named = {key: value(each) for key, each in kwargs.items()}
    positional, result = tuple(map(value, args)), tuple(map(value, outputs))
    return DumpedCall(name, operator, folder, positional, named, result)


def _path(file: Path, call: str, name: Any) -> Path:
    folder = file.parent
    if not isinstance(name, str) or not name or "\0" in name:
        raise JudgeError(f"{file}: {call}: data_name: expected a file's name, got {name!r:.60}")
    result = folder / _TENSORS / name  # the reader checks that it stays in the folder
    if result.suffix not in (".pt", ".npy"):
        raise JudgeError(f"{file}: {call}: data_name {name!r:.80}: expected a .pt or .npy file")
    return result
