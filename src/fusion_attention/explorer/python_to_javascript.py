"""Translates Python functions of the library to JavaScript, for the subset of Python that rules about masks use.

Functions, dataclasses, numbers and strings that a function uses are translated too. runtime.js implements Python's
operators and built-in functions, and those of numpy. Other syntax raises an Untranslatable error with its line.
"""

import ast
import builtins
import dataclasses
import inspect
import json
import textwrap
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

BINARY = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.FloorDiv: "floordiv", ast.Mod: "mod", ast.BitAnd: "and",
    ast.BitOr: "or", ast.Div: "div", ast.Pow: "pow",
}  # fmt: skip
COMPARED = {
    ast.Eq: "py.eq({}, {})", ast.NotEq: "py.ne({}, {})", ast.Lt: "py.lt({}, {})", ast.LtE: "py.le({}, {})",
    ast.Gt: "py.gt({}, {})", ast.GtE: "py.ge({}, {})", ast.Is: "({} === {})", ast.IsNot: "({} !== {})",
    ast.In: "py.within({}, {})", ast.NotIn: "!py.within({}, {})",
}  # fmt: skip
# Reserved words of JavaScript that are valid names in Python.
RESERVED = {
    "arguments", "case", "catch", "const", "default", "delete", "enum", "eval", "export", "false", "function",
    "interface", "let", "new", "np", "null", "py", "static", "super", "switch", "this", "true", "typeof", "var", "void",
}  # fmt: skip


class Untranslatable(ValueError):
    """The error about unsupported Python syntax, with its line."""


class Program:
    """A JavaScript program that is translated from Python functions and their dependencies.

    Args:
        native: functions that runtime.js implements, with their names in JavaScript.
    """

    def __init__(self, native: Mapping[Callable[..., Any], str] | None = None) -> None:
        self.native = dict(native or {})
        self.names: dict[int, str] = {}
        self.retained: list[Any] = []  # references to objects in names, because ids of deleted objects are reused
        self.parts: list[str] = []

    @property
    def text(self) -> str:
        """The translated program, in the order of dependencies."""
        return "\n".join(self.parts)

    def name(self, thing: Any, wanted: str = "") -> str:
        """Returns the JavaScript name of `thing`, a function, class or constant, which is translated at its first use.
        wanted: the preferred name; "": that of the function or class."""
        if callable(thing) and thing in self.native:
            return self.native[thing]
        if id(thing) not in self.names:
            wanted_name = wanted or thing.__name__
            name = wanted_name + "$" if wanted_name in RESERVED else wanted_name
            while name in self.names.values():
                name += "_"
            self.names[id(thing)] = name
            self.retained.append(thing)
            if inspect.isclass(thing):
                self.parts.append(self._class(thing, name))
            elif inspect.isfunction(thing):
                node = _source(thing)
                assert isinstance(node, ast.FunctionDef)
                self.parts.append(f"function {name}{self._body(node, thing.__globals__)}")
            else:
                self.parts.append(f"const {name} = {constant(thing)};")
        return self.names[id(thing)]

    def expression(self, text: str, names: Mapping[str, Any], parameter: str = "n") -> str:
        """Returns a Python expression as a JavaScript function of `parameter`, which has the names not in `names`."""
        tree = ast.parse(text, mode="eval")
        return f"({parameter}) => {_Body(self, names, parameter).of(tree.body)}"

    def _body(self, node: ast.FunctionDef, within: Mapping[str, Any], kind: type | None = None) -> str:
        skip, body = int(kind is not None), _Body(self, within, kind=kind)
        parameters = body.parameters(node.args, skip)
        argument_names = {a.arg for a in [*node.args.args, *node.args.kwonlyargs]}
        body.local |= argument_names | assigned(node)
        local = sorted(body.local - argument_names)
        lines = [f"const {safe(node.args.args[0].arg)} = this;"] * skip
        lines += [f"let {', '.join(map(safe, local))};"] * bool(local)
        lines += [text for statement in node.body if (text := body.statement(statement))]
        return f"({parameters}) {{\n" + textwrap.indent("\n".join(lines), "  ") + "\n}"

    def _class(self, kind: type, name: str) -> str:
        if not dataclasses.is_dataclass(kind):
            raise Untranslatable(f"{kind.__name__}: only dataclasses are translated")
        fields = dataclasses.fields(kind)
        missing = dataclasses.MISSING
        shown = [safe(f.name) + ("" if f.default is missing else f" = {constant(f.default)}") for f in fields]
        sets = " ".join(f"this.{f.name} = {safe(f.name)};" for f in fields)
        parts = [f"constructor({', '.join(shown)}) {{ {sets} }}"]
        tree, module = _source(kind), inspect.getmodule(kind)
        assert isinstance(tree, ast.ClassDef)
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef) or node.name in ("__post_init__", "__len__"):
                continue
            marks = {mark.id for mark in node.decorator_list if isinstance(mark, ast.Name)}
            if {*marks} - {"classmethod"} or len(marks) < len(node.decorator_list):
                continue  # a property or static method, which rules do not use
            try:
                text = self._body(node, vars(module), kind)
            except Untranslatable:
                continue  # a method that rules do not call; if one did, tests would fail
            parts.append(f"{'static ' * ('classmethod' in marks)}{node.name}{text}")
        return f"class {name} {{\n" + textwrap.indent("\n".join(parts), "  ") + "\n}"


class _Body:
    """Translates the statements and expressions of one function."""

    def __init__(
        self, program: Program, within: Mapping[str, Any], parameter: str = "", kind: type | None = None
    ) -> None:
        self.program, self.within, self.parameter, self.kind = program, within, parameter, kind
        self.local: set[str] = set()

    def parameters(self, arguments: ast.arguments, skip: int) -> str:
        """Returns a Python function's parameters, without the first `skip`, as a JavaScript parameter list."""
        if arguments.vararg or arguments.kwarg:
            raise Untranslatable("parameters that take any number of arguments")
        positional = arguments.args
        defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults)) + [*arguments.defaults]
        pairs = [
            *zip(positional, defaults, strict=True),
            *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
        ]
        return ", ".join(safe(a.arg) + (f" = {self.of(d)}" if d else "") for a, d in pairs[skip:])

    # ------------------------------------------------------------------------------------------------- statements

    def statement(self, node: ast.stmt) -> str:
        """Returns a Python statement in JavaScript; "" for a docstring."""
        translate = getattr(self, f"_s_{type(node).__name__}", None)
        if translate is None:
            raise self.unknown(node)
        return str(translate(node))

    def block(self, nodes: list[ast.stmt]) -> str:
        """Returns Python statements in JavaScript, as a block in braces."""
        return "{\n" + textwrap.indent("\n".join(filter(None, map(self.statement, nodes))), "  ") + "\n}"

    def _s_Expr(self, node: ast.Expr) -> str:
        return "" if isinstance(node.value, ast.Constant) else self.of(node.value) + ";"

    def _s_Pass(self, node: ast.Pass) -> str:
        return ""

    def _s_Continue(self, node: ast.Continue) -> str:
        return "continue;"

    def _s_Return(self, node: ast.Return) -> str:
        return f"return {self.of(node.value) if node.value else 'null'};"

    def _s_Assign(self, node: ast.Assign) -> str:
        value = self.of(node.value)
        return " ".join(self.store(target, value) for target in node.targets)

    def _s_AnnAssign(self, node: ast.AnnAssign) -> str:
        return self.store(node.target, self.of(node.value)) if node.value else ""

    def _s_AugAssign(self, node: ast.AugAssign) -> str:
        return self.store(node.target, f"py.{BINARY[type(node.op)]}({self.of(node.target)}, {self.of(node.value)})")

    def _s_If(self, node: ast.If) -> str:
        text = f"if ({self.truth(node.test)}) {self.block(node.body)}"
        return text + (f" else {self.block(node.orelse)}" if node.orelse else "")

    def _s_For(self, node: ast.For) -> str:
        if node.orelse:
            raise self.unknown(node)
        return f"for ({self.target(node.target)} of py.iter({self.of(node.iter)})) {self.block(node.body)}"

    def _s_Match(self, node: ast.Match) -> str:
        text = f"const $m = {self.of(node.subject)};\n"
        for number, case in enumerate(node.cases):
            test = self.pattern(case.pattern) + (f" && {self.truth(case.guard)}" if case.guard else "")
            text += f"{' else ' * bool(number)}if ({test}) {self.block(case.body)}"
        return "{\n" + textwrap.indent(text, "  ") + "\n}"

    def pattern(self, node: ast.pattern) -> str:
        """Returns a JavaScript condition on $m, the value of a match statement, for a pattern."""
        if isinstance(node, ast.MatchValue):
            return f"py.eq($m, {self.of(node.value)})"
        if isinstance(node, ast.MatchOr):
            return "(" + " || ".join(map(self.pattern, node.patterns)) + ")"
        if isinstance(node, ast.MatchAs) and node.pattern is None and node.name is None:
            return "true"
        raise self.unknown(node)

    def store(self, target: ast.expr, value: str) -> str:
        """Returns a JavaScript assignment of a translated value to a Python target."""
        if isinstance(target, ast.Subscript):
            where = "null" if isinstance(target.slice, ast.Slice) else self.of(target.slice)
            return f"py.put({self.of(target.value)}, {where}, {value});"
        return f"{self.target(target)} = {f'py.list({value})' if isinstance(target, ast.Tuple) else value};"

    def target(self, node: ast.expr) -> str:
        """Returns the JavaScript target of an assignment: a name, or several names in brackets."""
        if isinstance(node, ast.Tuple):
            return "[" + ", ".join(map(self.target, node.elts)) + "]"
        if not isinstance(node, ast.Name):
            raise self.unknown(node)
        return safe(node.id)

    # ------------------------------------------------------------------------------------------------ expressions

    def of(self, node: ast.expr) -> str:
        """Returns a Python expression in JavaScript."""
        translate = getattr(self, f"_{type(node).__name__}", None)
        if translate is None:
            raise self.unknown(node)
        return str(translate(node))

    def truth(self, node: ast.expr) -> str:
        """Returns a Python condition in JavaScript, true for the same values as in Python."""
        return f"py.truth({self.of(node)})"

    def _Constant(self, node: ast.Constant) -> str:
        return constant(node.value)

    def _Name(self, node: ast.Name) -> str:
        if node.id in self.local:
            return safe(node.id)
        if node.id in self.within:
            value = self.within[node.id]
            if isinstance(value, ModuleType):
                return value.__name__.split(".")[0].replace("numpy", "np")
            return self.program.name(value, node.id)
        if self.parameter:
            return f"py.at({self.parameter}, {json.dumps(node.id)})"
        return f"py.{node.id}"

    def _Attribute(self, node: ast.Attribute) -> str:
        return f"{self.of(node.value)}.{node.attr}"

    def _Subscript(self, node: ast.Subscript) -> str:
        if isinstance(node.slice, ast.Slice):
            if node.slice.step:
                raise self.unknown(node)
            edges = (self.of(edge) if edge else "null" for edge in (node.slice.lower, node.slice.upper))
            return f"py.slice({self.of(node.value)}, {', '.join(edges)})"
        return f"py.at({self.of(node.value)}, {self.of(node.slice)})"

    def _Tuple(self, node: ast.Tuple) -> str:
        return f"py.tuple({self._List(node)})"

    def _List(self, node: ast.List | ast.Set | ast.Tuple) -> str:
        return "[" + ", ".join(map(self.of, node.elts)) + "]"

    _Set = _List

    def _Starred(self, node: ast.Starred) -> str:
        return f"...py.iter({self.of(node.value)})"

    def _Dict(self, node: ast.Dict) -> str:
        pairs = zip(node.keys, node.values, strict=True)
        return "({" + ", ".join(f"[{self.of(k)}]: {self.of(v)}" if k else f"...{self.of(v)}" for k, v in pairs) + "})"

    def _IfExp(self, node: ast.IfExp) -> str:
        return f"({self.truth(node.test)} ? {self.of(node.body)} : {self.of(node.orelse)})"

    def _BoolOp(self, node: ast.BoolOp) -> str:
        name = "all" if isinstance(node.op, ast.And) else "some"
        first, *rest = (self.of(value) for value in node.values)
        return f"py.{name}_of({first}, {', '.join(f'() => {text}' for text in rest)})"

    def _UnaryOp(self, node: ast.UnaryOp) -> str:
        if isinstance(node.op, ast.Not):
            return f"!{self.truth(node.operand)}"
        if isinstance(node.op, ast.USub):
            return f"py.neg({self.of(node.operand)})"
        raise self.unknown(node)

    def _BinOp(self, node: ast.BinOp) -> str:
        if type(node.op) not in BINARY:
            raise self.unknown(node)
        return f"py.{BINARY[type(node.op)]}({self.of(node.left)}, {self.of(node.right)})"

    def _Compare(self, node: ast.Compare) -> str:
        sides = [self.of(side) for side in (node.left, *node.comparators)]
        comparisons = [
            COMPARED[type(op)].format(a, b) for op, a, b in zip(node.ops, sides[:-1], sides[1:], strict=True)
        ]  # in a chain, operands are evaluated twice, which is correct because they have no side effects
        if len(comparisons) == 1:
            return comparisons[0]
        return f"({' && '.join(f'py.truth({text})' for text in comparisons)})"

    def _JoinedStr(self, node: ast.JoinedStr) -> str:
        parts = []
        for value in node.values:
            if isinstance(value, ast.Constant):
                parts.append(json.dumps(value.value))
                continue
            assert isinstance(value, ast.FormattedValue)
            if value.format_spec:
                raise self.unknown(node)
            parts.append(f"py.{'repr' if value.conversion == ord('r') else 'str'}({self.of(value.value)})")
        return f"[{', '.join(parts)}].join('')"

    def _ListComp(self, node: ast.ListComp | ast.GeneratorExp) -> str:
        before = set(self.local)
        text, closing = "", ""
        for generator in node.generators:
            source = f"py.iter({self.of(generator.iter)})"
            self.local |= {n.id for n in ast.walk(generator.target) if isinstance(n, ast.Name)}
            named = f"({self.target(generator.target)})"
            for test in generator.ifs:
                source += f".filter({named} => {self.truth(test)})"
            last = generator is node.generators[-1]
            text += f"{source}.{'map' if last else 'flatMap'}({named} => "
            closing += ")"
        text += self.of(node.elt) + closing
        self.local = before
        return text

    _GeneratorExp = _ListComp

    def _Call(self, node: ast.Call) -> str:
        arguments = [self.of(a) for a in node.args]
        if isinstance(node.func, ast.Attribute) and not self._is_module(node.func.value):
            given = self._loose(arguments, node.keywords)
            return f"py.call({self.of(node.func.value)}, {json.dumps(node.func.attr)}, [{', '.join(given)}])"
        called = node.func.id if isinstance(node.func, ast.Name) else ""
        name = f"py.{called}" if called and self._is_builtin(called) else self.of(node.func)
        target = self.kind if called == "cls" else None if called in self.local else self.within.get(called)
        if target is not None:
            parameters = inspect.signature(target).parameters
            slots = arguments + ["undefined"] * (len(parameters) - len(arguments)) * bool(node.keywords)
            for word in node.keywords:
                if word.arg is None or word.arg not in parameters:
                    raise self.unknown(node)
                slots[list(parameters).index(word.arg)] = self.of(word.value)
            return f"{'new ' * inspect.isclass(target)}{name}({', '.join(slots)})"
        return f"{name}({', '.join(self._loose(arguments, node.keywords))})"

    def _loose(self, arguments: list[str], keywords: list[ast.keyword]) -> list[str]:
        """Returns the arguments of a function of runtime.js, whose keyword arguments are one object at the end."""
        words = ", ".join(f"{word.arg}: {self.of(word.value)}" for word in keywords)
        return [*arguments, f"new py.Words({{{words}}})"] if keywords else arguments

    def _is_builtin(self, name: str) -> bool:
        return name not in self.local and name not in self.within and hasattr(builtins, name)

    def _is_module(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and isinstance(self.within.get(node.id), ModuleType)

    def unknown(self, node: ast.AST) -> Untranslatable:
        """Returns the error for Python syntax (`node`) that is not translated."""
        shown = ast.unparse(node) if not isinstance(node, ast.pattern) else "a pattern"
        return Untranslatable(f"line {getattr(node, 'lineno', '?')}: {type(node).__name__}: {shown.splitlines()[0]}")


def safe(name: str) -> str:
    """Returns the name, with "$" appended if it is reserved in JavaScript."""
    return name + "$" if name in RESERVED else name


def constant(value: Any) -> str:
    """Returns a number, string, tuple or dictionary as JavaScript."""
    if value is ...:
        raise Untranslatable("an ellipsis")
    try:
        return json.dumps(value)
    except TypeError:
        raise Untranslatable(f"a constant of type {type(value).__name__}") from None


def assigned(node: ast.FunctionDef) -> set[str]:
    """Returns the names that a function's syntax tree (`node`) assigns, without those of comprehensions."""
    names: set[str] = set()

    def visit(tree: ast.AST) -> None:
        if isinstance(tree, ast.ListComp | ast.GeneratorExp | ast.Lambda):
            return
        if isinstance(tree, ast.Name) and isinstance(tree.ctx, ast.Store):
            names.add(tree.id)
        for child in ast.iter_child_nodes(tree):
            visit(child)

    for statement in node.body:
        visit(statement)
    return names


def _source(thing: Any) -> ast.stmt:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]
    except (OSError, TypeError):
        raise Untranslatable(f"{thing.__name__}: its source is not available") from None
