"""The functions of cann_ops_transformer, CANN's Python package of operators.

Most are made from operator definitions; others convert their arguments and call functions of this library or torch_npu.
Lengths are given as cumulative lengths with a leading 0 (cu_seqlens) or as lengths (seqused).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Annotated, Any

import torch

from fusion_attention.api.attention import attention
from fusion_attention.contract import ContractError, Failure
from fusion_attention.ir.mask import UNLIMITED, Band
from fusion_attention.npu.auxiliary.block_scores import msa_index_score
from fusion_attention.npu.auxiliary.compressor import compressor
from fusion_attention.npu.auxiliary.rotary import npu_rotary_mul
from fusion_attention.npu.auxiliary.token_permute import npu_moe_token_permute
from fusion_attention.npu.surface import cann_ops_from_definitions
from fusion_attention.npu.surface.metadata import METADATA

Tensor = torch.Tensor
NAME = "cann_ops_transformer"
_FUNCTIONS = vars(cann_ops_from_definitions)
# Functions by the names of their operator definitions.
FROM_RECORDS: dict[str, Callable[..., Any]] = {
    f"{NAME}.{one.__name__}": one
    for one in (*(_FUNCTIONS[name] for name in _FUNCTIONS["__all__"]), msa_index_score, compressor)
}
_SLICE_ADVICE = "slice the packed rows instead"


def operators(modules: Mapping[str, ModuleType]) -> dict[str, Callable[..., Any]]:
    """Returns {name: function} for the functions of cann_ops_transformer that are also operators of torch; modules:
    the simulated modules by name."""
    functions = {name: one for name, one in vars(modules[f"{NAME}.ops"]).items() if not name.startswith("__")}
    return {name: one for name, one in functions.items() if "named" not in inspect.signature(one).parameters}


def _refused(op: str, param: str, expected: str, got: object, advice: str) -> ContractError:
    return ContractError([Failure(op, param, expected, str(got), advice)])


def flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_kv: Tensor | None = None,
    sinks: Tensor | None = None,
    attn_mask: Tensor | None = None,
    metadata: Tensor | None = None,
    softmax_scale: float = 1.0,
    mask_mode: int = 0,
    win_left: int = -1,
    win_right: int = -1,
    max_seqlen_q: int = -1,
    max_seqlen_kv: int = -1,
    layout_q: str = "BSND",
    layout_kv: str = "BSND",
    layout_out: str = "BSND",
    return_softmax_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns attention as (out in layout_out; lse, the log-sum-exp of scores, [B, N1, S1] or packed [N1, T1]).

    It is differentiable. lse is +inf for a row without keys, and one 0 if it is not requested. mask_mode: 0 (all keys),
    3 (causal) or 4 (window); attn_mask is not read, as on the chip it is a triangle that repeats the mode.

    Raises:
        ContractError: pages, layouts or masks that are not supported, cu_seqlens together with seqused, or arguments
            that attention() rejects.
    """
    name, pages = "flash_attn", "npu_fused_infer_attention_score reads pages"
    if block_table is not None or layout_kv != layout_q:
        raise _refused(name, "layout_kv", f"{layout_q}, as layout_q, and no pages", layout_kv, pages)
    if layout_out != layout_q and (layout_q, layout_out) != ("BNSD", "BSND"):
        raise _refused(name, "layout_out", f"{layout_q}, as layout_q", layout_out, "or BSND of BNSD")
    if mask_mode not in (0, 3, 4):
        raise _refused(name, "mask_mode", "0, 3 (causal) or 4 (a window)", mask_mode, "other modes are not defined")
    if mask_mode == 0 and attn_mask is not None:
        raise _refused(name, "attn_mask", "None in mask_mode 0", "a tensor", "3 is causal, 4 a window")
    for side, size in (("win_left", win_left), ("win_right", win_right)):
        if mask_mode != 4 and size != -1:
            raise _refused(name, side, f"-1 in mask_mode {mask_mode}", size, "4 is a window")
    left, right = (UNLIMITED if n < 0 else n for n in (win_left, win_right))
    band = {0: None, 3: Band.causal(), 4: Band.window(left, right)}
    lengths = (_lengths(name, "q", cu_seqlens_q, seqused_q), _lengths(name, "kv", cu_seqlens_kv, seqused_kv))
    options: dict[str, Any] = {"layout": layout_q, "scale": softmax_scale, "band": band[mask_mode], "sink": sinks}
    options |= {"q_len": lengths[0], "kv_len": lengths[1], "return_lse": return_softmax_lse}
    result: Any = attention(q, k, v, **options)
    out, lse = result if return_softmax_lse else (result, torch.zeros(1, device=q.device))
    if return_softmax_lse:
        lse = torch.where(lse == -torch.inf, torch.inf, lse)
        lse = lse.mT.contiguous() if layout_q == "TND" else lse
    return (out.transpose(1, 2) if (layout_q, layout_out) == ("BNSD", "BSND") else out), lse


def _lengths(op: str, which: str, ends: Tensor | None, used: Tensor | None) -> Tensor | None:
    if ends is None:
        return used
    if used is not None:
        raise _refused(op, f"seqused_{which}", "None if cu_seqlens is given", "a tensor", _SLICE_ADVICE)
    return ends.diff()


def inplace_partial_rotary_mul(
    x: Annotated[Tensor, "a!"],
    r1: Tensor,
    r2: Tensor,
    *,
    rotary_mode: str = "interleave",
    partial_slice: Sequence[int] | None = None,
) -> None:
    """Rotates elements [start, end) = partial_slice of every row of x in place by cosines r1 and sines r2; no elements
    if it is None or empty. Differentiable in x."""
    start, end = partial_slice or (0, 0)
    if start != end:
        rotated_columns = x[..., start:end]
        rotated_columns.copy_(npu_rotary_mul(rotated_columns.clone(), r1.detach(), r2.detach(), rotary_mode))


def moe_token_permute(
    tokens: Tensor,
    indices: Tensor,
    num_out_tokens: int | None = None,
    padded_mode: bool = False,
    quant_mode: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns npu_moe_token_permute's results (rows in the order of experts, the row of each token's choice), and an
    empty scale; quant_mode: only -1, unquantized."""
    if quant_mode != -1:
        raise _refused("moe_token_permute", "quant_mode", "-1", quant_mode, "only the chip has MX formats")
    return *npu_moe_token_permute(tokens, indices, num_out_tokens, padded_mode), torch.zeros(0, device=tokens.device)


def contents() -> dict[str, dict[str, Any]]:
    """Returns {module name: {function name: function}} for cann_ops_transformer and its equal module `ops`."""
    functions = (flash_attn, inplace_partial_rotary_mul, moe_token_permute, *FROM_RECORDS.values(), *METADATA)
    names = {one.__name__: one for one in functions}
    return {NAME: names, f"{NAME}.ops": dict(names)}
