"""torch_npu's attention by the names of the chip's transformer library (ATB), which writes what it is given.

What computes is npu_fused_infer_attention_score.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch

from fusion_attention.npu.auxiliary.atb_call import MASK_ALONE, attend, causal, ends_of, one_each, read
from fusion_attention.npu.auxiliary.call import checked
from fusion_attention.ops.auxiliary import atb

__all__ = [
    "_npu_flash_attention",
    "_npu_flash_attention_qlens",
    "_npu_flash_attention_unpad",
    "_npu_flash_attention_unpad_v2",
    "_npu_flash_attention_v3",
    "_npu_paged_attention",
    "_npu_paged_attention_get_workspace",
    "_npu_paged_attention_mla",
    "_npu_paged_attention_splitfuse",
    "_npu_paged_attention_splitfuse_v2",
]

Tensor = torch.Tensor


def _npu_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    seq_len: Tensor,
    scale_value: float,
    num_heads: int,
    num_kv_heads: int,
    out: Annotated[Tensor, "a!"],
) -> None:
    """Attention of packed rows under a mask.

    out = softmax(scale_value * Q K^T over the keys that a mask leaves of its own sequence) V

    Args:
        query: [T, N1, D]; float16, bfloat16 or float32. key, value: [T, N2, D], [T, N2, Dv].
        mask: 1, or -1000 and below, hides a key, 0 leaves it: [S, S] for all sequences, or [B, S, S]; in
            FRACTAL_NZ by hand [B or 1, S / 16, S, 16], as every mask here may be.
        seq_len: rows of every sequence.
        scale_value: factor on the scores.
        num_heads, num_kv_heads: N1, N2.
        out: [T, N1, Dv]; written. Rows behind the last sequence stay as they are.

    Raises:
        ContractError: a call that `fusion-attention ops _npu_flash_attention` does not allow.

    Source: Ascend op-plugin, _npu_flash_attention.

    Example:
        >>> q, k, out = torch.randn(5, 4, 16), torch.randn(5, 2, 16), torch.zeros(5, 4, 16)
        >>> _npu_flash_attention(q, k, k, torch.ones(3, 3).triu(1), torch.tensor([2, 3]), 0.25, 4, 2, out)
        >>> torch.allclose(out[0, 0], k[0, 0])
        True
    """
    mask = atb.in_rows(mask)
    given = {
        "query": query, "key": key, "value": value, "mask": mask, "seq_len": seq_len, "scale_value": scale_value,
        "num_heads": num_heads, "num_kv_heads": num_kv_heads, "out": out,
    }  # fmt: skip
    ends = ends_of(atb.FLASH, given)
    attend(atb.FLASH, given, (key, value), ends, ends, atten_mask=atb.hides(mask), sparse_mode=MASK_ALONE)


def _npu_flash_attention_v3(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    seq_len: Tensor,
    scale_value: float,
    num_heads: int,
    num_kv_heads: int,
    *,
    mask_type: int | None = 3,
    out: Annotated[Tensor, "a!"],
) -> None:
    """Causal attention of packed rows.

    out = softmax(scale_value * Q K^T over the keys that its own sequence has up to the row itself) V

    Args:
        mask: torch.ones(S, S).triu(1) of any S.
        mask_type: 3.
        all others: as in _npu_flash_attention.

    Raises:
        ContractError: a call that `fusion-attention ops _npu_flash_attention_v3` does not allow.

    Source: Ascend op-plugin, _npu_flash_attention_v3.

    Example:
        >>> q, k, out = torch.randn(5, 4, 16), torch.randn(5, 2, 16), torch.zeros(5, 4, 16)
        >>> _npu_flash_attention_v3(q, k, k, torch.ones(128, 128).triu(1), torch.tensor([2, 3]), 0.25, 4, 2, out=out)
        >>> torch.allclose(out[2, 0], k[2, 0])
        True
    """
    mask = atb.in_rows(mask)
    given = {
        "query": query, "key": key, "value": value, "mask": mask, "seq_len": seq_len, "scale_value": scale_value,
        "num_heads": num_heads, "num_kv_heads": num_kv_heads, "mask_type": mask_type, "out": out,
    }  # fmt: skip
    ends = ends_of(atb.FLASH_V3, given)
    attend(atb.FLASH_V3, given, (key, value), ends, ends, **causal(query))


def _npu_flash_attention_unpad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seq_len: Tensor,
    scale_value: float,
    num_heads: int,
    num_kv_heads: int,
    out: Annotated[Tensor, "a!"],
) -> None:
    """Attention of packed rows, each to all keys of its own sequence.

    out = softmax(scale_value * Q K^T over the keys that its own sequence has) V

    Args:
        all: as in _npu_flash_attention.

    Raises:
        ContractError: a call that `fusion-attention ops _npu_flash_attention_unpad` does not allow.

    Source: Ascend op-plugin, _npu_flash_attention_unpad.

    Example:
        >>> q, k, out = torch.randn(5, 4, 16), torch.randn(5, 2, 16), torch.zeros(5, 4, 16)
        >>> _npu_flash_attention_unpad(q, k, k, torch.tensor([1, 4]), 0.25, 4, 2, out)
        >>> torch.allclose(out[0, 0], k[0, 0])
        True
    """
    given = {
        "query": query, "key": key, "value": value, "seq_len": seq_len, "scale_value": scale_value,
        "num_heads": num_heads, "num_kv_heads": num_kv_heads, "out": out,
    }  # fmt: skip
    ends = ends_of(atb.FLASH_UNPAD, given)
    attend(atb.FLASH_UNPAD, given, (key, value), ends, ends)


def _npu_flash_attention_unpad_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seq_len: Tensor,
    scale_value: float,
    num_heads: int,
    num_kv_heads: int,
    *,
    kernel_type: int | None = 0,
    out: Annotated[Tensor, "a!"],
) -> None:
    """_npu_flash_attention_unpad with a choice of the chip's kernel.

    out = softmax(scale_value * Q K^T over the keys that its own sequence has) V

    Args:
        kernel_type: 0, or 2 (the exponential of which is an approximation on the chip); both mean the same here.
        all others: as in _npu_flash_attention.

    Raises:
        ContractError: a call that `fusion-attention ops _npu_flash_attention_unpad_v2` does not allow.

    Source: Ascend op-plugin, _npu_flash_attention_unpad_v2.

    Example:
        >>> q, k, out = torch.randn(5, 4, 16), torch.randn(5, 2, 16), torch.zeros(5, 4, 16)
        >>> _npu_flash_attention_unpad_v2(q, k, k, torch.tensor([1, 4]), 0.25, 4, 2, kernel_type=2, out=out)
        >>> torch.allclose(out[0, 0], k[0, 0])
        True
    """
    given = {
        "query": query, "key": key, "value": value, "seq_len": seq_len, "scale_value": scale_value,
        "num_heads": num_heads, "num_kv_heads": num_kv_heads, "kernel_type": kernel_type, "out": out,
    }  # fmt: skip
    ends = ends_of(atb.FLASH_UNPAD_V2, given)
    attend(atb.FLASH_UNPAD_V2, given, (key, value), ends, ends)


def _npu_flash_attention_qlens(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    mask: Tensor,
    seq_len: Tensor,
    context_lens: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    out: Annotated[Tensor, "a!"],
) -> None:
    """Causal attention of the last rows of sequences whose keys lie in pages.

    out = softmax(scale_value * Q K^T over the keys that its own sequence has up to the row itself) V

    Args:
        query: [T, N1, D], the rows of all sequences end to end.
        key_cache, value_cache: [pages, slots, N2, D], [pages, slots, N2, Dv].
        block_table: [B, M], the pages of every sequence.
        mask: torch.ones(S, S).triu(1) of any S.
        seq_len: rows of every sequence. context_lens: its keys, with those of its own rows.
        all others: as in _npu_flash_attention.

    Raises:
        ContractError: a call that `fusion-attention ops _npu_flash_attention_qlens` does not allow.

    Source: Ascend op-plugin, _npu_flash_attention_qlens.

    Example:
        >>> pages, q, out = torch.randn(4, 16, 2, 16), torch.randn(3, 4, 16), torch.zeros(3, 4, 16)
        >>> table, rows, keys = torch.tensor([[2, 0], [1, 3]]), torch.tensor([1, 2]), torch.tensor([1, 20])
        >>> _npu_flash_attention_qlens(
        ...     q, pages, pages, table, torch.ones(128, 128).triu(1), rows, keys, 2, 4, 0.25, out)
        >>> torch.allclose(out[0, 0], pages[2, 0, 0])
        True
    """
    mask = atb.in_rows(mask)
    given = {
        "query": query, "key_cache": key_cache, "value_cache": value_cache, "block_table": block_table,
        "mask": mask, "seq_len": seq_len, "context_lens": context_lens, "num_kv_heads": num_kv_heads,
        "num_heads": num_heads, "scale_value": scale_value, "out": out,
    }  # fmt: skip
    ends = ends_of(atb.QLENS, given)
    attend(atb.QLENS, given, (key_cache, value_cache), ends, context_lens, **causal(query))


def _npu_paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: Tensor,
    context_lens: Tensor,
    out: Annotated[Tensor, "a!"],
    *,
    workspace: Tensor | None = None,
) -> None:
    """Attention of one row of every sequence over keys in pages.

    out = softmax(scale_value * Q K^T over the keys that its own sequence has) V

    Args:
        query: [B, N1, D].
        context_lens: keys of every sequence; one without keys gives zeros.
        workspace: not used.
        all others: as in _npu_flash_attention_qlens.

    Raises:
        ContractError: a call that `fusion-attention ops _npu_paged_attention` does not allow.

    Source: Ascend op-plugin, _npu_paged_attention.

    Example:
        >>> pages, q, out = torch.randn(4, 16, 2, 16), torch.randn(2, 4, 16), torch.zeros(2, 4, 16)
        >>> table, keys = torch.tensor([[2, 0], [1, 3]]), torch.tensor([1, 20])
        >>> _npu_paged_attention(q, pages, pages, 2, 4, 0.25, table, keys, out)
        >>> torch.allclose(out[0, 0], pages[2, 0, 0])
        True
    """
    given = {
        "query": query, "key_cache": key_cache, "value_cache": value_cache, "num_kv_heads": num_kv_heads,
        "num_heads": num_heads, "scale_value": scale_value, "block_table": block_table,
        "context_lens": context_lens, "out": out, "workspace": workspace,
    }  # fmt: skip
    checked(atb.PAGED_ATTENTION, given)
    attend(atb.PAGED_ATTENTION, given, (key_cache, value_cache), one_each(query), context_lens)


def _npu_paged_attention_get_workspace(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: Tensor,
    context_lens: Tensor,
    out: Tensor,
) -> Tensor:
    """The workspace of _npu_paged_attention: a tensor without elements.

    This library plans its own memory; what is wrong with the call is said here already.

    Args:
        all: as in _npu_paged_attention.

    Returns:
        A tensor without elements, as query.

    Raises:
        ContractError: a call that `fusion-attention ops _npu_paged_attention_get_workspace` does not allow.

    Source: Ascend op-plugin, _npu_paged_attention_get_workspace.

    Example:
        >>> pages, q = torch.randn(4, 16, 2, 16), torch.randn(2, 4, 16)
        >>> table, keys = torch.tensor([[2, 0], [1, 3]]), torch.tensor([1, 20])
        >>> _npu_paged_attention_get_workspace(q, pages, pages, 2, 4, 0.25, table, keys, torch.zeros(2, 4, 16)).numel()
        0
    """
    checked(atb.PAGED_WORKSPACE, {
        "query": query, "key_cache": key_cache, "value_cache": value_cache, "num_kv_heads": num_kv_heads,
        "num_heads": num_heads, "scale_value": scale_value, "block_table": block_table,
        "context_lens": context_lens, "out": out,
        "workspace": None
    })  # fmt: skip
    return query.new_empty(0)


def _npu_paged_attention_mla(
    query: Tensor,
    key_cache: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: Tensor,
    context_lens: Tensor,
    mla_vheadsize: int,
    out: Annotated[Tensor, "a!"],
) -> None:
    """Attention of one row of every sequence over pages of latents, whose first part is the value.

    out = softmax(scale_value * Q K^T over the keys that its own sequence has) V

    Args:
        key_cache: [pages, slots, N2, D].
        mla_vheadsize: Dv; value is the first Dv elements of a key.
        all others: as in _npu_paged_attention.

    Raises:
        ContractError: a call that `fusion-attention ops _npu_paged_attention_mla` does not allow.

    Source: Ascend op-plugin, _npu_paged_attention_mla.

    Example:
        >>> pages, q, out = torch.randn(4, 16, 1, 16), torch.randn(2, 4, 16), torch.zeros(2, 4, 12)
        >>> table, keys = torch.tensor([[2, 0], [1, 3]]), torch.tensor([1, 20])
        >>> _npu_paged_attention_mla(q, pages, 1, 4, 0.25, table, keys, 12, out)
        >>> torch.allclose(out[0, 0], pages[2, 0, 0, :12])
        True
    """
    given = {
        "query": query, "key_cache": key_cache, "num_kv_heads": num_kv_heads, "num_heads": num_heads,
        "scale_value": scale_value, "block_table": block_table, "context_lens": context_lens,
        "mla_vheadsize": mla_vheadsize, "out": out,
    }  # fmt: skip
    checked(atb.PAGED_MLA, given)
    both = key_cache, key_cache[..., :mla_vheadsize]
    attend(atb.PAGED_MLA, given, both, one_each(query), context_lens)


def _npu_paged_attention_splitfuse(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    mask: Tensor,
    seq_len: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    out: Annotated[Tensor, "a!"],
) -> None:
    """Attention of the last rows of sequences whose keys lie in pages, under a mask.

    out = softmax(scale_value * Q K^T over the keys that a mask leaves of its own sequence) V

    Args:
        mask: [T, keys of the longest sequence or more]; 1, or -1000 and below, hides a key, 0 leaves it.
        all others: as in _npu_flash_attention_qlens.

    Raises:
        ContractError: a call that `fusion-attention ops _npu_paged_attention_splitfuse` does not allow.

    Source: Ascend op-plugin, _npu_paged_attention_splitfuse.

    Example:
        >>> pages, q, out = torch.randn(4, 16, 2, 16), torch.randn(3, 4, 16), torch.zeros(3, 4, 16)
        >>> table, rows, keys = torch.tensor([[2, 0], [1, 3]]), torch.tensor([1, 2]), torch.tensor([1, 20])
        >>> mask = torch.zeros(3, 20)
        >>> mask[1, 19] = -10000  # of two rows the first does not see the last key
        >>> _npu_paged_attention_splitfuse(q, pages, pages, table, keys, mask, rows, 2, 4, 0.25, out)
        >>> torch.allclose(out[0, 0], pages[2, 0, 0])
        True
    """
    mask = atb.in_rows(mask)
    given = {
        "query": query, "key_cache": key_cache, "value_cache": value_cache, "block_table": block_table,
        "context_lens": context_lens, "mask": mask, "seq_len": seq_len, "num_kv_heads": num_kv_heads,
        "num_heads": num_heads, "scale_value": scale_value, "out": out,
    }  # fmt: skip
    ends = ends_of(atb.SPLITFUSE, given)
    rows = read(atb.SPLITFUSE, seq_len)
    most = int(rows.max(initial=0))
    line = np.minimum((ends - rows)[:, None] + np.arange(most), max(len(query) - 1, 0))
    hidden = atb.hides(mask)[torch.from_numpy(line).to(mask.device)]
    mask_alone = {"atten_mask": hidden, "sparse_mode": MASK_ALONE}
    attend(atb.SPLITFUSE, given, (key_cache, value_cache), ends, context_lens, **mask_alone)


def _npu_paged_attention_splitfuse_v2(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    mask: Tensor,
    seq_len: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    *,
    mask_type: int | None = 5,
    out: Annotated[Tensor, "a!"],
) -> None:
    """Causal attention of the last rows of sequences whose keys lie in pages, by a compressed mask.

    out = softmax(scale_value * Q K^T over the keys that its own sequence has up to the row itself) V

    Args:
        mask: torch.ones(S, S).triu(1) of any S.
        mask_type: 5.
        all others: as in _npu_flash_attention_qlens.

    Raises:
        ContractError: a call that `fusion-attention ops _npu_paged_attention_splitfuse_v2` does not allow.

    Source: Ascend op-plugin, _npu_paged_attention_splitfuse_v2.

    Example:
        >>> pages, q, out = torch.randn(4, 16, 2, 16), torch.randn(3, 4, 16), torch.zeros(3, 4, 16)
        >>> table, rows, keys = torch.tensor([[2, 0], [1, 3]]), torch.tensor([1, 2]), torch.tensor([1, 20])
        >>> mask = torch.ones(128, 128).triu(1)
        >>> _npu_paged_attention_splitfuse_v2(q, pages, pages, table, keys, mask, rows, 2, 4, 0.25, out=out)
        >>> torch.allclose(out[0, 0], pages[2, 0, 0])
        True
    """
    mask = atb.in_rows(mask)
    given = {
        "query": query, "key_cache": key_cache, "value_cache": value_cache, "block_table": block_table,
        "context_lens": context_lens, "mask": mask, "seq_len": seq_len, "num_kv_heads": num_kv_heads,
        "num_heads": num_heads, "scale_value": scale_value, "mask_type": mask_type, "out": out,
    }  # fmt: skip
    ends = ends_of(atb.SPLITFUSE_V2, given)
    attend(atb.SPLITFUSE_V2, given, (key_cache, value_cache), ends, context_lens, **causal(query))


# ---------------------------------------------------------------------------------------------------------- what calls
