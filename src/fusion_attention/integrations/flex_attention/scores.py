"""Converts a FlexAttention score_mod to arguments of attention(): a factor, a softcap, ALiBi slopes or a bias.

The function runs on a symbolic score, which supports the operations that can be converted and raises BackendError for
others. The result is compared with the function at random positions before it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusion_attention.contract import BackendError
from fusion_attention.integrations.flex_attention import mods
from fusion_attention.integrations.flex_attention.masks import Shape

_CHUNK = 1 << 22  # pairs per evaluation: 32 MiB of positions
_PROBES = 256


@dataclass(frozen=True, eq=False)
class Terms:
    """A score_mod as a formula of the score s: softcap * tanh(factor * s / softcap) + bias - slopes * |key - row|;
    without a softcap, the first term is factor * s."""

    factor: float = 1.0
    softcap: float = 0.0
    bias: Tensor | None = None  # [B or 1, N or 1, S1 or 1, S2 or 1], in the dtype of the query or of scores
    slopes: Tensor | None = None  # float32 [N] or [B, N]
    behind: bool = False  # the terms are valid only for keys at or before the query's position
    # Returns True for a visible key; keys that the function sets to -inf are invisible, and not in the bias.
    mask: mods.Mod | None = None
    by_row: Tensor | None = None  # another factor of s, [B or 1, N or 1, S1 or 1, 1]


def refused(got: str, hint: str) -> BackendError:
    """Returns the BackendError for a score_mod that cannot be expressed by attention's arguments; hint: advice."""
    return BackendError(
        "flex_attention: score_mod: expected score * f + t or c * tanh(score * f) + t, with a number c, an f that does "
        f"not depend on the key, and a t that does not depend on the score; got {got}; {hint}"
    )


# ----------------------------------------------------------------------------------------------------- symbolic score


class _Form(NamedTuple):
    """The form factor * s, or cap * tanh(factor * s), of a score s; by_row: True if a factor that varies by query also
    multiplies s."""

    factor: float
    cap: float | None
    by_row: bool = False


_IDENTITY = _Form(1.0, None)


class _Score:
    """A symbolic score, on which a score_mod runs: it records factor and cap of the score, and the added terms."""

    device: torch.device

    def __init__(self, like: Tensor, form: _Form = _IDENTITY, bias: Any = 0.0, row: Tensor | None = None) -> None:
        self._like, self._form, self._bias, self._row = like, form, bias, row
        self.dtype, self.device, self.shape = like.dtype, like.device, like.shape
        self.ndim, self.requires_grad = 0, False

    def __add__(self, other: Any) -> _Score:
        """Returns the sum of this score and a number, a tensor or another score."""
        if not isinstance(other, _Score):
            return _Score(self._like, self._form, self._bias + other, self._row)
        if self._form.cap is not None or other._form.cap is not None or self._row is not other._row:
            raise refused(
                "a sum of two scores, one of them capped or scaled by row", "add before the cap and the factor"
            )
        factor = self._form.factor + other._form.factor
        return _Score(self._like, self._form._replace(factor=factor), self._bias + other._bias, self._row)

    __radd__ = __add__

    def __mul__(self, other: Any) -> _Score:
        """Returns this score times `other`, a number or, without a cap, a tensor; raises BackendError for others."""
        form = self._form
        if form.cap is not None:
            number = _number(other)
            return _Score(self._like, form._replace(cap=form.cap * number), self._bias * number, self._row)
        if isinstance(other, (int, float)):
            return _Score(self._like, form._replace(factor=form.factor * other), self._bias * other, self._row)
        if isinstance(other, _Score):
            raise refused("a product of two scores", _COMPUTE)
        row = other if self._row is None else self._row * other
        bias = self._bias * other if isinstance(self._bias, Tensor) or self._bias != 0 else 0.0
        return _Score(self._like, form._replace(by_row=True), bias, row)

    __rmul__ = __mul__

    def __neg__(self) -> _Score:
        return self * -1.0

    def __sub__(self, other: Any) -> _Score:
        return self + -other

    def __rsub__(self, other: Any) -> _Score:
        return -self + other

    def __truediv__(self, other: Any) -> _Score:
        if isinstance(other, _Score):
            raise refused("a quotient of two scores", _COMPUTE)
        return self * (1.0 / other)

    def tanh(self) -> _Score:
        if self._form.cap is not None or isinstance(self._bias, Tensor) or self._bias != 0:
            raise refused("tanh() of a sum or of another tanh()", "cap the score alone, and add after the cap")
        return _Score(self._like, self._form._replace(cap=1.0), row=self._row)

    def clone(self, *_: Any, **__: Any) -> _Score:
        return self

    to = float = type_as = contiguous = double = clone

    def dim(self) -> int:
        return 0

    def size(self, *_: Any) -> torch.Size:
        return self.shape

    def masked_fill(self, mask: Any, value: Any) -> _Score:
        return _chosen(mask, value, self)

    def __getattr__(self, name: str) -> Any:
        raise refused(f".{name} of a score", _COMPUTE)

    def _no(self, *_: Any) -> Any:
        raise refused("a comparison, a power or a product of scores", _COMPUTE)

    __rtruediv__ = __pow__ = __rpow__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __abs__ = __float__ = _no
    __eq__ = __ne__ = _no
    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.strip("_")
        function = _FUNCTIONS.get(name)
        if function is None or kwargs:
            raise refused(f"{name}() of a score", _COMPUTE)
        return function(*args)


_COMPUTE = "compute such scores with torch.nn.attention.flex_attention, or by hand"


def _number(value: Any) -> float:
    """Returns `value` as a Python number; raises BackendError if it varies by position or needs a gradient."""
    try:
        if not isinstance(value, Tensor) or not value.requires_grad:
            return float(value)
    except RuntimeError:  # vmap refuses float() of a value that varies with the position
        pass
    raise refused("a capped score times a factor that depends on the position or needs a gradient", _COMPUTE)


def _chosen(condition: Any, chosen: Any, other: Any) -> _Score:
    """Returns torch.where(condition, chosen, other) of two symbolic scores, or of one and -inf, as a symbolic score."""
    scores = [value for value in (chosen, other) if isinstance(value, _Score)]
    if not scores or isinstance(condition, _Score):
        raise refused("a condition on the score", _COMPUTE)
    form, like = scores[0]._form, scores[0]._like
    biases = []
    for value in (chosen, other):
        if isinstance(value, _Score):
            if value._form != form or value._row is not scores[0]._row:
                raise refused("where() of scores that differ in a factor or a cap", _COMPUTE)
            biases.append(_tensor(value._bias, like))
        else:
            if _number(value) != -torch.inf:
                raise refused("where() with a number in place of a score", 'hide a key by -float("inf")')
            biases.append(_tensor(-torch.inf, like))
    return _Score(like, form, torch.where(condition, *biases), scores[0]._row)


def _tensor(value: Any, like: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(like.dtype)
    return torch.full((), value, dtype=like.dtype, device=like.device)


# torch's functions by name; any argument may be the symbolic score.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("add", "radd"), lambda a, b: a + b if isinstance(a, _Score) else b + a),
    **dict.fromkeys(("sub", "subtract"), lambda a, b: a - b if isinstance(a, _Score) else b.__rsub__(a)),
    "rsub": lambda a, b: a.__rsub__(b) if isinstance(a, _Score) else b - a,
    **dict.fromkeys(("mul", "rmul", "multiply"), lambda a, b: a * b if isinstance(a, _Score) else b * a),
    **dict.fromkeys(
        ("div", "true_divide", "truediv"),
        lambda a, b: _Score.__truediv__(a, b) if isinstance(a, _Score) else b.__rtruediv__(a),
    ),
    "neg": lambda a: -a,
    "tanh": lambda a: a.tanh(),
    "clone": lambda a: a,
    "where": _chosen,
    "masked_fill": lambda value, mask, fill: _chosen(mask, fill, value),
}


# ------------------------------------------------------------------------------------------------------- recognising


class _Interpreted:
    """Runs a score_mod on a symbolic score: a call with (b, h, row, key) returns the term that it adds to the score.
    After a call, `form` has the factor and the cap of the score."""

    def __init__(self, score_mod: Callable[..., Any], dtype: torch.dtype) -> None:
        self.score_mod, self.dtype = score_mod, dtype
        self.form: _Form | None = None

    def __call__(self, b: Any, h: Any, row: Any, key: Any) -> Tensor:
        return self._both(b, h, row, key)[0]

    def by_row(self, b: Any, h: Any, row: Any, key: Any) -> Tensor:
        """Returns the tensor by which the score_mod multiplies the score at (batch, head, row, key), or 1."""
        return self._both(b, h, row, key)[1]

    def _both(self, b: Any, h: Any, row: Any, key: Any) -> tuple[Tensor, Tensor]:
        """Runs the score_mod on a symbolic score at (batch, head, row, key); returns (added term, tensor factor)."""
        like = torch.zeros((), dtype=self.dtype, device=b.device)
        score = self.score_mod(_Score(like), b, h, row, key)
        if not isinstance(score, _Score):
            score = _Score(like, _Form(0.0, None), score)
        if score._form != (self.form or score._form):
            raise refused("a function that differs between calls", "make it depend on its arguments alone")
        self.form = score._form
        return _tensor(score._bias, like), _tensor(1.0 if score._row is None else score._row, like)


class _Structure(NamedTuple):
    """The indices (batch, head, query, key) on which a score_mod depends."""

    varies: tuple[bool, ...]  # for batch, head, query and key: True if the bias depends on it
    relative: bool  # the bias depends on query and key by their distance alone
    by_row: tuple[bool, ...] | None  # as varies, for the tensor factor; None without such a factor


def terms(score_mod: Callable[..., Any], shape: Shape, dtype: torch.dtype, *, alone: bool, past: bool) -> Terms:
    """Converts a score_mod to arguments of attention(): a factor, a softcap, ALiBi slopes, a bias (in the query's dtype
    if that is exact, else in that of scores) or a mask. shape: sizes of batch, heads, queries, keys. alone: there is no
    block_mask; only then may hidden keys become a mask. past: a block_mask hides all keys after their query."""
    question = ("score_mod", shape, dtype, alone, past, torch.is_grad_enabled())
    return mods.remembered(
        score_mod, question, (score_mod,), lambda: _terms(score_mod, shape, dtype, alone, past),
        keep=lambda result: not any(t is not None and t.requires_grad for t in (result.bias, result.by_row)),
    )  # fmt: skip


def _terms(score_mod: Callable[..., Any], shape: Shape, dtype: torch.dtype, alone: bool, past: bool) -> Terms:
    """Converts a score_mod to arguments of attention(), without a cache, and compares both at random indices. alone:
    there is no block_mask. past: a block_mask hides all keys after their query."""
    bias = _Interpreted(score_mod, torch.float64 if dtype == torch.float64 else torch.float32)
    structure = mods.remembered(
        score_mod, ("structure", shape, dtype), (score_mod,), lambda: _structure(bias, shape), content=False
    )
    at, values = _shape_of(shape, structure.varies), None
    if structure.relative:
        distances = torch.arange(1 - shape.keys, shape.rows, device=shape.device)
        values = mods.by_distance(bias, _pairs(at)[:, 0], _pairs(at)[:, 1], distances)
    if values is not None:
        result = _of_distances(values.view(at.items, at.heads, -1), at, bias, alone, past, shape.heads)
    else:
        result = _of_matrix(_matrix(bias, at), bias, alone)
    assert bias.form is not None
    factor, cap, _ = bias.form
    if cap is not None:
        if cap == 0 or factor == 0:
            raise refused("a cap of zero", "return a value without the score")
        # cap * tanh(factor * s) = abs(cap) * tanh((factor * cap) * s / abs(cap)): tanh is odd.
        factor *= cap
    by_row = None if structure.by_row is None else _matrix(bias.by_row, _shape_of(shape, structure.by_row))
    if by_row is not None and by_row.numel() == 1 and not by_row.requires_grad:
        factor, by_row = factor * float(by_row), None
    result = replace(result, factor=factor, softcap=abs(cap or 0.0), by_row=by_row)
    _verify(score_mod, result, bias, shape)
    if result.bias is None:
        return result
    rounded = result.bias.to(dtype)  # bfloat16 has too few digits for large numbers
    exact = bool((rounded.detach() == result.bias.detach()).all())
    return replace(result, bias=rounded) if exact else result


def _structure(bias: _Interpreted, shape: Shape) -> _Structure:
    """Finds the indices (batch, head, query, key) on which a score_mod's (`bias`) added term and its factor depend."""
    with torch.no_grad():
        varies = tuple(mods.depends(bias, axis, shape.device) for axis in range(4))
        assert bias.form is not None
        by_row = None
        if bias.form.by_row:
            by_row = tuple(mods.depends(bias.by_row, axis, shape.device) for axis in range(4))
            if by_row[3]:
                raise refused("a score times a factor that depends on the key", "multiply the key tensor by the factor")
        if not (varies[2] and varies[3]):
            return _Structure(varies, False, by_row)
        zero = torch.zeros(1, dtype=torch.int64, device=shape.device)
        return _Structure(varies, mods.by_distance(bias, zero, zero, zero) is not None, by_row)


def _shape_of(shape: Shape, varies: tuple[bool, ...]) -> Shape:
    """Returns `shape` with size 1 for each index (batch, head, query, key) on which a function does not depend."""
    sizes = (shape.items, shape.heads, shape.rows, shape.keys)
    items, heads, rows, keys = (size if one else 1 for size, one in zip(sizes, varies, strict=True))
    return Shape(items, heads, rows, keys, shape.device)


def _pairs(at: Shape) -> Tensor:
    return torch.cartesian_prod(*(torch.arange(n, device=at.device) for n in (at.items, at.heads)))


def _matrix(values: mods.Mod, at: Shape) -> Tensor:
    """Returns the values [B, N, S1, S2] of a function of (b, h, q_idx, kv_idx) at all indices below the sizes `at`."""
    rows, keys = (torch.arange(size, device=at.device) for size in (at.rows, at.keys))
    rows_at_once = max(1, _CHUNK // max(1, len(keys)))
    matrices = [
        torch.cat([mods.at_pairs(values, b, h, chunk[None], keys[None]) for chunk in rows.split(rows_at_once)], 1)
        for b, h in zip(*_pairs(at).t()[:, :, None], strict=True)
    ]
    return torch.cat(matrices).view(at.items, at.heads, at.rows, at.keys)


def _of_matrix(values: Tensor, bias: _Interpreted, alone: bool) -> Terms:
    """Returns the mask or bias for the values that a score_mod (`bias`) adds to scores, [B or 1, N or 1, S1 or 1, S2 or
    1]: a mask if all are 0 or -inf and there is no block_mask (`alone`)."""
    if values.requires_grad:
        return Terms(bias=values)
    hidden = values == -torch.inf
    if alone and hidden.any() and not values.masked_fill(hidden, 0).any():
        return Terms(mask=_visibility(bias))
    return Terms(bias=values) if values.any() else Terms()


def _of_distances(values: Tensor, at: Shape, bias: _Interpreted, alone: bool, past: bool, heads: int) -> Terms:
    """Returns ALiBi slopes or a bias for the values that a score_mod (`bias`) adds at each distance row - key, [B, N,
    S2 + S1 - 1] for distances 1 - S2 to S1 - 1: slopes if they are linear in |distance|. at: the sizes. alone: there is
    no block_mask. past: a block_mask hides all keys after their query."""
    if values.requires_grad:
        return Terms(bias=_spread(values, at))
    distance = torch.arange(1 - at.keys, at.rows, device=values.device)
    if past:
        values = values.masked_fill(distance < 0, 0)
    hidden = values == -torch.inf
    if hidden.any() and not alone:
        return Terms(bias=_spread(values, at), behind=past)
    mask = _visibility(bias) if hidden.any() else None
    if not values.masked_fill(hidden, 0).any():
        return Terms(mask=mask, behind=past)
    slopes = _slopes(values, distance, hidden | (distance < 0) if past else hidden)
    if slopes is not None:
        slopes = slopes.expand(*slopes.shape[:-1], heads).contiguous()
        return Terms(slopes=slopes, mask=mask, behind=past)
    return Terms(bias=_spread(values, at), behind=past)


def _slopes(values: Tensor, distance: Tensor, free: Tensor) -> Tensor | None:
    """Returns slopes [N] or [B, N] with -slope * |distance| = values [B, N, D] except where `free`, or else None."""
    if values.dtype != torch.float32:
        return None
    adjacent = (~free & (distance.abs() == 1)).expand_as(values)
    if not adjacent.any(-1).all():
        return None
    slopes = -values.gather(-1, adjacent.int().argmax(-1, keepdim=True))
    if not ((values == -(slopes * distance.abs())) | free).all():
        return None
    slopes = slopes[..., 0]
    return slopes[0] if len(slopes) == 1 else slopes


def _spread(values: Tensor, at: Shape) -> Tensor:
    """Expands values [B, N, S2 + S1 - 1], one for each distance row - key, to a view [B, N, S1, S2]."""
    windows = values.flip(-1).unfold(-1, at.keys, 1)  # window t has the distances S1 - 1 - t, S1 - 2 - t, ...
    return windows.flip(-2)


def _visibility(bias: _Interpreted) -> mods.Mod:
    """Returns a mask_mod that is True where the score_mod (`bias`) adds another number than -inf."""

    def mask(b: Any, h: Any, row: Any, key: Any) -> Tensor:
        return bias(b, h, row, key) != -torch.inf

    return mask


# --------------------------------------------------------------------------------------------------------- verifying


def _verify(score_mod: Callable[..., Any], score_terms: Terms, bias: _Interpreted, shape: Shape) -> None:
    """Compares the converted terms with score_mod at random indices and scores; raises BackendError if they differ."""
    random = torch.Generator().manual_seed(0)
    sizes = (shape.items, shape.heads, shape.rows, shape.keys)
    points = [torch.randint(0, size, (_PROBES,), generator=random) for size in sizes]
    if score_terms.behind:
        points[3] = torch.minimum(points[2], points[3])
    b, h, row, key = (p.to(shape.device) for p in points)
    score = (4 * torch.randn(_PROBES, generator=random)).to(shape.device, bias.dtype)
    with torch.no_grad():
        theirs = mods.at_points(score_mod, score, b, h, row, key)
        theirs = torch.as_tensor(theirs, device=shape.device).double().expand(_PROBES)
        s = score.double() * score_terms.factor
        if score_terms.by_row is not None:
            s = s * _picked(score_terms.by_row, b, h, row, key)
        capped = score_terms.softcap * torch.tanh(s / score_terms.softcap) if score_terms.softcap else s
        added = _added(score_terms, b, h, row, key).double()
        ours = capped + added
        if score_terms.mask is not None:
            visible = mods.at_points(score_terms.mask, b, h, row, key).expand(_PROBES)
            ours = ours.masked_fill(~visible, -torch.inf)
        slack = 64 * torch.finfo(bias.dtype).eps * (1 + capped.abs() + s.abs() + added.abs())
        same = ((ours - theirs).abs() <= slack) | (ours == theirs) | (ours.isnan() & theirs.isnan())
    if not bool(same.all()):
        at = int((~same).int().argmax())
        place = ", ".join(
            f"{n}={int(p[at])}" for n, p in zip(("b", "h", "q_idx", "kv_idx"), (b, h, row, key), strict=True)
        )
        raise refused(
            f"{float(theirs[at]):.9g} for the score {float(score[at]):.9g} at {place}, where the converted formula "
            f"gives {float(ours[at]):.9g}",
            "make it depend on its arguments alone, and do not round the score",
        )


def _added(score_terms: Terms, b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
    """Returns [n]: the bias, or -slope * |key - row|, of `score_terms` at n points, given as index tensors [n]."""
    if score_terms.slopes is not None:
        slopes = score_terms.slopes if score_terms.slopes.ndim == 2 else score_terms.slopes[None]
        items, heads = slopes.shape
        return -slopes[b if items > 1 else 0 * b, h if heads > 1 else 0 * h] * (key - row).abs()
    return torch.zeros_like(row) if score_terms.bias is None else _picked(score_terms.bias, b, h, row, key)


def _picked(values: Tensor, *indices: Tensor) -> Tensor:
    """Returns values[indices], [n], from one index tensor [n] per axis; an axis of size 1 broadcasts."""
    clipped = (place if size > 1 else 0 * place for place, size in zip(indices, values.shape, strict=True))
    return values.detach()[tuple(clipped)]
