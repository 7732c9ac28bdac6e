"""TypeErrors with suggestions for misspelled arguments."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def suggested(function: Callable[P, R]) -> Callable[P, R]:
    """Wraps a function so that its TypeError for an unknown argument suggests an existing one."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            raise misspelt(function, kwargs, error) from None

    return call


def misspelt(function: Callable[..., object], given: Iterable[str], error: TypeError) -> TypeError:
    """Returns a TypeError that suggests a parameter for a keyword in `given` that `function` lacks, else `error`."""
    parameters = inspect.signature(function).parameters
    unknown = [name for name in given if name not in parameters]
    if not unknown or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return error
    near = difflib.get_close_matches(unknown[0], parameters, 1)
    meant = f"did you mean {near[0]}=?" if near else f"it has {', '.join(parameters)}"
    return TypeError(f"{function.__name__}() got an unexpected keyword argument '{unknown[0]}' ({meant})")


def misused(function: Callable[..., object], given: Sequence[Any], named: Mapping[str, Any]) -> TypeError:
    """Returns the TypeError that Python raises for positional (given) and keyword (named) arguments that do not fit."""
    name, parameters = function.__name__, inspect.signature(function).parameters.values()
    first = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    error = misspelt(function, named, TypeError())
    if error.args:
        return error
    if twice := [p.name for p in first[: len(given)] if p.name in named]:
        return TypeError(f"{name}() got multiple values for argument '{twice[0]}'")
    if len(given) > len(first):
        least = sum(p.default is p.empty for p in first)
        takes = f"from {least} to {len(first)}" if least < len(first) else str(least)
        plural, were = "s" * (len(first) != 1), "was" if len(given) == 1 else "were"
        return TypeError(f"{name}() takes {takes} positional argument{plural} but {len(given)} {were} given")
    missing = [p for p in parameters if p.default is p.empty and p not in first[: len(given)] and p.name not in named]
    alike = [repr(p.name) for p in missing if p.kind is missing[0].kind]
    kind = "positional" if missing[0] in first else "keyword-only"
    last = f"{', and' if len(alike) > 2 else ' and'} {alike[-1]}" if alike[1:] else alike[-1]
    listed = ", ".join(alike[:-1]) + last
    return TypeError(f"{name}() missing {len(alike)} required {kind} argument{'s' * (len(alike) > 1)}: {listed}")
