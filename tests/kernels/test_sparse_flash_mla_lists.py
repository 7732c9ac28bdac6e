"""sparse_flash_mla with lists of keys under Triton's interpreter, against an independent float64 computation."""

from importlib import import_module

import torch
from support.listed_keys import computed, packed, witness

import fusion_attention as fa
from fusion_attention import npu
from fusion_attention.testing.estimated_rounding_errors import compare_with


def test_triton_sparse_flash_mla_with_key_lists_matches_reference() -> None:
    args = packed()
    dout = torch.randn_like(args["q"])
    npu.install()
    try:
        with fa.use_backend("triton"):
            got = computed(import_module("cann_ops_transformer"), args, dout)
    finally:
        npu.uninstall()
    compare_with("triton", got, lambda: witness(args, dout))
