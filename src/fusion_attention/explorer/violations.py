"""What the records say about a setting: what CANN would refuse, and what it would ignore without a word.

Every rule whose expression reads nothing but what a setting says is asked, as `contract` asks it of a call. Refuses to
know any rule. `remarks` is written in the Python that translate.py knows.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fusion_attention.contract import Attr, Op, Rule, evaluate, parse, scope
from fusion_attention.explorer.visible import Setting, as_mode, inference_names, training_names
from fusion_attention.ops import RECORDS

# Of each interface: the operator over padded and packed rows. Our own function takes every band, so nothing is asked of
# it.
OPERATORS = {
    "training": ("npu_fusion_attention", "npu_fusion_attention"),
    "inference": ("npu_fused_infer_attention_score_v2", "npu_fused_infer_attention_score_v2"),
    "two_phase": ("aclnnFlashAttentionScoreV2", "aclnnFlashAttentionVarLenScoreV2"),
}
# Functions of rules that read numbers alone.
PURE = ("dense_window", "packed_window", "prefix_fits", "prefixes_differ", "meets", "no_more_rows", "mask_fits")
_PYTHON = {"all", "any", "len", "max", "min", "sum"}
_ANY = Setting(0, (1,), (1,))


@functools.cache
def rules_of(operator: str, api: str) -> tuple[Rule, ...]:
    """The rules of an operator that a setting answers; an attribute's domain is one of them."""
    record, names = RECORDS[operator], set(names_of(_ANY, api))
    domains = [
        Rule(p.domain, p.name, code=p.code, stage="domains")
        for p in record.params
        if isinstance(p, Attr) and p.name == "sparse_mode" and p.domain
    ]
    return tuple(rule for rule in (*domains, *record.asked) if _reads(rule) <= names | set(PURE) | _PYTHON)


def _reads(rule: Rule) -> set[str]:
    """Every name in a rule's expressions; those with axis words read tensors."""
    names = set()
    for text in filter(None, (rule.check, rule.when)):
        names |= set(parse(text).names) | set(re.findall(r"\b([a-z_0-9]+)\(", re.sub(r"\.\w+\(", "", text)))
    return names


def names_of(s: Setting, api: str) -> dict[str, Any]:
    """What rules of an interface read of a setting."""
    return inference_names(s) if api == "inference" else training_names(s)


def spelled(record: Op) -> dict[str, str]:
    """The canonical names that an operator spells otherwise."""
    return {p.name: p.shown for p in record.params if p.shown != p.name}


def table(api: str, packed: bool, compiled: Callable[[str, Op], Any] | None = None) -> list[dict[str, Any]]:
    """The rules of an interface as `remarks` takes them; compiled: makes a function of an expression."""
    operator = OPERATORS[api][packed]
    record = RECORDS[operator]
    function = compiled or _function
    return [
        {
            "level": rule.level,
            "code": rule.code,
            "stage": rule.stage,
            "param": record.by_name[rule.param].shown,
            "expected": record.spell(rule.expected),
            "advice": record.spell(rule.advice),
            "only": list(rule.only),
            "when": function(rule.when, record) if rule.when else None,
            "check": function(rule.check, record),
            "shown": list(parse(rule.check).names),
            "blamed": rule.param,
        }
        for rule in rules_of(operator, api)
    ]


def _function(text: str, record: Op) -> Callable[[dict[str, Any]], Any]:
    return lambda n: evaluate(text, scope(n, record.functions))


def remarks(
    rules: Sequence[Mapping[str, Any]], n: dict[str, Any], layout: str, other_names: dict[str, str]
) -> list[dict[str, Any]]:
    """The rules that a call breaks, as errors word them; one outside a domain is refused before the rest is asked."""
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
    """The values of what a rule reads."""
    used = [name for name in rule["shown"] if name in n]
    if used == [rule["blamed"]]:
        return shown(n[used[0]])
    return ", ".join([f"{name}={shown(n[name])}" for name in used])


def shown(value: Any) -> str:
    """A value as errors show it."""
    if not isinstance(value, np.ndarray):
        return repr(value)
    return "[" + ", ".join([str(n) for n in value[:8]]) + (", ...]" if len(value) > 8 else "]")


def respell(text: str, other_names: dict[str, str]) -> str:
    """A text with canonical names as an operator spells them; runtime.js has it by itself."""
    for name, shown in other_names.items():
        text = re.sub(rf"\b{name}\b", shown, text)
    return text


def verdict(findings: Sequence[Mapping[str, Any]]) -> str:
    """What becomes of a call: "ok", "note" (runs, and says something), "chip" (refused there alone), "refused"."""
    levels = [remark["level"] for remark in findings]
    if "meaning" in levels:
        return "refused"
    if "limit" in levels or "doubt" in levels:
        return "chip"
    return "note" if len(levels) > 0 else "ok"


def remarks_on(s: Setting, api: str) -> list[dict[str, Any]]:
    """The remarks on a setting at an interface, by the records."""
    canonical = as_mode(s)
    if api == "own" or canonical is None:
        return []
    layout = "TND" if s.packed else "BSND"
    record = RECORDS[OPERATORS[api][s.packed]]
    return remarks(table(api, s.packed), names_of(canonical, api), layout, spelled(record))
