"""cann_ops_transformer's ..._metadata functions, which on the chip distribute the work of a call.

Here they accept the same arguments and return zeros of the same shape; calls ignore the content of metadata.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor


def metadata(of: str, parameters: str, elements: int = 1024) -> Callable[..., Tensor]:
    """Returns a substitute for the function `{of}_metadata`: its result is int32 zeros [elements].
    On the chip, metadata divides an operator's work among the cores; operators here do not read it.

    Args:
        of: the operator's name.
        parameters: the function's parameters: "name" is an optional tensor, "name:int" a number, "name=0" a number with
            a default; keyword-only parameters follow "*"; "..." accepts any arguments.
        elements: number of elements of the result.
    """
    signature = inspect.Signature(_parameters(parameters), return_annotation=Tensor)

    def function(*args: Any, **kwargs: Any) -> Tensor:
        signature.bind(*args, **kwargs)
        return torch.zeros(elements, dtype=torch.int32, device="npu")

    function.__name__ = function.__qualname__ = f"{of}_metadata"
    function.__doc__ = f"Returns the metadata of {of}: zeros, int32 [{elements}], because calls here do not read it."
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def _parameters(words: str) -> list[inspect.Parameter]:
    """Returns the parameters of a signature from `words`: "name" is an optional tensor, "name:int" a number, "name=0"
    has a default; keyword-only ones follow "*"; "..." accepts any arguments."""
    if words == "...":
        return [
            inspect.Parameter("given", inspect.Parameter.VAR_POSITIONAL),
            inspect.Parameter("named", inspect.Parameter.VAR_KEYWORD),
        ]
    result, by_keyword = [], False
    for word in words.split():
        if word == "*":
            by_keyword = True
            continue
        kind = inspect.Parameter.KEYWORD_ONLY if by_keyword else inspect.Parameter.POSITIONAL_OR_KEYWORD
        name, number, default = re.fullmatch(r"(\w+)(:int)?=?(.*)", word).groups()  # type: ignore[union-attr]
        value: Any = inspect.Parameter.empty if number else None
        if default:
            value = ast.literal_eval(default)
        annotation = int if number else Tensor | None if value is None else type(value)
        result.append(inspect.Parameter(name, kind, default=value, annotation=annotation))
    return result


def _lengths(*sides: str) -> str:
    return " ".join([*(f"cu_seqlens_{side}" for side in sides), *(f"seqused_{side}" for side in sides)])


_SHARED_KEYS = f"""
    num_heads_q:int num_heads_kv:int head_dim:int {_lengths("q", "ori_kv", "cmp_kv")} cmp_residual_kv
    ori_topk_length cmp_topk_length batch_size=0 max_seqlen_q=0 max_seqlen_ori_kv=0 max_seqlen_cmp_kv=0 ori_topk=0
    cmp_topk=0 cmp_ratio=1 ori_mask_mode=0 cmp_mask_mode=0 ori_win_left=-1 ori_win_right=-1 layout_q='BSND'
    layout_kv='BSND' has_ori_kv=True has_cmp_kv=True"""
_OF_LOSS = f"num_heads_q:int num_heads_k:int head_dim:int * {_lengths('q', 'k')} cmp_residual_k"
_NUMBERS, _HOW = "batch_size=0 max_seqlen_q=0 max_seqlen_k=0", "layout_q='BSND' layout_k='BSND' mask_mode=0 cmp_ratio=1"
METADATA = (
    metadata("flash_attn", "..."),
    metadata(
        "lightning_indexer",
        f"""num_heads_q:int num_heads_k:int head_dim:int topk:int * {_lengths("q", "k")} cmp_residual_k batch_size=0
        max_seqlen_q=-1 max_seqlen_k=-1 layout_q='BSND' layout_k='BSND' mask_mode=0 cmp_ratio=1""",
    ),
    metadata("sparse_flash_mla", _SHARED_KEYS),
    metadata("sparse_flash_mla_grad", _SHARED_KEYS),
    metadata(
        "sparse_flash_mla_softmax_l1_norm",
        f"""num_heads_q:int num_heads_k:int head_dim:int * {_lengths("q", "k")} cmp_residual_k topk_length batch_size=0
        max_seqlen_q=0 max_seqlen_k=0 topk=0 layout_q='BSND' layout_k='BSND' mask_mode=0 cmp_ratio=1""",
        64,
    ),
    metadata("sparse_lightning_indexer_kl_loss_grad", f"{_OF_LOSS} {_NUMBERS} topk=0 {_HOW}", 64),
    metadata("dense_lightning_indexer_kl_loss_grad", f"{_OF_LOSS} {_NUMBERS} {_HOW}", 64),
    metadata("dense_lightning_indexer_softmax_lse", f"{_OF_LOSS} {_NUMBERS} {_HOW}", 64),
)
