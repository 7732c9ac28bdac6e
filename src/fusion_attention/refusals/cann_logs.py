"""Reads the log of a call that failed on the Ascend chip: operator, error code, and reasons that CANN printed.

RuntimeError: npu_fusion_attention:.. NPU function error: call aclnnFlashAttentionScore failed, error code is 561103
EZ9999[PID: 413] .. (EZ9999):  get unsupported atten_mask shape, the shape is [16, 1, 1, 1500] ..[FUNC:..][FILE:..]
"""

import re
from dataclasses import dataclass

from fusion_attention.ops import RECORDS

LONGEST = 4 << 20  # characters of a log
_LATE = "; the text may name a later call than the one that failed (ASCEND_LAUNCH_BLOCKING=1 names the right one)"
_STOPPED = f"a kernel was stopped, mostly because it accessed an invalid address{_LATE}"
# Error code: CANN's name and its meaning.
CODES = {
    161001: ("ACLNN_ERR_PARAM_NULLPTR", "a required argument is missing"),
    161002: ("ACLNN_ERR_PARAM_INVALID", "dtypes, layout, ranks or shapes are invalid or contradict each other"),
    361001: ("ACLNN_ERR_RUNTIME_ERROR",
             "the call was legal, and the device's runtime failed: memory, stream or executor"),
    561000: ("ACLNN_ERR_INNER", "an error inside CANN"),
    561001: ("ACLNN_ERR_INNER_INFERSHAPE_ERROR", "the results' shapes do not follow from the inputs' shapes"),
    561002: ("ACLNN_ERR_INNER_TILING_ERROR",
             "planning refused the call: a rule on shapes, lengths, masks or attributes"),
    561003: ("ACLNN_ERR_INNER_FIND_KERNEL_ERROR", "no kernel for these dtypes on this chip"),
    561101: ("ACLNN_ERR_INNER_CREATE_EXECUTOR", "no executor could be made"),
    561103: ("ACLNN_ERR_INNER_NULLPTR", "planning failed; in calls of attention mostly because of the shape of a mask"),
    561112: ("ACLNN_ERR_INNER_OPP_KERNEL_PKG_NOT_FOUND", "the package of kernels for this chip is not installed"),
    207001: ("ACL_ERROR_RT_MEMORY_ALLOCATION", "the device has no memory left"),
    507014: ("ACL_ERROR_RT_AICORE_TIMEOUT", f"a kernel did not end in time{_LATE}"),
    507015: ("ACL_ERROR_RT_AICORE_EXCEPTION", _STOPPED),
    507034: ("ACL_ERROR_RT_VECTOR_CORE_TIMEOUT", f"a kernel did not end in time{_LATE}"),
    507035: ("ACL_ERROR_RT_VECTOR_CORE_EXCEPTION", _STOPPED),
}  # fmt: skip
# Codes that differ between versions of CANN, and the code of this library for the same failure.
SAME = {561103: 561002, 561001: 161002}
_CODE = re.compile(
    r"(?:error code is|errno\s*[:=]|aclnnStatus\s*=|ret(?:urned)?\s*[:=]?|error code\s*[:=]?)\s*(\d{6})\b"
)
_BARE = re.compile(r"\b((?:[135]61|[25]07)\d{3})\b")
_ACLNN = re.compile(r"\b(aclnn[A-Za-z0-9]+)\b")
_FUNCTION = re.compile(r"\b(npu_[a-z0-9_]+)\b")
# "EZ9999[PID: 1] time (EZ9999):  text[FUNC:f][FILE:a.cpp][LINE:1]", and the lines of its traceback.
_REASON = re.compile(
    r"(?:\(?\bE[A-Z0-9]\d{4}\)?\s*:|^)\s*(?P<text>[^\n]*?)\s*\[FUNC:(?P<func>\w*)\]\[FILE:(?P<file>[^\]]*)\]", re.M
)
_NAMED = re.compile(r"AclNN_Parameter_Error\(\w+\):\s*(?P<text>[^\n\[]+)")
_EMPTY = ("fail to analyze context", "tiling failed", "kernel run failed", "launch failed", "inner error",
          "failed to execute")  # fmt: skip


class LogError(ValueError):
    """The error for text that is not the log of a failed operator call; the message is one sentence."""


@dataclass(frozen=True)
class Log:
    """A failed operator call, as read from a log of the Ascend chip."""

    code: int  # CANN's error code; 0 if the text has none
    operator: str  # the name of the failed operator, if it has a definition here; else ""
    operator_in_log: str  # the failed operator's name in the text; "" if the text has none
    function: str  # the name of the torch_npu function that called the operator; "" if the text has none
    reasons: tuple[str, ...]  # other messages of CANN, the most specific first

    @property
    def name(self) -> str:
        """CANN's name of the error code; "" if there is none."""
        return CODES.get(self.code, ("", ""))[0]

    @property
    def described(self) -> str:
        """The error code with its name, as text, such as "561002 (...)"; "no code" without one."""
        return (f"{self.code} ({self.name})" if self.name else str(self.code)) if self.code else "no code"

    @property
    def meaning(self) -> str:
        """The meaning of the error code in a sentence."""
        return CODES.get(self.code, ("", "a code that is not known here"))[1]


def is_log(text: str) -> bool:
    """True if a text looks like a log of the Ascend chip rather than like Python code of a call."""
    return bool(
        ("(" not in text and _BARE.search(text))
        or _CODE.search(text)
        or re.search(r"\b(aclnn\w+ failed|EZ\d{4}|E[A-Z0-9]9999|NPU function error)\b", text)
    )


def read_log(text: str) -> Log:
    """Returns the failed operator call in a log of the Ascend chip, or in an exception's text.

    Raises:
        LogError: the text is too long, or has neither an error code nor an operator's name.
    """
    if len(text) > LONGEST:
        raise LogError(
            f"the log has {len(text)} characters: pass only the lines of the failed call, at most {LONGEST} characters"
        )
    codes = _CODE.findall(text) or _BARE.findall(text)
    operators = [name.removesuffix("GetWorkspaceSize") for name in _ACLNN.findall(text)]
    functions = [name for result in _FUNCTION.findall(text) if (name := _record_of(result))]
    if not codes and not operators and not functions:
        raise LogError("the text has neither one of CANN's codes (161002, 561002, ...) nor the name of an operator")
    recorded = [name for name in operators if name in RECORDS]
    return Log(
        code=int(codes[0]) if codes else 0,
        operator=recorded[0] if recorded else "",
        operator_in_log=(recorded or operators or [""])[0],
        function=functions[0] if functions else "",
        reasons=_reasons(text),
    )


def _record_of(name: str) -> str:
    """Returns the torch_npu function that a name in a log refers to: npu_x for npu_x_out_symint; "" if unknown."""
    while name and name not in RECORDS:
        shorter = re.sub(r"_(symint|out|npu|call|forward)$", "", name)
        if shorter == name:
            return ""
        name = shorter
    return name


def _reasons(text: str) -> tuple[str, ...]:
    """Returns the messages in a log of CANN that state a reason for the failure, without repetitions; at most 8."""
    results = [m["text"] for pattern in (_NAMED, _REASON) for m in pattern.finditer(text)]
    clean = (re.sub(r"^.*\(E[A-Z0-9]\d{4}\):\s*|^\[PID: *\d+\] \S+ ", "", reason).strip(" .!\t") for reason in results)
    telling = [r for r in clean if r and not any(r.lower().startswith(empty) for empty in _EMPTY)]
    return tuple(dict.fromkeys(telling))[:8]
