"""Calls the operators of the C API through ctypes: libopapi uses the Python interpreter of this process.

Arguments have canonical names, like those of the two-phase interface in Python.
"""

import ctypes
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from support.c_runtime import TO_DEVICE, TO_HOST, Runtime, numbers

from fusion_attention.acl.tensors import ACL_DTYPES
from fusion_attention.capi.environment import INCLUDE, LIBRARY
from fusion_attention.contract import Op, Tensor, Tensors

PHASE_1 = "GetWorkspaceSize"
KINDS = {"int64_t": ctypes.c_int64, "double": ctypes.c_double, "bool": ctypes.c_bool}


@cache
def prototypes() -> dict[str, tuple[str, ...]]:
    """Returns the C types of every operator's parameters, without the workspace size and the executor."""
    results = {}
    for header in (INCLUDE / "aclnnop").glob("*.h"):
        text = re.sub(r"/\*.*?\*/", "", header.read_text(encoding="utf-8"), flags=re.DOTALL)
        for name, parameters in re.findall(r"aclnnStatus (\w+)GetWorkspaceSize\(([^)]*)\)", text):
            kinds = [re.sub(r"\w+$", "", parameter.strip()).replace(" ", "") for parameter in parameters.split(",")]
            results[name] = tuple(kind.removeprefix("const") for kind in kinds[:-2])
    return results


class Inexpressible(Exception):
    """The argument cannot be expressed in C; a compiler would reject the call."""


class Operators:
    """libopapi and the runtime libraries that it uses."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.library = ctypes.CDLL(str(LIBRARY / "libopapi.so"))
        self.retained: list[Any] = []  # memory that C pointers refer to

    # ------------------------------------------------------------------------------------------------------ arguments

    def tensor(self, value: torch.Tensor, address: int | None = None) -> int:
        """Returns a handle of a tensor in new device memory with the same bytes and strides."""
        storage = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())
        if address is None and value.numel():
            address = self.runtime.malloc(max(storage.numel(), 1))
            self.copy(address, storage.data_ptr(), storage.numel(), TO_DEVICE)
        if value.dtype not in ACL_DTYPES:
            raise Inexpressible(str(value.dtype))
        buffer = storage.numel() // value.element_size()
        handle = self.runtime.aclCreateTensor(
            numbers(tuple(value.shape)), value.dim(), ACL_DTYPES[value.dtype], numbers(value.stride()),
            value.storage_offset(), 2, numbers((buffer,)), 1, address,
        )  # fmt: skip
        assert handle is not None, self.runtime.message()
        return int(handle)

    def copy(self, target: int, source: int, count: int, kind: int) -> None:
        if count:
            assert self.runtime.aclrtMemcpy(target, count, source, count, kind) == 0, self.runtime.message()

    def argument(self, kind: str, value: Any) -> Any:
        """Returns a value as an argument for C."""
        if kind in KINDS:
            if not isinstance(value, (int, float)) or (kind != "double" and value != int(value)):
                raise Inexpressible(kind)
            if kind == "int64_t" and not -(1 << 63) <= value < 1 << 63:
                raise Inexpressible(kind)
            return KINDS[kind](value)
        if value is None:
            return None
        if kind == "char*":
            if not isinstance(value, str):
                raise Inexpressible(kind)
            return ctypes.c_char_p(value.encode())
        if kind == "aclIntArray*" and isinstance(value, (list, tuple)) and all(type(n) is int for n in value):
            return ctypes.c_void_p(self.runtime.aclCreateIntArray(numbers(tuple(value)), len(value)))
        if kind == "aclTensor*" and isinstance(value, list) and value and type(value[0]) is int:
            value = torch.tensor(value)
        if kind == "aclTensor*" and isinstance(value, torch.Tensor):
            return ctypes.c_void_p(self.tensor(value))
        if kind == "aclTensorList*" and isinstance(value, (torch.Tensor, list)):
            each = [value] if isinstance(value, torch.Tensor) else value
            handles = (ctypes.c_void_p * len(each))(*map(self.tensor, each))
            return ctypes.c_void_p(self.runtime.aclCreateTensorList(handles, len(each)))
        raise Inexpressible(f"{kind} from {value!r}")

    # ---------------------------------------------------------------------------------------------------------- calls

    def first(self, name: str, arguments: list[Any]) -> tuple[int, int, int | None]:
        """Runs phase 1 and returns (ret, workspace size, executor)."""
        size, executor = ctypes.c_uint64(1 << 60), ctypes.c_void_p(1)
        ret = self.library[name + PHASE_1](*arguments, ctypes.byref(size), ctypes.byref(executor))
        return ret, size.value, executor.value

    def second(self, name: str, executor: int | None, size: int = 0, workspace: int | None = None) -> int:
        """Runs phase 2 and returns ret; allocates the workspace if none is given."""
        if size and workspace is None:
            workspace = self.runtime.malloc(size)
        run = self.library[name]
        run.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p]
        return int(run(workspace, size, executor, None))

    def call(self, op: Op, args: Mapping[str, Any], outputs: Mapping[str, torch.Tensor | None]) -> int:
        """Runs both phases, copies the device's results to the outputs, and returns the code."""
        values = [args[p.name] if args.get(p.name) is not None else outputs.get(p.name) for p in op.params]
        kinds = prototypes()[op.name]
        arguments, outputs_in_c = [], {}
        for p, kind, value in zip(op.params, kinds, values, strict=True):
            if isinstance(p, Tensor) and not isinstance(p, Tensors) and p.output and isinstance(value, torch.Tensor):
                address = self.runtime.malloc(max(value.untyped_storage().nbytes(), 1))
                self.copy(address, value.untyped_storage().data_ptr(), value.untyped_storage().nbytes(), TO_DEVICE)
                outputs_in_c[p.name] = (address, value)
                arguments.append(ctypes.c_void_p(self.tensor(value, address)))
            else:
                arguments.append(self.argument(kind, value))
        ret, size, executor = self.first(op.name, arguments)
        if ret == 0:
            ret = self.second(op.name, executor, size)
        else:
            assert (size, executor) == (0, None)
        for address, value in outputs_in_c.values():
            self.copy(value.untyped_storage().data_ptr(), address, value.untyped_storage().nbytes(), TO_HOST)
        return ret
