"""Several patches of one attribute: ended in any order, from any thread, interrupted, with patches of other code."""

import importlib
import importlib.metadata
import importlib.util
import itertools
import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fusion_attention import patches
from fusion_attention.patches import Changes, Counted, Layer


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = dict(patches._layers)  # integrations may be registered in this process
    yield
    assert patches._layers == before
    assert not patches._ended
    assert not patches._changing


def place() -> Any:
    """Returns an object with a function `name` that returns "base"."""
    return SimpleNamespace(name=lambda: "base")


def named(word: str) -> Callable[[Layer], Any]:
    """Returns a wrapper that puts a word before the result of the wrapped function while the layer is on."""
    return lambda layer: lambda: f"{word} {layer.below()}" if layer.on else layer.below()


def foreign(owner: Any) -> None:
    """Wraps owner.name without the registry of changes, as other libraries do."""
    below = owner.name
    owner.name = lambda: f"foreign {below()}"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("at", [None, 0, 1, 2, 3], ids=lambda at: f"foreign={at}")
@pytest.mark.parametrize("order", list(itertools.permutations("abc")), ids="".join)
def test_patches_end_in_any_order_around_a_third_party_wrapper(order: tuple[str, ...], at: int | None) -> None:
    owner, base = (owner_made := place()), owner_made.name
    there, words = {}, []
    for i, word in enumerate("abc"):
        if i == at:
            foreign(owner)
            words.append("foreign")
        there[word] = Changes()
        there[word].wrap(owner, "name", named(word))
        words.append(word)
    if at == 3:
        foreign(owner)
        words.append("foreign")
    for word in order:
        assert owner.name() == " ".join([*reversed(words), "base"])
        there[word].end()
        there[word].end()
        words.remove(word)
    assert owner.name() == " ".join([*words, "base"])
    assert (owner.name is base) == (at is None)


def test_removed_third_party_wrapper_is_not_restored() -> None:
    owner = place()
    base, one, other = owner.name, Changes(), Changes()
    wrapped = one.wrap(owner, "name", named("one")).value
    foreign(owner)
    other.wrap(owner, "name", named("other"))
    owner.name = wrapped  # they end before us, as if they were alone
    other.end()
    assert owner.name is wrapped
    one.end()
    assert owner.name is base


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_patches_with_equal_values_end_in_any_order(order: tuple[int, ...]) -> None:
    owner = SimpleNamespace(name=0)
    there = [Changes() for _ in range(3)]
    values = ["same", "between", "same"]
    for changes, value in zip(there, values, strict=True):
        changes.set(owner, "name", value)
    on = [0, 1, 2]
    for i in order:
        there[i].end()
        on.remove(i)
        assert owner.name == ([0] + [values[i] for i in on])[-1]


def test_ended_patch_removes_attributes_that_were_absent_before() -> None:
    class Base:
        name = "inherited"

    class Derived(Base):
        pass

    module = ModuleType("module")
    module.__getattr__ = lambda name: f"made {name}"  # type: ignore[method-assign]
    owners: list[Any] = [Derived, module, SimpleNamespace(), {}]
    before = [dict(owner if isinstance(owner, dict) else vars(owner)) for owner in owners]
    changes = Changes()
    below = [changes.set(owner, "name", 1).below for owner in owners]
    above = [changes.set(owner, "name", 2) for owner in owners]
    assert below == ["inherited", "made name", None, None]
    changes.end()
    assert [layer.below for layer in above] == below
    assert [dict(owner if isinstance(owner, dict) else vars(owner)) for owner in owners] == before


@pytest.fixture
def hasty() -> Iterator[None]:
    """Makes threads switch after a microsecond."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_patches_of_concurrent_threads_restore_the_original(hasty: None) -> None:
    owner = place()
    base = owner.name
    start = threading.Barrier(8, timeout=60)

    def work(i: int) -> None:
        draw, layers = random.Random(i), []
        start.wait()
        for _ in range(200):
            if layers and draw.random() < 0.5:
                layers.pop(draw.randrange(len(layers))).end()
            else:
                layers.append(Changes())
                layers[-1].wrap(owner, "name", named(str(i)))
            assert owner.name().split().count(str(i)) == len(layers)
        given.append(layers)  # another thread ends them
        start.wait()
        for changes in given[i]:
            changes.end()

    given: list[list[Changes]] = []
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert owner.name is base


class Fails(Exception):
    """An error that Guarded raises."""


class Guarded:
    """An object that raises `error` when `name` is set."""

    def __init__(self) -> None:
        self.name, self.error = 0, None

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, "error", None) is not None and name == "name":
            raise self.error
        super().__setattr__(name, value)


@pytest.mark.parametrize("error", [Fails(), KeyboardInterrupt()], ids=lambda error: type(error).__name__)
def test_failed_patch_restores_earlier_changes(error: BaseException) -> None:
    owner, other = Guarded(), place()
    base = other.name

    def make(changes: Changes) -> None:
        changes.wrap(other, "name", named("other"))
        owner.error = error
        changes.set(owner, "name", 1)

    with pytest.raises(type(error)):
        patches.together(make)
    assert other.name is base
    owner.error = None
    assert owner.name == 0


def test_failing_wrapper_factory_leaves_the_original() -> None:
    owner = place()
    base = owner.name
    with pytest.raises(ZeroDivisionError):
        Changes().wrap(owner, "name", lambda layer: 1 / 0)
    assert owner.name is base


def test_failure_to_restore_an_attribute_does_not_stop_other_restores() -> None:
    owner, other = Guarded(), SimpleNamespace(name=0)
    changes = Changes()
    changes.set(other, "name", 1)
    changes.set(owner, "name", 1)
    owner.error = Fails()
    changes.end()
    assert (other.name, owner.name) == (0, 1)


def test_interrupted_end_of_a_patch_is_completed_by_the_next_patch() -> None:
    owner, other = Guarded(), SimpleNamespace(name=0)
    changes, again = Changes(), Changes()
    changes.set(owner, "name", 1)
    owner.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        changes.end()
    owner.error = None
    again.set(other, "name", 1)
    assert owner.name == 0
    again.end()


@pytest.mark.parametrize("ended", [0, 1])
def test_patch_ended_during_another_patch_restores_the_original(ended: int) -> None:
    """The garbage collector ends a patch at any time if it frees a generator that holds the patch."""
    owner = place()
    base, there = owner.name, [Changes(), Changes()]
    for word, changes in zip("ab", there, strict=True):
        changes.wrap(owner, "name", named(word))
    last = Changes()
    last.wrap(owner, "name", lambda layer: there[ended].end() or named("c")(layer))
    assert owner.name() == f"c {'ba'[ended]} base"
    there[1 - ended].end()
    last.end()
    assert owner.name is base


def test_patches_ended_during_another_end_restore_the_original() -> None:
    """A setter that ends other patches stands for the garbage collector."""

    class Noticing:
        name = 0

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            while noticed:
                noticed.pop().end()

    owner = Noticing()
    noticed: list[Changes] = []
    there = [Changes() for _ in range(4)]
    for value, changes in enumerate(there, start=1):
        changes.set(owner, "name", value)
    noticed[:] = there[:3]
    there[3].end()
    assert (owner.name, vars(owner)) == (0, {})


class Both(Counted):
    """A patch with two changes of one object."""

    def __init__(self, owner: Any) -> None:
        super().__init__()
        self.owner = owner

    def begin(self, changes: Changes) -> None:
        changes.wrap(self.owner, "name", named("counted"))
        changes.set(self.owner, "other", self.owner.error())


def test_counted_patch_is_applied_once_for_nested_uses() -> None:
    owner = place()
    owner.error = lambda: 1 / 0
    base, both = owner.name, Both(owner)
    both.__exit__()
    with pytest.raises(ZeroDivisionError), both:
        pass
    assert owner.name is base
    owner.error = lambda: None

    @both
    def work(depth: int) -> None:
        assert owner.name() == "counted base"
        if depth:
            work(depth - 1)

    with both, ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
        assert owner.name() == "counted base"
    assert owner.name is base


# ------------------------------------------------------------------------------------------------------------- modules


def test_stand_in_modules_are_importable_until_the_patch_ends() -> None:
    modules = {name: ModuleType(name) for name in ("played_here", "played_here.part")}
    before = list(sys.meta_path), set(sys.modules)
    changes = Changes()
    changes.play(modules, "2.5")
    assert importlib.import_module("played_here.part") is modules["played_here.part"]
    assert importlib.util.find_spec("played_here") is modules["played_here"].__spec__
    assert [importlib.metadata.version(name) for name in ("played_here", "Played-Here")] == ["2.5", "2.5"]
    assert patches.another("played_here") == repr(modules["played_here"])
    theirs = sys.modules["played_here.part"] = ModuleType("theirs")
    changes.end()
    assert sys.modules.pop("played_here.part") is theirs
    assert (list(sys.meta_path), set(sys.modules)) == before
    assert patches.another("played_here") is None
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("played_here")


def test_module_is_patched_when_imported_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one_now", "one_later", "one_never"):
        (tmp_path / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    before, changes = list(sys.meta_path), Changes()
    now = importlib.import_module("one_now")
    for name in ("one_now", "one_later", "one_never"):
        changes.when_loaded(name, lambda module: changes.set(module, "value", 2))
    later = importlib.import_module("one_later")
    assert (now.value, later.value) == (2, 2)
    result = importlib.util.find_spec("one_never")
    changes.end()
    assert (now.value, later.value) == (1, 1)
    assert sys.meta_path == before
    never = importlib.util.module_from_spec(result)  # type: ignore[arg-type]
    result.loader.exec_module(never)  # type: ignore[union-attr]
    assert never.value == 1
    for module in (now, later):
        del sys.modules[module.__name__]
