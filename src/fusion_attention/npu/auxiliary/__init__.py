"""torch_npu's auxiliary functions of models (norms, rotary embedding, caches, experts, ...), computed by torch."""
