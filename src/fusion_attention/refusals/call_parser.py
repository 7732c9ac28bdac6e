"""parse_call(): reads a call from Python text without executing it; tensors are given by dtype and shape.

    npu_fusion_attention(q=bf16[2,1024,8,64], ...)      a tensor as dtype and shape
    q = torch.randn(2, 1024, 8, 64).bfloat16()          or by torch's functions, in lines before the call

Supported are numbers and arithmetic, lists, bands, and torch's functions that create, reshape or cast a tensor.
"""

import ast
import math
import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fusion_attention.ir.mask import Band
from fusion_attention.ops import RECORDS

LONGEST = 100_000  # characters of a text, and elements of a list
_DTYPES = {
    "f16": torch.float16, "fp16": torch.float16, "float16": torch.float16, "half": torch.float16,
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16,
    "f32": torch.float32, "fp32": torch.float32, "float32": torch.float32, "float": torch.float32,
    "f64": torch.float64, "fp64": torch.float64, "float64": torch.float64, "double": torch.float64,
    "i8": torch.int8, "int8": torch.int8, "u8": torch.uint8, "uint8": torch.uint8,
    "i16": torch.int16, "int16": torch.int16, "i32": torch.int32, "int32": torch.int32, "int": torch.int32,
    "i64": torch.int64, "int64": torch.int64, "long": torch.int64, "bool": torch.bool,
    "uint16": torch.uint16, "uint32": torch.uint32, "uint64": torch.uint64,
    "complex64": torch.complex64, "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2,
}  # fmt: skip
_SIZED = ("empty", "zeros", "ones", "randn", "rand")
_LIKE = ("empty_like", "zeros_like", "ones_like", "randn_like", "rand_like")
_CASTS = ("half", "bfloat16", "float", "double", "bool", "int", "long")
# Methods of a tensor that are evaluated, on device meta.
_METHODS = (
    *("contiguous", "clone", "detach", "transpose", "permute", "view", "reshape", "unsqueeze", "squeeze", "expand"),
    *("flatten", "t", "triu", "tril", "diff", "cumsum", "movedim", "repeat", "unflatten"),
)
# Of these, the methods that do not enlarge a tensor; on tensors with literal content they keep the content.
_SMALL = ("contiguous", "clone", "detach", "view", "reshape", "unsqueeze", "squeeze", "flatten", "diff", "cumsum")
_DEVICES = ("npu", "cuda", "cpu")
_BANDS = ("causal", "window", "full")
_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_UNARY: dict[type, Callable[[Any], Any]] = {
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert, ast.Not: operator.not_,
}  # fmt: skip
_BUILTINS: dict[str, Callable[..., Any]] = {f.__name__: f for f in (float, int, list, tuple, abs, min, max, sum)}
PHASE_1 = "GetWorkspaceSize"
PACKAGE = "cann_ops_transformer"  # CANN's package, the first part of the names of its operators' definitions
_FORM = "bf16[2,1024,8,64]"


class WrittenError(ValueError):
    """The error for text that has no call to explain; the message is one sentence."""


@dataclass(frozen=True)
class Written:
    """A call of an operator, parsed from Python text: the operator's name and the arguments."""

    operator: str  # the operator's name
    # positional, named: the arguments; tensors are on device meta, except those with literal content.
    positional: tuple[Any, ...]
    named: dict[str, Any] = field(default_factory=dict)


def parse_call(text: str) -> Written:
    """Returns the last call of an operator in a text; earlier lines may assign its arguments.

    Raises:
        WrittenError: there is no such call, or it contains unsupported syntax.
    """
    if not text.strip():
        raise WrittenError(f"there is no text: pass a call, as in npu_fusion_attention(q={_FORM}, ...), or a log")
    if len(text) > LONGEST:
        raise WrittenError(f"the text has {len(text)} characters: a call has at most {LONGEST}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # for instance about escapes in strings
            tree = ast.parse(text.strip(), mode="exec")
    except (SyntaxError, ValueError) as error:
        where = f" (line {error.lineno})" if isinstance(error, SyntaxError) and error.lineno else ""
        what = error.msg if isinstance(error, SyntaxError) else str(error)
        raise WrittenError(f"this is not Python: {what}{where}") from None
    except (RecursionError, MemoryError):
        raise WrittenError("the text is nested too deeply to be a call") from None
    try:
        return _Reader().read(tree)
    except RecursionError:
        raise WrittenError("the text is nested too deeply to be a call") from None


def operator_named(name: str) -> str | None:
    """Returns the name of the operator that a function calls; None if this library has no definition of it. name: the
    function's, with or without modules; or CANN's, aclnnXxxGetWorkspaceSize. CANN's package needs no module."""
    *packages, name = name.removesuffix(PHASE_1).split(".")
    of_package = f"{PACKAGE}.{name}"
    if of_package in RECORDS and (PACKAGE in packages or name not in RECORDS):
        return of_package
    return name if name in RECORDS else None


class _Reader:
    """Evaluates the assignments in a Python syntax tree without executing it, and reads the call of an operator."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self.written: Written | None = None

    def read(self, tree: ast.Module) -> Written:
        last: str | None = None
        for statement in tree.body:
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                continue
            if isinstance(statement, ast.Return) and statement.value:
                statement = ast.Expr(statement.value)
            if isinstance(statement, ast.AnnAssign) and statement.value:
                statement = ast.Assign([statement.target], statement.value)
            if not isinstance(statement, (ast.Expr, ast.Assign)):
                raise WrittenError(
                    f"line {getattr(statement, 'lineno', 1)}: only assignments and a call are read, "
                    f"got {_shown(statement)}"
                )
            call = _outer_call(statement.value)
            if call is not None:
                last = _dotted(call.func)
                if self._operator(call):
                    continue
            if isinstance(statement, ast.Assign):
                self._assign(statement)
            elif call is None:
                raise WrittenError(f"expected a call, got {_shown(statement)}: npu_fusion_attention(q={_FORM}, ...)")
        if self.written is None:
            raise WrittenError(_no_operator(last))
        return self.written

    def _operator(self, call: ast.Call) -> bool:
        """Reads the arguments if the function called is an operator with a definition here; else returns False."""
        parts = _dotted(call.func).split(".")
        while parts and parts[-1] in ("out", "default"):
            parts.pop()
        name = operator_named(".".join(parts))
        if name is None or (name == "attention" and len(parts) > 1 and parts[-2] not in ("fa", "fusion_attention")):
            return False
        positional: list[Any] = []
        for value in call.args:
            if isinstance(value, ast.Starred):
                positional += self.value(value.value)
            else:
                positional.append(self.value(value))
        named: dict[str, Any] = {}
        for keyword in call.keywords:
            value = self.value(keyword.value)
            given = {keyword.arg: value} if keyword.arg is not None else value
            if not isinstance(given, dict):
                raise WrittenError(f"expected a dictionary after **, got {_shown(keyword.value)}")
            twice = [word for word in given if word in named]
            if twice:
                raise WrittenError(f"{twice[0]} is given twice")
            named |= given
        if not all(isinstance(word, str) for word in named):
            raise WrittenError("expected strings as names of arguments")
        self.written = Written(name, tuple(positional), named)
        return True

    def _assign(self, statement: ast.Assign) -> None:
        value = self.value(statement.value)
        for target in statement.targets:
            if isinstance(target, ast.Name):
                self.names[target.id] = value
            elif isinstance(target, ast.Tuple) and all(isinstance(name, ast.Name) for name in target.elts):
                several = list(value) if isinstance(value, (list, tuple)) else []
                if len(several) != len(target.elts):
                    expected = "expected as many values as names"
                    raise WrittenError(f"line {statement.lineno}: {expected}, got {_shown(statement)}")
                self.names |= {name.id: one for name, one in zip(target.elts, several, strict=True)}  # type: ignore[attr-defined]
            else:
                raise WrittenError(f"line {statement.lineno}: expected names before =, got {_shown(target)}")

    # ---------------------------------------------------------------------------------------------------- values

    def value(self, node: ast.expr) -> Any:
        """Returns the value of a syntax tree's expression; raises WrittenError if it is not supported, or fails."""
        try:
            result = self._value(node)
        except (WrittenError, RecursionError):
            raise
        except Exception as error:  # for instance a shape that torch refuses, or a division by zero
            first = (str(error) or type(error).__name__).splitlines()[0]
            raise WrittenError(f"{_shown(node)}: {first}") from None
        if isinstance(result, (list, tuple, str, bytes)) and len(result) > LONGEST:
            raise WrittenError(f"{_shown(node)}: a list of {len(result)} elements is too long, at most {LONGEST}")
        if type(result) is int and abs(result) >= 1 << 70:
            raise WrittenError(f"{_shown(node)}: a number of more than 64 bits")
        return result

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, (ast.List, ast.Tuple)):
            values = [self.value(element) for element in node.elts]
            return values if isinstance(node, ast.List) else tuple(values)
        if isinstance(node, ast.Dict):
            return {self.value(k): self.value(v) for k, v in zip(node.keys, node.values, strict=True) if k is not None}
        if isinstance(node, ast.Name):
            return self._named(node)
        if isinstance(node, ast.UnaryOp):
            return _UNARY[type(node.op)](self.value(node.operand))
        if isinstance(node, ast.BinOp):
            return self._arithmetic(node)
        if isinstance(node, ast.Subscript):
            return self._subscript(node)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        raise WrittenError(f"{_shown(node)} is not supported: write the value, a tensor as {_FORM}")

    def _named(self, node: ast.Name) -> Any:
        if node.id in self.names:
            return self.names[node.id]
        if node.id in _DTYPES:
            return _DTYPES[node.id]
        raise WrittenError(f"{node.id} has no value: write it out, a tensor as {_FORM}, or assign it in a line before")

    def _arithmetic(self, node: ast.BinOp) -> Any:
        one, other = self.value(node.left), self.value(node.right)
        if isinstance(node.op, ast.Pow):
            small = isinstance(one, (int, float)) and isinstance(other, (int, float)) and abs(other) <= 128
            if not small or (type(one) is int and abs(one) > 1 << 16 and abs(other) > 4):
                raise WrittenError(f"{_shown(node)}: only powers of small numbers are supported")
            return one**other
        lists = [value for value in (one, other) if isinstance(value, (list, tuple, str, bytes))]
        if isinstance(node.op, ast.Mult) and lists:
            times = other if lists[0] is one else one
            if type(times) is not int or len(lists[0]) * times > LONGEST:
                raise WrittenError(f"{_shown(node)}: the list is too long, at most {LONGEST} elements")
        if type(node.op) not in _BINARY or (isinstance(node.op, ast.Mod) and lists):
            raise WrittenError(f"{_shown(node)} is not supported")
        # Broadcasting may make a result as large as the product of both sizes.
        if any(isinstance(value, torch.Tensor) and value.dim() > 1 for value in (one, other)):
            one, other = (value.to("meta") if isinstance(value, torch.Tensor) else value for value in (one, other))
        return _BINARY[type(node.op)](one, other)

    def _subscript(self, node: ast.Subscript) -> Any:
        index = self._index(node.slice)
        name = node.value.id if isinstance(node.value, ast.Name) else ""
        owner = _DTYPES[name] if name in _DTYPES and name not in self.names else self.value(node.value)
        if isinstance(owner, torch.dtype):
            shape = index if isinstance(index, (tuple, list)) else (index,)
            return _tensor(shape, owner)
        if not isinstance(owner, (list, tuple, dict, torch.Tensor, torch.Size)):
            raise WrittenError(f"{_shown(node)}: expected a dtype, a tensor or a list before the brackets")
        return owner[index]

    def _index(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Tuple):
            return tuple(self._index(item) for item in node.elts)
        if isinstance(node, ast.Slice):
            ends = (node.lower, node.upper, node.step)
            return slice(*(None if end is None else self.value(end) for end in ends))
        return self.value(node)

    def _attribute(self, node: ast.Attribute) -> Any:
        dotted = _dotted(node)
        if dotted.startswith("torch.") and node.attr in _DTYPES:
            return _DTYPES[node.attr]
        if dotted == "math.inf":
            return math.inf
        owner = self.value(node.value)
        if isinstance(owner, torch.Tensor) and node.attr in ("shape", "dtype", "T", "mT"):
            return getattr(owner, node.attr)
        raise WrittenError(f"{_shown(node)} is not supported: write its value")

    def _call(self, node: ast.Call) -> Any:
        args = [self.value(argument) for argument in node.args]
        words = {str(k.arg): self.value(k.value) for k in node.keywords if k.arg not in ("device", "pin_memory")}
        dotted = _dotted(node.func)
        root, _, name = dotted.rpartition(".")
        if root in ("torch", "np", "numpy"):
            return _creation(name, args, words, node)
        if root.split(".")[-1] == "Band" and name in _BANDS:
            return getattr(Band, name)(*args, **words)
        if name == "Band":
            return Band(*args, **words)
        if dotted in ("math.sqrt", "sqrt"):
            return math.sqrt(*args)
        if dotted == "range" and dotted not in self.names:
            return list(range(*_range_ends(args, node)))
        if dotted in _BUILTINS and dotted not in self.names:
            return _BUILTINS[dotted](*args)
        if isinstance(node.func, ast.Attribute):
            owner = self.value(node.func.value)
            if isinstance(owner, torch.Tensor):
                return _method(owner, node.func.attr, args, words, node)
            if isinstance(owner, torch.Size) and node.func.attr == "numel":
                return owner.numel()
        raise WrittenError(f"{_shown(node)} is not supported: write its result, a tensor as {_FORM}")


# ---------------------------------------------------------------------------------------------------------- tensors


def _tensor(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    sizes = tuple(shape)
    if not all(type(n) is int and 0 <= n < 1 << 63 for n in sizes):
        raise WrittenError(f"expected integers >= 0 in a shape, got {list(sizes)}"[:200])
    return torch.zeros(sizes, dtype=dtype, device="meta")


def _creation(name: str, args: list[Any], words: dict[str, Any], node: ast.Call) -> Any:
    """Returns the result of a function of torch or numpy that creates a tensor; node: its syntax tree, for errors."""
    dtype = words.pop("dtype", None)
    if isinstance(dtype, str) or (dtype is not None and not isinstance(dtype, torch.dtype)):
        raise WrittenError(f"{_shown(node)}: dtype: expected one of torch's, got {dtype!r}")
    if name in _DTYPES and not args:
        return _DTYPES[name]
    if name in _SIZED:
        sizes = words["size"] if "size" in words else args[0] if args and isinstance(args[0], (list, tuple)) else args
        return _tensor(sizes, dtype or torch.float32)
    if name == "full":
        filled = torch.bool if type(args[1]) is bool else torch.int64 if type(args[1]) is int else torch.float32
        return _tensor(args[0], dtype or filled)
    if name == "randint":
        return _tensor(words.get("size", args[-1] if args else ()), dtype or torch.int64)
    if name in _LIKE:
        return _tensor(args[0].shape, dtype or args[0].dtype)
    if name in ("tensor", "as_tensor", "array", "asarray"):
        _count(args[0], LONGEST)
        return torch.tensor(args[0], dtype=dtype)
    if name == "arange":
        return torch.arange(*_range_ends(args, node), dtype=dtype)
    if name in ("triu", "tril"):
        return _method(args[0], name, args[1:], words, node)
    raise WrittenError(f"{_shown(node)} is not supported: write its result, as {_FORM}")


def _method(tensor: torch.Tensor, name: str, args: list[Any], words: dict[str, Any], node: ast.Call) -> Any:
    """Returns the result of the method `name` of a tensor; words: keywords; node: the syntax tree, for errors."""
    if name in _CASTS:
        return tensor.to(_DTYPES[name])
    if name in ("to", "type"):
        wanted = [value for value in (*args, *words.values()) if isinstance(value, torch.dtype)]
        return tensor.to(wanted[0]) if wanted else tensor
    if name in _DEVICES:
        return tensor
    if name == "requires_grad_":
        return tensor.detach().requires_grad_(*args)
    if name in ("size", "dim", "numel"):
        return getattr(tensor, name)(*args)
    if name == "tolist" and not tensor.is_meta:
        return tensor.tolist()
    if name in _METHODS:
        return getattr(tensor if name in _SMALL else tensor.to("meta"), name)(*args, **words)
    raise WrittenError(f"{_shown(node)}: .{name}() is not supported: write its result, as {_FORM}")


def _count(values: Any, left: int) -> int:
    """Returns `left` minus the number of elements of nested lists; raises WrittenError if that is negative."""
    if not isinstance(values, (list, tuple)):
        return left - 1
    for value in values:
        left = _count(value, left)
        if left < 0:
            raise WrittenError(f"a tensor has more than {LONGEST} numbers: write its shape instead, as in {_FORM}")
    return left


def _range_ends(args: list[Any], node: ast.Call) -> list[Any]:
    if not all(type(n) is int and abs(n) <= LONGEST for n in args):
        raise WrittenError(f"{_shown(node)}: expected a range within {LONGEST}")
    return args


# ------------------------------------------------------------------------------------------------------------- text


def _outer_call(node: ast.expr) -> ast.Call | None:
    """Returns the call that an expression consists of, also if indexed, as in f(...)[0], or awaited; else None."""
    while isinstance(node, (ast.Subscript, ast.Await)):
        node = node.value
    return node if isinstance(node, ast.Call) else None


def _dotted(node: ast.expr) -> str:
    """Returns a dotted name such as a.b.c as text; "" for any other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed([*parts, node.id])) if isinstance(node, ast.Name) else ""


def _shown(node: ast.AST) -> str:
    try:
        text = " ".join(ast.unparse(node).split())
    except (RecursionError, ValueError):
        return "a deeply nested expression"
    return text if len(text) <= 80 else text[:76] + " ..."


def _no_operator(last: str | None) -> str:
    import difflib

    if last is None:
        return f"there is no call in the text: npu_fusion_attention(q={_FORM}, ...)"
    name = last.split(".")[-1]
    near = difflib.get_close_matches(name, RECORDS, 2)
    hint = f"did you mean {' or '.join(near)}?" if near else "`fusion-attention ops` lists the operators"
    return f"{name or 'this'} is not an operator with a definition here ({hint})"
