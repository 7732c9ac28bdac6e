"""Calls the functions of the C libraries through ctypes, with the types that the headers declare."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from support.sources import ROOT

from fusion_attention.capi.environment import INCLUDE, LIBRARY

MIB, FAR = 1 << 20, 1 << 62
FLOAT, BF16 = 0, 27
TO_DEVICE, TO_HOST, ON_DEVICE, BY_ADDRESS = 1, 2, 3, 4
HEADERS = ("acl/acl.h", "acl/acl_base.h", "acl/acl_rt.h", "aclnn/acl_meta.h", "aclnn/aclnn_base.h")
LIBRARIES = ("ascendcl", "nnopbase")
NUMBERS = {
    "int": ctypes.c_int, "int32_t": ctypes.c_int32, "uint32_t": ctypes.c_uint32, "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64, "size_t": ctypes.c_size_t, "float": ctypes.c_float, "aclFloat16": ctypes.c_uint16,
    "aclError": ctypes.c_int, "aclnnStatus": ctypes.c_int32,
}  # fmt: skip
HANDLES = ("aclrtStream", "aclrtEvent", "aclrtContext")
DECLARED = re.compile(r"(?:ACL_FUNC_VISIBILITY|ACLNN_FUNCTION)\s+([\w ]+?[ *]+)(\w+)\(([^)]*)\);")


@dataclass(frozen=True)
class Parameter:
    name: str
    type: str

    @property
    def is_pointer(self) -> bool:
        """True if null is a possible argument."""
        return "*" in self.type or self.type in HANDLES

    @property
    def is_handle(self) -> bool:
        """True if the argument is an object of the libraries."""
        opaque = re.fullmatch(r"acl(Tensor|Scalar|IntArray|FloatArray|BoolArray|TensorList|ScalarList|OpExecutor)\*",
                              self.type.replace("const", "").replace(" ", ""))  # fmt: skip
        return self.type in HANDLES or opaque is not None


@dataclass(frozen=True)
class Function:
    name: str
    returns: str
    parameters: tuple[Parameter, ...]


def _ctype(text: str) -> Any:
    if text == "const char *":
        return ctypes.c_char_p
    if "*" in text or text in HANDLES:
        return ctypes.c_void_p
    return NUMBERS.get(text, ctypes.c_int)  # all other types are enums


def _parameter(text: str) -> Parameter:
    kind, name = re.fullmatch(r"(.*?[\s*])(\w+)", text.strip(), re.DOTALL).groups()  # type: ignore[union-attr]
    return Parameter(
        name, re.sub(r"\s+", " ", kind).strip().removeprefix("const ") if "*" not in kind else kind.strip()
    )


@cache
def functions() -> dict[str, Function]:
    """Returns all functions that the runtime's headers declare, by name."""
    results = {}
    for header in HEADERS:
        text = re.sub(r"/\*.*?\*/", "", (INCLUDE / header).read_text(encoding="utf-8"), flags=re.DOTALL)
        for returns, name, parameters in DECLARED.findall(text):
            taken = [] if parameters.strip() in ("", "void") else parameters.split(",")
            results[name] = Function(name, returns.strip(), tuple(map(_parameter, taken)))
    return results


def sources(library: str) -> list[Path]:
    """Returns the C++ files of a library, which its CMakeLists.txt lists."""
    folder = ROOT / "csrc/capi"
    text = (folder / "CMakeLists.txt").read_text(encoding="utf-8")
    (listed,) = re.findall(rf"^fusion_capi\({library} \S+\.map ([^)]*)\)", text, re.MULTILINE)
    return [folder / name for name in listed.split()]


class Runtime:
    """The libraries; `acl.aclrtMalloc(...)` calls with declared types."""

    def __init__(self, folder: Path = LIBRARY) -> None:
        self.libraries = [ctypes.CDLL(str(folder / f"lib{name}.so")) for name in LIBRARIES]

    def __getattr__(self, name: str) -> Any:
        declared = functions()[name]
        for library in self.libraries:
            try:
                function = library[name]
            except AttributeError:
                continue
            function.argtypes = [_ctype(p.type) for p in declared.parameters]
            function.restype = _ctype(declared.returns)
            setattr(self, name, function)
            return function
        raise AttributeError(f"no library has {name}")

    def message(self) -> str | None:
        """aclGetRecentErrMsg() as text."""
        text = self.aclGetRecentErrMsg()
        return None if text is None else text.decode()

    def started(self, config: Path | None = None) -> Iterator[Runtime]:
        """Context manager between aclInit() and aclFinalize(), with device 0 set."""
        assert self.aclInit(None if config is None else str(config).encode()) == 0, self.message()
        assert self.aclrtSetDevice(0) == 0
        yield self
        assert self.aclFinalize() == 0, self.message()

    def malloc(self, size: int, policy: int = 0) -> int:
        place = ctypes.c_void_p()
        assert self.aclrtMalloc(ctypes.byref(place), size, policy) == 0, self.message()
        assert place.value is not None
        return place.value

    def create(self, function: str, *args: Any) -> int:
        """Calls a function and returns the object that it writes to its first parameter."""
        place = ctypes.c_void_p()
        assert getattr(self, function)(ctypes.byref(place), *args) == 0, self.message()
        assert place.value is not None
        return place.value

    def tensor(self, shape: tuple[int, ...], dtype: int, data: int | None, **more: Any) -> int | None:
        """Calls aclCreateTensor(); more: strides (contiguous by default) and storage, the shape of the memory."""
        strides, storage = more.get("strides"), more.get("storage", shape)
        return self.aclCreateTensor(
            numbers(shape), len(shape), dtype, None if strides is None else numbers(strides), more.get("offset", 0),
            more.get("format", 2), numbers(storage), len(storage), data,
        )  # fmt: skip


def numbers(values: tuple[int, ...]) -> Any:
    """Returns an int64_t array."""
    return (ctypes.c_int64 * max(len(values), 1))(*values)


def copied(acl: Runtime, data: np.ndarray, size: int | None = None) -> int:
    """Copies an array to new device memory and returns its address."""
    address = acl.malloc(data.nbytes if size is None else size)
    assert acl.aclrtMemcpy(address, data.nbytes, data.ctypes.data, data.nbytes, TO_DEVICE) == 0, acl.message()
    return address


def one_of_each(acl: Runtime) -> dict[str, int]:
    """Returns a live object of every kind that can be created without an operator."""
    data = acl.malloc(64)
    tensor, scalar = acl.tensor((4,), FLOAT, data), acl.aclCreateScalar(numbers((1,)), FLOAT)
    assert tensor is not None
    assert scalar is not None
    members = [acl.tensor((4,), FLOAT, data), acl.aclCreateScalar(numbers((1,)), FLOAT)]
    return {
        "tensor": tensor, "scalar": scalar,
        "tensor list": acl.aclCreateTensorList((ctypes.c_void_p * 1)(members[0]), 1),
        "scalar list": acl.aclCreateScalarList((ctypes.c_void_p * 1)(members[1]), 1),
        "int array": acl.aclCreateIntArray(None, 0), "float array": acl.aclCreateFloatArray(None, 0),
        "bool array": acl.aclCreateBoolArray(None, 0), "context": acl.create("aclrtCreateContext", 0),
        "stream": acl.create("aclrtCreateStream"), "event": acl.create("aclrtCreateEvent"),
    }  # fmt: skip
