"""What a misspelt argument was meant to be: the sentence behind Python's own error."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def suggested(function: Callable[P, R]) -> Callable[P, R]:
    """The function, whose TypeError for an argument that it has not names those that it has."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            raise misspelt(function, kwargs, error) from None

    return call


def misspelt(function: Callable[..., object], given: Iterable[str], error: TypeError) -> TypeError:
    """The error itself, or one that says what was meant, where a keyword is no parameter of the function."""
    parameters = inspect.signature(function).parameters
    unknown = [name for name in given if name not in parameters]
    if not unknown or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return error
    near = difflib.get_close_matches(unknown[0], parameters, 1)
    meant = f"did you mean {near[0]}=?" if near else f"it has {', '.join(parameters)}"
    return TypeError(f"{function.__name__}() got an unexpected keyword argument '{unknown[0]}' ({meant})")
