"""What the rules of all operators have in common: their kinds, and the rules that several families ask.

The rules of one family stand in a file of its own. Levels and codes: docs/rulings.md 15.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fusion_attention.contract import INVALID, NULL_POINTER, Rule, Settings

PADDED, PACKED = ("BSND", "BSH", "SBH", "BNSD"), ("TND",)
ROPE = {"query_rope": True, "key_rope": True}

# What a call must have, how dtypes and lengths must be, and what the chip alone demands.
presence = partial(Rule, stage="presence", code=NULL_POINTER)
typed = partial(Rule, stage="dtype", code=INVALID)
of_lengths = partial(Rule, stage="lengths")
limit = partial(Rule, level="limit")
# The same of what CANN calls an invalid parameter.
invalid = partial(Rule, code=INVALID)
refused = partial(limit, code=INVALID)
# What is said of a call that runs all the same, or only where contents are checked.
note = partial(Rule, level="note")
content = partial(Rule, level="content")


def group(*rules: Rule, **common: Any) -> tuple[Rule, ...]:
    """The rules, with the fields that all of them share."""
    return tuple(replace(rule, **common) for rule in rules)


# ------------------------------------------------------------------------------------------------------------- meaning


def needed(param: str, advice: str, text: str = "", **more: Any) -> Rule:
    """A parameter that a call must have."""
    return presence(f"{param} is not None", param, advice, text, invalid={param: None}, **more)


def elements(axis: str, param: str, bad: int = 769, *, optional: bool = False, **more: Any) -> Rule:
    """An axis of elements that one head has; optional: there may be no such tensor."""
    bounds = f"1 <= {axis} <= 768"
    check, text = (f"{axis} is None or {bounds}", bounds) if optional else (bounds, "")
    return invalid(check, param, "elements per head", text, invalid={axis: bad}, **more)


def groups_of_heads(key: str, *others: str) -> Rule:
    """Query heads share key heads evenly; others: what else may be wrong."""
    advice = "; ".join(("every key head serves the same number of query heads", *others))
    return Rule("N1 > 0 and N2 > 0 and N1 % N2 == 0", key, advice, invalid={"N2": 3})


def rope_pair(query_rope: str, key_rope: str, given: Settings) -> Rule:
    """Rope parts of both sides, or of neither."""
    text, check = f"{query_rope} and {key_rope}, or neither", f"({query_rope} is None) == ({key_rope} is None)"
    return presence(check, query_rope, "rope parts come in pairs", text, given=given, invalid={key_rope: None})


def finite_scale(scale: str, bad: float = float("inf"), *, optional: bool = True) -> Rule:
    """A scale that float32 can hold."""
    check = f"abs({scale}) < 3.4e38"
    if optional:
        check = f"{scale} is None or {check}"
    return Rule(check, scale, "of float32", "a finite scale", invalid={scale: bad})


def one_length_each(q_len: str, kv_len: str) -> Rule:
    """Packed sequences with a length on both sides."""
    both = f"{q_len} is not None and {kv_len} is not None"
    check, advice = f"len({q_len}) == len({kv_len})", "one length per sequence in both"
    return of_lengths(check, kv_len, advice, when=both, only=PACKED, invalid={kv_len: [12]})


def broadcasting(columns: str, text: str) -> tuple[Rule, ...]:
    """A `blocked` and a `bias` for scores with so many columns."""
    return tuple(
        Rule(
            f"broadcasts({name}, B, N1, S1, {columns})",
            name,
            advice,
            text,
            when=f"{name} is not None",
            given={name: fitting},
            invalid={name: wrong},
        )
        for name, advice, fitting, wrong in (
            ("blocked", "true removes a score", "S1 S2", "S1 3"),
            ("bias", "added to the scaled scores", "N1 S1 S2", "3 S1 S2"),
        )
    )


def cached(kv_len: str) -> Rule:
    """Lengths that a cache holds."""
    advice, text = "tokens in the cache, those of this step included", "0 <= length <= tokens of the cache"
    return Rule("lengths_within(kv_len, capacity)", kv_len, advice, text, invalid={kv_len: [3, 7]})


def paged(
    size: str, size_text: str, owner: str, given: Settings, too_long: Settings, unknown: list[list[int]]
) -> tuple[Rule, ...]:
    """A table of pages that are there, one for every token; too_long: lengths that it does not hold."""
    return group(
        Rule(
            f"table_holds(block_table, kv_len, {size})",
            "block_table",
            f"it needs ceil(length / {size_text}) columns",
            text="a page for every token",
            invalid=too_long,
        ),
        Rule(
            f"pages_exist(block_table, kv_len, {size}, blocks)",
            "block_table",
            f"entries behind {owner}'s last token are not read",
            text="ids of pages that exist",
            reads=True,
            invalid={"block_table": torch.tensor(unknown, dtype=torch.int32)},
        ),
        when="block_table is not None",
        given=given,
    )


# -------------------------------------------------------------------------------------------------------------- limits


def reserved(name: str, sample: Any) -> Rule:
    """A parameter that stays empty."""
    return limit(f"{name} is None", name, "reserved: leave it out", invalid={name: sample})


def own_page_ids(given: Settings, ids: Any) -> Rule:
    """Page numbers as the chip reads them; ids: a sample that is not."""
    check, advice = "int32(block_table)", "the chip reads 32 bits"
    when = "block_table is not None"
    return refused(check, "block_table", advice, "int32", when=when, given=given, invalid={"block_table": ids})


# ------------------------------------------------------------------------------------------------------------- doubts

doubt = partial(Rule, level="doubt")


def covered(q_len: str, kv_len: str, advice: str, short: Settings) -> tuple[Rule, ...]:
    """Packed sequences that end where their tensors do; short: settings under which neither side's do.

    Every family's `derive` gives q_len and kv_len, tokens of each sequence.
    """
    return tuple(
        doubt(
            f"{axis} is None or sum({side}_len) == {axis}",
            name,
            f"the rows behind them {fate}: {advice}",
            f"sequences that take up all {axis} rows of the tensor",
            only=PACKED,
            invalid={name: short[name]},
        )
        for side, name, axis, fate in (("q", q_len, "T1", "are zeros"), ("kv", kv_len, "T2", "are not read"))
    )


WHOLE = "lengths are not cumulative; give every sequence one, or slice the tensor"
ENDS = "did you pass lengths? They are cumulative ends: [3, 8] is 3 and 5 rows"


def untrained(
    advice: str, given: Settings | None = None, kind: Callable[..., Rule] = doubt, **shapes: tuple[int, ...]
) -> tuple[Rule, ...]:
    """Tensors that get no gradient; kind: of the rules; shapes: of samples."""
    wanting = {name: torch.zeros(shape, dtype=torch.float16, requires_grad=True) for name, shape in shapes.items()}
    text = "a tensor that waits for no gradient"
    return tuple(
        kind(f"not trained({name})", name, advice, text, given=given or {}, invalid={name: tensor})
        for name, tensor in wanting.items()
    )


def own_scale(scale: str) -> Rule:
    """A scale that the call says: torch_npu's default is seldom what is meant."""
    advice = "the default is 1.0, not 1 / sqrt(D): say 1.0 where queries are scaled already"
    return note(f"'{scale}' not in missing or D < 32", scale, advice, f"a {scale}", invalid={scale: None, "D": 64})


def no_float32(query: str, weights: str = "") -> Rule:
    """Sixteen bits alone; weights: their sample shape, where there are any."""
    invalid = {query: ("B S1 N1 D", "float32")} | ({"weights": (weights, "float32")} if weights else {})
    advice, text = "the chip computes no float32 here", "float16 or bfloat16"
    return refused(f"not float32({query})", query, advice, text, invalid=invalid)


def only_dim(axis: str, size: int, param: str, bad: int = 64, *, beside: str = "", **more: Any) -> Rule:
    """An axis of elements that has one size; beside: a condition."""
    when, advice = f"{beside}1 <= {axis} <= 768", "the chip takes no other dim"
    return refused(f"{axis} == {size}", param, advice, when=when, invalid={axis: bad}, **more)
