"""likely(): the rules of an operator that a log of the chip likely refers to, if the operator's arguments are unknown.

CANN's messages name parameters in several spellings, which are compared with the rules' parameters.
"""

import re
from collections.abc import Iterator

from fusion_attention.contract import INVALID, NULL_POINTER, TILING, Op, Rule
from fusion_attention.ops import RECORDS
from fusion_attention.refusals.cann_logs import SAME, Log

MOST = 4  # rules reported for a log
_ROWS = ("actual_seq_qlen", "actual_seq_lengths")
_KEYS = ("actual_seq_kvlen", "actual_seq_lengths_kv")
# Spellings in CANN's messages, and the parameters that they refer to.
_WORDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"atten_?mask|attention mask|\bmask\b", ("atten_mask",)),
    (r"pse", ("pse", "pse_shift", "pse_type")),
    (r"drop_?mask|drop mask", ("drop_mask",)),
    (r"actualseq\w*kv|key/value's actual|actual_seq\w*_kv|kv('s)? actual", _KEYS),
    (r"actualseq\w*q\b|query's actual|actual_seq\w*_q|queryt\b", _ROWS),
    (r"actual ?seq", _ROWS + _KEYS),
    (r"block_?table|page attention|paged", ("block_table", "block_size")),
    (r"block_?size", ("block_size", "block_table")),
    (r"layout", ("input_layout", "layout")),
    (r"sparse_?mode|sparse mode", ("sparse_mode", "atten_mask")),
    (r"next_?to(c)?kens?|pre_?to(c)?kens?|token line", ("next_tokens", "pre_tokens")),
    (r"query_?rope|key_?rope|\brope\b", ("query_rope", "key_rope")),
    (r"head_?num|num_?heads|key_?value_?heads|num of head", ("head_num", "num_heads", "num_key_value_heads", "key")),
    (r"antiquant", ("antiquant_scale", "key_antiquant_scale", "antiquant_mode")),
    (r"quant_?scale", ("quant_scale1", "quant_scale2")),
    (r"prefix", ("prefix", "key_shared_prefix")),
    (r"keep_?prob", ("keep_prob",)),
    (r"query_?d\b|headdim|head dim", ("query",)),
    (r"sink", ("sink", "learnable_sink")),
    (r"\bdtype|data ?type", ("query", "key", "value")),
    (r"\bkey\b", ("key",)),
    (r"\bvalue\b", ("value",)),
    (r"\bquery\b", ("query",)),
)
# A message of CANN and the rule that it refers to: patterns of the message, of the rule's parameter and of its text.
_PATTERNS: tuple[tuple[str, str, str], ...] = (
    (r"queryt.*must be equal to the last element", "|".join(_ROWS), r"take up all|cover all rows of query"),
    (r"bigger or equal to batch size", "|".join(_ROWS + _KEYS), r"a length per sequence"),
    (r"unsupported atten_?mask shape|mask.*shape", r"atten_mask", r"\[.*\]|fits\("),
    (r"mask.*(not be null|cannot be null|is null|must be provided)", r"atten_mask|sparse_mode", r"is not None"),
    (r"next ?token line|higher than pre token", r"pre_tokens|next_tokens", r"pre_tokens \+ next_tokens"),
    (r"(query|value|key)_?d\b.*must be", r"query|value|key", r"\bD\b.*\b(64|128|192)"),
    (r"not support page attention", r"block_table|input_layout", r"page|table"),
    (r"drop_?mask.*(null|size)", r"drop_mask", r"bit|byte|None"),
)


def likely(op: Op, log: Log) -> Iterator[tuple[str, str, str, str, int]]:
    """Yields (parameter, CANN's name of it, expected value, fix, error code) of the rules that a log likely refers to,
    the likeliest first. op: the function called; log: the parsed log, which may name the operator that `op` calls."""
    names = (RECORDS[log.operator] if log.operator else op).cann
    spelled = {p.name: names.get(p.shown, "") for p in RECORDS[log.operator or op.name].params}
    rules = _rules(op, log)
    for rule in rules:
        shown = op.by_name[rule.param].shown
        yield shown, spelled.get(rule.param, ""), op.spell(rule.expected), op.spell(rule.advice), rule.code
    if not rules:
        yield from _of_code(op, SAME.get(log.code, log.code))


def _rules(op: Op, log: Log) -> list[Rule]:
    code, text = SAME.get(log.code, log.code), " ; ".join(log.reasons).lower()
    rules_asked = [rule for rule in op.applicable_rules if rule.level in ("meaning", "limit", "doubt")]
    named_rules = [rule for rule in rules_asked if _is_known(rule, text)]
    scores = {rule.id: _score(op, rule, text, code) for rule in named_rules or rules_asked}
    best = max(scores.values(), default=0)
    ranked = sorted(
        (rule for rule in rules_asked if rule in named_rules or scores.get(rule.id)), key=lambda r: -scores[r.id]
    )
    return [rule for rule in ranked if 2 * scores[rule.id] >= best][:MOST]


def _is_known(rule: Rule, text: str) -> bool:
    notes = f"{rule.expected} {rule.check} {rule.advice}"
    return any(
        re.search(pattern, text) and re.fullmatch(param, rule.param) and re.search(words, notes)
        for pattern, param, words in _PATTERNS
    )


def _score(op: Op, rule: Rule, text: str, code: int) -> int:
    """Returns a number, higher for likelier rules: how well CANN's messages and error code match; 0 for no match."""
    shown = op.by_name[rule.param].shown
    flat = re.sub(r"[^a-z0-9]", "", text)
    names = (rule.param, shown, op.cann.get(shown, shown).removesuffix("Optional"))
    score = 3 * any(len(name) > 3 and re.sub(r"[^a-z0-9]", "", name.lower()) in flat for name in names)
    score += 2 * any(rule.param in params and re.search(pattern, text) for pattern, params in _WORDS)
    layout = re.search(r"layout is (\w+)", text)
    if score and layout and rule.only:
        score += 1 if layout[1].upper() in rule.only else -2
    return max(score + (rule.code == code), 0) if score else 0


def _of_code(op: Op, code: int) -> Iterator[tuple[str, str, str, str, int]]:
    """Yields one tuple as likely() does, for the kind of rule that an error code means; none if the code is unknown."""
    kinds = {
        NULL_POINTER: "every required parameter (of query_rope and key_rope both or neither)",
        INVALID: "the dtypes on the operator's page, a known layout string, and ranks and axes that agree",
        TILING: "lengths, masks, biases, windows and attributes that the operator's rules allow",
        **dict.fromkeys(
            (507015, 507035), "lengths, block tables and indices within their tensors: kernels do not check them"
        ),
        361001: "enough device memory, a valid stream, and an executor that has not run",
    }
    fix = f"`fusion-attention ops {op.name}` lists the rules; explain the call itself, with its shapes, to find the one"
    if code in kinds:
        yield "", "", kinds[code], fix, code
