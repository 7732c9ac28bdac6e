"""Operator definitions of rotary position embedding."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fusion_attention.contract import Array, Attr, Rule, Tensor
from fusion_attention.ops.auxiliary_definitions.common import auxiliary, floats, no_derivative, result, same_shape
from fusion_attention.ops.shared.params import one_of
from fusion_attention.ops.shared.rules import invalid, meaning

X = floats("input", "The rows that are rotated.")
COS = floats("r1", "Cosines, which broadcast to input.")
SIN = floats("r2", "Sines, in the shape of r1.")
MODE = Attr(
    "rotary_mode", 'Pairs of elements: "half": i and i + D/2; "interleave": 2i and 2i + 1.', type=str, default="half"
)
MODES = invalid(
    "rotary_mode in ('half', 'interleave')",
    "rotary_mode: 'half' or 'interleave' (The rotary_mode of npu_rotary_mul should be half or interleave, but got "
    "neither)",
)
EVEN = invalid(
    "halves(input, -1)", "input: rows of an even size (elements are rotated in pairs)", invalid={"input": "B 5"}
)
FORMULA = """y = x * cos + rotated(x) * sin
half:        rotated(x) = (-x[D/2:], x[:D/2])
interleave:  rotated(x)[2i] = -x[2i+1],  rotated(x)[2i+1] = x[2i]"""
TEX = r"""\begin{aligned}
y &= x \cos + rotated(x) \sin \\
rotated_{half}(x) &= (-x_{D/2 \ldots}, x_{\ldots D/2}), \qquad rotated_{interleave}(x)_{2i, 2i+1} = (-x_{2i+1}, x_{2i})
\end{aligned}"""
ROTATED = "The rotated (query, key), in new tensors."
ROWS = {"input": "B S1 N1 W", "r1": "1 S1 1 W", "r2": "1 S1 1 W"}


def angles(cos: str, sin: str, first: str, *rows: str) -> tuple[Rule, ...]:
    """Returns rules that check calls: cosines broadcast to the rotated tensors, and sines have their shape.

    All arguments are names of parameters: cosines, sines, and the rotated tensors first and rows.
    """
    fit = invalid(
        f"expands_to({cos}, {first})",
        f"{cos}: a shape that broadcasts to that of {first} (axes of size 1 are repeated)",
        invalid={cos: "7 W", sin: "7 W"},
    )
    # Cosines that fit the first tensor but not the second have more heads than it.
    others = (
        invalid(
            f"expands_to({cos}, {name})",
            f"{name}: a shape to which {cos} broadcasts (both are rotated by the same angles)",
            when=f"expands_to({cos}, {first})",
            invalid={name: "B 3 N1 W"},
        )
        for name in rows
    )
    same = invalid(f"{sin}.shape == {cos}.shape", f"{sin}: the shape of {cos} (of the same angles)", invalid={sin: "W"})
    return (fit, *others, same)


def even(name: str, *also: str) -> Rule:
    """Returns a rule that checks calls: the last axis of tensor `name` has an even size; also: tensors whose last axis
    is odd too in the sample call that violates it."""
    return replace(EVEN, check=f"halves({name}, -1)", param=name, invalid=dict.fromkeys((name, *also), "B 3 N1 5"))


def pairs(*names: str) -> dict[str, Any]:
    """Returns {name: names of axes} for sample calls; the last two names are cosines and sines, the others rows."""
    return dict.fromkeys(names[:-2], "B S1 N1 W") | dict.fromkeys(names[-2:], "1 S1 1 W")


ROTARY_MUL = auxiliary(
    "npu_rotary_mul",
    "Rotates pairs of elements by the angles of their positions.",
    (
        X,
        COS,
        SIN,
        MODE,
        floats("rotate", "[D, D]: x @ rotate replaces rotated(x); of any floating-point dtype.", optional=True),
    ),
    (result("y", "In the shape of input.", "=input"),),
    rules=(
        MODES,
        replace(EVEN, invalid=dict.fromkeys(("input", "r1", "r2"), "B 5")),
        *angles("r1", "r2", "input"),
        invalid(
            "rotate is None or tuple(rotate.shape) == (input.shape[-1], input.shape[-1])",
            "rotate: [D, D] (rows are multiplied by it)",
            when="input.dim() > 0",
            invalid={"rotate": "W 3"},
        ),
    ),
    formula=FORMULA,
    tex=TEX,
    sample=ROWS,
    example="""\
>>> quarter = torch.zeros(4), torch.ones(4)  # cosine and sine of 90 degrees
>>> npu_rotary_mul(torch.tensor([1.0, 2.0, 3.0, 4.0]), *quarter).tolist()
[-3.0, -4.0, 1.0, 2.0]
>>> npu_rotary_mul(torch.tensor([1.0, 2.0, 3.0, 4.0]), *quarter, "interleave").tolist()
[-2.0, 1.0, -4.0, 3.0]""",
)
ROTARY_MUL_BACKWARD = auxiliary(
    "npu_rotary_mul_backward",
    "The gradients of npu_rotary_mul.",
    (floats("grad", "Gradient of y."), floats("input", "The forward's input.", like="grad"), COS, SIN, MODE),
    (
        result("dx", "In the shape of input.", "=input"),
        result("dr1", "In the shape of r1.", "=r1"),
        result("dr2", "In the shape of r2.", "=r2"),
    ),
    rules=(
        replace(MODES, advice="pairs are i and i + D/2, or 2i and 2i + 1"),
        same_shape("grad", "input"),
        replace(EVEN, invalid=dict.fromkeys(("grad", "input", "r1", "r2"), "B 5")),
        *angles("r1", "r2", "input"),
    ),
    formula="dx = dy * cos - rotated(dy * sin),  dcos = dy * x,  dsin = dy * rotated(x), summed where cos was repeated",
    sample={**ROWS, "grad": "B S1 N1 W"},
    example="""\
>>> x, cos, sin = torch.randn(3, 2, 4).requires_grad_().unbind()
>>> want = torch.autograd.grad(npu_rotary_mul(x, cos, sin).sum(), (x, cos, sin))
>>> found = npu_rotary_mul_backward(torch.ones(2, 4), x.detach(), cos.detach(), sin.detach())
>>> all(map(torch.allclose, found, want))
True""",
)
QUERY, KEY = floats("query", "Query rows."), floats("key", "Key rows.", like="query")
APPLY = auxiliary(
    "npu_apply_rotary_pos_emb",
    "npu_rotary_mul of queries and keys.",
    (
        *(QUERY, KEY, floats("cos", "Cosines, which broadcast to both."), floats("sin", "Sines, in the shape of cos.")),
        one_of(
            "layout",
            "Axis order of query and key; without effect, as cos broadcasts.",
            ("BSH", "BSND", "SBND", "BNSD", "TND"),
            default="BSND",
        ),
        MODE,
    ),
    (result("query_out", "In the shape of query.", "=query"), result("key_out", "In the shape of key.", "=query")),
    rules=(
        replace(MODES, advice="pairs are i and i + D/2, or 2i and 2i + 1"),
        even("query", "key", "cos", "sin"),
        *angles("cos", "sin", "query", "key"),
        *no_derivative(query=(2, 4, 4, 8), key=(2, 4, 4, 8)),
    ),
    formula=FORMULA,
    tex=TEX,
    returns=ROTATED,
    sample=pairs("query", "key", "cos", "sin"),
    example="""\
>>> q, k = torch.randn(2, 5, 8, 16), torch.randn(2, 5, 2, 16)
>>> angles = torch.rand(1, 5, 1, 16)
>>> rotated, _ = npu_apply_rotary_pos_emb(q, k, angles.cos(), angles.sin())
>>> rotated.shape == q.shape
True""",
)
INTERLEAVE_ROPE = auxiliary(
    "npu_interleave_rope",
    "Rotates pairs of adjacent elements, and returns the first elements of all pairs, then the second ones.",
    (
        floats("x", "The rows that are rotated: [B, N, S, D]."),
        floats("cos", "Cosines [B, 1, S or 1, D], in the order of the result's elements."),
        floats("sin", "Sines, in the shape of cos."),
    ),
    (result("y", "In the shape of x.", "=x"),),
    rules=(even("x", "cos", "sin"), *angles("cos", "sin", "x"), *no_derivative(x=(2, 4, 4, 8))),
    formula="h = (x[0::2], x[1::2])\ny = h * cos + (-h[D/2:], h[:D/2]) * sin",
    tex=r"h = (x_{0,2,\ldots}, x_{1,3,\ldots}), \qquad y = h \cos + (-h_{D/2 \ldots}, h_{\ldots D/2}) \sin",
    sample=pairs("x", "cos", "sin"),
    example="""\
>>> npu_interleave_rope(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.ones(4), torch.zeros(4)).tolist()
[1.0, 3.0, 2.0, 4.0]""",
)


def flat_rows(tokens: int, tensor: torch.Tensor, head_size: int) -> bool:
    """True if a tensor has `tokens` rows, whose size is a multiple of head_size."""
    return tensor.dim() > 1 and tensor.shape[0] == tokens and tensor.shape[1:].numel() % head_size == 0


def sections_fit(section: Any, positions: torch.Tensor, width: int) -> bool:
    """True if `section` has a length for each row of positions [kinds, tokens] (such as time, height, width), which add
    up to width / 2; for positions [tokens] it may be None."""
    if positions.dim() == 1:
        return section is None or len(section) == 3
    if section is None or len(section) != len(positions):
        return False
    return bool((section >= 0).all()) and int(section.sum()) * 2 == width


MROPE = auxiliary(
    "npu_mrope",
    "Rotates queries and keys by angles from a table, with positions of one kind, or of three or four (images, video).",
    (
        Tensor("positions", "[T]; [3, T]: time, height and width; [4, T]: four kinds.", dtypes="int64 int32"),
        floats("query", "[T, heads * head_size]."),
        floats("key", "[T, heads * head_size]."),
        floats("cos_sin_cache", "[positions, rotary size]: the cosines, then the sines of rotary size / 2 angles."),
        Attr("head_size", "Elements of a head; those behind the rotary size are unchanged.", domain="head_size > 0"),
        Array("mrope_section", "Number of angles of each kind of positions.", True),
        MODE,
        one_of(
            "cache_mode",
            'Order of angles: "default": section by section; "interleave": height at 1, 4, ... and width at 2, 5, ...',
            ("default", "interleave"),
        ),
    ),
    (result("query_out", "In the shape of query.", "=query"), result("key_out", "In the shape of key.", "=key")),
    rules=(
        invalid(
            "positions.dim() == 1 or positions.dim() == 2 and positions.shape[0] in (3, 4)",
            "positions: [T], [3, T] or [4, T] (one kind of positions, three or four)",
            invalid={"positions": torch.zeros(2, 4, dtype=torch.int64)},
        ),
        *(
            invalid(
                f"flat_rows(positions.shape[-1], {name}, head_size)",
                f"{name}: [T, heads * head_size] (heads of head_size elements)",
                when="positions.dim() in (1, 2)",
                invalid={name: "S1 7"},
            )
            for name in ("query", "key")
        ),
        invalid(
            "cos_sin_cache.dim() == 2 and halves(cos_sin_cache, 1) and 0 < cos_sin_cache.shape[1] <= head_size",
            "cos_sin_cache: [positions, rotary size] with an even rotary size of at most head_size (a row for every "
            "position)",
            invalid={"cos_sin_cache": "7 5"},
        ),
        meaning(
            "sections_fit(mrope_section, positions, cos_sin_cache.shape[1])",
            "mrope_section: a number of angles for each kind of positions (the sum is rotary size / 2)",
            when="cos_sin_cache.dim() == 2 and (positions.dim() == 1 or positions.shape[:-1] in ((3,), (4,)))",
            invalid={"mrope_section": [1, 2]},
        ),
        invalid(
            "positions.shape[:-1] != (4,) or cache_mode == 'default'",
            "cache_mode: 'default' beside four kinds of positions (four kinds are not interleaved)",
            given={"positions": torch.zeros(4, 4, dtype=torch.int64), "mrope_section": [1, 1, 1, 1]},
            invalid={"cache_mode": "interleave"},
        ),
        meaning(
            "within(positions, cos_sin_cache.shape[0])",
            "positions: numbers of rows of cos_sin_cache (each position has a row)",
            reads=True,
            when="cos_sin_cache.dim() == 2",
            invalid={"positions": torch.tensor([0, 1, 2, 7])},
        ),
        *no_derivative(query=(4, 32), key=(4, 16)),
    ),
    formula=f"cos, sin = the halves of cos_sin_cache[positions], an angle for each pair of elements\n{FORMULA}",
    returns=ROTATED,
    functions={"flat_rows": flat_rows, "sections_fit": sections_fit},
    sizes={"S1": 4},
    sample={
        "positions": torch.tensor([0, 5, 2, 6]),
        "query": "S1 32",
        "key": "S1 16",
        "cos_sin_cache": "7 W",
        "head_size": 8,
    },
    keywords="mrope_section",
    declared={"mrope_section": Sequence[int] | None, "rotary_mode": str | None, "cache_mode": str | None},
    example="""\
>>> q, k, table = torch.randn(5, 8 * 16), torch.randn(5, 2 * 16), torch.rand(10, 16)
>>> rotated, _ = npu_mrope(torch.arange(5), q, k, table, 16, mrope_section=[0, 0, 0])
>>> rotated.shape == q.shape
True""",
)

RECORDS = (ROTARY_MUL, ROTARY_MUL_BACKWARD, APPLY, INTERLEAVE_ROPE, MROPE)
