"""The one registry of changes to what belongs to others: attributes, entries of sys.modules, finders of modules.

Changes of one place lie on each other as layers. A layer is taken off in any order and from any thread, and what
other code has put there since stays.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import re
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import ContextDecorator, ExitStack, suppress
from types import ModuleType
from typing import Any, TypeVar

_ABSENT: Any = object()
_Entered = TypeVar("_Entered", bound="Counted")

# Global because the places are: two patches of one attribute must know of each other. Reentrant because the collector
# may end a generator, and its patch with it, in the middle of another change; such an end waits in _ended.
_LOCK = threading.RLock()
_layers: dict[tuple[int, str], list[Layer]] = {}
_ended: list[Layer] = []
_changing = False


class Layer:
    """A value put in a place until it is taken off.

    Attributes:
        value: what was put there.
        on: whether it still counts. A caller may have kept its value: a wrapper whose layer is off only calls `below`.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name, self.on = owner, name, True  # the owner is held, so that its id stays its own
        self.value: Any = _ABSENT
        self._read_value: Any
        self._replaced = result = _read(owner, name)
        self._lower = next((layer for layer in reversed(self._all()) if layer.value is result), None)
        if self._lower is not None:
            self._read_value = self._lower._read_value
        elif result is _ABSENT:  # a class inherits, and a module may make what it is asked for
            self._read_value = getattr(owner, name, None)
        else:
            self._read_value = result

    @property
    def below(self) -> Any:
        """What one would find without this layer, as of now: what lay below may have been taken off meanwhile."""
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
        """The layers of the place that are on, the lowest first."""
        return _layers.get((id(self.owner), self.name), [])

    def _put(self, value: Any) -> None:
        self.value = value
        _layers.setdefault((id(self.owner), self.name), []).append(self)
        _write(self.owner, self.name, value)

    def _settle(self) -> None:
        """Puts back what lies below, if it is this layer whose value lies there."""
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
    """What lies in a place itself, inherited or not."""
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
    """A new layer with the value that `make` makes of it; how to take it off is known before it is there."""
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
    """Takes a layer off; one that is off already stays so."""
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
            with suppress(Exception):  # what cannot be put back stays; an interrupted one is retried
                _ended[-1]._settle()
            _ended.pop()._forget()
    finally:
        _changing = False


class Changes:
    """Changes that belong together: made one by one, taken back together, the last one first.

    Any of them may be made and taken back in any thread. Nothing is made that cannot be taken back.

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
        self._undo = ExitStack()  # runs all that it holds, whatever one of them raises

    def set(self, owner: Any, name: str, value: Any) -> Layer:
        """Sets an attribute of a module, class or object, or an entry of a dictionary."""
        return _put(owner, name, lambda layer: value, self._undo)

    def wrap(self, owner: Any, name: str, make: Callable[[Layer], Any]) -> Layer:
        """Sets it to what `make` makes of the layer, whose `below` is what to call."""
        return _put(owner, name, make, self._undo)

    def find(self, finder: Any, *, first: bool = False) -> None:
        """Puts a finder on sys.meta_path, at its end or at its beginning."""
        self._undo.callback(_remove, finder)
        sys.meta_path.insert(0 if first else len(sys.meta_path), finder)

    def play(self, modules: dict[str, ModuleType], version: str) -> None:
        """Puts modules where imports find them, packages before what they hold, and a distribution of the first's name
        where importlib.metadata does."""
        player = Player(modules, version)
        for name, module in modules.items():
            self.set(sys.modules, name, module)
        self.find(player)

    def lend(self, modules: dict[str, ModuleType]) -> None:
        """Puts modules where imports find them, before any of those names that are installed, and no distribution."""
        Player(modules, "")
        for name, module in modules.items():
            self.set(sys.modules, name, module)

    def when_loaded(self, name: str, change: Callable[[ModuleType], None]) -> None:
        """Calls `change` with a module: now if it is loaded, or else as soon as it is."""
        self.find(_Watch(name, change), first=True)
        if (module := sys.modules.get(name)) is not None:
            change(module)

    def after(self, undo: Callable[..., Any], *args: Any) -> None:
        """Another way back, of a change that is about to be made."""
        self._undo.callback(undo, *args)

    def end(self) -> None:
        """Takes all changes back that are not yet."""
        with _LOCK:
            undo = self._undo.pop_all()
        undo.close()


def together(make: Callable[[Changes], None]) -> Changes:
    """The changes that `make` makes: all of them, or none."""
    changes = Changes()
    try:
        make(changes)
    except BaseException:
        changes.end()
        raise
    return changes


class Counted(ContextDecorator):
    """Changes made when the first one enters, in any thread, and taken back when the last one leaves.

    A subclass says what they are in begin(). To leave more often than one entered does nothing.
    """

    def __init__(self) -> None:
        self._entered = 0
        self._changes = Changes()

    def begin(self, changes: Changes) -> None:
        """Makes the changes."""
        raise NotImplementedError

    def __enter__(self: _Entered) -> _Entered:
        """Makes the changes; where they are made, only counts."""
        with _LOCK:
            if not self._entered:
                self._changes = together(self.begin)
            self._entered += 1
        return self

    def __exit__(self, *_: object) -> None:
        """Takes them back, once it was called as often as __enter__()."""
        with _LOCK:
            if self._entered == 1:
                self._changes.end()
            self._entered = max(self._entered - 1, 0)


def another(name: str) -> str | None:
    """The module or distribution of a name that imports find and no module stands in for, in words."""
    if (module := sys.modules.get(name)) is not None:
        return repr(module)
    spec = importlib.util.find_spec(name)
    return None if spec is None else f"one in {spec.origin or list(spec.submodule_search_locations or ())}"


class _Distribution(importlib.metadata.Distribution):
    """What importlib.metadata finds: a name and a version."""

    def __init__(self, name: str, version: str) -> None:
        self.texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            "top_level.txt": f"{name}\n",
        }

    def read_text(self, filename: str) -> str | None:
        """One of the files of a distribution."""
        return self.texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        """Nothing lies anywhere."""
        raise FileNotFoundError("a module that is played has no files")


class Player:
    """Finds modules and their distribution on sys.meta_path; loading hands out the modules themselves."""

    def __init__(self, modules: dict[str, ModuleType], version: str) -> None:
        self.name = next(iter(modules))
        self.modules, self.distribution = modules, _Distribution(self.name, version)
        for name, module in modules.items():
            module.__spec__ = importlib.machinery.ModuleSpec(name, self, origin=__package__, is_package=True)  # type: ignore[arg-type]
            module.__loader__ = self  # type: ignore[assignment]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The spec of one of the modules."""
        module = self.modules.get(name)
        return None if module is None else module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """The module itself."""
        return self.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: it is complete."""

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        """The distribution, if it is what is asked for."""
        asked_name = getattr(context, "name", None)
        if asked_name is None or re.sub(r"[-_.]+", "_", asked_name).lower() == self.name:
            yield self.distribution


class _Watch:
    """Finds on sys.meta_path what others find of one module, with a loader that tells when it is loaded."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self.name, self.change = name, change

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The spec of the one module."""
        if name != self.name:
            return None
        result = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in result if spec is not None), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                if module.__name__ == self.name and self in sys.meta_path:  # a loader may serve many, and outlive us
                    self.change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _remove(finder: Any) -> None:
    if any(one is finder for one in sys.meta_path):
        sys.meta_path.remove(finder)
