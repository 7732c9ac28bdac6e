"""explain(): the rules that an operator call violates, each with a fix; for a log of the chip, the likely ones.

contract.bind checks the call twice: once without and once with the chip's limits. All operators take the same path.
"""

import inspect
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from fusion_attention.backends import BACKENDS, reasons_of
from fusion_attention.contract import (
    Array,
    Attr,
    ContractError,
    ContractWarning,
    Failure,
    Op,
    Tensor,
    Tensors,
    bind,
    dtype_text,
    members,
)
from fusion_attention.ops import RECORDS
from fusion_attention.refusals.call_parser import PHASE_1, Written, WrittenError, parse_call
from fusion_attention.refusals.cann_logs import CODES, SAME, Log, is_log, read_log
from fusion_attention.refusals.fixes import TRIANGLE, fixes
from fusion_attention.refusals.likely_rules import likely

# Parameter name of another library -> CANN's parameter, and the advice.
_CAUSAL = f"sparse_mode=3 (2: from the upper left corner, as torch) with atten_mask={TRIANGLE}"
_FOREIGN = {
    **dict.fromkeys(("is_causal", "causal"), ("sparse_mode", _CAUSAL)),
    **dict.fromkeys(("attn_mask", "attention_mask"), ("atten_mask", "atten_mask=, true where a key is removed")),
    **dict.fromkeys(("softmax_scale", "sm_scale", "scaling"), ("scale", "scale=")),
    **dict.fromkeys(("dropout_p", "dropout"), ("keep_prob", "keep_prob=1 - dropout_p")),
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q"), ("actual_seq_qlen", "actual_seq_qlen=cu_seqlens_q[1:]")),
    "cu_seqlens_k": ("actual_seq_kvlen", "actual_seq_kvlen=cu_seqlens_k[1:]"),
}
# Parameters of functions that are not in operator definitions.
_BESIDE = ("return_lse", "backend", "strict", "check_content", "out", "workspace")


@dataclass(frozen=True)
class Finding:
    """A rule that a call of an operator violates, or likely violates, or a warning about the call.

    Attributes:
        where: "everywhere" (the call has no meaning), "chip" (it runs here, and the chip refuses it), "warning" (it
            runs, but is probably not intended) or "likely" (a rule that a log may refer to).
        param: the parameter's name in the function; cann: CANN's name of it, "" if unknown.
        expected, got, fix: texts of the error: the expected value, the actual value, the advice.
        code: CANN's error code.
    """

    where: str
    param: str
    expected: str
    got: str = ""
    fix: str = ""
    code: int = 0
    cann: str = ""

    @property
    def sentence(self) -> str:
        """The violated rule as one line of text: parameter, expected value, actual value."""
        cann = f" ({self.cann})" if self.cann not in ("", self.param) else ""
        got = f", got {self.got}" if self.got else ""
        return f"{self.param}{cann}: expected {self.expected}{got}" if self.param else self.expected


@dataclass(frozen=True)
class Explanation:
    """The result of explain().

    Attributes:
        operator: the operator's name; "" if a log names no operator that has a definition here.
        summary: the description of the operator, one sentence.
        verdict: the result in a sentence.
        findings: violated rules, the most severe first.
        sizes: sizes of the call's axes by name ("B", "S1", "N1"), and lengths of its sequences.
        results: dtype and shape of every result of a legal call, by name.
        computes: for every back end "yes", or the reasons why it does not compute the call.
        log: the parsed log, if there was one.
        unread: parameters whose content could not be checked, because the call has only their shapes.
        fixes: single changes that make the call legal on the chip, or at least here; each was checked.
    """

    operator: str
    summary: str
    verdict: str
    findings: tuple[Finding, ...] = ()
    sizes: dict[str, Any] = field(default_factory=dict)
    results: dict[str, str] = field(default_factory=dict)
    computes: dict[str, str] = field(default_factory=dict)
    log: Log | None = None
    unread: tuple[str, ...] = ()
    fixes: tuple[str, ...] = ()

    @property
    def broken(self) -> bool:
        """True if a rule is violated, here or on the chip, or if a log reports a failure."""
        return self.log is not None or any(f.where in ("everywhere", "chip") for f in self.findings)

    def __str__(self) -> str:
        notes = [f"{f.where}: {f.sentence}" + (f" ({f.fix})" if f.fix else "") for f in self.findings]
        fixes = [f"fix: {fix}" for fix in self.fixes]
        return "\n".join([f"{self.operator}: {self.verdict}" if self.operator else self.verdict, *notes, *fixes])

    def as_dict(self) -> dict[str, Any]:
        """Returns the explanation as values that JSON can store."""
        result = asdict(self)
        if self.log is not None:
            result["log"] |= {"name": self.log.name, "meaning": self.log.meaning}
        for one in result["findings"]:
            one["name"] = CODES.get(one["code"], ("", ""))[0]
        return result


def explain(text: str, *, log: str = "") -> Explanation:
    """Lists the rules that an operator call violates, and changes that make it legal, from its Python text or log.

    The text is parsed, never executed. A tensor is written as dtype and shape, as in q=bf16[2,1024,8,64], or made by
    torch.empty, randn and similar functions of literal shapes, also in lines before the call.

    Args:
        text: a call of any interface (fusion_attention, torch_npu, aclnnXxxGetWorkspaceSize), or a log of the chip.
        log: the chip's log of the call in text.

    Raises:
        WrittenError, LogError: the text is neither a call nor a log; the message has the reason.

    Source: this library.

    Example:
        >>> found = explain('npu_fusion_attention(f16[2,5,8,64], f16[2,5,3,64], f16[2,5,3,64], 8, "BSND")')
        >>> found.findings[0].sentence
        'key: expected N2 > 0 and N1 % N2 == 0, got N2=3, N1=8'
    """
    if not log and is_log(text):
        return explain_log(read_log(text))
    log_read = read_log(log) if log else None
    call = parse_call(text)
    op = RECORDS[call.operator]
    args, wrong = _arguments(op, call)
    return _explained(op, wrong, log_read) if wrong else explain_arguments(op, args, log_read)


def explain_arguments(op: Op, args: Mapping[str, Any], log: Log | None = None) -> Explanation:
    """Returns the explanation of a call of `op` from its arguments by name, and its log; does not read meta tensors."""
    tensors = [t for p in op.tensors() for t in members(args.get(p.name)) or () if isinstance(t, torch.Tensor)]
    in_memory = bool(tensors) and not any(t.is_meta for t in tensors)
    result = _failures(op, args, in_memory, strict=False)
    if any(f.where == "everywhere" for f in result):
        return replace(_explained(op, result, log), fixes=_fixes(op, args, in_memory, True))
    of_chip = _failures(op, args, in_memory, strict=True)
    notes = {(f.param, f.expected) for f in of_chip}
    rest = [f for f in result if (f.param, f.expected) not in notes]  # a doubt is reported once
    explanation = _explained(op, [*of_chip, *rest], log, args=args, in_memory=in_memory)
    return replace(explanation, fixes=_fixes(op, args, in_memory, False)) if explanation.broken else explanation


def explain_log(log: Log) -> Explanation:
    """Returns the explanation of a failed call from its log alone: the rules that it likely violated."""
    name = log.function or log.operator
    if not name:
        what = (
            f"{log.operator_in_log} has no definition here: " if log.operator_in_log else "the text names no operator: "
        )
        return Explanation("", "", f"{what}{log.described}: {log.meaning}", log=log)
    op = RECORDS[name]
    results = tuple(_likely(op, log))
    verdict = f"{log.operator or log.operator_in_log or name} failed with {log.described}: {log.meaning}"
    return Explanation(name, op.summary, verdict, results, log=log)


# -------------------------------------------------------------------------------------------------------- arguments


def _arguments(op: Op, call: Written) -> tuple[dict[str, Any], list[Finding]]:
    """Returns (arguments by parameter name, []), or ({}, findings about arguments that the function lacks)."""
    spelled = {cann: shown for shown, cann in op.cann.items()}
    given: dict[str, Any] = {}
    for word, value in call.named.items():
        shown = spelled.get(word, word)
        if shown in given:
            raise WrittenError(f"{word} is given twice, also under the name {shown}")
        given[shown] = value
    function = _function(op)
    positional = call.positional
    extra = [word for word in _BESIDE if word not in (p.shown for p in op.params)]
    further = {word: given.pop(word) for word in extra if word in given}
    try:
        parameters = inspect.signature(function)
        from_log = [word for word in further if word in parameters.parameters]
        bound = parameters.bind_partial(*positional, **given, **{word: further[word] for word in from_log})
    except TypeError as error:
        return {}, [_wrong_words(op, function, given, str(error))]
    if foreign := bound.arguments.pop("foreign", None):
        return {}, [_wrong_words(op, function, foreign, f"got an unexpected keyword argument '{next(iter(foreign))}'")]
    for word in extra:
        bound.arguments.pop(word, None)
    values = _cache_apart(bound.arguments) if op.name == "decode_attention" else dict(bound.arguments)
    if op.name == "compress":
        from fusion_attention.api.compress import computed_arguments

        values |= computed_arguments(values.get("layout"), values.get("kv_len"), values.get("ratio"))
    args = {p.name: _as_taken(p, values[p.shown]) for p in op.params if p.shown in values}
    return args, []


def _function(op: Op) -> Any:
    if op.name.startswith("aclnn"):
        from fusion_attention import aclnn

        return getattr(aclnn, op.name + PHASE_1)
    if op.name.startswith("npu_"):
        from fusion_attention import npu

        return getattr(npu, op.name)
    if op.name != op.called:
        from fusion_attention.npu.surface.cann_ops import FROM_RECORDS

        return FROM_RECORDS[op.name]
    from fusion_attention.api import attention, compress, compressed, decode, sparse

    modules = (attention, compress, compressed, decode, sparse)
    return next(getattr(module, op.name) for module in modules if hasattr(module, op.name))


def _wrong_words(op: Op, function: Any, given: Mapping[str, Any], error: str) -> Finding:
    """Returns a Finding about keywords in `given` that the function lacks, with a suggestion; error: Python's text."""
    parameters = inspect.signature(function).parameters
    strange = [word for word in given if word not in parameters]
    fix = ""
    if strange and op.name == "attention":
        from fusion_attention.torch_ops.foreign_arguments import refuse

        try:
            refuse(function, strange[:1])
        except TypeError as refusal:
            fix = str(refusal).split(": ", 2)[-1]
    elif strange:
        import difflib

        canonical, advice = _FOREIGN.get(strange[0], ("", ""))
        near = difflib.get_close_matches(strange[0], [n for n in parameters if n not in _BESIDE], 1, 0.6)
        fix = f"did you mean {near[0]}=?" if near else f"`fusion-attention ops {op.name}` lists its parameters"
        fix = f"a parameter of another library; here: {advice}" if canonical in parameters else fix
    return Finding("everywhere", "", f"{op.name}() {error}", fix=fix, code=0)


def _cache_apart(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments of decode_attention() with the KV cache under the definition's parameters k and v."""
    results = {word: value for word, value in values.items() if word not in ("cache", "sequences")}
    cache = values.get("cache")
    if isinstance(cache, tuple) and len(cache) == 2:
        return {**results, "k": cache[0], "v": cache[1]}
    return {**results, "k": cache}


def _as_taken(p: Any, value: Any) -> Any:
    """Returns the argument `value` of the parameter `p` as rules check it: tensors on meta, one number as Python's."""
    if isinstance(p, Tensors) or (isinstance(p, Tensor) and isinstance(value, torch.Tensor)):
        return _without_memory(value)
    if isinstance(p, Array) and isinstance(value, torch.Tensor) and value.is_meta:
        raise WrittenError(f"{p.shown}: write its numbers, as in {p.shown}=[3, 8], because rules read them")
    if isinstance(p, Attr) and isinstance(value, torch.Tensor) and not value.is_meta and value.numel() == 1:
        return value.item()
    return value


# ---------------------------------------------------------------------------------------------------------- checking


def _failures(op: Op, args: Mapping[str, Any], in_memory: bool, *, strict: bool) -> list[Finding]:
    """Validates a call of `op`; returns errors and warnings as findings. in_memory: False for meta tensors."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            bind(op, args, strict=strict, check_content=in_memory, reads=in_memory, memory=in_memory)
            failures: tuple[Failure, ...] = ()
        except ContractError as error:
            failures = error.failures
        except (RuntimeError, NotImplementedError) as error:  # a rule needs the content of a tensor
            raise WrittenError(f"{op.name} cannot be checked without the content of its tensors: {error}") from None
    where = "chip" if strict and op.source else "everywhere"
    results = []
    for f in failures:
        chip = f.rule is not None and f.rule.level == "limit"
        results.append(Finding("chip" if chip else where, f.param, f.expected, f.got, f.advice, f.code, f.cann))
    notes = [str(w.message) for w in caught if issubclass(w.category, ContractWarning)]
    return results + [_note(op, text) for text in dict.fromkeys(notes)]


def _fixes(op: Op, args: Mapping[str, Any], in_memory: bool, meaningless: bool) -> tuple[str, ...]:
    """Returns texts of changes of arguments that make the call legal on the chip; if there are none and the call is
    `meaningless`, changes that make it legal in this library. in_memory: False if tensors are on device meta."""
    if in_memory:
        args = {name: _without_memory(value) for name, value in args.items()}

    def is_legal(strict: bool) -> Callable[[Mapping[str, Any]], bool]:
        def legal(changed: Mapping[str, Any]) -> bool:
            try:
                return not any(f.where != "warning" for f in _failures(op, changed, False, strict=strict))
            except ValueError:
                return False

        return legal

    return tuple(fixes(op, args, is_legal(True)) or (fixes(op, args, is_legal(False)) if meaningless else ()))


def _without_memory(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_without_memory(one) for one in value]
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _note(op: Op, text: str) -> Finding:
    """Returns a Finding (parameter, expected and actual value, fix) from the text of a warning about a call of `op`."""
    match = re.fullmatch(r"[^:]*: (\w+)(?: \((\w+)\))?: expected (.*?)(?:, got (.*?))?(?: \((.*)\))?", text, re.S)
    if match is None:
        return Finding("warning", "", text.removeprefix(f"{op.name}: "))
    param, cann, expected, got, fix = (group or "" for group in match.groups())
    return Finding("warning", param, expected, got, fix, cann=cann)


def _explained(
    op: Op, findings: list[Finding], log: Log | None, *, args: Mapping[str, Any] | None = None, in_memory: bool = True
) -> Explanation:
    """Returns the explanation of a call with these findings (violated rules); log: the chip's log of the call, or None;
    args: the arguments of a call that has a meaning; in_memory: False if its tensors are on device meta."""
    everywhere = [f for f in findings if f.where == "everywhere"]
    of_chip = [f for f in findings if f.where == "chip"]
    violated = everywhere or of_chip
    rules = "one rule" if len(violated) == 1 else f"{len(violated)} rules"
    if everywhere:
        verdict = f"breaks {rules} of {op.name}: it has no meaning, here or on the chip"
    elif of_chip:
        verdict = f"runs here; the chip refuses it, or may: it breaks {rules} of its limits"
    else:
        verdict = f"a legal call of {op.name}"
    extra: list[Finding] = []
    if log is not None:
        verdict += _compared_with_log(log, violated)
        extra = [] if violated else list(_likely(op, log))
    reads: dict[str, Any] = {} if args is None else _reading(op, args, in_memory)
    of_content = dict.fromkeys(rule.param for rule in op.applicable_rules if rule.reads or rule.level == "content")
    given = {} if in_memory or args is None else args
    unread = tuple(op.by_name[name].shown for name in of_content if given.get(name) is not None)
    return Explanation(op.name, op.summary, verdict, (*findings, *extra), log=log, unread=unread, **reads)


def _likely(op: Op, log: Log) -> list[Finding]:
    result = likely(op, log)
    return [Finding("likely", param, expected, "", fix, code, cann) for param, cann, expected, fix, code in result]


def _compared_with_log(log: Log, findings: list[Finding]) -> str:
    """Returns text that compares the log's error code with the codes of the violated rules, to append to a verdict."""
    if not findings:
        return f"; but the log has code {log.code}: another call failed, or CANN has a rule that is missing here"
    agrees = any(f.code in (log.code, SAME.get(log.code)) for f in findings)
    return f"; code {log.code} of the log " + (
        "agrees" if agrees else "does not agree: CANN returns it for other rules"
    )


def _reading(op: Op, args: Mapping[str, Any], in_memory: bool) -> dict[str, dict[str, Any]]:
    """Returns {"sizes", "results", "computes"}, as in Explanation, of a legal call; args: arguments by name."""
    assert op.lower is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bound = bind(op, args, strict=False, check_content=False, reads=False, memory=in_memory)
        call = op.lower(bound)
        results = {name: f"{dtype_text(t)}{list(t.shape)}" for name, t in call.results().items()}
    names = bound.names
    axes = {
        n: v for n, v in names.items() if type(v) is int and re.fullmatch(r"[A-Z][A-Za-z]?\d?", n) and n not in args
    }
    lengths: dict[str, Any] = {
        n: [int(x) for x in names[n]] for n in ("q_len", "kv_len") if n in names and names[n] is not None
    }
    computes = {}
    for name in BACKENDS:
        reasons = reasons_of(name, call.problem, torch.device("cuda" if name == "triton" else "cpu"))
        computes[name] = " ".join(reasons) or "yes"
    return {"sizes": {**axes, **lengths}, "results": results, "computes": computes}
