"""drawn(): estimates the rounding errors of a torch program by running it in float64 with random errors.

    expected = drawn(lambda: formula(q.double(), k.double(), v.double()), torch.bfloat16)
    compare_with("out", out, lambda: formula(q.double(), k.double(), v.double()))

    result of an operation  x  ->  x * (1 + u * uniform(-1, 1))
    size of the error          =   root mean square over draws of (result with errors - result without)

This is stochastic arithmetic (M. La Porte and J. Vignes, 1974). It needs no formulas for the propagation of errors, and
includes cancellation and gradients.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusion_attention.judging.chi_square_limits import Expected
from fusion_attention.testing.compare import compare
from fusion_attention.testing.monte_carlo_arithmetic import Copies, Noise, Roundings, quantum

__all__ = ["attend", "compare_with", "drawn", "expected_of"]

Tensor = torch.Tensor
_TOGETHER = 2**20  # largest number of elements of the copies of one tensor, which should fit in the cache
Structure = Any  # a tensor, or a tuple, list or dict of structures


def drawn(program: Callable[[], Structure], dtype: torch.dtype, draws: int = 24, seed: int = 0) -> Structure:
    """Returns the results of a program, with the expected size of their rounding errors in a dtype.

        size = root mean square over draws of (result with an error at every rounding - result)

    Args:
        program: a function that computes in float64 and returns tensors; torch's generator is reset before each run.
        dtype: the dtype to which results of operations are rounded.
        draws: number of runs with random errors. seed: seed of the errors.

    Returns:
        The structure of the program's result, with an Expected for every tensor.
    """
    noise = Noise(seed)
    with torch.random.fork_rng(devices=[]), sdpa_kernel(SDPBackend.MATH):  # makes SDPA's operations visible
        state = torch.get_rng_state()
        result = program()
        values = {name: t.detach().double().clone() for name, t in _leaves(result)}
        squares = {name: torch.zeros_like(value) for name, value in values.items()}
        left, together = draws, 1
        while left:
            torch.set_rng_state(state)
            copies = Copies(together)
            with Roundings(dtype, copies, noise):
                again = program()
            left -= together
            together = min(left, max(1, _TOGETHER // copies.largest))
            for name, t in _leaves(again):
                moved, value = copies.of(t.detach()), values[name]
                moved = t.detach()[None] if moved is None else moved
                squares[name] += (moved.double() - value).masked_fill(~value.isfinite(), 0).square().sum(0)
    return _rebuilt(
        result, {name: Expected(value, (squares[name] / draws).sqrt(), draws) for name, value in values.items()}
    )


def expected_of(
    program: Callable[[], Structure], ours: Structure, draws: int = 24, seed: int = 0, dtype: torch.dtype | None = None
) -> Structure:
    """Returns the results of a float64 program, with the expected sizes of errors of results in lower precision.

        size ** 2 = size of the program's errors ** 2 + (u * value) ** 2 / 3 + (smallest spacing of numbers) ** 2 / 12

    Args:
        program: a function that computes the results in float64, in the structure of `ours`.
        ours: the results to judge, whose dtypes determine the error sizes.
        draws, seed: number of runs with random errors, and seed of the errors.
        dtype: dtype of the program's operations; None: that of each result.

    Returns:
        An Expected (value and error size) for every result.
    """
    stored = {name: t.dtype for name, t in _leaves(ours)}
    results: dict[torch.dtype, dict[str, Expected]] = {}
    result: Structure = ours
    for stored_dtype in stored.values():
        if (dtype or stored_dtype) not in results:
            result = drawn(program, dtype or stored_dtype, draws, seed)
            results[dtype or stored_dtype] = dict(_leaves(result))
    wanted = {}
    for name, stored_dtype in stored.items():
        one = results[dtype or stored_dtype][name]
        unit, least = torch.finfo(stored_dtype).eps / 2, quantum(stored_dtype)
        size = one.size.square() + (unit * one.value).square() / 3 + least**2 / 12
        wanted[name] = Expected(one.value, size.sqrt().masked_fill(~one.value.isfinite(), 0), one.draws)
    assert all(drawn_result.keys() == stored.keys() for drawn_result in results.values()), f"{[*stored]}"
    return _rebuilt(ours, wanted)


def compare_with(name: str, ours: Structure, program: Callable[[], Structure], **how: Any) -> None:
    """Asserts that results `ours` differ from a float64 program's only by rounding; how: arguments of expected_of()."""
    wanted = dict(_leaves(expected_of(program, ours, **how)))
    for path, t in _leaves(ours):
        compare(f"{name}{path}", t.detach(), wanted[path])


class _Attend(torch.autograd.Function):
    """The autograd function of attend(): softmax(scores) @ v, with the gradient formulas of flash attention kernels."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, v: Tensor, again: Callable[[], Tensor]) -> Tensor:
        out = torch._safe_softmax(scores, -1) @ v
        lse = scores.logsumexp(-1, keepdim=True)
        ctx.save_for_backward(v, out, lse.masked_fill(lse == -torch.inf, 0))
        ctx.again = again
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, None]:
        v, out, lse = ctx.saved_tensors
        weights = (ctx.again() - lse).exp()
        dscores = weights * (dout @ v.mT - (dout * out).sum(-1, keepdim=True))
        return dscores, (weights.mT @ dout).sum_to_size(v.shape), None


def attend(scores: Tensor, v: Tensor, again: Callable[[], Tensor]) -> Tensor:
    """Returns softmax(scores) @ v, whose gradients are computed by the formulas of flash attention kernels.

        weights = exp(scores - lse), from scores that are computed again
        dscores = weights * (dout @ v.T - sum over a row of (dout * out))

    torch's derivative of softmax subtracts sum(weights * (dout @ v.T)) instead, which has other rounding errors. The
    difference matters, for instance, in a row with one key, whose gradient of scores is only rounding errors.

    Args:
        scores: [.., S1, S2]; rows of -inf have result 0.
        v: [.., S2, D].
        again: a function that computes the scores again, as kernels do in the backward.
    """
    result: Tensor = _Attend.apply(scores, v, again)
    return result


def _leaves(x: Structure, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (name, value) for every value that is not None in nested dictionaries, lists and tuples x; a name is the
    path to the value, such as "[0]: key", after the prefix `name`."""
    if isinstance(x, dict):
        for key, item in x.items():
            yield from _leaves(item, f"{name}: {key}")
    elif isinstance(x, tuple | list):
        for i, item in enumerate(x):
            yield from _leaves(item, f"{name}[{i}]")
    elif x is not None:
        yield name, x


def _rebuilt(x: Structure, leaves: dict[str, Any], name: str = "") -> Structure:
    """Returns nested dictionaries, lists and tuples like x, with values replaced by leaves[name], where a name is the
    path to the value, such as "[0]: key", after the prefix `name`."""
    if isinstance(x, dict):
        return {key: _rebuilt(item, leaves, f"{name}: {key}") for key, item in x.items()}
    if isinstance(x, tuple | list):
        return type(x)([_rebuilt(item, leaves, f"{name}[{i}]") for i, item in enumerate(x)])
    return None if x is None else leaves[name]
