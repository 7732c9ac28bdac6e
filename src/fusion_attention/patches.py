"""Replaces attributes and modules of other packages, and restores them: all patches of this library are made here.

Patches are values of attributes and dictionaries, entries of sys.modules, and finders on sys.meta_path. Patches of one
attribute form a stack, from which they can be removed in any order and from any thread. A value that other code
assigned after a patch stays when the patch is removed.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.metadata
import importlib.util
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ContextDecorator, ExitStack, suppress
from types import ModuleType
from typing import Any, TypeVar

_ABSENT: Any = object()
_Entered = TypeVar("_Entered", bound="Counted")

# Global, because patched attributes are, and patches of one attribute interact. Reentrant, because during a change the
# garbage collector may close a generator that removes another patch; that patch waits in _ended.
_LOCK = threading.RLock()
_layers: dict[tuple[int, str], list[Layer]] = {}
_ended: list[Layer] = []
_changing = False


class Layer:
    """A patch (replacement value) of one attribute or dictionary entry, in the stack of patches of that attribute.

    Attributes:
        value: the new value.
        on: False after removal. Code may still refer to a removed patch's wrapper, which then only calls `below`.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name, self.on = owner, name, True  # a reference to the owner keeps its id unique
        self.value: Any = _ABSENT
        self._read_value: Any
        self._replaced = result = _read(owner, name)
        self._lower = next((layer for layer in reversed(self._all()) if layer.value is result), None)
        if self._lower is not None:
            self._read_value = self._lower._read_value
        elif result is _ABSENT:  # a class inherits attributes, and a module may have __getattr__
            self._read_value = getattr(owner, name, None)
        else:
            self._read_value = result

    @property
    def below(self) -> Any:
        """The value that the attribute would have now without this patch; earlier patches may have been removed."""
        under = self._under()
        return self._read_value if under is _ABSENT else under

    def _under(self) -> Any:
        layer = self
        while layer._lower is not None:
            layer = layer._lower
            if layer.on:
                return layer.value
        return layer._replaced

    def _all(self) -> list[Layer]:
        """Returns the patches of the same attribute that are not removed, the first one applied first."""
        return _layers.get((id(self.owner), self.name), [])

    def _put(self, value: Any) -> None:
        self.value = value
        _layers.setdefault((id(self.owner), self.name), []).append(self)
        _write(self.owner, self.name, value)

    def _settle(self) -> None:
        """Gives the attribute the value below this patch, unless the attribute no longer has this patch's value."""
        above = list(self._all())
        while above and above.pop(0) is not self:
            pass
        covered = any(layer.value is self.value for layer in above)
        if not covered and _read(self.owner, self.name) is self.value:
            _write(self.owner, self.name, self._under())

    def _forget(self) -> None:
        left = [layer for layer in self._all() if layer is not self]
        if left:
            _layers[id(self.owner), self.name] = left
        else:
            _layers.pop((id(self.owner), self.name), None)


def _read(owner: Any, name: str) -> Any:
    """Returns the value stored in the owner itself, not an inherited one; _ABSENT if there is none."""
    return (owner if isinstance(owner, dict) else vars(owner)).get(name, _ABSENT)


def _write(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, dict):
        if value is _ABSENT:
            owner.pop(name, None)
        else:
            owner[name] = value
    elif value is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _put(owner: Any, name: str, make: Callable[[Layer], Any], undo: ExitStack) -> Layer:
    """Applies a new patch to the attribute `name` of `owner` and returns it; its value is make(patch); `undo` gets a
    callback that removes it."""
    global _changing  # noqa: PLW0603  (one change at a time, of all)
    with _LOCK:
        _changing = True
        try:
            layer = Layer(owner, name)
            value = make(layer)
            undo.callback(_take, layer)
            layer._put(value)
            return layer
        finally:
            _changing = False
            _settle_ended()


def _take(layer: Layer) -> None:
    """Removes a patch from its attribute; does nothing if it is removed already."""
    with _LOCK:
        if layer.on:
            layer.on = False
            _ended.append(layer)
        if not _changing:
            _settle_ended()


def _settle_ended() -> None:
    global _changing  # noqa: PLW0603
    _changing = True
    try:
        while _ended:
            with suppress(Exception):  # A value that cannot be restored stays; an interrupted restoration is retried.
                _ended[-1]._settle()
            _ended.pop()._forget()
    finally:
        _changing = False


class Changes:
    """A group of patches that are applied one by one and removed together, the last one first.

    Patches can be applied and removed in any thread. Every patch can be removed.

    Example:
        >>> import math
        >>> changes = Changes()
        >>> layer = changes.set(math, "tau", 6)
        >>> math.tau
        6
        >>> changes.end()
        >>> math.tau == 2 * math.pi
        True
    """

    def __init__(self) -> None:
        self._undo = ExitStack()  # runs all callbacks, even if one raises

    def set(self, owner: Any, name: str, value: Any) -> Layer:
        """Sets the attribute `name` of a module, class or object (`owner`), or an entry of a dictionary."""
        return _put(owner, name, lambda layer: value, self._undo)

    def wrap(self, owner: Any, name: str, make: Callable[[Layer], Any]) -> Layer:
        """Sets an attribute or entry of `owner` to make(layer), a wrapper that calls layer.below, the value before."""
        return _put(owner, name, make, self._undo)

    def find(self, finder: Any, *, first: bool = False) -> None:
        """Adds a finder to sys.meta_path, at its end, or, if `first`, at its beginning."""
        self._undo.callback(_remove, finder)
        sys.meta_path.insert(0 if first else len(sys.meta_path), finder)

    def play(self, modules: dict[str, ModuleType], version: str) -> None:
        """Makes modules (by name, a package before its submodules) importable, and reports the first one's name to
        importlib.metadata as an installed distribution with this version."""
        player = Player(modules, version)
        for name, module in modules.items():
            self.set(sys.modules, name, module)
        self.find(player)

    def lend(self, modules: dict[str, ModuleType]) -> None:
        """Makes modules importable in place of installed ones with the same names; reports no distribution."""
        Player(modules, "")
        for name, module in modules.items():
            self.set(sys.modules, name, module)

    def when_loaded(self, name: str, change: Callable[[ModuleType], None]) -> None:
        """Calls change(module) for the module `name`: now if it is loaded, else when it is loaded."""
        self.find(_Watch(name, change), first=True)
        if (module := sys.modules.get(name)) is not None:
            change(module)

    def after(self, undo: Callable[..., Any], *args: Any) -> None:
        """Registers undo(*args) for the call of end(): it reverts a change that the caller makes itself."""
        self._undo.callback(undo, *args)

    def end(self) -> None:
        """Removes all patches of the group."""
        with _LOCK:
            undo = self._undo.pop_all()
        undo.close()


def together(make: Callable[[Changes], None]) -> Changes:
    """Calls make(changes), which applies patches with `changes`; if it raises, removes them. Returns `changes`."""
    changes = Changes()
    try:
        make(changes)
    except BaseException:
        changes.end()
        raise
    return changes


class Counted(ContextDecorator):
    """A context manager that applies patches at its first entry, in any thread, and removes them at its last exit.
    Subclasses define begin(), which applies the patches. Exits without an entry do nothing."""

    def __init__(self) -> None:
        self._entered = 0
        self._changes = Changes()

    def begin(self, changes: Changes) -> None:
        """Applies the patches by calling methods of `changes`."""
        raise NotImplementedError

    def __enter__(self: _Entered) -> _Entered:
        """Counts the entry, and applies the patches at the first."""
        with _LOCK:
            if not self._entered:
                self._changes = together(self.begin)
            self._entered += 1
        return self

    def __exit__(self, *_: object) -> None:
        """Counts the exit, and removes the patches at the last."""
        with _LOCK:
            if self._entered == 1:
                self._changes.end()
            self._entered = max(self._entered - 1, 0)


def make_modules(
    contents: Mapping[str, Mapping[str, Any]], absent: Callable[[ModuleType, str], Any]
) -> dict[str, ModuleType]:
    """Returns {full name: new module} with the attributes in `contents`, packages before their modules.

    Submodules become attributes of their packages; for a name that a module lacks, absent(module, name) is called.
    """
    modules: dict[str, ModuleType] = {}
    for name, names in contents.items():
        module = ModuleType(name, f"{name}, implemented by fusion_attention: the same calls on any machine.")
        vars(module).update(names, __path__=[], __getattr__=functools.partial(absent, module))
        owner, _, last = name.rpartition(".")
        if owner:
            setattr(modules[owner], last, module)
        modules[name] = module
    return modules


def another(name: str) -> str | None:
    """Returns a description of the loaded or installed module with this name; None if there is none."""
    if (module := sys.modules.get(name)) is not None:
        return repr(module)
    spec = importlib.util.find_spec(name)
    return None if spec is None else f"one in {spec.origin or list(spec.submodule_search_locations or ())}"


class _Distribution(importlib.metadata.Distribution):
    """A distribution for importlib.metadata that has only a name and a version."""

    def __init__(self, name: str, version: str) -> None:
        self.texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            "top_level.txt": f"{name}\n",
        }

    def read_text(self, filename: str) -> str | None:
        return self.texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError("fusion_attention: this module exists only in memory and has no files")


class Player:
    """A finder and loader for sys.meta_path that makes given modules importable, as one installed distribution."""

    def __init__(self, modules: dict[str, ModuleType], version: str) -> None:
        self.name = next(iter(modules))
        self.modules, self.distribution = modules, _Distribution(self.name, version)
        for name, module in modules.items():
            module.__spec__ = importlib.machinery.ModuleSpec(name, self, origin=__package__, is_package=True)  # type: ignore[arg-type]
            module.__loader__ = self  # type: ignore[assignment]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Returns the spec of the module `name` if it is one of the given modules, else None."""
        module = self.modules.get(name)
        return None if module is None else module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Returns the given module of this spec, which exists already."""
        return self.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing, because the module is complete."""

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        """Yields the distribution if the context asks for its name, or for all distributions."""
        asked_name = getattr(context, "name", None)
        if asked_name is None or re.sub(r"[-_.]+", "_", asked_name).lower() == self.name:
            yield self.distribution


class _Watch:
    """A finder for sys.meta_path that calls change(module) after other finders have loaded the module `name`."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self.name, self.change = name, change

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Returns the spec of the watched module, from other finders; None for other modules."""
        if name != self.name:
            return None
        result = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in result if spec is not None), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                # A loader may load many modules, and outlive this finder.
                if module.__name__ == self.name and self in sys.meta_path:
                    self.change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _remove(finder: Any) -> None:
    if any(one is finder for one in sys.meta_path):
        sys.meta_path.remove(finder)
