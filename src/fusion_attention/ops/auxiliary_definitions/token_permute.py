"""Operator definitions of functions that permute rows of tokens into the order of experts, and back."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusion_attention.contract import INVALID, Array, Attr, Op, Rule, Tensor
from fusion_attention.ops.auxiliary_definitions.common import FLOATS, auxiliary, floats, result
from fusion_attention.ops.shared.rules import invalid, meaning, presence

SIZES = {"T": 6, "P": 12, "K": 2, "H": 4, "E": 3}  # tokens, experts of a token, elements of a row, experts
IDS = "int32 int64"


def counting(modulo: int, dtype: torch.dtype = torch.int32) -> Callable[[tuple[int, ...]], torch.Tensor]:
    """Returns a function from a shape to a tensor of sample ids: 0, 1, ... modulo - 1, 0, 1, ..."""
    return lambda shape: (torch.arange(math.prod(shape)) % modulo).reshape(shape).to(dtype)


def moe(name: str, summary: str, inputs: tuple[Any, ...], results: tuple[Tensor, ...], **more: Any) -> Op:
    """Returns the operator definition of a function that permutes rows of tokens by expert; more: other fields of Op,
    and `sample` and `sizes` of sample calls."""
    sample, sizes = more.pop("sample", {}), more.pop("sizes", {})
    return auxiliary(name, summary, inputs, results, sample=sample, sizes=SIZES | sizes, **more)


TOKENS = floats("tokens", "A row for every token.", shape="T H")
INDICES = Tensor(
    "indices", "The experts of every token: [T, K], or [T] if K is 1.", dtypes=IDS, make=counting(3), shape=""
)
PERMUTED = floats("permuted_tokens", "Rows in the order of experts.", shape="R H")
SORTED = Tensor(
    "sorted_indices",
    "[T*K]; element t * K + k: index of the row for expert k of token t. Rows that do not exist are read as zeros.",
    dtypes=IDS,
    make=counting(12),
    shape="P",
)
PADDED = Attr("padded_mode", "False: the only supported value.", type=bool, default=False, domain="not padded_mode")
RESTORE = Array("restore_shape", "Without effect: for padded_mode.", optional=True)


def probs(text: str, shape: str, **changes: Any) -> Tensor:
    return Tensor("probs", text, optional=True, dtypes=FLOATS, shape=shape, **changes)


CHOSEN = invalid(
    "indices.dim() in (1, 2) and indices.shape[0] == T",
    "indices: [T, K] or [T] (one row for every token)",
    invalid={"indices": "3 4"},
)
ENOUGH = invalid(
    "num_out_tokens is None or -indices.numel() <= num_out_tokens",
    "num_out_tokens: at least -T*K (a negative number drops so many rows)",
    invalid={"num_out_tokens": -13},
)


def one_place_each(choices: str, **more: Any) -> Rule:
    """Returns a rule that checks calls: sorted_indices has an element for every pair of a token and one of its experts;
    choices: the expression for the number of pairs."""
    return invalid(f"P == {choices}", "sorted_indices (one per token and expert)", invalid={"P": 7}, **more)


PERMUTE = moe(
    "npu_moe_token_permute",
    "Copies the row of each token once for each of its experts, in the order of experts.",
    (
        TOKENS,
        INDICES,
        Attr("num_out_tokens", "Number of rows in the result; None or 0: all; n < 0: all except -n.", default=None),
        PADDED,
    ),
    (
        result("permuted_tokens", "[num_out_tokens, H].", "=tokens"),
        result("sorted_indices", "int32 [T*K]; element t * K + k: index of the row for expert k of token t.", "int32"),
    ),
    rules=(CHOSEN, ENOUGH),
    formula="order = stable sort of indices [T*K] by expert\n"
    "permuted[i] = tokens[order[i] // K],  sorted[order[i]] = i",
    sample={"indices": "T K"},
    returns="(permuted_tokens, sorted_indices), for npu_moe_token_unpermute; the first is differentiable in tokens.",
    example="""\
>>> tokens = torch.tensor([[1.0], [2.0], [3.0], [0.0]])
>>> rows, places = npu_moe_token_permute(tokens, torch.tensor([[0, 4], [4, 3], [4, 2], [1, 1]]))
>>> rows[:, 0].tolist(), places.tolist()
([1.0, 0.0, 0.0, 3.0, 2.0, 1.0, 2.0, 3.0], [0, 5, 6, 4, 7, 3, 1, 2])""",
)
PERMUTE_GRAD = moe(
    "npu_moe_token_permute_grad",
    "The gradient of npu_moe_token_permute.",
    (
        TOKENS,
        floats("grad_permuted_tokens", "Gradient of permuted_tokens.", shape="R H", like="tokens"),
        INDICES,
        SORTED,
        PADDED,
    ),
    (result("grad_tokens", "In the shape of tokens.", "=tokens"),),
    rules=(CHOSEN, one_place_each("indices.numel()")),
    formula="grad_tokens[t] = sum_k grad_permuted[sorted[t * K + k]]",
    sample={"indices": "T K"},
    sizes={"R": 12},
    example="""\
>>> tokens, indices = torch.randn(3, 2, requires_grad=True), torch.tensor([[0, 1], [1, 2], [2, 0]])
>>> rows, places = npu_moe_token_permute(tokens, indices)
>>> rows.sum().backward()
>>> torch.equal(npu_moe_token_permute_grad(tokens.detach(), torch.ones(6, 2), indices, places), tokens.grad)
True""",
)
UNPERMUTE = moe(
    "npu_moe_token_unpermute",
    "Sums the rows of each token's experts, with weights.",
    (PERMUTED, SORTED, probs("Weights of the experts of each token; None: K is 1.", "T K"), PADDED, RESTORE),
    (result("unpermuted_tokens", "[T, H].", "=permuted_tokens"),),
    rules=(one_place_each("T * K", when="probs is not None"),),
    formula="out[t] = sum_k probs[t, k] * permuted[sorted[t * K + k]]",
    sample={"probs": True},
    sizes={"R": 12},
    declared={"restore_shape": Sequence[int] | None},
    returns="[T, H], differentiable in permuted_tokens and probs.",
    example="""\
>>> tokens, indices = torch.randn(3, 2), torch.tensor([[0, 1], [1, 2], [2, 0]])
>>> rows, places = npu_moe_token_permute(tokens, indices)
>>> torch.equal(npu_moe_token_unpermute(rows, places, torch.full((3, 2), 0.5)), tokens)
True""",
)
UNPERMUTE_GRAD = moe(
    "npu_moe_token_unpermute_grad",
    "The gradients of npu_moe_token_unpermute.",
    (
        PERMUTED,
        floats("grad_unpermuted_tokens", "Gradient of the output.", shape="T H", like="permuted_tokens"),
        SORTED,
        probs("The forward's weights.", "T K"),
        PADDED,
        RESTORE,
    ),
    (
        result("grad_permuted_tokens", "In the shape of permuted_tokens.", "=permuted_tokens"),
        result("grad_probs", "In the shape of probs; None without probs.", "=probs"),
    ),
    rules=(
        one_place_each("T * K", when="probs is not None"),
        one_place_each("T", when="probs is None", given={"probs": None, "P": 6}),
    ),
    formula="dpermuted[sorted[t * K + k]] = probs[t, k] * dout[t]\n"
    "dprobs[t, k] = sum over H of dout[t] * permuted[sorted[t * K + k]]",
    sample={"probs": True},
    sizes={"R": 12},
    declared={"restore_shape": Sequence[int] | None},
    example="""\
>>> rows, places = torch.randn(6, 2), torch.tensor([0, 2, 1, 4, 3, 5])
>>> drows, dprobs = npu_moe_token_unpermute_grad(rows, torch.ones(3, 2), places, torch.ones(3, 2))
>>> drows.tolist() == torch.ones(6, 2).tolist(), list(dprobs.shape)
(True, [3, 2])""",
)

MAP = Tensor(
    "routing_map", "Nonzero: the expert has the token; every row has the same number of nonzero elements.",
    dtypes="bool int8 uint8", shape="T E",
    make=lambda shape: torch.arange(math.prod(shape)).reshape(shape) % 3 != 2,
)  # fmt: skip
DROP_AND_PAD = Attr(
    "drop_and_pad",
    "Every expert has num_out_tokens // E rows: those of its tokens, then those of the first other tokens.",
    type=bool,
    default=False,
)


def within(ids: torch.Tensor, end: int) -> bool:
    """True if all ids are in [0, end)."""
    return bool(((ids >= 0) & (ids < end)).all())


def chosen(routing_map: torch.Tensor) -> torch.Tensor:
    """Returns the number of experts of each token, int [tokens], from a map [tokens, experts], nonzero for them."""
    return routing_map.bool().sum(1)


EVENLY = meaning(
    "bool((chosen(routing_map) == num_out_tokens // T).all())",
    "routing_map: num_out_tokens // tokens experts in every row (without drop_and_pad every token has as many experts)",
    when="T > 0 and num_out_tokens is not None and 0 <= num_out_tokens <= T * E and not drop_and_pad",
    code=INVALID,
    reads=True,
    invalid={"num_out_tokens": 6},
)
PERMUTE_MAP = moe(
    "npu_moe_token_permute_with_routing_map",
    "Copies the row of each token once for each of its experts in routing_map, in the order of experts.",
    (
        TOKENS,
        MAP,
        probs("Weights, which are returned in the order of the rows.", "T E"),
        Attr("num_out_tokens", "Number of rows in the result; None: T.", default=None),
        DROP_AND_PAD,
    ),
    (
        result("permuted_tokens", "[rows, H].", "=tokens"),
        result("permuted_probs", "[rows], or None.", "=probs"),
        result(
            "sorted_indices",
            "int32 [rows]: as of npu_moe_token_permute; with drop_and_pad the token of each row.",
            "int32",
        ),
    ),
    rules=(
        EVENLY,
        invalid(
            "num_out_tokens is None or 0 <= num_out_tokens <= routing_map.numel()",
            "num_out_tokens: 0 <= num_out_tokens <= tokens * experts (at most a row for every token and expert)",
            invalid={"num_out_tokens": 19},
        ),
    ),
    functions={"chosen": chosen},
    formula="rows = (expert, token) of nonzero elements, ordered by expert\npermuted[i] = tokens[token of row i],  "
    "permuted_probs[i] = probs[token, expert of row i]",
    sample={"num_out_tokens": 12, "probs": True},
    keywords="probs",
    returns="(permuted_tokens, permuted_probs, sorted_indices), for npu_moe_token_unpermute_with_routing_map. The "
    "first is differentiable in tokens, the second in probs.",
    example="""\
>>> where = torch.tensor([[True, False], [False, True], [True, False]])
>>> rows, _, places = npu_moe_token_permute_with_routing_map(torch.tensor([[1.0], [2.0], [3.0]]), where)
>>> rows[:, 0].tolist(), places.tolist()
([1.0, 3.0, 2.0], [0, 2, 1])""",
)
UNPERMUTE_MAP = moe(
    "npu_moe_token_unpermute_with_routing_map",
    "Sums the rows of each token's experts in routing_map, with weights.",
    (
        PERMUTED,
        Tensor("sorted_indices", "[R], from the permutation.", dtypes=IDS, make=counting(6), shape="R"),
        Array("restore_shape", "[T, H], the shape of the output."),
        probs("Weights [T, E]; they require routing_map, except with drop_and_pad.", "T E"),
        Tensor(**{**vars(MAP), "optional": True}),
        DROP_AND_PAD,
    ),
    (result("unpermuted_tokens", "[T, H].", "=permuted_tokens"),),
    rules=(
        invalid(
            "len(restore_shape) == 2 and min(restore_shape) >= 0 and restore_shape[1] == H",
            "restore_shape: [T, H] (the shape of the output)",
            invalid={"restore_shape": [6, 5]},
        ),
        invalid(
            "R == int(restore_shape[0]) * (R // max(restore_shape[0], 1)) and (probs is None or R <= T * E)",
            "sorted_indices: the same number of rows for every token (at most one per expert)",
            when="not drop_and_pad and len(restore_shape) == 2",
            invalid={"R": 11},
        ),
        invalid(
            "probs is None or len(restore_shape) != 2 or restore_shape[0] == T",
            "probs: [T, E] (weights for every token)",
            invalid={"probs": "5 3", "routing_map": "5 3"},
        ),
        presence(
            "probs is None or drop_and_pad or routing_map is not None",
            "routing_map: a map beside probs (it selects the weights)",
            invalid={"routing_map": None},
        ),
        meaning(
            "within(sorted_indices, restore_shape[0])",
            "sorted_indices: 0 <= token < T (with drop_and_pad they are tokens)",
            when="drop_and_pad and len(restore_shape) == 2",
            code=INVALID,
            reads=True,
            given={"drop_and_pad": True},
            invalid={"sorted_indices": torch.full((12,), 9)},
        ),
        invalid(
            "E > 0 and R % E == 0",
            "permuted_tokens: a multiple of E rows (with drop_and_pad all experts have the same number of rows)",
            when="drop_and_pad and probs is not None",
            given={"drop_and_pad": True},
            invalid={"R": 11},
        ),
    ),
    functions={"within": within},
    formula="out[t] = sum over the rows of token t of probs * permuted[row]",
    sample={"probs": True, "routing_map": True, "restore_shape": [6, 4]},
    sizes={"R": 12},
    keywords="probs",
    declared={"restore_shape": Sequence[int]},
    returns="Differentiable in permuted_tokens and probs.",
    example="""\
>>> tokens, where = torch.randn(3, 2), torch.tensor([[1, 1], [1, 1], [1, 1]], dtype=torch.int8)
>>> rows, _, places = npu_moe_token_permute_with_routing_map(tokens, where, num_out_tokens=6)
>>> torch.equal(npu_moe_token_unpermute_with_routing_map(rows, places, [3, 2]), 2 * tokens)
True""",
)
RECORDS = (PERMUTE, PERMUTE_GRAD, UNPERMUTE, UNPERMUTE_GRAD, PERMUTE_MAP, UNPERMUTE_MAP)
