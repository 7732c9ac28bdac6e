"""remarks(): the rules of an operator that mask arguments violate: calls that CANN refuses, arguments that it ignores.

Only rules that read nothing but mask arguments are evaluated. python_to_javascript.py translates remarks() to
JavaScript, so it uses only the syntax that that module supports.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fusion_attention.contract import Attr, Op, Rule, evaluate, parse, scope
from fusion_attention.explorer.visible import Setting, as_mode, inference_names, training_names
from fusion_attention.ops import RECORDS

# The operators of each interface for padded and for packed rows. fa.attention() has no rules about a setting.
OPERATORS = {
    "training": ("npu_fusion_attention", "npu_fusion_attention"),
    "inference": ("npu_fused_infer_attention_score_v2", "npu_fused_infer_attention_score_v2"),
    "two_phase": ("aclnnFlashAttentionScoreV2", "aclnnFlashAttentionVarLenScoreV2"),
}
# Functions in rules that read only numbers.
PURE = ("dense_window", "packed_window", "prefix_fits", "prefixes_differ", "meets", "no_more_rows", "mask_fits")
_PYTHON = {"all", "any", "len", "max", "min", "sum"}
_ANY = Setting(0, (1,), (1,))


@functools.cache
def rules_of(operator: str, api: str) -> tuple[Rule, ...]:
    """Returns the rules of an operator that read only mask arguments (sparse_mode, pre_tokens, ...) by their names in
    an interface (api), and a rule for the values of sparse_mode."""
    record, names = RECORDS[operator], set(names_of(_ANY, api))
    domains = [
        Rule(p.domain, p.name, code=p.code, stage="domains")
        for p in record.params
        if isinstance(p, Attr) and p.name == "sparse_mode" and p.domain
    ]
    return tuple(rule for rule in (*domains, *record.applicable_rules) if _reads(rule) <= names | set(PURE) | _PYTHON)


def _reads(rule: Rule) -> set[str]:
    """Returns every name, also of functions, in a rule's expressions."""
    names = set()
    for text in filter(None, (rule.check, rule.when)):
        names |= set(parse(text).names) | set(re.findall(r"\b([a-z_0-9]+)\(", re.sub(r"\.\w+\(", "", text)))
    return names


def names_of(s: Setting, api: str) -> dict[str, Any]:
    """Returns name -> value of the mask arguments `s`, as the rules of an interface (`api`) name and read them."""
    return inference_names(s) if api == "inference" else training_names(s)


def spelled(record: Op) -> dict[str, str]:
    """Returns {canonical name: the operator's spelling} for the parameters that an operator spells otherwise."""
    return {p.name: p.shown for p in record.params if p.shown != p.name}


def table(api: str, packed: bool, compiled: Callable[[str, Op], Any] | None = None) -> list[dict[str, Any]]:
    """Returns the argument rules of an interface's (`api`) operator as dictionaries; packed: for packed sequences.
    compiled: a function from an expression to a function of a call's values; None: evaluate it in Python."""
    operator = OPERATORS[api][packed]
    record = RECORDS[operator]
    function = compiled or _function
    return [
        {
            "level": rule.level, "code": rule.code, "stage": rule.stage, "param": record.by_name[rule.param].shown,
            "expected": record.spell(rule.expected), "advice": record.spell(rule.advice), "only": list(rule.only),
            "when": function(rule.when, record) if rule.when else None, "check": function(rule.check, record),
            "shown": list(parse(rule.check).names), "blamed": rule.param,
        }
        for rule in rules_of(operator, api)
    ]  # fmt: skip


def _function(text: str, record: Op) -> Callable[[dict[str, Any]], Any]:
    return lambda n: evaluate(text, scope(n, record.functions))


def remarks(
    rules: Sequence[Mapping[str, Any]], n: dict[str, Any], layout: str, other_names: dict[str, str]
) -> list[dict[str, Any]]:
    """Returns the argument rules that a call violates, as dictionaries with their error texts. After a value outside
    its domain, the other rules are not evaluated. rules: the operator's rules, from table(); n: the call's values by
    canonical name; other_names: the operator's spelling of canonical names."""
    results: list[dict[str, Any]] = []
    for rule in rules:
        if len(results) > 0 and results[0]["stage"] == "domains" and rule["stage"] != "domains":
            return results
        if len(rule["only"]) > 0 and layout not in rule["only"]:
            continue
        if rule["when"] is not None and not rule["when"](n):
            continue
        outcome = rule["check"](n)
        if not isinstance(outcome, str) and outcome:
            continue
        got = outcome if isinstance(outcome, str) else what_came(rule, n)
        results.append(
            {
                "level": rule["level"],
                "code": rule["code"],
                "stage": rule["stage"],
                "param": rule["param"],
                "expected": rule["expected"],
                "got": respell(got, other_names) if rule["level"] != "doubt" else "",
                "advice": rule["advice"],
            }
        )
    return results


def what_came(rule: Mapping[str, Any], n: dict[str, Any]) -> str:
    """Returns the values that a rule reads in a call, as text; n: the call's values by name."""
    used = [name for name in rule["shown"] if name in n]
    if used == [rule["blamed"]]:
        return shown(n[used[0]])
    return ", ".join([f"{name}={shown(n[name])}" for name in used])


def shown(value: Any) -> str:
    """Returns a value as text, as error messages show it."""
    if not isinstance(value, np.ndarray):
        return repr(value)
    return "[" + ", ".join([str(n) for n in value[:8]]) + (", ...]" if len(value) > 8 else "]")


def respell(text: str, other_names: dict[str, str]) -> str:
    """Replaces canonical names in a text by an operator's spelling, as `other_names` maps them; also in runtime.js."""
    for name, shown in other_names.items():
        text = re.sub(rf"\b{name}\b", shown, text)
    return text


def verdict(findings: Sequence[Mapping[str, Any]]) -> str:
    """Returns the verdict of violated rules: "ok", "note" (a warning), "chip" (only Ascend refuses the call) or
    "refused"."""
    levels = [remark["level"] for remark in findings]
    if "meaning" in levels:
        return "refused"
    if "limit" in levels or "doubt" in levels:
        return "chip"
    return "note" if len(levels) > 0 else "ok"


def remarks_on(s: Setting, api: str) -> list[dict[str, Any]]:
    """Returns, with error texts, the rules that a call of an interface (`api`) with the mask arguments `s` violates."""
    canonical = as_mode(s)
    if api == "own" or canonical is None:
        return []
    layout = "TND" if s.packed else "BSND"
    record = RECORDS[OPERATORS[api][s.packed]]
    return remarks(table(api, s.packed), names_of(canonical, api), layout, spelled(record))
