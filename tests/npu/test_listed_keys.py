"""sparse_flash_mla with lists of keys (ori_sparse_indices): forward, gradient, pages, error texts."""

from importlib import import_module
from typing import Any

import pytest
import torch
from support.bits import same_bits
from support.listed_keys import KEYS, ROWS, computed, packed, witness

import fusion_attention as fa
from fusion_attention.testing.estimated_rounding_errors import compare_with


@pytest.fixture
def cann(torch_npu: Any) -> Any:
    return import_module("cann_ops_transformer")


def test_listed_keys_output_and_gradients_match_reference(cann: Any) -> None:
    """Lists have repeated entries, entries after the count, and no entries; rows without keys return 0."""
    args = packed()
    dout = torch.randn_like(args["q"])
    got = {}
    for backend in ("cpu", "golden"):
        with fa.use_backend(backend):
            out, lse, dq, *_ = got[backend] = computed(cann, args, dout)
        assert not any(rows[3:5].any() for rows in (out, lse[0], dq))
    compare_with("listed keys", got, lambda: dict.fromkeys(got, witness(args, dout)))


def test_results_with_padded_or_paged_keys_bitwise_equal_packed_keys(cann: Any) -> None:
    args = packed()
    args["ori_kv"] = args["ori_kv"].nan_to_num()
    want, _ = cann.sparse_flash_mla(**args)
    first = torch.tensor([0, *KEYS]).cumsum(0)
    room, used = max(KEYS), {"seqused_ori_kv": torch.tensor(KEYS)}
    kv = torch.full((3, room, 1, 16), torch.nan)
    pages, table = torch.full((7, 4, 1, 16), torch.nan), torch.tensor([[6, 1, 0], [2, 4, 0], [5, 0, 3]]).int()
    for b, keys in enumerate(KEYS):
        kv[b, :keys] = args["ori_kv"][first[b] : first[b + 1]]
        for token in range(keys):
            pages[table[b, token // 4], token % 4] = kv[b, token]
    paged = {**args, "ori_kv": pages, "ori_block_table": table, "layout_kv": "PA_BBND", "cu_seqlens_ori_kv": None}
    same_bits(cann.sparse_flash_mla(**paged, **used)[0], want, "pages")
    start = torch.tensor([0, *ROWS]).cumsum(0)
    padded = {"sinks": args["sinks"], "softmax_scale": args["softmax_scale"], "ori_kv": kv, **used}
    for name in ("q", "ori_sparse_indices", "ori_topk_length"):
        t = args[name]
        padded[name] = torch.stack([torch.cat((t[s : s + n], t[:1].expand(4 - n, *t.shape[1:])))
                                    for s, n in zip(start, ROWS, strict=False)])  # fmt: skip
    out, _ = cann.sparse_flash_mla(**padded, seqused_q=torch.tensor(ROWS))
    same_bits(torch.cat([out[b, :n] for b, n in enumerate(ROWS)]), want, "padded")


def test_key_lists_without_topk_length_end_at_first_minus_one(cann: Any) -> None:
    args = packed()
    slot = torch.arange(6)
    lists = args["ori_sparse_indices"].masked_fill(slot >= args["ori_topk_length"][..., None], -1)
    without = {**args, "ori_sparse_indices": lists.long(), "ori_topk_length": None}
    same_bits(cann.sparse_flash_mla(**without)[0], cann.sparse_flash_mla(**args)[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ori_mask_mode": 3}, r"ori_mask_mode: expected 0 beside ori_sparse_indices"),
        ({"ori_topk_length": torch.ones(7, 2).int()}, r"ori_topk_length: expected axis 1 to be N2=1"),
        ({"ori_sparse_indices": torch.full((7, 1, 6), 7).int()}, r"got 7 at batch 0, row 0, slot 0, outside \[-1, 7\)"),
    ],
)
def test_invalid_listed_keys_call_error_names_parameter(change: dict[str, Any], message: str, cann: Any) -> None:
    with pytest.raises(fa.ContractError, match=message):
        cann.sparse_flash_mla(**{**packed(), **change})
