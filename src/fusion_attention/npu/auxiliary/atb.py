"""torch_npu's attention functions of Ascend Transformer Boost (ATB), computed by npu_fused_infer_attention_score.

The functions write their result to an output tensor that the caller passes.
"""

from collections.abc import Callable

import numpy as np
import torch

from fusion_attention.contract import Op
from fusion_attention.npu.auxiliary.atb_attention_helpers import MASK_ALONE, attend, causal, ends_of, one_each, read
from fusion_attention.npu.auxiliary.call import checked
from fusion_attention.npu.functions_from_definitions import Args, from_record
from fusion_attention.ops.auxiliary_definitions import atb


def _masked(args: Args) -> Args:
    """Returns the arguments with `mask` converted from the NPU's tiled format FRACTAL_NZ to a row-major matrix."""
    return {**args, "mask": atb.in_rows(args["mask"])}


def _keys(args: Args) -> tuple[torch.Tensor, torch.Tensor]:
    return args["key"], args["value"]


def _pages(args: Args) -> tuple[torch.Tensor, torch.Tensor]:
    return args["key_cache"], args["value_cache"]


def _several_rows(op: Op, *, pages: bool = False, is_causal: bool = False) -> Callable[..., None]:
    """Returns torch_npu's function for the ATB operator that `op` defines, for sequences of several query rows. pages:
    keys are in a paged cache; False: they are packed rows. is_causal: rows see the keys up to their own token."""

    def body(args: Args) -> None:
        args = _masked(args) if is_causal else args
        ends = ends_of(op, args)
        keys, lengths = (_pages(args), args["context_lens"]) if pages else (_keys(args), ends)
        attend(op, args, keys, ends, lengths, **(causal(args["query"]) if is_causal else {}))

    body.__name__ = op.called
    return from_record(op, host=None)(body)


_npu_flash_attention_v3 = _several_rows(atb.FLASH_V3, is_causal=True)
_npu_flash_attention_unpad = _several_rows(atb.FLASH_UNPAD)
_npu_flash_attention_unpad_v2 = _several_rows(atb.FLASH_UNPAD_V2)
_npu_flash_attention_qlens = _several_rows(atb.QLENS, pages=True, is_causal=True)
_npu_paged_attention_splitfuse_v2 = _several_rows(atb.SPLITFUSE_V2, pages=True, is_causal=True)


@from_record(atb.FLASH, host=None)
def _npu_flash_attention(args: Args) -> None:
    args = _masked(args)
    ends = ends_of(atb.FLASH, args)
    attend(atb.FLASH, args, _keys(args), ends, ends, atten_mask=atb.hides(args["mask"]), sparse_mode=MASK_ALONE)


@from_record(atb.PAGED_ATTENTION, host=None)
def _npu_paged_attention(args: Args) -> None:
    checked(atb.PAGED_ATTENTION, args)
    attend(atb.PAGED_ATTENTION, args, _pages(args), one_each(args["query"]), args["context_lens"])


@from_record(atb.PAGED_WORKSPACE, host=None)
def _npu_paged_attention_get_workspace(args: Args) -> torch.Tensor:
    checked(atb.PAGED_WORKSPACE, {**args, "workspace": None})
    return args["query"].new_empty(0)


@from_record(atb.PAGED_MLA, host=None)
def _npu_paged_attention_mla(args: Args) -> None:
    checked(atb.PAGED_MLA, args)
    both = args["key_cache"], args["key_cache"][..., : args["mla_vheadsize"]]
    attend(atb.PAGED_MLA, args, both, one_each(args["query"]), args["context_lens"])


@from_record(atb.SPLITFUSE, host=None)
def _npu_paged_attention_splitfuse(args: Args) -> None:
    args = _masked(args)
    ends = ends_of(atb.SPLITFUSE, args)
    rows = read(atb.SPLITFUSE, args["seq_len"])
    most = int(rows.max(initial=0))
    line = np.minimum((ends - rows)[:, None] + np.arange(most), max(len(args["query"]) - 1, 0))
    hidden = atb.hides(args["mask"])[torch.from_numpy(line).to(args["mask"].device)]
    mask_alone = {"atten_mask": hidden, "sparse_mode": MASK_ALONE}
    attend(atb.SPLITFUSE, args, _pages(args), ends, args["context_lens"], **mask_alone)
