"""Constructors of legality rules of operators, and rules that apply to several operators.

The other rules are in rules.py of each family of operators. docs/rulings.md 15 explains severities and error codes.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fusion_attention.contract import INVALID, NULL_POINTER, TILING, Rule, Settings

PADDED, PACKED = ("BSND", "BSH", "SBH", "BNSD"), ("TND",)
OF_950 = "this form (950 only) is not computed here"
ROPE = {"query_rope": True, "key_rope": True}


def meaning(check: str, message: str, **fields: Any) -> Rule:
    """Returns a legality rule from `check`, an expression over a call's values, and its error's text; fields: others.

    message: "PARAMETER: EXPECTED (ADVICE)"; "PARAMETER (ADVICE)" if the error shows the expression. Op.spell() replaces
    canonical names in it, also if they are common words: write "keys", not "key".
    """
    start, depth = len(message) - 1, 1  # the parenthesis that opens the advice
    while depth:
        start -= 1
        depth += {")": 1, "(": -1}.get(message[start], 0)
    param, _, text = message[:start].partition(":")
    return Rule(check, param.strip(), message[start + 1 : -1], text.strip(), **fields)


# Rules on required parameters, dtypes and lengths, and limits of the chip.
presence = partial(meaning, stage="presence", code=NULL_POINTER)
typed = partial(meaning, stage="dtype", code=INVALID)
of_lengths = partial(meaning, stage="lengths")
limit = partial(meaning, level="limit")
# Rules and limits whose code is that of an invalid parameter.
invalid = partial(meaning, code=INVALID)
refused = partial(limit, code=INVALID)
# Warnings, and rules on tensor content that are checked on request.
note = partial(meaning, level="note")
content = partial(meaning, level="content")


def group(*rules: Rule, **common: Any) -> tuple[Rule, ...]:
    """Returns copies of the rules in which the fields in `common` have these values."""
    return tuple(replace(rule, **common) for rule in rules)


# ------------------------------------------------------------------------------------------------------------- meaning


def needed(param: str, advice: str, text: str = "", **more: Any) -> Rule:
    """Returns a rule: parameter `param` is not None; text, advice: expected value, and hint, in the error."""
    return presence(f"{param} is not None", f"{param}: {text} ({advice})", invalid={param: None}, **more)


def absent(param: str, advice: str = OF_950) -> Rule:
    """Returns a rule: the parameter `param` is None; advice: the reason, which errors show."""
    return presence(f"{param} is None", f"{param}: None ({advice})")


def elements(axis: str, param: str, bad: int = 769, *, optional: bool = False, **more: Any) -> Rule:
    """Returns a rule: axis (elements per head of `param`) has size 1 to 768; optional: or None; bad: illegal size."""
    bounds = f"1 <= {axis} <= 768"
    check, text = (f"{axis} is None or {bounds}", bounds) if optional else (bounds, "")
    return invalid(check, f"{param}: {text} (elements per head)", invalid={axis: bad}, **more)


def groups_of_heads(key: str, *others: str) -> Rule:
    """Returns a rule: query heads (N1) are a multiple of key heads (N2); key: parameter in errors; others: hints."""
    advice = "; ".join(("all KV heads serve the same number of heads", *others))
    return meaning("N1 > 0 and N2 > 0 and N1 % N2 == 0", f"{key} ({advice})", invalid={"N2": 3})


def both_or_neither(first: str, second: str, advice: str, code: int = TILING, **more: Any) -> Rule:
    """Returns a rule: two parameters are both given, or neither; advice: the reason; more: other fields of Rule."""
    check, text = f"({first} is None) == ({second} is None)", f"{first}: {first} and {second}, or neither ({advice})"
    return presence(check, text, code=code, invalid={second: None}, **more)


def rope_pair(query_rope: str, key_rope: str, given: Settings) -> Rule:
    """Returns a rule: rope tensors of query and key are both given, or neither; given: arguments of example calls."""
    return both_or_neither(query_rope, key_rope, "rope parts come in pairs", NULL_POINTER, given=given)


def finite_scale(scale: str, bad: float = float("inf"), *, optional: bool = True) -> Rule:
    """Returns a rule: the attribute `scale` is finite in float32; optional: None is legal; bad: an illegal value."""
    check = f"abs({scale}) < 3.4e38"
    if optional:
        check = f"{scale} is None or {check}"
    return meaning(check, f"{scale}: a finite scale (of float32)", invalid={scale: bad})


def one_length_each(q_len: str, kv_len: str) -> Rule:
    """Returns a rule: there are as many lengths of packed queries (parameter q_len) as of packed keys (kv_len)."""
    both = f"{q_len} is not None and {kv_len} is not None"
    check, advice = f"len({q_len}) == len({kv_len})", "one length per sequence in both"
    return of_lengths(check, f"{kv_len} ({advice})", when=both, only=PACKED, invalid={kv_len: [12]})


def broadcasting(columns: str, text: str) -> tuple[Rule, ...]:
    """Returns two rules: `blocked` and `bias` broadcast to [B, N1, S1, columns]; text: the shape in errors."""
    return tuple(
        meaning(
            f"broadcasts({name}, B, N1, S1, {columns})",
            f"{name}: {text} ({advice})",
            given={name: fitting},
            invalid={name: wrong},
        )
        for name, advice, fitting, wrong in (
            ("blocked", "true removes a score", "S1 S2", "S1 3"),
            ("bias", "added to the scaled scores", "N1 S1 S2", "3 S1 S2"),
        )
    )


def keys_lie(pages: str = "", param: str = "layout_kv", advice: str = "", bad: str = "BNSD", **more: Any) -> Rule:
    """Returns a rule: the layout of keys, attribute `param`, is that of queries, or the paged layout `pages` ("": not
    allowed). advice: a hint in errors; bad: an invalid layout."""
    check, text = f"{param} == layout", f"{param}: layout ({advice or 'keys have the axes of queries'})"
    if pages:
        check = f"{param} in (layout, '{pages}')"
        text = f"{param}: layout, or {pages} (keys have the axes of queries, or are paged)"
    return typed(check, text, when="layout in ('BSND', 'TND')", invalid={param: bad}, **more)


def tabled(table: str, pages: str, unless: str = "", **samples: Settings) -> Rule:
    """Returns a rule: a page table (parameter `table`) is given exactly if keys have the layout `pages`; unless: "", or
    a condition followed by " or ", under which the rule does not apply; samples: given and invalid arguments."""
    text = f"a table if keys are {pages}, otherwise None (it has the pages of each sequence)"
    return presence(f"{unless}({table} is not None) == (layout_kv == '{pages}')", f"{table}: {text}", **samples)


def page_numbers(table: str, lengths: str, page: str, pages: str, **more: Any) -> Rule:
    """Returns a rule: the page table, parameter `table`, has numbers below the size of the axis `pages`.

    lengths, page: names of the array of sequences' lengths, and of the number of tokens of a page.
    """
    check = f"pages_exist({table}, {lengths}, {page}, {pages})"
    text = f"{table}: numbers of pages (entries behind a sequence's last page are not read)"
    return meaning(check, text, reads=True, invalid={pages: 0}, **more)


def cached(kv_len: str) -> Rule:
    """Returns a rule: lengths in the parameter named by kv_len are from 0 to the tokens that the KV cache can store."""
    advice, text = "tokens in the cache, those of this step included", "0 <= length <= tokens of the cache"
    return meaning("lengths_within(kv_len, capacity)", f"{kv_len}: {text} ({advice})", invalid={kv_len: [3, 7]})


def paged(size: str, size_text: str, given: Settings, too_long: Settings, unknown: list[list[int]]) -> tuple[Rule, ...]:
    """Returns two rules: the page table has a page for every token, and the pages exist.

    size, size_text: expression and words for the page size. given: arguments of example calls. too_long, unknown:
    invalid lengths and page numbers.
    """
    return group(
        meaning(
            f"table_holds(block_table, kv_len, {size})",
            f"block_table: a page for every token (it needs ceil(length / {size_text}) columns)",
            invalid=too_long,
        ),
        meaning(
            f"pages_exist(block_table, kv_len, {size}, blocks)",
            "block_table: numbers of pages that exist (entries behind a sequence's last token are not read)",
            reads=True,
            invalid={"block_table": torch.tensor(unknown, dtype=torch.int32)},
        ),
        given=given,
    )


def lengths_of_pages(lengths: str, given: Settings, when: str = "block_table is not None") -> Rule:
    """Returns a rule: the array `lengths` is given if `when` (keys are paged); given: arguments of example calls."""
    text = f"{lengths}: lengths beside a block table (the tensor of pages does not show them)"
    return meaning(f"{lengths} is not None", text, when=when, stage="presence", given=given, invalid={lengths: None})


# -------------------------------------------------------------------------------------------------------------- limits


def reserved(name: str, **more: Any) -> Rule:
    """Returns a rule on Ascend's limits (checked in strict mode): the parameter `name`, reserved by CANN, is None."""
    return limit(f"{name} is None", f"{name} (reserved: leave it out)", **more)


def own_page_ids(given: Settings, ids: Any) -> Rule:
    """Returns a rule on Ascend's limits (checked in strict mode): page numbers are int32; ids: an illegal page table;
    given: other arguments of example calls."""
    check, advice = "int32(block_table)", "the chip reads 32 bits"
    when = "block_table is not None"
    return refused(check, f"block_table: int32 ({advice})", when=when, given=given, invalid={"block_table": ids})


# ------------------------------------------------------------------------------------------------------------- doubts

doubt = partial(meaning, level="doubt")


def covered(q_len: str, kv_len: str, advice: str, short: Settings) -> tuple[Rule, ...]:
    """Returns rules that warn if packed sequences do not cover all rows of the query or key tensor. The operator
    definition's `derive` must return q_len and kv_len, the tokens of each sequence. advice: a hint for the user. short:
    lengths of queries and keys that violate the rules, in tests."""
    return tuple(
        doubt(
            f"{axis} is None or sum({side}_len) == {axis}",
            f"{name}: sequences that take up all {axis} rows of the tensor (the rows behind them {fate}: {advice})",
            only=PACKED,
            invalid={name: short[name]},
        )
        for side, name, axis, fate in (("q", q_len, "T1", "are zeros"), ("kv", kv_len, "T2", "are not read"))
    )


NOT_CUMULATIVE = "lengths are not cumulative; pass one per sequence, or slice the tensor"
ENDS = "did you pass lengths? They are cumulative ends: [3, 8] is 3 and 5 rows"


def untrained(
    advice: str, given: Settings | None = None, kind: Callable[..., Rule] = doubt, **shapes: tuple[int, ...]
) -> tuple[Rule, ...]:
    """Returns rules: tensors for which the operator has no derivative do not require gradients; advice: a hint.

    given: arguments of example calls; kind: constructor of the rules; shapes: {name of a tensor: its shape in these}.
    """
    wanting = {name: torch.zeros(shape, dtype=torch.float16, requires_grad=True) for name, shape in shapes.items()}
    text = "a tensor that does not require a gradient"
    return tuple(
        kind(f"not trained({name})", f"{name}: {text} ({advice})", given=given or {}, invalid={name: tensor})
        for name, tensor in wanting.items()
    )


def own_scale(scale: str) -> Rule:
    """Returns a rule that warns if the argument `scale` is not passed: torch_npu's default, 1.0, is seldom intended."""
    advice = "the default is 1.0, not 1 / sqrt(D): pass 1.0 if queries are already scaled"
    return note(f"'{scale}' not in missing or D < 32", f"{scale}: a {scale} ({advice})", invalid={scale: None, "D": 64})


def no_float32(query: str, weights: str = "") -> Rule:
    """Returns a rule on Ascend's limits (checked in strict mode): the query is float16 or bfloat16; weights: shape of
    the indexer's weights in example calls, if it has some."""
    invalid = {query: ("B S1 N1 D", "float32")} | ({"weights": (weights, "float32")} if weights else {})
    advice, text = "the chip computes no float32 here", "float16 or bfloat16"
    return refused(f"not float32({query})", f"{query}: {text} ({advice})", invalid=invalid)


def only_dim(axis: str, size: int, param: str, bad: int = 64, *, beside: str = "", **more: Any) -> Rule:
    """Returns a rule on Ascend's limits (checked in strict mode): the tensor `param` has `size` elements on the axis
    `axis`; beside: "", or a condition followed by " and "; bad: an illegal size."""
    when, advice = f"{beside}1 <= {axis} <= 768", "the chip takes no other dim"
    return refused(f"{axis} == {size}", f"{param} ({advice})", when=when, invalid={axis: bad}, **more)
